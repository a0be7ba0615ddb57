"""Casts to FP8 along both dimensions in one read, and FP8 transposes: operands for a linear layer's gradients.

A layer multiplies its input along k and, for the weight's gradient, along tokens; the weight along k and, for the
input's gradient, along n. Each cast here makes both operands at once. On a Hopper GPU a kernel in both.cuh does it,
elsewhere two separate casts. Invariant: every result equals the separate casts, and torch's transpose, bit for bit.
"""

from typing import NamedTuple

import torch

from deep_tile import cast, launches, params, quantize, sources, tensors, transposed
from deep_tile.config import SCALE_BLOCK
from deep_tile.operation import Given, Operation

BYTE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)

_FIELDS = {
    "rows": ("x", "row_out", "row_scale", "out", "scale"),
    "mixed": ("x", "row_out", "row_scale", "out", "scale"),
    "tiles": ("x", "row_out", "scale", "out"),
    "codes": ("x", "out"),
}
"""Fields in `params.CAST_BOTH` for the tensors, in launch order, by `codegen.BothKernel.what`."""


class CastBoth(NamedTuple):
    """Result of `cast_both` for x [s, k].

    Attributes:
        a, a_scale: [s, k] and [s, ceil(k / 128)], as `per_token_cast_to_fp8`.
        at, at_scale: [k, s] and [k, ceil(s / 128)], as from `transposed_cast_to_fp8`; with `blocks` the transposes of
            `per_block_cast_to_fp8`'s results, [k, s] and [ceil(k / 128), ceil(s / 128)].
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    at: torch.Tensor
    at_scale: torch.Tensor


class CastWeight(NamedTuple):
    """Result of `cast_weight` for w [..., n, k].

    Attributes:
        b, b_scale: [..., n, k] and [..., ceil(n / 128), ceil(k / 128)], as `per_block_cast_to_fp8`.
        bt: [..., k, n], b's transpose.
    """

    b: torch.Tensor
    b_scale: torch.Tensor
    bt: torch.Tensor

    @property
    def bt_scale(self) -> torch.Tensor:
        """Scale for `bt`: [..., ceil(k / 128), ceil(n / 128)], a view."""
        return self.b_scale.mT


def cast_both(
    x: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    alignment: int = SCALE_BLOCK,
    blocks: bool = False,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
) -> CastBoth:
    """Quantise along k and along tokens, in one read of x: `per_token_cast_to_fp8` and `transposed_cast_to_fp8`.

    Results have the bits of these two calls; with `blocks`, of `per_block_cast_to_fp8` in place of the second. Runs on
    x's device and torch's current stream. Not differentiable.

    Args:
        x: [s, k] float64, float32, float16 or bfloat16, s tokens. Fastest on the GPU if columns are contiguous and rows
            start and end at multiples of 16 bytes.
        rows, offs, alignment: as for `transposed_cast_to_fp8`. With `offs` only tokens in groups are cast along k; for
            others `a` and `a_scale` hold arbitrary bytes.
        blocks: along tokens, use 128x128 scales, as `fp8_gemm` takes for `b`, instead of one per column and 128 tokens.
            Not with `offs`.
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`, for both casts.

    Returns:
        `CastBoth(a, a_scale, at, at_scale)`. Scales are "m_aligned"; rows in `a` and `at` start at multiples of 16
        bytes.

    Raises as `transposed_cast_to_fp8`.
    """
    given = x, None, None, None, None, rows, offs
    return CastBoth(*CAST_BOTH.run(given, (amax_floor, round_scale, exact, alignment, blocks)))


def cast_weight(
    w: torch.Tensor,
    *,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
) -> CastWeight:
    """Quantise a weight with one scale per 128x128, and transpose it, in one read of w.

    Results have the bits of `per_block_cast_to_fp8` and of its transpose. Runs on w's device and torch's current
    stream. Not differentiable.

    Args:
        w: [n, k], or [g, n, k] for experts, each with its own blocks; float64, float32, float16 or bfloat16. Fastest
            on the GPU if columns are contiguous and rows start and end at multiples of 16 bytes.
        amax_floor, round_scale, exact: as for `per_block_cast_to_fp8`.

    Returns:
        `CastWeight(b, b_scale, bt)`. Rows in `b` and `bt` start at multiples of 16 bytes.

    Raises as `per_block_cast_to_fp8`.
    """
    return CastWeight(*CAST_WEIGHT.run((w, None, None, None), (amax_floor, round_scale, exact)))


def transpose_fp8(x: torch.Tensor) -> torch.Tensor:
    """Transpose FP8 or other one-byte elements in memory: [..., n, k] becomes [..., k, n].

    Runs on x's device and torch's current stream. Not differentiable.

    Args:
        x: [n, k] or [g, n, k] float8_e4m3fn, float8_e5m2, uint8 or int8. Fastest on the GPU if columns are contiguous
            and rows start and end at multiples of 16 bytes.

    Returns:
        [..., k, n] in x's dtype, rows at multiples of 16 bytes.

    Raises as `per_block_cast_to_fp8`.
    """
    return TRANSPOSE_FP8.run((x, None), ())


class BothOptions(NamedTuple):
    """The keywords of a call; described at `cast_both` and `swiglu_gradient_cast_both`."""

    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    alignment: int = SCALE_BLOCK
    blocks: bool = False


_BLOCKS = BothOptions._fields.index("blocks")


def check_blocks(options: NamedTuple, offs: torch.Tensor | None) -> None:
    if options.blocks and offs is not None:
        raise ValueError("blocks is given together with offs; groups have one scale for each column and 128 tokens")


class Both(transposed.AlongTokens):
    """`cast_both`: of x, a, a_scale, at, at_scale, rows and offs."""

    Options = BothOptions

    def allocated(self, given: Given, options: tuple) -> Given:
        x, *_, rows, offs = given
        tokens, columns = x.shape
        tokens = tokens if rows is None else rows.shape[0]
        along, across = (tokens, columns), (columns, tokens)
        at_scale = (quantize.empty_block_scale if options[_BLOCKS] else empty_scale)(x, across)
        a, at = quantize.empty_out(x, along), quantize.empty_out(x, across)
        return x, a, empty_scale(x, along), at, at_scale, rows, offs

    def check(self, given: Given, options: BothOptions) -> None:
        self.check_source(given)
        check_blocks(options, given[-1])

    def define(self, given: Given, options: BothOptions) -> None:
        x, a, a_scale, at, at_scale, *_ = given
        lists = self.lists_of(given)
        rows = {name: given for name, given in lists.items() if name == "rows"}
        quantize.definition(x, quantize.values_of(options), a, a_scale, rows)
        if not options.blocks:
            transposed.definition(x, options, at, at_scale, lists)
            return
        x = sources.gathered(x, lists["rows"]) if rows else x
        quantize.definition(x.t(), quantize.values_of(options, SCALE_BLOCK), at, at_scale, {})

    def prepare(self, given: Given, options: BothOptions, **where) -> launches.Prepared:
        return _prepare(self, "mixed" if options.blocks else "rows", given, self.numbers(given, options), **where)

    def numbers(self, given: Given, options: BothOptions) -> dict[str, float]:
        x, a, a_scale, at, at_scale, *_ = given
        of_transpose = transposed.numbers_of(x, options, at, at_scale, self.lists_of(given))
        return params.CAST_BOTH.least | of_transpose | along_numbers(a, a_scale)


class Matrices(quantize.Casting):
    """A cast of matrices x [..., n, k], of which there are one or several; a weight's, whose gradient is dropped."""

    def __init__(self, name: str, tensors: str, keywords: str, wanted: str, dtypes: tuple, **how) -> None:
        self.wanted, self.dtypes = wanted, dtypes
        written = tuple(tensor.rstrip("!") for tensor in tensors.split()[1:])
        super().__init__(name, tensors, keywords, overload=None, gradient_of=written, **how)

    def differentiate(self, given: Given, options) -> None:
        """Drops the gradient: weights may require one."""

    def check(self, given: Given, options) -> None:
        name, x = self.names[0], given[0]
        quantize.check_source_dtype(name, x, self.dtypes)
        if x.dim() not in (2, 3):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be {self.wanted}, so .view() it so")

    def readable(self, given: Given) -> Given:
        """Matrices keep their steps."""
        x, *made = given
        x = x.float() if x.dtype == torch.float64 else x
        return x.contiguous() if x.shape[-1] > 1 and x.stride(-1) != 1 else x, *made


class Weight(Matrices):
    """`cast_weight`: of w, b, b_scale and bt."""

    class Options(NamedTuple):
        amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
        round_scale: str = "none"
        exact: str = "divide"

    def allocated(self, given: Given, options: tuple) -> Given:
        w = given[0]
        *leading, n, k = w.shape
        b, bt = quantize.empty_out(w, (*leading, n, k)), quantize.empty_out(w, (*leading, k, n))
        return w, b, quantize.empty_block_scale(w, w.shape), bt

    def define(self, given: Given, options: Options) -> None:
        values = quantize.values_of(options, SCALE_BLOCK)
        for w, b, scale, bt in zip(*(x if x.dim() == 3 else x[None] for x in given), strict=True):
            quantize.definition(w, values, b, scale, {})
            bt.view(torch.uint8).copy_(b.view(torch.uint8).t())

    def prepare(self, given: Given, options: Options, **where) -> launches.Prepared:
        return _prepare(self, "tiles", given, self.numbers(given, options), **where)

    def numbers(self, given: Given, options: Options) -> dict[str, float]:
        w, b, b_scale, bt = given
        return {
            **_of_matrices(w, bt, b_scale),
            **quantize.values_of(options, SCALE_BLOCK).numbers,
            "row_out_stride": b.stride(-2),
            "scale_step": _step(b_scale),
            "row_out_step": _step(b),
        }


class Transpose(Matrices):
    """`transpose_fp8`: of x and its transpose."""

    class Options(NamedTuple):
        pass

    def allocated(self, given: Given, options: tuple) -> Given:
        x = given[0]
        *leading, n, k = x.shape
        return x, quantize.empty_out(x, (*leading, k, n), x.dtype)

    def define(self, given: Given, options: Options) -> None:
        x, made = given
        made.view(torch.uint8).copy_(x.detach().view(torch.uint8).mT)

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        return _prepare(self, "codes", given, self.numbers(given, options))

    def numbers(self, given: Given, options: Options) -> dict[str, float]:
        return _of_matrices(*given)


def _prepare(operation: Operation, what: str, given: Given, numbers: dict[str, float], **where) -> launches.Prepared:
    """`where` are keywords of `quantize.launch_of`."""
    x, lists = given[0], operation.lists_of(given)
    sizes = (int(numbers[name]) for name in ("rows", "columns", "matrices"))
    source = quantize.KERNEL_SOURCES.get(x.dtype, "e4m3")
    kernel, grid = cast.choose_both(what, source, *sizes, launches.num_sms(x.get_device()))
    fields = (*_FIELDS[what], *cast.fields_of_tokens((*lists,))[len(cast.PLACES) :])
    return quantize.launch_of(operation, kernel, grid, given, numbers, fields, **where)


def empty_scale(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return quantize.empty_scale(x, shape, quantize.DEFAULT_SCALE_LAYOUT)


def along_numbers(a: torch.Tensor, a_scale: torch.Tensor) -> dict[str, int]:
    scale_row, scale_column = a_scale.stride()
    strides = {"row_scale_stride_row": scale_row, "row_scale_stride_column": scale_column}
    return {"row_out_stride": a.stride(0), **strides}


def _of_matrices(x: torch.Tensor, transpose: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, float]:
    """Parameters that all transposing kernels share, for matrices with any steps that kernels can read."""
    rows, columns = x.shape[-2:]
    elements = tensors.ALIGNMENT_BYTES // x.element_size()
    strides = (x.stride(-2), _step(x), columns)
    return params.CAST_BOTH.least | {
        **quantize.matrix_numbers(rows, columns, x, transpose, scale),
        "aligned": tensors.is_aligned(x) and not any(stride % elements for stride in strides),
        "out_vectors": True,
        "x_rows": rows,
        "matrices": x.shape[0] if x.dim() == 3 else 1,
        "x_step": _step(x),
        "out_step": _step(transpose),
    }


def _step(x: torch.Tensor) -> int:
    """Elements from one matrix to the next."""
    return x.stride(0) if x.dim() == 3 else 0


# The operations, whose ops tracers see.

CAST_BOTH = Both(
    *("cast_both", "x a! a_scale! at! at_scale!", f"rows offs alignment blocks {quantize.OP_OPTIONS}"),
    lists="rows offs",
    defaults={"alignment": SCALE_BLOCK},
    overload=None,
)
CAST_WEIGHT = Weight(
    *("cast_weight", "w b! b_scale! bt!", quantize.OP_OPTIONS, "[n, k], or [g, n, k] of experts"),
    dtypes=quantize.SOURCE_DTYPES,
)
TRANSPOSE_FP8 = Transpose("transpose_fp8", "x xt!", "", "[n, k] or [g, n, k]", dtypes=BYTE_DTYPES)
