"""The addresses that a cast's kernel reads and writes, from its launch parameters: without a GPU or a kernel.

Inputs and targets lie in memory in every way that a call takes, between a neighbour's elements. What a kernel would
touch, by the formulas of quantize.cuh, experts.cuh, transposed.cuh, both.cuh and combine.cuh, is compared with what
torch has there.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from deep_tile import both, experts, quantize, sources, transposed
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.quantize import FP8_DTYPE

GATING = sources.gating(None, 1.0, 0.0)
EACH_BEGIN = pytest.mark.parametrize("first", [16, 3], ids=["aligned", "anywhere"])
"""Elements of a neighbour before a tensor's first one; there are as many behind its last."""


def laid_out(shape, strides, dtype, first):
    """A tensor whose memory holds a number of its own in each element, which the neighbours' have, too."""
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    numbers = torch.arange(extent + 2 * first)
    memory = numbers.to(torch.int16).view(dtype) if dtype.itemsize == 2 else numbers.to(dtype)
    return memory.as_strided(shape, strides, first)


def dense(shape, order, gap=0):
    """Strides of dimensions in this order, the innermost last; `gap` elements lie behind each row of it."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step = step * shape[dimension] + (gap if dimension == order[-1] else 0)
    return tuple(strides)


def layouts(shape):
    """Strides of an input, by what they are."""
    order = [*range(len(shape))]
    rows = dense(shape, order)
    return {
        "dense": rows,
        "columns of a wider one": dense(shape, order, gap=5),
        "columns of a wider one, at vectors": dense(shape, order, gap=16),
        "slices of a longer one": (rows[0] + 2 * shape[-1], *rows[1:]),
        "transposed": dense(shape, [*order[:-2], order[-1], order[-2]]),
        "the first innermost": dense(shape, order[::-1]),
        "by turns": dense(shape, [*order[-2::-1], order[-1]]),
        "every second column": tuple(2 * stride for stride in rows),
        "one row for all": (*(0 for _ in order[1:]), 1),
        "one row for each of the first": (rows[0], *(0 for _ in order[1:-1]), 1),
        "one element for all": tuple(0 for _ in order),
    }


def memory_of(x):
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def own_places(x):
    """The place in its storage of each element, as torch has it; rows of a matrix."""
    return torch.arange(memory_of(x).numel()).as_strided(x.shape, x.stride(), x.storage_offset()).flatten(0, -2)


def places(x, rows, stride, columns, step=1):
    """The places of these rows, as a kernel has them that is told the address of `x` and strides."""
    return x.storage_offset() + rows[:, None] * stride + columns * step


def assert_reads(x, read, at, wanted):
    """A kernel that reads `read`, `x` or its copy, at these places gets what `x` has."""
    assert read.shape == x.shape and int(at.min()) >= 0 and int(at.max()) < memory_of(read).numel()
    assert torch.equal(bits(memory_of(read)[at]), bits(wanted.to(read.dtype)))


def assert_vectors_fit(x, at, elements):
    """Vectors of so many elements begin at multiples of their size, and end with a row or before."""
    address = memory_of(x).data_ptr() + at[:, ::elements] * x.element_size()
    assert at.shape[1] % elements == 0 and (address % (elements * x.element_size()) == 0).all()


def targets(shape, first, scale_is_transposed):
    """Targets of a cast's result of this shape, with a gap between rows."""
    order = [*range(len(shape))]
    of_scale = quantize.scale_shape(shape, quantize.TOKEN_BLOCK)
    scale_order = [order[-1], *order[:-1]] if scale_is_transposed else order
    out = laid_out(shape, dense(shape, order, gap=-shape[-1] % 16 + 16), torch.uint8, first).view(FP8_DTYPE)
    return out, laid_out(of_scale, dense(of_scale, scale_order), torch.float32, first)


def assert_writes(numbers, rows, out, scale):
    """These rows are written where torch has them."""
    width = out.shape[-1]
    assert torch.equal(places(out, rows, numbers.out_stride, torch.arange(width)), own_places(out)[rows])
    groups = torch.arange(ceil_div(width, SCALE_BLOCK))
    at = places(scale, rows, numbers.scale_stride_row, groups, numbers.scale_stride_column)
    assert torch.equal(at, own_places(scale)[rows])


def living_rows(numbers, lists):
    """Living rows of `out`, as `LivingRows` (experts.cuh) finds them."""
    if "counts" in lists:
        assert numbers.groups == len(lists["counts"])
        living = [range(max(0, min(count, numbers.group_rows))) for count in lists["counts"].tolist()]
        return torch.tensor([group * numbers.group_rows + row for group, of in enumerate(living) for row in of])
    end = int(lists["offs"][-1]) if "offs" in lists else numbers.rows
    return torch.arange(max(0, min(end, numbers.rows)))


LISTS = {
    "all": {},
    "counts": {"counts": [3, 0, 2**31 - 1, -1]},
    "offs": {"offs": [1, 5, 7]},
    "offs beyond": {"offs": [2**31 - 1]},
    "rows": {"rows": [0, 8, 3, -1, 9, 3]},
    "rows and offs": {"rows": [0, 1, 8, 20], "offs": [0, 3]},
}
SHAPES = {"all": [(9, 264), (4, 5, 264), (2, 3, 4, 33)], "counts": [(4, 3, 264), (4, 40, 24), (4, 1, 7)]}
MATRICES = [(9, 264), (9, 33), (1, 264), (9, 1)]


