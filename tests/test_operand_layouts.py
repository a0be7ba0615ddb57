"""The way of operands from tensors to WGMMA, on a CPU: maps, boxes, swizzles and descriptors meet, in every layout.

The kernel's own text, compiled as C++ with host_warp.h, says what a producer asks TMA for and which descriptors math
warps give to WGMMA. What those do with it is modelled here by the PTX ISA: "cp.async.bulk.tensor" with "Swizzling
Modes", and "Asynchronous Warpgroup Level Matrix Shared Memory Layout". The products that come of it are exact.
"""

import ctypes
import re
from functools import cache
from itertools import product
from typing import NamedTuple

import changes
import numpy as np
import pytest
import torch
from on_host import load, without_assembly

from deep_tile import codegen, dense, params, plan
from deep_tile.config import MMA_M, GemmConfig, ceil_div, round_up
from deep_tile.kinds import LAYOUTS
from deep_tile.problem import GemmProblem

STEP = changes.share_of(
    *("include/deep_tile/*", "tests/host_*.h", "deep_tile/codegen.py", "deep_tile/params.py", "deep_tile/plan.py"),
    *("deep_tile/config.py", "deep_tile/kinds.py", "deep_tile/dense.py", "csrc/*", "tests/test_operand_layouts.py"),
    "tests/on_host.py",
)
"""One in so many configs is compiled and tested."""

ASSEMBLY = {
    r'asm volatile\(\s*"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global[^"]*\.multicast::cluster"': (
        "host_request(smem, &map, inner, outer, cta_mask);"
    ),
    r'asm volatile\(\s*"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global': (
        "host_request(smem, &map, inner, outer, 0);"
    ),
    r'asm volatile\("mbarrier\.arrive\.expect_tx': "host_announce(bytes);",
    r'asm\("mov\.u32 %0, %%cluster_ctarank': "rank = host_rank;",
    r'asm\("mapa\.shared::cluster': "host_map(cta_rank);",
    r"asm(?: volatile)?\(": ";",
}
"""Replacements of instructions by their prefixes. The last one, for all others, does nothing."""

PROGRAM = """
#include "host_warp.h"
{struct}
struct Trace {{
    const GemmParams* params;
    const char* smem;
    long long* numbers;
}};
inline Trace trace;
inline unsigned host_rank;

// By one lane, as on a GPU.
inline void host_write(long long number) {{
    if (threadIdx.x == 0) *trace.numbers++ = number;
}}
// By each lane.
inline void host_map(unsigned rank) {{
    for (long long number : {{-6LL, (long long)threadIdx.x, (long long)rank}}) *trace.numbers++ = number;
}}
inline unsigned long long host_shared(const void* at) {{ return static_cast<const char*>(at) - trace.smem; }}
inline void host_announce(unsigned bytes) {{ host_write(-1), host_write(bytes); }}
inline void host_request(unsigned smem, const TensorMap* map, int inner, int outer, unsigned receivers) {{
    host_write(-2), host_write(smem), host_write(reinterpret_cast<const char*>(map) - (const char*)trace.params);
    host_write(inner), host_write(outer), host_write(receivers);
}}
template <int count>
void wgmma(float (&)[count], unsigned long long a, unsigned long long b, int accumulate) {{
    host_write(-3), host_write(a), host_write(b), host_write(accumulate);
}}

{headers}

alignas(1024) char storage[232448];

// What a producer requests of one K block of the tile that begins at [m, n], alone or with its peers.
template <deep_tile::GemmConfig config, bool alone>
void request(const GemmParams& params, int m, int n, int stage, int step) {{
    auto& smem = *reinterpret_cast<deep_tile::SharedStorage<config>*>(storage);
    deep_tile::DenseTile tile{{m, n, true}};
    const deep_tile::OperandLoader<config, !alone && config.multicast()> loader(params, smem, tile);
    loader.load_b(stage, step);
    loader.load_a(stage, step);
}}

template <deep_tile::GemmConfig config>
void multiply(const GemmParams& params, int stage, int warpgroup) {{
    auto& smem = *reinterpret_cast<deep_tile::SharedStorage<config>*>(storage);
    deep_tile::MmaSum<config> sums[config.chunks_m][config.chunks_n][config.mma_n / 2];
    deep_tile::MathWarpgroup<config> math(params, smem, warpgroup);
    for (int i = 0; i < stage; ++i) math.advance();
    math.template begin_sums<true>(sums);
}}

template <deep_tile::GemmConfig config>
void trace_stage(const GemmParams& params, const int* tile, bool alone, long long* numbers) {{
    static_assert(sizeof(deep_tile::SharedStorage<config>) == config.smem_bytes);
    HostWarp::run(0, 1, [&] {{
        if (threadIdx.x == 0) trace = {{&params, storage, numbers}};
        const auto [m, n, stage, step] = reinterpret_cast<const int (&)[4]>(*tile);
        if (alone) request<config, true>(params, m, n, stage, step);
        else request<config, false>(params, m, n, stage, step);
        for (int warpgroup = 0; warpgroup < config.math_warpgroups; ++warpgroup) {{
            host_write(-4);
            multiply<config>(params, stage, warpgroup);
        }}
    }});
}}
"""

