"""Precompiles a training step's kernels: both passes' GEMMs, and casts."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from deep_tile import api, cast, jit, tensors
from deep_tile.config import check_sizes
from deep_tile.train.layers import Linear, is_gated
from deep_tile.train.products import written_dtype


def precompile(
    model: nn.Module,
    tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    workers: int | None = None,
    progress: bool = False,
) -> api.Precompiled:
    """Compile, and on a Hopper GPU load, every kernel that a model's `Linear` layers need for a step, casts included.

    Launches nothing; without a GPU it fills the cache. For split layers pass one rank's model.

    Args:
        model: with `deep_tile.train.Linear` layers, as from `convert`.
        tokens: per forward pass, over all leading dimensions. Tokens are the K of a weight's gradient, so call this for
            each token count of the training; it covers the other GEMMs for fewer tokens as well.
        dtype: dtype of the layers' inputs.
        workers, progress: as for `deep_tile.precompile`.

    Returns:
        As `deep_tile.precompile`; `compiled` also counts cast kernels.

    Raises:
        ValueError: the model has no such layer.
        TypeError, ValueError, jit.CompileError: as `deep_tile.precompile`.
    """
    tensors.require_module(model)
    check_sizes(tokens=tokens)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    if not layers:
        raise ValueError("model has no deep_tile.train.Linear; convert it first, by deep_tile.train.convert(model)")
    products = {product for layer in layers for product in _products(layer, tokens, dtype)}
    products |= {_sum_of_gates_and_ups(module, tokens, dtype) for module in filter(is_gated, model.modules())}
    before, configs, shapes = jit.compilations(), set(), defaultdict(list)
    for shape, options in sorted(products, key=str):
        shapes[options].append(shape)  # of one call, whose kernels compile at once
    for options, of_call in shapes.items():
        configs.update(api.precompile(of_call, workers=workers, progress=progress, **dict(options)).configs)
    cast.load_kernels(api.current_gpu(), workers, progress=progress)
    ordered = tuple(sorted(configs, key=lambda config: config.name))
    return api.Precompiled(ordered, jit.compilations() - before)


def _sum_of_gates_and_ups(module: nn.Module, tokens: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], tuple]:
    """The kernel that adds the up part of an MLP's input gradient to the gate part."""
    n, k = module.up_proj.weight.shape
    return (k, n, tokens), tuple({"kind": "fp8", "out_dtype": dtype, "accumulate": True}.items())


def _products(layer: Linear, tokens: int, dtype: torch.dtype) -> list[tuple[tuple[int, int, int], tuple]]:
    """Shapes and keywords for `api.precompile`."""
    (n, k), recipe = layer.weight.shape, layer.recipe
    bias = None if layer.bias is None else layer.bias.dtype
    products: list[tuple[tuple[int, int, int], dict[str, Any]]] = [((n, k, tokens), {"out_dtype": dtype, "bias": bias})]
    if recipe.dgrad == "fp8":
        products.append(((k, n, tokens), {"out_dtype": dtype}))
    if recipe.wgrad != "bf16":
        grad = getattr(layer.weight, "main_grad", None)
        written = written_dtype(layer.weight.dtype) if grad is None else grad.dtype
        kind = "fp8" if recipe.wgrad == "fp8" else "fp8_1x128"
        options = {"kind": kind, "out_dtype": written, "accumulate": grad is not None}
        products.append(((k, tokens, n), options))
    return [(shape, tuple(options.items())) for shape, options in products]
