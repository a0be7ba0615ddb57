"""vLLM's linear layers in FP8 with block scales through deep_tile: a kernel class, for vLLM's maintainers to take over.

Written against vllm/model_executor/kernels/linear/ as of late 2026, where such a class is a file in scaled_mm/ and a
name in `_POSSIBLE_FP8_BLOCK_KERNELS`. Until then a plugin can add it: `register` below is what an entry point of the
group vllm.general_plugins names. It has been checked against vLLM's signatures, and not been run inside vLLM.
"""

from typing import ClassVar

import torch
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform

import deep_tile

_HOPPER = 90
_SMALLEST_MAXIMUM = 1e-10
"""Of a group of activations, as vLLM's own casts floor it."""


class DeepTileFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """The call that multiplies casts activations in groups of 1x128; weights and scales are used as stored."""

    apply_input_quant: ClassVar[bool] = False

    weights: ClassVar[set[tuple[int, int]]] = set()
    """[n, k] of each layer that has been loaded, for `warm_up`."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cuda():
            return False, "deep_tile runs on CUDA only"
        is_hopper = (
            current_platform.is_device_capability(_HOPPER)
            if compute_capability is None
            else compute_capability == _HOPPER
        )
        return (True, None) if is_hopper else (False, "deep_tile runs on Hopper GPUs only")

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        can_implement, reason = super().can_implement(config)
        if not can_implement:
            return False, reason
        if config.activation_quant_key.scale.group_shape != GroupShape(1, 128):
            return False, "deep_tile takes activations in groups of 1x128 only"
        if config.weight_quant_key.scale.group_shape != GroupShape(128, 128):
            return False, "deep_tile takes weights in blocks of 128x128 only"
        if config.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return False, f"deep_tile does not write {config.out_dtype}"
        is_supported, reason = deep_tile.supports(1, *config.weight_shape)
        return is_supported, None if is_supported else reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self.weights.add(tuple(self._get_layer_params(layer).weight.shape))

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        x = (A, As) if A.dtype == torch.float8_e4m3fn else A  # a pair where an earlier kernel has cast it
        return deep_tile.fp8_linear(x, B, Bs, out_dtype=self.config.out_dtype, amax_floor=_SMALLEST_MAXIMUM)

    @classmethod
    def warm_up(cls, max_tokens: int) -> None:
        """Have every kernel ready that the loaded layers can need: to be called where vLLM warms DeepGEMM up."""
        deep_tile.precompile([(n, k, max_tokens) for n, k in sorted(cls.weights)])


def register() -> None:
    """Put the kernel before all others of its kind on CUDA."""
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms import PlatformEnum

    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    if DeepTileFp8BlockScaledMMKernel not in kernels:
        kernels.insert(0, DeepTileFp8BlockScaledMMKernel)
