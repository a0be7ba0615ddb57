"""The compiler and its cache, on a kernel of one line. No GPU, no driver, no CUDA toolkit.

What may go wrong with a cache is made to happen for real: files cut, flipped and swapped, directories moved, removed,
taken away by permissions; only what a test cannot do (uninstall NVRTC) is patched in.
"""

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import run_python

from deep_tile import cast, jit, plan, settings

SOURCE = 'extern "C" __global__ void answer(int* out) { *out = 42; }'
NOBODY = 65534
ROOT = Path(__file__).resolve().parent.parent


def forget_cache():
    """Make the next call see the environment and the directory as a new process would."""
    for remembered in (settings.cache_dir, settings.cache_max_bytes, settings.dump_dir, jit._open_cache):
        remembered.cache_clear()


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """An empty cache directory, not created yet."""
    directory = tmp_path / "cache"
    for name in ("DG_JIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "DEEP_TILE_CACHE_MAX_MB", "DEEP_TILE_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(directory))
    forget_cache()
    yield directory
    forget_cache()


@contextlib.contextmanager
def compiles(count: int):
    before = jit.compilations()
    yield
    assert jit.compilations() - before == count


def load(source: str = SOURCE) -> bytes:
    return jit.load_cubin(source, "answer")


def entries(directory: Path) -> list[Path]:
    return [path for path in (directory / "entries").rglob("*") if path.is_file()]


def stored_entry(directory: Path) -> Path:
    """The file of SOURCE in a freshly filled cache."""
    load()
    forget_cache()
    (entry,) = entries(directory)
    return entry


@contextlib.contextmanager
def unprivileged():
    """Drop root's rights, which no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# --- compiling


def saved_source(error: str) -> Path:
    return Path(next(line for line in error.splitlines() if "saved as" in line).split(": ")[1])


def test_compile_gives_cubin_log_and_seconds(monkeypatch):
    monkeypatch.setattr(jit, "time", SimpleNamespace(perf_counter=iter((3.0, 5.5)).__next__))
    with compiles(1):
        compiled = jit.compile_kernel(SOURCE, "answer")
    assert compiled.cubin.startswith(b"\x7fELF")
    assert b"answer" in compiled.cubin
    assert "Compiling entry function 'answer' for 'sm_90a'" in compiled.log
    assert compiled.seconds == 2.5


def test_compile_error_tells_everything():
    source = SOURCE.replace("42", "missing_name")
    with pytest.raises(jit.CompileError) as error, compiles(0):
        load(source)
    text = str(error.value)
    assert 'identifier "missing_name" is undefined' in text
    assert "-arch=sm_90a" in text and "--std=c++20" in text
    assert f"NVRTC {jit.nvrtc_version()}" in text
    saved = saved_source(text)
    assert saved.read_text() == source
    saved.unlink()


def test_compile_error_is_told_where_its_source_cannot_be_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(jit.CompileError, match="(?s)source not saved: .*No such file.*is undefined"):
        load(SOURCE.replace("42", "missing_name"))


def test_a_signal_handlers_exception_is_no_compile_error(monkeypatch):
    def interrupted(*ignored, **options):
        raise TimeoutError("too slow")

    _, options = jit._compiler()
    monkeypatch.setattr(jit, "_compiler", lambda: (interrupted, options))
    with pytest.raises(TimeoutError, match="too slow"):
        load()


def test_any_error_of_cuda_core_is_a_compile_error(monkeypatch):
    """Not only its own classes: a RuntimeError, here."""
    program, options = jit._compiler()
    monkeypatch.setattr(jit, "_compiler", lambda: (lambda source, _, **how: program(source, "c--", **how), options))
    with pytest.raises(jit.CompileError, match=r"(?s)cannot compile answer.*c--") as error:
        load()
    saved_source(str(error.value)).unlink()


def test_exit_waits_for_a_compiling_daemon():
    """NVRTC would go on without its library's memory: a segmentation fault."""
    code = (
        "import threading, time; from deep_tile import jit\n"
        "begun, (_, options) = threading.Event(), jit._compiler()\n"
        "def compile_slowly(*ignored, **how): begun.set(); time.sleep(0.3); print('ended'); exit()\n"
        "jit._compiler = lambda: (compile_slowly, options)\n"
        "threading.Thread(target=jit.compile_kernel, args=('', 'k'), daemon=True).start()\n"
        "begun.wait()\n"
    )
    ended = run_python(code)
    assert (ended.stdout, ended.stderr) == ("ended\n", "")


