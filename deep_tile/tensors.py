"""What api.py and quantize.py ask of torch's tensors: their signature, and a launch with their addresses.

C reads tensors of torch's own types through DLPack. Others (subclasses, and all of them where torch has no DLPack C
exchange API) take the same way here, in Python.
"""

import torch

from deep_tile import _launcher

ALIGNMENT_BYTES = 16
"""Of addresses that TMA and vector accesses take."""

Launches = dict[bytes | tuple, _launcher.Launch]
"""Prepared launches by the tensors' signature: bytes where C reads it, a tuple where Python does."""

NO_LAUNCHES: Launches = {}

for _tensor_type in (torch.Tensor, torch.nn.Parameter):
    _launcher.read_tensors_of(_tensor_type)


def signature(*tensors: torch.Tensor) -> bytes | tuple:
    """Every property of the tensors but their addresses, and whether these are aligned: to compare."""
    return _launcher.signature(*tensors) or tuple(
        (x.shape, x.stride(), x.dtype, x.get_device(), is_aligned(x)) for x in tensors
    )


def is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT_BYTES == 0


def launch(prepared: _launcher.Launch, *tensors: torch.Tensor) -> None:
    """Launch on the current stream of the first tensor's device.

    Raises:
        ValueError: a tensor without memory, or one that TMA cannot use.
        RuntimeError: whatever the driver refuses.
    """
    addresses = tuple(x.data_ptr() for x in tensors)
    _launcher.launch(prepared, addresses, torch._C._cuda_getCurrentRawStream(tensors[0].get_device()))
