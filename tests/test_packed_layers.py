"""Layers of packed weights: results, moving, saving, loading, refusals."""

import pytest
import torch
from formats import NAMES_OF_PACKED, draw

import deep_tile
from deep_tile import nn, packed
from deep_tile.kinds import PACKED
from deep_tile.reference import relative_error

each_format = pytest.mark.parametrize("name", PACKED)


def drawn(name, shape):
    """Positional and keyword arguments of `from_codes`."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[name], shape)
    return (weight, scale), arguments


def linear(name="mxfp4", n=48, k=352, **options):
    given, arguments = drawn(name, (n, k))
    return nn.PackedLinear.from_codes(*given, torch.randn(n).bfloat16(), **arguments, **options)


def make_experts(name="mxfp4", count=4, hidden=160, width=48, interleaved=False):
    gate_up, arguments = drawn(name, (count, 2 * width, hidden))
    down, more = drawn(name, (count, hidden, width))
    factors = (arguments.pop("global_scale"), more["global_scale"]) if name == "nvfp4" else None
    biases = torch.randn(count, 2 * width).bfloat16(), torch.randn(count, hidden).bfloat16()
    gating = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
    options = {**arguments, "global_scales": factors, "interleaved": interleaved, **gating}
    return nn.PackedExperts.from_codes(*gate_up, *down, *biases, **options)


@each_format
@pytest.mark.parametrize("rows", [(3,), (2, 5), (0,)], ids=str)
def test_linear_is_cast_and_product(name, rows):
    layer, x = linear(name), torch.randn(*rows, 352).bfloat16()
    a, a_scale = deep_tile.per_token_cast_to_fp8(x.view(-1, 352))
    wanted = deep_tile.packed_gemm(a, a_scale, layer.weight, layer.weight_scale, bias=layer.bias)
    assert layer.weight.requires_grad is False and layer(x).dtype == x.dtype
    assert torch.equal(layer(x), wanted.view(*rows, 48)) and layer(x.float()).dtype == torch.float32
    assert f"in_features=352, out_features=48, bias=True, weight={name}" in repr(layer)


def test_a_linear_has_the_products_options():
    layer, x = linear(activation="silu"), torch.randn(3, 352).bfloat16()
    plain = linear()
    plain.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(x), plain(x))


@each_format
def test_layers_are_saved_loaded_and_converted(name):
    layer, x = linear(name), torch.randn(3, 352).bfloat16()
    other = nn.PackedLinear(352, 48, format=name, dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    other.half().type(torch.float32).to(torch.float64)
    assert other.weight.dtype == torch.uint8 and other.weight_scale.dtype == torch.float32
    assert other.bias.dtype == torch.float64 and torch.equal(other.weight_scale, layer.weight_scale)
    experts = make_experts(name)
    more = nn.PackedExperts(4, 160, 48, bias=True, dtype=torch.bfloat16, format=name, **experts.gating)
    more.load_state_dict(experts.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(more.parameters(), experts.parameters(), strict=True))


@pytest.mark.parametrize("assign", [False, True])
@each_format
def test_files_have_layers(tmp_path, name, assign):
    """Which want dense tensors, and put them at any address. Scales lie along n afterwards, as pack_weight's."""
    files = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    layer, x = linear(name), torch.randn(3, 352).bfloat16()
    files.save_file(layer.state_dict(), tmp_path / "layer")
    other = nn.PackedLinear(352, 48, format=name, dtype=torch.bfloat16)
    other.load_state_dict(files.load_file(tmp_path / "layer"), assign=assign)
    assert torch.equal(other(x), layer(x)) and other.weight_scale.stride() == layer.weight_scale.stride()


