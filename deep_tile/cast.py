"""Kernels for casts, `combine` and `sort_by_expert`: launch parameters (casts take theirs from the roofline), loading,
launches.

Knows integers and CUDA device ordinals, not tensors: no torch. Kernels are compiled (jit.py) and loaded once per device
and live as long as the process.
"""

from collections.abc import Iterable, Mapping
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
    NormKernel,
    SortKernel,
    StreamingKernel,
    TransposedKernel,
    UnpackKernel,
    streaming_source,
)
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.kinds import PACKED
from deep_tile.progress import for_each
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.streaming import WARP, Reduction, derive_reduction

SOURCE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element, by the names in `codegen.CAST_FORMATS`."""

READ_ELEMENTS = {"plain": 1, "listed": 1, "silu_mul": 2}
"""x elements read per out element, at most, by `codegen.CastKernel.what`."""

PLACES = params.places(("x", "out", "scale"))
"""Places for a launch with these three tensors."""

_LIST_FIELDS = {"rows": "index", "offs": "living", "counts": "living"}
"""Fields in `params.CAST_OF_ROWS` for the tensors that select rows."""

_TOKEN_FIELDS = {"rows": "index", "offs": "ends"}
"""Places of these arguments in `params.TRANSPOSED_CAST` and `params.CAST_BOTH`."""


class SortSchedule(NamedTuple):
    """How a sort's choices are divided among thread blocks and warps, for counting and placing.

    Attributes:
        grid: thread blocks.
        cluster: blocks that count all choices together; every cluster does so.
        slice: choices that a block counts; it places as many as its warps take.
        warp_choices: choices that a warp places.
    """

    grid: int
    cluster: int
    slice: int
    warp_choices: int


COMBINE_COLUMNS = 8
"""Columns per thread, as in combine.cuh: 16 bytes."""

COMBINE = CombineKernel(threads=128, rows_at_once=8, blocks_per_sm=4)
"""64 KB of reads in flight per SM, twice what `streaming.bytes_in_flight_needed` says, since each read waits for its
index. More blocks would leave too few registers: 32 hold loaded values, 8 the sums. Half the rows and twice the threads
take 0.3 to 1.6 us longer for up to 32 tokens of eight experts, which then wait twice (H100, 2026-11-26)."""

UNPACK = {
    name: UnpackKernel(name, threads=256, blocks_per_sm=6) for name, kind in PACKED.items() if kind.packing.fits_fp8
}
"""Unpacking kernels by packed kind, of those that FP8 holds. A warp has 1 KB of reads in flight; an SM's 32 warps have
what the roofline asks for."""

TRANSPOSED = {
    "bf16": TransposedKernel("bf16", columns=64, threads=256, blocks_per_sm=6),
    "fp16": TransposedKernel("fp16", columns=64, threads=256, blocks_per_sm=6),
    "fp32": TransposedKernel("fp32", columns=64, threads=256, blocks_per_sm=4),
}
"""Kernels of the cast along tokens, by source format. A thread holds 4 tokens x 16 bytes, or 8 in FP32: with more
blocks registers would spill. Tiles with 128 columns take up to 12 % longer, with 32 up to 28 % (H200, 2026-11-24)."""

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
"""Kernels of casts both ways, by `what` and source format. A thread holds 4 or 8 rows x 16 bytes; with more blocks
registers would spill."""

GATED = {
    (source, blocks): GatedKernel(source, blocks, threads=512, blocks_per_sm=2)
    for source in ("bf16", "e4m3")
    for blocks in (False, True)
}
"""Kernels of SwiGLU's gradient, by the format of gate and up, and whether h has 128x128 scales. Two of three tiles wait
in shared memory, so 64 registers suffice."""

NORM_VECTOR = 8
"""Columns per thread, as in norm.cuh: 16 bytes."""

NORM = {most: NormKernel(most // NORM_VECTOR, blocks) for most, blocks in ((2048, 8), (4096, 4), (8192, 2))}
"""RMSNorm kernels by their most columns. With 32 registers, all of an SM's threads have 32 bytes of reads in flight."""

SORT = {choice: SortKernel(choice, threads=512, blocks_per_sm=1) for choice in ("int32", "int64")}
"""Sorting kernels by the choices' dtype. With 512 threads a block's per-expert data fits into 48 KB."""

MOST_EXPERTS = 512
"""Most experts that choices are sorted by: one per thread."""

_SORT_BLOCKS = 64
"""Most thread blocks of a sort: more would wait for others, where clusters do not fill a GPU's parts evenly. 65,536
choices take 1.7 us more with 128 blocks. With blocks to spare a warp places 32 choices, one per lane: 4,096 and 16,384
choices take 0.5 to 0.7 us less than with 64 (H100, 2026-11-26)."""

_COUNTED_ALONE = 4096
"""Choices that one block counts faster than a cluster's blocks can synchronise."""

