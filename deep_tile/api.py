"""`prepare` and `precompile` make GEMMs ready before the first call; `supports` answers without a call."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import is_grad_enabled

from deep_tile import (  # noqa: F401, which describe products
    _launcher,
    cast,
    checks,
    finishes,
    gemm_cast,
    grouped,
    jit,
    launches,
    linear,
    options,
    plan,
    tensors,
    wgrad,
)
from deep_tile.checks import MAX_SIZE, MAX_STRIDE_BYTES, Sizes, current_gpu
from deep_tile.config import GemmConfig, as_int, round_up
from deep_tile.dense import FP8_GEMM, Options, Product
from deep_tile.finishes import OUTPUT_NAMES, RESULT_NAMES, names
from deep_tile.kinds import EVERY_KIND, GROUPINGS, LAYOUTS, PACKED, QUANTIZED, RAW, RESULTS, USUAL, Kind, name_of
from deep_tile.operation import OPERATIONS, Operation, error_of
from deep_tile.ops import is_traced
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.hardware import H200

_TMA_BYTES = tensors.ALIGNMENT_BYTES

_PRECOMPILED = {**RESULT_NAMES, torch.float8_e4m3fn: QUANTIZED}
"""Results that `precompile` knows."""

_DTYPES = {EVERY_KIND[name]: getattr(torch, dtype) for dtype, name in USUAL.items() if name in EVERY_KIND}
"""Operand dtypes by their usual kind."""


class Precompiled(NamedTuple):
    """Result of `precompile`.

    Attributes:
        configs: kernels that the shapes can need.
        compiled: how many were compiled; the others came from the cache.
    """

    configs: tuple[GemmConfig, ...]
    compiled: int

    def __repr__(self) -> str:
        return f"<Precompiled: {len(self.configs)} kernels, {self.compiled} compiled>"


class Plan:
    """A GEMM prepared by `prepare`: arguments checked, kernel loaded, weights bound. Call it to multiply.

    Attributes:
        b, b_scale: the weights, as given to `prepare`. The plan reads the memory they had then.
        config: the kernel's config; None on the CPU and for empty tensors, which need no kernel.
    """

    __slots__ = ("b", "b_scale", "config", "_known", "_launch", "_options", "_scale_aligned", "_wanted")

    def __init__(self, given: tuple, prepared: tuple[GemmConfig, _launcher.Launch] | None, options: Options):
        a, a_scale, self.b, self.b_scale, out, _ = given
        self.config, self._launch = prepared or (None, None)
        self._known = {(): ((), {launches.signature(a, a_scale, out): self._launch})} if prepared else {}
        self._options = options
        self._scale_aligned = tensors.is_aligned(a_scale)
        self._wanted = {name: _call_layout(name, x) for name, x in (("a", a), ("a_scale", a_scale), ("out", out))}

    def __call__(self, a: torch.Tensor, a_scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`fp8_gemm(a, a_scale, self.b, self.b_scale, out)` with the options given to `prepare`; returns `out`.

        Args:
            a, a_scale, out: with the shape, strides, dtype and device of preparation and, for `out`, the same 16-byte
                alignment; all checked. `out` is allocated, dense, when None.

        Raises:
            TypeError: an argument is no tensor, or not a plain one.
            ValueError: a tensor differs from the one at preparation, `a` is not 16-byte aligned, or a tensor has no
                memory.
            RuntimeError: a tensor requires a gradient while torch records them, or whatever the driver refuses. Nothing
                has been launched and `out` is untouched.
        """
        if is_traced():
            return self._call_op(a, a_scale, out)
        try:
            if is_grad_enabled():
                FP8_GEMM.refuse_gradients(self._given(a, a_scale, out), self._options)
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
        """The call under tracing, where a plan is `fp8_gemm` with its shapes and weights."""
        for name, x in (("a", a), ("a_scale", a_scale)):
            seen, wanted = tuple(x.shape), self._wanted[name].shape
            if seen != wanted:
                raise ValueError(f"{name} is of shape {seen}; this plan is for {wanted}. Prepare another plan")
        return FP8_GEMM.trace(self._given(a, a_scale, out), self._options)

    def _given(self, a, a_scale, out) -> tuple:
        return a, a_scale, self.b, self.b_scale, out, None

    def _check(self, a, a_scale, out) -> None:
        """Check that tensors are plain and match preparation; `out` may be None."""
        FP8_GEMM.check_arguments(self._given(a, a_scale, out), self._options)
        for name, x in {"a": a, "a_scale": a_scale, **({} if out is None else {"out": out})}.items():
            seen, wanted = _call_layout(name, x), self._wanted[name]
            if seen != wanted:
                raise ValueError(
                    f"{name} is {seen}; this plan is for {wanted}. Pass a tensor like that, or prepare another plan"
                )

    def _call_unknown(self, a, a_scale, out) -> None:
        """Slow path: C cannot read the tensors or the scale is aligned differently; or raise if they do not match
        preparation."""
        self._check(a, a_scale, out)
        if self._launch is None or (self._scale_aligned and not tensors.is_aligned(a_scale)):  # as TMA may count on
            FP8_GEMM.run(self._given(a, a_scale, out), self._options._replace(config=self.config))
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
    """Prepare one GEMM for many calls: `plan = prepare(a, a_scale, b, b_scale)`, then `plan(a, a_scale, out)`.

    For engines with fixed shapes: a plan's call takes less host time than `fp8_gemm` and never compiles. Arguments and
    errors are as for `fp8_gemm`, but without bias and activation and with float32 scales; `a`, `a_scale` and `out`
    serve as examples, and nothing is computed. A call checks its own arguments, but not that `b` and `b_scale` are
    still where they were: write new weights into them with `copy_`, and prepare again after replacing their memory
    (`b.data = ...`, `b.set_(...)`).
    """
    asked = Options(out_dtype, config, num_sms, batch_invariant, pdl, constant_weights)
    given = (a, a_scale, b, b_scale, out, None)
    FP8_GEMM.check_arguments(given, asked)
    _check_float32(a_scale=a_scale, b_scale=b_scale)
    if out is None:
        try:
            given = FP8_GEMM.allocated(given, asked)
        except AssertionError as error:  # FakeTensorMode makes no real tensors
            raise RuntimeError(f"out cannot be allocated: prepare outside of FakeTensorMode ({error})") from None
    checked = FP8_GEMM.checked(given, asked)
    prepared = None
    if FP8_GEMM.needs_kernel(given):
        weights = plan.Weights(b.data_ptr(), b_scale.data_ptr())
        prepared = FP8_GEMM.prepare_with_config(given, checked, weights=weights)
    return Plan(given, prepared, asked)


