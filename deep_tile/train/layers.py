"""Linear layers that train in FP8, as modules, and models whose layers become such."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from deep_tile.train.linear import linear
from deep_tile.train.predict import predict
from deep_tile.train.recipe import Recipe, require
from deep_tile.train.sharded import is_sharded, sharded_linear


class Linear(nn.Linear):
    """`torch.nn.Linear` whose three products are in FP8; its parameters are those of `nn.Linear`, in any wide dtype.

    Everything that keeps, shards or optimises an `nn.Linear` takes it: state_dict, optimisers, DDP, FSDP2, peft.

    Attributes:
        recipe: formats of the products; see `Recipe`.
    """

    recipe: Recipe = Recipe()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if is_sharded(input, self.weight):
            return sharded_linear(input, self.weight, self.bias, self.recipe)
        return linear(input, self.weight, self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fprop=fp8, dgrad={self.recipe.dgrad}, wgrad={self.recipe.wgrad}"


def convert(
    model: nn.Module,
    wanted: Callable[[str, nn.Linear], bool] | None = None,
    *,
    tokens: int = 8192,
    eager: bool = False,
    recipe: Recipe = Linear.recipe,
) -> nn.Module:
    """Have a model's `nn.Linear` layers train in FP8, in place.

    Layers become `deep_tile.train.Linear` and stay the same objects, with their parameters, hooks and names: an
    optimiser made before goes on, and state_dicts fit both ways. Subclasses of `nn.Linear` are left as they are.

    Args:
        model: a module; one `nn.Linear` is converted itself.
        wanted: called with each layer's name and the layer; False leaves it. None: each layer that `predict` says gains
            at so many `tokens`, but one whose name ends in "lm_head" or "head".
        tokens: of a forward pass.
        eager: as for `predict`, by which small layers are then left.
        recipe: of the layers.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module, or `recipe` no `Recipe`.
        ValueError: no layer is wanted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    require(recipe)
    wanted = wanted or partial(_pays, tokens, eager)
    layers = [each for name, each in model.named_modules() if type(each) is nn.Linear and wanted(name, each)]
    if not layers:
        raise ValueError("model has no torch.nn.Linear that is wanted: see what `wanted` says of each layer")
    for layer in layers:
        layer.__class__ = Linear
        layer.recipe = recipe
    return model


def _pays(tokens: int, eager: bool, name: str, layer: nn.Linear) -> bool:
    is_last = name.rpartition(".")[2] in ("lm_head", "head")
    return not is_last and predict(tokens, *layer.weight.shape, eager=eager).pays
