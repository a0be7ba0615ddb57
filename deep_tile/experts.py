"""MoE kernels around the two grouped GEMMs: sorting tokens by expert, the gated activation, combining results.

Activation and FP8 cast are one kernel on the casts' code (quantize.py), so each element is read once and nothing wide
is written between the GEMMs. Live rows and indices are read on the device: no call waits for the host, and CUDA graphs
can capture all.
"""

from typing import NamedTuple

import torch

from deep_tile import cast, launches, quantize, sources, tensors
from deep_tile.config import as_int, ceil_div, round_up
from deep_tile.operation import Arg, Described, Given

_NO_EXPERT = torch.iinfo(torch.int16).max
"""Experts are sorted as int16, which takes a quarter of int64's passes."""


class Routing(NamedTuple):
    """Result of `sort_by_expert`, described there."""

    rows: torch.Tensor
    offs: torch.Tensor
    index: torch.Tensor


def sort_by_expert(chosen: torch.Tensor, experts: int, *, alignment: int = 1) -> Routing:
    """Make the row lists of an expert layer: one row per token and choice, sorted by expert.

    An expert's rows are in token order, then choice order. Runs on `chosen`'s device and torch's current stream and
    does not wait for it, so that one CUDA graph serves every choice: on a Hopper GPU by one kernel, elsewhere by torch,
    with the same numbers. With more than 512 experts or 2**21 choices torch sorts on the GPU as well, with a dozen
    kernels.

    Args:
        chosen: [t, top_k] int32 or int64, any strides: each token's experts. A negative or too large number means no
            local expert, e.g. one on another rank; its rows come after all experts' rows. Fastest on the GPU if
            contiguous; otherwise it is copied first.
        experts: how many there are.
        alignment: the multiple of rows at which experts start: a power of two up to 1024. Weight gradients need 128
            (`fp8_grouped_wgrad`; `transposed_cast_to_fp8` casts its operands by the same lists).

    Returns:
        rows: [t * top_k] int64, each row's token: for `per_token_cast_to_fp8`. With an alignment [t * top_k + experts *
            (alignment - 1)], rounded up to it, and -1 for padding rows, which casts read as zeros.
        offs: [experts] int32, the row behind each expert's last: for all casts and `fp8_grouped_gemm`, with the same
            alignment.
        index: [t, top_k] int64, each choice's row, -1 for no expert: for `combine`.

    Raises:
        TypeError: `chosen` is not a plain int32 or int64 tensor, or `experts` is not an int.
        ValueError: `chosen` is not a matrix or has no memory, or `experts` or `alignment` is out of range.
        RuntimeError: the kernel is not loaded yet while a CUDA graph is captured; or as `per_token_cast_to_fp8`.
    """
    if type(experts) is not int:
        experts = as_int(experts) or experts  # a Python int: NumPy's would overflow
    return Routing(*SORT_BY_EXPERT.run((chosen, None, None, None), (experts, alignment)))


class SortOptions(NamedTuple):
    """Described at `sort_by_expert`."""

    experts: int
    alignment: int = 1


class Sort(quantize.Casting):
    """The operation of `sort_by_expert`, with the tensors chosen, rows, offs and index."""

    Options, dtypes = SortOptions, sources.INDEX_DTYPES
    unexplained = "its thread blocks wait for each other's counts, which is no time of memory or tensor cores"

    def allocated(self, given: Given, options: tuple) -> Given:
        chosen, (tokens, top_k), (experts, alignment) = given[0], given[0].shape, options
        size = _rows_size(tokens * top_k, experts, alignment)
        return (
            chosen,
            tensors.new_empty(chosen, (size,), (1,), torch.int64),
            tensors.new_empty(chosen, (experts,), (1,), torch.int32),
            tensors.new_empty(chosen, (tokens, top_k), (top_k, 1), torch.int64),
        )

    def check_arguments(self, given: Given, options: SortOptions) -> None:
        self.check(given, options)
        super().check_arguments(given, options)

    def check(self, given: Given, options: SortOptions) -> None:
        chosen = given[0]
        if not isinstance(chosen, torch.Tensor) or chosen.dtype not in sources.INDEX_DTYPES:
            seen = f"a tensor of {chosen.dtype}" if isinstance(chosen, torch.Tensor) else f"a {type(chosen)}"
            raise TypeError(f"chosen is {seen}; it must be one of int32 or int64, such as topk's indices")
        if chosen.dim() != 2:
            raise ValueError(f"chosen has shape {list(chosen.shape)}; it must be [t, top_k], so .view() it so")

    def check_options(self, options: SortOptions) -> None:
        experts, number = options.experts, as_int(options.experts)
        if number is None:
            raise TypeError(f"experts is {experts!r}, of type {type(experts).__name__}; pass how many there are")
        if not 0 < number < _NO_EXPERT:
            raise ValueError(f"experts is {experts}; pass a number from 1 to {_NO_EXPERT - 1}")
        super().check_options(options)

    def readable(self, given: Given) -> Given:
        return given[0].contiguous(), *given[1:]

    def needs_kernel(self, given: Given) -> bool:
        """False for sizes that no kernel takes: torch then sorts, also on a GPU."""
        chosen, _, offs, _ = given
        fits = len(offs) <= cast.MOST_EXPERTS and chosen.numel() <= cast.MOST_CHOICES
        return fits and chosen.numel() > 0 and self.is_on_gpu(chosen) and launches.is_hopper(chosen.get_device())

    def define(self, given: Given, options: SortOptions) -> None:
        chosen, *made = given
        for target, found in zip(made, sorted_by_torch(chosen, *options), strict=True):
            target.copy_(found)

    def prepare(self, given: Given, options: SortOptions) -> launches.Prepared:
        chosen, rows, *_ = given
        kernel = cast.SORT[str(chosen.dtype).removeprefix("torch.")]
        schedule = cast.schedule_sort(chosen.numel(), len(rows), kernel.threads)
        numbers = cast.sort_numbers(schedule, *chosen.shape, len(rows), *options)
        return quantize.launch_of(self, kernel, schedule.grid, given, numbers, self.names, cluster=schedule.cluster)


