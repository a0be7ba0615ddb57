"""Calls on CPU tensors that pass for GPU tensors, in a process of its own in which fake_driver.c is the driver.

`run_pretending` runs code there and returns what it showed and which kernels it launched, with their parameters. That
covers the whole host path but torch's CUDA streams. conftest.py offers its fixtures to all tests.
"""

import atexit
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from deep_tile import params
from deep_tile.params import Params

TESTS = Path(__file__).resolve().parent
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")


def elf(size: int, sections_at: int = 64, sections: int = 0) -> bytes:
    """An ELF header with a section table, padded to `size` bytes."""
    header = struct.pack(
        "<4s12xHHIQQQIHHHHHH", b"\x7fELF", 2, 190, 1, 0, 64, sections_at, 0, 64, 56, 0, 64, sections, 0
    )
    return header.ljust(size, b"\0")


WHOLE_CUBIN = elf(size=256, sections=3)

LETTERS = {"int": "i", "unsigned": "I", "long long": "q", "float": "f"}


@pytest.fixture(scope="session")
def fake_driver(made_once, run_folder) -> Path:
    def build() -> Path:
        library = run_folder / "libcuda.so.1"
        source = TESTS / "fake_driver.c"
        options = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*COMPILER, *options, "-o", library, source, "-ldl"], check=True)
        return library

    return made_once("fake_driver", build)


def params_of(line: str) -> bytes:
    """The kernel's argument, of a line that shows a launch."""
    return bytes.fromhex(re.search(r" params (\w+)", line)[1])


def unpack(table: Params, data: bytes) -> dict[str, int | float | bytes]:
    """Every field's value by name; of tensor maps the bytes."""
    values = {}
    for field in table.fields:
        at = table.offsets[field.name]
        part = data[at : at + field.size]
        letter = "Q" if field.is_pointer else LETTERS.get(field.type)
        values[field.name] = part if letter is None else struct.unpack(letter, part)[0]
    return values


SETUP = f"""
import ctypes, ctypes.util, json, os, signal, sys
import numpy as np
import torch
if "libcuda.so" in open("/proc/self/maps").read():
    sys.exit("torch has opened the real driver")
if ctypes.util.find_library("cuda") is None:
    torch.cuda.is_available()  # CUDA's runtime looks for a driver once; the fake one, which it would call, comes later
fake = ctypes.CDLL(os.environ["FAKE_DRIVER"], mode=ctypes.RTLD_GLOBAL)
torch.set_num_threads(1)  # a child process has none of its parent's threads
sys.path.insert(0, {str(TESTS)!r})
from helpers import make_operands
from deep_tile import GemmConfig, _launcher, cast, checks, fp8_gemm, launches, plan, prepare, quantize
from deep_tile.dense import FP8_GEMM
from deep_tile.operation import Operation

# The facts that need a GPU.
Operation.is_on_gpu = staticmethod(lambda x: True)
checks.check_hopper = checks.check_capture = lambda *ignored: None
launches.is_hopper = lambda device: True
plan.load_kernel = lambda config, device: _launcher.load({WHOLE_CUBIN!r}, config.name, config.smem_bytes, 0)
torch._C._cuda_getCurrentRawStream = lambda device: 0x57

paths = []  # what a call did: prepare a launch, launch
def note(module, name):
    function = getattr(module, name)
    def noting(*args, **kwargs):
        result = function(*args, **kwargs)
        if result is not False:
            paths.append(name)
        return result
    setattr(module, name, noting)
for module, name in ((_launcher, "launch"), (_launcher, "launch_known"), (plan, "prepare_launch"),
                     (cast, "prepare_launch")):
    note(module, name)

def show(*what):
    print("=", *what, flush=True)
def attempt(call, *args, **kwargs):
    paths.clear()
    try:
        call(*args, **kwargs)
        show(*paths)
    except (TypeError, ValueError, RuntimeError) as error:
        show(type(error).__name__, error, *paths)

# Not all dense, so that the strides can change.
a, a_scale, b, b_scale = make_operands(5, 128, 256, seed=1)
out = torch.zeros(6, 136, dtype=torch.bfloat16)[:5, :128]
good = {{"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out": out}}
"""


FORK_FOR_EACH_PROGRAM = """
print("ended 0", flush=True)
while program := sys.stdin.readline():
    child = os.fork()
    if not child:
        signal.alarm(600)
        exec(json.loads(program))
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""
"""Programs are lines of JSON, each run in a fork of the process that has run SETUP: none sees another's changes, and
none pays for importing torch."""


def lines_of_a_program(process: subprocess.Popen) -> list[str]:
    """Lines that the process prints until the program, or SETUP, has ended."""
    lines = []
    while not lines or not re.match("ended|$", lines[-1]):
        lines.append(process.stdout.readline())
    if any("torch has opened the real driver" in line for line in lines):
        pytest.skip("this torch opens the real driver when it is imported")
    assert lines[-1] == "ended 0\n", "".join(lines)
    return lines


class Launched(NamedTuple):
    """A kernel launch: the driver's call, and the fields of the kernel's argument."""

    line: str
    params: dict[str, int | bytes]

    def map_address(self, name: str) -> int:
        return int.from_bytes(self.params[name][:8], "little")


@pytest.fixture(scope="session")
def run_pretending(fake_driver):
    """Run code after SETUP. Returns the lines that it showed and the kernels that it launched, whose argument is
    `of`."""

    def run(code: str, of: params.Params = params.GEMM) -> tuple[list[str], list[Launched]]:
        code = f'ctypes.c_uint.in_dll(fake, "fake_params_bytes").value = {of.size}\n{code}'
        print(json.dumps(code), file=process.stdin, flush=True)
        lines = lines_of_a_program(process)
        shown = [line.removeprefix("=").strip() for line in lines if line.startswith("=")]
        launches = [line for line in lines if line.startswith("cuLaunchKernelEx")]
        return shown, [Launched(line, unpack(of, params_of(line))) for line in launches]

    process = pretending_process(fake_driver)
    return run


@cache
def pretending_process(driver: Path) -> subprocess.Popen:
    """The process that has run SETUP: one for all test modules. It ends with this process."""
    command = [sys.executable, "-c", SETUP + FORK_FOR_EACH_PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"FAKE_DRIVER": str(driver)}, **pipes)
    atexit.register(process.communicate)  # closes its input, and waits
    lines_of_a_program(process)
    return process


WITHOUT_DLPACK = """
_launcher.launch_known, _launcher.signature = lambda *ignored: False, lambda *ignored: None
"""
"""Code that makes torch look as if it had no DLPack C exchange API."""

EITHER_WAY = pytest.mark.parametrize(
    ("setup", "path"), [("", "launch_known"), (WITHOUT_DLPACK, "launch")], ids=["dlpack", "without dlpack"]
)
EITHER_SETUP = pytest.mark.parametrize("setup", ["", WITHOUT_DLPACK], ids=["dlpack", "without dlpack"])
