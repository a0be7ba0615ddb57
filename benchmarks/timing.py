"""The description of a run that a benchmark stores. deep_tile/tools/timing.py measures; its names are here, too.

Used by the benchmark scripts.
"""

import datetime
import os
import platform
import subprocess
from typing import Any

import torch

import deep_tile
from deep_tile import jit
from deep_tile.tools import timing
from deep_tile.tools.timing import (
    Captured,
    L2Flush,
    Sustained,
    Timing,
    capture,
    capture_empty,
    keep_busy,
    time_alternating,
    time_cool,
    time_sustained,
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
