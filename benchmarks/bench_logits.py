"""Time the indexer's logits as CUDA graphs; write JSON.

    PYTHONPATH=. python benchmarks/bench_logits.py --out logits.json

The method is in timing.py, L2 cold. Of keys: 2,048 queries, all keys for each ("dense") or those up to its own
("causal", cleaned); TFLOPS are of the products that ranges ask for. Of pages: contexts alike, or from a tenth to twice
the mean ("skewed"); "read" is a sum over as many bytes as the cache's pages in use, by torch. Where a DeepGEMM can be
imported it stands beside, except for what it refuses. Every timed output is compared with the definition on some rows;
exits with 1 when one differs.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import store
from benchmarks.timing import L2Flush, capture, describe_run, time_alternating
from deep_tile import logits, mqa_logits, paged_mqa_logits

QUERIES, HEAD_DIM = 2048, 128
KEYS = tuple((heads, keys, causal) for heads in (64, 32) for keys in (4096, 16384, 65536) for causal in (False, True))
PAGES = tuple(
    (batch, length, n, skewed)
    for batch, length, skewed in ((1, 131072, False), (32, 8192, False), (256, 1024, False), (256, 8192, True))
    for n in (1, 2, 4, 6)
) + tuple((256, 8192, n, False) for n in (1, 2, 3, 4, 6))
TOLERANCE = 1e-3
"""Tolerance relative to the largest logit of a row."""

FP8 = torch.float8_e4m3fn


def deep_gemm() -> Any | None:
    try:
        import deep_gemm
    except ImportError:
        return None
    return deep_gemm


def codes(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(FP8)


def is_right(define: Callable, given: tuple, out: torch.Tensor, rows: list[int]) -> bool:
    wanted = torch.empty_like(out[rows])
    define(given, wanted, rows)
    error = (out[rows] - wanted).nan_to_num(0, 0, 0).abs().amax(1)
    return bool((error <= TOLERANCE * wanted.masked_fill(wanted.isinf(), 0).abs().amax(1)).all())


def measure_keys(heads: int, keys: int, causal: bool, repeats: int, flush: L2Flush) -> dict[str, Any]:
    q, kv, scale = codes(QUERIES, heads, HEAD_DIM), codes(keys, HEAD_DIM), torch.rand(keys, device="cuda")
    starts = torch.zeros(QUERIES, dtype=torch.int32, device="cuda")
    ends = (torch.arange(QUERIES, device="cuda") + keys - QUERIES + 1).int() if causal else starts + keys
    given = q, kv, scale, torch.randn(QUERIES, heads, device="cuda"), starts, ends
    graphs = {"deep_tile": capture(partial(mqa_logits, *given, clean=causal))}
    peer = deep_gemm()
    if peer is not None:
        call = partial(peer.fp8_mqa_logits, q, (kv, scale), *given[3:], clean_logits=causal)
        graphs["deep_gemm"] = capture(call)

    def define(given: tuple, out: torch.Tensor, rows: list[int]) -> None:
        q, kv, scale, *others = given
        logits._define((True, None, None), q[rows], kv, scale, *(x[rows] for x in others), out)

    times = {name: one.us for name, one in time_alternating(graphs, repeats, flush).items()}
    flop = 2 * heads * HEAD_DIM * int((ends - starts).sum())
    return {
        "call": f"{heads} heads, {keys} keys, {'causal' if causal else 'dense'}",
        "us": times,
        "tflops": {name: flop / us / 1e6 for name, us in times.items()},
        "correct": is_right(define, given, graphs["deep_tile"].output, [0, 7, QUERIES // 2, QUERIES - 1]),
    }


def measure_pages(batch: int, length: int, n: int, skewed: bool, repeats: int, flush: L2Flush) -> dict[str, Any]:
    lengths = torch.full((batch, n), length, dtype=torch.int32, device="cuda")
    if skewed:
        lengths = (torch.linspace(0.1, 1.9, batch, device="cuda")[:, None] * length).int().expand(batch, n).contiguous()
    columns = int(lengths.max())
    tiles = (lengths[:, 0] + 63) // 64
    pages = int(tiles.sum())
    cache = torch.empty(pages, 64, 1, HEAD_DIM + 4, dtype=torch.uint8, device="cuda")
    flat = cache.view(pages, -1)
    flat[:, : 64 * HEAD_DIM] = codes(pages, 64 * HEAD_DIM).view(torch.uint8)
    flat[:, 64 * HEAD_DIM :] = torch.rand(pages, 64, device="cuda").view(torch.uint8)
    table = torch.zeros(batch, -(-columns // 64), dtype=torch.int32, device="cuda")
    table[torch.arange(table.shape[1], device="cuda") < tiles[:, None]] = torch.randperm(pages, device="cuda").int()
    q, weights = codes(batch, n, 64, HEAD_DIM), torch.randn(batch * n, 64, device="cuda")
    given = q, cache, weights, lengths, table
    as_read = cache.view(torch.int32).flatten()
    graphs = {
        "deep_tile": capture(partial(paged_mqa_logits, *given, columns=columns)),
        "read": capture(lambda: as_read.sum()),
    }
    peer = deep_gemm()
    if peer is not None and n <= 2:
        schedule = peer.get_paged_mqa_logits_metadata(lengths, 64, peer.get_num_sms())
        graphs["deep_gemm"] = capture(partial(peer.fp8_paged_mqa_logits, *given, schedule, columns))

    def define(given: tuple, out: torch.Tensor, rows: list[int]) -> None:
        q, cache, weights, lengths, table = given
        logits._define_paged((True, None, None, n), q[:1].flatten(0, 1), flat, weights[:n], lengths[:1], table[:1], out)

    times = {name: one.us for name, one in time_alternating(graphs, repeats, flush).items()}
    out = graphs["deep_tile"].output
    clean = out[:n].masked_fill(torch.arange(columns, device="cuda") >= lengths[0, 0], float("-inf"))
    return {
        "call": f"{batch} x {length}{' skewed' if skewed else ''}, {n} queries",
        "us": times,
        "of_read": times["deep_tile"] / times["read"],
        "correct": is_right(define, given, clean, list(range(n))),
    }


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("call", "us", "TFLOPS or time over a read", "logits")
    for row in rows:
        numbers = row["tflops"] if "tflops" in row else {"": row["of_read"]}
        shown = ", ".join(f"{name} {number:.{0 if 'tflops' in row else 2}f}" for name, number in numbers.items())
        times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
        table.add_row(row["call"], times, shown, "right" if row["correct"] else "WRONG")
    console.print(table)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the indexer's logits.")
    parser.add_argument("--repeats", type=int, default=20, help="samples per call (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    flush = L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        rows = [measure_keys(*case, options.repeats, flush) for case in track(KEYS, "Keys")]
        rows += [measure_pages(*case, options.repeats, flush) for case in track(PAGES, "Pages")]
    if options.out:
        store.save(options.out, {"meta": describe_run(), "logits": rows})
    print_rows(rows, Console(width=160))
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
