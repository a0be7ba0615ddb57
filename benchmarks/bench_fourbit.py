"""Products with weights of 4 bits beside those with the same weights in FP8, dense and of groups.

    PYTHONPATH=. python benchmarks/bench_fourbit.py --out fourbit.json [--kinds int4] [--every-config]

Weights take turns, as many as make 200 MB in 4 bits, so that none is in L2; the method is timing.py's, and a time is
that of one product. `read` is what half of a copy takes of the packed bytes. FP8 has scales of 128x128; it does not
hold integers in groups of 32, for which it has random weights. Exits with 1 if a result is not that of the FP8 weight,
bit for bit, where K is not split; or, in groups of 32, not near float64's.
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
    packed,
    packed_gemm,
    packed_grouped_gemm,
    per_token_cast_to_fp8,
    scaled_gemm,
)
from deep_tile.kinds import PACKED
from deep_tile.reference import relative_error, scaled_gemm_reference
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

WEIGHTS = ((7168, 2048), (4096, 7168), (24576, 1536), (7168, 16384), (2112, 7168))
ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)
GROUPED_WEIGHT, GROUPED_ROWS = (8, 4096, 7168), (1, 4, 16, 64, 128, 256, 512, 1024)
PACKED_BYTES = 2e8


def make_weights(kind: str, shape: tuple[int, ...]) -> list[tuple]:
    """Pairs of a packed weight, and of one in FP8 with scales of 128x128, as many as take turns."""
    *leading, n, k = shape
    made = []
    for _ in range(max(2, round(PACKED_BYTES / (torch.Size(shape).numel() * PACKED[kind].b_bytes)))):
        codes = torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, device="cuda")
        scale, keywords = scales(kind, (*leading, n), k)
        weight = pack_weight(codes, scale, **keywords)
        made.append((weight, in_fp8(kind, weight, k)))
    return made


def in_fp8(kind: str, weight: packed.Packed, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same weight, or a random one if FP8 does not hold it, and scales of 128x128; INT4's own are of 1x128."""
    *leading, n, _ = weight.weight.shape
    if kind == "int4_32":
        return torch.randn(*leading, n, k, device="cuda").to(torch.float8_e4m3fn), weight.scale
    of_blocks = torch.ones(*leading, -(-n // 128), -(-k // 128), device="cuda")
    return packed.elements(*weight, k=k).contiguous(), of_blocks if kind == "int4" else weight.scale


def scales(kind: str, rows: tuple[int, ...], k: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Scales of groups, and keywords of `pack_weight`."""
    if kind == "int4":
        return torch.rand(*rows, k // 128, device="cuda"), {"format": "int4_128"}
    if kind == "int4_32":
        return torch.rand(*rows, k // 32, device="cuda").add(0.5).bfloat16(), {"format": "int4_32"}
    if kind == "nvfp4":
        scale = torch.rand(*rows, k // 16, device="cuda").mul(448).to(torch.float8_e4m3fn)
        return scale, {"format": "nvfp4", "global_scale": 1.0}
    return torch.randint(118, 122, (*rows, k // 32), dtype=torch.uint8, device="cuda"), {"format": "mxfp4"}


def is_product(kind: str, out: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether `out` is the product of `a` and the packed weight's elements, each with its scales."""
    if kind == "int4_32":
        return relative_error(out, scaled_gemm_reference(*operands, torch.float64)) < 4e-3
    call = scaled_gemm if kind == "int4" else fp8_gemm
    return torch.equal(out, call(*operands, batch_invariant=True))


def is_correct(kind: str, a: torch.Tensor, a_scale: torch.Tensor, weight: packed.Packed) -> bool:
    """Group by group."""
    wide = packed.elements(*weight, k=a.shape[1]).contiguous()
    if wide.dim() == 2:
        own = packed_gemm(a, a_scale, *weight, batch_invariant=True)
        return is_product(kind, own, a, a_scale, wide, weight.scale)
    rows = len(a) // len(wide)
    offs = (torch.arange(len(wide), device="cuda") + 1).mul(rows).int()
    own = packed_grouped_gemm(a, a_scale, *weight, offs, expected_rows=rows).split(rows)
    each = zip(own, a.split(rows), a_scale.split(rows), wide, weight.scale, strict=True)
    return all(is_product(kind, *given) for given in each)


def measure(
    kind: str, m: int, shape: tuple[int, ...], weights: list[tuple], options: argparse.Namespace
) -> dict[str, Any]:
    """Microseconds of a product of m rows, or of m in each group, by contestant."""
    groups, k = (shape[0] if len(shape) == 3 else 1), shape[-1]
    a, a_scale = per_token_cast_to_fp8(torch.randn(groups * m, k, device="cuda", dtype=torch.bfloat16))
    calls: tuple[Callable, Callable] = packed_gemm, fp8_gemm
    configs = default_configs(True, kind)
    if len(shape) == 3:
        offs = (torch.arange(groups, device="cuda") + 1).mul(m).int()
        calls = tuple(partial(call, offs=offs, expected_rows=m) for call in (packed_grouped_gemm, fp8_grouped_gemm))
        configs = grouped_configs("offs", True, kind=kind)
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
    row = {"kind": kind, "m": m, "shape": list(shape), "us": us}
    row |= {"of_fp8": us["packed"] / us["fp8"], "of_read": us["packed"] / us["read"]}
    return row | {"bytes": read.numel(), "correct": is_correct(kind, a, a_scale, weights[0][0])}


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time products with weights of 4 bits.")
    parser.add_argument("--repeats", type=int, default=20, help="samples per product (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=[*PACKED], default=[*PACKED], help="of weights (default: all)")
    parser.add_argument("--weights", type=int, default=1 + len(WEIGHTS), help="how many shapes (default: all)")
    parser.add_argument("--every-config", action="store_true", help="time each tile, too")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(arguments)
    options.flush, rows = L2Flush(), []
    shapes = [(kind, shape) for shape in (GROUPED_WEIGHT, *WEIGHTS)[: options.weights] for kind in options.kinds]
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # Graphs are not captured on the default one.
        for kind, shape in track(shapes, "Weights"):
            weights = make_weights(kind, shape)
            of_shape = GROUPED_ROWS if len(shape) == 3 else ROWS
            rows += [measure(kind, m, shape, weights, options) for m in of_shape]
            if options.out:
                store.save(options.out, {"meta": describe_run(), "products": rows})
    for row in rows:
        Console().print(row)
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
