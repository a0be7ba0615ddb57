"""DeepGEMM's names for dense FP8 products on Hopper, as engines look them up, on deep_tile's kernels.

Called by vLLM and SGLang after `install()`, or imported by name. What deep_tile has no kernel for (grouped products,
attention's logits, BF16) is absent: engines take a missing name as "not available".
Invariant: names, arguments and meaning are those of DeepGEMM 2.6.1 on SM90; wrong calls raise before anything is
launched.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch.compiler import is_compiling

from deep_tile import api, quantize, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.reference import cosine_difference

__version__ = "2.6.1+deep_tile"

_Pair = tuple[torch.Tensor, torch.Tensor]

_TMA_BYTES = tensors.ALIGNMENT_BYTES
_settings: dict[str, int | bool | None] = {"num_sms": None, "pdl": None}
"""Of the process, as DeepGEMM has them; passed along with every call."""


def fp8_gemm_nt(
    a: _Pair,
    b: _Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """`d = a @ b^T` with 1x128 and 128x128 scales: `deep_tile.fp8_gemm(*a, *b, d)`.

    Args:
        a: [m, k] float8_e4m3fn and its scale [m, ceil(k / 128)]: row-major, or M-major with or without padding.
        b: [n, k] float8_e4m3fn and its scale [ceil(n / 128), ceil(k / 128)]. Operands whose rows do not begin at
            multiples of 16 bytes are copied first.
        d: [m, n] bfloat16, written to.
        c: only None: Hopper's kernel for these scales adds nothing, in DeepGEMM either.
        recipe, recipe_a, recipe_b: only what the scales are anyway, (1, 128, 128), (1, 128) and (128, 128).
        compiled_dims, disable_ue8m0_cast: mean nothing here: kernels know no sizes, and scales are used as they are.

    Raises:
        TypeError, ValueError, RuntimeError: as `deep_tile.fp8_gemm`; a pair that is none, another recipe, a `c`, or
            scales that are packed into integers.
    """
    if c is not None:
        raise ValueError("c must be None: products with 1x128 and 128x128 scales add nothing on Hopper. Add c to d")
    for name, given, wanted in (
        ("recipe", recipe, (1, SCALE_BLOCK, SCALE_BLOCK)),
        ("recipe_a", recipe_a, quantize.TOKEN_BLOCK),
        ("recipe_b", recipe_b, quantize.WEIGHT_BLOCK),
    ):
        if given is not None and tuple(given) != wanted:
            raise ValueError(f"{name} is {given}; on Hopper it is {wanted} or None. Quantise with such blocks")
    operands = [part for name, pair in (("a", a), ("b", b)) for part in _operand(name, pair)]
    api.fp8_gemm(*operands, d, **_settings)


fp8_fp4_gemm_nt = gemm_fp8_fp8_bf16_nt = fp8_gemm_nt
calc_diff = cosine_difference


def _operand(name: str, pair: _Pair) -> _Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name} is a {type(pair).__name__}; it must be a pair of an FP8 tensor and its scale")
    x, scale = pair
    if isinstance(scale, torch.Tensor) and scale.dtype == torch.int32:
        raise TypeError(f"{name}'s scale is packed into int32, as Blackwell takes it; Hopper takes float32")
    if isinstance(x, torch.Tensor) and x.dim() == 2 and not is_compiling():
        x = tensors.with_aligned_rows(x)
    return x, scale


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """`x` elements, rounded up to a multiple of 16 bytes."""
    return round_up(x, _TMA_BYTES // element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """A scale [..., mn, k] of float32 with strides (1, mn rounded up to 4), itself if it has them.

    deep_tile's products take any strides, so they need no such copy.
    """
    if sf.dtype != torch.float32 or sf.dim() not in (2, 3):
        raise ValueError(f"sf is {list(sf.shape)} of {sf.dtype}; it must be [mn, k] or [g, mn, k] of torch.float32")
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
    """The scale as Hopper's kernels of DeepGEMM want it: of 1x128 blocks MN-major and aligned, of 128x128 as it is.

    Args:
        sf: [mn / rows of a block, k / 128], with a dimension of `num_groups` in front where that is given, of float32.
        recipe: (rows, 128) of a block, or (rows of a's, rows of b's, 128) with `is_sfa` to say which.

    Raises:
        ValueError: another recipe, or a shape that does not fit.
    """
    if len(recipe) == 3 and is_sfa is None:
        raise ValueError(f"recipe is {recipe}; with three numbers, is_sfa must say whose scale this is")
    block = (recipe[0 if is_sfa else 1], recipe[2]) if len(recipe) == 3 else tuple(recipe)
    if block not in (quantize.TOKEN_BLOCK, quantize.WEIGHT_BLOCK):
        raise ValueError(f"recipe is {recipe}: blocks of {block}; on Hopper they are 1x128 or 128x128")
    shape = (*([] if num_groups is None else [num_groups]), ceil_div(mn, block[0]), ceil_div(k, block[1]))
    if tuple(sf.shape) != shape or sf.dtype != torch.float32:
        wanted = f"for mn = {mn}, k = {k} it must be {list(shape)} of float32"
        raise ValueError(f"sf is {list(sf.shape)} of {sf.dtype}; {wanted}")
    return get_mn_major_tma_aligned_tensor(sf) if block == quantize.TOKEN_BLOCK else sf


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> _Pair:
    """DeepGEMM's cast of activations, bit for bit what it computes on a GPU; scales of powers of two by `use_ue8m0`."""
    if use_packed_ue8m0:
        raise ValueError("use_packed_ue8m0 must be False: Hopper takes scales of float32")
    return quantize.per_token_cast_to_fp8(x, exact="reciprocal", round_scale=_rounding(use_ue8m0, gran_k))


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = SCALE_BLOCK) -> _Pair:
    """DeepGEMM's cast of weights, likewise."""
    return quantize.per_block_cast_to_fp8(x, exact="reciprocal", round_scale=_rounding(use_ue8m0, gran_k))


