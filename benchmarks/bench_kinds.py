"""Time products of other kinds than FP8 with block scales against torch's, check every output, and write JSON.

INT8 with block scales, and FP8 with scales of 1x128 for both operands, are timed against our FP8.

    PYTHONPATH=. python benchmarks/bench_kinds.py --kind bf16 --shapes nine --out bf16.json
    PYTHONPATH=. python benchmarks/bench_kinds.py --kind bf16 --shapes nine --search --out search_bf16.json
    PYTHONPATH=. python benchmarks/bench_kinds.py --kind bf16 --layout nn --shapes nine --out bf16_nn.json

BF16 and FP16 operands lie as --layout says, for torch as for us. Medians in microseconds, contestants in turn, L2 cold
(timing.py). With --search, each config that suits the shape, too, and how far the choice is from the fastest.
Stops with what it has after --seconds.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from benchmarks import store, timing
from benchmarks.shapes import M_RANGES, Shape, m_range, select_shapes
from deep_tile import fp8_gemm, gemm, int8_gemm, plan, scaled_gemm
from deep_tile.config import GemmConfig, ceil_div
from deep_tile.kinds import KINDS as PRODUCTS
from deep_tile.kinds import LAYOUTS, S8, Element, Kind
from deep_tile.problem import GemmProblem
from deep_tile.reference import (
    MAX_RELATIVE_ERROR,
    gemm_reference,
    relative_error,
    row_blocks_gemm_reference,
    rows_gemm_reference,
    scaled_gemm_reference,
)
from deep_tile.select.choose import choose, suits
from deep_tile.select.defaults import default_configs

FP8 = torch.float8_e4m3fn

CHECKED_ROWS = 256
"""Rows that are checked, from the first and the last of an output: float64 takes seconds for all."""


class Contest(NamedTuple):
    """One shape of one kind.

    Attributes:
        ours: multiplies with a config, or with the selector's choice, and returns the output.
        theirs: the same by torch.
        expected: from row numbers to those rows of the product.
    """

    ours: Callable[[GemmConfig | None], torch.Tensor]
    theirs: Callable[[], torch.Tensor]
    expected: Callable[[torch.Tensor], torch.Tensor]


def without_scales(dtype: torch.dtype, layout: str = "nt") -> Callable[[Shape], Contest]:
    """`gemm` against torch.mm of the same strides."""

    def operand(rows: int, k: int, major: str) -> torch.Tensor:
        x = torch.randn(*((rows, k) if major == "k" else (k, rows)), device="cuda", dtype=dtype)
        return x if major == "k" else x.t()

    def contest(shape: Shape) -> Contest:
        a, b = (operand(rows, shape.k, major) for rows, major in zip((shape.m, shape.n), LAYOUTS[layout], strict=True))
        out, other = (torch.empty(shape.m, shape.n, device="cuda", dtype=dtype) for _ in range(2))
        return Contest(
            lambda config: gemm(a, b, out, config=config),
            lambda: torch.mm(a, b.t(), out=other),
            lambda rows: gemm_reference(a[rows], b, torch.float32),
        )

    return contest


def random_matrix(rows: int, k: int, element: Element) -> torch.Tensor:
    values = torch.randn(rows, k, device="cuda")
    if element.dtype == "int8":
        values = (values * 30).round().clamp(-127, 127)
    return values.to(getattr(torch, element.dtype))


def scaled(kind: str) -> Callable[[Shape], Contest]:
    """`scaled_gemm` with scales of rows, or of tensors for `OF_TENSORS`, against torch._scaled_mm, in its fast way
    unless sums are promoted, and against torch._int_mm, which leaves INT32 as they are; `int8_gemm` against our
    `fp8_gemm`."""

    def contest(shape: Shape) -> Contest:
        integers = kind.startswith("int8")
        product = product_of(kind)
        fast = not product.promotes
        a, b = (random_matrix(rows, shape.k, element) for rows, element in ((shape.m, product.a), (shape.n, product.b)))
        out = torch.empty(shape.m, shape.n, device="cuda", dtype=torch.bfloat16)
        if kind == "int8":
            blocks = ceil_div(shape.k, 128)
            scales = [torch.rand(blocks, shape.m, device="cuda").t() + 0.5]
            scales += [torch.rand(ceil_div(shape.n, 128), blocks, device="cuda") + 0.5]
            fp8 = [x.float().to(FP8) for x in (a, b)]
            other = torch.empty_like(out)
            return Contest(
                lambda config: int8_gemm(a, scales[0], b, scales[1], out, config=config),
                lambda: fp8_gemm(fp8[0], scales[0], fp8[1], scales[1], other),
                lambda rows: scaled_gemm_reference(a[rows], scales[0][rows], b, scales[1], torch.float32),
            )
        sizes = ((), ()) if kind in OF_TENSORS else ((shape.m, 1), (1, shape.n))
        a_scale, b_scale = (torch.rand(size, device="cuda") + 0.5 for size in sizes)

        def theirs() -> torch.Tensor:
            if integers:
                return torch._int_mm(a, b.t())
            return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

        def expected(rows: torch.Tensor) -> torch.Tensor:
            of_rows = a_scale if a_scale.dim() == 0 else a_scale[rows]
            return rows_gemm_reference(a.float()[rows], of_rows, b.float(), b_scale, torch.float32)

        def ours(config: GemmConfig | None) -> torch.Tensor:
            return scaled_gemm(a, a_scale, b, b_scale, out, config=config, fast_accum=fast)

        return Contest(ours, theirs, expected)

    return contest


def row_blocks(shape: Shape) -> Contest:
    """`scaled_gemm` with scales of 1x128 for both operands and a result of FP32, as gradients are, against our
    `fp8_gemm`."""
    a, b = (torch.randn(rows, shape.k, device="cuda").to(FP8) for rows in (shape.m, shape.n))
    blocks = ceil_div(shape.k, 128)
    a_scale, b_scale = (torch.rand(blocks, rows, device="cuda").t() + 0.5 for rows in (shape.m, shape.n))
    weight_scale = torch.rand(ceil_div(shape.n, 128), blocks, device="cuda") + 0.5
    out = torch.empty(shape.m, shape.n, device="cuda")
    other = torch.empty(shape.m, shape.n, device="cuda", dtype=torch.bfloat16)
    return Contest(
        lambda config: scaled_gemm(a, a_scale, b, b_scale, out, config=config),
        lambda: fp8_gemm(a, a_scale, b, weight_scale, other),
        lambda rows: row_blocks_gemm_reference(a[rows], a_scale[rows], b, b_scale, torch.float32),
    )


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""dtypes of operands that may have any layout."""

