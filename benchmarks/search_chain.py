"""Times the fastest configs of a search once more, in chains of dependent launches; calibrate.py chooses by both.

    PYTHONPATH=. python benchmarks/search_chain.py SEARCH.json --out benchmarks/results/search_chain_h200.json

For m <= 128, whose launches are links of a chain in a decoding step. With programmatic dependent launch a block takes
the first SM that is free, often beside one that works as well, and the two SMs of a TPC share its bandwidth: at
64x4096x7168 64x48, 86 blocks, takes 2 % less than 64x32 when it is launched alone, and 18 % more in a chain (H200,
2026-11-22).
"""

import argparse
from pathlib import Path

import torch
from rich.progress import track

from benchmarks import store, timing
from benchmarks.bench_chain import LAUNCHES, REPEATS, Chain
from benchmarks.predict import bucket_of, contenders, load_search
from benchmarks.shapes import Shape
from deep_tile.select.defaults import default_configs

LARGEST_M = 128


def chain_us(shape: Shape, names: set[str], flush: timing.L2Flush) -> dict[str, float]:
    """Microseconds per launch in a chain, by config name."""
    chain = Chain(shape)
    configs = {config.name: config for config in default_configs()}
    graphs = {name: chain.capture(config=configs[name]) for name in sorted(names)}
    return {name: time.us / LAUNCHES for name, time in timing.time_alternating(graphs, REPEATS, flush).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path, help="JSON file of search.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    searched = {shape: times for shape, times in load_search(arguments.search).items() if shape.m <= LARGEST_M}
    names = contenders(searched)  # the same for all shapes of a bucket, because they share a choice
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):
        us = {str(shape): chain_us(shape, names[bucket_of(shape)], flush) for shape in track(searched)}
    store.save(arguments.out, {"run": timing.describe_run(), "us_per_launch": us})


if __name__ == "__main__":
    main()
