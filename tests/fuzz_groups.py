"""Check any GEMM of row groups: values, rows of no group, memory around `out`, repeatability.

Each round draws a kind, groups (none, one row, few, many rows, bounds that lie), sizes, layouts and a kernel, and
multiplies twice beside element-wise kernels of another stream. Results are compared with products in FP32 on the GPU,
and the counts of wrong elements are read now and then. A round depends on the seed and its number alone.
"""

import argparse
from random import Random
from typing import Any, NamedTuple

import campaign
import torch
from helpers import ACCUMULATION, BF16_ROUNDING

from deep_tile import GemmConfig
from deep_tile.config import ceil_div, round_up
from deep_tile.kinds import KINDS
from deep_tile.reference import group_rows
from deep_tile.select.groups import grouped_configs
from deep_tile.tensors import SCALE_DTYPES
from deep_tile.tools.products import multiply_groups

GROUPS = (1, 2, 3, 8, 16, 31, 32, 33, 64, 130, 400)
MOST_ROWS, MOST_N, MOST_K, MOST_WEIGHTS = 3000, 520, 900, 1 << 25
_MARGIN = 4096
"""Elements of `out` before its first row and behind its last."""

_POISON = -1
_NAN_CODES = (0x7F, 0xFF)


class Draw(NamedTuple):
    """All that is needed to make one product again."""

    kind: str
    operands: str
    layout: str
    groups: int
    rows: int
    bounds: tuple[int, ...] | None
    alignment: int
    n: int
    k: int
    out_stride: int
    m_major: bool
    scale_step: int
    scale_dtype: str
    expected_rows: int | None
    config: str | None
    num_sms: int | None
    constant_weights: bool
    seed: int

    @property
    def total(self) -> int:
        """Rows of `a` and `out`."""
        return self.rows if self.layout == "offs" else self.rows * self.groups

    @property
    def is_widened(self) -> bool:
        """Whether the call converts its scales to float32."""
        return self.scale_dtype != "float32"


DRAWN_KINDS = (("fp8", "nt"), ("bf16", "nt"), ("bf16", "nn"), ("fp8_rows", "nt"), ("int8_rows", "nt"))
"""Kinds and layouts of their operands."""


