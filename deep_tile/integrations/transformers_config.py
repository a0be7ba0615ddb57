"""transformers configs for models with FP8 linears, so that a saved model loads unchanged.

When transformers loads such a checkpoint, all linears and experts become FP8 layers except those in
`modules_to_not_convert`, matched by prefix or suffix. Invariant: either exactly the replaced layers load as FP8, or no
config is written.
"""

import copy
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from deep_tile import replaceable
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.quantize import FP8_DTYPE

_FORMAT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK]}
"""As DeepSeek-V3's and Qwen3's checkpoints have it."""

_OF_PEFT = re.compile(rf"\.(base_layer|{replaceable.REPLACED_BY_ADAPTER})(?=\.|$)")
"""peft's name parts for wrapped layers, which checkpoints lack."""


def description(model: torch.nn.Module, layers: Collection[str]) -> Callable[[], None]:
    """A function that marks these layers as FP8 in the model's configs.

    Raises:
        ValueError: transformers could not load such a model; the text gives reason and remedy.
    """
    told = [(module, _config_of(name, module, layers)) for name, module in _pretrained(model)]

    def tell() -> None:
        for module, config in told:
            if config is not None:
                _give(module, config)

    return tell


def gate_up_scale_rows(n: int) -> tuple[int, ...]:
    """Rows that the scales of a gate_up with n rows may have: one per block, and last as transformers makes them, which
    gives each half of a single block its own."""
    return (1, 2) if n <= SCALE_BLOCK else (ceil_div(n, SCALE_BLOCK),)


def _pretrained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Outermost transformers models, by name."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    within = None
    for name, module in model.named_modules():
        inside = within is not None and (within == "" or name.startswith(f"{within}."))
        if isinstance(module, base) and not inside:
            within = name
            yield name, module


def _config_of(prefix: str, model: torch.nn.Module, layers: Collection[str]) -> dict[str, Any] | None:
    """`quantization_config` for the named model once these layers are FP8; None if it has none of them."""
    start = f"{prefix}." if prefix else ""
    own = {name.removeprefix(start): name for name in layers if name.startswith(start)}
    if not own:
        return None
    modules = dict(model.named_modules())
    left = [_saved(name) for name in modules if name not in own and _would_be_converted(name, modules)]
    kept_wide = getattr(model, "_keep_in_fp32_modules", None) or ()
    replaceable.refuse((whole, found) for name, whole in own.items() if (found := _obstacle(name, left, kept_wide)))
    return {**_known(model), **_FORMAT, "modules_to_not_convert": left}


def _obstacle(name: str, left: Collection[str], kept_wide: Collection[str]) -> tuple[str, str] | None:
    if _is_named(_saved(name), kept_wide):
        return "transformers loads it in FP32, as _keep_in_fp32_modules of its model says", "Such a layer stays wide"
    if _is_named(_saved(name), left):
        by = next(pattern for pattern in left if _is_named(_saved(name), [pattern]))
        return f"transformers would leave it wide along with {by!r}, which stays so", "Keep both wide, or replace both"
    return None


def _is_named(name: str, patterns: Collection[str]) -> bool:
    """As transformers reads `modules_to_not_convert`."""
    ends = r"(?:(?<=\.)|(?=\.|$))"
    return any(name.endswith(pattern) or re.match(f"(?:{pattern}){ends}", name) for pattern in patterns)


def _saved(name: str) -> str:
    return _OF_PEFT.sub("", name)


def _would_be_converted(name: str, modules: Mapping[str, torch.nn.Module]) -> bool:
    module = modules[name]
    if any(parameter.dtype == FP8_DTYPE for parameter in module.parameters(recurse=False)):
        return False
    if replaceable.is_adapter(name, modules) and not name.endswith(f".{replaceable.REPLACED_BY_ADAPTER}"):
        return False
    is_grouped = isinstance(module, torch.nn.Linear) and "GroupedLinear" in type(module).__name__
    return type(module) is torch.nn.Linear or is_grouped or name.endswith(".experts")


def _known(model: torch.nn.Module) -> dict[str, Any]:
    """Existing config entries for FP8 layers that the model was loaded with.

    Raises:
        ValueError: it says that the model is quantised otherwise.
    """
    known = getattr(model.config, "quantization_config", None) or {}
    known = dict(known if isinstance(known, Mapping) else known.to_dict())
    said = {name: known.get(name, wanted) for name, wanted in _FORMAT.items()}
    said["weight_block_size"] = list(said["weight_block_size"] or ())
    if said != _FORMAT:
        raise ValueError(
            f"model.config.quantization_config says {said}, and what is replaced would be {_FORMAT}: a checkpoint "
            "holds one of them. Load the model in BF16 and replace its layers, or leave it as it is. Nothing has been "
            "replaced"
        )
    known.pop("dequantize", None)
    return known


def _give(model: torch.nn.Module, quantization: dict[str, Any]) -> None:
    """Gives the model its own config copy, since others may share it."""
    shared, model_config = model.config, copy.copy(model.config)
    model_config.quantization_config = quantization
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = model_config
