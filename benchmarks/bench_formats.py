"""Time the re-basing of weights in other formats against a copy, and products of partial shards against whole ones.

    PYTHONPATH=. python benchmarks/bench_formats.py --out formats.json

Re-basing is wall time, since it waits for the GPU now and then; a copy writes as many bytes of the result. Shards are
the first and the second rank's of as many rows, of which the second begin inside of a block; the method is timing.py's.
Exits with 1 if a shard's columns are not the whole product's, bit for bit.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import store
from benchmarks.timing import L2Flush, capture, describe_run, time_alternating
from deep_tile import fp8_gemm, per_token_cast_to_fp8, quantize_weight, to_blocks
from deep_tile.distributed import shard_weight
from deep_tile.formats import E8M0

WEIGHTS = {
    "DeepSeek-V4.1, dense": ("fp8_32x32", (25600, 6144)),
    "DeepSeek-V4.1, narrow": ("fp8_32x32", (1152, 5120)),
    "MiniMax-M3": ("mxfp8", (6144, 6144)),
    "gpt-oss-120b, 16 experts": ("mxfp4", (16, 5760, 2880)),
    "DeepSeek-V4, 8 experts": ("mxfp4", (8, 4096, 7168)),
}
SHARDS = ((192, 4096), (64, 7168), (576, 7168), (2112, 7168))
"""Rows of a rank, and k."""
TOKENS = (1, 64, 4096)


def make_weight(name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of normal samples as a checkpoint stores it: rounded by power-of-two scales."""
    *leading, n, k = shape
    rows = 32 if name == "fp8_32x32" else 1
    scale = torch.exp2(torch.randint(-12, -9, (*leading, n // rows, k // 32), device="cuda").float()).to(E8M0)
    if name == "mxfp4":
        return torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, device="cuda"), scale
    return (100 * torch.randn(shape, device="cuda")).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def seconds_of(call: Callable[[], object], repeats: int = 5) -> float:
    """The least of some runs, by the host's clock."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_weight(model: str) -> dict[str, Any]:
    name, shape = WEIGHTS[model]
    weight, scale = make_weight(name, shape)
    report = to_blocks(weight, scale, format=name).report
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(lambda: to_blocks(weight, scale, format=name))
    extra = torch.cuda.max_memory_allocated() - held - report.elements
    source, target = (torch.empty(report.elements, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = seconds_of(lambda: target.copy_(source))
    return {
        "model": model,
        "format": name,
        "shape": list(shape),
        "ms": seconds * 1e3,
        "copy_ms": copy * 1e3,
        "elements_per_ns": report.elements / seconds / 1e9,
        "extra_mb": extra / 1e6,
        "changed_share": report.changed_share,
        "error": report.error,
        "worst_row_error": report.worst_row_error,
    }


def measure_shard(rows: int, k: int, m: int, repeats: int, flush: L2Flush) -> dict[str, Any]:
    b, b_scale = quantize_weight(torch.randn(2 * rows, k, device="cuda"))
    a, a_scale = per_token_cast_to_fp8(torch.randn(m, k, device="cuda", dtype=torch.bfloat16))
    whole = fp8_gemm(a, a_scale, b, b_scale, batch_invariant=True)
    shards = [shard_weight(b, b_scale, rank, 2, "column") for rank in range(2)]
    graphs = {
        rank: capture(lambda shard=shard: fp8_gemm(a, a_scale, shard.weight, shard.scale))
        for rank, shard in enumerate(shards)
    }
    times = time_alternating(graphs, repeats, flush)
    own = fp8_gemm(a, a_scale, shards[1].weight, shards[1].scale, batch_invariant=True)[:, shards[1].first :]
    return {
        "rows": rows,
        "k": k,
        "m": m,
        "zeros": shards[1].first,
        "whole_us": times[0].us,
        "partial_us": times[1].us,
        "ratio": times[1].us / times[0].us,
        "correct": torch.equal(own, whole[:, rows:]),
    }


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time re-basing and partial shards.")
    parser.add_argument("--repeats", type=int, default=50, help="samples per product (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    flush = L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        weights = [measure_weight(model) for model in track(WEIGHTS, "Weights")]
        cases = [(*shape, m) for shape in SHARDS for m in TOKENS]
        shards = [measure_shard(*case, options.repeats, flush) for case in track(cases, "Shards")]
    if options.out:
        store.save(options.out, {"meta": describe_run(), "weights": weights, "shards": shards})
    for row in (*weights, *shards):
        Console().print(row)
    return 0 if all(row["correct"] for row in shards) else 1


if __name__ == "__main__":
    sys.exit(main())
