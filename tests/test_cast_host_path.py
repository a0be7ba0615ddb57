"""The way of casts and of the kernels of expert layers through the host, without a GPU: see pretending.py."""

import re

import pytest
from pretending import EITHER_SETUP, EITHER_WAY, WHOLE_CUBIN
from test_host_path import check_bad_calls

from deep_tile import params
from deep_tile.quantize import SMALLEST_AMAX_FLOOR

CAST_SETUP = f"""
from deep_tile import per_block_cast_to_fp8, per_token_cast_to_fp8, silu_mul_cast_to_fp8
quantize.needs_kernel, launches.num_sms = lambda x, out: True, lambda device: 132
quantize.check_capture = lambda *ignored: None
cast.load = lambda kernel, device: _launcher.load({WHOLE_CUBIN!r}, kernel.name, 0, 0)
x = torch.zeros(130, 264, dtype=torch.bfloat16)
codes, scale = torch.zeros(130, 264).to(torch.float8_e4m3fn), torch.zeros(130, 3)
rows = torch.zeros(40, dtype=torch.int32)
offs, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(13, dtype=torch.int32)
gate_up = torch.zeros(130, 528, dtype=torch.float16)
targets = {{"out": codes, "scale_out": scale}}
few = {{"out": codes[:40], "scale_out": scale[:40]}}
many = {{"out": codes.view(13, 10, 264), "scale_out": scale.view(13, 10, 3)}}
"""


@pytest.fixture
def run(run_pretending):
    """Run code after CAST_SETUP. Returns the lines that it showed and the launched kernels, whose argument is `of`."""
    return lambda code, of=params.CAST, setup="": run_pretending(setup + CAST_SETUP + code, of)


CASTS = (
    *("per_token_cast_to_fp8", "per_block_cast_to_fp8", "silu_mul_cast_to_fp8"),
    *("transposed_cast_to_fp8", "cast_both", "cast_weight", "transpose_fp8", "combine", "sort_by_expert"),
)


@EITHER_SETUP
def test_bad_calls_launch_nothing(run_pretending, setup):
    check_bad_calls(run_pretending, setup + CAST_SETUP, CASTS, params.CAST)


@EITHER_SETUP
def test_floors_that_equal_a_known_one_are_refused(run, setup):
    code = """
given = {"x": x, "out": codes, "scale_out": scale}
for floor in (True, 1, 1.0, True, np.float32(1), [1.0]):
    attempt(per_token_cast_to_fp8, **given, amax_floor=floor)
"""
    shown, _ = run(code, setup=setup)
    true = "TypeError amax_floor is True, a bool; pass a number, such as 1e-4"
    assert shown == [true, "prepare_launch launch", "launch", true, "launch", shown[5]]
    assert shown[5] == "TypeError amax_floor is [1.0], a list; pass a number, such as 1e-4"


@EITHER_WAY
@pytest.mark.parametrize(("cast", "rows"), [("per_token_cast_to_fp8", 130), ("per_block_cast_to_fp8", 2)])
def test_second_cast_is_one_call_into_c(run, setup, path, cast, rows):
    code = f"""
for _ in range(3):
    attempt({cast}, x, out=codes, scale_out=scale[:{rows}])
attempt({cast}, x, out=codes, scale_out=scale[:{rows}], amax_floor=1e-10)
show(x.data_ptr(), codes.data_ptr(), scale.data_ptr())
"""
    shown, launched = run(code, setup=setup)
    assert shown[:4] == ["prepare_launch launch", path, path, "prepare_launch launch"]
    x, out, scale = map(int, shown[4].split())
    wanted = {"x": x, "out": out, "scale": scale, "rows": 130, "columns": 264, "x_stride": 264, "out_stride": 264}
    wanted |= {"scale_stride_row": 3, "scale_stride_column": 1, "aligned": 1, "pow2_scale": 0}
    floors = [launch.params.pop("amax_floor") for launch in launched]
    assert floors == pytest.approx([SMALLEST_AMAX_FLOOR] * 3 + [1e-10], rel=2**-24, abs=0)
    assert [launch.params.pop("correction") for launch in launched] == [1.0] * 4
    assert [launch.params for launch in launched] == [wanted] * 4


