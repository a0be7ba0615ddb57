"""Kernel source to cubin: NVRTC, better scheduling hints (sass.py), and a disk cache in front of both.

Knows only text and bytes: no config, no torch, no driver and no GPU. cuda.core is imported by the functions that
compile, because its import costs more than a read from the cache.

Invariant: a cubin from the cache was compiled from this source (up to comments), with these options, hints and NVRTC:
its entry ends with a checksum over key and content. A cache that cannot be read, written or locked costs compilations,
never an error, with one exception: a directory that others may write to is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import io
import os
import re
import stat
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deep_tile import _launcher, packaged, sass, settings

if TYPE_CHECKING:
    from cuda.core.utils import FileStreamProgramCache

_OPTIONS = {
    "arch": "sm_90a",
    "std": "c++20",
    "device_as_default_execution_space": True,
    "ptxas_options": "-v",
}
"""Keyword arguments for `cuda.core.ProgramOptions`. No path, hence a cache that can be moved; -v logs the registers."""

_NO_CACHE_SINCE = (12, 9)
"""The NVRTC that began to cache by itself. NVRTC's own cache would return an empty log, so it is off; earlier versions
do not know the option."""

_LOG_PADDING = "\0 \n"
"""Padding that NVRTC leaves around logs."""


def fork_safe_lock() -> AbstractContextManager:
    """A lock that every fork takes first. So a child never inherits it from a thread that the child lacks."""
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


import_lock = fork_safe_lock()
"""Held while cuda.core is imported. Two threads that import cuda.core 1.2 at once get an ImportError, and a child that
is forked during an import waits for ever for its end."""

_LOCK_TIMEOUT_SECONDS = 60
"""How long to wait for another process that compiles the same kernel, before compiling it again: a hundred times its
usual duration."""


class Compiled(NamedTuple):
    """One compiler run. The cubin has our hints with `sass.TESTED_NVRTC`, where they are known to help."""

    cubin: bytes
    log: str
    seconds: float

    @property
    def divergence(self) -> tuple[str, ...]:
        """Instructions that handle divergent warps: a kernel with one may hang, and `load_cubin` refuses it."""
        return sass.divergence(self.cubin)


class ResourceUsage(NamedTuple):
    """What ptxas reports about a kernel, per thread; `warnings`: lines that say that it serialised WGMMAs, or changed
    the synchronisation around them (C75xx, C76xx)."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]

    @property
    def flawed(self) -> bool:
        """Whether the kernel, though right, is slower than it should be."""
        return bool(self.spill_store_bytes or self.spill_load_bytes or self.warnings)


class CacheInfo(NamedTuple):
    """The cache's state.

    Attributes:
        directory: None when the kernels are kept in memory.
        limit_bytes: above that size, kernels are removed.
        nvrtc_version: the compiler whose kernels it serves; None without one.
        packaged: the package's own kernels, which come first; None where there are none, or they are not wanted.
    """

    directory: Path | None
    entries: int
    size_bytes: int
    limit_bytes: int
    nvrtc_version: str | None
    packaged: packaged.Contents | None


class CompileError(RuntimeError):
    """NVRTC could not compile a kernel (the message has its version, log, options and the saved source's path), or
    compiled one that may hang."""


class DivergenceError(CompileError):
    """NVRTC made a kernel with `Compiled.divergence`."""


def load_cubin(source: str, name: str) -> bytes:
    """The cubin for `source`: from the package, else the cache, else compiled and stored. Safe for concurrent threads
    and processes.

    Args:
        source: CUDA C++ text with one `extern "C"` kernel and no includes.
        name: the kernel's name; it labels messages and files, and does not tell kernels apart.

    Raises:
        CompileError: NVRTC refused the source.
        DivergenceError: its code lets warps fall apart that wait at barriers.
        RuntimeError: NVRTC is missing and the cache has no such kernel.
        PermissionError: somebody else may write to the cache directory.
        ValueError: an environment variable cannot be used, such as a DEEP_TILE_DUMP_DIR that cannot be written.
    """
    if settings.dump_dir() is not None:
        return _compile_uniform(source, name)  # a cached cubin has no PTX and no log to write
    own_identity = identity(source)
    cubin = _packaged_cubin(own_identity)
    if cubin is not None:
        return cubin
    kernels = _cache()
    kernels.prepare()
    key = _key(own_identity)
    return kernels.get(key) or _compile_once(kernels, key, source, name)


