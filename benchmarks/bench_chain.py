"""A chain of dependent launches, as a decoding step makes them, with and without programmatic dependent launch.

    PYTHONPATH=. python benchmarks/bench_chain.py --out benchmarks/results/chain.json

One graph of LAUNCHES products, each with weights of its own, in microseconds per launch, beside a graph of one launch,
L2 flushed before each; and that one launch with its weights in L2, where it has left them.
"""

import argparse
from pathlib import Path
from statistics import geometric_mean

import torch

import deep_tile
from benchmarks import store, timing
from benchmarks.shapes import DEEPSEEK_V3_LAYERS, Shape

TOKENS = (1, 16, 64)
LAUNCHES = 20
REPEATS = 30
WEIGHT_BYTES = 400 << 20
"""Weights of a chain, in all: seven times an H200's L2."""

SINGLE, WARM = "single", "single, weights in L2"
OPTIONS = {"plain": {"pdl": False}, "pdl": {}, "constant_weights": {"constant_weights": True}}


class Chain:
    """Products that all write one `out`, each with other weights than those before it."""

    def __init__(self, shape: Shape):
        m, n, k = shape
        sets = max(2, min(LAUNCHES, WEIGHT_BYTES // (n * k)))
        self._weights = [deep_tile.per_block_cast_to_fp8(torch.randn(n, k, device="cuda")) for _ in range(sets)]
        self._a, self._a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
        self._out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def capture(self, launches: int = LAUNCHES, **options) -> timing.Captured:
        """A graph of so many launches with these options of fp8_gemm."""
        return timing.capture(lambda: self._run(launches, options))

    def _run(self, launches: int, options: dict) -> torch.Tensor:
        for i in range(launches):
            deep_tile.fp8_gemm(self._a, self._a_scale, *self._weights[i % len(self._weights)], self._out, **options)
        return self._out


def measure(shape: Shape, flush: timing.L2Flush) -> dict[str, float]:
    """Microseconds per launch: single, single with the weights in L2, and by option in a chain."""
    chain = Chain(shape)
    single = {SINGLE: chain.capture(launches=1)}
    chains = {name: chain.capture(**options) for name, options in OPTIONS.items()}
    cold = timing.time_alternating(single | chains, REPEATS, flush)
    warm = timing.time_alternating(single, REPEATS, timing.keep_busy)
    per_launch = {name: cold[name].us / LAUNCHES for name in chains}
    return {SINGLE: cold[SINGLE].us, WARM: warm[SINGLE].us, **per_launch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    path = parser.parse_args().out
    shapes = [Shape(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in TOKENS]
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):
        times = {str(shape): measure(shape, flush) for shape in shapes}
    store.save(path, {"meta": timing.describe_run(), "us_per_launch": times})
    for name in OPTIONS:
        for single in (SINGLE, WARM):
            ratio = geometric_mean(us[name] / us[single] for us in times.values())
            print(f"{name}: {ratio:.3f} of {single}")


if __name__ == "__main__":
    main()
