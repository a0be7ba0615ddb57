"""SGLang's block FP8 GEMMs through deep_tile: hooks for SGLang's registry.

Registered by sglang.py beside it; called by SGLang, each with the function that it is put around first.
Invariant: calls that deep_tile cannot compute as intended go to the original function.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

import torch

from deep_tile import grouped, nn
from deep_tile import linear as products
from deep_tile.compat.layouts import group_ends
from deep_tile.integrations import engines, sglang_indexer
from deep_tile.integrations.transformers_weights import takes
from deep_tile.quantize import FP8_DTYPE, TOKEN_BLOCK, WEIGHT_BLOCK

_AMAX_FLOOR = 1e-10
"""Lower bound for a scale's magnitude, as in SGLang's own casts."""

_settings: dict[str, bool | int | None] = {"batch_invariant": False, "num_sms": None}
"""Keywords of linear layers' products: by SGLang's --enable-deterministic-inference, once a model is loaded, and within
SGLang's limit of SMs, where other kernels run beside. Results of groups never depend on other rows."""

_ready: list[tuple[Callable[[], torch.nn.Module | None], int]] = []
"""Models that were made ready, by weak references, and the most tokens of each."""

_limits: set[int] = set()
"""Limits of SMs that they were made ready for."""

_DEEP_GEMM = "sglang.srt.layers.deep_gemm_wrapper.entrypoint"
_Pair = tuple[torch.Tensor, torch.Tensor]


def linear(
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    act_scale_ue8m0: bool = False,
    weight_bf16: torch.Tensor | None = None,
) -> torch.Tensor:
    """`input @ (weight * weight_scale)^T + bias` with `input` cast with 1x128 scales, unless `input_scale` is given.

    Args:
        original: SGLang's function, for blocks other than 128x128, packed scales, and other input dtypes.
        input: [..., k] bfloat16, float16 or float32; or, with `input_scale`, float8_e4m3fn.
        weight: [n, k] float8_e4m3fn; any n, k in multiples of 16.
        weight_scale: [ceil(n / 128), ceil(k / 128)] in a dtype that GEMMs take.
        input_scale: [rows, ceil(k / 128)] float32, any strides, perhaps padded to 4 rows.
        bias: [n].
        act_scale_ue8m0: input scales are rounded up to powers of two.
        weight_bf16: the same weight in BF16; not read.

    Returns:
        [..., n], in input's dtype; bfloat16 for FP8.
    """
    if not _takes_linear(input, weight, block_size, weight_scale, input_scale):
        return original(
            *(input, weight, block_size, weight_scale, input_scale, bias),
            act_scale_ue8m0=act_scale_ue8m0,
            weight_bf16=weight_bf16,
        )
    rounding = {"amax_floor": _AMAX_FLOOR, "round_scale": "pow2" if act_scale_ue8m0 else "none"}
    if input_scale is None:
        return products.fp8_linear(input, weight, weight_scale, bias, **rounding, **_settings)
    pair = input.view(-1, input.shape[-1]), input_scale
    return products.fp8_linear(pair, weight, weight_scale, bias, **_settings).view(*input.shape[:-1], weight.shape[0])


def _takes_linear(input, weight, block_size, weight_scale, input_scale) -> bool:
    wide = input
    if input_scale is not None:
        if input.dtype != FP8_DTYPE or input_scale.dtype != torch.float32:
            return False
        wide = input_scale
    return weight.dim() == 2 and takes(wide, weight, weight_scale, block_size)


