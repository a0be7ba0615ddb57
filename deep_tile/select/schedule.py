"""Tile scheduling: the host's half of include/deep_tile/raster.cuh. Pure functions on sizes; no GPU."""

from deep_tile.config import GemmConfig, ceil_div
from deep_tile.problem import GemmProblem
from deep_tile.select.hardware import H200


def cluster_tiles(config: GemmConfig, problem: GemmProblem) -> int:
    """Units of work: one tile per block in a cluster."""
    _, columns = config.sides(problem.m, problem.n)
    return tile_rows(config, problem) * ceil_div(columns, config.block_n * config.cluster_n)


def tile_rows(config: GemmConfig, problem: GemmProblem) -> int:
    """Cluster tile rows; for groups, whose sizes the host does not know, the most possible."""
    if config.by_k:
        return problem.groups.count * ceil_div(problem.m, config.block_m * config.cluster_m)
    if problem.groups is None:
        rows, _ = config.sides(problem.m, problem.n)
        return ceil_div(rows, config.block_m * config.cluster_m)
    if problem.groups.layout == "counts":
        return problem.groups.count * ceil_div(problem.m, config.block_m)
    return problem.m // config.block_m + min(problem.groups.count, problem.m)


def cluster_slots(config: GemmConfig, num_sms: int) -> int:
    """Clusters that run at the same time. Clusters of four and more leave some SMs idle: 12 of 132 on an H200."""
    usable = num_sms if config.cluster <= 2 else num_sms * 10 // 11
    return max(1, usable // config.cluster)


def blocks_per_tile(config: GemmConfig, k: int) -> int:
    """K scale blocks per tile for the busiest thread block in a cluster."""
    return ceil_div(ceil_div(k, config.block_k), config.split_k) * config.scale_blocks


def grid_size(config: GemmConfig, problem: GemmProblem) -> int:
    """Fewest thread blocks for the same wave count: they share L2 and power better than a full, ragged grid.

    Gains 1 %, and 5 % at n = 2112 (H200, 2026-11-21). Every block has a tile, which the kernel relies on, except in
    grouped kernels, which may have fewer tiles than expected.
    """
    slots, tiles = cluster_slots(config, problem.num_sms), cluster_tiles(config, problem)
    if problem.groups is not None:
        return min(slots, tiles) * config.cluster
    return ceil_div(tiles, ceil_div(tiles, slots)) * config.cluster


_NARROW = 144
"""Columns of the widest tile that needs more from L2 than from HBM, for any size of `b`."""


def raster_rows(config: GemmConfig, problem: GemmProblem) -> int:
    """Tile rows per raster group, a power of two. Tiles that run together belong to a group, column by column.

    Each group reads all of `b`: if that does not stay in L2, 16-row groups take 0.5 % less time than 8-row groups.
    Narrow tiles and 256-row tiles then wait for L2 instead: in 16-row groups 128x128 takes 7 % more (up to 18 %) on an
    H100 and 1 % more on an H200; 256x128 takes 2 % less in 4-row than in 8-row groups on both. Clusters along N take up
    to 6 % less in 16-row groups (27 shapes each, 2026-11-25). Groups along K were not tried.
    """
    _, columns = config.sides(problem.m, problem.n)
    stays = columns * problem.k * problem.product.b_bytes <= H200.l2_bytes // 2
    if problem.groups is not None:
        return 8 if stays else 16
    if config.block_m == 256:
        return 4
    if config.cluster_n == 2:
        return 16
    return 8 if stays or config.block_n <= _NARROW else 16


def last_rows_reciprocal(config: GemmConfig, m: int, group_rows: int) -> int:
    """2^31 divided by the cluster tile rows in the raster's last group, rounded up; others have `group_rows`."""
    rows = ceil_div(m, config.block_m * config.cluster_m)
    group_rows //= config.cluster_m
    return ceil_div(1 << 31, rows % group_rows or group_rows)


def columns_begun(config: GemmConfig, problem: GemmProblem) -> int:
    """Most tile columns for which a thread block loads a resident `b`; 0 without one.

    Follows ColumnScheduler in include/deep_tile/raster.cuh: whole columns, then a share of the rest.
    """
    if not config.resident_b:
        return 0
    rows, columns = ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n)
    blocks = grid_size(config, problem)
    whole, shared = divmod(columns, blocks)
    share = ceil_div(shared * rows, blocks)
    return whole + (share > 0) * (1 + ceil_div(share - 1, rows))


def busiest(config: GemmConfig, problem: GemmProblem) -> tuple[int, float]:
    """Tiles of the busiest cluster, and the mean as a share of that."""
    tiles, slots = cluster_tiles(config, problem), cluster_slots(config, problem.num_sms)
    most = ceil_div(tiles, slots)
    return most, tiles / (slots * most)
