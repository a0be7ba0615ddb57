"""demo.py --experts: an expert layer, checked step by step and timed against a torch loop over experts.

Where there is no Hopper GPU, its kernels are compiled, and a small layer is computed on the CPU. Imports torch only
when it multiplies.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from demo_kinds import report_errors

import deep_tile
from deep_tile import plan
from deep_tile.config import ceil_div
from deep_tile.method import report
from deep_tile.problem import GemmProblem, Groups
from deep_tile.progress import track_progress
from deep_tile.tools.compile import build_all, kernel_table, report_flaws
from deep_tile.tools.console import new_console
from deep_tile.tools.products import exact_product

if TYPE_CHECKING:
    import torch

SAMPLES = 10
"""Timing samples per layer."""

MOST_OF_A_CAST = 0.04
"""Bound for the relative error of rounding to e4m3 (3 mantissa bits): 0.026 on normal samples."""


class Sizes(NamedTuple):
    """A layer's sizes: `experts`, `top_k` per token, mapping `hidden` values to `width` and back."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def weights(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(n, k) for both GEMMs."""
        return (2 * self.width, self.hidden), (self.hidden, self.width)

    def __str__(self) -> str:
        return f"{self.experts} experts, {self.top_k} for each token, hidden {self.hidden}, each {self.width} wide"


QWEN3_30B = Sizes(128, 8, 2048, 768)
TOKENS = (1, 64, 2048)
SMALL, FEW_TOKENS = Sizes(8, 2, 256, 128), 40


def demo_without_gpu(reason: str) -> tuple[int, str]:
    console = new_console()
    console.print(f"No Hopper GPU to run on ({reason}).")
    console.print(
        "So this chooses and compiles the kernels of Qwen3-30B-A3B's experts as on an H200, and computes a small layer "
        "on the CPU.",
        "",
    )
    uses = Counter(_config(tokens, n, k) for tokens in TOKENS for n, k in QWEN3_30B.weights)
    built = build_all(list(uses), os.cpu_count() or 1)
    console.print(kernel_table(built, uses), "")
    errors = Layer(SMALL, "cpu").checked(*routed(SMALL, FEW_TOKENS, "cpu"))
    console.print(f"{FEW_TOKENS} tokens through {SMALL}, on the CPU, against float64:")
    table = report.table("step", "relative error", "at most")
    for step, error in errors.items():
        table.add_row(step, f"{error:.2e}", f"{_most_error(step):.2e}")
    console.print(table, "")
    code = max(report_flaws(built), _report({FEW_TOKENS: errors}))
    return code, f"{len(built)} kernels compile without spills, and {len(errors)} steps are right"


def _config(tokens: int, n: int, k: int) -> plan.GemmConfig:
    rows = tokens * QWEN3_30B.top_k
    groups = Groups("offs", QWEN3_30B.experts, ceil_div(rows, QWEN3_30B.experts))
    return plan.config_for(GemmProblem(rows, n, k, groups=groups))


def demo_on_gpu(reason: str) -> tuple[int, str]:
    import torch

    from deep_tile.tools import timing

    console = new_console()
    console.print(f"Running on the GPU ({reason}): {QWEN3_30B}, timed and checked step by step.")
    layer, flush = Layer(QWEN3_30B, "cuda"), timing.L2Flush()
    table = report.table("tokens", "us", "BF16 loop us", "gain", *_STEPS, spare=tuple(reversed(_STEPS)))
    wrong, gains = {}, []
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # none is captured on the default stream
        for tokens in track_progress(TOKENS, "Multiplying"):
            given = routed(QWEN3_30B, tokens, "cuda")
            errors = wrong[tokens] = layer.checked(*given)
            graph = timing.capture(partial(layer, *given))
            calls = {"ours": graph.replay, "loop": partial(layer.loop, *given)}
            us = {name: timed.us for name, timed in timing.time_calls(calls, SAMPLES, flush).items()}
            gains.append(us["loop"] / us["ours"])
            times = f"{us['ours']:.1f}", f"{us['loop']:.1f}", f"{gains[-1]:.1f}"
            table.add_row(str(tokens), *times, *(f"{error:.2e}" for error in errors.values()))
    console.print(table, "")
    console.print(
        f"us: median of {SAMPLES} samples, a CUDA graph of the whole layer, rows sorted by expert included. The BF16 "
        "loop calls torch expert by expert and waits for the GPU to say which rows are whose, which no graph can hold. "
        "Errors are relative, of each step, against float64; the cast's is that of e4m3.",
        "",
    )
    fast = f"the layer is {min(gains):.1f} to {max(gains):.1f} times as fast as a loop in BF16"
    return _report(wrong), f"{len(wrong) * len(_STEPS)} steps are right, and {fast}"


