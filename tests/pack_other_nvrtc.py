"""Packs kernels that another NVRTC than the installed one has made, for GPU tests and benchmarks to run with once:

    PYTHONPATH=. python tests/pack_other_nvrtc.py 13.5.37 deep_tile/kernels

They are those of a wheel (deep_tile/tools/pack.py) and of default_kernels.py. The folder is taken before cache and
compiler, goes wherever the checkout goes, and is git's to ignore; `deep-tile doctor` then says whose kernels serve.
Remove it afterwards. What is not in it, such as a kernel that spills, the installed NVRTC compiles. No GPU; ten minutes
of one core.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import other_nvrtc
from default_kernels import EVERY_CONFIG

from deep_tile import jit, packaged, sass
from deep_tile.codegen import kernel_source
from deep_tile.tools import pack

LIBRARIES = Path(__file__).resolve().parent.parent / ".pytest_cache" / "d" / "nvrtc"
"""The folder that test_compilers.py uses, too."""


def sources() -> dict[str, str]:
    """Kernel sources by name."""
    return pack.default_sources() | {config.name: kernel_source(config) for config in EVERY_CONFIG}


def finished(kernel: jit.Compiled, version: str) -> bytes:
    """The cubin, with our hints where jit.py would set them."""
    return sass.quicken_promotion(kernel.cubin) if jit.is_tested(version) else kernel.cubin


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pack kernels made by another NVRTC.")
    parser.add_argument("version", help="as pip has it, such as 13.5.37")
    parser.add_argument("folder", type=Path, help="where to; it must not exist")
    options = parser.parse_args(arguments)
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    texts = sources()
    kernels = other_nvrtc.compile_kernels(other_nvrtc.fetch(options.version, LIBRARIES), texts)
    flawed = {name for name, made in kernels.items() if jit.resource_usage(made.log).flawed or made.divergence}
    for name in sorted(flawed):
        print(f"{name} is left out: {', '.join(kernels[name].divergence) or jit.resource_usage(kernels[name].log)}")
    good = {name: made for name, made in kernels.items() if name not in flawed}
    cubins = {jit.identity(texts[name]): finished(made, options.version) for name, made in good.items()}
    made = packaged.write(cubins, options.version, options.folder)
    print(f"{made.kernels} kernels of NVRTC {options.version}, {made.size_bytes / 1e6:.1f} MB, in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
