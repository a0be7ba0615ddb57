"""How to launch a kernel that is bound by memory: vectors, loads under way, threads and blocks, each with its reason.

Pure functions on sizes and a `Hardware`: no GPU, no torch. Invariant: a derivation's result can be launched: threads,
registers and shared memory are within limits; candidates tell by their walls.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any, NamedTuple

from deep_tile.select.hardware import H200, Hardware
from deep_tile.walls import Wall, capacity_wall, intensity_wall, littles_law, walls_hit

WARP = 32
VECTOR_BYTES = 16
"""The widest load or store per thread."""

OTHER_REGISTERS = 32
"""A streaming kernel's registers beside its data: addresses, counters, scales, converted values."""

LOAD_FACTOR = 3.0
"""How much longer a read takes at full bandwidth than in an idle memory: queues. A rule of thumb, about 32 KB in flight
per SM on Hopper; too much only costs registers."""

SUM_BYTES = 4
"""Bytes that a warp passes to its block's other warps."""

LINE_BYTES = 128
"""Neighbouring threads cover at least one cache line per row and load."""

UNROLLS = (1, 2, 4, 8)

THREADS_PER_ROW = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class Streaming:
    """Launch parameters for a kernel that is bound by memory, as a grid-stride loop.

    Attributes:
        vector_elements: elements per load and thread; the widest operand's take 16 bytes.
        unroll: such loads that a thread issues before it uses the first.
        items_per_thread: elements per thread and turn, or all that a thread has of a row.
        warps: per block; the block has `32 * warps` threads.
        blocks_per_sm: that run at once.
        grid: thread blocks to launch.
        bytes_in_flight, bytes_needed: reads in flight per SM, and the demand by Little's law.
        time_us: predicted, from launch to the last store.
        bound: `memory`, or `latency` where too little is under way to fill the memory's pipeline.
        reasons: one sentence per decision.
        registers: per thread, in steps of eight.
        smem_bytes: per block.
        stages_min, stages_max: loads in flight per thread, in place of a GEMM's stages: the least that keep memory busy
            with this many threads, and the most that fit in registers.
        intensity: FLOP per HBM byte, one FLOP per element.
        walls: register, capacity, intensity against HBM, Little's law.
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
    registers: int
    smem_bytes: int
    stages_min: int
    stages_max: int
    intensity: float
    walls: tuple[Wall, ...]

    @property
    def stages(self) -> int:
        return self.unroll


@dataclass(frozen=True)
class Elementwise(Streaming):
    """Launch parameters for an element-wise kernel."""


@dataclass(frozen=True)
class Reduction(Streaming):
    """Launch parameters for a kernel that reduces each row and may rewrite it (softmax, norm, cast).

    Attributes:
        threads_per_row: threads that share a row; up to 32 lanes of one warp reduce by shuffles, more are the whole
            block and reduce in shared memory, which holds their warps' sums.
        resident: whether the row stays in registers between reduction and writing; otherwise it is read twice.
        passes: reads per row, 1 or 2.
        rows_per_block: rows that a block walks over at a time.
    """

    threads_per_row: int
    resident: bool
    passes: int
    rows_per_block: int


def derive_elementwise(
    elements: int, read_bytes: float, write_bytes: float, hardware: Hardware = H200, *, warps: int = 8
) -> Elementwise:
    """How to launch an element-wise kernel.

    Args:
        elements: output elements.
        read_bytes, write_bytes: per element, all inputs and all outputs; 2 and 1 for a cast from BF16 to FP8.
        hardware: the GPU.
        warps: per block.

    Raises:
        ValueError: a size is not positive, or no such kernel can be launched: which wall it hits, and by how much.
    """
    candidates = elementwise_candidates(elements, read_bytes, write_bytes, hardware, warps=warps)
    possible = [launch for launch in candidates if not walls_hit(launch.walls)]
    if not possible:
        raise ValueError(f"{warps} warps per block: {walls_hit(candidates[0].walls)[0].reason}")
    enough = (
        launch for launch in possible if launch.unroll >= launch.stages_min or _is_small(elements, launch, hardware)
    )
    return next(enough, possible[-1])


def elementwise_candidates(
    elements: int, read_bytes: float, write_bytes: float, hardware: Hardware = H200, *, warps: int = 8
) -> list[Elementwise]:
    """Candidates for `derive_elementwise`, one per entry in `UNROLLS`. The first is chosen that has enough bytes in
    flight, or with twice as many loads would leave SMs idle. Raises ValueError for a size that is not positive."""
    check_positive(elements=elements, read_bytes=read_bytes, warps=warps)
    check_not_negative(write_bytes=write_bytes)
    return [_elementwise(elements, read_bytes, write_bytes, hardware, warps, unroll) for unroll in UNROLLS]


def _is_small(elements: int, launch: Elementwise, hardware: Hardware) -> bool:
    """Whether doubling loads per thread would leave some threads idle."""
    threads = WARP * launch.warps * launch.blocks_per_sm * hardware.num_sms
    return elements < 2 * launch.items_per_thread * threads


def _elementwise(
    elements: int, read_bytes: float, write_bytes: float, hardware: Hardware, warps: int, unroll: int
) -> Elementwise:
    vector = _vector_elements(max(read_bytes, write_bytes))
    load_bytes, threads, items = vector * read_bytes, WARP * warps, vector * unroll
    bytes_moved, blocks = elements * (read_bytes + write_bytes), ceil(elements / (items * threads))
    made = _launch(threads, unroll, load_bytes, blocks, elements, bytes_moved, 0, hardware)
    blocks_per_sm, in_flight = made["blocks_per_sm"], made["bytes_in_flight"]
    reasons = (
        f"vector: {vector} elements, the widest access of a thread, {VECTOR_BYTES} bytes, for the wider side",
        bytes_in_flight_needed(hardware)[1],
        f"unroll: {unroll}, {unroll} x {load_bytes:.0f} bytes by {blocks_per_sm * threads} threads per SM are "
        f"{in_flight} bytes in flight",
        f"registers: about {_registers(unroll, load_bytes)} per thread, which {blocks_per_sm} blocks of {warps} warps "
        "per SM may have",
        f"grid: {made['grid']} blocks of at most {hardware.num_sms * blocks_per_sm} that run at once",
    )
    return Elementwise(vector_elements=vector, items_per_thread=items, reasons=reasons, **made)


def derive_reduction(
    rows: int, columns: int, read_bytes: float, write_bytes: float, hardware: Hardware = H200
) -> Reduction:
    """How to launch a kernel that reduces rows and writes each anew: a cast with scales, softmax, LayerNorm.

    A "row" is a set of elements with one result: 128 columns for a 1x128 cast (`rows = m * k / 128, columns = 128`), a
    block of 16384 for a 128x128 cast.

    Args:
        rows, columns: number of reductions, elements in each.
        read_bytes, write_bytes: per element, stored types; 2 and 1 for a cast from BF16 to FP8. write_bytes may be 0.
        hardware: the GPU.

    Raises:
        ValueError: a size is not positive, or no such kernel can be launched: which wall it hits, and by how much.
    """
    widest = None
    for launch in _reductions(rows, columns, read_bytes, write_bytes, hardware):
        if not walls_hit(launch.walls):
            widest = launch
            if launch.resident:
                break
    if widest is None:
        raise ValueError(f"{launch.warps} warps per block: {walls_hit(launch.walls)[0].reason}")
    return widest


def reduction_candidates(
    rows: int, columns: int, read_bytes: float, write_bytes: float, hardware: Hardware = H200
) -> list[Reduction]:
    """Candidates for `derive_reduction`: a row shared by ever more threads, until each has one load. The first is
    chosen that keeps its row in registers, else the last. Raises ValueError for a size that is not positive."""
    return list(_reductions(rows, columns, read_bytes, write_bytes, hardware))


def _reductions(
    rows: int, columns: int, read_bytes: float, write_bytes: float, hardware: Hardware
) -> Iterator[Reduction]:
    check_positive(rows=rows, columns=columns, read_bytes=read_bytes)
    check_not_negative(write_bytes=write_bytes)
    vector = gcd(_vector_elements(max(read_bytes, write_bytes)), columns)
    loads, load_bytes = columns // vector, vector * read_bytes
    for threads in THREADS_PER_ROW:
        if threads * load_bytes < LINE_BYTES and threads < min(loads, THREADS_PER_ROW[-1]):
            continue
        launch = _reduction(rows, columns, read_bytes, write_bytes, hardware, vector, threads)
        yield launch
        if launch.resident and threads >= loads:
            return


def _reduction(
    rows: int,
    columns: int,
    read_bytes: float,
    write_bytes: float,
    hardware: Hardware,
    vector: int,
    threads_per_row: int,
) -> Reduction:
    load_bytes, loads = vector * read_bytes, columns // vector
    resident, wall = _row_in_registers(loads, load_bytes, threads_per_row, hardware)
    own_loads, passes = ceil(loads / threads_per_row), 1 if resident else 2
    across_warps = threads_per_row > WARP
    threads = threads_per_row if across_warps else 8 * WARP
    rows_per_block = threads // threads_per_row
    unroll, blocks = min(own_loads if resident else UNROLLS[-1], own_loads), ceil(rows / rows_per_block)
    bytes_moved = rows * columns * (passes * read_bytes + write_bytes)
    smem_bytes = SUM_BYTES * threads // WARP if across_warps else 0
    made = _launch(threads, unroll, load_bytes, blocks, rows * columns, bytes_moved, smem_bytes, hardware)
    reduced = "warps reduce it and meet in shared memory" if across_warps else "shuffles reduce the row"
    reasons = (
        f"vector: {vector} elements of {read_bytes:g} bytes; {loads} loads cover a row of {columns}",
        wall,
        f"threads: {threads_per_row} per row, {rows_per_block} rows per block of {threads // WARP} warps; {reduced}",
        bytes_in_flight_needed(hardware)[1],
        f"unroll: {unroll} loads of {load_bytes:.0f} bytes by {made['blocks_per_sm'] * threads} threads per SM put "
        f"{made['bytes_in_flight']} bytes in flight",
        f"grid: {made['grid']} blocks for {blocks} groups of rows",
    )
    return Reduction(
        vector_elements=vector,
        threads_per_row=threads_per_row,
        items_per_thread=own_loads * vector,
        resident=resident,
        passes=passes,
        rows_per_block=rows_per_block,
        reasons=reasons,
        **made,
    )


def _launch(
    threads: int,
    unroll: int,
    load_bytes: float,
    blocks: int,
    elements: int,
    bytes_moved: float,
    smem_bytes: int,
    hardware: Hardware,
) -> dict[str, Any]:
    """The fields of a launch that follow from its threads and loads; `blocks` of work are to be done."""
    registers = _registers(unroll, load_bytes)
    handed_out = ceil(registers / 8) * 8
    by_registers = hardware.registers // (handed_out * threads)
    blocks_per_sm = max(1, min(hardware.threads // threads, by_registers, hardware.blocks))
    grid = min(hardware.num_sms * blocks_per_sm, blocks)
    working = min(blocks_per_sm, grid / hardware.num_sms) * threads  # in the mean, per SM
    in_flight, (needed, _) = max(1, round(working * unroll * load_bytes)), bytes_in_flight_needed(hardware)
    bandwidth = hardware.hbm_tbps * min(1.0, in_flight / needed)
    most_registers = min(hardware.registers_per_thread, hardware.registers // threads // 8 * 8)
    latency_us = LOAD_FACTOR * hardware.hbm_latency_ns / 1e3
    return {
        "unroll": unroll,
        "warps": threads // WARP,
        "blocks_per_sm": blocks_per_sm,
        "grid": grid,
        "bytes_in_flight": in_flight,
        "bytes_needed": needed,
        "time_us": hardware.stream_us + bytes_moved / bandwidth / 1e6,
        "bound": "memory" if in_flight >= needed else "latency",
        "registers": handed_out,
        "smem_bytes": smem_bytes,
        "stages_min": ceil(needed / (blocks_per_sm * threads * load_bytes)),
        "stages_max": max(0, int((most_registers - OTHER_REGISTERS) * 4 // load_bytes)),
        "intensity": elements / bytes_moved,
        "walls": (
            _register_wall(threads, handed_out, hardware),
            capacity_wall(smem_bytes, hardware.smem_bytes),
            intensity_wall("HBM", elements, bytes_moved, hardware.fp32_tflops, hardware.hbm_tbps),
            littles_law(in_flight, hardware.hbm_tbps * 1e3 / hardware.num_sms, latency_us),
        ),
    }


def _registers(unroll: int, load_bytes: float) -> int:
    return OTHER_REGISTERS + ceil(unroll * load_bytes / 4)


class Prediction(NamedTuple):
    """`explain`'s prediction for groups, and for calls whose kernel has no `GemmConfig`.

    Attributes:
        candidates: {name, time_us, ...}, the choice first.
        parts: (what, us), which add up to the choice's time.
        bytes_moved: through HBM, each tensor once.
        flops, tflops: of the tensor cores, and their rate under load.
        why: why this kernel, and whose times these are.
    """

    candidates: list[dict]
    parts: list[tuple[str, float]]
    bytes_moved: int
    flops: int
    tflops: float
    why: str


def bytes_in_flight_needed(hardware: Hardware) -> tuple[int, str]:
    """Bytes in flight per SM that keep HBM busy, by Little's law; and why."""
    latency_ns = LOAD_FACTOR * hardware.hbm_latency_ns
    needed = ceil(hardware.hbm_tbps * 1e3 * latency_ns / hardware.num_sms)
    text = (
        f"Little's law: {hardware.hbm_tbps:g} TB/s x {latency_ns:.0f} ns under load / {hardware.num_sms} SMs = "
        f"{needed} bytes in flight per SM"
    )
    return needed, text


