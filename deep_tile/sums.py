"""`einsum`: per-head GEMMs and batch-summed GEMMs.

It has no kernels: per-head GEMMs are grouped GEMMs (grouped.py), batch sums are thin GEMMs (thin.py).
"""

from collections.abc import Callable

import torch

from deep_tile import dense, finishes, grouped, thin
from deep_tile.operation import gradient_error
from deep_tile.ops import is_traced
from deep_tile.options import check_one
from deep_tile.tensors import ALIGNMENT_BYTES, require_apart, require_tensors

EXPRESSIONS = ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")

_MANY_ROWS = 256
"""From this many rows on, one GEMM per head is faster than copies into a layout for one launch."""

_K_BLOCK = 64
"""Multiple that k must be for N-major grouped GEMMs."""


def einsum(
    expr: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    num_sms: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """One of four BF16 contractions, in `torch.einsum`'s notation.

    - "bmk,bnk->mn": `sum_b a[b] @ b[b].T`, summed over the batch in FP32, in a fixed order, by `thin_gemm` without a
      copy.
    - "bhr,hdr->bhd": `a[:, h] @ b[h].T` for each head, and "bhd,hdr->bhr": `a[:, h] @ b[h]`, the absorbed projections
      of latent attention, by `grouped_gemm` with one group per head. If the heads of `a` are interleaved row by row, up
      to 256 rows are copied to contiguous heads and the result is copied back; more rows are multiplied in one launch
      per head, without copies.
    - "bhd,bhr->hdr": `a[:, h].T @ b[:, h]` for each head, the weight gradient of these two: one launch per head.

    Runs on the tensors' device and torch's current stream. Not differentiable. `torch.compile` sees the GEMMs as
    separate ops.

    Args:
        expr: one of these four strings.
        a, b: bfloat16, unit stride along the last dimension, other strides multiples of 16 bytes, 16-byte aligned.
        out: the shape that `expr` says, float32 or bfloat16, strides as for `a` and `b`; allocated when None.
        out_dtype: dtype of `out`: by default `out`'s, or float32 for a sum over b, else bfloat16.
        accumulate: add to a float32 `out`; only for a sum over b.
        num_sms: as for `grouped_gemm`.
        pdl: as for `fp8_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError, RuntimeError: as `thin_gemm` and `grouped_gemm`; ValueError also for another `expr`.
            Nothing has been launched and `out` is unchanged.
    """
    _check(expr, a, b, out, out_dtype, accumulate)
    if expr == EXPRESSIONS[0]:
        return thin.thin_gemm(a, b, out, out_dtype=out_dtype, accumulate=accumulate, num_sms=num_sms, pdl=pdl)
    is_gradient = expr == "bhd,bhr->hdr"
    if out is None:
        out = a.new_empty(_shape(expr, a, b), dtype=out_dtype or (torch.float32 if is_gradient else torch.bfloat16))
    options = {"num_sms": num_sms, "pdl": pdl}
    if is_gradient:
        _check_heads(a.transpose(0, 1), b.transpose(0, 1), out)
        for head in range(len(out)):
            dense.gemm(a[:, head].t(), b[:, head].t(), out[head], accumulate=accumulate, **options)
        return out
    weights = b.transpose(1, 2) if expr == "bhd,hdr->bhr" else b
    multiply_heads((a.transpose(0, 1), weights), out.transpose(0, 1), dense.gemm, grouped.grouped_gemm, **options)
    return out


def check_sum(expr: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options) -> None:
    """Raise what `einsum` would raise with accumulate=True."""
    _check(expr, a, b, out, None, accumulate=True)
    if expr == EXPRESSIONS[0]:
        thin.THIN_GEMM.checked((a, b, out, None, None), thin.Options(accumulate=True, **options))
    elif len(out):
        _check_heads(a.transpose(0, 1), b.transpose(0, 1), out)
        dense.check_sum("gemm", (a[:, 0].t(), b[:, 0].t()), out[0], **options)


def multiply_heads(
    operands: tuple[torch.Tensor, ...], out: torch.Tensor, multiply: Callable, multiply_groups: Callable, **options
) -> None:
    """`out[h] = a[h] @ b[h]^T` for operands (a, b) or (a, a_scale, b, b_scale), heads first: one launch, with copies
    unless the head stride is a multiple of the row stride, or one launch per head."""
    a, b = operands[0], operands[len(operands) // 2]
    fits = _are_groups(a) and _are_groups(out)
    along_n = b.stride(-1) != 1 and b.shape[-1] % _K_BLOCK != 0
    if (not fits and a.shape[1] >= _MANY_ROWS and not is_traced()) or along_n:
        _check_heads(a, b, out)
        for head in range(a.shape[0]):
            multiply(*(x[head] for x in operands), out[head], **options)
        return
    into = out if _are_groups(out) else out.new_empty(out.shape)
    if into is not out and not is_traced():
        require_apart("out", out)
    multiply_groups(a if _are_groups(a) else a.contiguous(), *operands[1:], out=into, **options)
    if into is not out:
        out.copy_(into)


def _check_heads(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Checks that a single head's GEMM cannot make, or that a later head's GEMM would make after others were
    launched."""
    if is_traced():
        return
    for name, x in (("a", a), ("b", b)):
        step = x.stride(0) * x.element_size()
        if x.numel() and len(x) > 1 and step % ALIGNMENT_BYTES:
            raise ValueError(
                f"{name}'s heads lie {step} bytes apart, no multiple of {ALIGNMENT_BYTES}: pad its last dimension to a "
                f"multiple of {ALIGNMENT_BYTES // x.element_size()} and pass the slice"
            )
    require_apart("out", out)


def goes_by_head(a: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `multiply_heads` launches one GEMM per head for K-major operands."""
    return not (_are_groups(a) and _are_groups(out)) and a.shape[1] >= _MANY_ROWS


def _are_groups(x: torch.Tensor) -> bool:
    """Whether the group stride of [g, m, k] is a multiple of the row stride, as grouped GEMMs need."""
    groups, rows = x.shape[:2]
    return groups <= 1 or rows <= 1 or (x.stride(1) > 0 and x.stride(0) % x.stride(1) == 0)


def _shape(expr: str, a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    operands, result = expr.split("->")
    sizes = {}
    for letters, x in zip(operands.split(","), (a, b), strict=True):
        sizes |= dict(zip(letters, x.shape, strict=True))
    return tuple(sizes[letter] for letter in result)


def _check(expr: str, a, b, out, out_dtype: torch.dtype | None, accumulate: bool) -> None:
    """Checks that the GEMMs, which see one head, do not make."""
    if expr not in EXPRESSIONS:
        raise ValueError(f"expr is {expr!r}; it must be one of {', '.join(EXPRESSIONS)}, spelled so")
    require_tensors(is_traced(), a=a, b=b, **({} if out is None else {"out": out}))
    check_one("accumulate", accumulate)
    finishes.check_out_dtype(out_dtype)
    finishes.check_out(out, out_dtype)
    if out is not None and out.requires_grad and torch.is_grad_enabled():
        raise gradient_error("out", "einsum has none")
    operands, result = expr.split("->")
    for name, letters, x in zip(("a", "b"), operands.split(","), (a, b), strict=True):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be torch.bfloat16; got {x.dtype}. To fix: {name}.to(torch.bfloat16)")
        if x.dim() != 3:
            raise ValueError(f"{name} is {list(x.shape)}; it must have 3 dimensions, {letters}")
    a_letters, b_letters = operands.split(",")
    for letter in sorted(set(a_letters) & set(b_letters)):
        of_a, of_b = a.shape[a_letters.index(letter)], b.shape[b_letters.index(letter)]
        if of_a != of_b:
            raise ValueError(f"{letter} of {expr!r} is {of_a} in a, {list(a.shape)}, and {of_b} in b, {list(b.shape)}")
    if out is not None and tuple(out.shape) != _shape(expr, a, b):
        raise ValueError(f"out is {list(out.shape)}; for {expr!r} it must be {list(_shape(expr, a, b))}")
    if accumulate and "b" in result:
        raise ValueError(f"accumulate is True, and {expr!r} has no sum over b: add to out afterwards")
    if accumulate and out is None:
        raise ValueError("accumulate is True and out None: pass what the product is added to")
