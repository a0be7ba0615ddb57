"""DeepGEMM's names for grouped GEMMs: each layout of rows, as engines call them, and refusals."""

import inspect

import pytest
import torch
from grouped_case import DEVICES, Case, make_case
from helpers import GuardedOut, assert_accurate, exact_product, make_operands
from test_grouped import SIZES

from deep_tile.compat import deep_gemm

pytestmark = pytest.mark.usefixtures("fresh_deep_gemm")

ALIGNMENT = 128


def pairs(case: Case):
    return (case.a, case.a_scale), (case.b, case.b_scale)


def by_indices(case: Case, indices: torch.Tensor | None = None, **keywords):
    indices = case.indices if indices is None else indices
    return lambda out: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*pairs(case), out, indices, **keywords)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows")
@pytest.mark.parametrize("device", DEVICES)
def test_a_group_for_each_row(sizes, device):
    case = make_case("fp8", sizes, 200, 384, device=device, alignment=ALIGNMENT, scales="column_aligned")
    case.check_into(by_indices(case, disable_ue8m0_cast=True))


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows")
@pytest.mark.parametrize("device", DEVICES)
def test_ends_of_groups(sizes, device):
    case = make_case("fp8", sizes, 200, 384, device=device, alignment=ALIGNMENT, scales="column_aligned")
    case.check_into(by_indices(case, case.bounds, use_psum_layout=True, expected_m_for_psum_layout=17))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_pad_a_group_may_name_it(device):
    """Engines fill whole blocks of 128 so: all rows of the block then belong to the group."""
    case = make_case("fp8", [5, 0, 130], 72, 256, device=device, alignment=ALIGNMENT, spare=126)
    indices = case.indices
    indices[:128], indices[128:384] = 0, 2
    case.a.view(torch.uint8)[:] = 0x38
    case.a_scale[:] = 1
    whole = case._replace(rows=[(0, 128), (128, 128), (128, 384)])
    whole.check_into(by_indices(whole, indices))


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_no_group_between_two(device):
    """Rows of such blocks may hold anything afterwards. Rows of groups are right, and nothing behind the last is
    written."""
    case = make_case("fp8", [5, 40], 72, 256, device=device, alignment=512, spare=300)
    out = case.out
    by_indices(case)(out)
    case.guarded.assert_guards_intact()
    for group, (begin, end) in enumerate(case.rows):
        assert_accurate(out[begin:end], case.exact(group))
    assert (out.view(torch.int16)[case.rows[-1][1] :] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_no_group_are_left_out(device):
    case = make_case("fp8", [5, 40], 72, 256, device=device, alignment=ALIGNMENT, spare=30)
    indices = case.indices
    indices[indices < 0] = -(2**31)
    if device == "cuda":  # where nothing refuses it
        indices[-20:] = 2**31 - 1
    case.check_into(by_indices(case, indices))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_their_own(device):
    """DeepEP's layout: scales with strides (m * k / 128, 1, m), where m is no multiple of 4."""
    sizes = [3, 0, 64, 7, 133]
    case = make_case("fp8", sizes, 136, 384, device=device, capacity=135)
    scale = case.a_scale.transpose(1, 2).contiguous().transpose(1, 2)
    assert scale.stride() == (135 * 3, 1, 135)
    case = case._replace(a_scale=scale)
    for name in ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"):
        case.guarded.out.view(torch.int16).fill_(-1)
        case.check_into(lambda out, name=name: getattr(deep_gemm, name)(*pairs(case), out, case.bounds, 16))


@pytest.mark.parametrize("device", DEVICES)
def test_another_alignment(device):
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 16
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(64, 8) == 128
    case = make_case("fp8", [3, 0, 17, 16], 72, 256, device=device, alignment=16)
    case.check_into(by_indices(case))
    with pytest.raises(ValueError, match="alignment is 48; pass an int, a power of two"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(48)


@pytest.mark.gpu
def test_graphs_hold_for_every_layout():
    """Graphs hold for other indices, too, which the device reads."""
    case = make_case("fp8", [512] * 4, 136, 256, device="cuda", alignment=ALIGNMENT, spare=0)
    indices, out = case.indices, case.out
    call = by_indices(case, indices)
    call(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out)
    for sizes in ([2048, 0, 0, 0], [0, 1, 0, 1500], [0] * 4, [100, 128, 129, 500]):
        rows, begin = [], 0
        for size in sizes:
            rows.append((begin, begin + size))
            begin += -(-size // ALIGNMENT) * ALIGNMENT
        now = case._replace(rows=rows)
        indices.copy_(now.indices)
        case.guarded.out.view(torch.int16).fill_(-1)
        now.check_into(lambda _out: graph.replay())


# ---- products by head

HEADS = pytest.mark.parametrize("heads", [1, 3])


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("stacked", [False, True], ids=["alternating", "stacked"])
@HEADS
@pytest.mark.parametrize("device", DEVICES)
def test_heads(device, heads, stacked, rows):
    n, k = 136, 256
    each = [make_operands(rows, n, k, device=device) for _ in range(heads)]
    dim = 0 if stacked else 1
    a, a_scale = (torch.stack([operands[i] for operands in each], dim) for i in (0, 1))
    guarded = GuardedOut(rows * heads, n, device=device)
    d = guarded.out.view(heads, rows, n) if stacked else guarded.out.view(rows, heads, n)
    if stacked:
        a, a_scale, d = (x.transpose(0, 1) for x in (a, a_scale, d))
    b, b_scale = (torch.stack([operands[i] for operands in each]) for i in (2, 3))
    assert deep_gemm.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, b_scale), d) is None
    guarded.assert_guards_intact()
    for head, operands in enumerate(each):
        assert_accurate(d[:, head], exact_product(operands))
    values = torch.empty(rows, heads, n, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(rows, heads, 2, device=device)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, b_scale), (values, scale))
    wanted = deep_gemm.per_token_cast_to_fp8(d.reshape(rows * heads, n), use_ue8m0=False)
    assert torch.equal(values.view(torch.uint8).flatten(0, 1), wanted[0].view(torch.uint8))
    assert torch.equal(scale.flatten(0, 1), wanted[1])


