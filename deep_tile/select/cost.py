"""What a config takes on a problem, predicted. Pure functions of sizes and rates; no GPU, no torch.

Called by choose.py, and by method/, which shows the same estimates and adds the walls that explain them. The model has
two terms that overlap: waves of tiles, and bytes through HBM. What a K block and a tile of each config take was
measured on an H200 and fitted (benchmarks/search.py and calibrate.py); the numbers are in times/, by kind, and for
another GPU they are scaled by its tensor rate, clock and bandwidth.
"""

import json
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deep_tile.config import GemmConfig
from deep_tile.kinds import EVERY_KIND, K_BLOCK_BYTES, LAYOUTS, QUANTIZED, RESULTS
from deep_tile.problem import GemmProblem
from deep_tile.select.defaults import deepest_config
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.schedule import blocks_per_tile, busiest, columns_begun
from deep_tile.walls import product_flops

if TYPE_CHECKING:
    import numpy

TIMES = Path(__file__).parent / "times"
"""Written by benchmarks/calibrate.py."""


LIKE = {"int8_rows": "fp8_rows", "int8_unscaled": "fp8_rows", "fp16": "bf16"}
"""Families of kinds that were not measured, by those of as many bytes whose sums are treated alike."""


ALONG_ROWS = "nn"
"""The layout whose kernels' names the times of all but "nt" are stored by."""


BOX_CAST_US = 0.8
"""What a tile takes longer for each 64x128 of a math warpgroup's result that it casts to FP8 (H200, 2026-11-24)."""

CHAINED_CAST_US = 1.7
"""What a cast takes beside its bytes that follows a product in a chain of programmatic launches (H200, 2026-11-24)."""


PACKED_BLOCK_US = {
    **{(64, 32, 2): 0.134, (64, 64, 1): 0.275, (64, 64, 2): 0.205, (64, 128, 1): 0.4},
    **{(128, 64, 1): 0.406, (128, 128, 1): 0.637, (256, 128, 1): 0.954},
}
"""What a K block of a packed weight takes, by tile and scale blocks: the conversion, beside which WGMMA has time. From
products of 1 to 512 rows by 4096x7168, alone and in 8 groups (H100, 2026-11-26)."""


class TileTimes(NamedTuple):
    """What a config takes on one SM, in microseconds.

    Attributes:
        block_us: one K block.
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
        load_heat: exponent by which tiles that load more operands per FLOP are slowed more.
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
    load_heat: float
    configs: dict[str, TileTimes]
    num_sms: int
    choices: dict[str, str]


def is_measured(kind: str) -> bool:
    """Whether a kind has times of its own."""
    return (TIMES / f"{kind}.json").exists()


@cache
def times_of(kind: str) -> str:
    """The kind whose times a kind has: its own, if it was measured, else those of its family, of kinds `LIKE` it, or
    FP8's: a K block of 128 bytes takes the tensor cores equally long in every format."""
    family = EVERY_KIND[kind].family
    return next(filter(is_measured, (kind, family, LIKE.get(family, "fp8"))))


@cache
def along_rows(kind: str) -> Calibration:
    """That of products of which an operand lies along its rows: boxes of `b` are then of 64 of K by 64 of n, and tiles
    take other times."""
    return read_calibration(TIMES / f"{times_of(kind)}_{ALONG_ROWS}.json")


@cache
def calibration(kind: str = "fp8") -> Calibration:
    """That of a kind of product, by its name in `kinds.EVERY_KIND`. Measured choices are those of its family alone."""
    measured = read_calibration(TIMES / f"{times_of(kind)}.json")
    return measured if times_of(kind) == EVERY_KIND[kind].family else measured._replace(choices={})


@cache
def read_calibration(path: Path) -> Calibration:
    data = json.loads(path.read_text())
    configs = {name: TileTimes(*coefficients) for name, coefficients in data["configs"].items()}
    return Calibration(**{name: data[name] for name in Calibration._fields} | {"configs": configs})


