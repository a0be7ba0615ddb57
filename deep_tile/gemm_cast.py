"""A product and the cast of its result to FP8, as the next product takes it: by one kernel, or two if these are faster.

Called by users. In one launch the sums of a tile are finished, scaled by their own largest magnitudes and rounded while
they are in registers: no other result is written. That takes tiles that hold all 128 columns of a scale, which
small m cannot fill; the selector knows when a product in BF16 and a cast of it take less time.
Invariant: the result is that of `fp8_gemm` and `per_token_cast_to_fp8`, bit for bit where both are batch invariant.
"""

from typing import NamedTuple

import torch

from deep_tile import _launcher, api, finishes, launches, ops, params, plan, quantize, tensors
from deep_tile.config import GemmConfig
from deep_tile.kinds import QUANTIZED
from deep_tile.ops import is_traced
from deep_tile.problem import GemmProblem

_launches: launches.Table = {}
"""By the `_Options` of a call, or the plain tuple equal to it; of calls that take one launch."""

_in_turn: launches.Table = {}
"""The same of calls that are known to take two, which are no launches of this module's."""


class _Options(NamedTuple):
    """The keywords of a call but for the scale's layout; described at `fp8_gemm_cast`."""

    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False
    activation: str | None = None
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"

    @property
    def product(self) -> api.Options:
        """Those of the product by itself."""
        return api.Options(None, *self[:6])

    @property
    def cast(self) -> quantize.Options:
        """Those of the cast by itself."""
        return quantize.Options(quantize.TOKEN_BLOCK[0], *self[6:])


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
    """FP8 matrix product whose result is FP8 with a scale per row and 128 columns: what the next product takes as `a`.

    What `per_token_cast_to_fp8` makes of `fp8_gemm(a, a_scale, b, b_scale, bias=bias, activation=activation)`, which is
    BF16: bit for bit with `batch_invariant`, without which the product may add up in another order. With
    `activation="swiglu"` it is all that lies between the two products of a gated layer. By one kernel where that is
    predicted to be faster, which is at large m; else by two.
    Not differentiable. Compiled as one op, `torch.ops.deep_tile.fp8_gemm_cast`, by torch.compile and torch.export.

    Args:
        a, a_scale, b, b_scale, bias, activation: as for `fp8_gemm`.
        out: [m, n] float8_e4m3fn, or [m, n / 2] with "swiglu", with a unit stride along n; allocated when None, with
            rows at multiples of 16 bytes. Must not overlap the inputs. Rows that begin and end at such multiples can be
            written by one kernel.
        scale_out: [m, ceil(n / 128)] float32, or [m, ceil(n / 256)], any strides, to write to; allocated when None.
        scale_layout, amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`.
        config: the one kernel to use, with `output="e4m3"`; when None the selector's choice, or two kernels.
        num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.

    Returns:
        `out` and `scale_out`. In a row that holds NaN or infinity within 128 columns, these and their scale are NaN.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm` and `per_token_cast_to_fp8`. Nothing has been launched, and
            `out` and `scale_out` are untouched.

    The method (scales of 1x128 where the result is made) is that of the DeepSeek-V3 report, 3.3, which asks for such
    fusion.
    """
    options = (config, num_sms, batch_invariant, pdl, constant_weights, activation, amax_floor, round_scale, exact)
    if is_traced():
        ops.refuse_config(config)
        quantize.check_layout(scale_layout)
        keywords = dict(zip(_Options._fields[1:], options[1:], strict=True)) | {"scale_layout": scale_layout}
        return _OP((a, a_scale, b, b_scale, bias), (out, scale_out), keywords)
    return _multiply(a, a_scale, b, b_scale, out, scale_out, scale_layout, options, bias)


def _multiply(a, a_scale, b, b_scale, out, scale_out, scale_layout, options: tuple, bias):
    """`fp8_gemm_cast` outside of tracing; `options` are equal to `_Options`."""
    operands = (a, a_scale, b, b_scale)
    try:
        quantize.check_layout(scale_layout)
        if torch.is_grad_enabled():
            _refuse_gradients(*operands, out, scale_out, bias)
        shape = (a.shape[0], finishes.out_columns(b.shape[0], options[5]))
        q = quantize.empty_out(a, shape) if out is None else out
        scale = quantize.empty_scale(a, shape, scale_layout) if scale_out is None else scale_out
        given = (*operands, q, scale) if bias is None else (*operands, q, scale, bias)
        if not _launcher.launch_known(_launches, options, *given):
            _call_unknown(given, _Options(*options), bias)
    except launches.NotLoaded as error:
        raise error.of("fp8_gemm_cast") from None
    except Exception:
        reason = api.error_of(_check, operands, out, scale_out, scale_layout, _Options(*options), bias)
        if reason is None:
            raise
        raise reason from None
    return q, scale


def _refuse_gradients(a, a_scale, b, b_scale, out, scale_out, bias) -> None:
    """Raise where torch would record a product of these tensors, which has no gradient."""
    given = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out": out, "scale_out": scale_out, "bias": bias}
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and fp8_gemm_cast has none. To train, call deep_tile.fp8_linear; "
                f"otherwise call within torch.no_grad(), or pass {name}.detach()"
            )


