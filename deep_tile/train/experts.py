"""A layer of experts whose products are in FP8, with gradients.

Called by users. Tokens are sorted by expert; rows of each begin at a multiple of 128, and those in between hold
arbitrary bytes, which no product and no cast reads. Six grouped products, of any sizes of groups, and no wait for the
host: two forward, two for gradients of rows, two for those of weights. Each tensor is read by one cast, which makes all
operands that it is needed for, as linear.py has it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from deep_tile.both import cast_both
from deep_tile.config import SCALE_BLOCK
from deep_tile.experts import Routing, combine, sort_by_expert
from deep_tile.grouped import fp8_grouped_gemm
from deep_tile.train.casts import cast_once
from deep_tile.train.recipe import Recipe
from deep_tile.wgrad import fp8_grouped_wgrad

_FP8 = Recipe()


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    recipe: Recipe = _FP8,
) -> torch.Tensor:
    """What the chosen experts make of each token: the sum over j of shares[t, j] * expert(chosen[t, j])(x[t]).

    An expert is `silu(x @ gate^T) * (x @ up^T) @ down^T`, all of its products in FP8. Differentiable once in `x`,
    `shares` and both weights. Experts may get any number of tokens, none too; nothing waits for the host, so a CUDA
    graph holds for every routing.

    Args:
        x: [t, h] bfloat16.
        chosen: [t, top_k] int32 or int64, numbers of experts. One that is negative or no expert's counts for nothing.
        shares: [t, top_k] float32 or bfloat16.
        w_gate_up: [e, 2f, h] bfloat16 or float32: f rows of gates, then f of ups.
        w_down: [e, h, f] likewise.
        recipe: `dgrad` and `wgrad` are "fp8"; see `Recipe`.

    Returns:
        [t, h] bfloat16.

    Raises:
        TypeError: an argument has another dtype.
        ValueError: shapes or devices do not fit, or the recipe has products in BF16.
        RuntimeError: as for `fp8_grouped_gemm`.
    """
    _check(x, chosen, shares, w_gate_up, w_down, recipe)
    return _Experts.apply(x, chosen, shares, w_gate_up, w_down, recipe)


class _Saved(NamedTuple):
    """Tensors that the backward pass needs.

    Attributes:
        x_along_tokens, x_scale, hidden_along_tokens, hidden_scale: of both products' weight gradients.
        gate_up: [r, 2f], what the first product made.
        share: [r], of each row, rounded to BF16 as activations are.
        up_transposed, up_scale, down_transposed, down_scale: the weights.
        rows, offs, index: the routing.
    """

    x_along_tokens: torch.Tensor
    x_scale: torch.Tensor
    hidden_along_tokens: torch.Tensor
    hidden_scale: torch.Tensor
    gate_up: torch.Tensor
    share: torch.Tensor
    up_transposed: torch.Tensor
    up_scale: torch.Tensor
    down_transposed: torch.Tensor
    down_scale: torch.Tensor
    rows: torch.Tensor
    offs: torch.Tensor
    index: torch.Tensor


class _Experts(torch.autograd.Function):
    """Shares multiply what goes into the second product, not what comes out of it: so the gradient of the output is
    cast as it is, by the rows' tokens, and the gradient of a share is a sum over f, not h."""

    @staticmethod
    def forward(ctx, x, chosen, shares, w_gate_up, w_down, recipe):
        routing = sort_by_expert(chosen, len(w_gate_up), alignment=SCALE_BLOCK)
        up, down = cast_once(w_gate_up, recipe), cast_once(w_down, recipe)
        a, a_scale, *x_along = _cast(x, recipe, routing.offs, routing.rows)
        gate_up = _product(a, a_scale, up.b, up.b_scale, routing.offs)
        share = _share_of_rows(shares, routing)
        hidden = _swiglu(gate_up) * share[:, None]
        hidden, hidden_scale, *hidden_along = _cast(hidden, recipe, routing.offs)
        rows_out = _product(hidden, hidden_scale, down.b, down.b_scale, routing.offs)
        weights = up.bt, up.b_scale, down.bt, down.b_scale
        ctx.save_for_backward(*_Saved(*x_along, *hidden_along, gate_up, share, *weights, *routing))
        ctx.recipe, ctx.dtypes = recipe, (shares.dtype, w_gate_up.dtype, w_down.dtype)
        return combine(rows_out, torch.ones_like(share[:1]).expand(chosen.shape), routing.index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        saved, recipe = _Saved(*ctx.saved_tensors), ctx.recipe
        of_x, _, of_shares, of_up, of_down, _ = ctx.needs_input_grad
        offs, index, share = saved.offs, saved.index, saved.share
        d, d_scale, *d_along = _cast(dy, recipe, offs, saved.rows)
        of_hidden = _product(d, d_scale, saved.down_transposed, saved.down_scale.mT, offs)
        hidden_along = saved.hidden_along_tokens, saved.hidden_scale
        down = _weight_gradient(d_along, hidden_along, offs, ctx.dtypes[2]) if of_down else None
        x_grad = shares = up = None
        if of_shares:
            of_rows = (of_hidden * _swiglu(saved.gate_up)).sum(1, dtype=torch.float32)
            shares = of_rows[index.clamp(min=0)].masked_fill(index < 0, 0).to(ctx.dtypes[0])
        of_gate_up = _swiglu_gradient(of_hidden, share, saved.gate_up)
        d, d_scale, *d_along = _cast(of_gate_up, recipe, offs)
        if of_up:
            up = _weight_gradient(d_along, (saved.x_along_tokens, saved.x_scale), offs, ctx.dtypes[1])
        if of_x:
            rows = _product(d, d_scale, saved.up_transposed, saved.up_scale.mT, offs)
            x_grad = combine(rows, torch.ones_like(share[:1]).expand(index.shape), index)
        return x_grad, None, shares, up, down, None


def _cast(x: torch.Tensor, recipe: Recipe, offs: torch.Tensor, rows: torch.Tensor | None = None) -> tuple:
    return tuple(cast_both(x, rows=rows, offs=offs, alignment=SCALE_BLOCK, **recipe.cast))


def _product(a, a_scale, b, b_scale, offs: torch.Tensor) -> torch.Tensor:
    return fp8_grouped_gemm(a, a_scale, b, b_scale, offs, alignment=SCALE_BLOCK)


def _weight_gradient(dy: tuple, x: tuple, offs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shape = (len(offs), dy[0].shape[0], x[0].shape[0])
    out = torch.empty(shape, dtype=dtype, device=dy[0].device)
    return fp8_grouped_wgrad(*dy, *x, offs, out, accumulate=False)


def _share_of_rows(shares: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[r] bfloat16; rows of no token have none, and hold anything."""
    count = len(routing.rows)
    share = torch.empty(count + 1, dtype=torch.bfloat16, device=shares.device)
    places = torch.where(routing.index < 0, count, routing.index)  # behind the last: choices of no expert
    return share.index_put((places.flatten(),), shares.detach().flatten().to(share.dtype))[:count]


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[r, f]."""
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up


def _swiglu_gradient(dy: torch.Tensor, share: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Of `_swiglu(gate_up) * share`: [r, 2f]."""
    dy = dy * share[:, None]
    gate, up = gate_up.chunk(2, 1)
    return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)], 1)


def _check(x, chosen, shares, w_gate_up, w_down, recipe: Recipe) -> None:
    wide = (torch.bfloat16, torch.float32)
    for name, given, dtypes in (
        ("x", x, (torch.bfloat16,)),
        ("chosen", chosen, (torch.int32, torch.int64)),
        ("shares", shares, wide),
        ("w_gate_up", w_gate_up, wide),
        ("w_down", w_down, wide),
    ):
        if not isinstance(given, torch.Tensor) or given.dtype not in dtypes:
            seen = f"a tensor of {given.dtype}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
            raise TypeError(f"{name} is {seen}; it must be a tensor of {' or '.join(map(str, dtypes))}")
        if given.device != x.device:
            raise ValueError(f"{name} is on {given.device} but x is on {x.device}; move it there")
    if x.dim() != 2 or w_gate_up.dim() != 3 or w_down.dim() != 3:
        raise ValueError("x must be [t, h], w_gate_up [e, 2f, h] and w_down [e, h, f]; see the shapes given")
    (tokens, hidden), (count, twice, _) = x.shape, w_gate_up.shape
    wanted = {"w_gate_up": (count, twice, hidden), "w_down": (count, hidden, twice // 2)}
    wanted |= {"chosen": (tokens, chosen.shape[-1]), "shares": tuple(chosen.shape)}
    for name, given in (("w_gate_up", w_gate_up), ("w_down", w_down), ("chosen", chosen), ("shares", shares)):
        if tuple(given.shape) != wanted[name]:
            raise ValueError(f"{name} has shape {list(given.shape)}; beside the others it must be {list(wanted[name])}")
    if twice % 2:
        raise ValueError(f"w_gate_up has shape {list(w_gate_up.shape)}; its rows are gates and as many ups")
    if (recipe.dgrad, recipe.wgrad) != ("fp8", "fp8"):
        raise ValueError(f"recipe is {recipe}; experts have all their products in FP8")
