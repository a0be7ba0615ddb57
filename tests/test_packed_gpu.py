"""GEMMs with weights of 4 bits on a GPU: the bits of the FP8 weight's, with any tile. Of a weight that FP8 does not
hold, the same bits with any tile, near the definition's."""

import math

import pytest
import torch
from formats import IN_FP8, NAMES_OF_PACKED, draw, fp8_product, one_kernel, same_product
from helpers import ACCUMULATION, Operands, Product, are_off, exact_product, finished_product

import deep_tile
from deep_tile import dense, grouped, nn, packed, unpack
from deep_tile.kinds import EVERY_KIND, OUTPUTS, PACKED, name_of
from deep_tile.select import choose
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

pytestmark = pytest.mark.gpu

SHAPES = ((1, 16, 128), (7, 48, 352), (65, 272, 2880), (300, 576, 1504))
GROUPS = (1, 0, 5, 130, 64)


def weights(name, shape):
    """Packed, and in FP8; or, where FP8 does not hold it, in FP32."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[name], shape, "cuda", spread_of_scales=12)
    b = deep_tile.pack_weight(weight, scale, **arguments)
    return b, (packed.elements(*b, k=shape[-1]).contiguous(), b.scale)


def poisoned(*shape, dtype=torch.bfloat16):
    """A result within a larger tensor of NaN."""
    whole = torch.full((*shape[:-2], shape[-2] + 2, shape[-1]), math.nan, dtype=dtype, device="cuda")
    return whole, whole[..., 1:-1, :]


def exact_of(name, a, a_scale, wide):
    """In float64."""
    return exact_product(Operands(a, a_scale, *wide), b_rows=1 if EVERY_KIND[name].scaling == "row_blocks" else 128)


def assert_near(out, exact, what):
    """Each element within rounding and accumulation of float64's."""
    wrong = are_off(out, exact, ACCUMULATION)
    assert not wrong.any(), (what, int(wrong.sum()), wrong.nonzero()[0].tolist())