def tile_times(config: GemmConfig, hardware: Hardware = H200) -> TileTimes:
    """Measured on an H200, or typical for a config that was not.

    On another GPU, what the tensor cores need takes as long as their rate says, and the rest scales with the clock.
    """
    tensor_us = block_tensor_us(config, H200)
    measured = (
        (along_rows if is_along_rows else calibration)(kind).configs.get(name)
        for is_along_rows, kind, name in _names_of_times(config)
    )
    on_h200 = next(filter(None, measured), TileTimes(1.2 * tensor_us, 2.0))
    if config.is_packed:
        tile = config.block_m, config.block_n, config.scale_blocks
        on_h200 = on_h200._replace(block_us=PACKED_BLOCK_US.get(tile, 2 * tensor_us))
    slower_clock = H200.clock_mhz / hardware.clock_mhz
    block_us = max(0.0, block_tensor_us(config, hardware) + (on_h200.block_us - tensor_us) * slower_clock)
    tile_us = on_h200.tile_us + (BOX_CAST_US * config.boxes if config.quantizes else 0)
    return TileTimes(block_us, tile_us * slower_clock, on_h200.column_us * slower_clock)


@lru_cache(maxsize=1_024)
def _names_of_times(config: GemmConfig) -> tuple[tuple[bool, str, str], ...]:
    """Kernels whose times a config's may be, whether `along_rows` has them, and of which kind: its own, then those of
    other results with the same tile, of the kind that it has the times of and of FP8. With an operand along its rows
    those of such a tile come first, and its own are none."""
    fields = ("block_m", "block_n", "cluster_m", "cluster_n", "split_k", "scale_blocks")
    tile = {field: getattr(config, field) for field in fields}
    timed = times_of(config.kind)
    alike = [(timed, EVERY_KIND[timed].output, "nt"), (timed, "fp32", "nt"), ("fp8", "bf16", "nt")]
    names = [(False, config.kind, config.timed_name)]
    if config.layout != "nt":
        alike.insert(0, (timed, EVERY_KIND[timed].output, ALONG_ROWS))
        names = []
    for kind, output, layout in alike:
        try:
            name = deepest_config(**tile, kind=kind, output=output, layout=layout).timed_name
        except ValueError:  # a tile that this kind cannot have
            continue
        names.append((layout != "nt", kind, name))
    return tuple(names)


