"""The fuzzers without a GPU: each one notices faults, and its runs end as documented. test_fuzz_draws.py has their
draws."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from random import Random
from types import SimpleNamespace

import campaign
import changes
import fuzz
import fuzz_casts
import fuzz_formats
import fuzz_gpu
import fuzz_groups
import fuzz_kinds
import fuzz_logits
import fuzz_thin
import fuzz_train
import pytest
import torch
from campaign import CLEAN, FAILED, HANG, UNUSABLE, WRONG, OperandPool
from conftest import missing_hopper
from fuzz_casts import CASES, bits
from fuzz_kinds import Values, selectable
from strategies import (
    NUM_SMS,
    SMALL,
    SMALL_KINDS,
    Call,
    Limits,
    Place,
    Places,
    Problem,
    Special,
    Use,
    draw_configs,
)

import deep_tile
from deep_tile import (
    experts,
    jit,
    linear,
    plan,
    quantize,
    sources,
    transposed,
)
from deep_tile.kinds import FAMILIES

pytestmark = pytest.mark.about(*changes.OF_FUZZERS)


# Runs, of each fuzzer.


FUZZERS = {
    "gpu": (fuzz_gpu, "9", 3, ("--configs", "70"), {"USUAL": SMALL}),
    "kinds": (fuzz_kinds, "11", 12, ("--configs", "4"), {"USUAL": SMALL_KINDS}),
    "casts": (fuzz_casts, "5", 12, (), {"USUAL": fuzz_casts.Sizes(40, 300, 1 << 13), "_POOL": 1 << 18}),
    "groups": (fuzz_groups, "11", 2, (), {}),
    "formats": (fuzz_formats, "3", 12, ("--configs", "6"),
                {"SIZES": (1, 32, 129, 200), "PRODUCTS": 3, "GROUPS": (0, 3), "ROWS": 40, "UNITS": (1, 9)}),
    "thin": (fuzz_thin, "3", 8, (), {"SIZES": (1, 24, 33), "LENGTHS": (8, 65, 520)}),
    "logits": (fuzz_logits, "3", 10, (), {}),
    "train": (fuzz_train, "5", 6, (), {}),
}  # fmt: skip
"""Each fuzzer's module, a seed, rounds, options, and settings that make its products small."""


class Left(Exception):
    """Raised instead of ending the process."""


@pytest.fixture
def exits(monkeypatch):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(campaign.os, "_exit", leave)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch, exits):
    """Run a fuzzer on the CPU, which prints its report; its status and report."""
    monkeypatch.setattr(deep_tile, "precompile_thin", lambda: 0)

    def start(name: str, *arguments: str) -> tuple[int, dict]:
        module, seed, rounds, options, smaller = FUZZERS[name]
        for what, value in smaller.items():
            monkeypatch.setattr(module, what, value)
        path = tmp_path / "report.json"
        defaults = ["--device", "cpu", "--seed", seed, "--rounds", str(rounds), *options, "--out", str(path)]
        capsys.readouterr()
        status = fuzz.main([name, *defaults, *arguments])
        report = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == report
        return status, report

    return start


@pytest.fixture
def follow(monkeypatch):
    """Let each call of a function be followed by fault(result, arguments)."""

    def install(module, name, fault):
        right = getattr(module, name)

        def call(*arguments, **keywords):
            result = right(*arguments, **keywords)
            fault(result, arguments)
            return result

        monkeypatch.setattr(module, name, call)

    return install


@pytest.fixture
def only(monkeypatch):
    """Casts of these cases alone, not empty, and with results given, or none."""

    def choose(*names: str, given: bool = True) -> None:
        monkeypatch.setattr(fuzz_casts, "CASES", {name: CASES[name] for name in names})
        monkeypatch.setattr(fuzz_casts, "GIVEN_SHARE", float(given))
        monkeypatch.setattr(fuzz_casts, "EMPTY_SHARE", 0.0)

    return choose


