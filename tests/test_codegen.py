"""The generated kernels: complete texts that compile clean, for configs that the selector can choose.

Which ones is chosen_kernels.py's business; `--all-kernels` takes all.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import changes
import pytest
from chosen_kernels import chosen
from default_kernels import EVERY_CONFIG, disassemblies, disassembly, flaws

from deep_tile import jit, sass
from deep_tile.codegen import kernel_source
from deep_tile.config import GemmConfig
from deep_tile.kinds import ACTIVATIONS, BIASES, FAMILIES, GROUPINGS, LAYOUTS, PACKED, RESULTS

ROOT = Path(__file__).parent.parent
CONFIGS = chosen()
SPLIT_CONFIGS = tuple(config for config in CONFIGS if config.split_k > 1)
WGMMA = "[QHI]GMMA"
MULTICAST_CONFIGS = tuple(config for config in CONFIGS if config.multicast)

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


@pytest.fixture(scope="session")
def compiled(made_once):
    """Every kernel of the run, compiled on all cores: config -> jit.Compiled, or the error."""

    def compile_one(config):
        source = kernel_source(config)
        try:
            made = jit.compile_kernel(source, config.name)
        except jit.CompileError as error:
            return error
        if not made.divergence:
            jit.store_cubin(source, made.cubin)  # what other tests precompile is there then
        return made

    def compile_all():
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_one, CONFIGS))

    return dict(zip(CONFIGS, made_once("kernels", compile_all), strict=True))


@pytest.fixture(scope="session")
def listings(compiled, made_once, tmp_path_factory):
    """The machine code of each config, as nvdisasm prints it."""

    def disassemble_all():
        cubins = [compiled[config].cubin for config in CONFIGS]
        return ["\n".join(lines) for lines in disassemblies(cubins, tmp_path_factory.mktemp("code"))]

    return dict(zip(CONFIGS, made_once("listings", disassemble_all), strict=True))


@each_config
def test_kernel_compiles_clean(config, compiled):
    result = compiled[config]
    assert isinstance(result, jit.Compiled), result
    assert flaws(config, result) == []
    assert config.name.encode() in result.cubin


@pytest.mark.parametrize(
    ("field", "known"),
    [("output", RESULTS), ("bias", BIASES), ("activation", ACTIVATIONS), ("layout", LAYOUTS), ("grouping", GROUPINGS)],
)
def test_kernels_of_everything_that_there_is_are_among_those_tested(field, known):
    assert {getattr(config, field) for config in EVERY_CONFIG} == set(known)
    assert {config.product.family for config in EVERY_CONFIG} == {*FAMILIES, *PACKED}


@pytest.mark.about(*changes.OF_KERNELS, "deep_tile/config.py")
@pytest.mark.parametrize("kind", ["fp8", "fp8_1x128"])
def test_scale_warps_that_read_no_runs_of_one_scale_compile(kind):
    """Lanes of 24 registers that have 8 rows each."""
    config = GemmConfig(256, 144, 2, kind=kind, activation="silu", store_buffers=1)
    assert config.scales_at_once == 1 and not config.reads_runs
    made = jit.compile_kernel(kernel_source(config), config.name)
    assert made.divergence == jit.resource_usage(made.log).warnings == ()


def test_kernels_are_uniform(compiled, listings):
    """nvdisasm finds no divergence, and sass.py agrees on it and on the number of waits."""
    found = {config.name: re.findall(r"WARPSYNC.*|TRYWAIT P\d, \[R\d.*", text) for config, text in listings.items()}
    assert not {name: lines for name, lines in found.items() if lines}
    for config, text in listings.items():
        assert re.search(WGMMA, text)
        assert waits(compiled[config].cubin) == text.count("TRYWAIT") > 0
        assert compiled[config].divergence == ()


def waits(cubin: bytes) -> int:
    """Waits at barriers that sass.py sees."""
    (code,) = sass.code_sections(cubin)
    return sum(low & sass._OPCODE_MASK == sass._WAIT for low in memoryview(cubin)[code].cast("Q")[::2])


@each_config
def test_code_lies_in_the_order_in_which_it_is_wanted(config, listings):
    """A launch brings code along in the order of its addresses: first that of loads. Of kernels whose converter warps
    multiply, which they do beside the producers' loops, the first requests come first."""

    def addresses(instruction):
        return [int(address, 16) for address in re.findall(rf"/\*([0-9a-f]+)\*/.*?\b{instruction}\b", listings[config])]

    loads = addresses("UTMALDG")
    assert (min(loads) if config.from_registers else max(loads)) < min(addresses(WGMMA))


