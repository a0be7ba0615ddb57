"""The model of how warps of thin.cuh meet, in every order, beside protocol.py's of gemm.cuh.

A function here has the name of the one there that it stands for; counts come from the kernels.
"""

from collections.abc import Iterator

import pytest
from machine import (
    Arrive,
    Complete,
    Fault,
    Init,
    Issue,
    Join,
    Machine,
    Operation,
    Process,
    Region,
    Sync,
    Use,
    Wait,
)
from orders import prove

from deep_tile import parts
from deep_tile.codegen import ThinKernel

pytestmark = pytest.mark.about(
    "include/deep_tile/thin.cuh", "tests/machine.py", "tests/orders.py", "deep_tile/parts.py"
)

WARP, WARPGROUP = 32, 128


class Model:
    """Thread blocks of a kernel, each with a unit of so many K blocks after another.

    Args:
        cluster: thread blocks that add up the parts of one tile.
        meets: math warps that split meet after each K block.
        gathers: thread blocks wait until all of a cluster are there.
    """

    def __init__(
        self, kernel: ThinKernel, units: tuple[int, ...], cluster: int = 1, meets: bool = True, gathers: bool = True
    ):
        self.kernel, self.units, self.cluster = kernel, units, cluster
        self.meets, self.gathers = meets, gathers
        self.maths = kernel.block_m // 64
        self.fours = kernel.block_n // 8 + kernel.squares

    def machine(self) -> Machine:
        processes, buffers = [], {}
        for block in range(self.cluster):
            one = Block(self, block)
            processes += [Process(f"{name} of {block}", block, list(program)) for name, program in one.programs()]
            buffers |= {(block, name, stage): 1 for name in ("a", "b") for stage in range(self.kernel.stages)}
            buffers |= {(block, "terms", slot): self.maths for slot in range(2) if self.kernel.splits}
            buffers |= {(block, "received", slot): self.maths for slot in range(self.kernel.most_cluster)}
        return Machine(processes, buffers)


