"""How GPU work is timed, and what is written beside the numbers.

Used by the benchmark scripts. Invariant: between the two events of a sample lies one graph replay and nothing else, and
the GPU is still busy flushing L2 while the host enqueues them, so no host time is measured.
"""

import datetime
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

import deep_tile

METHOD = (
    "One CUDA graph per contestant and shape. Each sample: write 256 MB and read another 256 MB, which leaves L2 "
    "cold and clean; then event, graph replay, event. Contestants alternate in an order shuffled for every round. "
    "us is the median, p10_us and p90_us the spread. empty_graph_us, the same with a one-element fill, is included in "
    "every figure. sustained_us: back-to-back replays for about a second, L2 not flushed, after a third of a second "
    "of the same. Inputs are random normal; tensor- and row-scaled contestants multiply the same FP8 values with "
    "unit scales. Errors are of the timed output, against float64."
)

_FLUSH_BYTES = 256 << 20
"""Several times the L2 cache, and some 130 us of work: ample time to enqueue an event, a graph and an event."""

_SMI_FIELDS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


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


def describe_run() -> dict[str, Any]:
    """What a reader needs to judge the numbers. Called after the work, so that the clocks are those of a busy GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
    smi = _output_of("nvidia-smi", f"--id={gpu}", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader")
    values = [value.strip() for value in smi.split(",")]
    fields = _SMI_FIELDS.split(",")
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _output_of("git", "rev-parse", "HEAD") or os.environ.get("DEEP_TILE_COMMIT", "unknown"),
        "deep_tile": getattr(deep_tile, "__version__", "unknown"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nvidia_smi_after_run": dict(zip(fields, values, strict=True)) if len(values) == len(fields) else smi,
        "method": METHOD,
    }


def _output_of(*command: str) -> str:
    """What a command prints, or nothing when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
