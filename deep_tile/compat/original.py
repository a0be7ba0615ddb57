"""The original DeepGEMM, which serves names that deep_tile lacks.

It is the installed `deep_gemm`, else the one inside vLLM, and is imported at the first such name.
"""

import importlib
import importlib.util
import sys
import threading
from types import ModuleType

_NAME = "deep_gemm"
_BUNDLED = "vllm.third_party.deep_gemm"

_lock = threading.RLock()
_modules: list[ModuleType | None] = []
"""The one that has been found, or None where there is none; empty before anybody has looked."""

_reasons: list[str] = []
"""Why none was found."""


def keep(module: ModuleType | None) -> None:
    """Remember the previously imported `deep_gemm`; None: look for it when needed."""
    _modules[:] = [] if module is None else [module]
    _reasons.clear()


def find(path: str, name: str) -> object:
    """DeepGEMM's object with this name in module `path`, e.g. "deep_gemm.utils".

    Raises:
        AttributeError: it has none, or there is no DeepGEMM; the text is part of a sentence.
    """
    root = _load()
    if root is None:
        raise AttributeError(f"and no DeepGEMM can be imported: {'; '.join(_reasons)}")
    found = root
    for part in path.split(".")[1:]:
        found = getattr(found, part, None)
    if not hasattr(found, name):
        version = getattr(root, "__version__", "of an unknown version")
        raise AttributeError(f"and DeepGEMM {version} in {root.__name__} has none either")
    return getattr(found, name)


def _load() -> ModuleType | None:
    with _lock:
        if not _modules:
            _modules.append(_import_installed() or _imported(_BUNDLED))
        return _modules[0]


def _import_installed() -> ModuleType | None:
    """Import it under its own name: deep_tile's modules with that name are set aside and restored."""
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == _NAME}
    try:
        return _imported(_NAME)
    finally:
        if ours:
            for name in [name for name in sys.modules if name.split(".")[0] == _NAME]:
                del sys.modules[name]
            sys.modules.update(ours)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception as error:  # libraries raise anything without a GPU, driver or compiler
        _reasons.append(" ".join(f"{name}: {error}".split()))
        return None
