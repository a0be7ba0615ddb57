"""`explain` of every operation by its name: the description's problem, and predicted times against stored figures.

The figures are those of docs/thin.md and docs/indexer.md, an H100's of 2026-11-26.
"""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

import deep_tile
from deep_tile import parts
from deep_tile.discovery import OPS, PRIVATE
from deep_tile.kinds import FAMILIES
from deep_tile.method import described
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select import cost
from deep_tile.select.choose import bucketed, casts_apart, choose, unpacks
from deep_tile.select.hardware import H100_SXM, H200, PRESETS

pytestmark = pytest.mark.about(
    "deep_tile/method/*",
    "deep_tile/select/*",
    "deep_tile/tools/cli.py",
    "deep_tile/parts.py",
    "deep_tile/logits_launch.py",
    "deep_tile/operation.py",
    "docs/thin.md",
    "docs/indexer.md",
)

ROOT = Path(__file__).parent.parent

SIZES = {
    "thin_gemm": ((128, 256, 7168), {}),
    "prenorm_gemm": ((1024, 24, 28672), {}),
    "mqa_logits": ((2048, 16384, 128), {"heads": 64}),
    "paged_mqa_logits": ((2, 8192, 128), {"heads": 64, "groups": 256}),
}
"""Of calls that are no product."""

PUBLIC = [name for name in OPS if name not in PRIVATE]


def asked(call: str) -> tuple[tuple, dict]:
    return SIZES.get(call, ((64, 1536, 2048), {"groups": 8} if "grouped" in call else {}))


def time_of(explained) -> float:
    return sum(explained["predicted"].values())


@pytest.mark.parametrize("call", PUBLIC)
def test_every_operation_is_explained_or_says_why_not(call):
    sizes, others = asked(call)
    try:
        explained = deep_tile.explain(*sizes, call=call, **others)
    except ValueError as error:
        assert not described.is_explained(described.OPERATIONS[call])
        assert str(error) == f"{call} is not explained: {described.OPERATIONS[call].unexplained}"
        return
    assert explained["config"] == explained["candidates"][0]["name"] and explained["config"] in explained["why"]
    first = explained["candidates"][0]["time_us"]
    assert time_of(explained) >= max(explained["limits"].values()) and first <= time_of(explained) * 1.001
    json.dumps(explained, allow_nan=False)


# ---- errors against stored figures: predicted over measured, less one

PRENORM = {
    28672: {1: 8.6, 64: 9.6, 256: 13.0, 512: 18.7, 1024: 30.7, 2048: 51.4, 4096: 93.0, 8192: 171.6},
    16384: {1: 7.3, 64: 8.1, 256: 10.1, 512: 13.5, 1024: 20.8, 2048: 34.1, 4096: 56.5, 8192: 102.2},
}
"""Microseconds for 24 columns, by k and m."""

ROUTER = {
    (3, False): {1: 7.2, 64: 6.9, 128: 9.5, 256: 12.7, 512: 19.4, 1024: 30.1, 4096: 75.1, 8192: 119},
    (2, False): {1: 6.5, 64: 6.3, 128: 9.8, 256: 12.9, 512: 19.7, 1024: 22.2, 4096: 56.2, 8192: 85.7},
    (3, True): {1: 8.0, 64: 7.8, 128: 11.3, 256: 16.7},
}
"""Microseconds for 256x7168, by terms, whether b is split in the call, and m."""

PREFILL = {
    64: {4096: 1170, 16384: 1213, 65536: 1180},
    32: {4096: 909, 16384: 1094, 65536: 1125},
    128: {4096: 1305, 16384: 1263, 65536: 1319},
}
"""TFLOPS of 2,048 queries and all keys, by heads of 128 and keys."""

PAGED = {
    (256, 8192): {1: 105, 2: 112, 3: 122, 4: 138, 6: 188},
    (32, 8192): {1: 19.3},
    (256, 1024): {1: 18.5},
    (1, 131072): {1: 11.2},
}
"""Microseconds for 64 heads of 128, by sequences, keys and queries."""


def errors(measured: dict, predicted) -> list[float]:
    return [predicted(first, second) / us - 1 for first, row in measured.items() for second, us in row.items()]


def prenorm_us(k: int, m: int) -> float:
    return time_of(deep_tile.explain(m, 24, k, call="prenorm_gemm", hardware=H100_SXM))


