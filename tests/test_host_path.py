"""A warm call's way through operation.py, without a GPU: what is launched, by which path, and what reaches the checks.

CPU tensors of the real torch pass for GPU tensors, in a process of its own in which fake_driver.c is the driver. That
covers everything on the host but torch's CUDA streams, which test_host_path_gpu.py does.
"""

import atexit
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from bad_calls import BAD_CALLS, BadCall
from test_launcher import WHOLE_CUBIN, fake_driver, params_of  # noqa: F401
from test_params import unpack

from deep_tile import params
from deep_tile.quantize import SMALLEST_AMAX_FLOOR

SETUP = f"""
import ctypes, json, os, signal, sys
import numpy as np
import torch
if "libcuda.so" in open("/proc/self/maps").read():
    sys.exit("torch has opened the real driver")
fake = ctypes.CDLL(os.environ["FAKE_DRIVER"], mode=ctypes.RTLD_GLOBAL)
torch.set_num_threads(1)  # a child process has none of its parent's threads
sys.path.insert(0, {str(Path(__file__).parent)!r})
from helpers import make_operands
from deep_tile import GemmConfig, _launcher, cast, checks, fp8_gemm, launches, plan, prepare, quantize
from deep_tile.dense import FP8_GEMM
from deep_tile.operation import Operation

# The facts that need a GPU.
Operation.is_on_gpu = staticmethod(lambda x: True)
checks.check_hopper = checks.check_capture = lambda *ignored: None
launches.is_hopper = lambda device: True
plan.load_kernel = lambda config, device: _launcher.load({WHOLE_CUBIN!r}, config.name, config.smem_bytes, 0)
torch._C._cuda_getCurrentRawStream = lambda device: 0x57

paths = []  # what a call did: prepare a launch, launch
def note(module, name):
    function = getattr(module, name)
    def noting(*args, **kwargs):
        result = function(*args, **kwargs)
        if result is not False:
            paths.append(name)
        return result
    setattr(module, name, noting)
for module, name in ((_launcher, "launch"), (_launcher, "launch_known"), (plan, "prepare_launch"),
                     (cast, "prepare_launch")):
    note(module, name)

def show(*what):
    print("=", *what, flush=True)
def attempt(call, *args, **kwargs):
    paths.clear()
    try:
        call(*args, **kwargs)
        show(*paths)
    except (TypeError, ValueError, RuntimeError) as error:
        show(type(error).__name__, error, *paths)

# Not all dense, so that the strides can change.
a, a_scale, b, b_scale = make_operands(5, 128, 256, seed=1)
out = torch.zeros(6, 136, dtype=torch.bfloat16)[:5, :128]
good = {{"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out": out}}
"""


FORK_FOR_EACH_PROGRAM = """
print("ended 0", flush=True)
while program := sys.stdin.readline():
    child = os.fork()
    if not child:
        signal.alarm(600)
        exec(json.loads(program))
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""
"""Programs are lines of JSON. Each finds what SETUP left, whatever others did; none pays for torch's import and end."""


def lines_of_a_program(process: subprocess.Popen) -> list[str]:
    """What it prints until it has ended, or SETUP has."""
    lines = []
    while not lines or not re.match("ended|$", lines[-1]):
        lines.append(process.stdout.readline())
    if any("torch has opened the real driver" in line for line in lines):
        pytest.skip("this torch opens the real driver when it is imported")
    assert lines[-1] == "ended 0\n", "".join(lines)
    return lines


class Launched(NamedTuple):
    """A kernel's launch: what the driver is asked, and the kernel's argument by field."""

    line: str
    params: dict[str, int | bytes]

    def map_address(self, name: str) -> int:
        return int.from_bytes(self.params[name][:8], "little")


