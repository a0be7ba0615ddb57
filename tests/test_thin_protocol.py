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
    """A thread block that works on units of these numbers of K blocks, one after the other.

    Args:
        meets: math warps that split meet after each K block.
    """

    def __init__(self, kernel: ThinKernel, units: tuple[int, ...], meets: bool = True):
        self.kernel, self.units, self.meets = kernel, units, meets
        self.maths = kernel.block_m // 64

    def machine(self) -> Machine:
        programs = {f"math {i}": self.multiply(i) for i in range(self.maths)} | {"operands": self.load()}
        buffers = {(0, name, stage): 1 for name in ("a", "b") for stage in range(self.kernel.stages)}
        buffers |= {(0, "terms", slot): self.maths for slot in range(2) if self.kernel.splits}
        return Machine([Process(name, 0, list(program)) for name, program in programs.items()], buffers)

    def place(self, step: int) -> tuple[int, int]:
        """Stage and round."""
        return step % self.kernel.stages, step // self.kernel.stages

    def start(self, threads: int) -> Sync:
        return Sync((0, "start", 0), threads, self.kernel.threads)

    def meet(self) -> Iterator[Operation]:
        if self.meets:
            yield Sync((0, "split", 0), WARPGROUP, self.maths * WARPGROUP)

    def multiply(self, warpgroup: int) -> Iterator[Operation]:
        if warpgroup == 0:
            for stage in range(self.kernel.stages):
                yield Init((0, "landed", stage), 1)
                yield Init((0, "empty", stage), self.maths * WARPGROUP)
        yield self.start(WARPGROUP)
        first = 0
        for count in self.units:
            yield from self.multiply_unit(warpgroup, first, first + count)
            first += count

    def multiply_unit(self, warpgroup: int, first: int, end: int) -> Iterator[Operation]:
        splits = self.kernel.splits
        if splits:
            if first < end:
                yield from self.split(warpgroup, first)
            yield from self.meet()
        for step in range(first, end):
            stage, phase = self.place(step)
            if not splits:
                yield Wait((0, "landed", stage), phase)
            a = Region((0, "a", stage), 0, 1, ("a", step))
            terms = Region((0, "terms", step % 2), 0, self.maths, ("terms", step))
            yield Issue("wgmma", reads=(a, terms if splits else Region((0, "b", stage), 0, 1, ("b", step))))
            yield Use(reads=(a,))
            if splits and step + 1 < end:
                yield from self.split(warpgroup, step + 1)
            yield Join("wgmma")
            yield Arrive((0, "empty", stage), WARPGROUP)
            if splits:
                yield from self.meet()

    def split(self, warpgroup: int, step: int) -> Iterator[Operation]:
        """A warpgroup's share of the rows."""
        stage, phase = self.place(step)
        yield Wait((0, "landed", stage), phase)
        yield Use(reads=(Region((0, "b", stage), 0, 1, ("b", step)),))
        share = Region((0, "terms", step % 2), warpgroup, warpgroup + 1, ("terms", step))
        yield Issue("write", writes=(share,))
        yield Join("write")

    def load(self) -> Iterator[Operation]:
        yield self.start(WARP)
        for step in range(sum(self.units)):
            stage, phase = self.place(step)
            landed = (0, "landed", stage)
            yield Wait((0, "empty", stage), phase - 1)
            yield Arrive(landed, 1, expected_bytes=2)
            for name in ("a", "b"):
                loaded = Region((0, name, stage), 0, 1, (name, step))
                yield Issue("load", writes=(loaded,), then=Complete(landed, 1))


SMALL = [
    ThinKernel(64, 24, terms=3, stages=3, splits=True, squares=True, blocks_per_sm=1),
    ThinKernel(128, 24, terms=3, stages=2, splits=True, squares=True, blocks_per_sm=1),
    ThinKernel(64, 64, terms=2, stages=2, splits=False, squares=False, blocks_per_sm=1),
    ThinKernel(128, 64, terms=1, stages=2, splits=False, squares=False, blocks_per_sm=1),
]
"""Few stages."""

EACH = pytest.mark.parametrize("kernel", [*SMALL, *parts.KERNELS], ids=lambda kernel: kernel.name)


@EACH
def test_no_order_goes_wrong(kernel):
    """Units of each parity, and one without K blocks."""
    units = kernel.stages + 1, 0, 1, 2 * kernel.stages + 1
    assert prove(Model(kernel, units).machine()) > 0


def test_warpgroups_that_do_not_meet_are_found():
    with pytest.raises(Fault):
        prove(Model(SMALL[1], (9,), meets=False).machine())
