"""`gemm`, `int8_gemm` and `scaled_gemm` on the CPU: definitions, refusals, ops, and launch parameters."""

from dataclasses import replace
from functools import partial
from itertools import product as product_of_ways

import pytest
import torch
from helpers import (
    ACCUMULATION_WITHOUT_SCALES,
    SCALE_STRIDES,
    GuardedOut,
    added,
    assert_accurate,
    exact_dense_product,
    make_dense_operands,
    make_product,
    same_bits,
)
from torch._dynamo.testing import CompileCounterWithBackend

import deep_tile
from deep_tile import (
    GemmConfig,
    checks,
    dense,
    finishes,
    fp8_wgrad,
    gemm,
    int8_gemm,
    params,
    plan,
    scaled_gemm,
    tensors,
)
from deep_tile.kinds import KINDS, LAYOUT_NAMES, LAYOUTS, OUTPUTS
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.choose import bucket_key, bucketed, choose
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.usefixtures("quick_compiler")

DTYPES = (torch.bfloat16, torch.float16)
OUT_DTYPES = (*DTYPES, torch.float32)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@each_device
@each_dtype
@pytest.mark.parametrize("out_dtype", [None, *OUT_DTYPES], ids=str)
def test_it_is_its_definition(dtype, out_dtype, device):
    a, b = make_dense_operands(37, 53, 203, dtype, a_padding=16, device=device)
    out = gemm(a, b, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype) and out.is_contiguous()
    assert_accurate(out, exact_dense_product(a, b), ACCUMULATION_WITHOUT_SCALES)


@pytest.mark.parametrize("out_dtype", [None, *OUT_DTYPES], ids=str)
def test_integers_without_scales(out_dtype):
    """Sums are returned as they are, or rounded once."""
    product = make_product("int8_unscaled", 37, 53, 300)
    out = gemm(*product.operands, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.int32)
    assert_accurate(out, product.exact, ACCUMULATION_WITHOUT_SCALES)
    product.check(GuardedOut(37, 53, stride=57, offset=1, dtype=out.dtype))


def test_sums_of_integers_are_exact_and_wrap_around():
    a = torch.full((2, 1 << 17), -128, dtype=torch.int8)
    b = a.clone()
    b[0, 0] = 127
    wrapped = [2**31 - 128 * 255, -(2**31)]
    assert gemm(a, b)[0].tolist() == wrapped
    one = torch.ones(())
    for out in (gemm(a, b, out_dtype=torch.float32), scaled_gemm(a, one, b, one, out_dtype=torch.float32)):
        assert out[0].tolist() == wrapped


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"bias": torch.ones(8)}, ValueError, r"result is torch\.int32, and a bias .* pass out_dtype=torch\.float32"),
        ({"activation": "relu"}, ValueError, r"result is torch\.int32"),
        ({"out": torch.zeros(4, 8, dtype=torch.int32), "activation": "relu"}, ValueError, r"result is torch\.int32"),
        ({"out": torch.zeros(4, 8, dtype=torch.int64)}, TypeError,
         r"out must be one of .*torch\.int32; got torch\.int64"),
        ({"out_dtype": torch.int8}, TypeError, r"out_dtype is torch\.int8; pass one of .*torch\.int32"),
        ({"b": torch.ones(8, 32).half()}, TypeError,
         r"b must be torch\.int8, since a is torch\.int8; got torch\.float16"),
    ],
)  # fmt: skip
def test_what_integers_without_scales_are_refused(keywords, error, text):
    right = {"a": torch.ones(4, 32, dtype=torch.int8), "b": torch.ones(8, 32, dtype=torch.int8)}
    with pytest.raises(error, match=text):
        gemm(**right | keywords)
    assert gemm(**right, bias=torch.ones(8), activation="relu", out_dtype=torch.float32).eq(33).all()


def test_integers_are_results_of_integers_alone():
    a, b = make_dense_operands(4, 8, 32, torch.bfloat16)
    one, integers = torch.ones(()), torch.ones(4, 32, dtype=torch.int8)
    for call in (
        lambda: gemm(a, b, torch.zeros(4, 8, dtype=torch.int32)),
        lambda: scaled_gemm(integers, one, integers, one, out_dtype=torch.int32),
    ):
        with pytest.raises(TypeError, match=r"torch\.bfloat16, torch\.float16, torch\.float32"):
            call()
    with pytest.raises(ValueError, match="kind is 'bf16' and output 'int32'; results are bf16, fp16, fp32"):
        GemmConfig(128, 128, 4, kind="bf16", output="int32")
    with pytest.raises(ValueError, match="sums of integers are stored as they are"):
        GemmConfig(128, 128, 4, kind="int8_unscaled", bias="fp32")
    for wrong, text in (
        (
            {"kind": "int8", "out_dtype": torch.int32},
            "kind 'int8', out_dtype torch.int32: .* for the others: int8_unscaled$",
        ),
        ({"kind": "int8_unscaled", "activation": "relu"}, "results are INT32, and a bias or"),
    ):
        with pytest.raises(ValueError, match=text):
            deep_tile.precompile([(64, 64, 3)], **wrong)
    done = deep_tile.precompile([(64, 64, 3)], kind="int8_unscaled")
    assert {config.output for config in done.configs} == {"int32"}
    assert deep_tile.supports(5, 6, 64, dtype=torch.int8, out_dtype=torch.int32) == (True, "supported")
    assert not deep_tile.supports(5, 6, 64, dtype=torch.bfloat16, out_dtype=torch.int32)[0]


