"""Dense GEMMs: block-scaled FP8; BF16 and FP16; INT8; FP8 and INT8 with per-row scales; FP8 with 1x128 scales on both
operands (weight gradients); any mix of e5m2 and e4m3.

Invariant: a kind is a row in `kinds.KINDS`, and a function is a `Dense`, which maps (scaling, operand dtypes) to kinds.
"""

from collections.abc import Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch

from deep_tile import checks, finishes, launches, ops, packed, params, plan, tensors, thin, unpack
from deep_tile.codegen import StreamingKernel
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import KINDS, LAYOUT_NAMES, LAYOUTS, PACKED, Kind, Majors
from deep_tile.operation import OPERATIONS, Given, Operation, gradient_error
from deep_tile.ops import is_traced
from deep_tile.problem import GemmProblem
from deep_tile.reference import (
    finished,
    gemm_reference,
    row_blocks_gemm_reference,
    rows_gemm_reference,
    scaled_gemm_reference,
)
from deep_tile.select.groups import configs_of

Kinds = Mapping[tuple[str, torch.dtype, torch.dtype], Kind]
"""Kinds by scaling and the dtypes of a and b."""


class Options(NamedTuple):
    """A call's keywords, described at `fp8_gemm` and `gemm`."""

    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False
    activation: str | None = None
    accumulate: bool = False
    fast_accum: bool = True


_OUT_DTYPE, _ACTIVATION, _ACCUMULATE = map(Options._fields.index, ("out_dtype", "activation", "accumulate"))
"""Places in a call's options; building an `Options` takes 0.3 us."""


