"""Grouped GEMMs of every kind: values against float64, dead rows, and refusals; on the CPU and on a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from grouped_case import DEVICES, OUT_DTYPES, make_case

import deep_tile
from deep_tile import GemmConfig, fp8_grouped_gemm, grouped_gemm, scaled_grouped_gemm, tensors
from deep_tile.grouped import GROUPED_GEMM
from deep_tile.kinds import KINDS
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import group_rows
from deep_tile.select import cost
from deep_tile.select.choose import choose
from deep_tile.select.groups import grouped_configs

pytestmark = pytest.mark.usefixtures("quick_compiler")

GROUPED = [kind.name for kind in KINDS.values() if kind.scaling != "row_blocks"]
FAMILIES = [name for name in GROUPED if KINDS[name].family == name]
SIZES = [
    [3, 0, 64, 65, 1, 130, 7],
    [0, 0, 0, 5],
    [200],
    [1] * 40,
    [0] * 33 + [17],
]


MIXED = SIZES[0]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alignment", [1, 128])
def test_rows_of_any_number_of_groups(sizes, device, alignment):
    make_case("fp8", sizes, 200, 300, device=device, alignment=alignment).check(alignment=alignment)
    make_case("fp8", sizes, 136, 260, device=device, capacity=max(sizes) + 9).check(expected_rows=8)


@pytest.mark.parametrize("device", DEVICES)
def test_without_counts_all_rows_are_multiplied(device):
    case = make_case("fp8", [40] * 3, 72, 256, device=device, capacity=40)
    case._replace(bounds=None).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_stride", [200, 203, 208])
@pytest.mark.parametrize("scales", ["row", "column", "column_aligned"])
def test_layouts(device, out_stride, scales):
    sizes = [70, 1, 0, 128]
    layout = {"out_stride": out_stride, "scales": scales, "padding": 48}
    make_case("fp8", sizes, 200, 384, device=device, **layout).check()
    make_case("fp8", sizes, 200, 384, device=device, capacity=131, **layout).check()


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_allocated_when_none(device):
    case = make_case("fp8", [10, 20], 64, 128, device=device)
    out = case.call()
    assert (out.shape, out.dtype) == (case.out.shape, torch.bfloat16)
    assert torch.equal(out[:30], case.check()[:30])


@pytest.mark.parametrize("device", DEVICES)
def test_one_weight_for_all_groups(device):
    case = make_case("fp8", [10, 20, 1], 64, 128, device=device)
    shared = case._replace(b=case.b[:1].expand(3, -1, -1), b_scale=case.b_scale[:1].expand(3, -1, -1))
    shared.check()


@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_narrow_scales(device, dtype):
    case = make_case("fp8", [10, 20], 64, 256, device=device)
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
    case = make_case("fp8", [25] * 4, 136, 256, device=device, capacity=capacity, spare=0)
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
    for case in (make_case("fp8", [0, 0], 64, 128, device=device), make_case("fp8", [3, 4], 0, 128, device=device)):
        case.check()
    empty = make_case("fp8", [0, 0], 64, 128, device=device, spare=0)
    assert empty.call().shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("tma_store", [True, False], ids=["tma", "any"])
@pytest.mark.parametrize("layout", ["offs", "counts"])
def test_every_config_of_fp8(layout, tma_store):
    """Groups end within each box, at its end, and one row behind it."""
    sizes = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 200]
    for config in grouped_configs(layout, tma_store):
        for n, k in ((264, 640), (config.block_n, 128), (1000, 1040)):
            capacity = None if layout == "offs" else 203
            case = make_case("fp8", sizes, n, k, device="cuda", capacity=capacity, out_stride=n if tma_store else n + 1)
            out = case.check(config=config)
            for num_sms in (1, 7):
                again = out.clone().fill_(float("nan"))
                into = again if capacity is None else again.unflatten(0, (len(sizes), capacity))
                case.call(out=into, config=config, num_sms=num_sms)
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
    case = make_case("fp8", sizes, n, k, device="cuda", capacity=capacity, out_stride=n + draw(0, 2) * draw(0, 9))
    case.check(expected_rows=draw(1, 300))


@pytest.mark.gpu
def test_one_group_is_a_dense_product():
    """Bit for bit: both add up the products of a row in the same order."""
    from deep_tile import fp8_gemm

    case = make_case("fp8", [300], 512, 1024, device="cuda", spare=0)
    dense = fp8_gemm(case.a, case.a_scale, case.b[0], case.b_scale[0], batch_invariant=True)
    assert torch.equal(case.call(), dense)


def good(**changes) -> dict:
    case = make_case("fp8", [10, 20], 64, 256)
    operands = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
    arguments = operands | {"offs": case.bounds, "out": case.out}
    return arguments | {name: change(arguments.get(name)) for name, change in changes.items()}


def value(x):
    return lambda _: x


BAD_OF_FP8 = [
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


@pytest.mark.parametrize(("changes", "error", "message"), BAD_OF_FP8)
def test_refusals_of_fp8(changes, error, message):
    arguments = good(**changes)
    before = arguments["out"].clone() if isinstance(arguments["out"], torch.Tensor) else None
    with pytest.raises(error, match=message):
        fp8_grouped_gemm(**arguments)
    if before is not None:
        assert torch.equal(arguments["out"].view(torch.uint8), before.view(torch.uint8))


def test_refusals_of_three_dimensions():
    case = make_case("fp8", [10, 20], 64, 256, capacity=24)
    a, a_scale, b, b_scale = case.operands
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", GROUPED)
def test_kinds(kind, device):
    """Rows of groups one after the other, and groups with rows of their own."""
    make_case(kind, MIXED, 200, 304, device=device, alignment=16).check(alignment=16)
    make_case(kind, [0, 0, 0, 5], 72, 64, device=device).check()
    make_case(kind, MIXED, 136, 256, device=device, capacity=139).check(expected_rows=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [64, 192, 256, 320])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_b_along_n(kind, k, device):
    """The next group, or NaN, lies behind a group's K."""
    case = make_case(kind, MIXED, 200, k, device=device, layout="nn")
    assert case.operands[1].stride()[1:] == (1, 200)
    case.check()
    make_case(kind, [9, 4], 24, k, device=device, layout="nn", capacity=11).check()
    make_case(kind, [9], 24, k + 8, device=device, layout="nn").check()  # one group may have any k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_results_of_every_format_wherever_they_lie(kind, device):
    for name, (stride, offset) in product(KINDS[kind].outputs, ((None, 0), (131, 1), (160, 0))):
        options = {"out_dtype": OUT_DTYPES[name], "out_stride": stride, "out_offset": offset}
        make_case(kind, MIXED, 129 if stride == 131 else 128, 128, device=device, **options).check()


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
        case = make_case(kind, [*MIXED, 257, 0, 33], n, 640, **options)
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
    whole = scaled_grouped_gemm(a, a_scale, b, b_scale, **case.lists, fast_accum=fast)[:30]
    for of_a in (a_scale[:, 0], a_scale):
        for of_b in (b_scale, b_scale[..., 0], b_scale.transpose(1, 2)):
            same = scaled_grouped_gemm(a, of_a, b, of_b, **case.lists, fast_accum=fast)[:30]
            assert torch.equal(same, whole)
    one, of_groups = torch.tensor(0.75, device=device), torch.tensor([0.5, 2.0], device=device)
    wanted = scaled_grouped_gemm(a, one.expand(35), b, of_groups[:, None].expand(2, 48), **case.lists, fast_accum=fast)
    for of_a in (one, one.reshape(1), one.reshape(1, 1)):
        for of_b in (of_groups, of_groups[:, None], of_groups[:, None, None]):
            got = scaled_grouped_gemm(a, of_a, b, of_b, **case.lists, fast_accum=fast)
            assert torch.equal(got[:30], wanted[:30])


