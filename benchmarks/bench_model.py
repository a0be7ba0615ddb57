"""A model of 8 billion parameters' layers in transformers: BF16 by torch against FP8 by `deep_tile.nn.Linear`.

    PYTHONPATH=. python benchmarks/bench_model.py --out benchmarks/results/model.json

Qwen3-8B's sizes, random weights, 8 layers without a head, one sequence. Prefill of 2048 tokens and decoding of one,
both called eagerly, host time included, and decoding as a CUDA graph. Contestants take turns, batch by batch; figures
are medians. Needs transformers. `--small` tries the script on a CPU.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3Model, StaticCache

from benchmarks import store, timing
from deep_tile import nn, precompile_model

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
}
SMALL = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 8}
PREFILL, CONTEXT = 2048, 128
BATCHES, STEPS = 9, 20
"""Rounds in which every contestant takes its turn, and decoded tokens in each."""

Step = Callable[[], torch.Tensor]


class Contestant:
    """A model, ready to decode the token after `CONTEXT` others again and again."""

    def __init__(self, model: Qwen3Model, prefill: int):
        self._model, device = model, model.device
        self._prompt = torch.randint(0, model.config.vocab_size, (1, prefill), device=device)
        self._token = torch.randint(0, model.config.vocab_size, (1, 1), device=device)
        self._cache = StaticCache(config=model.config, max_cache_len=2 * CONTEXT)
        self._positions = torch.tensor([[CONTEXT]], device=device)
        context = torch.randint(0, model.config.vocab_size, (1, CONTEXT), device=device)
        model(input_ids=context, past_key_values=self._cache, use_cache=True)

    def prefill(self) -> torch.Tensor:
        return self._model(input_ids=self._prompt, use_cache=False).last_hidden_state

    def decode(self) -> torch.Tensor:
        out = self._model(
            input_ids=self._token, past_key_values=self._cache, position_ids=self._positions, use_cache=True
        )
        return out.last_hidden_state

    def rewind(self) -> None:
        """Drop the decoded token, so that the cache keeps its length."""
        for layer in self._cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(CONTEXT)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_ms(steps: dict[str, tuple[Step, Callable[[], None]]], count: int) -> dict[str, float]:
    """Milliseconds per step, host time included."""
    samples = {name: [] for name in steps}
    for _ in range(BATCHES):
        for name, (step, after) in steps.items():
            step(), after()
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                step()
            synchronize()
            samples[name].append((time.perf_counter() - start) * 1e3 / count)
            after()
    return {name: statistics.median(ms) for name, ms in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="a model that a CPU runs; figures mean nothing")
    options = parser.parse_args()
    sizes, device, prefill = (SMALL, "cpu", 64) if options.small else (SIZES, "cuda", PREFILL)
    with torch.device(device):
        wide = Qwen3Model(Qwen3Config(**sizes)).to(torch.bfloat16).eval().requires_grad_(False)
    quantized = copy.deepcopy(wide)
    nn.replace_linears(quantized)
    precompile_model(quantized, prefill)
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.inference_mode(), torch.cuda.stream(stream):
        contestants = {"bf16": Contestant(wide, prefill), "deep_tile": Contestant(quantized, prefill)}
        result = {
            "prefill_ms": wall_ms({name: (one.prefill, int) for name, one in contestants.items()}, 4),
            "decode_ms": wall_ms({name: (one.decode, one.rewind) for name, one in contestants.items()}, STEPS),
        }
        if device == "cuda":
            graphs = {name: timing.capture(one.decode) for name, one in contestants.items()}
            replays = {name: (graph.replay, contestants[name].rewind) for name, graph in graphs.items()}
            result["decode_graph_ms"] = wall_ms(replays, STEPS)
    for what, ms in result.items():
        print(f"{what}: {ms['bf16']:.3f} BF16, {ms['deep_tile']:.3f} deep_tile, {ms['deep_tile'] / ms['bf16']:.3f}")
    if options.out:
        store.save(options.out, {"meta": timing.describe_run(), **result})


if __name__ == "__main__":
    main()
