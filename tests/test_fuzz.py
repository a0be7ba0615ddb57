"""The fuzzer without a GPU: calls of the reference, what it draws and expects, and that it notices what is wrong."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from random import Random

import campaign
import fuzz_gpu
import pytest
import torch
from campaign import CLEAN, FAILED, HANG, UNUSABLE, WRONG, OperandPool
from conftest import missing_hopper
from expected import expected_product
from helpers import GuardedOut, Operands
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    Call,
    Limits,
    Place,
    Places,
    Problem,
    Special,
    Use,
    config_named,
    draw_call,
    draw_config,
    draw_configs,
    family,
    legal_configs,
)
from test_host_path import run_pretending  # noqa: F401
from test_launcher import fake_driver  # noqa: F401
from test_params import unpack

from deep_tile import GemmConfig, checks, params, plan
from deep_tile.config import SMEM_LIMIT_BYTES, ceil_div
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.about(
    "tests/*fuzz*.py",
    "tests/stress.py",
    "tests/jobs.py",
    "tests/campaign.py",
    "tests/strategies.py",
    "tests/expected*.py",
    "tests/helpers.py",
)

SMALL = Limits(m=24, n=150, k=300, out=1 << 12)
NUM_SMS = 132


@st.composite
def calls(draw, **limits):
    return draw_call(draw(st.randoms(use_true_random=False)), num_sms=NUM_SMS, **limits)


def fast(examples: int):
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def pool() -> OperandPool:
    return OperandPool(200, 400, "cpu", seed=1)


# Calls on the reference.


@given(calls(limits=SMALL, empty=True), st.integers(0, 2**31 - 1))
@fast(50)
def test_any_call_is_right(pool, call, seed):
    fuzz_gpu.assert_right(call, pool, seed)


@given(calls(limits=SMALL, special=True), st.integers(0, 2**31 - 1))
@fast(50)
def test_any_value_of_a_scale_reaches_what_it_must(pool, call, seed):
    fuzz_gpu.assert_right(call, pool, seed)


# What is drawn.


@pytest.fixture(scope="module")
def drawn() -> list[Call]:
    random = Random(7)
    return [draw_call(random, num_sms=NUM_SMS, special=i % 4 == 0) for i in range(400)]


def test_every_drawn_config_suits_its_call(drawn):
    for (m, n, k, *_), use in drawn:
        if use.config is not None:
            out = GuardedOut(m, n, stride=use.out_stride, offset=use.out_offset).out
            sms, may_split = use.num_sms or NUM_SMS, not use.batch_invariant
            problem = GemmProblem(m, n, k, sms, checks.tma_can_store(out), may_split)
            assert checks.checked_config(use.config, problem) is use.config


def test_draws_are_of_every_kind(drawn):
    """Sizes around tiles, every scale layout, chosen configs and forced ones, all options."""
    uses = [call.use for call in drawn]
    assert {use.config is None for use in uses} == {True, False}
    assert {use.pdl for use in uses} == {None, True, False}
    assert any(use.constant_weights for use in uses) and any(use.batch_invariant for use in uses)
    assert any(use.out_offset % 8 for use in uses) and any(use.num_sms for use in uses)
    ks = [call.problem.k for call in drawn]
    assert {k % 128 for k in ks} >= {0, 1, 127} and min(ks) < 16
    kinds = [(call.problem.places.a_scale.strides, call.problem.m) for call in drawn]
    assert {0, 1} <= {strides[0] for strides, _ in kinds} and {0, 1} <= {strides[1] for strides, _ in kinds}
    values = [special.value for call in drawn for special in call.problem.specials]
    assert {0.0, math.inf, -math.inf} < set(values) and any(math.isnan(value) for value in values)


def test_the_same_seed_draws_the_same():
    first, second, third = (draw_call(Random(seed), num_sms=NUM_SMS, special=True) for seed in (3, 3, 4))
    assert repr(first) == repr(second) != repr(third)
    assert draw_configs(Random(5), 90) == draw_configs(Random(5), 90)


def test_random_configs_are_of_every_family():
    random = Random(1)
    assert {family(draw_config(random)) for _ in range(3000)} == {family(config) for config in legal_configs()}


NUMBERS = {
    "block_m": (0, 32, 64, 128, 192, 256, 512),
    "block_n": (-16, 0, 8, 16, 48, 64, 100, 128, 144, 192, 256, 272),
    **dict.fromkeys(("stages", "store_buffers", "b_stages"), range(-1, 30)),
    **dict.fromkeys(("cluster_m", "cluster_n"), range(-1, 4)),
    **dict.fromkeys(("split_k", "scale_blocks"), range(-1, 17)),
    "pairs": (False, True),
}


@st.composite
def numbers(draw):
    """Those of a legal config, one or two of them changed."""
    changes = draw(st.lists(st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=2))
    config = draw_config(draw(st.randoms(use_true_random=False)))
    return asdict(config) | {name: draw(st.sampled_from(NUMBERS[name])) for name in changes}


@given(numbers())
@fast(300)
def test_any_numbers_make_a_config_or_are_refused_by_its_name(fields):
    try:
        config = GemmConfig(**fields)
    except ValueError as error:
        assert re.match(r"fp8_gemm_\S+: \w+", str(error))
        return
    assert config.smem_bytes <= SMEM_LIMIT_BYTES
    assert config.accumulator_registers + config.block_sets * config.block_registers <= config.math_registers - 24
    assert config.stages >= 2 and config.boxes % config.store_chunks == 0


def test_names_come_back():
    random = Random(2)
    configs = {*default_configs(True), *default_configs(False), *(draw_config(random) for _ in range(500))}
    assert all(config_named(config.name) == config for config in configs)
    assert config_named("64x64x256_s6_k2_b1") == config_named("fp8_gemm_64x64x256_s6_c1x1_k2_b1")
    with pytest.raises(ValueError, match="'fast' is no name of a kernel"):
        config_named("fast")


# What a plan makes of it.


@pytest.fixture
def launches(monkeypatch):
    """What would be launched: the numbers of the launch and of the kernel's argument, and its maps by offset."""
    made = []

    def prepare(kernel, **asked):
        maps = {offset: entry for offset, *entry in asked["maps"]}
        made.append(asked | unpack(params.GEMM, asked["params"]) | {"maps": maps})

    monkeypatch.setattr(plan, "load_kernel", lambda config, device: None)
    monkeypatch.setattr(plan._launcher, "prepare", prepare)
    return made


