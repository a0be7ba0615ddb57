"""What no call takes, given to the functions that bad_calls.py does not know: an error of ours, never another one, a
crash or a result."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import freed

import deep_tile
from deep_tile import cast, distributed, nn, params, train
from deep_tile.compat import deep_gemm
from deep_tile.config import SCALE_BLOCK
from deep_tile.integrations import transformers

M, N, K, G = 6, 144, 256, 3
FP8 = torch.float8_e4m3fn


@cache
def arguments() -> dict[str, tuple[Callable, dict[str, Any]]]:
    """Functions and right arguments, by name."""
    torch.manual_seed(0)
    x, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    (a, a_scale), (b, b_scale) = deep_tile.per_token_cast_to_fp8(x), deep_tile.per_block_cast_to_fp8(w)
    codes, exponents = torch.randint(0, 256, (G, N, K // 2), dtype=torch.uint8), torch.full((G, N, K // 32), 120).byte()
    weight = {"weight": codes[0], "scale": exponents[0]}
    made, of_groups = deep_tile.pack_weight(*weight.values()), deep_tile.pack_weight(codes, exponents)
    operands, offs = {"a": a, "a_scale": a_scale}, torch.tensor([2, 4, 6], dtype=torch.int32)
    q, kv = torch.randn(5, 32, 128).to(FP8), torch.randn(70, 128).to(FP8)
    ranges = {"starts": torch.zeros(5, dtype=torch.int32), "ends": torch.full((5,), 70, dtype=torch.int32)}
    pages = {"q": torch.randn(2, 2, 32, 128).to(FP8), "cache": torch.zeros(4, 64, 1, 132, dtype=torch.uint8)}
    of_pages = {"lengths": torch.tensor([70, 100], dtype=torch.int32), "block_table": torch.ones(2, 2).int()}
    of_heads = torch.randn(5, 2, 64).bfloat16()
    chosen = {"chosen": torch.randint(0, 4, (M, 2)), "shares": torch.rand(M, 2)}
    experts = {"w_gate_up": torch.randn(4, 2 * 128, K).bfloat16(), "w_down": torch.randn(4, K, 128).bfloat16()}
    d = torch.zeros(M, N).bfloat16()
    return {
        "packed_gemm": (deep_tile.packed_gemm, operands | {"b": made.weight, "b_scale": made.scale}),
        "packed_grouped_gemm": (
            deep_tile.packed_grouped_gemm,
            operands | {"b": of_groups.weight, "b_scale": of_groups.scale, "offs": offs},
        ),
        "thin_gemm": (deep_tile.thin_gemm, {"a": x, "b": w.float(), "out": torch.zeros(M, N)}),
        "prenorm_gemm": (deep_tile.prenorm_gemm, {"a": x, "b": w.float(), "sqr_sum": torch.zeros(M)}),
        "split_weight": (deep_tile.split_weight, {"b": w.float()}),
        "einsum": (deep_tile.einsum, {"expr": "bhd,hdr->bhr", "a": of_heads, "b": torch.randn(2, 64, 32).bfloat16()}),
        "pack_weight": (deep_tile.pack_weight, weight),
        "unpack_weight": (deep_tile.unpack_weight, {"weight": made.weight, "scale": made.scale}),
        "to_blocks": (deep_tile.to_blocks, weight),
        "pad_shard": (deep_tile.pad_shard, {"weight": b, "scale": b_scale}),
        "interleave_gate_up": (deep_tile.interleave_gate_up, {"x": w}),
        "mqa_logits": (
            deep_tile.mqa_logits,
            {"q": q, "kv": kv, "kv_scale": torch.rand(70), "weights": torch.rand(5, 32), **ranges},
        ),
        "paged_mqa_logits": (deep_tile.paged_mqa_logits, {**pages, "weights": torch.rand(4, 32), **of_pages}),
        "swiglu_gradient_cast_both": (
            deep_tile.swiglu_gradient_cast_both,
            {"dh": torch.randn(M, 128).bfloat16(), "gate_up": x, "share": torch.rand(M)},
        ),
        "quantize_weight": (deep_tile.quantize_weight, {"w": w}),
        "from_fp8": (nn.Linear.from_fp8, {"weight": b, "weight_scale_inv": b_scale, "bias": torch.rand(N)}),
        "linear": (train.linear, {"x": x, "weight": w, "bias": torch.rand(N)}),
        "experts": (train.experts, {"x": x, **chosen, **experts}),
        "bf16_gemm_nt": (deep_gemm.bf16_gemm_nt, {"a": x, "b": w, "d": d}),
        "tf32_hc_prenorm_gemm": (
            deep_gemm.tf32_hc_prenorm_gemm,
            {"a": x, "b": w.float(), "d": d.float(), "sqr_sum": torch.zeros(M)},
        ),
    }


TENSORS = {
    name: [argument for argument, value in given.items() if isinstance(value, torch.Tensor)]
    for name, (_, given) in arguments().items()
}
NO_TENSORS = {"an int": 3, "a string": "x", "a list": [1.0], "an array": np.zeros(3), "an object": object()}
OTHER_NAMES = {("linear", "weight"): "weight|w", ("tf32_hc_prenorm_gemm", "d"): "d|out", ("bf16_gemm_nt", "d"): "d|out"}
"""What errors call an argument, where they come from a function that names it otherwise."""

WRONG = {
    "of no dimension": lambda x: x.flatten()[0],
    "of 5 dimensions": lambda x: x.reshape(1, 1, *x.shape, *(1,) * (3 - x.dim())),
    "without storage": freed,
    "bool": lambda x: torch.zeros(x.shape, dtype=torch.bool),
    "complex": lambda x: torch.zeros(x.shape, dtype=torch.complex64),
    "of other rows": lambda x: torch.cat([x.view(torch.uint8)] * 2)[: len(x) + 1].view(x.dtype),
}

FREE = {
    *(
        (call, name, "of other rows")
        for call, name in (("split_weight", "b"), ("quantize_weight", "w"), ("einsum", "a"))
    ),
    *((call, name, "of other rows") for call, name in (("linear", "x"), ("linear", "weight"), ("pad_shard", "weight"))),
    *((call, name, "of other rows") for call in ("prenorm_gemm", "thin_gemm") for name in "ab"),
    ("paged_mqa_logits", "cache", "of other rows"),
    ("linear", "x", "of 5 dimensions"),
    *(("interleave_gate_up", "x", what) for what in ("of 5 dimensions", "bool", "complex")),
}
"""Changes that leave a call right, or that other arguments that may be left out would have to contradict."""


@pytest.mark.parametrize("call", TENSORS)
def test_right_arguments_are_taken(call):
    function, given = arguments()[call]
    function(**given)


@pytest.mark.parametrize("what", NO_TENSORS)
@pytest.mark.parametrize("call", TENSORS)
def test_what_is_no_tensor(call, what):
    function, given = arguments()[call]
    for name in TENSORS[call]:
        with pytest.raises(TypeError, match=rf"\b({OTHER_NAMES.get((call, name), name)})\b"):
            function(**given | {name: NO_TENSORS[what]})


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("call", TENSORS)
def test_wrong_tensors(call, what):
    for name in TENSORS[call]:
        function, given = arguments()[call]
        if (call, name, what) in FREE:
            continue
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            function(**given | {name: WRONG[what](given[name])})
        assert raised.type in (TypeError, ValueError, RuntimeError), raised.value
        assert not re.search("aten::|INTERNAL ASSERT|not implemented for", str(raised.value)), raised.value


# fmt: off
WRONG_VALUES = [
    ("einsum", {"out_dtype": "float32"}, TypeError, "out_dtype is 'float32'"),
    ("einsum", {"out": torch.zeros(5, 2, 32), "out_dtype": torch.bfloat16}, TypeError, "out_dtype is torch.bfloat16"),
    ("einsum", {"accumulate": 0}, TypeError, "accumulate is 0"),
    ("einsum", {"out": torch.zeros(5, 2, 32, requires_grad=True)}, RuntimeError, "out requires a gradient"),
    ("einsum", {"out": torch.zeros(300).as_strided((5, 2, 32), (50, 24, 1))}, ValueError, "elements of out share"),
    *((call, {"clean": value}, TypeError, "clean is")
      for call in ("mqa_logits", "paged_mqa_logits") for value in ("no", 0, [])),
    *((call, {"columns": value}, TypeError, "columns is")
      for call in ("mqa_logits", "paged_mqa_logits") for value in (np.int64(3), 3.0, True)),
    *((call, {"format": []}, ValueError, "format is") for call in ("pack_weight", "to_blocks", "from_fp8")),
    ("pack_weight", {"scale": torch.ones(N, K // 128).int(), "format": "int4_128"}, TypeError, "scale is torch.int32"),
    ("unpack_weight", {"scale": torch.ones(2, 2, dtype=torch.int32)}, ValueError, "scale torch.int32"),
    ("unpack_weight", {"scale": torch.ones(3, 2)}, ValueError, r"scale torch.float32 \[3, 2\]"),
    ("from_fp8", {"bias": torch.rand(N - 1)}, ValueError, "bias is"),
    ("bf16_gemm_nt", {"d": None}, TypeError, "d is a NoneType"),
    ("tf32_hc_prenorm_gemm", {"sqr_sum": None}, TypeError, "sqr_sum is a NoneType"),
]
# fmt: on


@pytest.mark.parametrize("case", WRONG_VALUES, ids=lambda case: f"{case[0]} {[*case[1]]} {case[3]}")
def test_wrong_values(case):
    call, changed, error, text = case
    function, given = arguments()[call]
    with pytest.raises(error, match=text):
        function(**given | changed)


@pytest.mark.parametrize(
    ("expr", "a", "b", "out", "text"),
    [
        ("bhd,bhr->hdr", (5, 2, 4), (5, 2, 8), (2, 4, 8), "a's heads lie 8 bytes apart.* pad .* multiple of 8 and"),
        ("bhd,bhr->hdr", (5, 2, 8), (5, 2, 4), (2, 8, 4), "b's heads lie 8 bytes apart"),
        ("bhr,hdr->bhd", (300, 2, 4), (2, 16, 4), (300, 2, 16), "a's heads lie 8 bytes apart"),
        ("bhd,hdr->bhr", (1, 2, 3), (2, 3, 8), (1, 2, 8), "a's heads lie 6 bytes apart"),
    ],
)
def test_no_head_is_multiplied_where_the_second_is_refused(expr, a, b, out, text):
    a, b, out = torch.randn(a).bfloat16(), torch.randn(b).bfloat16(), torch.full(out, 7.0)
    with pytest.raises(ValueError, match=text):
        deep_tile.einsum(expr, a, b, out)
    assert (out == 7).all()


def test_heads_of_gradients_are_apart():
    a = torch.randn(5, 2, 8).bfloat16()
    with pytest.raises(ValueError, match="elements of out share memory"):
        deep_tile.einsum("bhd,bhr->hdr", a, a, torch.zeros(8, 8).expand(2, 8, 8))


@pytest.mark.parametrize("which", ["a", "b"])
def test_groups_without_rows_have_any_stride(which):
    """torch says 0 of an expanded dimension."""
    given = {"a": torch.ones(2, 3, 64).bfloat16(), "b": torch.ones(2, 16, 64).bfloat16()}
    given[which] = given[which][:, :1].expand(2, 1, 64).as_strided((2, 0, 64), (64, 0, 1))
    assert deep_tile.grouped_gemm(**given).shape == (2, *(len(x[0]) for x in given.values()))


@pytest.mark.parametrize("splits", [None, (0, 8, 0), (8, 8), (8, "8", 8), (-8, 8, 16)], ids=str)
def test_head_splits(splits):
    _, given = arguments()["packed_gemm"]
    pair = given["a"], given["a_scale"]
    with pytest.raises(ValueError, match="head_splits is"):
        deep_gemm.fp8_gemm_nt_skip_head_mid(pair, pair, torch.zeros(M, M).bfloat16(), splits)


def test_masked_groups_need_their_rows():
    x, w = torch.randn(G, M, K).bfloat16(), torch.randn(G, N, K).bfloat16()
    d, rows = torch.zeros(G, M, N).bfloat16(), torch.ones(G, dtype=torch.int32)
    with pytest.raises(TypeError, match="masked_m is a NoneType"):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(x, w, d, None, 3)
    with pytest.raises(TypeError, match="expected_m is 'all'"):
        deep_gemm.m_grouped_bf16_gemm_nt_masked(x, w, d, rows, "all")


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, -1, 8), (8, 8, 2.0), ("8", 8, 8)], ids=str)
def test_predictions_are_for_layers(sizes):
    with pytest.raises((TypeError, ValueError), match="is"):
        train.predict(*sizes)


ASKED = {
    "explain": (64, 128, 256),
    "explain_groups": (4, 64, 128, 256),
    "precompile_logits": (64, 128),
    "precompile_thin": (),
    "precompile": ([(128, 256, 8)],),
}
# fmt: off
WRONG_QUESTIONS = [
    *(("explain", "call", value, ValueError) for value in ("", False, 0, {}, torch.zeros(2))),
    *(("explain", name, value, ValueError) for name in ("output", "bias") for value in ([64], {}, torch.zeros(2))),
    *(("explain", "activation", value, TypeError) for value in (["relu"], {"m": 1}, torch.zeros(2))),
    *(("explain_groups", "kind", value, ValueError) for value in ([64], {"m": 1}, torch.zeros(2))),
    *(("precompile_logits", "paged", value, TypeError) for value in (1, "no", [])),
    ("precompile_logits", "out_dtype", [], ValueError),
    *((call, "workers", value, ValueError) for call in (*ASKED,)[2:] for value in (0, -1, 2.0, "8", True)),
]
# fmt: on


@pytest.mark.parametrize(("call", "name", "value", "error"), WRONG_QUESTIONS, ids=str)
def test_questions_about_calls_are_refused_by_name(call, name, value, error):
    with pytest.raises(error, match=f"^({name} is|operands are)"):
        getattr(deep_tile, call)(*ASKED[call], **{name: value})


LAYERS = {
    "Linear": (nn.Linear, (16, 32)),
    "PackedLinear": (nn.PackedLinear, (64, 48)),
    "PackedExperts": (nn.PackedExperts, (2, 64, 96)),
}


@pytest.mark.parametrize("make, sizes", LAYERS.values(), ids=[*LAYERS])
def test_layers_have_sizes(make, sizes):
    layer = make(*map(np.uint8, sizes))
    assert [x.shape for x in layer.state_dict().values()] == [x.shape for x in make(*sizes).state_dict().values()]
    for place in range(len(sizes)):
        for wrong, error in ((None, TypeError), ("64", TypeError), (-16, ValueError), (2**70, ValueError)):
            with pytest.raises(error, match=r"^\w+ is .*; pass"):
                make(*sizes[:place], wrong, *sizes[place + 1 :])


def test_rows_of_many_experts_fit():
    """2 * 255 + 8 rows of 2 experts: more than the number of experts' type holds."""
    chosen = torch.zeros(4, 2, dtype=torch.int64)
    made, wanted = (deep_tile.sort_by_expert(chosen, number(2), alignment=128) for number in (np.uint8, int))
    assert all(map(torch.equal, made, wanted))


