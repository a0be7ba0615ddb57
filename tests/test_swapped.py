"""Math warpgroups that multiply with swapped operands (swap_ab.cuh), run on a CPU as fibers.

Each register holds the right element when a tile's products are scaled, and after its sums have been exchanged,
whichever thread comes first.
"""

import ctypes
import re

import pytest
import torch
from on_host import LOADS, STORAGE, load, without_assembly

from deep_tile import GemmConfig, codegen, params

pytestmark = pytest.mark.about(
    *("include/deep_tile/*", "tests/host_*.h", "deep_tile/codegen.py", "deep_tile/params.py", "deep_tile/config.py"),
    "tests/on_host.py",
)

ASSEMBLY = {
    **LOADS,
    r'asm volatile\("st\.shared\.f32 .*?: "memory"\);': "memcpy(host_smem(smem), &value, sizeof value);",
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred p;\\n"\s*"setp\.ne\.b32 p, %2, 0;\\n"\s*"@p bar\.sync [^;]*;[^;]*;': (
        "__syncthreads();"
    ),
}
"""What scaling and exchanging use."""

PROGRAM = """
#include "host_warp.h"
{struct}
{storage}
#define private public  // sums and scales are the main loop's own
{headers}

// Runs `thread` in all math threads of a block.
template <deep_tile::GemmConfig config, typename Thread>
void run(bool backwards, Thread thread) {{
    constexpr unsigned threads = config.math_warpgroups * 128;
    auto& smem = *reinterpret_cast<deep_tile::SharedStorage<config>*>(storage);
    static_assert(sizeof smem == config.smem_bytes);
    blockDim = {{threads}};
    block_meetings.assign(1, Meeting(threads));
    fibers.backwards = backwards;
    fibers.run(threads, [&] {{
        GemmParams params = {{}};
        deep_tile::SwapAB<config> loop(params, smem, threadIdx.x / 128);
        thread(loop, smem, threadIdx.x);
        __syncthreads();
    }});
}}

// Exchanges two tiles' sums, [2][block_m][block_n]: of each thread, the registers of its accumulators.
template <deep_tile::GemmConfig config>
void exchange(bool backwards, const float* tiles, float* registers) {{
    run<config>(backwards, [&](auto& loop, auto&, unsigned thread) {{
        for (int tile = 0; tile < 2; ++tile) {{
            float swapped[loop.chunks][loop.count];
            for (int chunk = 0; chunk < loop.chunks; ++chunk) {{
                for (int i = 0; i < loop.count; ++i) {{
                    const int of_a = (loop.first_chunk() + chunk) * 64 + i / 4 * 8 + thread % 4 * 2 + i % 2;
                    const int of_warpgroup = thread % 128 / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4;
                    const int of_b = thread / 128 % loop.column_groups * 64 + of_warpgroup;
                    swapped[chunk][i] = tiles[(tile * config.block_m + of_a) * config.block_n + of_b];
                }}
            }}
            deep_tile::Accumulators<config> sums;
            loop.clear(sums);
            loop.exchange(swapped, sums);
            memcpy(registers + (tile * config.math_warpgroups * 128 + thread) * (sizeof sums / 4), sums, sizeof sums);
        }}
    }});
}}

// Scales each warpgroup's first products, by thread, group and register, by scales of rows of `a` and of the groups of
// rows of `b`.
template <deep_tile::GemmConfig config>
void scale(const float* products, const float* of_a, const unsigned short* of_b, float of_block, float* registers) {{
    run<config>(false, [&](auto& loop, auto& smem, unsigned thread) {{
        smem.b_scale[0][0][0] = of_block;
        for (int row = thread; row < config.block_m; row += config.math_warpgroups * 128) {{
            smem.a_scale[0][0][deep_tile::a_scale_slot<config>(row)] = of_a[row];
        }}
        if (thread == 0) memcpy(smem.groups.group_scale[0], of_b, sizeof smem.groups.group_scale[0]);
        __syncthreads();
        float sums[loop.count] = {{}};
        deep_tile::Chains<config, loop.count> own;
        memcpy(own, products + thread * (sizeof own / 4), sizeof own);
        const float4 scales[2] = {{loop.scales_of(0, loop.row_), loop.scales_of(0, loop.row_ + 8)}};
        deep_tile::promote_swapped<config>(sums, own, scales, smem.a_scale[0][0] + loop.first_chunk() * 64);
        memcpy(registers + thread * loop.count, sums, sizeof sums);
    }});
}}
"""

