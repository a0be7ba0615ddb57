"""`deep_tile.nn`: layers in FP8 through all that models do to layers, and kernels made ready for models."""

import copy
import io
import threading

import pytest
import torch
from formats import draw as draw_weight
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_tile
from deep_tile import fp8_linear, jit, nn, quantize_weight, tensors
from deep_tile.formats import FORMATS

pytestmark = pytest.mark.usefixtures("quick_compiler")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FEATURES = [(256, 130), (3884, 96), (9, 3)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(params=FEATURES, ids=str)
def layer(request, device) -> nn.Linear:
    in_features, out_features = request.param
    wide = torch.nn.Linear(in_features, out_features, device=device, dtype=torch.bfloat16)
    return nn.Linear.from_float(wide.eval().requires_grad_(False))


def draw(layer: nn.Linear, *leading: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*leading, layer.in_features, device=layer.weight.device).to(dtype)


def assert_same_layer(one: nn.Linear, other: nn.Linear, dtype: torch.dtype = torch.bfloat16) -> None:
    assert (one.weight.dtype, one.weight_scale_inv.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert one.weight.stride() == other.weight.stride()
    assert one.weight_scale_inv.is_contiguous()
    x = draw(one, 2, 3, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(one(x), fp8_linear(x, other.weight, other.weight_scale_inv, one.bias))


def saved(thing: object, **options) -> object:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


def test_from_float_keeps_all_but_the_weight(device):
    wide = torch.nn.Linear(300, 140, device=device, dtype=torch.float16).eval()
    layer = nn.Linear.from_float(wide, round_scale="pow2", batch_invariant=True)
    b, b_scale = quantize_weight(wide.weight, round_scale="pow2")
    assert torch.equal(layer.weight.float(), b.float()) and torch.equal(layer.weight_scale_inv, b_scale)
    assert layer.bias is wide.bias and not layer.training and layer.weight.device == wide.weight.device
    x = torch.randn(5, 300, device=device, dtype=torch.float16)
    expected = fp8_linear(x, b, b_scale, wide.bias, round_scale="pow2", batch_invariant=True)
    assert torch.equal(layer(x), expected) and layer(x).dtype == torch.float16
    assert "in_features=300, out_features=140, bias=True, round_scale='pow2', batch_invariant=True" in repr(layer)
    assert "weight=FP8 (float8_e4m3fn)" in repr(torch.nn.Sequential(layer))


def test_a_new_layer_is_drawn_as_torchs(device):
    layer = nn.Linear(512, 256, device=device, dtype=torch.bfloat16)
    weight = deep_tile.dequantize(layer.weight, layer.weight_scale_inv)
    assert 0.9 < weight.abs().max() * 512**0.5 < 1.1 and 0 < layer.bias.abs().max() <= 512**-0.5 * 1.01
    assert nn.Linear(16, 8, bias=False, device=device).bias is None


CONVERSIONS = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "float": (lambda m: m.to(torch.float32), torch.float32),
    "double and back": (lambda m: m.double().bfloat16(), torch.bfloat16),
    "to its device": (lambda m: m.to(m.weight.device), torch.bfloat16),
    "to the CPU and back": (lambda m: m.cpu().to(m.weight.device), torch.bfloat16),
    "deepcopy": (copy.deepcopy, torch.bfloat16),
    "saved whole": (lambda m: saved(m, weights_only=False), torch.bfloat16),
    "shared": (lambda m: m if m.weight.is_cuda else m.share_memory(), torch.bfloat16),
    "frozen": (lambda m: m.requires_grad_(False), torch.bfloat16),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_leave_the_weight(layer, name):
    """Within a model, as they are called."""
    convert, dtype = CONVERSIONS[name]
    if name == "to the CPU and back" and layer.weight.is_cuda:
        convert, dtype = (lambda m: m.cpu().cuda()), dtype
    model = torch.nn.Sequential(copy.deepcopy(layer))
    changed = convert(model[0])
    assert changed.bias.dtype == dtype
    assert_same_layer(changed, layer, dtype)


def test_state_dict_round_trip(layer):
    state = saved(layer.state_dict(), weights_only=True)
    assert [*state] == ["weight", "weight_scale_inv", "bias"]
    other = nn.Linear(layer.in_features, layer.out_features, device=layer.weight.device, dtype=torch.bfloat16)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_same_layer(other, layer)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES, ids=str)
def test_checkpoints(layer, assign, scale_name, dtype):
    """Dense weights, with either name of the scale and each of its dtypes, loaded into a layer without memory."""
    scale = layer.weight_scale_inv.to(dtype)
    state = {"weight": layer.weight.contiguous(), scale_name: scale, "bias": layer.bias.data}
    with torch.device("meta"):
        model = torch.nn.Sequential(nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16))
    if not assign:
        model.to_empty(device=layer.weight.device)
    model.load_state_dict({f"0.{name}": value for name, value in state.items()}, assign=assign)
    assert_same_layer(model[0], nn.Linear.from_fp8(layer.weight, scale, layer.bias))


def test_state_dicts_are_dense(layer, tmp_path):
    """Files need dense tensors; a state dict with parameters keeps theirs."""
    state = torch.nn.Sequential(layer).state_dict()
    assert all(x.is_contiguous() for x in state.values())
    assert torch.equal(state["0.weight"].float(), layer.weight.float())
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file
    save_file(state, tmp_path / "model.safetensors")


def dense_at(offset: int, x: torch.Tensor) -> torch.Tensor:
    """A dense copy that begins so many bytes after a multiple of 16."""
    memory = torch.empty(x.numel() * x.element_size() + offset, dtype=torch.uint8, device=x.device)
    return memory[offset:].view(x.dtype).view(x.shape).copy_(x)


def set_parameter(layer: nn.Linear, name: str, x: torch.Tensor) -> None:
    layer._parameters[name] = torch.nn.Parameter(x, requires_grad=False)


def set_data(layer: nn.Linear, name: str, x: torch.Tensor) -> None:
    getattr(layer, name).data = x


def set_attribute(layer: nn.Linear, name: str, x: torch.Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(x, requires_grad=False))


def set_by_hook(layer: nn.Linear, name: str, x: torch.Tensor) -> None:
    """A hook sets the weight right before the call and removes it after, as offloading does."""
    kept = layer._parameters[name]
    set_parameter(layer, name, torch.empty_like(x, device="meta"))
    layer.register_forward_pre_hook(lambda *_: set_parameter(layer, name, x))
    layer.register_forward_hook(lambda *_: set_parameter(layer, name, kept))


LAYOUTS = {
    "dense": lambda x: dense_at(0, x),
    "misaligned": lambda x: dense_at(4, x),
    "along n": lambda x: x.t().contiguous().t(),
    "in BF16": torch.Tensor.bfloat16,
    "in FP16": torch.Tensor.half,
    "in FP32": torch.Tensor.float,
}


@pytest.mark.parametrize("how", [set_parameter, set_data, set_attribute, set_by_hook])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_somebody_sets(layer, how, layout):
    """Results and gradients are right. Conversions repair the layer for good, and state that was set stays."""
    x = draw(layer, 5).requires_grad_()
    expected = layer(x)
    (of_x,) = torch.autograd.grad(expected.sum(), x)
    changed = copy.deepcopy(layer)
    weight = LAYOUTS[layout](layer.weight.detach())
    how(changed, "weight", weight)
    if layout == "misaligned":  # and the scale in another dtype
        how(changed, "weight_scale_inv", dense_at(8, layer.weight_scale_inv.detach()).double())
    for _ in range(2):
        out = changed(x)
        assert torch.equal(out, expected) and torch.equal(torch.autograd.grad(out.sum(), x)[0], of_x)
    if how is not set_by_hook:
        assert changed.weight.data_ptr() == weight.data_ptr()
        assert_same_layer(changed.to(x.device), layer)


def test_bytes_of_exponents_are_no_scale(layer):
    """Neither in a call nor after a conversion."""
    set_parameter(layer, "weight_scale_inv", torch.full_like(layer.weight_scale_inv, 127).byte())
    for changed in (layer, copy.deepcopy(layer).bfloat16()):
        with pytest.raises(TypeError, match=r"b_scale must be .*uint8.*\.view\(torch.float8_e8m0fnu\)"):
            changed(draw(layer, 5))


def test_another_weight_is_refused(layer):
    """A tied embedding leaves such a weight; an input cast to the weight's dtype is refused as well."""
    x = draw(layer, 5)
    set_parameter(layer, "weight", torch.randn(layer.weight.shape, device=x.device).bfloat16())
    with pytest.raises(TypeError, match="weight has become torch.bfloat16.*Leave the layer out of replace_linears"):
        layer(x)
    with pytest.raises(TypeError, match="x is torch.float8_e4m3fn.*Leave the layer out of replace_linears"):
        layer(x.to(torch.float8_e4m3fn))


def test_wrong_checkpoints_are_refused(layer):
    state = layer.state_dict()
    before = layer.weight.float()
    with pytest.raises(TypeError, match="weight is torch.bfloat16, and this layer's is torch.float8_e4m3fn"):
        layer.load_state_dict({"weight": before.bfloat16(), "bias": state["bias"]})
    with pytest.raises(TypeError, match="weight_scale_inv is torch.float64; it must be torch.float32, torch.bfloat16"):
        layer.load_state_dict(state | {"weight_scale_inv": state["weight_scale_inv"].double()})
    with pytest.raises(ValueError, match=r"weight_scale_inv .*one scale for each 128x128 block"):
        layer.load_state_dict(state | {"weight_scale_inv": torch.ones(7, 7, device=layer.weight.device)})
    with pytest.raises(TypeError, match=r"uint8; it must be .*weight_scale_inv\.view\(torch.float8_e8m0fnu\)"):
        alone = {"weight_scale_inv": torch.full_like(state["weight_scale_inv"], 127).byte()}  # of a file without weight
        layer.load_state_dict(alone, strict=False)
    with pytest.raises(RuntimeError, match="Missing key.*weight_scale_inv"):
        layer.load_state_dict({"weight": state["weight"], "bias": state["bias"]})
    assert torch.equal(layer.weight.float(), before)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"weight": torch.zeros(256, 128)}, TypeError, "weight is torch.float32; it must be torch.float8_e4m3fn"),
        ({"weight_scale_inv": torch.ones(2, 1).int()}, TypeError, "weight_scale_inv is torch.int32; it must be"),
        ({"weight_scale_inv": torch.ones(1, 2)}, ValueError, r"\[256, 128\] and weight_scale_inv \[1, 2\]"),
        ({"weight": torch.zeros(128).to(torch.float8_e4m3fn)}, ValueError, r"weight is \[128\]"),
        ({"weight_scale_inv": torch.ones(2, 1, device="meta")}, ValueError, "weight_scale_inv is on meta but weight"),
        ({"weight": torch.zeros(256, 128).to(torch.float8_e5m2)}, TypeError, "scaled_gemm takes torch.float8_e5m2"),
        ({"weight_scale_inv": torch.ones(())}, ValueError, r"_inv\.reshape\(-1, 1\)\.expand\(2, 1\)"),
        ({"weight_scale_inv": torch.ones(256)}, ValueError, "scaled_gemm takes a scale for each row"),
        ({"weight_scale_inv": torch.ones(8, 4)}, ValueError, "may be 'fp8_32x32', which deep_tile.to_blocks re-bases"),
        ({"weight_scale_inv": torch.ones(256, 4).byte()}, TypeError, "from_fp8 with format='mxfp8'"),
        ({"weight": torch.zeros(256, 64).byte(), "weight_scale_inv": torch.ones(256, 4).byte()},
         *(TypeError, "weight is torch.uint8; it must be torch.float8_e4m3fn.*format='mxfp4'")),
        ({"global_scale": 2.0}, ValueError, "global_scale is given without a format: pass format='nvfp4'"),
        ({"format": "mxfp8"}, ValueError, r"format 'mxfp8' has .*here \[256, 4\]"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(change, kind, message):
    good = {"weight": torch.zeros(256, 128).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 1)}
    nn.Linear.from_fp8(**good)
    with pytest.raises(kind, match=message):
        nn.Linear.from_fp8(**good | change)


