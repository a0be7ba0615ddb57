"""The default configs: tables of tiles, each with as deep a ring as fits.

No GPU, no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from deep_tile.config import MMA_M, PAIRED_TILES, REGISTER_ROWS, SMEM_LIMIT_BYTES, GemmConfig
from deep_tile.kinds import EVERY_KIND, QUANTIZED, RESULTS, Kind
from deep_tile.walls import stages_max

CLUSTERS = ((1, 1), (2, 1), (1, 2))
_CLUSTER_FIELDS = "cluster_m", "cluster_n", "split_k"
_ALONE, _PAIRS_ALONG_M = CLUSTERS[:1], CLUSTERS[:2]
_MAX_STAGES = 24
_MOST_WEIGHT_ROWS = 1024

_DECODE_TILES = (
    *((32, 2, 1), (32, 2, 2), (48, 2, 1), (64, 1, 1), (64, 2, 1), (64, 1, 2), (64, 2, 2), (64, 2, 4)),
    *((96, 2, 1), (112, 1, 1), (128, 1, 1), (128, 2, 4), (192, 1, 1)),
)
"""(block_n, scale_blocks, split_k) for 64-row tiles. Several scale blocks per stage hide a short WGMMA chain's latency;
single-block stages arrive sooner. Split K spreads few wide tiles over all SMs and reads less of `a` than many narrow
tiles."""

_TILES = {
    **{(128, 64): ((1, 1), (1, 2)), (128, 96): ((1, 1), (1, 2)), (128, 112): _ALONE, (128, 144): _ALONE},
    **dict.fromkeys(((128, 128), (128, 160), (128, 176), (128, 192), (128, 224), (128, 256)), _PAIRS_ALONG_M),
    (256, 128): ((2, 1),),
}
"""Clusters by (block_m, block_n). Clusters along n share `a`, which pays if rows start at 16 modulo 32 bytes. Over 499
measured problems the best among these, split and decode tiles takes 1.0001 times the best among 61, at most 1.006 (H100
and H200, 2026-11-25)."""

_SPLIT_TILES = ((128, 64, 2), (128, 96, 2), (128, 128, 2), (128, 192, 2))
"""(block_m, block_n, split_k)."""

_RESIDENT_TILES = ((128, 128, 5), (128, 192, 4))
"""(block_m, block_n, b_stages) for tiles with resident `b`: the wider, the shorter K must be. 128x256
with three K blocks was never the fastest (H200, 2026-11-21)."""

_DECODE_TILES_OF_KINDS = (
    *((32, 2, 1), (32, 2, 2), (64, 1, 1), (64, 2, 1), (64, 2, 2), (64, 2, 4), (128, 1, 1), (128, 1, 2), (256, 1, 1)),
)
_TILES_OF_KINDS = {
    **{(128, 64): _ALONE, (128, 96): _ALONE, (128, 128): CLUSTERS, (128, 160): _ALONE, (128, 192): CLUSTERS},
    **{(128, 256): _PAIRS_ALONG_M, (256, 128): CLUSTERS},
}
_SPLIT_TILES_OF_KINDS = ((128, 64, 2), (128, 128, 2))
"""Like `_SPLIT_TILES`, for kinds other than FP8 with 16-bit results, from their own searches. With a scale per column,
128x128 is left out: NVRTC 13.2 and 13.5 spill a register. It took 5 and 7 % less time at two of 19 shapes, more at
others (H200, 2026-11-24)."""

_TILES_OF_CODES = (
    *((32, 32, 4, 2), (32, 64, 2, 2), (32, 64, 2, 4), (32, 64, 4, 1), (32, 64, 4, 2), (32, 128, 2, 1)),
    *((64, 32, 2, 1), (64, 32, 2, 2), (64, 64, 1, 1), (64, 64, 2, 1), (64, 64, 2, 2), (64, 64, 2, 4)),
    *((64, 96, 2, 1), (64, 96, 2, 2), (64, 112, 2, 1), (64, 128, 2, 1), (64, 128, 2, 2)),
    *((128, 64, 2, 1), (128, 64, 2, 2), (128, 128, 1, 1), (128, 128, 1, 2)),
    *((256, 128, 1, 2), (256, 128, 1, 1), (256, 112, 1, 1), (256, 96, 1, 1), (256, 96, 1, 2), (256, 64, 1, 2)),
    *((128, 192, 1, 1), (128, 192, 1, 2), (128, 96, 1, 2)),
)
"""Tiles for packed weights, as `packed_configs` takes them. With 256 to 4,096 rows the best of these and unpacking
takes 1.001 times the best of 23 tiles and unpacking, at most 1.04; INT4 1.011, at most 1.11. Without the last seven
1.014 and 1.049, at most 1.20 and 1.35 (H100, 2026-11-27). 64x96 and 64x112 fill SMs that 64 and 128 columns leave
idle: INT4 takes 6 % less with 16 rows (six weights, up to 15 %) and 2 % less with 96 to 512 (19 products, up to 13 %),
MXFP4 1 % less with 16 (13 weights, up to 5 %) and no less above (H100, 2026-11-27). Tiles of 32 rows are for up to 32
rows; the best of these six takes 1.001 times the best of 15 (twelve weights, H100, 2026-11-27)."""

_TILES_IN_CHAINS = (
    *(tile for tile in _TILES_OF_CODES if tile[0] == REGISTER_ROWS),
    *((64, 64, 2, 2), (64, 64, 4, 1), (64, 64, 4, 2), (64, 128, 2, 1)),
    *((128, 64, 1, 1), (128, 64, 1, 2), (128, 128, 1, 1), (128, 128, 1, 2), (256, 64, 1, 1), (256, 64, 1, 2)),
)
"""The same for integers in groups of 32, whose WGMMA chains have accumulators of their own. Tiles of 64 rows come from
registers, too: with 33 to 64 rows they take 15 to 21 % less than two of 32 for big weights and groups (H100,
2026-11-27). 64x64 with swapped operands was never the fastest."""

_PACKED_TILES = {1: _TILES_OF_CODES, 4: _TILES_IN_CHAINS}
"""By WGMMA chains per K block."""

_ROOMY_WIDTHS = (32, 64, 128)
"""Columns of packed weights' tiles that leave math-warp stores and GELUs their registers and code."""

