"""Which config a grouped product gets. Pure functions, called by choose.py for grouped problems.

A tile takes as long as in a dense GEMM, whose kernel differs only in the scheduler, or longer: neighbouring tiles
belong to other groups and share fewer operands in L2. BF16's grouped tiles keep times of their own: by those of dense
tiles, fitted with a lower rate from L2, 30 products whose tile changed took 1.027 of the time (H100, 2026-11-27). The
tile count depends on rows that the host does not know: group sizes are assumed to be uneven. A K group has all tiles of
its `out`, each with the group's K blocks.
"""

from dataclasses import replace
from functools import lru_cache
from math import exp

from deep_tile.config import MMA_M, GemmConfig, ceil_div
from deep_tile.kinds import EVERY_KIND, GROUPINGS, RESULTS, Kind
from deep_tile.problem import GemmProblem
from deep_tile.select.cost import calibration, launch_time, tile_times, weighed_loads
from deep_tile.select.defaults import CLUSTERS, deepest_config, packed_configs
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.schedule import blocks_per_tile, cluster_slots

_TILES = ((64, 32, 2), (64, 64, 2), (64, 128, 1), (128, 128, 1), (128, 192, 1), (128, 256, 1))
"""(block_m, block_n, scale_blocks)."""

_TILES_OF_CODES = (
    *((32, 128, 2, 1), (64, 32, 2, 1), (64, 64, 2, 1), (64, 128, 2, 1)),
    *((128, 64, 2, 1), (128, 128, 1, 1), (256, 128, 1, 1)),
)
"""Tiles for packed weights, as `packed_configs` takes them. Narrower ones of 32 rows add K in parts, and results would
depend on the rows of other groups, by which tiles are chosen."""

_PACKED_TILES = {
    1: _TILES_OF_CODES,
    4: ((32, 128, 2, 1), (64, 128, 2, 1), (128, 128, 1, 1)),
}
"""By WGMMA chains per K block, of which integers in groups of 32 have four."""

_K_TILES = ((64, 128), (128, 128), (128, 192), (128, 256), (256, 128))
"""(block_m, block_n) for K groups. Tiles with two math warpgroups exist without clusters and, with TMA stores, as
clusters of two; math warps that store themselves also hold tile positions in registers."""

SPREAD = (0.7, 1.0, 1.3)
"""Group sizes relative to their mean, for nearly even groups, as `tune` draws them."""

_ZIPF = tuple(rank**-1.3 for rank in range(1, 9))
_SIZES = tuple(len(_ZIPF) * size / sum(_ZIPF) * spread for size in _ZIPF for spread in SPREAD)
"""Assumed group sizes relative to the mean. They are uneven, because a tile that just fits even groups into one wave
takes two waves for others. Over 201 draws of 8 to 32 groups, a quarter of them even, the choice over the best kernel
takes 1.030, at worst 1.12, and with `SPREAD` alone 1.049 and 1.37; even draws 1.033 and 1.038 (H100, 2026-11-26)."""

_OVERLAP = 2
"""Exponent p in (compute**p + memory**p)**(1/p): grouped tiles wait for HBM more than dense ones."""

_LAST_WAVE = 0.5
"""How much longer the busiest SM works than the mean, in waves."""


@lru_cache(maxsize=256)
def grouped_configs(
    layout: str,
    tma_store: bool = True,
    accumulate: bool = False,
    kind: str = "fp8",
    output: str | None = None,
    operands: str = "nt",
) -> tuple[GemmConfig, ...]:
    """Every config that a grouped product can be given; `layout` is how groups lie, `operands` how these do.

    K groups are FP8 with 1x128 scales for both operands and an FP32 (by default) or BF16 result; only they may
    `accumulate`.
    """
    if layout == "k_offs":
        options = {"kind": "fp8_1x128", "output": output or "fp32", "grouping": layout, "accumulate": accumulate}
        return tuple(
            deepest_config(*tile, tma_store, cluster_m=cluster_m, cluster_n=cluster_n, **options)
            for tile in _K_TILES
            for cluster_m, cluster_n in _k_clusters(*tile, tma_store, accumulate)
        )
    options = {"kind": kind, "output": output or EVERY_KIND[kind].output, "grouping": layout, "layout": operands}
    if EVERY_KIND[kind].packing:
        of = EVERY_KIND[kind], options["output"], tma_store
        tiles = [tile for tile in _PACKED_TILES[of[0].packing.chains] if not _packed_spills(*tile[:2], *of)]
        return packed_configs(tiles, tma_store=tma_store, **options)
    return tuple(
        deepest_config(block_m, block_n, tma_store, scale_blocks=scale_blocks, **options)
        for block_m, block_n, scale_blocks in _TILES
        if not _spills(block_m, block_n, EVERY_KIND[kind], options["output"], tma_store)
    )


def _spills(block_m: int, block_n: int, kind: Kind, output: str, tma_store: bool) -> bool:
    """Whether a tile lacks registers beside the grouped scheduler. Two do: 128x256 with promoted sums that are then
    scaled, and 128x192 when math warps store block-scaled FP32 results (NVRTC 13.0.88)."""
    late = kind.promotes and kind.row_scales
    wide = kind.block_scales and RESULTS[output].bytes == 4 and not tma_store
    return (late and (block_m, block_n) == (128, 256)) or (wide and (block_m, block_n) == (128, 192))


def _packed_spills(block_m: int, block_n: int, kind: Kind, output: str, tma_store: bool) -> bool:
    """`_spills` for packed weights: tiles above 128x128 lack registers with FP32 results, math-warp stores or column
    scales."""
    crowded = RESULTS[output].bytes == 4 or not tma_store or kind.scaling == "row_blocks"
    return block_m * block_n > 128 * 128 and crowded


