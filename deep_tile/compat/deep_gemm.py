"""DeepGEMM's functions for FP8 and BF16 GEMMs on Hopper, dense and grouped, on our kernels.

Functions without a deep_tile kernel, such as mega MoE, come from the real DeepGEMM (original.py) or raise an
AttributeError: most engines take a missing name as "not available". Invariant: names, arguments and meaning follow
DeepGEMM 2.6.1 to 2.8.1 on SM90; wrong calls raise before any launch.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from deep_tile import api, checks, dense, grouped, quantize, sums, tensors, thin, wgrad
from deep_tile.compat import arguments, indexer, original, process
from deep_tile.compat.arguments import Pair
from deep_tile.compat.layouts import ends_of, group_ends
from deep_tile.compat.process import get_num_sms as get_num_sms
from deep_tile.compat.process import get_pdl as get_pdl
from deep_tile.compat.process import set_num_sms as set_num_sms
from deep_tile.compat.process import set_pdl as set_pdl
from deep_tile.compat.refused import REFUSED
from deep_tile.compat.scales import align as align
from deep_tile.compat.scales import count_bytes as count_bytes
from deep_tile.compat.scales import get_col_major_tma_aligned_tensor as get_col_major_tma_aligned_tensor
from deep_tile.compat.scales import get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor
from deep_tile.compat.scales import get_tma_aligned_size as get_tma_aligned_size
from deep_tile.compat.scales import per_block_cast_to_fp8 as per_block_cast_to_fp8
from deep_tile.compat.scales import per_channel_cast_to_fp8 as per_channel_cast_to_fp8
from deep_tile.compat.scales import per_token_cast_to_fp8 as per_token_cast_to_fp8
from deep_tile.compat.scales import transform_sf_into_required_layout as transform_sf_into_required_layout
from deep_tile.config import SCALE_BLOCK, as_int, ceil_div, check_alignment
from deep_tile.kinds import LAYOUTS
from deep_tile.ops import is_traced
from deep_tile.reference import cosine_difference
from deep_tile.select.hardware import H200

__version__ = "2.6.1+deep_tile"

_alignment = SCALE_BLOCK
"""Row alignment of groups in contiguous layouts; process-wide."""

_compile_mode = 0
"""Process-wide: 1 means GEMMs are compiled and not launched."""

_ready: dict[tuple, int] = {}
"""Finished `_make_ready` calls, with their row limits."""


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: object = None,
) -> None:
    """`d = a @ b^T` with 1x128 and 128x128 scales: `deep_tile.fp8_gemm(*a, *b, d)`; with 1x128 scales on both operands
    `d = c + a @ b^T`: `deep_tile.scaled_gemm`.

    Args:
        a: [m, k] float8_e4m3fn and its scale [m, ceil(k / 128)]: row-major, or M-major with or without padding.
        b: [n, k] float8_e4m3fn and its scale [ceil(n / 128), ceil(k / 128)], or [n, ceil(k / 128)]. Operands with rows
            not at multiples of 16 bytes are copied first.
        d: [m, n], written to: bfloat16, or float32 with 1x128 scales on both.
        c: None; with 1x128 scales on both also a float32 [m, n] to add, which may be `d`.
        recipe, recipe_a, recipe_b: scale blocks: (1, 128, 128), (1, 128) and (128, 128), or for 1x128 on both operands
            (1, 1, 128), (1, 128) and (1, 128).
        compiled_dims, disable_ue8m0_cast: mean nothing here: kernels know no sizes, and scales are used as they are.
        alpha, epilogue: only None (alpha also 1), as in DeepGEMM on Hopper.

    Raises:
        TypeError, ValueError, RuntimeError: as `deep_tile.fp8_gemm`; a pair that is none, another recipe, a `c`, or
            scales that are packed into integers.
    """
    arguments.check_result(d, alpha, epilogue)
    if c is not None:
        arguments.pair_of("a", a)  # four tensors in place of pairs make c a scale
    if arguments.is_by_rows(recipe, recipe_b):
        arguments.check_recipes(recipe, recipe_a, recipe_b, quantize.TOKEN_BLOCK)
        operands = arguments.operands(a, b)
        arguments.require_dimensions(
            a=(operands[0], 2), a_scale=(operands[1], 2), b=(operands[2], 2), b_scale=(operands[3], 2)
        )
        checks.check_row_block_scales(("a", "a_scale", "b", "b_scale"), operands)
        if _compile_mode:
            _make_ready("fp8_1x128", operands[0], operands[2], d, accumulate=c is not None)
            return
        if c is not None and c is not d and not is_traced():  # before d is written to
            dense.check_sum("scaled_gemm", operands, d, **process.settings)
        accumulate = arguments.begin_sum(d, c)
        dense.scaled_gemm(*operands, d, accumulate=accumulate, **process.settings)
        return
    arguments.refuse_sum(c)
    arguments.check_recipes(recipe, recipe_a, recipe_b)
    if _compile_mode:
        operands = arguments.operands(a, b)
        _make_ready("fp8", operands[0], operands[2], d)
        return
    arguments.on_pairs(dense.fp8_gemm, a, b, d, **process.settings)


def _in_layout(call: Callable[..., None], layout: str, dimensions: int = 2) -> Callable[..., None]:
    """`call`, an "nt" function, for operands in another of `kinds.LAYOUTS`: they are passed on as transposed views,
    with their scales, since on Hopper FP8 is K-major."""
    majors, pairs = LAYOUTS[layout]._asdict(), call.__annotations__["a"] is Pair

    def turned(name: str, x: object) -> object:
        if majors[name] == "k":
            return x
        if not pairs:
            return _transposed(name, x, dimensions)
        codes, scale = arguments.checked_pair(name, x)
        return _transposed(name, codes, dimensions), _transposed(f"{name}'s scale", scale, dimensions)

    @wraps(call)
    def turning(a, b, *given, **named) -> None:
        call(turned("a", a), turned("b", b), *given, **named)

    turning.__name__ = turning.__qualname__ = call.__name__.replace("_nt", f"_{layout}")
    shapes = [f"`{name}` [..., k, {major}]" for name, major in majors.items() if major != "k"]
    turning.__doc__ = f"`{call.__name__}` for {' and '.join(shapes)}."
    return turning


def _transposed(name: str, x: torch.Tensor, dimensions: int) -> torch.Tensor:
    arguments.require_dimensions(**{name: (x, dimensions)})
    return x.transpose(-1, -2)


fp8_gemm_nn, fp8_gemm_tn, fp8_gemm_tt = (_in_layout(fp8_gemm_nt, layout) for layout in ("nn", "tn", "tt"))


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object = None,
) -> None:
    """`d[rows] = a[rows] @ b[g]^T` for each group g's rows, in one launch: `deep_tile.fp8_grouped_gemm` with offs.

    Groups start at multiples of `get_mk_alignment_for_contiguous_layout()`. Nothing waits for the host, and a CUDA
    graph holds for every layout.

    Args:
        a: [s, k] float8_e4m3fn and its scale [s, ceil(k / 128)], any strides.
        b: [g, n, k] float8_e4m3fn and its scale [g, ceil(n / 128), ceil(k / 128)].
        d: [s, n] bfloat16, written to. Rows outside all groups are not written, except those between two groups, which
            are undefined afterwards.
        grouped_layout: with `use_psum_layout` int32 [g], the row behind each group's last. Otherwise int32 [s], each
            row's group, or a negative number; a group is contiguous and ends after its last such row, and groups are in
            the order of `b`. DeepGEMM reads one row in 128 and takes any order; here another order is refused on the
            CPU, and on a GPU, which does not wait to check it, gives wrong rows.
        expected_m_for_psum_layout: mean rows per group, for which the kernel is chosen.
        ensure_zero_padding: means nothing on Hopper, in DeepGEMM either.
        recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, epilogue: as for `fp8_gemm_nt`.

    Raises as `deep_tile.fp8_grouped_gemm` and `fp8_gemm_nt`.
    """
    arguments.check_result(d, epilogue=epilogue)
    a, a_scale, b, b_scale = arguments.operands(a, b)
    arguments.check_recipes(recipe, recipe_a, recipe_b)
    if _compile_mode:
        _make_ready("fp8", a, b, d, "offs")
        return
    offs, options = _contiguous_groups(a, b, grouped_layout, use_psum_layout, expected_m_for_psum_layout)
    grouped.fp8_grouped_gemm(a, a_scale, b, b_scale, offs, d, **options)


def _contiguous_groups(
    a: torch.Tensor, b: torch.Tensor, grouped_layout: torch.Tensor, use_psum_layout: bool, expected: int | None
) -> tuple[torch.Tensor, dict]:
    """Group ends, and keywords for a grouped GEMM."""
    arguments.require_dimensions(a=(a, 2), b=(b, 3))
    if expected is None and not is_traced():  # on average half the alignment pads each group
        expected = max(1, a.shape[0] // max(1, b.shape[0]) - _alignment // 2)
    expected = None if expected is None else arguments.count("expected_m_for_psum_layout", expected)
    offs = grouped_layout
    if not use_psum_layout:
        offs = group_ends(grouped_layout, a.shape[0], b.shape[0], _alignment)
    return offs, {"alignment": _alignment, "expected_rows": expected, **process.settings}


m_grouped_fp8_gemm_nn_contiguous = _in_layout(m_grouped_fp8_gemm_nt_contiguous, "nn", dimensions=3)


def fp8_gemm_nt_skip_head_mid(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    head_splits: tuple[int, int, int],
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` whose columns leave a gap in each head of `d`: one GEMM and two copies.

    Args:
        head_splits: columns per head of `d` before the gap, in it, and after it.
        d: [m, heads * (left + gap + right)] bfloat16; gaps are left alone.
        a, b, recipe, compiled_dims, disable_ue8m0_cast: as there, with heads * (left + right) rows in `b`.
    """
    left, gap, right = arguments.head_splits(head_splits)
    b, _ = pair = arguments.checked_pair("b", b)
    arguments.require_dimensions(b=(b, 2), d=(d, 2))
    if b.shape[0] % (left + right) or d.shape[1] != b.shape[0] // (left + right) * (left + gap + right):
        raise ValueError(f"head_splits is {head_splits}; b has {b.shape[0]} rows and d {d.shape[1]} columns: misfit")
    product = d.new_empty(d.shape[0], b.shape[0])
    fp8_gemm_nt(a, pair, product, recipe=recipe)
    made, heads = product.unflatten(1, (-1, left + right)), d.unflatten(1, (-1, left + gap + right))
    heads[..., :left].copy_(made[..., :left])
    heads[..., left + gap :].copy_(made[..., left:])


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    epilogue: object = None,
    enable_overlap: bool = False,
    max_block_n: int = 256,
    signal: object = None,
) -> None:
    """`d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g]^T` for each group: `deep_tile.fp8_grouped_gemm` with counts.

    Args:
        a: [g, m, k] float8_e4m3fn and its scale [g, m, ceil(k / 128)], any strides, padded to 4 rows or not.
        b: [g, n, k] float8_e4m3fn and its scale [g, ceil(n / 128), ceil(k / 128)].
        d: [g, m, n] bfloat16, written to. Rows behind a group's last are left alone.
        masked_m: int32 [g], on the device: rows per group.
        expected_m: mean rows per group, for which the kernel is chosen.
        recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, epilogue: as for `fp8_gemm_nt`.
        enable_overlap, signal: of SGLang's DeepGEMM, which counts finished tiles there: only False and None.
        max_block_n: means nothing here, as it is for these.

    Raises as `deep_tile.fp8_grouped_gemm` and `fp8_gemm_nt`.
    """
    arguments.check_result(d, epilogue=epilogue)
    arguments.refuse_overlap(enable_overlap, signal)
    operands = arguments.operands(a, b)
    arguments.check_recipes(recipe, recipe_a, recipe_b)
    if _compile_mode:
        _make_ready("fp8", operands[0], operands[2], d, "counts")
        return
    grouped.fp8_grouped_gemm(*operands, out=d, **arguments.of_masked(masked_m, expected_m), **process.settings)


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    ks_cpu: list[int] | None = None,
    grouped_layout: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, SCALE_BLOCK),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    epilogue: object = None,
    ks: list[int] | None = None,
    use_padded_sf_layout: bool = False,
) -> None:
    """`d[g] = c[g] + a_g @ b_g^T` for each group g: experts' weight gradients, by `deep_tile.fp8_wgrad`.

    One launch per non-empty group, since row lengths differ. Groups too small to fill the SMs are first concatenated
    and multiplied in one `deep_tile.fp8_grouped_wgrad` launch, except under CUDA graph capture. That function takes
    operands from `deep_tile.transposed_cast_to_fp8` without a copy.

    Args:
        a: float8_e4m3fn, dense, m * sum(ks_cpu) elements: every group's [m, k_g] in order; and its scale [m,
            sum(ks_cpu) / 128], any strides.
        b: likewise with n.
        d: [g, m, n] float32, dense, written to.
        ks_cpu: k per group, on the host; multiples of 128, or 0.
        grouped_layout: means nothing here: the same numbers on the device.
        c: [g, m, n] float32 to add; it may be `d`. None: zeros.
        recipe: (1, 1, 128).
        compiled_dims: means nothing here.
        use_psum_layout, use_padded_sf_layout: only False, as in DeepGEMM on Hopper.
        epilogue: only None.
        ks: `ks_cpu` by its newer name.

    Raises as `deep_tile.fp8_wgrad` and `fp8_gemm_nt`.
    """
    ks_cpu = arguments.lengths(ks_cpu, ks)
    arguments.check_result(d, epilogue=epilogue)
    if use_padded_sf_layout:
        raise ValueError("use_padded_sf_layout must be False on Hopper: pass scales of whole blocks, without padding")
    (a, a_scale), (b, b_scale) = arguments.checked_pair("a", a), arguments.checked_pair("b", b)
    arguments.check_no_psum(use_psum_layout)
    arguments.check_recipes(recipe, of_b=quantize.TOKEN_BLOCK)
    arguments.require_dimensions(d=(d, 3), a_scale=(a_scale, 2), b_scale=(b_scale, 2))
    groups, m, n = d.shape
    arguments.check_lengths(ks_cpu, groups)
    arguments.check_flat("a", a, a_scale, m, sum(ks_cpu))
    arguments.check_flat("b", b, b_scale, n, sum(ks_cpu))
    arguments.check_gradients(d)
    products, end = [], 0
    for group, k in enumerate(ks_cpu):
        begin, end = end, end + k
        if k == 0:
            continue
        blocks = slice(begin // SCALE_BLOCK, end // SCALE_BLOCK)
        operands = []
        for x, scale, rows in ((a, a_scale, m), (b, b_scale, n)):
            operands += [x.flatten()[begin * rows : end * rows].view(rows, k), scale[:, blocks]]
        products.append((*operands, d[group]))
    if _compile_mode:
        _make_gradients_ready(products, d, c is not None)
        return
    if products and not is_traced():  # before d is written to; groups differ in k alone
        dense.check_sum("fp8_wgrad", products[0][:4], d[0], **process.settings)
    adds = arguments.begin_sum(d, c)
    is_recorded = is_traced() or (d.is_cuda and torch.cuda.is_current_stream_capturing())
    is_e4m3 = a.dtype == b.dtype == quantize.FP8_DTYPE  # as one launch for all groups takes it
    if len(products) > 1 and _leaves_sms_idle(m, n) and is_e4m3 and not is_recorded:
        rows = _side_by_side(a, m, ks_cpu), a_scale, _side_by_side(b, n, ks_cpu), b_scale
        wgrad.fp8_grouped_wgrad(*rows, ends_of(ks_cpu, d.device), d, accumulate=adds, **process.settings)
        return
    if not adds:
        d.zero_()
    for product in products:
        dense.fp8_wgrad(*product, **process.settings)


def _make_gradients_ready(products: list, d: torch.Tensor, adds: bool) -> None:
    """Compile kernels for separate launches and for one launch."""
    for x, _, y, _, out in products:
        _make_ready("fp8_1x128", x, y, out, accumulate=True)
    m, n = d.shape[1:]
    if len(products) > 1 and _leaves_sms_idle(m, n):
        what = {"kind": "fp8_1x128", "out_dtype": d.dtype, "accumulate": adds, "num_sms": process.settings["num_sms"]}
        api.precompile([(m, n, 1)], grouping="k_offs", **what)


def _leaves_sms_idle(m: int, n: int) -> bool:
    """Whether a GEMM of this size has fewer than two tiles per SM."""
    return ceil_div(m, SCALE_BLOCK) * ceil_div(n, SCALE_BLOCK) < 2 * H200.num_sms


def _side_by_side(x: torch.Tensor, rows: int, lengths: list[int]) -> torch.Tensor:
    """Every group's [rows, k_g] concatenated to [rows, sum k_g]."""
    parts = x.flatten().view(torch.uint8).split([rows * k for k in lengths])
    return torch.cat([part.view(rows, k) for part, k in zip(parts, lengths, strict=True)], 1).view(x.dtype)


def fp8_einsum(
    expr: str,
    a: Pair,
    b: Pair,
    d: torch.Tensor | Pair,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, SCALE_BLOCK, SCALE_BLOCK),
    epilogue: object = None,
    use_128x4_sfd_layout: bool = False,
) -> None:
    """`d[:, h] = a[:, h] @ b[h]^T` for each head h: DeepSeek-V4's grouped output projection.

    One launch if heads are contiguous in `a` and `d` (`x.transpose(0, 1)` for a dense [heads, rows, k]).
    Where they alternate, row by row, few rows are copied into that order, and the results back, in two more launches;
    many rows are multiplied head by head, without copies.

    Args:
        expr: "bhr,hdr->bhd".
        a: [rows, heads, k] float8_e4m3fn and its scale [rows, heads, ceil(k / 128)], any strides that products take.
        b: [heads, n, k] float8_e4m3fn and its scale [heads, ceil(n / 128), ceil(k / 128)].
        d: [rows, heads, n] bfloat16, written to. Or, dense, the same in float8_e4m3fn and a scale [rows, heads,
            ceil(n / 128)] float32: then the product, in bfloat16, is cast as `per_token_cast_to_fp8` does.
        c, epilogue: only None.
        recipe: (1, 128, 128).
        use_128x4_sfd_layout: only False; the other scale layout is Blackwell's.

    Raises as `deep_tile.fp8_grouped_gemm` and `fp8_gemm_nt`; or another `expr`.
    """
    if expr != "bhr,hdr->bhd":
        raise ValueError(f"expr is {expr!r}; on Hopper it is 'bhr,hdr->bhd'")
    arguments.check_result(d, epilogue=epilogue)
    if use_128x4_sfd_layout:
        raise ValueError("use_128x4_sfd_layout is Blackwell's; on Hopper scales are dense: leave it out")
    a, a_scale, b, b_scale = arguments.operands(a, b)
    pair = d if isinstance(d, (tuple, list)) else None
    if pair is not None:
        arguments.check_cast_result(*arguments.checked_pair("d", pair))
        d = pair[0].new_empty(pair[0].shape, dtype=torch.bfloat16)
    arguments.refuse_sum(c)
    arguments.check_recipes(recipe)
    arguments.require_dimensions(a=(a, 3), a_scale=(a_scale, 3), b=(b, 3), d=(d, 3))
    for name, x in (("a's scale", a_scale), ("d", d)):
        if x.shape[:2] != a.shape[:2]:
            raise ValueError(f"{name} is {list(x.shape)}; it must be [rows, heads, ...] as a is, {list(a.shape)}")
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"b is {list(b.shape)}; it must be [heads, n, k] for a of {list(a.shape)}, [rows, heads, k]")
    a, a_scale, out = a.transpose(0, 1), a_scale.transpose(0, 1), d.transpose(0, 1)
    if _compile_mode:
        _make_ready("fp8", a, b, d, "none" if sums.goes_by_head(a, out) else "counts")
        return
    sums.multiply_heads((a, a_scale, b, b_scale), out, dense.fp8_gemm, grouped.fp8_grouped_gemm, **process.settings)
    if pair is not None:
        rounding = {"exact": "reciprocal", "amax_floor": quantize.DEEP_GEMM_AMAX_FLOOR}
        quantize.per_token_cast_to_fp8(d, out=pair[0], scale_out=pair[1], **rounding)


