"""A linear layer's forward and backward pass in eager mode, in BF16 and FP8: host and GPU time.

    PYTHONPATH=. python benchmarks/bench_train_layers.py --out layers.json [--sizes 8192x2048x2048 ...]

"joined" is the way that small layers go, one call into C for each pass, "in turn" that of others, each call by itself;
"graph" has no host. Alone on a Hopper GPU; compare within one run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import store
from deep_tile.train import linear, sizes

SIZES = (
    *("256x512x512", "2048x1024x1024", "8192x1024x1024", "8192x2048x2048", "4096x2048x2048", "8192x1024x4096"),
    *("8192x4096x4096", "8192x7168x2048"),
)
"""Tokens, n, k."""

REPEATS, CALLS = 5, 40


def host_us(call: Callable[[], None], finish: Callable[[], None]) -> float:
    """The shortest time in which the host enqueues it."""
    return min(_timed(call, finish, 10) for _ in range(REPEATS))


def _timed(call: Callable[[], None], finish: Callable[[], None], count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    finish()
    return 1e6 * (time.perf_counter() - begin) / count


def measure(tokens: int, n: int, k: int) -> dict:
    x = torch.randn(tokens, k, device="cuda").bfloat16().requires_grad_()
    weight, dy = (
        nn.Parameter(torch.randn(n, k, device="cuda").bfloat16()),
        torch.randn(tokens, n, device="cuda").bfloat16(),
    )
    of_linear, most = sys.modules["deep_tile.train.linear"], sizes.MOST_PRODUCTS
    entry = {"tokens": tokens, "n": n, "k": k}
    for way, call in (("bf16", F.linear), ("joined", linear), ("in turn", linear)):
        sizes.MOST_PRODUCTS = 0 if way == "in turn" else most
        of_linear._checked.clear()

        def forward(call=call) -> torch.Tensor:
            return call(x, weight)

        def step(call=call) -> None:
            call(x, weight).backward(dy)
            x.grad = weight.grad = None

        for _ in range(5):
            step()
        entry[f"{way} forward, host"] = host_us(forward, lambda: None)
        entry[f"{way}, host"] = host_us(step, lambda: None)
        entry[f"{way}, eager"] = min(_timed(step, torch.cuda.synchronize, CALLS) for _ in range(REPEATS))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                torch.autograd.grad(forward(), (x, weight), dy)
        graph.replay()
        entry[f"{way}, graph"] = min(_timed(graph.replay, torch.cuda.synchronize, 10) / 4 for _ in range(REPEATS))
    sizes.MOST_PRODUCTS = most
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--out")
    args = parser.parse_args()
    entries = []
    for size in args.sizes:
        entries.append(measure(*map(int, size.split("x"))))
        print(json.dumps({key: round(value, 1) for key, value in entries[-1].items()}), flush=True)
        if args.out:
            info = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            store.save(args.out, info | {"entries": entries})


if __name__ == "__main__":
    main()
