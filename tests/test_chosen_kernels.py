"""The kernels that a test run compiles: every feature in each run, and all that contain changed code."""

import re
import subprocess
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import changes
import pytest
from chosen_kernels import MOST, USERS, chosen, covering, features, touched
from default_kernels import EVERY_CONFIG

from benchmarks import same_code
from deep_tile import codegen, jit
from deep_tile.config import GemmConfig
from deep_tile.kinds import EVERY_KIND

HEADERS = Path(codegen.__file__).parent.parent / "include" / "deep_tile"


def choose(monkeypatch, base: str, paths: set[str]) -> tuple:
    monkeypatch.setenv(changes.VARIABLE, base)
    monkeypatch.setattr(changes, "changed_paths", lambda commit: paths)
    return chosen.__wrapped__()


def test_every_run_has_every_feature(monkeypatch):
    always = choose(monkeypatch, "1234", {"README.md", "deep_tile/api.py", "include/deep_tile/sort.cuh"})
    assert len(always) < 40
    grouped = choose(monkeypatch, "1234", {"include/deep_tile/grouped.cuh"})
    assert len(grouped) == MOST and sum(config.is_grouped for config in grouped) > 20
    every = {feature for config in EVERY_CONFIG for feature in features(config)}
    for kernels in (always, grouped):
        assert {config.product.family for config in kernels} == {kind.family for kind in EVERY_KIND.values()}
        assert {feature for config in kernels for feature in features(config)} == every


@pytest.mark.parametrize(("base", "paths"), [("1234", {"include/deep_tile/finish.cuh"}), ("", set())])
def test_what_all_kernels_have_or_may_have_is_looked_at_in_most_ways(monkeypatch, base, paths):
    kernels = choose(monkeypatch, base, paths)
    assert len(set(kernels)) == MOST

    def pairs(configs: Iterable[GemmConfig]) -> set[tuple]:
        return {pair for config in configs for pair in combinations(features(config), 2)}

    assert len(pairs(kernels)) > 0.8 * len(pairs(EVERY_CONFIG))


def test_all_are_compiled_on_demand(monkeypatch):
    kernels = choose(monkeypatch, changes.EVERYTHING, set())
    assert kernels[: len(EVERY_CONFIG)] == EVERY_CONFIG and len(kernels) > len(EVERY_CONFIG) + 50


def test_few_kernels_with_code_of_a_change_are_all_compiled(monkeypatch):
    resident = [config for config in EVERY_CONFIG if config.resident_b]
    monkeypatch.setitem(USERS, "finish.cuh", lambda config: config in resident)
    assert 5 < len(resident) < 25
    assert set(choose(monkeypatch, "1234", {"include/deep_tile/finish.cuh"})) > set(resident)


def test_kernels_with_code_of_a_header_or_another_text_are_touched(monkeypatch, tmp_path):
    splits, (first, second, *_) = (
        [c for c in EVERY_CONFIG if c.split_k > 1],
        [c for c in EVERY_CONFIG if c.split_k == 1],
    )
    assert touched("1234", ["include/deep_tile/reduce.cuh"]) == splits
    assert touched("1234", ["include/deep_tile/ptx.cuh"]) == list(EVERY_CONFIG)
    assert touched("1234", ["deep_tile/api.py", "include/deep_tile/sort.cuh"]) == []

    def listed(tree: Path, comments: bool) -> same_code.Kernels:
        """The commit's list lacks a kernel, and has another text for one."""
        kernels = {config.name: same_code.Kernel("", "text") for config in EVERY_CONFIG}
        if tree == changes.ROOT:
            return kernels
        assert (tree / "include").resolve() == changes.ROOT / "include"
        del kernels[first.name]
        return kernels | {second.name: same_code.Kernel("", "other text")}

    (tmp_path / "include").mkdir()
    monkeypatch.setattr(same_code, "listed", listed)
    monkeypatch.setattr(same_code, "files_of", lambda base: nullcontext(tmp_path))
    makers = "include/deep_tile/reduce.cuh", "deep_tile/select/defaults.py"
    assert set(touched("1234", makers)) == {*splits, first, second}


def test_all_kernels_are_touched_where_the_commit_cannot_say(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "deep_tile").mkdir()
    monkeypatch.setattr(same_code, "files_of", lambda base: nullcontext(tmp_path))
    monkeypatch.setattr(same_code, "listed", lambda tree, comments: subprocess.run("false", check=True))
    assert touched("1234", ["tests/default_kernels.py"]) == list(EVERY_CONFIG)


def test_headers_are_in_the_kernels_that_they_are_said_to_be_in(monkeypatch, tmp_path):
    """A comment in each function of a header shows up in its users' PTX."""
    headers = {name: (HEADERS / name).read_text() for name, uses in USERS.items() if any(map(uses, EVERY_CONFIG))}
    function = re.compile(r"(__device__ __forceinline__ (?:[^;{}:]|::)*\)(?: const)? \{)")
    monkeypatch.setattr(jit.settings, "dump_dir", lambda: tmp_path)  # which remembers what the variable was
    for config in covering(EVERY_CONFIG, 1, 3):
        source = codegen.kernel_source(config)
        for name, text in headers.items():
            text = text[text.index("namespace deep_tile {") :].strip()
            assert source.count(text) == 1
            source = source.replace(text, function.sub(rf'\1 asm volatile("// code of {name}");', text))
        jit.compile_kernel(source, config.name)
        ptx = (tmp_path / f"{config.name}.ptx").read_text()
        found = {name for name in headers if f"// code of {name}" in ptx}
        assert found == {name for name in headers if USERS[name](config)}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_changes_are_those_since_main_or_on_main_of_its_last_commit(monkeypatch, tmp_path):
    def commit(name: str) -> str:
        (tmp_path / name).write_text("")
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "--quiet", "--message", name)
        return git(tmp_path, "rev-parse", "HEAD").strip()

    monkeypatch.setattr(changes, "ROOT", tmp_path)
    assert changes.base_commit() == ""
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    first = commit("a")
    assert changes.base_commit() == ""
    second = commit("b")
    assert changes.base_commit() == first
    git(tmp_path, "checkout", "--quiet", "-b", "branch")
    assert changes.base_commit() == first
    commit("c")
    commit("d")
    (tmp_path / "a").write_text("changed")
    (tmp_path / "new").write_text("")
    assert changes.base_commit() == second
    assert changes.changed_paths(second) == {"a", "c", "d", "new"}
