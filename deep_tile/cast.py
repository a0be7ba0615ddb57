"""Kernels of the casts, of `combine` and of `sort_by_expert`: launch parameters, those of casts from the roofline,
loading, launches.

Called by quantize.py and experts.py. Knows integers and CUDA's ordinals of devices, not tensors: no torch. Kernels are
compiled (jit.py) and loaded once per device and live as long as the process.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from deep_tile import _launcher, jit, params, watch
from deep_tile.codegen import (
    BothKernel,
    CastKernel,
    CombineKernel,
    GatedKernel,
    LogitsKernel,
    SortKernel,
    StreamingKernel,
    TransposedKernel,
    streaming_source,
)
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.streaming import WARP, Reduction, derive_reduction

SOURCE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element, by the names of `codegen.CAST_FORMATS`."""

READ_ELEMENTS = {"plain": 1, "listed": 1, "silu_mul": 2}
"""Of x for one of out at most, by what is cast, as `codegen.CastKernel` has it."""

PLACES = params.places(("x", "out", "scale"))
"""Of a launch that is given these three tensors."""

_NAMES = ("the input", "out", "scale_out")
_LIST_FIELDS = {"rows": "index", "offs": "living", "counts": "living"}
"""In `params.CAST_OF_ROWS`, of tensors that say which rows are cast."""

TRANSPOSED_LISTS = {"rows": "index", "offs": "ends"}
"""The same in `params.TRANSPOSED_CAST` and `params.CAST_BOTH`."""


class CastLayout(NamedTuple):
    """Numbers of one cast, as the kernel's table has them. Strides in elements; x and out have unit column strides.

    Attributes:
        rows, columns: of x and of out.
        aligned: both may be accessed in vectors of 16 bytes of x, and their rows are whole vectors long.
        pow2_scale: a scale is the next power of two that is no smaller.
        amax_floor: lower bound of a block's largest magnitude.
        correction: 1 where quotients are rounded as by division, 0 where they are products with a rounded reciprocal.
        x_rows, wide_index, groups, group_rows, limit, sigmoid_factor, beta: as `params.CAST_OF_ROWS` has them.
    """

    rows: int
    columns: int
    x_stride: int
    out_stride: int
    scale_stride_row: int
    scale_stride_column: int
    aligned: bool
    pow2_scale: bool
    amax_floor: float
    correction: int
    x_rows: int = 0
    wide_index: bool = False
    groups: int = 0
    group_rows: int = 0
    limit: float = 0.0
    sigmoid_factor: float = 0.0
    beta: float = 0.0


class TransposedLayout(NamedTuple):
    """Numbers of one cast along tokens, as `params.TRANSPOSED_CAST` has them. Strides in elements.

    Attributes:
        rows: tokens, of which each column of x becomes a row of out.
        aligned: x may be read in vectors of 16 bytes, and its rows are whole vectors long.
        others: as `CastLayout` and `params.TRANSPOSED_CAST` have them.
    """

    rows: int
    columns: int
    x_stride: int
    out_stride: int
    scale_stride_row: int
    scale_stride_column: int
    aligned: bool
    pow2_scale: bool
    amax_floor: float
    correction: int
    x_rows: int
    wide_index: bool
    groups: int
    alignment: int
    out_vectors: bool


class BothLayout(NamedTuple):
    """Numbers of one cast both ways, or of codes that are transposed, as `params.CAST_BOTH` has them. Strides and steps
    in elements; `out` and `scale` are the transpose's.

    Attributes:
        rows, columns: of x, of which each column becomes a row of out.
        aligned: x may be read, and `row_out` written, in vectors of 16 bytes of x, and rows are whole vectors long.
        others: as `TransposedLayout` and `params.CAST_BOTH` have them.
    """

    rows: int
    columns: int
    x_stride: int
    out_stride: int
    aligned: bool
    out_vectors: bool
    scale_stride_row: int = 0
    scale_stride_column: int = 0
    pow2_scale: bool = False
    amax_floor: float = 0.0
    correction: int = 0
    x_rows: int = 0
    wide_index: bool = False
    groups: int = 0
    alignment: int = SCALE_BLOCK
    row_out_stride: int = 0
    row_scale_stride_row: int = 0
    row_scale_stride_column: int = 0
    matrices: int = 1
    x_step: int = 0
    out_step: int = 0
    scale_step: int = 0
    row_out_step: int = 0


