"""What tests share: a kernel cache of their own, a command line, and the reason why GPU tests do not run here."""

import functools

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


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """One cache folder for the session: kernels compile afresh, and once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_TILE_CACHE_DIR", str(tmp_path_factory.mktemp("kernel_cache")))
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