def test_the_launcher_takes_every_call(run_pretending):  # noqa: F811
    """Sizes, strides and maps, on a pretended driver: each call is prepared once, and then known."""
    shown, launched = run_pretending("""
from random import Random
from campaign import OperandPool
from fuzz_gpu import arrange
from helpers import GuardedOut
from strategies import Limits, draw_call
random, pool = Random(4), OperandPool(208, 400, "cpu", seed=1)
for _ in range(120):
    (m, n, k, places, _), use = draw_call(random, num_sms=132, limits=Limits(60, 200, 400))
    _, operands = arrange(pool.cut(random, m, n, k), places)
    guarded = GuardedOut(m, n, stride=use.out_stride, offset=use.out_offset)
    for _ in range(2):
        attempt(fp8_gemm, *operands, guarded.out, **use.keywords)
    guarded.assert_untouched()  # nothing computes
""")
    assert shown == ["prepare_launch launch", "launch_known"] * 120
    assert len(launched) == 240


def test_launches_cover_the_matrix(drawn, launches):
    """Boxes that TMA takes, and a grid whose clusters take every tile once, the first ones at once."""
    for (m, n, k, places, _), use in drawn:
        sms, may_split = use.num_sms or NUM_SMS, not use.batch_invariant
        problem = GemmProblem(m, n, k, sms, use.config.tma_store if use.config else n % 8 == 0, may_split)
        config = use.config or choose(problem)
        assert checks.checked_config(config, problem) is config
        strides = max(k, 16), max(k, 16), use.out_stride, places.a_scale.strides, places.b_scale.strides
        layout = plan.Layout(*strides, a_scale_aligned=True)
        plan.prepare_launch(problem, config, layout, 0, pdl=True, constant_weights=False)
        assert_covers(launches.pop(), config, problem)


