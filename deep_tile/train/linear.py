"""Linear layers with gradients in FP8: forward, dgrad and wgrad, as functions.

The three GEMMs follow the DeepSeek-V3 report, 3.3: y = x w^T and dx = dy w with 1x128 and 128x128 scales, dw = dy^T x
with 1x128 scales along tokens, by default 128x128 for x. Each tensor is read by one cast, which makes all its operands:
x along k and along tokens, the weight and its transpose, dy along n and along tokens. x is kept for the backward pass
as its codes along tokens.
"""

from collections.abc import Iterable, Sequence

import torch

from deep_tile import dense, quantize
from deep_tile.gradients import once_differentiable
from deep_tile.train import joined
from deep_tile.train.casts import cast_gradient, cast_shared, with_aligned_rows
from deep_tile.train.gathered import any_gathered
from deep_tile.train.products import WIDE, added, cast_forward, dgrad, main_grad_of, wgrad, with_leading
from deep_tile.train.recipe import Recipe, check_tensors, checked_once, require

_FP8 = Recipe()

_checked: dict[tuple, tuple[joined.Layer, ...] | None] = {}
"""Results of `checked_once`: a `Layer` for each weight if all are small."""

_FIRST = 6
"""Position of the first parameter among `_Linears`'s arguments."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, recipe: Recipe = _FP8
) -> torch.Tensor:
    """`x @ weight^T + bias`, a linear layer whose forward and backward GEMMs run in FP8.

    Differentiable once in `x`, `weight` and `bias`. Under autocast x is converted to autocast's dtype first, as in
    `torch.nn.functional.linear`. CPU tensors are computed by the definitions of the operations.

    Args:
        x: [..., k] bfloat16, float16 or float32.
        weight: [n, k] in one of these dtypes, which its gradient has as well. If there is a `weight.main_grad` ([n, k]
            float32 or bfloat16, as in Megatron), the GEMM adds the gradient to it; `weight.grad` is then not computed,
            and `weight.grad_added_to_main_grad`, if present, becomes True.
        bias: [n] in one of these dtypes, added in FP32.
        recipe: the GEMMs' formats; see `Recipe`.

    Returns:
        [..., n] in x's dtype.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        ValueError: shapes or devices do not fit.
        RuntimeError: as for `fp8_gemm`.
    """
    return _linears(x, (weight,), (bias,), recipe)[0]


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    recipe: Recipe = _FP8,
) -> tuple[torch.Tensor, ...]:
    """Several `linear` layers on one input (query, key and value; gate and up), which is cast once.

    Args:
        x: as for `linear`.
        weights, biases: per layer, as for `linear`; None: no biases.

    Returns:
        The layers' results. The gradient of `x` is the sum of theirs.

    Raises:
        As `linear`.
    """
    weights = as_tuple("weights", weights)
    biases = (None,) * len(weights) if biases is None else as_tuple("biases", biases)
    return _linears(x, weights, biases, recipe)


def as_tuple(name: str, given: object) -> tuple:
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is a {type(given).__name__}; pass a list, with one for each layer")
    return tuple(given)


def _linears(x, weights: tuple, biases: tuple, recipe: Recipe) -> tuple[torch.Tensor, ...]:
    require(recipe)
    if torch.compiler.is_compiling() and any_gathered(weights):
        return _linears_eagerly(x, weights, biases, recipe)
    layers = check_once(x, weights, biases, recipe)
    x = in_autocast_dtype(x)
    if is_exporting():
        (x,), weights, biases = detached(x), detached(*weights), detached(*biases)
    if layers is not None and joined.trains(x, weights):
        return joined.Joined.apply(x, layers, *weights, *biases)
    wants_weights = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    codes = cast_shared(x, recipe, along_tokens=wants_weights and recipe.wgrad != "bf16")
    if any(hasattr(weight, "main_grad") for weight in weights):
        return _apply_eagerly(x, recipe.held, *codes, *weights, *biases)
    return _Linears.apply(x, recipe.held, *codes, *weights, *biases)


_linears_eagerly = torch.compiler.disable(_linears)


def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which Dynamo holds to be true in compiled code as well before torch 2.13."""
    return torch.compiler._is_exporting_flag


