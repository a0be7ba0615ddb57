"""The model of the kernel's synchronisation (protocol.py): all configs keep to it, and faults are found.

    python tests/test_protocol.py --sweep

proves two products of every legal config of a broad grid, in half an hour, and ends with status 1 if one is wrong.
"""

import argparse
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import NamedTuple

import changes
import pytest
from machine import (
    ALIASING,
    ARRIVALS,
    BEYOND,
    BYTES,
    DEADLOCK,
    ENDLESS,
    EXITED,
    OVERWRITTEN,
    TILES,
    UNINITIALIZED,
    UNWRITTEN,
    Arrive,
    Fault,
    Init,
    Issue,
    Join,
    Machine,
    Operation,
    Process,
    Sync,
    Wait,
)
from orders import explore, prove, walk
from protocol import CLUSTER_BARRIER, Block, Launch, together
from sanitize import CASES, GROUPS, Case

from deep_tile.config import LARGEST_CLUSTER, PAIRED_TILES, SMEM_LIMIT_BYTES, UNIT_ROWS, GemmConfig, round_up
from deep_tile.kinds import PACKED
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs
from deep_tile.walls import stages_max

MODEL = "tests/protocol.py", "tests/machine.py", "tests/orders.py"
CONFIGS = (
    "deep_tile/config.py",
    "deep_tile/kinds.py",
    "deep_tile/walls.py",
    "deep_tile/select/*.py",
    "tests/sanitize.py",
)

pytestmark = pytest.mark.about(*MODEL, *CONFIGS, "include/deep_tile/*")

HEADERS = Path(__file__).parent.parent / "include" / "deep_tile"


def launch(case: Case, **options: bool | int) -> Launch:
    return Launch(case.config, GemmProblem(case.m, case.n, case.k, case.num_sms), **options)


def of_rows(
    config: GemmConfig, sizes: Sequence[int], n: int, k: int, num_sms: int, launch: type[Launch] = Launch, **options
) -> Launch:
    """Groups of as many rows, one after the other, or with rows of their own."""
    room, ends = max(sizes) + 3, list(accumulate(sizes))
    ranges = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    if config.by_counts:
        ranges = [(group * room, group * room + size) for group, size in enumerate(sizes)]
    groups = Groups(config.grouping, len(sizes), 1)
    problem = GemmProblem(room if config.by_counts else ends[-1] + 5, n, k, num_sms, groups=groups)
    return launch(config, problem, ranges, **options)


def along_k(
    config: GemmConfig, lengths: Sequence[int], m: int, n: int, num_sms: int, launch: type[Launch] = Launch, **options
) -> Launch:
    """Groups along K of these lengths, which begin at whole K blocks."""
    begins = list(accumulate((round_up(length, 128) for length in lengths), initial=0))
    ranges = [(begin, begin + length) for begin, length in zip(begins, lengths, strict=False)]
    problem = GemmProblem(m, n, max(1, begins[-1]), num_sms, groups=Groups("k_offs", len(lengths), 1))
    return launch(config, problem, ranges, **options)


GRADIENTS = {"kind": "fp8_1x128", "output": "fp32", "grouping": "k_offs"}


def runs_k(config: GemmConfig) -> int:
    """K with one run of scales in each block's part."""
    return 128 * config.scales_at_once * config.split_k


def check(launch: Launch) -> int:
    """Steps of all clusters. Raises Fault."""
    launch.check_tiles()
    return sum(prove(launch.machine(cluster)) for cluster in range(launch.clusters))


# Nothing goes wrong.

FAMILIES = {
    "decode": Case(GemmConfig(64, 16, 2), 64, 32, 384, 1),
    "decode, three stages": Case(GemmConfig(64, 16, 3), 64, 32, 512, 1),
    "two scale blocks": Case(GemmConfig(64, 32, 2, scale_blocks=2), 64, 32, 700, 1),
    "four scale blocks": Case(GemmConfig(64, 32, 2, scale_blocks=4), 64, 64, 1100, 1),
    "any store": Case(GemmConfig(64, 16, 2, tma_store=False), 64, 32, 256, 1),
    "two math warpgroups": Case(GemmConfig(128, 64, 2), 128, 128, 384, 1),
    "turns": Case(GemmConfig(128, 144, 2, store_buffers=1), 128, 288, 256, 1),
    "queued blocks": Case(GemmConfig(128, 128, 2), 128, 256, 384, 1),
    "tiles that end apart": Case(GemmConfig(128, 128, 3), 128, 256, 512, 1),
    "two chunks": Case(GemmConfig(128, 256, 2), 128, 512, 384, 1),
    "two chunks of rows": Case(GemmConfig(256, 64, 2, store_buffers=1), 250, 128, 256, 1),
    "resident b": Case(GemmConfig(64, 16, 2, b_stages=2), 64, 64, 256, 1),
    "resident b, turns": Case(GemmConfig(128, 192, 2, b_stages=2), 256, 192, 256, 1),
    "pairs": Case(GemmConfig(128, 112, 2, pairs=True), 128, 224, 512, 1),
    "split K": Case(GemmConfig(64, 32, 2, split_k=2), 64, 32, 256, 2),
    "split K, a part without K": Case(GemmConfig(64, 32, 2, split_k=2), 64, 64, 128, 2),
    "multicast of b": Case(GemmConfig(64, 16, 2, 2, 1), 64, 16, 384, 2),
    "multicast of a": Case(GemmConfig(64, 16, 2, 1, 2), 64, 32, 384, 2),
    "blocks without scales": Case(GemmConfig(128, 64, 2, kind="fp8_rows_promoted"), 128, 128, 384, 1),
    "transposed": Case(GemmConfig(64, 16, 2, kind="bf16", transposed=True), 32, 64, 192, 1),
    "packed b": Case(GemmConfig(64, 64, 2, b_stages=2, kind="mxfp4"), 64, 112, 384, 1),
    "packed b, two scale blocks": Case(GemmConfig(64, 32, 2, scale_blocks=2, b_stages=2, kind="nvfp4"), 64, 48, 700, 1),
    "packed b, two warpgroups": Case(GemmConfig(128, 64, 2, b_stages=2, kind="mxfp4"), 128, 64, 256, 1),
    "packed b, units of some warps alone": Case(GemmConfig(64, 80, 2, b_stages=2, kind="mxfp4"), 64, 128, 384, 1),
    "packed b, units of some of eight warps": Case(
        GemmConfig(64, 96, 2, scale_blocks=2, b_stages=2, kind="nvfp4"), 64, 192, 700, 1
    ),
    "b from registers": Case(GemmConfig(32, 128, 2, kind="mxfp4"), 50, 112, 384, 1),
    "b from registers, two scale blocks": Case(GemmConfig(32, 112, 2, scale_blocks=2, kind="nvfp4"), 5, 224, 700, 1),
    "b from registers, K in two parts": Case(GemmConfig(32, 64, 2, scale_blocks=2, kind="int4"), 32, 112, 700, 1),
    "b from registers, K in two parts of two blocks": Case(
        GemmConfig(32, 48, 2, scale_blocks=4, kind="mxfp4"), 20, 96, 1100, 1
    ),
    "b from registers, 64 rows": Case(GemmConfig(64, 128, 2, kind="mxfp4"), 50, 112, 384, 1),
    "packed b, swapped operands": Case(GemmConfig(128, 128, 2, b_stages=2, kind="int4_32"), 250, 112, 256, 1),
    "packed b, swapped operands, two chunks of rows": Case(
        GemmConfig(256, 64, 2, b_stages=2, kind="int4_32", store_buffers=1), 250, 48, 256, 1
    ),
    "packed b, swapped operands, rows of one warpgroup": Case(
        GemmConfig(128, 64, 2, b_stages=2, kind="int4_32", tma_store=False), 50, 112, 256, 1
    ),
    "two chunks without scales": Case(GemmConfig(128, 256, 2, kind="fp8_rows_promoted"), 128, 512, 384, 1),
}
"""A GEMM for each kind of kernel, small enough for all of its states to be visited."""