def test_sizes_may_be_numpys():
    assert deep_tile.precompile_logits(np.uint8(64), np.int64(128), queries=np.int8(1)) == 1
    assert train.predict(np.int64(64), 64, 64) == train.predict(64, 64, 64)
    assert deep_tile.explain_groups(np.int64(8), 64, 512, 512)["why"]


@pytest.mark.parametrize("biases", [3, torch.zeros(N)], ids=["an int", "a tensor"])
def test_linears_take_lists(biases):
    _, given = arguments()["linear"]
    with pytest.raises(TypeError, match="biases is a"):
        train.linears(given["x"], [given["weight"]], biases)
    with pytest.raises(TypeError, match="weights is a Tensor"):
        train.linears(given["x"], given["weight"])


def test_no_scale_is_written_over_another():
    """[2, 4] scales at strides (1, 1) are five numbers."""
    target = torch.zeros(8).as_strided((2, 4), (1, 1))
    with pytest.raises(ValueError, match="elements of scale_out share memory.*contiguous"):
        deep_tile.per_token_cast_to_fp8(torch.randn(2, 512), scale_out=target)
    apart = torch.zeros(16).as_strided((2, 4), (1, 3))
    deep_tile.per_token_cast_to_fp8(torch.randn(2, 512), scale_out=apart)
    assert (apart > 0).all()


