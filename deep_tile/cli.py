"""The command line: `python -m deep_tile`, or `deep-tile` where the package is installed.

Called by users and by `make demo`. It adds tables and exit codes to what the other modules do, and decides nothing
about kernels. Invariant: results go to stdout, progress and errors to stderr; the exit code is 0 when all is well, 1
when a check fails or something is missing, 2 for arguments that make no sense. torch, which takes a second to import,
is imported by the commands that multiply.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

import deep_tile
from deep_tile import _launcher, hardware, jit, report, sass, select, settings
from deep_tile.codegen import kernel_source
from deep_tile.config import SCALE_BLOCK, GemmConfig
from deep_tile.hardware import DTYPE_BYTES, PRESETS
from deep_tile.problem import GemmProblem
from deep_tile.report import table as _table
from deep_tile.walls import product_flops

if TYPE_CHECKING:
    import torch

    from deep_tile.tune import Tuned

PROGRAM = "deep-tile"
WIDE = 200
"""Columns to print in where there is no terminal to ask."""

FIRST_CANDIDATES = 10
"""What `explain` shows without --all."""

DEEPSEEK_V3_LAYERS = {
    "q and kv down-projection": (2112, 7168),
    "shared expert, gate and up": (4096, 7168),
    "shared expert, down": (7168, 2048),
    "attention output": (7168, 16384),
    "q up-projection": (24576, 1536),
    "kv up-projection": (32768, 512),
}
"""(n, k) of DeepSeek-V3's linear layers, which `demo` multiplies and the benchmarks measure."""

TOKENS = (16, 128, 4096)
"""m of each: decoding, a larger batch, prefill."""

TOKENS_TO_TUNE = "8,16,32,64,128,256,512,1024,2048,4096"
"""m of each product that `tune` tries of a weight, unless told."""

MAX_RELATIVE_ERROR = 1.8e-3
"""Frobenius norm, against float64. Rounding the result to BF16 explains 1.66e-3."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad arguments raise SystemExit(2)."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.run is not bench:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


# ---- explain: which kernel a problem gets, and why


def explain(options: argparse.Namespace) -> int:
    asked = {"dtype": options.dtype, "hardware": options.hardware, "num_sms": options.num_sms}
    derived = report.derivation(options.m, options.n, options.k, **asked)
    if options.json:
        print(json.dumps(report.as_data(derived), indent=2))
    else:
        report.show(derived, _console(), None if options.all else FIRST_CANDIDATES)
    if options.plot:
        report.plot(derived, options.plot)
        print(f"{PROGRAM}: wrote {options.plot}", file=sys.stderr)
    return 0


# ---- compile: every kernel, with what ptxas says of it


class Built(NamedTuple):
    """One kernel's compilation."""

    config: GemmConfig
    seconds: float
    usage: jit.ResourceUsage
    divergence: tuple[str, ...]

    @property
    def slow(self) -> bool:
        """Spills, or a remark that ptxas serialised WGMMAs: the kernel is right, and slower than it should be."""
        return bool(self.usage.spill_store_bytes or self.usage.spill_load_bytes or self.usage.warnings)


def compile_kernels(options: argparse.Namespace) -> int:
    configs = _wanted_configs(options)
    dump_dir = settings.dump_dir()
    built = _build_all(configs, options.jobs, store=dump_dir is None)
    console = _console()
    console.print(_kernel_table(built), "")
    console.print(f"{len(built)} kernels for sm_90a, {sum(kernel.seconds for kernel in built):.1f} s of compiling.")
    console.print(f"Written to {dump_dir}; the cache was left alone." if dump_dir else f"Cache: {_cache_text()}.")
    return _report_flaws(built)


def _wanted_configs(options: argparse.Namespace) -> list[GemmConfig]:
    """The default configs, or those that the shapes need; each to store by TMA and to store anywhere."""
    configs = []
    for tma_store in (True, False):
        if not options.shape:
            configs += select.default_configs(tma_store)
        for n, k, max_m in options.shape:
            configs += select.configs_for(n, k, max_m, options.num_sms, tma_store)
    return list(dict.fromkeys(configs))