def routed(sizes: Sizes, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, sizes.hidden, generator=generator, device=device, dtype=torch.bfloat16)
    weights, chosen = torch.rand(tokens, sizes.experts, generator=generator, device=device).topk(sizes.top_k)
    return x, chosen, weights


_STEPS = ("gate and up", "activation and cast", "down", "sum")


class Layer:
    """Experts with random weights, in BF16 and FP8."""

    def __init__(self, sizes: Sizes, device: str):
        import torch

        generator = torch.Generator(device).manual_seed(0)
        self._sizes = sizes
        self._wide = [
            torch.randn(sizes.experts, n, k, generator=generator, device=device, dtype=torch.bfloat16) * k**-0.5
            for n, k in sizes.weights
        ]
        self._up, self._down = map(_quantized, self._wide)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._steps(x, chosen, weights)[-1]

    def _steps(self, x, chosen, weights) -> tuple:
        """The row lists, then each step's result."""
        lists = deep_tile.sort_by_expert(chosen, self._sizes.experts)
        tokens = deep_tile.per_token_cast_to_fp8(x, rows=lists.rows)
        gate_up = deep_tile.fp8_grouped_gemm(*tokens, *self._up, lists.offs)
        hidden = deep_tile.silu_mul_cast_to_fp8(gate_up)
        results = deep_tile.fp8_grouped_gemm(*hidden, *self._down, lists.offs)
        return lists, tokens, gate_up, hidden, results, deep_tile.combine(results, weights, lists.index)

    def loop(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same in BF16, by torch."""
        import torch.nn.functional as F

        out = x.new_zeros(x.shape)
        for expert, (up, down) in enumerate(zip(*self._wide, strict=True)):
            tokens, which = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                gate, other = F.linear(x[tokens], up).chunk(2, -1)
                of_expert = F.linear(F.silu(gate) * other, down)
                out.index_add_(0, tokens, of_expert * weights[tokens, which, None].to(out.dtype))
        return out

    def checked(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
        """Each step's relative error, given the previous step's result."""
        from deep_tile.reference import relative_error

        lists, tokens, gate_up, hidden, results, out = self._steps(x, chosen, weights)
        gate, other = gate_up.double().chunk(2, -1)
        exact = (
            (gate_up, _exact_products(*tokens, *self._up, lists.offs)),
            (deep_tile.dequantize(*hidden), gate * gate.sigmoid() * other),
            (results, _exact_products(*hidden, *self._down, lists.offs)),
            (out, (weights.double()[..., None] * results.double()[lists.index]).sum(1)),
        )
        errors = (relative_error(result, wanted) for result, wanted in exact)
        return dict(zip(_STEPS, errors, strict=True))


def _quantized(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = deep_tile.per_block_cast_to_fp8(weights.flatten(0, 1))
    return values.view(weights.shape), scale.unflatten(0, (len(weights), -1))


def _exact_products(a, a_scale, b, b_scale, offs) -> torch.Tensor:
    import torch

    ends = offs.tolist()
    groups = zip([0, *ends], ends, b, b_scale, strict=False)
    return torch.cat([exact_product(a[begin:end], a_scale[begin:end], *weight) for begin, end, *weight in groups])


def _most_error(step: str) -> float:
    from deep_tile.reference import MAX_RELATIVE_ERROR

    return MOST_OF_A_CAST if step == "activation and cast" else MAX_RELATIVE_ERROR


def _report(errors: dict[int, dict[str, float]]) -> int:
    return report_errors(
        (f"{tokens} tokens, {step}", error, _most_error(step))
        for tokens, of_steps in errors.items()
        for step, error in of_steps.items()
    )