SCALED = [kind for kind in KINDS.values() if kind.scaling != "none"]

each_scaled_kind = pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)


@each_scaled_kind
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_scaled_kinds_are_their_definition(kind, out_dtype):
    for m, n, k in ((1, 1, 1), (37, 130, 300), (129, 24, 64)):
        for scales in SCALE_STRIDES:
            product = make_product(kind.name, m, n, k, padding=16, scales=scales)
            product.check(GuardedOut(m, n, stride=n + 3, offset=1, dtype=out_dtype))
    assert product.call(*product.operands).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [kind for kind in SCALED if kind.name != "fp8"], ids=lambda kind: kind.name)
def test_refused_scales(kind):
    product = make_product(kind.name, 9, 200, 160)
    a, a_scale, b, b_scale = product.operands
    wide = torch.ones(9, 160, dtype=torch.float32)
    guarded = GuardedOut(9, 200)
    for operands, error, text in (
        ((a, a_scale[:4], b, b_scale), ValueError, "a_scale must have"),
        ((a, a_scale, b, b_scale.repeat(3, 1)), ValueError, "b_scale must have"),
        ((a, a_scale.double(), b, b_scale), TypeError, r"a_scale must be torch\.float32.*a_scale\.float\(\)"),
        ((a, a_scale, b, 2.0), TypeError, "b_scale must be a torch.Tensor; got float"),
        ((wide, a_scale, b, b_scale), TypeError, r"a must be .*got torch\.float32.*quantise"),
        ((a, a_scale, wide, b_scale), TypeError, r"b must be torch\..*got torch\.float32"),
        ((a, a_scale.clone().requires_grad_(), b, b_scale), RuntimeError, "a_scale requires a gradient"),
    ):
        with pytest.raises(error, match=text):
            product.call(*operands, guarded.out)
    guarded.assert_untouched()


@pytest.mark.parametrize(
    ("sizes", "shapes", "scaling"),
    [
        ((2, 3, 256), ((2, 2), (3, 2)), "row_blocks"),
        ((2, 3, 256), ((2, 1), (1, 3)), "rows"),
        ((2, 3, 256), ((1, 2), ()), "rows"),
        ((2, 3, 256), ((2, 2), (1, 2)), "blocks"),
        ((2, 300, 256), ((2, 2), (3, 2)), "blocks"),
        ((2, 1, 256), ((2, 2), (1, 2)), "row_blocks"),
        ((2, 3, 100), ((2, 1), (3, 1)), "rows"),
        ((2, 3, 100), ((2, 1), (1, 1)), "rows"),
        ((2, 300, 100), ((2, 1), (3, 1)), "blocks"),
        ((2, 300, 100), ((2, 1), (300, 1)), "rows"),
        ((2, 3, 300), ((2, 1), (1, 3)), "rows"),  # the latter could be of one block of 128 rows, the former not
    ],
)
def test_scales_of_blocks_are_told_from_scales_of_rows(sizes, shapes, scaling):
    """The shapes tell them apart. With one block along k, both mean the same."""
    (m, n, k), (a_scale, b_scale) = sizes, map(torch.ones, shapes)
    for kind in (kind for kind in KINDS.values() if kind.scaling == scaling):
        operands = torch.ones(m, k).to(dtype_of(kind.a)), a_scale, torch.ones(n, k).to(dtype_of(kind.b)), b_scale
        assert dense.SCALED_GEMM.kind(operands, dense.Options()) == kind
        promoted = kind.name.replace("fp8_rows", "fp8_rows_promoted")
        assert dense.SCALED_GEMM.kind(operands, dense.Options(fast_accum=False)) == KINDS[promoted]
        if kind.family == "fp8_1x128":
            assert dense.FP8_WGRAD.kind(operands, dense.Options()) == kind


def dtype_of(element):
    return getattr(torch, element.dtype)


def test_sums_that_are_promoted_are_asked_for_by_name():
    a, b = torch.ones(6, 32).to(torch.float8_e4m3fn), torch.ones(8, 32).to(torch.float8_e4m3fn)
    one = torch.ones(())
    with pytest.raises(TypeError, match="fast_accum is 0, of type int; pass True or False"):
        scaled_gemm(a, one, b, one, fast_accum=0)
    traced = torch.compile(lambda *given: scaled_gemm(*given, fast_accum=False), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(a, one, b, one), torch.full((6, 8), 32.0))
    problem = GemmProblem(256, 512, 1024, kind="fp8_rows_promoted")
    done = deep_tile.precompile([(512, 1024, 1)], kind="fp8_rows_promoted")
    assert {config.kind for config in done.configs} == {"fp8_rows_promoted"}
    with pytest.raises(ValueError, match="is for kind='fp8_rows' .* this call for kind='fp8_rows_promo"):
        checks.checked_config(GemmConfig(128, 128, 4, kind="fp8_rows"), problem)


@each_device
@pytest.mark.parametrize("sizes", [(37, 130, 304), (300, 520, 1024)], ids=str)
@pytest.mark.parametrize("family", ["fp8", "fp8_1x128", "fp8_rows"])
def test_formats_of_fp8_are_mixed(family, sizes, device):
    """Each pair of formats is multiplied by its values; numbers rounded to e5m2 are e4m3 numbers, too."""
    a, a_scale, b, b_scale = make_product(family, *sizes, device=device).operands
    coarse = [x.float().to(torch.float8_e5m2) for x in (a, b)]
    fine = [x.float().to(torch.float8_e4m3fn) for x in coarse]
    wanted = scaled_gemm(fine[0], a_scale, fine[1], b_scale)
    for pair in ((coarse[0], fine[1]), (fine[0], coarse[1]), coarse):
        assert same_bits(scaled_gemm(pair[0], a_scale, pair[1], b_scale), wanted)