def test_packed_layers_take_whole_rows():
    """A row that lacks some of its last K block has as many K blocks."""
    with pytest.raises(ValueError, match=r"x is \[3, 127\]; this layer takes \[..., 128\]"):
        nn.PackedLinear(128, 48)(torch.randn(3, 127))
    with pytest.raises(TypeError, match="x is a .*NoneType"):
        nn.PackedLinear(128, 48)(None)
    assert nn.PackedLinear(0, 16)(torch.zeros(3, 0)).shape == (3, 16)
    layer, chosen = nn.PackedExperts(2, 128, 64), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x is \[3, 127\]"):
        layer(torch.randn(3, 127).bfloat16(), chosen, torch.ones(3, 1))


ODD_TENSORS = {
    "sparse": lambda: torch.eye(4, 128).to_sparse(),
    "sparse rows": lambda: torch.eye(4, 128).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3, 128), torch.randn(2, 128)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(3, 128), torch.randn(2, 128)], layout=torch.jagged),
    "lazy": torch.nn.parameter.UninitializedParameter,
    "double": lambda: torch.randn(4, 128).double(),
}


@pytest.mark.parametrize("make", ODD_TENSORS.values(), ids=[*ODD_TENSORS])
def test_packed_layers_refuse_odd_tensors_by_name(make):
    layer, one = nn.PackedExperts(2, 128, 64), torch.zeros(4, 128, dtype=torch.int64)
    for call in (nn.PackedLinear(128, 48), lambda x: layer(x, one[:, :1], torch.ones(4, 1))):
        with pytest.raises(TypeError, match="^x is a"):
            call(make())
    with pytest.raises(TypeError, match="^shares is a"):
        layer(torch.randn(4, 128).bfloat16(), one, make())


