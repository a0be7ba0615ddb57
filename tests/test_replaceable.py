"""Models whose linears are replaced: what is carried over, what stays, and what is refused before any change."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import prune

from deep_tile import nn

Linear = torch.nn.Linear
Subclass = torch.nn.modules.linear.NonDynamicallyQuantizableLinear


class Calls(torch.nn.Module):
    """Calls its layers one after the other, and reads attributes that FP8 layers have, too."""

    def __init__(self, **layers: torch.nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x.to(layer.weight.device))
        return x


class Casts(Calls):
    """A cast to the weight's dtype, as in T5's feed-forward layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(x.to(self.wo.weight.dtype))


class Multiplies(Calls):
    """Multiplies by a layer's weight in a method that forward calls, and in a function inside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda: x @ self.inner.head.weight.t())()


class Initialises(Calls):
    """Weights that nobody reads in forward."""

    def reset(self) -> None:
        torch.nn.init.ones_(self.wo.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(x.to(self.wo.weight.device)[..., : self.wo.weight.shape[1]])


def linear(out_features: int = 32) -> torch.nn.Linear:
    return Linear(32, out_features)


def tied(other: torch.nn.Module) -> Calls:
    model = Calls(lm_head=linear(), other=other)
    model.lm_head.weight = other.weight
    return model


def tied_in_memory() -> Calls:
    model = tied(torch.nn.Embedding(32, 32))
    model.lm_head.weight = torch.nn.Parameter(model.other.weight.data)
    return model


def on_meta() -> Calls:
    with torch.device("meta"):
        return tied(torch.nn.Embedding(32, 32))


def changed(change) -> Calls:
    """A model with a layer that a function has changed."""
    model = Calls(first=linear(), last=linear())
    change(model.last)
    return model


def hooked(layer: torch.nn.Linear) -> None:
    """A layer with a hook by accelerate's add_hook_to_module."""
    layer._hf_hook, layer._old_forward = SimpleNamespace(), layer.forward
    layer.forward = lambda x: layer._old_forward(x)


def pruned(layer: torch.nn.Linear) -> None:
    prune.random_unstructured(layer, "weight", 0.5)


class Wrapped(torch.Tensor):
    """A wrapped weight, as DTensor's and packed ones."""


def wrapped(layer: torch.nn.Linear) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.as_subclass(Wrapped))


def quantized(layer: torch.nn.Linear) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


def encoder() -> torch.nn.TransformerEncoder:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


REFUSED = {
    "training": (lambda: Calls(last=linear()), r"'last': it trains.*eval\(\).*requires_grad_\(False"),
    "an embedding's": (lambda: tied(torch.nn.Embedding(32, 32)), "'lm_head': its weight is that of 'other.weight'"),
    "its memory": (tied_in_memory, "is that of 'other.weight'.*clone.*tie_word_embeddings"),
    "on meta": (on_meta, "is that of 'other.weight'"),
    "a subclass's": (lambda: tied(Subclass(32, 32)), "is that of 'other.weight'"),
    "reads dtype": (lambda: Casts(wo=linear()), "'wo': Casts reads wo.weight itself.*stays wide"),
    "reads deep": (lambda: Multiplies(inner=Calls(head=linear())), "Multiplies reads inner.head.weight itself"),
    "fast path": (encoder, r"'layers.0.linear1', 'layers.1.linear1'.*mha.set_fastpath_enabled\(False\)"),
    "accelerate": (lambda: changed(hooked), "'last': it has a _hf_hook of its own.*remove_hook_from_module"),
    "compiled": (lambda: changed(Linear.compile), "has a _compiled_call_impl of its own"),
    "weight norm": (lambda: changed(torch.nn.utils.weight_norm), "weight_g, weight_v.*remove_weight_norm"),
    "spectral norm": (lambda: changed(torch.nn.utils.spectral_norm), "'last': it computes its weight"),
    "pruned": (lambda: changed(pruned), "'last': it computes its weight.*prune.remove"),
    "a buffer": (lambda: changed(lambda layer: layer.register_buffer("step", torch.ones(1))), "of step, weight"),
    "a wrapper": (lambda: changed(wrapped), "its weight is a Wrapped.*before parallelize_module"),
    "loading": (lambda: changed(lambda layer: layer.register_load_state_dict_post_hook(print)), "hooks of state_dict"),
    "saving": (lambda: changed(lambda layer: layer.register_state_dict_pre_hook(print)), "hooks of state_dict"),
    "a gradient": (lambda: changed(lambda layer: layer.weight.register_hook(print)), "has hooks of its gradient"),
}


def structure(model: torch.nn.Module) -> list:
    return [(name, id(module), id(vars(module).get("weight"))) for name, module in model.named_modules()]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """Before any layer is replaced."""
    make, message = REFUSED[name]
    model = make().train(name == "training")
    before = structure(model)
    with pytest.raises(ValueError, match=message):
        nn.replace_linears(model)
    assert structure(model) == before


def test_refused_types():
    with pytest.raises(TypeError, match="model is a torch.nn.Linear itself.*from_float"):
        nn.replace_linears(linear().eval())
    model = changed(quantized).eval()
    with pytest.raises(TypeError, match="the weight of 'last' is torch.float8_e4m3fn; it must be one of torch.float64"):
        nn.replace_linears(model)
    assert type(model.first) is Linear


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"amax": 1.0}, TypeError, "amax"),
        ({"exact": "fast"}, ValueError, "exact is 'fast'"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant is 1"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype must be"),
    ],
)
def test_options_are_tried_first(options, kind, message):
    model = Calls(last=linear()).eval()
    with pytest.raises(kind, match=message):
        nn.replace_linears(model, **options)
    assert type(model.last) is Linear


