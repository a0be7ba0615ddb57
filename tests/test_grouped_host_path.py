"""The way of a call of `fp8_grouped_gemm` through the host, without a GPU: what is launched, where its operands are.

As test_host_path.py: CPU tensors pass for GPU tensors, and fake_driver.c is the driver.
"""

import re

import pytest
from bad_calls import BAD_CALLS
from test_host_path import WITHOUT_DLPACK, run_pretending  # noqa: F401
from test_launcher import fake_driver  # noqa: F401

from deep_tile import params

SETUP = """
from deep_tile import fp8_grouped_gemm

b = torch.zeros(3, 130, 272).to(a.dtype)[:, :, :256]
b_scale = torch.ones(3, 2, 2)
offs = torch.tensor([1, 2, 5], dtype=torch.int32)
out = torch.zeros(5, 136, dtype=torch.bfloat16)[:, :130]
rows = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out": out, "num_sms": 132}
own = {
    "a": torch.zeros(3, 7, 256).to(a.dtype)[:, :6],
    "a_scale": torch.ones(3, 2, 7).transpose(1, 2)[:, :6],
    "b": b,
    "b_scale": b_scale,
    "out": torch.zeros(3, 9, 136, dtype=torch.bfloat16)[:, :6, :128],
    "num_sms": 132,
}
own["b"], own["b_scale"] = b[:, :128], b_scale[:, :1]
def addresses(**tensors):
    show(*(x.data_ptr() for x in tensors.values() if isinstance(x, torch.Tensor)))
"""


@pytest.fixture
def run(run_pretending):  # noqa: F811
    return lambda code: run_pretending(SETUP + code, params.GEMM)


@pytest.mark.parametrize("without_dlpack", ["", WITHOUT_DLPACK], ids=["dlpack", "without dlpack"])
def test_second_call_is_one_call_into_c(run, without_dlpack):
    code = "for _ in range(3): attempt(fp8_grouped_gemm, **rows, offs=offs)\n"
    code += "for _ in range(2): attempt(fp8_grouped_gemm, **own)\n"
    shown, launched = run(without_dlpack + code)
    again = "launch" if without_dlpack else "launch_known"
    assert shown == ["prepare_launch launch", again, again, "prepare_launch launch", again]
    assert len(launched) == 5


def test_rows_one_after_the_other(run):
    shown, [launch] = run("addresses(**rows, offs=offs)\nfp8_grouped_gemm(**rows, offs=offs, alignment=128)")
    a, a_scale, b, b_scale, out, offs = map(int, shown[0].split())
    found = launch.params
    assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
    assert [found[name] for name in ("a_scale", "b_scale", "out", "bounds")] == [a_scale, b_scale, out, offs]
    assert [found[name] for name in ("m", "n", "k", "groups", "alignment")] == [5, 130, 256, 3, 128]
    assert (found["b_group_rows"], found["b_scale_group_stride"], found["a_scale_group_stride"]) == (130, 4, 0)
    assert found["b_tail_rows"] in (130 % 128, 130 % 64, 130 % 192)
    assert (found["a_tail_rows"], found["early_b"]) == (64 // 4, 0)  # a quarter of a tile


def test_rows_of_their_own(run):
    code = "counts = torch.ones(3, dtype=torch.int32)\naddresses(**own, counts=counts)\n"
    shown, launched = run(code + "fp8_grouped_gemm(**own, counts=counts)\nfp8_grouped_gemm(**own)")
    a, a_scale, b, b_scale, out, counts = map(int, shown[0].split())
    for launch, bounds in zip(launched, (counts, 0), strict=True):
        found = launch.params
        assert [found[name] for name in ("a_scale", "b_scale", "out", "bounds")] == [a_scale, b_scale, out, bounds]
        assert [found[name] for name in ("m", "n", "k", "groups")] == [6, 128, 256, 3]
        assert [found[f"{name}_group_rows"] for name in ("a", "b", "out")] == [7, 130, 9]
        assert [found[f"a_scale_stride_{along}"] for along in "mk"] == [1, 7]
        assert (found["a_scale_group_stride"], found["b_scale_group_stride"]) == (14, 4)


def test_constant_weights_and_bounds_are_read_early_for_one_tile_row_per_group(run):
    code = """
early = {"num_sms": None, "pdl": True, "constant_weights": True}
for expected in (1, 8, 200): attempt(fp8_grouped_gemm, **rows | early, offs=offs, expected_rows=expected)
attempt(fp8_grouped_gemm, **own | early, counts=torch.ones(3, dtype=torch.int32))
attempt(fp8_grouped_gemm, **rows | {"constant_weights": True}, offs=offs)
"""
    shown, launched = run(code)
    assert [launch.params["early_b"] for launch in launched] == [1, 1, 0, 1]
    assert all("pdl 1" in launch.line for launch in launched)
    assert shown[-1].startswith("ValueError constant_weights=True is for programmatic launches")


@pytest.mark.parametrize(("option", "pdl"), [("", 0), (", pdl=True", 1)])
def test_programmatic_launches_are_the_callers_choice(run, option, pdl):
    """By default, unless SMs are left to others, as they are here."""
    _, [launch] = run(f"fp8_grouped_gemm(**rows, offs=offs{option})")
    assert f"pdl {pdl} " in launch.line


def test_bad_calls_launch_nothing(run):
    shown, launched = run("""
attempt(fp8_grouped_gemm, **rows, offs=offs)
attempt(fp8_grouped_gemm, **rows, offs=offs.long())
attempt(fp8_grouped_gemm, **rows, offs=offs[:2])
attempt(fp8_grouped_gemm, **rows, offs=offs, alignment=3)
attempt(fp8_grouped_gemm, **rows)
attempt(fp8_grouped_gemm, **rows, offs=offs, config=GemmConfig(64, 64, 4))
attempt(fp8_grouped_gemm, **rows, offs=offs)
""")
    assert (shown[0], shown[-1]) == ("prepare_launch launch", "launch_known") and len(launched) == 2
    assert [line.split()[0] for line in shown[1:-1]] == ["TypeError", *["ValueError"] * 4]
    assert "grouping='none'" in shown[-2]


@pytest.mark.parametrize("without_dlpack", ["", WITHOUT_DLPACK], ids=["dlpack", "without dlpack"])
def test_bad_calls_launch_nothing_though_right_ones_are_known(run, without_dlpack):
    shown, _ = run(
        without_dlpack
        + """
from bad_calls import BAD_CALLS, CALLS, Good
given = Good()
for number, bad in enumerate(BAD_CALLS):
    if bad.call in ("fp8_grouped_gemm", "scaled_grouped_gemm", "fp8_grouped_wgrad"):
        attempt(CALLS[bad.call](given), **given.arguments(bad.call))
        show(number)
        attempt(CALLS[bad.call](given), **bad.arguments(given))
"""
    )
    assert len(shown) > 3 * 30
    for known, number, outcome in zip(shown[::3], shown[1::3], shown[2::3], strict=True):
        bad = BAD_CALLS[int(number)]
        assert known.split()[-1] in ("launch", "launch_known"), (bad.name, known)
        assert outcome.startswith(bad.error.__name__), (bad.name, outcome)
        assert re.search(bad.seen, outcome) and re.search(bad.remedy, outcome), (bad.name, outcome)
        assert not outcome.endswith(("launch", "launch_known")), (bad.name, outcome)
