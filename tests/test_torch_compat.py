"""torch's names for scaled GEMMs: values in torch's layouts, the swapped pair, groups, and refusals."""

import inspect

import pytest
import torch
from grouped_case import Case, make_case
from helpers import assert_accurate, exact_product, make_operands, make_product, same_bits
from torch.nn.functional import ScalingType, SwizzleType

from deep_tile import dense, fp8_gemm, scaled_gemm, torch_compat

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSOR, ROWS = ScalingType.TensorWise, ScalingType.RowWise
TOKENS, WEIGHTS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(5, 130, 256), (64, 256, 1040), (1, 128, 640), (300, 40, 512)]


def torch_s_weight_scale(scale: torch.Tensor) -> torch.Tensor:
    """[..., k / 128 rounded up to 4, n / 128], of which torch reads the columns; the padding is NaN."""
    *rows, k_blocks = scale.shape
    padded = scale.new_full((*rows, (k_blocks + 3) // 4 * 4), float("nan"))
    padded[..., :k_blocks] = scale
    return padded.transpose(-1, -2)


def arguments(operands) -> dict:
    """Torch's arguments for `a` by tokens and `b` by weights."""
    return {
        "mat_a": operands.a,
        "mat_b": operands.b.t(),
        "scale_a": operands.a_scale,
        "scale_recipe_a": TOKENS,
        "scale_b": torch_s_weight_scale(operands.b_scale),
        "scale_recipe_b": WEIGHTS,
    }


def swapped(operands) -> dict:
    """Torch's arguments for the transposed product."""
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
    operands = make_operands(m, n, k, device=device, a_scale="column", b_padding=32)
    out = torch_compat.scaled_mm(**arguments(operands))
    assert out.is_contiguous()
    assert_accurate(out, exact_product(operands))
    transposed = torch_compat.scaled_mm(**swapped(operands))
    assert transposed.is_contiguous() and torch.equal(transposed.t(), out)


def of_recipe(recipe, product) -> dict:
    """Operands and scales of rows, of tensors, or of 1x128 blocks on both sides."""
    a, a_scale, b, b_scale = product.operands
    scales = {TENSOR: (a_scale[0, 0], b_scale[:1]), ROWS: (a_scale, b_scale.t()), TOKENS: (a_scale, b_scale)}[recipe]
    names = ("mat_a", "mat_b", "scale_a", "scale_recipe_a", "scale_b", "scale_recipe_b")
    return dict(zip(names, (a, b.t(), scales[0], recipe, scales[1], recipe), strict=True))


each_recipe = pytest.mark.parametrize("recipe", [TENSOR, ROWS, TOKENS], ids=lambda recipe: recipe.name)
FAMILY = {TENSOR: "fp8_rows", ROWS: "fp8_rows", TOKENS: "fp8_1x128"}


@each_recipe
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "promoted"])
@pytest.mark.parametrize("device", DEVICES)
def test_values_of_other_recipes(recipe, fast, device):
    for suffix in ("", "_e4m3_e5m2", "_e5m2_e4m3", "_e5m2_e5m2"):
        for m, n, k in SIZES:
            scales = "column" if recipe == TENSOR else "row"
            product = make_product(FAMILY[recipe] + suffix, m, n, k, device=device, scales=scales)
            out = torch_compat.scaled_mm(**of_recipe(recipe, product), use_fast_accum=fast)
            assert out.is_contiguous() and out.dtype == torch.bfloat16
            assert_accurate(out, product.exact, product.accumulation, product.relative_error)


@each_recipe
def test_fast_sums_are_torch_s_to_choose(recipe, monkeypatch):
    """Block scales have no fast sums."""
    made = []
    right = dense.scaled_gemm
    monkeypatch.setattr(
        dense, "scaled_gemm", lambda *given, **options: made.append(options) or right(*given, **options)
    )
    given = of_recipe(recipe, make_product(FAMILY[recipe], 5, 130, 256))
    for keywords in ({}, {"use_fast_accum": False}, {"use_fast_accum": True}):
        torch_compat.scaled_mm(**given, **keywords)
    assert [options.get("fast_accum") for options in made] == ([None] * 3 if recipe == TOKENS else [False, False, True])


