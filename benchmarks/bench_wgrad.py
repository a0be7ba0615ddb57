"""Time gradients of weights, of one and of many in one launch, against `fp8_gemm` of as many FLOPs, and write JSON.

    PYTHONPATH=. python benchmarks/bench_wgrad.py --out wgrad.json

Medians in microseconds, contestants in turn, L2 cold (timing.py). Gradients of groups are checked against float64.
Stops with what it has after --seconds.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import store, timing
from deep_tile import fp8_gemm, fp8_grouped_wgrad, fp8_wgrad, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_tile.reference import relative_error

MAX_ERROR = 1e-3
"""Relative, of a product in FP32 of FP8 operands, promoted every 128 tokens: WGMMA keeps 14 bits of a sum."""


class Layer(NamedTuple):
    """`groups` weights [n, k], each with `tokens` tokens."""

    n: int
    k: int
    groups: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.groups} of {self.n}x{self.k}, {self.tokens} tokens"


LAYERS = (
    *(Layer(7168, 2048, 1, tokens) for tokens in (4096, 16384)),
    *(Layer(24576, 1536, 1, tokens) for tokens in (4096, 8192)),
    *(Layer(n, k, 8, tokens) for n, k in ((4096, 7168), (7168, 2048)) for tokens in (512, 2048, 4096)),
    *(Layer(n, k, 128, tokens) for n, k in ((1536, 2048), (2048, 768)) for tokens in (128, 1024)),
)
"""Dense layers, and the experts of DeepSeek-V3 on 32 GPUs and of Qwen3-30B on one."""


def measure(layer: Layer, repeats: int, flush: timing.L2Flush) -> dict[str, Any]:
    """The row of one layer, as it is written."""
    n, k, groups, tokens = layer
    dy, x = (torch.randn(rows, groups * tokens, device="cuda").bfloat16() for rows in (n, k))
    operands = *per_token_cast_to_fp8(dy), *per_token_cast_to_fp8(x)
    offs = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * tokens
    many, one = (torch.zeros(*shape, device="cuda") for shape in ((groups, n, k), (n, k)))
    check(operands, offs, many, layer)
    weight, plain = per_block_cast_to_fp8(x), torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    contestants: dict[str, Callable[[], torch.Tensor]] = {
        "fp8_gemm": lambda: fp8_gemm(*operands[:2], *weight, plain),
        "dense": lambda: fp8_wgrad(*operands, one, accumulate=False),
        "dense, added": lambda: fp8_wgrad(*operands, one),
        "groups": lambda: fp8_grouped_wgrad(*operands, offs, many, accumulate=False),
        "groups, added": lambda: fp8_grouped_wgrad(*operands, offs, many),
    }
    graphs = {name: timing.capture(call) for name, call in contestants.items()}
    took = timing.time_alternating(graphs, repeats, flush)
    return {**layer._asdict(), "us": {name: one.us for name, one in took.items()}}


def check(operands: tuple[torch.Tensor, ...], offs: torch.Tensor, many: torch.Tensor, layer: Layer) -> None:
    fp8_grouped_wgrad(*operands, offs, many.fill_(1))
    for group in {0, layer.groups // 2, layer.groups - 1}:
        at = slice(group * layer.tokens // 128, (group + 1) * layer.tokens // 128)
        dy, x = (
            (codes.double().unflatten(1, (-1, 128)) * scale.double()[..., None])[:, at].flatten(1)
            for codes, scale in zip(operands[::2], operands[1::2], strict=True)
        )
        error = relative_error(many[group], dy @ x.t() + 1)
        if not error <= MAX_ERROR:
            raise RuntimeError(f"group {group} of {layer}: relative error {error:.2e} exceeds {MAX_ERROR}")


def line(row: dict[str, Any]) -> str:
    us = row["us"]
    shares = ", ".join(f"{name} {taken / us['fp8_gemm']:.3f}" for name, taken in us.items() if name != "fp8_gemm")
    return f"{Layer(*list(row.values())[:4])!s:>32}: {us['fp8_gemm']:8.1f} us; of that: {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="samples per contestant and layer")
    parser.add_argument("--seconds", type=float, default=600, help="begin no other layer after that")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    begun, rows, flush = time.monotonic(), [], timing.L2Flush()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for layer in LAYERS:
            if time.monotonic() - begun > options.seconds:
                print(f"out of time before {layer}")
                break
            rows.append(measure(layer, options.repeats, flush))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    store.save(options.out, {"meta": timing.describe_run(), "shapes": rows})


if __name__ == "__main__":
    main()
