"""The GPU report, on made-up tests and outputs: that nothing which went wrong is reported as well."""

import json
import os
import subprocess
import sys

import pytest
import run_gpu
import sanitize

from deep_tile import cast
from deep_tile.select.groups import all_grouped_configs

OUTCOMES = """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert False
def test_absent(): pytest.skip("no second GPU")
@pytest.fixture
def broken(): raise OSError
def test_without_fixture(broken): pass
@pytest.fixture
def untidy():
    yield
    raise OSError
def test_wrong_twice(untidy): assert False
"""


MADE_UP = {
    "outcomes": OUTCOMES,
    "right": "import pytest\n@pytest.mark.gpu\ndef test_right(): pass",
    "nothing_ran": "def test_of_no_gpu(): pass",
    "cannot_be_collected": "import nothing_of_that_name",
}
"""Files of tests by name; each is alone in a folder."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict]:
    """The outcome of run_tests for each folder, in its own process."""
    folder = tmp_path_factory.mktemp("made_up")
    for name, text in MADE_UP.items():
        (folder / name).mkdir()
        (folder / name / f"test_{name}.py").write_text(text)
    program = (
        "import json, pathlib, run_gpu\n"
        f"print(json.dumps({{name: run_gpu.run_tests(pathlib.Path(name)) for name in {list(MADE_UP)}}}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_outcomes_are_counted(outcomes):
    outcome = outcomes["outcomes"]
    assert (outcome["ok"], outcome["passed"], outcome["failed"], outcome["skipped"]) == (False, 1, 3, 1)
    assert outcome["seed"].isdigit()
    assert [name.split("::")[1] for name in outcome["failures"]] == [
        "test_without_fixture",
        "test_wrong",
        "test_wrong_twice",
    ]
    assert list(outcome["skips"].values()) == ["Skipped: no second GPU"]


@pytest.mark.parametrize(
    ("name", "ok", "failed"), [("right", True, 0), ("nothing_ran", False, 0), ("cannot_be_collected", False, 1)]
)
def test_ok_means_that_tests_ran_and_passed(name, ok, failed, outcomes):
    assert (outcomes[name]["ok"], outcomes[name]["failed"]) == (ok, failed)


@pytest.mark.parametrize(
    ("status", "output", "ok", "errors"),
    [
        (0, "========= ERROR SUMMARY: 0 errors\n", True, 0),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True, 0),
        (9, "========= ERROR SUMMARY: 12 errors\n", False, 12),
        (0, "========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n", False, 3),
        (1, "WRONG: 1 of 4 elements\n========= ERROR SUMMARY: 0 errors\n", False, 0),
        (0, "nothing known\n", False, None),
    ],
)
def test_sanitizer_output_is_judged(status, output, ok, errors):
    outcome = run_gpu.judge(status, output)
    assert (outcome["ok"], outcome["errors"]) == (ok, errors)
    assert (outcome["result"] == "clean") == ok


def test_sanitizers_watch_every_kernel():
    cases = sanitize.CASES + sanitize.KINDS_CASES + sanitize.QUANTIZED_CASES
    names = [case.config.name for case in cases] + [config.name for config in all_grouped_configs()]
    names += [kernel.name for kernel in cast.all_kernels()]
    assert not [name for name in names if not name.startswith(tuple(run_gpu.PREFIXES))]


def test_a_missing_sanitizer_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    outcomes = run_gpu.run_sanitizers()
    assert set(outcomes) == {"memcheck", "racecheck", "synccheck", "initcheck"}
    assert all(outcome["result"] == "not run: compute-sanitizer is not on PATH" for outcome in outcomes.values())


def test_a_sanitizer_is_run_and_its_findings_fail(tmp_path, monkeypatch):
    """A stand-in reports an error under racecheck alone."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3\n'
        'case "$*" in *racecheck*sanitize.py*) echo "RACECHECK SUMMARY: 1 hazards displayed"; exit 9;; esac\n'
        'echo "ERROR SUMMARY: 0 errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    outcomes = run_gpu.run_sanitizers()
    assert {name: outcome["ok"] for name, outcome in outcomes.items()} == {
        "memcheck": True,
        "racecheck": False,
        "synccheck": True,
        "initcheck": True,
    }


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A stand-in for fuzz.py or stress.py, of this text, where the drivers are."""
    monkeypatch.setattr(run_gpu, "TESTS", tmp_path)

    def write(text: str) -> None:
        prologue = "import json, sys, pathlib; out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1]);"
        (tmp_path / "driver.py").write_text(prologue + text)

    return write


def test_counts_of_a_driver_are_kept(driver):
    driver("""out.write_text(json.dumps(
        {"ok": True, "products": 7, "configs": 2, "wrong": 0, "seed": 5, "gpu": "H200", "argv": sys.argv[1:3]}))""")
    outcome = run_gpu.run_driver("driver.py", "--seconds", "1")
    assert outcome == {"ok": True, "result": "clean", "products": 7, "configs": 2, "wrong": 0, "seed": 5}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("out.write_text(json.dumps({'ok': False, 'wrong': 1})); sys.exit(1)", "failed with status 1"),
        ("out.write_text(json.dumps({'ok': True, 'wrong': 0})); sys.exit(3)", "failed with status 3"),
        ("print('no report'); sys.exit(0)", "failed with status 0"),
        ("import time; time.sleep(60)", "stopped after 3 s"),
    ],
    ids=["wrong", "clean report, bad status", "no report", "too long"],
)
def test_what_a_driver_finds_fails(text, result, driver, monkeypatch):
    monkeypatch.setattr(run_gpu, "DRIVER_SECONDS", 3)
    driver(text)
    outcome = run_gpu.run_driver("driver.py")
    assert (outcome["ok"], outcome["result"]) == (False, result)


def test_parts_run_alone(monkeypatch):
    monkeypatch.setenv("PATH", "")
    ran = []
    monkeypatch.setattr(run_gpu, "run_driver", lambda *command: ran.append(command) or {"ok": True, "result": "clean"})
    monkeypatch.setattr(run_gpu, "run_tests", lambda: pytest.fail("not asked for"))
    outcomes = run_gpu.run_parts(["stress", "racecheck"])
    assert ran == [run_gpu.DRIVERS["stress"]] and outcomes["stress"]["result"] == "clean"
    assert set(outcomes) == set(run_gpu.PARTS)
    assert outcomes["racecheck"]["result"] == "not run: compute-sanitizer is not on PATH"
    assert outcomes["fuzz"]["result"] == outcomes["memcheck"]["result"] == "not run: not asked for"
