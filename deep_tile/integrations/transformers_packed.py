"""FP4 experts of transformers models, multiplied in 4 bits: `pack`."""

import sys
from types import ModuleType
from weakref import WeakKeyDictionary

import torch

from deep_tile import blocks, nn, tensors
from deep_tile.formats import E2M1
from deep_tile.integrations.transformers_blocks import is_packed
from deep_tile.integrations.transformers_experts import gating, is_gated_by
from deep_tile.kinds import PACKED

_GROUP = PACKED["mxfp4"].packing.group
_BIAS = 127
"""Of exponents in scales."""


def pack(model: torch.nn.Module, *, max_error: float = blocks.MAX_ERROR) -> list[str]:
    """Replace a model's experts in FP4 by `nn.PackedExperts`, in place and one after the other.

    Taken are `FP8Experts` of 4 bits, as DeepSeek-V4's, with gates by SiLU and dynamically quantised inputs; and experts
    of gpt-oss that transformers has converted to BF16, if MXFP4 has all their numbers. All else stays. For inference:
    `save_pretrained` has no name for what they hold then.

    Args:
        model: of transformers, loaded; not itself such experts.
        max_error: as for `pack_weight`.

    Returns:
        Names of the layers replaced, all of one that stands at several places.

    Raises:
        TypeError, ValueError: as `nn.PackedExperts.from_codes`; the text names the layer. Layers before it have been
            replaced, it and those behind it have not.
        ValueError: experts of gpt-oss are in the order of transformers' kernels. Nothing has been replaced.
        ImportError: transformers is missing.
    """
    from transformers.integrations import finegrained_fp8 as client

    tensors.require_module(model)
    if isinstance(model, (client.FP8Experts, *_gpt_oss("models.gpt_oss.modeling_gpt_oss", "GptOssExperts"))):
        raise ValueError("model is a layer of experts; pass the model that has it, in which it is replaced")
    done, known = [], WeakKeyDictionary()
    for name in _experts(model, client):  # layers may go one by one
        layer = model.get_submodule(name)
        if layer not in known:
            made = _packed(name, layer, client, max_error)
            if made is None:
                continue
            known[layer] = made
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, known[layer])
        done.append(name)
    return done


def _gpt_oss(module: str, name: str) -> tuple[type, ...]:
    """A class of transformers; none where no model has needed it."""
    return (getattr(sys.modules[f"transformers.{module}"], name),) if f"transformers.{module}" in sys.modules else ()


def _experts(model: torch.nn.Module, client: ModuleType) -> list[str]:
    of_kernels = _gpt_oss("integrations.mxfp4", "Mxfp4GptOssExperts")
    wide = _gpt_oss("models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
    found = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, of_kernels):
            raise ValueError(
                f"{name} holds its weights in the order of transformers' kernels: load the model with "
                "from_pretrained(..., quantization_config=transformers.Mxfp4Config(dequantize=True)), where there is "
                "memory for it in BF16, such as a CPU's, then pack it"
            )
        if type(layer) in (client.FP8Experts, *wide):
            found.append(name)
    return found


def _packed(name: str, layer: torch.nn.Module, client: ModuleType, max_error: float) -> nn.PackedExperts | None:
    """None for experts that stay."""
    is_fp8 = type(layer) is client.FP8Experts
    given = _of_fp8_experts(layer, client) if is_fp8 else _of_gpt_oss(layer)
    if given is None:
        return None
    weights, how = given
    try:
        made = nn.PackedExperts.from_codes(*weights, format="mxfp4", max_error=max_error, **how)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return made.train(layer.training)


def _of_fp8_experts(layer: torch.nn.Module, client: ModuleType) -> tuple[list[torch.Tensor], dict[str, float]] | None:
    silu = (torch.nn.SiLU, type(client.ACT2FN["silu"]))
    is_ours = is_packed(layer, client) and layer.activation_scheme == "dynamic" and layer.has_gate
    if not is_ours or not is_gated_by(silu, layer):
        return None
    names = (own for of in ("gate_up_proj", "down_proj") for own in (of, f"{of}_scale_inv"))
    return [getattr(layer, name).detach() for name in names], gating(layer)


def _of_gpt_oss(layer: torch.nn.Module) -> tuple[list[torch.Tensor], dict[str, float | bool]] | None:
    """Codes of weights [g, k, n] in BF16, in whose rows gates and ups alternate."""
    gate_up, down = _as_mxfp4(layer.gate_up_proj.detach().mT), _as_mxfp4(layer.down_proj.detach().mT)
    if gate_up is None or down is None:
        return None
    biases = layer.gate_up_proj_bias.detach(), layer.down_proj_bias.detach()
    how = {"limit": float(layer.limit), "alpha": float(layer.alpha), "beta": 1.0, "interleaved": True}
    return [*gate_up, *down, *biases], how


def _as_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes, two in a byte, and bytes of scales, which mean exactly these numbers [g, n, k]; None where none do."""
    if weight.shape[-1] % _GROUP or weight.is_meta:
        return None
    magnitudes = torch.tensor(E2M1[:8], device=weight.device)
    made = []
    for matrix in weight:
        groups = matrix.float().unflatten(-1, (-1, _GROUP))
        fraction, exponent = groups.abs().amax(-1).frexp()
        exponent += (fraction > magnitudes[-1] / 8).int() - 3  # the least by which 6 reaches the largest
        if bool((exponent.abs() > _BIAS).any()):
            return None
        elements = torch.ldexp(groups, -exponent[..., None]).abs().contiguous()
        codes = torch.searchsorted(magnitudes, elements)
        if not bool((magnitudes[codes.clamp(max=7)] == elements).all()):
            return None
        codes = (codes | groups.signbit().int() << 3).to(torch.uint8).flatten(-2)
        made.append((codes[..., ::2] | codes[..., 1::2] << 4, (exponent + _BIAS).to(torch.uint8)))
    codes, scales = zip(*made, strict=True)
    return torch.stack(codes), torch.stack(scales)
