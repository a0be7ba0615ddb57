"""The FP8 casts: bits by a definition in NumPy, every magnitude; and that their kernels compile clean, without a GPU.

Layouts, options and odd values are in test_drawn_casts.py, what is refused in test_bad_calls.py.
"""

import itertools
import re

import changes
import numpy as np
import pytest
import torch
from default_kernels import disassemblies
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_tile import cast as kernels
from deep_tile import jit, quantize_weight, silu_mul_cast_to_fp8, transposed_cast_to_fp8
from deep_tile.codegen import streaming_source
from deep_tile.config import ceil_div
from deep_tile.quantize import FP8_DTYPE, dequantize, per_block_cast_to_fp8, per_token_cast_to_fp8

CASTS = pytest.mark.parametrize("cast", [per_token_cast_to_fp8, per_block_cast_to_fp8])
CASTS_AND_ROWS = pytest.mark.parametrize(
    ("cast", "rows_per_block"), [(per_token_cast_to_fp8, 1), (per_block_cast_to_fp8, 128)]
)
OPTIONS = [
    {"round_scale": round_scale, "exact": exact}
    for round_scale, exact in itertools.product(("none", "pow2"), ("divide", "reciprocal"))
]
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))


def random_matrix(rows, k, dtype=torch.float32):
    """Rows and columns of very different size, so that a wrong block shows."""
    generator = torch.Generator().manual_seed(rows * 1000 + k)
    x = torch.randn(rows, k, generator=generator)
    return (x * torch.logspace(-3, 3, max(rows, 1))[:rows, None] * torch.logspace(2, -2, max(k, 1))[:k]).to(dtype)


def block_maxima(x, rows_per_block):
    """The scales' definition, block by block."""
    rows, k = x.shape
    corners = [[(i, j) for j in range(0, k, 128)] for i in range(0, rows, rows_per_block)]
    return torch.tensor([[x[i : i + rows_per_block, j : j + 128].abs().max() for i, j in row] for row in corners])


def codes(x):
    """Bits, NaN of either sign as one."""
    return torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8))


def assert_same(got, wanted):
    """Assert equal elements and scales, bit for bit; any NaN equals any other."""
    assert torch.equal(codes(got[0]), codes(wanted[0]))
    torch.testing.assert_close(got[1], wanted[1], rtol=0, atol=0, equal_nan=True)


def expected_cast(x, rows_per_block, *, amax_floor, round_scale, exact):
    """The definition once more, of finite values, in NumPy."""
    values = x.float().numpy()
    scale = block_maxima(x.float(), rows_per_block).clamp(min=amax_floor).numpy()
    one, largest = np.float32(1), np.float32(448)
    if round_scale == "pow2":
        scale = np.vectorize(smallest_power_of_two, otypes=[np.float32])(scale)
    else:
        scale = scale / largest if exact == "divide" else scale * (one / largest)
    spread = scale.repeat(rows_per_block, 0)[: len(x)].repeat(128, 1)[:, : x.shape[1]]
    quotients = values / spread if exact == "divide" else values * (one / spread)
    return nearest_e4m3(quotients), torch.from_numpy(scale)


POWERS_OF_TWO = [2.0**exponent for exponent in range(-126, 128)]


def smallest_power_of_two(amax):
    """The smallest power of two >= amax / 448, found by trying. All numbers are exact in float64."""
    return next(power for power in POWERS_OF_TWO if 448 * power >= amax)


def nearest_e4m3(x):
    """The nearest code by distance to every code; of two equally near, the even one."""
    magnitudes = torch.arange(0x7F, dtype=torch.uint8).view(FP8_DTYPE).double().numpy()
    above = np.searchsorted(magnitudes, np.abs(x, dtype=np.float64)).clip(1, 0x7E)
    distances = [np.abs(np.abs(x, dtype=np.float64) - magnitudes[code]) for code in (above - 1, above)]
    above_is_nearer = (distances[1] < distances[0]) | ((distances[1] == distances[0]) & (above % 2 == 0))
    return torch.from_numpy((above - ~above_is_nearer) | (np.signbit(x) << 7)).to(torch.uint8).view(FP8_DTYPE)


