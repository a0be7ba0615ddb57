"""Casts with the sizes, options and tolerances that other projects publish for theirs, as data.

Read in 2026, in vLLM's tests/kernels/quantization (test_block_fp8.py, test_per_token_group_quant.py and
test_fp8_quant_group.py), in SGLang's python/sglang/test/test_block_fp8.py and in its sgl-kernel
(test_per_token_group_quant_8bit.py with test_utils.py): what they compare two casts with. Of their groups, those of
128. Here ours is compared with plain torch. Small ones run on a CPU, all of them on a GPU.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from deep_tile import per_token_cast_to_fp8


class Tolerance(NamedTuple):
    """The permitted distance of two casts.

    Attributes:
        elements, scales: relative and absolute, as `torch.allclose` takes them; None where codes are counted.
        share: share of codes that may differ by one, eight times as many of up to 4096 elements; none differs by two.
    """

    elements: tuple[float, float] | None
    scales: tuple[float, float]
    share: float = 1.0


EXACT = Tolerance((0, 0), (0, 0))


class Peer(NamedTuple):
    """A test of another project.

    Attributes:
        name: the project and the test.
        shapes: shapes of x.
        dtypes: dtypes of x.
        roundings: the scale's rounding.
        layouts: the scale's layouts.
        tolerance: between two casts.
        uniform: values are from 0 to 1; else they are normal, eight times as wide.
    """

    name: str
    shapes: list[tuple[int, ...]]
    dtypes: tuple[torch.dtype, ...]
    roundings: tuple[str, ...]
    layouts: tuple[str, ...]
    tolerance: Tolerance
    uniform: bool = False


BF16 = (torch.bfloat16,)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ROUNDINGS, LAYOUTS = ("none", "pow2"), ("row", "m", "m_aligned")
WIDTHS = (512, 4096, 5120, 13824)


def sizes(*lists):
    return list(itertools.product(*lists))


# fmt: off
PEERS = [
    Peer("vllm block", sizes((7, 2050), WIDTHS), BF16, ("none",), LAYOUTS,
         Tolerance((0.15, 1e-8), (1e-5, 1e-8)), uniform=True),
    Peer("vllm block matmul", sizes((1, 7, 8, 83, 4096), (256, 3884, 4096, 13824, 16384)), FLOATS, ROUNDINGS, LAYOUTS,
         Tolerance((0.15, 1e-8), (1e-5, 1e-8)), uniform=True),
    Peer("vllm group", [(31, 128), (32, 128), (63, 256), (64, 256), (16, 512)], BF16, ROUNDINGS, LAYOUTS,
         Tolerance((0.15, 0.15), (0.01, 0.01))),
    Peer("vllm packed",
         [(4, 7168), (1, 7168), (3, 7168), (4, 640), (4, 768), (4, 384), (1, 384), (3, 640), (64, 7168), (128, 14336),
          (127, 7168), (253, 640)],
         BF16, ("pow2",), ("row",), EXACT),
    Peer("vllm input", [(16, 256), (64, 1024), (128, 2048), (8, 513), (4, 8, 512), (2, 3, 4, 256), (16, 32)], BF16,
         ("none",), LAYOUTS, Tolerance(None, (1e-6, 1e-8), share=0.002)),
    Peer("sglang block", sizes((7, 83, 2048), WIDTHS), FLOATS, ("none",), ("row",),
         Tolerance((0.20, 1e-8), (1e-5, 1e-8)), uniform=True),
    Peer("sglang kernel",
         sizes((1, 4, 16, 64, 127, 128, 512, 1024, 4096, 8192), (512, 1024, 1536, 2048, 4096, 7168, 16384)), BF16,
         ROUNDINGS, LAYOUTS, Tolerance(None, (1e-3, 1e-5), share=0.005)),
    Peer("sglang first kernel", sizes((1, 2, 8, 128), (64, 256, 2048), (256,)), (torch.float16,), ("none",), ("row",),
         Tolerance((0.15, 1e-8), (1e-5, 1e-8))),
]
# fmt: on
SMALL = 1 << 18
"""Elements, at most, of a cast on a CPU."""

AMAX_FLOOR = 1e-10
"""The lower bound of amax in all of these tests."""


def reference(x, round_scale):
    """The projects' own reference in plain torch, but for short groups, and with a division by a tensor: torch on a GPU
    multiplies with the reciprocal of a number, one rounding off, so that some quotients of millions, halfway between
    two codes, get the other code."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    scale = amax / torch.full_like(amax, 448)
    if round_scale == "pow2":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    quantized = (groups / scale).clamp(-448, 448).flatten(-2)[..., : x.shape[-1]]
    return quantized.to(torch.float8_e4m3fn), scale.squeeze(-1)


def check(peer, shape, dtype, device):
    draw = torch.rand if peer.uniform else torch.randn
    x = draw(shape, dtype=dtype, device=device) * (1 if peer.uniform else 8)
    for round_scale in peer.roundings:
        wanted, wanted_scale = reference(x, round_scale)
        for layout in peer.layouts:
            got, scale = per_token_cast_to_fp8(x, scale_layout=layout, amax_floor=AMAX_FLOOR, round_scale=round_scale)
            case = f"{peer.name} {shape} {dtype} {round_scale} {layout}"
            relative, absolute = peer.tolerance.scales
            assert torch.allclose(scale, wanted_scale, rtol=relative, atol=absolute), case
            assert_close(got, wanted, peer.tolerance, case)


def assert_close(got, wanted, tolerance, case):
    if tolerance.elements is not None:
        relative, absolute = tolerance.elements
        assert torch.allclose(got.float(), wanted.float(), rtol=relative, atol=absolute), case
    codes, wanted_codes = (y.contiguous().view(torch.uint8).int() for y in (got, wanted))
    apart = (codes - wanted_codes).abs()
    share = tolerance.share * (8 if apart.numel() <= 4096 else 1)
    assert apart.max() <= 1 and (apart == 1).float().mean() <= share, case


EACH_PEER = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)


@EACH_PEER
def test_as_close_as_peers_ask_on_the_cpu(peer):
    shapes = [shape for shape in peer.shapes if torch.Size(shape).numel() <= SMALL]
    assert shapes
    for shape, dtype in itertools.product(shapes, peer.dtypes):
        check(peer, shape, dtype, "cpu")


@pytest.mark.gpu
@EACH_PEER
def test_as_close_as_peers_ask_on_a_gpu(peer):
    for shape, dtype in itertools.product(peer.shapes, peer.dtypes):
        check(peer, shape, dtype, "cuda")


def test_scales_that_vllm_states():
    """For zeros the scale is the next power of two above 1e-10, vLLM's lower bound; for 672 everywhere it is 2."""
    floor = 448 * 1e-10
    _, scale = per_token_cast_to_fp8(torch.zeros(4, 7168).bfloat16(), amax_floor=floor, round_scale="pow2")
    assert (scale.view(torch.int32) >> 23 == 94).all()
    _, scale = per_token_cast_to_fp8(torch.full((4, 7168), 672.0).bfloat16(), amax_floor=floor, round_scale="pow2")
    assert (scale == 2).all()
