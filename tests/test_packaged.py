"""Kernels in the package: found by source and options, before the cache, without any NVRTC."""

import re
from itertools import product
from pathlib import Path

import other_nvrtc
import pack_other_nvrtc
import pytest
from helpers import run_python

from deep_tile import _launcher, cast, jit, packaged, sass, settings
from deep_tile.codegen import kernel_source, streaming_source
from deep_tile.config import GemmConfig
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose
from deep_tile.tools import pack

SOURCE = 'extern "C" __global__ void answer(int* out) { *out = 42; }'
CUBIN = b"\x7fELF and so on"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Packaged kernels of this test alone."""
    directory = tmp_path / "kernels"
    monkeypatch.setattr(packaged, "DIRECTORY", directory)
    return directory


def test_a_checkout_brings_no_kernels():
    assert packaged.contents() is None
    assert not jit.is_packaged(kernel_source(GemmConfig(64, 64, 4)))


def test_packaged_kernel_comes_before_cache_and_compiler(folder):
    packaged.write({jit.identity(SOURCE): CUBIN}, "13.0.88", folder)
    before = jit.compilations()
    assert jit.load_cubin(SOURCE, "answer") == CUBIN
    assert jit.load_cubin(f"// a comment\n{SOURCE}", "answer") == CUBIN
    assert jit.is_stored(SOURCE)
    assert jit.compilations() == before


def test_other_sources_are_compiled(folder):
    packaged.write({jit.identity(SOURCE): CUBIN}, "13.0.88", folder)
    other = SOURCE.replace("42", "43")
    assert not jit.is_packaged(other)
    assert jit.load_cubin(other, "answer").startswith(b"\x7fELF\x02")


def test_damaged_kernel_is_compiled(folder):
    packaged.write({jit.identity(SOURCE): CUBIN}, "13.0.88", folder)
    (entry,) = folder.glob("*.cubin")
    entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    assert not jit.is_packaged(SOURCE)
    assert jit.load_cubin(SOURCE, "answer").startswith(b"\x7fELF\x02")


def test_a_variable_ignores_them(folder, monkeypatch):
    packaged.write({jit.identity(SOURCE): CUBIN}, "13.0.88", folder)
    monkeypatch.setattr(settings, "packaged_kernels", lambda: False)
    assert not jit.is_packaged(SOURCE)
    assert jit.cache_info().packaged is None
    assert jit.load_cubin(SOURCE, "answer") != CUBIN


@pytest.mark.parametrize(("driver", "serve"), [(12080, False), (13000, True), (14000, True)])
def test_drivers_of_an_older_cuda_get_kernels_of_their_own_compiler(folder, monkeypatch, call, driver, serve):
    packaged.write({jit.identity(SOURCE): CUBIN}, "13.0.88", folder)
    monkeypatch.setattr(_launcher, "driver_version", lambda: driver)
    assert jit.is_packaged(SOURCE) == serve
    assert (jit.load_cubin(SOURCE, "answer") == CUBIN) == serve
    seen = call("doctor", "--json")[1]
    assert ("the driver is older than CUDA 13, so kernels are compiled here" in seen) != serve


def test_cache_and_doctor_say_who_serves(folder, call):
    packaged.write({jit.identity(SOURCE): CUBIN}, "13.0.88", folder)
    assert jit.cache_info().packaged == packaged.Contents("13.0.88", 1, len(CUBIN))
    for command in (("cache", "info"), ("doctor", "--json")):
        code, out, _ = call(*command)
        assert code == 0
        assert "the package brings 1 kernels of NVRTC 13.0.88" in out


def test_a_folder_is_written_once(folder):
    packaged.write({}, "13.0.88", folder)
    with pytest.raises(FileExistsError):
        packaged.write({}, "13.0.88", folder)


def test_packed_kernels_serve_where_there_is_no_nvrtc(folder, monkeypatch, capsys):
    config, kernel = GemmConfig(64, 64, 4), cast.all_kernels()[0]
    sources = {config.name: kernel_source(config), kernel.name: streaming_source(kernel)}
    monkeypatch.setattr(pack, "default_sources", lambda: sources)
    assert pack.main([str(folder)]) == 0
    assert "2 kernels of NVRTC" in capsys.readouterr().out
    program = f"""
