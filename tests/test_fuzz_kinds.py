"""That the fuzzer of kinds draws what there is, legal and again, and finds what is wrong; on the CPU's reference."""

import itertools
import json
from random import Random

import fuzz_kinds
import pytest
import torch
from campaign import CLEAN, WRONG
from fuzz_kinds import CALLS, FINISHES, GRADIENTS, SCALE_FORMS, Values, selectable
from strategies import Limits
from test_host_path import run_pretending  # noqa: F401
from test_launcher import fake_driver  # noqa: F401

from deep_tile import checks, jit, plan
from deep_tile.kinds import FAMILIES, KINDS, LAYOUTS, OUTPUTS, RAW
from deep_tile.operation import OPERATIONS
from deep_tile.tensors import SCALE_DTYPES

pytestmark = pytest.mark.about(
    "tests/*fuzz*.py",
    "tests/stress.py",
    "tests/jobs.py",
    "tests/campaign.py",
    "tests/strategies.py",
    "tests/expected*.py",
    "tests/helpers.py",
    "deep_tile/dense.py",
    "deep_tile/wgrad.py",
    "deep_tile/plan.py",
    "deep_tile/select/*",
)

NUM_SMS = 132
SMALL = Limits(m=100, n=160, k=400, out=1 << 14)
EACH = 48


@pytest.fixture(scope="module")
def kernels():
    return fuzz_kinds.draw_kernels(Random("4:kernels"), EACH, NUM_SMS)


@pytest.fixture(scope="module")
def drawn(kernels):
    return draws(kernels, 2000)


def draws(kernels, count, limits=SMALL):
    named = {config.name: config for config in kernels}
    return [fuzz_kinds.draw(Random(f"9:{number}"), named, number, NUM_SMS, limits) for number in range(count)]


def family_of(config) -> str:
    return GRADIENTS if config.by_k else config.product.family


# What is drawn.


def test_kernels_are_of_every_kind_and_finish(kernels):
    for family in (*FAMILIES, GRADIENTS):
        own = [config for config in kernels if family_of(config) == family]
        assert len(own) == EACH == len({config.name for config in own})
        assert {True, False} == {config in selectable(config) for config in own} == {config.tma_store for config in own}
        assert {config.accumulate for config in own} == {True, False}
    assert {config.kind for config in kernels} == set(KINDS)
    assert {(config.bias, config.activation) for config in kernels} == set(FINISHES)
    assert {config.output for config in kernels} == {*OUTPUTS, RAW}
    of_16_bits = {(config.kind, config.layout) for config in kernels if config.product.a.bytes == 2}
    assert of_16_bits == {(kind, layout) for kind in ("bf16", "fp16") for layout in LAYOUTS}


def test_draws_are_of_every_call(drawn, kernels):
    wanted = {(call, kind) for kind, calls in CALLS.items() for call in calls} | {("fp8_grouped_wgrad", "fp8_1x128")}
    assert {(draw.call, draw.config.product.family) for draw in drawn} == wanted
    own = {draw.config for draw in drawn}
    assert own <= set(kernels) and len(own) > 0.8 * len(kernels)
    assert {form for draw in drawn if draw.config.row_scales for form in draw.scale_forms} == set(SCALE_FORMS)
    uses = [draw.use for draw in drawn]
    assert 0.2 < sum(use.config is None for use in uses) / len(uses) < 0.8
    assert {use.pdl for use in uses} == {None, True, False}
    assert any(use.constant_weights for use in uses) and any(use.batch_invariant for use in uses)
    assert {draw.scale_dtype for draw in drawn} == {str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES}
    assert {draw.bias.strides[0] for draw in drawn} == {0, 1, 2, 3}
    ks = [draw.problem.k for draw in drawn]
    assert {k % 128 for k in ks} >= {0, 1, 127} and min(ks) < 16


def test_tokens_are_of_every_kind(drawn):
    tokens = [draw.tokens for draw in drawn if draw.tokens]
    lengths = [end - begin for one in tokens for begin, end in one.ranges]
    assert {0, 1, 127, 128, 129} <= set(lengths)
    assert {len(one.bounds) for one in tokens} == set(fuzz_kinds.GROUPS)
    assert {one.alignment for one in tokens} >= {128, 256}
    assert any(min(one.bounds) < 0 for one in tokens) and any(max(one.bounds) > one.total for one in tokens)
    assert any(list(one.bounds) != sorted(one.bounds) for one in tokens)


def test_the_same_seed_draws_the_same(kernels, drawn):
    assert fuzz_kinds.draw_kernels(Random("4:kernels"), EACH, NUM_SMS) == kernels
    assert draws(kernels, 50) == drawn[:50] != drawn[50:100]


