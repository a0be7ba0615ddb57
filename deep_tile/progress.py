"""Progress of long work on stderr: a bar with the time left on a terminal, else a line now and then."""

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

from deep_tile.config import as_int

TOLD_EVERY = 10
"""Seconds between progress lines without a terminal."""


def track_progress(items: Iterable, description: str, total: int | None = None) -> Iterable:
    total = len(items) if total is None else total
    if sys.stderr is None:  # closed by a daemon
        return items
    if not sys.stderr.isatty():
        return _told(items, description, total)
    from rich.console import Console  # here, because quiet callers need neither
    from rich.progress import track

    return track(items, description, total=total, console=Console(stderr=True, markup=False, highlight=False))


def _told(items: Iterable, description: str, total: int) -> Iterable:
    told = monotonic()
    for done, item in enumerate(items):
        if monotonic() - told >= TOLD_EVERY:
            print(f"{description}: {done} of {total}", file=sys.stderr, flush=True)
            told = monotonic()
        yield item


def for_each(
    function: Callable[[Any], object], items: Iterable, workers: int | None, shown: bool, description: str
) -> None:
    """Call a function on every item, `workers` at a time, None: as many as there are cores; `shown`: with progress.
    Raises ValueError for other workers."""
    count = (os.cpu_count() or 1) if workers is None else as_int(workers)
    if count is None or count < 1:
        raise ValueError(f"workers is {workers!r}; pass a positive int, or None for all cores")
    items = list(items)
    with ThreadPoolExecutor(max_workers=count) as pool:
        done = pool.map(function, items)
        for _ in track_progress(done, description, len(items)) if shown else done:
            pass
