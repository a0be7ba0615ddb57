"""What a user's type checker sees: every public name, with its types and none of them Any."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deep_tile
from deep_tile import compat, integrations

ROOT = Path(__file__).resolve().parent.parent
TYPED = ROOT / "tests" / "typed"
SCRIPT = TYPED / "every_name.py"


def declared(package) -> dict[str, str]:
    """The names that a package's stub imports, each with the module that it is from."""
    (stub,) = Path(package.__file__).parent.glob("__init__.pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def test_stub_declares_the_public_names():
    found = declared(deep_tile)
    wanted = {name: f"deep_tile.{module}.{name}" for name, module in deep_tile._MODULES.items()}
    wanted |= {name: f"deep_tile.{name}" for name in deep_tile._SUBMODULES}
    assert found == wanted
    assert set(found) == set(deep_tile.__all__)


@pytest.mark.parametrize("package", [compat, integrations], ids=lambda package: package.__name__)
def test_stub_declares_the_modules_of(package):
    modules = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
    assert modules >= set(declared(package)) > set()


def test_script_calls_every_public_name():
    missing = [name for name in deep_tile.__all__ if not re.search(rf"\b{name}\b", SCRIPT.read_text())]
    assert not missing


def test_mypy_strict_passes_the_script():
    pytest.importorskip("mypy", reason="needs mypy: pip install '.[test]'")
    command = [sys.executable, "-m", "mypy", "--config-file", TYPED / "mypy.ini", "--cache-dir", "/dev/null"]
    run = subprocess.run(
        [*command, "--no-site-packages", SCRIPT],
        cwd=ROOT,
        env={"MYPYPATH": f"{TYPED / 'stubs'}:{Path(deep_tile.__file__).parent.parent}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
