"""A chain of dependent launches, as a decoding step makes them, with and without programmatic dependent launch.

    PYTHONPATH=. python benchmarks/bench_chain.py --out benchmarks/results/chain.json

One graph of LAUNCHES products, each with weights of its own, in microseconds per launch, beside a graph of one launch.
L2 is not flushed: the weights of a chain are several times its size, those of the single launch stay where they are.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median

import torch

import deep_tile
from benchmarks.shapes import DEEPSEEK_V3_LAYERS
from benchmarks.timing import describe_run

TOKENS = (1, 16, 64)
LAUNCHES = 20
REPEATS = 30
WEIGHT_BYTES = 400 << 20
"""Weights of a chain, in all: seven times an H200's L2."""

BUSY_CYCLES = 200_000
OPTIONS = {"plain": {"pdl": False}, "pdl": {}, "constant_weights": {"constant_weights": True}}


def graph_us(work: Callable[[], object]) -> float:
    """Median time of a graph of `work`, enqueued while the GPU is busy, so that no host time is measured."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def measure(m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds per launch: single, and by option in a chain."""
    sets = max(2, min(LAUNCHES, WEIGHT_BYTES // (n * k)))
    weights = [deep_tile.per_block_cast_to_fp8(torch.randn(n, k, device="cuda")) for _ in range(sets)]
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def chain(options: dict[str, bool]) -> None:
        for i in range(LAUNCHES):
            deep_tile.fp8_gemm(a, a_scale, *weights[i % sets], out, **options)

    times = {"single": graph_us(lambda: deep_tile.fp8_gemm(a, a_scale, *weights[0], out))}
    for name, options in OPTIONS.items():
        times[name] = graph_us(lambda options=options: chain(options)) / LAUNCHES
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    path = parser.parse_args().out
    times = {f"{m}x{n}x{k}": measure(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in TOKENS}
    path.write_text(json.dumps({"meta": describe_run(), "us_per_launch": times}, indent=1) + "\n")
    for name in OPTIONS:
        ratios = [shape[name] / shape["single"] for shape in times.values()]
        print(f"{name}: {geometric_mean(ratios):.3f} of a single launch")


if __name__ == "__main__":
    main()