OF_TENSORS = {
    "fp8_tensor": "fp8_rows",
    "fp8_tensor_promoted": "fp8_rows_promoted",
    "fp8_tensor_e5m2_e4m3": "fp8_rows_e5m2_e4m3",
}
"""Kinds with one scale per tensor, and the functions that multiply them: torch mixes formats with such scales only."""


def integers(shape: Shape) -> Contest:
    """`gemm` of INT8 against torch._int_mm."""
    a, b = (random_matrix(rows, shape.k, S8) for rows in (shape.m, shape.n))
    out, other = (torch.empty(shape.m, shape.n, device="cuda", dtype=torch.int32) for _ in range(2))
    return Contest(
        lambda config: gemm(a, b, out, config=config),
        lambda: torch._int_mm(a, b.t(), out=other),
        lambda rows: gemm_reference(a[rows], b, torch.float32),
    )


KINDS = {
    **{kind: without_scales(dtype) for kind, dtype in DTYPES.items()},
    **{kind: scaled(kind) for kind in ("fp8_rows", "fp8_rows_promoted", *OF_TENSORS, "int8", "int8_rows")},
    "fp8_1x128": row_blocks,
    "int8_unscaled": integers,
}
OUTPUTS = {"fp16": "fp16", "fp8_1x128": "fp32", "int8_unscaled": "int32"}
"""Formats of results, where they are not BF16."""

FAST_ERROR = 5e-2
"""Relative, of FP8 sums over all of k as the tensor cores keep them, at most."""


def product_of(kind: str) -> Kind:
    return PRODUCTS[OF_TENSORS.get(kind, kind)]


def problem_of(kind: str, shape: Shape, num_sms: int = 132, layout: str = "nt") -> GemmProblem:
    of_kind = {"kind": product_of(kind).name, "output": OUTPUTS.get(kind, "bf16")}
    return GemmProblem(*shape, num_sms=num_sms, layout=layout, **of_kind)


def check(contest: Contest, config: GemmConfig | None, shape: Shape, most: float) -> None:
    out = contest.ours(None)
    out.fill_(float("nan") if out.is_floating_point() else -1)
    contest.ours(config)
    rows = torch.arange(min(shape.m, CHECKED_ROWS), device="cuda")
    rows = torch.cat([rows, shape.m - 1 - rows]).unique()
    error = relative_error(out[rows], contest.expected(rows))
    if not error <= most:
        raise RuntimeError(f"{config or 'the choice'} at {shape}: relative error {error:.2e} exceeds {most}")


