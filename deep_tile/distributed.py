"""Tensor parallelism: the ops' shardings for torch's DTensor, and styles for
`torch.distributed.tensor.parallel.parallelize_module`.

Importing it registers the shardings and has `fp8_linear` take DTensors; nothing else in deep_tile imports
torch.distributed. docs/distributed.md shows how models are split. Invariant: a weight is split along with its scale, in
whole 128x128 blocks: shards that start or end inside a block are padded with zeros, and DTensors with such shards are
refused. The decision depends only on sizes and placements, which every rank knows, and falls before anything is sent or
launched.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from deep_tile import blocks, nn, ops, quantize, tensors
from deep_tile.config import SCALE_BLOCK, as_int, ceil_div, round_up

STYLES = ("column", "row")

_Sharding = tuple[list[Placement], list[Placement]]
"""Placements of results and inputs, along one mesh dimension."""

_Axis = tuple[Any, int]
"""A DTensorSpec and a tensor dimension."""

_WHOLE = Replicate()


class Part(NamedTuple):
    """A rank's range of a weight's rows or columns, as DTensor splits: equal parts, the last ones perhaps smaller.

    Attributes:
        begin, length: its first one, and how many.
        first: leading zeros, so that 128x128 blocks stay whole.
        padded: how many each rank has with the zeros, before and behind.
    """

    begin: int
    length: int
    first: int
    padded: int

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.length)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's operand columns [..., length], padded to [..., padded]."""
        return F.pad(x, (self.first, self.padded - self.first - self.length))


class WeightShard(NamedTuple):
    """A rank's part of a weight, for GEMMs without DTensors.

    Attributes:
        first: count of leading zero rows or columns.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    first: int

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pad this rank's columns of the other operand, for a weight split by "row": a copy, or the input itself if no
        padding is needed."""
        return F.pad(x, (self.first, 0)) if self.first else x


def check_shardable(n: int, k: int, ranks: int, style: str) -> int:
    """Return how many zero rows or columns each rank adds to keep blocks whole.

    Sends nothing, and is the same on every rank: 0 if the split size is a multiple of 128 * `ranks`, at most 254. The
    styles below pad shards by that much; `shard_weight` adds fewer where it can.

    Args:
        n, k: the whole weight's sizes, which `ranks` share.
        style: "column" splits n: each rank computes some result columns. "row" splits k: each rank computes partial
            sums.

    Raises:
        TypeError: a number is no int.
        ValueError: a number is not positive, or `style` is unknown.
    """
    sizes = {"n": as_int(n), "k": as_int(k), "ranks": as_int(ranks)}
    for given, (name, number) in zip((n, k, ranks), sizes.items(), strict=True):
        if number is None:
            raise TypeError(f"{name} is {given!r}, of type {type(given).__name__}; pass an int")
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be positive")
    size, ranks = (sizes["n"], sizes["k"])[_split_dim(style)], sizes["ranks"]
    return _part(size, ranks, 0).padded - ceil_div(size, ranks)


def shard_weight(
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    rank: int,
    ranks: int,
    style: str,
    *,
    max_error: float = 0.0,
) -> WeightShard:
    """Cut a rank's rows or columns out of a weight with 128x128 scales, at any boundaries.

    Cuts as torch.chunk does, so that the last ranks may have fewer, or none. A shard that starts inside a block gets
    new blocks if no row changes by more than `max_error`; calls then cost nothing extra. Otherwise it stays exact and
    starts with up to 127 zero rows or columns, which every GEMM reads. For "column" drop the result's first columns,
    `out[..., shard.first:]`, a view; for "row" pass `shard.pad(x)`, one torch kernel.

    Args:
        weight, weight_scale_inv: [..., n, k] float8_e4m3fn, such as [g, n, k] for experts, and its scale
            [..., ceil(n / 128), ceil(k / 128)].
        rank, ranks, style: as for `check_shardable`.
        max_error: as for `to_blocks`. 1e-3 suffices for scales that differ by powers of two, as in UE8M0: a few in
            100,000 elements change. Other scales round elements to e4m3 again, for which 1 / 16 suffices.

    Raises:
        TypeError, ValueError: as `check_shardable`, or shapes, dtypes or devices do not fit.
    """
    tensors.require_tensors(weight=weight, weight_scale_inv=weight_scale_inv)
    blocks.require_one_device(weight, weight_scale_inv, "weight_scale_inv")
    dim = _split_dim(style) - 2
    wanted = (*weight.shape[:-2], *quantize.scale_shape(weight.shape[-2:], quantize.WEIGHT_BLOCK))
    if weight.dtype != quantize.FP8_DTYPE or tuple(weight_scale_inv.shape) != wanted:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} and weight_scale_inv {list(weight_scale_inv.shape)}; they "
            f"must be {quantize.FP8_DTYPE} [..., n, k] and {list(wanted)}. deep_tile.to_blocks re-bases other formats"
        )
    tensors.require_scale_dtype("weight_scale_inv", weight_scale_inv)
    check_shardable(*weight.shape[-2:], ranks, style)
    if as_int(rank) is None or not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank!r}; it must be from 0 to {ranks - 1}")
    part = _part(weight.shape[dim], int(ranks), int(rank))
    return WeightShard(*blocks.shard(weight, weight_scale_inv, dim, part.begin, part.begin + part.length, max_error))


