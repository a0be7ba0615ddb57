"""Kernels' text as C++ for a CPU: assembly replaced, compiled with host_cuda.h or host_warp.h, loaded."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

LOADS = {
    r'asm volatile\("ld\.shared\..*?: "memory"\);': "value = *reinterpret_cast<decltype(value)*>(host_smem(smem));"
}
"""Replacement of loads from shared memory."""

STORAGE = """
alignas(1024) char storage[232448];
inline unsigned long long host_address(const void* at) { return static_cast<const char*>(at) - storage; }
inline char* host_smem(unsigned smem) { return storage + smem; }
"""
"""Shared memory of a program with its assembly replaced."""


def without_assembly(text: str, replacements: Mapping[str, str], flags: int = 0) -> str:
    """The text with each pattern replaced; each must occur."""
    for pattern, replacement in replacements.items():
        text, count = re.subn(pattern, replacement, text, flags=flags)
        assert count, pattern
    return text


def load(folder: Path, text: str) -> ctypes.CDLL:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    source, made = folder / "on_host.cpp", folder / "on_host.so"
    source.write_text(text)
    command = ["c++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{Path(__file__).parent}"]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))
