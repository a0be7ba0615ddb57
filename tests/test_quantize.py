"""The FP8 casts: values, scales and memory layouts; and that their kernels compile clean, without a GPU.

What they refuse is in test_bad_calls.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_tile import cast as kernels
from deep_tile import jit
from deep_tile.codegen import CAST_SOURCES, cast_source
from deep_tile.config import ceil_div, round_up
from deep_tile.quantize import FP8_DTYPE, dequantize, per_block_cast_to_fp8, per_token_cast_to_fp8

CASTS = pytest.mark.parametrize("cast", [per_token_cast_to_fp8, per_block_cast_to_fp8])
sizes = st.integers(0, 300)


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


@settings(max_examples=40, deadline=None)
@given(rows=sizes, k=sizes, per_token=st.booleans())
def test_round_trip_is_within_e4m3_rounding(rows, k, per_token):
    x = random_matrix(rows, k)
    cast, block = (per_token_cast_to_fp8, (1, 128)) if per_token else (per_block_cast_to_fp8, (128, 128))
    quantized, scale = cast(x)
    assert (quantized.dtype, quantized.shape, quantized.is_contiguous()) == (FP8_DTYPE, x.shape, True)
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (ceil_div(rows, block[0]), ceil_div(k, 128)))
    back = dequantize(quantized, scale, block=block)
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(128, 1)[:, :k]
    allowed = torch.maximum(x.abs() * 2**-4, spread * 2**-10) * (1 + 1e-6)
    assert ((back - x).abs() <= allowed).all()


@pytest.mark.parametrize(("cast", "rows_per_block"), [(per_token_cast_to_fp8, 1), (per_block_cast_to_fp8, 128)])
def test_scale_is_largest_magnitude_over_448(cast, rows_per_block):
    x = random_matrix(200, 300)
    quantized, scale = cast(x, amax_floor=1e-20)
    assert torch.equal(scale, block_maxima(x, rows_per_block) / 448)
    assert quantized.float().abs().max() == 448


@CASTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_source_dtype_and_stride(cast, dtype):
    x = random_matrix(70, 200).clamp(-1e4, 1e4).to(dtype)
    expected = cast(x.float())
    for source in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :200]):
        for got, wanted in zip(cast(source), expected, strict=True):
            assert torch.equal(got.float(), wanted.float())


@pytest.mark.parametrize("m", [1, 3, 4, 130])
@pytest.mark.parametrize("layout", ["row", "m", "m_aligned"])
def test_scale_layouts_hold_the_same_values(m, layout):
    x = random_matrix(m, 384)
    scale = per_token_cast_to_fp8(x, scale_layout=layout)[1]
    stride = {"row": (3, 1), "m": (1, m), "m_aligned": (1, round_up(m, 4))}[layout]
    assert scale.stride() == stride
    assert torch.equal(scale, per_token_cast_to_fp8(x)[1])


@CASTS
@pytest.mark.parametrize("amax_floor", [1e-4, 1e-10])
def test_amax_floor_holds_for_zero_blocks(cast, amax_floor):
    quantized, scale = cast(torch.zeros(5, 200), amax_floor=amax_floor)
    assert torch.equal(scale, torch.full_like(scale, amax_floor) / 448)
    assert (quantized.float() == 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("cast", "rows"), [(per_token_cast_to_fp8, slice(1, 2)), (per_block_cast_to_fp8, slice(0, 128))]
)
def test_nan_and_infinity_stay_in_their_block(cast, rows, poison):
    x = random_matrix(130, 300)
    clean = dequantize(*cast(x))
    x[1, 130] = poison
    quantized, scale = cast(x)
    back = dequantize(quantized, scale)
    touched = torch.zeros_like(x, dtype=torch.bool)
    touched[rows, 128:256] = True
    assert back[touched].isnan().all() and quantized.float()[touched].isnan().all()
    assert scale.isnan().sum() == 1
    assert torch.equal(back[~touched], clean[~touched])


@CASTS
def test_writes_where_it_is_told(cast):
    x = random_matrix(130, 200, torch.bfloat16)
    expected, expected_scale = cast(x)
    out = torch.full((130, 256), 7.0).to(FP8_DTYPE)
    scale_out = torch.full((expected_scale.shape[1], 200), 7.0).t()
    got, scale = cast(x, out=out[:, 8:208], scale_out=scale_out[: len(expected_scale)])
    assert got.data_ptr() == out.data_ptr() + 8 and scale.data_ptr() == scale_out.data_ptr()
    assert torch.equal(got.float(), expected.float()) and torch.equal(scale, expected_scale)
    untouched = [out[:, :8].float(), out[:, 208:].float(), scale_out[len(expected_scale) :]]
    assert all((margin == 7).all() for margin in untouched)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("source", CAST_SOURCES)
def test_kernel_compiles_clean(block_rows, source):
    kernel, _ = kernels.choose(block_rows, source, 4096, 7168, 132)
    text = cast_source(kernel)
    assert "#include" not in text and text.count("__global__") == 1
    usage = jit.resource_usage(jit.compile_kernel(text, kernel.name).log)
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes, usage.warnings) == (0, 0, 0, ())
    assert usage.registers * kernel.threads * kernel.blocks_per_sm <= 64 * 1024


@pytest.mark.parametrize(("block_rows", "loads"), [(1, 2), (128, 8)])
def test_launch_parameters_are_the_rooflines(block_rows, loads):
    walls = kernels.roofline(block_rows, "bf16", 4096, 7168)
    assert (walls.passes, walls.unroll, walls.vector_elements) == (1, loads, 8)
    kernel, grid = kernels.choose(block_rows, "bf16", 4096, 7168, 132)
    assert (kernel.threads, kernel.threads_per_scale, grid) == (walls.warps * 32, walls.threads_per_row, walls.grid)
    assert walls.bytes_in_flight >= walls.bytes_needed


@given(rows=st.integers(1, 2**20), columns=st.integers(1, 2**16), block_rows=st.sampled_from([1, 128]))
def test_one_kernel_serves_every_size(rows, columns, block_rows):
    kernel, grid = kernels.choose(block_rows, "bf16", rows, columns, 132)
    assert kernel == kernels.choose(block_rows, "bf16", 4096, 7168, 78)[0]
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
        (FP8, torch.ones(130, 3).half(), None, TypeError, "scale is a tensor of float16"),
        (FP8, torch.ones(3, 130), None, ValueError, r"\[3, 130\].*\[130, 3\].*\[2, 3\]"),
        (FP8, torch.ones(130, 3), (128, 128), ValueError, r"must be \[2, 3\]"),
    ],
)
def test_dequantize_refuses(x, scale, block, error, message):
    with pytest.raises(error, match=message):
        dequantize(x, scale, block=block)
