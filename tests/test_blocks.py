"""`to_blocks`: weights of every format against float64, element by element, on the CPU and on a GPU; and what it
refuses."""

import math

import pytest
import torch
from formats import E8M0, draw, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantize import nearest_e4m3

from deep_tile import blocks, dequantize, fp8_linear, per_token_cast_to_fp8, to_blocks
from deep_tile.formats import FORMATS
from deep_tile.quantize import FP8_DTYPE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PACKED = [name for name, of in FORMATS.items() if of.packed]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


def assert_re_based(result: blocks.Blocks, exact: torch.Tensor) -> None:
    """Assert that elements are the nearest for their scales, blocks fill e4m3's range, and the report is right."""
    weight, scale, report, exact = result.weight.cpu(), result.scale.cpu(), result.report, exact.cpu()
    assert (weight.dtype, scale.dtype, weight.shape) == (FP8_DTYPE, torch.float32, exact.shape)
    each = spread(scale, (128, 128), exact.shape[-2:])
    wanted = nearest_e4m3((exact / each).float().numpy())
    assert torch.equal(weight.double(), wanted.double())
    if report.format not in ("fp8_128x128", "fp8_tensor") and min(exact.shape[-2:]) > 128:
        for of_block, of_scale in zip(_blocks(weight.double().abs()), scale.flatten(), strict=True):
            assert of_block.max() == 0 or 224 <= of_block.max() <= 448 or of_scale < 2**-125
    change = weight.double() * each - exact
    assert report.elements == exact.numel() and report.changed == int((change != 0).sum())
    assert torch.equal(report.exact.cpu().flatten(), torch.stack([(x == 0).all() for x in _blocks(change)]))
    norms = [x.norm().item() for x in (change, exact)]
    assert math.isclose(report.error, norms[0] / norms[1] if norms[1] else 0, rel_tol=1e-5)
    of_rows = torch.where(exact.norm(dim=-1) > 0, change.norm(dim=-1) / exact.norm(dim=-1), 0)
    assert math.isclose(report.worst_row_error, of_rows.max().item(), rel_tol=1e-5)
    assert f"{report.changed:,} of {exact.numel():,} elements changed" in str(report)


def _blocks(x: torch.Tensor) -> list[torch.Tensor]:
    matrices = x.reshape(-1, *x.shape[-2:])
    return [part for matrix in matrices for rows in matrix.split(128) for part in rows.split(128, 1)]


