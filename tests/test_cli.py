"""The command line, called in this process, and what the README says. No GPU: where there is one, it is hidden."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deep_tile
from deep_tile import cli, jit, sass, select, settings
from deep_tile.problem import GemmProblem
from deep_tile.reference import relative_error

NO_GPU = "this test hides the GPU"
README = Path(__file__).parent.parent / "README.md"
FEW_KERNELS = "512,256,8"  # n, k, max_m


def forget():
    """Make the next call see the environment as a new process would."""
    readers = (settings.cache_dir, settings.cache_max_bytes, settings.print_config, settings.dump_dir)
    for remembered in (*readers, jit._open_cache):
        remembered.cache_clear()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache directory, not created yet, and no GPU."""
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(deep_tile, "is_available", lambda: (False, NO_GPU))
    forget()
    yield tmp_path / "cache"
    forget()


def kernels_in(text: str) -> list[str]:
    """Names that begin a table's rows."""
    return re.findall(r"^(fp8_gemm_\S+) +\d", text, re.MULTILINE)


# ---- explain


@pytest.mark.parametrize("shape", [(16, 2112, 7168), (100, 576, 7168), (4096, 7168, 2048)])
def test_explain_puts_the_selectors_choice_first(call, shape):
    code, out, _ = call("explain", *map(str, shape))
    problem = GemmProblem(*shape)
    chosen = select.choose(problem).name
    measured = select.measured_choice(select.bucketed(problem))
    assert code == 0
    assert kernels_in(out)[0] == chosen
    assert len(kernels_in(out)) == cli.FIRST_CANDIDATES
    assert f"{chosen} {'was measured fastest here' if measured else 'has the shortest predicted time'}" in out


def test_explain_says_which_m_decided(call):
    assert "Decided for m = 128" in call("explain", "100", "576", "7168")[1]
    assert "Decided" not in call("explain", "128", "576", "7168")[1]


def test_explain_all_shows_every_candidate(call):
    out = call("explain", "64", "4096", "7168", "--all")[1]
    suitable = [config for config in select.default_configs() if select.suits(config, GemmProblem(64, 4096, 7168))]
    assert sorted(kernels_in(out)) == sorted(config.name for config in suitable)


def test_explain_says_how_many_tiles_are_narrow(call):
    out = " ".join(call("explain", "2048", "2112", "7168")[1].split())
    assert "256 tiles, 128 of them 128 columns wide, over 132 slots: 2 waves, 97% full" in out
    assert "columns wide" not in call("explain", "64", "4096", "7168")[1]


def test_explain_json(call):
    code, out, _ = call("explain", "100", "576", "7168", "--num-sms", "78", "--json")
    explained = json.loads(out)
    candidates = explained["candidates"]
    assert code == 0
    assert explained["problem"] == GemmProblem(100, 576, 7168, num_sms=78)._asdict()
    assert explained["config"] == candidates[0]["name"] == select.choose(GemmProblem(100, 576, 7168, 78)).name
    bucket = GemmProblem(128, 576, 7168, num_sms=78)
    assert len(candidates) == sum(select.suits(config, bucket) for config in select.default_configs())
    assert [row["time_us"] for row in candidates] == sorted(row["time_us"] for row in candidates)
    assert all(0 < row["grid"] <= 78 for row in candidates)
    assert candidates[1]["name"] in explained["why"]


def test_explain_on_one_sm_leaves_clusters_out(call):
    out = call("explain", "64", "4096", "7168", "--num-sms", "1", "--all")[1]
    assert kernels_in(out)
    assert all("_c1x1" in name for name in kernels_in(out))


# ---- compile


def test_compile_fills_the_cache_with_what_a_shape_needs(call, cache):
    code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "2")
    n, k, max_m = map(int, FEW_KERNELS.split(","))
    wanted = {config for store in (True, False) for config in select.configs_for(n, k, max_m, 132, store)}
    assert code == 0, err
    assert sorted(kernels_in(out)) == sorted(config.name for config in wanted)
    assert jit.cache_info().entries == len(wanted)
    before = jit.compile_count()
    assert deep_tile.precompile([(n, k, max_m)], num_sms=132).compiled == 0
    assert jit.compile_count() == before


def test_compile_without_shapes_takes_every_default_config():
    wanted = cli._wanted_configs(argparse.Namespace(shape=[], num_sms=132))
    assert sorted(wanted, key=repr) == sorted(select.default_configs(True) + select.default_configs(False), key=repr)


@pytest.mark.parametrize(
    ("flaw", "said"),
    [({"spill_store_bytes": 8}, "8 bytes spilled"), ({"warnings": ("C7510: serialised",)}, "C7510: serialised")],
)
def test_compile_fails_on_a_flaw(call, monkeypatch, flaw, said):
    sound = jit.ResourceUsage(168, 0, 0, 0, ())
    monkeypatch.setattr(jit, "resource_usage", lambda log: sound._replace(**flaw))
    code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    assert code == 1
    assert all(f"{name}: " in err for name in kernels_in(out))
    assert said in err


