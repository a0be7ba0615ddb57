"""From a config to the text of its kernel.

The text is complete: the struct of the kernel's argument stands in it (params.py) and our own headers are pasted in, so
NVRTC needs no include path, and one hash of the text is the identity of the kernel wherever the package is installed. A
product's text holds the WGMMA instruction that its config uses.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from deep_tile import params
from deep_tile.config import SCALE_BLOCK, GemmConfig

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class Watch(NamedTuple):
    """The debug build of a kernel: how it ends waits, and where it says so (watch.cuh).

    Attributes:
        records: address of the records, which the host and the GPU share.
        limit_ns: how long a wait may take.
        kernel: number of the kernel in its records, from 1.
    """

    records: int
    limit_ns: int
    kernel: int


def kernel_source(config: GemmConfig, watch: Watch | None = None) -> str:
    """CUDA C++ of the kernel `config.name`, one self-contained translation unit for NVRTC or nvcc.

    With `watch`, of its debug build, whose text serves one process.
    """
    text = [_wgmma(config), params.GEMM.text, _headers("gemm.cuh"), _entry(config)]
    return "\n".join(text if watch is None else [_watch(watch), *text])


def _watch(watch: Watch) -> str:
    return f"#define DEEP_TILE_WATCH {{{watch.records}ull, {watch.limit_ns}ull, {watch.kernel}u}}\n"


def _wgmma(config: GemmConfig) -> str:
    """`wgmma(d, a, b, accumulate)`: d[64, mma_n] (+)= a[64, mma_k] * b[mma_n, mma_k]^T, operands in shared memory.

    PTX ISA, "wgmma.mma_async". Written before the headers because they call it from templates with arguments of
    built-in types, which are looked up where the template is defined.
    """
    registers = config.mma_n // 2
    instruction = f"wgmma.mma_async.sync.aligned.m64n{config.mma_n}k{config.mma_k}.{config.product.mma}"
    sums, constraint = ("int", "r") if config.integer_sums else ("float", "f")
    outputs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(registers))
    names = ", ".join(f"%{i}" for i in range(registers))
    a, b, accumulate = (f"%{registers + i}" for i in range(3))
    return f"""\
__device__ __forceinline__ void wgmma({sums} (&d)[{registers}], unsigned long long a, unsigned long long b,
                                      int accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, {accumulate}, 0;\\n"
        "{instruction} {{{names}}}, {a}, {b}, p{_immediates(config)};\\n"
        "}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(accumulate));
}}
"""


def _immediates(config: GemmConfig) -> str:
    """What the instruction has at its end: neither operand is negated, which integers cannot be; of 16 bits, whether
    each is read along its rows."""
    if config.integer_sums:
        return ""
    along_rows = f", {int(config.a_span > 0)}, {int(config.b_span > 0)}"
    return ", 1, 1" + (along_rows if config.product.a.bytes == 2 else "")


_FIELDS = (
    *("block_m", "block_n", "block_k", "k_bytes", "a_span", "b_span", "stages"),
    *("cluster_m", "cluster_n", "split_k", "scale_blocks", "scales_at_once"),
    *("math_warpgroups", "scale_warps", "store_warps", "unit_warps", "converter_warps", "threads"),
    *("math_registers", "producer_registers"),
    *("rows_per_warpgroup", "chunks_m", "chunks_n", "chunks", "mma_n", "block_sets"),
    *("pairs", "carries_descriptors", "queues_blocks", "ends_apart", "takes_turns", "prefetches_b"),
    *("bulk_scales", "reads_runs", "reads_any_runs"),
    *("b_stages", "b_slots", "b_group", "b_unit_bytes", "unit_stages"),
    *("columns_per_part", "column_group", "column_shifts", "b_scale_columns", "b_scale_slots"),
    *("store_columns", "store_rows", "store_swizzle", "boxes", "store_chunks", "boxes_at_once", "store_buffers"),
    *("tma_store", "by_offs", "by_counts", "by_k", "integer_sums", "row_scales", "column_scales"),
    *("accumulate", "quantizes", "out_format", "out_bytes"),
    *("bias_format", "activation", "columns_per_output", "out_columns_per_part", "smem_bytes"),
)
"""Those of the kernel's GemmConfig (include/deep_tile/config.cuh), in its order: properties of ours."""


