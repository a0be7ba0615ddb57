"""Small layers: each pass is one call into C, which launches its three kernels.

In linear.py, which makes a call for each kernel, the host takes longer to enqueue a small layer than the GPU to work on
it. Kernels and bits are the same. Codes and scales lie in two tensors: one that the backward pass needs, one that it
does not. For several layers on one input, the first casts the input and holds its codes; each layer has its own call.
Small weights are cast in each forward pass, since looking for a kept cast takes the host longer.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from deep_tile import _launcher, both, dense, gated, launches, params, quantize, tensors
from deep_tile.config import round_up
from deep_tile.experts import SILU_MUL_CAST
from deep_tile.gradients import once_differentiable
from deep_tile.select import training
from deep_tile.train import casts
from deep_tile.train.products import product_along_tokens, written_dtype
from deep_tile.train.recipe import Recipe

_launches: launches.Table = {}

_ALIGNMENT = 256

_WGRAD, _CAST = 1, 3
"""In `Recipe.options`: the format of wgrad, and where the keywords of casts begin."""

_FIRST = 2
"""Position of the first weight among `Joined`'s arguments."""


class _Place(NamedTuple):
    """A tensor's place in a `_Room`."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Room(NamedTuple):
    """Layout of a memory block for several tensors, one after the other."""

    places: tuple[_Place, ...]
    size: int

    @staticmethod
    def of(*examples: torch.Tensor) -> "_Room":
        """The room for tensors like these, which need no memory."""
        places, end = [], 0
        for x in examples:
            places.append(_Place(end, tuple(x.shape), x.stride(), x.dtype))
            elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            # The last row, too, ends at a multiple of 16 bytes.
            end += round_up(elements * x.element_size() + tensors.ALIGNMENT_BYTES, _ALIGNMENT)
        return _Room(tuple(places), end)

    def new(self, x: torch.Tensor) -> torch.Tensor:
        return tensors.new_empty(x, (self.size,), (1,), torch.uint8)

    def views(self, memory: torch.Tensor, count: int | None = None) -> list[torch.Tensor]:
        """The first `count` tensors in `memory`; None: all."""
        first = memory.storage_offset()  # hooks for saved tensors may return a part of their memory
        return [
            memory.view(dtype).as_strided(shape, strides, (first + begin) // dtype.itemsize)
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
    """The `Layer` for an x of this shape and a weight with n rows."""
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
    """Whether checked arguments belong to a small layer on a GPU that this module supports."""
    return (
        _is_on_gpu(x)
        and training.is_small(x.shape[:-1].numel(), *weight.shape)
        and x.dim() <= 3  # the most that C reads
        and weight.dtype == written_dtype(weight.dtype)
        and (recipe.dgrad, recipe.recast) == ("fp8", False)
        and recipe.wgrad != "bf16"
    )


def _is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and launches.is_hopper(x.get_device())


def trains(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
    """Whether all gradients are wanted, kernels can read the tensors as they are, and x has no shared cast (linear.py
    would use it)."""
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
    """Small layers on one input. Arguments: x, a `Layer` per weight, the weights, and a bias or None per weight."""

    @staticmethod
    def forward(ctx, x, layers, *parameters):
        count = len(layers)
        results = tuple(tensors.new_empty(x, *layer.out, x.dtype) for layer in layers)
        ctx.save_for_backward(*_multiply(x, layers, parameters[:count], parameters[count:], results))
        ctx.layers, ctx.x_dtype = layers, x.dtype
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return _gradients(ctx, *gradients)


def _multiply(x: torch.Tensor, layers: tuple[Layer, ...], weights, biases, results) -> list[torch.Tensor]:
    """The layers' forward pass. Writes `results`; returns each layer's memory for the backward pass."""
    kept, spare = [layers[0].kept.new(x)], layers[0].spare.new(x)
    for i, (layer, weight, bias, y) in enumerate(zip(layers, weights, biases, results, strict=True)):
        if i:
            kept.append(layer.next_kept.new(x))
            given, prepare = (weight, y, kept[i], layer.next_spare.new(x), spare), _prepare_next_forward
        else:
            given, prepare = (x, weight, y, kept[0], spare), _prepare_forward
        _launch(given if bias is None else (*given, bias), layer, prepare)
    return kept


def _saved(ctx) -> list[torch.Tensor]:
    """The saved tensors, aligned for kernels: saved-tensor hooks may return them at any address."""
    return [x if tensors.is_aligned(x) else x.clone() for x in ctx.saved_tensors]


def _gradients(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    kept, layers = _saved(ctx), ctx.layers
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
            of_parameters[count + i] = quantize.as_matrix(dy).sum(0, dtype=torch.float32).to(ctx.dtypes[count + i])
    return dx, None, *of_parameters


class Mlp(NamedTuple):
    """What calls of an MLP have in common.

    Attributes:
        first: layers for gate and up, or one for both.
        last: the down layer, whose input SwiGLU casts.
        hidden: shapes and strides of gate and up together, and of the gradient of SwiGLU's result.
        made: room for the results of `swiglu_gradient_cast_both`.
    """

    first: tuple[Layer, ...]
    last: Layer
    hidden: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    made: _Room

    @property
    def options(self) -> tuple:
        return self.last.options


@lru_cache(maxsize=4096)
def mlp_of(shape: tuple[int, ...], first: tuple[int, ...], last: tuple[int, int], options: tuple) -> Mlp:
    """The `Mlp` for an x of this shape, gate and up weights with these row counts, and a down weight of shape
    `last`."""
    rows, (n, columns) = torch.Size(shape[:-1]).numel(), last
    sizes_of_hidden = (rows, 2 * columns), (rows, columns)
    gate_up, dh = (torch.empty(size, device="meta") for size in sizes_of_hidden)
    nothing = (None,) * (len(gated.SWIGLU_GRADIENT.names) - 2)
    _, _, *made = gated.SWIGLU_GRADIENT.allocated((dh, gate_up, *nothing), _swiglu_options(options))
    layers = tuple(layer_of(shape, count, options) for count in first)
    hidden = tuple((size, tensors.dense_strides(size)) for size in sizes_of_hidden)
    whole = layer_of((*shape[:-1], columns), n, options)
    return Mlp(layers, whole, hidden, _Room.of(*made[: len(gated.Made._fields)]))


def _swiglu_options(options: tuple) -> both.BothOptions:
    return both.BothOptions(*options[_CAST:], blocks=options[_WGRAD] == "fp8")


class JoinedMlp(torch.autograd.Function):
    """A small MLP. Arguments: x, an `Mlp` and its weights, which all want gradients. Gate and up are kept in BF16."""

    @staticmethod
    def forward(ctx, x, mlp, *weights):
        *first, last = weights
        gate_up = tensors.new_empty(x, *mlp.hidden[0], torch.bfloat16)
        kept = _multiply(x, mlp.first, first, (None,) * len(first), gate_up.chunk(len(first), 1))
        kept.append(mlp.last.next_kept.new(x))
        y = tensors.new_empty(x, *mlp.last.out, x.dtype)
        _launch((gate_up, last, y, kept[-1], mlp.last.spare.new(x)), mlp.last, _prepare_last)
        ctx.save_for_backward(gate_up, *kept)
        ctx.mlp, ctx.x_dtype, ctx.dtypes = mlp, x.dtype, [weight.dtype for weight in weights]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients_of_mlp(ctx, dy)


def _gradients_of_mlp(ctx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (gate_up, *kept, of_last), mlp, dy = _saved(ctx), ctx.mlp, dy.contiguous()
    layers = *mlp.first, mlp.last
    gradients = []
    for layer, dtype in zip(layers, ctx.dtypes, strict=True):
        k, n = layer.next_kept.places[0].shape
        gradients.append(tensors.new_empty(dy, (n, k), (k, 1), dtype))
    spare, made = mlp.last.gradient.new(dy), mlp.made.new(dy)
    dh = tensors.new_empty(dy, *mlp.hidden[1], torch.bfloat16)
    _launch((dy, of_last, dh, spare), mlp.last, _prepare_hidden)
    _launch((dh, gate_up, spare, made, gradients[-1]), mlp, _prepare_swiglu)
    dx = tensors.new_empty(dy, *mlp.first[0].x, ctx.x_dtype)
    for i, dw in enumerate(gradients[:-1]):
        given = (made, kept[0], dx, dw) if i == 0 else (made, kept[0], kept[i], dx, dw)
        _launch(given, mlp, _prepare_gradients)
    return dx, None, *gradients


def _launch(given: tuple, layer: Layer | Mlp, prepare: Callable) -> None:
    """Launch a step: from C if its tensors' signature is known, else, and during a capture, from Python. One cache
    serves all steps, since their signatures differ."""
    if not _launcher.launch_known(_launches, layer.options, given):
        launches.enqueue(_launches, layer.options, given, partial(prepare, given, layer))


class _Names:
    """Names of a call's tensors, and the places of views in their memory."""

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
    """Launches: the cast of a weight, and the GEMM with the input's codes."""
    operands = (*codes, *cast[1:3], quantize.as_matrix(y), *(bias or [None]))
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
    """Launches: the cast of dy, dgrad (added to dx if `accumulate`) and wgrad."""
    (at, at_scale, bt, b_scale), (d, d_scale, dt, dt_scale) = operands, layer.gradient.views(spare)
    dgrad = dense.SCALED_GEMM if accumulate else dense.FP8_GEMM
    return (
        _cast((dy, d, d_scale, dt, dt_scale), layer, False, names),
        _product(dgrad, (d, d_scale, bt, b_scale.mT, quantize.as_matrix(dx), None), names, accumulate),
        _wgrad((dt, dt_scale, at, at_scale, dw), names),
    )