class Product(Operation):
    """A GEMM of `a` and `b` (names may differ), each perhaps followed by a scale.

    Args:
        kinds: supported kinds.
        out_dtype: default result dtype; None: the operands', int32 for INT8.
        remedies: texts for unsupported dtypes of `a` and `b`.
        takers: functions for the other dtypes in `tensors.QUANTIZED_DTYPES`.
        others: as for `Operation`.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        keywords: str,
        kinds: Kinds,
        *,
        out_dtype: torch.dtype | None,
        remedies: tuple[str, str],
        takers: Mapping[torch.dtype, str] = MappingProxyType({}),
        **others,
    ) -> None:
        self.kinds, self.out_dtype, self.remedies, self.takers = kinds, out_dtype, remedies, takers
        pairs = dict.fromkeys((a, b) for _, a, b in kinds)
        self.dtypes = {a: tuple(b for with_a, b in pairs if with_a == a) for a, _ in pairs}
        self.count = 4 if "_scale " in tensors else 2
        super().__init__(name, tensors, keywords, flops=ops.product_flops(second=self.count // 2), **others)

    def matrices(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        return given[0], given[self.count // 2]

    def kind(self, given: Given, options) -> Kind:
        a, b = self.matrices(given)
        if b.dtype == torch.uint8:
            return self.kinds[packed.name_of(b, packed.k_of(a)), a.dtype, b.dtype]
        known = [each for each, *dtypes in self.kinds if dtypes == [a.dtype, b.dtype]]
        found = self.scaling(given[: self.count], known) if len(known) > 1 else known[0]
        if found == "rows" and "promoted_rows" in known and not options.fast_accum:
            found = "promoted_rows"
        return self.kinds[found, a.dtype, b.dtype]

    def scaling(self, operands: Given, known: list[str]) -> str:
        """The scaling, for dtypes with several; derived from scale shapes."""
        raise NotImplementedError

    def dtype_of_out(self, options, a: torch.Tensor) -> torch.dtype:
        return options.out_dtype or self.out_dtype or (torch.int32 if a.dtype == torch.int8 else a.dtype)

    def readable(self, given: Given) -> Given:
        return *tensors.with_float32_scales(given[: self.count]), *given[self.count :]

    def kind_for(self, dtype: torch.dtype | str, usual: Kind | None) -> Kind | None:
        if usual in self.kinds.values():
            return usual
        return next((kind for (_, a, b), kind in self.kinds.items() if a == b == dtype), None)

    def results(self, kind: Kind) -> tuple[torch.dtype, ...]:
        return finishes.of_kind(kind)

    def problem_for(self, asked: checks.Sizes, num_sms: int) -> GemmProblem:
        given, options = self.without_memory(asked)
        options = options._replace(num_sms=num_sms, **self._defaults)
        return self.problem(self.with_outs(given, options), options)._replace(kind=asked.kind.name)

    def configs(self, of_all: GemmProblem, max_m: int, layouts: Iterable[str]) -> set[GemmConfig]:
        """Every config that problems like `of_all` in these layouts can be given for m up to `max_m`."""
        read = {LAYOUT_NAMES[majors] for majors in as_read(layouts, of_all.n)}
        return {config for layout in read for config in configs_of(of_all._replace(layout=layout))}

    def casts(self, kind: Kind) -> list[StreamingKernel]:
        """Memory-bound kernels that a call launches beside the GEMM."""
        return []

    def check_dtypes(self, given: Given) -> None:
        operands, names = given[: self.count], self.names[: self.count]
        (a, b), (a_name, b_name) = self.matrices(given), (names[0], names[self.count // 2])
        if self.count == 4:
            tensors.check_order(names, operands)
        if a.dtype not in self.dtypes:
            remedy = tensors.operand_remedy(a_name, a, self.dtypes, self.takers, self.remedies[0])
            raise TypeError(f"{a_name} must be {finishes.one_of(self.dtypes)}; got {a.dtype}. To fix: {remedy}")
        known = self.dtypes[a.dtype]
        if b.dtype not in known:
            wanted = " or ".join(map(str, known)) + (f", since {a_name} is {a.dtype}" if len(self.dtypes) > 1 else "")
            remedy = tensors.operand_remedy(b_name, b, known, self.takers, self.remedies[1])
            raise TypeError(f"{b_name} must be {wanted}; got {b.dtype}. To fix: {remedy}")
        if self.count == 4:
            checks.check_scale_dtypes(names, operands)

    def check_scales(self, given: Given) -> None:
        if self.count == 4:
            for name, scale in zip(self.names[:4:2], given[1:4:2], strict=True):
                checks.refuse(checks.scale_problem(name, tuple(scale.shape), scale.stride()))


class Dense(Product):
    """A product [m, k] by [n, k]."""

    Options = Options
    groupings = ("none",)

    def out_and_bias(self, given: Given) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return given[self.count], given[self.count + 1] if len(given) > self.count + 1 else None

    def result(self, given: Given, options: Options) -> tuple[tuple[int, ...], torch.dtype]:
        a, b = self.matrices(given)
        return (a.shape[0], finishes.out_columns(b.shape[0], options.activation)), self.dtype_of_out(options, a)

    def allocated(self, given: Given, options: tuple) -> Given:
        a, b = given[0], given[self.count // 2]
        if a.dim() != 2 or b.dim() != 2:
            raise ValueError(f"a and b must be [m, k] and [n, k]; got shapes {tuple(a.shape)} and {tuple(b.shape)}")
        if len(options) > _ACCUMULATE and options[_ACCUMULATE]:
            self.refuse_sum_of_nothing(Options(*options))
        n, activation = b.shape[0], options[_ACTIVATION]
        n = n if activation is None else finishes.out_columns(n, activation)
        dtype = options[_OUT_DTYPE] or self.out_dtype or self.dtype_of_out(Options(), a)
        out = tensors.new_empty(a, (a.shape[0], n), (n or 1, 1), dtype)
        return given[: self.count] + (out, given[-1])

    def without_memory(self, asked: checks.Sizes) -> tuple[Given, Options]:
        asked = asked if self._allocates else asked.over_tokens
        out = None
        if not self._allocates:
            out = torch.empty(asked.m, asked.n, dtype=asked.out_dtype or self.out_dtype, device="meta")
        bias = None if asked.bias is None else torch.empty(asked.n, dtype=asked.bias, device="meta")
        options = Options(out_dtype=asked.out_dtype, activation=asked.activation)
        return (*asked.operands(), out, bias)[: len(self.names)], options

    def configs(self, of_all: GemmProblem, max_m: int, layouts: Iterable[str]) -> set[GemmConfig]:
        """As for weights, a single row of `a` may be read as K-major in any layout."""
        read = set()
        for a, b in as_read(layouts, of_all.n):
            read |= {(max_m, LAYOUT_NAMES[Majors(a, b)]), (1, LAYOUT_NAMES[Majors("k", b)])}
        found = (plan.configs_for(of_all._replace(layout=layout), most) for most, layout in read)
        return {config for configs in found for config in configs}

    def refuse_sum_of_nothing(self, options: Options) -> None:
        if options.accumulate:
            raise ValueError("accumulate is True and out None: pass what the product is added to")

    def scaling(self, operands: Given, known: list[str]) -> str:
        """The scaling, by scale shapes. If k and n have one block each, all scalings are equal. A symbolic n counts as
        larger: asking for its size would fix it."""
        a, a_scale, b, b_scale = operands
        of_a, of_b = _is_of_blocks(a, a_scale), _is_of_blocks(b, b_scale)
        k = sum(a.shape[1:2])
        is_any = type(k) is torch.SymInt and "row_blocks" in known
        several = a.dim() == 2 and (is_any or not 0 < k <= SCALE_BLOCK)
        is_larger = several or type(b.shape[0]) is torch.SymInt or b.shape[0] > SCALE_BLOCK
        if of_a and not of_b and _is_of_blocks(b, b_scale, SCALE_BLOCK) and is_larger:
            return "blocks"
        if several and (of_a or of_b):
            return "row_blocks" if "row_blocks" in known else "blocks"
        return "rows"

    def check(self, given: Given, options: Options) -> None:
        (a, b), (out, bias) = self.matrices(given), self.out_and_bias(given)
        a_name, b_name = self.names[0], self.names[self.count // 2]
        self.check_dtypes(given)
        kind, is_finished = self.kind(given, options), bias is not None or options.activation is not None
        finishes.check_out_dtype(options.out_dtype, finishes.of_kind(kind))
        finishes.check_out(out, options.out_dtype, finishes.of_kind(kind))
        if is_finished and (self.dtype_of_out(options, a) if out is None else out.dtype) == torch.int32:
            raise ValueError(
                "the result is torch.int32, and a bias or an activation is given, which are applied in FP32: pass "
                "out_dtype=torch.float32"
            )
        if options.accumulate and is_finished:
            raise ValueError("accumulate is True, and a bias or an activation is given: add the product alone")
        if out is None:
            self.refuse_sum_of_nothing(options)
        checks.check_device(a_name, a, self.name)
        checks.check_devices(a, **dict(zip(self.names[1 : self.count + 1], given[1 : self.count + 1], strict=True)))
        as_fp8 = packed.shaped(a, b) if kind.packing else b
        checks.check_product_shapes(a, as_fp8, out, options.activation, (a_name, b_name))
        if kind.scaling == "blocks":
            checks.check_scale_shapes(a, given[1], as_fp8, given[3])
        elif kind.scaling == "row_blocks":
            checks.check_row_block_scales(self.names, (a, given[1], as_fp8, given[3]))
        elif kind.row_scales:
            checks.check_row_scales(*given[:4])
        finishes.check_finish(bias, options.activation, b)

    def check_memory(self, given: Given, options: Options) -> Options:
        (a, b), (out, _) = self.matrices(given), self.out_and_bias(given)
        checks.check_sizes(a, b)
        for name, x in ((self.names[0], a), (self.names[self.count // 2], b)):
            (packed.check_memory if x.dtype == torch.uint8 else checks.check_operand)(name, x)
        self.check_scales(given)
        if out is not None:
            checks.check_out_strides(out)
        checks.check_constant_weights(options)
        return checks.with_defaults(options, a.device)

    def needs_kernel(self, given: Given) -> bool:
        a, b = self.matrices(given)
        return self.is_on_gpu(a) and min(*a.shape, *b.shape) > 0

    def problem(self, given: Given, options: Options) -> GemmProblem:
        (a, b), (out, bias) = self.matrices(given), self.out_and_bias(given)
        return GemmProblem(
            *(a.shape[0], b.shape[0], a.shape[1]),
            num_sms=options.num_sms,
            tma_store=checks.tma_can_store(out),
            split_k=not options.batch_invariant,
            kind=self.kind(given, options).name,
            output=finishes.FORMAT_NAMES[out.dtype],
            accumulate=options.accumulate,
            **finishes.for_problem(bias, options.activation),
            layout=LAYOUT_NAMES[_majors(a, b)],
        )

    def layout(self, given: Given, kind: Kind) -> plan.Layout:
        """The call's strides. For a single row torch may report any stride; TMA gets a legal one."""

        def row_stride(x: torch.Tensor) -> int:
            return x.stride(0) if x.shape[0] > 1 else round_up(x.shape[1], tensors.ALIGNMENT_BYTES // x.element_size())

        out, bias = self.out_and_bias(given)
        as_stored = (x.t() if checks.lies_along_rows(x) else x for x in self.matrices(given))
        strides = [row_stride(x) for x in (*as_stored, out)]
        if kind.packing:
            strides[1] = given[0].shape[1]  # an FP8 b's stride: a packed b has no map
        scales = {"a_scale_strides": (0, 0), "b_scale_strides": (0, 0), "a_scale_aligned": False}
        if kind.scaling != "none":
            _, a_scale, _, b_scale = given[:4]
            if kind.row_scales:
                scales |= {"a_scale_strides": (_step(a_scale), 0), "b_scale_strides": (_step(b_scale), 0)}
            else:
                scales = {"a_scale_strides": a_scale.stride(), "b_scale_strides": b_scale.stride()}
                scales |= {"a_scale_aligned": tensors.is_aligned(a_scale)}
                scales |= {"b_scale_aligned": kind.scaling == "row_blocks" and tensors.is_aligned(b_scale)}
        return plan.Layout(*strides, **scales, bias_stride=0 if bias is None else bias.stride(0))

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        return self.prepare_with_config(given, options)[1]

    def prepare_with_config(self, given: Given, options: Options, **where) -> tuple[GemmConfig, launches.Prepared]:
        """Config and launch for a checked call; `where` overrides keywords of `plan.prepare_launch`."""
        device, problem = given[0].get_device(), self.problem(given, options)
        layout = self.layout(given, problem.product)
        problem = problem.with_strides(layout.a_stride, layout.b_stride)
        config = checks.kernel_for(problem, options.config, device, self.name)
        of_bias = ["bias"] * (self.out_and_bias(given)[1] is not None)
        of_kernel = plan.TENSORS if self.count == 4 else ("a", "b", "out")
        fields = (*plan.as_kernels_name(of_kernel, problem.product), *of_bias)
        where = where or {"names": (*self.names[: self.count + 1], *of_bias), "places": params.places(fields)}
        launch = plan.prepare_launch(
            problem, config, layout, device, pdl=options.pdl, constant_weights=options.constant_weights, **where
        )
        return config, launch

    def define(self, given: Given, options: Options) -> None:
        (a, b), (out, bias) = self.matrices(given), self.out_and_bias(given)
        if out.is_meta or not out.numel():
            return
        is_finished = bias is not None or options.activation is not None
        dtype = torch.float64 if is_finished else out.dtype
        if a.shape[1]:
            scaling = self.kind(given, options).scaling
            product = REFERENCES[scaling](*unpacked(given[: self.count]), dtype)
        else:
            product = a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)  # infinite scales would make NaN
        if is_finished:
            product = finished(product, bias, options.activation)
        if options.accumulate:
            out.add_(product)
        else:
            out.copy_(product)