def _entry(config: GemmConfig) -> str:
    return f"""\
constexpr deep_tile::GemmConfig config = {_fields(config)};

extern "C" __global__ void __launch_bounds__(config.threads, 1)
{config.name}(const __grid_constant__ GemmParams params) {{
    deep_tile::gemm<config>(params);
}}
"""


def _fields(config: GemmConfig) -> str:
    """The kernel's GemmConfig, as an initializer."""
    return "{" + ", ".join(f".{name} = {_literal(name, getattr(config, name))}" for name in _FIELDS) + "}"


def _literal(field: str, value: int | bool | str) -> str:
    """In C++."""
    if isinstance(value, str):
        return f"deep_tile::{'Activation' if field == 'activation' else 'Format'}::{value}"
    return str(value).lower()


class CastKernel(NamedTuple):
    """A cast to FP8: what its text depends on.

    Attributes:
        block_rows: 1 or 128, rows that share a scale with each other and with 128 columns.
        source: format of the input, a key of `CAST_FORMATS`.
        what: is cast, a key of `CAST_SOURCES`; of 128 rows "plain".
        threads: of a thread block.
        threads_per_scale: threads that meet in one scale: part of a warp for 1x128, the thread block for 128x128.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    block_rows: int
    source: str
    what: str
    threads: int
    threads_per_scale: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        source = self.source if self.what == "plain" else f"{self.what}_{self.source}"
        return f"fp8_cast_{self.block_rows}x128_{source}_t{self.threads}_s{self.threads_per_scale}"


CAST_FORMATS = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}
"""Formats that can be cast to FP8, by the names they have in formats.cuh."""

CAST_SOURCES = {"plain": "Plain", "listed": "Listed", "silu_mul": "SiluMul"}
"""What can be cast: all rows, rows by an index or of groups, a product of a row's halves; likewise."""