def test_pairs_of_dtypes_that_have_no_kernel_are_refused():
    a, b = torch.ones(4, 32).to(torch.float8_e5m2), torch.ones(8, 32, dtype=torch.int8)
    one = torch.ones(())
    for pair, text in (
        (
            (a, b),
            r"b must be torch\.float8_e4m3fn or torch\.float8_e5m2, since a is torch\.float8_e5m2; got torch\.int8",
        ),
        ((b, a), r"b must be torch\.int8, since a is torch\.int8; got torch\.float8_e5m2. To fix"),
        ((b.float(), a), r"a must be one of torch\.float8_e4m3fn, torch\.int8, torch\.float8_e5m2; got torch\.float32"),
    ):
        with pytest.raises(TypeError, match=text):
            scaled_gemm(pair[0], one, pair[1], one)
    with pytest.raises(
        TypeError, match=r"got torch\.float8_e5m2. To fix: deep_tile\.scaled_gemm takes .*, with scales"
    ):
        gemm(a, a)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_products_are_added_to_what_out_holds(kind):
    product = make_product(kind.name, 37, 130, 300)
    product = product._replace(call=partial(scaled_gemm if kind.name == "fp8" else product.call))
    for dtype in finishes.of_kind(kind):
        guarded = GuardedOut(37, 130, stride=133, dtype=dtype)
        before = (20 * torch.randn(37, 130)).to(dtype)
        guarded.out.copy_(before)
        added(product, before).check(guarded)
        plain = product.call(*product.operands, out_dtype=dtype)
        assert same_bits(guarded.out, before.double().add(plain.double()).to(dtype))
    with pytest.raises(ValueError, match="accumulate is True and out None: pass what"):
        product.call(*product.operands, accumulate=True)


def test_gradients_of_weights():
    product = make_product("fp8_1x128", 37, 130, 300)
    dy, dy_scale, x, x_scale = product.operands
    before = torch.randn(37, 130)
    added = before.clone()
    assert fp8_wgrad(dy, dy_scale, x, x_scale, added) is added
    plain = scaled_gemm(*product.operands, out_dtype=torch.float32)
    assert torch.equal(added, before + plain)
    written = torch.full((37, 130), float("nan"))
    assert torch.equal(fp8_wgrad(*product.operands, written, accumulate=False), plain)
    none = dy[:, :0], dy_scale[:, :0], x[:, :0], x_scale[:, :0]
    assert torch.equal(fp8_wgrad(*none, added), before + plain)
    assert not fp8_wgrad(*none, written, accumulate=False).any()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda g: {"dy": g["dy"].float()}, TypeError, "dy must be one of.*transposed_cast"),
        (lambda g: {"x": g["x"][:, :144]}, ValueError, "dy is .* and x is .*k differs"),
        (lambda g: {"x_scale": g["x_scale"][:1]}, ValueError, r"x_scale must have shape \(24, 2\)"),
        (lambda g: {"dy_scale": g["dy_scale"].t()}, ValueError, r"dy_scale must have shape.*dy_scale\.t\(\)"),
        (lambda g: {"x": torch.ones(24, 161).to(torch.float8_e4m3fn)[:, :160]}, ValueError, "x's row stride"),
        (lambda g: {"dy": g["dy"][0]}, ValueError, "dy must have shape"),
        (lambda g: {"out": None}, TypeError, "out must be a torch.Tensor"),
        (lambda g: {"out": g["out"].double()}, TypeError, "out must be one of .*torch.float32; got torch.float64"),
        (lambda g: {"accumulate": 1}, TypeError, "accumulate is 1"),
    ],
)
def test_wrong_gradients_are_refused(change, error, text):
    dy, dy_scale, x, x_scale = make_product("fp8_1x128", 8, 24, 160).operands
    guarded = GuardedOut(8, 24, dtype=torch.float32)
    right = {"dy": dy, "dy_scale": dy_scale, "x": x, "x_scale": x_scale, "out": guarded.out}
    with pytest.raises(error, match=f"(?s){text}"):
        fp8_wgrad(**right | change(right))
    guarded.assert_untouched()


def test_scales_of_rows_in_torchs_shapes():
    a, b = (torch.randint(-9, 9, (rows, 32), dtype=torch.int8) for rows in (6, 10))
    row, column = torch.rand(6) + 1, torch.rand(10) + 1
    wanted = scaled_gemm(a, row, b, column)
    for a_scale, b_scale in ((row[:, None], column[None]), (row.view(6, 1), column.repeat(2, 1).t()[:, 0])):
        assert same_bits(scaled_gemm(a, a_scale, b, b_scale), wanted)
    one, three = torch.ones(()), torch.full((1, 1), 3.0)
    assert same_bits(scaled_gemm(a, one, b, three), scaled_gemm(a, torch.ones(6), b, torch.full((10,), 3.0)))
    for scale, step in ((row, 1), (row[:, None], 1), (torch.rand(6, 3)[:, 1:2], 3), (one, 0), (three, 0)):
        assert dense._step(scale) == step