def assert_covers(launch: dict, config: GemmConfig, problem: GemmProblem) -> None:
    assert launch["cluster"] == config.cluster and launch["grid"] % config.cluster == 0
    assert config.cluster <= launch["grid"] <= problem.num_sms
    swizzle_128 = params._SWIZZLES[128]
    for name in ("a_maps", "b_maps"):
        _, _, (width, height), _, (box_width, box_height), swizzle, *_ = launch["maps"][params.GEMM.offsets[name]]
        assert (width, box_width, swizzle) == (problem.k, 128, swizzle_128) and 1 <= box_height <= 256 and height > 0
    for name, rows, tile, sharers in (
        ("a_tail_rows", problem.m, config.block_m, config.cluster_n),
        ("b_tail_rows", problem.n, config.block_n, config.cluster_m),
    ):
        left, box = rows % tile, launch[name]
        assert (box == 0) == (left == 0) and left <= box * sharers <= tile and (sharers == 1 or box % 8 == 0)
    if not config.resident_b:
        assert_tiles_are_taken_once(launch, config, problem)


def assert_tiles_are_taken_once(launch: dict, config: GemmConfig, problem: GemmProblem) -> None:
    """As RasterScheduler of raster.cuh walks, dividing by multiplication."""
    rows = ceil_div(problem.m, config.block_m * config.cluster_m)
    columns = ceil_div(problem.n, config.block_n * config.cluster_n)
    assert launch["grid"] // config.cluster <= rows * columns
    group_rows = (1 << launch["raster_rows_log2"]) // config.cluster_m
    taken = [tile_at(position, rows, columns, group_rows, launch) for position in range(rows * columns)]
    assert sorted(taken) == [(row, column) for row in range(rows) for column in range(columns)]


def tile_at(position: int, rows: int, columns: int, group_rows: int, launch: dict) -> tuple[int, int]:
    group, within = divmod(position, group_rows * columns)
    height = min(group_rows, rows - group * group_rows)
    reciprocal = (1 << 31) // group_rows if height == group_rows else launch["last_rows_reciprocal"]
    column = 2 * within * reciprocal >> 32
    return group * group_rows + within - column * height, column


# What is expected: by hand, of the reference, of the kernels' arithmetic.


def one_element(a_scale: float, b_scale: float, *, a: float = 1.0, b: float = 1.0, k: int = 128) -> Operands:
    """1 x 1 x k; both operands are 0 but for their first elements."""

    def operand(value: float) -> torch.Tensor:
        x = torch.zeros(1, k)
        x[0, 0] = value
        return x.to(torch.float8_e4m3fn)

    groups = ceil_div(k, 128)
    return Operands(operand(a), torch.full((1, groups), a_scale), operand(b), torch.full((1, groups), b_scale))


FINITE, UP, DOWN, NAN = "finite", "positive", "negative", "nan"


