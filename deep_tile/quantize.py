"""Casts to FP8 with one FP32 scale per 1x128 (activations) or 128x128 (weights) block, and back.

`definition` defines a cast in plain torch; on a Hopper GPU a kernel (cast.py) writes the same bits. A warm call is one
C call that finds the launch by the tensors' signature. Invariant: for finite `x`, either cast followed by `dequantize`
gives `x` back to within e4m3's rounding at its block's scale; nothing saturates.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from operator import eq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from deep_tile import _launcher, cast, launches, ops, sources, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.operation import Given, Operation
from deep_tile.ops import DEFAULT_SCALE_LAYOUT, SMALLEST_AMAX_FLOOR
from deep_tile.options import check_one
from deep_tile.params import Place, places

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max  # 448
DEEP_GEMM_AMAX_FLOOR = 1e-4
"""`amax_floor` in DeepGEMM's casts, hence in transformers'."""
SOURCE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

TOKEN_BLOCK = (1, SCALE_BLOCK)
"""Rows and columns that share a scale in `a`."""
WEIGHT_BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
"""Rows and columns that share a scale in `b`."""

KERNEL_SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_VECTOR_BYTES = tensors.ALIGNMENT_BYTES
"""Bytes that a kernel thread loads at once; it stores as many elements."""


class CastOptions(NamedTuple):
    """A call's keywords, described at `per_token_cast_to_fp8`."""

    amax_floor: float = SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    scale_layout: str = DEFAULT_SCALE_LAYOUT


class Options(NamedTuple):
    """The options that affect a cast's values.

    Attributes:
        block_rows: 1 or 128, rows that share a scale.
        amax_floor, round_scale, exact: as `per_token_cast_to_fp8` has them.
        gating: if set, `sources.silu_mul` is applied to the input first.
    """

    block_rows: int
    amax_floor: float = SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    gating: sources.Gating | None = None

    @property
    def floor(self) -> float:
        """The lower bound for a group's largest magnitude."""
        return max(float(self.amax_floor), SMALLEST_AMAX_FLOOR)

    @property
    def numbers(self) -> dict[str, float]:
        divides = int(self.exact == "divide")
        return {"pow2_scale": self.round_scale == "pow2", "amax_floor": self.floor, "correction": divides}


def values_of(options: NamedTuple, block_rows: int = 1) -> Options:
    """The cast options among the options of a call."""
    return Options(block_rows, options.amax_floor, options.round_scale, options.exact)


def keywords_of(options: NamedTuple) -> dict:
    """The same options as keywords for a cast."""
    return {"amax_floor": options.amax_floor, "round_scale": options.round_scale, "exact": options.exact}