SHAPES = [(256, 384), (192, 576), (130, 2112), (3, 140, 288), (2, 2, 129, 96), (1, 32), (40, 16)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element(device, name, shape):
    weight, scale, arguments, exact = draw(name, shape, device)
    result = to_blocks(weight, scale, **arguments, max_error=math.inf)
    assert result.report.format == name and result.weight.device.type == device
    assert_re_based(result, exact)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_size_and_spread(data):
    """The weight is converted in parts of its rows, with shards that begin anywhere in a block of scales."""
    name = data.draw(st.sampled_from([*FORMATS]))
    of = FORMATS[name]
    n, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 200)) * 2
    firsts = tuple(data.draw(st.integers(0, max(size - 1, 0))) for size in (of.rows, of.columns))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    weight, scale, arguments, exact = draw(name, (n, k), "cpu", data.draw(st.sampled_from([0, 3, 20, 100])), firsts)
    at_once = data.draw(st.sampled_from([1, 1 << 22]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ELEMENTS_AT_ONCE", at_once)
        first_row, first_column = firsts
        result = to_blocks(
            weight, scale, **arguments, first_row=first_row, first_column=first_column, max_error=math.inf
        )
    assert_re_based(result, exact)


def test_mxfp4_is_exact_within_14_powers_of_two(device):
    """The scales alone change, bit for bit. Beyond 14 powers of two the smallest elements are lost, if the caller
    allows it."""
    weight = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64).repeat(32, 2)  # [128, 256] packed 2
    for powers in (14, 15):
        scale = torch.full((128, 8), 127, dtype=torch.uint8, device=device)
        scale[:, 1::2] -= powers
        if powers == 14:
            result = to_blocks(weight, scale, max_error=0)
            assert result.report.changed == 0 and result.report.exact.all()
        else:
            with pytest.raises(ValueError, match="mxfp4 to blocks .* would change row .* more than max_error=0"):
                to_blocks(weight, scale, max_error=0)
            assert 0 < to_blocks(weight, scale).report.changed_share < 0.5
    assert to_blocks(weight, torch.zeros_like(scale), max_error=0).scale.min() >= 2**-126
    result = to_blocks(weight, torch.full_like(scale, 254), max_error=0)
    assert result.scale.isfinite().all()


PACKINGS = {
    "uint8": lambda x: x,
    "int8": lambda x: x.view(torch.int8),
    "float4_e2m1fn_x2": lambda x: x.view(torch.float4_e2m1fn_x2),
    "gpt-oss's": lambda x: x.unflatten(-1, (-1, 16)),
    "every other row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("dtype", [E8M0, torch.uint8], ids=str)
def test_packings_of_mxfp4(device, how, dtype):
    """The low half of a byte comes first."""
    weight, scale, _, exact = draw("mxfp4", (3, 130, 96), device)
    result = to_blocks(PACKINGS[how](weight), scale.view(dtype))
    assert result.report.format == "mxfp4" and result.report.changed == 0
    assert_re_based(result, exact)


STRIDES = {
    "along rows": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "experts last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every third column": lambda x: x.repeat_interleave(3, -1)[..., ::3],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", FORMATS)
def test_any_strides(device, name, strides):
    weight, scale, arguments, exact = draw(name, (3, 140, 96), device)
    given = STRIDES[strides](weight.view(torch.uint8)).view(weight.dtype)
    scale = STRIDES[strides](scale) if scale.dim() == 3 and scale.dtype.itemsize > 1 else scale
    result = to_blocks(given, scale, **arguments, max_error=math.inf)
    assert_re_based(result, exact)
    assert result.weight.stride(-1) == 1 and result.weight.data_ptr() % 16 == 0


SCALES = {
    "negative": lambda x: torch.where(x < 0.5, -x, x),
    "some zero": lambda x: torch.where(x < 0.5, 0, x),
    "all zero": lambda x: x * 0,
    "denormal": lambda x: x * 2.0**-140,
    "huge": lambda x: x * 3e38,
    "of every magnitude": lambda x: torch.exp2((x * 276 - 149).floor()),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_32x32"])
def test_odd_scales(device, kind, name):
    """Whatever the given scales are, those of the result are normal numbers."""
    weight, scale, arguments, _ = draw(name, (300, 256), device)
    scale = SCALES[kind](torch.rand(scale.shape, device=device))
    block = (1, 256) if name == "fp8_channel" else (32, 32)
    exact = weight.cpu().double() * spread(scale.cpu().view(len(scale), -1), block, (300, 256))
    result = to_blocks(weight, scale, **arguments, max_error=math.inf)
    assert_re_based(result, exact)
    assert result.scale.min() >= 2**-126 and result.scale.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_dtypes_of_powers_of_two(device, dtype):
    weight, *_ = draw("fp8_32x32", (130, 160), device)
    scale = torch.exp2(torch.randint(-10, 10, (5, 5), device=device).float())
    exact = weight.double() * spread(scale, (32, 32), (130, 160))
    result = to_blocks(weight, scale.to(E8M0).view(dtype) if dtype == torch.uint8 else scale.to(dtype), max_error=1)
    assert_re_based(result, exact.cpu())


@pytest.mark.parametrize("name", [name for name, of in FORMATS.items() if of.inferred])
def test_formats_are_recognised(name):
    """Formats that look alike are told apart by arguments."""
    for shape in ((256, 512), (3, 130, 288)):
        weight, scale, arguments, _ = draw(name, shape)
        arguments.pop("format")
        assert to_blocks(weight, scale, **arguments, max_error=math.inf).report.format == name
    if name == "fp8_channel":
        assert to_blocks(weight, scale[..., None], max_error=math.inf).report.format == name
    if name == "fp8_tensor":
        for number in (torch.tensor(0.5), torch.tensor([[0.5]])):
            assert (to_blocks(weight[0], number).scale == 0.5).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in PACKED])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_in_place(device, name, leading):
    """The result has the same bytes. A weight that is refused stays as it was, and so does its scale."""
    weight, scale, arguments, exact = draw(name, (*leading, 150, 320), device)
    wanted = to_blocks(weight, scale, **arguments, max_error=math.inf)
    before = weight.clone()
    targets = {"out": weight, "scale_out": torch.full_like(wanted.scale, 7)}
    if wanted.report.changed:
        with pytest.raises(ValueError, match="more than max_error=0"):
            to_blocks(weight, scale, **arguments, **targets, max_error=0)
        assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8)) and (targets["scale_out"] == 7).all()
    for limit in (1, math.inf):
        weight.copy_(before)
        result = to_blocks(weight, scale, **arguments, **targets, max_error=limit)
        assert result.weight is weight and result.scale is targets["scale_out"]
        assert torch.equal(weight.view(torch.uint8), wanted.weight.view(torch.uint8))
        assert torch.equal(result.scale, wanted.scale) and str(result.report) == str(wanted.report)


