"""`fp8_linear` as an op: compiled, exported, differentiated under torch.compile, on the CPU and on a Hopper GPU."""

from functools import partial

import changes
import pytest
import torch
from test_linear import DEVICES, in_turn, make_layer
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deep_tile import fp8_linear, linear


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    torch._dynamo.reset()
    return request.param


@pytest.mark.about(*changes.OF_OPS, "deep_tile/linear.py", "deep_tile/dense.py", "deep_tile/quantize.py")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_every_m(device, backend):
    """Two layers and the code between them, without a graph break. The first call fixes no m. What lies between them is
    a kernel of torch's, so that inductor has no C++ to compile."""
    _, *first, _ = make_layer((1, 208), 144, device)
    _, *second, bias = make_layer((1, 144), 130, device)

    between = torch.randn(144, 144, dtype=torch.bfloat16, device=device)

    def model(x):
        return fp8_linear(fp8_linear(x, *first) @ between, *second, bias, out_dtype=torch.float32)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for m in (7, 33, 4, 300):
        x = torch.randn(2, m, 208, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
        compilations.append(counter.frame_count)
    assert compilations == [compilations[0]] * 4


@pytest.mark.parametrize("wide", [False, True], ids=["quantised weight", "wide weight"])
def test_gradients_under_compile(device, wide):
    x, b, b_scale, bias = make_layer((5, 208), 130, device)
    if wide:
        b, b_scale = torch.randn(130, 208, dtype=torch.bfloat16, device=device, requires_grad=True), None
    wanted = [x.requires_grad_(), bias.requires_grad_(), *([b] if wide else [])]

    def loss(x, bias):
        return fp8_linear(x, b, b_scale, bias).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    expected = torch.autograd.grad(loss(x, bias), wanted)
    got = torch.autograd.grad(compiled(x, bias), wanted)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-6, atol=2**-6 * other.abs().max().item())


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        ([torch.ops.deep_tile.fp8_linear.default], 2),
        (lambda context, op, *_, **__: CheckpointPolicy.MUST_SAVE, 2),
        (lambda context, op, *_, **__: CheckpointPolicy.PREFER_RECOMPUTE, 4),
    ],
    ids=["by name", "all", "none"],
)
@pytest.mark.parametrize("wide", [False, True], ids=["quantised weight", "wide weight"])
def test_selective_checkpoints(device, monkeypatch, wide, policy, forwards):
    """Twice in a row, since a thread's first forward may allocate what the second does not."""
    x, b, b_scale, bias = make_layer((5, 208), 208, device)
    if wide:
        b, b_scale = torch.randn(208, 208, dtype=torch.bfloat16, device=device), None
    allocate, made = linear.FP8_LINEAR.allocated, []
    monkeypatch.setattr(linear.FP8_LINEAR, "allocated", lambda *given: made.append(1) or allocate(*given))

    def block(x):
        return fp8_linear(torch.relu(fp8_linear(x, b, b_scale, bias)), b, b_scale).float().square().sum()

    (wanted,) = torch.autograd.grad(block(x.requires_grad_()), x)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    for _ in range(2):
        made.clear()
        (got,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=contexts), x)
        assert torch.equal(got, wanted) and len(made) == forwards


def test_a_gradient_that_does_not_exist_is_refused_while_tracing(device):
    x, b, b_scale, _ = make_layer((5, 208), 130, device)
    scale = b_scale.clone().requires_grad_()
    with pytest.raises(Exception, match="b_scale requires a gradient"):
        torch.compile(fp8_linear, backend="aot_eager", fullgraph=True)(x, b, scale)
    with pytest.raises(RuntimeError, match="b_scale requires a gradient"):
        torch.ops.deep_tile.fp8_linear(x, b, scale)


def test_the_op_in_eager(device):
    x, b, b_scale, bias = make_layer((2, 5, 208), 130, device)
    op = torch.ops.deep_tile.fp8_linear
    assert torch.equal(op(x, b, b_scale, bias), fp8_linear(x, b, b_scale, bias))
    x.requires_grad_()
    grad = torch.randn(2, 5, 130, device=device).bfloat16()
    (of_op,) = torch.autograd.grad(op(x, b, b_scale), x, grad)
    (of_call,) = torch.autograd.grad(fp8_linear(x, b, b_scale), x, grad)
    assert torch.equal(of_op, of_call)
    out = torch.empty_like(grad)
    with pytest.raises(RuntimeError, match="out is given, and writing"):
        op.out(x, b, b_scale, None, out)
    assert op.out(x.detach(), b, b_scale, None, out) is None
    assert torch.equal(out, in_turn(x.detach(), b, b_scale))


def test_export(device):
    _, b, b_scale, bias = make_layer((1, 208), 130, device)

    class Model(torch.nn.Module):
        def forward(self, x):
            return fp8_linear(x, b, b_scale, bias)

    x = torch.randn(3, 208, dtype=torch.bfloat16, device=device)
    program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("m")}})
    other = torch.randn(11, 208, dtype=torch.bfloat16, device=device)
    assert torch.equal(program.module()(other), fp8_linear(other, b, b_scale, bias))


@pytest.mark.gpu
def test_reduce_overhead():
    """CUDA graphs of torch.compile: contents and m change, and eager calls on the same stream go on between replays."""
    torch._dynamo.reset()
    layers = [make_layer((1, 768), 768, "cuda")[1:3] for _ in range(4)]

    def model(x):
        for layer in layers:
            x = torch.relu(fp8_linear(x, *layer))
        return x

    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    other = torch.randn(16, 768, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected_other = in_turn(other, *layers[0])
        for call in range(12):
            x = torch.randn((8, 24)[call % 2], 768, dtype=torch.bfloat16, device="cuda") / 28
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x).clone()
            assert torch.equal(fp8_linear(other, *layers[0]), expected_other)
            assert torch.equal(got, model(x)), call
