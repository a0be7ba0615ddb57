"""How GPU work is timed: as CUDA graphs, in turns, L2 flushed before each.

Used by tune.py and by the benchmark scripts. Invariant: between the two events of a sample lies one graph replay and
nothing else, and the GPU is still busy flushing L2 while the host enqueues them, so no host time is measured.
"""

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20
"""Several times the L2 cache, and some 130 us of work: ample time to enqueue an event, a graph and an event."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one contestant: median, tenth and ninetieth percentile."""

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


@dataclass(frozen=True)
class Captured:
    """One call as a graph.

    Attributes:
        graph: knows nothing but addresses, so the two others live as long as it does.
        output: the tensor that every replay writes.
        call: owner of whatever else the graph reads, such as scales in a layout of its own.
    """

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    call: Callable[[], torch.Tensor]

    def replay(self) -> None:
        self.graph.replay()


def capture(call: Callable[[], torch.Tensor]) -> Captured:
    """Run a call once, so that it compiles and allocates what it needs, and capture the second time.

    On the current stream, which must not be the default one.
    `torch.cuda.graph` does the same but empties the allocator's cache each time, which would take longer than all
    measurements together.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        output = call()
    finally:
        graph.capture_end()
    return Captured(graph, output, call)


def capture_empty() -> Captured:
    """The least a graph can do: fill one element. Its time is part of every figure."""
    return capture(lambda: torch.ones(1, device="cuda"))


def time_alternating(graphs: dict[str, Captured], repeats: int, flush: L2Flush) -> dict[str, Timing]:
    """Time every graph `repeats` times, taking turns, each with a cold L2."""
    events = {name: [] for name in graphs}
    shuffled = random.Random(0)
    for graph in graphs.values():
        graph.replay()  # The first replay also uploads the graph.
    for _ in range(repeats):
        for name in shuffled.sample(list(graphs), len(graphs)):
            flush()
            events[name].append(_replay_between_events([graphs[name]]))
    torch.cuda.synchronize()
    return {name: Timing.of([start.elapsed_time(end) * 1e3 for start, end in pairs]) for name, pairs in events.items()}


def time_sustained(graph: Captured, once_us: float, seconds: float = 1.0) -> float:
    """Microseconds per replay when replays run back to back, so that clocks settle where the power limit puts them."""
    replays = max(1, round(seconds * 1e6 / once_us))
    for _ in range(replays // 3):
        graph.replay()
    start, end = _replay_between_events([graph] * replays)
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def _replay_between_events(graphs: Iterable[Captured]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for graph in graphs:
        graph.replay()
    end.record()
    return start, end
