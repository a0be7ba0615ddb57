"""Compares every kernel that the tests know in two trees: of all kinds, groups, finishes, layouts and casts. No GPU:

    PYTHONPATH=. python benchmarks/same_code.py BASE

BASE is a git revision or a folder with a checkout; the other tree is the one that this script lies in, as it is on
disk. Each tree has a process of its own, with the same NVRTC: its list of kernels (`EVERY_CONFIG` of
tests/default_kernels.py, and the streaming kernels), its generator and its compiler options. A kernel that one list
lacks is made by that tree all the same, if it can be. Kernels are equal by text where their sources without comments,
the options and the code of sass.py are: half a minute. Others are compiled, and their `.text` compared: 0.6 s each on
two cores. Lists those whose code differs, or that one tree cannot make; the exit code is 1 if there are any.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from deep_tile import sass

ROOT = Path(__file__).resolve().parent.parent

INSTRUCTION_BYTES = 16

IN_A_TREE = """
import ast, json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from deep_tile import cast, codegen, config, jit, sass

def code_of_hints():
    tree = ast.parse(Path(sass.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [line for line in node.body if not isinstance(getattr(line, "value", None), ast.Constant)
                         or not isinstance(line, ast.Expr)]
    return ast.dump(tree)

def known():
    from default_kernels import EVERY_CONFIG
    return {kernel.name: repr(kernel) for kernel in (*EVERY_CONFIG, *cast.all_kernels())}

def sources_of(kernels, of_another_tree):
    for name, text in kernels.items():
        try:
            kernel = eval(text, {**vars(config), **vars(codegen), **vars(cast)})
            is_gemm = isinstance(kernel, config.GemmConfig)
            yield name, (codegen.kernel_source if is_gemm else codegen.streaming_source)(kernel)
        except Exception:
            if not of_another_tree:
                raise

what, folder, given = sys.argv[1], Path(sys.argv[2]), json.load(sys.stdin)
kernels = known() if what.startswith("own") else given
sources = dict(sources_of(kernels, of_another_tree=what == "lacking"))
if what == "compiled":
    for name, source in sources.items():
        Path(folder, name).write_bytes(jit.compile_kernel(source, name).cubin)
else:
    hints = code_of_hints()
    jit._hints = lambda: hints  # for all of the text of sass.py
    if what == "own with comments":
        jit._without_comments = lambda source: source
    made = {name: [kernels[name], jit.identity(source).hex()] for name, source in sources.items()}
    Path(folder, "kernels").write_text(json.dumps(made))
"""
"""A program to run in a tree: it writes the kernels' keys and texts, or their cubins, into a folder."""


class Kernel(NamedTuple):
    """One of a tree.

    Attributes:
        made_of: the config, or the streaming kernel, as Python writes it.
        text: a hash of what it is compiled from.
    """

    made_of: str
    text: str


Kernels = dict[str, Kernel]
"""Kernels by name."""


def compare(base: Path, present: Path) -> int:
    """Print the differences between two trees. Returns the exit status."""
    trees = base, present
    with ThreadPoolExecutor(2) as pool:
        own = list(pool.map(listed, trees))
        lacking = [{name: there[name].made_of for name in there.keys() - here} for here, there in (own, own[::-1])]
        before, after = (ours | more for ours, more in zip(own, pool.map(_lacking, trees, lacking), strict=True))
        in_both = sorted(before.keys() & after.keys())
        changed = [name for name in in_both if before[name].text != after[name].text]
        made_of = [{name: kernels[name].made_of for name in changed} for kernels in (before, after)]
        old, new = pool.map(_codes, trees, made_of)
    different = [name for name in changed if old[name] != new[name]]
    for name in different:
        print(f"{name}: {_difference(old[name], new[name])}")
    for name in sorted(before.keys() ^ after.keys()):
        print(f"{name}: {'in BASE only' if name in before else 'not in BASE'}")
    kernels, alone = len(before.keys() | after.keys()), len(before.keys() ^ after.keys())
    by_text, by_code = len(in_both) - len(changed), len(changed) - len(different)
    print(
        f"{kernels} kernels: {by_text} equal by text, {by_code} equal by code, {len(different)} different, "
        f"{alone} in one tree only"
    )
    return 1 if different or alone else 0


def listed(tree: Path, comments: bool = False) -> Kernels:
    """The kernels that a tree's tests know. Where comments count, this takes a third of the time."""
    return _texts(tree, "own with comments" if comments else "own", {})


def _lacking(tree: Path, made_of: Mapping[str, str]) -> Kernels:
    """Kernels of another tree that this one can make, but does not list."""
    return _texts(tree, "lacking", made_of) if made_of else {}


def _texts(tree: Path, what: str, made_of: Mapping[str, str]) -> Kernels:
    with _made(tree, what, made_of) as folder:
        return {name: Kernel(*one) for name, one in json.loads((folder / "kernels").read_text()).items()}


def _codes(tree: Path, made_of: Mapping[str, str]) -> dict[str, bytes]:
    """Machine code by name."""
    with _made(tree, "compiled", made_of) as folder:
        return {path.name: _text(path.read_bytes()) for path in folder.iterdir()}


@contextlib.contextmanager
def _made(tree: Path, what: str, made_of: Mapping[str, str]) -> Iterator[Path]:
    """A folder with what the tree's own modules write into it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEP_TILE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), *sys.path])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", IN_A_TREE, what, folder]
        subprocess.run(command, cwd=tree, env=environment, check=True, text=True, input=json.dumps(made_of))
        yield Path(folder)


def _text(cubin: bytes) -> bytes:
    return b"".join(cubin[section] for section in sass.code_sections(cubin))


def _difference(before: bytes, after: bytes) -> str:
    old, new = map(_instructions, (before, after))
    return f"{old.total()} instructions, now {new.total()}: {(old - new).total()} gone, {(new - old).total()} new"


def _instructions(text: bytes) -> Counter[bytes]:
    return Counter(text[at : at + INSTRUCTION_BYTES] for at in range(0, len(text), INSTRUCTION_BYTES))


@contextlib.contextmanager
def _tree(base: str) -> Iterator[Path]:
    """A folder as it is, or a revision's files in a temporary folder."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with files_of(base) as folder:
        yield folder


@contextlib.contextmanager
def files_of(revision: str) -> Iterator[Path]:
    """A temporary folder with the files of a revision that make kernels.

    Raises:
        SystemExit: git knows no such revision.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "tree.tar")
        command = [
            "git",
            "-C",
            str(ROOT),
            "archive",
            "--output",
            str(archive),
            revision,
            "deep_tile",
            "include",
            "tests",
        ]
        if subprocess.run(command).returncode:
            raise SystemExit(f"BASE: got {revision!r}, wanted a git revision of {ROOT} or a folder")
        with tarfile.open(archive) as files:
            files.extractall(folder)
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the machine code of every kernel in two trees.")
    parser.add_argument("base", metavar="BASE", help="a git revision, or a folder with a checkout")
    with _tree(parser.parse_args(arguments).base) as base:
        return compare(base, ROOT)


if __name__ == "__main__":
    sys.exit(main())