def test_threads_compile_nothing_once_the_interpreter_ends(monkeypatch):
    monkeypatch.setattr(jit, "_is_ending", True)
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="while the interpreter ends"):
        pool.submit(load).result()


def test_exit_hooks_compile(monkeypatch):
    """They run in the main thread, which ends after them."""
    monkeypatch.setattr(jit, "_is_ending", True)
    with compiles(1):
        load()


def test_a_forks_child_does_not_wait_for_threads_of_its_parent():
    """Not even for those that Python has not started, as autograd's: their state is unknown in the child."""
    code = (
        "import _thread, os, sys, threading; from deep_tile import jit\n"
        "begun, end = threading.Event(), threading.Event()\n"
        "def compile_slowly():\n"
        "    with jit._outliving_the_interpreter('k'): begun.set(); end.wait()\n"
        "_thread.start_new_thread(compile_slowly, ())\n"
        "begun.wait()\n"
        "child = os.fork()\n"
        "if not child: sys.exit()\n"
        "print('ended', os.waitpid(child, 0)[1], flush=True)\n"
        "end.set()\n"
    )
    ended = run_python(code)
    assert (ended.stdout, ended.stderr) == ("ended 0\n", "")


def test_ptxas_error_is_a_compile_error():
    source = 'extern "C" __global__ void answer() { asm volatile("no_such_instruction;"); }'
    with pytest.raises(jit.CompileError, match="ptxas") as error:
        jit.compile_kernel(source, "answer")
    saved_source(str(error.value)).unlink()


DIVERGENT = """
extern "C" __global__ void answer() {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; }" :: "r"(threadIdx.x * 8));
}
"""


@pytest.mark.parametrize("dumps", [False, True])
def test_a_kernel_that_may_hang_is_refused(directory, monkeypatch, tmp_path, dumps):
    if dumps:
        monkeypatch.setenv("DEEP_TILE_DUMP_DIR", str(tmp_path / "dump"))
    with compiles(1), pytest.raises(jit.CompileError) as error:
        load(DIVERGENT)
    text = str(error.value)
    assert text.startswith(
        f"answer may hang: NVRTC {jit.nvrtc_version()} compiles it with divergent warps (wait through R"
    )
    assert text.endswith(f"Remedy: {jit.divergence_remedy()}")
    assert not dumps or (tmp_path / "dump" / "answer.ptx").is_file()
    with compiles(1), pytest.raises(jit.CompileError):
        load(DIVERGENT)
    assert entries(directory) == []


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        *((wheel.split("==")[1], "another config") for wheel in jit.TESTED_WHEELS.values()),
        ("13.0", "another config"),
        ("13.5.37", f"pip install {jit.TESTED_WHEELS['13']}, which deep_tile is tested with, or another config"),
        ("12.8.93", f"pip install {jit.TESTED_WHEELS['12']}, which deep_tile is tested with, or another config"),
    ],
)
def test_no_compiler_is_named_as_its_own_remedy(version, remedy, monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: version)
    assert jit.divergence_remedy() == remedy


def test_the_remedy_is_what_constraints_pin():
    pinned = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    assert jit.TESTED_WHEELS["13"] in pinned
    assert all(jit.is_tested(wheel.split("==")[1]) for wheel in jit.TESTED_WHEELS.values())


