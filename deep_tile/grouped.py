"""Grouped products: each group of rows by a matrix of its own, as the experts of a model are.

Called by users and by what brings deep_tile into engines. One launch multiplies all groups: which rows belong to which
is read on the device, so that nothing waits for the host and a CUDA graph holds for every distribution. The warm path
is api.py's: one call into C.
Invariant: rows that belong to no group are not written, whatever the bounds say.
"""

import math
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from deep_tile import _launcher, api, dense, finishes, launches, ops, packed, params, plan, tensors
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, check_alignment, round_up
from deep_tile.kinds import LAYOUT_NAMES, Kind, Majors
from deep_tile.ops import is_traced
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import fp8_gemm_reference, grouped_reference

_MAX_TILES = 2**31 - 1

_is_on_gpu = attrgetter("is_cuda")

_launches: launches.Table = {}
"""By the `_Options` of a call, or the plain tuple equal to it."""


class _Options(NamedTuple):
    """Which of `_CALLS` it is, and its keywords, described at `grouped_gemm`. `layout` is one of `kinds.GROUPINGS`."""

    call: str
    layout: str
    alignment: int = 1
    expected_rows: int | None = None
    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    fast_accum: bool = True


_SCALED = ("a", "a_scale", "b", "b_scale")

_GROUPED_MM = "torch.nn.functional.grouped_mm"

_FP8 = {key: kind for key, kind in dense.kinds_of("fp8").items() if kind.name == "fp8"}

_CALLS = {
    "fp8_grouped_gemm": dense.Call(
        _FP8, _SCALED, torch.bfloat16, "quantise with deep_tile.per_token_cast_to_fp8", _GROUPED_MM
    ),
    "grouped_gemm": dense.Call(
        dense.kinds_of("bf16", "fp16", "int8_unscaled"),
        ("a", "b"),
        None,
        "a.to(torch.bfloat16)",
        _GROUPED_MM,
    ),
    "packed_grouped_gemm": dense.Call(
        dense.PACKED_KINDS,
        _SCALED,
        torch.bfloat16,
        "cast a with deep_tile.per_token_cast_to_fp8, and make b with deep_tile.pack_weight",
        _GROUPED_MM,
    ),
    "scaled_grouped_gemm": dense.Call(
        dense.kinds_of("fp8_rows", "fp8_rows_promoted", "fp8", "int8_rows", "int8"),
        _SCALED,
        torch.bfloat16,
        "quantise to torch.float8_e4m3fn or torch.int8, with a scale for each row, or one",
        _GROUPED_MM,
    ),
}


