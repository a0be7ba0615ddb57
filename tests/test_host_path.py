"""The host path of a warm call, without a GPU: which path it takes, what is launched, and what reaches the checks.

See pretending.py. test_host_path_gpu.py has torch's CUDA streams, test_cast_host_path.py the casts.
"""

import re
from collections.abc import Callable

import pytest
from bad_calls import BAD_CALLS, BadCall
from pretending import EITHER_SETUP, EITHER_WAY, WITHOUT_DLPACK

from deep_tile import params

PRODUCTS_SETUP = """
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


GROUPS_SETUP = """
from deep_tile import fp8_grouped_gemm

b = torch.zeros(3, 130, 272).to(a.dtype)[:, :, :256]
b_scale = torch.ones(3, 2, 2)
offs = torch.tensor([1, 2, 5], dtype=torch.int32)
out = torch.zeros(5, 136, dtype=torch.bfloat16)[:, :130]
listed = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out": out, "num_sms": 132}
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


KNOWN = {
    "fp8_gemm": ("", "fp8_gemm, **good"),
    "gemm": (PRODUCTS_SETUP, "gemm, **plain"),
    "int8_gemm": (PRODUCTS_SETUP, "int8_gemm, **blocks"),
    "scaled_gemm of rows": (PRODUCTS_SETUP, "scaled_gemm, **rows"),
    "scaled_gemm of tensors": (PRODUCTS_SETUP, "scaled_gemm, **one"),
    "scaled_gemm of 1x128": (PRODUCTS_SETUP, "scaled_gemm, **both"),
    "fp8_wgrad": (PRODUCTS_SETUP, "fp8_wgrad, **grads"),
    "fp8_grouped_gemm by offs": (GROUPS_SETUP, "fp8_grouped_gemm, **listed, offs=offs"),
    "fp8_grouped_gemm of a batch": (GROUPS_SETUP, "fp8_grouped_gemm, **own"),
}
"""The setup and the arguments of `attempt` for calls that one launch serves."""


@EITHER_WAY
@pytest.mark.parametrize("call", KNOWN)
def test_calls_are_known_from_the_second_on(run_pretending, setup, path, call):
    """Each is one call into C, with the parameters of the first."""
    own_setup, arguments = KNOWN[call]
    shown, launched = run_pretending(f"{setup}{own_setup}for _ in range(3): attempt({arguments})")
    assert shown == ["prepare_launch launch", path, path]
    assert [launch.params for launch in launched] == [launched[0].params] * 3


def needs_a_gpu(bad: BadCall, dlpack: bool) -> bool:
    """Whether the pretended GPU lets such a call pass."""
    on_meta = "meta" in bad.what and not dlpack  # Python tells GPUs apart by number, and this one has none
    return bad.needs == "gpu" or on_meta or (bad.what == "is in freed storage" and dlpack)


def assert_refused(bad: BadCall, outcome: str, dlpack: bool) -> None:
    """Assert that a call was refused as it must be, and launched nothing."""
    if not needs_a_gpu(bad, dlpack):
        assert outcome.startswith(bad.error.__name__), (bad.name, outcome)
        assert re.search(bad.seen, outcome) and re.search(bad.remedy, outcome), (bad.name, outcome)
        assert not outcome.endswith(("launch", "launch_known")), (bad.name, outcome)


def check_bad_calls(run: Callable, setup: str, calls: tuple[str, ...], of: params.Params = params.GEMM) -> None:
    """Wrong calls launch nothing, though a right call of the same function is known: C would launch what looks like it.

    Args:
        run: `run_pretending`.
        setup: code that runs first, WITHOUT_DLPACK perhaps.
        calls: names of `bad_calls.CALLS`.
        of: the argument of their kernels.
    """
    code = f"""
from bad_calls import BAD_CALLS, CALLS, Good
given = Good()
for number, bad in enumerate(BAD_CALLS):
    if bad.call in {calls}:
        right = "fp8_gemm" if bad.call in ("prepare", "plan") else bad.call
        attempt(CALLS[right](given), **given.arguments(right))
        show(number)
        function, arguments = CALLS[bad.call](given), bad.arguments(given)
        attempt(function, **arguments)
"""
    path = "launch" if WITHOUT_DLPACK in setup else "launch_known"
    shown, _ = run(setup + code, of)
    assert len(shown) == 3 * sum(bad.call in calls for bad in BAD_CALLS)
    for known, number, outcome in zip(shown[::3], shown[1::3], shown[2::3], strict=True):
        bad = BAD_CALLS[int(number)]
        assert known.split()[-1] == path or "prepare" in known, (bad.name, known)
        assert_refused(bad, outcome, path == "launch_known")


PRODUCTS = ("fp8_gemm", "prepare", "plan", "gemm", "int8_gemm", "scaled_gemm")
GROUPS = ("fp8_grouped_gemm", "scaled_grouped_gemm", "fp8_grouped_wgrad")