@pytest.mark.parametrize(
    ("operands", "kinds"),
    [
        (one_element(2.0, -3.0), {FINITE}),
        (one_element(math.inf, 1.0), {UP}),
        (one_element(math.inf, -1.0), {DOWN}),
        (one_element(-math.inf, 1.0, a=-2.0), {UP}),
        (one_element(math.inf, 0.0), {NAN}),
        (one_element(math.inf, 1.0, a=0.0), {NAN}),
        (one_element(math.nan, 0.0, a=0.0), {NAN}),
        (one_element(0.0, 1.0, b=math.nan), {NAN}),
        (one_element(3e38, 3e38), {UP}),  # the product of the scales overflows
        (one_element(3e38, 3e38, a=0.0), {NAN}),
        (one_element(3e38, 1.0), {FINITE}),
        (one_element(1e38, 1.0, a=448.0, b=-448.0), {UP, DOWN, NAN}),
        (one_element(1e-30, 1e-30), {FINITE}),
    ],
)
def test_expected_by_hand(operands, kinds):
    expected = expected_product(operands)
    assert {kind for kind in (FINITE, UP, DOWN, NAN) if getattr(expected, kind).item()} == kinds
    assert not expected.wrong(promoted(operands)).any()


def test_infinities_of_two_blocks_meet():
    ones = torch.ones(1, 256).to(torch.float8_e4m3fn)
    operands = Operands(ones, torch.tensor([[math.inf, -math.inf]]), ones, torch.ones(1, 2))
    expected = expected_product(operands)
    assert expected.nan.item() and not (expected.finite | expected.positive | expected.negative).item()
    assert promoted(operands).isnan().item()


def promoted(operands: Operands) -> torch.Tensor:
    """The product as the kernels compute it, but for the sums within a K block of 128."""
    m, n, k = operands.sizes
    total = torch.zeros(m, n)
    for group in range(ceil_div(k, 128)):
        columns = slice(group * 128, (group + 1) * 128)
        block = (operands.a.float()[:, columns].double() @ operands.b.float()[:, columns].double().t()).float()
        scale = operands.a_scale[:, group, None] * operands.b_scale[torch.arange(n) // 128, group][None]
        total = (total.double() + scale.double() * block.double()).float()  # rounded once, as by a fused multiply-add
    return total.to(torch.bfloat16)


@given(calls(limits=SMALL, special=True), st.integers(0, 2**31 - 1))
@fast(50)
def test_expected_of_the_kernels_arithmetic(pool, call, seed):
    problem = call.problem
    values = pool.cut(Random(seed), problem.m, problem.n, problem.k)
    _, operands = fuzz_gpu.arrange(fuzz_gpu.with_specials(values, problem.specials), problem.places)
    assert not expected_product(operands).wrong(promoted(operands)).any()


# That it notices what is wrong.


@pytest.fixture
def plain() -> Call:
    places = Places(Place((304, 1)), Place((3, 1)), Place((304, 1)), Place((1, 2)))
    return Call(Problem(30, 140, 300, places), Use(out_stride=150, out_offset=3))


@pytest.fixture
def special(plain) -> Call:
    values = (Special("a_scale", 4, 1, math.inf), Special("b_scale", 1, 0, math.nan), Special("a", 7, 9, math.nan))
    return plain._replace(problem=plain.problem._replace(specials=values))


WRONG_RESULTS = {
    "an element off": (lambda out, inputs: out[29, 139].mul_(1.5), "values"),
    "NaN for a number": (lambda out, inputs: out[0, 0].fill_(math.nan), "values"),
    "infinity for a number": (lambda out, inputs: out[0, 0].fill_(math.inf), "values"),
    "unwritten": (lambda out, inputs: out[12, :8].fill_(math.nan), "values"),
    "off in all": (lambda out, inputs: out.copy_(out.float() * 1.0 + 1e3), "values"),
    "beside out": (lambda out, inputs: out.as_strided((1,), (1,), out.storage_offset() + 145).fill_(0), "guards"),
    "before out": (lambda out, inputs: out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0), "guards"),
    "a written": (lambda out, inputs: inputs[0].view(torch.uint8)[3, 5].add_(1), "inputs"),
    "beyond a": (lambda out, inputs: inputs[0].view(torch.uint8).as_strided((1,), (1,), 300 + 256).fill_(0), "inputs"),
    "a scale written": (lambda out, inputs: inputs[3][1, 1].add_(1), "inputs"),
}