def _call_unknown(given: tuple, options: _Options, bias) -> None:
    """Multiply where C has met no such options and signature, or cannot read the tensors, or in two launches."""
    signature = launches.signature(*given)
    # Whether types are right, and not only equal to right ones, the product says before it launches; the cast, after.
    if type(options.amax_floor) is not bool and launches.find(_in_turn, options, signature) is not None:
        _multiply_in_turn(given, options, bias)
        return
    operands, out, scale = given[:4], given[4], given[5]
    checked = _check(operands, out, scale, None, options, bias)
    given = (*tensors.with_float32_scales(operands), *given[4:])
    signature = launches.signature(*given)
    launch = launches.find(_launches, options, signature)
    if launch is None:
        launch = _prepare(given, checked, options, bias)
        remembered = _in_turn if launch is None else _launches
        launches.remember(remembered, options, signature, () if launch is None else launch)
    if launch is None:
        _multiply_in_turn(given, options, bias)
    else:
        launches.launch(launch, *given)


def _multiply_in_turn(given: tuple, options: _Options, bias) -> None:
    """By the calls of the product and of the cast."""
    with torch.no_grad():
        keywords = dict(zip(_PRODUCT_KEYWORDS, options[1:6], strict=True))
        bias = None if bias is None else bias.detach()
        product = api.fp8_gemm(*given[:4], bias=bias, **keywords)
        keywords = dict(zip(_CAST_KEYWORDS, options[6:], strict=True))
        quantize.per_token_cast_to_fp8(product, **keywords, out=given[4], scale_out=given[5])


_PRODUCT_KEYWORDS = ("num_sms", "batch_invariant", "pdl", "constant_weights", "activation")
_CAST_KEYWORDS = ("amax_floor", "round_scale", "exact")


def _prepare(given: tuple, checked: api.Options, options: _Options, bias) -> _launcher.Launch | None:
    """The one launch of a call that has been checked; None where two are faster, or none is needed."""
    a, a_scale, b, b_scale, out, scale = given[:6]
    if not a.is_cuda or min(*a.shape, *b.shape) == 0:
        return None
    device = a.get_device()
    problem = GemmProblem(
        *(a.shape[0], b.shape[0], a.shape[1], checked.num_sms, api.tma_can_store(out)),
        split_k=not options.batch_invariant,
        output=QUANTIZED,
        **finishes.for_problem(bias, options.activation),
    )
    layout = api.layout_of(a, a_scale, b, b_scale, out)
    problem = problem.with_strides(layout.a_stride, layout.b_stride)
    config = api.kernel_for(problem, options.config, device, "fp8_gemm_cast", choose=plan.cast_config_for)
    if config is None:
        return None
    of_scale = plan.ResultScale(
        *scale.stride(), options.round_scale == "pow2", options.cast.floor, int(options.exact == "divide")
    )
    of_bias = () if bias is None else ("bias",)
    return plan.prepare_launch(
        problem,
        config,
        layout._replace(out_scale=of_scale, bias_stride=0 if bias is None else bias.stride(0)),
        device,
        pdl=checked.pdl,
        constant_weights=options.constant_weights,
        names=(*plan.TENSORS, "scale_out", *of_bias),
        places=params.places((*plan.TENSORS, "out_scale", *of_bias)),
    )


def _check(operands, out, scale_out, scale_layout: str | None, options: _Options, bias) -> api.Options:
    """Check everything that can be wrong about a call, of which `out` and `scale_out` may be None; the product's
    options, with num_sms and pdl filled in."""
    if scale_layout is not None:
        quantize.check_layout(scale_layout)
    if torch.is_grad_enabled():
        _refuse_gradients(*operands, out, scale_out, bias)
    checked = api.checked_options(options.product, *operands, None, bias)
    quantize.check_options(options.cast)
    a, b = operands[::2]
    shape = (a.shape[0], finishes.out_columns(b.shape[0], options.activation))
    if out is not None:
        quantize.check_target("out", out, quantize.FP8_DTYPE, shape, a.device)
        quantize.check_rows(out, out)
    if scale_out is not None:
        of_scale = quantize.scale_shape(shape, quantize.TOKEN_BLOCK)
        quantize.check_target("scale_out", scale_out, torch.float32, of_scale, a.device)
    return checked


# The op, which tracers see.


def _run_op(inputs: tuple, outs: tuple, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    *operands, bias = inputs
    scale_layout = quantize.layout_of_op(outs, options)
    return _multiply(*operands, *outs, scale_layout, _Options(**options), bias)


def _check_op(inputs: tuple, outs: tuple, options: dict) -> None:
    quantize.check_layout(quantize.layout_of_op(outs, options))
    (*operands, bias), options = inputs, _Options(**options)
    api.check_formats(options.product, *operands, None, bias)
    quantize.check_options(options.cast)
    if outs[0] is not None:
        shape = _result_shape(inputs, options.activation)
        quantize.check_fake_targets(inputs[0], *outs, shape, quantize.scale_shape(shape, quantize.TOKEN_BLOCK))


def _allocate_op(inputs: tuple, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _result_shape(inputs, options.get("activation"))
    layout = options.get("scale_layout", quantize.DEFAULT_SCALE_LAYOUT)
    return quantize.fake_out(inputs[0], shape), quantize.fake_scale(inputs[0], shape, layout)


def _result_shape(inputs: tuple, activation: str | None) -> tuple[int, int]:
    return inputs[0].shape[0], finishes.out_columns(inputs[2].shape[0], activation)


_OP = ops.Op(
    "fp8_gemm_cast",
    "a a_scale b b_scale out! scale_out! bias?",
    "activation num_sms batch_invariant pdl constant_weights amax_floor round_scale exact",
    *(_run_op, _check_op, _allocate_op),
    own="scale_layout",
    flops=ops.product_flops(second=2),
)
