"""torch.ops.deep_tile on a Hopper GPU: graphs of torch.compile and of CUDA give the bits of eager calls.

What tracers make of the functions, test_ops.py covers without a GPU.
"""

import pytest
import torch
from helpers import make_operands
from test_modes import CALLS, ONE_OP, TRACERS, check_compiled, check_modes, check_tracer, on, op_of
from test_ops import TOKENS, K, Layer, N, fresh_compiler, layer, same  # noqa: F401
from torch._dynamo.utils import counters

from deep_tile import fp8_gemm, per_block_cast_to_fp8, per_token_cast_to_fp8, precompile

pytestmark = pytest.mark.gpu

OPS = torch.ops.deep_tile


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return per_block_cast_to_fp8(torch.randn(N, K, device="cuda"))


def tokens(m: int) -> torch.Tensor:
    return torch.randn(m, K, device="cuda", dtype=torch.bfloat16)


def test_a_compiled_layer_gives_the_bits_of_an_eager_one(weights):
    fast = torch.compile(layer, fullgraph=True)
    for m in TOKENS:
        x = tokens(m)
        torch._dynamo.mark_dynamic(x, 0)
        assert same(fast(x, *weights), layer(x, *weights))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_product_writes_to_a_slice():
    product = torch.compile(lambda *given: fp8_gemm(*given) + 1, fullgraph=True, dynamic=True)
    for m in TOKENS:
        given = [x.clone(memory_format=torch.contiguous_format) for x in make_operands(m, N, 304, device="cuda")]
        whole = torch.full((m, N + 24), 7, dtype=torch.bfloat16, device="cuda")
        out, wanted = whole[:, 8:-16], torch.empty_like(whole)[:, 8:-16]
        fp8_gemm(*given, wanted)
        assert torch.equal(product(*given, out), wanted + 1)
        assert torch.equal(out, wanted)
        assert (whole[:, :8] == 7).all() and (whole[:, -16:] == 7).all()


def test_cuda_graphs_of_torch_compile_follow_what_they_are_given(weights):
    """For each number of tokens the first call warms up, the second is recorded, and later ones are replays."""
    precompile([(N, K, max(TOKENS))])
    fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for m in (*TOKENS, *TOKENS):
        for _ in range(4):
            x = tokens(m)
            torch._dynamo.mark_dynamic(x, 0)
            torch.compiler.cudagraph_mark_step_begin()
            got = fast(x, *weights).clone()
            assert same(got, layer(x, *weights))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_export():
    with torch.device("cuda"):  # .cuda() makes rows dense, which products refuse where k is no multiple of 16
        module = Layer()
    program = torch.export.export(module, (tokens(4),), dynamic_shapes=({0: torch.export.Dim("m")},))
    for m in (1, *TOKENS):
        x = tokens(m)
        assert same(program.module()(x), module(x))


@pytest.mark.parametrize("name", ONE_OP)
@pytest.mark.parametrize(
    "test", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
def test_opcheck(name, test):
    try:
        torch.library.opcheck(*op_of(name, "cuda"), test_utils=test)
    except Exception as error:
        if test != "test_schema" or "not implemented for 'Float8_e4m3fn'" not in str(error):
            raise
        pytest.skip(f"test_schema compares FP8 tensors by what this torch lacks: {error}")


@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_eager(name):
    check_compiled(name, "cuda")


@pytest.mark.parametrize("name", CALLS)
def test_modes_see_ops(name):
    check_modes(name, "cuda")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tracer", ["make_fx, real", "make_fx, fake", "torch.jit.trace"])
@pytest.mark.parametrize("name", CALLS)
def test_tracers_see_ops(name, tracer):
    """Also after a call that has made the launch known, which could bypass the tracer."""
    on("cuda", name)()
    check_tracer(name, "cuda", TRACERS[tracer])


def test_no_gradient_is_dropped(weights):
    x, (b, b_scale) = tokens(5), weights
    a, a_scale = per_token_cast_to_fp8(x)
    wanted = fp8_gemm(a, a_scale, b, b_scale)
    b_scale.requires_grad_()
    for call in (fp8_gemm, OPS.fp8_gemm, torch.compile(fp8_gemm, fullgraph=True)):
        with pytest.raises(Exception, match="b_scale requires a gradient"):
            call(a, a_scale, b, b_scale)
        with torch.no_grad():
            assert same(call(a, a_scale, b, b_scale), wanted)