def test_elements_of_a_row_are_saved_with_it(tmp_path):
    """In every kind of file. Rows of 96 and 128 elements have as many bytes."""
    files = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    layer, model = (wrap(nn.PackedLinear(96, 48, bias=False)) for wrap in (lambda x: x, torch.nn.Sequential))
    torch.save(model.state_dict(), tmp_path / "state")
    files.save_file(model.state_dict(), tmp_path / "file")
    of_model = torch.load(tmp_path / "state"), files.load_file(tmp_path / "file"), model.state_dict()
    for saved in of_model:
        torch.nn.Sequential(nn.PackedLinear(96, 48, bias=False)).load_state_dict(saved)
        without = {name: x for name, x in saved.items() if "row_elements" not in name}
        torch.nn.Sequential(nn.PackedLinear(96, 48, bias=False)).load_state_dict(without)
    others = ((torch.nn.Sequential(nn.PackedLinear(112, 48, bias=False)), saved) for saved in of_model)
    for other, saved in ((nn.PackedLinear(128, 48, bias=False), layer.state_dict()), *others):
        with pytest.raises(ValueError, match=r"weight has 96 elements per row.*in_features=96"):
            other.load_state_dict(saved)


@pytest.mark.parametrize("make", [lambda: linear(), lambda: nn.PackedLinear(96, 48, device="meta")])
def test_loaders_that_set_tensors_one_by_one_find_each(make):
    """accelerate's does, and knows parameters and buffers alone."""
    layer = make()
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    state = layer.state_dict()
    assert own.keys() == state.keys() and all(x.device == state[name].device for name, x in own.items())
    assert len({x.device for x in own.values()}) == 1


def test_numbers_in_other_dtypes_are_not_loaded():
    """Bytes of exponents are no scales, and torch copies them as if they were."""
    state = linear().state_dict()
    for name, other in (("weight_scale", torch.uint8), ("weight", torch.float32)):
        with pytest.raises(TypeError, match=rf"{name} is a tensor of {other}; .* from_codes of a checkpoint's weight"):
            linear().load_state_dict(state | {name: state[name].to(other)})


def test_a_bias_elsewhere_is_refused():
    """torch adds nothing of one on meta, such as a checkpoint without biases leaves there."""
    layer = make_experts()
    layer.down_bias = torch.nn.Parameter(layer.down_bias.to("meta"), requires_grad=False)
    x, chosen = torch.randn(3, layer.down.shape[1]).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="bias is on meta but x is on cpu"):
        layer(x, chosen, torch.ones(3, 1))


@each_format
def test_experts_are_those_in_turn(name):
    layer = make_experts(name)
    x, shares = torch.randn(9, 160).bfloat16(), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    chosen[4, 1] = -1
    out, wanted = layer(x, chosen, shares), torch.zeros(9, 160, dtype=torch.float64)
    for expert in range(4):

        def product(x, of, expert=expert):
            a, a_scale = deep_tile.per_token_cast_to_fp8(x)
            weight, scale, bias = (getattr(layer, of + end)[expert] for end in ("", "_scale", "_bias"))
            return deep_tile.packed_gemm(a, a_scale, weight, scale) + bias

        token, j = (chosen == expert).nonzero(as_tuple=True)
        gate, up = product(x[token], "gate_up").float().chunk(2, 1)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        wanted.index_add_(0, token, product(h, "down").double() * shares[token, j, None])
    assert out.dtype == x.dtype and relative_error(out, wanted) < 0.02
    assert "num_experts=4, hidden=160, width=48, bias=True" in repr(layer)


def test_rows_that_alternate_are_put_in_order():
    torch.manual_seed(3)
    alternating = make_experts(interleaved=True)
    torch.manual_seed(3)
    plain = make_experts()
    back = [packed.unpack_weight(layer.gate_up, layer.gate_up_scale, 160) for layer in (alternating, plain)]
    for one, two in zip(back[0][:2], back[1][:2], strict=True):
        one, two = one.view(torch.uint8), two.view(torch.uint8)
        assert torch.equal(one, torch.cat([two[:, ::2], two[:, 1::2]], 1))
    assert torch.equal(alternating.gate_up_bias[:, :48], plain.gate_up_bias[:, ::2])


