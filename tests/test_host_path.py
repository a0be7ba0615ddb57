"""The way of a warm call through api.py, without a GPU: what is launched, by which path, and what reaches the checks.

CPU tensors of the real torch pass for GPU tensors, in a process of its own in which fake_driver.c is the driver. That
covers everything on the host but torch's CUDA streams, which test_host_path_gpu.py does.
"""

import re
from pathlib import Path

import pytest
from bad_calls import BAD_CALLS, BadCall
from test_launcher import WHOLE_CUBIN, fake_driver, run_python  # noqa: F401

SETUP = f"""
import ctypes, os, sys
import numpy as np
import torch
if "libcuda.so" in open("/proc/self/maps").read():
    sys.exit("torch has opened the real driver")
ctypes.CDLL(os.environ["FAKE_DRIVER"], mode=ctypes.RTLD_GLOBAL)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from helpers import make_operands
from deep_tile import GemmConfig, _launcher, api, fp8_gemm, plan, prepare

# The facts that need a GPU.
api._needs_kernel = lambda a, b: True
api._check_hopper = api._check_capture = lambda *ignored: None
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
for module, name in ((_launcher, "launch"), (_launcher, "launch_known"), (_launcher, "launch_bound"),
                     (plan, "prepare_launch")):
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


@pytest.fixture
def run_pretending(fake_driver):  # noqa: F811
    """Runs code that knows all of SETUP; the lines that it shows, and those of the kernels launched."""

    def run(code: str) -> tuple[list[str], list[str]]:
        process = run_python(SETUP + code, FAKE_DRIVER=str(fake_driver))
        if "torch has opened the real driver" in process.stderr:
            pytest.skip("this torch opens the real driver when it is imported")
        assert process.returncode == 0, process.stderr
        lines = process.stdout.splitlines()
        shown = [line.removeprefix("=").strip() for line in lines if line.startswith("=")]
        return shown, [line for line in lines if line.startswith("cuLaunchKernelEx")]

    return run


WITHOUT_DLPACK = """
_launcher.launch_known, _launcher.signature, _launcher.bind = lambda *ignored: False, *[lambda *ignored: None] * 2
"""
"""As with a torch that has no DLPack C exchange API."""


def test_second_call_is_one_call_into_c(run_pretending):
    shown, launched = run_pretending("""
for _ in range(3):
    attempt(fp8_gemm, **good)
show(f"a_scale {a_scale.data_ptr():#x} b_scale {b_scale.data_ptr():#x} out {out.data_ptr():#x} strides 2,1 2,1 136 ")
""")
    assert shown[:3] == ["prepare_launch launch", "launch_known", "launch_known"]
    assert len(launched) == 3
    assert all(shown[3] in launch for launch in launched)
    assert ["stream 0x57 " in launch for launch in launched] == [True, False, False], "DLPack knows torch's stream"


def test_second_call_without_dlpack(run_pretending):
    shown, launched = run_pretending(WITHOUT_DLPACK + "for _ in range(3): attempt(fp8_gemm, **good)")
    assert shown == ["prepare_launch launch", "launch", "launch"]
    assert len({launch.partition("maps")[2] for launch in launched}) == 1


def test_parameters_are_tensors(run_pretending):
    """Whether they require a gradient or not; what differs in nothing that the checks read shares a launch."""
    shown, _ = run_pretending("""
attempt(fp8_gemm, **good)
frozen = torch.nn.Parameter(b, requires_grad=False)
trained = torch.nn.Parameter(b_scale)
attempt(fp8_gemm, **good | {"b": frozen, "b_scale": trained})
attempt(fp8_gemm, **good | {"a": a.clone(), "b": b.clone()})
""")
    assert shown == ["prepare_launch launch", "launch_known", "launch_known"]


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


@pytest.mark.parametrize("dlpack", [True, False], ids=["dlpack", "without dlpack"])
def test_bad_calls_launch_nothing(run_pretending, dlpack):
    """Though calls that are right, and like them, are known: of GPU tensors, C would launch those at once."""
    shown, _ = run_pretending(
        ("" if dlpack else WITHOUT_DLPACK)
        + """
from bad_calls import BAD_CALLS, CALLS, Good
given = Good()
for number, bad in enumerate(BAD_CALLS):
    if bad.call in ("fp8_gemm", "prepare", "plan"):
        fp8_gemm(**given.arguments("fp8_gemm"))
        function, arguments = CALLS[bad.call](given), bad.arguments(given)
        show(number)
        attempt(function, **arguments)
"""
    )
    assert len(shown) > 120
    for number, outcome in zip(shown[::2], shown[1::2], strict=True):
        bad = BAD_CALLS[int(number)]
        if not needs_a_gpu(bad, dlpack):
            assert outcome.startswith(bad.error.__name__), (bad.name, outcome)
            assert re.search(bad.seen, outcome) and re.search(bad.remedy, outcome), (bad.name, outcome)
            assert not outcome.endswith(("launch", "launch_known", "launch_bound")), (bad.name, outcome)


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
    options = [tuple(map(int, re.search(r"pdl (\d).*early_b (\d)", launch).groups())) for launch in launched]
    assert options == [(1, 0)] * 7 + [(0, 0)] * 2 + [(1, 0)] * 4 + [(0, 0)] * 2 + [(1, 1)] * 2


def test_constant_weights_are_requested_early_by_one_row_of_tiles(run_pretending):
    _, launched = run_pretending("""
for rows in (5, 64, 300):
    many = torch.zeros(rows, 256).to(a.dtype), torch.ones(rows, 2), b, b_scale
    attempt(fp8_gemm, *many, torch.zeros(rows, 128, dtype=out.dtype), constant_weights=True)
