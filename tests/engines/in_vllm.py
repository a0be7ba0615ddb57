"""Run within vLLM by rehearse.py: a tiny model, dense or of experts, is made by vLLM's own code on a CPU, and its
layers are called. Prints a line of JSON: the classes that serve, errors against dequantised weights, and whether the
compile cache's key is another one than without deep_tile.
"""

import json
import os
import sys
from collections.abc import Iterator

import models
import reference
import serve_packed
import torch
import vllm.distributed.parallel_state as parallel
from reference import error
from vllm import platforms
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import set_current_vllm_config
from vllm.config.utils import Range
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.model_loader import get_model, reload
from vllm.v1.worker.workspace import init_workspace_manager

from deep_tile import dequantize, quantize_weight
from deep_tile.integrations import vllm as plugin
from deep_tile.integrations.vllm_experts import DeepTileBatchedExperts, DeepTileExperts
from deep_tile.integrations.vllm_int4 import DeepTileInt4Experts
from deep_tile.integrations.vllm_linear import DeepTileFp8BlockScaledMMKernel
from deep_tile.integrations.vllm_mxfp4 import DeepTileMxfp4Experts

CLASSES = DeepTileInt4Experts, DeepTileMxfp4Experts, DeepTileBatchedExperts, DeepTileExperts
CLASSES += (DeepTileFp8BlockScaledMMKernel,)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def on_a_cpu(cuda: bool) -> None:
    """vLLM believes in its GPU, but for what would touch one."""
    type(platforms.current_platform).is_cuda_alike = classmethod(lambda _: cuda)


def of_linear(layer, x: torch.Tensor) -> float:
    weight = dequantize(layer.weight.data, layer.weight_scale_inv.data, block=(128, 128))
    return error(layer(x)[0], x.float() @ weight.t())