def supports(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype | str = torch.float8_e4m3fn,
    out_dtype: torch.dtype | None = None,
    a_stride: int | None = None,
    b_stride: int | None = None,
    layout: str = "nt",
    grouping: str = "none",
    groups: int = 1,
    call: str | None = None,
) -> tuple[bool, str]:
    """Say whether a GEMM supports these sizes and dtypes, without tensors or a GPU.

    The GEMM is the function that `call` names; by default `fp8_gemm`, `gemm` for BF16 and FP16, `int8_gemm` for INT8,
    `scaled_gemm` for e5m2, and `packed_gemm` for 4-bit weights. Its own checks are run.

    Args:
        m, n, k: sizes in elements; scales are taken to be dense. For `fp8_wgrad`: weights [n, k], m tokens.
        dtype: the operands': float8_e4m3fn, float8_e5m2, bfloat16, float16 or int8; for `fp8_linear` that of `x`:
            float8_e4m3fn if it is quantised, or bfloat16, float16 or float32. Or a kind's name, as for `precompile`:
            "mxfp4", "nvfp4", "int4" or "int4_32" for a packed weight and float8_e4m3fn activations.
        out_dtype: the result's: bfloat16, float16 or float32, or int32 for INT8 in `gemm`, float8_e4m3fn for
            `fp8_gemm_cast`; the call's default when None.
        a_stride, b_stride: row strides in elements (k strides for M- and N-major operands); None: contiguous.
        layout: "nt": both operands K-major. For BF16 and FP16 also "nn": b N-major (the transpose of a contiguous [k,
            n]); "tt": a M-major; "tn": a M-major and b N-major.
        grouping: "offs" or "counts" for `fp8_grouped_gemm`, `grouped_gemm`, `scaled_grouped_gemm` and
            `packed_grouped_gemm`: m counts all rows, or those of each group; "k_offs" for `fp8_grouped_wgrad`: weights
            [n, k], m tokens.
        groups: number of groups.
        call: a GEMM's name, such as "fp8_gemm_cast", "fp8_linear" or "scaled_gemm".

    Returns:
        Whether it does, and if not, why. Never raises: a wrong argument is a reason as well.
    """
    asked = m, n, k, dtype, out_dtype, (a_stride, b_stride), layout, grouping, groups, call
    error = error_of(described, *asked)
    return error is None, "supported" if error is None else str(error)


