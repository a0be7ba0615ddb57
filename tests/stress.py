"""Repeat GEMMs beside other work on the same SMs: each must keep the bits that it has on a quiet GPU.

    PYTHONPATH=. python tests/stress.py --seconds 300 --out stress.json [--seed N] [--products groups kinds]
    PYTHONPATH=. python tests/stress.py --split-only --calls 50000 --out split.json [--only k2]

Each product is made ready first: multiplied with nothing else on the GPU and held against the exact product. Then
several host threads repeat theirs, each on a stream of its own, one call at a time or as CUDA graphs, with programmatic
launches or without, while other threads keep the GPU busy with element-wise kernels, copies and kernels that spin. The
GPU compares the bits and counts the calls that differ; the counts are read when a scenario ends.

First come the cases in which split K was once wrong beside element-wise kernels, then scenarios of chance, on few SMs
or all: products of `fp8_gemm` by kernels of every family, of groups of rows by every kernel, of every kind, and of
groups of gradients, side by side. With --split-only, those cases and every default config that splits K are called as
often as --calls says, each.

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
from itertools import count, cycle
from random import Random
from typing import Any, NamedTuple

import fuzz_groups
import fuzz_kinds
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
    seconds_left,
    sms_of,
)
from jobs import GemmJob, GroupJob, Job, KindJob, Spec
from strategies import USUAL, Limits, config_named, draw_configs, family

from deep_tile import GemmConfig, jit
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.kinds import FAMILIES
from deep_tile.select.defaults import default_configs

_UNDER_WAY = 4
"""Times that many: fewer kernels than a stream holds before a launch waits."""

ELEMENTWISE_LOG2 = 25
"""log2 of the elements of the largest element-wise kernel."""

MEMORY_BYTES = 256 << 20
"""Bytes of the largest copy."""

_CASE_SECONDS = 12.0
_SCENARIO_SECONDS = 2.0


CASES = {
    "split of 2, 256 of k": [
        Spec(config_named("64x64x256_s6_k2_b1"), 512, 2048, 1024, num_sms) for num_sms in (8, 16, 40)
    ],
    "split of 2, one K block": [Spec(config_named("64x128x128_s8_k2_b1"), 512, 3328, 128, 40)],
    "split of 4, 256 of k": [Spec(config_named("64x64x256_s6_k4"), 512, 2048, 768, 22)],
}
"""GEMMs that were wrong in 13 of 80, 18 of 40 and 14 of 40 calls beside element-wise kernels, when a block released the
slots of partial sums before it had read them (H200)."""


PRODUCTS = ("fp8", "groups", "kinds")
"""Which GEMMs to repeat: `fp8_gemm`; row groups; every kind and grouped gradients."""

Drawn = Spec | fuzz_groups.Draw | fuzz_kinds.Draw


# Draws.


class Sizes(NamedTuple):
    """Largest side, k and `out` of a drawn GEMM."""

    side: int = 4096
    k: int = 4096
    out: int = 1 << 21


def draw_spec(random: Random, config: GemmConfig, num_sms: int, sizes: Sizes) -> Spec:
    """Draw a GEMM with one to a dozen tiles per cluster, on a few or all of `num_sms` SMs."""
    sms = draw_sms(random, config, num_sms)
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


def draw_sms(random: Random, config: GemmConfig, num_sms: int) -> int:
    """Few, so that tiles follow each other, or any number of `num_sms`."""
    few, any_number = (
        config.cluster * random.randint(1, 6),
        random.randint(config.cluster, max(num_sms, config.cluster)),
    )
    return min(num_sms, random.choice((few, few, any_number, num_sms)))


def draw_kind(random: Random, config: GemmConfig, num_sms: int, limits: Limits) -> fuzz_kinds.Draw:
    """Draw a call of the function that makes `config`'s products."""
    drawn = fuzz_kinds.draw_for(random, config, num_sms, limits)
    pdl = random.random() < 0.5
    early = pdl and drawn.use.constant_weights
    sms = draw_sms(random, config, num_sms)
    return drawn._replace(use=drawn.use._replace(num_sms=sms, pdl=pdl, constant_weights=early))


