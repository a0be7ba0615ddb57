"""Which config a problem gets: candidates -> predicted time -> choice. Pure functions of sizes; no GPU, no torch.

The time model has two terms that overlap: waves of tiles, and bytes through HBM. What a K block and a tile of each
config take was measured and fitted (benchmarks/search.py and calibrate.py); the numbers are in calibration.json.

The choice is the same for all m of one bucket (`bucketed`), so that the configs any m <= max_m can need are found by
trying each bucket once, and a server that compiled them never compiles again.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.hardware import H200, Hardware
from deep_tile.problem import GemmProblem

_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_MAX_STAGES = 24

_DECODE_TILES = (
    *((16, 4, 1), (32, 4, 1), (32, 4, 2), (48, 2, 1), (64, 2, 1), (64, 2, 2), (64, 2, 4), (64, 4, 1)),
    *((96, 2, 1), (128, 2, 1), (128, 2, 2), (128, 2, 4), (128, 2, 8), (192, 1, 1), (256, 1, 1)),
)
"""(block_n, scale_blocks, split_k) of 64-row tiles. Several scale blocks per stage hide a short WGMMA chain's latency;
split K spreads few, wide tiles over all SMs, which read less of `a` than many narrow ones."""

_MULTICAST_TILES = (
    *((128, 64, 1), (128, 96, 1), (128, 128, 1), (128, 128, 2), (128, 144, 1), (128, 160, 1), (128, 192, 1)),
    *((128, 224, 1), (128, 256, 1), (256, 128, 1)),
)
"""(block_m, block_n, scale_blocks) that are built alone and as clusters of two. Widths that share few columns per scale
(176, 208) lost 10 to 30 % per column to their neighbours (H200, 2026-11-21)."""

_SPLIT_TILES = ((64, 1), (128, 1), (192, 1))
"""(block_n, scale_blocks) of 128-row tiles whose K two blocks share."""


def deepest_config(block_m: int, block_n: int, tma_store: bool = True, **options: int) -> GemmConfig:
    """The tile with as many stages as fit beside two output buffers, or beside one where that leaves too few.

    Too few are less than four, or less than three that hold several scale blocks.
    """
    enough = 3 if options.get("scale_blocks", 1) > 1 else 4
    for store_buffers, fewest in ((2, enough), (1, 2)):
        for stages in range(_MAX_STAGES, fewest - 1, -1):
            try:
                return GemmConfig(block_m, block_n, stages, store_buffers=store_buffers, tma_store=tma_store, **options)
            except ValueError:
                continue
    raise ValueError(f"tile {block_m}x{block_n} with {options} fits in no number of stages")


@lru_cache(maxsize=2)
def default_configs(tma_store: bool = True) -> tuple[GemmConfig, ...]:
    """Every config the selector can choose, for an `out` that TMA can store to or for any other."""
    decode = [
        deepest_config(64, block_n, tma_store, scale_blocks=scale_blocks, split_k=split_k)
        for block_n, scale_blocks, split_k in _DECODE_TILES
    ]
    multicast = [
        deepest_config(*tile, tma_store, scale_blocks=scale_blocks, cluster_m=cluster_m, cluster_n=cluster_n)
        for *tile, scale_blocks in _MULTICAST_TILES
        for cluster_m, cluster_n in _CLUSTERS
    ]
    split = [
        deepest_config(128, block_n, tma_store, scale_blocks=scale_blocks, split_k=2)
        for block_n, scale_blocks in _SPLIT_TILES
    ]
    return (*decode, *multicast, *split)


def cluster_tiles(config: GemmConfig, problem: GemmProblem) -> int:
    """Units of work: one tile for each block of a cluster."""
    rows = ceil_div(problem.m, config.block_m * config.cluster_m)
    return rows * ceil_div(problem.n, config.block_n * config.cluster_n)


def cluster_slots(config: GemmConfig, num_sms: int) -> int:
    """Clusters that run at the same time. Clusters of four and more leave some SMs idle, 12 of an H200's 132."""
    usable = num_sms if config.cluster <= 2 else num_sms * 10 // 11
    return max(1, usable // config.cluster)


def blocks_per_tile(config: GemmConfig, k: int) -> int:
    """Scale blocks of K that the busiest thread block of a cluster works through for one tile."""
    return ceil_div(ceil_div(k, config.block_k), config.split_k) * config.scale_blocks


def grid_size(config: GemmConfig, problem: GemmProblem) -> int:
    """Fewest thread blocks that keep the number of waves: they share L2 and power better than a full, ragged grid.

    Gains 1 %, and 5 % at n = 2112 (H200, 2026-11-21).
    """
    tiles = cluster_tiles(config, problem)
    waves = ceil_div(tiles, cluster_slots(config, problem.num_sms))
    return ceil_div(tiles, waves) * config.cluster


class Calibration(NamedTuple):
    """Measured coefficients of the time model, in microseconds.

    Attributes:
        launch_us: what every call costs.
        memory_us: what the bytes cost beside their bandwidth.
        overlap: exponent p of (compute**p + memory**p)**(1/p): 1 adds the two, infinity takes the larger.
        configs: by kernel name, (one K block, the rest of a tile).
        num_sms: of the GPU it was measured on.
        choices: by "MxNxK" of a bucket, the name of a config that was measured faster than the model's choice.
    """

    launch_us: float
    memory_us: float
    overlap: float
    configs: dict[str, tuple[float, float]]
    num_sms: int
    choices: dict[str, str]


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    data = json.loads((Path(__file__).parent / "calibration.json").read_text())
    configs = {name: tuple(coefficients) for name, coefficients in data["configs"].items()}
    return Calibration(data["launch_us"], data["memory_us"], data["overlap"], configs, data["num_sms"], data["choices"])


def tile_times(config: GemmConfig, hardware: Hardware = H200) -> tuple[float, float]:
    """Microseconds of one K block and of the rest of a tile: measured, or typical for a config that was not."""
    measured = calibration().configs.get(config.name.removesuffix("_any"))
    if measured:
        return measured
    flops = 2 * config.block_m * config.block_n * SCALE_BLOCK
    return 1.2 * flops / (hardware.fp8_tflops * 1e6 / hardware.num_sms), 2.0


class Estimate(NamedTuple):
    """Predicted time of one config on one problem.

    Attributes:
        time_us: from launch to the last store.
        compute_us: waves of tiles, as if memory were free.
        memory_us: bytes through HBM, each operand once, as if the tiles were free.
        bound: `compute` or `memory`, whichever is longer.
        waves: tiles that the busiest SM works through.
        utilization: share of the waves' tile slots that have a tile.
    """

    time_us: float
    compute_us: float
    memory_us: float
    bound: str
    waves: int
    utilization: float


def estimate(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> Estimate:
    """Predict a config's time on a problem.

    `launch + (compute**p + memory**p)**(1/p)`, where compute is `waves * (K blocks * block + tile)` and memory is a
    constant and the bytes over the bandwidth.
    """
    model = calibration()
    tiles = cluster_tiles(config, problem)
    slots = cluster_slots(config, problem.num_sms)
    waves = ceil_div(tiles, slots)
    block_us, tile_us = tile_times(config, hardware)
    compute_us = waves * (blocks_per_tile(config, problem.k) * block_us + tile_us)
    bytes_moved = (problem.m + problem.n) * problem.k + 2 * problem.m * problem.n
    memory_us = model.memory_us + bytes_moved / hardware.hbm_tbps / 1e6
    time_us = model.launch_us + (compute_us**model.overlap + memory_us**model.overlap) ** (1 / model.overlap)
    bound = "compute" if compute_us >= memory_us else "memory"
    return Estimate(time_us, compute_us, memory_us, bound, waves, tiles / (waves * slots))


def bucketed(problem: GemmProblem) -> GemmProblem:
    """The problem whose choice this one shares: m rounded up to 8 up to 64, and to 64 above."""
    return problem._replace(m=round_up(problem.m, 8 if problem.m <= 64 else 64))


def candidates(problem: GemmProblem) -> list[tuple[Estimate, GemmConfig]]:
    """Every default config that the problem's SMs can run: the one measured fastest where that is known, then the
    fastest predicted."""
    measured = measured_choice(problem)
    runnable = (c for c in default_configs(problem.tma_store) if c.cluster <= problem.num_sms)
    estimated = ((estimate(c, problem), c) for c in runnable)
    return sorted(estimated, key=lambda pair: (pair[1].name.removesuffix("_any") != measured, pair[0].time_us))


def measured_choice(problem: GemmProblem) -> str | None:
    """Name of the config that was measured faster than the model's choice for this bucket, if there is one."""
    model = calibration()
    if problem.num_sms != model.num_sms:
        return None
    return model.choices.get(f"{problem.m}x{problem.n}x{problem.k}")


@lru_cache(maxsize=65_536)
def choose_bucket(problem: GemmProblem) -> GemmConfig:
    """The config of a whole bucket, which `problem` must be; remembered."""
    return candidates(problem)[0][1]


def choose(problem: GemmProblem) -> GemmConfig:
    """The config for a problem: that of its bucket."""
    return choose_bucket(bucketed(problem))


def configs_for(n: int, k: int, max_m: int, num_sms: int, tma_store: bool = True) -> list[GemmConfig]:
    """Every config that some m in [1, max_m] is given."""
    ends = [*range(8, min(max_m, 64) + 1, 8), *range(128, max_m + 1, 64), max_m]
    chosen = {choose(GemmProblem(m, n, k, num_sms, tma_store)) for m in ends}
    return sorted(chosen, key=lambda config: config.name)