@EACH_BEGIN
@pytest.mark.parametrize("gating", [None, GATING], ids=["cast", "silu_mul"])
@pytest.mark.parametrize("named", LISTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_casts_along_k(dtype, named, gating, first):
    lists = {name: torch.tensor(given, dtype=torch.int32) for name, given in LISTS[named].items()}
    for shape in SHAPES.get(named, MATRICES):
        shape = (*shape[:-1], shape[-1] * (1 if gating is None else 2))
        for name, strides in layouts(shape).items():
            check_cast(laid_out(shape, strides, dtype, first), gating, lists, first, name)


def check_cast(x, gating, lists, first, name):
    shape = sources.result_shape(x, gating is not None, lists)
    out, scale = targets(shape, first, scale_is_transposed=len(name) % 2)
    read, options = quantize.readable(x), quantize.Options(1, gating=gating)
    numbers = SimpleNamespace(**quantize.numbers_of(read, options, out, scale, lists))
    assert (numbers.rows, numbers.columns) == (math.prod(shape[:-1]), shape[-1])
    rows = living_rows(numbers, lists)
    assert_writes(numbers, rows, out, scale)
    if "rows" in lists:
        rows = lists["rows"][rows].long()
        rows = rows[(rows >= 0) & (rows < numbers.x_rows)]
    at = places(read, rows, numbers.x_stride, torch.arange(x.shape[-1]))
    assert_reads(x, read, at, x.reshape(-1, x.shape[-1])[rows])
    if numbers.aligned:
        elements = 16 // read.element_size()
        for half in at.split(numbers.columns, 1):
            assert_vectors_fit(read, half, elements)
        assert_vectors_fit(out, own_places(out), elements)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_vectors_are_used(dtype, shape):
    """Aligned tensors are read by vectors; otherwise the tests above would not show them."""
    out, scale = targets(shape, 16, False)
    read = quantize.readable(laid_out(shape, layouts(shape)["transposed"], dtype, 16))
    numbers = SimpleNamespace(**quantize.numbers_of(read, quantize.Options(1), out, scale, {}))
    assert numbers.aligned == (shape[1] % (16 // read.element_size()) == 0)


@EACH_BEGIN
@pytest.mark.parametrize("index", [None, [0, 8, 3, -1, 9, 3]], ids=["all", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_casts_along_tokens(dtype, index, first):
    lists = {} if index is None else {"rows": torch.tensor(index)}
    for shape in [*MATRICES, (300, 40)]:
        for name, strides in layouts(shape).items():
            x = laid_out(shape, strides, dtype, first)
            tokens = torch.arange(shape[0]) if index is None else lists["rows"]
            out, scale = targets((shape[1], len(tokens)), first, scale_is_transposed=len(name) % 2)
            read = quantize.readable(x)
            numbers = SimpleNamespace(**transposed.numbers_of(read, transposed.CastOptions(), out, scale, lists))
            assert_writes(numbers, torch.arange(shape[1]), out, scale)
            tokens = tokens[(tokens >= 0) & (tokens < numbers.x_rows)]
            at = places(read, tokens, numbers.x_stride, torch.arange(numbers.columns))
            assert_reads(x, read, at, x[tokens])
            if numbers.aligned:
                assert_vectors_fit(read, at, 16 // read.element_size())
            if numbers.out_vectors:
                assert_vectors_fit(out, own_places(out)[:, : numbers.rows // 16 * 16], 16)


@EACH_BEGIN
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 264), (3, 5, 33), (2, 9, 40), (9, 264)], ids=str)
def test_matrices_cast_in_both_directions(shape, dtype, first):
    """Vectors are read where every row of every matrix begins at a multiple of theirs, and nowhere else."""
    elements = 16 // dtype.itemsize
    for row_gap in (0, 3, 16):
        for step_gap in (0, 5, 16):
            row = shape[-1] + row_gap
            strides = (shape[-2] * row + step_gap, row, 1)[-len(shape) :]
            x = laid_out(shape, strides, dtype, first)
            given = both.CAST_WEIGHT.allocated((x, None, None, None), both.Weight.Options())
            numbers = SimpleNamespace(**both.CAST_WEIGHT.numbers(given, both.Weight.Options()))
            columns, rows = torch.arange(shape[-1]), torch.arange(shape[-2])
            at = [numbers.x_step * i + places(x, rows, numbers.x_stride, columns) for i in range(numbers.matrices)]
            assert torch.equal(torch.cat(at), own_places(x))
            begins = memory_of(x).data_ptr() + torch.cat(at)[:, 0] * dtype.itemsize
            assert numbers.aligned == (shape[-1] % elements == 0 and bool((begins % 16 == 0).all()))


@EACH_BEGIN
@pytest.mark.parametrize("columns", [1, 24, 33])
def test_sums_of_rows(columns, first):
    tokens, top_k = 5, 3
    for gap in (0, 5, 16):
        x = laid_out((9, columns), (columns + gap, 1), torch.bfloat16, first)
        out = laid_out((tokens, columns), (columns + gap, 1), torch.bfloat16, first)
        for strides in layouts((tokens, top_k)).values():
            weights = laid_out((tokens, top_k), strides, torch.float32, first)
            index = laid_out((tokens, top_k), strides[::-1], torch.int64, first)
            numbers = SimpleNamespace(**experts.combine_numbers(x, weights, index, out))
            rows, chosen, width = torch.arange(tokens), torch.arange(top_k), torch.arange(columns)
            for given, name in ((weights, "weights"), (index, "index")):
                by_row, by_column = (getattr(numbers, f"{name}_stride_{of}") for of in ("row", "column"))
                assert torch.equal(places(given, rows, by_row, chosen, by_column), own_places(given))
            for given, stride in ((x, numbers.x_stride), (out, numbers.out_stride)):
                at = places(given, torch.arange(len(given)), stride, width)
                assert torch.equal(at, own_places(given))
                if numbers.aligned:
                    assert_vectors_fit(given, at, 8)