@pytest.fixture(scope="session")
def run_pretending(fake_driver):  # noqa: F811
    """Runs code that knows all of SETUP; the lines that it shows, and the kernels launched, with an argument `of`."""

    def run(code: str, of: params.Params = params.GEMM) -> tuple[list[str], list[Launched]]:
        code = f'ctypes.c_uint.in_dll(fake, "fake_params_bytes").value = {of.size}\n{code}'
        print(json.dumps(code), file=process.stdin, flush=True)
        lines = lines_of_a_program(process)
        shown = [line.removeprefix("=").strip() for line in lines if line.startswith("=")]
        launches = [line for line in lines if line.startswith("cuLaunchKernelEx")]
        return shown, [Launched(line, unpack(of, params_of(line))) for line in launches]

    process = pretending_process(fake_driver)
    return run


@cache
def pretending_process(driver: Path) -> subprocess.Popen:
    """One for all modules whose tests pretend, which has run SETUP; it ends with this one."""
    command = [sys.executable, "-c", SETUP + FORK_FOR_EACH_PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"FAKE_DRIVER": str(driver)}, **pipes)
    atexit.register(process.communicate)  # closes its input, and waits
    lines_of_a_program(process)
    return process


WITHOUT_DLPACK = """
_launcher.launch_known, _launcher.signature = lambda *ignored: False, lambda *ignored: None
"""
"""As with a torch that has no DLPack C exchange API."""

EITHER_WAY = pytest.mark.parametrize(
    ("setup", "path"), [("", "launch_known"), (WITHOUT_DLPACK, "launch")], ids=["dlpack", "without dlpack"]
)
EITHER_SETUP = pytest.mark.parametrize("setup", ["", WITHOUT_DLPACK], ids=["dlpack", "without dlpack"])


def test_second_call_is_one_call_into_c(run_pretending):
    shown, launched = run_pretending("""
for _ in range(3):
    attempt(fp8_gemm, **good)
show(*(x.data_ptr() for x in good.values()))
""")
    assert shown[:3] == ["prepare_launch launch", "launch_known", "launch_known"]
    assert ["stream 0x57 " in launch.line for launch in launched] == [True, False, False], "DLPack knows torch's stream"
    first, *others = (launch.params for launch in launched)
    assert others == [first] * 2
    names = ("a_scale_stride_m", "a_scale_stride_k", "b_scale_stride_n", "b_scale_stride_k", "out_stride_m")
    assert [first[name] for name in names] == [2, 1, 2, 1, 136]
    a, a_scale, b, b_scale, out = map(int, shown[3].split())
    assert (first["a_scale"], first["b_scale"], first["out"]) == (a_scale, b_scale, out)
    assert [launched[0].map_address(name) for name in ("a_maps", "b_maps", "out_maps")] == [a, b, out]


def test_second_call_without_dlpack(run_pretending):
    shown, launched = run_pretending(WITHOUT_DLPACK + "for _ in range(3): attempt(fp8_gemm, **good)")
    assert shown == ["prepare_launch launch", "launch", "launch"]
    assert [launch.params for launch in launched] == [launched[0].params] * 3


def test_parameters_are_tensors(run_pretending):
    """Whether they require a gradient or not; what differs in nothing that the checks read shares a launch."""
    shown, _ = run_pretending("""
attempt(fp8_gemm, **good)
frozen = torch.nn.Parameter(b, requires_grad=False)
trained = torch.nn.Parameter(b_scale)
with torch.inference_mode():
    inference = a_scale.clone()
attempt(fp8_gemm, **good | {"a_scale": inference})
with torch.no_grad():
    attempt(fp8_gemm, **good | {"b": frozen, "b_scale": trained})
attempt(fp8_gemm, **good | {"a": a.clone(), "b": b.clone()})
""")
    assert shown == ["prepare_launch launch", *["launch_known"] * 3]


