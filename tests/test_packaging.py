"""A wheel built from this tree: its content, what its build needs, and that it works elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.about(
    "setup.py",
    "pyproject.toml",
    "Makefile",
    "MANIFEST.in",
    "constraints.txt",
    "csrc/*",
    "deep_tile/__init__.py",
    "deep_tile/packaged.py",
    "deep_tile/tools/pack.py",
    "deep_tile/*.json",
)

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["benchmarks", "csrc", "deep_tile", "docs", "examples", "include", "tests"]
FILES = ["CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt"]
SOURCES = [*FILES, "mkdocs.yml", "pyproject.toml", "setup.py", *FOLDERS]
OLDEST_GLIBC = (2, 28)
"""The glibc that torch's wheels need since 2.7."""


def copy_sources(destination: Path) -> None:
    """Copy the files of a fresh clone, without anything built."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, destination / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, destination / name)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    copy_sources(folder)
    return folder


def forbid_imports(folder: Path, *modules: str) -> str:
    """A PYTHONPATH entry in which each of `modules` refuses to be imported."""
    folder.mkdir()
    for module in modules:
        (folder / f"{module}.py").write_text(f"raise ImportError('the build must not need {module}')\n")
    return str(folder)


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
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


@pytest.fixture(scope="module")
def unpacked(sources, tmp_path_factory) -> Path:
    """The folder that the sdist is unpacked in."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder], cwd=sources, check=True)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


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


def test_a_python_without_gil_has_a_wheel_of_its_own(sources, tmp_path):
    """Pretended: this Python's variables say that it has none."""
    pretending = tmp_path / "sitecustomize.py"
    pretending.write_text('import sysconfig\nsysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1\n')
    tree = shutil.copytree(sources, tmp_path / "tree")
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", tmp_path]
    build = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (built,) = tmp_path.glob("*.whl")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{version}-{version}" in built.name
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "installed")
    (extension,) = (tmp_path / "installed" / "deep_tile").glob("_launcher.*.so")
    assert "abi3" not in extension.name
    found = run_installed(tmp_path / "installed", "from deep_tile import _launcher; print(_launcher.__file__)")
    assert found.strip() == str(extension)


def test_the_launcher_keeps_the_gil(tmp_path):
    """The branch for a Python without a GIL compiles, with its two names declared."""
    declared = tmp_path / "declared.h"
    declared.write_text(
        "#include <Python.h>\n#define Py_MOD_GIL_USED ((void *)0)\nint PyUnstable_Module_SetGIL(PyObject *, void *);\n"
    )
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-DPy_GIL_DISABLED", "-I", sysconfig.get_paths()["include"]]
    command = ["cc", *flags, "-include", declared, "-E", ROOT / "csrc" / "launch.c"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"PyUnstable_Module_SetGIL\(module, \(\(void \*\)0\)\) != 0", text)
    subprocess.run([*command[:-2], "-fsyntax-only", command[-1]], check=True)


@pytest.mark.parametrize(
    "code", ["import deep_tile; deep_tile.fp8_gemm", "from deep_tile import fp8_gemm", "import deep_tile.nn"]
)
def test_a_checkout_without_its_extension_says_how_to_build_it(sources, code):
    program = f"import sys; sys.path.insert(0, {str(sources)!r})\n{code}"
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("-packages"))}
    command = [sys.executable, "-S", "-c", program]  # without what an editable install has Python find
    run = subprocess.run(command, cwd=sources, env=found, capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: deep_tile's C extension, _launcher, is not built in {sources / 'deep_tile'}:")
    assert "`python setup.py build_ext --inplace`, or `pip install -e .`" in last


def test_content(wheel):
    """The package, its extension and its headers, and nothing else."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = {f"deep_tile/{path.relative_to(ROOT / 'deep_tile')}" for path in (ROOT / "deep_tile").rglob("*.py")}
    headers = {f"deep_tile/include/deep_tile/{path.name}" for path in (ROOT / "include/deep_tile").iterdir()}
    times = {f"deep_tile/select/times/{path.name}" for path in (ROOT / "deep_tile/select/times").iterdir()}
    data = times | {"deep_tile/method/measured.json"}
    stubs = {f"deep_tile/{path.relative_to(ROOT / 'deep_tile')}" for path in (ROOT / "deep_tile").rglob("*.pyi")}
    assert set(names) == modules | headers | data | stubs | {"deep_tile/_launcher.abi3.so", "deep_tile/py.typed"}


def test_index_can_follow_every_link(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = archive.read(name).decode()
    repository = re.search("^Project-URL: Repository, (.*)$", metadata, re.MULTILINE)[1]
    links = re.findall(r"\]\(([^)\s]+)\)", metadata)
    assert f"{repository}/raw/main/docs/figures/speed.svg" in links and f"{repository}/blob/main/docs/api.md" in links
    assert all(link.startswith("https://") for link in links)


def test_extension_loads_where_pytorch_does(installed):
    """The extension needs no newer versions of glibc's functions, wherever it was built."""
    extension = (installed / "deep_tile" / "_launcher.abi3.so").read_bytes()
    versions = [tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", extension)]
    assert versions and max(versions) <= OLDEST_GLIBC


def test_sdist_holds_every_source(sources, unpacked):
    def files(folder: Path) -> set[Path]:
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path for path in found if path.parts[0] in SOURCES}

    assert files(sources) == files(unpacked)


def test_tests_run_in_the_sdist(unpacked):
    """Some that read golden choices and stored measurements."""
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=unpacked, check=True)
    some = ["tests/test_select.py", "tests/test_docs.py", "-k", "golden or tables_of_a_stored_run"]
    command = [sys.executable, "-m", "pytest", "-q", *some]
    run = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


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