def store_cubin(source: str, cubin: bytes) -> None:
    """Store a cubin that `compile_kernel` made from `source`, without divergence; errors as for `is_stored`, which says
    whether it stays."""
    kernels = _cache()
    kernels.prepare()
    kernels.put(_key(identity(source)), cubin)


def is_stored(source: str) -> bool:
    """Whether the cache directory, which other processes share, or the package holds the cubin for `source`.

    Raises:
        PermissionError: somebody else may write to the cache directory.
    """
    own_identity = identity(source)
    return _packaged_cubin(own_identity) is not None or _cache().holds(_key(own_identity))


def is_packaged(source: str) -> bool:
    """Whether the package holds a usable cubin for `source`."""
    return _packaged_cubin(identity(source)) is not None


def _packaged_cubin(own_identity: bytes) -> bytes | None:
    return None if serving_contents() is None else packaged.get(own_identity)


def serving_contents() -> packaged.Contents | None:
    """Contents of the packaged kernels, if usable. A driver with an older CUDA major version than their compiler cannot
    load them: kernels are then compiled by the matching NVRTC."""
    brought = packaged.contents() if settings.packaged_kernels() else None
    return None if brought is None or driver_is_older(brought.nvrtc_version) else brought


def driver_is_older(nvrtc_version: str) -> bool:
    try:
        driver = _launcher.driver_version()
    except RuntimeError:
        return False
    return driver // 1000 < int(nvrtc_version.split(".")[0])


def _compile_once(kernels: _KernelCache, key: bytes, source: str, name: str) -> bytes:
    with kernels.lock(key):
        cubin = kernels.get(key)  # whoever held the lock may have stored it
        if cubin is None:
            cubin = _compile_uniform(source, name)
            kernels.put(key, cubin)
        return cubin


def _compile_uniform(source: str, name: str) -> bytes:
    """Raises DivergenceError instead of returning a kernel that may hang."""
    compiled = compile_kernel(source, name)
    if compiled.divergence:
        raise DivergenceError(f"{divergence_text(name, compiled.divergence)}. Remedy: {divergence_remedy()}")
    return compiled.cubin


def divergence_text(name: str, divergence: tuple[str, ...]) -> str:
    more = f" and {len(divergence) - 1} more" if len(divergence) > 1 else ""
    return f"{name} may hang: NVRTC {nvrtc_version()} compiles it with divergent warps ({divergence[0]}{more})"


TESTED_WHEELS = {"12": "nvidia-cuda-nvrtc-cu12==12.9.86", "13": "nvidia-cuda-nvrtc==13.0.88"}
"""NVRTC wheels by CUDA major version: the measured one, or one with nearly the same code."""


def divergence_remedy() -> str:
    """A tested NVRTC, unless this is one, and a kernel known to be good."""
    version = nvrtc_version()
    wheel = TESTED_WHEELS.get(version.split(".")[0], TESTED_WHEELS["13"])
    if wheel.partition("==")[2].startswith(version):
        return "another config"
    return f"pip install {wheel}, which deep_tile is tested with, or another config"


def is_tested(version: str) -> bool:
    """Whether deep_tile is tested with this NVRTC version, such as '13.0.88' or '13.0'."""
    return ".".join(version.split(".")[:2]) in sass.TESTED_NVRTC


def compile_kernel(source: str, name: str) -> Compiled:
    """Compile `source` with NVRTC, whatever the cache holds. Arguments and errors as for `load_cubin`, except that a
    kernel with `divergence` is returned, for the caller to refuse.

    NVRTC holds neither the GIL nor its own lock: on 2 cores eight kernels take 1.2 s with one thread and 0.7 s with two
    (NVRTC 13.0.88).
    """
    _refuse_forbidden(name)
    version, (Program, ProgramOptions) = _loaded_nvrtc_version(), _compiler()  # a missing one is not a compile error
    options = ProgramOptions(name=name, no_cache=tuple(map(int, version.split("."))) >= _NO_CACHE_SINCE, **_OPTIONS)
    log = io.StringIO()
    start = time.perf_counter()
    try:
        with _outliving_the_interpreter(name):
            program = Program(source, "c++", options=options)
            cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        if not _is_of_compiler(error):
            raise
        flags = b" ".join(options.as_bytes("nvrtc", "cubin")).decode()
        raise CompileError(_compile_error_text(source, name, flags, str(error))) from None
    if is_tested(version):
        cubin = sass.quicken_promotion(cubin)
    compiled = Compiled(cubin, log.getvalue().strip(_LOG_PADDING), time.perf_counter() - start)
    _count_compilation()
    directory = settings.dump_dir()
    if directory is not None:
        _dump(directory / name, source, _ptx(program), compiled)
    return compiled