def test_options_of_a_cast_reach_its_kernel(run):
    code = """
for round_scale in ("none", "pow2"):
    for exact in ("divide", "reciprocal"):
        for _ in range(2):
            attempt(per_token_cast_to_fp8, x, round_scale=round_scale, exact=exact, out=codes, scale_out=scale)
"""
    shown, launched = run(code)
    assert shown == ["prepare_launch launch", "launch_known"] * 4
    options = [(launch.params["pow2_scale"], launch.params["correction"]) for launch in launched[::2]]
    assert options == [(0, 1.0), (0, 0.0), (1, 1.0), (1, 0.0)]


def test_casts_allocate_and_convert(run):
    """An input that is converted first has its own signature."""
    code = """
for layout in ("row", "m_aligned"):
    for _ in range(2):
        attempt(per_token_cast_to_fp8, x, scale_layout=layout)
for source in (x.double(), x.t(), torch.nn.Parameter(x, requires_grad=False)):
    for _ in range(2):
        attempt(per_token_cast_to_fp8, source)
attempt(per_token_cast_to_fp8, x, out=codes[:, 1:], scale_out=scale)
attempt(per_token_cast_to_fp8, x, scale_layout="column", out=codes, scale_out=scale)
attempt(per_token_cast_to_fp8, [1.0], out=codes, scale_out=scale)
"""
    shown, launched = run(code)
    new, known = "prepare_launch launch", "launch_known"
    assert shown[:10] == [new, known, new, known, new, "launch", new, "launch", known, known]
    assert [launch.params["scale_stride_column"] for launch in launched[:4]] == [1, 1, 132, 132]
    assert re.match(r"ValueError out has shape \[130, 263\]", shown[10])
    assert re.match("ValueError scale_layout is 'column'", shown[11])
    assert re.match("TypeError x is a <class 'list'>", shown[12])


def test_casts_of_three_dimensions_are_one_call_into_c(run):
    """Four dimensions are one call into C, too. Five go through Python, as do inputs that are copied first."""
    code = """
for source in (x.view(13, 10, 264), x.view(13, 5, 2, 264), x.view(13, 5, 2, 1, 264), x.view(13, 10, 264)[:, :5]):
    for _ in range(2):
        attempt(per_token_cast_to_fp8, source, scale_layout="m_aligned")
"""
    shown, launched = run(code)
    new = "prepare_launch launch"
    assert shown == [*[new, "launch_known"] * 2, *[new, "launch"] * 2]
    fields = "rows", "x_stride", "scale_stride_column"
    strides = [tuple(launch.params[field] for field in fields) for launch in launched]
    assert strides == [(130, 264, 132)] * 6 + [(65, 264, 68)] * 2
    assert all("pdl 0" in launch.line for launch in launched)  # no part of an expert layer


