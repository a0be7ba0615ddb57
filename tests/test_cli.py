"""The command line and examples/demo.py, called in this process. No GPU: where there is one, it is hidden."""

import argparse
import contextlib
import functools
import io
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from cuda.core import Program, ProgramOptions
from helpers import EXAMPLES, run_python

import deep_tile
from deep_tile import _launcher, jit, progress, sass, settings
from deep_tile.integrations import engines
from deep_tile.kinds import FAMILIES
from deep_tile.problem import GemmProblem
from deep_tile.reference import MAX_RELATIVE_ERROR
from deep_tile.select import tuned
from deep_tile.select.choose import choose, choose_bucket, configs_for, suits
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import all_grouped_configs
from deep_tile.tools import cli, doctor, products, timing
from deep_tile.tools.compile import wanted_configs
from deep_tile.tools.doctor import DOCTORS_KERNELS

sys.path += [str(EXAMPLES), str(EXAMPLES.parent)]  # Appended: an installed deep_tile still comes first.
import demo  # noqa: E402
import demo_experts  # noqa: E402
import demo_kinds  # noqa: E402

NO_GPU = "this test hides the GPU"
FEW_KERNELS = "8x512x256"


def forget():
    """Make the next call see the environment as a new process would."""
    readers = (settings.cache_dir, settings.cache_max_bytes, settings.print_config, settings.dump_dir)
    choices = (settings.tuned_file, tuned._all_choices, choose_bucket)
    for remembered in (*readers, *choices, jit._open_cache):
        remembered.cache_clear()


class CompiledOnce:
    """cuda.core's Program of a source and a name; compiled again, it has the same code and log at once."""

    def __init__(self, source: str, language: str, options: ProgramOptions):
        self._program, self._made = Program(source, language, options=options), None
        self.handle = self._program.handle

    def compile(self, target: str, logs: io.StringIO):
        if self._made is None:
            log = io.StringIO()
            self._made = self._program.compile(target, logs=log), log.getvalue()
        code, text = self._made
        logs.write(text)
        return code


programs: dict[tuple[str, str], CompiledOnce] = {}
"""Programs of all tests in this file, most of which want the same few kernels."""


def remembered_program(source: str, language: str, options: ProgramOptions) -> CompiledOnce:
    key = source, options.name
    return programs.get(key) or programs.setdefault(key, CompiledOnce(source, language, options))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache directory, not created yet, an NVRTC that compiles no source twice, and no GPU."""
    monkeypatch.setattr(jit, "_compiler", lambda: (remembered_program, ProgramOptions))
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(deep_tile, "is_available", lambda: (False, NO_GPU))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def show_demo(call_main):
    return functools.partial(call_main, demo.main)


def kernels_in(text: str) -> list[str]:
    """Names that begin a table's rows."""
    return re.findall(r"^(fp8_gemm_\S+) +\d", text, re.MULTILINE)


# ---- explain


def test_explain_says_which_m_decided(call):
    assert "Decided for m = 128" in call("explain", "100x576x7168")[1]
    assert "Decided" not in call("explain", "128x576x7168")[1]


def test_explain_all_shows_every_candidate(call):
    out = call("explain", "64x4096x7168", "--all")[1]
    suitable = [config for config in default_configs() if suits(config, GemmProblem(64, 4096, 7168))]
    assert sorted(kernels_in(out)) == sorted(config.name for config in suitable)


def test_explain_on_one_sm_leaves_clusters_out(call):
    out = call("explain", "64x4096x7168", "--num-sms", "1", "--all")[1]
    assert kernels_in(out)
    assert all("_c1x1" in name for name in kernels_in(out))


# ---- 80 columns


def shown_at_80(call, monkeypatch, *arguments) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(*arguments)
    assert code == 0
    return out.splitlines()


NAME = re.compile(r"fp8_gemm_\w+")