@pytest.mark.parametrize("shares", [None, 3, [1.0], torch.ones(4, 1).cfloat(), torch.ones(4, 1).int()], ids=str)
def test_shares_are_wide_numbers(shares):
    layer, chosen = nn.PackedExperts(2, 128, 64), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(TypeError, match="shares is a .*; it must be a tensor of bfloat16 or"):
        layer(torch.randn(4, 128).bfloat16(), chosen, shares)


@pytest.mark.parametrize(("tokens", "choices"), [(3, 4), (5, 4), (0, 4), (4, 0)])
def test_each_token_is_chosen_for(tokens, choices):
    """Rows beyond x would be read."""
    layer, chosen = nn.PackedExperts(2, 128, 64), torch.zeros(choices, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="x, chosen and shares are"):
        layer(torch.randn(tokens, 128).bfloat16(), chosen, torch.ones(choices, 1))


@pytest.mark.parametrize(
    "call",
    [
        train.convert,
        train.gather_fp8,
        lambda model: train.precompile(model, 8),
        lambda model: nn.precompile_model(model, 8),
        nn.replace_linears,
        transformers.rebase,
        transformers.pack,
    ],
    ids=["convert", "gather_fp8", "precompile", "precompile_model", "replace_linears", "rebase", "pack"],
)
def test_models_are_modules(call):
    for model in (None, [torch.nn.Linear(4, 4)], torch.nn.Linear):
        with pytest.raises(TypeError, match="model is .*pass a torch.nn.Module"):
            call(model)