def block_tensor_us(config: GemmConfig, hardware: Hardware) -> float:
    """What the tensor cores of one SM need for one K block of 128 bytes, at their rate under load."""
    flops = product_flops(config.block_m, config.block_n, K_BLOCK_BYTES // config.product.a.bytes)
    return flops / (hardware.tflops(config.kind) / hardware.num_sms) / 1e6


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


def operand_loads(config: GemmConfig) -> float:
    """Elements of both operands that a tile loads for each element of it and of K. They cost energy, not clocks."""
    return 1 / config.block_m + 1 / config.block_n


LINES, LOADS_OVERLAP = {16: 0.82, 32: 1.37, 64: 1.58, 128: 2.3}, 6.0
"""What TMA takes in from L2 where many SMs read the same rows, as a share of `Hardware.l2_tbps`, by the alignment of
the rows: a row of a box that begins at 16 modulo 32 bytes lies in two lines and five sectors, others in two and four.
And the exponent by which loads overlap with products. Fitted to 6 shapes of 6 strides each on an H200 and an H100
(2026-11-25), and, with the exponent, to 95 shapes with rows at lines on an H100, where small tiles wait for L2: above
m = 128 the choice takes 1.006 of the best config's time, at worst 1.07; without loads 1.021, at worst 1.19
(2026-11-26)."""


def weighed_loads(config: GemmConfig, problem: GemmProblem, most: float = inf) -> float:
    """Bytes that a block loads for each K block of a tile, over the share of L2's rate that their rows allow.

    Args:
        most: such a share that other walls allow.
    """
    rows = config.block_m / config.cluster_n, 0 if config.resident_b else config.block_n / config.cluster_m
    shares = (min(most, LINES[alignment]) for alignment in problem.row_alignment)
    return sum(each * K_BLOCK_BYTES / share for each, share in zip(rows, shares, strict=True))


CROWDED_US = {16: 0.31, 32: 0.16, 64: 0.16, 128: 0.04}
"""What a K block takes longer by 64 columns of an `a` along m, while every SM loads some, times 1 + m / 64, by the
alignment of its rows: of a small m all ask for the same few lines at once. Fitted together with times/bf16_nn.json."""


def _crowded_us(config: GemmConfig, problem: GemmProblem):
    """What such an `a` adds to a K block, in microseconds, where every SM of an H200 loads one."""
    if LAYOUTS[problem.layout].a != "m":
        return 0.0
    columns = config.block_m / config.cluster_n / 64
    return columns * CROWDED_US[problem.row_alignment[0]] / (1 + problem.m / 64) * problem.num_sms / H200.num_sms


def _with_loads(blocks_us, blocks, config: GemmConfig, problem: GemmProblem, hardware: Hardware):
    """What K blocks take, of which `blocks_us` was measured where loads did not hold them up, in microseconds.

    Args:
        blocks: K blocks of each SM's tiles, in the mean.
    """
    blocks_us = blocks_us + blocks * _crowded_us(config, problem)
    loads_us = blocks * problem.num_sms * weighed_loads(config, problem) / hardware.l2_tbps / 1e6
    return (blocks_us**LOADS_OVERLAP + loads_us**LOADS_OVERLAP) ** (1 / LOADS_OVERLAP)


TYPICAL_OPERAND_LOADS = 1 / 128 + 1 / 176
"""Of a tile in the middle of those that large products are given."""


def compute_parts(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> ComputeParts:
    return _compute_parts(config, problem, hardware, *busiest(config, problem))


def _compute_parts(
    config: GemmConfig, problem: GemmProblem, hardware: Hardware, most: int, utilization: float
) -> ComputeParts:
    """Of a cluster that has `most` tiles, while all have as much of that as `utilization` says: see `busiest`."""
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
    """What a cast to FP8 takes that follows a product in BF16: it reads the result and writes half of that."""
    elements = problem.m * problem.out_columns
    return CHAINED_CAST_US + elements * (RESULTS["bf16"].bytes + RESULTS[QUANTIZED].bytes) / hardware.hbm_tbps / 1e6


def compulsory_bytes(problem: GemmProblem) -> int:
    """Through HBM at least: each operand and the result once. The scales, under 3 %, are left out."""
    operands = (problem.m * problem.product.a.bytes + problem.n * problem.product.b_bytes) * problem.k
    return operands + problem.m * problem.out_columns * problem.out.bytes


def memory_time(problem: GemmProblem, hardware: Hardware = H200) -> float:
    """Microseconds of the compulsory bytes; few SMs cannot ask for all that HBM gives."""
    tbps = min(hardware.hbm_tbps, hardware.l2_tbps * problem.num_sms / hardware.num_sms)
    return calibration(problem.kind).memory_us + compulsory_bytes(problem) / tbps / 1e6


def launch_time(hardware: Hardware = H200, kind: str = "fp8") -> float:
    """Microseconds that every call costs: fitted on an H200, and what another GPU's empty kernel takes more."""
    return calibration(kind).launch_us + hardware.launch_us - H200.launch_us


def estimate(config: GemmConfig, problem: GemmProblem, hardware: Hardware = H200) -> Estimate:
    """Predict a config's time on a problem."""
    most, utilization = busiest(config, problem)
    compute_us = sum(_compute_parts(config, problem, hardware, most, utilization))
    memory_us = memory_time(problem, hardware)
    time_us = _overlapped(compute_us, memory_us, problem.kind, hardware)
    bound = "compute" if compute_us >= memory_us else "memory"
    return Estimate(time_us, compute_us, memory_us, bound, most, utilization)


def _overlapped(compute_us, memory_us, kind: str, hardware: Hardware):
    """Microseconds: `launch + (compute**p + memory**p)**(1/p)`."""
    overlap = calibration(kind).overlap
    return launch_time(hardware, kind) + (compute_us**overlap + memory_us**overlap) ** (1 / overlap)


def times_us(config: GemmConfig, problem: GemmProblem) -> "numpy.ndarray":
    """What `estimate` predicts on an H200 for each of many problems, but for its last bits: `m` of the problem is an
    array of all of theirs."""
    compute_us = sum(_compute_parts(config, problem, H200, *busiest(config, problem)))
    return _overlapped(compute_us, memory_time(problem), problem.kind, H200)
