"""A wheel built from this tree: what is in it, what building it needs, and that it works where the tree is not."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["LICENSE", "README.md", "pyproject.toml", "setup.py", "csrc", "deep_tile", "include", "tests"]


def copy_sources(destination: Path) -> None:
    """What a fresh clone holds: nothing built."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, destination / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, destination / name)


def forbid_imports(folder: Path, *modules: str) -> str:
    """A PYTHONPATH entry in which each of `modules` refuses to be imported."""
    folder.mkdir()
    for module in modules:
        (folder / f"{module}.py").write_text(f"raise ImportError('the build must not need {module}')\n")
    return str(folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    copy_sources(sources)
    pythonpath = forbid_imports(folder / "forbidden", "torch", "numpy", "cuda")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    build = subprocess.run(
        [*command, "--wheel-dir", folder, sources],
        env=os.environ | {"PYTHONPATH": pythonpath},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that the wheel is unpacked in."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(installed: Path, code: str) -> str:
    """Runs `code` in a process that sees the wheel's content instead of this tree."""
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"],
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_one_wheel_for_every_python(wheel):
    assert wheel.name.startswith("deep_tile-")
    assert "-cp310-abi3-linux_" in wheel.name


def test_content(wheel):
    """The package, its extension and its headers, and nothing else."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = {f"deep_tile/{path.relative_to(ROOT / 'deep_tile')}" for path in (ROOT / "deep_tile").rglob("*.py")}
    headers = {f"deep_tile/include/deep_tile/{path.name}" for path in (ROOT / "include/deep_tile").iterdir()}
    data = {"deep_tile/select/times/fp8.json", "deep_tile/method/measured.json"}
    assert set(names) == modules | headers | data | {"deep_tile/_launcher.abi3.so"}


def test_installed_package_generates_the_same_kernels(installed):
    """The headers in the wheel are found, and are the tree's."""
    from deep_tile.codegen import kernel_source
    from deep_tile.config import GemmConfig

    code = """
from deep_tile.codegen import kernel_source
from deep_tile.config import GemmConfig
import deep_tile._launcher
print(deep_tile.__file__, deep_tile._launcher.__file__)
print(kernel_source(GemmConfig(block_m=128, block_n=128, stages=4)), end="")
"""
    files, source = run_installed(installed, code).split("\n", maxsplit=1)
    assert all(Path(file).is_relative_to(installed) for file in files.split())
    assert source == kernel_source(GemmConfig(block_m=128, block_n=128, stages=4))


def test_installed_package_explains_with_measurements(installed):
    """The times and measurements that the package carries are found without the tree."""
    code = "import deep_tile\nprint(deep_tile.__file__, deep_tile.explain(4096, 4096, 7168)['measured']['source'])"
    file, source = run_installed(installed, code).split(maxsplit=1)
    assert Path(file).is_relative_to(installed)
    assert "h200" in source