_OF_GATED = {"dh_stride": int, "x_scale_stride_row": int, "x_scale_stride_column": int}

GatedLayout = NamedTuple("GatedLayout", (BothLayout.__annotations__ | _OF_GATED).items())
"""Numbers of one gradient of SwiGLU, as `params.GATED` has them."""


class CombineLayout(NamedTuple):
    """Numbers of one sum of experts' rows, as `params.COMBINE` has them. Strides in elements."""

    tokens: int
    columns: int
    x_rows: int
    x_stride: int
    out_stride: int
    weights_stride_row: int
    weights_stride_column: int
    index_stride_row: int
    index_stride_column: int
    top_k: int
    aligned: bool
    wide_index: bool
    narrow_weights: bool


class SortLayout(NamedTuple):
    """Numbers of one sort of tokens' choices, as `params.SORT` has them."""

    choices: int
    rows_size: int
    experts: int
    alignment: int
    top_k_reciprocal: int
    top_k_shift: int
    cluster_log2: int
    slice: int
    warp_choices_log2: int


class SortSchedule(NamedTuple):
    """Who counts and who places choices in a sort.

    Attributes:
        grid: thread blocks.
        cluster: of them that count all choices together; every cluster does so.
        slice: choices that a block counts, of which it places as many as its warps take.
        warp_choices: choices that a warp places.
    """

    grid: int
    cluster: int
    slice: int
    warp_choices: int


COMBINE_COLUMNS = 8
"""Of a thread, as combine.cuh has them: 16 bytes."""

COMBINE = CombineKernel(threads=256, rows_at_once=4, blocks_per_sm=4)
"""64 KB of reads under way on each SM, twice of what `streaming.bytes_in_flight_needed` says, since each waits for its
index before. More blocks would leave too few registers: 16 hold what is read, 8 the sums."""

TRANSPOSED = {
    "bf16": TransposedKernel("bf16", columns=64, threads=256, blocks_per_sm=6),
    "fp16": TransposedKernel("fp16", columns=64, threads=256, blocks_per_sm=6),
    "fp32": TransposedKernel("fp32", columns=64, threads=256, blocks_per_sm=4),
}
"""By the source's format. A thread holds 4 tokens of 16 bytes, or 8 of FP32: with more blocks registers would spill.
Tiles of 128 columns take up to 12 % longer, of 32 up to 28 % (H200, 2026-11-24)."""

BOTH = {
    ("rows", "bf16"): BothKernel("rows", "bf16", threads=512, blocks_per_sm=2),
    ("rows", "fp16"): BothKernel("rows", "fp16", threads=512, blocks_per_sm=1),
    ("rows", "fp32"): BothKernel("rows", "fp32", threads=512, blocks_per_sm=1),
    ("mixed", "bf16"): BothKernel("mixed", "bf16", threads=512, blocks_per_sm=2),
    ("mixed", "fp16"): BothKernel("mixed", "fp16", threads=512, blocks_per_sm=1),
    ("mixed", "fp32"): BothKernel("mixed", "fp32", threads=512, blocks_per_sm=1),
    ("tiles", "bf16"): BothKernel("tiles", "bf16", threads=256, blocks_per_sm=4),
    ("tiles", "fp16"): BothKernel("tiles", "fp16", threads=256, blocks_per_sm=4),
    ("tiles", "fp32"): BothKernel("tiles", "fp32", threads=512, blocks_per_sm=1),
    ("codes", "e4m3"): BothKernel("codes", "e4m3", threads=256, blocks_per_sm=6),
}
"""By what is cast and the source's format. A thread holds 4 or 8 rows of 16 bytes; with more blocks registers would
spill."""

