"""Operands of grouped GEMMs of every kind, with poison around them, and checks of their results."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from helpers import Exact, GuardedOut, Product, assert_accurate, make_product, product_of

from deep_tile import fp8_grouped_gemm, grouped_gemm, scaled_grouped_gemm
from deep_tile.config import round_up
from deep_tile.kinds import KINDS, RAW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, RAW: torch.int32}


class Case(NamedTuple):
    """A grouped GEMM. Rows of no group, and memory between groups of `b`, hold NaN, or its bytes as integers.

    Attributes:
        a, a_scale, b, b_scale: as the call takes them; kinds without scales have None.
        bounds: the call's `offs` or, if `capacity` is given, `counts`.
        rows: first row, and the one behind the last, of each group, among all rows of `guarded`.
        capacity: rows that each group has room for; None where groups follow each other.
    """

    kind: str
    a: torch.Tensor
    a_scale: torch.Tensor | None
    b: torch.Tensor
    b_scale: torch.Tensor | None
    bounds: torch.Tensor | None
    rows: list[tuple[int, int]]
    guarded: GuardedOut
    capacity: int | None

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return tuple(x for x in self[1:5] if x is not None)

    @property
    def lists(self) -> dict[str, torch.Tensor | None]:
        """`bounds` as a keyword."""
        return {"offs" if self.capacity is None else "counts": self.bounds}

    @property
    def out(self) -> torch.Tensor:
        """`out` as the call takes it."""
        out = self.guarded.out
        return out if self.capacity is None else out.unflatten(0, (len(self.rows), self.capacity))

    @property
    def indices(self) -> torch.Tensor:
        """Each row's group, -1 for rows of none, as DeepGEMM takes them."""
        indices = torch.full((len(self.a),), -1, dtype=torch.int32)
        for group, (begin, end) in enumerate(self.rows):
            indices[begin:end] = group
        return indices.to(self.a.device)

    def check_into(self, call: Callable) -> None:
        """A call that returns nothing writes each group's rows to `out`, no other row, nor anything around them."""
        assert call(self.out) is None
        self.check_out()

    def call(self, *operands: torch.Tensor, **keywords) -> torch.Tensor:
        """Multiply these operands, by default the case's."""
        function = fp8_grouped_gemm if self.kind == "fp8" else scaled_grouped_gemm
        if KINDS[self.kind].scaling == "none":
            function = grouped_gemm
        elif self.kind != "fp8":
            function = partial(function, fast_accum=KINDS[self.kind].scaling != "promoted_rows")
        return function(*(operands or self.operands), **self.lists | keywords)

    def product(self, group: int) -> Product:
        """The GEMM of a group's rows alone."""
        begin, end = self.rows[group]
        of_rows = (x if self.capacity is None else x.flatten(0, 1) for x in self.operands[: len(self.operands) // 2])
        of_b = (x[group] for x in self.operands[len(self.operands) // 2 :])
        return product_of(self.kind, (*(x[begin:end] for x in of_rows), *of_b))

    def exact(self, group: int) -> Exact:
        return self.product(group).exact

    def check(self, **keywords) -> torch.Tensor:
        """Multiply into the guarded `out`; check its rows and the memory around them."""
        out = self.out
        assert self.call(out=out, **keywords) is out
        self.check_out()
        return self.guarded.out

    def check_out(self) -> None:
        """Check the guarded `out` after a call, and the memory around it."""
        self.guarded.assert_groups(self.rows, self._check_group)

    def _check_group(self, group: int, out: torch.Tensor) -> None:
        made = self.product(group)
        assert_accurate(out, made.exact, made.accumulation, made.relative_error)


def make_case(
    kind: str,
    sizes: list[int],
    n: int,
    k: int,
    *,
    device: str = "cpu",
    capacity: int | None = None,
    alignment: int = 1,
    spare: int = 5,
    layout: str = "nt",
    padding: int = 0,
    scales: str = "row",
    out_dtype: torch.dtype | None = None,
    out_stride: int | None = None,
    out_offset: int = 0,
) -> Case:
    """Groups of `sizes` rows: one after the other with `spare` rows behind, or each with room for `capacity`.

    Args:
        padding, scales: as of `make_product`.
    """
    rows, end = [], 0
    for group, size in enumerate(sizes):
        begin = round_up(end, alignment) if capacity is None else group * capacity
        end = begin + size
        rows.append((begin, end))
    total = end + spare if capacity is None else len(sizes) * capacity
    options = {"device": device, "layout": layout, "padding": padding, "scales": scales}
    of_a = _halves(make_product(kind, total, 1, k, **options))[0]
    of_b = [_halves(make_product(kind, 1, n, k, **options))[1] for _ in sizes]
    a, *a_scale = _poisoned_rows(of_a, rows)
    if capacity is not None:
        a, *a_scale = (x.unflatten(0, (len(sizes), capacity)) for x in (a, *a_scale))
    b, *b_scale = (_apart(parts, padding) for parts in zip(*of_b, strict=True))
    bounds = torch.tensor(sizes if capacity else [end for _, end in rows], dtype=torch.int32, device=device)
    dtype = out_dtype or OUT_DTYPES[KINDS[kind].output]
    guarded = GuardedOut(total, n, device=device, stride=out_stride, offset=out_offset, dtype=dtype)
    return Case(kind, a, *(a_scale or [None]), b, *(b_scale or [None]), bounds, rows, guarded, capacity)


def _halves(made: Product) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The operands of `a` and those of `b`, each with its scale."""
    half = len(made.operands) // 2
    return tuple(made.operands[:half]), tuple(made.operands[half:])


def _poisoned_rows(tensors: tuple[torch.Tensor, ...], rows: list[tuple[int, int]]) -> list[torch.Tensor]:
    """The tensors, with NaN in rows of no group."""
    dead = torch.ones(len(tensors[0]), dtype=torch.bool)
    for begin, end in rows:
        dead[begin:end] = False
    for x in tensors:
        of_nan = torch.full((x.element_size(),), 0xFF, dtype=torch.uint8, device=x.device).view(x.dtype)
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        x.view(words)[dead.to(x.device)] = of_nan.view(words)
    return list(tensors)


def _apart(parts: tuple[torch.Tensor, ...], padding: int) -> torch.Tensor:
    """Put each group's matrix of `b` or its scale into one tensor, in its own layout, with rows of NaN behind it."""
    along_rows = parts[0].stride(1) != 1 and parts[0].shape[1] > 1
    stored = [part.t() if along_rows else part for part in parts]
    rows, columns = stored[0].shape
    row_bytes = round_up(columns * stored[0].element_size(), 16) + padding
    whole = torch.full((len(parts), rows + 3, row_bytes), 0xFF, dtype=torch.uint8, device=stored[0].device)
    whole = whole.view(stored[0].dtype)[:, :rows, :columns]
    for place, part in zip(whole, stored, strict=True):
        place.copy_(part)
    return whole.transpose(1, 2) if along_rows else whole