def router_us(how: tuple[int, bool], m: int) -> float:
    product = parts.Product(m, 256, 7168, 1, how[0], False, how[1])
    return sum(us for _, us in parts.predict(product, parts.Room(132), 0, H100_SXM).parts)


def prefill_tflops(heads: int, keys: int) -> float:
    explained = deep_tile.explain(2048, keys, 128, call="mqa_logits", heads=heads, hardware=H100_SXM)
    return 2 * 2048 * keys * heads * 128 / time_of(explained) / 1e6


def paged_us(how: tuple[int, int], queries: int) -> float:
    (sequences, keys), asked = how, {"call": "paged_mqa_logits", "heads": 64, "hardware": H100_SXM}
    return time_of(deep_tile.explain(queries, keys, 128, groups=sequences, **asked))


@pytest.mark.parametrize(
    ("measured", "predicted", "worst", "average"),
    [
        (PRENORM, prenorm_us, 0.07, 0.03),
        (ROUTER, router_us, 0.19, 0.075),  # two terms are of another run
        (PREFILL, prefill_tflops, 0.14, 0.035),
        (PAGED, paged_us, 0.09, 0.02),
    ],
    ids=["prenorm", "router", "prefill", "paged"],
)
def test_predictions_are_near_stored_measurements(measured, predicted, worst, average):
    found = [abs(error) for error in errors(measured, predicted)]
    assert max(found) < worst and mean(found) < average


def test_a_large_linear_layer_takes_its_cast_and_its_product():
    stored = json.loads((ROOT / "benchmarks/results/linear_h200_2026-11-23.json").read_text())["us_per_layer"]
    large = {shape: times["fp8_linear"] for shape, times in stored.items() if shape.startswith("2048x")}
    assert len(large) == 6
    for shape, us in large.items():
        sizes = tuple(map(int, shape.split("x")))
        explained = deep_tile.explain(*sizes, call="fp8_linear")
        assert time_of(explained) / us == pytest.approx(1, abs=0.2)
        cast_us = explained["predicted"]["per_token_cast_to_fp8"]
        assert cast_us == cost.chained_us(sizes[0] * sizes[2] * 3)
        quantised = deep_tile.explain(*sizes, call="fp8_linear", dtype="fp8")
        assert time_of(explained) - cast_us == pytest.approx(time_of(quantised))


# ---- what call it is


@pytest.mark.parametrize("call", ["thin_gemm", "prenorm_gemm", "mqa_logits", "paged_mqa_logits"])
@pytest.mark.parametrize("gpu", PRESETS.values(), ids=lambda gpu: gpu.name)
def test_no_prediction_is_below_the_limits(call, gpu):
    """Of any GPU, whatever binds; and fewer SMs take no less."""
    (m, n, k), others = SIZES[call]
    for rows in (1, m):
        explained = deep_tile.explain(rows, n, k, call=call, hardware=gpu, **others)
        assert time_of(explained) > max(explained["limits"].values())
        assert time_of(deep_tile.explain(rows, n, k, call=call, hardware=gpu, num_sms=8, **others)) > time_of(explained)


def test_bytes_and_operations_of_calls_are_counted():
    rows, keys, heads, sequences = 2, 8192, 64, 256
    limits = deep_tile.explain(rows, keys, 128, call="paged_mqa_logits", heads=heads, groups=sequences)["limits"]
    queries = sequences * rows
    pages = sequences * keys // 64
    moved = queries * heads * (128 + 4) + pages * 64 * 132 + queries * 4 + pages * 4 + queries * keys * 4
    assert limits["HBM"] == pytest.approx(moved / H200.hbm_tbps / 1e6)
    assert limits["tensor cores"] == pytest.approx(2 * queries * keys * heads * 128 / H200.tflops("fp8") / 1e6)
    limits = deep_tile.explain(100, 24, 4096, call="prenorm_gemm")["limits"]
    moved = 100 * 4096 * 2 + 24 * 4096 * 4 + 100 * 24 * 4 + 100 * 4
    assert limits["HBM"] == pytest.approx(moved / H200.hbm_tbps / 1e6)
    assert limits["tensor cores"] == pytest.approx(3 * 2 * 100 * 24 * 4096 / H200.tflops("bf16") / 1e6)


