"""What torch does around layers that train: gradients of gradients and of many outputs, selective checkpointing, other
memory under a weight, export, pickling, wrapped layers. Each is right bit for bit, or refused by name."""

import copy
import pickle
import sys
import threading
from functools import partial

import pytest
import torch
from helpers import same_bits
from test_train import ALL, defined, make_layer, small_model, stepped, trained
from test_train_mlp import Gated
from torch import nn
from torch.autograd import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import deep_tile
from deep_tile import fp8_linear, quantize_weight, train
from deep_tile.train import casts, convert, linear, mlp

X = torch.linspace(-2, 3, 9 * 128).view(9, 128).bfloat16()
CHOSEN = torch.arange(18).view(9, 2) % 3


def weights(*shapes):
    """The same in every call, also inside of transforms."""
    of = [torch.arange(torch.Size(shape).numel()) + 7 * i for i, shape in enumerate(shapes)]
    return [(each.view(shape).sin() / 8).bfloat16() for each, shape in zip(of, shapes, strict=True)]


def of_experts(x):
    return train.experts(x, CHOSEN, torch.ones(9, 2), *weights((3, 256, 128), (3, 128, 128)))


CALLS = {
    "linear": lambda x: linear(x, *weights((64, 128))),
    "mlp": lambda x: mlp(x, *weights((256, 128), (64, 128))),
    "mlp of three weights": lambda x: mlp(x, weights((128, 128), (128, 128)), *weights((64, 128))),
    "experts": of_experts,
}
EACH_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
FROZEN = {
    "fp8_linear": lambda x: fp8_linear(x, *quantize_weight(*weights((64, 128)))),
    "its op": lambda x: torch.ops.deep_tile.fp8_linear(x, *quantize_weight(*weights((64, 128)))),
}


@pytest.mark.parametrize("call", (CALLS | FROZEN).values(), ids=CALLS | FROZEN)
def test_a_gradient_penalty_is_refused(call):
    """torch's `once_differentiable` takes the gradient for a constant where the outputs' requires none."""
    x = X.clone().requires_grad_()
    y = call(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first-order. For a gradient penalty"):
        (y.sum() + dx.square().sum()).backward()


@pytest.mark.parametrize("product", [functional.hvp, functional.jvp])
@pytest.mark.parametrize("call", (CALLS | FROZEN).values(), ids=CALLS | FROZEN)
def test_products_with_second_derivatives_are_refused(call, product):
    """torch takes a gradient for a constant from which no graph leads back to what it is differentiated by."""
    with pytest.raises(RuntimeError, match="first-order"):
        product(lambda x: call(x).square().sum(), X, X)


def test_a_graph_of_gradients_that_nobody_differentiates():
    model, other, x = small_model(), small_model(), torch.randn(9, 72)
    other.load_state_dict(model.state_dict())
    for each, options in ((model, {}), (other, {"create_graph": True})):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            each(x).square().sum().backward(**options)
        nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        optimizer.step()
    assert all(map(same_bits, model.parameters(), other.parameters()))


@EACH_CALL
def test_gradients_of_many_outputs_at_once_are_refused(call):
    x = X.clone().requires_grad_()
    y = call(x)
    with pytest.raises(RuntimeError, match="one output gradient at a time: call torch.autograd.grad without"):
        torch.autograd.grad(y, x, torch.stack([y, y]), is_grads_batched=True)


@EACH_CALL
@pytest.mark.parametrize(
    "transform", [torch.func.grad, lambda f: lambda x: torch.func.vmap(f)(x[None]), torch.func.jacrev]
)
def test_transforms_are_refused(call, transform):
    """Also after a call like it outside of them."""
    call(X)
    with pytest.raises(RuntimeError, match="deep_tile.train does not run under transforms of torch.func; use torch"):
        transform(lambda x: call(x).sum())(X)


@EACH_CALL
def test_transforms_are_refused_in_compiled_code(call):
    """Dynamo makes zeros of an autograd.Function's gradients there."""
    with pytest.raises(RuntimeError, match="deep_tile.train does not run under transforms of torch.func; use torch"):
        torch.compile(lambda x: torch.func.grad(lambda x: call(x).sum())(x), backend="eager")(X)


@EACH_CALL
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE], ids=str)
def test_selective_checkpoints_change_no_bit(call, policy):
    """Of ops that write to what is recomputed, which then stays as it was allocated."""

    def choose(_, op, *given, **options):
        return policy if "deep_tile" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    got = []
    for options in ({}, {"context_fn": partial(create_selective_checkpoint_contexts, choose)}):
        x = X.clone().requires_grad_()
        y = checkpoint(lambda x: call(x * 2), x, use_reentrant=False, **options)  # noqa: B023
        got.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(map(same_bits, *got))


