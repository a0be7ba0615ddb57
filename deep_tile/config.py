"""`GemmConfig`: every compile-time choice that defines one GEMM kernel.

It is the CUDA kernel's one template argument (codegen.py), so every size that host and device must agree on is derived
here, once; the kernel asserts the shared-memory size against its own struct.
"""

import operator
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd
from typing import TypeVar

from deep_tile.kinds import (
    ACTIVATIONS,
    BIASES,
    EVERY_KIND,
    GROUPINGS,
    K_BLOCK_BYTES,
    LAYOUTS,
    MMA_K_BYTES,
    QUANTIZED,
    RAW,
    RESULTS,
    Element,
    Kind,
)
from deep_tile.walls import (
    SMEM_LIMIT_BYTES,
    WARPGROUP_THREADS,
    Wall,
    accumulator_registers,
    capacity_wall,
    register_wall,
)

Side = TypeVar("Side")

SCALE_BLOCK = 128
"""Elements along K (and N) that share a scale; in FP8 also one 128-byte swizzle span."""

WARP_THREADS = 32

MMA_M = 64
"""Rows per WGMMA instruction and per output box."""

ACCUMULATOR_LIMIT = 192
"""Accumulators that a math thread with 232 registers can hold beside addresses and scales."""

PAIRED_ACCUMULATOR_LIMIT = 216
"""`ACCUMULATOR_LIMIT` with 240 registers, which PAIRED_TILES may use."""

_MOST_BOXES = 4
"""Most boxes per K block of an N-major `b` that divide a tile; with more, boxes of 128 bytes overlap the next tile. One
thread requests two boxes in 180 clocks: 128x176 takes 11 to 33 % less with three overlapping boxes than with eleven.
128x96 takes 10 to 18 % less with three boxes of 64 bytes than with two of 128 (H100, 2026-11-26)."""

PACKED_TABLES = 256
"""Entries in the table that turns a scale byte and a packed code of `b` into FP8."""

UNIT_ROWS = 16
"""Rows of a packed `b` whose K blocks are stored contiguously."""

REGISTER_ROWS = 32
"""Tile rows of products with a packed `b` that WGMMA reads from registers (register_b.cuh)."""

PACKED_ACCUMULATOR_LIMITS = {4: 168, 8: 136}
"""`ACCUMULATOR_LIMIT` by converter warps, for kernels with one row chunk or with a second set of temporaries."""

LARGEST_CLUSTER = 8
"""Most thread blocks in a cluster that every GPU launches (CUDA C++ Programming Guide, "Thread Block Clusters")."""

PAIRED_TILES = (112, 144)
"""block_n for 128-row tiles that may process K blocks in pairs. Their main-loop copies, one per scale alignment, stay
below 64 KB of code; larger kernels launch 3 us slower (docs/performance.md, "Of a launch")."""


