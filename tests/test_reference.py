"""The definition of fp8_gemm against a loop, and the two error measures."""

import math
import re
from pathlib import Path

import pytest
import torch

from deep_tile import reference
from deep_tile.quantize import FP8_DTYPE, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_tile.reference import MAX_RELATIVE_ERROR, cosine_difference, fp8_gemm_reference, relative_error


def operands(m, n, k, scale_layout="row"):
    generator = torch.Generator().manual_seed(m + 7 * n + 31 * k)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    return *per_token_cast_to_fp8(a, scale_layout=scale_layout), *per_block_cast_to_fp8(b)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 130, 257), (5, 4, 128)])
def test_it_is_the_sum_of_the_definition(m, n, k):
    a, a_scale, b, b_scale = operands(m, n, k)
    out = fp8_gemm_reference(a, a_scale, b, b_scale, torch.float64)
    a64, b64 = a.double(), b.double()
    for i in range(m):
        for j in range(n):
            expected = sum(
                float(a64[i, p] * a_scale[i, p // 128] * b64[j, p] * b_scale[j // 128, p // 128]) for p in range(k)
            )
            assert float(out[i, j]) == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_output_is_bfloat16_rounded_once():
    out = fp8_gemm_reference(*operands(40, 300, 400))
    exact = fp8_gemm_reference(*operands(40, 300, 400), torch.float64)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.to(torch.bfloat16))
    assert 1.4e-3 < relative_error(out, exact) < MAX_RELATIVE_ERROR  # BF16's own rounding


def test_error_limit_stands_in_one_place():
    folders = (Path(__file__).parent.parent / name for name in ("deep_tile", "benchmarks", "tests"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path.name for path in files if re.search(r"= *1\.8e-0?3\b", path.read_text())] == ["reference.py"]


@pytest.mark.parametrize("layout", ["m", "m_aligned"])
def test_scale_layout_changes_nothing(layout):
    assert torch.equal(fp8_gemm_reference(*operands(7, 20, 300, layout)), fp8_gemm_reference(*operands(7, 20, 300)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_precision_setting_changes_nothing(device):
    inputs = [tensor.to(device) for tensor in operands(64, 128, 512)]
    before = torch.get_float32_matmul_precision()
    wanted = fp8_gemm_reference(*inputs, torch.float32)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(fp8_gemm_reference(*inputs, torch.float32), wanted)
    finally:
        torch.set_float32_matmul_precision(before)


def test_rows_in_pieces_give_the_whole(monkeypatch):
    inputs = operands(10, 20, 300)
    whole = fp8_gemm_reference(*inputs)
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", 3)
    assert torch.equal(fp8_gemm_reference(*inputs), whole)


def test_nan_in_one_row_stays_there():
    a, a_scale, b, b_scale = operands(4, 8, 256)
    clean = fp8_gemm_reference(a, a_scale, b, b_scale)
    a_scale[2, 1] = math.nan
    out = fp8_gemm_reference(a, a_scale, b, b_scale)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 128), (8, 0, 128), (3, 4, 0)])
def test_empty_sizes(m, n, k):
    out = fp8_gemm_reference(*operands(m, n, k))
    assert out.shape == (m, n)
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.zeros(4, 128).to(FP8_DTYPE), "a_scale has shape"),
        (1, torch.ones(2, 4), r"a_scale has shape \[2, 4\].*\[4, 2\]"),
        (2, torch.zeros(8, 255).to(FP8_DTYPE), r"a has shape \[4, 256\] and b \[8, 255\]"),
        (3, torch.ones(8, 2), r"b_scale has shape \[8, 2\].*\[1, 2\]"),
        (0, torch.zeros(256).to(FP8_DTYPE), "2-D"),
    ],
)
def test_refusals_name_the_argument(position, wrong, message):
    inputs = list(operands(4, 8, 256))
    inputs[position] = wrong
    with pytest.raises(ValueError, match=message):
        fp8_gemm_reference(*inputs)


def test_error_measures_by_hand():
    reference_values = torch.tensor([[3.0], [4.0]])
    x = torch.tensor([[3.0], [4.5]])
    assert relative_error(x, reference_values) == pytest.approx(0.5 / 5)
    assert cosine_difference(x, reference_values) == pytest.approx(1 - 2 * 27 / (29.25 + 25))


def test_error_measures_in_pieces(monkeypatch):
    x, wanted = torch.randn(50, 7), torch.randn(50, 7)
    whole = relative_error(x, wanted), cosine_difference(x, wanted)
    monkeypatch.setattr(reference, "ELEMENTS_AT_ONCE", 20)
    assert (relative_error(x, wanted), cosine_difference(x, wanted)) == pytest.approx(whole, rel=1e-12)


def test_error_measures_at_the_edges():
    zero, one = torch.zeros(2, 2), torch.ones(2, 2)
    nan = torch.full((2, 2), math.nan)
    assert (relative_error(one, one), cosine_difference(one, one)) == (0, 0)
    assert (relative_error(zero, zero), cosine_difference(zero, zero)) == (0, 0)
    assert relative_error(one, zero) == math.inf
    assert math.isnan(relative_error(nan, one)) and math.isnan(relative_error(nan, zero))
    assert math.isnan(cosine_difference(nan, one))
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[1, 4\]"):
        relative_error(zero, torch.zeros(1, 4))
