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
from deep_tile.config import SCALE_BLOCK, SMEM_LIMIT_BYTES, GemmConfig, round_up
from deep_tile.kinds import K_BLOCK_BYTES

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
    instruction = f"m64n{config.mma_n}k{config.mma_k}.{config.product.mma}"
    return _wgmma_function(config.mma_n // 2, instruction, _immediates(config), config.integer_sums)


def _wgmma_function(registers: int, shape: str, immediates: str, integer_sums: bool = False) -> str:
    """`wgmma` for so many sums of a thread; `shape` with types, `immediates` at the instruction's end."""
    instruction = f"wgmma.mma_async.sync.aligned.{shape}"
    sums, constraint = ("int", "r") if integer_sums else ("float", "f")
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
        "{instruction} {{{names}}}, {a}, {b}, p{immediates};\\n"
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
    *("block_m", "block_n", "block_k", "k_bytes", "a_span", "b_span", "b_rows", "stages"),
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


def _caller(kernel: "StreamingKernel", struct: str, function: str) -> str:
    """The kernel itself, which hands its parameters to a function of a header."""
    return f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const {struct} params) {{
    deep_tile::{function}(params);
}}
"""


def cast_source(kernel: CastKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`.

    Its argument is no __grid_constant__: read in place, it makes the cast of FP32 in tiles spill (NVRTC 13.0.88).
    """
    entry = _caller(kernel, "CastParams", _cast_function(kernel))
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
    source = CAST_FORMATS[kernel.source]
    entry = _caller(kernel, "CastParams", f"cast_transposed<deep_tile::{source}, {kernel.threads}, {kernel.columns}>")
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
    entry = _caller(kernel, "CastParams", body)
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
    blocks = str(kernel.blocks).lower()
    entry = _caller(kernel, "CastParams", f"cast_gated_gradient<deep_tile::{source}, {kernel.threads}, {blocks}>")
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
    entry = _caller(kernel, "CombineParams", f"combine<{kernel.rows_at_once}>")
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
    entry = _caller(kernel, "SortParams", f"sort_by_expert<{choice}, {kernel.threads}>")
    return "\n".join([params.SORT.text, blocks, _headers("sort.cuh"), entry])


class ThinKernel(NamedTuple):
    """A product by parts of K (thin.cuh): what its text depends on.

    Attributes:
        block_m, block_n: of a tile; 64 or 128 rows, and a multiple of 8 columns.
        terms: in BF16 of b.
        stages: of the ring.
        split_warps: that split an FP32 b; 0 where b is given as BF16 terms.
        squares: whether it adds up the squares of a's rows, too.
        blocks_per_sm: thread blocks that must fit into an SM at once.
    """

    block_m: int
    block_n: int
    terms: int
    stages: int
    split_warps: int
    squares: bool
    blocks_per_sm: int

    @property
    def name(self) -> str:
        squares = "_squares" if self.squares else ""
        return f"thin_gemm_{self.block_m}x{self.block_n}_b{self.terms}_s{self.stages}{squares}"

    @property
    def threads(self) -> int:
        return self.block_m * 2 + 32 * (1 + self.split_warps)

    @property
    def smem_bytes(self) -> int:
        """Of ThinStorage: K blocks of a and of b's terms, and three mbarriers, in each stage."""
        stage = (self.block_m + self.terms * self.block_n) * K_BLOCK_BYTES + 3 * 8
        return round_up(stage * self.stages, 1024)


