"""The selector: legal choices for any shape, one choice per bucket of m, and golden choices for the benchmark shapes.

`python tests/test_select.py --update` writes golden_choices.json anew, after a change that is meant to change choices.
"""

import argparse
import json
import runpy
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deep_tile.config import GemmConfig, ceil_div
from deep_tile.kinds import ACTIVATIONS, BIASES, KINDS, LAYOUTS, OUTPUTS
from deep_tile.problem import GemmProblem
from deep_tile.select import choose as choosing
from deep_tile.select.choose import bucketed, candidates, choose, choose_bucket, configs_for, suits
from deep_tile.select.defaults import deepest_config, default_configs
from deep_tile.select.schedule import (
    blocks_per_tile,
    busiest,
    cluster_slots,
    cluster_tiles,
    columns_begun,
    grid_size,
    last_rows_reciprocal,
    raster_rows,
)

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden_choices.json"
SM_COUNTS = (1, 2, 3, 7, 66, 78, 113, 114, 132)

num_sms = st.sampled_from(SM_COUNTS)
sizes = st.one_of(st.integers(1, 300), st.integers(1, 200_000), st.integers(1, 2**31 - 1))
problems = st.builds(
    GemmProblem,
    sizes,
    sizes,
    sizes,
    num_sms,
    st.booleans(),
    kind=st.sampled_from(list(KINDS)),
    output=st.sampled_from(list(OUTPUTS)),
    groups=st.none(),
    accumulate=st.just(False),
    bias=st.sampled_from(BIASES),
    activation=st.sampled_from(ACTIVATIONS),
    layout=st.sampled_from(list(LAYOUTS)),
    strided=st.none() | st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2),
).map(lambda problem: problem if problem.product.a.bytes == 2 else problem._replace(layout="nt"))


def benchmark_shapes():
    return runpy.run_path(str(TESTS.parent / "benchmarks" / "shapes.py"))["DENSE"]


def golden_choices() -> dict[str, str]:
    return {str(shape): choose(GemmProblem(shape.m, shape.n, shape.k)).name for shape in benchmark_shapes()}


@given(problems)
@settings(max_examples=300, deadline=None)
def test_any_size_gets_a_legal_choice_and_a_runnable_grid(problem):
    config = choose(problem)
    assert config.tma_store == problem.tma_store and config.illegal_because is None
    assert 1 <= config.cluster <= grid_size(config, problem) <= problem.num_sms


