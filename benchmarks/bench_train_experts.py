"""Layers of experts in training: forward and backward of two layers, `deep_tile.train.experts` and torch in BF16.

    PYTHONPATH=. python benchmarks/bench_train_experts.py --out experts.json [--models qwen3 deepseek] [--modes eager]

Norm, router, experts and residual; torch's are `torch._grouped_mm`. Alone on a Hopper GPU; compare within one run.
"""

import argparse
import itertools
import json

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import store, timing
from benchmarks.bench_train import METHOD, measure_step
from deep_tile import train

MODELS = {"qwen3": (128, 2048, 768, 8), "deepseek": (8, 7168, 2048, 2)}
"""Experts, width, width of an expert, and how many a token has: Qwen3-30B-A3B, and a share of DeepSeek-V3."""

RECIPES = {
    "bf16": None,
    "fp8": train.Recipe(),
    "fp8, kept in fp8": train.Recipe(activations="fp8"),
    "fp8, recast": train.Recipe(recast=True),
    "fp8, kept in fp8, recast": train.Recipe(activations="fp8", recast=True),
}


class Layer(nn.Module):
    def __init__(self, experts: int, width: int, inner: int, top_k: int, recipe: train.Recipe | None):
        super().__init__()
        self.top_k, self.recipe = top_k, recipe
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, width, inner) * 0.02)
        self.router, self.norm = nn.Linear(width, experts, bias=False), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        shares, chosen = self.router(h).float().softmax(-1).topk(self.top_k, -1)
        if self.recipe is not None:
            return x + train.experts(h, chosen, shares, self.gate_up, self.down, recipe=self.recipe)
        of_row, order = chosen.flatten().sort(stable=True)
        rows = order // self.top_k
        each = torch.arange(len(self.gate_up), device=x.device)
        offs = torch.searchsorted(of_row, each, right=True, out_int32=True)
        gate, up = torch._grouped_mm(h[rows], self.gate_up.transpose(1, 2), offs=offs).chunk(2, -1)
        made = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=offs)
        return x.index_add(0, rows, (made * shares.flatten()[order, None]).to(x.dtype))


def measure(model: str, recipe: str, compiled: bool, tokens: int, steps: int) -> dict:
    torch.manual_seed(0)
    with torch.device("cuda"):
        layers = nn.Sequential(*(Layer(*MODELS[model], RECIPES[recipe]) for _ in range(2))).bfloat16()
    if compiled:
        for layer in layers:
            layer.compile(dynamic=False)
    x = torch.randn(tokens, MODELS[model][1], device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x) * 1e-3

    def step() -> None:
        layers(x).backward(dy)
        layers.zero_grad()
        x.grad = None

    return {"model": model, "recipe": recipe, "mode": "compile" if compiled else "eager", **measure_step(step, steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compile"), default=("eager", "compile"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out")
    args = parser.parse_args()
    entries = []
    for mode, model, recipe in itertools.product(args.modes, args.models, args.recipes):
        entries.append(measure(model, recipe, mode == "compile", args.tokens, args.steps))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        print(json.dumps(entries[-1]), flush=True)
        if args.out:
            store.save(args.out, {"meta": timing.describe_run(METHOD), "tokens": args.tokens, "entries": entries})


if __name__ == "__main__":
    main()