ENTRY = """
constexpr deep_tile::GemmConfig config_{number} = {config};
extern "C" void run_{number}(const GemmParams* params, unsigned rank, const int* tile, bool alone, long long* to) {{
    host_rank = rank;
    trace_stage<config_{number}>(*params, tile, alone, to);
}}
"""

TILES = (
    *(
        {"block_m": 64, "block_n": 16, "scale_blocks": 4},
        {"block_m": 64, "block_n": 32, "scale_blocks": 2, "split_k": 2},
    ),
    *({"block_m": 64, "block_n": 48, "cluster_m": 2}, {"block_m": 64, "block_n": 64, "cluster_n": 2}),
    *({"block_m": 64, "block_n": 256}, {"block_m": 128, "block_n": 96}, {"block_m": 128, "block_n": 128}),
    *({"block_m": 128, "block_n": 144, "cluster_n": 2}, {"block_m": 128, "block_n": 160, "cluster_m": 2}),
    *({"block_m": 128, "block_n": 192, "cluster_m": 2}, {"block_m": 128, "block_n": 256, "cluster_n": 2}),
    *({"block_m": 256, "block_n": 128, "cluster_n": 2}, {"block_m": 256, "block_n": 112, "cluster_m": 2}),
    *({"block_m": 64, "block_n": 96, "cluster_m": 4}, {"block_m": 128, "block_n": 80, "cluster_n": 4}),
    *({"block_m": 64, "block_n": 48, "cluster_m": 2, "cluster_n": 2, "scale_blocks": 2},),
    *({"block_m": 128, "block_n": 160, "cluster_m": 4, "cluster_n": 2},),
    *({"block_m": 128, "block_n": 64, "cluster_m": 2, "cluster_n": 4},),
    *({"block_m": 128, "block_n": 128, "cluster_m": 2, "cluster_n": 2, "split_k": 2},),
)
"""Boxes of `b` of 128, 64 and 32 bytes, alone and shared by two and four, with several K blocks each."""

TRANSPOSED_TILES = [
    {**tile, "transposed": True}
    for tile in (
        *({"block_m": 64, "block_n": 64, "cluster_n": 2}, {"block_m": 64, "block_n": 128, "split_k": 2}),
        *({"block_m": 128, "block_n": 144, "cluster_n": 2}, {"block_m": 128, "block_n": 224, "cluster_m": 2}),
        *({"block_m": 128, "block_n": 256, "cluster_m": 2}, {"block_m": 256, "block_n": 96}),
        *({"block_m": 256, "block_n": 144, "cluster_m": 2, "cluster_n": 2},),
        *({"block_m": 128, "block_n": 192, "cluster_n": 2, "split_k": 2},),
    )
]
CONFIGS = [
    GemmConfig(**tile, stages=2, store_buffers=1, kind=("bf16", "fp16")[number % 2], layout=layout)
    for layout in LAYOUTS
    for number, tile in enumerate((*TILES, *TRANSPOSED_TILES))
][::STEP]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    headers = codegen._headers("operands.cuh", "warpgroup.cuh").replace("__cvta_generic_to_shared(", "host_shared(")
    headers = without_assembly(headers, {rf"{start}.*?\);": made for start, made in ASSEMBLY.items()}, re.DOTALL)
    entries = (ENTRY.format(number=i, config=codegen._fields(config)) for i, config in enumerate(CONFIGS))
    text = "\n".join([PROGRAM.format(struct=params.GEMM.text, headers=headers), *entries])
    return load(tmp_path_factory.mktemp("operands"), text)


