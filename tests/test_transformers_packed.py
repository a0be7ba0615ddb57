"""transformers' experts in FP4, multiplied in 4 bits, against those in FP8 of the same weights."""

import json
import weakref
from unittest import mock

import pytest
import torch
from formats import draw
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


def in_gpt_oss(device="cpu"):
    """gpt-oss' experts as transformers converts them, and what the checkpoint has."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss", reason="needs transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    sizes = {"hidden_size": 288, "intermediate_size": 160, "num_local_experts": 4}
    with torch.device(device):
        layer = gpt_oss.modeling_gpt_oss.GptOssExperts(gpt_oss.GptOssConfig(**sizes)).bfloat16()
    given = []
    for name, n, k in (("gate_up_proj", 320, 288), ("down_proj", 288, 160)):
        codes, scales, *_ = draw("mxfp4", (4, n, k), device)
        codes[:, :16] = codes[:, :16] & 0x33  # groups of small numbers, and of zeros
        codes[:, :8], scales = codes[:, :8] & 0x88, scales.view(torch.uint8).clamp(110, 120)
        wide = mxfp4.convert_moe_packed_tensors(codes.unflatten(-1, (-1, 16)), scales)
        getattr(layer, name).data = wide
        getattr(layer, f"{name}_bias").data = torch.randn(4, n, device=device).bfloat16()
        given += [codes.unflatten(-1, (-1, 16)), scales]
    return layer, (*given, layer.gate_up_proj_bias.data, layer.down_proj_bias.data)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_of_gpt_oss_are_packed(device):
    layer, given = in_gpt_oss(device)
    model = of(layer)
    assert integration.pack(model) == ["1.experts"]
    same = nn.PackedExperts.from_codes(*given, interleaved=True, limit=7.0, alpha=1.702, beta=1.0)
    tokens = torch.randn(9, 288, device=device).bfloat16()
    routing = torch.randint(0, 4, (9, 2), device=device), torch.rand(9, 2, device=device).bfloat16()
    out, wanted = model[1]["experts"](tokens, *routing), layer(tokens, *routing).float()
    assert torch.equal(out, same(tokens, *routing))
    assert (out - wanted).norm() < 0.06 * wanted.norm()


SIZES = {"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0}
MODELS = {
    "GptOss": (
        {"intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4},
        {"quant_method": "mxfp4"},
        ("_blocks", "_scales"),
    ),
    "DeepseekV4": (
        {"moe_intermediate_size": 160, "head_dim": 128, "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 2}
        | {"num_experts_per_tok": 4, "n_routed_experts": 4, "index_n_heads": 2, "index_head_dim": 128},
        {"quant_method": "fp8", "expert_dtype": "fp4", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
        | {"modules_to_not_convert": [".*self_attn.*", ".*shared_experts.*", ".*gate", ".*hc.*", "lm_head"]},
        ("weight", "scale"),
    ),
}
"""Sizes of small models, `quantization_config` of checkpoints, and what their experts' tensors are called."""


def save_in_fp4(name, directory):
    """Write a checkpoint with random experts in FP4, under the names that checkpoints of this model have."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    files = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    sizes, quantization, (of_weight, of_scale) = MODELS[name]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **sizes))
    model.bfloat16().save_pretrained(directory)
    saved = {}
    for own, x in files.load_file(directory / "model.safetensors").items():
        if ".experts." not in own or own.endswith("bias"):
            saved[own] = x
            continue
        *leading, n, k = x.mT.shape if name == "GptOss" else x.shape
        codes, scales, *_ = draw("mxfp4", (*leading, n, k))
        scales = scales.view(torch.uint8).clamp(118, 122)
        of_gpt_oss = codes.unflatten(-1, (-1, 16)), scales
        made = of_gpt_oss if name == "GptOss" else (codes.view(torch.int8), scales.view(torch.float8_e8m0fnu))
        own = own.removesuffix("weight")
        saved |= {own + of_weight: made[0], own + of_scale: made[1]}
    files.save_file(saved, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": quantization, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def loaded(directory, **quantization):
    """The model as transformers loads it on a GPU."""
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers import quantizer_finegrained_fp8 as fp8

    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= quantization
    (directory / "config.json").write_text(json.dumps(config))
    with mock.patch.object(fp8.FineGrainedFP8HfQuantizer, "validate_environment"):
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_packed(tmp_path, name):
    """As files have them, against the same model in BF16."""
    save_in_fp4(name, tmp_path)
    model, wide = loaded(tmp_path, dequantize=name == "GptOss"), loaded(tmp_path, dequantize=True)
    assert integration.pack(model) == ["model.layers.0.mlp.experts"]
    packed, experts = (one.model.layers[0].mlp.experts for one in (model, wide))
    assert packed.gating["limit"] == experts.limit
    tokens, shares = 8 * torch.randn(9, 256).bfloat16(), torch.rand(9, 4).bfloat16()
    chosen = torch.arange(4).expand(9, 4).contiguous()
    out, wanted = packed(tokens, chosen, shares), experts(tokens, chosen, shares)
    assert (out - wanted).norm() < 0.08 * wanted.norm()
    assert model(torch.arange(33)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_of_gpt_oss_in_other_numbers_stay(name):
    layer, _ = in_gpt_oss()
    getattr(layer, name).data[3, 5, 9] = 0.7
    assert integration.pack(of(layer)) == []


def test_experts_in_the_order_of_kernels_are_refused():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    (layer, _), experts = in_gpt_oss(), torch.nn.Module.__new__(mxfp4.Mxfp4GptOssExperts)
    torch.nn.Module.__init__(experts)
    model = torch.nn.Sequential(of(layer), of(experts))
    with pytest.raises(ValueError, match=r"^1\.1\.experts holds its weights in .*Mxfp4Config\(dequantize=True"):
        integration.pack(model)
    assert model[0][1]["experts"] is layer


def test_what_cannot_be_packed():
    layer, _ = in_gpt_oss()
    with pytest.raises(ValueError, match="model is a layer of experts"):
        integration.pack(layer)
    layer = in_fp4()
    with pytest.raises(ValueError, match="model is a layer of experts"):
        integration.pack(layer)
    layer.gate_up_proj_scale_inv.data *= 1.5
    with pytest.raises(ValueError, match=r"1\.experts: scale holds numbers that are not powers of two"):
        integration.pack(of(layer))
