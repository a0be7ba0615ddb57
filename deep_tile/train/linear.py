"""Linear layers with gradients in FP8: forward, dgrad and wgrad, as functions.

Called by users and layers.py. The three products are those of the DeepSeek-V3 report, 3.3: y = x w^T and dx = dy w with
scales of 1x128 and 128x128, dw = dy^T x with scales of 1x128 along tokens, of x by default of 128x128. Each tensor is
read by one cast, which makes all operands that it is needed for: x along k and along tokens, the weight as it is and
transposed, dy along n and along tokens. x is kept for the backward pass as its codes along tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deep_tile import api, both, dense, quantize
from deep_tile.train.casts import cast_gradient, cast_once, cast_shared, rows_of, with_aligned_rows
from deep_tile.train.recipe import Recipe, require

_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = Recipe()

_checked: set = set()
"""Arguments that have passed the checks, as `_check_once` sees them: 3 us, where the checks take 20."""

_MOST_CHECKED = 4096

_FIRST = 6
"""Of the parameters among what `_Linears` is given."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, recipe: Recipe = _FP8
) -> torch.Tensor:
    """`x @ weight^T + bias` with all three products in FP8: a linear layer that trains.

    Differentiable once in `x`, `weight` and `bias`. Under autocast x becomes its dtype first, as
    `torch.nn.functional.linear` has it. Runs on CPU tensors too, by the definitions of casts and products.

    Args:
        x: [..., k] bfloat16, float16 or float32.
        weight: [n, k] of such a dtype; its gradient has its dtype. A `weight.main_grad`, [n, k] float32 or bfloat16, is
            added to instead, in the product itself, as Megatron has it: `weight.grad` is then not computed, and
            `weight.grad_added_to_main_grad` set where there is one.
        bias: [n] of such a dtype, added in FP32.
        recipe: formats of the products; see `Recipe`.

    Returns:
        [..., n] in x's dtype.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        ValueError: shapes or devices do not fit.
        RuntimeError: as for `fp8_gemm`.
    """
    return linears(x, (weight,), (bias,), recipe=recipe)[0]


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    recipe: Recipe = _FP8,
) -> tuple[torch.Tensor, ...]:
    """Several `linear` of one input, which is cast once, as query, key and value are, or gate and up.

    Args:
        x: as for `linear`.
        weights, biases: of each layer, as for `linear`; no biases when None.

    Returns:
        The layers' results. The gradient of `x` is the sum of theirs.

    Raises:
        As `linear`.
    """
    require(recipe)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    if torch.compiler.is_compiling():
        _check(x, weights, biases)
    else:
        _check_once(x, weights, biases)
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    wants_weights = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    codes = cast_shared(x, recipe, along_tokens=wants_weights and recipe.wgrad != "bf16")
    if any(hasattr(weight, "main_grad") for weight in weights):
        return _apply_eagerly(x, recipe, *codes, *weights, *biases)
    return _Linears.apply(x, recipe, *codes, *weights, *biases)


@torch.compiler.disable
def _apply_eagerly(*given) -> tuple[torch.Tensor, ...]:
    """Gradients that are added to a tensor of the user's are no results, which compilers could order."""
    return _Linears.apply(*given)


class _Linears(torch.autograd.Function):
    """Of x, a recipe, what `cast_both` makes of x, weights and as many biases."""

    @staticmethod
    def forward(ctx, x, recipe, a, a_scale, at, at_scale, *parameters):
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        wants_x, wants_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[_FIRST : _FIRST + count])
        rows = rows_of(x) if wants_weights and at is None else None
        results, saved = [], [rows, at, at_scale]
        for weight, bias in zip(weights, biases, strict=True):
            keeps = wants_x and recipe.dgrad == "fp8" and not recipe.recast
            b, b_scale, *bt = cast_once(weight, recipe) if keeps else _cast_forward(weight, recipe)
            y = api.fp8_gemm(a, a_scale, b, b_scale, out_dtype=x.dtype, bias=bias)
            results.append(y.view(*x.shape[:-1], weight.shape[0]))
            saved += [*bt, b_scale] if keeps else [weight if wants_x else None, None]
        ctx.save_for_backward(*saved)
        ctx.recipe, ctx.shape, ctx.dtype = recipe, x.shape, x.dtype
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        ctx.main_grads = [_main_grad(weight) for weight in weights]
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        rows, at, at_scale, *of_weights = ctx.saved_tensors
        count, recipe, at = len(gradients), ctx.recipe, with_aligned_rows(at)
        wants_x, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[_FIRST:]
        dx, of_parameters = None, [None] * (2 * count)
        for i, dy in enumerate(gradients):
            dy = rows_of(dy)
            codes = cast_gradient(dy, recipe, wants_x and recipe.dgrad == "fp8", wanted[i] and recipe.wgrad != "bf16")
            if wants_x:
                dx = _dgrad(dy, codes, *_operand(*of_weights[2 * i : 2 * i + 2], recipe), dx)
            if wanted[i]:
                along_tokens = (*codes[2:], at, at_scale)
                of_parameters[i] = _wgrad(dy, rows, along_tokens, ctx.dtypes[i], ctx.main_grads[i])
            if wanted[count + i]:
                of_parameters[count + i] = dy.sum(0, dtype=torch.float32).to(ctx.dtypes[count + i])
        return None if dx is None else dx.to(ctx.dtype).view(ctx.shape), *(None,) * (_FIRST - 1), *of_parameters


