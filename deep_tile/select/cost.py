"""A config's predicted time on a problem. Pure functions on sizes and rates; no GPU, no torch.

Two overlapping terms: tile waves and HBM bytes. Times per K block and per tile for each config were measured on an H200
and fitted (benchmarks/search.py and calibrate.py); they are in times/, by kind. For other GPUs they are scaled by
tensor rate, clock and bandwidth.
"""

import json
from dataclasses import replace
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deep_tile.config import GemmConfig
from deep_tile.kinds import EVERY_KIND, K_BLOCK_BYTES, QUANTIZED, RESULTS
from deep_tile.problem import GemmProblem
from deep_tile.select.defaults import deepest_config
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.schedule import blocks_per_tile, busiest, columns_begun
from deep_tile.walls import product_flops

if TYPE_CHECKING:
    import numpy

TIMES = Path(__file__).parent / "times"
"""Written by benchmarks/calibrate.py."""


LIKE = {"int8_rows": "fp8_rows", "int8_unscaled": "fp8_rows", "fp16": "bf16", "int4": "fp8_1x128"}
"""Unmeasured families and the measured ones with equal element size and accumulation that stand for them."""


ALONG_ROWS = "nn"
"""The layout whose kernel names key the stored times for all layouts but "nt"."""


BOX_CAST_US = 0.8
"""Extra tile time per 64x128 result box that a math warpgroup casts to FP8 (H200, 2026-11-24)."""

CHAINED_CAST_US = 1.7
"""A cast's time beyond its bytes when it follows a GEMM by programmatic launch (H200, 2026-11-24)."""


PACKED_BLOCK_US = {
    **{(32, 32, 4): (0.17, 0.12), (32, 64, 2): (0.155, 0.153), (32, 64, 4): (0.118, 0.124), (32, 128, 2): (0.2, 0.206)},
    **{(64, 32, 2): (0.134, 0.161), (64, 64, 1): (0.23, 0.276), (64, 64, 2): (0.174, 0.209)},
    **{(64, 96, 2): (0.28, 0.28), (64, 112, 2): (0.32, 0.305), (64, 128, 2): (0.262, 0.314)},
    **{(128, 64, 2): (0.254, 0.305), (128, 96, 1): (0.471, 0.512)},
    **{(128, 128, 1): (0.478, 0.574), (128, 192, 1): (0.769, 0.875), (256, 64, 1): (0.435, 0.582)},
    **{(256, 96, 1): (0.635, 0.776), (256, 112, 1): (0.734, 0.89), (256, 128, 1): (0.774, 0.96)},
}
"""Time per K block of a packed weight, by tile and scale blocks, with block and with column scales: the conversion,
which hides WGMMA. Tiles up to 128x64 and (128, 128) are fitted to 112 times of four weights and of 8 groups, with 1 to
4,096 rows; the first has a slower conversion, and with column scales all take 1.2 times as long (H100, 2026-11-26). The
others are fitted to 88 products of nine weights each, MXFP4 and INT4, with 256 to 4,096 rows: the choice takes 1.004
and 1.013 times the best's time, at most 1.09 and 1.11; with each weight's by a fit to the other eight 1.003 and 1.015.
For eight other weights it takes 1.005 and 1.001 times the best of three to five, at most 1.12 and 1.04 (H100,
2026-11-27). 64x96 and 64x112 are fitted to 60 other products with 16 rows, or 96 to 512: over all of them the choice
takes 1.002 times the best's time, at most 1.04 (H100, 2026-11-27). 32-row tiles are fitted to the choice among them and
64-row tiles, over 60 products with 1 to 64 rows of twelve weights: it takes 1.004 times the best's time, at most 1.07
(H100, 2026-11-27)."""

