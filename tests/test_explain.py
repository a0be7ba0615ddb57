"""`explain`: the selector's choice, as data, as text and as a picture, within a second and without torch."""

import json
import re
from pathlib import Path

import changes
import pytest
from helpers import run_python

import deep_tile
from deep_tile.kinds import EVERY_KIND, PACKED, name_of
from deep_tile.method import calls, report
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.choose import choose, suits
from deep_tile.select.cost import is_measured
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs
from deep_tile.select.hardware import H200, PRESETS
from deep_tile.tools import cli

pytestmark = pytest.mark.about(*changes.OF_EXPLANATIONS)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("shape", [(1, 32768, 512), (100, 576, 7168), (4096, 4096, 7168)])
def test_data_is_the_selectors_choice(shape):
    data = deep_tile.explain(*shape)
    assert data["config"] == data["candidates"][0]["name"] == choose(GemmProblem(*shape)).name
    assert sum(data["predicted"].values()) == pytest.approx(data["candidates"][0]["time_us"])
    suitable = {config.name for config in default_configs() if suits(config, GemmProblem(*shape))}
    assert {row["name"] for row in data["candidates"]} == suitable
    json.dumps(data, allow_nan=False)


def test_the_kernel_its_time_and_the_limit_come_first(call):
    title, kernel, predicted, measured, limit, *rest = call("explain", "4096x4096x7168")[1].splitlines()
    data = deep_tile.explain(4096, 4096, 7168)
    us = data["candidates"][0]["time_us"]
    assert title == "4096x4096x7168 in fp8 on 132 SMs of H200"
    assert kernel.split() == ["Kernel:", data["config"]]
    assert predicted.startswith(f"Predicted: {us:.1f} us, ") and predicted.endswith(" TFLOPS")
    assert measured.startswith(f"Measured:  {data['measured']['us']:.1f} us, ")
    limit_us = 2 * 4096 * 4096 * 7168 / H200.fp8_tflops / 1e6
    assert limit == f"Limit:     {limit_us:.1f} us (tensor cores alone); predicted is {us / limit_us:.2f} times that"
    assert " ".join(rest).index("Why: ") < " ".join(rest).index("arithmetic")
    assert "us (HBM alone)" in call("explain", "16x4096x7168")[1]
    assert "No call takes dense operands of that k: rows of 7169 bytes" in call("explain", "64x2112x7169")[1]


def test_walls_are_told_with_their_arithmetic(call):
    code, out, _ = call("explain", "4096x4096x7168")
    text = " ".join(out.split())
    assert code == 0
    for said in (
        "2.405e+11 FLOP / 9.227e+07 bytes = 2607 FLOP per byte",
        "128 accumulators and 64 of one K block fit the 192 registers",
        "256x256 by 128",
        "(128 + 256) x 128 x 1 = 49152 bytes",
        "4 stages at most, 4 used",
        "+ 1 = 2 stages at least",
        "4 waves, 97% full",
    ):
        assert said in text, said


@pytest.mark.parametrize("gpu", PRESETS)
def test_every_preset(call, gpu):
    code, out, err = call("explain", "64x4096x7168", "--hardware", gpu)
    assert (code, err) == (0, "")
    assert f"on {PRESETS[gpu].num_sms} SMs of {gpu}" in out
    assert ("scaled to" in out) == (gpu != "H200")


def test_where_the_choice_for_another_gpu_differs_it_is_said(call):
    out = " ".join(call("explain", "64x24576x1536", "--hardware", "H100 SXM")[1].split())
    derived = calls.derivation(64, 24576, 1536, hardware="H100 SXM")
    used = choose(derived.problem)
    assert used != derived.choice.config
    assert f"By itself the call takes {used.name}" in out


def test_other_dtypes_are_tiles_without_kernels(call):
    code, out, _ = call("explain", "4096x4096x7168", "--dtype", "tf32")
    assert code == 0
    assert "tf32_128x256x32_s4" in out
    assert "There is no tf32 kernel" in out
    assert "fp8_gemm" not in out
    # Or 256x128, as fast: the calibration decides between the two.
    assert deep_tile.explain(4096, 4096, 7168, dtype="tf32")["config"] == "tf32_128x256x32_s4"


