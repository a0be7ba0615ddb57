"""Weights of 4 bits: packing and its inverse, the FP8 that they become, and GEMMs with them on the CPU."""

import pytest
import torch
from formats import IN_FP8, NAMES_OF_PACKED, draw, spread

import deep_tile
from deep_tile import (
    GemmConfig,
    checks,
    dense,
    launches,
    pack_weight,
    packed,
    packed_gemm,
    packed_grouped_gemm,
    plan,
    to_blocks,
    unpack_weight,
)
from deep_tile import cast as kernels
from deep_tile.codegen import kernel_source
from deep_tile.kinds import EVERY_KIND, PACKED
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select import choose
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

FORMATS = [*PACKED]
each_format = pytest.mark.parametrize("name", FORMATS)
each_in_fp8 = pytest.mark.parametrize("name", IN_FP8)
SHAPES = [(16, 32), (48, 352), (3, 144, 256), (2, 1, 16, 2880 // 5), (0, 32), (2, 0, 128), (0, 16, 128)]


def drawn(name, shape, spread_of_scales=4):
    """A weight, its scale and keywords; no scale of NVFP4 is negative."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[name], shape, spread_of_scales=spread_of_scales)
    return weight, scale, arguments


def bits(x):
    return x.contiguous().view(torch.uint8)


def cast(m, k):
    return deep_tile.per_token_cast_to_fp8(torch.randn(m, k))


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_moves_bits_and_changes_none(name, shape):
    weight, scale, arguments = drawn(name, shape, 28 if name == "int4_32" else 100)
    packed_one = pack_weight(weight, scale, **arguments, max_error=float("inf"))
    back = unpack_weight(*packed_one, k=shape[-1])
    assert torch.equal(back.weight, weight)
    assert back.scale.dtype == scale.dtype and torch.equal(bits(back.scale), bits(scale))
    if name == "nvfp4" and shape[-2]:
        assert torch.equal(back.global_scale, arguments["global_scale"])


@pytest.mark.parametrize("powers", [0, 3, 14, 20, 100])
def test_mxfp4_becomes_what_to_blocks_makes_of_it(powers):
    weight, scale, _ = drawn("mxfp4", (2, 144, 352), powers)
    b = pack_weight(weight, scale, format="mxfp4", max_error=float("inf"))
    wanted = to_blocks(weight, scale, format="mxfp4", max_error=float("inf"))
    assert torch.equal(b.scale, wanted.scale)
    assert torch.equal(bits(packed.elements(*b, k=352)), bits(wanted.weight))


def test_nvfp4_becomes_elements_times_their_scales_rounded_once():
    weight, scale, _, exact = draw("nvfp4", (32, 288))
    b = pack_weight(weight, scale, format="nvfp4", global_scale=1.0)
    assert bool((b.scale == 8).all())
    weight = unpack_weight(*b, k=288).weight
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])[torch.stack([weight & 15, weight >> 4], -1).flatten(1).int()]
    products = values * scale.float().repeat_interleave(16, 1) / 8
    assert torch.equal(bits(packed.elements(*b, k=288)), bits(products.to(torch.float8_e4m3fn)))


@each_in_fp8
@pytest.mark.parametrize("k", [128, 352])
def test_product_is_that_of_the_fp8_weight(name, k):
    weight, scale, arguments = drawn(name, (48, k))
    b, (a, a_scale) = pack_weight(weight, scale, **arguments), cast(5, k)
    wide, call = packed.elements(*b, k=k), deep_tile.scaled_gemm if name == "int4" else deep_tile.fp8_gemm
    assert torch.equal(packed_gemm(a, a_scale, *b), call(a, a_scale, wide, b.scale))
    bias = torch.randn(48).bfloat16()
    finished = call(a, a_scale, wide, b.scale, bias=bias, activation="silu")
    assert torch.equal(packed_gemm(a, a_scale, *b, bias=bias, activation="silu"), finished)


@each_in_fp8
def test_grouped_product_is_that_of_the_fp8_weights(name):
    weight, scale, arguments = drawn(name, (3, 32, 160))
    b, (a, a_scale) = pack_weight(weight, scale, **arguments), cast(12, 160)
    offs = torch.tensor([4, 4, 11], dtype=torch.int32)
    out, wanted = torch.zeros(2, 12, 32, dtype=torch.bfloat16)
    packed_grouped_gemm(a, a_scale, *b, offs, out)
    wide = packed.elements(*b, k=160)
    if name == "int4":
        for group, (begin, end) in enumerate([(0, 4), (4, 4), (4, 11)]):
            one = wide[group], b.scale[group]
            wanted[begin:end] = deep_tile.scaled_gemm(a[begin:end], a_scale[begin:end], *one)
        assert torch.equal(out, wanted)
        return
    deep_tile.fp8_grouped_gemm(a, a_scale, wide, b.scale, offs, wanted)
    assert torch.equal(out, wanted)
    a, a_scale, counts = a.view(3, 4, 160), a_scale.reshape(3, 4, 2), torch.tensor([4, 0, 2], dtype=torch.int32)
    out, wanted = torch.zeros(2, 3, 4, 32, dtype=torch.bfloat16)
    packed_grouped_gemm(a, a_scale, *b, out=out, counts=counts)
    deep_tile.fp8_grouped_gemm(a, a_scale, wide, b.scale, out=wanted, counts=counts)
    assert torch.equal(out, wanted)


def exact_with(bias=0.0, *, a, a_scale, exact):
    """The definition in float64, of a weight's exact values."""
    return (a.double() * spread(a_scale, (1, 128), a.shape)) @ exact.mT + bias


def assert_near(out, exact):
    """Within FP32's rounding."""
    assert out.dtype == torch.float32 and (out - exact).abs().max() <= 2.0**-22 * exact.abs().max()


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("k", [96, 128, 352])
def test_product_of_small_groups_is_that_of_their_values(columns, k):
    """FP8 holds no such weight."""
    weight, scale, arguments, exact = draw(f"int4_{columns}", (144, k), spread_of_scales=20)
    b, (a, a_scale) = pack_weight(weight, scale, **arguments), cast(5, k)
    given = {"a": a, "a_scale": a_scale, "exact": exact}
    assert_near(packed_gemm(a, a_scale, *b, out_dtype=torch.float32), exact_with(**given))
    bias = torch.randn(144).mul(exact_with(**given).std()).bfloat16()
    finished = packed_gemm(a, a_scale, *b, bias=bias, activation="relu", out_dtype=torch.float32)
    assert_near(finished, exact_with(bias.double(), **given).relu())
    before = exact_with(**given).flip(0).float()
    out = packed_gemm(a, a_scale, *b, before.clone(), accumulate=True)
    assert_near(out, exact_with(before.double(), **given))


@pytest.mark.parametrize("columns", [32, 64])
def test_grouped_product_of_small_groups_is_that_of_each_weight(columns):
    weight, scale, arguments, exact = draw(f"int4_{columns}", (3, 144, 160))
    b, (a, a_scale) = pack_weight(weight, scale, **arguments), cast(12, 160)
    out = torch.zeros(12, 144)
    packed_grouped_gemm(a, a_scale, *b, torch.tensor([4, 4, 11], dtype=torch.int32), out)
    wanted = torch.zeros(12, 144, dtype=torch.float64)
    for group, rows in ((0, slice(4)), (2, slice(4, 11))):
        wanted[rows] = exact_with(a=a[rows], a_scale=a_scale[rows], exact=exact[group])
    assert_near(out, wanted)
    a, a_scale, out, wanted = (x.unflatten(0, (3, 4)) for x in (a, a_scale, torch.zeros_like(out), wanted.zero_()))
    packed_grouped_gemm(a, a_scale, *b, out=out, counts=torch.tensor([4, 0, 2], dtype=torch.int32))
    for group, count in ((0, 4), (2, 2)):
        wanted[group, :count] = exact_with(a=a[group, :count], a_scale=a_scale[group, :count], exact=exact[group])
    assert_near(out, wanted)


@pytest.mark.parametrize("shape", [(144, 352), (2, 48, 96)], ids=str)
def test_elements_of_small_groups_have_their_scales(shape):
    """Beside a power of two of each block. Nothing is rounded."""
    weight, scale, arguments, exact = draw("int4_32", shape, spread_of_scales=28)
    b = pack_weight(weight, scale, **arguments)
    values = packed.elements(*b, k=shape[-1])
    assert values.dtype == torch.float32 and torch.equal(b.scale.frexp().mantissa, torch.full_like(b.scale, 0.5))
    assert torch.equal(values * spread(b.scale, (128, 128), shape[-2:]), exact)


def test_groups_of_64_are_stored_as_two_of_32_each():
    weight, scale, _, _ = draw("int4_64", (2, 144, 352))
    twice = scale.repeat_interleave(2, -1)[..., :11]
    b, same = pack_weight(weight, scale, format="int4_64"), pack_weight(weight, twice, format="int4_32")
    assert torch.equal(b.weight, same.weight) and torch.equal(b.scale, same.scale)
    back = unpack_weight(*b, k=352)
    assert torch.equal(back.weight, weight) and torch.equal(back.scale, twice)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_small_groups_may_have_any_dtype(dtype):
    weight, scale, _ = drawn("int4_32", (16, 64))
    scale = torch.rand_like(scale).add(0.5).bfloat16()
    b, same = (pack_weight(weight, x, format="int4_32") for x in (scale.to(dtype), scale.float()))
    assert torch.equal(b.weight, same.weight) and torch.equal(b.scale, same.scale)


def test_int4_becomes_its_integers_and_each_rows_scale_that_of_a_k_block():
    weight, scale, arguments = drawn("int4", (32, 288))
    b = pack_weight(weight, scale, **arguments)
    values = torch.stack([weight & 15, weight >> 4], -1).flatten(1).int()
    values = torch.where(values > 7, values - 16, values)
    assert torch.equal(packed.elements(*b, k=288).float() * 256, values.float())
    assert torch.equal(b.scale, scale * 256) and b.scale.stride() == (1, 32)


def test_nibbles_of_integers_become_bytes_of_e4m3():
    """The kernel's arithmetic converts four bytes at once."""
    codes = torch.arange(16, dtype=torch.uint8)
    weight = codes.view(-1, 2)[:, 0] | codes.view(-1, 2)[:, 1] << 4
    b = pack_weight(weight.repeat(16, 2), torch.ones(16, 1), format="int4_128")
    words = b.weight.flatten()[:16].view(torch.int32).long() & 0xFFFFFFFF
    halves = torch.stack([words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F])
    made = (halves + (halves & 0x01010101) * 0x81).to(torch.int32)
    values = made.view(torch.uint8).view(torch.float8_e4m3fn).float() * 256
    assert values.tolist() == [[*range(8), *range(-8, 0)]] * 2


@each_format
@pytest.mark.parametrize("row", [0, 5, 15])
def test_where_a_code_is(name, row):
    """Word t of a row's column has codes 4t to 4t + 3 of each half of its 32."""
    _, scale, arguments = drawn(name, (16, 256), 0)
    for k in range(256):
        weight = torch.zeros(16, 128, dtype=torch.uint8)
        weight[row, k // 2] = 1 << k % 2 * 4
        units = pack_weight(weight, scale, **arguments).weight.view(2, -1)[:, : 16 * 64].contiguous().view(torch.int32)
        ((block, word),) = units.nonzero().tolist()
        column, half, t, place = k % 128 // 32, k // 16 % 2, k // 4 % 4, k % 4
        assert (block, word) == (k // 128, (16 * column + row) * 4 + t)
        integers = PACKED[name].packing.integers
        bit = 8 * place + 4 * half + 1 if integers else 4 * (4 * half + place)
        assert units[block, word].item() == 1 << bit


def test_where_a_scale_of_small_groups_is():
    """After the codes of its unit, four FP16 numbers per row; then bytes of zero."""
    scale = torch.exp2(torch.arange(16)[:, None] % 4 - torch.arange(11) * 2.0)
    b = pack_weight(torch.zeros(16, 176, dtype=torch.uint8), scale, format="int4_32")
    units = b.weight.view(3, 16 * 73)[:, 16 * 64 :]
    of_groups = units[:, : 16 * 8].contiguous().view(torch.float16).view(3, 16, 4)
    wanted = torch.nn.functional.pad(scale * 256, (0, 1)).view(16, 3, 4).transpose(0, 1)
    assert torch.equal(of_groups * b.scale.view(3, 1, 1), wanted)
    assert of_groups.amax((1, 2)).tolist() == [2.0**14] * 3 and not units[:, 16 * 8 :].any()


def int4_scales(changes=(), base=1.0, shape=(144, 9)):
    """Of groups of 32, equal but for some."""
    scale = torch.full(shape, base)
    for place, value in changes:
        scale[place] = value
    return scale


@pytest.mark.parametrize(
    "scale",
    [
        int4_scales([((3, 1), 1 + 2.0**-10), ((3, 2), 2.0**-28 * (1 + 2.0**-10))]),
        int4_scales([((3, 1), -(2.0**28) * (2 - 2.0**-9))]),
        int4_scales([((3, 1), 0.0), ((4, 0), -0.0), ((5, 2), -1.75)]),
        int4_scales([(slice(128), 0.0)]),
        int4_scales(base=0.0),
        int4_scales([((3, 1), 2.0**-149), ((130, 0), -(2.0**-149))], base=1.25 * 2.0**-127),
        int4_scales([((3, 1), 2.0**-100)], base=1.5 * 2.0**-112),
        int4_scales([((3, 1), 1.5 * 2.0**91)], base=1.75 * 2.0**119),
        int4_scales([((3, slice(4)), 2.0**-80), ((128, 0), 2.0**80)], base=0.0),
    ],
    ids=["11 bits", "one large", "signs", "zero block", "zeros", "subnormal", "small", "large", "far blocks"],
)
def test_scales_that_fp16_holds_beside_their_blocks_come_back(scale):
    weight = draw("int4_32", (144, 288))[0]
    b = pack_weight(weight, scale, format="int4_32")
    back = unpack_weight(*b, k=288)
    assert torch.equal(bits(back.scale), bits(scale)) and torch.equal(back.weight, weight)
    assert b.scale.isfinite().all() and packed.elements(*b, k=288).isfinite().all()


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        ((3, 1), 1 + 2.0**-11, r"scale \[3, 1\] has more than 11 significant bits"),
        ((130, 8), 2.0**-29 * (1 + 2.0**-10), r"scale \[130, 8\] .* below 2\*\*-28"),
        ((130, 8), 2.0**-120, r"scale \[130, 8\] .* below 2\*\*-28 .*deep_tile.to_blocks"),
        ((3, 1), 2.0**40, r"scale \[0, 0\] .* below 2\*\*-28"),
        ((3, 1), 2.0**120, "from 2.*on"),
        ((3, 1), -(2.0**127), "from 2.*on"),
        ((3, 1), float("inf"), r"NaN or infinity, first at \[3, 1\]"),
        ((3, 1), float("nan"), r"NaN or infinity, first at \[3, 1\]"),
    ],
)
@pytest.mark.parametrize("groups", [0, 2])
def test_scales_that_fp16_does_not_hold_are_refused(place, value, match, groups):
    weight, scale = draw("int4_32", (144, 288))[0], int4_scales([(place, value)])
    if groups:
        weight, scale = weight.repeat(2, 1, 1), torch.stack([int4_scales(), scale])
        match = match.replace(r"first at \[", r"first at \[1, ")
    with pytest.raises(ValueError, match=match):
        pack_weight(weight, scale, format="int4_32")


def test_a_scale_too_small_for_its_quotient_is_refused_too():
    """By the block's power of two it is 0 in FP32, as FP16 would hold it."""
    weight, scale = draw("int4_32", (144, 288))[0], int4_scales([((3, 1), 2.0**-100)], base=2.0**119)
    with pytest.raises(ValueError, match=r"scale \[3, 1\] .* below 2"):
        pack_weight(weight, scale, format="int4_32")


def test_int4_with_huge_scales_is_refused():
    weight, scale, arguments = drawn("int4", (16, 288))
    with pytest.raises(ValueError, match="above 2"):
        pack_weight(weight, torch.ones_like(scale) * 2.0**121, **arguments)


def test_scales_of_wider_dtypes_are_taken_where_they_are_powers_of_two():
    weight, scale, _ = drawn("mxfp4", (16, 64))
    wanted = pack_weight(weight, scale)
    assert torch.equal(pack_weight(weight, scale.float(), format="mxfp4").weight, wanted.weight)
    assert torch.equal(pack_weight(weight, bits(scale)).weight, wanted.weight)
    with pytest.raises(ValueError, match="not powers of two"):
        pack_weight(weight, scale.float() * 1.5, format="mxfp4")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"weight": torch.zeros(24, 32, dtype=torch.uint8), "scale": torch.zeros(24, 2, dtype=torch.uint8)}, ValueError,
         "24 rows"),
        ({"weight": torch.zeros(16, 64).to(torch.float8_e4m3fn), "scale": torch.ones(1, 1)}, ValueError, "to_blocks"),
        ({"weight": [1], "scale": torch.ones(1, 1)}, TypeError, "weight"),
        ({"format": "int4"}, ValueError, "format"),
        ({"format": "nvfp4", "scale": torch.full((16, 4), 0x80, dtype=torch.uint8) + 9, "global_scale": 1.0},
         ValueError, "negative"),
        ({"format": "nvfp4", "scale": torch.ones(16, 4).to(torch.float8_e4m3fn)}, ValueError, "global_scale"),
    ],
    ids=["rows", "format", "no tensor", "name", "negative", "no global scale"],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(change, error, match):
    weight, scale, _ = drawn("mxfp4", (16, 64))
    with pytest.raises(error, match=match):
        pack_weight(**{"weight": weight, "scale": scale} | change)