_MOST_PLACED_BY_WARP = 2048
"""Most choices that a warp places: a block counts its choices in 16 bits."""

MOST_CHOICES = _SORT_BLOCKS * _MOST_PLACED_BY_WARP * SORT["int64"].threads // WARP
"""Most choices that the kernels sort; for more, torch takes a fraction longer."""

_FILLED_BY_BLOCK = 8192
"""Padding rows per block, if there are enough blocks."""

_MOST_COUNTED = 2**32 - 2**24
"""Blocks, tiles or groups of columns per launch, and columns: kernels count them in 32 bits, and step by the grid."""

_loaded: dict[tuple[StreamingKernel, int], _launcher.Kernel] = {}
_loading = jit.fork_safe_lock()


def roofline(
    block_rows: int, source: str, rows: int, columns: int, hardware: Hardware = H200, what: str = "plain"
) -> Reduction:
    """The roofline for a cast of [rows, columns] to FP8 with `block_rows` x 128 scales: one reduction per block."""
    blocks = ceil_div(rows, block_rows) * ceil_div(columns, SCALE_BLOCK)
    read_bytes = READ_ELEMENTS[what] * SOURCE_BYTES[source]
    return derive_reduction(blocks, block_rows * SCALE_BLOCK, read_bytes, 1, hardware)


@lru_cache(maxsize=65_536)
def choose(
    block_rows: int, source: str, rows: int, columns: int, num_sms: int, what: str = "plain"
) -> tuple[CastKernel, int]:
    """The kernel for a cast, and its grid size; only the latter depends on the size."""
    _check_count(ceil_div(rows, block_rows) * ceil_div(columns, SCALE_BLOCK), rows, columns)
    walls = roofline(block_rows, source, rows, columns, replace(H200, num_sms=num_sms), what)
    kernel = CastKernel(block_rows, source, what, walls.warps * WARP, walls.threads_per_row, walls.blocks_per_sm)
    return kernel, walls.grid


def _check_count(count: int, rows: int, columns: int) -> None:
    if max(count, columns) > _MOST_COUNTED:
        raise ValueError(
            f"[{rows}, {columns}] is too large for one launch, whose limit is {_MOST_COUNTED} columns and "
            f"{_MOST_COUNTED} parts of rows, here {count}: split the rows or columns over several calls"
        )


def choose_combine(tokens: int, columns: int, num_sms: int) -> tuple[CombineKernel, int]:
    """The kernel that adds up experts' rows, and its grid size; only the latter depends on sizes."""
    items = tokens * ceil_div(columns, COMBINE_COLUMNS)
    _check_count(items, tokens, columns)
    return COMBINE, min(num_sms * COMBINE.blocks_per_sm, ceil_div(items, COMBINE.threads))


def choose_transposed(source: str, tokens: int, columns: int, num_sms: int) -> tuple[TransposedKernel, int]:
    """The kernel for a cast along tokens, and its grid size; only the latter depends on sizes."""
    kernel = TRANSPOSED[source]
    tiles = ceil_div(tokens, SCALE_BLOCK) * ceil_div(columns, kernel.columns)
    _check_count(tiles, tokens, columns)
    return kernel, min(num_sms * kernel.blocks_per_sm, tiles)


def choose_both(what: str, source: str, rows: int, columns: int, matrices: int, num_sms: int) -> tuple[BothKernel, int]:
    """The kernel for a cast both ways, or that transposes codes, and how many thread blocks to launch."""
    kernel = BOTH[what, source]
    tiles = ceil_div(rows, SCALE_BLOCK) * ceil_div(columns, SCALE_BLOCK) * matrices
    _check_count(tiles, rows, columns)
    return kernel, min(num_sms * kernel.blocks_per_sm, tiles)


def choose_gated(source: str, blocks: bool, rows: int, columns: int) -> tuple[GatedKernel, int]:
    """The kernel for SwiGLU's gradient with h this large, and its grid size."""
    return GATED[source, blocks], ceil_div(rows, SCALE_BLOCK) * ceil_div(columns, SCALE_BLOCK)


def choose_norm(rows: int, columns: int) -> tuple[NormKernel, int] | None:
    """The kernel for RMSNorm and a cast of [rows, columns], and its grid size. None where rows are too long for it."""
    _check_count(rows, rows, columns)
    kernel = next((kernel for most, kernel in NORM.items() if columns <= most), None)
    return None if kernel is None else (kernel, rows)


