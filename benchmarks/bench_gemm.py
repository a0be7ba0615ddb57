"""Time fp8_gemm against other libraries, check every timed output, and write the results as JSON.

    PYTHONPATH=. python benchmarks/bench_gemm.py --shapes nine --sustained --out benchmarks/results/nine.json
    PYTHONPATH=. python benchmarks/bench_gemm.py --compare OLD.json NEW.json
    PYTHONPATH=. python benchmarks/bench_gemm.py --results OLD.json --plot layers.png

The method is in timing.py, the contestants in peers.py. Exits with 1 when deep_tile fails at a shape or its output is
further from the exact product than BF16 rounding explains.
"""

import argparse
import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import store
from benchmarks.peers import OURS, PEERS, Inputs, Peer, deep_tile_peer
from benchmarks.report import Run, plot_tflops, print_comparison, print_run, shape_of
from benchmarks.shapes import Shape, select_shapes
from benchmarks.timing import (
    Captured,
    L2Flush,
    capture,
    capture_empty,
    describe_run,
    time_alternating,
    time_cool,
    time_sustained,
)
from deep_tile import is_available
from deep_tile.method.report import picture_path
from deep_tile.options import SCALE_LAYOUTS
from deep_tile.problem import GemmProblem
from deep_tile.quantize import DEFAULT_SCALE_LAYOUT
from deep_tile.reference import MAX_RELATIVE_ERROR, cosine_difference, relative_error
from deep_tile.select.choose import choose
from deep_tile.select.defaults import default_configs

SUSTAINED_FROM_US = 20.0
"""Shorter products are not power-bound, and replaying them would time the host."""

EMPTY = "empty_graph"
WIDE = 220
"""Columns to print in where there is no terminal to ask."""

log = logging.getLogger("bench_gemm")


class Bench:
    """Measures one shape after another with the same contestants and options."""

    def __init__(self, peers: list[Peer], options: argparse.Namespace):
        self.peers, self.options = peers, options
        self.flush, self.empty = L2Flush(), capture_empty()
        self.num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._reported = set()

    def measure(self, shape: Shape) -> dict[str, Any]:
        """The row of one shape, as it is written."""
        inputs = Inputs(shape, scale_layout=self.options.scale_layout)
        runs, unsupported = self._start(inputs)
        graphs = {peer.name: graph for peer, graph in runs.items()}
        timings = time_alternating({EMPTY: self.empty, **graphs}, self.options.repeats, self.flush)
        empty_us = timings.pop(EMPTY).us
        results = {name: asdict(timing) for name, timing in timings.items()}
        for peer, graph in runs.items():
            result = results[peer.name]
            if self.options.check:
                expected = getattr(inputs, peer.expected)
                result["relative_error"] = relative_error(graph.output, expected)
                result["cosine_difference"] = cosine_difference(graph.output, expected)
        if self.options.sustained:
            self._add_own_power(graphs, results)
        return {
            **shape._asdict(),
            "config": choose(GemmProblem(*shape, num_sms=self.num_sms)).name,
            "empty_graph_us": empty_us,
            "results": results,
            "unsupported": unsupported,
        }

    def _add_own_power(self, graphs: dict[str, Captured], results: dict[str, dict[str, Any]]) -> None:
        """Add each contestant's time and energy on a GPU that has rested, and on one that runs nothing else."""
        large = {name: graph for name, graph in graphs.items() if results[name]["us"] >= SUSTAINED_FROM_US}
        if not large:
            return
        cool = time_cool(large, self.options.repeats, self.flush)
        for name, graph in large.items():
            sustained = time_sustained(graph, results[name]["us"])
            results[name] |= {"cool_us": cool[name], "sustained_us": sustained.us, "millijoules": sustained.millijoules}

    def _start(self, inputs: Inputs) -> tuple[dict[Peer, Captured], dict[str, str]]:
        """Every contestant's graph, and why others have none."""
        runs, unsupported = {}, {}
        for peer in self.peers:
            try:
                runs[peer] = capture(peer.prepare(inputs))
            except Exception as error:  # A library may refuse a shape in any way it likes.
                unsupported[peer.name] = self._reason(peer, inputs.shape, error)
            torch.cuda.synchronize()  # A fault on the GPU surfaces beside its cause, and ends the run.
        return runs, unsupported

    def _reason(self, peer: Peer, shape: Shape, error: Exception) -> str:
        """One line for the results; the whole text is logged when it is new."""
        reason = f"{type(error).__name__}: {error}"
        head = reason.splitlines()[0][:200]
        if (peer.name, head) not in self._reported:
            self._reported.add((peer.name, head))
            log.warning("%s does not run %s: %s", peer.name, shape, reason)
        return head


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """deep_tile's wrong results, a line each."""
    found = []
    for row in rows:
        result, shape = row["results"].get(OURS.name), shape_of(row)
        if OURS.name in row["unsupported"]:
            found.append(f"{shape}: {row['unsupported'][OURS.name]}")
        elif result and not result.get("relative_error", 0.0) <= MAX_RELATIVE_ERROR:
            found.append(f"{shape}: relative error {result['relative_error']:.2e} exceeds {MAX_RELATIVE_ERROR}")
    return found


