"""Times every default config on the table's shapes and some more; calibrate.py fits the time model to that.

    PYTHONPATH=. python benchmarks/search.py --out benchmarks/results/search_h200.json

About a minute of GPU time. Each config's output is checked; a config far wider or narrower than the shape is left out.
Those that may be the fastest are timed once more, among themselves (timing.time_to_choose). Two searches differ by 1 %
in a config and shape, most of it the state of the GPU: --with averages this one and earlier ones.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks import store, timing
from benchmarks.peers import Inputs, deep_tile_peer
from benchmarks.shapes import Shape, select_shapes
from deep_tile import plan
from deep_tile.config import GemmConfig
from deep_tile.problem import GemmProblem
from deep_tile.reference import MAX_RELATIVE_ERROR, relative_error
from deep_tile.select.choose import suits
from deep_tile.select.defaults import default_configs

FEW_OUTPUTS = 2048 * 1536
"""So few outputs that tiles of 128 rows may leave SMs idle."""

SearchedUs = dict[str, dict[str, float]]
"""Microseconds by "MxNxK" and config."""


def plausible(config: GemmConfig, shape: Shape) -> bool:
    """Whether a config can be near the best: rows not mostly empty, and not dozens of times more tiles than SMs."""
    if not suits(config, GemmProblem(*shape)):
        return False
    if config.block_m > 64:
        return shape.m > 64 and (config.split_k == 1 or shape.m <= 2048)
    return shape.m <= (256 if config.block_n < 64 else 512) or shape.m * shape.n <= FEW_OUTPUTS


def search_shape(shape: Shape, repeats: int, flush: timing.L2Flush) -> dict[str, float]:
    """Median microseconds by config name."""
    inputs = Inputs(shape)
    graphs = {}
    for config in filter(lambda config: plausible(config, shape), default_configs()):
        call = deep_tile_peer(config).prepare(inputs)
        error = float(relative_error(call(), inputs.block_product))
        if not error <= MAX_RELATIVE_ERROR:
            raise RuntimeError(f"{config.name} at {shape}: relative error {error:.2e} exceeds {MAX_RELATIVE_ERROR}")
        graphs[config.name] = timing.capture(call)
    return timing.time_to_choose(graphs, repeats, flush)


def write(path: Path, run: dict[str, Any], times: SearchedUs, earlier: Sequence[dict[str, Any]]) -> None:
    """The file of a search: averages, and when the searches were made."""
    dates = [search["run"]["date"] for search in earlier]
    us = averaged([times, *(search["us"] for search in earlier)])
    store.save(path, {"run": {**run, "averaged_with": dates}, "us": us})


def averaged(searches: Sequence[SearchedUs]) -> SearchedUs:
    """Geometric means over searches, of the configs of the first.

    An earlier search may lack a shape or a config; where it has a shape, it is scaled to agree with the first in the
    median, so that what it lacks does not matter.
    """
    first = searches[0]
    return {shape: _averaged([search[shape] for search in searches if shape in search]) for shape in first}


def _averaged(times: Sequence[dict[str, float]]) -> dict[str, float]:
    first = times[0]
    scaled = []
    for one in times:
        common = first.keys() & one.keys()
        scale = statistics.median(first[name] / one[name] for name in common)
        scaled.append({name: one[name] * scale for name in common})
    return {name: statistics.geometric_mean([one[name] for one in scaled if name in one]) for name in first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="searched", help="as for bench_gemm.py (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=10, help="samples of each config that may be the fastest (default: %(default)s)"
    )
    parser.add_argument("--with", dest="earlier", type=Path, nargs="*", default=[], help="searches to average with it")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    plan.load_kernels(default_configs(), torch.cuda.current_device(), os.cpu_count() or 1)
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):
        times = {
            str(shape): search_shape(shape, arguments.repeats, flush)
            for shape in track(select_shapes(arguments.shapes))
        }
    write(arguments.out, timing.describe_run(), times, [store.load(path) for path in arguments.earlier])


if __name__ == "__main__":
    main()