PACKED_TILE_US = {
    **{(32, 32, 4, 2): 0.13, (32, 64, 2, 2): 0.64, (32, 64, 2, 4): 0.53, (32, 64, 4, 1): 0.41, (32, 64, 4, 2): 2.48},
    **{(32, 128, 2, 1): 1.44, (64, 96, 2, 2): 1.0, (64, 112, 2, 1): 0.5},
}
"""`TileTimes.tile_us` of packed weights' tiles for which the typical one is too long, by tile, scale blocks and split
K. Fitted with their times per K block."""

CHAINED_US = {
    **{(32, 32, 4, 2): (0.089, 0.05), (32, 64, 2, 2): (0.156, 0.3), (32, 64, 2, 4): (0.156, 0.47)},
    **{(32, 64, 4, 1): (0.136, 0.38), (32, 64, 4, 2): (0.136, 0.94), (32, 128, 2, 1): (0.3, 0.05)},
    **{(64, 64, 2, 2): (0.256, 0.32), (64, 64, 4, 1): (0.184, 1.04), (64, 64, 4, 2): (0.184, 0.71)},
    **{(64, 128, 2, 1): (0.377, 0.18), (128, 64, 1, 1): (0.466, 0.21), (128, 64, 1, 2): (0.466, 0.97)},
    **{(128, 128, 1, 1): (0.634, 1.0), (128, 128, 1, 2): (0.634, 3.64)},
    **{(256, 64, 1, 1): (0.684, 5.0), (256, 64, 1, 2): (0.684, 1.09)},
}
"""Both times of tiles whose products are WGMMA chains, one for each group, by tile, scale blocks and split K: fitted to
73 products of seven weights with 1 to 4,096 rows and 37 draws of groups, over which the choice takes 1.004 times the
time of the best that was measured, at most 1.10 (H100, 2026-11-27)."""

EXCHANGE_US = 0.94
"""Exchange of a chunk's sums (64 rows of 128 columns per math warpgroup) under split K in two: 128x128 takes this much
longer per tile than without split K (fp8.json). MXFP4's 256x128 in two takes 28 to 30 us where 30 to 31 are predicted
(H100, 2026-11-27)."""

UNPACK_US, UNPACK_TBPS = 0.5, 2.59
"""Launch time within a graph, and bandwidth, reads and writes, of the kernel that unpacks a weight to FP8: weights of
15 to 235 million elements (H100, 2026-11-26)."""


def unpack_us(elements: int, b_bytes: float) -> float:
    return UNPACK_US + elements * (1 + b_bytes) / UNPACK_TBPS / 1e6


class TileTimes(NamedTuple):
    """A config's microseconds on one SM: per K block, per tile beside its K blocks, and to start a tile column with
    resident `b`."""

    block_us: float
    tile_us: float
    column_us: float = 0.0


class Calibration(NamedTuple):
    """The time model's measured coefficients, in microseconds.

    Attributes:
        launch_us: cost per call. memory_us: cost of memory beyond bandwidth.
        overlap: exponent p of (compute**p + memory**p)**(1/p): 1 adds the two, infinity takes the larger.
        idle_gain: how much faster tiles run, beside idle SMs that leave them power and L2.
        throttle, throttle_us: share by which the power limit slows a long kernel, and the duration at which half of
            that is reached.
        load_heat: exponent that slows tiles with more operand loads per FLOP.
        l2_share: of the rate from L2 that products with FP8 operands reach.
        num_sms: the measured GPU's.
        choices: by a bucket's "MxNxK", the config that measured better than the model's choice: alone, or for m <= 128
            alone and in launch chains.
    """

    launch_us: float
    memory_us: float
    overlap: float
    idle_gain: float
    throttle: float
    throttle_us: float
    load_heat: float
    l2_share: float
    configs: dict[str, TileTimes]
    num_sms: int
    choices: dict[str, str]


def is_measured(kind: str) -> bool:
    return (TIMES / f"{kind}.json").exists()


@cache
def times_of(kind: str) -> str:
    """The kind whose times apply: itself if measured, else its family, a kind `LIKE` it, or FP8: a 128-byte K block
    keeps the tensor cores busy equally long in every format."""
    family = EVERY_KIND[kind].family
    return next(filter(is_measured, (kind, family, LIKE.get(family, "fp8"))))