def _split_dim(style: str) -> int:
    if style not in STYLES:
        raise ValueError(f"style is {style!r}; use {' or '.join(map(repr, STYLES))}")
    return STYLES.index(style)


def _part(size: int, ranks: int, rank: int) -> Part:
    each = ceil_div(size, ranks)
    begin = min(rank * each, size)
    if _fits(size, ranks):
        return Part(begin, each, 0, each)
    begins = range(0, size, each)  # of ranks that have something; all but the last have a length, and repeat
    ends = ((other, min(other + each, size)) for other in (*begins[:SCALE_BLOCK], begins[-1]))
    padded = max(round_up(end - other // SCALE_BLOCK * SCALE_BLOCK, SCALE_BLOCK) for other, end in ends)
    length = min(begin + each, size) - begin
    return Part(begin, length, begin % SCALE_BLOCK if length else 0, padded)


class _LinearStyle(ParallelStyle):
    """A style for `deep_tile.nn.Linear`; subclasses give the placements."""

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
        parts = self._parts(module, device_mesh.size())
        if parts:
            module.shard_part = parts[device_mesh.get_local_rank()]
        return distribute_module(module, device_mesh, self._partition, self._distribute_input, self._collect_output)

    def _parts(self, module: nn.Linear, ranks: int) -> list[Part]:
        size = (module.out_features, module.in_features)[_split_dim(self.style)]
        return [] if _fits(size, ranks) else [_part(size, ranks, rank) for rank in range(ranks)]

    def _partition(self, _: str, module: nn.Linear, mesh: DeviceMesh) -> None:
        parts = self._parts(module, mesh.size())
        for name, parameter in [*module.named_parameters(recurse=False)]:
            placement = self.bias if name == "bias" else self.weight
            whole = parameter.detach()
            if parts and placement.is_shard():
                whole = _with_zeros(whole, placement.dim, parts, SCALE_BLOCK if name == "weight_scale_inv" else 1)
            split = _distribute(whole, mesh, placement, self.src_data_rank)
            module.register_parameter(name, torch.nn.Parameter(split, requires_grad=parameter.requires_grad))

    def _distribute_input(self, module: nn.Linear, inputs: tuple, mesh: DeviceMesh) -> DTensor:
        x = inputs[0]
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a layer that is split takes a tensor, and casts it itself")
        part = getattr(module, "shard_part", None) if self.style == "row" else None
        is_own = not isinstance(x, DTensor) and self.input_layouts[0] in (Shard(-1), Shard(x.dim() - 1))
        if part is not None and is_own:
            return DTensor.from_local(part.pad(x), mesh, (self.input_layout,), run_check=False)
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        x = x.redistribute(placements=(self.input_layout,))
        if part is None:
            return x
        return DTensor.from_local(part.pad(x.to_local()), mesh, (self.input_layout,), run_check=False)

    def _collect_output(self, module: nn.Linear, out: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        part = getattr(module, "shard_part", None) if self.style == "column" else None
        if part is not None:
            shape = (*out.shape[:-1], module.out_features)
            whole = {"shape": torch.Size(shape), "stride": tensors.dense_strides(shape)}
            own = out.to_local()[..., part.own]
            out = DTensor.from_local(own, mesh, (Shard(out.dim() - 1),), run_check=False, **whole)
        out = out.redistribute(placements=self.output_layouts)
        return out.to_local() if self.use_local_output else out


class ColumnParallel(_LinearStyle):
    """Split a `deep_tile.nn.Linear` by result columns, as torch's ColwiseParallel does for torch.nn.Linear.

    Weight, scale and bias are split along n, the input is whole, and each rank computes its columns with the bits of
    one process with batch_invariant=True. If 128x128 blocks would not stay whole, shards are zero-padded, also in
    `state_dict()`: load a layer's weight before splitting it. Outputs are not padded.

    Args:
        input_layouts: placement of an input that is not a DTensor; None: Replicate().
        output_layouts: placement of the output; Shard(-1) when None.
        use_local_output: return the local tensor, not the DTensor.

    Raises, when it is applied:
        TypeError: the module is no `deep_tile.nn.Linear`.
    """

    style = "column"
    weight, bias = Shard(0), Shard(0)
    input_layout, output_layout = Replicate(), Shard(-1)


class RowParallel(_LinearStyle):
    """Split a `deep_tile.nn.Linear` along k, as torch's RowwiseParallel does torch.nn.Linear.

    Each rank multiplies its input columns by its weight columns. Partial results, rounded to the output's dtype, are
    then summed over ranks in that dtype; for FP32 give the layer out_dtype=torch.float32. If 128x128 blocks would not
    stay whole, shards are zero-padded, also in `state_dict()`, and each call copies the input with padding.

    Args:
        input_layouts: placement of an input that is not a DTensor; None: Shard(-1).
        output_layouts: placement of the output; Replicate(), by an all-reduce, when None.
        use_local_output: return the local tensor, not the DTensor.

    Raises TypeError as `ColumnParallel`.
    """

    style = "row"
    weight, bias = Shard(1), Replicate()
    input_layout, output_layout = Shard(-1), Replicate()


def _with_zeros(x: torch.Tensor, dim: int, parts: list[Part], unit: int) -> torch.Tensor:
    """A whole parameter with all ranks' padding; it has one element per `unit` rows or columns."""
    shape = list(x.shape)
    shape[dim] = sum(part.padded for part in parts) // unit
    padded = x.new_zeros(shape)
    for rank, part in enumerate(parts):
        begin, end = part.begin // unit, ceil_div(part.begin + part.length, unit)
        target = (rank * part.padded + part.first) // unit
        if part.length:
            padded.narrow(dim, target, end - begin).copy_(x.narrow(dim, begin, end - begin))
    return padded


def _distribute(x: torch.Tensor, mesh: DeviceMesh, placement: Placement, source: int | None) -> DTensor:
    """Like distribute_tensor, but FP8 is sent as bytes, which every backend supports, and rows stay aligned."""
    if x.dtype != quantize.FP8_DTYPE:
        return distribute_tensor(x, mesh, [placement], src_data_rank=source)
    shard = distribute_tensor(x.view(torch.uint8), mesh, [placement], src_data_rank=source).to_local()
    local = tensors.with_aligned_rows(shard.view(quantize.FP8_DTYPE))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())


# The ops' shardings. A rule sees a DTensorSpec for each tensor. It lists placement combinations along one mesh
# dimension; DTensor takes the one that moves the least data, the first among equals. So whole tensors come first, and a
# weight's split is offered only if an input is split that way: no mesh dimension gets it unasked.


def _linear_rule(x, b, b_scale=None, bias=None, **_: Any) -> list[_Sharding]:
    return _product_shardings([x], b, b_scale, bias)


def _gemm_rule(a, a_scale, b, b_scale, bias=None, *, activation: str | None = None, **_: Any) -> list[_Sharding]:
    return _product_shardings([a, a_scale], b, b_scale, bias, is_sum=activation is None)


def _product_shardings(inputs: list, b, b_scale, bias, is_sum: bool = True) -> list[_Sharding]:
    """An activation needs complete sums, so k is not split."""
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
    """Whether one of these equally long axes is split and all can be.

    Weights that are split where no block ends are refused. DTensor gathers the others.
    """
    ranks = _ranks([*of_weights, *of_others])
    if _ranks(of_weights):
        _check_split(name, size, ranks)
    return ranks > 0 and _fits(size, ranks)


def _ranks(axes: list[_Axis]) -> int:
    """Ranks over which one of these axes is split, perhaps 1; 0 if none is."""
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
            f"{ranks}, because the scale has one element for each {SCALE_BLOCK}x{SCALE_BLOCK} block and must be "
            "split at block boundaries. ColumnParallel and RowParallel split such layers, and shard_weight weights; "
            "or pad "
            f"it to {round_up(size, SCALE_BLOCK * ranks)}, split it over fewer ranks, or keep it whole"
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
