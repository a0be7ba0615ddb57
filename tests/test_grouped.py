"""Grouped GEMMs: values against float64, dead rows, and refusals; on the CPU and on a GPU."""

from typing import NamedTuple

import pytest
import torch
from helpers import Exact, GuardedOut, Operands, assert_accurate, exact_product, make_operands

from deep_tile import fp8_grouped_gemm, tensors
from deep_tile.config import round_up
from deep_tile.reference import group_rows
from deep_tile.select.groups import grouped_configs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAN_BYTE = 0x7F


class Case(NamedTuple):
    """Operands of a grouped GEMM. Rows of no group hold NaN.

    Attributes:
        a, a_scale, b, b_scale, bounds: as `fp8_grouped_gemm` takes them.
        rows: first row, and the one behind the last, of each group, among all rows.
        out: guarded, of all rows.
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    bounds: torch.Tensor | None
    rows: list[tuple[int, int]]
    guarded: GuardedOut
    capacity: int | None

    def call(self, out: torch.Tensor | None = None, **keywords) -> torch.Tensor:
        operands = (self.a, self.a_scale, self.b, self.b_scale)
        if self.capacity is None:
            return fp8_grouped_gemm(*operands, self.bounds, out, **keywords)
        return fp8_grouped_gemm(*operands, out=out, counts=self.bounds, **keywords)

    @property
    def out(self) -> torch.Tensor:
        """`out` as the call takes it."""
        out = self.guarded.out
        return out if self.capacity is None else out.unflatten(0, (len(self.rows), self.capacity))

    def exact(self, group: int) -> Exact:
        begin, end = self.rows[group]
        a, a_scale = self.a, self.a_scale
        if self.capacity is not None:
            a, a_scale = a.flatten(0, 1), a_scale.flatten(0, 1)
        return exact_product(Operands(a[begin:end], a_scale[begin:end], self.b[group], self.b_scale[group]))

    def check(self, **keywords) -> torch.Tensor:
        """Multiply into the guarded `out`; check its rows and the memory around them."""
        out = self.out
        assert self.call(out, **keywords) is out
        self.check_out()
        return self.guarded.out

    def check_out(self) -> None:
        """Check the guarded `out` after a call, and the memory around it."""
        self.guarded.assert_groups(self.rows, lambda group, out: assert_accurate(out, self.exact(group)))


def make_case(
    sizes: list[int],
    n: int,
    k: int,
    *,
    device: str = "cpu",
    capacity: int | None = None,
    alignment: int = 1,
    spare: int = 5,
    padding: int = 0,
    out_stride: int | None = None,
    out_offset: int = 0,
    a_scale: str = "row",
    b_scale: str = "row",
) -> Case:
    """Groups of `sizes` rows: one after the other with `spare` rows behind, or each with room for `capacity`."""
    rows, end = [], 0
    for group, size in enumerate(sizes):
        begin = round_up(end, alignment) if capacity is None else group * capacity
        end = begin + size
        rows.append((begin, end))
    total = end + spare if capacity is None else len(sizes) * capacity
    operands = make_operands(total, n, k, device=device, a_padding=padding, a_scale=a_scale)
    dead = torch.ones(total, dtype=torch.bool)
    for begin, end in rows:
        dead[begin:end] = False
    dead = dead.to(device)
    operands.a.view(torch.uint8)[dead] = NAN_BYTE
    operands.a_scale[dead] = float("nan")
    b, b_scale = _weights(len(sizes), n, k, device, padding, b_scale)
    bounds = torch.tensor(sizes if capacity is not None else [end for _, end in rows], dtype=torch.int32, device=device)
    a, scale = operands.a, operands.a_scale
    if capacity is not None:
        a, scale = (x.unflatten(0, (len(sizes), capacity)) for x in (a, scale))
    guarded = GuardedOut(total, n, device=device, stride=out_stride, offset=out_offset)
    return Case(a, scale, b, b_scale, bounds, rows, guarded, capacity)


def _weights(groups, n, k, device, padding, b_scale):
    """[groups, n, k] and scales, each group in rows of its own, with NaN between groups."""
    of_groups = [make_operands(1, n, k, device=device, b_scale=b_scale)[2:] for _ in range(groups)]
    stride, gap = round_up(k, 16) + padding, n + 3
    buffer = torch.full((groups * gap * stride,), NAN_BYTE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    b = buffer.as_strided((groups, n, k), (gap * stride, stride, 1))
    for group, (values, _) in enumerate(of_groups):
        b[group].copy_(values)
    return b, torch.stack([scale for _, scale in of_groups])


SIZES = [
    [3, 0, 64, 65, 1, 130, 7],
    [0, 0, 0, 5],
    [200],
    [1] * 40,
    [0] * 33 + [17],
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alignment", [1, 128])
def test_rows_one_after_the_other(sizes, device, alignment):
    case = make_case(sizes, 200, 300, device=device, alignment=alignment)
    case.check(alignment=alignment)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows")
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_their_own(sizes, device):
    make_case(sizes, 136, 260, device=device, capacity=max(sizes) + 9).check(expected_rows=8)


@pytest.mark.parametrize("device", DEVICES)
def test_without_counts_all_rows_are_multiplied(device):
    case = make_case([40] * 3, 72, 256, device=device, capacity=40)
    case._replace(bounds=None).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_stride", [200, 203, 208])
@pytest.mark.parametrize("a_scale", ["row", "column", "column_aligned"])
def test_layouts(device, out_stride, a_scale):
    sizes = [70, 1, 0, 128]
    layout = {"out_stride": out_stride, "a_scale": a_scale, "padding": 48}
    make_case(sizes, 200, 384, device=device, b_scale="column", **layout).check()
    make_case(sizes, 200, 384, device=device, capacity=131, **layout).check()


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_allocated_when_none(device):
    case = make_case([10, 20], 64, 128, device=device)
    out = case.call()
    assert (out.shape, out.dtype) == (case.out.shape, torch.bfloat16)
    assert torch.equal(out[:30], case.check()[:30])


@pytest.mark.parametrize("device", DEVICES)
def test_one_weight_for_all_groups(device):
    case = make_case([10, 20, 1], 64, 128, device=device)
    shared = case._replace(b=case.b[:1].expand(3, -1, -1), b_scale=case.b_scale[:1].expand(3, -1, -1))
    shared.check()


@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_narrow_scales(device, dtype):
    case = make_case([10, 20], 64, 256, device=device)
    narrow = case.b_scale.to(dtype)
    case._replace(b_scale=narrow.float()).check()
    assert torch.equal(case._replace(b_scale=narrow).call()[:30], case.out[:30])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "bounds", [[5, 3, 40, 20], [-4, 10, -1, 12], [2**31 - 1] * 4, [-(2**31)] * 4, [10, 2**31 - 1, 3, 70]]
)
@pytest.mark.parametrize("capacity", [None, 25])
def test_bounds_that_lie(device, bounds, capacity):
    """Bounds are clipped: nothing outside of the tensors is read or written."""
    case = make_case([25] * 4, 136, 256, device=device, capacity=capacity, spare=0)
    layout, rows = ("offs", 100) if capacity is None else ("counts", 25)
    bounds = torch.tensor(bounds, dtype=torch.int32)
    first = 0 if capacity is None else capacity
    ranges = [
        (group * first + begin, group * first + end)
        for group, (begin, end) in enumerate(group_rows(layout, bounds, 4, rows))
    ]
    case._replace(bounds=bounds.to(device), rows=ranges).check()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device):
    for case in (make_case([0, 0], 64, 128, device=device), make_case([3, 4], 0, 128, device=device)):
        case.check()
    empty = make_case([0, 0], 64, 128, device=device, spare=0)
    assert empty.call().shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("tma_store", [True, False], ids=["tma", "any"])
@pytest.mark.parametrize("layout", ["offs", "counts"])
def test_every_config(layout, tma_store):
    """Groups end within each box, at its end, and one row behind it."""
    sizes = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 200]
    for config in grouped_configs(layout, tma_store):
        for n, k in ((264, 640), (config.block_n, 128), (1000, 1040)):
            capacity = None if layout == "offs" else 203
            case = make_case(sizes, n, k, device="cuda", capacity=capacity, out_stride=n if tma_store else n + 1)
            out = case.check(config=config)
            for num_sms in (1, 7):
                again = out.clone().fill_(float("nan"))
                into = again if capacity is None else again.unflatten(0, (len(sizes), capacity))
                case.call(into, config=config, num_sms=num_sms)
                for begin, end in case.rows:
                    assert torch.equal(again[begin:end], out[begin:end])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_draws(seed):
    """The selector's choice, for rows routed as experts are."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    groups = (1, 2, 8, 33, 128, 260)[draw(0, 6)]
    skew = torch.rand(groups, generator=generator) ** draw(0, 6)
    sizes = (skew / skew.sum() * draw(1, 3000)).int().tolist()
    capacity = None if draw(0, 2) else max(sizes) + draw(0, 20)
    n, k = draw(1, 600), draw(1, 60) * 16
    case = make_case(sizes, n, k, device="cuda", capacity=capacity, out_stride=n + draw(0, 2) * draw(0, 9))
    case.check(expected_rows=draw(1, 300))