_SUMMED_TILES = dict.fromkeys(((128, 176), (128, 224)), _PAIRS_ALONG_M)
"""More tiles for kinds without promotion, whose main loop needs no copies per scale alignment. With the second, BF16
takes 1.6 % less (up to 9 %) at m from 129 to 1024, and with both 0.8 % less above. 256x160 and 256x192 would gain 0.1 %
more (H100, 70 shapes, 2026-11-24)."""

_DECODE_TILES_ALONG_ROWS = (
    *((32, 2, 1), (64, 1, 1), (64, 2, 1), (64, 2, 2), (64, 2, 4), (128, 1, 1), (128, 2, 1), (128, 1, 2), (128, 1, 4)),
    *((192, 1, 1), (192, 1, 2), (256, 1, 1)),
)
_TILES_ALONG_ROWS = {
    **{(128, 64): _ALONE, (128, 128): CLUSTERS, (128, 192): CLUSTERS, (128, 224): _PAIRS_ALONG_M},
    **{(128, 256): _PAIRS_ALONG_M, (256, 128): CLUSTERS, (256, 160): _ALONE},
}
_SPLIT_TILES_ALONG_ROWS = ((128, 64, 2), (128, 128, 2), (128, 128, 4), (128, 192, 2))
"""Like `_SPLIT_TILES`, for M- and N-major operands: over 150 products "nn" and "tn" the best among these takes 1.0002
times the best among 47, at most 1.02 (H100, 2026-11-26)."""

_SPLIT_TILES_OF_16_BITS = ((128, 96, 2), (128, 128, 4))
"""More for 16-bit operands along k: where few tiles have a long K they take up to 10 and 32 % less than the best other
(H100, 215 products, 2026-11-27)."""

