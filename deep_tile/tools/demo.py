"""`demo`: DeepSeek-V3's layers, multiplied, checked and timed, or compiled where there is no Hopper GPU; then one
product of each kind.

Called by cli.py and so by `make demo`. Imports torch only when it multiplies.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean
from typing import NamedTuple

import deep_tile
from deep_tile import plan
from deep_tile.method import report
from deep_tile.problem import GemmProblem
from deep_tile.tools import demo_experts, demo_kinds
from deep_tile.tools.compile import build_all, kernel_table, report_flaws
from deep_tile.tools.console import PROGRAM, new_console, tflops_text, track_progress
from deep_tile.tools.products import checked_error, exact_product, random_operands
from deep_tile.tools.shapes import DEEPSEEK_V3_LAYERS, TOKENS

DEMO_SAMPLES = 20
"""Of each product that is timed."""


def demo(options: argparse.Namespace) -> int:
    available, reason = deep_tile.is_available()
    if options.experts:
        return demo_experts.demo_on_gpu(reason) if available else demo_experts.demo_without_gpu(reason)
    return _demo_on_gpu(reason) if available else _demo_without_gpu(reason)


def _demo_shapes() -> list[tuple[int, int, int]]:
    return [(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in TOKENS]


def _demo_without_gpu(reason: str) -> int:
    console, shapes = new_console(), _demo_shapes()
    console.print(f"No Hopper GPU to run on ({reason}).")
    console.print(
        "So: choose kernels for DeepSeek-V3's layers as on an H200, compile them for sm_90a, multiply on the CPU."
    )
    uses = Counter(plan.config_for(GemmProblem(*shape)) for shape in shapes)
    built = build_all(list(uses), os.cpu_count() or 1)
    console.print(kernel_table(built, uses), "")
    m, n, k = 96, 400, 1040
    error = checked_error(m, n, k, "cpu")
    console.print(f"fp8_gemm of {m}x{n}x{k} on the CPU, against float64: relative error {error:.2e}", "")
    return max(report_flaws(built), _report_errors({(m, n, k): error}), demo_kinds.show_without_gpu())


def _demo_on_gpu(reason: str) -> int:
    import torch

    from deep_tile.tools import timing

    console = new_console()
    console.print(f"Running on the GPU ({reason}): DeepSeek-V3's layers, each product timed and checked.")
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs cannot be captured on the default stream
        measured = {shape: _measure(*shape, flush) for shape in track_progress(_demo_shapes(), "Multiplying")}
    columns = ("us", "TFLOPS", "cuBLAS us", "ratio", "BF16 us", "relative error")
    table = report.table("config", "m", "n", "k", *columns)
    for (m, n, k), (config, us, cublas_us, bf16_us, error) in measured.items():
        tflops = tflops_text(m, n, k, us)
        times = (f"{us:.1f}", tflops, f"{cublas_us:.1f}", f"{us / cublas_us:.2f}", f"{bf16_us:.1f}", f"{error:.2e}")
        table.add_row(config, str(m), str(n), str(k), *times)
    console.print(table, "")
    mean = geometric_mean(row.us / row.cublas_us for row in measured.values())
    console.print(f"us: median of {DEMO_SAMPLES} samples. {timing.METHOD}")
    console.print(
        f"ratio: deep_tile's time over cuBLAS's, geometric mean {mean:.3f}; below 1, deep_tile is faster. cuBLAS is "
        "torch._scaled_mm on the same FP8 values with one scale per tensor and fast accumulation: it does less work, "
        "having no block scales to apply. BF16 is torch.mm. Errors are against float64.",
        "",
    )
    return max(_report_errors({shape: row.error for shape, row in measured.items()}), demo_kinds.show_on_gpu())


class _Measured(NamedTuple):
    config: str
    us: float
    cublas_us: float
    bf16_us: float
    error: float


def _measure(m: int, n: int, k: int, flush: Callable[[], None]) -> _Measured:
    import torch

    from deep_tile.reference import relative_error
    from deep_tile.tools.timing import capture, time_alternating

    x, w = random_operands(m, n, k, "cuda")
    a, a_scale = deep_tile.per_token_cast_to_fp8(x)
    b, b_scale = deep_tile.per_block_cast_to_fp8(w)
    out, one = x.new_empty(m, n), torch.ones((), device="cuda")
    config = plan.config_for(GemmProblem(m, n, k, torch.cuda.get_device_properties(x.device).multi_processor_count))
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    calls = (
        partial(deep_tile.fp8_gemm, a, a_scale, b, b_scale, out),
        partial(torch._scaled_mm, a, b.t(), **options),
        partial(torch.mm, x, w.t()),
    )
    times = time_alternating(dict(enumerate(map(capture, calls))), DEMO_SAMPLES, flush)
    times_us = [times[i].us for i in range(len(calls))]
    return _Measured(config.name, *times_us, relative_error(out, exact_product(a, a_scale, b, b_scale)))


def _report_errors(errors: dict[tuple[int, int, int], float]) -> int:
    """Exit code 1 and a line for each product that is off; NaN is off."""
    from deep_tile.reference import MAX_RELATIVE_ERROR

    wrong = {shape: error for shape, error in errors.items() if not error <= MAX_RELATIVE_ERROR}
    for (m, n, k), error in wrong.items():
        print(f"{PROGRAM}: {m}x{n}x{k}: relative error {error:.2e} exceeds {MAX_RELATIVE_ERROR}", file=sys.stderr)
    return 1 if wrong else 0
