"""Draw the calls of a fuzzer: configs, sizes, layouts, values and options, from a `random.Random`.

Hypothesis draws through a Random of its own, which it shrinks (test_fuzz_draws.py, test_gemm_property_gpu.py);
fuzz_gpu.py, fuzz_kinds.py and stress.py take a seeded one. Everything drawn is plain data that reads well in a report.
Invariant: whatever is drawn is a call that `fp8_gemm` promises to take, or with a config of another kind that kind's
call.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from random import Random
from typing import Any, NamedTuple

from helpers import SCALE_STRIDES

from deep_tile.config import PAIRED_TILES, SCALE_BLOCK, SMEM_LIMIT_BYTES, GemmConfig, ceil_div, round_up
from deep_tile.kinds import GATE_COLUMNS, KINDS, LAYOUTS, Kind
from deep_tile.select.defaults import default_configs
from deep_tile.walls import stages_max

ALIGNMENT = 16
"""Bytes that operands, and an `out` stored by TMA, are aligned to, rows and all."""

SHARINGS = ("alone", "clusters", "split", "split clusters", "resident", "pairs")
"""How a config's thread blocks share work, or its K blocks are multiplied."""


CLUSTERS = ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
"""Blocks of a cluster along M and N."""


# Configs.


def sharing(config: GemmConfig) -> str:
    """The config's entry in SHARINGS."""
    ways = (
        ("split clusters", config.multicast and config.split_k > 1),
        ("clusters", config.multicast),
        ("split", config.split_k > 1),
        ("resident", config.resident_b),
        ("pairs", config.pairs),
    )
    return next((name for name, used in ways if used), "alone")


def main_loop(config: GemmConfig) -> str:
    """The main loop's variant: how `Consumer` of gemm.cuh multiplies a tile."""
    if config.pairs:
        return "pairs"
    if config.block_sets == 1:
        turns = "in turns" if config.takes_turns else "in turn"
        return f"{turns}, {config.chunks_m}x{config.chunks_n} chunks, {config.math_warpgroups} warpgroups"
    ways = ("carries_descriptors", "queues_blocks", "ends_apart")
    return ", ".join(["ahead", *(way for way in ways if getattr(config, way))])


def family(config: GemmConfig) -> str:
    """The config's family. Configs of one family run the same code but for sizes: main loop, sharing, and the way to
    store."""
    return f"{main_loop(config)}; {sharing(config)}; {'TMA' if config.tma_store else 'any'} store"


def legal_configs() -> Iterator[GemmConfig]:
    """The whole space but for numbers in between: 2, 3 or 4 stages or as many as fit, one output box or several."""
    tiles = product((64, 128, 256), range(16, 257, 16), (1, 2, 4), (True, False))
    ways = (
        *({"cluster_m": m, "cluster_n": n} for m, n in ((1, 1), *CLUSTERS)),
        *({"split_k": parts} for parts in (2, 4, 8)),
        *({"cluster_m": m, "cluster_n": n, "split_k": 2} for m, n in ((2, 1), (1, 2))),
        *({"b_stages": blocks} for blocks in range(1, 9)),
        {"pairs": True},
    )
    for (block_m, block_n, scale_blocks, tma_store), way in product(tiles, ways):
        fields = {"block_m": block_m, "block_n": block_n, "scale_blocks": scale_blocks, "tma_store": tma_store, **way}
        smallest = _legal(**fields, stages=2, store_buffers=1)
        if smallest is None or not _takes_any_k(smallest):
            continue
        for store_buffers in range(1, min(smallest.boxes, 10) + 1):
            for stages in sorted({2, 3, 4, _deepest(smallest, store_buffers)}):
                config = _legal(**fields, stages=stages, store_buffers=store_buffers)
                if config is not None:
                    yield config


def _deepest(config: GemmConfig, store_buffers: int) -> int:
    """Stages that fit beside so many output boxes."""
    more_bytes = (store_buffers - config.store_buffers) * config.store_bytes // config.store_buffers
    return stages_max(config.stage_bytes, config.fixed_bytes + more_bytes, SMEM_LIMIT_BYTES)


def draw_config(random: Random, **made: Any) -> GemmConfig:
    """Draw a config from the space of all legal ones.

    Args:
        made: fields that say what it makes: kind, output, grouping, accumulate, bias, activation, layout; and
            `tma_store`.
    """
    while True:
        config = _legal(**_draw_fields(random) | made)
        if config is None or not _takes_any_k(config):
            continue
        deepest = _deepest(config, config.store_buffers)
        stages = random.choice((2, 3, deepest, random.randint(2, deepest)))
        return _legal(**asdict(config) | {"stages": stages}) or config


