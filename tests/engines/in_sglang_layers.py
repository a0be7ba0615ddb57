"""SGLang's own layers in FP8 blocks, linear and of experts, through the plugin on a GPU: made, loaded and called by
SGLang, alone and in CUDA graphs, against products in FP64. Prints a line of JSON.

    SGLANG_USE_DEEP_TILE=1 PYTHONPATH=...:<SGLang's Python files> python tests/engines/in_sglang_layers.py

SGLang's compiled kernels are too many to build for this: its cast and its activation are torch's here, and DeepGEMM is
a stand-in that multiplies nothing, so that only the hooks can. Scatter, gather and layouts are SGLang's Triton kernels.
With TRITON_INTERPRET=1, --device cpu and --layouts masked the same runs without a GPU, but for graphs, the gather and
the other layout, whose loops Triton's interpreter cannot run; with no layouts it needs no Triton, as in rehearse.py.
"""

import argparse
import contextlib
import json
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch
from reference import error

STAND_IN = ModuleType("deep_gemm")
"""DeepGEMM: settings alone."""
CASES = {"one": (1, 2048, 1536, 768), "few": (33, 2048, 1536, 768), "many": (515, 1024, 512, 384)}
"""Tokens, hidden size, a linear layer's columns, and a width of experts."""
EXPERTS, CHOSEN = 16, 4
LAYOUTS = "masked", "compact"
SMS = 20
"""So many may a product use at most while others run."""


def stand_in(device: str) -> dict[str, int]:
    """Put DeepGEMM's stand-in where SGLang imports it. Returns its settings."""
    settings = {"num_sms": 132, "alignment": 128}
    layout = ModuleType("deep_gemm.utils.layout")
    layout.get_mn_major_tma_aligned_tensor = _mn_major
    STAND_IN.utils, STAND_IN.__version__ = ModuleType("deep_gemm.utils"), "0"
    STAND_IN.utils.layout = layout
    for name in ("num_sms", "mk_alignment_for_contiguous_layout"):
        key = name if name in settings else "alignment"
        setattr(STAND_IN, f"get_{name}", lambda key=key: settings[key])
        setattr(STAND_IN, f"set_{name}", lambda value, key=key: settings.update({key: value}))
    sys.modules |= {"deep_gemm": STAND_IN, "deep_gemm.utils": STAND_IN.utils, "deep_gemm.utils.layout": layout}
    if device == "cpu":
        import sglang.srt.layers.deep_gemm_wrapper as wrapper

        for module in (wrapper, wrapper.entrypoint):
            module.ENABLE_JIT_DEEPGEMM = module.DEEPGEMM_NEED_TMA_ALIGNED_SCALES = True
            module.deep_gemm, module.get_mn_major_tma_aligned_tensor = STAND_IN, _mn_major
    return settings