import sys
sys.modules["cuda"] = None  # neither NVRTC nor cuda.core
from pathlib import Path
from deep_tile import cast, jit, packaged
from deep_tile.codegen import streaming_source, kernel_source
from deep_tile.config import GemmConfig
packaged.DIRECTORY = Path({str(folder)!r})
for source in (kernel_source({config!r}), streaming_source(cast.all_kernels()[0])):
    assert jit.load_cubin(source, "any name")[:4] == b"\\x7fELF"
assert jit.compilations() == 0 and "torch" not in sys.modules
"""
    run_python(program)


def test_pack_wants_the_pinned_nvrtc_and_no_flaws(folder, monkeypatch, capsys):
    assert pack.main([str(folder), "--nvrtc", "1.2.3"]) == 1
    assert "wanted 1.2.3" in capsys.readouterr().err
    log = "Used 9 registers\n8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads"
    spilling = jit.Compiled(CUBIN, log, 0)
    monkeypatch.setattr(pack, "default_sources", lambda: {"answer": SOURCE})
    monkeypatch.setattr(jit, "compile_kernel", lambda source, name: spilling)
    assert pack.main([str(folder)]) == 1
    assert "answer: spills" in capsys.readouterr().err
    divergent = jit.Compiled(CUBIN, log.replace("8 bytes", "0 bytes"), 0)
    monkeypatch.setattr(jit, "compile_kernel", lambda source, name: divergent)
    for found, status in ((("WARPSYNC at 0x10",), 1), ((), 0)):
        assert not folder.exists()
        monkeypatch.setattr(sass, "divergence", lambda cubin, found=found: found)
        assert pack.main([str(folder)]) == status
        assert ("answer: spills" in capsys.readouterr().err) == bool(status)


def test_kernels_of_another_nvrtc_serve(folder, monkeypatch, capsys):
    """They serve as a wheel's kernels do; a kernel that spills is left out."""
    made, other = jit.compile_kernel(SOURCE, "answer"), SOURCE.replace("42", "43")
    spilling = made._replace(log=made.log.replace("0 bytes spill stores", "8 bytes spill stores"))
    monkeypatch.setattr(pack_other_nvrtc, "sources", lambda: {"answer": SOURCE, "other": other})
    monkeypatch.setattr(other_nvrtc, "fetch", lambda version, libraries: f"library of {version}")
    monkeypatch.setattr(other_nvrtc, "compile_kernels", lambda *given: {"answer": made, "other": spilling})
    assert pack_other_nvrtc.main(["13.5.37", str(folder)]) == 0
    assert "other is left out: ResourceUsage(" in capsys.readouterr().out
    assert packaged.contents() == packaged.Contents("13.5.37", 1, len(made.cubin))
    before = jit.compilations()
    assert jit.load_cubin(SOURCE, "answer") == sass.quicken_promotion(made.cubin)
    assert jit.compilations() == before and not jit.is_packaged(other)


def test_wheels_are_tried_for_every_kernel_that_is_packed():
    """The Makefile's script tries them; in a checkout, which has no packaged kernels, it misses all."""
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    script = re.search(r"define TRY_WHEEL\n(.*?)endef", makefile, re.DOTALL)[1]
    count = len(pack.default_sources())
    with pytest.raises(AssertionError, match=f"{count} of {count} default kernels are not in the wheel"):
        exec(script, {})


def test_pack_has_every_kernel_that_is_chosen_by_default():
    names = pack.default_sources()
    for shape in product((1, 40, 333, 4096), (24, 2112, 7168), (128, 1536, 16_384)):
        for tma_store, split_k in product((True, False), repeat=2):
            assert choose(GemmProblem(*shape, tma_store=tma_store, split_k=split_k)).name in names
    for block_rows in (1, 128):
        for source in cast.SOURCE_BYTES:
            for shape in ((1, 1), (3, 4097), (16_384, 7168)):
                assert cast.choose(block_rows, source, *shape, 114)[0].name in names
