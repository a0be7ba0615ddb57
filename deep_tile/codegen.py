"""From a config to the text of its kernel.

The text is complete: our own headers are pasted in, so NVRTC needs no include path, and one hash of the text is the
identity of the kernel wherever the package is installed. It holds the single WGMMA instruction that the config uses.
"""

import re
from functools import lru_cache
from pathlib import Path

from deep_tile.config import GemmConfig

_INCLUDE = re.compile(r'^#include "(\w+\.(?:cuh|h))"$', re.MULTILINE)


def kernel_source(config: GemmConfig) -> str:
    """CUDA C++ of the kernel `config.name`, one self-contained translation unit for NVRTC or nvcc."""
    return "\n".join([_wgmma(config.mma_n), _headers(), _entry(config)])


def _wgmma(mma_n: int) -> str:
    """`wgmma(d, a, b, accumulate)`: d[64, mma_n] (+)= a[64, 32] * b[mma_n, 32]^T, e4m3 operands in shared memory.

    PTX ISA, "wgmma.mma_async". Written before the headers because they call it from templates with arguments of
    built-in types, which are looked up where the template is defined.
    """
    registers = mma_n // 2
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(registers))
    names = ", ".join(f"%{i}" for i in range(registers))
    a, b, accumulate = (f"%{registers + i}" for i in range(3))
    return f"""\
__device__ __forceinline__ void wgmma(float (&d)[{registers}], unsigned long long a, unsigned long long b,
                                      int accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, {accumulate}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{mma_n}k32.f32.e4m3.e4m3 {{{names}}}, {a}, {b}, p, 1, 1;\\n"
        "}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(accumulate));
}}
"""


def _entry(config: GemmConfig) -> str:
    fields = {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "block_k": config.block_k,
        "stages": config.stages,
        "cluster_m": config.cluster_m,
        "cluster_n": config.cluster_n,
        "split_k": config.split_k,
        "scale_blocks": config.scale_blocks,
        "math_warpgroups": config.math_warpgroups,
        "threads": config.threads,
        "rows_per_warpgroup": config.rows_per_warpgroup,
        "chunks_m": config.chunks_m,
        "chunks_n": config.chunks_n,
        "mma_n": config.mma_n,
        "columns_per_part": config.columns_per_part,
        "column_group": config.column_group,
        "b_scale_slots": config.b_scale_slots,
        "store_columns": config.store_columns,
        "store_buffers": config.store_buffers,
        "tma_store": "true" if config.tma_store else "false",
        "smem_bytes": config.smem_bytes,
    }
    initializers = ", ".join(f".{name} = {value}" for name, value in fields.items())
    return f"""\
constexpr deep_tile::GemmConfig config = {{{initializers}}};

extern "C" __global__ void __launch_bounds__(config.threads, 1)
{config.name}(const __grid_constant__ GemmParams params) {{
    deep_tile::gemm<config>(params);
}}
"""


@lru_cache(maxsize=1)
def _headers() -> str:
    """gemm.cuh with every header of ours pasted in at its first include."""
    directory = _header_directory()
    seen = set()

    def paste(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (directory / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: paste(match[1]), text)

    return paste("gemm.cuh")


def _header_directory() -> Path:
    """include/deep_tile, inside the installed package or beside it in a checkout."""
    package = Path(__file__).parent
    candidates = [package / "include" / "deep_tile", package.parent / "include" / "deep_tile"]
    for directory in candidates:
        if (directory / "gemm.cuh").is_file():
            return directory
    raise RuntimeError(
        f"deep_tile's CUDA headers are missing: no gemm.cuh in {' or '.join(map(str, candidates))}; reinstall deep_tile"
    )
