"""vLLM's linear layers in FP8 with block scales through deep_tile: the class that vllm.py beside it puts in front.

Activations come in BF16 and are cast by the call that multiplies; weights and scales are used as stored.
"""

import os
from typing import ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform

from deep_tile import api, cast, linear
from deep_tile.integrations import vllm_passes

_HOPPER = 90
AMAX_FLOOR = 1e-10
"""Lower bound for a scale's magnitude, as in vLLM's own casts."""

_ready: set[tuple] = set()
"""Finished `make_ready` calls in this process."""


def is_hopper() -> bool:
    return current_platform.is_cuda() and current_platform.is_device_capability(_HOPPER)


def is_batch_invariant() -> bool:
    """Whether results must not depend on other rows in a batch."""
    return bool(envs.VLLM_BATCH_INVARIANT)


def max_tokens() -> int:
    """Most rows per step, by the configuration when the layer is made."""
    return get_current_vllm_config().scheduler_config.max_num_batched_tokens


def make_ready(shapes: tuple[tuple[int, int, int], ...], **options) -> None:
    """Compile and load, once, every kernel that GEMMs with these (n, k, max_m) need, and all casts."""
    key = (api.current_gpu(), shapes, *options.values())
    if key in _ready:
        return
    api.precompile(shapes, **options)
    cast.load_kernels(api.current_gpu(), os.cpu_count() or 1)
    _ready.add(key)


class DeepTileFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """The GEMM call also casts activations with 1x128 scales, which is cheaper than vLLM's separate cast."""

    apply_input_quant: ClassVar[bool] = False

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self._max_tokens = max_tokens()
        self._batch_invariant = is_batch_invariant()
        fused_casts = vllm_passes.FusedCasts(AMAX_FLOOR, self._batch_invariant)
        vllm_passes.add(get_current_vllm_config().compilation_config, fused_casts)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cuda():
            return False, "deep_tile runs on CUDA only"
        fits = is_hopper() if compute_capability is None else compute_capability == _HOPPER
        return (True, None) if fits else (False, "deep_tile runs on Hopper GPUs only")

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
        is_supported, reason = api.supports(1, *config.weight_shape)
        return is_supported, None if is_supported else reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        weight = self._get_layer_params(layer).weight
        if weight.is_cuda:
            options = {"out_dtype": self.config.out_dtype, "batch_invariant": self._batch_invariant}
            make_ready(((*weight.shape, self._max_tokens),), **options)

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        x = (A, As) if A.dtype == torch.float8_e4m3fn else A  # a pair where an earlier kernel has cast it
        options = {"out_dtype": self.config.out_dtype, "batch_invariant": self._batch_invariant}
        return linear.fp8_linear(x, B, Bs, amax_floor=AMAX_FLOOR, **options)
