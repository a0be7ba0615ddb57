"""Time products with a bias, an activation or another format against the plain product, and against the same in several
kernels; check every output, and write JSON.

    PYTHONPATH=. python benchmarks/bench_finishes.py --kind fp8 --shapes nine --out finishes.json

Medians in microseconds, contestants in turn, L2 cold (timing.py). What is done apart is done by torch to the plain
product, which is BF16; a cast by our own kernel, of which "swiglu" is a part. Of that n counts rows of the weight.
Stops with what it has after --seconds.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import store, timing
from benchmarks.shapes import Shape, select_shapes
from deep_tile import (
    fp8_gemm,
    fp8_gemm_cast,
    gemm,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    silu_mul_cast_to_fp8,
)
from deep_tile.kinds import GATE_COLUMNS
from deep_tile.reference import finished, relative_error

MAX_ERROR = 6e-3
"""Largest relative error of the epilogue of an FP8 product rounded to BF16."""

Product = Callable[..., torch.Tensor]


def product_of(kind: str, shape: Shape) -> Product:
    """The product of random operands, about as large as 1, with all keywords of the call."""
    a = torch.randn(shape.m, shape.k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16) * shape.k**-0.5
    if kind == "bf16":
        return lambda out=None, **options: gemm(a, b, out, **options)
    operands = *per_token_cast_to_fp8(a), *per_block_cast_to_fp8(b)

    def product(out=None, cast=False, **options):
        return fp8_gemm_cast(*operands, **options) if cast else fp8_gemm(*operands, out, **options)

    return product


def apart(x: torch.Tensor, bias: torch.Tensor, name: str) -> torch.Tensor:
    """Torch's epilogue of a rounded product, as models without fusion have it."""
    if name == "bias":
        return x.add_(bias)
    if name == "gelu_tanh":
        return F.gelu(x.add_(bias), approximate="tanh")
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


FINISHES: dict[str, dict[str, Any]] = {
    "fp16": {"out_dtype": torch.float16},
    "fp32": {"out_dtype": torch.float32},
    "bias": {"with_bias": True},
    "gelu_tanh": {"with_bias": True, "activation": "gelu_tanh"},
    "gelu": {"with_bias": True, "activation": "gelu"},
    "silu": {"activation": "silu"},
    "swiglu": {"activation": "swiglu"},
}
APART = ("bias", "gelu_tanh", "swiglu")
CASTS = {"cast": None, "swiglu and cast": "swiglu"}
"""Activations of products whose result is cast to FP8."""


def options_of(name: str, bias: torch.Tensor) -> dict[str, Any]:
    options = dict(FINISHES[name])
    return {**options, "bias": bias} if options.pop("with_bias", False) else options


def check(product: Product, bias: torch.Tensor, name: str, shape: Shape) -> None:
    options = options_of(name, bias)
    exact = product(out_dtype=torch.float32)[:256].double()
    wanted = finished(exact, options.get("bias"), options.get("activation"))
    error = relative_error(product(**options)[:256], wanted)
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{name} at {shape}: relative error {error:.2e} exceeds {MAX_ERROR}")


def measure(kind: str, shape: Shape, repeats: int, flush: timing.L2Flush) -> dict[str, Any]:
    """The row of one shape, as it is written."""
    product, bias = product_of(kind, shape), torch.randn(shape.n, device="cuda", dtype=torch.bfloat16)
    contestants: dict[str, Callable[[], torch.Tensor]] = {"plain": product}
    for name in FINISHES:
        if name == "swiglu" and shape.n % (2 * GATE_COLUMNS):
            continue
        check(product, bias, name, shape)
        options = options_of(name, bias)
        out = torch.empty_like(product(**options))
        contestants[name] = lambda options=options, out=out: product(out, **options)
        if name in APART:
            contestants[f"{name} apart"] = lambda name=name: apart(product(), bias, name)
    if kind == "bf16":
        total = torch.zeros(shape.m, shape.n, device="cuda")
        contestants["accumulate"] = lambda: product(total, accumulate=True)
    else:
        contestants |= casts_of(product, shape)
    graphs = {name: timing.capture(call) for name, call in contestants.items()}
    took = timing.time_alternating(graphs, repeats, flush)
    return {**shape._asdict(), "us": {name: one.us for name, one in took.items()}}


def casts_of(product: Product, shape: Shape) -> dict[str, Callable[[], Any]]:
    """Contestants whose result is quantised."""
    made: dict[str, Callable[[], Any]] = {}
    for name, activation in CASTS.items():
        if activation and shape.n % (2 * GATE_COLUMNS):
            continue
        wanted = product(activation=activation, batch_invariant=True)
        codes, _ = product(cast=True, activation=activation, batch_invariant=True)
        if not torch.equal(codes.float(), per_token_cast_to_fp8(wanted)[0].float()):
            raise RuntimeError(f"{name} at {shape} is not the cast of the product")
        cast = silu_mul_cast_to_fp8 if activation else per_token_cast_to_fp8
        made[name] = partial(product, cast=True, activation=activation)
        made[f"{name} apart"] = lambda cast=cast: cast(product())
    return made


def line(row: dict[str, Any]) -> str:
    us = row["us"]
    shares = ", ".join(f"{name} {us[name] / us['plain']:.3f}" for name in (*FINISHES, "accumulate") if name in us)
    fused = ", ".join(f"{name} {us[name] / us[f'{name} apart']:.3f}" for name in (*APART, *CASTS) if name in us)
    return f"{Shape(row['m'], row['n'], row['k'])!s:>18}: {us['plain']:8.1f} us; of plain: {shares}; of apart: {fused}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--shapes", default="nine", help="all, nine, 'm<=128', m=129-1024, 'm>1024' or MxNxK,MxNxK")
    parser.add_argument("--repeats", type=int, default=20, help="samples per contestant and shape")
    parser.add_argument("--seconds", type=float, default=600, help="begin no other shape after that")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    begun, rows, flush = time.monotonic(), [], timing.L2Flush()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for shape in select_shapes(options.shapes):
            if time.monotonic() - begun > options.seconds:
                print(f"out of time before {shape}")
                break
            rows.append(measure(options.kind, shape, options.repeats, flush))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    store.save(options.out, {"meta": timing.describe_run() | {"kind": options.kind}, "shapes": rows})
    for name in (*APART, *CASTS):
        ratios = [row["us"][name] / row["us"][f"{name} apart"] for row in rows if name in row["us"]]
        if ratios:
            print(f"{name}: {geometric_mean(ratios):.3f} of the same done apart, {max(ratios):.3f} at worst")


if __name__ == "__main__":
    main()
