"""Converter warps of packed weights, run on a CPU: their text, compiled as C++ with host_warp.h.

Of units as they are in memory, the warps write to each slot what packed.as_fp8 defines, in the order that WGMMA reads.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from formats import NAMES_OF_PACKED, draw
from test_cast_kernels import ASSEMBLY_OF_UNPACK

from deep_tile import codegen, pack_weight, packed, params
from deep_tile.config import SCALE_BLOCK
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.about(
    *("include/deep_tile/*", "tests/host_*.h", "deep_tile/codegen.py", "deep_tile/params.py", "deep_tile/packed.py"),
    *("deep_tile/config.py", "deep_tile/kinds.py", "tests/formats.py"),
)

ASSEMBLY = {
    **{pattern: ASSEMBLY_OF_UNPACK[pattern] for pattern in ASSEMBLY_OF_UNPACK if "griddepcontrol" not in pattern},
    r'asm volatile\("ld\.shared\..*?: "memory"\);': "value = *reinterpret_cast<decltype(value)*>(host_smem(smem));",
    r'asm volatile\("st\.shared\.v4\.b32 .*?: "memory"\);': (
        "const u32 vector[] = {r0, r1, r2, r3}; memcpy(host_smem(smem), vector, sizeof vector);"
    ),
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred p;\\n"\s*"setp\.ne\.b32 p, %2, 0;\\n"\s*"@p bar\.sync [^;]*;[^;]*;': "",
}
"""What converters use. Their barrier waits for nothing, as the tables are made in a round of their own."""

PROGRAM = """
#include "host_warp.h"
{struct}
alignas(1024) char storage[232448];
inline unsigned long long host_address(const void* at) {{ return static_cast<const char*>(at) - storage; }}
inline char* host_smem(unsigned smem) {{ return storage + smem; }}

{headers}

// Converts a stage of units to each slot.
template <deep_tile::GemmConfig config>
void convert(const char* units, char* slots) {{
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
}}
"""

ENTRY = """
constexpr deep_tile::GemmConfig config_{number} = {config};
extern "C" void run_{number}(const char* units, char* slots) {{ convert<config_{number}>(units, slots); }}
"""

EVERY_CONFIG = [config for kind in NAMES_OF_PACKED for config in default_configs(True, kind)]
CONFIGS = [*{(c.kind, c.block_n, c.scale_blocks, c.converter_warps): c for c in EVERY_CONFIG}.values()]
"""One for each share of a stage that a converter warp may have."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    headers = codegen._headers("barriers.cuh", "packed_b.cuh").replace("__cvta_generic_to_shared(", "host_address(")
    for pattern, replacement in ASSEMBLY.items():
        headers, count = re.subn(pattern, replacement, headers, flags=re.DOTALL)
        assert count, pattern
    entries = (ENTRY.format(number=i, config=codegen._fields(config)) for i, config in enumerate(CONFIGS))
    directory = tmp_path_factory.mktemp("converters")
    source, made = directory / "converters.cpp", directory / "converters.so"
    source.write_text("\n".join([PROGRAM.format(struct=params.GEMM.text, headers=headers), *entries]))
    command = ["c++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{Path(__file__).parent}"]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def swizzled(weight):
    """[rows, k] bytes as a slot has them: K block by K block, 16-byte pieces of a row exchanged by its number."""
    n, k = weight.shape
    pieces = weight.view(n, k // SCALE_BLOCK, 8, 16).transpose(0, 1)
    places = torch.arange(8) ^ torch.arange(n)[:, None] % 8
    return pieces.gather(2, places[None, :, :, None].expand_as(pieces))


@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda number: CONFIGS[number].name)
def test_converters_write_what_is_defined(library, number):
    config = CONFIGS[number]
    shape = config.block_n, config.scale_blocks * SCALE_BLOCK
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[config.kind], shape, spread_of_scales=12)
    made = pack_weight(weight, scale, **arguments)
    wanted = swizzled(packed.as_fp8(*made, k=shape[1]).view(torch.uint8))
    slots = torch.empty(config.b_slots, *wanted.shape, dtype=torch.uint8)
    getattr(library, f"run_{number}")(*(ctypes.c_void_p(x.data_ptr()) for x in (made.weight, slots)))
    assert torch.equal(slots, wanted.expand_as(slots))
