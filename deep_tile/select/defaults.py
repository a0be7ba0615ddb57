"""The configs that a problem's kernel is chosen from: tables of tiles, each with as deep a ring as fits.

Called by choose.py, by the commands that compile or measure every kernel, and by the tests. No GPU, no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from deep_tile.config import PAIRED_TILES, SMEM_LIMIT_BYTES, GemmConfig
from deep_tile.kinds import EVERY_KIND, QUANTIZED, RESULTS
from deep_tile.walls import stages_max

CLUSTERS = ((1, 1), (2, 1), (1, 2))
_ALONE, _PAIRS_ALONG_M = CLUSTERS[:1], CLUSTERS[:2]
_MAX_STAGES = 24

_DECODE_TILES = (
    *((32, 2, 1), (32, 2, 2), (48, 2, 1), (64, 1, 1), (64, 2, 1), (64, 1, 2), (64, 2, 2), (64, 2, 4)),
    *((96, 2, 1), (112, 1, 1), (128, 1, 1), (128, 2, 4), (192, 1, 1)),
)
"""(block_n, scale_blocks, split_k) of 64-row tiles. Several scale blocks per stage hide a short WGMMA chain's latency,
stages of one arrive sooner; split K spreads few, wide tiles over all SMs, which read less of `a` than many narrow."""

_TILES = {
    **{(128, 64): ((1, 1), (1, 2)), (128, 96): ((1, 1), (1, 2)), (128, 112): _ALONE, (128, 144): _ALONE},
    **dict.fromkeys(((128, 128), (128, 160), (128, 176), (128, 192), (128, 224), (128, 256)), _PAIRS_ALONG_M),
    (256, 128): ((2, 1),),
}
"""Clusters by (block_m, block_n). Clusters along n share `a`, which pays where rows begin at 16 modulo 32 bytes. Over
499 measured problems the best of these, split and decode tiles takes 1.0001 of the best of 61, at most 1.006 (H100 and
H200, 2026-11-25)."""

_SPLIT_TILES = ((64, 2), (96, 2), (128, 2), (192, 2))
"""(block_n, split_k) of 128-row tiles."""

_RESIDENT_TILES = ((128, 128, 5), (128, 192, 4))
"""(block_m, block_n, b_stages) of tiles whose `b` stays in shared memory: the wider, the shorter K must be. 128x256
with three K blocks was never the fastest (H200, 2026-11-21)."""

_DECODE_TILES_OF_KINDS = (
    *((32, 2, 1), (32, 2, 2), (64, 1, 1), (64, 2, 1), (64, 2, 2), (64, 2, 4), (128, 1, 1), (128, 1, 2), (256, 1, 1)),
)
_TILES_OF_KINDS = {
    **{(128, 64): _ALONE, (128, 96): _ALONE, (128, 128): CLUSTERS, (128, 160): _ALONE, (128, 192): CLUSTERS},
    **{(128, 256): _PAIRS_ALONG_M, (256, 128): CLUSTERS},
}
_SPLIT_TILES_OF_KINDS = ((64, 2), (128, 2))
"""The same of other kinds than FP8 with results of 16 bits, by their own searches. With a scale for each column 128x128
is left out: NVRTC 13.2 and 13.5 spill a register. It took 5 and 7 % less at two of 19 shapes, more at others (H200,
2026-11-24)."""

_PACKED_TILES = (
    *((64, 32, 2, 1), (64, 32, 2, 2), (64, 64, 1, 1), (64, 64, 2, 1), (64, 64, 2, 2), (64, 64, 2, 4)),
    *((64, 128, 1, 1), (64, 128, 1, 2), (64, 128, 1, 4)),
    *((128, 64, 1, 1), (128, 128, 1, 1), (128, 64, 1, 2), (128, 128, 1, 2), (256, 128, 1, 1)),
)
"""Of packed weights, as `packed_configs` takes them."""

_SUMMED_TILES = dict.fromkeys(((128, 176), (128, 224)), _PAIRS_ALONG_M)
"""More of them for kinds without promotion, whose main loop needs no copies for places of scales. BF16 takes 1.6 % less
at m of 129 to 1024 by the second, up to 9 %, and 0.8 % above by both. 256x160 and 256x192 would gain 0.1 % more (H100,
70 shapes, 2026-11-24)."""

_DECODE_TILES_ALONG_ROWS = (
    *((32, 2, 1), (64, 1, 1), (64, 2, 1), (64, 2, 2), (64, 2, 4), (128, 1, 1), (128, 2, 1), (128, 1, 2), (128, 1, 4)),
    *((192, 1, 1), (192, 1, 2), (256, 1, 1)),
)
_TILES_ALONG_ROWS = {
    **{(128, 64): _ALONE, (128, 128): CLUSTERS, (128, 192): CLUSTERS, (128, 224): _PAIRS_ALONG_M},
    **{(128, 256): _PAIRS_ALONG_M, (256, 128): CLUSTERS, (256, 160): _ALONE},
}
_SPLIT_TILES_ALONG_ROWS = ((64, 2), (128, 2), (128, 4), (192, 2))
"""The same where an operand of 16 bits lies along its rows: the best of these takes 1.0002 of the best of 47 at 150
products "nn" and "tn", 1.02 at worst (H100, 2026-11-26)."""

_MOST_COPIED = 600
"""Accumulators times the promotions of each in the main loop's copies, beside which an activation's code has room."""

_MOST_BESIDE_SCALES = 96
"""Accumulators beside which scales of rows leave a finish enough registers. Of 256 rows a tile has half as many scales
as of 256 columns: a bias has room there, where results have 16 bits."""


@lru_cache(maxsize=512)
def deepest_config(block_m: int, block_n: int, tma_store: bool = True, **options: int | bool | str) -> GemmConfig:
    """The tile with as many stages as fit beside all of its output boxes, or beside fewer where those leave too few.

    Too few are less than four, or less than three that hold several scale blocks.

    Raises:
        ValueError: the tile is illegal with any number of stages.
    """
    smallest = GemmConfig(block_m, block_n, 2, store_buffers=1, tma_store=tma_store, **options)
    return _deepest(smallest, smallest.boxes, _MAX_STAGES, SMEM_LIMIT_BYTES)


def within(config: GemmConfig, smem_bytes: int) -> GemmConfig:
    """The config, with fewer stages and output boxes where shared memory has no room for its own. It may not fit with
    two stages and one box either: then it has these."""
    if config.smem_bytes <= smem_bytes:
        return config
    smallest = replace(config, stages=2, store_buffers=1)
    whole = smem_bytes // 1024 * 1024  # a kernel asks for whole KB
    return _deepest(smallest, config.store_buffers, config.stages, whole)


def _deepest(smallest: GemmConfig, boxes: int, most_stages: int, smem_bytes: int) -> GemmConfig:
    enough = 3 if smallest.scale_blocks > 1 else 4
    for store_buffers in range(boxes, 0, -1):
        fixed_bytes = smallest.fixed_bytes + (store_buffers - 1) * smallest.store_bytes
        stages = min(most_stages, stages_max(smallest.stage_bytes, fixed_bytes, smem_bytes))
        if stages >= enough:
            break
    return replace(smallest, stages=max(2, stages), store_buffers=store_buffers)


@lru_cache(maxsize=1_024)
def default_configs(
    tma_store: bool = True,
    kind: str = "fp8",
    output: str | None = None,
    accumulate: bool = False,
    bias: str = "none",
    activation: str = "none",
    layout: str = "nt",
) -> tuple[GemmConfig, ...]:
    """Every config the selector can choose, for an `out` that TMA can store to or for any other.

    Args:
        kind: of the product, a name in `kinds.EVERY_KIND`.
        output: format of `out`, a name in `kinds.RESULTS`; that of the kind when None.
        accumulate: add to what `out` holds.
        bias, activation: names in `kinds.BIASES` and `kinds.ACTIVATIONS`. Configs are those of sums as they are, where
            these may have both.
        layout: of the operands, a name in `kinds.LAYOUTS`.
    """
    if (bias, activation) != ("none", "none"):
        plain = default_configs(tma_store, kind, output, accumulate, layout=layout)
        return tuple(config for one in plain if (config := finished(one, bias, activation)))
    output = output or EVERY_KIND[kind].output
    if output == QUANTIZED:
        return tuple(made for one in default_configs(tma_store, kind) if (made := quantized(one)))
    if EVERY_KIND[kind].packing:
        tiles = _PACKED_TILES if tma_store else _PACKED_TILES[:-1]  # of which the last has too few registers to store
        return packed_configs(tiles, tma_store=tma_store, kind=kind, output=output, accumulate=accumulate)
    of_16_bits = RESULTS[output].bytes == RESULTS[EVERY_KIND[kind].output].bytes
    if EVERY_KIND[kind].family == "fp8" and layout == "nt" and of_16_bits and not accumulate:
        return _fp8_configs(tma_store, kind, output)
    return _configs_of_kind(tma_store=tma_store, kind=kind, output=output, accumulate=accumulate, layout=layout)


def finished(config: GemmConfig, bias: str, activation: str) -> GemmConfig | None:
    """The config with a finish; None where there is none such, or its kernel is longer than what a launch brings along.

    That is 66 KB, which kernels pass that have code for pairs of K blocks; with an activation, those whose main loop
    has many copies; of exact gelu, of which each sum takes 14 instructions, whose tiles have 256 rows, where they are
    quantised also of gelu by tanh behind a bias; and of 256 columns that are quantised either gelu, and silu behind a
    bias. Tiles of 64x256 leave an activation too few registers, and a finish those whose rows are scaled: tiles of two
    chunks, where they are promoted before, of exact gelu also 128x192 then, and the widest, which hold scales as well.
    Output boxes are fewer where `out` has fewer columns.
    """
    if (bias, activation) == ("none", "none"):
        return config
    if _is_long(config, bias, activation) or _is_crowded(config, activation):
        return None
    for store_buffers in range(config.store_buffers, 0, -1):
        try:
            made = replace(config, bias=bias, activation=activation, store_buffers=store_buffers)
        except ValueError:
            continue
        if store_buffers <= max(made.boxes, 2):
            return made
    return None


def _is_long(config: GemmConfig, bias: str, activation: str) -> bool:
    """Whether a finish leaves no room for the kernel's code."""
    copies = config.column_shifts * config.chunks * config.accumulator_registers
    behind_bias = activation if bias != "none" else None
    if config.quantizes and config.block_n == 256 and (activation in ("gelu", "gelu_tanh") or behind_bias == "silu"):
        return True
    if config.block_m == 256 and (activation == "gelu" or (config.quantizes and behind_bias == "gelu_tanh")):
        return True
    return config.pairs or (activation != "none" and copies > _MOST_COPIED)