@pytest.fixture
def damage(monkeypatch):
    """Have each product damaged, or those whose number is given."""
    right = fuzz_gpu.fp8_gemm

    def install(change, only=None):
        count = iter(range(1000))

        def multiply(*tensors, **keywords):
            out = right(*tensors, **keywords)
            if next(count) == only or only is None:
                change(out, tensors[:4])
            return out

        monkeypatch.setattr(fuzz_gpu, "fp8_gemm", multiply)

    return install


@pytest.mark.parametrize(("change", "kind"), WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_what_is_wrong_is_noticed(change, kind, plain, pool, damage):
    fuzz_gpu.assert_right(plain, pool, 1)
    damage(change)
    with pytest.raises(AssertionError, match=f"'{kind}': "):
        fuzz_gpu.assert_right(plain, pool, 1)


def test_other_bits_the_second_time_are_noticed(plain, pool, damage):
    """However small the difference."""
    damage(lambda out, _: out.view(torch.int16)[3, 3].add_(1), only=1)
    with pytest.raises(AssertionError, match="^{'repeat': 1};"):
        fuzz_gpu.assert_right(plain, pool, 1)


@pytest.mark.parametrize(
    ("index", "value", "kind"),
    [
        ((4, 5), 1.0, "values"),  # a scale of infinity
        ((7, 5), 1.0, "values"),  # NaN in a
        ((2, 130), math.inf, "values"),  # a scale of NaN
        ((2, 5), math.nan, "reach"),  # none
        ((3, 127), math.inf, "reach"),
    ],
)
def test_special_values_that_reach_too_far_or_not_far_enough_are_noticed(index, value, kind, special, pool, damage):
    fuzz_gpu.assert_right(special, pool, 1)
    damage(lambda out, inputs: out[index].fill_(value) if inputs[0][7].float().isnan().any() else None)
    with pytest.raises(AssertionError, match=f"'{kind}': "):
        fuzz_gpu.assert_right(special, pool, 1)


def test_a_systematic_error_is_noticed(pool, damage):
    places = Places(Place((304, 1)), Place((3, 1)), Place((304, 1)), Place((3, 1)))
    call = Call(Problem(150, 150, 300, places), Use(out_stride=150, out_offset=0))
    damage(lambda out, _: out.copy_((out.double() * 1.003).to(out.dtype)))
    with pytest.raises(AssertionError, match="'accuracy': 1"):
        fuzz_gpu.assert_right(call, pool, 1)


# The driver.


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run the driver on the CPU; its status and report."""
    monkeypatch.setattr(fuzz_gpu, "USUAL", SMALL)

    def start(*arguments: str) -> tuple[int, dict]:
        path = tmp_path / "report.json"
        defaults = ["--device", "cpu", "--seed", "9", "--configs", "70", "--rounds", "6", "--out", str(path)]
        status = fuzz_gpu.main([*defaults, *arguments])
        report = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == report
        return status, report

    return start


def test_a_clean_run_counts_what_it_did(run):
    status, report = run()
    assert (status, report["ok"], report["wrong"], report["hangs"]) == (CLEAN, True, 0, 0)
    assert (report["seed"], report["rounds"], report["found"]) == (9, 6, {})
    assert report["calls"] == 6 * fuzz_gpu.USES and report["products"] >= 2 * report["calls"]
    assert 6 <= report["configs"] <= report["configs_loaded"]
    assert sum(report["families"].values()) == report["calls"] - 6  # one of each round is the selector's choice


def test_rounds_repeat_by_themselves(run, damage):
    damage(lambda out, _: out[0, 0].fill_(1e30))
    status, report = run()
    assert (status, report["ok"]) == (WRONG, False)
    assert report["wrong"] == report["calls"] == len({finding["call"] for finding in report["findings"]})
    _, again = run("--first-round", "4", "--rounds", "1", "--serial")
    assert again["findings"] == [finding for finding in report["findings"] if finding["round"] == 4]


def test_a_written_input_is_found_once_for_its_round(run, damage):
    damage(lambda out, inputs: inputs[1][0, 0].copy_(torch.tensor(5.0)))
    status, report = run("--rounds", "1", "--first-round", "1")
    assert status == WRONG
    assert any("inputs" in finding["elements"] for finding in report["findings"])


def test_a_refused_call_is_found(run, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("not today")

    monkeypatch.setattr(fuzz_gpu, "fp8_gemm", refuse)
    status, report = run("--rounds", "1")
    assert (status, report["found"], report["products"]) == (WRONG, {"refused": fuzz_gpu.USES}, 0)
    assert report["findings"][0]["error"] == "not today"


class Left(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def exits(monkeypatch):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(campaign.os, "_exit", leave)


class StuckEvent:
    def record(self):
        pass

    def query(self):
        return False


class StuckWatch(campaign.Watch):
    """Of a GPU on which nothing ends."""

    def __init__(self, device: str):
        super().__init__("cuda", limit_s=0.01)


def test_a_hang_ends_the_run_and_says_which_call(monkeypatch, tmp_path, exits):
    monkeypatch.setattr(torch.cuda, "Event", StuckEvent)
    monkeypatch.setattr(fuzz_gpu, "Watch", StuckWatch)
    monkeypatch.setattr(fuzz_gpu, "USUAL", SMALL)
    path = tmp_path / "report.json"
    with pytest.raises(Left, match=f"^{HANG}$"):
        fuzz_gpu.main(["--device", "cpu", "--configs", "70", "--serial", "--out", str(path)])
    report = json.loads(path.read_text())
    assert (report["hangs"], report["ok"], report["rounds"]) == (1, False, 0)
    assert re.fullmatch(r"round 0: \d+x\d+x\d+ Use\(.*config=.*\) Places\(.*\) \[.*\]", report["findings"][0]["call"])


def test_a_broken_context_ends_the_run(run, monkeypatch, exits, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fuzz_gpu, "fp8_gemm", fail)
    with pytest.raises(Left, match=f"^{FAILED}$"):
        run()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["found"] == {"failure": 1} and "illegal memory access" in report["findings"][0]["error"]


def test_kernels_that_cannot_be_loaded_are_found_and_left_out(monkeypatch):
    monkeypatch.setattr(campaign, "on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def load(config, device):
        if config.split_k > 1:
            raise RuntimeError("does not compile")

    monkeypatch.setattr(plan, "load_kernel", load)
    configs = draw_configs(Random(1), 80)
    failures = campaign.load_kernels(configs, "cuda", workers=2)
    assert failures == {config.name: "does not compile" for config in configs if config.split_k > 1}


def test_bounded_waits_and_the_seed_are_set_first(monkeypatch):
    monkeypatch.delenv(campaign.BOUNDED_WAITS, raising=False)
    chosen = campaign.parser("", 1).parse_args(["--device", "cpu"])
    assert campaign.begin(chosen) is None
    assert campaign.BOUNDED_WAITS not in os.environ and chosen.seed is not None
    chosen = campaign.parser("", 1).parse_args(["--device", "cpu", "--bounded-waits", "--seed", "3"])
    monkeypatch.setenv(campaign.BOUNDED_WAITS, "")  # undone with the rest
    assert campaign.begin(chosen) is None
    assert os.environ[campaign.BOUNDED_WAITS] == "1" and chosen.seed == 3


@pytest.mark.parametrize("driver", ["fuzz_gpu.py", "fuzz_all.py", "stress.py"])
@pytest.mark.skipif(missing_hopper() is None, reason="there is a Hopper GPU")
def test_without_a_gpu_nothing_is_claimed(driver, tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, os.path.join(os.path.dirname(__file__), driver), "--out", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == UNUSABLE and "needs a Hopper GPU" in done.stderr
    assert not path.exists()
