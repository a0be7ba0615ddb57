"""The public calls without a GPU: values on the CPU path, every refusal, and what importing must not do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import SCALE_STRIDES, GuardedOut, Operands, check_gemm, make_operands

import deep_tile
from deep_tile import GemmConfig, api, fp8_gemm, is_available, jit, precompile, prepare, settings, supports
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose, configs_for

ROOT = Path(__file__).parent.parent
FP8 = torch.float8_e4m3fn


# Values.


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (5, 130, 300), (64, 256, 128), (129, 127, 129), (300, 40, 1000), (17, 384, 16)],
)
def test_values(m, n, k):
    check_gemm(make_operands(m, n, k), out_stride=n + 3, out_offset=1)


@pytest.mark.parametrize("a_scale", SCALE_STRIDES)
@pytest.mark.parametrize("b_scale", SCALE_STRIDES)
def test_every_scale_layout(a_scale, b_scale):
    check_gemm(make_operands(7, 140, 260, a_scale=a_scale, b_scale=b_scale, a_padding=32, b_padding=16))


def test_out_is_allocated_when_none():
    operands = make_operands(5, 20, 64)
    out = fp8_gemm(*operands)
    assert (out.dtype, out.shape, out.is_contiguous()) == (torch.bfloat16, (5, 20), True)
    assert torch.equal(out, check_gemm(operands))


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
def test_nothing_to_do(m, n):
    operands = make_operands(m, n, 64)
    assert fp8_gemm(*operands).shape == (m, n)
    guarded = GuardedOut(m, n)
    assert fp8_gemm(*operands, guarded.out) is guarded.out
    guarded.assert_untouched()


def test_empty_sum_is_zero():
    guarded = GuardedOut(3, 5, stride=8)
    fp8_gemm(*make_operands(3, 5, 0), guarded.out)
    assert (guarded.out == 0).all()
    guarded.assert_guards_intact()


def test_broadcast_scales():
    operands = make_operands(6, 200, 256)
    ones = operands._replace(a_scale=torch.ones(()).expand(6, 2), b_scale=torch.ones(()).expand(2, 2))
    check_gemm(ones)


# Refusals. Each case changes one argument of a call that is right: m = 5, n = 130, k = 300.

GOOD = make_operands(5, 130, 300, seed=1)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, one byte past a multiple of 16."""
    rows, stride = x.shape[0], x.stride(0)
    buffer = torch.zeros(rows * stride + 64, dtype=torch.uint8).view(x.dtype)
    return buffer.as_strided(x.shape, x.stride(), 1 - buffer.data_ptr() % 16).copy_(x)


def with_row_stride(x: torch.Tensor, stride: int) -> torch.Tensor:
    return (
        torch.zeros(x.shape[0] * stride + x.shape[1], dtype=torch.uint8).view(x.dtype).as_strided(x.shape, (stride, 1))
    )


def out_with_strides(*strides: int) -> torch.Tensor:
    return torch.zeros(130 * 130, dtype=torch.bfloat16).as_strided((5, 130), strides)


TYPE_ERRORS = [
    ({"a": [[1.0]]}, "a must be a torch.Tensor; got list"),
    ({"a_scale": None}, "a_scale must be a torch.Tensor; got NoneType"),
    ({"b": 3}, "b must be a torch.Tensor; got int"),
    ({"b_scale": (1.0,)}, "b_scale must be a torch.Tensor; got tuple"),
    ({"out": "out"}, "out must be a torch.Tensor; got str"),
    ({"a": GOOD.a.float()}, "a must be torch.float8_e4m3fn; got torch.float32.*per_token_cast_to_fp8"),
    ({"a": GOOD.a.view(torch.uint8)}, "a must be torch.float8_e4m3fn; got torch.uint8"),
    ({"a": GOOD.a.view(torch.float8_e5m2)}, "a must be torch.float8_e4m3fn; got torch.float8_e5m2"),
    ({"b": GOOD.b.to(torch.bfloat16)}, "b must be torch.float8_e4m3fn; got torch.bfloat16.*per_block_cast_to_fp8"),
    ({"a_scale": GOOD.a_scale.double()}, r"a_scale must be torch.float32; got torch.float64.*\.float\(\)"),
    ({"b_scale": GOOD.b_scale.half()}, r"b_scale must be torch.float32; got torch.float16.*\.float\(\)"),
    ({"out": torch.zeros(5, 130)}, "out must be torch.bfloat16; got torch.float32.*out=None"),
    ({"out_dtype": torch.float16}, r"out_dtype must be torch.bfloat16; got torch.float16.*\.to\(torch.float16\)"),
    ({"out_dtype": "bfloat16"}, "out_dtype must be torch.bfloat16; got bfloat16"),
]

