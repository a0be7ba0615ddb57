"""Training steps in FP8 and in BF16: time and memory of layers of Llama-8B, forward, backward and fused AdamW.

    PYTHONPATH=. python benchmarks/bench_train.py --out train.json [--variants bf16 fp8 ...] [--modes eager compile]

A variant is BF16, or a recipe of `deep_tile.train`; with "mlp" the MLP is one function, without it linear layers.
"torchao" is its tensor-wise recipe, where it is installed. Alone on a Hopper GPU; compare within one run.
"""

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import store, timing
from deep_tile import train

VARIANTS: dict[str, dict | None] = {
    "bf16": None,
    "linear": {},
    "mlp": {},
    "mlp fp8": {"activations": "fp8"},
    "mlp recast": {"recast": True},
    "mlp fp8 recast": {"activations": "fp8", "recast": True},
    "torchao": None,
}
"""Keywords of the `Recipe` of each contestant."""

PARTS = {
    "casts": "^fp8_cast",
    "all else": "^triton",
    "attention": "flash|fmha|sdpa",
    "GEMMs": "gemm|nvjet|cutlass|splitk|_grouped_mm",
    "optimizer": "multi_tensor|adam",
}
"""A step's kernels by their names; the first that fits counts."""

METHOD = (
    "ms: median over steps between CUDA events, after three steps; host_ms: the shortest enqueueing of one. peak_gb: "
    "the most memory in a step; static_gb: before it; saved_gb: kept by a forward pass. timeline_ms: the kernels of "
    "a profiled step, each from the end of those before it."
)


class Block(nn.Module):
    """A layer of Llama-8B, or of other sizes."""

    def __init__(self, width=4096, heads=32, groups=8, inner=14336, recipe: train.Recipe | None = None):
        super().__init__()
        self.heads, self.groups, self.size, self.recipe = heads, groups, width // heads, recipe
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm(x))
        h = self.norm_mlp(x)
        if self.recipe is not None:
            weights = self.gate.weight, self.up.weight
            return x + train.mlp(h, weights, self.down.weight, recipe=self.recipe)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        counts = (self.heads, self.groups, self.groups)
        q, k, v = (
            layer(x).unflatten(-1, (count, self.size)).transpose(1, 2)
            for layer, count in zip((self.q, self.k, self.v), counts, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def make_model(variant: str, layers: int, tokens: int, sizes: dict) -> nn.Module:
    recipe = train.Recipe(**VARIANTS[variant]) if VARIANTS[variant] is not None else None
    fused = recipe if variant.startswith("mlp") else None
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block(**sizes, recipe=fused) for _ in range(layers))).bfloat16()
    if recipe is not None:
        train.convert(model, lambda *_: True, recipe=recipe)
        train.precompile(model, tokens)
    if variant == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    return model


def measure(variant: str, compiled: bool, args: argparse.Namespace) -> dict:
    model = make_model(variant, args.layers, args.tokens, {"width": args.width, "inner": args.inner})
    if compiled:
        for block in model:
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(args.tokens // 4096, 4096, args.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x) * 1e-3

    def step() -> None:
        model(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    measured = measure_step(step, args.steps)
    before = torch.cuda.memory_allocated()
    y = model(x)
    saved = torch.cuda.memory_allocated() - before - y.nbytes
    entry = {"variant": variant, "mode": "compile" if compiled else "eager"}
    return entry | measured | {"saved_gb": saved / 1e9}


def measure_step(step: Callable[[], None], count: int) -> dict:
    """Time, memory and parts of a step that leaves nothing behind."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated()
    ms, host = time_steps(step, count)
    memory = {"static_gb": static / 1e9, "peak_gb": peak / 1e9}
    return {"ms": ms, "host_ms": host, **memory, "timeline_ms": time_parts(step)}


def time_parts(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a step's kernels, by `PARTS`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return parts_of(kernels)


def parts_of(kernels: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Milliseconds by `PARTS` from begins, ends in us and names. A kernel that waits for the one before it, as
    programmatic launches have it, counts from that one's end."""
    parts, reached = dict.fromkeys(PARTS, 0.0), 0.0
    for begin, end, name in sorted(kernels):
        parts[part_of(name)] += max(end - max(begin, reached), 0.0) / 1e3
        reached = max(reached, end)
    return parts


def part_of(kernel: str) -> str:
    fits = (part for part, pattern in PARTS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(fits, "all else")


def time_steps(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Median times in ms: a step on the GPU, and enqueueing one on the host."""
    on_gpu, on_host = [], []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        begin = time.perf_counter()
        step()
        on_host.append(1e3 * (time.perf_counter() - begin))
        event.record()
    torch.cuda.synchronize()
    on_gpu = [one.elapsed_time(other) for one, other in zip(events, events[1:], strict=False)]
    return statistics.median(on_gpu), min(on_host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[name for name in VARIANTS if name != "torchao"]
    )
    parser.add_argument("--modes", nargs="+", choices=("eager", "compile"), default=("eager", "compile"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 4096, the length of a sequence")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out")
    args = parser.parse_args()
    entries, about = [], {name: getattr(args, name) for name in ("layers", "tokens", "width", "inner")}
    with torch.device("meta"):
        block = Block(args.width, inner=args.inner)
    about["weights"] = [[*layer.weight.shape] for layer in block.modules() if isinstance(layer, nn.Linear)]
    for variant, mode in itertools.product(args.variants, args.modes):
        entries.append(measure(variant, mode == "compile", args))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        print(json.dumps(entries[-1]), flush=True)
        if args.out:
            store.save(args.out, {"meta": timing.describe_run(METHOD)} | about | {"entries": entries})


if __name__ == "__main__":
    main()