def wide_matrix(rows, k, dtype):
    """All magnitudes of `dtype`, subnormal numbers, zeros of both signs, and blocks of zeros."""
    info = torch.finfo(dtype if dtype != torch.float64 else torch.float32)
    low, high = np.log2(info.smallest_normal * info.eps) - 1, np.log2(info.max)
    groups = torch.empty(rows, k // 128 + 1).uniform_(low, high).repeat_interleave(128, 1)[:, :k]
    x = torch.randn(rows, k) * torch.exp2(groups - 3 * torch.rand(rows, k)).clamp(max=info.max / 8)
    x[torch.rand(rows, k) < 0.05] *= 0
    x[:, 128:256] *= 0
    return x.clamp(-info.max, info.max).to(dtype)


@CASTS_AND_ROWS
@EACH_OPTION
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amax_floor", [1e-4, 2.0**-80])
def test_bits_are_as_defined(cast, rows_per_block, options, dtype, amax_floor):
    x = wide_matrix(140, 300, dtype)
    assert_same(
        cast(x, amax_floor=amax_floor, **options), expected_cast(x, rows_per_block, amax_floor=amax_floor, **options)
    )


def magnitudes_at_a_power_of_two():
    powers = torch.tensor([2.0**exponent for exponent in range(-88, 120)])[:, None]
    at = (powers * torch.tensor([224.0, 225, 300, 447, 448, 449, 500])).flatten()
    x = torch.stack([at, at.nextafter(torch.zeros(())), at.nextafter(torch.full((), float("inf")))]).flatten()
    return x[torch.randperm(x.numel())]


MAGNITUDES_AT_A_POWER_OF_TWO = magnitudes_at_a_power_of_two()
"""448 times every power of two that a scale can be, its neighbours, and others; shuffled."""


@pytest.mark.parametrize("exact", ["divide", "reciprocal"])
def test_pow2_scale_is_decided_exactly(exact):
    x = MAGNITUDES_AT_A_POWER_OF_TWO[:, None]
    _, scale = per_token_cast_to_fp8(x, amax_floor=2.0**-80, round_scale="pow2", exact=exact)
    assert scale.flatten().tolist() == [smallest_power_of_two(max(x, 2.0**-80)) for x in x.flatten().tolist()]


@CASTS
def test_reciprocal_differs_in_last_bits(cast):
    """Many scales differ by one FP32 unit, and one or two of a thousand BFloat16 elements by one code."""
    x = torch.randn(1024, 1024).bfloat16()
    (divided, scale), (multiplied, other_scale) = (cast(x, exact=exact) for exact in ("divide", "reciprocal"))
    apart = (scale.view(torch.int32) - other_scale.view(torch.int32)).abs()
    assert apart.max() == 1 and (apart > 0).float().mean() > 0.1
    apart = (divided.view(torch.uint8).int() - multiplied.view(torch.uint8).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
    assert cast is per_block_cast_to_fp8 or apart.max() == 1  # of 64 scales perhaps none moves an element


def test_dequantize_expands_e8m0_exactly():
    """All values but NaN, down to 2**-127, a subnormal number of FP32."""
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None]
    x = torch.tensor([[1.0, -0.5, 448.0]]).expand(256, 3).to(FP8_DTYPE)
    powers = torch.tensor([2.0**exponent for exponent in range(-127, 128)], dtype=torch.float64)[:, None]
    back = dequantize(x, scale)
    assert torch.equal(back[:255], (powers * x[:255].double()).float())
    assert back[255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_widens_scales_exactly(dtype):
    """All values, subnormal ones included."""
    scale = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    x = torch.tensor([[1.0, -0.5]]).expand(2**16, 2).to(FP8_DTYPE)
    assert torch.equal(dequantize(x, scale).nan_to_num(7), (x.double() * scale.double()).float().nan_to_num(7))


OF_CASTS = (*changes.OF_KERNELS, "deep_tile/cast.py", "tests/test_quantize.py")
COMPILED = kernels.all_kernels()[:: changes.share_of(*OF_CASTS)]
EACH_KERNEL = pytest.mark.parametrize("kernel", COMPILED, ids=lambda kernel: kernel.name)


@pytest.fixture(scope="session")
def compiled(made_once):
    """Compiled kernels by name, and in the cache."""

    return made_once("streaming_kernels", lambda: compile_all(COMPILED))


def compile_all(kernels):
    """Compile memory-bound kernels into the cache. Returns the results by kernel."""
    made = {}
    for kernel in kernels:
        source = streaming_source(kernel)
        made[kernel] = jit.compile_kernel(source, kernel.name)
        jit.store_cubin(source, made[kernel].cubin)
    return made


@pytest.fixture(scope="session")
def listings(compiled, made_once, tmp_path_factory):
    """The machine code of each, as text."""

    def disassemble_all():
        found = disassemblies((made.cubin for made in compiled.values()), tmp_path_factory.mktemp("code"))
        return {kernel: "\n".join(lines) for kernel, lines in zip(compiled, found, strict=True)}

    return made_once("streaming_listings", disassemble_all)


@EACH_KERNEL
def test_kernel_compiles_clean(kernel, compiled):
    text = streaming_source(kernel)
    assert "#include" not in text and text.count("__global__") == 1
    assert not compiled[kernel].divergence
    usage = jit.resource_usage(compiled[kernel].log)
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes, usage.warnings) == (0, 0, 0, ())
    assert usage.registers * kernel.threads * kernel.blocks_per_sm <= 64 * 1024


@EACH_KERNEL
def test_kernel_takes_its_turn_before_all_else(kernel, listings):
    """It waits for the kernel ahead of it before it reads or writes, and only then lets the next one start."""
    instruction = r"\*/\s+(@\S+ )?(ACQBULK|PREEXIT|BRA|(?:LDG|LD|STG|ST|ATOM\w*|RED)\b[.\w]*)"
    found = re.findall(instruction, listings[kernel])
    assert found[:2] == [("", "ACQBULK"), ("", "PREEXIT")]
    names = [name.partition(".")[0] for _, name in found[2:]]
    assert {"LDG", "STG"} <= set(names) and not {"ACQBULK", "PREEXIT"} & set(names)


@pytest.mark.parametrize(("block_rows", "loads"), [(1, 2), (128, 8)])
def test_launch_parameters_are_the_rooflines(block_rows, loads):
    walls = kernels.roofline(block_rows, "bf16", 4096, 7168)
    assert (walls.passes, walls.unroll, walls.vector_elements) == (1, loads, 8)
    kernel, grid = kernels.choose(block_rows, "bf16", 4096, 7168, 132)
    assert (kernel.threads, kernel.threads_per_scale, grid) == (walls.warps * 32, walls.threads_per_row, walls.grid)
    assert walls.bytes_in_flight >= walls.bytes_needed


@pytest.mark.parametrize("kernel", kernels.cast_kernels(), ids=lambda kernel: kernel.name)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 2**20), columns=st.integers(1, 2**16))
def test_one_kernel_serves_every_size(kernel, rows, columns):
    block_rows = kernel.block_rows
    chosen, grid = kernels.choose(block_rows, kernel.source, rows, columns, 132, kernel.what)
    assert chosen == kernel == kernels.choose(block_rows, kernel.source, 4096, 7168, 78, kernel.what)[0]
    blocks = ceil_div(rows, block_rows) * ceil_div(columns, 128)
    assert 1 <= grid <= min(132 * kernel.blocks_per_sm, ceil_div(blocks * kernel.threads_per_scale, kernel.threads))