@pytest.mark.parametrize(
    ("sizes", "asked", "problem"),
    [
        ((64, 1536, 2048), {"call": "fp8_wgrad"}, {"kind": "fp8_1x128", "output": "fp32", "accumulate": True}),
        ((64, 1536, 2048), {"call": "gemm", "dtype": "fp16", "layout": "nn"}, {"output": "fp16", "layout": "nn"}),
        ((64, 1536, 2048), {"call": "scaled_gemm", "dtype": "fp8_rows_promoted"}, {"kind": "fp8_rows_promoted"}),
        ((64, 100, 304), {"call": "fp8_gemm", "bias": "fp32"}, {"bias": "fp32", "tma_store": False}),
        ((64, 1536, 2048), {"call": "gemm", "activation": "swiglu"}, {"kind": "bf16", "activation": "swiglu"}),
        ((4096, 1536, 2048), {"call": "fp8_gemm_cast", "activation": "silu"}, {"output": "e4m3", "activation": "silu"}),
        ((64, 1536, 2048), {"call": "fp8_linear", "dtype": "fp16"}, {"kind": "fp8", "output": "fp16"}),
    ],
)
def test_the_problem_is_the_calls(sizes, asked, problem):
    explained = deep_tile.explain(*sizes, **asked)
    assert problem.items() <= explained["problem"].items()
    assert explained["config"] == choose(GemmProblem(**explained["problem"])).name
    m, n, k = sizes
    of_problem = tuple(explained["problem"][name] for name in ("m", "n", "k"))
    assert of_problem == ((n, k, m) if asked["call"] == "fp8_wgrad" else sizes)


@pytest.mark.parametrize(
    ("call", "grouping", "made"),
    [
        ("fp8_grouped_gemm", "offs", {}),
        ("grouped_gemm", "counts", {"kind": "bf16"}),
        ("packed_grouped_gemm", "offs", {"kind": "mxfp4"}),
        ("fp8_grouped_wgrad", "k_offs", {"kind": "fp8_1x128", "output": "fp32", "accumulate": True}),
    ],
)
def test_groups_of_a_call(call, grouping, made):
    explained = deep_tile.explain(100, 1536, 2048, call=call, grouping=grouping, groups=8)
    groups = Groups(grouping, 8, 100)
    sizes = {"offs": (800, 1536, 2048), "counts": (100, 1536, 2048), "k_offs": (1536, 2048, 800)}[grouping]
    assert explained["problem"] == GemmProblem(*sizes, groups=groups, **made)._asdict() | {"groups": groups._asdict()}
    if not FAMILIES.get(made.get("kind", "fp8")) or call != "fp8_grouped_gemm":
        return
    assert explained == deep_tile.explain(100, 1536, 2048, groups=8) == deep_tile.explain_groups(8, 100, 1536, 2048)


def test_what_a_call_launches_besides_is_in_its_time():
    assert "per_token_cast_to_fp8" not in deep_tile.explain(64, 7168, 2048, call="fp8_gemm_cast")["predicted"]
    together = GemmProblem(64, 2112, 7168, output="e4m3")
    assert casts_apart(bucketed(together))
    explained = deep_tile.explain(64, 2112, 7168, call="fp8_gemm_cast")
    assert explained["problem"]["output"] == "bf16" and explained["measured"] is None
    assert explained["predicted"]["per_token_cast_to_fp8"] == cost.chained_cast_us(together)
    packed = GemmProblem(4096, 7168, 2048, kind="mxfp4")
    assert unpacks(packed)
    explained = deep_tile.explain(4096, 7168, 2048, call="packed_gemm", dtype="mxfp4")
    assert explained["problem"]["kind"] == "fp8" and explained["predicted"]["unpacking to FP8"] > 1


