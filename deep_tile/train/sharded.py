"""Linear layers over DTensors: each rank casts and multiplies its own part, as in torch's tensor-parallel styles.

Blocks of 128 start with each rank's part, so a scale belongs to one rank. Communication equals a BF16 layer's under
DTensor.
"""

import sys

import torch

from deep_tile.train.linear import linear
from deep_tile.train.recipe import Recipe


def is_sharded(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether one is a DTensor; False if DTensor is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(weight, module.DTensor) | isinstance(x, module.DTensor)


def sharded_linear(x, weight, bias, recipe: Recipe):
    """`linear` for DTensors on one 1-D mesh.

    Weights may be split by rows (whole x, result split by columns), by columns (x split along k, result summed over
    ranks), or not at all.

    Raises:
        TypeError: only some of x, weight and bias are DTensors.
        ValueError: they are split in another way, or on several meshes.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, each in given.items():
        if not isinstance(each, DTensor):
            raise TypeError(f"{name} is not a DTensor, but another argument is: distribute it as well")
        if each.device_mesh != x.device_mesh:
            raise ValueError(f"{name} is on {each.device_mesh}, but x on {x.device_mesh}: distribute both on one mesh")
    whole, last = Replicate(), Shard(x.dim() - 1)
    ways = {
        (Shard(0), whole): (Partial(), Shard(0), last),
        (Shard(1), last): (last, Shard(1), Partial()),
        (whole, whole): (whole, whole, whole),
        **{(whole, Shard(i)): (Shard(i), Partial(), Shard(i)) for i in range(x.dim() - 1)},
    }
    way = ways.get((weight.placements[0], x.placements[0])) if weight.device_mesh.ndim == 1 else None
    if way is None:
        raise ValueError(
            f"x is split as {x.placements} and weight as {weight.placements}; ColwiseParallel splits a weight by rows, "
            "of a whole x, RowwiseParallel by columns, of an x that is split along k"
        )
    of_x, of_parameters, of_result = way
    added_later = bias is not None and of_result.is_partial()
    inner = None if bias is None or added_later else _local(bias, of_parameters)
    product = _Sent.apply(linear(_local(x, of_x), _local(weight, of_parameters), inner, recipe=recipe))
    shape = torch.empty(*x.shape[:-1], weight.shape[0], device="meta")
    result = DTensor.from_local(
        product, weight.device_mesh, (of_result,), run_check=False, shape=shape.shape, stride=shape.stride()
    )
    return result + bias.to(result.dtype) if added_later else result


class _Sent(torch.autograd.Function):
    """A layer's result, whose gradient may still be on its way from other ranks."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return dy.wait() if isinstance(dy, AsyncCollectiveTensor) else dy


def _local(x, of_gradient) -> torch.Tensor:
    """A rank's part, once it is there."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    part = x.to_local(grad_placements=(of_gradient,))
    return part.clone() if isinstance(part, AsyncCollectiveTensor) else part
