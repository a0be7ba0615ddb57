"""transformers' FP8 experts through deep_tile: layers, what goes on as before, and a small random Qwen3 with experts.

On the CPU deep_tile multiplies by the definition; the variants with the marker gpu run kernels. Nothing is downloaded.
"""

import copy
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from stand_ins import relative_error  # noqa: E402
from test_transformers import (  # noqa: E402
    BLOCK,
    DEVICES,
    Traits,
    dequantized,
    installed,  # noqa: F401
    linears,
    quantize_inputs,
    qwen3_fp8,
    test_a_model_is_one_graph_for_all_lengths,  # noqa: F401
    test_a_static_cache_is_compiled_without_a_break,  # noqa: F401
    test_greedy_tokens_are_those_of_whole_sequences,  # noqa: F401
    test_logits_differ_from_fp32_as_quantised_activations_do,  # noqa: F401
)
from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from deep_tile import dequantize, nn, per_token_cast_to_fp8, quantize_weight  # noqa: E402
from deep_tile.integrations import transformers as integration  # noqa: E402

NAMES = ("grouped_mm", "batched_mm")
OWN = {name: finegrained_fp8.FP8ExpertsInterface()[name] for name in NAMES}
EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 272, 128


def registered(name: str):
    return finegrained_fp8.FP8ExpertsInterface()[name]


# ---- installing


def test_install_replaces_and_uninstall_gives_back():
    assert {name: registered(name) for name in NAMES} == OWN
    integration.install()
    integration.install(exact="divide")
    assert all(registered(name) is not OWN[name] for name in NAMES)
    integration.uninstall()
    assert {name: registered(name) for name in NAMES} == OWN


def test_another_signature_is_refused():
    def theirs(self, hidden_states, top_k_index):
        pass

    finegrained_fp8.FP8ExpertsInterface.register("batched_mm", theirs)
    try:
        with pytest.raises(RuntimeError, match=r"batched_mm takes .* this is transformers .* pip install"):
            integration.install()
        assert finegrained_fp8.fp8_linear.__module__ == finegrained_fp8.__name__
        assert registered("grouped_mm") is OWN["grouped_mm"]
    finally:
        finegrained_fp8.FP8ExpertsInterface.register("batched_mm", OWN["batched_mm"])


def test_a_missing_implementation_is_refused(monkeypatch):
    monkeypatch.delitem(finegrained_fp8.FP8ExpertsInterface._global_mapping, "batched_mm")
    with pytest.raises(ImportError, match="has no experts implementation 'batched_mm': this is transformers"):
        integration.install()
    assert registered("grouped_mm") is OWN["grouped_mm"]


def test_what_somebody_else_replaced_is_left_alone(installed):  # noqa: F811
    ours = registered("grouped_mm")

    def theirs():
        pass

    finegrained_fp8.FP8ExpertsInterface.register("grouped_mm", theirs)
    for call in (integration.install, integration.uninstall):
        with pytest.raises(RuntimeError, match="'s grouped_mm has been replaced since .*theirs.*Undo that first"):
            call()
        assert registered("grouped_mm") is theirs
    finegrained_fp8.FP8ExpertsInterface.register("grouped_mm", ours)


# ---- a layer


def make_layer(device: str = "cpu", implementation: str = "grouped_mm", **config) -> torch.nn.Module:
    """A layer of random experts, made and filled by transformers; `config` is the model's."""
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "hidden_act": "silu"}
    model = SimpleNamespace(_experts_implementation=implementation, **{**sizes, **config})
    kind = use_experts_implementation(
        finegrained_fp8.FP8Experts, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    layer = kind(config=model, block_size=BLOCK).to(device)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(layer, name)
        quantized = [quantize_weight(0.1 * torch.randn(weight.shape[1:], device=device)) for _ in range(len(weight))]
        weight.data, getattr(layer, f"{name}_scale_inv").data = map(torch.stack, zip(*quantized, strict=True))
    return layer


def routed(tokens: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16):
    """Hidden states, the experts of each token, and their weights."""
    x = torch.randn(tokens, HIDDEN, device=device, dtype=dtype)
    weights, chosen = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K)
    return x, chosen, weights.to(dtype)