@pytest.mark.parametrize("name", FUZZERS)
def test_a_clean_run_counts_what_it_did(run, name):
    status, report = run(name)
    rounds = FUZZERS[name][2]
    assert (status, report["ok"], report["found"], report["rounds"]) == (CLEAN, True, {}, rounds)
    assert report.get("products", 0) + report.get("calls_that_copy", 0) >= rounds
    if name == "gpu":
        assert (report["seed"], report["wrong"], report["hangs"]) == (9, 0, 0)
        assert report["calls"] == 3 * fuzz_gpu.USES and report["products"] >= 2 * report["calls"]
        assert 3 <= report["configs"] <= report["configs_loaded"]
        assert sum(report["families"].values()) == report["calls"]
        assert report["families"]["the selector's choice"] == 3  # one of each round
    if name == "kinds":
        assert (report["products"], sum(report["calls"].values())) == (2 * rounds, rounds)
        assert report["configs_loaded"] == 4 * (len(FAMILIES) + 1) and 6 < report["configs"] <= rounds
    if name == "casts":
        assert report["calls_that_copy"] == sum(report["calls"].values()) == 2 * rounds and len(report["calls"]) > 5


def first(x):
    return x[(slice(0, 1),) * x.dim()]


def nan_or_least(out):
    first(out).fill_(fuzz_kinds.unwritten(out.dtype))


def beside(x, elements, value=3):
    bits(x).as_strided((1,), (1,), x.storage_offset() + elements).fill_(value)


def extent(x):
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def unwritten(given):
    sample, _, out = given
    missing = torch.full_like(out, fuzz_kinds.unwritten(out.dtype)) if sample.before is None else sample.before + 1e-3
    first(out).copy_(first(missing))


def to_living(given, value):
    for _, at, _ in fuzz_groups.living_rows(given[1]):
        given[2][at, :1].fill_(value)


def roll(weight):
    weight.copy_(weight.roll(1, 0))


def last(out):
    return out.view(-1)[-1:]


TURNS = itertools.cycle((1, 2))
"""Two values, one for a call and one for its repetition."""