def test_scales_that_no_byte_tells_are_refused_unless_their_elements_are_zero():
    weight, scale = torch.full((16, 32), 0x12, dtype=torch.uint8), torch.full((16, 2), 200, dtype=torch.uint8)
    scale[3, 1] = 60
    with pytest.raises(ValueError, match=r"scale \[3, 1\]"):
        pack_weight(weight, scale)
    weight[3, 16:] = 0x80
    back = unpack_weight(*pack_weight(weight, scale), k=64)
    assert torch.equal(back.weight, weight) and torch.equal(bits(back.scale), scale)


def test_what_is_not_packed_is_not_unpacked():
    weight, scale, _ = drawn("mxfp4", (16, 64))
    b = pack_weight(weight, scale)
    with pytest.raises(ValueError, match="pack_weight"):
        unpack_weight(weight, scale.float())
    with pytest.raises(ValueError, match="K blocks"):
        unpack_weight(*b, k=129)


def operands(m=5, n=48, k=352):
    weight, scale, _ = drawn("mxfp4", (n, k))
    return [*cast(m, k), *pack_weight(weight, scale)]


@pytest.mark.parametrize(
    ("place", "change", "error", "match"),
    [
        (2, lambda b: b[:, :-4], ValueError, "pack_weight"),
        (2, lambda b: b[:40], ValueError, "multiple of 16"),
        (2, lambda b: b.repeat(1, 2)[:, : b.shape[1]], ValueError, "contiguous"),
        (2, lambda b: b.float(), TypeError, "uint8"),
        (3, lambda scale: scale[:, :-1], ValueError, "b_scale"),
        (1, lambda scale: scale.int(), TypeError, "a_scale"),
        (0, lambda a: a[:, :256], ValueError, "pack_weight"),
        (0, lambda a: a.float(), TypeError, "float8_e4m3fn"),
    ],
    ids=["bytes", "rows", "strides", "dtype", "scale", "scale dtype", "k", "a"],
)
def test_bad_operands_are_refused(place, change, error, match):
    given = operands()
    given[place] = change(given[place])
    with pytest.raises(error, match=match):
        packed_gemm(*given)
    groups = [given[0], given[1], given[2][None], given[3][None], torch.tensor([5], dtype=torch.int32)]
    with pytest.raises(error, match=match):
        packed_grouped_gemm(*groups)


