"""A transformer's MLP as one function: both GEMMs and SwiGLU between them, in FP8, with gradients.

Separate layers would keep gate, up, silu(gate), h and its codes; this function keeps only gate and up, in BF16 or FP8.
The backward pass recomputes the rest in one read (gated.py).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from deep_tile import dense, ops, quantize
from deep_tile.config import SCALE_BLOCK
from deep_tile.experts import silu_mul_cast_to_fp8
from deep_tile.gated import swiglu_gradient_cast_both
from deep_tile.gradients import once_differentiable
from deep_tile.train import joined
from deep_tile.train.casts import cast_gradient, cast_shared, with_aligned_rows
from deep_tile.train.gathered import any_gathered
from deep_tile.train.linear import as_tuple, check_once, detached, in_autocast_dtype, is_exporting, linear, linears
from deep_tile.train.products import WIDE, cast_forward, dgrad, keep, main_grad_of, wgrad, with_leading
from deep_tile.train.recipe import Recipe, check_tensors, checked_once, require

_FP8 = Recipe()

_checked: dict[tuple, None] = {}

_FIRST = 6
"""Position of the first weight among `_Mlp`'s arguments."""


def mlp(
    x: torch.Tensor,
    w_gate_up: torch.Tensor | Sequence[torch.Tensor],
    w_down: torch.Tensor,
    *,
    recipe: Recipe = _FP8,
) -> torch.Tensor:
    """`(silu(x @ gate^T) * (x @ up^T)) @ down^T`, a gated MLP with all GEMMs in FP8 that keeps half as many activations
    as separate layers.

    Differentiable once in `x` and the weights, with the gradients of `linears` and `linear` and SwiGLU between them in
    FP32. Gate and up are BF16. Otherwise as `linear`, `weight.main_grad` and autocast included.

    Args:
        x: [..., k] bfloat16, float16 or float32.
        w_gate_up: [2f, k] in one of these dtypes, f gate rows, then f up rows; or a pair of weights, [f, k] each.
        w_down: [n, f] in one of these dtypes.
        recipe: formats of GEMMs and kept activations; see `Recipe`. If a GEMM is in BF16, or if gate and up are
            separate and f is not a multiple of 128, the layers run one by one and keep their own activations.

    Returns:
        [..., n] in x's dtype.

    Raises:
        As `linear`.
    """
    require(recipe)
    first = (w_gate_up,) if isinstance(w_gate_up, torch.Tensor) else as_tuple("w_gate_up", w_gate_up)
    if torch.compiler.is_compiling() and any_gathered((*first, w_down)):
        return _mlp_eagerly(x, first, w_down, recipe=recipe)
    layers = _check(x, first, w_down, recipe)
    is_fp8 = recipe.dgrad == "fp8" and recipe.wgrad != "bf16"
    if not is_fp8 or len(first) == 2 and w_down.shape[1] % SCALE_BLOCK:
        made = linears(x, first, recipe=recipe)
        gate, up = made if len(made) == 2 else made[0].chunk(2, -1)
        return linear(F.silu(gate) * up, w_down, recipe=recipe)
    x, weights = in_autocast_dtype(x), (*first, w_down)
    if is_exporting():
        (x,), weights = detached(x), detached(*weights)
    if layers is not None and _is_joined(x, weights, recipe):
        rows = tuple(weight.shape[0] for weight in first)
        return joined.JoinedMlp.apply(x, joined.mlp_of(x.shape, rows, tuple(w_down.shape), recipe.options), *weights)
    along_tokens = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights[:-1])
    codes = cast_shared(x, recipe, along_tokens=along_tokens)
    if any(hasattr(weight, "main_grad") for weight in weights):
        return _apply_eagerly(x, recipe.held, *codes, *weights)
    return _Mlp.apply(x, recipe.held, *codes, *weights)


_mlp_eagerly = torch.compiler.disable(mlp)


def _is_joined(x, weights: tuple, recipe: Recipe) -> bool:
    """Whether the gate and up layers are small and run joined. SwiGLU's gradient kernel needs whole blocks of 128."""
    is_kept_wide = recipe.activations == "bf16" and weights[-1].shape[1] % SCALE_BLOCK == 0
    return is_kept_wide and joined.takes(x, weights[-1], recipe) and joined.trains(x, weights)


@torch.compiler.disable
def _apply_eagerly(*given) -> torch.Tensor:
    """Runs outside a compiler, as in linear.py: some gradients are accumulated and not returned."""
    return _Mlp.apply(*given)