def test_other_subclasses_go_through_python(run_pretending):
    shown, _ = run_pretending("""
class Subclass(torch.Tensor):
    pass
attempt(fp8_gemm, **good)
for _ in range(2):
    attempt(fp8_gemm, **good | {"b": b.as_subclass(Subclass)})
""")
    assert shown == ["prepare_launch launch", "prepare_launch launch", "launch"]


def needs_a_gpu(bad: BadCall, dlpack: bool) -> bool:
    """Whether what passes for a GPU here lets such a call pass."""
    on_meta = "meta" in bad.what and not dlpack  # Python tells GPUs apart by number, and this one has none
    return bad.needs == "gpu" or on_meta or (bad.what == "is in freed storage" and dlpack)


def assert_refused(bad: BadCall, outcome: str, dlpack: bool) -> None:
    """And launched nothing."""
    if not needs_a_gpu(bad, dlpack):
        assert outcome.startswith(bad.error.__name__), (bad.name, outcome)
        assert re.search(bad.seen, outcome) and re.search(bad.remedy, outcome), (bad.name, outcome)
        assert not outcome.endswith(("launch", "launch_known")), (bad.name, outcome)


PRODUCTS = "fp8_gemm", "prepare", "plan"
CASTS = "per_token_cast_to_fp8", "per_block_cast_to_fp8", "silu_mul_cast_to_fp8"


@EITHER_WAY
@pytest.mark.parametrize("calls", [PRODUCTS, CASTS], ids=["products", "casts"])
def test_bad_calls_launch_nothing(run_pretending, setup, path, calls):
    """Though calls that are right, and like them, are known: of GPU tensors, C would launch those at once."""
    code = f"""
from bad_calls import BAD_CALLS, CALLS, Good
given = Good()
for number, bad in enumerate(BAD_CALLS):
    if bad.call in {calls}:
        right = bad.call if bad.call in {CASTS} else "fp8_gemm"
        attempt(CALLS[right](given), **given.arguments(right))
        show(number)
        function, arguments = CALLS[bad.call](given), bad.arguments(given)
        attempt(function, **arguments)
"""
    of = params.CAST if calls is CASTS else params.GEMM
    shown, _ = run_pretending(setup + CAST_SETUP * (calls is CASTS) + code, of=of)
    assert len(shown) > 180
    for known, number, outcome in zip(shown[::3], shown[1::3], shown[2::3], strict=True):
        bad = BAD_CALLS[int(number)]
        assert known.split()[-1] == path or "prepare" in known, (bad.name, known)
        assert_refused(bad, outcome, path == "launch_known")


@EITHER_SETUP
def test_floors_that_equal_a_known_one_are_refused(run_pretending, setup):
    code = """
given = {"x": x, "out": codes, "scale_out": scale}
for floor in (True, 1, 1.0, True, np.float32(1), [1.0]):
    attempt(per_token_cast_to_fp8, **given, amax_floor=floor)
"""
    shown, _ = run_pretending(setup + CAST_SETUP + code, of=params.CAST)
    true = "TypeError amax_floor is True, a bool; pass a number, such as 1e-4"
    assert shown == [true, "prepare_launch launch", "launch", true, "launch", shown[5]]
    assert shown[5] == "TypeError amax_floor is [1.0], a list; pass a number, such as 1e-4"


def test_legal_changes_are_prepared_anew(run_pretending):
    shown, launched = run_pretending("""
attempt(fp8_gemm, **good)
unaligned = torch.zeros(6 * 136 + 1, dtype=torch.bfloat16).as_strided(out.shape, out.stride(), 1)
changes = [
    {"out": unaligned}, {"a_scale": a_scale.t().contiguous().t()}, {"a": a[:3], "a_scale": a_scale[:3], "out": out[:3]},
    {"num_sms": 7}, {"config": GemmConfig(64, 64, 4)}, {"batch_invariant": True}, {"pdl": False},
    {"constant_weights": True},
]
for change in changes:
    attempt(fp8_gemm, **good | change)
    attempt(fp8_gemm, **good | change)
""")
    assert shown == ["prepare_launch launch", *["prepare_launch launch", "launch_known"] * 8]
    options = [(int(re.search(r"pdl (\d)", launch.line)[1]), launch.params["early_b"]) for launch in launched]
    assert options == [(1, 0)] * 7 + [(0, 0)] * 2 + [(1, 0)] * 4 + [(0, 0)] * 2 + [(1, 1)] * 2


