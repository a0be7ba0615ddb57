"""Products of other kinds than `fp8_gemm`'s: BF16 and FP16; INT8 with block scales; FP8 and INT8 with scales of rows;
FP8 with scales of 1x128 for both operands, as weight gradients have them; e5m2 mixed with e4m3.

Called by users. The warm path is api.py's: one call into C; and so are the checks that every product shares.
Invariant: a kind is a row of `kinds.KINDS`, and a call is one of `_CALLS`: the kinds that it makes, by scaling and by
the dtypes of their operands.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch

from deep_tile import _launcher, api, finishes, launches, ops, packed, params, plan, tensors, thin
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import KINDS, LAYOUT_NAMES, PACKED, Kind, Majors
from deep_tile.ops import is_traced
from deep_tile.problem import GemmProblem
from deep_tile.reference import (
    finished,
    fp8_gemm_reference,
    gemm_reference,
    row_blocks_gemm_reference,
    rows_gemm_reference,
    scaled_gemm_reference,
)

_is_on_gpu = attrgetter("is_cuda")

_launches: launches.Table = {}
"""By the `_Options` of a call, or the plain tuple equal to it."""


class _Options(NamedTuple):
    """Which of `_CALLS` it is, and its keywords, described at `gemm`."""

    call: str
    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False
    accumulate: bool = False
    activation: str | None = None
    fast_accum: bool = True


class Call(NamedTuple):
    """A function of this module, or of grouped.py.

    Attributes:
        kinds: that it makes, by the scaling and the dtypes of a and b.
        names: of its operands, in order.
        out_dtype: of what it allocates; None: that of the operands, of INT8 int32.
        remedy: for operands of another dtype.
        to_train: what has gradients instead; None: the call has them itself.
    """

    kinds: dict[tuple[str, torch.dtype, torch.dtype], Kind]
    names: tuple[str, ...]
    out_dtype: torch.dtype | None
    remedy: str
    to_train: str | None

    @property
    def dtypes(self) -> dict[torch.dtype, tuple[torch.dtype, ...]]:
        """Of a, and with each of these of b."""
        pairs = dict.fromkeys((a, b) for _, a, b in self.kinds)
        return {a: tuple(b for with_a, b in pairs if with_a == a) for a, _ in pairs}

    def kind_of(self, operands, scaling: Callable[..., str], fast_accum: bool) -> Kind:
        """What it makes of operands of dtypes that it takes; where these have several scalings, `scaling` says which
        one, of the operands and those scalings."""
        a, b = matrices(operands)
        known = [each for each, *dtypes in self.kinds if dtypes == [a.dtype, b.dtype]]
        found = scaling(operands, known) if len(known) > 1 else known[0]
        if found == "rows" and "promoted_rows" in known and not fast_accum:
            found = "promoted_rows"
        return self.kinds[found, a.dtype, b.dtype]


def kinds_of(*families: str) -> dict[tuple[str, torch.dtype, torch.dtype], Kind]:
    """All kinds of these families, by scaling and dtypes."""
    found = (kind for kind in KINDS.values() if kind.family in families)
    return {(kind.scaling, finishes.torch_dtype(kind.a), finishes.torch_dtype(kind.b)): kind for kind in found}


_SCALED = ("a", "a_scale", "b", "b_scale")
_LINEAR = "torch.nn.functional.linear"

PACKED_KINDS = {(kind.name, finishes.torch_dtype(kind.a), torch.uint8): kind for kind in PACKED.values()}
"""Those with packed weights, of which all have one dtype: their names are in the place of scalings."""

_CALLS = {
    "gemm": Call(kinds_of("bf16", "fp16", "int8_unscaled"), ("a", "b"), None, "a.to(torch.bfloat16)", None),
    "int8_gemm": Call(
        kinds_of("int8"),
        _SCALED,
        torch.bfloat16,
        "quantise to torch.int8, with a scale for each 1x128 and 128x128",
        _LINEAR,
    ),
    "scaled_gemm": Call(
        kinds_of("fp8_rows", "fp8_rows_promoted", "fp8_1x128", "fp8", "int8_rows", "int8"),
        _SCALED,
        torch.bfloat16,
        "quantise to torch.float8_e4m3fn or torch.int8, with a scale for each row, or one",
        _LINEAR,
    ),
    "packed_gemm": Call(
        PACKED_KINDS,
        _SCALED,
        torch.bfloat16,
        "cast a with deep_tile.per_token_cast_to_fp8, and make b with deep_tile.pack_weight",
        _LINEAR,
    ),
    "fp8_wgrad": Call(
        kinds_of("fp8_1x128"),
        ("dy", "dy_scale", "x", "x_scale"),
        torch.float32,
        "quantise with deep_tile.transposed_cast_to_fp8",
        _LINEAR,
    ),
}

REFERENCES = {
    "none": gemm_reference,
    "blocks": scaled_gemm_reference,
    "row_blocks": row_blocks_gemm_reference,
    "rows": rows_gemm_reference,
    "promoted_rows": rows_gemm_reference,
}
"""The definition of each scaling, of the operands and the dtype of the result."""


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
    accumulate: bool = False,
) -> torch.Tensor:
    """BF16, FP16 or INT8 matrix product: `out[m, n] = sum_k a[m, k] * b[n, k]`, that is `a @ b.T`.

    Accumulated over all of k, in FP32 and rounded once, where FP16 results beyond 65504 are infinite; or of INT8 in
    INT32, exactly where sums fit, as they do for k up to 131071, and modulo 2^32; for another dtype the sum over all of
    k is converted to FP32, and rounded. Runs on the tensors' device and torch's current stream; CPU tensors go through
    the operation's definition in `deep_tile.reference`. Sizes m, n and k are free; m = 0 or n = 0 does nothing, k = 0
    writes zeros. Compiled as one op, `torch.ops.deep_tile.gemm`, by torch.compile and torch.export.

    Each operand may lie along k or along its rows, as its strides say: `gemm(x, w)` is x @ w.T, `gemm(x, w.t())` x @ w
    and `gemm(dy.t(), x.t())` dy.T @ x of contiguous matrices, without a copy. Strides that say either, of a single row
    or a single k, mean along k.

    Differentiable in `a`, `b` and `bias`, without `out` and `activation`. Gradients of `a` and `b` are such products
    too, in the operands' dtype, to which the gradient of another result is rounded first; they are differentiable as
    well, but not those of the op.

    Args:
        a: [m, k] bfloat16, float16 or int8, 16-byte aligned: unit stride along k and a row stride that is a multiple of
            16 bytes, or, of 16 bits, unit stride along m and such a stride along k. A slice of a wider matrix will do.
        b: [n, k] of the same dtype, likewise along k or n: one row per output column, as `torch.nn.Linear` keeps
            weights. Or, with `a` of bfloat16, float32 along k: then the call is `thin_gemm`'s, and has neither bias,
            activation, config, num_sms, constant_weights nor gradients.
        out: [m, n] bfloat16, float16 or float32, or of INT8 int32, unit stride along n; allocated when None. Any
            alignment and row stride will do, but rows that begin and end at multiples of 16 bytes are stored faster.
            Must not overlap the inputs.
        bias, activation: as for `fp8_gemm`; not of int32.
        out_dtype: dtype of `out`: by default that of `out`, or of `a`, or int32 of INT8.
        config: the kernel to use instead of the selector's choice; its `layout` is that of the operands.
        num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`; the first three for gradients, too.
        accumulate: add the product to what `out` holds, which must be given; without bias and activation. It is rounded
            to the dtype of `out` first, and so is the sum: of bfloat16 and float16 both roundings count.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    options = ("gemm", out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, accumulate, activation, True)
    if getattr(b, "dtype", None) is torch.float32 and getattr(a, "dtype", None) is torch.bfloat16:
        return _multiply_wide(a, b, out, _Options(*options), bias)
    if is_traced():
        return _OPS["gemm"]((a, b, bias), (out,), _Options(*options))
    return _multiply((a, b), out, options, bias)


def int8_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
    accumulate: bool = False,
) -> torch.Tensor:
    """INT8 matrix product with block scales: `out = (a * a_scale) @ (b * b_scale)^T`.

    `out[m, n] = sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n // 128, k // 128]`: sums over 128 of k are
    exact in INT32, scaled and added in FP32, and rounded once. All else is as for `fp8_gemm`.

    Args:
        a: [m, k] int8, unit stride along k, row stride a multiple of 16 bytes, 16-byte aligned.
        a_scale: [m, ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes, any strides within 4 GB.
        b: [n, k] int8, laid out like `a`.
        b_scale: [ceil(n / 128), ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes, any strides within 4 GB.
        out: [m, n] bfloat16, float16 or float32, as for `gemm`; allocated when None.
        bias, activation: as for `fp8_gemm`.
        out_dtype: dtype of `out`: by default that of `out`, or bfloat16.
        config, num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.
        accumulate: as for `gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    options = (
        *("int8_gemm", out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, accumulate, activation),
        True,
    )
    if is_traced():
        return _OPS[options[0]]((a, a_scale, b, b_scale, bias), (out,), _Options(*options))
    return _multiply((a, a_scale, b, b_scale), out, options, bias)


def scaled_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
    accumulate: bool = False,
    fast_accum: bool = True,
) -> torch.Tensor:
    """FP8 or INT8 matrix product with scales of rows, or of blocks: `out = (a * a_scale) @ (b * b_scale)^T`.

    With a scale for each row, or one for all, `out[m, n] = a_scale[m] * b_scale[n] * sum_k a[m, k] * b[n, k]`. The
    tensor cores add up all of k: exactly in INT32 of INT8, for k up to 131071, and the sum is then converted to FP32
    and multiplied by the product of its scales; of FP8 with the 14 bits or so that they keep of a sum, which is torch's
    `use_fast_accum=True`. Without `fast_accum`, sums over 128 of k are added in FP32.

    With a scale for each 128 of a row of FP8 (1x128, of both operands),
    `out[m, n] = sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n, k // 128]`: sums over 128 of k are scaled
    and added in FP32, as by `fp8_gemm`. With scales of 1x128 and of 128x128 for b, it is `fp8_gemm` or `int8_gemm`, of
    FP8 in either format. All else is as for these.

    Args:
        a: [m, k] float8_e4m3fn, float8_e5m2 or int8, unit stride along k, row stride a multiple of 16 bytes, 16-byte
            aligned.
        a_scale: float32, bfloat16, float16 or float8_e8m0fnu: [m] or [m, 1], or one number of any shape; or
            [m, ceil(k / 128)], any strides within 4 GB, fastest as `per_token_cast_to_fp8` makes them.
        b: [n, k] laid out like `a`: of FP8 too, in either format, or int8.
        b_scale: likewise: [n], [n, 1] or [1, n], or one number; torch's scales of tensors and of rows are these. With
            blocks in a_scale [n, ceil(k / 128)] of FP8, or [ceil(n / 128), ceil(k / 128)].
        out: [m, n] bfloat16, float16 or float32, as for `gemm`; allocated when None.
        bias, activation: as for `fp8_gemm`.
        out_dtype: dtype of `out`: by default that of `out`, or bfloat16.
        config, num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.
        accumulate: as for `gemm`.
        fast_accum: of FP8 with scales of rows, as said above; means nothing to others.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    options = (
        *("scaled_gemm", out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, accumulate, activation),
        fast_accum,
    )
    if is_traced():
        return _OPS[options[0]]((a, a_scale, b, b_scale, bias), (out,), _Options(*options))
    return _multiply((a, a_scale, b, b_scale), out, options, bias)


def packed_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
    accumulate: bool = False,
) -> torch.Tensor:
    """`fp8_gemm` with a weight of 4 bits, which becomes FP8 between memory and the tensor cores.

    The product is that of `a` and the FP8 weight that `pack_weight` says, bit for bit as by the same tile with that
    weight; what is read is 17/32 of the bytes, 18/32 of NVFP4. Not differentiable.

    Args:
        a: [m, k] float8_e4m3fn, as for `fp8_gemm`.
        a_scale: [m, ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes.
        b, b_scale: a `Packed`, as `pack_weight` makes it of [n, k]; `b` contiguous, 16-byte aligned.
        out, bias, activation, out_dtype, accumulate: as for `scaled_gemm`.
        config: as for `fp8_gemm`; its kind is that of the weight, "mxfp4" or "nvfp4".
        num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    options = (
        *("packed_gemm", out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, accumulate, activation),
        True,
    )
    if is_traced():
        return _OPS[options[0]]((a, a_scale, b, b_scale, bias), (out,), _Options(*options))
    return _multiply((a, a_scale, b, b_scale), out, options, bias)


def fp8_wgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    x: torch.Tensor = tensors.MISSING,
    x_scale: torch.Tensor = tensors.MISSING,
    out: torch.Tensor = tensors.MISSING,
    *,
    accumulate: bool = True,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Gradient of a linear layer's weight, `out += dy^T @ x` over tokens, of operands that were cast along tokens.

    `out[n, k] += sum_s dy[n, s] * dy_scale[n, s // 128] * x[k, s] * x_scale[k, s // 128]`, for s tokens: the product of
    `scaled_gemm` with scales of 1x128, named for what it is used for. s, n and k are free; without tokens nothing is
    added. `transposed_cast_to_fp8` makes such operands of dy [s, n] and x [s, k].

    Args:
        dy: [n, s] float8_e4m3fn or float8_e5m2, unit stride along tokens, row stride a multiple of 16 bytes, 16-byte
            aligned.
        dy_scale: [n, ceil(s / 128)] float32, bfloat16, float16 or float8_e8m0fnu, any strides within 4 GB.
        x: [k, s] of either dtype, laid out like `dy`.
        x_scale: [k, ceil(s / 128)], likewise.
        out: [n, k] float32, bfloat16 or float16; unit stride along k, otherwise as for `gemm`.
        accumulate: add to what `out` holds, as `gemm` does, rather than write over it.
        config, num_sms, batch_invariant, pdl: as for `fp8_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    if out is None:
        tensors.require_tensors(dy=dy, dy_scale=dy_scale, x=x, x_scale=x_scale)
        raise tensors.no_tensor("out", out, "pass what the gradient is added to, of [n, k]")
    options = ("fp8_wgrad", None, config, num_sms, batch_invariant, pdl, False, accumulate, None, True)
    if is_traced():
        return _OPS["fp8_wgrad"]((dy, dy_scale, x, x_scale), (out,), _Options(*options))
    return _multiply((dy, dy_scale, x, x_scale), out, options)


def _multiply(operands: tuple[torch.Tensor, ...], out: torch.Tensor | None, options: tuple, bias=None) -> torch.Tensor:
    """A call outside of tracing; `options` are equal to an `_Options`."""
    try:
        if torch.is_grad_enabled() and _wants_gradient(*operands, out, bias):
            _refuse_gradients(_Options(*options), operands, out, bias)
            return _Differentiable.apply(*operands, bias, options)
        if out is None:
            _refuse_sum_of_nothing(_Options(*options))
            out = _empty_out(operands, _Options(*options))
        if not _launcher.launch_known(_launches, options, *operands, out, *_given(bias)):
            _call_unknown(operands, out, _Options(*options), bias)
    except Exception:
        check = _check_arguments if out is None else _checked_options
        reason = api.error_of(check, _Options(*options), operands, out, bias)
        if reason is None:
            raise
        raise reason from None
    return out


def _multiply_wide(a: torch.Tensor, b: torch.Tensor, out, options: _Options, bias) -> torch.Tensor:
    """`gemm` of BF16 and FP32."""
    refused = {"bias": bias, "activation": options.activation, "config": options.config, "num_sms": options.num_sms}
    for name, given in {**refused, "constant_weights": options.constant_weights or None}.items():
        if given is not None:
            raise ValueError(f"{name} is given, and b is torch.float32: leave it out, or pass b.to(torch.bfloat16)")
    return thin.thin_gemm(
        *(a, b, out),
        out_dtype=options.out_dtype or (a.dtype if out is None else None),
        accumulate=options.accumulate,
        batch_invariant=options.batch_invariant,
        pdl=options.pdl,
    )


def _wants_gradient(*tensors_or_none: torch.Tensor | None) -> bool:
    """A loop takes 0.8 us less than `any` of a generator."""
    for x in tensors_or_none:  # noqa: SIM110
        if x is not None and x.requires_grad:
            return True
    return False


def _given(bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if bias is None else (bias,)


def _empty_out(operands, options: _Options) -> torch.Tensor:
    a, b = matrices(operands)
    return api.empty_out(a, b, _result_dtype(options, a), options.activation)


def _result_dtype(options: _Options, a: torch.Tensor) -> torch.dtype:
    return result_dtype(_CALLS[options.call], options.out_dtype, a)


def result_dtype(call: Call, out_dtype: torch.dtype | None, a: torch.Tensor) -> torch.dtype:
    """Of an `out` that is not given."""
    return out_dtype or call.out_dtype or (torch.int32 if a.dtype == torch.int8 else a.dtype)


def _refuse_sum_of_nothing(options: _Options) -> None:
    if options.accumulate:
        raise ValueError("accumulate is True and out None: pass what the product is added to")


def matrices(operands) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b, without scales."""
    return operands[0], operands[len(operands) // 2]


def _refuse_gradients(options: _Options, operands, out, bias) -> None:
    """Raise where torch would record a product of these tensors that has no gradient to give back."""
    if not torch.is_grad_enabled():
        return
    for name, x in zip((*_CALLS[options.call].names, "out", "bias"), (*operands, out, bias), strict=True):
        if x is not None and x.requires_grad:
            _refuse_gradient(name, options, out is not None)


def _refuse_gradient(name: str, options: _Options, has_out: bool) -> None:
    """Raise unless the call has a gradient, which the tensor of this name wants."""
    to_train = _CALLS[options.call].to_train
    if to_train is not None:
        why = f"{options.call} has none. To train, call {to_train}"
    elif has_out:
        why = "what is written to an out has none. To train, drop out"
    elif options.activation is not None:
        why = f"{options.call} has none with activation {options.activation!r}. To train, apply it by torch"
    else:
        return
    raise RuntimeError(
        f"{name} requires a gradient, and {why}; otherwise call within torch.no_grad(), or pass {name}.detach(), or "
        f"freeze it with {name}.requires_grad_(False)"
    )


# Gradients of `gemm`.


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, options):
        out = _multiply((a, b), None, options, bias)
        _keep(ctx, ctx.needs_input_grad, a, b, bias, _Options(*options))
        return out

    @staticmethod
    def backward(ctx, grad):
        by_op = is_traced() or not tensors.is_plain(grad)
        return *_gradients(torch.ops.deep_tile.gemm_gradient if by_op else _multiply_gradient, ctx, grad), None


def _keep(ctx, needed, a, b, bias, options: _Options) -> None:
    """What the gradients of a, b and bias are made of, those that are `needed`."""
    ctx.needed = needed
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None)
    ctx.dtypes = (a.dtype, None if bias is None else bias.dtype)
    ctx.options = options