def _is_crowded(config: GemmConfig, activation: str) -> bool:
    """Whether a finish leaves too few registers."""
    if activation != "none" and (config.block_m, config.block_n) == (64, 256):
        return True
    if not config.row_scales:
        return False
    if config.product.promotes:
        return config.chunks > 1 or (activation == "gelu" and config.accumulator_registers >= _MOST_BESIDE_SCALES)
    wide = config.accumulator_registers > _MOST_BESIDE_SCALES
    return wide and not (config.block_m == 256 and config.out_bytes == 2 and activation == "none")


def quantized(config: GemmConfig) -> GemmConfig | None:
    """The config with a result that is cast to FP8; None where there is none such."""
    for store_buffers in range(config.store_buffers, 0, -1):
        try:
            made = replace(config, output=QUANTIZED, store_buffers=store_buffers)
        except ValueError:
            continue
        if store_buffers <= max(made.boxes, 2):
            return made
    return None


def _configs_of_kind(**of_kind: bool | str) -> tuple[GemmConfig, ...]:
    """For others than FP8 with results of 16 bits: tiles that FP8 has been measured with, by the mechanisms that every
    kind has."""
    if of_kind["layout"] != "nt":
        return tuple(_tiled(_DECODE_TILES_ALONG_ROWS, _TILES_ALONG_ROWS, _SPLIT_TILES_ALONG_ROWS, of_kind))
    kind = EVERY_KIND[of_kind["kind"]]
    tiles = _TILES_OF_KINDS if kind.promotes else _TILES_OF_KINDS | _SUMMED_TILES
    splits = [split for split in _SPLIT_TILES_OF_KINDS if split[0] < 128 or kind.scaling != "row_blocks"]
    return tuple(_tiled(_DECODE_TILES_OF_KINDS, tiles, splits, of_kind))


