"""Indexer logits kernels: choice, parameters, tensor maps, launches.

Knows integers and CUDA device ordinals, not tensors: no torch. `cast.py` loads the kernels.
"""

from typing import NamedTuple

from deep_tile import _launcher, cast, params
from deep_tile.codegen import LOGITS_TILE, LogitsKernel
from deep_tile.config import ceil_div, round_up
from deep_tile.params import MapLayout, Place
from deep_tile.select.hardware import Hardware
from deep_tile.select.streaming import Prediction
from deep_tile.walls import product_flops

HEAD_DIMS = (32, 64, 128)
"""Supported elements per head: TMA's swizzle spans."""

HEADS = (32, 64, 128)
"""Heads per query in shared memory; missing heads are zeros."""

MOST_BATCH_QUERIES = 8
"""Most queries per paged sequence."""

OUTPUTS = ("fp32", "bf16")

SCALE_BYTES = 4

_MMA_COLUMNS = {3: 128, 2: 256}
"""Most WGMMA columns (queries x heads), by math warpgroups: with three each has half the registers."""

_MOST_TILES = 2**31 - 1
"""Most tiles over all query blocks; the kernel counts in 32 bits."""

PLACES = {
    "q_map": Place(0),
    "keys_map": Place(1),
    "scales_map": Place(2),
    "weights": Place(3),
    "begins": Place(4),
    "ends": Place(5),
    "out": Place(6),
}
"""Places for a launch with q, kv, kv_scale, weights, starts, ends and out."""

PAGED_PLACES = {
    "q_map": Place(0),
    "keys_map": Place(1),
    "scales_map": Place(1),
    "weights": Place(2),
    "ends": Place(3),
    "table": Place(4),
    "out": Place(5),
}
"""Places for a launch with q, cache, weights, lengths, block_table and out."""


class Keys(NamedTuple):
    """Key strides, in bytes.

    Attributes:
        pages, page_keys: keys that are not in pages are one page.
        stride: from key to key.
        page_stride: between pages; unused for a single page.
        scales_begin: offset from a page's first key to its scales; 0 for a separate scale tensor.
    """

    pages: int
    page_keys: int
    stride: int
    page_stride: int
    scales_begin: int


class LogitsLayout(NamedTuple):
    """One call's parameters, by the names in `params.LOGITS`. Strides in elements."""

    rows: int
    heads: int
    keys: int
    columns: int
    blocks: int
    batch_rows: int
    batch_blocks: int
    compressed: bool
    fills: bool
    own_lengths: bool
    table_columns: int
    weights_stride: int
    table_stride: int
    out_stride: int


def choose(head_dim: int, heads: int, batch_rows: int, paged: bool, output: str) -> LogitsKernel:
    """The kernel for queries, `batch_rows` of which share keys.

    Three warpgroups hide the work after WGMMAs better than two: up to 16 % less time with 128 heads, 5 to 8 % with 32,
    equal with 64 (2,048 queries), and 7 % with 6 paged queries. But they have room for fewer queries at once: 4 in
    pages take a third longer than by two (H100, 2026-11-26). Without pages, intermediate query counts are rare and
    rounded up.
    """
    three, two = (_kernel(head_dim, heads, batch_rows, paged, output, warpgroups) for warpgroups in (3, 2))
    is_tight = paged and _multiplied(two, batch_rows) < _multiplied(three, batch_rows)
    return two if is_tight else three


def _multiplied(kernel: LogitsKernel, batch_rows: int) -> int:
    """Queries that the kernel multiplies for `batch_rows` that share keys."""
    return round_up(batch_rows, kernel.block_queries)


def _kernel(head_dim: int, heads: int, batch_rows: int, paged: bool, output: str, warpgroups: int) -> LogitsKernel:
    """Warpgroups share queries if one WGMMA takes all of them; they then alternate in key tiles. Else each has its own,
    and all read every tile."""
    slots = next(slots for slots in HEADS if heads <= slots)
    most = _MMA_COLUMNS[warpgroups] // slots
    splits = batch_rows > most
    queries = min(most, ceil_div(batch_rows, warpgroups) if splits else batch_rows)
    if not paged:
        queries = most if splits else 1 << (queries - 1).bit_length()
    return LogitsKernel(head_dim, slots, queries, warpgroups, splits, paged, output)


def all_kernels(
    head_dim: int, heads: int, paged: bool, output: str, most_rows: int | None = None
) -> list[LogitsKernel]:
    """Every kernel that calls with up to this many queries on the same keys can need."""
    limit = MOST_BATCH_QUERIES if paged else _MMA_COLUMNS[3] // HEADS[0] + 1  # more need no other kernel
    rows = range(1, min(most_rows or limit, limit) + 1)
    return [*dict.fromkeys(choose(head_dim, heads, row, paged, output) for row in rows)]