def described(m, n, k, dtype, out_dtype, strides, layout, grouping, groups, call, **finish) -> tuple[Operation, Sizes]:
    """The operation that `supports` asks, and the sizes, which its checks accept. Raises an error that names what is
    wrong."""
    for name, size in (("m", m), ("n", n), ("k", k), ("groups", groups)):
        if as_int(size) is None:
            raise ValueError(f"{name} is {size!r}; sizes are ints")
        if not 0 <= as_int(size) <= MAX_SIZE:
            raise ValueError(f"{name} is {size}; sizes run from 0 to {MAX_SIZE}")
    for name, stride in zip("ab", strides, strict=True):
        if stride is not None and (as_int(stride) is None or not 0 <= as_int(stride) <= MAX_STRIDE_BYTES):
            raise ValueError(f"{name}_stride is {stride!r}; strides are ints, in elements, up to {MAX_STRIDE_BYTES}")
    m, n, k, groups, *strides = (None if size is None else int(size) for size in (m, n, k, groups, *strides))
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping is {grouping!r}; groupings are {', '.join(GROUPINGS)}")
    if isinstance(dtype, str):
        dtype = _DTYPES.get(kind_of(dtype, out_dtype), dtype)
    operation, kind = _asked(call, dtype, out_dtype, grouping)
    finishes.check_activation(finish.get("activation"))
    checks.refuse(layout_problem(layout, kind))
    results = operation.results(kind)
    if out_dtype not in (None, *results):
        raise ValueError(f"out is {out_dtype}; supported is {' or '.join(map(str, results))}")
    sizes = Sizes(m, n, k, kind, dtype, out_dtype, tuple(strides), layout, grouping, groups, **finish)
    operation.check_sizes(sizes)
    return operation, sizes


def _asked(call: str | None, dtype: torch.dtype | str, out_dtype: torch.dtype | None, grouping: str) -> tuple:
    """The operation that `supports` asks (the one that `call` names, else the first for these operands), and its
    kind."""
    usual = kind_of(dtype, out_dtype)
    products = {name: each for name, each in OPERATIONS.items() if grouping in each.groupings}
    if call is not None:
        if not isinstance(call, str) or call not in products:
            raise ValueError(f"call is {call!r}; with grouping {grouping!r} pass one of {', '.join(products)}")
        products = {call: products[call]}
    if usual is None and (call is None or not isinstance(dtype, (str, torch.dtype))):
        raise ValueError(f"operands are {dtype}; supported is {' or '.join(map(str, (*_DTYPES.values(), *PACKED)))}")
    found = [(each, each.kind_for(dtype, usual)) for each in products.values()]
    found = [(each, kind) for each, kind in found if kind is not None]
    if not found:
        taken = " or ".join(dict.fromkeys(name for each in products.values() for name in operands_of(each)))
        raise ValueError(f"operands are {dtype}; {call or f'grouping {grouping!r}'} takes {taken}")
    return next((pair for pair in found if pair[1] is usual), found[0])


def operands_of(operation: Operation) -> list[str]:
    """Names that `supports` takes as `dtype` for this operation."""
    of_weights = [kind.name for kind in getattr(operation, "kinds", {}).values() if kind.packing]
    return of_weights or [str(dtype) for dtype in operation.dtypes]


def product_for(
    kind: Kind, grouping: str = "none", out_dtype: torch.dtype | None = None, *, taking: Iterable[str] = ()
) -> Product | None:
    """The first described product for operands of this kind that takes these keywords; None if there is none."""
    products = (each for each in OPERATIONS.values() if isinstance(each, Product) and grouping in each.groupings)
    found = (each for each in products if kind in each.kinds.values() and {*taking} <= {*each.names, *each._options})
    return next((each for each in found if out_dtype in (None, *each.results(kind))), None)


def kind_of(dtype: torch.dtype | str, out_dtype: torch.dtype | None) -> Kind | None:
    if dtype is torch.int8 and out_dtype is torch.int32:
        return EVERY_KIND["int8_unscaled"]
    name = name_of(dtype)
    return EVERY_KIND.get(name) if isinstance(name, str) else None