def unpack_grid(kernel: UnpackKernel, units: int, num_sms: int) -> int:
    """Grid size for unpacking `units` units; a warp takes one at a time."""
    return min(num_sms * kernel.blocks_per_sm, ceil_div(units, kernel.threads // WARP))


def schedule_sort(choices: int, rows_size: int, threads: int) -> SortSchedule:
    """The schedule that sorts at most `MOST_CHOICES` choices, by blocks with this many threads."""
    warps = threads // WARP
    cluster = 1 if choices <= _COUNTED_ALONE else params.SORT_BLOCKS
    warp_choices = WARP
    while _SORT_BLOCKS * warps * warp_choices < choices:
        warp_choices *= 2
    share = warps * warp_choices
    counted = round_up(ceil_div(choices, cluster), share)
    filling = min(ceil_div(rows_size, cluster * _FILLED_BY_BLOCK), _SORT_BLOCKS // cluster)
    return SortSchedule(cluster * max(counted // share, filling), cluster, counted, warp_choices)


def sort_numbers(
    schedule: SortSchedule, tokens: int, top_k: int, rows_size: int, experts: int, alignment: int
) -> dict[str, int]:
    """Kernel parameters. A choice's token is its number times a rounded-up reciprocal, exact below 2**31."""
    shift = 31 + (top_k - 1).bit_length()
    return {
        "choices": tokens * top_k,
        "rows_size": rows_size,
        "experts": experts,
        "alignment": alignment,
        "top_k_reciprocal": ceil_div(1 << shift, top_k),
        "top_k_shift": shift,
        "cluster_log2": schedule.cluster.bit_length() - 1,
        "slice": schedule.slice,
        "warp_choices_log2": schedule.warp_choices.bit_length() - 1,
    }


def all_kernels() -> list[StreamingKernel]:
    """Every kernel that a call can need, except the indexer's logits."""
    of_casts = [*cast_kernels(), *TRANSPOSED.values(), *BOTH.values(), *GATED.values(), *NORM.values()]
    return [*of_casts, COMBINE, *UNPACK.values(), *SORT.values()]


def cast_kernels() -> list[CastKernel]:
    kinds = [
        *((block_rows, source, "plain") for block_rows in (1, SCALE_BLOCK) for source in SOURCE_BYTES),
        *((1, source, "listed") for source in SOURCE_BYTES),
        *((1, source, "silu_mul") for source in SOURCE_BYTES if SOURCE_BYTES[source] == 2),
    ]
    return [choose(rows, source, 1, SCALE_BLOCK, H200.num_sms, what)[0] for rows, source, what in kinds]


def is_loaded(kernel: StreamingKernel, device: int) -> bool:
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
        return jit.compile_kernel(watch.debug_source(kernel), kernel.name).cubin  # useless to another process
    return jit.load_cubin(streaming_source(kernel), kernel.name)


def load_kernels(
    device: int | None, workers: int | None, kernels: Iterable[StreamingKernel] | None = None, progress: bool = False
) -> None:
    """Compile, and load unless `device` is None, these kernels, by default `all_kernels()`, `workers` at a time. Errors
    as for `load`."""

    def make_ready(kernel: StreamingKernel) -> None:
        if device is None:
            _cubin(kernel)
        else:
            load(kernel, device)

    kernels, what = (all_kernels(), "casts") if kernels is None else (kernels, "kernels")
    for_each(make_ready, kernels, workers, progress, f"Compiling {what}")


def fields_of_rows(lists: tuple[str, ...]) -> tuple[str, ...]:
    """Fields of `params.CAST_OF_ROWS` that x, out, scale and the lists of these names are."""
    return *PLACES, *(_LIST_FIELDS[name] for name in lists)


def fields_of_tokens(lists: tuple[str, ...]) -> tuple[str, ...]:
    return *PLACES, *(_TOKEN_FIELDS[name] for name in lists)


def prepare_launch(
    kernel: StreamingKernel,
    grid: int,
    device: int,
    numbers: Mapping[str, float],
    names: tuple[str, ...],
    places: Mapping[str, params.Place],
    *,
    cluster: int = 1,
    maps: tuple = (),
    pdl: bool | None = None,
) -> _launcher.Launch:
    """A launch, complete but for tensor addresses. Errors as for `load`.

    Args:
        numbers: of `kernel.table`, by name.
        names: the tensors that the launch will be given.
        places: where in them what `kernel.table` points to is.
        maps: tensor maps, as `MapLayout.entry` returns them.
        pdl: programmatic dependent launch: the kernel may start before its predecessor in the stream ends, and waits
            for that end before it reads or writes anything. None: for kernels between the products of an expert layer.
    """
    return _launcher.prepare(
        load(kernel, device),
        grid=grid,
        cluster=cluster,
        threads=kernel.threads,
        params=kernel.table.pack(**numbers),
        names=names,
        pointers=kernel.table.pointers(places),
        maps=maps,
        fixed_maps=(),
        pdl=_is_of_experts(kernel) if pdl is None else pdl,
    )


def _is_of_experts(kernel: StreamingKernel) -> bool:
    return isinstance(kernel, SortKernel | CombineKernel | NormKernel) or getattr(kernel, "what", "") in (
        "listed",
        "silu_mul",
    )
