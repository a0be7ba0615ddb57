"""RMSNorm of a sum, cast to FP8: the step before most of a decoder's linear layers.

The op `torch.ops.deep_tile.add_rms_norm_cast_to_fp8`, which passes put into graphs; no function has its name. On a
Hopper GPU norm.cuh's kernel makes all in one read; elsewhere `NormCast.define`, whose bits differ in the order of one
sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deep_tile import cast, launches, ops, params, quantize, tensors
from deep_tile.operation import Given


class NormOptions(NamedTuple):
    """A call's keywords: what is added to a row's mean of squares, and as for `per_token_cast_to_fp8`."""

    epsilon: float
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR


class NormCast(quantize.Casting):
    """(x, residual, weight) -> (out, scale, sum) for x and residual [m, k] and weight [k] in bfloat16: `sum` is x +
    residual, rounded, and `out` with its `scale` the cast of (x + residual) * rsqrt(mean((x + residual)^2) + epsilon) *
    weight, as of `per_token_cast_to_fp8`. All is computed in FP32 and rounded to FP8 alone.

    A row's results depend on no other row. The mean is within a relative 1e-6, on the GPU the root's reciprocal within
    2e-7, and elements are multiplied by the scale's rounded reciprocal.
    """

    Options, dtypes = NormOptions, (torch.bfloat16,)

    def allocated(self, given: Given, options: tuple) -> Given:
        x = given[0]
        scale = quantize.empty_scale(x, x.shape, ops.DEFAULT_SCALE_LAYOUT)
        return (*given[:3], quantize.empty_out(x, x.shape), scale, quantize.empty_out(x, x.shape, x.dtype))

    def check(self, given: Given, options: NormOptions) -> None:
        x, residual, weight, *_ = given
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}; it must be [m, k], so .view() it so")
        self._check_like(x, "residual", residual, x.shape)
        self._check_like(x, "weight", weight, x.shape[1:])

    def _check_like(self, x: torch.Tensor, name: str, given: torch.Tensor, shape: Sequence[int]) -> None:
        quantize.check_source_dtype(name, given, self.dtypes)
        sizes_agree = given.dim() == len(shape) and all(
            ops.holds(a == b) for a, b in zip(given.shape, shape, strict=True)
        )
        if not sizes_agree:
            raise ValueError(f"{name} has shape {list(given.shape)}; for x of {list(x.shape)} it must be {list(shape)}")
        if given.device != x.device:
            raise ValueError(f"{name} is on {given.device} but x is on {x.device}; move it with .to(x.device)")

    def readable(self, given: Given) -> Given:
        return *map(tensors.in_vectors, given[:3]), *given[3:]

    def needs_kernel(self, given: Given) -> bool:
        """False for rows that are too long for a thread block, or no multiple of a vector: torch then computes them,
        also on a GPU."""
        return super().needs_kernel(given) and fits(given[0].shape[1])

    def define(self, given: Given, options: NormOptions) -> None:
        x, residual, weight, out, scale, total = given
        wide = x.float() + residual.float()
        total.copy_(wide)
        factor = torch.rsqrt(wide.square().mean(1, keepdim=True) + options.epsilon)
        values = quantize.Options(1, options.amax_floor)
        quantize.definition(wide * factor * weight.float(), values, out, scale, {})

    def prepare(self, given: Given, options: NormOptions) -> launches.Prepared:
        kernel, grid = cast.choose_norm(*given[0].shape)
        return quantize.launch_of(self, kernel, grid, given, self.numbers(given, options), FIELDS)

    def numbers(self, given: Given, options: NormOptions) -> dict[str, float]:
        x, residual, _, out, scale, total = given
        rows, columns = x.shape
        return params.NORM.least | {
            **quantize.matrix_numbers(rows, columns, x, out, scale),
            **quantize.Options(1, options.amax_floor).numbers,
            "residual_stride": residual.stride(0),
            "sum_stride": total.stride(0),
            "mean_factor": 1 / columns,
            "epsilon": options.epsilon,
        }


FIELDS = ("x", "residual", "weight", "out", "scale", "sum")
"""Fields of `params.NORM` that the tensors are."""


def fits(columns: int) -> bool:
    """Whether the kernel takes rows of this length."""
    return columns % cast.NORM_VECTOR == 0 and columns <= max(cast.NORM)


ADD_RMS_NORM_CAST = NormCast(
    *("add_rms_norm_cast_to_fp8", "x residual weight out! scale! sum!", "epsilon amax_floor"), overload=None
)
