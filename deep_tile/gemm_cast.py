"""GEMM with an FP8 result for the next GEMM: one fused kernel, or two if they are faster.

The fused kernel applies the epilogue, scales by the tile's own maxima and rounds in registers: no other result is
written. Its tiles must hold all 128 columns of a scale, too wide for small m; the selector predicts when a BF16 GEMM
plus a cast is faster. Invariant: the result equals `fp8_gemm` then `per_token_cast_to_fp8`, bit for bit if both are
batch invariant.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from deep_tile import cast, checks, dense, finishes, launches, params, plan, quantize, tensors
from deep_tile.codegen import StreamingKernel
from deep_tile.config import GemmConfig
from deep_tile.kinds import Kind
from deep_tile.operation import Given
from deep_tile.problem import GemmProblem


class Options(NamedTuple):
    """A call's keywords, described at `fp8_gemm_cast`."""

    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False
    activation: str | None = None
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT

    @property
    def product(self) -> dense.Options:
        return dense.Options(None, *self[:6])

    @property
    def cast(self) -> quantize.Options:
        return quantize.Options(quantize.TOKEN_BLOCK[0], *self[6:9])


def fp8_gemm_cast(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 GEMM with an FP8 result and 1x128 scales, as the next GEMM takes for `a`.

    Equals `per_token_cast_to_fp8(fp8_gemm(a, a_scale, b, b_scale, bias=bias, activation=activation))` with its BF16
    intermediate, bit for bit with `batch_invariant`; without it the GEMM may sum in another order. With
    `activation="swiglu"` it covers everything between a gated layer's two GEMMs. Launches one kernel if that is
    predicted to be faster (large m), otherwise two. Not differentiable. Compiled as one op,
    `torch.ops.deep_tile.fp8_gemm_cast`, by torch.compile and torch.export.

    Args:
        a, a_scale, b, b_scale, bias, activation: as for `fp8_gemm`.
        out: [m, n] float8_e4m3fn, or [m, n / 2] with "swiglu", with a unit stride along n; allocated when None, with
            rows at multiples of 16 bytes. Must not overlap the inputs. One kernel can do both steps only if rows start
            and end at multiples of 16 bytes.
        scale_out: [m, ceil(n / 128)] float32, or [m, ceil(n / 256)], any strides, to write to; allocated when None.
        scale_layout, amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`.
        config: the fused kernel to use, with `output="e4m3"`; None: the selector decides.
        num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.

    Returns:
        `out` and `scale_out`. Where 128 columns of a row hold NaN or infinity, these columns and their scale are NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm` and `per_token_cast_to_fp8`. Nothing has been launched, and
            `out` and `scale_out` are untouched.

    The method (1x128 scales in the epilogue) is from the DeepSeek-V3 report, 3.3, which asks for such fusion.
    """
    options = (config, num_sms, batch_invariant, pdl, constant_weights, activation, amax_floor, round_scale, exact)
    return FP8_GEMM_CAST.run((a, a_scale, b, b_scale, out, scale_out, bias), (*options, scale_layout))


class ProductCast(dense.Dense):
    Options = Options

    def __init__(self, *described, **others) -> None:
        super().__init__(*described, **others)
        self.in_turn: launches.Table = {}  # calls known to take two launches, which have no tables here

    def product(self, given: Given) -> Given:
        return *given[:4], None, given[6]

    def results(self, kind: Kind) -> tuple[torch.dtype, ...]:
        return (quantize.FP8_DTYPE,)

    def without_memory(self, asked: checks.Sizes) -> tuple[Given, Options]:
        (*operands, _, bias), options = super().without_memory(asked)
        return (*operands, None, None, bias), Options(activation=options.activation)

    def configs(self, of_all: GemmProblem, max_m: int, layouts: Iterable[str]) -> set[GemmConfig]:
        return {*plan.cast_configs_for(of_all, max_m)}

    def casts(self, kind: Kind) -> list[StreamingKernel]:
        return cast.all_kernels()

    def shape(self, given: Given, options: Options) -> tuple[int, int]:
        return given[0].shape[0], finishes.out_columns(given[2].shape[0], options.activation)

    def allocated(self, given: Given, options: tuple) -> Given:
        options = Options(*options)
        *operands, out, scale_out, bias = given
        shape = self.shape(given, options)
        out = quantize.empty_out(given[0], shape) if out is None else out
        scale = quantize.empty_scale(given[0], shape, options.scale_layout) if scale_out is None else scale_out
        return *operands, out, scale, bias

    def fake(self, given: Given, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape(given, options)
        a = quantize.Fake(given[0])
        return quantize.empty_out(a, shape), quantize.empty_scale(a, shape, options.scale_layout)

    def check(self, given: Given, options: Options) -> None:
        dense.FP8_GEMM.check(self.product(given), options.product)
        quantize.check_targets(given[0], given[4:6], self.shape(given, options))

    def check_memory(self, given: Given, options: Options) -> Options:
        checked = dense.FP8_GEMM.check_memory(self.product(given), options.product)
        quantize.check_target_memory(*given[4:6])
        return options._replace(num_sms=checked.num_sms, pdl=checked.pdl)

    def _run_unknown(self, given: Given, options: tuple) -> None:
        """Slow path; also makes the call as two launches if these are faster."""
        signature, named = launches.signature(*given), Options(*options)
        # The product checks exact types (True is not 1) before it launches; the cast checks them after that.
        if type(named.amax_floor) is bool or launches.find(self.in_turn, options, signature) is None:
            self.check_arguments(given, named)
            given = self.readable(given)
            signature = launches.signature(*given)
            launch = launches.find(self.launches, options, signature)
            if launch is None:
                launch = self.prepare(given, self.checked(given, named))
                table = self.in_turn if launch is None else self.launches
                launches.remember(table, options, signature, () if launch is None else launch)
            if launch is not None:
                launches.launch(launch, *given)
                return
        self.run_in_turn(given, named)

    def run_in_turn(self, given: Given, options: Options) -> None:
        """Two calls: GEMM, then cast."""
        with torch.no_grad():
            *operands, out, scale, bias = given
            bias = None if bias is None else bias.detach()
            asked = options.product._replace(config=None)
            product = dense.FP8_GEMM.run((*operands, None, bias), asked)
            numbers = {name: getattr(options, name) for name in ("amax_floor", "round_scale", "exact")}
            quantize.per_token_cast_to_fp8(product, **numbers, out=out, scale_out=scale)

    def problem(self, given: Given, options: Options) -> GemmProblem:
        return dense.FP8_GEMM.problem((*given[:5], given[6]), options.product)

    def prepare(self, given: Given, options: Options) -> launches.Prepared | None:
        """The fused launch for a checked call; None if two are faster or none is needed."""
        *_, scale, bias = given
        if not self.needs_kernel(given):
            return None
        device, product, problem = scale.get_device(), (*given[:5], bias), self.problem(given, options)
        layout = dense.FP8_GEMM.layout(product, problem.product)
        problem = problem.with_strides(layout.a_stride, layout.b_stride)
        config = checks.kernel_for(problem, options.config, device, self.name, choose=plan.cast_config_for)
        if config is None:
            return None
        of_scale = plan.ResultScale(
            *scale.stride(), options.round_scale == "pow2", options.cast.floor, int(options.exact == "divide")
        )
        of_bias = () if bias is None else ("bias",)
        return plan.prepare_launch(
            problem,
            config,
            layout._replace(out_scale=of_scale),
            device,
            pdl=options.pdl,
            constant_weights=options.constant_weights,
            names=(*plan.TENSORS, "scale_out", *of_bias),
            places=params.places((*plan.TENSORS, "out_scale", *of_bias)),
        )


FP8_GEMM_CAST = ProductCast(
    "fp8_gemm_cast",
    "a a_scale b b_scale out! scale_out! bias?",
    "activation num_sms batch_invariant pdl constant_weights amax_floor round_scale exact",
    dense.FP8_KINDS,
    out_dtype=None,
    remedies=dense.FP8_GEMM.remedies,
    sources=checks.SOURCES,
    to_train="call deep_tile.fp8_linear",
    own="scale_layout",
)
