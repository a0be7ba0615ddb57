"""torch.ops.deep_tile: torch.compile, torch.export and other tracers see the functions, on the CPU and on a GPU."""

import io
import re
from collections.abc import Iterator
from functools import cache, partial

import changes
import pytest
import torch
from bad_calls import WRONG_CASTS, WRONG_OPTIONS, WRONG_ROWS, WRONG_TENSORS, BadCall, Good
from helpers import make_operands, run_python
from test_modes import of_gpu
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_tile
from deep_tile import (
    GemmConfig,
    dequantize,
    discovery,
    fp8_gemm,
    is_available,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    precompile,
    prepare,
    supports,
    train,
)
from deep_tile.options import SCALE_LAYOUTS

N, K = 200, 300
FP8 = torch.float8_e4m3fn
OPS = torch.ops.deep_tile
TOKENS = (4, 7, 33, 5)
"""Numbers of tokens that one graph is used for."""


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def operands(m: int, n: int = N, k: int = 304, device: str = "cpu") -> list[torch.Tensor]:
    """Operands without buffers around them: a graph depends on those buffers' sizes, too."""
    return [x.clone(memory_format=torch.contiguous_format) for x in make_operands(m, n, k, device=device)]


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether values and strides are equal."""
    values = [z.contiguous().view(torch.uint8) for z in (x, y)]
    return x.dtype == y.dtype and torch.equal(*values) and x.stride() == y.stride()


def compiled(function, backend: str = "aot_eager", **how):
    """A function in one graph, and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


# ---- torch.compile


