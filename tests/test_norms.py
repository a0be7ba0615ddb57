"""`torch.ops.deep_tile.add_rms_norm_cast_to_fp8` against its definition's bounds, eager and traced, and refusals.

test_cast_kernels.py has its kernel's numbers without a GPU; here it runs on one.
"""

import pytest
import torch
from helpers import assert_cast_within, norm_bounds

from deep_tile import dequantize, norms
from deep_tile.reference import relative_error

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SHAPES = [(1, 4096), (5, 272), (33, 2048), (3, 2064), (130, 5120), (2, 8192), (3, 8208), (7, 100), (0, 256)]
EPSILON = 1e-5
OP = torch.ops.deep_tile.add_rms_norm_cast_to_fp8


def draw(rows, columns, device="cpu", exponent=0):
    x, residual = torch.randn(2, rows, columns, device=device).mul_(2.0**exponent).bfloat16()
    return x, residual, torch.randn(columns, device=device).bfloat16()


def same_bits(x, y):
    x, y = (each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (x, y))
    return torch.equal(x, y)


def assert_norm_cast(given, made, amax_floor=norms.NormOptions._field_defaults["amax_floor"]):
    x, residual, _ = given
    out, scale, total = (y.cpu() for y in made)
    assert same_bits(total, (x + residual).cpu())
    assert_cast_within(norm_bounds(*given, EPSILON), out, scale, amax_floor)


@DEVICES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("exponent", [0, -30, 30])
def test_results_are_within_bounds(shape, exponent, device, guarded_results):
    """By every kernel, on a GPU; nothing beside results is written."""
    given = draw(*shape, device, exponent)
    made = OP(*given, epsilon=EPSILON)
    assert_norm_cast(given, made)
    assert [tuple(x.shape) for x in made] == [shape, (shape[0], -(-shape[1] // 128)), shape]
    assert all(same_bits(x, y) for x, y in zip(made, OP(*given, epsilon=EPSILON), strict=True))


@DEVICES
def test_a_row_depends_on_no_other(device):
    given = x, residual, weight = draw(65, 4096, device)
    rows = [OP(x[i : i + 1], residual[i : i + 1], weight, epsilon=EPSILON) for i in (0, 64)]
    for one, every in zip(zip(*rows, strict=True), OP(*given, epsilon=EPSILON), strict=True):
        assert same_bits(torch.cat(one), every[[0, 64]])


@DEVICES
def test_any_strides(device):
    x, residual, weight = draw(6, 256, device)
    wanted = OP(x, residual, weight, epsilon=EPSILON)
    for other in (
        x.t().contiguous().t(),
        torch.cat([x] * 2, 1)[:, 256:],
        torch.cat([x[:, :3], x], 1)[:, 3:],
        torch.stack([x] * 2, 1)[:, 0],
    ):
        for given in ((other, residual, weight), (residual, other, weight)):
            assert all(map(same_bits, OP(*given, epsilon=EPSILON), wanted))
    assert all(map(same_bits, OP(x, residual, torch.stack([weight] * 2, 1)[:, 0], epsilon=EPSILON), wanted))


@DEVICES
def test_zeros_floors_and_what_is_not_finite(device):
    x, residual, weight = draw(4, 384, device)
    x[0], residual[0] = 0, 0
    x[1, 5], x[2, 300] = float("inf"), float("nan")
    out, scale, _ = (y.cpu() for y in OP(x, residual, weight, epsilon=EPSILON, amax_floor=1e-10))
    wide = dequantize(out, scale)
    assert (wide[0] == 0).all() and torch.allclose(scale[0], torch.full((3,), 1e-10 / 448), rtol=1e-6)
    assert wide[1, :128].isnan().all() and (wide[1, 128:] == 0).all() and wide[2].isnan().all()
    assert wide[3].isfinite().all()


WRONG = {
    "three dimensions": (lambda x, r, w: (x[None], r[None], w), ValueError, r"x has shape \[1, 5, 272\]; it must be"),
    "a residual too short": (lambda x, r, w: (x, r[1:], w), ValueError, r"residual has shape \[4, 272\]; for x of"),
    "a weight too short": (lambda x, r, w: (x, r, w[1:]), ValueError, r"weight has shape \[271\]"),
    "x in FP32": (lambda x, r, w: (x.float(), r, w), TypeError, "x is a tensor of float32"),
    "a weight in FP32": (lambda x, r, w: (x, r, w.float()), TypeError, "weight is a tensor of float32"),
    "a gradient": (lambda x, r, w: (x, r, w.requires_grad_()), RuntimeError, "weight requires a gradient"),
}


@DEVICES
@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(change, error, message, device):
    with pytest.raises(error, match=message):
        OP(*change(*draw(5, 272, device)), epsilon=EPSILON)


@pytest.mark.gpu
def test_large():
    """More than 2**31 bytes."""
    given = x, residual, weight = draw(140_000, 8192, "cuda")
    made = OP(*given, epsilon=EPSILON)
    rows = slice(139_990, None)
    assert_norm_cast((x[rows], residual[rows], weight), [y[rows] for y in made])


def test_a_gpus_long_rows_are_torchs():
    assert norms.fits(8192) and not norms.fits(8208) and not norms.fits(100)


def test_the_definition_is_vllms():
    x, residual, weight = draw(9, 512)
    out, scale, _ = OP(x, residual, weight, epsilon=EPSILON)
    wanted = torch.nn.functional.rms_norm(x.float() + residual.float(), (512,), weight.float(), EPSILON)
    assert relative_error(dequantize(out, scale), wanted) < 0.04