NOT_MEASURED = [kind for kind in EVERY_KIND.values() if not is_measured(kind.name) and not kind.packing]


def test_measured_kinds_do_not_say_that_they_were_not(call):
    assert "was not measured" not in call("explain", "4096x4096x7168", "--dtype", "fp8_rows")[1]


@pytest.mark.parametrize("kind", NOT_MEASURED, ids=lambda kind: kind.name)
def test_kinds_without_times_of_their_own_say_whose_they_have(call, kind):
    problem = GemmProblem(4096, 4096, 7168, kind=kind.name, output=kind.output)
    code, out, _ = call("explain", "4096x4096x7168", "--dtype", kind.name)
    assert code == 0
    assert choose(problem).name in out and "fp8_gemm" not in out
    assert f"{kind.name} was not measured" in out
    assert deep_tile.explain(4096, 4096, 7168, dtype=kind.name)["config"] == choose(problem).name


@pytest.mark.parametrize("m", [16, 4096])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_kinds_say_whose_times_they_have_and_when_the_call_unpacks(call, kind, m):
    _, out, _ = call("explain", f"{m}x4096x7168", "--dtype", kind)
    assert "or of the conversion to FP8" in out and "was not measured" not in out
    found = deep_tile.explain(m, 4096, 7168, call="packed_gemm", dtype=kind)
    assert ("unpacks this weight to FP8 first" in out) == found["config"].startswith("fp8")


def test_a_stored_measurement_is_shown(call):
    out = call("explain", "4096x4096x7168")[1]
    assert "Measured: " in out and "the prediction is" in out
    measured = deep_tile.explain(4096, 4096, 7168)["measured"]
    assert measured["tflops"] == pytest.approx(2 * 4096 * 4096 * 7168 / measured["us"] / 1e6)
    assert deep_tile.explain(4096, 4096, 7100)["measured"] is None
    assert deep_tile.explain(4096, 4096, 7168, num_sms=131)["measured"] is None
    assert deep_tile.explain(4096, 4096, 7168, hardware="H20")["measured"] is None
    assert "bench_h100" in deep_tile.explain(4096, 4096, 7168, hardware="H100 SXM")["measured"]["source"]


def test_measurements_of_another_config_are_not_shown(monkeypatch):
    name = choose(GemmProblem(24, 512, 512)).name
    stored = {"runs": ["old", "new"], "gpus": {"H200": {"24x512x512": [name, 8.0, 1]}}}
    monkeypatch.setattr(report, "_stored", lambda: stored)
    measured = deep_tile.explain(24, 512, 512)["measured"]
    assert (measured["us"], measured["source"]) == (8.0, "new")
    stored["gpus"]["H200"]["24x512x512"][0] = "another"
    assert deep_tile.explain(24, 512, 512)["measured"] is None


def test_plot_says_which_file_it_wrote(call, tmp_path):
    code, _, err = call("explain", "64x4096x7168", "--plot", str(tmp_path / "roof"))
    assert code == 0
    assert [str(path) for path in tmp_path.iterdir()] == [str(tmp_path / "roof.png")]
    assert err == f"deep-tile: wrote {tmp_path / 'roof.png'}\n"
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", [("explain", "64x4096x7168"), ("bench", "--results", "any.json")])
@pytest.mark.parametrize("folder", ["", "missing/"])
def test_plot_wants_a_file_and_no_folder(call, tmp_path, command, folder):
    code, out, err = call(*command, "--plot", f"{tmp_path}/{folder}")
    assert (code, out) == (2, "")
    assert "is a folder; name a file in it" in err
    assert not list(tmp_path.iterdir())


