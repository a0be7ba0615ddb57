"""transformers' experts in FP4, multiplied in 4 bits, against those in FP8 of the same weights."""

import weakref

import pytest
import torch
from test_transformers_experts import agree, fill, in_turn, make_layer, routed

from deep_tile import nn
from deep_tile.integrations import transformers as integration


def in_fp4(device="cpu", **config):
    layer = make_layer(device, **config)
    for name in ("gate_up_proj", "down_proj"):
        groups, n, k = getattr(layer, name).shape
        codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device=device).view(torch.int8)
        fill(layer, name, (codes, torch.exp2(torch.randint(-9, -5, (groups, n, -(-k // 32)), device=device).float())))
    return layer


def of(layer):
    return torch.nn.Sequential(torch.nn.Identity(), torch.nn.ModuleDict({"experts": layer}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_in_fp4_are_packed(device):
    layer = in_fp4(device)
    model = of(layer)
    assert integration.pack(model) == ["1.experts"] and integration.pack(model) == []
    packed = model[1]["experts"]
    assert type(packed) is nn.PackedExperts and packed.gating == {"limit": None, "alpha": 1.0, "beta": 0.0}
    integration.rebase(layer)
    given = routed(7, device)
    assert agree(packed(*given), in_turn(layer, *given))


def test_experts_at_two_places_are_packed_once():
    """Their own weights are let go."""
    layer = in_fp4()
    model, alive = torch.nn.Sequential(of(layer), of(layer)), weakref.ref(layer)
    del layer
    assert integration.pack(model) == ["0.1.experts", "1.1.experts"] and alive() is None
    assert type(model[0][1]["experts"]) is nn.PackedExperts and model[0][1]["experts"] is model[1][1]["experts"]


def test_other_experts_stay():
    layer = make_layer()
    assert integration.pack(of(layer)) == []
    layer = in_fp4()
    layer.activation_scheme = "static"
    assert integration.pack(of(layer)) == []


def test_what_cannot_be_packed():
    layer = in_fp4()
    with pytest.raises(ValueError, match="model is a layer of experts"):
        integration.pack(layer)
    layer.gate_up_proj_scale_inv.data *= 1.5
    with pytest.raises(ValueError, match=r"1\.experts: scale holds numbers that are not powers of two"):
        integration.pack(of(layer))
