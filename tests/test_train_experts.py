"""`train.experts`, forward and backward, against experts one by one in float64; on a GPU against the CPU."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deep_tile import cast_both, fp8_grouped_wgrad, train
from deep_tile.reference import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

SIZES = [(300, 256, 192, 5, 2), (1, 128, 128, 4, 2), (257, 200, 72, 3, 1), (130, 136, 40, 33, 4)]
"""Tokens, width, width of an expert, experts, and how many each token has."""

CHAIN_ERROR = 0.085
"""Of two products in FP8, one of what the other made: 0.064 is seen."""


def draw(tokens: int, width: int, inner: int, experts: int, top_k: int) -> tuple[torch.Tensor, ...]:
    """Arguments, with a choice of no expert, and an expert that nobody chooses."""
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    chosen[chosen == experts - 1] = 0
    chosen[0, 0] = -1
    x = torch.randn(tokens, width).bfloat16().requires_grad_()
    shares = torch.rand(tokens, top_k).requires_grad_()
    w_gate_up = (torch.randn(experts, 2 * inner, width) / width**0.5).bfloat16().requires_grad_()
    w_down = (torch.randn(experts, width, inner) / inner**0.5).bfloat16().requires_grad_()
    return x, chosen, shares, w_gate_up, w_down


def exact(x, chosen, shares, w_gate_up, w_down) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert in range(len(w_gate_up)):
        for j in range(chosen.shape[1]):
            tokens = (chosen[:, j] == expert).nonzero().flatten()
            gate, up = (x[tokens] @ w_gate_up[expert].t()).chunk(2, 1)
            y = (F.silu(gate) * up) @ w_down[expert].t()
            out = out.index_add(0, tokens, y * shares[tokens, j, None])
    return out


def step(layer, arguments, dy) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of what has one."""
    y = layer(*arguments)
    return y.detach(), *torch.autograd.grad(y, [x for x in arguments if x.requires_grad], dy)


