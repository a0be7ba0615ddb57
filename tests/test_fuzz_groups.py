"""That the fuzzer of grouped products draws what there is, and finds what is wrong; on the CPU's reference."""

from random import Random

import fuzz_groups
import pytest
import torch

pytestmark = pytest.mark.about(
    "tests/*fuzz*.py",
    "tests/stress.py",
    "tests/jobs.py",
    "tests/campaign.py",
    "tests/strategies.py",
    "tests/expected*.py",
    "tests/helpers.py",
)

SEED = ["--device", "cpu", "--seed", "11"]


def draws(count):
    return [fuzz_groups.draw(Random(f"7:{number}"), number, 132) for number in range(count)]


def test_draws_are_of_every_kind():
    drawn = draws(3000)
    assert {draw.config for draw in drawn} == {None, *fuzz_groups.CONFIGS}
    assert {(draw.kind, draw.operands) for draw in drawn} == {*fuzz_groups.DRAWN_KINDS}
    assert {draw.groups for draw in drawn} == set(fuzz_groups.GROUPS)
    assert any(draw.bounds is None for draw in drawn)
    assert any(draw.bounds and min(draw.bounds) < 0 for draw in drawn)
    assert any(draw.bounds and list(draw.bounds) != sorted(draw.bounds) for draw in drawn)
    assert {draw.alignment for draw in drawn} >= {1, 16, 128}
    rows = [last - first for draw in drawn for _, first, last in fuzz_groups.living_rows(draw)]
    assert {1, 64, 65, 128, 129} <= set(rows) and max(rows) > 500


def test_a_right_product_passes():
    assert fuzz_groups.main([*SEED, "--rounds", "2"]) == 0


def wrong_value(out, ranges):
    out[ranges[0][1], 0] = float("inf")


def stray_row(out, ranges):
    out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 0


@pytest.mark.parametrize("fault", [wrong_value, stray_row])
def test_faults_are_found(monkeypatch, fault, capsys):
    right = fuzz_groups.multiply

    def multiply(product, drawn, out):
        right(product, drawn, out)
        ranges = fuzz_groups.living_rows(drawn)
        if ranges:
            fault(out, ranges)

    monkeypatch.setattr(fuzz_groups, "multiply", multiply)
    assert fuzz_groups.main([*SEED, "--rounds", "2"]) == 1
    assert "FOUND wrong" in capsys.readouterr().err


def test_a_result_that_changes_is_found(monkeypatch, capsys):
    right = fuzz_groups.multiply

    def multiply(product, drawn, out):
        right(product, drawn, out)
        if ranges := fuzz_groups.living_rows(drawn):
            out[ranges[0][1], 0] = torch.rand(())

    monkeypatch.setattr(fuzz_groups, "multiply", multiply)
    fuzz_groups.main([*SEED, "--rounds", "3"])
    assert "repeated" in capsys.readouterr().err