GROUP_FAMILIES = {
    "groups of rows": of_rows(GemmConfig(64, 16, 2, grouping="offs"), (3, 0, 70), 16, 256, 1),
    "rows of their own": of_rows(GemmConfig(64, 16, 2, grouping="counts", tma_store=False), (70, 3), 16, 256, 1),
    "rows, two warpgroups": of_rows(GemmConfig(128, 64, 2, grouping="offs"), (5, 100), 64, 128, 1),
    "rows, packed b": of_rows(GemmConfig(64, 64, 2, b_stages=2, kind="mxfp4", grouping="offs"), (3, 0, 70), 64, 256, 1),
    "rows, b from registers": of_rows(GemmConfig(32, 96, 2, kind="mxfp4", grouping="offs"), (3, 0, 40), 96, 256, 1),
    "rows of their own, b from registers": of_rows(
        GemmConfig(32, 64, 2, scale_blocks=2, kind="int4", grouping="counts", tma_store=False),
        (0, 33, 0, 2),
        48,
        400,
        1,
    ),
    "rows, swapped operands": of_rows(
        GemmConfig(128, 64, 2, b_stages=2, kind="int4_32", grouping="offs"), (0, 3, 130), 48, 128, 1
    ),
    "rows, swapped operands, no tiles": of_rows(
        GemmConfig(128, 64, 2, b_stages=2, kind="int4_32", grouping="offs"), (0, 0), 64, 128, 1
    ),
    "rows, no tiles": of_rows(GemmConfig(64, 16, 2, grouping="offs"), (0, 0), 16, 256, 1),
    "along K": along_k(GemmConfig(64, 16, 2, **GRADIENTS), (128, 0, 300), 64, 16, 1),
    "along K, two warpgroups": along_k(GemmConfig(128, 64, 2, **GRADIENTS), (200, 0), 128, 64, 1),
    "along K, added": along_k(GemmConfig(64, 16, 2, **GRADIENTS, accumulate=True), (0, 128, 0, 300), 50, 16, 1),
    "along K, clusters, no K": along_k(GemmConfig(64, 16, 2, 2, 1, **GRADIENTS), (0,), 64, 16, 2),
}
"""The same with groups: odd numbers of tiles in clusters, empty groups, blocks without tiles."""

LARGEST = ("split K", "split K, a part without K", "multicast of b", "multicast of a")
"""Ten seconds each."""


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_every_state_of_small_products(case):
    for bulk_scales in (True, False) if case.config.bulk_scales else (False,):
        machine = launch(case, bulk_scales=bulk_scales).machine(0, together)
        assert prove(machine) < states(case, machine)


@pytest.mark.parametrize("launched", GROUP_FAMILIES.values(), ids=GROUP_FAMILIES)
def test_every_state_of_small_groups(launched):
    launched.check_tiles()
    machine = launched.machine(0, together)
    assert prove(machine) < explore(machine, limit=300_000)


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_every_state_where_scales_are_read_in_runs(case):
    """K is the least that runs need, with one tile where a cluster shares the work: more has too many states."""
    config = case.config
    b_stages = config.b_stages and round_up(config.b_stages, config.scales_at_once)
    config = replace(config, b_stages=b_stages)
    m, n = (config.block_m, config.block_n) if config.cluster > 1 else (case.m, case.n)
    machine = launch(Case(config, m, n, runs_k(config), case.num_sms), in_runs=True).machine(0, together)
    assert prove(machine) < states(case, machine)


def states(case: Case, machine: Machine) -> float:
    """The number of states, all visited. That of the LARGEST is counted if model or prover changed, else "very
    many"."""
    is_large = case in [FAMILIES[name] for name in LARGEST]
    return math.inf if is_large and not changes.may_have_changed(*MODEL) else explore(machine, limit=300_000)


def some(configs: Sequence[GemmConfig]) -> Sequence[GemmConfig]:
    """All items if anything changed that a proof depends on, else every third."""
    return configs if changes.may_have_changed(*MODEL, *CONFIGS) else configs[::3]


@pytest.mark.parametrize("warps", [4, 1], ids=["warpgroups", "warps"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config.name)
def test_every_order_of_the_sanitizers_products(case, warps):
    assert check(launch(case, warps=warps)) > 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config.name)
def test_orders_at_random_of_the_sanitizers_products(case):
    machine = launch(case, warps=1).machine(0)
    assert {walk(machine, seed) for seed in range(3)} == {prove(machine)}


