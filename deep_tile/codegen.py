"""Generates a kernel's CUDA C++ from its config.

The text is self-contained: it holds the parameter struct (params.py) and all our headers, so NVRTC needs no include
path, and a hash of the text identifies the kernel on every machine. A product's text holds the WGMMA instruction that
its config uses.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from deep_tile import params
from deep_tile.config import MMA_M, SCALE_BLOCK, SMEM_LIMIT_BYTES, GemmConfig, round_up
from deep_tile.kinds import K_BLOCK_BYTES, PACKED

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class Watch(NamedTuple):
    """A kernel's debug build: how its waits end, and where it reports that (watch.cuh).

    Attributes:
        records: address of the records that host and GPU share.
        limit_ns: how long a wait may take.
        kernel: the kernel's number in its records, from 1.
    """

    records: int
    limit_ns: int
    kernel: int


def kernel_source(config: GemmConfig, watch: Watch | None = None) -> str:
    """CUDA C++ for kernel `config.name`, one self-contained translation unit for NVRTC or nvcc.

    With `watch`, its debug build, which serves one process only.
    """
    text = [_wgmma(config), params.GEMM.text, _headers("gemm.cuh"), _entry(config)]
    return "\n".join(text if watch is None else [_watch(watch), *text])


def _watch(watch: Watch) -> str:
    return f"#define DEEP_TILE_WATCH {{{watch.records}ull, {watch.limit_ns}ull, {watch.kernel}u}}\n"


def _wgmma(config: GemmConfig) -> str:
    """`wgmma(d, a, b, accumulate)`: d[64, mma_n] (+)= a[64, mma_k] * b[mma_n, mma_k]^T, operands in shared memory.
    A packed `b` from registers is `a` here, and `b` has 16 or 32 rows; with swapped operands 64.

    PTX ISA, "wgmma.mma_async". Written before the headers because they call it in templates with built-in argument
    types, and name lookup then happens at the template's definition.
    """
    if config.from_registers:
        shapes = {rows: f"m64n{rows}k{config.mma_k}.{config.product.mma}" for rows in (16, 32)}
        return "".join(_wgmma_function(rows // 2, shape, ", 1, 1", a_registers=4) for rows, shape in shapes.items())
    if config.swap_ab:
        return _wgmma_function(MMA_M // 2, f"m64n{MMA_M}k{config.mma_k}.{config.product.mma}", ", 1, 1")
    instruction = f"m64n{config.mma_n}k{config.mma_k}.{config.product.mma}"
    return _wgmma_function(config.mma_n // 2, instruction, _immediates(config), config.integer_sums)


def _wgmma_function(
    registers: int, shape: str, immediates: str, integer_sums: bool = False, a_registers: int = 0
) -> str:
    """The wrapper with this many accumulators per thread; `shape` includes types, `immediates` end the instruction. `a`
    is in shared memory, or in registers."""
    instruction = f"wgmma.mma_async.sync.aligned.{shape}"
    sums, constraint = ("int", "r") if integer_sums else ("float", "f")
    outputs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(registers))
    names = ", ".join(f"%{i}" for i in range(registers))
    of_a = [f"%{registers + i}" for i in range(max(1, a_registers))]
    b, accumulate = (f"%{registers + len(of_a) + i}" for i in range(2))
    a = f"{{{', '.join(of_a)}}}" if a_registers else of_a[0]
    declared = f"const unsigned (&a)[{a_registers}]" if a_registers else "unsigned long long a"
    passed = ", ".join(f'"r"(a[{i}])' for i in range(a_registers)) or '"l"(a)'
    return f"""\