VALUE_ERRORS = [
    # Devices.
    ({"b": GOOD.b.to("meta")}, r"b is on meta but a is on cpu.*\.to\(a.device\)"),
    ({"a_scale": GOOD.a_scale.to("meta")}, "a_scale is on meta but a is on cpu"),
    ({"b_scale": GOOD.b_scale.to("meta")}, "b_scale is on meta but a is on cpu"),
    ({"out": torch.zeros(5, 130, dtype=torch.bfloat16, device="meta")}, "out is on meta but a is on cpu"),
    (dict(zip(Operands._fields, (x.to("meta") for x in GOOD), strict=True)), "a is on meta.*Hopper GPU"),
    # Ranks and sizes.
    ({"a": GOOD.a[None]}, r"a must have shape \[m, k\]; got \(1, 5, 300\). Flatten"),
    ({"a": GOOD.a[0]}, r"a must have shape \[m, k\]; got \(300,\)"),
    ({"b": GOOD.b[0]}, r"b must have shape \[n, k\]; got \(300,\)"),
    ({"b": GOOD.b[:, :256]}, r"a is \[m, k\] = \(5, 300\) and b is \[n, k\] = \(130, 256\): k differs"),
    ({"b": GOOD.b.t()}, r"\(300, 130\): k differs.*must be transposed"),
    ({"a_scale": GOOD.a_scale[:, :2]}, r"a_scale must have shape \[m, ceil\(k / 128\)\] = \(5, 3\); got \(5, 2\)$"),
    ({"a_scale": GOOD.a_scale[:1]}, r"a_scale .* = \(5, 3\); got \(1, 3\)$"),
    ({"a_scale": GOOD.a_scale.flatten()}, r"a_scale .* = \(5, 3\); got \(15,\)"),
    ({"a_scale": GOOD.a_scale.t()}, r"a_scale .* got \(3, 5\).*looks transposed: pass a_scale.t\(\)"),
    ({"b_scale": GOOD.b_scale.t()}, r"b_scale .* = \(2, 3\); got \(3, 2\).*looks transposed: pass b_scale.t\(\)"),
    ({"b_scale": torch.ones(130, 3)}, r"b_scale must have shape \[ceil\(n / 128\), ceil\(k / 128\)\] = \(2, 3\)"),
    ({"out": torch.zeros(5, 131, dtype=torch.bfloat16)}, r"out must have shape \[m, n\] = \(5, 130\); got \(5, 131\)"),
    ({"out": torch.zeros(130, 5, dtype=torch.bfloat16)}, r"got \(130, 5\).*looks transposed"),
    # Strides and addresses.
    ({"a": GOOD.a.t().contiguous().t()}, r"a must have a unit stride along k.*\(1, 5\).*a\.contiguous\(\)"),
    ({"b": GOOD.b.t().contiguous().t()}, r"b must have a unit stride along k.*b\.contiguous\(\)"),
    ({"a": GOOD.a.contiguous()}, r"a's row stride must be a multiple of 16 bytes; it is 300.*\[rows, 304\].*first 300"),
    ({"b": with_row_stride(GOOD.b, 312)}, r"b's row stride .* it is 312.*\[rows, 320\]"),
    ({"a": with_row_stride(GOOD.a, 288)}, "rows of a overlap: the row stride is 288 for k = 300"),
    ({"b": GOOD.b[:1].expand(130, 300)}, "rows of b overlap: the row stride is 0"),
    ({"a": misaligned(GOOD.a)}, "a must begin at a multiple of 16 bytes; its address is 1 bytes past one.*a.clone"),
    ({"b": misaligned(GOOD.b)}, "b must begin at a multiple of 16 bytes; its address is 1 bytes past one"),
    ({"out": out_with_strides(1, 5)}, r"out must have a unit stride along n; its strides are \(1, 5\)"),
    ({"out": out_with_strides(260, 2)}, r"out must have a unit stride along n; its strides are \(260, 2\)"),
    ({"out": out_with_strides(129, 1)}, "rows of out overlap: its row stride is 129 for 130 columns"),
    ({"out": out_with_strides(0, 1)}, "rows of out overlap: its row stride is 0"),
]


