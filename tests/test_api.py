"""The public calls without a GPU: values on the CPU, `supports`, `precompile`, and the cost of an import.

What they refuse is in test_bad_calls.py.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SCALE_STRIDES, GuardedOut, check_gemm, make_operands, run_python

import deep_tile
from deep_tile import (
    GemmConfig,
    checks,
    fp8_gemm,
    is_available,
    jit,
    launches,
    precompile,
    prepare,
    progress,
    supports,
    tensors,
)
from deep_tile.dense import FP8_GEMM, Options
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("names", [("a_scale",), ("b_scale",), ("a_scale", "b_scale")], ids="-".join)
@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
def test_narrow_scales(names, dtype, device):
    """Each call is made twice: the second finds what the first prepared."""
    operands = make_operands(7, 200, 384, device=device, a_scale="column")
    narrow = {name: getattr(operands, name).to(dtype) for name in names}
    wide = operands._replace(**{name: scale.float() for name, scale in narrow.items()})
    for _ in range(2):
        assert torch.equal(fp8_gemm(*operands._replace(**narrow)), fp8_gemm(*wide))
    with pytest.raises(TypeError, match=rf"{names[0]} of a plan must be torch.float32; got .*pass {names[0]}.float"):
        prepare(*operands._replace(**narrow))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 64), (8, 0, 64), (0, 0, 64), (3, 5, 0)])
def test_nothing_to_do(m, n, k):
    """A sum of nothing is 0."""
    operands = make_operands(m, n, k)
    assert fp8_gemm(*operands).shape == (m, n)
    guarded = GuardedOut(m, n, stride=n + 3)
    assert fp8_gemm(*operands, guarded.out) is guarded.out and (guarded.out == 0).all()
    guarded.assert_guards_intact()


def test_square_scales_are_taken_as_they_are():
    """A square scale has the shape of its transpose: nothing is guessed, rows are rows."""
    operands = make_operands(2, 256, 256)
    check_gemm(operands)
    transposed = operands._replace(a_scale=operands.a_scale.t(), b_scale=operands.b_scale.t())
    check_gemm(transposed)
    assert not torch.equal(fp8_gemm(*operands), fp8_gemm(*transposed))


@pytest.mark.parametrize("num_sms", [0, -1, 133])
def test_wrong_num_sms(num_sms, monkeypatch):
    monkeypatch.setattr(launches, "num_sms", lambda device: 132)  # the only fact that needs a GPU
    with pytest.raises(ValueError, match=f"num_sms is {num_sms}; pass an int from 1 to 132, the SMs of cuda:0"):
        checks.checked_num_sms(num_sms, torch.device("cuda", 0))


def test_config_must_suit_the_problem():
    any_store, two_blocks = GemmConfig(64, 64, 4, tma_store=False), GemmConfig(128, 64, 4, 2, 1)
    unaligned = GemmProblem(64, 64, 64, num_sms=132, tma_store=False)
    with pytest.raises(
        ValueError, match="stores with TMA, but out's address, row length or row stride.*tma_store=False"
    ):
        checks.checked_config(GemmConfig(64, 64, 4), unaligned)
    with pytest.raises(ValueError, match="needs 2 SMs; num_sms is 1"):
        checks.checked_config(two_blocks, GemmProblem(64, 64, 64, num_sms=1))
    resident = GemmConfig(64, 64, 4, b_stages=2)
    for k in (128, 257):
        with pytest.raises(ValueError, match=f"in shared memory, for k from 129 to 256; k is {k}.*b_stages=0"):
            checks.checked_config(resident, GemmProblem(64, 64, k))
    assert checks.checked_config(resident, GemmProblem(64, 64, 256)) is resident
    split = GemmConfig(128, 64, 4, split_k=2)
    with pytest.raises(ValueError, match="splits K.*batch_invariant=True needs split_k=1"):
        checks.checked_config(split, GemmProblem(64, 64, 64, split_k=False))
    assert checks.checked_config(split, GemmProblem(64, 64, 64)) is split
    assert checks.checked_config(any_store, unaligned) is any_store
    assert checks.checked_config(two_blocks, GemmProblem(64, 64, 64, num_sms=2)) is two_blocks


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


# supports, is_available, precompile.


@pytest.mark.parametrize(
    ("sizes", "keywords", "reason"),
    [
        ((1, 1, 1), {}, None),
        ((4096, 7168, 2048), {}, None),
        ((0, 5, 0), {}, None),
        ((2**30, 16, 128), {}, None),
        ((16, 2**31 - 1024, 128), {}, None),
        ((1, 1, 100), {}, None),
        ((5, 1, 100), {"a_stride": 112}, None),
        ((5, 7, 100), {"a_stride": 112, "b_stride": 112}, None),
        ((-1, 5, 16), {}, "m is -1"),
        ((5, 2**31, 16), {}, "n is 2147483648"),
        ((5, 5, 2**31), {}, "k is 2147483648"),
        ((1, 1, 2**31 - 1), {}, "k is 2147483647"),  # rounded up to whole blocks it is no int of the kernel
        ((2**30 + 200, 8, 16), {}, "a_scale's last element lies 1073742023 after its first; kernels reach 1073741823"),
        ((2**29 + 1, 8, 256), {}, "a_scale's last element"),
        ((8, 2**30, 2**30), {}, "b_scale's last element"),
        ((1.5, 8, 16), {}, "m is 1.5; sizes are ints"),
        ((8, None, 16), {}, "n is None; sizes are ints"),
        ((8, 8, True), {}, "k is True; sizes are ints"),
        ((8, 8, 16), {"b_stride": "16"}, "b_stride is '16'; strides are ints"),
        ((5, 5, 100), {}, "a's row stride must be a multiple of 16 bytes; it is 100"),
        ((1, 5, 100), {}, "b's row stride must be a multiple of 16 bytes; it is 100"),
        ((5, 7, 100), {"a_stride": 112}, "b's row stride"),
        ((5, 7, 128), {"a_stride": 112}, "rows of a overlap"),
        ((5, 7, 128), {"dtype": torch.float64}, "operands are torch.float64"),
        ((5, 7, 128), {"dtype": torch.float8_e5m2}, None),
        ((5, 7, 128), {"dtype": "fp8_rows"}, None),
        ((5, 7, 128), {"dtype": "bfloat16", "layout": "nt"}, None),
        ((5, 16, 100), {"dtype": "fp8", "call": "fp8_linear"}, "a's row stride"),
        ((5, 16, 100), {"dtype": "bf16", "call": "fp8_linear"}, None),
        ((5, 7, 128), {"dtype": "fp8_rows", "call": "fp8_gemm"}, "operands are fp8_rows; fp8_gemm takes"),
        ((5, 7, 128), {"dtype": ["fp8"]}, "operands are ['fp8']; supported is"),
        ((5, 7, 128), {"out_dtype": torch.float64}, "out is torch.float64"),
        ((5, 7, 128), {"b_stride": -1}, "b_stride is -1"),
        ((99, 7, 128), {"grouping": "offs", "groups": 3}, None),
        ((99, 7, 128), {"grouping": "offs", "groups": 3, "dtype": torch.int8}, None),
        ((99, 7, 128), {"grouping": "counts", "groups": 3, "dtype": torch.float8_e5m2}, None),
        ((99, 8, 128), {"grouping": "counts", "groups": 3, "dtype": torch.bfloat16, "layout": "nn"}, None),
        ((99, 8, 72), {"grouping": "offs", "groups": 3, "dtype": torch.bfloat16, "layout": "nn"}, "b lies along n"),
        ((96, 8, 72), {"grouping": "offs", "groups": 3, "dtype": torch.bfloat16, "layout": "tn"}, "a must have a unit"),
        ((96, 8, 100), {"grouping": "counts", "groups": 3}, "a's row stride must be a multiple of 16 bytes"),
        ((96, 8, 128), {"grouping": "offs", "groups": 0}, r"b is [0, 8, 128]; groups and k must be positive"),
        ((9, 2**30, 16), {"grouping": "offs", "groups": 2**10}, "b's groups lie"),
        ((2**31 - 2048,) * 3, {"grouping": "counts", "groups": 2**31 - 2048}, "numel: integer multiplication overflow"),
        ((256, 7, 5), {"grouping": "k_offs", "groups": 3}, None),
        ((250, 7, 5), {"grouping": "k_offs", "groups": 3}, "dy's row stride must be a multiple of 16 bytes"),
        ((256, 7, 5), {"grouping": "k_offs", "groups": 3, "out_dtype": torch.float16}, "out is torch.float16"),
        ((256, 7, 5), {"grouping": "k_offs", "dtype": torch.bfloat16}, "operands are torch.bfloat16"),
        ((256, 7, 5), {"grouping": "rows"}, "grouping is 'rows'"),
        ((5, 16, 128), {"call": "fp8_gemm_cast"}, None),
        ((5, 16, 100), {"call": "fp8_gemm_cast"}, "a's row stride must be a multiple of 16 bytes"),
        ((5, 16, 128), {"call": "fp8_gemm_cast", "out_dtype": torch.bfloat16}, "out is torch.bfloat16; supported is"),
        ((5, 16, 128), {"call": "fp8_gemm_cast", "dtype": torch.int8}, "operands are torch.int8; fp8_gemm_cast takes"),
        ((5, 16, 100), {"call": "fp8_linear", "dtype": torch.bfloat16, "out_dtype": torch.float32}, None),
        ((5, 16, 100), {"call": "fp8_linear", "dtype": torch.bfloat16, "b_stride": 100}, "b's row stride"),
        ((5, 16, 100), {"call": "fp8_linear"}, "a's row stride"),
        ((5, 16, 128), {"call": "fp8_linear"}, None),
        ((5, 16, 128), {"call": "fp8_linear", "dtype": torch.int8}, "operands are torch.int8; fp8_linear takes"),
        ((2**30, 16, 256), {"call": "fp8_linear", "dtype": torch.float16}, "a_scale's last element"),
        ((64, 7, 5), {"call": "fp8_wgrad", "dtype": torch.float8_e5m2, "out_dtype": torch.float16}, None),
        ((60, 7, 5), {"call": "fp8_wgrad"}, "dy's row stride must be a multiple of 16 bytes"),
        ((5, 7, 128), {"call": "scaled_gemm", "dtype": torch.int8}, None),
        ((96, 7, 128), {"call": "scaled_grouped_gemm", "grouping": "counts", "groups": 2}, None),
        ((5, 7, 128), {"call": "grouped_gemm"},
         "call is 'grouped_gemm'; with grouping 'none' pass one of fp8_gemm, gemm"),
        ((5, 7, 128), {"call": "combine"}, "call is 'combine'"),
        ((5, 7, 128), {"call": ["gemm"]}, "call is ['gemm']"),
        ((5, 7, 128), {"call": "fp8_linear", "dtype": []}, "operands are []; supported is"),
        ((5, 32, 128), {"call": "packed_gemm"}, "operands are torch.float8_e4m3fn; packed_gemm takes mxfp4 or"),
        ((5, 32, 112), {"dtype": "mxfp4"}, None),
        ((5, 32, 112), {"dtype": "nvfp4", "grouping": "offs", "groups": 3}, None),
        ((5, 32, 112), {"dtype": "int4", "grouping": "counts", "groups": 3, "out_dtype": torch.float32}, None),
        ((5, 32, 112), {"dtype": "int4", "call": "packed_gemm"}, None),
        ((5, 32, 112), {"dtype": "int4_32"}, None),
        ((5, 32, 112), {"dtype": "int4_32", "grouping": "offs", "groups": 3}, None),
        ((5, 32, 112), {"dtype": "int4_32", "call": "fp8_gemm"}, "operands are int4_32; fp8_gemm takes torch.float8"),
        ((5, 32, 112), {"dtype": "int4", "call": "fp8_gemm"}, "operands are int4; fp8_gemm takes torch.float8"),
        ((5, 30, 112), {"dtype": "mxfp4"}, "a weight has 30 rows; rows are packed in multiples of 16"),
        ((5, 32, 100), {"dtype": "int4"}, "a's row stride must be a multiple of 16 bytes"),
        ((5, 32, 112), {"dtype": "int4", "b_stride": 112}, "b_stride is 112; a packed weight is contiguous"),
        ((5, 32, 112), {"dtype": "nvfp4", "grouping": "k_offs"}, "operands are nvfp4; grouping 'k_offs' takes"),
        ((5, 32, 112), {"dtype": "fp4"}, "operands are fp4; supported is"),
        ((5, 32, 112), {"dtype": "blocks", "call": "fp8_gemm"}, "operands are blocks; fp8_gemm takes"),
    ],
)  # fmt: skip
def test_supports(sizes, keywords, reason):
    supported, text = supports(*sizes, **keywords)
    assert supported == (reason is None)
    assert text.startswith(reason or "supported")


@pytest.mark.parametrize("k", [16, 128, 200])
def test_supports_and_fp8_gemm_agree_on_large_m(k):
    """Meta tensors stand for operands that fit into no memory; the checks are those of a call."""
    k_blocks = -(-k // 128)
    most = 2**30 // k_blocks
    for m in (most - 1, most, most + 1, most + 200):
        a, b = (torch.empty(rows, 256, dtype=FP8, device="meta")[:, :k] for rows in (m, 8))
        scales = torch.empty(m, k_blocks, device="meta"), torch.empty(1, k_blocks, device="meta")
        try:
            FP8_GEMM.check_memory((a, scales[0], b, scales[1], None, None), Options())
            taken = True
        except ValueError as error:
            assert "Split the rows of a" in str(error)
            taken = False
        assert supports(m, 8, k, a_stride=256, b_stride=256)[0] == taken == (m <= most), m


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_far_rows_are_supported_as_a_tensor_map_takes_them(dtype):
    """A slice of a large matrix may have rows that are 2^31 elements apart."""
    most = (2**40 - 16) // dtype.itemsize
    for stride in (2**31 - 16, 2**31, most, most + 16 // dtype.itemsize, 2**62):
        problem = checks.stride_problem("a", 2, 256, stride, dtype.itemsize)
        supported, reason = supports(2, 128, 256, dtype=dtype, a_stride=stride, b_stride=256)
        assert supported == (problem is None) == (stride <= most), reason


def test_far_scales_are_made_contiguous():
    a = torch.empty(4, 128, dtype=FP8, device="meta")
    far, near = torch.empty(4, 2**29, device="meta")[:, :1], torch.empty(1, 1, device="meta")
    with pytest.raises(ValueError, match=r"a_scale's last element lies \d+ after .*a_scale\.contiguous\(\)"):
        FP8_GEMM.check_memory((a, far, a, near, None, None), Options())


def test_supports_and_fp8_gemm_agree_on_k():
    for k in (*range(40), 128, 200, 256):
        a, b = (torch.zeros(2, k, dtype=torch.uint8).view(FP8) for _ in range(2))
        scales = torch.ones(2, -(-k // 128)), torch.ones(1, -(-k // 128))
        strides = {"a_stride": a.stride(0), "b_stride": b.stride(0)}  # of [2, 0] it is 1
        try:
            fp8_gemm(a, scales[0], b, scales[1])
            taken = True
        except ValueError:
            taken = False
        assert supports(2, 2, k)[0] == supports(2, 2, k, **strides)[0] == taken, k


def test_supports_knows_every_call_with_sizes():
    """A call is known by its description alone, and says the same as the call."""
    x, w = torch.randn(3, 100), torch.randn(16, 100)
    b, b_scale = deep_tile.quantize_weight(w)
    assert supports(3, 16, 100, call="fp8_linear", dtype=torch.float32, b_stride=b.stride(0)) == (True, "supported")
    assert deep_tile.fp8_linear(x, b, b_scale).shape == (3, 16)
    a, a_scale = deep_tile.per_token_cast_to_fp8(x)
    asked = {"a_stride": a.stride(0), "b_stride": b.stride(0), "call": "fp8_gemm_cast"}
    assert supports(3, 16, 100, **asked) == (True, "supported")
    assert deep_tile.fp8_gemm_cast(a, a_scale, b, b_scale)[0].shape == (3, 16)
    loose = a.clone(memory_format=torch.contiguous_format).view(torch.uint8).contiguous().view(a.dtype)
    seen = supports(3, 16, 100, **{**asked, "a_stride": loose.stride(0)})
    with pytest.raises(ValueError) as refused:
        deep_tile.fp8_gemm_cast(loose, a_scale, b, b_scale)
    assert seen == (False, str(refused.value))


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


@pytest.fixture
def pretended_gpu(monkeypatch):
    """torch.cuda answers as with a Hopper GPU; a test may change further answers."""
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(query=lambda: True),
    }

    def answer(**changed):
        for name, value in (answers | changed).items():
            monkeypatch.setattr(torch.cuda, name, lambda *ignored, value=value: value)

    return answer


def test_other_gpus_are_refused(pretended_gpu):
    pretended_gpu(get_device_capability=(8, 0), get_device_name="NVIDIA A100")
    available, reason = is_available()
    assert not available
    assert "cuda:0 is NVIDIA A100, compute capability 8.0; deep_tile's kernels need a Hopper GPU" in reason


def failing_query():
    raise RuntimeError("CUDA error: device-side assert triggered")


def test_is_available_sees_a_dead_context(pretended_gpu):
    """During a capture the stream is not queried, which would break the capture off."""
    pretended_gpu()
    assert is_available() == (True, f"NVRTC {jit.nvrtc_version()}, NVIDIA H200")
    pretended_gpu(current_stream=SimpleNamespace(query=failing_query))
    assert is_available() == (
        False,
        "RuntimeError: an earlier kernel of this process failed, so CUDA no longer works in it: start another "
        "process (CUDA error: device-side assert triggered)",
    )
    pretended_gpu(current_stream=SimpleNamespace(query=failing_query), is_current_stream_capturing=True)
    assert is_available()[0]


def test_is_available_after_a_fork(pretended_gpu):
    pretended_gpu(_is_in_bad_fork=True)
    available, reason = is_available()
    assert not available and "start workers with 'spawn'" in reason


@pytest.fixture
def no_gpu(quick_compiler, monkeypatch):
    """A machine without GPU whose cache is empty."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def needed_configs(n: int, k: int, max_m: int) -> set[GemmConfig]:
    """The configs that fp8_gemm chooses for a dense `out`: TMA stores to aligned rows, and to a single row."""
    return {choose(GemmProblem(m, n, k, 132, tma_store=n % 8 == 0)) for m in range(1, max_m + 1)}