def _is_of_compiler(error: Exception) -> bool:
    """Whether cuda.core raised the error, and not a signal handler (timeouts use one). The type does not tell:
    cuda.core's class for compile errors is not public, and some of its errors are Python's own."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(name.partition(".")[0] == "cuda" for name in (type(error).__module__, frame.f_globals["__name__"]))


_compiling: set[threading.Thread] = set()
"""Threads within NVRTC. A forked child has none of its parent's threads."""

os.register_at_fork(after_in_child=_compiling.clear)

_is_ending = False


@contextlib.contextmanager
def _outliving_the_interpreter(name: str) -> Iterator[None]:
    """Have the interpreter's end wait for this thread: a daemon's NVRTC would go on without its library's memory, and
    end the process by a segmentation fault."""
    thread = threading.current_thread()
    _compiling.add(thread)  # first: the end sets `_is_ending`, then looks here
    try:
        if _is_ending and thread is not threading.main_thread():  # the main thread ends after exit hooks
            raise RuntimeError(f"{name} would have to be compiled, while the interpreter ends")
        yield
    finally:
        _compiling.discard(thread)


@atexit.register
def _wait_for_compilers() -> None:
    global _is_ending
    _is_ending = True
    while _compiling - {threading.current_thread()}:
        time.sleep(0.01)


def _compile_error_text(source: str, name: str, flags: str, log: str) -> str:
    try:
        with tempfile.NamedTemporaryFile("wb", prefix=f"{name}_", suffix=".cu", delete=False) as file:
            file.write(source.encode())
        place = f"saved as: {file.name}"
    except OSError as error:
        place = f"not saved: {error}"
    return f"NVRTC {nvrtc_version()} cannot compile {name}\noptions: {flags}\nsource {place}\n{log.strip(_LOG_PADDING)}"


_compilations = 0
_state_lock = fork_safe_lock()


def _count_compilation() -> None:
    global _compilations
    with _state_lock:
        _compilations += 1


class forbid_compilation:  # noqa: N801, as torch.set_grad_enabled
    """Forbid compiling kernels in this process from now on: for serving, after everything has been precompiled.

    A call whose kernel is neither loaded, nor in the cache directory, nor in the wheel then raises RuntimeError instead
    of compiling it; nothing is launched. Loading compiled kernels stays allowed; it takes about a millisecond.

    Call it as a function, or use it as a context manager, which restores the previous state. Holds for all threads.

    Args:
        forbid: False to allow compilations again.

    Raises:
        TypeError: `forbid` is no bool.
    """

    def __init__(self, forbid: bool = True):
        global _forbidden
        if not isinstance(forbid, bool):
            raise TypeError(f"forbid is {forbid!r}; pass True or False")
        self._before, _forbidden = _forbidden, forbid

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        global _forbidden
        _forbidden = self._before


_forbidden = False


def _refuse_forbidden(name: str) -> None:
    if _forbidden:
        raise RuntimeError(
            f"{name} would have to be compiled, which deep_tile.forbid_compilation() forbids. Before that, call "
            "deep_tile.precompile with this weight's (n, k, max_m), or deep_tile.precompile_model; with a config= of "
            "your own, the product itself"
        )


def compilations() -> int:
    """Return how many kernels this process has compiled so far. Kernels from the cache or the wheel do not count."""
    return _compilations


def resource_usage(log: str) -> ResourceUsage:
    """Parse the log from `compile_kernel`. Functions that were not inlined count: their spills are added up.

    Raises:
        ValueError: the log says nothing about registers, so it does not come from `compile_kernel`.
    """
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not (registers and frames):
        raise ValueError(f"log: wanted the output of ptxas -v, as compile_kernel returns it; got {log!r}")
    stack, stores, loads = zip(*(map(int, frame) for frame in frames), strict=True)
    remarks = tuple(line.strip() for line in log.splitlines() if re.search(r"\bC7[56]\d\d\b", line))
    return ResourceUsage(max(registers), sum(stores), sum(loads), max(stack), remarks)