@cache
def along_rows(kind: str) -> Calibration:
    """A kind's calibration for M- or N-major operands, whose boxes differ and so do their tiles' times."""
    return read_calibration(TIMES / f"{times_of(kind)}_{ALONG_ROWS}.json")


@cache
def calibration(kind: str = "fp8") -> Calibration:
    """The calibration for a kind, by its name in `kinds.EVERY_KIND`. Measured choices come from its family only."""
    measured = read_calibration(TIMES / f"{times_of(kind)}.json")
    return measured if times_of(kind) == EVERY_KIND[kind].family else measured._replace(choices={})


@cache
def read_calibration(path: Path) -> Calibration:
    data = json.loads(path.read_text())
    configs = {name: TileTimes(*coefficients) for name, coefficients in data["configs"].items()}
    return Calibration(**{name: data[name] for name in Calibration._fields} | {"configs": configs})


def tile_times(config: GemmConfig, hardware: Hardware = H200) -> TileTimes:
    """Measured on an H200, or typical for a config that was not. On another GPU the tensor core part scales with
    tensor rate, the rest with the clock."""
    if config.is_packed and config.chains == 1 and config.split_k > 1 and config.chunks_m > 1:
        whole = tile_times(_unsplit(config), hardware)
        exchange_us = EXCHANGE_US * config.chunks_m * config.block_n / 128 * H200.clock_mhz / hardware.clock_mhz
        return whole._replace(tile_us=whole.tile_us + exchange_us)
    tensor_us = block_tensor_us(config, H200)
    measured = (
        (along_rows if is_along_rows else calibration)(kind).configs.get(name)
        for is_along_rows, kind, name in _names_of_times(config)
    )
    typical_us = 2 * config.block_n / 128 if config.chunks_m > 1 else 2.0
    on_h200 = next(filter(None, measured), TileTimes(1.2 * tensor_us, typical_us))
    if config.is_packed:
        tile = config.block_m, config.block_n, config.scale_blocks
        packed_us = PACKED_BLOCK_US[tile][config.column_scales] if tile in PACKED_BLOCK_US else 2 * tensor_us
        tile_us = PACKED_TILE_US.get((*tile, config.split_k), on_h200.tile_us)
        on_h200 = on_h200._replace(block_us=packed_us, tile_us=tile_us)
        if config.chains > 1:
            on_h200 = TileTimes(*CHAINED_US.get((*tile, config.split_k), (packed_us, tile_us)))
    slower_clock = H200.clock_mhz / hardware.clock_mhz
    block_us = max(0.0, block_tensor_us(config, hardware) + (on_h200.block_us - tensor_us) * slower_clock)
    tile_us = on_h200.tile_us + (BOX_CAST_US * config.boxes if config.quantizes else 0)
    return TileTimes(block_us, tile_us * slower_clock, on_h200.column_us * slower_clock)


@lru_cache(maxsize=64)
def _unsplit(config: GemmConfig) -> GemmConfig:
    return replace(config, split_k=1)


@lru_cache(maxsize=1_024)
def _names_of_times(config: GemmConfig) -> tuple[tuple[bool, str, str], ...]:
    """Kernels whose times may stand for a config's, best first: (whether `along_rows` has them, kind, name). First the
    config's own kernel; then kernels with the same tile and other results, of the kind whose times apply, then of FP8.
    For M- or N-major operands, kernels with such operands come first. A grouped or transposed tile without times
    takes those of the plain tile."""
    fields = ("block_m", "block_n", "cluster_m", "cluster_n", "split_k", "scale_blocks")
    tile = {field: getattr(config, field) for field in fields}
    timed = times_of(config.kind)
    alike = [(timed, EVERY_KIND[timed].output, "nt"), (timed, "fp32", "nt"), ("fp8", "bf16", "nt")]
    names = [(False, config.kind, config.timed_name)]
    if config.layout != "nt":
        alike[:0] = [(timed, EVERY_KIND[timed].output, layout) for layout in (config.layout, ALONG_ROWS)]
        names = []
    for grouping, transposed in dict.fromkeys(((config.grouping, config.transposed), ("none", False))):
        form = {"grouping": grouping, "transposed": transposed}
        for kind, output, layout in alike:
            try:
                like = deepest_config(**tile, kind=kind, output=output, layout=layout, **form)
            except ValueError:  # a tile that this kind cannot have
                continue
            names.append((layout != "nt", kind, like.timed_name))
    return tuple(names)


