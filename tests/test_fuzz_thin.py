"""That the fuzzer of thin products passes what is right, and finds what is wrong."""

import fuzz_thin
import pytest
import torch

import deep_tile

RUN = ["--device", "cpu", "--seed", "3", "--rounds", "8"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(fuzz_thin, "SIZES", (1, 24, 33))
    monkeypatch.setattr(fuzz_thin, "LENGTHS", (8, 65, 520))
    monkeypatch.setattr(deep_tile, "precompile_thin", lambda: 0)


def test_what_is_right_passes():
    assert fuzz_thin.main(RUN) == 0


def another_number(out: torch.Tensor) -> None:
    out.flatten()[-1] += out.abs().max().clamp_min(1)


def a_byte_behind(out: torch.Tensor) -> None:
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()


@pytest.mark.parametrize("fault", [another_number, a_byte_behind])
@pytest.mark.parametrize("call", ["thin_gemm", "prenorm_gemm"])
def test_faults_are_found(monkeypatch, capsys, call, fault):
    right = getattr(deep_tile, call)

    def wrong(a, b, *outs, **options):
        made = right(a, b, *outs, **options)
        if outs:
            fault(outs[0])
        return made

    monkeypatch.setattr(deep_tile, call, wrong)
    assert fuzz_thin.main(RUN) == 1
    assert "FOUND wrong" in capsys.readouterr().err