def _draw_fields(random: Random) -> dict[str, Any]:
    way = random.choice(SHARINGS)
    splits = way in ("split", "split clusters")
    cluster_m, cluster_n = random.choice(CLUSTERS) if way.endswith("clusters") else (1, 1)
    tiles = PAIRED_TILES if way == "pairs" else range(16, 257, 16)
    return {
        "block_m": random.choice((64, 128, 256)) if way != "pairs" else 128,
        "block_n": random.choice(tiles),
        "stages": 2,
        "cluster_m": cluster_m,
        "cluster_n": cluster_n,
        "split_k": random.choice((2, 4, 8)) if splits else 1,
        "scale_blocks": random.choice((1, 1, 2, 4)),
        "store_buffers": random.choice((1, 2, 3, random.randint(1, 10))),
        "tma_store": random.random() < 0.6,
        "b_stages": random.randint(1, 8) if way == "resident" else 0,
        "pairs": way == "pairs",
        "transposed": random.random() > 0.8,
    }


def _legal(**fields: Any) -> GemmConfig | None:
    """The config, if it is legal."""
    try:
        return GemmConfig(**fields)
    except ValueError:
        return None


def _takes_any_k(config: GemmConfig) -> bool:
    smallest, largest = config.k_range
    return largest is None or smallest <= largest


_NAME = re.compile(
    r"(?:fp8_gemm_)?(?P<block_m>\d+)x(?P<block_n>\d+)x(?P<block_k>\d+)_s(?P<stages>\d+)"
    r"(?:_c(?P<cluster_m>\d+)x(?P<cluster_n>\d+))?(?:_k(?P<split_k>\d+))?(?:_r(?P<b_stages>\d+))?"
    r"(?P<pairs>_p)?(?:_b(?P<store_buffers>\d+))?(?P<any>_any)?"
)


def config_named(name: str) -> GemmConfig:
    """The config of a kernel name; "fp8_gemm_" and a cluster of one block may be left out.

    Raises:
        ValueError: no config has that name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of a kernel, such as fp8_gemm_128x256x128_s4_c2x1")
    parts = match.groupdict()
    pairs, any_store, block_k = (parts.pop(part) for part in ("pairs", "any", "block_k"))
    numbers = {part: int(number) for part, number in parts.items() if number is not None}
    scale_blocks = int(block_k) // SCALE_BLOCK
    return GemmConfig(**numbers, scale_blocks=scale_blocks, pairs=pairs is not None, tma_store=any_store is None)


def draw_configs(random: Random, count: int) -> list[GemmConfig]:
    """All default configs, and random ones up to `count`, in random order."""
    configs = dict.fromkeys((*default_configs(True), *default_configs(False)))
    while len(configs) < count:
        configs[draw_config(random)] = None
    return random.sample(list(configs), len(configs))


# Problems: sizes, where the inputs lie, and unusual values among them.


class Place(NamedTuple):
    """A matrix's place in memory, in elements: its strides, and its offset from a multiple of 256 bytes."""

    strides: tuple[int, int]
    offset: int = 0


class Places(NamedTuple):
    """The places of a call's inputs."""

    a: Place
    a_scale: Place
    b: Place
    b_scale: Place


class Special(NamedTuple):
    """A special value in an input.

    Attributes:
        name: the input, a field of `helpers.Operands`.
        row, column: where; None: in all rows, or columns.
        value: for an operand one that e4m3 has, or NaN.
    """

    name: str
    row: int | None
    column: int | None
    value: float


class Problem(NamedTuple):
    """A product without its kernel: sizes, inputs' places and the special values among them."""

    m: int
    n: int
    k: int
    places: Places
    specials: tuple[Special, ...] = ()


SCALE_VALUES = (
    *(0.0, -0.0, -1.0, math.nan, math.inf, -math.inf),
    *(1.4e-45, -1e-40, 1.1e-38, 1e-30, 1e30, 8e35, -1e38, 3.4e38),
)
"""Zero, negative, not finite, denormal, and near both ends of FP32."""

OPERAND_VALUES = (math.nan, 0.0, 448.0, -448.0, 2.0**-9)


class Limits(NamedTuple):
    """How large a problem may be: rows, columns (at least 16), k (at least 256) and, roughly, elements of `out`."""

    m: int = 700
    n: int = 700
    k: int = 2000
    out: int = 1 << 19


USUAL = Limits()

SMALL = Limits(m=24, n=150, k=300, out=1 << 12)
SMALL_KINDS = Limits(m=100, n=160, k=400, out=1 << 14)
NUM_SMS = 132
"""SMs that tests of fuzzers assume on a CPU."""