def draw_groups(random: Random, number: int, num_sms: int) -> fuzz_groups.Draw:
    """Draw row groups, some not empty, by a named kernel, each in turn, on all SMs with a programmatic launch."""
    while True:
        drawn = fuzz_groups.draw(random, number, num_sms)
        if drawn.config is not None and fuzz_groups.living_rows(drawn):
            sms = draw_sms(random, fuzz_groups.CONFIGS[drawn.config], num_sms)
            if sms == num_sms:
                return drawn._replace(num_sms=None)
            return drawn._replace(num_sms=sms, constant_weights=False)


def _draw_k(random: Random, config: GemmConfig, largest: int) -> int:
    """Mostly short, so that tiles follow each other closely."""
    smallest, most = config.k_range
    k = random.choice((SCALE_BLOCK * random.randint(1, 8), 16 * random.randint(1, 100), random.randint(1, largest)))
    k = max(smallest, min(k, most or largest, largest))
    return next(near for near in (k, k + SCALE_BLOCK, k - SCALE_BLOCK) if config.takes_k(near) and near <= largest)


def family_of(config: GemmConfig) -> str:
    """`family`, with the kind where that is not FP8 with block scales and without groups."""
    what = config.grouping if config.is_grouped else config.kind
    return family(config) if what == "fp8" else f"{what}: {family(config)}"


def split_specs(random: Random, config: GemmConfig, num_sms: int) -> list[Spec]:
    """GEMMs that exercise the exchange of partial sums most: several tiles per cluster on few SMs, and a stage or two
    of k in each part, or one part without any."""
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


# Noise: what else the GPU does. Each burst is enqueued on the current stream, by a thread of its own.