def layer(x: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """A cast, a product and something for the compiler to do."""
    a, a_scale = per_token_cast_to_fp8(x * 2, scale_layout="m_aligned", round_scale="pow2")
    return torch.relu(fp8_gemm(a, a_scale, b, b_scale, batch_invariant=True)) + 1


def cast_and_product(x: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Ops alone: on a CPU inductor has a C++ compiler work for ten seconds on anything else."""
    a, a_scale = per_token_cast_to_fp8(x, scale_layout="m_aligned", round_scale="pow2")
    return fp8_gemm(a, a_scale, b, b_scale, batch_invariant=True)


@pytest.mark.parametrize(
    ("device", "function", "how"),
    [
        ("cpu", layer, {"backend": "aot_eager"}),
        ("cpu", cast_and_product, {"mode": "reduce-overhead"}),
        of_gpu(layer, {}),
    ],
    ids=["aot_eager", "inductor", "inductor on a GPU"],
)
def test_a_layer_is_one_graph_for_every_m(device, function, how):
    """Also where k needs padding. inductor asserts the strides that the fakes promised."""
    b, b_scale = per_block_cast_to_fp8(torch.randn(N, K, device=device))
    fast = torch.compile(function, fullgraph=True, **how)
    for m in TOKENS:
        x = torch.randn(m, K, device=device).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert same(fast(x, b, b_scale), function(x, b, b_scale))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_cuda_graphs_of_torch_compile_follow_what_they_are_given():
    """For each number of tokens the first call warms up, the second is recorded, and later ones are replays."""
    weights = per_block_cast_to_fp8(torch.randn(N, K, device="cuda"))
    precompile([(N, K, max(TOKENS))])
    fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for m in (*TOKENS, *TOKENS):
        for _ in range(4):
            x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0)
            torch.compiler.cudagraph_mark_step_begin()
            assert same(fast(x, *weights).clone(), layer(x, *weights))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("device", "backend"), [("cpu", "aot_eager"), ("cpu", "inductor"), of_gpu("inductor")])
def test_out_is_written_to(device, backend):
    """Also where `out` is a slice, whose surroundings stay as they were. What follows reads it, by a kernel of torch's,
    so that inductor has no C++ to compile."""
    other = torch.randn(N, 8, dtype=torch.bfloat16, device=device)

    def into(a, a_scale, b, b_scale, out):
        assert fp8_gemm(a, a_scale, b, b_scale, out) is out
        return out @ other

    product, counter = compiled(into, backend, dynamic=True)
    for m in TOKENS:
        given = operands(m, device=device)
        whole = torch.full((m, N + 24), 7, dtype=torch.bfloat16, device=device)
        out, wanted = whole[:, 8:-16], torch.empty_like(whole)[:, 8:-16]
        fp8_gemm(*given, wanted)
        assert torch.equal(product(*given, out), wanted @ other)
        assert torch.equal(out, wanted)
        assert (whole[:, :8] == 7).all() and (whole[:, -16:] == 7).all()
    assert counter.frame_count == 1


def test_a_number_of_tokens_that_the_data_decide():
    def chosen(x, mask, b, b_scale):
        rows = x[mask.nonzero().flatten()]
        return fp8_gemm(*per_token_cast_to_fp8(rows, scale_layout="m_aligned"), b, b_scale)

    b, b_scale = per_block_cast_to_fp8(torch.randn(N, K))
    x = torch.randn(6, K)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast, counter = compiled(chosen)
        for mask in ([1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]):
            mask = torch.tensor(mask)
            assert torch.equal(fast(x, mask, b, b_scale), chosen(x, mask, b, b_scale))
    assert counter.frame_count == 1


def test_numbers_of_tokens_that_the_data_decide_are_compared_in_the_run():
    def chosen(a, a_scale, mask, scale_mask, b, b_scale):
        rows = mask.nonzero().flatten()
        quantized = a.view(torch.uint8)[rows].view(FP8)
        return fp8_gemm(quantized, a_scale[scale_mask.nonzero().flatten()], b, b_scale)

    given = operands(6)
    right, wrong = torch.tensor([1, 0, 1, 1, 0, 1]), torch.tensor([1, 0, 1, 1, 0, 0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast, _ = compiled(chosen)
        assert torch.equal(fast(*given[:2], right, right, *given[2:]), chosen(*given[:2], right, right, *given[2:]))
        with pytest.raises(RuntimeError, match="(?i)assert"):
            fast(*given[:2], right, wrong, *given[2:])


def test_a_config_is_refused():
    product, _ = compiled(lambda *given: fp8_gemm(*given, config=GemmConfig(64, 64, 4)))
    with pytest.raises(Exception, match="config cannot be given under torch.compile"):
        product(*operands(5))


def test_plans_are_traced_for_their_shapes():
    given = operands(5)
    planned = prepare(*given)
    product, counter = compiled(lambda a, a_scale: planned(a, a_scale) + 1)
    assert same(product(*given[:2]), fp8_gemm(*given) + 1)
    assert counter.frame_count == 1
    fewer = [x[:4].clone() for x in given[:2]]
    with pytest.raises(Exception, match="this plan is for"):
        product(*fewer)
    with pytest.raises(ValueError, match="this plan is for"):
        torch.compile(lambda a, a_scale: planned(a, a_scale) + 1, backend="aot_eager")(*fewer)


def test_what_cannot_be_traced_runs_beside_the_graph():
    def asking(a, a_scale, b, b_scale):
        planned = prepare(a, a_scale, b, b_scale)
        return planned(a, a_scale) + 1 if is_available() else a.float()

    given = operands(5)
    assert same(torch.compile(asking, backend="aot_eager")(*given), fp8_gemm(*given) + 1)


def test_supports_is_traced():
    def dispatching(a, a_scale, b, b_scale):
        supported, _ = supports(a.shape[0], b.shape[0], a.shape[1])
        return fp8_gemm(a, a_scale, b, b_scale) if supported else a.float()

    fast, counter = compiled(dispatching, dynamic=True)
    for m in TOKENS:
        given = operands(m)
        assert same(fast(*given), fp8_gemm(*given))
    assert counter.frame_count == 1


# ---- gradients


def test_gradients_pass_beside_a_product():
    """Both are in one graph with its backward pass."""
    b, b_scale = per_block_cast_to_fp8(torch.randn(K, K))

    def loss(x, w):
        hidden = x @ w
        a, a_scale = per_token_cast_to_fp8(hidden.detach())
        return (hidden * fp8_gemm(a, a_scale, b, b_scale)).sum()

    x, w = torch.randn(5, K), torch.randn(K, K, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(x, w), w)
    (got,) = torch.autograd.grad(compiled(loss)[0](x, w), w)
    assert torch.allclose(got, wanted)


# ---- torch.export


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, x in zip(("b", "b_scale"), per_block_cast_to_fp8(torch.randn(N, K)), strict=True):
            self.register_buffer(name, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer(x, self.b, self.b_scale)


def exported(module: torch.nn.Module, strict: bool = False) -> torch.export.ExportedProgram:
    """Export for every number of tokens, zero and one included."""
    return torch.export.export(
        module, (torch.randn(4, K),), dynamic_shapes=({0: torch.export.Dim("m")},), strict=strict
    )


@pytest.mark.parametrize(("device", "strict"), [("cpu", False), ("cpu", True), of_gpu(False)])
def test_export(device, strict):
    """torch 2.11 writes the dense bytes of a GPU's padded rows, and their strides: it cannot load them."""
    with torch.device(device):  # .cuda() makes rows dense, which products refuse where k is no multiple of 16
        module = Layer()
        program = exported(module, strict)
    programs = [program]
    if device == "cpu":
        written = io.BytesIO()
        torch.export.save(program, written)
        written.seek(0)
        programs.append(torch.export.load(written))
    for loaded in programs:
        for m in (1, *TOKENS):
            x = torch.randn(m, K, device=device)
            assert same(loaded.module()(x), module(x))


@pytest.mark.about(*changes.OF_OPS, "deep_tile/linear.py")
def test_ahead_of_time_inductor(tmp_path):
    """Takes most of this file's time: a C++ compiler's."""
    module = Layer()
    path = torch._inductor.aoti_compile_and_package(exported(module), package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for m in TOKENS:
        x = torch.randn(m, K)
        assert same(loaded(x), module(x))


# ---- other tracers, and fakes


def fakes(given: list[torch.Tensor], mode: FakeTensorMode) -> list[torch.Tensor]:
    return [mode.from_tensor(x) for x in given]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(5, 300), (1, 300), (4, 128), (3, 5, 300), (2, 1, 300), (300,), (2, 3, 4, 130), (0, 5), (5, 0), (3, 0, 5)],
    ids=str,
)
def test_fake_casts_are_like_real_ones(shape, layout):
    """Layouts are equal but for strides of dimensions of one element."""
    x = torch.randn(shape).bfloat16()
    calls = [(per_token_cast_to_fp8, OPS.per_token_cast_to_fp8, {"scale_layout": layout})]
    if x.dim() == 2 and layout == "row":
        calls.append((per_block_cast_to_fp8, OPS.per_block_cast_to_fp8, {}))
    for cast, op, keywords in calls:
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(x), **keywords)
        for seen, wanted in zip(fake, cast(x, **keywords), strict=True):
            assert (seen.shape, seen.dtype) == (wanted.shape, wanted.dtype)
            strides = zip(seen.shape, seen.stride(), wanted.stride(), strict=True)
            assert not wanted.numel() or all(size == 1 or got == right for size, got, right in strides)


