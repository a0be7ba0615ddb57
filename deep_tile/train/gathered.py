"""Weights that FSDP2 gathers as FP8: each rank casts its rows, and bytes and scales are sent in the place of BF16.

FSDP2 asks a parameter's own class what to gather, by `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Where blocks of
128 rows lie in one rank each, codes are those that one process makes.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from deep_tile import both, quantize, tensors
from deep_tile.config import SCALE_BLOCK

_aten = torch.ops.aten
_KEEPING = {
    *(
        _aten.alias,
        _aten.as_strided,
        _aten.clone,
        _aten.detach,
        _aten.empty_like,
        _aten.new_empty,
        _aten.new_zeros,
        _aten._pin_memory,
    ),
    *(_aten.slice, _aten.split, _aten._to_copy, _aten.view),
}
"""Operations that make a `Shard` from a `Shard`: FSDP and copies use them."""


class Shard(torch.Tensor):
    """A weight, or a rank's rows of it, in its own dtype and memory. FSDP calls its methods to gather it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, wide: torch.Tensor):
        return torch.Tensor._make_subclass(cls, wide)

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        with torch._C._DisableTorchDispatch():
            made = function(*args, **(kwargs or {}))
            if function.overloadpacket not in _KEEPING:
                return made
            return tree_map(lambda x: cls(x) if type(x) is torch.Tensor else x, made)

    def plain(self) -> torch.Tensor:
        """The weight as a plain tensor, in the same memory."""
        with torch._C._DisableTorchDispatch():
            return self.detach()

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Tensors to send, and whether they are FP8: codes as bytes and scales, or else the padded rows."""
        rows, wide = -(-outer_size[0] // mesh.size()), self.plain()
        if outer_size[0] % (mesh.size() * SCALE_BLOCK) or outer_size[1] % tensors.ALIGNMENT_BYTES or not _takes(module):
            padded = F.pad(wide, (0, 0, 0, rows - wide.shape[0]))
            return (padded if mp_policy.param_dtype is None else padded.to(mp_policy.param_dtype),), False
        b, b_scale = quantize.per_block_cast_to_fp8(wide, **module.recipe.cast)
        return (b.view(torch.uint8), b_scale), True

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """The whole weight. A second one lies in the memory of the first, which FSDP has filled again."""
        if out is not None:
            return None
        if not metadata:
            return all_gather_outputs[0], ()
        codes, b_scale = all_gather_outputs
        return Gathered(codes.view(quantize.FP8_DTYPE), b_scale, param_dtype), ()


class Gathered(torch.Tensor):
    """A whole weight that exists in FP8 only; torch operations see it dequantised to `dtype`.

    Attributes:
        b, b_scale: as `per_block_cast_to_fp8` makes them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype):
        return torch.Tensor._make_wrapper_subclass(cls, b.shape, dtype=dtype, device=b.device)

    def __init__(self, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype):
        self.b, self.b_scale = b, b_scale

    def transposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The transpose's codes and scales, as dgrad takes them."""
        return both.transpose_fp8(self.b), self.b_scale.mT

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):  # of the same shape, by FSDP
            return cls(args[0].b, args[0].b_scale, args[0].dtype)
        wide = lambda x: quantize.dequantize(x.b, x.b_scale).to(x.dtype) if isinstance(x, cls) else x  # noqa: E731
        return function(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


torch.serialization.add_safe_globals([Shard])


def any_gathered(weights: Iterable[torch.Tensor]) -> bool:
    """Whether any weight is gathered in FP8. A compiler would lose such weights' gradients."""
    return any(isinstance(weight, (Shard, Gathered)) for weight in weights)


def _takes(module: nn.Module) -> bool:
    """Whether a layer multiplies by the weight in FP8 alone."""
    return getattr(getattr(module, "recipe", None), "dgrad", None) == "fp8"
