"""Run a fuzzer, or all of them side by side on one GPU, several processes of each, and write one report.

    PYTHONPATH=. python tests/fuzz.py casts --seconds 120 --out casts.json [--seed N] [--first-round R --rounds 1]
    PYTHONPATH=. python tests/fuzz.py --seconds 420 --out all.json [--seed N] [--processes gpu=4 casts=2 stress=1]

fuzz_NAME.py says what each one draws and checks. A round depends on the seed, --configs and its number alone; with
--serial each call is awaited, and the one that fails is certain.

Side by side, each process has a seed of its own, from --seed on, and a share of the cores and of the GPU's memory;
--seconds counts compilation too, which they share through the cache of kernels. Their reports and what they print lie
in a folder named after --out. A process that crashes, or has no end, or has done nothing is a finding like any other,
and each finding of a round says what repeats it.

Ends with the worst status: 0, or 1 when something was wrong, 3 when a product did not end within 20 s, 4 when the GPU
or a process failed.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import campaign
from campaign import CLEAN, UNUSABLE, Report, begin, parser

TESTS = Path(__file__).resolve().parent

PROCESSES = {"gpu": 4, "groups": 3, "kinds": 4, "casts": 4, "formats": 2, "logits": 1, "thin": 1, "train": 1}
"""Processes of each fuzzer, for 16 cores. `stress` occupies SMs on purpose, so it runs only on request."""

COMMANDS = {name: ("fuzz.py", name) for name in PROCESSES} | {"stress": ("stress.py", "--configs", "64")}
COMMANDS["gpu"] += ("--configs", "200")
COMMANDS["kinds"] += ("--configs", "12")
"""Commands by name. Kernels are so few that 16 cores compile them within a minute or two."""

COUNTS = ("products", "calls_that_copy", "rounds", "configs")
"""Fields of a process's report that are summed up."""

GRACE_SECONDS = 60.0
"""Seconds that a process may run on: longer than it takes to notice a hang."""

_TAIL = 3000