def _build(config: GemmConfig, store: bool = False) -> Built:
    """Compile, cached or not, for the log, which no cache holds; `store` gives the kernel to the cache."""
    source = kernel_source(config)
    compiled = jit.compile_kernel(source, config.name)
    if store and not compiled.divergence:
        jit.store_cubin(source, compiled.cubin)
    return Built(config, compiled.seconds, jit.resource_usage(compiled.log), compiled.divergence)


def _build_all(configs: Sequence[GemmConfig], jobs: int, store: bool = False) -> list[Built]:
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(_track(pool.map(partial(_build, store=store), configs), "Compiling", len(configs)))


def _kernel_table(built: list[Built], uses: dict[GemmConfig, int] | None = None) -> Table:
    columns = ("seconds", "registers", "spilled bytes", "smem KiB")
    table = _table("kernel", *columns, *(["shapes"] if uses else []))
    for config, seconds, usage, _ in built:
        spilled = usage.spill_store_bytes + usage.spill_load_bytes
        row = (config.name, f"{seconds:.2f}", str(usage.registers), str(spilled), _kib(config.smem_bytes))
        table.add_row(*row, *([str(uses[config])] if uses else []))
    return table


def _report_flaws(built: list[Built]) -> int:
    """Exit code 1 and a line for each kernel that may hang, that spills or that ptxas remarks on."""
    slow = [kernel for kernel in built if kernel.slow]
    for config, _, usage, _ in slow:
        spills = f"{usage.spill_store_bytes} bytes spilled, {usage.spill_load_bytes} reloaded"
        print(f"{PROGRAM}: {'; '.join([f'{config.name}: {spills}', *usage.warnings])}", file=sys.stderr)
    divergent = [kernel for kernel in built if kernel.divergence]
    for kernel in divergent:
        print(f"{PROGRAM}: {jit.divergence_text(kernel.config.name, kernel.divergence)}", file=sys.stderr)
    if divergent:
        print(f"{PROGRAM}: none of these is loaded or cached. Remedy: {jit.tested_nvrtc()}", file=sys.stderr)
    return 1 if slow or divergent else 0


# ---- cache


def show_cache(options: argparse.Namespace) -> int:
    _console().print(f"Cache: {_cache_text()}.")
    return 0


def clear_cache(options: argparse.Namespace) -> int:
    before = jit.cache_info()
    jit.clear_cache()
    _console().print(f"Removed {before.entries} kernels, {_mib(before.size_bytes)}, from {_place(before)}.")
    return 0


def _cache_text() -> str:
    info = jit.cache_info()
    held = f"{info.entries} kernels, {_mib(info.size_bytes)} of {_mib(info.limit_bytes)}"
    return f"{_place(info)} holds {held}, and serves NVRTC {info.nvrtc_version}"


def _place(info: jit.CacheInfo) -> str:
    return "the memory of this process" if info.directory is None else str(info.directory)


def _kib(size_bytes: int) -> str:
    return str(size_bytes >> 10)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


# ---- doctor: can the package work here?


class Finding(NamedTuple):
    """One line of the doctor's report; `status` is ok, warn or fail."""

    status: str
    subject: str
    seen: str
    remedy: str


class Check(NamedTuple):
    """One thing to look at: `look` returns a status and what it saw; raising means that the check failed."""

    subject: str
    look: Callable[[], tuple[str, str]]
    remedy: str


def doctor(options: argparse.Namespace) -> int:
    if options.measure:
        return _measure_hardware(options)
    findings = [_examine(check) for check in _checks()]
    works = all(finding.status != "fail" for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [finding._asdict() for finding in findings]}, indent=2))
        return 0 if works else 1
    console, table = _console(), _table("", "", "seen", "remedy", numbers=False)
    for status, subject, seen, remedy in findings:
        table.add_row(status, subject, seen, remedy, style={"ok": None, "warn": "yellow", "fail": "red"}[status])
    console.print(table, "")
    available, reason = deep_tile.is_available()
    where = f"on the GPU: {reason}" if available else f"on CPU tensors only: {reason}"
    console.print(f"deep_tile works here, {where}" if works else "deep_tile cannot work here: see the lines that fail")
    return 0 if works else 1