GATED = {
    (source, blocks): GatedKernel(source, blocks, threads=512, blocks_per_sm=2)
    for source in ("bf16", "e4m3")
    for blocks in (False, True)
}
"""By the source of gates and ups, and whether h has a scale for 128x128. Two tiles of three wait in shared memory, so
that 64 registers are enough."""

SORT = {choice: SortKernel(choice, threads=512, blocks_per_sm=1) for choice in ("int32", "int64")}
"""By the dtype of a choice. With 512 threads, what a block keeps of each expert fits into 48 KB."""

MOST_EXPERTS = 512
"""That choices are sorted by: one for each thread."""

_SORT_BLOCKS = 64
"""At most: more would wait for others, where clusters do not fill a GPU's parts evenly: with 128 blocks 65,536 choices
take 1.7 us more. Up to there each warp places as few as it has lanes, which takes 0.5 to 0.7 us less than twice as many
of 4,096 and 16,384 choices (H100, 2026-11-26)."""

_COUNTED_ALONE = 4096
"""Choices that a block counts by itself in less time than blocks of a cluster need to meet."""

_MOST_PLACED_BY_WARP = 2048
"""A block's are told by 16 bits."""

MOST_CHOICES = _SORT_BLOCKS * _MOST_PLACED_BY_WARP * SORT["int64"].threads // WARP
"""That the kernels sort; torch takes a fraction longer for more."""

_FILLED_BY_BLOCK = 8192
"""Rows, if there are blocks enough: of no token, where experts are aligned."""

_loaded: dict[tuple[StreamingKernel, int], _launcher.Kernel] = {}
_loading = jit.fork_safe_lock()


def roofline(
    block_rows: int, source: str, rows: int, columns: int, hardware: Hardware = H200, what: str = "plain"
) -> Reduction:
    """The walls of a cast to FP8 of [rows, columns] with scales of `block_rows` x 128: a reduction of each block."""
    blocks = ceil_div(rows, block_rows) * ceil_div(columns, SCALE_BLOCK)
    read_bytes = READ_ELEMENTS[what] * SOURCE_BYTES[source]
    return derive_reduction(blocks, block_rows * SCALE_BLOCK, read_bytes, 1, hardware)


@lru_cache(maxsize=65_536)
def choose(
    block_rows: int, source: str, rows: int, columns: int, num_sms: int, what: str = "plain"
) -> tuple[CastKernel, int]:
    """The kernel for a cast, and how many thread blocks to launch. The size matters to the number alone."""
    walls = roofline(block_rows, source, rows, columns, replace(H200, num_sms=num_sms), what)
    kernel = CastKernel(block_rows, source, what, walls.warps * WARP, walls.threads_per_row, walls.blocks_per_sm)
    return kernel, walls.grid


def choose_combine(tokens: int, columns: int, num_sms: int) -> tuple[CombineKernel, int]:
    """The kernel that adds up experts' rows, and how many thread blocks to launch. Sizes matter to the number alone."""
    items = tokens * ceil_div(columns, COMBINE_COLUMNS)
    return COMBINE, min(num_sms * COMBINE.blocks_per_sm, ceil_div(items, COMBINE.threads))


def choose_transposed(source: str, tokens: int, columns: int, num_sms: int) -> tuple[TransposedKernel, int]:
    """The kernel for a cast along tokens, and how many thread blocks to launch. Sizes matter to the number alone."""
    kernel = TRANSPOSED[source]
    tiles = ceil_div(tokens, SCALE_BLOCK) * ceil_div(columns, kernel.columns)
    return kernel, min(num_sms * kernel.blocks_per_sm, tiles)


def choose_both(what: str, source: str, rows: int, columns: int, matrices: int, num_sms: int) -> tuple[BothKernel, int]:
    """The kernel for a cast both ways, or that transposes codes, and how many thread blocks to launch."""
    kernel = BOTH[what, source]
    tiles = ceil_div(rows, SCALE_BLOCK) * ceil_div(columns, SCALE_BLOCK) * matrices
    return kernel, min(num_sms * kernel.blocks_per_sm, tiles)


