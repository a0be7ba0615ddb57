"""transformers' FP8 experts through deep_tile:

replacements for its functions, installed by transformers.py. A layer is a sort and six calls, enqueued without waiting
for the device, so one CUDA graph serves every routing. Invariant: what deep_tile does not multiply as it was meant goes
to the function that was there before.
"""

from collections.abc import Callable
from types import ModuleType

import torch

from deep_tile import experts, grouped, quantize
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.integrations.transformers_config import gate_up_scale_rows
from deep_tile.integrations.transformers_weights import operands, takes


def experts_forward(original: Callable, exact: str, client: ModuleType) -> Callable[..., torch.Tensor]:
    """The replacement for `original`, one of the FP8 expert functions in transformers' module `client`.

    Args:
        exact: as for `per_token_cast_to_fp8`.
    """
    silu = (torch.nn.SiLU, type(client.ACT2FN["silu"]))
    cast = {"exact": exact, "amax_floor": quantize.DEEP_GEMM_AMAX_FLOOR}

    def forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        wants_gradient = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
        is_ours = type(self) is client.FP8Experts and _takes_layer(self, hidden_states) and is_gated_by(silu, self)
        if wants_gradient or not is_ours:
            return original(self, hidden_states, top_k_index, top_k_weights)
        rows, offs, index = experts.sort_by_expert(top_k_index, self.num_experts)
        x, x_scale = quantize.per_token_cast_to_fp8(hidden_states, rows=rows, offs=offs, **cast)
        gate_up = _multiply_gate_up(self, x, x_scale, offs)
        h, h_scale = experts.silu_mul_cast_to_fp8(gate_up, offs=offs, **cast, **gating(self))
        out = grouped.fp8_grouped_gemm(h, h_scale, *operands(self.down_proj, self.down_proj_scale_inv), offs)
        if top_k_weights.dtype not in (torch.float32, torch.bfloat16):
            top_k_weights = top_k_weights.float()
        return experts.combine(out, top_k_weights, index).to(hidden_states.dtype)

    return forward


def is_gated_by(silu: tuple[type, ...], layer: torch.nn.Module) -> bool:
    """Whether the gate is the function in `silu_mul_cast_to_fp8`. An activation with an alpha is a SiLU, whatever
    `act_fn` is."""
    is_silu = layer.swiglu_alpha is not None or isinstance(layer.act_fn, silu)
    return getattr(layer, "gate_softcap", None) is None and is_silu  # which some releases do not have


def gating(layer: torch.nn.Module) -> dict[str, float]:
    """Parameters for `silu_mul_cast_to_fp8`: gpt-oss's activation has an alpha and adds 1 to up."""
    limit = {} if layer.limit is None else {"limit": float(layer.limit)}
    return limit if layer.swiglu_alpha is None else {**limit, "alpha": float(layer.swiglu_alpha), "beta": 1.0}


def _takes_layer(layer: torch.nn.Module, hidden_states: torch.Tensor) -> bool:
    """Whether it is a layer for deep_tile: cheap, and traced by torch.compile."""
    if layer.activation_scheme != "dynamic" or hidden_states.dim() != 2 or not layer.has_gate:
        return False
    return all(
        takes(hidden_states, weight, scale, layer.block_size) and tuple(scale.shape) in shapes
        for weight, scale, shapes in (
            (layer.gate_up_proj, layer.gate_up_proj_scale_inv, _scale_shapes(layer.gate_up_proj)),
            (layer.down_proj, layer.down_proj_scale_inv, _scale_shapes(layer.down_proj)[:1]),
        )
    )


def _scale_shapes(weight: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes that a gate_up's scales may have, the first in blocks."""
    groups, n, k = weight.shape
    return [(groups, rows, ceil_div(k, SCALE_BLOCK)) for rows in gate_up_scale_rows(n)]


def _multiply_gate_up(layer: torch.nn.Module, x, x_scale, offs) -> torch.Tensor:
    """The first product; halves with scales of their own are multiplied separately."""
    weight, scale = operands(layer.gate_up_proj, layer.gate_up_proj_scale_inv)
    if tuple(scale.shape) == _scale_shapes(weight)[0]:
        return grouped.fp8_grouped_gemm(x, x_scale, weight, scale, offs)
    halves = zip(weight.chunk(2, 1), scale.chunk(2, 1), strict=True)
    return torch.cat([grouped.fp8_grouped_gemm(x, x_scale, *half, offs) for half in halves], 1)
