"""Grouped GEMMs (MoE): each row group is multiplied by its own matrix.

One launch multiplies all groups. Group bounds are read on the device, so nothing waits for the host and one CUDA graph
serves every distribution. Invariant: rows outside all groups are not written, and invalid bounds never cause
out-of-bounds access.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from deep_tile import checks, finishes, launches, ops, packed, params, plan, tensors, unpack
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.dense import FP8_KINDS, PACKED_KINDS, REFERENCES, Product, kinds_of, unpacked
from deep_tile.kinds import LAYOUT_NAMES, Kind, Majors
from deep_tile.operation import Given
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import grouped_reference
from deep_tile.select.choose import LEAST_UNPACKED

MAX_TILES = 2**31 - 1


class Options(NamedTuple):
    """A call's keywords, described at `fp8_grouped_gemm`. `layout` is one of `kinds.GROUPINGS`."""

    layout: str
    alignment: int = 1
    expected_rows: int | None = None
    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False
    fast_accum: bool = True


class Grouped(Product):
    """A GEMM that multiplies each row group of `a` by its matrix in `b`. Bounds are offs, or counts where `a` has three
    dimensions."""

    Options = Options
    groupings, sizes = ("offs", "counts"), "m n k groups"

    def options_of(self, given: Given, keywords: dict) -> Options:
        return Options("counts" if given[0].dim() == 3 else "offs", **keywords)

    def names_in(self, options: Options) -> tuple[str, ...]:
        return *self.names[: self.count], "counts" if options.layout == "counts" else "offs", "out"

    def result(self, given: Given, options: Options) -> tuple[tuple[int, ...], torch.dtype]:
        a, b = self.matrices(given)
        return (*a.shape[:-1], b.shape[1]), self.dtype_of_out(options, a)

    def without_memory(self, asked: checks.Sizes) -> tuple[Given, Options]:
        groups = (asked.groups,)
        operands = asked.operands(groups if asked.grouping == "counts" else (), groups)
        bounds = torch.empty(groups, dtype=torch.int32, device="meta")
        return (*operands, bounds, None), Options(asked.grouping, out_dtype=asked.out_dtype)

    def scaling(self, operands: Given, known: list[str]) -> str:
        """The scaling, by scale shapes. Shapes that fit both blocks and rows count as rows."""
        a, a_scale, b, b_scale = operands
        _, n, k = b.shape
        if a_scale.dim() != a.dim() or b_scale.dim() != 3 or max(n, k) <= SCALE_BLOCK:
            return "rows"
        k_blocks = ceil_div(k, SCALE_BLOCK)
        of_b = b_scale.shape[1] == ceil_div(n, SCALE_BLOCK) and b_scale.shape[2] == k_blocks
        return "blocks" if a_scale.shape[-1] == k_blocks and of_b else "rows"

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        if options.layout == "counts" and options.alignment != 1:
            raise ValueError(
                f"alignment is {options.alignment}; groups of [g, m, k] begin at their own rows: leave it out"
            )

    def check(self, given: Given, options: Options) -> None:
        (a, b), (bounds, out) = self.matrices(given), given[self.count :]
        self.check_dtypes(given)
        checks.check_device("a", a, self.name)
        if b.dtype == torch.uint8:
            packed.name_of(b, packed.k_of(a))
            b = packed.shaped(a, b)
        if a.dim() not in (2, 3) or b.dim() != 3 or not ops.holds(a.shape[-1] == b.shape[2]):
            raise ValueError(
                f"a must be [s, k] or [g, m, k] and b [g, n, k]; got {list(a.shape)} and {list(b.shape)}. b holds one "
                "row per output column"
            )
        (groups, n, k), rows = b.shape, a.shape[:-1]
        if not ops.holds(k > 0) or not ops.holds(groups > 0):
            raise ValueError(f"b is {list(b.shape)}; groups and k must be positive")
        kind, name_of_bounds = self.kind(given, options), self.names_in(options)[self.count]
        finishes.check_out_dtype(options.out_dtype, finishes.of_kind(kind))
        finishes.check_out(out, options.out_dtype, finishes.of_kind(kind))
        wanted = {name_of_bounds: (bounds, (groups,)), "out": (out, (*rows, n))}
        if kind.block_scales:
            k_blocks = ceil_div(k, SCALE_BLOCK)
            wanted["a_scale"] = (given[1], (*rows, k_blocks))
            b_rows = n if kind.scaling == "row_blocks" else ceil_div(n, SCALE_BLOCK)
            wanted["b_scale"] = (given[3], (groups, b_rows, k_blocks))
        if a.dim() == 3:
            wanted["a"] = (a, (groups, *a.shape[1:]))
        for name, (x, shape) in wanted.items():
            if x is not None:
                _check_shape(name, x, shape, a, b)
        if kind.row_scales:
            _check_row_scales(*given[:4])
        checks.check_devices(a, **dict(zip(self.names[1 : self.count], given[1 : self.count], strict=True)))
        if bounds is not None and bounds.dtype != torch.int32:
            raise TypeError(f"{name_of_bounds} must be torch.int32; got {bounds.dtype}. Convert it with .int()")

    def check_memory(self, given: Given, options: Options) -> Options:
        (a, b), (bounds, out) = self.matrices(given), given[self.count :]
        _check_operand("a", a)
        if b.dtype == torch.uint8:
            packed.check_memory("b", b)
        else:
            _check_operand("b", b)
        kind = self.kind(given, options)
        if _lies_along_n(b) and b.shape[0] > 1 and b.shape[2] % kind.k_block:
            raise ValueError(
                f"b lies along n, with k = {b.shape[2]}; of several groups k must then be a multiple of "
                f"{kind.k_block}, or a K block would hold what is another group's. Make it K-major: b.contiguous()"
            )
        if kind.scaling != "none":
            for name, x, scale in (("a", *given[:2]), ("b", *given[2:4])):
                each = _scale_of_rows(x, scale) if kind.row_scales else scale
                checks.refuse(checks.scale_problem(name, tuple(each.shape), each.stride()))
        check_bounds_memory("offs or counts", bounds)
        if out is not None:
            check_out(out)
        checks.check_constant_weights(options)
        groups, rows, n = b.shape[0], a.shape[-2], b.shape[1]
        if groups * (rows // 64 + 1) * ceil_div(n, 16) > MAX_TILES:
            raise ValueError(
                f"{groups} groups of rows in {list(a.shape)} by {n} columns are too many tiles: split the product"
            )
        return checks.with_defaults(options, a.device)

    def needs_kernel(self, given: Given) -> bool:
        return self.is_on_gpu(given[-1]) and given[-1].numel() > 0

    def define(self, given: Given, options: Options) -> None:
        *operands, bounds, out = given
        if out.is_meta or out.numel() == 0:
            return
        kind = self.kind(given, options)
        if kind.row_scales:
            operands = tuple(_scale_of_rows(operands[i - 1], x) if i % 2 else x for i, x in enumerate(operands))
        grouped_reference(REFERENCES[kind.scaling], unpacked(tuple(operands)), out, bounds, options.alignment)

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        device, problem = given[-1].get_device(), self.problem(given, options)
        layout = self.layout(problem, given, options.alignment)
        problem = problem.with_strides(layout.a_stride, layout.b_stride)
        config = checks.kernel_for(problem, options.config, device, self.name)
        names = tuple(name for name, x in zip(self.names, given, strict=True) if x is not None)
        places = params.places(plan.as_kernels_name(names, problem.product))
        how = {"pdl": options.pdl, "constant_weights": options.constant_weights}
        return plan.prepare_launch(problem, config, layout, device, **how, names=names, places=places)

    def problem(self, given: Given, options: Options) -> GemmProblem:
        (a, b), out = self.matrices(given), given[-1]
        (rows, k), (groups, n, _) = a.shape[-2:], b.shape
        expected = options.expected_rows
        if expected is None:
            expected = ceil_div(rows, groups) if options.layout == "offs" else rows
        return GemmProblem(
            *(rows, n, k, options.num_sms, checks.tma_can_store(out)),
            split_k=not options.batch_invariant,
            kind=self.kind(given, options).name,
            output=finishes.RESULT_NAMES[out.dtype],
            groups=Groups(options.layout, groups, expected),
            layout=LAYOUT_NAMES[Majors("k", "n" if _lies_along_n(b) else "k")],
        )

    def layout(self, problem: GemmProblem, given: Given, alignment: int) -> plan.Layout:
        """The call's strides. For a single row torch may report any stride; TMA gets a legal one."""
        a, b = self.matrices(given)
        along_n = _lies_along_n(b)
        (a_stride, a_rows), (b_stride, b_rows), (out_stride, out_rows) = (
            row_strides(x, round_up(x.shape[-1], tensors.ALIGNMENT_BYTES // x.element_size()))
            for x in (a, b.transpose(1, 2) if along_n else b, given[-1])
        )
        if problem.product.packing:  # an FP8 b's strides: a packed b has no map
            b_stride, b_rows = a.shape[-1], b.shape[1] * ceil_div(a.shape[-1], SCALE_BLOCK)
        a_scale_strides = b_scale_strides = (0, 0, 0)
        if problem.product.row_scales:
            a_scale_strides, b_scale_strides = (
                (*_scale_of_rows(x, scale).stride(), 0) for x, scale in (given[:2], given[2:4])
            )
        elif problem.product.block_scales:
            a_scale_strides, b_scale_strides = (scale.stride() for scale in given[1:4:2])
        a_scale_group = a_scale_strides[0] if a.dim() == 3 else 0
        groups = plan.GroupLayout(alignment, a_rows, out_rows, b_rows, a_scale_group, b_scale_strides[0])
        scale_strides = a_scale_strides[-2:], b_scale_strides[-2:]
        aligned = problem.product.block_scales and tensors.is_aligned(given[1])
        return plan.Layout(a_stride, b_stride, out_stride, *scale_strides, aligned, groups)


class PackedGrouped(unpack.Unpacking, Grouped):
    """`packed_grouped_gemm`."""

    def in_fp8(self, kind: Kind) -> Grouped:
        return FP8_GROUPED_GEMM

    def configs(self, of_all: GemmProblem, max_m: int, layouts: Iterable[str]) -> set[GemmConfig]:
        configs = super().configs(of_all, max_m, layouts)
        in_blocks = of_all.product.scaling == "blocks" and of_all.product.packing.fits_fp8
        if in_blocks and max_m >= LEAST_UNPACKED:
            configs |= super().configs(of_all._replace(kind="fp8"), max_m, layouts)
        return configs


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
    constant_weights: bool = False,
) -> torch.Tensor:
    """`out[rows] = (a[rows] * a_scale[rows]) @ (b[g] * b_scale[g])^T` for the rows of each group g, in one launch.

    A 2-D `a` holds the groups one after another, as in torch's grouped GEMMs: group g ends before row
    `offs[g]`, and begins where group g - 1 ends, rounded up to `alignment`. With a 3-D `a` (masked layout), group g is
    `a[g, :counts[g]]`, or all of `a[g]` without counts. Bounds are read on the device. Invalid ones (negative, falling,
    too large) are clamped and never cause out-of-bounds access. Not differentiable.

    Every warp reads the bounds by itself: like `a`, they must not be written while the kernel runs.

    Args:
        a: [s, k] or [g, m, k] float8_e4m3fn, unit stride along k; row and group strides as for `fp8_gemm`, and the
            latter a multiple of the former.
        a_scale: [s, ceil(k / 128)] or [g, m, ceil(k / 128)] float32 or another dtype that `fp8_gemm` takes, any strides
            within 4 GB.
        b: [g, n, k] float8_e4m3fn, laid out like `a`.
        b_scale: [g, ceil(n / 128), ceil(k / 128)] float32, any strides within 4 GB.
        offs: [g] int32, contiguous, on the same device: the row behind each group's last. For a 2-D `a`.
        out: [s, n] or [g, m, n] bfloat16, float16 or float32, unit stride along n, group stride a multiple of the row
            stride; allocated when None, where rows outside all groups are undefined. Must not overlap the inputs.
        counts: [g] int32, contiguous, on the same device: rows per group. For a 3-D `a`.
        alignment: with `offs`, the multiple of rows at which groups start: a power of two up to 1024.
        expected_rows: mean rows per non-empty group, for which the kernel is chosen. None: s / g, or m.
        out_dtype: dtype of `out`: by default `out`'s, or bfloat16.
        config: the kernel to use instead of the selector's choice; its `grouping` is "offs" or "counts".
        num_sms, pdl: as for `fp8_gemm`.
        batch_invariant: accepted as for `fp8_gemm`, and changes nothing: grouped results never depend on other rows.
        constant_weights: as for `fp8_gemm`. If `expected_rows` is small, the bounds are then read before that wait as
            well, so the preceding kernel must not write `b`, `b_scale`, `offs` or `counts`. This holds in a layer of
            experts (`sort_by_expert`, cast, GEMM, `silu_mul_cast_to_fp8`, GEMM). Kernels without block scales always
            wait.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.

    The method is `fp8_gemm`'s; offsets follow `torch.nn.functional.scaled_grouped_mm`.
    """
    layout, bounds = _bounds(a, offs, counts)
    given = (a, a_scale, b, b_scale, bounds, out)
    options = (layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant)
    options += (pdl, constant_weights, True)
    return FP8_GROUPED_GEMM.run(given, options)


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
    constant_weights: bool = False,
) -> torch.Tensor:
    """BF16, FP16 or INT8 grouped GEMM: `out[rows] = a[rows] @ b[g]^T` for each group g's rows, in one launch.

    Groups are as for `fp8_grouped_gemm`, sums as for `gemm`. Not differentiable, but the gradient for `a` is
    `grouped_gemm(dy, b.transpose(1, 2), offs)`: `b` may be K-major or N-major, by its strides.

    Args:
        a: [s, k] or [g, m, k] bfloat16, float16 or int8, 16-byte aligned, unit stride along k; row stride a multiple of
            16 bytes, group stride of the row stride.
        b: [g, n, k] of the same dtype: likewise; or N-major for 16-bit dtypes, where k must be a multiple of 64 if
            there are several groups.
        out: [s, n] or [g, m, n] bfloat16, float16 or float32, or int32 for INT8; otherwise as for `fp8_grouped_gemm`.
        out_dtype: dtype of `out`: by default `out`'s, or `a`'s, or int32 for INT8.
        offs, counts, alignment, expected_rows, config, num_sms, batch_invariant, pdl, constant_weights: as for
            `fp8_grouped_gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    layout, bounds = _bounds(a, offs, counts)
    given = (a, b, bounds, out)
    options = (layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant)
    options += (pdl, constant_weights, True)
    return GROUPED_GEMM.run(given, options)


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
    constant_weights: bool = False,
    fast_accum: bool = True,
) -> torch.Tensor:
    """FP8 or INT8 grouped GEMM with per-row or block scales.

    `out[rows] = (a[rows] * a_scale[rows]) @ (b[g] * b_scale[g])^T` for each group g's rows, in one launch.

    Groups are as for `fp8_grouped_gemm`, sums and scales as for `scaled_gemm`: one scale per row in `a` and `b[g]`, or
    one per group; or block scales as for `fp8_grouped_gemm`, for both FP8 formats and INT8. Not differentiable.

    Args:
        a: [s, k] or [g, m, k] float8_e4m3fn, float8_e5m2 or int8, laid out as for `fp8_grouped_gemm`.
        a_scale: float32, bfloat16, float16 or float8_e8m0fnu, any strides within 4 GB: [s] or [g, m], also with a
            trailing dimension of 1; or one number in any shape; or, for a 3-D `a`, one per group, [g]; or [s, ceil(k /
            128)] or [g, m, ceil(k / 128)].
        b: [g, n, k] laid out like `a`, in either FP8 format, or int8.
        b_scale: likewise: [g, n], [g, n, 1] or [g, 1, n], or one number for each group, or for all; or with blocks in
            a_scale [g, ceil(n / 128), ceil(k / 128)].
        out: [s, n] or [g, m, n] bfloat16, float16 or float32, as for `fp8_grouped_gemm`.
        out_dtype: dtype of `out`: by default `out`'s, or bfloat16.
        offs, counts, alignment, expected_rows, config, num_sms, batch_invariant, pdl, constant_weights: as for
            `fp8_grouped_gemm`.
        fast_accum: as for `scaled_gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    layout, bounds = _bounds(a, offs, counts)
    given = (a, a_scale, b, b_scale, bounds, out)
    options = (layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant)
    options += (pdl, constant_weights, fast_accum)
    return SCALED_GROUPED_GEMM.run(given, options)


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
    """`fp8_grouped_gemm` with 4-bit weights, which the kernel converts to FP8.

    Groups are as for `fp8_grouped_gemm`, results as for `packed_gemm`. Not differentiable.

    Args:
        a, a_scale: as for `fp8_grouped_gemm`.
        b, b_scale: a `Packed` that `pack_weight` made from [g, n, k]; `b` contiguous, 16-byte aligned.
        offs, out, counts, alignment, expected_rows, out_dtype: as for `fp8_grouped_gemm`.
        config: as there; its kind is the weight's, as for `packed_gemm`.
        num_sms, batch_invariant, pdl: as for `fp8_gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    layout, bounds = _bounds(a, offs, counts)
    given = (a, a_scale, b, b_scale, bounds, out)
    options = (layout, alignment, expected_rows, out_dtype, config, num_sms, batch_invariant)
    options += (pdl, False, True)
    return PACKED_GROUPED_GEMM.run(given, options)


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


def _scale_of_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """One scale per row of [..., rows, k], as a view; None if the shape does not fit."""
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
    """Whether kernels read [g, n, k] as N-major. For k = 1 they do unless rows are at least 16 bytes apart."""
    if b.element_size() != 2:
        return False
    return b.stride(2) != 1 if b.shape[2] > 1 else b.shape[1] > 1 and b.stride(1) * 2 % tensors.ALIGNMENT_BYTES != 0


def row_strides(x: torch.Tensor, single: int) -> tuple[int, int]:
    """From a row to the next, in elements, and from a group to the next, in rows."""
    groups, rows = x.shape[0] if x.dim() == 3 else 1, x.shape[-2]
    if groups == 1:
        return (x.stride(-2) if rows > 1 else single), 0
    if rows < 2:  # each group is one row, or none
        return x.stride(0), 1
    return x.stride(-2), x.stride(0) // x.stride(-2)


# Checks.


def check_bounds_memory(name: str, bounds: torch.Tensor | None) -> None:
    if bounds is not None and bounds.shape[0] > 1 and bounds.stride(0) != 1:
        raise ValueError(f"{name} has the stride {bounds.stride(0)}; pass it with .contiguous()")


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> None:
    if not checks.has_shape(x, shape):
        raise ValueError(
            f"{name} must be {list(shape)} for a of {list(a.shape)} and b of {list(b.shape)}; got {list(x.shape)}. "
            f"{_shape_remedy(name, x, shape, a, b)}"
        )
    if x.device != a.device:
        raise ValueError(f"{name} is on {x.device} but a is on {a.device}; move it with .to(a.device)")


def _shape_remedy(name: str, x: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> str:
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


def _check_operand(name: str, x: torch.Tensor) -> None:
    """Check that kernels can read [..., rows, k] as K-major, or a 16-bit `b` as N-major."""
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
    problem = checks.stride_problem(name, rows, x.shape[-1], stride, x.element_size(), what)
    if problem:
        raise ValueError(problem)
    if x.shape[-1] * x.element_size() > checks.MAX_SIZE:
        raise ValueError(
            f"{name} has {x.shape[-1]} adjacent elements; of {x.dtype} at most {checks.MAX_SIZE // x.element_size()}: "
            "split the product"
        )
    if not x.is_meta and rows and x.data_ptr() % tensors.ALIGNMENT_BYTES:
        raise ValueError(checks.misaligned(name, x))


def check_groups(name: str, x: torch.Tensor) -> None:
    """Check that a 3-D tensor's group stride is a multiple of its row stride."""
    if x.dim() == 2 or x.shape[0] <= 1 or x.shape[1] <= 1:
        return
    group, row = x.stride()[:2]
    if row <= 0 or group % row or group // row * (x.shape[0] - 1) + x.shape[1] > checks.MAX_SIZE:
        raise ValueError(
            f"{name}'s groups lie {group} elements apart, with rows of {row}; that must be a multiple, and all rows at "
            f"most {checks.MAX_SIZE}. Pass {name}.contiguous()"
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


_SCALED = "a a_scale b b_scale bounds? out!"
_KEYWORDS = "alignment expected_rows out_dtype num_sms batch_invariant pdl"
_EARLY = f"{_KEYWORDS} constant_weights"
_OTHERS = dict.fromkeys(tensors.QUANTIZED_DTYPES, "scaled_grouped_gemm")
_ONE_DTYPE = "make both of one dtype"
_GROUPED_MM = "call torch.nn.functional.grouped_mm"

FP8_GROUPED_GEMM = Grouped(
    *("fp8_grouped_gemm", _SCALED, _EARLY, FP8_KINDS),
    out_dtype=torch.bfloat16,
    remedies=("quantise with deep_tile.per_token_cast_to_fp8", _ONE_DTYPE),
    takers=_OTHERS,
    sources=checks.SOURCES,
    to_train=_GROUPED_MM,
)
GROUPED_GEMM = Grouped(
    *("grouped_gemm", "a b bounds? out!", _EARLY, kinds_of("bf16", "fp16", "int8_unscaled")),
    out_dtype=None,
    remedies=("a.to(torch.bfloat16)", _ONE_DTYPE),
    takers=_OTHERS,
    to_train=_GROUPED_MM,
)
PACKED_GROUPED_GEMM = PackedGrouped(
    *("packed_grouped_gemm", _SCALED, _KEYWORDS, PACKED_KINDS),
    out_dtype=torch.bfloat16,
    remedies=("cast a with deep_tile.per_token_cast_to_fp8, and make b with deep_tile.pack_weight", _ONE_DTYPE),
    takers=_OTHERS,
    to_train=_GROUPED_MM,
)
SCALED_GROUPED_GEMM = Grouped(
    *("scaled_grouped_gemm", _SCALED, f"{_EARLY} fast_accum"),
    kinds_of("fp8_rows", "fp8_rows_promoted", "fp8", "int8_rows", "int8"),
    out_dtype=torch.bfloat16,
    remedies=("quantise to torch.float8_e4m3fn or torch.int8, with a scale for each row, or one", _ONE_DTYPE),
    to_train=_GROUPED_MM,
)
