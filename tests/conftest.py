"""Fixtures that all tests share: a kernel cache, a command line, and the reason why GPU tests are skipped."""

import functools
import os
import pickle
import random
from collections import Counter

import changes
import pytest
import torch
from filelock import FileLock
from helpers import SEEDS
from pretending import fake_driver, run_pretending  # noqa: F401

from deep_tile import both, experts, gated, jit, norms, quantize, settings, transposed
from deep_tile.compat import deep_gemm, process
from deep_tile.tools import cli

HOPPER = (9, 0)

COMPILING = ("test_codegen", "test_compilers")

SEED = "DEEP_TILE_TEST_SEED"

POISON, MARGIN = 0x55, 4096
"""The byte around guarded results, and how many there are on either side."""


@functools.cache
def missing_hopper() -> str | None:
    """Why there is no Hopper GPU to test on; None where there is one."""
    if not torch.cuda.is_available():
        return f"needs a Hopper GPU; torch {torch.__version__} sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        return f"needs a Hopper GPU; found {torch.cuda.get_device_name()}, compute capability {capability}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kernels", action="store_true", help="every kernel, not those alone that a change touches")
    parser.addoption("--all-compilers", action="store_true", help="every kernel with every tested NVRTC")
    parser.addoption("--nvrtc", action="append", metavar="VERSION", help="every kernel with this NVRTC")


def pytest_configure(config: pytest.Config) -> None:
    """Make tests print as to a file. Each process of a parallel run uses one thread: threads that spin for a core slow
    down those that work."""
    for size in ("COLUMNS", "LINES"):  # xdist's, of a terminal that tests do not have
        os.environ.pop(size, None)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
        torch.set_num_threads(1)
    every = config.option.all_kernels or config.option.all_compilers or config.option.nvrtc
    if every:
        os.environ[changes.VARIABLE] = changes.EVERYTHING
    elif changes.VARIABLE not in os.environ:  # for all processes
        os.environ[changes.VARIABLE] = changes.base_commit()
    if SEED not in os.environ:  # for all processes, too
        os.environ[SEED] = "0" if missing_hopper() else str(random.getrandbits(31))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long tests first, so that no process is left with one at the end. Of tests marked `about` unchanged files,
    keep one in `changes.FEWER` per module."""
    items.sort(key=lambda item: item.path.stem not in COMPILING)
    seen, left_out = Counter(), []
    for item in items:
        mark = item.get_closest_marker("about")
        if mark and not changes.may_have_changed(*mark.args, f"tests/{item.path.name}"):
            seen[item.path] += 1
            if seen[item.path] % changes.FEWER:
                left_out.append(item)
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip where there is no Hopper GPU. A test's numbers depend on its name and SEED, on nothing that ran before."""
    if item.get_closest_marker("gpu") and (reason := missing_hopper()):
        pytest.skip(reason)
    SEEDS.seed(f"{os.environ[SEED]} {item.nodeid}")
    random.seed(SEEDS.getrandbits(63))
    generators = torch.default_generator if missing_hopper() else torch  # without a GPU, torch's own takes 0.7 ms
    generators.manual_seed(SEEDS.getrandbits(63))


def pytest_report_header() -> list[str]:
    return [changes.told(), f"random numbers are those of {SEED}={os.environ[SEED]}"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core, and none beside this one where there is a GPU, which tests do not share."""
    return len(os.sched_getaffinity(0)) if missing_hopper() else 0


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """One folder for all processes of this test run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def made_once(run_folder):
    """`made_once(name, make)` returns `make()`, which the first process runs; the others read its pickled result."""

    def get(name: str, make):
        file = run_folder / name
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_bytes(pickle.dumps(make()))
        return pickle.loads(file.read_bytes())

    return get


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(run_folder):
    """All processes of the session share one empty kernel cache, so that each kernel compiles once."""
    folder = run_folder / "kernel_cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_TILE_CACHE_DIR", str(folder))
        yield


@pytest.fixture
def fresh_deep_gemm(monkeypatch):
    """DeepGEMM's settings of the process, as a new process has them."""
    monkeypatch.setattr(process, "settings", {"num_sms": None, "pdl": None})
    monkeypatch.setattr(deep_gemm, "_alignment", 128)


@pytest.fixture
def quick_compiler(request, monkeypatch, tmp_path):
    """Every kernel compiles to the cubin of an empty kernel, into the test's own cache. For tests that count kernels or
    never look at their code; test_codegen.py compiles real ones, and GPU tests launch them."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    program, options = jit._compiler()
    empty = 'extern "C" __global__ void empty() {}'
    monkeypatch.setattr(jit, "_compiler", lambda: (lambda source, *how, **also: program(empty, *how, **also), options))
    monkeypatch.setattr(settings, "cache_dir", lambda: tmp_path)
    jit._open_cache.cache_clear()
    yield
    jit._open_cache.cache_clear()


@pytest.fixture
def call_main(capfd):
    """Run a program's `main` with arguments; returns exit code, stdout and stderr."""

    def run(main, *arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def call(call_main):
    """`call_main` of deep_tile's command line."""
    return functools.partial(call_main, cli.main)


@pytest.fixture
def guarded_results(monkeypatch):
    """What casts allocate lies in memory of one byte, which must not change around it and between its rows."""
    memory = []

    def inside(x):
        # No memory of the result itself: a kernel that is told its strides alone reaches no further.
        size = x.untyped_storage().nbytes()
        whole = torch.full((size + 2 * MARGIN,), POISON, dtype=torch.uint8, device=x.device)
        inner = whole[MARGIN : MARGIN + size].view(x.dtype).as_strided(x.shape, x.stride())
        memory.append((whole, inner))
        return inner

    def guarded(operation):
        allocate = operation.allocated

        def place(given, options):
            made = allocate(given, options)
            outs = [x if given[at] is not None else inside(x) for at, x in enumerate(made) if at in operation._outs]
            return *made[: operation._first_out], *outs, *made[operation._last_out + 1 :]

        return place

    operations = [experts.SORT_BY_EXPERT, experts.COMBINE, experts.SILU_MUL_CAST, transposed.TRANSPOSED_CAST]
    operations += [quantize.TOKEN_CAST, quantize.ROWS_CAST, quantize.BLOCK_CAST, gated.SWIGLU_GRADIENT]
    operations += [both.CAST_BOTH, both.CAST_WEIGHT, both.TRANSPOSE_FP8, norms.ADD_RMS_NORM_CAST]
    for operation in operations:
        monkeypatch.setattr(operation, "allocated", guarded(operation))
    yield
    assert memory
    for whole, inner in memory:
        outside = whole.clone()
        own = outside.view(inner.dtype).as_strided(inner.shape, inner.stride(), inner.storage_offset())
        bytes_ = own.element_size()
        word = int.from_bytes([POISON] * bytes_, "little")
        own.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bytes_]).fill_(word)
        assert (outside == POISON).all()