def test_constant_weights_are_requested_early_by_one_row_of_tiles(run_pretending):
    _, launched = run_pretending("""
for rows in (5, 64, 300):
    many = torch.zeros(rows, 256).to(a.dtype), torch.ones(rows, 2), b, b_scale
    attempt(fp8_gemm, *many, torch.zeros(rows, 128, dtype=out.dtype), constant_weights=True)
""")
    assert [launch.params["early_b"] for launch in launched] == [1, 1, 0]


@pytest.mark.parametrize(
    ("config", "m", "n", "tails"),
    [
        ("GemmConfig(64, 64, 4)", 64, 128, (0, 0)),
        ("GemmConfig(64, 64, 4)", 3, 128, (3, 0)),
        ("GemmConfig(64, 64, 4)", 130, 200, (2, 8)),
        ("GemmConfig(128, 192, 3, cluster_m=2)", 300, 208, (44, 8)),
        ("GemmConfig(128, 192, 3, cluster_n=2)", 297, 576, (24, 0)),
        ("GemmConfig(128, 192, 3, cluster_n=2)", 129, 600, (8, 24)),
    ],
)
def test_the_last_tile_is_fetched_by_the_rows_that_it_has(run_pretending, config, m, n, tails):
    """Of what two blocks share each fetches half, in eights of rows."""
    _, launched = run_pretending(f"""
out = torch.zeros({m}, {n}, dtype=torch.bfloat16)
fp8_gemm(*make_operands({m}, {n}, 256, seed=1), out, config={config})
""")
    assert [(launch.params["a_tail_rows"], launch.params["b_tail_rows"]) for launch in launched] == [tails]


def test_out_is_allocated(run_pretending):
    shown, _ = run_pretending("""
for _ in range(2):
    attempt(fp8_gemm, a, a_scale, b, b_scale)
result = fp8_gemm(a, a_scale, b, b_scale)
show(result.dtype, tuple(result.shape), result.is_contiguous())
""")
    assert shown == ["prepare_launch launch", "launch_known", "torch.bfloat16 (5, 128) True"]


def test_signatures_are_forgotten_when_there_are_too_many(run_pretending):
    shown, _ = run_pretending("""
launches.MAX_SIGNATURES = 2
for m in (1, 2, 2, 3, 3, 2):
    attempt(fp8_gemm, a[:m], a_scale[:m], b, b_scale, out[:m])
show(*(len(known) for _, known in FP8_GEMM.launches.values()))
""")
    new, known = "prepare_launch launch", "launch_known"
    assert shown == [new, new, known, new, known, new, "2"]


def test_options_are_forgotten_when_there_are_too_many(run_pretending):
    shown, _ = run_pretending("""
launches.MAX_OPTIONS = 2
for num_sms in (1, 2, 1):
    attempt(fp8_gemm, **good, num_sms=num_sms)
attempt(fp8_gemm, a[:3], a_scale[:3], b, b_scale, out[:3], num_sms=1)
for num_sms in (2, 3, 3, 1):
    attempt(fp8_gemm, **good, num_sms=num_sms)
show(*(options[2] for options in FP8_GEMM.launches))
""")
    new, known = "prepare_launch launch", "launch_known"
    assert shown == [new, new, known, new, known, new, known, new, "3 1"]


