"""`train.mlp`, forward and backward, against float64; what it keeps; on a GPU against the CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits
from torch.utils.checkpoint import checkpoint

import deep_tile.train.layers  # noqa: F401
from deep_tile import cast_both, fp8_gemm, per_block_cast_to_fp8, silu_mul_cast_to_fp8, train
from deep_tile.reference import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CHAIN_ERROR = 0.085
"""As in test_train_experts.py."""

RECIPES = {
    "fp8": train.Recipe(),
    "1x128": train.Recipe(wgrad="fp8_1x128", round_scale="pow2"),
    "kept in fp8": train.Recipe(activations="fp8"),
    "recast": train.Recipe(recast=True),
    "bf16": train.Recipe(dgrad="bf16", wgrad="bf16"),
}
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def draw(tokens=(2, 150), k=256, inner=384, n=200, *, pair=False, dtype=torch.bfloat16, device="cpu"):
    """x, one weight or two of gates and ups, and the last; dy."""
    x = torch.randn(*tokens, k, device=device).to(dtype).requires_grad_()
    weight = torch.randn(2 * inner, k, device=device) / k**0.5
    first = [w.to(dtype).requires_grad_() for w in (weight.chunk(2) if pair else (weight,))]
    last = (torch.randn(n, inner, device=device) / inner**0.5).to(dtype).requires_grad_()
    return (x, first if pair else first[0], last), torch.randn(*tokens, n, device=device).to(dtype)


def leaves(x, first, last):
    return [x, *(first if isinstance(first, list) else [first]), last]


def step(layer, given, dy, **options):
    y = layer(*given, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves(*given), dy)]


def exact(x, first, last):
    weight = torch.cat(first) if isinstance(first, list) else first
    gate, up = (x @ weight.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ last.t()


def moved(given, dtype=None, device=None):
    move = lambda x: x.detach().to(device, dtype).requires_grad_()  # noqa: E731
    x, first, last = given
    return move(x), [*map(move, first)] if isinstance(first, list) else move(first), move(last)


@EACH_RECIPE
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("inner", [384, 72])
def test_output_and_gradients(inner, pair, device, recipe):
    given, dy = draw(inner=inner, pair=pair, device=device)
    made, wanted = step(train.mlp, given, dy, recipe=recipe), step(exact, moved(given, torch.float64), dy.double())
    for got, one, argument in zip(made, wanted, (dy, *leaves(*given)), strict=True):
        assert got.dtype == argument.dtype and got.shape == argument.shape
        assert relative_error(got, one) < CHAIN_ERROR


@pytest.mark.parametrize("device", DEVICES)
def test_forward_is_that_of_public_calls(device):
    (x, weight, last), _ = draw((256,), device=device)
    a, scale, *_ = cast_both(x.detach(), blocks=True)
    gate_up = fp8_gemm(a, scale, *per_block_cast_to_fp8(weight))
    wanted = fp8_gemm(*silu_mul_cast_to_fp8(gate_up), *per_block_cast_to_fp8(last))
    assert same_bits(train.mlp(x, weight, last).detach(), wanted)
    with torch.no_grad():
        assert same_bits(train.mlp(x, weight, last), wanted)
        assert same_bits(train.mlp(x, weight.chunk(2), last), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_computes_what_the_cpu_does(dtype, pair):
    given, dy = draw((300,), pair=pair, dtype=dtype)
    on_cpu, on_gpu = step(train.mlp, given, dy), step(train.mlp, moved(given, device="cuda"), dy.cuda())
    # A gate that BF16 rounds otherwise may be the largest of its 128x128, whose codes then have another scale: 0.013.
    assert all(relative_error(x.cpu(), y) < 0.03 for x, y in zip(on_gpu, on_cpu, strict=True))


@EACH_RECIPE
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_checkpointed_steps_have_the_bits(device, recipe):
    torch._dynamo.reset()
    given, dy = draw((128,), device=device)
    layer = lambda *given: train.mlp(*given, recipe=recipe)  # noqa: E731
    wanted = step(layer, given, dy)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run in (compiled, lambda *given: checkpoint(layer, *given, use_reentrant=False)):
        assert all(map(same_bits, step(run, given, dy), wanted)) or recipe.dgrad == "bf16"


@pytest.mark.parametrize("device", DEVICES)
def test_some_gradients_alone(device):
    given, dy = draw((130,), pair=True, device=device)
    wanted = step(train.mlp, given, dy)
    for i, leaf in enumerate(leaves(*given)):
        for other in leaves(*given):
            other.requires_grad_(other is leaf)
        (got,) = torch.autograd.grad(train.mlp(*given), [leaf], dy)
        assert same_bits(got, wanted[1 + i])


@pytest.mark.parametrize("device", DEVICES)
def test_main_grad(device):
    given, dy = draw((256,), pair=True, device=device)
    wanted = step(train.mlp, given, dy)
    _, first, last = given
    for weight in (*first, last):
        weight.main_grad = torch.zeros(weight.shape, device=device)
    for _ in range(2):
        train.mlp(*given).backward(dy)
    for weight, one in zip((*first, last), wanted[2:], strict=True):
        assert weight.grad is None and relative_error(weight.main_grad, 2 * one.double()) < 5e-3


def test_autocast():
    given, dy = draw((128,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, *_ = step(train.mlp, given, dy.bfloat16())
    assert y.dtype == torch.bfloat16 and dx.dtype == torch.float32


@pytest.mark.parametrize(
    ("recipe", "bytes_per_element"), [(train.Recipe(recast=True), 2), (train.Recipe(recast=True, activations="fp8"), 1)]
)
def test_keeps_gates_and_ups_alone(recipe, bytes_per_element):
    """And x along tokens, in FP8; scales are a thirtieth. Weights are parameters, kept anyway."""
    (x, weight, last), _ = draw((512,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        train.mlp(x, weight, last, recipe=recipe)
    size = sum(t.numel() * t.element_size() for t in kept if t is not weight and t is not last)
    assert size == pytest.approx(x.numel() + 512 * weight.shape[0] * bytes_per_element, rel=0.04)


class Gated(torch.nn.Module):
    """As transformers has it."""

    def __init__(self, k=256, inner=384):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(k, inner, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(inner, k, bias=False), torch.nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class Clamped(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-1, 1)


def test_converted_mlps_are_one_function(monkeypatch):
    """While their layers are what they were: not one by one with hooks, adapters or other recipes."""
    model = torch.nn.Sequential(Gated(), Clamped(), Gated())
    train.convert(model, lambda *_: True)
    assert [isinstance(layer, Gated) for layer in model] == [True] * 3 and type(model[1]) is Clamped
    x, calls = torch.randn(130, 256), []
    of_it = train.layers.mlp
    monkeypatch.setattr(train.layers, "mlp", lambda *given, **options: calls.append(1) or of_it(*given, **options))

    def runs_as_one(layer):
        calls.clear()
        assert relative_error(layer(x).detach(), Gated.forward(layer, x).detach().double()) < 0.02
        return bool(calls)

    assert runs_as_one(model[0]) and runs_as_one(copy.deepcopy(model[2]))
    hook = model[0].up_proj.register_forward_hook(lambda *_: None)
    assert not runs_as_one(model[0])
    hook.remove()
    model[0].gate_proj.recipe = train.Recipe(recast=True)
    assert not runs_as_one(model[0])
    model[2].down_proj = torch.nn.Sequential(model[2].down_proj)
    assert not runs_as_one(model[2])
    assert {*model.state_dict()} == {f"{i}.{name}_proj.weight" for i in range(2) for name in ("gate", "up", "down")} | {
        *("2.gate_proj.weight", "2.up_proj.weight", "2.down_proj.0.weight")
    }


def test_mlps_of_transformers_are_one_function():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=128, intermediate_size=256)
    model = train.convert(llama.LlamaMLP(config), lambda *_: True)
    assert type(model) is not llama.LlamaMLP and isinstance(model, llama.LlamaMLP)
    x = torch.randn(40, 128)
    assert relative_error(model(x).detach(), llama.LlamaMLP.forward(model, x).detach().double()) < 0.02


WRONG = {
    "no recipe": (lambda x, w, d: (x, w, d, "fp8"), TypeError, "recipe is a str"),
    "three weights": (lambda x, w, d: (x, [w, w, w], d), ValueError, "w_gate_up holds 3 weights"),
    "another inner width": (lambda x, w, d: (x, w, d[:, :-1]), ValueError, r"it must be \[766, k\]"),
    "another k": (lambda x, w, d: (x, w[:, 1:], d), ValueError, r"for x of \[130, 256\] it must be"),
    "weights in FP8": (lambda x, w, d: (x, w.to(torch.float8_e4m3fn), d), TypeError, "weight is a tensor of"),
    "no last weight": (lambda x, w, d: (x, w, None), TypeError, "w_down is a NoneType"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(change, error, message):
    given, _ = draw((130,))
    *given, recipe = (*change(*given), train.Recipe())[:4]
    with pytest.raises(error, match=message):
        train.mlp(*given, recipe=recipe)


@pytest.mark.parametrize(("pair", "gradients"), [(False, True), (True, True), (True, False)])
def test_one_token_is_compiled_with_and_without_gradients(pair, gradients):
    given, dy = draw((1,), k=96, pair=pair)
    compiled = torch.compile(train.mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    if gradients:
        assert all(map(same_bits, step(compiled, given, dy), step(train.mlp, given, dy)))
    with torch.no_grad():
        assert same_bits(compiled(*given), train.mlp(*given))
