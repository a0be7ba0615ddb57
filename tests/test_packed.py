"""Weights of 4 bits: packing and its inverse, the FP8 that they become, and GEMMs with them on the CPU."""

import pytest
import torch
from formats import NAMES_OF_PACKED, draw

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
SHAPES = [(16, 32), (48, 352), (3, 144, 256), (2, 1, 16, 2880 // 5), (0, 32), (2, 0, 128), (0, 16, 128)]


def drawn(name, shape, spread=4):
    """A weight, its scale and keywords; no scale of NVFP4 is negative."""
    weight, scale, arguments, _ = draw(NAMES_OF_PACKED[name], shape, spread_of_scales=spread)
    return weight, scale, arguments


def bits(x):
    return x.contiguous().view(torch.uint8)


def cast(m, k):
    return deep_tile.per_token_cast_to_fp8(torch.randn(m, k))


@each_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_moves_bits_and_changes_none(name, shape):
    weight, scale, arguments = drawn(name, shape, spread=100)
    packed_one = pack_weight(weight, scale, **arguments, max_error=float("inf"))
    back = unpack_weight(*packed_one, k=shape[-1])
    assert torch.equal(back.weight, weight)
    assert back.scale.dtype == scale.dtype and torch.equal(bits(back.scale), bits(scale))
    if name == "nvfp4" and shape[-2]:
        assert torch.equal(back.global_scale, arguments["global_scale"])


@pytest.mark.parametrize("spread", [0, 3, 14, 20, 100])
def test_mxfp4_becomes_what_to_blocks_makes_of_it(spread):
    weight, scale, _ = drawn("mxfp4", (2, 144, 352), spread)
    b = pack_weight(weight, scale, format="mxfp4", max_error=float("inf"))
    wanted = to_blocks(weight, scale, format="mxfp4", max_error=float("inf"))
    assert torch.equal(b.scale, wanted.scale)
    assert torch.equal(bits(packed.as_fp8(*b, k=352)), bits(wanted.weight))


def test_nvfp4_becomes_elements_times_their_scales_rounded_once():
    weight, scale, _, exact = draw("nvfp4", (32, 288))
    b = pack_weight(weight, scale, format="nvfp4", global_scale=1.0)
    assert bool((b.scale == 8).all())
    weight = unpack_weight(*b, k=288).weight
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])[torch.stack([weight & 15, weight >> 4], -1).flatten(1).int()]
    products = values * scale.float().repeat_interleave(16, 1) / 8
    assert torch.equal(bits(packed.as_fp8(*b, k=288)), bits(products.to(torch.float8_e4m3fn)))


@each_format
@pytest.mark.parametrize("k", [128, 352])
def test_product_is_that_of_the_fp8_weight(name, k):
    weight, scale, arguments = drawn(name, (48, k))
    b, (a, a_scale) = pack_weight(weight, scale, **arguments), cast(5, k)
    wide, call = packed.as_fp8(*b, k=k), deep_tile.scaled_gemm if name == "int4" else deep_tile.fp8_gemm
    assert torch.equal(packed_gemm(a, a_scale, *b), call(a, a_scale, wide, b.scale))
    bias = torch.randn(48).bfloat16()
    finished = call(a, a_scale, wide, b.scale, bias=bias, activation="silu")
    assert torch.equal(packed_gemm(a, a_scale, *b, bias=bias, activation="silu"), finished)


