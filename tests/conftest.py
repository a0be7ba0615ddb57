"""What tests share: a kernel cache of their own, a command line, and the reason why GPU tests do not run here."""

import functools
import os

import pytest
import torch

from deep_tile.tools import cli

HOPPER = (9, 0)


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
    parser.addoption("--all-compilers", action="store_true", help="every default kernel with every tested NVRTC")
    parser.addoption("--nvrtc", action="append", metavar="VERSION", help="every default kernel with this NVRTC")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := missing_hopper()):
        pytest.skip(reason)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core, and none beside this one where there is a GPU, which tests do not share."""
    return len(os.sched_getaffinity(0)) if missing_hopper() else 0


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """One cache folder for the session, whose processes share it: kernels compile afresh, and once."""
    session = tmp_path_factory.getbasetemp()
    folder = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "kernel_cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_TILE_CACHE_DIR", str(folder))
        yield


@pytest.fixture
def call(capfd):
    """Run a command line; returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run