def test_what_has_its_scales_stays_as_it_is():
    weight, scale, *_ = draw("fp8_128x128", (256, 512))
    result = to_blocks(weight, scale)
    assert result.weight.data_ptr() == weight.data_ptr() and torch.equal(result.scale, scale)
    weight, scale, *_ = draw("fp8_tensor", (256, 512))
    result = to_blocks(weight, scale)
    assert result.weight.data_ptr() == weight.data_ptr() and result.scale.shape == (2, 4)
    assert to_blocks(weight[:, :200], scale).weight.stride() == (512, 1)
    weight, scale, *_ = draw("fp8_128x128", (3, 256, 512))
    assert to_blocks(weight, scale).weight.data_ptr() == weight.data_ptr()
    assert to_blocks(weight[..., 1:], scale).weight.stride() == (256 * 512, 512, 1)


def test_rows_that_would_be_lost_are_refused():
    """A row beside a much larger one: e4m3 has no such numbers, and the norm of the whole weight hides it."""
    weight = torch.full((256, 256), 1.5).to(FP8_DTYPE)
    scale = torch.ones(256)
    scale[7] = 2.0**-30
    with pytest.raises(
        ValueError, match=r"change row \[7\] by 1 of its norm.*scaled_gemm multiplies with scales of rows"
    ):
        to_blocks(weight, scale)
    report = to_blocks(weight, scale, max_error=1).report
    assert report.worst_row_error == 1 and report.error < 1e-8 and report.exact.tolist() == [[False] * 2, [True] * 2]


def test_layers_of_re_based_weights(device):
    """The product is that of the exact weight: DeepSeek-V4.1's dense layers, in small."""
    weight, scale, arguments, exact = draw("fp8_32x32", (576, 512), device)
    b, b_scale, report = to_blocks(weight, scale, **arguments)
    x = torch.randn(5, 512, device=device).bfloat16()
    got = fp8_linear(x, b, b_scale, out_dtype=torch.float32).double()
    x_values, x_scale = per_token_cast_to_fp8(x)
    wanted = dequantize(x_values, x_scale).double() @ exact.to(device).t()
    assert ((got - wanted).norm() / wanted.norm()).item() < report.error + (1e-5 if device == "cpu" else 3e-3)


