"""A Qwen3 in FP8 through deep_tile: makes or loads a checkpoint, generates, prints the time per token.

    python examples/qwen3_fp8.py                          # a small random model, on the GPU if there is one
    python examples/qwen3_fp8.py --experts                # the same with layers of experts, as Qwen3-30B-A3B has them
    python examples/qwen3_fp8.py path/to/Qwen3-8B-FP8     # a directory with config.json and safetensors
    python examples/qwen3_fp8.py ... --transformers       # the same by transformers' own kernels, to compare

Needs transformers, and accelerate on a GPU. On the CPU deep_tile multiplies by the definition, in float64: that shows
that it works, not how fast. Nothing is downloaded; prompts are random tokens.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import deep_tile
from deep_tile.integrations import transformers as integration

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Of a model that a CPU runs in seconds. One size is no multiple of 128; weights are wide, so tokens differ."""

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
"""Of a small model with experts, as well."""


def random_model(seed: int = 0, experts: bool = False, **sizes) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """A Qwen3 of random BF16 weights, on the CPU; `sizes` go to its config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SMALL, **EXPERTS, **sizes}))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **sizes}))
        model = model.to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros would hide a bias that is dropped
                torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()


def save_quantized(model: Qwen3ForCausalLM | Qwen3MoeForCausalLM, directory: Path) -> None:
    """Write `model` to `directory` as FP8 checkpoints are published: weights of linears with `weight_scale_inv`."""
    modules = ((name, module) for name, module in model.named_modules() if module is not model.lm_head)
    linears = {f"{name}.weight" for name, module in modules if isinstance(module, torch.nn.Linear)}
    tensors = {}
    for name, tensor in published(model):
        if ".experts." in name or name in linears:
            tensor, tensors[f"{name}_scale_inv"] = deep_tile.quantize_weight(tensor)
        tensors[name] = tensor.contiguous()
    model.config.quantization_config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def published(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by the names that checkpoints have for them: each expert has its own, gate and up apart."""
    for name, tensor in model.state_dict().items():
        layer, _, weight = name.rpartition(".experts.")
        if not layer:
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else (weight,)
        for expert, of_expert in enumerate(tensor):
            for part, rows in zip(parts, of_expert.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{expert}.{part}.weight", rows


def load(directory: Path, device: str) -> PreTrainedModel:
    """The FP8 model in `directory`, on `device`, still in FP8."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            # transformers would dequantise, having no FP8 kernel for CPUs; all else of its loading is as on a GPU.
            stack.enter_context(mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"))
        options = {} if device == "cpu" else {"device_map": device}
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options).eval()


def timed_generate(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, **options) -> tuple[torch.Tensor, float]:
    """Greedy tokens, [batch, prompt + tokens], and the seconds that they took."""
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    _synchronize(model)
    begin = time.perf_counter()
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), **length, **options)
    _synchronize(model)
    return generated, time.perf_counter() - begin


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@contextlib.contextmanager
def checkpoint(directory: Path | None, experts: bool) -> Iterator[Path]:
    """`directory`, or a temporary one with a small random model."""
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory() as temporary:
        save_quantized(random_model(experts=experts), Path(temporary))
        yield Path(temporary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, nargs="?", help="checkpoint; a small random one when left out")
    parser.add_argument("--experts", action="store_true", help="of the random model: with layers of experts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate, at least 2")
    parser.add_argument("--static", action="store_true", help="static cache, which transformers compiles on a GPU")
    parser.add_argument("--transformers", action="store_true", help="transformers' own FP8 kernels; needs a GPU")
    arguments = parser.parse_args()

    if not arguments.transformers:
        integration.install()
    with checkpoint(arguments.directory, arguments.experts) as directory:
        model = load(directory, arguments.device)
    if not arguments.transformers and model.device.type == "cuda":
        deep_tile.precompile_model(model, arguments.prompt)
    options = {"cache_implementation": "static"} if arguments.static else {}
    prompt = torch.randint(model.config.vocab_size, (1, arguments.prompt), device=model.device)
    timed_generate(model, prompt, arguments.tokens, **options)
    _, first = timed_generate(model, prompt, 1, **options)
    generated, whole = timed_generate(model, prompt, arguments.tokens, **options)
    per_token = (whole - first) / (arguments.tokens - 1)
    print(f"tokens: {generated[0, arguments.prompt :].tolist()}")
    print(f"first token {1e3 * first:.1f} ms, each one after it {1e3 * per_token:.2f} ms, on {arguments.device}")


if __name__ == "__main__":
    main()
