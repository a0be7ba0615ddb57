"""Bias, activation and format of products on the CPU: definitions, refusals, ops, layouts, the selector's kernels."""

import pytest
import torch
from helpers import GuardedOut, make_dense_operands, make_operands, make_product, same_bits, with_finish

import deep_tile
from deep_tile import GemmConfig, checks, finishes, fp8_gemm, gemm, interleave_gate_up, scaled_gemm
from deep_tile.kinds import ACTIVATIONS, BIASES, FAMILIES, OUTPUTS
from deep_tile.problem import GemmProblem
from deep_tile.reference import finished
from deep_tile.select import choose
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.usefixtures("quick_compiler")

FINISHES = [(bias, activation) for bias in BIASES for activation in ACTIVATIONS]

each_kind = pytest.mark.parametrize("kind", FAMILIES)


@each_kind
@pytest.mark.parametrize(("bias", "activation"), FINISHES)
def test_they_are_their_definition(kind, bias, activation):
    for (m, n, k), output in zip(((1, 16, 1), (37, 144, 300), (9, 48, 128)), OUTPUTS, strict=True):
        n = n if activation == "swiglu" else n - 3
        product = with_finish(make_product(kind, m, n, k, padding=16), bias, activation)
        columns = n // 2 if activation == "swiglu" else n
        dtype = getattr(torch, OUTPUTS[output].dtype)
        product.check(GuardedOut(m, columns, stride=columns + 3, offset=1, dtype=dtype))
        assert product.call(*product.operands, out_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_are_torchs(activation):
    x = torch.randn(5, 33, dtype=torch.float64) * 3
    x[0, :3] = torch.tensor([0.0, float("nan"), float("inf")])
    functional, form = activation.removesuffix("_tanh"), {"approximate": "tanh"} if "tanh" in activation else {}
    wanted = getattr(torch.nn.functional, functional)(x, **form)
    assert torch.equal(finished(x, None, activation), wanted) or torch.allclose(
        finished(x, None, activation), wanted, equal_nan=True, rtol=1e-14
    )


def test_gelu_of_minus_infinity_is_0_as_kernels_have_it():
    assert finished(torch.tensor([[-torch.inf, -100.0]]).double(), None, "gelu").tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("sizes", [(5, 16, 0), (0, 16, 128), (5, 0, 128)])
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_of_nothing_is_what_becomes_of_the_bias(sizes, activation):
    m, n, k = sizes
    operands, bias = make_operands(m, n, k), torch.randn(n)
    out = fp8_gemm(*operands, bias=bias, activation=activation, out_dtype=torch.float32)
    wanted = finished(torch.zeros(m, n, dtype=torch.float64), bias, activation)
    assert torch.equal(out, wanted.float())
    a, b = torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16()
    if k == 0:
        assert torch.equal(gemm(a, b, bias=bias, activation=activation, out_dtype=torch.float32), wanted.float())


def test_gates_and_what_they_let_through_are_interleaved():
    gate, up = torch.randn(24, 40), torch.randn(24, 40)
    weight = interleave_gate_up(torch.cat([gate, up]))
    assert weight.shape == (48, 40) and weight.is_contiguous()
    for i in range(24):
        assert torch.equal(weight[i // 8 * 16 + i % 8], gate[i])
        assert torch.equal(weight[i // 8 * 16 + 8 + i % 8], up[i])
    x = torch.randn(7, 40)
    bias = torch.randn(48)
    out = gemm(
        x.bfloat16(), weight.bfloat16(), bias=interleave_gate_up(bias), activation="swiglu", out_dtype=torch.float32
    )
    sums = x.bfloat16().float() @ torch.cat([gate, up]).bfloat16().float().t() + bias
    torch.testing.assert_close(out, torch.nn.functional.silu(sums[:, :24]) * sums[:, 24:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"x is \[24\]; it must have a multiple of 16 rows"):
        interleave_gate_up(torch.ones(24))


def good():
    return {"bias": torch.randn(48), "activation": "silu"}


REFUSED = [
    ({"bias": torch.ones(47)}, ValueError, r"bias must be \[n\] = \[48\]; got \[47\]"),
    ({"bias": torch.ones(1, 48)}, ValueError, r"bias must be \[n\] = \[48\]; got \[1, 48\]"),
    ({"bias": torch.ones(48).double()}, TypeError, r"bias must be one of torch\.bfloat16.*bias\.float\(\)"),
    ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor or None; got float"),
    ({"bias": torch._neg_view(torch.ones(48))}, TypeError, "bias is a view that torch negates"),
    ({"bias": torch.ones(48, requires_grad=True)}, RuntimeError, "bias requires a gradient"),
    ({"bias": torch.ones(48, device="meta")}, ValueError, "bias is on meta but b is on cpu"),
    ({"activation": "tanh"}, ValueError, "activation is 'tanh'; pass one of relu, gelu, gelu_tanh, silu, swiglu"),
    ({"activation": "none"}, ValueError, "activation is 'none'; pass one of relu"),
    ({"activation": ["relu"]}, TypeError, r"activation is \['relu'\], of type list; pass a name"),
    ({"activation": torch.relu}, TypeError, "activation is .* pass a name"),
    ({"activation": "swiglu"}, ValueError, r"out must have shape \[m, n / 2\] = \(9, 24\); got \(9, 48\)"),
    ({"activation": "swiglu", "out": None, "out_dtype": torch.bfloat16, "b": 40, "bias": None}, ValueError,
     "'swiglu' and n is 40.*interleave_gate"),
    ({"out": torch.ones(9, 48).double()}, TypeError, "out must be one of.*float64"),
    ({"out": torch.ones(9, 48), "out_dtype": torch.float16}, TypeError, "leave out_dtype out"),
]  # fmt: skip


@pytest.mark.parametrize("finish", [{"bias": torch.ones(24)}, {"activation": "relu"}], ids=str)
def test_what_is_added_to_has_none(finish):
    a, b = make_dense_operands(8, 24, 64, torch.bfloat16)
    guarded = GuardedOut(8, 24, dtype=torch.float32)
    with pytest.raises(ValueError, match="accumulate is True, and a bias or an activation is given"):
        gemm(a, b, guarded.out, accumulate=True, **finish)
    guarded.assert_untouched()
    with pytest.raises(ValueError, match="accumulate is True; a product is added to `out` without"):
        GemmConfig(128, 128, 3, output="fp32", accumulate=True, bias="bf16")
    with pytest.raises(ValueError, match="accumulate is True, bias torch.bfloat16"):
        deep_tile.precompile([(96, 64, 3)], out_dtype=torch.float32, accumulate=True, bias=torch.bfloat16)


@each_kind
@pytest.mark.parametrize(("change", "error", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_wrong_finishes_are_refused(kind, change, error, text):
    change = dict(change)
    product = make_product(kind, 9, change.pop("b", 48), 160)
    guarded = GuardedOut(9, 48)
    call = product.call
    with pytest.raises(error, match=f"(?s){text}"):
        call(*product.operands, **{"out": guarded.out} | good() | change)
    guarded.assert_untouched()


def test_a_config_of_another_finish_is_refused():
    problem = GemmProblem(64, 256, 256, bias="bf16", activation="gelu")
    right = GemmConfig(128, 128, 4, bias="bf16", activation="gelu")
    assert checks.checked_config(right, problem) is right
    for wrong in (GemmConfig(128, 128, 4), GemmConfig(128, 128, 4, bias="fp32", activation="gelu")):
        with pytest.raises(ValueError, match=f"{wrong.name} is for bias='{wrong.bias}' and activation="):
            checks.checked_config(wrong, problem)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bias": "int8"}, "bias is 'int8'; supported are none, bf16"),
        ({"activation": "tanh"}, "activation is 'tanh'; supported are none, relu"),
        ({"bias": "bf16", "grouping": "offs"}, "groups are multiplied without bias and activation"),
        ({"activation": "silu", "grouping": "counts"}, "groups are multiplied without bias and activation"),
        ({"activation": "swiglu", "block_n": 144}, "which makes one column of two; of a tile's 144 columns in 1 K"),
        ({"activation": "swiglu", "block_n": 64, "split_k": 4}, "in 4 K parts it needs a multiple of 32 each"),
    ],
)
def test_what_no_kernel_does(options, text):
    arguments = {"block_m": 128, "block_n": 128, "stages": 3, "store_buffers": 1} | options
    with pytest.raises(ValueError, match=text):
        GemmConfig(**arguments)


def test_names_tell_finishes_apart():
    config = GemmConfig(128, 256, 4, 2, 1, tma_store=False, bias="bf16", activation="gelu_tanh")
    assert config.name == "fp8_gemm_128x256x128_s4_c2x1_bias_bf16_gelu_tanh_any"
    assert config.timed_name == "fp8_gemm_128x256x128_s4_c2x1"
    names = {GemmConfig(128, 128, 4, bias=bias, activation=activation).name for bias, activation in FINISHES}
    assert len(names) == len(FINISHES)


@each_kind
@pytest.mark.parametrize(("bias", "activation"), FINISHES)
def test_the_selector_gives_configs_of_the_finish(kind, bias, activation):
    for m, n, k in ((1, 7168, 2048), (60, 2112, 7168), (512, 576, 100), (8192, 8192, 8192)):
        for output in OUTPUTS:
            problem = GemmProblem(m, n, k, kind=kind, output=output, bias=bias, activation=activation)
            config = choose.choose(problem)
            assert choose.what_is_made(config) == (kind, output, False, bias, activation, "nt")
            assert config in default_configs(True, kind, output, False, bias, activation)


def test_a_finish_takes_what_was_measured_best_without():
    plain = GemmProblem(4096, 4096, 7168)
    chosen = choose.choose(plain)
    for bias, activation in (("bf16", "none"), ("fp32", "gelu_tanh"), ("none", "swiglu")):
        config = choose.choose(plain._replace(bias=bias, activation=activation))
        assert (config.block_m, config.block_n, config.cluster_m) == (chosen.block_m, chosen.block_n, chosen.cluster_m)
    assert choose.choose(plain._replace(output="fp16")).timed_name == chosen.name


def test_what_was_tuned_gets_the_finish_of_the_call():
    plain = GemmProblem(256, 512, 1024)
    tuned = {choose.bucket_key(choose.bucketed(plain)): GemmConfig(64, 48, 3)}
    assert choose.choose(plain._replace(activation="gelu"), tuned) == GemmConfig(64, 48, 3, activation="gelu")
    assert choose.choose(plain._replace(activation="swiglu"), tuned).activation == "swiglu"


def test_precompile_compiles_what_the_selector_gives():
    done = deep_tile.precompile([(96, 64, 3)], bias=torch.float32, activation="swiglu", out_dtype=torch.float16)
    problem = GemmProblem(3, 96, 64, output="fp16", bias="fp32", activation="swiglu")
    assert done.configs == (choose.choose(problem),)
    for wrong, error, text in (
        ({"bias": torch.int8}, ValueError, r"bias is torch\.int8; pass its dtype"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
        ({"activation": "relu", "grouping": "offs"}, ValueError, "activation: no call takes these together"),
    ):
        with pytest.raises(error, match=text):
            deep_tile.precompile([(96, 64, 3)], **wrong)


@each_kind
def test_ops_have_a_finish(kind):
    torch._dynamo.reset()  # it counts the kinds before this one as compilations of the same function
    product = make_product(kind, 6, 32, 160)
    bias = torch.randn(32)
    options = {"bias": bias, "activation": "swiglu", "out_dtype": torch.bfloat16}
    traced = torch.compile(
        lambda *operands: product.call(*operands, **options) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(traced(*product.operands), product.call(*product.operands, **options) + 1)
    op, keywords = product.op
    keywords = keywords | {"activation": "swiglu", "out_dtype": torch.bfloat16}
    operands = tuple(x.contiguous() for x in product.operands)
    for test in ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
        torch.library.opcheck(op.default, (*operands, bias), keywords, test_utils=test)
    out = torch.empty(6, 16)
    op.out(*operands, out, bias, **keywords | {"out_dtype": None})
    assert same_bits(out, product.call(*product.operands, **options | {"out_dtype": torch.float32}))


def test_ops_refuse_what_calls_refuse():
    a, b = make_dense_operands(6, 24, 32, torch.bfloat16)
    traced = torch.compile(lambda **options: gemm(a, b, **options), backend="aot_eager", fullgraph=True)
    for options, text in (
        ({"activation": "swiglu"}, "n is 24"),
        ({"bias": torch.ones(23)}, r"bias must be \[n\]"),
    ):
        with pytest.raises(Exception, match=text):
            traced(**options)


def test_a_bias_has_a_stride_and_a_place(run_pretending):
    """The kernel gets the bias's address and stride; a call with a bias does not take a launch without one."""
    shown, launched = run_pretending("""
bias = torch.randn(128, 3)[:, 1]
for options in ({}, {"bias": bias}, {"bias": bias}, {"bias": bias, "activation": "gelu"}, {}):
    attempt(fp8_gemm, **good, **options)
show(bias.data_ptr())
""")
    first = "prepare_launch launch"
    assert shown[:-1] == [first, first, "launch_known", first, "launch_known"]
    biases = [(launch.params["bias"], launch.params["bias_stride"]) for launch in launched]
    there, nowhere = (int(shown[-1]), 3), (0, 0)
    assert biases == [nowhere, there, there, there, nowhere]


def test_names_of_formats():
    assert finishes.for_problem(torch.ones(3).half(), "relu") == {"bias": "fp16", "activation": "relu"}
    assert finishes.for_problem(None, None) == {"bias": "none", "activation": "none"}


def test_scales_of_rows_and_a_bias():
    a, b = (torch.randint(-9, 9, (rows, 32), dtype=torch.int8) for rows in (6, 10))
    bias = torch.randn(10)
    out = scaled_gemm(a, torch.full((), 2.0), b, torch.full((), 0.5), bias=bias, out_dtype=torch.float32)
    assert torch.equal(out, (a.double() @ b.double().t() + bias.double()).float())