def test_equal_options_of_other_types_are_refused_though_known(run_pretending):
    """In whichever order they come."""
    shown, launched = run_pretending("""
for value in (True, 1, 1.0, True, np.int64(1)):
    attempt(fp8_gemm, **good, num_sms=value)
for value in (0, False, 0.0):
    attempt(fp8_gemm, **good, pdl=value)
""")
    refused = [line.startswith("TypeError") for line in shown]
    assert refused == [True, False, True, True, True, True, False, True]
    assert len(launched) == 2


MEMORY = """
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def entries():
    return len(FP8_GEMM.launches), sum(len(launches) for _, launches in FP8_GEMM.launches.values())
"""


def test_warm_calls_take_no_memory(run_pretending):
    shown, _ = run_pretending(
        MEMORY
        + """
os.environ["FAKE_DRIVER_QUIET"] = "1"
plan_ = prepare(**good)
def call():
    fp8_gemm(**good)
    plan_(a, a_scale, out)
    fp8_gemm(a, a_scale, b, b_scale)
for _ in range(1_000):
    call()
paths.clear()
before = resident_bytes()
for _ in range(34_000):
    call()
    paths.clear()
show(resident_bytes() - before)
show(*entries())
"""
    )
    assert int(shown[0]) < 1 << 20
    assert shown[1] == "1 2"


def test_many_signatures_take_bounded_memory(run_pretending):
    """12,600 of them, with 300 different options: as many as are remembered, and then half as many again.

    An eighth of what are remembered otherwise; test_host_path_gpu.py has them all.
    """
    shown, _ = run_pretending(
        MEMORY
        + """
os.environ["FAKE_DRIVER_QUIET"] = "1"
show(launches.MAX_SIGNATURES)
launches.MAX_SIGNATURES //= 8
config = GemmConfig(64, 64, 4, tma_store=False)
rows = torch.zeros(42, 16).to(a.dtype), torch.ones(42, 1), torch.zeros(42, 8, dtype=out.dtype)
weights = torch.zeros(8, 16).to(a.dtype), torch.ones(1, 1)
fp8_gemm(rows[0], rows[1], *weights, rows[2], config=config)
before, most = resident_bytes(), 0
for num_sms in range(1, 101):
    for pdl in (None, False, True):
        for m in range(1, 43):
            fp8_gemm(rows[0][:m], rows[1][:m], *weights, rows[2][:m], config=config, num_sms=num_sms, pdl=pdl)
        most = max(most, entries()[1])
        paths.clear()
show(most, resident_bytes() - before)
show(*entries())
"""
    )
    assert shown[0] == "65536"
    most, grown = map(int, shown[1].split())
    assert 8_100 < most <= 8_192
    assert grown < 25 << 20
    tables, left = map(int, shown[2].split())
    assert tables < 300 and left == 12_600 + 1 - 8_192


# Plans.


@EITHER_WAY
def test_plan(run_pretending, setup, path):
    """It prepares once, launches nothing by itself, and binds the weights."""
    shown, launched = run_pretending(
        setup
        + """
weights = torch.nn.Parameter(b, requires_grad=False)
plan_ = prepare(a, a_scale, weights, b_scale, out, constant_weights=True)
show(*paths)
other = a.clone(), a_scale.clone(), torch.zeros(6, 136, dtype=torch.bfloat16)[:5, :128]
attempt(plan_, a, a_scale, out)
attempt(plan_, *other)
show(plan_(*other) is other[2], plan_.b is weights, plan_.b_scale is b_scale, plan_.config.block_m)
show(repr(plan_))
result = prepare(a, a_scale, b, b_scale)(a, a_scale)
show(result.dtype, tuple(result.shape), result.is_contiguous())
for call in ((a, a_scale, out), other):
    show(*(x.data_ptr() for x in (*call, b, b_scale)))
"""
    )
    assert shown[:4] == ["prepare_launch", path, path, "True True True 64"]
    assert re.fullmatch(r"<deep_tile\.Plan m=5 n=128 k=256 fp8_gemm_\S+>", shown[4])
    assert shown[5] == "torch.bfloat16 (5, 128) True"
    assert len(launched) == 4
    for line, launch in zip(shown[6:8], launched, strict=False):
        a, a_scale, out, b, b_scale = map(int, line.split())
        assert (launch.map_address("a_maps"), launch.map_address("b_maps"), launch.map_address("out_maps")) == (
            a,
            b,
            out,
        )
        assert [launch.params[name] for name in ("a_scale", "b_scale", "out")] == [a_scale, b_scale, out]
    assert all("pdl 1" in launch.line and launch.params["early_b"] == 1 for launch in launched[:3])


