"""GemmConfig: its rules, its derived sizes, and its agreement with the C++ side (include/deep_tile/config.cuh)."""

import dataclasses
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from deep_tile import jit
from deep_tile.codegen import kernel_source
from deep_tile.config import LARGEST_CLUSTER, PAIRED_TILES, SMEM_LIMIT_BYTES, GemmConfig
from deep_tile.kinds import EVERY_KIND, OUTPUTS, PACKED
from deep_tile.select.defaults import default_configs

HEADERS = Path(__file__).parent.parent / "include" / "deep_tile"


CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 2))


def legal_configs():
    """Every one with at most 24 stages and four output buffers, but for split K, resident `b` and wide stages."""
    choices = product((64, 128, 192, 256), range(16, 257, 16), range(2, 25), CLUSTERS, range(1, 5), (True, False))
    for block_m, block_n, stages, cluster, store_buffers, tma_store in choices:
        try:
            yield GemmConfig(block_m, block_n, stages, *cluster, store_buffers=store_buffers, tma_store=tma_store)
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_m": 32}, "block_m is 32; supported are 64, 128 and 256, and with a packed b 32"),
        ({"block_m": 16, "kind": "mxfp4"}, "block_m is 16; supported are 64, 128 and 256, and with a packed b 32"),
        ({"block_m": 48, "kind": "int4_32"}, "block_m is 48; supported are 64, 128 and 256, and with a packed b 32"),
        ({"block_m": 64, "block_n": 144, "kind": "int4_32"}, "block_m is 64; such tiles have up to 128 columns"),
        ({"block_m": 32, "block_n": 144, "kind": "mxfp4"}, "block_m is 32; such tiles have up to 128 columns"),
        ({"block_m": 32, "b_stages": 3, "kind": "int4"}, "block_m is 32; .* without .* slots for b"),
        ({"block_m": 32, "cluster_m": 2, "kind": "nvfp4"}, "block_m is 32; .* without multicast"),
        ({"block_m": 32, "scale_blocks": 4, "kind": "mxfp4"}, "scale_blocks is 4; .* each of 1 K parts has one or two"),
        ({"block_m": 32, "block_n": 64, "kind": "mxfp4"}, "scale_blocks is 1; .* each of 2 K parts has one or two"),
        ({"block_m": 32, "block_n": 32, "split_k": 4, "scale_blocks": 2, "kind": "mxfp4"}, "each of 4 K parts adds up"),
        ({"block_m": 192}, "block_m is 192; supported are 64, 128 and 256"),
        ({"block_m": 512}, "block_m is 512"),
        ({"block_n": 8}, "block_n is 8; .* multiple of 16 from 16 to 256"),
        ({"block_n": 100}, "block_n is 100"),
        ({"block_n": 272}, "block_n is 272"),
        ({"stages": 1}, "stages is 1; .* at least 2"),
        ({"cluster_m": 0}, "cluster is 0x1"),
        ({"cluster_n": 3}, "cluster is 1x3; supported are 1, 2 and 4 along M and N"),
        ({"cluster_m": 8}, "cluster is 8x1; supported are 1, 2 and 4 along M and N"),
        ({"split_k": 3}, "split_k is 3; supported are 1, 2, 4 and 8"),
        ({"cluster_m": 4, "cluster_n": 4}, "a cluster has 16 thread blocks; GPUs launch at most 8"),
        ({"cluster_m": 2, "cluster_n": 2, "split_k": 4}, "a cluster has 16 thread blocks; GPUs launch at most 8"),
        ({"cluster_m": 4, "block_n": 80}, "cluster is 4x1 and the tile 128x80; blocks .* each load a multiple of 8"),
        ({"cluster_m": 2, "block_n": 64, "split_k": 8}, "a cluster has 16 thread blocks"),
        ({"block_n": 64, "split_k": 8}, "block_n is 64; each of 8 K parts adds up a multiple of 16 columns"),
        *(
            ({**tile, "b_stages": 3, "kind": "int4_32"}, "tiles are 64x64, 128x64, 128x128 and 256x64, with one scale")
            for tile in (
                *({"block_m": 64, "block_n": 128}, {"block_n": 96}, {"block_n": 192}, {"block_m": 256}),
                *({"scale_blocks": 2}, {"block_m": 64, "block_n": 32, "scale_blocks": 2}),
            )
        ),
        ({"b_stages": 3, "kind": "mxfp4", "cluster_n": 4}, "kind is 'mxfp4'; .* converted without multicast"),
        ({"store_buffers": 0}, "store_buffers is 0"),
        ({"b_stages": 2, "cluster_m": 2}, "b_stages is 2; b stays without clusters"),
        ({"b_stages": 2, "block_m": 64, "block_n": 64, "scale_blocks": 2}, "with one scale block per stage only"),
        ({"b_stages": -1}, "b_stages is -1"),
        ({"b_stages": 1}, "b_stages is 1; at least 2 K blocks of b stay"),
        ({"pairs": True}, "pairs is True; supported for tiles of 128x112 and 128x144"),
        ({"block_n": 112, "pairs": True, "cluster_n": 2}, "pairs is True; .* without clusters"),
        ({"block_n": 144, "b_stages": 2, "pairs": True}, "pairs is True; .* and resident b"),
        ({"store_buffers": 11}, "store_buffers is 11; supported are 1 to 10"),
        ({"block_m": 256, "block_n": 160}, "160 accumulators and 40 of one K block exceed the 192 registers"),
        ({"transposed": True}, "transposed is True; products are transposed without scales, and with results of 16"),
        ({"transposed": True, "kind": "int8_unscaled"},
         "transposed is True; .* without scales, and with results of 16"),
        ({"transposed": True, "kind": "bf16", "output": "fp32"}, "transposed is True; .* with results of 16 bits"),
        ({"transposed": True, "kind": "bf16", "tma_store": False}, "transposed is True; it is stored by TMA, without"),
        ({"transposed": True, "kind": "bf16", "accumulate": True}, "transposed is True; .* and accumulation"),
        ({"transposed": True, "kind": "bf16", "bias": "bf16"},
         "transposed is True; .* without groups, bias, activation"),
        ({"transposed": True, "kind": "bf16", "grouping": "offs"}, "transposed is True; .* without groups"),
        ({"stages": 8}, f"bytes of shared memory exceed Hopper's {SMEM_LIMIT_BYTES}"),
    ],
)  # fmt: skip
def test_each_rule_refuses_and_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        GemmConfig(**{"block_m": 128, "block_n": 128, "stages": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ({"stages": 4.0}, "stages is 4.0, of type float; it must be of type int"),
        ({"split_k": True}, "split_k is True, of type bool"),
        ({"cluster_m": None}, "cluster_m is None"),
        ({"tma_store": 1}, "tma_store is 1, of type int; it must be of type bool"),
        ({"kind": ["fp8"]}, r"kind is \['fp8'\], of type list; it must be of type str"),
    ],
)
def test_fields_have_their_types_though_others_are_equal(arguments, seen):
    with pytest.raises(TypeError, match=seen):
        GemmConfig(**{"block_m": 128, "block_n": 128, "stages": 4, **arguments})