def on(device: str, arguments, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Leaves of their own; those that have gradients in `dtype`."""
    return [
        x.detach().to(device, dtype or x.dtype).requires_grad_() if x.requires_grad else x.to(device) for x in arguments
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_output_and_gradients(device, sizes):
    arguments = draw(*sizes)
    dy = torch.randn(sizes[0], sizes[1]).bfloat16()
    poison = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(4)]
    del poison  # what rows of no token hold
    made = step(train.experts, on(device, arguments), dy.to(device))
    wanted = step(exact, on(device, arguments, torch.float64), dy.to(device).double())
    for result, argument in zip(made[1:], (*arguments[:1], *arguments[2:]), strict=True):
        assert result.dtype == argument.dtype and result.isfinite().all()
    if sizes[0] > 1:  # errors of one token's few numbers are not those of many
        assert all(relative_error(*pair) < CHAIN_ERROR for pair in zip(made, wanted, strict=True))
    assert not made[3][-1].any() and not made[4][-1].any()  # of the expert that nobody chooses


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gpu_computes_what_the_cpu_does(sizes):
    arguments, dy = draw(*sizes), torch.randn(sizes[0], sizes[1]).bfloat16()
    on_cpu, on_gpu = (step(train.experts, on(device, arguments), dy.to(device)) for device in ("cpu", "cuda"))
    # A sum in another order can round the largest hidden number of a token to another BF16; its codes all differ then.
    bound = 0.01 if sizes[0] > 1 else 0.1
    assert all(relative_error(x.cpu(), y) < bound for x, y in zip(on_gpu, on_cpu, strict=True))


@pytest.mark.gpu
def test_graph_holds_for_every_routing():
    arguments, dy = on("cuda", draw(*SIZES[0])), torch.randn(*SIZES[0][:2], device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(train.experts, arguments, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(train.experts, arguments, dy)
    for _ in range(3):
        with torch.no_grad():
            arguments[1].copy_(draw(*SIZES[0])[1])
            arguments[3].mul_(1.25)
        graph.replay()
        made = [x.clone() for x in captured]
        assert all(map(torch.equal, made, step(train.experts, arguments, dy)))


def test_compiled_layer_does_the_same():
    arguments, dy = draw(*SIZES[0]), torch.randn(*SIZES[0][:2]).bfloat16()
    compiled = torch.compile(train.experts, fullgraph=True, backend="aot_eager")
    for made, wanted in zip(step(compiled, arguments, dy), step(train.experts, arguments, dy), strict=True):
        assert relative_error(made, wanted) < 1e-3


def test_weights_in_fp32_have_gradients_in_fp32():
    arguments, dy = draw(*SIZES[0]), torch.randn(*SIZES[0][:2]).bfloat16()
    wide = [x.detach().float().requires_grad_() if x.dim() == 3 else x for x in arguments]
    made, narrow = step(train.experts, wide, dy), step(train.experts, arguments, dy)
    assert made[3].dtype == made[4].dtype == torch.float32
    assert all(torch.equal(x.bfloat16(), y) for x, y in zip(made[3:], narrow[3:], strict=True))


def test_layer_trains():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).bfloat16() / 16) for shape in ((4, 256, 128), (4, 128, 128))]
    x, target = torch.randn(2, 128, 128).bfloat16()
    chosen, shares = torch.randint(0, 4, (128, 2)), torch.full((128, 2), 0.5)
    optimizer, losses = torch.optim.AdamW(weights, lr=3e-3), []
    for _ in range(12):
        loss = (train.experts(x, chosen, shares, *weights) - target).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({0: lambda x: x.float()}, TypeError, "x is a tensor of torch.float32"),
        ({1: lambda x: x.float()}, TypeError, "chosen is a tensor of torch.float32"),
        ({1: lambda x: x[:, :1]}, ValueError, "shares has shape"),
        ({3: lambda x: x[:, :-2]}, ValueError, "w_down has shape"),
        ({4: lambda x: x[0]}, ValueError, "x must be"),
        ({4: lambda x: x.to(torch.float8_e4m3fn)}, TypeError, "w_down is a tensor of torch.float8_e4m3fn"),
    ],
)
def test_wrong_arguments(change, error, text):
    arguments = list(draw(*SIZES[0]))
    for place, changed in change.items():
        arguments[place] = changed(arguments[place].detach())
    with pytest.raises(error, match=text):
        train.experts(*arguments)


def test_equal_arguments_are_checked_once(monkeypatch):
    """By every property that the checks read: another dtype or shape is checked, and refused, again."""
    module, arguments, checked = sys.modules["deep_tile.train.experts"], draw(*SIZES[0]), []
    check = module._check
    monkeypatch.setattr(module, "_checked", {})
    monkeypatch.setattr(module, "_check", lambda *given: checked.append(given) or check(*given))
    for _ in range(3):
        train.experts(*arguments)
    assert len(checked) == 1
    x, chosen, shares, *weights = arguments
    for wrong, error in (((x.half(), chosen, shares), TypeError), ((x, chosen[:, :1], shares), ValueError)):
        for _ in range(2):
            with pytest.raises(error):
                train.experts(*wrong, *weights)
    assert len(checked) == 5


def test_recipe_in_bf16_is_refused():
    with pytest.raises(ValueError, match="experts run all their GEMMs in FP8"):
        train.experts(*draw(*SIZES[0]), recipe=train.Recipe(wgrad="bf16"))
    with pytest.raises(TypeError, match="recipe is a dict; it must be a deep_tile.train.Recipe"):
        train.experts(*draw(*SIZES[0]), recipe={"dgrad": "fp8"})


@pytest.mark.parametrize("sizes", [SIZES[0], (300, 256, 128, 5, 2)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gates_and_ups_kept_in_fp8(device, sizes):
    """The output is the same, gradients have a somewhat larger error, and less is kept."""
    arguments, dy = on(device, draw(*sizes)), torch.randn(*sizes[:2], device=device).bfloat16()
    narrow = lambda *given: train.experts(*given, recipe=train.Recipe(activations="fp8"))  # noqa: E731
    made, plain = step(narrow, arguments, dy), step(train.experts, arguments, dy)
    wanted = step(exact, on(device, arguments, torch.float64), dy.double())
    assert torch.equal(made[0], plain[0])
    assert all(relative_error(*pair) < 1.1 * CHAIN_ERROR for pair in zip(made, wanted, strict=True))
    sizes = []
    for layer in (narrow, train.experts):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            layer(*arguments)
        sizes.append(sum(x.numel() * x.element_size() for x in kept))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_cast_again_change_no_bit(device):
    arguments, dy = on(device, draw(*SIZES[0])), torch.randn(*SIZES[0][:2], device=device).bfloat16()
    again = lambda *given: train.experts(*given, recipe=train.Recipe(recast=True))  # noqa: E731
    assert all(map(torch.equal, step(again, arguments, dy), step(train.experts, arguments, dy)))


@pytest.mark.parametrize("device", DEVICES)
def test_main_grads_are_added_to(device):
    arguments, dy = on(device, draw(*SIZES[0])), torch.randn(*SIZES[0][:2], device=device).bfloat16()
    wanted = step(train.experts, arguments, dy)
    for weight in arguments[3:]:
        weight.main_grad = torch.zeros(weight.shape, device=device)
        weight.grad_added_to_main_grad = False
    for _ in range(2):
        train.experts(*arguments).backward(dy)
    for weight, one in zip(arguments[3:], wanted[3:], strict=True):
        assert weight.grad_added_to_main_grad and relative_error(weight.main_grad, 2 * one.double()) < 5e-3


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_in_bf16(device, accumulate):
    """`fp8_grouped_wgrad` rounds its sums once, and once more what they are added to."""
    offs = torch.tensor([100, 128, 128 + 77, 384], dtype=torch.int32, device=device)
    dy, x = (cast_both(torch.randn(400, n).bfloat16().to(device), offs=offs) for n in (72, 136))
    operands = dy.at, dy.at_scale, x.at, x.at_scale, offs
    before = torch.randn(4, 72, 136, device=device)
    wide = fp8_grouped_wgrad(*operands, before.bfloat16().float(), accumulate=accumulate)
    narrow = fp8_grouped_wgrad(*operands, before.bfloat16(), accumulate=accumulate)
    assert relative_error(narrow, wide) < 3e-3
    if not accumulate:
        assert torch.equal(narrow, wide.bfloat16())
