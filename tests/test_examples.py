"""The examples, as a user would run them."""

import re
import subprocess
import sys

import pytest
from helpers import EXAMPLES, load_example

import deep_tile
from deep_tile.integrations import transformers as integration

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def run_example(monkeypatch, capfd):
    """Runs an example on a device in this process; returns the numbers that it prints."""

    def run(name: str, device: str) -> list[float]:
        if device == "cpu":
            monkeypatch.setattr(deep_tile, "is_available", lambda: (False, "this test hides the GPU"))
        load_example(name).main()
        out = capfd.readouterr().out
        assert device in out
        return [float(number) for number in re.findall(r"\d+\.\d+", out)]

    yield run
    deep_tile.forbid_compilation(False)


@DEVICES
def test_linear(device, run_example):
    error, bf16_ms, fp8_ms = run_example("linear", device)
    assert 0 < error < 0.08 and bf16_ms > 0 and fp8_ms > 0


@DEVICES
def test_experts(device, run_example):
    errors = run_example("experts", device)
    assert len(errors) == (2 if device == "cuda" else 1) and all(0 < error < 0.1 for error in errors)


@DEVICES
def test_training(device, run_example):
    before, after, before_lora, after_lora = run_example("training", device)
    assert after < 0.8 * before and after_lora < before_lora


@pytest.fixture
def run_qwen3(monkeypatch, capfd):
    """Run the example with these arguments in this process. Returns its output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qwen3_fp8.py", *arguments])
        load_example("qwen3_fp8").main()
        return capfd.readouterr().out

    yield run
    integration.uninstall()


def run_program(*arguments):
    """Run the example as a program."""
    run = subprocess.run([sys.executable, EXAMPLES / "qwen3_fp8.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.about("examples/*", "deep_tile/integrations/*", "deep_tile/nn.py", "deep_tile/experts.py")
@DEVICES
@pytest.mark.parametrize("kind", [[], ["--experts"]], ids=["dense", "experts"])
def test_qwen3_generates(device, kind, run_qwen3):
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    if device == "cuda":
        pytest.importorskip("accelerate", reason="needs accelerate, to load FP8 models to a GPU")
    run = run_qwen3 if kind else run_program  # once as users do, which takes ten seconds
    tokens, times = run("--device", device, "--prompt", "5", "--tokens", "3", *kind).splitlines()
    assert tokens.startswith("tokens: [") and tokens.count(",") == 2
    assert times.startswith("first token ") and times.endswith(f"on {device}")
