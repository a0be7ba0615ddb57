"""Shared code of the long GPU runs, fuzz_*.py and stress.py: arguments, inputs, kernels, waiting, the report.

A run ends with one of the statuses below and a report that counts what was done, whatever happened. Hung work cannot be
taken back, so a run that finds some writes its report and leaves at once.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conftest import missing_hopper
from helpers import Operands, make_any_bytes, make_operands
from strategies import Place

from deep_tile import jit, plan, watch
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.select.hardware import H200

CLEAN, WRONG, UNUSABLE, HANG, FAILED = range(5)
"""Exit statuses: nothing found; something found; no GPU or a wrong argument; work that never ends; a broken context."""

HANG_SECONDS = 20.0
"""Products take milliseconds, and wait for others for as long at most."""

BOUNDED_WAITS = "DEEP_TILE_BOUNDED_WAITS"

_MARGIN = 256
"""Bytes around each input, at least."""

NAN_BYTE = 0xFF
"""Repeated, a NaN of every floating-point format."""

_FINDINGS = 40
"""Written out of each run; all are counted."""


class Hang(Exception):
    """Work that has not ended within HANG_SECONDS; the text says which."""


# The command line.


def parser(description: str, seconds: float) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--seconds", type=float, default=seconds, help="how long to run, compilation apart (default: %(default)s)"
    )
    result.add_argument("--seed", type=int, help="repeats a run's draws (default: a fresh one)")
    result.add_argument("--out", type=Path, help="where to write the report, as JSON")
    result.add_argument(
        "--bounded-waits", action="store_true", help=f"kernels whose waits end: sets {BOUNDED_WAITS} to 1"
    )
    result.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the run itself, on the reference (default: cuda)",
    )
    result.add_argument("--until", type=float, help="Unix time at which the run ends, whatever --seconds says")
    result.add_argument("--workers", type=int, help="threads that compile (default: one for each core)")
    result.add_argument("--memory-share", type=float, help="the most of the GPU's that torch takes (default: 1)")
    return result


def begin(arguments: argparse.Namespace) -> str | None:
    """Set up the process before deep_tile reads its settings. Returns why there can be no run, or None."""
    if arguments.bounded_waits:
        os.environ[BOUNDED_WAITS] = "1"
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(2**31)
    if not on_gpu(arguments.device):
        return None
    reason = missing_hopper()
    if reason is None and arguments.memory_share is not None:
        torch.cuda.set_per_process_memory_fraction(arguments.memory_share)
    return reason


def seconds_left(arguments: argparse.Namespace) -> float:
    """Time left for a run whose kernels are ready."""
    return min(arguments.seconds, (arguments.until or float("inf")) - time.time())


def on_gpu(device: str) -> bool:
    return device == "cuda"


def sms_of(device: str) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if on_gpu(device) else H200.num_sms


# Inputs and kernels.


class OperandPool:
    """Large operands, made once. Each product takes a slice of them."""

    def __init__(self, rows: int, k: int, device: str, seed: int, *, any_bytes: bool = False):
        if any_bytes:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self._all = make_any_bytes(rows, rows, k, device=device)
            return
        with contextlib.redirect_stdout(io.StringIO()):  # the report names the seed
            self._all = make_operands(rows, rows, k, device=device, seed=seed)

    def cut(self, source: random.Random, m: int, n: int, k: int) -> Operands:
        """Views of a part. Scales need not be those that an operand was cast with."""
        groups, n_blocks = ceil_div(k, SCALE_BLOCK), ceil_div(n, SCALE_BLOCK)

        def part(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
            row, column = (source.randint(0, have - want) for have, want in zip(x.shape, (rows, columns), strict=True))
            return x[row : row + rows, column : column + columns]

        a, a_scale, b, b_scale = self._all
        return Operands(part(a, m, k), part(a_scale, m, groups), part(b, n, k), part(b_scale, n_blocks, groups))


class Room(NamedTuple):
    """The space that a tensor takes in a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place

    @property
    def extent(self) -> int:
        """Elements from the first to the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.place.strides, strict=True))


def reserve(
    rooms: Sequence[Room], device: torch.device | str, *, fill: int = NAN_BYTE, margin: int = _MARGIN
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one buffer of bytes equal to `fill`, with the tensors at their places, at least `margin` bytes apart."""
    begins, end = [], 0
    for room in rooms:
        begin = round_up(end + margin, _MARGIN) // room.dtype.itemsize + room.place.offset
        begins.append(begin)
        end = (begin + room.extent) * room.dtype.itemsize
    buffer = torch.full((round_up(end + margin, _MARGIN),), fill, dtype=torch.uint8, device=device)
    return buffer, [
        buffer.view(room.dtype).as_strided(room.shape, room.place.strides, begin)
        for room, begin in zip(rooms, begins, strict=True)
    ]


