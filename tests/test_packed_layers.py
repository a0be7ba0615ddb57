"""Layers of packed weights: results, moving, saving, loading, refusals."""

import pytest
import torch
from formats import NAMES_OF_PACKED, draw

import deep_tile
from deep_tile import nn
from deep_tile.kinds import PACKED

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


def test_layers_of_groups_of_64_are_those_of_32():
    weight, scale, arguments, _ = draw("int4_64", (48, 352))
    layer, x = nn.PackedLinear.from_codes(weight, scale, **arguments), torch.randn(3, 352).bfloat16()
    other = nn.PackedLinear(352, 48, bias=False, format="int4_32")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and layer(x).any()


def test_layers_of_small_groups_are_those_of_groups_of_128_with_the_same_scales():
    """In FP8, and with the same elements, whose sums are rounded alike but for a few."""
    small, large, sizes = {}, {}, {"gate_up": (4, 96, 160), "down": (4, 160, 48)}
    for name, shape in sizes.items():
        large[name], of_groups, _, _ = draw("int4_128", shape)
        large[f"{name}_scale"] = of_groups.bfloat16()
        small[name], each = large[name], of_groups.repeat_interleave(4, -1)[..., : -(-shape[-1] // 32)]
        small[f"{name}_scale"] = each.bfloat16()
    given = torch.randn(33, 160).bfloat16(), torch.randint(-1, 4, (33, 2)), torch.rand(33, 2)
    out, wanted = (
        nn.PackedExperts.from_codes(**weights, format=name)(*given)
        for weights, name in ((small, "int4_32"), (large, "int4_128"))
    )
    assert wanted.norm() > 0 and deep_tile.reference.relative_error(out, wanted) < 1e-3


@pytest.mark.parametrize(("made", "other"), [("int4", "int4_32"), ("int4_32", "int4"), ("int4_32", "nvfp4")])
def test_a_layer_of_another_kind_does_not_load(made, other):
    with pytest.raises(RuntimeError, match="size mismatch"):
        nn.PackedLinear(352, 48, format=other, dtype=torch.bfloat16).load_state_dict(linear(made).state_dict())


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