def thin_source(kernel: ThinKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    columns = kernel.terms * kernel.block_n if kernel.split_warps else kernel.block_n
    fields = ("block_m", "block_n", "terms", "stages", "split_warps", "squares")
    values = ", ".join(_literal(name, getattr(kernel, name)) for name in fields)
    entry = f"""\
constexpr deep_tile::ThinConfig config = {{{values}}};
static_assert(sizeof(deep_tile::ThinStorage<config>) == {kernel.smem_bytes}, "codegen.py and thin.cuh disagree");
static_assert(config.threads() == {kernel.threads});
static_assert(config.columns_at_once() == {columns});

extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const __grid_constant__ ThinParams params) {{
    deep_tile::thin<config>(params);
}}
"""
    wgmma = _wgmma_function(columns // 2, f"m64n{columns}k16.f32.bf16.bf16", ", 1, 1, 0, 0")
    return "\n".join([wgmma, params.THIN.text, _headers("thin.cuh"), entry])


class PartsKernel(NamedTuple):
    """The sum of the parts of such a product: what its text depends on.

    Attributes:
        threads: of a thread block.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"thin_gemm_parts_t{self.threads}"


def parts_source(kernel: PartsKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    entry = _caller(kernel, "PartsParams", f"add_parts<{kernel.threads}>")
    return "\n".join([params.PARTS.text, _headers("parts.cuh"), entry])


class SplitKernel(NamedTuple):
    """The split of FP32 into BF16 terms: what its text depends on.

    Attributes:
        terms: 2, rounded, or 3, exact.
        threads: of a thread block.
        blocks_per_sm: thread blocks that must fit into an SM's registers at once.
    """

    terms: int
    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"thin_gemm_split_b{self.terms}_t{self.threads}"


def split_source(kernel: SplitKernel) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`."""
    entry = _caller(kernel, "SplitParams", f"split_terms<{kernel.terms}>")
    return "\n".join([params.SPLIT.text, _headers("terms.cuh"), entry])


class LogitsKernel(NamedTuple):
    """The indexer's logits: what its text depends on.

    Attributes:
        head_dim: 32, 64 or 128, elements of e4m3 of a head.
        heads: of a query in shared memory: 32, 64 or 128.
        queries: of a math warpgroup; with their heads at most 256 for two warpgroups, 128 for three.
        warpgroups: that multiply, 2 or 3.
        splits_queries: warpgroups have queries of their own; else all have the same and take tiles by turns.
        paged: keys lie in pages of a cache.
        output: format of the logits, "fp32" or "bf16".
    """

    head_dim: int
    heads: int
    queries: int
    warpgroups: int
    splits_queries: bool
    paged: bool
    output: str

    @property
    def threads(self) -> int:
        """Of the math warpgroups, and of one that loads and fills."""
        return 128 * (self.warpgroups + 1)

    @property
    def math_registers(self) -> int:
        return {2: 240, 3: 152}[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        return {2: 24, 3: 56}[self.warpgroups]

    @property
    def name(self) -> str:
        queries = f"q{self.queries}x{self.warpgroups if self.splits_queries else 1}"
        paged = "paged_" if self.paged else ""
        return f"{paged}mqa_logits_h{self.heads}_d{self.head_dim}_{queries}_w{self.warpgroups}_{self.output}"

    @property
    def block_queries(self) -> int:
        """That share tiles of keys."""
        return self.queries * (self.warpgroups if self.splits_queries else 1)

    @property
    def parts(self) -> int:
        """That a warpgroup's queries are multiplied in: each a WGMMA that is wide enough for shared memory's rate."""
        return 2 if self.queries % 2 == 0 and self.queries * self.heads >= 192 else 1

    @property
    def stages(self) -> int:
        """Tiles of keys that fit beside two blocks of queries; 16 bring what a memory bound kernel needs on its way.
        Where warpgroups take turns each has stages of its own, so that it sees every phase of their barriers."""
        fitting = min(16, (SMEM_LIMIT_BYTES - self._tasks_bytes - 512) // (self._tile_bytes + 16))
        return fitting if self.splits_queries else fitting // self.warpgroups * self.warpgroups

    @property
    def smem_bytes(self) -> int:
        """Of `LogitsStorage`: operands, barriers, then a sum of each warp, their total and a share of three numbers."""
        used = self._tasks_bytes + self.stages * (self._tile_bytes + 16) + 4 * 8 + 4 * (self.threads // 32 + 1 + 3)
        return round_up(used, 1024)

    @property
    def _tasks_bytes(self) -> int:
        """Of two: tiles and row, and of each query its range, and of each head its elements and weight."""
        return 2 * (16 + self.block_queries * (8 + self.heads * (self.head_dim + 4)))

    @property
    def _tile_bytes(self) -> int:
        return LOGITS_TILE * (self.head_dim + 4)


LOGITS_TILE = 64
"""Keys of a tile, and of a page of the cache."""

_LOGITS_FIELDS = (
    *("head_dim", "heads", "queries", "block_queries", "parts", "stages", "warpgroups", "splits_queries", "paged"),
    *("output", "threads", "math_registers", "producer_registers", "smem_bytes"),
)
"""Of the kernel's LogitsConfig (include/deep_tile/logits_config.cuh), in its order; an output is `out_format` there."""


def logits_source(kernel: LogitsKernel, watch: Watch | None = None) -> str:
    """CUDA C++ of the kernel `kernel.name`, complete as that of `kernel_source`, with `watch` as there."""
    columns = kernel.queries * kernel.heads // kernel.parts
    fields = ", ".join(_literal(name, getattr(kernel, name)) for name in _LOGITS_FIELDS)
    entry = f"""\
constexpr deep_tile::LogitsConfig config = {{{fields}}};

extern "C" __global__ void __launch_bounds__(config.threads, 1)
{kernel.name}(const __grid_constant__ LogitsParams params) {{
    deep_tile::logits<config>(params);
}}
"""
    wgmma = _wgmma_function(columns // 2, f"m64n{columns}k32.f32.e4m3.e4m3", ", 1, 1")
    text = [wgmma, params.LOGITS.text, _headers("logits.cuh"), entry]
    return "\n".join(text if watch is None else [_watch(watch), *text])


_ThinKernels = ThinKernel | PartsKernel | SplitKernel

StreamingKernel = (
    CastKernel | TransposedKernel | BothKernel | GatedKernel | CombineKernel | SortKernel | LogitsKernel | _ThinKernels
)
"""A kernel that no GemmConfig describes: most are bound by memory."""

_SOURCES = {
    CastKernel: cast_source,
    TransposedKernel: transposed_source,
    BothKernel: both_source,
    GatedKernel: gated_source,
    CombineKernel: combine_source,
    SortKernel: sort_source,
    ThinKernel: thin_source,
    PartsKernel: parts_source,
    SplitKernel: split_source,
    LogitsKernel: logits_source,
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