@pytest.fixture(autouse=True)
def one_thread():
    """GEMMs here are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Trace(NamedTuple):
    """One stage's requests: announced bytes; (smem, map, inner, outer, receivers) of each request, with the multicast's
    mask or 0; for each math warpgroup (a, b, accumulate) of its WGMMAs, with 64-bit descriptors; (lane, block) for each
    lane of a math warp and the block in which it may give stages back."""

    announced: int
    requests: list[tuple[int, ...]]
    products: list[list[tuple[int, ...]]]
    peers: list[tuple[int, ...]]


def trace(library, config, argument, rank, tile, alone) -> Trace:
    numbers = (ctypes.c_longlong * 4096)(*([0] * 4096))
    getattr(library, f"run_{CONFIGS.index(config)}")(argument, rank, (ctypes.c_int * 4)(*tile), alone, numbers)
    found, values = Trace(0, [], [], []), iter(numbers)
    for what in values:
        if what == 0:
            return found
        if what == -4:
            found.products.append([])
            continue
        few = tuple(next(values) for _ in range({-1: 1, -2: 5, -3: 3, -6: 2}[what]))
        if what == -1:
            found = found._replace(announced=found.announced + few[0])
        elif what == -2:
            found.requests.append(few)
        elif what == -6:
            found.peers.append(few)
        else:
            found.products[-1].append((few[0] % 2**64, few[1] % 2**64, few[2]))
    raise AssertionError("no end")


# TMA and WGMMA.


def swizzled(address: np.ndarray, span: int) -> np.ndarray:
    """The swizzled place of a byte: 16-byte pieces move within their 128-byte row."""
    return address ^ ((address >> 7) % (span // 16) << 4)


@cache
def box_of(layout: params.MapLayout) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a box's bytes, in order."""
    return np.divmod(np.arange(layout.box[0] * layout.box[1]), layout.box[0])


def copy(smem: np.ndarray, at: int, memory: np.ndarray, layout: params.MapLayout, inner: int, outer: int) -> int:
    """Copy a box, with zeros beyond the tensor. Returns its bytes.

    Rows of a box narrower than the swizzle lie as far apart as the swizzle is wide. The PTX ISA does not say so; an
    H100 does it.
    """
    assert at % (8 * layout.swizzle_bytes) == 0 and layout.box[0] <= layout.swizzle_bytes
    y, x = box_of(layout)
    inside = (inner + x < layout.sizes[0]) & (outer + y < layout.sizes[1])
    source = np.where(inside, (outer + y) * layout.strides_bytes[0] + inner + x, 0)
    smem[swizzled(at + y * layout.swizzle_bytes + x, layout.swizzle_bytes)] = np.where(inside, memory[source], 0)
    return len(x)


def read(smem: np.ndarray, descriptor: int, rows: int, along_rows: bool) -> np.ndarray:
    """Read an operand of one WGMMA, [rows, 16] of 16 bits: "Canonical Layouts", "Strides"."""
    start, leading, stride = (((descriptor >> bit) % 2**14) << 4 for bit in (0, 16, 32))
    assert (descriptor >> 49) % 8 == 0, "base offset"
    span = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    row, k = np.arange(rows)[:, None], np.arange(16)[None]
    if along_rows:
        assert start % (8 * span) == 0
        each = span // 2
        address = start + row % each * 2 + row // each * leading + k % 8 * span + k // 8 * stride
    else:
        address = start + row % 8 * span + row // 8 * stride + k * 2
    address = swizzled(address, span)
    return smem[address].astype(np.uint16) | smem[address + 1].astype(np.uint16) << 8


def as_numbers(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.int16)).view(dtype).double()


# Products.


class Given(NamedTuple):
    """Operands of small integers, and their bytes from the first to the last."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def memory(self) -> dict[str, np.ndarray]:
        return {name: memory_of(x) for name, x in self._asdict().items()}


def memory_of(x: torch.Tensor) -> np.ndarray:
    end = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((end,), (1,)).contiguous().view(torch.uint8).numpy()


def make_operands(config: GemmConfig, m: int, n: int, k: int) -> Given:
    """Operands with spare elements between adjacent rows or columns."""
    majors, dtype = LAYOUTS[config.layout], getattr(torch, config.product.a.dtype)

    def made(rows: int, major: str) -> torch.Tensor:
        shape = (rows, k) if major == "k" else (k, rows)
        padded = torch.full((shape[0], round_up(shape[1], 8) + 8), float("nan"), dtype=dtype)
        padded[:, : shape[1]] = torch.randint(-8, 9, shape).to(dtype)
        return padded[:, : shape[1]] if major == "k" else padded[:, : shape[1]].t()

    return Given(made(m, majors.a), made(n, majors.b))


def multiply_tile(library, config: GemmConfig, given: Given, m: int, n: int, alone: bool) -> list[torch.Tensor]:
    """Multiply the kernel's tile at [m, n] and those of its cluster's other blocks, which follow it: float64 sums. Of
    split K, the last part's blocks do so."""
    k = given.a.shape[1]
    problem = GemmProblem(
        *(given.a.shape[0], given.b.shape[0], k), kind=config.kind, output=config.output, layout=config.layout
    )
    tensors = (*given[:2], torch.empty(problem.m, problem.n), None)
    layout = dense.GEMM.layout(tensors, problem.product)
    assert dense.GEMM.problem(tensors, dense.Options(num_sms=132)) == (
        problem._replace(output="fp32", tma_store=problem.n % 4 == 0)
    )
    argument = plan.pack_params(problem, config, layout, early_b=False)
    maps = {offset: (name, map_) for offset, name, map_ in plan.tensor_maps(problem, config, layout)}
    spans = dict(zip(config.sides("a", "b"), (config.a_span, config.b_span), strict=True))
    blocks = config.cluster_m * config.cluster_n
    first = config.cluster - blocks
    sums = [torch.zeros(config.block_m, config.block_n, dtype=torch.float64) for _ in range(blocks)]
    memory = given.memory
    for step in range(ceil_div(k, config.block_k)):
        stage, smems = step % config.stages, [np.full(config.smem_bytes, 0xFF, np.uint8) for _ in range(blocks)]
        arrived, traces = [0] * blocks, []
        for rank in range(blocks):
            at = m + rank % config.cluster_m * config.block_m, n + rank // config.cluster_m * config.block_n
            traces.append(trace(library, config, argument, first + rank, (*at, stage, step), alone))
            for smem, offset, inner, outer, receivers in traces[-1].requests:
                name, map_ = maps[offset]
                assert inner < map_.sizes[0] or not spans[name], "a box without rows"
                for block in blocks_of(receivers >> first) if receivers else (rank,):
                    arrived[block] += copy(smems[block], smem, memory[name], map_, inner, outer)
        assert arrived == [one.announced for one in traces]
        if config.cluster_m > 1 and config.cluster_n > 1:  # nobody gets ahead of peers for want of something to await
            assert all({maps[request[1]][0] for request in one.requests} == {"a", "b"} for one in traces)
        assert [peers_in(config, one) for one in traces] == [sharers(config, first + rank) for rank in range(blocks)]
        for smem, one, total in zip(smems, traces, sums, strict=True):
            add_products(config, smem, one, total)
    return sums