def _prepare_last(given: tuple, layer: Layer) -> launches.Prepared:
    """Launches: SwiGLU with its cast, and the down layer."""
    gate_up, weight, y, kept, spare = given
    names = _Names("gate_up weight out kept spare", given)
    (bt, b_scale), (h, h_scale, b) = layer.next_kept.views(kept), layer.spare.views(spare)
    cast = SILU_MUL_CAST.prepare((gate_up, h, h_scale, None, None), SILU_MUL_CAST.Options(*layer.cast), **names.where)
    return cast, *_forward((h, h_scale), (weight, b, b_scale, bt), y, [], layer, names)


def _prepare_hidden(given: tuple, layer: Layer) -> launches.Prepared:
    """Launches: the cast of dy, and dgrad of the down layer."""
    dy, kept, dh, spare = given
    names = _Names("dy kept dh spare", given)
    (bt, b_scale), codes = layer.next_kept.views(kept), layer.gradient.views(spare)
    operands = (*codes[:2], bt, b_scale.mT, dh, None)
    return _cast((dy, *codes), layer, False, names), _product(dense.FP8_GEMM, operands, names)


def _prepare_swiglu(given: tuple, mlp: Mlp) -> launches.Prepared:
    """Launches: SwiGLU's gradient with its casts, and wgrad of the down layer."""
    dh, gate_up, spare, made, dw = given
    names, options = _Names("dh gate_up spare made dw", given), _swiglu_options(mlp.options)
    *_, dt, dt_scale = mlp.last.gradient.views(spare)
    whole = gated.Made(*mlp.made.views(made))
    parts = gated.parts_of(whole, options.blocks, False)
    swiglu = gated.SWIGLU_GRADIENT.prepare((dh, gate_up, *whole, None, None, None), options, **names.where)
    return swiglu, _wgrad((dt, dt_scale, parts.ht, parts.ht_scale, dw), names)


