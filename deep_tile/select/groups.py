"""Which config a grouped product gets. Pure functions, as choose.py, which asks here for problems with groups.

What a tile takes is what the tile of a dense product takes, from whose kernel a grouped one differs in the schedule.
How many tiles there are depends on rows that the host does not know: a group of r rows in the mean is taken for one
whose rows are spread around that.
"""

from dataclasses import replace
from functools import lru_cache
from math import exp

from deep_tile.config import GemmConfig, ceil_div
from deep_tile.kinds import GROUPINGS
from deep_tile.problem import GemmProblem
from deep_tile.select.cost import calibration, launch_time, tile_times
from deep_tile.select.defaults import deepest_config
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.schedule import blocks_per_tile, cluster_slots

_TILES = (
    *((64, 32, 2, False), (64, 64, 2, False), (64, 128, 1, False)),
    *((128, 128, 1, False), (128, 192, 1, False), (128, 256, 1, False), (128, 256, 1, True)),
)
"""(block_m, block_n, scale_blocks, halves)."""


@lru_cache(maxsize=4)
def grouped_configs(layout: str, tma_store: bool = True) -> tuple[GemmConfig, ...]:
    """Every config that a grouped product can be given; `layout` is one of `kinds.GROUPINGS` but "none"."""
    return tuple(
        deepest_config(block_m, block_n, tma_store, scale_blocks=scale_blocks, grouping=layout, halves=halves)
        for block_m, block_n, scale_blocks, halves in _TILES
    )


def all_grouped_configs() -> tuple[GemmConfig, ...]:
    """For all layouts, to store by TMA and to store anywhere."""
    layouts = [layout for layout in GROUPINGS if layout != "none"]
    return tuple(
        config for layout in layouts for tma_store in (True, False) for config in grouped_configs(layout, tma_store)
    )


def expected_tiles(rows: float, block_m: int) -> float:
    """Rows of tiles of a group that has `rows` in the mean: half a tile more than these fill, where they fill one."""
    filled = rows / block_m
    return max(1 - exp(-rows), filled + min(filled, 1) / 2)


def estimate(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> float:
    """Predicted microseconds: waves of tiles and bytes through HBM, which overlap as in dense products (cost.py)."""
    groups, model = problem.groups, calibration(problem.kind)
    times = tile_times(replace(config, grouping="none", halves=False), hardware)
    tiles = groups.count * expected_tiles(groups.expected_rows, config.block_m) * ceil_div(problem.n, config.block_n)
    waves = max(1.0, tiles / cluster_slots(config, problem.num_sms))
    compute_us = (waves // 1 + (waves % 1 > 0)) * (times.block_us * blocks_per_tile(config, problem.k) + times.tile_us)
    memory_us = model.memory_us + _bytes(problem) / hardware.hbm_tbps / 1e6
    overlap = model.overlap
    return launch_time(hardware, problem.kind) + (compute_us**overlap + memory_us**overlap) ** (1 / overlap)


def _bytes(problem: GemmProblem) -> float:
    """Through HBM at least: weights of groups that have rows, and the rows that are expected."""
    groups = problem.groups
    active, rows = groups.count * (1 - exp(-groups.expected_rows)), groups.count * groups.expected_rows
    weights = active * problem.n * problem.k * problem.product.b.bytes
    return weights + rows * (problem.k * problem.product.a.bytes + problem.n * problem.out.bytes)


def ranked(problem: GemmProblem, hardware: Hardware = H200) -> list[tuple[float, GemmConfig]]:
    """Every config with its predicted time, the fastest first."""
    configs = grouped_configs(problem.groups.layout, problem.tma_store)
    return sorted(((estimate(config, problem, hardware), config) for config in configs), key=lambda pair: pair[0])