def assert_refused(error, message, arguments):
    guarded = GuardedOut(5, 130)
    with pytest.raises(error, match=message):
        fp8_gemm(**{**GOOD._asdict(), "out": guarded.out, **arguments})
    guarded.assert_untouched()


def test_the_call_that_the_refusals_change_is_right():
    check_gemm(GOOD)


@pytest.mark.parametrize(("arguments", "message"), TYPE_ERRORS, ids=[message[:45] for _, message in TYPE_ERRORS])
def test_wrong_type(arguments, message):
    assert_refused(TypeError, message, arguments)


@pytest.mark.parametrize(("arguments", "message"), VALUE_ERRORS, ids=[message[:45] for _, message in VALUE_ERRORS])
def test_wrong_value(arguments, message):
    assert_refused(ValueError, message, arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": GOOD.a[0]}, ValueError, r"got shapes \(300,\) and \(130, 300\)"),
        ({"b": GOOD.b[None]}, ValueError, r"\(1, 130, 300\)"),
        ({"b": [1.0]}, TypeError, "b must be a torch.Tensor; got list"),
        ({"out_dtype": torch.float32}, TypeError, "out_dtype must be torch.bfloat16; got torch.float32"),
        ({"out_dtype": "bfloat16"}, TypeError, "out_dtype must be torch.bfloat16; got bfloat16"),
    ],
)
def test_wrong_arguments_without_out(arguments, error, message):
    with pytest.raises(error, match=message):
        fp8_gemm(**{**GOOD._asdict(), **arguments})


def test_square_scales_are_taken_as_they_are():
    """Where a transposed scale has the same shape, nothing is guessed: rows are rows."""
    operands = make_operands(2, 256, 256)
    check_gemm(operands)
    transposed = operands._replace(a_scale=operands.a_scale.t(), b_scale=operands.b_scale.t())
    check_gemm(transposed)
    assert not torch.equal(fp8_gemm(*operands), fp8_gemm(*transposed))


@pytest.mark.parametrize("config", ["fp8_gemm_128x128x128_s4_c1x1", (128, 128, 4), [128]])
def test_wrong_config_type(config):
    assert_refused(
        TypeError, "config must be a deep_tile.GemmConfig or None; got " + type(config).__name__, {"config": config}
    )


@pytest.mark.parametrize("num_sms", [0, -1, 133, 1.5, "all", [1]])
def test_wrong_num_sms(num_sms, monkeypatch):
    monkeypatch.setattr(api, "_num_sms", lambda device: 132)  # the only fact that needs a GPU
    with pytest.raises(ValueError, match="num_sms must be an int from 1 to 132"):
        api._checked_num_sms(num_sms, torch.device("cuda", 0))