def fp8_grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    alignment: int = 1,
    expected_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
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
        a_scale: [s, ceil(k / 128)] or [g, m, ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes, any strides
            within 4 GB.
        b: [g, n, k] float8_e4m3fn, laid out like `a`.
        b_scale: [g, ceil(n / 128), ceil(k / 128)] float32, any strides within 4 GB.
        offs: [g] int32, contiguous, on the same device: the row behind each group's last. With `a` of two dimensions.
        out: [s, n] or [g, m, n] bfloat16, float16 or float32, unit stride along n, group stride a multiple of the row
            stride; allocated when None, and then rows of no group hold anything. Must not overlap the inputs.
        counts: [g] int32, contiguous, on the same device: rows of each group. With `a` of three dimensions.
        alignment: of the rows that groups begin at, with `offs`: a power of two up to 1024.
        expected_rows: of a group that has rows, in the mean: what the kernel is chosen for. None: s / g, or m.
        out_dtype: dtype of `out`: by default that of `out`, or bfloat16.
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
    options = (
        *("fp8_grouped_gemm", layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant, pdl),
        True,
    )
    if is_traced():
        return _OPS[options[0]]((a, a_scale, b, b_scale, bounds), (out,), _Options(*options))
    return _multiply((a, a_scale, b, b_scale), bounds, out, options)


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    alignment: int = 1,
    expected_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """BF16, FP16 or INT8: `out[rows] = a[rows] @ b[g]^T` for the rows of each group g, in one launch.

    Groups are those of `fp8_grouped_gemm`, and sums those of `gemm`. Not differentiable, but its gradient of `a` is
    `grouped_gemm(dy, b.transpose(1, 2), offs)`: `b` may lie along k or along n, as its strides say.

    Args:
        a: [s, k] or [g, m, k] bfloat16, float16 or int8, 16-byte aligned, unit stride along k; row stride a multiple of
            16 bytes, group stride of the row stride.
        b: [g, n, k] of the same dtype: likewise, or, of 16 bits, with unit stride along n and such a stride along k,
            where k must be a multiple of 64 if there are several groups.
        out: [s, n] or [g, m, n] bfloat16, float16 or float32, or of INT8 int32; otherwise as for `fp8_grouped_gemm`.
        out_dtype: dtype of `out`: by default that of `out`, or of `a`, or int32 of INT8.
        offs, counts, alignment, expected_rows, config, num_sms, batch_invariant, pdl: as for `fp8_grouped_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    layout, bounds = _bounds(a, offs, counts)
    options = (
        *("grouped_gemm", layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant, pdl),
        True,
    )
    if is_traced():
        return _OPS[options[0]]((a, b, bounds), (out,), _Options(*options))
    return _multiply((a, b), bounds, out, options)


def scaled_grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    alignment: int = 1,
    expected_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    fast_accum: bool = True,
) -> torch.Tensor:
    """FP8 or INT8 with scales of rows, or of blocks: `out[rows] = (a[rows] * a_scale[rows]) @ (b[g] * b_scale[g])^T`.

    Groups are those of `fp8_grouped_gemm`, sums and scales those of `scaled_gemm`: each row of `a` and of each `b[g]`
    has a scale, or all of a group share one; or scales are of blocks, as `fp8_grouped_gemm` has them, of FP8 in either
    format and of INT8. Not differentiable.

    Args:
        a: [s, k] or [g, m, k] float8_e4m3fn, float8_e5m2 or int8, laid out as for `fp8_grouped_gemm`.
        a_scale: float32, bfloat16, float16 or float8_e8m0fnu, any strides within 4 GB: [s] or [g, m], also with a
            dimension of 1 behind, or one number of any shape, or with rows of their own one for each group, [g]; or
            [s, ceil(k / 128)] or [g, m, ceil(k / 128)].
        b: [g, n, k] laid out like `a`: of FP8 too, in either format, or int8.
        b_scale: likewise: [g, n], [g, n, 1] or [g, 1, n], or one number for each group, or for all; or with blocks in
            a_scale [g, ceil(n / 128), ceil(k / 128)].
        out: [s, n] or [g, m, n] bfloat16, float16 or float32, as for `fp8_grouped_gemm`.
        out_dtype: dtype of `out`: by default that of `out`, or bfloat16.
        offs, counts, alignment, expected_rows, config, num_sms, batch_invariant, pdl: as for `fp8_grouped_gemm`.
        fast_accum: as for `scaled_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    layout, bounds = _bounds(a, offs, counts)
    options = (
        *("scaled_grouped_gemm", layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant, pdl),
        fast_accum,
    )
    if is_traced():
        return _OPS[options[0]]((a, a_scale, b, b_scale, bounds), (out,), _Options(*options))
    return _multiply((a, a_scale, b, b_scale), bounds, out, options)


def packed_grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor = tensors.MISSING,
    b_scale: torch.Tensor = tensors.MISSING,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    alignment: int = 1,
    expected_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """`fp8_grouped_gemm` with weights of 4 bits, which become FP8 between memory and the tensor cores.

    Groups are those of `fp8_grouped_gemm`, and products those of `packed_gemm`. Not differentiable.

    Args:
        a, a_scale: as for `fp8_grouped_gemm`.
        b, b_scale: a `Packed`, as `pack_weight` makes it of [g, n, k]; `b` contiguous, 16-byte aligned.
        offs, out, counts, alignment, expected_rows, out_dtype: as for `fp8_grouped_gemm`.
        config: as there; its kind is that of the weight, "mxfp4" or "nvfp4".
        num_sms, batch_invariant, pdl: as for `fp8_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `fp8_gemm`. Nothing has been launched and `out` is untouched.
    """
    layout, bounds = _bounds(a, offs, counts)
    options = (
        *("packed_grouped_gemm", layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant, pdl),
        True,
    )
    if is_traced():
        return _OPS[options[0]]((a, a_scale, b, b_scale, bounds), (out,), _Options(*options))
    return _multiply((a, a_scale, b, b_scale), bounds, out, options)


def _bounds(a, offs, counts) -> tuple[str, torch.Tensor | None]:
    """The layout that `a` has, and the bounds that go with it."""
    if not isinstance(a, torch.Tensor):
        tensors.require_tensors(a=a)
    if a.dim() == 3:
        if offs is not None:
            raise ValueError("offs is given, and a has three dimensions; pass counts, or neither, or a of [s, k]")
        return "counts", counts
    if offs is None or counts is not None:
        raise ValueError(f"a is {list(a.shape)}; with rows [s, k] pass offs and no counts, or pass a of [g, m, k]")
    return "offs", offs


def _multiply(operands, bounds, out, options: tuple) -> torch.Tensor:
    """Outside of tracing; `options` are equal to an `_Options`."""
    try:
        if torch.is_grad_enabled():
            _refuse_gradients(options[0], operands, out)
        if out is None:
            out = _empty_out(operands, _Options(*options))
        if not _launcher.launch_known(_launches, options, *operands, *_given(bounds), out):
            _call_unknown(operands, bounds, out, _Options(*options))
    except Exception:
        check = check_tensors if out is None else _checked_options
        reason = api.error_of(check, _Options(*options), operands, bounds, out)
        if reason is None:
            raise
        raise reason from None
    return out


def _given(bounds: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if bounds is None else (bounds,)


def _empty_out(operands, options: _Options) -> torch.Tensor:
    a, b = dense.matrices(operands)
    dtype = dense.result_dtype(_CALLS[options.call], options.out_dtype, a)
    return a.new_empty(*a.shape[:-1], b.shape[1], dtype=dtype)


def _refuse_gradients(call: str, operands, out) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in zip((*_CALLS[call].names, "out"), (*operands, out), strict=True):
        if x is not None and x.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and {call} has none. To train, call {_CALLS[call].to_train}; otherwise "
                f"call within torch.no_grad(), or pass {name}.detach()"
            )


def _call_unknown(operands, bounds, out, options: _Options) -> None:
    """Multiply where C has met no such options and signature, or cannot read the tensors."""
    check_tensors(options, operands, bounds, out)
    _check_option_values(options)
    operands = tensors.with_float32_scales(operands)
    given = (*operands, *_given(bounds), out)
    launches.enqueue(_launches, options, given, partial(_first_launch, operands, bounds, out, options))


def _first_launch(operands, bounds, out, options: _Options) -> _launcher.Launch | None:
    """That of a signature not met before, checked; None when the result is in `out`."""
    checked = _checked_options(options, operands, bounds, out)
    if out.numel() == 0:
        return None
    if _is_on_gpu(out):
        return _prepare_launch(operands, bounds, out, checked)
    _compute_without_kernel(operands, bounds, out, options)
    return None


@torch.inference_mode()
def _compute_without_kernel(operands, bounds, out, options: _Options) -> None:
    if out.is_meta:
        return
    kind = _kind(options, operands)
    if kind.row_scales:
        operands = tuple(_scale_of_rows(operands[i - 1], x) if i % 2 else x for i, x in enumerate(operands))
    reference = fp8_gemm_reference if kind.name == "fp8" or kind.packing else dense.REFERENCES[kind.scaling]
    grouped_reference(reference, dense.unpacked(operands), out, bounds, options.alignment)


def _prepare_launch(operands, bounds, out, options: _Options) -> _launcher.Launch:
    device, problem = out.get_device(), _problem(operands, out, options)
    layout = _layout(problem, operands, out, options.alignment)
    problem = problem.with_strides(layout.a_stride, layout.b_stride)
    config = api.kernel_for(problem, options.config, device, options.call, check=_checked_config)
    names = (*_CALLS[options.call].names, *(["bounds"] if bounds is not None else []), "out")
    places = params.places(plan.as_kernels_name(names, problem.product))
    return plan.prepare_launch(
        problem, config, layout, device, pdl=options.pdl, constant_weights=False, names=names, places=places
    )


def _problem(operands, out, options: _Options) -> GemmProblem:
    a, b = dense.matrices(operands)
    (rows, k), (groups, n, _) = a.shape[-2:], b.shape
    expected = options.expected_rows
    if expected is None:
        expected = ceil_div(rows, groups) if options.layout == "offs" else rows
    return GemmProblem(
        *(rows, n, k, options.num_sms, tma_can_store(out)),
        kind=_kind(options, operands).name,
        output=finishes.RESULT_NAMES[out.dtype],
        groups=Groups(options.layout, groups, expected),
        layout=LAYOUT_NAMES[Majors("k", "n" if _lies_along_n(b) else "k")],
    )


def _kind(options: _Options, operands) -> Kind:
    """What a call makes of operands of dtypes that it takes."""
    return _CALLS[options.call].kind_of(operands, _scaling, options.fast_accum)


def _scaling(operands, _: list[str]) -> str:
    """Whether scales are of blocks, 1x128 and 128x128, or of rows; of one block of k and of n both mean the same."""
    a, a_scale, b, b_scale = operands
    if b.dtype == torch.uint8:
        return packed.name_of(b, a.shape[-1])
    _, n, k = b.shape
    if a_scale.dim() != a.dim() or b_scale.dim() != 3 or max(n, k) <= SCALE_BLOCK:
        return "rows"
    k_blocks = ceil_div(k, SCALE_BLOCK)
    of_b = b_scale.shape[1] == ceil_div(n, SCALE_BLOCK) and b_scale.shape[2] == k_blocks
    return "blocks" if a_scale.shape[-1] == k_blocks and of_b else "rows"


def _scale_of_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """A scale for each row of [..., rows, k], as a view of those that there are; None where they do not fit."""
    rows = x.shape[:-1]
    if scale.numel() == 1:
        return scale.reshape(()).expand(rows)
    if scale.shape == rows:
        return scale
    if scale.shape == (*rows, 1):
        return scale.squeeze(-1)
    if x.dim() == 2:
        return None
    groups = rows[0]
    if scale.shape == (groups, 1, rows[1]):
        return scale.squeeze(1)
    return scale.reshape(groups, 1).expand(rows) if scale.shape in ((groups,), (groups, 1), (groups, 1, 1)) else None


def _lies_along_n(b: torch.Tensor) -> bool:
    """Whether kernels read [g, n, k] along n: of k = 1 they do where its rows have no room of their own."""
    if b.element_size() != 2:
        return False
    return b.stride(2) != 1 if b.shape[2] > 1 else b.shape[1] > 1 and b.stride(1) * 2 % tensors.ALIGNMENT_BYTES != 0


def _layout(problem: GemmProblem, operands, out, alignment: int) -> plan.Layout:
    """Strides of the call. Of a single row torch may report any stride, which TMA would refuse: it gets a legal one."""
    a, b = dense.matrices(operands)
    along_n = _lies_along_n(b)
    (a_stride, a_rows), (b_stride, b_rows), (out_stride, out_rows) = (
        row_strides(x, round_up(x.shape[-1], tensors.ALIGNMENT_BYTES // x.element_size()))
        for x in (a, b.transpose(1, 2) if along_n else b, out)
    )
    if problem.product.packing:  # as if it were FP8, but for groups: there is no map
        b_stride, b_rows = a.shape[-1], b.shape[1] * ceil_div(a.shape[-1], SCALE_BLOCK)
    a_scale_strides = b_scale_strides = (0, 0, 0)
    if problem.product.row_scales:
        a_scale_strides, b_scale_strides = (
            (*_scale_of_rows(x, scale).stride(), 0) for x, scale in (operands[:2], operands[2:])
        )
    elif problem.product.block_scales:
        a_scale_strides, b_scale_strides = (scale.stride() for scale in operands[1::2])
    a_scale_group = a_scale_strides[0] if a.dim() == 3 else 0
    groups = plan.GroupLayout(alignment, a_rows, out_rows, b_rows, a_scale_group, b_scale_strides[0])
    scale_strides = a_scale_strides[-2:], b_scale_strides[-2:]
    aligned = problem.product.block_scales and tensors.is_aligned(operands[1])
    return plan.Layout(a_stride, b_stride, out_stride, *scale_strides, aligned, groups)


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


def _checked_config(config: GemmConfig, problem: GemmProblem) -> GemmConfig:
    if config.grouping != problem.grouping:
        raise ValueError(f"{config.name} has grouping={config.grouping!r}; here it must be {problem.grouping!r}")
    return api.checked_config(config, problem)


# Checks.


def check_tensors(options: _Options, operands, bounds, out) -> None:
    """Check of each argument by itself what it is; `bounds` and `out` may be None."""
    optional = {_bounds_name(options): bounds, "out": out}
    present = {name: x for name, x in optional.items() if x is not None}
    given = dict(zip(_CALLS[options.call].names, operands, strict=True))
    if options.call == "fp8_grouped_gemm":
        api.check_tensors(**given, **present)
    else:
        tensors.require_tensors(**given)
        api.check_tensors(**present)
    _refuse_gradients(options.call, operands, out)


def _bounds_name(options: _Options) -> str:
    return "counts" if options.layout == "counts" else "offs"


def _checked_options(options: _Options, operands, bounds, out) -> _Options:
    """Check everything that can be wrong about a call; the options, with num_sms and pdl filled in."""
    check_tensors(options, operands, bounds, out)
    _check_option_values(options)
    _check_formats(options, operands, bounds, out)
    _check_strides(options, operands, bounds, out)
    a, b = dense.matrices(operands)
    groups, rows, n = b.shape[0], a.shape[-2], b.shape[1]
    if groups * (rows // 64 + 1) * ceil_div(n, 16) > _MAX_TILES:
        raise ValueError(
            f"{groups} groups of rows in {list(a.shape)} by {n} columns are too many tiles: split the product"
        )
    return api.with_defaults(options, a.device)


def _check_option_values(options: _Options) -> None:
    for name in ("num_sms", "batch_invariant", "pdl", "fast_accum"):
        api.check_option(name, getattr(options, name))
    finishes.check_out_dtype(options.out_dtype, finishes.RESULT_NAMES)
    api.check_config_type(options.config)
    alignment, expected = options.alignment, options.expected_rows
    check_alignment(alignment)
    if options.layout == "counts" and alignment != 1:
        raise ValueError(f"alignment is {alignment}; groups of [g, m, k] begin at their own rows: leave it out")
    if expected is not None and (type(expected) is not int or expected < 1):
        raise ValueError(f"expected_rows is {expected!r}; pass a positive int, or None")


def _check_formats(options: _Options, operands, bounds, out) -> None:
    """Check dtypes, devices and shapes; `bounds` and `out` may be None."""
    call, (a, b) = _CALLS[options.call], dense.matrices(operands)
    wider = "scaled_grouped_gemm"
    takers = {} if options.call == wider else dict.fromkeys(tensors.QUANTIZED_DTYPES, wider)
    dense.check_dtypes(call, operands, takers)
    api.check_device("a", a, options.call)
    if b.dtype == torch.uint8:
        packed.name_of(b, a.shape[-1])
        b = packed.shaped(a, b)
    if a.dim() not in (2, 3) or b.dim() != 3 or not ops.holds(a.shape[-1] == b.shape[2]):
        raise ValueError(
            f"a must be [s, k] or [g, m, k] and b [g, n, k]; got {list(a.shape)} and {list(b.shape)}. b holds one row "
            "per output column"
        )
    (groups, n, k), rows = b.shape, a.shape[:-1]
    if not ops.holds(k > 0) or not ops.holds(groups > 0):
        raise ValueError(f"b is {list(b.shape)}; groups and k must be positive")
    kind = _kind(options, operands)
    finishes.check_out_dtype(options.out_dtype, finishes.of_kind(kind))
    finishes.check_out(out, options.out_dtype, finishes.of_kind(kind))
    wanted = {_bounds_name(options): (bounds, (groups,)), "out": (out, (*rows, n))}
    if kind.block_scales:
        k_blocks = ceil_div(k, SCALE_BLOCK)
        wanted["a_scale"] = (operands[1], (*rows, k_blocks))
        wanted["b_scale"] = (operands[3], (groups, ceil_div(n, SCALE_BLOCK), k_blocks))
    if a.dim() == 3:
        wanted["a"] = (a, (groups, *a.shape[1:]))
    for name, (x, shape) in wanted.items():
        if x is not None:
            _check_shape(name, x, shape, a, b)
    if kind.row_scales:
        _check_row_scales(*operands)
    api.check_devices(a, **dict(zip(call.names[1:], operands[1:], strict=True)))
    if bounds is not None and bounds.dtype != torch.int32:
        name = _bounds_name(options)
        raise TypeError(f"{name} must be torch.int32; got {bounds.dtype}. Convert it with .int()")


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> None:
    if not api.has_shape(x, shape):
        raise ValueError(
            f"{name} must be {list(shape)} for a of {list(a.shape)} and b of {list(b.shape)}; got {list(x.shape)}. "
            f"{_shape_remedy(name, x, shape, a, b)}"
        )
    if x.device != a.device:
        raise ValueError(f"{name} is on {x.device} but a is on {a.device}; move it with .to(a.device)")


def _shape_remedy(name: str, x: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> str:
    """What to do about another shape."""
    if name == "offs":
        return offs_remedy(x, b.shape[0], a.shape[0])
    if name == "counts":
        return "To fix: pass how many rows each group has"
    if name == "out":
        return "To fix: pass out=None to have it allocated"
    if name == "a":
        return "To fix: pass the rows of each group of b, and counts of how many there are"
    if x.dim() > 1 and str(list(x.transpose(-1, -2).shape)) == str(list(shape)):
        return f"It looks transposed: pass {name}.transpose(-1, -2); any strides are accepted"
    if _scale_of_rows(a if name == "a_scale" else b, x) is not None:
        return "deep_tile.scaled_grouped_gemm takes a scale for each row, or one, where the other scale is such, too"
    cast = "per_token_cast_to_fp8 makes a and a_scale" if name == "a_scale" else "per_block_cast_to_fp8 casts each b[g]"
    return f"To fix: deep_tile.{cast}"


def offs_remedy(offs: torch.Tensor, groups: int, rows: int) -> str:
    """What to do about offsets of another shape than [groups], of so many rows."""
    seen = str(list(offs.shape))
    if seen == str([groups + 1]):
        return "offs holds the row behind each group's last, and no 0 before: pass offs[1:]"
    if seen == str([rows]):
        return (
            "A number for each row, as DeepGEMM's m_indices (grouped_layout), is taken by the contiguous products of "
            "deep_tile.compat.deep_gemm; offs holds the row behind each group's last"
        )
    return "To fix: pass the row behind each group's last"


def _check_row_scales(a, a_scale, b, b_scale) -> None:
    for name, x, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if _scale_of_rows(x, scale) is None:
            shared = ", or one for each group" if x.dim() == 3 else ""
            raise ValueError(
                f"{name}_scale must have one number for each row of {name}, as {list(x.shape[:-1])}{shared}, or one "
                f"for all; got {list(scale.shape)} for {name} of {list(x.shape)}. Or give both scales of blocks: "
                "a_scale [..., ceil(k / 128)], b_scale [g, ceil(n / 128), ceil(k / 128)]"
            )


def _check_strides(options: _Options, operands, bounds, out) -> None:
    a, b = dense.matrices(operands)
    _check_operand("a", a)
    if b.dtype == torch.uint8:
        packed.check_memory("b", b)
    else:
        _check_operand("b", b)
    kind = _kind(options, operands)
    if _lies_along_n(b) and b.shape[0] > 1 and b.shape[2] % kind.k_block:
        raise ValueError(
            f"b lies along n, with k = {b.shape[2]}; of several groups k must then be a multiple of {kind.k_block}, or "
            "a K block would hold what is another group's. Make it K-major: b.contiguous()"
        )
    if kind.scaling != "none":
        for name, x, scale in (("a", *operands[:2]), ("b", *operands[2:])):
            each = _scale_of_rows(x, scale) if kind.row_scales else scale
            problem = api.scale_problem(name, tuple(each.shape), each.stride())
            if problem:
                raise ValueError(problem)
    if bounds is not None and bounds.shape[0] > 1 and bounds.stride(0) != 1:
        raise ValueError(f"offs or counts has the stride {bounds.stride(0)}; pass it with .contiguous()")
    check_out(out)


def _check_operand(name: str, x: torch.Tensor) -> None:
    """Check that kernels can read [..., rows, k] along k, or `b` of 16 bits along its rows."""
    what, along = "row", "along k"
    if name == "b" and _lies_along_n(x):
        x, what, along = x.transpose(1, 2), "column", "along k or along n"
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        strides = x.stride() if what == "row" else x.transpose(1, 2).stride()
        raise ValueError(
            f"{name} must have a unit stride {along}; its strides are {strides}. Make it K-major: {name}.contiguous()"
        )
    check_groups(name, x)
    rows, stride = math.prod(x.shape[:-1]), row_strides(x, tensors.ALIGNMENT_BYTES)[0]
    problem = api.stride_problem(name, rows, x.shape[-1], stride, x.element_size(), what)
    if problem:
        raise ValueError(problem)
    if x.shape[-1] * x.element_size() > api.MAX_SIZE:
        raise ValueError(
            f"{name} has {x.shape[-1]} adjacent elements; of {x.dtype} at most {api.MAX_SIZE // x.element_size()}: "
            "split the product"
        )
    if rows and x.data_ptr() % tensors.ALIGNMENT_BYTES:
        raise ValueError(api.misaligned(name, x))


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


# The ops, which tracers see.


def _op(call: str) -> ops.Op:
    names = _CALLS[call].names

    def options_of(inputs: tuple, options: dict) -> _Options:
        return _Options(call, "counts" if inputs[0].dim() == 3 else "offs", **options)

    def run(inputs: tuple, outs: tuple, options: dict) -> torch.Tensor:
        *operands, bounds = inputs
        return _multiply(tuple(operands), bounds, *outs, options_of(inputs, options))

    def check(inputs: tuple, outs: tuple, options: dict) -> None:
        (*operands, bounds), options = inputs, options_of(inputs, options)
        _check_option_values(options)
        _refuse_gradients(call, operands, *outs)
        _check_formats(options, tuple(operands), bounds, *outs)

    def allocate(inputs: tuple, options: dict) -> torch.Tensor:
        return _empty_out(inputs[:-1], options_of(inputs, options))

    own = " fast_accum" if call == "scaled_grouped_gemm" else ""
    return ops.Op(
        call,
        " ".join((*names, "bounds?", "out!")),
        f"alignment expected_rows out_dtype num_sms batch_invariant pdl{own}",
        *(run, check, allocate),
        flops=ops.product_flops(second=len(names) // 2),
    )


_OPS = {call: _op(call) for call in _CALLS}
