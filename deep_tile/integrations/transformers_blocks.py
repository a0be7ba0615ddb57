"""`rebase`: converts FP8 and FP4 layers in transformers models from any checkpoint blocks to 128x128 blocks.

Invariant: a layer changes as a whole, including its block size, so transformers' own code also computes it correctly.
"""

from collections.abc import Iterator

import torch
from torch.utils.weak import WeakIdKeyDictionary

from deep_tile import blocks, tensors
from deep_tile.config import SCALE_BLOCK
from deep_tile.integrations.transformers_config import gate_up_scale_rows
from deep_tile.quantize import FP8_DTYPE, WEIGHT_BLOCK

_LINEAR = ("weight",)
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")

_BLOCKS = {None: "fp8_tensor", (32, 32): "fp8_32x32", (1, 32): "mxfp8", (1, SCALE_BLOCK): "fp8_1x128"}
"""Formats by `block_size`; FP4, with int8 weights, has no meaningful one."""

_SAVED_AS = {"weight_block_size": list(WEIGHT_BLOCK), "scale_fmt": "float", "expert_dtype": "fp8"}


def rebase(model: torch.nn.Module, *, max_error: float = blocks.MAX_ERROR) -> dict[str, blocks.Rebased]:
    """Convert a model's FP8 and FP4 layers to 128x128 blocks, which deep_tile multiplies after `install()`.

    Covers `FP8Linear`, `FP8GroupedLinear` with whole blocks and `FP8Experts`, with 32x32, 1x32, 1x128 or per-tensor
    scales, and FP4 experts, whose weights then take twice the memory; with dynamically quantised inputs. Other layers,
    and 128x128 blocks, stay unchanged. One layer after the other; those that share a weight share its result. Where all
    layers are in such blocks in the end, `model.config.quantization_config` says so, for `save_pretrained`.

    Args:
        model: a loaded transformers model.
        max_error: as for `to_blocks`.

    Returns:
        Changes by parameter name.

    Raises:
        ValueError: a row of a weight would change by more than `max_error`, or a weight is on meta; the text names the
            parameter. Layers before it are converted, it and later ones are not.
        ImportError: transformers is missing.
    """
    from transformers.integrations import finegrained_fp8 as client

    tensors.require_module(model)
    reports, left, known = {}, False, WeakIdKeyDictionary()
    for name, layer in model.named_modules():
        if not isinstance(layer, (client.FP8Linear, client.FP8Experts)):
            continue
        found = [*_formats(layer, client)]
        if found:
            reports |= _rebase_layer(f"{name}." if name else "", layer, dict(found), max_error, known)
        left |= layer.block_size is None or tuple(layer.block_size) != WEIGHT_BLOCK or is_packed(layer, client)
    if reports and not left:
        _describe(model)
    return reports


def _formats(layer: torch.nn.Module, client) -> Iterator[tuple[str, str]]:
    """Names and formats of a layer's weights to convert: all or none."""
    names = _names(layer, client)
    size = None if layer.block_size is None else tuple(layer.block_size)
    rows = layer.weight.shape[0] // layer.n_groups if isinstance(layer, client.FP8GroupedLinear) else 0
    if layer.activation_scheme != "dynamic" or rows % SCALE_BLOCK:
        return
    if is_packed(layer, client):
        yield from ((name, "mxfp4") for name in names)
    elif size in _BLOCKS and all(getattr(layer, name).dtype == FP8_DTYPE for name in names):
        yield from ((name, _BLOCKS[size]) for name in names)


def _names(layer: torch.nn.Module, client) -> list[str]:
    names = _EXPERTS if isinstance(layer, client.FP8Experts) else _LINEAR
    return [name for name in names if isinstance(getattr(layer, name, None), torch.Tensor)]


def is_packed(layer: torch.nn.Module, client) -> bool:
    return all(getattr(layer, name).dtype == torch.int8 for name in _names(layer, client))


def _rebase_layer(
    prefix: str, layer: torch.nn.Module, formats: dict[str, str], max_error: float, known: WeakIdKeyDictionary
) -> dict[str, blocks.Rebased]:
    """`known` has what was made of weights that layers still have, each with its scale."""
    done = {}
    for name, format_ in formats.items():
        given, of_given = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
        if given in known and known[given][0] is of_given:
            done[name] = known[given][1:]
            continue
        weight, scale = given.detach(), of_given.detach()
        if format_ == "fp8_tensor" and weight.dim() == 3:  # gate and up have one each
            scale, format_ = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1), "fp8_channel"
        try:
            made = blocks.to_blocks(weight, scale, format=format_, max_error=max_error)
        except ValueError as error:
            raise ValueError(f"{prefix}{name}: {error}") from None
        scales = made.scale
        if name == "gate_up_proj" and scales.shape[1] == 1:
            scales = scales.repeat_interleave(gate_up_scale_rows(weight.shape[1])[-1], 1)
        frozen = (torch.nn.Parameter(x, requires_grad=False) for x in (made.weight, scales))
        done[name] = (*frozen, made.report)
        known[given] = (of_given, *done[name])
    for name, (weight, scale, _) in done.items():
        setattr(layer, name, weight)
        setattr(layer, f"{name}_scale_inv", scale)
    layer.block_size = WEIGHT_BLOCK
    return {f"{prefix}{name}": report for name, (*_, report) in done.items()}


def _describe(model: torch.nn.Module) -> None:
    known = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(known, dict):
        known.update(_SAVED_AS)
    elif known is not None:
        vars(known).update(_SAVED_AS)
