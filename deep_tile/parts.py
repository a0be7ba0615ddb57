"""Thin GEMM kernels (thin.cuh): choice, number of K parts, launches.

Called by thin.py. Knows integers and CUDA device ordinals, not tensors: no torch. Kernels are compiled and loaded like
casts (cast.py).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from deep_tile import _launcher, cast, params
from deep_tile.codegen import PartsKernel, SplitKernel, StreamingKernel, ThinKernel
from deep_tile.config import ceil_div, round_up
from deep_tile.kinds import K_BLOCK_BYTES
from deep_tile.params import MapLayout, Place

STEP = 64
"""K elements per K block."""

KERNELS = (
    ThinKernel(64, 32, terms=3, stages=5, split_warps=3, squares=True, blocks_per_sm=2),
    ThinKernel(128, 32, terms=3, stages=7, split_warps=3, squares=True, blocks_per_sm=1),
    ThinKernel(64, 64, terms=3, stages=3, split_warps=0, squares=False, blocks_per_sm=2),
    ThinKernel(128, 128, terms=3, stages=3, split_warps=0, squares=False, blocks_per_sm=1),
    ThinKernel(64, 64, terms=2, stages=4, split_warps=0, squares=False, blocks_per_sm=2),
    ThinKernel(128, 128, terms=2, stages=4, split_warps=0, squares=False, blocks_per_sm=1),
    ThinKernel(64, 64, terms=1, stages=6, split_warps=0, squares=False, blocks_per_sm=2),
    ThinKernel(128, 128, terms=1, stages=6, split_warps=0, squares=False, blocks_per_sm=1),
)
"""Each serves every size; as many stages as shared memory holds."""

SUM = PartsKernel(threads=256, blocks_per_sm=4)

SPLIT = {terms: SplitKernel(terms, threads=256, blocks_per_sm=4) for terms in (2, 3)}

MOST_PARTS = 128
"""That are chosen: about as many as a GPU has SMs."""

INVARIANT_PARTS = 4
"""Where results may not depend on m: fewer would leave a GPU idle for few rows, more cost many rows time."""

_MOST_LANES = 8
_FORMATS = {"bf16": 1, "fp16": 2, "fp32": 3}
"""As the kernel's Format counts them."""


class Product(NamedTuple):
    """The GEMM's sizes.

    Attributes:
        m, n, k: for each of `matrices`, whose results are summed.
        terms: BF16 terms that represent b.
        squares: whether a's row squares are summed too.
    """

    m: int
    n: int
    k: int
    matrices: int
    terms: int
    squares: bool

    @property
    def matrix_steps(self) -> int:
        return ceil_div(self.k, STEP)

    @property
    def steps(self) -> int:
        return self.matrix_steps * self.matrices


class Layout(NamedTuple):
    """Strides in elements: per row, and per matrix for operands.

    Attributes:
        part_stride: from a part's results to the next one's; 0 where there is one.
        output: the output format's name.
        accumulate: results are added to it.
    """

    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    out_stride: int
    part_stride: int
    output: str
    accumulate: bool


@lru_cache(maxsize=65_536)
def choose(product: Product, num_sms: int, parts: int | None = None) -> tuple[ThinKernel, int]:
    """The kernel and K part count with the least predicted time; with `parts` given, the kernel for that count."""
    known = [kernel for kernel in KERNELS if (kernel.terms, kernel.squares) == (product.terms, product.squares)]
    counts = range(1, min(product.steps, MOST_PARTS) + 1) if parts is None else (parts,)
    return min(
        ((kernel, count) for kernel in known for count in counts), key=lambda found: _clocks(product, *found, num_sms)
    )


def units(kernel: ThinKernel, product: Product, parts: int) -> int:
    """Thread blocks: each has a tile and a part."""
    return ceil_div(product.m, kernel.block_m) * ceil_div(product.n, kernel.block_n) * parts


_STEP_CLOCKS = {
    (64, 3, True): (790, 1390),
    (128, 3, True): (1270, 1270),
    (64, 3, False): (900, 1850),
    (128, 3, False): (1890, 1890),
    (64, 2, False): (650, 1560),
    (128, 2, False): (1360, 1360),
    (64, 1, False): (450, 1150),
    (128, 1, False): (985, 985),
}
"""Clocks per K block, by tile rows, terms and squares: with one thread block per SM, and two (H100, 2026-11-26)."""

_LAUNCH_CLOCKS, _WIDE_CLOCKS, _SUM_CLOCKS, _SUM_BYTES = 5000, 18000, 2100, 1400
"""Clocks per launch; extra for 128x128 tiles, whose stages fill slowly; clocks per reduction launch, and bytes that it
reads."""


