"""Compares the machine code of every default kernel in two trees. No GPU:

    PYTHONPATH=. python benchmarks/same_code.py BASE [--changed]

BASE is a git revision or a folder with a checkout; the other tree is the one that this script lies in, as it is on
disk. Each tree's own selector, generator and compiler options make its kernels, in a process of its own and with the
same NVRTC; that takes one and a half minutes on two cores. Lists the kernels whose `.text` differs, or that one tree
lacks; the exit code is 1 if there are any.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from deep_tile import sass

ROOT = Path(__file__).resolve().parent.parent

INSTRUCTION_BYTES = 16

MAKE_KERNELS = """
import sys
from pathlib import Path
from deep_tile import jit
from deep_tile.codegen import kernel_source
try:
    from deep_tile.select.defaults import default_configs
except ImportError:  # a tree of before select/ was a package
    from deep_tile.select import default_configs

kind, folder, *names = sys.argv[1:]
for config in (*default_configs(True), *default_configs(False)):
    if names and config.name not in names:
        continue
    source = kernel_source(config)
    content = source.encode() if kind == "source" else jit.compile_kernel(source, config.name).cubin
    Path(folder, config.name).write_bytes(content)
"""
"""Writes the source or the cubin of each kernel, or of those named, into a folder; to be run in a tree."""


def compare(base: Path, present: Path, changed_only: bool = False) -> int:
    """Print what differs between two trees, and return the exit code."""
    alike, names = _by_source(base, present) if changed_only else (0, [])
    before, after = _of_both(base, present, "cubin", names) if names or not changed_only else ({}, {})
    before, after = ({name: _text(cubin) for name, cubin in cubins.items()} for cubins in (before, after))
    compiled = sorted(before.keys() | after.keys())
    different = [name for name in compiled if before.get(name) != after.get(name)]
    for name in different:
        print(f"{name}: {_difference(before.get(name), after.get(name))}")
    kernels = alike + len(compiled)
    print(f"{kernels - len(different)} of {kernels} identical")
    return 1 if different else 0


def _by_source(base: Path, present: Path) -> tuple[int, list[str]]:
    """How many kernels have the same source in both trees, and the names of the others."""
    before, after = _of_both(base, present, "source")
    everywhere = before.keys() | after.keys()
    changed = sorted(name for name in everywhere if before.get(name) != after.get(name))
    return len(everywhere) - len(changed), changed


def _of_both(base: Path, present: Path, kind: str, names: Iterable[str] = ()) -> list[dict[str, bytes]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(partial(_kernels, kind=kind, names=names), (base, present)))


def _kernels(tree: Path, kind: str, names: Iterable[str]) -> dict[str, bytes]:
    """Content by kernel, made by the tree's own modules."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEP_TILE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), *sys.path])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", MAKE_KERNELS, kind, folder, *names]
        subprocess.run(command, cwd=tree, env=environment, check=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _text(cubin: bytes) -> bytes:
    return b"".join(cubin[section] for section in sass.code_sections(cubin))


def _difference(before: bytes | None, after: bytes | None) -> str:
    if before is None:
        return "not in BASE"
    if after is None:
        return "in BASE only"
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
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "tree.tar")
        command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), base, "deep_tile", "include"]
        if subprocess.run(command).returncode:
            raise SystemExit(f"BASE: got {base!r}, wanted a git revision of {ROOT} or a folder")
        with tarfile.open(archive) as files:
            files.extractall(folder)
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the machine code of every default kernel in two trees.")
    parser.add_argument("base", metavar="BASE", help="a git revision, or a folder with a checkout")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="compile only kernels whose text differs: quick, and blind to what jit.py and sass.py do",
    )
    options = parser.parse_args(arguments)
    with _tree(options.base) as base:
        return compare(base, ROOT, options.changed)


if __name__ == "__main__":
    sys.exit(main())
