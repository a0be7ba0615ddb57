"""How the commands print: results to stdout, progress and errors to stderr."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track

from deep_tile.walls import product_flops

PROGRAM = "deep-tile"

INSTALL_NVRTC = 'pip install "deep_tile[cu13]", or "deep_tile[cu12]" beside a PyTorch for CUDA 12'

MISSING = {
    "torch": "pip install torch",
    "matplotlib": 'pip install "deep_tile[bench]"',
    "cuda": INSTALL_NVRTC,
}
"""What to do about an import that fails, by package."""

WIDE = 200
"""Columns to print in where there is no terminal to ask."""


def remedy_for_missing(error: ModuleNotFoundError) -> str | None:
    """How to install a package that a command needs and others do without; None: it belongs to every installation."""
    return MISSING.get((error.name or "").partition(".")[0])


def new_console(stderr: bool = False) -> Console:
    """Text is printed as it is: brackets in a message are no markup."""
    wide = None if (sys.stderr if stderr else sys.stdout).isatty() else WIDE
    return Console(stderr=stderr, width=wide, markup=False, highlight=False, emoji=False)


def track_progress(items: Iterable, description: str, total: int | None = None) -> Iterable:
    return track(items, description, total=total, console=new_console(stderr=True))


def tflops_text(m: int, n: int, k: int, us: float) -> str:
    return f"{product_flops(m, n, k) / us / 1e6:.0f}"