class PackedDense(unpack.Unpacking, Dense):
    """`packed_gemm`."""

    def in_fp8(self, kind: Kind) -> Dense:
        return SCALED_GEMM if kind.scaling == "row_blocks" else FP8_GEMM

    def configs(self, of_all: GemmProblem, max_m: int, layouts: Iterable[str]) -> set[GemmConfig]:
        return super().configs(of_all, max_m, layouts) | plan.unpacked_configs_for(of_all, max_m)


class Differentiable(Dense):
    """`gemm`, whose gradients are also `gemm` calls."""

    def differentiate(self, given: Given, options: Options) -> torch.Tensor:
        self.refuse_gradients(given, options)
        a, b, _, bias = given
        return _Differentiable.apply(a, b, bias, options)

    def refuse_gradient(self, name: str, given: Given, options: Options) -> None:
        if given[self.count] is not None:
            raise gradient_error(name, "what is written to an out has none", "drop out")
        if options.activation is not None:
            why = f"{self.name} has none with activation {options.activation!r}"
            raise gradient_error(name, why, "apply it by torch")


def as_read(layouts: Iterable[str], n: int) -> set[Majors]:
    """How kernels read operands in these layouts: a `b` of one row as K-major, too."""
    asked = {LAYOUTS[layout] for layout in layouts}
    return asked | {majors._replace(b="k") for majors in asked if n == 1}


