"""The scheduler of grouped products, run on a CPU: its text, compiled as C++ with host_warp.h.

Every row of every group is in one tile of each column, of the right `b`, whatever the bounds are. Tiles of groups along
K, those of clusters among them, are those of the model in protocol.py, whose tests show that they cover each gradient
once.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from protocol import Launch

from deep_tile import codegen, params, plan
from deep_tile.config import ceil_div
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import group_rows
from deep_tile.select.defaults import deepest_config

pytestmark = pytest.mark.about(
    *("include/deep_tile/*", "tests/host_*.h", "tests/protocol.py", "tests/machine.py", "deep_tile/select/*.py"),
    *("deep_tile/codegen.py", "deep_tile/params.py", "deep_tile/plan.py", "deep_tile/config.py"),
)

SCALARS = ("group", "a", "scale", "b", "out", "end", "column")
K_SCALARS = ("row", "column", "out", "end", "first_step", "steps")
PROGRAM = """
#include "host_warp.h"
{struct}
{headers}
constexpr deep_tile::GemmConfig config = {config};

// Tiles of each block, in turn: how many it counts, then those that it gets, then -1.
extern "C" void run(const GemmParams* params, unsigned blocks, int* tiles) {{
    for (unsigned block = 0; block < blocks; ++block) {{
        HostWarp::run(block, blocks, [&] {{
            deep_tile::{scheduler}<config> scheduler(*params);
            const int count = scheduler.count();
            const bool writes = threadIdx.x == 0;
            if (writes) *tiles++ = count;
            for (auto tile = scheduler.first(); tile.valid; tile = scheduler.next()) {{
                const int scalars[] = {{{scalars}}};
                for (int scalar : scalars) {{
                    if (writes) *tiles++ = scalar;
                }}
            }}
            if (writes) *tiles++ = -1;
        }});
    }}
}}
"""

CLUSTER_RANK = 'asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));'

CONFIGS = [deepest_config(64, 128, grouping="offs"), deepest_config(128, 192, grouping="counts")]


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """Gives the tiles of all blocks, by block, and how many each counts."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    directory, libraries = tmp_path_factory.mktemp("schedulers"), {}

    def run(config, blocks, tiles, bounds, **numbers):
        if config not in libraries:
            libraries[config] = compile_for_host(config, directory)
        argument = params.GEMM.pack(
            **dict.fromkeys(integers(), 0) | minima() | numbers | {"bounds": 0 if bounds is None else bounds.data_ptr()}
        )
        scalars = scalars_of(config)
        found = torch.full((tiles * len(scalars) + 2 * blocks + 1,), -7, dtype=torch.int32)
        libraries[config].run(argument, blocks, ctypes.c_void_p(found.data_ptr()))
        return by_block(found.tolist(), blocks, scalars)

    return run


def scalars_of(config):
    return K_SCALARS if config.by_k else SCALARS


def integers():
    return [field.name for field in params.GEMM.fields if not (field.is_pointer or field.is_map)]


def minima():
    return {field.name: field.least for field in params.GEMM.fields if field.least}


def by_block(numbers, blocks, scalars):
    found, at = [], 0
    for _ in range(blocks):
        count, at = numbers[at], at + 1
        tiles = []
        while numbers[at] != -1:
            tiles.append(dict(zip(scalars, numbers[at : at + len(scalars)], strict=True)))
            at += len(scalars)
        at += 1
        found.append((count, tiles))
    assert numbers[at] == -7
    return found