def grouped_launches(config: GemmConfig, warps: int) -> Iterator[Launch]:
    """Few blocks with many tiles, then more blocks than tiles; odd numbers of tiles in clusters, empty groups, groups
    that end anywhere in a tile, little K and more than the stages hold."""
    block_m, block_n, much = config.block_m, config.block_n, config.block_k * (config.stages + 2) - 17
    n = (config.cluster_n + 1) * block_n - (UNIT_ROWS if config.is_packed else 3)
    for num_sms, k in ((2 * config.cluster, much), (50 * config.cluster, 5)):
        options = {"bulk_scales": k == much, "warps": warps}
        if config.by_k:
            m = (config.cluster_m + 1) * block_m - 5
            yield along_k(config, (k, 0, 128, 0, 300, 0), m, n, num_sms, **options)
        else:
            yield of_rows(config, (0, block_m + 1, 5, 0, 2 * block_m + block_m // 4 + 3, 0), n, k, num_sms, **options)


def launches(config: GemmConfig, warps: int) -> Iterator[Launch]:
    """A GEMM with a small and one with a large K: several tiles per block, of which the last overhang the matrix."""
    if config.is_grouped:
        yield from grouped_launches(config, warps)
        return
    m, n = (config.cluster_m + 1) * config.block_m - 5, (config.cluster_n + 1) * config.block_n - 3
    n, num_sms = n // UNIT_ROWS * UNIT_ROWS if config.is_packed else n, config.cluster
    little, much = 5, config.block_k * (config.stages + 2) - 17
    if config.split_k > 1:
        much = config.block_k * (config.split_k * (config.stages + 1) + 1) - 17
    if config.resident_b:
        little, much, n, num_sms = 129, 128 * config.b_stages, 3 * config.block_n - 3, 2
    if config.pairs:
        little, much = 256, 128 * round_up(config.stages + 2, 2) - 17
    for k in (little, much):
        problem = GemmProblem(m, n, k, num_sms)
        yield Launch(config, problem, bulk_scales=k == much, early_b=k == little, warps=warps)
    whole = round_up(much, runs_k(config))
    if config.product.scaling == "blocks" and (not config.resident_b or whole == much):
        yield Launch(config, GemmProblem(m, n, whole, num_sms), in_runs=True, warps=warps)


@pytest.mark.parametrize("tma_store", [True, False])
def test_every_order_of_every_default_config(tma_store):
    for config in some(default_configs(tma_store)):
        for launched in launches(config, warps=1 if tma_store else 4):
            assert check(launched) > 30, config.name


GRIDS = [
    (cluster_m, cluster_n, split_k)
    for cluster_m, cluster_n, split_k in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8))
    if cluster_m * cluster_n * split_k <= LARGEST_CLUSTER
]
"""Blocks of a cluster along M, N and K."""

CLUSTERS = [
    GemmConfig(*tile, *cluster, store_buffers=1)
    for cluster, tile in product(GRIDS, ((64, 64, 2), (128, 64, 3), (256, 128, 2)))
    if cluster[:2] != (1, 1)
]
"""Every cluster with multicast: one math warpgroup and two, one chunk and two."""


@pytest.mark.parametrize("config", CLUSTERS, ids=lambda config: config.name)
def test_every_order_of_clusters(config):
    """Also with tiles beyond the matrix along M, along N and along both, and with whole tiles alone."""
    for launched in launches(config, warps=1 if config.block_m == 128 else 4):
        assert check(launched) > 30
    m, n, k = config.block_m, config.block_n, config.block_k * config.split_k * (config.stages + 2)
    for rows, columns in product({1, config.cluster_m}, {1, config.cluster_n}):
        assert check(launch(Case(config, rows * m, columns * n, k, config.cluster))) > 30


@pytest.mark.parametrize("config", CLUSTERS[::5], ids=lambda config: config.name)
def test_orders_at_random_of_clusters(config):
    machine = next(launches(config, warps=1)).machine(0)
    assert {walk(machine, seed) for seed in range(3)} == {prove(machine)}


@pytest.mark.parametrize("kind", PACKED)
def test_every_order_of_packed_configs(kind):
    """Warps one by one, and warps that act alike as one."""
    every = (*default_configs(True, kind), *grouped_configs("offs", kind=kind), *grouped_configs("counts", kind=kind))
    for number, config in enumerate(some(every[::2])):
        for launched in launches(config, warps=1 if number % 2 else 4):
            assert check(launched) > 30, config.name


REGISTER_TILES = (
    *((32, 128, 1), (32, 128, 2), (32, 112, 2), (32, 96, 1), (32, 80, 2), (32, 64, 2), (32, 64, 4), (32, 48, 2)),
    *((32, 16, 4), (64, 128, 1), (64, 112, 2), (64, 64, 2), (64, 32, 4)),
)
"""Rows, columns and scale blocks of tiles whose packed `b` comes from registers."""


def register_configs(kind: str) -> Iterator[GemmConfig]:
    """Rings that wrap soon and late, with and without TMA stores, and split K."""
    for (block_m, block_n, scale_blocks), stages in product(REGISTER_TILES, (2, 4)):
        tile = {"block_m": block_m, "block_n": block_n, "stages": stages, "scale_blocks": scale_blocks, "kind": kind}
        yield GemmConfig(**tile, tma_store=stages == 2)
        yield GemmConfig(**tile, grouping="offs" if stages == 2 else "counts", tma_store=block_n % 32 == 0)
        yield from (GemmConfig(**tile, split_k=parts) for parts in (2, 4) if block_n % (16 * parts) == 0)


def register_launches(config: GemmConfig, warps: int) -> Iterator[Launch]:
    """One block with several tiles, of which some have up to 16 rows, and a block for each tile; K of one block, of
    which other parts of a split K have none, and more than the stages hold."""
    yield from launches(config, warps)
    much = 128 * config.scale_blocks * (config.split_k * config.stages + 1)
    for m, num_sms, k in ((1, 1, much), (16, 50, 5), (80, 1, 5), (49, 50, much)) if not config.is_grouped else ():
        case = Case(config, m, config.block_n + UNIT_ROWS, k, num_sms * config.cluster)
        yield launch(case, warps=warps)


@pytest.mark.parametrize("kind", PACKED)
def test_every_order_of_packed_weights_from_registers(kind):
    """Warps one by one, and warps that act alike as one."""
    for number, config in enumerate(some([*register_configs(kind)])):
        for launched in register_launches(config, warps=1 if number % 3 == 0 else 4):
            assert check(launched) > 30, config.name


@pytest.mark.parametrize("kind", PACKED)
def test_orders_at_random_of_packed_weights_from_registers(kind):
    for number, config in enumerate(some([*register_configs(kind)][::4])):
        machine = next(launches(config, warps=1 if number % 2 else 4)).machine(0)
        assert {walk(machine, seed) for seed in range(2)} == {prove(machine)}


SWAPPED_TILES = ((64, 64), (128, 64), (128, 128), (256, 64))
"""Rows and columns of tiles whose math warpgroups swap operands."""


