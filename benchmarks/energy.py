"""The GPU's power, from NVML's energy counter.

Used by timing.py. Where NVML or its count is missing, there is no figure, and nothing else is lost.
"""

import threading
import time
from collections.abc import Callable
from functools import cache

import torch

_POLL_SECONDS = 0.004


class PowerMeter:
    """Power of the current CUDA device during a `with` block that keeps it busy.

    The count moves on about ten times a second; power is taken from its first step within the block to its last.

    Attributes:
        watts: None where nothing counts, or fewer than two steps were seen.
    """

    def __init__(self):
        self.watts: float | None = None
        self._read = _reader(torch.cuda.current_device())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._steps: list[tuple[float, int]] = []

    def __enter__(self) -> "PowerMeter":
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._read is None:
            return
        self._stopped.set()
        self._thread.join()
        if len(self._steps) >= 2:
            (begin, first), (end, last) = self._steps[0], self._steps[-1]
            self.watts = (last - first) / 1e3 / (end - begin)

    def _watch(self) -> None:
        before = self._read()
        while not self._stopped.wait(_POLL_SECONDS):
            millijoules = self._read()
            if millijoules != before:
                self._steps.append((time.perf_counter(), millijoules))
                before = millijoules


@cache
def _reader(device: int) -> Callable[[], int] | None:
    """A reader for a CUDA device's millijoules since driver load; None without a counter."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        handle = nvml.device_get_handle_by_uuid(f"GPU-{uuid}")
        nvml.device_get_total_energy_consumption(handle)
    except Exception:  # bindings without NVML, no library, a GPU that does not count: each has an error of its own
        return None
    return lambda: nvml.device_get_total_energy_consumption(handle)
