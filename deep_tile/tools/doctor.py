"""`doctor`: whether the package works here, and remedies for what is missing.

Imports torch only to look at it, so that it also reports where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import deep_tile
from deep_tile import _launcher, jit, packaged, plan, sass, settings
from deep_tile.codegen import kernel_source
from deep_tile.integrations import engines
from deep_tile.method import report
from deep_tile.problem import GemmProblem
from deep_tile.select import hardware, tuned
from deep_tile.tools.compile import build, cache_text, packaged_text
from deep_tile.tools.console import INSTALL_NVRTC, PROGRAM, new_console, remedy_for_missing
from deep_tile.tools.products import checked_error


class Finding(NamedTuple):
    """One report line; `status` is ok, warn or fail."""

    status: str
    subject: str
    seen: str
    remedy: str


class Check(NamedTuple):
    """One check: `look` returns a status and a finding, perhaps a remedy as third; raising means failure.

    `remedy` is the usual one. Missing packages and invalid variables have their own remedies.
    """

    subject: str
    look: Callable[[], tuple[str, ...]]
    remedy: str


def doctor(options: argparse.Namespace) -> int:
    if options.measure:
        return _measure_hardware(options)
    findings = [_examine(check) for check in _checks()]
    works = all(finding.status != "fail" for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [finding._asdict() for finding in findings]}, indent=2))
        return 0 if works else 1
    console, table = new_console(), report.table("", "", "seen", numbers=False)
    table.columns[1].no_wrap = True
    for status, subject, seen, remedy in findings:
        said = f"{seen}\nRemedy: {remedy}" if remedy else seen
        table.add_row(status, subject, said, style={"ok": None, "warn": "yellow", "fail": "red"}[status])
    console.print(table, "")
    if not works:
        console.print("deep_tile cannot work here: see the lines that fail")
        return 1
    available, reason = deep_tile.is_available()
    console.print(f"deep_tile works here, on {'the GPU' if available else 'CPU tensors only'}: {reason}")
    return 0


def _measure_hardware(options: argparse.Namespace) -> int:
    available, reason = deep_tile.is_available()
    if not available:
        raise RuntimeError(f"measuring needs a Hopper GPU: {reason}")
    import torch

    from deep_tile.tools.measure import measure

    device = torch.cuda.get_device_name()
    known, measured = measure()
    hardware.store_measured(device, measured)
    if options.json:
        print(json.dumps({"gpu": device, "measured": measured}, indent=2))
        return 0
    console, table = new_console(), report.table(device, "measured", "known before", "source")
    for name, value in measured.items():
        table.add_row(name, f"{value:g}", f"{getattr(known, name):g}", known.source(name))
    console.print(table, "")
    console.print(f"Stored in {hardware.measured_path()}; `explain --hardware '{device}'` uses it.")
    return 0


def _examine(check: Check) -> Finding:
    remedy = check.remedy
    try:
        status, seen, *others = check.look()
        remedy = others[0] if others else remedy
    except Exception as error:  # any error is a finding
        status, seen = "fail", f"{type(error).__name__}: {error}"
        if isinstance(error, settings.BadVariable):
            remedy = error.remedy
        elif isinstance(error, ModuleNotFoundError):
            remedy = remedy_for_missing(error) or remedy
    return Finding(status, check.subject, seen, "" if status == "ok" else remedy)


def _compiler_remedy() -> str:
    return f"{INSTALL_NVRTC}; tested: {' or '.join(jit.TESTED_WHEELS.values())}"


def _checks() -> list[Check]:
    tested = _compiler_remedy()
    return [
        Check("deep_tile", _look_at(lambda: f"{deep_tile.__version__} in {Path(deep_tile.__file__).parent}"), ""),
        Check("Python", _look_at(platform.python_version), ""),
        Check("system", _look_at(platform.platform), ""),
        Check("PyTorch", _look_at_torch, "to use a GPU, install a CUDA build of PyTorch"),
        Check("driver", _look_at_driver, "to use a GPU, install NVIDIA's driver"),
        Check("GPU", _look_at_gpus, "none needed to compile; kernels run on a Hopper GPU: H100, H200, H800, H20"),
        Check("cuda.core", _to_compile(_look_at_bindings), INSTALL_NVRTC),
        Check("NVRTC", _to_compile(_look_at_nvrtc), tested),
        Check("packaged kernels", _look_at_packaged, f"unset {settings.PACKAGED_KERNELS.name}"),
        *(Check(variable.name, _look_at(value), variable.meaning) for variable, value in VARIABLE_VALUES),
        Check("variables", _look_at_others, f"known are {', '.join(variable.name for variable in settings.VARIABLES)}"),
        *(
            Check(engine.name, _look_at_engine(engine), "")
            for engine in engines.ENGINES
            if engines.installed_version(engine)
        ),
        Check("tuned choices", _look_at_tuned, f"remove that file, or set {settings.TUNED.name} to another one"),
        Check("compiler", _to_compile(_look_at_compiler), tested),
        Check("cache", _look_at_cache, "set DEEP_TILE_CACHE_DIR to a directory of your own, on a disk with space"),
        Check("product", _look_at_product, "report this, with the output of `deep-tile doctor --json`"),
    ]


VARIABLE_VALUES: tuple[tuple[settings.Variable, Callable[[], object]], ...] = (
    (settings.CACHE_DIR, lambda: settings.cache_dir() or "none: memory only"),
    (settings.CACHE_MAX_MB, lambda: settings.cache_max_bytes() >> 20),
    (settings.PRINT_CONFIG, lambda: int(settings.print_config())),
    (settings.DUMP_DIR, lambda: settings.dump_dir() or "unset"),
    (settings.TUNED, lambda: settings.tuned_file() or "a file for each model of GPU, in the cache directory"),
    (settings.PACKAGED_KERNELS, lambda: int(settings.packaged_kernels())),
    (settings.BOUNDED_WAITS, lambda: (settings.bounded_waits_ns() or 0) * 1e-9 or "unset"),
)
"""Each environment variable and a function that describes its effect here."""

DOCTORS_PROBLEM = GemmProblem(128, 512, 1024)

DOCTORS_KERNELS = (DOCTORS_PROBLEM, GemmProblem(512, 2112, 7168))
"""Problems whose kernels the doctor compiles; NVRTC 13.1 alone does not keep the second's uniform."""


