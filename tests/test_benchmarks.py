"""The benchmark scripts without a GPU: shapes, contestants on small CPU inputs, conclusions and files."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # Appended: an installed deep_tile still comes first.

from benchmarks import (  # noqa: E402
    bench_gemm,
    bench_overhead,
    bench_train,
    bench_unseen,
    calibrate,
    energy,
    measured,
    report,
    report_train,
    same_code,
    search,
    search_chain,
    store,
    timing,
)
from benchmarks.bench_kinds import problem_of  # noqa: E402
from benchmarks.peers import PEERS, Inputs, deep_tile_peer  # noqa: E402
from benchmarks.shapes import (  # noqa: E402
    BETWEEN,
    DENSE,
    M_RANGES,
    NARROW_N,
    NINE,
    SHORT_K,
    UNSEEN,
    Shape,
    m_range,
    select_shapes,
)
from deep_tile import cast  # noqa: E402
from deep_tile.kinds import KINDS, LAYOUTS  # noqa: E402
from deep_tile.method import report as report_of_package  # noqa: E402
from deep_tile.problem import GemmProblem  # noqa: E402
from deep_tile.reference import MAX_RELATIVE_ERROR, relative_error  # noqa: E402
from deep_tile.select import cost  # noqa: E402
from deep_tile.select.choose import choose, choose_bucket  # noqa: E402
from deep_tile.select.defaults import default_configs  # noqa: E402

pytestmark = pytest.mark.about(
    "benchmarks/*.py", "tests/default_kernels.py", "deep_tile/tools/*", "deep_tile/codegen.py"
)

SMALL = Shape(32, 160, 272)


def made_up_run(gpu="NVIDIA H200", scale=1.0):
    """Published times under deep_tile's name: DeepGEMM's, so every ratio is known."""
    published = store.load(report.PUBLISHED)
    rows = []
    for row in published["shapes"]:
        results = {name: dict(result) for name, result in row["results"].items() if name.startswith("cublaslt")}
        results = {"deep_tile": {"us": row["results"]["deep_gemm"]["us"] * scale}, **results}
        rows.append({**row, "config": "fp8_gemm_x", "results": results})
    labels = {name: peer.label for name, peer in PEERS.items()}
    return {"meta": {"gpu": gpu, "date": "2026-11-21", "labels": labels}, "shapes": rows}


def test_shapes_are_those_of_the_published_table():
    published = store.load(report.PUBLISHED)
    assert [report.shape_of(row) for row in published["shapes"]] == list(DENSE)
    assert (len(DENSE), len(set(DENSE)), len(NINE)) == (84, 84, 9)
    assert set(NINE) <= set(DENSE)
    searched = DENSE + SHORT_K + NARROW_N + BETWEEN
    assert len(set(searched + UNSEEN)) == len(searched + UNSEEN)


@pytest.mark.parametrize(
    ("shape", "estimate"),
    [("1x2112x7168", 8.8), ("128x7168x16384", 34.8), ("4096x7168x576", 25.8), ("8192x8192x8192", 736.3)],
)
def test_estimate_is_that_of_the_published_table(shape, estimate):
    assert Shape.parse(shape).estimate_us() == pytest.approx(estimate, abs=0.05)


def test_nobody_beats_the_estimate_by_much():
    published = store.load(report.PUBLISHED)
    for name in report.contestants(published):
        for shape, us in report.times(published, name).items():
            assert us > 0.93 * shape.estimate_us(), (name, shape)


def test_select_shapes():
    assert select_shapes("all") == list(DENSE)
    assert select_shapes("nine") == list(NINE)
    assert select_shapes("searched") == [*DENSE, *SHORT_K, *NARROW_N, *BETWEEN]
    assert select_shapes("unseen") == [*UNSEEN]
    assert sum(len(select_shapes(name)) for name in M_RANGES) == 84
    assert {shape.m for shape in select_shapes("m<=128")} == {1, 8, 16, 32, 64, 128}
    assert select_shapes("1x2x3,4x5x6") == [Shape(1, 2, 3), Shape(4, 5, 6)]
    assert [m_range(Shape(m, 1, 1)) for m in (128, 129, 1024, 1025)] == ["m<=128", *["m=129-1024"] * 2, "m>1024"]
    for wrong in ("1x2", "0x2x3", "axbxc", "some"):
        with pytest.raises(ValueError, match="MxNxK"):
            select_shapes(wrong)


@pytest.mark.parametrize("name", ["deep_tile", "cublaslt_tensor_slow", "torch_bf16"])
def test_contestants_compute_what_they_are_held_against(name):
    inputs = Inputs(SMALL, device="cpu")
    output = PEERS[name].prepare(inputs)()
    assert (output.dtype, tuple(output.shape)) == (torch.bfloat16, (SMALL.m, SMALL.n))
    assert relative_error(output, getattr(inputs, PEERS[name].expected)) < MAX_RELATIVE_ERROR


def test_block_wise_scales_are_laid_out_for_cublaslt(monkeypatch):
    """1x128 scales M-major; 128x128 scales K-major with K blocks padded to a multiple of 4: 3 of them become 4."""
    seen = []
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *arguments, **keywords: seen.extend(arguments))
    inputs = Inputs(SMALL, device="cpu")
    PEERS["cublaslt_block"].prepare(inputs)()
    a_scale, b_scale = seen[2], seen[4]
    assert (a_scale.shape, a_scale.stride()) == ((32, 3), (1, 32))
    assert (b_scale.shape, b_scale.stride()) == ((4, 2), (1, 4))
    assert torch.equal(a_scale, inputs.a_scale) and torch.equal(b_scale[:3].t(), inputs.b_scale)


def test_deep_gemm_gets_scales_that_it_need_not_transpose(monkeypatch):
    seen = []
    module = types.SimpleNamespace(fp8_gemm_nt=lambda a, b, out: seen.append((a, b, out)))
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    output = PEERS["deep_gemm"].prepare(Inputs(Shape(30, 160, 272), device="cpu", scale_layout="row"))()
    ((_, a_scale), _, out) = seen[0]
    assert a_scale.stride() == (1, 32)
    assert out is output


@pytest.fixture
def without_gpu(monkeypatch):
    """bench_gemm on the CPU: one call instead of a graph, a made-up time instead of a measured one."""
    once = timing.Timing(30.0, 29.0, 32.0)
    made_up = {
        "is_available": lambda: (True, "made up"),
        "L2Flush": lambda: None,
        "capture_empty": lambda: None,
        "capture": lambda call: timing.Captured(None, call(), call),
        "time_alternating": lambda graphs, repeats, flush: dict.fromkeys(graphs, once),
        "time_sustained": lambda graph, once_us: timing.Sustained(once_us * 1.1, 20.0),
        "time_cool": lambda graphs, repeats, flush: dict.fromkeys(graphs, 27.0),
        "Inputs": lambda shape, scale_layout: Inputs(shape, "cpu", scale_layout),
        "describe_run": lambda: {"gpu": "none", "date": "2026-11-21"},
    }
    for name, value in made_up.items():
        monkeypatch.setattr(bench_gemm, name, value)
    for name in ("synchronize", "empty_cache", "Stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_power_is_taken_between_steps_of_the_count(monkeypatch):
    """700 W, counted in steps of 70 J ten times a second."""
    clock, seen = [0.0], threading.Event()

    def millijoules() -> int:
        clock[0] += 0.005
        if clock[0] > 0.75:
            seen.set()
        return int(clock[0] / 0.1) * 70_000

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(energy, "_reader", lambda device: millijoules)
    with energy.PowerMeter() as meter:
        assert seen.wait(60)
    assert meter.watts == pytest.approx(700, rel=0.02)
    monkeypatch.setattr(energy, "_reader", lambda device: None)
    with energy.PowerMeter() as meter:
        pass
    assert meter.watts is None


def test_bench_writes_every_contestant_or_a_reason(without_gpu, tmp_path, caplog):
    out = tmp_path / "result.json"
    assert bench_gemm.main(["--shapes", "32x160x272,16x160x272", "--sustained", "--out", str(out)]) == 0
    run = store.load(out)
    for row, shape in zip(run["shapes"], ("32x160x272", "16x160x272"), strict=True):
        assert str(report.shape_of(row)) == shape
        assert row["results"].keys() | row["unsupported"].keys() == PEERS.keys()
        assert row["results"]["deep_tile"]["relative_error"] < MAX_RELATIVE_ERROR
        own_power = {name: row["results"]["deep_tile"][name] for name in ("cool_us", "sustained_us", "millijoules")}
        assert own_power == {"cool_us": 27.0, "sustained_us": pytest.approx(33), "millijoules": 20.0}
        assert "ModuleNotFoundError" in row["unsupported"]["deep_gemm"]
        assert row["config"].startswith("fp8_gemm_")
    assert [record.args[0] for record in caplog.records].count("deep_gemm") == 1  # Said once, not at every shape.


def test_bench_fails_when_deep_tile_is_wrong_or_absent(without_gpu, monkeypatch, caplog):
    def refuse(inputs):
        raise RuntimeError("no such kernel")

    peer = type(deep_tile_peer())
    wrong = peer("deep_tile", "deep_tile", lambda inputs: lambda: inputs.new_out().fill_(1))
    monkeypatch.setitem(PEERS, "deep_tile", wrong)
    assert bench_gemm.main(["--shapes", str(SMALL), "--peers", "deep_tile"]) == 1
    assert "exceeds" in caplog.text
    monkeypatch.setitem(PEERS, "deep_tile", peer("deep_tile", "deep_tile", refuse))
    assert bench_gemm.main(["--shapes", str(SMALL), "--peers", "deep_tile,torch_bf16"]) == 1
    assert "no such kernel" in caplog.text


def test_published_means_are_those_of_the_design():
    """DeepGEMM's time: 1.10, 1.10, 1.07 of cuBLASLt tensor-wise fast, and 1.24, 1.31, 1.19 of the estimate."""
    means = report.all_means(made_up_run())
    assert list(means["cuBLASLt tensor-wise, fast"].values()) == pytest.approx([1.10, 1.10, 1.07], abs=0.006)
    assert list(means[report.ESTIMATE].values()) == pytest.approx([1.24, 1.31, 1.19], abs=0.006)
    assert list(means[report.DEEP_GEMM].values()) == pytest.approx([1, 1, 1])
    assert report.DEEP_GEMM not in report.all_means(made_up_run(gpu="NVIDIA H100"))