def compile_for_host(config, directory):
    source, library = directory / f"{config.name}.cpp", directory / f"{config.name}.so"
    headers = codegen._headers("grouped.cuh")
    assert headers.count(CLUSTER_RANK) == 1
    headers = headers.replace(CLUSTER_RANK, f"rank = blockIdx.x % {config.cluster};")
    text = {"struct": params.GEMM.text, "headers": headers, "config": codegen._fields(config)}
    scalars = ", ".join(f"tile.{name}" for name in scalars_of(config))
    scheduler = "KGroupScheduler" if config.by_k else "GroupScheduler"
    source.write_text(PROGRAM.format(scheduler=scheduler, scalars=scalars, **text))
    command = ["c++", "-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-w"]
    subprocess.run([*command, f"-I{Path(__file__).parent}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def check(walk, config, n, rows, groups, bounds, blocks, alignment=1, raster_rows_log2=3):
    """Check that tiles cover each group's rows once in each column, and go to the blocks in turn."""
    layout = config.grouping
    ranges = group_rows(layout, bounds, groups, rows, alignment)
    columns = ceil_div(n, config.block_n)
    wanted = sum(ceil_div(end - begin, config.block_m) for begin, end in ranges) * columns
    numbers = {"m": rows, "n": n, "k": 256, "groups": groups, "alignment": alignment}
    strides = {"a_group_rows": rows + 3, "out_group_rows": rows + 5} if layout == "counts" else {}
    found = walk(
        config, blocks, wanted, bounds, b_group_rows=n + 7, raster_rows_log2=raster_rows_log2, **numbers, **strides
    )
    assert [count for count, _ in found] == [len(tiles) for _, tiles in found]
    assert [len(tiles) for _, tiles in found] == [len(range(block, wanted, blocks)) for block in range(blocks)]
    seen = set()
    for tile in (tile for _, tiles in found for tile in tiles):
        group = tile["group"]
        begin, end = ranges[group]
        first_a, first_out = (group * strides.get(name, 0) for name in ("a_group_rows", "out_group_rows"))
        row = tile["scale"]
        assert begin <= row < end and (row - begin) % config.block_m == 0
        assert (tile["a"], tile["out"], tile["end"]) == (first_a + row, first_out + row, first_out + end)
        assert tile["column"] % config.block_n == 0 and 0 <= tile["column"] < n
        assert tile["b"] == group * (n + 7) + tile["column"]
        seen.add((group, row, tile["column"]))
    assert len(seen) == wanted


def random_ends(groups, rows, generator):
    """Some groups empty, some of one row, some large; as ends."""
    sizes = torch.rand(groups, generator=generator) ** 4 * (torch.rand(groups, generator=generator) < 0.8)
    ends = (sizes.cumsum(0) / max(float(sizes.sum()), 1e-9) * rows).int()
    return ends


@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 70, 200, 1025, 2100])
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_rows_one_after_the_other(walk, groups, alignment):
    generator = torch.Generator().manual_seed(groups * 1000 + alignment)
    rows = int(torch.randint(1, 3000, (), generator=generator))
    n = int(torch.randint(1, 900, (), generator=generator))
    ends = random_ends(groups, rows, generator)
    check(walk, CONFIGS[0], n, rows, groups, ends, blocks=int(groups % 7) + 1, alignment=alignment)


@pytest.mark.parametrize("raster_rows_log2", [1, 3, 4])
@pytest.mark.parametrize("groups", [1, 5, 40, 300])
def test_rows_of_their_own(walk, groups, raster_rows_log2):
    generator = torch.Generator().manual_seed(groups)
    rows = 2500
    counts = (torch.rand(groups, generator=generator) ** 3 * rows).int()
    check(walk, CONFIGS[1], 700, rows, groups, counts, blocks=13, raster_rows_log2=raster_rows_log2)
    check(walk, CONFIGS[1], 200, 130, groups, None, blocks=3, raster_rows_log2=raster_rows_log2)


@pytest.mark.parametrize(
    "ends",
    [[5, 3, 9, 2], [-4, 10, -1, 12], [2**31 - 1] * 4, [-(2**31)] * 4, [0, 0, 0, 0], [10, 2**31 - 1, 3, 70], [100] * 4],
)
@pytest.mark.parametrize("alignment", [1, 64, 1024])
def test_bounds_that_lie(walk, ends, alignment):
    """Lead to rows that there are, and to none twice."""
    check(walk, CONFIGS[0], 130, 100, 4, torch.tensor(ends, dtype=torch.int32), blocks=2, alignment=alignment)
    check(walk, CONFIGS[1], 130, 100, 4, torch.tensor(ends, dtype=torch.int32), blocks=2)


@pytest.mark.parametrize("groups", [33, 100, 1100])
def test_many_bounds_that_lie(walk, groups):
    generator = torch.Generator().manual_seed(groups)
    near = torch.randint(-100, 900, (groups,), generator=generator, dtype=torch.int32)
    far = torch.randint(-(2**31), 2**31, (groups,), generator=generator).int()
    for bounds in (near, torch.where(torch.rand(groups, generator=generator) < 0.05, far, near.sort().values)):
        check(walk, CONFIGS[0], 130, 700, groups, bounds, blocks=5, alignment=16)
        check(walk, CONFIGS[1], 130, 70, groups, bounds, blocks=5)


