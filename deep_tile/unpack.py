"""A packed weight as FP8 in memory, for products of so many rows that converter warps would hold them up.

The weight is unpacked anew at each call, to memory of torch's: one kernel reads its 4 bits and writes 8 (unpack.cuh),
then FP8's own kernel multiplies, with the same bits as a result.
"""

from functools import partial

import torch

from deep_tile import _launcher, cast, launches, packed
from deep_tile.codegen import StreamingKernel
from deep_tile.config import SCALE_BLOCK, UNIT_ROWS, ceil_div
from deep_tile.kinds import PACKED, Kind
from deep_tile.operation import Given, Operation
from deep_tile.ops import is_traced
from deep_tile.params import places
from deep_tile.quantize import FP8_DTYPE
from deep_tile.select import choose

_launches: launches.Table = {}


class Unpacking(Operation):
    """A product with packed weights, which is made in FP8 where that is predicted to take less time."""

    def __init__(self, *given, **how) -> None:
        super().__init__(*given, **how)
        self._decided: launches.Table = {}  # of whether to unpack, within the same limits

    def in_fp8(self, kind: Kind) -> Operation:
        raise NotImplementedError

    def casts(self, kind: Kind) -> list[StreamingKernel]:
        return [cast.UNPACK[kind.name]] if kind.name in cast.UNPACK else []

    def run(self, given: Given, options: tuple) -> torch.Tensor:
        if is_traced():
            return self.trace(given, options)
        a, b = given[0], given[2]
        records = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        if not _is_large(a) or records or self.Options(*options).config is not None:
            return super().run(given, options)
        if given[self._first_out] is None:
            given = self._with_out(given, options)
        if not self._unpacks(given, options):
            return super().run(given, options)
        try:
            wide = to_fp8(b, a.shape[-1])
        except torch.OutOfMemoryError:
            return super().run(given, options)
        in_order = self.Options(*options)._replace(pdl=False)  # the weight must be there
        call = self.in_fp8(PACKED[packed.name_of(b, a.shape[-1])])
        return call.run((*given[:2], wide, *given[3:]), tuple(in_order))

    def _with_out(self, given: Given, options: tuple) -> Given:
        """Raises what is wrong about the call."""
        self.checked(given, self.Options(*options))
        return self.allocated(given, options)

    def _unpacks(self, given: Given, options: tuple) -> bool:
        signature = launches.signature(*given)
        decided = launches.find(self._decided, options, signature)
        if decided is None:
            checked = self.checked(given, self.Options(*options))
            decided = self.needs_kernel(given) and choose.unpacks(self.problem(given, checked))
            launches.remember(self._decided, options, signature, decided)
        return decided


def _is_large(a: object) -> bool:
    return isinstance(a, torch.Tensor) and a.is_cuda and a.dim() > 1 and a.shape[-2] >= choose.LEAST_UNPACKED


def to_fp8(weight: torch.Tensor, k: int) -> torch.Tensor:
    """[..., n, k] float8_e4m3fn from a packed weight on a Hopper GPU, rows at multiples of 128 bytes.

    Raises:
        ValueError: it is no packed weight with k elements per row, or kernels cannot read it.
        RuntimeError: the kernel is not loaded yet while a CUDA graph is captured; or as `per_token_cast_to_fp8`.
    """
    kind, k_blocks = PACKED[packed.name_of(weight, k)], ceil_div(k, SCALE_BLOCK)
    packed.check_memory("b", weight)
    out = torch.empty(*weight.shape[:-1], k_blocks * SCALE_BLOCK, dtype=FP8_DTYPE, device=weight.device)
    launches.enqueue(_launches, (kind.name,), (weight, out), partial(_prepare, kind, k_blocks, weight))
    return out[..., :k]


def _prepare(kind: Kind, k_blocks: int, weight: torch.Tensor) -> _launcher.Launch:
    device, kernel = weight.get_device(), cast.UNPACK[kind.name]
    if not cast.is_loaded(kernel, device):
        launches.refuse_capture(kernel.name, device, "packed_gemm")
    units = weight.numel() // (UNIT_ROWS * kind.packing.row_bytes)
    numbers = {"units": units, "row_units": weight.shape[-2] // UNIT_ROWS, "k_blocks": k_blocks}
    names, grid = ("weight", "out"), cast.unpack_grid(kernel, units, launches.num_sms(device))
    return cast.prepare_launch(kernel, grid, device, numbers, names, places(names), pdl=False)
