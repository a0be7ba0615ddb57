"""Grouped products: each group of rows by a matrix of its own, as the experts of a model are.

Called by users and by what brings deep_tile into engines. One launch multiplies all groups: which rows belong to which
is read on the device, so that nothing waits for the host and a CUDA graph holds for every distribution. The warm path
is api.py's: one call into C.
Invariant: rows that belong to no group are not written, whatever the bounds say.
"""

import math
import sys
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from deep_tile import _launcher, api, launches, ops, plan, settings, tensors
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, check_alignment, round_up
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import fp8_grouped_gemm_reference

_MAX_TILES = 2**31 - 1

_is_on_gpu = attrgetter("is_cuda")

_launches: launches.Table = {}
"""By the `_Options` of a call, or the plain tuple equal to it."""


class _Options(NamedTuple):
    """The keywords of a call; described at `fp8_grouped_gemm`. `layout` is one of `kinds.GROUPINGS`."""

    layout: str
    alignment: int = 1
    expected_rows: int | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None


def fp8_grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    alignment: int = 1,
    expected_rows: int | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """`out[rows] = (a[rows] * a_scale[rows]) @ (b[g] * b_scale[g])^T` for the rows of each group g, in one launch.

    Rows of `a` of two dimensions lie group by group, as torch's grouped products have them: group g ends before row
    `offs[g]`, and begins where group g - 1 ends, rounded up to `alignment`. Of three dimensions, group g has
    `a[g, :counts[g]]`, or all of `a[g]` without counts. Bounds are read on the device; those that do not fit (negative,
    falling, beyond the rows that there are) are cut, and lead to no memory that is not the tensors'. Not
    differentiable.

    Every warp reads the bounds by itself: nothing may write them while the product runs, as nothing may write `a`.

    Args:
        a: [s, k] or [g, m, k] float8_e4m3fn, unit stride along k; row and group strides as for `fp8_gemm`, and the
            latter a multiple of the former.
        a_scale: [s, ceil(k / 128)] or [g, m, ceil(k / 128)] float32, any strides within 4 GB.
        b: [g, n, k] float8_e4m3fn, laid out like `a`.
        b_scale: [g, ceil(n / 128), ceil(k / 128)] float32, any strides within 4 GB.
        offs: [g] int32, contiguous, on the same device: the row behind each group's last. With `a` of two dimensions.
        out: [s, n] or [g, m, n] bfloat16, unit stride along n, group stride a multiple of the row stride; allocated
            when None, and then rows of no group hold anything. Must not overlap the inputs.
        counts: [g] int32, contiguous, on the same device: rows of each group. With `a` of three dimensions.
        alignment: of the rows that groups begin at, with `offs`: a power of two up to 1024.
        expected_rows: of a group that has rows, in the mean: what the kernel is chosen for. None: s / g, or m.
        config: the kernel to use instead of the selector's choice; its `grouping` is "offs" or "counts".
        num_sms, pdl: as for `fp8_gemm`.
        batch_invariant: as for `fp8_gemm`. Results of groups never depend on other rows, so it changes nothing.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.

    The method is that of `fp8_gemm`; offsets are those of `torch.nn.functional.scaled_grouped_mm`.
    """
    layout, bounds = _bounds(a, offs, counts)
    options = (layout, alignment, expected_rows, config, num_sms, batch_invariant, pdl)
    if is_compiling():
        return _call_op(a, a_scale, b, b_scale, bounds, out, _Options(*options))
    return _multiply(a, a_scale, b, b_scale, bounds, out, options)


def _bounds(a, offs, counts) -> tuple[str, torch.Tensor | None]:
    """The layout that `a` has, and the bounds that go with it."""
    if not isinstance(a, torch.Tensor):
        api.check_tensors(a=a)
    if a.dim() == 3:
        if offs is not None:
            raise ValueError("offs is given, and a has three dimensions; pass counts, or neither, or a of [s, k]")
        return "counts", counts
    if offs is None or counts is not None:
        raise ValueError(f"a is {list(a.shape)}; with rows [s, k] pass offs and no counts, or pass a of [g, m, k]")
    return "offs", offs