def _measure_hardware(options: argparse.Namespace) -> int:
    available, reason = deep_tile.is_available()
    if not available:
        raise RuntimeError(f"measuring needs a Hopper GPU: {reason}")
    import torch

    from deep_tile.measure import measure

    device = torch.cuda.get_device_name()
    known, measured = measure()
    hardware.store_measured(device, measured)
    if options.json:
        print(json.dumps({"gpu": device, "measured": measured}, indent=2))
        return 0
    console, table = _console(), _table(device, "measured", "known before", "source")
    for name, value in measured.items():
        table.add_row(name, f"{value:g}", f"{getattr(known, name):g}", known.source(name))
    console.print(table, "")
    console.print(f"Stored in {hardware.measured_path()}; `explain --hardware '{device}'` uses it.")
    return 0


def _examine(check: Check) -> Finding:
    try:
        status, seen = check.look()
    except Exception as error:  # whatever is broken is what was to be found
        status, seen = "fail", f"{type(error).__name__}: {error}"
    return Finding(status, check.subject, seen, "" if status == "ok" else check.remedy)


def _checks() -> list[Check]:
    nvrtc = 'pip install "deep_tile[cu13]", or "deep_tile[cu12]" beside a PyTorch for CUDA 12'
    tested = f"{nvrtc}; tested: {' or '.join(jit.TESTED_WHEELS.values())}"
    return [
        Check("PyTorch", _look_at_torch, "to use a GPU, install a CUDA build of PyTorch"),
        Check("driver", _look_at_driver, "to use a GPU, install NVIDIA's driver"),
        Check("GPU", _look_at_gpus, "none needed to compile; kernels run on a Hopper GPU: H100, H200, H800, H20"),
        Check("cuda.core", _look_at_bindings, nvrtc),
        Check("NVRTC", _look_at_nvrtc, tested),
        *(Check(variable.name, _look_at(value), variable.meaning) for variable, value in VARIABLE_VALUES),
        Check("compiler", _look_at_compiler, tested),
        Check("cache", _look_at_cache, "set DEEP_TILE_CACHE_DIR to a directory of your own, on a disk with space"),
        Check("product", _look_at_product, "report this, with the output of `deep-tile doctor --json`"),
    ]


VARIABLE_VALUES: tuple[tuple[settings.Variable, Callable[[], object]], ...] = (
    (settings.CACHE_DIR, lambda: settings.cache_dir() or "none: memory only"),
    (settings.CACHE_MAX_MB, lambda: settings.cache_max_bytes() >> 20),
    (settings.PRINT_CONFIG, lambda: int(settings.print_config())),
    (settings.DUMP_DIR, lambda: settings.dump_dir() or "unset"),
    (settings.TUNED, lambda: settings.tuned_file() or "a file for each model of GPU, in the cache directory"),
)
"""Each environment variable and how to say what it means to this process."""

DOCTORS_PROBLEM = GemmProblem(128, 512, 1024)

DOCTORS_KERNELS = (DOCTORS_PROBLEM, GemmProblem(512, 2112, 7168))
"""Problems whose kernels the doctor compiles: the second's is one that NVRTC 13.1 does not keep uniform by itself."""


def _look_at(value: Callable[[], object]) -> Callable[[], tuple[str, str]]:
    return lambda: ("ok", str(value()))


def _look_at_torch() -> tuple[str, str]:
    import torch

    cuda = torch.version.cuda
    return ("ok" if cuda else "warn"), f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}"


def _look_at_driver() -> tuple[str, str]:
    try:
        return "ok", f"up to CUDA {_cuda_version(_launcher.driver_version())}"
    except RuntimeError as error:
        return "warn", str(error)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _look_at_gpus() -> tuple[str, str]:
    available, reason = deep_tile.is_available()
    return ("ok", "; ".join(_gpu_names())) if available else ("warn", reason)


