"""The four limits on a tile: registers, shared-memory capacity, arithmetic intensity, latency. Pure functions, in the
named units.

Invariant: a wall is a number, its limit, and the arithmetic in words; it decides nothing else.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

WARPGROUP_THREADS = 128

SMEM_LIMIT_BYTES = 232_448
"""Shared memory one block may use on Hopper (227 KB)."""


class Wall(NamedTuple):
    """One wall seen from one tile.

    Attributes:
        name: `register`, `capacity`, `intensity (LEVEL)`, `latency` or `Little's law`.
        value, limit: in `unit`; the tile is on the good side while `holds`.
        unit: shared by both.
        holds: register and capacity: the tile is possible. Intensity: the tensor cores are the bound, not this level;
            for L2, where SMs share what they read. Latency: the stages hide it.
        reason: the arithmetic.
    """

    name: str
    value: float
    limit: float
    unit: str
    holds: bool
    reason: str


def walls_hit(walls: Iterable[Wall]) -> list[Wall]:
    """The walls that make a tile impossible."""
    return [wall for wall in walls if wall.name in ("register", "capacity") and not wall.holds]


def accumulator_registers(block_m: int, block_n: int, math_warpgroups: int) -> int:
    """32-bit accumulators per math thread: the tile spread over all math threads."""
    return ceil(block_m * block_n / (WARPGROUP_THREADS * math_warpgroups))


def register_wall(accumulators: int, temporaries: int, limit: int) -> Wall:
    """A math thread's accumulators and, with promotion, one K block's sums, against the registers it can spare."""
    needed = accumulators + temporaries
    if temporaries:
        sentence = f"{accumulators} accumulators and {temporaries} of one K block"
    else:
        sentence = f"{accumulators} accumulators"
    if needed > limit:
        reason = f"{sentence} exceed the {limit} registers a math thread can spare, by {needed - limit}"
    else:
        reason = f"{sentence} fit the {limit} registers a math thread can spare"
    return Wall("register", needed, limit, "registers per thread", needed <= limit, reason)


def operand_bytes(block_m: int, block_n: int, block_k: int, element_bytes: float) -> float:
    return (block_m + block_n) * block_k * element_bytes


def capacity_wall(smem_bytes: int, limit_bytes: int) -> Wall:
    """Stages, output tile, scales and barriers against a block's shared memory."""
    owner = "Hopper's" if limit_bytes == SMEM_LIMIT_BYTES else "the"
    if smem_bytes > limit_bytes:
        reason = (
            f"{smem_bytes} bytes of shared memory exceed {owner} {limit_bytes} bytes per block, by "
            f"{smem_bytes - limit_bytes}"
        )
    else:
        reason = f"{smem_bytes} of {limit_bytes} bytes of shared memory"
    return Wall("capacity", smem_bytes, limit_bytes, "bytes", smem_bytes <= limit_bytes, reason)


def stages_max(stage_bytes: float, fixed_bytes: float, limit_bytes: int) -> int:
    """Most stages that fit beside what a block needs once; 0 if not even one does."""
    return max(0, int((limit_bytes - fixed_bytes) // stage_bytes))


def product_flops(m: int, n: int, k: int) -> int:
    """A multiplication and an addition for each m, n and k."""
    return 2 * m * n * k


def intensity_wall(level: str, flops: float, bytes_moved: float, tflops: float, tbps: float) -> Wall:
    """FLOP per byte through one memory level against the FLOP per byte at which it keeps up.

    Judge the whole problem (each operand once) against HBM, one instruction against shared memory; for a tile against
    L2 there is `l2_wall`.
    """
    intensity, critical = flops / bytes_moved, tflops / tbps
    bound = "compute" if intensity >= critical else level
    reason = (
        f"{flops:.4g} FLOP / {bytes_moved:.4g} bytes = {intensity:.4g} FLOP per byte, and {level} keeps up from "
        f"{tflops:g} TFLOPS / {tbps:.4g} TB/s = {critical:.4g} on: bound by {bound}"
    )
    return Wall(f"intensity ({level})", intensity, critical, "FLOP per byte", intensity >= critical, reason)


def l2_wall(flops: float, bytes_moved: float, tflops: float, own_tbps: float, shared_tbps: float) -> Wall:
    """A tile's FLOP per byte against L2 bandwidth, which depends on how many SMs request the same byte.

    Below the wall L2 does not keep up even when all SMs request the same bytes. Between there and the point where it
    keeps up with no sharing, the result is an estimate: neighbouring tiles share part of their operands.

    `own_tbps` and `shared_tbps` are L2's to all SMs, without sharing and with every byte requested by all.
    """
    intensity, shared, own = flops / bytes_moved, tflops / shared_tbps, tflops / own_tbps
    bound = l2_bound(intensity, tflops, own_tbps, shared_tbps)
    reason = (
        f"{flops:.4g} FLOP / {bytes_moved:.4g} bytes = {intensity:.4g} FLOP per byte, and L2 keeps up from {tflops:g} "
        f"TFLOPS / {shared_tbps:.4g} TB/s = {shared:.4g} on where SMs share all bytes, from / {own_tbps:.4g} = "
        f"{own:.4g} on where none: bound by {bound}"
    )
    return Wall("intensity (L2)", intensity, shared, "FLOP per byte", intensity >= shared, reason)


def l2_bound(intensity: float, tflops: float, own_tbps: float, shared_tbps: float) -> str:
    """What a tile with this L2 intensity waits for, in words; rates as in `l2_wall`."""
    if intensity < tflops / shared_tbps:
        return "L2"
    return "compute if neighbours share enough" if intensity < tflops / own_tbps else "compute"


def latency_wall(stages: int, flops: float, sm_tflops: float, latency_us: float) -> Wall:
    """Stages against the count that keeps an SM's tensor cores busy during loads. `stages_min = ceil(latency / t_stage)
    + 1`: one being multiplied, the others loading for one latency.

    Args:
        flops: per stage. sm_tflops: per SM. latency_us: from a stage's request to its arrival.
    """
    stage_us = flops / sm_tflops / 1e6
    least = ceil(latency_us / stage_us) + 1
    reason = f"ceil({latency_us:.3g} us of latency / {stage_us:.3g} us of math per stage) + 1 = {least} stages at least"
    if stages < least:
        reason += f"; {stages} are {least - stages} too few"
    return Wall("latency", stages, least, "stages", stages >= least, reason)


def littles_law(bytes_in_flight: float, sm_gbps: float, latency_us: float) -> Wall:
    """Bytes that an SM has in flight against bandwidth x latency, the bytes it needs in flight for its share."""
    needed = sm_gbps * 1e3 * latency_us
    reason = f"{bytes_in_flight:.0f} bytes in flight per SM; {sm_gbps:.4g} GB/s x {latency_us:.3g} us need {needed:.0f}"
    return Wall("Little's law", bytes_in_flight, needed, "bytes in flight", bytes_in_flight >= needed, reason)
