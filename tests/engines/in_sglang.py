"""Run within SGLang by rehearse.py: its own registry applies the hooks to its own functions, which are then called on a
CPU. Prints a line of JSON: what is hooked, whether results are deep_tile's, bit for bit, and whether SGLang's compiler
makes deep_tile's graph where its cache on disk has another one by the same number.
"""

import importlib
import json
import sys
import tempfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import sglang.srt.layers.deep_gemm_wrapper as wrapper
import sglang.srt.plugins as plugins
import torch
from sglang.srt.layers.deep_gemm_wrapper import entrypoint
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.plugins.hook_registry import HookRegistry
from torch.fx.experimental.proxy_tensor import make_fx

from deep_tile import dequantize, fp8_gemm, fp8_linear, per_token_cast_to_fp8, quantize_weight

NAME = "deepgemm_w8a8_block_fp8_linear_with_fallback"


def graphs_of(folder: str, *functions, x: torch.Tensor) -> list[torch.Tensor]:
    """Results of functions that were compiled one after the other, as processes do it that share a cache."""
    sys.modules["sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor"] = MagicMock()  # compiled
    importlib.import_module("triton.language").dtype = type("dtype", (), {})  # which Inductor compares with
    from sglang.srt.compilation.backend import CompilerManager
    from sglang.srt.compilation.compilation_config import CompilationConfig

    results = []
    for function in functions:
        manager = CompilerManager(CompilationConfig([], compiler="inductor"))
        manager.initialize_cache(folder)
        results += manager.compile(make_fx(lambda x: (function(x),))(x), [x], {})(x)  # noqa: B023
        manager.save_to_file()
    return results


def main() -> None:
    plugins.load_plugins()
    names = sorted(target.rpartition(".")[2] for target in HookRegistry._patched)
    found = {"hooked": [name for name in names if name != "load_model"]}
    if found["hooked"]:
        found["is_copied"] = getattr(fp8, NAME) is getattr(fp8_utils, NAME)
        entrypoint.deep_gemm = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 128)
        b, b_scale = quantize_weight(torch.randn(256, 256))
        x = torch.randn(3, 256).bfloat16()
        out = getattr(fp8_utils, NAME)(x, b, [128, 128], b_scale, act_scale_ue8m0=True)
        found["linear"] = torch.equal(out, fp8_linear(x, b, b_scale, amax_floor=1e-10, round_scale="pow2"))
        a = per_token_cast_to_fp8(torch.randn(128, 256))
        wanted, out = fp8_gemm(*a, b, b_scale), torch.zeros(128, 256).bfloat16()
        weights = b[None], b_scale[None]
        wrapper.grouped_gemm_nt_f8f8bf16_contig(a, weights, out, torch.zeros(128).int())
        found["contiguous"] = torch.equal(out, wanted)
        masked = torch.zeros(1, 128, 256).bfloat16()
        groups = tuple(part[None] for part in a)
        wrapper.grouped_gemm_nt_f8f8bf16_masked(groups, weights, masked, torch.tensor([128]).int(), 128)
        found["masked"] = torch.equal(masked[0], wanted)

        def linear(x: torch.Tensor) -> torch.Tensor:
            return getattr(fp8_utils, NAME)(x, b, [128, 128], b_scale)

        weight = dequantize(b, b_scale, block=(128, 128)).t()
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            graphs = graphs_of(folder, lambda x: (x.float() @ weight).bfloat16(), linear, x=x)
            found["own graph"] = torch.equal(graphs[1], linear(x)) and not torch.equal(*graphs)
    print("FOUND", json.dumps(found))


main()