def _row_in_registers(loads: int, load_bytes: float, threads: int, hardware: Hardware) -> tuple[bool, str]:
    """Whether this many threads can hold a row in few registers each; and why."""
    registers = ceil(ceil(loads / threads) * load_bytes / 4)
    by_file = max(0, hardware.registers // 1024 - OTHER_REGISTERS)
    budget = 16 if threads < WARP else 32 if threads < 1024 else by_file
    if registers <= budget:
        return True, f"registers: the row stays, {registers} of {budget} registers a thread, and is read once"
    each = "one thread" if threads == 1 else f"each of {threads} threads"
    return False, (
        f"register wall: a row of {loads * load_bytes:.0f} bytes needs {registers} registers in {each}, "
        f"{registers - budget} more than the {budget} to spare: it is read twice"
    )


def _register_wall(threads: int, needed: int, hardware: Hardware) -> Wall:
    limit = min(hardware.registers_per_thread, hardware.registers // threads)
    verb = "exceed" if needed > limit else "fit"
    over = f", by {needed - limit}" if needed > limit else ""
    reason = f"{needed} registers a thread {verb} the {limit} that each of {threads} threads can have{over}"
    return Wall("register", needed, limit, "registers per thread", needed <= limit, reason)


def _vector_elements(bytes_per_element: float) -> int:
    """The largest power of two of elements that fit the widest access."""
    elements = 1
    while 2 * elements * bytes_per_element <= VECTOR_BYTES:
        elements *= 2
    return elements


def check_positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{name} is {size}; sizes must be positive")


def check_not_negative(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size >= 0:
            raise ValueError(f"{name} is {size}; sizes must not be negative")