def in_blocks(layer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Matrices of an FP8 layer's experts."""
    weights = (layer.w13_weight, layer.w13_weight_scale_inv), (layer.w2_weight, layer.w2_weight_scale_inv)
    return tuple(
        [dequantize(w, s, block=(128, 128)) for w, s in zip(weight.data, scale.data, strict=True)]
        for weight, scale in weights
    )


def of_experts(kernel, layer, x: torch.Tensor, matrices, biases) -> float:
    ids = torch.stack([torch.randperm(8)[:2] for _ in x]).int()
    shares = torch.rand(len(x), 2)
    out = reference.of_kernel(kernel, layer, x, ids, shares)
    gated = reference.of_silu if layer.activation == MoEActivation.SILU else reference.of_gpt_oss
    return error(out, reference.of_experts(x, ids, shares, matrices, biases, gated))


def of_compiled(config, layer) -> tuple[float, int]:
    """The error of a layer's MLP, after its norm, against the same not compiled, and how many gates and norms have
    joined a cast: passes of vLLM's configuration are such that inductor takes by the same names."""
    name, found = platforms.current_platform.pass_key, []
    fused_casts = config.compilation_config.inductor_compile_config[name]
    passes = {"pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config)}
    passes[name] = lambda graph: found.append(fused_casts(graph))

    def normed_mlp(x, residual):
        normed, total = layer.post_attention_layernorm(x, residual)
        return layer.mlp(normed), total

    given = [torch.randn(5, 256, dtype=torch.bfloat16) for _ in range(2)]
    with pass_context(Range(1, 512)):
        made = torch.compile(normed_mlp, fullgraph=True, options=passes)(*map(torch.clone, given))
    return max(error(one, other.float()) for one, other in zip(made, normed_mlp(*given), strict=True)), sum(found)


def make_model(folder: str, kind: str):
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(models.config(kind, SIZES), file)
    arguments = EngineArgs(
        model=folder,
        load_format=models.LOADER,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=10**8,
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},  # as where graphs are compiled
    )
    config = arguments.create_engine_config()
    torch.accelerator.max_memory_allocated = lambda *_: 0
    torch.accelerator.empty_cache = lambda *_: None
    with set_current_vllm_config(config):
        type(platforms.current_platform).device_type = "cpu"
        on_a_cpu(False)
        parallel.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        parallel.ensure_model_parallel_initialized(1, 1)
        on_a_cpu(True)
        config.load_config.device = "cpu"
        init_workspace_manager(torch.device("cpu"), 1)
        return config, get_model(vllm_config=config)


def of_layer(config, layer, kind: str) -> dict:
    """What serves a layer in FP8 blocks, and its errors."""
    x, projection = torch.randn(5, 256, dtype=torch.bfloat16), layer.self_attn.qkv_proj
    found = {"linear": type(projection.quant_method.fp8_linear).__name__}
    serves = found["linear"].startswith("DeepTile")
    if serves:
        found["error_of_linear"] = of_linear(projection, x)
    if serves and kind == "dense":
        found["error_of_compiled"], found["fused_casts"] = of_compiled(config, layer)
    if kind == "experts":
        runner = layer.mlp.experts
        kernel = runner._quant_method.moe_kernel
        found["experts"] = type(kernel.impl.fused_experts).__name__
        if serves:
            experts, none = runner.routed_experts, (torch.zeros(8, 1),) * 2
            found["error_of_experts"] = of_experts(kernel, experts, x, in_blocks(experts), none)
    return found


def of_reloaded(config, model, kind: str) -> float:
    """Error of experts whose weights are replaced while vLLM serves; by the kernel that CUDA graphs hold."""
    layer, matrices = model.model.layers[0].mlp.experts, {}
    kernel = layer._quant_method.moe_kernel

    def checkpoint() -> Iterator[tuple[str, torch.Tensor]]:
        for expert in range(8):
            for name, n, k in (("gate", 128, 256), ("up", 128, 256), ("down", 256, 128)):
                at, suffix = f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight", "_scale"
                if kind == "experts":
                    codes, scale = quantize_weight(torch.randn(n, k) * models.STD)
                    wide, suffix = dequantize(codes, scale, block=(128, 128)), "_scale_inv"
                else:
                    codes, scale = torch.randint(256, (n, k // 2)).byte(), torch.randint(112, 122, (n, k // 32)).byte()
                    (wide,) = reference.wide(codes[None], scale[None])
                matrices[expert, name] = wide
                yield at, codes
                yield at + suffix, scale

    reload.initialize_layerwise_reload(model)
    is_int4, of_model = kind in models.INT4, config.model_config.hf_config
    model.load_weights(models.int4_experts(of_model, "cpu", seed=1) if is_int4 else checkpoint())
    reload.finalize_layerwise_reload(model, config.model_config)
    if is_int4:
        up, down = models.DRAWN["w13"], models.DRAWN["w2"]
    else:
        up = [torch.cat([matrices[expert, "gate"], matrices[expert, "up"]]) for expert in range(8)]
        down = [matrices[expert, "down"] for expert in range(8)]
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    return of_experts(kernel, layer.routed_experts, x, (up, down), (torch.zeros(8, 1),) * 2)


def main(folder: str, kind: str) -> None:
    type(platforms.current_platform).dispatch_key = "CPU"
    type(platforms.current_platform).num_compute_units = classmethod(lambda *_: 132)  # by which Marlin has locks
    config, model = make_model(folder, kind)
    found = {"abstract": {each.__name__: sorted(each.__abstractmethods__) for each in CLASSES}}
    layer = model.model.layers[0]
    with torch.inference_mode(), set_current_vllm_config(config):
        found |= serve_packed.errors(model, config, (5,)) if kind in models.PACKED else of_layer(config, layer, kind)
        if kind in ("experts", "mxfp4", *models.INT4) and found["experts"].startswith("DeepTile"):
            found["error_of_reloaded"] = of_reloaded(config, model, kind)
        keys = [aot_compile_hash_factors(config), plugin.unregister(), aot_compile_hash_factors(config)]
    found["has_own_key"] = keys[0] != keys[-1]
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
