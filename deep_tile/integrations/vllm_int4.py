"""vLLM's experts of INT4 with a scale for each group through deep_tile, as compressed-tensors packs them (Kimi-K2):
`hook` has them served where vLLM would choose Marlin, and their weights packed.

The method of compressed-tensors asks for a backend without saying its format; what it has chosen is replaced when it is
made. Invariant: weights with zero points or act-order, and backends and activations that are asked for, are left alone.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static

from deep_tile.integrations.vllm import say_once
from deep_tile.integrations.vllm_packed import Backend, DeepTilePackedExperts, packed, serves, wrap
from deep_tile.packed import KINDS_OF_INT4

_METHODS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"

_IN_ORDER = (None, "weight", "static")
"""Orders of calibration after which columns of a group are beside each other."""

_ZEROS = 0x88888888 - 2**32
"""A word of eight zeros: an integer is saved with 8 added. To change these bits makes two's complement of it."""


class DeepTileInt4Experts(DeepTilePackedExperts):
    """Experts of symmetric INT4 in groups of 32, 64 or 128."""

    scheme = kInt4Static

    def _kind(self) -> str:
        return KINDS_OF_INT4[_format(self.block_shape[1])]


def _format(group: int | None) -> str:
    return f"int4_{group}"


def _is_ours(method) -> bool:
    """Whether deep_tile takes the place of what a method has chosen."""
    quant = method.weight_quant
    return (
        method.wna16_backend is WNA16MoEBackend.MARLIN
        and (quant.num_bits, quant.type, quant.symmetric, quant.strategy) == (4, "int", True, "group")
        and _format(quant.group_size) in KINDS_OF_INT4
        and quant.actorder in _IN_ORDER
        and envs.VLLM_MARLIN_INPUT_DTYPE is None
        and serves(DeepTileInt4Experts, method.moe)
    )


def _choosing(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self, *arguments, **options) -> None:
        original(self, *arguments, **options)
        if _is_ours(self):
            self.wna16_backend, self.experts_cls = Backend.DEEP_TILE, DeepTileInt4Experts

    return init


def _codes(words: torch.nn.Parameter, scale: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [experts, n, k / 2] in uint8, and scales, of words whose lowest bits have the first of eight integers along
    k. Releases up to 0.29 load both with n last."""
    given = [x.data.mT if words.is_transposed else x.data for x in (words, scale)]
    return (given[0].contiguous() ^ _ZEROS).view(torch.uint8), given[1]


def _converting(original: Callable) -> Callable:
    @functools.wraps(original)
    def convert(*, backend, **given):
        if backend is not Backend.DEEP_TILE:
            return original(backend=backend, **given)
        weights = [part for name in ("w13", "w2") for part in _codes(given[name], given[f"{name}_scale"])]
        made = packed(*weights, format=_format(given["quant_config"].group_size))[:4]
        orders = [given["w13"].new_empty(0)] * 4 if "w13_g_idx" in given else []  # of columns, in releases up to 0.29
        return (*made, *orders, *[None] * 6)  # neither zero points nor scales of inputs nor biases

    return convert


def _making(original: Callable) -> Callable:
    """vLLM's function makes experts of its own classes alone."""

    @functools.wraps(original)
    def make(*, moe_quant_config, moe_config, experts_cls, routing_tables, **others):
        given = {"moe_quant_config": moe_quant_config, "moe_config": moe_config, "routing_tables": routing_tables}
        if experts_cls is not DeepTileInt4Experts:
            return original(**given, experts_cls=experts_cls, **others)
        sends_nothing = maybe_make_prepare_finalize(
            moe_config, moe_quant_config, routing_tables=routing_tables, allow_new_interface=True
        )
        say_once(experts_cls.__name__)
        return mk.FusedMoEKernel(sends_nothing, experts_cls(moe_config, moe_quant_config))

    return make


def _method() -> tuple[ModuleType, type]:
    """The method that vLLM chooses for Marlin, and its module; older releases have one for Marlin alone."""
    try:
        module = importlib.import_module(f"{_METHODS}.compressed_tensors_moe_wna16_marlin")
    except ModuleNotFoundError:
        module = importlib.import_module(f"{_METHODS}.compressed_tensors_moe_wna16")
        return module, module.CompressedTensorsWNA16MoEMethod
    return module, module.CompressedTensorsWNA16MarlinMoEMethod


def hook() -> Callable[[], None]:
    """Wrap the functions; gives what undoes it."""
    module, method = _method()
    undo = [
        wrap(module, {"convert_to_wna16_moe_kernel_format": _converting, "make_wna16_moe_kernel": _making}),
        wrap(method, {"__init__": _choosing}),
    ]

    def unhook() -> None:
        for each in undo:
            each()

    return unhook