""")
    assert [re.search(r"early_b (\d)", launch)[1] for launch in launched] == ["1", "1", "0"]


@pytest.mark.parametrize(
    ("config", "m", "n", "tails"),
    [
        ("GemmConfig(64, 64, 4)", 64, 128, "0,0"),
        ("GemmConfig(64, 64, 4)", 3, 128, "3,0"),
        ("GemmConfig(64, 64, 4)", 130, 200, "2,8"),
        ("GemmConfig(128, 192, 3, cluster_m=2)", 300, 208, "44,8"),
        ("GemmConfig(128, 192, 3, cluster_n=2)", 297, 576, "24,0"),
        ("GemmConfig(128, 192, 3, cluster_n=2)", 129, 600, "8,24"),
    ],
)
def test_the_last_tile_is_fetched_by_the_rows_that_it_has(run_pretending, config, m, n, tails):
    """Of what two blocks share each fetches half, in eights of rows."""
    _, launched = run_pretending(f"""
out = torch.zeros({m}, {n}, dtype=torch.bfloat16)
fp8_gemm(*make_operands({m}, {n}, 256, seed=1), out, config={config})
""")
    assert [re.search(r"tails (\S+)", launch)[1] for launch in launched] == [tails]


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
api._MAX_SIGNATURES = 2
for m in (1, 2, 2, 3, 3, 2):
    attempt(fp8_gemm, a[:m], a_scale[:m], b, b_scale, out[:m])
show(*(len(launches) for _, launches in api._launches.values()))
""")
    new, known = "prepare_launch launch", "launch_known"
    assert shown == [new, new, known, new, known, new, "2"]


def test_options_are_forgotten_when_there_are_too_many(run_pretending):
    shown, _ = run_pretending("""
api._MAX_OPTIONS = 2
for num_sms in (1, 2, 1):
    attempt(fp8_gemm, **good, num_sms=num_sms)
attempt(fp8_gemm, a[:3], a_scale[:3], b, b_scale, out[:3], num_sms=1)
for num_sms in (2, 3, 3, 1):
    attempt(fp8_gemm, **good, num_sms=num_sms)
show(*(options.num_sms for options in api._launches))
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


def test_whatever_is_plain_shares_a_launch(run_pretending):
    """That a tensor was made in inference mode or requires a gradient is nothing that a kernel could notice."""
    shown, _ = run_pretending("""
attempt(fp8_gemm, **good)
with torch.inference_mode():
    inference = a_scale.clone()
attempt(fp8_gemm, **good | {"a_scale": inference})
attempt(fp8_gemm, **good | {"b_scale": b_scale.clone().requires_grad_()})
""")
    assert shown == ["prepare_launch launch", "launch_known", "launch_known"]


MEMORY = """
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def entries():
    return len(api._launches), sum(len(launches) for _, launches in api._launches.values())
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
    """100,200 of them, with 300 different options: as many as are remembered, and then half as many again."""
    shown, _ = run_pretending(
        MEMORY
        + """
os.environ["FAKE_DRIVER_QUIET"] = "1"
config = GemmConfig(64, 64, 4, tma_store=False)
rows = torch.zeros(334, 16).to(a.dtype), torch.ones(334, 1), torch.zeros(334, 8, dtype=out.dtype)
weights = torch.zeros(8, 16).to(a.dtype), torch.ones(1, 1)
fp8_gemm(rows[0], rows[1], *weights, rows[2], config=config)
before, most = resident_bytes(), 0
for num_sms in range(1, 101):
    for pdl in (None, False, True):
        for m in range(1, 335):
            fp8_gemm(rows[0][:m], rows[1][:m], *weights, rows[2][:m], config=config, num_sms=num_sms, pdl=pdl)
        most = max(most, entries()[1])
        paths.clear()
show(most, resident_bytes() - before)
show(*entries())
"""
    )
    most, grown = map(int, shown[0].split())
    assert 65_000 < most <= 65_536
    assert grown < 200 << 20
    tables, left = map(int, shown[1].split())
    assert tables < 300 and left == 100_200 + 1 - 65_536


# Plans.


@pytest.mark.parametrize(
    ("setup", "path"), [("", "launch_bound"), (WITHOUT_DLPACK, "launch")], ids=["dlpack", "without dlpack"]
)
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
    show(f"a_scale {call[1].data_ptr():#x} b_scale {b_scale.data_ptr():#x} out {call[2].data_ptr():#x} ")
"""
    )
    assert shown[:4] == ["prepare_launch", path, path, "True True True 64"]
    assert re.fullmatch(r"<deep_tile\.Plan m=5 n=128 k=256 fp8_gemm_\S+>", shown[4])
    assert shown[5] == "torch.bfloat16 (5, 128) True"
    assert len(launched) == 4
    assert shown[6] in launched[0] and shown[7] in launched[1]
    assert all("pdl 1" in launch and "early_b 1" in launch for launch in launched[:3])


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
        "ValueError launch: the address of a is 8 modulo 16|ValueError a is .*, not aligned to 16 bytes; this plan"
    ),
    "a, [1.0], out": "TypeError a_scale must be a torch.Tensor; got list",
    "None, a_scale": "TypeError a must be a torch.Tensor; got NoneType",
}


@pytest.mark.parametrize("setup", ["", WITHOUT_DLPACK], ids=["dlpack", "without dlpack"])
def test_plan_takes_the_like_only(run_pretending, setup):
    calls = "\n".join(f"attempt(plan_, {arguments})" for arguments in PLAN_CHANGES)
    shown, launched = run_pretending(setup + "plan_ = prepare(a, a_scale, b, b_scale, out)\n" + calls)
    assert not launched
    for message, line in zip(PLAN_CHANGES.values(), shown, strict=True):
        assert re.match(message, line), line
