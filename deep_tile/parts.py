"""Thin GEMM kernels (thin.cuh): choice, number of K parts, launches.

Knows integers and CUDA device ordinals, not tensors: no torch. Kernels are compiled and loaded like casts (cast.py).
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from deep_tile import _launcher, cast, params
from deep_tile.codegen import PartsKernel, SplitKernel, StreamingKernel, ThinKernel
from deep_tile.config import ceil_div, round_up
from deep_tile.kinds import K_BLOCK_BYTES
from deep_tile.params import MapLayout, Place
from deep_tile.select.hardware import H100_SXM, Hardware
from deep_tile.select.streaming import Prediction
from deep_tile.walls import product_flops

STEP = 64
"""K elements per K block."""

_kernel = partial(ThinKernel, splits=False, squares=False, blocks_per_sm=1)

KERNELS = (
    _kernel(64, 24, terms=3, stages=6, splits=True, squares=True, blocks_per_sm=2),
    _kernel(64, 16, terms=3, stages=8, splits=True, blocks_per_sm=2),
    _kernel(64, 32, terms=3, stages=5, blocks_per_sm=2),
    _kernel(128, 64, terms=3, stages=5),
    _kernel(256, 64, terms=3, stages=4),
    _kernel(64, 32, terms=2, stages=7, blocks_per_sm=2),
    _kernel(128, 64, terms=2, stages=7),
    _kernel(256, 64, terms=2, stages=4),
    _kernel(64, 64, terms=1, stages=6, blocks_per_sm=2),
    _kernel(128, 128, terms=1, stages=6),
)
"""Thin GEMM kernels. Each serves every size, with as many stages as shared memory holds."""

SUM = PartsKernel(threads=256, blocks_per_sm=4)

SPLIT = {terms: SplitKernel(terms, threads=256, blocks_per_sm=4) for terms in (2, 3)}

MOST_PARTS = 128
"""Most K parts that are chosen: about as many as a GPU has SMs."""

INVARIANT_PARTS = 4
"""K parts if results may not depend on m: fewer would leave a GPU idle for few rows, more would slow many rows."""

_MOST_LANES = 8
_FORMATS = {"bf16": 1, "fp16": 2, "fp32": 3}
"""Numbers of the output formats in the kernel's enum `Format`."""


class Product(NamedTuple):
    """The GEMM's sizes.

    Attributes:
        m, n, k: for each of `matrices`, whose results are summed.
        terms: BF16 terms that represent b.
        squares: whether a's row squares are summed too.
        fp32: whether b is given in FP32, not as terms.
    """

    m: int
    n: int
    k: int
    matrices: int
    terms: int
    squares: bool
    fp32: bool = False

    @property
    def matrix_steps(self) -> int:
        return ceil_div(self.k, STEP)

    @property
    def steps(self) -> int:
        return self.matrix_steps * self.matrices


class Room(NamedTuple):
    """SMs and room for thread blocks.

    Attributes:
        num_sms: SMs that they have.
        most: thread blocks on an SM at once; None: as many as fit.
    """

    num_sms: int
    most: int | None = None

    def blocks(self, kernel: StreamingKernel, waves: int = 1) -> int:
        """Thread blocks that there should be at most."""
        return self.num_sms * (self.most or kernel.blocks_per_sm * waves)


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


class Choice(NamedTuple):
    """The kernel that multiplies, and the number of parts of K."""

    kernel: ThinKernel
    parts: int


@lru_cache(maxsize=65_536)
def choose(product: Product, room: Room, parts: int | None = None, invariant: bool = False) -> Choice:
    """The kernel and K part count with the least predicted time; with `parts` given, the kernel for that count. An
    `invariant` result does not depend on the kernel."""
    choices = _choices(product, parts, invariant)
    return min(choices, key=lambda choice: sum(_clocks(product, *choice, room)))


def _choices(product: Product, parts: int | None = None, invariant: bool = False) -> Iterator[Choice]:
    counts = range(1, min(product.steps, MOST_PARTS) + 1) if parts is None else (parts,)
    known = [kernel for kernel in KERNELS if _suits(kernel, product, invariant)]
    return (Choice(kernel, count) for kernel in known for count in counts)


