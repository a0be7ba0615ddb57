"""Products beside other work on the same SMs: each must have the bits that it has on a quiet GPU.

    PYTHONPATH=. python tests/stress.py --seconds 300 --out stress.json [--seed N]
    PYTHONPATH=. python tests/stress.py --split-only --calls 50000 --out split.json [--only k2]

Each product is made ready first: multiplied with nothing else on the GPU and held against the exact product. Then
several host threads repeat theirs, each on a stream of its own, one call at a time or as CUDA graphs, with programmatic
launches or without, while other threads keep the GPU busy with element-wise kernels, copies and kernels that spin. The
GPU compares the bits and counts the calls that differ; the counts are read when a scenario ends.

First come the cases in which split K was once wrong beside element-wise kernels, then scenarios of chance: kernels of
every family, few SMs or all. With --split-only, those cases and every default config that splits K are called as often
as --calls says, each.

Ends with status 0, or 1 when bits differed, 3 when a product did not end within 20 s, 4 when the GPU failed.
"""

import argparse
import contextlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from random import Random
from typing import Any, NamedTuple

import torch
from campaign import (
    HANG_SECONDS,
    UNUSABLE,
    Hang,
    OperandPool,
    Report,
    Watch,
    arm_backstop,
    begin,
    disarm_backstop,
    leave,
    load_kernels,
    on_gpu,
    parser,
    sms_of,
)
from expected import Expected
from helpers import SCALE_STRIDES, exact_product, rearranged
from strategies import config_named, draw_configs, family

from deep_tile import GemmConfig, fp8_gemm, jit
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.select.defaults import default_configs

REPEATS = 8
"""Calls of a product behind each other, compared together."""

_UNDER_WAY = 4
"""Times that many: fewer kernels than a stream holds before a launch waits."""

ELEMENTWISE_LOG2 = 25
"""Elements of the largest element-wise kernel, as a power of two."""

MEMORY_BYTES = 256 << 20
"""Of the largest copy."""

_CASE_SECONDS = 12.0
_SCENARIO_SECONDS = 2.0


class Spec(NamedTuple):
    """A product to repeat.

    Attributes:
        chain: each call needs the one before: its result, read as FP32, is the next one's scale of `a`.
    """

    config: GemmConfig
    m: int
    n: int
    k: int
    num_sms: int
    pdl: bool = False
    constant_weights: bool = False
    chain: bool = False

    def __str__(self) -> str:
        ways = [way for way in ("pdl", "constant_weights", "chain") if getattr(self, way)]
        return " ".join([f"{self.config.name} {self.m}x{self.n}x{self.k} on {self.num_sms} SMs", *ways])


CASES = {
    "split of 2, 256 of k": [
        Spec(config_named("64x64x256_s6_k2_b1"), 512, 2048, 1024, num_sms) for num_sms in (8, 16, 40)
    ],
    "split of 2, one K block": [Spec(config_named("64x128x128_s8_k2_b1"), 512, 3328, 128, 40)],
    "split of 4, 256 of k": [Spec(config_named("64x64x256_s6_k4"), 512, 2048, 768, 22)],
}
"""What was wrong in 13 of 80, 18 of 40 and 14 of 40 calls beside element-wise kernels, while a block that had received
partial sums gave their slots back before it had read them (H200)."""


# Which products.


class Sizes(NamedTuple):
    """Most rows or columns, k and elements of `out` of a product drawn."""

    side: int = 4096
    k: int = 4096
    out: int = 1 << 21