@pytest.mark.parametrize("shape", [(576, 7168, 300), (2112, 512, 600), (100, 640, 9)])
def test_precompile_compiles_what_can_be_needed_and_only_once(shape, no_gpu):
    result = precompile([shape], workers=2)
    assert set(result.configs) == needed_configs(*shape)
    assert result.compiled == len(result.configs) == jit.cache_info().entries
    assert precompile([shape]) == (result.configs, 0)


def test_precompile_is_quiet_unless_asked_and_then_draws_a_bar_or_says_lines(no_gpu, monkeypatch, capsys):
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress, "monotonic", lambda: next(now))
    count = len(precompile([(576, 7168, 128)], num_sms=132).configs)
    assert capsys.readouterr() == ("", "")
    precompile([(576, 7168, 128)], num_sms=132, progress=True)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "".join(f"Compiling GEMMs: {done} of {count}\n" for done in range(count)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    precompile([(576, 7168, 128)], num_sms=132, progress=True)
    err = capsys.readouterr().err
    assert "Compiling GEMMs" in err and "100%" in err
    with pytest.raises(TypeError, match="progress is 1, of type int; pass True or False"):
        precompile([(576, 7168, 128)], progress=1)


def test_precompile_of_several_shapes_is_their_union(no_gpu):
    shapes = [(576, 512, 300), (2112, 512, 300), (576, 512, 100)]
    result = precompile(shapes)
    assert set(result.configs) == set().union(*(needed_configs(*shape) for shape in shapes))
    assert result.compiled == len(result.configs) > 1


def test_precompile_heeds_num_sms(no_gpu):
    result = precompile([(576, 7168, 128)], num_sms=1)
    assert all(config.cluster == 1 for config in result.configs)
    assert set(result.configs) == set(configs_for(GemmProblem(1, 576, 7168, 1), 128))


def test_precompile_batch_invariant(no_gpu):
    """The selector gives these shapes split K otherwise; with the option it never does."""
    shape = (576, 7168, 128)
    assert any(config.split_k > 1 for config in configs_for(GemmProblem(1, *shape[:2]), 128))
    result = precompile([shape], batch_invariant=True)
    assert all(config.split_k == 1 for config in result.configs)
    chosen = {choose(GemmProblem(m, 576, 7168, 132, split_k=False)) for m in range(1, 129)}
    assert chosen == set(result.configs)


def test_precompile_takes_numpy_s_ints_and_padded_rows(no_gpu):
    """k = 100 is fine for fp8_gemm when the rows are 112 bytes apart."""
    assert precompile([tuple(np.array([128, 100, 8]))], workers=np.int64(1)).compiled == 1


# Imports.


def test_import_leaves_cuda_the_compiler_and_the_cache_alone(tmp_path):
    program = """
import sys
import torch
before = set(sys.modules)
import deep_tile.api
assert not torch.cuda.is_initialized()
assert not {name for name in set(sys.modules) - before if name.startswith("cuda")}, "a compiler was imported"
assert deep_tile.jit.compilations() == 0
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
