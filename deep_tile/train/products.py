"""A training step's GEMMs and weight operands, shared by linear.py, mlp.py and experts.py."""

from typing import NamedTuple

import torch

from deep_tile import both, dense, quantize
from deep_tile.train.casts import cast_once, with_aligned_rows
from deep_tile.train.gathered import Gathered, Shard
from deep_tile.train.recipe import Recipe

WIDE = (torch.bfloat16, torch.float16, torch.float32)


def cast_forward(weight: torch.Tensor, recipe: Recipe, wants_x: bool) -> tuple[torch.Tensor, torch.Tensor, list]:
    """A weight (or experts' weights) for the forward GEMM, and for dgrad: codes and scale, or the weight itself."""
    if isinstance(weight, Gathered):
        return weight.b, weight.b_scale, [weight if wants_x else None, None]
    if isinstance(weight, Shard):
        weight = weight.plain()
    if wants_x and recipe.dgrad == "fp8" and not recipe.recast:
        made = cast_once(weight, recipe)
        return made.b, made.b_scale, [made.bt, made.b_scale]
    cast = both.cast_weight if weight.dim() == 3 else quantize.per_block_cast_to_fp8
    b, b_scale, *_ = cast(weight.detach(), **recipe.cast)
    return b, b_scale, [weight if wants_x else None, None]


def cast_backward(kept: list, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """dgrad's operand, from the results of `cast_forward`."""
    weight, scale = kept
    if scale is not None:
        return with_aligned_rows(weight), scale.mT
    if isinstance(weight, Gathered):
        return weight.transposed()
    made = both.cast_weight(weight.detach(), **recipe.cast)
    return made.bt, made.bt_scale


def with_leading(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A layer's result for all rows of x, with x's leading dimensions."""
    if x.dim() == 2:
        return y
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))  # of which FSDP2 does not warn


def dgrad(
    codes: tuple[torch.Tensor, torch.Tensor], kept: list, recipe: Recipe, dx: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """An input's gradient in FP8 from the cast output gradient, added to `dx` if given."""
    operands = (*codes, *cast_backward(kept, recipe))
    if dx is None:
        return dense.fp8_gemm(*operands, out_dtype=dtype)
    return dense.scaled_gemm(*operands, out=dx, accumulate=True)


class MainGrad(NamedTuple):
    """Where a weight's gradient is added up.

    Attributes:
        grad: the tensor.
        weight: its owner, if hooks must run; else None.
    """

    grad: torch.Tensor
    weight: torch.Tensor | None

    def placeholder(self, dtype: torch.dtype) -> torch.Tensor | None:
        """A dummy gradient for autograd: the weight's hooks run only with one; its values are never read."""
        if self.weight is None:
            return None
        self.weight.grad_added_to_main_grad = True
        return torch.empty_like(self.grad, dtype=dtype)


def main_grad_of(weight: torch.Tensor) -> MainGrad | None:
    grad = getattr(weight, "main_grad", None)
    if grad is None:
        return None
    if grad.shape != weight.shape or grad.dtype not in WIDE or grad.device != weight.device:
        raise ValueError(
            f"weight.main_grad is {list(grad.shape)} of {grad.dtype} on {grad.device}; for a weight of "
            f"{list(weight.shape)} on {weight.device} it must have that shape and device, in float32 or bfloat16"
        )
    return MainGrad(grad, weight if hasattr(weight, "grad_added_to_main_grad") else None)


def wgrad(operands: tuple, dtype: torch.dtype, main_grad: MainGrad | None) -> torch.Tensor | None:
    """`dy^T @ x` from codes and scales along tokens, perhaps added to `main_grad`."""
    if main_grad is not None:
        _multiply_along_tokens(operands, main_grad.grad, accumulate=True)
        return main_grad.placeholder(dtype)
    dy, _, x, _ = operands
    dw = torch.empty(dy.shape[0], x.shape[0], dtype=written_dtype(dtype), device=dy.device)
    return _multiply_along_tokens(operands, dw, accumulate=False).to(dtype)


def added(dy: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, main_grad: MainGrad | None) -> torch.Tensor | None:
    """`dy @ x` by torch, perhaps added to `main_grad`."""
    product = dy @ x.to(dy.dtype)
    if main_grad is None:
        return product.to(dtype)
    main_grad.grad.add_(product)
    return main_grad.placeholder(dtype)


def written_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which wgrad is stored for a weight in this dtype."""
    return dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32


def product_along_tokens(x: torch.Tensor, x_scale: torch.Tensor) -> dense.Dense:
    """The GEMM for wgrad: x has one scale per column, or per 128 columns."""
    return dense.FP8_WGRAD if x_scale.shape[0] == x.shape[0] > 1 else dense.SCALED_GEMM


def _multiply_along_tokens(operands: tuple, out: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """The weight gradient of dy and x with their scales."""
    if product_along_tokens(*operands[2:]) is dense.FP8_WGRAD:
        return dense.fp8_wgrad(*operands, out, accumulate=accumulate)
    return dense.scaled_gemm(*operands, out=out, accumulate=accumulate)


def keep(gate_up: torch.Tensor, recipe: Recipe, **lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gates and ups as the backward pass gets them: as they are, or codes and their scale."""
    if recipe.activations == "bf16":
        return gate_up, None
    return quantize.per_token_cast_to_fp8(gate_up, **lists, **recipe.cast)