@pytest.mark.parametrize("name", FORMATS)
def test_layers_of_other_formats(device, name):
    """Weights are those of `to_blocks`; checkpoints hold this format."""
    weight, scale, arguments, _ = draw_weight(name, (130, 96), device)
    layer = nn.Linear.from_fp8(weight, scale, max_error=1, **arguments, batch_invariant=True)
    b, b_scale, report = deep_tile.to_blocks(weight, scale, max_error=1, **arguments)
    assert torch.equal(layer.weight.float(), b.float()) and torch.equal(layer.weight_scale_inv, b_scale)
    x = draw(layer, 5)
    assert torch.equal(layer(x), fp8_linear(x, b, b_scale, batch_invariant=True))
    assert layer.options == {"batch_invariant": True}
    if report.changed:
        with pytest.raises(ValueError, match="more than max_error=0"):
            nn.Linear.from_fp8(weight, scale, max_error=0, **arguments)


def test_gradients_pass_a_frozen_layer(device):
    """An adapter beside the layer needs them."""
    layer = nn.Linear(256, 128, device=device, dtype=torch.bfloat16)
    down, up = (torch.nn.Linear(*sizes, bias=False, device=device).bfloat16() for sizes in ((256, 8), (8, 128)))
    x = draw(layer, 4, 6).requires_grad_()
    (layer(x) + up(down(x))).square().sum().backward()
    assert layer.weight.grad is None and layer.weight_scale_inv.grad is None
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (layer.bias, down.weight, up.weight))
    assert x.grad.abs().sum() > 0


