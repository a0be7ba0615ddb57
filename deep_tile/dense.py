"""Products of other kinds than `fp8_gemm`'s: BF16 and FP16.

Called by users. The warm path is api.py's: one call into C; and so are the checks that every product shares. Invariant:
a kind is a row of `kinds.KINDS`, and what its call takes is one of `_CALLS` here.
"""

import sys
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from deep_tile import _launcher, api, launches, ops, plan, settings, tensors
from deep_tile.config import GemmConfig, round_up
from deep_tile.kinds import KINDS, OUTPUTS
from deep_tile.problem import GemmProblem
from deep_tile.reference import gemm_reference

_launches: launches.Table = {}
"""By the `_Options` of a call, or the plain tuple equal to it."""

_KINDS_WITHOUT_SCALES = {api.torch_dtype(kind.a): kind for kind in KINDS.values() if kind.scaling == "none"}
"""By the dtype of their operands."""

_OUTPUTS = {api.torch_dtype(element): name for name, element in OUTPUTS.items()}

TENSORS = ("a", "b", "out")
"""Of a launch, in order."""


class _Options(NamedTuple):
    """The keywords of a call; described at `gemm`."""

    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    constant_weights: bool = False,
) -> torch.Tensor:
    """BF16 or FP16 matrix product: `out[m, n] = sum_k a[m, k] * b[n, k]`, that is `a @ b.T`.

    Accumulated in FP32 over all of k and rounded once; FP16 results beyond 65504 are infinite. Runs on the tensors'
    device and torch's current stream; CPU tensors go through the operation's definition in `deep_tile.reference`. Sizes
    m, n and k are free; m = 0 or n = 0 does nothing, k = 0 writes zeros. Not differentiable: refused where torch
    records gradients and one of the tensors requires one. Compiled as one op, `torch.ops.deep_tile.gemm`, by
    torch.compile and torch.export.

    Args:
        a: [m, k] bfloat16 or float16, unit stride along k, row stride a multiple of 16 bytes (8 elements), 16-byte
            aligned. A column slice of a wider matrix will do.
        b: [n, k] of the same dtype, laid out like `a`: one row per output column, as `torch.nn.Linear` keeps weights.
        out: [m, n] bfloat16, float16 or float32, unit stride along n; allocated when None. Any alignment and row stride
            will do, but rows that begin and end at multiples of 16 bytes are stored faster. Must not overlap the
            inputs.
        out_dtype: dtype of `out`: by default that of `out`, or of `a`.
        config: the kernel to use instead of the selector's choice.
        num_sms, batch_invariant, pdl, constant_weights: as for `fp8_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    options = (out_dtype, config, num_sms, batch_invariant, pdl, constant_weights)
    if is_compiling():
        return _call_op(a, b, out, _Options(*options))
    return _multiply(a, b, out, options)


def _multiply(a, b, out, options: tuple) -> torch.Tensor:
    """`gemm` outside of tracing; `options` are equal to an `_Options`."""
    try:
        if torch.is_grad_enabled():
            _refuse_gradients(a, b, out)
        if out is None:
            out = _empty_out(a, b, options[0])
        if not _launcher.launch_known(_launches, options, a, b, out):
            _call_unknown(a, b, out, _Options(*options))
    except Exception:
        check = _check_arguments if out is None else _checked_options
        reason = api.error_of(check, _Options(*options), a, b, out)
        if reason is None:
            raise
        raise reason from None
    return out


def _empty_out(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    return api.empty_out(a, b, a.dtype if out_dtype is None else out_dtype)


def _refuse_gradients(*given: torch.Tensor | None) -> None:
    """Raise where torch would record a product of these tensors, `TENSORS`, which has no gradient to give back."""
    if not torch.is_grad_enabled():
        return
    for name, x in zip(TENSORS, given, strict=True):
        if x is not None and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and gemm has none. To train, call torch.nn.functional.linear; otherwise "
                f"call within torch.no_grad(), or pass {name}.detach(), or freeze it with {name}.requires_grad_(False)"
            )


def _call_unknown(a, b, out, options: _Options) -> None:
    """Multiply where C has met no such options and signature, or cannot read the tensors."""
    _check_arguments(options, a, b, out)
    signature = launches.signature(a, b, out)
    launch = launches.find(_launches, options, signature)
    if launch is None:
        checked = _checked_options(options, a, b, out)
        if not a.is_cuda or min(*a.shape, *b.shape) == 0:
            _compute_without_kernel(a, b, out)
            return
        launch = _prepare_launch(a, b, out, checked)
        launches.remember(_launches, options, signature, launch)
    launches.launch(launch, a, b, out)


@torch.inference_mode()  # in which any tensor may be written to, whether it requires a gradient or not
def _compute_without_kernel(a, b, out) -> None:
    if out.numel():
        out.copy_(gemm_reference(a, b, out.dtype))


def _prepare_launch(a, b, out, options: _Options) -> _launcher.Launch:
    """For a call that has been checked and needs a kernel."""
    device = a.get_device()
    api.check_hopper(device)
    problem = _problem(a, b, out, options)
    config = plan.config_for(problem) if options.config is None else api.checked_config(options.config, problem)
    api.check_capture(config, device, "gemm")
    if settings.print_config():
        print(f"deep_tile: m={problem.m} n={problem.n} k={problem.k}: {config.name}", file=sys.stderr)
    return plan.prepare_launch(
        problem,
        config,
        _layout(a, b, out),
        device,
        pdl=options.pdl,
        constant_weights=options.constant_weights,
        names=TENSORS,
    )


def _problem(a, b, out, options: _Options) -> GemmProblem:
    return GemmProblem(
        *(a.shape[0], b.shape[0], a.shape[1]),
        num_sms=options.num_sms,
        tma_store=api.tma_can_store(out),
        split_k=not options.batch_invariant,
        kind=_KINDS_WITHOUT_SCALES[a.dtype].name,
        output=_OUTPUTS[out.dtype],
    )


def _layout(a, b, out) -> plan.Layout:
    """Strides of the call. Of a single row torch may report any stride, which TMA would refuse: it gets a legal one."""

    def row_stride(x: torch.Tensor) -> int:
        return x.stride(0) if x.shape[0] > 1 else round_up(x.shape[1], tensors.ALIGNMENT_BYTES // x.element_size())

    return plan.Layout(row_stride(a), row_stride(b), row_stride(out), (0, 0), (0, 0), False)


# Checks.


def _check_arguments(options: _Options, a, b, out) -> None:
    """Check of each argument by itself what it is; `out` may be None."""
    given = {} if out is None else {"out": out}
    api.check_tensors(a=a, b=b, **given)
    _refuse_gradients(a, b, out)
    _check_option_types(options)


def _check_option_types(options: _Options) -> None:
    if options.out_dtype is not None and options.out_dtype not in _OUTPUTS:
        raise TypeError(
            f"out_dtype is {options.out_dtype!r}; pass one of {_names(_OUTPUTS)}, or nothing for that of the operands"
        )
    api.check_config_type(options.config)
    for name in ("num_sms", "batch_invariant", "pdl", "constant_weights"):
        api.check_option(name, getattr(options, name))


def _names(dtypes) -> str:
    return ", ".join(map(str, dtypes))


def _checked_options(options: _Options, a, b, out) -> _Options:
    """Check everything that can be wrong about a call; the options, with num_sms and pdl filled in."""
    _check_arguments(options, a, b, out)
    _check_formats(options, a, b, out)
    api.check_sizes(a, b)
    api.check_operand_strides(a=a, b=b)
    api.check_out_strides(out)
    return api.with_defaults(options, a.device)


def _check_formats(options: _Options, a, b, out) -> None:
    """Check dtypes, devices and shapes; `out` may be None."""
    if a.dtype not in _KINDS_WITHOUT_SCALES:
        fp8 = (
            ": call deep_tile.fp8_gemm, with scales" if a.dtype == torch.float8_e4m3fn else f": a.to({torch.bfloat16})"
        )
        raise TypeError(f"a must be one of {_names(_KINDS_WITHOUT_SCALES)}; got {a.dtype}. To fix{fp8}")
    if b.dtype != a.dtype:
        raise TypeError(f"b must be {a.dtype}, as a is; got {b.dtype}. To fix: b.to({a.dtype})")
    if out is not None:
        if out.dtype not in _OUTPUTS:
            raise TypeError(f"out must be one of {_names(_OUTPUTS)}; got {out.dtype}. Pass such an out, or out=None")
        if options.out_dtype not in (None, out.dtype):
            raise TypeError(f"out_dtype is {options.out_dtype} and out is {out.dtype}; leave out_dtype out")
    if a.device.type not in ("cuda", "cpu"):
        raise ValueError(f"a is on {a.device}; gemm runs on a Hopper GPU, or on the CPU as a reference")
    api.check_devices(a, b=b, out=out)
    api.check_product_shapes(a, b, out)


# The op, which tracers see. It takes no config, which no schema can name.


def _call_op(a, b, out, options: _Options) -> torch.Tensor:
    """`gemm` under tracing."""
    if options.config is not None:
        raise ValueError("config cannot be given under torch.compile or torch.export: leave it out")
    keywords = {name: value for name, value in options._asdict().items() if name != "config"}
    if out is None:
        return torch.ops.deep_tile.gemm(a, b, **keywords)
    torch.ops.deep_tile.gemm.out(a, b, out, **keywords)
    return out


def _run_op(a, b, **keywords) -> torch.Tensor:
    return _multiply(a, b, None, _Options(**keywords))


def _run_out_op(a, b, out, **keywords) -> None:
    _multiply(a, b, out, _Options(**keywords))


def _fake_op(a, b, out_dtype=None, **keywords) -> torch.Tensor:
    _fake_out_op(a, b, None, out_dtype=out_dtype, **keywords)
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype or a.dtype)


def _fake_out_op(a, b, out, **keywords) -> None:
    """Check what can be checked without memory; strides are left to the run."""
    options = _Options(**keywords)
    _check_option_types(options)
    _refuse_gradients(a, b, out)
    _check_formats(options, a, b, out)


_KEYWORDS = (
    "ScalarType? out_dtype=None, int? num_sms=None, bool batch_invariant=False, bool? pdl=None, "
    "bool constant_weights=False"
)
ops.register(f"gemm(Tensor a, Tensor b, *, {_KEYWORDS}) -> Tensor", _run_op, _fake_op)
ops.register(f"gemm.out(Tensor a, Tensor b, Tensor(a!) out, *, {_KEYWORDS}) -> ()", _run_out_op, _fake_out_op)