def test_empty_weights():
    for shape in ((0, 256), (4, 0), (0, 128, 128)):
        result = to_blocks(torch.empty(shape).to(FP8_DTYPE), torch.ones(*shape[:-1]), format="fp8_channel")
        assert result.weight.shape == shape and result.report.changed_share == 0
    for n, k in ((0, 256), (4, 0)):
        codes, out = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k).to(FP8_DTYPE)
        for target in (None, out):
            result = to_blocks(codes, torch.ones(n, k // 32), format="mxfp4", out=target)
            assert result.weight.shape == (n, k) and result.weight.dtype == FP8_DTYPE


def _bad(weight=(256, 512), scale=(8, 16), weight_dtype=FP8_DTYPE, scale_dtype=torch.float32, **arguments):
    weight = torch.zeros(weight, dtype=torch.uint8) if isinstance(weight, tuple) else weight
    scale = torch.ones(scale) if isinstance(scale, tuple) else scale
    weight = weight.view(weight_dtype) if isinstance(weight, torch.Tensor) and weight.dtype == torch.uint8 else weight
    return weight, scale.to(scale_dtype) if isinstance(scale, torch.Tensor) else scale, arguments


def _with_nan(x: torch.Tensor) -> torch.Tensor:
    x.view(torch.uint8)[3, 7] = 0x7F
    return x


BAD = [
    (_bad(scale=(9, 16)), ValueError, r"fits no format. Scales would be \[2, 4\] \(fp8_128x128\), \[8, 16\] \(fp8_32"),
    (_bad(scale=(16, 8)), ValueError, "fits no format"),
    (_bad(format="fp8_64x64"), ValueError, "format is 'fp8_64x64'; use one of 'fp8_128x128', 'fp8_32x32'"),
    (_bad(format="mxfp8"), ValueError, r"format 'mxfp8' has a weight of .*for each 1 x 32 elements, here \[256, 16\]"),
    (_bad(format="mxfp4"), ValueError, "has a weight of e2m1, two in a byte"),
    (_bad((128, 64), (128, 4), torch.uint8, torch.bfloat16), ValueError,
     "do not say which.*Pass format='mxfp4' or format='int4_32'$"),
    (_bad((128, 8), (128, 1), torch.uint8, torch.uint8), ValueError, "Pass format='mxfp4' or format='nvfp4'"),
    (_bad((256, 512), (8, 16), torch.uint8), ValueError, "Where its bytes are FP8, pass weight.view"),
    (_bad((256, 512), (256, 1), torch.int8), ValueError, "INT8 is multiplied by deep_tile.scaled_gemm"),
    (_bad(scale=(256, 16), scale_dtype=FP8_DTYPE), TypeError, "format 'mxfp8' has scales of"),
    (_bad(scale=(256, 16), scale_dtype=FP8_DTYPE, format="mxfp8"), TypeError, "format 'mxfp8' has scales of"),
    (_bad((128, 64), (128, 8), torch.uint8, format="nvfp4", global_scale=1.0), TypeError, "has scales of torch.float8"),
    (_bad((128, 64), (128, 8), torch.uint8, FP8_DTYPE), ValueError, "pass global_scale.*weight_scale_2, or 1 / weight"),
    (_bad((128, 64), (128, 8), torch.uint8, FP8_DTYPE, global_scale=0.0), ValueError, "must be positive"),
    (_bad((128, 64), (128, 8), torch.uint8, FP8_DTYPE, global_scale=math.nan), ValueError, "must be positive"),
    (_bad((128, 64), (128, 8), torch.uint8, FP8_DTYPE, global_scale="1"), TypeError, "global_scale is '1'"),
    (_bad((128, 64), (128, 8), torch.uint8, FP8_DTYPE, global_scale=torch.ones(3)), ValueError, "must be one number"),
    (_bad((128, 64), (128, 8), torch.uint8, FP8_DTYPE, global_scale=torch.ones(()).int()), TypeError, "is torch.int32"),
    (_bad(global_scale=1.0), ValueError, "format 'fp8_32x32' has none"),
    (_bad(weight_dtype=torch.float8_e5m2), TypeError, "weight is torch.float8_e5m2; it must be torch.float8_e4m3fn"),
    (_bad(torch.zeros(256, 512)), TypeError, "weight is torch.float32.*quantize_weight"),
    (_bad([[1.0]]), TypeError, "weight must be a torch.Tensor"),
    (_bad(scale=None), TypeError, "scale must be a torch.Tensor"),
    (_bad(scale_dtype=torch.int32), TypeError, "scale is torch.int32.*four blocks of k"),
    (_bad((512,)), ValueError, r"weight has shape \[512\]"),
    (_bad(scale=torch.ones(8, 16, device="meta")), ValueError, "on meta"),
    (_bad(scale=torch.full((8, 16), math.inf)), ValueError, r"scale holds NaN or infinity, first at \[0, 0\]"),
    (_bad(_with_nan(_bad()[0])), ValueError, r"weight holds NaN, first in row \[3\]"),
    (_bad(first_row=32), ValueError, "fits no format"),
    (_bad(first_row=-1), ValueError, "first_row is -1"),
    (_bad(first_column=1.5), TypeError, "first_column is 1.5"),
    (_bad(max_error=-1), ValueError, "max_error is -1"),
    (_bad(max_error=math.nan), ValueError, "max_error is nan"),
    (_bad(max_error=None), TypeError, "max_error is None"),
    (_bad(out=torch.zeros(256, 512)), TypeError, "out is"),
    (_bad(out=torch.zeros(256, 511).to(FP8_DTYPE)), ValueError, "out has shape"),
    (_bad(out=torch.zeros(512, 256).to(FP8_DTYPE).t()), ValueError, "rows of out must be dense"),
    (_bad(scale_out=torch.zeros(8, 16)), ValueError, r"scale_out has shape .* must be \[2, 4\]"),
    (_bad(scale_out=torch.zeros(2, 4, requires_grad=True)), RuntimeError, "scale_out requires a gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(call, kind, message):
    weight, scale, arguments = call
    with pytest.raises(kind, match=message):
        to_blocks(weight, scale, **arguments)


def test_nothing_is_written_of_what_is_refused(monkeypatch):
    """Nothing is written even where the NaN that is refused comes last."""
    monkeypatch.setattr(blocks, "ELEMENTS_AT_ONCE", 1)
    weight, scale, *_ = draw("fp8_32x32", (256, 512))
    weight.view(torch.uint8)[255, 511] = 0xFF
    before, scale_out = weight.view(torch.uint8).clone(), torch.full((2, 4), 7.0)
    with pytest.raises(ValueError, match=r"weight holds NaN, first in row \[255\]"):
        to_blocks(weight, scale, out=weight, scale_out=scale_out, max_error=math.inf)
    assert torch.equal(weight.view(torch.uint8), before) and (scale_out == 7).all()


def test_memory_that_is_shared_in_another_way_is_refused():
    memory = torch.zeros(257, 512).to(FP8_DTYPE)
    with pytest.raises(ValueError, match="out overlaps weight without being it"):
        to_blocks(memory[:256], torch.ones(8, 16), out=memory[1:])
    to_blocks(memory[:128], torch.ones(4, 16), out=memory[128:256])
