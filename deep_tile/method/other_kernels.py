"""The walls of the roofline for products whose operands have other shapes: attention and convolution.

Called by users through `deep_tile.method.roofline`, and by docs/method.md. Pure functions of sizes and a `Hardware`: no
GPU, no torch. Invariant: what is returned fits registers and shared memory, or ValueError says which wall is hit and
by how much.

    derive_attention(head_dim, dtype="bf16", hardware=H200, ...) -> Attention
    derive_convolution(batch, height, width, channels, filters, kernel_size, ...) -> Convolution
"""

from math import ceil
from typing import NamedTuple

from deep_tile.config import ACCUMULATOR_LIMIT
from deep_tile.select.hardware import DTYPE_BYTES, H200, Hardware
from deep_tile.select.streaming import check_positive
from deep_tile.walls import (
    WARPGROUP_THREADS,
    Wall,
    accumulator_registers,
    capacity_wall,
    l2_wall,
    latency_wall,
    product_flops,
    register_wall,
    stages_max,
)

PRODUCER_REGISTERS = 24
"""What the warpgroup that loads keeps; the math warpgroups share the rest, in steps of eight."""

ATTENTION_REGISTERS = 24
"""Of a math thread in attention, beside its accumulators: running maxima and sums, addresses."""


class Attention(NamedTuple):
    """Tile of a fused attention kernel: a block of queries against a stream of blocks of keys and values.

    Attributes:
        block_q, block_kv: rows of Q, and of K and V, that are multiplied at a time (Br and Bc).
        head_dim: elements of one head.
        math_warpgroups: that share the queries, 64 rows or more each.
        output_registers, score_registers: per math thread, the output and one block of scores, both FP32.
        stages: blocks of K and V in shared memory.
        smem_bytes: Q, and the stages of K and V.
        intensity: FLOP per byte of K and V that come from L2.
        walls, reasons: the walls of this tile, and one sentence per decision.
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


class Convolution(NamedTuple):
    """Tile of a convolution as an implicit GEMM: m = batch x output pixels, n = filters, k = window x channels.

    Attributes:
        m, n, k: of the GEMM.
        block_m, block_n, block_k: its tile; block_k elements are channels of one position of the window.
        tile_height, tile_width: the block_m output pixels.
        input_height, input_width: input pixels that they read, the halo included.
        halo: share of these that a neighbouring tile reads too.
        reuse: how often a tile uses an input pixel that it loads once.
        intensity_gathered, intensity_halo: FLOP per byte of a tile that loads the input anew for every position of the
            window, and of one that keeps it with its halo.
        smem_bytes: of that input for block_k channels, and two stages of filters.
        walls, reasons: the walls of this tile, and one sentence per decision.
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


def derive_attention(
    head_dim: int, dtype: str = "bf16", hardware: Hardware = H200, *, block_q: int | None = None
) -> Attention:
    """Which blocks of queries and of keys to multiply at a time.

    The output of a query stays in registers while the scores of a block of keys come and go, so that both share the
    register file; what is left of shared memory beside Q decides how many keys a stage holds.

    Args:
        head_dim: elements of one head, a multiple of 16.
        dtype: of Q, K and V.
        hardware: of which GPU.
        block_q: rows of queries, a multiple of 64; by default the one of 64, 128 and 192 that allows the largest block
            of scores, since every block costs a softmax's reductions and barriers.

    Raises:
        ValueError: head_dim is no positive multiple of 16, or no tile passes the walls: which one is hit, by how much.
    """
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim is {head_dim}; WGMMA needs a positive multiple of 16")
    hardware.peak(dtype)
    blocks = [(rows, keys) for rows in ((block_q,) if block_q else (64, 128, 192)) for keys in range(16, 177, 16)]
    tiles = [_attention_tile(*block, head_dim, dtype, hardware) for block in blocks]
    possible = [tile for tile in tiles if all(wall.holds for wall in tile.walls[:2])]
    if not possible:
        hit = "; ".join(wall.reason for wall in tiles[0].walls[:2] if not wall.holds)
        raise ValueError(f"head_dim is {head_dim}: {tiles[0].block_q} queries by 16 keys hit a wall; {hit}")
    return max(possible, key=lambda tile: (tile.block_q * tile.block_kv, tile.block_q))


