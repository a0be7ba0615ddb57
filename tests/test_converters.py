"""Converter warps of packed weights, run on a CPU: their text, compiled as C++ with host_warp.h.

Of units as they are in memory, the warps write to each slot what packed.elements defines, in the order that WGMMA
reads; or they leave it in the registers that WGMMA takes. Scales that promotion applies to groups of integers stand
beside it.
"""

import ctypes
import re
from itertools import product

import pytest
import torch
from formats import INT4, NAMES_OF_PACKED, draw, spread
from on_host import LOADS, STORAGE, load, without_assembly
from test_cast_kernels import ASSEMBLY_OF_UNPACK

from deep_tile import GemmConfig, codegen, pack_weight, packed, params, unpack_weight
from deep_tile.config import SCALE_BLOCK, UNIT_ROWS
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.about(
    *("include/deep_tile/*", "tests/host_*.h", "deep_tile/codegen.py", "deep_tile/params.py", "deep_tile/packed.py"),
    *("deep_tile/config.py", "deep_tile/kinds.py", "tests/formats.py", "tests/on_host.py"),
)

ASSEMBLY = {
    **{pattern: ASSEMBLY_OF_UNPACK[pattern] for pattern in ASSEMBLY_OF_UNPACK if "griddepcontrol" not in pattern},
    **LOADS,
    r'asm volatile\("st\.shared\.v4\.b32 .*?: "memory"\);': (
        "const u32 vector[] = {r0, r1, r2, r3}; memcpy(host_smem(smem), vector, sizeof vector);"
    ),
    r'asm volatile\("st\.shared\.u32 .*?: "memory"\);': "memcpy(host_smem(smem), &bits, sizeof bits);",
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred p;\\n"\s*"setp\.ne\.b32 p, %2, 0;\\n"\s*"@p bar\.sync [^;]*;[^;]*;': "",
}
"""What converters use. Their barrier waits for nothing, as the tables are made in a round of their own."""

PROGRAM = """
#include "host_warp.h"
{struct}
{storage}
#define private public  // what a multiplying warp converts is its own
{headers}

// Converts a stage of units to each slot, and takes the scales of its groups from there.
template <deep_tile::GemmConfig config>
void convert(const char* units, char* slots, unsigned short* scales) {{
    auto& smem = *reinterpret_cast<deep_tile::SharedStorage<config>*>(storage);
    static_assert(sizeof smem == config.smem_bytes);
    memset(storage, 0x5a, sizeof storage);
    const int stage = config.unit_stages - 1;
    memcpy(smem.packed.units[stage], units, sizeof smem.packed.units[stage]);
    for (bool writes : {{false, true}}) {{
        for (unsigned warp = 0; warp < config.converter_warps; ++warp) {{
            for (unsigned lane = 0; lane < 32; ++lane) {{
                threadIdx = {{warp * 32 + lane}};
                deep_tile::Converter<config> converter(smem, warp);
                for (int slot = 0; writes && slot <= config.b_slots; ++slot, converter.advance()) {{
                    for (int i = 0; i < converter.units; ++i) {{
                        if (!converter.has(i)) continue;
                        auto unit = converter.read(stage, i);
                        converter.look_up(unit);
                        converter.write(unit, i);
                    }}
                }}
            }}
        }}
    }}
    memcpy(slots, smem.b, sizeof smem.b);
    if constexpr (config.swap_ab) memcpy(scales, smem.groups.group_scale, sizeof smem.groups.group_scale);
}}

// Converts a stage of units in registers: of each warp, K block of its part, WGMMA, register and lane; and the scales
// of each lane's two rows.
template <deep_tile::GemmConfig config>
void convert_in_registers(const char* units, unsigned (*operands)[4][4][32], unsigned short (*scales)[32][2][4]) {{
    using Multiplier = deep_tile::RegisterMultiplier<config>;
    auto& smem = *reinterpret_cast<deep_tile::SharedStorage<config>*>(storage);
    static_assert(sizeof smem == config.smem_bytes);
    memset(storage, 0x5a, sizeof storage);
    const int stage = config.unit_stages - 1;
    memcpy(smem.packed.units[stage], units, sizeof smem.packed.units[stage]);
    GemmParams params;
    for (bool writes : {{false, true}}) {{
        for (unsigned warp = 0; warp < config.converter_warps; ++warp) {{
            for (unsigned lane = 0; lane < 32; ++lane) {{
                threadIdx = {{warp * 32 + lane}};
                Multiplier multiplier(params, smem, warp);
                for (int block = 0; writes && block < Multiplier::blocks; ++block) {{
                    typename Multiplier::Operand operand;
                    multiplier.convert(operand, stage, block);
                    const int place = warp * Multiplier::blocks + block;
                    for (int i = 0; i < 16; ++i) operands[place][i / 4][i % 4][lane] = operand.elements[i / 4][i % 4];
                    if constexpr (config.chains > 1) memcpy(scales[place][lane], operand.scales, sizeof operand.scales);
                }}
            }}
        }}
    }}
}}
"""