@pytest.mark.gpu
def test_one_group_is_a_dense_product():
    """Bit for bit: both add up the products of a row in the same order."""
    from deep_tile import fp8_gemm

    case = make_case([300], 512, 1024, device="cuda", spare=0)
    dense = fp8_gemm(case.a, case.a_scale, case.b[0], case.b_scale[0], batch_invariant=True)
    assert torch.equal(case.call(), dense)


@pytest.mark.gpu
def test_graphs_hold_for_every_distribution():
    case = make_case([64] * 8, 256, 512, device="cuda", spare=0)
    out = case.out
    case.call(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(out)
    for sizes in ([512, 0, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [0] * 8, [100, 0, 300, 0, 1, 0, 100, 11]):
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).int()
        case.bounds.copy_(ends)
        out.view(torch.int16).fill_(-1)
        graph.replay()
        begins = [0, *ends.tolist()[:-1]]
        now = case._replace(rows=list(zip(begins, ends.tolist(), strict=True)))
        for group, (begin, end) in enumerate(now.rows):
            if begin < end:
                assert_accurate(out[begin:end], now.exact(group))
        assert (out.view(torch.int16)[ends.tolist()[-1] :] == -1).all()


def good(**changes) -> dict:
    case = make_case([10, 20], 64, 256)
    operands = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    arguments = operands | {"offs": case.bounds, "out": case.out}
    return arguments | {name: change(arguments.get(name)) for name, change in changes.items()}


def value(x):
    return lambda _: x


BAD = [
    ({"a": value(None)}, TypeError, "a must be a torch.Tensor"),
    ({"a": torch.Tensor.bfloat16}, TypeError, "a must be torch.float8_e4m3fn"),
    ({"a": torch.t}, ValueError, r"a must be \[s, k\] or \[g, m, k\] and b \[g, n, k\]"),
    ({"a": lambda a: a[:, 1:17]}, ValueError, r"a must be \[s, k\]"),
    ({"a": lambda a: a[None].expand(2, -1, -1)}, ValueError, "offs is given, and a has three dimensions"),
    ({"a_scale": torch.t}, ValueError, r"a_scale must be \[35, 2\]"),
    ({"b": lambda b: b[0]}, ValueError, r"b \[g, n, k\]"),
    ({"b": lambda b: b.transpose(1, 2)}, ValueError, r"b \[g, n, k\]"),
    ({"b_scale": lambda x: x[:1]}, ValueError, r"b_scale must be \[2, 1, 2\]"),
    ({"b_scale": torch.Tensor.double}, TypeError, "b_scale must be torch.float32"),
    ({"offs": value(None)}, ValueError, r"with rows \[s, k\] pass offs"),
    ({"offs": torch.Tensor.long}, TypeError, r"offs must be torch.int32; got torch.int64. Convert it with .int\(\)"),
    ({"offs": lambda x: x[:1]}, ValueError, r"offs must be \[2\]"),
    ({"offs": lambda x: torch.stack([x, x], 1)[:, 0]}, ValueError, "stride 2; pass it with .contiguous"),
    ({"counts": value(torch.zeros(2, dtype=torch.int32))}, ValueError, "pass offs and no counts"),
    ({"out": lambda x: x[:3]}, ValueError, r"out must be \[35, 64\]"),
    ({"out": torch.Tensor.double}, TypeError, "out must be one of torch.bfloat16"),
    ({"alignment": value(3)}, ValueError, "alignment is 3; pass an int, a power of two from 1 to 1024"),
    ({"alignment": value(True)}, ValueError, "alignment is True"),
    ({"alignment": value(2048)}, ValueError, "alignment is 2048"),
    ({"expected_rows": value(0)}, ValueError, "expected_rows is 0; pass a positive int"),
    ({"expected_rows": value(2.0)}, ValueError, "expected_rows is 2.0"),
    ({"num_sms": value(0)}, ValueError, "num_sms is 0"),
    ({"pdl": value("no")}, TypeError, "pdl is 'no'"),
    ({"batch_invariant": value(1)}, TypeError, "batch_invariant is 1"),
    ({"config": value(128)}, TypeError, "config must be a deep_tile.GemmConfig"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_refusals(changes, error, message):
    arguments = good(**changes)
    before = arguments["out"].clone() if isinstance(arguments["out"], torch.Tensor) else None
    with pytest.raises(error, match=message):
        fp8_grouped_gemm(**arguments)
    if before is not None:
        assert torch.equal(arguments["out"].view(torch.uint8), before.view(torch.uint8))


def test_refusals_of_three_dimensions():
    case = make_case([10, 20], 64, 256, capacity=24)
    a, a_scale, b, b_scale = case[:4]
    with pytest.raises(ValueError, match="alignment is 8; groups of .* leave it out"):
        fp8_grouped_gemm(a, a_scale, b, b_scale, counts=case.bounds, alignment=8)
    with pytest.raises(ValueError, match=r"counts must be \[2\]"):
        fp8_grouped_gemm(a, a_scale, b, b_scale, counts=case.bounds[:1])
    with pytest.raises(ValueError, match=r"a must be \[2, 24, 256\]"):
        fp8_grouped_gemm(a[:1], a_scale[:1], b, b_scale)
    apart = torch.zeros(24 * 256 * 2 + 16).to(a.dtype).as_strided((2, 24, 256), (24 * 256 + 16, 256, 1))
    with pytest.raises(ValueError, match="a's groups lie 6160 elements apart, with rows of 256"):
        fp8_grouped_gemm(apart, a_scale, b, b_scale)
    overlapping = torch.zeros(24, 64, dtype=torch.bfloat16).expand(2, -1, -1)
    with pytest.raises(ValueError, match="rows of out overlap"):
        fp8_grouped_gemm(a, a_scale, b, b_scale, out=overlapping)
