"""Which config a problem gets: candidates -> predicted time -> choice. Pure functions of sizes; no GPU, no torch.

The time model has two terms that overlap: waves of tiles, and bytes through HBM. What a K block and a tile of each
config take was measured on an H200 and fitted (benchmarks/search.py and calibrate.py); the numbers are in
calibration.json, and for another GPU they are scaled by its tensor rate, clock and bandwidth. roofline.py shows the
same estimates and adds the walls that explain them.

The choice is the same for all m of one bucket (`bucketed`), so that the configs any m <= max_m can need are found by
trying each bucket once, and a server that compiled them never compiles again.
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from deep_tile import tuned
from deep_tile.config import NARROW_N, PAIRED_TILES, SCALE_BLOCK, SMEM_LIMIT_BYTES, GemmConfig, ceil_div, round_up
from deep_tile.hardware import H200, Hardware
from deep_tile.problem import GemmProblem
from deep_tile.walls import product_flops, stages_max

_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_MAX_STAGES = 24

_DECODE_TILES = (
    *((16, 4, 1), (32, 2, 1), (32, 4, 1), (32, 2, 2), (32, 4, 2), (48, 1, 1), (48, 2, 1)),
    *((64, 1, 1), (64, 2, 1), (64, 4, 1), (64, 1, 2), (64, 2, 2), (64, 1, 4), (64, 2, 4)),
    *((96, 2, 1), (112, 1, 1), (128, 1, 1), (128, 1, 2), (128, 2, 4), (128, 2, 8), (192, 1, 1), (256, 1, 1)),
)
"""(block_n, scale_blocks, split_k) of 64-row tiles. Several scale blocks per stage hide a short WGMMA chain's latency,
stages of one arrive sooner; split K spreads few, wide tiles over all SMs, which read less of `a` than many narrow."""

_MULTICAST_TILES = (
    *((128, 64), (128, 96), (128, 128), (128, 144), (128, 160), (128, 176), (128, 192), (128, 224)),
    *((128, 256), (256, 128)),
)
"""(block_m, block_n) that are built alone and as clusters of two."""

_SINGLE_TILES = ((128, 112),)
"""(block_m, block_n) that lost as clusters of two on every shape measured."""

_SPLIT_TILES = (64, 96, 128, 192)
"""block_n of 128-row tiles whose K two blocks share."""

_NARROWING_TILES = (144, 160, 192)
"""block_n of 128-row tiles that a launch ends with narrow ones of."""

_REPLACED_WAVES = 8
"""Waves of wide tiles, at most, in whose place a launch has narrow ones: nine of 128 columns do for eight of 144."""

_RESIDENT_TILES = ((128, 128, 5), (128, 192, 4))
"""(block_m, block_n, b_stages) of tiles whose `b` stays in shared memory: the wider, the shorter K must be. 128x256
with three K blocks was never the fastest (H200, 2026-11-21)."""


@lru_cache(maxsize=256)
def deepest_config(block_m: int, block_n: int, tma_store: bool = True, **options: int | bool) -> GemmConfig:
    """The tile with as many stages as fit beside all of its output boxes, or beside fewer where those leave too few.

    Too few are less than four, or less than three that hold several scale blocks.

    Raises:
        ValueError: the tile is illegal with any number of stages.
    """
    enough = 3 if options.get("scale_blocks", 1) > 1 else 4
    smallest = GemmConfig(block_m, block_n, 2, store_buffers=1, tma_store=tma_store, **options)
    for store_buffers in range(smallest.boxes, 0, -1):
        fixed_bytes = smallest.fixed_bytes + (store_buffers - 1) * smallest.store_bytes
        stages = min(_MAX_STAGES, stages_max(smallest.stage_bytes, fixed_bytes, SMEM_LIMIT_BYTES))
        if stages >= enough:
            break
    return replace(smallest, stages=stages, store_buffers=store_buffers)


@lru_cache(maxsize=2)
def default_configs(tma_store: bool = True) -> tuple[GemmConfig, ...]:
    """Every config the selector can choose, for an `out` that TMA can store to or for any other."""
    decode = [
        deepest_config(64, block_n, tma_store, scale_blocks=scale_blocks, split_k=split_k)
        for block_n, scale_blocks, split_k in _DECODE_TILES
    ]
    multicast = [
        deepest_config(*tile, tma_store, cluster_m=cluster_m, cluster_n=cluster_n)
        for tile in _MULTICAST_TILES
        for cluster_m, cluster_n in _CLUSTERS
    ]
    single = [deepest_config(*tile, tma_store) for tile in _SINGLE_TILES]
    split = [deepest_config(128, block_n, tma_store, split_k=2) for block_n in _SPLIT_TILES]
    paired = [deepest_config(128, block_n, tma_store, pairs=True) for block_n in PAIRED_TILES]
    narrowing = [deepest_config(128, block_n, tma_store, narrow_n=NARROW_N) for block_n in _NARROWING_TILES]
    resident = [deepest_config(*tile, tma_store, b_stages=b_stages) for *tile, b_stages in _RESIDENT_TILES]
    return (*decode, *multicast, *single, *paired, *narrowing, *split, *resident)


class Tiles(NamedTuple):
    """Cluster tiles, or what a cluster has of them: of the config's own width, and narrow ones."""

    wide: int
    narrow: int

    @property
    def total(self) -> int:
        return sum(self)

    def columns(self, config: GemmConfig) -> int:
        """Columns of `out` that they cover, which is how long they take: narrow tiles within 2 % of that, at equal k
        (H200, 2026-11-22)."""
        return self.wide * config.block_n + self.narrow * config.narrow_n