def test_config_must_suit_the_problem():
    any_store, two_blocks = GemmConfig(64, 64, 4, tma_store=False), GemmConfig(128, 64, 4, 2, 1)
    unaligned = GemmProblem(64, 64, 64, num_sms=132, tma_store=False)
    with pytest.raises(
        ValueError, match="stores with TMA, but out's address, row length or row stride.*tma_store=False"
    ):
        api._checked_config(GemmConfig(64, 64, 4), unaligned)
    with pytest.raises(ValueError, match="needs 2 SMs; num_sms is 1"):
        api._checked_config(two_blocks, GemmProblem(64, 64, 64, num_sms=1))
    resident = GemmConfig(64, 64, 4, b_stages=2)
    for k in (128, 257):
        with pytest.raises(ValueError, match=f"in shared memory, for k from 129 to 256; k is {k}.*b_stages=0"):
            api._checked_config(resident, GemmProblem(64, 64, k))
    assert api._checked_config(resident, GemmProblem(64, 64, 256)) is resident
    split = GemmConfig(128, 64, 4, split_k=2)
    with pytest.raises(ValueError, match="splits K.*batch_invariant=True needs split_k=1"):
        api._checked_config(split, GemmProblem(64, 64, 64, split_k=False))
    assert api._checked_config(split, GemmProblem(64, 64, 64)) is split
    assert api._checked_config(any_store, unaligned) is any_store
    assert api._checked_config(two_blocks, GemmProblem(64, 64, 64, num_sms=2)) is two_blocks


def test_options_change_no_value():
    """On the CPU they are checked and otherwise without effect."""
    operands = make_operands(5, 130, 300, seed=1)
    check_gemm(operands, batch_invariant=True, pdl=False)
    check_gemm(operands, constant_weights=True)


def test_constant_weights_need_pdl():
    assert_refused(
        ValueError,
        "constant_weights=True is for programmatic launches.*got pdl=False, num_sms=None: pass pdl=True",
        {"pdl": False, "constant_weights": True},
    )
    assert_refused(ValueError, "got pdl=None, num_sms=7: pass pdl=True", {"num_sms": 7, "constant_weights": True})


# Plans. What a call of one launches is in test_host_path.py.


@pytest.mark.parametrize(("m", "n", "k"), [(5, 130, 300), (3, 5, 0), (0, 8, 64)])
def test_plan_multiplies(m, n, k):
    first, second = (make_operands(m, n, k, seed=seed) for seed in (1, 2))
    plan = prepare(*first)
    assert (plan.config, plan.b is first.b, plan.b_scale is first.b_scale) == (None, True, True)
    guarded = GuardedOut(m, n)
    assert plan(second.a, second.a_scale, guarded.out) is guarded.out
    assert torch.equal(guarded.out, fp8_gemm(second.a, second.a_scale, first.b, first.b_scale))
    assert torch.equal(plan(first.a, first.a_scale), fp8_gemm(*first))
    assert repr(plan) == f"<deep_tile.Plan m={m} n={n} k={k} no kernel>"


def test_plan_sees_weights_written_in_place():
    operands = make_operands(5, 130, 300, seed=1)
    plan = prepare(*operands)
    operands.b.copy_(make_operands(5, 130, 300, seed=2).b)
    assert torch.equal(plan(operands.a, operands.a_scale), fp8_gemm(*operands))


def test_plan_refuses_what_is_unlike_its_example():
    plan, guarded = prepare(*GOOD), GuardedOut(5, 130)
    for a, a_scale, message in [
        (GOOD.a[:4], GOOD.a_scale, r"a is .*\[4, 300\].*; this plan is for .*\[5, 300\].*prepare another plan"),
        (GOOD.a, GOOD.a_scale.double(), "a_scale is torch.float64 .*; this plan is for torch.float32"),
        (misaligned(GOOD.a), GOOD.a_scale, "a is .*, not aligned to 16 bytes; this plan"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan(a, a_scale, guarded.out)
    with pytest.raises(TypeError, match="a_scale must be a torch.Tensor; got NoneType"):
        plan(GOOD.a, None, guarded.out)
    guarded.assert_untouched()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": GOOD.a.float()}, TypeError, "a must be torch.float8_e4m3fn"),
        ({"b": [1.0]}, TypeError, "b must be a torch.Tensor; got list"),
        ({"a_scale": GOOD.a_scale.t()}, ValueError, "looks transposed"),
        ({"config": [128]}, TypeError, "config must be a deep_tile.GemmConfig or None"),
        ({"num_sms": 0}, ValueError, "num_sms must be an int"),
        ({"pdl": False, "constant_weights": True}, ValueError, "constant_weights=True is for programmatic launches"),
    ],
)
def test_prepare_checks_as_a_call_does(arguments, error, message):
    with pytest.raises(error, match=message):
        prepare(**{**GOOD._asdict(), **arguments})


