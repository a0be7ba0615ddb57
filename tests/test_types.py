"""A user's type checker sees every public name with its types, none of them Any."""

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
STUB = ROOT / "deep_tile" / "__init__.pyi"
ABOUT_STUB = (
    "The public names, for type checkers and editors. tests/test_types.py writes it, from those of `__init__.py`."
)


def stub_text() -> str:
    """`deep_tile/__init__.pyi`, sorted as ruff has it."""
    imports = [("deep_tile", name) for name in deep_tile._SUBMODULES]
    imports += [(f"deep_tile.{module}", name) for name, module in deep_tile._MODULES.items()]
    lines = [f"from {module} import {name} as {name}\n" for module, name in sorted(imports, key=in_order)]
    return f'"""{ABOUT_STUB}"""\n\n{"".join(lines)}\n__version__: str\n'


def in_order(imported: tuple[str, str]) -> tuple[str, int, str]:
    """Constants, classes, all else."""
    module, name = imported
    return module, 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def test_stub_declares_the_public_names():
    """If this fails: PYTHONPATH=. python tests/test_types.py --update."""
    assert STUB.read_text() == stub_text()
    assert set(deep_tile.__all__) == {*deep_tile._MODULES, *deep_tile._SUBMODULES}


@pytest.mark.parametrize("package", [compat, integrations], ids=lambda package: package.__name__)
def test_stub_declares_modules_of(package):
    (stub,) = Path(package.__file__).parent.glob("__init__.pyi")
    modules = {path.stem for path in stub.parent.glob("*.py")}
    declared = re.findall(rf"^from {package.__name__} import (\w+) as \1$", stub.read_text(), re.MULTILINE)
    assert modules >= set(declared) > set()


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


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: PYTHONPATH=. python tests/test_types.py --update")
    STUB.write_text(stub_text())
