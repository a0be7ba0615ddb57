"""deep_tile inside SGLang: `register()`, which SGLang calls in each process by the entry point sglang.srt.plugins,
hooks block FP8 GEMMs if SGLANG_USE_DEEP_TILE is 1.

SGLang's hook registry wraps its Hopper GEMM functions: DeepGEMM's, its default. Invariant: without the variable nothing
is imported and nothing changed.
"""

import inspect
from collections.abc import Callable
from importlib import import_module

from deep_tile.integrations import engines


def register() -> None:
    """Have SGLang's block FP8 layers served by deep_tile where SGLANG_USE_DEEP_TILE is 1. A second call does nothing.

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
    for target, hook in sglang_hooks.AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    for target, hook in sglang_hooks.AFTER.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def _check_signature(target: str, hook: Callable) -> None:
    """Raise unless a function takes the arguments that its hook knows, in that order."""
    module, _, name = target.rpartition(".")
    seen = list(inspect.signature(getattr(import_module(module), name)).parameters)
    known = list(inspect.signature(hook).parameters)[1:]
    if seen != known:
        raise RuntimeError(f"{target} takes {', '.join(seen)}; known are {', '.join(known)}")