def swapped_configs() -> Iterator[GemmConfig]:
    """Rings that wrap soon and late, with and without TMA stores, with groups and split K."""
    for (block_m, block_n), stages in product(SWAPPED_TILES, (2, 3)):
        tile = {"block_m": block_m, "block_n": block_n, "stages": stages, "b_stages": stages, "kind": "int4_32"}
        yield GemmConfig(**tile, store_buffers=1, tma_store=stages == 2)
        yield GemmConfig(**tile, store_buffers=1, grouping="offs" if stages == 2 else "counts")
        yield from (GemmConfig(**tile, store_buffers=1, split_k=parts) for parts in (2, 4))


@pytest.mark.parametrize("config", [*swapped_configs()], ids=lambda config: config.name)
def test_every_order_of_swapped_operands(config):
    """Warps one by one, and warps that act alike as one."""
    for warps in (1, 4):
        for launched in launches(config, warps):
            assert check(launched) > 30


@pytest.mark.parametrize("config", [*swapped_configs()][::3], ids=lambda config: config.name)
def test_orders_at_random_of_swapped_operands(config):
    machine = next(launches(config, warps=1)).machine(0)
    assert {walk(machine, seed) for seed in range(3)} == {prove(machine)}


@pytest.mark.parametrize("tma_store", [True, False])
@pytest.mark.parametrize(
    ("layout", "accumulate"), [("offs", False), ("counts", False), ("k_offs", False), ("k_offs", True)]
)
def test_every_order_of_every_grouped_config(layout, accumulate, tma_store):
    for config in some(grouped_configs(layout, tma_store, accumulate)):
        for launched in launches(config, warps=1 if tma_store else 4):
            assert check(launched) > 30, config.name


@pytest.mark.parametrize("layout", ["offs", "counts"])
def test_every_order_of_the_sanitizers_groups(layout):
    for tma_store in (True, False):
        for config in grouped_configs(layout, tma_store):
            assert check(of_rows(config, GROUPS, 264 if tma_store else 261, 400, 3)) > 50


def test_orders_at_random_of_groups():
    for config in some((*grouped_configs("offs"), *grouped_configs("k_offs"))):
        machine = next(launches(config, warps=1)).machine(0)
        assert {walk(machine, seed) for seed in range(2)} == {prove(machine)}


def test_tiles_of_all_blocks_cover_the_matrix_once():
    source = random.Random(25)
    for _ in range(80):
        config = source.choice(default_configs(True))
        m, n, num_sms = source.randint(1, 2000), source.randint(1, 2000), source.randint(config.cluster, 132)
        Launch(config, GemmProblem(m, n, source.choice((256, 512, 7168)), num_sms)).check_tiles()


def test_every_order_of_legal_configs():
    """Some legal configs; `--sweep` takes all."""
    source = random.Random(25)
    for config in some(source.sample(sorted(legal_configs(), key=lambda config: config.name), 100)):
        for launched in launches(config, warps=4):
            assert check(launched) > 30, config.name


@cache
def legal_configs() -> list[GemmConfig]:
    """All tiles with 2 to 6 stages and as many as fit, with every other choice. With multicast in more than two blocks,
    which takes long, two stages, one output box, and multiples of 64 columns."""
    options = [
        *({"scale_blocks": scale_blocks} for scale_blocks in (1, 2, 4)),
        *({"b_stages": b_stages} for b_stages in (2, 3, 4, 5, 6, 8)),
        {"pairs": True},
        {"grouping": "offs"},
        {"grouping": "offs", "scale_blocks": 2},
        GRADIENTS,
    ]
    grid = product((64, 128, 256), range(16, 257, 16), GRIDS, options, range(1, 11), (True, False))
    found = []
    for block_m, block_n, (*cluster, split_k), option, store_buffers, tma_store in grid:
        is_large = cluster != [1, 1] and math.prod(cluster) * split_k > 2
        if is_large and (store_buffers > 1 or block_n % 64):
            continue
        choices = {"split_k": split_k, "store_buffers": store_buffers, "tma_store": tma_store, **option}
        if option.get("pairs") and block_n not in PAIRED_TILES:
            continue
        try:
            smallest = GemmConfig(block_m, block_n, 2, *cluster, **choices)
        except ValueError:
            continue
        deepest = stages_max(smallest.stage_bytes, smallest.fixed_bytes, SMEM_LIMIT_BYTES)
        depths = {2} if is_large else {stages for stages in (2, 3, 4, 5, 6, min(24, deepest)) if stages <= deepest}
        found += [GemmConfig(block_m, block_n, stages, *cluster, **choices) for stages in depths]
    return found


# Faults.


def altered(config: GemmConfig, **changes: int | bool) -> GemmConfig:
    """A config with other fields or derived properties, legal or not."""
    names = {field.name for field in fields(GemmConfig)}
    own = {name: changes.get(name, getattr(config, name)) for name in names}
    derived = {name: property(lambda self, value=value: value) for name, value in changes.items() if name not in names}
    return type("Altered", (GemmConfig,), {"illegal_because": None, **derived})(**own)


Change = Callable[[Process], Process]


def in_program(role: str, change: Callable[[list[Operation]], list[Operation]]) -> Change:
    """Changes the programs of processes with this in their names."""
    return lambda process: process._replace(operations=change(process.operations)) if role in process.name else process


def is_at(operation: Operation, kind: type, barrier: str) -> bool:
    return isinstance(operation, kind) and operation.barrier[1] == barrier


def is_join(operation: Operation, group: str) -> bool:
    return isinstance(operation, Join) and operation.group == group


def without(unwanted: Callable[[Operation], bool]) -> Callable[[list[Operation]], list[Operation]]:
    return lambda operations: [operation for operation in operations if not unwanted(operation)]


def with_more(operation: Operation, more: dict[str, int]) -> Operation:
    return operation._replace(**{name: getattr(operation, name) + value for name, value in more.items()})


def once(kind: type, barrier: str, **more: int) -> Callable[[list[Operation]], list[Operation]]:
    """Change the first operation of this kind at the barrier."""

    def change(operations: list[Operation]) -> list[Operation]:
        place = next(i for i, operation in enumerate(operations) if is_at(operation, kind, barrier))
        return [*operations[:place], with_more(operations[place], more), *operations[place + 1 :]]

    return change


def always(kind: type, barrier: str, **more: int) -> Callable[[list[Operation]], list[Operation]]:
    """Every one."""
    return lambda operations: [with_more(o, more) if is_at(o, kind, barrier) else o for o in operations]