@pytest.mark.parametrize("device", DEVICES)
def test_one_k_of_columns_that_adjoin(device):
    """b [1, 5, 1] has strides (16, 1, 16): only its column stride tells its layout."""
    a, rows = torch.randn(4, 8, device=device).bfloat16()[:, :1], torch.randn(1, 1, 16, device=device).bfloat16()
    b, offs = rows[..., :5].transpose(1, 2), torch.tensor([4], dtype=torch.int32, device=device)
    assert torch.equal(grouped_gemm(a, b, offs=offs), a * b[0].t())
    with pytest.raises(ValueError, match="b lies along n, with k = 1"):
        grouped_gemm(a, rows.repeat(2, 1, 1)[..., :5].transpose(1, 2), offs=offs.repeat(2))


REFUSALS = [
    ("bf16", lambda a, b: (a.float(), b), TypeError, "a must be one of torch.bfloat16, torch.float16, torch.int8; got"),
    ("bf16", lambda a, b: (None, b), TypeError, "a must be a torch.Tensor; got NoneType. To fix: pass a tensor"),
    ("bf16", lambda a, b: (a, [b]), TypeError, "b must be a torch.Tensor; got list.* torch.stack"),
    ("int8_rows", lambda a, s, b, t: (a, 1.0, b, t), TypeError,
     "a_scale must be a torch.Tensor; got float. To fix: pass"),
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
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "error", "text"), REFUSALS)
def test_refusals(kind, change, error, text):
    case = make_case(kind, [10, 20], 64, 256)
    with pytest.raises(error, match=text):
        case.call(*change(*case.operands), out=case.out, **case.lists)
    case.guarded.assert_untouched()


