"""Loss curves of a small GPT on bytes of Python's own library, in BF16 and in FP8, of several seeds at once.

    PYTHONPATH=. python benchmarks/bench_loss.py --out loss.json [--recipes bf16 fp8] [--seeds 0 1 2] [--steps 1000]

Linear layers, MLPs included, are FP8, the last one is not; weights are FP32, activations BF16. Each run is a process of
its own, all on one GPU. benchmarks/figures.py draws what is stored as benchmarks/results/loss_*.json.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import store
from benchmarks.bench_train import Block
from deep_tile import train

RECIPES = {"bf16": None, "fp8": train.Recipe(), "fp8, kept in fp8": train.Recipe(activations="fp8")}
CONTEXT, EVERY = 256, 10
"""Bytes of a sequence; steps of which the mean loss is stored."""


class Gpt(nn.Module):
    def __init__(self, recipe: train.Recipe | None, width: int = 512, layers: int = 4):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        blocks = (Block(width, width // 64, width // 64, 3 * width, recipe) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        if recipe is not None:
            train.convert(self.blocks, lambda *_: True, recipe=recipe)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place.weight)))


def run(name: str, seed: int, steps: int, batch: int = 32) -> dict:
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).cuda()
    cut = len(data) * 9 // 10
    torch.manual_seed(seed)
    model = Gpt(RECIPES[name]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draws = torch.Generator().manual_seed(seed)
    places = torch.arange(CONTEXT + 1)

    def loss_of(first: int, last: int) -> torch.Tensor:
        begins = torch.randint(first, last - CONTEXT - 1, (batch, 1), generator=draws)
        window = data[(begins + places).cuda()].long()
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())

    losses = []
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (i + 1) / 40) * (1 - 0.9 * i / steps)
        loss = loss_of(0, cut)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    draws.manual_seed(9)  # the same samples for all
    with torch.no_grad():
        validation = torch.stack([loss_of(cut, len(data)) for _ in range(40)]).mean().item()
    means = torch.stack(losses).unflatten(0, (-1, EVERY)).mean(1).tolist()
    return {"recipe": name, "seed": seed, "validation": validation, "losses": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help=f"a multiple of {EVERY}")
    parser.add_argument("--out")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.recipes[0], args.seeds[0], args.steps)))
        return
    pairs = [(recipe, seed) for recipe in args.recipes for seed in args.seeds]
    command = [sys.executable, __file__, "--one", "--steps", str(args.steps)]
    started = [
        subprocess.Popen([*command, "--recipes", recipe, "--seeds", str(seed)], stdout=subprocess.PIPE, text=True)
        for recipe, seed in pairs
    ]
    runs = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    for each in runs:
        print(each["recipe"], each["seed"], f"{each['validation']:.4f}")
    if args.out:
        info = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": args.steps, "every": EVERY}
        store.save(args.out, info | {"runs": runs})


if __name__ == "__main__":
    main()
