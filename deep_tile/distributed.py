"""Layers over several GPUs: which shardings the ops take, as torch's DTensor asks for them, and styles for
`torch.distributed.tensor.parallel.parallelize_module`.

Called by users. Importing it registers the shardings and has `fp8_linear` take DTensors; nothing else of deep_tile
imports torch.distributed. docs/distributed.md shows how models are split.
Invariant: a weight is split along with its scale, in whole blocks of 128x128, or refused; that is decided by global
sizes and placements, which every rank knows, before anything is sent or launched.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from deep_tile import nn, ops, quantize, tensors
from deep_tile.config import SCALE_BLOCK, round_up

STYLES = ("column", "row")

_Sharding = tuple[list[Placement], list[Placement]]
"""Of the results and of the tensors given, along one dimension of a mesh."""

_Axis = tuple[Any, int]
"""A DTensorSpec and one of its tensor's dimensions."""

_WHOLE = Replicate()


def check_shardable(n: int, k: int, ranks: int, style: str) -> None:
    """Check that a weight and its scale can be split alike. Sends nothing; the answer is the same on every rank.

    Args:
        n, k: sizes of the whole weight [n, k].
        ranks: how many share it.
        style: "column" to split n, each rank computing some columns of the result; "row" to split k, each rank
            computing a part of every sum.

    Raises:
        ValueError: what is split is no multiple of 128 times `ranks`, or `style` is unknown.
    """
    if style not in STYLES:
        raise ValueError(f"style is {style!r}; use {' or '.join(map(repr, STYLES))}")
    name, size = ("n", n) if style == "column" else ("k", k)
    _check_split(name, size, ranks)


class _LinearStyle(ParallelStyle):
    """Of a `deep_tile.nn.Linear`; subclasses say how its tensors lie."""

    style: str
    weight: Placement
    bias: Placement
    input_layout: Placement
    output_layout: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        self.input_layouts = (input_layouts or self.input_layout,)
        self.output_layouts = (output_layouts or self.output_layout,)
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f"{type(self).__name__} splits deep_tile.nn.Linear; got {type(module).__name__}. Convert the layer "
                "with deep_tile.nn.Linear.from_float, or use torch's own styles"
            )
        check_shardable(module.out_features, module.in_features, device_mesh.size(), self.style)
        return distribute_module(module, device_mesh, self._partition, self._distribute_input, self._collect_output)

    def _partition(self, _: str, module: nn.Linear, mesh: DeviceMesh) -> None:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            placement = self.bias if name == "bias" else self.weight
            split = _distribute(parameter.detach(), mesh, placement, self.src_data_rank)
            module.register_parameter(name, torch.nn.Parameter(split, requires_grad=parameter.requires_grad))

    def _distribute_input(self, _: nn.Linear, inputs: tuple, mesh: DeviceMesh) -> DTensor:
        x = inputs[0]
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a layer that is split takes a tensor, and casts it itself")
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        return x.redistribute(placements=(self.input_layout,))

    def _collect_output(self, _: nn.Linear, out: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        out = out.redistribute(placements=self.output_layouts)
        return out.to_local() if self.use_local_output else out


class ColumnParallel(_LinearStyle):
    """Split a `deep_tile.nn.Linear` by columns of its result, as torch's ColwiseParallel does torch.nn.Linear.

    Weight, scale and bias are split along n, the input is whole, and each rank computes its columns exactly as one
    process would with batch_invariant=True.

    Args:
        input_layouts: how the layer's input lies where it is no DTensor; Replicate() when None.
        output_layouts: how the output is wanted; Shard(-1) when None.
        use_local_output: return the local tensor, not the DTensor.

    Raises, when it is applied:
        TypeError: the module is no `deep_tile.nn.Linear`.
        ValueError: n is no multiple of 128 times the size of the mesh.
    """

    style = "column"
    weight, bias = Shard(0), Shard(0)
    input_layout, output_layout = Replicate(), Shard(-1)


class RowParallel(_LinearStyle):
    """Split a `deep_tile.nn.Linear` along k, as torch's RowwiseParallel does torch.nn.Linear.

    Each rank multiplies its columns of the input by its columns of the weight. The products, rounded to the output's
    dtype, are then summed over the ranks in that dtype: options of the layer may have out_dtype=torch.float32.

    Args:
        input_layouts: how the layer's input lies where it is no DTensor; Shard(-1) when None.
        output_layouts: how the output is wanted; Replicate(), an all-reduce, when None.
        use_local_output: return the local tensor, not the DTensor.

    Raises, when it is applied:
        TypeError: the module is no `deep_tile.nn.Linear`.
        ValueError: k is no multiple of 128 times the size of the mesh.
    """

    style = "row"
    weight, bias = Shard(1), Replicate()
    input_layout, output_layout = Shard(-1), Replicate()


def _distribute(x: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None) -> DTensor:
    """Like distribute_tensor; FP8 travels as bytes, which every backend sends, and its rows stay aligned."""
    if x.dtype != quantize.FP8_DTYPE:
        return distribute_tensor(x, mesh, [placement], src_data_rank=source)
    shard = distribute_tensor(x.view(torch.uint8), mesh, [placement], src_data_rank=source).to_local()
    local = tensors.with_aligned_rows(shard.view(quantize.FP8_DTYPE))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())


