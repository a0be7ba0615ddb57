"""vLLM's experts of MXFP4 through deep_tile, as gpt-oss and DeepSeek-V4 have them: `hook` has them chosen first and
their weights packed.

vLLM's two methods for such weights choose a backend, convert weights for it, and make its experts; their functions for
the first two are wrapped where these methods find them. Invariant: other methods that use these functions (Quark's,
INC's) and backends asked for by name are left alone.
"""

import functools
from collections.abc import Callable
from enum import Enum

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import _resolve_activation_key
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from deep_tile import grouped, packed_layers
from deep_tile.integrations.vllm_experts import DeepTileExperts, Products, activation_format
from deep_tile.integrations.vllm_linear import make_ready
from deep_tile.kinds import PACKED
from deep_tile.select.choose import LEAST_UNPACKED


class Backend(Enum):
    """What vLLM's methods hold as their backend: none of vLLM's own, so that no branch of theirs is taken."""

    DEEP_TILE = "DEEP_TILE"


class DeepTileMxfp4Experts(DeepTileExperts):
    """Experts of packed weights: tokens come in BF16 and are cast by rows of 1x128."""

    takes_biases = True
    width_multiple = 1  # vLLM pads widths to 64

    def _make_ready(self) -> None:
        if self.w1_scale is None or not self.w1_scale.is_cuda:
            return
        k, width = self.moe_config.hidden_dim, self.moe_config.intermediate_size_per_partition
        shapes = (2 * width, k, LEAST_UNPACKED), (k, width, LEAST_UNPACKED)
        make_ready(shapes, grouping=self.grouping, kind="mxfp4")

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % PACKED["mxfp4"].packing.group == 0

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) == (kMxfp4Static, None)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        supported = MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE
        return activation in supported

    def _gate_up(self, a, a_scale, w1: torch.Tensor, out: torch.Tensor, products: Products) -> None:
        grouped.packed_grouped_gemm(a, a_scale, w1, self.w1_scale, out=out, **products)
        packed_layers.with_bias(out, self.w1_bias, products["offs"])

    def _down(self, h, h_scale, w2: torch.Tensor, out: torch.Tensor, products: Products) -> None:
        grouped.packed_grouped_gemm(h, h_scale, w2, self.w2_scale, out=out, **products)
        packed_layers.with_bias(out, self.w2_bias, products["offs"])


def packed(
    activation: MoEActivation,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    w13_weight_scale: torch.Tensor,
    w2_weight_scale: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor | None, ...]:
    """Weights, scales and biases as a method of vLLM keeps them, in the order in which it is given them.

    Raises:
        ValueError: `pack_weight` refuses a weight, since a row would change too much.
    """
    given = w13_weight, w13_weight_scale, w2_weight, w2_weight_scale, w13_bias, w2_bias
    alternate = activation == MoEActivation.SWIGLUOAI
    try:
        made = packed_layers.PackedExperts.from_codes(*given, format="mxfp4", interleaved=alternate)
    except ValueError as error:
        raise ValueError(f"{error}. With --moe-backend marlin vLLM's own kernels serve these experts") from error
    tensors = made.gate_up, made.down, made.gate_up_scale, made.down_scale, made.gate_up_bias, made.down_bias
    return tuple(None if x is None else x.data for x in tensors)


def _selecting(original: Callable) -> Callable:
    @functools.wraps(original)
    def select(config, *activation_key, **options):
        asked = (*activation_key, *options.values(), _resolve_activation_key(None))
        given = config, kMxfp4Static, None, activation_format(config)
        is_left = config.moe_backend != "auto" or any(key is not None for key in asked)
        if is_left or not DeepTileMxfp4Experts.is_supported_config(DeepTileMxfp4Experts, *given)[0]:
            return original(config, *activation_key, **options)
        return Backend.DEEP_TILE, DeepTileMxfp4Experts

    return select


def _converting(original: Callable) -> Callable:
    @functools.wraps(original)
    def convert(mxfp4_backend, layer, **given):
        if mxfp4_backend is not Backend.DEEP_TILE:
            return original(mxfp4_backend=mxfp4_backend, layer=layer, **given)
        return packed(**(given | {"activation": layer.activation}))

    return convert


_WRAPPERS = {
    "select_mxfp4_moe_backend": _selecting,
    "select_deepseek_v4_mxfp4_moe_backend": _selecting,
    "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format": _converting,
    "convert_weight_to_mxfp4_moe_kernel_format": _converting,
}


def hook() -> Callable[[], None]:
    """Wrap the functions; gives what undoes it."""
    originals = {name: getattr(mxfp4, name) for name in _WRAPPERS}
    for name, original in originals.items():
        setattr(mxfp4, name, _WRAPPERS[name](original))

    def unhook() -> None:
        for name, original in originals.items():
            setattr(mxfp4, name, original)

    return unhook
