"""What pyproject.toml cannot say: the C extension, where the CUDA headers go, and the README as an index shows it.

Called by pip. Building needs a C compiler and setuptools alone: no torch, no CUDA toolkit, no libcuda. The headers stay
in include/ in a checkout and travel in the wheel as deep_tile/include/deep_tile/, so codegen.py finds them in
`include/deep_tile/` beside the package or inside it. One wheel does for every Python from 3.10 on, but for those
without a GIL, of which each has its own: Python's limited API is not theirs.
"""

import re
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent
OLD_GLIBC = ROOT / "csrc" / "glibc.h"
HEADERS = "deep_tile.include.deep_tile"
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")


def readme() -> str:
    """With absolute links and images, since an index has none of our folders."""
    repository = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{repository}/raw/main/", (ROOT / "README.md").read_text())
    return re.sub(r"(?<=\]\()(?!https?:|#)", f"{repository}/blob/main/", text)


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
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["deep_tile", "deep_tile.*"]), HEADERS],
    package_dir={HEADERS: "include/deep_tile"},
    package_data={
        HEADERS: ["*.cuh"],
        "deep_tile.select": ["times/*.json"],
        "deep_tile.method": ["*.json"],
        "deep_tile": ["py.typed", "*.pyi", "kernels/*"],
        "deep_tile.compat": ["*.pyi"],
        "deep_tile.integrations": ["*.pyi"],
    },
    ext_modules=[launcher],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_GIL else {},
)