def test_memory_that_is_freed_and_taken_again_is_another():
    x, weight, bias, dy = make_layer()
    stepped(weight)
    for _ in range(10):
        trained(linear, x, weight, bias, dy)
        for _ in range(2):  # the second takes, as a rule, what the first gave back
            weight.data = weight.data * 2
        assert same_bits(linear(x, weight, bias), defined(x, weight, bias, dy)[0])


def test_a_cast_of_inference_mode_is_not_kept():
    x, weight, bias, dy = make_layer()
    stepped(weight)
    with torch.inference_mode():
        linear(x, weight, bias)
    assert all(map(same_bits, trained(linear, x, weight, bias, dy), defined(x, weight, bias, dy)))


def test_casts_are_dropped_while_other_threads_cast():
    weights, is_over = [nn.Parameter(torch.empty(1)) for _ in range(3000)], threading.Event()

    def cast():
        while not is_over.is_set():
            casts._may_keep(nn.Parameter(torch.empty(1)))

    other, before = threading.Thread(target=cast), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        for _ in range(8):
            for weight in weights:
                casts._may_keep(weight)
            train.invalidate()
    finally:
        is_over.set()
        other.join()
        sys.setswitchinterval(before)


def test_weights_are_swapped_once_told():
    x, weight, bias, dy = make_layer()
    trained(linear, x, stepped(weight), bias, dy)
    train.invalidate()
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones_like(weight)))
    for _ in range(2):
        assert all(map(same_bits, trained(linear, x, weight, bias, dy), defined(x, weight, bias, dy)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = train.Linear(128, 256, dtype=torch.bfloat16)
        self.first, self.last = map(nn.Parameter, weights((256, 128), (64, 128)))

    def forward(self, x):
        return self.layer(x), *train.linears(x, (self.last, self.first)), mlp(x, self.first, self.last)


def test_a_model_with_gradients_is_exported_by_dynamo():
    model = Layers()
    batch = ({0: torch.export.Dim("tokens", min=1, max=4096)},)
    exported = torch.export.export(model, (torch.randn(32, 128).bfloat16(),), dynamic_shapes=batch, strict=True)
    run = exported.module()
    with torch.no_grad():
        for x in (torch.randn(rows, 128).bfloat16() for rows in (1, 200)):
            assert all(map(torch.equal, run(x), model(x)))


def test_a_compiled_layer_trains_weights_that_fsdp_gathers():
    """Those with scales, as FSDP2 gives them to a layer."""
    x = torch.randn(9, 128).bfloat16()
    codes = quantize_weight(torch.randn(256, 128))
    gradients = []
    for run in (linear, torch.compile(linear, backend="aot_eager")):
        weight = train.gathered.Gathered(*codes, torch.bfloat16).requires_grad_()
        run(x, weight).square().sum().backward()
        gradients.append(weight.grad)
    assert gradients[1] is not None and same_bits(*gradients)


def test_converted_mlps_are_pickled_by_their_own_class():
    model, x = convert(nn.Sequential(Gated()), **ALL), torch.randn(5, 256)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other[0]) is type(model[0]) is not Gated and same_bits(other(x), model(x))
    model[0].__class__ = type("Derived", (type(model[0]),), {})
    assert same_bits(copy.deepcopy(model)(x), model(x))


def test_what_is_registered_at_a_gated_mlp_is_called():
    model, x, seen = convert(Gated(), **ALL), torch.randn(5, 256), []
    with model.act_fn.register_forward_hook(lambda *_: seen.append("act_fn")):
        model(x)
    with nn.modules.module.register_module_forward_hook(lambda layer, *_: seen.append(type(layer).__name__)):
        model(x)
    assert seen == ["act_fn", "Linear", "SiLU", "Linear", "Linear", "Gated"]


def test_wrapped_layers_are_refused():
    model = nn.Sequential(nn.Linear(72, 72), nn.Linear(72, 72))
    model[1].forward = model[1].forward
    with pytest.raises(ValueError, match="^1: 1 layers have a forward of their own, .*remove_hook_from_module"):
        convert(model, **ALL)
    assert type(model[0]) is nn.Linear
    assert type(convert(model, lambda name, _: name == "0")[0]) is deep_tile.train.Linear
