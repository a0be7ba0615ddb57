"""The problems that are measured, as data, and the time that each is expected to take.

Read by the benchmark scripts, the report and the tests; needs no GPU. Invariant: `DENSE` lists the same 84 problems, in
the same order, as results/peers_h200_2026-11-21.json.
"""

from typing import NamedTuple

from deep_tile.problem import GemmProblem
from deep_tile.select.cost import compulsory_bytes
from deep_tile.select.hardware import H200, Hardware
from deep_tile.walls import product_flops

DEEPSEEK_V3_LAYERS = {
    "q and kv down-projection": (2112, 7168),
    "shared expert, gate and up": (4096, 7168),
    "shared expert, down": (7168, 2048),
    "attention output": (7168, 16384),
    "q up-projection": (24576, 1536),
    "kv up-projection": (32768, 512),
}
"""(n, k) for DeepSeek-V3's linear layers, which `examples/demo.py` multiplies, too."""


class Shape(NamedTuple):
    """One product: a [m, k] times b [n, k] transposed."""

    m: int
    n: int
    k: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse "MxNxK"."""
        sizes = text.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"shape is {text!r}; write three positive sizes as MxNxK, such as 4096x7168x2048")
        return cls(*map(int, sizes))

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return product_flops(*self)

    @property
    def bytes(self) -> int:
        return compulsory_bytes(GemmProblem(*self))

    def estimate_us(self, hardware: Hardware = H200) -> float:
        """Time at the tensor cores' rate or the memory's, each with its own fixed cost, whichever is longer.

        No bound: the rates are those that an H200 keeps up at its power limit, and a cooler one is faster.
        """
        compute_us = self.flops / hardware.fp8_tflops / 1e6 + hardware.launch_us
        memory_us = self.bytes / hardware.hbm_tbps / 1e6 + hardware.stream_us
        return max(compute_us, memory_us)


def _parse_all(text: str) -> tuple[Shape, ...]:
    return tuple(map(Shape.parse, text.split()))


TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_OTHERS = _parse_all(
    "1x576x7168 128x576x7168 4096x576x7168 4096x512x32768 4096x1536x24576 4096x2048x7168 "
    "4096x4096x4096 4096x7168x576 4096x7168x2112 4096x7168x4096 4096x16384x7168 8192x8192x8192"
)
_LAYERS = tuple(Shape(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in TOKENS)

DENSE = tuple(sorted(_LAYERS + _OTHERS, key=lambda shape: (shape.n, shape.k, shape.m)))
"""Every layer at every token count, and a dozen shapes more: gradients, squares and small n."""

NINE = _parse_all(
    "4096x4096x7168 4096x2112x7168 512x7168x16384 2048x7168x2048 4096x7168x2048 "
    "4096x24576x1536 4096x32768x512 4096x7168x16384 8192x8192x8192"
)
"""The compute-bound shapes that kernels are tuned on."""

SHORT_K = tuple(
    Shape(m, n, k) for n, k in ((7168, 256), (8192, 384), (4096, 512), (16384, 640)) for m in (256, 1024, 4096, 8192)
)
"""Searched, not in the table: K too short to tell a K block's time from a tile's, at which a resident b may gain."""

NARROW_N = tuple(
    Shape(m, n, 7168)
    for n, tokens in ((512, (1024,)), (576, (256, 512, 1024, 2048)), (1536, (256, 512, 1024, 2048)))
    for m in tokens
)
"""Searched, not in the table: tiles too few to fill the SMs, at a middle m."""

BETWEEN = tuple(
    Shape(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in (24, 48, 96, 192, 320, 384, 640, 768, 1536, 3072)
)
"""Searched, not in the table: its layers at m in between, where tiles of 128 rows or 64 have rows to spare."""

UNSEEN = tuple(
    Shape(m, n, k)
    for n, k in (
        *((1280, 2880), (3072, 4096), (4096, 12288), (5120, 5120), (7168, 18432)),
        *((8192, 8192), (8192, 28672), (10240, 8192), (36864, 7168), (57344, 8192)),
    )
    for m in (16, 64, 128, 200, 256, 512, 1024, 2048)
)
"""Searched apart: layers of other models, to which the time model is not fitted, to see how it chooses there."""

M_RANGES = {"m<=128": (1, 128), "m=129-1024": (129, 1024), "m>1024": (1025, 1 << 62)}
"""Decode, the middle and prefill, which are limited by different things; means are taken within each."""


def m_range(shape: Shape) -> str:
    """The name of the one of `M_RANGES` that holds `shape`."""
    return next(name for name, (low, high) in M_RANGES.items() if low <= shape.m <= high)


def select_shapes(text: str) -> list[Shape]:
    """Select shapes from a command line: "all", "nine", "searched", "unseen", a name of `M_RANGES`, or
    MxNxK[,MxNxK...]."""
    if text in M_RANGES:
        return [shape for shape in DENSE if m_range(shape) == text]
    named = {"all": DENSE, "nine": NINE, "searched": DENSE + SHORT_K + NARROW_N + BETWEEN, "unseen": UNSEEN}
    return list(named[text]) if text in named else [Shape.parse(part) for part in text.split(",")]
