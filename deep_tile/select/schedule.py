"""Who works on which tile: the host's half of include/deep_tile/raster.cuh. Pure functions of sizes; no GPU.

Called by plan.py for the numbers of a launch, by cost.py for the waves that they make.
"""

from deep_tile.config import GemmConfig, ceil_div
from deep_tile.problem import GemmProblem
from deep_tile.select.hardware import H200


def cluster_tiles(config: GemmConfig, problem: GemmProblem) -> int:
    """Units of work: one tile for each block of a cluster."""
    return tile_rows(config, problem) * ceil_div(problem.n, config.block_n * config.cluster_n)


def tile_rows(config: GemmConfig, problem: GemmProblem) -> int:
    """Rows of cluster tiles: of groups, whose own rows the host does not know, the most that there can be."""
    if config.by_k:
        return problem.groups.count * ceil_div(problem.m, config.block_m * config.cluster_m)
    if problem.groups is None:
        return ceil_div(problem.m, config.block_m * config.cluster_m)
    if problem.groups.layout == "counts":
        return problem.groups.count * ceil_div(problem.m, config.block_m)
    return problem.m // config.block_m + min(problem.groups.count, problem.m)


def cluster_slots(config: GemmConfig, num_sms: int) -> int:
    """Clusters that run at the same time. Clusters of four and more leave some SMs idle, 12 of an H200's 132."""
    usable = num_sms if config.cluster <= 2 else num_sms * 10 // 11
    return max(1, usable // config.cluster)


def blocks_per_tile(config: GemmConfig, k: int) -> int:
    """Scale blocks of K that the busiest thread block of a cluster works through for one tile."""
    return ceil_div(ceil_div(k, config.block_k), config.split_k) * config.scale_blocks


def grid_size(config: GemmConfig, problem: GemmProblem) -> int:
    """Fewest thread blocks that keep the number of waves: they share L2 and power better than a full, ragged grid.

    Gains 1 %, and 5 % at n = 2112 (H200, 2026-11-21). Each has a tile, which the kernel counts on, but for groups': of
    those there may be fewer than expected.
    """
    slots, tiles = cluster_slots(config, problem.num_sms), cluster_tiles(config, problem)
    if problem.groups is not None:
        return min(slots, tiles) * config.cluster
    return ceil_div(tiles, ceil_div(tiles, slots)) * config.cluster


_NARROW = 144
"""Columns of the widest tile that asks more of L2 than of HBM, whatever the size of `b`."""


def raster_rows(config: GemmConfig, problem: GemmProblem) -> int:
    """Rows of tiles in a group of the raster, a power of two. Tiles that run together are of a group, column by column.

    A group reads all of `b`: where that does not stay in L2 meanwhile, groups of 16 rows take 0.5 % less than groups of
    8. Narrow tiles, and tiles of 256 rows, then wait for L2 instead: 128x128 takes 7 % more in groups of 16 on an H100,
    up to 18 %, 1 % on an H200; 256x128 takes 2 % less in groups of 4 than of 8 on both. Clusters along N take up to 6 %
    less in groups of 16 (27 shapes each, 2026-11-25). Groups along K were not tried.
    """
    stays = problem.n * problem.k * problem.product.b.bytes <= H200.l2_bytes // 2
    if problem.groups is not None:
        return 8 if stays else 16
    if config.block_m == 256:
        return 4
    if config.cluster_n == 2:
        return 16
    return 8 if stays or config.block_n <= _NARROW else 16


def last_rows_reciprocal(config: GemmConfig, m: int, group_rows: int) -> int:
    """2^31 over the rows of cluster tiles in the raster's last group, rounded up: the kernel divides by them with it.

    Args:
        group_rows: rows of tiles in the others, `raster_rows`.
    """
    rows = ceil_div(m, config.block_m * config.cluster_m)
    group_rows //= config.cluster_m
    return ceil_div(1 << 31, rows % group_rows or group_rows)


def columns_begun(config: GemmConfig, problem: GemmProblem) -> int:
    """Columns of tiles that a thread block loads `b` for, at most, where `b` then stays; 0 elsewhere.

    As ColumnScheduler of include/deep_tile/raster.cuh hands them out: whole columns, then a share of the others.
    """
    if not config.resident_b:
        return 0
    rows, columns = ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n)
    blocks = grid_size(config, problem)
    whole, shared = divmod(columns, blocks)
    share = ceil_div(shared * rows, blocks)
    return whole + (share > 0) * (1 + ceil_div(share - 1, rows))


def busiest(config: GemmConfig, problem: GemmProblem) -> tuple[int, float]:
    """Tiles of the cluster that has the most, and how much of that all have in the mean."""
    tiles, slots = cluster_tiles(config, problem), cluster_slots(config, problem.num_sms)
    most = ceil_div(tiles, slots)
    return most, tiles / (slots * most)
