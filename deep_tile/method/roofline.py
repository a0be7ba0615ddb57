"""The roofline with its resources: which tiles are possible on a GPU, which are good for a problem, and why.

Formulas come from walls.py, legal tiles from config.py, times and choice from select/; this module only explains them.
Pure functions: no GPU, no torch. Invariant: `derive`'s first candidate is the config that `choose.choose` gives the
problem.
"""

from math import gcd
from typing import NamedTuple, TypeVar

from deep_tile.config import MMA_M, SCALE_BLOCK, GemmConfig, check_sizes
from deep_tile.kinds import EVERY_KIND, PACKED
from deep_tile.problem import GemmProblem
from deep_tile.select import choose, cost
from deep_tile.select.cost import Estimate
from deep_tile.select.defaults import within
from deep_tile.select.hardware import H200, Hardware, operand_bytes_of
from deep_tile.walls import (
    Wall,
    accumulator_registers,
    capacity_wall,
    intensity_wall,
    l2_wall,
    latency_wall,
    littles_law,
    operand_bytes,
    product_flops,
    register_wall,
    stages_max,
    walls_hit,
)

BLOCK_M = (64, 128, 256)
BLOCK_N = (16, 32, 64, 96, 128, 160, 192, 224, 256)
"""Sizes that `derive` walks through the walls."""

Predicted = TypeVar("Predicted")
"""A config's time, or its time with components."""

STORE_BUFFERS = 2
BARRIER_BYTES = 2 * 8


class Tile(NamedTuple):
    """One tile before the walls, whatever the problem.

    Attributes:
        block_k: elements per stage.
        accumulators, temporaries: registers per math thread, for the tile and for a K block before promotion.
        stage_bytes, smem_bytes: shared memory per stage and in total.
        stages_max, stages_min: by capacity and by latency.
        walls: register, capacity, latency, intensity against L2 and against shared memory, Little's law.
    """

    block_m: int
    block_n: int
    block_k: int
    dtype: str
    stages: int
    accumulators: int
    temporaries: int
    stage_bytes: int
    smem_bytes: int
    stages_max: int
    stages_min: int = 0
    walls: tuple[Wall, ...] = ()

    def wall(self, name: str) -> Wall:
        return next(wall for wall in self.walls if wall.name == name)


class Candidate(NamedTuple):
    """A tile that passes the walls, with its time on a problem; `config` is its kernel."""

    config: GemmConfig
    tile: Tile
    estimate: Estimate


class Rejected(NamedTuple):
    """A tile that hits a wall; `reason` says by how much. `wall` is `register`, `capacity`, or `instruction` where no
    kernel multiplies such tiles."""

    block_m: int
    block_n: int
    reason: str
    wall: str


class Derivation(NamedTuple):
    """From a problem and a GPU to a config.

    Attributes:
        problem, hardware, dtype: the question.
        bucket: the problem that decides for it.
        walls: the whole problem's intensity against HBM, and a whole wave's demand on L2.
        candidates: the selector's that pass the walls, in its order; the first is the choice. Candidates whose stages
            do not all fit have fewer stages, but the times of the full ones.
        rejected: tiles in the grid `BLOCK_M` x `BLOCK_N` that hit the register or the capacity wall.
        besides: (kernel, us) of what a call launches beside the product.
    """

    problem: GemmProblem
    hardware: Hardware
    dtype: str
    bucket: GemmProblem
    walls: tuple[Wall, ...]
    candidates: list[Candidate]
    rejected: list[Rejected]
    besides: list[tuple[str, float]] = []

    @property
    def choice(self) -> Candidate:
        return self.candidates[0]


