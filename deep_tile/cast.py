"""The casts' kernels on the GPU: launch parameters from the roofline, compilation, launch.

Called by quantize.py. Knows addresses, integers and CUDA's ordinals of devices, not tensors: no torch. Kernels are
compiled (jit.py) and loaded once per device and live as long as the process; cuda.core, which loads and launches them,
is imported by the first of them.
"""

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from deep_tile import jit
from deep_tile.codegen import CastKernel, cast_source
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.streaming import WARP, Reduction, derive_reduction

SOURCE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element, by the names of `codegen.CAST_SOURCES`."""


class CastArguments(NamedTuple):
    """What a kernel is given, in the order of its parameters. Strides in elements; x and out have unit column strides.

    Attributes:
        x, out, scale: addresses; of the input, of e4m3 and of FP32.
        rows, columns: of x and of out.
        aligned: both may be accessed in vectors of 16 bytes of x, and their rows are whole vectors long.
        amax_floor: lower bound of a block's largest magnitude.
    """

    x: int
    out: int
    scale: int
    rows: int
    columns: int
    x_stride: int
    out_stride: int
    scale_stride_row: int
    scale_stride_column: int
    aligned: bool
    amax_floor: float


_loaded: dict[tuple[CastKernel, int], Any] = {}
_loading = jit.fork_safe_lock()


def roofline(block_rows: int, source: str, rows: int, columns: int, hardware: Hardware = H200) -> Reduction:
    """The walls of a cast of [rows, columns] to FP8 with scales of `block_rows` x 128: a reduction of each block."""
    blocks = ceil_div(rows, block_rows) * ceil_div(columns, SCALE_BLOCK)
    return derive_reduction(blocks, block_rows * SCALE_BLOCK, SOURCE_BYTES[source], 1, hardware)


@lru_cache(maxsize=65_536)
def choose(block_rows: int, source: str, rows: int, columns: int, num_sms: int) -> tuple[CastKernel, int]:
    """The kernel for a cast, and how many thread blocks to launch. The size matters to the number alone."""
    walls = roofline(block_rows, source, rows, columns, replace(H200, num_sms=num_sms))
    kernel = CastKernel(block_rows, source, walls.warps * WARP, walls.threads_per_row, walls.blocks_per_sm)
    return kernel, walls.grid


def all_kernels() -> list[CastKernel]:
    """Every kernel that `choose` can give."""
    kinds = itertools.product((1, SCALE_BLOCK), SOURCE_BYTES)
    return [choose(block_rows, source, 1, SCALE_BLOCK, H200.num_sms)[0] for block_rows, source in kinds]


def is_loaded(kernel: CastKernel, device: int) -> bool:
    """Whether a launch needs neither compiler, disk nor driver loading."""
    return (kernel, device) in _loaded


def load(kernel: CastKernel, device: int) -> None:
    """Compile the kernel, or take it from the cache, and load it on CUDA device `device`, the current one.

    Raises:
        jit.CompileError: it does not compile.
        RuntimeError: NVRTC is missing, or the driver refuses the kernel.
    """
    cubin = jit.load_cubin(cast_source(kernel), kernel.name)
    with jit.import_lock:
        from cuda.core import Device, ObjectCode
    with _loading:
        if not is_loaded(kernel, device):
            Device(device).set_current()
            _loaded[kernel, device] = ObjectCode.from_cubin(cubin, name=kernel.name).get_kernel(kernel.name)


def launch(kernel: CastKernel, grid: int, device: int, stream: int, arguments: CastArguments) -> None:
    """Launch a loaded kernel on the stream of that address, which belongs to CUDA device `device`, the current one.

    Raises:
        RuntimeError: the driver refuses the launch.
    """
    from cuda.core import Device, launch

    Device(device).set_current()  # a thread that has used no GPU has a current device, for torch, but no context
    launch(_stream(stream), _launch_config(grid, kernel.threads), _loaded[kernel, device], *arguments)


@lru_cache(maxsize=1024)
def _launch_config(grid: int, threads: int) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=threads)


@lru_cache(maxsize=1024)
def _stream(address: int) -> Any:
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(address) if address else LEGACY_DEFAULT_STREAM
