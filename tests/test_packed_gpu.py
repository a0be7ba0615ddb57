"""GEMMs with weights of 4 bits on a GPU: the bits of the FP8 weight's, with any tile."""

import math

import pytest
import torch
from formats import NAMES_OF_PACKED, draw, fp8_product

import deep_tile
from deep_tile import dense, grouped, nn, packed, unpack
from deep_tile.kinds import PACKED
from deep_tile.select import choose
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

pytestmark = pytest.mark.gpu

SHAPES = ((1, 16, 128), (7, 48, 352), (65, 272, 2880), (300, 576, 1504))
GROUPS = (1, 0, 5, 130, 64)


def weights(name, shape):
    """Packed, and in FP8."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[name], shape, "cuda", spread_of_scales=12)
    b = deep_tile.pack_weight(weight, scale, **arguments)
    return b, (packed.as_fp8(*b, k=shape[-1]).contiguous(), b.scale)


def poisoned(*shape):
    """A result within a larger tensor of NaN."""
    whole = torch.full((*shape[:-2], shape[-2] + 2, shape[-1]), math.nan, dtype=torch.bfloat16, device="cuda")
    return whole, whole[..., 1:-1, :]


def is_untouched(whole):
    return bool(whole[..., [0, -1], :].isnan().all())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_multiplies_as_fp8_does(name, shape):
    m, n, k = shape
    b, wide = weights(name, (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    wanted = fp8_product(name, a, a_scale, *wide)
    for config in default_configs(True, name):
        whole, out = poisoned(m, n)
        deep_tile.packed_gemm(a, a_scale, *b, out, config=config)
        if config.parts_of_k == 1:
            assert torch.equal(out, wanted), config.name
        else:
            assert deep_tile.reference.relative_error(out, wanted) < 4e-3, config.name
        assert is_untouched(whole), config.name


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("layout", ["offs", "counts"])
def test_every_tile_multiplies_groups_as_fp8_does(name, layout):
    n, k, sizes = 272, 1504, torch.tensor(GROUPS, device="cuda")
    b, wide = weights(name, (len(GROUPS), n, k))
    rows = (sum(GROUPS) + 3,) if layout == "offs" else (len(GROUPS), max(GROUPS) + 3)
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(*rows, k, device="cuda"))
    bounds = {"offs": sizes.cumsum(0).int()} if layout == "offs" else {"counts": sizes.int()}
    wanted = torch.full((*rows, n), math.nan, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor(GROUPS).cumsum(0).tolist()
    for group, (end, size) in enumerate(zip(ends, GROUPS, strict=True)):
        own = slice(end - size, end) if layout == "offs" else (group, slice(size))
        wanted[own] = fp8_product(name, a[own], a_scale[own], *(x[group] for x in wide))
    for config in grouped_configs(layout, True, kind=name):
        out = torch.full_like(wanted, math.nan)
        deep_tile.packed_grouped_gemm(a, a_scale, *b, out=out, **bounds, config=config)
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), config.name


def test_packing_on_a_gpu_is_that_on_a_cpu():
    weight, scale, _, _ = draw("mxfp4", (2, 144, 352))
    on_gpu, on_cpu = deep_tile.pack_weight(weight.cuda(), scale.cuda()), deep_tile.pack_weight(weight, scale)
    assert torch.equal(on_gpu.weight.cpu(), on_cpu.weight) and torch.equal(on_gpu.scale.cpu(), on_cpu.scale)


@pytest.fixture
def unpacking(monkeypatch):
    """Every product is made of the weight unpacked."""
    monkeypatch.setattr(choose, "LEAST_UNPACKED", 1)
    monkeypatch.setattr(choose, "unpacks", lambda problem: True)
    for operation in (dense.PACKED_GEMM, grouped.PACKED_GROUPED_GEMM):
        monkeypatch.setattr(operation, "_decided", {})
        monkeypatch.setattr(operation, "launches", {})


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_products_of_the_unpacked_weight_are_fp8s(unpacking, name, shape):
    """FP8 kernels multiply them, in a graph, too. A given config stays with the packed weight."""
    m, n, k = shape
    b, wide = weights(name, (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    wanted, (whole, out) = fp8_product(name, a, a_scale, *wide), poisoned(m, n)
    for _ in range(2):
        deep_tile.packed_gemm(a, a_scale, *b, out, batch_invariant=True)
        assert torch.equal(out, wanted) and is_untouched(whole)
    assert not dense.PACKED_GEMM.launches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_tile.packed_gemm(a, a_scale, *b, out, batch_invariant=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    config = next(config for config in default_configs(True, name) if config.parts_of_k == 1)
    deep_tile.packed_gemm(a, a_scale, *b, out, config=config)
    assert torch.equal(out, wanted) and dense.PACKED_GEMM.launches
    with pytest.raises(ValueError, match="b_scale"):
        deep_tile.packed_gemm(a, a_scale, b.weight, b.scale[:, :-1])
    with pytest.raises(RuntimeError, match="packed_gemm has none"):
        deep_tile.packed_gemm(a, a_scale.requires_grad_(), *b)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("shape", [(16, 128), (3, 144, 352), (5, 16, 1504)], ids=str)
def test_weights_are_unpacked_as_defined(name, shape):
    b, (wide, _) = weights(name, shape)
    assert torch.equal(unpack.to_fp8(b.weight, shape[-1]).view(torch.uint8), wide.view(torch.uint8))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_groups_of_unpacked_weights_are_fp8s(unpacking, name):
    rows, n, k = 150, 272, 1504
    b, wide = weights(name, (2, n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(2 * rows, k, device="cuda"))
    offs = torch.tensor([rows - 5, 2 * rows - 7], device="cuda", dtype=torch.int32)
    out = deep_tile.packed_grouped_gemm(a, a_scale, *b, offs)
    wanted = deep_tile.fp8_grouped_gemm(a, a_scale, *wide, offs)
    assert torch.equal(out[: 2 * rows - 7], wanted[: 2 * rows - 7]) and not grouped.PACKED_GROUPED_GEMM.launches


def test_layers_give_a_gpu_what_they_give_a_cpu():
    torch.manual_seed(5)
    weight, scale, arguments, _ = draw("mxfp4", (272, 352))
    layer, x = (
        nn.PackedLinear.from_codes(weight, scale, torch.randn(272).bfloat16(), **arguments),
        torch.randn(2, 9, 352),
    )
    wanted = layer(x.bfloat16())
    assert deep_tile.reference.relative_error(layer.cuda()(x.cuda().bfloat16()).cpu(), wanted) < 4e-3
    of = [draw("mxfp4", shape)[:2] for shape in ((4, 96, 160), (4, 160, 48))]
    experts = nn.PackedExperts.from_codes(
        *of[0], *of[1], torch.randn(4, 96).bfloat16(), limit=7.0, alpha=1.702, beta=1.0
    )
    given = torch.randn(33, 160).bfloat16(), torch.randint(-1, 4, (33, 2)), torch.rand(33, 2)
    wanted = experts(*given)
    assert deep_tile.reference.relative_error(experts.cuda()(*(x.cuda() for x in given)).cpu(), wanted) < 0.02
