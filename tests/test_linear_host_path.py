"""The host path of `fp8_linear`, without a GPU: what is launched, and where its operands are.

See pretending.py: CPU tensors pass for GPU tensors, and fake_driver.c is the driver.
"""

import re

import pytest
from pretending import EITHER_WAY

from deep_tile import params

SETUP = """
from deep_tile import fp8_linear, linear, quantize_weight


launches.num_sms = lambda device: 132
quantize.check_capture = lambda *ignored: None
cast.load = lambda kernel, device: plan.load_kernel(GemmConfig(64, 64, 4), 0)
capturing = [False]
torch.cuda.is_current_stream_capturing = lambda: capturing[0]
linear._kept_workspace = lambda x: linear._kept.workspaces.get((-1, torch._C._cuda_getCurrentRawStream(-1)))

x = torch.randn(5, 256, dtype=torch.bfloat16)
bias = torch.randn(128)
layer = {"x": x, "b": b, "b_scale": b_scale}
"""


@pytest.fixture
def run(run_pretending):
    """Run code after SETUP. Returns the lines that it showed and the launched kernels, whose argument is `of`."""
    return lambda code, of=params.GEMM: run_pretending(SETUP + code, of)


@EITHER_WAY
@pytest.mark.parametrize("more", ["", ", bias=bias"])
def test_second_call_is_one_call_into_c(run, setup, path, more):
    shown, launched = run(f"{setup}for _ in range(3): attempt(fp8_linear, **layer{more})")
    assert shown == ["prepare_launch prepare_launch launch", path, path]
    assert len(launched) == 6


def test_operands_are_parts_of_the_workspace(run):
    """Both kernels launch programmatically, and the GEMM may request its weights before the cast has ended."""
    code = """
kept = []
allocate = linear._workspace
linear._workspace = lambda x: kept.append(allocate(x)) or kept[-1]
out = fp8_linear(**layer)
show(x.data_ptr(), b.data_ptr(), b_scale.data_ptr(), out.data_ptr(), kept[0][0].data_ptr())
"""
    shown, [_, product] = run(code)
    x, b, b_scale, out, workspace = map(int, shown[0].split())
    begin = 256  # two columns of five scales, rounded up to eight
    assert product.map_address("a_maps") == workspace + begin
    assert product.params["a_scale"] == workspace
    assert [product.params[f"a_scale_stride_{along}"] for along in "mk"] == [1, 8]
    assert (product.map_address("b_maps"), product.params["b_scale"], product.params["out"]) == (b, b_scale, out)
    assert (product.params["m"], product.params["early_b"]) == (5, 1) and "pdl 1" in product.line
    shown, [cast, _] = run(code, params.CAST)
    x, *_, workspace = map(int, shown[0].split())
    assert (cast.params["x"], cast.params["out"], cast.params["scale"]) == (x, workspace + begin, workspace)
    assert (cast.params["rows"], cast.params["columns"], cast.params["out_stride"]) == (5, 256, 256)
    assert [cast.params[f"scale_stride_{along}"] for along in ("row", "column")] == [1, 8]
    assert cast.params["aligned"] == 1 and "pdl 1" in cast.line


@pytest.mark.parametrize(("option", "pdl"), [("pdl=False", 0), ("num_sms=7", 0), ("num_sms=7, pdl=True", 1)])
def test_programmatic_launches_are_the_callers_choice(run, option, pdl):
    shown, launched = run(f"fp8_linear(**layer, {option})")
    assert [f"pdl {pdl} " in launch.line for launch in launched] == [True, True]
    assert launched[1].params["early_b"] == pdl


def test_a_workspace_is_kept_for_each_stream_and_thread(run):
    shown, _ = run("""
from threading import Thread
def kept():
    return {key: workspace.data_ptr() for key, workspace in linear._kept.workspaces.items()}
fp8_linear(**layer)
first = kept()
fp8_linear(**layer)
show(kept() == first, *first)
torch._C._cuda_getCurrentRawStream = lambda device: 0x58
fp8_linear(**layer)
show(*kept(), len({*kept().values()}))
elsewhere = []
thread = Thread(target=lambda: (fp8_linear(**layer), elsewhere.append(kept())))
thread.start(), thread.join()
show(*elsewhere[0], {*elsewhere[0].values()} & {*kept().values()})
for stream in range(200):
    torch._C._cuda_getCurrentRawStream = lambda device: stream
    fp8_linear(**layer)
show(len(kept()) <= linear._MOST_KEPT)
""")
    assert shown == ["True (-1, 87)", "(-1, 87) (-1, 88) 2", "(-1, 88) set()", "True"]


@pytest.mark.parametrize("odd", ["FakeTensorMode().from_tensor(x)", "x.as_subclass(Subclass)"])
def test_odd_inputs_leave_no_trace(run, odd):
    """Whether such inputs are refused or taken, later calls are known, with a plain workspace."""
    shown, launched = run(f"""
from torch._subclasses.fake_tensor import FakeTensorMode
class Subclass(torch.Tensor): pass
attempt(fp8_linear, **layer | {{"x": {odd}}})
for _ in range(3): attempt(fp8_linear, **layer)
show(*(type(workspace).__name__ for workspace in linear._kept.workspaces.values()))
""")
    assert shown[0].startswith(
        "TypeError x is a FakeTensor" if "Fake" in odd else "prepare_launch prepare_launch launch"
    )
    assert shown[2:] == ["launch_known", "launch_known", "Tensor"]


