"""Run GPU tests, fuzzers, stress and sanitizers, and write a report: `make test-gpu`, for a machine with a Hopper GPU.

    PYTHONPATH=. python tests/run_gpu.py [--out FILE] [--skip-sanitizers] [--parts tests fuzz ...]

Runs `pytest -m gpu`, a short run of all fuzzers and one of stress.py, then sanitize.py under each tool of
compute-sanitizer where that is installed, and writes versions, counts and durations as JSON. Ends with a status other
than 0 unless every part that ran was clean.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
REPORT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOL_SECONDS = 900
DRIVERS = {
    "fuzz": ("fuzz.py", "--seconds", "240"),
    "stress": ("stress.py", "--seconds", "60"),
}
DRIVER_SECONDS = 540
PARTS = ("tests", *DRIVERS, *TOOLS)

COUNTS = (
    *("seed", "products", "calls_that_copy", "calls", "configs", "wrong", "hangs"),
    *("fuzzers", "scenarios", "seconds", "found", "findings"),
)
"""Fields of a driver's report that are kept."""

sys.path.append(str(ROOT))  # for benchmarks; appended, so that an installed deep_tile still comes first

from conftest import SEED, missing_hopper  # noqa: E402

from benchmarks import store  # noqa: E402
from benchmarks.timing import describe_run  # noqa: E402
from deep_tile import jit  # noqa: E402
from deep_tile.kinds import EVERY_KIND  # noqa: E402

PREFIXES = sorted({"mqa_logits_", "sort_by_expert_", "thin_gemm_"} | {f"{kind.split('_')[0]}_" for kind in EVERY_KIND})
"""Prefixes of deep_tile's kernels: sanitizers skip all others."""


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
    counts = {"passed": tally.passed, "failed": len(tally.failed), "skipped": len(tally.skipped)}
    return {
        "ok": status == pytest.ExitCode.OK and tally.passed > 0,
        "result": ", ".join(f"{count} {name}" for name, count in counts.items()),
        **counts,
        "seed": os.environ[SEED],
        "failures": sorted(tally.failed),
        "skips": tally.skipped,
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_driver(driver: str, *arguments: str) -> dict[str, Any]:
    """Run one of DRIVERS briefly. Returns its report's counts, or how it ended without one."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(TESTS / driver), *arguments, "--out", str(report)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DRIVER_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "result": f"stopped after {DRIVER_SECONDS} s"}
        print(done.stdout, flush=True)
        if not report.exists():
            return {"ok": False, "result": f"failed with status {done.returncode}", "output_tail": done.stdout[-3000:]}
        found = json.loads(report.read_text())
    kept = {key: found[key] for key in COUNTS if key in found}
    ok = done.returncode == 0 and found["ok"]
    return {"ok": ok, "result": "clean" if ok else f"failed with status {done.returncode}", **kept}


def run_sanitizers(tools: Sequence[str] = TOOLS) -> dict[str, dict[str, Any]]:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {tool: not_run("compute-sanitizer is not on PATH") for tool in tools}
    return {tool: run_sanitizer(sanitizer, tool) for tool in tools}


def not_run(reason: str) -> dict[str, Any]:
    return {"ok": True, "result": f"not run: {reason}"}


def run_sanitizer(sanitizer: str, tool: str) -> dict[str, Any]:
    watched = [part for prefix in PREFIXES for part in ("--kernel-regex", f"kns={prefix}")]
    command = [sanitizer, "--tool", tool, *watched, "--error-exitcode", "9"]
    if tool == "memcheck":  # cuda-bindings asks the driver for calls that older drivers lack; ours raise when they fail
        command += ["--report-api-errors", "no"]
    # Every tensor an allocation of its own, so that memcheck knows where it ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, sys.executable, str(TESTS / "sanitize.py"), tool],
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
    """Judge a tool by its exit status and output. `errors` is None if it ended without its summary."""
    # memcheck, synccheck: "ERROR SUMMARY: 0 errors"; racecheck: "RACECHECK SUMMARY: 0 hazards displayed (...)".
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) \w+", output)
    errors = int(summary[1]) if summary else None
    ok = status == 0 and errors == 0
    result = {"ok": ok, "result": "clean" if ok else f"failed with status {status}", "errors": errors}
    return result if ok else {**result, "output_tail": output[-3000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPORT, help="where to write the report (default: %(default)s)")
    parser.add_argument("--skip-sanitizers", action="store_true", help="run everything else")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="run these alone (default: all)")
    arguments = parser.parse_args()
    reason = missing_hopper()
    if reason:
        print(f"run_gpu.py: {reason}", file=sys.stderr)
        return 2

    skipped = TOOLS if arguments.skip_sanitizers else ()
    outcomes = run_parts([part for part in arguments.parts if part not in skipped])
    machine = {key: value for key, value in describe_run().items() if key != "method"}
    sanitizers = {tool: outcomes.pop(tool) for tool in TOOLS}
    report = {**machine, "nvrtc": jit.nvrtc_version(), **outcomes, "sanitizers": sanitizers}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    store.save(arguments.out, report)

    for part, outcome in (*outcomes.items(), *sanitizers.items()):
        print(f"{part}: {outcome['result']}")
    print(f"report: {arguments.out}")
    return 0 if all(outcome["ok"] for outcome in (*outcomes.values(), *sanitizers.values())) else 1


def run_parts(parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The outcome of each of PARTS; "not run" for those not in `parts`."""
    outcomes = {part: not_run("not asked for") for part in PARTS}
    if "tests" in parts:
        outcomes["tests"] = run_tests()
    for name, command in DRIVERS.items():
        if name in parts:
            outcomes[name] = run_driver(*command)
    return outcomes | run_sanitizers([tool for tool in TOOLS if tool in parts])


if __name__ == "__main__":
    sys.exit(main())