@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
def test_narrow_scales(dtype):
    a, b = (torch.randint(-9, 9, (rows, 32), dtype=torch.int8) for rows in (6, 10))
    scales = torch.tensor([[2.0]]).to(dtype)
    assert same_bits(scaled_gemm(a, scales, b, scales), scaled_gemm(a, scales.float(), b, scales.float()))
    assert same_bits(int8_gemm(a, scales.expand(6, 1), b, scales), scaled_gemm(a, scales, b, scales))


@each_device
@pytest.mark.parametrize("sizes", [(0, 8, 16), (8, 0, 16), (0, 0, 0), (5, 7, 0)])
def test_empty_sizes(sizes, device):
    m, n, k = sizes
    a, b = (torch.ones(rows, k, device=device).bfloat16() for rows in (m, n))
    out, guarded = gemm(a, b), GuardedOut(m, n, device=device)
    gemm(a, b, guarded.out)
    guarded.assert_guards_intact()
    assert out.shape == (m, n) and not out.any() and not guarded.out.any()


def good():
    a, b = make_dense_operands(8, 24, 64, torch.bfloat16)
    return {"a": a, "b": b}


REFUSED = [
    ("a", lambda g: {"a": g["a"].float()}, TypeError, r"torch\.float32.*a\.to\(torch\.bfloat16\)"),
    ("a", lambda g: {"a": g["a"].to(torch.float8_e4m3fn)}, TypeError, r"torch\.float8_e4m3fn.*scaled_gemm"),
    ("b", lambda g: {"b": g["b"].half()}, TypeError, r"torch\.float16.*both of one dtype"),
    ("a", lambda g: {"a": None}, TypeError, r"NoneType"),
    ("b", lambda g: {"b": torch._neg_view(g["b"])}, TypeError, r"negates.*resolve_neg"),
    ("a", lambda g: {"a": g["a"][0]}, ValueError, r"\(64,\)|shape"),
    ("b", lambda g: {"b": g["b"][:, :56]}, ValueError, r"k differs"),
    ("b", lambda g: {"b": torch.ones(64, 24).bfloat16()}, ValueError, r"k differs.*passed as b\.t\(\)"),
    ("b", lambda g: {"b": g["b"].repeat(1, 2)[:, ::2]}, ValueError, r"along k or along its rows.*contiguous"),
    ("b", lambda g: {"b": torch.ones(64, 28).bfloat16()[:, :24].t()}, ValueError,
     r"column stride.*it is 56.*\[k, 32\]"),
    ("b", lambda g: {"b": g["b"].as_strided((24, 64), (1, 8))}, ValueError, r"columns of b overlap.*8 for 24 rows"),
    ("b", lambda g: {"b": g["b"].as_strided((24, 64), (1, 1))}, ValueError, r"rows of b overlap.*1 for k = 64"),
    ("a", lambda g: {"a": torch.ones(64, 16).bfloat16()[:, 1:9].t()}, ValueError, r"2 bytes past one.*multiples of 8"),
    ("a", lambda g: {"a": torch.ones(8, 68).bfloat16()[:, :64]}, ValueError, r"multiple of 16 bytes; it is 136.*72"),
    ("a", lambda g: {"a": torch.ones(9, 72).bfloat16()[1:, 1:65]}, ValueError, r"2 bytes past one.*multiples of 8"),
    ("a", lambda g: {"a": g["a"].clone().requires_grad_()}, RuntimeError, r"gradient.*drop out.*detach"),
    ("bias", lambda g: {"bias": torch.ones(24, requires_grad=True)}, RuntimeError, r"gradient.*drop out.*detach"),
    ("b", lambda g: {"b": g["b"].clone().requires_grad_(), "out": None, "activation": "silu"}, RuntimeError,
     r"none with activation 'silu'.*apply it by torch"),
    ("out", lambda g: {"out": torch.empty(8, 24, dtype=torch.float64)}, TypeError, r"torch\.float64.*out=None"),
    ("out", lambda g: {"out": torch.empty(8, 25).bfloat16()}, ValueError, r"\(8, 24\).*\(8, 25\)"),
    ("out", lambda g: {"out": torch.empty(24, 8).bfloat16().t()}, ValueError, r"unit stride along n"),
    ("out", lambda g: {"out": torch.empty(1, 24).bfloat16().expand(8, 24)}, ValueError, r"overlap.*dense"),
    ("out", lambda g: {"out": torch.empty(8, 24).bfloat16(), "out_dtype": torch.float32}, TypeError,
     r"leave out_dtype"),
    ("out_dtype", lambda g: {"out_dtype": torch.int32}, TypeError, r"torch\.int32.*torch\.bfloat16"),
    ("out_dtype", lambda g: {"out_dtype": "bf16"}, TypeError, r"'bf16'"),
    ("config", lambda g: {"config": "128x128"}, TypeError, r"GemmConfig"),
    ("num_sms", lambda g: {"num_sms": 0}, ValueError, r"num_sms is 0"),
    ("num_sms", lambda g: {"num_sms": True}, TypeError, r"num_sms is True"),
    ("batch_invariant", lambda g: {"batch_invariant": 1}, TypeError, r"True or False"),
    ("constant_weights", lambda g: {"constant_weights": True, "pdl": False}, ValueError, r"pdl=True"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "change", "error", "text"), REFUSED)
