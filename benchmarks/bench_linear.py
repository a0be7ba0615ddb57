"""Linear layers from BF16 to BF16: `fp8_linear`, its cast and product called one by one, and torch in BF16.

    PYTHONPATH=. python benchmarks/bench_linear.py --out benchmarks/results/linear.json

One graph of LAYERS layers of one shape, each with weights of its own, in microseconds per layer, L2 flushed before each
graph; contestants take turns. The layers are those of models of 8 billion parameters; no kernel was fitted to them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import torch
import torch.nn.functional as F

import deep_tile
from benchmarks import store, timing
from benchmarks.shapes import Shape

LAYERS = 12
REPEATS = 30
TOKENS = (1, 16, 128, 2048)
WEIGHTS = ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (14336, 4096), (4096, 14336))
"""(n, k) of the layers of Qwen3-8B and Llama-3.1-8B."""

ONE_CALL, TWO_CALLS, WIDE = "fp8_linear", "cast and product", "torch BF16"


def contestants(shape: Shape) -> dict[str, Callable[[], torch.Tensor]]:
    """`LAYERS` layers, one after the other, by name of who computes them."""
    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    wide = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    weights = [deep_tile.quantize_weight(w) for w in wide]

    def all_layers(layer: Callable[..., torch.Tensor], layers: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        for given in layers:
            out = layer(x, *given)
        return out

    def two_calls(x: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        return deep_tile.fp8_gemm(*deep_tile.per_token_cast_to_fp8(x, scale_layout="m_aligned"), b, b_scale)

    return {
        ONE_CALL: lambda: all_layers(deep_tile.fp8_linear, weights),
        TWO_CALLS: lambda: all_layers(two_calls, weights),
        WIDE: lambda: all_layers(F.linear, [(w,) for w in wide]),
    }


def measure(shape: Shape, flush: timing.L2Flush) -> dict[str, float]:
    """Microseconds per layer by contestant."""
    graphs = {name: timing.capture(call) for name, call in contestants(shape).items()}
    times = timing.time_alternating(graphs, REPEATS, flush)
    if not torch.equal(graphs[ONE_CALL].output, graphs[TWO_CALLS].output):
        raise RuntimeError(f"{shape}: one call and two calls differ")
    return {name: took.us / LAYERS for name, took in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    path = parser.parse_args().out
    shapes = [Shape(m, n, k) for n, k in WEIGHTS for m in TOKENS]
    flush = timing.L2Flush()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        times = {str(shape): measure(shape, flush) for shape in shapes}
    store.save(path, {"meta": timing.describe_run(), "us_per_layer": times})
    for m in TOKENS:
        rows = [us for shape, us in times.items() if shape.startswith(f"{m}x")]
        for other in (TWO_CALLS, WIDE):
            ratio = geometric_mean(us[ONE_CALL] / us[other] for us in rows)
            print(f"m = {m}: {ONE_CALL} takes {ratio:.3f} of {other}")


if __name__ == "__main__":
    main()
