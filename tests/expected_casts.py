"""The results that casts and related kernels must give for any tensors: zeros, denormals, huge numbers, NaN, any list.

Written anew from the documented formulas, apart from deep_tile.quantize and deep_tile.experts: in float64, each step
rounded to FP32 where the formula says so. That rounds once, since float64 holds products of FP32 numbers exactly, and
of their sums and quotients more than twice FP32's bits and two more. Enqueues work on the tensors' device and does not
wait. fuzz_casts.py uses it, on either device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from deep_tile.config import SCALE_BLOCK, ceil_div, round_up

LARGEST_E4M3 = 448.0

_QUOTIENT = 2.0**-22
"""Relative error of quotients, and of rounded scales, in casts of an activation."""

_SMALLEST_SIGMOID = 2.0**-126


class Rounding(NamedTuple):
    """How a cast rounds: the lower bound of a block's amax, power-of-two scales, and division by reciprocals."""

    amax_floor: float
    pow2: bool = False
    reciprocal: bool = False


class Cast(NamedTuple):
    """Bytes of the elements [rows, k], and scales [row blocks, ceil(k / 128)]."""

    codes: torch.Tensor
    scale: torch.Tensor


def fp32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to FP32, in float64."""
    return x.float().double()


def cast(x: torch.Tensor, block_rows: int, rounding: Rounding) -> Cast:
    """Cast a matrix of any dtype; `block_rows` x 128 elements share a scale."""
    blocks = _blocks(fp32(x), block_rows)
    amax = blocks.abs().amax((1, 3))
    scale = _scale(_at_least(amax, rounding.amax_floor), rounding)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    divisor = scale[:, None, :, None]
    elements = blocks * fp32(divisor.reciprocal()) if rounding.reciprocal else blocks / divisor
    codes = elements.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return Cast(codes.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]], scale.float())


def _blocks(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """[row blocks, block_rows, column blocks, 128], filled up with zeros."""
    rows, columns = (ceil_div(size, block) for size, block in zip(x.shape, (block_rows, SCALE_BLOCK), strict=True))
    x = F.pad(x, (0, columns * SCALE_BLOCK - x.shape[1], 0, rows * block_rows - x.shape[0]))
    return x.reshape(rows, block_rows, columns, SCALE_BLOCK)


def _at_least(amax: torch.Tensor, amax_floor: float) -> torch.Tensor:
    return amax.clamp(min=torch.tensor(amax_floor, dtype=torch.float32).item())


def _scale(amax: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    if rounding.pow2:
        return _power_above(amax)
    if rounding.reciprocal:
        return fp32(amax * torch.tensor(1 / LARGEST_E4M3, dtype=torch.float32).item())
    return fp32(amax / torch.full_like(amax, LARGEST_E4M3))  # torch makes a product of a division by a number


def _power_above(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= amax / 448, from the bits of float64; 448 is 0.875 * 2^9."""
    mantissa, exponent = amax.frexp()
    exponent = exponent.long() - 9 + (mantissa > LARGEST_E4M3 / 2**9)
    return ((exponent + 1023) << 52).view(torch.float64)