# supports, is_available, precompile.


@pytest.mark.parametrize(
    ("sizes", "keywords", "reason"),
    [
        ((1, 1, 1), {}, None),
        ((4096, 7168, 2048), {}, None),
        ((0, 5, 0), {}, None),
        ((2**31 - 1024, 16, 128), {}, None),
        ((1, 1, 100), {}, None),
        ((5, 1, 100), {"a_stride": 112}, None),
        ((5, 7, 100), {"a_stride": 112, "b_stride": 112}, None),
        ((-1, 5, 16), {}, "m is -1"),
        ((5, 2**31, 16), {}, "n is 2147483648"),
        ((5, 5, 2**31), {}, "k is 2147483648"),
        ((1, 1, 2**31 - 1), {}, "k is 2147483647"),  # rounded up to whole blocks it is no int of the kernel
        ((5, 5, 100), {}, "a's row stride must be a multiple of 16 bytes; it is 100"),
        ((1, 5, 100), {}, "b's row stride must be a multiple of 16 bytes; it is 100"),
        ((5, 7, 100), {"a_stride": 112}, "b's row stride"),
        ((5, 7, 128), {"a_stride": 112}, "rows of a overlap"),
        ((5, 7, 128), {"dtype": torch.float8_e5m2}, "operands are torch.float8_e5m2"),
        ((5, 7, 128), {"out_dtype": torch.float16}, "out is torch.float16"),
    ],
)
def test_supports(sizes, keywords, reason):
    supported, text = supports(*sizes, **keywords)
    assert supported == (reason is None)
    assert text.startswith(reason or "supported")


