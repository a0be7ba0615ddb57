"""Experts of MXFP4 and INT4 inside vLLM on a Hopper GPU: a layer of gpt-oss' sizes, one of DeepSeek-V4's, and those of
fewer experts of Kimi-K2's are loaded by vLLM with its defaults, CUDA graphs among them, and serve the same prompts
twice; their experts are then called, alone and in a CUDA graph, and compared with the checkpoint's values in FP32 and,
beside another stream, with themselves. Prints a line of JSON.

    VLLM_USE_DEEP_TILE=1 python tests/engines/serve_packed.py gpt_oss     # or mxfp4, int4_32, int4_128

Batches are the same both times: nothing of a prompt is cached, and the engine runs in this process, so that it takes no
prompt before all have come. Other batches may have other kernels, whose rounding decides between tokens that are
nearly as likely. Without the variable vLLM's own experts serve, and only their tokens are compared.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import models
import reference
import torch

SIZES = {
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "experts_per_token": 4,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "vocab_size": 201088,
    },
    "mxfp4": {
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 32,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
}
SIZES |= dict.fromkeys(models.INT4, SIZES["mxfp4"] | {"hidden_size": 7168, "num_experts": 24, "num_experts_per_tok": 8})
TOKENS = (1, 7, 64, 515)
REPEATS = 50
MOST_ERROR = 0.08


def errors(model, config, sizes: tuple[int, ...] = TOKENS) -> dict[str, object]:
    """What serves the experts of a model's first layer, and by numbers of tokens their errors and whether a CUDA graph
    and later calls have the same bits."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    runner = model.model.layers[0].mlp.experts
    method, experts = runner._quant_method, runner.routed_experts
    drawn = {name.rpartition(".")[2]: x for name, x in models.DRAWN.items()}
    if "w13" in drawn:
        up, down = drawn["w13"], drawn["w2"]
    else:
        up, down = (reference.wide(drawn[f"{w}_weight"], drawn[f"{w}_weight_scale"]) for w in ("w13", "w2"))
    count, device = len(up), up.device
    biases = [drawn.get(f"{w}_bias", torch.zeros(count, 1, device=device)) for w in ("w13", "w2")]
    gated = reference.of_silu if experts.activation == MoEActivation.SILU else reference.of_gpt_oss
    found = {"experts": type(method.moe_kernel.impl.fused_experts).__name__, "activation": experts.activation.value}
    found |= {"experts' weights": [list(experts.w13_weight.shape), list(experts.w2_weight.shape)]}
    for tokens in sizes:
        x = torch.randn(tokens, up.shape[-1], device=device).bfloat16()
        ids = torch.stack([torch.randperm(count, device=device)[:4] for _ in range(tokens)]).int()
        shares = torch.rand(tokens, 4, device=device)

        def product(x=x, ids=ids, shares=shares) -> torch.Tensor:
            return reference.of_kernel(method.moe_kernel, experts, x, ids, shares)

        with torch.inference_mode(), set_current_vllm_config(config):
            out = product().clone()
            found[f"error of {tokens}"] = reference.error(
                out, reference.of_experts(x, ids, shares, (up, down), biases, gated)
            )
            if x.is_cuda:
                found[f"graph of {tokens}"] = torch.equal(_in_graph(product), out)
                found[f"again {tokens}"] = _stays(product, x, out)
    return found


def _in_graph(product) -> torch.Tensor:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = product()
    made.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return made


def _stays(product, x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `out` comes again, behind calls that leave other values in memory, at first beside another stream's."""
    square, stream = torch.randn(4096, 4096, device=x.device).bfloat16(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2 * REPEATS):
            square @ square
    made = []
    for _ in range(REPEATS):
        product(x=torch.randn_like(x))
        made.append(torch.equal(product(), out))
    torch.cuda.synchronize()
    return all(made)


class Worker:
    """Requests to vLLM's worker beyond its own (`worker_extension_cls`)."""

    def errors_of_experts(self) -> dict[str, object]:
        return errors(self.model_runner.get_model(), self.vllm_config)


def main(kind: str) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    is_hooked = os.environ.get("VLLM_USE_DEEP_TILE") == "1"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(models.config(kind, SIZES[kind])))
        engine = LLM(
            folder,
            load_format=models.LOADER,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=32,
            gpu_memory_utilization=0.12,
            kv_cache_memory_bytes=2 * 10**8,
            enable_prefix_caching=False,
            worker_extension_cls="serve_packed.Worker",
            compilation_config={"cudagraph_capture_sizes": [1, 8]},
        )
        prompts = [{"prompt_token_ids": [(i * i + 7919 * i * n) % 150000 + 3 for i in range(40)]} for n in range(1, 6)]
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        said = [
            [list(output.outputs[0].token_ids) for output in engine.generate(prompts, sampling, use_tqdm=False)]
            for _ in range(2)
        ]
        found = engine.collective_rpc("errors_of_experts")[0] if is_hooked else {"experts": "vLLM's"}
    found |= {"tokens": sum(len(row) for row in said[0]), "same again": said[0] == said[1]}
    print("FOUND", kind, json.dumps(found), flush=True)
    wrong = [key for key, value in found.items() if value is False or (key.startswith("error") and value > MOST_ERROR)]
    return int(bool(wrong) or is_hooked != found["experts"].startswith("DeepTile"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
