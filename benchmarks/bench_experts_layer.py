"""Layers of experts in transformers: BF16 by torch, FP8 by transformers' own kernels, FP8 by deep_tile, as CUDA graphs.

    PYTHONPATH=. python benchmarks/bench_experts_layer.py --out benchmarks/results/experts_layer.json

Four layers of Qwen3-30B-A3B (128 experts, 8 for each token, hidden 2048, each expert 768 wide), random weights, without
a head: the whole layers at a prefill of 2048 tokens, and the experts with their routers alone, at that and at fewer
tokens. Milliseconds, medians, contestants in turn, L2 cold. transformers' own kernels come from a hub; where they
cannot be loaded, that contestant is left out. Every contestant's experts are checked against BF16. Needs transformers.
`--small` tries the script on a CPU, where nothing is timed.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeModel
from transformers.integrations import finegrained_fp8

from benchmarks import store, timing
from deep_tile import quantize_weight
from deep_tile.integrations import transformers as integration
from deep_tile.reference import relative_error

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "vocab_size": 1024,
}
SMALL = SIZES | {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PREFILL = 2048
TOKENS = (1, 8, 64, 512, PREFILL)
REPEATS = 20
MOST_ERROR = 0.15
"""Largest error relative to the experts in BF16: several times that of quantising weights and inputs."""

Call = Callable[[], torch.Tensor]


def quantized(wide: Qwen3MoeModel) -> Qwen3MoeModel:
    """The model in FP8, as transformers holds one that it has loaded."""
    model = copy.deepcopy(wide)
    weights = {name: dict(module.named_parameters(recurse=False)) for name, module in model.named_modules()}
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    finegrained_fp8.replace_with_fp8_linear(model, quantization_config=config, pre_quantized=True)
    for name, module in model.named_modules():
        if isinstance(module, (finegrained_fp8.FP8Linear, finegrained_fp8.FP8Experts)):
            for parameter, weight in weights[name].items():
                values, scale = quantize_weight(weight.detach().flatten(0, -2))
                scale = scale.view(*weight.shape[:-2], -1, scale.shape[-1])
                for what, tensor in ((parameter, values.view(weight.shape)), (f"{parameter}_scale_inv", scale)):
                    setattr(module, what, torch.nn.Parameter(tensor, requires_grad=False))
    return model


def contestants(wide: Qwen3MoeModel) -> Iterator[tuple[str, Qwen3MoeModel]]:
    """Models by name. Each is called as it is while it is the last one yielded."""
    yield "bf16", wide
    model = quantized(wide)
    try:
        finegrained_fp8.load_finegrained_fp8_kernel()
        yield "transformers", model
    except Exception as error:  # a hub is not there in many ways
        print(f"transformers' own kernels are left out: {error}")
    integration.install()
    try:
        yield "deep_tile", model
    finally:
        integration.uninstall()


def calls(model: Qwen3MoeModel, inputs: dict[int, torch.Tensor], prompt: torch.Tensor) -> dict[str, Call]:
    """The calls to time, by name."""
    found = {f"experts, {tokens} tokens": partial(experts, model, x) for tokens, x in inputs.items()}
    return found | {f"layers, {prompt.shape[1]} tokens": partial(layers, model, prompt)}


def experts(model: Qwen3MoeModel, x: torch.Tensor) -> torch.Tensor:
    """All layers' experts with the same input. Returns the last layer's result."""
    return [layer.mlp(x) for layer in model.layers][-1]


def layers(model: Qwen3MoeModel, prompt: torch.Tensor) -> torch.Tensor:
    return model(input_ids=prompt, use_cache=False).last_hidden_state


def check(name: str, results: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for what, result in results.items():
        error = relative_error(result, wanted[what])
        if what.startswith("experts") and not error <= MOST_ERROR:
            raise RuntimeError(f"{name} is wrong: {what} differ by {error:.3f} from those in BF16")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="a model that a CPU runs; nothing is timed")
    options = parser.parse_args(arguments)
    sizes, device = (SMALL, "cpu") if options.small else (SIZES, "cuda")
    with torch.device(device):
        wide = Qwen3MoeModel(Qwen3MoeConfig(**sizes)).to(torch.bfloat16).eval().requires_grad_(False)
    inputs = {
        tokens: torch.randn(1, tokens, sizes["hidden_size"], device=device, dtype=torch.bfloat16)
        for tokens in (TOKENS[:2] if options.small else TOKENS)
    }
    prompt = torch.randint(sizes["vocab_size"], (1, max(inputs)), device=device)
    stream = None if options.small else torch.cuda.Stream()
    graphs, wanted = {}, {}
    with torch.inference_mode(), torch.cuda.stream(stream):
        for name, model in contestants(wide):
            of_model = calls(model, inputs, prompt)
            results = {what: call().clone() for what, call in of_model.items()}
            wanted = wanted or results
            check(name, results, wanted)
            if not options.small:
                for what, call in of_model.items():
                    graphs.setdefault(what, {})[name] = timing.capture(call)
        flush = None if options.small else timing.L2Flush()
        times = {what: timing.time_alternating(each, REPEATS, flush) for what, each in graphs.items()}
    result = {what: {name: one.us / 1e3 for name, one in each.items()} for what, each in times.items()}
    for what, ms in result.items():
        print(f"{what}: {', '.join(f'{one:.3f} ms {name}' for name, one in ms.items())}")
    if options.out:
        store.save(options.out, {"meta": timing.describe_run(), "ms": result})


if __name__ == "__main__":
    main()
