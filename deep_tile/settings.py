"""deep_tile's environment variables: the only place that reads them, and the table that documents them.

Each variable is read at its first use, never at import, and then remembered: all calls in a process see the same value.
Files at the paths that variables name are shared by processes; `write_json` writes those of JSON, and `only_writer`
lets one process at a time add to one.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class BadVariable(ValueError):
    """An environment variable has a value that cannot be used; `remedy` says what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy

    def __reduce__(self) -> tuple:
        """Pickles: a pool's worker hands its error to the parent, which would wait for ever for one that it cannot
        read."""
        return type(self), (str(self), self.remedy)


class Variable(NamedTuple):
    """One row in docs/configuration.md's table; `deep-tile doctor` shows them too."""

    name: str
    meaning: str
    default: str


CACHE_DIR = Variable(
    "DEEP_TILE_CACHE_DIR",
    "Directory of compiled kernels (absolute path). It can be moved, or copied into an image.",
    "$DG_JIT_CACHE_DIR/deep_tile (DeepGEMM's; of a list, /a:/b, the first that can be written to), else "
    "$XDG_CACHE_HOME/deep_tile, else $HOME/.cache/deep_tile, else memory only",
)
CACHE_MAX_MB = Variable(
    "DEEP_TILE_CACHE_MAX_MB",
    "Limit of that directory in MiB; above it, the least recently used kernels are removed.",
    "512",
)
PRINT_CONFIG = Variable(
    "DEEP_TILE_PRINT_CONFIG",
    "1: print each newly chosen config.",
    "0",
)
DUMP_DIR = Variable(
    "DEEP_TILE_DUMP_DIR",
    "Directory (absolute path) that gets source, PTX, cubin and log of each kernel, and its SASS where nvdisasm is "
    "found. Kernels are then compiled even if they are cached.",
    "unset",
)

TUNED = Variable(
    "DEEP_TILE_TUNED",
    "File (absolute path) that `tune` adds its results to, and that the selector reads.",
    "tuned/<name of the GPU>.json in the cache directory",
)

BOUNDED_WAITS = Variable(
    "DEEP_TILE_BOUNDED_WAITS",
    "Debug: a kernel that has waited for a barrier that many seconds ends with an error, and "
    "`deep_tile.watch.report()` says which warp waited for what. Kernels are then compiled in each process, and "
    "slower.",
    "unset",
)

PACKAGED_KERNELS = Variable(
    "DEEP_TILE_PACKAGED_KERNELS",
    "0: compile every kernel here, even those that an installed wheel brings.",
    "1",
)

VARIABLES = (CACHE_DIR, CACHE_MAX_MB, PRINT_CONFIG, DUMP_DIR, TUNED, BOUNDED_WAITS, PACKAGED_KERNELS)

_LOCK_TIMEOUT_SECONDS = 10.0


@cache
def cache_dir() -> Path | None:
    """Directory for compiled kernels; None: keep them in memory."""
    return _absolute_path(CACHE_DIR) or _user_cache_dir()


@cache
def cache_max_bytes() -> int:
    """Size above which the cache directory is trimmed."""
    text = _read(CACHE_MAX_MB)
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise bad_value(CACHE_MAX_MB, text, "a positive integer")
    return int(text) << 20


@cache
def print_config() -> bool:
    """Whether to print each newly chosen config."""
    return _read_truth(PRINT_CONFIG)


@cache
def packaged_kernels() -> bool:
    """Whether kernels that the package brings are taken."""
    return _read_truth(PACKAGED_KERNELS)


@cache
def dump_dir() -> Path | None:
    """Directory for compiler input and output; None: not written."""
    return _absolute_path(DUMP_DIR)


@cache
def tuned_file() -> Path | None:
    """File with tuned choices; None: one per GPU model, in the cache directory."""
    return _absolute_path(TUNED)


@cache
def bounded_waits_ns() -> int | None:
    """Nanoseconds that a debug kernel waits for a barrier; None: normal builds."""
    text = os.environ.get(BOUNDED_WAITS.name)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= 3600:
        raise bad_value(BOUNDED_WAITS, text, "seconds from 0.001 to 3600")
    return round(seconds * 1e9)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keep other processes and threads from adding to a file between its reading and its writing. Where that fails, in
    a directory that cannot be written to for instance, or takes longer than ten seconds, go on without."""
    from filelock import FileLock

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(FileLock(f"{path}.lock").acquire(timeout=_LOCK_TIMEOUT_SECONDS))
        yield


def write_json(path: Path, data: object) -> None:
    """Replace a JSON file at once, so that neither readers nor a full disk meet half of one. Its permissions are the
    umask's: users may share it, and a temporary file of Python's is its owner's alone. Raises OSError if it cannot be
    written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replacement = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        replacement.write_text(json.dumps(data, indent=1) + "\n")
        replacement.replace(path)
    except OSError:
        replacement.unlink(missing_ok=True)
        raise


def _read(variable: Variable) -> str:
    return os.environ.get(variable.name) or variable.default


def _read_truth(variable: Variable) -> bool:
    text = _read(variable)
    if text not in ("0", "1"):
        raise bad_value(variable, text, "0 or 1")
    return text == "1"


def _absolute_path(variable: Variable) -> Path | None:
    text = os.environ.get(variable.name)
    if not text:
        return None
    if not Path(text).is_absolute():
        raise bad_value(variable, text, "an absolute path")
    return Path(text)


def _user_cache_dir() -> Path | None:
    """The user's cache directory by XDG rules: a relative path counts as unset. A missing HOME is not looked up
    elsewhere.

    DeepGEMM's variable comes first: whoever set it for an engine wants kernels kept there.
    """
    shared = [path for path in _paths("DG_JIT_CACHE_DIR", os.pathsep) if path.is_absolute()]
    if shared:
        return next(filter(_can_be_written, shared), shared[0]) / "deep_tile"
    for name, subdirectory in (("XDG_CACHE_HOME", "deep_tile"), ("HOME", ".cache/deep_tile")):
        (base,) = _paths(name)
        if base.is_absolute():
            return base / subdirectory
    return None


def _paths(name: str, separator: str = "\0") -> list[Path]:
    return [Path(text) for text in os.environ.get(name, "").split(separator)]


def _can_be_written(directory: Path) -> bool:
    """Whether this process may make files there, and the directory itself where it does not exist."""
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # asks for no permission
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def bad_value(variable: Variable, seen: str, wanted: str) -> BadVariable:
    """The error to raise about a variable's value."""
    return BadVariable(
        f"environment variable {variable.name}: got {seen!r}, wanted {wanted}; unset, it means {variable.default}",
        f"set {variable.name} to {wanted}, or unset it",
    )