def test_casts_of_groups_that_are_copied_first(run):
    """The copy has the groups of its original; and what is remembered of it makes no wrong call a right one."""
    code = """
halves = {name: y[:, :5] for name, y in many.items()}
halves = {name: torch.zeros(y.shape, dtype=y.dtype) for name, y in halves.items()}
flat = {name: y.flatten(0, 1) for name, y in halves.items()}
for call, given, k in ((per_token_cast_to_fp8, x, 264), (silu_mul_cast_to_fp8, gate_up, 528)):
    groups = given.view(13, 10, k)[:, :5]
    for source in (groups, groups.transpose(1, 2).contiguous().transpose(1, 2), groups.contiguous()):
        attempt(call, source, counts=counts, **halves)
    attempt(call, groups.flatten(0, 1), counts=counts, **halves)
    attempt(call, groups, counts=counts, **flat)
    attempt(call, groups, **halves)
    attempt(call, groups.flatten(0, 1), **halves)
"""
    shown, launched = run(code, params.CAST_OF_ROWS)
    new, known = "prepare_launch launch", "launch"
    for at in (0, 7):
        assert shown[at : at + 2] == [new, known] and shown[at + 2] in ("launch", "launch_known")
        assert re.match(r"ValueError (x|gate_up) has shape \[65, \d+\]; with counts it must be", shown[at + 3])
        assert re.match(r"ValueError out has shape \[65, 264\]; .* must be \[13, 5, 264\]", shown[at + 4])
        assert shown[at + 5] == new
        assert re.match(r"ValueError out has shape \[13, 5, 264\]; .* must be \[65, 264\]", shown[at + 6])
    fields = ("rows", "columns", "x_stride", "x_rows", "groups", "group_rows")
    seen = [tuple(launch.params[field] for field in fields) for launch in launched]
    assert seen[:3] == [(65, 264, 264, 65, 13, 5)] * 3 and seen[4:7] == [(65, 264, 528, 65, 13, 5)] * 3


@EITHER_WAY
def test_second_cast_of_rows_is_one_call_into_c(run, setup, path):
    """Calls that differ in nothing but their lists, the index's type, or their numbers, are told apart."""
    code = """
for call, given in (
    (per_token_cast_to_fp8, dict(x=x, rows=rows, **few)),
    (per_token_cast_to_fp8, dict(x=x, rows=rows.long(), offs=offs, **few)),
    (per_token_cast_to_fp8, dict(x=x, offs=offs, **targets)),
    (per_token_cast_to_fp8, dict(x=x.view(13, 10, 264), counts=counts, **many)),
    (silu_mul_cast_to_fp8, dict(gate_up=gate_up, **targets)),
    (silu_mul_cast_to_fp8, dict(gate_up=gate_up, offs=offs, limit=7, alpha=2, beta=1, **targets)),
    (silu_mul_cast_to_fp8, dict(gate_up=gate_up.view(13, 10, 528), counts=counts, **many)),
):
    for _ in range(2):
        attempt(call, **given)
show(rows.data_ptr(), offs.data_ptr(), counts.data_ptr())
"""
    shown, launched = run(code, params.CAST_OF_ROWS, setup)
    assert shown[:14] == ["prepare_launch launch", path] * 7
    rows, offs, counts = map(int, shown[14].split())
    fields = ("rows", "columns", "x_stride", "x_rows", "index", "wide_index", "living", "groups", "group_rows")
    seen = [tuple(launch.params[field] for field in fields) for launch in launched]
    assert seen[::2] == [
        (40, 264, 264, 130, rows, 0, 0, 0, 0),
        (40, 264, 264, 130, seen[2][4], 1, offs, 3, 0),
        (130, 264, 264, 130, 0, 0, offs, 3, 0),
        (130, 264, 264, 130, 0, 0, counts, 13, 10),
        (130, 264, 528, 130, 0, 0, 0, 0, 0),
        (130, 264, 528, 130, 0, 0, offs, 3, 0),
        (130, 264, 528, 130, 0, 0, counts, 13, 10),
    ]
    assert seen[::2] == seen[1::2] and all("pdl 1" in launch.line for launch in launched)
    numbers = [tuple(launch.params[field] for field in ("limit", "sigmoid_factor", "beta")) for launch in launched]
    assert numbers[6:8] == [(0.0, 0.0, 0.0)] * 2
    log2_e = 1.4426950408889634
    assert numbers[8:10] == [pytest.approx((float("inf"), -log2_e, 0))] * 2
    assert numbers[10:12] == [pytest.approx((7, -2 * log2_e, 1))] * 2