ENTRY = """
constexpr deep_tile::GemmConfig config_{number} = {config};
extern "C" void run_{number}(const char* units, {to}, {scales}) {{ {function}<config_{number}>(units, to, scales); }}
"""

EVERY_CONFIG = [config for kind in NAMES_OF_PACKED for config in default_configs(True, kind)]
INTO_SLOTS = [
    *{(c.kind, c.block_n, c.scale_blocks, c.converter_warps): c for c in EVERY_CONFIG if not c.from_registers}.values()
]
"""One for each share of a stage that a converter warp may have."""

TILES_OF_REGISTERS = ((128, 1), (128, 2), (112, 2), (96, 1), (80, 1), (64, 2), (64, 4), (48, 2), (32, 4), (16, 2))
INTO_REGISTERS = [
    *(
        GemmConfig(32, block_n, 3, scale_blocks=scale_blocks, kind=kind)
        for kind, (block_n, scale_blocks) in product(NAMES_OF_PACKED, TILES_OF_REGISTERS)
    ),
    *(GemmConfig(64, block_n, 3, scale_blocks=256 // block_n, kind="int4_32") for block_n in (128, 64)),
]
"""All units of both warpgroups, or fewer; K blocks of both or of each."""

CONFIGS = [*INTO_SLOTS, *INTO_REGISTERS]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    headers = codegen._headers("barriers.cuh", "register_b.cuh").replace("__cvta_generic_to_shared(", "host_address(")
    headers = without_assembly(headers, ASSEMBLY, re.DOTALL)
    entries = [
        ENTRY.format(
            number=i,
            config=codegen._fields(config),
            to="unsigned (*to)[4][4][32]" if config.from_registers else "char* to",
            scales="unsigned short (*scales)[32][2][4]" if config.from_registers else "unsigned short* scales",
            function="convert_in_registers" if config.from_registers else "convert",
        )
        for i, config in enumerate(CONFIGS)
    ]
    text = "\n".join([PROGRAM.format(struct=params.GEMM.text, storage=STORAGE, headers=headers), *entries])
    return load(tmp_path_factory.mktemp("converters"), text)


def swizzled(weight):
    """[rows, k] bytes as a slot has them: K block by K block, 16-byte pieces of a row exchanged by its number."""
    n, k = weight.shape
    pieces = weight.view(n, k // SCALE_BLOCK, 8, 16).transpose(0, 1)
    places = torch.arange(8) ^ torch.arange(n)[:, None] % 8
    return pieces.gather(2, places[None, :, :, None].expand_as(pieces))


def converted(library, number, results, scales):
    """The FP8 that a stage of random units stands for, and the FP16 scales [rows, groups] that it does not have, if its
    kind has any; `results` and `scales` are what the warps make of them."""
    config = CONFIGS[number]
    shape = config.block_n, config.scale_blocks * SCALE_BLOCK
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[config.kind], shape, spread_of_scales=12)
    made = pack_weight(weight, scale.bfloat16() if config.chains > 1 else scale, **arguments)
    getattr(library, f"run_{number}")(*(ctypes.c_void_p(x.data_ptr()) for x in (made.weight, results, scales)))
    if config.chains == 1:
        return packed.elements(*made, k=shape[1]).view(torch.uint8), None
    codes, of_groups, _ = unpack_weight(*made)
    integers = INT4[torch.stack([codes % 16, codes // 16], -1).flatten(-2).int()]
    of_blocks = spread(made.scale / 256, (SCALE_BLOCK, config.chains), of_groups.shape)
    return (integers / 256).to(torch.float8_e4m3fn).view(torch.uint8), (of_groups / of_blocks).half()


@pytest.mark.parametrize("number", range(len(INTO_SLOTS)), ids=lambda number: CONFIGS[number].name)
def test_converters_write_what_is_defined(library, number):
    config = CONFIGS[number]
    slots = torch.empty(config.b_slots, config.scale_blocks, config.block_n, 8, 16, dtype=torch.uint8)
    scales = torch.empty(config.b_slots, config.scale_blocks, config.block_n, config.chains, dtype=torch.float16)
    elements, of_groups = converted(library, number, slots, scales)
    assert torch.equal(slots, swizzled(elements).expand_as(slots))
    if config.chains > 1:
        assert torch.equal(scales, of_groups.unflatten(1, (-1, config.chains)).transpose(0, 1).expand_as(scales))


def fragments(weight):
    """[rows, k] bytes as warps give them to WGMMA: of each K block and 16 rows, by WGMMA, register, lane and byte.

    PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32": a lane's four registers have four bytes of rows lane / 4
    and 8 below, from k = lane % 4 * 4 on, then of both from 16 behind that on.
    """
    n, k = weight.shape
    unit, half_of_rows, row, block, wgmma, half_of_k, place, byte = range(8)
    parts = weight.view(n // 16, 2, 8, k // SCALE_BLOCK, 4, 2, 4, 4)
    order = block, unit, wgmma, half_of_k, half_of_rows, row, place, byte
    return parts.permute(order).reshape(k // SCALE_BLOCK, n // 16, 4, 4, 32, 4)


def scales_of_lanes(scales, chains):
    """[rows, groups] scales as lanes have them: of each K block and 16 rows, by lane, row of its two, and group."""
    rows = scales.view(len(scales) // 16, 2, 8, -1, chains).permute(3, 0, 2, 1, 4)
    return rows.repeat_interleave(4, 2)


@pytest.mark.parametrize("number", range(len(INTO_SLOTS), len(CONFIGS)), ids=lambda number: CONFIGS[number].name)
def test_multiplying_converters_hold_what_is_defined(library, number):
    """A warp beyond the tile has its last unit."""
    config = CONFIGS[number]
    blocks, units = config.scale_blocks // config.k_parts, config.block_n // UNIT_ROWS
    operands = torch.empty(config.converter_warps, blocks, 4, 4, 32, 4, dtype=torch.uint8)
    scales = torch.empty(config.converter_warps, blocks, 32, 2, config.chains, dtype=torch.float16)
    elements, of_groups = converted(library, number, operands, scales)
    wanted = fragments(elements)
    for warp in range(config.converter_warps):
        part, unit = divmod(warp, 4) if config.k_parts == 2 else (0, warp)
        of_part, own = slice(part * blocks, (part + 1) * blocks), min(unit, units - 1)
        assert torch.equal(operands[warp], wanted[of_part, own])
        if config.chains > 1:
            assert torch.equal(scales[warp], scales_of_lanes(of_groups, config.chains)[of_part, own])
