"""LoRA of peft over layers whose weights are there in FP8 alone, merging included.

    from deep_tile.integrations.peft import register

    deep_tile.nn.replace_linears(model)
    model = get_peft_model(model, register(LoraConfig(target_modules=["q_proj", "v_proj"])))
    ...
    model = PeftModel.from_pretrained(model, folder, config=register(LoraConfig.from_pretrained(folder)))

Imports peft, of 0.21.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig
from peft.tuners import lora

from deep_tile import nn, quantize
from deep_tile.linear import quantize_weight

_OF_WEIGHTS = ("amax_floor", "round_scale", "exact")
"""Options of a layer by which its weight was quantised, too."""


def register(config: LoraConfig) -> LoraConfig:
    """Have adapters by this config stand around `deep_tile.nn.Linear`, too; the config itself is returned.

    Name the layers in `target_modules`: "all-linear" is for torch's own. The forward pass and the gradient of the input
    are products in FP8, that of the base layer and its transpose; adapters train in their own dtype. Needed again for a
    config that is loaded, as peft does not store it.

    Raises:
        ValueError: the config asks for DoRA, which takes norms of a weight that peft can read.
    """
    if config.use_dora:
        raise ValueError("use_dora is True, and peft cannot read a weight in FP8: leave it out, for LoRA itself")
    config._register_custom_module({nn.Linear: LoraLinear})
    return config


class LoraLinear(lora.Linear):
    """peft's own, around a `deep_tile.nn.Linear`. To merge, the weight is dequantised, added to and quantised again;
    the codes of before are kept meanwhile, and come back as they were."""

    _kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Linear) -> tuple[torch.device, None]:
        """No dtype: peft would round new adapters to FP8, the weight's."""
        return base_layer.weight.device, None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        before = self._codes()
        with self._as_wide(before):
            super().merge(safe_merge, adapter_names)
        if self.merged and self._kept is None:
            self._kept = before

    def unmerge(self) -> None:
        with self._as_wide(self._codes()):
            super().unmerge()
        if self._kept is not None:
            device = self.get_base_layer().weight.device  # the model may have moved
            codes = nn.Linear.from_fp8(*(each.to(device) for each in self._kept))
            self._set(codes.weight, codes.weight_scale_inv)
            self._kept = None

    def _codes(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        layer = self.get_base_layer()
        return layer.weight, layer.weight_scale_inv

    def _set(self, weight: torch.nn.Parameter, scale: torch.nn.Parameter) -> None:
        layer = self.get_base_layer()
        layer.weight, layer.weight_scale_inv = weight, scale

    @contextmanager
    def _as_wide(self, before: tuple[torch.nn.Parameter, torch.nn.Parameter]) -> Iterator[None]:
        """The layer with its weight in FP32, which is quantised behind; as before where something is refused, and where
        nothing has changed."""
        layer = self.get_base_layer()
        wide = quantize.dequantize(*(each.detach() for each in before))
        layer.weight = torch.nn.Parameter(wide.clone(), requires_grad=False)
        try:
            yield
            made = layer.weight.detach()
        finally:
            self._set(*before)
        if not torch.equal(made, wide):
            options = {name: layer.options[name] for name in _OF_WEIGHTS if name in layer.options}
            codes = nn.Linear.from_fp8(*quantize_weight(made, **options))
            self._set(codes.weight, codes.weight_scale_inv)