def test_supports_and_fp8_gemm_agree_on_k():
    for k in (*range(1, 40), 128, 200, 256):
        a, b = (torch.zeros(2, k, dtype=torch.uint8).view(FP8) for _ in range(2))
        scales = torch.ones(2, -(-k // 128)), torch.ones(1, -(-k // 128))
        try:
            fp8_gemm(a, scales[0], b, scales[1])
            taken = True
        except ValueError:
            taken = False
        assert supports(2, 2, k)[0] == taken, k


def test_is_available_answers():
    available, reason = is_available()
    assert isinstance(available, bool) and reason


def test_is_available_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert is_available() == (False, "torch sees no CUDA device; CPU tensors still work, through deep_tile.reference")


def test_is_available_never_raises(monkeypatch):
    def broken():
        raise OSError("the driver fell over")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert is_available() == (False, "OSError: the driver fell over")


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    available, reason = is_available()
    assert not available
    assert "cuda:0 is NVIDIA A100, compute capability 8.0; deep_tile's kernels need a Hopper GPU" in reason


@pytest.fixture
def no_gpu_and_no_kernels(monkeypatch, tmp_path):
    """A machine without GPU whose cache is empty; the process has loaded nothing."""

    def forget():
        settings.cache_dir.cache_clear()
        jit._open_cache.cache_clear()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(tmp_path / "kernels"))
    forget()
    yield
    forget()


def needed_configs(n: int, k: int, max_m: int) -> set[GemmConfig]:
    """What fp8_gemm chooses for a dense `out`: TMA stores to aligned rows, and to a single row."""
    return {choose(GemmProblem(m, n, k, 132, tma_store=n % 8 == 0)) for m in range(1, max_m + 1)}


@pytest.mark.parametrize("shape", [(576, 7168, 300), (2112, 512, 4096), (100, 640, 9)])
def test_precompile_compiles_what_can_be_needed_and_only_once(shape, no_gpu_and_no_kernels):
    result = precompile([shape], workers=2)
    assert set(result.configs) == needed_configs(*shape)
    assert result.compiled == len(result.configs) == jit.cache_info().entries
    assert precompile([shape]) == (result.configs, 0)


def test_precompile_of_several_shapes_is_their_union(no_gpu_and_no_kernels):
    shapes = [(576, 512, 300), (2112, 512, 300), (576, 512, 100)]
    result = precompile(shapes)
    assert set(result.configs) == set().union(*(needed_configs(*shape) for shape in shapes))
    assert result.compiled == len(result.configs) > 1


def test_precompile_heeds_num_sms(no_gpu_and_no_kernels):
    result = precompile([(576, 7168, 128)], num_sms=1)
    assert all(config.cluster == 1 for config in result.configs)
    assert set(result.configs) == set(configs_for(576, 7168, 128, 1))


def test_precompile_batch_invariant(no_gpu_and_no_kernels):
    """Without split K, which these shapes are given otherwise, and for the selector's every choice."""
    shape = (576, 7168, 128)
    assert any(config.split_k > 1 for config in configs_for(*shape, 132))
    result = precompile([shape], batch_invariant=True)
    assert all(config.split_k == 1 for config in result.configs)
    chosen = {choose(GemmProblem(m, 576, 7168, 132, split_k=False)) for m in range(1, 129)}
    assert chosen == set(result.configs)


def test_precompile_takes_padded_rows(no_gpu_and_no_kernels):
    """k = 100 is fine for fp8_gemm when the rows are 112 bytes apart."""
    assert precompile([(128, 100, 8)]).compiled == 1


@pytest.mark.parametrize("shape", [(0, 128, 8), (128, 0, 8), (128, 128, 0), (128, 128, -1), (2**31, 128, 8)])
def test_precompile_refuses(shape):
    with pytest.raises(ValueError, match=r"shape \(n=.*max_m="):
        precompile([shape])


# What importing must not do.


def run_python(program: str, **environment: str) -> str:
    """Output of a program in a process of its own; its failure is the test's."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_leaves_cuda_the_compiler_and_the_cache_alone(tmp_path):
    program = """
import sys
import torch
before = set(sys.modules)
import deep_tile.api
assert not torch.cuda.is_initialized()
assert not {name for name in set(sys.modules) - before if name.startswith("cuda")}, "a compiler was imported"
assert deep_tile.jit.compile_count() == 0
"""
    run_python(program, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), DEEP_TILE_CACHE_DIR=str(tmp_path / "kernels"))
    assert not list(tmp_path.iterdir())


def test_import_reads_no_environment_variable():
    """Nonsense is reported when it is needed, not at import."""
    run_python("import deep_tile", DEEP_TILE_CACHE_DIR="not/absolute", DEEP_TILE_CACHE_MAX_MB="many")


def test_import_survives_fork():
    program = """
import os
import torch
import deep_tile
from deep_tile.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
torch.set_num_threads(1)  # threads of a pool do not survive a fork, in torch's own doing
child = os.fork()
a, b = per_token_cast_to_fp8(torch.ones(3, 128)), per_block_cast_to_fp8(torch.ones(5, 128))
assert (deep_tile.fp8_gemm(*a, *b) == 128).all()
deep_tile.is_available()
assert deep_tile.precompile([(64, 128, 1)]).configs
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_python(program)


def test_public_names():
    assert sorted(deep_tile.__all__) == sorted(set(deep_tile.__all__))
    assert all(hasattr(deep_tile, name) for name in deep_tile.__all__)
    for name in ("fp8_gemm", "is_available", "precompile", "prepare", "supports", "GemmConfig", "Plan"):
        assert name in deep_tile.__all__