@each_format
def test_kind_reads_fewer_bytes(name):
    assert EVERY_KIND[name].b_bytes == {"mxfp4": 17 / 32, "nvfp4": 18 / 32, "int4": 1 / 2, "int4_32": 73 / 128}[name]
    assert EVERY_KIND["fp8"].b_bytes == 1


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "tile"),
    [
        ("int4", 64, 28672, 8192, (64, 112, 1)),
        ("int4", 192, 4096, 7168, (64, 96, 1)),
        ("int4", 192, 2112, 7168, (64, 96, 2)),
        ("mxfp4", 192, 4096, 7168, (256, 64, 2)),
    ],
)
def test_narrower_tiles_are_chosen_where_they_leave_fewer_sms_idle(name, m, n, k, tile):
    """As measured on an H100. The last number is of K parts."""
    config = choose.choose(GemmProblem(m, n, k, kind=name))
    assert (config.block_m, config.block_n, config.split_k) == tile


@each_in_fp8
@pytest.mark.parametrize(("n", "k", "tile"), [(28672, 8192, (128, 1)), (7168, 16384, (64, 1)), (4096, 7168, (64, 2))])
def test_few_rows_are_multiplied_from_registers(name, n, k, tile):
    """As measured on an H100: columns and K parts. With more rows than a tile each weight would be converted twice."""
    few, more = (choose.choose(GemmProblem(m, n, k, kind=name)) for m in (16, 48))
    assert few.from_registers and (few.block_n, few.split_k) == tile
    assert not more.from_registers


