"""How the commands print: results to stdout, progress and errors to stderr."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track

from deep_tile.walls import product_flops

PROGRAM = "deep-tile"
WIDE = 200
"""Columns to print in where there is no terminal to ask."""


def new_console(stderr: bool = False) -> Console:
    """Text is printed as it is: brackets in a message are no markup."""
    wide = None if (sys.stderr if stderr else sys.stdout).isatty() else WIDE
    return Console(stderr=stderr, width=wide, markup=False, highlight=False, emoji=False)


def track_progress(items: Iterable, description: str, total: int | None = None) -> Iterable:
    return track(items, description, total=total, console=new_console(stderr=True))


def tflops_text(m: int, n: int, k: int, us: float) -> str:
    return f"{product_flops(m, n, k) / us / 1e6:.0f}"