def configs_of(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    what = problem.accumulate, problem.kind, problem.output, problem.layout
    return grouped_configs(problem.groups.layout, problem.tma_store, *what)


def _k_clusters(block_m: int, block_n: int, tma_store: bool, accumulate: bool) -> tuple[tuple[int, int], ...]:
    """A tile's clusters for K groups. The widest accumulating tiles in clusters of two along m spill 4 bytes with NVRTC
    13.5.37."""
    if block_m == MMA_M or not tma_store:
        return CLUSTERS[:1]
    widest = block_m * block_n == 128 * 256
    return tuple(cluster for cluster in CLUSTERS if not (accumulate and widest and cluster == (2, 1)))


def all_grouped_configs() -> tuple[GemmConfig, ...]:
    layouts = [layout for layout in GROUPINGS if layout not in ("none", "k_offs")]
    return tuple(
        config for layout in layouts for tma_store in (True, False) for config in grouped_configs(layout, tma_store)
    )


def expected_tiles(rows: int, block_m: int) -> float:
    """Mean tile rows per group, for groups with `rows` rows on average."""
    return sum(ceil_div(max(1, round(rows * size)), block_m) for size in _SIZES) / len(_SIZES)


def active_groups(problem: GemmProblem) -> float:
    """Groups that have rows, as far as the host can tell."""
    groups = problem.groups
    active = groups.count * (1 - exp(-groups.expected_rows))
    if groups.layout == "counts":
        return active
    all_rows = problem.k if groups.layout == "k_offs" else problem.m
    return max(1.0, min(active, all_rows / groups.expected_rows))


def estimate(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> float:
    """Predicted microseconds. With counts, one group may be the only one with rows: the prediction adds that group's
    time beyond its bytes, weighted by the probability that a group is empty.

    With 64x64 instead of 64x128 tiles, counts with one or two rows in all take up to 25 % less, others at most 3 % more
    (seven weights, H100, 2026-11-26).
    """
    likely_us = _active_us(config, problem, hardware, active_groups(problem))
    if problem.grouping != "counts":
        return likely_us
    fastest_us = launch_time(hardware, problem.kind) + _memory_us(problem, hardware, 1)
    none = exp(-problem.groups.expected_rows)
    return likely_us * (_active_us(config, problem, hardware, 1) / fastest_us) ** (none / (1 - none))


def _active_us(config: GemmConfig, problem: GemmProblem, hardware: Hardware, active: float) -> float:
    """Microseconds for so many non-empty groups: tile waves and HBM bytes, which overlap."""
    waves = active * _tiles_of_group(config, problem) / cluster_slots(config, problem.num_sms)
    compute_us = _tile_us(config, problem, hardware) * (waves + _LAST_WAVE if waves > 1 else 1)
    memory_us = _memory_us(problem, hardware, active)
    return launch_time(hardware, problem.kind) + (compute_us**_OVERLAP + memory_us**_OVERLAP) ** (1 / _OVERLAP)


def _memory_us(problem: GemmProblem, hardware: Hardware, active: float) -> float:
    return calibration(problem.kind).memory_us + active * _group_bytes(problem) / hardware.hbm_tbps / 1e6


def _tiles_of_group(config: GemmConfig, problem: GemmProblem) -> float:
    """Cluster tiles in a non-empty group."""
    columns = ceil_div(problem.n, config.block_n * config.cluster_n)
    if config.by_k:
        return ceil_div(problem.m, config.block_m * config.cluster_m) * columns
    return expected_tiles(problem.groups.expected_rows, config.block_m) * columns


def _tile_us(config: GemmConfig, problem: GemmProblem, hardware: Hardware) -> float:
    """Time per tile: K blocks are bound by MMA or by operand loads from L2, which tiles in one K group share like a
    dense GEMM's."""
    times = tile_times(replace(config, grouping="none" if config.by_k else "offs", layout="nt"), hardware)
    if config.by_k:
        return blocks_per_tile(config, problem.groups.expected_rows) * times.block_us + times.tile_us
    loads = weighed_loads(config, problem, most=hardware.l2_multicast_tbps / hardware.l2_tbps)
    loaded_us = loads * hardware.num_sms / hardware.l2_tbps / 1e6
    return blocks_per_tile(config, problem.k) * max(times.block_us, loaded_us) + times.tile_us


def _group_bytes(problem: GemmProblem) -> float:
    """Least HBM bytes per non-empty group: its weight and expected rows; or K-grouped operands and the accumulated
    output."""
    rows = problem.groups.expected_rows
    if problem.groups.layout == "k_offs":
        operands = (problem.m + problem.n) * rows * problem.product.a.bytes
        return operands + problem.m * problem.n * problem.out.bytes * (2 if problem.accumulate else 1)
    weight = problem.n * problem.k * problem.product.b_bytes
    return weight + rows * (problem.k * problem.product.a.bytes + problem.n * problem.out.bytes)


def ranked(
    problem: GemmProblem, hardware: Hardware = H200, own: GemmConfig | None = None
) -> list[tuple[float, GemmConfig]]:
    """Every config that the SMs allow with its predicted time: `own` first if it is among them, then by time."""
    configs = configs_of(problem)
    runnable = (config for config in configs if config.cluster <= problem.num_sms)
    estimated = ((estimate(config, problem, hardware), config) for config in runnable)
    return sorted(estimated, key=lambda pair: (pair[1] != own, pair[0]))