# ---- wrong calls


def test_wrong_layouts_launch_nothing():
    case = make_case("fp8", [5, 130, 7], 72, 256, alignment=ALIGNMENT)
    good = case.indices
    for change, kind, message in (
        (lambda x: x.long(), ValueError, r"of torch.int64; for a of \d+ rows it must be \[\d+\] of torch.int32"),
        (lambda x: x[1:], ValueError, "grouped_layout is"),
        (lambda x: case.bounds, ValueError, "pass use_psum_layout=True"),
        (lambda x: 128, TypeError, "grouped_layout is a int; it must be a tensor of 1"),
        (lambda x: x.masked_fill(x == 0, 3), ValueError, "wrong at a group beyond the 3 of b|wrong at row 128"),
        (lambda x: torch.where(x == 2, 0, x), ValueError, "wrong at row 384: groups must stand in the order of b"),
        (lambda x: x.roll(1), ValueError, "wrong at row 1: .*begins at a multiple of 128. Sort the rows"),
    ):
        with pytest.raises(kind, match=message):
            by_indices(case, change(good))(case.out)
    case.guarded.assert_untouched()


def test_wrong_calls_launch_nothing():
    case = make_case("fp8", [5, 130], 72, 256, alignment=ALIGNMENT)
    a, b = pairs(case)
    for arguments, keywords, kind, message in (
        ((a[0], b, case.out, case.indices), {}, TypeError, "a is a Tensor; it must be a pair"),
        ((a, b, case.out, case.indices), {"recipe": (1, 1, 128)}, ValueError, r"recipe is \(1, 1, 128\)"),
        ((a, b, case.out.double(), case.indices), {}, TypeError, "out must be one of torch.bfloat16"),
        ((a, b, case.out, case.bounds.long()), {"use_psum_layout": True}, TypeError, "offs must be torch.int32"),
        ((a, (b[0][0], b[1][0]), case.out, case.indices), {}, ValueError, r"b is \[72, 256\]; it must have 3"),
    ):
        with pytest.raises(kind, match=message):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*arguments, **keywords)
    case.guarded.assert_untouched()
    masked = make_case("fp8", [3, 4], 72, 256, capacity=5)
    for expected, bounds, kind, message in (
        (0, masked.bounds, ValueError, "expected_rows is 0"),
        (4, masked.bounds.long(), TypeError, "counts must be torch.int32"),
    ):
        with pytest.raises(kind, match=message):
            deep_gemm.m_grouped_fp8_gemm_nt_masked(*pairs(masked), masked.out, bounds, expected)
    masked.guarded.assert_untouched()


