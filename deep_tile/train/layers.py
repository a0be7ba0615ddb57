"""`Linear`, which trains in FP8, and `convert` for models."""

import inspect
import re
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn

from deep_tile import tensors
from deep_tile.select.training import predict
from deep_tile.train.gathered import Shard
from deep_tile.train.linear import linear
from deep_tile.train.mlp import mlp
from deep_tile.train.recipe import Recipe, require
from deep_tile.train.sharded import is_sharded, sharded_linear


class Linear(nn.Linear):
    """`torch.nn.Linear` with all three GEMMs in FP8, and with `nn.Linear`'s parameters in bfloat16, float16 or float32.

    Works with everything that stores, shards or optimises an `nn.Linear`: state_dict, optimisers, DDP, FSDP2, peft.

    Attributes:
        recipe: the GEMMs' formats; see `Recipe`.
    """

    recipe: Recipe = Recipe()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if is_sharded(input, self.weight):
            return sharded_linear(input, self.weight, self.bias, self.recipe)
        return linear(input, self.weight, self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fprop=fp8, dgrad={self.recipe.dgrad}, wgrad={self.recipe.wgrad}"


_GATED = re.compile(
    r"def forward\(self, x\)[^:]*:\s+(return|down_proj =) "
    r"self\.down_proj\(self\.act_fn\(self\.gate_proj\(x\)\) \* self\.up_proj\(x\)\)(\s+return down_proj)?"
)
"""A gated MLP's forward pass, as transformers writes it."""


class _Mlp:
    """Mixin for a gated MLP class: the forward pass is one function while its layers are as converted. Modules with
    hooks, adapters in their place and DTensors are called one by one."""

    def __reduce_ex__(self, protocol):
        """Pickles by the original class, since a subclass made here cannot be found by its name."""
        made, bases = super().__reduce_ex__(max(protocol, 2)), type(self).__bases__
        return (_copied, bases[1:], *made[2:]) if bases[0] is _Mlp else made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_gated(self) or is_sharded(x, self.gate_proj.weight):
            return super().forward(x)
        weights = self.gate_proj.weight, self.up_proj.weight
        return mlp(x, weights, self.down_proj.weight, recipe=self.down_proj.recipe)


def is_gated(module: nn.Module) -> bool:
    """Whether a module has SiLU and three layers that do nothing but multiply, by one recipe."""
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    silu = getattr(module, "act_fn", None)
    return (
        type(silu).__name__ in ("SiLU", "SiLUActivation")
        and all(type(layer) is Linear and layer.bias is None for layer in layers)
        and all(map(_is_bare, (silu, *layers)))
        and not torch.nn.modules.module._has_any_global_hook()
        and all(_are_equal(layer.recipe, layers[0].recipe) for layer in layers[1:])
    )


def _are_equal(one: Recipe, other: Recipe) -> bool:
    return one is other or one == other  # dataclasses compare themselves field by field, too


def _is_bare(module: nn.Module) -> bool:
    """Whether a call runs the class's forward alone: no hooks, no own forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_own_forward(module)
    )


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module)


@cache
def _with_mlp(of: type) -> type:
    """A subclass that calls `mlp`, or the class itself if its forward pass differs."""
    try:
        text = inspect.getsource(of.forward)
    except (OSError, TypeError):
        return of
    return type(of.__name__, (_Mlp, of), {"__module__": of.__module__}) if _GATED.fullmatch(text.strip()) else of


def _copied(of: type) -> nn.Module:
    """An empty converted MLP for pickle and copy, which then set its state."""
    kind = _with_mlp(of)
    return kind.__new__(kind)


def convert(
    model: nn.Module,
    wanted: Callable[[str, nn.Linear], bool] | None = None,
    *,
    tokens: int = 8192,
    eager: bool = False,
    recipe: Recipe = Linear.recipe,
) -> nn.Module:
    """Make a model's `nn.Linear` layers train in FP8, in place.

    Layers become `deep_tile.train.Linear` and stay the same objects, with their parameters, hooks and names: an
    existing optimiser keeps working, and state_dicts load in both directions. Subclasses of `nn.Linear` are left
    unchanged. transformers' gated MLPs with three converted layers call `mlp` unless these have hooks.

    Args:
        model: a module; one `nn.Linear` is converted itself.
        wanted: called with each layer's name and the layer; False leaves it. None: each layer that gains by `predict`
            at this many `tokens`, except names ending in "lm_head" or "head".
        tokens: per forward pass. eager: as for `predict`, which then leaves out small layers.
        recipe: the layers' recipe.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module, `wanted` no function, or `recipe` no `Recipe`.
        ValueError: no layer is wanted, or a wanted one has a `forward` of its own. No layer has changed.
    """
    tensors.require_module(model)
    require(recipe)
    if wanted is not None and not callable(wanted):
        raise TypeError(f"wanted is {wanted!r}; pass a function of a layer's name and the layer, or None")
    known = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    pays = partial(_pays, tokens, eager)
    layers = {name: each for name, each in known.items() if (wanted or pays)(name, each)}
    if not layers:
        raise ValueError(_none_wanted(len(known), wanted is None, tokens))
    wrapped = [name for name, layer in layers.items() if _has_own_forward(layer)]
    if wrapped:
        raise ValueError(
            f"{', '.join(wrapped[:3])}: {len(wrapped)} layers have a forward of their own, as accelerate's hooks leave "
            "it, which a new class does not change. Convert the model before, or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first, or leave them out by wanted="
        )
    for layer in layers.values():
        layer.__class__ = Linear
        layer.recipe = recipe
    for module in filter(is_gated, model.modules()):
        module.__class__ = _with_mlp(type(module))
    return model


def _none_wanted(known: int, by_default: bool, tokens: int) -> str:
    if not known:
        return "model has no torch.nn.Linear, whose subclasses are left as they are: pass the model that has the layers"
    if not by_default:
        return f"model has {known} torch.nn.Linear, and `wanted` accepts none: check what it returns for each layer"
    return (
        f"model has {known} torch.nn.Linear, and none gains by FP8 at tokens={tokens}, heads left out: pass the tokens "
        "of a forward pass, or convert all by wanted=lambda name, layer: True"
    )


def _pays(tokens: int, eager: bool, name: str, layer: nn.Linear) -> bool:
    is_last = name.rpartition(".")[2] in ("lm_head", "head")
    return not is_last and predict(tokens, *layer.weight.shape, eager=eager).pays


def gather_fp8(model: nn.Module) -> nn.Module:
    """Have FSDP2 gather the weights of a model's `Linear` layers in FP8: half of BF16's bytes, in both passes.

    Call it after `convert`, and before `fully_shard` and the optimiser: weights become parameters of a class of their
    own, over the same memory. Each rank casts its rows once for a gathering; gradients are sent as before. A weight
    whose rows are no multiple of 128 for each rank, or columns none of 16, is gathered in its dtype, and so is one of a
    recipe with dgrad in BF16. Other operations than the layer's see a gathered weight as FP8 rounds it.

    Args:
        model: with layers of `deep_tile.train.Linear`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: there is no such layer, or its weight is sharded already.
    """
    tensors.require_module(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    if not layers:
        raise ValueError("model has no deep_tile.train.Linear; convert it first, by deep_tile.train.convert(model)")
    for layer in layers:
        if type(layer.weight) is not nn.Parameter:
            raise ValueError(
                f"a weight is a {type(layer.weight).__name__}; call gather_fp8 before the model is sharded"
            )
    of_weight: dict[nn.Parameter, nn.Parameter] = {}  # layers that share a weight still do
    for layer in layers:
        weight = layer.weight
        if weight not in of_weight:
            of_weight[weight] = nn.Parameter(Shard(weight.detach()), weight.requires_grad)
        layer.weight = of_weight[weight]
    return model
