"""deep_tile.train in torchtitan: a model config converter that makes linear layers train in FP8.

    from deep_tile.integrations.torchtitan import DeepTileConverter

    DeepTileConverter.Config(filter_fqns=["output"])  # in a config's list of converters

Imports torchtitan 0.3.
"""

from dataclasses import dataclass, field

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter

from deep_tile.train import predict
from deep_tile.train.linear import linear
from deep_tile.train.recipe import Recipe


class DeepTileLinear(Linear):
    """torchtitan's Linear with FP8 GEMMs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        recipe: Recipe = Recipe()

    def __init__(self, config: Config):
        super().__init__(config)
        self.recipe = config.recipe

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, recipe=self.recipe)


class DeepTileConverter(ModelConfigConverter):
    """Has linear layers that gain by it train in FP8, as `deep_tile.train.convert` does."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        recipe: Recipe = Recipe()
        filter_fqns: list[str] = field(default_factory=lambda: ["output", "lm_head"])
        """Name parts of layers that are not converted."""

        tokens: int = 8192
        """Tokens per forward pass and GPU: a layer is converted if it gains by `deep_tile.train.predict`."""

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config):
        for name, found, parent, place in model_config.traverse(Linear.Config):
            if type(found) is not Linear.Config or not self._is_wanted(name, found):
                continue
            known = {key: getattr(found, key) for key in found.__dataclass_fields__ if not key.startswith("_")}
            made = DeepTileLinear.Config(**known, recipe=self.config.recipe)
            if parent is None:
                model_config = made
            elif isinstance(parent, list):
                parent[place] = made
            else:
                setattr(parent, place, made)
        return model_config

    def _is_wanted(self, name: str, layer) -> bool:
        if any(part in name for part in self.config.filter_fqns):
            return False
        return predict(self.config.tokens, layer.out_features, layer.in_features).pays
