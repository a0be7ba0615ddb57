"""`read_weight`: weights as quantisers save them, written here from their formats' definitions, and read back."""

import pytest
import torch
from formats import draw, spread

import deep_tile
from deep_tile import read_weight
from deep_tile.formats import FORMATS
from deep_tile.quantize import FP8_DTYPE

N, K = 48, 512
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each place of a word has, the lowest bits first."""


def words(q: torch.Tensor, order=IN_ORDER) -> torch.Tensor:
    """[..., ceil(k / 8)] int32 of integers [..., k] from 0 to 15."""
    eights = torch.nn.functional.pad(q.long(), (0, -q.shape[-1] % 8)).unflatten(-1, (-1, 8))
    word = sum(eights[..., column] << 4 * place for place, column in enumerate(order))
    return torch.where(word < 2**31, word, word - 2**32).int()


def drawn(group: int, *leading: int, n=N, k=K, symmetric=True):
    """Integers, zero points and scales, and what they mean."""
    groups = -(-k // group)
    q, scale = torch.randint(0, 16, (*leading, n, k)), torch.rand(*leading, n, groups).half() + 0.5
    zeros = torch.full(scale.shape, 8) if symmetric else torch.randint(0, 16, scale.shape)
    differences = q - zeros.repeat_interleave(group, -1)[..., :k]
    return q, zeros, scale, differences * spread(scale, (1, group), (n, k))


def compressed(q, zeros, scale, symmetric=True):
    made = {"weight_packed": words(q), "weight_scale": scale, "weight_shape": torch.tensor(q.shape)}
    return made if symmetric else made | {"weight_zero_point": words(zeros.mT).mT.contiguous()}


def gptq(q, zeros, scale, less=1):
    along_k = words(q.mT.contiguous().mT).mT.contiguous()
    return {"qweight": along_k, "qzeros": words((zeros - less).mT), "scales": scale.mT.contiguous()}


def awq(q, zeros, scale):
    return {"qweight": words(q.mT, AWQ), "qzeros": words(zeros.mT, AWQ), "scales": scale.mT.contiguous()}


SAVED = {
    "compressed-tensors": compressed,
    "gptq": gptq,
    "gptq, version 2": lambda *given: gptq(*given, less=0),
    "awq": awq,
}


def meaning(codes) -> torch.Tensor:
    """Values in float64, as `to_blocks` documents formats."""
    weight, of = codes["weight"], FORMATS[codes["format"]]
    if of.packed:
        weight = torch.tensor(of.codes)[torch.stack([weight & 15, weight >> 4], -1).flatten(-2).int()]
    values = weight.double() * spread(codes["scale"].float(), (1, of.columns), weight.shape[-2:])
    return values if codes["global_scale"] is None else values * codes["global_scale"].double()


@pytest.mark.parametrize("group", [32, 64, 128, 256, K])
@pytest.mark.parametrize("name", SAVED)
def test_symmetric_integers(name, group):
    *saved, wanted = drawn(group)
    codes = read_weight(SAVED[name](*saved))
    assert codes["format"] == f"int4_{min(group, 128)}" and torch.equal(meaning(codes), wanted)
    layer = deep_tile.nn.Linear.from_fp8(codes["weight"], codes["scale"], format=codes["format"])
    assert layer.weight.shape == (N, K) and torch.equal(deep_tile.to_blocks(**codes).weight, layer.weight)
    layer = deep_tile.nn.PackedLinear.from_codes(**codes)
    assert f"weight={'int4' if group >= 128 else 'int4_32'}" in repr(layer)
    packed = deep_tile.unpack_weight(layer.weight, layer.weight_scale)
    scale = codes["scale"].float().repeat_interleave(2 if group == 64 else 1, -1)
    assert torch.equal(packed.weight, codes["weight"]) and torch.equal(packed.scale, scale)
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(3, K))
    out = deep_tile.packed_gemm(a, a_scale, layer.weight, layer.weight_scale, out_dtype=torch.float32)
    exact = a.double() * spread(a_scale, (1, 128), (3, K)) @ wanted.mT
    assert (out - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("group", [32, 64, 128, 256, K])
@pytest.mark.parametrize("name", ["compressed-tensors", "awq"])
def test_zero_points_make_fp8(name, group):
    *saved, wanted = drawn(group, symmetric=False)
    codes = read_weight(awq(*saved) if name == "awq" else compressed(*saved, symmetric=False))
    assert codes["format"] == ("mxfp8" if group < 128 else "fp8_1x128") and torch.equal(meaning(codes), wanted)
    assert deep_tile.to_blocks(**codes).weight.shape == (N, K)
    if group >= 128:
        a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(3, K))
        out = deep_tile.scaled_gemm(a, a_scale, codes["weight"], codes["scale"].float(), out_dtype=torch.float32)
        exact = a.double() * spread(a_scale, (1, 128), (3, K)) @ wanted.mT
        assert (out - exact).abs().max() < 1e-5 * exact.abs().max()


def test_zero_points_of_symmetric_weights_are_none():
    *saved, wanted = drawn(128)
    codes = read_weight(compressed(*saved, symmetric=False))
    assert codes["format"] == "int4_128" and torch.equal(meaning(codes), wanted)


@pytest.mark.parametrize(("n", "k", "group"), [(20, 200, 128), (24, 1444, 32), (12, 100, 100), (16, 32, 32)])
def test_odd_sizes(n, k, group):
    """Words and groups that are not full."""
    *saved, wanted = drawn(group, n=n, k=k, symmetric=False)
    codes = read_weight(compressed(*saved, symmetric=False))
    assert torch.equal(meaning(codes), wanted)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("name", SAVED)
def test_experts_in_one_tensor(name, group):
    *saved, wanted = drawn(group, 3)
    codes = read_weight(SAVED[name](*saved))
    assert torch.equal(meaning(codes), wanted)
    packed = deep_tile.pack_weight(**codes)
    assert packed.weight.shape == (3, N, K // 128 * {32: 73, 128: 64}[group])
    assert torch.equal(deep_tile.unpack_weight(*packed).scale, codes["scale"].float())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAVED)
def test_a_gpu_reads_the_same(name):
    saved = SAVED[name](*drawn(128)[:3])
    here, there = (read_weight({own: x.to(device) for own, x in saved.items()}) for device in ("cpu", "cuda"))
    assert here["format"] == there["format"]
    assert all(torch.equal(here[own], there[own].cpu()) for own in ("weight", "scale"))


def test_order_of_columns_that_is_none():
    *saved, wanted = drawn(128)
    codes = read_weight(gptq(*saved) | {"g_idx": torch.arange(K, dtype=torch.int32) // 128})
    assert torch.equal(meaning(codes), wanted)


@pytest.mark.parametrize(
    ("saver", "name"),
    [("compressed-tensors", "nvfp4"), ("compressed-tensors", "mxfp4"), ("modelopt", "nvfp4"), ("deepseek", "mxfp4")],
)
def test_floats_of_4_bits(saver, name):
    weight, scale, arguments, wanted = draw(name, (N, K))
    saved = {"weight_packed": weight, "weight_scale": scale if name == "nvfp4" else scale.view(torch.uint8)}
    if saver == "deepseek":
        saved = {"weight": weight.view(torch.int8), "scale": scale}
    elif saver == "modelopt":
        saved = {"weight": weight, "weight_scale": scale, "weight_scale_2": arguments["global_scale"]}
    elif name == "nvfp4":
        saved["weight_global_scale"] = 1 / arguments["global_scale"].reshape(1)
    saved |= {"input_scale": torch.ones(()), "bias": torch.zeros(N)}
    prefix = "model.layers.3.mlp.down_proj."
    codes = read_weight({prefix + own: x for own, x in saved.items()} | {"weight": torch.zeros(3)}, prefix)
    assert codes["format"] == name
    codes["weight"], codes["scale"] = codes["weight"].view(torch.uint8), codes["scale"].view(scale.dtype)
    torch.testing.assert_close(meaning(codes), wanted, rtol=1e-6, atol=0)
    assert deep_tile.pack_weight(**codes).weight.shape[0] == N


def changed(make, **others):
    saved = make(*drawn(128)[:3])
    return {name: x for name, x in (saved | others).items() if x is not None}


BAD = {
    "nothing": ({}, ValueError, "state_dict has none of the tensors that are known behind prefix ''; known are compr"),
    "a wide weight": ({"weight": torch.zeros(N, K)}, ValueError, "state_dict has weight behind prefix ''; known are"),
    "fp8": ({"weight": torch.zeros(N, K).to(FP8_DTYPE), "weight_scale": torch.ones(N, 1)}, ValueError,
            "weight is torch.float8_e4m3fn .* of weight, weight_scale; known are"),
    "no global scale": ({"weight_packed": torch.zeros(N, K // 2).byte(),
                         "weight_scale": torch.ones(N, K // 16).to(FP8_DTYPE)}, ValueError, "known are .*global_sc"),
    "fp4 with zero points": (dict.fromkeys(("weight", "weight_scale", "weight_zero_point"), torch.zeros(N, 16).byte()),
                             ValueError, "of weight, weight_scale, weight_zero_point; known are"),
    "no tensor": ({"weight": 3.0}, TypeError, "weight must be a torch.Tensor"),
    "on meta": (changed(gptq, scales=torch.ones(4, N, device="meta")), ValueError, "scales is on meta"),
    "no shape": (changed(compressed, weight_shape=None), ValueError, "pass its weight_shape, too"),
    "8 bits of compressed-tensors": (changed(compressed, weight_shape=torch.tensor([N, K // 2])), ValueError,
                                     r"weight_packed is torch.int32 \[48, 64\].*is torch.int32 \[48, 32\], as weight"),
    "8 bits of GPTQ": (changed(gptq, qzeros=torch.zeros(4, N // 4).int()), ValueError, r"qzeros is .*\[4, 12\].*\[4,"),
    "long words": (changed(gptq, qweight=torch.zeros(64, N).long()), ValueError, "qweight is torch.int64.*torch.int32"),
    "one scale": (changed(compressed, weight_scale=torch.ones(1)), ValueError, r"weight_scale is torch.float32 \[1\]"),
    "no dimensions": (changed(gptq, scales=torch.ones(())), ValueError, "qweight is"),
    "a vector": (changed(awq, qweight=torch.zeros(64).int()), ValueError, "qweight is"),
    "groups of 16": (changed(compressed, weight_scale=torch.ones(N, K // 16)), ValueError, "512 .* have 32 scales"),
    "groups of 170": (changed(compressed, weight_scale=torch.ones(N, 3)), ValueError, "512 .* have 3 scales"),
    "odd rows": (compressed(*drawn(32, k=161)[:3]), ValueError, "rows of 161 columns have 6 scales.*an even number"),
    "act-order": (changed(gptq, g_idx=torch.arange(K).flip(0) // 128), ValueError, r"act-order.*desc_act=False"),
    "another length": (changed(gptq, g_idx=torch.arange(8)), ValueError, "act-order"),
    "asymmetric GPTQ": (changed(gptq, qzeros=torch.zeros(4, N // 8).int()), ValueError, "zero points than 7 or 8"),
    "factors of inputs": (changed(awq, pre_quant_scale=torch.ones(K)), ValueError, "pre_quant_scale multiplies"),
}  # fmt: skip


@pytest.mark.parametrize(("state_dict", "error", "match"), BAD.values(), ids=BAD)
def test_what_is_refused(state_dict, error, match):
    with pytest.raises(error, match=match):
        read_weight(state_dict)


def test_arguments_that_are_none():
    with pytest.raises(TypeError, match="state_dict is of type Tensor; pass tensors by name"):
        read_weight(torch.zeros(3))
    with pytest.raises(TypeError, match="prefix is of type NoneType"):
        read_weight({}, None)
    with pytest.raises(ValueError, match="behind prefix 'layer', which ends without a dot"):
        read_weight({"layer.weight": torch.zeros(3)}, "layer")


def test_words_are_no_weight():
    with pytest.raises(TypeError, match=r"weight is torch.int32.*To fix: integers .* deep_tile.read_weight"):
        deep_tile.pack_weight(torch.zeros(16, 16).int(), torch.ones(16, 1), format="int4_128")