# ---- beside an installed PyTorch

INDEX = {
    "torch": {"2.99": ()},  # what pip turns to where it cannot keep the one that is installed
    "numpy": {"2.4.6": ()},
    "filelock": {"4.2.11": ()},
    "rich": {"15.0.0": ()},
    "cuda_core": {"1.2.2": ("numpy",)},
    "cuda_bindings": dict.fromkeys(("12.9.4", "12.9.10", "13.0.3", "13.4.4"), ()),
    "cuda_python": {version: (f"cuda-bindings~={version}",) for version in ("12.9.4", "12.9.10", "13.0.3", "13.4.4")},
    "nvidia_cuda_nvrtc_cu12": dict.fromkeys(("12.6.77", "12.8.93", "12.9.86"), ()),
    "nvidia_cuda_nvrtc": dict.fromkeys(("13.0.88", "13.2.86"), ()),
}
"""Releases by package with their requirements, as far as these matter to how pip installs ours."""

PYTORCHES = {
    "2.10.0+cu126": ("cu12", ("nvidia-cuda-nvrtc-cu12==12.6.77", "cuda-bindings==12.9.4")),
    "2.10.0": ("cu12", ("nvidia-cuda-nvrtc-cu12==12.8.93", "cuda-bindings==12.9.4")),
    "2.10.0+cu129": ("cu12", ("nvidia-cuda-nvrtc-cu12==12.9.86", "cuda-bindings==12.9.4")),
    "2.11.0": ("cu13", ("nvidia-cuda-nvrtc==13.0.88", "cuda-bindings>=13.0.3,<14")),
}
"""Releases of torch: our extra for each, and the versions that they pin."""


def write_stub(folder: Path, name: str, version: str, requirements: tuple[str, ...]) -> Path:
    """A wheel without content."""
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requirements)]
    files = {
        "METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{name}-{version}.dist-info/{file}", text)
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for name, releases in INDEX.items():
        for release, requirements in releases.items():
            write_stub(folder, name, release, requirements)
    return folder


@pytest.mark.parametrize("version", PYTORCHES)
def test_extra_leaves_the_installed_pytorch_alone(wheel, index, tmp_path, version):
    extra, pins = PYTORCHES[version]
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    there = [index / f"{pin.replace('-', '_').replace('==', '-')}-py3-none-any.whl" for pin in pins if "==" in pin]
    for stub in (write_stub(tmp_path, "torch", version, pins), *there):
        shutil.unpack_archive(stub, site_packages, "zip")
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install", "--quiet", "--dry-run"]
    report = tmp_path / "report.json"
    subprocess.run(
        [*pip, "--no-index", "--find-links", index, "--report", report, f"{wheel}[{extra}]"],
        env={
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        },  # a checkout's is not installed
        check=True,
    )
    new = {entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]}
    assert "deep_tile" in new
    assert "torch" not in new


def test_an_archive_is_refused(wheel):
    """Python imports modules out of it, but neither extensions nor the files that they read."""
    program = f"import sys; sys.path.insert(0, {str(wheel)!r}); import deep_tile"
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    assert re.search("ImportError: deep_tile is imported from an archive, .*: install it", run.stderr)