def test_what_a_refusal_says_can_be_done():
    """The lambda in the message leaves out the layers that cannot be replaced."""
    model = Calls(**{f"block{i}": Casts(wi=linear(), wo=linear()) for i in range(5)}).eval()
    with pytest.raises(ValueError, match="and 2 more: Casts reads") as error:
        nn.replace_linears(model)
    wanted = eval(str(error.value).rpartition("wanted=")[2])
    assert nn.replace_linears(model, wanted) == 5
    assert all(type(block.wi) is nn.Linear and type(block.wo) is Linear for block in model.children())


def test_hooks_go_along():
    """Before, behind and of gradients, with keywords and without; their handles remove them still."""
    model, seen = Calls(last=linear()).eval(), []
    layer = model.last
    handles = [
        layer.register_forward_pre_hook(lambda module, given: seen.append(("pre", module))),
        layer.register_forward_hook(lambda module, given, named, out: seen.append(("hook", module)), with_kwargs=True),
        layer.register_full_backward_hook(lambda module, before, after: seen.append(("backward", module))),
        layer.register_full_backward_pre_hook(lambda module, grad: seen.append(("backward pre", module))),
    ]
    layer.tag = "kept"
    assert nn.replace_linears(model) == 1 and model.last.tag == "kept"
    model(torch.randn(2, 32, requires_grad=True)).sum().backward()
    assert seen == [(name, model.last) for name in ("pre", "hook", "backward pre", "backward")]
    for handle in handles:
        handle.remove()
    model(torch.randn(2, 32, requires_grad=True)).sum().backward()
    assert len(seen) == 4


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x.view(48, 64)], ids=["transpose", "other shape"])
def test_layers_of_one_memory_have_their_own_weights(view):
    """An autoencoder's second half may be the transpose of its first."""
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48)).eval().requires_grad_(False)
    model[1].weight.data = view(model[0].weight.data)
    wanted, x = [nn.Linear.from_float(layer) for layer in model], torch.randn(3, 48)
    assert nn.replace_linears(model) == 2
    assert torch.equal(model[0](x), wanted[0](x)) and torch.equal(model(x), wanted[1](wanted[0](x)))


def test_layers_that_share_a_weight_share_it():
    model = Calls(one=linear(), two=linear()).eval()
    model.two.weight = model.one.weight
    seed = torch.random.get_rng_state()
    assert nn.replace_linears(model) == 2 and torch.equal(torch.random.get_rng_state(), seed)
    assert model.two.weight is model.one.weight and model.two.weight_scale_inv is model.one.weight_scale_inv
    assert model.two.bias is not model.one.bias and not model.two.training


def test_a_layer_of_two_names_is_replaced_at_both_or_not():
    model = Calls(one=linear()).eval()
    model.two = model.one
    with pytest.raises(ValueError, match="'one': its weight is that of 'two.weight'"):
        nn.replace_linears(model, lambda name, layer: name == "one")
    assert nn.replace_linears(model) == 1 and model.two is model.one


def test_subclasses_and_readers_of_sizes_are_let_be():
    model = Initialises(
        wo=linear(),
        attention=torch.nn.MultiheadAttention(32, 2),
        normed=torch.nn.utils.parametrizations.weight_norm(linear()),
    )
    assert nn.replace_linears(model.eval()) == 1
    assert model(torch.randn(2, 32)).shape == (2, 32)


def test_encoders_without_their_fast_path():
    model = encoder().eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        wide = model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert nn.replace_linears(model) == 4
            assert 0 < (model(x) - wide).norm() / wide.norm() < 0.1
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class Adapted(torch.nn.Module):
    """An adapter like peft's, which trains beside a layer."""

    adapter_layer_names = ("lora_A", "lora_B", "modules_to_save")

    def __init__(self):
        super().__init__()
        self.base_layer = linear().requires_grad_(False)
        self.lora_A, self.lora_B = (torch.nn.ModuleDict({"default": Linear(*sizes)}) for sizes in ((32, 8), (8, 32)))
        self.original_module = linear()
        self.modules_to_save = torch.nn.ModuleDict({"default": linear()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_stay_and_train():
    model = Calls(layer=Adapted()).train()
    assert nn.replace_linears(model) == 1
    assert [name for name, layer in model.named_modules() if type(layer) is nn.Linear] == ["layer.base_layer"]
    model.layer(torch.randn(2, 32)).square().sum().backward()
    assert all(adapter["default"].weight.grad.isfinite().all() for adapter in (model.layer.lora_A, model.layer.lora_B))


def test_training_is_said_to_be_of_the_rest(recwarn):
    """The warning names weights that trained before, and none that were frozen."""
    frozen, model = Calls(last=linear().requires_grad_(False)).eval(), Calls(last=linear()).eval()
    for each in (frozen, model):
        nn.replace_linears(each)
    frozen.train()
    copy.deepcopy(model).eval()
    assert not recwarn
    with pytest.warns(UserWarning, match="their FP8 weights are frozen"):
        model.train()


def test_wide_memory_is_freed_as_layers_are_replaced(monkeypatch):
    """The peak is below the memory of both models."""
    model, alive = Calls(**{f"layer{i}": linear() for i in range(4)}).eval(), []
    from_float = nn.Linear.from_float.__func__

    def counted(cls, layer, **options):
        alive.append(sum(type(each) is Linear for each in model.modules()))
        return from_float(cls, layer, **options)

    monkeypatch.setattr(nn.Linear, "from_float", classmethod(counted))
    nn.replace_linears(model)
    assert alive[-4:] == [4, 3, 2, 1] and sys.getrefcount(model.layer0) < 5