def _rows_size(choices: int, experts: int, alignment: int) -> int:
    return round_up(choices + experts * (alignment - 1), alignment)


def sorted_by_torch(chosen: torch.Tensor, experts: int, alignment: int) -> Routing:
    """`sort_by_expert`'s definition, in torch."""
    top_k, device = chosen.shape[1], chosen.device
    numbers = chosen.flatten().clamp(-1, experts).short().remainder_(experts + 1)
    of_row, order = numbers.sort(stable=True)
    each = torch.arange(experts, dtype=torch.int16, device=device)
    offs = torch.searchsorted(of_row, each, right=True, out_int32=True)
    row = torch.arange(order.shape[0], device=device)
    row = row.masked_fill_(row >= offs[-1], -1)
    index = torch.empty_like(order).scatter_(0, order, row).view(chosen.shape)
    packed = Routing(order.div(top_k, rounding_mode="floor"), offs, index)
    return packed if alignment == 1 else _spread(packed, of_row, alignment)


def _spread(packed: Routing, of_row: torch.Tensor, alignment: int) -> Routing:
    """The lists spread out, so that experts start at multiples of `alignment`; `of_row` is each packed row's expert."""
    rows, offs, index = packed
    counts = offs.diff(prepend=offs.new_zeros(1))
    taken = ceil_div(counts, alignment) * alignment
    begins = taken.cumsum(0) - taken
    moved = begins - (offs - counts)
    size = _rows_size(len(rows), len(offs), alignment)
    at = torch.arange(len(rows), device=rows.device)
    lives = at < offs[-1]
    at = at + moved[of_row.clamp(max=len(offs) - 1).long()]
    spread = rows.new_full((size + 1,), -1)  # the last one for rows without an expert
    spread.scatter_(0, torch.where(lives, at, size), torch.where(lives, rows, -1))
    places = torch.cat([torch.where(lives, at, -1), at.new_full((1,), -1)])
    return Routing(spread[:size], (begins + counts).int(), places[index])