def test_a_trainable_weight_is_refused_where_nothing_has_an_address():
    layer, x = nn.Linear(256, 128).requires_grad_(), torch.randn(4, 256)
    with pytest.raises(Exception, match="b requires a gradient"):
        torch.export.export(layer, (x,))
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="b requires a gradient"):
        fake = {name: mode.from_tensor(parameter) for name, parameter in layer.named_parameters()}
        torch.func.functional_call(layer, fake, mode.from_tensor(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
        self.tied = self.layers[1]
        self.lm_head = torch.nn.Linear(256, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.tied):
            x = torch.relu(layer(x))
        return self.lm_head(x)


def test_replace_linears(device):
    model = Model().to(device).eval()
    x = torch.randn(3, 256, device=device)
    with torch.no_grad():
        wide = model(x)
        assert nn.replace_linears(model, lambda name, layer: "lm_head" not in name, batch_invariant=True) == 2
        assert model.tied is model.layers[1] and type(model.layers[0]) is nn.Linear
        assert type(model.lm_head) is torch.nn.Linear and model.tied.options == {"batch_invariant": True}
        assert 0 < (model(x) - wide).norm() / wide.norm() < 0.15


# ---- kernels made ready


def test_precompile_model(monkeypatch):
    """Every product and every cast of its layers, once; without a GPU they go to the cache."""
    model = Model().to("meta").requires_grad_(False)
    with pytest.raises(ValueError, match="Model has no layer with a weight of torch.float8_e4m3fn"):
        deep_tile.precompile_model(model, 64)
    model.layers[0] = nn.Linear(256, 512, device="meta")
    shapes = []
    monkeypatch.setattr(nn.api, "precompile", lambda given, **_: shapes.extend(given) or nn.api.Precompiled((), 0))
    monkeypatch.setattr(nn.cast, "load_kernels", lambda device, workers, progress: shapes.append("casts"))
    model.foreign = torch.nn.Module()
    model.foreign.weight = torch.empty(100, 128, device="meta", dtype=torch.float8_e4m3fn)
    model.foreign.weight_scale = torch.empty(1, 1, device="meta")
    deep_tile.precompile_model(model, 64)
    assert shapes == [(512, 256, 64), (100, 128, 64), "casts"]


def test_layers_have_kernels_for_their_own_options(monkeypatch):
    asked = []
    made = nn.api.Precompiled((), 0)
    monkeypatch.setattr(nn.api, "precompile", lambda given, **options: asked.append(options) or made)
    monkeypatch.setattr(nn.cast, "load_kernels", lambda device, workers, progress: None)
    options = [{}, {"batch_invariant": False, "out_dtype": torch.float32}, {"num_sms": 64}]
    model = torch.nn.ModuleList(nn.Linear(128, 128, False, device="meta", **own) for own in options)
    deep_tile.precompile_model(model, 64, batch_invariant=True)
    names = ("num_sms", "batch_invariant", "out_dtype")
    assert [tuple(of_linear[name] for name in names) for of_linear in asked[:-1]] == [
        *((None, True, torch.bfloat16), (None, False, torch.float32), (64, True, torch.bfloat16))
    ]
    assert repr(made) == "<Precompiled: 0 kernels, 0 compiled>"


def experts_of(names: str = "gate_up_proj down_proj", scale: str = "{}_scale_inv") -> torch.nn.Module:
    """A layer with weights [3, 512, 256] and [3, 256, 128], as engines hold them."""
    layer = torch.nn.Module()
    for name, (n, k) in zip(names.split(), ((512, 256), (256, 128)), strict=True):
        weight = torch.empty(3, n, k, device="meta", dtype=torch.float8_e4m3fn)
        layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        layer.register_buffer(scale.format(name), torch.empty(3, n // 128, k // 128, device="meta"))
    return layer


@pytest.mark.parametrize("how", [{}, {"names": "w13_weight w2_weight", "scale": "{}_scale"}], ids=str)
def test_precompile_model_finds_experts(monkeypatch, how):
    asked = []
    monkeypatch.setattr(nn.cast, "load_kernels", lambda device, workers, progress: None)
    precompile = nn.api.precompile
    monkeypatch.setattr(nn.api, "precompile", lambda given, **options: asked.append((given, options)) or made)
    made = precompile([])
    model = torch.nn.ModuleList([experts_of(**how), nn.Linear(256, 512, device="meta")])
    deep_tile.precompile_model(model, 64, grouping="counts", num_sms=20)
    (linears, of_linears), (experts, of_experts) = asked
    assert linears == [(512, 256, 64)] and "grouping" not in of_linears
    assert (of_linears.pop("bias"), of_linears.pop("out_dtype")) == (torch.float32, torch.bfloat16)
    assert experts == [(256, 128, 64), (512, 256, 64)] and of_experts == of_linears | {"grouping": "counts"}
    with pytest.raises(ValueError, match="Module has no layer with a weight"):
        deep_tile.precompile_model(experts_of(scale="{}_zero_point"), 64)


def test_nothing_compiles_after_it():
    """With compilation forbidden, a missing kernel is named with the remedy, in every thread."""
    model = torch.nn.Sequential(nn.Linear(512, 256, device="meta"))
    made = deep_tile.precompile_model(model, 8)
    assert made.configs and made.compiled <= len(made.configs) + len(nn.cast.all_kernels())
    before, refused = deep_tile.compilations(), []

    def compile_another() -> None:
        with pytest.raises(RuntimeError) as error:
            jit.load_cubin('extern "C" __global__ void not_ready() {}', "not_ready")
        refused.append(str(error.value))

    with deep_tile.forbid_compilation():
        assert deep_tile.precompile_model(model, 8) == made._replace(compiled=0)
        for run in (compile_another, threading.Thread(target=compile_another).start):
            run()
        while threading.active_count() > 1 and len(refused) < 2:
            pass
    assert len(refused) == 2 and all("not_ready would have to be compiled" in text for text in refused)
    assert "deep_tile.precompile_model" in refused[0] and deep_tile.compilations() == before


def test_forbidding_nests_and_can_be_called():
    source = 'extern "C" __global__ void nested() {}'
    deep_tile.forbid_compilation()
    try:
        with deep_tile.forbid_compilation(False):
            jit.compile_kernel(source, "nested")
        with pytest.raises(RuntimeError, match="nested would have to be compiled"):
            jit.compile_kernel(source, "nested")
    finally:
        deep_tile.forbid_compilation(False)
    jit.compile_kernel(source, "nested")
    with pytest.raises(TypeError, match="forbid is 'yes'; pass True or False"):
        deep_tile.forbid_compilation("yes")


@pytest.mark.gpu
def test_experts_compile_nothing():
    model = experts_of()
    deep_tile.precompile_model(model, 300)
    b, b_scale = deep_tile.quantize_weight(torch.randn(3 * 512, 256, device="cuda"))
    b, b_scale = b.view(3, 512, 256), b_scale.view(3, 4, 2)
    with deep_tile.forbid_compilation(), torch.no_grad():
        for tokens in (1, 7, 64, 300):
            x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
            rows, offs, index = deep_tile.sort_by_expert(torch.randint(3, (tokens, 2), device="cuda"), 3)
            a = deep_tile.per_token_cast_to_fp8(x, rows=rows, offs=offs)
            gate_up = deep_tile.fp8_grouped_gemm(*a, b, b_scale, offs)
            h, _ = deep_tile.silu_mul_cast_to_fp8(gate_up, offs=offs)
            assert h.shape == (2 * tokens, 256)
            weights = torch.rand(tokens, 2, device="cuda")
            assert deep_tile.combine(gate_up, weights, index).isfinite().all()


@pytest.mark.gpu
def test_serving_compiles_nothing():
    model = torch.nn.Sequential(nn.Linear(1024, 768), nn.Linear(768, 1024)).to("cuda", torch.bfloat16)
    deep_tile.precompile_model(model, 300)
    with deep_tile.forbid_compilation(), torch.no_grad():
        for m in (1, 2, 7, 8, 9, 31, 64, 65, 127, 128, 129, 200, 256, 299, 300):
            assert model(torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)).isfinite().all()
