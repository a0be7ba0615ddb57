"""`swiglu_gradient_cast_both` against torch's gradient, eager and traced, and refusals.

test_cast_kernels.py has the kernels' bits without a GPU; here they run on one.
"""

import pytest
import torch
import torch.nn.functional as F
from test_both import assert_same, joined

from deep_tile import dequantize, per_block_cast_to_fp8, per_token_cast_to_fp8, swiglu_gradient_cast_both
from deep_tile.reference import relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(300, 256), (1, 128), (130, 72), (257, 384), (0, 128), (5, 0)]
ROUNDING = 0.04
"""Relative error of normal numbers in e4m3."""


def draw(rows, columns, device="cpu"):
    dh, gate_up = (torch.randn(rows, n, device=device).bfloat16() for n in (columns, 2 * columns))
    return dh, gate_up, torch.rand(rows, device=device)


def exact(dh, gate_up, share):
    """Gradients of gate_up and share, and h, by torch in float64."""
    x, share = gate_up.double().requires_grad_(), share.double().requires_grad_()
    gate, up = x.chunk(2, 1)
    h = F.silu(gate) * up * share[:, None]
    return *torch.autograd.grad(h, (x, share), dh.double()), h.detach()


def assert_near(got, wanted, bound):
    assert got.shape == wanted.shape
    assert not got.numel() or relative_error(got.double(), wanted) < bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("blocks", [False, True])
def test_gradient_is_torchs(shape, blocks, device):
    dh, gate_up, share = draw(*shape, device)
    gradient, of_share, h = exact(dh, gate_up, share)
    made = swiglu_gradient_cast_both(dh, gate_up, share=share, blocks=blocks)
    assert_near(dequantize(made.a, made.a_scale), gradient, ROUNDING)
    assert_near(dequantize(made.at, made.at_scale).t(), gradient, ROUNDING)
    assert_near(dequantize(made.ht, made.ht_scale).t(), h, ROUNDING)
    assert_near(made.share, of_share, 1e-5)
    if 0 not in shape:
        plain = swiglu_gradient_cast_both(dh, gate_up, share=torch.ones_like(share), blocks=blocks)
        assert_same(swiglu_gradient_cast_both(dh, gate_up, blocks=blocks)[:6], plain[:6])