@pytest.mark.parametrize(("n", "k"), [(28672, 8192), (7168, 16384), (4096, 7168)])
def test_many_rows_of_small_groups_are_multiplied_with_swapped_operands(n, k):
    few, many = (choose.choose(GemmProblem(m, n, k, kind="int4_32")) for m in (16, 1024))
    assert few.from_registers and not few.swap_ab
    assert many.swap_ab and not many.from_registers and many.converter_warps == 4


@each_format
def test_k_is_added_in_parts_only_where_bits_may_depend_on_other_rows(name):
    """Narrow tiles of 32 rows do so, without split K, too: not with `batch_invariant`, and not in groups."""
    narrow = GemmConfig(32, 64, 4, scale_blocks=2, kind=name)
    problem = GemmProblem(16, 18432, 7168, kind=name)
    assert narrow.parts_of_k == 2 and choose.choose(problem).parts_of_k > 1
    assert checks.checked_config(narrow, problem) == narrow
    with pytest.raises(ValueError, match="splits K.*batch_invariant=True needs .* from registers more than 64 columns"):
        checks.checked_config(narrow, problem._replace(split_k=False))
    for m in (1, 16, 32, 33, 300):
        assert choose.choose(problem._replace(m=m, split_k=False)).parts_of_k == 1
    assert all(config.parts_of_k == 1 for layout in ("offs", "counts") for config in grouped_configs(layout, kind=name))


