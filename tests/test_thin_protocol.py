"""The model of how warps of thin.cuh meet, in every order, beside protocol.py's of gemm.cuh.

A function here has the name of the one there that it stands for; counts come from the kernels.
"""

from collections.abc import Iterator

import pytest
from machine import (
    ALIASING,
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
    """A thread block of a kernel, with so many K blocks.

    Args:
        forgets_empty: split warps do not wait until a stage is empty.
    """

    def __init__(self, kernel: ThinKernel, steps: int, forgets_empty: bool = False):
        self.kernel, self.steps, self.forgets_empty = kernel, steps, forgets_empty
        self.splits = kernel.split_warps > 0

    def machine(self) -> Machine:
        maths = self.kernel.block_m // 64
        programs = {f"math {i}": self.multiply(i) for i in range(maths)} | {"operands": self.load()}
        if self.splits:
            programs |= {f"split {i}": self.split(i) for i in range(self.kernel.split_warps)}
        buffers = {(0, name, stage): 1 for name in ("a", "b") for stage in range(self.kernel.stages)}
        return Machine([Process(name, 0, list(program)) for name, program in programs.items()], buffers)

    def place(self, step: int) -> tuple[int, int]:
        """Stage and round."""
        return step % self.kernel.stages, step // self.kernel.stages

    def start(self, threads: int) -> Sync:
        return Sync((0, "start", 0), threads, self.kernel.threads)

    def multiply(self, warpgroup: int) -> Iterator[Operation]:
        if warpgroup == 0:
            for stage in range(self.kernel.stages):
                yield Init((0, "landed", stage), 1)
                yield Init((0, "full", stage), WARP)
                yield Init((0, "empty", stage), self.kernel.block_m // 64 * WARPGROUP)
        yield self.start(WARPGROUP)
        for step in range(self.steps):
            stage, phase = self.place(step)
            yield Wait((0, "landed", stage), phase)
            if self.splits:
                yield Wait((0, "full", stage), phase)
            a = Region((0, "a", stage), 0, 1, ("a", step))
            b = Region((0, "b", stage), 0, 1, ("terms" if self.splits else "b", step))
            yield Issue("wgmma", reads=(a, b))
            yield Use(reads=(a,))
            yield Join("wgmma")
            yield Arrive((0, "empty", stage), WARPGROUP)

    def load(self) -> Iterator[Operation]:
        yield self.start(WARP)
        for step in range(self.steps):
            stage, phase = self.place(step)
            landed = (0, "landed", stage)
            yield Wait((0, "empty", stage), phase - 1)
            yield Arrive(landed, 1, expected_bytes=2)
            for name in ("a", "b"):
                yield Issue("load", writes=(Region((0, name, stage), 0, 1, (name, step)),), then=Complete(landed, 1))

    def split(self, warp: int) -> Iterator[Operation]:
        yield self.start(WARP)
        for step in range(warp, self.steps, self.kernel.split_warps):
            stage, phase = self.place(step)
            if not self.forgets_empty:
                yield Wait((0, "empty", stage), phase - 1)
            yield Wait((0, "landed", stage), phase)
            yield Use(reads=(Region((0, "b", stage), 0, 1, ("b", step)),))
            yield Issue("write", writes=(Region((0, "b", stage), 0, 1, ("terms", step)),))
            yield Join("write")
            yield Arrive((0, "full", stage), WARP)


SMALL = [
    ThinKernel(64, 32, terms=3, stages=3, split_warps=2, squares=True, blocks_per_sm=1),
    ThinKernel(128, 32, terms=3, stages=2, split_warps=2, squares=True, blocks_per_sm=1),
    ThinKernel(64, 64, terms=2, stages=2, split_warps=0, squares=False, blocks_per_sm=1),
    ThinKernel(128, 64, terms=1, stages=2, split_warps=0, squares=False, blocks_per_sm=1),
]
"""Few stages and warps, so that all states can be visited."""


@pytest.mark.parametrize("kernel", SMALL, ids=lambda kernel: kernel.name)
def test_no_order_goes_wrong(kernel):
    assert prove(Model(kernel, 3 * kernel.stages + 1).machine()) > 0


@pytest.mark.parametrize("kernel", parts.KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_keep_to_the_model(kernel):
    assert prove(Model(kernel, 3 * kernel.stages + 1).machine()) > 0


def test_a_phase_two_behind_is_found():
    """What `split_thin` waits for the empty stage for: without, a product of 8192x24x28672 was wrong and then hung."""
    kernel = ThinKernel(64, 32, terms=3, stages=4, split_warps=3, squares=True, blocks_per_sm=1)
    with pytest.raises(Fault) as fault:
        prove(Model(kernel, 9, forgets_empty=True).machine())
    assert fault.value.kind == ALIASING