def test_missing_nvrtc_names_the_remedy(monkeypatch):
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    def no_library():
        raise DynamicLibNotFoundError("libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", no_library)
    with pytest.raises(RuntimeError, match=r'pip install "deep_tile\[cu13\]"'), compiles(0):
        load()


def test_missing_cuda_core_names_the_remedy(directory, monkeypatch):
    """A PyTorch may bring the bindings and NVRTC without it."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(RuntimeError, match=r'pip install "deep_tile\[cu13\]"'), compiles(0):
        load()


def test_an_interrupted_import_is_told_as_such(directory, monkeypatch):
    """As Ctrl-C leaves it: modules of Cython are imported once in a process."""
    monkeypatch.delattr("cuda.core.Program")
    with pytest.raises(RuntimeError, match=r"cannot import name 'Program'.* start another process"), compiles(0):
        load()


def test_nvrtc_version_is_that_of_the_library():
    assert jit.nvrtc_version().split(".")[:2] == jit._loaded_nvrtc_version().split(".")


def test_nvrtc_of_a_wheel_outside_of_site_packages_is_found(tmp_path):
    """The wheel lies in another environment, whose packages are visible through a .pth file."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    folders = [folder for folder in sys.path if folder.endswith("-packages")]
    (site_packages / "others.pth").write_text("\n".join([*folders, str(ROOT)]))
    code = f"from deep_tile import jit; assert jit.load_cubin({SOURCE!r}, 'answer')[:4] == b'\\x7fELF'"
    environment = {key: value for key, value in os.environ.items() if "CUDA" not in key and key != "PYTHONPATH"}
    subprocess.run([tmp_path / "venv/bin/python", "-c", code], env=environment, check=True)


@pytest.mark.parametrize(("version", "known"), [("12.8", False), ("12.9", True), ("13.0", True)])
def test_nvrtc_is_told_not_to_cache_where_it_knows_how(monkeypatch, tmp_path, version, known):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the source is saved
    monkeypatch.setattr(jit, "_loaded_nvrtc_version", lambda: version)
    with pytest.raises(jit.CompileError) as error:
        jit.compile_kernel("no kernel", "answer")
    assert ("--no-cache" in str(error.value)) is known


def test_needs_no_toolkit(tmp_path, directory):
    environment = {key: value for key, value in os.environ.items() if "CUDA" not in key}
    environment |= {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "import shutil; from deep_tile import jit\n"
        "assert not any(map(shutil.which, ('nvcc', 'ptxas', 'cuobjdump', 'cc', 'gcc')))\n"
        f"assert jit.load_cubin({SOURCE!r}, 'answer')[:4] == b'\\x7fELF'\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert len(entries(directory)) == 1


def test_hit_needs_neither_cuda_core_nor_nvrtc(directory):
    load()
    code = (
        "import sys; from deep_tile import jit\n"
        "def loaded(): return 'cuda.core' in sys.modules, 'libnvrtc' in open('/proc/self/maps').read()\n"
        "before = loaded()\n"
        f"jit.load_cubin({SOURCE!r}, 'answer')\n"
        "assert jit.compilations() == 0 and loaded() == before\n"
    )
    run_python(code)


# --- the log


def test_resource_usage_of_a_real_spill():
    values = range(256)
    source = (
        'extern "C" __global__ void __launch_bounds__(1024) answer(float* out) {'
        + "".join(f"float x{i} = out[{i}];" for i in values)
        + "__syncthreads();"
        + "".join(f"out[{i}] = x{i} * x{(i * 7 + 1) % 256};" for i in values)
        + "}"
    )
    usage = jit.resource_usage(jit.compile_kernel(source, "answer").log)
    assert usage.registers == 64
    assert min(usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) > 0


def test_resource_usage_collects_every_function_and_remark():
    serialised = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "the presence of Extern calls in the function 'k'"
    )
    log = f"""\
{serialised}
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 32 bytes cumulative stack size
ptxas info    : (C7602) another remark
ptxas info    : Function properties for other
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"""
    remarks = (serialised, "ptxas info    : (C7602) another remark")
    assert jit.resource_usage(log) == jit.ResourceUsage(168, 12, 16, 32, remarks)


