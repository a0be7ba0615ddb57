"""Engines that load deep_tile as a plugin: their variable, releases, and state on this machine.

Imports no engine. Invariant: `enter` never raises: an exception in a plugin would end the engine's process.
"""

import logging
import os
import re
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

_PLUGIN = "deep_tile"
"""Name of the entry points."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class Engine(NamedTuple):
    """A package that loads plugins in each of its processes."""

    name: str
    group: str
    """Entry point group that it calls."""
    variable: str
    """1: deep_tile serves."""
    chosen_plugins: str
    """The engine's variable that names, separated by commas, the only plugins to load; unset: all."""
    oldest: tuple[int, ...]
    newer: tuple[int, ...]
    """Supported releases: from `oldest`, before `newer`."""


VLLM = Engine("vllm", "vllm.general_plugins", "VLLM_USE_DEEP_TILE", "VLLM_PLUGINS", (0, 26), (0, 34))
SGLANG = Engine("sglang", "sglang.srt.plugins", "SGLANG_USE_DEEP_TILE", "SGLANG_PLUGINS", (0, 5, 23), (0, 6))
ENGINES = (VLLM, SGLANG)

_entered: set[str] = set()
_refused: set[str] = set()
"""Engines refused in this process."""


def is_on(engine: Engine) -> bool:
    """The variable's value.

    Raises:
        ValueError: neither yes nor no.
    """
    text = os.environ.get(engine.variable, "").strip().lower()
    if text not in _ON + _OFF:
        raise ValueError(f"{engine.variable} is {os.environ[engine.variable]!r}; set it to 1 or 0")
    return text in _ON


def has_entered(engine: Engine) -> bool:
    """Whether deep_tile serves in this process."""
    return engine.name in _entered


def enter(engine: Engine, version: Callable[[], str], hook: Callable[[], None]) -> None:
    """Call `hook`, once in a process, where the variable and the release allow it.

    An obstacle, or an exception in `hook`, becomes one line in the engine's log, and the engine runs without deep_tile.
    """
    if engine.name in _entered | _refused:
        return
    try:
        if not is_on(engine):
            return
        problem = version_problem(engine, version())
        if problem:
            raise RuntimeError(problem)
        hook()
    except Exception as error:
        _refused.add(engine.name)
        reason = " ".join(str(error).split()) or type(error).__name__
        logger(engine).warning("deep_tile does not serve, %s's own kernels do: %s", engine.name, reason)
        return
    _entered.add(engine.name)
    logger(engine).info("deep_tile serves, by %s", engine.variable)


def leave(engine: Engine) -> bool:
    """Forget that `enter` was called; whether deep_tile served."""
    _refused.discard(engine.name)
    served = has_entered(engine)
    _entered.discard(engine.name)
    return served


def logger(engine: Engine) -> logging.Logger:
    """A child of the engine's logger, with its handlers and format."""
    return logging.getLogger(f"{engine.name}.deep_tile")


def version_problem(engine: Engine, version: str) -> str | None:
    """Why a release is not entered; None where it is."""
    digits = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(map(int, digits[0].split("."))) if digits else ()
    if engine.oldest <= numbers < engine.newer:
        return None
    known = f"from {_dotted(engine.oldest)} on, before {_dotted(engine.newer)}"
    return f"{engine.name} is {version}; releases {known} are known"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def installed_version(engine: Engine) -> str | None:
    """Version of the engine's package, without importing it; None if not installed."""
    try:
        return metadata.version(engine.name)
    except metadata.PackageNotFoundError:
        return None


def state(engine: Engine, version: str) -> tuple[bool, str, str]:
    """Whether engine processes with this environment use deep_tile, why, and the remedy."""
    found = next(filter(None, (look(engine, version) for look in _OBSTACLES)), None)
    return (True, f"hooked by {engine.variable}", "") if found is None else (False, f"not hooked: {found[0]}", found[1])


def _not_wanted(engine: Engine, _: str) -> tuple[str, str] | None:
    wanted = f"set {engine.variable} to 1 to have deep_tile serve"
    try:
        return None if is_on(engine) else (f"{engine.variable} is not set to 1", wanted)
    except ValueError as error:
        return str(error), wanted


def _not_known(engine: Engine, version: str) -> tuple[str, str] | None:
    problem = version_problem(engine, version)
    return problem and (problem, "install a release that is known, or a newer deep_tile")


def _not_announced(engine: Engine, _: str) -> tuple[str, str] | None:
    if any(point.name == _PLUGIN for point in metadata.entry_points(group=engine.group)):
        return None
    return f"no entry point {_PLUGIN} in {engine.group}", "install deep_tile with pip; sources on a path are not enough"


def _not_chosen(engine: Engine, _: str) -> tuple[str, str] | None:
    chosen = os.environ.get(engine.chosen_plugins)
    is_unset = chosen is None or (not chosen and engine is SGLANG)  # in vLLM an empty list means none
    if is_unset or _PLUGIN in [name.strip() for name in chosen.split(",")]:
        return None
    return f"{engine.chosen_plugins} is {chosen!r}", f"add {_PLUGIN} to {engine.chosen_plugins}, or unset it"


_OBSTACLES = (_not_wanted, _not_known, _not_announced, _not_chosen)