# BF16.


def einsum(
    expr: str,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    use_cublaslt: bool = False,
) -> None:
    """`deep_tile.einsum(expr, a, b, d)`: BF16 contractions.

    Args:
        expr: "bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr" or "bhd,bhr->hdr".
        a, b: 3-D bfloat16.
        d: written to: bfloat16 or float32.
        c: float32 to add, for a sum over b; it may be `d`. None: nothing.
        use_cublaslt: means nothing here.

    Raises as `deep_tile.einsum`.
    """
    arguments.check_result(d)
    if _compile_mode:
        if expr != "bmk,bnk->mn":
            raise ValueError(f"set_compile_mode(1) does not cover {expr!r}: call it once instead")
        thin.precompile_thin()
        return
    if c is not None and c is not d and not is_traced():  # before d is written to
        sums.check_sum(expr, a, b, d, **process.settings)
    accumulate = arguments.begin_sum(d, c)
    sums.einsum(expr, a, b, d, accumulate=accumulate, **process.settings)


def tf32_hc_prenorm_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    sqr_sum: torch.Tensor,
    num_splits: int | None = None,
) -> None:
    """`d = a @ b^T` and the rows' sums of squares: `deep_tile.prenorm_gemm`, in FP32 precision.

    Args:
        a: [m, k] bfloat16.
        b: [n, k] float32.
        d: [m, n] float32, or [num_splits, m, n], written to.
        sqr_sum: [m] float32, or [num_splits, m], written to.
        num_splits: K parts to return; None: they are added.

    Raises as `deep_tile.prenorm_gemm`.
    """
    for name, result in (("d", d), ("sqr_sum", sqr_sum)):
        arguments.check_result(result, name=name)
    if _compile_mode:
        thin.precompile_thin()
        return
    thin.prenorm_gemm(a, b, d, sqr_sum, num_splits=num_splits, **process.settings)


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
    alpha: float | None = None,
    epilogue: object = None,
) -> None:
    """`d = a @ b^T`, or `d = c + a @ b^T`: `deep_tile.gemm(a, b, d)`.

    Args:
        a, b: [m, k] and [n, k] bfloat16, each along k or along its rows, as `deep_tile.gemm` takes them.
        d: [m, n], written to: bfloat16, or float32.
        c: None, or a float32 [m, n] to add, which may be `d`; then `d` is float32 too.
        compiled_dims: means nothing here.
        alpha, epilogue: only None (alpha also 1), as in DeepGEMM on Hopper.

    Raises as `deep_tile.gemm`.
    """
    arguments.check_result(d, alpha, epilogue)
    if _compile_mode:
        _make_ready("bf16", a, b, d, accumulate=c is not None)
        return
    if c is not None and c is not d and not is_traced():  # before d is written to
        dense.check_sum("gemm", (a, b), d, **process.settings)
    accumulate = arguments.begin_sum(d, c)
    dense.gemm(a, b, d, accumulate=accumulate, **process.settings)