FOUND = {
    "gpu: an element off": (fuzz_gpu, "fp8_gemm", "values", lambda out, _: out[-1, -1].add_(1).mul_(1e4)),
    "gpu: NaN for a number": (fuzz_gpu, "fp8_gemm", "values", lambda out, _: out[0, 0].fill_(math.nan)),
    "gpu: infinity for a number": (fuzz_gpu, "fp8_gemm", "values", lambda out, _: out[0, 0].fill_(math.inf)),
    "gpu: off in all": (fuzz_gpu, "fp8_gemm", "values", lambda out, _: out.add_(1e3)),
    "gpu: changing": (fuzz_gpu, "fp8_gemm", "repeat", lambda out, _: out[0, 0].fill_(next(TURNS))),
    "gpu: behind out": (fuzz_gpu, "fp8_gemm", "guards", lambda out, _: beside(out, 1 + extent(out))),
    "gpu: before out": (fuzz_gpu, "fp8_gemm", "guards", lambda out, _: beside(out, -1)),
    "gpu: an input": (fuzz_gpu, "fp8_gemm", "inputs", lambda _, given: bits(given[0])[-1, -1].add_(1)),
    "gpu: behind an input": (fuzz_gpu, "fp8_gemm", "inputs", lambda _, given: beside(given[0], 1 + extent(given[0]))),
    "gpu: a scale": (fuzz_gpu, "fp8_gemm", "inputs", lambda _, given: given[3][-1, -1].add_(1)),
    "kinds: an element off": (fuzz_kinds, "multiply", "values", lambda _, given: first(given[2]).add_(1000)),
    "kinds: the last element off": (fuzz_kinds, "multiply", "values", lambda _, given: given[2][..., -1:].add_(1000)),
    "kinds: NaN for a number": (fuzz_kinds, "multiply", "values", lambda _, given: nan_or_least(given[2])),
    "kinds: unwritten": (fuzz_kinds, "multiply", "values", lambda _, given: unwritten(given)),
    "kinds: changing": (fuzz_kinds, "multiply", "repeat", lambda _, given: first(given[2]).fill_(next(TURNS))),
    "kinds: before out": (fuzz_kinds, "multiply", "guards", lambda _, given: beside(given[2], -1)),
    "kinds: behind out": (fuzz_kinds, "multiply", "guards", lambda _, given: beside(given[2], 1 + extent(given[2]))),
    "kinds: an input": (fuzz_kinds, "multiply", "inputs", lambda _, given: first(bits(given[0].operands[0])).add_(1)),
    "kinds: beside an input": (fuzz_kinds, "multiply", "inputs", lambda _, given: given[0].buffer[:1].fill_(0)),
    "casts: an element": (fuzz_casts, "call", "codes", lambda made, _: bits(made[0])[..., -1:].bitwise_xor_(1)),
    "casts: a scale": (fuzz_casts, "call", "scales", lambda made, _: bits(made[1])[..., -1:].bitwise_xor_(1)),
    "casts: NaN for a scale": (fuzz_casts, "call", "scales", lambda made, _: made[1][..., :1].fill_(7).div_(0)),
    "casts: changing": (fuzz_casts, "call", "repeat", lambda made, _: made[1][..., :1].fill_(next(TURNS))),
    "casts: before out": (fuzz_casts, "call", "guards", lambda made, _: beside(made[0], -1)),
    "casts: behind out": (fuzz_casts, "call", "guards", lambda made, _: beside(made[0], 1 + extent(made[0]))),
    "casts: far behind": (fuzz_casts, "call", "guards", lambda made, _: beside(made[1], 2000 + extent(made[1]))),
    "casts: an input": (fuzz_casts, "call", "inputs", lambda _, given: first(bits(given[1]["x"])).fill_(3)),
    "casts: before an input": (fuzz_casts, "call", "inputs", lambda _, given: beside(given[1]["x"], -1)),
    "groups: an element": (fuzz_groups, "multiply", "values", lambda _, given: to_living(given, math.inf)),
    "groups: changing": (fuzz_groups, "multiply", "repeated", lambda _, given: to_living(given, next(TURNS))),
    "groups: before out": (fuzz_groups, "multiply", "stray", lambda _, given: beside(given[2], -1)),
    "formats: an element": (deep_tile, "to_blocks", "element",
                            lambda made, _: first(bits(made.weight)).bitwise_xor_(1)),
    "formats: a scale": (deep_tile, "to_blocks", "element", lambda made, _: made.scale.mul_(2)),
    "formats: a product": (deep_tile, "packed_gemm", "values", lambda made, _: made[..., -1:].add_(1000)),
    "formats: before a product": (deep_tile, "packed_gemm", "guards", lambda made, _: beside(made, -1)),
    "formats: groups": (deep_tile, "packed_grouped_gemm", "values", lambda made, _: made.add_(1000)),
    "formats: dead rows": (deep_tile, "packed_grouped_gemm", "dead", lambda made, _: made.fill_(0)),
    "formats: packed": (deep_tile, "unpack_weight", "codes", lambda made, _: first(made.weight).bitwise_xor_(1)),
    "formats: other rows": (fuzz_formats, "shard_weight", "columns", lambda made, _: roll(made.weight)),
    "logits: all of them": (fuzz_logits, "mqa_logits", "values", lambda out, _: out.mul_(1.5)),
    **{
        f"thin: {what} of {name}": (deep_tile, name, kind, fault)
        for name in ("thin_gemm", "prenorm_gemm")
        for what, kind, fault in (
            ("a number", "values", lambda _, given: [last(out).add_(out.abs().max() + 1) for out in given[2:3]]),
            ("a byte behind", "guards", lambda _, given: [beside(out, out.numel(), 0) for out in given[2:3]]),
        )
    },
}  # fmt: skip
"""The function after which a fault occurs, the kind of finding, and the fault."""


