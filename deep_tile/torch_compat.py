"""torch's scaled GEMM functions on deep_tile's kernels: change one import.

Calls dense.py and grouped.py. Invariant: arguments mean what they mean in the function with this name in
`torch.nn.functional`; arguments without a kernel are refused.
"""

from collections.abc import Collection, Sequence

import torch
from torch.nn.functional import ScalingType, SwizzleType

from deep_tile import dense, finishes, grouped, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div

# Names, since Dynamo of torch 2.10 and 2.11 compares no members of ScalingType and SwizzleType, and of 2.12 reads none.
_TENSOR, _ROWS = ScalingType.TensorWise.name, ScalingType.RowWise.name
_TOKENS, _WEIGHTS = ScalingType.BlockWise1x128.name, ScalingType.BlockWise128x128.name
_UNSWIZZLED = SwizzleType.NO_SWIZZLE.name
_RECIPES = ((_TENSOR, _TENSOR), (_ROWS, _ROWS), (_TOKENS, _TOKENS), (_TOKENS, _WEIGHTS), (_WEIGHTS, _TOKENS))
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | Sequence[torch.Tensor],
    scale_recipe_a: ScalingType | Sequence[ScalingType],
    scale_b: torch.Tensor | Sequence[torch.Tensor],
    scale_recipe_b: ScalingType | Sequence[ScalingType],
    swizzle_a: SwizzleType | Sequence[SwizzleType] | None = None,
    swizzle_b: SwizzleType | Sequence[SwizzleType] | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_mm` for every recipe that torch has on Hopper: `(mat_a scaled) @ (mat_b scaled)`.

    Scales are per tensor, per row, 1x128 blocks, or 1x128 for one operand and 128x128 for the other. Scales may have
    torch's layout, or any other strides, with or without its padding. If `mat_a` has 128x128 blocks, the transposed
    GEMM is computed and a torch kernel transposes the result. Any m and n, and k in multiples of 16.

    Args:
        mat_a: [m, k] float8_e4m3fn or float8_e5m2, unit stride along k.
        mat_b: [k, n] in either dtype, unit stride along k: `w.t()` for a weight [n, k].
        scale_a, scale_b: float32, bfloat16, float16 or float8_e8m0fnu. Per tensor one number; per row [m, 1] and [1,
            n], or without the 1; for 1x128 blocks [m or n, ceil(k / 128)]; for 128x128 blocks [ceil(k / 128), ceil(m or
            n / 128)], where the first may be rounded up to a multiple of 4.
        scale_recipe_a, scale_recipe_b: TensorWise both, RowWise both, BlockWise1x128 both, or BlockWise1x128 and
            BlockWise128x128, either way round.
        swizzle_a, swizzle_b: None or NO_SWIZZLE.
        bias: [n] bfloat16, float16 or float32, added in FP32 before rounding; if `mat_a` has 128x128 blocks, a torch
            kernel adds it to the rounded result.
        output_dtype: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2; `mat_a`'s when None. torch kernels
            convert an FP8 result from FP32 with saturation.
        contraction_dim: nothing, or (1, 0).
        use_fast_accum: with per-tensor or per-row scales, tensor cores accumulate all k with about 14 bits. Without it,
            and always with blocks, sums over 128 k are promoted to FP32.

    Returns a contiguous tensor [m, n].

    Raises:
        TypeError, ValueError: an argument that is not as listed.
        RuntimeError: as `deep_tile.fp8_gemm`.
    """
    recipes = (
        _name("scale_recipe_a", scale_recipe_a, ScalingType),
        _name("scale_recipe_b", scale_recipe_b, ScalingType),
    )
    _check_recipes(recipes, _RECIPES)
    _check_options(swizzle_a, swizzle_b, output_dtype, (*finishes.OUTPUT_NAMES, *_FP8, None))
    _check_contraction(contraction_dim, ((), (1, 0)), "mat_a is [m, k] and mat_b [k, n]")
    _check_matrices(mat_a, mat_b)
    rows_a, rows_b = mat_a, mat_b.t()
    scale_a = _scale("a", _single("scale_a", scale_a), recipes[0], rows_a)
    scale_b = _scale("b", _single("scale_b", scale_b), recipes[1], rows_b)
    _check_bias(bias, rows_b)
    result_dtype = output_dtype or mat_a.dtype
    wide_dtype = torch.float32 if result_dtype in _FP8 else result_dtype
    if recipes == (_WEIGHTS, _TOKENS):
        out = _multiply_blocks(rows_b, scale_b, rows_a, scale_a, _WEIGHTS, out_dtype=wide_dtype).t().contiguous()
        out = out if bias is None else out.add_(bias)
    elif recipes in ((_TENSOR, _TENSOR), (_ROWS, _ROWS)):
        options = {"bias": bias, "out_dtype": wide_dtype, "fast_accum": use_fast_accum}
        out = dense.scaled_gemm(rows_a, scale_a, rows_b, scale_b, **options)
    else:
        out = _multiply_blocks(rows_a, scale_a, rows_b, scale_b, recipes[1], bias=bias, out_dtype=wide_dtype)
    return _saturated(out, result_dtype) if result_dtype in _FP8 else out


def _multiply_blocks(a, a_scale, b, b_scale, recipe_of_b: str, **options) -> torch.Tensor:
    is_fp8_gemm = recipe_of_b == _WEIGHTS and a.dtype == b.dtype == torch.float8_e4m3fn
    return (dense.fp8_gemm if is_fp8_gemm else dense.scaled_gemm)(a, a_scale, b, b_scale, **options)


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converted to FP8 with saturation; torch's own conversion turns overflow into NaN."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | Sequence[torch.Tensor],
    scale_recipe_a: ScalingType | Sequence[ScalingType],
    scale_b: torch.Tensor | Sequence[torch.Tensor],
    scale_recipe_b: ScalingType | Sequence[ScalingType],
    swizzle_a: SwizzleType | Sequence[SwizzleType] | None = None,
    swizzle_b: SwizzleType | Sequence[SwizzleType] | None = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_grouped_mm` for row groups, with per-row scales, or block scales, which torch lacks
    on Hopper.

    Each row group of `mat_a` is multiplied by its own matrix. Scales are laid out as for `scaled_mm`, per group.

    Args:
        mat_a: [s, k] with `offs`, or [g, m, k] without, float8_e4m3fn or float8_e5m2, unit stride along k.
        mat_b: [g, k, n] in either dtype, unit stride along k: `w.transpose(1, 2)` for weights [g, n, k].
        scale_a: float32, bfloat16, float16 or float8_e8m0fnu: [s] or [g, m] for each row, or [s, ceil(k / 128)] or
            [g, m, ceil(k / 128)].
        scale_b: likewise: [g, n], or [g, ceil(k / 128), ceil(n / 128)], where ceil(k / 128) may be rounded up to a
            multiple of 4.
        scale_recipe_a, scale_recipe_b: RowWise both, or BlockWise1x128 and BlockWise128x128.
        bias: only None.
        offs: int32 [g] on the device: the row behind each group's last. Rows behind the last group hold anything.
        contraction_dim: nothing.
        output_dtype: bfloat16, float16 or float32.
        swizzle_a, swizzle_b, use_fast_accum: as for `scaled_mm`.

    Returns a contiguous tensor [s, n] or [g, m, n]. Raises as `scaled_mm`.
    """
    recipes = (
        _name("scale_recipe_a", scale_recipe_a, ScalingType),
        _name("scale_recipe_b", scale_recipe_b, ScalingType),
    )
    _check_recipes(recipes, [(_ROWS, _ROWS), (_TOKENS, _WEIGHTS)])
    _check_options(swizzle_a, swizzle_b, output_dtype, tuple(finishes.OUTPUT_NAMES))
    _check_no_bias(bias)
    _check_contraction(contraction_dim, ((),), "groups are of rows")
    _check_groups(mat_a, mat_b, offs, _FP8)
    weights = mat_b.transpose(1, 2)
    scale_a = _scale("a", _single("scale_a", scale_a), recipes[0], mat_a)
    scale_b = _scale("b", _single("scale_b", scale_b), recipes[1], weights)
    options = {"out_dtype": output_dtype, "fast_accum": use_fast_accum}
    return grouped.scaled_grouped_gemm(mat_a, scale_a, weights, scale_b, offs, **options)


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm` for row groups: each group of `mat_a` is multiplied by its own matrix.

    Args:
        mat_a: [s, k] with `offs`, or [g, m, k] without, bfloat16 or float16, unit stride along k.
        mat_b: [g, k, n] in the same dtype, unit stride along k or n: `w.transpose(1, 2)` for weights [g, n, k], or
            weights [g, k, n], where several groups need k to be a multiple of 64.
        offs: int32 [g] on the device: the row behind each group's last. Rows behind the last group hold anything.
        bias: only None.
        out_dtype: bfloat16, float16 or float32; `mat_a`'s when None.

    Returns a contiguous tensor [s, n] or [g, m, n]. Raises as `scaled_mm`, and as `deep_tile.grouped_gemm` for an
    operand that requires a gradient.
    """
    _check_no_bias(bias)
    _check_groups(mat_a, mat_b, offs, (torch.bfloat16, torch.float16))
    return grouped.grouped_gemm(mat_a, mat_b.transpose(1, 2), offs, out_dtype=out_dtype)


