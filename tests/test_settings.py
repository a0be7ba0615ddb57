"""Environment variables: defaults, precedence, refusals. No GPU."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_jit import unprivileged

from deep_tile import settings

READERS = (
    *(settings.cache_dir, settings.cache_max_bytes, settings.print_config, settings.dump_dir, settings.tuned_file),
    settings.bounded_waits_ns,
    settings.packaged_kernels,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [variable.name for variable in settings.VARIABLES] + ["DG_JIT_CACHE_DIR", "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    forget()
    yield
    forget()


def forget():
    for reader in READERS:
        reader.cache_clear()


def test_defaults():
    assert settings.cache_dir() == Path("/home/someone/.cache/deep_tile")
    assert settings.cache_max_bytes() == 512 * 2**20
    assert settings.print_config() is False
    assert settings.dump_dir() is None
    assert settings.tuned_file() is None
    assert settings.bounded_waits_ns() is None
    assert settings.packaged_kernels() is True


def test_values(monkeypatch):
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", "/caches/mine")
    monkeypatch.setenv("DEEP_TILE_CACHE_MAX_MB", "3")
    monkeypatch.setenv("DEEP_TILE_PRINT_CONFIG", "1")
    monkeypatch.setenv("DEEP_TILE_DUMP_DIR", "/dumps")
    monkeypatch.setenv("DEEP_TILE_TUNED", "/tuned/mine.json")
    monkeypatch.setenv("DEEP_TILE_BOUNDED_WAITS", "0.25")
    monkeypatch.setenv("DEEP_TILE_PACKAGED_KERNELS", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert settings.cache_dir() == Path("/caches/mine")
    assert settings.cache_max_bytes() == 3 * 2**20
    assert settings.print_config() is True
    assert settings.dump_dir() == Path("/dumps")
    assert settings.tuned_file() == Path("/tuned/mine.json")
    assert settings.bounded_waits_ns() == 250_000_000
    assert settings.packaged_kernels() is False


@pytest.mark.parametrize(
    ("xdg", "home", "wanted"),
    [
        ("/xdg", "/home/someone", Path("/xdg/deep_tile")),
        ("", "/home/someone", Path("/home/someone/.cache/deep_tile")),
        ("relative", "/home/someone", Path("/home/someone/.cache/deep_tile")),
        ("/xdg", None, Path("/xdg/deep_tile")),
        (None, "", None),
        (None, None, None),
    ],
)
def test_cache_dir_without_own_variable(monkeypatch, xdg, home, wanted):
    for name, value in (("XDG_CACHE_HOME", xdg), ("HOME", home)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert settings.cache_dir() == wanted


@pytest.mark.parametrize(
    ("deep_gemm", "wanted"),
    [("/dg", Path("/dg/deep_tile")), ("relative", Path("/xdg/deep_tile")), ("", Path("/xdg/deep_tile"))],
)
def test_deep_gemm_s_cache_dir_is_taken_before_the_user_s(monkeypatch, deep_gemm, wanted):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", deep_gemm)
    assert settings.cache_dir() == wanted


def test_a_closed_directory_of_a_list_is_passed_over(monkeypatch):
    with tempfile.TemporaryDirectory() as base:
        closed, mine = Path(base, "closed"), Path(base, "mine")
        closed.mkdir()
        mine.mkdir()
        for path, mode in ((Path(base), 0o755), (mine, 0o777), (closed, 0)):
            path.chmod(mode)
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)  # which asks for the real user's rights
        monkeypatch.setenv("DG_JIT_CACHE_DIR", f"{closed}/inner/more:{mine}")
        with unprivileged():
            assert settings.cache_dir() == mine / "deep_tile"


def test_of_a_list_the_first_that_can_be_written_to_is_taken(monkeypatch, tmp_path):
    closed, file, new = tmp_path / "closed", tmp_path / "file", tmp_path / "open" / "new"
    file.touch()
    cannot = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "closed" and cannot(path, mode))
    closed.mkdir()
    monkeypatch.setenv("DG_JIT_CACHE_DIR", f"relative:{closed / 'inner'}:{file}::{new}:{tmp_path}")
    assert settings.cache_dir() == new / "deep_tile"
    forget()
    monkeypatch.setenv("DG_JIT_CACHE_DIR", f"{closed}:{file}")
    assert settings.cache_dir() == closed / "deep_tile"  # which is then refused, by name
    forget()
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "relative::")
    assert settings.cache_dir() == Path("/home/someone/.cache/deep_tile")


def test_own_variable_comes_before_deep_gemm_s(monkeypatch):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/dg")
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", "/caches/mine")
    assert settings.cache_dir() == Path("/caches/mine")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("DEEP_TILE_CACHE_DIR", "relative/dir", settings.cache_dir),
        ("DEEP_TILE_CACHE_DIR", "~/cache", settings.cache_dir),
        ("DEEP_TILE_CACHE_MAX_MB", "0", settings.cache_max_bytes),
        ("DEEP_TILE_CACHE_MAX_MB", "-5", settings.cache_max_bytes),
        ("DEEP_TILE_CACHE_MAX_MB", "1.5", settings.cache_max_bytes),
        ("DEEP_TILE_CACHE_MAX_MB", "²", settings.cache_max_bytes),
        ("DEEP_TILE_CACHE_MAX_MB", "9" * 5000, settings.cache_max_bytes),
        ("DEEP_TILE_PRINT_CONFIG", "yes", settings.print_config),
        ("DEEP_TILE_DUMP_DIR", "here", settings.dump_dir),
        ("DEEP_TILE_TUNED", "mine.json", settings.tuned_file),
        ("DEEP_TILE_PACKAGED_KERNELS", "no", settings.packaged_kernels),
        ("DEEP_TILE_BOUNDED_WAITS", "yes", settings.bounded_waits_ns),
        ("DEEP_TILE_BOUNDED_WAITS", "0", settings.bounded_waits_ns),
        ("DEEP_TILE_BOUNDED_WAITS", "nan", settings.bounded_waits_ns),
    ],
)
def test_bad_value_names_variable_and_value(monkeypatch, name, value, read):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="wanted") as error:
        read()
    assert name in str(error.value)
    assert repr(value) in str(error.value)
    sent = pickle.loads(pickle.dumps(error.value))  # as from a worker of a pool
    assert (str(sent), sent.remedy) == (str(error.value), error.value.remedy)


@pytest.mark.parametrize("variable", settings.VARIABLES, ids=lambda variable: variable.name)
def test_empty_means_default(monkeypatch, variable):
    wanted = [read() for read in READERS]
    forget()
    monkeypatch.setenv(variable.name, "")
    assert [read() for read in READERS] == wanted


def test_read_once(monkeypatch):
    assert settings.print_config() is False
    monkeypatch.setenv("DEEP_TILE_PRINT_CONFIG", "1")
    assert settings.print_config() is False


def test_not_read_at_import():
    environment = dict(os.environ) | {variable.name: "bad" for variable in settings.VARIABLES}
    subprocess.run([sys.executable, settings.__file__], env=environment, check=True)


def test_package_reads_the_environment_here_only():
    texts = {path.name: path.read_text() for path in Path(settings.__file__).parent.glob("*.py")}
    assert [name for name, text in texts.items() if "os.environ" in text or "getenv" in text] == ["settings.py"]


def test_threads_that_write_a_file_leave_each_other_theirs(tmp_path):
    path = tmp_path / "new" / "choices.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: settings.write_json(path, [number] * 5000), range(200)))  # raises what one raised
    assert len(json.loads(path.read_text())) == 5000
    assert list(path.parent.iterdir()) == [path]
