"""transformers through deep_tile: what install() replaces, and a small random Qwen3 in FP8 that is saved and loaded.

On the CPU deep_tile multiplies by the definition; the variants with the marker gpu run kernels. Nothing is downloaded.
"""

import copy
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import SEEDS, load_example, same_bits
from stand_ins import relative_error

from deep_tile import dequantize, linear, per_token_cast_to_fp8, quantize_weight, tensors
from deep_tile.integrations import transformers as integration
from deep_tile.integrations import transformers_weights

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers import CompileConfig  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402

qwen3_fp8 = load_example("qwen3_fp8")

OWN = finegrained_fp8.fp8_linear
BLOCK = [128, 128]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def installed():
    integration.install()
    yield
    integration.uninstall()


@pytest.fixture
def asked(monkeypatch):
    """transformers' own function replaced by one that notes its arguments; deep_tile installed on top of it."""
    calls = []

    def own(input, weight, weight_scale_inv, block_size=None, bias=None, activation_scale=None, allow_deepgemm=True):
        calls.append((input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm))
        return "its own"

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", own)
    integration.install()
    yield calls
    integration.uninstall()
    assert finegrained_fp8.fp8_linear is own


def operands(*, rows=(3, 5), n=136, k=272, device="cpu", dtype=torch.bfloat16):
    """Input [*rows, k], an FP8 weight [n, k] with its scale, and a bias [n], fresh."""
    x = torch.randn(*rows, k, device=device, dtype=dtype)
    weight, scale = quantize_weight(torch.randn(n, k, device=device))
    return x, weight, scale, torch.randn(n, device=device, dtype=dtype)


# ---- installing


def test_install_replaces_once_and_uninstall_gives_back():
    integration.uninstall()
    assert finegrained_fp8.fp8_linear is OWN
    integration.install()
    integration.install(exact="divide")
    assert finegrained_fp8.fp8_linear is not OWN
    integration.uninstall()
    assert finegrained_fp8.fp8_linear is OWN


def test_threads_that_install_and_uninstall_leave_it_whole():
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(50):
            integration.install()
            integration.uninstall()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finegrained_fp8.fp8_linear is OWN


def with_fewer(input, weight, weight_scale_inv, block_size=None, bias=None, activation_scale=None):
    pass


def with_another_order(
    weight, input, weight_scale_inv, block_size=None, bias=None, activation_scale=None, allow_deepgemm=True
):
    pass


def with_another_default(
    input, weight, weight_scale_inv, block_size=128, bias=None, activation_scale=None, allow_deepgemm=True
):
    pass


@pytest.mark.parametrize("other", [with_fewer, with_another_order, with_another_default])
def test_another_signature_is_refused(monkeypatch, other):
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", other)
    with pytest.raises(RuntimeError, match=r"takes .* this is transformers .* pip install"):
        integration.install()
    assert finegrained_fp8.fp8_linear is other


def test_transformers_without_the_function_is_refused(monkeypatch):
    monkeypatch.delattr(finegrained_fp8, "fp8_linear")
    with pytest.raises(ImportError, match=r"has no fp8_linear: this is transformers .* pip install"):
        integration.install()


def test_no_transformers_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations", None)
    with pytest.raises(ImportError, match="cannot be imported.*pip install"):
        integration.install()


def test_what_somebody_else_replaced_is_left_alone(installed, monkeypatch):
    def theirs():
        pass

    with monkeypatch.context() as patch:
        patch.setattr(finegrained_fp8, "fp8_linear", theirs)
        for call in (integration.install, integration.uninstall):
            with pytest.raises(RuntimeError, match="has been replaced since .*theirs.*Undo that first"):
                call()
            assert finegrained_fp8.fp8_linear is theirs


