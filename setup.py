"""What pyproject.toml cannot say: the C extension, and where the CUDA headers go.

Called by pip. Building needs a C compiler and setuptools alone: no torch, no CUDA toolkit, no libcuda. The headers stay
in include/ in a checkout and travel in the wheel as deep_tile/include/deep_tile/, so codegen.py finds them in
`include/deep_tile/` beside the package or inside it. One wheel does for every Python from 3.10 on, but for those
without a GIL, of which each has its own: Python's limited API is not theirs.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

OLD_GLIBC = Path(__file__).resolve().parent / "csrc" / "glibc.h"
HEADERS = "deep_tile.include.deep_tile"
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")

launcher = Extension(
    "deep_tile._launcher",
    sources=["csrc/driver.c", "csrc/tensors.c", "csrc/launch.c"],
    depends=["csrc/launcher.h", "csrc/driver.h", "csrc/dlpack.h", "csrc/glibc.h"],
    libraries=["dl"],
    extra_compile_args=[
        "-std=c11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-fvisibility=hidden",
        "-pthread",
        f"-include{OLD_GLIBC}",
    ],
    extra_link_args=["-pthread"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if HAS_GIL else [],
    py_limited_api=HAS_GIL,
)

setup(
    packages=[*find_packages(include=["deep_tile", "deep_tile.*"]), HEADERS],
    package_dir={HEADERS: "include/deep_tile"},
    package_data={
        HEADERS: ["*.cuh"],
        "deep_tile.select": ["times/*.json"],
        "deep_tile.method": ["*.json"],
        "deep_tile": ["_launcher.pyi", "kernels/*"],
    },
    ext_modules=[launcher],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_GIL else {},
)