def kinds_of(*families: str) -> Kinds:
    found = (kind for kind in KINDS.values() if kind.family in families)
    return {(kind.scaling, finishes.torch_dtype(kind.a), finishes.torch_dtype(kind.b)): kind for kind in found}


FP8_KINDS = {key: kind for key, kind in kinds_of("fp8").items() if kind.name == "fp8"}
"""Block scales, both operands e4m3."""

PACKED_KINDS = {(kind.name, finishes.torch_dtype(kind.a), torch.uint8): kind for kind in PACKED.values()}
"""Kinds with packed weights. All share one dtype, so their names stand in for scalings."""

REFERENCES = {
    "none": gemm_reference,
    "blocks": scaled_gemm_reference,
    "row_blocks": row_blocks_gemm_reference,
    "rows": rows_gemm_reference,
    "promoted_rows": rows_gemm_reference,
}
"""Each scaling's definition, a function of operands and result dtype."""


def unpacked(operands: Given) -> Given:
    if operands[len(operands) // 2].dtype != torch.uint8:
        return operands
    a, a_scale, b, b_scale = operands
    return a, a_scale, packed.elements(b, b_scale, a.shape[-1]), b_scale


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
    stream; CPU tensors are computed by the definition in `deep_tile.reference`. Sizes m, n and k may have any value
    that fits the strides below; m = 0 or n = 0 does nothing, k = 0 writes zeros, to which bias and activation apply.
    Not differentiable: raises if torch records gradients and a tensor requires one. Compiled as one op,
    `torch.ops.deep_tile.fp8_gemm`, by torch.compile and torch.export.

    Args:
        a: [m, k] float8_e4m3fn, unit stride along k, row stride a multiple of 16 bytes, 16-byte aligned.
        a_scale: [m, ceil(k / 128)] float32, any strides within 4 GB: row-major, or M-major with stride (1, m) or
            padded. Some large GEMMs are 1 to 2 % faster if columns start at multiples of 16 bytes ("m_aligned" casts).
            Or bfloat16, float16 or float8_e8m0fnu, which a torch kernel converts to float32 first.
        b: [n, k] float8_e4m3fn, laid out like `a`.
        b_scale: [ceil(n / 128), ceil(k / 128)] float32, any strides within 4 GB, or a dtype that `a_scale` may have.
        out: [m, n] bfloat16, float16 or float32, unit stride along n; allocated when None. Any alignment and row
            stride; rows that start and end at multiples of 16 bytes are stored faster. Must not overlap the inputs.
        bias: [n] bfloat16, float16 or float32, any stride; added to each row in FP32, before the activation.
        activation: applied in FP32 before rounding: "relu", "gelu" (within 3e-7 of the input; 0 for -infinity),
            "gelu_tanh", "silu"; or "swiglu", for which gate and up rows of `b` alternate in blocks of eight
            (`interleave_gate_up`), n is a multiple of 16, and `out` is [m, n / 2]. Each bias dtype and activation has
            its own kernels.
        out_dtype: dtype of `out`: by default `out`'s, or bfloat16.
        config: the kernel to use instead of the selector's choice.
        num_sms: streaming multiprocessors to use; by default, and at most, all on the device.
        batch_invariant: a row's bits do not depend on m, num_sms or other rows. Gives up split K, which helps for small
            m. Without it results still repeat from call to call.
        pdl: programmatic dependent launch: the kernel may start while its predecessor in the stream still runs, and
            waits for its end before it touches memory that both use and lets its own successor start. Launching takes
            the host 0.5 to 0.8 us less. By default on, unless `num_sms` is given: waiting thread blocks would hold SMs
            that are reserved for others.
        constant_weights: with `pdl`, also load `b` before that wait where this helps, which is at small m. The
            preceding kernel in the stream must then not write `b` or `b_scale`; nor, if it is another library's
            programmatic launch, a kernel that may still run beside it.

    Returns:
        `out`.

    Raises:
        TypeError: an argument is no tensor, or not a plain one (a wrapper, a negated view, sparse, ...), or has the
            wrong dtype; or an option has the wrong type, even if it equals a right one (num_sms=True).
        ValueError: an unsupported shape, stride, alignment, device, config, num_sms or combination of options, or a
            tensor without memory; or `config` under torch.compile.
        RuntimeError: a tensor requires a gradient while torch records them, the GPU is not a Hopper, NVRTC or the
            driver is missing, or a kernel would have to be compiled or loaded while the stream is being captured.
            Nothing has been launched and `out` is untouched.

    The method (1x128 and 128x128 scales, promotion to FP32 every 128 k) is from the DeepSeek-V3 report, 3.3.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, activation)
    return FP8_GEMM.run((a, a_scale, b, b_scale, out, bias), options)


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

    Accumulated over all k in FP32 and rounded once; FP16 results beyond 65504 become infinite. INT8 accumulates in
    INT32, modulo 2^32, so exactly for k up to 131071; if `out` is not int32, the sum is converted to FP32 and rounded.
    Runs on the tensors' device and torch's current stream; CPU tensors go through the operation's definition in
    `deep_tile.reference`. Sizes m, n and k are free; m = 0 or n = 0 does nothing, k = 0 writes zeros. Compiled as one
    op, `torch.ops.deep_tile.gemm`, by torch.compile and torch.export.

    The strides of an operand say whether it is K-major: for contiguous matrices `gemm(x, w)` is x @ w.T, `gemm(x,
    w.t())` is x @ w, and `gemm(dy.t(), x.t())` is dy.T @ x, without a copy. If strides are ambiguous (a single row or a
    single k), the operand counts as K-major.

    Differentiable in `a`, `b` and `bias`, if `out` and `activation` are not given. The gradients of `a` and `b` are
    GEMMs in the operands' dtype, to which an output gradient of another dtype is rounded first. They are differentiable
    again, except through the op.

    Args:
        a: [m, k] bfloat16, float16 or int8, 16-byte aligned: unit stride along k and a row stride that is a multiple of
            16 bytes; or, for 16-bit dtypes, unit stride along m and such a stride along k. May be a slice of a wider
            matrix.
        b: [n, k] in the same dtype, K-major or N-major in the same way: one row per output column, as in
            `torch.nn.Linear`. Or, with a bfloat16 `a`, K-major float32: the call is then `thin_gemm`, takes no bias,
            activation, config or constant_weights, and is not differentiable.
        out: [m, n] bfloat16, float16 or float32, or int32 for INT8, unit stride along n; allocated when None. Any
            alignment and row stride; rows that start and end at multiples of 16 bytes are stored faster. Must not
            overlap the inputs.
        bias, activation: as for `fp8_gemm`; not with int32.
        out_dtype: dtype of `out`: by default `out`'s, or `a`'s, or int32 for INT8.
        config: the kernel to use instead of the selector's choice; its `layout` must match the operands.
        num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`; the first three for gradients, too.
        accumulate: add the result to `out`, which must be given; without bias and activation. The result is rounded to
            `out`'s dtype, and then the sum is: for bfloat16 and float16 both roundings count.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, activation, accumulate, True)
    if getattr(b, "dtype", None) is torch.float32 and getattr(a, "dtype", None) is torch.bfloat16:
        return _multiply_wide(a, b, out, Options(*options), bias)
    return GEMM.run((a, b, out, bias), options)


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

    `out[m, n] = sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n // 128, k // 128]`: sums over 128 k are
    exact in INT32, scaled and added in FP32, and rounded once. Everything else is as for `fp8_gemm`.

    Args:
        a: [m, k] int8, unit stride along k, row stride a multiple of 16 bytes, 16-byte aligned.
        a_scale: [m, ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes, any strides within 4 GB.
        b: [n, k] int8, laid out like `a`.
        b_scale: [ceil(n / 128), ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes, any strides within 4 GB.
        out, bias, activation, out_dtype, config, num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.
        accumulate: as for `gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, activation, accumulate, True)
    return INT8_GEMM.run((a, a_scale, b, b_scale, out, bias), options)


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
    """FP8 or INT8 GEMM with per-row or block scales: `out = (a * a_scale) @ (b * b_scale)^T`.

    With one scale per row, or one per tensor, `out[m, n] = a_scale[m] * b_scale[n] * sum_k a[m, k] * b[n, k]`. Tensor
    cores accumulate all k: INT8 exactly in INT32 for k up to 131071, then converted to FP32 and scaled; FP8 with about
    14 bits, as torch does with `use_fast_accum=True`. Without `fast_accum`, FP8 sums over 128 k are promoted to FP32.

    With 1x128 scales for both FP8 operands,
    `out[m, n] = sum_k a[m, k] * a_scale[m, k // 128] * b[n, k] * b_scale[n, k // 128]`: sums over 128 k are scaled and
    added in FP32, as by `fp8_gemm`. With 1x128 scales for `a` and 128x128 for `b` it is `fp8_gemm` or `int8_gemm`, with
    either FP8 format. Otherwise as for these.

    Args:
        a: [m, k] float8_e4m3fn, float8_e5m2 or int8, unit stride along k, row stride a multiple of 16 bytes, 16-byte
            aligned.
        a_scale: float32, bfloat16, float16 or float8_e8m0fnu: [m] or [m, 1], or one number in any shape; or [m, ceil(k
            / 128)], any strides within 4 GB, fastest "m_aligned" as from `per_token_cast_to_fp8`.
        b: [n, k] laid out like `a`, in either FP8 format, or int8.
        b_scale: likewise: [n], [n, 1] or [1, n], or one number, as torch's per-tensor and per-row scales. With 1x128
            a_scale: [n, ceil(k / 128)] for FP8, or [ceil(n / 128), ceil(k / 128)].
        out, bias, activation, out_dtype, config, num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.
        accumulate: as for `gemm`.
        fast_accum: for FP8 with per-row or per-tensor scales, as above; otherwise ignored.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, activation, accumulate, fast_accum)
    return SCALED_GEMM.run((a, a_scale, b, b_scale, out, bias), options)


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
    """`fp8_gemm` with a 4-bit weight, which the kernel converts to FP8.

    The result has the bits of a GEMM with the FP8 weight that `pack_weight` defines, if both add K in order, as with
    `batch_invariant=True`: split K and, up to 32 rows, narrow tiles add it in parts. INT4 in groups of 32 or 64 has no
    such weight: each sum over 32 elements gets its group's scale in FP32. The kernel reads 17/32 as many weight bytes
    as FP8, 18/32 for NVFP4, and for INT4 with its scales 17/32, or 73/128 in groups of 32 or 64. With many rows, the
    weight is first unpacked to FP8 in temporary memory, if FP8 holds it and that is predicted to take less time. Not
    differentiable.

    Args:
        a: [m, k] float8_e4m3fn, as for `fp8_gemm`.
        a_scale: [m, ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes.
        b, b_scale: a `Packed` that `pack_weight` made from [n, k]; `b` contiguous, 16-byte aligned.
        config: as for `fp8_gemm`; its kind is the weight's, "mxfp4", "nvfp4", "int4" or, in groups of 32 or 64,
            "int4_32".
        out, bias, activation, out_dtype, num_sms, batch_invariant, pdl, constant_weights, accumulate: as for
            `scaled_gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights, activation, accumulate, True)
    return PACKED_GEMM.run((a, a_scale, b, b_scale, out, bias), options)


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
    """A linear layer's weight gradient, `out += dy^T @ x` over tokens, with operands that were cast along tokens.

    `out[n, k] += sum_s dy[n, s] * dy_scale[n, s // 128] * x[k, s] * x_scale[k, s // 128]`, for s tokens: `scaled_gemm`
    with 1x128 scales for both operands, named for its use. s, n and k are free; without tokens nothing is added.
    `transposed_cast_to_fp8` makes the operands from dy [s, n] and x [s, k].

    Args:
        dy: [n, s] float8_e4m3fn or float8_e5m2, unit stride along tokens, row stride a multiple of 16 bytes, 16-byte
            aligned.
        dy_scale: [n, ceil(s / 128)] float32, bfloat16, float16 or float8_e8m0fnu, any strides within 4 GB.
        x: [k, s] in either dtype, laid out like `dy`.
        x_scale: [k, ceil(s / 128)], likewise.
        out: [n, k] float32, bfloat16 or float16; unit stride along k, otherwise as for `gemm`.
        accumulate: add to `out`, as `gemm` does, instead of overwriting it.
        config, num_sms, batch_invariant, pdl: as for `fp8_gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    options = (None, config, num_sms, batch_invariant, pdl, False, None, accumulate, True)
    return FP8_WGRAD.run((dy, dy_scale, x, x_scale, out), options)


def _multiply_wide(a: torch.Tensor, b: torch.Tensor, out, options: Options, bias) -> torch.Tensor:
    refused = {"bias": bias, "activation": options.activation, "config": options.config}
    for name, given in {**refused, "constant_weights": None if options.constant_weights is False else True}.items():
        if given is not None:
            raise ValueError(f"{name} is given, and b is torch.float32: leave it out, or pass b.to(torch.bfloat16)")
    return thin.thin_gemm(
        *(a, b, out),
        out_dtype=a.dtype if options.out_dtype is None and out is None else options.out_dtype,
        accumulate=options.accumulate,
        batch_invariant=options.batch_invariant,
        num_sms=options.num_sms,
        pdl=options.pdl,
    )


def check_sum(call: str, operands: Given, out: torch.Tensor, **options) -> None:
    """Raise what `call`, a function in this module, would raise with accumulate=True."""
    product = OPERATIONS[call]
    given = (*operands, out, None)[: len(product.names)]
    product.checked(given, Options(accumulate=True, **options))


# Gradients of `gemm`.


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, options):
        _keep(ctx, ctx.needs_input_grad, a, b, bias, options)
        return GEMM.run((a, b, None, bias), options)

    @staticmethod
    def backward(ctx, grad):
        by_op = is_traced() or not tensors.is_plain(grad)
        return *_gradients(torch.ops.deep_tile.gemm_gradient if by_op else _multiply_gradient, ctx, grad), None


def _keep(ctx, needed, a, b, bias, options: Options) -> None:
    """Inputs that the `needed` gradients use."""
    ctx.needed = needed
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None)
    ctx.dtypes = (a.dtype, None if bias is None else bias.dtype)
    ctx.options = options


def _gradients(multiply, ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients for a, b and bias: grad @ b, grad^T @ a, and the sum over grad's rows. `multiply` is
    `_multiply_gradient` or its op, since backward may be traced."""
    a, b = ctx.saved_tensors
    dtype, bias_dtype = ctx.dtypes
    options = {name: getattr(ctx.options, name) for name in ("num_sms", "batch_invariant", "pdl")}
    narrow = grad.to(dtype)
    of_a = multiply(narrow, b, False, **options) if ctx.needed[0] else None
    of_b = multiply(narrow, a, True, **options) if ctx.needed[1] else None
    of_bias = grad.sum(0, dtype=torch.float32).to(bias_dtype) if len(ctx.needed) > 2 and ctx.needed[2] else None
    return of_a, of_b, of_bias


def _multiply_gradient(grad: torch.Tensor, x: torch.Tensor, transposed: bool, **options) -> torch.Tensor:
    """grad @ x, or grad^T @ x, for matrices with one dtype; copies grad if no kernel can read it."""
    if checks.strides_problem("", grad) is not None or not tensors.is_aligned(grad):
        grad = tensors.with_aligned_rows(grad)
    return GEMM.run((grad.t() if transposed else grad, x.t(), None, None), Options(**options))


def _majors(a: torch.Tensor, b: torch.Tensor) -> Majors:
    return Majors(*(along if checks.lies_along_rows(x) else "k" for x, along in ((a, "m"), (b, "n"))))


def _is_of_blocks(x: torch.Tensor, scale: torch.Tensor, rows: int = 1) -> bool:
    if x.dim() != 2 or scale.dim() != 2:
        return False
    return scale.shape[1] == ceil_div(x.shape[1], SCALE_BLOCK) and scale.shape[0] == ceil_div(x.shape[0], rows)


def _step(scale: torch.Tensor) -> int:
    """Stride between row scales; 0 for a single scale."""
    return sum(stride for size, stride in zip(scale.shape, scale.stride(), strict=True) if size > 1)


# The ops that tracers see.


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    a, b, bias = inputs
    options = Options(**keyword_only_inputs)
    for name, needed in zip(("a", "b", "bias"), ctx.needs_input_grad, strict=False):
        if needed:
            GEMM.refuse_gradient(name, (a, b, None, bias), options)
    _keep(ctx, ctx.needs_input_grad, a, b, bias, options)


def _backward(ctx, grad):
    return _gradients(torch.ops.deep_tile.gemm_gradient, ctx, grad)


def _run_gradient(grad, x, transposed, **options) -> torch.Tensor:
    if torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad):
        raise RuntimeError("torch.ops.deep_tile.gemm has no second gradient. Call deep_tile.gemm, or drop create_graph")
    return _multiply_gradient(grad, x, transposed, **options)


_SCALED = "a a_scale b b_scale out! bias?"
_LINEAR = "call torch.nn.functional.linear"
_OF_PRODUCTS = "activation out_dtype num_sms batch_invariant pdl constant_weights"
_OTHERS = dict.fromkeys(tensors.QUANTIZED_DTYPES, "scaled_gemm")
_ONE_DTYPE = "make both of one dtype"

FP8_GEMM = Dense(
    *("fp8_gemm", _SCALED, _OF_PRODUCTS, FP8_KINDS),
    out_dtype=torch.bfloat16,
    remedies=("quantise with deep_tile.per_token_cast_to_fp8", "quantise with deep_tile.per_block_cast_to_fp8"),
    takers=_OTHERS,
    sources=checks.SOURCES,
    to_train="call deep_tile.fp8_linear",
)
GEMM = Differentiable(
    *("gemm", "a b out! bias?", f"{_OF_PRODUCTS} accumulate", kinds_of("bf16", "fp16", "int8_unscaled")),
    out_dtype=None,
    remedies=("a.to(torch.bfloat16)", _ONE_DTYPE),
    takers=_OTHERS,
    backward=_backward,
    setup_context=_setup_context,
)
INT8_GEMM = Dense(
    *("int8_gemm", _SCALED, f"{_OF_PRODUCTS} accumulate", kinds_of("int8")),
    out_dtype=torch.bfloat16,
    remedies=("quantise to torch.int8, with a scale for each 1x128 and 128x128", _ONE_DTYPE),
    takers=_OTHERS,
    to_train=_LINEAR,
)
SCALED_GEMM = Dense(
    *("scaled_gemm", _SCALED, f"{_OF_PRODUCTS} accumulate fast_accum"),
    kinds_of("fp8_rows", "fp8_rows_promoted", "fp8_1x128", "fp8", "int8_rows", "int8"),
    out_dtype=torch.bfloat16,
    remedies=("quantise to torch.float8_e4m3fn or torch.int8, with a scale for each row, or one", _ONE_DTYPE),
    to_train=_LINEAR,
)
PACKED_GEMM = PackedDense(
    *("packed_gemm", _SCALED, f"{_OF_PRODUCTS} accumulate", PACKED_KINDS),
    out_dtype=torch.bfloat16,
    remedies=("cast a with deep_tile.per_token_cast_to_fp8, and make b with deep_tile.pack_weight", _ONE_DTYPE),
    to_train=_LINEAR,
)
FP8_WGRAD = Dense(
    *("fp8_wgrad", "dy dy_scale x x_scale out!", "accumulate num_sms batch_invariant pdl", kinds_of("fp8_1x128")),
    out_dtype=torch.float32,
    remedies=("quantise with deep_tile.transposed_cast_to_fp8", _ONE_DTYPE),
    sources={"out": "pass what the gradient is added to, of [n, k]"},
    to_train=_LINEAR,
    defaults={"accumulate": True},
    allocates=False,
)

ops.register(
    "gemm_gradient(Tensor grad, Tensor x, bool transposed, *, "
    f"{ops.keywords('num_sms batch_invariant pdl')}) -> Tensor",
    _run_gradient,
    lambda grad, x, transposed, **_: grad.new_empty(grad.shape[1 if transposed else 0], x.shape[1]),
    flops=lambda grad, x, *_, **__: 2 * prod(grad) * x[1],
)