def test_plot_is_refused_before_anything_is_shown_where_it_cannot_be_written(call, tmp_path):
    code, out, err = call("explain", "64x4096x7168", "--plot", f"{tmp_path}/missing/roof.svg")
    assert (code, out) == (2, "")
    assert f"is in no folder that exists; make {tmp_path}/missing first" in err
    code, out, err = call("explain", "64x4096x7168", "--plot", f"{tmp_path}/roof.xyz")
    assert (code, out) == (1, "")
    assert "'xyz' is not supported" in err


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("--hardware", "A100"), "hardware is 'A100'; known are H100 SXM", 1),
        (("--num-sms", "133"), "num_sms is 133; H200 has 132", 1),
        (("--num-sms", "100", "--hardware", "H20"), "num_sms is 100; H20 has 78", 1),
        (("--dtype", "fp64"), "invalid choice: 'fp64'", 2),
    ],
)
def test_bad_arguments(call, arguments, said, code):
    seen, out, err = call("explain", "1x2x3", *arguments)
    assert (seen, out) == (code, "")
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_are_names_or_torchs(name):
    """As for `precompile`, which has the same names."""
    import torch

    from deep_tile import api

    kind, dtype = name_of(name), getattr(torch, name)
    asked = {"output": torch.float32, "bias": torch.bfloat16}
    explained = deep_tile.explain(64, 128, 256, dtype=dtype, **asked)
    assert explained == deep_tile.explain(64, 128, 256, dtype=kind, output="fp32", bias="bf16")
    assert explained["dtype"] == kind == api.kind_of(dtype, None).name
    assert deep_tile.explain_groups(4, 64, 128, 256, kind=dtype) == deep_tile.explain_groups(4, 64, 128, 256, kind=kind)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"m": "64"}, "m is '64', of type str; sizes must be ints"),
        ({"k": 64.5, "activation": "swiglu"}, "k is 64.5, of type float"),
        ({"n": True}, "n is True, of type bool"),
        ({"num_sms": 2.0}, "num_sms is 2.0, of type float"),
        ({"hardware": None}, "hardware is None, of type NoneType; pass the name of a GPU"),
        ({"dtype": 8}, "dtype is 8, of type int; pass a name, such as 'bf16'"),
    ],
)
def test_types_are_checked(changed, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        deep_tile.explain(**{"m": 64, "n": 128, "k": 256} | changed)
    if "dtype" not in changed and "m" not in changed:
        shared = {name: value for name, value in changed.items() if name != "activation"}
        with pytest.raises(TypeError, match=re.escape(said)):
            deep_tile.explain_groups(**{"groups": 4, "rows": 64, "n": 128, "k": 256} | shared)


def test_it_imports_nothing_heavy():
    program = (
        "import sys\nfrom deep_tile.tools.cli import main\n"
        "assert main(['explain', '4096x4096x7168']) == 0\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'cuda'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    run_python(program)


# ---- what else of the command line shows measurements


def test_doctor_measure_needs_a_gpu(call, monkeypatch):
    monkeypatch.setattr(deep_tile, "is_available", lambda: (False, "torch sees no CUDA device"))
    code, out, err = call("doctor", "--measure")
    assert (code, out) == (1, "")
    assert err == "deep-tile: measuring needs a Hopper GPU: torch sees no CUDA device\n"


def test_bench_plots_stored_results_without_a_gpu(capfd, tmp_path):
    picture = tmp_path / "layers.png"
    stored = ROOT / "benchmarks" / "results" / "peers_h200_2026-11-21.json"
    assert cli.main(["bench", "--results", str(stored), "--plot", str(picture)]) == 0
    assert "4096x7168x2048" in capfd.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- groups


@pytest.mark.parametrize("grouping", ["offs", "counts"])
@pytest.mark.parametrize(
    "shape", [(128, 64, 1536, 2048), (256, 1, 7168, 2048), (4, 8192, 6144, 7168), (3, 7, 100, 304)]
)
def test_groups_get_the_selectors_choice(shape, grouping):
    count, rows, n, k = shape
    data = deep_tile.explain_groups(*shape, grouping=grouping)
    total = count * rows if grouping == "offs" else rows
    problem = GemmProblem(total, n, k, tma_store=n % 8 == 0, groups=Groups(grouping, count, rows))
    assert data["config"] == data["candidates"][0]["name"] == choose(problem).name
    times = [row["time_us"] for row in data["candidates"]]
    assert times == sorted(times) and times[0] > 0.6 * max(data["limits"].values())  # groups may be without rows
    assert {row["name"] for row in data["candidates"]} == {c.name for c in grouped_configs(grouping, n % 8 == 0)}
    assert data["candidates"][1]["name"] in data["why"]
    json.dumps(data, allow_nan=False)


def test_gradients_of_groups_get_the_selectors_choice():
    count, rows, n, k = 8, 500, 1536, 2048
    data = deep_tile.explain_groups(count, rows, n, k, grouping="k_offs")
    groups, added = Groups("k_offs", count, rows), {"kind": "fp8_1x128", "output": "fp32", "accumulate": True}
    assert data["config"] == choose(GemmProblem(n, k, count * rows, groups=groups, **added)).name
    assert {row["rows"] for row in data["candidates"]} == {512}
    moved = (n + k) * (4000 + 4 * 32) + 2 * count * n * k * 4
    gpu = PRESETS["H200"]
    assert data["limits"]["HBM"] == pytest.approx(moved / gpu.hbm_tbps / 1e6)
    assert data["limits"]["tensor cores"] == pytest.approx(2 * 4000 * n * k / gpu.tflops("fp8") / 1e6)
    assert "K blocks of 512 rows for a group of 500" in data["why"]


def test_limits_of_groups_are_counted():
    limits = deep_tile.explain_groups(2, 3, 256, 512)["limits"]
    moved = 2 * 256 * 512 + 2 * 2 * 4 * 4 + 6 * (512 + 4 * 4) + 6 * 256 * 2
    gpu = PRESETS["H200"]
    assert limits["HBM"] == pytest.approx(moved / gpu.hbm_tbps / 1e6)
    assert limits["tensor cores"] == pytest.approx(2 * 6 * 256 * 512 / gpu.tflops("fp8") / 1e6)


def test_rows_of_a_group_fill_tiles():
    data = deep_tile.explain_groups(4, 190, 256, 512)
    rows = {row["name"]: row["rows"] for row in data["candidates"]}
    assert rows == {config.name: {64: 192, 128: 256}[config.block_m] for config in grouped_configs("offs")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rows": 0}, "m is 0; sizes must be positive"),
        ({"grouping": "none"}, "sizes are given as m, n, k, groups; fp8_gemm has m, n, k"),
        ({"num_sms": 133}, "num_sms is 133; H200 has 132"),
        ({"hardware": "A100"}, "A100"),
        ({"kind": "fp8_1x128"}, "operands are fp8_1x128; grouping 'offs' takes torch.float8_e4m3fn or torch.bfloat16"),
        ({"kind": "bf16", "grouping": "k_offs"}, "grouping 'k_offs' takes torch.float8_e4m3fn"),
    ],
)
def test_groups_that_make_no_sense(arguments, said):
    with pytest.raises(ValueError, match=said):
        deep_tile.explain_groups(**({"groups": 2, "rows": 3, "n": 256, "k": 512} | arguments))


@pytest.mark.parametrize(("kind", "bytes_"), [("bf16", 2), ("fp8_rows", 1), ("int8_unscaled", 1)])
def test_groups_of_kinds(call, kind, bytes_):
    data = deep_tile.explain_groups(16, 200, 1536, 2048, kind=kind)
    assert data["config"].startswith(f"{kind}_gemm_") and data["problem"]["kind"] == kind
    out_bytes = 4 if kind == "int8_unscaled" else 2
    scales = 4 * 16 * (1536 + 200) if kind == "fp8_rows" else 0
    moved = 16 * ((1536 + 200) * 2048 * bytes_ + 200 * 1536 * out_bytes) + scales
    assert data["limits"]["HBM"] == pytest.approx(moved / H200.hbm_tbps / 1e6)
    code, out, _ = call("explain", "200x1536x2048", "--groups", "16", "--dtype", kind)
    assert code == 0 and data["config"] in out and f"in {kind} on 132 SMs" in out


@pytest.mark.parametrize(
    ("kind", "b_bytes"), [("mxfp4", 17 / 32), ("nvfp4", 18 / 32), ("int4", 16 / 32), ("int4_32", 73 / 128)]
)
def test_groups_of_packed_weights_move_4_bits(kind, b_bytes):
    data = deep_tile.explain_groups(8, 16, 4096, 7168, kind=kind)
    scales = 4 * 56 * (4096 if kind == "int4" else 32)
    moved = 8 * (4096 * 7168 * b_bytes + scales + 16 * (7168 + 4 * 56 + 2 * 4096))
    assert data["limits"]["HBM"] == pytest.approx(moved / H200.hbm_tbps / 1e6)


def test_groups_on_the_command_line(call):
    asked = ["64x1536x2048", "--groups", "128"]
    code, out, _ = call("explain", *asked)
    data = deep_tile.explain_groups(128, 64, 1536, 2048)
    text = " ".join(out.split())
    assert code == 0 and data["why"] in text and "128 groups of 64x1536x2048 in fp8" in text
    assert all(row["name"] in text for row in data["candidates"])
    code, out, _ = call("explain", *asked, "--grouping", "counts", "--num-sms", "78", "--hardware", "H20", "--json")
    options = {"grouping": "counts", "num_sms": 78, "hardware": "H20"}
    assert code == 0 and json.loads(out) == json.loads(
        json.dumps(deep_tile.explain_groups(128, 64, 1536, 2048, **options))
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--groups 4 256x512", "'256x512' is not MxNxK"),
        ("2x256x512 --groups 4 --plot roof.png", "--plot draws products; it is not for groups"),
        ("2x256x512 --groups 4 --train", "leave --call, --groups and --dtype out"),
        ("2x256x512 --train --dtype bf16", "leave --call, --groups and --dtype out"),
        ("2x256x512 --train --call fp8_gemm", "leave --call, --groups and --dtype out"),
        ("64x256x512 --tflops 1e200", "'1e200' is not a positive number from 1e-06 to 1e+09"),
        ("256x512", "'256x512' is not MxNxK"),
    ],
)
def test_commands_that_make_no_sense(call, arguments, said):
    code, _, err = call("explain", *arguments.split())
    assert code == 2 and said in err


