"""Trials for `tune`: a bucket's GEMM on random operands, with any config, and its error.

Invariant: after `spoil` the result is wrong, so an earlier result never passes for a later one.
"""

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from deep_tile.config import SCALE_BLOCK, GemmConfig, round_up
from deep_tile.dense import REFERENCES, unpacked
from deep_tile.problem import GemmProblem
from deep_tile.quantize import per_token_cast_to_fp8
from deep_tile.reference import (
    MAX_RELATIVE_ERROR,
    fp8_grouped_wgrad_reference,
    grouped_reference,
    relative_error,
)
from deep_tile.select.groups import SPREAD
from deep_tile.tensors import with_aligned_rows
from deep_tile.tools.products import (
    empty_out,
    exact_product_of,
    most_error,
    multiply,
    multiply_groups,
    operands_of,
)
from deep_tile.wgrad import fp8_grouped_wgrad


class Trial(NamedTuple):
    """A GEMM on which any config of its bucket can be tried.

    Attributes:
        multiply: by this config.
        spoil: takes an earlier result away.
        error: the result's relative error; NaN if part is missing.
        most_error: that a right one may have.
    """

    multiply: Callable[[GemmConfig], torch.Tensor]
    spoil: Callable[[], object]
    error: Callable[[], float]
    most_error: float = MAX_RELATIVE_ERROR


def trial_of(problem: GemmProblem, device: str = "cuda") -> Trial:
    return {"none": _dense, "k_offs": _gradients}.get(problem.grouping, _rows)(problem, device)


def sizes_of(problem: GemmProblem) -> list[int]:
    """Rows per group: spread evenly around the mean, as the selector assumes, in a fixed order."""
    (least, *_, most), (_, count, rows) = SPREAD, problem.groups
    shares = [least + (most - least) * (group + 0.5) / count for group in range(count)]
    random.Random(0).shuffle(shares)
    return [max(1, round(rows * share)) for share in shares]


def _dense(problem: GemmProblem, device: str) -> Trial:
    kind = problem.product
    operands = operands_of(kind, (problem.m, problem.n, problem.k), device)
    out, exact = empty_out(kind, operands, problem.output), exact_product_of(kind, operands)
    return Trial(
        lambda config: multiply(kind, operands, out, config),
        partial(out.fill_, float("nan") if out.is_floating_point() else 2**30),
        lambda: relative_error(out, exact),
        most_error(kind, problem.k, problem.output),
    )


def _rows(problem: GemmProblem, device: str) -> Trial:
    kind, sizes, by_counts = problem.product, sizes_of(problem), problem.groups.layout == "counts"
    rows = len(sizes) * max(sizes) if by_counts else sum(sizes)
    of_rows, of_groups = _grouped_operands(problem, rows, device)
    out = torch.empty(rows, problem.n, dtype=getattr(torch, problem.out.dtype), device=device)
    bounds = torch.tensor(sizes if by_counts else list(accumulate(sizes)), dtype=torch.int32, device=device)
    if by_counts:
        *of_rows, out = (x.unflatten(0, (len(sizes), -1)) for x in (*of_rows, out))
    expected = torch.empty_like(out, dtype=torch.float64)
    grouped_reference(REFERENCES[kind.scaling], unpacked((*of_rows, *of_groups)), expected, bounds)
    given = {"counts" if by_counts else "offs": bounds, "out": out}
    living = torch.arange(out.shape[1], device=out.device) < bounds[:, None] if by_counts else slice(None)
    return Trial(
        lambda config: multiply_groups(kind, (*of_rows, *of_groups), config=config, **given),
        partial(out.fill_, float("nan") if out.is_floating_point() else 2**30),
        lambda: relative_error(out[living], expected[living]),
        most_error(kind, problem.k, problem.output),
    )


def _grouped_operands(problem: GemmProblem, rows: int, device: str) -> tuple[list, list]:
    """Row and group operands: each a matrix with its scale, if any."""
    kind, n, k, groups = problem.product, problem.n, problem.k, problem.groups.count
    half = 1 if kind.scaling == "none" else 2
    weights = [operands_of(kind, (1, n, k), device, seed=group)[half:] for group in range(groups)]
    stacked = [torch.stack(each) for each in zip(*weights, strict=True)]
    of_groups = [x if x.dtype == torch.uint8 else with_aligned_rows(x) for x in stacked]  # packed ones are contiguous
    return operands_of(kind, (rows, n, k), device)[:half], of_groups


def _gradients(problem: GemmProblem, device: str) -> Trial:
    """A K-grouped trial, whose weight gradients [m, n] are added to `out`."""
    sizes = sizes_of(problem)
    begins = list(accumulate((round_up(size, SCALE_BLOCK) for size in sizes), initial=0))
    ends = [begin + size for begin, size in zip(begins, sizes, strict=False)]
    tokens, generator = begins[-1], torch.Generator(device).manual_seed(0)
    operands = []
    for rows in (problem.m, problem.n):
        x = torch.randn(rows, tokens, generator=generator, device=device, dtype=torch.bfloat16)
        for end, begin in zip(ends, begins[1:], strict=True):
            x[:, end:begin] = 0
        operands += per_token_cast_to_fp8(x)
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    out = torch.zeros(len(sizes), problem.m, problem.n, device=device)
    expected = torch.empty_like(out)
    fp8_grouped_wgrad_reference(*operands, offs, expected, SCALE_BLOCK, accumulate=False)
    return Trial(
        lambda config: fp8_grouped_wgrad(*operands, offs, out, config=config),
        out.zero_,
        lambda: relative_error(out, expected),
    )