SPECIAL_LIMITS = Limits(m=300, n=400, k=1200, out=1 << 16)
"""Limits of problems with special values, whose expected result is computed for each K block."""


def draw_problem(
    random: Random,
    config: GemmConfig | None,
    limits: Limits,
    *,
    k: int | None = None,
    empty: bool = False,
    special: bool = False,
) -> Problem:
    """A problem that `config` can multiply, or any of `fp8_gemm` if it is None.

    Args:
        k: the problem's k, if given.
        empty: sizes may be 0.
        special: there are special values.
    """
    tile_m, tile_n = (config.block_m, config.block_n) if config else (64, 128)
    m = _draw_size(random, tile_m, limits.m)
    n = _draw_size(random, tile_n, min(limits.n, max(1, limits.out // m)))
    if config:
        step = column_step(config)
        n = min(round_up(n, step), limits.n // step * step)
    k = _draw_k(random, config, limits.k) if k is None else k
    if empty and random.random() < 0.1:
        m, n, k = random.choice(((0, n, k), (m, 0, k), (m, n, 0), (0, n, 0)))
    product = KINDS[config.kind if config else "fp8"]
    majors = LAYOUTS[config.layout if config else "nt"]
    k = max(k, 2) if majors != LAYOUTS["nt"] else k  # one element alone lies along k
    a_scale, b_scale = scale_shapes(product, m, n, k)
    places = Places(
        _draw_operand_place(random, m, k, product.a.bytes, majors.a),
        _draw_scale_place(random, *a_scale),
        _draw_operand_place(random, n, k, product.b.bytes, majors.b),
        _draw_scale_place(random, *b_scale),
    )
    shapes = {"a": (m, k), "a_scale": a_scale, "b": (n, k), "b_scale": b_scale}
    count = random.randint(1, 4) if special and min(m, n, k) > 0 else 0
    return Problem(m, n, k, places, tuple(_draw_special(random, shapes) for _ in range(count)))


def scale_shapes(kind: Kind, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the scales of `a` and `b`. A kind without scales ignores them."""
    if not kind.block_scales:
        return (m, 1), (n, 1)
    groups = ceil_div(k, SCALE_BLOCK)
    return (m, groups), (n if kind.scaling == "row_blocks" else ceil_div(n, SCALE_BLOCK), groups)


def column_step(config: GemmConfig) -> int:
    """n must be a multiple of this if TMA stores `out` or two columns make one."""
    paired = config.columns_per_output > 1
    stored = ALIGNMENT // config.out_bytes * config.columns_per_output if config.tma_store else 1
    return max(stored, 2 * GATE_COLUMNS if paired else 1)


def _draw_size(random: Random, tile: int, largest: int) -> int:
    """A size: small, any, or one more or less than a multiple of a tile, a scale block or a power of two."""
    step = random.choice((1, 1, tile, tile, 64, SCALE_BLOCK, 2 ** random.randint(0, 8)))
    most = random.choice((16 * step, largest))
    size = step * random.randint(1, max(1, most // step)) + (random.choice((-1, 0, 0, 1)) if step > 1 else 0)
    return max(1, min(size, largest))


def _draw_k(random: Random, config: GemmConfig | None, largest: int) -> int:
    ring = config.block_k * config.stages * config.split_k if config else 4 * SCALE_BLOCK
    k = _draw_size(random, random.choice((16, SCALE_BLOCK, ring)), largest)
    if config is None or config.takes_k(k):
        return k
    smallest, most = config.k_range
    k = random.randint(smallest, min(most, largest)) if most else k
    if config.takes_k(k):
        return k
    return k + SCALE_BLOCK if k + SCALE_BLOCK <= largest else k - SCALE_BLOCK  # another number of K blocks


def _draw_operand_place(random: Random, rows: int, k: int, element_bytes: int, major: str) -> Place:
    """A place with padded rows, every second row, or rows that begin inside of larger ones; columns for an MN-major
    operand."""
    if major != "k":
        strides, offset = _draw_operand_place(random, k, rows, element_bytes, "k")
        return Place(strides[::-1], offset)
    if rows == 1 and random.random() < 0.3:
        return Place((random.randint(1, 9), 1))  # as torch reports of single rows
    padding = random.choice((0, 0, 0, 16, 48, 256, ALIGNMENT * random.randint(0, 40)))
    row_bytes = (round_up(max(k, 1) * element_bytes, ALIGNMENT) + padding) * random.choice((1, 1, 1, 2))
    offset_bytes = random.choice((0, 0, ALIGNMENT * random.randint(0, 15)))
    return Place((row_bytes // element_bytes, 1), offset_bytes // element_bytes)


def _draw_scale_place(random: Random, rows: int, groups: int) -> Place:
    offset = random.choice((0, 0, random.randint(0, 7)))
    extra = random.randint(1, 9)
    ways = (
        *(layout(rows, groups) for layout in SCALE_STRIDES.values()),
        (groups + extra, 1),  # columns of something wider
        (1, rows + extra),
        (extra * groups, extra),  # every so many columns
        (extra, extra * rows + 5),
        (0, 1),  # one row for all
        (1, 0),
        (0, 0),
    )
    return Place(random.choice(ways), offset)


def _draw_special(random: Random, shapes: dict[str, tuple[int, int]]) -> Special:
    name = random.choice(("a_scale", "a_scale", "b_scale", "b_scale", "a", "b"))
    rows, columns = shapes[name]
    row = random.choice((0, rows - 1, random.randrange(rows), random.randrange(rows)))
    column = random.choice((0, columns - 1, random.randrange(columns)))
    value = random.choice(SCALE_VALUES if "scale" in name else OPERAND_VALUES)
    whole = random.random()
    return Special(name, None if whole < 0.1 else row, None if whole > 0.8 else column, value)


# Uses: with which kernel, where to and how a problem is multiplied.


class Use(NamedTuple):
    """How a problem is multiplied: `out`'s layout in elements, and keywords that `fp8_gemm` and others have."""

    out_stride: int
    out_offset: int
    config: GemmConfig | None = None
    num_sms: int | None = None
    batch_invariant: bool = False
    pdl: bool | None = None
    constant_weights: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if not name.startswith("out_")}


class Call(NamedTuple):
    problem: Problem
    use: Use

    def __str__(self) -> str:
        m, n, k, places, specials = self.problem
        config = self.use.config.name if self.use.config else None
        return f"{m}x{n}x{k} {self.use._replace(config=config)} {places} {list(specials)}"


def can_multiply(config: GemmConfig, problem: Problem) -> bool:
    """Whether `config` can multiply the problem, given enough SMs."""
    return config.takes_k(problem.k) and problem.n % column_step(config) == 0


def draw_use(random: Random, problem: Problem, config: GemmConfig | None, num_sms: int) -> Use:
    """Draw options for `config`, which can multiply the problem, or for the selector's choice, on `num_sms` SMs."""
    fewest = config.cluster if config else 1
    few = random.choice((None, fewest, random.randint(fewest, max(20, fewest)), random.randint(fewest, num_sms)))
    sms = None if few is None else min(few, num_sms)
    pdl = random.choice((None, None, True, False))
    may_prefetch = pdl or (pdl is None and sms is None)
    stride, offset = _draw_out(random, problem.n, config)
    return Use(
        stride,
        offset,
        config,
        sms,
        batch_invariant=random.random() < 0.3 and (config is None or config.split_k == 1),
        pdl=pdl,
        constant_weights=may_prefetch and random.random() < 0.5,
    )


def _draw_out(random: Random, n: int, config: GemmConfig | None) -> tuple[int, int]:
    """Row stride and offset."""
    n //= config.columns_per_output if config else 1
    step = ALIGNMENT // (config.out_bytes if config else 2)
    by_tma = config.tma_store if config else n % step == 0 and random.random() < 0.7
    if by_tma:
        return n + step * random.choice((0, 0, 1, random.randint(0, 40))), step * random.choice((0, 0, 1, 5))
    return n + random.choice((0, 0, 1, random.randint(0, 40))), random.choice((0, random.randint(0, 7)))


def draw_call(
    random: Random,
    *,
    num_sms: int,
    limits: Limits = USUAL,
    empty: bool = False,
    special: bool = False,
    configs: Sequence[GemmConfig] = (),
) -> Call:
    """Draw any call: with the selector's choice, a default config or any legal one.

    Args:
        configs: configs to choose from; by default all legal ones.
        empty, special: see `draw_problem`; with `special`, SPECIAL_LIMITS bound the sizes.
    """
    way = random.choice(("chosen", "default", "any"))
    if way == "default":
        config = random.choice(default_configs(random.random() < 0.6))
    elif way == "any":
        config = random.choice(configs) if configs else draw_config(random)
    else:
        config = None
    if special:
        limits = Limits(*map(min, limits, SPECIAL_LIMITS))
    problem = draw_problem(random, config, limits, empty=empty, special=special)
    if config is not None and not can_multiply(config, problem):
        config = None  # of an empty k
    return Call(problem, draw_use(random, problem, config, num_sms))