@each_in_fp8
def test_the_weight_is_unpacked_for_many_rows_alone(name):
    problem = GemmProblem(4096, 2112, 7168, kind=name)
    assert choose.unpacks(problem) and not choose.unpacks(problem._replace(m=256))
    assert not choose.unpacks(problem._replace(n=50_000)) and not choose.unpacks(problem._replace(m=512))
    groups = problem._replace(m=16_384, groups=Groups("offs", 8, 2048))
    assert choose.unpacks(groups) == (name != "int4")
    assert not choose.unpacks(groups._replace(groups=Groups("offs", 64, 256)))


@pytest.mark.parametrize("m", [1, 300, 4096, 65536])
def test_a_weight_that_fp8_does_not_hold_is_never_unpacked(m):
    problem = GemmProblem(m, 2112, 7168, kind="int4_32")
    assert not choose.unpacks(problem)
    assert not choose.unpacks(problem._replace(m=8 * m, groups=Groups("offs", 8, m)))
    assert "int4_32" not in kernels.UNPACK and {*kernels.UNPACK} == {*IN_FP8}


def test_whether_to_unpack_is_remembered_within_limits(monkeypatch):
    """Prompts have any number of tokens, and servers run for weeks."""
    monkeypatch.setattr(launches, "MAX_SIGNATURES", 3)
    monkeypatch.setattr(dense.PACKED_GEMM, "_decided", {})
    a, a_scale, b, b_scale = operands()
    options = tuple(dense.PACKED_GEMM.Options())
    for m in range(1, len(a) + 1):
        out = torch.empty(m, len(b), dtype=torch.bfloat16)
        assert not dense.PACKED_GEMM._unpacks((a[:m], a_scale[:m], b, b_scale, out, None), options)
    assert len(a) > 3 and sum(len(known) for _, known in dense.PACKED_GEMM._decided.values()) <= 3


