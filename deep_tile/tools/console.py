"""How the commands print: results to stdout, errors to stderr; progress.py adds progress."""

import os
import re
import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console

from deep_tile.walls import product_flops

PROGRAM = "deep-tile"

INSTALL_NVRTC = 'pip install "deep_tile[cu13]", or "deep_tile[cu12]" beside a PyTorch for CUDA 12'

MISSING = {
    "torch": "pip install torch",
    "matplotlib": 'pip install "deep_tile[bench]"',
    "cuda": INSTALL_NVRTC,
}
"""The remedy for a failed import, by package."""

WIDE = 200
"""Columns to print in where neither a terminal nor COLUMNS says how many."""


def remedy_for_missing(error: ModuleNotFoundError) -> str | None:
    """How to install a package that a command needs and others do without; None: it belongs to every installation."""
    return MISSING.get((error.name or "").partition(".")[0])


def new_console(stderr: bool = False) -> Console:
    """Text is printed literally: brackets are not markup."""
    file = sys.stderr if stderr else sys.stdout
    if file.isatty():
        return Console(file=file, markup=False, highlight=False, emoji=False)
    wide = None if os.environ.get("COLUMNS", "").strip("0") else WIDE  # rich would print nothing in 0 columns
    return Console(file=_Stripped(file), width=wide, markup=False, highlight=False, emoji=False)


class _Stripped:
    """A non-terminal file that gets no trailing spaces."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = getattr(file, "encoding", None)  # rich draws by it

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        self._file.flush()


def exit_code(run: Callable[[], int]) -> int:
    """The exit code of a command; an error that a user can mend is one line on stderr and code 1."""
    for name in ("stdout", "stderr"):  # None where a daemon closed them
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough: quietly, as rich ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        remedy = remedy_for_missing(error)
        if remedy is None:
            raise
        print(f"{PROGRAM}: {error}. To fix: {remedy}", file=sys.stderr)
        return 1
    except (RuntimeError, OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


def tflops_text(m: int, n: int, k: int, us: float) -> str:
    return f"{product_flops(m, n, k) / us / 1e6:.0f}"