def _suits(kernel: ThinKernel, product: Product, invariant: bool) -> bool:
    """Kernels with terms side by side, or with one, compute the same bits."""
    if invariant and not kernel.side_by_side and kernel.terms > 1:
        return False
    return (kernel.terms, kernel.squares) == (product.terms, product.squares) and kernel.splits <= product.fp32


def units(kernel: ThinKernel, product: Product, parts: int) -> int:
    """The number of pieces of work, each a part of a tile, that thread blocks take in turn."""
    return ceil_div(product.m, kernel.block_m) * ceil_div(product.n, kernel.block_n) * parts


_KERNEL_CLOCKS = {
    (64, 24, 3): (1190, 776, 1300),
    (64, 16, 3): (0, 490, 699),
    (64, 32, 3): (990, 405, 936),
    (128, 64, 3): (3160, 1070, 1070),
    (256, 64, 3): (3910, 1701, 1701),
    (64, 32, 2): (780, 301, 704),
    (128, 64, 2): (2975, 735, 735),
    (256, 64, 2): (4730, 1096, 1096),
    (64, 64, 1): (990, 450, 1150),
    (128, 128, 1): (3160, 985, 985),
}
"""Clocks by tile and terms: to start, and per K block with one thread block per SM, and two. Fitted to 455 GEMMs on an
H100, 2026-11-26; the chosen kernels take 1.01 times the least on average."""

_LAUNCH_CLOCKS = 2805

_SUM_CLOCKS, _PART_CLOCKS, _SUM_BYTES = 3670, 31, 864
"""Clocks per reduction and per K part, and bytes written and read per clock."""

_SPLIT_CLOCKS, _SPLIT_BYTES = 4250, 2600
"""Clocks per launch that splits b, and bytes read and written per clock."""

_ROWS_AT_ONCE, _MORE_ROWS = 8448, 1.14
"""Rows of a that memory delivers at full speed when read side by side, and the slowdown beyond: 16,384 rows of 28,672
took 1,460 clocks per K block, 8,192 in two parts 1,280."""


def _clocks(product: Product, kernel: ThinKernel, parts: int, room: Room) -> tuple[float, float, float]:
    """Predicted clocks: for launch, splitting b and filling the ring; for K blocks; for adding parts."""
    blocks, most = units(kernel, product, parts), room.blocks(kernel)
    begin, *steps = _KERNEL_CLOCKS[kernel.block_m, kernel.block_n, kernel.terms]
    step = steps[room.most is None and blocks > room.num_sms]
    if kernel.squares and min(product.m, ceil_div(most, parts) * kernel.block_m) > _ROWS_AT_ONCE:
        step *= _MORE_ROWS
    if product.fp32 and not kernel.splits:
        split_bytes = product.matrices * product.n * product.k * (4 + 2 * product.terms)
        begin += _SPLIT_CLOCKS + split_bytes / _SPLIT_BYTES
    bytes_of_part = product.m * (product.n + product.squares) * 8
    summed = _SUM_CLOCKS + parts * (_PART_CLOCKS + bytes_of_part / _SUM_BYTES) if parts > 1 else 0
    return _LAUNCH_CLOCKS + begin, ceil_div(blocks, most) * ceil_div(product.steps, parts) * step, summed


_CLOCKS_PER_US = 1650
"""SM clock under these kernels: the prediction is then within 7 % of docs/thin.md's pre-norm products, 3 % on average,
and 19 % of its routers, 7 % on average (H100, 2026-11-26)."""

_BOUND = 0.75
"""The share of K blocks' time that their bytes take at HBM's rate where memory binds."""


