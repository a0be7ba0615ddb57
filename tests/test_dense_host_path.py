"""The way of a call of `gemm`, `int8_gemm` or `scaled_gemm` through the host, without a GPU: what is launched.

As test_host_path.py: CPU tensors pass for GPU tensors, and fake_driver.c is the driver.
"""

import pytest
from test_host_path import WITHOUT_DLPACK, run_pretending  # noqa: F401
from test_launcher import fake_driver  # noqa: F401

SETUP = """
from deep_tile import fp8_wgrad, gemm, int8_gemm, scaled_gemm

options = {"num_sms": 132, "pdl": True}
x, w = torch.zeros(5, 264).bfloat16()[:, :256], torch.zeros(130, 256).bfloat16()
y = torch.zeros(5, 136)[:, :130]
plain = {"a": x, "b": w, "out": y, **options}
a8, b8 = (torch.zeros(rows, 272).to(torch.int8)[:, :256] for rows in (5, 130))
bytes_ = {"a": a8, "b": b8, "out": y, **options}
blocks = bytes_ | {"a_scale": torch.ones(2, 7).t()[:5], "b_scale": torch.ones(2, 2)}
rows = bytes_ | {"a_scale": torch.ones(5, 3)[:, :1], "b_scale": torch.ones(1, 130)}
one = bytes_ | {"a_scale": torch.ones(()), "b_scale": torch.ones(1, 1)}
f8 = {name: bytes_[name].float().to(torch.float8_e4m3fn) for name in "ab"}
padded = [f8[name].new_zeros(len(f8[name]), 272)[:, :256] for name in "ab"]
both = {"out": y, **options, "a": padded[0], "b": padded[1]}
both |= {"a_scale": torch.ones(2, 8).t()[:5], "b_scale": torch.ones(2, 132).t()[:130]}
grads = {"dy": both["a"], "dy_scale": both["a_scale"], "x": both["b"], "x_scale": both["b_scale"], "out": y, **options}
def addresses(**tensors):
    show(*(tensors[name].data_ptr() for name in ("a", "a_scale", "b", "b_scale", "out") if name in tensors))
"""


@pytest.fixture
def run(run_pretending):  # noqa: F811
    return lambda code: run_pretending(SETUP + code)


@pytest.mark.parametrize("without_dlpack", ["", WITHOUT_DLPACK], ids=["dlpack", "without dlpack"])
def test_second_call_is_one_call_into_c(run, without_dlpack):
    calls = [("gemm", "plain"), ("int8_gemm", "blocks"), ("scaled_gemm", "rows"), ("scaled_gemm", "one")]
    calls += [("scaled_gemm", "both"), ("fp8_wgrad", "grads")]
    code = "".join(f"for _ in range(2): attempt({call}, **{arguments})\n" for call, arguments in calls)
    shown, launched = run(without_dlpack + code)
    again = "launch" if without_dlpack else "launch_known"
    assert shown == ["prepare_launch launch", again] * 6
    assert len(launched) == 12


def test_products_without_scales(run):
    shown, [launch] = run("addresses(**plain)\ngemm(**plain)")
    a, b, out = map(int, shown[0].split())
    found = launch.params
    assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
    assert [found[name] for name in ("a_scale", "b_scale", "out")] == [0, 0, out]
    assert [found[name] for name in ("m", "n", "k", "out_stride_m")] == [5, 130, 256, 136]
    assert "pdl 1 " in launch.line


@pytest.mark.parametrize(
    ("call", "arguments", "strides"),
    [
        ("int8_gemm", "blocks", [1, 7, 2, 1]),
        ("scaled_gemm", "rows", [3, 0, 1, 0]),
        ("scaled_gemm", "one", [0, 0, 0, 0]),
        ("scaled_gemm", "both", [1, 8, 1, 132]),
    ],
)
def test_scales(run, call, arguments, strides):
    shown, [launch] = run(f"addresses(**{arguments})\n{call}(**{arguments})")
    a, a_scale, b, b_scale, out = map(int, shown[0].split())
    found = launch.params
    assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
    assert [found[name] for name in ("a_scale", "b_scale", "out")] == [a_scale, b_scale, out]
    names = ("a_scale_stride_m", "a_scale_stride_k", "b_scale_stride_n", "b_scale_stride_k")
    assert [found[name] for name in names] == strides


def test_gradients_are_added(run):
    """By a kernel of their own: neither call takes the launch of the other."""
    code = """
addresses(a=padded[0], b=padded[1], out=y)
attempt(fp8_wgrad, **grads)
attempt(fp8_wgrad, **grads, accumulate=False)
"""
    shown, [added, written] = run(code)
    assert shown[1:] == ["prepare_launch launch"] * 2
    a, b, out = map(int, shown[0].split())
    for launch in (added, written):
        assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
        assert launch.params["out"] == out
        assert (launch.params["bulk_scale_rows"], launch.params["bulk_scale_columns"]) == (5, 130)


def test_calls_alike_do_not_take_each_others_launches(run):
    """With one K block and as few columns, scales of blocks and of rows look the same."""
    code = """
small = bytes_ | {name: bytes_[name][:, :64] for name in "ab"} | {"a_scale": torch.ones(5, 1)}
small |= {"b": small["b"][:1], "b_scale": torch.ones(1, 1), "out": torch.zeros(5, 1)}
attempt(int8_gemm, **small)
attempt(scaled_gemm, **small)
attempt(int8_gemm, **small)
"""
    shown, launched = run(code)
    assert shown == ["prepare_launch launch", "prepare_launch launch", "launch_known"]
    assert [launch.params["a_scale_stride_k"] for launch in launched] == [1, 0, 1]


def test_bad_calls_launch_nothing(run):
    shown, launched = run("""
attempt(gemm, **plain)
attempt(gemm, **plain | {"a": x.half()})
attempt(gemm, **plain | {"config": GemmConfig(64, 64, 4)})
attempt(gemm, **plain | {"out": y.to(torch.float64)})
attempt(scaled_gemm, **blocks | {"b_scale": rows["b_scale"]})
attempt(int8_gemm, **rows)
attempt(gemm, **plain)
""")
    assert (shown[0], shown[-1]) == ("prepare_launch launch", "launch_known") and len(launched) == 2
    assert [line.split()[0] for line in shown[1:-1]] == ["TypeError", "ValueError", "TypeError", *["ValueError"] * 2]
    assert "fp8_gemm_64x64x128_s4_c1x1 is for kind='fp8'" in shown[2]