def _gradients(multiply, ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of a, b and bias: grad @ b, grad^T @ a, and the sum of grad's rows. `multiply` is `_multiply_gradient` or its op,
    since backward may be traced."""
    a, b = ctx.saved_tensors
    dtype, bias_dtype = ctx.dtypes
    options = {name: getattr(ctx.options, name) for name in ("num_sms", "batch_invariant", "pdl")}
    narrow = grad.to(dtype)
    of_a = multiply(narrow, b, False, **options) if ctx.needed[0] else None
    of_b = multiply(narrow, a, True, **options) if ctx.needed[1] else None
    of_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype) if len(ctx.needed) > 2 and ctx.needed[2] else None
    return of_a, of_b, of_bias


def _multiply_gradient(grad: torch.Tensor, x: torch.Tensor, transposed: bool, **options) -> torch.Tensor:
    """grad @ x, or grad^T @ x, of matrices of one dtype; a copy of grad, if no kernel can read that."""
    if not _is_readable(grad):
        grad = tensors.with_aligned_rows(grad)
    return _multiply((grad.t() if transposed else grad, x.t()), None, _Options("gemm", **options))


def _call_unknown(operands, out, options: _Options, bias) -> None:
    """Multiply where C has met no such options and signature, or cannot read the tensors."""
    _check_arguments(options, operands, out, bias)
    operands = tensors.with_float32_scales(operands)
    given = (*operands, out, *_given(bias))
    launches.enqueue(_launches, options, given, partial(_first_launch, operands, out, options, bias))


def _first_launch(operands, out, options: _Options, bias) -> _launcher.Launch | None:
    """That of a signature not met before, checked; None when the result is in `out`."""
    checked = _checked_options(options, operands, out, bias)
    a, b = matrices(operands)
    if _is_on_gpu(a) and min(*a.shape, *b.shape) > 0:
        return _prepare_launch(operands, out, checked, bias)
    _compute_without_kernel(operands, out, options, bias)
    return None


@torch.inference_mode()  # in which any tensor may be written to, whether it requires a gradient or not
def _compute_without_kernel(operands, out, options: _Options, bias) -> None:
    if out.is_meta or not out.numel():
        return
    is_finished = bias is not None or options.activation is not None
    dtype = torch.float64 if is_finished else out.dtype
    a, b = matrices(operands)
    if a.shape[1]:
        kind = _kind(options, operands)
        reference = fp8_gemm_reference if kind.packing else REFERENCES[kind.scaling]
        product = reference(*unpacked(operands), dtype)
    else:
        product = a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)  # also with scales that are infinite
    if is_finished:
        product = finished(product, bias, options.activation)
    if options.accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def _prepare_launch(operands, out, options: _Options, bias) -> _launcher.Launch:
    """For a call that has been checked and needs a kernel."""
    device, problem = out.get_device(), _problem(operands, out, options, bias)
    layout = _layout(operands, out, problem.product)
    problem = problem.with_strides(layout.a_stride, layout.b_stride)
    config = api.kernel_for(problem, options.config, device, options.call)
    of_bias = ["bias"] * len(_given(bias))
    of_kernel = plan.TENSORS if len(operands) == 4 else ("a", "b", "out")
    return plan.prepare_launch(
        problem,
        config,
        layout._replace(bias_stride=0 if bias is None else bias.stride(0)),
        device,
        pdl=options.pdl,
        constant_weights=options.constant_weights,
        names=(*_CALLS[options.call].names, "out", *of_bias),
        places=params.places((*plan.as_kernels_name(of_kernel, problem.product), *of_bias)),
    )


def _problem(operands, out, options: _Options, bias=None) -> GemmProblem:
    a, b = matrices(operands)
    return GemmProblem(
        *(a.shape[0], b.shape[0], a.shape[1]),
        num_sms=options.num_sms,
        tma_store=api.tma_can_store(out),
        split_k=not options.batch_invariant,
        kind=_kind(options, operands).name,
        output=finishes.RESULT_NAMES[out.dtype],
        accumulate=options.accumulate,
        **finishes.for_problem(bias, options.activation),
        layout=LAYOUT_NAMES[_majors(a, b)],
    )


def unpacked(operands) -> tuple[torch.Tensor, ...]:
    """Operands of a product, or of one with groups, whose b is no longer packed, if it was."""
    if operands[len(operands) // 2].dtype != torch.uint8:
        return operands
    a, a_scale, b, b_scale = operands
    return a, a_scale, packed.as_fp8(b, b_scale, a.shape[-1]), b_scale


def _majors(a: torch.Tensor, b: torch.Tensor) -> Majors:
    """Along what operands that kernels can read lie."""
    return Majors(*(along if _lies_along_rows(x) else "k" for x, along in ((a, "m"), (b, "n"))))


def _lies_along_rows(x: torch.Tensor) -> bool:
    return x.element_size() == 2 and api.along_k_problem("", x) is not None


def _kind(options: _Options, operands) -> Kind:
    """What a call makes of operands of dtypes that it takes."""
    return _CALLS[options.call].kind_of(operands, _scaling, options.fast_accum)


def _scaling(operands, known: list[str]) -> str:
    """Which of several scalings that are known for its dtypes a product has, by the shapes of its scales. Where k has
    one block and n as well, all mean the same."""
    a, a_scale, b, b_scale = operands
    if b.dtype == torch.uint8:
        return packed.name_of(b, a.shape[-1])
    of_a, of_b = _is_of_blocks(a, a_scale), _is_of_blocks(b, b_scale)
    several = a.dim() == 2 and not 0 < a.shape[1] <= SCALE_BLOCK
    if of_a and not of_b and _is_of_blocks(b, b_scale, SCALE_BLOCK) and (several or b.shape[0] > SCALE_BLOCK):
        return "blocks"
    if several and (of_a or of_b):
        return "row_blocks" if "row_blocks" in known else "blocks"
    return "rows"


def _is_of_blocks(x: torch.Tensor, scale: torch.Tensor, rows: int = 1) -> bool:
    """Whether a scale has one number for each 128 of k in so many rows."""
    if x.dim() != 2 or scale.dim() != 2:
        return False
    return scale.shape[1] == ceil_div(x.shape[1], SCALE_BLOCK) and scale.shape[0] == ceil_div(x.shape[0], rows)


def _layout(operands, out, kind: Kind) -> plan.Layout:
    """Strides of the call. Of a single row torch may report any stride, which TMA would refuse: it gets a legal one."""

    def row_stride(x: torch.Tensor) -> int:
        return x.stride(0) if x.shape[0] > 1 else round_up(x.shape[1], tensors.ALIGNMENT_BYTES // x.element_size())

    as_stored = (x.t() if _lies_along_rows(x) else x for x in matrices(operands))
    strides = [row_stride(x) for x in (*as_stored, out)]
    if kind.packing:
        strides[1] = operands[0].shape[1]  # as if it were FP8: there is no map
    if kind.scaling == "none":
        return plan.Layout(*strides, (0, 0), (0, 0), False)
    _, a_scale, _, b_scale = operands
    if kind.row_scales:
        return plan.Layout(*strides, (_step(a_scale), 0), (_step(b_scale), 0), False)
    aligned = tensors.is_aligned(a_scale), tensors.is_aligned(b_scale)
    return plan.Layout(
        *strides, a_scale.stride(), b_scale.stride(), a_scale_aligned=aligned[0], b_scale_aligned=aligned[1]
    )


def _step(scale: torch.Tensor) -> int:
    """From one row's scale to the next one's; 0 where there is one of all."""
    return sum(stride for size, stride in zip(scale.shape, scale.stride(), strict=True) if size > 1)


# Checks.


def _check_arguments(options: _Options, operands, out, bias) -> None:
    """Check of each argument by itself what it is; `out` may be None."""
    given = dict(zip(_CALLS[options.call].names, operands, strict=True)) | ({} if out is None else {"out": out})
    tensors.require_tensors(**given)
    finishes.check_bias_kind(bias)
    _refuse_gradients(options, operands, out, bias)
    _check_option_types(options)


def _check_option_types(options: _Options) -> None:
    finishes.check_out_dtype(options.out_dtype, finishes.RESULT_NAMES)
    finishes.check_activation(options.activation)
    api.check_config_type(options.config)
    for name in ("num_sms", "batch_invariant", "pdl", "constant_weights", "accumulate", "fast_accum"):
        api.check_option(name, getattr(options, name))


def check_sum(call: str, operands, out: torch.Tensor, **options) -> None:
    """Raise what `call`, a function of this module, would raise where it is to add a product to `out`."""
    _checked_options(_Options(call, accumulate=True, **options), operands, out, None)


def _checked_options(options: _Options, operands, out, bias) -> _Options:
    """Check everything that can be wrong about a call; the options, with num_sms and pdl filled in."""
    _check_arguments(options, operands, out, bias)
    _check_formats(options, operands, out, bias)
    a, b = matrices(operands)
    a_name, b_name = matrices(_CALLS[options.call].names)
    api.check_sizes(a, b)
    for name, x in ((a_name, a), (b_name, b)):
        if x.dtype == torch.uint8:
            packed.check_memory(name, x)
        else:
            _check_operand(name, x)
    if len(operands) == 4:
        for name, scale in ((a_name, operands[1]), (b_name, operands[3])):
            problem = api.scale_problem(name, tuple(scale.shape), scale.stride())
            if problem:
                raise ValueError(problem)
    api.check_out_strides(out)
    api.check_constant_weights(options)
    return api.with_defaults(options, a.device)


def _check_operand(name: str, x: torch.Tensor) -> None:
    """Check that kernels can read a matrix [rows, k]: along k, or, of 16 bits, along its rows."""
    if x.element_size() != 2:
        api.check_operand_strides(**{name: x})
    else:
        problem = _strides_problem(name, x)
        if problem:
            raise ValueError(problem)
        api.check_alignment(name, x)
    size, what = (
        (x.shape[0], f"{name} has {x.shape[0]} rows") if _lies_along_rows(x) else (x.shape[1], f"k is {x.shape[1]}")
    )
    if size * x.element_size() > api.MAX_SIZE:
        raise ValueError(f"{what}; of {x.dtype} at most {api.MAX_SIZE // x.element_size()}: split the product")


def _strides_problem(name: str, x: torch.Tensor) -> str | None:
    """Why no kernel can read a matrix of 16 bits, either way; but for its address."""
    along_k = api.along_k_problem(name, x)
    if along_k is None:
        return None
    rows, k = x.shape
    along_rows = api.stride_problem(name, k, rows, x.stride(1), x.element_size(), "column")
    adjacent = rows < 2 or x.stride(0) == 1
    if adjacent and along_rows is None:
        return None
    if k < 2 or x.stride(1) == 1:
        return along_k
    if rows > 1 and adjacent:
        return along_rows
    return (
        f"{name} must have a unit stride along k or along its rows; its strides are {x.stride()}. Make it K-major: "
        f"{name}.contiguous()"
    )


def _is_readable(x: torch.Tensor) -> bool:
    """Whether kernels can read a matrix of 16 bits, or its transpose."""
    return _strides_problem("", x) is None and tensors.is_aligned(x)


def _check_formats(options: _Options, operands, out, bias) -> None:
    """Check dtypes, devices and shapes; `out` may be None."""
    call, (a, b) = _CALLS[options.call], matrices(operands)
    a_name, b_name = matrices(call.names)
    is_narrow = options.call in ("gemm", "int8_gemm")
    check_dtypes(call, operands, dict.fromkeys(tensors.QUANTIZED_DTYPES, "scaled_gemm") if is_narrow else {})
    kind, is_finished = _kind(options, operands), bias is not None or options.activation is not None
    finishes.check_out_dtype(options.out_dtype, finishes.of_kind(kind))
    finishes.check_out(out, options.out_dtype, finishes.of_kind(kind))
    if is_finished and (_result_dtype(options, a) if out is None else out.dtype) == torch.int32:
        raise ValueError(
            "the result is torch.int32, and a bias or an activation is given, which are applied in FP32: pass "
            "out_dtype=torch.float32"
        )
    if options.accumulate and is_finished:
        raise ValueError("accumulate is True, and a bias or an activation is given: add the product alone")
    api.check_device(a_name, a, options.call)
    api.check_devices(a, **dict(zip(call.names[1:], operands[1:], strict=True)), out=out)
    as_fp8 = b if kind.packing is None else packed.shaped(a, b)
    api.check_product_shapes(a, as_fp8, out, options.activation, (a_name, b_name))
    finishes.check_finish(bias, options.activation, b)
    if kind.scaling == "blocks":
        api.check_scale_shapes(a, operands[1], as_fp8, operands[3])
    elif kind.scaling == "row_blocks":
        check_row_block_scales(call.names, operands)
    elif kind.row_scales:
        _check_row_scales(*operands)


def check_dtypes(call: Call, operands, takers: Mapping[torch.dtype, str]) -> None:
    """Check those of operands and scales; `takers` are as for `tensors.operand_remedy`."""
    (a, b), (a_name, b_name) = matrices(operands), matrices(call.names)
    if len(operands) == 4:
        tensors.check_order(call.names, operands)
    if a.dtype not in call.dtypes:
        remedy = tensors.operand_remedy(a_name, a, call.dtypes, takers, call.remedy)
        raise TypeError(f"{a_name} must be {finishes.one_of(call.dtypes)}; got {a.dtype}. To fix: {remedy}")
    known = call.dtypes[a.dtype]
    if b.dtype not in known:
        wanted = " or ".join(map(str, known))
        remedy = tensors.operand_remedy(b_name, b, known, takers, "make both of one dtype")
        raise TypeError(f"{b_name} must be {wanted}, since {a_name} is {a.dtype}; got {b.dtype}. To fix: {remedy}")
    if len(operands) == 4:
        api.check_scale_dtypes(call.names, operands)


def check_row_block_scales(names: tuple[str, ...], operands) -> None:
    for at in (0, 2):
        x, scale, name = operands[at], operands[at + 1], names[at + 1]
        wanted = (x.shape[0], ceil_div(x.shape[1], SCALE_BLOCK))
        if not api.has_shape(scale, wanted):
            remedy = api.scale_shape_remedy(name, scale, wanted, x)
            raise ValueError(
                f"{name} must have shape {wanted}, one for each 128 of a row of {names[at]}; got {tuple(scale.shape)}. "
                f"{remedy or f'To fix: cast {names[at]} with scales of 1x128'}"
            )


def _check_row_scales(a, a_scale, b, b_scale) -> None:
    for name, x, scale in (("a", a, a_scale), ("b", b, b_scale)):
        rows = x.shape[0]
        long = [size for size in scale.shape if not isinstance(size, int) or size != 1]
        if long and not (len(long) == 1 and ops.holds(long[0] == rows)):
            raise ValueError(
                f"{name}_scale must have one number, or one for each of {name}'s {rows} rows, as [{rows}] or "
                f"[{rows}, 1]; got {tuple(scale.shape)}. Or give both scales of blocks: a_scale [m, ceil(k / 128)], "
                "b_scale [ceil(n / 128), ceil(k / 128)], or of FP8 [n, ceil(k / 128)]"
            )


# The ops, which tracers see.


def _op(call: str) -> ops.Op:
    names, is_sum = _CALLS[call].names, call == "fp8_wgrad"

    def parts(inputs: tuple) -> tuple:
        """The operands and the bias."""
        return inputs[: len(names)], inputs[-1] if len(inputs) > len(names) else None

    def options_of(options: dict) -> _Options:
        return _Options(call, **{"accumulate": is_sum} | options)

    def run(inputs: tuple, outs: tuple, options: dict) -> torch.Tensor:
        operands, bias = parts(inputs)
        return _multiply(operands, *outs, options_of(options), bias)

    def check(inputs: tuple, outs: tuple, options: dict) -> None:
        (operands, bias), (out,), options = parts(inputs), outs, options_of(options)
        _check_option_types(options)
        if out is None:
            _refuse_sum_of_nothing(options)
        _refuse_gradients(options, operands, out, bias)
        _check_formats(options, operands, out, bias)

    def allocate(inputs: tuple, options: dict) -> torch.Tensor:
        (a, b), options = matrices(parts(inputs)[0]), options_of(options)
        return a.new_empty(
            a.shape[0], finishes.out_columns(b.shape[0], options.activation), dtype=_result_dtype(options, a)
        )

    return ops.Op(
        call,
        " ".join((*names, "out!", *([] if is_sum else ["bias?"]))),
        _OP_OPTIONS[call],
        *(run, check, allocate),
        defaults={"accumulate": is_sum},
        allocates=not is_sum,
        flops=ops.product_flops(second=len(names) // 2),
        **({} if _CALLS[call].to_train else {"backward": _backward, "setup_context": _setup_context}),
    )


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    a, b, bias = inputs
    options = _Options("gemm", **keyword_only_inputs)
    for name, needed in zip(("a", "b", "bias"), ctx.needs_input_grad, strict=False):
        if needed:
            _refuse_gradient(name, options, has_out=False)
    _keep(ctx, ctx.needs_input_grad, a, b, bias, options)


def _backward(ctx, grad):
    return _gradients(torch.ops.deep_tile.gemm_gradient, ctx, grad)


def _run_gradient(grad, x, transposed, **options) -> torch.Tensor:
    if torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad):
        raise RuntimeError(
            "a gradient of a gradient is wanted, which torch.ops.deep_tile.gemm has none of. Call deep_tile.gemm, or "
            "drop create_graph"
        )
    return _multiply_gradient(grad, x, transposed, **options)


def _fake_gradient(grad, x, transposed, **_) -> torch.Tensor:
    return grad.new_empty(grad.shape[1] if transposed else grad.shape[0], x.shape[1])


_OF_PRODUCTS = "activation out_dtype num_sms batch_invariant pdl constant_weights accumulate"

_OP_OPTIONS = {
    "gemm": _OF_PRODUCTS,
    "int8_gemm": _OF_PRODUCTS,
    "scaled_gemm": f"{_OF_PRODUCTS} fast_accum",
    "packed_gemm": _OF_PRODUCTS,
    "fp8_wgrad": "accumulate num_sms batch_invariant pdl",
}

_OPS = {call: _op(call) for call in _CALLS}

ops.register(
    "gemm_gradient(Tensor grad, Tensor x, bool transposed, *, "
    f"{ops.keywords('num_sms batch_invariant pdl')}) -> Tensor",
    _run_gradient,
    _fake_gradient,
    flops=lambda grad, x, *_, **__: 2 * prod(grad) * x[1],
)