def test_resource_usage_refuses_another_text():
    with pytest.raises(ValueError, match="ptxas"):
        jit.resource_usage("nothing here")


# --- hit and miss


def test_second_load_is_a_hit(directory):
    with compiles(1):
        first = load()
    forget_cache()
    with compiles(0):
        assert load() == first
    assert first == jit.compile_kernel(SOURCE, "answer").cubin
    assert directory.stat().st_mode & 0o777 == 0o700


def test_stored_cubin_is_a_hit(directory):
    compiled = jit.compile_kernel(SOURCE, "answer")
    jit.store_cubin(SOURCE, compiled.cubin)
    forget_cache()
    with compiles(0):
        assert load() == compiled.cubin


LINES = 'extern "C" __global__ void answer(int* out) {\n    *out = 42;\n}\n'


@pytest.mark.parametrize(
    "commented",
    [
        f'// What it\'s all about.\n{LINES}// and "what" it is not\n',
        f"/* The driver's\n * answer. // It says. */\n{LINES}",
        LINES.replace("42;", '42;  // it\'s "said" /* so'),
        LINES.replace("42;", "42;  /* the answer */"),
        LINES.replace("{\n", "{\n\n   // one\n\n    // two\n  \n"),
    ],
)
def test_comments_and_blank_lines_are_no_part_of_the_key(commented):
    """Nor of the cubin."""
    cubin = load(LINES)
    with compiles(0):
        assert load(commented) == cubin
    assert jit.compile_kernel(commented, "answer").cubin == cubin


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('asm("// a");', 'asm("// b");'),
        ('asm("/* a */");', 'asm("/* b */");'),
        ('char c = \'"\'; f("//a"); // x', 'char c = \'"\'; f("//b"); // x'),
        ('s = R"(\n// a\n)";', 's = R"(\n// b\n)";'),
        ('s = R"(\n\n)";', 's = R"(\n)";'),
        ('s = "a\\\n// b";', 's = "a\\\n// c";'),
        ("// a \\\nint x;", "// a\nint x;"),
        ("// a \\ \nint x;", "// a\nint x;"),
        ("#define A \\\n\nint x;", "#define A \\\nint x;"),
        ("int x = __LINE__;", "\nint x = __LINE__;"),
        ("int a/**/b;", "int ab;"),
        ("int x;\n#define A\nint y;", "int x;\n#define A int y;"),
        ("int x = 1 / 2;", "int x = 1 // 2;"),
        ("int x = 1'000; f();", "int x = 1'000; g();"),
    ],
)
def test_what_is_no_comment_is_part_of_the_key(one, other):
    assert jit.identity(one) != jit.identity(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(jit, "nvrtc_version", lambda: "99.0"),
        lambda patch: patch.setitem(jit._OPTIONS, "std", "c++17"),
    ],
    ids=["NVRTC version", "options"],
)
def test_other_compiler_is_a_miss(monkeypatch, change):
    load()
    change(monkeypatch)
    with compiles(1):
        load()


def test_moved_directory_is_still_a_hit(directory, tmp_path, monkeypatch):
    cubin = load()
    moved = tmp_path / "elsewhere" / "kernels"
    moved.parent.mkdir()
    shutil.move(directory, moved)
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(moved))
    forget_cache()
    with compiles(0):
        assert load() == cubin
    assert not directory.exists()


def test_other_layout_of_cuda_core_is_still_a_hit(monkeypatch):
    cubin = load()
    forget_cache()
    monkeypatch.setattr(jit, "_entry_path", lambda directory, key: directory / "no such entry")
    with compiles(0):
        assert load() == cubin


