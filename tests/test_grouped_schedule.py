"""The scheduler of grouped products, run on a CPU: its text, compiled as C++ with host_warp.h.

Every row of every group is in one tile of each column, of the right `b`, whatever the bounds are.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from deep_tile import codegen, params
from deep_tile.config import ceil_div
from deep_tile.reference import group_rows
from deep_tile.select.defaults import deepest_config

SCALARS = ("group", "a", "scale", "b", "out", "end", "column")
PROGRAM = """
#include "host_warp.h"
{struct}
{headers}
constexpr deep_tile::GemmConfig config = {config};

// Tiles of each block, in turn: how many it counts, then those that it gets, then -1.
extern "C" void run(const GemmParams* params, unsigned blocks, int* tiles) {{
    for (unsigned block = 0; block < blocks; ++block) {{
        HostWarp::run(block, blocks, [&] {{
            deep_tile::GroupScheduler<config> scheduler(*params);
            const int count = scheduler.count();
            const bool writes = threadIdx.x == 0;
            if (writes) *tiles++ = count;
            for (auto tile = scheduler.first(); tile.valid; tile = scheduler.next()) {{
                const int scalars[] = {{tile.group, tile.a, tile.scale, tile.b, tile.out, tile.end, tile.column}};
                for (int scalar : scalars) {{
                    if (writes) *tiles++ = scalar;
                }}
            }}
            if (writes) *tiles++ = -1;
        }});
    }}
}}
"""

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
        found = torch.full((tiles * len(SCALARS) + 2 * blocks + 1,), -7, dtype=torch.int32)
        libraries[config].run(argument, blocks, ctypes.c_void_p(found.data_ptr()))
        return by_block(found.tolist(), blocks)

    return run


def integers():
    return [field.name for field in params.GEMM.fields if not (field.is_pointer or field.is_map)]


def minima():
    return {field.name: field.least for field in params.GEMM.fields if field.least}


def by_block(numbers, blocks):
    found, at = [], 0
    for _ in range(blocks):
        count, at = numbers[at], at + 1
        tiles = []
        while numbers[at] != -1:
            tiles.append(dict(zip(SCALARS, numbers[at : at + len(SCALARS)], strict=True)))
            at += len(SCALARS)
        at += 1
        found.append((count, tiles))
    assert numbers[at] == -7
    return found


def compile_for_host(config, directory):
    source, library = directory / f"{config.name}.cpp", directory / f"{config.name}.so"
    source.write_text(
        PROGRAM.format(struct=params.GEMM.text, headers=codegen._headers("grouped.cuh"), config=codegen._fields(config))
    )
    command = ["c++", "-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-w"]
    subprocess.run([*command, f"-I{Path(__file__).parent}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def check(walk, config, n, rows, groups, bounds, blocks, alignment=1, raster_rows_log2=3):
    """That tiles cover each group's rows in each column once, in turn among the blocks."""
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


@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 70, 200])
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_rows_one_after_the_other(walk, groups, alignment):
    generator = torch.Generator().manual_seed(groups * 1000 + alignment)
    rows = int(torch.randint(1, 3000, (), generator=generator))
    n = int(torch.randint(1, 900, (), generator=generator))
    ends = random_ends(groups, rows, generator)
    check(walk, CONFIGS[0], n, rows, groups, ends, blocks=int(groups % 7) + 1, alignment=alignment)


@pytest.mark.parametrize("raster_rows_log2", [1, 3, 4])
@pytest.mark.parametrize("groups", [1, 5, 40])
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


def test_more_blocks_than_tiles(walk):
    check(walk, CONFIGS[0], 100, 64, 3, torch.tensor([0, 1, 1], dtype=torch.int32), blocks=9)
