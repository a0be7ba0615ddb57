"""`compile` and `cache`: kernels with ptxas's report, and the cache directory.

No GPU, no torch.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import NamedTuple

from rich.table import Table

from deep_tile import jit, packaged, plan, settings
from deep_tile.codegen import kernel_source
from deep_tile.config import GemmConfig
from deep_tile.method import report
from deep_tile.problem import GemmProblem
from deep_tile.progress import track_progress
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import all_grouped_configs, grouped_configs
from deep_tile.tools.console import PROGRAM, new_console

NEARLY_FULL = 0.9
"""Share of the cache's limit beyond which kernels may not all stay, since checksums and temporary files count too."""


class Built(NamedTuple):
    config: GemmConfig
    seconds: float
    usage: jit.ResourceUsage
    size_bytes: int
    divergence: tuple[str, ...]


def compile_kernels(options: argparse.Namespace) -> int:
    configs = wanted_configs(options)
    dump_dir = settings.dump_dir()
    built = build_all(configs, options.jobs, store=dump_dir is None)
    console = new_console()
    console.print(kernel_table(built), "")
    console.print(f"{len(built)} kernels for sm_90a, {sum(kernel.seconds for kernel in built):.1f} s of compiling")
    if dump_dir:
        console.print(f"Written to {dump_dir}; the cache was left alone.")
        return report_flaws(built)
    console.print(f"Cache: {cache_text()}.")
    return max(report_flaws(built), _report_lost(built))


def wanted_configs(options: argparse.Namespace) -> list[GemmConfig]:
    """The configs to compile: defaults, with or only grouped ones, or those for given shapes; each with TMA store and
    without."""
    if options.grouping and options.shape:
        options.refuse("give --shape or --grouping; kernels of groups are the same for all shapes")
    if options.grouping:
        ways = product((True, False), (False, True) if options.grouping == "k_offs" else (False,))
        return [config for way in ways for config in grouped_configs(options.grouping, *way)]
    configs = [] if options.shape else [*all_grouped_configs()]
    for tma_store in (True, False):
        if not options.shape:
            configs += default_configs(tma_store)
        for n, k, max_m in options.shape:
            configs += plan.configs_for(GemmProblem(1, n, k, options.num_sms, tma_store), max_m)
    return list(dict.fromkeys(configs))


def build(config: GemmConfig, store: bool = False) -> Built:
    """Compile, cached or not, to get the log, which is not cached; `store` adds the kernel to the cache."""
    source = kernel_source(config)
    compiled = jit.compile_kernel(source, config.name)
    divergence = compiled.divergence
    if store and not divergence:
        jit.store_cubin(source, compiled.cubin)
    return Built(config, compiled.seconds, jit.resource_usage(compiled.log), len(compiled.cubin), divergence)


def build_all(configs: Sequence[GemmConfig], jobs: int, store: bool = False) -> list[Built]:
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(track_progress(pool.map(partial(build, store=store), configs), "Compiling", len(configs)))


def kernel_table(built: list[Built], uses: dict[GemmConfig, int] | None = None) -> Table:
    columns = ("compile s", "registers", "spilled bytes", "smem KiB")
    table = report.table("kernel", *columns, *(["shapes"] if uses else []), spare=("smem KiB", "compile s"))
    for config, seconds, usage, *_ in built:
        spilled = usage.spill_store_bytes + usage.spill_load_bytes
        row = (config.name, f"{seconds:.2f}", str(usage.registers), str(spilled), str(config.smem_bytes >> 10))
        table.add_row(*row, *([str(uses[config])] if uses else []))
    return table


def report_flaws(built: list[Built]) -> int:
    """Exit code 1 and a line for each kernel that may hang, that spills or that ptxas remarks on."""
    flawed = [kernel for kernel in built if kernel.usage.flawed]
    for config, _, usage, *_ in flawed:
        spills = f"{usage.spill_store_bytes} bytes spilled, {usage.spill_load_bytes} reloaded"
        print(f"{PROGRAM}: {'; '.join([f'{config.name}: {spills}', *usage.warnings])}", file=sys.stderr)
    divergent = [kernel for kernel in built if kernel.divergence]
    for kernel in divergent:
        print(f"{PROGRAM}: {jit.divergence_text(kernel.config.name, kernel.divergence)}", file=sys.stderr)
    if divergent:
        print(f"{PROGRAM}: none of these is loaded or cached. Remedy: {jit.divergence_remedy()}", file=sys.stderr)
    return 1 if flawed or divergent else 0


def _report_lost(built: list[Built]) -> int:
    """Exit code 1 and a remedy if the cache directory lacks a kernel."""
    kept = sum(jit.is_stored(kernel_source(kernel.config)) for kernel in built)
    if kept == len(built):
        return 0
    print(
        f"{PROGRAM}: the cache serves {kept} of these {len(built)} kernels to other processes. "
        f"To fix: {_storing_remedy(sum(kernel.size_bytes for kernel in built))}",
        file=sys.stderr,
    )
    return 1


def _storing_remedy(size_bytes: int) -> str:
    info = jit.cache_info()
    if info.directory is None:
        return f"set {settings.CACHE_DIR.name} to a directory; without one, kernels are kept in memory"
    if size_bytes >= info.limit_bytes * NEARLY_FULL:
        wanted = math.ceil(size_bytes / NEARLY_FULL / 2**20)
        return (
            f"set {settings.CACHE_MAX_MB.name} to {wanted} or more; kernels above {mib(info.limit_bytes)} are removed"
        )
    return (
        f"{info.directory} cannot be written, or something empties it; set {settings.CACHE_DIR.name} to a directory of "
        "your own, on a disk with space"
    )


# ---- cache


def show_cache(options: argparse.Namespace) -> int:
    new_console().print(f"Cache: {cache_text()}.")
    return 0


def clear_cache(options: argparse.Namespace) -> int:
    before = jit.cache_info()
    jit.clear_cache()
    new_console().print(f"Removed {_kernels(before.entries)}, {mib(before.size_bytes)}, from {_place(before)}.")
    return 0


def cache_text() -> str:
    info = jit.cache_info()
    held = f"{_kernels(info.entries)}, {mib(info.size_bytes)} of {mib(info.limit_bytes)}"
    served = "there is no NVRTC" if info.nvrtc_version is None else f"serves NVRTC {info.nvrtc_version}"
    before = "" if info.packaged is None else f"; before it, {packaged_text(info.packaged)}"
    return f"{_place(info)} holds {held}, and {served}{before}"


def _kernels(count: int) -> str:
    return f"{count} {'kernel' if count == 1 else 'kernels'}"


def packaged_text(brought: packaged.Contents) -> str:
    kernels = f"{brought.kernels} kernels of NVRTC {brought.nvrtc_version}, {mib(brought.size_bytes)}"
    return f"the package brings {kernels}, which serve whatever NVRTC there is"


def _place(info: jit.CacheInfo) -> str:
    return "the memory of this process" if info.directory is None else str(info.directory)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