def test_more_blocks_than_tiles(walk):
    check(walk, CONFIGS[0], 100, 64, 3, torch.tensor([0, 1, 1], dtype=torch.int32), blocks=9)


FIRST_WRONG = """
#include "host_warp.h"
static int divide(int dividend, int divisor) {{ {body} }}

extern "C" int first_wrong(int columns) {{
    int first = columns;
    for (int divisor = 1; divisor <= 16; ++divisor) {{
        for (int dividend = 0; dividend < first * divisor; ++dividend) {{
            if (divide(dividend, divisor) != dividend / divisor) first = dividend / divisor;
        }}
    }}
    return first;
}}
"""


def test_the_division_is_exact_as_far_as_it_may_go(tmp_path):
    """The division is exact for every tile of every panel up to the host's limit of columns."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    headers = codegen._headers("grouped.cuh")
    (body,) = re.findall(r"int divide\(int dividend, int divisor\) \{(.*?)\}", headers, re.DOTALL)
    source, library = tmp_path / "divide.cpp", tmp_path / "divide.so"
    source.write_text(FIRST_WRONG.format(body=body))
    command = ["c++", "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    subprocess.run([*command, f"-I{Path(__file__).parent}", str(source), "-o", str(library)], check=True)
    assert ctypes.CDLL(str(library)).first_wrong(2 * plan.MAX_GROUP_COLUMNS) == plan.MAX_GROUP_COLUMNS


GRADIENTS = {"kind": "fp8_1x128", "output": "fp32", "grouping": "k_offs"}
ALONG_K = [
    deepest_config(128, 128, **GRADIENTS),
    deepest_config(64, 128, accumulate=True, **GRADIENTS),
    deepest_config(128, 192, cluster_m=2, **GRADIENTS),
    deepest_config(128, 128, cluster_n=2, accumulate=True, **GRADIENTS),
    deepest_config(64, 64, cluster_m=2, cluster_n=4, **GRADIENTS),
]


@pytest.mark.parametrize("config", [*CONFIGS, *ALONG_K], ids=lambda config: config.name)
def test_the_models_tiles_are_the_kernels(walk, config):
    """Tiles are those of protocol.py, block by block."""
    generator = torch.Generator().manual_seed(3)
    alignment = 128 if config.by_k else 1
    for groups, blocks in ((1, 2), (6, 4), (40, 14), (3, 264)):
        m, n, k = (int(torch.randint(1, 1500, (), generator=generator)) for _ in range(3))
        bounds = random_ends(groups, k if config.by_k else m, generator)
        if config.by_counts:
            bounds = (torch.rand(groups, generator=generator) * m).int()
        ranges = group_rows(
            "offs" if config.by_k else config.grouping, bounds, groups, k if config.by_k else m, alignment
        )
        strides = {"a_group_rows": m, "out_group_rows": m} if config.by_counts or config.by_k else {}
        if config.by_counts:
            ranges = [(group * m + begin, group * m + end) for group, (begin, end) in enumerate(ranges)]
        launch = Launch(config, GemmProblem(m, n, k, blocks, groups=Groups(config.grouping, groups, 1)), ranges)
        blocks = launch.clusters * config.cluster
        modelled = [launch.block(block // config.cluster, block % config.cluster).tiles for block in range(blocks)]
        numbers = {"m": m, "n": n, "k": k, "groups": groups, "alignment": alignment} | strides
        raster = launch.raster_rows.bit_length() - 1
        tiles = sum(map(len, modelled))
        found = walk(config, blocks, tiles, bounds, raster_rows_log2=raster, b_group_rows=n, **numbers)
        assert [count for count, _ in found] == list(map(len, modelled))
        for tile, of_kernel in zip(sum(modelled, []), (tile for _, tiles in found for tile in tiles), strict=True):
            assert of_kernel == wanted_of(launch, tile)


def wanted_of(launch, tile):
    """The kernel's tile for a tile of the model."""
    if launch.config.by_k:
        steps, begin = launch.steps(tile), tile.group * launch.m
        where = {"row": tile.m, "column": tile.n, "out": begin + tile.m, "end": begin + launch.m}
        return where | {"first_step": steps.start, "steps": len(steps)}
    begin = tile.group * launch.m if launch.config.by_counts else 0
    where = dict.fromkeys(("a", "out"), tile.m) | {"scale": tile.m - begin, "end": launch.row_end(tile)}
    return where | {"group": tile.group, "b": tile.group * launch.n + tile.n, "column": tile.n}
