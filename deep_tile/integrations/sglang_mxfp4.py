"""SGLang's experts of MXFP4 through deep_tile, as gpt-oss and DeepSeek-V4 have them: `AROUND`, hooks that hand out a
quantisation method of ours.

Registered by sglang.py beside it. SGLang's own method makes the parameters that checkpoints are loaded into, in the
order that its loaders know; ours packs them and multiplies. Invariant: backends asked for by name, and layers that are
not known here, keep SGLang's.
"""

import functools

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from deep_tile import packed_layers
from deep_tile.config import round_up
from deep_tile.integrations import engines
from deep_tile.kinds import PACKED

_THEIRS = ("Mxfp4MoEMethod", "Mxfp4FlashinferCutlassMoEMethod")
"""SGLang's methods that it chooses by itself on Hopper: gpt-oss's, and DeepSeek-V4's."""

_GROUP = PACKED["mxfp4"].packing.group


class DeepTileMxfp4MoEMethod(FusedMoEMethodBase):
    """Experts of packed weights, a `PackedExperts` in the layer; tokens are cast by rows of 1x128."""

    fuse_routed_scaling_factor_in_topk = True
    """The router's weights come multiplied by the model's factor."""

    def __init__(self, theirs: object):
        self._theirs = theirs

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, *given, **named) -> None:
        width = intermediate_size_per_partition
        if _alternates(layer.moe_runner_config):  # a rank's part of 2880 columns is no whole number of groups
            width = round_up(width, 2 * _GROUP)
        self._theirs.create_weights(layer, num_experts, hidden_size, width, *given, **named)

    def create_moe_runner(self, layer, moe_runner_config) -> None:
        """None: `apply` multiplies, with standard top-k and local numbers of experts."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Put the weights in the order of `pack_weight`.

        Raises:
            ValueError: `pack_weight` refuses a weight, since a row would change too much.
        """
        config, scale = layer.moe_runner_config, "weight_scale"
        if hasattr(layer, "w13_weight_scale_inv"):
            scale = "weight_scale_inv"
        given = [getattr(layer, f"{name}_{of}").data for name in ("w13", "w2") for of in ("weight", scale)]
        biases = [getattr(layer, f"{name}_weight_bias").data if layer.with_bias else None for name in ("w13", "w2")]
        packing = {"format": "mxfp4", "interleaved": _alternates(config)}
        try:
            made = packed_layers.PackedExperts.from_codes(
                *(codes.view(torch.uint8) for codes in given), *biases, **packing, **_gating(config)
            )
        except ValueError as error:
            raise ValueError(
                f"{error}. With --moe-runner-backend marlin SGLang's own kernels serve these experts"
            ) from error
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        layer.deep_tile_experts = made

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        """Raise RuntimeError: packed weights cannot be loaded again."""
        raise RuntimeError(
            f"experts of {layer.layer_name} are packed by deep_tile and cannot be loaded again: unset "
            f"{engines.SGLANG.variable} to update weights while SGLang serves"
        )

    def apply(self, layer: torch.nn.Module, dispatch_output) -> StandardCombineInput:
        (shares, chosen, *_), x = dispatch_output.topk_output, dispatch_output.hidden_states
        padded = layer.deep_tile_experts.down.shape[1]  # by some of SGLang's choices; it cuts results itself
        if x.shape[-1] < padded:
            x = torch.nn.functional.pad(x, (0, padded - x.shape[-1]))
        return StandardCombineInput(layer.deep_tile_experts(x, chosen, shares))


def method(original, self, layer: torch.nn.Module, prefix: str) -> object:
    """Around `get_quant_method` of SGLang's configurations."""
    theirs = original(self, layer, prefix)
    if type(theirs).__name__ not in _THEIRS or not _is_known(layer):
        return theirs
    _say_once(type(theirs).__name__)
    return DeepTileMxfp4MoEMethod(theirs)


AROUND = dict.fromkeys(
    (f"sglang.srt.layers.quantization.{config}.get_quant_method" for config in ("mxfp4.Mxfp4Config", "fp8.Fp8Config")),
    method,
)
"""Hooks by the names of the functions that they are put around."""


def _is_known(layer: torch.nn.Module) -> bool:
    config, arguments = layer.moe_runner_config, runtime_context.get_server_args()
    asked = (layer.is_draft and arguments.speculative_moe_runner_backend) or arguments.moe_runner_backend
    others = (
        *(arguments.enable_lora, arguments.lora_paths, arguments.enable_paged_experts, arguments.kt_weight_path),
        *(layer.num_fused_shared_experts, config.apply_router_weight_on_input, config.no_combine),
    )
    width = layer.intermediate_size_per_partition
    return (
        asked == "auto"
        and not any(others)
        and get_moe_a2a_backend().is_none()
        and runtime_context.get_platform().is_sm90
        and config.activation == "silu"
        and config.is_gated
        and (config.gemm1_alpha is None) is (config.gemm1_clamp_limit is None)
        and layer.hidden_size % _GROUP == 0
        and (width % _GROUP == 0 or _alternates(config))
    )


def _alternates(config) -> bool:
    """Whether rows of gates and of up alternate: gpt-oss's, which alone say an alpha."""
    return config.gemm1_alpha is not None and config.gate_up_interleaved


def _gating(config) -> dict[str, float | None]:
    if config.gemm1_alpha is None:
        return {"limit": config.swiglu_limit}
    beta = 1.0 if config.gemm1_beta is None else config.gemm1_beta
    return {"limit": config.gemm1_clamp_limit, "alpha": config.gemm1_alpha, "beta": beta}


@functools.cache
def _say_once(theirs: str) -> None:
    engines.logger(engines.SGLANG).info("Using DeepTileMxfp4MoEMethod in place of %s", theirs)
