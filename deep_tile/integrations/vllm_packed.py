"""vLLM's experts of 4-bit weights through deep_tile: what vllm_mxfp4.py and vllm_int4.py beside it have in common.

vLLM's methods for such weights choose a backend, convert weights for it, and make its experts; functions that do so are
wrapped where the methods find them.
"""

from collections.abc import Callable
from enum import Enum
from typing import ClassVar

import torch

from deep_tile import grouped, packed_layers
from deep_tile.integrations.vllm_experts import DeepTileExperts, Products, activation_format
from deep_tile.integrations.vllm_linear import make_ready
from deep_tile.kinds import PACKED
from deep_tile.select.choose import LEAST_UNPACKED


class Backend(Enum):
    """What vLLM's methods hold as their backend: none of vLLM's own, so that no branch of theirs is taken."""

    DEEP_TILE = "DEEP_TILE"


class DeepTilePackedExperts(DeepTileExperts):
    """The base class for all formats: tokens come in BF16 and are cast by rows of 1x128."""

    scheme: ClassVar[object]
    """vLLM's key for the weights' format."""
    width_multiple = 1  # vLLM's methods hold widths to whole groups

    def _kind(self) -> str:
        """The name of the product's kind."""
        raise NotImplementedError

    def _make_ready(self) -> None:
        if self.w1_scale is None or not self.w1_scale.is_cuda:
            return
        k, width = self.moe_config.hidden_dim, self.moe_config.intermediate_size_per_partition
        shapes = (2 * width, k, LEAST_UNPACKED), (k, width, LEAST_UNPACKED)
        make_ready(shapes, grouping=self.grouping, kind=self._kind())

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % PACKED["mxfp4"].packing.group == 0  # as small as INT4's

    @classmethod
    def _supports_quant_scheme(cls, weight_key, activation_key) -> bool:
        return (weight_key, activation_key) == (cls.scheme, None)

    def _gate_up(self, a, a_scale, w1: torch.Tensor, out: torch.Tensor, products: Products) -> None:
        grouped.packed_grouped_gemm(a, a_scale, w1, self.w1_scale, out=out, **products)
        packed_layers.with_bias(out, self.w1_bias, products["offs"])

    def _down(self, h, h_scale, w2: torch.Tensor, out: torch.Tensor, products: Products) -> None:
        grouped.packed_grouped_gemm(h, h_scale, w2, self.w2_scale, out=out, **products)
        packed_layers.with_bias(out, self.w2_bias, products["offs"])


def serves(experts: type[DeepTilePackedExperts], config) -> bool:
    """Whether a class has experts of this configuration: it supports them, and no backend is asked for by name."""
    given = config, experts.scheme, None, activation_format(config)
    return config.moe_backend == "auto" and experts.is_supported_config(experts, *given)[0]


def packed(*given: torch.Tensor | None, **form: object) -> tuple[torch.Tensor | None, ...]:
    """Weights, scales and biases, each of gates and ups and of the second product, of what `PackedExperts.from_codes`
    takes.

    Raises:
        ValueError: `pack_weight` refuses a weight.
    """
    try:
        made = packed_layers.PackedExperts.from_codes(*given, **form)
    except ValueError as error:
        raise ValueError(f"{error}. With --moe-backend marlin vLLM's own kernels serve these experts") from error
    tensors = made.gate_up, made.down, made.gate_up_scale, made.down_scale, made.gate_up_bias, made.down_bias
    return tuple(None if x is None else x.data for x in tensors)


def wrap(owner: object, wrappers: dict[str, Callable[[Callable], Callable]]) -> Callable[[], None]:
    """Wrap functions of a module or class; gives what undoes it."""
    originals = {name: getattr(owner, name) for name in wrappers}
    for name, original in originals.items():
        setattr(owner, name, wrappers[name](original))

    def unwrap() -> None:
        for name, original in originals.items():
            setattr(owner, name, original)

    return unwrap
