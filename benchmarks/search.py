"""Times every default config on the table's shapes and some of short K; calibrate.py fits the time model to that.

    PYTHONPATH=. python benchmarks/search.py --out benchmarks/results/search_h200.json

About a minute of GPU time. Each config's output is checked; a config far wider or narrower than the shape is left out.
Those that may be the fastest are timed once more, among themselves (timing.time_to_choose).
"""

import argparse
import json
import os
from pathlib import Path

import torch
from rich.progress import track

from benchmarks import timing
from benchmarks.peers import Inputs, deep_tile_peer
from benchmarks.shapes import Shape, select_shapes
from deep_tile import plan, select
from deep_tile.config import GemmConfig
from deep_tile.reference import relative_error

MAX_ERROR = 1.8e-3


def plausible(config: GemmConfig, shape: Shape) -> bool:
    """Whether a config can be near the best: neither most of its rows empty nor dozens of times more tiles than SMs."""
    if not config.takes_k(shape.k):
        return False
    if config.block_m > 64:
        return shape.m > 64 and (config.split_k == 1 or shape.m <= 2048)
    return shape.m <= (256 if config.block_n < 64 else 512)


def search_shape(shape: Shape, repeats: int, flush: timing.L2Flush) -> dict[str, float]:
    """Median microseconds by config name."""
    inputs = Inputs(shape)
    graphs = {}
    for config in filter(lambda config: plausible(config, shape), select.default_configs()):
        call = deep_tile_peer(config).prepare(inputs)
        error = float(relative_error(call(), inputs.block_product))
        if not error <= MAX_ERROR:
            raise RuntimeError(f"{config.name} at {shape}: relative error {error:.2e} exceeds {MAX_ERROR:.1e}")
        graphs[config.name] = timing.capture(call)
    return timing.time_to_choose(graphs, repeats, flush)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="searched", help="as for bench_gemm.py (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=10, help="samples of each config that may be the fastest (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    plan.load_kernels(select.default_configs(), torch.cuda.current_device(), os.cpu_count() or 1)
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):
        times = {
            str(shape): search_shape(shape, arguments.repeats, flush)
            for shape in track(select_shapes(arguments.shapes))
        }
    arguments.out.write_text(json.dumps({"run": timing.describe_run(), "us": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