def lay_out(
    values: Sequence[torch.Tensor], places: Sequence[Place], *, fill: int = NAN_BYTE
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies at their places in one buffer of bytes that are all `fill`, by default NaN in every format: that buffer,
    and the copies."""
    rooms = [Room(tuple(x.shape), x.dtype, place) for x, place in zip(values, places, strict=True)]
    buffer, views = reserve(rooms, values[0].device, fill=fill)
    return buffer, [_written(view, x, room) for view, x, room in zip(views, values, rooms, strict=True)]


def _written(view: torch.Tensor, values: torch.Tensor, room: Room) -> torch.Tensor:
    """Along a stride of 0, all elements are the first one's; windows that overlap have the first values."""
    target = view
    if 0 not in room.place.strides and room.extent < view.numel():
        view.as_strided((room.extent,), (1,)).copy_(values.flatten()[: room.extent])
        return view
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return view


def load_kernels(configs: Iterable[GemmConfig], device: str, workers: int | None = None) -> dict[str, str]:
    """Compile and load kernels in parallel; on the CPU do nothing. The order is random, so that processes that load the
    same kernels rarely wait for each other. Returns the error by name for each kernel that failed."""
    if not on_gpu(device):
        return {}
    index, failures = torch.cuda.current_device(), {}

    def load(config: GemmConfig) -> None:
        try:
            plan.load_kernel(config, index)
        except (RuntimeError, ValueError) as error:  # NVRTC's or the driver's refusal, or no source can be made
            failures[config.name] = str(error)

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        configs = list(configs)
        list(pool.map(load, random.sample(configs, len(configs))))
    return failures


def noise(device: str) -> Callable[[], None]:
    """Element-wise kernels in a stream of their own, a few for each product; on the CPU nothing."""
    if not on_gpu(device):
        return lambda: None
    stream, x = torch.cuda.Stream(), torch.rand(1 << 22, device=device)

    def enqueue() -> None:
        with torch.cuda.stream(stream):
            for _ in range(2):
                x.mul_(1.0001).clamp_(max=1)

    return enqueue


# Waiting.


class Watch:
    """Work enqueued on one stream, oldest first, and whether it still moves. On the CPU everything has ended.

    A host that waits inside the driver holds the GIL or not, as the driver likes; so it never does: it asks.
    """

    def __init__(self, device: str, limit_s: float = HANG_SECONDS):
        self._cuda = on_gpu(device)
        self._limit_s = limit_s
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._spare: list[Any] = []
        self._moved = time.monotonic()

    def add(self, *what: Any) -> None:
        """Attribute all work on the current stream, up to here, to `what` or to what was added before."""
        if not self._cuda:
            return
        if not self._under_way:
            self._moved = time.monotonic()
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record()
        self._under_way.append((event, what))

    def drain(self, left: int = 0) -> None:
        """Wait until at most `left` are under way.

        Raises:
            Hang: the oldest does not end.
            RuntimeError: CUDA reports an error.
        """
        while len(self._under_way) > left:
            event, what = self._under_way[0]
            if event.query():
                self._under_way.popleft()
                self._spare.append(event)
                self._moved = time.monotonic()
            elif time.monotonic() - self._moved > self._limit_s:
                raise Hang(" ".join(map(str, what)))
            else:
                time.sleep(2e-5)

    def suspects(self) -> list[str]:
        """The work that is still under way."""
        return [" ".join(map(str, what)) for _, what in self._under_way]


def arm_backstop() -> None:
    """Start the timer anew: if the host itself hangs, the process ends and prints its threads' stacks."""
    faulthandler.dump_traceback_later(3 * HANG_SECONDS + 60, exit=True, file=sys.__stderr__)


def disarm_backstop() -> None:
    faulthandler.cancel_dump_traceback_later()


# Rounds.


class Ledger:
    """Checks whose results are read in batches, so that calls follow each other closely.

    Attributes:
        watch: the calls under way.
        under_way: calls that the GPU may be behind: fewer kernels than a stream holds before a launch waits.
        unsettled: checks that are read at once.
        name: the key of the draw in a finding.
        examine: details of a wrong draw, for its finding.
    """

    def __init__(
        self,
        watch: Watch,
        report: "Report",
        *,
        under_way: int,
        unsettled: int,
        name: str = "draw",
        examine: Callable[[Any], dict[str, Any]] | None = None,
    ):
        self.watch, self._report = watch, report
        self._under_way, self._most, self._name, self._examine = under_way, unsettled, name, examine
        self._pending: list[tuple[int, Any, dict[str, torch.Tensor]]] = []

    def add(self, number: int, drawn: Any, faults: dict[str, torch.Tensor]) -> None:
        """Add an enqueued call and its faults: counts by kind, on the device."""
        self.note(number, drawn, faults)
        self.watch.add(f"round {number}:", drawn)
        self.watch.drain(self._under_way)

    def note(self, number: int, drawn: Any, faults: dict[str, torch.Tensor]) -> None:
        """Add faults without waiting for their call."""
        self._pending.append((number, drawn, faults))

    def end_round(self) -> None:
        if len(self._pending) >= self._most:
            self.settle()

    def settle(self) -> None:
        """Read the faults of all pending checks."""
        self.watch.drain()
        counts = [count for _, _, faults in self._pending for count in faults.values()]
        found = iter(torch.stack(counts).tolist() if counts else ())
        pending, self._pending = self._pending, []
        for number, drawn, faults in pending:
            wrong = {kind: count for kind, count in zip(faults, found, strict=False) if count}
            if wrong:
                more = {} if self._examine is None else {"again": self._examine(drawn)}
                self._report.find("wrong", round=number, elements=wrong, **{self._name: str(drawn)}, **more)


class Fuzzer:
    """Rounds of a seed. Each draws a call from its own number, makes it, and counts what is wrong about it.

    A fuzzer says how in `load`, `check_round` and `counts`, and where a finding shall say more, in `examine`.

    Attributes:
        UNDER_WAY, UNSETTLED, DRAWN: limits and `name` of its `Ledger`.
        CONFIGS: how many kernels it draws unless --configs says so, of each kind perhaps; 0 if it has no say.
        noise: enqueues kernels in another stream.
        drawn: the round's draw, for findings.
        calls: the calls made, by what they are.
    """

    UNDER_WAY, UNSETTLED, DRAWN, CONFIGS = 2, 64, "draw", 0
    examine: Callable[[Any], dict[str, Any]] | None = None

    def __init__(self, arguments: argparse.Namespace, report: "Report"):
        self.arguments, self.report = arguments, report
        self.seed, self.device = arguments.seed, arguments.device
        self.num_sms, self.noise = sms_of(self.device), noise(self.device)
        limits = {"under_way": 0, "unsettled": 1}
        if not arguments.serial:
            limits = {"under_way": self.UNDER_WAY, "unsettled": self.UNSETTLED}
        self.ledger = Ledger(Watch(self.device), report, **limits, name=self.DRAWN, examine=self.examine)
        self.drawn: Any = ""
        self.calls: Counter[str] = Counter()

    def load(self) -> None:
        """Make what all rounds need. By default nothing: kernels are loaded at their first calls."""

    def load_kernels(
        self, configs: Iterable[GemmConfig], may_be_refused: Callable[[GemmConfig, str], bool] = lambda *_: False
    ) -> list[GemmConfig]:
        """Compile and load kernels; return those that could be. The others are findings, unless they may be refused."""
        begun, configs = time.perf_counter(), list(configs)
        failures = load_kernels(configs, self.device, self.arguments.workers)
        failed = {config: failures[config.name] for config in configs if config.name in failures}
        refused = [config.name for config, text in failed.items() if may_be_refused(config, text)]
        for config, text in failed.items():
            if config.name not in refused:
                self.report.find("not compiled", config=config.name, error=text[-600:])
        loaded = [config for config in configs if config not in failed]
        self.report.fields |= {
            "configs_refused": sorted(refused),
            "configs_loaded": len(loaded),
            "loading_seconds": round(time.perf_counter() - begun, 1),
        }
        return loaded

    def run_round(self, number: int) -> None:
        """One call; a refusal of it is a finding."""
        self.drawn = ""
        try:
            faults = self.check_round(random.Random(f"{self.seed}:{number}"), number)
        except (TypeError, ValueError) as error:
            self.report.find("refused", round=number, error=str(error), **{self.DRAWN: str(self.drawn)})
            return
        self.ledger.add(number, self.drawn, faults)
        self.ledger.end_round()

    def check_round(self, source: random.Random, number: int) -> dict[str, torch.Tensor]:
        """Set `drawn`, make the call, count it in `calls`, and return the faults by kind, on the device."""
        raise NotImplementedError

    def counts(self) -> dict[str, Any]:
        """The report's numbers of all rounds, whose calls are made twice."""
        return {"calls_that_copy": 2 * self.calls.total(), "calls": dict(sorted(self.calls.items()))}


def run_rounds(rounds: Fuzzer, arguments: argparse.Namespace, report: "Report") -> None:
    """Run rounds on a stream of their own until their time or number is reached."""
    rounds.load()
    if on_gpu(arguments.device):
        torch.cuda.synchronize()
    end, number = time.monotonic() + seconds_left(arguments), arguments.first_round
    try:
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu(arguments.device) else contextlib.nullcontext():
            while number < arguments.first_round + arguments.rounds and time.monotonic() < end:
                arm_backstop()
                rounds.run_round(number)
                number += 1
            rounds.ledger.settle()
    except Hang as hang:
        report.find("hang", round=number, draw=str(hang), seconds=HANG_SECONDS)
    except RuntimeError as error:  # the context is lost, and with it what was not read yet
        report.find("failure", round=number, error=str(error), suspects=rounds.ledger.watch.suspects())
    finally:
        disarm_backstop()
    report.fields |= {"first_round": arguments.first_round, "rounds": number - arguments.first_round}


# The report.


class Report:
    """Counts and findings of a run; written when it ends, in whichever way."""

    def __init__(self, what: str, arguments: argparse.Namespace):
        self._path = arguments.out
        self._begun = time.perf_counter()
        self.fields: dict[str, Any] = {
            "run": what,
            **(_machine() if on_gpu(arguments.device) else {}),
            "device": arguments.device,
            "nvrtc": jit.nvrtc_version(),
            "bounded_waits": arguments.bounded_waits,
            "seed": arguments.seed,
        }
        self.found: dict[str, int] = {}
        self.findings: list[dict[str, Any]] = []

    def find(self, kind: str, **details: Any) -> None:
        """Count a finding; keep and print the first ones. For a hang, add the report of the bounded waits."""
        if self.fields["bounded_waits"] and kind in ("hang", "failure"):
            details["waits"] = watch.report()
        self.found[kind] = self.found.get(kind, 0) + 1
        if len(self.findings) < _FINDINGS:
            self.findings.append({"kind": kind, **details})
            print(f"FOUND {kind}: {details}", file=sys.stderr, flush=True)

    def adopt(self, found: dict[str, int], findings: list[dict[str, Any]]) -> None:
        """Add the findings of another run."""
        self.findings += findings
        for kind, count in found.items():
            self.found[kind] = self.found.get(kind, 0) + count

    def end(self, **counts: Any) -> int:
        """Write the report; the exit status that it calls for."""
        status = self._status()
        report = {
            **self.fields,
            **counts,
            "seconds": round(time.perf_counter() - self._begun, 1),
            "ok": status == CLEAN,
            "found": self.found,
            "findings": self.findings,
        }
        text = json.dumps(report, indent=1)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(text + "\n")
        print(text, flush=True)
        return status

    def _status(self) -> int:
        if not self.found:
            return CLEAN
        return HANG if "hang" in self.found else FAILED if "failure" in self.found else WRONG


def leave(status: int) -> int:
    """Return the status. Where the GPU still runs work that never ends, end the process instead."""
    if status in (HANG, FAILED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _machine() -> dict[str, Any]:
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # for benchmarks; an installed deep_tile comes first
    from benchmarks.timing import describe_run

    return {key: value for key, value in describe_run().items() if key != "method"}