class Block:
    """One of them."""

    def __init__(self, model: Model, block: int):
        self.model, self.block, self.kernel, self.maths = model, block, model.kernel, model.maths

    def programs(self) -> Iterator[tuple[str, Iterator[Operation]]]:
        yield from ((f"math {i}", self.multiply(i)) for i in range(self.maths))
        yield "operands", self.load()

    def own(self, what: str, number: int = 0) -> tuple:
        return self.block, what, number

    def place(self, step: int) -> tuple[int, int]:
        """Stage and round."""
        return step % self.kernel.stages, step // self.kernel.stages

    def start(self, threads: int) -> Sync:
        return Sync(self.own("start"), threads, self.kernel.threads)

    def meet(self) -> Iterator[Operation]:
        if self.model.meets:
            yield Sync(self.own("split"), WARPGROUP, self.maths * WARPGROUP)

    def gather(self, threads: int) -> Iterator[Operation]:
        """Stands for both halves of the cluster's barrier: a block arrives when it has made its own."""
        if self.model.cluster > 1 and self.model.gathers:
            yield Sync((-1, "cluster", 0), threads, self.model.cluster * self.kernel.threads)

    def multiply(self, warpgroup: int) -> Iterator[Operation]:
        if warpgroup == 0:
            for stage in range(self.kernel.stages):
                yield Init(self.own("landed", stage), 1)
                yield Init(self.own("empty", stage), self.maths * WARPGROUP)
            yield Init(self.own("all received"), 1)
        yield self.start(WARPGROUP)
        first = 0
        for count in self.model.units:
            yield from self.multiply_unit(warpgroup, first, first + count)
            first += count
        if self.model.cluster > 1:
            yield from self.add_up(warpgroup)

    def multiply_unit(self, warpgroup: int, first: int, end: int) -> Iterator[Operation]:
        splits = self.kernel.splits
        if splits:
            if first < end:
                yield from self.split(warpgroup, first)
            yield from self.meet()
        for step in range(first, end):
            stage, phase = self.place(step)
            if not splits:
                yield Wait(self.own("landed", stage), phase)
            a = Region(self.own("a", stage), 0, 1, ("a", step))
            terms = Region(self.own("terms", step % 2), 0, self.maths, ("terms", step))
            yield Issue("wgmma", reads=(a, terms if splits else Region(self.own("b", stage), 0, 1, ("b", step))))
            yield Use(reads=(a,))
            if splits and step + 1 < end:
                yield from self.split(warpgroup, step + 1)
            yield Join("wgmma")
            yield Arrive(self.own("empty", stage), WARPGROUP)
            if splits:
                yield from self.meet()

    def add_up(self, warpgroup: int) -> Iterator[Operation]:
        size, received = self.model.cluster, self.own("all received")
        own = [four for four in range(self.model.fours) if four % size == self.block]
        if warpgroup == 0:
            yield Arrive(received, 1, len(own) * (size - 1) * self.maths)
        yield from self.gather(WARPGROUP)
        for four in range(self.model.fours):
            to = four % size
            if to != self.block:
                slot = (to, "received", four - to + self.block)
                sent = Region(slot, warpgroup, warpgroup + 1, ("four", four, self.block))
                yield Issue("push", writes=(sent,), then=Complete((to, "all received", 0), 1))
        yield Wait(received, 0)
        for four in own:
            slots = ((sender, self.own("received", four - self.block + sender)) for sender in range(size))
            yield Use(
                reads=tuple(
                    Region(slot, warpgroup, warpgroup + 1, ("four", four, sender))
                    for sender, slot in slots
                    if sender != self.block
                )
            )

    def split(self, warpgroup: int, step: int) -> Iterator[Operation]:
        """A warpgroup's share of the rows."""
        stage, phase = self.place(step)
        yield Wait(self.own("landed", stage), phase)
        yield Use(reads=(Region(self.own("b", stage), 0, 1, ("b", step)),))
        share = Region(self.own("terms", step % 2), warpgroup, warpgroup + 1, ("terms", step))
        yield Issue("write", writes=(share,))
        yield Join("write")

    def load(self) -> Iterator[Operation]:
        yield self.start(WARP)
        for step in range(sum(self.model.units)):
            stage, phase = self.place(step)
            landed = self.own("landed", stage)
            yield Wait(self.own("empty", stage), phase - 1)
            yield Arrive(landed, 1, expected_bytes=2)
            for name in ("a", "b"):
                loaded = Region(self.own(name, stage), 0, 1, (name, step))
                yield Issue("load", writes=(loaded,), then=Complete(landed, 1))
        yield from self.gather(WARP)


SMALL = [
    ThinKernel(64, 24, terms=3, stages=3, splits=True, squares=True, most_cluster=8, blocks_per_sm=1),
    ThinKernel(128, 24, terms=3, stages=2, splits=True, squares=True, most_cluster=8, blocks_per_sm=1),
    ThinKernel(64, 64, terms=2, stages=2, splits=False, squares=False, most_cluster=8, blocks_per_sm=1),
    ThinKernel(128, 64, terms=1, stages=2, splits=False, squares=False, most_cluster=1, blocks_per_sm=1),
]
"""Few stages."""

EACH = pytest.mark.parametrize("kernel", [*SMALL, *parts.KERNELS], ids=lambda kernel: kernel.name)


@EACH
def test_no_order_goes_wrong(kernel):
    """Of units of every parity, and one without K blocks."""
    units = kernel.stages + 1, 0, 1, 2 * kernel.stages + 1
    assert prove(Model(kernel, units).machine()) > 0


CLUSTERS = [(kernel, size) for kernel in (*SMALL, *parts.KERNELS) if kernel.most_cluster > 1 for size in (2, 4, 8)]


@pytest.mark.parametrize(("kernel", "cluster"), CLUSTERS, ids=lambda each: getattr(each, "name", each))
def test_no_order_of_a_cluster_goes_wrong(kernel, cluster):
    assert prove(Model(kernel, (3,), cluster).machine()) > 0


def test_warpgroups_that_do_not_meet_are_found():
    with pytest.raises(Fault):
        prove(Model(SMALL[1], (9,), meets=False).machine())


def test_a_cluster_that_does_not_gather_is_found():
    with pytest.raises(Fault):
        prove(Model(SMALL[0], (3,), cluster=4, gathers=False).machine())