def _cast_forward(weight: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize.per_block_cast_to_fp8(weight.detach(), **recipe.cast)


def _operand(weight: torch.Tensor, scale: torch.Tensor | None, recipe: Recipe) -> tuple:
    """The weight of dgrad, as `_dgrad` takes it, from what the forward pass has saved."""
    if scale is None and recipe.dgrad == "fp8":
        made = both.cast_weight(weight.detach(), **recipe.cast)
        return made.bt, made.b_scale
    return weight if scale is None else with_aligned_rows(weight), scale


def _dgrad(dy: torch.Tensor, codes: tuple, weight: torch.Tensor, scale: torch.Tensor | None, dx) -> torch.Tensor:
    """`dy @ weight`, added to `dx` where there is one. With a scale, `weight` is in FP8 and transposed."""
    if scale is None:
        product = dy @ weight.to(dy.dtype)
        return product if dx is None else dx.add_(product)
    operands = (*codes[:2], weight, scale.t())
    if dx is None:
        return api.fp8_gemm(*operands, out_dtype=dy.dtype)
    return dense.scaled_gemm(*operands, out=dx, accumulate=True)


def _wgrad(dy: torch.Tensor, x: torch.Tensor | None, along_tokens: tuple, dtype: torch.dtype, main_grad):
    """`dy^T @ x`, or that added to `main_grad`. Without `x`, of codes and scales along tokens."""
    if x is not None:
        product = dy.t() @ x.to(dy.dtype)
        if main_grad is None:
            return product.to(dtype)
        main_grad.grad.add_(product)
        return main_grad.placeholder(dtype)
    if main_grad is not None:
        _product_along_tokens(along_tokens, main_grad.grad, accumulate=True)
        return main_grad.placeholder(dtype)
    written = written_dtype(dtype)
    dw = torch.empty(dy.shape[1], along_tokens[2].shape[0], dtype=written, device=dy.device)
    return _product_along_tokens(along_tokens, dw, accumulate=False).to(dtype)


def written_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the product of a weight's gradient is stored, of a weight of this dtype."""
    return dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32


def _product_along_tokens(operands: tuple, out: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """Of dy and x with their scales along tokens: those of x are of its columns, or of 128 of them."""
    x, x_scale = operands[2:]
    if x_scale.shape[0] == x.shape[0] > 1:
        return dense.fp8_wgrad(*operands, out, accumulate=accumulate)
    return dense.scaled_gemm(*operands, out=out, accumulate=accumulate)


class _MainGrad(NamedTuple):
    """Where a weight's gradient is added up.

    Attributes:
        grad: the tensor.
        weight: whose it is, where it is to be told; else None.
    """

    grad: torch.Tensor
    weight: torch.Tensor | None

    def placeholder(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets: hooks of the weight run only where there is something, whose numbers nobody reads."""
        if self.weight is None:
            return None
        self.weight.grad_added_to_main_grad = True
        return torch.empty_like(self.grad, dtype=dtype)


def _main_grad(weight: torch.Tensor) -> _MainGrad | None:
    grad = getattr(weight, "main_grad", None)
    if grad is None:
        return None
    if grad.shape != weight.shape or grad.dtype not in _WIDE or grad.device != weight.device:
        raise ValueError(
            f"weight.main_grad is {list(grad.shape)} of {grad.dtype} on {grad.device}; for a weight of "
            f"{list(weight.shape)} on {weight.device} it must be as large, float32 or bfloat16, and there"
        )
    return _MainGrad(grad, weight if hasattr(weight, "grad_added_to_main_grad") else None)


def _check_once(x, weights, biases) -> None:
    """Check arguments unless such have passed before: of all that `_check` reads."""
    try:
        layers = zip(weights, biases, strict=True)
        seen = (x.dtype, x.device, x.dim(), x.shape[-1], *(_numbers(each) for layer in layers for each in layer))
        if seen in _checked and torch._C._functorch.peek_interpreter_stack() is None:
            return
    except Exception:  # something is no tensor: the checks say what
        seen = None
    _check(x, weights, biases)
    if len(_checked) >= _MOST_CHECKED:
        _checked.clear()
    _checked.add(seen)


def _numbers(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.dtype, x.device, x.shape)


def _check(x, weights, biases) -> None:
    if len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases are given; pass one bias, or None, for each")
    if not weights:
        raise ValueError("weights is empty; pass one weight at least")
    named = {"x": x}
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        number = f"[{i}]" if len(weights) > 1 else ""
        named |= {f"weight{number}": weight} | ({} if bias is None else {f"bias{number}": bias})
    for name, given in named.items():
        if not isinstance(given, torch.Tensor) or given.dtype not in _WIDE:
            seen = f"a tensor of {given.dtype}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
            remedy = "; deep_tile.fp8_linear takes weights that are quantised" if name.startswith("weight") else ""
            raise TypeError(f"{name} is {seen}; it must be a tensor of bfloat16, float16 or float32{remedy}")
        if given.device != x.device:
            raise ValueError(f"{name} is on {given.device} but x is on {x.device}; move it there")
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError("deep_tile.train.linear runs under no transform of torch.func; use torch.autograd")
    if x.dim() < 1:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [..., k]")
    for name, given in named.items():
        if name.startswith("weight") and (given.dim() != 2 or given.shape[1] != x.shape[-1]):
            raise ValueError(f"{name} has shape {list(given.shape)}; for x of {list(x.shape)} it must be [n, k]")
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}; for a weight of {list(weight.shape)} it must be [n]")
