"""Models of random weights for vLLM, dense and of experts, in FP8 blocks, in MXFP4, in INT4 as
compressed-tensors packs it, or in BF16 with what blocks say.

Used by in_vllm.py and serve.py beside it, in vLLM's own processes.
"""

import zlib
from collections.abc import Iterator

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from deep_tile import dequantize, quantize_weight

LOADER = "random_weights"
STD = 0.02
_IN_BLOCKS = tuple(
    [f"{name}_proj.weight" for name in ("qkv", "o", "gate_up", "down")] + ["w13_weight", "w2_weight"],
)
"""Ends of the names of what checkpoints have in FP8."""

_COMMON = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
_KINDS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


INT4 = {"int4_32": 32, "int4_128": 128}
"""Columns that share a scale, by kind."""

_KINDS |= dict.fromkeys(("mxfp4", *INT4), _KINDS["experts"])
_KINDS["gpt_oss"] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "layer_types": ["full_attention"],
    "num_local_experts": 8,
    "experts_per_token": 2,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
OF_MXFP4 = ("mxfp4", "gpt_oss")
PACKED = (*OF_MXFP4, *INT4)
"""Whose experts alone are quantised."""

DRAWN: dict[str, torch.Tensor] = {}
"""Codes, scales and biases of experts of MXFP4 as they were loaded, which engines then convert; of INT4, matrices w13
and w2."""


def config(kind: str, sizes: dict, in_blocks: bool = True) -> dict:
    """What config.json says of a model of Qwen3's; `sizes` has its layers, widths and counts."""
    found = _COMMON | _KINDS[kind] | sizes
    if not in_blocks:
        return found
    if kind in OF_MXFP4:
        return found | {"quantization_config": {"quant_method": "mxfp4"}}
    if kind in INT4:
        return found | {"quantization_config": _of_compressed_tensors(INT4[kind])}
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(sizes["num_hidden_layers"])]
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *gates],
    }
    return found | {"quantization_config": quantization}


def _of_compressed_tensors(group: int) -> dict:
    """As Kimi-K2's checkpoints say it."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    experts = {"targets": ["Linear"], "weights": weights | {"dynamic": False, "actorder": None}}
    experts |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": experts},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }


def int4_experts(config, device: torch.device | str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors of the first layer's experts in INT4, drawn; their matrices are put into DRAWN."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    generator = torch.Generator(device).manual_seed(seed)
    group = config.quantization_config["config_groups"]["group_0"]["weights"]["group_size"]
    hidden, width = config.hidden_size, config.moe_intermediate_size
    sizes, matrices = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}, {}
    for expert in range(config.num_experts):
        for name, (n, k) in sizes.items():
            integers = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device, generator=generator)
            scale = (torch.rand(n, k // group, device=device, generator=generator) * STD / 4).bfloat16()
            matrices[expert, name] = integers * scale.float().repeat_interleave(group, 1)
            at = f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"
            yield f"{at}_packed", pack_to_int32(integers, 4)
            yield f"{at}_scale", scale
            yield f"{at}_shape", torch.tensor([n, k])
    of = {name: torch.stack([matrices[expert, name] for expert in range(config.num_experts)]) for name in sizes}
    DRAWN.update(w13=torch.cat([of["gate"], of["up"]], 1), w2=of["down"])


class RandomWeights(BaseModelLoader):
    """The same for every engine, drawn where the model lies."""

    def download_model(self, model_config):
        pass

    def load_weights(self, model, model_config):
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            if parameter.dtype == torch.int32:
                continue
            if parameter.dtype == torch.uint8:
                first, last = (112, 122) if name.endswith("scale") else (0, 256)
                parameter.data.random_(first, last, generator=generator)
            elif name.endswith(_IN_BLOCKS):
                scale = parameters.get(f"{name}_scale_inv")
                _fill_blocks(parameter.data, None if scale is None else scale.data, generator)
            elif "scale" not in name:
                mean, std = (1, 0.1) if parameter.dim() == 1 else (0, STD)
                parameter.data.normal_(mean, std, generator=generator)
            if parameter.dtype == torch.uint8 or name.endswith(("w13_bias", "w2_bias")):
                DRAWN[name] = parameter.data.clone()
        if any(name.endswith("w13_weight_packed") for name in parameters):
            model.load_weights(int4_experts(model_config.hf_config, parameter.device, seed=0))
        torch.accelerator.empty_cache()


def _fill_blocks(weight: torch.Tensor, scale: torch.Tensor | None, generator: torch.Generator) -> None:
    """Of a layer, or of a stack of experts."""
    matrices = weight if weight.dim() == 3 else weight[None]
    scales = [None] * len(matrices) if scale is None else scale if scale.dim() == 3 else scale[None]
    for matrix, of_matrix in zip(matrices, scales, strict=True):
        drawn = torch.empty(matrix.shape, device=matrix.device).normal_(0, STD, generator=generator)
        blocks, of_blocks = quantize_weight(drawn)
        if of_matrix is None:
            matrix.copy_(dequantize(blocks, of_blocks, block=(128, 128)))
        else:
            matrix.view(torch.uint8).copy_(blocks.view(torch.uint8))
            of_matrix.copy_(of_blocks)


register_model_loader(LOADER)(RandomWeights)
