"""The compilers that users have: kernels compiled by other NVRTCs than the installed one, each a wheel from pip.

Each compiles some of the kernels of the run (chosen_kernels.py), no two the same. `--all-compilers` takes every version
that sass.py names, and every kernel; `--nvrtc VERSION` any other.
"""

import re
from collections.abc import Sequence

import changes
import other_nvrtc
import pytest
from chosen_kernels import chosen
from default_kernels import EVERY_CONFIG, disassembly, flaws

from deep_tile import cast, jit, parts, sass
from deep_tile.codegen import kernel_source, streaming_source
from deep_tile.config import GemmConfig
from deep_tile.select.defaults import deepest_config
from deep_tile.select.groups import grouped_configs

OFTEN_USED = ("12.9.86", "13.0.88", "13.2.86", "13.5.37")
"""The oldest; those that were measured, that PyTorch brings and that pip installs (2026-11)."""

ALL = (*OFTEN_USED, "13.1.115", "13.3.33", "13.4.92")

MOST = 6 if changes.may_have_changed(*changes.OF_KERNELS) else 2
"""Kernels of each version, beside those named below, in a run that does not compile all."""

WIDEST = deepest_config(128, 256)
OF_INTEGERS = deepest_config(256, 128, kind="int8", cluster_n=2)
UNIFORM_WITH_HELP = deepest_config(64, 48, tma_store=False)
NARROW_GROUPS = grouped_configs("offs", True, kind="bf16")[0]
"""Its warps stay together only where they wait before they read bounds."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nvrtc" in metafunc.fixturenames:
        metafunc.parametrize("nvrtc", _versions(metafunc.config), scope="session")


def _versions(config: pytest.Config) -> list[str]:
    """The versions but for the installed one, which compiles every kernel in test_codegen.py."""
    versions = config.option.nvrtc or (ALL if config.option.all_compilers else OFTEN_USED)
    return [version for version in versions if version != jit.nvrtc_version()]


def _share_of(nvrtc: str, kernels: Sequence) -> Sequence:
    """What one of the versions compiles of these."""
    return kernels[OFTEN_USED.index(nvrtc) :: len(OFTEN_USED)]


def _kernels_of(nvrtc: str) -> list[GemmConfig]:
    """A share of the run's kernels, up to MOST; all where all are compiled."""
    if changes.base() == changes.EVERYTHING:
        return list(EVERY_CONFIG)
    return list(dict.fromkeys((WIDEST, OF_INTEGERS, NARROW_GROUPS, *_share_of(nvrtc, chosen())[:MOST])))


@pytest.fixture(scope="session")
def library(nvrtc, made_once, pytestconfig):
    try:
        return made_once(f"nvrtc_{nvrtc}", lambda: other_nvrtc.fetch(nvrtc, pytestconfig.cache.mkdir("nvrtc")))
    except other_nvrtc.NoWheel as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def compiled(nvrtc, library, made_once):
    """Kernels by config."""
    configs = _kernels_of(nvrtc)
    sources = {config.name: kernel_source(config) for config in configs}
    kernels = made_once(f"kernels_of_{nvrtc}", lambda: other_nvrtc.compile_kernels(library, sources))
    return {config: kernels[config.name] for config in configs}


def test_default_kernels_compile_clean_and_uniform(compiled):
    found = {config.name: flaws(config, kernel) for config, kernel in compiled.items()}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_others_compile_clean_and_uniform(nvrtc, library):
    """Kernels without a GemmConfig, some of which wait at a barrier; a share of them where none changed."""
    kernels = (*cast.SORT.values(), *parts.KERNELS)
    if not changes.may_have_changed(*changes.OF_KERNELS, "deep_tile/cast.py", "deep_tile/parts.py"):
        kernels = _share_of(nvrtc, kernels)
    sources = {kernel.name: streaming_source(kernel) for kernel in kernels}
    for kernel in other_nvrtc.compile_kernels(library, sources).values():
        assert not kernel.divergence and not jit.resource_usage(kernel.log).flawed


def test_hints_are_for_code_like_this(compiled, tmp_path):
    """If this fails with a newer NVRTC, measure whether hints still help, and leave it out of sass.TESTED_NVRTC."""
    plain = compiled[WIDEST].cubin
    quick = sass.quicken_promotion(plain)
    (code,) = sass.code_sections(plain)
    words = memoryview(plain)[code].cast("Q")
    runs = sass._runs(words)
    assert [len(run) for run in runs] == [64] * 4
    second_halves = [i for run in runs for i in run[32:]]
    assert 0.4 < sum(not words[2 * i + 1] & sass._NO_YIELD for i in second_halves) / len(second_halves) < 0.6
    before, after = (disassembly(cubin, tmp_path) for cubin in (plain, quick))
    assert [line.replace(".reuse", "") for line in before] == [line.replace(".reuse", "") for line in after]


def test_integers_are_promoted_without_yielding(compiled):
    """Where our hints change integer kernels."""
    plain = compiled[OF_INTEGERS].cubin
    (code,) = sass.code_sections(plain)
    words = memoryview(plain)[code].cast("Q")
    runs = sass._runs(words)
    assert len(runs) >= 4 and all(sass._converts(words, run) for run in runs)
    assert sum(not words[2 * i + 1] & sass._NO_YIELD for run in runs for i in run) < 8


def test_kernels_are_uniform_with_help_only(nvrtc, library, tmp_path):
    """GemmConfig.hides_addresses in config.cuh; where a newer NVRTC does without, it may go."""
    if nvrtc < "13.1":
        pytest.skip("works out addresses in 64 bits, and needs no help")
    source = kernel_source(UNIFORM_WITH_HELP)
    without, count = re.subn(r"(constexpr bool short_addresses) = [^;]*;", r"\1 = false;", source)
    assert count == 1
    cubin = other_nvrtc.compile_kernels(library, {"without": without})["without"].cubin
    waits = re.findall(r"/\*(\w+)\*/ +SYNCS\S*\.TRYWAIT P\d, \[(R\d+)", "\n".join(disassembly(cubin, tmp_path)))
    assert len(waits) > 5
    assert sass.divergence(cubin) == tuple(f"wait through {register} at 0x{int(at, 16):x}" for at, register in waits)


def test_every_version_is_tested():
    assert {".".join(version.split(".")[:2]) for version in ALL} == set(sass.TESTED_NVRTC)
    assert {wheel.split("==")[1] for wheel in jit.TESTED_WHEELS.values()} <= set(OFTEN_USED)


def test_a_missing_wheel_is_a_reason_to_skip(tmp_path):
    with pytest.raises(other_nvrtc.NoWheel, match=r"pip cannot get nvidia-cuda-nvrtc==0\.0\.1: "):
        other_nvrtc.fetch("0.0.1", tmp_path)
    assert not list(tmp_path.iterdir())
