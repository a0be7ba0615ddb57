"""torch's names for scaled products on deep_tile: values in torch's layouts, the swapped pair, groups, and what is
refused."""

import inspect

import pytest
import torch
from helpers import assert_accurate, exact_product, make_operands
from test_grouped import Case, make_case
from torch.nn.functional import ScalingType, SwizzleType

from deep_tile import fp8_gemm, torch_compat

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS, WEIGHTS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
SIZES = [(5, 130, 256), (64, 256, 1040), (1, 128, 640), (300, 40, 512)]


def torch_s_weight_scale(scale: torch.Tensor) -> torch.Tensor:
    """[..., k / 128 rounded up to 4, n / 128], of which torch reads columns; the padding is NaN."""
    *rows, k_blocks = scale.shape
    padded = scale.new_full((*rows, (k_blocks + 3) // 4 * 4), float("nan"))
    padded[..., :k_blocks] = scale
    return padded.transpose(-1, -2)


def arguments(operands) -> dict:
    """Of `a` by tokens and `b` by weights."""
    return {
        "mat_a": operands.a,
        "mat_b": operands.b.t(),
        "scale_a": operands.a_scale,
        "scale_recipe_a": TOKENS,
        "scale_b": torch_s_weight_scale(operands.b_scale),
        "scale_recipe_b": WEIGHTS,
    }


def swapped(operands) -> dict:
    """Of the transposed product."""
    return {
        "mat_a": operands.b,
        "mat_b": operands.a.t(),
        "scale_a": torch_s_weight_scale(operands.b_scale),
        "scale_recipe_a": WEIGHTS,
        "scale_b": operands.a_scale,
        "scale_recipe_b": TOKENS,
    }


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_values(m, n, k, device):
    operands = make_operands(m, n, k, device=device, a_scale="column")
    out = torch_compat.scaled_mm(**arguments(operands))
    assert out.is_contiguous()
    assert_accurate(out, exact_product(operands))
    transposed = torch_compat.scaled_mm(**swapped(operands))
    assert transposed.is_contiguous() and torch.equal(transposed.t(), out)


@pytest.mark.gpu
def test_values_are_torch_s():
    operands = make_operands(256, 512, 1024, device="cuda", a_scale="column")
    wanted = torch.nn.functional.scaled_mm(**arguments(operands))
    out = torch_compat.scaled_mm(**arguments(operands))
    assert torch.allclose(out.float(), wanted.float(), rtol=2**-7, atol=float(wanted.float().std()) * 1e-2)


@pytest.mark.parametrize("how", [arguments, swapped], ids=["as_is", "swapped"])
@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_one_padding_and_bias(how, device):
    operands = make_operands(7, 200, 384, device=device)
    given = how(operands)
    plain = torch_compat.scaled_mm(**given)
    lists = {name: [value] if name.startswith("scale") else value for name, value in given.items()}
    assert torch.equal(
        torch_compat.scaled_mm(**lists, swizzle_a=SwizzleType.NO_SWIZZLE, swizzle_b=[SwizzleType.NO_SWIZZLE]), plain
    )
    weight = "scale_b" if how is arguments else "scale_a"
    assert torch.equal(torch_compat.scaled_mm(**given | {weight: operands.b_scale.t()}), plain)
    bias = torch.randn(given["mat_b"].shape[1], dtype=torch.bfloat16, device=device)
    wanted = fp8_gemm(*operands, bias=bias) if how is arguments else plain + bias
    assert torch.equal(torch_compat.scaled_mm(**given, bias=bias, contraction_dim=(1, 0), use_fast_accum=True), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_formats_of_results(device, dtype):
    operands = make_operands(7, 200, 384, device=device)
    out = torch_compat.scaled_mm(**arguments(operands), output_dtype=dtype)
    assert out.dtype == dtype
    assert_accurate(out, exact_product(operands), relative_error=1e-3)
    assert torch.equal(torch_compat.scaled_mm(**swapped(operands), output_dtype=dtype).t(), out)


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_grouped_mm"])
def test_arguments_are_torch_s(name):
    """By name, order and default."""
    theirs, ours = (
        [(argument.name, argument.default, argument.kind) for argument in inspect.signature(call).parameters.values()]
        for call in (getattr(torch.nn.functional, name), getattr(torch_compat, name))
    )
    assert ours == theirs


def test_compiles():
    given = arguments(make_operands(5, 130, 256))
    compiled = torch.compile(torch_compat.scaled_mm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), torch_compat.scaled_mm(**given))


# ---- groups


def of_groups(case: Case) -> dict:
    return {
        "mat_a": case.a,
        "mat_b": case.b.transpose(1, 2),
        "scale_a": case.a_scale,
        "scale_recipe_a": TOKENS,
        "scale_b": torch_s_weight_scale(case.b_scale),
        "scale_recipe_b": WEIGHTS,
        "offs": case.bounds if case.capacity is None else None,
    }


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("device", DEVICES)
def test_groups(device, capacity):
    sizes = [3, 0, 130, 64] if capacity is None else [40] * 3
    case = make_case(sizes, 200, 640, device=device, capacity=capacity, a_scale="column")
    given = of_groups(case)
    out = torch_compat.scaled_grouped_mm(**given)
    assert out.is_contiguous() and out.shape == (*case.a.shape[:-1], 200)
    for group, (begin, end) in enumerate(case.rows):
        assert_accurate(out.view(-1, 200)[begin:end], case.exact(group))
    alive = slice(0, case.rows[-1][1])
    for change in (
        {name: [value] for name, value in given.items() if name.startswith("scale")},
        {"scale_b": case.b_scale.transpose(1, 2), "use_fast_accum": True, "swizzle_a": SwizzleType.NO_SWIZZLE},
    ):
        again = torch_compat.scaled_grouped_mm(**given | change)
        assert torch.equal(again.view(-1, 200)[alive], out.view(-1, 200)[alive])


def test_groups_compile():
    given = of_groups(make_case([3, 0, 30], 200, 256, spare=0))
    compiled = torch.compile(torch_compat.scaled_grouped_mm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), torch_compat.scaled_grouped_mm(**given))


BAD_GROUPS = [
    ({"scale_recipe_a": WEIGHTS, "scale_recipe_b": TOKENS}, ValueError, "deep_tile has BlockWise1x128 x .*128. Quant"),
    ({"offs": None}, ValueError, r"offs is missing, and mat_a is \[35, 256\]; pass the ends of groups"),
    ({"offs": torch.zeros(2).long()}, TypeError, "offs must be torch.int32"),
    ({"bias": torch.zeros(2, 130)}, ValueError, "bias is given"),
    ({"contraction_dim": (1, 0)}, ValueError, "contraction_dim is"),
    ({"output_dtype": torch.float32}, ValueError, "output_dtype is torch.float32"),
    ({"mat_a": torch.zeros(2, 35, 256).to(torch.float8_e4m3fn)}, ValueError, "offs is given, and mat_a is"),
    ({"mat_b": torch.zeros(256, 130).to(torch.float8_e4m3fn)}, TypeError, r"mat_b is \[256, 130\] of .* 3 dimensions"),
    ({"mat_b": torch.zeros(2, 130, 256).to(torch.float8_e4m3fn)}, ValueError, r"k differs. Pass w.transpose\(1, 2\)"),
    ({"mat_b": torch.zeros(2, 256, 130).to(torch.float8_e4m3fn)}, ValueError, "must have a unit stride along k"),
    ({"scale_b": torch.ones(2, 2, 3)}, ValueError, r"\[2, 2, 3\].*\[2, 2, 2\] or \[2, 4, 2\]. Quantise"),
    ({"scale_a": torch.ones(2, 35)}, ValueError, r"\[2, 35\].*\[35, 2\]. It looks transposed: pass scale_a.transp"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_GROUPS)
def test_groups_refused(change, error, message):
    with pytest.raises(error, match=message):
        torch_compat.scaled_grouped_mm(**of_groups(make_case([10, 20], 130, 256)) | change)


BAD = [
    ({"scale_recipe_b": TOKENS}, ValueError, "is BlockWise1x128 x BlockWise1x128; deep_tile has BlockWise1x128 x"),
    ({"scale_recipe_a": ScalingType.RowWise}, ValueError, "is RowWise x BlockWise128x128"),
    ({"scale_recipe_a": [TOKENS, TOKENS]}, ValueError, "scale_recipe_a has 2 entries"),
    ({"swizzle_b": SwizzleType.SWIZZLE_32_4_4}, ValueError, "swizzle_b is .*not swizzled"),
    ({"output_dtype": torch.float64}, ValueError, "output_dtype is torch.float64; pass torch.bfloat16"),
    ({"output_dtype": None}, ValueError, "output_dtype is None"),
    ({"contraction_dim": (0, 1)}, ValueError, "contraction_dim is"),
    ({"bias": torch.zeros(1)}, ValueError, r"bias is \[1\]; it must be a tensor \[n\] = \[130\]"),
    ({"mat_a": torch.zeros(5, 256)}, TypeError, r"mat_a is \[5, 256\] of torch.float32"),
    ({"mat_b": None}, TypeError, "mat_b is None"),
    ({"mat_b": torch.zeros(130, 256).to(torch.float8_e4m3fn)}, ValueError, r"k differs. Pass w.t\(\)"),
    ({"mat_b": torch.zeros(256, 130).to(torch.float8_e4m3fn)}, ValueError, "must have a unit stride along k"),
    ({"scale_a": torch.ones(2, 5)}, ValueError, r"scale_a is \[2, 5\].*\[5, 2\]. It looks transposed"),
    ({"scale_b": torch.ones(2, 3)}, ValueError, r"scale_b is \[2, 3\].*\[2, 2\] or \[4, 2\]. Quantise"),
    ({"scale_b": torch.ones(2, 2).bfloat16()}, TypeError, "scale_b is torch.bfloat16"),
    ({"scale_b": 1.0}, TypeError, "scale_b is 1.0"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        torch_compat.scaled_mm(**arguments(make_operands(5, 130, 256)) | change)
