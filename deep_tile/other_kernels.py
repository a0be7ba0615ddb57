"""The walls of the roofline for kernels that are no GEMM: launch parameters, each with its reason.

Called by quantize.py for the package's own casts, by users through `deep_tile.roofline`, and by docs/method.md. Pure
functions of sizes and a `Hardware`: no GPU, no torch. Invariant: what is returned can be launched (threads, registers
and shared memory are within the hardware's limits), or ValueError says which wall is hit and by how much.

    derive_elementwise(elements, read_bytes, write_bytes, hardware=H200) -> Elementwise
    derive_reduction(rows, columns, read_bytes, write_bytes, hardware=H200) -> Reduction
    derive_attention(head_dim, dtype="bf16", hardware=H200, ...) -> Attention
    derive_convolution(batch, height, width, channels, filters, kernel_size, ...) -> Convolution
"""

from math import ceil, gcd
from typing import NamedTuple

from deep_tile.config import ACCUMULATOR_LIMIT
from deep_tile.hardware import DTYPE_BYTES, H200, Hardware
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

WARP = 32
VECTOR_BYTES = 16
"""The widest load or store of one thread."""

OTHER_REGISTERS = 32
"""Registers of a streaming kernel beside its data: addresses, counters, scales, converted values."""

LOAD_FACTOR = 3.0
"""How much longer a read takes at full bandwidth than in an idle memory: queues. A rule of thumb, about 32 KB in flight
per SM on Hopper; too much costs registers only."""

PRODUCER_REGISTERS = 24
"""What the warpgroup that loads keeps; the math warpgroups share the rest, in steps of eight."""

ATTENTION_REGISTERS = 24
"""Of a math thread in attention, beside its accumulators: running maxima and sums, addresses."""

LINE_BYTES = 128
"""Neighbouring threads cover at least one cache line of a row with every load."""

UNROLLS = (1, 2, 4, 8)


class Elementwise(NamedTuple):
    """Launch parameters of a kernel that reads, computes and writes element by element, as a grid-stride loop.

    Attributes:
        vector_elements: elements of one load of one thread; their widest operand takes 16 bytes.
        unroll: such loads that a thread issues before it uses the first.
        items_per_thread: elements per thread and turn, `vector_elements * unroll`.
        warps: per block; the block has `32 * warps` threads.
        blocks_per_sm: that run at once.
        grid: thread blocks to launch.
        bytes_in_flight, bytes_needed: reads under way per SM, and what Little's law asks for.
        time_us: predicted, from launch to the last store.
        bound: `memory`, or `latency` where the problem is too small to fill the memory's pipeline.
        reasons: one sentence per decision.
    """

    vector_elements: int
    unroll: int
    items_per_thread: int
    warps: int
    blocks_per_sm: int
    grid: int
    bytes_in_flight: int
    bytes_needed: int
    time_us: float
    bound: str
    reasons: tuple[str, ...]


class Reduction(NamedTuple):
    """Launch parameters of a kernel that reduces each row, and may then write the row anew (softmax, norm, cast).

    Attributes:
        vector_elements: elements of one load of one thread.
        threads_per_row: threads that share one row; up to 32 are lanes of one warp and reduce by shuffles, more
            are the whole block and meet in shared memory.
        items_per_thread: elements of its row that a thread holds, or passes by, in all.
        unroll: loads that a thread issues before it uses the first.
        resident: whether the row stays in registers between reduction and writing; otherwise it is read twice.
        passes: reads of every row, 1 or 2.
        rows_per_block, warps, blocks_per_sm, grid: the block has `32 * warps` threads and walks over
            `rows_per_block` rows at a time.
        bytes_in_flight, bytes_needed, time_us, bound, reasons: as in `Elementwise`.
    """

    vector_elements: int
    threads_per_row: int
    items_per_thread: int
    unroll: int
    resident: bool
    passes: int
    rows_per_block: int
    warps: int
    blocks_per_sm: int
    grid: int
    bytes_in_flight: int
    bytes_needed: int
    time_us: float
    bound: str
    reasons: tuple[str, ...]


