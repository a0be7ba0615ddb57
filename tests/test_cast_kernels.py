"""The casts' kernels, run on a CPU: their text, compiled as C++ with host_cuda.h, gives the definition's bits; that of
`silu_mul`, which has approximations of its own, what is within its bounds.

What it cannot show is what ptxas makes of the text, and what a GPU makes of memory. test_quantize_gpu.py does.
"""

import ctypes
import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from formats import NAMES_OF_PACKED, draw
from helpers import CHOICES, assert_cast_within, assert_silu_mul_cast, norm_bounds, some_choices
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantize import EACH_OPTION, assert_same, codes, wide_matrix

from deep_tile import both, combine, experts, gated, norms, pack_weight, packed, params, quantize, sources, transposed
from deep_tile import cast as kernels
from deep_tile.codegen import SortKernel, streaming_source
from deep_tile.config import ceil_div, round_up
from deep_tile.quantize import FP8_DTYPE, per_block_cast_to_fp8, per_token_cast_to_fp8

pytestmark = pytest.mark.about(
    *("include/deep_tile/*", "tests/host_*.h", "deep_tile/cast.py", "deep_tile/codegen.py", "deep_tile/params.py"),
    *("deep_tile/quantize.py", "deep_tile/transposed.py", "deep_tile/experts.py", "deep_tile/sources.py"),
    *(
        "deep_tile/reference.py",
        "deep_tile/both.py",
        "deep_tile/gated.py",
        "deep_tile/norms.py",
        "deep_tile/select/streaming.py",
        "tests/test_quantize.py",
    ),
    "tests/helpers.py",
)

POISON = 0x55
CASTS = {1: per_token_cast_to_fp8, 128: per_block_cast_to_fp8}
DTYPES = {source: dtype for dtype, source in quantize.KERNEL_SOURCES.items()}
ASSEMBLY = {
    r'asm\("max\.u16x2 .*?;" : "=r"\(larger\) : "r"\(a\), "r"\(b\)\);': "larger = host_max_u16x2(a, b);",
    r'asm\("mul\.rn\.bf16x2 .*?;" : "=r"\(products\) : "r"\(a\), "r"\(b\)\);': "products = host_mul_bf16x2(a, b);",
    r'asm\("cvt\.f32\.f16 .*?;" : "=f"\(value\) : "h"\(half\)\);': "value = host_f32_of_f16(half);",
    r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32 .*?;" : "=h"\(packed\) : "f"\(high\), "f"\(low\)\);': (
        "packed = host_e4m3x2(high, low);"
    ),
    r'asm\("\{[^}]*rcp\.approx\.ftz\.f32 [^}]*\}"\s*: "=f"\(reciprocal\)\s*: "f"\(x\)\);': (
        "reciprocal = host_normal_reciprocal(x);"
    ),
    r'asm volatile\("griddepcontrol\.\w+;" ::: "memory"\);': "",
}
ASSEMBLY_OF_ROWS = {
    r'asm\("min\.NaN\.f32 .*?;" : "=f"\(smaller\) : "f"\(a\), "f"\(b\)\);': "smaller = host_min_nan(a, b);",
    r'asm\("max\.NaN\.f32 .*?;" : "=f"\(larger\) : "f"\(a\), "f"\(b\)\);': "larger = host_max_nan(a, b);",
    r'asm\("ex2\.approx\.ftz\.f32 .*?;" : "=f"\(power\) : "f"\(x\)\);': "power = host_ex2(x);",
    r'asm\("rcp\.approx\.ftz\.f32 .*?;" : "=f"\(reciprocal\) : "f"\(x\)\);': "reciprocal = host_normal_reciprocal(x);",
}
"""Assembly that only casts of rows have."""

ASSEMBLY_OF_NORM = {
    r'asm\("cvt\.rn\.bf16x2\.f32 .*?;" : "=r"\(packed\) : "f"\(high\), "f"\(low\)\);': (
        "packed = host_bf16x2(high, low);"
    ),
}

ASSEMBLY_OF_COMBINE = {
    **ASSEMBLY_OF_NORM,
    r'asm volatile\("griddepcontrol\.\w+;" ::: "memory"\);': "",
}

ASSEMBLY_OF_UNPACK = {
    **{pattern: ASSEMBLY[pattern] for pattern in ASSEMBLY if "satfinite" in pattern or "griddepcontrol" in pattern},
    r'asm\("prmt\.b32 .*?;" : "=r"\(bytes\) : "r"\(x\), "r"\(y\), "r"\(selector\)\);': (
        "bytes = __byte_perm(x, y, selector);"
    ),
}

ASSEMBLY_OF_GATED = {
    **ASSEMBLY,
    **ASSEMBLY_OF_ROWS,
    **ASSEMBLY_OF_NORM,
    r'asm\("cvt\.rn\.f16x2\.e4m3x2 .*?;" : "=r"\(packed\) : "h"\(codes\)\);': "packed = host_f16x2_of_e4m3x2(codes);",
    r"extern __shared__ uint4 dynamic_vectors\[\];": "auto* dynamic_vectors = &host_shared<uint4>();",
}

