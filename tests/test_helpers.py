"""The helpers of the GPU tests: checks notice what they are for, and sanitizer cases cover every feature."""

import pytest
import sanitize
import torch
from helpers import (
    ACCUMULATION,
    Exact,
    GuardedOut,
    are_off,
    assert_accurate,
    assert_silu_mul_cast,
    exact_product,
    make_any_bytes,
    make_operands,
    rearranged,
)
from strategies import legal_configs, main_loop, sharing

from deep_tile import GemmConfig, fp8_gemm, silu_mul_cast_to_fp8
from deep_tile.config import ceil_div
from deep_tile.problem import GemmProblem
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs
from deep_tile.select.schedule import cluster_tiles

M, N, K = 150, 300, 520


@pytest.fixture(scope="module")
def operands():
    return make_operands(M, N, K)


@pytest.fixture(scope="module")
def exact(operands):
    return exact_product(operands)


@pytest.fixture
def out(operands):
    """A right result."""
    return fp8_gemm(*operands)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_one_wrong_element_is_noticed(value, out, exact):
    out[M - 1, N - 1] = value
    with pytest.raises(AssertionError, match=r"1 of 45000 elements are off, first at \[149, 299\]"):
        assert_accurate(out, exact)


def test_an_element_left_unwritten_is_noticed(exact):
    with pytest.raises(AssertionError, match="45000 of 45000"):
        assert_accurate(GuardedOut(M, N).out, exact)


def zero_k(x, k):
    x.view(torch.uint8)[:, k] = 0


def swap_columns(scale, k):
    scale[:, [0, 1]] = scale[:, [1, 0]]


def shift_rows(scale, k):
    scale.copy_(scale.roll(1, 0))


@pytest.mark.parametrize(
    ("field", "damage"),
    [("a", zero_k), ("b", zero_k), ("a_scale", swap_columns), ("b_scale", swap_columns), ("a_scale", shift_rows)],
)
def test_wrong_operands_are_noticed(field, damage, operands, exact):
    """Faults such as a K tail that is left out, or a neighbour's scale."""
    damaged = rearranged(operands)
    damage(getattr(damaged, field), K - 1)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_accurate(fp8_gemm(*damaged), exact)


def test_infinity_is_right_beyond_the_range_alone():
    """Of FP16, whose largest number is 65,504: SwiGLU of large sums exceeds it."""
    value = torch.tensor([72_000.0, 72_000.0, 72_000.0, -72_000.0, 65_510.0, 65_510.0, 60_000.0], dtype=torch.float64)
    out = torch.tensor([torch.inf, 65_504, -torch.inf, -torch.inf, torch.inf, 65_504, torch.inf]).half()
    wrong = are_off(out, Exact(value, torch.ones_like(value)), ACCUMULATION)
    assert wrong.tolist() == [False, True, True, False, False, False, True]


def test_a_systematic_error_is_noticed(exact):
    """Each element is within its own bound, but the whole is not."""
    with pytest.raises(AssertionError, match="relative Frobenius error 2"):
        assert_accurate((exact.value * 1.0012).to(torch.bfloat16), exact)


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (M, 0), (M - 1, N), (M + 200, 7)])
def test_a_write_beside_out_is_noticed(position):
    guarded = GuardedOut(M, N, stride=N + 5, offset=3)
    guarded.out.fill_(1.0)
    guarded.assert_guards_intact()
    strides, offset = guarded.out.stride(), guarded.out.storage_offset()
    beside = offset + position[0] * strides[0] + position[1]
    guarded.out.as_strided((1,), (1,), beside).fill_(float("nan"))
    with pytest.raises(AssertionError, match="wrote outside out"):
        guarded.assert_guards_intact()


def test_a_touched_out_is_noticed():
    guarded = GuardedOut(M, N)
    guarded.assert_untouched()
    guarded.out[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="out was written"):
        guarded.assert_untouched()


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_guarded_out_lies_where_it_says(offset):
    out = GuardedOut(M, N, stride=304, offset=offset).out
    assert out.data_ptr() % 16 == offset * 2
    assert out.stride() == (304, 1)


def test_inputs_are_poisoned_all_around(operands):
    copies = rearranged(operands, k=300, a_scale="column_aligned", b_scale="scattered", a_padding=16)
    assert copies.a.stride() == (320, 1) and copies.a.data_ptr() % 16 == 0
    assert copies.a_scale.stride() == (1, 152)
    for copy, original in zip(copies, operands, strict=True):
        assert torch.equal(copy.float(), original[:, : copy.shape[1]].float())
        everything = torch.empty(0, dtype=copy.dtype).set_(copy.untyped_storage())
        assert everything.float().isfinite().sum() == copy.numel()


def test_same_seed_same_operands():
    first, second, third = make_operands(9, 9, 200, seed=1), make_operands(9, 9, 200, seed=1), make_operands(9, 9, 200)
    assert torch.equal(first.a_scale, second.a_scale)
    assert not torch.equal(first.a_scale, third.a_scale)