_TRANSPOSED_TILES = {(256, 160): _ALONE, (256, 144): _ALONE} | dict.fromkeys(((128, 192), (128, 160)), CLUSTERS[1:2])
_TRANSPOSED_OF_ROWS = _TRANSPOSED_TILES | {(128, 160): _PAIRS_ALONG_M, (128, 224): CLUSTERS[1:2]}
_TRANSPOSED_SPLIT = ((128, 192, 4), (256, 128, 4))
_TRANSPOSED = {
    "nt": (_TRANSPOSED_OF_ROWS, ((128, 160, 2), *_TRANSPOSED_SPLIT)),
    "nn": (_TRANSPOSED_OF_ROWS, ((128, 160, 2), *_TRANSPOSED_SPLIT)),
    "tn": (_TRANSPOSED_TILES, _TRANSPOSED_SPLIT),
}
"""Clusters of transposed tiles, of rows of `b` times rows of `a`, and (block_m, block_n, split_k), by layout. Boxes of
an M-major `a` have 64 rows: 160 take those of 192, and 224 lost 8 and 21 % at two products "tn". K in four parts pays
where few tiles have a long K and wait for L2: up to 30 %. The table's figures are in docs/experiments.md (H100,
2026-11-27)."""

_CLUSTERS_OF_16_BITS = {(128, 128): ((2, 2), (2, 1, 2), (1, 2, 2)), (128, 160): ((2, 2),), (128, 192): ((2, 1, 2),)}
_TRANSPOSED_CLUSTERS = {
    **{(128, 64): ((1, 2, 4),), (128, 96): ((1, 2, 2),), (128, 160): ((2, 2), (2, 1, 2))},
    **{(128, 192): ((4, 1), (2, 1, 2), (1, 2, 2)), (256, 144): ((1, 2), (2, 2)), (256, 160): ((1, 2), (2, 4))},
}
"""More for 16-bit operands of every layout: clusters of four and eight, and clusters that split K as well, (cluster_m,
cluster_n, split_k). Few tiles with a long K wait for L2, most where rows start at 16 modulo 32 bytes: over 306 products
the best of all takes 2.0 % less with these, up to 31 % (H100, 2026-11-27)."""

_MOST_COPIED = 600
"""Most accumulators x promotions over the main loop's copies beside which an activation's code fits."""

_MOST_BESIDE_SCALES = 96
"""Most accumulators beside which per-row scales leave an epilogue enough registers. A 256-row tile has half as many
scales as a 256-column one: with 16-bit results a bias fits."""


@lru_cache(maxsize=512)
def deepest_config(block_m: int, block_n: int, tma_store: bool = True, **options: int | bool | str) -> GemmConfig:
    """The tile with as many stages as fit beside all its output boxes, or beside fewer boxes if less than four would
    remain, or less than three that hold several scale blocks. Raises ValueError for a tile that is always illegal."""
    smallest = GemmConfig(block_m, block_n, 2, store_buffers=1, tma_store=tma_store, **options)
    return _deepest(smallest, smallest.boxes, _most_stages(smallest), SMEM_LIMIT_BYTES)