def _attention_tile(block_q: int, block_kv: int, head_dim: int, dtype: str, hardware: Hardware) -> Attention:
    element_bytes = DTYPE_BYTES[dtype]
    warpgroups = max(1, block_q // 64)
    output = accumulator_registers(block_q, head_dim, warpgroups)
    scores = accumulator_registers(block_q, block_kv, warpgroups)
    # Scores are held in FP32 and, for the second product, in the operands' type.
    packed = ceil(scores * element_bytes / 4)
    all_threads = hardware.registers // WARPGROUP_THREADS - PRODUCER_REGISTERS
    limit = min(hardware.registers_per_thread, all_threads // warpgroups // 8 * 8) - ATTENTION_REGISTERS
    q_bytes = block_q * head_dim * element_bytes
    stage_bytes = 2 * block_kv * head_dim * element_bytes
    stages = max(2, min(4, stages_max(stage_bytes, q_bytes, hardware.smem_bytes)))
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
    return Attention(*sizes, walls, reasons)


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
    """How to tile a convolution as an implicit GEMM, and what the halo costs.

    Args:
        batch, height, width, channels: of the input, channels innermost; padded so that stride 1 keeps its size.
        filters: output channels.
        kernel_size: rows and columns of the window.
        stride: of the window.
        dtype: of input and filters.
        hardware: of which GPU.

    Raises:
        ValueError: a size is not positive, or the tile hits a wall.
    """
    sizes = {"batch": batch, "height": height, "width": width, "channels": channels, "filters": filters}
    check_positive(**sizes, kernel_size=kernel_size, stride=stride)
    tflops, element_bytes = hardware.tflops(dtype), DTYPE_BYTES[dtype]
    out_height, out_width = ceil(height / stride), ceil(width / stride)
    m, n, k = batch * out_height * out_width, filters, kernel_size**2 * channels
    block_m, block_n, block_k = 128, min(256, ceil(filters / 16) * 16), 128 // element_bytes
    tile_width = min(out_width, 16)
    tile_height = max(1, block_m // tile_width)
    input_height, input_width = ((size - 1) * stride + kernel_size for size in (tile_height, tile_width))
    own = tile_height * tile_width * stride**2
    pixels = input_height * input_width
    flops = product_flops(block_m, block_n, kernel_size**2 * block_k)
    filter_bytes = kernel_size**2 * block_n * block_k * element_bytes
    gathered = kernel_size**2 * block_m * block_k * element_bytes + filter_bytes
    kept = pixels * block_k * element_bytes + filter_bytes
    smem_bytes = (pixels + 2 * block_n) * block_k * element_bytes
    walls = (
        register_wall(accumulator_registers(block_m, block_n, 2), 0, ACCUMULATOR_LIMIT),
        capacity_wall(smem_bytes, hardware.smem_bytes),
        l2_wall(flops, gathered, tflops, hardware.l2_tbps, hardware.l2_shared_tbps),
        l2_wall(flops, kept, tflops, hardware.l2_tbps, hardware.l2_shared_tbps),
    )
    hit = [wall.reason for wall in walls[:2] if not wall.holds]
    if hit:
        raise ValueError(f"window {kernel_size}x{kernel_size}, stride {stride}: {'; '.join(hit)}")
    halo, reuse = max(0.0, 1 - own / pixels), kernel_size**2 * block_m / pixels
    reasons = (
        f"implicit GEMM: m = {batch} x {out_height} x {out_width} = {m} pixels, n = {n} filters, "
        f"k = {kernel_size} x {kernel_size} x {channels} = {k}",
        f"halo: {tile_height} x {tile_width} outputs read {input_height} x {input_width} inputs, {halo:.0%} of them "
        f"shared with neighbours; each is used {reuse:.1f} times",
        f"gathered anew for every position: {walls[2].reason}",
        f"kept with its halo: {walls[3].reason}",
    )
    return Convolution(
        *(m, n, k, block_m, block_n, block_k, tile_height, tile_width, input_height, input_width, halo, reuse),
        *(walls[2].value, walls[3].value, smem_bytes, walls, reasons),
    )
