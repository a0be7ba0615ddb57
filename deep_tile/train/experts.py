"""An expert layer in FP8, with gradients.

Tokens are sorted by expert; each expert's rows start at a multiple of 128, and padding rows hold arbitrary bytes that
no GEMM or cast reads. Six grouped GEMMs for any group sizes, without host synchronisation: two forward, two dgrad, two
wgrad. Each tensor is read by one cast, which makes all its operands, as in linear.py.
"""

from typing import NamedTuple

import torch

from deep_tile import ops, tensors
from deep_tile.both import cast_both
from deep_tile.config import SCALE_BLOCK
from deep_tile.experts import Routing, combine, silu_mul_cast_to_fp8, sort_by_expert
from deep_tile.gated import swiglu_gradient_cast_both
from deep_tile.gradients import once_differentiable
from deep_tile.grouped import fp8_grouped_gemm
from deep_tile.train.products import MainGrad, cast_backward, cast_forward, keep, main_grad_of, written_dtype
from deep_tile.train.recipe import Recipe, check_tensors, checked_once, require
from deep_tile.wgrad import fp8_grouped_wgrad

_FP8 = Recipe()

_checked: dict[tuple, None] = {}

_WIDE = (torch.bfloat16, torch.float32)

_DTYPES = {
    "x": (torch.bfloat16,),
    "chosen": (torch.int32, torch.int64),
    **dict.fromkeys(("shares", "w_gate_up", "w_down"), _WIDE),
}


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    recipe: Recipe = _FP8,
) -> torch.Tensor:
    """MoE layer: for each token t, the sum over j of shares[t, j] * expert(chosen[t, j])(x[t]).

    An expert is `silu(x @ gate^T) * (x @ up^T) @ down^T`, with all GEMMs in FP8. Differentiable once in `x`,
    `shares` and both weights. Experts may get any number of tokens, also none; nothing waits for the host, so one CUDA
    graph serves every routing.

    Args:
        x: [t, h] bfloat16.
        chosen: [t, top_k] int32 or int64, expert numbers. Negative or too large numbers are ignored.
        shares: [t, top_k] float32 or bfloat16.
        w_gate_up: [e, 2f, h] bfloat16 or float32: f gate rows, then f up rows.
        w_down: [e, h, f] bfloat16 or float32. A weight's `main_grad` (same shape, float32 or bfloat16) is accumulated
            as by `linear`.
        recipe: with `dgrad` and `wgrad` "fp8"; see `Recipe`.

    Returns:
        [t, h] bfloat16.

    Raises:
        TypeError: an argument has another dtype, or `recipe` is no `Recipe`.
        ValueError: shapes or devices do not fit, or the recipe has GEMMs in BF16.
        RuntimeError: as for `fp8_grouped_gemm`.
    """
    require(recipe)
    given = x, chosen, shares, w_gate_up, w_down
    checked_once(_checked, lambda: _check(*given, recipe), recipe, *given)
    tensors.require_dense_in_eager(shares=shares)  # torch reads them, where launches check the others' memory
    if hasattr(w_gate_up, "main_grad") or hasattr(w_down, "main_grad"):
        return _apply_eagerly(x, chosen, shares, w_gate_up, w_down, recipe.held)
    return _Experts.apply(x, chosen, shares, w_gate_up, w_down, recipe.held)


@torch.compiler.disable
def _apply_eagerly(*given) -> torch.Tensor:
    """Runs outside a compiler, as in linear.py: some gradients are accumulated and not returned."""
    return _Experts.apply(*given)


class _Saved(NamedTuple):
    """Tensors that the backward pass needs.

    Attributes:
        x_along_tokens, x_scale: operands for the first weight's gradient.
        gate_up, gate_up_scale: [r, 2f], the first GEMM's result in BF16, or its FP8 codes and scale.
        share: [r], per row.
        ones: [t, top_k], the weights with which rows are added up.
        up, up_scale, down, down_scale: the weights as kept by `cast_forward`.
        rows, offs, index: the routing.
    """

    x_along_tokens: torch.Tensor
    x_scale: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor | None
    share: torch.Tensor
    ones: torch.Tensor
    up: torch.Tensor | None
    up_scale: torch.Tensor | None
    down: torch.Tensor | None
    down_scale: torch.Tensor | None
    rows: torch.Tensor
    offs: torch.Tensor
    index: torch.Tensor