ASSEMBLY_OF_SORT = {
    r"__shared__ (SortStorage<threads>) smem;": r"auto& smem = host_shared<\1>();",
    r'asm\("mapa\.\S+ %0, %1, %2;" : "=r"\(remote\) : "r"\(smem\), "r"\(cta_rank\)\);': (
        "remote = host_mapa(smem, cta_rank);"
    ),
    r'asm volatile\("mbarrier\.init\.[^;]*;" ::"r"\(barrier\), "r"\(arrivals\) : "memory"\);': (
        "host_barrier(barrier) = {int(arrivals), 0};"
    ),
    r'asm volatile\("mbarrier\.arrive\.expect_tx\.[^;]*;" ::"r"\(barrier\), "r"\(bytes\) : "memory"\);': (
        "host_mbarrier_arrive_expect_tx(barrier, bytes);"
    ),
    r'(?s)asm volatile\(\s*"\{\\n"\s*"\.reg \.pred p;\\n"\s*"mbarrier\.try_wait\.parity.*?: "memory"\);': (
        "done = host_mbarrier_try_wait(barrier);"
    ),
    r'asm volatile\("(fence\.mbarrier_init|griddepcontrol)\.[\w.]+;" ::: "memory"\);': "",
    r'asm volatile\("barrier\.cluster\.arrive\.[\w.]+;" ::: "memory"\);': "++cluster_arrived;",
    r'asm volatile\("barrier\.cluster\.wait\.[\w.]+;" ::: "memory"\);': "host_barrier_cluster_wait();",
    r'asm volatile\("st\.async\.\S+\.u32 .*?;"\s*::"r"\(remote\), "r"\(value\), "r"\(\w+\)\s*: "memory"\);': (
        "host_st_async(remote, value, remote_barrier);"
    ),
}


HOST_CUDA = Path(__file__).with_name("host_cuda.h")
COMPILER = ("c++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-w")


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Run a kernel on CPU tensors. Each kernel compiles once; the headers that all include compile once before."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    directory, libraries = tmp_path_factory.mktemp("kernels"), {}
    subprocess.run([*COMPILER, "-x", "c++-header", HOST_CUDA, "-o", directory / "host_cuda.h.gch"], check=True)

    def run(kernel, grid, layout, *tensors, places=kernels.PLACES, cluster=1):
        if kernel not in libraries:
            libraries[kernel] = compile_for_host(kernel, directory)
        argument = bytearray(kernel.table.pack(**layout))
        for offset, number, _ in kernel.table.pointers(places):
            argument[offset : offset + 8] = tensors[number].data_ptr().to_bytes(8, "little")
        libraries[kernel].run(bytes(argument), grid, cluster)

    return run


def assembly_of(kernel):
    if isinstance(kernel, SortKernel):
        return ASSEMBLY_OF_SORT
    if kernel == kernels.COMBINE:
        return ASSEMBLY_OF_COMBINE
    if kernel in kernels.UNPACK.values():
        return ASSEMBLY_OF_UNPACK
    if kernel in kernels.GATED.values():
        return ASSEMBLY_OF_GATED
    if kernel in kernels.NORM.values():
        return ASSEMBLY | ASSEMBLY_OF_NORM
    if kernel in (*kernels.TRANSPOSED.values(), *kernels.BOTH.values()):
        return ASSEMBLY
    return ASSEMBLY if kernel.what == "plain" else ASSEMBLY | ASSEMBLY_OF_ROWS