PLAN_CHANGES = {
    "a.view(torch.uint8), a_scale, out": "ValueError a is torch.uint8 .* this plan is for torch.float8_e4m3fn",
    "a[:3], a_scale[:3], out[:3]": r"ValueError a is .*\[3, 256\].* this plan is for .*\[5, 256\]",
    "a, a_scale.t().contiguous().t(), out": r"ValueError a_scale is .*strides \(1, 5\).*plan is for .*strides \(2, 1\)",
    "a, a_scale.to('meta'), out": "ValueError a_scale is .* on meta; this plan is for .* on cpu",
    "a, a_scale": r"ValueError out is .*strides \(128, 1\).*this plan is for .*strides \(136, 1\)",
    "a, a_scale, torch.zeros(817, dtype=out.dtype).as_strided((5, 128), (136, 1), 1)": (
        "ValueError out is .*, not aligned to 16 bytes; this plan"
    ),
    "torch.zeros(1288, dtype=torch.uint8).view(a.dtype)[8:].view(5, 256), a_scale, out": (
        "ValueError a is .*, not aligned to 16 bytes; this plan"
    ),
    "a, [1.0], out": "TypeError a_scale must be a torch.Tensor; got list",
    "None, a_scale": "TypeError a must be a torch.Tensor; got NoneType",
}


@EITHER_SETUP
def test_plan_takes_the_like_only(run_pretending, setup):
    calls = "\n".join(f"attempt(plan_, {arguments})" for arguments in PLAN_CHANGES)
    shown, launched = run_pretending(setup + "plan_ = prepare(a, a_scale, b, b_scale, out)\n" + calls)
    assert not launched
    for message, line in zip(PLAN_CHANGES.values(), shown, strict=True):
        assert re.match(message, line), line


# Scales of `a` that TMA may copy.

SCALES = """
m_aligned = torch.zeros(2, 8)
aligned, moved = m_aligned.t()[:5], torch.zeros(20)[1:17].view(2, 8).t()[:5]
show(aligned.data_ptr() % 16, moved.data_ptr() % 16, aligned.stride() == moved.stride())
"""


@EITHER_SETUP
def test_scales_are_copied_in_bulk_where_they_are_aligned(run_pretending, setup):
    """Which is another signature."""
    shown, launched = run_pretending(
        setup
        + SCALES
        + """
for scale in (aligned, moved, aligned, moved, a_scale):
    fp8_gemm(a, scale, b, b_scale, out)
"""
    )
    assert shown == ["0 4 True"]
    assert [launch.params["bulk_scale_rows"] for launch in launched] == [5, 0, 5, 0, 0]


@EITHER_SETUP
@pytest.mark.parametrize(("example", "rows"), [("aligned", [5, 0, 5, 0]), ("moved", [0] * 4)])
def test_plan_takes_scales_that_begin_anywhere(run_pretending, setup, example, rows):
    shown, launched = run_pretending(
        setup
        + SCALES
        + f"""
plan_ = prepare(a, {example}, b, b_scale, out, num_sms=7)
for scale in (aligned, moved, aligned, moved):
    plan_(a, scale, out)
show(*(scale.data_ptr() for scale in (aligned, moved)))
"""
    )
    assert [launch.params["bulk_scale_rows"] for launch in launched] == rows
    assert [launch.params["a_scale"] for launch in launched] == [int(x) for x in shown[1].split()] * 2
    assert len({launch.line.partition("params")[0].partition("stream")[0] for launch in launched}) == 1


