"""From a problem to a kernel that is loaded and ready to launch.

Called by api.py when it meets a new signature, and by the command line. Kernels are compiled (jit.py) and loaded once
per device and live as long as the process: they are a finite set, because sizes are run-time values.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from deep_tile import _launcher, jit, watch
from deep_tile.codegen import kernel_source
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.problem import GemmProblem
from deep_tile.select import choose, tuned
from deep_tile.select.schedule import grid_size, last_rows_reciprocal, narrow_columns, raster_rows


def config_for(problem: GemmProblem) -> GemmConfig:
    """The config that `fp8_gemm` gives a problem by itself: what `tune` found on this machine, else the selector's."""
    return choose.choose(problem, tuned.configs(problem.num_sms))


def configs_for(
    n: int, k: int, max_m: int, num_sms: int, tma_store: bool = True, split_k: bool = True
) -> list[GemmConfig]:
    """Every config that `config_for` gives some m in [1, max_m]."""
    return choose.configs_for(n, k, max_m, num_sms, tma_store, split_k, tuned.configs(num_sms))


class Layout(NamedTuple):
    """Strides of one call's tensors, in elements; operands and `out` have a unit stride along their rows."""

    a_stride: int
    b_stride: int
    out_stride: int
    a_scale_strides: tuple[int, int]
    b_scale_strides: tuple[int, int]


_kernels: dict[tuple[GemmConfig, int], _launcher.Kernel] = {}
_kernels_lock = jit.fork_safe_lock()


def is_loaded(config: GemmConfig, device: int) -> bool:
    """Whether a launch of `config` on CUDA device `device` needs neither compiler, disk nor driver loading."""
    return (config, device) in _kernels


def load_kernel(config: GemmConfig, device: int) -> _launcher.Kernel:
    """The kernel of `config` on CUDA device `device`: remembered, else from the disk cache, else compiled."""
    kernel = _kernels.get((config, device))
    if kernel is not None:
        return kernel
    cubin = _cubin(config)
    with _kernels_lock:
        if (config, device) not in _kernels:
            _kernels[config, device] = _launcher.load(cubin, config.name, config.smem_bytes, device)
        return _kernels[config, device]


def _cubin(config: GemmConfig) -> bytes:
    if watch.is_wanted():
        return jit.compile_kernel(watch.debug_source(config), config.name).cubin  # of no use to another process
    return jit.load_cubin(kernel_source(config), config.name)


def load_kernels(configs: Iterable[GemmConfig], device: int | None, workers: int) -> None:
    """Compile, and load unless `device` is None, every config, `workers` at a time."""

    def load(config: GemmConfig) -> None:
        if device is None:
            _cubin(config)
        else:
            load_kernel(config, device)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        list(pool.map(load, configs))


def prepare_launch(
    problem: GemmProblem,
    config: GemmConfig,
    layout: Layout,
    device: int,
    *,
    pdl: bool,
    constant_weights: bool,
) -> _launcher.Launch:
    """Everything about a launch but its pointers, as `_launcher.launch(prepared, a, a_scale, b, b_scale, out, stream)`.

    Args:
        pdl: programmatic dependent launch: the kernel may start while its predecessor in the stream still runs.
        constant_weights: with `pdl`, b is requested before that predecessor is waited for, unless several rows of tiles
            share it: then that costs 0 to 6 % of a chain (ten shapes of 128 <= m <= 1024; H200, 2026-11-22).

    Raises:
        ValueError: a size or stride that the launch cannot express.
        jit.CompileError: the kernel does not compile.
        RuntimeError: the driver refuses the kernel.
    """
    m, n, k = problem.m, problem.n, problem.k
    group_rows = raster_rows(problem)
    narrow = narrow_columns(config, problem)
    a_map = (1, k, m, layout.a_stride, SCALE_BLOCK, config.block_m // config.cluster_n, 128)
    b_map = (1, k, n, layout.b_stride, SCALE_BLOCK, config.block_n // config.cluster_m, 128)
    out_bytes = config.out.bytes
    out_box = (config.store_columns, config.store_rows, config.store_swizzle)
    out_map = (out_bytes, n, m, layout.out_stride * out_bytes, *out_box)
    return _launcher.prepare(
        load_kernel(config, device),
        grid=grid_size(config, problem),
        cluster=config.cluster,
        threads=config.threads,
        a_map=a_map,
        b_map=b_map,
        out_map=out_map if config.tma_store else None,
        a_tail_rows=tail_rows(m, config.block_m, config.cluster_n),
        b_tail_rows=tail_rows(n - narrow * config.narrow_n, config.block_n, config.cluster_m),
        narrow_rows=config.narrow_n,
        narrow_columns=narrow,
        a_scale_strides=layout.a_scale_strides,
        b_scale_strides=layout.b_scale_strides,
        out_stride_m=layout.out_stride,
        m=m,
        n=n,
        k=k,
        pdl=pdl,
        early_b=constant_weights and m <= config.block_m,
        raster_rows_log2=group_rows.bit_length() - 1,
        last_rows_reciprocal=last_rows_reciprocal(config, m, group_rows),
    )


def tail_rows(rows: int, tile_rows: int, sharers: int) -> int:
    """Rows of TMA's box in the last tile of `rows`, where it has fewer than the others, or 0.

    Blocks that share it fetch a part each, which begins at a multiple of 8 rows: the period of the swizzle.
    """
    left = rows % tile_rows
    return left if sharers == 1 else round_up(ceil_div(left, sharers), 8)
