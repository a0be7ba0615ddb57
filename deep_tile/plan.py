"""From a problem to a kernel that is loaded and ready to launch.

Kernels are compiled (jit.py) and loaded once per device and live as long as the process: they are a finite set, because
sizes are run-time values.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from deep_tile import _launcher, jit, params, watch
from deep_tile.codegen import kernel_source
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import K_BLOCK_BYTES, Kind
from deep_tile.params import MapLayout, Place
from deep_tile.problem import GemmProblem
from deep_tile.progress import for_each
from deep_tile.select import choose, tuned
from deep_tile.select.schedule import cluster_tiles, grid_size, last_rows_reciprocal, raster_rows


def config_for(problem: GemmProblem) -> GemmConfig:
    """The default config for a problem: the one `tune` found on this machine, else the selector's."""
    return choose.choose(problem, tuned.configs(problem.num_sms))


def cast_config_for(problem: GemmProblem) -> GemmConfig | None:
    """The config for a GEMM with an FP8 result; None if a BF16 GEMM followed by a cast is predicted to be faster, or no
    such config exists."""
    if not problem.tma_store:
        return None
    return choose.choose_cast(problem, tuned.configs(problem.num_sms))


def configs_for(of_all: GemmProblem, max_m: int) -> list[GemmConfig]:
    """Every config that `config_for` gives problems like `of_all` for some m in [1, max_m]."""
    return choose.configs_for(of_all, max_m, tuned.configs(of_all.num_sms))


def cast_configs_for(of_all: GemmProblem, max_m: int) -> list[GemmConfig]:
    """Like `configs_for`, for GEMMs with an FP8 result, cast in the kernel or apart."""
    return choose.cast_configs_for(of_all, max_m, tuned.configs(of_all.num_sms))


def unpacked_configs_for(of_all: GemmProblem, max_m: int) -> set[GemmConfig]:
    """Like `configs_for`, for GEMMs whose packed weight is unpacked first."""
    rows = range(choose.LEAST_UNPACKED, max_m + 64, 64)
    problems = (choose.bucketed(of_all._replace(m=m)) for m in rows)
    return {config_for(choose.in_fp8(problem)) for problem in problems if choose.unpacks(problem)}


TENSORS = ("a", "a_scale", "b", "b_scale", "out")
"""A launch's tensors, in order."""

GROUPED_TENSORS = ("a", "a_scale", "b", "b_scale", "bounds", "out")
"""A grouped launch's tensors; `bounds` is read on the device."""


def as_kernels_name(tensors: tuple[str, ...], product: Kind) -> tuple[str, ...]:
    """A launch's tensors by the kernel's names: a packed `b`, which has no tensor map, is "units"."""
    return tuple("units" if name == "b" and product.packing else name for name in tensors)


OPERAND_L2_BYTES = 128
"""L2 promotion size for operands: one row of a K block. 256 bytes, i.e. the next K block too, makes decode 1.5 % slower
on average, up to 6 %; at m > 128 both are equal (H200, 2026-11-22)."""

MAX_TILES = 2**31 - 2**16
"""Most tiles per launch: kernels count them in an int and step by the grid size."""

MAX_GROUP_COLUMNS = 339_538
"""Most tile columns in a grouped launch: GroupWalk::divide is exact up to here."""

MAX_SCALE_REACH = (2**32 - 1) // 4
"""Elements from a scale's first to its last: kernels count their bytes in 32 bits."""


class GroupLayout(NamedTuple):
    """Group strides by their names in `params.GEMM`, beside `Layout`: in rows, of scales in elements.

    Attributes:
        alignment: rows to whose multiples group starts are rounded up, a power of two; for "offs".
        a_group_rows, out_group_rows: from a group's first row to the next one's; for "counts".
        b_group_rows: likewise for `b`; if N-major, from a group's first k to the next one's.
        a_scale_group_stride, b_scale_group_stride: from a group's first scale to the next one's; a's 0 with "offs".
    """

    alignment: int = 1
    a_group_rows: int = 0
    out_group_rows: int = 0
    b_group_rows: int = 0
    a_scale_group_stride: int = 0
    b_scale_group_stride: int = 0