__device__ __forceinline__ void wgmma({sums} (&d)[{registers}], {declared}, unsigned long long b,
                                      int accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, {accumulate}, 0;\\n"
        "{instruction} {{{names}}}, {a}, {b}, p{immediates};\\n"
        "}}\\n"
        : {outputs}
        : {passed}, "l"(b), "r"(accumulate));
}}
"""


def _immediates(config: GemmConfig) -> str:
    """Negation flags (integers have none) and, for 16-bit operands, the major of each."""
    if config.integer_sums:
        return ""
    along_rows = f", {int(config.a_span > 0)}, {int(config.b_span > 0)}"
    return ", 1, 1" + (along_rows if config.product.a.bytes == 2 else "")


_FIELDS = (
    *("block_m", "block_n", "block_k", "k_bytes", "a_span", "b_span", "b_rows", "stages"),
    *("cluster_m", "cluster_n", "split_k", "scale_blocks", "scales_at_once"),
    *("math_warpgroups", "scale_warps", "store_warps", "unit_warps", "converter_warps", "threads"),
    *("math_registers", "producer_registers", "converter_registers"),
    *("rows_per_warpgroup", "chunks_m", "chunks_n", "chunks", "mma_n", "block_sets"),
    *("pairs", "carries_descriptors", "queues_blocks", "ends_apart", "takes_turns", "prefetches_b"),
    *("bulk_scales", "reads_runs", "reads_any_runs"),
    *("b_stages", "b_slots", "b_slot_bytes", "b_group", "b_integers", "chains", "b_unit_bytes", "unit_stages"),
    *("k_parts", "from_registers", "swap_ab"),
    *("columns_per_part", "column_group", "column_shifts", "b_scale_columns", "b_scale_slots"),
    *("store_columns", "store_rows", "store_swizzle", "boxes", "store_chunks", "boxes_at_once", "store_buffers"),
    *("tma_store", "transposed", "by_offs", "by_counts", "by_k", "integer_sums", "row_scales", "column_scales"),
    *("accumulate", "quantizes", "out_format", "out_bytes"),
    *("bias_format", "activation", "columns_per_output", "out_columns_per_part", "smem_bytes"),
)
"""Fields of the CUDA GemmConfig (include/deep_tile/config.cuh), in order; each is a property of the Python one."""


def _entry(config: GemmConfig) -> str:
    return f"""\
constexpr deep_tile::GemmConfig config = {_fields(config)};

extern "C" __global__ void __launch_bounds__(config.threads, 1)
{config.name}(const __grid_constant__ GemmParams params) {{
    deep_tile::gemm<config>(params);
}}
"""


def _fields(config: GemmConfig) -> str:
    return "{" + ", ".join(f".{name} = {_literal(name, getattr(config, name))}" for name in _FIELDS) + "}"


def _literal(field: str, value: int | bool | str) -> str:
    if isinstance(value, str):
        return f"deep_tile::{'Activation' if field == 'activation' else 'Format'}::{value}"
    return str(value).lower()


class CastKernel(NamedTuple):
    """A cast to FP8.

    Attributes:
        block_rows: 1 or 128, rows that share a scale with each other and with 128 columns.
        source: input format, a key of `CAST_FORMATS`.
        what: input rows, a key of `CAST_SOURCES`; "plain" for 128x128 blocks.
        threads_per_scale: threads that compute one scale together: part of a warp for 1x128, the thread block for
            128x128.
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

    @property
    def table(self) -> params.Params:
        return params.CAST if self.what == "plain" else params.CAST_OF_ROWS

    @property
    def header(self) -> str:
        return "quantize.cuh" if self.what == "plain" else "experts.cuh"

    @property
    def constants(self) -> str:
        return "" if self.what == "plain" else f"constexpr unsigned cast_groups = {params.MOST_CAST_GROUPS};\n"

    @property
    def function(self) -> str:
        arguments = f"deep_tile::{CAST_FORMATS[self.source]}, {self.threads_per_scale}"
        if self.block_rows > 1:
            return f"cast_tiles<{arguments}>"
        return f"cast_rows<deep_tile::{CAST_SOURCES[self.what]}, {arguments}>"


CAST_FORMATS = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}
"""Formats that can be cast to FP8, by the names they have in formats.cuh."""