# ---- what is taken


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_is_fp8_linear(installed, device, dtype, with_bias):
    x, weight, scale, bias = operands(device=device, dtype=dtype)
    bias = bias if with_bias else None
    out = finegrained_fp8.fp8_linear(x, weight, scale, BLOCK, bias, None, False)
    assert (out.dtype, out.shape) == (dtype, (3, 5, 136))
    assert torch.equal(out, linear.fp8_linear(x, weight, scale, bias, exact="reciprocal"))
    wanted = x.float() @ dequantize(weight, scale, block=(128, 128)).t() + (0 if bias is None else bias.float())
    assert (out - wanted).norm() < 0.05 * wanted.norm()


@DEVICES
@pytest.mark.parametrize("exact", ["divide", "reciprocal"])
def test_the_cast_is_the_one_asked_for(installed, device, exact):
    x, weight, scale, _ = operands(rows=(300,), device=device)
    integration.install(exact=exact)
    out = finegrained_fp8.fp8_linear(x, weight, scale, BLOCK)
    wanted = {kind: linear.fp8_linear(x, weight, scale, exact=kind) for kind in ("divide", "reciprocal")}
    assert same_bits(out, wanted[exact])
    assert not same_bits(wanted["divide"], wanted["reciprocal"])


def test_an_unknown_cast_is_refused():
    with pytest.raises(ValueError, match="exact is 'fast'; use 'divide' or 'reciprocal'"):
        integration.install(exact="fast")
    assert finegrained_fp8.fp8_linear is OWN


@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
@DEVICES
def test_narrow_scales_are_taken(installed, device, dtype):
    x, weight, scale, _ = operands(device=device)
    narrow = scale.to(dtype)
    out = finegrained_fp8.fp8_linear(x, weight, narrow, (128, 128))
    assert same_bits(out, linear.fp8_linear(x, weight, narrow.float(), exact="reciprocal"))


@DEVICES
def test_a_gradient_goes_through_the_weight(installed, device):
    x, weight, scale, _ = operands(device=device)
    layer = finegrained_fp8.FP8Linear(272, 136, block_size=(128, 128)).to(device)
    layer.weight.data, layer.weight_scale_inv.data = weight, scale
    assert layer.weight.requires_grad and layer.weight_scale_inv.requires_grad  # as transformers makes them
    assert same_bits(layer(x), linear.fp8_linear(x, weight, scale, exact="reciprocal"))  # they are frozen all the same
    out = layer(x.requires_grad_())
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted = grad.float() @ dequantize(weight, scale, block=(128, 128))
    assert (x.grad - wanted).norm() < 0.04 * wanted.norm()
    assert layer.weight.grad is None and layer.weight_scale_inv.grad is None


@DEVICES
def test_the_eager_loop_over_experts_is_taken(installed, device):
    x, weight, scale, _ = operands(rows=(5,), device=device)
    experts = SimpleNamespace(block_size=BLOCK, _deepgemm_disabled=False)
    out = finegrained_fp8.FP8Experts.linear(experts, x, weight, scale)
    assert same_bits(out, linear.fp8_linear(x, weight, scale, exact="reciprocal"))


def test_a_weight_in_a_mapped_file_may_begin_anywhere(installed):
    x, weight, scale, _ = operands()
    elsewhere = torch.empty(weight.numel() + 16, dtype=torch.uint8)
    begin = (8 - elsewhere.data_ptr()) % 16
    misplaced = elsewhere[begin : begin + weight.numel()].view(weight.dtype).view(weight.shape)
    misplaced.copy_(weight)
    assert misplaced.data_ptr() % 16 == 8
    assert same_bits(
        finegrained_fp8.fp8_linear(x, misplaced, scale, BLOCK), linear.fp8_linear(x, weight, scale, exact="reciprocal")
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"activation_scale": torch.tensor(0.1)},
        {"block_size": None},
        {"block_size": [64, 128]},
        {"block_size": [128, 64]},
        {"weight": torch.zeros(136, 136, dtype=torch.int8)},
        {"weight": torch.zeros(136, 272).to(torch.float8_e5m2)},
        {"weight": torch.zeros(136, 264).to(torch.float8_e4m3fn)},
        {"weight_scale_inv": torch.ones(2, 3, dtype=torch.uint8)},
        {"input": torch.zeros(4, 272, dtype=torch.float64)},
        {"input": torch.zeros(4, 272, device="meta")},
    ],
    ids=str,
)
def test_what_is_not_taken_goes_on_as_before(asked, changed):
    x, weight, scale, bias = operands()
    arguments = {"input": x, "weight": weight, "weight_scale_inv": scale, "block_size": BLOCK, "bias": bias}
    arguments |= {"activation_scale": None, "allow_deepgemm": False, **changed}
    assert finegrained_fp8.fp8_linear(**arguments) == "its own"
    assert len(asked) == 1
    assert all(seen is given for seen, given in zip(asked[0], arguments.values(), strict=True))


