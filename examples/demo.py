"""DeepSeek-V3's layers, multiplied, checked and timed, or compiled without a Hopper GPU; then one GEMM per kind.

    PYTHONPATH=. python examples/demo.py
    PYTHONPATH=. python examples/demo.py --experts    # Qwen3-30B-A3B's experts instead

Imports torch only when it multiplies.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean
from time import monotonic
from typing import NamedTuple

import demo_experts
import demo_kinds
from rich.table import Table

import deep_tile
from benchmarks.shapes import DEEPSEEK_V3_LAYERS
from deep_tile import plan
from deep_tile.method import calls, report
from deep_tile.problem import GemmProblem
from deep_tile.progress import track_progress
from deep_tile.tools.arguments import Parser
from deep_tile.tools.compile import build_all, kernel_table, report_flaws
from deep_tile.tools.console import PROGRAM, exit_code, new_console, tflops_text
from deep_tile.tools.products import checked_error, exact_product, random_operands

TOKENS = (16, 128, 4096)
"""m values: decoding, a larger batch, prefill."""

DEMO_SAMPLES = 20
"""Timing samples per GEMM."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog=f"{PROGRAM} demo", description="DeepSeek-V3's layers, multiplied, checked and timed.")
    parser.add_argument("--experts", action="store_true", help="Qwen3-30B-A3B's experts instead")
    options = parser.parse_args(arguments)
    return exit_code(lambda: demo(options.experts))


def demo(experts: bool) -> int:
    """Ends with a verdict, made of the summary that each demo returns with its exit code."""
    begin, (available, reason) = monotonic(), deep_tile.is_available()
    if experts:
        run = demo_experts.demo_on_gpu if available else demo_experts.demo_without_gpu
    else:
        run = _demo_on_gpu if available else _demo_without_gpu
    code, done = run(reason)
    verdict = f"All is well: {done}" if code == 0 else "Something is wrong: see the messages above"
    style = "bold green" if code == 0 else "bold red"
    new_console().print(f"{verdict}. {monotonic() - begin:.0f} s.", style=style)
    return code


def _demo_shapes() -> list[tuple[int, int, int]]:
    return [(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in TOKENS]


def _demo_without_gpu(reason: str) -> tuple[int, str]:
    console, shapes = new_console(), _demo_shapes()
    console.print(f"No Hopper GPU to run on ({reason}).")
    console.print(
        "So this chooses and compiles the kernels of DeepSeek-V3's layers as on an H200, and multiplies on the CPU.", ""
    )
    console.print(_stored_times(shapes), "")
    uses = Counter(plan.config_for(GemmProblem(*shape)) for shape in shapes)
    built = build_all(list(uses), os.cpu_count() or 1)
    console.print(kernel_table(built, uses), "")
    m, n, k = 96, 400, 1040
    error = checked_error(m, n, k, "cpu")
    console.print(f"fp8_gemm of {m}x{n}x{k} on the CPU, against float64: relative error {error:.2e}", "")
    code = max(report_flaws(built), _report({(m, n, k): error}), demo_kinds.show_without_gpu())
    count = len(demo_kinds.SHOWN)
    return code, f"{len(built) + count} kernels compile without spills, and {count + 1} products are right"


def _stored_times(shapes: list[tuple[int, int, int]]) -> Table:
    """An H200's times, from the package's stored measurements."""
    columns = ("us", "TFLOPS", "BF16 us", "times as fast")
    table = report.table("m x n x k", *columns, title="Not measured here: stored times of an H200")
    for m, n, k in shapes:
        measured = report.measurement(calls.derivation(m, n, k))
        if measured is not None and measured.bf16_us is not None:
            gain = f"{measured.bf16_us / measured.us:.2f}"
            times = f"{measured.us:.1f}", f"{measured.tflops:.0f}", f"{measured.bf16_us:.1f}", gain
            table.add_row(f"{m}x{n}x{k}", *times)
            table.caption = f"{measured.source}; BF16 is torch.mm"
    return table


def _demo_on_gpu(reason: str) -> tuple[int, str]:
    import torch

    from deep_tile.tools import timing

    console = new_console()
    console.print(f"Running on the GPU ({reason}): DeepSeek-V3's layers, each product timed and checked.")
    flush = timing.L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs cannot be captured on the default stream
        measured = {shape: _measure(*shape, flush) for shape in track_progress(_demo_shapes(), "Multiplying")}
    columns = ("us", "TFLOPS", "BF16 us", "gain", "cuBLAS us", "gain ", "error", "kernel")
    table = report.table("m x n x k", *columns, spare=("kernel", "TFLOPS"))
    for (m, n, k), (config, us, cublas_us, bf16_us, error) in measured.items():
        over_bf16, over_cublas = f"{bf16_us / us:.2f}", f"{cublas_us / us:.2f}"
        times = f"{us:.1f}", tflops_text(m, n, k, us), f"{bf16_us:.1f}", over_bf16, f"{cublas_us:.1f}", over_cublas
        table.add_row(f"{m}x{n}x{k}", *times, f"{error:.1e}", config)
    console.print(table, "")
    bf16, cublas = (geometric_mean(row[at] / row.us for row in measured.values()) for at in (3, 2))
    console.print(f"us: median of {DEMO_SAMPLES} samples. {timing.METHOD}")
    console.print(
        "gain: times as fast as BF16 (torch.mm), then as cuBLAS (torch._scaled_mm of the same FP8 values with one "
        "scale per tensor and fast accumulation, so it does less work). error: relative, against float64.",
        "",
    )
    code = max(_report({shape: row.error for shape, row in measured.items()}), demo_kinds.show_on_gpu())
    gains = f"{bf16:.2f} times as fast as BF16 and {cublas:.2f} times as fast as per-tensor cuBLAS"
    return code, f"{len(measured) + len(demo_kinds.SHOWN)} products are right, those of FP8 with block scales {gains}"


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


def _report(errors: dict[tuple[int, int, int], float]) -> int:
    from deep_tile.reference import MAX_RELATIVE_ERROR

    return demo_kinds.report_errors(
        ("x".join(map(str, shape)), error, MAX_RELATIVE_ERROR) for shape, error in errors.items()
    )


if __name__ == "__main__":
    sys.exit(main())