def test_wrong_calls_are_refused(argument, change, error, text):
    right = good()
    changed = change(right)
    guarded = GuardedOut(8, 24)
    arguments = {**right, "out": guarded.out} | changed
    with pytest.raises(error, match=f"(?s){text}") as raised:
        gemm(**arguments)
    assert argument in str(raised.value)
    guarded.assert_untouched()
    assert gemm(**right).shape == (8, 24)


def test_configs_that_add_are_told_from_others():
    problem = GemmProblem(256, 256, 256, kind="fp8_1x128", output="fp32", accumulate=True)
    right = choose(problem)
    assert right.accumulate and right.name.endswith("_fp32_add") or "_fp32_add_" in right.name
    assert checks.checked_config(right, problem) is right
    with pytest.raises(ValueError, match="is for accumulate=True, and this call for accumulate=False"):
        checks.checked_config(right, problem._replace(accumulate=False))
    with pytest.raises(ValueError, match="accumulate is True and output 'e4m3'"):
        GemmConfig(128, 128, 4, output="e4m3", accumulate=True)
    assert bucket_key(problem) == "256x256x256_fp8_1x128_fp32_add"
    of_16_bits = problem._replace(kind="fp8", output="bf16")
    assert choose(of_16_bits).accumulate and bucket_key(of_16_bits) == "256x256x256_fp8_bf16_add"
    done = deep_tile.precompile([(256, 256, 1)], kind="bf16", accumulate=True)
    assert {(config.output, config.accumulate) for config in done.configs} == {("bf16", True)}
    with pytest.raises(ValueError, match="out_dtype torch.float8_e4m3fn, accumulate: no call takes these"):
        deep_tile.precompile([(256, 256, 1)], out_dtype=torch.float8_e4m3fn, accumulate=True)


GROUPED = {"kind": "fp8", "output": "bf16", "groups": Groups("offs", 2, 32)}


@pytest.mark.parametrize(
    ("change", "wrong", "said"),
    [
        ({}, {"kind": "fp8"}, "is for kind='fp8' and output='bf16'"),
        ({}, {"output": "fp32"}, "is for kind='bf16' and output='fp32'"),
        ({"kind": "fp16", "output": "fp16"}, {"kind": "bf16", "output": "bf16"}, "is for kind='bf16'"),
        ({"layout": "nn"}, {"layout": "tn"}, "is for layout='tn', and this call for layout='nn'"),
        ({"layout": "tt"}, {"layout": "nt"}, "is for layout='nt', and this call for layout='tt'"),
        (GROUPED, {"grouping": "none"}, "this call for grouping='offs'"),
        (GROUPED, {"grouping": "counts"}, "this call for grouping='offs'"),
        (GROUPED | {"groups": None}, {"grouping": "offs"}, "this call for grouping='none'"),
    ],
)
def test_configs_of_other_products_are_refused(change, wrong, said):
    problem = GemmProblem(256, 256, 256, kind="bf16")._replace(**change)
    right = choose(problem)
    assert checks.checked_config(right, problem) is right and right.layout == problem.layout
    with pytest.raises(ValueError, match=said):
        checks.checked_config(replace(GemmConfig(128, 128, 3, **own_of(problem)), **wrong), problem)


def own_of(problem):
    grouping = problem.groups.layout if problem.groups else "none"
    return {"kind": problem.kind, "output": problem.output, "layout": problem.layout, "grouping": grouping}


@pytest.mark.parametrize("kind", ["bf16", "fp8_rows_promoted"])
@pytest.mark.parametrize("options", [{"b_stages": 4}, {"block_n": 144, "pairs": True}])
def test_what_kinds_without_scales_of_blocks_do_not_have(options, kind):
    arguments = {"block_m": 128, "block_n": 128, "stages": 3, "store_buffers": 1} | options
    GemmConfig(**arguments)
    with pytest.raises(ValueError, match=f"kind is '{kind}'; such products are made without"):
        GemmConfig(**arguments, kind=kind)


each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
@each_dtype
def test_operands_lie_as_their_strides_say(layout, dtype):
    for m, n, k in ((37, 53, 203), (1, 24, 64), (24, 1, 64), (9, 7, 1)):
        operands = make_dense_operands(m, n, k, dtype, a_padding=16, layout=layout)
        assert dense._majors(*operands) == LAYOUTS[layout]
        guarded = GuardedOut(m, n, stride=n + 3, offset=1)
        assert gemm(*operands, guarded.out) is guarded.out
        guarded.assert_guards_intact()
        assert_accurate(guarded.out, exact_dense_product(*operands), ACCUMULATION_WITHOUT_SCALES)
        strides = dense.GEMM.layout((*operands, guarded.out, None), KINDS["bf16"])
        for x, major, stride in zip(operands, LAYOUTS[layout], strides[:2], strict=True):
            rows, step = (x.shape[0], x.stride(0)) if major == "k" else (k, x.stride(1))
            assert stride == step if rows > 1 else stride % 8 == 0


def test_strides_that_say_either_mean_along_k():
    """Single elements, dense single rows and columns: nothing is refused that TMA can read in some way."""
    ones = torch.ones(4096).bfloat16()
    for shape, strides, along in (
        ((1, 1), (1, 1), "k"),
        ((1, 1), (5, 3), "k"),
        ((1, 64), (64, 1), "k"),
        ((1, 64), (1, 1), "k"),
        ((1, 64), (1, 8), "rows"),
        ((64, 1), (8, 1), "k"),
        ((64, 1), (1, 1), "rows"),
        ((64, 1), (1, 64), "rows"),
        ((8, 8), (8, 1), "k"),
        ((8, 8), (1, 8), "rows"),
    ):
        x = ones.as_strided(shape, strides)
        assert checks.strides_problem("x", x) is None
        assert checks.lies_along_rows(x) == (along == "rows"), (shape, strides)
        assert torch.equal(gemm(x, x), x.float().mm(x.float().t()).bfloat16())


