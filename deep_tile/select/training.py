"""A layer's predicted gain from FP8 training, by the selector's H200 time model, and which layers are small.

Needs no GPU.
"""

from typing import NamedTuple

from deep_tile.config import check_sizes
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose
from deep_tile.select.cost import estimate, launch_time
from deep_tile.select.hardware import H200

_CAST_SHARE = 0.8
"""Share of a copy's bandwidth that `cast_both` and `cast_weight` reach: 0.77 to 0.87 (H100, 2026-11-25)."""

_TORCH_SHARE = 0.98
"""torch's time for a BF16 GEMM as a share of the model's: with it the predicted gain of 32 layers is right in the mean,
with a deviation of 9 %, and each is rightly said to pay or not (H100, 2026-11-26)."""


_BF16_HOST_US, _JOINED_HOST_US, _FP8_HOST_US = 140, 150, 360
"""Host time to enqueue a layer's two passes in eager mode: in BF16, 119 to 162; in FP8, 130 to 167 for a small layer,
270 to 425 for others (H100, 2026-11-26)."""

MOST_ELEMENTS, MOST_PRODUCTS = 2**25, 2**35
"""Limits of a small layer: elements of x, of the weight and of the result, and m * n * k. Below them the GPU works on a
pass for at most as long as the host takes to make its calls one by one (8192 x 1024 x 4096: 241 us for 372 in all;
H100, 2026-11-26)."""


def is_small(m: int, n: int, k: int) -> bool:
    """Whether host time bounds a layer with m tokens and a weight [n, k] in eager mode, so that joined calls pay
    (train/joined.py)."""
    return 0 < m * n * k <= MOST_PRODUCTS and max(m * k, m * n, n * k) <= MOST_ELEMENTS


class Prediction(NamedTuple):
    """Microseconds for a layer's forward and backward pass: GEMMs and casts on the GPU, or, in eager mode, the host's
    enqueueing if longer."""

    bf16_us: float
    fp8_us: float

    @property
    def pays(self) -> bool:
        return self.fp8_us < self.bf16_us


def predict(tokens: int, n: int, k: int, *, eager: bool = False) -> Prediction:
    """Predicted time of a layer's three GEMMs in BF16, and in FP8 with casts of x, dy and the weight.

    Args:
        tokens: per forward pass, by a weight [n, k].
        eager: the layer is called without torch.compile and CUDA graphs, among similar layers: a GPU with little work
            then waits for the host.

    Raises:
        TypeError, ValueError: a size is no positive int.
    """
    check_sizes(tokens=tokens, n=n, k=k)
    tokens, n, k = map(int, (tokens, n, k))
    sizes = ((tokens, n, k), (tokens, k, n), (n, k, tokens))
    bf16 = _TORCH_SHARE * sum(_product_us(*size, "bf16") for size in sizes)
    fp8 = sum(_product_us(*size, "fp8") for size in sizes)
    read_and_written = 4 * (tokens * k + tokens * n + n * k)
    casts = read_and_written / (H200.hbm_tbps * _CAST_SHARE) / 1e6 + 3 * launch_time()
    if eager:
        host = _JOINED_HOST_US if is_small(tokens, n, k) else _FP8_HOST_US
        return Prediction(max(bf16, _BF16_HOST_US), max(fp8 + casts, host))
    return Prediction(bf16, fp8 + casts)


def _product_us(m: int, n: int, k: int, kind: str) -> float:
    problem = GemmProblem(m, n, k, kind=kind)
    return estimate(choose(problem), problem).time_us
