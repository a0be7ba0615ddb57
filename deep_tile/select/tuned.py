"""Persistent results of `tune`.

Written by tools/tune.py; read by plan.py and method/, which hand it to choose.py: no torch, no CUDA. A file holds one
GPU model's choices, by `choose.bucket_key`: `{"gpu": ..., "num_sms": ..., "choices": {"MxNxK": {"us": ..., "config":
{GemmConfig fields}}}}`. Invariant: it is read once per process, and one that cannot be used costs a warning, never an
error: the selector does without.
"""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from deep_tile import settings
from deep_tile.config import GemmConfig

_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading a file may raise."""

_DRIVER_FILES = Path("/proc/driver/nvidia/gpus")


class Choice(NamedTuple):
    """A bucket's fastest config, and its microseconds when tuned."""

    config: GemmConfig
    us: float


def configs(num_sms: int) -> Mapping[str, GemmConfig]:
    """The configs in `choices`, as choose.py takes them."""
    return {key: choice.config for key, choice in choices(num_sms).items()}


def choices(num_sms: int) -> Mapping[str, Choice]:
    """Choices by `choose.bucket_key`, for `num_sms` SMs: the tuned GPU's full count."""
    return _all_choices().get(num_sms, {})


@lru_cache(maxsize=1)
def _all_choices() -> dict[int, dict[str, Choice]]:
    found: dict[int, dict[str, Choice]] = {}
    for path in _files():
        try:
            num_sms, tuned = _read(path)
        except _UNUSABLE as error:
            remedy = "Remove the file, and run `python -m deep_tile tune` again"
            is_named_wrongly = isinstance(error, IsADirectoryError)
            _warn(f" in {path}", error, "Set DEEP_TILE_TUNED to a file" if is_named_wrongly else remedy)
            continue
        found.setdefault(num_sms, {}).update(tuned)
    return found


def _warn(where: str, error: Exception, remedy: str) -> None:
    text = f"deep_tile ignores the tuned choices{where}: {type(error).__name__}: {error}. {remedy}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _files() -> list[Path]:
    """The user's file, if it exists; else the files for this machine's GPUs. None in a directory that cannot be read,
    such as another user's home."""
    named, directory = settings.tuned_file(), _directory()
    try:
        if named is not None:
            return [named] if named.exists() else []
        paths = [] if directory is None else sorted(directory.glob("*.json"))
    except OSError as error:
        _warn("", error, "Set DEEP_TILE_CACHE_DIR to a directory that this user can read and write")
        return []
    stems = {_file_name(gpu) for gpu in _gpus_of_machine()}
    return [path for path in paths if not stems or path.name in stems]


def _gpus_of_machine() -> set[str]:
    """GPU models from the driver's files, without initialising it; if it does not show them, another GPU's choices may
    be used: correct, perhaps not the fastest."""
    models = set()
    for path in _DRIVER_FILES.glob("*/information"):
        try:
            text = path.read_text()
        except OSError:
            continue
        models.update(re.findall(r"^Model:\s*(.*\S)", text, re.MULTILINE))
    return models


def _read(path: Path) -> tuple[int, dict[str, Choice]]:
    data = json.loads(path.read_text())
    tuned = {key: Choice(GemmConfig(**entry["config"]), float(entry["us"])) for key, entry in data["choices"].items()}
    return int(data["num_sms"]), tuned


def path_for(gpu: str) -> Path | None:
    """File for a GPU model's choices; None without a cache directory."""
    directory = _directory()
    return settings.tuned_file() or (directory and directory / _file_name(gpu))


def _directory() -> Path | None:
    cache = settings.cache_dir()
    return cache and cache / "tuned"


def _file_name(gpu: str) -> str:
    return re.sub(r"[^\w.-]+", "_", gpu) + ".json"


def store(gpu: str, num_sms: int, found: Mapping[str, Choice]) -> Path:
    """Add choices to a GPU's file, which this process uses too. A file for another SM count of the same model, or a
    damaged one, is replaced. Raises OSError where there is nowhere to keep them."""
    path = path_for(gpu)
    if path is None:
        raise FileNotFoundError("no directory to keep tuned choices in; set DEEP_TILE_TUNED or DEEP_TILE_CACHE_DIR")
    with settings.only_writer(path):
        merged = {**_kept(path, num_sms), **found}
        entries = {key: {"us": round(choice.us, 3), "config": asdict(choice.config)} for key, choice in merged.items()}
        settings.write_json(path, {"gpu": gpu, "num_sms": num_sms, "choices": entries})
    _all_choices.cache_clear()
    return path


def _kept(path: Path, num_sms: int) -> dict[str, Choice]:
    """The choices in a file that stay: those for as many SMs."""
    try:
        old_num_sms, kept = _read(path)
    except _UNUSABLE:
        return {}
    return kept if old_num_sms == num_sms else {}