CAST_SOURCES = {"plain": "Plain", "listed": "Listed", "silu_mul": "SiluMul"}
"""Row sources of a cast, by name in CUDA: all rows, rows by index or group, `silu_mul` of a row's halves."""


class TransposedKernel(NamedTuple):
    """A cast to FP8 along tokens, in tiles of 128 tokens and so many columns."""

    source: str
    columns: int
    threads: int
    blocks_per_sm: int

    table, header, constants = params.TRANSPOSED_CAST, "transposed.cuh", ""

    @property
    def name(self) -> str:
        return f"fp8_cast_transposed_128x{self.columns}_{self.source}_t{self.threads}"

    @property
    def function(self) -> str:
        return f"cast_transposed<deep_tile::{CAST_FORMATS[self.source]}, {self.threads}, {self.columns}>"


class BothKernel(NamedTuple):
    """A cast in both directions, or a transposition of FP8 codes.

    Attributes:
        what: "rows": 1x128 scales in both directions; "mixed": 1x128 along rows and 128x128 for the transpose; "tiles":
            128x128 for both; "codes": FP8 codes are transposed.
        source: input format, a key of `CAST_FORMATS`; "e4m3" for codes.
    """

    what: str
    source: str
    threads: int
    blocks_per_sm: int

    table, header, constants = params.CAST_BOTH, "both.cuh", ""

    @property
    def name(self) -> str:
        return f"fp8_cast_both_{self.what}_{self.source}_t{self.threads}"

    @property
    def function(self) -> str:
        source = f"deep_tile::{CAST_FORMATS.get(self.source)}, {self.threads}"
        return {
            "rows": f"cast_both<{source}, false>",
            "mixed": f"cast_both<{source}, true>",
            "tiles": f"cast_weight<{source}>",
            "codes": f"transpose_codes<{self.threads}>",
        }[self.what]


class GatedKernel(NamedTuple):
    """The gradient of SwiGLU, cast both ways.

    Attributes:
        source: format of gate and up: "bf16", or "e4m3" with 1x128 scales.
        blocks: h has 128x128 scales instead of one per column and 128 tokens.
    """

    source: str
    blocks: bool
    threads: int
    blocks_per_sm: int

    table, header = params.GATED, "gated.cuh"

    @property
    def name(self) -> str:
        return f"fp8_cast_swiglu_gradient_{'mixed' if self.blocks else 'rows'}_{self.source}_t{self.threads}"

    @property
    def smem_bytes(self) -> int:
        """Shared memory for two waiting 128x128 BF16 tiles."""
        return 2 * SCALE_BLOCK * SCALE_BLOCK * 2

    @property
    def constants(self) -> str:
        return f"constexpr int gated_bytes = {self.smem_bytes};\n"

    @property
    def function(self) -> str:
        source = {"bf16": "GatedWords", "e4m3": "GatedCodes"}[self.source]
        return f"cast_gated_gradient<deep_tile::{source}, {self.threads}, {str(self.blocks).lower()}>"


class NormKernel(NamedTuple):
    """RMSNorm of a sum and its cast to FP8: a thread block for each row, with a thread for each eight columns."""

    threads: int
    blocks_per_sm: int

    table, header, constants = params.NORM, "norm.cuh", ""

    @property
    def name(self) -> str:
        return f"fp8_cast_1x128_norm_bf16_t{self.threads}"

    @property
    def function(self) -> str:
        return f"cast_norm<{self.threads}>"


class CombineKernel(NamedTuple):
    """The weighted sum over experts' rows.

    Attributes:
        rows_at_once: rows that a thread requests before it adds up the first.
    """

    threads: int
    rows_at_once: int
    blocks_per_sm: int

    table, header, constants = params.COMBINE, "combine.cuh", ""

    @property
    def name(self) -> str:
        return f"fp8_combine_t{self.threads}_r{self.rows_at_once}"

    @property
    def function(self) -> str:
        return f"combine<{self.rows_at_once}>"