def without_drain(operations: list[Operation]) -> list[Operation]:
    """Leave out the last round of waits of a multicasting operands' warp."""
    stages = {operation.barrier for operation in operations if is_at(operation, Wait, "empty")}
    return operations[: -len(stages)]


def without_meetings(meetings: range) -> Callable[[list[Operation]], list[Operation]]:
    """Leave out those of these numbers, of all for exchanges of sums; two belong to 64 rows of a tile."""

    def change(operations: list[Operation]) -> list[Operation]:
        places = [place for place, operation in enumerate(operations) if is_at(operation, Sync, "exchange")]
        unwanted = set(places[meetings.start : meetings.stop : meetings.step])
        return [operation for place, operation in enumerate(operations) if place not in unwanted]

    return change


def multicasting(change: Callable[[list[Operation]], list[Operation]]) -> Callable[[list[Operation]], list[Operation]]:
    """Change what an operands' warp does when all barriers of its cluster exist."""

    def changed(operations: list[Operation]) -> list[Operation]:
        place = next(i for i, o in enumerate(operations) if isinstance(o, Wait) and o.barrier == CLUSTER_BARRIER)
        return [*operations[:place], *change(operations[place:])]

    return changed


def is_flight_to(operation: Operation, buffer: str, blocks: Sequence[int]) -> bool:
    """Whether something begins to be written there, in one of these blocks."""
    return isinstance(operation, Issue) and any(
        region.buffer[1] == buffer and region.buffer[0] in blocks for region in operation.writes
    )


def sent_to(buffer: str, right: int, wrong: int) -> Callable[[list[Operation]], list[Operation]]:
    """Sends what is meant for one block to another one."""

    def name(of_right: tuple) -> tuple:
        return (wrong, *of_right[1:])

    def change(operation: Operation) -> Operation:
        if not is_flight_to(operation, buffer, [right]):
            return operation
        writes = tuple(region._replace(buffer=name(region.buffer)) for region in operation.writes)
        return operation._replace(writes=writes, then=operation.then._replace(barrier=name(operation.then.barrier)))

    return lambda operations: [change(operation) for operation in operations]


def arriving_at(barrier: str, right: int, wrong: int) -> Callable[[list[Operation]], list[Operation]]:
    """Arrives in one block instead of another."""
    meant = (right, barrier)
    return lambda operations: [
        o._replace(barrier=(wrong, *o.barrier[1:])) if isinstance(o, Arrive) and o.barrier[:2] == meant else o
        for o in operations
    ]


def released_before(group: str, barrier: str) -> Callable[[list[Operation]], list[Operation]]:
    """Move each arrival at the barrier before the join that it must follow."""

    def change(operations: list[Operation]) -> list[Operation]:
        changed: list[Operation] = []
        for operation in operations:
            joins = [i for i, earlier in enumerate(changed) if is_join(earlier, group)]
            early = joins and is_at(operation, Arrive, barrier)
            changed.insert(joins[-1] if early else len(changed), operation)
        return changed

    return change


class WithoutOverhang(Launch):
    """A block skips tiles beyond the matrix, though peers await its part of the operand that they share."""

    def block(self, cluster: int, rank: int) -> Block:
        block = super().block(cluster, rank)
        block.tiles = [tile for tile in block.tiles if tile.m < self.m and tile.n < self.n]
        return block


class WithoutLoadsBeyond(Launch):
    """In a grid of blocks, nobody loads for tiles beyond the matrix, so that their blocks await nothing from peers."""

    def loaded_row(self, row: int, rows: int, tile_rows: int) -> int:
        return row


def with_math_warps_of(block: Block, other: Block) -> Block:
    """A block whose math warps walk the tiles of another."""
    of_other = {process.name: process for process in other.processes()}
    own = [of_other[process.name] if "math" in process.name else process for process in block.processes()]
    block.processes = lambda: own
    return block


class WithOtherBounds(Launch):
    """Somebody has written the bounds of groups after the producers have read them, and before the math warps do."""

    def block(self, cluster: int, rank: int) -> Block:
        (begin, end), *others = self.ranges
        written = Launch(self.config, self.problem, [(begin, end + self.config.block_m), *others])
        return with_math_warps_of(super().block(cluster, rank), written.block(cluster, rank))


class WithoutZeros(Launch):
    """Producers have no K block for a group without K, and math warps multiply one, of zeros."""

    def block(self, cluster: int, rank: int) -> Block:
        block = super().block(cluster, rank)
        block.tiles = [tile for tile in block.tiles if self.has_k(tile)]
        return with_math_warps_of(block, super().block(cluster, rank))


class WithoutLastTile(Launch):
    """A grid that is too small for all tiles."""

    def block(self, cluster: int, rank: int) -> Block:
        block = super().block(cluster, rank)
        block.tiles = block.tiles[:-1]
        return block


class Seeded(NamedTuple):
    kind: str
    launch: Launch
    change: Change = lambda process: process


DECODE = Case(GemmConfig(64, 16, 2), 64, 16, 384, 1)
TWO_TILES = Case(GemmConfig(64, 16, 2), 64, 32, 128, 1)
PAIR = Case(GemmConfig(128, 64, 2), 128, 128, 384, 1)
MULTICAST = Case(GemmConfig(64, 16, 2, 2, 1), 128, 16, 384, 2)
ROWS = GemmConfig(64, 16, 2, grouping="offs")
GRID = Case(GemmConfig(64, 16, 2, 2, 2), 128, 32, 512, 4)
SPLIT_PAIRS = Case(GemmConfig(64, 32, 2, 2, 1, 2), 128, 64, 512, 4)
SPLIT = Case(GemmConfig(64, 32, 2, split_k=2), 64, 64, 256, 2)
SPLIT_CHUNKS = Case(GemmConfig(256, 32, 2, split_k=2), 256, 32, 256, 2)
UNITS = Case(GemmConfig(64, 64, 2, b_stages=2, kind="mxfp4"), 64, 64, 1024, 1)
SWAPPED = Case(GemmConfig(128, 128, 2, b_stages=2, kind="int4_32"), 128, 256, 256, 1)  # eight meetings
SWAPPED_ROWS = SWAPPED._replace(config=GemmConfig(128, 64, 2, b_stages=2, kind="int4_32"), n=64)
REGISTERS = Case(GemmConfig(32, 128, 2, kind="mxfp4"), 32, 384, 384, 1)
REGISTER_BLOCKS = REGISTERS._replace(config=GemmConfig(32, 128, 2, scale_blocks=2, kind="mxfp4"), k=1024)