@pytest.mark.parametrize(
    "arguments",
    [
        "explain 4096x4096x7168 --all",
        "explain 100x576x7168 --hardware H20",
        "explain 16x1536x2048 --groups 128",
        "explain attention --head-dim 128",
        "explain convolution --height 56 --width 56 --channels 256 --filters 256",
        "explain elementwise --elements 29360128 --read-bytes 4 --write-bytes 2",
        "explain reduction --rows 4096 --columns 7168 --read-bytes 2 --write-bytes 1",
        f"compile --shape {FEW_KERNELS} --jobs 1",
        "cache info",
        "doctor",
    ],
)
def test_output_is_readable_at_80_columns(call, monkeypatch, arguments):
    """No line is wider, none ends in spaces, and tables fold no number and no kernel's name."""
    lines = shown_at_80(call, monkeypatch, *arguments.split())
    assert lines and max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith(" ")]
    names = {name for line in lines for name in NAME.findall(line)}
    known = {config.name for config in (*default_configs(True), *default_configs(False), *all_grouped_configs())}
    assert names <= known
    for number, line in enumerate(lines):
        if line.startswith("fp8_gemm_") and len(line.split()) > 3:  # a row of a table
            following = lines[number + 1] if number + 1 < len(lines) else ""
            assert not following.startswith("   "), line


def test_demo_is_readable_at_80_columns(show_demo, monkeypatch, one_layer):
    lines = shown_at_80(show_demo, monkeypatch)
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if re.match(r"fp8_gemm_\S+ +\d|fp8 +e4m3, e4m3 +1x128, 128x128 +bf16", line)]
    assert len(rows) == 3 and all(re.search(r" [\d.e-]+$", row) for row in rows)
    assert lines[-1].startswith("All is well: ")


@pytest.fixture
def made_up_gpu(monkeypatch):
    """Times and errors of a made-up GPU for the demos, by real kernels' names."""
    monkeypatch.setattr(deep_tile, "is_available", lambda: (True, "a made-up H200"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(timing, "L2Flush", lambda: None)


def test_demo_on_a_gpu_is_readable_at_80_columns(show_demo, monkeypatch, made_up_gpu):
    def measure(m, n, k, flush):
        return demo._Measured(choose(GemmProblem(m, n, k)).name, 1000.0, 1100.0, 2000.0, 1.66e-3)

    monkeypatch.setattr(demo, "_measure", measure)
    monkeypatch.setattr(demo_kinds, "_error", lambda kind, shape, device: 0.0)
    monkeypatch.setattr(demo_kinds, "_prepared", lambda kind: None)
    monkeypatch.setattr(timing, "capture", lambda call: call)
    times = dict.fromkeys(demo_kinds.SHOWN, SimpleNamespace(us=1234.5))
    monkeypatch.setattr(timing, "time_alternating", lambda graphs, samples, flush: times)
    lines = shown_at_80(show_demo, monkeypatch)
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("4096x7168x16384"))
    assert row.split() == ["4096x7168x16384", "1000.0", "962", "2000.0", "2.00", "1100.0", "1.10", "1.7e-03"]
    assert next(line for line in lines if line.startswith("int8_rows ")).split()[-2:] == ["50", "0.00e+00"]
    verdict = " ".join(lines[-3:])
    assert "2.00 times as fast as BF16 and 1.10 times as fast as per-tensor cuBLAS" in verdict


def test_demo_of_experts_on_a_gpu_is_readable_at_80_columns(show_demo, monkeypatch, made_up_gpu):
    class Layer:
        def __init__(self, *given): ...

        def __call__(self, *given): ...

        def checked(self, *given):
            return dict.fromkeys(demo_experts._STEPS, 1.66e-3)

        def loop(self, *given): ...

    monkeypatch.setattr(demo_experts, "Layer", Layer)
    monkeypatch.setattr(demo_experts, "routed", lambda *given: ())
    monkeypatch.setattr(timing, "capture", lambda call: SimpleNamespace(replay=None))
    times = {"ours": SimpleNamespace(us=1000.0), "loop": SimpleNamespace(us=24000.0)}
    monkeypatch.setattr(timing, "time_calls", lambda calls, samples, flush: times)
    lines = shown_at_80(show_demo, monkeypatch, "--experts")
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("2048 ")).split()[:4] == ["2048", "1000.0", "24000.0", "24.0"]
    assert "12 steps are right, and the layer is 24.0 to 24.0 times as fast" in " ".join(lines[-2:])


