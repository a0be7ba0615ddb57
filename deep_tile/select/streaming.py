"""How to launch a kernel that is bound by memory: vectors, loads under way, threads and blocks, each with its reason.

Called by cast.py for the package's own casts, by measure.py, by users, and by docs/method.md. Pure functions of sizes
and a `Hardware`: no GPU, no torch. Invariant: what is returned can be launched, since threads and registers are within
the hardware's limits.

    derive_elementwise(elements, read_bytes, write_bytes, hardware=H200) -> Elementwise
    derive_reduction(rows, columns, read_bytes, write_bytes, hardware=H200) -> Reduction
"""

from math import ceil, gcd
from typing import NamedTuple

from deep_tile.select.hardware import H200, Hardware

WARP = 32
VECTOR_BYTES = 16
"""The widest load or store of one thread."""

OTHER_REGISTERS = 32
"""Registers of a streaming kernel beside its data: addresses, counters, scales, converted values."""

LOAD_FACTOR = 3.0
"""How much longer a read takes at full bandwidth than in an idle memory: queues. A rule of thumb, about 32 KB in flight
per SM on Hopper; too much costs registers only."""

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
    check_positive(elements=elements, read_bytes=read_bytes, warps=warps)
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
    check_positive(rows=rows, columns=columns, read_bytes=read_bytes)
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


def check_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{name} is {size}; sizes must be positive")
