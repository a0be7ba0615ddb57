"""Time the casts to FP8 against a copy of as many bytes and against the roofline's prediction; write JSON.

    PYTHONPATH=. python benchmarks/bench_quantize.py --out benchmarks/results/quantize_h200.json
    PYTHONPATH=. python benchmarks/bench_quantize.py --casts cast_both cast_weight --shapes 8192x14336 --out casts.json

The method is in timing.py. Every timed output is compared with the definition, bit by bit; exits with 1 when one
differs.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import store
from benchmarks.timing import L2Flush, capture, capture_empty, describe_run, time_alternating
from deep_tile import cast
from deep_tile.both import cast_both, cast_weight, transpose_fp8
from deep_tile.config import SCALE_BLOCK
from deep_tile.gated import swiglu_gradient_cast_both
from deep_tile.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_tile.select.hardware import Hardware, for_device
from deep_tile.transposed import transposed_cast_to_fp8

SHAPES = ((4096, 7168), (16384, 7168), (4096, 2048), (7168, 16384), (1024, 7168), (64, 7168))
"""Activations [m, k] and weights [n, k] of DeepSeek-V3's layers; the first is the one that is judged."""


class Kind(NamedTuple):
    """One of the casts. `block_rows` is that of the roofline, if it has one; `width` counts matrices side by side in
    what it reads, in `dtype`."""

    block_rows: int | None
    cast: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    dtype: torch.dtype = torch.bfloat16
    width: int = 1


def _swiglu(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of h's gradient, gates and ups."""
    columns = x.shape[1] // 3
    made = swiglu_gradient_cast_both(x[:, :columns], x[:, columns:], blocks=True)
    return tuple(each for each in made if each is not None)


KINDS = {
    "1x128": Kind(1, per_token_cast_to_fp8),
    "128x128": Kind(SCALE_BLOCK, per_block_cast_to_fp8),
    "transposed": Kind(1, transposed_cast_to_fp8),
    "cast_both": Kind(None, lambda x: cast_both(x, blocks=True)),
    "cast_weight": Kind(None, cast_weight),
    "transpose_fp8": Kind(None, lambda x: (transpose_fp8(x),), torch.float8_e4m3fn),
    "swiglu": Kind(None, _swiglu, width=3),
}
PLAIN = "1x128", "128x128", "transposed"


def measure(name: str, rows: int, columns: int, repeats: int, flush: L2Flush, hardware: Hardware) -> dict[str, Any]:
    """One cast of [rows, columns], as it is written."""
    kind = KINDS[name]
    x = torch.randn(rows, kind.width * columns, device="cuda", dtype=torch.bfloat16).to(kind.dtype)
    made = kind.cast(x)
    bytes_moved = sum(each.numel() * each.element_size() for each in (x, *made))
    source = torch.zeros(bytes_moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls = {
        "cast": capture(lambda: kind.cast(x)[0]),
        "copy": capture(lambda: target.copy_(source)),
        "empty": capture_empty(),
    }
    if name == "transposed":
        calls["transposed first"] = capture(lambda: per_token_cast_to_fp8(x.t().contiguous())[0])
    times = time_alternating(calls, repeats, flush)
    walls = None if kind.block_rows is None else cast.roofline(kind.block_rows, "bf16", rows, columns, hardware)
    return {
        "cast": name,
        "rows": rows,
        "columns": columns,
        "bytes_moved": bytes_moved,
        **asdict(times["cast"]),
        "gb_per_s": bytes_moved / times["cast"].us / 1e3,
        "copy_us": times["copy"].us,
        "copy_gb_per_s": bytes_moved / times["copy"].us / 1e3,
        "share_of_copy": times["copy"].us / times["cast"].us,
        "empty_graph_us": times["empty"].us,
        "transposed_first_us": times["transposed first"].us if "transposed first" in times else None,
        "predicted_us": None if walls is None else walls.time_us,
        "bound": None if walls is None else walls.bound,
        "correct": name == "swiglu" or _is_correct(kind, x, made),
    }


def _is_correct(kind: Kind, x: torch.Tensor, made: Sequence[torch.Tensor]) -> bool:
    """Whether all results have the bits of the definition; SwiGLU's exponential has no such bits."""
    wanted = kind.cast(x.cpu())
    return all(torch.equal(_bits(one.cpu()), _bits(other)) for one, other in zip(made, wanted, strict=True))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("cast", "rows", "columns", "us", "GB/s", "copy us", "share of copy", "predicted us", "bits")
    for row in rows:
        numbers = f"{row['us']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['copy_us']:.1f}", f"{row['share_of_copy']:.1%}"
        sizes = row["cast"], str(row["rows"]), str(row["columns"])
        table.add_row(*sizes, *numbers, _predicted(row), "equal" if row["correct"] else "DIFFER")
    console.print(table)


def _predicted(row: dict[str, Any]) -> str:
    return "" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"


def _shape(text: str) -> tuple[int, int]:
    rows, columns = map(int, text.split("x"))
    return rows, columns


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the casts from BF16 to FP8.")
    parser.add_argument("--shapes", type=_shape, nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--casts", nargs="+", choices=KINDS, default=PLAIN)
    parser.add_argument("--repeats", type=int, default=50, help="samples per call (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    hardware = for_device(torch.cuda.get_device_properties(torch.cuda.current_device()))
    flush = L2Flush()
    cases = [(name, *shape) for shape in options.shapes for name in options.casts]
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):  # Graphs cannot be captured on the default stream.
        for case in track(cases, "Measuring"):
            rows.append(measure(*case, options.repeats, flush, hardware))
            if options.out:
                store.save(options.out, {"meta": describe_run(), "casts": rows})
    print_rows(rows, Console())
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