def test_operands_of_8_bits_lie_along_k():
    product = make_product("int8_rows", 16, 32, 64)
    a, a_scale, b, b_scale = product.operands
    with pytest.raises(ValueError, match=r"b must have a unit stride along k.*K-major: b\.contiguous"):
        scaled_gemm(a, a_scale, b.t().contiguous().t(), b_scale)
    with pytest.raises(ValueError, match="layout is 'nn'; operands of kind 'fp8' lie along k, as 'nt' says"):
        GemmConfig(128, 128, 4, layout="nn")
    with pytest.raises(ValueError, match="layout is 'xy'; supported are nt, nn, tn, tt"):
        GemmConfig(128, 128, 4, kind="bf16", layout="xy")


@each_layout
def test_layouts_have_choices_of_their_own_which_fp16_shares_with_bf16(layout):
    for m, n, k in ((1, 7168, 2048), (60, 2112, 7168), (512, 576, 128), (8192, 8192, 8192)):
        for tma_store, output in product_of_ways((True, False), ("fp16", "fp32")):
            problem = GemmProblem(m, n, k, tma_store=tma_store, kind="fp16", output=output, layout=layout)
            config = choose(problem)
            assert config in default_configs(tma_store, "fp16", output, layout=layout)
            of_bf16 = choose(problem._replace(kind="bf16", output=output.replace("fp16", "bf16")))
            assert config == replace(of_bf16, kind="fp16", output=output)


@each_layout
def test_a_config_of_the_user_is_given_the_layout(layout):
    problem = GemmProblem(8192, 8192, 8192, tma_store=False, kind="fp16", output="fp32", layout=layout)
    own = GemmConfig(64, 48, 3, kind="fp16")
    assert choose(problem, {bucket_key(bucketed(problem)): own}) == replace(
        own, layout=layout, tma_store=False, output="fp32"
    )


@each_layout
def test_precompile_and_supports_know_layouts(layout):
    done = deep_tile.precompile([(96, 64, 3)], kind="bf16", layouts=[layout])
    of_one_row = layout.replace("t", "n", 1) if layout[0] == "t" else layout
    wanted = {choose(GemmProblem(3, 96, 64, kind="bf16", layout=name)) for name in (layout, of_one_row)}
    assert set(done.configs) == wanted
    ask = partial(deep_tile.supports, dtype=torch.bfloat16, layout=layout)
    assert ask(8, 16, 64) == (True, "supported") == ask(8, 16, 64, a_stride=72, b_stride=72)
    wrong = {"nt": ask(8, 16, 60), "nn": ask(8, 20, 64), "tn": ask(12, 16, 64), "tt": ask(12, 16, 64)}[layout]
    assert not wrong[0] and "must be a multiple of 16 bytes" in wrong[1]
    assert ("column stride" in wrong[1]) == (layout != "nt")


def test_rows_of_16_bits_are_shorter():
    seen = deep_tile.supports(16, 16, 2**30, dtype=torch.bfloat16)
    assert seen == (False, "a is 16 by 1073741824; of torch.bfloat16 at most 1073741312 lie in a row")
    assert not deep_tile.supports(2**30, 16, 64, dtype=torch.float16, layout="tn")[0]
    assert deep_tile.supports(2**30, 16, 64, dtype=torch.float16)[0]


def test_wrong_layouts_are_refused():
    for layouts, error, text in (
        ("nn", TypeError, "layouts is 'nn'; pass names in a list"),
        (5, TypeError, "layouts is 5; pass names in a list"),
        (["nn", "x"], ValueError, "layout is 'x'; layouts are nt, nn, tn, tt"),
        ([1], ValueError, "layout is 1; layouts are nt"),
    ):
        with pytest.raises(error, match=text):
            deep_tile.precompile([(96, 64, 3)], kind="bf16", layouts=layouts)
    with pytest.raises(ValueError, match="layout is 'nn'; operands of int8 lie along k"):
        deep_tile.precompile([(96, 64, 3)], kind="int8", layouts=["nt", "nn"])
    assert deep_tile.supports(8, 16, 64, layout="nn") == (
        False,
        "layout is 'nn'; operands of float8_e4m3fn lie along k, as 'nt' says: pass contiguous ones",
    )
    assert "layout is 'n'" in deep_tile.supports(8, 16, 64, layout="n")[1]


# Gradients.

SIZES = [(5, 24, 64), (37, 13, 40), (1, 1, 8), (9, 40, 1), (0, 8, 8), (8, 0, 8), (8, 8, 0)]
OF_GPU = [*SIZES, (130, 264, 200), (300, 131, 1001), (1000, 2112, 576)]


def trained(m, n, k, dtype, layout="nt", device="cpu"):
    """Operands and a bias that require gradients."""
    a, b = make_dense_operands(m, n, k, dtype, layout=layout, device=device)
    return a.requires_grad_(), b.requires_grad_(), torch.randn(n, device=device, requires_grad=True)