@pytest.mark.parametrize("fault", FOUND)
def test_faults_are_found(run, follow, only, monkeypatch, fault):
    """Fuzzers of casts and kinds find them in every round."""
    module, function, kind, cause = FOUND[fault]
    name = fault.partition(":")[0]
    only("per token")
    follow(module, function, cause)
    monkeypatch.setattr(fuzz_formats, "SHARDS_SHARE", float(function == "shard_weight") * 1000)
    status, report = run(name)
    assert (status, set(report["found"])) == (WRONG, {"wrong"})
    elements = [finding["elements"] for finding in report["findings"]]
    assert any(kind in found for found in elements)
    if name in ("kinds", "casts"):
        assert len(elements) == FUZZERS[name][2] and all(kind in found for found in elements)
    if name == "kinds" and kind == "values":
        assert all("exact" in finding["again"]["first"][0] for finding in report["findings"])


@pytest.mark.parametrize(
    ("name", "module", "function", "fault"),
    [
        ("gpu", fuzz_gpu, "fp8_gemm", lambda out, _: out[0, 0].fill_(1e30)),
        ("kinds", fuzz_kinds, "multiply", lambda _, given: nan_or_least(given[2])),
        ("casts", fuzz_casts, "call", lambda made, _: bits(made[0])[..., -1:].bitwise_xor_(1)),
    ],
)
def test_rounds_repeat_by_themselves(run, follow, only, name, module, function, fault):
    only("per token", "per block")
    follow(module, function, fault)
    _, report = run(name, "--rounds", "6")
    assert report["found"] == {"wrong": 6 * (fuzz_gpu.USES if name == "gpu" else 1)}
    _, again = run(name, "--first-round", "4", "--rounds", "1", *["--serial"] * (name == "gpu"))
    assert again["findings"] == [finding for finding in report["findings"] if finding["round"] == 4] != []


