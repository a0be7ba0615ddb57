"""Which FP8 weights in client layers deep_tile can multiply, and in which form."""

import functools

import torch

from deep_tile import tensors
from deep_tile.config import SCALE_BLOCK
from deep_tile.quantize import FP8_DTYPE

_BLOCK_SIZE = (SCALE_BLOCK, SCALE_BLOCK)
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_BYTES = 16
"""Row alignment of weights, for TMA."""


def takes(input, weight, weight_scale_inv, block_size) -> bool:
    """Whether it is a product for deep_tile: cheap, and traced by torch.compile."""
    return (
        block_size is not None
        and tuple(block_size) == _BLOCK_SIZE
        and weight.dtype == FP8_DTYPE
        and weight_scale_inv.dtype in tensors.SCALE_DTYPES
        and input.dtype in _INPUT_DTYPES
        and weight.shape[-1] % _ROW_BYTES == 0
        and runs_on(input.device)
    )


def runs_on(device: torch.device) -> bool:
    """Whether deep_tile computes there: on a CPU, or a Hopper GPU."""
    return device.type == "cpu" or (device.type == "cuda" and _is_hopper(device.index))


@torch.compiler.assume_constant_result
def _is_hopper(index: int) -> bool:
    return _capability(index) == (9, 0)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def operands(weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As products take them."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        # Parameters ask for a gradient unless told otherwise, and transformers tells scales and weights nothing. A
        # tracer sees that they do, whether or not gradients are recorded.
        weight, weight_scale_inv = weight.detach(), weight_scale_inv.detach()
    if weight.device.type == "cpu":
        weight = weight.clone()  # A checkpoint's file that is mapped into memory puts it at any address.
    return weight, weight_scale_inv
