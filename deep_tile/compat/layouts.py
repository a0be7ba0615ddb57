"""DeepGEMM's group layouts as bounds for deep_tile's grouped GEMMs.

Nothing waits for the device.
"""

from itertools import accumulate

import torch

from deep_tile.ops import is_traced


def group_ends(m_indices: torch.Tensor, rows: int, groups: int, alignment: int) -> torch.Tensor:
    """Each group's end row, int32 [groups], from each row's group or a negative number; 0 for no rows.

    A kernel that rounds the ends up to `alignment` finds where groups begin, also behind groups without rows.

    Raises:
        TypeError, ValueError: `m_indices` is not int32 [rows]; or, on the CPU, groups are not in order.
    """
    if not isinstance(m_indices, torch.Tensor):
        raise TypeError(f"grouped_layout is a {type(m_indices).__name__}; it must be a tensor of 1 dimensions")
    if m_indices.dim() != 1:
        raise ValueError(f"grouped_layout is {list(m_indices.shape)}; it must have 1 dimensions")
    if m_indices.dtype != torch.int32 or tuple(m_indices.shape) != (rows,):
        raise ValueError(
            f"grouped_layout is {list(m_indices.shape)} of {m_indices.dtype}; for a of {rows} rows it must be [{rows}] "
            "of torch.int32, or pass use_psum_layout=True with the ends of groups"
        )
    if m_indices.device.type == "cpu" and not is_traced():
        _check_order(m_indices, groups, alignment)
    # Invalid numbers count for an extra last group, which is dropped.
    index = m_indices.clamp(-1, groups).long().remainder_(groups + 1)
    ends = torch.zeros(groups + 1, dtype=torch.int32, device=m_indices.device)
    behind = torch.arange(1, rows + 1, dtype=torch.int32, device=m_indices.device)
    return ends.scatter_reduce_(0, index, behind, "amax")[:groups]


def _check_order(m_indices: torch.Tensor, groups: int, alignment: int) -> None:
    rows = (m_indices >= 0).nonzero().flatten()
    steps = m_indices[rows].diff(prepend=m_indices.new_tensor([-1]))
    wrong = rows[(steps < 0) | (steps > 0) & (rows % alignment != 0)]
    if len(wrong) or (m_indices >= groups).any():
        where = f"row {wrong[0]}" if len(wrong) else f"a group beyond the {groups} of b"
        raise ValueError(
            f"grouped_layout is wrong at {where}: groups must stand in the order of b, each in one piece that begins "
            f"at a multiple of {alignment}. Sort the rows by group"
        )


def ends_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Group ends on the device; the host does not wait."""
    ends = torch.tensor([*accumulate(lengths)], dtype=torch.int32, device="cpu")
    return ends.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ends