def test_dequantize_decides_by_shape():
    x = torch.full((129, 130), 2.0).to(FP8_DTYPE)
    by_token = torch.arange(1.0, 259).reshape(129, 2)
    by_block = torch.arange(1.0, 5).reshape(2, 2)
    assert dequantize(x, by_token)[128, 129] == 2 * 258
    assert dequantize(x, by_block)[128, 127] == 2 * 3
    assert dequantize(x, by_block.t().contiguous().t())[0, 128] == 2 * 2


def test_dequantize_of_one_row_means_the_same_for_both_kinds():
    x, scale = per_token_cast_to_fp8(random_matrix(1, 300))
    assert torch.equal(dequantize(x, scale, block=(1, 128)), dequantize(x, scale, block=(128, 128)))


FP8 = torch.zeros(130, 300).to(FP8_DTYPE)


@pytest.mark.parametrize(
    ("x", "scale", "block", "error", "message"),
    [
        (FP8, torch.ones(130, 3).double(), None, TypeError, "scale is a tensor of float64"),
        (FP8, torch.ones(3, 130), None, ValueError, r"\[3, 130\].*\[130, 3\].*\[2, 3\]"),
        (FP8, torch.ones(130, 3), (128, 128), ValueError, r"must be \[2, 3\]"),
    ],
)
def test_dequantize_refuses(x, scale, block, error, message):
    with pytest.raises(error, match=message):
        dequantize(x, scale, block=block)


def cast_error(name, x, options):
    """The relative error of a cast, by its name."""
    if name == "silu_mul":
        gate_up = torch.cat((torch.full_like(x, 88), x / 88), -1)  # silu(88) is 88
        codes_, scale = silu_mul_cast_to_fp8(gate_up, **options)
        x = gate_up[:, x.shape[1] :].float() * 88
    elif name == "transposed":
        codes_, scale = transposed_cast_to_fp8(x.t(), **options)
    else:
        codes_, scale = {"tokens": per_token_cast_to_fp8, "weights": quantize_weight}[name](x, **options)
    got = dequantize(codes_, scale, block=(128, 128) if name == "weights" else (1, 128))
    return float((got.double() - x.double()).norm() / x.double().norm())


@pytest.mark.parametrize("name", ["tokens", "weights", "transposed", "silu_mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EACH_OPTION
def test_no_magnitude_is_flushed(name, dtype, options):
    """By default gradients of any size keep e4m3's precision: the least scale is FP32's smallest normal number."""
    if name == "silu_mul" and dtype == torch.float32:
        pytest.skip("takes numbers of 16 bits")
    x = torch.randn(128, 384, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at_one = cast_error(name, x.to(dtype), options)
    assert at_one < 0.05
    for exponent in (5, 10, 15, 20, 25, 30, 34):
        # Scales of powers of two lie elsewhere below the magnitudes of another decade.
        bound = 1.02 if options["round_scale"] == "none" else 1.1
        assert cast_error(name, (x * 10.0**-exponent).to(dtype), options) <= bound * at_one


@CASTS
@EACH_OPTION
def test_zeros_stay_zeros_and_denormals_finite(cast, options):
    x = torch.zeros(128, 256)
    x[:, 128:] = 2.0**-149 * torch.arange(128)
    out, scale = cast(x, **options)
    assert (scale == 2.0**-126).all() and (out[:, :128].float() == 0).all() and out.float().isfinite().all()
    assert_same(cast(x, amax_floor=0, **options), (out, scale))
