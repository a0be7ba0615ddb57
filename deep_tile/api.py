"""The public calls: check tensors, find the prepared launch, launch.

The warm path is one call into C, which reads the tensors through DLPack, finds the launch by their signature and
launches. The signature is every property of the tensors that the checks read; so one met before has passed them, and
only pointers and the stream are new. What C does not read (subclasses, tensors that are not plain or have no memory,
all of them where torch has no DLPack C exchange API) takes the same way in Python, through launches.py.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import is_grad_enabled

from deep_tile import _launcher, cast, finishes, jit, launches, ops, plan, settings, tensors
from deep_tile.config import SCALE_BLOCK, GemmConfig, as_int, ceil_div, round_up
from deep_tile.finishes import OUTPUT_NAMES, RESULT_NAMES, names, torch_dtype
from deep_tile.kinds import (
    EVERY_KIND,
    GROUPINGS,
    LAYOUT_NAMES,
    LAYOUTS,
    QUANTIZED,
    RAW,
    RESULTS,
    Kind,
    Majors,
)
from deep_tile.ops import is_traced
from deep_tile.params import Place
from deep_tile.problem import GemmProblem
from deep_tile.reference import finished, fp8_gemm_reference
from deep_tile.select.groups import grouped_configs
from deep_tile.select.hardware import H200

_TMA_BYTES = tensors.ALIGNMENT_BYTES
MAX_SIZE = 2**31 - 1024
"""Rounded up to the largest cluster tile, a size must still be an int of the kernel."""

_launches: launches.Table = {}
"""By the `Options` of a call, or the plain tuple equal to it."""


class Options(NamedTuple):
    """The keywords of a call; described at `fp8_gemm`."""

    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False
    activation: str | None = None


_DEFAULT_DTYPE = torch.bfloat16
"""Of an `out` that is allocated."""

_PRECOMPILED = {**RESULT_NAMES, torch.float8_e4m3fn: QUANTIZED}
"""Results that `precompile` knows."""

_KINDS_OF_DTYPES = {
    torch_dtype(EVERY_KIND[name].a): EVERY_KIND[name] for name in ("fp8", "bf16", "fp16", "int8", "fp8_rows_e5m2_e5m2")
}
"""What `supports` takes a dtype for."""


class Precompiled(NamedTuple):
    """What `precompile` did.

    Attributes:
        configs: kernels that the shapes can need.
        compiled: how many of them had to be compiled; the others came from the cache.
    """

    configs: tuple[GemmConfig, ...]
    compiled: int

    def __repr__(self) -> str:
        return f"<Precompiled: {len(self.configs)} kernels, {self.compiled} compiled>"


def fp8_gemm(
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
) -> torch.Tensor:
    """FP8 matrix product with block scales: `out = (a * a_scale) @ (b * b_scale)^T`.

    `out[m, n] = sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n // 128, k // 128]`, accumulated in FP32 and
    rounded once, after a bias and an activation where they are given. Runs on the tensors' device and torch's current
    stream; CPU tensors go through the operation's definition in `deep_tile.reference`. Sizes m, n and k are free; m = 0
    or n = 0 does nothing, k = 0 writes zeros, or what a bias and an activation make of them.
    Not differentiable: refused where torch records gradients and one of the tensors requires one.
    Compiled as one op, `torch.ops.deep_tile.fp8_gemm`, by torch.compile and torch.export.

    Args:
        a: [m, k] float8_e4m3fn, unit stride along k, row stride a multiple of 16 bytes, 16-byte aligned.
        a_scale: [m, ceil(k / 128)] float32, any strides within 4 GB: row-major, or M-major with stride (1, m) or
            padded. Some large products are 1 to 2 % faster where its columns begin at multiples of 16 bytes
            ("m_aligned" casts). Or bfloat16, float16 or float8_e8m0fnu, of which a kernel of torch makes float32 first.
        b: [n, k] float8_e4m3fn, laid out like `a`.
        b_scale: [ceil(n / 128), ceil(k / 128)] float32, any strides within 4 GB, or a dtype that `a_scale` may have.
        out: [m, n] bfloat16, float16 or float32, unit stride along n; allocated when None. Any alignment and row stride
            will do, but rows that begin and end at multiples of 16 bytes are stored faster. Must not overlap the
            inputs.
        bias: [n] bfloat16, float16 or float32, any stride; added to each row in FP32, before the activation.
        activation: what becomes of the product in FP32, before it is rounded once: "relu", "gelu" (within 3e-7 of the
            input; of -infinity 0), "gelu_tanh", "silu"; or "swiglu", for which `b` has gates and what they let through
            by turns in eights (`interleave_gate_up`), n is a multiple of 16, and `out` is [m, n / 2]. By kernels of its
            own, as a bias is.
        out_dtype: dtype of `out`: by default that of `out`, or bfloat16.
        config: the kernel to use instead of the selector's choice.
        num_sms: streaming multiprocessors to use, at most and by default all of the device.
        batch_invariant: a row of `out` is the same, bit for bit, whatever m, num_sms and the other rows are. Gives up
            split K, which helps where m is small. Without it results still repeat from call to call.
        pdl: programmatic dependent launch. The kernel may start while its predecessor in the stream still runs, and
            waits for that one's end before it reads or writes what that one may touch; only then may its own successor
            start. Results are the same without; the host takes 0.5 to 0.8 us more to launch. None: unless `num_sms` is
            given, because thread blocks that wait would hold SMs that are left to others.
        constant_weights: with `pdl`, also request `b` before that wait, where that helps: at small m. Neither `b` nor
            `b_scale` may then be written by the kernel before this one in the stream, nor, where that is another
            library's programmatic launch, by any that may still run beside it.

    Returns:
        `out`.

    Raises:
        TypeError: an argument is no tensor, or not a plain one (a wrapper, a negated view, sparse, ...), or has the
            wrong dtype; or an option has the wrong type, even if it equals a right one (num_sms=True).
        ValueError: a shape, stride, alignment, device, config, num_sms or combination of options that the operation
            does not take, or a tensor without memory; or `config` under torch.compile.
        RuntimeError: a tensor requires a gradient while torch records them, the GPU is not a Hopper, NVRTC or the
            driver is missing, or a kernel would have to be compiled or loaded while the stream is being captured.
            Nothing has been launched and `out` is untouched.

    The method (1x128 and 128x128 scales, promotion to FP32 every 128 of k) is that of the DeepSeek-V3 report, 3.3.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, activation)
    if is_traced():
        return _OP((a, a_scale, b, b_scale, bias), (out,), Options(*options))
    return _multiply(a, a_scale, b, b_scale, out, options, bias)


