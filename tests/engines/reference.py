"""What layers of experts compute, token by token and by vLLM's kernels, and errors, for the scripts beside it."""

from collections.abc import Callable

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])


def wide(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of MXFP4: codes [..., k / 2] in uint8, and exponents [..., k / 32] in uint8."""
    values = E2M1.to(codes.device)[torch.stack([codes % 16, codes // 16], -1).flatten(-2).int()]
    return values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


def of_silu(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    gate, up = gate_up.chunk(2)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def of_gpt_oss(gate_up: torch.Tensor, limit: float = 7.0) -> torch.Tensor:
    """Gates and ups alternate."""
    gate, up = gate_up[::2].clamp(max=limit), gate_up[1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def of_experts(x, ids, shares, matrices, biases, gated: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[tokens, k] in FP32, of the experts' matrices and biases, both (of gates and ups, of the second product)."""
    (up, down), (up_bias, down_bias) = matrices, biases
    out = torch.zeros(x.shape, device=x.device)
    for token, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            h = gated(up[expert] @ x[token].float() + up_bias[expert].float())
            out[token] += shares[token, j] * (down[expert] @ h + down_bias[expert].float())
    return out


def of_kernel(kernel, layer, x, ids, shares) -> torch.Tensor:
    """What a kernel of vLLM's makes of a layer's experts."""
    return kernel.apply(
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=shares,
        topk_ids=ids,
        activation=layer.activation,
        global_num_experts=len(layer.w13_weight),
        expert_map=None,
        apply_router_weight_on_input=False,
    )


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((out.double() - wanted).norm() / wanted.double().norm()).item()