def test_other_gpus_are_not_taken(monkeypatch):
    x, weight, scale, _ = operands()
    x = SimpleNamespace(dtype=x.dtype, device=torch.device("cuda", 1))
    for capability, taken in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(transformers_weights, "_capability", {1: capability}.get)
        assert transformers_weights.takes(x, weight, scale, BLOCK) == taken


# ---- a model

NOISE = {"cpu": 1e-3, "cuda": 0.4}
"""Between a compiled model's logits and an eager one's: where a compiler rounds to BF16 less often, elements of inputs
fall to the other side between two FP8 numbers, and change the logits as quantising them does: by 0.22 at most in what
was drawn. Logits of another model are off by 1.4."""


@pytest.fixture(scope="module")
def wide_model():
    seed = SEEDS.getrandbits(31)
    print(f"random_model(seed={seed})")
    return qwen3_fp8.random_model(seed)


@pytest.fixture(scope="module")
def checkpoint(wide_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    qwen3_fp8.save_quantized(wide_model, directory)
    return directory


@pytest.fixture
def model(installed, checkpoint, device):
    """The checkpoint as transformers loads it: quantised beforehand."""
    if device == "cuda":
        pytest.importorskip("accelerate", reason="needs accelerate, to load FP8 models to a GPU")
    return qwen3_fp8.load(checkpoint, device)


def linears(model):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def dequantized(wide_model):
    """The model in FP32, with the weights of the checkpoint."""
    model = copy.deepcopy(wide_model)
    weights = {name: quantize_weight(module.weight.detach()) for name, module in linears(model).items()}
    model = model.float()
    for name, module in linears(model).items():
        module.weight.data = dequantize(*weights[name], block=(128, 128))
    return model


def quantize_inputs(model):
    """Let each linear of `model` round its input to FP8, and multiply in FP32."""

    def rounded(_module, arguments):
        (x,) = arguments
        a, scale = per_token_cast_to_fp8(x.reshape(-1, x.shape[-1]))
        return (dequantize(a, scale, block=(1, 128)).reshape(x.shape),)

    for module in linears(model).values():
        module.register_forward_pre_hook(rounded)


def prompt(model, batch=2, tokens=37):
    return torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)


class Traits(NamedTuple):
    """Expectations of the tests below. test_transformers_experts.py runs them with a model with experts.

    Attributes:
        batch: prompts whose logits are compared.
        quantize: has each layer of a model in FP32 round its inputs to FP8.
        most_explained, nearness: bounds of that model's error, and of the ratio of both errors.
        off: tokens of 16 that need not be those of the whole sequence.
        nodes: counts of nodes in the model's graph, by a part of their names.
    """

    batch: int
    quantize: Callable[[torch.nn.Module], None]
    most_explained: float
    nearness: tuple[float, float]
    off: int
    nodes: dict[str, int]


@pytest.fixture
def traits():
    return Traits(2, quantize_inputs, 0.2, (0.7, 1.3), 0, {"fp8_linear": 14})


@pytest.fixture
def reference(wide_model):
    """The model in FP32, with the weights of the checkpoint."""
    return dequantized(wide_model)


