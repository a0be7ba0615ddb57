"""deep_tile inside SGLang: `register()`, which SGLang calls in each process by the entry point sglang.srt.plugins,
hooks block FP8 GEMMs and experts of MXFP4 if SGLANG_USE_DEEP_TILE is 1.

SGLang's hook registry wraps its Hopper GEMM functions: DeepGEMM's, its default; and the functions that choose a layer's
quantisation method. Invariant: without the variable nothing is imported and nothing changed.
"""

import inspect
import pkgutil
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
    for target, hook in (sglang_hooks.AROUND | _of_mxfp4()).items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in sglang_hooks.AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def _of_mxfp4() -> dict[str, Callable]:
    """Hooks for experts of MXFP4. A release whose functions for them are others has block FP8 served alone."""
    try:
        from deep_tile.integrations.sglang_mxfp4 import METHODS

        for target, hook in METHODS.items():
            _check_signature(target, hook)
    except (AttributeError, ImportError, RuntimeError) as error:
        engines.logger(engines.SGLANG).warning("deep_tile leaves experts of MXFP4 to SGLang: %s", error)
        return {}
    return METHODS


def _check_signature(target: str, hook: Callable) -> None:
    """Raise unless a function takes the arguments that its hook knows, in that order."""
    seen = list(inspect.signature(pkgutil.resolve_name(target)).parameters)
    known = list(inspect.signature(hook).parameters)[1:]
    if seen != known:
        raise RuntimeError(f"{target} takes {', '.join(seen)}; known are {', '.join(known)}")
