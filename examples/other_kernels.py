"""The roofline's walls for attention and convolution.

Pure functions on sizes and a `Hardware`: no GPU, no torch. Invariant: a derivation returns its first candidate, which
fits registers and shared memory, or raises ValueError with the wall that is hit and by how much.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from deep_tile.config import MMA_M
from deep_tile.select.hardware import DTYPE_BYTES, H200, Hardware
from deep_tile.select.streaming import check_positive
from deep_tile.walls import (
    Wall,
    accumulator_registers,
    capacity_wall,
    intensity_wall,
    l2_bound,
    l2_wall,
    latency_wall,
    product_flops,
    register_wall,
    stages_max,
    walls_hit,
)

ATTENTION_REGISTERS = 24
"""Registers per attention math thread beside accumulators: running maxima and sums, addresses."""

BLOCK_Q = (64, 128, 192)
BLOCK_KV = tuple(range(16, 177, 16))
"""Candidate key block sizes for attention."""

BLOCK_M = (64, 128, 256)
BLOCK_N = (32, 64, 128, 192, 256)
"""Candidate tile sizes for convolution: pixels and filters."""

TILE_WIDTH = 16
"""Most output pixels per row in a convolution tile."""


@dataclass(frozen=True)
class Attention:
    """A fused attention tile: one query block against a stream of key and value blocks.

    Attributes:
        block_q, block_kv: rows of Q, and of K and V, multiplied at a time (Br and Bc).
        head_dim: elements per head.
        math_warpgroups: that share the queries, 64 rows or more each.
        output_registers, score_registers: per math thread, output and one score block, both FP32.
        stages: K and V blocks in shared memory.
        smem_bytes: Q plus K and V stages.
        intensity: FLOP per byte of K and V from L2.
        walls, reasons: this tile's walls, and one sentence per decision.
        registers: per math thread, for output, scores, and scores as operands.
        stages_min, stages_max: by latency and by capacity.
        bound: `compute`, `L2` or, in between, `compute if neighbours share enough`.
    """

    block_q: int
    block_kv: int
    head_dim: int
    math_warpgroups: int
    output_registers: int
    score_registers: int
    stages: int
    smem_bytes: int
    intensity: float
    walls: tuple[Wall, ...]
    reasons: tuple[str, ...]
    registers: int
    stages_min: int
    stages_max: int
    bound: str


@dataclass(frozen=True)
class Convolution:
    """A convolution tile as an implicit GEMM: m = batch x output pixels, n = filters, k = window x channels.

    Attributes:
        m, n, k: the GEMM's sizes.
        block_m, block_n, block_k: its tile; block_k elements are channels at one window position.
        tile_height, tile_width: output pixels per image, at most block_m over all `images`.
        input_height, input_width: input pixels that they read, the halo included.
        halo: share of input pixels that a neighbouring tile also reads.
        reuse: how often a tile uses an input pixel that it loads once.
        intensity_gathered, intensity_halo: FLOP per byte if the tile reloads the input for every window position, and
            if it keeps the input with its halo.
        smem_bytes: that input for block_k channels, plus filter stages.
        walls, reasons: this tile's walls, and one sentence per decision.
        registers: accumulators per math thread.
        images: images per tile; several if they are small.
        stages: filter stages, block_n x block_k for one window position; at least two, or as many as latency needs.
        stages_min, stages_max: by latency and by capacity.
        tiles, waves: in all, and that the busiest SM works through.
        time_us: estimated. The input is kept with its halo. L2 bandwidth is taken without sharing between SMs, which
            favours large tiles.
        bound: the longest of `compute`, `shared memory` (limits narrow instructions), `L2` and `HBM`.
    """

    m: int
    n: int
    k: int
    block_m: int
    block_n: int
    block_k: int
    tile_height: int
    tile_width: int
    input_height: int
    input_width: int
    halo: float
    reuse: float
    intensity_gathered: float
    intensity_halo: float
    smem_bytes: int
    walls: tuple[Wall, ...]
    reasons: tuple[str, ...]
    registers: int
    images: int
    stages: int
    stages_min: int
    stages_max: int
    tiles: int
    waves: int
    time_us: float
    bound: str

    @property
    def intensity(self) -> float:
        """FLOP per L2 byte with the input kept."""
        return self.intensity_halo


def derive_attention(
    head_dim: int, dtype: str = "bf16", hardware: Hardware = H200, *, block_q: int | None = None
) -> Attention:
    """Choose query and key block sizes.

    A query's output stays in registers while score blocks come and go, so both share the register file; shared memory
    beside Q decides how many keys a stage holds.

    Args:
        head_dim: elements per head, a multiple of 16.
        dtype: Q's, K's and V's.
        block_q: query rows, a multiple of 64; by default whichever of 64, 128 and 192 allows the largest score block,
            since every block costs a softmax's reductions and barriers.

    Raises:
        ValueError: head_dim is not a positive multiple of 16, block_q not a multiple of 64, or no tile passes the
            walls: which one is hit, by how much.
    """
    tiles = attention_candidates(head_dim, dtype, hardware, block_q=block_q)
    if not walls_hit(tiles[0].walls):
        return tiles[0]
    smallest = min(tiles, key=lambda tile: (tile.block_q, tile.block_kv))
    hit = "; ".join(wall.reason for wall in walls_hit(smallest.walls))
    raise ValueError(
        f"head_dim is {head_dim}: {smallest.block_q} queries by {smallest.block_kv} keys hit a wall; {hit}"
    )


def attention_candidates(
    head_dim: int, dtype: str = "bf16", hardware: Hardware = H200, *, block_q: int | None = None
) -> list[Attention]:
    """Candidates for `derive_attention`: first tiles that pass the register and capacity walls, largest score block
    first, then tiles that hit one, which are no error here."""
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim is {head_dim}; WGMMA needs a positive multiple of 16")
    if block_q is not None and (block_q <= 0 or block_q % MMA_M):
        raise ValueError(f"block_q is {block_q}; WGMMA needs a positive multiple of {MMA_M}")
    hardware.peak(dtype)
    blocks = [(rows, keys) for rows in ((block_q,) if block_q else BLOCK_Q) for keys in BLOCK_KV]
    tiles = [_attention_tile(*block, head_dim, dtype, hardware) for block in blocks]
    return sorted(tiles, key=lambda tile: (bool(walls_hit(tile.walls)), -tile.block_q * tile.block_kv, -tile.block_q))


def _attention_tile(block_q: int, block_kv: int, head_dim: int, dtype: str, hardware: Hardware) -> Attention:
    element_bytes = DTYPE_BYTES[dtype]
    warpgroups = block_q // MMA_M
    output = accumulator_registers(block_q, head_dim, warpgroups)
    scores = accumulator_registers(block_q, block_kv, warpgroups)
    # Scores are held in FP32 and, for the second product, in the operands' type.
    packed = ceil(scores * element_bytes / 4)
    limit = max(0, hardware.math_registers(warpgroups) - ATTENTION_REGISTERS)
    q_bytes = block_q * head_dim * element_bytes
    stage_bytes = 2 * block_kv * head_dim * element_bytes
    most = stages_max(stage_bytes, q_bytes, hardware.smem_bytes)
    stages = max(2, min(4, most))
    smem_bytes = q_bytes + stages * stage_bytes
    flops = 2 * product_flops(block_q, block_kv, head_dim)
    tflops = hardware.tflops(dtype)
    walls = (
        register_wall(output + packed, scores, limit),
        capacity_wall(smem_bytes, hardware.smem_bytes),
        l2_wall(flops, stage_bytes, tflops, hardware.l2_tbps, hardware.l2_shared_tbps),
        latency_wall(stages, flops, tflops / hardware.num_sms, hardware.hbm_latency_ns / 1e3),
    )
    reasons = (
        f"output: {block_q} x {head_dim} FP32 over {warpgroups} warpgroups are {output} registers a thread",
        f"scores: {block_q} x {block_kv} FP32 are {scores}, and {packed} more as operands of the second product",
        *(wall.reason for wall in walls),
    )
    intensity = walls[2].value
    sizes = (block_q, block_kv, head_dim, warpgroups, output, scores, stages, smem_bytes, intensity)
    bound = l2_bound(intensity, tflops, hardware.l2_tbps, hardware.l2_shared_tbps)
    registers, least = output + packed + scores, round(walls[3].limit)
    return Attention(*sizes, walls, reasons, registers, least, most, bound)


def derive_convolution(
    batch: int,
    height: int,
    width: int,
    channels: int,
    filters: int,
    kernel_size: int = 3,
    stride: int = 1,
    dtype: str = "bf16",
    hardware: Hardware = H200,
) -> Convolution:
    """Choose a convolution's tile as an implicit GEMM, and the halo's cost.

    Args:
        batch, height, width, channels: the input's, channels innermost; padded so that stride 1 keeps its size.
        filters: output channels.
        kernel_size, stride: the window's rows and columns, and its steps.
        dtype: input's and filters'.

    Raises:
        ValueError: a size is not positive, or every tile hits a wall: which one the smallest hits, by how much.
    """
    sizes = (batch, height, width, channels, filters, kernel_size, stride)
    tiles = convolution_candidates(*sizes, dtype, hardware)
    if not walls_hit(tiles[0].walls):
        return tiles[0]
    smallest = min(tiles, key=lambda tile: (tile.block_m, tile.block_n))
    hit = "; ".join(wall.reason for wall in walls_hit(smallest.walls))
    what = f"window {kernel_size}x{kernel_size}, stride {stride}"
    raise ValueError(f"{what}: {smallest.block_m} pixels by {smallest.block_n} filters hit a wall; {hit}")


def convolution_candidates(
    batch: int,
    height: int,
    width: int,
    channels: int,
    filters: int,
    kernel_size: int = 3,
    stride: int = 1,
    dtype: str = "bf16",
    hardware: Hardware = H200,
) -> list[Convolution]:
    """Candidates for `derive_convolution`: first tiles that pass the register and capacity walls, by estimated time,
    then by FLOP per L2 byte; then tiles that hit one, which are no error here."""
    sizes = {"batch": batch, "height": height, "width": width, "channels": channels, "filters": filters}
    check_positive(**sizes, kernel_size=kernel_size, stride=stride)
    hardware.peak(dtype)
    layer = _Layer(batch, height, width, channels, filters, kernel_size, stride)
    columns = sorted({min(block_n, ceil(filters / 16) * 16) for block_n in BLOCK_N})
    tiles = [_convolution_tile(layer, block_m, block_n, dtype, hardware) for block_m in BLOCK_M for block_n in columns]
    return sorted(tiles, key=lambda tile: (bool(walls_hit(tile.walls)), tile.time_us, -tile.intensity, -tile.block_n))


class _Layer(NamedTuple):
    batch: int
    height: int
    width: int
    channels: int
    filters: int
    kernel_size: int
    stride: int

    @property
    def output_size(self) -> tuple[int, int]:
        return ceil(self.height / self.stride), ceil(self.width / self.stride)

    @property
    def window(self) -> int:
        return self.kernel_size**2

    def elements(self) -> int:
        """Of input, filters and output."""
        out_height, out_width = self.output_size
        pixels = self.height * self.width * self.channels + out_height * out_width * self.filters
        return self.batch * pixels + self.window * self.channels * self.filters


def _convolution_tile(layer: _Layer, block_m: int, block_n: int, dtype: str, hardware: Hardware) -> Convolution:
    tflops, element_bytes = hardware.tflops(dtype), DTYPE_BYTES[dtype]
    batch, kernel_size, stride, window = layer.batch, layer.kernel_size, layer.stride, layer.window
    out_height, out_width = layer.output_size
    m, n, k = batch * out_height * out_width, layer.filters, window * layer.channels
    warpgroups, block_k = min(2, block_m // MMA_M), 128 // element_bytes
    tile_width = min(out_width, TILE_WIDTH)
    images = max(1, min(batch, block_m // (out_height * tile_width)))
    tile_height = max(1, min(out_height, block_m // tile_width))
    input_height, input_width = ((size - 1) * stride + kernel_size for size in (tile_height, tile_width))
    own = images * tile_height * tile_width * stride**2
    pixels = images * input_height * input_width
    stage_flops = product_flops(block_m, block_n, block_k)
    stage_bytes, input_bytes = block_n * block_k * element_bytes, pixels * block_k * element_bytes
    gathered = window * (block_m * block_k * element_bytes + stage_bytes)
    kept = input_bytes + window * stage_bytes
    instruction = (product_flops(MMA_M, block_n, block_k), (MMA_M + block_n) * block_k * element_bytes)
    registers = accumulator_registers(block_m, block_n, warpgroups)
    most = stages_max(stage_bytes, input_bytes, hardware.smem_bytes)
    latency = (stage_flops, tflops / hardware.num_sms, hardware.hbm_latency_ns / 1e3)
    least = round(latency_wall(0, *latency).limit)
    stages = max(2, min(least, most))
    smem_bytes = input_bytes + stages * stage_bytes
    walls = (
        register_wall(registers, 0, hardware.accumulator_limit(warpgroups)),
        capacity_wall(smem_bytes, hardware.smem_bytes),
        l2_wall(window * stage_flops, gathered, tflops, hardware.l2_tbps, hardware.l2_shared_tbps),
        l2_wall(window * stage_flops, kept, tflops, hardware.l2_tbps, hardware.l2_shared_tbps),
        intensity_wall("shared memory", *instruction, tflops, hardware.smem_tbps),
        latency_wall(stages, *latency),
    )
    halo, reuse = max(0.0, 1 - own / pixels), window * block_m / pixels
    rows_of_tiles = ceil(batch / images) * ceil(out_height / tile_height) * ceil(out_width / tile_width)
    tiles = rows_of_tiles * ceil(n / block_n)
    waves = ceil(tiles / hardware.num_sms)
    turns = waves * ceil(layer.channels / block_k) * hardware.num_sms
    flops = turns * window * stage_flops
    times = {
        "compute": flops / tflops / 1e6,
        "shared memory": flops / walls[4].value / hardware.smem_tbps / 1e6,
        "L2": turns * kept / hardware.l2_tbps / 1e6,
        "HBM": layer.elements() * element_bytes / hardware.hbm_tbps / 1e6,
    }
    bound = max(times, key=times.get)
    reasons = (
        f"implicit GEMM: m = {batch} x {out_height} x {out_width} = {m} pixels, n = {n} filters, "
        f"k = {kernel_size} x {kernel_size} x {layer.channels} = {k}",
        f"halo: {tile_height} x {tile_width} outputs read {input_height} x {input_width} inputs, {halo:.0%} of them "
        f"shared with neighbours; each is used {reuse:.1f} times",
        f"gathered anew for every position: {walls[2].reason}",
        f"kept with its halo: {walls[3].reason}",
        f"waves: {tiles} tiles over {hardware.num_sms} SMs are {waves}",
    )
    return Convolution(
        *(m, n, k, block_m, block_n, block_k, tile_height, tile_width, input_height, input_width, halo, reuse),
        *(walls[2].value, walls[3].value, smem_bytes, walls, reasons, registers, images, stages, least, most),
        *(tiles, waves, hardware.launch_us + times[bound], bound),
    )