def derive(
    problem: GemmProblem, hardware: Hardware = H200, dtype: str | None = None, tuned: choose.Tuned = choose.UNTUNED
) -> Derivation:
    """Walk the tiles through the walls and rank the kernels that are left by their predicted time.

    Dtypes without a kind in `kinds.EVERY_KIND` have no kernels here. They are judged by the FP8 kernel with equally
    large stages: a 128-byte K block keeps the tensor cores busy equally long in every dtype.

    Args:
        problem: m, n, k and the SMs to use, at most the hardware's.
        dtype: the operands', in place of the problem's kind.
        tuned: `tune`'s results on this machine for this SM count, `select.tuned.configs`.

    Raises:
        ValueError: a size is not positive, there are more SMs than the hardware has, it has no rate for the dtype, or
            no tile passes its walls: which wall stops the smallest, and by how much.
    """
    _check(problem, hardware)
    dtype = problem.kind if dtype is None else dtype
    hardware.peak(dtype)
    bucket = choose.bucketed(judged(problem, dtype))
    ranked = choose.candidates(bucket, hardware, choose.tuned_choice(bucket, tuned))
    if dtype not in EVERY_KIND:
        ranked = [(estimate, config) for estimate, config in ranked if config.cluster == config.scale_blocks == 1]
        ranked.sort(key=lambda pair: pair[0].time_us)
    candidates = [Candidate(config, tile, estimate) for estimate, config, tile in fitting(ranked, dtype, hardware)]
    walls = problem_walls(problem, hardware, dtype)
    asked = bucket._replace(k=problem.k)
    rejected = (_rejection(block_m, block_n, dtype, hardware) for block_m in BLOCK_M for block_n in BLOCK_N)
    return Derivation(problem, hardware, dtype, asked, walls, candidates, list(filter(None, rejected)))


def fitting(
    ranked: list[tuple[Predicted, GemmConfig]], dtype: str, hardware: Hardware
) -> list[tuple[Predicted, GemmConfig, Tile]]:
    """Ranked configs that pass the walls, each with as many stages as fit.

    Raises:
        ValueError: none does; the text says by how much the one with the smallest stages fails.
    """
    possible, refused = [], []
    for predicted, config in ranked:
        made = within(config, hardware.smem_bytes) if dtype in EVERY_KIND else config
        try:
            possible.append((predicted, made, _passing(tile_of(made, hardware, dtype))))
        except ValueError as error:
            refused.append((config.stage_bytes, str(error)))
    if not possible:
        raise ValueError(
            f"no tile passes the walls of {hardware.name}; that with the smallest stages: {min(refused)[1]}"
        )
    return possible


def _passing(made: Tile) -> Tile:
    hit = [wall.reason for wall in walls_hit(made.walls)]
    if hit:
        raise ValueError(f"tile {made.block_m}x{made.block_n}x{made.block_k} of {made.dtype}: {'; '.join(hit)}")
    return made


def judged(problem: GemmProblem, dtype: str) -> GemmProblem:
    """The problem whose kernels stand for `dtype`: that kind's, or FP8's with equally many K bytes."""
    if dtype not in EVERY_KIND:
        return problem._replace(k=problem.k * operand_bytes_of(dtype))
    return problem if dtype == problem.kind else problem._replace(kind=dtype, output=EVERY_KIND[dtype].output)


def stored_bytes_of(dtype: str) -> tuple[float, float]:
    """Bytes per element of `a` and of `b` in memory; a packed weight's with its scales."""
    if dtype in PACKED:
        return EVERY_KIND[dtype].a.bytes, EVERY_KIND[dtype].b_bytes
    return operand_bytes_of(dtype), operand_bytes_of(dtype)


def problem_walls(problem: GemmProblem, hardware: Hardware = H200, dtype: str = "fp8") -> tuple[Wall, ...]:
    """The whole problem against HBM, each operand moved once."""
    flops = product_flops(problem.m, problem.n, problem.k)
    bytes_moved = cost.compulsory_bytes(judged(problem, dtype))
    return (intensity_wall("HBM", flops, bytes_moved, hardware.tflops(dtype), hardware.hbm_tbps),)


def tile(
    block_m: int,
    block_n: int,
    block_k: int,
    dtype: str = "fp16",
    hardware: Hardware = H200,
    *,
    math_warpgroups: int | None = None,
    temporaries: int = 0,
    scale_bytes: int = 0,
    stages: int | None = None,
    is_checked: bool = True,
) -> Tile:
    """Any tile before the walls, also one that no kernel here has.

    Args:
        math_warpgroups: that share the tile; by default one for 64 rows, else two.
        temporaries: registers per thread for sums that are scaled before they are added.
        scale_bytes: per stage.
        stages: by default as many as fit.
        is_checked: False for a tile that may hit a wall.

    Raises:
        ValueError: a size is not positive, the dtype has no tensor rate, or the tile hits the register or the capacity
            wall; the message says by how much.
    """
    check_sizes(block_m=block_m, block_n=block_n, block_k=block_k)
    hardware.peak(dtype)
    warpgroups = math_warpgroups or (1 if block_m <= MMA_M else 2)
    stage_bytes = round(operand_bytes(block_m, block_n, block_k, operand_bytes_of(dtype))) + scale_bytes + BARRIER_BYTES
    fixed_bytes = warpgroups * STORE_BUFFERS * MMA_M * gcd(block_n, 64) * 2
    most = stages_max(stage_bytes, fixed_bytes, hardware.smem_bytes)
    stages = stages or max(most, 2)
    made = Tile(
        *(block_m, block_n, block_k, dtype, stages),
        accumulators=accumulator_registers(block_m, block_n, warpgroups),
        temporaries=temporaries,
        stage_bytes=stage_bytes,
        smem_bytes=fixed_bytes + stages * stage_bytes,
        stages_max=most,
    )
    made = _with_walls(made, hardware, min(block_n, 256), warpgroups)
    return _passing(made) if is_checked else made


