"""GEMM definitions in plain torch, and the distance of an output from them.

Invariant: no global precision setting (TF32, `torch.set_float32_matmul_precision`) changes a result, because every
product is taken in float64.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from deep_tile.config import ceil_div
from deep_tile.kinds import GATE_COLUMNS
from deep_tile.quantize import TOKEN_BLOCK, WEIGHT_BLOCK

ROWS_AT_ONCE = 4096
"""Rows of `a` held in float64 at a time. All of `b` is held too, with a scale per element."""

MAX_RELATIVE_ERROR = 1.8e-3
"""Largest `relative_error` of a GEMM on normal samples against the exact result. Rounding it to BF16 explains
1.66e-3."""

ELEMENTS_AT_ONCE = 1 << 24
"""Elements that an error measure holds in float64 at a time."""


def fp8_gemm_reference(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`scaled_gemm_reference` with 1x128 and 128x128 scales. Raises ValueError for other shapes."""
    _require_operand("a", a, a_scale, TOKEN_BLOCK)
    _require_operand("b", b, b_scale, WEIGHT_BLOCK)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has shape {list(a.shape)} and b {list(b.shape)}; their last dimensions, k, must be equal")
    return scaled_gemm_reference(a, a_scale, b, b_scale, out_dtype)


def gemm_reference(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`out[m, n] = sum over k of a[m, k] b[n, k]`, of any dtypes and strides, summed in float64 and rounded once to
    `out_dtype`; integer sums wrap like int32, modulo 2^32."""
    b_columns = b.double().t()
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for a_rows, out_rows in zip(a.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True):
        product = a_rows.double() @ b_columns
        out_rows.copy_(product if a.is_floating_point() else product.long().int())
    return out


def rows_gemm_reference(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """`out[m, n] = a_scale[m] b_scale[n] sum over k of a[m, k] b[n, k]`, in float64, rounded once to `out_dtype`;
    scales have one element per row, or one in all."""
    exact = gemm_reference(a, b, torch.float64)
    return (exact * a_scale.double().reshape(-1, 1) * b_scale.double().reshape(1, -1)).to(out_dtype)


def scaled_gemm_reference(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    b_block: tuple[int, int] = WEIGHT_BLOCK,
) -> torch.Tensor:
    """`out[m, n] = sum over k of a[m, k] a_scale[m, k // 128] b[n, k] b_scale[n // 128, k // 128]`.

    Multiplied and summed in float64, at least as exact as the kernels' FP32 accumulation; rounded once to `out_dtype`.
    `b_block` has the rows and columns of `b` that share a scale.
    """

    def wide(x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
        each = scale.double().repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(TOKEN_BLOCK[1], 1)
        return x.double() * each[:, : x.shape[1]]

    b = wide(b, b_scale, b_block[0])
    rows = zip(a.split(ROWS_AT_ONCE), a_scale.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([gemm_reference(wide(x, scale, TOKEN_BLOCK[0]), b, out_dtype) for x, scale in rows])


def row_blocks_gemm_reference(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """`scaled_gemm_reference` with 1x128 scales for both: `b_scale` is [n, ceil(k / 128)]."""
    return scaled_gemm_reference(a, a_scale, b, b_scale, out_dtype, b_block=TOKEN_BLOCK)


def finished(product: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """The epilogue before rounding: bias, then activation, in float64.

    "gelu" is x times the normal CDF at x, "gelu_tanh" its tanh approximation, "silu" x times the logistic function;
    "swiglu" multiplies silu of eight columns by the next eight, alternating, so that [m, n] becomes [m, n / 2].
    """
    if bias is not None:
        product = product + bias.double()
    if activation == "swiglu":
        gate, up = product.unflatten(1, (-1, 2, GATE_COLUMNS)).unbind(2)
        return (F.silu(gate) * up).flatten(1)
    return product if activation is None else _ACTIVATIONS[activation](product)


_ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": lambda x: F.gelu(x.clamp(min=-64)),  # the limit is for minus infinity, of which torch makes NaN
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def group_rows(
    layout: str, bounds: torch.Tensor | None, groups: int, rows: int, alignment: int = 1
) -> list[tuple[int, int]]:
    """Each group's first row and end row, as kernels derive them from arbitrary bounds.

    Args:
        layout: "offs": `bounds` are end rows, and a group starts at the previous end, rounded up to `alignment`;
            "counts": rows per group, None: all.
        rows: total ("offs") or per group ("counts").
    """
    if layout == "counts":
        counts = [rows] * groups if bounds is None else bounds.tolist()
        return [(0, min(max(count, 0), rows)) for count in counts]
    found, end = [], 0
    for bound in bounds.tolist():
        begin = -(-end // alignment) * alignment
        end = max(end, min(bound, rows))
        found.append((begin, max(begin, end)))
    return found


def grouped_reference(
    product: Callable[..., torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    bounds: torch.Tensor | None = None,
    alignment: int = 1,
) -> None:
    """Multiply each group's rows and write them to `out`; other rows are untouched.

    Args:
        product: function of one group's operands and result dtype.
        operands: a and b, or each followed by a scale: `a` [s, k] and scale [s, ...], or both with a leading group
            dimension; `b` [g, n, k] and scale [g, ...].
        out: [s, n], or [g, m, n].
        bounds, alignment: as for `group_rows`; a 3-D `a` means "counts".
    """
    of_rows, of_groups = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    a, b = of_rows[0], of_groups[0]
    layout = "counts" if a.dim() == 3 else "offs"
    for group, (begin, end) in enumerate(group_rows(layout, bounds, len(b), a.shape[-2], alignment)):
        if begin == end:
            continue
        rows = (group, slice(begin, end)) if a.dim() == 3 else slice(begin, end)
        out[rows] = product(*(x[rows] for x in of_rows), *(x[group] for x in of_groups), out.dtype)


def fp8_grouped_wgrad_reference(
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    alignment: int,
    accumulate: bool,
) -> None:
    """`row_blocks_gemm_reference` for each group's tokens, written or added to `out[g]`; `offs` and `alignment`, a
    multiple of 128, are in tokens, as for `group_rows`."""
    for group, (begin, end) in enumerate(group_rows("offs", offs, len(out), dy.shape[1], alignment)):
        if begin == end and accumulate:
            continue
        tokens, blocks = slice(begin, end), slice(begin // TOKEN_BLOCK[1], ceil_div(end, TOKEN_BLOCK[1]))
        operands = dy[:, tokens], dy_scale[:, blocks], x[:, tokens], x_scale[:, blocks]
        product = row_blocks_gemm_reference(*operands, out.dtype)
        out[group] = out[group] + product if accumulate else product


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of `x - reference` divided by reference's, in float64: 0.0 when both are zero, infinity when only
    `reference` is, NaN when either holds NaN."""
    error = norm = 0.0
    for got, wanted in _float64_chunks(x, reference):
        error += (got - wanted).square().sum()
        norm += wanted.square().sum()
    error, norm = float(error) ** 0.5, float(norm) ** 0.5
    if error == 0:
        return 0.0
    return error / norm if norm else error * math.inf


def cosine_difference(x: torch.Tensor, reference: torch.Tensor) -> float:
    """`1 - 2 <x, reference> / (<x, x> + <reference, reference>)`, in float64; 0.0 when both are zero."""
    product = squares = 0.0
    for got, wanted in _float64_chunks(x, reference):
        product += (got * wanted).sum()
        squares += (got.square() + wanted.square()).sum()
    product, squares = float(product), float(squares)
    return 0.0 if squares == 0 else 1 - 2 * product / squares


def _require_operand(name: str, x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be 2-D")
    wanted = list(map(ceil_div, x.shape, block))
    if list(scale.shape) != wanted:
        raise ValueError(
            f"{name}_scale has shape {list(scale.shape)}; for {name} of shape {list(x.shape)} it must be {wanted}"
        )


def _float64_chunks(x: torch.Tensor, reference: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if x.shape != reference.shape:
        raise ValueError(f"x has shape {list(x.shape)} and reference {list(reference.shape)}; they must be equal")
    rows = max(1, ELEMENTS_AT_ONCE // max(1, x[:1].numel()))
    for got, wanted in zip(x.split(rows), reference.split(rows), strict=True):
        yield got.double(), wanted.double()
