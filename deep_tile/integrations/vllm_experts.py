"""vLLM's experts in FP8 with block scales through deep_tile: the classes that vllm.py beside it has chosen first.

Two grouped GEMMs with one activation-and-cast kernel between them; rows without an expert are neither read nor written,
and nothing waits for the host.
"""

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

from deep_tile import experts, grouped, quantize
from deep_tile.config import SCALE_BLOCK
from deep_tile.integrations.vllm_linear import AMAX_FLOOR, is_hopper, make_ready

_PACKED = MoEActivation.SWIGLUOAI_UNINTERLEAVE

_OF_GPT_OSS = 7.0, 1.702, 1.0
"""Limit, alpha and beta that vLLM's kernels for SWIGLUOAI have built in; gpt-oss's method says them, others do not."""

Products = dict[str, torch.Tensor | int | None]
_Shape = tuple[int, ...]
_Pair = tuple[torch.Tensor, torch.Tensor]


class _Experts(mk.FusedMoEExpertsModular):
    """The base class for both layouts."""

    grouping: str
    takes_biases = False
    width_multiple = 16

    def __init__(self, moe_config, quant_config, *arguments, **options) -> None:
        super().__init__(moe_config, quant_config, *arguments, **options)
        self._make_ready()

    def _make_ready(self) -> None:
        """Have every kernel that this layer can need."""
        if self.w1_scale is None or not self.w1_scale.is_cuda:
            return
        k, width = self.moe_config.hidden_dim, self.moe_config.intermediate_size_per_partition
        for shape in ((2 * width, k, 1), (width, k, 1), (k, width, 1)):
            make_ready((shape,), grouping=self.grouping)

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        if moe_config.in_dtype != torch.bfloat16:
            return False, f"kernel does not support {moe_config.in_dtype}"
        if moe_config.has_bias and not cls.takes_biases:
            return False, "kernel does not support biases"
        if moe_config.intermediate_size_per_partition % cls.width_multiple:
            return False, f"kernel does not support {moe_config.intermediate_size_per_partition} columns"
        given = moe_config, weight_key, activation_key, activation_format
        return mk.FusedMoEExpertsModular.is_supported_config(cls, *given)

    @staticmethod
    def _supports_current_device() -> bool:
        return is_hopper()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SILU, _PACKED)

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % 16 == 0

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def _gate_up(self, a, a_scale, w1: torch.Tensor, out: torch.Tensor, products: Products) -> None:
        """The first product. Each half of a narrow w1 has its own scales and is then multiplied separately. A sort's
        bounds are older than the cast; those of a dispatch may be new."""
        products = products | {"constant_weights": self.grouping == "offs"}
        width = w1.shape[1] // 2
        if width % SCALE_BLOCK == 0:
            grouped.fp8_grouped_gemm(a, a_scale, w1, self.w1_scale, out=out, **products)
            return
        blocks = self.w1_scale.shape[1] // 2
        for rows, of_scale in ((slice(width), slice(blocks)), (slice(width, None), slice(blocks, None))):
            half = w1[:, rows], self.w1_scale[:, of_scale]
            grouped.fp8_grouped_gemm(a, a_scale, *half, out=out[..., rows], **products)

    def _down(self, h, h_scale, w2: torch.Tensor, out: torch.Tensor, products: Products) -> None:
        """The second product, behind the activation's kernel, which writes no bounds."""
        grouped.fp8_grouped_gemm(h, h_scale, w2, self.w2_scale, out=out, constant_weights=True, **products)

    def _activate(self, gate_up: torch.Tensor, activation: MoEActivation, **bounds) -> _Pair:
        limit, alpha, beta = self._gating(activation)
        numbers = {} if activation == MoEActivation.SILU else {"alpha": alpha, "beta": beta}
        return experts.silu_mul_cast_to_fp8(gate_up, limit=limit, amax_floor=AMAX_FLOOR, **numbers, **bounds)

    def _gating(self, activation: MoEActivation) -> tuple[float | None, float, float]:
        """The activation's limit, alpha and beta, from the quantisation config, else from the model's, else usual."""
        found = []
        for of_quantisation, of_model in (
            ("gemm1_clamp_limit", "swiglu_limit"),
            ("gemm1_alpha", "swiglu_alpha"),
            ("gemm1_beta", "swiglu_beta"),
        ):
            number = getattr(self.quant_config, of_quantisation, None)
            found.append(getattr(self.moe_config, of_model, None) if number is None else number)
        usual = _OF_GPT_OSS if activation == MoEActivation.SWIGLUOAI else (None, 1.0, 0.0)
        limit, alpha, beta = (of_activation if x is None else x for x, of_activation in zip(found, usual, strict=True))
        return limit, alpha, beta