@dataclass(frozen=True)
class GemmConfig:
    """Tile, pipeline depth, cluster and epilogue that define one kernel.

    Attributes:
        block_m, block_n: output tile per thread block, in elements.
        stages: depth of the shared-memory ring. A stage holds one K block each from a and b, and its scales if any.
        cluster_m, cluster_n: thread blocks per cluster along M and N, powers of two. Blocks along M share their b tile
            and blocks along N their a tile, by TMA multicast.
        split_k: thread blocks per cluster along K, beside those along M and N. Each multiplies its range of K blocks,
            then reduces its share of the tile's columns, in K order.
        scale_blocks: K blocks per stage. More than one keeps several short WGMMA chains in flight.
        store_buffers: output boxes per math warpgroup. With fewer than a tile needs, boxes are filled and drained in
            turn.
        tma_store: store `out` with TMA; otherwise element by element, for any alignment and row stride.
        b_stages: K blocks of a resident b, which stays in shared memory while a thread block works down a column of
            tiles; for 128 < k <= 128 * b_stages. 0: b goes through the pipeline like a. For a packed b: slots for
            converted stages; 0 in tiles of 32 rows, and in those of 64 that multiply it from registers.
        pairs: multiply K blocks in pairs (k must hold an even number), with one main-loop copy for each alignment
            between tile columns and scale blocks.
        kind: operand dtypes and scaling, a name in `kinds.EVERY_KIND`.
        output: dtype of `out`, a name in `kinds.RESULTS`; None: the kind's default.
        grouping: how rows map to the matrices in `b`, one of `kinds.GROUPINGS`.
        accumulate: add to what `out` holds, in its format, instead of writing over it.
        bias: the bias's dtype, one of `kinds.BIASES`.
        activation: applied to the sums, one of `kinds.ACTIVATIONS`.
        layout: how the operands lie in memory, a name in `kinds.LAYOUTS`.
        transposed: multiply `b` by `a` and store the transpose of that: block_m then counts rows of `b`, and block_n
            rows of `a`, which may be any multiple of 16 where 64-row tiles of `a` would multiply padding.
    """

    block_m: int
    block_n: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    scale_blocks: int = 1
    store_buffers: int = 2
    tma_store: bool = True
    b_stages: int = 0
    pairs: bool = False
    kind: str = "fp8"
    output: str | None = None
    grouping: str = "none"
    accumulate: bool = False
    bias: str = "none"
    activation: str = "none"
    layout: str = "nt"
    transposed: bool = False

    def __post_init__(self):
        for name, of in _FIELDS.items():
            value = getattr(self, name)
            if type(value) is of:
                continue
            number = as_int(value) if of is int else None
            if number is None:
                raise TypeError(
                    f"GemmConfig: {name} is {value!r}, of type {type(value).__name__}; it must be of type {of.__name__}"
                )
            object.__setattr__(self, name, number)
        if self.output is None and self.kind in EVERY_KIND:
            object.__setattr__(self, "output", self.product.output)
        for name, value, known in (
            ("kind", self.kind, EVERY_KIND),
            ("output", self.output, RESULTS),
            ("grouping", self.grouping, GROUPINGS),
            ("bias", self.bias, BIASES),
            ("activation", self.activation, ACTIVATIONS),
            ("layout", self.layout, LAYOUTS),
        ):
            if value not in known:
                raise ValueError(f"GemmConfig: {name} is {value!r}; supported are {', '.join(known)}")
        problem = self.illegal_because
        if problem:
            raise ValueError(f"{self.name}: {problem}")

    @property
    def illegal_because(self) -> str | None:
        """The first hardware or layout rule this config breaks, or None."""
        if self.block_m not in (64, 128, 256) and not self.from_registers:
            return f"block_m is {self.block_m}; supported are 64, 128 and 256, and with a packed b {REGISTER_ROWS}"
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            return f"block_n is {self.block_n}; WGMMA and stmatrix need a multiple of 16 from 16 to 256"
        if self.integer_sums and self.mma_n % 16 and self.mma_n > 24:
            return f"block_n is {self.block_n}; a WGMMA of integers has a multiple of 16 columns, not {self.mma_n}"
        if self.stages < 2:
            return f"stages is {self.stages}; the ring needs at least 2 to overlap loads and math"
        if self.cluster_m not in (1, 2, 4) or self.cluster_n not in (1, 2, 4):
            return f"cluster is {self.cluster_m}x{self.cluster_n}; supported are 1, 2 and 4 along M and N"
        if self.split_k not in (1, 2, 4, 8):
            return f"split_k is {self.split_k}; supported are 1, 2, 4 and 8"
        if self.cluster > LARGEST_CLUSTER:
            return f"a cluster has {self.cluster} thread blocks; GPUs launch at most {LARGEST_CLUSTER}"
        if self.block_m % (8 * self.cluster_n) or self.block_n % (8 * self.cluster_m):
            return (
                f"cluster is {self.cluster_m}x{self.cluster_n} and the tile {self.block_m}x{self.block_n}; blocks that "
                "share an operand each load a multiple of 8 of its rows, the swizzle's period"
            )
        if self.block_n % (16 * self.split_k):
            return f"block_n is {self.block_n}; each of {self.split_k} K parts adds up a multiple of 16 columns"
        if self.scale_blocks not in (1, 2, 4) or (self.scale_blocks > 1 and self.chunks > 1):
            return f"scale_blocks is {self.scale_blocks}; supported are 1, and 2 and 4 for tiles of one WGMMA"
        if self.is_packed and self._unpackable_because:
            return self._unpackable_because
        if self.b_stages < 0 or (self.resident_b and (self.cluster > 1 or self.scale_blocks > 1)):
            return f"b_stages is {self.b_stages}; b stays without clusters and with one scale block per stage only"
        if self.b_stages == 1:
            return (
                "b_stages is 1; at least 2 K blocks of b stay, for a math warpgroup awaits the next column's first one "
                "before it gives back this column's last one"
            )
        alone = self.cluster == 1 and not self.resident_b
        pairable = self.block_m == 128 and self.block_n in PAIRED_TILES and self.scale_blocks == 1
        if self.pairs and not (pairable and alone):
            tiles = " and ".join(f"128x{block_n}" for block_n in PAIRED_TILES)
            return f"pairs is True; supported for tiles of {tiles}, without clusters and resident b"
        if self.column_scales and (self.resident_b or self.pairs or (self.row_groups and not self.is_packed)):
            what = "groups of rows, resident b and pairs"
            return f"kind is {self.kind!r}; such products are made without {what}"
        if self.by_k and not (self.column_scales and self.split_k == 1 and self.scale_blocks == 1):
            what = "scales of 1x128 for both operands, without split K, and with one scale block per stage"
            return f"grouping is {self.grouping!r}; groups along K are multiplied with {what}"
        if self.output == RAW and self.output not in self.product.outputs:
            return f"kind is {self.kind!r} and output {self.output!r}; results are {', '.join(self.product.outputs)}"
        if self.output == RAW and self.is_finished:
            return f"output is {self.output!r}; sums of integers are stored as they are, without bias and activation"
        if self.accumulate and self.quantizes:
            return f"accumulate is True and output {self.output!r}; a result with scales cannot be added to"
        if self.accumulate and self.is_finished:
            return "accumulate is True; a product is added to `out` without bias and activation"
        if not self.product.block_scales and (self.resident_b or self.pairs):
            return f"kind is {self.kind!r}; such products are made without resident b and pairs"
        if self.row_groups and (self.cluster > 1 or self.resident_b or self.pairs):
            what = "clusters, resident b and pairs"
            return f"grouping is {self.grouping!r}; groups are multiplied without {what}"
        if self.is_grouped and self.is_finished:
            return f"grouping is {self.grouping!r}; groups are multiplied without bias and activation"
        if self.columns_per_part % (16 * self.columns_per_output):
            return (
                f"activation is {self.activation!r}, which makes one column of two; of a tile's {self.block_n} columns "
                f"in {self.split_k} K parts it needs a multiple of 32 each"
            )
        if self.layout not in self.product.layouts:
            return f"layout is {self.layout!r}; operands of kind {self.kind!r} lie along k, as 'nt' says"
        if self.row_groups and self.accumulate:
            return f"grouping is {self.grouping!r} and accumulate True; products of groups of rows are written"
        if self.row_groups and self.a_span:
            return f"grouping is {self.grouping!r} and layout {self.layout!r}; row groups need a K-major a"
        if self.transposed and self._untransposable_because:
            return f"transposed is True; {self._untransposable_because}"
        plain = self.kind == "fp8" and self.tma_store and self.split_k == 1
        if self.quantizes and not (plain and not self.is_grouped):
            what = "of kind fp8, stored by TMA, and without groups and split K"
            return f"output is {self.output!r}; such results are {what}"
        if self.quantizes and self.out_columns_per_part % SCALE_BLOCK:
            return (
                f"output is {self.output!r}; each thread block must store a multiple of {SCALE_BLOCK} of its "
                f"columns, which share a scale, not {self.out_columns_per_part}"
            )
        if not 1 <= self.store_buffers <= 10:
            return f"store_buffers is {self.store_buffers}; supported are 1 to 10"
        return next((wall.reason for wall in (self.register_wall, self.capacity_wall) if not wall.holds), None)

    @property
    def _unpackable_because(self) -> str | None:
        """The first rule for packed operands that this config breaks, or None."""
        if self.from_registers:
            return self._unreadable_because
        if self.b_stages < 2:
            return (
                f"b_stages is {self.b_stages}; a packed b needs at least 2 slots, so that one is read while another "
                "is written"
            )
        if self.multicast or self.pairs or self.by_k:
            what = "multicast, pairs and groups along K"
            return f"kind is {self.kind!r}; a packed b is converted without {what}"
        widths = (MMA_M, 2 * MMA_M) if self.block_m == 2 * MMA_M else (MMA_M,)
        if self.swap_ab and (self.block_n not in widths or self.scale_blocks > 1):
            return (
                f"kind is {self.kind!r}; with slots tiles are 64x64, 128x64, 128x128 and 256x64, with one scale block "
                f"per stage; others have up to {2 * REGISTER_ROWS} rows, and b_stages=0"
            )
        if self.scale_blocks * self.block_n < UNIT_ROWS * self.converter_warps:
            return f"block_n is {self.block_n}; each of 4 warps converts at least {UNIT_ROWS} rows of a packed b"
        return None

    @property
    def _unreadable_because(self) -> str | None:
        """The first rule for a packed `b` from registers that this config breaks, or None."""
        if self.multicast or self.by_k or self.b_stages or self.block_n > 2 * MMA_M:
            what = f"up to {2 * MMA_M} columns, without multicast, groups along K and slots for b"
            return f"block_m is {self.block_m}; such tiles have {what}"
        if self.scale_blocks not in (self.k_parts, 2 * self.k_parts):
            return (
                f"scale_blocks is {self.scale_blocks}; in tiles of {self.block_m} rows each of {self.k_parts} K parts "
                "has one or two"
            )
        return None

    @property
    def _untransposable_because(self) -> str | None:
        """The first rule for transposed results that this config breaks, or None."""
        if self.product.scaling != "none" or self.integer_sums or self.out_bytes != 2:
            return "products are transposed without scales, and with results of 16 bits"
        if self.is_grouped or self.accumulate or self.is_finished or not self.tma_store:
            return "it is stored by TMA, without groups, bias, activation and accumulation"
        return None

    @property
    def register_wall(self) -> Wall:
        return register_wall(self.accumulator_registers, self.block_registers, ACCUMULATOR_LIMIT)

    @property
    def capacity_wall(self) -> Wall:
        return capacity_wall(self.smem_bytes, SMEM_LIMIT_BYTES)

    @cached_property
    def name(self) -> str:
        """Kernel name, profiler row, command-line argument and test id, e.g. `fp8_gemm_128x256x128_s4_c2x1`."""
        layout = "" if self.layout == "nt" else f"_{self.layout}"
        store = "" if self.tma_store else "_any"
        return self._named(self.kind, self.output, self.finish_name) + layout + store

    @cached_property
    def timed_name(self) -> str:
        """Name of the kernel whose times and choices stand for this one: same family, K-major operands, TMA store, no
        epilogue, output in `timed_output`."""
        return self._named(self.product.family, self.product.timed_output(self.output))

    @property
    def finish_name(self) -> str:
        bias = "" if self.bias == "none" else f"_bias_{self.bias}"
        return bias + ("" if self.activation == "none" else f"_{self.activation}")

    def _named(self, kind: str, output: str, finish: str = "") -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        output = "" if output == self.product.output else f"_{output}"
        split = "" if self.split_k == 1 else f"_k{self.split_k}"
        buffers = "" if self.store_buffers == 2 else f"_b{self.store_buffers}"
        resident = f"_r{self.b_stages}" if self.b_stages else ""
        grouping = f"_{self.grouping}" if self.is_grouped else ""
        special = resident + ("_p" if self.pairs else "") + grouping + output
        special += ("_add" if self.accumulate else "") + ("_t" if self.transposed else "") + finish
        return f"{kind}_gemm_{tile}_s{self.stages}_c{self.cluster_m}x{self.cluster_n}{split}{special}{buffers}"

    @property
    def product(self) -> Kind:
        return EVERY_KIND[self.kind]

    @property
    def out(self) -> Element:
        return RESULTS[self.output or self.product.output]

    @property
    def integer_sums(self) -> bool:
        return self.product.sums == "s32"

    @property
    def row_scales(self) -> bool:
        return self.product.row_scales

    @property
    def column_scales(self) -> bool:
        """Whether each row in `b` (a column in `out`) has its own scale per K block."""
        return self.product.scaling == "row_blocks"

    @property
    def out_format(self) -> str:
        return self.output

    @property
    def out_bytes(self) -> int:
        return self.out.bytes

    @property
    def is_grouped(self) -> bool:
        return self.grouping != "none"

    @property
    def is_finished(self) -> bool:
        return (self.bias, self.activation) != ("none", "none")

    @property
    def quantizes(self) -> bool:
        """Whether the epilogue casts the result to FP8 and writes its scales."""
        return self.output == QUANTIZED

    @property
    def bias_format(self) -> str:
        return self.bias

    @property
    def columns_per_output(self) -> int:
        """GEMM columns per `out` column: 2 for gated activations, else 1."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def by_offs(self) -> bool:
        return self.grouping == "offs"

    @property
    def by_counts(self) -> bool:
        return self.grouping == "counts"

    @property
    def by_k(self) -> bool:
        return self.grouping == "k_offs"

    @property
    def row_groups(self) -> bool:
        """Whether groups partition the rows (M), not K."""
        return self.is_grouped and not self.by_k

    @property
    def block_k(self) -> int:
        """K elements per stage."""
        return self.scale_blocks * self.product.k_block

    @property
    def k_bytes(self) -> int:
        return self.scale_blocks * K_BLOCK_BYTES

    @property
    def mma_k(self) -> int:
        return MMA_K_BYTES // self.product.a.bytes

    def sides(self, of_a: Side, of_b: Side) -> tuple[Side, Side]:
        """The sides of the kernel's rows and columns: (of_a, of_b), or, transposed, (of_b, of_a)."""
        return (of_b, of_a) if self.transposed else (of_a, of_b)

    @property
    def a_span(self) -> int:
        """Bytes along m that a TMA box of an M-major `a` covers, a swizzle span (`_span`); 0 for a K-major `a`."""
        return 0 if self.sides(*LAYOUTS[self.layout])[0] == "k" else _span(self.block_m * self.product.a.bytes)

    @property
    def b_span(self) -> int:
        """The same for an N-major `b`, whose last box may overlap the next tile."""
        return 0 if self.sides(*LAYOUTS[self.layout])[1] == "k" else _span(self.block_n * self.product.b.bytes)

    @property
    def b_rows(self) -> int:
        """Rows of `b` that a stage holds: those of whole boxes."""
        return round_up(self.block_n, self.b_span // self.product.b.bytes) if self.b_span else self.block_n

    @property
    def cuts_b(self) -> bool:
        """Whether the last box of an N-major `b` is cut to the matrix's rows: in a transposed product, whose columns
        are rows of `a`, if boxes divide the tile."""
        return self.transposed and self.b_span > 0 and self.b_rows == self.block_n

    # Storage of b.

    @property
    def resident_b(self) -> bool:
        """Whether a `b` tile stays in shared memory while a thread block works down a column of tiles.

        At k = 512 a 128x192 tile then loads 64 KB instead of 160: 8192x32768x512 gains 7 %, 2048x32768x512 2 %;
        1024x32768x512, with eleven tiles per SM, loses 2 % (H200, 2026-11-21).
        """
        return self.b_stages > 0 and not self.is_packed

    @property
    def is_packed(self) -> bool:
        """Whether `b` is stored in 4 bits and converter warps unpack it for WGMMA."""
        return self.product.packing is not None

    @property
    def from_registers(self) -> bool:
        """Whether converter warps multiply a packed `b` themselves, from registers (register_b.cuh), instead of writing
        it to slots."""
        without_slots = self.block_m == MMA_M and self.b_stages == 0
        return self.is_packed and (self.block_m == REGISTER_ROWS or without_slots)

    @property
    def k_parts(self) -> int:
        """Converter warpgroups that multiply the same columns of a tile, each its part of a stage's K blocks."""
        return 2 if self.from_registers and self.block_n <= MMA_M else 1

    @property
    def parts_of_k(self) -> int:
        """Sums of parts of K that are added up at the end, so that results have other bits than with one."""
        return self.split_k * self.k_parts

    @property
    def b_group(self) -> int:
        """K elements that share a scale in a packed `b`: a K block if its units hold no scales; otherwise 0."""
        return self.product.packing.group if self.is_packed else 0

    @property
    def b_integers(self) -> bool:
        """Whether a packed `b` has integers, which become e4m3 without a table."""
        return self.is_packed and self.product.packing.integers

    @property
    def chains(self) -> int:
        """WGMMA chains per K block, whose sums are scaled apart: one per group of a packed `b`'s integers, else 1."""
        return self.product.packing.chains if self.is_packed else 1

    @property
    def swap_ab(self) -> bool:
        """Whether math warpgroups multiply rows of `b`, as WGMMA's rows, by rows of `a` (swap_ab.cuh)."""
        return self.chains > 1 and not self.from_registers

    @property
    def group_scale_bytes(self) -> int:
        """Bytes in a slot of a packed `b` for its groups' scales in FP16, which math warps read."""
        return 2 * self.chains * self.block_n if self.swap_ab else 0

    @property
    def exchange_bytes(self) -> int:
        """Bytes for the sums that math warpgroups exchange, of 64 rows, padded."""
        return MMA_M * self.sums_row_bytes if self.swap_ab else 0

    @property
    def sums_row_bytes(self) -> int:
        """Bytes of a row of a tile's sums in shared memory, padded."""
        return 4 * (self.block_n + 4)

    @property
    def b_unit_bytes(self) -> int:
        """Bytes in 16 rows of a packed K block."""
        return UNIT_ROWS * self.product.packing.row_bytes if self.is_packed else 0

    @property
    def unit_stages(self) -> int:
        """Stages in the packed `b` ring: as `a`'s for small m, which waits for memory, else as many as slots."""
        return (self.stages if self.math_warpgroups == 1 else self.b_stages) if self.is_packed else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes per packed stage, with its two barriers and, if converter warps multiply, its tile."""
        of_tile = 8 if self.from_registers else 0
        return self.scale_blocks * self.block_n // UNIT_ROWS * self.b_unit_bytes + 2 * 8 + of_tile

    @property
    def b_slots(self) -> int:
        """K blocks of `b` in shared memory; one slot if it holds a tile's sums instead."""
        return 1 if self.from_registers else self.b_stages or self.stages

    @property
    def slots_apart(self) -> int:
        """Slots outside the ring of stages: of a resident or converted `b`, or of a tile's sums."""
        return self.b_slots if self.from_registers else self.b_stages

    @property
    def b_slot_bytes(self) -> int:
        """Bytes per slot of `b`: a stage's rows, or a tile's padded sums by K part, in whole swizzle periods."""
        if self.from_registers:
            return round_up(self.k_parts * self.block_m * self.sums_row_bytes, 1024)
        return self.b_rows * self.k_bytes

    @property
    def k_range(self) -> tuple[int, int | None]:
        """The smallest and the largest k that the kernel can multiply; None: any. A resident `b` needs two K blocks."""
        return (SCALE_BLOCK + 1, self.b_stages * SCALE_BLOCK) if self.resident_b else (1, None)

    def takes_k(self, k: int) -> bool:
        smallest, largest = self.k_range
        in_pairs = not self.pairs or ceil_div(k, SCALE_BLOCK) % 2 == 0
        return in_pairs and smallest <= k and (largest is None or k <= largest)

    # Thread blocks and warpgroups.

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n * self.split_k

    @property
    def multicast(self) -> bool:
        return self.cluster_m * self.cluster_n > 1

    @property
    def math_warpgroups(self) -> int:
        return 1 if self.block_m <= MMA_M else 2

    @property
    def threads(self) -> int:
        """One producer warpgroup, the math warpgroups, and those that convert a packed `b`."""
        return WARPGROUP_THREADS * (1 + self.math_warpgroups) + WARP_THREADS * self.converter_warps

    @property
    def converter_warps(self) -> int:
        """Warps that convert a packed `b`: one warpgroup, or two where each warp has a unit of every stage and math
        warps leave them registers. Beside two math warpgroups the units must also divide evenly; beside one they need
        not, as in 64x96 and 64x112 with two scale blocks per stage."""
        if not self.is_packed:
            return 0
        if self.from_registers:
            return 8
        units = self.scale_blocks * self.block_n // UNIT_ROWS
        uneven = units % 8 > 0 and self.math_warpgroups > 1
        return 4 if self.chunks > 1 or units < 8 or uneven or self.swap_ab else 8

    @property
    def scale_warps(self) -> int:
        """Producer warps that copy scales, in turn. One alone holds up narrow tiles, three cost wide ones 4 to 15 %
        (H200, 2026-11-21). Never more than stages: a warp one round ahead would mistake an old barrier phase for its
        own.
        """
        if not self.product.block_scales:
            return 0
        if self.math_warpgroups == 1:
            return min(3, self.stages) - self.unit_warps
        return 2 if self.chunks == 1 and not self.is_packed else 1

    @property
    def store_warps(self) -> int:
        """Producer warps that issue TMA stores: those without another role, at most one per math warpgroup. With 0,
        math warps store their own boxes. A storing math warp waits for TMA, which is busy with loads: 400 to 750 clocks
        out of the 1100 between a 128x192 tile's last K block and the next tile (H200, 2026-11-21).
        """
        if self.math_warpgroups == 1 or self.split_k > 1 or not self.tma_store:
            return 0
        return min(3 - self.scale_warps - self.unit_warps, self.math_warpgroups)

    @property
    def unit_warps(self) -> int:
        return int(self.is_packed)

    # Each math warpgroup covers its tile rows by chunks_m x chunks_n WGMMA tiles of 64 x mma_n.

    @property
    def rows_per_warpgroup(self) -> int:
        return self.block_m // self.math_warpgroups

    @property
    def chunks_m(self) -> int:
        return ceil_div(self.rows_per_warpgroup, MMA_M)

    @property
    def chunks_n(self) -> int:
        """A K block's temporary accumulators must fit beside the tile's: wide tiles are multiplied in two halves."""
        if not self.product.promotes or self.from_registers or self.swap_ab:
            return 1
        limit = PACKED_ACCUMULATOR_LIMITS[4] if self.is_packed and self.chunks_m == 1 else ACCUMULATOR_LIMIT
        fits = self.accumulator_registers + self.block_n // 2 <= limit
        return 1 if fits else 2

    @property
    def chunks(self) -> int:
        return self.chunks_m * self.chunks_n

    @property
    def mma_n(self) -> int:
        return self.block_n // self.chunks_n

    @property
    def accumulator_registers(self) -> int:
        """FP32 accumulators per math thread: each holds 1/128 of its warpgroup's tile."""
        return accumulator_registers(max(self.block_m, MMA_M), self.block_n, self.math_warpgroups)

    @property
    def block_registers(self) -> int:
        """Temporary accumulators for one K block, before promotion; in math warps that multiply."""
        if not self.product.promotes or self.from_registers:
            return 0
        if self.swap_ab:
            return self.chains * MMA_M * MMA_M // WARPGROUP_THREADS
        return self.scale_blocks * MMA_M * self.mma_n // WARPGROUP_THREADS

    @property
    def block_sets(self) -> int:
        """Sets of temporaries. With two, the next K block is multiplied while this one is promoted; 0 without
        promotion. K-grouped kernels have one, since their scheduler needs registers."""
        if not self.product.promotes:
            return 0
        limit = PAIRED_ACCUMULATOR_LIMIT if self.pairs else ACCUMULATOR_LIMIT
        if self.math_warpgroups == 2 and self.by_k:
            limit -= 16
        if self.math_warpgroups == 2 and self.is_packed:
            limit = PACKED_ACCUMULATOR_LIMITS[self.converter_warps]
        fits = self.accumulator_registers + 2 * self.block_registers <= limit and not (
            self.from_registers or self.swap_ab
        )
        return 2 if fits and self.chunks == 1 else 1

    @property
    def math_registers(self) -> int:
        """Registers per math thread when two math warpgroups share the SM's 64 K with the producers. 232 spill in three
        cases: an activation while half the tile is still multiplied, and with several chunks a quantised result or
        promoted sums that are then scaled."""
        accumulators = self.accumulator_registers + self.block_sets * self.block_registers
        if self.from_registers:
            return 152
        if self.is_packed and self.math_warpgroups == 2:
            return 176 if self.converter_warps == 8 else 224 if self.column_scales or self.swap_ab else 216
        late_work = self.quantizes or (self.row_scales and self.product.promotes)
        crowded = (late_work and self.chunks > 1) or (self.activation != "none" and self.chunks_n > 1)
        return 232 if accumulators <= ACCUMULATOR_LIMIT and not crowded else 240

    @property
    def producer_registers(self) -> int:
        """Registers left for a producer or converter thread. At launch a thread has 168 with three warpgroups, 128 with
        four."""
        if not self.is_packed:
            return 3 * 168 - 2 * self.math_registers
        if self.from_registers:
            return 40
        warpgroups = self.threads // WARPGROUP_THREADS
        left = {3: 3 * 168, 4: 4 * 128, 5: 5 * 96}[warpgroups] - self.math_warpgroups * self.math_registers
        return left // (warpgroups - self.math_warpgroups) // 8 * 8

    @property
    def converter_registers(self) -> int:
        """Registers per converter thread: a producer's, or, if these multiply, what the others leave."""
        if not self.from_registers:
            return self.producer_registers
        return (4 * 128 - self.math_registers - self.producer_registers) // 2

    @property
    def carries_descriptors(self) -> bool:
        """Whether a math warpgroup keeps its WGMMA descriptors across stages, so that WGMMAs issue 4 clocks apart
        instead of 12 (see mma.cuh). Issue rate limits narrow tiles: 128x64 takes 0.7 to 2.3 % less at k = 7168, 64x48 2
        to 4 %, 64x64 up to 5 %. With 128 columns or two scale blocks per stage nothing is gained, with four 2 to 4 %
        lost, and 128x96 loses 1 % (H200, 2026-11-22).
        """
        return self.block_sets == 2 and self.mma_n <= 64 and self.scale_blocks == 1 and self.b_stages == 0

    @property
    def queues_blocks(self) -> bool:
        """Whether a math warpgroup begins the next K block before it awaits this one, so that the tensor cores find it
        waiting.

        One warpgroup alone gains 1 to 2 % at m <= 128. Two fall into step by that: 128x64 to 128x112 lose 1.5 to 4 %,
        and 128x128 1 % in clusters, up to 4 % with a resident `b`. Otherwise 128x128 gains 1 % at k = 7168 up to
        m = 1024, and 1.4 % at 4096x512x32768 (H200, 2026-11-22).
        """
        alone = not (self.multicast or self.resident_b)
        return self.block_sets == 2 and (self.math_warpgroups == 1 or (self.mma_n == 128 and alone))

    @property
    def ends_apart(self) -> bool:
        """Whether a math warpgroup starts a tile's last K blocks only when the other has finished its own, so that one
        stores while the other multiplies. Needs queued blocks, so that one warpgroup alone keeps the tensor cores busy:
        128x128 takes 0.5 to 2.5 % less time; 128x64, which does not queue, 1 % more (H200, 2026-11-22). Needs three
        stages: a waiting warpgroup holds one K block that it has not released and the next two.
        """
        return self.queues_blocks and self.math_warpgroups == 2 and min(self.stages, self.b_slots) >= 3

    @property
    def takes_turns(self) -> bool:
        """Whether the math warpgroups take turns in issuing WGMMAs: if a promoting warpgroup has no WGMMA in flight,
        and the other's WGMMAs take long enough to cover the promotion."""
        return self.math_warpgroups == 2 and self.chunks == 1 and self.block_sets == 1 and not self.swap_ab

    @property
    def prefetches_b(self) -> bool:
        """Whether the next tile's `b` is prefetched into L2 during this tile. (A resident `b` always prefetches the
        next column.)

        Math warpgroups that take turns end a tile together and then need all stages at once. 128x192 with four stages
        gains 12 % at k = 512, where these are the whole tile, and 1 % at k = 1536. With more stages, or other kernels,
        it costs 1 to 2 % (H200, 2026-11-21).
        """
        return self.takes_turns and self.stages <= 4 and not (self.b_stages or self.is_grouped)

    @property
    def columns_per_part(self) -> int:
        """Tile columns that each block in the cluster reduces."""
        return self.block_n // self.split_k

    @property
    def out_columns_per_part(self) -> int:
        return self.columns_per_part // self.columns_per_output

    @property
    def out_chunk_columns(self) -> int:
        return self.mma_n // self.columns_per_output

    # Scales and output boxes.

    @property
    def bulk_scales(self) -> bool:
        """Whether one bulk TMA copy may load a tile's row scales when they are contiguous, instead of 4-byte copies.

        128x256 gains 1 to 2.5 %, 128x224 0.5 to 1 %; with two sets of temporaries nothing is gained, and kernels that
        take turns lose up to 3 % (H200, 2026-11-21). Row groups cannot use it: they start anywhere, and TMA needs
        multiples of 16 bytes.
        Where columns have scales too, a stage has two to three times as many: TMA then copies both.
        """
        many = self.chunks > 1 or (self.column_scales and self.scale_blocks == 1)
        in_rows = self.row_groups or self.swap_ab
        return self.math_warpgroups == 2 and many and self.product.block_scales and not in_rows

    @property
    def scales_at_once(self) -> int:
        """Consecutive K scales that a scale-warp lane reads at once for one `a` row. A lane owns every 32nd tile row
        and has registers for 16 scales, or 8 when a producer thread has only 24 or 32 registers."""
        scales = 8 if self.math_warpgroups == 2 and self.producer_registers <= 32 else 16
        return min(4, scales * WARP_THREADS // self.block_m)

    @property
    def reads_runs(self) -> bool:
        """Whether scale warps may read scales for several K blocks at once. Registers do not suffice beside a grouped
        scheduler, with column scales, or when lanes have 24 or 32 registers and 8 rows each."""
        return self.product.scaling == "blocks" and not self.is_grouped and self.scales_at_once > 1

    @property
    def reads_any_runs(self) -> bool:
        """Whether scale warps read runs for any scale strides, not only contiguous ones.

        Against copies one by one, m <= 128 takes 0.7 % less with M-major scales, 64x48 in wide stages 3 %
        (184 shapes, H200, 2026-11-24). In other tiles lanes lack registers for that many addresses.
        """
        return self.reads_runs and self.math_warpgroups == 1

    @property
    def column_group(self) -> int:
        """A 128-column scale block may start at any multiple of this within a tile."""
        return gcd(self.block_n, SCALE_BLOCK)

    @property
    def column_shifts(self) -> int:
        """Main-loop copies: one for each alignment between tile columns and scale blocks, or 1.

        With copies, a thread multiplies by one scale per scale block that the tile touches; without, by one per column
        group (11 for 128x176, at most three distinct). 128x176 gains 9 %, 128x144 6 %, 128x160 and 128x224 1 %. With
        two sets of temporaries the main loop is long, and its copies fit only when K blocks are paired: 128x112 gains 2
        to 3.5 % with pairs and lost 5 % without (H200, 2026-11-22).
        """
        if self.math_warpgroups == 1 or self.column_group >= 64 or (self.block_sets != 1 and not self.pairs):
            return 1
        if self.product.scaling != "blocks" or self.is_packed:
            return 1
        return SCALE_BLOCK // self.column_group

    @property
    def b_scale_columns(self) -> int:
        if self.column_scales:
            return 1
        return self.column_group if self.column_shifts == 1 else SCALE_BLOCK

    @property
    def b_scale_slots(self) -> int:
        """b-scale slots that a tile needs at any alignment."""
        if self.column_scales:
            return self.block_n
        return ceil_div(self.b_scale_columns - self.column_group + self.block_n, self.b_scale_columns)

    @property
    def store_columns(self) -> int:
        """Width of one output box.

        128 or 64 bytes (64 or 32 columns of 16 bits) if such boxes cover the tile's part and overlap by less than a
        sixth: rows of 128 or 64 bytes are swizzled, so a warp writes them without bank conflicts. 160- or 288-byte rows
        conflict two-way: with 32-column boxes instead of 80 or 144, 128x160 takes 1.5 % less at k = 2048 and 7 % at
        576, 128x144 5 % less at 512. Rows with an odd multiple of 16 bytes conflict when TMA reads them: with 88-column
        boxes instead of 64, 128x176 takes 4 % longer at k = 2048, 17 % at 512 (H200, 2026-11-22).

        Boxes that accumulate into `out` must not overlap: the overlap would be added twice.

        A chunk that is stored separately and that such boxes do not divide becomes one box: overlapping boxes cost
            128x224 in clusters, which stores its first chunk while the second is multiplied, 1 to 3 %.

        A quantised result's box is one scale block wide.
        """
        if self.quantizes:
            return SCALE_BLOCK
        in_chunks = self.chunks_n > 1 and self.out_chunk_columns % 16 == 0 and self.split_k == 1
        columns = self.out_chunk_columns if in_chunks else self.out_columns_per_part
        for swizzled in (128 // self.out.bytes, 64 // self.out.bytes):
            overlap = round_up(columns, swizzled) - columns
            if overlap == 0 or (6 * overlap < columns and not in_chunks and not self.accumulate):
                return swizzled
        return columns

    @property
    def store_rows(self) -> int:
        """Output-box rows per TMA store: a warp's rows if math warps store and boxes are few or have more rows than a
        tile; else a warpgroup's."""
        alone = self.store_warps == 0 and (self.boxes < 4 or self.block_m < MMA_M) and not self.transposed
        return MMA_M // 4 if alone else MMA_M

    @property
    def store_box(self) -> tuple[int, int]:
        """Columns and rows of `out` that a TMA store writes."""
        return self.sides(self.store_rows, self.store_columns)[::-1]

    @property
    def store_swizzle(self) -> int:
        """Swizzle span of an output box in bytes: 32, 64 or 128, exactly one row; 0: no swizzle."""
        row_bytes = self.store_box[0] * self.out.bytes
        return row_bytes if row_bytes in (32, 64, 128) else 0

    @property
    def boxes(self) -> int:
        return self.chunks_m * ceil_div(self.out_columns_per_part, self.store_columns)

    @property
    def store_chunks(self) -> int:
        """Parts in which a tile is stored; all but the last overlap the last K block's WGMMAs. 1 when each main-loop
        copy would hold activation code, when an activation precedes a cast, or when rows are scaled, which takes all
        chunks at once."""
        apart = self.store_warps > 0 and self.out_chunk_columns % self.store_columns == 0 and self.product.block_scales
        long = self.activation != "none" and (self.column_shifts > 1 or self.quantizes)
        return self.chunks if apart and not long and not self.swap_ab else 1

    @property
    def boxes_at_once(self) -> int:
        """Output boxes that are written before any is stored: a tile part's boxes, if each has a buffer."""
        boxes = self.boxes // self.store_chunks
        if boxes <= self.store_buffers:
            return boxes
        return self.store_buffers if self.store_warps > 0 and boxes % self.store_buffers == 0 else 1

    # Shared memory: the fields of SharedStorage in include/deep_tile/config.cuh, in order.

    @property
    def stage_bytes(self) -> int:
        a, b = self.product.a, self.product.b
        b_bytes = 0 if self.b_stages or self.is_packed else self.b_rows * b.bytes * self.block_k
        operands = self.block_m * a.bytes * self.block_k + b_bytes
        if self.is_packed and self.math_warpgroups == 1:
            operands += self.unit_bytes
        return operands + (self.scale_bytes if self.product.block_scales else 0) + 2 * 8

    @property
    def scale_bytes(self) -> int:
        """Per stage, slots padded to 16 bytes. Kernels without scales keep a few once: no C++ array is empty."""
        rows = self.block_m if self.product.block_scales else 4
        return 4 * self.scale_blocks * (rows + round_up(self.b_scale_slots, 4))

    @property
    def store_bytes(self) -> int:
        return self.math_warpgroups * self.store_buffers * MMA_M * self.store_columns * self.out.bytes

    @property
    def partial_bytes(self) -> int:
        return (self.split_k - 1) * self.math_warpgroups * MMA_M * self.columns_per_part * 4

    @property
    def fixed_bytes(self) -> int:
        """Shared-memory bytes that do not depend on the stage count. Each math warpgroup, and each slot outside the
        ring, has two barriers; a packed `b` a table with 8-byte entries."""
        apart = self.slots_apart * (self.b_slot_bytes + self.group_scale_bytes + 2 * 8)
        if self.is_packed:
            apart += (
                self.exchange_bytes
                + 8 * PACKED_TABLES
                + (self.unit_stages * self.unit_bytes if self.math_warpgroups == 2 else 0)
            )
        scales = 0 if self.product.block_scales else self.scale_bytes
        return self.partial_bytes + self.store_bytes + apart + scales + 2 * 8 * self.math_warpgroups

    @property
    def smem_bytes(self) -> int:
        return round_up(self.fixed_bytes + self.stages * self.stage_bytes, 1024)


_FIELDS = {field.name: field.type for field in fields(GemmConfig) if field.type in (int, bool, str)}
"""A config's fields and their types, but for its output, which may be None."""


def as_int(number: object) -> int | None:
    if type(number) is int:  # asked first: under torch.compile, operator.index ties the graph to the number
        return number
    if number is None or isinstance(number, bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None


def check_sizes(**sizes: object) -> None:
    """Raise TypeError unless each is an int, ValueError unless it is positive."""
    for name, size in sizes.items():
        number = as_int(size)
        if number is None:
            raise TypeError(f"{name} is {size!r}, of type {type(size).__name__}; sizes must be ints")
        if number < 1:
            raise ValueError(f"{name} is {size}; sizes must be positive")


def as_counts(**sizes: object) -> tuple[int, ...]:
    """Sizes as Python ints, since NumPy's overflow. Raises TypeError unless each is an int, ValueError unless it is in
    [0, 2^31)."""
    for name, size in sizes.items():
        number = as_int(size)
        if number is None:
            raise TypeError(f"{name} is {size!r}, of type {type(size).__name__}; pass an int")
        if not 0 <= number < 2**31:
            raise ValueError(f"{name} is {size}; pass how many there are, below 2**31")
    return tuple(map(as_int, sizes.values()))


MAX_ALIGNMENT = 1024
"""Largest alignment for group starts, in rows."""


def check_alignment(alignment: object, least: int = 1) -> None:
    """Raise ValueError unless this is a valid alignment for group starts."""
    if type(alignment) is not int or not least <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        reason = "" if least == 1 else f"groups begin at multiples of {least}, so that no two share a scale. "
        wanted = f"an int, a power of two from {least} to {MAX_ALIGNMENT}"
        raise ValueError(f"alignment is {alignment!r}; {reason}pass {wanted}")


def _span(tile_bytes: int) -> int:
    """The widest swizzle span (128, 64 or 32 bytes) that divides the tile, or 128 if that makes too many boxes."""
    widest = gcd(tile_bytes, 128)
    return widest if tile_bytes <= _MOST_BOXES * widest else 128


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
