"""What a layer gains by training in FP8, by the selector's model of an H200's times: no GPU is asked."""

from typing import NamedTuple

from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose
from deep_tile.select.cost import estimate, launch_time
from deep_tile.select.hardware import H200

_CAST_SHARE = 0.8
"""Of the bandwidth that a copy has, what `cast_both` and `cast_weight` reach: 0.77 to 0.87 (H100, 2026-11-25)."""


class Prediction(NamedTuple):
    """Microseconds of a layer's forward and backward pass on the GPU, its products and casts alone."""

    bf16_us: float
    fp8_us: float

    @property
    def pays(self) -> bool:
        return self.fp8_us < self.bf16_us


def predict(tokens: int, n: int, k: int) -> Prediction:
    """How long the three products of a layer take in BF16, and in FP8 with the casts of x, dy and the weight.

    Args:
        tokens: of a forward pass.
        n, k: of the weight, [n, k].

    Returns:
        A `Prediction`. In eager mode a layer of FP8 takes torch some 250 us to enqueue, which small layers wait for.
    """
    sizes = ((tokens, n, k), (tokens, k, n), (n, k, tokens))
    bf16 = sum(_product_us(*size, "bf16") for size in sizes)
    fp8 = sum(_product_us(*size, kind) for size, kind in zip(sizes, ("fp8", "fp8", "fp8_1x128"), strict=True))
    read_and_written = 4 * (tokens * k + tokens * n + n * k)
    casts = read_and_written / (H200.hbm_tbps * _CAST_SHARE) / 1e6 + 3 * launch_time()
    return Prediction(bf16, fp8 + casts)


def _product_us(m: int, n: int, k: int, kind: str) -> float:
    problem = GemmProblem(m, n, k, kind=kind)
    return estimate(choose(problem), problem).time_us