def _look_at(value: Callable[[], object]) -> Callable[[], tuple[str, str]]:
    return lambda: ("ok", str(value()))


def _look_at_others() -> tuple[str, str]:
    known = {variable.name for variable in settings.VARIABLES}
    ours = (name for name in sorted(os.environ) if name.startswith("DEEP_TILE_"))
    unread = [name for name in ours if name not in known and not name.startswith("DEEP_TILE_TEST_")]
    return ("warn", f"nobody reads {', '.join(unread)}") if unread else ("ok", "no others of DEEP_TILE_")


def _look_at_engine(engine: engines.Engine) -> Callable[[], tuple[str, ...]]:
    """Whether its processes are served: not a fault where nobody asked for it."""

    def look() -> tuple[str, ...]:
        version = engines.installed_version(engine)
        is_hooked, said, remedy = engines.state(engine, version)
        is_wanted = bool(os.environ.get(engine.variable))
        return ("warn" if is_wanted and not is_hooked else "ok"), f"{version}, {said}", remedy

    return look


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


def _to_compile(look: Callable[[], tuple[str, ...]]) -> Callable[[], tuple[str, ...]]:
    """The same, and only a warning where packaged kernels do without a compiler."""

    def look_again() -> tuple[str, ...]:
        if jit.serving_contents() is None:
            return look()
        try:
            return look()
        except (ImportError, RuntimeError, metadata.PackageNotFoundError) as error:
            return "warn", f"{error}; packaged kernels do without, other configs and casts cannot be compiled"

    return look_again


def _look_at_packaged() -> tuple[str, str]:
    brought = packaged.contents()
    if brought is None:
        return "ok", "none: kernels are compiled here"
    if not settings.packaged_kernels():
        return "warn", f"{settings.PACKAGED_KERNELS.name} is 0: {packaged_text(brought)}, but are not taken"
    if jit.driver_is_older(brought.nvrtc_version):
        cuda = brought.nvrtc_version.partition(".")[0]
        return "ok", f"not taken: the driver is older than CUDA {cuda}, so kernels are compiled here"
    return "ok", packaged_text(brought)


def _look_at_bindings() -> tuple[str, str]:
    return "ok", f"{metadata.version('cuda-core')}, cuda-bindings {metadata.version('cuda-bindings')}"


def _look_at_nvrtc() -> tuple[str, ...]:
    version = jit.nvrtc_version()
    if not jit.is_tested(version):
        first, last = sass.TESTED_NVRTC[0], sass.TESTED_NVRTC[-1]
        return "warn", f"{version}; deep_tile is tested with {first} to {last}: `{PROGRAM} compile` checks every kernel"
    if not jit.driver_is_older(version):
        return "ok", version
    driver = _cuda_version(_launcher.driver_version())
    return "warn", f"{version}; the driver knows CUDA {driver} only and may refuse its kernels", INSTALL_NVRTC


def _look_at_tuned() -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        count = len(tuned.choices(hardware.H200.num_sms))
    if complaints:
        return "warn", str(complaints[0].message)
    return "ok", f"{count} for {hardware.H200.num_sms} SMs"


def _look_at_compiler() -> tuple[str, str]:
    built = [build(plan.config_for(problem)) for problem in DOCTORS_KERNELS]
    for kernel in built:
        if kernel.divergence:
            return "fail", jit.divergence_text(kernel.config.name, kernel.divergence)
    for kernel in built:
        if kernel.usage.flawed:
            return "warn", f"{kernel.config.name} spills, or ptxas remarks on it; `{PROGRAM} compile` says more"
    return "ok", "; ".join(f"{kernel.config.name} in {kernel.seconds:.2f} s" for kernel in built)


def _look_at_cache() -> tuple[str, ...]:
    variable = settings.DUMP_DIR.name
    if settings.dump_dir() is not None:
        return "warn", f"{variable} is set, so every kernel is compiled and none is cached", f"unset {variable}"
    config = plan.config_for(DOCTORS_PROBLEM)
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            jit.load_cubin(kernel_source(config), config.name)
        except (ImportError, RuntimeError) as error:
            return "fail", f"no kernel to keep there: {type(error).__name__}: {error}", _compiler_remedy()
    if complaints:
        return "warn", str(complaints[0].message)
    return "ok", cache_text()


def _look_at_product() -> tuple[str, str]:
    from deep_tile.reference import MAX_RELATIVE_ERROR

    device = "cuda" if deep_tile.is_available()[0] else "cpu"
    m, n, k, *_ = DOCTORS_PROBLEM
    error = checked_error(m, n, k, device)
    text = f"{m}x{n}x{k} on {device}: relative error {error:.2e}, at most {MAX_RELATIVE_ERROR} allowed"
    return ("ok" if error <= MAX_RELATIVE_ERROR else "fail"), text
