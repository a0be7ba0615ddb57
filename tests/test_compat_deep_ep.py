"""DeepEP's layouts on deep_tile: the bounds of an expanded dispatch, by its rule, and experts on its rows."""

from types import SimpleNamespace

import pytest
import torch
from stand_ins import relative_error, stacked

from deep_tile import dequantize, fp8_grouped_gemm, per_token_cast_to_fp8
from deep_tile.compat import deep_ep

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
LAYOUTS = [
    ((3, 0, 130, 1), 1, (3, 3, 133, 134)),
    ((3, 0, 130, 1), 128, (3, 128, 258, 385)),
    ((3, 0, 130, 1), 16, (3, 16, 146, 161)),
    ((0, 0, 0, 0), 1, (0, 0, 0, 0)),
    ((0, 0, 5, 0), 64, (0, 0, 5, 64)),
    ((1, 1, 1, 1), 1, (1, 2, 3, 4)),
]
"""Rows that each expert receives, the alignment, and psum_num_recv_tokens_per_expert: the row behind each expert's
last, where all experts before it are rounded up."""


def received(counts, alignment, psum, device):
    """A handle of DeepEP, rows of which only the experts' are written, and each row's expert, -1 for none."""
    rows = -(-psum[-1] // alignment) * alignment + 3  # of a buffer that has room for more
    x = torch.full((rows, 256), float("nan"), dtype=torch.bfloat16, device=device)
    expert = torch.full((rows,), -1, device=device)
    for index, (count, end) in enumerate(zip(counts, psum, strict=True)):
        x[end - count : end] = torch.randn(count, 256, device=device, dtype=torch.bfloat16)
        expert[end - count : end] = index
    handle = SimpleNamespace(psum_num_recv_tokens_per_expert=torch.tensor(psum, dtype=torch.int32, device=device))
    return handle, x, expert


def dequantized(weights):
    return torch.stack([dequantize(*pair, block=(128, 128)) for pair in zip(*weights, strict=True)])


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bounds_are_those_of_products(device, layout):
    handle, x, expert = received(*layout, device)
    b, b_scale = stacked(4, 136, 256, device)
    a = per_token_cast_to_fp8(x, offs=handle.psum_num_recv_tokens_per_expert)
    out = torch.zeros(len(x), 136, dtype=torch.bfloat16, device=device)
    fp8_grouped_gemm(*a, b, b_scale, out=out, **deep_ep.bounds(handle, layout[1]))
    lives = expert >= 0
    wanted = torch.einsum("mk,mnk->mn", x[lives].float(), dequantized((b, b_scale))[expert[lives]])
    assert not lives.any() or relative_error(out[lives], wanted) < 0.05
    assert not out[~lives].any()


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("form", ["wide", "fp8"])
@pytest.mark.parametrize("weighs", [False, True])
def test_experts_multiply(device, layout, form, weighs):
    handle, x, expert = received(*layout, device)
    gate_up, down = stacked(4, 256, 256, device), stacked(4, 256, 128, device)
    weights = torch.rand(len(x), device=device) if weighs else None
    given = x if form == "wide" else per_token_cast_to_fp8(x, scale_layout="row")
    bounds = handle if form == "wide" else handle.psum_num_recv_tokens_per_expert
    out = deep_ep.expanded_experts(given, bounds, gate_up, down, weights, alignment=layout[1], expected_rows=32)
    lives = expert >= 0
    between = torch.einsum("mk,mnk->mn", x[lives].float(), dequantized(gate_up)[expert[lives]])
    gate, up = between.chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    wanted = torch.einsum("mk,mnk->mn", h, dequantized(down)[expert[lives]])
    assert out.shape == x.shape
    assert relative_error(out[lives], wanted * weights[lives, None] if weighs else wanted) < 0.08


@pytest.mark.parametrize(
    ("handle", "kind", "said"),
    [
        (SimpleNamespace(), TypeError, "a NoneType"),
        (SimpleNamespace(psum_num_recv_tokens_per_expert=[3, 4]), TypeError, "a list"),
        (torch.zeros(4, dtype=torch.int64), TypeError, "torch.int64"),
        (torch.zeros(4, 2, dtype=torch.int32), ValueError, r"\[4, 2\]"),
        (torch.zeros(8, dtype=torch.int32)[::2], ValueError, "contiguous"),
    ],
    ids=str,
)
def test_what_is_no_handle_is_refused(handle, kind, said):
    with pytest.raises(kind, match=said):
        deep_ep.bounds(handle)


@pytest.mark.parametrize(
    "weights", [torch.ones(3), torch.ones(137).bfloat16(), torch.ones(137, 1), torch.ones(137, device="meta")], ids=str
)
def test_wrong_weights_are_refused(weights):
    handle, x, _ = received(*LAYOUTS[0], "cpu")
    with pytest.raises(ValueError, match=r"weights is .*\[137\] of torch.float32"):
        deep_ep.expanded_experts(x, handle, stacked(4, 256, 256), stacked(4, 256, 128), weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": [1.0] * 137}, "weights is a list; pass a tensor, or None"),
        ({"gate_up": torch.ones(4, 256, 256)}, "gate_up is a Tensor; pass a pair"),
        ({"down": (None, None, None)}, "down is a tuple; pass a pair"),
    ],
    ids=("weights", "gate_up", "down"),
)
def test_what_is_no_pair_and_no_tensor_is_refused(change, said):
    handle, x, _ = received(*LAYOUTS[0], "cpu")
    given = {"gate_up": stacked(4, 256, 256), "down": stacked(4, 256, 128)} | change
    with pytest.raises(TypeError, match=said):
        deep_ep.expanded_experts(x, handle, **given)
