"""What a cast by rows is of, where that is not every row of a tensor: rows by an index, living rows, `silu_mul`.

Called by quantize.py and experts.py. Checks the tensors that say so, and defines in plain torch what the kernels of
include/deep_tile/experts.cuh compute. Invariant: every definition here is a sequence of operations of which each is
rounded as IEEE wants it, so that kernels and all of torch's devices give the same bits.
"""

from collections.abc import Mapping
from ctypes import c_float
from math import e, inf, isfinite, log2
from numbers import Real
from typing import NamedTuple

import torch

from deep_tile import ops, tensors
from deep_tile.params import MOST_CAST_GROUPS

Lists = Mapping[str, torch.Tensor]
"""By argument, those of "rows", "offs" and "counts" that a call was given, in this order; described at
`per_token_cast_to_fp8`."""

INDEX_DTYPES = (torch.int32, torch.int64)


class Gating(NamedTuple):
    """The numbers of `silu_mul`, of FP32; `limit` is infinite where there is none."""

    limit: float
    alpha: float
    beta: float

    @property
    def sigmoid_factor(self) -> float:
        """sigmoid(alpha * x) is 1 / (1 + 2**(sigmoid_factor * x))."""
        return c_float(-self.alpha * log2(e)).value


def gating(limit: float | None, alpha: float, beta: float) -> Gating:
    """Raises TypeError for what is no number, ValueError for one that is out of range."""
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
    """gate * sigmoid(alpha * gate) * (up + beta) of FP32 [..., 2k], whose first half is gate; [..., k].

    The sigmoid is within 1e-6 of its value, relatively, plus 1e-7 for every unit of alpha * gate; below 2**-126 it is
    0.
    """
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=numbers.limit), up.clamp(-numbers.limit, numbers.limit)
    power = _exp2((gate * numbers.sigmoid_factor).clamp(-126, 127))
    return gate * _normal_reciprocal(1 + power) * (up + numbers.beta)


_EXP2_COEFFICIENTS = tuple(
    map(float.fromhex, ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0"))
)
"""Of powers 5 to 0: least squares of 2**x over -0.5 to 0.5, weighted until the largest relative errors were alike."""

_INTEGERS = 1.5 * 2.0**23
"""A sum with it is rounded to an integer, which its last bits hold."""


def _exp2(y: torch.Tensor) -> torch.Tensor:
    """2**y for -126 to 127, within 1.7e-7, relatively; below -125 it may be anything tiny."""
    shifted = y + _INTEGERS
    x = y - (shifted - _INTEGERS)
    power = torch.full_like(x, _EXP2_COEFFICIENTS[0])
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        power = _fma(power, x, coefficient)
    return (power.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def _fma(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """a * b + c of FP32, rounded once: summed in float64, there rounded to odd, which no second rounding can tell from
    the exact sum (Boldo and Melquiond, 2008)."""
    product = a.double() * b.double()
    total = product + c
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    is_even = total.view(torch.int64) & 1 == 0
    towards = torch.where(error > 0, inf, -inf).double()
    return torch.where((error != 0) & is_even, total.nextafter(towards), total).float()


def _normal_reciprocal(x: torch.Tensor) -> torch.Tensor:
    return (torch.ones_like(x) / x).masked_fill(x > 2.0**126, 0)


def gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix `x` by an index; zeros where there is no such row."""
    if not len(x):
        return x.new_zeros(len(index), x.shape[1])
    exists = (index >= 0) & (index < len(x))
    rows = x.index_select(0, index.clamp(0, len(x) - 1))
    return torch.where(exists[:, None], rows, torch.zeros_like(rows))


def living(rows: int, lists: Lists) -> torch.Tensor | None:
    """Which of this many rows live, as bool; None where all do."""
    if "offs" in lists:
        offs = lists["offs"]
        return torch.arange(rows, device=offs.device) < offs[-1]
    if "counts" in lists and rows:
        counts = lists["counts"]
        in_group = torch.arange(rows // len(counts), device=counts.device)
        return (in_group < counts[:, None]).flatten()
    return None


def result_shape(x: torch.Tensor, is_gated: bool, lists: Lists) -> tuple[int, ...]:
    """Of what is cast: `x`, or `silu_mul` of it."""
    *leading, k = x.shape
    return *(lists["rows"].shape if "rows" in lists else leading), k // 2 if is_gated else k


def check(name: str, x: torch.Tensor, numbers: Gating | None, lists: Lists) -> None:
    """Raise unless a cast can be of this; sizes and dtypes alone, so that fakes can be checked. `x` is a tensor of a
    dtype that can be cast, of one dimension at least."""
    if numbers is not None:
        _check_gate_up(name, x)
    for other, alone in (("rows", "counts"), ("offs", "counts")):
        if {other, alone} <= lists.keys():
            raise ValueError(f"{other} is given together with {alone}; pass one of them")
    for argument, given in lists.items():
        _check_list(argument, given, INDEX_DTYPES if argument == "rows" else (torch.int32,), x)
        dimensions, shape = (3, "[g, m, k]") if argument == "counts" else (2, "[m, k]")
        if x.dim() != dimensions:
            raise ValueError(f"{name} has shape {list(x.shape)}; with {argument} it must be {shape}, so .view() it so")
    if "offs" in lists and not ops.holds(lists["offs"].shape[0] > 0):
        raise ValueError("offs has shape [0]; it must hold the end of one group at least, so pass None for none")
    if "counts" in lists:
        _check_counts(lists["counts"], name, x)


def _check_gate_up(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{name} is a tensor of {_dtype(x)}; silu_mul takes bfloat16 or float16, so convert it")
    if not ops.holds(x.shape[-1] % 2 == 0):
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be [..., 2k], gates first, so pass both halves")


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
