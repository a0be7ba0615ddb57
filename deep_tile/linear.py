"""A linear layer in one call: the input is cast to FP8 and multiplied by weights in FP8.

On a Hopper GPU one C call enqueues cast and GEMM as programmatic dependent launches: the GEMM's blocks start and
prefetch weights while the cast still runs. A workspace holds the quantised input. Invariant: the result equals
`per_token_cast_to_fp8` then `fp8_gemm` bit for bit, including bias and dtype.
"""

import math
import threading
from functools import lru_cache
from typing import NamedTuple

import torch

from deep_tile import _launcher, both, cast, checks, dense, launches, ops, params, quantize, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.gradients import once_differentiable
from deep_tile.kinds import EVERY_KIND, Kind
from deep_tile.operation import Given, Operation
from deep_tile.ops import is_traced
from deep_tile.params import Place
from deep_tile.problem import GemmProblem

_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDE = "torch.bfloat16, torch.float16 or torch.float32"

_WORKSPACE_ALIGNMENT = 256

_KEPT_BYTES = 3 << 20
"""Largest workspace that a thread keeps per stream. An input that needs more keeps the GPU busy for longer than
torch takes to allocate one."""

_MOST_KEPT = 64
"""Workspaces per thread; one more, and all are dropped."""


class Options(NamedTuple):
    """A call's keywords, described at `fp8_linear`."""

    out_dtype: torch.dtype | None = None
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None


class _Kept(threading.local):
    """This thread's workspaces, by device and stream.

    Kernels on one stream run in order, and a thread enqueues its two kernels before anything else, so one workspace per
    thread and stream suffices. Two threads may interleave kernels on one stream.
    """

    def __init__(self):
        self.by_op = False  # of a call that may keep none
        self.workspaces: dict[tuple[int, int], torch.Tensor] = {}


_kept = _Kept()


