"""A linear layer's forward and backward pass in eager mode, in BF16 and FP8: host and GPU time.

    PYTHONPATH=. python benchmarks/bench_train_layers.py --out layers.json [--sizes 8192x2048x2048 ...] [--of three mlp]

Also three layers on one input, and a gated MLP, whose gates and ups are [n, k] and whose last weight is [k, n].
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
from deep_tile.select import training
from deep_tile.train import linear, linears, mlp

SIZES = (
    *("256x512x512", "2048x1024x1024", "8192x1024x1024", "8192x2048x2048", "4096x2048x2048", "8192x1024x4096"),
    *("8192x4096x4096", "8192x7168x2048"),
)
"""Tokens, n, k."""

SIZES_OF_SEVERAL = "4096x1024x1024", "8192x1024x1024", "8192x2048x1024", "4096x2048x2048", "8192x2048x2048"

CALLS_OF = {
    "linear": (lambda x, w: F.linear(x, w), lambda x, w: linear(x, w)),
    "three": (lambda x, *ws: tuple(F.linear(x, w) for w in ws), lambda x, *ws: linears(x, ws)),
    "mlp": (
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        lambda x, gate, up, down: mlp(x, (gate, up), down),
    ),
}
"""By what is measured: in BF16, and in FP8."""

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


def measure(of: str, tokens: int, n: int, k: int) -> dict:
    shapes = {"linear": [(n, k)], "three": [(n, k)] * 3, "mlp": [(n, k), (n, k), (k, n)]}[of]
    x = torch.randn(tokens, k, device="cuda").bfloat16().requires_grad_()
    weights = [nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in shapes]
    width, count = (k, 1) if of == "mlp" else (n, len(weights))
    dy = [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(count)]
    of_linear, most = sys.modules["deep_tile.train.linear"], training.MOST_PRODUCTS
    in_bf16, in_fp8 = CALLS_OF[of]
    entry = {"of": of, "tokens": tokens, "n": n, "k": k}
    for way, call in (("bf16", in_bf16), ("joined", in_fp8), ("in turn", in_fp8)):
        training.MOST_PRODUCTS = 0 if way == "in turn" else most
        of_linear._checked.clear()

        def forward(call=call):
            return call(x, *weights)

        def step(call=call) -> None:
            torch.autograd.backward(call(x, *weights), dy if count > 1 else dy[0])
            for each in (x, *weights):
                each.grad = None

        for _ in range(5):
            step()
        entry[f"{way} forward, host"] = host_us(forward, lambda: None)
        entry[f"{way}, host"] = host_us(step, lambda: None)
        entry[f"{way}, eager"] = min(_timed(step, torch.cuda.synchronize, CALLS) for _ in range(REPEATS))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                torch.autograd.grad(forward(), (x, *weights), dy)
        graph.replay()
        entry[f"{way}, graph"] = min(_timed(graph.replay, torch.cuda.synchronize, 10) / 4 for _ in range(REPEATS))
    training.MOST_PRODUCTS = most
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--of", nargs="+", choices=CALLS_OF, default=[*CALLS_OF])
    parser.add_argument("--out")
    args = parser.parse_args()
    entries = []
    cases = [(of, size) for of in args.of for size in args.sizes or (SIZES if of == "linear" else SIZES_OF_SEVERAL)]
    for of, size in cases:
        entries.append(measure(of, *map(int, size.split("x"))))
        rounded = {key: value if key == "of" else round(value, 1) for key, value in entries[-1].items()}
        print(json.dumps(rounded), flush=True)
        if args.out:
            info = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            store.save(args.out, info | {"entries": entries})


if __name__ == "__main__":
    main()