def codes_differ(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which e4m3 bytes differ; NaN of either sign is equal."""
    both_nan = ((got & wanted) & 0x7F) == 0x7F
    return (got != wanted) & ~both_nan


def numbers_differ(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which numbers differ in their bits; any NaN equals any other."""
    words = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return (got.view(words) != wanted.view(words)) & ~(got.isnan() & wanted.isnan())


# Living rows.


def rows_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, zeros for those that it has not."""
    if not x.shape[0] or not x.shape[1]:
        return x.new_zeros(len(index), x.shape[1])
    there = (index >= 0) & (index < x.shape[0])
    rows = x[torch.where(there, index, 0).long()]
    return torch.where(there[:, None], rows, rows.new_zeros(()))


def living_tokens(offs: list[int], tokens: int, alignment: int) -> tuple[list[bool], list[bool]] | None:
    """Living tokens of a cast along tokens, from group ends: a flag per token and one per block of 128 tokens. None if
    the ends decrease: then a call only promises to touch no other memory."""
    ends = [max(end, 0) for end in offs]
    if ends != sorted(ends):
        return None
    lives, begin = [False] * tokens, 0
    for end in ends:
        end = min(end, tokens)
        if begin < end:
            lives[begin:end] = [True] * (end - begin)
        begin = round_up(end, alignment)
    return lives, [any(lives[first : first + SCALE_BLOCK]) for first in range(0, tokens, SCALE_BLOCK)]


# silu_mul.


class Gating(NamedTuple):
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


def silu_mul_faults(
    gate_up: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, gating: Gating, rounding: Rounding
) -> dict[str, torch.Tensor]:
    """Which scales and elements cannot result from any permitted value of the activation."""
    low, high = (_blocks(bound, 1)[:, 0] for bound in _silu_mul_bounds(gate_up, gating))
    largest = torch.maximum(-low, high).amax(2)
    smallest = torch.maximum(low, -high).clamp(min=0).amax(2)
    known, poisoned = largest.float().isfinite(), ~smallest.float().isfinite()
    least, most = (_activation_scale(_at_least(amax, rounding.amax_floor), rounding) for amax in (smallest, largest))
    wide = scale.double()
    off = ~((wide >= least * (1 - _QUOTIENT)) & (wide <= most * (1 + _QUOTIENT)))
    if rounding.pow2:
        off |= scale.frexp().mantissa != 0.5

    values = _blocks(codes.view(torch.float8_e4m3fn).float().double(), 1)[:, 0]
    beyond = torch.zeros_like(values, dtype=torch.bool)
    for bound, sign in ((low, -1), (high, 1)):
        quotient = bound / wide[..., None]
        quotient = (quotient + sign * _QUOTIENT * quotient.abs()).clamp(-LARGEST_E4M3, LARGEST_E4M3)
        nearest = quotient.float().to(torch.float8_e4m3fn).float().double()
        beyond |= ~(sign * (nearest - values) >= 0)
    beyond = torch.where(poisoned[..., None], ~values.isnan(), beyond & known[..., None])
    return {
        "codes": beyond.flatten(1)[:, : codes.shape[1]],
        "scales": torch.where(poisoned, ~scale.isnan(), off & known),
    }


def _activation_scale(amax: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    return _power_above(amax) if rounding.pow2 else amax / LARGEST_E4M3


def _silu_mul_bounds(gate_up: torch.Tensor, gating: Gating) -> tuple[torch.Tensor, torch.Tensor]:
    """Between which gate * sigmoid(alpha * gate) * (up + beta) lies."""
    limit, alpha, beta = (torch.tensor(number or 0.0, dtype=torch.float32).item() for number in gating)
    gate, up = gate_up.double().chunk(2, -1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    up, exponent = up + beta, -alpha * gate
    value = gate / (1 + exponent.exp()) * up
    error = value.abs() * (1e-6 + 2e-7 * exponent.clamp(0, 100))
    error = error + ((gate * up).abs().nan_to_num() + 1) * _SMALLEST_SIGMOID
    return value - error, value + error


# Other kernels.


def combined(x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The sums of `combine`, in BF16."""
    sums = torch.zeros(index.shape[0], x.shape[1], dtype=torch.float64, device=x.device)
    for j in range(index.shape[1]):
        there = (index[:, j] >= 0) & (index[:, j] < x.shape[0])
        terms = fp32(weights[:, j, None].double() * rows_of(x, index[:, j]).double())
        sums = torch.where(there[:, None], fp32(sums + terms), sums)
    return sums.float().bfloat16()


def dequantized(x: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """The dequantised matrix, in FP32."""
    each = scale.double().repeat_interleave(block_rows, 0).repeat_interleave(SCALE_BLOCK, 1)
    return (x.float().double() * each[: x.shape[0], : x.shape[1]]).float()


def sorting_faults(
    chosen: torch.Tensor, experts: int, alignment: int, rows: torch.Tensor, offs: torch.Tensor, index: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Errors of `sort_by_expert`: ends of experts, places of choices, tokens of rows. The order within an expert is
    free."""
    choice = torch.where((chosen >= 0) & (chosen < experts), chosen, experts).flatten().long()
    real, token = choice < experts, torch.arange(len(choice), device=chosen.device) // max(chosen.shape[1], 1)
    counts = torch.zeros(experts + 1, dtype=torch.long, device=chosen.device)
    counts = counts.scatter_add_(0, choice, torch.ones_like(choice))[:experts]
    taken = (counts + alignment - 1) // alignment * alignment
    begins = taken.cumsum(0) - taken
    first, last = (F.pad(ends, (0, 1))[choice] for ends in (begins, begins + counts))

    places = index.flatten()
    inside = real & (places >= first) & (places < last) & (places < len(rows))
    at = torch.where(inside, places, len(rows))
    takers = torch.zeros(len(rows) + 1, dtype=torch.long, device=chosen.device)
    takers.scatter_add_(0, at, torch.ones_like(at))
    misplaced = ~inside | (F.pad(rows, (0, 1))[at] != token) | (takers[at] != 1)
    free = takers[:-1] == 0
    if alignment > 1:
        strange = free & (rows != -1)
    else:  # behind all experts', tokens of none
        strange = torch.where(free, rows, -1).sort().values != torch.where(real, -1, token).sort().values
    return {"offs": offs != begins + counts, "index": torch.where(real, misplaced, places != -1), "rows": strange}