# Shardings of the ops. A rule sees a DTensorSpec for each tensor. It names combinations of placements along one
# dimension of a mesh; DTensor takes the one that moves least and, of equals, the first. So whole tensors come first,
# and a weight's split is offered only where something is split that way: no dimension of the mesh gets it unasked.


def _linear_rule(x, b, b_scale=None, bias=None, **_: Any) -> list[_Sharding]:
    return _product_shardings([x], b, b_scale, bias)


def _gemm_rule(a, a_scale, b, b_scale, bias=None, *, activation: str | None = None, **_: Any) -> list[_Sharding]:
    return _product_shardings([a, a_scale], b, b_scale, bias, is_sum=activation is None)


def _product_shardings(inputs: list, b, b_scale, bias, is_sum: bool = True) -> list[_Sharding]:
    """What is no sum over k, for an activation, is not split along k."""
    last = len(inputs[0].shape) - 1
    weights, biases = _given(b, b_scale), _given(bias)

    def sharding(out: Placement, of_inputs: Placement, of_weights: Placement, of_bias: Placement) -> _Sharding:
        return [out], [of_inputs] * len(inputs) + [of_weights] * len(weights) + [of_bias] * len(biases)

    shardings = [sharding(_WHOLE, _WHOLE, _WHOLE, _WHOLE)]
    shardings += [sharding(Shard(dim), Shard(dim), _WHOLE, _WHOLE) for dim in range(last)]
    if _is_split("n", b.shape[0], _axes(weights + biases, 0)):
        shardings.append(sharding(Shard(last), _WHOLE, Shard(0), Shard(0)))
    if is_sum and _is_split("k", b.shape[1], _axes(weights, 1), _axes(inputs, last)):
        shardings.append(sharding(Partial(), Shard(last), Shard(1), Partial()))
    return shardings


def _backward_rule(grad, x, b, b_scale=None, *, x_dtype=None, bias_dtype=None, **_: Any) -> list[_Sharding]:
    """Gradients that nobody wants are empty, and have no dimension to split."""
    last = len(grad.shape) - 1
    inputs, weights = _given(x), _given(b, b_scale)
    wanted = (x_dtype is not None, x is not None, bias_dtype is not None)

    def sharding(
        results: tuple[Placement, ...], of_grad: Placement, of_x: Placement, of_weights: Placement
    ) -> _Sharding:
        out = [placement if is_wanted else _WHOLE for placement, is_wanted in zip(results, wanted, strict=True)]
        return out, [of_grad] + [of_x] * len(inputs) + [of_weights] * len(weights)

    summed = Partial()
    shardings = [sharding((_WHOLE, _WHOLE, _WHOLE), _WHOLE, _WHOLE, _WHOLE)]
    shardings += [sharding((Shard(dim), summed, summed), Shard(dim), Shard(dim), _WHOLE) for dim in range(last)]
    if _is_split("n", b.shape[0], _axes(weights, 0), _axes([grad], last)):
        shardings.append(sharding((summed, Shard(0), Shard(0)), Shard(last), _WHOLE, Shard(0)))
    if _is_split("k", b.shape[1], _axes(weights, 1), _axes(inputs, last)):
        shardings.append(sharding((Shard(last), Shard(1), _WHOLE), _WHOLE, Shard(last), Shard(1)))
    return shardings