def test_wrong_heads_launch_nothing():
    operands = make_operands(4, 72, 256)
    a = tuple(x[:, None] for x in operands[:2])
    b = tuple(x[None] for x in operands[2:])
    d = torch.zeros(4, 1, 72, dtype=torch.bfloat16)
    for arguments, keywords, message in (
        (("bhd,hdr->bhr", a, b, d), {}, "expr is 'bhd,hdr->bhr'; on Hopper it is 'bhr,hdr->bhd'"),
        (("bhr,hdr->bhd", a, b, d), {"c": d}, "c must be None"),
        (("bhr,hdr->bhd", a, b, d), {"recipe": (1, 1, 128)}, "recipe is"),
        (("bhr,hdr->bhd", operands[:2], b, d), {}, r"a is \[4, 256\]; it must have 3"),
        (("bhr,hdr->bhd", a, b, d[:, 0]), {}, r"d is \[4, 72\]; it must have 3"),
        (("bhr,hdr->bhd", a, b, d[:3]), {}, r"d is \[3, 1, 72\]; it must be \[rows, heads, ...\] as a is"),
        (("bhr,hdr->bhd", a, tuple(x.expand(2, -1, -1) for x in b), d), {}, r"b is \[2, 72, 256\]; it must be \[heads"),
        (("bhr,hdr->bhd", a, b, d[:, :, :64]), {}, r"out must be \[1, 4, 72\]"),
    ):
        with pytest.raises(ValueError, match=message):
            deep_gemm.fp8_einsum(*arguments, **keywords)
    assert not d.any()


def test_arguments_are_those_of_deep_gemm():
    """Names and order are those of 2.8.1: the arguments of 2.6.1, then newer ones, then those of SGLang's build."""
    overlap = ["enable_overlap", "max_block_n", "signal"]
    recipes = ["recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast"]
    psum = ["use_psum_layout", "ensure_zero_padding", "expected_m_for_psum_layout"]
    for function, wanted in (
        (deep_gemm.m_grouped_fp8_gemm_nt_contiguous, ["a", "b", "d", "grouped_layout", *recipes, *psum, "epilogue"]),
        (
            deep_gemm.m_grouped_fp8_gemm_nt_masked,
            ["a", "b", "d", "masked_m", "expected_m", *recipes, "epilogue", *overlap],
        ),
        (deep_gemm.fp8_einsum, ["expr", "a", "b", "d", "c", "recipe", "epilogue", "use_128x4_sfd_layout"]),
    ):
        assert list(inspect.signature(function).parameters) == wanted


def test_settings_are_passed_along(monkeypatch):
    seen = []
    monkeypatch.setattr(deep_gemm.grouped, "fp8_grouped_gemm", lambda *operands, **options: seen.append(options))
    deep_gemm.set_num_sms(24), deep_gemm.set_pdl(True)
    of_process = {"num_sms": 24, "pdl": True}
    case = make_case("fp8", [100, 200], 72, 256, alignment=ALIGNMENT, spare=56)
    by_indices(case)(case.out)
    by_indices(case, case.bounds, use_psum_layout=True, expected_m_for_psum_layout=9)(case.out)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(*pairs(case), case.out, case.bounds, 16)
    assert seen.pop().items() >= {"counts": case.bounds, "expected_rows": 16, **of_process}.items()
    assert seen == [
        {"alignment": 128, "expected_rows": 192 - 64, **of_process},
        {"alignment": 128, "expected_rows": 9, **of_process},
    ]
