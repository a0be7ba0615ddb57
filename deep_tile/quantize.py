"""Casts to FP8 with one FP32 scale per 1x128 (activations) or 128x128 (weights) block, and back.

Called by users, tests and benchmarks; plain torch, on any device. Invariant: for finite `x`, either cast
followed by `dequantize` gives `x` back to within e4m3's rounding at its block's scale; nothing saturates.
"""

import torch
import torch.nn.functional as F

from deep_tile.config import SCALE_BLOCK, ceil_div, round_up

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max  # 448
SMALLEST_AMAX_FLOOR = FP8_MAX * torch.finfo(torch.float32).tiny
SOURCE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

TOKEN_BLOCK = (1, SCALE_BLOCK)
"""Rows and columns that share one scale of `a`."""
WEIGHT_BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
"""Rows and columns that share one scale of `b`."""

SCALE_LAYOUTS = ("row", "m", "m_aligned")


def per_token_cast_to_fp8(
    x: torch.Tensor, *, scale_layout: str = "row", amax_floor: float = 1e-4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations: one scale per row and 128 columns.

    Args:
        x: [m, k], float64, float32, float16 or bfloat16, any strides and any k (the last group may be short). It is
            converted to FP32 first.
        scale_layout: memory order of the scale. "row": stride (k_groups, 1). "m": stride (1, m). "m_aligned": stride
            (1, m rounded up to 4), which TMA needs; the padding holds zeros.
        amax_floor: lower bound of a group's largest magnitude, so that an all-zero group keeps a usable scale. 1e-4 is
            DeepGEMM's, 1e-10 vLLM's and SGLang's. At least 448 times FP32's smallest normal number, about 5.3e-36.

    Returns:
        The contiguous [m, k] float8_e4m3fn tensor and its FP32 scale [m, k_groups], `k_groups = ceil(k / 128)`, where
        scale = max(largest magnitude of the group, amax_floor) / 448.

    A group that holds NaN or infinity becomes NaN throughout when it is dequantised or multiplied; no other group
    changes.

    Raises:
        TypeError: `x` is not a tensor of a listed dtype.
        ValueError: `x` is not 2-D, `scale_layout` is unknown or `amax_floor` out of range.
    """
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f"scale_layout is {scale_layout!r}; use one of {', '.join(map(repr, SCALE_LAYOUTS))}")
    quantized, scale = _quantize("x", x, TOKEN_BLOCK, amax_floor)
    return quantized, _lay_out(scale, scale_layout)


def per_block_cast_to_fp8(w: torch.Tensor, *, amax_floor: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights: one scale per 128 rows and 128 columns.

    Args:
        w: [n, k], float64, float32, float16 or bfloat16, any strides, any n and k (edge blocks may be short). It is
            converted to FP32 first.
        amax_floor: as for `per_token_cast_to_fp8`.

    Returns:
        The contiguous [n, k] float8_e4m3fn tensor and its contiguous FP32 scale [ceil(n / 128), ceil(k / 128)].
        A block that holds NaN or infinity becomes NaN throughout; no other block changes.

    Raises:
        TypeError: `w` is not a tensor of a listed dtype.
        ValueError: `w` is not 2-D or `amax_floor` out of range.
    """
    return _quantize("w", w, WEIGHT_BLOCK, amax_floor)


def dequantize(x: torch.Tensor, scale: torch.Tensor, *, block: tuple[int, int] | None = None) -> torch.Tensor:
    """Multiply every FP8 element by its block's scale.

    Args:
        x: [rows, k] float8_e4m3fn, any strides.
        scale: FP32, any strides: [rows, ceil(k / 128)] for 1x128 blocks, [ceil(rows / 128), ceil(k / 128)] for
            128x128 blocks.
        block: (1, 128) or (128, 128) to insist on one kind of scale. Left out, the scale's shape decides; it fits both
            kinds only when `x` has one row or none, where both mean the same.

    Returns:
        A contiguous FP32 tensor [rows, k].

    Raises:
        TypeError: `x` is not float8_e4m3fn or `scale` not float32.
        ValueError: `x` is not 2-D, `block` is unknown, or the scale's shape does not fit.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != FP8_DTYPE:
        raise TypeError(f"x is {_kind(x)}; dequantize takes a float8_e4m3fn tensor")
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"scale is {_kind(scale)}; dequantize takes a float32 tensor, one value per block")
    _require_matrix("x", x)
    block_rows = _find_block(x, scale, block)[0]
    blocks = _to_blocks(x.float(), block_rows)
    return _from_blocks(blocks * scale[:, None, :, None], x.shape)


def _quantize(
    name: str, x: torch.Tensor, block: tuple[int, int], amax_floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(x, torch.Tensor) or x.dtype not in SOURCE_DTYPES:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in SOURCE_DTYPES)
        raise TypeError(f"{name} is {_kind(x)}; the cast takes a tensor of {wanted}")
    _require_matrix(name, x)
    if not SMALLEST_AMAX_FLOOR <= amax_floor < float("inf"):
        raise ValueError(
            f"amax_floor is {amax_floor}; it must be finite and at least {SMALLEST_AMAX_FLOOR:.2g}, "
            "or an all-zero block would be divided by zero"
        )
    blocks = _to_blocks(x.float(), block[0])
    scale = blocks.abs().amax((1, 3)).clamp(min=amax_floor) / FP8_MAX
    # Divided, not multiplied by a reciprocal: the largest element of a block lands on 448 within one FP32 rounding.
    quantized = (blocks / scale[:, None, :, None]).to(FP8_DTYPE)
    return _from_blocks(quantized, x.shape), scale


def _to_blocks(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """[rows, k] -> [row blocks, block_rows, k groups, 128], zero-padded: zeros change no block's largest magnitude."""
    rows, k = x.shape
    padded = F.pad(x, (0, -k % SCALE_BLOCK, 0, -rows % block_rows))
    return padded.reshape(ceil_div(rows, block_rows), block_rows, ceil_div(k, SCALE_BLOCK), SCALE_BLOCK)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    row_blocks, block_rows, groups, width = blocks.shape
    rows, k = shape
    return blocks.reshape(row_blocks * block_rows, groups * width)[:rows, :k].contiguous()


def _lay_out(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in the memory order that `layout` names."""
    if layout == "row":
        return scale
    m, groups = scale.shape
    rows = round_up(m, 4) if layout == "m_aligned" else m
    return scale.new_zeros(groups, rows).t()[:m].copy_(scale)


def _find_block(x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    if block not in (None, TOKEN_BLOCK, WEIGHT_BLOCK):
        raise ValueError(f"block is {block!r}; use {TOKEN_BLOCK}, {WEIGHT_BLOCK} or None")
    allowed = (TOKEN_BLOCK, WEIGHT_BLOCK) if block is None else (block,)
    shapes = {kind: tuple(map(ceil_div, x.shape, kind)) for kind in allowed}
    for kind, shape in shapes.items():
        if scale.shape == shape:
            return kind
    wanted = " or ".join(f"{list(shape)} (blocks of {kind[0]}x{kind[1]})" for kind, shape in shapes.items())
    raise ValueError(
        f"scale has shape {list(scale.shape)}; for x of shape {list(x.shape)} it must be {wanted}. "
        "Transpose a scale that is stored the other way round with .t(); strides are free"
    )


def _require_matrix(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be 2-D, so flatten leading dimensions first")


def _kind(x: object) -> str:
    return f"a tensor of {str(x.dtype).removeprefix('torch.')}" if isinstance(x, torch.Tensor) else f"a {type(x)}"