def test_comparison_corrects_for_the_card(tmp_path, capsys):
    old, new = made_up_run(), made_up_run(scale=0.8)
    for row in new["shapes"]:
        row["results"][report.COMMON]["us"] *= 0.9
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, run in zip(paths, (old, new), strict=True):
        store.save(path, run)
    assert bench_gemm.main(["--compare", *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    assert "4096x4096x7168" in printed
    assert "0.800" in printed and "0.889" in printed


@pytest.mark.parametrize("text", [None, "xx", "[]", "{}", '{"shapes": [1]}'])
@pytest.mark.parametrize("option", [["--results"], ["--compare", "/dev/null"]], ids=str)
def test_what_holds_no_results_is_refused(tmp_path, capsys, option, text):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        bench_gemm.main([*option, str(path)])
    assert "cannot be read" in (said := capsys.readouterr().err) or "holds no results" in said


@pytest.mark.parametrize("path", sorted(store.FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_stored_results_have_the_form_in_which_they_are_written(path, tmp_path):
    store.save(tmp_path / path.name, store.load(path))
    assert (tmp_path / path.name).read_text() == path.read_text()


BEGIN, END = report.markers("benchmark")


def test_report_writes_tables_and_chart(tmp_path):
    result, other, overhead = (tmp_path / name for name in ("run.json", "other.json", "overhead.json"))
    readme, page = tmp_path / "README.md", tmp_path / "benchmarks.md"
    store.save(result, with_bf16(made_up_run()))
    store.save(other, with_bf16(made_up_run(gpu="NVIDIA H100 80GB HBM3")))
    first = [{"config": "fp8_gemm_x", "first_ms": 321.4, "second_ms": 0.1}]
    calls = {"shape": "64x2112x7168", "host_us": {"deep_tile": 3.21}, "first_calls": {"cold": first, "packaged": first}}
    overhead.write_text(json.dumps(calls | {"meta": {"gpu": "NVIDIA H200", "date": "2026-11-25T00:23:33"}}))
    for path in (readme, page):
        path.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    arguments = [result, other, "--overhead", overhead, "--readme", readme, "--docs", tmp_path]
    report.main([str(argument) for argument in arguments])
    for path in (readme, page):
        text = path.read_text()
        assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n")
        assert "stale" not in text
    assert "| torch BF16 | H200 | 2.00 | 2.00 | 2.00 | 2.00, 2.00 |" in readme.read_text()
    assert f"| {report.DEEP_GEMM} | H200 | 1.00 | 1.00 | 1.00 | 1.00, 1.00 |" in readme.read_text()
    assert "| torch BF16 | H100 | 2.00" in readme.read_text() and f"{report.DEEP_GEMM} | H100" not in readme.read_text()
    text = page.read_text()
    assert "| 4096x2112x7168 | 97.0 | 114.9 | 83.2 | 194.0 | 86.0 | 1279 |" in text
    assert "| deep_tile | 3.2 |" in text and "2026-11-25, 64x2112x7168." in text
    assert "| cold cache | packaged |" in text and "| `fp8_gemm_x` | 321 | 321 |" in text
    chart = (tmp_path / "figures" / "speed.svg").read_text()
    assert "<svg" in chart and not re.search(r"<style|\sstyle=", chart)


def with_bf16(run):
    """The same results, with BF16 at half of deep_tile's speed."""
    for row in run["shapes"]:
        row["results"]["torch_bf16"] = {"us": 2 * row["results"]["deep_tile"]["us"]}
    return run


def test_report_refuses_a_readme_without_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{END} {BEGIN}")
    with pytest.raises(ValueError, match="must hold the line"):
        report.replace_between_markers(readme, "text")
    assert readme.read_text() == f"{END} {BEGIN}"


def test_kernels_of_a_step_count_from_the_end_of_those_before():
    kernels = [(5000.0, 9000.0, "nvjet_x"), (1000.0, 4000.0, "fp8_cast_both"), (2000.0, 6000.0, "fp8_gemm_x")]
    parts = bench_train.parts_of([*kernels, (5500.0, 5600.0, "void multi_tensor_apply"), (9000.0, 9500.0, "other")])
    assert {name: ms for name, ms in parts.items() if ms} == {"casts": 3.0, "GEMMs": 5.0, "all else": 0.5}


def test_report_of_training_writes_every_table(tmp_path, monkeypatch):
    meta = {"gpu": "none", "date": "2026-11-27", "torch": "2", "kernels": "NVRTC 13", "commit": "abcdef012"}
    meta["method"] = "m"
    about = {"meta": meta, "layers": 4, "tokens": 8192}
    step = {"ms": 80.0, "static_gb": 5.0, "peak_gb": 11.0, "timeline_ms": {"casts": 0.0, "GEMMs": 54.0}}
    faster = step | {"ms": 60.0, "peak_gb": 8.0, "timeline_ms": {"casts": 5.0, "GEMMs": 30.0}}
    steps = [step | {"variant": "bf16", "mode": mode} for mode in ("eager", "compile")]
    layer = {"of": "linear", "tokens": 4096, "n": 1024, "k": 1024}
    layer |= {f"{way}, {what}": 10.0 for way in ("bf16", "joined") for what in ("host", "eager", "graph")}
    layer |= {"bf16 forward, host": 3.0, "joined forward, host": 4.0, "joined, graph": 11.0}
    frozen = {"of": "frozen", "n": 4096, "k": 4096}
    frozen |= {f"{way}, {what}": us for way, us in (("bf16", 10), ("fp8", 6)) for what in ("eager", "graph", "bytes")}
    of_experts = [step | {"model": "qwen3", "recipe": "bf16", "mode": "compile"}]
    of_experts += [faster | {"model": "qwen3", "recipe": "fp8", "mode": "compile"}]
    cast = {"cast": "cast_both", "rows": 8192, "columns": 14336, "us": 188.0, "copy_us": 160.0}
    results = {
        "train": {"entries": [*steps, faster | {"variant": "mlp", "mode": "compile"}]},
        "train_layers": {"entries": [layer, layer | {"of": "mlp", "in turn, eager": 20.0}, frozen]},
        "train_experts": {"entries": of_experts},
        "train_casts": {"casts": [cast]},
    }
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    for name, of_benchmark in results.items():
        store.save(tmp_path / f"{name}_h100_2026-11-27.json", about | of_benchmark)
    store.save(tmp_path / "train_h100_2026-11-28.json", {"meta": {}})  # says not how it was measured
    page = tmp_path / "training.md"
    page.write_text("\n".join(line for name in report_train.PARTS for line in report.markers(name)))
    monkeypatch.setattr(sys, "argv", ["report_train.py", "--page", str(page)])
    report_train.main()
    text = page.read_text()
    for line in (
        "| BF16 | 80.0 | 1.00 | 6.00 | 1.00 | 80.0 | 1.00 | 6.00 | 1.00 |",
        "| `Linear` and `mlp` | – | – | – | – | 60.0 | 0.75 | 3.00 | 0.50 |",
        "with `mlp`, in ms: casts 0.0 and 5.0, GEMMs 54.0 and 30.0.",
        "| 1024 | 1.10 |",
        "| 4,096, 1024x1024 | 10 (3) | – | 10 (4) | 10 | 10 | 1.00 | 10 | 11 | 1.10 | ",
        "1 of 1 layers are slower in FP8; 1 of these stay in BF16 by default: 4,096 tokens 1024x1024 (1.10).",
        "| `mlp` | 4,096, 1024x1024 | 10 | 20 | 10 | 1.00 | 1.10 |",
        "| 4096x4096 | 0.60 | 0.60 | 0.60 |",
        "top 8 | 80.0 ms | 60.0 ms | 0.75 | – | – | – | 6.00 | 3.00 |",
        "| `cast_both` | 8192x14336 | 188 | 160 | 1.18 |",
    ):
        assert line in text, line


@pytest.mark.gpu
def test_bench_on_the_gpu(tmp_path):
    out = tmp_path / "result.json"
    arguments = ["--shapes", "64x576x7168,4096x2112x7168", "--repeats", "5", "--sustained", "--out", str(out)]
    assert bench_gemm.main(arguments) == 0
    for row in store.load(out)["shapes"]:
        assert row["results"].keys() >= PEERS.keys() - {"deep_gemm"}
        assert row["empty_graph_us"] > 0
        for name, result in row["results"].items():
            assert result["p10_us"] <= result["us"] <= result["p90_us"]
            assert result["relative_error"] < 0.02, name


@pytest.mark.gpu
def test_overhead_on_the_gpu(tmp_path):
    out = tmp_path / "overhead.json"
    bench_overhead.main(["--out", str(out)])
    result = json.loads(out.read_text())
    assert result["host_us"].keys() >= {"deep_tile", bench_overhead.ALLOCATING, bench_overhead.PLAN, "torch_bf16"}
    assert result["host_parts_us"].keys() >= {"(only call a function)", "(only read the tensors)", "fp8_gemm"}
    cold, disk = (result["first_calls"][state] for state in ("cold", "disk"))
    assert [row["config"] for row in cold] == [row["config"] for row in disk]
    assert {row["compiled"] for row in cold} == {1} and {row["compiled"] for row in disk} == {0}


def test_explain_shows_the_newest_results_of_what_is_chosen():
    """If this fails: PYTHONPATH=. python benchmarks/measured.py."""
    assert measured.as_text(measured.collect()) == report_of_package.MEASURED.read_text()


def test_newest_run_of_a_known_gpu_counts(tmp_path):
    name = choose(GemmProblem(24, 512, 512)).name
    row = {"m": 24, "n": 512, "k": 512, "config": name, "results": {"deep_tile": {"us": 9.0}}}
    old = {"meta": {"gpu": "NVIDIA H200", "date": "2026-11-20T01"}, "shapes": [row, {**row, "config": "another"}]}
    new = {"run": {"gpu": "NVIDIA H200", "date": "2026-11-22T01"}, "us": {"24x512x512": {name: 8.0, "another": 1.0}}}
    unknown = {"meta": {"gpu": "NVIDIA A100", "date": "2027"}, "shapes": [row]}
    for stem, run in (("old", old), ("new", new), ("unknown", unknown), ("no_run", {})):
        (tmp_path / f"{stem}.json").write_text(json.dumps(run))
    found = measured.collect(tmp_path)
    assert found == {"runs": ["new.json, 2026-11-22"], "gpus": {"H200": {"24x512x512": [name, 8.0, 0]}}}
    assert json.loads(measured.as_text(found)) == found


def test_searches_are_averaged():
    now = {"1x2x3": {"a": 10.0, "b": 12.0, "c": 20.0}, "4x5x6": {"a": 7.0}}
    slower_gpu = {"1x2x3": {"a": 22.0, "b": 24.0, "gone": 1.0}}
    found = search.averaged([now, slower_gpu])
    scale = (10 / 22 + 12 / 24) / 2
    assert found["4x5x6"] == {"a": pytest.approx(7.0)}
    assert found["1x2x3"].keys() == {"a", "b", "c"}
    assert found["1x2x3"]["a"] == pytest.approx((10 * 22 * scale) ** 0.5)
    assert found["1x2x3"]["b"] == pytest.approx((12 * 24 * scale) ** 0.5)
    assert found["1x2x3"]["c"] == pytest.approx(20)


def test_chains_are_of_the_same_contenders_for_all_shapes_of_a_bucket(tmp_path, monkeypatch):
    searched = {
        "1x4096x512": {"a": 10.0, "b": 10.2, "c": 12.0},
        "8x4096x512": {"a": 10.0, "b": 11.0, "c": 10.1},
        "16x4096x512": {"a": 10.0, "b": 11.0, "c": 12.0},
        "256x4096x512": {"a": 10.0},
    }
    search_file, out = tmp_path / "search.json", tmp_path / "chains.json"
    search_file.write_text(json.dumps({"us": searched}))
    monkeypatch.setattr(sys, "argv", ["search_chain.py", str(search_file), "--out", str(out)])
    monkeypatch.setattr(search_chain, "chain_us", lambda shape, names, flush: dict.fromkeys(sorted(names), 1.0))
    monkeypatch.setattr(timing, "L2Flush", lambda: None)
    monkeypatch.setattr(timing, "describe_run", dict)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    search_chain.main()
    timed = {shape: set(us) for shape, us in json.loads(out.read_text())["us_per_launch"].items()}
    assert timed == {"1x4096x512": {"a", "b", "c"}, "8x4096x512": {"a", "b", "c"}, "16x4096x512": {"a"}}


def test_a_config_is_chosen_by_its_time_alone_or_by_that_and_its_time_in_chains():
    alone = {"a": 10.0, "b": 10.2, "c": 12.0}
    by_time = calibrate.scores(alone, None, {"a", "b"})
    assert min(by_time, key=by_time.get) == "a"
    by_both = calibrate.scores(alone, {"a": 9.0, "b": 8.0}, {"a", "b"})
    assert by_both == pytest.approx({"a": math.log(90) / 2, "b": math.log(81.6) / 2})
    assert calibrate.scores(alone, {"a": 9.0, "b": 8.0, "c": 5.0}, {"a", "b"}) == by_both


@pytest.fixture
def model_alone(monkeypatch):
    """The selector without measured choices."""
    model = cost.calibration()
    monkeypatch.setattr("deep_tile.select.choose.calibration", lambda kind: model._replace(choices={}))
    choose_bucket.cache_clear()
    yield
    choose_bucket.cache_clear()


@pytest.mark.usefixtures("model_alone")
def test_choices_are_listed_where_the_model_chooses_another():
    shape = Shape(64, 4096, 7168)
    chosen = choose(GemmProblem(*shape)).name
    times = {chosen: 10.0, "other": 10.1}
    assert calibrate.better_choices({shape: times}, {}) == {}
    assert calibrate.better_choices({shape: times}, {shape: {chosen: 9.0, "other": 8.0}}) == {"64x4096x7168": "other"}
    assert calibrate.better_choices({shape: times}, {shape: {"other": 8.0}}) == {"64x4096x7168": "other"}


STORED_TIMES = sorted(path.stem for path in cost.TIMES.glob("*.json"))


@pytest.mark.parametrize("kind", [name for name in STORED_TIMES if not name.endswith(f"_{cost.ALONG_ROWS}")])
def test_stored_choices_are_candidates_and_every_candidate_has_times(kind):
    """A tile that is no candidate keeps its times where other results or groups borrow them."""
    candidates = default_configs(True, kind, problem_of(kind, Shape(1, 1, 1)).output)
    model, names = cost.calibration(kind), {config.name for config in candidates}
    assert set(model.choices.values()) <= names
    assert names | calibrate.borrowed(candidates, kind).keys() == model.configs.keys()
    searched = {Shape(1, 1, 1): dict.fromkeys([*model.configs, "gone"], 1.0)}
    assert calibrate.among(searched, candidates) == {Shape(1, 1, 1): dict.fromkeys(sorted(names), 1.0)}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if len(KINDS[kind].layouts) > 1])
def test_every_candidate_has_times_of_its_own_where_an_operand_lies_along_its_rows(kind):
    """Transposed tiles are of some layouts only; each of their rings of another depth has its own times."""
    model, found = cost.along_rows(kind), set()
    for layout in (layout for layout in LAYOUTS if layout != "nt"):
        candidates = default_configs(True, kind, layout=layout)
        times = {cost.tile_times(config) for config in candidates}
        assert len(times) == len(candidates)
        found |= times
    assert found == set(model.configs.values()) and len(found) == len(model.configs)
    assert not model.choices


def test_a_bucket_is_given_a_config_that_ties_at_one_of_its_m_only():
    searched = {Shape(1, 4096, 7168): {"a": 10.0, "b": 10.4}, Shape(8, 4096, 7168): {"a": 10.0, "b": 9.6}}
    chains = {shape: {"a": 9.0, "b": 7.0} for shape in searched}
    assert calibrate.better_choices(searched, chains) == {"8x4096x7168": "b"}


def test_chains_of_other_configs_are_an_error():
    searched = {Shape(8, 4096, 7168): {"a": 10.0, "b": 12.0}}
    with pytest.raises(SystemExit, match="no config was timed at every m .*m=8, n=4096, k=7168.* search chains"):
        calibrate.better_choices(searched, {shape: {"c": 9.0} for shape in searched})


LIST_OF_KERNELS = """
from deep_tile.config import GemmConfig
EVERY_CONFIG = [GemmConfig(64, n, 2) for n in {columns}]
"""

NOT_48_COLUMNS = """
_of_any = kernel_source
kernel_source = lambda config: _of_any(config) if config.block_n != 48 else 1 / 0
"""


@pytest.fixture
def two_trees(tmp_path):
    """Small trees with all casts and three products each. In the second the code with 32 columns differs, and the
    text of all products and of `combine`; it cannot make 48 columns; and there are comments more."""
    trees = tmp_path / "base", tmp_path / "present"
    for tree, columns in zip(trees, [(16, 32, 48), (16, 32, 64)], strict=True):
        shutil.copytree(ROOT / "deep_tile", tree / "deep_tile", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "include", tree / "include")
        (tree / "tests").mkdir()
        (tree / "tests" / "default_kernels.py").write_text(LIST_OF_KERNELS.format(columns=columns))
    present = trees[1]
    kernel = present / "include" / "deep_tile" / "operands.cuh"
    early_stages = "min(min(config.stages, 5)"
    text = kernel.read_text()
    assert early_stages in text
    changed = text.replace(early_stages, "min(min(config.stages, config.block_n == 32 ? 1 : 5)")
    kernel.write_text(f"{changed}// And a comment.\n")
    for path, more in {
        "include/deep_tile/combine.cuh": "constexpr int for_nothing = 0;\n",
        "deep_tile/codegen.py": NOT_48_COLUMNS,
        "deep_tile/sass.py": "# And a comment.\n",
    }.items():
        with (present / path).open("a") as file:
            file.write(more)
    return trees


def test_same_code_lists_kernels_that_differ(two_trees, capfd):
    assert same_code.compare(*two_trees) == 1
    different, alone, last = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"fp8_gemm_64x32x128_s2_c1x1: \d+ instructions, now \d+: \d+ gone, \d+ new", different)
    assert alone == "fp8_gemm_64x48x128_s2_c1x1: in BASE only"
    casts = len(cast.all_kernels())
    assert last == (f"{casts + 4} kernels: {casts - 1} equal by text, 3 equal by code, 1 different, 1 in one tree only")


def test_same_code_fails_where_a_tree_cannot_make_its_own_kernels(two_trees):
    (two_trees[1] / "tests" / "default_kernels.py").write_text(LIST_OF_KERNELS.format(columns=(48,)))
    with pytest.raises(subprocess.CalledProcessError):
        same_code.compare(*two_trees)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_same_code_takes_a_revision_or_a_folder(tmp_path):
    with same_code._tree("HEAD") as tree:
        assert (tree / "include" / "deep_tile" / "gemm.cuh").is_file() and (tree / "deep_tile" / "jit.py").is_file()
        assert (tree / "tests" / "default_kernels.py").is_file()
    assert not tree.exists()
    with same_code._tree(str(tmp_path)) as tree:
        assert tree == tmp_path
    with pytest.raises(SystemExit, match="BASE: got 'nothing-of-that-name', wanted a git revision of .* or a folder"):
        same_code._tree("nothing-of-that-name").__enter__()


# ---- bench_experts_layer.py


def test_layers_of_experts_are_alike(capsys):
    """BF16 and FP8, whose difference the script bounds; a wrong layer ends it."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    from benchmarks import bench_experts_layer
    from deep_tile.integrations import transformers_experts

    bench_experts_layer.main(["--small"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_experts.experts, "combine", lambda x, weights, index: x[index[:, 0]])
        with pytest.raises(RuntimeError, match="deep_tile is wrong: experts, 1 tokens differ by"):
            bench_experts_layer.main(["--small"])
    from deep_tile.integrations import transformers as integration

    integration.uninstall()


def test_large_products_are_chosen_by_what_they_take_alone(tmp_path):
    def entry(m, **times):
        results = {name: {"us": 1.0, "sustained_us": us} for name, us in times.items()}
        return {"m": m, "n": 4096, "k": 7168, "config": "x", "results": results | {"torch_bf16": {"us": 9.0}}}

    path = tmp_path / "alone.json"
    far, near = (
        {"deep_tile": 100.0, "cublaslt_tensor_fast": 90.0, "fp8_gemm_a": us, "fp8_gemm_b": 120.0} for us in (98.0, 99.0)
    )
    store.save(path, {"shapes": [entry(4096, **far), entry(8192, **near)]})
    assert calibrate.alone_choices(path) == {"4096x4096x7168": "fp8_gemm_a"}


def test_unseen_shapes_are_drawn_by_their_seed():
    drawn = bench_unseen.draw(3, 400)
    assert drawn == bench_unseen.draw(3, 400) != bench_unseen.draw(4, 400)
    assert {(shape.n, shape.k) for shape in drawn} == set(bench_unseen.LAYERS)
    known = {(shape.n, shape.k) for name in ("searched", "unseen") for shape in select_shapes(name)}
    assert not known & set(bench_unseen.LAYERS)
    assert min(shape.m for shape in drawn) < 5 and 8192 < max(shape.m for shape in drawn) <= bench_unseen.MOST_TOKENS
    above = {shape.m for shape in bench_unseen.draw(3, 400, above=64)}
    assert above <= set(range(129, 1026, 64)) and {129, 1025} <= above


def test_unseen_choices_are_held_against_every_config():
    times = {"deep_tile": 12.0, "cublaslt_block": 20.0, "fp8_gemm_a": 12.1, "fp8_gemm_b": 11.0}
    row = {"m": 5, "n": 4, "k": 3, "config": "fp8_gemm_a", "results": {name: {"us": us} for name, us in times.items()}}
    assert bench_unseen.losses([row]) == [12.1 / 11]
    assert bench_unseen.ratios([row], "cublaslt_block") == {"m<=128": [0.6]}
    assert bench_unseen.percentile([1.0, 2.0, 3.0], 0.95) == 3.0
