"""Row sources for casts: rows by index, live rows of groups, `silu_mul`.

Checks these arguments and defines in plain torch what the kernels in include/deep_tile/experts.cuh compute: rows bit
for bit, `silu_mul` within its stated error.
"""

from collections.abc import Mapping
from ctypes import c_float
from math import e, inf, isfinite, log2
from numbers import Real
from typing import NamedTuple

import torch

from deep_tile import ops, tensors
from deep_tile.params import MOST_CAST_GROUPS

LISTS = ("rows", "offs", "counts")

Lists = Mapping[str, torch.Tensor]
"""The `LISTS` that a call has, by argument, in this order; described at `per_token_cast_to_fp8`."""

INDEX_DTYPES = (torch.int32, torch.int64)

GATED_DTYPES = (torch.bfloat16, torch.float16)
"""Input dtypes for `silu_mul`."""


class Gating(NamedTuple):
    """Parameters of `silu_mul` in FP32; `limit` is infinite if unset."""

    limit: float
    alpha: float
    beta: float

    @property
    def sigmoid_factor(self) -> float:
        """sigmoid(alpha * x) is 1 / (1 + 2**(sigmoid_factor * x))."""
        return c_float(-self.alpha * log2(e)).value


def gating(limit: float | None, alpha: float, beta: float) -> Gating:
    """Raises TypeError for a non-number, ValueError for one out of range."""
    for name, value in (("limit", 1.0 if limit is None else limit), ("alpha", alpha), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass a number")
    if limit is not None and not c_float(limit).value > 0:
        raise ValueError(f"limit is {limit}; it must be positive, or None for no limit")
    # 0.0 is added for numbers that are equal to be the same: -0.0 is none.
    made = Gating(inf if limit is None else c_float(limit).value, c_float(alpha).value + 0.0, c_float(beta).value + 0.0)
    for name, value in (("alpha", made.sigmoid_factor), ("beta", made.beta)):
        if not isfinite(value):
            raise ValueError(f"{name} is {alpha if name == 'alpha' else beta}; it must be finite, also in float32")
    return made


def silu_mul(x: torch.Tensor, numbers: Gating) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) for FP32 [..., 2k], gate first; returns [..., k].

    A kernel and each of torch's devices have their own exponential. Each result is within a relative 1e-6 of the
    formula, plus 2e-7 per unit of alpha * gate; a sigmoid below about 2**-126 is 0.
    """
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=numbers.limit), up.clamp(-numbers.limit, numbers.limit)
    sigmoid = (1 + torch.exp2(gate * numbers.sigmoid_factor)).reciprocal()
    return gate * sigmoid.masked_fill(sigmoid < 2.0**-126, 0) * (up + numbers.beta)


def gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of matrix `x` by index; zeros for invalid ones."""
    if not len(x):
        return x.new_zeros(len(index), x.shape[1])
    exists = (index >= 0) & (index < len(x))
    rows = x.index_select(0, index.clamp(0, len(x) - 1))
    return torch.where(exists[:, None], rows, torch.zeros_like(rows))


def living(rows: int, lists: Lists) -> torch.Tensor | None:
    """Live rows as bool; None if all live."""
    if "offs" in lists:
        offs = lists["offs"]
        return torch.arange(rows, device=offs.device) < offs[-1]
    if "counts" in lists and rows:
        counts = lists["counts"]
        in_group = torch.arange(rows // len(counts), device=counts.device)
        return (in_group < counts[:, None]).flatten()
    return None


def result_shape(x: torch.Tensor, is_gated: bool, lists: Lists) -> tuple[int, ...]:
    """Shape of the cast's input: `x`, or its `silu_mul`."""
    *leading, k = x.shape
    return *(lists["rows"].shape if "rows" in lists else leading), k // 2 if is_gated else k


def check_lists(x: torch.Tensor, lists: Lists) -> None:
    """Raise unless they are integer lists on x's device."""
    for argument, given in lists.items():
        _check_list(argument, given, INDEX_DTYPES if argument == "rows" else (torch.int32,), x)


def check(name: str, x: torch.Tensor, is_gated: bool, lists: Lists) -> None:
    """Raise unless a cast supports these, by sizes and dtypes only, so that fakes can be checked. `x` has a castable
    dtype and at least one dimension."""
    if is_gated and not ops.holds(x.shape[-1] % 2 == 0):
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be [..., 2k], gates first, so pass both halves")
    for other, alone in (("rows", "counts"), ("offs", "counts")):
        if {other, alone} <= lists.keys():
            raise ValueError(f"{other} is given together with {alone}; pass one of them")
    check_lists(x, lists)
    for argument in lists:
        dimensions, shape = (3, "[g, m, k]") if argument == "counts" else (2, "[m, k]")
        if x.dim() != dimensions:
            raise ValueError(f"{name} has shape {list(x.shape)}; with {argument} it must be {shape}, so .view() it so")
    if "offs" in lists and not ops.holds(lists["offs"].shape[0] > 0):
        raise ValueError("offs has shape [0]; it must hold the end of one group at least, so pass None for none")
    if "counts" in lists:
        _check_counts(lists["counts"], name, x)


def _check_list(argument: str, given: object, dtypes: tuple[torch.dtype, ...], x: torch.Tensor) -> None:
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(given, torch.Tensor) or given.dtype not in dtypes:
        seen = f"a tensor of {_dtype(given)}" if isinstance(given, torch.Tensor) else f"a {type(given)}"
        raise TypeError(f"{argument} is {seen}; it must be a tensor of {wanted} on {x.device}")
    if given.dim() != 1:
        raise ValueError(f"{argument} has shape {list(given.shape)}; it must have one dimension, so .flatten() it")
    if given.device != x.device:
        raise ValueError(f"{argument} is on {given.device} but the input is on {x.device}; move it there")


def _check_counts(counts: torch.Tensor, name: str, x: torch.Tensor) -> None:
    if not ops.holds(counts.shape[0] == x.shape[0]):
        raise ValueError(
            f"counts has shape {list(counts.shape)}; for {name} of {list(x.shape)}, [g, m, k], it must be [g]"
        )
    if not ops.holds(counts.shape[0] <= MOST_CAST_GROUPS):
        raise ValueError(
            f"counts holds {counts.shape[0]} groups; at most {MOST_CAST_GROUPS} are taken, so cast in parts"
        )


def check_memory(lists: Lists) -> None:
    """Raise unless a kernel can read them."""
    if lists:
        tensors.require_plain(**lists)
    for argument, given in lists.items():
        if len(given) > 1 and given.stride(0) != 1:
            raise ValueError(f"{argument} has stride {given.stride(0)}; it must be dense. Pass {argument}.contiguous()")


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