# --- damage


def cut(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:1000])


def empty(entry: Path) -> None:
    entry.write_bytes(b"")


def flip_one_bit(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)


def fill_with_garbage(entry: Path) -> None:
    entry.write_bytes(os.urandom(5000))


def put_another_kernel(entry: Path) -> None:
    """A valid entry, under the name of a different one."""
    load(SOURCE.replace("42", "43"))
    (other,) = set(entries(entry.parents[2])) - {entry}
    other.replace(entry)


@pytest.mark.parametrize("damage", [cut, empty, flip_one_bit, fill_with_garbage, put_another_kernel])
def test_damaged_entry_is_compiled_again(directory, damage):
    entry = stored_entry(directory)
    good = entry.read_bytes()
    damage(entry)
    forget_cache()
    with compiles(1):
        load()
    assert entry.read_bytes() == good
    with compiles(0):
        load()


def be_a_pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def be_a_loop(entry: Path) -> None:
    entry.unlink()
    entry.symlink_to(entry)


@pytest.mark.parametrize("become", [be_a_pipe, be_a_loop])
def test_what_cannot_be_read_in_place_of_an_entry_is_not_waited_for(directory, become):
    become(stored_entry(directory))
    forget_cache()
    with warnings.catch_warnings(), compiles(1):
        warnings.simplefilter("ignore", RuntimeWarning)  # what a loop's place takes stays in memory
        assert load().startswith(b"\x7fELF")
    assert jit.cache_info().entries <= 1


WITHOUT_CUDA = """
import sys
sys.modules.update(dict.fromkeys(("cuda", "cuda.core", "cuda.core.utils", "cuda.bindings")))
from deep_tile import jit
"""


@pytest.mark.parametrize("call", [f"jit.load_cubin({SOURCE!r}, 'answer')", "jit.clear_cache()"])
def test_a_damaged_entry_without_cuda_core_tells_the_remedy(directory, call):
    empty(stored_entry(directory))
    code = f"{WITHOUT_CUDA}try: {call}\nexcept RuntimeError as error: print(error)"
    assert 'pip install "deep_tile[cu13]"' in run_python(code).stdout


def test_directory_in_place_of_an_entry_is_not_fatal(directory):
    entry = stored_entry(directory)
    entry.unlink()
    (entry / "inner").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="in memory only"), compiles(1):
        load()


def test_directory_that_disappears_during_a_compilation_is_not_fatal(directory, monkeypatch):
    compile_kernel = jit.compile_kernel

    def compile_and_sweep(source, name):
        shutil.rmtree(directory)
        return compile_kernel(source, name)

    monkeypatch.setattr(jit, "compile_kernel", compile_and_sweep)
    with compiles(1):
        assert load().startswith(b"\x7fELF")


# --- directories that cannot be used


def one_memory_warning(caught) -> bool:
    return [entry.category for entry in caught] == [RuntimeWarning] and "in memory only" in str(caught[0].message)


def load_in_memory():
    """Two kernels, each twice: compiled once, kept in memory, with one warning in all."""
    with warnings.catch_warnings(record=True) as caught, compiles(2):
        warnings.simplefilter("always")
        assert load() == load()
        assert load(SOURCE.replace("42", "43")) == load(SOURCE.replace("42", "43"))
    assert one_memory_warning(caught)


def test_no_home_keeps_kernels_in_memory(monkeypatch, directory):
    monkeypatch.delenv("DEEP_TILE_CACHE_DIR")
    load_in_memory()
    info = jit.cache_info()
    assert (info.directory, info.entries) == (None, 2)
    jit.clear_cache()
    assert jit.cache_info().entries == 0
    assert not directory.exists()


def test_impossible_directory_keeps_kernels_in_memory(directory, monkeypatch):
    directory.write_text("a file where the cache should be")
    load_in_memory()
    forget_cache()
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(directory / "below"))
    load_in_memory()


