"""Compile kernels by another NVRTC than the installed one: the library of a wheel, in a process of its own.

Called by test_compilers.py. Nothing is installed: of the wheel, the library alone is kept, in a folder that the caller
names. It is called through ctypes, because the installed cuda.core knows NVRTC of one CUDA version only. The options
are jit.py's.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from deep_tile import jit


class NoWheel(Exception):
    """pip cannot get the wheel; the message is pip's."""


def fetch(version: str, folder: Path) -> Path:
    """The library of an NVRTC, such as '13.2.86': in `folder`, or else downloaded to it.

    Raises:
        NoWheel: there is no network, no pip, or no such wheel.
    """
    libraries = folder / version
    if not libraries.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _unpack(_download(version, Path(scratch)), Path(scratch, "libraries")).rename(libraries)
    (library,) = libraries.glob("libnvrtc.so.*")
    return library


def _download(version: str, folder: Path) -> Path:
    """Download the wheel without its dependencies."""
    package = "nvidia-cuda-nvrtc-cu12" if version.startswith("12.") else "nvidia-cuda-nvrtc"
    options = ("--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=15", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, f"{package}=={version}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise NoWheel(f"pip cannot get {package}=={version}: {finished.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if re.search(r"/libnvrtc(-builtins)?\.so[^/]*$", name):
                (folder / Path(name).name).write_bytes(files.read(name))
    return folder


def compile_kernels(library: Path, sources: Mapping[str, str]) -> dict[str, jit.Compiled]:
    """Kernels by name, as this NVRTC makes them, without our hints; on all cores.

    Raises:
        RuntimeError: one does not compile; the message is the log.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in sources.items():
            Path(scratch, f"{name}.cu").write_text(source)
        paths = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
        environment = os.environ | {"LD_LIBRARY_PATH": paths, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, library, scratch]
        finished = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if finished.returncode:
            raise RuntimeError(finished.stderr)
        return {name: _read(Path(scratch, name)) for name in sources}


def _read(stem: Path) -> jit.Compiled:
    files = [stem.with_suffix(suffix).read_bytes() for suffix in (".cubin", ".log", ".seconds")]
    return jit.Compiled(files[0], files[1].decode(), float(files[2]))


# ---- in the process that loads the library


def _compile_folder(library: Path, folder: Path) -> None:
    """Write .cubin, .log and .seconds beside each .cu."""
    nvrtc = ctypes.CDLL(str(library))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(_compile, nvrtc, _options()), folder.glob("*.cu")))


def _options() -> list[bytes]:
    from cuda.core import ProgramOptions

    return ProgramOptions(**jit._OPTIONS).as_bytes("nvrtc", "cubin")


def _compile(nvrtc: ctypes.CDLL, options: list[bytes], path: Path) -> None:
    start = time.perf_counter()
    program = ctypes.c_void_p()
    source = path.read_bytes()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, path.stem.encode(), 0, None, None))
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).strip(b"\0 \n")
    if result:
        raise RuntimeError(f"{path.stem}: {log.decode()}")
    path.with_suffix(".log").write_bytes(log)
    path.with_suffix(".cubin").write_bytes(_output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program))
    path.with_suffix(".seconds").write_text(str(time.perf_counter() - start))
    _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))


def _output(get_size, get, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(get(program, text))
    return text.raw


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC returned {result}")


if __name__ == "__main__":
    _compile_folder(*map(Path, sys.argv[1:]))
