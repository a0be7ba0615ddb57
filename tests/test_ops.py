"""torch.ops.deep_tile on the CPU: what torch.compile and its kin make of the package's functions."""

import pytest
import torch
from helpers import make_operands
from torch._dynamo.testing import CompileCounterWithBackend

from deep_tile import fp8_gemm

N, K = 200, 272


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(m: int, n: int = N, k: int = K) -> list[torch.Tensor]:
    """Without the buffers around them: a graph is tied to the sizes of those, too."""
    return [x.clone(memory_format=torch.contiguous_format) for x in make_operands(m, n, k)]


def test_one_graph_for_every_m():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fp8_gemm, backend=counter, fullgraph=True, dynamic=True)
    for m in (4, 7, 33, 5):
        given = operands(m)
        assert torch.equal(compiled(*given), fp8_gemm(*given))
    assert counter.frame_count == 1