def is_untouched(whole):
    return bool(whole[..., [0, -1], :].isnan().all())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_multiplies_as_fp8_does(name, shape):
    m, n, k = shape
    b, wide = weights(name, (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    wanted = same_product(name, a, a_scale, b, wide[0])
    assert_near(wanted, exact_of(name, a, a_scale, wide), "one kernel")
    for config in default_configs(True, name):
        whole, out = poisoned(m, n)
        deep_tile.packed_gemm(a, a_scale, *b, out, config=config)
        if config.parts_of_k == 1:
            assert torch.equal(out, wanted), config.name
        else:
            assert deep_tile.reference.relative_error(out, wanted) < 4e-3, config.name
        assert is_untouched(whole), config.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("output", "tma_store"), [("bf16", False), ("fp32", True), ("fp32", False), ("fp16", True)])
def test_every_tile_of_small_groups_is_near_float64(output, tma_store, shape):
    """For each way to store, with the same bits where K is added in one part."""
    m, n, k = shape
    b, wide = weights("int4_32", (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    if output == "fp16":  # holds none of the largest products
        a_scale = a_scale / wide[1].max() / 2.0**14
    dtype = getattr(torch, OUTPUTS[output].dtype)
    exact = exact_of("int4_32", a, a_scale, wide)
    sums = same_product("int4_32", a, a_scale, b, out_dtype=torch.float32)
    for config in default_configs(tma_store, "int4_32", output):
        whole, out = poisoned(m, n, dtype=dtype)
        deep_tile.packed_gemm(a, a_scale, *b, out, config=config)
        assert_near(out, exact, config.name)
        if config.parts_of_k == 1:
            assert torch.equal(out, sums.to(dtype)), config.name
        few = deep_tile.packed_gemm(a, a_scale, *b, torch.empty_like(out), config=config, num_sms=8)
        assert torch.equal(few, out) and is_untouched(whole), config.name


@pytest.mark.parametrize(
    ("bias", "activation"), [(torch.bfloat16, None), (torch.float32, "silu"), (None, "swiglu"), (torch.float16, "gelu")]
)
def test_every_tile_of_small_groups_finishes_alike(bias, activation):
    """A bias and an activation, of the same sums."""
    m, n, k = SHAPES[-1]
    b, wide = weights("int4_32", (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    exact = exact_of("int4_32", a, a_scale, wide)
    a_scale = a_scale / exact.value.std().float()  # sums at which activations bend
    given = None if bias is None else torch.randn(n, device="cuda").to(bias)
    names = "none" if bias is None else name_of(bias), activation or "none"
    product = Product(deep_tile.packed_gemm, (), exact_of("int4_32", a, a_scale, wide), ACCUMULATION, 0.0)
    wanted = finished_product(product, given, names[1]).exact
    options = {"bias": given, "activation": activation}
    same = same_product("int4_32", a, a_scale, b, **options)
    configs = (
        *default_configs(True, "int4_32", None, False, *names),
        *default_configs(False, "int4_32", None, False, *names),
    )
    assert any(config.swap_ab for config in configs) and any(config.from_registers for config in configs)
    for config in configs:
        whole, out = poisoned(m, same.shape[1])
        deep_tile.packed_gemm(a, a_scale, *b, out, **options, config=config)
        assert_near(out, wanted, config.name)
        if config.parts_of_k == 1:
            assert torch.equal(out, same), config.name
        assert is_untouched(whole), config.name


def test_every_tile_of_small_groups_adds_to_what_out_holds():
    m, n, k = SHAPES[-1]
    b, wide = weights("int4_32", (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
    exact = exact_of("int4_32", a, a_scale, wide)
    before = torch.randn(m, n, device="cuda") * exact.value.std().float()
    wanted = exact._replace(value=exact.value + before.double())
    same = deep_tile.packed_gemm(
        a, a_scale, *b, before.clone(), accumulate=True, config=one_kernel("int4_32", "fp32", accumulate=True)
    )
    for config in (config for store in (True, False) for config in default_configs(store, "int4_32", "fp32", True)):
        whole, out = poisoned(m, n, dtype=torch.float32)
        out.copy_(before)
        deep_tile.packed_gemm(a, a_scale, *b, out, accumulate=True, config=config)
        assert_near(out, wanted, config.name)
        if config.parts_of_k == 1:
            assert torch.equal(out, same), config.name
        assert is_untouched(whole), config.name


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("bias", "activation"), [(None, None), (torch.bfloat16, None), (torch.bfloat16, "silu"), (None, "swiglu")]
)
def test_bits_of_a_row_do_not_depend_on_other_rows(name, bias, activation):
    """Few rows are multiplied from registers, many from slots."""
    n, k = 576, 2880
    b, wide = weights(name, (n, k))
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(300, k, device="cuda"))
    a_scale = a_scale / exact_of(name, a, a_scale, wide).value.std().float()
    bias = None if bias is None else torch.randn(n, device="cuda").to(bias)
    options = {"bias": bias, "activation": activation, "batch_invariant": True}
    whole = deep_tile.packed_gemm(a, a_scale, *b, **options)
    for rows in (slice(1), slice(7, 8), slice(299, 300), slice(40, 57), slice(100, 133), slice(44, 300)):
        own = deep_tile.packed_gemm(a[rows], a_scale[rows], *b, **options)
        assert torch.equal(own, whole[rows]), rows


def test_small_groups_of_extreme_scales():
    """FP16 numbers below its normal ones, negative ones and zeros; and blocks without any."""
    n, k = 272, 1504
    weight = draw("int4_32", (n, k), "cuda")[0]
    scale = torch.exp2(torch.randint(-38, 1, (n, k // 32), device="cuda").float())
    scale *= torch.randint(-1, 2, scale.shape, device="cuda")
    scale[:128, :4] = 0
    scale[200::3] = 2.0**-32
    b = deep_tile.pack_weight(weight, scale, format="int4_32")
    assert torch.equal(deep_tile.unpack_weight(*b, k=k).scale, scale)
    wide = packed.elements(*b, k=k).contiguous(), b.scale
    for m in (5, 300):
        a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device="cuda"))
        exact = exact_of("int4_32", a, a_scale, wide)
        for config in default_configs(True, "int4_32", "fp32"):
            out = deep_tile.packed_gemm(a, a_scale, *b, out_dtype=torch.float32, config=config)
            assert_near(out, exact, config.name)


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
        matrix = packed.Packed(*(x[group] for x in b))
        wanted[own] = same_product(name, a[own], a_scale[own], matrix, wide[0][group])
        assert_near(wanted[own], exact_of(name, a[own], a_scale[own], [x[group] for x in wide]), group)
    for config in (config for store in (True, False) for config in grouped_configs(layout, store, kind=name)):
        out = torch.full_like(wanted, math.nan)
        deep_tile.packed_grouped_gemm(a, a_scale, *b, out=out, **bounds, config=config)
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), config.name


@pytest.mark.parametrize("name", ["mxfp4", "int4_32", "int4_64"])
def test_packing_on_a_gpu_is_that_on_a_cpu(name):
    weight, scale, arguments, _ = draw(name, (2, 144, 352), spread_of_scales=12)
    on_gpu = deep_tile.pack_weight(weight.cuda(), scale.cuda(), **arguments)
    on_cpu = deep_tile.pack_weight(weight, scale, **arguments)
    back, wanted = deep_tile.unpack_weight(*on_gpu, k=352), deep_tile.unpack_weight(*on_cpu, k=352)
    assert torch.equal(back.weight.cpu(), weight) and torch.equal(back.scale.float().cpu(), wanted.scale.float())
    assert torch.equal(on_gpu.weight.cpu(), on_cpu.weight) and torch.equal(on_gpu.scale.cpu(), on_cpu.scale)


@pytest.fixture
def unpacking(monkeypatch):
    """Every product is made of the weight unpacked."""
    monkeypatch.setattr(choose, "LEAST_UNPACKED", 1)
    monkeypatch.setattr(choose, "unpacks", lambda problem: True)
    for operation in (dense.PACKED_GEMM, grouped.PACKED_GROUPED_GEMM):
        monkeypatch.setattr(operation, "_decided", {})
        monkeypatch.setattr(operation, "launches", {})


@pytest.mark.parametrize("name", IN_FP8)
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


@pytest.mark.parametrize("name", IN_FP8)
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


@pytest.mark.parametrize("name", ["mxfp4", "int4_32"])
def test_layers_give_a_gpu_what_they_give_a_cpu(name):
    torch.manual_seed(5)
    weight, scale, arguments, _ = draw(name, (272, 352))
    layer, x = (
        nn.PackedLinear.from_codes(weight, scale, torch.randn(272).bfloat16(), **arguments),
        torch.randn(2, 9, 352),
    )
    wanted = layer(x.bfloat16())
    assert deep_tile.reference.relative_error(layer.cuda()(x.cuda().bfloat16()).cpu(), wanted) < 4e-3
    of = [draw(name, shape)[:2] for shape in ((4, 96, 160), (4, 160, 48))]
    experts = nn.PackedExperts.from_codes(
        *of[0], *of[1], torch.randn(4, 96).bfloat16(), limit=7.0, alpha=1.702, beta=1.0, **arguments
    )
    given = torch.randn(33, 160).bfloat16(), torch.randint(-1, 4, (33, 2)), torch.rand(33, 2)
    wanted = experts(*given)
    assert deep_tile.reference.relative_error(experts.cuda()(*(x.cuda() for x in given)).cpu(), wanted) < 0.02