def test_kernels_are_made_ready():
    with torch.device("meta"):
        model = torch.nn.Sequential(nn.PackedLinear(512, 256, bias=False), nn.PackedExperts(4, 512, 256, format="int4"))
    calls = [*nn.packed_layers.products(model, torch.bfloat16)]
    assert calls == [
        ((256, 512), {"kind": "mxfp4", "out_dtype": torch.bfloat16, "bias": None}),
        ((512, 512), {"kind": "int4", "grouping": "offs"}),
        ((512, 256), {"kind": "int4", "grouping": "offs"}),
    ]


def two_experts(*biases, **options):
    return nn.PackedExperts.from_codes(
        *drawn("mxfp4", (2, 32, 64))[0], *drawn("mxfp4", (2, 64, 16))[0], *biases, **options
    )


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: nn.PackedLinear(64, 24), ValueError, "24 rows"),
        (lambda: nn.PackedLinear(64, 32, format="int8"), ValueError, "format is 'int8'"),
        (lambda: nn.PackedLinear(64.5, 32), TypeError, "in_features is 64.5.*pass an int"),
        (lambda: nn.PackedLinear.from_codes(*drawn("mxfp4", (2, 16, 64))[0]), ValueError, "2 matrices"),
        (lambda: nn.PackedExperts.from_codes(*drawn("mxfp4", (2, 32, 64))[0], *drawn("mxfp4", (3, 64, 32))[0]),
         ValueError, "must be of"),
        (lambda: nn.PackedExperts.from_codes(*drawn("mxfp4", (2, 32, 64))[0], *drawn("mxfp4", (2, 64, 288))[0]),
         ValueError, r"\[2, 32, 64\] and \[2, 64, 288\] elements; they must be of"),
        (  # within one K block, whose packed rows have equal bytes
            lambda: nn.PackedExperts.from_codes(*drawn("mxfp4", (2, 32, 64))[0], *drawn("mxfp4", (2, 64, 32))[0]),
            ValueError,
            r"\[2, 32, 64\] and \[2, 64, 32\] elements; they must be of",
        ),
        (lambda: nn.PackedExperts.from_codes(*drawn("mxfp4", (2, 32, 64))[0], *drawn("mxfp4", (2, 80, 16))[0]),
         *(ValueError, "they must be of")),
        (
            lambda: nn.PackedExperts.from_codes(
                *drawn("mxfp4", (2, 32, 64))[0], *drawn("mxfp4", (2, 64, 32))[0], torch.zeros(2, 31)
            ),
            ValueError,
            r"gate_up_bias is \[2, 31\]; it must be \[2, 32\]",
        ),
        (lambda: two_experts(torch.zeros(2, 32).int()), TypeError, "gate_up_bias is a tensor of torch.int32"),
        (lambda: two_experts([0.0]), TypeError, "gate_up_bias is a list"),
        (lambda: two_experts([0.0], interleaved=True), TypeError, "gate_up_bias must be a torch.Tensor; got list"),
        (lambda: two_experts(torch.zeros(32), interleaved=True), ValueError, r"gate_up_bias is \[32\]; with"),
        (lambda: two_experts(torch.zeros(2, 32).to_sparse()), TypeError, "gate_up_bias"),
        (lambda: two_experts(global_scales=2.0), TypeError, "global_scales is 2.0; pass a pair"),
        (lambda: nn.PackedLinear.from_codes(*drawn("mxfp4", (16, 64))[0], [0.0] * 16), TypeError, "bias is a list"),
    ],
)  # fmt: skip
def test_what_is_no_layer_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_gradients_are_refused():
    """By the name of the layer: what it calls is no remedy."""
    with pytest.raises(RuntimeError, match="x requires a gradient, and PackedLinear has none: call within"):
        linear()(torch.randn(3, 352, requires_grad=True))