def derive_elementwise(
    elements: int, read_bytes: float, write_bytes: float, hardware: Hardware = H200, *, warps: int = 8
) -> Elementwise:
    """How to launch an element-wise kernel.

    Args:
        elements: of the output.
        read_bytes, write_bytes: per element, all inputs and all outputs; 2 and 1 for a cast from BF16 to FP8.
        hardware: of which GPU.
        warps: per block.

    Raises:
        ValueError: a size is not positive.
    """
    _check_positive(elements=elements, read_bytes=read_bytes, warps=warps)
    vector = _vector_elements(max(read_bytes, write_bytes))
    load_bytes = vector * read_bytes
    needed, reason = bytes_in_flight_needed(hardware)
    threads = WARP * warps
    for unroll in UNROLLS:
        registers = OTHER_REGISTERS + ceil(unroll * load_bytes / 4)
        blocks_per_sm = _blocks_per_sm(threads, registers, hardware)
        too_small = elements < 2 * unroll * vector * threads * blocks_per_sm * hardware.num_sms
        if too_small or blocks_per_sm * threads * unroll * load_bytes >= needed:
            break
    grid = min(hardware.num_sms * blocks_per_sm, ceil(elements / (vector * unroll * threads)))
    in_flight = round(_resident_threads(grid, blocks_per_sm, threads, hardware) * unroll * load_bytes)
    time_us, bound = _stream_time(elements * (read_bytes + write_bytes), in_flight, needed, hardware)
    reasons = (
        f"vector: {vector} elements, the widest access of a thread, {VECTOR_BYTES} bytes, for the wider side",
        reason,
        f"unroll: {unroll}, {unroll} x {load_bytes:.0f} bytes by {blocks_per_sm * threads} threads per SM are "
        f"{in_flight} bytes in flight",
        f"registers: about {registers} per thread, which {blocks_per_sm} blocks of {warps} warps per SM may have",
        f"grid: {grid} blocks of at most {hardware.num_sms * blocks_per_sm} that run at once",
    )
    items = vector * unroll
    return Elementwise(vector, unroll, items, warps, blocks_per_sm, grid, in_flight, needed, time_us, bound, reasons)


