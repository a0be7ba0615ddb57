"""Times the fastest configs of a search once more, in chains of dependent launches; calibrate.py chooses by both.

    PYTHONPATH=. python benchmarks/search_chain.py SEARCH.json --out benchmarks/results/search_chain_h200.json

For m <= 128, whose launches are links of a chain in a decoding step. With programmatic dependent launch a block takes
the first SM that is free, often beside one that works as well, and the two SMs of a TPC share its bandwidth: at
64x4096x7168 64x48, 86 blocks, takes 2 % less than 64x32 when it is launched alone, and 18 % more in a chain (H200,
2026-11-22).
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from rich.progress import track

from benchmarks import timing
from benchmarks.bench_chain import LAUNCHES, REPEATS, Chain
from benchmarks.predict import Searched, bucket_of, load_search, tied_for_fastest
from benchmarks.shapes import Shape
from deep_tile import select
from deep_tile.problem import GemmProblem

LARGEST_M = 128


def contenders(searched: Searched) -> dict[Shape, set[str]]:
    """By shape, names of the configs that tie for the fastest at one m of its bucket; all shapes of a bucket, which
    share a choice, have the same."""
    tied: dict[GemmProblem, set[str]] = defaultdict(set)
    for shape, times in searched.items():
        tied[bucket_of(shape)] |= tied_for_fastest(times)
    return {shape: tied[bucket_of(shape)] for shape in searched}


def chain_us(shape: Shape, names: set[str], flush: timing.L2Flush) -> dict[str, float]:
    """Microseconds per launch in a chain, by config name."""
    chain = Chain(shape)
    configs = {config.name: config for config in select.default_configs()}
    graphs = {name: chain.capture(config=configs[name]) for name in sorted(names)}
    return {name: time.us / LAUNCHES for name, time in timing.time_alternating(graphs, REPEATS, flush).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path, help="JSON file of search.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    searched = {shape: times for shape, times in load_search(arguments.search).items() if shape.m <= LARGEST_M}
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):
        us = {str(shape): chain_us(shape, names, flush) for shape, names in track(contenders(searched).items())}
    arguments.out.write_text(json.dumps({"run": timing.describe_run(), "us_per_launch": us}, indent=1) + "\n")


if __name__ == "__main__":
    main()