class Elementwise:
    """Torch's element-wise kernels of a thousand to thirty million elements, single or in a graph."""

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
    """All noises by name; on the CPU those without a kernel of their own."""
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
    """The threads of a scenario; the first exception stops all."""

    def __init__(self, device: str):
        self._device = device
        self._stop = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, scenario: Scenario, random: Random) -> None:
        """Raises the exception of the first thread that failed; others may still be at work."""
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
        """Start a thread on a stream of its own; streams of priority -1 go first."""
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
            watch.add(job)
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
    """A run's counts so far."""

    def __init__(self, arguments: argparse.Namespace, report: Report):
        self._device, self._workers, self.find = arguments.device, arguments.workers, report.find
        self.random = Random(arguments.seed)
        self.num_sms = sms_of(self._device)
        self._sizes, seed = arguments.sizes, arguments.seed % 2**31
        self._pool = OperandPool(self._sizes.side, self._sizes.k, self._device, seed)
        self._values, self._codes = fuzz_kinds.Values(self._device, seed), fuzz_groups.Pool(self._device, seed)
        self.noises = make_noises(self._device)
        self.calls: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.configs: set[str] = set()
        self.families: Counter[str] = Counter()

    def load(self, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
        """Load kernels. Those that fail are findings, unless they are random and may be refused."""
        failures = load_kernels(configs, self._device, self._workers)
        for config in configs:
            text = failures.get(config.name)
            if text is not None and not fuzz_kinds.may_be_refused(config, text):
                self.find("not compiled", config=config.name, error=text[-600:])
        return [config for config in configs if config.name not in failures]

    def job(self, drawn: Drawn, *, graph: bool) -> Job | None:
        """A product made ready, or None, and a finding, if it is wrong without any noise."""
        arm_backstop()
        try:
            job = self._make(drawn)
            job.prepare(graph=graph)
        except AssertionError as error:
            self.find("wrong when quiet", product=str(drawn), error=str(error))
        except (TypeError, ValueError) as error:
            self.find("refused", product=str(drawn), error=str(error))
        else:
            return job
        return None

    def _make(self, drawn: Drawn) -> Job:
        if isinstance(drawn, Spec):
            return GemmJob(drawn, self._pool, self.random, self._device)
        if isinstance(drawn, fuzz_groups.Draw):
            return GroupJob(drawn, self._codes, self._device)
        return KindJob(drawn, self._values, self._device)

    def draws(self, configs: dict[str, Sequence[GemmConfig]]) -> Iterator[Drawn]:
        """Draw without end, from all `PRODUCTS` with configs, and from the configs of each in turn."""
        ways = {"fp8": self._specs, "groups": self._groups, "kinds": self._kinds}
        sources = [ways[what](own) for what, own in configs.items() if own]
        for source in cycle(sources):
            yield next(source)

    def _specs(self, configs: Sequence[GemmConfig]) -> Iterator[Spec]:
        for config in cycle(configs):
            yield draw_spec(self.random, config, self.num_sms, self._sizes)

    def _groups(self, configs: Sequence[GemmConfig]) -> Iterator[fuzz_groups.Draw]:
        names = {config.name for config in configs}
        for number in count():
            drawn = draw_groups(self.random, number, self.num_sms)
            if drawn.config in names:
                yield drawn

    def _kinds(self, configs: Sequence[GemmConfig]) -> Iterator[fuzz_kinds.Draw]:
        side, k, out = self._sizes
        limits = Limits(*map(min, USUAL, (side, side, k, out)))
        for config in cycle(configs):
            yield draw_kind(self.random, config, self.num_sms, limits)

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
            self.configs.add(job.config.name)
            self.families[family_of(job.config)] += calls
            if differing:
                self.differing[scenario.name] += differing
                noises = [noise.name for noise in scenario.noises]
                self.find(
                    "wrong", scenario=scenario.name, product=str(job), calls=calls, wrong=differing, beside=noises
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


def chance_configs(stress: Stress, products: Sequence[str], number: int) -> dict[str, Sequence[GemmConfig]]:
    """Kernels of each of `products`: `number` of `fp8_gemm`, half of that of kinds, and all of groups."""
    random, families = stress.random, len(FAMILIES) + 1
    ways = {
        "fp8": lambda: stress_configs(random, number, stress.num_sms),
        "groups": lambda: list(fuzz_groups.CONFIGS.values()),
        "kinds": lambda: fuzz_kinds.draw_kernels(random, max(2, number // (2 * families)), stress.num_sms),
    }
    return {what: ways[what]() for what in PRODUCTS if what in products}


def run_chance(stress: Stress, configs: dict[str, Sequence[GemmConfig]], seconds: float) -> None:
    """Scenarios drawn until time is over."""
    random, draws = stress.random, stress.draws(configs)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        drawn = [stress.job(next(draws), graph=random.random() < 0.4) for _ in range(random.randint(2, 4))]
        noises = random.sample(list(stress.noises.values()), random.randint(1, len(stress.noises)))
        jobs = list(filter(None, drawn))
        stress.run(Scenario("of chance", jobs, noises, min(_SCENARIO_SECONDS, left)))


def split_configs(num_sms: int, only: str) -> list[GemmConfig]:
    """Default configs that split K, those whose names hold the regular expression `only`."""
    defaults = (*default_configs(True), *default_configs(False))
    return [c for c in defaults if c.split_k > 1 and c.cluster <= num_sms and re.search(only, c.name)]


def run_split(stress: Stress, configs: Sequence[GemmConfig], calls: int, seconds: float) -> None:
    """Call each config `calls` times: half beside element-wise kernels, half beside all noises."""
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
            share = min(_CASE_SECONDS, arguments.seconds / (2 * len(CASES))) if "fp8" in arguments.products else 0
            if share:
                run_cases(stress, share)
            configs = chance_configs(stress, arguments.products, arguments.configs)
            loaded = {what: stress.load(own) for what, own in configs.items()}
            run_chance(stress, loaded, min(arguments.seconds - len(CASES) * share, seconds_left(arguments)))
    except Hang as hang:
        report.find("hang", work=str(hang), seconds=HANG_SECONDS)
    except RuntimeError as error:  # the context is lost
        report.find("failure", error=str(error))
    finally:
        disarm_backstop()
    return stress


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0], seconds=300)
    options.add_argument("--configs", type=int, default=160, help="of fp8_gemm, default ones included; of kinds half")
    text = "which products to repeat by chance (default: all)"
    options.add_argument("--products", nargs="+", choices=PRODUCTS, default=PRODUCTS, help=text)
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