def packed_configs(tiles: Iterable[tuple[int, int, int, int]], **options: bool | str) -> tuple[GemmConfig, ...]:
    """Of packed weights: tiles are (block_m, block_n, scale_blocks, split_k)."""
    return tuple(
        deepest_config(block_m, block_n, scale_blocks=blocks, split_k=split_k, b_stages=slots, **options)
        for block_m, block_n, blocks, split_k in tiles
        for slots in [3]
    )


def _fp8_configs(tma_store: bool, kind: str, output: str) -> tuple[GemmConfig, ...]:
    stored = {"tma_store": tma_store, "kind": kind, "output": output}
    paired = [deepest_config(128, block_n, pairs=True, **stored) for block_n in PAIRED_TILES]
    resident = [deepest_config(*tile, b_stages=b_stages, **stored) for *tile, b_stages in _RESIDENT_TILES]
    return (*_tiled(_DECODE_TILES, _TILES, _SPLIT_TILES, stored), *paired, *resident)


def _tiled(
    decode: Iterable[tuple[int, int, int]],
    tiles: Mapping[tuple[int, int], Iterable[tuple[int, int]]],
    splits: Iterable[tuple[int, int]],
    options: Mapping[str, bool | str],
) -> list[GemmConfig]:
    """Configs of tables like those above."""
    return [
        *(deepest_config(64, n, scale_blocks=blocks, split_k=split_k, **options) for n, blocks, split_k in decode),
        *(
            deepest_config(*tile, cluster_m=cluster_m, cluster_n=cluster_n, **options)
            for tile, clusters in tiles.items()
            for cluster_m, cluster_n in clusters
        ),
        *(deepest_config(128, block_n, split_k=split_k, **options) for block_n, split_k in splits),
    ]