class ResultScale(NamedTuple):
    """Quantisation options and scale strides for the result, by their names in `params.GEMM`."""

    out_scale_stride_m: int = 0
    out_scale_stride_n: int = 0
    pow2_scale: bool = False
    amax_floor: float = 0.0
    correction: int = 0


class Layout(NamedTuple):
    """One call's strides, in elements: row strides for K-major operands and `out`, k strides for M- and N-major
    operands.

    Attributes:
        a_scale_aligned, b_scale_aligned: the scale is 16-byte aligned.
        bias_stride: from one column's bias to the next one's.
        out_scale: for a quantised result.
        groups: for a grouped GEMM.
    """

    a_stride: int
    b_stride: int
    out_stride: int
    a_scale_strides: tuple[int, int]
    b_scale_strides: tuple[int, int]
    a_scale_aligned: bool
    groups: GroupLayout = GroupLayout()
    b_scale_aligned: bool = False
    bias_stride: int = 0
    out_scale: ResultScale = ResultScale()


class Weights(NamedTuple):
    """Addresses of weights that do not move."""

    b: int
    b_scale: int


_kernels: dict[tuple[GemmConfig, int], _launcher.Kernel] = {}
_kernels_lock = jit.fork_safe_lock()


def is_loaded(config: GemmConfig, device: int) -> bool:
    """Whether launching `config` on CUDA device `device` needs no compiler, disk or module loading."""
    return (config, device) in _kernels


def load_kernel(config: GemmConfig, device: int) -> _launcher.Kernel:
    """The kernel for `config` on CUDA device `device`: from memory, else the disk cache, else compiled."""
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
        return jit.compile_kernel(watch.debug_source(config), config.name).cubin  # useless to another process
    return jit.load_cubin(kernel_source(config), config.name)


def load_kernels(
    configs: Iterable[GemmConfig], device: int | None, workers: int | None, progress: bool = False
) -> None:
    """Compile, and load unless `device` is None, every config, `workers` at a time."""

    def load(config: GemmConfig) -> None:
        if device is None:
            _cubin(config)
        else:
            load_kernel(config, device)

    for_each(load, configs, workers, progress, "Compiling GEMMs")


def prepare_launch(
    problem: GemmProblem,
    config: GemmConfig,
    layout: Layout,
    device: int,
    *,
    pdl: bool,
    constant_weights: bool,
    weights: Weights | None = None,
    names: tuple[str, ...] = TENSORS,
    places: Mapping[str, Place] | None = None,
) -> _launcher.Launch:
    """Everything about a launch except tensor addresses.

    Args:
        pdl: programmatic dependent launch: the kernel may start while its predecessor in the stream still runs.
        constant_weights: with `pdl`, b is requested, and bounds of row groups are read, before waiting for the
            predecessor, unless several tile rows share b: then a chain would be 0 to 6 % slower (ten shapes with 128
            <= m <= 1024; H200, 2026-11-22).
        weights: fixed addresses for b and b_scale; the launch then takes the other tensors only.
        names: the tensors that the launch will be given.
        places: places of the `TENSORS` and the bias within these, if they are not separate tensors.

    Raises:
        ValueError: a size or stride that the launch cannot express.
        jit.CompileError: the kernel does not compile, or may hang.
        RuntimeError: the driver refuses the kernel.
    """
    rows = problem.groups.expected_rows if problem.groups else problem.m
    early_b = constant_weights and rows <= config.block_m and not config.transposed
    maps = tensor_maps(problem, config, layout)
    fixed = {} if weights is None else weights._asdict()
    names = tuple(name for name in names if name not in fixed)
    places = params.places(names) if places is None else places
    if 0 in fixed.values():
        raise ValueError(f"weights are {weights}: one of them has no memory; pass tensors whose storage is allocated")
    return _launcher.prepare(
        _kernel_for(problem, config, device),
        grid=grid_size(config, problem),
        cluster=config.cluster,
        threads=config.threads,
        params=pack_params(problem, config, layout, early_b, fixed.get("b_scale", 0)),
        names=names,
        pointers=params.GEMM.pointers(places),
        maps=tuple(map_.entry(at, *places[name]) for at, name, map_ in maps if name in places),
        fixed_maps=tuple(map_.entry(at, fixed[name]) for at, name, map_ in maps if name in fixed),
        pdl=pdl,
    )