@EITHER_SETUP
@pytest.mark.parametrize("calls", [PRODUCTS, GROUPS], ids=["products", "groups"])
def test_bad_calls_launch_nothing(run_pretending, setup, calls):
    check_bad_calls(run_pretending, setup, calls)


@pytest.mark.parametrize(
    ("call", "text"), [("gemm", "is for kind='fp8'"), ("fp8_grouped_gemm by offs", "grouping='none'")]
)
def test_configs_of_other_products_launch_nothing(run_pretending, call, text):
    setup, arguments = KNOWN[call]
    code = f"attempt({arguments})\nattempt({arguments}, config=GemmConfig(64, 64, 4))\nattempt({arguments})"
    (first, refused, again), launched = run_pretending(setup + code)
    assert (first, again) == ("prepare_launch launch", "launch_known") and len(launched) == 2
    assert refused.startswith("ValueError fp8_gemm_64x64x128_s4_c1x1") and text in refused


def test_parameters_are_tensors(run_pretending):
    """They may require a gradient or not. Tensors that differ in no property that the checks read share a launch."""
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
        ("GemmConfig(128, 192, 3, cluster_n=4)", 232, 600, (32, 24)),
        ("GemmConfig(128, 192, 3, cluster_m=2, cluster_n=4)", 129, 600, (8, 16)),
    ],
)
def test_the_last_tile_is_fetched_by_the_rows_that_it_has(run_pretending, config, m, n, tails):
    """Blocks that share a box fetch a part of it each, in multiples of 8 rows."""
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
    """The order of the values does not matter."""
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
    code = """
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
    shown, _ = run_pretending(MEMORY + code)
    assert int(shown[0]) < 1 << 20
    assert shown[1] == "1 2"


def test_many_signatures_take_bounded_memory(run_pretending):
    """12,600 signatures with 300 different options: the limit, and half as many again.

    An eighth of what are remembered otherwise; test_host_path_gpu.py has them all.
    """
    code = """
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
    shown, _ = run_pretending(MEMORY + code)
    assert shown[0] == "65536"
    most, grown = map(int, shown[1].split())
    assert 8_100 < most <= 8_192
    assert grown < 25 << 20
    tables, left = map(int, shown[2].split())
    assert tables < 300 and left == 12_600 + 1 - 8_192


# Products without scales or with others, and groups.


def test_products_without_scales(run_pretending):
    shown, [launch] = run_pretending(PRODUCTS_SETUP + "addresses(**plain)\ngemm(**plain)")
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
def test_scales_of_products(run_pretending, call, arguments, strides):
    shown, [launch] = run_pretending(PRODUCTS_SETUP + f"addresses(**{arguments})\n{call}(**{arguments})")
    a, a_scale, b, b_scale, out = map(int, shown[0].split())
    found = launch.params
    assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
    assert [found[name] for name in ("a_scale", "b_scale", "out")] == [a_scale, b_scale, out]
    names = ("a_scale_stride_m", "a_scale_stride_k", "b_scale_stride_n", "b_scale_stride_k")
    assert [found[name] for name in names] == strides


def test_gradients_are_added(run_pretending):
    """Adding and writing are two kernels: neither call takes the launch of the other."""
    code = """
addresses(a=padded[0], b=padded[1], out=y)
attempt(fp8_wgrad, **grads)
attempt(fp8_wgrad, **grads, accumulate=False)
"""
    shown, [added, written] = run_pretending(PRODUCTS_SETUP + code)
    assert shown[1:] == ["prepare_launch launch"] * 2
    a, b, out = map(int, shown[0].split())
    for launch in (added, written):
        assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
        assert launch.params["out"] == out
        assert (launch.params["bulk_scale_rows"], launch.params["bulk_scale_columns"]) == (5, 130)


def test_calls_alike_do_not_take_each_others_launches(run_pretending):
    """With one K block and one column, scales of blocks and of rows look the same."""
    code = """
small = bytes_ | {name: bytes_[name][:, :64] for name in "ab"} | {"a_scale": torch.ones(5, 1)}
small |= {"b": small["b"][:1], "b_scale": torch.ones(1, 1), "out": torch.zeros(5, 1)}
attempt(int8_gemm, **small)
attempt(scaled_gemm, **small)
attempt(int8_gemm, **small)
"""
    shown, launched = run_pretending(PRODUCTS_SETUP + code)
    assert shown == ["prepare_launch launch", "prepare_launch launch", "launch_known"]
    assert [launch.params["a_scale_stride_k"] for launch in launched] == [1, 0, 1]


