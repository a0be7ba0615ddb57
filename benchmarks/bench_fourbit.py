"""Products with weights of 4 bits beside those with the same weights in FP8, dense and of groups.

    PYTHONPATH=. python benchmarks/bench_fourbit.py --out fourbit.json [--every-config]

Weights take turns, as many as make 200 MB in 4 bits, so that none is in L2; the method is timing.py's, and a time is
that of one product. `read` is what half of a copy takes of the packed bytes. Exits with 1 if a result is not that of
the FP8 weight, bit for bit, where K is not split.
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

from benchmarks import store
from benchmarks.timing import L2Flush, capture, describe_run, time_alternating
from deep_tile import (
    fp8_gemm,
    fp8_grouped_gemm,
    pack_weight,
    packed_gemm,
    packed_grouped_gemm,
    per_token_cast_to_fp8,
    to_blocks,
)
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

WEIGHTS = ((7168, 2048), (4096, 7168), (24576, 1536), (7168, 16384), (2112, 7168))
ROWS = (1, 16, 64, 256, 1024, 4096)
GROUPED_WEIGHT, GROUPED_ROWS = (8, 4096, 7168), (1, 4, 16, 64, 128, 512)
PACKED_BYTES = 2e8


def make_weights(shape: tuple[int, ...]) -> list[tuple]:
    """Pairs of a weight in MXFP4, packed, and in FP8."""
    *leading, n, k = shape
    made = []
    for _ in range(max(2, round(PACKED_BYTES / (torch.Size(shape).numel() * 17 / 32)))):
        codes = torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(118, 122, (*leading, n, k // 32), dtype=torch.uint8, device="cuda")
        made.append((pack_weight(codes, scale), to_blocks(codes, scale)[:2]))
    return made


def measure(m: int, shape: tuple[int, ...], weights: list[tuple], options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a product of m rows, or of m in each group, by contestant."""
    groups, k = (shape[0] if len(shape) == 3 else 1), shape[-1]
    a, a_scale = per_token_cast_to_fp8(torch.randn(groups * m, k, device="cuda", dtype=torch.bfloat16))
    calls: tuple[Callable, Callable] = packed_gemm, fp8_gemm
    configs = default_configs(True, "mxfp4")
    if len(shape) == 3:
        offs = (torch.arange(groups, device="cuda") + 1).mul(m).int()
        calls = tuple(partial(call, offs=offs, expected_rows=m) for call in (packed_grouped_gemm, fp8_grouped_gemm))
        configs = grouped_configs("offs", True, kind="mxfp4")
    fourbit, fp8 = calls
    contestants = {"packed": (fourbit, 0), "fp8": (fp8, 1)}
    if options.every_config:
        contestants |= {config.name: (partial(fourbit, config=config), 0) for config in configs}

    def all_of(call: Callable, which: int) -> None:
        for pair in weights:
            call(a, a_scale, *pair[which])

    read, target = weights[0][0].weight, torch.empty_like(weights[0][0].weight)
    graphs = {name: capture(partial(all_of, *what)) for name, what in contestants.items()}
    graphs["read"] = capture(lambda: [target.copy_(pair[0].weight) for pair in weights])
    times = time_alternating(graphs, options.repeats, options.flush)
    us = {name: took.us / len(weights) / (2 if name == "read" else 1) for name, took in times.items()}
    invariant = {"batch_invariant": True}
    own, whole = fourbit(a, a_scale, *weights[0][0], **invariant), fp8(a, a_scale, *weights[0][1], **invariant)
    row = {
        "m": m,
        "shape": list(shape),
        "us": us,
        "of_fp8": us["packed"] / us["fp8"],
        "of_read": us["packed"] / us["read"],
    }
    return row | {"bytes": read.numel(), "correct": torch.equal(own, whole)}


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time products with weights of 4 bits.")
    parser.add_argument("--repeats", type=int, default=20, help="samples per product (default: %(default)s)")
    parser.add_argument("--every-config", action="store_true", help="time each tile, too")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    options.flush = L2Flush()
    rows = []
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # Graphs are not captured on the default one.
        for shape in track((GROUPED_WEIGHT, *WEIGHTS), "Weights"):
            weights = make_weights(shape)
            rows += [measure(m, shape, weights, options) for m in (GROUPED_ROWS if len(shape) == 3 else ROWS)]
    if options.out:
        store.save(options.out, {"meta": describe_run(), "products": rows})
    for row in rows:
        Console().print(row)
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
