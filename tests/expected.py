"""The values that a product may have for any operands: scales that are zero, denormal, huge or negative, NaN, infinity.

Written apart from deep_tile.reference, and from helpers.exact_product, which knows finite sums only. The kernels
multiply the two scales of a K block of 128, then that block's sum of e4m3 products, and add such terms up, all in FP32.
So there is one right answer for every element, but where rounding decides: the sign of a block's sum that is nearly
zero, times infinity, and sums near the end of FP32's range.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from helpers import ACCUMULATION, BF16_ROUNDING, Exact, Operands

from deep_tile.config import SCALE_BLOCK, ceil_div

LARGEST_FP32 = torch.finfo(torch.float32).max
LARGEST_E4M3 = 448.0
ROUNDS_TO_INFINITY = (2 - 2**-8) * 2.0**127
"""Half way from the largest BF16 number to the next, which there is not."""

SMALLEST_STEPS = 2.0**-133
"""Rounding of a BF16 denormal, and of the FP32 denormals in its sum."""


class Expected(NamedTuple):
    """The permitted values of each element of a product [m, n].

    Attributes:
        value: the sum of its finite terms, in float64.
        allowed: the largest error of a finite result.
        finite, positive, negative, nan: whether the result may be finite, infinity, minus infinity, NaN.
    """

    value: torch.Tensor
    allowed: torch.Tensor
    finite: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    nan: torch.Tensor

    @classmethod
    def of(cls, exact: Exact) -> "Expected":
        """Permit only the sum and its rounding: for sums far from the limits of FP32."""
        yes = torch.ones_like(exact.value, dtype=torch.bool)
        return cls(exact.value, _allowed(exact.value, exact.spread), yes, ~yes, ~yes, ~yes)

    def wrong(self, out: torch.Tensor) -> torch.Tensor:
        """Which elements of `out` have no permitted value. Enqueues work on their device and does not wait."""
        near = (out.double() - self.value).abs() <= self.allowed
        right = (
            (self.finite & out.isfinite() & near)
            | (self.positive & out.isposinf())
            | (self.negative & out.isneginf())
            | (self.nan & out.isnan())
        )
        return ~right

    def describe(self, index: tuple[int, ...]) -> str:
        """Describe the permitted values of one element."""
        kinds = [name for name in ("positive", "negative", "nan") if getattr(self, name)[index]]
        if self.finite[index]:
            kinds.append(f"{self.value[index].item()} within {self.allowed[index].item():.2g}")
        return " or ".join(kinds)


def _allowed(value: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    return BF16_ROUNDING * value.abs() + ACCUMULATION * spread + SMALLEST_STEPS


class _Terms(NamedTuple):
    """The terms of all sums, one per K block: [k blocks, m, n].

    Attributes:
        scale: product of the two scales, FP32.
        block: sum of e4m3 products, float64; NaN where one of them is.
        spread: the size that it would have if its products had random signs.
        endless: whether a scale is infinite, and the result not only too large.
    """

    scale: torch.Tensor
    block: torch.Tensor
    spread: torch.Tensor
    endless: torch.Tensor


def expected_product(operands: Operands, *, by_definition: bool = False) -> Expected:
    """The permitted values of a kernel's product, or of deep_tile.reference's.

    Args:
        by_definition: of the reference, which multiplies each operand by its scale first, in FP32, and has one right
            answer in fewer places: infinities meet element by element, and other intermediate results overflow.
    """
    terms = _terms(operands)
    expected = _promoted(terms)
    return _loosened(expected, terms, operands) if by_definition else expected


def _terms(operands: Operands) -> _Terms:
    m, n, k = operands.sizes
    a, b = _blocks(operands.a), _blocks(operands.b)
    columns = torch.arange(n, device=operands.b.device) // SCALE_BLOCK
    a_scale, b_scale = operands.a_scale.t()[:, :, None], operands.b_scale.t()[:, None, columns]
    return _Terms(
        a_scale * b_scale,
        a @ b.mT,
        (a.square() @ b.square().mT).sqrt(),
        a_scale.isinf() | b_scale.isinf(),
    )


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[k blocks, rows, 128] of an operand, in float64; the last block is filled up with zeros."""
    values = x.view(torch.uint8).contiguous().view(x.dtype).float().double()
    values = F.pad(values, (0, ceil_div(x.shape[1], SCALE_BLOCK) * SCALE_BLOCK - x.shape[1]))
    return values.view(x.shape[0], -1, SCALE_BLOCK).transpose(0, 1)