TYPES = {"Tensor": torch.Tensor, "ScalarType": torch.dtype} | {kind.__name__: kind for kind in (bool, int, float, str)}
"""Types of values that schemas take as they are: they refuse or convert others."""


def overload_of(call: str, given: dict) -> OpOverload | None:
    """The overload of an op that takes these arguments as they are, if there is one."""
    by_rows = call == "per_token_cast_to_fp8" and {"rows", "offs", "counts"} & {*given}
    op = getattr(OPS, "per_token_cast_rows_to_fp8" if by_rows else call)
    for overload in map(partial(getattr, op), op.overloads()):
        types = {
            each.name: TYPES.get(re.sub(r"Optional|\W", "", str(each.real_type))) for each in overload._schema.arguments
        }
        needed = {each.name for each in overload._schema.arguments if not each.has_default_value()}
        if needed <= {*given} and all(type(x) is types.get(name) for name, x in given.items()):
            return overload
    return None


def is_seen_by_fakes(bad: BadCall, right: dict) -> bool:
    """Whether a call is wrong in a dtype, a size, a number or a name: fakes have no layouts, SMs or launches."""
    kinds = {name: (x.dtype, x.shape, x.device) for name, x in right.items() if isinstance(x, torch.Tensor)}
    return "not dense" not in bad.what and any(
        isinstance(x, (str, float, torch.dtype))
        or (isinstance(x, torch.Tensor) and kinds.get(name) != (x.dtype, x.shape, x.device))
        for name, x in bad.change(right).items()
    )