def block_tensor_us(config: GemmConfig, hardware: Hardware) -> float:
    """Tensor core time on one SM for one 128-byte K block, at the rate under load."""
    flops = product_flops(config.block_m, config.block_n, K_BLOCK_BYTES // config.product.a.bytes)
    return flops / (hardware.tflops(config.kind) / hardware.num_sms) / 1e6


class Estimate(NamedTuple):
    """One config's predicted time on one problem.

    Attributes:
        time_us: from launch to the last store.
        compute_us: tile waves, as if memory were free.
        memory_us: bytes through HBM, each operand once, as if the tiles were free.
        bound: `compute` or `memory`, whichever is longer.
        waves: tiles that the busiest SM works through.
        utilization: share of occupied tile slots in the waves.
    """

    time_us: float
    compute_us: float
    memory_us: float
    bound: str
    waves: int
    utilization: float


class ComputeParts(NamedTuple):
    """Components of the tile waves, in microseconds.

    Attributes:
        blocks_us: multiplying, promoting and waiting for K blocks.
        tiles_us: the rest of every tile: pipeline fill, scaling, storing; and starting tile columns.
        idle_us: gained beside idle SMs, negative.
        throttle_us: lost to the power limit.
    """

    blocks_us: float
    tiles_us: float
    idle_us: float
    throttle_us: float


def operand_loads(config: GemmConfig) -> float:
    """Operand elements that a tile loads per tile element and k. They cost energy, not clocks."""
    return 1 / config.block_m + 1 / config.block_n


LINES, LOADS_OVERLAP = {16: 0.82, 32: 1.37, 64: 1.58, 128: 2.3}, 6.0
"""TMA's rate from L2 when many SMs read the same rows, as a share of `Hardware.l2_tbps`, by row alignment: a box row
that starts at 16 modulo 32 bytes touches two lines and five sectors, others two and four. Also the exponent with which
loads overlap MMA. Fitted to 6 shapes x 6 strides on an H200 and an H100 (2026-11-25), and, with the exponent, to 95
shapes with line-aligned rows on an H100, where small tiles wait for L2: above m = 128 the choice takes 1.006 times the
best config's time, at worst 1.07; without this term 1.021, at worst 1.19 (2026-11-26)."""


def weighed_loads(config: GemmConfig, problem: GemmProblem, most: float = inf) -> float:
    """Bytes that a block loads per K block, divided by the L2 rate share for its row alignment, at most `most`."""
    rows = config.block_m / config.cluster_n, 0 if config.resident_b else config.block_n / config.cluster_m
    shares = (min(most, LINES[alignment]) for alignment in config.sides(*problem.row_alignment))
    return sum(each * K_BLOCK_BYTES / share for each, share in zip(rows, shares, strict=True))


def _with_loads(blocks_us, blocks, config: GemmConfig, problem: GemmProblem, hardware: Hardware):
    """Microseconds for K blocks, `blocks` per SM in the mean, from `blocks_us`, measured without load stalls."""
    tbps = hardware.l2_tbps * calibration(config.kind).l2_share
    loads_us = blocks * problem.num_sms * weighed_loads(config, problem) / tbps / 1e6
    return (blocks_us**LOADS_OVERLAP + loads_us**LOADS_OVERLAP) ** (1 / LOADS_OVERLAP)


TYPICAL_OPERAND_LOADS = 1 / 128 + 1 / 176
"""Operand loads of a typical tile for large GEMMs."""


def compute_parts(
    config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200, busy: tuple[int, float] | None = None
) -> ComputeParts:
    """The components; `busy`: what `busiest` says, where it is known."""
    most, utilization = busy or busiest(config, problem)
    model, times = calibration(config.kind), tile_times(config, hardware)
    blocks = most * blocks_per_tile(config, problem.k)
    blocks_us = _with_loads(blocks * times.block_us, blocks * utilization, config, problem, hardware)
    tiles_us = most * times.tile_us + columns_begun(config, problem) * times.column_us
    idle_us = -model.idle_gain * (1 - utilization) * (blocks_us + tiles_us)
    alone_us = blocks_us + tiles_us + idle_us
    busy_us = alone_us * utilization
    # A GPU with slower tensor cores per SM stays as much further from its power limit.
    heat = min(1.0, block_tensor_us(config, H200) / block_tensor_us(config, hardware))
    heat *= (operand_loads(config) / TYPICAL_OPERAND_LOADS) ** model.load_heat
    throttle_us = alone_us * heat * model.throttle * busy_us / (busy_us + model.throttle_us)
    return ComputeParts(blocks_us, tiles_us, idle_us, throttle_us)


def chained_cast_us(problem: GemmProblem, hardware: Hardware = H200) -> float:
    """Time of an FP8 cast after a BF16 GEMM: it reads the result and writes half as many bytes."""
    elements = problem.m * problem.out_columns
    return chained_us(elements * (RESULTS["bf16"].bytes + RESULTS[QUANTIZED].bytes), hardware)


def chained_us(bytes_moved: int, hardware: Hardware = H200) -> float:
    """Time of an FP8 cast of so many bytes read and written, before or after a GEMM."""
    return CHAINED_CAST_US + bytes_moved / hardware.hbm_tbps / 1e6


def compulsory_bytes(problem: GemmProblem) -> int:
    """Through HBM at least: each operand and the result once. The scales, under 3 %, are left out."""
    operands = (problem.m * problem.product.a.bytes + problem.n * problem.product.b_bytes) * problem.k
    return operands + problem.m * problem.out_columns * problem.out.bytes


def memory_time(problem: GemmProblem, hardware: Hardware = H200) -> float:
    """Microseconds for the compulsory bytes; few SMs cannot use all of HBM's bandwidth."""
    tbps = min(hardware.hbm_tbps, hardware.l2_tbps * problem.num_sms / hardware.num_sms)
    return calibration(problem.kind).memory_us + compulsory_bytes(problem) / tbps / 1e6


def launch_time(hardware: Hardware = H200, kind: str = "fp8") -> float:
    """Microseconds per call: fitted on an H200, plus the extra time of another GPU's empty kernel."""
    return calibration(kind).launch_us + hardware.launch_us - H200.launch_us


def estimate(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> Estimate:
    most, utilization = busy = busiest(config, problem)
    compute_us = sum(compute_parts(config, problem, hardware, busy))
    memory_us = memory_time(problem, hardware)
    time_us = _overlapped(compute_us, memory_us, problem.kind, hardware)
    bound = "compute" if compute_us >= memory_us else "memory"
    return Estimate(time_us, compute_us, memory_us, bound, most, utilization)


def _overlapped(compute_us, memory_us, kind: str, hardware: Hardware):
    """Microseconds: `launch + (compute**p + memory**p)**(1/p)`."""
    overlap = calibration(kind).overlap
    return launch_time(hardware, kind) + (compute_us**overlap + memory_us**overlap) ** (1 / overlap)


def times_us(config: GemmConfig, problem: GemmProblem) -> "numpy.ndarray":
    """`estimate` on an H200 for many problems at once, equal except in the last bits: the problem's `m` is an array."""
    compute_us = sum(compute_parts(config, problem))
    return _overlapped(compute_us, memory_time(problem), problem.kind, H200)