class Instruction(NamedTuple):
    """One line of a listing; predicates and uniform registers count as registers."""

    opcode: str
    writes: frozenset[str]
    reads: frozenset[str]
    predicated: bool


def read_instruction(line: str) -> Instruction:
    match = re.search(r"\*/\s+(@!?U?P[T\d] )?([A-Z][\w.]*)\s*(.*?);", line)
    guard, opcode, text = match[1] or "", match[2], match[3]
    operands = [re.findall(r"\bU?[RP]\d+\b", operand) for operand in text.split(",")]
    wide = 4 if ".128" in opcode else 2 if re.search(r"\.64|WIDE", opcode) else 1
    writes = {
        f"{register.rstrip('0123456789')}{int(re.search(r'[0-9]+', register)[0]) + i}"
        for register in operands[0]
        for i in range(wide)
    }
    reads = {register for operand in operands[1:] for register in operand} | set(re.findall(r"U?P\d", guard))
    return Instruction(opcode, frozenset(writes), frozenset(reads), bool(guard))


def values_that_reach(instructions: list[Instruction], wanted: set[str]) -> list[Instruction]:
    """The instructions that `wanted` registers depend on, in straight-line order, after the last of `instructions`."""
    reached = []
    for instruction in reversed(instructions):
        if not instruction.writes & wanted:
            continue
        reached.append(instruction)
        if not instruction.predicated:
            wanted = wanted - instruction.writes
        wanted = wanted | instruction.reads
    return reached


@pytest.mark.parametrize("config", SPLIT_CONFIGS, ids=lambda config: config.name)
def test_split_k_gives_slots_back_when_their_values_have_come(config, listings):
    """An arrival in another block is not ordered behind reads of shared memory, but for a value that it needs."""
    lines = [line for line in listings[config].splitlines() if re.search(r"\*/\s+(@\S+ )?[A-Z]", line)]
    sent = next(i for i, line in enumerate(lines) if " ST.ASYNC" in line or " STAS" in line)
    arrivals = [i for i, line in enumerate(lines) if "SYNCS.ARRIVE.TRANS64.RED" in line and i > sent]
    assert len(arrivals) == config.split_k * config.chunks_m
    for arrival in arrivals:
        begin = max(i for i in range(arrival) if "TRYWAIT" in lines[i] or "SYNCS.ARRIVE" in lines[i])
        before = [read_instruction(line) for line in lines[begin:arrival]]
        slots = [instruction for instruction in before if instruction.opcode == "LDS.128"]
        assert len(slots) == (config.split_k - 1) * config.columns_per_part // 8
        address = set(re.findall(r"\[(U?R\d+)", lines[arrival]))
        assert set(slots) <= set(values_that_reach(before, address))


@pytest.mark.about(*changes.OF_KERNELS, "deep_tile/config.py")
@pytest.mark.parametrize("kind", ["int8_rows", "int8_unscaled"])
def test_split_k_adds_integers_as_integers(kind, tmp_path):
    """No FP32 numbers are added. Stores convert; each branch holds one block's columns."""
    config = GemmConfig(64, 64, 2, kind=kind, output="fp32", split_k=2)
    made = jit.compile_kernel(kernel_source(config), config.name)
    code = "\n".join(disassembly(made.cubin, tmp_path))
    assert "FADD" not in code and "FFMA" not in code
    conversions = [match.start() for match in re.finditer(r"\bI2FP", code)]
    assert len(conversions) == config.mma_n // 2
    assert code.index("LDS.128") < conversions[0]


