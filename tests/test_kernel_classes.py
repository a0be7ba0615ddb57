"""`explain attention`, `convolution`, `elementwise` and `reduction`: choice, candidates and words."""

import functools
import json
import sys
from itertools import pairwise

import pytest
from helpers import EXAMPLES, run_python

from deep_tile.select.hardware import H20, H200
from deep_tile.select.streaming import derive_elementwise, derive_reduction
from deep_tile.tools import cli
from deep_tile.walls import walls_hit

sys.path.append(str(EXAMPLES))
import explain_kernels  # noqa: E402
from explain_kernels import CLASSES  # noqa: E402
from other_kernels import derive_attention, derive_convolution  # noqa: E402

ASKED = {
    "attention": "--head-dim 128",
    "convolution": "--batch 8 --height 56 --width 56 --channels 256 --filters 256",
    "elementwise": "--elements 100000000 --read-bytes 4 --write-bytes 2",
    "reduction": "--rows 4096 --columns 7168 --read-bytes 2 --write-bytes 1",
}
DERIVED = {
    "attention": lambda gpu: derive_attention(128, hardware=gpu),
    "convolution": lambda gpu: derive_convolution(8, 56, 56, 256, 256, hardware=gpu),
    "elementwise": lambda gpu: derive_elementwise(100_000_000, 4, 2, gpu),
    "reduction": lambda gpu: derive_reduction(4096, 7168, 2, 1, gpu),
}
COLUMNS = {"name", "intensity", "smem_bytes", "registers", "stages_min", "stages", "stages_max", "bound", "hit"}


def test_the_smallest_kernels():
    """Less than a byte of them is in flight on an SM, in the mean."""
    assert derive_elementwise(1, 0.5, 4, H200, warps=1).bytes_in_flight == 1
    assert derive_reduction(1, 1, 0.25, 0, H200).bytes_in_flight == 1
    assert derive_reduction(1, 100_000, 0.001, 0, H200).threads_per_row == 1024


@pytest.fixture
def call(call_main):
    return functools.partial(call_main, explain_kernels.main)


@pytest.fixture
def explained(call):
    """Data of a class's command with more arguments."""

    def explain(name: str, more: str = ""):
        code, out, err = call(name, *ASKED[name].split(), *more.split(), "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return explain


def test_every_class_is_tested():
    assert list(ASKED) == list(DERIVED) == list(CLASSES)


@pytest.mark.parametrize("gpu", [H200, H20], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("name", ASKED)
def test_the_choice_is_that_of_the_function(explained, name, gpu):
    data, choice = explained(name, f"--hardware {gpu.name}"), DERIVED[name](gpu)
    assert data["choice"] == CLASSES[name].name(choice)
    assert data["walls"] == [wall._asdict() for wall in choice.walls]
    assert data["reasons"] == list(choice.reasons) and not walls_hit(choice.walls)
    chosen = [row for row in data["candidates"] if row["name"] == data["choice"]]
    assert len(chosen) == 1 and chosen[0]["hit"] == [] and chosen[0]["smem_bytes"] == choice.smem_bytes
    assert all(row.keys() >= COLUMNS for row in data["candidates"])


@pytest.mark.parametrize("name", ASKED)
def test_text_has_every_column_and_the_recommendation(call, name):
    code, out, err = call(name, *ASKED[name].split())
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for said in ("FLOP/byte", "KiB", "registers", "stages", "Recommended: ", "on 132 SMs of H200"):
        assert said in text, said
    assert CLASSES[name].name(DERIVED[name](H200)) in text


def test_tiles_that_hit_a_wall_come_last_and_say_which(explained, call):
    few = "--smem 99 --tflops 165 --bandwidth 1 --sms 128"
    data = explained("attention", few)
    hit = [bool(row["hit"]) for row in data["candidates"]]
    assert hit == sorted(hit) and any(hit) and not hit[0]
    assert all(row["smem_bytes"] <= 99 * 1024 for row in data["candidates"] if not row["hit"])
    text = " ".join(call("attention", *ASKED["attention"].split(), *few.split(), "--all")[1].split())
    assert f"{sum(hit)} of {len(hit)} candidates hit a wall" in text and "capacity wall by" in text
    assert f"{len(hit)} of {len(hit)} candidates" in text


def test_a_convolution_is_ranked_by_time(explained):
    times = [row["time_us"] for row in explained("convolution")["candidates"] if not row["hit"]]
    assert all(one <= following for one, following in pairwise(times))


def test_few_tokens_are_worth_few_loads(explained):
    """A single element leaves nothing to keep under way."""
    assert derive_elementwise(1, 2, 2).unroll == 1
    chosen = CLASSES["elementwise"].name(derive_elementwise(1, 4, 2))
    assert explained("elementwise", "--elements 1")["choice"] == chosen


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("attention", "--head-dim 100", "head_dim is 100; WGMMA needs a positive multiple of 16"),
        ("attention", "--head-dim 1024", "64 queries by 16 keys hit a wall"),
        ("attention", "--block-q 100", "block_q is 100; WGMMA needs a positive multiple of 64"),
        ("convolution", "--smem 4", "64 pixels by 32 filters hit a wall"),
        ("elementwise", "--registers 1024", "8 warps per block"),
        ("reduction", "--registers 100", "registers"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_1(call, name, more, said):
    code, out, err = call(name, *ASKED[name].split(), *more.split())
    assert (code, out) == (1, "") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("attention", "the following arguments are required: --head-dim"),
        ("attention --head-dim 0", "argument --head-dim: '0' is not a positive integer"),
        ("attention --head-dim 128 --dtype fp4", "argument --dtype: invalid choice: 'fp4'"),
        ("reduction --rows 1.5", "argument --rows: '1.5' is not a positive integer below 2**63"),
        ("elementwise --write-bytes -1", "argument --write-bytes: '-1' is neither 0 nor a positive, finite number"),
        ("elementwise --read-bytes nan", "argument --read-bytes: 'nan' is not a positive number from 1e-06 to 1e+09"),
        ("attention --head-dim 128 --rows 3", "unrecognized arguments: --rows 3"),
        ("pooling --head-dim 128", "argument CLASS: invalid choice: 'pooling'"),
    ],
)
def test_commands_that_make_no_sense(call, arguments, said):
    code, out, err = call(*arguments.split())
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_they_are_commands_of_deep_tile(call_main):
    code, out, _ = call_main(cli.main, "--help")
    assert code == 0
    commands = [f"explain {name}" for name in CLASSES]
    assert [script for script in cli.SCRIPTS if script.startswith("explain ")] == commands
    assert all(command in out for command in commands)
    code, out, err = call_main(cli.main, "explain", "attention", "--head-dim", "64")
    assert (code, err) == (0, "") and "192x128" in out


def test_it_needs_no_torch():
    code = f"import sys; sys.path.append({str(EXAMPLES)!r}); import explain_kernels; explain_kernels.main()"
    done = run_python(f"{code}; assert 'torch' not in sys.modules", "attention", "--head-dim", "64")
    assert done.stderr == "" and "192x128" in done.stdout
