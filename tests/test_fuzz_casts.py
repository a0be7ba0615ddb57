"""That the fuzzer of casts draws what there is, knows what is right, finds what is wrong; on the CPU's definition."""

import itertools
import json
from math import prod
from random import Random

import campaign
import expected_casts
import fuzz_casts
import pytest
import torch
from campaign import CLEAN, WRONG
from fuzz_casts import CASES, Sizes, bits

from deep_tile import experts, linear, quantize, sources, transposed
from deep_tile.quantize import SOURCE_DTYPES
from deep_tile.tensors import SCALE_DTYPES

pytestmark = pytest.mark.about(
    "tests/*fuzz*.py",
    "tests/stress.py",
    "tests/jobs.py",
    "tests/campaign.py",
    "tests/strategies.py",
    "tests/expected*.py",
    "tests/helpers.py",
)

SMALL = Sizes(40, 300, 1 << 13)


@pytest.fixture(scope="module")
def drawn():
    return [fuzz_casts.draw(Random(f"3:{number}"), fuzz_casts.USUAL) for number in range(4000)]


# What is drawn.


def test_draws_are_of_every_call(drawn):
    assert {draw.case for draw in drawn} == set(CASES)
    targets = {(len(draw.targets), "out" in draw.targets) for draw in drawn if draw.case == "per token"}
    assert targets == {(0, False), (1, True), (1, False), (2, True)}
    for name, values in {"round_scale": 2, "exact": 2, "scale_layout": 3, "limit": 5, "alignment": 8}.items():
        assert len({draw.options[name] for draw in drawn if name in draw.options}) == values, name
    assert len({draw.options.get("config") for draw in drawn if draw.case == "gemm cast"}) > 15
    floors = {draw.options.get("amax_floor") for draw in drawn}
    assert floors == set(fuzz_casts.FLOORS)


def test_inputs_are_of_every_dtype_layout_and_value(drawn):
    inputs = [x for draw in drawn for x in draw.inputs.values()]
    sources_ = [draw.inputs["x"] for draw in drawn if draw.case in ("per token", "counted", "transposed")]
    assert {x.dtype for x in sources_} == {fuzz_casts.name_of(dtype) for dtype in SOURCE_DTYPES}
    assert {x.values for x in sources_} == set(fuzz_casts.VALUES)
    scales = {draw.inputs["b_scale"].dtype for draw in drawn if "b_scale" in draw.inputs}
    assert scales == {fuzz_casts.name_of(dtype) for dtype in SCALE_DTYPES}
    assert {len(x.shape) for x in sources_} == {1, 2, 3, 4}
    assert {k % 128 for x in sources_ for k in x.shape[-1:]} >= {0, 1, 8, 127} and any(0 in x.shape for x in sources_)
    strides = [x.place.strides for x in sources_ if min(x.shape, default=0) > 1]
    assert any(0 in own for own in strides) and any(own[-1] == 2 for own in strides)
    assert any(own[-1] > own[0] > 0 for own in strides if len(own) > 1)
    assert any(own[0] < x.shape[1] and own[1] == 1 for x in sources_ if len(own := x.place.strides) == 2)
    assert {x.place.offset % 16 for x in inputs} == set(range(16))


def test_many_inputs_are_no_view_of_a_matrix(drawn):
    """Of which calls make copies, by which casts with counts once went wrong."""
    pool = fuzz_casts.Pool("cpu", 1)
    counted = [draw for draw in drawn if draw.case == "counted"][:100]
    copied = 0
    for draw in counted:
        x = fuzz_casts.make(pool, draw)[1]["x"]
        copied += x.numel() > 0 and quantize.readable(x).data_ptr() != x.data_ptr()
    assert copied > 30


def test_lists_lie(drawn):
    ends = [(draw, draw.inputs[name].values) for draw in drawn for name in ("offs", "counts") if name in draw.inputs]
    assert {type(draw.options.get("alignment")) for draw, _ in ends} == {int, type(None)}
    numbers = [values for _, values in ends if values]
    assert any(min(own) < 0 for own in numbers) and any(max(own) == 2**31 - 1 for own in numbers)
    assert any(list(own) != sorted(own) for own in numbers) and any(own[-1] > 0 for own in numbers)
    pool, beyond = fuzz_casts.Pool("cpu", 1), set()
    for draw in [draw for draw in drawn if "rows" in draw.inputs][:100]:
        rows = fuzz_casts.make(pool, draw)[1]["rows"]
        beyond |= {(row < 0) - (row >= draw.inputs["x"].shape[0]) for row in rows.tolist()}
    assert beyond >= {1, 0, -1}


def test_the_same_seed_draws_the_same(drawn):
    again = [fuzz_casts.draw(Random(f"3:{number}"), fuzz_casts.USUAL) for number in range(50)]
    assert again == drawn[:50] != drawn[50:100]
    pool = fuzz_casts.Pool("cpu", 7)
    made = [fuzz_casts.make(pool, draw)[0] for draw in again]
    for draw, buffer in list(zip(again, made, strict=True))[:10]:  # by itself, and after others
        assert torch.equal(fuzz_casts.make(fuzz_casts.Pool("cpu", 7), draw)[0], buffer)