def draw(random: Random, number: int, num_sms: int) -> Draw:
    kind, operands = random.choice((*DRAWN_KINDS[:1] * 4, *DRAWN_KINDS))
    layout = random.choice(("offs", "offs", "counts"))
    groups = random.choice(GROUPS)
    n = random.choice((8, 128, 136, 256, 384, random.randint(1, MOST_N), random.randint(1, MOST_N)))
    k = min(random.choice((16, 128, 256, 384, random.randint(1, MOST_K))), MOST_WEIGHTS // (groups * n))
    if operands == "nn" and groups > 1:
        k = round_up(k, 64)
    sizes = draw_sizes(random, groups)
    alignment = random.choice((1, 1, 1, 16, 64, 128, 1024)) if layout == "offs" else 1
    if layout == "offs":
        ends, end = [], 0
        for size in sizes:
            end = round_up(end, alignment) + size
            ends.append(end)
        bounds, rows = tuple(ends), max(1, min(end, 4 * MOST_ROWS) + random.choice((0, 0, 1, 200)))
    else:
        room = max(1, min(max(sizes), 2 * MOST_ROWS // groups) + random.choice((0, 1, 9)))
        bounds, rows = tuple(sizes) if random.random() < 0.9 else None, room
    if bounds is not None and random.random() < 0.15:
        lies = (-(2**31), -1, 0, rows, rows + 1, 2**31 - 1, random.randint(0, rows))
        bounds = tuple(random.choice(lies) if random.random() < 0.4 else bound for bound in bounds)
    out_stride = n + random.choice((0, 0, 0, 1, 8))
    if random.random() < 0.6:
        out_stride = round_up(out_stride, 8)
    configs = grouped_configs(layout, out_stride % 8 == 0 and n % 8 == 0, kind=kind, operands=operands)
    config = configs[number % len(configs)].name if random.random() < 0.7 else None
    sms = random.choice((None, None, 1, 2, 7, random.randint(1, num_sms)))
    return Draw(
        *(kind, operands, layout, groups, rows, bounds, alignment, n, max(k, 1), out_stride, random.random() < 0.5),
        scale_step=random.choice((1, 1, 1, 2, 3)),
        scale_dtype=draw_scale_dtype(random, kind),
        expected_rows=random.choice((None, 1, 20, 64, 130, 300, 5000)),
        config=config,
        num_sms=sms,
        constant_weights=sms is None and random.random() < 0.5,
        seed=random.randrange(2**31),
    )


def draw_scale_dtype(random: Random, kind: str) -> str:
    """float32 mostly, or another that calls take; of a product without scales always."""
    if KINDS[kind].scaling == "none" or random.random() < 0.75:
        return "float32"
    return random.choice([str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES if dtype != torch.float32])


def draw_sizes(random: Random, groups: int) -> list[int]:
    """Rows of each group: none, one, few, many."""
    mean = random.choice((0.3, 1, 5, 20, 64, 100, 130, 200, 400))
    mean = min(mean, MOST_ROWS / groups)
    how = random.choice(("even", "spread", "skewed", "edges"))
    if how == "even":
        return [max(1, round(mean))] * groups
    if how == "edges":
        edges = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192)
        return [random.choice(edges) if group < 64 else 0 for group in range(groups)]
    if how == "spread":
        return [round(random.uniform(0, 2 * mean)) for _ in range(groups)]
    return [
        min(MOST_ROWS, int(mean * random.expovariate(1) ** 3)) if random.random() < 0.7 else 0 for _ in range(groups)
    ]


class Pool:
    """Codes and scales, made once; products take slices of them.

    `a` and `b` are cut from different samples: a row of both would be a sum of squares, of which WGMMA cuts off the
    last bits all in one direction.
    """

    def __init__(self, device: str, seed: int):
        generator = torch.Generator(device).manual_seed(seed)
        size = MOST_WEIGHTS + (1 << 24)  # k may be rounded up to 64, and rows to 16
        codes = torch.randint(0, 256, (2, size), dtype=torch.uint8, generator=generator, device=device)
        for nan in _NAN_CODES:
            codes[codes == nan] = 0x40
        normal = torch.randn(2, size, dtype=torch.float32, generator=generator, device=device).bfloat16()
        of_fp8 = codes.view(torch.float8_e4m3fn)
        self._codes = {"fp8": of_fp8, "fp8_rows": of_fp8, "int8_rows": codes.view(torch.int8), "bf16": normal}
        self._scales = torch.exp2(torch.rand(1 << 22, generator=generator, device=device) * 4 - 2)

    def codes(self, random: Random, kind: str, operand: str, *shape: int) -> torch.Tensor:
        """Codes of `a` or `b`, with rows at multiples of 16 bytes."""
        *rows, k = shape
        stride, count = round_up(k, 16), 1
        for size in rows:
            count *= size
        codes = self._codes[kind]["ab".index(operand)]
        first = random.randrange(0, len(codes) - count * stride + 1, 16)
        return codes[first : first + count * stride].view(*rows, stride)[..., :k]

    def scales(self, random: Random, *shape: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        first = random.randrange(len(self._scales) - count + 1)
        return self._scales[first : first + count].view(shape)


class Product(NamedTuple):
    """The operands of a draw, with all rows in one matrix. Scales of rows count as one K block; without scales they are
    1.

    Attributes:
        given_scales: the scales of a and b as the call takes them, with the same values.
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    bounds: torch.Tensor | None
    given_scales: tuple[torch.Tensor, torch.Tensor]


def make(pool: Pool, drawn: Draw, device: str) -> Product:
    random, kind = Random(drawn.seed), KINDS[drawn.kind]
    blocks, b_rows = (ceil_div(drawn.k, 128), ceil_div(drawn.n, 128)) if kind.block_scales else (1, drawn.n)
    a = pool.codes(random, drawn.kind, "a", drawn.total, drawn.k)
    a_scale = _scale_of_rows(pool, random, drawn, blocks)
    stored = (drawn.n, drawn.k) if drawn.operands == "nt" else (drawn.k, drawn.n)
    b = pool.codes(random, drawn.kind, "b", drawn.groups, *stored)
    b = b if drawn.operands == "nt" else b.transpose(1, 2)
    b_scale = pool.scales(random, drawn.groups, b_rows, blocks * drawn.scale_step)[..., :: drawn.scale_step]
    if kind.scaling == "none":
        a_scale, b_scale = torch.ones_like(a_scale), torch.ones_like(b_scale)
    bounds = None if drawn.bounds is None else torch.tensor(drawn.bounds, dtype=torch.int32, device=device)
    given = tuple(narrowed(scale, drawn.scale_dtype) for scale in (a_scale, b_scale))
    return Product(a, given[0].float(), b, given[1].float(), bounds, given)


def _scale_of_rows(pool: Pool, random: Random, drawn: Draw, blocks: int) -> torch.Tensor:
    if drawn.m_major:
        return pool.scales(random, blocks, drawn.total * drawn.scale_step).t()[:: drawn.scale_step]
    return pool.scales(random, drawn.total, blocks * drawn.scale_step)[:, :: drawn.scale_step]


def narrowed(scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """A scale in another dtype, at the same strides."""
    if dtype == "float32":
        return scale
    return torch.empty_like(scale, dtype=getattr(torch, dtype)).copy_(scale)


def guarded(drawn: Draw, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and `out` within it."""
    size = drawn.total * drawn.out_stride + 2 * _MARGIN
    buffer = torch.full((size,), _POISON, dtype=torch.int16, device=device).view(torch.bfloat16)
    return buffer, buffer.as_strided((drawn.total, drawn.n), (drawn.out_stride, 1), _MARGIN)


def multiply(product: Product, drawn: Draw, out: torch.Tensor) -> None:
    options: dict[str, Any] = {name: getattr(drawn, name) for name in ("expected_rows", "num_sms", "constant_weights")}
    options["config"] = None if drawn.config is None else CONFIGS[drawn.config]
    a, into, bounds = product.a, out, {"offs": product.bounds, "alignment": drawn.alignment}
    a_scale, b_scale = product.given_scales
    if drawn.layout == "counts":
        a, a_scale, into = (x.unflatten(0, (drawn.groups, drawn.rows)) for x in (a, a_scale, out))
        bounds = {"counts": product.bounds}
    operands = (a, a_scale, product.b, b_scale)
    operands = operands[::2] if KINDS[drawn.kind].scaling == "none" else operands
    multiply_groups(KINDS[drawn.kind], operands, out=into, **bounds, **options)


CONFIGS: dict[str, GemmConfig] = {
    config.name: config
    for kind, operands in DRAWN_KINDS
    for layout in ("offs", "counts")
    for tma_store in (True, False)
    for config in grouped_configs(layout, tma_store, kind=kind, operands=operands)
}


def living_rows(drawn: Draw) -> list[tuple[int, int, int]]:
    """Group, first row and the one behind the last, of groups that have rows."""
    bounds = None if drawn.bounds is None else torch.tensor(drawn.bounds, dtype=torch.int64)
    ranges = group_rows(drawn.layout, bounds, drawn.groups, drawn.rows, drawn.alignment)
    first = drawn.rows if drawn.layout == "counts" else 0
    return [(g, g * first + start, g * first + stop) for g, (start, stop) in enumerate(ranges) if start < stop]


def check(product: Product, drawn: Draw, buffer: torch.Tensor, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """How many elements are wrong, and how many were written that belong to no group; on the device."""
    alive = torch.zeros(drawn.total, dtype=torch.bool)
    for _, first, last in living_rows(drawn):
        alive[first:last] = True
    mask = torch.zeros(len(buffer), dtype=torch.bool, device=out.device)
    mask.as_strided(out.shape, out.stride(), _MARGIN)[:] = alive.to(out.device)[:, None]
    stray = ((buffer.view(torch.int16) != _POISON) & ~mask).sum()
    return {"values": count_wrong(product, drawn, out), "stray": stray}


def count_wrong(product: Product, drawn: Draw, out: torch.Tensor) -> torch.Tensor:
    """Elements of groups' rows that are off; on the device."""
    wrong = torch.zeros((), dtype=torch.int64, device=out.device)
    accumulation = ACCUMULATION + (drawn.k * 2**-17 if drawn.kind == "fp8_rows" else 0)
    for groups in _batches(living_rows(drawn)):
        wrong += _wrong_of(product, groups, out, accumulation)
    return wrong


def _batches(ranges: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Groups of like sizes together, for one batched product each."""
    by_size: dict[int, list[tuple[int, int, int]]] = {}
    for group in ranges:
        by_size.setdefault((group[2] - group[1]).bit_length(), []).append(group)
    return list(by_size.values())


def _wrong_of(
    product: Product, groups: list[tuple[int, int, int]], out: torch.Tensor, accumulation: float
) -> torch.Tensor:
    device = out.device
    chosen, first, last = torch.tensor(groups, device=device).t()
    rows = first[:, None] + torch.arange(max(last - first for _, first, last in groups), device=device)
    present, rows = rows < last[:, None], torch.minimum(rows, last[:, None] - 1)
    k, n = product.a.shape[1], out.shape[1]
    columns, blocks = torch.arange(n, device=device), torch.arange(k, device=device) // 128
    columns = columns if product.b_scale.shape[1] == n else columns // 128
    blocks = blocks if product.b_scale.shape[2] > 1 else torch.zeros_like(blocks)
    a = product.a[rows].float() * product.a_scale[rows][..., blocks]
    b = product.b[chosen].float() * product.b_scale[chosen][:, columns][..., blocks]
    wanted, spread = a @ b.mT, (a.square() @ b.square().mT).sqrt()
    far = ~((out[rows].float() - wanted).abs() <= BF16_ROUNDING * wanted.abs() + accumulation * spread)
    return (far & present[..., None]).sum()


class Fuzzer(campaign.Fuzzer):
    UNDER_WAY = 8

    def __init__(self, arguments: argparse.Namespace, report: campaign.Report):
        super().__init__(arguments, report)
        self.products = self.narrow = 0
        self.configs: set[str] = set()

    def load(self) -> None:
        self.load_kernels(CONFIGS.values())
        self._pool = Pool(self.device, self.seed % 2**31)

    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        self.drawn = drawn = draw(random, number, self.num_sms)
        product = make(self._pool, drawn, self.device)
        buffer, out = guarded(drawn, self.device)
        again_buffer, again = guarded(drawn, self.device)
        self.noise()
        multiply(product, drawn, out)
        multiply(product, drawn, again)
        faults = check(product, drawn, buffer, out)
        faults["repeated"] = (buffer.view(torch.int16) != again_buffer.view(torch.int16)).sum()
        self.products += 2
        self.narrow += 2 * drawn.is_widened
        if drawn.config:
            self.configs.add(drawn.config)
        return faults

    def counts(self) -> dict[str, Any]:
        return {"products": self.products, "calls_that_copy": self.narrow, "configs": len(self.configs)}