def predict(product: Product, room: Room, bytes_moved: int, hardware: Hardware) -> Prediction:
    """Predicted time, from an H100's times. K blocks take at least their time at the tensor cores' rate under load."""
    flops = product_flops(product.m, product.n, product.k) * product.matrices * product.terms
    tflops, memory_us = hardware.tflops("bf16"), bytes_moved / H100_SXM.hbm_tbps / 1e6
    clock = hardware.clock_mhz / H100_SXM.clock_mhz

    def took(choice: Choice) -> tuple[float, float, float]:
        begin, loop, summed = (clocks / _CLOCKS_PER_US for clocks in _clocks(product, *choice, room))
        faster = hardware.hbm_tbps / H100_SXM.hbm_tbps if memory_us > _BOUND * loop else clock
        return begin / clock, max(loop / faster, flops / tflops / 1e6), summed / clock

    best = choose(product, room)
    ranked = sorted(_choices(product), key=lambda choice: (choice != best, sum(took(choice))))
    names = [f"{kernel.name} in {count} K parts" for kernel, count in ranked]
    times = [{"name": name, "time_us": sum(took(choice))} for name, choice in zip(names, ranked, strict=True)]
    parts = list(zip(("launch, split and fill", "K blocks", "adding K parts"), took(best), strict=True))
    why = f"{names[0]} has the shortest predicted time, an H100's (2026-11-26), scaled by bandwidth or clock."
    return Prediction(times, parts, bytes_moved, flops, tflops, why)


def prepare(
    product: Product,
    choice: Choice,
    layout: Layout,
    device: int,
    *,
    names: tuple[str, ...],
    places: Mapping[str, Place],
    room: Room,
    pdl: bool,
) -> _launcher.Launch:
    """A GEMM's launch except tensor addresses. Errors as for `cast.load`.

    Args:
        names: the tensors that the launch will be given.
        places: where in them a, b, out and squares are.
    """
    kernel, parts = choice
    count = units(kernel, product, parts)
    part_steps, longer = divmod(product.steps, parts)
    l2_bytes = 2 * K_BLOCK_BYTES if product.squares or product.terms == 1 else K_BLOCK_BYTES
    of_b = product.matrices * (1 if kernel.splits else kernel.terms)
    b_bytes = 4 if kernel.splits else 2
    maps = (
        _map("a", (product.k, product.m, product.matrices), layout.a_strides, 2, kernel.block_m, l2_bytes, places),
        _map("b", (product.k, product.n, of_b), layout.b_strides, b_bytes, kernel.block_n, K_BLOCK_BYTES, places),
    )
    told = {
        **{name: getattr(product, name) for name in ("m", "n", "k", "matrix_steps")},
        "part_steps": part_steps,
        "longer_parts": longer,
        "parts": parts,
        "units": count,
        "format": _FORMATS[layout.output],
        "accumulate": layout.accumulate,
        "out_stride": layout.out_stride,
        "part_stride": layout.part_stride,
    }
    grid = min(count, room.blocks(kernel))
    return cast.prepare_launch(kernel, grid, device, told, names, places, maps=maps, pdl=pdl)


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
    room: Room,
) -> _launcher.Launch:
    """The launch that reduces K parts and squares into out and sqr_sum. Its kernel starts while the
    product ends. Errors as for `cast.load`."""
    lanes = min(_MOST_LANES, 1 << (parts - 1).bit_length())
    numbers = product.m * (product.n + product.squares)
    grid = min(ceil_div(numbers, SUM.threads // lanes), room.blocks(SUM, waves=2))
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
    room: Room,
    pdl: bool,
) -> _launcher.Launch:
    """The launch that splits FP32 b [matrices, rows, k] into out, [matrices, terms, rows, split_width(k)].
    Errors as for `cast.load`."""
    kernel, width = SPLIT[terms], split_width(k)
    grid = min(ceil_div(matrices * rows * width // 8, kernel.threads), room.blocks(kernel, waves=2))
    row, matrix = strides
    told = {"matrices": matrices, "rows": rows, "k": k, "out_stride": width, "row_stride": row, "matrix_stride": matrix}
    return cast.prepare_launch(kernel, grid, device, told, names, places, pdl=pdl)


def all_kernels() -> list[StreamingKernel]:
    return [*KERNELS, SUM, *SPLIT.values()]