class UnpackKernel(NamedTuple):
    """The conversion to FP8 of a packed weight, whose kind is in `kinds.PACKED`."""

    kind: str
    threads: int
    blocks_per_sm: int

    table, header, constants = params.UNPACK, "unpack.cuh", ""

    @property
    def name(self) -> str:
        return f"fp8_unpack_{self.kind}_t{self.threads}"

    @property
    def function(self) -> str:
        return f"unpack<{PACKED[self.kind].packing.group}>"


class SortKernel(NamedTuple):
    """The sort by expert, for choices of "int32" or "int64"; a thread for each expert."""

    choice: str
    threads: int
    blocks_per_sm: int

    table, header, constants = params.SORT, "sort.cuh", f"constexpr unsigned sort_blocks = {params.SORT_BLOCKS};\n"

    @property
    def name(self) -> str:
        return f"sort_by_expert_{self.choice}_t{self.threads}"

    @property
    def function(self) -> str:
        return f"sort_by_expert<{ {'int32': 'int', 'int64': 'long long'}[self.choice] }, {self.threads}>"


class ThinKernel(NamedTuple):
    """A thin GEMM's main kernel (thin.cuh).

    Attributes:
        block_m, block_n: tile size; 64 or 128 rows and a multiple of 8 columns.
        terms: BF16 terms that represent b.
        stages: ring depth.
        splits: whether b is FP32 and the kernel splits it; otherwise b is its BF16 terms.
        squares: whether it also sums squares along a's rows.
    """

    block_m: int
    block_n: int
    terms: int
    stages: int
    splits: bool
    squares: bool
    blocks_per_sm: int

    table = params.THIN

    @property
    def name(self) -> str:
        more = "_fp32" * self.splits + "_squares" * self.squares
        return f"thin_gemm_{self.block_m}x{self.block_n}_b{self.terms}_s{self.stages}{more}"

    @property
    def threads(self) -> int:
        return self.block_m * 2 + 32

    @property
    def smem_bytes(self) -> int:
        """Size of ThinStorage. A stage holds a K block of a and of b and two mbarriers; a kernel that splits also holds
        the terms of two K blocks."""
        boxes = 2 if self.splits else self.terms
        stage = (self.block_m + boxes * self.block_n) * K_BLOCK_BYTES + 2 * 8
        return round_up(stage * self.stages + self.splits * 2 * self.terms * self.block_n * K_BLOCK_BYTES, 1024)

    @property
    def side_by_side(self) -> bool:
        """Whether one WGMMA has all terms as adjacent columns, each with its own sums."""
        return self.block_m <= 128 and self.terms * self.block_n <= _MOST_COLUMNS


_MOST_COLUMNS = 192
"""Columns of a WGMMA, as in thin.cuh."""


def thin_source(kernel: ThinKernel) -> str:
    columns = kernel.block_n * (kernel.terms if kernel.side_by_side else 1)
    fields = ("block_m", "block_n", "terms", "stages", "splits", "squares")
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
    """The reduction over a thin GEMM's K parts."""

    threads: int
    blocks_per_sm: int

    table, header, constants = params.PARTS, "parts.cuh", ""

    @property
    def name(self) -> str:
        return f"thin_gemm_parts_t{self.threads}"

    @property
    def function(self) -> str:
        return f"add_parts<{self.threads}>"


class SplitKernel(NamedTuple):
    """The split from FP32 into BF16 terms: 2, rounded, or 3, exact."""

    terms: int
    threads: int
    blocks_per_sm: int

    table, header, constants = params.SPLIT, "terms.cuh", ""

    @property
    def name(self) -> str:
        return f"thin_gemm_split_b{self.terms}_t{self.threads}"

    @property
    def function(self) -> str:
        return f"split_terms<{self.terms}>"