def test_kernels_not_loaded_are_told_by_the_call(run):
    shown, launched = run("""
capturing[0] = True
checks.check_capture = lambda config, device, call: launches.refuse_capture(config.name, device, call)
attempt(fp8_linear, **layer)
attempt(fp8_linear, **layer | {"x": quantize.per_token_cast_to_fp8(x)})
""")
    assert len(shown) == 2 and not launched
    assert all(
        re.match("NotLoaded .* call fp8_linear once with these shapes before the capture", line) for line in shown
    )


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("a graph is captured", "capturing[0] = True"),
        ("the input is large", "layer['x'] = torch.randn(12000, 256)"),
    ],
)
def test_a_workspace_is_not_kept(run, why, code):
    shown, launched = run(f"{code}\nfp8_linear(**layer)\nshow(len(linear._kept.workspaces))")
    assert shown == ["0"] and len(launched) == 2, why


def test_inputs_of_any_rank_take_one_way(run):
    """Rows at one stride are read where they are, others are copied first, on every call."""
    shown, launched = run(
        """
wide = torch.randn(2, 3, 5, 7, 264, dtype=torch.bfloat16)
for x in (wide[0, 0, :, :, :256], wide[..., :256], wide[:, :, 2, :, :256], wide[0, 0, 0, :, 8:].t()[:7, :5]):
    layer = {"x": x, "b": b[:, :x.shape[-1]].contiguous() if x.shape[-1] > 5 else b[:, :5], "b_scale": b_scale}
    if x.shape[-1] == 5:
        layer["b_scale"] = b_scale[:, :1]
    attempt(fp8_linear, **layer)
    attempt(fp8_linear, **layer)
    show(x.data_ptr())
""",
        params.CAST,
    )
    first = "prepare_launch prepare_launch launch"
    assert [shown[i] for i in (0, 1, 3, 4, 6, 7, 9, 10)] == [
        *(first, "launch_known"),
        *(first, "launch"),  # of rank 5, which C does not read
        *(first, "launch"),  # a copy, for which the launch is known
        *(first, "launch"),
    ]
    casts = [launch.params for launch in launched[::2]]
    assert [cast["rows"] for cast in casts[::2]] == [35, 210, 42, 7]
    assert [cast["x_stride"] for cast in casts[::2]] == [264, 264, 256, 5]
    assert [cast["x"] == int(shown[i]) for cast, i in zip(casts[::2], (2, 5, 8, 11), strict=True)] == [
        *(True, True, False, False)
    ]


def test_scales_of_powers_of_two_are_expanded(run):
    shown, launched = run("""
exponents = torch.full((1, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
for _ in range(2): attempt(fp8_linear, x, b, exponents)
show(exponents.data_ptr())
""")
    assert shown[:2] == ["prepare_launch prepare_launch launch", "launch"]
    assert int(shown[2]) not in [launch.params["b_scale"] for launch in launched[1::2]]


def test_a_bias_that_does_not_fit_launches_nothing(run):
    shown, launched = run("""
attempt(fp8_linear, **layer, bias=bias)
attempt(fp8_linear, **layer, bias=bias[:127])
attempt(fp8_linear, **layer, bias=bias.double())
attempt(fp8_linear, **layer, bias=bias)
""")
    assert (shown[0], shown[3]) == ("prepare_launch prepare_launch launch", "launch_known")
    assert all(line.startswith("ValueError bias must be [n] = [128] of ") for line in shown[1:3])
    assert len(launched) == 4


def test_the_product_adds_the_bias(run):
    code = "attempt(fp8_linear, **layer, bias=bias)\nshow(bias.data_ptr())"
    shown, [_, product] = run(code)
    assert (product.params["bias"], product.params["bias_stride"]) == (int(shown[1]), 1)
    _, [_, product] = run("attempt(fp8_linear, **layer)")
    assert product.params["bias"] == product.params["bias_stride"] == 0


def test_out_is_checked_before_the_launch(run):
    shown, launched = run("""
attempt(fp8_linear, **layer, out=torch.zeros(5, 127))
attempt(fp8_linear, **layer, out=torch.zeros(5, 128))
attempt(fp8_linear, **layer, out_dtype=torch.float32, out=torch.zeros(5, 128)[:, None])
with torch.inference_mode():
    inferred = torch.zeros(5, 128, dtype=torch.bfloat16)
attempt(fp8_linear, **layer, bias=bias, out=inferred)
attempt(fp8_linear, **layer, out=inferred)
attempt(fp8_linear, **layer, out_dtype=torch.float32, out=torch.zeros(5, 128))
""")
    assert [line.partition(";")[0] for line in shown] == [
        *["ValueError out must be [5, 128] of torch.bfloat16"] * 2,
        "ValueError out must be [5, 128] of torch.float32",
        *["prepare_launch prepare_launch launch"] * 3,
    ]
    assert len(launched) == 6