FAULTS = {
    "an arrival too few": Seeded(DEADLOCK, launch(PAIR), in_program("math 1", once(Arrive, "empty", arrivals=-1))),
    "an arrival too many": Seeded(ARRIVALS, launch(PAIR), in_program("math 1", once(Arrive, "empty", arrivals=1))),
    "a barrier made for an arrival too many": Seeded(
        DEADLOCK, launch(DECODE), in_program("operands", once(Init, "full", arrivals=1))
    ),
    "producers that begin with phase 0": Seeded(
        ALIASING, launch(DECODE), in_program("operands", always(Wait, "empty", phase=1))
    ),
    "consumers that begin with phase 1": Seeded(
        UNWRITTEN, launch(DECODE), in_program("math", always(Wait, "full", phase=-1))
    ),
    "bytes announced that nobody sends": Seeded(
        BYTES, launch(DECODE), in_program("operands", once(Arrive, "full", expected_bytes=16))
    ),
    "bytes sent that nobody announced": Seeded(
        BYTES, launch(DECODE), in_program("operands", once(Arrive, "full", expected_bytes=-16))
    ),
    "a producer of scales that does not await empty stages": Seeded(
        OVERWRITTEN, launch(DECODE), in_program("scales", without(lambda o: is_at(o, Wait, "empty")))
    ),
    "a stage released before its WGMMAs are over": Seeded(
        OVERWRITTEN, launch(DECODE), in_program("math", released_before("WGMMA", "empty"))
    ),
    "a stage released before its scales have been read": Seeded(
        OVERWRITTEN,
        launch(DECODE),
        in_program("math", without(lambda o: is_join(o, "scale read"))),
    ),
    "sums released before they have been read": Seeded(
        OVERWRITTEN, launch(SPLIT), in_program("math", released_before("sum read", "partial empty"))
    ),
    "a second chunk sent before the first one's sums have been read": Seeded(
        OVERWRITTEN, launch(SPLIT_CHUNKS), in_program("math", without(lambda o: is_at(o, Wait, "partial empty")))
    ),
    "sums released after the last tile": Seeded(
        EXITED,
        launch(SPLIT._replace(n=32)),
        in_program("block 0 math", lambda operations: [*operations, Arrive((1, "partial empty", 0), 4)]),
    ),
    "a multicast producer that does not drain": Seeded(
        EXITED, launch(MULTICAST), in_program("block 0 operands", without_drain)
    ),
    "an odd tile count in clusters, nobody for the overhang": Seeded(
        BYTES, WithoutOverhang(MULTICAST.config, GemmProblem(192, 16, 384, 2))
    ),
    "a grid of blocks, nobody loads for tiles beyond the matrix": Seeded(
        ARRIVALS, WithoutLoadsBeyond(GRID.config, GemmProblem(64, 16, 1024, 4))
    ),
    "a peer's arrival left out": Seeded(
        BYTES,
        launch(GRID),
        in_program("block 3 math", without(lambda o: is_at(o, Arrive, "empty") and o.barrier[0] == 1)),
    ),
    "b sent to the blocks of a row": Seeded(
        OVERWRITTEN, launch(GRID), in_program("block 0 operands", multicasting(sent_to("b", 1, 2)))
    ),
    "a part of a that nobody loads": Seeded(
        BYTES,
        launch(GRID),
        in_program("block 3 operands", multicasting(without(lambda o: is_flight_to(o, "a", range(4))))),
    ),
    "sums sent to another tile's block": Seeded(
        OVERWRITTEN, launch(SPLIT_PAIRS), in_program("block 0 math", sent_to("partial", 2, 1))
    ),
    "sums released to another tile's block": Seeded(
        ALIASING, launch(SPLIT_PAIRS), in_program("block 0 math", arriving_at("partial empty", 2, 1))
    ),
    "a producer that does not await its peer's barriers": Seeded(
        UNINITIALIZED,
        launch(MULTICAST),
        in_program("operands", without(lambda o: isinstance(o, Wait) and o.barrier == CLUSTER_BARRIER)),
    ),
    "a producer that does not await the other barriers": Seeded(
        UNINITIALIZED, launch(DECODE), in_program("operands", without(lambda o: is_at(o, Sync, "others")))
    ),
    "a store buffer written before its store warp's store has read it": Seeded(
        OVERWRITTEN, launch(PAIR), in_program("stores", without(lambda o: isinstance(o, Join)))
    ),
    "a store buffer written before the own store has read it": Seeded(
        OVERWRITTEN,
        launch(TWO_TILES),
        in_program("math", without(lambda o: is_join(o, "store"))),
    ),
    "an exit before the last store has read its buffer": Seeded(
        EXITED, launch(DECODE), in_program("math", lambda operations: operations[:-1])
    ),
    "a box that TMA reads without a fence": Seeded(
        UNWRITTEN, launch(PAIR), in_program("math", without(lambda o: is_join(o, "box write")))
    ),
    "two stages for tiles that end apart": Seeded(
        DEADLOCK, launch(Case(altered(GemmConfig(128, 128, 2), ends_apart=True), 128, 128, 384, 1))
    ),
    "more scale warps than stages": Seeded(
        ALIASING, launch(DECODE._replace(config=altered(DECODE.config, scale_warps=3), k=768))
    ),
    "one stage": Seeded(DEADLOCK, launch(DECODE._replace(config=altered(DECODE.config, stages=1)))),
    "a resident b of one K block": Seeded(DEADLOCK, launch(Case(GemmConfig(64, 16, 2, b_stages=2), 64, 32, 128, 1))),
    "a column of b requested before the last one has been read": Seeded(
        ARRIVALS,
        launch(Case(GemmConfig(64, 16, 4, b_stages=2), 64, 32, 256, 1)),
        in_program("operands", without(lambda o: is_at(o, Wait, "column empty"))),
    ),
    "units given back before they have been read": Seeded(
        OVERWRITTEN,
        launch(UNITS),
        in_program("converter", without(lambda o: is_join(o, "unit read"))),
    ),
    "a converted slot published before it is written": Seeded(
        UNWRITTEN,
        launch(UNITS),
        in_program("converter", without(lambda o: is_join(o, "slot write"))),
    ),
    "a slot converted before its WGMMAs are over": Seeded(
        OVERWRITTEN, launch(UNITS), in_program("converter", without(lambda o: is_at(o, Wait, "slot empty")))
    ),
    "a slot given back before its WGMMAs are over": Seeded(
        OVERWRITTEN, launch(UNITS), in_program("math", released_before("WGMMA", "slot empty"))
    ),
    "one slot": Seeded(DEADLOCK, launch(UNITS._replace(config=altered(UNITS.config, b_stages=1, b_slots=1)))),
    "units announced beyond the matrix": Seeded(
        BYTES, launch(UNITS), in_program("units", once(Arrive, "units full", expected_bytes=1088))
    ),
    "scales of groups written when their slot is published": Seeded(
        UNWRITTEN, launch(SWAPPED), in_program("converter", without(lambda o: is_join(o, "group scale write")))
    ),
    "a slot given back before its groups' scales have been read": Seeded(
        OVERWRITTEN, launch(SWAPPED._replace(k=1024)), in_program("math", released_before("scale read", "slot empty"))
    ),
    "a slot published by one lane of each warp, where all do": Seeded(
        DEADLOCK, launch(SWAPPED), in_program("converter", always(Arrive, "slot full", arrivals=4 - 4 * 32))
    ),
    "a slot given back by one lane of each warp, where all do": Seeded(
        DEADLOCK, launch(SWAPPED), in_program("math", always(Arrive, "slot empty", arrivals=4 - 4 * 32))
    ),
    "a slot given back by all lanes, where one of each warp does": Seeded(
        ARRIVALS, launch(SWAPPED), in_program("math 0", always(Init, "slot empty", arrivals=8 - 8 * 32))
    ),
    "exchanged sums overwritten before they have been read": Seeded(
        OVERWRITTEN, launch(SWAPPED), in_program("math", without_meetings(range(0, 8, 2)))
    ),
    "exchanged sums overwritten by other warps of their warpgroup": Seeded(
        OVERWRITTEN, launch(SWAPPED_ROWS, warps=1), in_program("math", without_meetings(range(2, 3)))
    ),
    "exchanged sums overwritten by those of the next tile": Seeded(
        OVERWRITTEN, launch(SWAPPED), in_program("math", without_meetings(range(4, 5)))
    ),
    "exchanged sums read before they are written": Seeded(
        UNWRITTEN, launch(SWAPPED), in_program("math", without_meetings(range(1, 8, 2)))
    ),
    "exchanged sums of a warpgroup read before all of its warps have written": Seeded(
        UNWRITTEN, launch(SWAPPED_ROWS, warps=1), in_program("math", without_meetings(range(1, 4, 2)))
    ),
    "units given back before they have been read to be multiplied": Seeded(
        OVERWRITTEN,
        launch(REGISTERS),
        in_program("converter", without(lambda o: is_join(o, "unit read"))),
    ),
    "units given back before their last K block is read": Seeded(
        OVERWRITTEN, launch(REGISTER_BLOCKS), in_program("converter", released_before("WGMMA", "units empty"))
    ),
    "units read a stage too early": Seeded(
        UNWRITTEN, launch(REGISTERS), in_program("converter", without(lambda o: is_at(o, Wait, "units full")))
    ),
    "units and their tile announced before the stage is given back": Seeded(
        ARRIVALS, launch(REGISTERS), in_program("units", without(lambda o: is_at(o, Wait, "units empty")))
    ),
    "a last tile that converters are not told of": Seeded(
        DEADLOCK, launch(REGISTERS), in_program("units", lambda operations: operations[:-1])
    ),
    "rows of a multiplied before they are there": Seeded(
        UNWRITTEN, launch(REGISTERS), in_program("converter", without(lambda o: is_at(o, Wait, "full")))
    ),
    "a stage released before the WGMMAs of converters are over": Seeded(
        OVERWRITTEN, launch(REGISTERS), in_program("converter", released_before("WGMMA", "empty"))
    ),
    "a stage released before converters have read its scales": Seeded(
        OVERWRITTEN,
        launch(REGISTERS),
        in_program("converter", without(lambda o: is_join(o, "scale read"))),
    ),
    "a tile's sums published before they are written": Seeded(
        UNWRITTEN,
        launch(REGISTERS),
        in_program("converter", without(lambda o: is_join(o, "tile sum write"))),
    ),
    "a tile's sums overwritten before they have been read": Seeded(
        OVERWRITTEN, launch(REGISTERS), in_program("converter", without(lambda o: is_at(o, Wait, "slot empty")))
    ),
    "a tile's sums given back before they have been read": Seeded(
        OVERWRITTEN, launch(REGISTERS), in_program("math", released_before("tile sum read", "slot empty"))
    ),
    "math warps that release the stages that converters read": Seeded(
        DEADLOCK, launch(REGISTERS), in_program("math", always(Init, "empty", arrivals=4 * 32))
    ),
    "a producer warp that gives converters no registers": Seeded(
        DEADLOCK, launch(REGISTERS), in_program("idle", lambda operations: operations[1:])
    ),
    "an odd tile count of a group in clusters, nobody for the overhang": Seeded(
        BYTES, along_k(GemmConfig(64, 16, 2, 2, 1, **GRADIENTS), (384,), 150, 16, 2, launch=WithoutOverhang)
    ),
    "bounds of groups written while a product runs": Seeded(
        DEADLOCK, of_rows(ROWS, (64,), 16, 256, 1, launch=WithOtherBounds)
    ),
    "bytes announced of rows beyond a group": Seeded(
        BYTES,
        of_rows(ROWS, (20,), 16, 384, 1),
        in_program("operands", once(Arrive, "full", expected_bytes=2048)),
    ),
    "a group without K for which nobody loads": Seeded(
        DEADLOCK, along_k(GemmConfig(64, 16, 2, **GRADIENTS), (128, 0), 64, 16, 1, launch=WithoutZeros)
    ),
}


