"""A linear layer's forward and backward pass in eager mode, in BF16 and FP8: host and GPU time.

    PYTHONPATH=. python benchmarks/bench_train_layers.py --out layers.json [--sizes 8192x2048x2048 ...] [--of three mlp]

Also three layers on one input, a gated MLP, whose gates and ups are [n, k] and whose last weight is [k, n], and a
frozen layer, as under LoRA: its forward pass and its input's gradient. "joined" is the default: of small layers one
call into C for each pass, of others each call by itself, which small ones do "in turn". "graph" has no host. Alone on a
Hopper GPU; compare within one run.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import deep_tile
from benchmarks import store, timing
from deep_tile.select import training
from deep_tile.train import linear, linears, mlp

WIDTHS = 1024, 2048, 4096, 8192, 14336

SIZES = (
    *("256x512x512", "2048x1024x1024", "8192x1024x1024", "8192x2048x2048", "4096x2048x2048", "8192x1024x4096"),
    *("8192x4096x4096", "8192x7168x2048"),
    *(f"4096x{n}x{k}" for n, k in itertools.product(WIDTHS, WIDTHS) if (n, k) != (2048, 2048)),
)
"""Tokens, n, k."""

SIZES_OF_SEVERAL = "4096x1024x1024", "8192x1024x1024", "8192x2048x1024", "4096x2048x2048", "8192x2048x2048"

SIZES_FROZEN = "8192x4096x4096", "8192x1024x4096", "8192x14336x4096", "8192x4096x14336", "8192x7168x2048"

SIZES_OF = {"frozen": SIZES_FROZEN, "linear": SIZES, "three": SIZES_OF_SEVERAL, "mlp": SIZES_OF_SEVERAL}

CALLS_OF = {
    "frozen": (F.linear, None),
    "linear": (F.linear, linear),
    "three": (lambda x, *ws: tuple(F.linear(x, w) for w in ws), lambda x, *ws: linears(x, ws)),
    "mlp": (
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        lambda x, gate, up, down: mlp(x, (gate, up), down),
    ),
}
"""By what is measured: in BF16, and in FP8; a frozen layer's FP8 weight is made where it is measured."""

REPEATS, CALLS, BATCH_US = 5, 40, 30_000

METHOD = (
    f"Microseconds, the shortest of {REPEATS} batches of at most {CALLS} calls or {BATCH_US / 1e3:.0f} ms. host: to "
    "enqueue both passes, or the forward pass alone; eager: until the GPU is done; graph: a CUDA graph of four."
)


def host_us(call: Callable[[], None], calls: int) -> float:
    """The shortest time in which the host enqueues it."""
    return min(_timed(call, lambda: None, min(calls, 10)) for _ in range(REPEATS))


def _timed(call: Callable[[], None], finish: Callable[[], None], count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    finish()
    return 1e6 * (time.perf_counter() - begin) / count


def _shortest(call: Callable[[], None]) -> float:
    once = _timed(call, torch.cuda.synchronize, 2)
    calls = max(2, min(CALLS, int(BATCH_US / once)))
    return min(_timed(call, torch.cuda.synchronize, calls) for _ in range(REPEATS))


def measure(of: str, tokens: int, n: int, k: int) -> dict:
    shapes = {"mlp": [(n, k), (n, k), (k, n)], "three": [(n, k)] * 3}.get(of, [(n, k)])
    x = torch.randn(tokens, k, device="cuda").bfloat16().requires_grad_()
    weights = [torch.randn(shape, device="cuda").bfloat16().requires_grad_(of != "frozen") for shape in shapes]
    width, count = (k, 1) if of == "mlp" else (n, len(weights))
    dy = [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(count)]
    of_linear, most = sys.modules["deep_tile.train.linear"], training.MOST_PRODUCTS
    in_bf16, in_fp8 = CALLS_OF[of]
    entry = {"of": of, "tokens": tokens, "n": n, "k": k}
    ways = {"bf16": in_bf16, "joined": in_fp8, "in turn": in_fp8}
    if of == "frozen":
        b, b_scale = deep_tile.quantize_weight(weights[0])
        ways = {"bf16": in_bf16, "fp8": lambda x, _: deep_tile.fp8_linear(x, b, b_scale)}
        entry |= {"bf16, bytes": weights[0].nbytes, "fp8, bytes": b.nbytes + b_scale.nbytes}
    elif not training.is_small(tokens, n, k):
        del ways["in turn"]
    wanted = [each for each in (x, *weights) if each.requires_grad]
    for way, call in ways.items():
        training.MOST_PRODUCTS = 0 if way == "in turn" else most
        of_linear._checked.clear()

        def forward(call=call):
            return call(x, *weights)

        def step(call=call) -> None:
            torch.autograd.backward(call(x, *weights), dy if count > 1 else dy[0])
            for each in wanted:
                each.grad = None

        for _ in range(5):
            step()
        calls = max(2, int(BATCH_US / _timed(step, torch.cuda.synchronize, 2)))
        entry[f"{way} forward, host"] = host_us(forward, calls)
        entry[f"{way}, host"] = host_us(step, calls)
        entry[f"{way}, eager"] = _shortest(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                torch.autograd.grad(forward(), wanted, dy)
        graph.replay()
        entry[f"{way}, graph"] = _shortest(graph.replay) / 4
    training.MOST_PRODUCTS = most
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--of", nargs="+", choices=CALLS_OF, default=[*CALLS_OF])
    parser.add_argument("--out")
    args = parser.parse_args()
    entries = []
    for of, size in ((name, size) for name in args.of for size in args.sizes or SIZES_OF[name]):
        entries.append(measure(of, *map(int, size.split("x"))))
        print(json.dumps(store.rounded(entries[-1])), flush=True)
        if args.out:
            store.save(args.out, {"meta": timing.describe_run(METHOD), "entries": entries})


if __name__ == "__main__":
    main()