def test_any_bytes_are_finite_and_many():
    operands = make_any_bytes(100, 200, 300)
    assert operands.a.float().isfinite().all()
    assert len(operands.b.view(torch.uint8).unique()) == 128


def test_exact_product_of_some_rows_and_columns(operands, exact):
    rows, columns = torch.tensor([0, 149, 7]), torch.tensor([299, 128])
    part = exact_product(operands, rows, columns)
    assert torch.allclose(part.value, exact.value[rows][:, columns], rtol=1e-12)


@pytest.mark.parametrize("config", [grouped_configs("offs")[0], grouped_configs("counts", False)[0]])
def test_sanitizer_case_of_groups_is_right(config):
    sanitize.run_groups(config, "cpu")


@pytest.mark.parametrize("case", sanitize.CASES, ids=lambda case: case.config.name)
def test_sanitizer_case_is_right(case):
    """On the CPU. Each case has several waves, or a cluster that overhangs the matrix."""
    sanitize.run(case, "cpu")
    config = case.config
    waves = ceil_div(cluster_tiles(config, GemmProblem(case.m, case.n, case.k)), case.num_sms // config.cluster)
    rows, columns = ceil_div(case.m, config.block_m), ceil_div(case.n, config.block_n)
    overhangs = rows % config.cluster_m or columns % config.cluster_n
    assert waves > 1 or overhangs
    assert config.cluster_m * config.cluster_n == 1 or overhangs


ANY_CONFIGS_FEATURES = (
    *("math_warpgroups", "chunks_m", "chunks_n", "cluster_m", "cluster_n", "multicast", "split_k", "scale_blocks"),
    *("block_sets", "carries_descriptors", "queues_blocks", "ends_apart", "takes_turns", "prefetches_b"),
    *("column_shifts", "bulk_scales", "reads_runs", "reads_any_runs"),
    *("pairs", "resident_b", "math_registers"),
    *("scale_warps", "store_warps", "store_columns", "store_rows", "store_chunks", "store_swizzle", "tma_store"),
)
DEFAULT_CONFIGS_FEATURES = ("store_buffers", "boxes_at_once", "b_scale_slots")
"""Sizes, of which only those of default configs must occur. The other features differ in the kernel's code."""


def features_of(configs, names) -> set[tuple]:
    return {(name, getattr(config, name)) for config in configs for name in names}


def test_sanitizer_cases_use_every_feature():
    cases = [case.config for case in sanitize.CASES]
    defaults = (*default_configs(True), *default_configs(False))
    assert not features_of(legal_configs(), ANY_CONFIGS_FEATURES) - features_of(cases, ANY_CONFIGS_FEATURES)
    assert not features_of(defaults, DEFAULT_CONFIGS_FEATURES) - features_of(cases, DEFAULT_CONFIGS_FEATURES)


def test_every_boolean_property_is_a_feature():
    """A new property cannot be forgotten above. Groups, other kinds and epilogues are not part of it."""
    config = next(legal_configs())
    booleans = {name for name in dir(GemmConfig) if isinstance(getattr(config, name, None), bool)}
    booleans -= {"accumulate", "by_counts", "by_k", "by_offs", "column_scales", "integer_sums", "is_finished"}
    booleans -= {
        "is_grouped",
        "is_packed",
        "from_registers",
        "quantizes",
        "row_groups",
        "row_scales",
        "transposed",
        "cuts_b",
        "b_integers",
        "swap_ab",
    }
    assert booleans == {name for name in ANY_CONFIGS_FEATURES if isinstance(getattr(config, name), bool)}


def test_sanitizer_cases_are_of_every_family():
    """Each main loop with each way of sharing, and each of these with either way of storing."""

    def families(configs):
        for config in configs:
            yield main_loop(config), sharing(config)
            yield sharing(config), config.tma_store

    assert not set(families(legal_configs())) - set(families(case.config for case in sanitize.CASES))


ACTIVATION = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}


@pytest.mark.parametrize("round_scale", ["none", "pow2"])
def test_wrong_activations_are_noticed(round_scale):
    gate_up = torch.randn(40, 2 * 300).bfloat16() * 5
    gate_up[3, 10] = float("nan")
    out, scale = silu_mul_cast_to_fp8(gate_up, **ACTIVATION, round_scale=round_scale)
    check = {**ACTIVATION, "round_scale": round_scale}
    assert_silu_mul_cast(gate_up, out, scale, **check)
    for name, other in (("alpha", 1.7019), ("beta", 1.001), ("limit", 6.96)):
        with pytest.raises(AssertionError):
            assert_silu_mul_cast(gate_up, out, scale, **{**check, name: other})
    for row, column in ((5, 130), (3, 0)):  # 3 is NaN
        codes = out.view(torch.uint8).clone()
        codes[row, column] = codes[row, column] ^ 2
        with pytest.raises(AssertionError):
            assert_silu_mul_cast(gate_up, codes.view(out.dtype), scale, **check)
        wrong = scale.clone()
        wrong[row, column // 128] = wrong[row, column // 128].nan_to_num(1.0) * (1 + 1e-4)
        with pytest.raises(AssertionError):
            assert_silu_mul_cast(gate_up, out, wrong, **check)