def _clocks(product: Product, kernel: ThinKernel, parts: int, num_sms: int) -> float:
    """Predicted, from launch to end."""
    blocks = units(kernel, product, parts)
    step = _STEP_CLOCKS[kernel.block_m, kernel.terms, kernel.squares][blocks > num_sms]
    waves = ceil_div(blocks, num_sms * kernel.blocks_per_sm)
    begin = _LAUNCH_CLOCKS + (_WIDE_CLOCKS if kernel.block_n == 128 else 0)
    summed = _SUM_CLOCKS + parts * product.m * product.n * 8 / _SUM_BYTES if parts > 1 else 0
    return begin + waves * ceil_div(product.steps, parts) * step + summed


def prepare(
    product: Product,
    kernel: ThinKernel,
    parts: int,
    layout: Layout,
    device: int,
    *,
    names: tuple[str, ...],
    places: Mapping[str, Place],
    pdl: bool,
) -> _launcher.Launch:
    """A GEMM's launch except tensor addresses. Errors as for `cast.load`.

    Args:
        names: the tensors that the launch will be given.
        places: where in them a, b, out and squares are.
    """
    part_steps, longer = divmod(product.steps, parts)
    l2_bytes = 2 * K_BLOCK_BYTES if product.squares or product.terms == 1 else K_BLOCK_BYTES
    of_b = product.matrices * (1 if kernel.split_warps else kernel.terms)
    b_bytes = 4 if kernel.split_warps else 2
    maps = (
        _map("a", (product.k, product.m, product.matrices), layout.a_strides, 2, kernel.block_m, l2_bytes, places),
        _map("b", (product.k, product.n, of_b), layout.b_strides, b_bytes, kernel.block_n, K_BLOCK_BYTES, places),
    )
    return _launcher.prepare(
        cast.load(kernel, device),
        grid=units(kernel, product, parts),
        cluster=1,
        threads=kernel.threads,
        params=params.THIN.pack(
            **{name: getattr(product, name) for name in ("m", "n", "k", "matrix_steps")},
            part_steps=part_steps,
            longer_parts=longer,
            format=_FORMATS[layout.output],
            accumulate=layout.accumulate,
            out_stride=layout.out_stride,
            part_stride=layout.part_stride,
        ),
        names=names,
        pointers=params.THIN.pointers(places),
        maps=maps,
        fixed_maps=(),
        pdl=pdl,
    )


def _map(
    name: str,
    sizes: tuple[int, int, int],
    strides: tuple[int, int],
    element_bytes: int,
    box_rows: int,
    l2_bytes: int,
    places: Mapping[str, Place],
) -> tuple:
    """An operand's map, [matrices, rows, k]; out-of-bounds elements are zero-filled. If a dominates the reads, L2
    fetches two K blocks per row at once, which saves 6 % in prenorm_gemm (H100, 2026-11-26)."""
    k, rows, matrices = sizes
    layout = MapLayout(
        "uint8",
        (k * element_bytes, rows, matrices),
        tuple(stride * element_bytes for stride in strides),
        (K_BLOCK_BYTES, box_rows, 1),
        K_BLOCK_BYTES,
        l2_bytes,
    )
    return layout.entry(params.THIN.offsets[f"{name}_map"], *places[name])


def prepare_sum(
    product: Product,
    parts: int,
    layout: Layout,
    device: int,
    *,
    names: tuple[str, ...],
    places: Mapping[str, Place],
    num_sms: int,
) -> _launcher.Launch:
    """The launch that reduces K parts and squares into out and sqr_sum. Its kernel starts while the
    product ends. Errors as for `cast.load`."""
    lanes = min(_MOST_LANES, 1 << (parts - 1).bit_length())
    numbers = product.m * (product.n + product.squares)
    grid = min(ceil_div(numbers, SUM.threads // lanes), num_sms * SUM.blocks_per_sm * 2)
    told = {
        "m": product.m,
        "n": product.n,
        "parts": parts,
        "lanes": lanes,
        "format": _FORMATS[layout.output],
        "accumulate": layout.accumulate,
        "out_stride": layout.out_stride,
    }
    return cast.prepare_launch(SUM, grid, device, told, names, places, pdl=True)


def split_width(k: int) -> int:
    """Elements per terms row; rows start at multiples of 16 bytes."""
    return round_up(k, 8)


def prepare_split(
    terms: int,
    rows: int,
    k: int,
    matrices: int,
    strides: tuple[int, int],
    device: int,
    *,
    names: tuple[str, ...],
    places: Mapping[str, Place],
    num_sms: int,
    pdl: bool,
) -> _launcher.Launch:
    """The launch that splits FP32 b [matrices, rows, k] into out, [matrices, terms, rows, split_width(k)].
    Errors as for `cast.load`."""
    kernel, width = SPLIT[terms], split_width(k)
    grid = min(ceil_div(matrices * rows * width // 8, kernel.threads), num_sms * kernel.blocks_per_sm * 2)
    row, matrix = strides
    told = {"matrices": matrices, "rows": rows, "k": k, "out_stride": width, "row_stride": row, "matrix_stride": matrix}
    return cast.prepare_launch(kernel, grid, device, told, names, places, pdl=pdl)


def all_kernels() -> list[StreamingKernel]:
    """Every kernel that a product can need."""
    return [*KERNELS, SUM, *SPLIT.values()]
