"""FP4 experts of transformers models, multiplied in 4 bits: `pack`."""

from weakref import WeakKeyDictionary

import torch

from deep_tile import blocks, nn, tensors
from deep_tile.integrations.transformers_blocks import is_packed
from deep_tile.integrations.transformers_experts import gating, is_gated_by


def pack(model: torch.nn.Module, *, max_error: float = blocks.MAX_ERROR) -> list[str]:
    """Replace a model's experts in FP4 by `nn.PackedExperts`, in place and one after the other.

    Taken are `FP8Experts` of 4 bits, as DeepSeek-V4's, with gates by SiLU and dynamically quantised inputs; all else
    stays. For inference: `save_pretrained` has no name for what they hold then.

    Args:
        model: of transformers, loaded; not itself such experts.
        max_error: as for `pack_weight`.

    Returns:
        Names of the layers replaced, all of one that stands at several places.

    Raises:
        TypeError, ValueError: as `nn.PackedExperts.from_codes`; the text names the layer. Layers before it have been
            replaced, it and those behind it have not.
        ImportError: transformers is missing.
    """
    from transformers.integrations import finegrained_fp8 as client

    tensors.require_module(model)
    if isinstance(model, client.FP8Experts):
        raise ValueError("model is a layer of experts; pass the model that has it, in which it is replaced")
    silu, done, known = (torch.nn.SiLU, type(client.ACT2FN["silu"])), [], WeakKeyDictionary()
    every = model.named_modules(remove_duplicate=False)
    for name in [name for name, layer in every if type(layer) is client.FP8Experts]:  # layers may go one by one
        layer = model.get_submodule(name)
        if type(layer) is not client.FP8Experts or not is_packed(layer, client):
            continue
        if layer.activation_scheme != "dynamic" or not layer.has_gate or not is_gated_by(silu, layer):
            continue
        if layer not in known:
            known[layer] = _packed(name, layer, max_error)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, known[layer])
        done.append(name)
    return done


def _packed(name: str, layer: torch.nn.Module, max_error: float) -> nn.PackedExperts:
    weights = (getattr(layer, own).detach() for of in ("gate_up_proj", "down_proj") for own in (of, f"{of}_scale_inv"))
    try:
        made = nn.PackedExperts.from_codes(*weights, format="mxfp4", max_error=max_error, **gating(layer))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return made.train(layer.training)