def _multiply(a, a_scale, b, b_scale, out, options: tuple, bias=None) -> torch.Tensor:
    """`fp8_gemm` outside of tracing; `options` are equal to an `Options`."""
    try:
        if is_grad_enabled() and _requires_gradient(a, a_scale, b, b_scale, out, bias):
            _refuse_gradients(a, a_scale, b, b_scale, out, bias)
        if out is None:
            out = empty_out(a, b, options[0] or _DEFAULT_DTYPE, options[6])
        if bias is None:
            launched = _launcher.launch_known(_launches, options, a, a_scale, b, b_scale, out)
        else:
            launched = _launcher.launch_known(_launches, options, a, a_scale, b, b_scale, out, bias)
        if not launched:
            _call_unknown(a, a_scale, b, b_scale, out, Options(*options), bias)
    except Exception:
        check = _check_arguments if out is None else checked_options
        reason = error_of(check, Options(*options), a, a_scale, b, b_scale, out, bias)
        if reason is None:
            raise
        raise reason from None
    return out


class Plan:
    """A product made ready by `prepare`: checked, its kernel loaded, its weights bound. Call it to multiply.

    Attributes:
        b, b_scale: the weights, as given to `prepare`. The plan reads the memory they had then.
        config: the kernel; None where none is needed, on the CPU and for empty tensors.
    """

    __slots__ = ("b", "b_scale", "config", "_known", "_launch", "_options", "_scale_aligned", "_wanted")

    def __init__(
        self, a, a_scale, b, b_scale, out, prepared: tuple[GemmConfig, _launcher.Launch] | None, options: "Options"
    ):
        self.b, self.b_scale = b, b_scale
        self.config, self._launch = prepared or (None, None)
        self._known = {(): ((), {launches.signature(a, a_scale, out): self._launch})} if prepared else {}
        self._options = options
        self._scale_aligned = tensors.is_aligned(a_scale)
        self._wanted = {name: _call_layout(name, x) for name, x in (("a", a), ("a_scale", a_scale), ("out", out))}

    def __call__(self, a: torch.Tensor, a_scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`fp8_gemm(a, a_scale, self.b, self.b_scale, out)` with the options given to `prepare`; returns `out`.

        Args:
            a, a_scale, out: as at preparation in shape, strides, dtype, device and, for `out`, in whether it is
                aligned to 16 bytes; all of that is checked. `out` is allocated, dense, when None.

        Raises:
            TypeError: an argument is no tensor, or not a plain one.
            ValueError: a tensor that is not like the one at preparation, an `a` not aligned to 16 bytes, or a tensor
                without memory.
            RuntimeError: a tensor requires a gradient while torch records them, or whatever the driver refuses. Nothing
                has been launched and `out` is untouched.
        """
        if is_traced():
            return self._call_op(a, a_scale, out)
        try:
            if is_grad_enabled() and _requires_gradient(a, a_scale, self.b, self.b_scale, out):
                _refuse_gradients(a, a_scale, self.b, self.b_scale, out)
            if out is None:
                out = self.b.new_empty(*self._wanted["out"].shape, dtype=self._wanted["out"].dtype)
            if not _launcher.launch_known(self._known, (), a, a_scale, out):
                self._call_unknown(a, a_scale, out)
        except Exception:
            reason = error_of(self._check, a, a_scale, out)
            if reason is None:
                raise
            raise reason from None
        return out

    def _call_op(self, a, a_scale, out) -> torch.Tensor:
        """Under tracing, where a plan is `fp8_gemm` of its shapes and weights."""
        for name, x in (("a", a), ("a_scale", a_scale)):
            seen, wanted = tuple(x.shape), self._wanted[name].shape
            if seen != wanted:
                raise ValueError(f"{name} is of shape {seen}; this plan is for {wanted}. Prepare another plan")
        return _OP((a, a_scale, self.b, self.b_scale), (out,), self._options)

    def _check(self, a, a_scale, out) -> None:
        """Check that tensors are plain and like those at preparation; `out` may be None."""
        given = {"a": a, "a_scale": a_scale} | ({} if out is None else {"out": out})
        check_tensors(**given)
        for name, x in given.items():
            seen, wanted = _call_layout(name, x), self._wanted[name]
            if seen != wanted:
                raise ValueError(f"{name} is {seen}; this plan is for {wanted}. Pass the like, or prepare another plan")

    def _call_unknown(self, a, a_scale, out) -> None:
        """Multiply where C cannot read the tensors or the scale begins elsewhere, or say how they differ from those at
        preparation."""
        self._check(a, a_scale, out)
        if self._launch is None:
            _compute_without_kernel(a, a_scale, self.b, self.b_scale, out)
        elif self._scale_aligned and not tensors.is_aligned(a_scale):  # which TMA may count on
            _multiply(a, a_scale, self.b, self.b_scale, out, self._options._replace(config=self.config))
        else:
            launches.launch(self._launch, a, a_scale, out)

    def __repr__(self) -> str:
        m, n = self._wanted["out"].shape
        return f"<deep_tile.Plan m={m} n={n} k={self.b.shape[1]} {self.config.name if self.config else 'no kernel'}>"


def prepare(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
) -> Plan:
    """Make one product ready for many calls: `plan = prepare(a, a_scale, b, b_scale)`, then `plan(a, a_scale, out)`.

    For engines that fix their shapes: a call of the plan takes less host time than `fp8_gemm`, and never compiles.
    Arguments and errors are those of `fp8_gemm`, but a plan has neither a bias nor an activation, and scales are
    float32; `a`, `a_scale` and `out` serve as examples, and nothing is computed. A call checks all that it is given,
    but not that `b` and `b_scale` are still where they were: write new weights into them with `copy_`, and prepare
    again after replacing their memory (`b.data = ...`, `b.set_(...)`).
    """
    options = Options(out_dtype, config, num_sms, batch_invariant, pdl, constant_weights)
    _check_arguments(options, a, a_scale, b, b_scale, out)
    _check_float32(a_scale=a_scale, b_scale=b_scale)
    if out is None:
        try:
            out = empty_out(a, b, out_dtype or _DEFAULT_DTYPE, None)
        except AssertionError as error:  # of FakeTensorMode, which makes no real tensors
            raise RuntimeError(f"out cannot be allocated: prepare outside of FakeTensorMode ({error})") from None
    checked = checked_options(options, a, a_scale, b, b_scale, out)
    prepared = None
    if _needs_kernel(a, b):
        weights = plan.Weights(b.data_ptr(), b_scale.data_ptr())
        prepared = _prepare_launch(a, a_scale, b, b_scale, out, checked, weights=weights)
    return Plan(a, a_scale, b, b_scale, out, prepared, options)


def supports(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out_dtype: torch.dtype | None = None,
    a_stride: int | None = None,
    b_stride: int | None = None,
    layout: str = "nt",
) -> tuple[bool, str]:
    """Whether `fp8_gemm`, or `gemm` for BF16 and FP16, `int8_gemm` for INT8 and `scaled_gemm` for e5m2, takes such a
    problem, and if not, why; for dispatchers, without tensors or a GPU.

    Args:
        m, n, k: sizes in elements; scales are taken to be dense.
        dtype: of the operands: float8_e4m3fn, float8_e5m2, bfloat16, float16 or int8.
        out_dtype: of `out`: bfloat16, float16 or float32, or of INT8 without scales, in `gemm`, int32; the call's
            default when None.
        a_stride, b_stride: row strides in elements, or from one k to the next of an operand that lies along its rows;
            those of a contiguous operand when None.
        layout: "nt" where both operands lie along k. Of BF16 and FP16 also "nn", where b lies along n (it is the
            transpose of a contiguous [k, n]), "tt", where a lies along m, and "tn", where both do.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if as_int(size) is None:
            return False, f"{name} is {size!r}; sizes are ints"
        if not 0 <= size <= MAX_SIZE:
            return False, f"{name} is {size}; sizes run from 0 to {MAX_SIZE}"
    if dtype not in _KINDS_OF_DTYPES:
        return False, f"operands are {dtype}; supported is {' or '.join(map(str, _KINDS_OF_DTYPES))}"
    kind = _kind_of(dtype, out_dtype)
    problem = layout_problem(layout, kind)
    if problem:
        return False, problem
    if out_dtype not in (None, *finishes.of_kind(kind)):
        return False, f"out is {out_dtype}; supported is {' or '.join(map(str, OUTPUT_NAMES))}"
    k_blocks = ceil_div(k, SCALE_BLOCK)
    majors = LAYOUTS[layout]
    for name, rows, scales, stride, major in (
        ("a", m, m, a_stride, majors.a),
        ("b", n, ceil_div(n, SCALE_BLOCK), b_stride, majors.b),
    ):
        sizes = (rows, k) if major == "k" else (k, rows)
        if sizes[1] * kind.a.bytes > MAX_SIZE:
            return False, f"{name} is {rows} by {k}; of {dtype} at most {MAX_SIZE // kind.a.bytes} lie in a row"
        stride = sizes[1] if stride is None else stride
        if as_int(stride) is None:
            return False, f"{name}_stride is {stride!r}; strides are ints, in elements"
        problem = stride_problem(name, *sizes, stride, kind.a.bytes, "row" if major == "k" else "column")
        if kind.scaling == "blocks":
            problem = problem or scale_problem(name, (scales, k_blocks), (k_blocks, 1))
        if problem:
            return False, problem
    return True, "supported"


def _kind_of(dtype: torch.dtype, out_dtype: torch.dtype | None) -> Kind:
    """What operands of a dtype of `_KINDS_OF_DTYPES` are multiplied as."""
    return EVERY_KIND["int8_unscaled"] if (dtype, out_dtype) == (torch.int8, torch.int32) else _KINDS_OF_DTYPES[dtype]


def layout_problem(layout: object, kind: Kind) -> str | None:
    """Why a kind's operands cannot lie so; None where they can."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        return f"layout is {layout!r}; layouts are {', '.join(LAYOUTS)}"
    if layout not in kind.layouts:
        return f"layout is {layout!r}; operands of {kind.a.dtype} lie along k, as 'nt' says: pass contiguous ones"
    return None


def is_available() -> tuple[bool, str]:
    """Whether kernels can run here, and if not, why. Never raises. May initialise CUDA.

    False in a process forked after CUDA had started, and after a kernel of this process failed, whosever it was.
    """
    try:
        if not torch.cuda.is_available():
            return False, "torch sees no CUDA device; CPU tensors still work, through deep_tile.reference"
        if torch.cuda._is_in_bad_fork():
            return False, "CUDA cannot be used in a process forked after CUDA had started: start workers with 'spawn'"
        check_hopper(torch.cuda.current_device())
        _check_alive()
        return True, f"{jit.compiler_text()}, {torch.cuda.get_device_name()}"
    except Exception as error:  # the promise is an answer, whatever is broken underneath
        return False, f"{type(error).__name__}: {error}"


def precompile(
    shapes: Iterable[tuple[int, int, int]],
    *,
    workers: int | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    grouping: str = "none",
    kind: str | torch.dtype = "fp8",
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    bias: torch.dtype | None = None,
    activation: str | None = None,
    layouts: Iterable[str] = ("nt",),
) -> Precompiled:
    """Compile, and on a Hopper GPU load, every kernel that a product can need for the shapes.

    Launches nothing and allocates no GPU memory beyond the CUDA context; afterwards no call with such a shape, the
    default config and rows of `a`, `b` and `out` that follow each other, or as well aligned ones, compiles or loads
    anything. With a warm disk cache it takes milliseconds.

    Args:
        shapes: (n, k, max_m) for each weight matrix: every m from 1 to max_m is covered.
        workers: threads compiling at once; all cores by default.
        num_sms, batch_invariant: as later passed to `fp8_gemm`. By default num_sms is all of the current device, or of
            an H200 if there is none.
        grouping: "offs" or "counts" for grouped products, by what they are given, or "k_offs" for
            `fp8_grouped_wgrad`, of weights [n, k]; kernels of all numbers of groups.
        kind: "fp8" for `fp8_gemm` and `fp8_grouped_gemm`; "bf16", "fp16" and "int8_unscaled" for `gemm` and
            `grouped_gemm`; "int8" for `int8_gemm`; "fp8_rows", "fp8_rows_promoted" (without `fast_accum`), "int8_rows"
            and "fp8_1x128" for `scaled_gemm`, the latter for `fp8_wgrad`, too, all others and "int8" for
            `scaled_grouped_gemm`; "mxfp4" and "nvfp4" for `packed_gemm` and `packed_grouped_gemm`. Those of FP8 end in
            the formats of a and b, unless both are e4m3, as "fp8_rows_e5m2_e4m3". Or the dtype of the operands, for the
            call that `supports` takes it for.
        out_dtype: of `out`; the call's default when None. float8_e4m3fn for `fp8_gemm_cast`.
        accumulate: as later passed; of groups, with "k_offs" alone.
        bias: its dtype; None: there is none.
        activation: as later passed to the call; n then counts rows of `b`.
        layouts: of the operands of `gemm`, as `supports` has them. For gradients ("nn", "tn"), of shapes whose n, k and
            max_m are those of their products.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape or `out_dtype` that the call does not take, `num_sms` or `workers` out of range, or another
            grouping, kind or layout.
        jit.CompileError: a kernel does not compile.
    """
    if isinstance(kind, torch.dtype):
        if kind not in _KINDS_OF_DTYPES:
            raise ValueError(f"kind is {kind}; operands are {names(_KINDS_OF_DTYPES)}: pass one of these, or a name")
        kind = _kind_of(kind, out_dtype).name
    if not isinstance(kind, str) or kind not in EVERY_KIND:
        raise ValueError(f"kind is {kind!r}; pass a dtype of operands, or one of {', '.join(EVERY_KIND)}")
    product = EVERY_KIND[kind]
    weights = [_checked_weight(shape, torch_dtype(product.a)) for shape in _as_list(shapes)]
    if out_dtype not in (None, *_PRECOMPILED):
        raise ValueError(f"out_dtype is {out_dtype}; pass one of {names(_PRECOMPILED)}, or nothing")
    layouts = _checked_layouts(layouts, product)
    output = product.output if out_dtype is None else _PRECOMPILED[out_dtype]
    if output == RAW and output not in product.outputs:
        raise ValueError(f"out_dtype is {out_dtype} and kind {kind!r}; such results are of kind 'int8_unscaled'")
    if output == QUANTIZED and kind != "fp8":
        raise ValueError(f"out_dtype is {out_dtype} and kind {kind!r}; results of fp8_gemm_cast are of kind 'fp8'")
    if bias not in (None, *OUTPUT_NAMES):
        raise ValueError(f"bias is {bias!r}; pass its dtype, one of {names(OUTPUT_NAMES)}, or nothing")
    finishes.check_activation(activation)
    finish = ("none" if bias is None else OUTPUT_NAMES[bias], activation or "none")
    if output == RAW and finish != ("none", "none"):
        raise ValueError("results are INT32, and a bias or an activation is given; pass out_dtype=torch.float32")
    for name, value in (("num_sms", num_sms), ("batch_invariant", batch_invariant), ("accumulate", accumulate)):
        check_option(name, value)
    if accumulate and (output == QUANTIZED or finish != ("none", "none")):
        raise ValueError(
            f"accumulate is True, out_dtype {out_dtype}, bias {bias} and activation {activation!r}; a product is added "
            "without bias and activation, and not to float8_e4m3fn"
        )
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping is {grouping!r}; pass one of {', '.join(GROUPINGS)}")
    if grouping != "none":
        _check_grouped_kind(grouping, product, output, accumulate, layouts)
        if finish != ("none", "none"):
            raise ValueError(
                f"grouping is {grouping!r}, bias {bias} and activation {activation!r}; grouped products have neither"
            )
    if workers is not None and (as_int(workers) is None or workers < 1):
        raise ValueError(f"workers is {workers!r}; pass a positive int, or None for all cores")
    device = current_gpu()
    if num_sms is not None or device is not None:
        num_sms = checked_num_sms(num_sms, torch.device("cpu") if device is None else torch.device("cuda", device))
    else:
        num_sms = H200.num_sms
    configs = set()
    for n, k, max_m in weights:
        finishes.check_pairs(n, activation)
        columns = k if grouping == "k_offs" else finishes.out_columns(n, activation)
        tma_store = columns * RESULTS[output].bytes % _TMA_BYTES == 0
        if output == QUANTIZED:
            of_bias, of_activation = finish
            of_all = GemmProblem(
                *(max_m, n, k, num_sms, tma_store, not batch_invariant),
                output=QUANTIZED,
                bias=of_bias,
                activation=of_activation,
            )
            configs.update(plan.cast_configs_for(of_all, max_m))
        elif grouping == "none":
            what = (kind, output, accumulate, *finish)
            for most, layout in _as_read(layouts, n, max_m):
                configs.update(plan.configs_for(n, k, most, num_sms, tma_store, not batch_invariant, *what, layout))
        else:
            for layout in layouts:
                configs.update(grouped_configs(grouping, tma_store, accumulate, kind, output, layout))
    ordered = tuple(sorted(configs, key=lambda config: config.name))
    before = jit.compilations()
    plan.load_kernels(ordered, device, workers or os.cpu_count() or 1)
    if output == QUANTIZED:
        cast.load_kernels(device, workers or os.cpu_count() or 1)
    return Precompiled(ordered, jit.compilations() - before)


def _check_grouped_kind(grouping: str, kind: Kind, output: str, accumulate: bool, layouts: tuple[str, ...]) -> None:
    """Check that grouped products are of a kind, of such results and operands."""
    if grouping == "k_offs":
        if kind.name != "fp8_1x128" or output not in ("fp32", "bf16"):
            raise ValueError(
                f"grouping is {grouping!r}, kind {kind.name!r} and out_dtype {RESULTS[output].dtype}; such products "
                "are of kind 'fp8_1x128', of float32 or bfloat16"
            )
        return
    if kind.scaling == "row_blocks" or output == QUANTIZED or accumulate or not {"nt", "nn"}.issuperset(layouts):
        raise ValueError(
            f"grouping is {grouping!r}, kind {kind.name!r}, out_dtype {RESULTS[output].dtype}, accumulate {accumulate} "
            f"and layouts {list(layouts)}; products of groups of rows are of all kinds but 'fp8_1x128', written and "
            "not added, to other results than float8_e4m3fn, and their layouts are 'nt' and 'nn'"
        )


def _checked_layouts(layouts: object, product: Kind) -> tuple[str, ...]:
    if isinstance(layouts, str) or not isinstance(layouts, Iterable):
        raise TypeError(f"layouts is {layouts!r}; pass names in a list, such as ['nt', 'nn']")
    names = tuple(layouts)
    for layout in names:
        problem = layout_problem(layout, product)
        if problem:
            raise ValueError(f"layouts is {list(names)}: {problem}")
    return names


def _as_read(layouts: Iterable[str], n: int, max_m: int) -> set[tuple[int, str]]:
    """Up to which m calls have which layouts: an operand of one row may be read along k, however it lies."""
    read = set()
    for a, b in map(LAYOUTS.get, layouts):
        for of_b in {b, "k"} if n == 1 else {b}:
            read |= {(max_m, LAYOUT_NAMES[Majors(a, of_b)]), (1, LAYOUT_NAMES[Majors("k", of_b)])}
    return read


def current_gpu() -> int | None:
    """The current CUDA device, where kernels can run on it."""
    return torch.cuda.current_device() if is_available()[0] else None


def _as_list(shapes: Iterable) -> list:
    try:
        return list(shapes)
    except TypeError:
        raise TypeError(f"shapes is {shapes!r}; pass a list of (n, k, max_m), one for each weight") from None


def _checked_weight(shape: object, dtype: torch.dtype) -> tuple[int, int, int]:
    """One of the shapes of `precompile`."""
    sizes = tuple(map(as_int, shape)) if isinstance(shape, (tuple, list)) else ()
    if len(sizes) != 3 or None in sizes:
        raise TypeError(
            f"shapes holds {shape!r}; want three ints for each weight: precompile([(n, k, max_m)]), in a list even "
            "where it is one"
        )
    n, k, max_m = sizes
    padded = round_up(k, _TMA_BYTES)
    supported, reason = supports(max_m, n, k, dtype=dtype, a_stride=padded, b_stride=padded)
    if not supported or not min(sizes):
        reason = "sizes must be positive" if supported else reason
        raise ValueError(f"shape (n={n}, k={k}, max_m={max_m}): {reason}")
    return n, k, max_m


def empty_out(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, activation: str | None) -> torch.Tensor:
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"a and b must be [m, k] and [n, k]; got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    m, n = a.shape[0], b.shape[0] if activation is None else finishes.out_columns(b.shape[0], activation)
    return tensors.new_empty(a, (m, n), (n or 1, 1), out_dtype)


def _requires_gradient(a, a_scale, b, b_scale, out, bias=None) -> bool:
    return (
        a.requires_grad
        or a_scale.requires_grad
        or b.requires_grad
        or b_scale.requires_grad
        or (out is not None and out.requires_grad)
        or (bias is not None and bias.requires_grad)
    )


def _refuse_gradients(*tensors_or_none: torch.Tensor | None) -> None:
    """Raise where torch would record a product of these tensors, `plan.TENSORS` and a bias: it has no gradient."""
    for name, x in zip((*plan.TENSORS, "bias"), tensors_or_none, strict=False):
        if is_grad_enabled() and x is not None and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and fp8_gemm has none. To train, call deep_tile.fp8_linear; otherwise "
                f"call within torch.no_grad(), or pass {name}.detach(), or freeze it with {name}.requires_grad_(False)"
            )


def error_of(check: Callable, *arguments, **keywords) -> Exception | None:
    """What `check` raises: it says why torch or the launcher stumbled over an argument."""
    try:
        check(*arguments, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return None


def _call_unknown(a, a_scale, b, b_scale, out, options: Options, bias) -> None:
    """Multiply where C has met no such options and signature, or cannot read the tensors."""
    _check_option_types(options)
    check_tensors(a=a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    finishes.check_bias_kind(bias)
    a_scale, b_scale = (tensors.as_float32(scale) for scale in (a_scale, b_scale))
    given = (a, a_scale, b, b_scale, out, *(() if bias is None else (bias,)))
    launches.enqueue(_launches, options, given, partial(_first_launch, a, a_scale, b, b_scale, out, options, bias))


def _first_launch(a, a_scale, b, b_scale, out, options: Options, bias) -> _launcher.Launch | None:
    """That of a signature not met before, checked; None when the result is in `out`."""
    checked = checked_options(options, a, a_scale, b, b_scale, out, bias)
    if not _needs_kernel(a, b):
        _compute_without_kernel(a, a_scale, b, b_scale, out, bias, options.activation)
        return None
    names = plan.TENSORS if bias is None else (*plan.TENSORS, "bias")
    return _prepare_launch(a, a_scale, b, b_scale, out, checked, bias, names=names)[1]


def checked_options(options: Options, a, a_scale, b, b_scale, out, bias=None) -> Options:
    """Check all that can be wrong about a call, whose `out` may be None; the options, num_sms and pdl filled in."""
    _check_arguments(options, a, a_scale, b, b_scale, out, bias)
    _check_dtypes(options, a, a_scale, b, b_scale, out)
    check_device("a", a, "fp8_gemm")
    check_devices(a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    _check_shapes(options, a, a_scale, b, b_scale, out, bias)
    check_sizes(a, b)
    _check_strides(a, a_scale, b, b_scale, out)
    check_constant_weights(options)
    return with_defaults(options, a.device)


def with_defaults(options: NamedTuple, device: torch.device) -> NamedTuple:
    """The options of a product, with num_sms and pdl filled in.

    Raises:
        ValueError: num_sms is out of range.
    """
    return options._replace(num_sms=checked_num_sms(options.num_sms, device), pdl=has_pdl(options))


def has_pdl(options: NamedTuple) -> bool:
    """Whether options of a product, which say so or leave it to their num_sms, mean programmatic launches."""
    return options.num_sms is None if options.pdl is None else options.pdl


def check_constant_weights(options: NamedTuple) -> None:
    if options.constant_weights and not has_pdl(options):
        raise ValueError(
            "constant_weights=True is for programmatic launches, which may start before their predecessor has ended; "
            f"got pdl={options.pdl}, num_sms={options.num_sms}: pass pdl=True, or drop constant_weights"
        )


def _needs_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_cuda and min(*a.shape, *b.shape) > 0


@torch.inference_mode()  # in which any tensor may be written to, whether it requires a gradient or not
def _compute_without_kernel(a, a_scale, b, b_scale, out, bias=None, activation: str | None = None) -> None:
    if out.is_meta or out.numel() == 0:
        return
    if bias is None and activation is None and a.shape[1] > 0:
        out.copy_(fp8_gemm_reference(a, a_scale, b, b_scale, out.dtype))
        return
    if a.shape[1] == 0:
        product = a_scale.new_zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    else:
        product = fp8_gemm_reference(a, a_scale, b, b_scale, torch.float64)
    out.copy_(finished(product, bias, activation))


def product_launch(
    a,
    a_scale,
    b,
    b_scale,
    out,
    bias=None,
    *,
    num_sms: int | None,
    batch_invariant: bool,
    pdl: bool,
    constant_weights: bool,
    names: tuple[str, ...],
    places: Mapping[str, Place],
) -> _launcher.Launch:
    """The launch of a product on a GPU whose operands may be parts of the tensors that it will be given.

    Args:
        a, a_scale, b, b_scale, out, bias, num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`; examples.
        names, places: as for `plan.prepare_launch`.

    Raises:
        As `fp8_gemm`.
    """
    options = Options(None, None, num_sms, batch_invariant, pdl, constant_weights)
    checked = checked_options(options, a, a_scale, b, b_scale, out, bias)
    _, launch = _prepare_launch(a, a_scale, b, b_scale, out, checked, bias, names=names, places=places)
    return launch


def _prepare_launch(
    a, a_scale, b, b_scale, out, options: Options, bias=None, **tensors_given
) -> tuple[GemmConfig, _launcher.Launch]:
    """For a call that has been checked and needs a kernel; `tensors_given` are keywords of `plan.prepare_launch`."""
    device, (m, k), n = a.get_device(), a.shape, b.shape[0]
    problem = GemmProblem(
        *(m, n, k, options.num_sms, tma_can_store(out)),
        split_k=not options.batch_invariant,
        output=OUTPUT_NAMES[out.dtype],
        **finishes.for_problem(bias, options.activation),
    )
    layout = layout_of(a, a_scale, b, b_scale, out)
    problem = problem.with_strides(layout.a_stride, layout.b_stride)
    config = kernel_for(problem, options.config, device, "fp8_gemm")
    launch = plan.prepare_launch(
        problem,
        config,
        layout._replace(bias_stride=0 if bias is None else bias.stride(0)),
        device,
        pdl=options.pdl,
        constant_weights=options.constant_weights,
        **tensors_given,
    )
    return config, launch


class _TensorLayout(NamedTuple):
    """What a plan expects of a tensor; reads well in an error."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool

    def __str__(self) -> str:
        alignment = "" if self.aligned else f", not aligned to {_TMA_BYTES} bytes"
        return f"{self.dtype} {list(self.shape)} with strides {self.strides} on {self.device}{alignment}"


def _call_layout(name: str, x: torch.Tensor) -> _TensorLayout:
    """Of a tensor that a plan is called with. A scale may begin anywhere."""
    aligned = name == "a_scale" or x.data_ptr() % _TMA_BYTES == 0
    return _TensorLayout(tuple(x.shape), x.stride(), x.dtype, x.device, aligned)


def layout_of(a, a_scale, b, b_scale, out) -> plan.Layout:
    """Strides of the call. Of a single row torch may report any stride, which TMA would refuse: it gets a legal one."""
    k, n = a.shape[1], out.shape[1]

    def row_stride(x: torch.Tensor, single: int) -> int:
        return x.stride(0) if x.shape[0] > 1 else single

    return plan.Layout(
        row_stride(a, round_up(k, _TMA_BYTES)),
        row_stride(b, round_up(k, _TMA_BYTES)),
        row_stride(out, round_up(n, _TMA_BYTES // out.element_size())),
        a_scale.stride(),
        b_scale.stride(),
        tensors.is_aligned(a_scale),
    )


def _check_arguments(options: Options, a, a_scale, b, b_scale, out, bias=None) -> None:
    """Check of each argument by itself what it is; `out` may be None."""
    given = {} if out is None else {"out": out}
    check_tensors(a=a, a_scale=a_scale, b=b, b_scale=b_scale, **given)
    finishes.check_bias_kind(bias)
    _refuse_gradients(a, a_scale, b, b_scale, out, bias)
    _check_option_types(options)


_SOURCES = {
    "a": "deep_tile.per_token_cast_to_fp8 makes a and a_scale",
    "a_scale": "deep_tile.per_token_cast_to_fp8 makes a and a_scale",
    "b": "deep_tile.per_block_cast_to_fp8 makes b and b_scale",
    "b_scale": "deep_tile.per_block_cast_to_fp8 makes b and b_scale",
    "out": "pass out=None to have it allocated",
    "offs": "pass the row behind each group's last, as a tensor of int32",
    "counts": "pass how many rows each group has, as a tensor of int32",
}
"""Where the right argument comes from."""


def check_tensors(**arguments) -> None:
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise tensors.no_tensor(name, value, _SOURCES[name])
    tensors.require_plain(**arguments)


_OPTION_TYPES = {
    "num_sms": ((int, type(None)), "an int, or None for all SMs"),
    "batch_invariant": ((bool,), "True or False"),
    "pdl": ((bool, type(None)), "True, False or None"),
    "constant_weights": ((bool,), "True or False"),
    "accumulate": ((bool,), "True or False"),
    "fast_accum": ((bool,), "True or False"),
}


def _check_option_types(options: Options) -> None:
    finishes.check_out_dtype(options.out_dtype)
    finishes.check_activation(options.activation)
    check_config_type(options.config)
    for name in ("num_sms", "batch_invariant", "pdl", "constant_weights"):
        check_option(name, getattr(options, name))


def check_config_type(config: object) -> None:
    if config is not None and type(config) is not GemmConfig:
        of_name = " with the numbers that its name tells" if isinstance(config, str) else ""
        raise TypeError(
            f"config must be a deep_tile.GemmConfig or None; got {type(config).__name__}. "
            f"Pass GemmConfig(block_m, block_n, stages){of_name}, or nothing to have it chosen"
        )


def check_option(name: str, value: object) -> None:
    """Check the exact type: what only equals a right value would find the launches remembered for that."""
    types, wanted = _OPTION_TYPES[name]
    if type(value) not in types:
        raise TypeError(f"{name} is {value!r}, of type {type(value).__name__}; pass {wanted}")


def check_e4m3(names: Sequence[str], operands, takers: Mapping[torch.dtype, str], casts: tuple[str, str]) -> None:
    """Check dtypes of operands and scales, called by `names`; `takers` are as for `tensors.operand_remedy`, and `casts`
    make the operands."""
    tensors.check_order(names, operands)
    known = (torch.float8_e4m3fn,)
    for name, x, cast_name in zip(names[::2], operands[::2], casts, strict=True):
        if x.dtype not in known:
            remedy = tensors.operand_remedy(name, x, known, takers, f"quantise with deep_tile.{cast_name}")
            raise TypeError(f"{name} must be {known[0]}; got {x.dtype}. To fix: {remedy}")
    check_scale_dtypes(names, operands)


def check_scale_dtypes(names: Sequence[str], operands) -> None:
    for name, scale in zip(names[1::2], operands[1::2], strict=True):
        if scale.dtype not in tensors.SCALE_DTYPES:
            remedy = tensors.scale_remedy(name, scale)
            raise TypeError(f"{name} must be {tensors.SCALE_NAMES}; got {scale.dtype}. To fix: {remedy}")


def _check_dtypes(options: Options, a, a_scale, b, b_scale, out) -> None:
    takers = dict.fromkeys(tensors.QUANTIZED_DTYPES, "scaled_gemm")
    casts = ("per_token_cast_to_fp8", "per_block_cast_to_fp8")
    check_e4m3(plan.TENSORS[:4], (a, a_scale, b, b_scale), takers, casts)
    finishes.check_out(out, options.out_dtype)


def _check_float32(**scales: torch.Tensor) -> None:
    """Of a plan, whose calls convert nothing; what no call takes, other checks refuse."""
    for name, scale in scales.items():
        if scale.dtype in tensors.SCALE_DTYPES and scale.dtype != torch.float32:
            raise TypeError(f"{name} of a plan must be torch.float32; got {scale.dtype}. To fix: pass {name}.float()")


def check_device(name: str, x: torch.Tensor, call: str) -> None:
    if x.device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(
            f"{name} is on {x.device}; {call} runs on a Hopper GPU, or on the CPU as a reference, and on meta for "
            "shapes. Move all tensors with .cuda()"
        )


def check_devices(a, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device} but a is on {a.device}; move it with .to(a.device)")


def _check_shapes(options: Options, a, a_scale, b, b_scale, out, bias) -> None:
    check_product_shapes(a, b, out, options.activation)
    check_scale_shapes(a, a_scale, b, b_scale)
    finishes.check_finish(bias, options.activation, b)


def check_scale_shapes(a, a_scale, b, b_scale) -> None:
    """Check scales of blocks."""
    (m, k), n = a.shape, b.shape[0]
    k_blocks, n_blocks = ceil_div(k, SCALE_BLOCK), ceil_div(n, SCALE_BLOCK)
    for name, x, scale, wanted, meaning in (
        ("a", a, a_scale, (m, k_blocks), "[m, ceil(k / 128)]"),
        ("b", b, b_scale, (n_blocks, k_blocks), "[ceil(n / 128), ceil(k / 128)]"),
    ):
        if not has_shape(scale, wanted):
            seen, source = tuple(scale.shape), f"To fix: {_SOURCES[f'{name}_scale']}"
            if x.dtype == torch.int8:
                source = "Quantise with a scale for each 1x128 of a and 128x128 of b"
            remedy = scale_shape_remedy(f"{name}_scale", scale, wanted, x) or source
            raise ValueError(f"{name}_scale must have shape {meaning} = {wanted}; got {seen}. {remedy}")


def has_shape(x: torch.Tensor, wanted: tuple[int, ...]) -> bool:
    return x.dim() == len(wanted) and all(ops.holds(size == right) for size, right in zip(x.shape, wanted, strict=True))


def scale_shape_remedy(name: str, scale: torch.Tensor, wanted: tuple[int, int], x: torch.Tensor) -> str | None:
    """What to do about a scale of another shape than is `wanted` of the operand `x`; None if its own shape does not
    say what it is. Sizes not known yet can be compared as text alone."""
    rows, seen = x.shape[0], tuple(scale.shape)
    more_than_one = [str(size) for size in scale.shape if str(size) != "1"]
    if str(seen) == str(wanted[::-1]):
        return f"It looks transposed: pass {name}.t(); any strides are accepted, so no copy is needed"
    expanded = f"or repeat it, which copies nothing: {name}.reshape(-1, 1).expand{wanted}"
    if not more_than_one:
        return f"deep_tile.scaled_gemm takes one number for all, where the other scale is such or of rows; {expanded}"
    if more_than_one == [str(rows)]:
        also = f"; {expanded}" if str(rows) == str(wanted[0]) else ""
        return f"deep_tile.scaled_gemm takes a scale for each row, where the other one is such or one number{also}"
    if str(seen) == str((rows, wanted[1])) and x.dtype != torch.int8:
        return "deep_tile.scaled_gemm takes a scale for each 1x128 of both operands"
    return None


def check_product_shapes(a, b, out, activation: str | None = None, names: tuple[str, str] = ("a", "b")) -> None:
    """Check a [m, k], b [n, k], called by these names, and out [m, n], which may be None; an activation may leave n / 2
    columns."""
    for name, tensor, shape in ((names[0], a, "[m, k]"), (names[1], b, "[n, k]")):
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} must have shape {shape}; got {tuple(tensor.shape)}. Flatten leading dimensions first"
            )
    (m, k), n = a.shape, b.shape[0]
    if not ops.holds(b.shape[1] == k):
        remedy = f"a [k, n] weight is passed as {transpose_of(names[1], b)}"
        if str(a.shape[0]) == str(b.shape[1]) and str(b.shape[0]) != str(k):
            remedy = f"what is [k, m] is passed as {transpose_of(names[0], a)}"
        raise ValueError(
            f"{names[0]} is [m, k] = {tuple(a.shape)} and {names[1]} is [n, k] = {tuple(b.shape)}: k differs. "
            f"{names[1]} holds one row per output column; {remedy}"
        )
    if out is not None:
        columns = finishes.out_columns(n, activation)
        if not has_shape(out, (m, columns)):
            meaning = "[m, n]" if columns is n else "[m, n / 2]"
            raise ValueError(
                f"out must have shape {meaning} = {(m, columns)}; got {tuple(out.shape)}. To fix: {_SOURCES['out']}"
            )


def transpose_of(name: str, x: torch.Tensor) -> str:
    """The transpose of a matrix as products take it."""
    if x.element_size() == 2 or x.stride(0) == 1:
        return f"{name}.t(), which copies nothing"
    return f"{name}.t().contiguous()"


def check_sizes(a, b) -> None:
    (m, k), n = a.shape, b.shape[0]
    if max(m, n, k) > MAX_SIZE:
        raise ValueError(f"m, n, k = {m}, {n}, {k}; each must be at most {MAX_SIZE}: split the product")


def _check_strides(a, a_scale, b, b_scale, out) -> None:
    check_operand_strides(a=a, b=b)
    for name, scale in (("a", a_scale), ("b", b_scale)):
        problem = scale_problem(name, tuple(scale.shape), scale.stride())
        if problem:
            raise ValueError(problem)
    if out is not None:
        check_out_strides(out)


def check_operand_strides(**operands: torch.Tensor) -> None:
    """Check that TMA can read matrices [rows, k] along k."""
    for name, tensor in operands.items():
        problem = along_k_problem(name, tensor)
        if problem:
            raise ValueError(problem)
        check_alignment(name, tensor)


def along_k_problem(name: str, x: torch.Tensor) -> str | None:
    """Why TMA cannot read a matrix [rows, k] along k, but for its address."""
    rows, k = x.shape
    if k > 1 and x.stride(1) != 1:
        return (
            f"{name} must have a unit stride along k; its strides are {x.stride()}. Make it K-major: "
            f"{name}.contiguous()"
        )
    return stride_problem(name, rows, k, x.stride(0), x.element_size())


def check_alignment(name: str, x: torch.Tensor) -> None:
    if x.numel() and x.data_ptr() % _TMA_BYTES:
        raise ValueError(misaligned(name, x))


def check_out_strides(out: torch.Tensor) -> None:
    m, n = out.shape
    if n > 1 and out.stride(1) != 1:
        raise ValueError(f"out must have a unit stride along n; its strides are {out.stride()}. Pass a row-major out")
    if m > 1 and out.stride(0) < n:
        raise ValueError(f"rows of out overlap: its row stride is {out.stride(0)} for {n} columns. Pass a dense out")


def misaligned(name: str, tensor: torch.Tensor) -> str:
    return (
        f"{name} must begin at a multiple of {_TMA_BYTES} bytes; its address is {tensor.data_ptr() % _TMA_BYTES} bytes "
        f"past one. Slice at multiples of {_TMA_BYTES // tensor.element_size()} columns, or pass {name}.clone()"
    )


def scale_problem(operand: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    if 0 in shape:
        return None
    reach, most = plan.scale_reach(shape, strides), plan.MAX_SCALE_REACH
    if reach <= most:
        return None
    dense = math.prod(shape) - 1 <= most
    remedy = f"Pass {operand}_scale.contiguous()" if dense else f"Split the rows of {operand}"
    return f"{operand}_scale's last element lies {reach} after its first; kernels reach {most}. {remedy}"


def stride_problem(
    name: str, rows: int, columns: int, stride: int, element_bytes: int = 1, what: str = "row"
) -> str | None:
    """What is wrong about the stride from row to row of a matrix [rows, columns] whose columns are adjacent: an operand
    [rows, k], or, of one whose own rows are adjacent, its transpose [k, rows]; then `what` is "column"."""
    if rows <= 1 or columns == 0:
        return None
    of_what = f"k = {columns}" if what == "row" else f"{columns} rows"
    if stride < columns:
        return f"{what}s of {name} overlap: the {what} stride is {stride} for {of_what}. Pass {name}.contiguous()"
    if stride * element_bytes % _TMA_BYTES:
        padded = round_up(stride, _TMA_BYTES // element_bytes)
        remedy = f"[rows, {padded}] and pass the first {columns} columns"
        if what == "column":
            remedy = f"[k, {padded}] and pass the transpose of the first {columns} columns"
        return (
            f"{name}'s {what} stride must be a multiple of {_TMA_BYTES} bytes; it is {stride * element_bytes}. "
            f"Allocate {remedy}"
        )
    return None


def check_hopper(device: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise RuntimeError(
            f"cuda:{device} is {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}; deep_tile's "
            "kernels need a Hopper GPU (9.0: H100, H200, H800, H20). CPU tensors compute through the reference"
        )


def _check_alive() -> None:
    """Raise where an earlier kernel has failed: every call of CUDA then reports it, and this one disturbs nobody."""
    try:
        if not torch.cuda.is_current_stream_capturing():  # and a stream that is being captured lives
            torch.cuda.current_stream().query()
    except RuntimeError as error:
        raise RuntimeError(
            "an earlier kernel of this process failed, and CUDA is of no more use to it: start another process "
            f"({error})"
        ) from error


def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def checked_num_sms(num_sms: int | None, device: torch.device) -> int:
    """SMs to use; on the CPU, where there are none, any positive number passes."""
    available = _num_sms(device.index) if device.type == "cuda" else MAX_SIZE
    if num_sms is None:
        return available
    if not 1 <= num_sms <= available:
        most = f" to {available}, the SMs of {device}" if device.type == "cuda" else ""
        raise ValueError(f"num_sms is {num_sms}; pass an int from 1{most}, or None for all")
    return num_sms


def checked_config(config: GemmConfig, problem: GemmProblem) -> GemmConfig:
    if (config.kind, config.output) != (problem.kind, problem.output):
        raise ValueError(
            f"{config.name} multiplies kind={config.kind!r} to output={config.output!r}, and this call "
            f"{problem.kind!r} to {problem.output!r}; pass such a config"
        )
    if config.layout != problem.layout:
        raise ValueError(
            f"{config.name} has layout={config.layout!r}, and the strides of this call's operands are those of "
            f"{problem.layout!r}; pass such a config"
        )
    if config.accumulate != problem.accumulate:
        raise ValueError(
            f"{config.name} has accumulate={config.accumulate}, and this call {problem.accumulate}; pass such a config"
        )
    if (config.bias, config.activation) != (problem.bias, problem.activation):
        raise ValueError(
            f"{config.name} has bias={config.bias!r} and activation={config.activation!r}, and this call "
            f"{problem.bias!r} and {problem.activation!r}; pass such a config"
        )
    if config.grouping != problem.grouping:
        raise ValueError(
            f"{config.name} is for grouping={config.grouping!r}, and this call for {problem.grouping!r}; pass such a "
            "config"
        )
    if config.tma_store and not problem.tma_store:
        raise ValueError(
            f"{config.name} stores with TMA, but out's address, row length or row stride is no multiple of "
            f"{_TMA_BYTES} bytes; pass a config with tma_store=False, or an aligned out"
        )
    if config.pairs and not config.takes_k(problem.k):
        raise ValueError(
            f"{config.name} multiplies K blocks of {SCALE_BLOCK} two by two, and k = {problem.k} has an odd number of "
            "them; pass a config with pairs=False"
        )
    if not config.takes_k(problem.k):
        smallest, largest = config.k_range
        raise ValueError(
            f"{config.name} keeps all of b's K in shared memory, for k from {smallest} to {largest}; k is "
            f"{problem.k}: pass a config with b_stages=0"
        )
    if config.cluster > problem.num_sms:
        raise ValueError(
            f"{config.name} needs {config.cluster} SMs; num_sms is {problem.num_sms}: pass a config without clusters"
        )
    if config.split_k > 1 and not problem.split_k:
        raise ValueError(
            f"{config.name} splits K, and sums depend on the split; batch_invariant=True needs split_k=1: pass such a "
            "config"
        )
    return config


def tma_can_store(out: torch.Tensor) -> bool:
    """TMA addresses rows, and clips them, in steps of 16 bytes: at n = 261 it overwrites columns 261 to 263."""
    m, n = out.shape
    row_bytes = (size * out.element_size() for size in (n, *([] if m == 1 else [out.stride(0)])))
    return all(number % _TMA_BYTES == 0 for number in (out.data_ptr(), *row_bytes))


def check_capture(config: GemmConfig, device: int, call: str) -> None:
    if not plan.is_loaded(config, device):
        launches.refuse_capture(config.name, device, call, ", or deep_tile.precompile,")


def kernel_for(
    problem: GemmProblem,
    config: GemmConfig | None,
    device: int,
    call: str,
    *,
    choose: Callable[[GemmProblem], GemmConfig | None] | None = None,
    check: Callable[[GemmConfig, GemmProblem], GemmConfig] = checked_config,
) -> GemmConfig | None:
    """The config of a call that has been checked: the one that it forces, or what `choose` says, `plan.config_for`.

    Raises:
        ValueError, RuntimeError: it does not suit the problem; the GPU is not a Hopper; or the kernel would have to be
            loaded while a CUDA graph is captured.
    """
    check_hopper(device)
    config = (choose or plan.config_for)(problem) if config is None else check(config, problem)
    if config is None:
        return None
    check_capture(config, device, call)
    if settings.print_config():
        sizes = f"m={problem.m} n={problem.n} k={problem.k} num_sms={problem.num_sms}"
        groups = "" if problem.groups is None else f"{problem.groups} "
        print(f"deep_tile: {groups}{sizes}: {config.name}", file=sys.stderr)
    return config


# The op, which tracers see.


def _run_op(inputs: tuple, outs: tuple, options: dict) -> torch.Tensor:
    *operands, bias = inputs
    return _multiply(*operands, *outs, Options(**options), bias)


def _check_op(inputs: tuple, outs: tuple, options: dict) -> None:
    *operands, bias = inputs
    check_formats(Options(**options), *operands, *outs, bias)


def _allocate_op(inputs: tuple, options: dict) -> torch.Tensor:
    a, _, b, *_ = inputs
    columns = finishes.out_columns(b.shape[0], options.get("activation"))
    return a.new_empty(a.shape[0], columns, dtype=options.get("out_dtype") or _DEFAULT_DTYPE)


def check_formats(options: Options, a, a_scale, b, b_scale, out, bias) -> None:
    """Check what can be checked without memory; strides are left to the run."""
    _check_option_types(options)
    _refuse_gradients(a, a_scale, b, b_scale, out, bias)
    _check_dtypes(options, a, a_scale, b, b_scale, out)
    check_devices(a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    _check_shapes(options, a, a_scale, b, b_scale, out, bias)


_OP = ops.Op(
    "fp8_gemm",
    "a a_scale b b_scale out! bias?",
    "activation out_dtype num_sms batch_invariant pdl constant_weights",
    *(_run_op, _check_op, _allocate_op),
    flops=ops.product_flops(second=2),
)