@pytest.mark.parametrize("seeded", FAULTS.values(), ids=[f"{name}: {seeded.kind}" for name, seeded in FAULTS.items()])
def test_seeded_faults_are_found(seeded):
    """The proof finds them, and so does an order of steps."""
    with pytest.raises(Fault) as proof:
        prove(seeded.launch.machine(0, seeded.change))
    assert proof.value.kind == seeded.kind
    with pytest.raises(Fault) as shown:
        for seed in range(100):
            walk(seeded.launch.machine(0, seeded.change), seed)
    assert shown.value.steps


def test_a_box_beyond_its_stage_is_found():
    launched = launch(DECODE._replace(n=10))
    launched.b_tail_rows = 24
    with pytest.raises(Fault, match="uses rows 0 to 24 of the 16 of b") as overrun:
        launched.machine(0)
    assert overrun.value.kind == BEYOND


def test_pairs_of_an_odd_number_of_k_blocks_never_end():
    config = GemmConfig(128, 112, 3, pairs=True)
    assert not config.takes_k(384)
    with pytest.raises(Fault, match="math 0") as endless:
        launch(Case(config, 128, 112, 384, 1)).machine(0)
    assert endless.value.kind == ENDLESS


@pytest.mark.parametrize("case", [TWO_TILES, SPLIT._replace(num_sms=4), CASES[-6]], ids=lambda case: case.config.name)
def test_a_tile_left_out_is_found(case):
    launch(case).check_tiles()
    with pytest.raises(Fault, match="is stored 0 times") as left_out:
        WithoutLastTile(case.config, GemmProblem(case.m, case.n, case.k, case.num_sms)).check_tiles()
    assert left_out.value.kind == TILES