# Casts.

CAST_SETUP = f"""
from deep_tile import per_block_cast_to_fp8, per_token_cast_to_fp8
quantize.needs_kernel, launches.num_sms = lambda x, out: True, lambda device: 132
quantize.check_capture = lambda *ignored: None
cast.load = lambda kernel, device: _launcher.load({WHOLE_CUBIN!r}, kernel.name, 0, 0)
x = torch.zeros(130, 264, dtype=torch.bfloat16)
codes, scale = torch.zeros(130, 264).to(torch.float8_e4m3fn), torch.zeros(130, 3)
"""


@EITHER_WAY
@pytest.mark.parametrize(("cast", "rows"), [("per_token_cast_to_fp8", 130), ("per_block_cast_to_fp8", 2)])
def test_second_cast_is_one_call_into_c(run_pretending, setup, path, cast, rows):
    shown, launched = run_pretending(
        setup
        + CAST_SETUP
        + f"""
for _ in range(3):
    attempt({cast}, x, out=codes, scale_out=scale[:{rows}])
attempt({cast}, x, out=codes, scale_out=scale[:{rows}], amax_floor=1e-10)
show(x.data_ptr(), codes.data_ptr(), scale.data_ptr())
""",
        of=params.CAST,
    )
    assert shown[:4] == ["prepare_launch launch", path, path, "prepare_launch launch"]
    x, out, scale = map(int, shown[4].split())
    wanted = {"x": x, "out": out, "scale": scale, "rows": 130, "columns": 264, "x_stride": 264, "out_stride": 264}
    wanted |= {"scale_stride_row": 3, "scale_stride_column": 1, "aligned": 1, "pow2_scale": 0}
    floors = [launch.params.pop("amax_floor") for launch in launched]
    assert floors == pytest.approx([SMALLEST_AMAX_FLOOR] * 3 + [1e-10], rel=2**-24, abs=0)
    assert [launch.params.pop("correction") for launch in launched] == [1.0] * 4
    assert [launch.params for launch in launched] == [wanted] * 4


def test_options_of_a_cast_reach_its_kernel(run_pretending):
    shown, launched = run_pretending(
        CAST_SETUP
        + """
for round_scale in ("none", "pow2"):
    for exact in ("divide", "reciprocal"):
        for _ in range(2):
            attempt(per_token_cast_to_fp8, x, round_scale=round_scale, exact=exact, out=codes, scale_out=scale)
""",
        of=params.CAST,
    )
    assert shown == ["prepare_launch launch", "launch_known"] * 4
    options = [(launch.params["pow2_scale"], launch.params["correction"]) for launch in launched[::2]]
    assert options == [(0, 1.0), (0, 0.0), (1, 1.0), (1, 0.0)]


def test_casts_allocate_and_convert(run_pretending):
    """What is converted first has a signature of its own."""
    shown, launched = run_pretending(
        CAST_SETUP
        + """
for layout in ("row", "m_aligned"):
    for _ in range(2):
        attempt(per_token_cast_to_fp8, x, scale_layout=layout)
for source in (x.double(), x.t(), torch.nn.Parameter(x, requires_grad=False)):
    for _ in range(2):
        attempt(per_token_cast_to_fp8, source)
attempt(per_token_cast_to_fp8, x, out=codes[:, 1:], scale_out=scale)
attempt(per_token_cast_to_fp8, x, scale_layout="column", out=codes, scale_out=scale)
attempt(per_token_cast_to_fp8, [1.0], out=codes, scale_out=scale)
""",
        of=params.CAST,
    )
    new, known = "prepare_launch launch", "launch_known"
    assert shown[:10] == [new, known, new, known, new, "launch", new, "launch", known, known]
    assert [launch.params["scale_stride_column"] for launch in launched[:4]] == [1, 1, 132, 132]
    assert re.match(r"ValueError out has shape \[130, 263\]", shown[10])
    assert re.match("ValueError scale_layout is 'column'", shown[11])
    assert re.match("TypeError x is a <class 'list'>", shown[12])