def silu_mul_cast_to_fp8(
    gate_up: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SwiGLU and quantise it: the step between the two GEMMs of an expert layer.

    h = gate * sigmoid(alpha * gate) * (up + beta) is computed in FP32 and cast as by `per_token_cast_to_fp8`, without
    rounding h to a narrower type in between. Each operation is rounded to FP32, from left to right, and h is within a
    relative 1e-6 of the formula, plus 2e-7 per unit of alpha * gate; a sigmoid below 2**-126 is 0.

    Runs on `gate_up`'s device and torch's current stream: on a Hopper GPU by one kernel, elsewhere by torch. Each
    repeats its own bits, but the two differ, since the GPU has an approximate exponential and reciprocal: a scale by at
    most the error of h, an element by at most one e4m3 step. With "pow2" a scale may be the next power of two if the
    largest magnitude of h is that close to a boundary. Not differentiable.

    Args:
        gate_up: [..., 2k] bfloat16 or float16, any strides: each row holds k gate values, then k up values. Fastest on
            the GPU if k is a multiple of 8, columns are contiguous and rows start at multiples of 16 bytes; other
            column strides are copied first.
        offs, counts: as for `per_token_cast_to_fp8`: each group's END row in gate_up [s, 2k], or live rows per group in
            gate_up [g, m, 2k]. Dead rows are neither read nor written.
        limit: a positive number. Before anything else, gate is clamped to at most `limit`, and up to [-limit, limit],
            as in gpt-oss and DeepSeek-V4.
        alpha, beta: finite numbers, rounded to FP32; 1.702 and 1 in gpt-oss.
        scale_layout, amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`; on the GPU `exact` affects scales
            only.
        out: [..., k] float8_e4m3fn, otherwise as for `per_token_cast_to_fp8`.
        scale_out: [..., ceil(k / 128)] float32, otherwise as there.

    Returns:
        `out` and `scale_out`: [..., k] float8_e4m3fn and its scale. Dead rows are not written; in allocated tensors
        they hold arbitrary bytes.

    Raises:
        TypeError: `gate_up` is neither bfloat16 nor float16, or `limit`, `alpha` or `beta` is no number; or as
            `per_token_cast_to_fp8`.
        ValueError: rows in `gate_up` do not have an even length, or a number is out of range; or as there.
        RuntimeError: as there.
    """
    options = (amax_floor, round_scale, exact, scale_layout, limit, alpha, beta)
    return SILU_MUL_CAST.run((gate_up, out, scale_out, offs, counts), options)


class GatedOptions(NamedTuple):
    """A call's keywords, described at `silu_mul_cast_to_fp8`."""

    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def gating(self) -> sources.Gating:
        return sources.gating(self.limit, self.alpha, self.beta)


class GatedCast(quantize.Cast):
    Options = GatedOptions

    def values(self, options: GatedOptions) -> quantize.Options:
        return super().values(options)._replace(gating=options.gating)

    def check_options(self, options: GatedOptions) -> None:
        super().check_options(options)
        sources.gating(options.limit, options.alpha, options.beta)


def combine(
    x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Weighted sum over each token's expert results: out[t] = sum over j of weights[t, j] * x[index[t, j]].

    Sums in FP32 in the order of j: each product and each sum is rounded to FP32, and the last sum to BF16. Runs on
    `x`'s device and torch's current stream: one kernel on a Hopper GPU, elsewhere torch, with the same bits except in
    NaNs. Not differentiable.

    Args:
        x: [r, n] bfloat16, unit stride along n: results of the second GEMM. Fastest on the GPU if n is a multiple of 8
            and rows start at multiples of 16 bytes, here and in `out`.
        weights: [t, top_k] float32 or bfloat16, any strides.
        index: [t, top_k] int32 or int64, any strides: each token's rows in `x`. Negative or too large numbers are
            skipped.
        out: [t, n] bfloat16, unit stride along n, that shares no memory with `x`, to write to; allocated when None.

    Returns:
        `out`.

    Raises:
        TypeError: a tensor has the wrong dtype or is not a plain one.
        ValueError: shapes, strides or devices do not fit, or a tensor has no memory.
        RuntimeError: `x`, `weights` or `out` requires a gradient, in grad mode; or as `per_token_cast_to_fp8`.
    """
    return COMBINE.run((x, weights, index, out), ())


class NoOptions(NamedTuple):
    pass


class Combine(Described):
    Options = NoOptions

    def allocated(self, given: Given, options: tuple) -> Given:
        """Override of `Described` that does not read every argument's sizes."""
        x, weights, index, out = given
        shape = index.shape[0], x.shape[1]
        return (
            x,
            weights,
            index,
            tensors.new_empty(x, shape, (shape[1] or 1, 1), torch.bfloat16) if out is None else out,
        )

    def define(self, given: Given, options) -> None:
        x, weights, index, out = given
        sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        exists = (index >= 0) & (index < len(x))
        for j in range(index.shape[1]):
            terms = weights[:, j, None].float() * sources.gathered(x, index[:, j]).float()
            sums = torch.where(exists[:, j, None], sums + terms, sums)
        out.copy_(sums)

    def prepare(self, given: Given, options) -> launches.Prepared:
        kernel, grid = cast.choose_combine(*given[3].shape, launches.num_sms(given[0].get_device()))
        return quantize.launch_of(self, kernel, grid, given, combine_numbers(*given), self.names)


def combine_numbers(x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    """Kernel parameters for these tensors."""
    strides = [matrix.stride(0) for matrix in (x, out) if len(matrix) > 1]
    in_vectors = all(number % cast.COMBINE_COLUMNS == 0 for number in (out.shape[1], *strides))
    (weights_row, weights_column), (index_row, index_column) = weights.stride(), index.stride()
    return {
        "tokens": out.shape[0],
        "columns": out.shape[1],
        "x_rows": len(x),
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
        "weights_stride_row": weights_row,
        "weights_stride_column": weights_column,
        "index_stride_row": index_row,
        "index_stride_column": index_column,
        "top_k": index.shape[1],
        "aligned": in_vectors and tensors.is_aligned(x) and tensors.is_aligned(out),
        "wide_index": index.dtype == torch.int64,
        "narrow_weights": weights.dtype == torch.bfloat16,
    }


# The ops that tracers see.


SILU_MUL_CAST = GatedCast(
    *("silu_mul_cast_to_fp8", "gate_up", f"offs counts limit alpha beta {quantize.OP_OPTIONS}"),
    lists="offs counts",
    own="scale_layout",
    is_gated=True,
)
COMBINE = Combine(
    *("combine", "x weights index out!", ""),
    args=(
        Arg("r n", (torch.bfloat16,), is_dense=True),
        Arg("t top_k", (torch.float32, torch.bfloat16)),
        Arg("t top_k", sources.INDEX_DTYPES),
        Arg("t n", (torch.bfloat16,), is_dense=True),
    ),
)


SORT_BY_EXPERT = Sort(
    *("sort_by_expert", "chosen rows! offs! index!", "experts alignment"), overload=None, by_position=True
)