@pytest.mark.parametrize("sf", [None, 3, [torch.ones(4, 2)], (torch.ones(4, 2), torch.ones(4, 2))], ids=str)
def test_scales_to_be_laid_out_are_tensors(sf):
    for call in (
        deep_gemm.get_mn_major_tma_aligned_tensor,
        lambda sf: deep_gemm.transform_sf_into_required_layout(sf, 4, 256, (1, 128)),
    ):
        with pytest.raises(TypeError, match="sf must be a torch.Tensor"):
            call(sf)
    with pytest.raises(TypeError, match="recipe is a.*tuple of ints"):
        deep_gemm.transform_sf_into_required_layout(torch.ones(4, 2), 4, 256, 128)


@pytest.mark.parametrize("tokens", [None, 0, 2.5, "8", True])
def test_tokens_are_an_int(tokens):
    model = train.convert(torch.nn.Linear(16, 16), lambda *_: True)
    with pytest.raises((TypeError, ValueError), match="^tokens is"):
        train.precompile(model, tokens)
    with pytest.raises((TypeError, ValueError), match="^max_tokens is"):
        nn.precompile_model(nn.Linear(16, 16), tokens)


def test_wanted_is_a_function():
    with pytest.raises(TypeError, match="wanted is 'x'; pass a function"):
        train.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), "x")