class DeepTileExperts(_Experts):
    """Experts for tokens [m, k] with expert ids: sorted by expert, multiplied without padding, and summed."""

    grouping = "offs"

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Tokens that stay on this GPU are gathered by their cast; tokens for other GPUs are sent in FP8."""
        return not self.moe_config.moe_parallel_config.use_all2all_kernels

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        """Dispatch methods whose scales are known to arrive as one row per token."""
        sent_plainly = moe_parallel_config.use_ag_rs_all2all_kernels or moe_parallel_config.use_deepep_ht_kernels
        return sent_plainly or not moe_parallel_config.use_all2all_kernels

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

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
    ) -> tuple[_Shape, _Shape, _Shape]:
        """Shapes for gate and up, the second GEMM, and the output, which may reuse gate and up's memory."""
        return (M * topk, N), (M * topk, K), (M, K)

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
        rows, offs, index = experts.sort_by_expert(_local(topk_ids, expert_map), w1.shape[0])
        everyone = w1.shape[0] if global_num_experts < 1 else global_num_experts
        products = {"offs": offs, "expected_rows": _expected_rows(topk_ids.numel(), everyone)}
        if a1q_scale is None:
            a = quantize.per_token_cast_to_fp8(hidden_states, rows=rows, offs=offs, amax_floor=AMAX_FLOOR)
        else:  # torch does not gather FP8
            a = hidden_states.view(torch.uint8)[rows].view(hidden_states.dtype), a1q_scale[rows]
        gate_up = _part(workspace13, (len(rows), w1.shape[1]))
        self._gate_up(*a, w1, gate_up, products)
        h = self._activate(gate_up, activation, offs=offs)
        results = _part(workspace2, (len(rows), w2.shape[1]))
        self._down(*h, w2, results, products)
        experts.combine(results, _shares(topk_weights, apply_router_weight_on_input), index, out=output)


class DeepTileBatchedExperts(_Experts):
    """Experts for tokens [experts, tokens, k], as DeepEP's low-latency dispatch fills them."""

    grouping = "counts"

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

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
    ) -> tuple[_Shape, _Shape, _Shape]:
        """Shapes for gate and up, nothing, and the output, which may reuse gate and up's memory."""
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
        expected = _expected_rows(topk_ids.numel() * self.num_dispatchers, global_num_experts)
        products = {"counts": counts, "expected_rows": expected}
        gate_up = _part(workspace13, (*hidden_states.shape[:2], w1.shape[1]))
        self._gate_up(hidden_states, a1q_scale, w1, gate_up, products)
        h = self._activate(gate_up, activation, counts=counts)
        self._down(*h, w2, output, products)


EXPERTS = {"TRITON": DeepTileExperts, "BATCHED_TRITON": DeepTileBatchedExperts}
"""Classes by the vLLM backend that leaves weights and scales unchanged."""


def activation_format(config) -> mk.FusedMoEActivationFormat:
    """The activation format of the configured experts, as vLLM derives it."""
    is_batched = config.moe_parallel_config.use_batched_activation_format
    forms = mk.FusedMoEActivationFormat
    return forms.BatchedExperts if is_batched else forms.Standard


def _local(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """This process's expert numbers; negative for experts elsewhere."""
    if expert_map is None:
        return topk_ids
    return torch.where(topk_ids < 0, -1, expert_map[topk_ids.clamp(min=0)])


def _shares(topk_weights: torch.Tensor, are_in_input: bool) -> torch.Tensor:
    if are_in_input:
        return torch.ones_like(topk_weights, dtype=torch.float32)
    return topk_weights if topk_weights.dtype in (torch.float32, torch.bfloat16) else topk_weights.float()


def _expected_rows(choices: int, count: int) -> int:
    """Rows per expert under even routing over `count` experts; a power of two, so that few token counts are
    distinguished."""
    return 1 << max(0, choices // count - 1).bit_length()


def _part(workspace: torch.Tensor, shape: _Shape) -> torch.Tensor:
    """A dense tensor at a workspace's start."""
    return workspace.flatten()[: torch.Size(shape).numel()].view(shape)