class _Mlp(torch.autograd.Function):
    """Takes x, a `Held` recipe, `cast_both`'s results for x, one or two gate and up weights, and the down weight."""

    @staticmethod
    def forward(ctx, x, held, *given):  # as few names as in linear.py
        (a, a_scale, at, at_scale), weights, recipe = given[:4], given[4:], held.recipe
        wants_x, wants_any = ctx.needs_input_grad[0], any(ctx.needs_input_grad)
        *first, last = weights
        gate_up, outs = _room_of(first, a)
        made, saved = [], []
        for weight, out in zip(first, outs, strict=True):
            b, b_scale, kept = cast_forward(weight, recipe, wants_x)
            made.append(dense.fp8_gemm(a, a_scale, b, b_scale, out))
            saved += kept
        if gate_up is None:
            gate_up = made[0] if len(made) == 1 else torch.cat(made, 1)
        h, h_scale = silu_mul_cast_to_fp8(gate_up, **recipe.cast)
        b, b_scale, kept = cast_forward(last, recipe, wants_any)
        y = dense.fp8_gemm(h, h_scale, b, b_scale, out_dtype=x.dtype)
        if wants_any:
            ctx.save_for_backward(at, at_scale, *keep(gate_up, recipe), *saved, *kept)
        ctx.recipe, ctx.shape, ctx.dtype = recipe, x.shape, x.dtype
        ctx.targets = [(weight.dtype, main_grad_of(weight)) for weight in weights]
        return with_leading(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        at, at_scale, gate_up, gate_up_scale, *of_weights = ctx.saved_tensors
        wants_x, wanted, recipe = ctx.needs_input_grad[0], ctx.needs_input_grad[_FIRST:], ctx.recipe
        *kept, of_last = (of_weights[i : i + 2] for i in range(0, len(of_weights), 2))
        *codes, dt, dt_scale = cast_gradient(quantize.as_matrix(dy), recipe, True, wanted[-1])
        dh = dgrad(codes, of_last, recipe, None, torch.bfloat16)
        made = swiglu_gradient_cast_both(dh, gate_up, gate_up_scale, blocks=recipe.wgrad == "fp8", **recipe.cast)
        del dh, gate_up, codes
        gradients, dx = [None] * len(wanted), None
        if wanted[-1]:
            gradients[-1] = wgrad((dt, dt_scale, made.ht, made.ht_scale), *ctx.targets[-1])
        parts = (x.chunk(len(kept), i) for x, i in zip(made[:4], (1, 1, 0, 0), strict=True))
        for i, (a, a_scale, along, along_scale) in enumerate(zip(*parts, strict=True)):
            if wants_x:
                dx = dgrad((a, a_scale), kept[i], recipe, dx, ctx.dtype)
            if wanted[i]:
                operands = along, along_scale, with_aligned_rows(at), at_scale
                gradients[i] = wgrad(operands, *ctx.targets[i])
        return None if dx is None else dx.view(ctx.shape), *(None,) * (_FIRST - 1), *gradients


def _room_of(weights: list, a: torch.Tensor) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
    """Memory for gates beside ups, and the parts that products are written to. None where there is one product, and
    in a dispatch mode."""
    if len(weights) == 1 or ops.is_in_mode():
        return None, (None,) * len(weights)
    width = sum(weight.shape[0] for weight in weights)
    gate_up = torch.empty(a.shape[0], width, dtype=torch.bfloat16, device=a.device)
    return gate_up, gate_up.chunk(len(weights), 1)


def _check(x, first: tuple, w_down, recipe: Recipe) -> tuple[joined.Layer, ...] | None:
    """The checks of `mlp`, cached like `linear.check_once`."""
    if len(first) not in (1, 2):
        raise ValueError(f"w_gate_up holds {len(first)} weights; pass one [2f, k], or those of gates and of ups")
    layers = check_once(x, first, (None,) * len(first), recipe)
    checked_once(_checked, lambda: _check_last(x, first, w_down), recipe, x, *first, w_down)
    return layers


def _check_last(x, first: tuple, w_down) -> None:
    check_tensors({"w_down": WIDE, "x": WIDE}, x=x, w_down=w_down)
    if w_down.dim() != 2:
        raise ValueError(f"w_down has shape {list(w_down.shape)}; it must be [n, f]")
    shapes, inner = [list(weight.shape) for weight in first], w_down.shape[1]
    if any(rows * len(first) != 2 * inner for rows, _ in shapes):
        raise ValueError(
            f"w_gate_up has shapes {shapes}; for w_down of {list(w_down.shape)} it must be [{2 * inner}, k]"
        )