@DEVICES
def test_a_checkpoint_stays_fp8(model, wide_model, checkpoint):
    assert len(linears(model)) == 14
    for name, module in linears(model).items():
        weight, scale = quantize_weight(wide_model.get_submodule(name).weight.detach())
        assert type(module) is finegrained_fp8.FP8Linear
        assert torch.equal(module.weight.cpu().view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(module.weight_scale_inv.cpu(), scale)


@DEVICES
@torch.no_grad()
def test_logits_differ_from_fp32_as_quantised_activations_do(model, reference, traits):
    """Rounding the activations of a model in FP32 explains the error: nothing else may add to it."""
    tokens = prompt(model, traits.batch)
    reference = reference.to(model.device)
    wanted = reference(tokens).logits
    traits.quantize(reference)
    explained = relative_error(reference(tokens).logits, wanted)
    error = relative_error(model(tokens).logits, wanted)
    least, most = traits.nearness
    assert 0.03 < explained < traits.most_explained
    assert least * explained < error < most * explained


@DEVICES
def test_every_linear_is_multiplied_here(model, monkeypatch):
    seen = []

    def counted(x, b, *rest, **options):
        seen.append(tuple(b.shape))
        return fp8_linear(x, b, *rest, **options)

    fp8_linear = linear.fp8_linear
    monkeypatch.setattr(linear, "fp8_linear", counted)
    with torch.no_grad():
        model(prompt(model))
    assert sorted(seen) == sorted(tuple(module.weight.shape) for module in linears(model).values())


@DEVICES
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_tokens_are_those_of_whole_sequences(model, traits, cache):
    tokens = prompt(model, batch=1)
    compiled = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    generated, _ = qwen3_fp8.timed_generate(model, tokens, 16, **compiled)
    assert_greedy(model, generated, traits.off)


@torch.no_grad()
def assert_greedy(model, generated, off):
    """All of the 16 generated tokens but `off` have about the largest logit. 1 in 100 random tokens has."""
    assert generated.shape == (1, 37 + 16)
    logits = model(generated[:, :-1]).logits[:, -16:].float()
    chosen = logits.gather(-1, generated[:, -16:, None])[..., 0]
    assert (logits.amax(-1) - chosen > 0.8 * logits.std(-1)).sum() <= off


@DEVICES
@torch.no_grad()
def test_a_model_is_one_graph_for_all_lengths(model, traits):
    # Without AOT autograd, which the next test has, this takes a third of the time.
    graphs = CompileCounterWithBackend("inductor" if model.device.type == "cuda" else "eager")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    for length in (37, 41, 64):
        tokens = prompt(model, tokens=length)
        wanted = model(tokens, use_cache=False).logits.float()
        assert relative_error(compiled(tokens, use_cache=False).logits, wanted) < NOISE[model.device.type]
    (nodes,) = filter(None, ([node for node in graph.graph.nodes if "call" in node.op] for graph in graphs.graphs))
    called = [str(node.target) for node in nodes]
    assert {part: sum(part in name for name in called) for part in traits.nodes} == traits.nodes


@DEVICES
def test_a_static_cache_is_compiled_without_a_break(model, traits):
    """transformers does so by itself on a GPU, with CUDA graphs."""
    torch.compiler.reset()
    config = CompileConfig(fullgraph=True)
    if model.device.type == "cpu":
        config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
        config._compile_all_devices = True
    tokens = prompt(model, batch=1)
    generated, _ = qwen3_fp8.timed_generate(model, tokens, 16, cache_implementation="static", compile_config=config)
    assert model._compiled_call is not None
    assert_greedy(model, generated, traits.off)


def test_uninstalled_is_undone(asked, checkpoint):
    model = qwen3_fp8.load(checkpoint, "cpu")
    integration.uninstall()
    with pytest.raises(AttributeError, match="'str' object"):
        model(prompt(model))
    assert len(asked) == 1