def test_demo_shows_what_an_h200_took(show_demo, monkeypatch):
    monkeypatch.setattr(demo, "build_all", lambda configs, jobs: [])
    monkeypatch.setattr(demo_kinds, "show_without_gpu", lambda: 0)
    lines = shown_at_80(show_demo, monkeypatch)
    (title,) = (number for number, line in enumerate(lines) if line.startswith("Not measured here: stored times"))
    rows = [line.split() for line in lines[title + 3 : title + 21]]
    assert [row[0] for row in rows] == ["x".join(map(str, shape)) for shape in demo._demo_shapes()]
    assert all(float(bf16) / float(us) == pytest.approx(float(gain), abs=0.02) for _, us, _, bf16, gain in rows)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    now = iter(range(0, 100, 4))
    monkeypatch.setattr(progress, "monotonic", lambda: next(now))
    assert list(progress.track_progress(range(8), "Compiling")) == [*range(8)]
    err = capsys.readouterr().err
    assert re.fullmatch(r"(Compiling: \d of 8\n){2}", err), err


# ---- compile


def test_compile_fills_the_cache_with_what_a_shape_needs(call, cache):
    code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "2")
    max_m, n, k = map(int, FEW_KERNELS.split("x"))
    wanted = {config for store in (True, False) for config in configs_for(GemmProblem(1, n, k, 132, store), max_m)}
    assert code == 0, err
    assert sorted(kernels_in(out)) == sorted(config.name for config in wanted)
    assert jit.cache_info().entries == len(wanted)
    before = jit.compilations()
    assert deep_tile.precompile([(n, k, max_m)], num_sms=132).compiled == 0
    assert jit.compilations() == before


def test_compile_without_shapes_takes_every_default_config():
    wanted = wanted_configs(argparse.Namespace(shape=[], num_sms=132, grouping=None))
    default = (*default_configs(True), *default_configs(False), *all_grouped_configs())
    assert sorted(wanted, key=repr) == sorted(default, key=repr)


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


def test_compile_fails_where_the_limit_evicts_kernels(call, cache, monkeypatch):
    size_bytes = 60_000  # of one kernel and a half
    monkeypatch.setattr(settings, "cache_max_bytes", functools.cache(lambda: size_bytes))
    code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    count = len(kernels_in(out))
    assert code == 1
    assert f"{cache} holds 1 kernel," in out
    assert f"serves 1 of these {count} kernels" in err
    assert "set DEEP_TILE_CACHE_MAX_MB to 1 or more" in err