def _check_no_bias(bias: object) -> None:
    if bias is not None:
        raise ValueError("bias is given; grouped GEMMs have no bias. Add it to the result, and pass None")


def _check_options(swizzle_a: object, swizzle_b: object, output_dtype: object, known: tuple[torch.dtype, ...]) -> None:
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if swizzle not in (None, [], ()) and _name(name, swizzle, SwizzleType) != _UNSWIZZLED:
            raise ValueError(f"{name} is {swizzle}; scales on Hopper are not swizzled. Pass None")
    if output_dtype not in known:
        raise ValueError(
            f"output_dtype is {output_dtype}; pass {finishes.names(known)}, and convert the result with .to()"
        )


def _single(name: str, value: object) -> object:
    """A list, which torch takes for multi-level recipes, has one element."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} has {len(value)} entries; scales on Hopper have one level. Pass one")
    return value[0]


def _name(argument: str, value: object, enum: type[ScalingType | SwizzleType]) -> str:
    """The name of the one member of `enum` that is given."""
    member = _single(argument, value)
    return member.name if isinstance(member, enum) else repr(member)


def _check_recipes(recipes: tuple[str, str], known: Collection[tuple[str, str]]) -> None:
    if recipes not in known:
        wanted = ", or ".join(" x ".join(one) for one in known)
        raise ValueError(
            f"scale_recipe_a x scale_recipe_b is {' x '.join(recipes)}; deep_tile has {wanted}. Quantise so, or "
            "call torch's own function"
        )


def _check_groups(mat_a: object, mat_b: object, offs: object, dtypes: tuple[torch.dtype, ...]) -> None:
    remedy = "Quantise it" if dtypes == _FP8 else f"Pass {dtypes[0]}, and groups of rows: others are left to torch"
    _check_operand("mat_a", mat_a, (2, 3), dtypes, remedy)
    _check_operand("mat_b", mat_b, (3,), dtypes, remedy)
    if mat_a.shape[-1] != mat_b.shape[1]:
        raise ValueError(
            f"mat_a is {list(mat_a.shape)} and mat_b [g, k, n] = {list(mat_b.shape)}: k differs. Pass "
            "w.transpose(1, 2) of weights [g, n, k]"
        )
    if (offs is None) != (mat_a.dim() == 3):
        raise ValueError(
            f"offs is {'missing' if offs is None else 'given'}, and mat_a is {list(mat_a.shape)}; pass the ends of "
            "groups with rows [s, k], and none with [g, m, k]"
        )


def _check_operand(
    name: str, matrix: object, dimensions: tuple[int, ...], dtypes: tuple[torch.dtype, ...], remedy: str = "Quantise it"
) -> None:
    if not isinstance(matrix, torch.Tensor) or matrix.dtype not in dtypes or matrix.dim() not in dimensions:
        seen = f"{list(matrix.shape)} of {matrix.dtype}" if isinstance(matrix, torch.Tensor) else f"{matrix!r}"
        wanted = [" or ".join(map(str, known)) for known in (dtypes, dimensions)]
        if isinstance(matrix, torch.Tensor) and matrix.dtype not in dtypes:
            takers = dict.fromkeys(_FP8, "torch_compat.scaled_grouped_mm")
            remedy = f"To fix: {tensors.operand_remedy(name, matrix, dtypes, takers, remedy)}"
        raise TypeError(f"{name} is {seen}; it must be of {wanted[0]} and {wanted[1]} dimensions. {remedy}")


def _check_contraction(dims: object, known: Sequence[tuple[int, ...]], why: str) -> None:
    if not isinstance(dims, Sequence) or tuple(dims) not in known:
        raise ValueError(f"contraction_dim is {dims}; {why}: leave it out")


def _check_matrices(mat_a: object, mat_b: object) -> None:
    for name, matrix in (("mat_a", mat_a), ("mat_b", mat_b)):
        _check_operand(name, matrix, (2,), _FP8)
    if mat_a.shape[1] != mat_b.shape[0]:
        raise ValueError(
            f"mat_a is [m, k] = {list(mat_a.shape)} and mat_b [k, n] = {list(mat_b.shape)}: k differs. Pass w.t() of a "
            "weight [n, k]"
        )
    if mat_b.shape[0] > 1 and mat_b.stride(0) != 1:
        raise ValueError(
            f"mat_b's strides are {mat_b.stride()}; it must have a unit stride along k. Pass w.t() of a weight [n, k], "
            "or mat_b.t().contiguous().t()"
        )


def _check_bias(bias: object, rows_b: torch.Tensor) -> None:
    if bias is not None and (not isinstance(bias, torch.Tensor) or tuple(bias.shape) != (rows_b.shape[0],)):
        seen = list(bias.shape) if isinstance(bias, torch.Tensor) else repr(bias)
        raise ValueError(f"bias is {seen}; it must be a tensor [n] = [{rows_b.shape[0]}], or None")
    finishes.check_bias_kind(bias)
    finishes.check_finish(bias, None, rows_b)
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("bias requires a gradient, and scaled_mm has none: call within torch.no_grad()")


def _scale(letter: str, scale: object, recipe: str, rows: torch.Tensor) -> torch.Tensor:
    """The scale for [..., rows, k], from torch's layout for its recipe to ours."""
    if not isinstance(scale, torch.Tensor) or scale.dtype not in tensors.SCALE_DTYPES:
        is_tensor = isinstance(scale, torch.Tensor)
        seen = scale.dtype if is_tensor else repr(scale)
        remedy = tensors.scale_remedy(f"scale_{letter}", scale) if is_tensor else "pass one"
        raise TypeError(f"scale_{letter} is {seen}; it must be a tensor of {tensors.SCALE_NAMES}. To fix: {remedy}")
    *groups, m, k = rows.shape
    k_blocks = ceil_div(k, SCALE_BLOCK)
    if recipe == _TENSOR:
        shapes = [(1,) * scale.dim()]
    elif recipe == _ROWS:
        shapes = [(*groups, m, 1), (*groups, 1, m), (*groups, m)]
    elif recipe == _TOKENS:
        shapes = [(*groups, m, k_blocks)]
    else:
        row_blocks = ceil_div(m, SCALE_BLOCK)
        shapes = [(*groups, blocks, row_blocks) for blocks in (k_blocks, ceil_div(k_blocks, 4) * 4)]
    if not _is_one_of(scale.shape, shapes):
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        is_transposed = scale.dim() > 1 and _is_one_of(scale.transpose(-1, -2).shape, shapes)
        remedy = f"It looks transposed: pass scale_{letter}.transpose(-1, -2)" if is_transposed else "Quantise so"
        raise ValueError(f"scale_{letter} is {list(scale.shape)}; for {recipe} it must be {wanted}. {remedy}")
    return scale[..., :k_blocks, :].transpose(-1, -2) if recipe == _WEIGHTS else scale


def _is_one_of(shape: Sequence[int], known: Sequence[tuple[int, ...]]) -> bool:
    """Compared size by size, since tracers compare symbolic sizes but not tuples."""
    return any(
        len(shape) == len(one) and all(size == wanted for size, wanted in zip(shape, one, strict=True)) for one in known
    )
