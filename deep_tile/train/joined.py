"""Small layers: what linear.py does call by call, in one call into C for each pass, which launches its three kernels.

Called by linear.py. There the host takes longer to enqueue a small layer than the GPU to work on it. The kernels are
the same, and the bits. Codes and scales lie in two tensors, one that the backward pass needs and one that it does not.
Small weights are cast in each forward pass, and inputs for each layer: to look for casts that are kept takes the host
longer.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from deep_tile import _launcher, both, dense, launches, params, tensors
from deep_tile.config import round_up
from deep_tile.train import casts, sizes
from deep_tile.train.products import product_along_tokens, written_dtype
from deep_tile.train.recipe import Recipe

_launches: launches.Table = {}

_ALIGNMENT = 256

_WGRAD, _CAST = 1, 3
"""In `Recipe.options`: the format of wgrad, and where the keywords of casts begin."""


class _Place(NamedTuple):
    """Of a tensor in memory."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Room(NamedTuple):
    """Memory for tensors, one behind the other."""

    places: tuple[_Place, ...]
    size: int

    @staticmethod
    def of(*examples: torch.Tensor) -> "_Room":
        """As large as tensors without memory are."""
        places, end = [], 0
        for x in examples:
            places.append(_Place(end, tuple(x.shape), x.stride(), x.dtype))
            elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            # Rows end at multiples of 16 bytes, also the last.
            end += round_up(elements * x.element_size() + tensors.ALIGNMENT_BYTES, _ALIGNMENT)
        return _Room(tuple(places), end)

    def new(self, x: torch.Tensor) -> torch.Tensor:
        return tensors.new_empty(x, (self.size,), (1,), torch.uint8)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [
            memory.view(dtype).as_strided(shape, strides, begin // dtype.itemsize)
            for begin, shape, strides, dtype in self.places
        ]


class Layer(NamedTuple):
    """What calls of a layer have in common.

    Attributes:
        out, x: shapes and strides of the output, and of the input's gradient.
        kept: x and the weight for the backward pass: at, at_scale, bt, b_scale.
        spare: the same for the forward pass alone: a, a_scale, b.
        gradient: what `cast_both` makes of dy.
        options: as `Recipe.options`.
    """

    out: tuple[tuple[int, ...], tuple[int, ...]]
    x: tuple[tuple[int, ...], tuple[int, ...]]
    kept: _Room
    spare: _Room
    gradient: _Room
    options: tuple

    @property
    def blocks(self) -> bool:
        return self.options[_WGRAD] == "fp8"

    @property
    def cast(self) -> tuple[float, str]:
        return self.options[_CAST:]


@lru_cache(maxsize=4096)
def layer_of(shape: tuple[int, ...], n: int, options: tuple) -> Layer:
    """Of an x of this shape and a weight of n rows."""
    *leading, k = shape
    m = torch.Size(leading).numel()
    x, w, dy = (torch.empty(size, device="meta") for size in ((m, k), (n, k), (m, n)))
    a, a_scale, at, at_scale = both.cast_both(x, blocks=options[_WGRAD] == "fp8")
    b, b_scale, bt = both.cast_weight(w)
    rooms = (at, at_scale, bt, b_scale), (a, a_scale, b), both.cast_both(dy)
    out = (*leading, n)
    dense_tensors = ((each, tensors.dense_strides(each)) for each in (out, tuple(shape)))
    return Layer(*dense_tensors, *(_Room.of(*room) for room in rooms), options)


def takes(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> bool:
    """Whether arguments of these shapes and dtypes, which have passed the checks, are of a small layer on a GPU."""
    return (
        _is_on_gpu(x)
        and sizes.is_small(x.shape[:-1].numel(), *weight.shape)
        and x.dim() <= 3  # which C reads
        and weight.dtype == written_dtype(weight.dtype)
        and (recipe.dgrad, recipe.recast) == ("fp8", False)
        and recipe.wgrad != "bf16"
    )


def _is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and launches.is_hopper(x.get_device())


def trains(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a call of such a layer has both gradients, and tensors that kernels read as they are; casts that are
    there are used."""
    return (
        x.requires_grad
        and weight.requires_grad
        and torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and type(weight) in (torch.nn.Parameter, torch.Tensor)
        and x.is_contiguous()
        and weight.is_contiguous()
        and not hasattr(weight, "main_grad")
        and not casts.is_cast(x)
    )


class Joined(torch.autograd.Function):
    """Of x, a weight, a bias or None, and their `Layer`."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        kept, spare = layer.kept.new(x), layer.spare.new(x)
        y = tensors.new_empty(x, *layer.out, x.dtype)
        given = (x, weight, y, kept, spare) if bias is None else (x, weight, y, kept, spare, bias)
        if not _launcher.launch_known(_launches, layer.options, given):
            _enqueue(given, layer, _prepare_forward)
        ctx.save_for_backward(kept)
        ctx.layer, ctx.x_dtype, ctx.dtype, ctx.bias_dtype = (
            layer,
            x.dtype,
            weight.dtype,
            None if bias is None else bias.dtype,
        )
        return y

    @staticmethod
    def backward(ctx, dy):
        return (_refused_twice if torch.is_grad_enabled() else _gradients)(ctx, dy)


def _gradients(ctx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (kept,), layer = ctx.saved_tensors, ctx.layer
    dy, (_, _, bt, _) = dy.contiguous(), layer.kept.places
    spare = layer.gradient.new(dy)
    dx = tensors.new_empty(dy, *layer.x, ctx.x_dtype)
    k, n = bt.shape
    dw = tensors.new_empty(dy, (n, k), (k, 1), ctx.dtype)
    given = (dy, kept, dx, dw, spare)
    if not _launcher.launch_known(_launches, layer.options, given):
        _enqueue(given, layer, _prepare_backward)
    dbias = None
    if ctx.needs_input_grad[2]:
        dbias = casts.rows_of(dy).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, dw, dbias, None


_refused_twice = torch.autograd.function.once_differentiable(_gradients)


def _enqueue(given: tuple, layer: Layer, prepare: Callable) -> None:
    """Launch where C has met no such tensors, or leaves a stream under capture to Python."""
    launches.enqueue(_launches, layer.options, given, partial(prepare, given, layer))


class _Names:
    """Which of a call's tensors another lies in, and where."""

    def __init__(self, names: str, given: tuple):
        self.names = tuple(names.split())[: len(given)]
        self._given = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in given]

    @property
    def where(self) -> dict[str, object]:
        """Keywords of a cast's launch."""
        return {"names": self.names, "find": self.place}

    def place(self, x: torch.Tensor) -> params.Place:
        address = x.data_ptr()
        for number, (begin, end) in enumerate(self._given):
            if begin <= address < end:
                return params.Place(number, address - begin)
        raise ValueError("a tensor lies in none of those that are given")


def _prepare_forward(given: tuple, layer: Layer) -> launches.Prepared:
    x, weight, y, kept, spare, *bias = given
    names = _Names("x weight out kept spare bias", given)
    (at, at_scale, bt, b_scale), (a, a_scale, b) = layer.kept.views(kept), layer.spare.views(spare)
    of_weight = (weight, b, b_scale, bt), both.CAST_WEIGHT.Options(*layer.cast)
    operands = (a, a_scale, b, b_scale, casts.rows_of(y), *(bias or [None]))
    return (
        _cast((x, a, a_scale, at, at_scale), layer, layer.blocks, names),
        both.CAST_WEIGHT.prepare(*of_weight, **names.where),
        _product(dense.FP8_GEMM, operands, names),
    )


def _prepare_backward(given: tuple, layer: Layer) -> launches.Prepared:
    dy, kept, dx, dw, spare = given
    names = _Names("dy kept dx dw spare", given)
    (at, at_scale, bt, b_scale), (d, d_scale, dt, dt_scale) = layer.kept.views(kept), layer.gradient.views(spare)
    wgrad, along_tokens = product_along_tokens(at, at_scale), (dt, dt_scale, at, at_scale, dw)
    return (
        _cast((dy, d, d_scale, dt, dt_scale), layer, False, names),
        _product(dense.FP8_GEMM, (d, d_scale, bt, b_scale.mT, casts.rows_of(dx), None), names),
        _product(wgrad, along_tokens if wgrad is dense.FP8_WGRAD else (*along_tokens, None), names),
    )


def _cast(given: tuple, layer: Layer, blocks: bool, names: _Names) -> launches.Prepared:
    options = both.BothOptions(*layer.cast, blocks=blocks)
    return both.CAST_BOTH.prepare((casts.rows_of(given[0]), *given[1:], None, None), options, **names.where)


def _product(call: dense.Dense, operands: tuple, names: _Names) -> launches.Prepared:
    named = zip(("a", "a_scale", "b", "b_scale", "out", "bias"), operands, strict=False)
    places = {name: names.place(x) for name, x in named if x is not None}
    options = call.checked(operands, dense.Options(accumulate=False))
    return call.prepare_with_config(operands, options, names=names.names, places=places)[1]