def per_token_cast_to_fp8(
    x: torch.Tensor,
    *,
    scale_layout: str = DEFAULT_SCALE_LAYOUT,
    amax_floor: float = SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
    rows: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations: one scale per row and 128 columns.

    Runs on `x`'s device and torch's current stream: one kernel on a Hopper GPU, elsewhere torch, bit for bit the same
    except for NaN's sign.

    Not differentiable; `deep_tile.fp8_linear`, which casts and multiplies, is.

    Args:
        x: [..., k], float64, float32, float16 or bfloat16, any strides and any k (the last group may be short). Leading
            dimensions are flattened to m rows. float64 is converted to FP32 first. Fastest on the GPU with contiguous
            columns, rows that start and end at multiples of 16 bytes, and a 16-byte aligned `out`. Other column
            strides, and leading dimensions that cannot be flattened as a view, are copied first.
        scale_layout: memory order of the scale as [m, k_groups]. "row": stride (k_groups, 1). "m": stride (1, m).
            "m_aligned": stride (1, m rounded up to 4), which GEMMs read fastest; padding is not written. If `x` is not
            2-D, the scale is a view of it: for [i, j, k] its strides are (j * k_groups, k_groups, 1), (j, 1, m) or (j,
            1, m rounded up to 4), with m = i * j, and `scale.flatten(0, -2)` copies nothing.
        amax_floor: lower bound for a group's largest magnitude, so that an all-zero group has a usable scale. The
            default and minimum is 448 * 2**-126, with which every normal FP32 number keeps e4m3's precision; smaller
            values, such as 0, count as that. DeepGEMM uses 1e-4, vLLM and SGLang 1e-10: pass these to match their bits,
            but not for gradients, whose groups may be smaller and would become zeros.
        round_scale: "none", or "pow2" for the smallest power of two >= max(largest magnitude, amax_floor) / 448,
            decided exactly; at most 2**120. vLLM does so on Hopper by default (FLOAT32_CEIL_UE8M0); its kernel then
            bounds the scale instead of the magnitude by 1e-10, i.e. amax_floor=4.48e-8.
        exact: how the cast divides by 448 and by the scale. "divide": rounded once, as vLLM's kernel does.
            "reciprocal": multiplied by the FP32-rounded reciprocal; for finite float32, float16 or bfloat16 bit for bit
            as DeepGEMM's per_token_cast_to_fp8 and per_block_cast_to_fp8, which transformers uses, in torch on a GPU.
            With "pow2"
            both always agree: a power of two has an exact reciprocal.
        rows: [r] int32 or int64, dense: rows of a 2-D `x` to cast, in this order; the result equals that for x[rows],
            [r, k]. A negative or too large number reads nothing and counts as a row of zeros.
        offs: [g] int32, dense, not empty: each group's END row in a 2-D `x`, or in `rows`. Rows from offs[-1] on
            are dead: neither read nor written, so that an allocated result has arbitrary bytes there. Read on the
            device: nothing waits for the host. Invalid offsets never cause out-of-bounds access.
        counts: [g] int32, dense, for `x` [g, m, k] with at most 1024 groups: live rows per group. Otherwise
            as `offs`.
        out: [..., k] float8_e4m3fn with unit column stride, to write to; allocated when None: contiguous, or, if k is
            not a multiple of 16, with rows at multiples of 16 bytes as GEMMs need; padding is not written. It
            must share no memory with `x` or `scale_out`.
        scale_out: [..., k_groups] float32, to write to; `scale_layout` then means nothing. Any strides, if leading
            dimensions can be flattened as a view.

    Returns:
        The [..., k] float8_e4m3fn tensor and its FP32 scale [..., k_groups], `k_groups = ceil(k / 128)`, with scale =
        max(group's largest magnitude, amax_floor) / 448 and element = x / scale, both rounded to FP32, then the element
        to e4m3, to nearest even.

    In a group that holds NaN or infinity the scale and every element become NaN; no other group changes.

    Raises:
        TypeError: `x` is not a tensor with a listed dtype, another tensor has the wrong dtype, a tensor is not a plain
            one (a wrapper, a negated view, sparse, ...), or `amax_floor` is no number.
        ValueError: `x` has no dimension, `scale_layout`, `round_scale` or `exact` is unknown, `amax_floor` out of
            range, another tensor's shape, strides or device do not fit, or a tensor has no memory; `counts` is
            given together with `rows` or `offs`.
        RuntimeError: `x`, `out` or `scale_out` requires a gradient, in grad mode; or, on a Hopper GPU, NVRTC or the
            driver is missing, or the kernel would have to be loaded while the stream is being captured.
    """
    options = (amax_floor, round_scale, exact, scale_layout)
    if rows is None and offs is None and counts is None:
        return TOKEN_CAST.run((x, out, scale_out), options)
    return ROWS_CAST.run((x, out, scale_out, rows, offs, counts), options)


def per_block_cast_to_fp8(
    w: torch.Tensor,
    *,
    amax_floor: float = SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights: one scale per 128 rows and 128 columns.

    `w` may require a gradient, since weights are parameters, but none flows through the cast.

    Args:
        w: [n, k], any n and k (edge blocks may be short), otherwise as `x` of `per_token_cast_to_fp8`.
        amax_floor, round_scale, exact, out: as for `per_token_cast_to_fp8`.
        scale_out: [ceil(n / 128), ceil(k / 128)] float32, any strides, to write to; allocated contiguous when None.

    Returns:
        The [n, k] float8_e4m3fn tensor and its FP32 scale [ceil(n / 128), ceil(k / 128)], computed as by
        `per_token_cast_to_fp8`. A block that holds NaN or infinity becomes NaN throughout; no other block changes.

    Raises:
        TypeError: as `per_token_cast_to_fp8`, except that `w` may require a gradient.
        ValueError: `w` is not 2-D; and as `per_token_cast_to_fp8`.
    """
    return BLOCK_CAST.run((w, out, scale_out), (amax_floor, round_scale, exact))


def dequantize(x: torch.Tensor, scale: torch.Tensor, *, block: tuple[int, int] | None = None) -> torch.Tensor:
    """Multiply every FP8 element by its block's scale.

    Args:
        x: [..., k] float8_e4m3fn, any strides; 2-D for 128x128 blocks.
        scale: float32, or bfloat16, float16 or float8_e8m0fnu, which are exact in FP32, any strides:
            [..., ceil(k / 128)] for 1x128 blocks, [ceil(rows / 128), ceil(k / 128)] for 128x128 blocks.
        block: (1, 128) or (128, 128) to require that scale block. Left out, the scale's shape decides; it fits both
            kinds only when `x` has one row or none, where both mean the same.

    Returns:
        A contiguous FP32 tensor [..., k].

    Raises:
        TypeError: `x` is not float8_e4m3fn, `scale` has an unlisted dtype, or one is not dense or is a negated view.
        ValueError: `x` has no dimension, or not two for 128x128 blocks, `block` is unknown, the scale's shape or device
            does not fit, or a tensor has no memory.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != FP8_DTYPE:
        remedy = ""
        if isinstance(x, torch.Tensor):
            whole = "multiply it with its scale by torch"
            remedy = f". To fix: {tensors.operand_remedy('x', x, (FP8_DTYPE,), {}, whole)}"
        raise TypeError(f"x is {_kind(x)}; dequantize takes a float8_e4m3fn tensor{remedy}")
    if not isinstance(scale, torch.Tensor) or scale.dtype not in tensors.SCALE_DTYPES:
        is_tensor = isinstance(scale, torch.Tensor)
        remedy = tensors.scale_remedy("scale", scale) if is_tensor else "pass one value per block"
        raise TypeError(
            f"scale is {_kind(scale)}; dequantize takes a tensor of {tensors.SCALE_NAMES}. To fix: {remedy}"
        )
    if not is_dynamo_compiling():  # dynamo knows its tensors and would have to trace the check
        tensors.require_dense(x=x, scale=scale)
    if scale.device != x.device:
        raise ValueError(f"scale is on {scale.device} but x is on {x.device}; move it with .to(x.device)")
    block = _find_block(x, scale, block)
    rows = as_matrix(x.float())
    blocks = _to_blocks(rows, block[0])
    return _from_blocks(blocks * as_matrix(tensors.as_float32(scale))[:, None, :, None], rows.shape).view(x.shape)


class Fake:
    """Stands for a tensor whose layout alone is known, in functions that allocate. These cache strides by sizes; sizes
    of a fake tensor may be symbols, which have no hash, so `strides` does not cache."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.new_empty_strided = x.shape, x.dtype, x.new_empty_strided

    def get_device(self) -> int:
        return -1

    def strides(self, function: Callable, shape: tuple, *layout: str) -> "_Strided":
        """The cached `function`'s result, without its cache. torch.jit.trace passes sizes as tensors; they become
        constants of its graph."""
        return function.__wrapped__(tuple(int(x) if isinstance(x, torch.Tensor) else x for x in shape), *layout)


class Casting(Operation):
    """An operation with one kernel and results in several layouts; `dtypes` are those of its first tensor."""

    dtypes = SOURCE_DTYPES

    def check_arguments(self, given: Given, options) -> None:
        check_source_dtype(self.names[0], given[0], self.dtypes)
        super().check_arguments(given, options)

    def fake(self, given: Given, options) -> torch.Tensor | tuple[torch.Tensor, ...]:
        made = self.allocated((Fake(given[0]), *given[1:]), options)
        return made[self._first_out] if self._has_one_out else made[self._written_to]

    def check_memory(self, given: Given, options):
        sources.check_memory(self.lists_of(given))
        return options

    def readable(self, given: Given) -> Given:
        return readable(given[0]), *given[1:]

    def needs_kernel(self, given: Given) -> bool:
        return needs_kernel(given[0], given[self._first_out])


def launch_of(
    operation: Operation,
    kernel: cast.StreamingKernel,
    grid: int,
    given: Given,
    numbers: Mapping[str, float],
    fields: tuple[str, ...],
    *,
    names: tuple[str, ...] | None = None,
    find: Callable[[torch.Tensor], Place] | None = None,
    **how,
) -> _launcher.Launch:
    """The launch for an operation that has one kernel.

    Args:
        numbers: values for the kernel's parameter table, by field.
        fields: fields of that table for the tensors that are not None, in order.
        names, find: for a launch within another call: the names of that call's tensors, and a function that finds a
            tensor's place in them.
        how: keywords of `cast.prepare_launch`.
    """
    device = given[0].get_device()
    check_capture(kernel, device, operation.called)
    present = {name: x for name, x in zip(operation.names, given, strict=True) if x is not None}
    found = {field: find(x) for field, x in zip(fields, present.values(), strict=True)} if find else places(fields)
    return cast.prepare_launch(kernel, grid, device, numbers, names or (*present,), found, **how)


class Cast(Casting):
    """A cast to FP8 with 1x128 scales (rows) or 128x128 scales (blocks).

    Args:
        x: the input's name.
        block_rows: 1 or 128, rows that share a scale.
        is_gated: `sources.silu_mul` is applied to the input first.
        how: as for `Operation`.
    """

    Options = CastOptions

    def __init__(
        self,
        name: str,
        x: str,
        keywords: str,
        *,
        block_rows: int = 1,
        is_gated: bool = False,
        **how,
    ) -> None:
        self.block, self.dtypes = (block_rows, SCALE_BLOCK), sources.GATED_DTYPES if is_gated else SOURCE_DTYPES
        self.is_gated, self.of_blocks = is_gated, block_rows > 1
        super().__init__(name, f"{x} out! scale_out!", keywords, **how)

    def values(self, options) -> Options:
        return Options(self.block[0], *options[:3])

    def shape(self, given: Given) -> tuple[int, ...]:
        if not self.lists:
            return given[0].shape
        return sources.result_shape(given[0], self.is_gated, self.lists_of(given))

    def allocated(self, given: Given, options: tuple) -> Given:
        x, out, scale = given[:3]
        shape = self.shape(given) if self.lists else x.shape
        out = empty_out(x, shape) if out is None else out
        if scale is None:
            scale = empty_block_scale(x, shape) if self.of_blocks else empty_scale(x, shape, options[_SCALE_LAYOUT])
        return (x, out, scale, *given[3:]) if self.lists else (x, out, scale)

    def check_arguments(self, given: Given, options) -> None:
        self.check_dtypes(given)
        super().check_arguments(given, options)
        _require_dimensions(self.names[0], given[0], self.block)

    def check_dtypes(self, given: Given) -> None:
        x, out, scale, *_ = given
        check_source_dtype(self.names[0], x, self.dtypes)
        sources.check_lists(x, self.lists_of(given))
        for name, target, dtype in (("out", out, FP8_DTYPE), ("scale_out", scale, torch.float32)):
            if target is not None:
                _check_target_dtype(name, target, dtype)

    def check(self, given: Given, options) -> None:
        self.check_dtypes(given)
        _require_dimensions(self.names[0], given[0], self.block)
        sources.check(self.names[0], given[0], self.is_gated, self.lists_of(given))
        check_targets(given[0], given[1:3], self.shape(given), self.block)

    def check_memory(self, given: Given, options):
        check_target_memory(*given[1:3])
        return super().check_memory(given, options)

    def define(self, given: Given, options) -> None:
        x, out, scale = map(as_matrix, given[:3])
        definition(x, self.values(options), out, scale, self.lists_of(given))

    def prepare(self, given: Given, options, **where) -> launches.Prepared:
        lists, values = self.lists_of(given), self.values(options)
        kernel, grid, numbers = chosen(*given[:3], values, lists)
        return launch_of(self, kernel, grid, given, numbers, cast.fields_of_rows((*lists,)), **where)


_SCALE_LAYOUT = CastOptions._fields.index("scale_layout")


def check_source_dtype(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = SOURCE_DTYPES) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {_kind(x)}; the cast takes a tensor of {wanted}")


def check_options(options: Options) -> None:
    for name in ("amax_floor", "round_scale", "exact"):
        check_one(name, getattr(options, name))


def needs_kernel(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Tensors without memory are left to torch, since no kernel can be launched with them."""
    return bool(x.numel() and out.numel()) and x.is_cuda and launches.is_hopper(x.get_device())


def check_target(name: str, target: torch.Tensor, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    _check_target_dtype(name, target, dtype)
    tensors.require_plain(**{name: target})
    _check_target_shape(name, target, shape, device)
    tensors.require_apart(name, target)


def _check_target_dtype(name: str, target: torch.Tensor, dtype: torch.dtype) -> None:
    if not isinstance(target, torch.Tensor) or target.dtype != dtype:
        raise TypeError(f"{name} is {_kind(target)}; the cast writes a tensor of {str(dtype).removeprefix('torch.')}")


def _check_target_shape(name: str, target: torch.Tensor, shape: tuple, device: torch.device) -> None:
    if target.dim() != len(shape) or not all(map(ops.holds, map(eq, target.shape, shape))):
        raise ValueError(f"{name} has shape {list(target.shape)}; for this input it must be {list(shape)}")
    if target.device != device:
        raise ValueError(f"{name} is on {target.device} but the input is on {device}; allocate it there")


@torch.no_grad()
def definition(x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists) -> None:
    if "rows" in lists:
        x = sources.gathered(x, lists["rows"])
    x = x.float() if options.gating is None else sources.silu_mul(x.float(), options.gating)
    # The divisor is a tensor: on a GPU torch divides by a number through its reciprocal, one rounding off. With
    # "divide" a block's largest element is then 448 within one FP32 rounding.
    divide = torch.div if options.exact == "divide" else _multiply_with_reciprocal
    blocks = _to_blocks(x, options.block_rows)
    amax = blocks.abs().amax((1, 3)).clamp(min=options.floor)
    amax = amax.masked_fill(amax.isinf(), float("nan"))
    of_blocks = _pow2_scale(amax) if options.round_scale == "pow2" else divide(amax, torch.full_like(amax, FP8_MAX))
    elements = _from_blocks(divide(blocks, of_blocks[:, None, :, None]).to(FP8_DTYPE), x.shape)
    lives = sources.living(len(out), lists)
    if lives is None:
        scale.copy_(of_blocks)
        out.copy_(elements)
        return
    scale.copy_(torch.where(lives[:, None], of_blocks, scale))
    codes = out.view(torch.uint8)  # torch.where supports uint8 everywhere
    codes.copy_(torch.where(lives[:, None], elements.view(torch.uint8), codes))


def _multiply_with_reciprocal(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return x * (torch.ones_like(divisor) / divisor)


def _pow2_scale(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= `amax` / 448, for normal floats; NaN for NaN.

    448 is 1.75 * 2**8. The result is amax's power of two divided by 2**8, doubled if the mantissa exceeds 1.75's
    (0x600000): the addition then carries into the exponent.
    """
    scale = (((amax.view(torch.int32) + 0x1FFFFF) & 0x7F800000) - (8 << 23)).view(torch.float32)
    return torch.where(amax.isnan(), amax, scale)


def readable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy if no kernel reads its dtype or layout.

    A copy keeps the shape of `x`, so its launch also serves contiguous inputs.
    """
    x = x.float() if x.dtype == torch.float64 else x
    try:
        rows = _matrix_of(x)
    except RuntimeError:
        return x.contiguous()
    return x.contiguous() if rows.shape[1] > 1 and rows.stride(1) != 1 else x


def chosen(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, options: Options, lists: sources.Lists
) -> tuple[cast.CastKernel, int, dict[str, float]]:
    """The cast's kernel, its grid size, and the values for its parameter table."""
    numbers = numbers_of(x, options, out, scale, lists)
    what = "silu_mul" if options.gating is not None else "listed" if lists else "plain"
    num_sms, size = launches.num_sms(x.get_device()), (numbers["rows"], numbers["columns"])
    return *cast.choose(options.block_rows, KERNEL_SOURCES[x.dtype], *size, num_sms, what), numbers


def numbers_of(
    x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> dict[str, float]:
    """The values for `params.CAST_OF_ROWS`, from tensors in the call's shapes; `x` is the input, or its copy by
    `readable`."""
    group_rows = out.shape[1] if "counts" in lists else 0
    groups = lists.get("counts", lists.get("offs"))
    gating = options.gating or sources.Gating(0.0, 0.0, 0.0)
    x, out, scale = map(_matrix_of, (x, out, scale))
    return {
        **matrix_numbers(*out.shape, x, out, scale),
        **options.numbers,
        "aligned": _takes_vectors(x, out),
        "x_rows": len(x),
        "wide_index": "rows" in lists and lists["rows"].dtype == torch.int64,
        "groups": 0 if groups is None else len(groups),
        "group_rows": group_rows,
        "limit": gating.limit,
        "sigmoid_factor": gating.sigmoid_factor,
        "beta": gating.beta,
    }


def matrix_numbers(
    rows: int, columns: int, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None
) -> dict[str, float]:
    """Sizes and strides, as all tables of casts have them."""
    row, column = (0, 0) if scale is None else scale.stride()[-2:]
    strides = {"x_stride": x.stride(-2), "out_stride": out.stride(-2)}
    return {"rows": rows, "columns": columns, **strides, "scale_stride_row": row, "scale_stride_column": column}


def _takes_vectors(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a kernel may read the matrix `x` and write `out` vector by vector."""
    elements = _VECTOR_BYTES // x.element_size()
    strides = (matrix.stride(0) for matrix in (x, out) if len(matrix) > 1)
    steps = all(number % elements == 0 for number in (out.shape[1], *strides))
    return steps and tensors.is_aligned(x) and tensors.is_aligned(out)


def check_capture(kernel: cast.StreamingKernel, device: int, call: str) -> None:
    if not cast.is_loaded(kernel, device):
        launches.refuse_capture(kernel.name, device, call)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    if block == TOKEN_BLOCK:
        return *shape[:-1], ceil_div(shape[-1], SCALE_BLOCK)
    return tuple(map(ceil_div, shape, block))


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """[..., k] -> [rows, k], a copy where it is no view."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _matrix_of(x: torch.Tensor) -> torch.Tensor:
    """[..., k] -> [rows, k] as a view. Raises RuntimeError where that takes a copy."""
    return x.view(prod(x.shape[:-1]), x.shape[-1])


def _view_as_matrix(name: str, target: torch.Tensor) -> torch.Tensor:
    """`_matrix_of` for a destination, with an error that names it."""
    try:
        return _matrix_of(target)
    except RuntimeError:
        raise ValueError(
            f"leading dimensions of {name} are not evenly spaced: shape {list(target.shape)}, strides "
            f"{target.stride()}. Pass one whose leading dimensions .view() can flatten, such as a contiguous one"
        ) from None


def _to_blocks(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """[rows, k] -> [row blocks, block_rows, k groups, 128], zero-padded: zeros change no block's largest magnitude."""
    rows, k = x.shape
    padded = F.pad(x, (0, -k % SCALE_BLOCK, 0, -rows % block_rows))
    return padded.reshape(ceil_div(rows, block_rows), block_rows, ceil_div(k, SCALE_BLOCK), SCALE_BLOCK)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    row_blocks, block_rows, groups, width = blocks.shape
    rows, k = shape
    return blocks.reshape(row_blocks * block_rows, groups * width)[:rows, :k].contiguous().flatten().view(shape)


def at_least_one(number: int) -> int:
    """The larger of a number or symbol and one: torch 2.11's compiler traces torch.sym_max of symbols alone."""
    return max(number, 1) if type(number) is int else torch.sym_max(number, 1)


class _Strided(NamedTuple):
    """A tensor's shape and strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], row: int, column: int) -> "_Strided":
        """Strides of flattened rows that are `row` elements apart."""
        strides, step = (at_least_one(column),), at_least_one(row)
        for size in shape[-2::-1]:
            strides = step, *strides
            step *= at_least_one(size)
        return _Strided(tuple(shape), strides)


def empty_out(x: torch.Tensor | Fake, shape: tuple[int, ...], dtype: torch.dtype = FP8_DTYPE) -> torch.Tensor:
    found = _out_strides(shape) if type(x) is not Fake else x.strides(_out_strides, shape)
    return tensors.new_empty(x, *found, dtype)


@lru_cache(maxsize=4096)
def _out_strides(shape: tuple[int, ...]) -> _Strided:
    """Strides with rows at multiples of 16 bytes."""
    return _Strided.of(shape, round_up(shape[-1], tensors.ALIGNMENT_BYTES), 1)


@lru_cache(maxsize=4096)
def _scale_strides(shape: tuple[int, ...], layout: str) -> _Strided:
    """Strides of the 1x128 scales for this shape, in the memory order `layout`.
    Raises ValueError for another name."""
    check_one("scale_layout", layout)
    m, groups = prod(shape[:-1]), ceil_div(shape[-1], SCALE_BLOCK)
    row, column = (groups, 1) if layout == "row" else (1, round_up(m, 4) if layout == "m_aligned" else m)
    return _Strided.of((*shape[:-1], groups), row, column)


@lru_cache(maxsize=4096)
def _weight_scale_strides(shape: tuple[int, ...]) -> _Strided:
    *leading, n, k = shape
    rows, columns = map(ceil_div, (n, k), WEIGHT_BLOCK)
    return _Strided.of((*leading, rows, columns), columns, 1)


def empty_block_scale(w: torch.Tensor | Fake, shape: tuple[int, ...]) -> torch.Tensor:
    found = _weight_scale_strides(shape) if type(w) is not Fake else w.strides(_weight_scale_strides, shape)
    return tensors.new_empty(w, *found, torch.float32)


def empty_scale(x: torch.Tensor | Fake, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    found = _scale_strides(shape, layout) if type(x) is not Fake else x.strides(_scale_strides, shape, layout)
    return tensors.new_empty(x, *found, torch.float32)


def _find_block(x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    if block is not None and (not isinstance(block, tuple) or block not in (TOKEN_BLOCK, WEIGHT_BLOCK)):
        raise ValueError(f"block is {block!r}; use {TOKEN_BLOCK}, {WEIGHT_BLOCK} or None")
    _require_dimensions("x", x, block or TOKEN_BLOCK)
    any_kind = (TOKEN_BLOCK, WEIGHT_BLOCK) if x.dim() == 2 else (TOKEN_BLOCK,)
    shapes = {kind: scale_shape(x.shape, kind) for kind in (any_kind if block is None else (block,))}
    for kind, shape in shapes.items():
        if scale.shape == shape:
            return kind
    wanted = " or ".join(f"{list(shape)} (blocks of {kind[0]}x{kind[1]})" for kind, shape in shapes.items())
    is_one, other_way = scale.numel() == 1, scale.shape[::-1] in shapes.values()
    remedy = "Transpose it with scale.t(); strides are free" if other_way else "Pass the scale of these blocks"
    if is_one or scale.shape in (x.shape[:-1], (*x.shape[:-1], 1)):
        remedy = f"{'One number' if is_one else 'A number for each row'} is multiplied by torch: x.float() * scale"
        remedy += "[..., None]" if not is_one and scale.dim() < x.dim() else ""
    raise ValueError(
        f"scale has shape {list(scale.shape)}; for x of shape {list(x.shape)} it must be {wanted}. {remedy}"
    )


def _require_dimensions(name: str, x: torch.Tensor, block: tuple[int, int]) -> None:
    if block == WEIGHT_BLOCK and x.dim() != 2:
        raise ValueError(
            f"{name} has shape {list(x.shape)}; blocks of 128x128 are of a 2-D tensor, so pass one matrix at a time"
        )
    if x.dim() == 0:
        raise ValueError(f"{name} has shape []; it must be [..., k], so pass {name}.reshape(1)")


def _kind(x: object) -> str:
    return f"a tensor of {str(x.dtype).removeprefix('torch.')}" if isinstance(x, torch.Tensor) else f"a {type(x)}"


def check_targets(x: torch.Tensor, targets: tuple, shape: tuple[int, ...], block: tuple[int, int] = (1, SCALE_BLOCK)):
    """Check dtypes and shapes of out and scale_out; either may be None."""
    dtypes, shapes = (FP8_DTYPE, torch.float32), (shape, scale_shape(shape, block))
    for name, target, dtype, wanted in zip(("out", "scale_out"), targets, dtypes, shapes, strict=True):
        if target is not None:
            _check_target_dtype(name, target, dtype)
            _check_target_shape(name, target, wanted, x.device)


def check_target_memory(out: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    """Check that a cast can write to both; either may be None."""
    for name, target in (("out", out), ("scale_out", scale)):
        if target is None:
            continue
        tensors.require_apart(name, target)
        rows = _view_as_matrix(name, target)
        if name == "out" and rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(
                f"out must have a unit column stride; its strides are {out.stride()}. Pass a row-major out"
            )


OP_OPTIONS = "amax_floor round_scale exact"

TOKEN_CAST = Cast(*("per_token_cast_to_fp8", "x", OP_OPTIONS), own="scale_layout", to_train="call deep_tile.fp8_linear")
ROWS_CAST = Cast(
    *("per_token_cast_rows_to_fp8", "x", f"rows offs counts {OP_OPTIONS}"),
    lists="rows offs counts",
    own="scale_layout",
    called="per_token_cast_to_fp8",
    to_train="call deep_tile.fp8_linear",
)
BLOCK_CAST = Cast(*("per_block_cast_to_fp8", "w", OP_OPTIONS), block_rows=SCALE_BLOCK, gradient_of=("out", "scale_out"))