def _gpu_names() -> Iterable[str]:
    import torch

    for device in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(device)
        yield f"cuda:{device} {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs"


def _look_at_bindings() -> tuple[str, str]:
    return "ok", f"{metadata.version('cuda-core')}, cuda-bindings {metadata.version('cuda-bindings')}"


def _look_at_nvrtc() -> tuple[str, str]:
    version = jit.nvrtc_version()
    if not jit.is_tested(version):
        first, last = sass.TESTED_NVRTC[0], sass.TESTED_NVRTC[-1]
        return "warn", f"{version}; deep_tile is tested with {first} to {last}: `{PROGRAM} compile` checks every kernel"
    try:
        driver = _cuda_version(_launcher.driver_version())
    except RuntimeError:
        return "ok", version
    if int(version.split(".")[0]) > int(driver.split(".")[0]):
        return "warn", f"{version}; the driver knows CUDA {driver} only and may refuse its kernels"
    return "ok", version


def _look_at_compiler() -> tuple[str, str]:
    built = [_build(select.choose(problem)) for problem in DOCTORS_KERNELS]
    for kernel in built:
        if kernel.divergence:
            return "fail", jit.divergence_text(kernel.config.name, kernel.divergence)
    for kernel in built:
        if kernel.slow:
            return "warn", f"{kernel.config.name} spills, or ptxas remarks on it; `{PROGRAM} compile` says more"
    return "ok", "; ".join(f"{kernel.config.name} in {kernel.seconds:.2f} s" for kernel in built)


def _look_at_cache() -> tuple[str, str]:
    if settings.dump_dir() is not None:
        return "warn", f"{settings.DUMP_DIR.name} is set, so every kernel is compiled and none is cached"
    config = select.choose(DOCTORS_PROBLEM)
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        jit.load_cubin(kernel_source(config), config.name)
    if complaints:
        return "warn", str(complaints[0].message)
    return "ok", _cache_text()


def _look_at_product() -> tuple[str, str]:
    device = "cuda" if deep_tile.is_available()[0] else "cpu"
    m, n, k, *_ = DOCTORS_PROBLEM
    error = _checked_error(m, n, k, device)
    text = f"{m}x{n}x{k} on {device}: relative error {error:.2e}, at most {MAX_RELATIVE_ERROR} allowed"
    return ("ok" if error <= MAX_RELATIVE_ERROR else "fail"), text


# ---- demo: DeepSeek-V3's layers, on the GPU if there is one


def demo(options: argparse.Namespace) -> int:
    available, reason = deep_tile.is_available()
    return _demo_on_gpu(reason) if available else _demo_without_gpu(reason)


def _demo_shapes() -> list[tuple[int, int, int]]:
    return [(m, n, k) for n, k in DEEPSEEK_V3_LAYERS.values() for m in TOKENS]


def _demo_without_gpu(reason: str) -> int:
    console, shapes = _console(), _demo_shapes()
    console.print(f"No Hopper GPU to run on ({reason}).")
    console.print(
        "So: choose kernels for DeepSeek-V3's layers as on an H200, compile them for sm_90a, multiply on the CPU."
    )
    uses = Counter(select.choose(GemmProblem(*shape)) for shape in shapes)
    built = _build_all(list(uses), os.cpu_count() or 1)
    console.print(_kernel_table(built, uses), "")
    m, n, k = 96, 400, 1040
    error = _checked_error(m, n, k, "cpu")
    console.print(f"fp8_gemm of {m}x{n}x{k} on the CPU, against float64: relative error {error:.2e}")
    return max(_report_flaws(built), _report_errors({(m, n, k): error}))