def _kernel_for(problem: GemmProblem, config: GemmConfig, device: int) -> _launcher.Kernel:
    """The kernel for `config`; if it may hang, the error names the selector's choice instead."""
    try:
        return load_kernel(config, device)
    except jit.DivergenceError as error:
        chosen = choose.choose_cast(problem) if config.quantizes else choose.choose(problem)
        if chosen in (None, config):
            raise
        raise jit.DivergenceError(f"{error}; the selector's choice here is {chosen.name}") from None


def pack_params(problem: GemmProblem, config: GemmConfig, layout: Layout, early_b: bool, b_scale: int = 0) -> bytes:
    """The kernel's parameters except tensor maps and addresses. Raises ValueError for a size or stride that it cannot
    express."""
    m, n = config.sides(problem.m, problem.n)
    groups = layout.groups
    _check_tiles(problem, config)
    every = () if problem.groups is None else (problem.groups.count,)
    a_scales, b_scales = _scale_shapes(problem)
    _check_scale("a_scale", (*every, *a_scales), (groups.a_scale_group_stride, *layout.a_scale_strides))
    _check_scale("b_scale", (*every, *b_scales), (groups.b_scale_group_stride, *layout.b_scale_strides))
    _check_scale("bias", (problem.n,), (layout.bias_stride,))
    # A stride that takes more bits belongs to a single row, column or group and is never used.
    strides = [stride % 2**32 for stride in (*layout.a_scale_strides, *layout.b_scale_strides)]
    of_groups = {name: getattr(groups, name) % 2**32 for name in ("a_scale_group_stride", "b_scale_group_stride")}
    group_rows = raster_rows(config, problem)
    a_tail_rows, b_tail_rows = operand_tails(problem, config)
    return params.GEMM.pack(
        m=m,
        n=n,
        k=problem.k,
        raster_rows_log2=group_rows.bit_length() - 1,
        last_rows_reciprocal=last_rows_reciprocal(config, m, group_rows),
        a_tail_rows=a_tail_rows,
        b_tail_rows=b_tail_rows,
        early_b=early_b,
        bulk_scale_rows=bulk_scale_rows(m, layout.a_scale_strides, layout.a_scale_aligned),
        bulk_scale_columns=bulk_scale_rows(n, layout.b_scale_strides, layout.b_scale_aligned),
        scale_runs=scale_runs(problem, config, layout),
        b_scale=b_scale,
        a_scale_stride_m=strides[0],
        a_scale_stride_k=strides[1],
        b_scale_stride_n=strides[2],
        b_scale_stride_k=strides[3],
        out_stride_m=layout.out_stride,
        groups=sum(every),
        bias_stride=layout.bias_stride % 2**32,
        **groups._asdict() | of_groups,
        **layout.out_scale._asdict(),
    )


def _check_tiles(problem: GemmProblem, config: GemmConfig) -> None:
    _, n = config.sides(problem.m, problem.n)
    columns = ceil_div(n, config.block_n * config.cluster_n)
    tiles = cluster_tiles(config, problem)
    if tiles <= MAX_TILES and (problem.groups is None or columns <= MAX_GROUP_COLUMNS):
        return
    most = f"{MAX_TILES} tiles" + ("" if problem.groups is None else f" and {MAX_GROUP_COLUMNS} columns of them")
    raise ValueError(
        f"n is {problem.n}, which {config.name} divides into {columns} columns, of up to {tiles} tiles; it can count "
        f"{most}. Pass fewer rows of b, or a config with a larger block_n"
    )