@given(problems, st.sampled_from(default_configs(True)))
@settings(max_examples=300, deadline=None)
def test_grid_is_the_smallest_that_keeps_the_waves(problem, config):
    assume(config.cluster <= problem.num_sms)
    tiles = cluster_tiles(config, problem)
    clusters, rest = divmod(grid_size(config, problem), config.cluster)
    assert rest == 0
    assert clusters <= tiles

    def waves(slots):
        return -(-tiles // slots)

    fewest_waves = waves(cluster_slots(config, problem.num_sms))
    assert waves(clusters) == fewest_waves
    assert clusters == 1 or waves(clusters - 1) != fewest_waves


def test_the_busiest_sm_by_hand():
    config = GemmConfig(128, 144, 5, store_buffers=5)
    assert busiest(config, GemmProblem(2048, 2112, 7168)) == (2, 240 / 264)
    assert busiest(config, GemmProblem(128, 144, 7168)) == (1, 1 / 132)


def test_pairs_are_no_candidate_for_an_odd_number_of_k_blocks():
    paired = GemmConfig(128, 112, 6, pairs=True)
    assert suits(paired, GemmProblem(128, 112, 256)) and not suits(paired, GemmProblem(128, 112, 257))


def test_grid_by_hand():
    config = GemmConfig(128, 128, 4)
    assert grid_size(config, GemmProblem(128, 128, 128)) == 1
    assert grid_size(config, GemmProblem(4096, 2176, 7168)) == 109  # 32 x 17 = 544 tiles, 5 waves
    assert grid_size(GemmConfig(128, 128, 4, 2, 1), GemmProblem(4096, 2176, 7168)) == 2 * 55  # 272 pairs, 5 waves
    assert grid_size(GemmConfig(128, 128, 4, 1, 2), GemmProblem(1, 1, 1, num_sms=3)) == 2


@given(st.integers(1, 3000), st.integers(1, 40_000), st.integers(1, 132))
def test_columns_begun(m, n, num_sms):
    """Against tile after tile, as the kernel's ColumnScheduler walks; at most one above the most of any block."""
    config, problem = GemmConfig(128, 192, 5, b_stages=4, store_buffers=3), GemmProblem(m, n, 512, num_sms=num_sms)
    rows, columns, blocks = -(-m // 128), -(-n // 192), grid_size(config, problem)
    whole = columns // blocks
    shared = [column for column in range(whole * blocks, columns) for _ in range(rows)]
    begun, start = [], 0
    for block in range(blocks):
        count = len(shared) // blocks + (block < len(shared) % blocks)
        begun.append(whole + len(set(shared[start : start + count])))
        start += count
    assert start == len(shared)
    assert max(begun) <= columns_begun(config, problem) <= max(begun) + 1
    assert columns_begun(GemmConfig(128, 192, 4), problem) == 0


@pytest.mark.parametrize(
    ("tile", "b_stays", "b_leaves"),
    [((128, 192), 8, 16), ((128, 128), 8, 8), ((256, 128), 4, 4), ((128, 128, {"cluster_n": 2}), 16, 16)],
)
def test_raster_groups_by_tile_and_size_of_b(tile, b_stays, b_leaves):
    block_m, block_n, *options = tile
    config = deepest_config(block_m, block_n, **dict(*options))
    assert raster_rows(config, GemmProblem(4096, 2112, 7168)) == b_stays
    assert raster_rows(config, GemmProblem(4096, 7168, 4096)) == b_leaves
    assert raster_rows(config, GemmProblem(4096, 7168, 4096, kind="mxfp4")) == b_stays


@given(st.integers(1, 1 << 16), st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 16]), st.integers(0, (1 << 27) - 1))
def test_reciprocal_divides_any_position(m, cluster_m, group_rows, position):
    rows = ceil_div(m, 64 * cluster_m)
    last_rows = rows - (rows - 1) // (group_rows // cluster_m) * (group_rows // cluster_m)
    reciprocal = last_rows_reciprocal(GemmConfig(64, 64, 4, cluster_m), m, group_rows)
    assert (2 * position * reciprocal) >> 32 == position // last_rows


def test_large_clusters_leave_sms_idle():
    """120 of an H200's 132 SMs run clusters of four or eight at once (occupancy query, 2026-11-21)."""
    pairs, fours, eights = (GemmConfig(64, 128, 4, split_k=parts) for parts in (2, 4, 8))
    assert [cluster_slots(config, 132) for config in (pairs, fours, eights)] == [66, 30, 15]
    assert cluster_slots(fours, 4) == 1
    assert [cluster_slots(GemmConfig(64, 128, 4, 2, 2, parts), 132) for parts in (1, 2)] == [30, 15]


def test_blocks_of_the_longest_part():
    assert blocks_per_tile(GemmConfig(64, 64, 4), 7168) == 56
    assert blocks_per_tile(GemmConfig(64, 64, 4, split_k=4), 7168) == 14
    assert blocks_per_tile(GemmConfig(64, 64, 4, split_k=4, scale_blocks=2), 7168 - 128) == 14  # 28 stages, 7 each
    assert blocks_per_tile(GemmConfig(64, 64, 3, scale_blocks=4), 130) == 4


@pytest.mark.parametrize(
    ("m", "end"), [(1, 8), (8, 8), (57, 64), (65, 96), (96, 96), (97, 128), (129, 192), (8192, 8192), (8193, 8256)]
)
def test_buckets_are_finer_where_choices_change_faster(m, end):
    assert bucketed(GemmProblem(m, 4096, 7168)).m == end


@given(problems)
@settings(max_examples=200, deadline=None)
def test_choice_is_that_of_its_bucket(problem):
    bucket = bucketed(problem)
    assert bucket.m >= problem.m
    assert bucketed(bucket) == bucket
    assert bucket._replace(m=problem.m, strided=problem.strided) == problem
    assert bucket.row_alignment == problem.row_alignment
    assert choose(problem) == choose(bucket)


