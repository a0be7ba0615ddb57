"""Small layers: what linear.py does call by call, in one call into C for each pass, which launches its three kernels.

Called by linear.py. There the host takes longer to enqueue a small layer than the GPU to work on it. The kernels are
the same, and the bits. Codes and scales lie in two tensors, one that the backward pass needs and one that it does not.
Of several layers on one input the first casts it, and has the codes; each has a call of its own. Small weights are cast
in each forward pass: to look for casts that are kept takes the host longer.
"""

from collections.abc import Callable, Sequence
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

_FIRST = 2
"""Position of the first weight among `Joined`'s arguments."""


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

    def views(self, memory: torch.Tensor, count: int | None = None) -> list[torch.Tensor]:
        """The tensors, or the first of them."""
        return [
            memory.view(dtype).as_strided(shape, strides, begin // dtype.itemsize)
            for begin, shape, strides, dtype in self.places[:count]
        ]


class Layer(NamedTuple):
    """What calls of a layer have in common.

    Attributes:
        out, x: shapes and strides of the output, and of the input's gradient.
        kept: x and the weight for the backward pass: at, at_scale, bt, b_scale.
        spare: the same for the forward pass alone: a, a_scale, b.
        next_kept, next_spare: the weight's part of both, for a layer whose input another one has cast.
        gradient: what `cast_both` makes of dy.
        options: as `Recipe.options`.
    """

    out: tuple[tuple[int, ...], tuple[int, ...]]
    x: tuple[tuple[int, ...], tuple[int, ...]]
    kept: _Room
    spare: _Room
    next_kept: _Room
    next_spare: _Room
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
    rooms = (at, at_scale, bt, b_scale), (a, a_scale, b), (bt, b_scale), (b,), both.cast_both(dy)
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


def trains(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
    """Whether a call of such layers has all gradients, and tensors that kernels read as they are; casts that are there
    are used."""
    return (
        x.requires_grad
        and torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and x.is_contiguous()
        and not casts.is_cast(x)
        and all(map(_trains, weights))
    )


def _trains(weight: torch.Tensor) -> bool:
    return (
        weight.requires_grad
        and type(weight) in (torch.nn.Parameter, torch.Tensor)
        and weight.is_contiguous()
        and not hasattr(weight, "main_grad")
    )


class Joined(torch.autograd.Function):
    """Of x, a `Layer` for each weight, the weights, and as many biases or None."""

    @staticmethod
    def forward(ctx, x, layers, *parameters):
        count, kept, results = len(layers), [layers[0].kept.new(x)], []
        spare = layers[0].spare.new(x)
        for i, layer in enumerate(layers):
            weight, bias = parameters[i], parameters[count + i]
            y = tensors.new_empty(x, *layer.out, x.dtype)
            if i:
                kept.append(layer.next_kept.new(x))
                given, prepare = (weight, y, kept[i], layer.next_spare.new(x), spare), _prepare_next_forward
            else:
                given, prepare = (x, weight, y, kept[0], spare), _prepare_forward
            _launch(given if bias is None else (*given, bias), layer, prepare)
            results.append(y)
        ctx.save_for_backward(*kept)
        ctx.layers, ctx.x_dtype = layers, x.dtype
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        return (_refused_twice if torch.is_grad_enabled() else _gradients)(ctx, *gradients)


def _gradients(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    kept, layers = ctx.saved_tensors, ctx.layers
    count, dx = len(layers), tensors.new_empty(gradients[0], *layers[0].x, ctx.x_dtype)
    of_parameters = [None] * (2 * count)
    for i, (dy, layer) in enumerate(zip(gradients, layers, strict=True)):
        dy, (k, n) = dy.contiguous(), layer.next_kept.places[0].shape
        spare = layer.gradient.new(dy)
        dw = of_parameters[i] = tensors.new_empty(dy, (n, k), (k, 1), ctx.dtypes[i])
        if i:
            _launch((dy, kept[0], kept[i], dx, dw, spare), layer, _prepare_next_backward)
        else:
            _launch((dy, kept[0], dx, dw, spare), layer, _prepare_backward)
        if ctx.needs_input_grad[_FIRST + count + i]:
            of_parameters[count + i] = casts.rows_of(dy).sum(0, dtype=torch.float32).to(ctx.dtypes[count + i])
    return dx, None, *of_parameters


_refused_twice = torch.autograd.function.once_differentiable(_gradients)


def _launch(given: tuple, layer: Layer, prepare: Callable) -> None:
    """By Python where C has met no such tensors, and where a stream is captured."""
    if not _launcher.launch_known(_launches, layer.options, given):
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
    cast = _cast((x, a, a_scale, at, at_scale), layer, layer.blocks, names)
    return cast, *_forward((a, a_scale), (weight, b, b_scale, bt), y, bias, layer, names)


def _prepare_next_forward(given: tuple, layer: Layer) -> launches.Prepared:
    weight, y, kept, of_weight, spare, *bias = given
    names = _Names("weight out kept of_weight spare bias", given)
    (bt, b_scale), (b,) = layer.next_kept.views(kept), layer.next_spare.views(of_weight)
    return _forward(layer.spare.views(spare, 2), (weight, b, b_scale, bt), y, bias, layer, names)


def _forward(codes: Sequence, cast: tuple, y, bias: list, layer: Layer, names: _Names) -> launches.Prepared:
    """The cast of a weight, and its product with an input's codes."""
    operands = (*codes, *cast[1:3], casts.rows_of(y), *(bias or [None]))
    of_weight = both.CAST_WEIGHT.prepare(cast, both.CAST_WEIGHT.Options(*layer.cast), **names.where)
    return of_weight, _product(dense.FP8_GEMM, operands, names)


def _prepare_backward(given: tuple, layer: Layer) -> launches.Prepared:
    dy, kept, dx, dw, spare = given
    operands = layer.kept.views(kept)
    return _backward(dy, operands, dx, dw, spare, layer, _Names("dy kept dx dw spare", given), accumulate=False)


def _prepare_next_backward(given: tuple, layer: Layer) -> launches.Prepared:
    dy, first, kept, dx, dw, spare = given
    operands = (*layer.kept.views(first, 2), *layer.next_kept.views(kept))
    names = _Names("dy first kept dx dw spare", given)
    return _backward(dy, operands, dx, dw, spare, layer, names, accumulate=True)


def _backward(
    dy, operands: tuple, dx, dw, spare, layer: Layer, names: _Names, *, accumulate: bool
) -> launches.Prepared:
    """The cast of dy, and both its products; that for x perhaps added to what is there."""
    (at, at_scale, bt, b_scale), (d, d_scale, dt, dt_scale) = operands, layer.gradient.views(spare)
    dgrad = dense.SCALED_GEMM if accumulate else dense.FP8_GEMM
    wgrad, along_tokens = product_along_tokens(at, at_scale), (dt, dt_scale, at, at_scale, dw)
    return (
        _cast((dy, d, d_scale, dt, dt_scale), layer, False, names),
        _product(dgrad, (d, d_scale, bt, b_scale.mT, casts.rows_of(dx), None), names, accumulate),
        _product(wgrad, along_tokens if wgrad is dense.FP8_WGRAD else (*along_tokens, None), names),
    )


def _cast(given: tuple, layer: Layer, blocks: bool, names: _Names) -> launches.Prepared:
    options = both.BothOptions(*layer.cast, blocks=blocks)
    return both.CAST_BOTH.prepare((casts.rows_of(given[0]), *given[1:], None, None), options, **names.where)


def _product(call: dense.Dense, operands: tuple, names: _Names, accumulate: bool = False) -> launches.Prepared:
    named = zip(("a", "a_scale", "b", "b_scale", "out", "bias"), operands, strict=False)
    places = {name: names.place(x) for name, x in named if x is not None}
    options = call.checked(operands, dense.Options(accumulate=accumulate))
    return call.prepare_with_config(operands, options, names=names.names, places=places)[1]
