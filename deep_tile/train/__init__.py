"""FP8 training: linear layers with all three GEMMs in FP8, on unchanged weights.

    import deep_tile.train

    deep_tile.train.convert(model)  # nn.Linear becomes deep_tile.train.Linear; parameters stay the same objects

Functions are imported eagerly, since some share their name with a module.
"""

from deep_tile.select.training import predict
from deep_tile.train.casts import invalidate
from deep_tile.train.experts import experts
from deep_tile.train.layers import Linear, convert, gather_fp8
from deep_tile.train.linear import linear, linears
from deep_tile.train.mlp import mlp
from deep_tile.train.precompile import precompile
from deep_tile.train.recipe import Recipe

__all__ = [
    "Linear",
    "Recipe",
    "convert",
    "experts",
    "gather_fp8",
    "invalidate",
    "linear",
    "linears",
    "mlp",
    "precompile",
    "predict",
]
