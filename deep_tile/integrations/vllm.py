"""deep_tile inside vLLM: `register()`, which vLLM calls in each of its processes, by the entry point
vllm.general_plugins, and which hooks linear layers and experts of block FP8 where VLLM_USE_DEEP_TILE is 1.

vLLM has no place for such classes of others in front of its own: the list that it chooses linear kernels from is added
to, and the function that chooses experts is wrapped.
Invariant: without the variable nothing is changed but vLLM's table of variables; nothing here calls CUDA, so that
vLLM may still fork.
"""

import functools
import sys
from collections.abc import Callable

from deep_tile import __version__
from deep_tile.integrations import engines

_originals: dict[str, Callable] = {}
"""What has been wrapped, by name, while registered."""


def register() -> None:
    """Have vLLM's block FP8 layers served by deep_tile where VLLM_USE_DEEP_TILE is 1. A second call does nothing.

    The variable becomes one of vLLM's: with it the keys of the compile cache tell graphs of deep_tile from others.
    Never raises: for a release that is not known, one line of vLLM's log says so, and its own kernels serve.
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

    from deep_tile.integrations.vllm_experts import EXPERTS
    from deep_tile.integrations.vllm_linear import DeepTileFp8BlockScaledMMKernel

    if engines.VLLM.variable not in environment_variables:
        raise RuntimeError(f"vllm.envs does not take {engines.VLLM.variable}, so its compile cache would mix up graphs")
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    backends = {name: fp8.Fp8MoeBackend[name] for name in EXPERTS}
    original = fp8.select_fp8_moe_backend

    @functools.wraps(original)
    def select_fp8_moe_backend(config, weight_key, activation_key, *arguments, **options):
        if config.moe_backend == "auto":
            form = _activation_format(config)
            for name, experts in EXPERTS.items():
                if experts.is_supported_config(experts, config, weight_key, activation_key, form)[0]:
                    return backends[name], experts
        return original(config, weight_key, activation_key, *arguments, **options)

    kernels.insert(0, DeepTileFp8BlockScaledMMKernel)
    _originals["select_fp8_moe_backend"] = original
    _put(original, select_fp8_moe_backend)


def _activation_format(config):
    """Of the experts that a configuration asks for, as vLLM finds it."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

    is_batched = config.moe_parallel_config.use_batched_activation_format
    return FusedMoEActivationFormat.BatchedExperts if is_batched else FusedMoEActivationFormat.Standard


def _unhook() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.platforms import PlatformEnum

    from deep_tile.integrations.vllm_linear import DeepTileFp8BlockScaledMMKernel

    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA].remove(DeepTileFp8BlockScaledMMKernel)
    _put(fp8.select_fp8_moe_backend, _originals.pop("select_fp8_moe_backend"))


def _put(old: Callable, new: Callable) -> None:
    """Replace a function wherever modules of vLLM have it by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(old.__name__) is old:
            setattr(module, old.__name__, new)
