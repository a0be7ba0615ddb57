"""vLLM's experts of MXFP4 through deep_tile, as gpt-oss and DeepSeek-V4 have them: `hook` has them chosen first and
their weights packed.

Invariant: other methods that use the same functions (Quark's, INC's) and backends asked for by name are left alone.
"""

import functools
from collections.abc import Callable

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import _resolve_activation_key
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from deep_tile.integrations.vllm_packed import Backend, DeepTilePackedExperts, packed, serves, wrap


class DeepTileMxfp4Experts(DeepTilePackedExperts):
    """Experts of MXFP4, also with biases."""

    scheme = kMxfp4Static
    takes_biases = True

    def _kind(self) -> str:
        return "mxfp4"

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        supported = MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE
        return activation in supported


def _selecting(original: Callable) -> Callable:
    @functools.wraps(original)
    def select(config, *activation_key, **options):
        asked = (*activation_key, *options.values(), _resolve_activation_key(None))
        if any(key is not None for key in asked) or not serves(DeepTileMxfp4Experts, config):
            return original(config, *activation_key, **options)
        return Backend.DEEP_TILE, DeepTileMxfp4Experts

    return select


def _converting(original: Callable) -> Callable:
    @functools.wraps(original)
    def convert(mxfp4_backend, layer, **given):
        if mxfp4_backend is not Backend.DEEP_TILE:
            return original(mxfp4_backend=mxfp4_backend, layer=layer, **given)
        weights = [given[f"{name}_{of}"] for name in ("w13", "w2") for of in ("weight", "weight_scale")]
        biases = given.get("w13_bias"), given.get("w2_bias")
        alternate = layer.activation == MoEActivation.SWIGLUOAI
        return packed(*weights, *biases, format="mxfp4", interleaved=alternate)

    return convert


_WRAPPERS = {
    "select_mxfp4_moe_backend": _selecting,
    "select_deepseek_v4_mxfp4_moe_backend": _selecting,
    "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": _converting,
    "convert_weight_to_mxfp4_moe_kernel_format": _converting,
}


def hook() -> Callable[[], None]:
    """Wrap the functions; gives what undoes it."""
    return wrap(mxfp4, _WRAPPERS)
