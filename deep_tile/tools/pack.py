"""Compiles the kernels that a wheel contains: `python -m deep_tile.tools.pack FOLDER`, called by `make dist`.

Every kernel that the selector and the casts can choose by themselves, compiled by the NVRTC at hand. Exits with 1 if
NVRTC is not the named version, or if a kernel spills, draws a ptxas remark or may hang. No GPU, no torch.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deep_tile import cast, jit, logits_launch, packaged, parts
from deep_tile.codegen import kernel_source, streaming_source
from deep_tile.progress import track_progress
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import all_grouped_configs
from deep_tile.tools.compile import mib


def default_sources() -> dict[str, str]:
    configs = (*default_configs(True), *default_configs(False), *all_grouped_configs())
    gemms = {config.name: kernel_source(config) for config in configs}
    others = (*cast.all_kernels(), *parts.all_kernels(), *logits_launch.default_kernels())
    return gemms | {kernel.name: streaming_source(kernel) for kernel in others}


def compiled(sources: dict[str, str], workers: int) -> Iterable[tuple[str, jit.Compiled]]:
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(sources, pool.map(jit.compile_kernel, sources.values(), sources), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deep_tile.tools.pack", description="Pack the default kernels.")
    parser.add_argument("folder", type=Path, help="where to; it must not exist")
    parser.add_argument("--nvrtc", help="the only version that is allowed")
    options = parser.parse_args(arguments)
    version = jit.nvrtc_version()
    if options.nvrtc not in (None, version):
        print(f"pack: NVRTC is {version}, wanted {options.nvrtc}; install that version", file=sys.stderr)
        return 1
    sources, cubins, flaws = default_sources(), {}, []
    for name, result in track_progress(compiled(sources, os.cpu_count() or 1), "Compiling", len(sources)):
        if jit.resource_usage(result.log).flawed or result.divergence:
            flaws.append(name)
        cubins[jit.identity(sources[name])] = result.cubin
    if flaws:
        print(
            f"pack: {', '.join(flaws)}: spills, remarks of ptxas or warps that fall apart; not shipped", file=sys.stderr
        )
        return 1
    made = packaged.write(cubins, version, options.folder)
    print(f"{made.kernels} kernels of NVRTC {version}, {mib(made.size_bytes)}, in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