@pytest.mark.parametrize(
    ("layout", "spans", "b_rows"),
    [("nt", (0, 0), 144), ("nn", (128, 0), 144), ("tn", (128, 128), 192), ("tt", (0, 128), 192)],
)
def test_transposed_tiles_exchange_operands(layout, spans, b_rows):
    """The kernel's `a` is the product's `b`. Boxes of an M-major operand overlap the next tile where they do not divide
    it, and are cut at the matrix's end where they do."""
    config = GemmConfig(128, 144, 3, store_buffers=1, kind="bf16", layout=layout, transposed=True)
    assert config.sides("a", "b") == ("b", "a")
    assert (config.a_span, config.b_span) == spans
    assert (config.b_rows, config.cuts_b) == (b_rows, False)
    assert dataclasses.replace(config, block_n=192, stages=2).cuts_b == (layout[0] == "t")
    assert config.name == "bf16_gemm_128x144x64_s3_c1x1_t_b1" + ("" if layout == "nt" else f"_{layout}")
    assert (config.store_box, config.store_swizzle) == ((64, config.store_columns), 128)


def test_sizes_may_be_numpys():
    config = GemmConfig(np.int64(128), 128, np.int32(4))
    assert config == GemmConfig(128, 128, 4) and type(config.block_m) is int is type(config.stages)