@pytest.fixture
def baked(directory, monkeypatch):
    """A filled cache that the process may read but not write, as in a container image."""
    load()
    place = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    place.chmod(0o755)
    baked = Path(shutil.move(directory, place / "cache"))
    everything = [baked, *baked.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(baked))
    forget_cache()
    yield baked
    for path in everything:
        path.chmod(0o755)
    shutil.rmtree(place)


def test_read_only_directory_is_read(baked):
    with unprivileged():
        with pytest.raises(OSError):
            (baked / "probe").touch()
        with warnings.catch_warnings(record=True) as caught, compiles(0):
            load()
        assert not caught
        with warnings.catch_warnings(record=True) as caught, compiles(1):
            warnings.simplefilter("always")
            assert load(SOURCE.replace("42", "43")) == load(SOURCE.replace("42", "43"))
        assert one_memory_warning(caught)


def test_read_only_directory_with_a_damaged_entry(baked):
    (entry,) = entries(baked)
    entry.chmod(0o644)
    flip_one_bit(entry)
    entry.chmod(0o444)
    with unprivileged(), pytest.warns(RuntimeWarning, match="in memory only"), compiles(1):
        assert load() == load()


def test_directory_of_another_user_is_refused(directory, monkeypatch):
    stored_entry(directory)
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="DEEP_TILE_CACHE_DIR") as error, compiles(0):
        load()
    assert str(directory) in str(error.value)
    assert f"user id {directory.stat().st_uid}" in str(error.value)
    with pytest.raises(PermissionError):
        jit.clear_cache()


def test_directory_open_to_everybody_is_refused(directory):
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="every user"), compiles(0):
        load()
    assert not entries(directory)


@pytest.mark.parametrize("inner", ["entries", "tmp", "entries/xx"])
def test_directory_open_to_everybody_inside_the_cache_is_refused(directory, inner):
    entry = stored_entry(directory)
    open_to_all = entry.parent if inner == "entries/xx" else directory / inner
    open_to_all.chmod(0o777)
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="every user") as error, compiles(0):
        load()
    assert f"cache directory {open_to_all} " in str(error.value)


def test_a_cache_made_without_a_umask_serves(directory):
    before = os.umask(0)
    try:
        entry = stored_entry(directory)
    finally:
        os.umask(before)
    assert entry.parent.stat().st_mode & 0o002
    with compiles(0):
        load()


# --- many at once


def in_child(barrier, results) -> None:
    before = jit.compilations()
    barrier.wait()
    cubin = load()
    results.put((jit.compilations() - before, hashlib.sha256(cubin).hexdigest()))