def blocks_of(mask: int) -> list[int]:
    return [block for block in range(mask.bit_length()) if mask >> block & 1]


def sharers(config: GemmConfig, rank: int) -> list[int]:
    """The blocks that share an operand with another one of the same K part: those of its row and of its column."""

    def place(rank: int) -> tuple[int, int, int]:
        blocks = config.cluster_m * config.cluster_n
        return rank // blocks, rank % blocks // config.cluster_m, rank % config.cluster_m

    def differences(other: int) -> list[bool]:
        return [mine != its for mine, its in zip(place(rank), place(other), strict=True)]

    return [
        other for other in range(config.cluster) if differences(other) in ([False, True, False], [False, False, True])
    ]


def peers_in(config: GemmConfig, one: Trace) -> list[int]:
    """The blocks in which the first lanes of a math warp give stages back; each warpgroup's do so alike."""
    peers = config.cluster_m + config.cluster_n - 2
    found = [block for lane, block in one.peers if lane < peers]
    assert len(found) == peers * config.math_warpgroups
    return sorted({*found})


def add_products(config: GemmConfig, smem: np.ndarray, one: Trace, sums: torch.Tensor) -> None:
    *_, along_m, along_n = map(int, re.search(r"p, 1, 1, (\d), (\d);", codegen._wgmma(config)).groups())
    dtype, each = getattr(torch, config.product.a.dtype), config.scale_blocks * 4
    for warpgroup, products in enumerate(one.products):
        assert len(products) == config.chunks_m * each
        for chunk in range(config.chunks_m):
            a, b, accumulate = zip(*products[chunk * each : (chunk + 1) * each], strict=True)
            assert accumulate == (0, *[1] * (each - 1))
            left = np.hstack([read(smem, descriptor, MMA_M, bool(along_m)) for descriptor in a])
            right = np.hstack([read(smem, descriptor, config.mma_n, bool(along_n)) for descriptor in b])
            first = warpgroup * config.rows_per_warpgroup + chunk * MMA_M
            sums[first : first + MMA_M] += as_numbers(left, dtype) @ as_numbers(right, dtype).t()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_operands_meet(library, config):
    """Tiles in the middle and at the edges, and tiles of clusters beyond the matrix. K ends within a block."""
    tile_m, tile_n = config.block_m * config.cluster_m, config.block_n * config.cluster_n
    for m, n, k in ((tile_m + 9, tile_n + 13, config.block_k + 37), (3, 5, 2)):
        given = make_operands(config, *config.sides(m, n), k)
        exact = given.a.double() @ given.b.double().t()
        exact = exact.t() if config.transposed else exact
        for row, column in product(range(0, m, tile_m), range(0, n, tile_n)):
            for alone in (False, True) if config.multicast else (True,):
                for rank, sums in enumerate(multiply_tile(library, config, given, row, column, alone)):
                    first_m = row + rank % config.cluster_m * config.block_m
                    first_n = column + rank // config.cluster_m * config.block_n
                    wanted = exact[first_m : first_m + config.block_m, first_n : first_n + config.block_n]
                    found = sums[: wanted.shape[0], : wanted.shape[1]]
                    assert torch.equal(found, wanted), (m, n, k, first_m, first_n)