@pytest.mark.parametrize("directory", ["/dev/null/cache", None], ids=["unwritable", "none"])
def test_compile_fails_where_kernels_stay_in_memory(call, monkeypatch, directory):
    for name in ("DEEP_TILE_CACHE_DIR", "DG_JIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if directory:
        monkeypatch.setenv("DEEP_TILE_CACHE_DIR", directory)
    with pytest.warns(RuntimeWarning, match="in memory only"):
        code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    assert code == 1
    assert f"serves 0 of these {len(kernels_in(out))} kernels" in err
    assert "set DEEP_TILE_CACHE_DIR" in err
    assert f"{directory} holds 0 kernels" in out or directory is None


def test_compile_fails_where_a_kernel_may_hang(call, cache, monkeypatch):
    monkeypatch.setattr(sass, "divergence", lambda cubin: ("WARPSYNC at 0x10", "...") if b"_any" in cubin else ())
    code, out, err = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    bad = [name for name in kernels_in(out) if name.endswith("_any")]
    assert code == 1 and 0 < len(bad) < len(kernels_in(out))
    why = f"NVRTC {jit.nvrtc_version()} compiles it with divergent warps (WARPSYNC at 0x10 and 1 more)"
    assert all(f"{name} may hang: {why}" in err for name in bad)
    assert err.count("may hang") == len(bad)
    assert f"Remedy: {jit.divergence_remedy()}" in err
    assert jit.cache_info().entries == len(kernels_in(out)) - len(bad)


def test_compile_with_a_dump_directory_leaves_the_cache_alone(call, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_TILE_DUMP_DIR", str(tmp_path / "dump"))
    before = jit.compilations()
    code, out, _ = call("compile", "--shape", FEW_KERNELS, "--jobs", "1")
    assert code == 0
    assert jit.compilations() - before == len(kernels_in(out))
    assert all((tmp_path / "dump" / f"{name}.ptx").is_file() for name in kernels_in(out))
    assert not cache.exists()


# ---- cache


def test_cache_info_and_clear(call, cache):
    assert f"{cache} holds 0 kernels" in call("cache", "info")[1]
    assert not cache.exists()
    jit.load_cubin('extern "C" __global__ void nothing() {}', "nothing")
    assert f"{cache} holds 1 kernel," in call("cache", "info")[1]
    code, out, _ = call("cache", "clear")
    assert (code, "Removed 1 kernel," in out, str(cache) in out) == (0, True, True)
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
    assert found["deep_tile"]["seen"].startswith(deep_tile.__version__)
    assert found["Python"]["seen"] == platform.python_version() and "Linux" in found["system"]["seen"]


def test_doctor_prints_a_table(call):
    code, out, _ = call("doctor")
    assert code == 0
    assert f"deep_tile works here, on CPU tensors only: {NO_GPU}" in out
    assert 'deep_tile[cu13]"' not in out  # no remedy where nothing is wrong


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_doctor_says_whether_engines_are_hooked(call, monkeypatch, engine):
    oldest, version = ".".join(map(str, engine.oldest)), metadata.version
    installed, announced = {engine.name: f"{oldest}.post1"}, [SimpleNamespace(name="deep_tile")]
    monkeypatch.setattr(metadata, "version", lambda name: installed[name] if name in installed else version(name))
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: announced if group == engine.group else ())
    for name in (engine.variable, engine.chosen_plugins):
        monkeypatch.delenv(name, raising=False)

    def look() -> tuple[str, str, str]:
        check = next(check for check in doctor._checks() if check.subject == engine.name)
        return doctor._examine(check)[0:1] + doctor._examine(check)[2:]

    assert look() == ("ok", f"{oldest}.post1, not hooked: {engine.variable} is not set to 1", "")
    monkeypatch.setenv(engine.variable, "1")
    assert look() == ("ok", f"{oldest}.post1, hooked by {engine.variable}", "")
    monkeypatch.setenv(engine.chosen_plugins, "lora, other")
    assert look()[0] == "warn" and f"add deep_tile to {engine.chosen_plugins}" in look()[2]
    monkeypatch.setenv(engine.chosen_plugins, "other,deep_tile")
    assert look()[0] == "ok"
    announced.clear()
    assert look()[0] == "warn" and "with pip" in look()[2]
    installed[engine.name] = "99.0"
    assert look()[0] == "warn" and f"{engine.name} is 99.0" in look()[1]
    monkeypatch.setenv(engine.variable, "perhaps")
    assert look()[0] == "warn" and "'perhaps'" in look()[1]
    del installed[engine.name]
    assert engine.name not in {check.subject for check in doctor._checks()}


def test_doctor_fails_without_a_compiler(call, monkeypatch):
    def refuse(source, name):
        raise jit.CompileError("NVRTC 99 cannot compile")

    monkeypatch.setattr(jit, "compile_kernel", refuse)
    code, found = findings(call)
    assert code == 1
    assert found["compiler"]["status"] == "fail"
    assert found["compiler"]["seen"] == "CompileError: NVRTC 99 cannot compile"
    assert found["cache"]["seen"] == "no kernel to keep there: CompileError: NVRTC 99 cannot compile"
    assert found["cache"]["remedy"] == found["compiler"]["remedy"] and "CACHE_DIR" not in found["cache"]["remedy"]
    assert "deep_tile[cu13]" in found["compiler"]["remedy"]
    printed = call("doctor")[1]
    assert "cannot work here" in printed and "deep_tile[cu13]" in printed  # brackets reach the reader


def off_by_a_percent(patch):
    right = deep_tile.fp8_gemm
    patch.setattr(deep_tile, "fp8_gemm", lambda *operands: right(*operands) * 1.01)


def let_warps_diverge(patch):
    name = choose(DOCTORS_KERNELS[-1]).name.encode()
    patch.setattr(sass, "divergence", lambda cubin: ("WARPSYNC at 0x10",) if name in cubin else ())


def damage_tuned_choices(patch):
    damaged = settings.cache_dir() / "tuned.json"
    damaged.parent.mkdir(mode=0o700)
    damaged.write_text("{")
    patch.setenv("DEEP_TILE_TUNED", str(damaged))


def dump(patch):
    patch.setenv("DEEP_TILE_DUMP_DIR", str(settings.cache_dir().parent / "dump"))


def set_to(name, value):
    return lambda patch: patch.setenv(name, value)


ODDITIES = {
    "a kernel may hang": (let_warps_diverge, "compiler", "fail", "may hang: NVRTC", jit.TESTED_WHEELS["13"]),
    "an untested NVRTC": (lambda patch: patch.setattr(jit, "nvrtc_version", lambda: "13.99.1"),
                          *("NVRTC", "warn", "tested with 12.9 to 13.5: `deep-tile compile` checks every kernel", "")),
    "no cache while dumping": (dump, "cache", "warn", "", "unset DEEP_TILE_DUMP_DIR"),
    "damaged choices": (damage_tuned_choices, "tuned choices", "warn", "tuned.json", "remove that file"),
    "no room": (set_to("DEEP_TILE_CACHE_DIR", "/dev/null/cache"), "cache", "warn", "/dev/null/cache", ""),
    "wrong products": (off_by_a_percent, "product", "fail", "", ""),
    "a variable of nobody": (set_to("DEEP_TILE_CACHE", "/tmp"), "variables", "warn", "DEEP_TILE_CACHE", ""),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODDITIES)
def test_doctor_names_what_is_odd(call, monkeypatch, odd):
    make, subject, status, seen, remedy = ODDITIES[odd]
    make(monkeypatch)
    code, found = findings(call)
    assert (code, found[subject]["status"]) == (status == "fail", status)
    assert seen in found[subject]["seen"] and remedy in found[subject]["remedy"]


@pytest.mark.parametrize(
    ("variable", "value", "remedy", "failing"),
    [
        (settings.CACHE_MAX_MB, "lots", "a positive integer", {"DEEP_TILE_CACHE_MAX_MB", "cache"}),
        (settings.TUNED, "mine.json", "an absolute path", {"DEEP_TILE_TUNED", "tuned choices", "compiler", "cache"}),
        (settings.DUMP_DIR, "here", "an absolute path", {"DEEP_TILE_DUMP_DIR", "compiler", "cache"}),
        (settings.DUMP_DIR, "/dev/null/here", "a directory that can be written", {"compiler"}),
    ],
)
def test_doctor_blames_the_variable_wherever_it_is_in_the_way(call, monkeypatch, variable, value, remedy, failing):
    monkeypatch.setenv(variable.name, value)
    code, found = findings(call)
    assert code == 1
    assert {subject for subject, finding in found.items() if finding["status"] == "fail"} == failing
    assert {found[subject]["remedy"] for subject in failing} == {f"set {variable.name} to {remedy}, or unset it"}


def test_doctor_warns_of_a_driver_older_than_nvrtc(call, monkeypatch):
    monkeypatch.setattr(_launcher, "driver_version", lambda: 12080)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0.88")
    found = findings(call)[1]
    assert found["driver"] == {"status": "ok", "subject": "driver", "seen": "up to CUDA 12.8", "remedy": ""}
    assert (found["NVRTC"]["status"], "CUDA 12.8 only" in found["NVRTC"]["seen"]) == ("warn", True)


# ---- demo


@pytest.fixture
def one_layer(monkeypatch):
    monkeypatch.setattr(demo, "DEEPSEEK_V3_LAYERS", {"a layer": (512, 256)})
    monkeypatch.setattr(demo, "TOKENS", (8, 4096))
    monkeypatch.setattr(demo_kinds, "SHOWN", demo_kinds.SHOWN[:2])


def test_demo_without_a_gpu_compiles_and_computes(show_demo, one_layer):
    code, out, err = show_demo()
    assert code == 0, err
    assert NO_GPU in out
    assert set(kernels_in(out)) == {choose(GemmProblem(m, 512, 256)).name for m in demo.TOKENS}
    for kind in demo_kinds.SHOWN:
        name = choose(demo_kinds._problem(kind, demo_kinds.SHAPE)).name
        assert re.search(rf"^{kind.name} .*{kind.output} +{name} ", out, re.MULTILINE)
    assert float(re.search(r"against float64: relative error (\S+)", out)[1]) <= MAX_RELATIVE_ERROR
    assert re.search(r"^4096x4096x7168 .*\d\.\d\d$", out, re.MULTILINE) is None  # of the layers asked for alone
    assert re.search(r"\nAll is well: 4 kernels compile without spills, and 3 products are right. \d+ s.\n$", out)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_demo_fails_on_a_wrong_product(show_demo, one_layer, monkeypatch, factor):
    right = deep_tile.fp8_gemm
    monkeypatch.setattr(deep_tile, "fp8_gemm", lambda *operands, **how: right(*operands, **how) * factor)
    code, out, err = show_demo()
    assert code == 1
    assert "exceeds" in err
    assert "All is well" not in out and "\nSomething is wrong: see the messages above" in out


def test_every_kind_is_shown_and_as_exact_as_it_is_to_be():
    assert {kind.family for kind in demo_kinds.SHOWN} == set(FAMILIES)
    for kind in demo_kinds.SHOWN:
        assert demo_kinds._error(kind, demo_kinds.SMALL, "cpu") <= products.most_error(kind, demo_kinds.SMALL[2])


def test_demo_fails_on_a_wrong_kind(show_demo, one_layer, monkeypatch):
    right = demo_kinds.multiply

    def wrong(kind, operands, out):
        return right(kind, operands, out).mul_(1.01 if kind.name == "bf16" else 1)

    monkeypatch.setattr(demo_kinds, "multiply", wrong)
    code, _, err = show_demo()
    assert code == 1
    assert "bf16: relative error" in err and err.count("exceeds") == 1


@pytest.mark.gpu
def test_demo_on_a_gpu_times_and_checks(show_demo, one_layer, monkeypatch):
    monkeypatch.setattr(deep_tile, "is_available", deep_tile.checks.is_available)
    code, out, err = show_demo()
    assert code == 0, err
    assert "TFLOPS" in out
    assert all(re.search(rf"^{kind.name} .*{kind.output}", out, re.MULTILINE) for kind in demo_kinds.SHOWN)
    assert all(choose(GemmProblem(m, 512, 256)).name in out for m in demo.TOKENS)


@pytest.fixture
def few_experts(monkeypatch):
    monkeypatch.setattr(demo_experts, "QWEN3_30B", demo_experts.Sizes(16, 3, 256, 128))
    monkeypatch.setattr(demo_experts, "TOKENS", (40, 300))


def test_demo_of_experts_without_a_gpu_compiles_and_computes(show_demo, few_experts):
    code, out, err = show_demo("--experts")
    assert code == 0, err
    assert NO_GPU in out
    asked = [(16, -(-tokens * 3 // 16), n, k) for tokens in (40, 300) for n, k in ((256, 256), (256, 128))]
    assert set(kernels_in(out)) == {deep_tile.explain_groups(*groups)["config"] for groups in asked}
    steps = re.findall(r"^(?:gate and up|activation and cast|down|sum) +(\S+e-\d+) +\S+e-\d+$", out, re.MULTILINE)
    errors = [float(error) for error in steps]
    assert len(errors) == 4 and sorted(errors)[2] <= MAX_RELATIVE_ERROR < max(errors)


@pytest.mark.parametrize(
    ("name", "step"),
    [("fp8_grouped_gemm", "gate and up"), ("silu_mul_cast_to_fp8", "activation and cast"), ("combine", "sum")],
)
def test_demo_of_experts_fails_on_a_wrong_step(show_demo, few_experts, monkeypatch, name, step):
    right = getattr(deep_tile, name)

    def wrong(*given):
        if name == "silu_mul_cast_to_fp8":
            return right(given[0] * 1.1)
        return right(*given) * 1.01

    monkeypatch.setattr(deep_tile, name, wrong)
    code, _, err = show_demo("--experts")
    assert code == 1 and f"tokens, {step}: relative error" in err and "exceeds" in err


@pytest.mark.gpu
def test_demo_of_experts_on_a_gpu_times_and_checks(show_demo, few_experts, monkeypatch):
    monkeypatch.setattr(deep_tile, "is_available", deep_tile.checks.is_available)
    code, out, err = show_demo("--experts")
    assert code == 0, err
    assert "times as fast as a loop in BF16" in out and re.search(r"^300 +\d", out, re.MULTILINE)


# ---- scripts of a checkout


def test_demo_is_called_with_its_arguments(capfd):
    assert cli.main(["demo", "--help"]) == 0
    assert "--experts" in capfd.readouterr().out


def test_bench_passes_its_arguments_on(capfd):
    assert cli.main(["bench", "--help"]) == 0
    assert "--sustained" in capfd.readouterr().out


def test_bench_needs_a_gpu(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["bench", "--shapes", "nine"]) == 1
    out, err = capfd.readouterr()
    assert (out, err.partition(":")[0]) == ("", "benchmarks need a Hopper GPU")


@pytest.mark.parametrize("script", cli.SCRIPTS)
def test_a_script_outside_a_checkout_says_where_it_is(call, monkeypatch, tmp_path, script):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    code, _, err = call(*script.split())
    assert code == 1 and err.startswith(f"deep-tile: {cli.SCRIPTS[script][0]} is not part of the installed package")
    assert f"python -m deep_tile {script}" in err and "in a checkout" in err


# ---- arguments and errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["polish"], "'polish'"),
        (["explain"], "required: MxNxK"),
        (["explain", "1", "2", "3"], "'1' is not MxNxK, such as 4096x7168x2048"),
        (["explain", "1x2x-3"], "'1x2x-3' is not MxNxK"),
        (["explain", "1x0x3"], "'0' is not a positive integer"),
        (["explain", "1x2x3", "--num-sms", "many"], "'many' is not a positive integer"),
        (["compile", "--shape", "7168x2048"], "'7168x2048' is not MxNxK"),
        (["compile", "--shape", "64x7168x100"], "multiple of 16 bytes"),
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


def test_without_arguments_it_shows_the_help(call):
    code, out, err = call()
    assert (code, err) == (2, "") and "explain" in out and "doctor" in out


def test_errors_are_one_line_and_code_1(call, monkeypatch):
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", "relative")
    code, out, err = call("cache", "info")
    assert (code, out) == (1, "")
    assert err.startswith("deep-tile: environment variable DEEP_TILE_CACHE_DIR") and err.count("\n") == 1


def run_without(package: str, *arguments: str) -> subprocess.CompletedProcess:
    """A command line where a package is not installed."""
    hide = f"import sys; sys.modules[{package!r}] = None"
    program = f"{hide}\nfrom deep_tile.tools.cli import main\nsys.exit(main(sys.argv[1:]))"
    return run_python(program, *arguments, status=None)


@pytest.mark.parametrize(
    ("package", "arguments", "remedy"),
    [
        ("torch", ("compile", "--shape", FEW_KERNELS), "pip install torch"),
        ("torch", ("tune", "512x256"), "pip install torch"),
        ("matplotlib", ("explain", "16x512x256", "--plot", "roof"), 'pip install "deep_tile[bench]"'),
    ],
)
def test_missing_package_is_one_line_with_its_remedy(package, arguments, remedy):
    finished = run_without(package, *arguments)
    assert finished.returncode == 1
    assert package in finished.stderr
    assert finished.stderr.endswith(f"To fix: {remedy}\n") and finished.stderr.count("\n") == 1


def test_doctor_without_torch_says_how_to_get_it(cache):
    finished = run_without("torch", "doctor", "--json")
    report = json.loads(finished.stdout)
    failing = {finding["subject"]: finding["remedy"] for finding in report["findings"] if finding["status"] == "fail"}
    assert (finished.returncode, finished.stderr) == (1, "")
    assert failing == dict.fromkeys(("PyTorch", "GPU", "product"), "pip install torch")


def test_bug_in_an_import_is_not_taken_for_a_missing_package():
    assert "Traceback" in run_without("deep_tile.reference", "compile", "--shape", FEW_KERNELS).stderr


def test_module_runs_as_a_program():
    finished = subprocess.run([sys.executable, "-m", "deep_tile", "--version"], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, f"deep_tile {deep_tile.__version__}\n")


SHOWN = "explain 16x512x256"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"{SHOWN} | true", 1),
        (f"{SHOWN} --json | true", 1),
        (f"{SHOWN} --groups 2 --json | true", 1),
        (f"{SHOWN} >&-", 0),
        (f"compile --shape {FEW_KERNELS} >/dev/null 2>&-", 0),
    ],
)
def test_closed_streams_end_nothing_with_a_traceback(tmp_path, line, code):
    environment = os.environ | {"PYTHON": sys.executable, "DEEP_TILE_CACHE_DIR": str(tmp_path / "cache")}
    pipe = ["bash", "-c", f"set -o pipefail; $PYTHON -m deep_tile {line}"]
    finished = subprocess.run(pipe, env=environment, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (code, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_output_keeps_to_the_encoding_of_stdout(encoding):
    command = [sys.executable, "-m", "deep_tile", *SHOWN.split()]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    finished = subprocess.run(command, env=environment, capture_output=True)
    assert (finished.returncode, finished.stderr) == (0, b"")
    assert finished.stdout.isascii() and b"fp8_gemm_64x" in finished.stdout


@pytest.mark.parametrize("columns", ["0", "", "many"])
def test_output_has_columns_where_none_are_told(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert "Kernel:    fp8_gemm_64x" in call(*SHOWN.split())[1]


def test_progress_needs_no_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.track_progress([1, 2], "Counting")) == [1, 2]
