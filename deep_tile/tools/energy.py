"""What the GPU has consumed, by NVML's counter.

Used by timing.py. Where NVML or its counter is missing, there is no figure, and nothing else is lost.
"""

from functools import cache

import torch


def millijoules() -> int | None:
    """Of the current CUDA device since its driver was loaded; None where nothing counts them.

    The counter moves on a few times in a tenth of a second: differences over a second are good to some per cent.
    """
    handle = _device(torch.cuda.current_device())
    return None if handle is None else handle()


@cache
def _device(index: int):
    """Reads the counter of a CUDA device, or None."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        handle = nvml.device_get_handle_by_uuid(f"GPU-{uuid}")
        nvml.device_get_total_energy_consumption(handle)
    except Exception:  # bindings without NVML, no library, a GPU without the counter: each has an error of its own
        return None
    return lambda: nvml.device_get_total_energy_consumption(handle)
