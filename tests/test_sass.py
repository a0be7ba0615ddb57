"""sass.py on compiled kernels, without a GPU.

That the default kernels' waits are known, and none is divergent, test_codegen.py shows.
"""

import re
import struct

import pytest
from default_kernels import disassemblies, disassembly
from hypothesis import given
from hypothesis import strategies as st

from deep_tile import jit, sass
from deep_tile.codegen import kernel_source
from deep_tile.select.defaults import deepest_config

NO_YIELD, REUSE = 1 << 45, 1 << 58 | 1 << 59


@pytest.fixture(scope="module")
def kernel() -> tuple[bytes, bytes]:
    """128x256 as ptxas made it, and with our hints."""
    config = deepest_config(128, 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sass, "quicken_promotion", bytes)
        plain = jit.compile_kernel(kernel_source(config), config.name).cubin
    return plain, jit.compile_kernel(kernel_source(config), config.name).cubin


@pytest.fixture(scope="module")
def listing(kernel, tmp_path_factory) -> tuple[list[str], list[str]]:
    """nvdisasm's listings of the kernel without hints and with them."""
    plain, quick = (disassembly(cubin, tmp_path_factory.mktemp("code")) for cubin in kernel)
    return plain, quick


def instructions(cubin: bytes) -> list[tuple[int, int]]:
    (code,) = sass.code_sections(cubin)
    return [struct.unpack_from("<QQ", cubin, at) for at in range(code.start, code.stop, 16)]


def test_only_hints_of_second_halves_change(kernel):
    plain, quick = map(instructions, kernel)
    (code,) = sass.code_sections(kernel[0])
    runs = sass._runs(memoryview(kernel[0])[code].cast("Q"))
    assert [len(run) for run in runs] == [64] * 4, "two chunks, in the main loop and in the last K block"
    second_halves = {i for run in runs for i in run[32:]}
    for i, ((low, high), (quick_low, quick_high)) in enumerate(zip(plain, quick, strict=True)):
        assert low == quick_low and high | quick_high == quick_high
        assert (high ^ quick_high) & ~(NO_YIELD | REUSE) == 0
        assert high == quick_high or i in second_halves
        assert i not in second_halves or quick_high & NO_YIELD
    outside = [i for i, (a, b) in enumerate(zip(*kernel, strict=True)) if a != b and not code.start <= i < code.stop]
    assert not outside


def test_half_of_the_second_halves_yielded(kernel):
    """ptxas sets these yields, and the hints remove them. If this fails with a newer NVRTC, measure whether they still
    help."""
    (code,) = sass.code_sections(kernel[0])
    words = memoryview(kernel[0])[code].cast("Q")
    second_halves = [i for run in sass._runs(words) for i in run[32:]]
    assert 0.4 < sum(not words[2 * i + 1] & NO_YIELD for i in second_halves) / len(second_halves) < 0.6