def _prepare_gradients(given: tuple, mlp: Mlp) -> launches.Prepared:
    """Launches: dgrad and wgrad of a gate, up or joint layer."""
    made, kept, *of_weight, dx, dw = given
    names = _Names("made kept next dx dw" if of_weight else "made kept dx dw", given)
    layer, i = mlp.first[len(of_weight)], len(of_weight)
    at, at_scale, *others = layer.kept.views(kept, 2) if of_weight else layer.kept.views(kept)
    bt, b_scale = layer.next_kept.views(of_weight[0]) if of_weight else others
    whole = gated.parts_of(gated.Made(*mlp.made.views(made)), mlp.last.blocks, False)
    d, d_scale, dt, dt_scale = (x.chunk(len(mlp.first), dim)[i] for x, dim in zip(whole[:4], (1, 1, 0, 0), strict=True))
    dgrad = dense.SCALED_GEMM if of_weight else dense.FP8_GEMM
    operands = d, d_scale, bt, b_scale.mT, quantize.as_matrix(dx), None
    return _product(dgrad, operands, names, bool(of_weight)), _wgrad((dt, dt_scale, at, at_scale, dw), names)


def _wgrad(operands: tuple, names: _Names) -> launches.Prepared:
    """The launch of wgrad. Operands: dy and x along tokens with their scales, and dw."""
    call = product_along_tokens(*operands[2:4])
    return _product(call, operands if call is dense.FP8_WGRAD else (*operands, None), names)


def _cast(given: tuple, layer: Layer, blocks: bool, names: _Names) -> launches.Prepared:
    options = both.BothOptions(*layer.cast, blocks=blocks)
    return both.CAST_BOTH.prepare((quantize.as_matrix(given[0]), *given[1:], None, None), options, **names.where)


def _product(call: dense.Dense, operands: tuple, names: _Names, accumulate: bool = False) -> launches.Prepared:
    named = zip(("a", "a_scale", "b", "b_scale", "out", "bias"), operands, strict=False)
    places = {name: names.place(x) for name, x in named if x is not None}
    options = call.checked(operands, dense.Options(accumulate=accumulate))
    return call.prepare_with_config(operands, options, names=names.names, places=places)[1]
