"""Scaled products of the sizes, formats and tolerances that torch publishes for its own on Hopper, as data.

Read in 2026, in PyTorch's test/test_scaled_matmul_cuda.py: the cases that its cuBLASLt, or for groups its CUTLASS,
runs on compute capability 9.0. Here they go through `torch_compat`. All run on a CPU, by the reference, and on a GPU.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from deep_tile import scaled_gemm, torch_compat

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

TENSOR, ROWS = ScalingType.TensorWise, ScalingType.RowWise
TOKENS, WEIGHTS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Tolerance(NamedTuple):
    """The permitted distance of a product from that of its operands' values.

    Attributes:
        relative, absolute: tolerances of elements, as `torch.allclose` takes them.
        cosine: least cosine of both as vectors, also with the product of the unquantised values.
    """

    relative: float = 0.0
    absolute: float = 0.0
    cosine: float | None = None


EXACT = Tolerance()


class Peer(NamedTuple):
    """A test of torch's.

    Attributes:
        name: the test's name.
        sizes: m, n and k.
        recipes: the scales' recipes of a and b.
        values: the values of a and b, names in `VALUES`.
        scales: "of data": a block's largest number becomes the format's; "ones but two": but for the first of a and the
            last of b, which are 0.25; or a number each for a and b, whose values are taken as they are.
        tolerances: tolerances by the result's format.
        formats: formats of a and b.
        bias: None; "normal", of the result's format; or a number.
        fast: values of `use_fast_accum`.
    """

    name: str
    sizes: list[tuple[int, int, int]]
    recipes: list[tuple[ScalingType, ScalingType]]
    values: list[tuple[str, str]]
    scales: str | tuple[float, float]
    tolerances: dict[torch.dtype | None, Tolerance]
    formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    bias: str | float | None = None
    fast: tuple[bool, ...] = (False,)


VALUES: dict[str, Callable[[int, int, str], torch.Tensor]] = {
    "eye": lambda rows, k, device: torch.eye(rows, k, device=device),
    "zeros": lambda rows, k, device: torch.zeros(rows, k, device=device),
    "ones": lambda rows, k, device: torch.ones(rows, k, device=device),
    "halves": lambda rows, k, device: torch.full((rows, k), 0.5, device=device),
    "quarters": lambda rows, k, device: torch.full((rows, k), 0.25, device=device),
    "uniform": lambda rows, k, device: torch.rand(rows, k, device=device),
    "normal": lambda rows, k, device: torch.randn(rows, k, device=device),
    "small": lambda rows, k, device: torch.randn(rows, k, device=device) * 1e-3,
    "cubes": lambda rows, k, device: torch.randn(rows, k, device=device).pow(3),
    "bytes": lambda rows, k, device: torch.randint(0, 255, (rows, k), device=device).float(),
}

OF_TENSORS, OF_ROWS = [(TENSOR, TENSOR)], [(ROWS, ROWS)]
OF_BLOCKS = [(TOKENS, TOKENS), (WEIGHTS, TOKENS), (TOKENS, WEIGHTS)]
BLOCK_SIZES = [(256, 768, 512), (384, 128, 1280), (512, 512, 512)]
OF_16_BITS = Tolerance(7e-2, 7e-2)
IN_BLOCKS = {BF16: Tolerance(7e-2, 6e-1, 0.999), FP32: Tolerance(2e-3, 7e-1, 0.999)}


def square(size):
    return [(size, size, size)]


# fmt: off
PEERS = [
    Peer("basics", square(16), OF_TENSORS, [("uniform", "eye")], (1, 1), {None: EXACT}),
    Peer("basics, e4m3 by e5m2", square(32), OF_TENSORS, [("uniform", "eye")], (1, 1), {None: EXACT}, (E4M3, E5M2)),
    Peer("basics, e5m2 by e4m3", square(48), OF_TENSORS, [("uniform", "eye")], (1, 1), {None: EXACT}, (E5M2, E4M3)),
    Peer("basics, fp16", square(64), OF_TENSORS, [("uniform", "eye")], (1, 1), {FP16: EXACT, BF16: EXACT}),
    Peer("basics, fp32", square(96), OF_TENSORS, [("uniform", "eye")], (1, 1), {FP32: EXACT}),
    Peer("basics, bf16", square(80), OF_TENSORS, [("uniform", "eye")], (1, 1), {BF16: EXACT}),
    Peer("scale", square(16), OF_TENSORS, [("halves", "halves")], (1, 1), {BF16: EXACT}, (E4M3, E5M2)),
    Peer("scale of 0.99", square(16), OF_TENSORS, [("halves", "halves")], (1.5, 0.66), {BF16: Tolerance(2**-8)},
         (E4M3, E5M2)),
    Peer("fast accum", square(16), OF_TENSORS, [("halves", "halves")], (1.5, 0.66), {E4M3: EXACT}, (E4M3, E5M2),
         fast=(True,)),
    Peer("emulated", [(16, 32, 16)], OF_TENSORS, [("normal", "normal")], "of data",
         {FP16: OF_16_BITS, BF16: OF_16_BITS, FP32: Tolerance(3e-3, 3e-3)}),
    Peer("bias", [(16, 32, 48)], OF_TENSORS, [("ones", "quarters")], (1, 1), {BF16: EXACT}, bias=4.0),
    Peer("bias of zeros", [(16, 32, 48)], OF_TENSORS, [("zeros", "ones")], (1, 1), {BF16: EXACT}, bias=-3.0),
    Peer("rows that 16 does not divide", [(17, 16, 16)], OF_TENSORS, [("uniform", "uniform")], (1, 1),
         {BF16: Tolerance(2**-7, 1e-2)}, bias="normal"),
    Peer("rows", [(1024, 2048, 512)], OF_ROWS, [("halves", "halves")], (1, 1), {BF16: EXACT}, fast=(True, False)),
    Peer("rows by e5m2", [(1024, 2048, 512)], OF_ROWS, [("halves", "halves")], (1, 1), {BF16: EXACT}, (E4M3, E5M2)),
    Peer("rows, emulated", [(128, 256, 512)], OF_ROWS, [("normal", "normal")], "of data",
         {BF16: OF_16_BITS._replace(cosine=0.999), FP16: OF_16_BITS._replace(cosine=0.999)}, bias="normal"),
    Peer("rows, emulated in fp32", [(128, 256, 512)], OF_ROWS, [("normal", "normal")], "of data",
         {FP32: Tolerance(2e-3, 5e-2, 0.999)}),  # 2.5e-2 off, as torch is: of 14-bit sums (H100, 2026-11-24)
    Peer("blocks of eyes", square(512), OF_BLOCKS, [("eye", "eye")], "of data", IN_BLOCKS),
    Peer("blocks of ones", BLOCK_SIZES, OF_BLOCKS, [("ones", "ones")], "of data", IN_BLOCKS),
    Peer("blocks, scales of one", BLOCK_SIZES, OF_BLOCKS, [("ones", "ones"), ("bytes", "bytes")], (1, 1), IN_BLOCKS),
    Peer("blocks, modified scales", BLOCK_SIZES, OF_BLOCKS, [("ones", "ones")], "ones but two", IN_BLOCKS),
    Peer("blocks, random", BLOCK_SIZES, OF_BLOCKS, [("normal", "small")], "of data", IN_BLOCKS),
    Peer("small blocks", [(256, 128, 256), (256, 256, 128)], OF_BLOCKS, [("cubes", "cubes")], "of data", IN_BLOCKS),
]
# fmt: on


class Quantized(NamedTuple):
    """A matrix [rows, k].

    Attributes:
        codes, scale: FP8 codes and their scale, in torch's layout for `recipe`.
        values: the values of the codes.
        before: the unquantised values.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    recipe: ScalingType
    values: torch.Tensor
    before: torch.Tensor


