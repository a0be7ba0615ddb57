"""deep_tile inside vLLM: `register()`, which vLLM calls in each process by the entry point vllm.general_plugins, hooks
block FP8 linear layers, and experts of block FP8, of MXFP4 and of INT4, if VLLM_USE_DEEP_TILE is 1.

vLLM offers no registration ahead of its own classes: the plugin extends its list of linear kernels and wraps the
function that chooses experts. Invariant: without the variable only vLLM's table of variables changes; nothing here
calls CUDA, so vLLM may still fork.
"""

import functools
import importlib
import sys
from collections.abc import Callable

from deep_tile import __version__
from deep_tile.integrations import engines

_originals: dict[str, Callable] = {}
"""Wrapped functions, by name, while registered."""

_PACKED = {"MXFP4": "deep_tile.integrations.vllm_mxfp4", "INT4": "deep_tile.integrations.vllm_int4"}
"""Modules whose `hook` has experts of 4 bits served."""

_undo: list[Callable[[], None]] = []
"""What takes back those hooks, while registered."""


def register() -> None:
    """Have vLLM's block FP8 layers served by deep_tile where VLLM_USE_DEEP_TILE is 1. A second call does nothing.

    The variable joins vLLM's, so compile cache keys separate deep_tile's graphs from others. Never raises: for an
    unknown release one log line says so and vLLM's own kernels run.
    """
    from vllm import envs

    getattr(envs, "environment_variables", {}).setdefault(engines.VLLM.variable, _served_version)
    engines.enter(engines.VLLM, _version, _hook)


def unregister() -> None:
    """Undo `register()`, for layers that are made from now on."""
    if engines.leave(engines.VLLM):
        _unhook()


def _served_version() -> str:
    """The variable's value within vLLM: deep_tile's version where it serves, else nothing."""
    return __version__ if engines.has_entered(engines.VLLM) else ""


def _version() -> str:
    import vllm

    return vllm.__version__


def _hook() -> None:
    from vllm.envs import environment_variables
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.platforms import PlatformEnum

    from deep_tile.integrations.vllm_experts import EXPERTS, activation_format
    from deep_tile.integrations.vllm_linear import DeepTileFp8BlockScaledMMKernel

    if engines.VLLM.variable not in environment_variables:
        raise RuntimeError(
            f"vllm.envs does not take {engines.VLLM.variable}, so its compile cache would confuse graphs with and "
            "without deep_tile"
        )
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    backends = {name: fp8.Fp8MoeBackend[name] for name in EXPERTS}
    original = fp8.select_fp8_moe_backend

    @functools.wraps(original)
    def select_fp8_moe_backend(config, weight_key, activation_key, *arguments, **options):
        if config.moe_backend == "auto":
            form = activation_format(config)
            for name, experts in EXPERTS.items():
                if experts.is_supported_config(experts, config, weight_key, activation_key, form)[0]:
                    say_once(experts.__name__)
                    return backends[name], experts
        return original(config, weight_key, activation_key, *arguments, **options)

    kernels.insert(0, DeepTileFp8BlockScaledMMKernel)
    _originals["select_fp8_moe_backend"] = original
    _put(original, select_fp8_moe_backend)
    for name in _PACKED:
        _hook_packed(name)


@functools.cache
def say_once(experts: str) -> None:
    engines.logger(engines.VLLM).info("Using %s", experts)


def _hook_packed(name: str) -> None:
    """A release whose functions for such experts are others has all else served."""
    try:
        _undo.append(importlib.import_module(_PACKED[name]).hook())
    except Exception as error:  # what is imported raises anything
        engines.logger(engines.VLLM).warning("deep_tile leaves experts of %s to vLLM: %s", name, error)


def _unhook() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.platforms import PlatformEnum

    from deep_tile.integrations.vllm_linear import DeepTileFp8BlockScaledMMKernel

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA].remove(DeepTileFp8BlockScaledMMKernel)
    _put(fp8.select_fp8_moe_backend, _originals.pop("select_fp8_moe_backend"))
    while _undo:
        _undo.pop()()


def _put(old: Callable, new: Callable) -> None:
    """Replace a function in every vLLM module that imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(old.__name__) is old:
            setattr(module, old.__name__, new)