def test_casts_of_three_dimensions_are_one_call_into_c(run_pretending):
    """Those of four, too; those of five go through Python, as do those that are copied first."""
    shown, launched = run_pretending(
        CAST_SETUP
        + """
for source in (x.view(13, 10, 264), x.view(13, 5, 2, 264), x.view(13, 5, 2, 1, 264), x.view(13, 10, 264)[:, :5]):
    for _ in range(2):
        attempt(per_token_cast_to_fp8, source, scale_layout="m_aligned")
""",
        of=params.CAST,
    )
    new = "prepare_launch launch"
    assert shown == [*[new, "launch_known"] * 2, *[new, "launch"] * 2]
    fields = "rows", "x_stride", "scale_stride_column"
    strides = [tuple(launch.params[field] for field in fields) for launch in launched]
    assert strides == [(130, 264, 132)] * 6 + [(65, 264, 68)] * 2
    assert all("pdl 0" in launch.line for launch in launched)  # no part of an expert layer


def test_casts_of_groups_that_are_copied_first(run_pretending):
    """The copy has the groups of its original; and what is remembered of it makes no wrong call a right one."""
    shown, launched = run_pretending(
        CAST_SETUP
        + OF_ROWS
        + """
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
""",
        of=params.CAST_OF_ROWS,
    )
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


OF_ROWS = """
from deep_tile import silu_mul_cast_to_fp8
rows = torch.zeros(40, dtype=torch.int32)
offs, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(13, dtype=torch.int32)
gate_up = torch.zeros(130, 528, dtype=torch.float16)
targets = {"out": codes, "scale_out": scale}
few = {"out": codes[:40], "scale_out": scale[:40]}
many = {"out": codes.view(13, 10, 264), "scale_out": scale.view(13, 10, 3)}
"""


@EITHER_WAY
def test_second_cast_of_rows_is_one_call_into_c(run_pretending, setup, path):
    """Calls that differ in nothing but their lists, the index's type, or their numbers, are told apart."""
    shown, launched = run_pretending(
        setup
        + CAST_SETUP
        + OF_ROWS
        + """
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
""",
        of=params.CAST_OF_ROWS,
    )
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
def test_second_sum_of_rows_is_one_call_into_c(run_pretending, setup, path):
    shown, launched = run_pretending(
        setup
        + CAST_SETUP
        + """
from deep_tile import combine, experts
quantize.needs_kernel = lambda *ignored: True
cast.is_loaded = lambda *ignored: True
weights, index, out = torch.zeros(40, 3).t(), torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 264).bfloat16()
for given in ((x, weights, index, out), (x[:, 1:], weights.bfloat16(), index.int(), out[:, 1:])):
    for _ in range(2):
        attempt(combine, *given)
attempt(combine, x, weights, index)
show(x.data_ptr(), weights.data_ptr(), index.data_ptr(), out.data_ptr())
""",
        of=params.COMBINE,
    )
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
def test_second_sort_is_one_call_into_c(run_pretending, setup, path):
    shown, launched = run_pretending(
        setup
        + CAST_SETUP
        + """
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
""",
        of=params.SORT,
    )
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
def test_casts_use_vectors_where_both_are_aligned(run_pretending, change, aligned):
    _, launched = run_pretending(
        CAST_SETUP
        + f"""
out = codes.flatten()
{change}
per_token_cast_to_fp8(x[:100], out=out.as_strided((100, 264), (264, 1)), scale_out=scale[:100])
""",
        of=params.CAST,
    )
    assert [launch.params["aligned"] for launch in launched] == [aligned]