def block_of(recipe: ScalingType, rows: int, k: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return {TENSOR: (rows, k), ROWS: (1, k), TOKENS: (1, 128), WEIGHTS: (128, 128)}[recipe]


def quantize(x: torch.Tensor, dtype: torch.dtype, recipe: ScalingType, scales: str | float, odd: int) -> Quantized:
    """`scales` as in `Peer`; `odd` is the place of the one that is 0.25."""
    block_rows, block_columns = block_of(recipe, *x.shape)
    blocks = x.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows)).transpose(1, 2)
    largest = torch.finfo(dtype).max
    amax = blocks.abs().amax((2, 3))
    if scales == "of data":
        scale = torch.where(amax > 0, amax / largest, 1.0)
    elif scales == "ones but two":
        scale = torch.ones_like(amax)
        scale.view(-1)[odd] = 0.25
    else:
        scale = torch.full_like(amax, scales)
    each = scale[:, :, None, None]
    codes = (blocks if isinstance(scales, (int, float)) else blocks / each).clamp(-largest, largest).to(dtype)
    values = codes.float().double() * each
    codes, values = (y.transpose(1, 2).reshape(x.shape) for y in (codes, values))
    return Quantized(codes, scale, recipe, values, x)


def laid_out(quantized: Quantized, is_b: bool) -> torch.Tensor:
    """The scale as torch takes it."""
    scale = quantized.scale
    if quantized.recipe == TENSOR:
        return scale.reshape(())
    if quantized.recipe == ROWS:
        return scale.t() if is_b else scale
    if quantized.recipe == TOKENS:
        return scale.t().contiguous().t()
    return F.pad(scale, (0, -scale.shape[1] % 4), value=float("nan")).t()