def test_a_layer_that_could_not_run_is_not_made():
    linear = torch.nn.Linear(16, 16, dtype=torch.float64).eval()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), linear).eval()
    with pytest.raises(TypeError, match="the bias of '1' is torch.float64.*model.float"):
        nn.replace_linears(model)
    assert type(model[0]) is torch.nn.Linear
    with pytest.raises(TypeError, match="bias is a tensor of torch.float64"):
        nn.Linear.from_float(linear)
    for other in (torch.nn.Embedding(16, 16), nn.Linear(16, 16), None):  # GPT-2's Conv1D has its weight transposed
        with pytest.raises(TypeError, match=f"a {type(other).__name__}; pass a torch.nn.Linear"):
            nn.Linear.from_float(other)


@pytest.mark.parametrize("make", [nn.Linear, nn.PackedLinear])
def test_a_layer_has_the_options_of_its_function(make):
    with pytest.raises(TypeError, match="'devcie' is no option of .*; options are .*batch_invariant"):
        make(128, 16, devcie="cpu")
    assert make(128, 16, num_sms=4)(torch.zeros(2, 128).bfloat16()).shape == (2, 16)


def test_layers_that_are_not_made_yet_stay():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LazyLinear(16)).eval()
    assert nn.replace_linears(model) == 1 and type(model[1]) is torch.nn.LazyLinear


def test_mlp_names_its_weights():
    x, w = torch.randn(4, 128), torch.randn(256, 128)
    for given in (None, 3):
        with pytest.raises(TypeError, match="w_gate_up is a"):
            train.mlp(x, given, w)
    for shape in ((), (128,), (2, 64, 128)):
        with pytest.raises(ValueError, match=r"w_down has shape .*\[n, f\]"):
            train.mlp(x, w, torch.zeros(shape))


def test_pairs_without_columns_or_rows():
    for m, k in ((3, 0), (0, 0), (0, 256)):
        pair = deep_tile.per_token_cast_to_fp8(torch.zeros(m, k))
        b, b_scale = deep_tile.quantize_weight(torch.zeros(16, k))
        assert (deep_tile.fp8_linear(pair, b, b_scale) == 0).all()


# Sizes beyond what kernels count.


def on_meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_thin_products_count_bytes_of_k():
    for k, dtype, name in ((2**29, torch.float32, "b"), (2**30, torch.bfloat16, "a")):
        with pytest.raises(ValueError, match=rf"{name} has k = {k}; of {dtype} at most"):
            deep_tile.thin_gemm(on_meta(1, k, dtype=torch.bfloat16), on_meta(1, k, dtype=dtype))
    with pytest.raises(ValueError, match=rf"m, n, k = 1, {2**31}, 8; each must be at most"):
        deep_tile.thin_gemm(on_meta(1, 8, dtype=torch.bfloat16), on_meta(2**31, 8, dtype=torch.float32))
    most = 2**29 - 256
    assert deep_tile.thin_gemm(on_meta(1, most, dtype=torch.bfloat16), on_meta(8, most, dtype=torch.float32)).is_meta


@pytest.mark.parametrize(
    "choose",
    [
        lambda rows, columns: cast.choose(1, "bf16", rows, columns, 132),
        lambda rows, columns: cast.choose_combine(rows, columns, 132),
    ],
    ids=["rows", "combine"],
)
def test_kernels_count_in_32_bits(choose):
    """Narrow rows, of which memory holds more."""
    for rows, columns in ((2**32, 1), (1, 2**32)):
        with pytest.raises(ValueError, match=rf"\[{rows}, {columns}\] is too large .* several calls"):
            choose(rows, columns)
    choose(2**27, 128)


def test_logits_count_columns_in_an_int():
    for name in ("keys", "columns"):
        field = next(field for field in params.LOGITS.fields if field.name == name)
        with pytest.raises(ValueError, match=name):
            field.pack(2**31 - 4095)