def cast_source(kernel: CastKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`.

    Its argument is no __grid_constant__: read in place, it makes the cast of FP32 in tiles spill (NVRTC 13.0.88).
    """
    entry = f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const CastParams params) {{
    deep_tile::{_cast_function(kernel)}(params);
}}
"""
    if kernel.what == "plain":
        return "\n".join([params.CAST.text, _headers("quantize.cuh"), entry])
    groups = f"constexpr unsigned cast_groups = {params.MOST_CAST_GROUPS};\n"
    return "\n".join([params.CAST_OF_ROWS.text, groups, _headers("experts.cuh"), entry])


def _cast_function(kernel: CastKernel) -> str:
    arguments = f"deep_tile::{CAST_FORMATS[kernel.source]}, {kernel.threads_per_scale}"
    if kernel.block_rows > 1:
        return f"cast_tiles<{arguments}>"
    return f"cast_rows<deep_tile::{CAST_SOURCES[kernel.what]}, {arguments}>"


class TransposedKernel(NamedTuple):
    """A cast to FP8 along tokens: what its text depends on.

    Attributes:
        source: format of the input, a key of `CAST_FORMATS`.
        columns: of a tile, which has 128 tokens.
        threads: of a thread block.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    source: str
    columns: int
    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"fp8_cast_transposed_128x{self.columns}_{self.source}_t{self.threads}"


def transposed_source(kernel: TransposedKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    entry = f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const CastParams params) {{
    deep_tile::cast_transposed<deep_tile::{CAST_FORMATS[kernel.source]}, {kernel.threads}, {kernel.columns}>(params);
}}
"""
    return "\n".join([params.TRANSPOSED_CAST.text, _headers("transposed.cuh"), entry])


class BothKernel(NamedTuple):
    """A cast both ways, or what transposes codes: what its text depends on.

    Attributes:
        what: "rows" and columns, each with its scales; "mixed", rows with their scales and tiles of 128x128 with one;
            "tiles" with one alone; or "codes", which are transposed.
        source: format of the input, a key of `CAST_FORMATS`; of codes "e4m3".
        threads: of a thread block.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    what: str
    source: str
    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"fp8_cast_both_{self.what}_{self.source}_t{self.threads}"


def both_source(kernel: BothKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    threads = kernel.threads
    body = {
        "rows": f"cast_both<deep_tile::{CAST_FORMATS.get(kernel.source)}, {threads}, false>",
        "mixed": f"cast_both<deep_tile::{CAST_FORMATS.get(kernel.source)}, {threads}, true>",
        "tiles": f"cast_weight<deep_tile::{CAST_FORMATS.get(kernel.source)}, {threads}>",
        "codes": f"transpose_codes<{threads}>",
    }[kernel.what]
    entry = f"""\
extern "C" __global__ void __launch_bounds__({threads}, {kernel.blocks_per_sm})
{kernel.name}(const CastParams params) {{
    deep_tile::{body}(params);
}}
"""
    return "\n".join([params.CAST_BOTH.text, _headers("both.cuh"), entry])


class GatedKernel(NamedTuple):
    """The gradient of SwiGLU, cast both ways: what its text depends on.

    Attributes:
        source: of gates and ups, "bf16", or "e4m3" with a scale for each 128.
        blocks: h has one scale for 128x128, not one for each of its columns and 128 tokens.
        threads: of a thread block.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    source: str
    blocks: bool
    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"fp8_cast_swiglu_gradient_{'mixed' if self.blocks else 'rows'}_{self.source}_t{self.threads}"

    @property
    def smem_bytes(self) -> int:
        """Of tiles that wait, of 128x128 in BF16."""
        return 2 * SCALE_BLOCK * SCALE_BLOCK * 2


def gated_source(kernel: GatedKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    source = {"bf16": "GatedWords", "e4m3": "GatedCodes"}[kernel.source]
    entry = f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const CastParams params) {{
    deep_tile::cast_gated_gradient<deep_tile::{source}, {kernel.threads}, {str(kernel.blocks).lower()}>(params);
}}
"""
    waiting = f"constexpr int gated_bytes = {kernel.smem_bytes};\n"
    return "\n".join([params.GATED.text, waiting, _headers("gated.cuh"), entry])


class CombineKernel(NamedTuple):
    """The sum of experts' rows: what its text depends on.

    Attributes:
        threads: of a thread block.
        rows_at_once: rows that a thread requests before it adds up the first.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    threads: int
    rows_at_once: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"fp8_combine_t{self.threads}_r{self.rows_at_once}"


def combine_source(kernel: CombineKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    entry = f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const CombineParams params) {{
    deep_tile::combine<{kernel.rows_at_once}>(params);
}}
"""
    return "\n".join([params.COMBINE.text, _headers("combine.cuh"), entry])


class SortKernel(NamedTuple):
    """The sort of tokens' choices by expert: what its text depends on.

    Attributes:
        choice: "int32" or "int64", the dtype of a choice.
        threads: of a thread block, one for each expert.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    choice: str
    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"sort_by_expert_{self.choice}_t{self.threads}"


def sort_source(kernel: SortKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    choice = {"int32": "int", "int64": "long long"}[kernel.choice]
    blocks = f"constexpr unsigned sort_blocks = {params.SORT_BLOCKS};\n"
    entry = f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const SortParams params) {{
    deep_tile::sort_by_expert<{choice}, {kernel.threads}>(params);
}}
"""
    return "\n".join([params.SORT.text, blocks, _headers("sort.cuh"), entry])


StreamingKernel = CastKernel | TransposedKernel | BothKernel | GatedKernel | CombineKernel | SortKernel
"""A kernel that is bound by memory."""

_SOURCES = {
    CastKernel: cast_source,
    TransposedKernel: transposed_source,
    BothKernel: both_source,
    GatedKernel: gated_source,
    CombineKernel: combine_source,
    SortKernel: sort_source,
}


def streaming_source(kernel: StreamingKernel) -> str:
    """Of any of them."""
    return _SOURCES[type(kernel)](kernel)


@lru_cache(maxsize=4)
def _headers(*first: str) -> str:
    """Headers of ours, with every other pasted in at its first include."""
    directory = _header_directory()
    seen = set()

    def paste(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (directory / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: paste(match[1]), text)

    return "".join(map(paste, first))


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