REFUSED = {
    "gpu": (fuzz_gpu, "fp8_gemm"),
    "kinds": (fuzz_kinds, "multiply"),
    "casts": (fuzz_casts, "call"),
    "formats": (fuzz_formats, "check_format"),
    "thin": (fuzz_thin, "check_thin"),
    "groups": (fuzz_groups, "multiply"),
    "logits": (fuzz_logits, "check"),
    "train": (fuzz_train, "check"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused_are_found(run, monkeypatch, name):
    def refuse(*_, **__):
        raise ValueError("not today")

    monkeypatch.setattr(*REFUSED[name], refuse)
    monkeypatch.setattr(fuzz_formats, "PACKED_SHARE", 0)
    status, report = run(name, "--rounds", "3")
    assert (status, set(report["found"]), report["findings"][0]["error"]) == (WRONG, {"refused"}, "not today")
    if name not in ("formats", "thin"):
        assert report["found"] == {"refused": 3 * (fuzz_gpu.USES if name == "gpu" else 1)}
        assert not report.get("products") and not report.get("calls_that_copy")


# fuzz_gpu.py.


@pytest.fixture(scope="module")
def pool() -> OperandPool:
    return OperandPool(200, 400, "cpu", seed=1)


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
def test_special_values_that_reach_too_far_or_not_far_enough_are_noticed(index, value, kind, pool, follow):
    places = Places(Place((304, 1)), Place((3, 1)), Place((304, 1)), Place((1, 2)))
    values = (Special("a_scale", 4, 1, math.inf), Special("b_scale", 1, 0, math.nan), Special("a", 7, 9, math.nan))
    call = Call(Problem(30, 140, 300, places, values), Use(out_stride=150, out_offset=3))
    fuzz_gpu.assert_right(call, pool, 1)
    change = lambda out, given: out[index].fill_(value) if given[0][7].float().isnan().any() else None  # noqa: E731
    follow(fuzz_gpu, "fp8_gemm", change)
    with pytest.raises(AssertionError, match=f"'{kind}': "):
        fuzz_gpu.assert_right(call, pool, 1)


def test_a_systematic_error_is_noticed(pool, follow):
    places = Places(Place((304, 1)), Place((3, 1)), Place((304, 1)), Place((3, 1)))
    call = Call(Problem(150, 150, 300, places), Use(out_stride=150, out_offset=0))
    follow(fuzz_gpu, "fp8_gemm", lambda out, _: out.copy_((out.double() * 1.003).to(out.dtype)))
    with pytest.raises(AssertionError, match="'accuracy': 1"):
        fuzz_gpu.assert_right(call, pool, 1)


# fuzz_casts.py.


def kinds(report) -> set[str]:
    assert set(report["found"]) == {"wrong"}, report["findings"]
    return {kind for finding in report["findings"] for kind in finding["elements"]}


def test_gaps_between_rows_are_guarded(run, follow, only):
    only("per token")

    def write(made, _):
        out = made[0]
        if out.dim() > 1 and len(out) > 1 and out.stride(-2) > out.shape[-1]:
            beside(out, out.shape[-1])

    follow(fuzz_casts, "call", write)
    status, report = run("casts", "--rounds", "60")
    assert status == WRONG and kinds(report) == {"guards"} and len(report["findings"]) > 10


def one_more_lives(rows, lists):
    lives = right_living(rows, lists)
    return lives if lives is None else lives | lives.roll(1)


def misread(x):
    """A matrix at the tensor's address, if its storage has room for one."""
    columns = x.shape[-1]
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((x.numel() // columns, columns), (columns, 1)) if x.numel() <= room else right_matrix(x)


def weight_of_another_size(*arguments, **options):
    b, b_scale = quantize_weight(*arguments, **options)
    return b, 2 * b_scale


right_living, right_silu_mul, right_gathered = sources.living, sources.silu_mul, sources.gathered
right_matrix, right_elements, right_tokens = quantize.as_matrix, quantize._from_blocks, transposed._living
quantize_weight = linear.quantize_weight

BROKEN = {
    "a dead row is cast": ("listed", sources, "living", one_more_lives, "guards"),
    "a dead row of a group is cast": ("counted", sources, "living", one_more_lives, "guards"),
    "strides are forgotten": ("counted", quantize, "as_matrix", misread, "codes"),
    "a scale is too large": ("per block", quantize, "FP8_MAX", 447.0, "scales"),
    "a power of two is none": ("per token", quantize, "_pow2_scale", lambda amax: amax / 448, "scales"),
    "a division is a product": ("weight", torch, "div", quantize._multiply_with_reciprocal, "scales"),
    "rows are others": ("listed", sources, "gathered", lambda x, index: right_gathered(x, index).roll(1, 0), "codes"),
    "tokens die early": ("transposed", transposed, "_living", lambda *a: right_tokens(*a).clamp(max=3), "codes"),
    "silu_mul is off": ("silu_mul", sources, "silu_mul", lambda x, n: 1.0001 * right_silu_mul(x, n), "scales"),
    "rows are missed": ("combine", sources, "gathered", lambda x, index: right_gathered(x, index + 1), "values"),
    "a sort mixes tokens": ("sort", experts, "ceil_div", lambda x, y: x // y, "index"),
    "elements move": ("dequantize", quantize, "_from_blocks", lambda x, s: right_elements(x, s).roll(1), "values"),
    "weights are others": ("linear", linear, "quantize_weight", weight_of_another_size, "values"),
}
"""The case, what is broken and how, and the kind of finding."""


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_library_is_found(run, only, monkeypatch, broken):
    case, module, name, wrong, expected = BROKEN[broken]
    only(case)
    monkeypatch.setattr(module, name, wrong)
    status, report = run("casts", "--rounds", "30")
    assert status == WRONG and any(kind.startswith(expected) for kind in kinds(report)), report["findings"]


def test_results_that_are_not_as_documented_are_found(run, only, monkeypatch):
    only("per token", given=False)
    right = fuzz_casts.call

    def call(*arguments):
        out, scale = right(*arguments)
        return out.new_empty(*out.shape[:-1], out.shape[-1] + 16)[..., :-16].copy_(out), scale

    monkeypatch.setattr(fuzz_casts, "call", call)
    status, report = run("casts", "--rounds", "30")
    assert status == WRONG and all(kind.startswith("out: strides") for kind in kinds(report))


# fuzz_kinds.py.


@pytest.fixture(scope="module")
def kernels():
    return fuzz_kinds.draw_kernels(Random("4:kernels"), 48, NUM_SMS)


def test_a_wrong_whole_is_found(kernels):
    """All elements are 0.3 % too small, where BF16 permits 0.4 % for each."""
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
        for draw in (fuzz_kinds.draw_for(Random(seed), config, NUM_SMS, SMALL_KINDS) for seed in range(100))
        if draw.tokens.spare_rows and len(draw.tokens.bounds) > 1
    )
    guarded = fuzz_kinds.guarded_out(drawn, "cpu")
    rows = guarded.out.shape[1]
    guarded.out.as_strided((1,), (1,), guarded.out.storage_offset() + rows * guarded.out.stride(1)).fill_(0)
    assert guarded.count_written_outside() == 1


@pytest.mark.parametrize(
    ("chosen", "divergent", "found"),
    [(False, True, {}), (True, True, {"not compiled": 1}), (False, False, {"not compiled": 1})],
)
def test_kernels_that_do_not_compile_are_found(run, monkeypatch, chosen, divergent, found):
    """Random kernels with divergent warps are refused, and are no finding."""
    without = []

    def load(configs, device, workers):
        config = next(config for config in configs if (config in selectable(config)) == chosen)
        without.append(config.name)
        return {config.name: jit.divergence_text(config.name, ("a wait",)) if divergent else "no room"}

    monkeypatch.setattr(campaign, "load_kernels", load)
    status, report = run("kinds", "--rounds", "2")
    assert (status, report["found"]) == (WRONG if found else CLEAN, found)
    assert report["configs_loaded"] == 4 * (len(FAMILIES) + 1) - 1
    assert report["configs_refused"] == ([] if found else without)


# How runs end.


class StuckWatch(campaign.Watch):
    """The watch of a GPU on which nothing ends."""

    def __init__(self, device: str):
        super().__init__("cuda", limit_s=0.01)


def test_a_hang_ends_the_run_and_says_which_call(monkeypatch, tmp_path, exits):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))
    monkeypatch.setattr(campaign, "Watch", StuckWatch)
    monkeypatch.setattr(fuzz_gpu, "USUAL", SMALL)
    path = tmp_path / "report.json"
    with pytest.raises(Left, match=f"^{HANG}$"):
        fuzz.main(["gpu", "--device", "cpu", "--configs", "70", "--serial", "--out", str(path)])
    report = json.loads(path.read_text())
    assert (report["hangs"], report["ok"], report["rounds"]) == (1, False, 0)
    assert re.fullmatch(r"round 0: \d+x\d+x\d+ Use\(.*config=.*\) Places\(.*\) \[.*\]", report["findings"][0]["draw"])


def test_a_broken_context_ends_the_run(run, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fuzz_gpu, "fp8_gemm", fail)
    with pytest.raises(Left, match=f"^{FAILED}$"):
        run("gpu")
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


@pytest.mark.parametrize("driver", ["fuzz.py gpu", "fuzz.py", "stress.py"])
@pytest.mark.skipif(missing_hopper() is None, reason="there is a Hopper GPU")
def test_without_a_gpu_nothing_is_claimed(driver, tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, *os.path.join(os.path.dirname(__file__), driver).split(), "--out", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == UNUSABLE and "needs a Hopper GPU" in done.stderr
    assert not path.exists()


# All fuzzers.


PROLOGUE = """
import json, pathlib, sys, time
option = lambda name: sys.argv[sys.argv.index("--" + name) + 1]
seed, out = int(option("seed")), pathlib.Path(option("out"))
def end(status=0, leaves=None, **fields):
    counted = {"ok": status == 0, "products": 10, "calls_that_copy": seed, "found": {}, "findings": [], "rounds": 1}
    out.write_text(json.dumps({**counted, **fields}))
    sys.exit(status if leaves is None else leaves)
"""

WRONG_ONE = {"kind": "wrong", "round": 7, "draw": "of it"}


@pytest.fixture
def run_all(tmp_path, monkeypatch, capsys):
    """Run stand-ins of these texts; the status and the report."""

    def start(*arguments: str, **texts: str) -> tuple[int, dict]:
        monkeypatch.setattr(fuzz, "TESTS", tmp_path)
        monkeypatch.setattr(fuzz, "COMMANDS", {name: (f"{name}.py", "--configs", "9") for name in texts})
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(PROLOGUE + text)
        path = tmp_path / "all.json"
        defaults = ["--device", "cpu", "--seed", "5", "--seconds", "20", "--out", str(path)]
        status = fuzz.main([*defaults, *arguments])
        report = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == report
        return status, report

    return start


def test_counts_are_summed_up(run_all):
    status, report = run_all("--processes", "casts=2", "stress=1", casts="end()", stress="end(products=5000)")
    assert (status, report["ok"]) == (CLEAN, True)
    assert (report["products"], report["calls_that_copy"], report["rounds"]) == (20, 5 + 6, 2)
    assert (report["wrong"], report["hangs"]) == (0, 0)
    assert report["fuzzers"]["casts"] == {
        "processes": 2,
        "products": 20,
        "calls_that_copy": 11,
        "rounds": 2,
        "configs": 0,
    }
    assert report["fuzzers"]["stress"]["products"] == 5000


def test_a_finding_says_what_repeats_it(run_all):
    text = f"end(1, found={{'wrong': 3}}, findings=[{WRONG_ONE}]) if seed == 6 else end()"
    status, report = run_all("--processes", "casts=3", casts=text)
    assert (status, report["found"], report["wrong"]) == (WRONG, {"wrong": 3}, 3)
    repeat = "tests/casts.py --configs 9 --seed 6 --first-round 7 --rounds 1"
    assert report["findings"] == [{"process": "casts-1", "seed": 6, "repeat": repeat, **WRONG_ONE}]


def test_a_hang_is_the_worst(run_all):
    text = "end(3, found={'hang': 1}) if seed == 6 else end(1, found={'wrong': 1})"
    status, report = run_all("--processes", "casts=2", casts=text)
    assert (status, report["hangs"], report["wrong"]) == (HANG, 1, 1)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("print('Segmentation'); import os; os.abort()", "failure", "status -6 and no report: Segmentation"),
        ("import os; os._exit(0)", "failure", "status 0 and no report"),
        ("end(leaves=9)", "failure", "status 9 after a clean report"),
        ("end(products=0, calls_that_copy=0)", "idle", "called nothing"),
        ("time.sleep(60)", "failure", "has no end"),
    ],
    ids=["crash", "no report", "bad end", "idle", "no end"],
)
def test_a_process_that_fails_is_found(run_all, monkeypatch, text, kind, said):
    monkeypatch.setattr(fuzz, "GRACE_SECONDS", 0.5)
    status, report = run_all("--processes", "bad=1", "good=1", "--seconds", "3", bad=text, good="end()")
    assert (status, report["found"]) == (FAILED if kind == "failure" else WRONG, {kind: 1})
    assert report["findings"][0]["process"] == "bad-0" and said in report["findings"][0]["error"]
    assert report["fuzzers"]["good"]["products"] == 10


def test_limits_are_shared(run_all):
    text = "end(1, found={'seen': 1}, findings=[dict(share=option('memory-share'), until=option('until'))])"
    _, report = run_all("--processes", "casts=3", casts=text)
    assert {finding["share"] for finding in report["findings"]} == {"0.25"}
    assert len({finding["until"] for finding in report["findings"]}) == 1


@pytest.mark.parametrize("text", ["cast=2", "casts", "casts=-1", "casts=x"])
def test_processes_are_named_and_counted(text):
    with pytest.raises(ValueError, match="write casts=2"):
        fuzz.counts_of([text])


def test_every_fuzzer_is_there():
    assert set(fuzz.PROCESSES) | {"stress"} == set(fuzz.COMMANDS)
    assert all((fuzz.TESTS / script).exists() for script, *_ in fuzz.COMMANDS.values())
