"""Loss curves of a GPT on bytes of Python's own library, in BF16 and in FP8, of several seeds.

    PYTHONPATH=. python benchmarks/bench_loss.py --out loss.json [--size 14M 100M] [--recipes bf16 fp8] [--seeds 0 1 2]

Linear layers, MLPs included, are FP8, the last one is not; weights are FP32, activations BF16. A step is a CUDA graph;
runs follow each other, all recipes of a seed before the next, and what has ended by --seconds is stored.
benchmarks/figures.py draws what is stored as benchmarks/results/loss_*.json.
"""

import argparse
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import store
from benchmarks.bench_train import Block
from deep_tile import train

RECIPES = {"bf16": None, "fp8": train.Recipe(), "fp8, kept in fp8": train.Recipe(activations="fp8")}
CONTEXT, EVERY = 256, 10
"""Bytes of a sequence, and the number of steps over which a stored loss is averaged."""


WARM_STEPS = 3
"""Steps before the capture; they count as steps."""


class Size(NamedTuple):
    """A model and its training: `batch` sequences a step, and the peak learning rate, reached after `warm_up` steps."""

    width: int
    layers: int
    inner: int
    batch: int
    rate: float
    warm_up: int


SIZES = {"14M": Size(512, 4, 1536, 32, 1e-3, 40), "100M": Size(768, 12, 2560, 16, 5e-4, 100)}


class Gpt(nn.Module):
    def __init__(self, recipe: train.Recipe | None, size: Size):
        super().__init__()
        width, heads = size.width, size.width // 64
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, heads, size.inner, recipe) for _ in range(size.layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        if recipe is not None:
            train.convert(self.blocks, lambda *_: True, recipe=recipe)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place.weight)))


def loss_of(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        return F.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())


def run(size: Size, name: str, seed: int, steps: int) -> dict:
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).cuda().long()
    cut, places = len(data) * 9 // 10, torch.arange(CONTEXT + 1, device="cuda")
    torch.manual_seed(seed)
    model = Gpt(RECIPES[name], size).cuda()
    rate = torch.zeros((), device="cuda")
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True, "capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **options)
    shape = (steps, size.batch, 1)
    begins = torch.randint(0, cut - CONTEXT - 1, shape, generator=torch.Generator().manual_seed(seed)).cuda()
    numbers = torch.arange(steps)
    rates = (size.rate * ((numbers + 1) / size.warm_up).clamp(max=1) * (1 - 0.9 * numbers / steps)).cuda()
    window, losses = data[begins[0] + places].clone(), torch.zeros(steps, device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, window)
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph, loss, begin = torch.cuda.CUDAGraph(), None, 0.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for i in range(steps):
        window.copy_(data[begins[i] + places])
        rate.copy_(rates[i])
        if i < WARM_STEPS:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = step()
            torch.cuda.current_stream().wait_stream(stream)
        elif i == WARM_STEPS:
            with torch.cuda.graph(graph):
                loss = step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
        if i >= WARM_STEPS:
            graph.replay()
        losses[i] = loss
    torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - begin) / max(steps - WARM_STEPS, 1)
    sampled = torch.randint(
        cut, len(data) - CONTEXT - 1, (40, 32, 1), generator=torch.Generator().manual_seed(9)
    ).cuda()
    with torch.no_grad():  # the same samples for all
        validation = torch.stack([loss_of(model, data[each + places]) for each in sampled]).mean().item()
    means = losses.unflatten(0, (-1, EVERY)).mean(1).tolist()
    return {"recipe": name, "seed": seed, "validation": validation, "ms": ms, "losses": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help=f"a multiple of {EVERY}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--out")
    args = parser.parse_args()
    info = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": args.steps, "every": EVERY}
    runs, begin = [], time.monotonic()
    for seed, recipe in ((seed, recipe) for seed in args.seeds for recipe in args.recipes):
        if time.monotonic() - begin > args.seconds:
            break
        runs.append(run(SIZES[args.size], recipe, seed, args.steps))
        torch.cuda.empty_cache()
        print(recipe, seed, f"{runs[-1]['validation']:.4f}, {runs[-1]['ms']:.1f} ms a step", flush=True)
        if args.out:
            store.save(args.out, info | {"size": args.size, "runs": runs})


if __name__ == "__main__":
    main()