def fp8_linear(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    b: torch.Tensor,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """`x @ (b * b_scale)^T + bias`, with `x` quantised to FP8 on the way: a linear layer.

    The result has the bits of `per_token_cast_to_fp8(x)` followed by `fp8_gemm`. On a Hopper GPU one call enqueues both
    kernels on torch's current stream. The quantised input is in a cached workspace; for large inputs and during the
    capture of a CUDA graph, torch allocates it.

    Differentiable in `x`, in `bias` and in a `b` that is not FP8; once. If `b` is FP8, the gradient for `x` is an FP8
    GEMM: the output's gradient, quantised with 1x128 scales, by the transpose of `b`. If `b` is not FP8, both gradients
    are torch GEMMs in the output's dtype on the unquantised tensors; `deep_tile.train.linear` runs all three GEMMs in
    FP8.

    Args:
        x: [..., k] bfloat16, float16 or float32, any k. Fastest if contiguous with rows at multiples of 16 bytes.
            Leading dimensions that do not flatten to one stride, and other column strides, are copied first. Or the
            pair that `per_token_cast_to_fp8` returned, for layers that share one cast: only the GEMM is launched, and
            there is no gradient for it. After `import deep_tile.distributed` also a DTensor, if all tensors are.
        b: [n, k] float8_e4m3fn, as `fp8_gemm` takes it, e.g. from `quantize_weight`; or, without `b_scale`, a bfloat16,
            float16 or float32 weight, which every call quantises.
        b_scale: [ceil(n / 128), ceil(k / 128)] float32, any strides; or bfloat16, float16 or float8_e8m0fnu, which a
            torch kernel converts to float32 first.
        bias: [n] bfloat16, float16 or float32, added in FP32 before the product is rounded, as by `fp8_gemm`.
        out: [..., n] in the result's dtype with a unit stride along n, to write to; allocated when None.
        out_dtype: dtype of the result, to which it is rounded once: bfloat16, float16 or float32; when None `x`'s, or
            bfloat16 for a pair.
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`; for `x`, and for a weight that is not FP8.
            Ignored for a pair.
        num_sms, batch_invariant: as for `fp8_gemm`; for the GEMM.
        pdl: programmatic dependent launches of both kernels, as for `fp8_gemm`. The GEMM loads its weights while the
            cast runs, after everything before the cast has ended.

    Returns:
        `out`.

    Raises:
        TypeError: an argument is no tensor, or not a plain one, or has the wrong dtype, or an option the wrong type.
        ValueError: a shape, stride, device or option is not supported, or a tensor has no memory.
        RuntimeError: `out` is given where a gradient is wanted; or as for `fp8_gemm`. Nothing has been launched and
            `out` is untouched.

    The method (1x128 and 128x128 scales, promotion to FP32 every 128 k) is from the DeepSeek-V3 report, 3.3.
    """
    if isinstance(x, tuple):
        product = {"num_sms": num_sms, "batch_invariant": batch_invariant, "pdl": pdl}
        return _multiply_quantized(x, b, b_scale, bias, out, out_dtype, product)
    options = (out_dtype, amax_floor, round_scale, exact, num_sms, batch_invariant, pdl)
    if type(x) in ops.wrappers:
        return FP8_LINEAR.trace((x, b, b_scale, bias, out, None), options)
    return FP8_LINEAR.run((x, b, b_scale, bias, out, None), options)


def quantize_weight(
    w: torch.Tensor,
    *,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight for `fp8_linear` and `fp8_gemm`: `b, b_scale = quantize_weight(w)`.

    Args:
        w: [n, k], and `amax_floor`, `round_scale`, `exact`: as for `per_block_cast_to_fp8`.

    Returns:
        `b` [n, k] float8_e4m3fn, with rows at multiples of 16 bytes for any k, and `b_scale` [ceil(n / 128), ceil(k /
        128)] float32.

    Raises:
        TypeError, ValueError: as `per_block_cast_to_fp8`.
    """
    return quantize.per_block_cast_to_fp8(w, amax_floor=amax_floor, round_scale=round_scale, exact=exact)


def _wants_gradient(*given: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def _refuse_gradient(b, b_scale, out) -> None:
    """Raise if `out` is given, or a quantised weight or its scale requires a gradient."""
    if out is not None:
        raise RuntimeError(
            "out is given, and writing to a tensor has no gradient. Drop out, or call under torch.no_grad()"
        )
    for name, x in (("b", b), ("b_scale", b_scale)):
        if b_scale is not None and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and a quantised weight has none. Pass {name}.requires_grad_(False), "
                "or the weight itself as b, without b_scale, or call under torch.no_grad()"
            )


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, b_scale, bias, options):
        out = FP8_LINEAR.run((x, b, b_scale, bias, None, None), options)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, b, b_scale)
        ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *_gradients(grad, *ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad), None


def _gradients(grad, x, b, b_scale, dtypes, needed) -> tuple:
    """Gradients for x, b, b_scale and bias; None if not `needed`. `dtypes` are x's and bias's."""
    rows = quantize.as_matrix(grad)
    of_x = of_b = of_bias = None
    if needed[0]:
        of_x = rows @ b.to(grad.dtype) if b_scale is None else _gradient_by_codes(rows, b, b_scale)
        of_x = of_x.to(dtypes[0]).reshape(*grad.shape[:-1], b.shape[1])
    if needed[1]:
        of_b = (rows.t() @ quantize.as_matrix(x).to(grad.dtype)).to(b.dtype)
    if needed[3]:
        of_bias = rows.sum(0, dtype=torch.float32).to(dtypes[1])
    return of_x, of_b, None, of_bias


def _gradient_by_codes(rows: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """`rows @ (b * b_scale)` with quantised rows. The FP8 weight is transposed, which is faster than dequantising it
    and takes a third of a BF16 GEMM's time."""
    a, a_scale = quantize.per_token_cast_to_fp8(rows.detach())
    return dense.fp8_gemm(a, a_scale, both.transpose_fp8(b), tensors.as_float32(b_scale).t(), out_dtype=rows.dtype)


def _product_options(options: Options) -> dict:
    return {"num_sms": options.num_sms, "batch_invariant": options.batch_invariant, "pdl": options.pdl}


class Linear(Operation):
    """`fp8_linear`: launches the cast of x into the workspace, then the GEMM."""

    Options = Options
    groupings = ("none",)
    dtypes = dict.fromkeys((*_SOURCE_DTYPES, quantize.FP8_DTYPE), (quantize.FP8_DTYPE,))

    def kind_for(self, dtype: torch.dtype, usual: Kind | None) -> Kind | None:
        return EVERY_KIND["fp8"] if dtype in self.dtypes else None

    def results(self, kind: Kind) -> tuple[torch.dtype, ...]:
        return _SOURCE_DTYPES

    def problem_for(self, asked: checks.Sizes, num_sms: int) -> GemmProblem:
        """The GEMM's problem. Its result has the input's dtype, unless the input is quantised."""
        wide = None if asked.dtype == quantize.FP8_DTYPE else asked.dtype
        return dense.FP8_GEMM.problem_for(asked._replace(out_dtype=asked.out_dtype or wide), num_sms)

    def check_sizes(self, asked: checks.Sizes) -> None:
        """The GEMM's checks. An input that is not quantised yet may have any row stride; `quantize_weight` aligns
        rows."""
        a_stride, b_stride = asked.strides
        aligned = round_up(asked.k, tensors.ALIGNMENT_BYTES)
        a_stride = a_stride if asked.dtype == quantize.FP8_DTYPE else aligned
        dense.FP8_GEMM.check_sizes(asked._replace(strides=(a_stride, aligned if b_stride is None else b_stride)))

    def differentiate(self, given: Given, options: Options) -> torch.Tensor:
        x, b, b_scale, bias, out, _ = given
        _refuse_gradient(b, b_scale, out)
        return _Differentiable.apply(x, b, b_scale, bias, tuple(options))

    def allocated(self, given: Given, options: tuple) -> Given:
        x, b, b_scale, bias, out, _ = given
        if b_scale is None:
            _check_wide_weight(b)
            b, b_scale = quantize_weight(b, **quantize.keywords_of(Options(*options)))
        if out is None:
            out = tensors.new_empty(x, *_product_layout(x.shape, b.shape[0]), options[0] or x.dtype)
        return x, b, b_scale, bias, out, _kept_workspace(x)

    def fake(self, given: Given, options: Options) -> torch.Tensor:
        x, b, *_ = given
        return x.new_empty(*x.shape[:-1], b.shape[0], dtype=options.out_dtype or x.dtype)

    def check_arguments(self, given: Given, options: Options) -> None:
        x, b, b_scale, bias, out, _ = given
        if b_scale is None:
            _check_wide_weight(b)
        _check_kinds({"x": x, "b": b, "b_scale": b_scale, "bias": bias, "out": out}, ("b_scale", "bias", "out"))
        self.refuse_gradients(given, options)
        self.check_options(options)

    def refuse_gradients(self, given: Given, options: Options) -> None:
        _, b, b_scale, *_ = given
        if torch.is_grad_enabled() and b_scale is not None:
            _refuse_gradient(b, b_scale, None)

    def check_options(self, options: Options) -> None:
        _check_out_dtype(options.out_dtype)
        super().check_options(options)

    def check(self, given: Given, options: Options) -> None:
        x, b, b_scale, bias, out, _ = given
        if b_scale is None:
            _check_wide_weight(b)
        if x.dtype not in _SOURCE_DTYPES:
            remedy = "convert it; where it is quantised already, pass it and its scale as a pair, (x, x_scale)"
            raise TypeError(f"x must be {_WIDE}; got {x.dtype}. To fix: {remedy}")
        if b_scale is not None:
            checks.check_scale_dtypes(("b", "b_scale"), (None, b_scale))
        _check_fit(x, b, bias, out, options.out_dtype or x.dtype)

    def check_memory(self, given: Given, options: Options) -> Options:
        if given[4] is not None:
            _rows_of_out(given[4])
        return options

    def readable(self, given: Given) -> Given:
        x, b, b_scale, *others = given
        return x if _rows(x) is not None else x.contiguous(), b, tensors.as_float32(b_scale), *others

    def needs_kernel(self, given: Given) -> bool:
        return given[-1] is not None and min(*_rows(given[0]).shape, *given[1].shape) > 0

    def define(self, given: Given, options: Options) -> None:
        """The layer as two calls, cast and GEMM."""
        x, b, b_scale, bias, out, _ = given
        a, a_scale = quantize.per_token_cast_to_fp8(_rows(x), **quantize.keywords_of(options))
        dense.fp8_gemm(a, a_scale, b, b_scale, _rows_of_out(out), bias=bias, **_product_options(options))

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        """Both launches, prepared before the first is made: if either is refused, nothing is launched."""
        *_, bias, out, workspace = given
        x, out, parts = _rows(given[0]), _rows(out), _Parts(*_rows(given[0]).shape)
        a, a_scale = parts.views(workspace)
        present = [name for name, tensor in zip(self.names, given, strict=True) if tensor is not None]
        at = params.places(present)
        at |= {"a": Place(at["workspace"].tensor, parts.begin), "a_scale": at["workspace"]}
        names = (*present[:-1], "the workspace")
        pdl = checks.has_pdl(options)
        product = (a, a_scale, given[1], given[2], out, None if bias is None else bias.detach())
        # The GEMM starts after everything before the cast has ended, and the cast writes no weights: they are constant.
        asked = dense.Options(**_product_options(options) | {"pdl": pdl, "constant_weights": pdl})
        _, multiply = dense.FP8_GEMM.prepare_with_config(
            *(product, dense.FP8_GEMM.checked(product, asked)),
            names=names,
            places={name: at[name] for name in ("a", "a_scale", "b", "b_scale", "out", "bias") if name in at},
        )
        device = x.get_device()
        kernel, grid, numbers = quantize.chosen(x, a, a_scale, quantize.values_of(options), {})
        quantize.check_capture(kernel, device, self.name)
        places = {"x": at["x"], "out": at["a"], "scale": at["a_scale"]}
        return cast.prepare_launch(kernel, grid, device, numbers, names, places, pdl=pdl), multiply

    def _run_unknown(self, given: Given, options: tuple) -> None:
        """Multiply when no cached workspace is large enough or the call is new. A call that raises caches no
        workspace."""
        x = given[0]
        workspace, can_be_kept = _workspace(x) if self.is_on_gpu(x) and x.numel() else (None, False)
        given = (*given[:-1], workspace)
        if workspace is None or not _launcher.launch_known(self.launches, options, given):
            super()._run_unknown(given, options)
        if can_be_kept and not _kept.by_op:
            _keep(workspace)

    def _run_op(self, inputs: tuple, outs: tuple, keywords: dict):
        """Caches no workspace, since its memory may come from a CUDA graph's pool. The op's gradient is registered
        apart."""
        given, options = self._call_of_op(inputs, outs, keywords)
        if not _wants_gradient(*given):
            return self._run_keeping_nothing(given, options)
        if given[4] is not None:
            _refuse_gradient(*given[1:3], given[4])
        with torch.no_grad():
            return self._run_keeping_nothing(given, options)

    def _run_keeping_nothing(self, given: Given, options: Options) -> torch.Tensor:
        before, _kept.by_op = _kept.by_op, True
        try:
            return self.run(given, options)
        finally:
            _kept.by_op = before


@lru_cache(maxsize=4096)
def _product_layout(x_shape: tuple[int, ...], n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (*x_shape[:-1], n)
    return shape, tensors.dense_strides(shape)


class _Parts(NamedTuple):
    """The quantised input's place in a workspace.

    The scale comes first, because a `Place` has 32 bits to skip.
    """

    rows: int
    k: int

    @property
    def stride(self) -> int:
        """Row stride of the quantised input in bytes; a multiple of 16 for TMA."""
        return round_up(self.k, tensors.ALIGNMENT_BYTES)

    @property
    def scale_stride(self) -> int:
        """Column stride of the scale, in elements: "m_aligned"."""
        return round_up(self.rows, 4)

    @property
    def scale_bytes(self) -> int:
        return 4 * ceil_div(self.k, SCALE_BLOCK) * self.scale_stride

    @property
    def begin(self) -> int:
        """Start of the quantised input, in bytes."""
        return round_up(self.scale_bytes, _WORKSPACE_ALIGNMENT)

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.stride

    def views(self, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = workspace[self.begin : self.end].view(quantize.FP8_DTYPE).view(self.rows, self.stride)
        a_scale = workspace[: self.scale_bytes].view(torch.float32).view(-1, self.scale_stride)
        return a[:, : self.k], a_scale.t()[: self.rows]


def _kept_workspace(x: torch.Tensor) -> torch.Tensor | None:
    device = x.get_device()
    if device < 0:
        return None
    return _kept.workspaces.get((device, torch._C._cuda_getCurrentRawStream(device)))


def _keep(workspace: torch.Tensor) -> None:
    """Cache a workspace for the current stream's next calls."""
    if len(_kept.workspaces) >= _MOST_KEPT:
        _kept.workspaces.clear()
    device = workspace.get_device()
    _kept.workspaces[device, torch._C._cuda_getCurrentRawStream(device)] = workspace


def _workspace(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Memory for the quantised `x`, untouched by other kernels until this call's have ended: a plain tensor for any
    `x`. Also whether it can be cached.

    torch reuses memory that is freed after the call only for later kernels on the same stream, also within a CUDA
    graph. A cached workspace must not be used in a graph, whose replays are unordered with later calls, nor come from
    torch's graph memory pool: an op that torch.compile captured caches nothing.
    """
    k = x.shape[-1]
    size = _Parts(x.numel() // k, k).end
    with torch.cuda.device(x.get_device()):
        is_captured = torch.cuda.is_current_stream_capturing()
    if size > _KEPT_BYTES or is_captured:
        return torch.empty(size, dtype=torch.uint8, device=x.device), False
    kept = _kept_workspace(x)
    return torch.empty(_KEPT_BYTES, dtype=torch.uint8, device=x.device) if kept is None else kept, True


def _rows(x: torch.Tensor) -> torch.Tensor | None:
    """`x` flattened to a matrix; None if rows are not dense or not at one stride."""
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    try:
        return x.view(math.prod(x.shape[:-1]), x.shape[-1])
    except RuntimeError:
        return None


def _multiply_quantized(x: tuple, b, b_scale, bias, out, out_dtype, product: dict) -> torch.Tensor:
    if len(x) != 2:
        raise ValueError(f"x is a tuple of {len(x)}; pass the pair that per_token_cast_to_fp8 returned, or a tensor")
    (a, a_scale), dtype = x, out_dtype or torch.bfloat16
    if not is_traced():
        given = {"x[0]": a, "x[1]": a_scale, "b": b, "b_scale": b_scale, "bias": bias, "out": out}
        _check_kinds(given, optional=("bias", "out"))
    _check_out_dtype(out_dtype)
    if a.dtype != quantize.FP8_DTYPE:
        remedy = tensors.operand_remedy("x[0]", a, (quantize.FP8_DTYPE,), {}, "pass the input itself as x, to be cast")
        raise TypeError(f"x[0] must be {quantize.FP8_DTYPE}; got {a.dtype}. To fix: {remedy}")
    _check_fit(a, b, bias, out, dtype)
    if torch.is_grad_enabled() and out is not None:
        _refuse_gradient(b, b_scale, out if _wants_gradient(a, b, b_scale, bias, out) else None)
    rows, is_short = quantize.as_matrix(a), a_scale.dim() < 2 and a_scale.dim() < a.dim()
    scales = a_scale if is_short else quantize.as_matrix(a_scale)
    added_later = bias is not None and bias.requires_grad and torch.is_grad_enabled()  # by torch, for its gradient
    into, adds = None if out is None else _rows_of_out(out), None if added_later else bias
    try:
        result = dense.fp8_gemm(rows, scales, b, b_scale, into, bias=adds, out_dtype=dtype, **product)
    except launches.NotLoaded as error:
        raise error.of("fp8_linear") from None
    if out is not None:
        return out
    result = result.view(*a.shape[:-1], b.shape[0])
    return result + bias.to(dtype) if added_later else result


def _rows_of_out(out: torch.Tensor) -> torch.Tensor:
    rows = _rows(out)
    if rows is None:
        raise ValueError(
            f"out has shape {list(out.shape)} and strides {out.stride()}: its rows are not dense, or not at one "
            "stride. Pass a row-major out"
        )
    return rows


def _check_wide_weight(b) -> None:
    if not isinstance(b, torch.Tensor) or b.dtype in quantize.SOURCE_DTYPES:
        return
    if b.dtype == quantize.FP8_DTYPE:
        raise TypeError("b_scale is missing: b is float8_e4m3fn. Pass the scale that quantize_weight returned with it")
    remedy = tensors.operand_remedy("b", b, (quantize.FP8_DTYPE,), {}, f"pass a weight of {_WIDE}")
    raise TypeError(f"b must be {_WIDE}, or {quantize.FP8_DTYPE} with b_scale; got {b.dtype}. To fix: {remedy}")


def _check_kinds(given: dict[str, object], optional: tuple[str, ...]) -> None:
    """Check that arguments, by name, are plain tensors on one device."""
    given = {name: value for name, value in given.items() if value is not None or name not in optional}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise tensors.no_tensor(name, value, "pass a tensor")
    tensors.require_plain(**given)
    (first, x), *others = given.items()
    checks.check_device(first, x, "fp8_linear")
    for name, value in others:
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device} but {first} is on {x.device}; move it with .to(x.device)")


def _check_fit(x, b, bias, out, out_dtype: torch.dtype) -> None:
    """Check shapes, bias and `out`; `x` is the input, quantised or not."""
    if x.dim() < 1 or b.dim() != 2 or not ops.holds(x.shape[-1] == b.shape[1]):
        raise ValueError(
            f"x must be [..., k] and b [n, k]; got {list(x.shape)} and {list(b.shape)}. b holds one row per output "
            "column, as the weight of torch.nn.Linear does"
        )
    n = b.shape[0]
    if bias is not None and (bias.dim() != 1 or not ops.holds(bias.shape[0] == n) or bias.dtype not in _SOURCE_DTYPES):
        raise ValueError(
            f"bias must be [n] = [{n}] of {_WIDE}; got {list(bias.shape)} of {bias.dtype}. Pass the bias of the same "
            "layer"
        )
    shape = (*x.shape[:-1], n)
    if out is not None and (tuple(out.shape) != shape or out.dtype != out_dtype):
        raise ValueError(
            f"out must be {list(shape)} of {out_dtype}; got {list(out.shape)} of {out.dtype}. Pass out=None to have it "
            "allocated, or out_dtype for another dtype"
        )


def _check_out_dtype(out_dtype) -> None:
    if out_dtype not in (None, *_SOURCE_DTYPES):
        raise TypeError(f"out_dtype must be {_WIDE}, or None for that of x; got {out_dtype!r}")


# ---- as an op


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    x, b, b_scale, bias = inputs
    ctx.needed = (*ctx.needs_input_grad, False, False, False)  # padded: arguments may be left out
    if b_scale is not None and (ctx.needed[1] or ctx.needed[2]):
        _refuse_gradient(b, b_scale, None)
    ctx.save_for_backward(x if ctx.needed[1] else None, b, b_scale)
    ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)


def _backward(ctx, grad):
    return (_call_backward_op if type(grad) in ops.wrappers else _backward_once)(ctx, grad)


@once_differentiable
def _backward_once(ctx, grad) -> tuple:
    return _gradients(grad, *ctx.saved_tensors, ctx.dtypes, ctx.needed)


def _call_backward_op(ctx, grad) -> tuple:
    """The gradients by one op, from arguments that torch can flatten for an op."""
    x_dtype, bias_dtype = (dtype if ctx.needed[i] else None for i, dtype in zip((0, 3), ctx.dtypes, strict=True))
    op = torch.ops.deep_tile.fp8_linear_backward
    of_x, of_b, of_bias = op(grad, *ctx.saved_tensors, x_dtype=x_dtype, bias_dtype=bias_dtype)
    computed = (of_x, of_b, None, of_bias)
    return tuple(gradient if needed else None for gradient, needed in zip(computed, ctx.needed, strict=False))


def _run_backward_op(grad, x, b, b_scale=None, *, x_dtype=None, bias_dtype=None) -> tuple[torch.Tensor, ...]:
    """Gradients for x and bias in these dtypes, and for b if x is given; else empty tensors."""
    needed = (x_dtype is not None, x is not None, False, bias_dtype is not None)
    of_x, of_b, _, of_bias = _gradients(grad, x, b, b_scale, (x_dtype, bias_dtype), needed)
    return tuple(grad.new_empty(0) if gradient is None else gradient for gradient in (of_x, of_b, of_bias))


def _fake_backward_op(grad, x, b, b_scale=None, *, x_dtype=None, bias_dtype=None) -> tuple[torch.Tensor, ...]:
    n, k = b.shape
    of_x = ((0,), None) if x_dtype is None else ((*grad.shape[:-1], k), x_dtype)
    of_b = ((0,), None) if x is None else ((n, k), b.dtype)
    of_bias = ((0,), None) if bias_dtype is None else ((n,), bias_dtype)
    return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in (of_x, of_b, of_bias))


FP8_LINEAR = Linear(
    "fp8_linear",
    "x b b_scale? bias? out!",
    f"out_dtype {quantize.OP_OPTIONS} num_sms batch_invariant pdl",
    scratch="workspace",
    backward=_backward,
    setup_context=_setup_context,
    flops=ops.product_flops(second=1),
)
ops.register(
    "fp8_linear_backward(Tensor grad, Tensor? x, Tensor b, Tensor? b_scale=None, *, ScalarType? x_dtype=None, "
    "ScalarType? bias_dtype=None) -> (Tensor, Tensor, Tensor)",
    _run_backward_op,
    _fake_backward_op,
    flops=lambda grad, x, b, *_, x_dtype=None, **__: (
        ((x_dtype is not None) + (x is not None)) * 2 * math.prod(grad) * b[1]
    ),
)