@pytest.mark.parametrize("sizes", [fuzz_casts.USUAL, fuzz_casts.LARGE])
def test_the_pool_is_large_enough(sizes):
    largest = [max(prod(x.shape) for x in fuzz_casts.draw(Random(seed), sizes).inputs.values()) for seed in range(2000)]
    assert sizes.elements / 2 < max(largest) <= fuzz_casts._POOL


def test_kernels_of_products_are_few():
    assert 0 < len(fuzz_casts.kernels_of_products(132)) < 80


# What is right.


def test_e4m3_is_rounded_to_nearest_even():
    """By the table of its numbers, where torch's conversion is what the oracle uses."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (table[1:] + table[:-1]) / 2
    even = torch.where(torch.arange(0x7E) % 2 == 0, torch.arange(0x7E), torch.arange(1, 0x7F)).to(torch.uint8)
    x = torch.stack([halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(500.0))])
    x = torch.cat([x, x.new_full((3, 2), 448.0)], 1)
    codes = expected_casts.cast(x, 1, expected_casts.Rounding(448.0)).codes[:, :-2]
    below, above = torch.arange(0x7E, dtype=torch.uint8), torch.arange(1, 0x7F, dtype=torch.uint8)
    assert torch.equal(codes, torch.stack([even, below, above]))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (448.0000305, 2.0), (224.0, 0.5), (3.3e38, 2.0**120), (0.0, 2.0**-70), (float("inf"), None)],
)
def test_powers_of_two_are_decided_exactly(amax, scale):
    rounding = expected_casts.Rounding(448 * 2.0**-70, pow2=True)
    made = expected_casts.cast(torch.tensor([[amax]]), 1, rounding)
    assert made.scale.isnan().all() if scale is None else made.scale.item() == scale
    assert (made.codes == 0x7F).all() or scale is not None


def test_living_tokens():
    lives, blocks = expected_casts.living_tokens([3, 3, 130, 600], 520, 128)
    assert lives == [t < 3 or 128 <= t < 130 or t >= 256 for t in range(520)]
    assert blocks == [True] * 5
    lives, blocks = expected_casts.living_tokens([-5, 100, 110], 300, 128)
    assert (sum(lives), blocks) == (100, [True, False, False])
    assert expected_casts.living_tokens([200, 100], 300, 128) is None


# That it notices what is wrong.


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run the driver on the CPU; its status and report."""
    monkeypatch.setattr(fuzz_casts, "USUAL", SMALL)
    monkeypatch.setattr(fuzz_casts, "_POOL", 1 << 18)
    monkeypatch.setattr(campaign, "leave", lambda status: status)

    def start(*arguments: str) -> tuple[int, dict]:
        path = tmp_path / "report.json"
        defaults = ["--device", "cpu", "--seed", "5", "--rounds", "60", "--out", str(path)]
        status = fuzz_casts.main([*defaults, *arguments])
        report = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == report
        return status, report

    return start


@pytest.fixture
def only(monkeypatch):
    """Draw these cases alone, not empty, and with results given, or none."""

    def choose(*names: str, given: bool = True) -> None:
        monkeypatch.setattr(fuzz_casts, "CASES", {name: CASES[name] for name in names})
        monkeypatch.setattr(fuzz_casts, "GIVEN_SHARE", float(given))
        monkeypatch.setattr(fuzz_casts, "EMPTY_SHARE", 0.0)

    return choose


@pytest.fixture
def damage(monkeypatch):
    """Let each call be followed by a fault."""
    right = fuzz_casts.call

    def follow(fault):
        def call(drawn, inputs, targets):
            results = right(drawn, inputs, targets)
            fault(results, inputs)
            return results

        monkeypatch.setattr(fuzz_casts, "call", call)

    return follow


def kinds(report) -> set[str]:
    assert set(report["found"]) == {"wrong"}, report["findings"]
    return {kind for finding in report["findings"] for kind in finding["elements"]}


def test_a_clean_run_counts_what_it_did(run):
    status, report = run()
    assert (status, report["ok"], report["found"]) == (CLEAN, True, {})
    assert (report["rounds"], report["calls_that_copy"], sum(report["calls"].values())) == (60, 120, 120)
    assert len(report["calls"]) > 8


def test_rounds_repeat_by_themselves(run, damage, only):
    only("per token", "per block")
    damage(lambda results, _: bits(results[0])[..., -1:].bitwise_xor_(1))
    _, report = run("--rounds", "9")
    by_round = {finding["round"]: finding for finding in report["findings"]}
    assert set(by_round) == set(range(9))
    _, again = run("--first-round", "6", "--rounds", "1")
    assert again["findings"] == [by_round[6]]
    assert again["findings"][0]["again"]["codes"]["count"] >= 1


TURNS = itertools.cycle((1.0, 2.0))
"""One for a call and one for its repetition."""


def beside(x, elements, value=3):
    bits(x).as_strided((1,), (1,), x.storage_offset() + elements).fill_(value)


def extent(x):
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


