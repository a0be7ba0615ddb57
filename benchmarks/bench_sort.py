"""Time `sort_by_expert` as a CUDA graph, beside the kernels of torch that define it; write JSON.

    PYTHONPATH=. python benchmarks/bench_sort.py --out sort.json

The method is in timing.py. "warm" is with the choices in L2, where a router has just written them, "cold" without.
Choices are random, of different experts for each token; "hot" ones have all tokens choose the first expert, too. Every
timed list is compared with the definition; exits with 1 when one differs.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import store
from benchmarks.timing import L2Flush, capture, capture_empty, describe_run, keep_busy, time_alternating
from deep_tile import experts

TOKENS = (1, 32, 128, 512, 2048, 8192)
EXPERTS = (128, 256)
TOP_K = 8
ALIGNMENT = 128
"""The alignment of experts' rows for one of the two contestants."""


def choices(tokens: int, number_of_experts: int, hot: bool, dtype: torch.dtype) -> torch.Tensor:
    scores = torch.rand(tokens, number_of_experts, device="cuda")
    scores[:, 0] += 2 * hot
    return scores.topk(TOP_K).indices.to(dtype)


def measure(tokens: int, number_of_experts: int, repeats: int, flush: L2Flush) -> dict[str, Any]:
    """Measure int64 choices, as topk makes them, and each variant."""
    chosen = choices(tokens, number_of_experts, False, torch.int64)
    variants = {
        "kernel": (chosen, 1),
        "int32": (chosen.int(), 1),
        "hot": (choices(tokens, number_of_experts, True, torch.int64), 1),
        "aligned": (chosen, ALIGNMENT),
    }
    graphs = {
        name: capture(partial(experts.sort_by_expert, given, number_of_experts, alignment=alignment))
        for name, (given, alignment) in variants.items()
    }
    graphs["torch"] = capture(lambda: experts.sorted_by_torch(chosen, number_of_experts, 1))
    graphs["empty"] = capture_empty()
    times = {
        state: {name: asdict(one) for name, one in time_alternating(graphs, repeats, work).items()}
        for state, work in (("warm", keep_busy), ("cold", flush))
    }
    correct = all(
        torch.equal(found.cpu(), wanted)
        for name, (given, alignment) in variants.items()
        for found, wanted in zip(
            graphs[name].output, experts.sorted_by_torch(given.cpu(), number_of_experts, alignment), strict=True
        )
    )
    return {"tokens": tokens, "experts": number_of_experts, "top_k": TOP_K, "correct": correct, **times}


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    names = list(rows[0]["warm"])
    table = Table(
        "tokens", "experts", *(f"{name} us, {state}" for state in ("warm", "cold") for name in names), "lists"
    )
    for row in rows:
        times = (f"{row[state][name]['us']:.1f}" for state in ("warm", "cold") for name in names)
        table.add_row(str(row["tokens"]), str(row["experts"]), *times, "equal" if row["correct"] else "DIFFER")
    console.print(table)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the sort of tokens' choices by expert.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--experts", type=int, nargs="+", default=EXPERTS)
    parser.add_argument("--repeats", type=int, default=50, help="samples per call (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    flush = L2Flush()
    cases = [(tokens, number) for number in options.experts for tokens in options.tokens]
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        rows = [measure(*case, options.repeats, flush) for case in track(cases, "Measuring")]
    if options.out:
        store.save(options.out, {"meta": describe_run(), "sorts": rows})
    print_rows(rows, Console(width=200))
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