@EITHER_WAY
def test_second_sum_of_rows_is_one_call_into_c(run, setup, path):
    code = """
from deep_tile import combine, experts
quantize.needs_kernel = lambda *ignored: True
cast.is_loaded = lambda *ignored: True
weights, index, out = torch.zeros(40, 3).t(), torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 264).bfloat16()
for given in ((x, weights, index, out), (x[:, 1:], weights.bfloat16(), index.int(), out[:, 1:])):
    for _ in range(2):
        attempt(combine, *given)
attempt(combine, x, weights, index)
show(x.data_ptr(), weights.data_ptr(), index.data_ptr(), out.data_ptr())
"""
    shown, launched = run(code, params.COMBINE, setup)
    new = "prepare_launch launch"
    assert shown[:5] == [new, path, new, path, path]
    addresses = map(int, shown[5].split())
    wanted = dict(zip(("x", "weights", "index", "out"), addresses, strict=True))
    wanted |= {"tokens": 3, "columns": 264, "x_rows": 130, "x_stride": 264, "out_stride": 264, "top_k": 40}
    wanted |= {"weights_stride_row": 1, "weights_stride_column": 3, "index_stride_row": 40, "index_stride_column": 1}
    wanted |= {"aligned": 1, "wide_index": 1, "narrow_weights": 0}
    assert [launch.params for launch in launched[:2]] == [wanted] * 2 and "pdl 1" in launched[0].line
    moved = launched[2].params
    assert (moved["x"], moved["out"], moved["columns"]) == (wanted["x"] + 2, wanted["out"] + 2, 263)
    assert (moved["aligned"], moved["wide_index"], moved["narrow_weights"]) == (0, 0, 1)


@EITHER_WAY
def test_second_sort_is_one_call_into_c(run, setup, path):
    code = """
from bad_calls import freed
from deep_tile import experts, sort_by_expert
experts.Sort.needs_kernel = lambda *ignored: True
cast.is_loaded = lambda *ignored: True
chosen = torch.zeros(1000, 6, dtype=torch.int64)
for options in ({}, {"alignment": 128}):
    for _ in range(2):
        attempt(sort_by_expert, chosen, 60, **options)
attempt(sort_by_expert, chosen[:32], 60)
attempt(sort_by_expert, chosen[:32].int(), 60)
attempt(sort_by_expert, chosen[:32], 61)
attempt(sort_by_expert, chosen[:, ::2], 60)
show(chosen.data_ptr())
for gone in (freed(chosen), freed(chosen, left=0.5), freed(chosen[:, ::2])):
    attempt(sort_by_expert, gone, 60)
"""
    shown, launched = run(code, params.SORT, setup)
    new = "prepare_launch launch"
    assert shown[:8] == [new, path, new, path, *[new] * 4]
    assert [said[:31] for said in shown[9:]] == ["ValueError chosen has no memory"] * 3
    wanted = {"choices": 6000, "rows_size": 6000, "experts": 60, "alignment": 1, "cluster_log2": 3, "slice": 1024}
    wanted |= {"warp_choices_log2": 5, "chosen": int(shown[8])}
    first, _, aligned, _, few, *_, strided = launched
    assert wanted.items() <= first.params.items() and "cluster 8 pdl 1" in first.line
    assert aligned.params["rows_size"] == 13_696 and aligned.params["alignment"] == 128
    assert (few.params["cluster_log2"], few.params["slice"], few.params["warp_choices_log2"]) == (0, 512, 5)
    assert strided.params["choices"] == 3000 and strided.params["chosen"] != wanted["chosen"]


@pytest.mark.parametrize(
    ("change", "aligned"),
    [("", 1), ("x = x.flatten()[4:].as_strided((100, 264), (264, 1))", 0), ("out = codes.flatten()[8:]", 0)],
)
def test_casts_use_vectors_where_both_are_aligned(run, change, aligned):
    code = f"""
out = codes.flatten()
{change}
per_token_cast_to_fp8(x[:100], out=out.as_strided((100, 264), (264, 1)), scale_out=scale[:100])
"""
    _, launched = run(code)
    assert [launch.params["aligned"] for launch in launched] == [aligned]
