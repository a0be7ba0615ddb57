"""That the fuzzer of formats draws what there is, and finds what is wrong."""

from random import Random

import fuzz_formats
import pytest
import torch

import deep_tile
from deep_tile.formats import FORMATS

pytestmark = pytest.mark.about(
    "tests/*fuzz*.py",
    "tests/stress.py",
    "tests/jobs.py",
    "tests/campaign.py",
    "tests/strategies.py",
    "tests/expected*.py",
    "tests/helpers.py",
)

RUN = ["--device", "cpu", "--seed", "3", "--rounds", "12"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(fuzz_formats, "SIZES", (1, 32, 129, 200))


def test_what_is_right_passes():
    assert fuzz_formats.main(RUN) == 0


def test_draws_are_of_every_kind(monkeypatch):
    drawn = []

    def note(name, *_):
        drawn.append(name)
        raise InterruptedError

    monkeypatch.setattr(fuzz_formats, "draw", note)
    for number in range(100):
        with pytest.raises(InterruptedError):
            fuzz_formats.check_format(Random(number), "cpu")
    assert {*drawn} == {*FORMATS}


def other_element(result):
    result.weight.view(torch.uint8).flatten()[0] ^= 1


def other_scale(result):
    result.scale.mul_(2)


@pytest.mark.parametrize("fault", [other_element, other_scale])
def test_faults_are_found(monkeypatch, capsys, fault):
    right = deep_tile.to_blocks

    def to_blocks(*arguments, **keywords):
        result = right(*arguments, **keywords)
        fault(result)
        return result

    monkeypatch.setattr(deep_tile, "to_blocks", to_blocks)
    monkeypatch.setattr(fuzz_formats, "SHARDS_SHARE", 0)
    assert fuzz_formats.main(RUN) == 1
    assert "FOUND wrong" in capsys.readouterr().err


def test_shards_of_other_rows_are_found(monkeypatch, capsys):
    right = fuzz_formats.shard_weight

    def shard_weight(weight, *arguments):
        return right(weight.roll(1, 0), *arguments)

    monkeypatch.setattr(fuzz_formats, "shard_weight", shard_weight)
    monkeypatch.setattr(fuzz_formats, "SHARDS_SHARE", 1)
    assert fuzz_formats.main([*RUN[:-1], "2"]) == 1
    assert "'columns'" in capsys.readouterr().err
