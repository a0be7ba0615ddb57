"""LoRA by peft itself, where it is installed, over layers in FP8: it trains, saves, loads, merges and unmerges."""

import copy

import pytest
import torch
from helpers import same_bits
from torch import nn

import deep_tile
from deep_tile import dequantize, quantize_weight

peft = pytest.importorskip("peft", reason="peft is not installed; a release is tested with it")

WANTED = {"r": 8, "lora_alpha": 16, "target_modules": ["0", "2"]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(136, 264), nn.GELU(), nn.Linear(264, 136, bias=False))

    def forward(self, x):
        return self.layers(x)


def make(dtype=torch.float32, autocast_adapter_dtype=True, **options):
    from deep_tile.integrations.peft import register

    torch.manual_seed(0)
    base = Model().to(dtype).requires_grad_(False)
    deep_tile.nn.replace_linears(base)
    config = register(peft.LoraConfig(**WANTED, **options))
    return base, peft.get_peft_model(copy.deepcopy(base), config, autocast_adapter_dtype=autocast_adapter_dtype)


def train(model, steps=8, dtype=torch.float32):
    torch.manual_seed(1)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    x, wanted = torch.randn(2, 32, 136).to(dtype)
    for _ in range(steps):
        loss = (model(x) - wanted).float().square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_train_and_weights_stay(dtype):
    base, model = make(dtype)
    names = {name for name, each in model.named_parameters() if each.requires_grad}
    assert names and all("lora_" in name for name in names)
    losses = train(model, dtype=dtype)
    assert losses[-1] < 0.8 * losses[0]
    for i in (0, 2):
        assert same_bits(model.base_model.model.layers[i].base_layer.weight, base.layers[i].weight)


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False])
def test_adapters_are_drawn_and_combined_in_their_own_dtype(autocast_adapter_dtype):
    _, model = make(autocast_adapter_dtype=autocast_adapter_dtype)
    model.add_adapter("other", model.peft_config["default"])
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="linear")
    for adapter in ("default", "other", "both"):
        drawn = model.base_model.model.layers[0].lora_A[adapter].weight.detach()
        assert drawn.dtype == torch.float32 and not torch.equal(drawn, drawn.to(torch.float8_e4m3fn).float())


def test_dora_is_refused_by_name():
    with pytest.raises(ValueError, match="use_dora is True"):
        make(use_dora=True)


def test_saved_and_loaded(tmp_path):
    from deep_tile.integrations.peft import LoraLinear, register

    base, model = make()
    train(model)
    model.save_pretrained(tmp_path)
    config = register(peft.LoraConfig.from_pretrained(tmp_path))
    other = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, config=config)
    assert isinstance(other.base_model.model.layers[0], LoraLinear)
    x = torch.randn(5, 136)
    assert same_bits(model(x), other(x))


@pytest.mark.parametrize("safe", [False, True])
def test_merged_is_dequantised_added_and_quantised(safe):
    base, model = make()
    train(model)
    x = torch.randn(64, 136)
    wanted, layers = model(x), model.base_model.model.layers
    deltas = [layers[i].get_delta_weight("default") for i in (0, 2)]
    merged = model.merge_and_unload(safe_merge=safe)
    for i, delta in zip((0, 2), deltas, strict=True):
        layer = merged.layers[i]
        assert type(layer) is deep_tile.nn.Linear
        codes, scale = quantize_weight(dequantize(base.layers[i].weight, base.layers[i].weight_scale_inv) + delta)
        assert same_bits(layer.weight, codes) and same_bits(layer.weight_scale_inv, scale)
    error = (merged(x) - wanted).norm() / wanted.norm()
    assert error < 0.06  # what quantising a weight, and what it makes, costs


def test_unmerged_are_the_bits_of_before():
    _, model = make()
    train(model)
    layers, x = model.base_model.model.layers, torch.randn(5, 136)
    before, wanted = copy.deepcopy(model.state_dict()), model(x)
    model.merge_adapter()
    assert layers[0].merged and not same_bits(
        layers[0].base_layer.weight, before["base_model.model.layers.0.base_layer.weight"]
    )
    model.unmerge_adapter()
    assert same_bits(model(x), wanted)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.gpu
def test_unmerged_where_the_model_has_moved():
    base, model = make()
    train(model)
    model.merge_adapter()
    model.to("cuda").unmerge_adapter()
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    assert same_bits(model.base_model.model.layers[0].base_layer.weight.cpu(), base.layers[0].weight)


def test_a_broken_adapter_leaves_the_weight():
    base, model = make()
    layer = model.base_model.model.layers[0]
    layer.lora_B["default"].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected in the merged weights"):
        model.merge_adapter(safe_merge=True)
    assert same_bits(layer.base_layer.weight, base.layers[0].weight)


def test_a_weight_that_trains_is_merged_by_peft_itself():
    """`deep_tile.train.Linear` is an `nn.Linear` to it."""
    model = deep_tile.train.convert(Model(), lambda *_: True)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**WANTED))
    losses = train(adapted)
    assert losses[-1] < losses[0]
    merged = adapted.merge_and_unload()
    assert type(merged.layers[0]) is deep_tile.train.Linear
    assert not torch.equal(merged.layers[0].weight, model.layers[0].weight)
