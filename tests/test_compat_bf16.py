"""DeepGEMM's names for BF16 GEMMs: each layout, row groups, groups along k, and refusals."""

import pytest
import torch
from grouped_case import DEVICES, make_case
from helpers import Exact, GuardedOut, assert_accurate, exact_dense_product, make_product

from deep_tile.compat import deep_gemm

pytestmark = pytest.mark.usefixtures("fresh_deep_gemm")

ALIGNMENT = 128
SIZES = [5, 0, 130, 64]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(layout, dtype, device):
    product = make_product("bf16", 70, 136, 200, device=device, layout=layout)
    a, b = product.operands
    given = a.t() if layout[0] == "t" else a, b.t() if layout[1] == "n" else b
    guarded = GuardedOut(70, 136, device=device, dtype=dtype)
    assert getattr(deep_gemm, f"bf16_gemm_{layout}")(*given, guarded.out) is None
    guarded.assert_guards_intact()
    assert_accurate(guarded.out, product.exact, product.accumulation, product.relative_error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same", [False, True])
def test_sums(same, device):
    product = make_product("bf16", 70, 136, 200, device=device)
    before = torch.randn(70, 136, device=device)
    d = before.clone() if same else torch.full_like(before, float("nan"))
    deep_gemm.bf16_gemm_nt(*product.operands, d, d if same else before)
    value, spread = product.exact
    assert_accurate(d, Exact(value + before.double(), spread), product.accumulation, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("by_ends", [False, True])
def test_contiguous_groups(by_ends, layout, device):
    case = make_case("bf16", SIZES, 200, 320, device=device, alignment=ALIGNMENT, layout=layout)
    a, b = case.operands
    groups = case.bounds if by_ends else case.indices
    call = getattr(deep_gemm, f"m_grouped_bf16_gemm_{layout}_contiguous")
    given = b if layout == "nt" else b.transpose(1, 2)
    case.check_into(lambda out: call(a, given, out, groups, use_psum_layout=by_ends))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_their_own(device):
    case = make_case("bf16", SIZES, 136, 256, device=device, capacity=135)
    call = deep_gemm.m_grouped_bf16_gemm_nt_masked
    case.check_into(lambda out: call(*case.operands, out, case.bounds, 16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["written", "added", "added_in_place"])
def test_gradients_of_weights(how, device):
    lengths = [130, 0, 8, 3]
    a, b = (torch.randn(sum(lengths), columns, device=device).bfloat16() for columns in (72, 136))
    before = torch.randn(4, 72, 136, device=device)
    c = None if how == "written" else before
    d = before.clone() if how == "added_in_place" else torch.full_like(before, float("nan"))
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, lengths, c=d if how == "added_in_place" else c)
    for group, (x, y) in enumerate(zip(a.split(lengths), b.split(lengths), strict=True)):
        value, spread = exact_dense_product(x.t(), y.t())
        value = value if how == "written" else value + before[group].double()
        assert_accurate(d[group], Exact(value, spread), 1e-3, 1e-5)


def test_wrong_calls_launch_nothing():
    product = make_product("bf16", 7, 16, 64)
    a, b = product.operands
    guarded = GuardedOut(7, 16)
    sums = torch.zeros(7, 16)
    for call, error, text in (
        (lambda: deep_gemm.bf16_gemm_nt(a, b.half(), guarded.out), TypeError, "b must be torch.bfloat16"),
        (
            lambda: deep_gemm.bf16_gemm_nt(a, b, guarded.out, sums),
            TypeError,
            "with c, both must be tensors of torch.fl",
        ),
        (lambda: deep_gemm.bf16_gemm_nn(a, b[0], guarded.out), ValueError, "b is .*; it must have 2 dimensions"),
        (lambda: deep_gemm.bf16_gemm_tn(3, b, guarded.out), TypeError, "a is a int; it must be a tensor of 2"),
        (
            lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, guarded.out, torch.zeros(7).int()),
            ValueError,
            "b is .*; it must have 3 dimensions",
        ),
        (
            lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b[None], guarded.out, torch.zeros(5).int()),
            ValueError,
            "grouped_layout is .*for a of 7 rows",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    guarded.assert_untouched()
    d, x = torch.zeros(2, 64, 64), torch.zeros(7, 64).bfloat16()
    for change, text in (
        ({"ks_cpu": [3, 5]}, r"a is \[7, 64\]; for ks_cpu and d it must be \[8, 64\]"),
        ({"ks_cpu": [7]}, "ks_cpu has 1 numbers; d has 2 groups"),
        ({"ks_cpu": [8, -1]}, "it must be a list of multiples of 1"),
        ({"use_psum_layout": True}, "use_psum_layout must be False"),
        ({"d": d.bfloat16()}, "it must be dense, of torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(**{"a": x, "b": x, "d": d, "ks_cpu": [3, 4]} | change)