@pytest.mark.parametrize("number", ["1e-6", "1e9"])
@pytest.mark.parametrize("option", ["--tflops", "--bandwidth", "--latency"])
def test_any_number_is_explained(call, option, number):
    assert call("explain", "1x1x1", option, number)[0] == 0
    assert call("explain", "100000x100000x100000", option, number)[0] == 0


@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_a_layout_is_explained(call, layout):
    explained = deep_tile.explain(4096, 7168, 2048, dtype="bf16", layout=layout)
    assert explained["config"] == choose(GemmProblem(4096, 7168, 2048, kind="bf16", layout=layout)).name
    assert explained["config"].endswith(f"_{layout}") and explained["problem"]["layout"] == layout
    code, out, _ = call("explain", "4096x7168x2048", "--dtype", "bf16", "--layout", layout)
    assert code == 0 and explained["config"] in out
    with pytest.raises(ValueError, match=f"layout is '{layout}'; operands of float8_e4m3fn lie along k, as 'nt' says"):
        deep_tile.explain(4096, 7168, 2048, layout=layout)


def test_a_finish_that_no_call_takes_is_refused():
    with pytest.raises(ValueError, match="result is torch.int32, and a bias or an activation is given"):
        deep_tile.explain(128, 512, 512, dtype="int8_unscaled", activation="relu")
    with pytest.raises(ValueError, match="activation is 'swiglu' and n is 24; it takes a multiple of 16"):
        deep_tile.explain(128, 24, 512, activation="swiglu")