def _ptx(program) -> bytes:
    """PTX from a compiled cuda.core.Program. Its own `compile("ptx")` would compile again, and ask the driver."""
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return bytes(text.rstrip(b"\0"))


def _dump(stem: Path, source: str, ptx: bytes, compiled: Compiled) -> None:
    cubin = stem.with_suffix(".cubin")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".cu").write_bytes(source.encode())
        stem.with_suffix(".ptx").write_bytes(ptx)
        stem.with_suffix(".log").write_bytes(compiled.log.encode())
        cubin.write_bytes(compiled.cubin)
    except OSError as error:
        seen = f"{stem.parent}: {error.strerror}"
        raise settings.bad_value(settings.DUMP_DIR, seen, "a directory that can be written") from error
    listing = disassemble(cubin)
    if listing is not None:
        stem.with_suffix(".sass").write_bytes(listing)


def disassemble(cubin: Path) -> bytes | None:
    """SASS of a compiled kernel; None without nvdisasm."""
    from cuda.pathfinder import find_nvidia_binary_utility

    disassembler = find_nvidia_binary_utility("nvdisasm")
    if disassembler is None:
        return None
    return subprocess.run([disassembler, "--print-code", cubin], stdout=subprocess.PIPE, check=True).stdout


@cache
def nvrtc_version() -> str:
    """The compiling NVRTC's version: '13.0.88', or '13.0' if it does not come from a wheel, which is asked first:
    loading the library takes 6 ms, 50 ms when not in memory. Raises RuntimeError where NVRTC is missing."""
    wheel = _nvrtc_wheel()
    return wheel.version if wheel else _loaded_nvrtc_version()


@cache
def _nvrtc_wheel() -> metadata.Distribution | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        major = metadata.version("cuda-bindings").split(".")[0]
        return metadata.distribution("nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc")
    return None


def _loaded_nvrtc_version() -> str:
    try:
        with import_lock:
            from cuda.bindings import nvrtc

        _load_wheels_nvrtc()
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise _missing_compiler(error) from error
    return f"{major}.{minor}"


def _compiler() -> tuple[type, type]:
    try:
        with import_lock:
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise _missing_compiler(error) from error
    return Program, ProgramOptions


def _missing_compiler(error: Exception) -> RuntimeError:
    seen, remedy = "and the library or its Python binding is missing", ""
    if isinstance(error, ImportError) and not isinstance(error, ModuleNotFoundError):
        seen = f"whose Python binding cannot be imported: {error}"  # as after a Ctrl-C amid the import
        remedy = "start another process, since none can repeat an import that was interrupted; or "
    return RuntimeError(
        f"deep_tile compiles its kernels with NVRTC, {seen}. "
        f'Remedy: {remedy}pip install "deep_tile[cu13]" (with a PyTorch for CUDA 12: "deep_tile[cu12]")'
    )


@cache
def _load_wheels_nvrtc() -> None:
    """Load the wheel's libraries for the bindings, and NVRTC's builtins, which search only site-packages, not
    PYTHONPATH or .pth folders."""
    wheel = _nvrtc_wheel()
    for file in (wheel and wheel.files) or ():
        if re.fullmatch(r"libnvrtc(-builtins)?\.so\.[\d.]+", file.name):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(file.locate()))


def cache_info() -> CacheInfo:
    """The cache's location, contents and limit. Creates nothing."""
    kernels = _cache()
    sizes, brought = kernels.entry_sizes(), serving_contents()
    return CacheInfo(kernels.directory, len(sizes), sum(sizes), kernels.limit_bytes, _nvrtc_version_if_any(), brought)


def _nvrtc_version_if_any() -> str | None:
    with contextlib.suppress(RuntimeError):
        return nvrtc_version()
    return None