def _token_cast_rule(x, **_: Any) -> list[_Sharding]:
    last = len(x.shape) - 1
    dims = range(last + _is_split("k", x.shape[last], [], _axes([x], last)))
    return [([_WHOLE] * 2, [_WHOLE]), *(([Shard(dim)] * 2, [Shard(dim)]) for dim in dims)]


def _block_cast_rule(w, **_: Any) -> list[_Sharding]:
    dims = [dim for dim, name in enumerate("nk") if _is_split(name, w.shape[dim], _axes([w], dim))]
    return [([_WHOLE] * 2, [_WHOLE]), *(([Shard(dim)] * 2, [Shard(dim)]) for dim in dims)]


def _refuse_out(*_: Any, **__: Any) -> list[_Sharding]:
    raise ValueError("out is given with DTensors, whose results are allocated: leave out out")


def _given(*specs: Any) -> list:
    return [spec for spec in specs if spec is not None]


def _axes(specs: list, dim: int) -> list[_Axis]:
    return [(spec, dim) for spec in specs]


def _is_split(name: str, size: int, of_weights: list[_Axis], of_others: Sequence[_Axis] = ()) -> bool:
    """Whether one of these axes, all of one size, is split, and all can be.

    Weights that are split where no block ends are refused. Others are then gathered, as DTensor does with what an op
    takes otherwise.
    """
    ranks = _ranks([*of_weights, *of_others])
    if _ranks(of_weights):
        _check_split(name, size, ranks)
    return ranks > 0 and _fits(size, ranks)


def _ranks(axes: list[_Axis]) -> int:
    """Over how many ranks one of these axes is split, which may be one; 0 where none is."""
    if not axes:
        return 0
    mesh = axes[0][0].mesh
    sizes = [
        mesh.size(i)
        for i in range(mesh.ndim)
        if any(getattr(spec.placements[i], "dim", None) == dim for spec, dim in axes)
    ]
    return prod(sizes) if sizes else 0


def _fits(size: int, ranks: int) -> bool:
    return ranks == 1 or size % (SCALE_BLOCK * ranks) == 0


def _check_split(name: str, size: int, ranks: int) -> None:
    if not _fits(size, ranks):
        raise ValueError(
            f"{name} of the weight is {size}, split over {ranks} ranks: it must be a multiple of {SCALE_BLOCK} * "
            f"{ranks}, or shards of the weight and of its scale, one for each {SCALE_BLOCK}x{SCALE_BLOCK} block, do "
            f"not belong together. Pad it to {round_up(size, SCALE_BLOCK * ranks)}, split it over fewer ranks, or keep "
            "it whole"
        )


def _register() -> None:
    defined = torch.ops.deep_tile
    for op, rule in (
        (defined.fp8_linear, _linear_rule),
        (defined.fp8_gemm, _gemm_rule),
        (defined.per_token_cast_to_fp8, _token_cast_rule),
        (defined.per_block_cast_to_fp8, _block_cast_rule),
    ):
        register_sharding(op.default)(rule)
        register_sharding(op.out)(_refuse_out)
    register_sharding(defined.fp8_linear_backward.default)(_backward_rule)
    ops.call_for(DTensor, AsyncCollectiveTensor)


_register()