def test_groups_of_rows_one_after_the_other(run_pretending):
    shown, [launch] = run_pretending(
        GROUPS_SETUP + "addresses(**listed, offs=offs)\nfp8_grouped_gemm(**listed, offs=offs, alignment=128)"
    )
    a, a_scale, b, b_scale, out, offs = map(int, shown[0].split())
    found = launch.params
    assert (launch.map_address("a_maps"), launch.map_address("b_maps")) == (a, b)
    assert [found[name] for name in ("a_scale", "b_scale", "out", "bounds")] == [a_scale, b_scale, out, offs]
    assert [found[name] for name in ("m", "n", "k", "groups", "alignment")] == [5, 130, 256, 3, 128]
    assert (found["b_group_rows"], found["b_scale_group_stride"], found["a_scale_group_stride"]) == (130, 4, 0)
    assert found["b_tail_rows"] in (130 % 128, 130 % 64, 130 % 192)
    assert (found["a_tail_rows"], found["early_b"]) == (64 // 4, 0)  # a quarter of a tile


def test_groups_of_rows_of_their_own(run_pretending):
    code = "counts = torch.ones(3, dtype=torch.int32)\naddresses(**own, counts=counts)\n"
    shown, launched = run_pretending(
        GROUPS_SETUP + code + "fp8_grouped_gemm(**own, counts=counts)\nfp8_grouped_gemm(**own)"
    )
    a, a_scale, b, b_scale, out, counts = map(int, shown[0].split())
    for launch, bounds in zip(launched, (counts, 0), strict=True):
        found = launch.params
        assert [found[name] for name in ("a_scale", "b_scale", "out", "bounds")] == [a_scale, b_scale, out, bounds]
        assert [found[name] for name in ("m", "n", "k", "groups")] == [6, 128, 256, 3]
        assert [found[f"{name}_group_rows"] for name in ("a", "b", "out")] == [7, 130, 9]
        assert [found[f"a_scale_stride_{along}"] for along in "mk"] == [1, 7]
        assert (found["a_scale_group_stride"], found["b_scale_group_stride"]) == (14, 4)


@pytest.mark.parametrize(("option", "pdl"), [("", 0), (", pdl=True", 1)])
def test_groups_launch_programmatically_where_the_caller_says_so(run_pretending, option, pdl):
    """The default is no where SMs are left to others, as they are here."""
    _, [launch] = run_pretending(GROUPS_SETUP + f"fp8_grouped_gemm(**listed, offs=offs{option})")
    assert f"pdl {pdl} " in launch.line


def test_groups_read_constants_early_where_each_has_one_row_of_tiles(run_pretending):
    code = """
early = {"num_sms": None, "pdl": True, "constant_weights": True}
for expected in (1, 8, 200): attempt(fp8_grouped_gemm, **listed | early, offs=offs, expected_rows=expected)
attempt(fp8_grouped_gemm, **own | early, counts=torch.ones(3, dtype=torch.int32))
attempt(fp8_grouped_gemm, **listed | {"constant_weights": True}, offs=offs)
"""
    shown, launched = run_pretending(GROUPS_SETUP + code)
    assert [launch.params["early_b"] for launch in launched] == [1, 1, 0, 1]
    assert shown[-1].startswith("ValueError constant_weights=True is for programmatic launches")


# Plans.


@EITHER_WAY
def test_plan(run_pretending, setup, path):
    """It prepares once, launches nothing by itself, and binds the weights."""
    code = """
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
    shown, launched = run_pretending(setup + code)
    assert shown[:4] == ["prepare_launch", path, path, "True True True 64"]
    assert re.fullmatch(r"<deep_tile\.Plan m=5 n=128 k=256 fp8_gemm_\S+>", shown[4])
    assert shown[5] == "torch.bfloat16 (5, 128) True"
    assert len(launched) == 4
    for line, launch in zip(shown[6:8], launched, strict=False):
        a, a_scale, out, b, b_scale = map(int, line.split())
        assert [launch.map_address(name) for name in ("a_maps", "b_maps", "out_maps")] == [a, b, out]
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
    """An unaligned scale has another signature."""
    code = "for scale in (aligned, moved, aligned, moved, a_scale): fp8_gemm(a, scale, b, b_scale, out)"
    shown, launched = run_pretending(setup + SCALES + code)
    assert shown == ["0 4 True"]
    assert [launch.params["bulk_scale_rows"] for launch in launched] == [5, 0, 5, 0, 0]


@EITHER_SETUP
@pytest.mark.parametrize(("example", "rows"), [("aligned", [5, 0, 5, 0]), ("moved", [0] * 4)])
def test_plan_takes_scales_that_begin_anywhere(run_pretending, setup, example, rows):
    code = f"""
plan_ = prepare(a, {example}, b, b_scale, out, num_sms=7)
for scale in (aligned, moved, aligned, moved):
    plan_(a, scale, out)
show(*(scale.data_ptr() for scale in (aligned, moved)))
"""
    shown, launched = run_pretending(setup + SCALES + code)
    assert [launch.params["bulk_scale_rows"] for launch in launched] == rows
    assert [launch.params["a_scale"] for launch in launched] == [int(x) for x in shown[1].split()] * 2
    assert len({launch.line.partition("params")[0].partition("stream")[0] for launch in launched}) == 1