def wrong_arguments(bad: BadCall, right: dict) -> dict:
    """Casts allocate their results, where these are not what is wrong."""
    allocates = "scale_out" in right and bad.argument not in ("out", "scale_out")
    return right | bad.change(right) | ({"out": None, "scale_out": None} if allocates else {})


def asked_of_ops() -> Iterator[tuple[BadCall, OpOverload]]:
    """Wrong calls, each with its op."""
    right = cache(Good().arguments)
    for bad in (*WRONG_TENSORS, *WRONG_OPTIONS, *WRONG_CASTS, *WRONG_ROWS):
        if bad.call in discovery.OPS and not bad.needs and is_seen_by_fakes(bad, right(bad.call)):
            wrong = wrong_arguments(bad, right(bad.call))
            overload = overload_of(bad.call, {name: x for name, x in wrong.items() if x is not None})
            if overload:
                yield bad, overload


@pytest.mark.about(
    *("deep_tile/op*.py", "deep_tile/checks.py", "deep_tile/discovery.py", "deep_tile/dense.py", "deep_tile/api.py"),
    *("deep_tile/quantize.py", "deep_tile/experts.py", "tests/bad_calls.py"),
)
@pytest.mark.parametrize(("bad", "overload"), [pytest.param(*each, id=each[0].name) for each in asked_of_ops()])
def test_wrong_calls_are_refused_alike(bad, overload):
    """The function, its op, the op's fake and torch.compile refuse alike."""
    function, wrong = getattr(deep_tile, bad.call), wrong_arguments(bad, Good().arguments(bad.call))
    with pytest.raises(bad.error) as raised:
        function(**wrong)
    text = re.escape(str(raised.value))
    given = {name: x for name, x in wrong.items() if x is not None}
    with FakeTensorMode() as mode:
        faked = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        with pytest.raises(bad.error, match=text):
            overload(**faked)
    with pytest.raises(bad.error, match=text):
        overload(**given)
    with pytest.raises(Exception, match=text):
        compiled(function)[0](**wrong)


# ---- eager calls


@pytest.mark.filterwarnings("error::UserWarning")
def test_compiling_warns_of_nothing():
    """dynamo warned of cached functions, and of the query for autocast: here it compiles casts, GEMMs and layers that
    train."""
    layer = train.Linear(128, 128)
    compiled = torch.compile(
        lambda x: layer(dequantize(*per_token_cast_to_fp8(x)) * x), fullgraph=True, backend="eager"
    )
    compiled(torch.randn(8, 128)).sum()


def test_eager_calls_pass_no_op():
    given = operands(5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fp8_gemm(*given)
        per_token_cast_to_fp8(torch.randn(5, K))
        per_block_cast_to_fp8(torch.randn(5, K))
    seen = [event.name for event in profile.events()]
    assert seen and not any("deep_tile" in name for name in seen)


def test_an_op_that_runs_while_something_is_traced_does_its_work(monkeypatch):
    """The op does not call itself: torch.export runs some with real tensors."""
    given, x = operands(5), torch.randn(5, K)
    wanted = fp8_gemm(*given), *per_token_cast_to_fp8(x), *per_block_cast_to_fp8(x)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    got = OPS.fp8_gemm(*given), *OPS.per_token_cast_to_fp8(x), *OPS.per_block_cast_to_fp8(x)
    assert all(map(same, got, wanted))


def test_importing_a_function_registers_its_op():
    """No compiler is imported, which takes longer than torch."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from deep_tile import fp8_gemm\n"
        "assert not {'sympy', 'torch._dynamo', 'torch._inductor'} & (set(sys.modules) - before)\n"
        "torch.ops.deep_tile.fp8_gemm.out, torch.ops.deep_tile.per_token_cast_to_fp8.default\n"
        "torch.ops.deep_tile.per_block_cast_to_fp8.out\n"
    )
    run_python(code)