def test_a_finish_is_explained():
    asked = {"output": "fp16", "bias": "bf16", "activation": "gelu_tanh"}
    explained, plain = deep_tile.explain(4096, 7168, 2048, **asked), deep_tile.explain(4096, 7168, 2048)
    assert explained["config"].endswith("_fp16_bias_bf16_gelu_tanh_b5")
    assert asked.items() <= explained["problem"].items()
    assert explained["walls"][0] == plain["walls"][0] and explained["predicted"] == plain["predicted"]
    plain, gated = (deep_tile.explain(4096, 7168, 2048, dtype="bf16", activation=name) for name in ("none", "swiglu"))
    assert gated["config"].startswith("bf16_gemm_") and gated["config"].endswith("_swiglu")
    assert gated["walls"][0]["value"] > plain["walls"][0]["value"]  # half as many columns are written
    with pytest.raises(TypeError, match="bias must be one of torch.bfloat16, .*; got torch.int8"):
        deep_tile.explain(64, 64, 64, bias="int8")
    with pytest.raises(ValueError, match="operands are tf32; supported is torch.float8_e4m3fn or"):
        deep_tile.explain(64, 64, 64, dtype="tf32", bias="bf16")


# ---- hardware that has no preset


def test_numbers_of_the_command_line_are_those_that_are_used(call):
    numbers = "--tflops 50 --bandwidth 1 --latency 600 --sms 100 --registers 60000 --smem 100"
    code, out, err = call("explain", "4096x4096x4096", "--dtype", "fp16", *numbers.split(), "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    used = {name: entry["value"] for name, entry in data["hardware"].items() if name != "name"}
    assert used["peak_tflops"]["fp16"] == 50 and used["fp8_tflops"] == 100
    assert (used["hbm_tbps"], used["hbm_latency_ns"], used["num_sms"]) == (1, 600, 100)
    assert (used["registers"], used["smem_bytes"]) == (60000, 102_400)
    hbm = data["walls"][0]
    assert hbm["limit"] == 50 and hbm["value"] == pytest.approx(4096**3 * 2 / (3 * 4096 * 4096 * 2))
    assert data["problem"]["num_sms"] == 100 and data["measured"] is None
    assert all(row["smem_bytes"] <= 102_400 and row["stages"] <= row["stages_max"] for row in data["candidates"])
    # 2 * 64 * 64 * 64 FLOP at 0.5 TFLOPS take 1.05 us, longer than a load.
    assert {row["stages_min"] for row in data["candidates"]} == {2}


def test_numbers_replace_those_of_the_hardware_that_is_named(call):
    out = call("explain", "64x4096x7168", "--hardware", "H20", "--bandwidth", "2", "--json")[1]
    used = json.loads(out)["hardware"]
    assert used["name"] == "H20 with bandwidth = 2"
    assert used["hbm_tbps"] == {"value": 2, "source": "given"} and used["num_sms"]["value"] == 78


def test_the_report_says_whose_times_are_scaled_and_which_tiles_do_not_fit(call):
    text = " ".join(call("explain", "4096x4096x7168", "--smem", "60")[1].split())
    assert "on 132 SMs of H200 with smem_bytes = 61440" in text
    assert "scaled to H200 with smem_bytes = 61440 by tensor rate, clock and bandwidth. Kernels" in text
    assert "are shown with fewer, and with the times that they take with all" in text
    assert "stages at most, 2 used. 16 tiles hit it: 64x160 by 1024" in text
    assert "256x256 by 128" in text and "Measured:" not in text


def test_groups_drop_tiles_too(call):
    asked = ("explain", "64x4096x4096", "--groups", "8", "--smem")
    code, out, _ = call(*asked, "60", "--json")
    candidates = json.loads(out)["candidates"]
    assert code == 0 and candidates and all(row["smem_bytes"] <= 61440 for row in candidates)
    code, out, err = call(*asked, "6")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "no tile passes the walls of H200 with smem_bytes = 6144" in err


def test_one_group_candidate_is_enough(call):
    """57 KB hold 64x128 with two stages, and nothing else that 54 do not."""
    sizes = [row["smem_bytes"] for row in deep_tile.explain_groups(8, 64, 4096, 4096)["candidates"]]
    assert len(sizes) > 2
    for kilobytes in range(20, 70):
        code, out, _ = call("explain", "64x4096x4096", "--groups", "8", "--smem", str(kilobytes))
        if code == 0:
            assert "has the shortest predicted time" in out
            break
    assert "Next is" not in out


@pytest.mark.parametrize("option", ["--tflops", "--bandwidth", "--latency", "--sms", "--registers", "--smem"])
@pytest.mark.parametrize("number", ["0", "-3", "nan", "inf", "many", "1e400", ""])
def test_numbers_that_make_no_sense_are_named(call, option, number):
    code, out, err = call("explain", "64x4096x7168", option, number)
    assert (code, out) == (2, "")
    assert f"argument {option}: {number!r} is not a positive" in err and err.count("\n") == 1


def test_shared_memory_is_in_kb(call):
    code, _, err = call("explain", "64x4096x7168", "--smem", "232448")
    assert code == 2 and "'232448' is no size in KB of 1024 bytes; Hopper has 227" in err
