"""Products that nothing was fitted to: layers of public models, tokens drawn with a seed, with our own cast's scales.

    PYTHONPATH=. python benchmarks/bench_unseen.py --seed 7 --out unseen.json [--count 200] [--above 64] [--seconds 120]

Geometric mean, 95th percentile and worst of our time over that of cuBLASLt, tensor-wise fast and block-wise. With
`--every-config N` the first N shapes are also multiplied by each config that suits them, and our choice is held against
the fastest. Times are bench_gemm.py's, and so is the file, which `bench_gemm.py --results` shows.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import bench_gemm, store
from benchmarks.peers import OURS, PEERS, Peer, deep_tile_peer
from benchmarks.shapes import M_RANGES, Shape, m_range
from benchmarks.timing import describe_run
from deep_tile import is_available
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import suits
from deep_tile.select.defaults import default_configs

LAYERS = (
    *((6144, 4096), (28672, 4096), (4096, 14336), (24576, 4096)),
    *((7168, 5120), (34816, 5120), (5120, 17408), (10240, 5120), (51200, 5120), (5120, 25600)),
    *((4608, 3584), (37888, 3584), (3584, 18944), (43008, 5376), (5376, 21504), (7680, 5120), (5120, 17920)),
)
"""(n, k) of Llama 3.1 8B, Qwen3 8B, 14B and 32B, Qwen2.5 7B, Gemma 3 27B and Phi-4; none is in shapes.py."""

MOST_TOKENS = 16_384
CUBLASLT = ("cublaslt_tensor_fast", "cublaslt_block")


def draw(seed: int, count: int, above: int | None = None) -> list[Shape]:
    """Layers in turn, each with a number of tokens whose logarithm is drawn evenly, or one more than a multiple of
    `above`, from 2 * above + 1 to 1025."""
    random = Random(seed)

    def tokens() -> int:
        if above is None:
            return round(math.exp(random.uniform(0, math.log(MOST_TOKENS))))
        return random.randint(2, 1024 // above) * above + 1

    return [Shape(tokens(), *LAYERS[number % len(LAYERS)]) for number in range(count)]


def every_config(shape: Shape) -> list[Peer]:
    """Contestants of ours with each config that suits a shape."""
    problem = GemmProblem(*shape)
    return [deep_tile_peer(config) for config in default_configs() if suits(config, problem)]


def measure(options: argparse.Namespace, console: Console) -> bench_gemm.Run:
    peers = [OURS, *(PEERS[name] for name in CUBLASLT)]
    shapes, rows, end = draw(options.seed, options.count, options.above), [], time.monotonic() + options.seconds
    settings = argparse.Namespace(
        scale_layout=options.scale_layout, repeats=options.repeats, check=True, sustained=False
    )
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        bench = bench_gemm.Bench(peers, settings)
        for number, shape in enumerate(track(shapes, description="Measuring", console=console)):
            if time.monotonic() > end:
                break
            bench.peers = [*peers, *(every_config(shape) if number < options.every_config else ())]
            rows.append(bench.measure(shape))
            torch.cuda.empty_cache()
        meta = describe_run()
    drawn = {"seed": options.seed, "above": options.above, "drawn": len(shapes)}
    labels = {peer.name: peer.label for peer in peers}
    return {"meta": meta | drawn | {"labels": labels, "scale_layout": options.scale_layout}, "shapes": rows}


def ratios(rows: Iterable[dict[str, Any]], peer: str) -> dict[str, list[float]]:
    """Our time over a contestant's, by range of m, in order."""
    found: dict[str, list[float]] = {}
    for row in rows:
        results = row["results"]
        if peer in results and OURS.name in results:
            name = m_range(Shape(row["m"], row["n"], row["k"]))
            found.setdefault(name, []).append(results[OURS.name]["us"] / results[peer]["us"])
    return {name: sorted(found[name]) for name in M_RANGES if name in found}


def percentile(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


def losses(rows: Iterable[dict[str, Any]]) -> list[float]:
    """The time of the choice over that of the fastest config, where all were timed."""
    found = []
    for row in rows:
        times = {name: result["us"] for name, result in row["results"].items() if name.startswith("fp8_gemm_")}
        if times:
            found.append(times.get(row["config"], row["results"][OURS.name]["us"]) / min(times.values()))
    return found


def print_run(run: bench_gemm.Run, console: Console) -> None:
    table = Table("deep_tile over", "m", "shapes", "mean", "95th percentile", "worst")
    for peer in CUBLASLT:
        for name, found in ratios(run["shapes"], peer).items():
            figures = (geometric_mean(found), percentile(found, 0.95), found[-1])
            table.add_row(PEERS[peer].label, name, str(len(found)), *(f"{figure:.3f}" for figure in figures))
    console.print(table)
    if found := losses(run["shapes"]):
        console.print(f"choice over the fastest of all configs: {geometric_mean(found):.3f}, worst {max(found):.3f}")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the draw: one for fitting, another for reporting")
    parser.add_argument("--count", type=int, default=200, help="shapes; default: %(default)s")
    parser.add_argument("--above", type=int, help="m one above a multiple of this, such as 64, from twice that to 1025")
    parser.add_argument("--every-config", type=int, default=0, metavar="N", help="time every config for N shapes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--repeats", type=int, default=15, help="samples per contestant and shape")
    parser.add_argument("--scale-layout", default=bench_gemm.DEFAULT_SCALE_LAYOUT, choices=bench_gemm.SCALE_LAYOUTS)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    available, reason = is_available()
    if not available:
        raise SystemExit(f"benchmarks need a Hopper GPU: {reason}")
    console = Console(width=None if sys.stdout.isatty() else bench_gemm.WIDE)
    run = measure(options, console)
    if options.out:
        store.save(options.out, run)
    print_run(run, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