def cluster_tiles(config: GemmConfig, problem: GemmProblem) -> Tiles:
    """Units of work: one tile for each block of a cluster."""
    return _split_tiles(config, problem, narrow_columns(config, problem))


def _split_tiles(config: GemmConfig, problem: GemmProblem, narrow: int) -> Tiles:
    """Where narrow tiles have `narrow` columns."""
    rows = ceil_div(problem.m, config.block_m * config.cluster_m)
    wide_n = problem.n - narrow * config.narrow_n
    return Tiles(rows * ceil_div(wide_n, config.block_n * config.cluster_n), rows * narrow)


def _busiest(tiles: Tiles, slots: int) -> Tiles:
    """Of the cluster that has the most: they are handed out in turn, the wide ones first."""
    wide = ceil_div(tiles.wide, slots)
    return Tiles(wide, ceil_div(tiles.total, slots) - wide)


@lru_cache(maxsize=65_536)
def narrow_columns(config: GemmConfig, problem: GemmProblem) -> int:
    """Columns of narrow tiles, with which the busiest SM has as little to do as can be: the fewest of those.

    For each number of waves of wide tiles, the fewest that leave no more.
    """
    if not config.narrow_n:
        return 0
    slots, rows = cluster_slots(config, problem.num_sms), ceil_div(problem.m, config.block_m)
    waves = ceil_div(rows * ceil_div(problem.n, config.block_n), slots)

    def fewest(wide_waves: int) -> int:
        return ceil_div(max(0, problem.n - wide_waves * slots // rows * config.block_n), config.narrow_n)

    def most_work(narrow: int) -> int:
        return _busiest(_split_tiles(config, problem, narrow), slots).columns(config)

    columns = (fewest(wide_waves) for wide_waves in range(waves, max(0, waves - _REPLACED_WAVES) - 1, -1))
    return min((narrow for narrow in columns if narrow * config.narrow_n <= problem.n), key=most_work, default=0)


def cluster_slots(config: GemmConfig, num_sms: int) -> int:
    """Clusters that run at the same time. Clusters of four and more leave some SMs idle, 12 of an H200's 132."""
    usable = num_sms if config.cluster <= 2 else num_sms * 10 // 11
    return max(1, usable // config.cluster)


def blocks_per_tile(config: GemmConfig, k: int) -> int:
    """Scale blocks of K that the busiest thread block of a cluster works through for one tile."""
    return ceil_div(ceil_div(k, config.block_k), config.split_k) * config.scale_blocks


def grid_size(config: GemmConfig, problem: GemmProblem) -> int:
    """Fewest thread blocks that keep the number of waves: they share L2 and power better than a full, ragged grid.

    Gains 1 %, and 5 % at n = 2112 (H200, 2026-11-21). Each has a tile, which the kernel counts on.
    """
    slots, tiles = cluster_slots(config, problem.num_sms), cluster_tiles(config, problem)
    fewest = (ceil_div(count, ceil_div(count, slots)) for count in (tiles.wide, tiles.total) if count > 0)
    return max(fewest) * config.cluster


def raster_rows(problem: GemmProblem) -> int:
    """Rows of tiles in a group of the raster, a power of two. Tiles that run together are of a group, column by column.

    In groups of 8 rows products take 0.7 % less than in groups of 16, in the geometric mean of 28. But each group reads
    all of `b`, and where that does not stay in L2 meanwhile, they take 0.6 % more (H200, 2026-11-21).
    """
    return 8 if problem.n * problem.k <= H200.l2_bytes // 2 else 16


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

    As ColumnScheduler of include/deep_tile/scheduler.cuh hands them out: whole columns, then a share of the others.
    """
    if not config.resident_b:
        return 0
    rows, columns = ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n)
    blocks = grid_size(config, problem)
    whole, shared = divmod(columns, blocks)
    share = ceil_div(shared * rows, blocks)
    return whole + (1 + ceil_div(share - 1, rows) if share else 0)


class TileTimes(NamedTuple):
    """What a config takes on one SM, in microseconds.

    Attributes:
        block_us: one K block; of a wide tile, where there are narrow ones, which take what tiles take that are all
            as wide as they are.
        tile_us: the rest of a tile.
        column_us: to begin a column of tiles, where `b` stays in shared memory meanwhile.
    """

    block_us: float
    tile_us: float
    column_us: float = 0.0


class Calibration(NamedTuple):
    """Measured coefficients of the time model, in microseconds.

    Attributes:
        launch_us: what every call costs.
        memory_us: what the bytes cost beside their bandwidth.
        overlap: exponent p of (compute**p + memory**p)**(1/p): 1 adds the two, infinity takes the larger.
        idle_gain: how much faster tiles run, beside idle SMs that leave them power and L2.
        throttle, throttle_us: by which share a long kernel is slowed by the power limit, and the length at which half
            of that is reached.
        configs: by kernel name.
        num_sms: of the GPU it was measured on.
        choices: by "MxNxK" of a bucket, the name of a config that was measured to be better than the model's choice:
            alone, or for m <= 128 alone and in chains of launches.
    """

    launch_us: float
    memory_us: float
    overlap: float
    idle_gain: float
    throttle: float
    throttle_us: float
    configs: dict[str, TileTimes]
    num_sms: int
    choices: dict[str, str]


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    data = json.loads((Path(__file__).parent / "calibration.json").read_text())
    configs = {name: TileTimes(*coefficients) for name, coefficients in data["configs"].items()}
    return Calibration(**{name: data[name] for name in Calibration._fields} | {"configs": configs})


def tile_times(config: GemmConfig, hardware: Hardware = H200) -> TileTimes:
    """Measured on an H200, or typical for a config that was not.

    On another GPU, what the tensor cores need takes as long as their rate says, and the rest scales with the clock.
    """
    tensor_us = block_tensor_us(config, H200)
    on_h200 = calibration().configs.get(config.name.removesuffix("_any"), TileTimes(1.2 * tensor_us, 2.0))
    slower_clock = H200.clock_mhz / hardware.clock_mhz
    block_us = block_tensor_us(config, hardware) + (on_h200.block_us - tensor_us) * slower_clock
    return TileTimes(block_us, on_h200.tile_us * slower_clock, on_h200.column_us * slower_clock)


def block_tensor_us(config: GemmConfig, hardware: Hardware) -> float:
    """What the tensor cores of one SM need for one K block of 128, at their rate under load."""
    return product_flops(config.block_m, config.block_n, SCALE_BLOCK) / (hardware.fp8_tflops / hardware.num_sms) / 1e6


class Estimate(NamedTuple):
    """Predicted time of one config on one problem.

    Attributes:
        time_us: from launch to the last store.
        compute_us: waves of tiles, as if memory were free.
        memory_us: bytes through HBM, each operand once, as if the tiles were free.
        bound: `compute` or `memory`, whichever is longer.
        waves: tiles that the busiest SM works through.
        utilization: share of the waves' tile slots that have a tile, by their width.
    """

    time_us: float
    compute_us: float
    memory_us: float
    bound: str
    waves: int
    utilization: float


class ComputeParts(NamedTuple):
    """What the waves of tiles consist of, in microseconds.

    Attributes:
        blocks_us: multiplying, promoting and waiting for K blocks.
        tiles_us: the rest of every tile: filling the pipeline, scaling, storing; and beginning columns of them.
        idle_us: gained beside idle SMs, negative.
        throttle_us: lost to the power limit.
    """

    blocks_us: float
    tiles_us: float
    idle_us: float
    throttle_us: float


def compute_parts(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> ComputeParts:
    return _compute_parts(config, problem, hardware, *busiest(config, problem))


def _compute_parts(
    config: GemmConfig, problem: GemmProblem, hardware: Hardware, most: Tiles, utilization: float
) -> ComputeParts:
    """Of a cluster that has `most` tiles, while all have as much of that as `utilization` says: see `busiest`."""
    model, times = calibration(), tile_times(config, hardware)
    narrow_times = tile_times(deepest_config(config.block_m, config.narrow_n), hardware) if config.narrow_n else times
    blocks_us = most.wide * times.block_us + most.narrow * narrow_times.block_us
    blocks_us *= blocks_per_tile(config, problem.k)
    tiles_us = most.wide * times.tile_us + most.narrow * narrow_times.tile_us
    tiles_us += columns_begun(config, problem) * times.column_us
    idle_us = -model.idle_gain * (1 - utilization) * (blocks_us + tiles_us)
    alone_us = blocks_us + tiles_us + idle_us
    busy_us = alone_us * utilization
    # A GPU with slower tensor cores per SM stays as much further from its power limit.
    heat = min(1.0, block_tensor_us(config, H200) / block_tensor_us(config, hardware))
    throttle_us = alone_us * heat * model.throttle * busy_us / (busy_us + model.throttle_us)
    return ComputeParts(blocks_us, tiles_us, idle_us, throttle_us)


def busiest(config: GemmConfig, problem: GemmProblem) -> tuple[Tiles, float]:
    """Tiles of the cluster that has the most, and how much of that all have in the mean."""
    tiles, slots = cluster_tiles(config, problem), cluster_slots(config, problem.num_sms)
    most = _busiest(tiles, slots)
    return most, tiles.columns(config) / (slots * most.columns(config))


def compulsory_bytes(problem: GemmProblem) -> int:
    """Through HBM at least: each operand once in FP8, the result in BF16. The scales, under 3 %, are left out."""
    return (problem.m + problem.n) * problem.k + 2 * problem.m * problem.n


def memory_time(problem: GemmProblem, hardware: Hardware = H200) -> float:
    """Microseconds of the compulsory bytes; few SMs cannot ask for all that HBM gives."""
    tbps = min(hardware.hbm_tbps, hardware.l2_tbps * problem.num_sms / hardware.num_sms)
    return calibration().memory_us + compulsory_bytes(problem) / tbps / 1e6


def launch_time(hardware: Hardware = H200) -> float:
    """Microseconds that every call costs: fitted on an H200, and what another GPU's empty kernel takes more."""
    return calibration().launch_us + hardware.launch_us - H200.launch_us


def estimate(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> Estimate:
    """Predict a config's time on a problem: `launch + (compute**p + memory**p)**(1/p)`."""
    overlap = calibration().overlap
    most, utilization = busiest(config, problem)
    compute_us = sum(_compute_parts(config, problem, hardware, most, utilization))
    memory_us = memory_time(problem, hardware)
    time_us = launch_time(hardware) + (compute_us**overlap + memory_us**overlap) ** (1 / overlap)
    bound = "compute" if compute_us >= memory_us else "memory"
    return Estimate(time_us, compute_us, memory_us, bound, most.total, utilization)


def bucketed(problem: GemmProblem) -> GemmProblem:
    """The problem whose choice this one shares: the largest of its bucket of m."""
    return problem._replace(m=_bucket_end(problem.m))


def _bucket_end(m: int) -> int:
    """m rounded up to 8 up to 64, to 32 up to 128, and to 64 above.

    One choice for 96x2112x7168 and 128x2112x7168 would cost one of them 6 % (H200, 2026-11-22).
    """
    return round_up(m, 8 if m <= 64 else 32 if m <= 128 else 64)


def candidates(problem: GemmProblem, hardware: Hardware = H200) -> list[tuple[Estimate, GemmConfig]]:
    """Every default config that the problem's K and SMs allow, and one that `tune` found: the one measured best
    where that is known, then the fastest predicted."""
    own, measured = (tuned_choice(problem), measured_choice(problem)) if hardware.name == H200.name else (None, None)
    known = dict.fromkeys((*default_configs(problem.tma_store), *([own] if own else [])))
    configs = (c for c in known if suits(c, problem) and (problem.split_k or c.split_k == 1))
    runnable = (c for c in configs if c.cluster <= problem.num_sms)
    estimated = ((estimate(c, problem, hardware), c) for c in runnable)
    return sorted(estimated, key=lambda pair: (pair[1].name.removesuffix("_any") != measured, pair[0].time_us))


def suits(config: GemmConfig, problem: GemmProblem) -> bool:
    """Whether a config can multiply the problem's k, and is not another one in disguise: with tiles of one width where
    it may have two."""
    return config.takes_k(problem.k) and (not config.narrow_n or all(cluster_tiles(config, problem)))


def measured_choice(problem: GemmProblem) -> str | None:
    """Name of the config that was measured best for this bucket: by the user's own search, else by ours, which knows
    those buckets where the model is wrong."""
    own, model = tuned_choice(problem), calibration()
    if own is not None:
        return own.name.removesuffix("_any")
    if problem.num_sms != model.num_sms:
        return None
    return model.choices.get(bucket_key(problem))


def tuned_choice(problem: GemmProblem) -> GemmConfig | None:
    """The config that `tune` found to be fastest for this bucket, to store as the problem's `out` needs it."""
    choice = tuned.choices(problem.num_sms).get(bucket_key(problem))
    return choice and replace(choice.config, tma_store=problem.tma_store)


def bucket_key(problem: GemmProblem) -> str:
    """What measured choices are stored by."""
    return f"{problem.m}x{problem.n}x{problem.k}"


@lru_cache(maxsize=65_536)
def choose_bucket(problem: GemmProblem) -> GemmConfig:
    """The config of a whole bucket, which `problem` must be; remembered."""
    return candidates(problem)[0][1]


def choose(problem: GemmProblem) -> GemmConfig:
    """The config for a problem: that of its bucket."""
    return choose_bucket(bucketed(problem))


def configs_for(
    n: int, k: int, max_m: int, num_sms: int, tma_store: bool = True, split_k: bool = True
) -> list[GemmConfig]:
    """Every config that some m in [1, max_m] is given."""
    ends = {_bucket_end(m) for m in range(1, max_m + 1)}
    chosen = {choose(GemmProblem(m, n, k, num_sms, tma_store, split_k)) for m in ends}
    return sorted(chosen, key=lambda config: config.name)