DERIVED = (
    *("name", "cluster", "math_warpgroups", "threads", "rows_per_warpgroup"),
    *("accumulator_registers", "block_registers", "chunks_m", "chunks_n", "mma_n"),
    *("column_group", "b_scale_slots", "store_columns", "stage_bytes", "store_bytes", "smem_bytes"),
    *("block_sets", "store_swizzle", "boxes", "store_rows", "scale_warps", "store_warps"),
    *("takes_turns", "prefetches_b", "column_shifts", "b_scale_columns", "store_chunks", "boxes_at_once"),
    *("queues_blocks", "ends_apart", "bulk_scales", "resident_b", "b_slots", "k_range"),
)


@pytest.mark.parametrize(
    ("config", "by_hand"),
    [
        (
            GemmConfig(128, 256, 4, 2, 1),
            ("fp8_gemm_128x256x128_s4_c2x1", 2, 2, 384, 64)
            + (128, 64, 1, 2, 128)
            + (128, 2, 64, 49152 + 512 + 16 + 16, 32768, 227 * 1024)
            + (1, 128, 4, 64, 1, 2)
            + (False, False, 1, 128, 2, 2, False, False, True, False, 4, (1, None)),
        ),
        (
            GemmConfig(64, 16, 20, store_buffers=1, tma_store=False),
            ("fp8_gemm_64x16x128_s20_c1x1_b1_any", 1, 1, 256, 64)
            + (8, 8, 1, 1, 16)
            + (16, 1, 16, 10240 + 256 + 16 + 16, 2048, 208 * 1024)
            + (2, 32, 1, 16, 3, 0)
            + (False, False, 1, 16, 1, 1, True, False, False, False, 20, (1, None)),
        ),
        (
            GemmConfig(64, 224, 2),
            ("fp8_gemm_64x224x128_s2_c1x1", 1, 1, 256, 64)
            + (112, 56, 1, 2, 112)
            + (32, 7, 112, 36864 + 256 + 32 + 16, 28672, 101 * 1024)
            + (1, 0, 2, 16, 2, 0)
            + (False, False, 1, 32, 1, 2, False, False, False, False, 2, (1, None)),
        ),
        (
            GemmConfig(128, 176, 4, 1, 2, store_buffers=3),
            ("fp8_gemm_128x176x128_s4_c1x2_b3", 2, 2, 384, 64)
            + (88, 88, 1, 1, 176)
            + (16, 3, 64, 38912 + 512 + 16 + 16, 49152, 203 * 1024)
            + (1, 128, 3, 64, 2, 1)
            + (True, True, 8, 128, 1, 3, False, False, False, False, 4, (1, None)),
        ),
        (
            GemmConfig(128, 160, 5),
            ("fp8_gemm_128x160x128_s5_c1x1", 1, 2, 384, 64)
            + (80, 80, 1, 1, 160)
            + (32, 2, 32, 36864 + 512 + 16 + 16, 16384, 199 * 1024)
            + (1, 64, 5, 64, 2, 1)
            + (True, False, 4, 128, 1, 1, False, False, False, False, 5, (1, None)),
        ),
        (
            GemmConfig(256, 128, 4, store_buffers=1),
            ("fp8_gemm_256x128x128_s4_c1x1_b1", 1, 2, 384, 128)
            + (128, 64, 2, 1, 128)
            + (128, 1, 64, 49152 + 1024 + 16 + 16, 16384, 213 * 1024)
            + (1, 128, 4, 64, 1, 2)
            + (False, False, 1, 128, 2, 1, False, False, True, False, 4, (1, None)),
        ),
        (
            GemmConfig(128, 192, 5, store_buffers=3, b_stages=4),
            ("fp8_gemm_128x192x128_s5_c1x1_r4_b3", 1, 2, 384, 64)
            + (96, 96, 1, 1, 192)
            + (64, 3, 64, 16384 + 512 + 16 + 16, 49152, 227 * 1024)
            + (1, 128, 3, 64, 2, 1)
            + (True, False, 1, 64, 1, 3, False, False, False, True, 4, (129, 512)),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_derived_sizes(config, by_hand):
    assert {name: getattr(config, name) for name in DERIVED} == dict(zip(DERIVED, by_hand, strict=True))


@pytest.mark.parametrize("cluster_m", [1, 2, 4])
@pytest.mark.parametrize("cluster_n", [1, 2, 4])
@pytest.mark.parametrize("split_k", [1, 2, 4, 8])
def test_clusters_have_at_most_eight_blocks(cluster_m, cluster_n, split_k):
    if cluster_m * cluster_n * split_k > LARGEST_CLUSTER:
        with pytest.raises(ValueError, match="GPUs launch at most 8"):
            GemmConfig(64, 128, 2, cluster_m, cluster_n, split_k)
        return
    config = GemmConfig(64, 128, 2, cluster_m, cluster_n, split_k)
    assert (config.cluster, config.multicast) == (cluster_m * cluster_n * split_k, cluster_m * cluster_n > 1)
    parts = "" if split_k == 1 else f"_k{split_k}"
    assert config.name == f"fp8_gemm_64x128x128_s2_c{cluster_m}x{cluster_n}{parts}"


def test_two_warpgroups_queue_for_128_columns_alone():
    assert GemmConfig(128, 128, 5).queues_blocks
    assert GemmConfig(128, 128, 4, split_k=2).queues_blocks
    assert not GemmConfig(128, 112, 5).queues_blocks
    assert not GemmConfig(128, 128, 5, cluster_n=2).queues_blocks
    assert not GemmConfig(128, 128, 5, b_stages=4).queues_blocks


def test_tiles_end_apart_where_blocks_are_queued_and_stages_suffice():
    assert GemmConfig(128, 128, 3).ends_apart
    assert GemmConfig(128, 128, 4, split_k=2).ends_apart
    assert not GemmConfig(128, 128, 2).ends_apart
    assert not GemmConfig(128, 112, 5).ends_apart
    assert not GemmConfig(64, 128, 5).ends_apart


def test_boxes_cover_what_is_stored():
    for config in (*default_configs(), *legal_configs(), *default_configs(True, "bf16", "fp32")):
        stored, width = config.columns_per_part, config.store_columns
        covered = config.boxes // config.chunks_m * width
        assert stored <= covered < stored * 7 / 6 and width % 16 == 0, config.name
        assert config.store_swizzle or width in (stored, config.mma_n), config.name
        assert config.boxes % config.store_chunks == 0, config.name


def test_no_scale_warp_is_a_round_ahead():
    """It would take a phase long past for the one that it awaits: parity tells only two phases apart."""
    assert all(1 <= config.scale_warps <= config.stages for config in legal_configs())


@pytest.mark.parametrize(
    ("block_m", "block_n", "scale_blocks", "warps"),
    [(64, 32, 2, 4), (64, 64, 1, 4), (64, 64, 2, 8), (64, 96, 1, 4), (64, 96, 2, 8), (64, 112, 2, 8), (64, 128, 2, 8)]
    + [(128, 64, 1, 4), (128, 64, 2, 8), (128, 96, 1, 4), (128, 128, 1, 8), (128, 192, 1, 4), (256, 128, 1, 4)],
    ids=str,
)
def test_converter_warps_have_a_unit_of_every_stage(block_m, block_n, scale_blocks, warps):
    """Eight need not divide the units of a stage beside one math warpgroup."""
    config = GemmConfig(block_m, block_n, 2, scale_blocks=scale_blocks, store_buffers=1, b_stages=3, kind="int4")
    assert config.converter_warps == warps <= scale_blocks * block_n // 16


def register_configs():
    """Every tile whose packed `b` comes from registers, with two and four stages."""
    for kind, block_n, blocks, stages in product(PACKED, range(16, 129, 16), (1, 2, 4), (2, 4)):
        for options in ({}, {"split_k": 2}, {"grouping": "offs"}, {"output": "fp32", "tma_store": False}):
            try:
                yield GemmConfig(32, block_n, stages, scale_blocks=blocks, kind=kind, **options)
            except ValueError:
                continue


def test_converter_warps_that_multiply_share_a_stage():
    """Two warpgroups share the columns, or, up to 64, the K blocks. One slot holds a tile's sums, with four numbers of
    padding per row; a stage has `a`, units and where their tile is. Registers are an SM's, and a tile's rows are stored
    alone."""
    for config in register_configs():
        of_part = 64 * (2 // config.k_parts)
        assert config.from_registers and (config.converter_warps, config.threads) == (8, 512)
        assert config.block_n <= of_part and config.scale_blocks // config.k_parts in (1, 2), config.name
        assert 0 <= config.b_slot_bytes - config.k_parts * 32 * (config.block_n + 4) * 4 < 1024, config.name
        units = config.scale_blocks * config.block_n // 16 * config.b_unit_bytes
        scales = 4 * config.scale_blocks * (32 + -(-config.b_scale_slots // 4) * 4)
        assert config.stage_bytes == 32 * config.k_bytes + units + scales + 4 * 8 + 2 * 4, config.name
        registers = config.math_registers + config.producer_registers + 2 * config.converter_registers
        assert 128 * registers == 64 * 1024, config.name
        assert (config.store_rows, config.store_warps, config.chunks, config.b_slots) == (16, 0, 1, 1)


@pytest.mark.parametrize("block_n", PAIRED_TILES)
def test_pairs_take_an_even_number_of_k_blocks(block_n):
    config = GemmConfig(128, block_n, 4, pairs=True)
    assert [k for k in (1, 128, 129, 256, 257, 384, 385, 512) if config.takes_k(k)] == [129, 256, 385, 512]
    assert (config.block_sets, config.column_shifts, config.b_scale_slots) == (2, 8, 2)


def test_registers_are_those_of_an_sm():
    few, many = GemmConfig(128, 128, 4), GemmConfig(128, 144, 4, pairs=True)
    assert (few.math_registers, few.producer_registers) == (232, 40)
    assert (many.math_registers, many.producer_registers) == (240, 24)
    for config in (few, many):
        assert 128 * (2 * config.math_registers + config.producer_registers) <= 64 * 1024


def test_names_tell_all_configs_apart():
    configs = [*legal_configs(), *default_configs(True), *default_configs(False)]
    configs = list(dict.fromkeys(configs))
    assert len({config.name for config in configs}) == len(configs) > 500
    assert all(re.fullmatch(r"[a-z0-9_]+", config.name) for config in configs)


def test_config_is_a_value():
    config = GemmConfig(128, 128, 4)
    assert config == GemmConfig(128, 128, 4, 1, 1, 1, 1, 2, True)
    assert hash(config) == hash(GemmConfig(128, 128, 4))
    assert config != dataclasses.replace(config, tma_store=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stages = 5


def initializers(config: GemmConfig) -> dict[str, str]:
    """The fields that the generated kernel gives C++'s GemmConfig, as text, in order."""
    (body,) = re.findall(r"GemmConfig config = \{(.*?)\};", kernel_source(config))
    return dict(re.findall(r"\.(\w+) = ([\w:]+)", body))


def cpp_fields() -> dict[str, str]:
    """The fields that config.cuh declares, by type, in order."""
    (body,) = re.findall(r"struct GemmConfig \{(.*?)\n\};", (HEADERS / "config.cuh").read_text(), re.DOTALL)
    declarations = re.findall(r"^ {4}(int|bool|Format|Activation) ([\w, ]+);", body, re.MULTILINE)
    return {name: kind for kind, names in declarations for name in names.split(", ")}


def test_every_cpp_field_is_given_and_no_other():
    config = GemmConfig(128, 256, 4, 2, 1, store_buffers=1, tma_store=False)
    given, declared = initializers(config), cpp_fields()
    assert list(given) == list(declared)  # in order, as C++ demands of designated initialisers
    for name, kind in declared.items():
        assert (given[name] in ("true", "false")) == (kind == "bool"), name
        for enumeration in ("Format", "Activation"):
            assert given[name].startswith(f"deep_tile::{enumeration}::") == (kind == enumeration), name


def test_every_choice_of_a_config_reaches_the_kernel():
    config = GemmConfig(128, 96, 3, 1, 2, store_buffers=1, tma_store=False)
    given = initializers(config)
    # The kernel is made of the first two: its WGMMAs, the bytes of its buffers. The third is two booleans there.
    named = {"kind", "output", "grouping", "bias", "activation", "layout"}
    for field in (field for field in dataclasses.fields(GemmConfig) if field.name not in named):
        assert given[field.name] == str(getattr(config, field.name)).lower(), field.name
    for grouping, wanted in (("none", ["false"] * 2), ("offs", ["true", "false"]), ("counts", ["false", "true"])):
        given = initializers(GemmConfig(128, 96, 3, grouping=grouping))
        assert [given[name] for name in ("by_offs", "by_counts")] == wanted
    along_k = GemmConfig(128, 96, 3, kind="fp8_1x128", output="fp32", grouping="k_offs", accumulate=True)
    given = initializers(along_k)
    assert [given[name] for name in ("by_k", "column_scales", "by_offs", "by_counts")] == ["true"] * 2 + ["false"] * 2
    for layout, spans in (("nt", ["0", "0"]), ("nn", ["0", "64"]), ("tn", ["128", "64"]), ("tt", ["128", "0"])):
        given = initializers(GemmConfig(128, 96, 3, kind="fp16", layout=layout))
        assert [given[name] for name in ("a_span", "b_span")] == spans
    given = initializers(GemmConfig(128, 96, 3, bias="fp16", activation="gelu_tanh"))
    assert given["bias_format"] == "deep_tile::Format::fp16"
    assert given["activation"] == "deep_tile::Activation::gelu_tanh"


def fields_of_shared_storage() -> set[str]:
    """The fields that C++'s SharedStorage reads, directly or by a method of GemmConfig."""
    text = (HEADERS / "config.cuh").read_text()
    methods = dict(re.findall(r"constexpr \w+ (\w+)\(\) const \{ return (.*); \}", text))
    storage = text[text.index("struct Partials") :]
    read = " ".join(methods.get(name, name) for name in re.findall(r"config\.(\w+)", storage))
    return cpp_fields().keys() & set(re.findall(r"\w+", read))


@pytest.mark.about("include/deep_tile/*", "deep_tile/config.py", "deep_tile/codegen.py", "deep_tile/kinds.py")
def test_shared_memory_is_as_large_as_cpp_says():
    """Every legal config, though many share a size in C++: a field that is left out there is zero."""
    headers = (HEADERS / "config.cuh").read_text().replace("#pragma once", "")
    names, asserts = fields_of_shared_storage(), set()
    of_kinds = [config for kind in EVERY_KIND for output in OUTPUTS for config in default_configs(True, kind, output)]
    for config in (*legal_configs(), *of_kinds, *register_configs()):
        given = initializers(config)
        fields = ", ".join(f".{name} = {given[name]}" for name in given if name in names)
        size = f"sizeof(deep_tile::SharedStorage<deep_tile::GemmConfig{{{fields}}}>)"
        asserts.add(f"static_assert({size} == {config.smem_bytes});")
    assert len(asserts) > 500
    jit.compile_kernel("\n".join([headers, *asserts, 'extern "C" __global__ void nothing() {}']), "nothing")


def test_a_wrong_shared_memory_size_does_not_compile():
    config = GemmConfig(64, 32, 4)
    source = kernel_source(config)
    wrong = source.replace(f".smem_bytes = {config.smem_bytes}", f".smem_bytes = {config.smem_bytes + 1024}")
    assert wrong != source
    with pytest.raises(jit.CompileError, match=r"config\.py and config\.cuh disagree"):
        jit.compile_kernel(wrong, config.name)


@pytest.mark.parametrize(("field", "known"), [("kind", EVERY_KIND), ("output", OUTPUTS)])
def test_kinds_and_outputs_are_those_of_their_tables(field, known):
    with pytest.raises(ValueError, match=f"{field} is 'fp4'; supported are {', '.join(known)}"):
        GemmConfig(64, 64, 4, **{field: "fp4"})


@pytest.mark.parametrize("kind", EVERY_KIND.values(), ids=lambda kind: kind.name)
def test_a_kind_names_its_kernels_and_their_instruction(kind):
    config = GemmConfig(64, 64, 4, b_stages=2 if kind.packing else 0, kind=kind.name)
    assert config.name.startswith(f"{kind.name}_gemm_64x64x")
    assert f"wgmma.mma_async.sync.aligned.m64n64k{32 // kind.a.bytes}.{kind.mma} " in kernel_source(config)


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_b_from_registers_is_multiplied_with_16_rows_or_32(kind):
    """In PTX four registers of `a` come after those of the sums."""
    source = kernel_source(GemmConfig(32, 128, 4, kind=kind))
    shapes = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k32)\.", source)
    assert shapes == ["m64n16k32", "m64n32k32"]
    assert "{%8, %9, %10, %11}, %12" in source and "{%16, %17, %18, %19}, %20" in source
