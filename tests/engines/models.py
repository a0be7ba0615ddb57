"""Models of random weights for vLLM, dense and of experts, in FP8 blocks, in MXFP4, or in BF16 with what blocks say.

Used by in_vllm.py and serve.py beside it, in vLLM's own processes.
"""

import zlib

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


_KINDS["mxfp4"] = _KINDS["experts"]
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
"""Whose experts alone are quantised."""

DRAWN: dict[str, torch.Tensor] = {}
"""Codes, scales and biases of experts of MXFP4 as they were loaded, which engines then convert."""


def config(kind: str, sizes: dict, in_blocks: bool = True) -> dict:
    """What config.json says of a model of Qwen3's; `sizes` has its layers, widths and counts."""
    found = _COMMON | _KINDS[kind] | sizes
    if not in_blocks:
        return found
    if kind in OF_MXFP4:
        return found | {"quantization_config": {"quant_method": "mxfp4"}}
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(sizes["num_hidden_layers"])]
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *gates],
    }
    return found | {"quantization_config": quantization}


class RandomWeights(BaseModelLoader):
    """The same for every engine, drawn where the model lies."""

    def download_model(self, model_config):
        pass

    def load_weights(self, model, model_config):
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
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