def _scale_shapes(problem: GemmProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a_scale and b_scale: rows, and blocks along k."""
    if problem.product.row_scales:
        return (problem.m, 1), (problem.n, 1)
    k_blocks = ceil_div(problem.k, SCALE_BLOCK)
    if problem.product.scaling == "row_blocks":
        return (problem.m, k_blocks), (problem.n, k_blocks)
    return (problem.m, k_blocks), (ceil_div(problem.n, SCALE_BLOCK), k_blocks)


def scale_reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _check_scale(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    strides = strides[-len(shape) :]
    if min(strides) < 0 or scale_reach(shape, strides) > MAX_SCALE_REACH:
        raise ValueError(
            f"the last element of {name} is more than {MAX_SCALE_REACH} elements from its first, with strides "
            f"{strides}; make it contiguous"
        )


def bulk_scale_rows(rows: int, strides: tuple[int, int], aligned: bool) -> int:
    """Rows whose scales, with strides per row and block, a bulk copy can take: all if M-major and 16-byte aligned, with
    columns at multiples of 16 bytes, else 0."""
    stride_row, stride_k = strides
    return rows if aligned and stride_row == 1 and stride_k % 4 == 0 else 0


def scale_runs(problem: GemmProblem, config: GemmConfig, layout: Layout) -> int:
    """How scale warps read a's scales: one by one (0), in strided runs (1), or in vectors (2).

    Runs must divide each block's K range, and vectors must be aligned.
    """
    k_blocks, run = ceil_div(problem.k, SCALE_BLOCK), config.scales_at_once
    if not config.reads_runs or k_blocks % (run * config.split_k):
        return 0
    stride_m, stride_k = layout.a_scale_strides
    if layout.a_scale_aligned and stride_k == 1 and stride_m % run == 0:
        return 2
    return int(config.reads_any_runs)


def tensor_maps(problem: GemmProblem, config: GemmConfig, layout: Layout) -> list[tuple[int, str, MapLayout]]:
    """The launch's tensor maps: offset in `params.GEMM`, owner, and map."""
    (m, n), k = config.sides(problem.m, problem.n), problem.k
    a_name, b_name = config.sides("a", "b")
    a_stride, b_stride = config.sides(layout.a_stride, layout.b_stride)
    others, groups = problem.groups.count - 1 if problem.groups else 0, layout.groups
    a_rows, out_rows = m + others * groups.a_group_rows, m + others * groups.out_group_rows
    b_rows, b_k = (n, k + others * groups.b_group_rows) if config.b_span else (n + others * groups.b_group_rows, k)
    a_tail_rows, b_tail_rows = operand_tails(problem, config)
    a, b = partial(_operand_map, config, config.a_span, k), partial(_operand_map, config, config.b_span, b_k)
    a_maps, b_maps, out_maps = (params.GEMM.offsets[f"{name}_maps"] for name in ("a", "b", "out"))
    maps = [
        (a_maps, a_name, a(a_rows, a_stride, config.block_m, config.cluster_n)),
    ]
    if not config.is_packed:
        maps.append((b_maps, b_name, b(b_rows, b_stride, config.block_n, config.cluster_m)))
    if a_tail_rows:
        sharers = config.cluster_n if config.a_span else 1
        maps.append((a_maps + params.MAP_BYTES, a_name, a(a_rows, a_stride, a_tail_rows, sharers)))
    if b_tail_rows and not config.is_packed:
        sharers = config.cluster_m if config.b_span else 1
        maps.append((b_maps + params.MAP_BYTES, b_name, b(b_rows, b_stride, b_tail_rows, sharers)))
    if config.tma_store:
        out = MapLayout(
            "uint8" if config.quantizes else config.out.dtype,
            (problem.out_columns, problem.m if config.transposed else out_rows),
            (layout.out_stride * config.out.bytes,),
            config.store_box,
            config.store_swizzle,
        )
        maps.append((out_maps, "out", out))
        if config.is_grouped:
            maps.append((out_maps + params.MAP_BYTES, "out", out_tail_map(out)))
    return maps


def out_tail_map(out: MapLayout) -> MapLayout:
    """The TMA map for output boxes that contain a group's end and must not touch the next group's rows.

    It has two row dimensions with equal strides: for box height b, (column, i, end) is the row b - i rows before row
    `end`, i < b. A box at i = b - r has its first r rows in bounds; TMA clips the rest. The idea is from Triton's
    ragged tensor descriptors. Whole boxes use the 2-D map: with three dimensions they take 1 to 4 % longer (H200,
    2026-11-25).
    """
    (columns, rows), (stride_bytes,), (_, box_rows) = out.sizes, out.strides_bytes, out.box
    return out._replace(
        sizes=(columns, box_rows, rows + 1),
        strides_bytes=(stride_bytes, stride_bytes),
        box=(*out.box, 1),
        begin_bytes=-box_rows * stride_bytes,
    )


def _operand_map(
    config: GemmConfig, span: int, k: int, rows: int, stride: int, tile_rows: int, sharers: int = 1
) -> MapLayout:
    """An operand's map. Each of `sharers` blocks fetches part of a tile: rows, or K when boxes have `span` bytes of
    rows. The contiguous dimension is in bytes for every format, since kernels count K blocks."""
    element_bytes = config.product.a.bytes
    if span:
        box = min(span, tile_rows * element_bytes), config.product.k_block // sharers
        sizes, swizzle = (rows * element_bytes, k), span
    else:
        sizes, box, swizzle = (k * element_bytes, rows), (K_BLOCK_BYTES, tile_rows // sharers), K_BLOCK_BYTES
    return MapLayout("uint8", sizes, (stride * element_bytes,), box, swizzle, OPERAND_L2_BYTES)


def operand_tails(problem: GemmProblem, config: GemmConfig) -> tuple[int, int]:
    """Box rows in the last tile of `a` and `b`; 0 if all tiles are full.

    A shorter last tile has its own map, which the kernel relies on: without it the kernel traps, with wrong rows it
    hangs. For row groups, whose sizes the host does not know, an `a` box is a whole tile or a quarter. Of an M-major
    `a` the matrix's last box may be shorter; of an N-major `b` all are full.

    Raises:
        ValueError: rows that do not fit.
    """
    m, n = config.sides(problem.m, problem.n)
    if config.row_groups:
        a_tail = config.block_m // 4
    elif config.a_span:
        a_tail = span_tail_rows(m, config.a_span // config.product.a.bytes)
    else:
        a_tail = _checked_tail("a", m, config.block_m, config.cluster_n)
    if not config.b_span:
        return a_tail, _checked_tail("b", n, config.block_n, config.cluster_m)
    return a_tail, span_tail_rows(n, config.b_span // config.product.b.bytes) if config.cuts_b else 0


def _checked_tail(operand: str, rows: int, tile_rows: int, sharers: int) -> int:
    tail, box_rows = tail_rows(rows, tile_rows, sharers), tile_rows // sharers
    if rows < 0 or tail > box_rows or (tail == 0 and rows % box_rows):
        raise ValueError(
            f"{operand}'s last tile: its box has {tail} rows for {rows} rows in tiles of {tile_rows}, {sharers} boxes "
            f"each; want at most {box_rows}, and 0 only where all tiles are full"
        )
    return tail


def span_tail_rows(rows: int, box_rows: int) -> int:
    """Rows in the last box of an M-major `a`, a multiple of TMA's 16 bytes, or 0 if it is full."""
    return round_up(rows % box_rows, 8) % box_rows


def tail_rows(rows: int, tile_rows: int, sharers: int) -> int:
    """TMA box rows in the last tile, or 0 if it is full. Blocks that share it each fetch a part that starts at a
    multiple of 8 rows, the swizzle's period."""
    left = rows % tile_rows
    return left if sharers == 1 else round_up(ceil_div(left, sharers), 8)