@given(
    n=st.integers(1, 40_000),
    k=st.integers(1, 20_000),
    max_m=st.integers(1, 700),
    num_sms=num_sms,
    tma_store=st.booleans(),
    what=st.sampled_from([{"kind": "fp8"}, {"kind": "bf16", "layout": "tn"}, {"kind": "bf16", "layout": "nn"}]),
)
@settings(max_examples=60, deadline=None)
def test_configs_for_are_those_that_some_m_is_given(n, k, max_m, num_sms, tma_store, what):
    """Choices of many m are made at once, remembered or not. For an `a` along m, TMA's rows fit multiples of 8 only."""
    of_all = GemmProblem(1, n, k, num_sms, tma_store, **what)
    choose_bucket.cache_clear()
    made = configs_for(of_all, max_m)
    choose_bucket.cache_clear()
    chosen = {choose(GemmProblem(m, n, k, num_sms, tma_store, **what)) for m in range(1, max_m + 1)}
    assert set(made) == chosen and made == configs_for(of_all, max_m)
    covering = configs_for(of_all, max_m)
    assert len(covering) == len(set(covering))
    # The last bucket reaches beyond max_m, but is one choice.
    assert set(covering) == chosen


@pytest.mark.parametrize("kind", ["fp8", "bf16", "int8"])
def test_choices_of_many_m_are_made_at_once(monkeypatch, kind):
    """Both ways agree but for some near ties and measured choices."""
    estimated = []
    estimate = choosing.estimate
    monkeypatch.setattr(choosing, "estimate", lambda *given: estimated.append(given) or estimate(*given))
    choose_bucket.cache_clear()
    configs_for(GemmProblem(1, 12_288, 4_096, kind=kind), 8_192)
    choose_bucket.cache_clear()
    assert len({problem.m for _, problem, _ in estimated}) < 40 and not choosing._foreseen


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_transposed_tiles_are_for_measured_layouts_and_sizes(layout):
    """And a bucket's largest m has the same choice as the others, on both sides of the limits."""
    of_all = GemmProblem(1, 12_288, 8_192, kind="bf16", layout=layout)
    for m in (24, 65, 130, 1_920, 1_984, 1_985, 2_048, 2_049, 4_096):
        problem = of_all._replace(m=m).with_alignment((128, 128))
        ranked = [config for _, config in candidates(bucketed(problem))]
        assert any(config.transposed for config in ranked) == (layout != "tt" and m <= 1_984), m
        assert bucketed(bucketed(problem)) == bucketed(problem) and choose(bucketed(problem)) == choose(problem)
        assert bucketed(problem).m - m < (16 if layout != "tt" and 64 < m <= 1_984 else 64)


def test_candidates_are_every_runnable_default_fastest_first():
    problem = GemmProblem(1000, 2112, 7168, num_sms=1)
    ranked = candidates(problem)
    times = [estimate.time_us for estimate, _ in ranked]
    assert times == sorted(times)
    assert {config for _, config in ranked} == {
        config for config in default_configs(True) if config.cluster == 1 and suits(config, problem)
    }
    assert all(0 < e.utilization <= 1 and e.waves >= 1 for e, _ in ranked)
    assert ranked[0][1] == choose(bucketed(problem))


@pytest.mark.parametrize("k", [128, 129, 384, 385, 640, 641])
def test_candidates_can_multiply_k(k):
    resident = [config.name for _, config in candidates(GemmProblem(4096, 4096, k)) if config.resident_b]
    fitting = [c for c in default_configs(True) if c.resident_b and 128 < k <= 128 * c.b_stages]
    assert sorted(resident) == sorted(config.name for config in fitting)


@pytest.mark.parametrize("tma_store", [True, False])
def test_default_configs_are_distinct_and_all_of_one_store(tma_store):
    configs = default_configs(tma_store)
    assert len(configs) == len(set(configs)) > 10
    assert all(config.tma_store == tma_store for config in configs)
    assert any(config.cluster == 1 for config in configs)  # what one SM can run


def test_golden_choices():
    """Choices on an H200. The top of this file says how to write them anew."""
    assert golden_choices() == json.loads(GOLDEN.read_text())


def test_warm_choice_predicts_nothing(monkeypatch):
    problem = GemmProblem(77, 4096, 7168)
    chosen = choose(problem)
    monkeypatch.setattr(choosing, "candidates", lambda *ignored: pytest.fail("configs are compared again"))
    assert choose(problem) is chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Golden choices of the selector")
    parser.add_argument("--update", action="store_true", required=True, help="write golden_choices.json anew")
    parser.parse_args()
    GOLDEN.write_text(json.dumps(golden_choices(), indent=1) + "\n")
