"""The GPU tests and the sanitizers, with a report: what `make test-gpu` runs on a machine with a Hopper GPU.

    PYTHONPATH=. python tests/run_gpu.py [--out FILE] [--skip-sanitizers]

Runs `pytest -m gpu`, then sanitize.py under each tool of compute-sanitizer where that is installed, and writes
versions, counts and durations as JSON. Ends with a status other than 0 unless every test and every tool that ran was
clean.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
REPORT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
TOOLS = ("memcheck", "racecheck", "synccheck")
TOOL_SECONDS = 900

sys.path.append(str(ROOT))  # for benchmarks; appended, so that an installed deep_tile still comes first

from conftest import missing_hopper  # noqa: E402

from benchmarks import store  # noqa: E402
from benchmarks.timing import describe_run  # noqa: E402
from deep_tile import jit  # noqa: E402


class Tally:
    """A pytest plugin that counts outcomes; a test that fails in two phases counts once."""

    def __init__(self):
        self.passed = 0
        self.failed: set[str] = set()
        self.skipped: dict[str, str] = {}

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped[report.nodeid] = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected failure"
            )
        elif report.when == "call":
            self.passed += 1


def run_tests(tests: Path = TESTS) -> dict[str, Any]:
    tally = Tally()
    start = time.perf_counter()
    status = pytest.main([str(tests), "-m", "gpu", "-q", f"--rootdir={ROOT}"], plugins=[tally])
    return {
        "ok": status == pytest.ExitCode.OK and tally.passed > 0,
        "passed": tally.passed,
        "failed": len(tally.failed),
        "skipped": len(tally.skipped),
        "failures": sorted(tally.failed),
        "skips": tally.skipped,
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_sanitizers() -> dict[str, dict[str, Any]]:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {tool: {"ok": True, "result": "not run: compute-sanitizer is not on PATH"} for tool in TOOLS}
    return {tool: run_sanitizer(sanitizer, tool) for tool in TOOLS}


def run_sanitizer(sanitizer: str, tool: str) -> dict[str, Any]:
    command = [sanitizer, "--tool", tool, "--kernel-regex", "kns=fp8_", "--error-exitcode", "9"]
    if tool == "memcheck":  # cuda-bindings asks the driver for calls that older drivers lack; ours raise when they fail
        command += ["--report-api-errors", "no"]
    # Every tensor an allocation of its own, so that memcheck knows where it ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, sys.executable, str(TESTS / "sanitize.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TOOL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "result": f"stopped after {TOOL_SECONDS} s", "seconds": TOOL_SECONDS}
    print(done.stdout, flush=True)
    return {**judge(done.returncode, done.stdout), "seconds": round(time.perf_counter() - start, 1)}


def judge(status: int, output: str) -> dict[str, Any]:
    """From a tool's exit status and output. `errors` is None when it ended without its summary."""
    # memcheck, synccheck: "ERROR SUMMARY: 0 errors"; racecheck: "RACECHECK SUMMARY: 0 hazards displayed (...)".
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) \w+", output)
    errors = int(summary[1]) if summary else None
    ok = status == 0 and errors == 0
    result = {"ok": ok, "result": "clean" if ok else f"failed with status {status}", "errors": errors}
    return result if ok else {**result, "output_tail": output[-3000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPORT, help="where to write the report (default: %(default)s)")
    parser.add_argument("--skip-sanitizers", action="store_true", help="run the tests alone")
    arguments = parser.parse_args()
    reason = missing_hopper()
    if reason:
        print(f"run_gpu.py: {reason}", file=sys.stderr)
        return 2

    tests = run_tests()
    skipped = {tool: {"ok": True, "result": "not run: --skip-sanitizers"} for tool in TOOLS}
    sanitizers = skipped if arguments.skip_sanitizers else run_sanitizers()
    machine = {key: value for key, value in describe_run().items() if key != "method"}
    report = {**machine, "nvrtc": jit.nvrtc_version(), "tests": tests, "sanitizers": sanitizers}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    store.save(arguments.out, report)

    print(f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped in {tests['seconds']} s")
    for tool, outcome in sanitizers.items():
        print(f"{tool}: {outcome['result']}")
    print(f"report: {arguments.out}")
    return 0 if all(outcome["ok"] for outcome in (tests, *sanitizers.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
