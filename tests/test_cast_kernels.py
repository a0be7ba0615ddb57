"""The casts' kernels, run on a CPU: their text, compiled as C++ with host_cuda.h, gives the definition's bits.

What it cannot show is what ptxas makes of the text, and what a GPU makes of memory. test_quantize_gpu.py does.
"""

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_quantize import EACH_OPTION, assert_same, wide_matrix

from deep_tile import cast as kernels
from deep_tile import params, quantize
from deep_tile.codegen import cast_source
from deep_tile.quantize import FP8_DTYPE, per_block_cast_to_fp8, per_token_cast_to_fp8

CASTS = {1: per_token_cast_to_fp8, 128: per_block_cast_to_fp8}
DTYPES = {source: dtype for dtype, source in quantize._KERNEL_SOURCES.items()}
ASSEMBLY = {
    r'asm\("max\.u16x2 .*?;" : "=r"\(larger\) : "r"\(a\), "r"\(b\)\);': "larger = host_max_u16x2(a, b);",
    r'asm\("cvt\.f32\.f16 .*?;" : "=f"\(value\) : "h"\(half\)\);': "value = host_f32_of_f16(half);",
    r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32 .*?;" : "=h"\(packed\) : "f"\(high\), "f"\(low\)\);': (
        "packed = host_e4m3x2(high, low);"
    ),
    r'asm volatile\("griddepcontrol\.\w+;" ::: "memory"\);': "",
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs a kernel on tensors of the CPU; each is compiled once."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    directory, libraries = tmp_path_factory.mktemp("kernels"), {}

    def run(kernel, grid, layout, *tensors):
        if kernel not in libraries:
            libraries[kernel] = compile_for_host(kernel, directory)
        argument = bytearray(params.CAST.pack(**layout._asdict()))
        for offset, number, _ in params.CAST.pointers(kernels.PLACES):
            argument[offset : offset + 8] = tensors[number].data_ptr().to_bytes(8, "little")
        libraries[kernel].run(bytes(argument), grid)

    return run


def compile_for_host(kernel, directory):
    text = cast_source(kernel)
    for pattern, replacement in ASSEMBLY.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, pattern
    source, library = directory / f"{kernel.name}.cpp", directory / f"{kernel.name}.so"
    source.write_text(f"""\
#include "host_cuda.h"
{text}
extern "C" void run(const CastParams* params, unsigned grid) {{
    host_launch({kernel.name}, *params, grid, {kernel.threads});
}}
""")
    command = ["c++", "-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-w"]
    subprocess.run([*command, f"-I{Path(__file__).parent}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


EACH_KERNEL = pytest.mark.parametrize("kernel", kernels.all_kernels(), ids=lambda kernel: kernel.name)


@EACH_KERNEL
@EACH_OPTION
def test_bits_are_the_definitions(launch, kernel, options):
    dtype = DTYPES[kernel.source]
    for (rows, k), floor in itertools.product([(5, 400), (3, 301), (131, 264)], [1e-4, 2.0**-80]):
        x = wide_matrix(rows, k, dtype)
        x[0, 0], x[rows // 2, 260] = float("nan"), float("inf")
        x[1, 128] = 448  # in groups of zeros: at the edge of a power of two, and behind it
        x[2, 128] = x[1, 128].nextafter(x[rows // 2, 260])
        assert_as_defined(launch, kernel, x, {"amax_floor": floor, **options})


MIDDLES = torch.cat([torch.arange(0.5, 8), *(torch.arange(8.5, 16) * 2**e for e in range(15))]) * 2.0**-9
"""Between every two positive codes, and beyond the last one."""


@EACH_KERNEL
@pytest.mark.parametrize("exact", ["divide", "reciprocal"])
def test_quotients_between_two_codes(launch, kernel, exact):
    """So close to the middle that it matters how is divided; and the largest of their group, which sets the scale."""
    dtype = DTYPES[kernel.source]
    amax = (1 + torch.rand(4096, 1)).to(dtype)
    _, scale = per_token_cast_to_fp8(amax, exact=exact)
    values = (MIDDLES * scale).to(dtype).clamp(max=amax)
    divided, multiplied = (x.to(FP8_DTYPE).float() for x in (values / scale, values * (1 / scale)))
    differing = (divided != multiplied).sum(1).topk(3)
    assert differing.values.min() > 0
    x = values[differing.indices].flatten().repeat(130, 1)
    assert_as_defined(launch, kernel, x, {"amax_floor": 1e-4, "round_scale": "none", "exact": exact})


def assert_as_defined(launch, kernel, x, options):
    """What the kernel writes into poisoned tensors is what the cast gives on the CPU."""
    wanted = CASTS[kernel.block_rows](x, **options)
    out, scale = (y.clone().fill_(-7) for y in wanted)
    layout = quantize._layout(x, quantize.Options(kernel.block_rows, **options), out, scale)
    launch(kernel, 2, layout, x, out, scale)
    assert_same((out, scale), wanted)