def in_turn(layer, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition in FP32, expert by expert, with quantised inputs of both GEMMs; for FP8 or FP32 weights."""

    def rounded(values):
        return dequantize(*per_token_cast_to_fp8(values, exact="reciprocal"), block=(1, 128))

    out = torch.zeros(x.shape, device=x.device)
    x = rounded(x.float())
    for expert, (up, down) in enumerate(zip(wide(layer, "gate_up_proj"), wide(layer, "down_proj"), strict=True)):
        tokens, which = (chosen == expert).nonzero(as_tuple=True)
        gate_up = (x[tokens] @ up.t()).bfloat16().float()
        results = rounded(layer._apply_gate(gate_up)) @ down.t()
        out.index_add_(0, tokens, weights[tokens, which, None].float() * results)
    return out


def agree(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether tokens agree: most to less than FP8's rounding of 0.026, each to a few times that. A sum in another order
    can round the largest hidden number of a token to another BF16; its codes all differ then, by 0.056 at most in 2,100
    draws. Sums that keep 14 bits, as tensor cores' do, are off by 1.2e-4 and do so to one token in 26, and round others
    to other codes: the median of 5 tokens is up to 0.010 then."""
    errors = sorted(relative_error(*token) for token in zip(out, expected, strict=True))
    return errors[-1] < 0.1 and errors[(len(errors) - 1) // 2] < (0.015 if len(errors) > 4 else 0.1)


def wide(layer, name: str) -> torch.Tensor:
    """Weights of a layer in FP32."""
    weight = getattr(layer, name).detach()
    if weight.dtype != torch.float8_e4m3fn:
        return weight.float()
    scales = getattr(layer, f"{name}_scale_inv").detach()
    return torch.stack([dequantize(w, s, block=(128, 128)) for w, s in zip(weight, scales, strict=True)])


ACTIVATIONS = {
    "silu": {},
    "limited": {"swiglu_limit": 0.5},
    "gpt-oss": {"swiglu_limit": 0.7, "swiglu_alpha": 1.702, "hidden_act": "gelu"},
}


@pytest.mark.parametrize("config", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("implementation", NAMES)
@DEVICES
@torch.no_grad()
def test_a_layer(installed, device, implementation, config):  # noqa: F811
    layer = make_layer(device, implementation, **config)
    for tokens in (1, 37):
        given = routed(tokens, device)
        out = layer(*given)
        assert (out.dtype, out.shape) == (torch.bfloat16, (tokens, HIDDEN))
        assert agree(out, in_turn(layer, *given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@DEVICES
@torch.no_grad()
def test_a_layer_of_other_dtypes(installed, device, dtype):  # noqa: F811
    layer = make_layer(device)
    given = routed(9, device, dtype)
    out = layer(*given)
    assert out.dtype == dtype and agree(out, in_turn(layer, *given))


@DEVICES
@torch.no_grad()
def test_experts_of_other_processes_add_nothing(installed, device):  # noqa: F811
    layer = make_layer(device)
    layer._is_expert_parallel = True
    x, chosen, weights = routed(37, device)
    chosen[::2, 0], chosen[1] = EXPERTS, EXPERTS
    out = layer(x, chosen, weights)
    assert not out[1].any() and agree(out, in_turn(layer, x, chosen, weights))


@DEVICES
@torch.no_grad()
def test_no_tokens(installed, device):  # noqa: F811
    assert make_layer(device)(*routed(0, device)).shape == (0, HIDDEN)


@pytest.mark.gpu
@torch.no_grad()
def test_a_layer_waits_for_nothing(installed):  # noqa: F811
    """A CUDA graph of the layer holds for every routing, and no call of it waits for the GPU."""
    layer = make_layer("cuda")
    given = routed(64, "cuda")
    layer(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*given)
    for _ in range(3):
        for buffer, values in zip(given, routed(64, "cuda"), strict=True):
            buffer.copy_(values)
        given[1][:20] = torch.tensor([3, 5], device="cuda")  # many rows of two experts
        graph.replay()
        assert agree(out, in_turn(layer, *given))


# ---- what goes on as before


@pytest.fixture
def asked():
    """transformers' own functions replaced by ones that note their arguments; deep_tile installed on top of them."""
    calls = []

    def own(self, hidden_states, top_k_index, top_k_weights):
        calls.append((self, hidden_states, top_k_index, top_k_weights))
        return "its own"

    for name in NAMES:
        finegrained_fp8.FP8ExpertsInterface.register(name, own)
    integration.install()
    yield calls
    integration.uninstall()
    assert all(registered(name) is own for name in NAMES)
    for name in NAMES:
        finegrained_fp8.FP8ExpertsInterface.register(name, OWN[name])


class Subclass(finegrained_fp8.FP8Experts):
    pass


def change_class(layer):
    layer.__class__ = Subclass


NOT_TAKEN = {
    "static scales": lambda layer: setattr(layer, "activation_scheme", "static"),
    "another activation": lambda layer: setattr(layer, "act_fn", torch.nn.GELU()),
    "capped gates": lambda layer: setattr(layer, "gate_softcap", 3.0),
    "no gates": lambda layer: setattr(layer, "has_gate", False),
    "other blocks": lambda layer: setattr(layer, "block_size", [64, 128]),
    "no blocks": lambda layer: setattr(layer, "block_size", None),
    "another class": change_class,
    "e5m2": lambda layer: setattr(layer.down_proj, "data", layer.down_proj.data.view(torch.float8_e5m2)),
    "a scale of each half": lambda layer: setattr(layer.gate_up_proj_scale_inv, "data", torch.ones(EXPERTS, 4, 3)),
    "narrow rows": lambda layer: setattr(layer.down_proj, "data", layer.down_proj.data[..., :120].contiguous()),
}


@pytest.mark.parametrize("change", NOT_TAKEN.values(), ids=NOT_TAKEN)
@torch.no_grad()
def test_other_layers_go_on_as_before(asked, change):
    layer, given = make_layer(), routed(5)
    change(layer)
    assert layer(*given) == "its own"
    assert [seen is wanted for seen, wanted in zip(asked[0], (layer, *given), strict=True)] == [True] * 4


def test_gradients_go_on_as_before(asked):
    layer, (x, chosen, weights) = make_layer(), routed(5)
    assert layer(x.requires_grad_(), chosen, weights) == "its own"
    assert layer(x.detach(), chosen, weights.requires_grad_()) == "its own"
    with torch.no_grad():
        assert layer(x, chosen, weights).shape == x.shape
    assert layer(x.detach(), chosen, weights.detach()).shape == x.shape and len(asked) == 2


# ---- a model


@pytest.fixture(scope="module")
def wide_model():
    seed = torch.seed() % 2**31
    print(f"random_model(seed={seed})")
    return qwen3_fp8.random_model(seed, experts=True)


@pytest.fixture(scope="module")
def checkpoint(wide_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    qwen3_fp8.save_quantized(wide_model, directory)
    return directory


@pytest.fixture
def model(installed, checkpoint, device):  # noqa: F811
    """The checkpoint as transformers loads it: quantised beforehand. To load it to a GPU would need accelerate."""
    return qwen3_fp8.load(checkpoint, "cpu").to(device)


def layers_of(model) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@DEVICES
def test_a_checkpoint_stays_fp8(model, wide_model):
    assert len(linears(model)) == 8 and len(layers_of(model)) == 2
    for layer, wide in zip(layers_of(model), layers_of(wide_model), strict=True):
        assert type(layer) is finegrained_fp8.FP8Experts
        for name in ("gate_up_proj", "down_proj"):
            quantized = [quantize_weight(weight) for weight in getattr(wide, name).detach()]
            weight, scale = map(torch.stack, zip(*quantized, strict=True))
            assert torch.equal(getattr(layer, name).cpu().view(torch.uint8), weight.view(torch.uint8))
            assert torch.equal(getattr(layer, f"{name}_scale_inv").cpu(), scale)


@pytest.fixture
def reference(wide_model) -> torch.nn.Module:
    """The model in FP32, with the weights of the checkpoint."""
    model = dequantized(wide_model)
    model.set_experts_implementation("eager")
    for layer in layers_of(model):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer, name)
            quantized = (quantize_weight(w.bfloat16()) for w in weight.detach())
            weight.data = torch.stack([dequantize(*pair, block=(128, 128)) for pair in quantized])
    return model


def quantize_expert_inputs(model) -> None:
    """Let each layer of experts round the inputs of both GEMMs to FP8."""
    for layer in layers_of(model):
        layer.forward = partial(in_turn, layer)


@pytest.fixture
def traits():
    """An expert that is chosen by a hair is another one for a whole sequence: two tokens may be off."""

    def quantize(model) -> None:
        quantize_inputs(model)
        quantize_expert_inputs(model)

    return Traits(6, quantize, 0.5, (0.6, 1.7), 2, {"fp8_grouped_gemm": 4, "combine": 2})


# ---- layers in other blocks


def quantized_in(block: tuple[int, int], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with scales in UE8M0 for blocks of other sizes than 128x128, which divide the weight."""
    groups = weight.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    scale = torch.exp2((groups.abs().amax((-3, -1), keepdim=True) / 448).log2().ceil())
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return codes.flatten(-4, -3).flatten(-2), scale[..., 0, :, 0].to(torch.float8_e8m0fnu)


def model_in(block: tuple[int, int], device: str) -> torch.nn.Module:
    """A linear, experts, and a config that says how they are saved."""
    layer = make_layer(device)
    layer.block_size = block
    linear = finegrained_fp8.FP8Linear(HIDDEN - 16, 128, block_size=block, scale_fmt="ue8m0").to(device)
    for owner, name, shape in ((layer, "gate_up_proj", (8, 256, 256)), (layer, "down_proj", (8, 256, 128))):
        fill(owner, name, quantized_in(block, 0.1 * torch.randn(shape, device=device)))
    fill(linear, "weight", quantized_in(block, 0.1 * torch.randn(linear.weight.shape, device=device)))
    model = torch.nn.ModuleDict({"experts": layer, "linear": linear})
    model.config = SimpleNamespace(quantization_config={"weight_block_size": list(block), "scale_fmt": "ue8m0"})
    return model


def fill(owner: torch.nn.Module, name: str, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, tensor in zip((name, f"{name}_scale_inv"), parts, strict=True):
        setattr(owner, one, torch.nn.Parameter(tensor, requires_grad=False))


def wide_in(block: tuple[int, int], owner: torch.nn.Module, name: str) -> torch.Tensor:
    scale = getattr(owner, f"{name}_scale_inv").double()
    return getattr(owner, name).double() * scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)


@DEVICES
@pytest.mark.parametrize("block", [(32, 32), (1, 32)], ids=str)
def test_layers_are_re_based(installed, device, block):  # noqa: F811
    """The weights keep their values, and deep_tile multiplies them: transformers' own functions are not called."""
    model = model_in(block, device)
    names = {"experts.gate_up_proj", "experts.down_proj", "linear.weight"}
    before = {name: wide_in(block, model.get_submodule(name.split(".")[0]), name.split(".")[1]) for name in names}
    reports = integration.rebase(model)
    assert {*reports} == names and integration.rebase(model) == {}
    assert model.config.quantization_config == {
        **{"weight_block_size": [128, 128], "scale_fmt": "float", "expert_dtype": "fp8"},
    }
    for name, value in before.items():
        owner, own = name.split(".")
        assert relative_error(wide_in((128, 128), model[owner], own), value) <= reports[name].error + 1e-12
    x = torch.randn(5, 256, device=device).bfloat16()
    with torch.no_grad():
        expected = per_token_cast_to_fp8(x, exact="reciprocal")
        expected = dequantize(*expected, block=(1, 128)).double() @ before["linear.weight"].t()
        assert relative_error(model.linear(x), expected) < 3e-3
        _, chosen, weights = routed(5, device)
        out = model.experts(x, chosen, weights)
    assert agree(out, in_turn(model.experts, x, chosen, weights))


def test_layers_share_what_they_shared():
    model = model_in((32, 32), "cpu")
    model["tied"] = finegrained_fp8.FP8Linear(HIDDEN - 16, 128, block_size=(32, 32), scale_fmt="ue8m0")
    model["tied"].weight, model["tied"].weight_scale_inv = model.linear.weight, model.linear.weight_scale_inv
    alive = weakref.ref(model["experts"].down_proj)
    reports = integration.rebase(model)
    assert model["tied"].weight is model.linear.weight and reports["tied.weight"] is reports["linear.weight"]
    assert model["tied"].weight_scale_inv is model.linear.weight_scale_inv and alive() is None


@DEVICES
def test_experts_in_fp4_are_re_based(device):
    layer = make_layer(device)
    packed = torch.randint(0, 256, (8, 256, 128), dtype=torch.uint8, device=device).view(torch.int8)
    scale = torch.randint(110, 124, (8, 256, 8), dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    fill(layer, "gate_up_proj", (packed, scale.float()))
    fill(layer, "down_proj", (packed, scale))
    reports = integration.rebase(layer, max_error=0)
    assert {*reports} == {"gate_up_proj", "down_proj"} and all(report.changed == 0 for report in reports.values())
    assert layer.gate_up_proj.shape == (8, 256, 256) and layer.gate_up_proj_scale_inv.shape == (8, 2, 2)
    assert torch.equal(layer.gate_up_proj.float(), layer.down_proj.float())


def test_experts_with_scales_of_tensors_are_re_based():
    """Gate and up have one scale each. In blocks of whole rows of either, nothing changes."""
    layer = make_layer()
    layer.block_size = None
    scales = {"gate_up_proj": torch.rand(8, 2, 1) + 0.1, "down_proj": torch.rand(8, 1, 1) + 0.1}
    before = {}
    for name, scale in scales.items():
        weight = getattr(layer, name).detach()
        fill(layer, name, (weight, scale))
        before[name] = weight.double() * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    reports = integration.rebase(layer, max_error=0)
    assert all(report.changed == 0 for report in reports.values()) and layer.block_size == (128, 128)
    for name, value in before.items():
        n, k = value.shape[1:]
        each = getattr(layer, f"{name}_scale_inv").double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)
        assert torch.equal(getattr(layer, name).double() * each[..., :k], value)


@DEVICES
@torch.no_grad()
def test_narrow_experts(installed, device):  # noqa: F811
    """Gate and up have a scale each, in checkpoints and in what transformers allocates, and are multiplied separately;
    re-based layers have scales of these shapes."""
    layer, given, shape = make_layer(device, moe_intermediate_size=48), routed(9, device), (EXPERTS, 2, 3)
    layer.gate_up_proj_scale_inv.data = 0.01 * torch.rand(shape, device=device) + 0.01
    assert [tuple(x.shape) for x in nn._expert_weights(layer)] == [(EXPERTS, 48, HIDDEN), (EXPERTS, HIDDEN, 48)]

    def check_products():
        in_fp32 = copy.deepcopy(layer)
        blocks = layer.gate_up_proj_scale_inv.repeat_interleave(48, 1).repeat_interleave(128, 2)
        in_fp32.gate_up_proj.data = layer.gate_up_proj.float() * blocks[..., :HIDDEN]
        assert agree(layer(*given), in_turn(in_fp32, *given))

    check_products()
    rows = layer.gate_up_proj_scale_inv.repeat_interleave(48, 1)
    fill(layer, "gate_up_proj", (layer.gate_up_proj.data, rows))
    fill(layer, "down_proj", (layer.down_proj.data, layer.down_proj_scale_inv.repeat_interleave(128, 1)[:, :HIDDEN]))
    layer.block_size = (1, 128)
    integration.rebase(layer)
    assert layer.gate_up_proj_scale_inv.shape == shape
    check_products()


def test_what_cannot_be_re_based():
    model = model_in((32, 32), "cpu")
    wide_spread = torch.full((128 // 32, 256 // 32), 2.0**-40)
    wide_spread[0] = 1
    fill(model.linear, "weight", (torch.full((128, 256), 1.5).to(torch.float8_e4m3fn), wide_spread))
    with pytest.raises(ValueError, match=r"linear.weight: re-basing .* would change row \[32\]"):
        integration.rebase(model)
    assert model.linear.block_size == (32, 32) and model.experts.block_size == (128, 128)
    model.linear.activation_scheme = "static"
    assert integration.rebase(model) == {}
    assert model.config.quantization_config["weight_block_size"] == [32, 32]