def assert_gradients(found, grad, a, b, bias):
    """Against float64, of the output's gradient in the operands' dtype. A gradient that is one number makes equal rows,
    with so few different roundings that their mean may be the largest one."""
    of_a, of_b, of_bias = found
    most = torch.finfo(a.dtype).eps / 2 if grad.stride() == (0, 0) else 0.0
    narrow, a, b = grad.to(a.dtype), a.detach(), b.detach()
    assert of_a.dtype == of_b.dtype == a.dtype and of_bias.dtype == bias.dtype
    assert_accurate(of_a, exact_dense_product(narrow, b.t()), ACCUMULATION_WITHOUT_SCALES, most)
    assert_accurate(of_b, exact_dense_product(narrow.t(), a.t()), ACCUMULATION_WITHOUT_SCALES, most)
    assert torch.allclose(of_bias, grad.sum(0, dtype=torch.float32))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("device", "sizes"),
    [*(("cpu", sizes) for sizes in SIZES), *(pytest.param("cuda", sizes, marks=pytest.mark.gpu) for sizes in OF_GPU)],
    ids=str,
)
def test_gradients_of_a_product(device, sizes, compiled):
    """The gradient of an FP32 output is rounded to the operands' dtype."""
    torch._dynamo.reset()
    for dtype, out_dtype, layout in ((torch.bfloat16, None, "nt"), (torch.float16, torch.float32, "tn")):
        given = trained(*sizes, dtype, layout, device)

        def multiply(a, b, bias, out_dtype=out_dtype):
            return gemm(a, b, bias=bias, out_dtype=out_dtype)

        run = torch.compile(multiply, backend="aot_eager", fullgraph=True) if compiled else multiply
        out = run(*given)
        assert out.requires_grad and torch.equal(out.detach(), multiply(*(x.detach() for x in given)))
        for grad in (torch.randn_like(out), out.new_ones(()).expand_as(out)):
            assert_gradients(torch.autograd.grad(out, given, grad, retain_graph=True), grad, *given)


def test_gradients_of_some():
    a, b, bias = trained(5, 24, 64, torch.bfloat16)
    for needed in ((a,), (b,), (bias,), (b, bias)):
        given = [x if any(x is one for one in needed) else x.detach() for x in (a, b, bias)]
        out = gemm(given[0], given[1], bias=given[2])
        assert len(torch.autograd.grad(out.float().sum(), needed)) == len(needed)
    with torch.no_grad():
        assert not gemm(a, b).requires_grad
    out = gemm(a, b)
    a.data.mul_(1)
    with torch.no_grad():
        a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_are_products_of_other_layouts(monkeypatch):
    """No operand is copied, and a gradient only where no kernel can read it."""
    seen, original = [], dense.GEMM.define

    def look(given, options):
        seen.append((LAYOUT_NAMES[dense._majors(*given[:2])], *(x.data_ptr() for x in given[:2])))
        original(given, options)

    monkeypatch.setattr(dense.GEMM, "define", look)
    a, b, _ = trained(16, 24, 64, torch.bfloat16)
    out = gemm(a, b)
    grad = torch.randn_like(out)
    out.backward(grad)
    g, of_a, of_b = (x.data_ptr() for x in (grad, a, b))
    assert seen == [("nt", of_a, of_b), ("nn", g, of_b), ("tn", g, of_a)]
    for wrong in (
        torch.ones(16, 25).bfloat16()[:, 1:],
        torch.ones(16, 1).bfloat16().expand(16, 24),
        torch.ones(24).bfloat16().expand(16, 24),
        torch.ones(200).bfloat16().as_strided((16, 24), (8, 1)),
    ):
        del seen[1:]
        gemm(a, b).backward(wrong)
        assert [layout for layout, *_ in seen[1:]] == ["nt", "nn", "tn"]
        assert wrong.data_ptr() not in (seen[2][1], seen[3][1])


def test_gradients_in_batches_and_under_compiled_autograd():
    a, b, _ = trained(16, 24, 32, torch.bfloat16)
    grads = torch.randn(3, 16, 24, dtype=torch.bfloat16)
    out = gemm(a, b)
    (of_a,) = torch.autograd.grad(out, a, grads, is_grads_batched=True, retain_graph=True)
    for found, grad in zip(of_a, grads, strict=True):
        assert torch.equal(found, torch.autograd.grad(out, a, grad, retain_graph=True)[0])
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        out.backward(grads[0])
    assert torch.equal(a.grad, of_a[0])


def test_gradients_of_gradients():
    given = trained(5, 13, 24, torch.float16)[:2]

    def second(multiply, a, b):
        out = multiply(a, b)
        weights = torch.arange(out.numel()).view_as(out).to(out.dtype) / 50
        of_a, of_b = torch.autograd.grad((out * weights).square().sum() / 100, (a, b), create_graph=True)
        return torch.autograd.grad(of_a.square().sum() + of_b.sum(), (a, b))

    wanted = second(lambda a, b: a @ b.t(), *(x.detach().double().requires_grad_() for x in given))
    for found, exact in zip(second(gemm, *given), wanted, strict=True):
        assert (found.double() - exact).norm() <= 5e-3 * exact.norm()
    out = torch.ops.deep_tile.gemm(*given)
    with pytest.raises(RuntimeError, match="torch.ops.deep_tile.gemm has no second gradient. Call deep_tile.gemm"):
        torch.autograd.grad(out, given, torch.ones_like(out), create_graph=True)