@pytest.mark.parametrize(
    ("call", "sizes", "asked", "said"),
    [
        ("bmm", (1, 2, 3), {}, "call is 'bmm'; pass one of cast_both, cast_weight"),
        ("gemm_gradient", (1, 2, 3), {}, "call is 'gemm_gradient'; pass one of"),
        ("mqa_logits", (1, 2, 128), {}, "sizes are given as m, n, k; mqa_logits has m, n, k, heads"),
        ("fp8_gemm", (1, 2, 3), {"groups": 2}, "sizes are given as m, n, k, groups; fp8_gemm has m, n, k"),
        ("fp8_grouped_gemm", (1, 2, 16), {}, "sizes are given as m, n, k; fp8_grouped_gemm has m, n, k, groups"),
        ("gemm", (1, 24, 64), {"num_sms": 0}, "num_sms is 0; sizes must be positive"),
        ("prenorm_gemm", (1, 24, 64), {"bias": "fp32"}, "bias is 'fp32'; prenorm_gemm has none"),
        ("prenorm_gemm", (1, 24, 64), {"output": "bf16"}, "output is 'bf16'; prenorm_gemm has none"),
        ("thin_gemm", (1, 24, 64), {"layout": "nn"}, "layout is 'nn'; thin_gemm has none"),
        ("fp8_linear", (1, 24, 64), {"activation": "relu"}, "activation is 'relu'; fp8_linear has none"),
        ("fp8_grouped_gemm", (1, 24, 64), {"groups": 2, "bias": "fp32"}, "bias is 'fp32'; fp8_grouped_gemm has none"),
        ("thin_gemm", (2, 24, 101), {}, "multiple of 16 bytes"),
        ("mqa_logits", (1, 24, 100), {"heads": 64}, "heads of 32, 64, 128 elements are known"),
        ("paged_mqa_logits", (9, 64, 128), {"heads": 64, "groups": 1}, "9 queries of a sequence; 1 to 8 are known"),
        ("fp8_gemm", (1, 24, 64), {"dtype": "bf16"}, "operands are torch.bfloat16; fp8_gemm takes torch.float8_e4m3fn"),
        ("gemm", (1, 24, 100), {}, "multiple of 16 bytes"),
        ("gemm", (1, 24, 64), {"num_sms": 133}, "num_sms is 133; H200 has 132"),
        ("thin_gemm", (1, 24, 64), {"num_sms": 133}, "num_sms is 133; H200 has 132"),
        ("gemm", (0, 24, 64), {}, "m is 0; sizes must be positive"),
        ("gemm", (1, 24, 64), {"bias": "e4m3"}, "bias is 'e4m3'; pass a torch.dtype, or one of fp8"),
        ("thin_gemm", (1, 24, 64), {"dtype": "wide"}, "dtype is 'wide'; pass a torch.dtype, or one of fp8"),
        ("mqa_logits", (1, 24, 64), {"heads": 64, "dtype": "int8"}, "dtype is 'int8'; mqa_logits has operands of"),
    ],
)
def test_what_no_call_takes_is_refused(call, sizes, asked, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        deep_tile.explain(*sizes, call=call, **asked)


@pytest.mark.parametrize(("call", "heads"), [("thin_gemm", {}), ("mqa_logits", {"heads": 64})])
def test_results_are_those_of_the_call(call, heads):
    with pytest.raises(TypeError, match="out .*int8"):
        deep_tile.explain(8, 128, 64, call=call, output="int8", **heads)


@pytest.mark.parametrize(
    "arguments",
    [
        "1024x24x28672 --call prenorm_gemm --num-sms 66",
        "2x8192x128 --call paged_mqa_logits --groups 256 --heads 64 --hardware H20",
        "64x1536x2048 --call fp8_grouped_gemm --groups 8 --grouping counts",
        "64x7168x2048 --call fp8_linear --dtype fp16 --bias fp16",
    ],
)
def test_command_line_and_function_agree(call, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    shape, *options = arguments.split()
    given = {name[2:].replace("-", "_"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    given = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    explained = deep_tile.explain(*map(int, shape.split("x")), **given)
    code, out, err = call("explain", *arguments.split(), "--json")
    assert (code, err) == (0, "") and json.loads(out) == json.loads(json.dumps(explained))
    code, out, err = call("explain", *arguments.split())
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    assert f"Kernel:    {explained['config']}" in lines
    assert f"Predicted: {time_of(explained):.1f} us" in out and "Limit: " in out and "Why: " in out
    assert explained["why"] in " ".join(out.split())


def test_the_command_line_wants_sizes_of_the_call(call):
    code, _, err = call("explain", "64x512x64", "--call", "thin_gemm", "--heads", "8")
    assert code == 1 and "sizes are given as m, n, k, heads; thin_gemm has m, n, k" in err
    code, _, err = call("explain", "64x512x64", "--call", "cast_both")
    assert code == 1 and "cast_both is not explained: one kernel for each dtype" in err