def compiler_text() -> str:
    """The kernels' compiler, in words. Raises RuntimeError where there is neither NVRTC nor a packaged kernel."""
    brought = serving_contents()
    if brought is None:
        return f"NVRTC {nvrtc_version()}"
    compiler = _nvrtc_version_if_any()
    others = f"NVRTC {compiler} for others" if compiler else "no NVRTC for others"
    return f"{brought.kernels} packaged kernels of NVRTC {brought.nvrtc_version}, {others}"


def clear_cache() -> None:
    """Remove every kernel from the cache; loaded ones stay loaded. Raises OSError where the directory cannot be
    written, RuntimeError without cuda.core, which finds the kernels."""
    _cache().clear()


def identity(source: str) -> bytes:
    """A kernel's identity without the compiler: text, options and hints."""
    digest = hashlib.sha256()
    for part in (repr(sorted(_OPTIONS.items())), _hints(), _without_comments(source)):
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def _key(own_identity: bytes) -> bytes:
    """All that a cubin depends on. cuda.core's own key would load cuda.core and NVRTC for every hit."""
    return hashlib.sha256(nvrtc_version().encode() + own_identity).digest()


@cache
def _hints() -> str:
    """The text of sass.py, comments included, which sets and checks hints."""
    return Path(sass.__file__).read_text()


_COMMENTS = re.compile(r"/(?:/[^\n]*(?:\n\s*//[^\n]*)*|\*(?s:.*?)\*/)")
"""// comments, including those on following lines, and /* */ comments."""

_LINES_MATTER = tuple(map(re.compile, ('R"', r"\\\s", "__LINE__")))
"""With raw strings or line continuations a line alone does not show which part is a comment."""


def _without_comments(source: str) -> str:
    """CUDA C++ without comments and blank lines, for hashing: 0.4 ms for a kernel. A comment after a quote in its line
    stays, since it may be a string."""
    if any(mark.search(source) for mark in _LINES_MATTER):
        return source

    def replacement(comment: re.Match) -> str:
        before = source[source.rfind("\n", 0, comment.start()) + 1 : comment.start()]
        return comment[0] if '"' in before or "'" in before else " "

    return "\n".join(filter(None, map(str.rstrip, _COMMENTS.sub(replacement, source).split("\n"))))


_ENTRIES, _TEMPORARY = "entries", "tmp"
"""FileStreamProgramCache's subdirectories: for entries, and for temporary files."""


def _cache() -> _KernelCache:
    with _state_lock:
        return _open_cache()


@cache
def _open_cache() -> _KernelCache:
    return _KernelCache(settings.cache_dir(), settings.cache_max_bytes())