def test_one_graph_with_gradients_serves_every_m():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    _, b, bias = trained(1, 24, 64, torch.bfloat16)
    compiled = torch.compile(lambda a: gemm(a, b, bias=bias), backend=counter, fullgraph=True, dynamic=True)
    for m in (7, 33, 4, 300):
        a = torch.randn(m, 64).bfloat16().requires_grad_()
        out = compiled(a)
        grad = torch.randn_like(out)
        assert_gradients(torch.autograd.grad(out, (a, b, bias), grad), grad, a, b, bias)
    assert counter.frame_count == 1


def test_ops_of_gradients():
    a, b, _ = trained(6, 16, 32, torch.bfloat16)
    torch.library.opcheck(torch.ops.deep_tile.gemm.default, (a, b))
    grad = torch.randn(6, 16).bfloat16()
    for x, transposed in ((b, False), (a, True)):
        torch.library.opcheck(torch.ops.deep_tile.gemm_gradient.default, (grad, x.detach(), transposed))
    for call in (torch.ops.deep_tile.gemm, torch.compile(gemm, backend="aot_eager", fullgraph=True)):
        with pytest.raises(Exception, match="a requires a gradient, and gemm has none with activation 'relu'"):
            call(a, b, activation="relu")


@each_dtype
def test_maps_count_k_in_bytes(dtype):
    """The kernel counts k in bytes, since it knows no format there."""
    a, b = make_dense_operands(300, 520, 203, dtype, a_padding=8)
    out = torch.empty(300, 520, dtype=torch.float32)
    options = checks.with_defaults(dense.Options(), a.device)._replace(num_sms=132)
    problem = dense.GEMM.problem((a, b, out, None), options)
    layout = dense.GEMM.layout((a, b, out, None), problem.product)
    assert (problem.m, problem.n, problem.k) == (300, 520, 203) and problem.tma_store
    config = GemmConfig(128, 256, 4, kind=problem.kind, output=problem.output)
    maps = plan.tensor_maps(problem, config, layout)
    by_place = {(at, name): layout for at, name, layout in maps}
    a_map, b_map = by_place[params.GEMM.offsets["a_maps"], "a"], by_place[params.GEMM.offsets["b_maps"], "b"]
    assert a_map[:4] == ("uint8", (406, 300), (2 * (208 + 8),), (128, 128))
    assert b_map[:4] == ("uint8", (406, 520), (2 * 208,), (128, 256))
    tail = by_place[params.GEMM.offsets["a_maps"] + params.MAP_BYTES, "a"]
    assert tail.box == (128, 300 - 256)
    out_map = by_place[params.GEMM.offsets["out_maps"], "out"]
    assert out_map[:5] == ("float32", (520, 300), (4 * 520,), (32, 64), 128)
    assert config.store_swizzle == 128 and config.block_k == 64
    assert len(plan.pack_params(problem, config, layout, early_b=False)) == params.GEMM.size


def test_single_rows_get_strides_that_tma_takes():
    a, b = torch.ones(1, 3).bfloat16(), torch.ones(1, 3).bfloat16()
    layout = dense.GEMM.layout((a.as_strided((1, 3), (1, 1)), b, torch.empty(1, 1), None), KINDS["bf16"])
    assert (layout.a_stride, layout.b_stride, layout.out_stride) == (8, 8, 4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("output", OUTPUTS)
def test_the_selector_gives_configs_of_the_kind(kind, output):
    for m, n, k in ((1, 7168, 2048), (60, 2112, 7168), (512, 576, 128), (8192, 8192, 8192)):
        for tma_store in (True, False):
            problem = GemmProblem(m, n, k, tma_store=tma_store, kind=kind.name, output=output)
            config = choose(problem)
            assert config in default_configs(tma_store, kind.name, output)
            assert (config.kind, config.output, config.tma_store) == (kind.name, output, tma_store)


def test_what_was_tuned_for_fp8_is_not_taken():
    fp8, bf16 = (GemmProblem(256, 512, 1024, kind=kind) for kind in ("fp8", "bf16"))
    tuned = {bucket_key(bucketed(fp8)): GemmConfig(64, 48, 3)}
    assert choose(fp8, tuned).block_n == 48
    assert choose(bf16, tuned) == choose(bf16)
    own = GemmConfig(64, 48, 3, kind="bf16")
    assert choose(bf16, {bucket_key(bucketed(bf16)): own}) == own


def test_precompile_compiles_what_the_selector_gives():
    done = deep_tile.precompile([(96, 64, 3)], kind="bf16", out_dtype=torch.float32)
    problem = GemmProblem(3, 96, 64, kind="bf16", output="fp32")
    assert done.configs == (choose(problem),)
    for wrong, text in (
        (
            {"kind": "bf16", "grouping": "k_offs"},
            "grouping is 'k_offs', kind 'bf16', out_dtype None: .* the others: fp8_1x128$",
        ),
        ({"kind": "fp64"}, "kind is 'fp64'; pass a dtype of operands, or one of fp8, bf16"),
        ({"kind": "bf16", "out_dtype": torch.int8}, r"out_dtype is torch\.int8"),
        (
            {"grouping": "offs", "accumulate": True},
            "kind 'fp8', out_dtype None, accumulate: no call takes these together; .* others: none$",
        ),
        ({"grouping": "offs", "activation": "relu"}, "kind 'fp8', out_dtype None, activation: no call takes these"),
    ):
        with pytest.raises(ValueError, match=text):
            deep_tile.precompile([(96, 64, 3)], **wrong)
