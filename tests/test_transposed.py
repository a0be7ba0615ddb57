"""The cast along tokens: offsets that lie, refusals, graphs and large tensors.

Its bits are in test_drawn_casts.py, its kernels' without a GPU in test_cast_kernels.py.
"""

import pytest
import torch
from helpers import GuardedOut
from test_quantize import wide_matrix

from deep_tile import per_token_cast_to_fp8, transposed_cast_to_fp8
from deep_tile.config import ceil_div, round_up
from deep_tile.quantize import FP8_DTYPE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
POISON = 0x55


def poisoned(columns, tokens, device):
    """`out` between guards, filled with a byte that no code of these tests is, and a scale of sevens."""
    guarded = GuardedOut(columns, tokens, device=device, stride=round_up(tokens, 16), dtype=FP8_DTYPE)
    guarded.out.view(torch.uint8).fill_(POISON)
    return guarded, torch.full((columns, ceil_div(tokens, 128)), 7.0, device=device)


OFFS = {
    "one group": ([700], 128),
    "ends within 128": ([5, 130, 128 + 256 + 1, 700], 128),
    "empty groups": ([0, 0, 128, 128, 300, 300, 300], 128),
    "no tokens": ([0, 0], 128),
    "wider alignment": ([100, 300, 512 + 3], 256),
    "as wide as can be": ([1], 1024),
    "beyond the last token": ([200, 2**31 - 1], 128),
    "falling": ([400, 100, 500], 128),
    "negative": ([-5, -(2**31), 200], 128),
    "many": (list(range(0, 700, 1)), 128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OFFS)
def test_offsets_that_lie_write_the_definitions_bits(name):
    offs, alignment = OFFS[name]
    x = wide_matrix(700, 131, torch.float32)
    results = []
    for device in ("cpu", "cuda"):
        guarded, scale = poisoned(131, 700, device)
        given = torch.tensor(offs, dtype=torch.int32, device=device)
        transposed_cast_to_fp8(x.to(device), offs=given, alignment=alignment, out=guarded.out, scale_out=scale)
        results.append((guarded.out.cpu().view(torch.uint8), scale.cpu()))
        guarded.assert_guards_intact()
    assert all(map(torch.equal, *results))


WRONG = {
    "x of integers": (lambda g: {"x": g["x"].int()}, TypeError, "x is a tensor of int32; the cast takes"),
    "x of one dimension": (lambda g: {"x": g["x"][0]}, ValueError, r"x has shape \[136\]; it must be \[s, k\]"),
    "x of three": (lambda g: {"x": g["x"][None]}, ValueError, "x has shape .* one row per token"),
    "alignment": (lambda g: {"alignment": 64}, ValueError, "alignment is 64; .*power of two from 128 to 1024"),
    "alignment is no power": (lambda g: {"alignment": 384}, ValueError, "alignment is 384"),
    "alignment of a list": (lambda g: {"alignment": []}, ValueError, r"alignment is \[\]"),
    "amax_floor": (lambda g: {"amax_floor": -1}, ValueError, "amax_floor is -1; it must be"),
    "exact": (lambda g: {"exact": "no"}, ValueError, "exact is 'no'; use"),
    "layout": (lambda g: {"scale_layout": "n"}, ValueError, "scale_layout is 'n'; use one of"),
    "offs of int64": (lambda g: {"offs": g["offs"].long()}, TypeError, "offs is a tensor of int64; it must be"),
    "no offs": (lambda g: {"offs": g["offs"][:0]}, ValueError, "offs has shape .*at least"),
    "rows of floats": (lambda g: {"rows": torch.ones(3)}, TypeError, "rows is a tensor of float32"),
    "out not transposed": (lambda g: {"out": g["out"].t()}, ValueError, r"out has shape .* must be \[136, 300\]"),
    "out of bfloat16": (lambda g: {"out": g["out"].bfloat16()}, TypeError, "out is a tensor of bfloat16"),
    "out by columns": (lambda g: {"out": g["out"].t().contiguous().t()}, ValueError,
                       "out must have a unit column stride"),
    "scale_out": (lambda g: {"scale_out": g["scale_out"].t()}, ValueError, r"scale_out has shape .*\[136, 3\]"),
}  # fmt: skip


@EACH_DEVICE
@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_refused(device, change, error, message):
    guarded, scale = poisoned(136, 300, device)
    good = {"x": torch.ones(300, 136, device=device), "out": guarded.out, "scale_out": scale}
    good["offs"] = torch.tensor([100, 300], dtype=torch.int32, device=device)
    with pytest.raises(error, match=message):
        transposed_cast_to_fp8(**(good | change(good)))
    assert (guarded.out.view(torch.uint8) == POISON).all() and (scale == 7).all()


@pytest.mark.gpu
def test_large():
    """More tiles than thread blocks that run at once, and offsets beyond 2**31 elements of x."""
    x = torch.randn(65_664, 33_000, device="cuda", dtype=torch.bfloat16)
    out, scale = transposed_cast_to_fp8(x)
    for columns in (slice(0, 300), slice(16_000, 16_300), slice(32_800, 33_000)):
        wanted, wanted_scale = per_token_cast_to_fp8(x[:, columns].t().contiguous())
        assert torch.equal(out[columns].view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scale[columns], wanted_scale)
