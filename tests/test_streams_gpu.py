"""Every operation on a Hopper GPU's streams: the current one, a captured one, and a capture that would load a kernel.

`CALLS` of test_modes.py has the calls. Contents and bounds of groups change between runs.
"""

import pytest
import torch
from test_modes import ONE_OP, Call, assert_same, bits, on

from deep_tile import cast, jit, plan
from deep_tile.operation import OPERATIONS

pytestmark = pytest.mark.gpu

ROWS = 300
FIRST = (0, 130, ROWS)
"""Rows of the first of two groups: none, some and all."""

CASTS_WEIGHTS = ("quantize_weight", "fp8_linear of a wide weight")
"""Calls whose cast may be what is not loaded, and tells its own name."""


def refill(call: Call, other: Call) -> None:
    for own, contents in zip(call.tensors, other.tensors, strict=True):
        own.copy_(contents)


def poison(results: list[torch.Tensor], call: Call) -> None:
    """Overwrite what the call allocated. Given targets hold new contents already, to which it may add."""
    given = {x.data_ptr() for x in call.tensors}
    for x in results:
        if x.data_ptr() not in given:
            x.copy_(torch.full_like(x, 7, dtype=torch.float32))


@pytest.mark.parametrize("name", ONE_OP)
def test_a_graph_reads_contents_and_bounds_anew(name):
    call = on("cuda", name, ROWS)
    call()  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for first in FIRST:
        refill(call, on("cuda", name, ROWS, first))
        poison(results, call)
        graph.replay()
        assert_same(results, on("cuda", name, ROWS, first)())


@pytest.mark.parametrize("name", ONE_OP)
def test_work_goes_to_the_current_stream(name):
    """The contents are ready on their own stream alone, and late."""
    call, ready = on("cuda", name, ROWS), on("cuda", name, ROWS, FIRST[1])
    wanted = on("cuda", name, ROWS, FIRST[1])()
    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        refill(call, ready)
        results = call()
    stream.synchronize()
    assert_same(results, wanted)


@pytest.fixture
def nothing_loaded(monkeypatch):
    """Kernels are not loaded, as in a new process, but the disk cache is full."""
    monkeypatch.setattr(plan, "_kernels", {})
    monkeypatch.setattr(cast, "_loaded", {})
    for operation in OPERATIONS.values():
        monkeypatch.setattr(operation, "launches", {})


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", ONE_OP)
def test_a_capture_that_would_load_a_kernel_is_refused(name, nothing_loaded):
    call = on("cuda", name, ROWS)
    before, compiled = [bits(x) for x in call.tensors], jit.compilations()
    called = r"\w+" if name in CASTS_WEIGHTS else name.split(" ")[0].strip(",")
    refused = pytest.raises(RuntimeError, match=f"not loaded yet.* call {called} once .*before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()
    torch.cuda.synchronize()
    assert jit.compilations() == compiled
    assert all(map(torch.equal, before, map(bits, call.tensors)))
