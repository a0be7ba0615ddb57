"""Run within SGLang by rehearse.py: its own layers of experts in MXFP4, as gpt-oss and DeepSeek-V4 have them, are made,
loaded, routed and called on a CPU. Prints a line of JSON: the methods that serve, and errors against the checkpoint's
values.
"""

import json
import sys
from functools import partial
from types import SimpleNamespace

import reference
import sglang.srt.plugins as plugins
import torch
from sglang.srt import runtime_context as context
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import mxfp4_flashinfer_cutlass_moe as flashinfer_moe
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.server_args import ServerArgs

EXPERTS, HIDDEN, TOKENS = 8, 256, 5


def drawn(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of a weight."""
    *rows, k = shape
    return torch.randint(0, 256, (*rows, k // 2)).byte(), torch.randint(114, 123, (*rows, k // 32)).byte()


def load_gpt_oss(layer: FusedMoE, weights: dict[str, torch.Tensor]) -> None:
    """All experts at once, as SGLang's gpt-oss does."""
    for name, weight in weights.items():
        layer.weight_loader(getattr(layer, name), weight, weight_name=name, shard_id=None, expert_id=None)


def load_deepseek(layer: FusedMoE, weights: dict[str, torch.Tensor]) -> None:
    """Expert by expert, gates and ups by themselves."""
    for name, weight in weights.items():
        own = f"{name}_inv" if name.endswith("scale") else name
        parameter = getattr(layer, own)
        for expert, matrix in enumerate(weight.view(parameter.dtype)):
            parts = zip(("w1", "w3"), matrix.chunk(2), strict=True) if name.startswith("w13") else (("w2", matrix),)
            for shard, part in parts:
                layer.weight_loader(parameter, part, f"experts.{expert}.{own}", shard, expert)


def of_layer(config, backend: MoeRunnerBackend, load, gated, width: int, **options) -> dict[str, object]:
    """What serves a layer, its weights' bytes in relation to the checkpoint's, and its error."""
    context.get_flags().moe.runner_backend = backend
    layer = FusedMoE(EXPERTS, HIDDEN, width, layer_id=0, top_k=2, quant_config=config, prefix="experts", **options)
    topk = TopK(top_k=2, renormalize=True, layer_id=0)
    topk.bind_runner_backend(layer.runner_backend)
    method, found = layer.quant_method, {"method": type(layer.quant_method).__name__}
    if not found["method"].startswith("DeepTile"):
        return found
    (up, up_scale), (down, down_scale) = drawn(EXPERTS, 2 * width, HIDDEN), drawn(EXPERTS, HIDDEN, width)
    weights = {"w13_weight": up, "w13_weight_scale": up_scale, "w2_weight": down, "w2_weight_scale": down_scale}
    biases, of_checkpoint = (torch.zeros(EXPERTS, 1),) * 2, sum(x.nbytes for x in weights.values())
    if layer.with_bias:
        biases = torch.randn(EXPERTS, 2 * width).bfloat16(), torch.randn(EXPERTS, HIDDEN).bfloat16()
        weights |= dict(zip(("w13_weight_bias", "w2_weight_bias"), biases, strict=True))
    load(layer, weights)
    method.process_weights_after_loading(layer)
    found["bytes"] = sum(x.nbytes for name, x in layer.named_parameters() if "bias" not in name) / of_checkpoint
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    chosen = topk.forward_native(x, torch.randn(TOKENS, EXPERTS))
    out = layer(x, chosen)
    matrices = reference.wide(up, up_scale), reference.wide(down, down_scale)
    wanted = reference.of_experts(x, chosen.topk_ids, chosen.topk_weights, matrices, biases, gated)
    return found | {"error": reference.error(out, wanted)}


LIMIT = 1.5
"""Of gates and ups: so low that it bounds some."""

KINDS = {
    "gpt_oss": (partial(Mxfp4Config, is_checkpoint_mxfp4_serialized=True), MoeRunnerBackend.AUTO, load_gpt_oss,
                reference.of_gpt_oss,
                {"width": 736, "gemm1_alpha": 1.702, "gemm1_clamp_limit": LIMIT, "with_bias": True}),
    "deepseek_v4": (partial(Fp8Config, True, "dynamic", weight_block_size=[128, 128], is_fp4_experts=True),
                    MoeRunnerBackend.FLASHINFER_MXFP4, load_deepseek, reference.of_silu,
                    {"width": 128, "swiglu_limit": LIMIT}),
}  # fmt: skip
"""Of each model its configuration, SGLang's choice on Hopper, its way to load, its activation, and its options."""


def main(asked: str) -> None:
    plugins.load_plugins()
    flashinfer_moe.is_flashinfer_available = lambda: True
    torch.set_default_dtype(torch.bfloat16)
    arguments = ServerArgs(model_path="dummy", moe_runner_backend=asked)
    context.publish(arguments, role="test", ranks=context.SpawnRanks(world_rank=0, dp_rank=None))
    context.get_parallel().override_permanently(tp_group=SimpleNamespace(rank_in_group=0, world_size=1))
    found = {}
    with context.override_platform(is_sm90=True), torch.inference_mode():
        for name, (config, chosen, load, gated, options) in KINDS.items():
            backend = chosen if asked == "auto" else MoeRunnerBackend(asked)
            found[name] = of_layer(config(), backend, load, partial(gated, limit=LIMIT), **options)
    print("FOUND", json.dumps(found))


main(*sys.argv[1:])
