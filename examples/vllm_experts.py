"""vLLM's experts in FP8 with block scales through deep_tile: a class of experts, for vLLM's maintainers to take over.

Written against vllm/model_executor/layers/fused_moe/ as of late 2026, where such a class is a file in experts/ and a
name in oracle/fp8.py; nothing outside of vLLM can add one yet. It is for the layout [experts, tokens, hidden], which
DeepEP's low latency dispatch fills. It has been checked against vLLM's signatures, and not been run inside vLLM.
"""

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
from vllm.platforms import current_platform

import deep_tile

_HOPPER = 90
_SMALLEST_MAXIMUM = 1e-10
"""Of a group of activations, as vLLM's own casts floor it."""


class DeepTileBatchedExperts(mk.FusedMoEExpertsModular):
    """Two grouped products, and between them one kernel: activation and cast, of living rows alone."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.is_device_capability(_HOPPER)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of gate and up, of nothing, and of the output, which may lie where gate and up did."""
        tokens = (M if self.max_num_tokens is None else self.max_num_tokens) * self.num_dispatchers
        return (local_num_experts, tokens, max(N, K)), (1,), (local_num_experts, tokens, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        counts = expert_tokens_meta.expert_num_tokens
        options = {"counts": counts, "expected_rows": self._expected_rows(topk_ids, global_num_experts)}
        shape = (*hidden_states.shape[:2], w1.shape[1])
        gate_up = workspace13.flatten()[: hidden_states.shape[0] * shape[1] * shape[2]].view(shape)
        deep_tile.fp8_grouped_gemm(hidden_states, a1q_scale, w1, self.w1_scale, out=gate_up, **options)
        h, h_scale = deep_tile.silu_mul_cast_to_fp8(gate_up, counts=counts, amax_floor=_SMALLEST_MAXIMUM)
        deep_tile.fp8_grouped_gemm(h, h_scale, w2, self.w2_scale, out=output, **options)

    def _expected_rows(self, topk_ids: torch.Tensor, global_num_experts: int) -> int:
        """Of an expert, where all ranks have as many tokens and all experts are liked alike; a power of two, so that
        few numbers of tokens are told apart."""
        rows = topk_ids.numel() * self.num_dispatchers // global_num_experts
        return 1 << max(0, rows - 1).bit_length()

    @staticmethod
    def warm_up(layer: torch.nn.Module, max_tokens: int) -> None:
        """Have every kernel ready that the layer can need: to be called where vLLM warms DeepGEMM up."""
        deep_tile.precompile_model(layer, max_tokens, grouping="counts")
