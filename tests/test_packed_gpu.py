"""Products with weights of 4 bits on a GPU: bit for bit those of the FP8 weight, whatever the tile."""

import math

import pytest
import torch
from formats import NAMES_OF_PACKED, draw

import deep_tile
from deep_tile import packed
from deep_tile.kinds import PACKED
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


def fp8_product(name, a, a_scale, b, b_scale, **options):
    """Of an FP8 weight, by the scales that it has."""
    call = deep_tile.scaled_gemm if name == "int4" else deep_tile.fp8_gemm
    return call(a, a_scale, b, b_scale, batch_invariant=True, **options)


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
        if config.split_k == 1:
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


def test_a_graph_holds_for_other_weights_and_activations():
    b, _ = weights("mxfp4", (576, 1024))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(16, 1024, device="cuda"))
    out = deep_tile.packed_gemm(a, a_scale, *b, batch_invariant=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_tile.packed_gemm(a, a_scale, *b, out, batch_invariant=True)
    other, wide = weights("mxfp4", (576, 1024))
    b.weight.copy_(other.weight)
    b.scale.copy_(other.scale)
    graph.replay()
    assert torch.equal(out, deep_tile.fp8_gemm(a, a_scale, *wide, batch_invariant=True))