FAULTS = {
    "an element": ("codes", lambda results, _: bits(results[0])[..., -1:].bitwise_xor_(1)),
    "a scale": ("scales", lambda results, _: bits(results[1])[..., -1:].bitwise_xor_(1)),
    "NaN for a scale": ("scales", lambda results, _: results[1][..., :1].fill_(7).div_(0)),
    "changing": ("repeat", lambda results, _: results[1][..., :1].fill_(next(TURNS))),
    "before out": ("guards", lambda results, _: beside(results[0], -1)),
    "behind out": ("guards", lambda results, _: beside(results[0], 1 + extent(results[0]))),
    "far behind scale_out": ("guards", lambda results, _: beside(results[1], 2000 + extent(results[1]))),
    "an input": ("inputs", lambda _, inputs: bits(inputs["x"])[(slice(0, 1),) * inputs["x"].dim()].fill_(3)),
    "before an input": ("inputs", lambda _, inputs: beside(inputs["x"], -1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_in_every_round(run, damage, only, fault):
    expected, cause = FAULTS[fault]
    only("per token")
    damage(cause)
    status, report = run("--rounds", "20")
    assert status == WRONG and len(report["findings"]) == 20
    assert all(expected in finding["elements"] for finding in report["findings"])


def test_gaps_between_rows_are_guarded(run, damage, only):
    only("per token")

    def write(results, _):
        out = results[0]
        if out.dim() > 1 and len(out) > 1 and out.stride(-2) > out.shape[-1]:
            beside(out, out.shape[-1])

    damage(write)
    status, report = run()
    assert status == WRONG and kinds(report) == {"guards"} and len(report["findings"]) > 10


def one_more_lives(rows, lists):
    lives = right_living(rows, lists)
    return lives if lives is None else lives | lives.roll(1)


def misread(x):
    """As a matrix that lies where the tensor does, if that has room for it."""
    columns = x.shape[-1]
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((x.numel() // columns, columns), (columns, 1)) if x.numel() <= room else right_matrix(x)


def weight_of_another_size(*arguments, **options):
    b, b_scale = quantize_weight(*arguments, **options)
    return b, 2 * b_scale


right_living, right_silu_mul, right_gathered = sources.living, sources.silu_mul, sources.gathered
right_matrix, right_elements, right_tokens = quantize._as_matrix, quantize._from_blocks, transposed._living
quantize_weight = linear.quantize_weight

BROKEN = {
    "a dead row is cast": ("listed", sources, "living", one_more_lives, "guards"),
    "a dead row of a group is cast": ("counted", sources, "living", one_more_lives, "guards"),
    "strides are forgotten": ("counted", quantize, "_as_matrix", misread, "codes"),
    "a scale is too large": ("per block", quantize, "FP8_MAX", 447.0, "scales"),
    "a power of two is none": ("per token", quantize, "_pow2_scale", lambda amax: amax / 448, "scales"),
    "a division is a product": ("weight", torch, "div", quantize._multiply_with_reciprocal, "scales"),
    "rows are others": ("listed", sources, "gathered", lambda x, index: right_gathered(x, index).roll(1, 0), "codes"),
    "tokens die early": ("transposed", transposed, "_living", lambda *a: right_tokens(*a).clamp(max=3), "codes"),
    "silu_mul is off": ("silu_mul", sources, "silu_mul", lambda x, n: 1.0001 * right_silu_mul(x, n), "scales"),
    "rows are missed": ("combine", sources, "gathered", lambda x, index: right_gathered(x, index + 1), "values"),
    "a sort has no room": ("sort", experts, "_spread", lambda packed, *_: packed, "rows: "),
    "a sort mixes tokens": ("sort", experts, "ceil_div", lambda x, y: x // y, "index"),
    "elements are others": (
        "dequantize",
        quantize,
        "_from_blocks",
        lambda x, s: right_elements(x, s).roll(1),
        "values",
    ),
    "weights are others": ("linear", linear, "quantize_weight", weight_of_another_size, "values"),
}
"""What is broken, in calls of which case, where, by what, and what that is found as."""


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_library_is_found(run, only, monkeypatch, broken):
    case, module, name, wrong, expected = BROKEN[broken]
    only(case)
    monkeypatch.setattr(module, name, wrong)
    status, report = run()
    assert status == WRONG and any(kind.startswith(expected) for kind in kinds(report)), report["findings"]


def test_results_that_are_not_as_documented_are_found(run, only, monkeypatch):
    only("per token", given=False)
    right = fuzz_casts.call

    def call(*arguments):
        out, scale = right(*arguments)
        return out.new_empty(*out.shape[:-1], out.shape[-1] + 16)[..., :-16].copy_(out), scale

    monkeypatch.setattr(fuzz_casts, "call", call)
    status, report = run()
    assert status == WRONG and all(kind.startswith("out: strides") for kind in kinds(report))


def test_calls_that_are_refused_are_found(run, monkeypatch):
    def refuse(*_):
        raise ValueError("not today")

    monkeypatch.setattr(fuzz_casts, "call", refuse)
    status, report = run("--rounds", "3")
    assert (status, report["found"], report["calls_that_copy"]) == (WRONG, {"refused": 3}, 0)
