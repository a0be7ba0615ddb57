"""What small layers compute in calls of C, without a GPU: each kernel's definition on the memory that it is told.

Their operands are where `_prepare_...` has them lie, in memory full of NaN; bits are those of the calls one by one.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import same_bits
from test_train import make_layer
from torch.utils.checkpoint import checkpoint

from deep_tile import both, dense, experts, gated, tensors
from deep_tile.train import Recipe, joined, linear, linears, mlp

RECIPES = {
    "blocks": Recipe(),
    "columns": Recipe(wgrad="fp8_1x128", round_scale="pow2", amax_floor=1e-3),
}


def define(operation):
    """In the place of `prepare`; all operands must lie in the call's tensors."""

    def prepare(given, options, *, names, find):
        [find(x) for x in given if x is not None]
        operation.define(given, options)

    return prepare


def multiply(call, operands, names, accumulate=False):
    [names.place(x) for x in operands if x is not None]
    *factors, out = operands[:5]
    if call is dense.FP8_GEMM:
        dense.fp8_gemm(*factors, out, bias=operands[5])
    elif call is dense.FP8_WGRAD:
        dense.fp8_wgrad(*factors, out, accumulate=accumulate)
    else:
        dense.scaled_gemm(*factors, out=out, accumulate=accumulate)


@pytest.fixture
def steps(monkeypatch):
    """Has small layers of the CPU joined; the steps that are made."""
    made = []

    def launch(given, layer, prepare):
        made.append(prepare.__name__)
        prepare(given, layer)

    def poisoned(x, shape, strides, dtype):
        return torch.full(shape, 0xFF if dtype == torch.uint8 else float("nan"), dtype=dtype)

    for operation in (both.CAST_BOTH, both.CAST_WEIGHT, experts.SILU_MUL_CAST, gated.SWIGLU_GRADIENT):
        monkeypatch.setattr(operation, "prepare", define(operation))
    monkeypatch.setattr(joined, "_launch", launch)
    monkeypatch.setattr(joined, "_product", multiply)
    monkeypatch.setattr(joined, "tensors", SimpleNamespace(**vars(tensors) | {"new_empty": poisoned}))
    return made


def differentiate(call, x, parameters, dys):
    ys = call()
    made = (*(ys if isinstance(ys, tuple) else (ys,)), *torch.autograd.grad(ys, (x, *parameters), dys))
    return [each.detach() for each in made]


def assert_same(monkeypatch, steps, wanted_steps, *step):
    wanted = differentiate(*step)
    assert not steps
    monkeypatch.setattr(joined, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(sys.modules["deep_tile.train.linear"], "_checked", {})
    got = differentiate(*step)
    assert [name.removeprefix("_prepare_") for name in steps] == wanted_steps.split()
    assert [*map(same_bits, got, wanted)] == [True] * len(wanted)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in wanted]


LAYERS = {
    1: "forward backward",
    3: "forward next_forward next_forward backward next_backward next_backward",
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", LAYERS)
def test_layers_of_one_input(monkeypatch, steps, count, dtype, recipe):
    x, *_ = make_layer((2, 75, 200), dtype=dtype)
    layers = [make_layer((2, 75, 200), n, dtype)[1:] for n in (130, 256, 9)[:count]]
    weights, biases, dys = zip(*layers, strict=True)
    if count == 1:
        call = lambda: linear(x, *weights, *biases, recipe=recipe)  # noqa: E731
        return assert_same(monkeypatch, steps, LAYERS[1], call, x, (*weights, *biases), dys)
    call = lambda: linears(x, weights, (*biases[:-1], None), recipe=recipe)  # noqa: E731
    return assert_same(monkeypatch, steps, LAYERS[count], call, x, (*weights, *biases[:-1]), dys)


MLPS = {
    1: "forward last hidden swiglu gradients",
    2: "forward next_forward last hidden swiglu gradients gradients",
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", MLPS)
def test_mlps(monkeypatch, steps, count, dtype, recipe):
    """With gates and ups in so many weights."""
    x, *_ = make_layer((2, 75, 200), dtype=dtype)
    gates = [make_layer((1, 200), 512 // count, dtype)[1] for _ in range(count)]
    _, down, _, dy = make_layer((2, 75, 256), 72, dtype)
    call = lambda: mlp(x, gates, down, recipe=recipe)  # noqa: E731
    assert_same(monkeypatch, steps, MLPS[count], call, x, (*gates, down), dy)


def test_layers_save_as_many_tensors_whatever_was_called_before(monkeypatch, steps):
    """As checkpointing wants it, whose recomputation does not find a cast that the first pass found."""
    x, weight, *_, dy = make_layer((75, 200), 130)
    x = x * 1
    monkeypatch.setattr(joined, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(sys.modules["deep_tile.train.linear"], "_checked", {})
    linear(x, weight, recipe=Recipe(wgrad="bf16"))  # which is not joined, and casts x
    y = checkpoint(linear, x, weight, use_reentrant=False)
    linear(x * 1, weight, recipe=Recipe(wgrad="bf16"))
    y.backward(dy)
    assert [name.removeprefix("_prepare_") for name in steps] == ["forward", "forward", "backward"]


@pytest.mark.parametrize("padding", [64, 2], ids=str)
def test_what_is_kept_may_come_back_as_a_part_of_other_memory(monkeypatch, steps, padding):
    """As hooks for saved tensors may return it, behind so much padding."""
    x, *_ = make_layer((75, 200))
    gate_up, down, dy = make_layer((1, 200), 512)[1], *make_layer((75, 256), 72)[1::2]
    monkeypatch.setattr(joined, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(sys.modules["deep_tile.train.linear"], "_checked", {})

    def moved(kept):
        return torch.nn.functional.pad(kept.flatten(), (padding, 0))[padding:].view(kept.shape)

    for call, parameters in ((lambda: mlp(x, gate_up, down), [gate_up, down]), (lambda: linear(x, gate_up), [gate_up])):
        of_output = dy if len(parameters) == 2 else torch.ones(75, 512, dtype=x.dtype)
        wanted = differentiate(call, x, parameters, of_output)
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, moved):
            got = differentiate(call, x, parameters, of_output)
        assert [*map(same_bits, got, wanted)] == [True] * len(wanted)
