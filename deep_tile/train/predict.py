"""What a layer gains by training in FP8, by the selector's model of an H200's times: no GPU is asked."""

from typing import NamedTuple

from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose
from deep_tile.select.cost import estimate, launch_time
from deep_tile.select.hardware import H200
from deep_tile.train.sizes import is_small

_CAST_SHARE = 0.8
"""Of the bandwidth that a copy has, what `cast_both` and `cast_weight` reach: 0.77 to 0.87 (H100, 2026-11-25)."""

_TORCH_SHARE = 0.9
"""Of the time that the model has for a product in BF16, what torch takes: 0.88 to 0.95 in six layers (H100,
2026-11-25)."""


_BF16_HOST_US, _JOINED_HOST_US, _FP8_HOST_US = 140, 150, 360
"""What the host takes to enqueue a layer's two passes in eager mode, of torch's, of small layers (joined.py) and of
others: 119 to 162, 130 to 167 and 270 to 425 (H100, 2026-11-26)."""


class Prediction(NamedTuple):
    """Microseconds of a layer's forward and backward pass: of its products and casts on the GPU, or, in eager mode, of
    the host that enqueues them, where that takes longer."""

    bf16_us: float
    fp8_us: float

    @property
    def pays(self) -> bool:
        return self.fp8_us < self.bf16_us


def predict(tokens: int, n: int, k: int, *, eager: bool = False) -> Prediction:
    """How long the three products of a layer take in BF16, and in FP8 with the casts of x, dy and the weight.

    Args:
        tokens: of a forward pass.
        n, k: of the weight, [n, k].
        eager: the layer is called outside of torch.compile and CUDA graphs, among layers of its size: the GPU then
            waits for the host where it has less to do.

    Returns:
        A `Prediction`.
    """
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