def grouped_gemm_nt_f8f8bf16_contig(
    original: Callable[..., None],
    lhs: _Pair,
    rhs: _Pair,
    out: torch.Tensor,
    m_indices: torch.Tensor,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
) -> None:
    """All experts' rows in order, each expert's at a multiple of DeepGEMM's current alignment."""
    if not _takes_groups(lhs, rhs, recipe_a, recipe_b):
        return original(lhs, rhs, out, m_indices, recipe_a=recipe_a, recipe_b=recipe_b)
    rows, groups = lhs[0].shape[0], rhs[0].shape[0]
    if rows == 0:
        return None
    alignment = _alignment()
    offs = group_ends(m_indices, rows, groups, alignment)
    expected = max(1, rows // groups - alignment // 2)  # on average half the alignment pads each group
    options = {"expected_rows": expected, "num_sms": _settings["num_sms"]}
    grouped.fp8_grouped_gemm(*lhs, *rhs, offs, out, alignment=alignment, **options)
    return None


def grouped_gemm_nt_f8f8bf16_masked(
    original: Callable[..., object],
    lhs: _Pair,
    rhs: _Pair,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    overlap_args: object = None,
    max_block_n: int = 256,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
) -> object:
    """Each expert's rows in its own part of `lhs`. With overlap_args SGLang's function runs, which signals finished
    tiles."""
    if overlap_args is not None or not _takes_groups(lhs, rhs, recipe_a, recipe_b):
        options = {"max_block_n": max_block_n, "recipe_a": recipe_a, "recipe_b": recipe_b}
        return original(lhs, rhs, out, masked_m, expected_m, overlap_args=overlap_args, **options)
    options = {"expected_rows": max(1, int(expected_m)), "num_sms": _settings["num_sms"]}
    grouped.fp8_grouped_gemm(*lhs, *rhs, out=out, counts=masked_m, **options)
    return None


@contextmanager
def configure_deep_gemm_num_sms(
    original: Callable[[int | None], AbstractContextManager[None]], num_sms: int | None
) -> Iterator[None]:
    """Within it products use so many SMs at most, ours and DeepGEMM's; None changes nothing. Kernels depend on the
    limit, which no setting of SGLang tells: its first use, in SGLang's own warm-up, compiles them for all sizes."""
    before = _settings["num_sms"]
    if num_sms is not None and num_sms not in _limits and not _is_captured():
        _limits.add(num_sms)
        for find, most in _ready:
            _compile(find(), most, num_sms)
    with original(num_sms):
        _settings["num_sms"] = before if num_sms is None else num_sms
        try:
            yield
        finally:
            _settings["num_sms"] = before


def _takes_groups(lhs: _Pair, rhs: _Pair, recipe_a: object, recipe_b: object) -> bool:
    a, a_scale = lhs
    return (
        (recipe_a is None or tuple(recipe_a) == TOKEN_BLOCK)
        and (recipe_b is None or tuple(recipe_b) == WEIGHT_BLOCK)
        and a.dtype == FP8_DTYPE
        and a.device == a_scale.device
        and takes(a_scale, *rhs, WEIGHT_BLOCK)
    )


def _alignment() -> int:
    """The alignment of SGLang's DeepGEMM, which SGLang sets around its layers; in some releases for m and k."""
    alignment = import_module(_DEEP_GEMM).deep_gemm.get_mk_alignment_for_contiguous_layout()
    return alignment[0] if isinstance(alignment, (tuple, list)) else alignment


def make_ready(_: object, runner: object) -> None:
    """After model load: compile every kernel that its layers can need, so that none compiles later."""
    arguments = runner.server_args
    _settings["batch_invariant"] = bool(arguments.enable_deterministic_inference)
    chunk = getattr(arguments, "chunked_prefill_size", None) or 0
    most = chunk if chunk > 0 else arguments.max_prefill_tokens
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return
    sglang_indexer.make_ready(runner.model)
    _limits.clear()
    _ready.append((weakref.ref(runner.model), most))
    _compile(runner.model, most, None)


def _compile(model: torch.nn.Module | None, most: int, num_sms: int | None) -> None:
    invariant = _settings["batch_invariant"]
    for grouping in ("offs", "counts") if model is not None else ():
        try:
            nn.precompile_model(model, most, num_sms=num_sms, grouping=grouping, batch_invariant=invariant)
        except ValueError as error:  # no such layers
            engines.logger(engines.SGLANG).info("nothing to make ready: %s", error)
            return


def _is_captured() -> bool:
    """Whether kernels cannot be loaded now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


AROUND = {
    "sglang.srt.layers.quantization.fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback": linear,
    f"{_DEEP_GEMM}.grouped_gemm_nt_f8f8bf16_contig": grouped_gemm_nt_f8f8bf16_contig,
    f"{_DEEP_GEMM}.grouped_gemm_nt_f8f8bf16_masked": grouped_gemm_nt_f8f8bf16_masked,
    f"{_DEEP_GEMM}.configure_deep_gemm_num_sms": configure_deep_gemm_num_sms,
}
AFTER = {"sglang.srt.model_executor.model_runner.ModelRunner.load_model": make_ready}
"""Hooks by the names of the functions that they wrap or follow."""