def configs_of(kind: str, shape: Shape, layout: str = "nt") -> list[GemmConfig]:
    """Configs that may be the fastest: not mostly empty rows, and not hundreds of tiles of few rows."""
    problem = problem_of(kind, shape, layout=layout)

    def plausible(config: GemmConfig) -> bool:
        if config.block_m > 64:
            return shape.m > 64 and (config.split_k == 1 or shape.m <= 2048)
        return shape.m <= 512

    known = default_configs(True, problem.kind, problem.output, layout=layout)
    return [config for config in known if suits(config, problem) and plausible(config)]


def measure(kind: str, shape: Shape, options: argparse.Namespace, flush: timing.L2Flush) -> dict[str, Any]:
    """The row of one shape, as it is written."""
    contest = (KINDS[kind] if options.layout == "nt" else without_scales(DTYPES[kind], options.layout))(shape)
    configs = [None, *(configs_of(kind, shape, options.layout) if options.search else ())]
    for config in configs:
        check(contest, config, shape, FAST_ERROR if kind.startswith("fp8") else MAX_RELATIVE_ERROR)
    graphs: dict[Any, timing.Captured] = {"torch": timing.capture(contest.theirs)}
    for config in configs:
        name = config.name if config else "deep_tile"
        graphs[name] = timing.capture(lambda config=config: contest.ours(config))
    if options.search:
        us = timing.time_to_choose(graphs, options.repeats, flush)
    else:
        us = {name: took.us for name, took in timing.time_alternating(graphs, options.repeats, flush).items()}
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    chosen = choose(problem_of(kind, shape, num_sms, options.layout)).name
    return {**shape._asdict(), "config": chosen, "us": us}


def line(row: dict[str, Any]) -> str:
    us, shape = row["us"], Shape(row["m"], row["n"], row["k"])
    ours, theirs = us["deep_tile"], us["torch"]
    text = f"{shape!s:>18}: {ours:8.1f} us, {shape.flops / ours / 1e6:5.0f} TFLOPS, {ours / theirs:.3f} of torch"
    others = {name: time for name, time in us.items() if name not in ("deep_tile", "torch")}
    if others:
        best = min(others, key=others.__getitem__)
        text += f"; best {best} {others[best]:.1f} us, {others[best] / theirs:.3f} of torch"
    return f"{text} ({row['config']})"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric means by range of m, and the worst."""
    ratios = {Shape(row["m"], row["n"], row["k"]): row["us"]["deep_tile"] / row["us"]["torch"] for row in rows}
    found = []
    for name in M_RANGES:
        part = [ratio for shape, ratio in ratios.items() if m_range(shape) == name]
        if part:
            found.append(
                f"{name}: {geometric_mean(part):.3f} of torch in the mean of {len(part)}, {max(part):.3f} at worst"
            )
    return [*found, f"all: {geometric_mean(ratios.values()):.3f} in the mean of {len(ratios)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="nt", help="of BF16 and FP16 operands (default: %(default)s)"
    )
    parser.add_argument("--shapes", default="nine", help="all, nine, 'm<=128', m=129-1024, 'm>1024' or MxNxK,MxNxK")
    parser.add_argument("--search", action="store_true", help="time each config that may be the fastest, too")
    parser.add_argument("--repeats", type=int, default=20, help="samples per contestant and shape")
    parser.add_argument("--seconds", type=float, default=600, help="begin no other shape after that")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if options.layout != "nt" and options.kind not in DTYPES:
        parser.error(
            f"--layout {options.layout} is for {' and '.join(DTYPES)}; {options.kind} lies along k, as nt says"
        )
    shapes = select_shapes(options.shapes)
    if options.search:
        known = {config for shape in shapes for config in configs_of(options.kind, shape, options.layout)}
        plan.load_kernels(known, torch.cuda.current_device(), os.cpu_count() or 1)
    begun, rows, flush = time.monotonic(), [], timing.L2Flush()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for shape in shapes:
            if time.monotonic() - begun > options.seconds:
                print(f"out of time before {shape}")
                break
            rows.append(measure(options.kind, shape, options, flush))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    store.save(
        options.out, {"meta": timing.describe_run() | {"kind": options.kind, "layout": options.layout}, "shapes": rows}
    )
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