class Process(NamedTuple):
    """One process of a fuzzer."""

    name: str
    command: tuple[str, ...]
    seed: int
    folder: Path
    running: subprocess.Popen

    @property
    def report(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def repeated(self, finding: dict[str, Any]) -> dict[str, Any]:
        """The finding with its process, its seed and, if it names a round, the command that repeats it."""
        whose = {"process": self.name, "seed": self.seed}
        if "round" in finding:
            command = " ".join(("tests/" + self.command[0], *self.command[1:]))
            whose["repeat"] = f"{command} --seed {self.seed} --first-round {finding['round']} --rounds 1"
        return whose | finding


def counts_of(texts: list[str]) -> dict[str, int]:
    """Parse "gpu=4 casts=2"."""
    counts = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in COMMANDS or not number.isdigit():
            raise ValueError(f"{text!r} is no number of processes; write casts=2, with a name of {', '.join(COMMANDS)}")
        counts[name] = int(number)
    return counts


@contextmanager
def started(arguments: argparse.Namespace, counts: dict[str, int], folder: Path) -> Iterator[list[Process]]:
    """Start all processes, and kill them at the end."""
    names = [(name, number) for name, count in counts.items() for number in range(count)]
    limits = ["--seconds", str(arguments.seconds), "--until", str(time.time() + arguments.seconds)]
    limits += ["--device", arguments.device, "--workers", str(max(1, 2 * (os.cpu_count() or 1) // len(names)))]
    limits += ["--memory-share", str(1 / (len(names) + 1))]
    limits += ["--bounded-waits"] if arguments.bounded_waits else []
    processes = []
    try:
        for at, (name, number) in enumerate(names):
            processes.append(_start(f"{name}-{number}", COMMANDS[name], arguments.seed + at, folder, limits))
        yield processes
    finally:
        for process in processes:
            process.running.kill()
            process.running.wait()


def _start(name: str, command: tuple[str, ...], seed: int, folder: Path, limits: list[str]) -> Process:
    script, *options = command
    own = ["--seed", str(seed), "--out", str(folder / f"{name}.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("wb") as log:
        whole = [sys.executable, str(TESTS / script), *options, *own, *limits]
        running = subprocess.Popen(whole, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return Process(name, command, seed, folder, running)


def wait(processes: list[Process], seconds: float) -> None:
    """Wait until all processes have ended, at most this long."""
    end, left = time.monotonic() + seconds, list(processes)
    while left and time.monotonic() < end:
        time.sleep(0.05)
        for process in [process for process in left if process.running.poll() is not None]:
            left.remove(process)
            print(f"{process.name}: ended with status {process.running.returncode}", file=sys.stderr, flush=True)


def judge(process: Process, report: Report) -> dict[str, Any]:
    """Add a process's findings and, if it failed, that failure. Returns its counts."""
    status = process.running.poll()
    if status is None or not process.report.exists():
        why = "has no end" if status is None else f"ended with status {status} and no report"
        report.find("failure", process=process.name, seed=process.seed, error=f"{why}: {_tail(process.log)}")
        return {}
    counted = json.loads(process.report.read_text())
    report.adopt(counted["found"], [process.repeated(finding) for finding in counted["findings"]])
    if counted["ok"] and status != CLEAN:
        error = f"ended with status {status} after a clean report: {_tail(process.log)}"
        report.find("failure", process=process.name, seed=process.seed, error=error)
    if not sum(counted.get(name, 0) for name in COUNTS[:2]):
        report.find("idle", process=process.name, seed=process.seed, error="has called nothing")
    return counted


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:]


def summed(counted: dict[str, dict[str, Any]], report: Report) -> dict[str, Any]:
    """Sum the counts, in total and by fuzzer."""

    def total(reports: list[dict[str, Any]]) -> dict[str, int]:
        return {name: sum(one.get(name, 0) for one in reports) for name in COUNTS}

    names = dict.fromkeys(name.rpartition("-")[0] for name in counted)
    by_fuzzer = {name: [one for whose, one in counted.items() if whose.rpartition("-")[0] == name] for name in names}
    return total([one for name, reports in by_fuzzer.items() if name != "stress" for one in reports]) | {
        "wrong": report.found.get("wrong", 0),
        "hangs": report.found.get("hang", 0),
        "fuzzers": {name: {"processes": len(reports)} | total(reports) for name, reports in by_fuzzer.items()},
    }


def run_one(name: str, arguments: list[str]) -> int:
    """Run a fuzzer in this process."""
    module = importlib.import_module(f"fuzz_{name}")
    options = parser(module.__doc__.splitlines()[0], seconds=60)
    options.add_argument("--first-round", type=int, default=0)
    options.add_argument("--rounds", type=int, default=sys.maxsize, help="at most")
    options.add_argument("--serial", action="store_true", help="await each call")
    if module.Fuzzer.CONFIGS:
        text = "kernels that are drawn, of each kind if there are several (default: %(default)s)"
        options.add_argument("--configs", type=int, default=module.Fuzzer.CONFIGS, help=text)
    chosen = options.parse_args(arguments)
    if is_unusable(chosen):
        return UNUSABLE
    report = Report(f"fuzz of {name}", chosen)
    rounds = module.Fuzzer(chosen, report)
    campaign.run_rounds(rounds, chosen, report)
    return campaign.leave(report.end(**rounds.counts()))


def run_all(arguments: list[str]) -> int:
    options = parser(__doc__.splitlines()[0], seconds=420)
    options.add_argument("--processes", nargs="+", help="how many of which, these alone, as in casts=2")
    chosen = options.parse_args(arguments)
    try:
        counts = PROCESSES if chosen.processes is None else counts_of(chosen.processes)
    except ValueError as error:
        options.error(str(error))
    if is_unusable(chosen):
        return UNUSABLE
    report = Report("all fuzzers", chosen)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if chosen.out is None else chosen.out.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        with started(chosen, counts, folder) as processes:
            wait(processes, chosen.seconds + GRACE_SECONDS)
            counted = {process.name: judge(process, report) for process in processes}
    return report.end(**summed(counted, report))


def is_unusable(arguments: argparse.Namespace) -> bool:
    """Set up the process; print why there can be no run, if so."""
    reason = begin(arguments)
    if reason:
        print(f"fuzz.py: {reason}", file=sys.stderr)
    return bool(reason)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return run_one(given[0], given[1:]) if given and given[0] in PROCESSES else run_all(given)


if __name__ == "__main__":
    sys.exit(main())