def test_draws_are_legal(drawn, kernels):
    """A config that its call takes, or one that the selector chooses; an `out` as the draw says."""
    for draw in drawn:
        problem = draw.asked(NUM_SMS)
        assert checks.checked_config(draw.config, problem) is draw.config
        if draw.use.config is None:
            assert plan.config_for(problem) == draw.config
        else:
            assert draw.use.config is draw.config


def test_selectors_problems_are_those_that_are_drawn(drawn, monkeypatch):
    """What the call tells the selector of its tensors is what the draw was tried with."""
    from deep_tile import dense, wgrad

    values = Values("cpu", 1)
    for draw in drawn[:300]:
        sample = fuzz_kinds.make(values, draw, "cpu")
        out = fuzz_kinds.guarded_out(draw, "cpu").out
        use = draw.use
        if draw.call == "fp8_grouped_wgrad":
            options = wgrad.Options(num_sms=NUM_SMS if use.num_sms is None else use.num_sms)
            options = options._replace(expected_tokens=draw.tokens.expected, accumulate=draw.config.accumulate)
            assert wgrad.FP8_GROUPED_WGRAD.problem((*sample.operands, out), options) == draw.asked(NUM_SMS)
        elif draw.call != "fp8_gemm":
            options = dense.Options(batch_invariant=use.batch_invariant, num_sms=use.num_sms or NUM_SMS)
            options = options._replace(accumulate=draw.config.accumulate, fast_accum=not draw.config.product.promotes)
            activation = None if draw.config.activation == "none" else draw.config.activation
            operation = OPERATIONS[draw.call]
            given = (*sample.operands, out, sample.bias)[: len(operation.names)]
            asked = operation.problem(given, options._replace(activation=activation))
            assert asked == draw.asked(NUM_SMS), draw


def test_the_launcher_takes_every_call(run_pretending):  # noqa: F811
    """Sizes, strides and maps, on a pretended driver: each call is prepared once, and then known."""
    shown, launched = run_pretending("""
from random import Random
import fuzz_kinds
from strategies import Limits
checks.checked_num_sms = lambda num_sms, device: num_sms or 132
kernels = {config.name: config for config in fuzz_kinds.draw_kernels(Random(3), 24, 132)}
values = fuzz_kinds.Values("cpu", 1)
for number in range(200):
    drawn = fuzz_kinds.draw(Random(number), kernels, number, 132, Limits(60, 200, 400))
    sample = fuzz_kinds.make(values, drawn._replace(scale_dtype="float32"), "cpu")
    guarded = fuzz_kinds.guarded_out(drawn, "cpu")
    for _ in range(2):
        attempt(fuzz_kinds.multiply, sample, drawn, guarded.out)
    guarded.assert_untouched()  # nothing computes
""")
    assert shown == ["prepare_launch launch", "launch_known"] * 200
    assert len(launched) == 400