class LogitsKernel(NamedTuple):
    """The indexer's logits.

    Attributes:
        head_dim: e4m3 elements per head: 32, 64 or 128.
        heads: per query, in shared memory: 32, 64 or 128.
        queries: per math warpgroup; queries x heads is at most 256 with two warpgroups, 128 with three.
        warpgroups: that multiply, 2 or 3.
        splits_queries: each warpgroup has its own queries; else all share them and alternate in tiles.
        paged: keys are in cache pages.
        output: logit format, "fp32" or "bf16".
    """

    head_dim: int
    heads: int
    queries: int
    warpgroups: int
    splits_queries: bool
    paged: bool
    output: str

    table = params.LOGITS

    @property
    def threads(self) -> int:
        """The math warpgroups' threads and one producer warpgroup's."""
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
        """Queries per thread block, which share key tiles."""
        return self.queries * (self.warpgroups if self.splits_queries else 1)

    @property
    def parts(self) -> int:
        """Parts of a warpgroup's queries, one WGMMA each, still wide enough for shared memory's rate."""
        return 2 if self.queries % 2 == 0 and self.queries * self.heads >= 192 else 1

    @property
    def stages(self) -> int:
        """Key tiles that fit beside two query blocks. 16 keep enough bytes in flight for a memory-bound kernel.
        Warpgroups that alternate in tiles each have their own stages, so that each sees every barrier phase."""
        fitting = min(16, (SMEM_LIMIT_BYTES - self._tasks_bytes - 512) // (self._tile_bytes + 16))
        return fitting if self.splits_queries else fitting // self.warpgroups * self.warpgroups

    @property
    def smem_bytes(self) -> int:
        """Size of `LogitsStorage`: operands, barriers, per-warp sums, their total, and a three-number share."""
        used = self._tasks_bytes + self.stages * (self._tile_bytes + 16) + 4 * 8 + 4 * (self.threads // 32 + 1 + 3)
        return round_up(used, 1024)

    @property
    def _tasks_bytes(self) -> int:
        """Two tasks: tiles and row; a range per query; elements and a weight per head."""
        return 2 * (16 + self.block_queries * (8 + self.heads * (self.head_dim + 4)))

    @property
    def _tile_bytes(self) -> int:
        return LOGITS_TILE * (self.head_dim + 4)


LOGITS_TILE = 64
"""Keys per tile and per cache page."""

_LOGITS_FIELDS = (
    *("head_dim", "heads", "queries", "block_queries", "parts", "stages", "warpgroups", "splits_queries", "paged"),
    *("output", "threads", "math_registers", "producer_registers", "smem_bytes"),
)
"""Fields of the CUDA LogitsConfig (include/deep_tile/logits_config.cuh), in order; `output` is `out_format` there."""


def logits_source(kernel: LogitsKernel, watch: Watch | None = None) -> str:
    """CUDA C++ for kernel `kernel.name`, self-contained; `watch` as for `kernel_source`."""
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
    CastKernel
    | TransposedKernel
    | BothKernel
    | GatedKernel
    | NormKernel
    | CombineKernel
    | UnpackKernel
    | SortKernel
    | LogitsKernel
    | _ThinKernels
)
"""A kernel that no GemmConfig describes: the facts that its text depends on. Most are bound by memory. `threads` counts
a thread block's; `blocks_per_sm` thread blocks must fit into an SM's registers at once."""


def streaming_source(kernel: StreamingKernel) -> str:
    """CUDA C++ for kernel `kernel.name`, self-contained as by `kernel_source`. Most such kernels only pass their
    parameters to the function `kernel.function`.

    The parameters are no __grid_constant__: read in place, they make the tiled FP32 cast spill (NVRTC 13.0.88).
    """
    if isinstance(kernel, (LogitsKernel, ThinKernel)):
        return logits_source(kernel) if isinstance(kernel, LogitsKernel) else thin_source(kernel)
    entry = f"""\
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks_per_sm})
{kernel.name}(const {kernel.table.name} params) {{
    deep_tile::{kernel.function}(params);
}}
"""
    return "\n".join(filter(None, [kernel.table.text, kernel.constants, _headers(kernel.header), entry]))


@lru_cache(maxsize=4)
def _headers(*first: str) -> str:
    """Our headers with every include pasted in at its first use."""
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