def test_a_deadlock_says_who_waits_for_what():
    seeded = FAULTS["an arrival too few"]
    with pytest.raises(Fault) as deadlock:
        prove(seeded.launch.machine(0, seeded.change))
    assert "block 0 operands awaits empty[0] in block 0, phase 0: 255 of 256 arrivals" in str(deadlock.value)
    assert "block 0 math 0 awaits full[0] in block 0, phase 1: 0 of 33 arrivals" in str(deadlock.value)


# The proof itself: it is never milder than a visit to every state.

SMALLEST = (
    "decode",
    "four scale blocks",
    "any store",
    "two math warpgroups",
    "turns",
    "two chunks",
    "resident b",
    "pairs",
)


def distorted(operations: list[Operation], source: random.Random) -> list[Operation]:
    """A program with one operation left out, done twice, or swapped with the next one."""
    place = source.randrange(len(operations) - 1)
    before, (one, other), after = operations[:place], operations[place : place + 2], operations[place + 2 :]
    middle = source.choice(([other], [one, one, other], [other, one]))
    return [*before, *middle, *after]


def fault_of(run: Callable[[], int]) -> str | None:
    try:
        run()
    except Fault as fault:
        return fault.kind
    return None


@pytest.mark.parametrize("family", SMALLEST)
def test_the_proof_refuses_whatever_goes_wrong_in_some_order(family):
    launched = launch(FAMILIES[family])
    roles = [process.name for process in launched.block(0, 0).processes() if len(process.operations) > 1]
    found = []
    for seed in range(25):
        source = random.Random(seed)
        change = in_program(source.choice(roles), lambda operations, source=source: distorted(operations, source))
        machine = launched.machine(0, lambda process, change=change: together(change(process)))
        proven, shown = fault_of(lambda m=machine: prove(m)), fault_of(lambda m=machine: explore(m, limit=50_000))
        assert proven or not shown, f"seed {seed}: {shown}"
        found.append(shown)
    assert any(found) and not all(found)


# The model against the kernel's headers.

SYNCHRONIZING_CALLS = {
    "bar_arrive": 6,
    "bar_sync": 10,
    "barrier_cluster_arrive_relaxed": 2,
    "barrier_cluster_wait": 1,
    "cp_async": 2,
    "cp_async_bulk_commit_group": 2,
    "cp_async_bulk_load": 3,
    "cp_async_bulk_tensor_load": 2,
    "cp_async_bulk_tensor_load_multicast": 1,
    "cp_async_bulk_tensor_store": 1,
    "cp_async_bulk_wait_group_read": 2,
    "cp_async_mbarrier_arrive_noinc": 2,
    "fence_proxy_async": 4,
    "mbarrier_arrive": 10,
    "mbarrier_arrive_cluster": 2,
    "mbarrier_arrive_expect_tx": 4,
    "mbarrier_init": 8,
    "setmaxnreg_dec": 1,
    "setmaxnreg_inc": 2,
    "st_async": 1,
    "wait": 20,
    "wgmma_commit_group": 4,
    "wgmma_wait_group": 5,
}
"""Places in the kernel's headers that call what the model has as an operation.

The model is of FP8 products with scales of blocks, with groups and without. The first tensor load is that of a group's
rows; the second, with multicast and without, is for operands along k and along their rows. The second bulk load is that
of a scale for each column: the same arrival announces all of them. The other WGMMAs are those of accumulate.cuh, which
gives a stage back when all but the latest group have ended, as the model's loops do.
"""


def test_the_kernel_synchronizes_where_the_model_does():
    """A failure means that the kernel's synchronisation has changed: adapt tests/protocol.py, then these counts."""
    streaming = {"formats", "quantize", "sort"}
    others = streaming | {"memory", "ptx", "pipeline", "watch"}  # the operations themselves, the debug build
    others |= {"keys", "logits", "terms", "thin"}  # main loops with models of their own, and one without
    text = "".join(path.read_text() for path in sorted(HEADERS.glob("*.cuh")) if path.stem not in others)
    calls = re.findall(r"\b(\w+)(?:<[^;()]*>)?\(", re.sub(r"//.*", "", text))
    assert {name: calls.count(name) for name in SYNCHRONIZING_CALLS} == SYNCHRONIZING_CALLS
    barriers = re.findall(r"mbarrier_init\([^;]*?\),\s+([^;]+)\);", text)
    scales = "(config.has_scales() ? warp_threads : 0)"
    slots = "slot_writers<config>", "math_warps * config.slot_lanes()"
    counts = [
        f"1 + {scales}",
        slots[0],
        "readers * (warp_threads + peers)",
        "config.converter_warps * warp_threads",
        slots[1],
    ]
    assert barriers == [*counts, "1", "4 * (config.split_k - 1)", "1"]  # the last is that of units, full
    lanes = re.search(r"int slot_lanes\(\) const \{ return (.+); \}", text)
    assert lanes and lanes[1] == "b_stages > 0 && packed_b() && chains == 1 ? 1 : 32"


def sweep() -> int:
    """Prove all legal configs. Returns how many keep to the protocol, and prints the others."""
    begin, wrong, steps = time.monotonic(), 0, 0
    for number, config in enumerate(legal_configs(), start=1):
        try:
            steps += sum(check(launched) for launched in launches(config, warps=4))
        except Fault as fault:
            wrong += 1
            print(config.name, fault, flush=True)
        if number % 1000 == 0:
            print(f"{number} configs, {wrong} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(legal_configs())} configs, {wrong} wrong, {steps} steps, {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The kernel's synchronisation, of every legal config")
    parser.add_argument("--sweep", action="store_true", required=True)
    parser.parse_args()
    sys.exit(sweep())