def tile_of(config: GemmConfig, hardware: Hardware = H200, dtype: str | None = None) -> Tile:
    """A kernel's tile, with the kernel's own registers and shared memory; for a dtype without kernels, one as large."""
    dtype = dtype or config.kind
    if dtype not in EVERY_KIND:
        return tile(config.block_m, config.block_n, config.block_k // operand_bytes_of(dtype), dtype, hardware)
    fixed_bytes = config.smem_bytes - config.stages * config.stage_bytes
    made = Tile(
        *(config.block_m, config.block_n, config.block_k, dtype, config.stages),
        accumulators=config.accumulator_registers,
        temporaries=config.block_registers,
        stage_bytes=config.stage_bytes,
        smem_bytes=config.smem_bytes,
        stages_max=stages_max(config.stage_bytes, fixed_bytes, hardware.smem_bytes),
    )
    return _with_walls(made, hardware, config.mma_n, config.math_warpgroups)


def _with_walls(made: Tile, hardware: Hardware, mma_n: int, warpgroups: int) -> Tile:
    block_m, block_n, block_k, dtype, stages, *_ = made
    element_bytes, tflops = operand_bytes_of(dtype), hardware.tflops(dtype)
    flops = product_flops(block_m, block_n, block_k)
    latency_us = hardware.hbm_latency_ns / 1e3
    latency = latency_wall(stages, flops, tflops / hardware.num_sms, latency_us)
    a_bytes, b_bytes = stored_bytes_of(dtype)
    moved = (block_m * a_bytes + block_n * b_bytes) * block_k
    mma_bytes = operand_bytes(MMA_M, mma_n, block_k, element_bytes)
    in_flight = (stages - 1) * made.stage_bytes
    walls = (
        register_wall(made.accumulators, made.temporaries, hardware.accumulator_limit(warpgroups)),
        capacity_wall(made.smem_bytes, hardware.smem_bytes),
        latency,
        l2_wall(flops, moved, tflops, hardware.l2_tbps, hardware.l2_shared_tbps),
        intensity_wall("shared memory", product_flops(MMA_M, mma_n, block_k), mma_bytes, tflops, hardware.smem_tbps),
        littles_law(in_flight, hardware.hbm_tbps * 1e3 / hardware.num_sms, latency_us),
    )
    return made._replace(stages_min=round(latency.limit), walls=walls)


def _rejection(block_m: int, block_n: int, dtype: str, hardware: Hardware) -> Rejected | None:
    """The first wall that a tile hits with the two stages that a pipeline needs."""
    try:
        hit = walls_hit(_smallest(block_m, block_n, dtype, hardware).walls)
    except ValueError as error:
        reason = str(error).partition(": ")[2]
        return Rejected(block_m, block_n, reason, "register" if "registers" in reason else "instruction")
    return Rejected(block_m, block_n, hit[0].reason, hit[0].name) if hit else None


def _smallest(block_m: int, block_n: int, dtype: str, hardware: Hardware) -> Tile:
    """Raises ValueError where no kernel multiplies such tiles: its own register wall is Hopper's."""
    if dtype in EVERY_KIND:
        slots = 2 if EVERY_KIND[dtype].packing else 0
        smallest = GemmConfig(block_m, block_n, 2, store_buffers=1, b_stages=slots, kind=dtype)
        return tile_of(smallest, hardware, dtype)
    block_k = SCALE_BLOCK // operand_bytes_of(dtype)
    return tile(block_m, block_n, block_k, dtype, hardware, stages=2, is_checked=False)


def _check(problem: GemmProblem, hardware: Hardware) -> None:
    check_sizes(m=problem.m, n=problem.n, k=problem.k, num_sms=problem.num_sms)
    if problem.num_sms > hardware.num_sms:
        raise ValueError(f"num_sms is {problem.num_sms}; {hardware.name} has {hardware.num_sms}")
