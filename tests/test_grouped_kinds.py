"""Grouped GEMMs of every kind: values against float64, dead rows, and refusals; CPU and GPU."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from helpers import Exact, GuardedOut, Product, assert_accurate, make_product

import deep_tile
from deep_tile import GemmConfig, fp8_grouped_gemm, grouped_gemm, scaled_grouped_gemm
from deep_tile.config import round_up
from deep_tile.kinds import KINDS, RAW
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.choose import choose
from deep_tile.select.groups import grouped_configs

pytestmark = pytest.mark.usefixtures("quick_compiler")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROUPED = [kind.name for kind in KINDS.values() if kind.scaling != "row_blocks"]
FAMILIES = [name for name in GROUPED if KINDS[name].family == name]
SIZES = [3, 0, 64, 65, 1, 130, 7]
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, RAW: torch.int32}


class Case(NamedTuple):
    """A grouped GEMM. Rows of no group, and memory between groups of `b`, hold NaN, or its bytes as integers.

    Attributes:
        call: the function and its operands, in order.
        bounds: as keywords of the call.
        rows: first row, and the one behind the last, of each group, among all rows of `guarded`.
        products: of each group's rows alone.
    """

    call: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]
    bounds: dict[str, torch.Tensor]
    rows: list[tuple[int, int]]
    guarded: GuardedOut
    products: list[Product]

    @property
    def out(self) -> torch.Tensor:
        """`out` as the call takes it."""
        out, a = self.guarded.out, self.operands[0]
        return out if a.dim() == 2 else out.unflatten(0, a.shape[:2])

    def check(self, **keywords) -> torch.Tensor:
        """Multiply into the guarded `out`; check its rows and the memory around them."""
        out = self.out
        assert self.call(*self.operands, out=out, **self.bounds, **keywords) is out
        self.check_out()
        return self.guarded.out

    def check_out(self) -> None:
        """Check the guarded `out` after a call, and the memory around it."""
        assert len(self.rows) == len(self.products)
        self.guarded.assert_groups(self.rows, self._check_group)

    def _check_group(self, group: int, out: torch.Tensor) -> None:
        of_group = self.products[group]
        exact = Exact(*(part[: len(out)] for part in of_group.exact))
        assert_accurate(out, exact, of_group.accumulation, of_group.relative_error)


def function_of(kind: str) -> Callable[..., torch.Tensor]:
    if kind == "fp8":
        return fp8_grouped_gemm
    if KINDS[kind].scaling == "none":
        return grouped_gemm
    return partial(scaled_grouped_gemm, fast_accum=KINDS[kind].scaling != "promoted_rows")


def make_case(
    kind: str,
    sizes: list[int],
    n: int,
    k: int,
    *,
    device: str = "cpu",
    capacity: int | None = None,
    alignment: int = 1,
    layout: str = "nt",
    out_dtype: torch.dtype | None = None,
    out_stride: int | None = None,
    out_offset: int = 0,
) -> Case:
    """Groups of `sizes` rows: one after the other with some rows behind, or each with room for `capacity`."""
    rows, end = [], 0
    for group, size in enumerate(sizes):
        begin = round_up(end, alignment) if capacity is None else group * capacity
        end = begin + size
        rows.append((begin, end))
    total = end + 5 if capacity is None else len(sizes) * capacity
    products = [make_product(kind, max(size, 1), n, k, device=device, layout=layout) for size in sizes]
    of_a = zip(*(one.operands[: len(one.operands) // 2] for one in products), strict=True)
    of_b = zip(*(one.operands[len(one.operands) // 2 :] for one in products), strict=True)
    operands = [_below_each_other(parts, rows, total) for parts in of_a] + [_apart(parts) for parts in of_b]
    if capacity is not None:
        half = len(operands) // 2
        operands[:half] = (x.unflatten(0, (len(sizes), capacity)) for x in operands[:half])
    ends = torch.tensor(sizes if capacity else [end for _, end in rows], dtype=torch.int32, device=device)
    dtype = out_dtype or OUT_DTYPES[KINDS[kind].output]
    guarded = GuardedOut(total, n, device=device, stride=out_stride, offset=out_offset, dtype=dtype)
    bounds = {"offs" if capacity is None else "counts": ends}
    return Case(function_of(kind), tuple(operands), bounds, rows, guarded, products)


def _poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Rows of NaN bytes at multiples of 16 bytes."""
    *rows, columns = shape
    padded = round_up(columns * like.element_size(), 16)
    whole = torch.full((*rows, padded), 0xFF, dtype=torch.uint8, device=like.device)
    return whole.view(like.dtype)[..., :columns]


