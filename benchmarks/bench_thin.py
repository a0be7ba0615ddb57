"""Time `prenorm_gemm` and FP32 weights of `thin_gemm` as CUDA graphs; write JSON.

    PYTHONPATH=. python benchmarks/bench_thin.py --out thin.json

The method is in timing.py; L2 is flushed before each call. A pre-norm product stands beside a copy of `a`, whose half
is about a read; a router beside `gemm` in BF16. Every timed result is compared with float64; exits with 1 when one is
wrong.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import deep_tile
from benchmarks import store
from benchmarks.timing import L2Flush, capture, describe_run, time_alternating

ROWS = (1, 64, 512, 2048, 8192, 16384)
LENGTHS = (16384, 28672)
"""Sizes of the hidden state of four streams."""

COLUMNS = 24
ROUTER = (256, 7168)
MAX_ERROR = {"prenorm": 1e-6, "three terms": 1e-6, "fp32": 1e-6, "two terms": 4e-6, "bf16": 2e-5}


def calls(what: str, m: int, k: int) -> tuple[dict[str, Callable[[], Any]], Callable[[], dict[str, torch.Tensor]]]:
    """Contestants by name, and their expected results."""
    a = torch.randn(m, k, device="cuda").bfloat16()
    if what == "prenorm":
        b, target = torch.randn(COLUMNS, k, device="cuda"), torch.empty_like(a)
        contestants = {"prenorm": lambda: deep_tile.prenorm_gemm(a, b)[0], "copy": lambda: target.copy_(a)}
        return contestants, lambda: {"prenorm": a.double() @ b.double().T}
    b = torch.randn(ROUTER[0], k, device="cuda")
    narrow, terms = b.bfloat16(), {count: deep_tile.split_weight(b, count) for count in (2, 3)}
    contestants = {
        "bf16": lambda: deep_tile.gemm(a, narrow, out_dtype=torch.float32),
        "two terms": lambda: deep_tile.thin_gemm(a, terms[2]),
        "three terms": lambda: deep_tile.thin_gemm(a, terms[3]),
        "fp32": lambda: deep_tile.thin_gemm(a, b),
    }

    def wanted() -> dict[str, torch.Tensor]:
        exact = a.double() @ b.double().T
        return {"bf16": a.double() @ narrow.double().T, **dict.fromkeys(("two terms", "three terms", "fp32"), exact)}

    return contestants, wanted


def measure(what: str, m: int, k: int, repeats: int, flush: L2Flush) -> dict[str, Any]:
    contestants, wanted = calls(what, m, k)
    graphs = {name: capture(call) for name, call in contestants.items()}
    times = {name: asdict(one) for name, one in time_alternating(graphs, repeats, flush).items()}
    errors = {
        name: float((graphs[name].output.double() - exact).norm() / exact.norm()) for name, exact in wanted().items()
    }
    correct = all(error < MAX_ERROR[name] for name, error in errors.items())
    return {"what": what, "m": m, "k": k, "errors": errors, "correct": correct, "times": times}


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("what", "m", "k", "us", "error")
    for row in rows:
        times = ", ".join(f"{name} {time['us']:.1f}" for name, time in row["times"].items())
        errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
        table.add_row(row["what"], str(row["m"]), str(row["k"]), times, errors if row["correct"] else f"WRONG {errors}")
    console.print(table)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time products by parts of K.")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=50, help="samples per call (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    flush = L2Flush()
    cases = [("prenorm", m, k) for k in LENGTHS for m in options.rows] + [
        ("router", m, ROUTER[1]) for m in options.rows
    ]
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        rows = [measure(*case, options.repeats, flush) for case in track(cases, "Measuring")]
    if options.out:
        store.save(options.out, {"meta": describe_run(), "products": rows})
    print_rows(rows, Console(width=200))
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