def _demo_on_gpu(reason: str) -> int:
    console = _console()
    console.print(f"Running on the GPU ({reason}): DeepSeek-V3's layers, each product timed and checked.")
    timer = _Timer()
    measured = {shape: _measure(*shape, timer) for shape in _track(_demo_shapes(), "Multiplying")}
    columns = ("us", "TFLOPS", "cuBLAS us", "ratio", "BF16 us", "relative error")
    table = _table("config", "m", "n", "k", *columns)
    for (m, n, k), (config, us, cublas_us, bf16_us, error) in measured.items():
        tflops = _tflops(m, n, k, us)
        times = (f"{us:.1f}", tflops, f"{cublas_us:.1f}", f"{us / cublas_us:.2f}", f"{bf16_us:.1f}", f"{error:.2e}")
        table.add_row(config, str(m), str(n), str(k), *times)
    console.print(table, "")
    mean = geometric_mean(row.us / row.cublas_us for row in measured.values())
    console.print(f"us: {_Timer.METHOD}")
    console.print(
        f"ratio: deep_tile's time over cuBLAS's, geometric mean {mean:.3f}; below 1, deep_tile is faster. cuBLAS is "
        "torch._scaled_mm on the same FP8 values with one scale per tensor and fast accumulation: it does less work, "
        "having no block scales to apply. BF16 is torch.mm. Errors are against float64."
    )
    return _report_errors({shape: row.error for shape, row in measured.items()})


class _Measured(NamedTuple):
    config: str
    us: float
    cublas_us: float
    bf16_us: float
    error: float


def _measure(m: int, n: int, k: int, timer: _Timer) -> _Measured:
    import torch

    from deep_tile.reference import relative_error

    x, w = _random(m, n, k, "cuda")
    a, a_scale = deep_tile.per_token_cast_to_fp8(x)
    b, b_scale = deep_tile.per_block_cast_to_fp8(w)
    out, one = x.new_empty(m, n), torch.ones((), device="cuda")
    config = select.choose(GemmProblem(m, n, k, torch.cuda.get_device_properties(x.device).multi_processor_count))
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    times_us = timer.medians_us(
        lambda: deep_tile.fp8_gemm(a, a_scale, b, b_scale, out),
        lambda: torch._scaled_mm(a, b.t(), **options),
        lambda: torch.mm(x, w.t()),
    )
    return _Measured(config.name, *times_us, relative_error(out, _exact_product(a, a_scale, b, b_scale)))