def _mn_major(scale: torch.Tensor) -> torch.Tensor:
    *groups, rows, k = scale.shape
    out = scale.new_zeros(*groups, k, -(-rows // 4) * 4).transpose(-1, -2)[..., :rows, :]
    return out.copy_(scale)


def cast(input, output_q, output_s, group_size, fuse_silu_and_mul=False, masked_m=None, **_) -> None:
    """SGLang's cast with scales of 1x128: by torch, rows beyond `masked_m` included."""
    wide = silu_and_mul(input) if fuse_silu_and_mul else input
    groups = wide.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    output_q.copy_((groups / scale[..., None]).flatten(-2).to(output_q.dtype))
    output_s.copy_(scale)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    made = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    return made if out is None else out.copy_(made)


def gather(rows, out, places, ids, shares, *_) -> None:
    """What SGLang's last kernel computes."""
    out.copy_((rows.flatten(0, -2)[places.view(shares.shape).long()].float() * shares[..., None]).sum(1))


def replace_compiled_kernels(device: str) -> None:
    quant = import_module("sglang.kernels.ops.quantization.per_token_group_quant")
    runner = import_module("sglang.srt.layers.moe.moe_runner.deep_gemm")
    quant._per_token_group_quant_custom_op = cast
    runner._legacy_silu_and_mul = silu_and_mul
    if device == "cpu":
        kernels = import_module("sglang.kernels.ops.moe.ep_moe_kernels")
        casts = import_module("sglang.kernels.ops.quantization.fp8_kernel")
        kernels.per_token_group_quant_fp8 = casts.sglang_per_token_group_quant_fp8
        casts.per_token_group_quant, runner._is_cuda = quant.per_token_group_quant, True
        kernels.post_reorder_deepgemm = gather


def publish(device: str) -> None:
    """What a server would have set."""
    from sglang.srt import runtime_context as context
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy", moe_runner_backend="deep_gemm", device=device)
    context.publish(arguments, role="test", ranks=context.SpawnRanks(world_rank=0, dp_rank=None))
    context.get_flags().moe.runner_backend = MoeRunnerBackend.DEEP_GEMM
    context.get_parallel().override_permanently(tp_group=SimpleNamespace(rank_in_group=0, world_size=1))


def quantised(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in blocks, its scales, and its values in FP64."""
    from deep_tile import dequantize, quantize_weight

    made = [quantize_weight(torch.randn(shape[-2:]) * 0.05) for _ in range(shape[0] if len(shape) > 2 else 1)]
    codes, scale = (torch.stack(parts) for parts in zip(*made, strict=True))
    values = torch.stack([dequantize(c, s, block=(128, 128)) for c, s in made]).double()
    return tuple(x if len(shape) > 2 else x[0] for x in (codes, scale, values))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The values of a cast with scales of 1x128, in FP64."""
    codes, scale = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(*x.shape[:-1], x.shape[-1] // 128)
    cast(x, codes, scale, 128)
    return codes.double() * scale.double().repeat_interleave(128, -1)


def in_graph(function, x: torch.Tensor) -> torch.Tensor | None:
    """What a CUDA graph makes of `x` after it was captured for other values; None without a GPU."""
    if not x.is_cuda:
        return None
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    given = torch.randn_like(x)
    function(given.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with model_capture_mode(), torch.cuda.graph(graph):
        made = function(given)
    given.copy_(x)
    made.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return made


def found_of(function, x: torch.Tensor, wanted: torch.Tensor) -> dict[str, object]:
    out = function(x.clone())
    found = {"error": error(out, wanted)}
    made = in_graph(function, x)
    if made is not None:
        found["graph"] = torch.equal(made, out)
    return found


def of_linear(config, tokens: int, k: int, n: int, device: str) -> dict[str, object]:
    from sglang.srt.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="linear")
    layer.to(device)
    codes, scale, values = quantised(n, k)
    layer.weight.data.copy_(codes)
    layer.weight_scale_inv.data.copy_(scale)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(tokens, k).bfloat16()
    found = found_of(lambda x: layer(x)[0], x, rounded(x) @ values.t())
    linear = layer.quant_method.w8a8_block_fp8_linear
    return found | {"class": getattr(linear, "__name__", str(linear)), "hooked": hasattr(linear, "__wrapped__")}


def of_experts(config, layout: str, tokens: int, hidden: int, width: int, device: str) -> dict[str, object]:
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    layer = FusedMoE(EXPERTS, hidden, width, layer_id=0, top_k=CHOSEN, quant_config=config, prefix="experts").to(device)
    (up, up_scale, up_values), (down, down_scale, down_values) = (
        quantised(EXPERTS, 2 * width, hidden),
        quantised(EXPERTS, hidden, width),
    )
    for name, tensor in (("w13", up), ("w2", down)):
        getattr(layer, f"{name}_weight").data.copy_(tensor)
    for name, tensor in (("w13", up_scale), ("w2", down_scale)):
        getattr(layer, f"{name}_weight_scale_inv").data.copy_(tensor)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS - 3)[:CHOSEN] for _ in range(tokens)]).int()  # the last have no rows
    shares = torch.rand(tokens, CHOSEN)
    seen, wanted = rounded(x), torch.zeros(tokens, hidden, dtype=torch.float64)
    for j in range(CHOSEN):
        for expert in range(EXPERTS):
            rows = (ids[:, j] == expert).nonzero()[:, 0]
            h = silu_and_mul((seen[rows] @ up_values[expert].t()).bfloat16())
            wanted[rows] += shares[rows, j, None].double() * (rounded(h) @ down_values[expert].t())
    topk = StandardTopKOutput(shares, ids, torch.zeros(tokens, EXPERTS))
    with envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override(layout):
        found = found_of(lambda x: layer(x, topk), x, wanted)
    runner = layer.quant_method.runner
    return found | {"class": f"{type(layer.quant_method).__name__}, {runner.runner_backend.value}"}


def of_limit(settings: dict[str, int]) -> dict[str, object]:
    """Products keep to SGLang's limit of SMs, and results stay."""
    from sglang.srt.layers.deep_gemm_wrapper import entrypoint
    from sglang.srt.layers.quantization import fp8_utils

    from deep_tile import fp8_linear
    from deep_tile.integrations import sglang_hooks

    codes, scale, _ = quantised(1024, 1024)
    x = torch.randn(300, 1024).bfloat16()
    with entrypoint.configure_deep_gemm_num_sms(SMS):
        inner = settings["num_sms"], sglang_hooks._settings["num_sms"]
        out = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback(x, codes, [128, 128], scale)
    outer = settings["num_sms"], sglang_hooks._settings["num_sms"]
    return {
        "within": inner,
        "after": outer,
        "equal": torch.equal(out, fp8_linear(x, codes, scale, amax_floor=1e-10, num_sms=SMS)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS, help="of experts")
    options = parser.parse_args()
    device = options.device
    settings = stand_in(device)
    import sglang.srt.plugins as plugins
    from sglang.srt import runtime_context as context
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    plugins.load_plugins()
    replace_compiled_kernels(device)
    publish(device)
    torch.set_default_device(device)
    config = Fp8Config(True, "dynamic", weight_block_size=[128, 128])
    pretended = context.override_platform(is_sm90=True) if device == "cpu" else contextlib.nullcontext()
    found = {}
    with pretended, torch.inference_mode():
        for name in options.cases:
            tokens, hidden, n, width = CASES[name]
            found[f"linear, {name}"] = of_linear(config, tokens, hidden, n, device)
            for layout in options.layouts:
                found[f"{layout} experts, {name}"] = of_experts(config, layout, tokens, hidden, width, device)
        found["limit of SMs"] = of_limit(settings)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