def compile_for_host(kernel, directory):
    text = streaming_source(kernel)
    assembly = assembly_of(kernel)
    for pattern, replacement in assembly.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, pattern
    source, library = directory / f"{kernel.name}.cpp", directory / f"{kernel.name}.so"
    source.write_text(f"""\
#include "host_cuda.h"
{text}
extern "C" void run(const {kernel.table.name}* params, unsigned grid, unsigned cluster) {{
    host_launch({kernel.name}, *params, grid, {kernel.threads}, cluster);
}}
""")
    subprocess.run([*COMPILER, "-shared", f"-I{HOST_CUDA.parent}", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def each_kernel(what):
    found = [kernel for kernel in kernels.cast_kernels() if kernel.what == what]
    return pytest.mark.parametrize("kernel", found, ids=lambda kernel: kernel.name)


EACH_KERNEL = each_kernel("plain")
FLOORS = [1e-4, 2.0**-80, 2.0**-100, quantize.SMALLEST_AMAX_FLOOR]


@EACH_KERNEL
@EACH_OPTION
def test_bits_are_the_definitions(launch, kernel, options):
    dtype = DTYPES[kernel.source]
    for (rows, k), floor in itertools.product([(5, 400), (3, 301), (131, 264)], FLOORS):
        x = wide_matrix(rows, k, dtype)
        x[0, 0], x[rows // 2, 260] = float("nan"), float("inf")
        x[1, 128] = 448  # in groups of zeros: at the edge of a power of two, and behind it
        x[2, 128] = x[1, 128].nextafter(x[rows // 2, 260])
        assert_as_defined(launch, kernel, x, {"amax_floor": floor, **options})


MIDDLES = torch.cat([torch.arange(0.5, 8), *(torch.arange(8.5, 16) * 2**e for e in range(15))]) * 2.0**-9
"""Between every two positive codes, and beyond the last one."""


@EACH_KERNEL
@pytest.mark.parametrize("exact", ["divide", "reciprocal"])
@pytest.mark.parametrize("exponent", [-116, -84, -72, -70, 0, 119])
def test_quotients_between_two_codes(launch, kernel, exact, exponent):
    """Elements next to the middle of two codes, where the way of dividing decides, each with the largest element of its
    group, which sets the scale. Scales range from the smallest one over those with unusual remainders to the
    largest."""
    dtype = DTYPES[kernel.source]
    if dtype == torch.float16 and exponent:
        pytest.skip("FP16 has no such numbers")
    amax = ((1 + torch.rand(4096, 1)) * 2.0**exponent).to(dtype)
    _, scale = per_token_cast_to_fp8(amax, exact=exact)
    values = (MIDDLES * scale).to(dtype).clamp(max=amax)
    divided, multiplied = (x.to(FP8_DTYPE).float() for x in (values / scale, values * (1 / scale)))
    differing = (divided != multiplied).sum(1).topk(3)
    assert differing.values.min() > 0
    x = values[differing.indices].flatten().repeat(130, 1)
    assert_as_defined(launch, kernel, x, {"exact": exact})


def assert_as_defined(launch, kernel, x, options):
    """The kernel writes into poisoned tensors what the cast gives on the CPU."""
    wanted = CASTS[kernel.block_rows](x, **options)
    out, scale = (y.clone().fill_(-7) for y in wanted)
    launch_cast(launch, kernel, x, quantize.Options(kernel.block_rows, **options), out, scale, {})
    assert_same((out, scale), wanted)


def launch_cast(launch, kernel, x, options, out, scale, lists, grid=2):
    """Launch as a call on a GPU does: on `x` or its copy, with the parameters that the call computes."""
    x = quantize.readable(x)
    layout = quantize.numbers_of(x, options, out, scale, lists)
    places = params.places(kernels.fields_of_rows((*lists,)))
    launch(kernel, grid, layout, x, out, scale, *lists.values(), places=places)


# ---- casts of rows

I32_LIMITS = [-(2**31), 2**31 - 1]
LIVING = {
    "all": {},
    "offs": {"offs": [3, 3, 40]},
    "no group ends after the first row": {"offs": [7, -5]},
    "offs that lie": {"offs": [2**31 - 1]},
    "counts": {"counts": [0, 13, 5, 1, 0]},
    "counts that lie": {"counts": [14, -3, *I32_LIMITS, 12]},
    "no row lives": {"counts": [0] * 5},
}
"""Lists of living rows, of 65 rows or of five groups of 13."""


def int32(**lists):
    return {name: torch.tensor(given, dtype=torch.int32) for name, given in lists.items()}


def grouped(x, lists):
    """The view that a call with these lists takes, of 65 rows."""
    return x.unflatten(0, (len(lists["counts"]), -1)) if "counts" in lists else x


GUARD_ROWS = 64


class Guarded:
    """Poisoned targets of a cast, as a call is given them, between rows that nothing may write to."""

    def __init__(self, x, options, lists):
        shape = sources.result_shape(x, options.gating is not None, lists)
        self._rows = math.prod(shape[:-1])
        whole = self._rows + 2 * GUARD_ROWS, shape[-1]
        self._out = torch.full(whole, -7.0).to(FP8_DTYPE)
        self._scale = torch.full(quantize.scale_shape(whole, (1, 128)), -7.0)
        self.matrices = tuple(y[GUARD_ROWS : GUARD_ROWS + self._rows] for y in (self._out, self._scale))
        self.targets = tuple(y.view(*shape[:-1], -1) for y in self.matrices)

    def assert_guards_intact(self):
        for y in (self._out.float(), self._scale):
            assert (y[:GUARD_ROWS] == -7).all() and (y[GUARD_ROWS + self._rows :] == -7).all()


def assert_rows_as_defined(launch, kernel, x, options, lists, grid=2):
    """The kernel writes into poisoned tensors what the definition does, and both skip the same rows."""
    options = quantize.Options(1, **options)
    by_kernel, by_definition = (Guarded(x, options, lists) for _ in range(2))
    quantize.definition(x.flatten(0, -2), options, *by_definition.matrices, lists)
    launch_cast(launch, kernel, x, options, *by_kernel.targets, lists, grid)
    by_kernel.assert_guards_intact()
    assert_same(by_kernel.matrices, by_definition.matrices)


def assert_silu_mul_in_bounds(launch, kernel, x, options, numbers, lists=None):
    """Kernel and definition are within the bounds, and both skip the same rows."""
    lists = lists or {}
    gating = sources.gating(*(numbers[name] for name in ("limit", "alpha", "beta")))
    options = quantize.Options(1, **options, gating=gating)
    matrix = x.flatten(0, -2)
    lives = sources.living(len(matrix), lists)
    lives = torch.ones(len(matrix), dtype=torch.bool) if lives is None else lives
    by_kernel, by_definition = (Guarded(x, options, lists) for _ in range(2))
    quantize.definition(matrix, options, *by_definition.matrices, lists)
    launch_cast(launch, kernel, x, options, *by_kernel.targets, lists)
    by_kernel.assert_guards_intact()
    for out, scale in (by_kernel.matrices, by_definition.matrices):
        rounding = {"amax_floor": options.floor, "round_scale": options.round_scale}
        assert_silu_mul_cast(matrix, out, scale, lives, **rounding, **numbers)
        assert (out[~lives].float() == -7).all() and (scale[~lives] == -7).all()


PLAIN = {"limit": None, "alpha": 1.0, "beta": 0.0}


@each_kernel("silu_mul")
@EACH_OPTION
def test_silu_mul_is_within_its_bounds(launch, kernel, options):
    """Values of all magnitudes and of usual ones; whole vectors and single elements."""
    dtype = DTYPES[kernel.source]
    for (rows, k), numbers in itertools.product(
        [(5, 400), (3, 301), (40, 264)],
        [PLAIN, {"limit": 7.0, "alpha": 1.702, "beta": 1.0}, {"limit": 30, "alpha": -0.3, "beta": 0}],
    ):
        for x in (wide_matrix(rows, 2 * k, dtype), (torch.randn(rows, 2 * k) * 12).to(dtype)):
            x[0, 0], x[1, k + 2], x[2, 200], x[2, 300] = float("nan"), float("nan"), float("inf"), float("-inf")
            x[1, 128:256] = -torch.linspace(0, 130, 128).to(dtype)  # to where the sigmoid ends
            assert_silu_mul_in_bounds(launch, kernel, x, {"amax_floor": 2.0**-80, **options}, numbers)


@each_kernel("silu_mul")
def test_each_product_of_silu_mul(launch, kernel):
    """Rows have one column, so that each product shows in an FP32 scale."""
    x = torch.stack([torch.empty(8192).uniform_(-25, 25), torch.randn(8192)], 1).to(DTYPES[kernel.source])
    numbers = {"limit": 20.0, "alpha": 1.702, "beta": 1.0}
    assert_silu_mul_in_bounds(launch, kernel, x, {"amax_floor": 2.0**-80}, numbers)


@each_kernel("silu_mul")
@pytest.mark.parametrize("lists", LIVING.values(), ids=LIVING)
def test_dead_rows_of_silu_mul(launch, kernel, lists):
    x = torch.randn(65, 2 * 136).to(DTYPES[kernel.source])
    assert_silu_mul_in_bounds(launch, kernel, grouped(x, lists), {}, PLAIN, int32(**lists))


@each_kernel("listed")
@pytest.mark.parametrize("lists", LIVING.values(), ids=LIVING)
@pytest.mark.parametrize("k", [136, 131])
def test_dead_rows_of_a_cast(launch, kernel, lists, k):
    x = wide_matrix(65, k, DTYPES[kernel.source])
    assert_rows_as_defined(launch, kernel, grouped(x, lists), {}, int32(**lists))


NO_MATRIX = {
    "first rows of groups": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "groups inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "along rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second column": lambda x: x.repeat_interleave(2, 2)[..., ::2],
    "one row for a group": lambda x: x[:, :1].expand_as(x),
}
"""Layouts of row groups that no matrix with adjacent columns can view."""


@pytest.mark.parametrize("kernel", kernels.cast_kernels(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("laid_out", NO_MATRIX.values(), ids=NO_MATRIX)
@pytest.mark.parametrize("rows", [5, 300])
def test_groups_that_are_no_view_of_a_matrix(launch, kernel, laid_out, rows):
    """Groups with fewer rows than columns, and with more."""
    dtype, counts = DTYPES[kernel.source], int32(counts=[rows, 3, 0, rows // 2])
    if kernel.what == "silu_mul":
        x = laid_out(torch.randn(4, rows, 2 * 136).to(dtype))
        assert_silu_mul_in_bounds(launch, kernel, x, {}, PLAIN, counts)
        return
    x = laid_out(wide_matrix(4 * rows, 136, dtype).unflatten(0, (4, -1)))
    if kernel.what == "listed":
        assert_rows_as_defined(launch, kernel, x, {}, counts)
    else:
        assert_as_defined(launch, kernel, x if kernel.block_rows == 1 else x[:, 0], {})


@each_kernel("listed")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lists", [{}, {"offs": [2, 70]}], ids=["all", "offs"])
def test_rows_by_an_index(launch, kernel, dtype, lists):
    limits = torch.iinfo(dtype)
    index = torch.cat([torch.randint(0, 9, (80,)), torch.tensor([-1, 9, 0, 8, limits.min, limits.max])]).to(dtype)
    for k in (264, 301):
        x = wide_matrix(9, k, DTYPES[kernel.source])
        for rows in (index, index.flip(0)):
            assert_rows_as_defined(launch, kernel, x, {}, {"rows": rows, **int32(**lists)})


@each_kernel("listed")
@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 255, 256, 257, 700, params.MOST_CAST_GROUPS])
def test_any_number_of_groups(launch, kernel, groups):
    x = torch.randn(groups, 3, 128).to(DTYPES[kernel.source])
    counts = torch.randint(-1, 5, (groups,), dtype=torch.int32)
    assert_rows_as_defined(launch, kernel, x, {}, {"counts": counts})


# ---- casts along tokens

OFFS = {
    "all": None,
    "ends within 128": [5, 130, 385, 600],
    "none lives": [0, 0],
    "beyond the last token": [128, 2**31 - 1],
    "falling": [400, 100, 500],
    "negative": [-5, -(2**31), 200],
    "more groups than threads": [*range(0, 600)],
}


def assert_transposed_as_defined(launch, kernel, x, options, lists, grid=2):
    """The kernel writes into poisoned tensors what the definition does, and both skip the same tokens."""
    options = transposed.CastOptions(**options)
    shape = x.shape[1], len(lists["rows"]) if "rows" in lists else len(x)
    by_kernel, wanted = (Guarded(torch.empty(shape), quantize.Options(1), {}) for _ in range(2))
    transposed.definition(x, options, *wanted.matrices, lists)
    x = quantize.readable(x)
    layout = transposed.numbers_of(x, options, *by_kernel.matrices, lists)
    given = x, *by_kernel.matrices, *lists.values()
    launch(kernel, grid, layout, *given, places=params.places(kernels.fields_of_tokens((*lists,))))
    by_kernel.assert_guards_intact()
    assert_same(by_kernel.matrices, wanted.matrices)


EACH_TRANSPOSED = pytest.mark.parametrize("kernel", kernels.TRANSPOSED.values(), ids=lambda kernel: kernel.name)


@EACH_TRANSPOSED
@EACH_OPTION
def test_transposed_bits_are_the_definitions(launch, kernel, options):
    for (tokens, columns), floor in itertools.product([(1, 1), (3, 400), (300, 301), (131, 264)], FLOORS):
        along_tokens = wide_matrix(columns, tokens, DTYPES[kernel.source]).t()  # each column of another magnitude
        for x in (along_tokens, along_tokens.contiguous()):
            x[0, 0], x[tokens // 2, columns // 2] = float("nan"), float("inf")
            assert_transposed_as_defined(launch, kernel, x, {"amax_floor": floor, **options}, {})


@EACH_TRANSPOSED
@pytest.mark.parametrize("alignment", [128, 256])
@pytest.mark.parametrize("offs", OFFS.values(), ids=OFFS)
def test_transposed_tokens_of_groups(launch, kernel, offs, alignment):
    lists = {} if offs is None else int32(offs=offs)
    for columns in (136, 131):
        x = wide_matrix(610, columns, DTYPES[kernel.source])
        assert_transposed_as_defined(launch, kernel, x, {"alignment": alignment}, lists, grid=3)


@EACH_TRANSPOSED
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_transposed_tokens_by_an_index(launch, kernel, dtype):
    limits = torch.iinfo(dtype)
    rows = torch.cat([torch.randint(0, 9, (280,)), torch.tensor([-1, 9, 0, 8, limits.min, limits.max])]).to(dtype)
    for lists in ({"rows": rows}, {"rows": rows, **int32(offs=[3, 270])}):
        x = wide_matrix(9, 131, DTYPES[kernel.source])
        assert_transposed_as_defined(launch, kernel, x, {}, lists)


# ---- casts both ways

OF_BOTH = {what: [kernel for key, kernel in kernels.BOTH.items() if key[0] == what] for what in both._FIELDS}
EACH_ROWS, EACH_BOTH, EACH_TILES = (
    pytest.mark.parametrize("kernel", of_them, ids=lambda kernel: kernel.name)
    for of_them in (OF_BOTH["rows"], OF_BOTH["rows"] + OF_BOTH["mixed"], OF_BOTH["tiles"])
)


SHAPES_OF_BOTH = [(1, 1), (3, 400), (300, 301), (131, 264)]


def guarded_like(made):
    """Poisoned tensors of these shapes and strides, and the memory around them."""
    memory = [torch.full((x.untyped_storage().nbytes() + 64,), POISON, dtype=torch.uint8) for x in made]
    inner = [m[32:-32].view(x.dtype).as_strided(x.shape, x.stride()) for m, x in zip(memory, made, strict=True)]
    return inner, memory


def assert_both_as_defined(launch, kernel, made, layout, lists, given, define, grid):
    """Kernel and definition write the same bytes, and leave the same alone; none around them or between rows."""
    (by_kernel, written), (wanted, expected) = (guarded_like(made) for _ in range(2))
    define(wanted)
    fields = (*both._FIELDS[kernel.what], *({"rows": "index", "offs": "ends"}[name] for name in lists))
    launch(kernel, grid, layout, *given(by_kernel), *lists.values(), places=params.places(fields))
    for got, own, like in zip(written, expected, made, strict=True):
        assert torch.equal(bits_of(got, like.dtype), bits_of(own, like.dtype))


def bits_of(memory, dtype):
    """NaN of any kind as one."""
    if dtype == torch.float32:
        return torch.where(memory.view(dtype).isnan(), -1, memory.view(torch.int32))
    return codes(memory.view(dtype)) if dtype == FP8_DTYPE else memory


def odd_matrix(shape, dtype):
    """Columns and rows of other magnitudes, NaN and infinity."""
    x = wide_matrix(*shape, dtype)
    x[0, 0], x[shape[0] // 2, shape[1] // 2] = float("nan"), float("inf")
    return x


def both_as_defined(launch, kernel, x, options, lists, grid=2):
    """Tokens of no group are left alone along k, too, where the definition casts them."""
    options = both.BothOptions(**options, blocks=kernel.what == "mixed")
    of_lists = lists.get("rows"), lists.get("offs")
    _, *made, _, _ = given = both.CAST_BOTH.allocated((x, *[None] * 4, *of_lists), options)

    def define(inner):
        both.CAST_BOTH.define((x, *inner, *of_lists), options)
        if "offs" in lists:
            tokens = torch.arange(len(inner[0]))
            dead = tokens % 128 >= transposed._living(lists["offs"], len(tokens), options.alignment)[tokens // 128]
            inner[0].view(torch.uint8)[dead] = POISON
            inner[1].view(torch.int32)[dead] = int.from_bytes(bytes([POISON] * 4), "little")

    assert_both_as_defined(
        *(launch, kernel, made, both.CAST_BOTH.numbers(given, options), lists),
        given=lambda inner: (x, *inner),
        define=define,
        grid=grid,
    )


@EACH_BOTH
@EACH_OPTION
def test_both_bits_are_the_definitions(launch, kernel, options):
    for shape, floor in zip(SHAPES_OF_BOTH, FLOORS, strict=True):
        x = odd_matrix(shape, DTYPES[kernel.source])
        both_as_defined(launch, kernel, x, {"amax_floor": floor, **options}, {})


@EACH_ROWS
@pytest.mark.parametrize("offs", OFFS.values(), ids=OFFS)
def test_both_of_groups(launch, kernel, offs):
    for columns, alignment in ((136, 128), (131, 256)):
        x = wide_matrix(610, columns, DTYPES[kernel.source])
        both_as_defined(launch, kernel, x, {"alignment": alignment}, {} if offs is None else int32(offs=offs), grid=3)


@EACH_BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_of_tokens_by_an_index(launch, kernel, dtype):
    limits = torch.iinfo(dtype)
    rows = torch.cat([torch.randint(0, 9, (280,)), torch.tensor([-1, 9, 0, 8, limits.min, limits.max])]).to(dtype)
    for lists in ({"rows": rows}, {"rows": rows, **int32(offs=[3, 270])})[: 1 if kernel.what == "mixed" else 2]:
        both_as_defined(launch, kernel, wide_matrix(9, 131, DTYPES[kernel.source]), {}, lists)


@EACH_TILES
@EACH_OPTION
def test_weights_bits_are_the_definitions(launch, kernel, options):
    for (shape, floor), count in itertools.product(zip(SHAPES_OF_BOTH, FLOORS, strict=True), [0, 3]):
        dtype = DTYPES[kernel.source]
        w = torch.stack([odd_matrix(shape, dtype) for _ in range(count)]) if count else odd_matrix(shape, dtype)
        all_options = both.CAST_WEIGHT.Options(amax_floor=floor, **options)
        _, *made = given = both.CAST_WEIGHT.allocated((w, None, None, None), all_options)
        assert_both_as_defined(
            *(launch, kernel, made, both.CAST_WEIGHT.numbers(given, all_options), {}),
            given=lambda inner, w=w: (w, *inner),
            define=lambda inner, w=w, o=all_options: both.CAST_WEIGHT.define((w, *inner), o),
            grid=2,
        )


@pytest.mark.parametrize("shape", [(1, 1), (3, 400), (300, 301), (131, 272), (3, 130, 48), (2, 5, 9)], ids=str)
@pytest.mark.parametrize("gap", [0, 16, 3])
def test_bytes_are_transposed(launch, shape, gap):
    *leading, columns = shape
    x = torch.randint(0, 256, (*leading, columns + gap), dtype=torch.uint8)[..., :columns]
    _, made = given = both.TRANSPOSE_FP8.allocated((x, None), ())
    assert_both_as_defined(
        *(launch, *OF_BOTH["codes"], (made,), both.TRANSPOSE_FP8.numbers(given, ()), {}),
        given=lambda inner: (x, *inner),
        define=lambda inner: inner[0].copy_(x.mT),
        grid=3,
    )


# ---- the gradient of SwiGLU, cast both ways

EACH_GATED = pytest.mark.parametrize("kernel", kernels.GATED.values(), ids=lambda kernel: kernel.name)


def draw_gated(kernel, rows, columns, gates):
    """dh, gates and ups, and their scale where they are codes: of any magnitude, with NaN and infinity."""
    dh, ups = (wide_matrix(rows, columns, torch.bfloat16) for _ in range(2))
    dh[0, 0], ups[rows // 2, 1] = float("nan"), float("inf")
    gate_up = torch.cat([gates, ups], 1).bfloat16()
    if kernel.source == "bf16":
        return dh, gate_up, {}
    gate_up, scale = per_token_cast_to_fp8(gate_up.clamp(-3e4, 3e4), round_scale="pow2")
    return dh, gate_up, {"gate_up_scale": scale}


def gated_by_kernel(launch, kernel, dh, gate_up, options, given):
    """Results of the kernel and of the definition in poisoned tensors; no stray write."""
    options = both.BothOptions(**{"amax_floor": 0} | options, blocks=kernel.blocks)
    lists = [given.get(name) for name in gated.SWIGLU_GRADIENT.lists]
    both_of_them = []
    for by_kernel in (True, False):
        _, _, *made, _, _, _ = gated.SWIGLU_GRADIENT.allocated((dh, gate_up, *[None] * 4, *lists), options)
        inner, memory = guarded_like(made)
        call = dh, gate_up, *inner, *lists
        if by_kernel:
            layout = gated.SWIGLU_GRADIENT.numbers(call, options)
            fields = "dh", "x", "row_out", "row_scale", "out", "scale", *(gated._FIELDS[name] for name in given)
            _, grid = kernels.choose_gated(kernel.source, kernel.blocks, *dh.shape)
            launch(kernel, grid, layout, dh, gate_up, *inner, *given.values(), places=params.places(fields))
            for m in memory:
                assert (m[:32] == POISON).all() and (m[-32:] == POISON).all()
        else:
            gated.SWIGLU_GRADIENT.define(call, options)
        both_of_them.append(gated.parts_of(gated.Made(*inner), kernel.blocks, "share" in given))
    return both_of_them


@EACH_GATED
@EACH_OPTION
def test_gradients_of_exact_sigmoids_have_the_definitions_bits(launch, kernel, options):
    """With sigmoids of 0, 1/2 and 1 nothing is approximate, so that all products and casts show."""
    for (rows, columns), floor, shares in zip(
        [(1, 128), (131, 256), (300, 128)], FLOORS[:3], [False, True, True], strict=True
    ):
        gates = torch.tensor([0.0, 200.0, -200.0, 1000.0])[torch.randint(4, (rows, columns))]
        dh, gate_up, given = draw_gated(kernel, rows, columns, gates)
        given |= {"share": torch.rand(rows)} if shares else {}
        got, wanted = gated_by_kernel(
            launch, kernel, dh, gate_up, {"amax_floor": floor, "alignment": 128, **options}, given
        )
        for name, one, other in zip(got._fields[:6], got[:6], wanted[:6], strict=True):
            if one.dtype == FP8_DTYPE:
                assert torch.equal(codes(one), codes(other)), name
            else:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@EACH_GATED
def test_gradients_are_near_the_definitions(launch, kernel):
    """With any gates a BF16 number may be the neighbour of the definition's, and its code with it."""
    dh, gate_up = (torch.randn(200, n).bfloat16() * 3 for n in (256, 512))
    given = {"share": torch.rand(200)}
    if kernel.source == "e4m3":
        gate_up, given["gate_up_scale"] = per_token_cast_to_fp8(gate_up)
        given = dict(sorted(given.items()))  # as a call has them
    got, wanted = gated_by_kernel(launch, kernel, dh, gate_up, {"alignment": 128}, given)
    for one, other in zip(got[1:6:2], wanted[1:6:2], strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=0)
    for one, other in zip(got[:6:2], wanted[:6:2], strict=True):
        differ = codes(one) != codes(other)
        assert differ.float().mean() < 0.01
        torch.testing.assert_close(one.float(), other.float(), rtol=0.13, atol=2.0**-9)
    torch.testing.assert_close(got.share, wanted.share, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", [kernels.GATED["bf16", False]], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("offs", [[300], [5, 130, 300], [0, 128, 128, 300], [100, 50, 300], [0]], ids=str)
def test_gradients_of_groups(launch, kernel, offs):
    """Rows of no group are skipped. Along tokens they count as zeros if others of their 128 live."""
    gates = torch.tensor([0.0, 200.0])[torch.randint(2, (300, 128))]
    dh, gate_up, _ = draw_gated(kernel, 300, 128, gates)
    given = {"share": torch.rand(300), **int32(offs=offs)}
    got, wanted = gated_by_kernel(launch, kernel, dh, gate_up, {"alignment": 128}, given)
    living = transposed._living(given["offs"].long(), 300, 128)
    lives = torch.arange(300) % 128 < living[torch.arange(300) // 128]
    blocks = (living > 0).repeat_interleave(128)[:300]
    for name in ("a", "a_scale"):
        one, other = getattr(got, name)[lives], getattr(wanted, name)[lives]
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    for name in ("at", "ht"):
        assert torch.equal(codes(getattr(got, name)[:, blocks]), codes(getattr(wanted, name)[:, blocks]))
    dead = got.a.view(torch.uint8)[~lives]
    assert (dead == POISON).all()


# ---- combine


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3, 4, 5, 8])
def test_combine_is_the_definitions(launch, index_dtype, weight_dtype, top_k):
    """Whole vectors and single elements; numbers that name no row; infinity and NaN."""
    limits = torch.iinfo(index_dtype)
    for tokens, columns, offset in ((13, 136, 0), (13, 136, 1), (37, 21, 0), (3, 8, 0)):
        x = (torch.randn(9, columns + offset) * torch.logspace(-30, 30, 9)[:, None]).bfloat16()[:, offset:]
        x[3, 2], x[4, 5] = float("nan"), float("inf")
        index = torch.randint(-1, 10, (tokens, top_k)).to(index_dtype)
        index[1, 0], index[2, -1] = limits.max, limits.min
        weights = torch.rand(top_k, tokens).to(weight_dtype).t()
        wanted = combine(x, weights, index)
        out = torch.full_like(wanted, 7.0)
        places = params.places(("x", "weights", "index", "out"))
        given = x, weights, index, out
        launch(kernels.COMBINE, 3, experts.combine_numbers(*given), *given, places=places)
        bits = (torch.where(y.isnan(), 0x7FFF, y.view(torch.int16)) for y in (out, wanted))
        assert torch.equal(*bits)


# ---- weights of 4 bits


@pytest.mark.parametrize("kernel", kernels.UNPACK.values(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("shape", [(16, 128), (3, 144, 352)], ids=str)
def test_packed_weights_become_fp8_as_defined(launch, kernel, shape):
    """The converter warps run the same code. Every code occurs, and scales at every distance."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[kernel.kind], shape, spread_of_scales=40)
    made = pack_weight(weight, scale, **arguments, max_error=math.inf)
    k_blocks = -(-shape[-1] // 128)
    wanted = packed.as_fp8(*made, k=128 * k_blocks).view(torch.uint8)
    out = torch.full_like(wanted, POISON)
    units = math.prod(shape[:-1]) // 16 * k_blocks
    numbers = {"units": units, "row_units": shape[-2] // 16, "k_blocks": k_blocks}
    launch(kernel, 2, numbers, made.weight, out, places=params.places(("weight", "out")))
    assert torch.equal(out, wanted)


# ---- sort_by_expert


def assert_sorted_as_defined(launch, kernel, schedule, chosen, number_of_experts, alignment):
    """The kernel overwrites poison with the definition's result."""
    wanted = experts.sorted_by_torch(chosen, number_of_experts, alignment)
    found = [torch.full_like(x, -7) for x in wanted]
    layout = kernels.sort_numbers(schedule, *chosen.shape, len(wanted.rows), number_of_experts, alignment)
    places = params.places(("chosen", "rows", "offs", "index"))
    launch(kernel, schedule.grid, layout, chosen, *found, places=places, cluster=schedule.cluster)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sort_is_the_definitions(launch, dtype, kind, alignment):
    """Thread blocks have 64 threads, so that few choices count as many: one block, clusters of all sizes, clusters that
    share the rows or only fill gaps, several steps of a block and of a warp."""
    kernel = SortKernel(str(dtype).removeprefix("torch."), threads=64, blocks_per_sm=1)
    sizes = (1, 1, 1), (1, 8, 64), (13, 3, 7), (64, 4, 32), (300, 6, 64), (700, 8, 60)
    for tokens, top_k, number_of_experts in sizes:
        chosen = some_choices(tokens, top_k, number_of_experts, dtype, kind)
        rows = experts._rows_size(chosen.numel(), number_of_experts, alignment)
        schedules = [kernels.schedule_sort(chosen.numel(), rows, kernel.threads)]
        for cluster, warp_choices, clusters in [(1, 256, 1), (2, 64, 2), (4, 32, 3), (8, 256, 2)]:
            share = 2 * warp_choices
            counted = round_up(ceil_div(chosen.numel(), cluster), share)
            grid = cluster * max(clusters, counted // share)
            schedules.append(kernels.SortSchedule(grid, cluster, counted, warp_choices))
        for schedule in schedules:
            assert_sorted_as_defined(launch, kernel, schedule, chosen, number_of_experts, alignment)


@settings(max_examples=300, deadline=None)
@given(
    choices=st.one_of(st.integers(1, 20_000), st.integers(1, kernels.MOST_CHOICES), st.just(kernels.MOST_CHOICES)),
    number_of_experts=st.integers(1, kernels.MOST_EXPERTS),
    alignment=st.sampled_from([1, 128, 1024]),
)
def test_every_choice_is_counted_and_placed(choices, number_of_experts, alignment):
    """As SortShare (sort.cuh) divides them: each cluster counts all choices, and one block of one cluster places
    each."""
    kernel = kernels.SORT["int64"]
    rows = experts._rows_size(choices, number_of_experts, alignment)
    grid, cluster, counted, warp_choices = kernels.schedule_sort(choices, rows, kernel.threads)
    share = kernel.threads // 32 * warp_choices
    assert cluster in (1, params.SORT_BLOCKS) and grid % cluster == 0 and grid <= 64
    assert counted * cluster >= choices and counted % share == 0 and share % kernel.threads == 0
    assert grid // cluster * share >= counted
    assert share < 2**16 and kernel.threads >= kernels.MOST_EXPERTS


@settings(max_examples=300, deadline=None)
@given(top_k=st.integers(1, kernels.MOST_CHOICES), data=st.data())
def test_tokens_of_choices_are_exact(top_k, data):
    tokens = kernels.MOST_CHOICES // top_k
    schedule = kernels.schedule_sort(tokens * top_k, tokens * top_k, 512)
    numbers = kernels.sort_numbers(schedule, tokens, top_k, tokens * top_k, 1, 1)
    params.SORT.pack(**numbers)
    token = data.draw(st.integers(0, tokens - 1))
    for number in (token * top_k, token * top_k + top_k - 1):
        assert number * numbers["top_k_reciprocal"] >> numbers["top_k_shift"] == token


# ---- RMSNorm of a sum, cast


@pytest.mark.parametrize("kernel", kernels.NORM.values(), ids=lambda kernel: kernel.name)
def test_norms_are_within_their_bounds(launch, kernel):
    """Of rows that a thread block's vectors cover, and of shorter ones; no stray write."""
    options, most = norms.NormOptions(1e-5, 1e-10), kernels.NORM_VECTOR * kernel.threads
    for rows, columns in ((3, most), (2, most // 2 + 48), (1, 40)):
        given = [torch.randn(shape).bfloat16() for shape in ((rows, columns), (rows, columns), (columns,))]
        _, _, _, *made = norms.ADD_RMS_NORM_CAST.allocated((*given, None, None, None), options)
        inner, memory = guarded_like(made)
        call = *given, *inner
        numbers, places = norms.ADD_RMS_NORM_CAST.numbers(call, options), params.places(norms.FIELDS)
        launch(kernel, rows, numbers, *call, places=places)
        out, scale, total = inner
        assert torch.equal(total, given[0] + given[1])
        assert_cast_within(norm_bounds(*given, options.epsilon), out, scale, options.amax_floor)
        for m in memory:
            assert (m[:32] == POISON).all() and (m[-32:] == POISON).all()