def test_compile_fails_where_a_kernel_may_hang(call, cache, monkeypatch):
    monkeypatch.setattr(sass, "divergence", lambda cubin: ("WARPSYNC at 0x10", "...") if b"_any" in cubin else ())
    code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    bad = [name for name in kernels_in(out) if name.endswith("_any")]
    assert code == 1 and 0 < len(bad) < len(kernels_in(out))
    why = f"NVRTC {jit.nvrtc_version()} lets its warps fall apart (WARPSYNC at 0x10 and 1 more)"
    assert all(f"{name} may hang: {why}" in err for name in bad)
    assert err.count("may hang") == len(bad)
    assert f"Remedy: {jit.tested_nvrtc()}" in err
    assert jit.cache_info().entries == len(kernels_in(out)) - len(bad)


def test_compile_with_a_dump_directory_leaves_the_cache_alone(call, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_TILE_DUMP_DIR", str(tmp_path / "dump"))
    before = jit.compile_count()
    code, out, _ = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    assert code == 0
    assert jit.compile_count() - before == len(kernels_in(out))
    assert all((tmp_path / "dump" / f"{name}.ptx").is_file() for name in kernels_in(out))
    assert not cache.exists()


# ---- cache


def test_cache_info_and_clear(call, cache):
    assert f"{cache} holds 0 kernels" in call("cache", "info")[1]
    assert not cache.exists()
    jit.load_cubin('extern "C" __global__ void nothing() {}', "nothing")
    assert f"{cache} holds 1 kernels" in call("cache", "info")[1]
    code, out, _ = call("cache", "clear")
    assert (code, "Removed 1 kernels" in out, str(cache) in out) == (0, True, True)
    assert jit.cache_info().entries == 0


# ---- doctor


def findings(call) -> tuple[int, dict[str, dict[str, str]]]:
    code, out, _ = call("doctor", "--json")
    report = json.loads(out)
    assert report["works"] is (code == 0)
    return code, {finding["subject"]: finding for finding in report["findings"]}


def test_doctor_without_a_gpu_warns_and_passes(call, cache):
    code, found = findings(call)
    assert code == 0
    assert (found["GPU"]["status"], found["GPU"]["seen"]) == ("warn", NO_GPU)
    assert {found[subject]["status"] for subject in ("NVRTC", "cuda.core", "compiler", "cache", "product")} == {"ok"}
    assert all(finding["remedy"] for finding in found.values() if finding["status"] != "ok")
    assert found["DEEP_TILE_CACHE_DIR"]["seen"] == str(cache)
    assert {variable.name for variable in settings.VARIABLES} <= set(found)


def test_doctor_prints_a_table(call):
    code, out, _ = call("doctor")
    assert code == 0
    assert f"deep_tile works here, on CPU tensors only: {NO_GPU}" in out
    assert 'deep_tile[cu13]"' not in out  # no remedy where nothing is wrong


def test_doctor_fails_without_a_compiler(call, monkeypatch):
    def refuse(source, name):
        raise jit.CompileError("NVRTC 99 cannot compile")

    monkeypatch.setattr(jit, "compile_kernel", refuse)
    code, found = findings(call)
    assert code == 1
    assert found["compiler"]["status"] == "fail"
    assert found["compiler"]["seen"] == "CompileError: NVRTC 99 cannot compile"
    assert "deep_tile[cu13]" in found["compiler"]["remedy"]
    assert "deep_tile[cu13]" in call("doctor")[1]  # brackets reach the reader


def test_doctor_fails_where_a_kernel_may_hang(call, monkeypatch):
    name = select.choose(cli.DOCTORS_KERNELS[-1]).name
    monkeypatch.setattr(sass, "divergence", lambda cubin: ("WARPSYNC at 0x10",) if name.encode() in cubin else ())
    code, found = findings(call)
    assert (code, found["compiler"]["status"]) == (1, "fail")
    assert found["compiler"]["seen"].startswith(f"{name} may hang: NVRTC {jit.nvrtc_version()} ")
    assert jit.TESTED_WHEELS["13"] in found["compiler"]["remedy"]


def test_doctor_warns_of_an_untested_nvrtc(call, monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.99.1")
    found = findings(call)[1]["NVRTC"]
    assert found["status"] == "warn"
    assert "tested with 12.9 to 13.5" in found["seen"] and "`deep-tile compile` checks every kernel" in found["seen"]


def test_doctor_reports_a_variable_that_makes_no_sense(call, monkeypatch):
    monkeypatch.setenv("DEEP_TILE_CACHE_MAX_MB", "lots")
    code, found = findings(call)
    assert code == 1
    assert found["DEEP_TILE_CACHE_MAX_MB"]["status"] == "fail"
    assert "'lots'" in found["DEEP_TILE_CACHE_MAX_MB"]["seen"]


def test_doctor_warns_of_a_cache_that_cannot_be_written(call, monkeypatch):
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", "/dev/null/cache")
    code, found = findings(call)
    assert code == 0
    assert found["cache"]["status"] == "warn"
    assert "/dev/null/cache" in found["cache"]["seen"]


def test_doctor_fails_on_a_wrong_product(call, monkeypatch):
    right = deep_tile.fp8_gemm
    monkeypatch.setattr(deep_tile, "fp8_gemm", lambda *operands: right(*operands) * 1.01)
    code, found = findings(call)
    assert (code, found["product"]["status"]) == (1, "fail")


def test_doctor_warns_of_a_driver_older_than_nvrtc(call, monkeypatch):
    monkeypatch.setattr(cli._launcher, "driver_version", lambda: 12080)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0.88")
    found = findings(call)[1]
    assert found["driver"] == {"status": "ok", "subject": "driver", "seen": "up to CUDA 12.8", "remedy": ""}
    assert (found["NVRTC"]["status"], "CUDA 12.8 only" in found["NVRTC"]["seen"]) == ("warn", True)


# ---- demo


@pytest.fixture
def one_layer(monkeypatch):
    monkeypatch.setattr(cli, "DEEPSEEK_V3_LAYERS", {"a layer": (512, 256)})
    monkeypatch.setattr(cli, "TOKENS", (8, 4096))


def test_demo_without_a_gpu_compiles_and_computes(call, one_layer):
    code, out, err = call("demo")
    assert code == 0, err
    assert NO_GPU in out
    assert set(kernels_in(out)) == {select.choose(GemmProblem(m, 512, 256)).name for m in cli.TOKENS}
    assert float(re.search(r"against float64: relative error (\S+)", out)[1]) <= cli.MAX_RELATIVE_ERROR


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_demo_fails_on_a_wrong_product(call, one_layer, monkeypatch, factor):
    right = deep_tile.fp8_gemm
    monkeypatch.setattr(deep_tile, "fp8_gemm", lambda *operands: right(*operands) * factor)
    code, _, err = call("demo")
    assert code == 1
    assert "exceeds" in err


@pytest.mark.gpu
def test_demo_on_a_gpu_times_and_checks(call, one_layer, monkeypatch):
    monkeypatch.setattr(deep_tile, "is_available", deep_tile.api.is_available)
    code, out, err = call("demo")
    assert code == 0, err
    assert "TFLOPS" in out
    assert all(select.choose(GemmProblem(m, 512, 256)).name in out for m in cli.TOKENS)


# ---- bench


def test_bench_passes_its_arguments_on(call):
    code, out, _ = call("bench", "--help")
    assert code == 0
    assert "--sustained" in out


def test_bench_needs_a_gpu(call):
    code, out, err = call("bench", "--shapes", "nine")
    assert (code, out) == (1, "")
    assert err == f"deep-tile: benchmarks need a Hopper GPU: {NO_GPU}\n"


def test_bench_outside_a_checkout_says_where_it_is(call, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    code, _, err = call("bench")
    assert code == 1
    assert "in a checkout" in err


# ---- arguments and errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["polish"], "'polish'"),
        (["explain", "1", "2"], "required: K"),
        (["explain", "1", "2", "-3"], "-3"),
        (["explain", "1", "0", "3"], "'0' is not a positive integer"),
        (["explain", "1", "2", "3", "--num-sms", "many"], "'many' is not a positive integer"),
        (["compile", "--shape", "7168,2048"], "not N,K,MAX_M"),
        (["compile", "--shape", "7168,100,64"], "multiple of 16 bytes"),
        (["compile", "--jobs", "0"], "'0' is not a positive integer"),
        (["cache"], "required: ACTION"),
        (["doctor", "--shapes", "nine"], "unrecognized arguments: --shapes nine"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(call, arguments, said):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("deep-tile") and err.count("\n") == 1


def test_errors_are_one_line_and_code_1(call, monkeypatch):
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", "relative")
    code, out, err = call("cache", "info")
    assert (code, out) == (1, "")
    assert err.startswith("deep-tile: environment variable DEEP_TILE_CACHE_DIR") and err.count("\n") == 1


def test_module_runs_as_a_program():
    finished = subprocess.run([sys.executable, "-m", "deep_tile", "--version"], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, f"deep_tile {deep_tile.__version__}\n")


# ---- the README


def test_readme_examples_run():
    """One after the other: the second goes on with the first's tensors."""
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 2
    names = {}
    exec("".join(examples).replace('"cuda"', '"cpu"'), names)
    assert names["out"].shape == (64, 2112)
    assert relative_error(names["out"], names["x"].double() @ names["w"].double().t()) < 0.05


def test_readme_documents_every_variable():
    text = README.read_text()
    for variable in settings.VARIABLES:
        assert f"| `{variable.name}` | {variable.meaning} | `{variable.default}` |" in text


def test_readme_documents_every_command(call):
    documented = set(re.findall(r"^\| .*", README.read_text().partition("## Command line")[2], re.MULTILINE))
    commands = re.findall(r"^    (\w+) ", call("--help")[1], re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        assert any(row.startswith(f"| `{command}") for row in documented)