def test_first_halves_yield_where_integers_are_promoted():
    """ptxas sets none there. If this fails with a newer NVRTC, measure whether the hints still help."""
    config = deepest_config(256, 128, kind="int8", cluster_n=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sass, "quicken_promotion", bytes)
        plain = jit.compile_kernel(kernel_source(config), config.name).cubin
    quick = sass.quicken_promotion(plain)
    (code,) = sass.code_sections(plain)
    words, new_words = (memoryview(cubin)[code].cast("Q") for cubin in (plain, quick))
    runs = sass._runs(words)
    assert sum(map(len, runs)) > 240 and all(sass._converts(words, run) for run in runs)
    assert sum(not words[2 * i + 1] & NO_YIELD for run in runs for i in run) < 8
    first_halves = {i for run in runs for i in run[: len(run) // 2]}
    for i, (high, new_high) in enumerate(zip(words[1::2], new_words[1::2], strict=True)):
        changed = high ^ new_high
        assert not changed & ~(NO_YIELD | REUSE | 1 << 60)
        assert i not in first_halves or not new_high & (NO_YIELD | REUSE)
        assert not changed or any(i in run for run in runs)
    assert words[::2].tolist() == new_words[::2].tolist() and sass.quicken_promotion(quick) == quick


def test_the_program_is_the_same(listing):
    plain, quick = listing
    assert plain != quick
    assert [line.replace(".reuse", "") for line in plain] == [line.replace(".reuse", "") for line in quick]


def test_all_code_is_found(kernel, listing, tmp_path):
    """`code_sections` finds what nvdisasm finds in the whole file, where jumps have labels."""
    (found,) = disassemblies(kernel[:1], tmp_path)
    for line, wanted in zip(found, listing[0], strict=True):
        assert line == wanted or "`(.L" in wanted and line.split()[:-2] == wanted.split()[:-2]


def test_what_is_kept_is_what_the_next_instruction_reads(listing):
    plain, quick = listing
    kept = 0
    for before, line, following in zip(plain, quick, quick[1:], strict=False):
        operands, next_operands = (re.findall(r"R\d+(?:\.reuse)?|RZ", text) for text in (line, following))
        for place in (1, 2):
            if ".reuse" in line and line != before and operands[place].endswith(".reuse"):
                assert " FFMA " in following
                register = operands[place].removesuffix(".reuse")
                assert register == next_operands[place].removesuffix(".reuse") and register != operands[0]
                kept += 1
    assert kept >= 50


def test_again_changes_nothing(kernel):
    assert sass.quicken_promotion(kernel[1]) == kernel[1]


def test_no_hints_with_an_untested_nvrtc(kernel, monkeypatch):
    monkeypatch.setattr(jit, "_loaded_nvrtc_version", lambda: "13.99")
    config = deepest_config(128, 256)
    assert jit.compile_kernel(kernel_source(config), config.name).cubin == kernel[0]


WAIT = """
__device__ bool arrived(unsigned barrier) {
    unsigned done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier) : "memory");
    return done;
}
"""
SYNCHRONISE = """
    if (out[threadIdx.x]) { __syncwarp(lanes); out[1] = __shfl_sync(lanes, out[2], 3); }
    if (threadIdx.x & 1) out[3] = __shfl_sync(0x55555555, out[threadIdx.x], 3);
    __syncwarp();
    if (threadIdx.x % 3) out[4] = __reduce_add_sync(lanes, out[5]);
"""


@pytest.mark.parametrize(
    ("body", "forms"),
    [
        ("while (!arrived(64)) { }", set()),
        ("while (!arrived(8 * blockIdx.x)) { }", set()),
        ("while (!arrived(8 * threadIdx.x)) { }", {"wait"}),
        ("while (!arrived(64)) { }" + SYNCHRONISE, {"WARPSYNC"}),
        ("while (!arrived(out[threadIdx.x])) { }" + SYNCHRONISE, {"wait", "WARPSYNC"}),
        (SYNCHRONISE, set()),
    ],
    ids=["constant", "block's", "thread's", "warps fall apart", "both", "waits at no barrier"],
)
def test_divergence_is_what_the_disassembly_says(body, forms, tmp_path):
    source = f'{WAIT} extern "C" __global__ void k(int* out, unsigned lanes) {{ {body} }}'
    compiled = jit.compile_kernel(source, "k")
    lines = disassembly(compiled.cubin, tmp_path)
    found = [match for line in lines if (match := re.match(r"/\*(\w+)\*/.*?(WARPSYNC|TRYWAIT P\d, \[(R\d+))", line))]
    if "TRYWAIT" not in "".join(lines):
        assert found and compiled.divergence == ()
        return
    said = [f"wait through {match[3]}" if match[3] else "WARPSYNC" for match in found]
    places = [f" at 0x{int(match[1], 16):x}" for match in found]
    assert compiled.divergence == tuple(map("".join, zip(said, places, strict=True)))
    assert {text.split()[0] for text in said} == forms


def test_a_kernel_without_products():
    cubin = jit.compile_kernel('extern "C" __global__ void nothing() {}', "nothing").cubin
    assert sass.quicken_promotion(cubin) == cubin


FFMA = 0x7223


def run_of(*registers: tuple[int, int, int]) -> memoryview:
    """FFMAs: destination and factors of each."""
    lows = [FFMA | d << 16 | a << 24 | b << 32 for d, a, b in registers]
    return memoryview(struct.pack(f"<{2 * len(lows)}Q", *(word for low in lows for word in (low, 0)))).cast("Q")


@pytest.mark.parametrize(
    ("first", "second", "flags"),
    [
        ((9, 1, 2), (8, 3, 2), 1 << 59),
        ((9, 1, 2), (8, 1, 3), 1 << 58),
        ((9, 1, 2), (8, 1, 2), 3 << 58),
        ((9, 1, 2), (8, 2, 1), 0),
        ((2, 1, 2), (8, 3, 2), 0),
        ((9, 255, 2), (8, 255, 3), 0),
    ],
    ids=["second factor", "first factor", "both", "places differ", "overwritten", "zero register"],
)
def test_what_is_kept(first, second, flags):
    assert sass._reuse_flags(run_of(first, second), 0) == flags
    assert sass._reuse_flags(run_of(first, second), 1) == 0, "nothing follows"


@given(st.lists(st.booleans(), max_size=120))
def test_runs(ffmas):
    words = memoryview(struct.pack(f"<{2 * len(ffmas)}Q", *(w for f in ffmas for w in (FFMA * f, 0)))).cast("Q")
    runs = sass._runs(words)
    places = [i for i, ffma in enumerate(ffmas) if ffma]
    for run in runs:
        assert len(run) >= 16 and set(run) <= set(places)
        assert all(later - earlier <= 9 for earlier, later in zip(run, run[1:], strict=False))
    for earlier, later in zip(places, places[1:], strict=False):
        together = [run for run in runs if earlier in run and later in run]
        apart = [run for run in runs if (earlier in run) != (later in run)]
        assert not apart if later - earlier <= 9 else not together