def derive_reduction(
    rows: int, columns: int, read_bytes: float, write_bytes: float, hardware: Hardware = H200
) -> Reduction:
    """How to launch a kernel that reduces rows and writes each anew: a cast with scales, softmax, LayerNorm.

    A "row" is what shares one result: 128 columns for a 1x128 cast (`rows = m * k / 128, columns = 128`), a whole block
    of 16384 for a 128x128 cast.

    Args:
        rows, columns: how many reductions, of how many elements each.
        read_bytes, write_bytes: per element, stored types; 2 and 1 for a cast from BF16 to FP8. write_bytes may be 0.
        hardware: of which GPU.

    Raises:
        ValueError: a size is not positive.
    """
    _check_positive(rows=rows, columns=columns, read_bytes=read_bytes)
    vector = gcd(_vector_elements(max(read_bytes, write_bytes)), columns)
    load_bytes = vector * read_bytes
    loads = columns // vector
    threads_per_row, resident, wall = _threads_per_row(loads, load_bytes, hardware)
    items = ceil(loads / threads_per_row) * vector
    threads = threads_per_row if threads_per_row > WARP else 8 * WARP
    needed, reason = bytes_in_flight_needed(hardware)
    own_loads = ceil(loads / threads_per_row)
    unroll = min(own_loads if resident else UNROLLS[-1], own_loads)
    registers = OTHER_REGISTERS + ceil(unroll * load_bytes / 4)
    blocks_per_sm = _blocks_per_sm(threads, registers, hardware)
    rows_per_block = threads // threads_per_row
    grid = min(hardware.num_sms * blocks_per_sm, ceil(rows / rows_per_block))
    in_flight = round(_resident_threads(grid, blocks_per_sm, threads, hardware) * unroll * load_bytes)
    passes = 1 if resident else 2
    time_us, bound = _stream_time(rows * columns * (passes * read_bytes + write_bytes), in_flight, needed, hardware)
    reduced = "shuffles reduce the row" if threads_per_row <= WARP else "warps reduce it and meet in shared memory"
    reasons = (
        f"vector: {vector} elements of {read_bytes:g} bytes; {loads} loads cover a row of {columns}",
        wall,
        f"threads: {threads_per_row} per row, {rows_per_block} rows per block of {threads // WARP} warps; {reduced}",
        reason,
        f"unroll: {unroll} loads of {load_bytes:.0f} bytes by {blocks_per_sm * threads} threads per SM put {in_flight} "
        "bytes in flight",
        f"grid: {grid} blocks for {ceil(rows / rows_per_block)} groups of rows",
    )
    return Reduction(
        *(vector, threads_per_row, items, unroll, resident, passes, rows_per_block, threads // WARP, blocks_per_sm),
        *(grid, in_flight, needed, time_us, bound, reasons),
    )


def bytes_in_flight_needed(hardware: Hardware) -> tuple[int, str]:
    """Little's law for HBM: bytes that each SM must have asked for, to keep the memory busy; and why."""
    latency_ns = LOAD_FACTOR * hardware.hbm_latency_ns
    needed = ceil(hardware.hbm_tbps * 1e3 * latency_ns / hardware.num_sms)
    text = (
        f"Little's law: {hardware.hbm_tbps:g} TB/s x {latency_ns:.0f} ns under load / {hardware.num_sms} SMs = "
        f"{needed} bytes in flight per SM"
    )
    return needed, text


def _threads_per_row(loads: int, load_bytes: float, hardware: Hardware) -> tuple[int, bool, str]:
    """The fewest threads, a power of two, that hold a row in few registers each; and whether they can."""
    for threads in (2**power for power in range(11)):
        if threads * load_bytes < LINE_BYTES and threads < loads:
            continue
        registers = ceil(ceil(loads / threads) * load_bytes / 4)
        budget = 16 if threads < WARP else 32 if threads < 1024 else hardware.registers // 1024 - OTHER_REGISTERS
        if registers <= budget:
            text = f"registers: the row stays, {registers} of {budget} registers a thread, and is read once"
            return threads, True, text
    text = (
        f"register wall: a row of {loads * load_bytes:.0f} bytes needs {registers} registers in each of 1024 threads, "
        f"{registers - budget} more than the {budget} to spare: it is read twice"
    )
    return 1024, False, text


def _vector_elements(bytes_per_element: float) -> int:
    """The largest power of two whose elements fit the widest access."""
    elements = 1
    while 2 * elements * bytes_per_element <= VECTOR_BYTES:
        elements *= 2
    return elements


def _blocks_per_sm(threads: int, registers: int, hardware: Hardware) -> int:
    """Registers are handed out by the eight per thread."""
    by_registers = hardware.registers // (ceil(registers / 8) * 8 * threads)
    return max(1, min(hardware.threads // threads, by_registers, hardware.blocks))


def _resident_threads(grid: int, blocks_per_sm: int, threads: int, hardware: Hardware) -> float:
    """Threads of an SM that have work, on the average."""
    return min(blocks_per_sm, grid / hardware.num_sms) * threads


def _stream_time(bytes_moved: float, in_flight: int, needed: int, hardware: Hardware) -> tuple[float, str]:
    """Launch, ramp and bytes, at the bandwidth that the bytes in flight sustain."""
    bandwidth = hardware.hbm_tbps * min(1.0, in_flight / needed)
    return hardware.stream_us + bytes_moved / bandwidth / 1e6, "memory" if in_flight >= needed else "latency"


def _check_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{name} is {size}; sizes must be positive")


# ---- attention and convolution: GEMMs whose operands have other shapes


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
    _check_positive(**sizes, kernel_size=kernel_size, stride=stride)
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