def draw_spec(random: Random, config: GemmConfig, num_sms: int, sizes: Sizes) -> Spec:
    """With one to a dozen tiles for each cluster, on few SMs or all of `num_sms`."""
    few = config.cluster * random.randint(1, 6)
    sms = min(num_sms, random.choice((few, few, random.randint(config.cluster, max(num_sms, config.cluster)), num_sms)))
    tiles = max(1, sms // config.cluster) * random.randint(1, 12)
    rows = random.randint(1, min(8, sizes.side // config.block_m))
    m = rows * config.block_m - random.choice((0, 0, random.randrange(config.block_m)))
    n = ceil_div(tiles, rows) * config.block_n - random.choice((0, 0, random.randrange(config.block_n)))
    n = max(1, min(n, sizes.side - 8, sizes.out // m))
    n = round_up(n, 8) if config.tma_store else n
    k = _draw_k(random, config, sizes.k)
    pdl = random.random() < 0.5
    may_chain = pdl and n % 2 == 0 and ceil_div(k, SCALE_BLOCK) <= n // 2
    return Spec(config, m, n, k, sms, pdl, pdl and random.random() < 0.5, chain=may_chain and random.random() < 0.5)


def _draw_k(random: Random, config: GemmConfig, largest: int) -> int:
    """Mostly short, so that tiles follow each other closely."""
    smallest, most = config.k_range
    k = random.choice((SCALE_BLOCK * random.randint(1, 8), 16 * random.randint(1, 100), random.randint(1, largest)))
    k = max(smallest, min(k, most or largest, largest))
    return next(near for near in (k, k + SCALE_BLOCK, k - SCALE_BLOCK) if config.takes_k(near) and near <= largest)


def split_specs(random: Random, config: GemmConfig, num_sms: int) -> list[Spec]:
    """Several tiles for each cluster of few SMs, and a k of a stage or two for each part, or one part without any: what
    uses the exchange of partial sums most."""
    specs = []
    for clusters, stages, pdl in ((2, 1, False), (4, 2, False), (9, 1, True)):
        sms = min(num_sms, clusters * config.cluster)
        rows = 8 * 64 // config.block_m
        n = config.block_n * ceil_div(random.randint(6, 10) * clusters, rows) - (0 if config.tma_store else 3)
        k = config.block_k * (config.split_k * stages - random.randint(0, 1))
        specs.append(Spec(config, rows * config.block_m, n, k, sms, pdl))
    return specs


def stress_configs(random: Random, count: int, num_sms: int) -> list[GemmConfig]:
    """Default configs and random ones, `count` in all if that is more: one of each family first."""
    configs = [config for config in draw_configs(random, count) if config.cluster <= num_sms]
    first = {family(config): config for config in configs}
    return list(dict.fromkeys((*first.values(), *configs)))


# A product made ready.


class Job:
    """A product's inputs, its results on a quiet GPU, and how many calls had others.

    Attributes:
        calls: how many were compared.
    """

    def __init__(self, spec: Spec, pool: OperandPool, random: Random, device: str):
        self.spec, self.calls = spec, 0
        self._device = device
        layouts = {name: random.choice(list(SCALE_STRIDES)) for name in ("a_scale", "b_scale")}
        self._operands = rearranged(pool.cut(random, spec.m, spec.n, spec.k), **layouts)
        self._outs = torch.empty(REPEATS, spec.m, spec.n, dtype=torch.bfloat16, device=device)
        self._expected: torch.Tensor | None = None
        self._differing = torch.zeros((), dtype=torch.int64, device=device)
        self._graph: Any = None

    def prepare(self, *, graph: bool) -> None:
        """Multiply with nothing else on the GPU, check that, and capture the calls if they are to be a graph.

        Raises:
            AssertionError: a result is wrong, or they differ.
            Hang: a product does not end.
        """
        if self.spec.chain:
            self._normalize()
        self._enqueue()
        self._await()
        for step, out in enumerate(self._outs if self.spec.chain else self._outs[:1]):
            exact = exact_product(self._operands._replace(a_scale=self._scale(step)))
            wrong = Expected.of(exact).wrong(out).sum().item()
            assert wrong == 0, f"{wrong} of {out.numel()} elements are off in call {step}"
        bits = self._outs.view(torch.int16)
        self._expected = (bits if self.spec.chain else bits[0]).clone()
        self._enqueue()
        self._await()
        assert self.differing() == 0, f"{self.differing()} of {REPEATS} results differ from those of the first time"
        if graph and on_gpu(self._device):
            self._capture()

    def _await(self) -> None:
        watch = Watch(self._device)
        watch.add(self.spec)
        watch.drain()

    def differing(self) -> int:
        """How many calls had other bits. Waits for what has been enqueued on the current stream."""
        return int(self._differing.item())

    def repeat(self) -> None:
        """REPEATS calls on the current stream, then their comparison."""
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.replay()
        self.calls += REPEATS

    def _enqueue(self) -> None:
        self._outs.fill_(float("nan"))
        options = {"config": self.spec.config, "num_sms": self.spec.num_sms}
        options |= {"pdl": self.spec.pdl, "constant_weights": self.spec.constant_weights}
        for step, out in enumerate(self._outs):
            fp8_gemm(*self._operands._replace(a_scale=self._scale(step)), out, **options)
        if self._expected is not None:
            self._differing += (self._outs.view(torch.int16) != self._expected).flatten(1).any(1).sum()

    def _scale(self, step: int) -> torch.Tensor:
        """Of `a`, for one call. The upper half of an FP32 number is a BF16 number, so a pair of results reads as a
        number like its second."""
        scale = self._operands.a_scale
        if step == 0 or not self.spec.chain:
            return scale
        return self._outs[step - 1].view(torch.float32)[:, : scale.shape[1]]

    def _normalize(self) -> None:
        """Sizes neither grow nor shrink along the chain."""
        ones = self._operands._replace(a_scale=torch.ones_like(self._operands.a_scale))
        growth = fp8_gemm(*ones, config=self.spec.config).float().square().mean().sqrt()
        self._operands.b_scale.div_(growth)

    def _capture(self) -> None:
        """As deep_tile.timing.capture does, for the same reason; by one thread's rules, since others may be at work."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._enqueue()
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue()
            finally:
                self._graph.capture_end()
        stream.synchronize()


# Noise: what else the GPU does. Each burst is enqueued on the current stream, by a thread of its own.


class Elementwise:
    """Torch's element-wise kernels, of a thousand to thirty million elements; one by one, or a graph of many."""

    name = "elementwise"

    def __init__(self, device: str):
        self._largest = ELEMENTWISE_LOG2 if on_gpu(device) else 10
        self._x, self._y = (torch.rand(1 << self._largest, device=device) for _ in range(2))
        self._graphs = [self._capture(Random(seed)) for seed in range(4)] if on_gpu(device) else []

    def burst(self, random: Random) -> None:
        if self._graphs and random.random() < 0.5:
            random.choice(self._graphs).replay()
        else:
            self._kernels(random, 8)

    def _kernels(self, random: Random, count: int) -> None:
        for _ in range(count):
            size = int(2 ** random.uniform(10, self._largest))
            x, y = self._x[:size], self._y[:size]
            random.choice(
                (partial(x.mul_, 1.0), partial(x.copy_, y), partial(y.sin_), partial(torch.add, x, y, out=y))
            )()

    def _capture(self, random: Random) -> Any:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._kernels(random, 24)  # what is loaded is not loaded during capture
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._kernels(random, 24)
            finally:
                graph.capture_end()
        return graph


class Memory:
    """Copies and fills of up to 256 MB, which take the bandwidth and empty L2."""

    name = "memory"

    def __init__(self, device: str):
        size = MEMORY_BYTES if on_gpu(device) else 1 << 10
        self._from, self._to = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def burst(self, random: Random) -> None:
        size = len(self._to) >> random.randint(0, 6)
        self._to[:size].copy_(self._from[-size:])
        self._from[-size:].fill_(random.randrange(256))


_SPIN = """\
extern "C" __global__ void stress_spin(long long clocks, unsigned int* sink) {
    const long long begun = clock64();
    unsigned int x = threadIdx.x;
    while (clock64() - begun < clocks) x = x * 1664525u + 1013904223u;
    if (x == 1u) *sink = x;
}
"""


class Spin:
    """Kernels that hold some SMs for up to 100 us: by a warp beside a product's block, or by the shared memory that one
    needs."""

    name = "spin"

    def __init__(self, device: str):
        cubin = jit.compile_kernel(_SPIN, "stress_spin").cubin
        with jit.import_lock:
            from cuda.core import Device, ObjectCode
        Device(torch.cuda.current_device()).set_current()
        self._kernel = ObjectCode.from_cubin(cubin, name="stress_spin").get_kernel("stress_spin")
        self._sink = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_sms = sms_of(device)

    def burst(self, random: Random) -> None:
        from cuda.core import Device, LaunchConfig, Stream, launch

        Device(torch.cuda.current_device()).set_current()
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        for _ in range(4):
            config = LaunchConfig(
                grid=random.randint(1, 2 * self._num_sms),
                block=random.choice((32, 128, 512)),
                shmem_size=random.choice((0, 0, 16 << 10, 48 << 10)),
            )
            clocks = int(2 ** random.uniform(10, 17.5))
            launch(stream, config, self._kernel, clocks, self._sink.data_ptr())


NOISES: tuple[Callable[[str], Any], ...] = (Elementwise, Memory, Spin)


def make_noises(device: str) -> dict[str, Any]:
    """One of each, by name; on the CPU those that need no kernel of their own."""
    kinds = NOISES if on_gpu(device) else NOISES[:2]
    return {kind.name: kind(device) for kind in kinds}


# Scenarios.


class Scenario(NamedTuple):
    """Jobs that run side by side, with noise, for some time or some calls each."""

    name: str
    jobs: Sequence[Job]
    noises: Sequence[Any]
    seconds: float
    calls: int = sys.maxsize


class Threads:
    """The threads of a scenario; the first exception of any stops all."""

    def __init__(self, device: str):
        self._device = device
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, scenario: Scenario, random: Random) -> None:
        """Raises what the first thread that failed has raised; the others may then still be at work."""
        end = time.monotonic() + scenario.seconds
        noises = [
            self._start(self._make_noise, noise, Random(random.random()), priority=random.choice((0, -1)))
            for noise in scenario.noises
        ]
        workers = [self._start(self._work, job, end, scenario.calls) for job in scenario.jobs]
        self._join(workers)
        self._stop.set()
        self._join(noises)

    def _start(self, function: Callable[..., None], *arguments: Any, priority: int = 0) -> threading.Thread:
        """On a stream of its own; those of priority -1 go first."""
        thread = threading.Thread(target=self._guarded, args=(priority, function, *arguments), daemon=True)
        thread.start()
        return thread

    def _guarded(self, priority: int, function: Callable[..., None], *arguments: Any) -> None:
        try:
            with self._own_stream(priority):
                function(*arguments)
        except BaseException as error:  # of whatever kind, it is the main thread's to report
            self._errors.append(error)

    def _own_stream(self, priority: int) -> contextlib.AbstractContextManager:
        if not on_gpu(self._device):
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(priority=priority))

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            while thread.is_alive() and not self._errors:
                arm_backstop()
                thread.join(0.5)
        if self._errors:
            self._stop.set()
            raise self._errors[0]

    def _work(self, job: Job, end: float, calls: int) -> None:
        watch, done = Watch(self._device), job.calls
        while time.monotonic() < end and job.calls - done < calls and not self._stop.is_set():
            job.repeat()
            watch.add(job.spec)
            watch.drain(_UNDER_WAY)
        watch.drain()

    def _make_noise(self, noise: Any, random: Random) -> None:
        watch = Watch(self._device, 2 * HANG_SECONDS)  # a product that hangs may hold it up, and is to be named first
        while not self._stop.is_set():
            noise.burst(random)
            watch.add(f"{noise.name} noise")
            watch.drain(3)
            time.sleep(random.choice((0, 0, 1e-4, 1e-3)))
        watch.drain()


# The run.


class Stress:
    """What a run has counted so far."""

    def __init__(self, arguments: argparse.Namespace, report: Report):
        self._device, self.find = arguments.device, report.find
        self.random = Random(arguments.seed)
        self.num_sms = sms_of(self._device)
        self._sizes = arguments.sizes
        self._pool = OperandPool(self._sizes.side, self._sizes.k, self._device, arguments.seed % 2**31)
        self.noises = make_noises(self._device)
        self.calls: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.configs: set[str] = set()
        self.families: Counter[str] = Counter()

    def load(self, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
        """Those that can be loaded; the others are findings."""
        failures = load_kernels(configs, self._device)
        for name, text in failures.items():
            self.find("not compiled", config=name, error=text[-600:])
        return [config for config in configs if config.name not in failures]

    def job(self, spec: Spec, *, graph: bool) -> Job | None:
        """A product made ready, or None, and a finding, if it is wrong without any noise."""
        arm_backstop()
        job = Job(spec, self._pool, self.random, self._device)
        try:
            job.prepare(graph=graph)
        except AssertionError as error:
            self.find("wrong when quiet", product=str(spec), error=str(error))
        except (TypeError, ValueError) as error:
            self.find("refused", product=str(spec), error=str(error))
        else:
            return job
        return None

    def specs(self, configs: Sequence[GemmConfig]) -> Iterator[Spec]:
        """Without end, of all configs in turn."""
        for config in cycle(configs):
            yield draw_spec(self.random, config, self.num_sms, self._sizes)

    def run(self, scenario: Scenario) -> None:
        """Run a scenario and count what it did."""
        arm_backstop()
        before = [(job.calls, job.differing()) for job in scenario.jobs]
        if on_gpu(self._device):
            torch.cuda.synchronize()
        Threads(self._device).run(scenario, self.random)
        for job, (calls, differing) in zip(scenario.jobs, before, strict=True):
            calls, differing = job.calls - calls, job.differing() - differing
            self.calls[scenario.name] += calls
            self.configs.add(job.spec.config.name)
            self.families[family(job.spec.config)] += calls
            if differing:
                self.differing[scenario.name] += differing
                noises = [noise.name for noise in scenario.noises]
                self.find(
                    "wrong", scenario=scenario.name, product=str(job.spec), calls=calls, wrong=differing, beside=noises
                )


def run_cases(stress: Stress, seconds: float, calls: int = sys.maxsize) -> None:
    """CASES beside element-wise kernels, for some seconds, or calls, each."""
    configs = {spec.config for specs in CASES.values() for spec in specs}
    loaded = stress.load(sorted(configs, key=lambda config: config.name))
    for name, specs in CASES.items():
        jobs = [stress.job(spec, graph=False) for spec in specs if spec.config in loaded]
        for job in filter(None, jobs):
            noises = [stress.noises["elementwise"]]
            stress.run(Scenario(name, [job], noises, seconds / len(jobs), ceil_div(calls, len(jobs))))


def run_chance(stress: Stress, configs: Sequence[GemmConfig], seconds: float) -> None:
    """Scenarios drawn until time is over."""
    random, specs = stress.random, stress.specs(configs)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        drawn = [stress.job(next(specs), graph=random.random() < 0.4) for _ in range(random.randint(2, 4))]
        noises = random.sample(list(stress.noises.values()), random.randint(1, len(stress.noises)))
        jobs = list(filter(None, drawn))
        stress.run(Scenario("of chance", jobs, noises, min(_SCENARIO_SECONDS, left)))


def split_configs(num_sms: int, only: str) -> list[GemmConfig]:
    """Default configs that split K, those whose names hold the regular expression `only`."""
    defaults = (*default_configs(True), *default_configs(False))
    return [c for c in defaults if c.split_k > 1 and c.cluster <= num_sms and re.search(only, c.name)]


def run_split(stress: Stress, configs: Sequence[GemmConfig], calls: int, seconds: float) -> None:
    """`calls` calls of each config, half of them beside element-wise kernels and half beside everything."""
    loaded = stress.load(configs)
    end = time.monotonic() + seconds
    for config in loaded:
        specs = split_specs(stress.random, config, stress.num_sms)
        jobs = [stress.job(spec, graph=i > 0) for i, spec in enumerate(specs)]
        jobs = list(filter(None, jobs))
        each = ceil_div(calls, 2 * max(1, len(jobs)))
        for noises in ([stress.noises["elementwise"]], list(stress.noises.values())):
            stress.run(Scenario(config.name, jobs, noises, end - time.monotonic(), each))
        counted = f"{stress.calls[config.name]} calls, {stress.differing[config.name]} wrong"
        print(f"{config.name}: {counted}", file=sys.stderr, flush=True)


def run_all_splits(stress: Stress, arguments: argparse.Namespace) -> None:
    """CASES and every default config that splits K; a finding for each that was not called as often as asked."""
    end = time.monotonic() + arguments.seconds
    configs, wanted = split_configs(stress.num_sms, arguments.only), []
    if not arguments.only:
        run_cases(stress, arguments.seconds / 4, arguments.calls)
        wanted += CASES
    run_split(stress, configs, arguments.calls, end - time.monotonic())
    for name in (*wanted, *(config.name for config in configs)):
        if stress.calls[name] < arguments.calls:
            stress.find("too few calls", scenario=name, calls=stress.calls[name], wanted=arguments.calls)


def run(arguments: argparse.Namespace, report: Report) -> Stress:
    """A whole run, to its end or to the first product that hangs."""
    stress = Stress(arguments, report)
    try:
        if arguments.split_only:
            run_all_splits(stress, arguments)
        else:
            share = min(_CASE_SECONDS, arguments.seconds / (2 * len(CASES)))
            run_cases(stress, share)
            configs = stress_configs(stress.random, arguments.configs, stress.num_sms)
            configs = stress.load(configs)
            run_chance(stress, configs, arguments.seconds - len(CASES) * share)
    except Hang as hang:
        report.find("hang", work=str(hang), seconds=HANG_SECONDS)
    except RuntimeError as error:  # the context is lost
        report.find("failure", error=str(error))
    finally:
        disarm_backstop()
    return stress


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0], seconds=300)
    options.add_argument("--configs", type=int, default=160, help="how many, default ones included")
    options.add_argument("--split-only", action="store_true", help="only configs that split K")
    options.add_argument("--calls", type=int, default=50_000, help="of each config, with --split-only")
    options.add_argument("--only", default="", help="a part of the configs' names, with --split-only")
    options.set_defaults(sizes=Sizes())
    chosen = options.parse_args(arguments)
    reason = begin(chosen)
    if reason:
        print(f"stress.py: {reason}", file=sys.stderr)
        return UNUSABLE
    report = Report("stress", chosen)
    stress = run(chosen, report)
    return leave(
        report.end(
            products=stress.calls.total(),
            wrong=stress.differing.total(),
            configs=len(stress.configs),
            hangs=report.found.get("hang", 0),
            families=dict(sorted(stress.families.items())),
            scenarios={
                name: {"calls": calls, "wrong": stress.differing[name]} for name, calls in sorted(stress.calls.items())
            },
        )
    )


if __name__ == "__main__":
    sys.exit(main())