def default_kernels() -> list[LogitsKernel]:
    """Kernels for the indexers of known models: 32 or 64 heads of 128 elements, with FP32 logits."""
    return [
        kernel for heads in (32, 64) for paged in (False, True) for kernel in all_kernels(128, heads, paged, "fp32")
    ]


def blocks_of(kernel: LogitsKernel, rows: int, batch_rows: int) -> tuple[int, int]:
    """The number of query blocks, in total and per sequence."""
    batch_blocks = ceil_div(batch_rows, kernel.block_queries)
    return rows // batch_rows * batch_blocks, batch_blocks


_READ_SHARE, _OVERLAP = 0.93, 4
"""The share of a plain read's bandwidth, and the exponent with which bytes overlap products."""

_TENSOR_SHARES = {32: 0.75, 64: 0.8, 128: 0.87}
"""The share of the tensor rate under load, by heads in shared memory: a maximum and an FMA for each product bind.
docs/indexer.md's prefills are within 14 %, 3 % on average, its decodes within 9 and 2 % (H100, 2026-11-26)."""


def predict(
    kernel: LogitsKernel, rows: int, batch_rows: int, keys: int, bytes_moved: int, num_sms: int, hardware: Hardware
) -> Prediction:
    """The prediction for `batch_rows` of the rows with so many keys for each sequence, all of which count."""
    sizes, tflops, launch_us = (keys, kernel.head_dim), hardware.tflops("fp8"), hardware.stream_us
    done = product_flops(rows // batch_rows * _multiplied(kernel, batch_rows) * kernel.heads, *sizes)
    share = _TENSOR_SHARES[kernel.heads] * num_sms / hardware.num_sms
    terms = {
        "bytes through HBM": bytes_moved / (_READ_SHARE * hardware.hbm_tbps) / 1e6,
        "products, and sums of heads": done / (share * tflops) / 1e6,
    }
    bound, least_us = max(terms.items(), key=lambda term: term[1])
    whole_us = sum(us**_OVERLAP for us in terms.values()) ** (1 / _OVERLAP)
    parts = [("launch and ramp", launch_us), (bound, least_us), ("what they do not hide", whole_us - least_us)]
    queries = f"{kernel.block_queries} of the queries that share keys"
    why = f"{kernel.name} multiplies {queries} at once; bound by {bound}. Constants are an H100's (2026-11-26)."
    flops = product_flops(rows * kernel.heads, *sizes)
    times = [{"name": kernel.name, "time_us": launch_us + whole_us}]
    return Prediction(times, parts, bytes_moved, flops, tflops, why)


def prepare(
    kernel: LogitsKernel,
    device: int,
    num_sms: int,
    layout: LogitsLayout,
    q_strides: tuple[int, int],
    keys: Keys,
    names: tuple[str, ...],
    pdl: bool,
) -> _launcher.Launch:
    """Everything about a launch except tensor addresses; `q_strides` in bytes, per row and per head.

    Raises:
        ValueError: a size or stride that the launch cannot express.
        jit.CompileError: the kernel does not compile.
        RuntimeError: the driver refuses the kernel.
    """
    tiles = layout.blocks * ceil_div(layout.keys, LOGITS_TILE)
    if tiles > _MOST_TILES:
        raise ValueError(
            f"{layout.rows} queries and {layout.keys} keys are {tiles} tiles, and a launch takes {_MOST_TILES} at "
            "most: split the queries over several calls"
        )
    places = PAGED_PLACES if kernel.paged else PLACES
    maps = tensor_maps(kernel, layout, q_strides, keys)
    maps = tuple(map_.entry(params.LOGITS.offsets[name], places[name].tensor, skip) for name, map_, skip in maps)
    return cast.prepare_launch(kernel, num_sms, device, layout._asdict(), names, places, maps=maps, pdl=pdl)


def tensor_maps(
    kernel: LogitsKernel, layout: LogitsLayout, q_strides: tuple[int, int], keys: Keys
) -> list[tuple[str, MapLayout, int]]:
    """(field, layout, bytes to skip in its tensor) for each map. Out-of-bounds elements are zero-filled."""
    row, head = q_strides
    span = kernel.head_dim
    page_stride = round_up(keys.page_stride or keys.page_keys * max(keys.stride, SCALE_BYTES), 16)
    queries = MapLayout(
        "uint8", (span, layout.heads, layout.rows), (head, row), (span, kernel.heads, kernel.queries), span, 128
    )
    of_keys = MapLayout(
        "uint8", (span, keys.page_keys, keys.pages), (keys.stride, page_stride), (span, LOGITS_TILE, 1), span, 128
    )
    scales = MapLayout("float32", (keys.page_keys, keys.pages), (page_stride,), (LOGITS_TILE, 1), 0, 128)
    return [("q_map", queries, 0), ("keys_map", of_keys, 0), ("scales_map", scales, keys.scales_begin)]