class _Timer:
    """Times calls on the GPU in turns, none of them finding its operands in L2."""

    ROUNDS = 20
    FLUSH_BYTES = 512 << 20
    """Ten times L2, and more than 100 us of reading: time for the host to enqueue the call and its two events."""

    METHOD = (
        f"median of {ROUNDS} calls, each between two CUDA events, taking turns; before each the GPU reads "
        f"{FLUSH_BYTES >> 20} MiB, so that L2 is cold and no host time is measured."
    )

    def __init__(self):
        import torch

        self._torch = torch
        self._read = torch.zeros(self.FLUSH_BYTES // 4, device="cuda")

    def medians_us(self, *calls: Callable[[], torch.Tensor]) -> list[float]:
        for call in calls:
            call()
        rounds = [[self._between_events(call) for call in calls] for _ in range(self.ROUNDS)]
        self._torch.cuda.synchronize()
        return [median(start.elapsed_time(end) * 1e3 for start, end in pairs) for pairs in zip(*rounds, strict=True)]

    def _between_events(self, call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._read.sum()
        start.record()
        call()
        end.record()
        return start, end


def _checked_error(m: int, n: int, k: int, device: str) -> float:
    """Relative error of one product of random operands."""
    from deep_tile.reference import relative_error

    x, w = _random(m, n, k, device)
    operands = *deep_tile.per_token_cast_to_fp8(x), *deep_tile.per_block_cast_to_fp8(w)
    return relative_error(deep_tile.fp8_gemm(*operands), _exact_product(*operands))


def _random(m: int, n: int, k: int, device: str) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(rows, k, generator=generator, device=device, dtype=torch.bfloat16) for rows in (m, n)]


def _exact_product(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """The product in float64, on purpose by another way than reference.py: every element gets its scale."""
    n, k = b.shape
    a_scales = a_scale.repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    b_scales = b_scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return (a.double() * a_scales) @ (b.double() * b_scales).t()


def _report_errors(errors: dict[tuple[int, int, int], float]) -> int:
    """Exit code 1 and a line for each product that is off; NaN is off."""
    wrong = {shape: error for shape, error in errors.items() if not error <= MAX_RELATIVE_ERROR}
    for (m, n, k), error in wrong.items():
        print(f"{PROGRAM}: {m}x{n}x{k}: relative error {error:.2e} exceeds {MAX_RELATIVE_ERROR}", file=sys.stderr)
    return 1 if wrong else 0


# ---- tune: the fastest config, measured


def tune(options: argparse.Namespace) -> int:
    shapes = _shapes_to_tune(options)
    available, reason = deep_tile.is_available()
    if not available:
        raise RuntimeError(f"tune times kernels, so it needs a Hopper GPU: {reason}")
    from deep_tile import tune as search

    results = search.tune(shapes, wide=options.wide, repeats=options.repeats, track=_track)
    place = search.store(results)
    console = _console()
    console.print(_tuned_table(results), "", f"Kept in {place}; the selector takes them from there from now on.")
    wrong = [(result.problem, *found) for result in results for found in result.wrong.items()]
    for (m, n, k, *_), config, error in wrong:
        print(f"{PROGRAM}: {config.name} at {m}x{n}x{k}: relative error {error:.2e}; left out", file=sys.stderr)
    return 1 if wrong else 0


def _shapes_to_tune(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(m, n, k) of the weight on the command line and of the file's lines."""
    weight = (options.n, options.k)
    if weight == (None, None) and options.shapes:
        return options.shapes
    if None in weight:
        options.refuse("give N and K of a weight, or --shapes FILE")
    return [(m, *weight) for m in options.m] + options.shapes


def _tuned_table(results: Sequence[Tuned]) -> Table:
    columns = ("m up to", "n", "k", "us", "TFLOPS", "chosen before", "us", "gain", "tried")
    table = _table("config", *columns)
    for (m, n, k, *_), (config, us), before, before_us, tried, _ in results:
        was = "the same" if config == before else before.name
        numbers = f"{us:.1f}", _tflops(m, n, k, us), was, f"{before_us:.1f}", f"{before_us / us - 1:.1%}"
        table.add_row(config.name, str(m), str(n), str(k), *numbers, str(tried))
    return table


# ---- bench: the scripts of a checkout

CHECKOUT = Path(__file__).resolve().parent.parent
NEED_NO_GPU = {"-h", "--help", "--compare", "--results"}


def bench(options: argparse.Namespace) -> int:
    if not (CHECKOUT / "benchmarks" / "bench_gemm.py").is_file():
        raise RuntimeError(
            "the benchmarks are not part of the installed package; run `python -m deep_tile bench`, or "
            "benchmarks/bench_gemm.py itself, in a checkout of deep_tile's sources"
        )
    available, reason = deep_tile.is_available()
    if not available and not NEED_NO_GPU.intersection(options.rest):
        raise RuntimeError(f"benchmarks need a Hopper GPU: {reason}")
    sys.path.insert(0, str(CHECKOUT))
    from benchmarks import bench_gemm

    return bench_gemm.main(options.rest)


# ---- arguments and printing


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="FP8 block-scaled matrix products on NVIDIA Hopper GPUs.")
    parser.add_argument("--version", action="version", version=f"deep_tile {deep_tile.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, **options: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, **options)
        command.set_defaults(run=run)
        return command

    add("demo", demo, "DeepSeek-V3's layers: multiplied, checked and timed, or compiled where there is no Hopper GPU")

    command = add("explain", explain, "which kernel a product of [M, K] and [N, K] gets, and why")
    for name in ("m", "n", "k"):
        command.add_argument(name, type=_positive, metavar=name.upper())
    command.add_argument("--dtype", choices=DTYPE_BYTES, default="fp8", help="of the operands; default: %(default)s")
    command.add_argument(
        "--hardware", default="H200", help=f"one of {', '.join(PRESETS)}, or the driver's name; default: %(default)s"
    )
    command.add_argument("--num-sms", type=_positive, help="SMs to use; default: all of the hardware's")
    command.add_argument("--all", action="store_true", help=f"every candidate, not only the first {FIRST_CANDIDATES}")
    command.add_argument("--plot", type=Path, metavar="FILE", help="write the roofline as an image, such as a PNG")
    command.add_argument("--json", action="store_true", help="everything, as JSON")

    command = add("compile", compile_kernels, "compile every default kernel, fill the cache, show registers and spills")
    command.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="at once; default: %(default)s")
    command.add_argument(
        "--shape",
        type=_weight_shape,
        action="append",
        default=[],
        metavar="N,K,MAX_M",
        help="only the kernels that a weight [N, K] needs for any m up to MAX_M; may be repeated",
    )
    _add_num_sms(command)

    command = add("doctor", doctor, "what works on this machine, and what to do about the rest")
    command.add_argument("--measure", action="store_true", help="measure the GPU's bandwidths, latencies and rates")
    command.add_argument("--json", action="store_true", help="as JSON")

    command = add("cache", show_cache, "the directory of compiled kernels")
    actions = command.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("info", help="where it is and what it holds").set_defaults(run=show_cache)
    actions.add_parser("clear", help="remove every kernel from it").set_defaults(run=clear_cache)

    command = add("tune", tune, "time configs on this GPU and keep the fastest for each shape")
    for name, text in (("n", "rows of the weight [N, K]"), ("k", "its columns")):
        command.add_argument(name, type=_positive, nargs="?", metavar=name.upper(), help=text)
    command.add_argument("--m", type=_positives, default=TOKENS_TO_TUNE, metavar="M,M,...", help="default: %(default)s")
    text = "with a line MxNxK for each product"
    command.add_argument("--shapes", type=_shapes_file, default=[], metavar="FILE", help=text)
    command.add_argument("--wide", action="store_true", help="also other numbers of stages and store buffers")
    command.add_argument(
        "--repeats",
        type=_samples,
        default=20,
        help="samples of each config that may be the fastest; default: %(default)s",
    )
    command.set_defaults(refuse=command.error)

    add("bench", bench, "run benchmarks/bench_gemm.py of a checkout, with its arguments", add_help=False)
    return parser


def _add_num_sms(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--num-sms", type=_positive, default=select.H200.num_sms, help="SMs of the GPU; default: %(default)s, an H200"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer below 2**31")
    return int(text)


def _samples(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is too few for a median with a spread; give 2 or more")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(number) for number in text.split(",")]


def _shapes_file(path: str) -> list[tuple[int, int, int]]:
    """(m, n, k) of each line that is neither empty nor a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read: {error}") from None
    shapes = [_product_shape(path, text) for line in lines if (text := line.split("#")[0].strip())]
    if not shapes:
        raise argparse.ArgumentTypeError(f"{path!r} has no line MxNxK, such as 4096x7168x2048")
    return shapes


def _product_shape(path: str, text: str) -> tuple[int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} in {path!r} is not MxNxK, such as 4096x7168x2048")
    m, n, k = map(_positive, sizes)
    return m, n, k


def _weight_shape(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,K,MAX_M, such as 7168,2048,4096")
    n, k, max_m = map(_positive, sizes)
    supported, reason = deep_tile.supports(max_m, n, k)
    if not supported:
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
    return n, k, max_m


def _tflops(m: int, n: int, k: int, us: float) -> str:
    return f"{product_flops(m, n, k) / us / 1e6:.0f}"


def _console(stderr: bool = False) -> Console:
    """Text is printed as it is: brackets in a message are no markup."""
    wide = None if (sys.stderr if stderr else sys.stdout).isatty() else WIDE
    return Console(stderr=stderr, width=wide, markup=False, highlight=False, emoji=False)


def _track(items: Iterable, description: str, total: int | None = None) -> Iterable:
    return track(items, description, total=total, console=_console(stderr=True))