def test_sixteen_cold_processes_compile_about_once(directory):
    processes = multiprocessing.get_context("fork")
    barrier, results = processes.Barrier(16), processes.SimpleQueue()
    children = [processes.Process(target=in_child, args=(barrier, results)) for _ in range(16)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 16
    compiled, cubins = zip(*(results.get() for _ in children), strict=True)
    assert 1 <= sum(compiled) <= 2
    assert len(set(cubins)) == 1
    assert len(entries(directory)) == 1


@pytest.mark.parametrize("on_disk", [True, False])
def test_threads_compile_each_source_once(monkeypatch, on_disk):
    if not on_disk:
        monkeypatch.delenv("DEEP_TILE_CACHE_DIR")
        warnings.simplefilter("ignore", RuntimeWarning)
    sources = [SOURCE.replace("42", str(number)) for number in (1, 2)] * 4
    cubins = [None] * len(sources)

    def run(index):
        cubins[index] = load(sources[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(sources))]
    with compiles(2):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert cubins == cubins[:2] * 4
    assert cubins[0] != cubins[1]


def test_stuck_lock_costs_a_compilation_only(directory, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(jit, "_LOCK_TIMEOUT_SECONDS", 0.2)
    (directory / "locks").mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    with FileLock(directory / "locks" / jit._key(jit.identity(SOURCE)).hex()), compiles(1):
        result = []
        thread = threading.Thread(target=lambda: result.append(load()))
        thread.start()
        thread.join(timeout=30)
    assert result[0].startswith(b"\x7fELF")


# --- forks while threads are at work


def run_in_child(work) -> None:
    """Do `work` in a forked process, in 20 s at most."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(timeout=20)
    child.kill()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("on_disk", [True, False])
def test_fork_during_a_compilation(monkeypatch, on_disk):
    """A child waits for who compiles if they share a directory, and not for a thread that it does not have."""
    if not on_disk:
        monkeypatch.delenv("DEEP_TILE_CACHE_DIR")
        warnings.simplefilter("ignore", RuntimeWarning)
    parent, begun = os.getpid(), threading.Event()
    compile_kernel = jit.compile_kernel

    def compile_slowly(source, name):
        if os.getpid() == parent:
            begun.set()
            time.sleep(1)
        return compile_kernel(source, name)

    def load_in_child():
        before = jit.compilations()
        load()
        assert jit.compilations() - before == (0 if on_disk else 1)

    monkeypatch.setattr(jit, "compile_kernel", compile_slowly)
    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(10)
    run_in_child(load_in_child)
    thread.join()


@pytest.mark.parametrize("lock", [jit.import_lock, jit._state_lock, plan._kernels_lock, cast._loading])
def test_fork_while_a_lock_is_held(lock):
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.5)

    def take_in_child():
        assert lock.acquire(timeout=5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    run_in_child(take_in_child)
    thread.join()


# --- upkeep


def test_info_and_clear(directory):
    empty_info = jit.cache_info()
    assert (empty_info.directory, empty_info.entries, empty_info.size_bytes) == (directory, 0, 0)
    assert empty_info.limit_bytes == 512 * 2**20
    assert empty_info.nvrtc_version == jit.nvrtc_version()
    jit.clear_cache()
    assert not directory.exists()

    cubin = load()
    assert jit.cache_info()[1:3] == (1, len(cubin) + hashlib.sha256().digest_size)
    jit.clear_cache()
    assert jit.cache_info().entries == 0
    with compiles(1):
        load()


def test_size_stays_below_the_limit(monkeypatch):
    monkeypatch.setenv("DEEP_TILE_CACHE_MAX_MB", "1")
    kernels = jit._cache()
    kernels.prepare()
    for number in range(5):
        kernels.put(bytes([number]) * 32, b"\x7fELF" + bytes(400_000))
    info = jit.cache_info()
    assert 1 <= info.entries <= 2
    assert info.size_bytes <= info.limit_bytes == 2**20
    assert kernels.get(bytes([4]) * 32) is not None


def test_dump_writes_source_and_outputs_even_on_a_hit(tmp_path, monkeypatch):
    source = f"// The answer.\n\n{SOURCE}"
    cubin = load()
    dump = tmp_path / "dump"
    monkeypatch.setenv("DEEP_TILE_DUMP_DIR", str(dump))
    forget_cache()
    with compiles(1):
        assert load(source) == cubin
    assert (dump / "answer.cu").read_text() == source
    assert (dump / "answer.cubin").read_bytes() == cubin
    assert ".target sm_90a" in (dump / "answer.ptx").read_text()
    assert "registers" in (dump / "answer.log").read_text()


def test_dump_writes_sass_with_nvdisasm(tmp_path, monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: shutil.which("echo"))
    monkeypatch.setenv("DEEP_TILE_DUMP_DIR", str(tmp_path))
    forget_cache()
    load()
    assert "--print-code" in (tmp_path / "answer.sass").read_text()
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    (tmp_path / "answer.sass").unlink()
    load()
    assert not (tmp_path / "answer.sass").exists()
