"""The casts' kernels, run on a CPU: their text, compiled as C++ with host_cuda.h, makes of any call that fuzz_casts.py
draws what the definition does; that of `silu_mul`, which has approximations of its own, what is within its bounds.

What it cannot show is what ptxas makes of the text, and what a GPU makes of memory. test_drawn_casts.py does.
"""

import contextlib
import ctypes
import functools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import POISON
from formats import NAMES_OF_PACKED, draw
from helpers import CHOICES, assert_cast_within, assert_silu_mul_cast, norm_bounds, some_choices
from hypothesis import given, settings
from hypothesis import strategies as st
from on_host import without_assembly
from test_drawn_casts import EACH_INDEX, EACH_OF_ROWS, check_draws, check_rows
from test_quantize import EACH_OPTION, assert_same, codes, wide_matrix

from deep_tile import cast as kernels
from deep_tile import (
    cast_both,
    experts,
    launches,
    norms,
    pack_weight,
    packed,
    params,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    quantize,
    silu_mul_cast_to_fp8,
    swiglu_gradient_cast_both,
    transposed,
)
from deep_tile.codegen import SortKernel, streaming_source
from deep_tile.config import ceil_div, round_up
from deep_tile.quantize import FP8_DTYPE

pytestmark = pytest.mark.about(
    *(
        "include/deep_tile/*",
        "tests/host_*.h",
        "tests/on_host.py",
        "deep_tile/cast.py",
        "deep_tile/codegen.py",
        "deep_tile/params.py",
    ),
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
COMPILER = ("c++", "-std=c++20", "-O1", "-ffp-contract=off", "-fsanitize=alignment", "-fPIC", "-w")


@pytest.fixture(scope="session")
def launch(run_folder, made_once):
    """Run a kernel on CPU tensors. Each kernel compiles once; the headers that all include compile once before."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    directory = made_once("host_kernels", lambda: compile_headers(run_folder))
    libraries = {}

    def run(kernel, grid, layout, *tensors, places=kernels.PLACES, cluster=1):
        if kernel not in libraries:
            path = made_once(f"host_{kernel.name}", lambda: compile_for_host(kernel, directory))
            libraries[kernel] = loaded(path)
        argument = bytearray(kernel.table.pack(**layout))
        for offset, number, _ in kernel.table.pointers(places):
            argument[offset : offset + 8] = tensors[number].data_ptr().to_bytes(8, "little")
        misaligned = libraries[kernel].run(bytes(argument), grid, cluster)
        assert not misaligned, f"{kernel.name} read or wrote vectors at other places than their multiples"

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


def compile_headers(run_folder):
    """The folder with what all kernels include, and where they are compiled."""
    directory = run_folder / "host_cuda"
    directory.mkdir()
    subprocess.run([*COMPILER, "-x", "c++-header", HOST_CUDA, "-o", directory / "host_cuda.h.gch"], check=True)
    return directory


def compile_for_host(kernel, directory):
    """The library of a kernel."""
    text = without_assembly(streaming_source(kernel), assembly_of(kernel))
    source, library = directory / f"{kernel.name}.cpp", directory / f"{kernel.name}.so"
    source.write_text(f"""\
#include "host_cuda.h"
{text}
extern "C" bool run(const {kernel.table.name}* params, unsigned grid, unsigned cluster) {{
    host_misaligned = false;
    host_launch({kernel.name}, *params, grid, {kernel.threads}, cluster);
    return host_misaligned;
}}
""")
    subprocess.run([*COMPILER, "-c", f"-I{HOST_CUDA.parent}", source, "-o", source.with_suffix(".o")], check=True)
    subprocess.run([COMPILER[0], "-shared", source.with_suffix(".o"), "-o", library], check=True)
    return library


def loaded(library):
    made = ctypes.CDLL(str(library))
    made.run.restype = ctypes.c_bool
    return made


@pytest.fixture
def by_kernels(launch, monkeypatch):
    """A context in which calls on CPU tensors run their kernels, as on a GPU with one SM; it holds those that ran."""
    used = set()

    def run(operation, kernel, grid, given, numbers, fields, *, cluster=1):
        used.add(kernel)
        present = [x for x in given if x is not None]
        launch(kernel, grid, numbers, *present, places=params.places(fields), cluster=cluster)

    @contextlib.contextmanager
    def patched():
        with monkeypatch.context() as patch:
            patch.setattr(quantize, "launch_of", run)
            patch.setattr(quantize, "needs_kernel", lambda x, out: bool(x.numel() and out.numel()))
            patch.setattr(launches, "num_sms", lambda device: 1)
            patch.setattr(launches, "is_hopper", lambda device: True)
            for operation in (experts.COMBINE, experts.SORT_BY_EXPERT):
                patch.setattr(operation, "is_on_gpu", lambda x: True)
            yield used

    return patched


CASES = {
    "per token": kernels.cast_kernels()[:3],
    "per block": kernels.cast_kernels()[3:6],
    "listed": kernels.cast_kernels()[6:9],
    "counted": kernels.cast_kernels()[6:9],
    "silu_mul": kernels.cast_kernels()[9:],
    "transposed": [*kernels.TRANSPOSED.values()],
    "both": [kernel for kernel in kernels.BOTH.values() if kernel.what in ("rows", "mixed")],
    "weight both": [kernel for kernel in kernels.BOTH.values() if kernel.what == "tiles"],
    "transpose": [kernel for kernel in kernels.BOTH.values() if kernel.what == "codes"],
    "combine": [kernels.COMBINE],
    "sort": [*kernels.SORT.values()],
}
"""Cases of fuzz_casts.py, and the kernels that their calls need."""


@pytest.mark.parametrize("case", CASES)
def test_any_call_is_as_defined(case, by_kernels, guarded_results):
    """Also results that are allocated lie between bytes that nothing may write."""
    with by_kernels() as used:
        check_draws(case, "cpu", 30)
    assert used == {*CASES[case]}


@EACH_OF_ROWS
@EACH_INDEX
def test_numbers_that_name_no_row_are_zeros(cast, dtype, by_kernels):
    with by_kernels() as used:
        check_rows(cast, dtype, "cpu")
    assert used


def each_kernel(*of_them):
    return pytest.mark.parametrize("kernel", of_them, ids=lambda kernel: kernel.name)


MIDDLES = torch.cat([torch.arange(0.5, 8), *(torch.arange(8.5, 16) * 2**e for e in range(15))]) * 2.0**-9
"""Between every two positive codes, and beyond the last one."""


@each_kernel(*CASES["per token"], *CASES["per block"])
@pytest.mark.parametrize("exact", ["divide", "reciprocal"])
@pytest.mark.parametrize("exponent", [-116, -84, -72, -70, 0, 119])
def test_quotients_between_two_codes(by_kernels, kernel, exact, exponent):
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
    cast = per_token_cast_to_fp8 if kernel.block_rows == 1 else per_block_cast_to_fp8
    with by_kernels() as used:
        got = cast(x, exact=exact)
    assert used == {kernel}
    assert_same(got, cast(x, exact=exact))


@each_kernel(*CASES["silu_mul"])
def test_each_product_of_silu_mul(by_kernels, kernel):
    """Rows have one column, so that each product shows in an FP32 scale."""
    x = torch.stack([torch.empty(8192).uniform_(-25, 25), torch.randn(8192)], 1).to(DTYPES[kernel.source])
    numbers = {"limit": 20.0, "alpha": 1.702, "beta": 1.0}
    with by_kernels() as used:
        made = silu_mul_cast_to_fp8(x, **numbers)
    assert used == {kernel}
    assert_silu_mul_cast(x, *made, **numbers)


@each_kernel(*CASES["counted"])
@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 255, 256, 257, 700, params.MOST_CAST_GROUPS])
def test_any_number_of_groups(by_kernels, kernel, groups):
    x = torch.randn(groups, 3, 128).to(DTYPES[kernel.source])
    counts = torch.randint(-1, 5, (groups,), dtype=torch.int32)
    with by_kernels():
        got = per_token_cast_to_fp8(x, counts=counts)
    lives = torch.arange(3) < counts[:, None]
    assert_same([y[lives] for y in got], [y[lives] for y in per_token_cast_to_fp8(x)])


@pytest.mark.parametrize("alignment", [128, 256])
@pytest.mark.parametrize(
    "offs", [[5, 130, 385], [0, 0], [128, 2**31 - 1], [400, 100, 500], [-5, -(2**31), 200], [*range(600)]], ids=str
)
def test_tokens_of_groups(by_kernels, guarded_results, offs, alignment):
    """Tokens of no group are left alone: along k each, along tokens blocks of 128."""
    offs = torch.tensor(offs, dtype=torch.int32)
    call = functools.partial(cast_both, wide_matrix(610, 136, torch.bfloat16), offs=offs, alignment=alignment)
    with by_kernels():
        got = call()
    wanted, tokens = call(), torch.arange(610)
    assert_same(got[2:], wanted[2:])  # both in memory of one byte
    lives = tokens % 128 < transposed._living(offs.long(), 610, alignment)[tokens // 128]
    assert_same([x[lives] for x in got[:2]], [x[lives] for x in wanted[:2]])
    assert (got.a.view(torch.uint8)[~lives] == POISON).all()


# ---- the gradient of SwiGLU, cast both ways

EACH_GATED = each_kernel(*kernels.GATED.values())


def draw_gated(kernel, rows, columns, gates):
    """dh, gates and ups, and their scale where they are codes: of any magnitude, with NaN and infinity."""
    dh, ups = (wide_matrix(rows, columns, torch.bfloat16) for _ in range(2))
    dh[0, 0], ups[rows // 2, 1] = float("nan"), float("inf")
    gate_up = torch.cat([gates, ups], 1).bfloat16()
    if kernel.source == "bf16":
        return dh, gate_up, {}
    gate_up, scale = per_token_cast_to_fp8(gate_up.clamp(-3e4, 3e4), round_scale="pow2")
    return dh, gate_up, {"gate_up_scale": scale}


def gated_by_kernel(by_kernels, kernel, dh, gate_up, options, given):
    """Results of the kernel and of the definition."""
    options = {"amax_floor": 0, "blocks": kernel.blocks} | options
    call = functools.partial(swiglu_gradient_cast_both, dh, gate_up, **options, **given)
    with by_kernels() as used:
        got = call()
    assert used == {kernel}
    return got, call()


@EACH_GATED
@EACH_OPTION
def test_gradients_of_exact_sigmoids_have_the_definitions_bits(by_kernels, guarded_results, kernel, options):
    """With sigmoids of 0, 1/2 and 1 nothing is approximate, so that all products and casts show."""
    for (rows, columns), floor, shares in zip(
        [(1, 128), (131, 256), (300, 128)], [1e-4, 2.0**-80, 2.0**-100], [False, True, True], strict=True
    ):
        gates = torch.tensor([0.0, 200.0, -200.0, 1000.0])[torch.randint(4, (rows, columns))]
        dh, gate_up, given = draw_gated(kernel, rows, columns, gates)
        given |= {"share": torch.rand(rows)} if shares else {}
        got, wanted = gated_by_kernel(by_kernels, kernel, dh, gate_up, {"amax_floor": floor, **options}, given)
        for name, one, other in zip(got._fields[:6], got[:6], wanted[:6], strict=True):
            if one.dtype == FP8_DTYPE:
                assert torch.equal(codes(one), codes(other)), name
            else:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@EACH_GATED
def test_gradients_are_near_the_definitions(by_kernels, guarded_results, kernel):
    """With any gates a BF16 number may be the neighbour of the definition's, and its code with it."""
    dh, gate_up = (torch.randn(200, n).bfloat16() * 3 for n in (256, 512))
    given = {"share": torch.rand(200)}
    if kernel.source == "e4m3":
        gate_up, given["gate_up_scale"] = per_token_cast_to_fp8(gate_up)
    got, wanted = gated_by_kernel(by_kernels, kernel, dh, gate_up, {}, given)
    for one, other in zip(got[1:6:2], wanted[1:6:2], strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=0)
    for one, other in zip(got[:6:2], wanted[:6:2], strict=True):
        differ = codes(one) != codes(other)
        assert differ.float().mean() < 0.01
        torch.testing.assert_close(one.float(), other.float(), rtol=0.13, atol=2.0**-9)
    torch.testing.assert_close(got.share, wanted.share, rtol=1e-3, atol=1e-3)


@each_kernel(kernels.GATED["bf16", False])
@pytest.mark.parametrize("offs", [[300], [5, 130, 300], [0, 128, 128, 300], [100, 50, 300], [0]], ids=str)
def test_gradients_of_groups(by_kernels, guarded_results, kernel, offs):
    """Rows of no group are skipped. Along tokens they count as zeros if others of their 128 live."""
    gates = torch.tensor([0.0, 200.0])[torch.randint(2, (300, 128))]
    dh, gate_up, _ = draw_gated(kernel, 300, 128, gates)
    given = {"share": torch.rand(300), "offs": torch.tensor(offs, dtype=torch.int32)}
    got, wanted = gated_by_kernel(by_kernels, kernel, dh, gate_up, {}, given)
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


# ---- weights of 4 bits


@each_kernel(*kernels.UNPACK.values())
@pytest.mark.parametrize("shape", [(16, 128), (3, 144, 352)], ids=str)
def test_packed_weights_become_fp8_as_defined(launch, kernel, shape):
    """The converter warps run the same code. Every code occurs, and scales at every distance."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[kernel.kind], shape, spread_of_scales=40)
    made = pack_weight(weight, scale, **arguments, max_error=math.inf)
    k_blocks = -(-shape[-1] // 128)
    wanted = packed.elements(*made, k=128 * k_blocks).view(torch.uint8)
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


@each_kernel(*kernels.NORM.values())
def test_norms_are_within_their_bounds(by_kernels, guarded_results, kernel):
    """Of rows that a thread block's vectors cover, and of shorter ones."""
    options, most = norms.NormOptions(1e-5, 1e-10), kernels.NORM_VECTOR * kernel.threads
    for rows, columns in ((3, most), (2, most // 2 + 48), (1, most // 2 + 8)):
        given = [torch.randn(shape).bfloat16() for shape in ((rows, columns), (rows, columns), (columns,))]
        with by_kernels() as used:
            out, scale, total = norms.ADD_RMS_NORM_CAST.run((*given, None, None, None), options)
        assert used == {kernel} and torch.equal(total, given[0] + given[1])
        assert_cast_within(norm_bounds(*given, options.epsilon), out, scale, options.amax_floor)