@pytest.mark.parametrize("number", [np.uint8, np.int32])
def test_numpys_sizes_do_not_overflow(number):
    m, n, k, ranks = (number(size) for size in (3, 100, 128, 3))
    assert deep_tile.supports(m, n, k, a_stride=k) == deep_tile.supports(3, 100, 128, a_stride=128)
    assert deep_tile.supports(m, n, k, grouping="offs", groups=ranks) == (True, "supported")
    explained = deep_tile.explain(m, n, k, call="scaled_gemm", groups=None)
    assert explained == deep_tile.explain(3, 100, 128, call="scaled_gemm")
    assert distributed.check_shardable(n, k, ranks, "column") == distributed.check_shardable(100, 128, 3, "column")


def test_more_ranks_than_rows_take_no_time():
    assert distributed.check_shardable(256, 256, 2**70, "row") == SCALE_BLOCK - 1


def overlapping() -> dict[str, Callable[[], Any]]:
    """Calls whose output lies in the memory of another tensor, by the tensor's name; each is right without that."""
    x = torch.randn(128, 128).bfloat16()
    (a, a_scale), memory = deep_tile.per_token_cast_to_fp8(x), torch.zeros(128, 256).bfloat16()
    b, b_scale = deep_tile.per_block_cast_to_fp8(x)
    rows = memory.view(FP8)[:, :128]
    plan = deep_tile.prepare(a, a_scale, b, b_scale)
    return {
        "out shares memory with a,": lambda: deep_tile.gemm(x, x.clone(), x),
        "out shares memory with b,": lambda: deep_tile.gemm(x.clone(), x[8:], x[:, :120]),
        "out shares memory with bias": lambda: deep_tile.gemm(x, x, memory[:, :128], bias=memory[3, :128]),
        "out shares memory with x,": lambda: deep_tile.per_token_cast_to_fp8(memory, out=memory.view(FP8)[:, 256:]),
        "out shares memory with scale_out": lambda: deep_tile.per_token_cast_to_fp8(
            x, out=rows, scale_out=memory[:, 60:62].view(torch.float32)
        ),
        "scale_out shares memory with x": lambda: deep_tile.per_token_cast_to_fp8(
            memory[:, :128], scale_out=memory[:, 126:128].view(torch.float32)
        ),
        "out shares memory with w": lambda: deep_tile.per_block_cast_to_fp8(memory, out=memory.view(FP8)[:, :256]),
        "out shares memory with a, ": lambda: plan(x.view(FP8)[:64].view(128, 128), a_scale, x),
        "out shares memory with gate_up": lambda: deep_tile.silu_mul_cast_to_fp8(memory, out=rows),
        "out shares memory with x, ": lambda: deep_tile.fp8_linear(x, b, b_scale, out=x),
    }


@pytest.mark.parametrize("text", overlapping())
def test_outputs_have_memory_of_their_own(text):
    with pytest.raises(ValueError, match=f"{text.strip()}.*pass another"):
        overlapping()[text]()


def test_outputs_may_lie_between_rows():
    """As in buffers whose rows hold several tensors."""
    x, rows = torch.randn(16, 128).bfloat16(), torch.zeros(16, 2 * 128 + 128 + 4 + 12, dtype=torch.uint8)
    given, out, scale = (
        rows[:, i:j].view(dtype) for i, j, dtype in ((0, 256, x.dtype), (256, 384, FP8), (384, 388, torch.float32))
    )
    given.copy_(x)
    made = deep_tile.per_token_cast_to_fp8(given, out=out, scale_out=scale)
    assert all(map(torch.equal, made, deep_tile.per_token_cast_to_fp8(x)))
    heads = torch.zeros(16, 3, 64).bfloat16()
    heads[:, :2] = torch.randn(16, 2, 64)
    swapped = torch.eye(64).bfloat16().flip(0).expand(2, 64, 64).contiguous()
    product = deep_tile.einsum("bhr,hdr->bhd", heads[:, :1], swapped[:1], heads[:, 2:])
    assert torch.equal(product, heads[:, :1].flip(2))
    deep_tile.gemm(heads[:, :2].flatten(1), swapped.view(64, 128), heads[:, 2])