def test_refused_results():
    case = make_case("int8_unscaled", [10, 20], 64, 256)
    with pytest.raises(TypeError, match="out_dtype is torch.float8_e4m3fn; pass one of torch.bfloat16"):
        grouped_gemm(*case.operands, **case.lists, out_dtype=torch.float8_e4m3fn)
    case = make_case("bf16", [10, 20], 64, 256, out_dtype=torch.int32)
    with pytest.raises(TypeError, match="out must be one of torch.bfloat16, .*; got torch.int32"):
        grouped_gemm(*case.operands, out=case.out, **case.lists)
    with pytest.raises(ValueError, match=r"offs is given, and a has three dimensions"):
        grouped_gemm(case.operands[0][None], case.operands[1], **case.lists)
    with pytest.raises(ValueError, match=r"num_sms is 0"):
        grouped_gemm(*case.operands, **case.lists, num_sms=0)
    with pytest.raises(TypeError, match=r"fast_accum is 1"):
        scaled_grouped_gemm(*make_case("int8_rows", [10, 20], 64, 256).operands, **case.lists, fast_accum=1)


@pytest.mark.parametrize("columns", [1, 8])
def test_precompile_knows_how_a_weight_of_one_row_is_read(columns, quick_compiler):
    """[g, k, 1] passed as its transpose is K-major as well, which its strides say if its rows are dense."""
    done = deep_tile.precompile([(1, 64, 4)], kind="bf16", grouping="offs", layouts=["nn"])
    b = torch.zeros(2, 64, columns, dtype=torch.bfloat16)[..., :1].transpose(1, 2)
    a, offs = torch.zeros(4, 64, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    given = a, b, offs, torch.empty(4, 1, dtype=torch.bfloat16)
    problem = GROUPED_GEMM.problem(given, GROUPED_GEMM.options_of(given, {"num_sms": 132}))
    assert problem.layout == ("nt" if columns == 1 else "nn")
    assert {config.layout for config in done.configs} == {"nt", "nn"}


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
        with pytest.raises(ValueError, match="no call takes these together|groups are of layouts 'nt' and 'nn'"):
            deep_tile.precompile([(64, 64, 4)], **wrong)
    with pytest.raises(
        ValueError, match="grouping is 'k_offs', kind 'bf16', out_dtype None: .* the others: fp8_1x128$"
    ):
        deep_tile.precompile([(64, 64, 4)], kind="bf16", grouping="k_offs")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("grouping", ["offs", "counts"])
def test_groups_of_16_bits_have_times_of_their_own(grouping, kind):
    """By the dense tiles' times this product got 128x256, which took 25.5 us in place of 22.2 (H100, 2026-11-27)."""
    problem = GemmProblem(920, 5120, 512, kind=kind, output=kind, groups=Groups(grouping, 8, 115))
    chosen = choose(problem)
    assert (chosen.block_m, chosen.block_n) == (128, 128)
    own, dense = (cost.tile_times(replace(chosen, grouping=name)) for name in ("offs", "none"))
    assert own != dense


def test_configs_that_groups_of_rows_do_not_have():
    with pytest.raises(ValueError, match="accumulate True; products of groups of rows are written"):
        GemmConfig(128, 128, 4, kind="bf16", grouping="offs", accumulate=True)
    with pytest.raises(ValueError, match="row groups need a K-major a"):
        GemmConfig(128, 128, 4, kind="bf16", grouping="offs", layout="tn")