def _multiply(a, a_scale, b, b_scale, bounds, out, options: tuple) -> torch.Tensor:
    """Outside of tracing; `options` are equal to an `_Options`."""
    try:
        if torch.is_grad_enabled():
            _refuse_gradients(a=a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
        if out is None:
            out = _empty_out(a, b)
        given = (a, a_scale, b, b_scale, *(() if bounds is None else (bounds,)), out)
        if not _launcher.launch_known(_launches, options, *given):
            _call_unknown(a, a_scale, b, b_scale, bounds, out, _Options(*options))
    except Exception:
        check = check_tensors if out is None else _checked_options
        reason = api.error_of(check, _Options(*options), a, a_scale, b, b_scale, bounds, out)
        if reason is None:
            raise
        raise reason from None
    return out


def _empty_out(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[1], dtype=torch.bfloat16)


def _refuse_gradients(**given: torch.Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in given.items():
        if x is not None and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and fp8_grouped_gemm has none: call within torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def _call_unknown(a, a_scale, b, b_scale, bounds, out, options: _Options) -> None:
    """Multiply where C has met no such options and signature, or cannot read the tensors."""
    check_tensors(options, a, a_scale, b, b_scale, bounds, out)
    a_scale, b_scale = (tensors.as_float32(scale) for scale in (a_scale, b_scale))
    given = (a, a_scale, b, b_scale, *(() if bounds is None else (bounds,)), out)
    signature = launches.signature(*given)
    launch = launches.find(_launches, options, signature)
    if launch is None:
        checked = _checked_options(options, a, a_scale, b, b_scale, bounds, out)
        if out.numel() == 0:
            return
        if not _is_on_gpu(a):
            with torch.inference_mode():
                fp8_grouped_gemm_reference(a, a_scale, b, b_scale, out, bounds, options.alignment)
            return
        launch = _prepare_launch(a, a_scale, b, b_scale, bounds, out, checked)
        launches.remember(_launches, options, signature, launch)
    launches.launch(launch, *given)


def _prepare_launch(a, a_scale, b, b_scale, bounds, out, options: _Options) -> _launcher.Launch:
    device = a.get_device()
    api.check_hopper(device)
    (rows, k), (groups, n, _) = a.shape[-2:], b.shape
    expected = options.expected_rows
    if expected is None:
        expected = ceil_div(rows, groups) if options.layout == "offs" else rows
    problem = GemmProblem(
        rows, n, k, options.num_sms, tma_can_store(out), groups=Groups(options.layout, groups, expected)
    )
    config = plan.config_for(problem) if options.config is None else checked_config(options, problem)
    api.check_capture(config, device)
    if settings.print_config():
        print(f"deep_tile: {problem.groups} rows={rows} n={n} k={k}: {config.name}", file=sys.stderr)
    names = plan.GROUPED_TENSORS if bounds is not None else plan.TENSORS
    layout = _layout(a, a_scale, b, b_scale, out, options.alignment)
    return plan.prepare_launch(problem, config, layout, device, pdl=options.pdl, constant_weights=False, names=names)


def _layout(a, a_scale, b, b_scale, out, alignment: int) -> plan.Layout:
    """Strides of the call. Of a single row torch may report any stride, which TMA would refuse: it gets a legal one."""
    k, n = a.shape[-1], b.shape[1]
    (a_stride, a_rows), (b_stride, b_rows), (out_stride, out_rows) = (
        row_strides(a, round_up(k, tensors.ALIGNMENT_BYTES)),
        row_strides(b, round_up(k, tensors.ALIGNMENT_BYTES)),
        row_strides(out, round_up(n, tensors.ALIGNMENT_BYTES // 2)),
    )
    a_scale_group = a_scale.stride(0) if a.dim() == 3 else 0
    groups = plan.GroupLayout(alignment, a_rows, out_rows, b_rows, a_scale_group, b_scale.stride(0))
    scale_strides = a_scale.stride()[-2:], b_scale.stride()[-2:]
    return plan.Layout(a_stride, b_stride, out_stride, *scale_strides, tensors.is_aligned(a_scale), groups)


def row_strides(x: torch.Tensor, single: int) -> tuple[int, int]:
    """From a row to the next, in elements, and from a group to the next, in rows."""
    groups, rows = x.shape[0] if x.dim() == 3 else 1, x.shape[-2]
    if groups == 1:
        return (x.stride(-2) if rows > 1 else single), 0
    if rows == 1:  # each group is one row
        return x.stride(0), 1
    return x.stride(-2), x.stride(0) // x.stride(-2)


def tma_can_store(out: torch.Tensor) -> bool:
    """TMA, and the vectors that the rows at a group's end are stored by, take steps of 16 bytes."""
    strides = [stride for stride, size in zip(out.stride()[:-1], out.shape[:-1], strict=True) if size > 1]
    numbers = (out.data_ptr(), *(out.element_size() * number for number in (out.shape[-1], *strides)))
    return all(number % tensors.ALIGNMENT_BYTES == 0 for number in numbers)


def checked_config(options: _Options, problem: GemmProblem) -> GemmConfig:
    config = options.config
    if config.grouping != options.layout:
        raise ValueError(f"{config.name} has grouping={config.grouping!r}; here it must be {options.layout!r}")
    return api.checked_config(config, problem)


def check_tensors(options: _Options, a, a_scale, b, b_scale, bounds, out) -> None:
    """Check of each argument by itself what it is; `bounds` and `out` may be None."""
    optional = {"counts" if options.layout == "counts" else "offs": bounds, "out": out}
    present = {name: x for name, x in optional.items() if x is not None}
    api.check_tensors(a=a, a_scale=a_scale, b=b, b_scale=b_scale, **present)
    _refuse_gradients(a=a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)


def _checked_options(options: _Options, a, a_scale, b, b_scale, bounds, out) -> _Options:
    """Check everything that can be wrong about a call; the options, with num_sms and pdl filled in."""
    check_tensors(options, a, a_scale, b, b_scale, bounds, out)
    _check_option_values(options)
    _check_formats(options, a, a_scale, b, b_scale, bounds, out)
    _check_strides(a, a_scale, b, b_scale, bounds, out)
    groups, rows, n = b.shape[0], a.shape[-2], b.shape[1]
    if groups * (rows // 64 + 1) * ceil_div(n, 16) > _MAX_TILES:
        raise ValueError(
            f"{groups} groups of rows in {list(a.shape)} by {n} columns are too many tiles: split the product"
        )
    pdl = options.num_sms is None if options.pdl is None else options.pdl
    return options._replace(num_sms=api.checked_num_sms(options.num_sms, a.device), pdl=pdl)


def _check_option_values(options: _Options) -> None:
    for name in ("num_sms", "batch_invariant", "pdl"):
        api.check_option(name, getattr(options, name))
    api.check_config_type(options.config)
    alignment, expected = options.alignment, options.expected_rows
    check_alignment(alignment)
    if options.layout == "counts" and alignment != 1:
        raise ValueError(f"alignment is {alignment}; groups of [g, m, k] begin at their own rows: leave it out")
    if expected is not None and (type(expected) is not int or expected < 1):
        raise ValueError(f"expected_rows is {expected!r}; pass a positive int, or None")


def _check_formats(options: _Options, a, a_scale, b, b_scale, bounds, out) -> None:
    """Check dtypes, devices and shapes; `bounds` and `out` may be None."""
    api.check_dtypes(a, a_scale, b, b_scale, out)
    if a.device.type not in ("cuda", "cpu"):
        raise ValueError(f"a is on {a.device}; fp8_grouped_gemm runs on a Hopper GPU, or on the CPU as a reference")
    if a.dim() not in (2, 3) or b.dim() != 3 or not ops.holds(a.shape[-1] == b.shape[2]):
        raise ValueError(
            f"a must be [s, k] or [g, m, k] and b [g, n, k]; got {list(a.shape)} and {list(b.shape)}. b holds one row "
            "per output column"
        )
    (groups, n, k), rows = b.shape, a.shape[:-1]
    if not ops.holds(k > 0) or not ops.holds(groups > 0):
        raise ValueError(f"b is {list(b.shape)}; groups and k must be positive")
    k_blocks = ceil_div(k, SCALE_BLOCK)
    wanted = {
        "a_scale": (a_scale, (*rows, k_blocks)),
        "b_scale": (b_scale, (groups, ceil_div(n, SCALE_BLOCK), k_blocks)),
        "counts" if options.layout == "counts" else "offs": (bounds, (groups,)),
        "out": (out, (*rows, n)),
    } | ({"a": (a, (groups, *a.shape[1:]))} if a.dim() == 3 else {})
    for name, (x, shape) in wanted.items():
        if x is not None:
            _check_shape(name, x, shape, a, b)
    if b.device != a.device:
        raise ValueError(f"b is on {b.device} but a is on {a.device}; move it with .to(a.device)")
    if bounds is not None and bounds.dtype != torch.int32:
        name = "counts" if options.layout == "counts" else "offs"
        raise TypeError(f"{name} must be torch.int32; got {bounds.dtype}. Convert it with .int()")


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> None:
    fits = x.dim() == len(shape) and all(ops.holds(size == right) for size, right in zip(x.shape, shape, strict=True))
    if not fits:
        raise ValueError(
            f"{name} must be {list(shape)} for a of {list(a.shape)} and b of {list(b.shape)}; got {list(x.shape)}"
        )
    if x.device != a.device:
        raise ValueError(f"{name} is on {x.device} but a is on {a.device}; move it with .to(a.device)")


def _check_strides(a, a_scale, b, b_scale, bounds, out) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} must have a unit stride along k; its strides are {x.stride()}. Make it K-major: "
                f"{name}.contiguous()"
            )
        check_groups(name, x)
        rows = math.prod(x.shape[:-1])
        problem = api.stride_problem(name, rows, x.shape[-1], row_strides(x, tensors.ALIGNMENT_BYTES)[0])
        if problem:
            raise ValueError(problem)
        if rows and x.data_ptr() % tensors.ALIGNMENT_BYTES:
            raise ValueError(api.misaligned(name, x))
    for name, scale in (("a", a_scale), ("b", b_scale)):
        problem = api.scale_problem(name, tuple(scale.shape), scale.stride())
        if problem:
            raise ValueError(problem)
    if bounds is not None and bounds.shape[0] > 1 and bounds.stride(0) != 1:
        raise ValueError(f"offs or counts has the stride {bounds.stride(0)}; pass it with .contiguous()")
    check_out(out)


def check_groups(name: str, x: torch.Tensor) -> None:
    """Check that groups of three dimensions lie at whole rows of each other."""
    if x.dim() == 2 or x.shape[0] <= 1 or x.shape[1] <= 1:
        return
    group, row = x.stride()[:2]
    if row <= 0 or group % row or group // row * (x.shape[0] - 1) + x.shape[1] > api.MAX_SIZE:
        raise ValueError(
            f"{name}'s groups lie {group} elements apart, with rows of {row}; that must be a multiple, and all rows at "
            f"most {api.MAX_SIZE}. Pass {name}.contiguous()"
        )


def check_out(out: torch.Tensor) -> None:
    n = out.shape[-1]
    if n > 1 and out.stride(-1) != 1:
        raise ValueError(f"out must have a unit stride along n; its strides are {out.stride()}. Pass a row-major out")
    check_groups("out", out)
    row, group_rows = row_strides(out, n)
    rows_overlap = math.prod(out.shape[:-1]) > 1 and row < n
    if rows_overlap or (out.dim() == 3 and out.shape[0] > 1 and group_rows < out.shape[1]):
        raise ValueError(f"rows of out overlap: it is {list(out.shape)} with strides {out.stride()}. Pass a dense out")


# The op, which tracers see. It takes no config, which no schema can name.


def _call_op(a, a_scale, b, b_scale, bounds, out, options: _Options) -> torch.Tensor:
    if options.config is not None:
        raise ValueError("config cannot be given under torch.compile or torch.export: leave it out")
    keywords = {name: getattr(options, name) for name in _OP_OPTIONS}
    if out is None:
        return torch.ops.deep_tile.fp8_grouped_gemm(a, a_scale, b, b_scale, bounds, **keywords)
    torch.ops.deep_tile.fp8_grouped_gemm.out(a, a_scale, b, b_scale, bounds, out, **keywords)
    return out


_OP_OPTIONS = ("alignment", "expected_rows", "num_sms", "batch_invariant", "pdl")


def _op_options(a: torch.Tensor, **keywords) -> _Options:
    return _Options("counts" if a.dim() == 3 else "offs", **keywords)


def _run_op(a, a_scale, b, b_scale, bounds=None, **keywords) -> torch.Tensor:
    return _multiply(a, a_scale, b, b_scale, bounds, None, _op_options(a, **keywords))


def _run_out_op(a, a_scale, b, b_scale, bounds, out, **keywords) -> None:
    _multiply(a, a_scale, b, b_scale, bounds, out, _op_options(a, **keywords))


def _fake_op(a, a_scale, b, b_scale, bounds=None, **keywords) -> torch.Tensor:
    _fake_out_op(a, a_scale, b, b_scale, bounds, None, **keywords)
    return _empty_out(a, b)


def _fake_out_op(a, a_scale, b, b_scale, bounds, out, **keywords) -> None:
    """Check what can be checked without memory; strides are left to the run."""
    options = _op_options(a, **keywords)
    _check_option_values(options)
    _refuse_gradients(a=a, a_scale=a_scale, b=b, b_scale=b_scale, out=out)
    _check_formats(options, a, a_scale, b, b_scale, bounds, out)


_OPERANDS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale"
_KEYWORDS = "int alignment=1, int? expected_rows=None, int? num_sms=None, bool batch_invariant=False, bool? pdl=None"
ops.register(f"fp8_grouped_gemm({_OPERANDS}, Tensor? bounds=None, *, {_KEYWORDS}) -> Tensor", _run_op, _fake_op)
ops.register(
    f"fp8_grouped_gemm.out({_OPERANDS}, Tensor? bounds, Tensor(a!) out, *, {_KEYWORDS}) -> ()",
    _run_out_op,
    _fake_out_op,
)