bf16_gemm_nn, bf16_gemm_tn, bf16_gemm_tt = (_in_layout(bf16_gemm_nt, layout) for layout in ("nn", "tn", "tt"))


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object = None,
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` in BF16: `deep_tile.grouped_gemm` with offs.

    Args:
        a, b: [s, k] and [g, n, k] bfloat16.
        d: [s, n] bfloat16 or float32, written to.
        grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout, epilogue: as
            there.

    Raises as `deep_tile.grouped_gemm`.
    """
    arguments.check_result(d, epilogue=epilogue)
    if _compile_mode:
        _make_ready("bf16", a, b, d, "offs")
        return
    offs, options = _contiguous_groups(a, b, grouped_layout, use_psum_layout, expected_m_for_psum_layout)
    grouped.grouped_gemm(a, b, offs, d, **options)


m_grouped_bf16_gemm_nn_contiguous = _in_layout(m_grouped_bf16_gemm_nt_contiguous, "nn", dimensions=3)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
    epilogue: object = None,
) -> None:
    """`m_grouped_fp8_gemm_nt_masked` in BF16: `deep_tile.grouped_gemm` with counts.

    Args:
        a, b: [g, m, k] and [g, n, k] bfloat16.
        d: [g, m, n] bfloat16 or float32, written to.
        masked_m, expected_m, compiled_dims, epilogue: as there.

    Raises as `deep_tile.grouped_gemm`.
    """
    arguments.check_result(d, epilogue=epilogue)
    if _compile_mode:
        _make_ready("bf16", a, b, d, "counts")
        return
    grouped.grouped_gemm(a, b, out=d, **arguments.of_masked(masked_m, expected_m), **process.settings)


def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    ks_cpu: list[int] | None = None,
    grouped_layout: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    epilogue: object = None,
    ks: list[int] | None = None,
) -> None:
    """`d[g] = c[g] + a_g^T @ b_g` for each row group g: experts' weight gradients, by `deep_tile.gemm`.

    One launch for each group that has any rows, as many as `ks_cpu` says.

    Args:
        a, b: [sum(ks_cpu), m] and [sum(ks_cpu), n] bfloat16, groups in order.
        d: [g, m, n] float32, dense, written to.
        ks_cpu: rows per group, on the host; any non-negative numbers.
        grouped_layout, compiled_dims: mean nothing here.
        c: [g, m, n] float32 to add; it may be `d`. None: zeros.
        use_psum_layout: only False, as in DeepGEMM on Hopper.
        epilogue: only None.
        ks: `ks_cpu` by its newer name.

    Raises as `deep_tile.gemm`.
    """
    ks_cpu = arguments.lengths(ks_cpu, ks)
    arguments.check_result(d, epilogue=epilogue)
    arguments.check_no_psum(use_psum_layout)
    arguments.require_dimensions(a=(a, 2), b=(b, 2), d=(d, 3))
    groups, m, n = d.shape
    arguments.check_lengths(ks_cpu, groups, multiple=1)
    rows = sum(ks_cpu)
    for name, x, columns in (("a", a, m), ("b", b, n)):
        if tuple(x.shape) != (rows, columns):
            raise ValueError(f"{name} is {list(x.shape)}; for ks_cpu and d it must be {[rows, columns]}")
    arguments.check_gradients(d)
    of_groups = zip(a.split(ks_cpu), b.split(ks_cpu), d, strict=True)
    products = [(x.t(), y.t(), out) for x, y, out in of_groups if len(x)]
    if _compile_mode:
        for x, y, out in products:
            _make_ready("bf16", x, y, out, accumulate=True)
        return
    if not is_traced():  # before d is written to: the longest group shows strides, which single rows have not
        tensors.require_plain(a=a, b=b, d=d)
        longest = sorted(products, key=lambda product: -product[0].shape[1])[:1]
        for x, y, out in longest + [each for each in products if not all(map(tensors.is_aligned, each[:2]))]:
            dense.check_sum("gemm", (x, y), out, **process.settings)
    if not arguments.begin_sum(d, c):
        d.zero_()
    for product in products:
        dense.gemm(*product, accumulate=True, **process.settings)


fp8_fp4_gemm_nn, fp8_fp4_gemm_tn, fp8_fp4_gemm_tt = fp8_gemm_nn, fp8_gemm_tn, fp8_gemm_tt
fp8_fp4_gemm_nt = gemm_fp8_fp8_bf16_nt = fp8_gemm_nt
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_gemm_fp8_fp8_bf16_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
m_grouped_gemm_fp8_fp8_bf16_nt_masked = m_grouped_fp8_gemm_nt_masked
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked
cublaslt_gemm_nt, cublaslt_gemm_nn = bf16_gemm_nt, bf16_gemm_nn
cublaslt_gemm_tn, cublaslt_gemm_tt = bf16_gemm_tn, bf16_gemm_tt
calc_diff = cosine_difference


def _make_ready(
    kind: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouping: str = "none", accumulate: bool = False
) -> None:
    """Compile and load, without a launch, kernels for this GEMM with fewer rows, or more up to the next power of
    two."""
    (n, k), num_sms = b.shape[-2:], process.settings["num_sms"]
    lies_along_k = [x.shape[-1] < 2 or x.stride(-1) == 1 for x in (a, b)]
    layout = ("n" if lies_along_k[0] else "t") + ("t" if lies_along_k[1] else "n")
    what = {"kind": kind, "out_dtype": d.dtype, "accumulate": accumulate, "grouping": grouping, "num_sms": num_sms}
    key, rows = (n, k, layout, *what.values()), 1 << max(a.shape[-2] - 1, 0).bit_length()
    if rows > _ready.get(key, 0):
        api.precompile([(n, k, rows)], layouts=[layout], **what)
        _ready[key] = rows


def get_compile_mode() -> int:
    """The value from `set_compile_mode`; 0 before."""
    return _compile_mode


def set_compile_mode(mode: int) -> None:
    """1: products from now on, in this process, are compiled and loaded, and not launched: nothing is written to `d`.
    0: they are multiplied."""
    global _compile_mode
    if as_int(mode) not in (0, 1):
        raise ValueError(f"mode is {mode!r}; pass 1 to compile and load kernels without launching them, or 0")
    _compile_mode = as_int(mode)


def get_mk_alignment_for_contiguous_layout() -> int:
    """Row alignment of groups in contiguous layouts."""
    return _alignment


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Any power of two that `deep_tile.fp8_grouped_gemm` takes; small ones waste less memory, and cost no time here."""
    global _alignment
    number = as_int(alignment)
    check_alignment(alignment if number is None else number)
    _alignment = number


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """128, as on every Hopper GPU: the alignment for which engines lay out groups."""
    return SCALE_BLOCK


get_m_alignment_for_contiguous_layout = get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def use_deterministic_algorithms(enabled: bool = True) -> None:
    """Nothing to do: products give the same bits every time."""


def get_deterministic_algorithms() -> bool:
    return True


def set_ignore_compile_dims(*_: object) -> None:
    """Nothing to do, as for `compiled_dims`: kernels know no sizes."""


def set_block_size_multiple_of(*_: object) -> None:
    """Nothing to do: results do not depend on tiles."""


def set_tc_util(percent: int) -> None:
    """Tensor core share for DeepGEMM on Blackwell; always 100 here."""


def get_tc_util() -> int:
    return 100


def init(*_: object) -> None:
    """Nothing to do: no header folder or toolkit is needed."""


def shutdown() -> None:
    """Nothing to do: there are no handles."""


cell_div = ceil_div

fp8_mqa_logits, fp8_fp4_mqa_logits = indexer.fp8_mqa_logits, indexer.fp8_fp4_mqa_logits
fp8_paged_mqa_logits, fp8_fp4_paged_mqa_logits = indexer.fp8_paged_mqa_logits, indexer.fp8_fp4_paged_mqa_logits
get_paged_mqa_logits_metadata = indexer.get_paged_mqa_logits_metadata

_OF_MATH = (
    *("align", "ceil_div", "cell_div", "per_token_cast_to_fp8", "per_block_cast_to_fp8", "per_channel_cast_to_fp8"),
)
_OF_LAYOUT = (
    *("get_tma_aligned_size", "get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor"),
    *("get_mk_alignment_for_contiguous_layout", "set_mk_alignment_for_contiguous_layout"),
    *("get_m_alignment_for_contiguous_layout", "get_k_alignment_for_contiguous_layout"),
    "get_theoretical_mk_alignment_for_contiguous_layout",
)
_OF_NUMERIC = ("calc_diff", "count_bytes")

_SUBMODULES = {
    "utils": (*_OF_MATH, *_OF_LAYOUT),
    "utils.math": _OF_MATH,
    "utils.layout": _OF_LAYOUT,
    "utils.dist": (),
    "testing": _OF_NUMERIC,
    "testing.numeric": _OF_NUMERIC,
    "testing.bench": (),
    "testing.utils": (),
}
"""DeepGEMM's submodules, packages before their contents, and the names that they have here."""


_displaced: dict[str, ModuleType] = {}
"""The real package's modules by their names, while it is installed over."""


def install(force: bool = False) -> None:
    """Make `import deep_gemm` find this module, with DeepGEMM's submodules, in this process.

    Names that are DeepGEMM's alone, such as mega MoE's, are answered by the real one, if it is installed or if
    vLLM brings it along. It is imported when such a name is first asked for. Earlier imports keep the module they have.

    Args:
        force: also replace an imported or installed DeepGEMM.

    Raises:
        RuntimeError: the real package is imported or installed, unless `force`.
    """
    present = sys.modules.get("deep_gemm")
    if getattr(present, "__version__", None) == __version__:
        return
    if not force and (present is not None or importlib.util.find_spec("deep_gemm") is not None):
        raise RuntimeError("deep_gemm is installed here: pass force=True to replace it by deep_tile")
    original.keep(present)
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_gemm"]:
        _displaced[name] = sys.modules.pop(name)
    ours = sys.modules[__name__]
    _add_module("deep_gemm", [name for name in vars(ours) if not name.startswith("_")] + ["__version__"])
    for name, members in _SUBMODULES.items():
        _add_module(f"deep_gemm.{name}", members)


def uninstall() -> None:
    """Undo `install()`; names imported meanwhile keep working."""
    if getattr(sys.modules.get("deep_gemm"), "__version__", None) == __version__:
        for name in ("deep_gemm", *(f"deep_gemm.{name}" for name in _SUBMODULES)):
            sys.modules.pop(name, None)
        sys.modules.update(_displaced)
        _displaced.clear()


def _add_module(name: str, members: Sequence[str]) -> None:
    """Add a module with these members, which importlib finds, to its package."""
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package=name in ("deep_gemm", "deep_gemm.utils", "deep_gemm.testing"))
    module.__path__ = []
    module.__getattr__ = partial(_find_name, name)
    for member in members:
        setattr(module, member, globals()[member])
    sys.modules[name] = module
    package, _, own = name.rpartition(".")
    if package:
        setattr(sys.modules[package], own, module)


def _find_name(module: str, name: str) -> object:
    """Fallback for missing names: DeepGEMM's own, from the module that `module` stands for."""
    if name.startswith("_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    try:
        return original.find("deep_gemm" if module == __name__ else module, name)
    except AttributeError as error:
        reason = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: deep_tile, which takes DeepGEMM's place here, has no {name}"
            f"{reason}, {error}. deep_tile.compat.deep_gemm.uninstall() restores the name deep_gemm"
        ) from None


__getattr__ = partial(_find_name, __name__)