class _Infinities(NamedTuple):
    """Elements with infinite terms, [m, n] each: the signs that occur, whether one is uncertain, and whether the sum
    must be NaN."""

    up: torch.Tensor
    down: torch.Tensor
    unsure: torch.Tensor
    nan: torch.Tensor


def _infinities(terms: _Terms, infinite: torch.Tensor) -> _Infinities:
    """Classify the `infinite` terms and NaN."""
    scale, block, spread, _ = terms
    nothing = spread == 0
    sure = block.abs() > ACCUMULATION * spread
    sign = scale.sign() * block.sign()
    up, down = ((infinite & sure & (sign == way)).any(0) for way in (1, -1))
    nan = (scale.isnan() | block.isnan() | (infinite & nothing)).any(0) | (up & down)
    return _Infinities(up, down, (infinite & ~sure & ~nothing).any(0), nan)


def _promoted(terms: _Terms) -> Expected:
    scale, block, spread, _ = terms
    counts = scale.isfinite() & block.isfinite()  # the terms of a finite sum
    value = torch.where(counts, scale.double() * block, 0).sum(0)
    sizes = torch.where(counts, scale.double().abs() * spread, 0)
    most = (torch.where(counts, scale.double().abs() * block.abs(), 0) + ACCUMULATION * sizes).sum(0)

    up, down, unsure, must_be_nan = _infinities(terms, scale.isinf())
    allowed = _allowed(value, sizes.square().sum(0).sqrt())
    overflows, ends, may_be = most > 0.999 * LARGEST_FP32, scale.isinf().any(0), ~must_be_nan
    return Expected(
        value,
        allowed,
        finite=may_be & ~ends & (value.abs() - allowed < ROUNDS_TO_INFINITY),
        positive=may_be & (up | unsure | overflows | (~ends & (value + allowed >= ROUNDS_TO_INFINITY))),
        negative=may_be & (down | unsure | overflows | (~ends & (value - allowed <= -ROUNDS_TO_INFINITY))),
        nan=must_be_nan | unsure | overflows,
    )


def _loosened(expected: Expected, terms: _Terms, operands: Operands) -> Expected:
    """Add the values that the reference may give instead, since it scales each operand separately."""
    n, k = operands.b.shape
    columns = torch.arange(n, device=operands.b.device) // SCALE_BLOCK
    largest_a, largest_b = (
        torch.where(scale.isfinite(), scale.abs(), 0).double().amax(1)
        for scale in (operands.a_scale, operands.b_scale[columns])
    )
    far = LARGEST_FP32 / LARGEST_E4M3
    overflows = (largest_a > far)[:, None] | (largest_b > far)[None]
    overflows |= (terms.scale.isinf() & ~terms.endless).any(0)
    must_be_nan = _infinities(terms, terms.scale.isinf() & terms.endless).nan
    ends, free = terms.endless.any(0), overflows & ~must_be_nan
    # Denormals, of an operand times its scale here, of two scales in a kernel, are rounded to 2^-149.
    products = LARGEST_E4M3 * k * (largest_a[:, None] + largest_b[None])
    rounding = 2.0**-149 * (products + terms.block.abs().nan_to_num(0).sum(0))
    return expected._replace(
        allowed=torch.where(overflows, torch.inf, expected.allowed + rounding),
        finite=(expected.finite | free) & ~ends & ~must_be_nan,
        positive=(expected.positive | free) & ~must_be_nan,
        negative=(expected.negative | free) & ~must_be_nan,
        nan=expected.nan | free | ends,
    )
