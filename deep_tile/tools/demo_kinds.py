"""The end of `demo`: one product of each kind, checked, and timed, or its kernel compiled where there is no Hopper GPU.

Called by demo.py. Imports torch only when it multiplies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import deep_tile
from deep_tile import plan
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.kinds import FAMILIES, KINDS, RAW, RESULTS, Element, Kind
from deep_tile.method import report
from deep_tile.problem import GemmProblem
from deep_tile.tools.compile import build_all, report_flaws
from deep_tile.tools.console import PROGRAM, new_console, tflops_text

if TYPE_CHECKING:
    import torch

SHAPE = (2048, 2112, 7168)
"""m, n and k, of a layer of DeepSeek-V3."""

SMALL = (96, 400, 1040)
"""What the CPU multiplies."""

SHOWN = tuple(KINDS[name] for name in (*FAMILIES, "fp8_rows_e5m2_e4m3"))
"""Every family, and one of the mixed formats."""

SAMPLES = 20
"""Of each product that is timed."""

INT8_SIZE = 40
"""Standard deviation of integers."""

_SCALES = {
    "blocks": "1x128, 128x128",
    "row_blocks": "1x128 both",
    "rows": "rows",
    "promoted_rows": "rows, promoted",
    "none": "none",
}
"""What a scaling is called here."""


def show_without_gpu() -> int:
    """Compile what the selector takes for `SHAPE`, multiply `SMALL` ones on the CPU; the exit code."""
    console = new_console()
    m, n, k = SHAPE
    built = build_all([plan.config_for(_problem(kind, SHAPE)) for kind in SHOWN], os.cpu_count() or 1)
    errors = {kind: _error(kind, SMALL, "cpu") for kind in SHOWN}
    table = report.table("kind", "a, b", "scales", "result", "kernel", "seconds", "registers", "relative error")
    for (kind, error), (config, seconds, usage, *_) in zip(errors.items(), built, strict=True):
        table.add_row(*_titles(kind), config.name, f"{seconds:.2f}", str(usage.registers), f"{error:.2e}")
    console.print(f"Each kind of product, its kernel for {m}x{n}x{k}, and its error at {'x'.join(map(str, SMALL))}:")
    console.print(table, "")
    return max(report_flaws(built), _report_errors(errors, SMALL))


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
    table = report.table("kind", "a, b", "scales", "result", "kernel", "us", "TFLOPS", "relative error")
    for kind, error in errors.items():
        us, config = times[kind].us, plan.config_for(_problem(kind, SHAPE, num_sms))
        table.add_row(*_titles(kind), config.name, f"{us:.1f}", tflops_text(*SHAPE, us), f"{error:.2e}")
    console.print(f"Each kind of product, at {'x'.join(map(str, SHAPE))}:")
    console.print(table, "")
    return _report_errors(errors, SHAPE)


def _prepared(kind: Kind) -> Callable[[], torch.Tensor]:
    operands = _operands(kind, SHAPE, "cuda")
    return partial(_multiply, kind, operands, _empty_out(kind, operands))


def _problem(kind: Kind, shape: tuple[int, int, int], num_sms: int = 132) -> GemmProblem:
    return GemmProblem(*shape, num_sms=num_sms, kind=kind.name, output=kind.output)


def _titles(kind: Kind) -> tuple[str, str, str, str]:
    return kind.name, f"{kind.a.name}, {kind.b.name}", _SCALES[kind.scaling], kind.output


def _multiply(kind: Kind, operands: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    if kind.scaling == "none":
        return deep_tile.gemm(*operands, out)
    return deep_tile.scaled_gemm(*operands, out, fast_accum=kind.scaling != "promoted_rows")


def _error(kind: Kind, shape: tuple[int, int, int], device: str) -> float:
    """Relative, of one product of random operands, against float64."""
    from deep_tile.reference import relative_error

    operands = _operands(kind, shape, device)
    out = _multiply(kind, operands, _empty_out(kind, operands))
    if kind.scaling == "none":
        return relative_error(out, operands[0].double() @ operands[1].double().t())
    a, a_scale, b, b_scale = operands
    rows = SCALE_BLOCK if kind.scaling == "blocks" else 1
    return relative_error(out, _wide(a, a_scale, 1) @ _wide(b, b_scale, rows).t())


def _wide(x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """In float64, with every element's scale, of which one may be of several rows, and of 128 columns or of all."""
    columns = SCALE_BLOCK if scale.shape[1] > 1 else x.shape[1]
    each = scale.double().repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns, 1)
    return x.double() * each[:, : x.shape[1]]


def _operands(kind: Kind, shape: tuple[int, int, int], device: str) -> list[torch.Tensor]:
    """Normal samples, and scales between 0.5 and 1.5 of such."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    m, n, k = shape
    size = INT8_SIZE if kind.sums == "s32" else 1

    def matrix(rows: int, element: Element) -> torch.Tensor:
        values = torch.randn(rows, k, generator=generator, device=device) * size
        dtype = getattr(torch, element.dtype)
        return (values.round().clamp(-127, 127) if dtype == torch.int8 else values).to(dtype)

    def scale(rows: int) -> torch.Tensor:
        blocks = ceil_div(k, SCALE_BLOCK) if kind.block_scales else 1
        return (torch.rand(blocks, rows, generator=generator, device=device).t() + 0.5) / size

    a, b = matrix(m, kind.a), matrix(n, kind.b)
    if kind.scaling == "none":
        return [a, b]
    return [a, scale(m), b, scale(ceil_div(n, SCALE_BLOCK) if kind.scaling == "blocks" else n)]


def _empty_out(kind: Kind, operands: list[torch.Tensor]) -> torch.Tensor:
    import torch

    a, b = operands[0], operands[len(operands) // 2]
    return a.new_empty(a.shape[0], b.shape[0], dtype=getattr(torch, RESULTS[kind.output].dtype))


def _most(kind: Kind, k: int) -> float:
    """Relative error that a kind may have: none of integers; of FP8 more where the tensor cores add up all of k, in 14
    bits or so, 32 at a time."""
    from deep_tile.reference import MAX_RELATIVE_ERROR

    if kind.output == RAW:
        return 0.0
    added_fast = kind.scaling == "rows" and kind.sums == "f32"
    return 5e-3 + k * 2**-18 if added_fast else MAX_RELATIVE_ERROR


def _report_errors(errors: dict[Kind, float], shape: tuple[int, int, int]) -> int:
    """Exit code 1 and a line for each kind that is off; NaN is off."""
    code = 0
    for kind, error in errors.items():
        most = _most(kind, shape[2])
        if not error <= most:
            print(f"{PROGRAM}: {kind.name}: relative error {error:.2e} exceeds {most:.2e}", file=sys.stderr)
            code = 1
    return code
