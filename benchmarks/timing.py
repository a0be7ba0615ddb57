"""What only benchmarks measure, and the description of a run that they store; beside them names of
deep_tile/tools/timing.py, which measures.

Used by the benchmark scripts.
"""

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import deep_tile
from benchmarks.energy import PowerMeter
from deep_tile import jit
from deep_tile.tools import timing
from deep_tile.tools.timing import (
    Captured,
    L2Flush,
    Timing,
    capture,
    keep_busy,
    time_alternating,
    time_to_choose,
)

__all__ = [
    "METHOD",
    "Captured",
    "L2Flush",
    "Sustained",
    "Timing",
    "capture",
    "capture_empty",
    "describe_run",
    "keep_busy",
    "time_alternating",
    "time_cool",
    "time_sustained",
    "time_to_choose",
]

METHOD = (
    f"One CUDA graph per contestant and shape. {timing.METHOD} us is the median, p10_us and p90_us the spread. "
    "empty_graph_us, the same with a one-element fill, is included in every figure. sustained_us: back-to-back replays "
    "for about a second, L2 not flushed, after a third of a second of the same; millijoules: of one of them, "
    "by NVML's counter. cool_us: after 5 ms of rest, L2 flushed before them. Inputs are random normal; tensor- and "
    "row-scaled contestants multiply the same FP8 values with unit scales. Errors are of the timed output, against "
    "float64."
)

_SMI_FIELDS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


_REST_SECONDS = 0.005
"""Before each cool sample."""


class Sustained(NamedTuple):
    """One replay among many back to back: microseconds, and millijoules where NVML counts them."""

    us: float
    millijoules: float | None


def capture_empty() -> Captured:
    """The least a graph can do: fill one element. Its time is included in every figure."""
    return capture(lambda: torch.ones(1, device="cuda"))


def time_cool(graphs: dict[Any, Captured], repeats: int, flush: Callable[[], None]) -> dict[Any, float]:
    """Median microseconds per graph on a rested GPU with flushed L2: the power limit does not bind."""

    def rest() -> None:
        flush()
        torch.cuda.current_stream().synchronize()
        time.sleep(_REST_SECONDS)
        keep_busy()

    return {name: each.us for name, each in time_alternating(graphs, repeats, rest).items()}


def time_sustained(graph: Captured, once_us: float, seconds: float = 1.0) -> Sustained:
    meter = PowerMeter()
    us = timing.time_sustained(graph, once_us, seconds, meter)
    return Sustained(us, None if meter.watts is None else meter.watts * us / 1e3)


def describe_run(method: str = METHOD) -> dict[str, Any]:
    """All that a reader needs to judge the numbers. Called after the work, so that the clocks are those of a busy
    GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
    smi = _output_of("nvidia-smi", f"--id={gpu}", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader")
    values = [value.strip() for value in smi.split(",")]
    fields = _SMI_FIELDS.split(",")
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("DEEP_TILE_COMMIT") or _output_of("git", "rev-parse", "HEAD") or "unknown",
        "deep_tile": getattr(deep_tile, "__version__", "unknown"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": jit.compiler_text(),
        "nvidia_smi_after_run": dict(zip(fields, values, strict=True)) if len(values) == len(fields) else smi,
        "method": method,
    }


def _output_of(*command: str) -> str:
    """The output of a command; nothing if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