def detached(*given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Tensors for an exported program, which has no backward pass: one that is traced would tie the number of tokens to
    the padded stride of codes along tokens."""
    return tuple(None if x is None else x.detach() for x in given)


def in_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """`x`, in autocast's dtype where that is on. Compilers trace no other way to ask."""
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else None
    if kind is not None and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


@torch.compiler.disable
def _apply_eagerly(*given) -> tuple[torch.Tensor, ...]:
    """Runs outside a compiler, which cannot order gradients that are accumulated into a user's tensor."""
    return _Linears.apply(*given)


class _Linears(torch.autograd.Function):
    """Takes x, a `Held` recipe, `cast_both`'s results for x, weights and as many biases."""

    @staticmethod
    def forward(ctx, x, held, *given):  # dynamo gives no ctx where arguments are as many as names, ctx included
        (a, a_scale, at, at_scale), parameters, recipe = given[:4], given[4:], held.recipe
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        wants_x, wants_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[_FIRST : _FIRST + count])
        rows = quantize.as_matrix(x) if wants_weights and at is None else None
        results, saved = [], [rows, at, at_scale]
        for weight, bias in zip(weights, biases, strict=True):
            b, b_scale, kept = cast_forward(weight, recipe, wants_x)
            y = dense.fp8_gemm(a, a_scale, b, b_scale, out_dtype=x.dtype, bias=bias)
            results.append(with_leading(y, x))
            saved += kept
        ctx.save_for_backward(*saved)
        ctx.recipe, ctx.shape, ctx.dtype = recipe, x.shape, x.dtype
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        ctx.main_grads = [main_grad_of(weight) for weight in weights]
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        rows, at, at_scale, *of_weights = ctx.saved_tensors
        count, recipe, at = len(gradients), ctx.recipe, with_aligned_rows(at)
        wants_x, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[_FIRST:]
        dx, of_parameters = None, [None] * (2 * count)
        for i, dy in enumerate(gradients):
            dy = quantize.as_matrix(dy)
            codes = cast_gradient(dy, recipe, wants_x and recipe.dgrad == "fp8", wanted[i] and recipe.wgrad != "bf16")
            if wants_x:
                kept = of_weights[2 * i : 2 * i + 2]
                dx = dgrad(codes[:2], kept, recipe, dx, dy.dtype) if codes[0] is not None else _wide(dy, kept[0], dx)
            if wanted[i]:
                target = ctx.dtypes[i], ctx.main_grads[i]
                along_tokens = (*codes[2:], at, at_scale)
                of_parameters[i] = wgrad(along_tokens, *target) if rows is None else added(dy.t(), rows, *target)
            if wanted[count + i]:
                of_parameters[count + i] = dy.sum(0, dtype=torch.float32).to(ctx.dtypes[count + i])
        return None if dx is None else dx.to(ctx.dtype).view(ctx.shape), *(None,) * (_FIRST - 1), *of_parameters


def _wide(dy: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor | None) -> torch.Tensor:
    """`dy @ weight` by torch, added to `dx` where there is one."""
    product = dy @ weight.to(dy.dtype)
    return product if dx is None else dx.add_(product)


def check_once(x, weights, biases, recipe: Recipe) -> tuple[joined.Layer, ...] | None:
    """Check arguments unless equal ones have passed before.

    Returns:
        What calls of small layers have in common, or None.
    """
    return checked_once(_checked, lambda: _layers_of(x, weights, biases, recipe), recipe, x, *weights, *biases)


def _layers_of(x, weights, biases, recipe: Recipe) -> tuple[joined.Layer, ...] | None:
    check(x, weights, biases)
    if torch.compiler.is_compiling() or not all(joined.takes(x, weight, recipe) for weight in weights):
        return None
    return tuple(joined.layer_of(x.shape, len(weight), recipe.options) for weight in weights)


def check(x, weights, biases) -> None:
    if len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases are given; pass one bias, or None, for each")
    if not weights:
        raise ValueError("weights is empty; pass one weight at least")
    named = {"x": x}
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        number = f"[{i}]" if len(weights) > 1 else ""
        named |= {f"weight{number}": weight} | ({} if bias is None else {f"bias{number}": bias})
    check_tensors(dict.fromkeys(named, WIDE), **named)
    if x.dim() < 1:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [..., k]")
    for name, given in named.items():
        if name.startswith("weight") and (given.dim() != 2 or given.shape[1] != x.shape[-1]):
            raise ValueError(f"{name} has shape {list(given.shape)}; for x of {list(x.shape)} it must be [n, k]")
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}; for a weight of {list(weight.shape)} it must be [n]")