def check(peer: Peer, size, recipes, values, output, fast, device):
    m, n, k = size
    scales = (peer.scales, peer.scales) if isinstance(peer.scales, str) else peer.scales
    a, b = (
        quantize(VALUES[name](rows, k, device), dtype, recipe, scale, odd)
        for name, rows, dtype, recipe, scale, odd in zip(
            values, (m, n), peer.formats, recipes, scales, (0, -1), strict=True
        )
    )
    bias = None
    if peer.bias is not None:
        bias_dtype = output if output in (BF16, FP16) else BF16
        bias = torch.randn(n, device=device) if peer.bias == "normal" else torch.full((n,), peer.bias, device=device)
        bias = bias.to(bias_dtype)
    out = torch_compat.scaled_mm(
        *(a.codes, b.codes.t(), laid_out(a, False), a.recipe, laid_out(b, True), b.recipe),
        bias=bias,
        output_dtype=output,
        use_fast_accum=fast,
    )
    assert out.dtype == (output or peer.formats[0])
    exact = a.values @ b.values.t() + (0 if bias is None else bias.double())
    case = f"{peer.name} {size} {[recipe.name for recipe in recipes]} {values} {output} fast={fast}"
    tolerance = peer.tolerances[output]
    assert torch.allclose(out.float(), exact.to(out.dtype).float(), rtol=tolerance.relative, atol=tolerance.absolute), (
        case
    )
    if tolerance.cosine is not None:
        whole = a.before.double() @ b.before.double().t() + (0 if bias is None else bias.double())
        for wanted in (exact, whole):
            assert F.cosine_similarity(out.double().flatten(), wanted.flatten(), dim=0) >= tolerance.cosine, case


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("device", DEVICES)
def test_as_close_as_torch_asks(peer, device):
    for size, recipes, values, output, fast in itertools.product(
        peer.sizes, peer.recipes, peer.values, peer.tolerances, peer.fast
    ):
        check(peer, size, recipes, values, output, fast, device)


GROUPS, M, N, K = 4, 16, 32, 64


class Grouped(NamedTuple):
    """The operands of each group."""

    a: list[torch.Tensor]
    a_scale: list[torch.Tensor]
    b: list[torch.Tensor]
    b_scale: list[torch.Tensor]


def grouped(along_rows: bool, empty: bool, device: str) -> Grouped:
    """Groups along rows of a, of which the first may be empty, and the second twice as large; or with matrices of
    their own."""
    ends = [M * (i + 1) for i in range(GROUPS)]
    if empty:
        ends[0] = 0
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)] if along_rows else [M] * GROUPS
    a, b = (torch.randn(GROUPS * rows, K, device=device).to(E4M3) for rows in (M, N))
    scales = (torch.rand(GROUPS * rows, device=device) for rows in (M, N))
    of_a, of_b = zip((a, b), scales, strict=True)
    return Grouped(*(x.split(sizes) for x in of_a), *(x.split(N) for x in of_b))


@pytest.mark.parametrize(("along_rows", "empty"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_rows_in_one_launch(along_rows, empty, fast, device):
    """Torch's cases with groups of rows or with matrices of their own; other groups are left to torch."""
    parts = grouped(along_rows, empty, device)
    join = torch.cat if along_rows else torch.stack
    a = join([x.view(torch.uint8) for x in parts.a]).view(E4M3)
    b = torch.stack([x.view(torch.uint8) for x in parts.b]).view(E4M3)
    a_scale, b_scale = join(parts.a_scale), torch.stack(parts.b_scale)
    offs = torch.tensor([len(x) for x in parts.a], device=device).cumsum(0).int() if along_rows else None
    call = partial(torch_compat.scaled_grouped_mm, a, b.transpose(1, 2), a_scale, ROWS, b_scale, ROWS)
    each = [scaled_gemm(*one, fast_accum=fast) for one in zip(*parts, strict=True)]
    out = call(offs=offs, use_fast_accum=fast)
    assert torch.equal(out, join(each))
    wide = call(offs=offs, use_fast_accum=fast, output_dtype=torch.float32)
    assert torch.allclose(wide, join(each).float(), rtol=2**-8, atol=1e-6)
    wanted = [
        (x.double() * x_scale[:, None]) @ (y.double() * y_scale[:, None]).t()
        for x, x_scale, y, y_scale in zip(*parts, strict=True)
    ]
    assert torch.allclose(wide.double(), join(wanted), rtol=5e-4, atol=5e-2)