def layout_problem(layout: object, kind: Kind) -> str | None:
    """Why a kind does not support this layout; None if it does."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        return f"layout is {layout!r}; layouts are {', '.join(LAYOUTS)}"
    if layout not in kind.layouts:
        return f"layout is {layout!r}; operands of {kind.a.dtype} lie along k, as 'nt' says: pass contiguous ones"
    return None


def precompile(
    shapes: Iterable[tuple[int, int, int]],
    *,
    workers: int | None = None,
    progress: bool = False,
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
    """Compile, and on a Hopper GPU load, every kernel that a GEMM with these shapes can need.

    Launches nothing and allocates no GPU memory beyond the CUDA context. Afterwards no call with such a shape compiles
    or loads a kernel, if `config` is left to the selector and the rows of `a`, `b` and `out` are contiguous or aligned
    likewise. With a warm disk cache it takes milliseconds.

    Args:
        shapes: (n, k, max_m) for each weight matrix: every m from 1 to max_m is covered.
        workers: threads compiling at once; all cores by default.
        progress: show a bar with the time left on stderr, or, without a terminal, a line every 10 seconds.
        num_sms, batch_invariant: as later passed to `fp8_gemm`. By default num_sms is the current device's count, or an
            H200's without a GPU.
        grouping: "offs" or "counts" for grouped GEMMs, by the argument they will get, or "k_offs" for
            `fp8_grouped_wgrad` with weights [n, k]; covers any number of groups.
        kind: the operands' dtype, as for `supports`, or the name of a kind: "fp8" (`fp8_gemm`, `fp8_grouped_gemm`);
            "bf16", "fp16", "int8_unscaled" (`gemm`, `grouped_gemm`); "int8" (`int8_gemm`, `scaled_grouped_gemm`);
            "fp8_rows", "fp8_rows_promoted" for `fast_accum=False`, "int8_rows" (`scaled_gemm`, `scaled_grouped_gemm`);
            "fp8_1x128" (`scaled_gemm`, `fp8_wgrad`); "mxfp4", "nvfp4", "int4" and, for groups of 32 or 64, "int4_32"
            (`packed_gemm`, `packed_grouped_gemm`).
            FP8 kinds end in the formats of a and b unless both are e4m3, e.g. "fp8_rows_e5m2_e4m3".
        out_dtype: dtype of `out`; the call's default when None. float8_e4m3fn for `fp8_gemm_cast`.
        accumulate: as later passed; for groups only with "k_offs".
        bias: dtype of the bias; None: no bias.
        activation: as later passed to the call; n then counts rows of `b`.
        layouts: operand layouts for `gemm`, as for `supports`. For gradients ("nn", "tn") pass the n, k and max_m of
            the gradients' GEMMs.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the call does not support a shape or `out_dtype`, `num_sms` or `workers` is out of range, or
            `grouping`, `kind` or a layout is unknown.
        jit.CompileError: a kernel does not compile.
    """
    product = kind_of(kind, out_dtype)
    if product is None:
        known = f"one of {', '.join(EVERY_KIND)}; dtypes are {names(_DTYPES.values())}"
        raise ValueError(f"kind is {kind!r}; pass a dtype of operands, or {known}")
    kind, dtype = product.name, product.name if product.packing else finishes.torch_dtype(product.a)
    weights = [_checked_weight(shape, dtype) for shape in _as_list(shapes)]
    if out_dtype not in (None, *_PRECOMPILED):
        raise ValueError(f"out_dtype is {out_dtype}; pass one of {names(_PRECOMPILED)}, or nothing")
    layouts = _checked_layouts(layouts, product)
    output = product.output if out_dtype is None else _PRECOMPILED[out_dtype]
    if bias not in (None, *OUTPUT_NAMES):
        raise ValueError(f"bias is {bias!r}; pass its dtype, one of {names(OUTPUT_NAMES)}, or nothing")
    finishes.check_activation(activation)
    finish = ("none" if bias is None else OUTPUT_NAMES[bias], activation or "none")
    if output == RAW and finish != ("none", "none"):
        raise ValueError("results are INT32, and a bias or an activation is given; pass out_dtype=torch.float32")
    for name, value in (("num_sms", num_sms), ("batch_invariant", batch_invariant), ("accumulate", accumulate)):
        options.check_one(name, value)
    options.check_one("progress", progress)
    if accumulate and finish != ("none", "none"):
        raise ValueError(
            f"accumulate is True, bias {bias} and activation {activation!r}; a product is added without either"
        )
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping is {grouping!r}; pass one of {', '.join(GROUPINGS)}")
    if grouping != "none" and not {"nt", "nn"}.issuperset(layouts):
        raise ValueError(f"grouping is {grouping!r} and layouts {list(layouts)}; groups are of layouts 'nt' and 'nn'")
    taking = {"accumulate": accumulate, "bias": bias is not None, "activation": activation is not None}
    taking = [name for name, is_asked in taking.items() if is_asked]
    operation, configs = product_for(product, grouping, out_dtype, taking=taking), set()
    if operation is None:
        known = [name for name, each in EVERY_KIND.items() if product_for(each, grouping, out_dtype, taking=taking)]
        given = ", ".join([f"grouping is {grouping!r}, kind {kind!r}, out_dtype {out_dtype}", *taking])
        raise ValueError(f"{given}: no call takes these together; kinds for the others: {', '.join(known) or 'none'}")
    if out_dtype is None and operation.out_dtype is not None:  # gradients' differs from their kind's
        output = _PRECOMPILED[operation.out_dtype]
    device = current_gpu()
    if num_sms is not None or device is not None:
        num_sms = checks.checked_num_sms(
            num_sms, torch.device("cpu") if device is None else torch.device("cuda", device)
        )
    else:
        num_sms = H200.num_sms
    groups = None if grouping == "none" else Groups(grouping, 1, 1)
    for n, k, max_m in weights:
        finishes.check_pairs(n, activation)
        columns = k if grouping == "k_offs" else finishes.out_columns(n, activation)
        tma_store = columns * RESULTS[output].bytes % _TMA_BYTES == 0
        of_all = GemmProblem(
            1, n, k, num_sms, tma_store, not batch_invariant, kind, output, groups, accumulate, *finish
        )
        configs |= operation.configs(of_all, max_m, layouts)
    ordered = tuple(sorted(configs, key=lambda config: config.name))
    before = jit.compilations()
    plan.load_kernels(ordered, device, workers, progress)
    casts = operation.casts(product)
    if casts:
        cast.load_kernels(device, workers, casts, progress)
    return Precompiled(ordered, jit.compilations() - before)


def _checked_layouts(layouts: object, product: Kind) -> tuple[str, ...]:
    if isinstance(layouts, str) or not isinstance(layouts, Iterable):
        raise TypeError(f"layouts is {layouts!r}; pass names in a list, such as ['nt', 'nn']")
    names = tuple(layouts)
    for layout in names:
        problem = layout_problem(layout, product)
        if problem:
            raise ValueError(f"layouts is {list(names)}: {problem}")
    return names


def _as_list(shapes: Iterable) -> list:
    try:
        return list(shapes)
    except TypeError:
        raise TypeError(f"shapes is {shapes!r}; pass a list of (n, k, max_m), one for each weight") from None


def _checked_weight(shape: object, dtype: torch.dtype | str) -> tuple[int, int, int]:
    sizes = tuple(map(as_int, shape)) if isinstance(shape, (tuple, list)) else ()
    if len(sizes) != 3 or None in sizes:
        raise TypeError(
            f"shapes holds {shape!r}; pass three ints for each weight, in a list also for one weight: "
            "precompile([(n, k, max_m)])"
        )
    n, k, max_m = sizes
    padded = round_up(k, _TMA_BYTES)
    b_stride = None if dtype in PACKED else padded
    supported, reason = supports(max_m, n, k, dtype=dtype, a_stride=padded, b_stride=b_stride)
    if not supported or not min(sizes):
        reason = "sizes must be positive" if supported else reason
        raise ValueError(f"shape (n={n}, k={k}, max_m={max_m}): {reason}")
    return n, k, max_m


class _TensorLayout(NamedTuple):
    """The layout that a plan expects; its text appears in errors."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool

    def __str__(self) -> str:
        alignment = "" if self.aligned else f", not aligned to {_TMA_BYTES} bytes"
        return f"{self.dtype} {list(self.shape)} with strides {self.strides} on {self.device}{alignment}"


def _call_layout(name: str, x: torch.Tensor) -> _TensorLayout:
    """The layout of a plan's argument. A scale may begin anywhere."""
    aligned = name == "a_scale" or x.data_ptr() % _TMA_BYTES == 0
    return _TensorLayout(tuple(x.shape), x.stride(), x.dtype, x.device, aligned)


def _check_float32(**scales: torch.Tensor) -> None:
    """Check a plan's scales, which its calls do not convert; other checks refuse other dtypes."""
    for name, scale in scales.items():
        if scale.dtype in tensors.SCALE_DTYPES and scale.dtype != torch.float32:
            raise TypeError(f"{name} of a plan must be torch.float32; got {scale.dtype}. To fix: pass {name}.float()")