def choose_gated(source: str, blocks: bool, rows: int, columns: int) -> tuple[GatedKernel, int]:
    """The kernel for the gradient of SwiGLU, of h of this size, and how many thread blocks to launch."""
    return GATED[source, blocks], ceil_div(rows, SCALE_BLOCK) * ceil_div(columns, SCALE_BLOCK)


def schedule_sort(choices: int, rows_size: int, threads: int) -> SortSchedule:
    """How at most `MOST_CHOICES` are sorted into a list of rows, by blocks of so many threads."""
    warps = threads // WARP
    cluster = 1 if choices <= _COUNTED_ALONE else params.SORT_BLOCKS
    warp_choices = WARP
    while _SORT_BLOCKS * warps * warp_choices < choices:
        warp_choices *= 2
    share = warps * warp_choices
    counted = round_up(ceil_div(choices, cluster), share)
    filling = min(ceil_div(rows_size, cluster * _FILLED_BY_BLOCK), _SORT_BLOCKS // cluster)
    return SortSchedule(cluster * max(counted // share, filling), cluster, counted, warp_choices)


def sort_layout(
    schedule: SortSchedule, tokens: int, top_k: int, rows_size: int, experts: int, alignment: int
) -> SortLayout:
    """What the kernel is told: a choice's token is its number times a reciprocal, rounded up, which is exact below
    2**31."""
    shift = 31 + (top_k - 1).bit_length()
    return SortLayout(
        *(tokens * top_k, rows_size, experts, alignment, ceil_div(1 << shift, top_k), shift),
        cluster_log2=schedule.cluster.bit_length() - 1,
        slice=schedule.slice,
        warp_choices_log2=schedule.warp_choices.bit_length() - 1,
    )


def all_kernels() -> list[StreamingKernel]:
    """Every kernel that a call can need, but for those of the indexer's logits."""
    return [*cast_kernels(), *TRANSPOSED.values(), *BOTH.values(), *GATED.values(), COMBINE, *SORT.values()]


def cast_kernels() -> list[CastKernel]:
    """Those of casts along k."""
    kinds = [
        *((block_rows, source, "plain") for block_rows in (1, SCALE_BLOCK) for source in SOURCE_BYTES),
        *((1, source, "listed") for source in SOURCE_BYTES),
        *((1, source, "silu_mul") for source in SOURCE_BYTES if SOURCE_BYTES[source] == 2),
    ]
    return [choose(rows, source, 1, SCALE_BLOCK, H200.num_sms, what)[0] for rows, source, what in kinds]


def is_loaded(kernel: StreamingKernel, device: int) -> bool:
    """Whether a launch needs neither compiler, disk nor driver loading."""
    return (kernel, device) in _loaded


def load(kernel: StreamingKernel, device: int) -> _launcher.Kernel:
    """The kernel on CUDA device `device`: remembered, else from the disk cache, else compiled.

    Raises:
        jit.CompileError: it does not compile.
        RuntimeError: NVRTC is missing, or the driver refuses the kernel.
    """
    if not is_loaded(kernel, device):
        cubin = _cubin(kernel)
        with _loading:
            if not is_loaded(kernel, device):
                _loaded[kernel, device] = _launcher.load(cubin, kernel.name, getattr(kernel, "smem_bytes", 0), device)
    return _loaded[kernel, device]


def _cubin(kernel: StreamingKernel) -> bytes:
    if isinstance(kernel, LogitsKernel) and watch.is_wanted():  # others wait for no mbarrier
        return jit.compile_kernel(watch.debug_source(kernel), kernel.name).cubin  # of no use to another process
    return jit.load_cubin(streaming_source(kernel), kernel.name)


def load_kernels(device: int | None, workers: int, kernels: Iterable[StreamingKernel] | None = None) -> None:
    """Compile, and load unless `device` is None, these kernels, by default `all_kernels()`, `workers` at a time. Errors
    as for `load`."""

    def make_ready(kernel: StreamingKernel) -> None:
        if device is None:
            _cubin(kernel)
        else:
            load(kernel, device)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        list(pool.map(make_ready, all_kernels() if kernels is None else kernels))


def operands_of_rows(lists: tuple[str, ...]) -> dict:
    """Keywords of `prepare_launch` for a launch that is given x, out, scale and the lists of these names."""
    fields = (*PLACES, *(_LIST_FIELDS[name] for name in lists))
    return {"names": _NAMES + lists, "places": params.places(fields)}


def prepare_launch(
    kernel: CastKernel,
    grid: int,
    device: int,
    layout: CastLayout,
    *,
    names: tuple[str, ...] = _NAMES,
    places: Mapping[str, params.Place] = PLACES,
    pdl: bool = False,
) -> _launcher.Launch:
    """Everything about a launch but the addresses of its tensors. Errors as for `load`.

    Args:
        names: of the tensors that the launch will be given.
        places: where in them x, out and scale are.
        pdl: programmatic dependent launch: the kernel may start before the one ahead of it in the stream has ended, and
            waits for that before it reads or writes anything.
    """
    table = params.CAST if kernel.what == "plain" else params.CAST_OF_ROWS
    return _prepare(kernel, grid, device, table, layout, names, places, pdl)


def prepare_transposed(
    kernel: TransposedKernel, grid: int, device: int, layout: TransposedLayout, lists: tuple[str, ...]
) -> _launcher.Launch:
    """The same of a cast along tokens, of x, out, scale and the lists of these names. Errors as for `load`."""
    places = transposed_places(lists)
    return _prepare(kernel, grid, device, params.TRANSPOSED_CAST, layout, _NAMES + lists, places, False)


def transposed_places(lists: tuple[str, ...]) -> Mapping[str, params.Place]:
    return params.places((*PLACES, *(TRANSPOSED_LISTS[name] for name in lists)))


def prepare_both(
    kernel: BothKernel, grid: int, device: int, layout: BothLayout, names: tuple[str, ...], fields: tuple[str, ...]
) -> _launcher.Launch:
    """The same of a cast both ways, or of codes that are transposed: of tensors of these names, which are these fields
    of `params.CAST_BOTH`. Errors as for `load`."""
    return _prepare(kernel, grid, device, params.CAST_BOTH, layout, names, params.places(fields), False)


def prepare_gated(
    kernel: GatedKernel, grid: int, device: int, layout: GatedLayout, names: tuple[str, ...], fields: tuple[str, ...]
) -> _launcher.Launch:
    """The same of the gradient of SwiGLU, of `params.GATED`. Errors as for `load`."""
    return _prepare(kernel, grid, device, params.GATED, layout, names, params.places(fields), False)


def prepare_combine(kernel: CombineKernel, grid: int, device: int, layout: CombineLayout) -> _launcher.Launch:
    """Everything about a launch on x, weights, index and out, but their addresses. Errors as for `load`."""
    names = ("x", "weights", "index", "out")
    return _prepare(kernel, grid, device, params.COMBINE, layout, names, params.places(names), False)


def prepare_sort(kernel: SortKernel, schedule: SortSchedule, device: int, layout: SortLayout) -> _launcher.Launch:
    """Everything about a launch on chosen, rows, offs and index, but their addresses. Errors as for `load`."""
    names = ("chosen", "rows", "offs", "index")
    places = params.places(names)
    return _prepare(kernel, schedule.grid, device, params.SORT, layout, names, places, False, schedule.cluster)


def _prepare(
    kernel: StreamingKernel,
    grid: int,
    device: int,
    table: params.Params,
    layout: CastLayout | TransposedLayout | BothLayout | GatedLayout | CombineLayout | SortLayout,
    names: tuple[str, ...],
    places: Mapping[str, params.Place],
    pdl: bool,
    cluster: int = 1,
) -> _launcher.Launch:
    return _launcher.prepare(
        load(kernel, device),
        grid=grid,
        cluster=cluster,
        threads=kernel.threads,
        params=table.pack(**layout._asdict()),
        names=names,
        pointers=table.pointers(places),
        maps=(),
        fixed_maps=(),
        pdl=pdl,
    )
