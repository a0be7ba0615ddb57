"""A model of the kernel's synchronisation: what every warp of a thread block does, as a program for machine.py.

Read it beside include/deep_tile: a function here has the name of the one there that it stands for, and every count,
byte and depth comes from GemmConfig and deep_tile.select, as the kernel's do. Left out is what synchronises nobody:
arithmetic, addresses within a row of a buffer, prefetches; and the preceding kernel (griddepcontrol).

The hardware, as the model takes it:

- TMA writes from the moment it is asked to until its bytes complete, cp.async until its arrival, st.async likewise.
- A WGMMA reads its operands until wgmma.wait_group says that it is over, TMA an output box until wait_group.read.
- A load is over when its value is used, or before an arrive on a barrier of the own block, which is a release there. An
  arrive in another block of the cluster waits for no load.
- What a thread writes is there for TMA after fence.proxy.async, and for WGMMA after that of a thread to which it was
  released and which multiplies.
- The memory of a block, barriers included, is gone when all of its warps are done.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

import numpy as np
from machine import (
    ENDLESS,
    TILES,
    Arrive,
    Complete,
    Fault,
    Init,
    Issue,
    Join,
    Machine,
    Name,
    Operation,
    Process,
    Reach,
    Region,
    Sync,
    Use,
    Wait,
)

from deep_tile.config import MMA_M, REGISTER_ROWS, SCALE_BLOCK, UNIT_ROWS, GemmConfig, ceil_div
from deep_tile.plan import tail_rows
from deep_tile.problem import GemmProblem
from deep_tile.select.schedule import grid_size, raster_rows

Program = Iterator[Operation]

WARP = 32
WARPGROUP = 128
WARP_ROWS = MMA_M // 4
FIRST_STAGES = 5
"""Stages that are requested before anything else, at most."""

LONGEST_PROGRAM = 20_000
"""Operations of a role; one that has more has lost its way out."""


class Tile(NamedTuple):
    """A tile of a block; its first row in `a` is `m`. `column` counts the columns of tiles begun so far, where `b`
    stays."""

    index: int
    m: int
    n: int
    column: int = 0
    begins_column: bool = True
    ends_column: bool = True
    group: int = 0


class Launch:
    """A GEMM by one config: its launch parameters, and all that its blocks share.

    Args:
        ranges: of each group, its first row of all, or column of K, and the one behind its last.
        bulk_scales: scales lie so that TMA can copy them.
        in_runs: scale warps read the scales of several K blocks at once; each block's part of K is whole runs.
        early_b: `b` is requested before `a`.
        warps: of a math process: 4, a warpgroup whose warps act alike, or 1.
    """

    def __init__(
        self,
        config: GemmConfig,
        problem: GemmProblem,
        ranges: Sequence[tuple[int, int]] = (),
        bulk_scales: bool = True,
        in_runs: bool = False,
        early_b: bool = False,
        warps: int = 4,
    ):
        self.config, self.problem, self.early_b, self.warps = config, problem, early_b, warps
        self.in_runs, self.ranges = in_runs, ranges
        (self.m, self.n), self.k = config.sides(problem.m, problem.n), problem.k
        self.raster_rows = raster_rows(config, problem)
        self.clusters = grid_size(config, problem) // config.cluster
        self.bulk_scale_rows = self.m if bulk_scales and not in_runs else 0
        self.bulk_scale_columns = self.n if bulk_scales else 0
        self.a_tail_rows = tail_rows(self.m, config.block_m, config.cluster_n)
        self.b_tail_rows = tail_rows(self.n, config.block_n, config.cluster_m)

    def machine(self, cluster: int, change: Callable[[Process], Process] = lambda process: process) -> Machine:
        """One cluster of the grid, each of its processes changed; clusters never meet. Raises Fault."""
        blocks = [self.block(cluster, rank) for rank in range(self.config.cluster)]
        processes = [change(process) for block in blocks for process in block.processes()]
        return Machine(processes, {name: rows for block in blocks for name, rows in block.buffers().items()})

    def block(self, cluster: int, rank: int) -> "Block":
        return Block(self, cluster, rank)

    def check_tiles(self) -> None:
        """Raises Fault unless every element of `out` is stored once, and those of no group never."""
        stored = np.zeros((len(self.ranges) if self.config.by_k else 1, self.out_rows, self.n), dtype=int)
        wanted = np.zeros_like(stored) if self.config.row_groups else np.ones_like(stored)
        for cluster, rank in product(range(self.clusters), range(self.config.cluster)):
            block = self.block(cluster, rank)
            for tile in block.tiles:
                first, width = block.stored_columns(tile)
                out = stored[tile.group if self.config.by_k else 0]
                out[tile.m : min(tile.m + self.config.block_m, self.row_end(tile)), first : first + width] += 1
        for group, (begin, end) in enumerate(self.ranges):
            if self.config.by_k:
                wanted[group] = self.has_tiles(group)
            else:
                wanted[0, begin:end] = 1
        wrong = np.argwhere(stored != wanted)
        if len(wrong):
            group, m, n = wrong[0]
            raise Fault(TILES, f"out[{m}, {n}] of group {group} is stored {stored[group, m, n]} times")

    @property
    def out_rows(self) -> int:
        """The rows of `out`: of all row groups, or of one group along K."""
        return self.m * (len(self.ranges) if self.config.by_counts else 1)

    def row_end(self, tile: Tile) -> int:
        """The end of the rows of a tile's group, or of the matrix; of the tile itself, if that ends within a box."""
        end = self.ranges[tile.group][1] if self.config.row_groups else self.m
        return min(end, tile.m + self.config.block_m) if self.config.block_m < MMA_M else end

    def has_tiles(self, group: int) -> bool:
        """Whether a group has tiles. An empty group along K has tiles of zeros, unless it would add them."""
        begin, end = self.ranges[group]
        return end > begin or (self.config.by_k and not self.config.accumulate)

    def loaded_row(self, row: int, rows: int, tile_rows: int) -> int:
        """The first row of an operand that a tile loads: in a grid of blocks, of one beyond the matrix the last tile's,
        which nobody reads. A block to which a peer sends nothing could release a stage to it before others have
        released it a round earlier."""
        is_grid = self.config.cluster_m > 1 and self.config.cluster_n > 1
        return min(row, (rows - 1) // tile_rows * tile_rows) if is_grid else row

    def quarter_boxes(self, tile: Tile) -> range:
        """First rows of the boxes that bring `a` of a group's tile, one from the next as far as each has rows: of all
        rows, or of each quarter in which there are any."""
        quarter = self.config.block_m // 4
        quarters = min(4, ceil_div(self.row_end(tile) - tile.m, quarter))
        return range(0, quarters * quarter, self.config.block_m if quarters == 4 else quarter)

    def steps(self, tile: Tile) -> range:
        """K blocks of a group along K; one behind K where there are none."""
        begin, end = self.ranges[tile.group]
        first = ceil_div(begin if end > begin else self.k, self.config.block_k)
        return range(first, first + max(ceil_div(end - begin, self.config.block_k), 1))

    def has_k(self, tile: Tile) -> bool:
        """Whether the tile has any K, and so scales."""
        return not self.config.by_k or self.steps(tile).start * self.config.block_k < self.k


def together(process: Process) -> Process:
    """The process for `explore`, with far fewer states: boxes of a request land together, copies with their arrival.

    Nobody can tell: who waits for the one waits for the other, on the same barrier.
    """
    operations: list[Operation] = []
    for operation in process.operations:
        last = operations[-1] if operations else None
        if not isinstance(operation, Issue) or not isinstance(last, Issue):
            operations.append(operation)
        elif (last.group, operation.group) == ("copy", "arrival"):
            operations[-1] = operation._replace(writes=last.writes)
        elif last.group == operation.group == "load" and last.then.barrier == operation.then.barrier:
            landed = Complete(last.then.barrier, last.then.landed_bytes + operation.then.landed_bytes)
            operations[-1] = last._replace(writes=last.writes + operation.writes, then=landed)
        else:
            operations.append(operation)
    return process._replace(operations=operations)


# raster.cuh and grouped.cuh: which tile comes next. Every role walks its own copy.


def place(launch: Launch, rank: int, position: int, rows: int, columns: int) -> tuple[int, int]:
    """Row and column of the tile at a position of the raster of so many rows and columns."""
    config = launch.config
    group_rows = launch.raster_rows // config.cluster_m
    group, within = divmod(position, group_rows * columns)
    column, row = divmod(within, min(group_rows, rows - group * group_rows))
    row += group * group_rows
    return (
        row * config.cluster_m + rank % config.cluster_m,
        column * config.cluster_n + rank // config.cluster_m % config.cluster_n,
    )


def first_cluster_tile(launch: Launch, cluster: int) -> int:
    """Split K numbers clusters by GPC where there are few rows."""
    gpcs, few_rows = 8, 4
    config = launch.config
    if config.split_k == 1 or ceil_div(launch.m, config.block_m * config.cluster_m) > few_rows:
        return cluster
    gpc = cluster % gpcs
    return gpc * (launch.clusters // gpcs) + min(gpc, launch.clusters % gpcs) + cluster // gpcs


def raster_tiles(launch: Launch, cluster: int, rank: int) -> list[Tile]:
    """At positions first, first + clusters, ... (RasterScheduler)."""
    config = launch.config
    rows = ceil_div(launch.m, config.block_m * config.cluster_m)
    columns = ceil_div(launch.n, config.block_n * config.cluster_n)
    positions = range(first_cluster_tile(launch, cluster), rows * columns, launch.clusters)
    places = [place(launch, rank, position, rows, columns) for position in positions]
    return [Tile(index, row * config.block_m, column * config.block_n) for index, (row, column) in enumerate(places)]


def column_tiles(launch: Launch, block: int) -> list[Tile]:
    """Down columns, where `b` stays: whole ones first, then a share of the others (ColumnScheduler)."""
    config, blocks = launch.config, launch.clusters
    rows, columns = ceil_div(launch.m, config.block_m), ceil_div(launch.n, config.block_n)
    whole = columns // blocks
    shared_from = whole * blocks
    share, more = divmod(rows * (columns - shared_from), blocks)
    first = share * block + min(block, more)
    places = [(row, block + i * blocks) for i in range(whole) for row in range(rows)]
    places += [(i % rows, shared_from + i // rows) for i in range(first, first + share + (block < more))]
    tiles, column, begins = [], 0, True
    for index, (row, place_n) in enumerate(places):
        ends = row + 1 == rows
        tiles.append(Tile(index, row * config.block_m, place_n * config.block_n, column, begins, ends))
        column, begins = column + ends, ends
    return tiles


def group_tiles(launch: Launch, cluster: int, rank: int) -> list[Tile]:
    """A block's tiles of all groups, one group after the other (GroupWalk); there may be none."""
    config, tiles = launch.config, []
    height_of_tile, columns = config.block_m * config.cluster_m, ceil_div(launch.n, config.block_n * config.cluster_n)
    position = cluster  # in the group, of the block's next tile
    for group, (begin, end) in enumerate(launch.ranges):
        rows = ceil_div(launch.m if config.by_k else end - begin, height_of_tile) if launch.has_tiles(group) else 0
        first_row = 0 if config.by_k else begin
        for within in range(position, rows * columns, launch.clusters):
            row, column = place(launch, rank, within, rows, columns)
            tile = Tile(len(tiles), first_row + row * config.block_m, column * config.block_n, group=group)
            tiles.append(tile)
            position += launch.clusters
        position -= rows * columns
    return tiles


class Block:
    """A thread block: its tiles, its part of K, its memory, and a process for each of its warps."""

    def __init__(self, launch: Launch, cluster: int, rank: int):
        self.launch, self.config, self.cluster, self.rank = launch, launch.config, cluster, rank
        stages = ceil_div(launch.k, self.config.block_k)
        self.part, self.within_part = divmod(rank, self.config.cluster_m * self.config.cluster_n)
        self.k_range = range(stages * self.part // self.config.split_k, stages * (self.part + 1) // self.config.split_k)

    def steps(self, tile: Tile) -> range:
        """K blocks that the block multiplies for a tile: its part of them."""
        return self.launch.steps(tile) if self.config.by_k else self.k_range

    @cached_property
    def tiles(self) -> list[Tile]:
        """The block's tiles as every role walks them (TileScheduler)."""
        if self.config.is_grouped:
            return group_tiles(self.launch, self.cluster, self.rank)
        if self.config.resident_b:
            return column_tiles(self.launch, self.cluster)
        return raster_tiles(self.launch, self.cluster, self.rank)

    def stored_columns(self, tile: Tile) -> tuple[int, int]:
        """The first that the block stores of a tile, and how many."""
        if self.config.split_k > 1:
            return tile.n + self.part * self.config.columns_per_part, self.config.columns_per_part
        return tile.n, self.config.block_n

    # Names of barriers and buffers.

    def own(self, what: str, *indices: int) -> Name:
        return (self.rank, what, *indices)

    # ClusterPlace: the cluster's other blocks. Ranks count down the columns, one K part after the other.

    @property
    def column(self) -> list[int]:
        """The blocks that share its `b`, itself among them, from the first row on."""
        first = self.rank - self.within_part % self.config.cluster_m
        return [first + row for row in range(self.config.cluster_m)]

    @property
    def row(self) -> list[int]:
        """The blocks that share its `a`, itself among them, from the first column on."""
        first = self.rank - self.within_part // self.config.cluster_m * self.config.cluster_m
        return [first + column * self.config.cluster_m for column in range(self.config.cluster_n)]

    @property
    def peers(self) -> list[int]:
        """The others that share an operand with it."""
        return [rank for rank in (*self.column, *self.row) if rank != self.rank]

    @property
    def other_parts(self) -> dict[int, int]:
        """The blocks that multiply its tile's other K parts, by part."""
        ctas = self.config.cluster_m * self.config.cluster_n
        parts = {part: part * ctas + self.within_part for part in range(self.config.split_k)}
        return {part: rank for part, rank in parts.items() if part != self.part}

    def buffers(self) -> dict[Name, int]:
        """SharedStorage, in rows: of 128 bytes in `a` and `b`; the scales of one row or column, or of a row's groups; a
        thread's sums; a unit of a packed `b`, and of its tables what one warp writes; of a tile's sums, and of those
        that math warpgroups exchange, 16 rows by 16 columns."""
        config = self.config
        stages = range(config.stages)
        rows = {self.own("a", stage): config.scale_blocks * config.block_m for stage in stages}
        if config.from_registers:
            rows[self.own("sums")] = config.k_parts * config.block_m // WARP_ROWS * config.block_n // UNIT_ROWS
        else:
            of_slot = ("b", "group_scale") if config.swap_ab else ("b",)
            slots = product(of_slot, range(config.b_slots))
            rows |= {self.own(what, slot): config.scale_blocks * config.block_n for what, slot in slots}
        rows |= {self.own("a_scale", stage): config.block_m for stage in stages}
        rows |= {self.own("b_scale", stage): config.b_scale_slots for stage in stages}
        for warpgroup in range(config.math_warpgroups):
            rows |= {self.own("out", warpgroup, buffer): MMA_M for buffer in range(config.store_buffers)}
            rows |= {self.own("partial", warpgroup, sender): WARPGROUP for sender in range(config.split_k - 1)}
        if config.swap_ab:
            rows[self.own("exchange")] = MMA_M // WARP_ROWS * config.block_n // UNIT_ROWS
        units = config.scale_blocks * config.block_n // UNIT_ROWS
        rows |= {self.own("units", stage): units for stage in range(config.unit_stages)}
        rows |= {self.own("tile of units", stage): 1 for stage in range(config.unit_stages)}
        return rows | ({self.own("tables"): config.converter_warps} if config.is_packed else {})

    # gemm(): the roles.

    def processes(self) -> Iterator[Process]:
        config = self.config
        math_warps = CollectingWarps if config.from_registers else SwappingWarps if config.swap_ab else MathWarps
        for warpgroup in range(config.math_warpgroups):
            for first in range(0, 4, self.launch.warps):
                warps = range(first, first + self.launch.warps)
                name = f"math {warpgroup}" + (f".{first}" if len(warps) == 1 else "")
                yield self._process(name, math_warps(self, warpgroup, warps).run())
        yield self._process("operands", OperandsWarp(self).run())
        for warp in range(config.scale_warps):
            yield self._process(f"scales {warp}", ScaleWarp(self, warp).run())
        for warp in range(config.store_warps):
            yield self._process(f"stores {warp}", StoreWarp(self, warp).run())
        for _ in range(config.unit_warps):
            yield self._process("units", UnitWarp(self).run())
        for warp in range(3 - config.scale_warps - config.store_warps - config.unit_warps):
            yield self._process(f"idle {warp}", self.start_producer())
        converter_warps = MultiplyingWarps if config.from_registers else ConverterWarps
        for first in range(0, config.converter_warps, 1 if self.launch.warps == 1 else WARP):
            warps = range(first, first + 1) if self.launch.warps == 1 else range(config.converter_warps)
            yield self._process(f"converter {first}", converter_warps(self, warps).run())

    def _process(self, name: str, program: Program) -> Process:
        operations = list(islice(program, LONGEST_PROGRAM))
        name = f"block {self.rank} {name}"
        if len(operations) == LONGEST_PROGRAM:
            raise Fault(ENDLESS, name)
        return Process(name, self.rank, operations)

    def start_producer(self) -> Program:
        """The start of a producer-warpgroup warp that does nothing before it awaits the barriers."""
        yield from self.give_registers()
        yield from self.await_barriers(WARP)

    def give_registers(self, warps: int = 1) -> Program:
        """setmaxnreg.dec"""
        config = self.config
        if config.math_warpgroups == 2 or config.is_packed:
            converters = 0 if config.from_registers else WARP * config.converter_warps
            yield Reach(self.own("registers"), WARP * warps, WARPGROUP + converters)

    def take_registers(self) -> Program:
        """setmaxnreg.inc: until the producer warpgroup has given them, and converter warps that do not multiply."""
        if self.config.math_warpgroups == 2 or self.config.is_packed:
            yield Wait(self.own("registers"), 0)

    def await_barriers(self, threads: int) -> Program:
        """Wait until the barriers of the whole cluster are ready."""
        if self.config.cluster > 1:
            yield Sync(CLUSTER_BARRIER, threads, self.config.cluster * self.config.threads)
        else:
            yield Sync(self.own("all"), threads, self.config.threads)


CLUSTER_BARRIER: Name = (-1, "cluster barrier")


class OperandsWarp:
    """Requests operands by TMA. `position` counts stages, of all tiles."""

    def __init__(self, block: Block):
        self.block, self.config, self.launch = block, block.config, block.launch

    def run(self) -> Program:
        yield from self.block.give_registers()
        yield from self.initialize_full_barriers()
        yield from self.announce_full_barriers()
        requested = yield from self.request_first_stages()
        if self.config.cluster > 1:
            yield Wait(CLUSTER_BARRIER, 0)
        else:
            yield Sync(self.block.own("others"), WARP, 2 * WARP)
        yield from self.produce_operands(requested)

    def initialize_full_barriers(self) -> Program:
        for stage in range(self.config.stages):
            yield Init(self.block.own("full", stage), 1 + WARP * self.config.product.block_scales)
        for slot in range(self.config.slots_apart):
            writers = self.config.converter_warps * slot_lanes(self.config)
            yield Init(self.block.own("slot full" if writers else "column full", slot), writers or 1)

    def announce_full_barriers(self) -> Program:
        if self.config.cluster > 1:
            yield Reach(CLUSTER_BARRIER, WARP, self.config.cluster * self.config.threads)
        else:
            yield Reach(self.block.own("all"), WARP, self.config.threads)

    def request_first_stages(self) -> Program:
        """Request the first stages without multicast, since peers may not have made their barriers yet. Returns how
        many."""
        if not self.block.tiles:
            return 0
        tile, steps = self.block.tiles[0], self.block.steps(self.block.tiles[0])
        stages = range(min(self.config.stages, FIRST_STAGES, len(steps)))
        for stage in stages:
            yield from self.load_b(tile, stage, steps[stage], multicast=False)
            if not self.launch.early_b:
                yield from self.load_a(tile, stage, steps[stage], multicast=False)
        if self.launch.early_b:
            for stage in stages:
                yield from self.load_a(tile, stage, steps[stage], multicast=False)
        return len(stages)

    def produce_operands(self, requested: int) -> Program:
        config, block, position = self.config, self.block, 0
        for tile in block.tiles:
            for step in block.steps(tile):
                stage, turn = position % config.stages, position // config.stages
                position += 1
                if position <= requested:
                    continue
                if config.resident_b and tile.begins_column:
                    yield Wait(block.own("column empty", step), tile.column - 1)
                yield Wait(block.own("empty", stage), turn - 1)
                if not config.resident_b or tile.begins_column:
                    yield from self.load_b(tile, stage, step, config.multicast)
                yield from self.load_a(tile, stage, step, config.multicast)
        if config.multicast:
            yield from self.drain(position)

    def drain(self, position: int) -> Program:
        """Wait, before a block exits, until its peers have used what it multicasts."""
        for last in range(position, position + self.config.stages):
            stage, turn = last % self.config.stages, last // self.config.stages
            yield Wait(self.block.own("empty", stage), turn - 1)

    def a_rows(self, tile: Tile) -> int:
        """The rows of a box of `a`."""
        m = self.launch.loaded_row(tile.m, self.launch.m, self.config.block_m)
        if self.config.cluster_m > 1 and m >= self.launch.m:
            return 0
        last = m + self.config.block_m > self.launch.m
        return self.launch.a_tail_rows if last else self.config.block_m // self.config.cluster_n

    def b_rows(self, tile: Tile) -> int:
        n = self.launch.loaded_row(tile.n, self.launch.n, self.config.block_n)
        if self.config.cluster_n > 1 and n >= self.launch.n:
            return 0
        last = n + self.config.block_n > self.launch.n
        return self.launch.b_tail_rows if last else self.config.block_n // self.config.cluster_m

    def load_b(self, tile: Tile, stage: int, step: int, multicast: bool) -> Program:
        if self.config.is_packed:
            return
        rows = self.b_rows(tile)
        if self.config.resident_b:
            barrier, slot, announced = "column full", step, rows * self.config.k_bytes
        else:
            barrier, slot, announced = "full", stage, self.announced_bytes(tile, rows * self.config.cluster_m)
        yield Arrive(self.block.own(barrier, slot), 1, announced)
        held = held_of_b(self.config, tile, step)
        yield from self.load("b", slot, barrier, rows, held, self.block.column, multicast)

    def load_a(self, tile: Tile, stage: int, step: int, multicast: bool) -> Program:
        if self.config.slots_apart:
            yield Arrive(self.block.own("full", stage), 1, self.announced_bytes(tile, 0))
        full = self.block.own("full", stage)
        if scales_in_bulk(self.launch, tile):
            scales = Region(self.block.own("a_scale", stage), 0, self.config.block_m, held_of_a(tile, step))
            yield Issue("load", writes=(scales,), then=Complete(full, self.row_scale_bytes))
        if column_scales_in_bulk(self.launch, tile):
            scales = Region(self.block.own("b_scale", stage), 0, self.config.block_n, held_of_scales(tile, step))
            yield Issue("load", writes=(scales,), then=Complete(full, self.column_scale_bytes))
        if self.config.row_groups:
            yield from self.load_quarters(tile, stage, step)
            return
        yield from self.load("a", stage, "full", self.a_rows(tile), held_of_a(tile, step), self.block.row, multicast)

    def load_quarters(self, tile: Tile, stage: int, step: int) -> Program:
        boxes, full = self.launch.quarter_boxes(tile), self.block.own("full", stage)
        for i, first in product(range(self.config.scale_blocks), boxes):
            begin = i * self.config.block_m + first
            region = Region(self.block.own("a", stage), begin, begin + boxes.step, (*held_of_a(tile, step), i))
            yield Issue("load", writes=(region,), then=Complete(full, boxes.step * SCALE_BLOCK))

    @property
    def row_scale_bytes(self) -> int:
        return self.config.block_m * 4

    @property
    def column_scale_bytes(self) -> int:
        return self.config.block_n * 4

    def announced_bytes(self, tile: Tile, b_rows: int) -> int:
        boxes = self.launch.quarter_boxes(tile) if self.config.row_groups else None
        a_rows = self.a_rows(tile) * self.config.cluster_n if boxes is None else len(boxes) * boxes.step
        announced = (a_rows + b_rows) * self.config.k_bytes
        announced += self.row_scale_bytes if scales_in_bulk(self.launch, tile) else 0
        return announced + (self.column_scale_bytes if column_scales_in_bulk(self.launch, tile) else 0)

    def load(
        self, what: str, slot: int, barrier: str, rows: int, held: tuple, sharers: list[int], multicast: bool
    ) -> Program:
        """A box for each scale block: of a tile that blocks share, this one's part to all, or every part to this."""
        if self.config.multicast and rows == 0:
            return
        rank = self.block.rank
        tile_rows = self.config.block_m if what == "a" else self.config.block_n
        if multicast:
            boxes = [(block, sharers.index(rank)) for block in sharers]
        else:
            boxes = [(rank, part) for part in range(len(sharers))]
        for i in range(self.config.scale_blocks):
            for block, part in boxes:
                first = i * tile_rows + part * rows
                region = Region((block, what, slot), first, first + rows, (*held, i))
                yield Issue("load", writes=(region,), then=Complete((block, barrier, slot), rows * SCALE_BLOCK))


def scales_in_bulk(launch: Launch, tile: Tile) -> bool:
    config = launch.config
    return config.bulk_scales and tile.m + config.block_m <= launch.bulk_scale_rows and launch.has_k(tile)


def column_scales_in_bulk(launch: Launch, tile: Tile) -> bool:
    config = launch.config
    in_bulk = config.bulk_scales and config.column_scales
    return in_bulk and tile.n + config.block_n <= launch.bulk_scale_columns and launch.has_k(tile)


def held_of_a(tile: Tile, step: int) -> tuple:
    """The content that a stage must hold: rows from here on, of this K block, for this tile."""
    return (f"tile {tile.index}", f"m {tile.m}", f"step {step}")


def held_of_b(config: GemmConfig, tile: Tile, step: int) -> tuple:
    """The content of `b`; where it stays, that for this column of tiles."""
    user = f"column {tile.column}" if config.resident_b else f"tile {tile.index}"
    return (user, f"n {tile.n} of group {tile.group}", f"step {step}")


class ScaleWarp:
    """Copies scales by cp.async, of every `scale_warps`-th stage, or reads them in runs and writes them."""

    def __init__(self, block: Block, warp: int):
        self.block, self.config, self.warp = block, block.config, warp

    def run(self) -> Program:
        yield from self.block.give_registers()
        requested = yield from self.request_first_scales()
        yield from self.block.await_barriers(WARP)
        yield from self.produce_scales(requested)

    def request_first_scales(self) -> Program:
        """Request the scales of the first stage, before there are barriers. Returns whether there are any."""
        first = self.block.tiles[0] if self.block.tiles else None
        if first is None or self.warp >= min(self.config.stages, len(self.block.steps(first))):
            return False
        yield from self.copy(first, self.warp, self.block.steps(first)[self.warp])
        return True

    def produce_scales(self, requested: bool) -> Program:
        if requested:
            yield from self.arrive(self.warp)
        yield from self.by_runs() if self.block.launch.in_runs else self.by_steps(requested)

    def by_steps(self, requested: bool) -> Program:
        config, position, step = self.config, self.warp, self.warp
        if requested:
            step += config.scale_warps
            position += config.scale_warps
        for tile in self.block.tiles:
            steps = self.block.steps(tile)
            while step < len(steps):
                stage, turn = position % config.stages, position // config.stages
                yield Wait(self.block.own("empty", stage), turn - 1)
                yield from self.copy(tile, stage, steps[step])
                yield from self.arrive(stage)
                step += config.scale_warps
                position += config.scale_warps
            step -= len(steps)

    def by_runs(self) -> Program:
        config, steps = self.config, len(self.block.k_range)
        run = config.scales_at_once // config.scale_blocks
        warps = min(config.scale_warps, 1 + (config.stages - 1) // run)
        position = step = self.warp * run
        for number, tile in enumerate(self.block.tiles if self.warp < warps else ()):
            while step < steps:
                for i in range(run):
                    if number > 0 or step + i >= config.scale_warps:
                        yield from self.write(tile, position + i, self.block.k_range[step + i])
                position += warps * run
                step += warps * run
            step -= steps

    def write(self, tile: Tile, position: int, step: int) -> Program:
        stage, turn = position % self.config.stages, position // self.config.stages
        yield Wait(self.block.own("empty", stage), turn - 1)
        yield Use(writes=self.regions(tile, stage, step))
        yield Arrive(self.block.own("full", stage), WARP)

    def copy(self, tile: Tile, stage: int, step: int) -> Program:
        a, b = self.regions(tile, stage, step)
        rows = () if scales_in_bulk(self.block.launch, tile) else (a,)
        yield Issue("copy", writes=rows if column_scales_in_bulk(self.block.launch, tile) else (*rows, b))

    def regions(self, tile: Tile, stage: int, step: int) -> tuple[Region, Region]:
        rows = self.config.block_m
        a = Region(self.block.own("a_scale", stage), 0, rows, held_of_a(tile, step))
        return a, Region(self.block.own("b_scale", stage), 0, self.config.b_scale_slots, held_of_scales(tile, step))

    def arrive(self, stage: int) -> Program:
        """cp.async.mbarrier.arrive: by each lane, when its copies so far have landed."""
        yield Issue("arrival", then=Arrive(self.block.own("full", stage), WARP), after="copy")


def held_of_scales(tile: Tile, step: int) -> tuple:
    """The content that the slots of scales of `b` must hold."""
    return (f"tile {tile.index}", f"n {tile.n} of group {tile.group}", f"step {step}")


# packed_b.cuh


def slot_lanes(config: GemmConfig) -> int:
    """Lanes of each warp that arrive at a slot's barriers."""
    return 1 if config.b_stages > 0 and config.is_packed and config.chains == 1 else WARP


def units_of(launch: Launch, tile: Tile) -> int:
    """The units of a K block of the tile inside the matrix."""
    return min(launch.config.block_n, launch.n - tile.n) // UNIT_ROWS


def tile_of_units(block: Block, stage: int, tile: Tile | None) -> Region:
    """What a stage of units says of its tile, for converter warps that multiply; None: that there is none."""
    return Region(block.own("tile of units", stage), 0, 1, (f"tile {tile.index}" if tile else "no tile",))


class UnitWarp:
    """A warp that copies units of a packed `b` to a ring of their own."""

    def __init__(self, block: Block):
        self.block, self.config = block, block.config

    def run(self) -> Program:
        yield from self.block.give_registers()
        requested = yield from self.request_first_units()
        yield from self.block.await_barriers(WARP)
        position = 0
        for tile in self.block.tiles:
            for step in self.block.steps(tile):
                stage, turn = position % self.config.unit_stages, position // self.config.unit_stages
                position += 1
                if position > requested:
                    yield Wait(self.block.own("units empty", stage), turn - 1)
                    yield from self.load_units(tile, stage, step)
        if self.config.from_registers:
            stage, turn = position % self.config.unit_stages, position // self.config.unit_stages
            yield Wait(self.block.own("units empty", stage), turn - 1)
            yield Use(writes=(tile_of_units(self.block, stage, None),))
            yield Arrive(self.block.own("units full", stage), 1)

    def request_first_units(self) -> Program:
        """Returns how many stages."""
        for stage in range(self.config.unit_stages):
            yield Init(self.block.own("units full", stage), 1)
        if not self.block.tiles:
            return 0
        steps = self.block.steps(self.block.tiles[0])
        stages = min(self.config.unit_stages, len(steps))
        for stage in range(stages):
            yield from self.load_units(self.block.tiles[0], stage, steps[stage])
        return stages

    def load_units(self, tile: Tile, stage: int, step: int) -> Program:
        units, full = units_of(self.block.launch, tile), self.block.own("units full", stage)
        of_block = units * self.config.b_unit_bytes
        if self.config.from_registers:
            yield Use(writes=(tile_of_units(self.block, stage, tile),))
        yield Arrive(full, 1, self.config.scale_blocks * of_block)
        for i in range(self.config.scale_blocks):
            first = i * self.config.block_n // UNIT_ROWS
            held = (*held_of_b(self.config, tile, step), i)
            region = Region(self.block.own("units", stage), first, first + units, held)
            yield Issue("load", writes=(region,), then=Complete(full, of_block))


class ConverterWarps:
    """One of them, or all, which act alike: each makes a slot's FP8 of every `converter_warps`-th unit of a stage."""

    def __init__(self, block: Block, warps: range):
        self.block, self.config, self.warps = block, block.config, warps
        self.places = [(tile, step) for tile in block.tiles for step in block.steps(tile)]

    def run(self) -> Program:
        yield from self.block.give_registers(len(self.warps))
        yield from self.block.await_barriers(WARP * len(self.warps))
        yield from self.write_tables()
        for position, place in enumerate(self.places):
            stage, slot = position % self.config.unit_stages, position % self.config.b_slots
            if position == 0:
                yield from self.begin(position, *place)
            yield Wait(self.block.own("slot empty", slot), position // self.config.b_slots - 1)
            yield Join("unit read")
            yield Use(reads=self.regions("units", stage, *place, first=False))
            yield Arrive(self.block.own("units empty", stage), WARP * len(self.warps))
            if position + 1 < len(self.places):
                yield from self.begin(position + 1, *self.places[position + 1])
            yield Issue("slot write", writes=self.regions("b", slot, *place))
            if self.config.swap_ab:
                yield Issue("group scale write", writes=self.regions("group_scale", slot, *place))
            yield Join("slot write")  # the arrive is a release
            yield Join("group scale write")
            yield Arrive(self.block.own("slot full", slot), slot_lanes(self.config) * len(self.warps))

    def write_tables(self) -> Program:
        if self.config.b_integers:
            return
        yield Use(writes=(Region(self.block.own("tables"), self.warps.start, self.warps.stop, ("e4m3",)),))
        yield Sync(self.block.own("tables"), WARP * len(self.warps), self.config.converter_warps * WARP)
        yield Use(reads=(Region(self.block.own("tables"), 0, self.config.converter_warps, ("e4m3",)),))

    def begin(self, position: int, tile: Tile, step: int) -> Program:
        """Reads each warp's first unit of a stage, before the last of the stage ahead is written."""
        stage = position % self.config.unit_stages
        yield Wait(self.block.own("units full", stage), position // self.config.unit_stages)
        yield Issue("unit read", reads=self.regions("units", stage, tile, step, first=True))

    def regions(self, what: str, index: int, tile: Tile, step: int, first: bool | None = None) -> tuple[Region, ...]:
        """Rows of these warps' units, or of their `first` ones or the others, but for those beyond the matrix."""
        of_block, rows = self.config.block_n // UNIT_ROWS, 1 if what == "units" else UNIT_ROWS
        units, converters = range(self.config.scale_blocks * of_block), self.config.converter_warps
        own = [unit for unit in units if unit % converters in self.warps and first in (None, unit < converters)]
        held, present = held_of_b(self.config, tile, step), units_of(self.block.launch, tile)
        return tuple(
            Region(self.block.own(what, index), unit * rows, (unit + 1) * rows, (*held, unit // of_block))
            for unit in own
            if unit % of_block < present
        )


# register_b.cuh


class MultiplyingWarps(ConverterWarps):
    """Converter warps that multiply what they convert (RegisterMultiplier): of each K block of its warpgroup's part a
    unit, which a warp reads and converts before it multiplies the K block."""

    def __init__(self, block: Block, warps: range):
        super().__init__(block, warps)
        config = block.config
        self.units, self.blocks = config.block_n // UNIT_ROWS, config.scale_blocks // config.k_parts
        self.row_groups = 2 // config.k_parts
        self.position = 0  # of the stage that is multiplied, of all tiles
        self.position_of_units = 0  # of that whose units are converted

    def part(self, warp: int) -> int:
        return warp // 4 // self.row_groups

    def unit(self, warp: int) -> int:
        """The warp's unit in a K block; there may be none."""
        return warp // 4 % self.row_groups * 4 + warp % 4

    def run(self) -> Program:
        yield from self.block.await_barriers(WARP * len(self.warps))
        yield from self.block.take_registers()
        yield from self.write_tables()
        if not self.block.k_range:
            return
        yield from self.await_units()
        for tile in (*self.block.tiles, None):
            yield Use(reads=(tile_of_units(self.block, self.position % self.config.unit_stages, tile),))
            if tile:
                yield from self.multiply(tile)

    def await_units(self) -> Program:
        """Awaits a stage's units and converts the first K block. What is there after the last tile may be anything."""
        stages = self.config.unit_stages
        yield Wait(self.block.own("units full", self.position_of_units % stages), self.position_of_units // stages)
        if self.position_of_units < len(self.places):
            yield from self.convert(self.position_of_units, 0)

    def convert(self, position: int, block: int) -> Program:
        """Reads a K block of the warps' units, those beyond the tile its last one; none is read beyond the matrix."""
        tile, step = self.places[position]
        read = {(self.part(w) * self.blocks + block, min(self.unit(w), self.units - 1)) for w in self.warps}
        held, buffer = held_of_b(self.config, tile, step), self.block.own("units", position % self.config.unit_stages)
        regions = (
            Region(buffer, i * self.units + unit, i * self.units + unit + 1, (*held, i))
            for i, unit in sorted(read)
            if unit < units_of(self.block.launch, tile)
        )
        yield Issue("unit read", reads=tuple(regions))

    def turn_to_next_units(self) -> Program:
        """Gives this stage's units back, and turns to the next stage's."""
        yield Join("unit read")  # the arrive is a release
        stage = self.position_of_units % self.config.unit_stages
        yield Arrive(self.block.own("units empty", stage), WARP * len(self.warps))
        self.position_of_units += 1
        yield from self.await_units()

    def multiply(self, tile: Tile) -> Program:
        for step in self.block.steps(tile):
            stage = self.position % self.config.stages
            yield Wait(self.block.own("full", stage), self.position // self.config.stages)
            for block, first in product(range(self.blocks), range(0, rows_of_tile(self.block, tile), REGISTER_ROWS)):
                yield from self.begin_block(tile, step, block, first)
                if first == 0 and block + 1 < self.blocks:
                    yield from self.convert(self.position, block + 1)
                elif first == 0:
                    yield from self.turn_to_next_units()
                yield Join("WGMMA")
                yield from self.promote(tile, step, first)
            yield Join("scale read")  # the arrive is a release
            yield Arrive(self.block.own("empty", stage), WARP * len(self.warps))
            self.position += 1
        yield from self.store(tile)

    def begin_block(self, tile: Tile, step: int, block: int, first: int) -> Program:
        """Begins the products of a K block with the rows from `first` on: with 16, or with 32. Rows beyond the matrix
        or the group may hold anything."""
        buffer, rows = self.block.own("a", self.position % self.config.stages), rows_of_tile(self.block, tile)
        read = sorted({self.part(warp) * self.blocks + block for warp in self.warps})
        regions = (
            clipped(buffer, of_block + first, REGISTER_ROWS, of_block + rows, (*held_of_a(tile, step), i))
            for i, of_block in ((i, i * self.config.block_m) for i in read)
        )
        yield Issue("WGMMA", reads=tuple(regions))

    def promote(self, tile: Tile, step: int, first: int) -> Program:
        stage, rows = self.position % self.config.stages, rows_of_tile(self.block, tile)
        of_a = clipped(self.block.own("a_scale", stage), first, REGISTER_ROWS, rows, held_of_a(tile, step))
        of_b = Region(self.block.own("b_scale", stage), 0, self.config.b_scale_slots, held_of_scales(tile, step))
        yield Issue("scale read", reads=(of_a, of_b))

    def store(self, tile: Tile) -> Program:
        """Leaves the tile's sums of the warps' units, those beyond the matrix included."""
        owned = [(self.part(warp), self.unit(warp)) for warp in self.warps]
        written = (
            sums_of_tile(self.block, tile, part, half, range(unit, unit + 1))
            for (part, unit), half in product(owned, halves_of(self.block, tile))
            if unit < self.units
        )
        yield Wait(self.block.own("slot empty", 0), tile.index - 1)
        yield Issue("tile sum write", writes=tuple(written))
        yield Join("tile sum write")  # the arrive is a release
        yield Arrive(self.block.own("slot full", 0), WARP * len(self.warps))


def rows_of_tile(block: Block, tile: Tile) -> int:
    """Its rows inside the matrix or the group."""
    return min(block.launch.row_end(tile) - tile.m, block.config.block_m)


def halves_of(block: Block, tile: Tile) -> range:
    """Sixteens of rows of `a` that are multiplied and used."""
    return range(ceil_div(rows_of_tile(block, tile), WARP_ROWS))


def sums_of_tile(block: Block, tile: Tile, part: int, half: int, units: range) -> Region:
    """The sums of a K part, for sixteen rows of `a` and some units of `b`."""
    first = (part * block.config.block_m // WARP_ROWS + half) * block.config.block_n // UNIT_ROWS
    return Region(block.own("sums"), first + units.start, first + units.stop, (f"tile {tile.index}",))


# output.cuh


def is_inside(launch: Launch, config: GemmConfig, tile: Tile, box: int, row: int, column: int) -> bool:
    """Whether a box begins inside the matrix, or the tile's group; row and column are its first ones."""
    return row + box_row(config, box) < launch.row_end(tile) and column + box_column(config, box) < launch.n


def box_row(config: GemmConfig, box: int) -> int:
    return box // (config.boxes // config.chunks_m) * MMA_M


def box_column(config: GemmConfig, box: int) -> int:
    place = box % (config.boxes // config.chunks_m) * config.store_columns
    return min(place, config.columns_per_part - config.store_columns)


class StoreWarp:
    """A warp that has TMA store the boxes of one math warpgroup, or of both."""

    def __init__(self, block: Block, warp: int):
        self.block, self.config = block, block.config
        self.warpgroups = range(warp, block.config.math_warpgroups, max(1, block.config.store_warps))

    def run(self) -> Program:
        yield from self.block.start_producer()
        for tile in self.block.tiles:
            yield from self.store(tile)
        yield Join("store")

    def store(self, tile: Tile) -> Program:
        config = self.config
        for first in range(0, config.boxes, config.boxes_at_once):
            yield Join("store")
            for warpgroup in self.warpgroups:
                yield Reach(self.block.own("boxes empty", warpgroup), WARP, WARPGROUP + WARP)
            for warpgroup in self.warpgroups:
                yield Sync(self.block.own("boxes full", warpgroup), WARP, WARPGROUP + WARP)
                yield from self.publish_boxes(tile, warpgroup, first)

    def publish_boxes(self, tile: Tile, warpgroup: int, first: int) -> Program:
        """Have TMA store boxes; TMA clips rows that are not the tile's."""
        config, launch, stored = self.config, self.block.launch, []
        row = tile.m + warpgroup * config.rows_per_warpgroup
        for box in range(first, first + config.boxes_at_once):
            if not is_inside(launch, config, tile, box, row, tile.n):
                continue
            stored.append(self.box(warpgroup, tile, box, MMA_M))
        yield Issue("store", reads=tuple(stored))

    def box(self, warpgroup: int, tile: Tile, box: int, rows: int) -> Region:
        buffer = self.block.own("out", warpgroup, box % self.config.store_buffers)
        return Region(buffer, 0, rows, held_of_box(tile, box))


def held_of_box(tile: Tile, box: int) -> tuple:
    return (f"tile {tile.index}", f"box {box}")


class MathWarps:
    """Warps of a math warpgroup that act alike: WGMMA and promotion (the main loops), rows of output boxes (Epilogue),
    and sums of other blocks (SplitReduction)."""

    def __init__(self, block: Block, warpgroup: int, warps: range):
        self.block, self.launch, self.warpgroup, self.warps = block, block.launch, warpgroup, warps
        self.threads = WARP * len(warps)
        self.position = 0  # of the stage that is acquired next or has been, of all tiles
        self.config, self.tiles = block.config, block.tiles
        self.places = [(tile, step) for tile in block.tiles for step in block.steps(tile)]
        self.steps = len(block.k_range)  # of a tile

    def run(self) -> Program:
        if self.warpgroup == 0 and 0 in self.warps:
            yield from self.initialize_other_barriers()
        yield from self.block.await_barriers(self.threads)
        yield from self.block.take_registers()
        yield from self.consume() if self.config.split_k == 1 else self.consume_split()

    def initialize_other_barriers(self) -> Program:
        config, own = self.config, self.block.own
        math_warps = 4 * config.math_warpgroups
        readers = config.converter_warps if config.from_registers else math_warps
        for stage in range(config.stages):
            yield Init(own("empty", stage), readers * (WARP + len(self.block.peers)))
        for stage in range(config.unit_stages):
            yield Init(own("units empty", stage), config.converter_warps * WARP)
        for slot in range(config.slots_apart):
            name = "slot empty" if config.is_packed else "column empty"
            yield Init(own(name, slot), math_warps * slot_lanes(config))
        for warpgroup in range(config.math_warpgroups if config.split_k > 1 else 0):
            yield Init(own("partial full", warpgroup), 1)
            yield Init(own("partial empty", warpgroup), 4 * (config.split_k - 1))
        if config.cluster == 1:
            yield Reach(own("others"), WARP, 2 * WARP)

    def consume(self) -> Program:
        config = self.config
        yield from self.begin_turns()
        if config.is_grouped and not self.tiles:
            yield from self.end_turns()
            return
        yield from self.acquire()
        for tile in self.tiles:
            more = tile is not self.tiles[-1]
            if config.chunks == 1:
                yield from self.begin(self.position, 0)
            self.steps = len(self.block.steps(tile))
            if config.store_chunks > 1:
                yield from self.multiply(more, lambda chunk, tile=tile: self.store_chunk(tile, chunk))
                yield from self.store_chunk(tile, config.store_chunks - 1)
            else:
                yield from self.multiply(more)
                yield from self.store(tile, tile.n)
        yield from self.end_turns()
        yield from self.drain()

    def consume_split(self) -> Program:
        yield from self.begin_turns()
        for tile in self.tiles:
            if self.steps:
                yield from self.acquire()
                if self.config.chunks == 1:
                    yield from self.begin(self.position, 0)
                yield from self.multiply(more=False)
            for chunk in range(self.config.chunks_m):
                exchange = tile.index * self.config.chunks_m + chunk
                yield from self.send(exchange)
                yield Wait(self.block.own("partial full", self.warpgroup), exchange)
                yield from self.receive(exchange)
                if tile is not self.tiles[-1] or chunk + 1 < self.config.chunks_m:
                    yield from self.release_sums()
            yield from self.store(tile, self.block.stored_columns(tile)[0])
        yield from self.end_turns()
        yield from self.drain()

    # mainloop.cuh: stages. A stage is named by its position among all stages of all tiles.

    def at(self, position: int) -> tuple[Tile, int]:
        """The tile and the K block that are multiplied there; behind the last tile, one that nobody has."""
        return self.places[position] if position < len(self.places) else (Tile(-1, 0, 0), self.block.k_range[0])

    def acquire(self) -> Program:
        """Waits for a stage, and reads its scales, if it has any."""
        stage, turn = self.position % self.config.stages, self.position // self.config.stages
        tile, step = self.at(self.position)
        yield Wait(self.block.own("full", stage), turn)
        if self.config.resident_b and tile.begins_column:
            yield Wait(self.block.own("column full", step), tile.column)
        if self.config.is_packed:
            slots = self.config.b_slots
            yield Wait(self.block.own("slot full", self.position % slots), self.position // slots)
        if not self.config.product.block_scales:
            return
        first = self.warpgroup * self.config.rows_per_warpgroup
        rows = Region(
            self.block.own("a_scale", stage), first, first + self.config.rows_per_warpgroup, held_of_a(tile, step)
        )
        columns = Region(self.block.own("b_scale", stage), 0, self.config.b_scale_slots, held_of_scales(tile, step))
        yield Issue("scale read", reads=(rows, columns))

    def release(self, position: int) -> Program:
        """Release the stage after its last read; at the end of a column, also the stage of `b`."""
        stage = position % self.config.stages
        tile, step = self.at(position)
        yield Join("scale read")  # the arrive is a release
        yield Arrive(self.block.own("empty", stage), self.threads)
        for peer in self.block.peers:
            yield Arrive((peer, "empty", stage), len(self.warps))
        if self.config.resident_b and tile.ends_column:
            yield Arrive(self.block.own("column empty", step), self.threads)
        if self.config.is_packed:
            arrivals = slot_lanes(self.config) * len(self.warps)
            yield Arrive(self.block.own("slot empty", position % self.config.b_slots), arrivals)

    def begin_turns(self) -> Program:
        if self.warpgroup == 1:
            yield from self.end_turn()

    def end_turns(self) -> Program:
        """The other warpgroup has announced a turn that nobody takes."""
        if self.warpgroup == 0:
            yield from self.await_turn()

    def await_turn(self) -> Program:
        if self.config.takes_turns:
            yield Sync(self.block.own("turn", self.warpgroup), self.threads, 2 * WARPGROUP)

    def end_turn(self) -> Program:
        if self.config.takes_turns:
            yield Reach(self.block.own("turn", 1 - self.warpgroup), self.threads, 2 * WARPGROUP)

    def begin(self, position: int, chunk: int) -> Program:
        """Begin the products of one chunk of a stage."""
        yield from self.await_turn()
        yield Issue("WGMMA", reads=tuple(self.operands(position, chunk)))
        yield from self.end_turn()

    def operands(self, position: int, chunk: int) -> Iterator[Region]:
        """The rows of `a` and `b` that are read, but for those beyond the matrix or the group, which may hold
        anything."""
        config, (tile, step) = self.config, self.at(position)
        stage = position % config.stages
        first_m = self.warpgroup * config.rows_per_warpgroup + chunk // config.chunks_n * MMA_M
        first_n = chunk % config.chunks_n * config.mma_n
        rows = min(MMA_M, self.launch.row_end(tile) - tile.m - first_m)
        columns = min(config.mma_n, self.launch.n - tile.n - first_n)
        slot = step if config.resident_b else position % config.b_slots if config.is_packed else stage
        for i in range(config.scale_blocks):
            if rows > 0:
                first = i * config.block_m + first_m
                yield Region(self.block.own("a", stage), first, first + rows, (*held_of_a(tile, step), i))
            if columns > 0:
                first = i * config.block_n + first_n
                yield Region(self.block.own("b", slot), first, first + columns, (*held_of_b(config, tile, step), i))

    def multiply(self, more: bool, meanwhile: Callable[[int], Program] = lambda chunk: iter(())) -> Program:
        """A tile whose first stage is acquired, and, in tiles of one chunk, begun."""
        if self.config.pairs:
            return self.multiply_pairs(more)
        if self.config.block_sets == 2:
            return self.multiply_ahead(more)
        return self.multiply_in_turn(more, meanwhile)

    def multiply_in_turn(self, more: bool, meanwhile: Callable[[int], Program]) -> Program:
        for left in range(self.steps, 0, -1):
            if self.config.chunks > 1 or left < self.steps:
                yield from self.begin(self.position, 0)
            yield from self.finish_stage(left > 1 or more, meanwhile if left == 1 else lambda chunk: iter(()))

    def finish_stage(self, more: bool, meanwhile: Callable[[int], Program]) -> Program:
        await_in = self.config.chunks - 1 if self.config.multicast else 0
        present = self.position
        for chunk in range(self.config.chunks):
            if chunk > 0:
                yield from self.begin(present, chunk)
            if chunk == await_in:
                self.position += 1
                if more:
                    yield from self.acquire()
            if chunk > 0:
                yield from meanwhile(chunk - 1)
            yield Join("WGMMA")
        yield from self.release(present)

    def multiply_ahead(self, more: bool) -> Program:
        left, apart = self.steps, self.blocks_apart(more)
        while left > 2:
            yield from self.step(True, True, left == apart + 1)
            yield from self.step(True, True, left == apart + 2)
            left -= 2
        if left == 2:
            yield from self.step(True, True, left == apart + 1)
        yield from self.step(False, more, apart > 0)

    def multiply_pairs(self, more: bool) -> Program:
        left = self.steps
        while True:
            yield from self.step(True, True, False)
            if left == 2:
                break
            yield from self.step(True, True, False)
            left -= 2
        yield from self.step(False, more, False)

    def blocks_apart(self, more: bool) -> int:
        if not self.config.ends_apart:
            return 0
        blocks = 2 if not more else 1 if self.steps > self.config.stages else 0
        return blocks if self.steps > blocks else 0

    def step(self, begin_next: bool, more: bool, meet: bool) -> Program:
        """Finishes the present stage; with two sets of temporaries, begins the next one before it promotes."""
        present = self.position
        self.position += 1
        if more:
            yield from self.acquire()
        if not self.config.queues_blocks:
            yield Join("WGMMA")
        if begin_next:
            if meet and self.warpgroup == 1:  # await_other
                yield Sync(self.block.own("apart"), self.threads, 2 * WARPGROUP)
            yield from self.begin(self.position, 0)
        if self.config.queues_blocks:
            yield Join("WGMMA", 1 if begin_next else 0)
        if not begin_next and meet and self.warpgroup == 0:  # tell_other
            yield Reach(self.block.own("apart"), self.threads, 2 * WARPGROUP)
        yield from self.release(present)

    # Epilogue: output boxes.

    def store(self, tile: Tile, column: int) -> Program:
        return self.store_boxes(tile, column, 0, self.config.boxes)

    def store_chunk(self, tile: Tile, chunk: int) -> Program:
        boxes = self.config.boxes // self.config.store_chunks
        return self.store_boxes(tile, tile.n, chunk * boxes, boxes)

    def store_boxes(self, tile: Tile, column: int, begin: int, boxes: int) -> Program:
        config = self.config
        for first in range(begin, begin + boxes, config.boxes_at_once):
            yield from self.await_buffers()
            written = tuple(self.box(tile, box) for box in range(first, first + config.boxes_at_once))
            if config.tma_store:
                yield Issue("box write", writes=written)
                yield Join("box write")  # fence.proxy.async
            else:
                yield Use(writes=written)
            if config.store_warps > 0:
                yield Reach(self.block.own("boxes full", self.warpgroup), self.threads, WARPGROUP + WARP)
            else:
                yield from self.publish_boxes(tile, column, first)

    def box(self, tile: Tile, box: int) -> Region:
        """The rows of these warps."""
        buffer = self.block.own("out", self.warpgroup, box % self.config.store_buffers)
        return Region(buffer, self.warps.start * WARP_ROWS, self.warps.stop * WARP_ROWS, held_of_box(tile, box))

    def await_buffers(self) -> Program:
        config = self.config
        if config.store_warps > 0:
            yield Sync(self.block.own("boxes empty", self.warpgroup), self.threads, WARPGROUP + WARP)
        else:
            in_turn = config.boxes_at_once == 1 and config.boxes % config.store_buffers == 0
            yield from self.await_stores(config.store_buffers - 1 if in_turn else 0)
            yield from self.synchronize()

    def publish_boxes(self, tile: Tile, column: int, first: int) -> Program:
        """Publish the rows of each store: a warp asks TMA for it; without TMA each warp copies its own."""
        yield from self.synchronize()
        config, launch, stored = self.config, self.launch, []
        row = tile.m + self.warpgroup * config.rows_per_warpgroup
        for box, warp in product(range(first, first + config.boxes_at_once), self.warps):
            own = warp * WARP_ROWS
            unit = own - own % config.store_rows
            if not is_inside(launch, config, tile, box, row + unit, column):
                continue
            if not config.tma_store:
                yield Use(reads=(self.box(tile, box)._replace(begin=own, end=own + WARP_ROWS),))
            elif own == unit:
                stored.append(self.box(tile, box)._replace(begin=unit, end=unit + config.store_rows))
        if self.stores:
            yield Issue("store", reads=tuple(stored))

    @property
    def stores(self) -> bool:
        """Whether one of these warps has TMA store a box, or its rows of one."""
        return self.config.tma_store and self.warps.start * WARP_ROWS % self.config.store_rows == 0

    def await_stores(self, pending: int) -> Program:
        if self.stores:
            yield Join("store", pending)

    def synchronize(self) -> Program:
        """Among those whose rows are stored together; the lanes of a warp are one anyway."""
        if self.config.tma_store and self.config.store_rows > WARP_ROWS:
            yield Sync(self.block.own("own", self.warpgroup), self.threads, WARPGROUP)

    def drain(self) -> Program:
        if self.config.store_warps == 0:
            yield from self.await_stores(0)

    # SplitReduction: sums of the blocks that multiply the tile's other K parts.

    def send(self, exchange: int) -> Program:
        """One chunk of a tile; exchanges are counted over all tiles."""
        part_bytes = MMA_M * self.config.columns_per_part * 4
        yield Wait(self.block.own("partial empty", self.warpgroup), exchange - 1)
        if 0 in self.warps:
            yield Arrive(self.block.own("partial full", self.warpgroup), 1, (self.config.split_k - 1) * part_bytes)
        for part, rank in self.block.other_parts.items():
            sums = self.sums_of(exchange, self.slot(rank, self.block.part, part), self.block.part)
            landed = Complete((rank, "partial full", self.warpgroup), part_bytes * len(self.warps) // 4)
            yield Issue("send", writes=(sums,), then=landed)

    def receive(self, exchange: int) -> Program:
        """Reads the others' sums, and adds them up, for which the loads must be over: release_sums() relies on it."""
        own = self.block.part
        slots = {part: self.slot(self.block.rank, part, own) for part in self.block.other_parts}
        yield Issue("sum read", reads=tuple(self.sums_of(exchange, slot, part) for part, slot in slots.items()))
        yield Join("sum read")

    def release_sums(self) -> Program:
        """The slots may be overwritten. Not after the last exchange: the senders may have exited."""
        for rank in self.block.other_parts.values():
            yield Arrive((rank, "partial empty", self.warpgroup), len(self.warps))

    def slot(self, rank: int, sender: int, receiver: int) -> Name:
        """A block's slot of one K part's sums; it multiplies another part itself."""
        return (rank, "partial", self.warpgroup, sender if sender < receiver else sender - 1)

    def sums_of(self, exchange: int, slot: Name, sender: int) -> Region:
        """The sums of one K part for one tile of the block that reads them."""
        held = (f"exchange {exchange}", f"of part {sender}", f"of block {self.block.within_part}")
        return Region(slot, *self.lanes, held)

    @property
    def lanes(self) -> tuple[int, int]:
        """Threads of these warps."""
        return self.warps.start * WARP, self.warps.stop * WARP


class WholeTileWarps(MathWarps):
    """Math warps that begin nothing of a tile before they multiply it, or take its sums."""

    def acquire(self) -> Program:
        return iter(())

    def begin(self, position: int, chunk: int) -> Program:
        return iter(())


class SwappingWarps(WholeTileWarps):
    """Math warps that multiply rows of `b` by rows of `a`, and then exchange the tile's sums (SwapAB)."""

    def __init__(self, block: Block, warpgroup: int, warps: range):
        super().__init__(block, warpgroup, warps)
        column_groups = self.config.block_n // MMA_M
        chunks = self.config.block_m // MMA_M * column_groups // self.config.math_warpgroups
        first = warpgroup // column_groups * chunks
        self.chunks = range(first, first + chunks)  # of the tile, each with 64 rows of `a`
        self.first_column = warpgroup % column_groups * MMA_M

    def multiply(self, more: bool, meanwhile: Callable[[int], Program] = lambda chunk: iter(())) -> Program:
        tile, _ = self.at(self.position)
        for _ in range(self.steps):
            yield from self.multiply_stage()
            yield from self.release(self.position)
            self.position += 1
        yield from self.exchange(tile)

    def multiply_stage(self) -> Program:
        """Multiplies chunk by chunk; the scales of `b` are read beside the first one's WGMMAs."""
        own, config, (tile, step) = self.block.own, self.config, self.at(self.position)
        stage, slot = self.position % config.stages, self.position % config.b_slots
        yield Wait(own("full", stage), self.position // config.stages)
        yield Wait(own("slot full", slot), self.position // config.b_slots)
        held = (*held_of_b(config, tile, step), 0)
        of_a, of_b = held_of_a(tile, step), held_of_scales(tile, step)
        rows, columns = self.launch.row_end(tile) - tile.m, self.launch.n - tile.n
        own_columns = self.first_column + self.warps.start * WARP_ROWS
        scaled = clipped(own("group_scale", slot), own_columns, len(self.warps) * WARP_ROWS, columns, held)
        for chunk in self.chunks:
            first = chunk * MMA_M
            a = clipped(own("a", stage), first, MMA_M, rows, (*of_a, 0))
            yield Issue("WGMMA", reads=(a, clipped(own("b", slot), self.first_column, MMA_M, columns, held)))
            if chunk == self.chunks.start:
                yield Issue("scale read", reads=(scaled, Region(own("b_scale", stage), 0, config.b_scale_slots, of_b)))
            yield Join("WGMMA")
            yield Issue("scale read", reads=(Region(own("a_scale", stage), first, first + MMA_M, of_a),))

    def exchange(self, tile: Tile) -> Program:
        """Each warp writes all rows of its columns, and reads all columns of its rows."""
        columns = self.block.config.block_n // UNIT_ROWS
        unit = self.first_column // UNIT_ROWS
        written = range(unit + self.warps.start, unit + self.warps.stop)
        for chunk in range(self.config.block_m // MMA_M):
            yield from self.meet()
            if chunk in self.chunks:
                yield Use(writes=tuple(self.sums_of_rows(tile, chunk, rows, written) for rows in range(4)))
            yield from self.meet()
            if chunk // self.config.chunks_m == self.warpgroup:
                yield Use(reads=tuple(self.sums_of_rows(tile, chunk, rows, range(columns)) for rows in self.warps))

    def meet(self) -> Program:
        yield Sync(self.block.own("exchange"), self.threads, self.config.math_warpgroups * WARPGROUP)

    def sums_of_rows(self, tile: Tile, chunk: int, rows: int, units: range) -> Region:
        """Sums of sixteen of the chunk's rows of `a`, and some units of `b`."""
        first = rows * self.config.block_n // UNIT_ROWS
        held = (f"tile {tile.index}", f"chunk {chunk}")
        return Region(self.block.own("exchange"), first + units.start, first + units.stop, held)


def clipped(buffer: Name, first: int, count: int, end: int, held: tuple) -> Region:
    """So many rows of a buffer, as far as the matrix or the group has them: those from `end` on may hold anything."""
    return Region(buffer, first, max(first, min(first + count, end)), held)


class CollectingWarps(WholeTileWarps):
    """Math warps that take a tile's sums from the converter warps, which multiply it (Collect)."""

    taken = 0
    """Tiles taken so far."""

    def multiply(self, more: bool, meanwhile: Callable[[int], Program] = lambda chunk: iter(())) -> Program:
        """Takes the sums of these warps' rows, as far as the tile has them, of all K parts."""
        tile, units = self.tiles[self.taken], range(self.config.block_n // UNIT_ROWS)
        self.taken += 1
        yield Wait(self.block.own("slot full", 0), tile.index)
        halves = [half for half in halves_of(self.block, tile) if half in self.warps]
        sums = (
            sums_of_tile(self.block, tile, part, half, units)
            for part, half in product(range(self.config.k_parts), halves)
        )
        yield Issue("tile sum read", reads=tuple(sums))
        yield Join("tile sum read")  # the arrive is a release
        yield Arrive(self.block.own("slot empty", 0), WARP * len(self.warps))
