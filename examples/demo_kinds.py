"""The end of demo.py: one GEMM per kind, checked and timed, or its kernel compiled without a Hopper GPU.

Imports torch only when it multiplies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from deep_tile import plan
from deep_tile.kinds import FAMILIES, KINDS, Kind
from deep_tile.method import report
from deep_tile.problem import GemmProblem
from deep_tile.tools.compile import build_all, report_flaws
from deep_tile.tools.console import PROGRAM, new_console, tflops_text
from deep_tile.tools.products import empty_out, exact_product_of, most_error, multiply, operands_of

if TYPE_CHECKING:
    import torch

SHAPE = (2048, 2112, 7168)
"""m, n and k from a DeepSeek-V3 layer."""

SMALL = (96, 400, 1040)
"""The shape that the CPU multiplies."""

SHOWN = tuple(KINDS[name] for name in (*FAMILIES, "fp8_rows_e5m2_e4m3"))
"""Every family and one mixed format."""

SAMPLES = 20
"""Timing samples per GEMM."""

_SCALES = {
    "blocks": "1x128, 128x128",
    "row_blocks": "1x128 both",
    "rows": "rows",
    "promoted_rows": "rows, promoted",
    "none": "none",
}
"""Display names of scalings."""


def show_without_gpu() -> int:
    """Compile the selector's kernels for `SHAPE`, multiply `SMALL` on the CPU; returns the exit code."""
    console = new_console()
    m, n, k = SHAPE
    built = build_all([plan.config_for(_problem(kind, SHAPE)) for kind in SHOWN], os.cpu_count() or 1)
    errors = {kind: _error(kind, SMALL, "cpu") for kind in SHOWN}
    columns = ("a, b", "scales", "result", "kernel", "compile s", "registers", "error")
    table = report.table("kind", *columns, spare=("kernel", "registers"))
    for (kind, error), (config, seconds, usage, *_) in zip(errors.items(), built, strict=True):
        table.add_row(*_titles(kind), config.name, f"{seconds:.2f}", str(usage.registers), f"{error:.2e}")
    small = "x".join(map(str, SMALL))
    console.print(f"Each kind of product: its kernel for {m}x{n}x{k}, and its relative error at {small}")
    console.print(table, "")
    return max(report_flaws(built), _report(errors, SMALL[2]))


def show_on_gpu() -> int:
    """Time and check `SHAPE`; the exit code."""
    import torch

    from deep_tile.tools.timing import L2Flush, capture, time_alternating

    console = new_console()
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    errors = {kind: _error(kind, SHAPE, "cuda") for kind in SHOWN}
    with torch.cuda.stream(torch.cuda.Stream()):  # none is captured on the default stream
        graphs = {kind: capture(_prepared(kind)) for kind in SHOWN}
        times = time_alternating(graphs, SAMPLES, L2Flush())
    columns = ("a, b", "scales", "result", "kernel", "us", "TFLOPS", "error")
    table = report.table("kind", *columns, spare=("kernel",))
    for kind, error in errors.items():
        us, config = times[kind].us, plan.config_for(_problem(kind, SHAPE, num_sms))
        table.add_row(*_titles(kind), config.name, f"{us:.1f}", tflops_text(*SHAPE, us), f"{error:.2e}")
    console.print(f"Each kind of product, at {'x'.join(map(str, SHAPE))}, and its relative error")
    console.print(table, "")
    return _report(errors, SHAPE[2])


def _error(kind: Kind, shape: tuple[int, int, int], device: str) -> float:
    from deep_tile.reference import relative_error

    operands = operands_of(kind, shape, device)
    out = multiply(kind, operands, empty_out(kind, operands))
    return relative_error(out, exact_product_of(kind, operands))


def _prepared(kind: Kind) -> Callable[[], torch.Tensor]:
    operands = operands_of(kind, SHAPE, "cuda")
    return partial(multiply, kind, operands, empty_out(kind, operands))


def _problem(kind: Kind, shape: tuple[int, int, int], num_sms: int = 132) -> GemmProblem:
    return GemmProblem(*shape, num_sms=num_sms, kind=kind.name, output=kind.output)


def _titles(kind: Kind) -> tuple[str, str, str, str]:
    return kind.name, f"{kind.a.name}, {kind.b.name}", _SCALES[kind.scaling], kind.output


def _report(errors: dict[Kind, float], k: int) -> int:
    return report_errors((kind.name, error, most_error(kind, k)) for kind, error in errors.items())


def report_errors(errors: Iterable[tuple[str, float, float]]) -> int:
    """Exit code 1 and a line for each product whose relative error exceeds its limit; NaN does."""
    wrong = [(what, error, most) for what, error, most in errors if not error <= most]
    for what, error, most in wrong:
        print(f"{PROGRAM}: {what}: relative error {error:.2e} exceeds {most:.2e}", file=sys.stderr)
    return 1 if wrong else 0
