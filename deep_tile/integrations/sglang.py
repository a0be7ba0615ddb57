"""deep_tile inside SGLang: `register()`, which SGLang calls in each process by the entry point sglang.srt.plugins,
hooks block FP8 GEMMs, experts of MXFP4 and indexers if SGLANG_USE_DEEP_TILE is 1.

SGLang's hook registry wraps its Hopper GEMM functions: DeepGEMM's, its default; the functions that choose a layer's
quantisation method; and DeepGEMM's for an indexer's logits. Invariant: without the variable nothing is imported and
nothing changed.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable

from deep_tile.integrations import engines


def register() -> None:
    """Have SGLang's layers served by deep_tile where SGLANG_USE_DEEP_TILE is 1. A second call does nothing.

    Never raises: for an unknown release, or functions with other arguments, one log line says so and SGLang's own
    kernels run.
    """
    engines.enter(engines.SGLANG, _version, _hook)


def _version() -> str:
    import sglang

    return sglang.__version__


def _hook() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from deep_tile.integrations import sglang_hooks

    for target, hook in sglang_hooks.AROUND.items():
        _check_signature(target, hook)
    around = sglang_hooks.AROUND | _known("experts of MXFP4", "sglang_mxfp4")
    if "deep_tile" not in getattr(sys.modules.get("deep_gemm"), "__version__", ""):  # else it is ours already
        around = around | _known("the indexer", "sglang_indexer")
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in sglang_hooks.AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def _known(what: str, module: str) -> dict[str, Callable]:
    """Hooks of a module beside this one. A release whose functions for them are others keeps those: the rest is
    served."""
    try:
        hooks = importlib.import_module(f"deep_tile.integrations.{module}").AROUND
        for target, hook in hooks.items():
            _check_signature(target, hook)
    except Exception as error:  # what is imported raises anything
        engines.logger(engines.SGLANG).warning("deep_tile leaves %s to SGLang: %s", what, error)
        return {}
    return hooks


def _check_signature(target: str, hook: Callable) -> None:
    """Raise unless a function takes the arguments that its hook knows, in that order."""
    seen = list(inspect.signature(pkgutil.resolve_name(target)).parameters)
    known = list(inspect.signature(hook).parameters)[1:]
    if seen != known:
        raise RuntimeError(f"{target} takes {', '.join(seen)}; known are {', '.join(known)}")