def _most_stages(config: GemmConfig) -> int:
    """Few for a packed weight from registers, which is as fast as HBM: if more is requested, each stage arrives later.
    With 7 instead of 4 stages of 128 columns 28672x8192 takes 5 % longer, with 11 instead of 5 of 64 columns 4096x7168
    19 % (MXFP4, 16 rows; H100, 2026-11-27)."""
    if not config.from_registers:
        return _MAX_STAGES
    return min(5, _MOST_WEIGHT_ROWS // (config.scale_blocks * config.block_n))


def within(config: GemmConfig, smem_bytes: int) -> GemmConfig:
    """The config, with fewer stages and output boxes where shared memory has no room for its own. If not even two
    stages and one box fit, the config has these and does not fit."""
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
    """Every config the selector can choose, for arguments as in `GemmConfig`: with a bias or an activation, the plain
    ones that also support these."""
    if (bias, activation) != ("none", "none"):
        plain = default_configs(tma_store, kind, output, accumulate, layout=layout)
        return tuple(config for one in plain if (config := finished(one, bias, activation)))
    output = output or EVERY_KIND[kind].output
    if output == QUANTIZED:
        return tuple(made for one in default_configs(tma_store, kind) if (made := quantized(one)))
    if EVERY_KIND[kind].packing:
        tiles = [
            tile
            for tile in _PACKED_TILES[EVERY_KIND[kind].packing.chains]
            if tma_store or _has_room(tile[0], tile[1], tile[3])
        ]
        if EVERY_KIND[kind].scaling == "row_blocks":  # this tile would exceed the code that a launch prefetches
            tiles = [tile for tile in tiles if tile != (64, 64, 2, 4)]
        return packed_configs(tiles, tma_store=tma_store, kind=kind, output=output, accumulate=accumulate)
    of_16_bits = RESULTS[output].bytes == RESULTS[EVERY_KIND[kind].output].bytes
    if EVERY_KIND[kind].family == "fp8" and layout == "nt" and of_16_bits and not accumulate:
        return _fp8_configs(tma_store, kind, output)
    return _configs_of_kind(tma_store=tma_store, kind=kind, output=output, accumulate=accumulate, layout=layout)


def _has_room(block_m: int, block_n: int, split_k: int) -> bool:
    """Whether a packed weight's tile has room for math-warp stores: registers, and code that a launch prefetches."""
    return block_m <= 128 and block_n in _ROOMY_WIDTHS and split_k < 4


def finished(config: GemmConfig, bias: str, activation: str) -> GemmConfig | None:
    """The config with an epilogue; None if that is illegal or its code is too long.

    Code must stay below 66 KB, which a launch loads without extra time. An epilogue rules out paired K blocks. An
    activation rules out main loops with many copies. Exact GELU (14 instructions per sum) rules out 256-row tiles; if
    quantised, so does tanh GELU after a bias. Quantised 256-column tiles rule out both GELUs, and SiLU after a bias.
    Registers rule out: an activation on 64x256, and on split tiles of two chunks; GELUs on some tiles of packed weights
    (`_lacks_registers`); with per-row scales, an epilogue on promoted two-chunk tiles (exact GELU also on 128x192) and
    on the widest tiles, which also hold scales. Output boxes are fewer where `out` has fewer columns.
    """
    if (bias, activation) == ("none", "none"):
        return config
    if _is_long(config, bias, activation) or _is_crowded(config, activation):
        return None
    return _in_fewer_boxes(config, bias=bias, activation=activation)


def _is_long(config: GemmConfig, bias: str, activation: str) -> bool:
    """Whether the kernel's code would be too long with this epilogue."""
    copies = config.column_shifts * config.chunks * config.accumulator_registers
    behind_bias = activation if bias != "none" else None
    if config.quantizes and config.block_n == 256 and (activation in ("gelu", "gelu_tanh") or behind_bias == "silu"):
        return True
    if config.block_m == 256 and (activation == "gelu" or (config.quantizes and behind_bias == "gelu_tanh")):
        return True
    return config.pairs or (activation != "none" and copies > _MOST_COPIED)


def _is_crowded(config: GemmConfig, activation: str) -> bool:
    """Whether this epilogue leaves too few registers."""
    if activation != "none" and ((config.block_m, config.block_n) == (64, 256) or (config.split_k > 1 < config.chunks)):
        return True
    if config.is_packed and activation.startswith("gelu") and _lacks_registers(config):
        return True
    if not config.row_scales:
        return False
    if config.product.promotes:
        return config.chunks > 1 or (activation == "gelu" and config.accumulator_registers >= _MOST_BESIDE_SCALES)
    wide = config.accumulator_registers > _MOST_BESIDE_SCALES
    return wide and not (config.block_m == 256 and config.out_bytes == 2 and activation == "none")


def _lacks_registers(config: GemmConfig) -> bool:
    """Whether a packed weight's tile has too few registers for a GELU. Without split K 256x128 spills, and, beside
    tables, NVRTC 13.2 and 13.5 let warps of 128x128 diverge."""
    crowded = config.block_m == 256 or (config.block_m == 128 and not config.b_integers)
    return config.block_n not in _ROOMY_WIDTHS or (crowded and config.block_n == 128 and config.split_k == 1)


def quantized(config: GemmConfig) -> GemmConfig | None:
    """The config with its result cast to FP8; None if no such config is legal."""
    return _in_fewer_boxes(config, output=QUANTIZED)


def _in_fewer_boxes(config: GemmConfig, **epilogue: str) -> GemmConfig | None:
    for store_buffers in range(config.store_buffers, 0, -1):
        try:
            made = replace(config, **epilogue, store_buffers=store_buffers)
        except ValueError:
            continue
        if store_buffers <= max(made.boxes, 2):
            return made
    return None


def _configs_of_kind(**of_kind: bool | str) -> tuple[GemmConfig, ...]:
    """For kinds other than FP8 with 16-bit results: tiles measured with FP8, with mechanisms that every kind has."""
    kind, layout = EVERY_KIND[of_kind["kind"]], of_kind["layout"]
    more = _of_16_bits(of_kind) if kind.a.bytes == 2 and layout in _TRANSPOSED else []
    if layout != "nt":
        return (*_tiled(_DECODE_TILES_ALONG_ROWS, _TILES_ALONG_ROWS, _SPLIT_TILES_ALONG_ROWS, of_kind), *more)
    tiles = _TILES_OF_KINDS if kind.promotes else _TILES_OF_KINDS | _SUMMED_TILES
    splits = [split for split in _SPLIT_TILES_OF_KINDS if split[1] < 128 or kind.scaling != "row_blocks"]
    more_splits = _SPLIT_TILES_OF_16_BITS if kind.a.bytes == 2 else ()
    return (*_tiled(_DECODE_TILES_OF_KINDS, tiles, (*splits, *more_splits), of_kind), *more)


def _of_16_bits(of_kind: Mapping[str, bool | str]) -> list[GemmConfig]:
    """Larger clusters, and transposed tiles where the result may be transposed."""
    clusters = _tiled((), _CLUSTERS_OF_16_BITS, (), of_kind)
    tiles, splits = _TRANSPOSED[of_kind["layout"]]
    transposed = {**of_kind, "transposed": True}
    try:
        return clusters + _tiled((), tiles, splits, transposed) + _tiled((), _TRANSPOSED_CLUSTERS, (), transposed)
    except ValueError:
        return clusters


def packed_configs(tiles: Iterable[tuple[int, int, int, int]], **options: bool | str) -> tuple[GemmConfig, ...]:
    """Configs for packed weights: tiles are (block_m, block_n, scale_blocks, split_k)."""
    return tuple(
        deepest_config(
            *(block_m, block_n),
            scale_blocks=blocks,
            split_k=split_k,
            b_stages=_slots(block_m, EVERY_KIND[options["kind"]]),
            **options,
        )
        for block_m, block_n, blocks, split_k in tiles
    )


def _slots(block_m: int, kind: Kind) -> int:
    """Slots for converted stages. Tiles from registers have none: those of 32 rows, and of integers in groups, whose
    promotion gains most by it, of 64."""
    return 0 if block_m <= (REGISTER_ROWS if kind.packing.chains == 1 else MMA_M) else 3


def _fp8_configs(tma_store: bool, kind: str, output: str) -> tuple[GemmConfig, ...]:
    stored = {"tma_store": tma_store, "kind": kind, "output": output}
    paired = [deepest_config(128, block_n, pairs=True, **stored) for block_n in PAIRED_TILES]
    resident = [deepest_config(*tile, b_stages=b_stages, **stored) for *tile, b_stages in _RESIDENT_TILES]
    return (*_tiled(_DECODE_TILES, _TILES, _SPLIT_TILES, stored), *paired, *resident)


def _tiled(
    decode: Iterable[tuple[int, int, int]],
    tiles: Mapping[tuple[int, int], Iterable[tuple[int, int]]],
    splits: Iterable[tuple[int, int, int]],
    options: Mapping[str, bool | str],
) -> list[GemmConfig]:
    """Configs from tables like the above."""
    return [
        *(deepest_config(64, n, scale_blocks=blocks, split_k=split_k, **options) for n, blocks, split_k in decode),
        *(
            deepest_config(*tile, **dict(zip(_CLUSTER_FIELDS, cluster, strict=False)), **options)
            for tile, clusters in tiles.items()
            for cluster in clusters
        ),
        *(deepest_config(*tile, split_k=split_k, **options) for *tile, split_k in splits),
    ]