@each_format
def test_kernels_of_large_products_are_made_ready_too(monkeypatch, name):
    loaded, unpacking = [], []
    monkeypatch.setattr(plan, "load_kernels", lambda configs, *_: loaded.extend(configs))
    monkeypatch.setattr(kernels, "load_kernels", lambda device, workers, kernels, *_: unpacking.extend(kernels))
    deep_tile.precompile([(2112, 7168, 4096)], kind=name)
    in_fp8 = {choose.in_fp8(GemmProblem(1, 16, 16, kind=name)).kind} if name in IN_FP8 else set()
    assert {config.kind for config in loaded} == {name} | in_fp8
    assert unpacking == [kernels.UNPACK[name] for _ in in_fp8]
    loaded.clear()
    deep_tile.precompile([(2112, 7168, 4096)], kind=name, grouping="offs")
    assert {config.kind for config in loaded} == {name} | in_fp8 - {"fp8_1x128"}


def test_math_warps_fence_before_they_multiply_what_others_wrote():
    """The model of the protocol knows no proxies."""
    text = kernel_source(default_configs(True, "mxfp4")[0])
    own = text[text.index("class ConvertedB") :]
    awaits = own[own.index("await_full") : own.index("void advance")]
    assert awaits.index("wait(smem.slots.full") < awaits.index("ptx::fence_proxy_async()")