# That it notices what is wrong.


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run the driver on the CPU; its status and report."""
    monkeypatch.setattr(fuzz_kinds, "USUAL", SMALL)

    def start(*arguments: str) -> tuple[int, dict]:
        path = tmp_path / "report.json"
        defaults = ["--device", "cpu", "--seed", "11", "--configs", "8", "--rounds", "40", "--out", str(path)]
        status = fuzz_kinds.main([*defaults, *arguments])
        report = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == report
        return status, report

    return start


def test_a_clean_run_counts_what_it_did(run):
    status, report = run()
    assert (status, report["ok"], report["found"]) == (CLEAN, True, {})
    assert (report["rounds"], report["products"], sum(report["calls"].values())) == (40, 80, 40)
    assert report["configs_loaded"] == 8 * (len(FAMILIES) + 1) and 20 < report["configs"] <= 40


def test_rounds_repeat_by_themselves(run, damage):
    damage(lambda sample, drawn, out: first(out).fill_(fuzz_kinds.unwritten(out.dtype)))
    _, report = run("--rounds", "9")
    by_round = {finding["round"]: finding for finding in report["findings"]}
    assert set(by_round) == set(range(9))
    _, again = run("--first-round", "6", "--rounds", "1")
    assert again["findings"] == [by_round[6]]


@pytest.fixture
def damage(monkeypatch):
    """Let each product be followed by a fault."""
    right = fuzz_kinds.multiply

    def follow(fault):
        def multiply(sample, drawn, out):
            right(sample, drawn, out)
            fault(sample, drawn, out)

        monkeypatch.setattr(fuzz_kinds, "multiply", multiply)

    return follow


def first(out):
    return out[(slice(0, 1),) * out.dim()]


TURNS = itertools.cycle((1, 2))
"""Unlike each other in every type of `out`, one for a product and one for its repetition."""

FAULTS = {
    "an element off": ("values", lambda sample, drawn, out: first(out).add_(1000)),
    "the last element off": ("values", lambda sample, drawn, out: out[..., -1:].add_(1000)),
    "NaN for a number": ("values", lambda sample, drawn, out: first(out).fill_(fuzz_kinds.unwritten(out.dtype))),
    "an element unwritten": ("values", lambda sample, drawn, out: unwritten(sample, out)),
    "changing": ("repeat", lambda sample, drawn, out: first(out).fill_(next(TURNS))),
    "before out": ("guards", lambda sample, drawn, out: beside(out, -1)),
    "far behind out": ("guards", lambda sample, drawn, out: beside(out, 1 + extent(out))),
    "an input": ("inputs", lambda sample, drawn, out: bits_of(sample.operands[0])[:1, :1].add_(1)),
    "beside an input": ("inputs", lambda sample, drawn, out: sample.buffer[:1].fill_(0)),
}


def unwritten(sample, out):
    missing = torch.full_like(out, fuzz_kinds.unwritten(out.dtype)) if sample.before is None else sample.before + 1e-3
    first(out).copy_(first(missing))


def bits_of(x):
    return x.view({1: torch.uint8, 2: torch.int16}[x.element_size()])


def extent(out) -> int:
    return sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))


def beside(out, elements):
    out.as_strided((1,), (1,), out.storage_offset() + elements).fill_(1)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_in_every_round(run, damage, fault):
    expected, cause = FAULTS[fault]
    damage(cause)
    status, report = run("--rounds", "24")
    assert status == WRONG
    assert all(expected in finding["elements"] for finding in report["findings"])
    assert len(report["findings"]) == 24
    if expected == "values":
        assert all(
            finding["again"]["off"] and "exact" in finding["again"]["first"][0] for finding in report["findings"]
        )


def test_a_wrong_whole_is_found(kernels):
    """Of elements that are each near enough: all by 0.3 % too small, where BF16 may be off by 0.4 %."""
    plain = [config for config in kernels if config.kind in ("bf16", "fp16") and config.output == "bf16"]
    values, found = Values("cpu", 3), 0
    for number in range(200):
        drawn = fuzz_kinds.draw_for(Random(number), plain[number % len(plain)], NUM_SMS, Limits(300, 400, 400))
        (m, n, k, *_), columns = drawn.problem, drawn.out_shape[1]
        if min(m, n) < 16 or k < 64 or m * columns < fuzz_kinds.MANY:
            continue
        sample = fuzz_kinds.make(values, drawn, "cpu")
        value = sample.exact.value * 1.003
        off = sample._replace(exact=sample.exact._replace(value=value))
        faults = fuzz_kinds.check(off, drawn, lambda: None)
        assert faults["accuracy"] and not fuzz_kinds.check(sample, drawn, lambda: None)["accuracy"]
        found += 1
    assert found >= 3


def test_rows_between_groups_are_guarded(kernels):
    config = next(config for config in kernels if config.by_k)
    drawn = next(
        draw
        for draw in (fuzz_kinds.draw_for(Random(seed), config, NUM_SMS, SMALL) for seed in range(100))
        if draw.tokens.spare_rows and len(draw.tokens.bounds) > 1
    )
    guarded = fuzz_kinds.guarded_out(drawn, "cpu")
    rows = guarded.out.shape[1]
    guarded.out.as_strided((1,), (1,), guarded.out.storage_offset() + rows * guarded.out.stride(1)).fill_(0)
    assert guarded.count_written_outside() == 1


def test_calls_that_are_refused_are_found(run, monkeypatch):
    right = fuzz_kinds.draw

    def draw(*arguments):
        drawn = right(*arguments)
        return drawn._replace(use=drawn.use._replace(pdl="yes"))

    monkeypatch.setattr(fuzz_kinds, "draw", draw)
    status, report = run("--rounds", "3")
    assert (status, report["found"], report["products"]) == (WRONG, {"refused": 3}, 0)


@pytest.mark.parametrize(
    ("chosen", "divergent", "found"),
    [(False, True, {}), (True, True, {"not compiled": 1}), (False, False, {"not compiled": 1})],
)
def test_kernels_that_do_not_compile_are_found(run, monkeypatch, chosen, divergent, found):
    """But for random ones whose warps would fall apart: such are refused for good."""
    without = []

    def load(configs, device, workers):
        config = next(config for config in configs if (config in selectable(config)) == chosen)
        without.append(config.name)
        return {config.name: jit.divergence_text(config.name, ("a wait",)) if divergent else "no room"}

    monkeypatch.setattr(fuzz_kinds, "load_kernels", load)
    status, report = run("--rounds", "2")
    assert (status, report["found"]) == (WRONG if found else CLEAN, found)
    assert report["configs_loaded"] == 8 * (len(FAMILIES) + 1) - 1 and report["configs_refused"] == (
        [] if found else without
    )