ENTRY = """
constexpr deep_tile::GemmConfig config_{number} = {config};
extern "C" void exchange_{number}(bool backwards, const float* tiles, float* registers) {{
    exchange<config_{number}>(backwards, tiles, registers);
}}
extern "C" void scale_{number}(const float* products, const float* of_a, const unsigned short* of_b, float of_block,
                               float* registers) {{
    scale<config_{number}>(products, of_a, of_b, of_block, registers);
}}
"""

CONFIGS = [
    GemmConfig(block_m, block_n, 2, b_stages=2, kind="int4_32")
    for block_m, block_n in ((64, 64), (128, 64), (128, 128), (256, 64))
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    headers = codegen._headers("swap_ab.cuh").replace("__cvta_generic_to_shared(", "host_address(")
    headers = without_assembly(headers, {r'asm\("cvt\.f32\.f16 [^;]*;[^;]*;': "value = host_f32_of_f16(half);"})
    headers = without_assembly(headers, ASSEMBLY, re.DOTALL)
    entries = [ENTRY.format(number=i, config=codegen._fields(config)) for i, config in enumerate(CONFIGS)]
    text = "\n".join([PROGRAM.format(struct=params.GEMM.text, storage=STORAGE, headers=headers), *entries])
    return load(tmp_path_factory.mktemp("swapped"), text)


def pointers(*tensors):
    return (ctypes.c_void_p(x.data_ptr()) for x in tensors)


def fragments(matrix):
    """[64, columns] as a warpgroup's threads have them in accumulators, by thread and register.

    PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32": a thread has two columns of every eight, of two rows.
    """
    warp, half, row, eight, place, pair = range(6)
    parts = matrix.view(4, 2, 8, matrix.shape[1] // 8, 4, 2)
    return parts.permute(warp, row, place, eight, half, pair).reshape(128, -1)


each_tile = pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda number: CONFIGS[number].name)


@each_tile
@pytest.mark.parametrize("backwards", [False, True])
def test_exchanged_sums_are_those_of_each_warpgroups_rows(library, number, backwards):
    config = CONFIGS[number]
    shape = 2, config.math_warpgroups, config.chunks_m, 64, config.block_n
    tiles = torch.randperm(2 * config.block_m * config.block_n).float()
    registers = torch.empty(2, config.math_warpgroups, 128, config.chunks_m, config.block_n // 2)
    getattr(library, f"exchange_{number}")(backwards, *pointers(tiles, registers))
    wanted = [[[fragments(chunk) for chunk in of_warpgroup] for of_warpgroup in tile] for tile in tiles.view(shape)]
    assert torch.equal(registers, torch.stack([torch.stack([torch.stack(x, 1) for x in tile]) for tile in wanted]))


@each_tile
def test_products_are_scaled_by_those_of_their_rows(library, number):
    config = CONFIGS[number]
    column_groups = config.block_n // 64
    chunks = config.block_m // 64 * column_groups // config.math_warpgroups
    products = torch.randint(-16, 17, (config.math_warpgroups, 4, 64, 64)).float()  # of rows of b and of a
    of_a, of_b = torch.randint(1, 9, (config.block_m,)).float(), torch.randint(-8, 9, (config.block_n, 4)).half()
    registers = torch.empty(config.math_warpgroups, 128, 32)
    own = torch.stack([torch.stack([fragments(chain) for chain in chains], 1) for chains in products])
    getattr(library, f"scale_{number}")(*pointers(own, of_a, of_b), ctypes.c_float(0.5), *pointers(registers))
    for warpgroup in range(config.math_warpgroups):
        first_row, first_column = warpgroup // column_groups * chunks * 64, warpgroup % column_groups * 64
        scales = of_b[first_column : first_column + 64].float().T[:, :, None]
        wanted = (products[warpgroup] * scales).sum(0) * of_a[first_row : first_row + 64] * 0.5
        assert torch.equal(registers[warpgroup], fragments(wanted))