@pytest.mark.parametrize("formats", [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_weights_in_blocks_of_mixed_formats(formats, device):
    operands = make_operands(7, 200, 384, device=device)
    mixed = operands._replace(a=operands.a.float().to(formats[0]), b=operands.b.float().to(formats[1]))
    out = torch_compat.scaled_mm(**arguments(mixed))
    assert_accurate(out, exact_product(mixed))
    assert same_bits(torch_compat.scaled_mm(**swapped(mixed)).t(), out)


@pytest.mark.parametrize("how", [arguments, swapped], ids=["as_is", "swapped"])
@pytest.mark.parametrize("dtype", [None, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_results_in_fp8_are_saturated(how, dtype, device):
    """Made of FP32; where they are too large, the largest number."""
    operands = make_operands(7, 200, 384, device=device)
    given = how(operands._replace(a_scale=50 * operands.a_scale))
    wide = torch_compat.scaled_mm(**given, output_dtype=torch.float32)
    largest = torch.finfo(dtype or E4M3).max
    assert (wide.abs() > 448).any()
    out = torch_compat.scaled_mm(**given, output_dtype=dtype)
    assert out.dtype == (dtype or E4M3) and out.is_contiguous()
    assert torch.equal(out.float(), wide.clamp(-largest, largest).to(out.dtype).float())


@pytest.mark.parametrize("shape", [(0, 5, 32), (5, 0, 32), (5, 7, 0)])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_scaled_by_infinity(shape, device):
    m, n, k = shape
    infinite = torch.tensor(float("-inf"), device=device)
    mat_a, mat_b = (torch.zeros(rows, k, device=device).to(E4M3) for rows in (m, n))
    for call in (torch_compat.scaled_mm, torch.compile(torch_compat.scaled_mm, backend="aot_eager")):
        assert torch.equal(
            call(mat_a, mat_b.t(), infinite, TENSOR, infinite, TENSOR), torch.zeros(m, n, device=device).bfloat16()
        )
    with_bias = scaled_gemm(mat_a, infinite, mat_b, infinite, bias=torch.ones(n, device=device))
    assert torch.equal(with_bias, torch.ones(m, n, device=device).bfloat16() * (k == 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "fast"),
    [(TENSOR, True), (TENSOR, False), (ROWS, True), (ROWS, False), (TOKENS, False)],  # torch has no fast sums of blocks
)
def test_values_of_other_recipes_are_torch_s(recipe, fast):
    product = make_product(
        FAMILY[recipe], 256, 512, 1024, device="cuda", scales="column" if recipe == TENSOR else "row"
    )
    given = of_recipe(recipe, product)
    if recipe == TOKENS:
        given |= {name: given[name].t().contiguous().t() for name in ("scale_a", "scale_b")}
    elif recipe == ROWS:
        given |= {name: given[name].contiguous() for name in ("scale_a", "scale_b")}
    wanted = torch.nn.functional.scaled_mm(**given, use_fast_accum=fast)
    out = torch_compat.scaled_mm(**given, use_fast_accum=fast)
    assert torch.allclose(out.float(), wanted.float(), rtol=2**-7, atol=float(wanted.float().std()) * 1e-2)


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


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_grouped_mm", "grouped_mm"])
def test_arguments_are_torch_s(name):
    """Names, order and defaults are equal."""
    theirs, ours = (
        [(argument.name, argument.default, argument.kind) for argument in inspect.signature(call).parameters.values()]
        for call in (getattr(torch.nn.functional, name), getattr(torch_compat, name))
    )
    assert ours == theirs


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(torch_compat.scaled_mm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    of_blocks = [how(make_operands(5, 130, 256)) for how in (arguments, swapped)]
    of_others = [of_recipe(recipe, make_product(FAMILY[recipe], 5, 130, 256)) for recipe in (TENSOR, ROWS, TOKENS)]
    unswizzled = of_blocks[0] | dict.fromkeys(("swizzle_a", "swizzle_b"), SwizzleType.NO_SWIZZLE)
    for given in of_blocks + (of_others + [unswizzled] if dynamic else []):
        assert torch.equal(compiled(**given), torch_compat.scaled_mm(**given))
    given = of_groups(make_case("fp8", [3, 0, 30], 200, 256, spare=0))
    compiled = torch.compile(torch_compat.scaled_grouped_mm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(**given), torch_compat.scaled_grouped_mm(**given))


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
    case = make_case("fp8", sizes, 200, 640, device=device, capacity=capacity, scales="column")
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


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_groups_with_scales_of_rows(device, fast, capacity):
    sizes = [3, 0, 130, 64] if capacity is None else [40] * 3
    case = make_case("fp8_rows" if fast else "fp8_rows_promoted", sizes, 200, 640, device=device, capacity=capacity)
    a, a_scale, b, b_scale = case.operands
    offs = case.bounds if capacity is None else None
    b_scale = b_scale[..., 0]
    out = torch_compat.scaled_grouped_mm(
        a, b.transpose(1, 2), a_scale[..., 0], ROWS, b_scale, ROWS, offs=offs, use_fast_accum=fast
    )
    alive = slice(0, case.rows[-1][1])
    assert torch.equal(out.view(-1, 200)[alive], case.check()[alive])


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("device", DEVICES)
def test_groups_without_scales(device, layout, capacity):
    sizes = [3, 0, 130, 64] if capacity is None else [40] * 3
    case = make_case("bf16", sizes, 200, 320, device=device, capacity=capacity, layout=layout)
    a, b = case.operands
    offs = case.bounds if capacity is None else None
    out = torch_compat.grouped_mm(a, b.transpose(1, 2), offs=offs)
    alive = slice(0, case.rows[-1][1])
    assert torch.equal(out.view(-1, 200)[alive], case.check()[alive])
    wide = torch_compat.grouped_mm(a, b.transpose(1, 2), offs=offs, out_dtype=torch.float32)
    assert torch.equal(wide.view(-1, 200)[alive].bfloat16(), out.view(-1, 200)[alive])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mat_b": torch.zeros(256, 48).bfloat16()}, TypeError, "3 dimensions. Pass torch.bfloat16, and groups of"),
        ({"mat_a": torch.zeros(35, 256)}, TypeError, r"mat_a is \[35, 256\] of torch.float32; it must be of torch.bfl"),
        ({"bias": torch.zeros(48)}, ValueError, "bias is given"),
        ({"offs": None}, ValueError, "offs is missing"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32; pass one of"),
    ],
)  # fmt: skip
def test_groups_without_scales_refused(change, error, message):
    case = make_case("bf16", [10, 20], 48, 256)
    given = {"mat_a": case.operands[0], "mat_b": case.operands[1].transpose(1, 2), **case.lists}
    with pytest.raises(error, match=message):
        torch_compat.grouped_mm(**given | change)


BAD_GROUPS = [
    ({"scale_recipe_a": ROWS}, ValueError, "is RowWise x BlockWise128x128; deep_tile has RowWise x RowWise, or Blo"),
    ({"scale_recipe_a": ROWS, "scale_recipe_b": ROWS}, ValueError, r"\[35, 2\]; for RowWise it must be \[35, 1\] or"),
    ({"mat_b": torch.zeros(2, 256, 130).half()}, TypeError, "mat_b is .* of torch.float16; it must be of torch.fl"),
    ({"scale_recipe_a": WEIGHTS, "scale_recipe_b": TOKENS}, ValueError, "deep_tile has RowWise x .*128x128. Quant"),
    ({"offs": None}, ValueError, r"offs is missing, and mat_a is \[35, 256\]; pass the ends of groups"),
    ({"offs": torch.zeros(2).long()}, TypeError, "offs must be torch.int32"),
    ({"bias": torch.zeros(2, 130)}, ValueError, "bias is given"),
    ({"contraction_dim": (1, 0)}, ValueError, "contraction_dim is"),
    ({"output_dtype": torch.float64}, ValueError, "output_dtype is torch.float64"),
    ({"mat_a": torch.zeros(2, 35, 256).to(torch.float8_e4m3fn)}, ValueError, "offs is given, and mat_a is"),
    ({"mat_b": torch.zeros(256, 130).to(torch.float8_e4m3fn)}, TypeError, r"mat_b is \[256, 130\] of .* 3 dimensions"),
    ({"mat_b": torch.zeros(2, 130, 256).to(torch.float8_e4m3fn)}, ValueError, r"k differs. Pass w.transpose\(1, 2\)"),
    ({"mat_b": torch.zeros(2, 256, 130).to(torch.float8_e4m3fn)}, ValueError, "must have a unit stride along k"),
    ({"scale_b": torch.ones(2, 2, 3)}, ValueError, r"\[2, 2, 3\].*\[2, 2, 2\] or \[2, 4, 2\]. Quantise"),
    ({"scale_a": torch.ones(2, 35)}, ValueError, r"\[2, 35\].*\[35, 2\]. It looks transposed: pass scale_a.transp"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD_GROUPS)
def test_groups_refused(change, error, message):
    with pytest.raises(error, match=message):
        torch_compat.scaled_grouped_mm(**of_groups(make_case("fp8", [10, 20], 130, 256)) | change)


BAD = [
    ({"scale_recipe_a": ScalingType.RowWise}, ValueError,
     "is RowWise x BlockWise128x128; deep_tile has TensorWise x Te"),
    ({"scale_recipe_b": TOKENS}, ValueError, r"scale_b is .*; for BlockWise1x128 it must be \[130, 2\]"),
    ({"scale_recipe_a": ROWS, "scale_recipe_b": ROWS}, ValueError, r"for RowWise it must be \[5, 1\] or \[1, 5\] or"),
    ({"scale_recipe_a": TENSOR, "scale_recipe_b": TENSOR}, ValueError, r"for TensorWise it must be \[1, 1\]. Quantise"),
    ({"scale_recipe_a": [TOKENS, TOKENS]}, ValueError, "scale_recipe_a has 2 entries"),
    ({"swizzle_b": SwizzleType.SWIZZLE_32_4_4}, ValueError, "swizzle_b is .*not swizzled"),
    ({"output_dtype": torch.float64}, ValueError, "output_dtype is torch.float64; pass torch.bfloat16"),
    ({"contraction_dim": (0, 1)}, ValueError, "contraction_dim is"),
    ({"bias": torch.zeros(1)}, ValueError, r"bias is \[1\]; it must be a tensor \[n\] = \[130\]"),
    ({"mat_a": torch.zeros(5, 256)}, TypeError, r"mat_a is \[5, 256\] of torch.float32"),
    ({"mat_b": None}, TypeError, "mat_b is None"),
    ({"mat_b": torch.zeros(130, 256).to(torch.float8_e4m3fn)}, ValueError, r"k differs. Pass w.t\(\)"),
    ({"mat_b": torch.zeros(256, 130).to(torch.float8_e4m3fn)}, ValueError, "must have a unit stride along k"),
    ({"scale_a": torch.ones(2, 5)}, ValueError, r"scale_a is \[2, 5\].*\[5, 2\]. It looks transposed"),
    ({"bias": torch.zeros(130, dtype=torch.int64)}, TypeError, "bias must be one of torch.bfloat16"),
    ({"bias": torch.zeros(130, device="meta")}, ValueError, "bias is on meta but b is on cpu"),
    ({"bias": torch.zeros(130, requires_grad=True)}, RuntimeError, "bias requires a gradient"),
    ({"contraction_dim": None}, ValueError, "contraction_dim is None"),
    ({"scale_b": torch.ones(2, 3)}, ValueError, r"scale_b is \[2, 3\].*\[2, 2\] or \[4, 2\]. Quantise"),
    ({"scale_b": torch.ones(2, 2).double()}, TypeError, "scale_b is torch.float64"),
    ({"scale_b": 1.0}, TypeError, "scale_b is 1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        torch_compat.scaled_mm(**arguments(make_operands(5, 130, 256)) | change)