@pytest.mark.parametrize("device", DEVICES)
def test_casts_are_those_that_are_joined(device):
    """Sigmoids are exact, so that the gradient and h are known to the bit. A second call takes the known launch."""
    dh, gate_up, share = draw(300, 256, device)
    gate_up[:, :256] = torch.tensor([0.0, 200.0, -200.0], device=device)[torch.randint(3, (300, 256), device=device)]
    (gate, up), d = gate_up.float().chunk(2, 1), dh.float() * share[:, None]
    sigmoid = torch.where(gate == 0, 0.5, (gate > 0).float())
    gradient = torch.cat([d * up * sigmoid, d * (gate * sigmoid)], 1).bfloat16()
    h = (gate * sigmoid * up * share[:, None]).bfloat16()
    for options in ({}, {"amax_floor": 1.0}, {"round_scale": "pow2"}, {"exact": "reciprocal"}):
        for blocks in (False, True) * 2:
            made = swiglu_gradient_cast_both(dh, gate_up, share=share, blocks=blocks, **options)
            assert_same(made[:4], joined(gradient, **options))
            assert_same(made[4:6], joined(h, **options)[2:] if not blocks else per_block_cast_to_fp8(h.t(), **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [False, True])
def test_codes_of_gates_and_ups(share, device):
    dh, gate_up, of_rows = draw(300, 256, device)
    codes, scale = per_token_cast_to_fp8(gate_up)
    options = {"share": of_rows} if share else {}
    made = swiglu_gradient_cast_both(dh, codes, scale, **options)
    gradient, of_share, h = exact(dh, dequantize(codes, scale), of_rows if share else torch.ones_like(of_rows))
    assert_near(dequantize(made.a, made.a_scale), gradient, ROUNDING)
    assert_near(dequantize(made.ht, made.ht_scale).t(), h, ROUNDING)
    if share:
        assert_near(made.share, of_share, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [256, 72])
@pytest.mark.parametrize("codes", [False, True])
def test_groups(columns, codes, device):
    """Rows of no group are left out, whatever they hold."""
    dh, gate_up, share = draw(640, columns, device)
    offs = torch.tensor([100, 128, 300, 512], dtype=torch.int32, device=device)
    lives = torch.zeros(640, dtype=torch.bool, device=device)
    lives[:100] = lives[128:300] = lives[384:512] = True
    gradient, of_share, h = (torch.where(lives.view(-1, *[1] * (x.dim() - 1)), x, 0) for x in exact(dh, gate_up, share))
    for x in (dh, gate_up, share):
        x[~lives] = float("nan")
    given = per_token_cast_to_fp8(gate_up) if codes else (gate_up,)
    made = swiglu_gradient_cast_both(dh, *given, share=share, offs=offs)
    bound = ROUNDING * (2 if codes else 1)
    assert_near(dequantize(made.a, made.a_scale)[lives], gradient[lives], bound)
    blocks = [0, 1, 2, 3]  # of 128 tokens, those in which some live
    for along, scale, wanted in ((made.at, made.at_scale, gradient), (made.ht, made.ht_scale, h)):
        of_blocks = dequantize(along, scale).unflatten(1, (5, 128))[:, blocks].flatten(1)
        assert_near(of_blocks.t(), wanted.unflatten(0, (5, 128))[blocks].flatten(0, 1), bound)
    assert_near(made.share[lives], of_share[lives], 0.05 if codes else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device):
    dh, gate_up, _ = draw(200, 256, device)
    wanted = swiglu_gradient_cast_both(dh, gate_up)
    for x in (
        gate_up.t().contiguous().t(),
        torch.cat([gate_up] * 2, 1)[:, 512:],
        torch.cat([gate_up[:, :3], gate_up], 1)[:, 3:],
    ):
        assert_same(swiglu_gradient_cast_both(dh, x)[:6], wanted[:6])
    assert_same(swiglu_gradient_cast_both(torch.stack([dh] * 2, 1)[:, 0], gate_up)[:6], wanted[:6])


WRONG = {
    "dh in FP32": ({"dh": lambda x: x.float()}, TypeError, "dh is a tensor of torch.float32; it must be"),
    "gate_up in FP8 alone": ({"gate_up": lambda x: x.to(torch.float8_e4m3fn)}, TypeError,
                             "gate_up is a tensor of torch.float8_e4m3fn.*pass gate_up_scale, too"),
    "gate_up of one half": ({"gate_up": lambda x: x[:, :40]}, ValueError, r"gate_up has shape \[130, 40\]; for dh of"),
    "a share in BF16": ({"share": lambda x: x.bfloat16()}, TypeError, "share is a tensor of torch.bfloat16"),
    "a share too few": ({"share": lambda x: x[1:]}, ValueError, r"share has shape \[129\]"),
    "a gradient": ({"dh": lambda x: x.clone().requires_grad_()}, RuntimeError, "dh requires a gradient|x requires"),
    "blocks of groups": ({"offs": lambda _: torch.tensor([130], dtype=torch.int32), "blocks": lambda _: True},
                         ValueError, "blocks is given together with offs"),
    "no list": ({"dh": lambda x: x.tolist()}, TypeError, "dh is a list"),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(change, error, message, device):
    dh, gate_up, share = draw(130, 40, device)
    given = {"dh": dh, "gate_up": gate_up, "share": share}
    given |= {name: make(given.get(name)) for name, make in change.items()}
    given |= {name: x.to(device) for name, x in given.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=message):
        swiglu_gradient_cast_both(**given)


@pytest.mark.gpu
def test_large():
    """More than 2**31 bytes on every side, and as the CPU has it."""
    dh, gate_up = (torch.randn(66_000, n, device="cuda", dtype=torch.bfloat16) for n in (14_336, 28_672))
    made = swiglu_gradient_cast_both(dh, gate_up)
    rows = slice(65_920, 66_000)
    gradient, _, h = exact(dh[rows], gate_up[rows], torch.ones(80, device="cuda"))
    assert_near(dequantize(made.a[rows], made.a_scale[rows]), gradient, ROUNDING)
    first = rows.start // 128
    for along, scale, wanted in ((made.at, made.at_scale, gradient), (made.ht, made.ht_scale, h)):
        assert_near(dequantize(along[:, rows], scale[:, first:]).t(), wanted, ROUNDING)
