"""DeepGEMM's scale layouts, FP8 casts and small helpers, by its names."""

import torch

from deep_tile import quantize, tensors, transposed
from deep_tile.compat.arguments import Pair, blocks_of
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """`x` elements, rounded up to a multiple of 16 bytes."""
    return round_up(x, tensors.ALIGNMENT_BYTES // element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """A float32 scale [..., mn, k] with strides (1, mn rounded up to 4); unchanged if it has them.

    deep_tile's products take any strides, so they need no such copy.
    """
    _require_scale(sf)
    if sf.dtype != torch.float32 or sf.dim() not in (2, 3):
        remedy = "" if sf.dtype in tensors.SCALE_DTYPES else f". To fix: {tensors.scale_remedy('sf', sf)}"
        wanted = "[mn, k] or [g, mn, k] of torch.float32"
        raise ValueError(f"sf is {list(sf.shape)} of {sf.dtype}; it must be {wanted}{remedy}")
    *groups, mn, k = sf.shape
    rows = get_tma_aligned_size(mn, sf.element_size())
    if sf.stride()[-2:] == (1, rows) and (not groups or sf.stride(0) == rows * k):
        return sf
    padded = torch.zeros(*groups, k, rows, dtype=sf.dtype, device=sf.device)
    return padded.transpose(-1, -2)[..., :mn, :].copy_(sf)


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scale in the layout of DeepGEMM's Hopper kernels: 1x128 blocks MN-major and aligned, 128x128 unchanged.

    Args:
        sf: float32 [mn / block rows, k / 128], with a leading dimension `num_groups` if given.
        recipe: a block's (rows, 128), or (rows in a, rows in b, 128) with `is_sfa` to select.

    Raises:
        TypeError: `sf` is no tensor, or `recipe` no tuple.
        ValueError: another recipe, or a shape that does not fit.
    """
    _require_scale(sf)
    recipe = blocks_of("recipe", recipe)
    if len(recipe) == 3 and is_sfa is None:
        raise ValueError(f"recipe is {recipe}; with three numbers, is_sfa must say whose scale this is")
    block = (recipe[0 if is_sfa else 1], recipe[2]) if len(recipe) == 3 else recipe
    if block not in (quantize.TOKEN_BLOCK, quantize.WEIGHT_BLOCK):
        raise ValueError(f"recipe is {recipe}: blocks of {block}; on Hopper they are 1x128 or 128x128")
    shape = (*([] if num_groups is None else [num_groups]), ceil_div(mn, block[0]), ceil_div(k, block[1]))
    if tuple(sf.shape) != shape or sf.dtype != torch.float32:
        wanted = f"for mn = {mn}, k = {k} it must be {list(shape)} of float32"
        raise ValueError(f"sf is {list(sf.shape)} of {sf.dtype}; {wanted}")
    return get_mn_major_tma_aligned_tensor(sf) if block == quantize.TOKEN_BLOCK else sf


def _require_scale(sf: object) -> None:
    if not isinstance(sf, torch.Tensor):
        raise tensors.no_tensor("sf", sf, "pass an operand's scale")


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> Pair:
    """DeepGEMM's activation cast, bit for bit as on a GPU; power-of-two scales by `use_ue8m0`.

    Magnitudes count as at least 1e-4: much of smaller gradients becomes zeros. `deep_tile.per_token_cast_to_fp8` keeps
    them.
    """
    if use_packed_ue8m0:
        raise ValueError("use_packed_ue8m0 must be False: Hopper takes scales of float32")
    return quantize.per_token_cast_to_fp8(x, **_cast_options(use_ue8m0, gran_k))


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> Pair:
    """DeepGEMM's weight cast, likewise."""
    return quantize.per_block_cast_to_fp8(x, **_cast_options(use_ue8m0, gran_k))


def per_channel_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> Pair:
    """DeepGEMM's cast along rows, likewise: `x` [m, n], m a multiple of 128, to [m, n] with scales [m / 128, n].

    For products `deep_tile.transposed_cast_to_fp8` writes both transposed, as they take them, without a copy.
    """
    options = _cast_options(use_ue8m0, gran_k)
    if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] % SCALE_BLOCK:
        raise ValueError(f"x is {list(x.shape)}; it must have a multiple of {SCALE_BLOCK} rows: pad it with zeros")
    out, scale = transposed.transposed_cast_to_fp8(x, **options)
    return out.t().contiguous(), scale.t().contiguous()


def _cast_options(use_ue8m0: bool, gran_k: int) -> dict[str, str | float]:
    if gran_k != SCALE_BLOCK:
        raise ValueError(f"gran_k is {gran_k}; on Hopper it is {SCALE_BLOCK}")
    rounding = "pow2" if use_ue8m0 else "none"
    return {"exact": "reciprocal", "amax_floor": quantize.DEEP_GEMM_AMAX_FLOOR, "round_scale": rounding}


def align(x: int, alignment: int) -> int:
    return round_up(x, alignment)


def count_bytes(*given: torch.Tensor | tuple | list | None) -> int:
    """Bytes of tensors, including those in tuples and lists."""
    parts = (count_bytes(*x) if isinstance(x, (tuple, list)) else x.nbytes for x in given if x is not None)
    return sum(parts)