def _below_each_other(parts: tuple[torch.Tensor, ...], rows: list[tuple[int, int]], total: int) -> torch.Tensor:
    """Put each group's rows of `a` or its scale into one matrix."""
    whole = _poisoned(total, parts[0].shape[1], like=parts[0])
    for part, (begin, end) in zip(parts, rows, strict=True):
        whole[begin:end].copy_(part[: end - begin])
    return whole


def _apart(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Put each group's matrix of `b` or its scale into one tensor, in its own layout, with rows of NaN behind it."""
    along_rows = parts[0].stride(1) != 1 and parts[0].shape[1] > 1 and parts[0].element_size() == 2
    stored = [part.t() if along_rows else part for part in parts]
    rows, columns = stored[0].shape
    whole = _poisoned(len(parts), rows + 3, columns, like=stored[0])[:, :rows]
    for place, part in zip(whole, stored, strict=True):
        place.copy_(part)
    return whole.transpose(1, 2) if along_rows else whole


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", GROUPED)
def test_rows_one_after_the_other(kind, device):
    make_case(kind, SIZES, 200, 304, device=device, alignment=16).check(alignment=16)
    make_case(kind, [0, 0, 0, 5], 72, 64, device=device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", GROUPED)
def test_rows_of_their_own(kind, device):
    make_case(kind, SIZES, 136, 256, device=device, capacity=139).check(expected_rows=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [64, 192, 256, 320])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_b_along_n(kind, k, device):
    """The next group, or NaN, lies behind a group's K."""
    case = make_case(kind, SIZES, 200, k, device=device, layout="nn")
    assert case.operands[1].stride()[1:] == (1, 200)
    case.check()
    make_case(kind, [9, 4], 24, k, device=device, layout="nn", capacity=11).check()
    make_case(kind, [9], 24, k + 8, device=device, layout="nn").check()  # one group may have any k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_results_of_every_format_wherever_they_lie(kind, device):
    for name, (stride, offset) in product(KINDS[kind].outputs, ((None, 0), (131, 1), (160, 0))):
        options = {"out_dtype": OUT_DTYPES[name], "out_stride": stride, "out_offset": offset}
        make_case(kind, SIZES, 129 if stride == 131 else 128, 128, device=device, **options).check()


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "layout"), [*((kind, "nt") for kind in FAMILIES), ("bf16", "nn")])
@pytest.mark.parametrize("grouping", ["offs", "counts"])
def test_every_config(kind, layout, grouping):
    """Stores by TMA and without, results of 16 and of 32 bits, beside kernels of other streams."""
    capacity = 300 if grouping == "counts" else None
    noise, x = torch.cuda.Stream(), torch.randn(1 << 20, device="cuda")
    for output, tma_store in product({KINDS[kind].output, "fp32"} & {*KINDS[kind].outputs}, (True, False)):
        n = 264 if tma_store else 261
        options = {"device": "cuda", "capacity": capacity, "layout": layout, "out_dtype": OUT_DTYPES[output]}
        case = make_case(kind, [*SIZES, 257, 0, 33], n, 640, **options)
        for config in grouped_configs(grouping, tma_store, False, kind, output, layout):
            case.guarded.out.view(torch.uint8).fill_(0xFF)
            with torch.cuda.stream(noise):
                for _ in range(5):
                    x = x.sin()
            case.check(config=config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fp8_rows", "fp8_rows_promoted", "int8_rows"])
def test_shapes_of_scales_of_rows(kind, device):
    case = make_case(kind, [10, 20], 48, 256, device=device)
    a, a_scale, b, b_scale = case.operands
    fast = kind != "fp8_rows_promoted"
    whole = scaled_grouped_gemm(a, a_scale, b, b_scale, **case.bounds, fast_accum=fast)[:30]
    for of_a in (a_scale[:, 0], a_scale):
        for of_b in (b_scale, b_scale[..., 0], b_scale.transpose(1, 2)):
            same = scaled_grouped_gemm(a, of_a, b, of_b, **case.bounds, fast_accum=fast)[:30]
            assert torch.equal(same, whole)
    one, of_groups = torch.tensor(0.75, device=device), torch.tensor([0.5, 2.0], device=device)
    wanted = scaled_grouped_gemm(a, one.expand(35), b, of_groups[:, None].expand(2, 48), **case.bounds, fast_accum=fast)
    for of_a in (one, one.reshape(1), one.reshape(1, 1)):
        for of_b in (of_groups, of_groups[:, None], of_groups[:, None, None]):
            got = scaled_grouped_gemm(a, of_a, b, of_b, **case.bounds, fast_accum=fast)
            assert torch.equal(got[:30], wanted[:30])


@pytest.mark.parametrize("device", DEVICES)
def test_one_k_of_columns_that_adjoin(device):
    """b [1, 5, 1] has strides (16, 1, 16): only its column stride tells its layout."""
    a, rows = torch.randn(4, 8, device=device).bfloat16()[:, :1], torch.randn(1, 1, 16, device=device).bfloat16()
    b, offs = rows[..., :5].transpose(1, 2), torch.tensor([4], dtype=torch.int32, device=device)
    assert torch.equal(grouped_gemm(a, b, offs=offs), a * b[0].t())
    with pytest.raises(ValueError, match="b lies along n, with k = 1"):
        grouped_gemm(a, rows.repeat(2, 1, 1)[..., :5].transpose(1, 2), offs=offs.repeat(2))


@pytest.mark.gpu
def test_a_graph_holds_for_every_distribution():
    case = make_case("bf16", [10, 20, 0, 3], 64, 256, device="cuda")
    a, b = case.operands
    offs = case.bounds["offs"].clone()
    grouped_gemm(a, b, offs, case.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(a, b, offs, case.out)
    for ends in ([10, 30, 30, 33], [0, 0, 33, 33], [33, 33, 33, 33]):
        offs.copy_(torch.tensor(ends))
        graph.replay()
        again = grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"))
        assert torch.equal(again[:33], case.out[:33])


REFUSALS = [
    ("bf16", lambda a, b: (a.float(), b), TypeError, "a must be one of torch.bfloat16, torch.float16, torch.int8; got"),
    ("bf16", lambda a, b: (None, b), TypeError, "a must be a torch.Tensor; got NoneType. To fix: pass a tensor"),
    ("bf16", lambda a, b: (a, [b]), TypeError, "b must be a torch.Tensor; got list.* torch.stack"),
    (
        "int8_rows",
        lambda a, s, b, t: (a, 1.0, b, t),
        TypeError,
        "a_scale must be a torch.Tensor; got float. To fix: pass",
    ),
    ("bf16", lambda a, b: (a, b.half()), TypeError, "b must be torch.bfloat16, since a is torch.bfloat16"),
    ("bf16", lambda a, b: (a.to(torch.float8_e5m2), b), TypeError, "scaled_grouped_gemm takes .*, with scales"),
    ("bf16", lambda a, b: (a.t().contiguous().t(), b), ValueError, "a must have a unit stride along k; its strides"),
    ("bf16", lambda a, b: (a[:, :60], b[..., :60].mT.contiguous().mT), ValueError, "k = 60; of several groups k must"),
    ("bf16", lambda a, b: (a, b.repeat(1, 1, 2)[..., ::2]), ValueError, "unit stride along k or along n; its strides"),
    ("bf16", lambda a, b: (a, b[:, :, 1:]), ValueError, "b holds one row per output column"),
    ("bf16", lambda a, b: (a, b.clone().requires_grad_()), RuntimeError, "To train, call torch.nn.functional.grouped"),
    ("int8_rows", lambda a, s, b, t: (a, s[:4], b, t), ValueError, r"a_scale must have one number for each row of a"),
    ("int8_rows", lambda a, s, b, t: (a, s, b, t[:, :5]), ValueError, r"b_scale must have .* or one for each group"),
    ("int8_rows", lambda a, s, b, t: (a, s.double(), b, t), TypeError, "a_scale must be torch.float32"),
    ("int8", lambda a, s, b, t: (a, s, b, t[:, :0]), ValueError, "a_scale must have one number.* of blocks"),
]


@pytest.mark.parametrize(("kind", "change", "error", "text"), REFUSALS)
def test_refusals(kind, change, error, text):
    case = make_case(kind, [10, 20], 64, 256)
    with pytest.raises(error, match=text):
        case.call(*change(*case.operands), out=case.out, **case.bounds)
    case.guarded.assert_untouched()


def test_refused_results():
    case = make_case("int8_unscaled", [10, 20], 64, 256)
    with pytest.raises(TypeError, match="out_dtype is torch.float8_e4m3fn; pass one of torch.bfloat16"):
        grouped_gemm(*case.operands, **case.bounds, out_dtype=torch.float8_e4m3fn)
    case = make_case("bf16", [10, 20], 64, 256, out_dtype=torch.int32)
    with pytest.raises(TypeError, match="out must be one of torch.bfloat16, .*; got torch.int32"):
        grouped_gemm(*case.operands, out=case.out, **case.bounds)
    with pytest.raises(ValueError, match=r"offs is given, and a has three dimensions"):
        grouped_gemm(case.operands[0][None], case.operands[1], **case.bounds)
    with pytest.raises(ValueError, match=r"num_sms is 0"):
        grouped_gemm(*case.operands, **case.bounds, num_sms=0)
    with pytest.raises(TypeError, match=r"fast_accum is 1"):
        scaled_grouped_gemm(*make_case("int8_rows", [10, 20], 64, 256).operands, **case.bounds, fast_accum=1)


def test_the_selector_and_precompile_know_kinds():
    groups = Groups("offs", 8, 64)
    for kind, output, layout in product(("bf16", "fp8_rows", "int8"), ("bf16", "fp32"), ("nt",)):
        chosen = choose(GemmProblem(512, 256, 512, kind=kind, output=output, groups=groups, layout=layout))
        assert (chosen.kind, chosen.output, chosen.grouping) == (kind, output, "offs")
    done = deep_tile.precompile([(64, 64, 4)], kind="bf16", grouping="offs", layouts=["nn"])
    assert {(config.kind, config.grouping, config.layout) for config in done.configs} == {("bf16", "offs", "nn")}
    for wrong in (
        {"kind": "fp8_1x128", "grouping": "offs"},
        {"kind": "bf16", "grouping": "offs", "accumulate": True},
        {"kind": "bf16", "grouping": "offs", "layouts": ["tn"]},
    ):
        with pytest.raises(ValueError, match="products of groups of rows are of all kinds but 'fp8_1x128'"):
            deep_tile.precompile([(64, 64, 4)], **wrong)
    with pytest.raises(ValueError, match="such products are of kind 'fp8_1x128', of float32"):
        deep_tile.precompile([(64, 64, 4)], kind="bf16", grouping="k_offs")


def test_configs_that_groups_of_rows_do_not_have():
    with pytest.raises(ValueError, match="accumulate True; products of groups of rows are written"):
        GemmConfig(128, 128, 4, kind="bf16", grouping="offs", accumulate=True)
    with pytest.raises(ValueError, match="groups are of rows of a that lie along k"):
        GemmConfig(128, 128, 4, kind="bf16", grouping="offs", layout="tn")
