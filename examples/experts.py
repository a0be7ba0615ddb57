"""A layer of MoE experts in FP8, checked against a loop over experts in BF16; on a GPU also as a CUDA graph.

    python examples/experts.py

The graph is captured for one routing of tokens and replayed for another: group sizes are read on the device. Runs on a
Hopper GPU or on the CPU.
"""

import torch
import torch.nn.functional as F

import deep_tile

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 512, 256


class Experts:
    """Weights in FP8; [experts, 2 x width, hidden] and [experts, hidden, width]."""

    def __init__(self, w_gate_up: torch.Tensor, w_down: torch.Tensor):
        self.gate_up, self.down = deep_tile.cast_weight(w_gate_up), deep_tile.cast_weight(w_down)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden]; chosen and shares [tokens, top_k]."""
        routing = deep_tile.sort_by_expert(chosen, EXPERTS)
        rows = deep_tile.per_token_cast_to_fp8(x, rows=routing.rows)
        gate_up = deep_tile.fp8_grouped_gemm(*rows, self.gate_up.b, self.gate_up.b_scale, routing.offs)
        hidden = deep_tile.silu_mul_cast_to_fp8(gate_up)
        results = deep_tile.fp8_grouped_gemm(*hidden, self.down.b, self.down.b_scale, routing.offs)
        return deep_tile.combine(results, shares, routing.index)


def loop(x, chosen, shares, w_gate_up, w_down) -> torch.Tensor:
    """The same in BF16, expert by expert."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        tokens, which = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], w_gate_up[expert]).chunk(2, -1)
        result = F.linear(F.silu(gate) * up, w_down[expert])
        out.index_add_(0, tokens, result * shares[tokens, which, None].to(out.dtype))
    return out


def routed(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    shares, chosen = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K)
    return x, chosen, shares


def difference(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.float() - exact.float()).norm() / exact.float().norm())


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if deep_tile.is_available()[0] else "cpu"
    weights = [
        torch.randn(EXPERTS, n, k, device=device, dtype=torch.bfloat16) * k**-0.5
        for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    layer, given = Experts(*weights), routed(64, device)
    print(f"relative difference from BF16 on {device}: {difference(layer(*given), loop(*given, *weights)):.3f}")
    if device == "cpu":
        return

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(*given)
    others = routed(64, device)
    for tensor, other in zip(given, others, strict=True):
        tensor.copy_(other)
    graph.replay()
    print(f"the graph, other tokens and routing: {difference(y, loop(*others, *weights)):.3f}")


if __name__ == "__main__":
    main()
