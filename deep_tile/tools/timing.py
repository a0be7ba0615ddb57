"""How GPU work is timed: as CUDA graphs, in turns, L2 flushed before each.

Invariant: a sample's two events enclose one graph replay, or one call, and nothing else, and the GPU still flushes L2
while the host enqueues them, so no host time is measured. The host waits for each sample before it enqueues the next:
queued behind each other, samples take longer, whatever they time, and not evenly (an empty graph 3.5 to 4.3 us, not 3.0
to 3.5; H200, 2026-11-22). Meanwhile the GPU does the next flush, so that it is never idle.
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20
"""Several times the L2 cache, and about 130 us: ample time to enqueue event, graph, event."""

_BUSY_CYCLES = 400_000
"""About 200 us at 2 GHz: ample time to wait for a sample and enqueue two events and a call."""

METHOD = (
    f"Each sample: write {_FLUSH_BYTES >> 20} MiB and read another {_FLUSH_BYTES >> 20} MiB, which leaves L2 cold and "
    "clean; then event, graph replay, event; then, while the GPU does the next sample's writing and reading, the host "
    "waits for this one. Contestants alternate in an order shuffled for every round."
)
"""The method of `time_alternating` with an L2Flush, for readers."""

_HEATS = 5
"""Samples per contestant for choosing finalists."""

_FINALIST = 1.06
"""At most this many times the fastest contestant's time."""

_PAUSE_SECONDS = 0.1
"""Before the final, for the power limit to recover."""

LARGE_US = 60.0
"""Longer GEMMs are power-bound, and alternating contestants share the power budget: each is timed alone."""

_FINAL_SECONDS = 0.3
"""Seconds of replays per finalist timed alone."""


@dataclass(frozen=True)
class Timing:
    """One contestant's microseconds: median, tenth and ninetieth percentile."""

    us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1])


class L2Flush:
    """Enqueues work on the current stream that leaves nothing useful and nothing dirty in L2."""

    def __init__(self):
        self._written = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
        self._read = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    def __call__(self) -> None:
        self._written.zero_()
        torch.sum(self._read, 0, out=self._sum)


def keep_busy() -> None:
    """Busy work instead of an L2 flush, while the host enqueues."""
    torch.cuda._sleep(_BUSY_CYCLES)


@dataclass(frozen=True)
class Captured:
    """One call as a graph.

    Attributes:
        graph: knows nothing but addresses, so the two others live as long as it does.
        output: the tensor that every replay writes.
        call: keeps alive other tensors that the graph reads, such as scales in another layout.
    """

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    call: Callable[[], torch.Tensor]

    def replay(self) -> None:
        self.graph.replay()


def capture(call: Callable[[], torch.Tensor]) -> Captured:
    """Run a call once to compile and allocate, then capture the second run.

    Uses the current stream, which must not be the default one. `torch.cuda.graph` also empties the allocator's cache
    each time, which would take longer than all measurements together.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        output = call()
    finally:
        graph.capture_end()
    return Captured(graph, output, call)


def time_alternating(graphs: dict[Any, Captured], repeats: int, flush: Callable[[], None]) -> dict[Any, Timing]:
    """Time every graph `repeats` times, alternating, each after `flush`: an L2Flush for a cold L2."""
    return time_calls({name: graph.replay for name, graph in graphs.items()}, repeats, flush)


def time_calls(calls: dict[Any, Callable[[], object]], repeats: int, flush: Callable[[], None]) -> dict[Any, Timing]:
    """The same for the work that a call enqueues on the current stream while the GPU runs `flush`."""
    samples = {name: [] for name in calls}
    shuffled = random.Random(0)
    for call in calls.values():
        call()  # the first replay of a graph also uploads it
    flush()
    for _ in range(repeats):
        for name in shuffled.sample(list(calls), len(calls)):
            start, end = _between_events(calls[name])
            flush()
            samples[name].append(_elapsed_us(start, end))
    return {name: Timing.of(us) for name, us in samples.items()}


def time_to_choose(graphs: dict[Any, Captured], repeats: int, flush: L2Flush) -> dict[Any, float]:
    """Microseconds per graph, with `repeats` samples for finalists.

    Dozens that take turns keep the GPU at its power limit, and there all good tiles take equally long: at
    8192x4096x7168, 128x256 in clusters and 128x192 took 366 and 365 us among forty, 323 and 342 among four (H200,
    2026-11-21). Finalists are timed after a pause, and above LARGE_US one by one, each in its own power state; others
    keep their first time, corrected by the finalists' change.
    """
    heats = {name: timing.us for name, timing in time_alternating(graphs, min(_HEATS, repeats), flush).items()}
    fastest = min(heats.values())
    time.sleep(_PAUSE_SECONDS)
    finalists = {name: graph for name, graph in graphs.items() if heats[name] <= _FINALIST * fastest}
    if fastest > LARGE_US:
        final = {name: time_sustained(graph, heats[name], _FINAL_SECONDS) for name, graph in finalists.items()}
    else:
        final = {name: timing.us for name, timing in time_alternating(finalists, repeats, flush).items()}
    slower = statistics.median(heats[name] / us for name, us in final.items())
    return {name: final.get(name, us / slower) for name, us in heats.items()}


def time_sustained(
    graph: Captured, once_us: float, seconds: float, meter: AbstractContextManager | None = None
) -> float:
    """Microseconds per replay, back to back, so that clocks settle at the power limit; `meter` is entered meanwhile."""
    replays = max(1, round(seconds * 1e6 / once_us))
    for _ in range(replays // 3):
        graph.replay()
    with meter or nullcontext():
        return _elapsed_us(*_between_events(graph.replay, replays)) / replays


def _between_events(call: Callable[[], object], times: int = 1) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    return start, end


def _elapsed_us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Microseconds between the events; waits for the second."""
    end.synchronize()
    return start.elapsed_time(end) * 1e3