@pytest.mark.parametrize("config", MULTICAST_CONFIGS, ids=lambda config: config.name)
def test_multicast_gives_stages_back_when_their_products_are_done(config, listings):
    """No two arrivals at peers without a wait for WGMMAs between them, nor one before the first wait. Arrivals behind
    the sending of partial sums are for those."""
    before_sums = re.split(r" ST\.ASYNC| STAS", listings[config])[0]
    events = re.findall(r"SYNCS\.ARRIVE\.TRANS64\.RED|WARPGROUP\.DEPBAR", before_sums)
    arrivals = [i for i, event in enumerate(events) if event.startswith("SYNCS")]
    assert arrivals
    assert all(i > 0 and events[i - 1] == "WARPGROUP.DEPBAR" for i in arrivals)


@each_config
def test_source_is_self_contained(config):
    source = kernel_source(config)
    assert "#include" not in source and "#pragma once" not in source
    assert str(ROOT) not in source
    sizes = re.findall(r"wgmma\.mma_async\.\S+\.m64n(\d+)k(\d+)\.", source)
    columns = (16, 32) if config.from_registers else (64,) if config.swap_ab else (config.mma_n,)
    assert sizes == [(str(width), str(config.mma_k)) for width in columns]
    assert source.count("__global__") == 1


@pytest.mark.parametrize(
    ("options", "field", "value", "message"),
    [
        ({"activation": "silu"}, "activation", "Activation::other", "an activation without code"),
        ({}, "out_format", "Format::int32", "a format without code that rounds to it"),
        ({"output": "fp32", "accumulate": True}, "out_format", "Format::e4m3", "a format without code that adds in it"),
        ({"bias": "fp32"}, "bias_format", "Format::int32", "a format of the bias without code"),
        ({"output": "fp32"}, "out_bytes", "8", "numbers of a size without code that writes them"),
        ({"kind": "bf16", "layout": "tn"}, "a_span", "16", "a span without a swizzle"),
    ],
)
def test_what_has_no_code_of_its_own_does_not_compile(options, field, value, message, monkeypatch):
    """Each choice by format ends in a static assertion, so that none falls through to another format's code."""
    config = GemmConfig(64, 64, 2, tma_store=False, **options)
    monkeypatch.setattr(jit, "_compile_error_text", lambda source, name, flags, log: log)
    source = kernel_source(config).replace("enum class Activation { none,", "enum class Activation { none, other,")
    text, count = re.subn(rf"(\.{field} = )(deep_tile::)?[\w:]+", rf"\g<1>\g<2>{value}", source)
    assert count == 1
    with pytest.raises(jit.CompileError, match=message):
        jit.compile_kernel(text, config.name)


def test_sources_tell_all_configs_apart():
    assert len({kernel_source(config) for config in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "include" / "deep_tile").iterdir())])
def test_no_comment_of_a_header_is_part_of_the_cache_key(name):
    text = (ROOT / "include" / "deep_tile" / name).read_text()
    assert not re.search(r"//|/\*", jit._without_comments(text))


@pytest.mark.parametrize("headers", ["include/deep_tile", "deep_tile/include/deep_tile"], ids=["checkout", "wheel"])
def test_source_does_not_depend_on_where_the_package_lies(headers, tmp_path):
    package = tmp_path / "deep_tile"
    package.mkdir()
    (package / "__init__.py").touch()  # codegen needs these alone
    for module in ("codegen.py", "config.py", "kinds.py", "params.py", "walls.py"):
        shutil.copy(ROOT / "deep_tile" / module, package)
    shutil.copytree(ROOT / "include" / "deep_tile", tmp_path / headers)
    config = GemmConfig(128, 192, 4, 2, 1, store_buffers=1, tma_store=False)
    program = (
        "from deep_tile.codegen import kernel_source\n"
        "from deep_tile.config import GemmConfig\n"
        f"print(kernel_source({config!r}), end='')"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert printed.stdout == kernel_source(config)


def test_missing_headers_are_reported(tmp_path):
    shutil.copytree(ROOT / "deep_tile", tmp_path / "deep_tile", ignore=shutil.ignore_patterns("__init__.py", "*.so"))
    (tmp_path / "deep_tile" / "__init__.py").touch()
    program = (
        "from deep_tile.codegen import kernel_source\n"
        "from deep_tile.config import GemmConfig\n"
        "kernel_source(GemmConfig(64, 64, 4))"
    )
    failed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert f"RuntimeError: deep_tile's CUDA headers are missing: no gemm.cuh in {tmp_path}" in failed.stderr
    assert "reinstall deep_tile" in failed.stderr
