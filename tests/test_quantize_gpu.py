"""The casts' kernels: every value and magnitude, overlapping launches, streams, graphs.

Shapes, layouts and alignments are in test_drawn_casts.py.
"""

import threading

import pytest
import torch
from test_quantize import EACH_OPTION, MAGNITUDES_AT_A_POWER_OF_TWO, wide_matrix

from deep_tile import cast as kernels
from deep_tile import quantize, transposed_cast_to_fp8
from deep_tile.quantize import FP8_DTYPE, per_block_cast_to_fp8, per_token_cast_to_fp8

pytestmark = pytest.mark.gpu

CASTS = pytest.mark.parametrize("cast", [per_token_cast_to_fp8, per_block_cast_to_fp8])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)


def random_matrix(m, k, dtype=torch.bfloat16, seed=0):
    """Magnitudes from 1e-4 to 1e4, so that e4m3's whole range occurs in every block, and zeros of both signs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device="cuda")
    x *= 10 ** (8 * torch.rand(m, k, generator=generator, device="cuda") - 4)
    x[torch.rand(m, k, generator=generator, device="cuda") < 0.05] *= 0
    return x.to(dtype)


def forget(monkeypatch) -> None:
    """Forget all launches of casts."""
    for operation in (quantize.TOKEN_CAST, quantize.BLOCK_CAST):
        monkeypatch.setattr(operation, "launches", {})


def codes(x):
    """Bits, NaN of either sign as one."""
    return torch.where(x.float().isnan(), 0x7F, x.contiguous().view(torch.uint8))


def assert_as_defined(cast, x, **options):
    """Assert that the kernel's result equals the CPU's, which is the definition."""
    quantized, scale = cast(x, **options)
    targets = {"out", "scale_out"}
    wanted, wanted_scale = cast(x.cpu(), **{name: options[name] for name in options if name not in targets})
    assert torch.equal(codes(quantized.cpu()), codes(wanted))
    torch.testing.assert_close(scale.cpu(), wanted_scale, rtol=0, atol=0, equal_nan=True)
    return quantized, scale


@CASTS
@EACH_OPTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_torch_computes_the_definition_on_a_gpu(cast, options, dtype):
    """Where the kernel is not used, torch computes the same definition as on a CPU."""
    x = wide_matrix(300, 1300, dtype).cuda()
    block_rows = 1 if cast is per_token_cast_to_fp8 else 128
    out, scale = (torch.empty_like(y) for y in cast(x, **options))
    quantize.definition(x, quantize.Options(block_rows, quantize.SMALLEST_AMAX_FLOOR, **options), out, scale, {})
    wanted, wanted_scale = cast(x.cpu(), **options)
    assert torch.equal(codes(out.cpu()), codes(wanted)) and torch.equal(scale.cpu(), wanted_scale)


@pytest.mark.parametrize("exact", ["divide", "reciprocal"])
def test_pow2_scale_is_decided_exactly(exact):
    x = MAGNITUDES_AT_A_POWER_OF_TWO.cuda()[:, None]
    assert_as_defined(per_token_cast_to_fp8, x, amax_floor=2.0**-80, round_scale="pow2", exact=exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("round_scale", ["none", "pow2"])
@pytest.mark.parametrize("block_rows", [1, 128])
def test_reciprocal_is_what_torch_computes_by_numbers(block_rows, round_scale, dtype):
    """DeepGEMM's casts, which transformers uses, are so defined: `amax / 448.0` and `x * (1.0 / scale)` in torch, which
    on a GPU multiplies with the reciprocal of a number; a scale that is no power of two is rounded up by its bits."""
    x = random_matrix(512, 1280, dtype)
    blocks = x.view(512 // block_rows, block_rows, 10, 128)
    scale = blocks.abs().float().amax((1, 3), keepdim=True).clamp(1e-4) / 448.0
    if round_scale == "pow2":
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    wanted = (blocks * (1.0 / scale)).to(FP8_DTYPE).view(512, 1280)
    cast = per_token_cast_to_fp8 if block_rows == 1 else per_block_cast_to_fp8
    got, got_scale = cast(x, round_scale=round_scale, exact="reciprocal")
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(got_scale, scale.view(512 // block_rows, 10))


@CASTS
def test_overlapping_launches_read_what_was_written(cast, monkeypatch):
    """Casts launched to overlap wait for each other, and for the kernel ahead: a chain of them in one buffer."""
    prepare = kernels.prepare_launch
    forget(monkeypatch)
    monkeypatch.setattr(kernels, "prepare_launch", lambda *a, **how: prepare(*a, **{**how, "pdl": True}))
    sources = [random_matrix(512, 4096, seed=seed) for seed in range(8)]
    wanted = [cast(x.cpu()) for x in sources]
    x, results = torch.empty_like(sources[0]), []
    out, scale = cast(sources[0])
    for source in sources:
        x.copy_(source)
        cast(x, out=out, scale_out=scale)
        cast(x, out=out, scale_out=scale)
        results.append((out.clone(), scale.clone()))
    for (got, got_scale), (codes_wanted, scale_wanted) in zip(results, wanted, strict=True):
        assert torch.equal(codes(got.cpu()), codes(codes_wanted)) and torch.equal(got_scale.cpu(), scale_wanted)


@CASTS
@DTYPES
def test_kernel_is_what_runs(cast, dtype):
    cast(random_matrix(2, 128, dtype))
    source = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
    block_rows = 1 if cast is per_token_cast_to_fp8 else 128
    kernel, _ = kernels.choose(block_rows, source, 2, 128, 132)
    assert kernels.is_loaded(kernel, torch.cuda.current_device())


def test_every_bfloat16_over_every_kind_of_scale():
    """All 65536 values, in groups with different largest elements: rounding at the midpoints between codes."""
    values = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = values[values.isfinite()]
    finite = finite[torch.randperm(len(finite), generator=torch.Generator("cuda").manual_seed(1), device="cuda")]
    assert_as_defined(per_token_cast_to_fp8, finite[: len(finite) // 128 * 128].view(-1, 128), amax_floor=2.0**-80)
    small = finite[finite.abs() < 448][:32768].view(256, 128)
    for largest in torch.linspace(448, 900, 64).tolist():
        x = small.clone()
        x[:, 0] = largest
        assert_as_defined(per_token_cast_to_fp8, x)


@CASTS
def test_warm_cast_finds_its_launch(cast, monkeypatch):
    """The call is one call into C, and gives the same bytes as by the other ways."""
    x, y = random_matrix(130, 264), random_matrix(130, 264, seed=7)
    out, scale = cast(x)
    wanted, wanted_scale = cast(y.cpu())
    cast(x, out=out, scale_out=scale)
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        monkeypatch.setattr(kernels, "prepare_launch", lambda *ignored: pytest.fail("prepared anew"))
        monkeypatch.setattr(quantize.Cast, "_run_unknown", lambda *ignored: pytest.fail("went through Python"))
    cast(y, out=out, scale_out=scale)
    assert torch.equal(codes(out.cpu()), codes(wanted)) and torch.equal(scale.cpu(), wanted_scale)


def test_thread_that_has_used_no_gpu():
    x = random_matrix(64, 512)
    wanted, _ = per_token_cast_to_fp8(x)
    torch.cuda.synchronize()
    results = []
    thread = threading.Thread(target=lambda: results.append(per_token_cast_to_fp8(x)[0]))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(codes(results[0]), codes(wanted))


@CASTS
def test_second_gpu(cast):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = random_matrix(130, 300)
    wanted, _ = cast(x)
    got, scale = cast(x.to("cuda:1"))
    assert (got.device.index, scale.device.index, torch.cuda.current_device()) == (1, 1, 0)
    assert torch.equal(codes(got.cpu()), codes(wanted.cpu()))


def test_rows_beyond_two_gibibytes():
    x = torch.randn(70_000, 128, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(70_000, 32_768, device="cuda", dtype=torch.bfloat16)[:, :128]
    wide.copy_(x)
    assert torch.equal(codes(per_token_cast_to_fp8(wide)[0]), codes(per_token_cast_to_fp8(x)[0]))
    assert torch.equal(codes(per_block_cast_to_fp8(wide)[0]), codes(per_block_cast_to_fp8(x)[0]))


@CASTS
@EACH_OPTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_at_every_magnitude(cast, options, dtype):
    """Down to denormals, where quotients have remainders that FP32 does not hold, and zeros between."""
    x = random_matrix(300, 640, torch.float32) * 10.0 ** -torch.arange(0, 45, 0.15, device="cuda")[:300, None].double()
    for floor in (quantize.SMALLEST_AMAX_FLOOR, 0, 1e-4, 2.0**-80):
        assert_as_defined(cast, x.to(dtype), amax_floor=floor, **options)


@EACH_OPTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_at_every_magnitude_along_tokens(options, dtype):
    x = random_matrix(300, 200, torch.float32) * 10.0 ** -torch.linspace(0, 45, 200, device="cuda").double()
    assert_as_defined(transposed_cast_to_fp8, x.to(dtype), **options)