class _KernelCache:
    """Cubins by key: files of a FileStreamProgramCache, and in memory those that the directory rejects. Added here:
    checksums, locks, the owner's check, and reads that need no import of cuda.core."""

    def __init__(self, directory: Path | None, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._memory: dict[bytes, bytes] = {}
        self._thread_locks: dict[tuple[int, bytes], threading.Lock] = {}
        self._keepers: dict[int, FileStreamProgramCache] = {}
        self._warned = False
        if directory is None:
            self._warn("none of DEEP_TILE_CACHE_DIR, XDG_CACHE_HOME and HOME names a directory")

    def prepare(self) -> None:
        """Create the directory; refuse it, or a directory inside, if others may write to it.

        Done before every use, since a directory under /tmp may be swept away and made again by anybody. Root is
        trusted: it can do anything anyway, and it makes the images that caches are baked into (an image that runs as
        another user needs `chmod -R a+rX` on the directory).
        """
        if self.directory is None:
            return
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._warn(str(error))
            return
        for path in (self.directory, self.directory / _ENTRIES, self.directory / _TEMPORARY):
            self._check_writers(path)

    def _check_writers(self, directory: Path) -> None:
        """Raise PermissionError where others may write to the cache directory, or to one inside and may enter the
        first: without a umask cuda.core's directories inside are open, and nobody gets there."""
        try:
            status, outer = directory.stat(), self.directory.stat()
        except OSError:
            return
        is_reached = directory == self.directory or outer.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
        if status.st_uid not in (os.geteuid(), 0):
            seen = f"belongs to user id {status.st_uid}, and this process runs as {os.geteuid()}"
            raise self._refusal(directory, seen)
        if status.st_mode & stat.S_IWOTH and is_reached:
            raise self._refusal(directory, "is writable by every user")

    def get(self, key: bytes) -> bytes | None:
        if self.directory is None or key in self._memory:
            return self._memory.get(key)
        entry = self._read(key)
        if entry is None:
            return None
        cubin = packaged.checked(key, entry)
        if cubin is not None:
            return cubin
        with contextlib.suppress(OSError, KeyError, ImportError):
            del self._files[key]  # torn, damaged or foreign
        return None

    def holds(self, key: bytes) -> bool:
        entry = self.directory and self._read(key)
        return bool(entry) and packaged.checked(key, entry) is not None

    def put(self, key: bytes, cubin: bytes) -> None:
        if self.directory is not None:
            try:
                self._files[key] = packaged.with_checksum(key, cubin)
                return
            except OSError as error:
                self._warn(str(error))
        self._memory[key] = cubin

    @contextlib.contextmanager
    def lock(self, key: bytes) -> Iterator[None]:
        """Keep others from compiling the same kernel meanwhile; where that fails, it is compiled twice. A forked child
        does not wait for its parent's threads."""
        thread_lock = self._thread_locks.setdefault((os.getpid(), key), threading.Lock())
        acquired = thread_lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS)
        try:
            with self._file_lock(key):
                yield
        finally:
            if acquired:
                thread_lock.release()

    def entry_sizes(self) -> list[int]:
        if self.directory is None:
            return [len(cubin) for cubin in self._memory.values()]
        sizes = []
        with contextlib.suppress(PermissionError):  # an unreadable directory has no kernels for us
            for path in self.directory.glob(f"{_ENTRIES}/*/*"):
                with contextlib.suppress(OSError):  # another process may remove it meanwhile
                    sizes.append(path.stat().st_size)
        return sizes

    def clear(self) -> None:
        self._memory.clear()
        if self.directory is not None and self.directory.exists():
            self.prepare()
            try:
                self._files.clear()
            except ImportError as error:
                raise _missing_compiler(error) from error

    @property
    def _files(self) -> FileStreamProgramCache:
        """This process's FileStreamProgramCache. Raises OSError for an unusable directory, and ImportError without
        cuda.core."""
        with import_lock:
            from cuda.core.utils import FileStreamProgramCache

            if os.getpid() not in self._keepers:
                self._keepers[os.getpid()] = FileStreamProgramCache(self.directory, max_size_bytes=self.limit_bytes)
            return self._keepers[os.getpid()]

    def _read(self, key: bytes) -> bytes | None:
        path = _entry_path(self.directory, key)
        self._check_writers(path.parent)
        with contextlib.suppress(OSError):
            if path.exists() and not path.is_file():
                return None  # opening a pipe would wait for its writer
            return path.read_bytes()
        with contextlib.suppress(OSError, ImportError):  # without cuda.core compilation raises a clear error
            return self._files.get(key)
        return None

    @contextlib.contextmanager
    def _file_lock(self, key: bytes) -> Iterator[None]:
        if self.directory is None:
            yield
            return
        with contextlib.ExitStack() as held:
            # Read-only or vanished directory, file system without locks, or timeout: go on without.
            with contextlib.suppress(OSError, NotImplementedError, ImportError):
                with import_lock:
                    from filelock import FileLock

                locks = self.directory / "locks"
                locks.mkdir(exist_ok=True)
                held.enter_context(FileLock(locks / key.hex()).acquire(timeout=_LOCK_TIMEOUT_SECONDS))
            yield

    def _refusal(self, directory: Path, seen: str) -> PermissionError:
        return PermissionError(
            f"cache directory {directory} {seen}: whoever can write there can make this process run their code. "
            "Set DEEP_TILE_CACHE_DIR to a directory of your own; deep_tile creates it if it does not exist"
        )

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"deep_tile keeps newly compiled kernels in memory only: {reason}. "
            "Set DEEP_TILE_CACHE_DIR to a writable directory to keep them for the next process",
            RuntimeWarning,
            stacklevel=2,
        )


def _entry_path(directory: Path, key: bytes) -> Path:
    """Where FileStreamProgramCache keeps an entry, since cuda-core 1.1. Reading the file here takes 0.7 ms; through
    cuda.core, which is asked if this finds nothing, 45 ms, mostly the import."""
    digest = hashlib.sha256(key).hexdigest()
    return directory / _ENTRIES / digest[:2] / digest[2:]