def chosen_peers(names: str, configs: str) -> list[Peer]:
    """The named contestants, then deep_tile with each named config."""
    if unknown := [name for name in names.split(",") if name not in PEERS]:
        raise ValueError(f"peers {', '.join(unknown)} are unknown; choose from {', '.join(PEERS)}")
    by_name = {config.name: config for config in default_configs()}
    wanted = [name for name in configs.split(",") if name]
    if unknown := [name for name in wanted if name not in by_name]:
        raise ValueError(f"configs {', '.join(unknown)} are unknown; `python -m deep_tile compile` lists them")
    return [PEERS[name] for name in names.split(",")] + [deep_tile_peer(by_name[name]) for name in wanted]


def parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time fp8_gemm against other libraries.")
    parser.add_argument("--shapes", default="nine", help="all, nine, 'm<=128', m=129-1024, 'm>1024' or MxNxK,MxNxK")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; default: %(default)s")
    parser.add_argument("--configs", default="", help="also time deep_tile with these configs, comma-separated")
    parser.add_argument(
        "--scale-layout", default=DEFAULT_SCALE_LAYOUT, choices=SCALE_LAYOUTS, help="of deep_tile's a_scale"
    )
    parser.add_argument("--repeats", type=int, default=30, help="samples per contestant and shape")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="errors of the outputs")
    parser.add_argument("--sustained", action="store_true", help="if large, also cool, and a second alone, with energy")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument(
        "--plot", type=picture_path, metavar="FILE", help="draw TFLOPS against m for each layer, as PNG"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="show this results file instead of measuring")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="compare two results files and stop")
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; a median with a spread needs at least 2")
    return options


def main(arguments: Iterable[str] | None = None) -> int:
    logging.basicConfig(format="%(message)s")
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    if options.compare:
        print_comparison(*map(store.load, options.compare), console)
        return 0
    run = store.load(options.results) if options.results else measure(options, console)
    if options.out:
        store.save(options.out, run)
    print_run(run, console)
    if options.plot:
        plot_tflops(run, options.plot)
    found = [] if options.results else failures(run["shapes"])
    for line in found:
        log.error("deep_tile at %s", line)
    return 1 if found else 0


def measure(options: argparse.Namespace, console: Console) -> Run:
    available, reason = is_available()
    if not available:
        raise SystemExit(f"benchmarks need a Hopper GPU: {reason}")
    shapes, peers = select_shapes(options.shapes), chosen_peers(options.peers, options.configs)
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        bench = Bench(peers, options)
        rows = []
        for shape in track(shapes, description="Measuring", console=console):
            rows.append(bench.measure(shape))
            torch.cuda.empty_cache()
        meta = describe_run()
    meta |= {
        "labels": {peer.name: peer.label for peer in peers},
        "shapes": options.shapes,
        "scale_layout": options.scale_layout,
    }
    return {"meta": meta, "shapes": rows}


if __name__ == "__main__":
    sys.exit(main())