@each_format
def test_grouped_product_is_that_of_the_fp8_weights(name):
    weight, scale, arguments = drawn(name, (3, 32, 160))
    b, (a, a_scale) = pack_weight(weight, scale, **arguments), cast(12, 160)
    offs = torch.tensor([4, 4, 11], dtype=torch.int32)
    out, wanted = torch.zeros(2, 12, 32, dtype=torch.bfloat16)
    packed_grouped_gemm(a, a_scale, *b, offs, out)
    wide = packed.as_fp8(*b, k=160)
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


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_int4_becomes_its_integers_and_each_rows_scale_that_of_a_k_block(columns):
    weight, _, arguments, _ = draw(f"int4_{columns}", (32, 288))
    scale = torch.rand(32, 3).repeat_interleave(128 // columns, 1)[:, : -(-288 // columns)].bfloat16()
    b = pack_weight(weight, scale, **arguments)
    values = torch.stack([weight & 15, weight >> 4], -1).flatten(1).int()
    values = torch.where(values > 7, values - 16, values)
    assert torch.equal(packed.as_fp8(*b, k=288).float() * 256, values.float())
    assert torch.equal(b.scale, scale[:, :: 128 // columns].float() * 256) and b.scale.stride() == (1, 32)


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
    _, scale, arguments = drawn(name, (16, 256), spread=0)
    for k in range(256):
        weight = torch.zeros(16, 128, dtype=torch.uint8)
        weight[row, k // 2] = 1 << k % 2 * 4
        units = pack_weight(weight, scale, **arguments).weight.view(2, -1)[:, : 16 * 64].contiguous().view(torch.int32)
        ((block, word),) = units.nonzero().tolist()
        column, half, t, place = k % 128 // 32, k // 16 % 2, k // 4 % 4, k % 4
        assert (block, word) == (k // 128, (16 * column + row) * 4 + t)
        bit = 8 * place + 4 * half + 1 if name == "int4" else 4 * (4 * half + place)
        assert units[block, word].item() == 1 << bit


def test_int4_whose_scales_differ_within_128_is_refused():
    weight, scale, arguments, _ = draw("int4_32", (16, 288))
    scale = torch.ones_like(scale)
    scale[3, 6] = 1.5
    with pytest.raises(ValueError, match=r"differ, first at \[3, 1\].*to_blocks"):
        pack_weight(weight, scale, **arguments)
    scale[:, 8] = 2  # alone in its K block
    scale[3, 6] = 1
    assert pack_weight(weight, scale, **arguments).scale[0].tolist() == [256, 256, 512]
    with pytest.raises(ValueError, match="above 2"):
        pack_weight(weight, scale * 2.0**121, **arguments)


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
    assert EVERY_KIND[name].b_bytes == {"mxfp4": 17 / 32, "nvfp4": 18 / 32, "int4": 1 / 2}[name]
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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k", "tile"), [(28672, 8192, (128, 1)), (7168, 16384, (64, 1)), (4096, 7168, (64, 2))])
def test_few_rows_are_multiplied_from_registers(name, n, k, tile):
    """As measured on an H100: columns and K parts. With more rows than a tile each weight would be converted twice."""
    few, more = (choose.choose(GemmProblem(m, n, k, kind=name)) for m in (16, 48))
    assert few.from_registers and (few.block_n, few.split_k) == tile
    assert not more.from_registers


@pytest.mark.parametrize("name", FORMATS)
def test_k_is_added_in_parts_only_where_bits_may_depend_on_other_rows(name):
    """Narrow tiles of 32 rows do so, without split K, too: not with `batch_invariant`, and not in groups."""
    narrow = GemmConfig(32, 64, 4, scale_blocks=2, kind=name)
    problem = GemmProblem(16, 18432, 7168, kind=name)
    assert (narrow.parts_of_k, choose.choose(problem).parts_of_k) == (2, 2)
    assert checks.checked_config(narrow, problem) == narrow
    with pytest.raises(ValueError, match="splits K.*batch_invariant=True needs .* with 32 rows more than 64 columns"):
        checks.checked_config(narrow, problem._replace(split_k=False))
    for m in (1, 16, 32, 33, 300):
        assert choose.choose(problem._replace(m=m, split_k=False)).parts_of_k == 1
    assert all(config.parts_of_k == 1 for layout in ("offs", "counts") for config in grouped_configs(layout, kind=name))


@pytest.mark.parametrize("name", FORMATS)
def test_the_weight_is_unpacked_for_many_rows_alone(name):
    problem = GemmProblem(4096, 2112, 7168, kind=name)
    assert choose.unpacks(problem) and not choose.unpacks(problem._replace(m=256))
    assert not choose.unpacks(problem._replace(n=50_000)) and not choose.unpacks(problem._replace(m=512))
    groups = problem._replace(m=16_384, groups=Groups("offs", 8, 2048))
    assert choose.unpacks(groups) == (name != "int4")
    assert not choose.unpacks(groups._replace(groups=Groups("offs", 64, 256)))


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


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_of_large_products_are_made_ready_too(monkeypatch, name):
    loaded, unpacking = [], []
    monkeypatch.setattr(plan, "load_kernels", lambda configs, *_: loaded.extend(configs))
    monkeypatch.setattr(kernels, "load_kernels", lambda device, workers, kernels, *_: unpacking.extend(kernels))
    deep_tile.precompile([(2112, 7168, 4096)], kind=name)
    assert {config.kind for config in loaded} == {name, choose.in_fp8(GemmProblem(1, 16, 16, kind=name)).kind}
    assert unpacking == [kernels.UNPACK[name]]
    loaded.clear()
    deep_tile.precompile([(2112, 7168, 4096)], kind=name, grouping="offs")
    assert {config.kind for config in loaded} == {name, *(() if name == "int4" else ("fp8",))}


def test_math_warps_fence_before_they_multiply_what_others_wrote():
    """The model of the protocol knows no proxies."""
    text = kernel_source(default_configs(True, "mxfp4")[0])
    own = text[text.index("class ConvertedB") :]
    awaits = own[own.index("await_full") : own.index("void advance")]
    assert awaits.index("wait(smem.slots.full") < awaits.index("ptx::fence_proxy_async()")