class _Experts(torch.autograd.Function):
    """Shares multiply the second GEMM's input, not its output: so the output's gradient is cast unchanged, by the rows'
    tokens, and a share's gradient is a sum over f, not h."""

    @staticmethod
    def forward(ctx, x, chosen, shares, w_gate_up, w_down, held):
        recipe = held.recipe
        routing = sort_by_expert(chosen, w_gate_up.shape[0], alignment=SCALE_BLOCK)
        *up, kept_up = cast_forward(w_gate_up, recipe, ctx.needs_input_grad[0])
        *down, kept_down = cast_forward(w_down, recipe, any(ctx.needs_input_grad))
        a, a_scale, *x_along = _cast(x, recipe, routing.offs, routing.rows)
        gate_up = _product(a, a_scale, *up, routing.offs)
        share = _share_of_rows(shares, routing)
        hidden, hidden_scale = silu_mul_cast_to_fp8(gate_up, offs=routing.offs, **recipe.cast)
        hidden_scale = hidden_scale * share[:, None] if ops.is_in_mode() else hidden_scale.mul_(share[:, None])
        ones = share.new_ones(()).expand(chosen.shape)
        rows_out = _product(hidden, hidden_scale, *down, routing.offs)
        weights = *kept_up, *kept_down
        kept = keep(gate_up, recipe, offs=routing.offs)
        ctx.save_for_backward(*_Saved(*x_along, *kept, share, ones, *weights, *routing))
        ctx.recipe, ctx.dtype = recipe, shares.dtype
        ctx.targets = [(weight.dtype, main_grad_of(weight)) for weight in (w_gate_up, w_down)]
        return combine(rows_out, ones, routing.index)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, recipe = _Saved(*ctx.saved_tensors), ctx.recipe
        of_x, _, of_shares, of_up, of_down, _ = ctx.needs_input_grad
        offs, index, share = saved.offs, saved.index, saved.share
        d, d_scale, *d_along = _cast(dy, recipe, offs, saved.rows)
        of_hidden = _product(d, d_scale, *cast_backward([saved.down, saved.down_scale], recipe), offs)
        made = swiglu_gradient_cast_both(
            *(of_hidden, saved.gate_up, saved.gate_up_scale),
            share=share,
            offs=offs,
            alignment=SCALE_BLOCK,
            **recipe.cast,
        )
        x_grad = shares = up = down = None
        if of_down:
            down = _weight_gradient(d_along, (made.ht, made.ht_scale), offs, *ctx.targets[1])
        if of_shares:
            shares = made.share[index].masked_fill_(index < 0, 0).to(ctx.dtype)
        d, d_scale, *d_along = made[:4]
        if of_up:
            up = _weight_gradient(d_along, (saved.x_along_tokens, saved.x_scale), offs, *ctx.targets[0])
        if of_x:
            rows = _product(d, d_scale, *cast_backward([saved.up, saved.up_scale], recipe), offs)
            x_grad = combine(rows, saved.ones, index)
        return x_grad, None, shares, up, down, None


def _cast(x: torch.Tensor, recipe: Recipe, offs: torch.Tensor, rows: torch.Tensor | None = None) -> tuple:
    return tuple(cast_both(x, rows=rows, offs=offs, alignment=SCALE_BLOCK, **recipe.cast))


def _product(a, a_scale, b, b_scale, offs: torch.Tensor) -> torch.Tensor:
    return fp8_grouped_gemm(a, a_scale, b, b_scale, offs, alignment=SCALE_BLOCK)


def _weight_gradient(
    dy: tuple, x: tuple, offs: torch.Tensor, dtype: torch.dtype, main_grad: MainGrad | None
) -> torch.Tensor | None:
    if main_grad is not None:
        fp8_grouped_wgrad(*dy, *x, offs, main_grad.grad, accumulate=True)
        return main_grad.placeholder(dtype)
    out = torch.empty(offs.shape[0], dy[0].shape[0], x[0].shape[0], dtype=written_dtype(dtype), device=dy[0].device)
    return fp8_grouped_wgrad(*dy, *x, offs, out, accumulate=False)


def _share_of_rows(shares: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[r] float32; padding rows are undefined."""
    count = routing.rows.shape[0]
    share = torch.empty(count + 1, dtype=torch.float32, device=shares.device)
    share.index_put_((routing.index,), shares.detach().float())  # -1, of a choice without an expert, is after the rows
    return share[:count]


def _check(x, chosen, shares, w_gate_up, w_down, recipe: Recipe) -> None:
    given = {"x": x, "chosen": chosen, "shares": shares, "w_gate_up": w_gate_up, "w_down": w_down}
    check_tensors(_DTYPES, **given)
    shapes = {name: list(tensor.shape) for name, tensor in given.items()}
    if [len(shape) for shape in shapes.values()] != [2, 2, 2, 3, 3]:
        raise ValueError(
            f"the shapes are {shapes}; x must be [t, h], chosen and shares [t, top_k], w_gate_up [e, 2f, h] and w_down "
            "[e, h, f]"
        )
    (tokens, hidden), (count, twice, _) = x.shape, w_gate_up.shape
    wanted = {"w_gate_up": (count, twice, hidden), "w_down": (count, hidden, twice // 2)}
    wanted |= {"chosen": (tokens, chosen.shape[-1]), "shares": tuple(chosen.shape)}
    for name, given in (("w_gate_up", w_gate_up), ("w_down", w_down), ("chosen", chosen), ("shares", shares)):
        if tuple(given.shape) != wanted[name]:
            raise ValueError(f"{name} has shape {list(given.shape)}; beside the others it must be {list(wanted[name])}")
    if twice % 2:
        raise ValueError(f"w_gate_up has shape {list(w_gate_up.shape)}; it must have as many gate rows as up rows")
    if (recipe.dgrad, recipe.wgrad) != ("fp8", "fp8"):
        raise ValueError(f"recipe is {recipe}; experts run all their GEMMs in FP8")