def _rounding(use_ue8m0: bool, gran_k: int) -> str:
    if gran_k != SCALE_BLOCK:
        raise ValueError(f"gran_k is {gran_k}; on Hopper it is {SCALE_BLOCK}")
    return "pow2" if use_ue8m0 else "none"


def set_num_sms(num_sms: int) -> None:
    """SMs that products use from now on, in this process."""
    api.check_option("num_sms", num_sms)
    _settings["num_sms"] = num_sms


def get_num_sms() -> int:
    """What was set, else all of the current device."""
    given = _settings["num_sms"]
    return torch.cuda.get_device_properties().multi_processor_count if given is None else given


def set_pdl(enabled: bool) -> None:
    """Whether products are programmatic dependent launches from now on; as `deep_tile.fp8_gemm` chooses before that."""
    api.check_option("pdl", enabled)
    _settings["pdl"] = enabled


def get_pdl() -> bool:
    given = _settings["pdl"]
    return _settings["num_sms"] is None if given is None else given


def align(x: int, alignment: int) -> int:
    return round_up(x, alignment)


_SUBMODULES = {
    "utils": ("align", "ceil_div", "per_token_cast_to_fp8", "per_block_cast_to_fp8", "get_mn_major_tma_aligned_tensor"),
    "testing": ("calc_diff",),
}


def install(force: bool = False) -> None:
    """Have `import deep_gemm` find this module, with `deep_gemm.utils` and `deep_gemm.testing`, in this process.

    Raises:
        RuntimeError: the real package is imported or installed, unless `force`.
    """
    present = sys.modules.get("deep_gemm")
    if getattr(present, "__version__", None) == __version__:
        return
    if not force and (present is not None or importlib.util.find_spec("deep_gemm") is not None):
        raise RuntimeError("deep_gemm is installed here: pass force=True to have deep_tile take its place")
    ours = sys.modules[__name__]
    package = _module("deep_gemm", [name for name in vars(ours) if not name.startswith("_")] + ["__version__"])
    for name, members in _SUBMODULES.items():
        setattr(package, name, _module(f"deep_gemm.{name}", members))


def uninstall() -> None:
    """Undo `install()`; what was imported of it meanwhile keeps working."""
    if getattr(sys.modules.get("deep_gemm"), "__version__", None) == __version__:
        for name in ("deep_gemm", *(f"deep_gemm.{name}" for name in _SUBMODULES)):
            sys.modules.pop(name, None)


def _module(name: str, members: list[str] | tuple[str, ...]) -> ModuleType:
    """A module of that name with these members of ours, which importlib finds."""
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package=name == "deep_gemm")
    module.__path__ = []
    for member in members:
        setattr(module, member, globals()[member])
    sys.modules[name] = module
    return module
