"""The DeepGEMM that deep_tile stands in front of: whoever asks for a name that deep_tile has not gets that one's.

Called by deep_gemm.py beside it. It is the package that is installed as `deep_gemm`, or else the one that vLLM brings
along, and it is imported when such a name is first asked for.
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
    """Remember what was imported as `deep_gemm` before; None: look for it when it is needed."""
    _modules[:] = [] if module is None else [module]
    _reasons.clear()


def find(path: str, name: str) -> object:
    """What DeepGEMM has by this name in the module `path`, "deep_gemm.utils" for instance.

    Raises:
        AttributeError: it has none, or there is no DeepGEMM; its text is that part of a sentence.
    """
    root = _load()
    if root is None:
        raise AttributeError(f"and no other DeepGEMM can be imported: {'; '.join(_reasons)}")
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
            _modules.append(_import_installed() or _import_bundled())
        return _modules[0]


def _import_installed() -> ModuleType | None:
    """By its own name, which deep_tile's modules have meanwhile: they are put aside and back."""
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == _NAME}
    try:
        return _imported(_NAME)
    finally:
        if ours:
            for name in [name for name in sys.modules if name.split(".")[0] == _NAME]:
                del sys.modules[name]
            sys.modules.update(ours)


def _import_bundled() -> ModuleType | None:
    return _imported(_BUNDLED)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception as error:  # what a library does where it finds no GPU, driver or compiler
        _reasons.append(" ".join(f"{name}: {error}".split()))
        return None
