"""Random weights in every format of `to_blocks`, and their exact values, for tests and the fuzzer."""

import torch
import torch.nn.functional as F

import deep_tile
from deep_tile import GemmConfig, packed_gemm
from deep_tile.formats import E8M0, FORMATS
from deep_tile.kinds import PACKED, name_of
from deep_tile.packed import Packed
from deep_tile.quantize import FP8_DTYPE
from deep_tile.select.defaults import default_configs

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1]).double()
INT4 = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]).double()
BY_POWERS = ["fp8_32x32", "mxfp8", "mxfp4"]


NAMES_OF_PACKED = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "int4": "int4_128", "int4_32": "int4_32"}
"""Format names by the kind of the product."""

IN_SMALL_GROUPS = ("int4_32", "int4_64")
"""Formats of packed weights that FP8 does not hold."""

IN_FP8 = [name for name, kind in PACKED.items() if kind.packing.chains == 1]
"""Kinds of packed weights that FP8 holds."""


def one_kernel(kind: str, output: str | None = None, *finish: str, accumulate: bool = False) -> GemmConfig:
    """The first kernel that adds K in one part, with a bias and an activation if they are given."""
    configs = default_configs(True, kind, output, accumulate, *finish)
    return next(config for config in configs if config.parts_of_k == 1)


def same_product(name, a, a_scale, b: Packed, wide: torch.Tensor | None = None, **options):
    """A product whose bits every kernel must give that adds K in one part: that of `wide`, a packed weight in FP8; or,
    where FP8 does not hold it, that of the first such kernel."""
    if name not in IN_SMALL_GROUPS:
        return fp8_product(name, a, a_scale, wide, b.scale, **options)
    bias, dtype = options.get("bias"), options.get("out_dtype", torch.bfloat16)
    of_bias = "none" if bias is None else name_of(bias.dtype)
    config = one_kernel("int4_32", name_of(dtype), of_bias, options.get("activation") or "none")
    return packed_gemm(a, a_scale, *b, **options, config=config)  # not deep_tile's, which tests of the fuzzer break


def fp8_product(name, a, a_scale, b, b_scale, **options):
    """Multiply with an FP8 weight by its scales. With a single K block, 1x128 scales would be taken for scales of rows,
    which apply in another order; an added K block of zeros tells them apart."""
    if not name.startswith("int4"):
        return deep_tile.fp8_gemm(a, a_scale, b, b_scale, batch_invariant=True, **options)
    if a.shape[1] <= 128:
        a, b = (F.pad(x.view(torch.uint8), (0, 256 - x.shape[1])).view(FP8_DTYPE) for x in (a, b))
        a_scale, b_scale = (F.pad(scale, (0, 1), value=1.0) for scale in (a_scale, b_scale))
    return deep_tile.scaled_gemm(a, a_scale, b, b_scale, batch_invariant=True, **options)


def spread(x: torch.Tensor, block: tuple[int, int], shape: tuple[int, int], firsts=(0, 0)) -> torch.Tensor:
    """Scales [..., rows, columns], as many times as they count."""
    n, k = shape
    x = x.double().repeat_interleave(block[0], -2)[..., firsts[0] : firsts[0] + n, :]
    return x.repeat_interleave(block[1], -1)[..., firsts[1] : firsts[1] + k]


def draw(name: str, shape: tuple[int, ...], device: str = "cpu", spread_of_scales: int = 4, firsts=(0, 0)):
    """Draw a weight in a format, its scale, other arguments, and the exact values in float64. Every code occurs but
    NaN. Half of the draws have power-of-two scales where the format permits others; bfloat16 holds those of small
    groups of integers. Codes are drawn on the device."""
    *leading, n, k = shape
    of = FORMATS[name]
    block = of.rows or firsts[0] + n, of.columns or firsts[1] + k
    groups = [*leading, *(-(-(first + size) // b) for first, size, b in zip(firsts, (n, k), block, strict=True))]
    exponents = torch.randint(-spread_of_scales, 1, groups) + torch.randint(-20, 20, ())
    arguments, factor = {"format": name}, 1.0
    if name == "nvfp4":
        scale = torch.rand(groups).mul(448).to(FP8_DTYPE)
        factor = torch.rand(leading).add(0.01)
        arguments["global_scale"] = factor.to(device)
        factor = factor.double()[..., None, None]
    elif name in BY_POWERS:
        scale = torch.exp2(exponents.float()).to(E8M0)
    else:
        mantissas = 1 + torch.rand(groups) * (torch.rand(()) < 0.5)
        scale = torch.exp2(exponents.float()) * mantissas
        if name in IN_SMALL_GROUPS:
            scale = scale.bfloat16().float()
    if of.packed:
        weight = torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, device=device)
        of_codes = (INT4 if name.startswith("int4") else E2M1).to(device)
        values = of_codes[torch.stack([weight % 16, weight // 16], -1).flatten(-2).int()]
    else:
        weight = torch.randint(0, 255, (*leading, n, k), dtype=torch.uint8, device=device)
        weight = weight.masked_fill(weight % 128 == 127, 3).view(FP8_DTYPE)
        values = weight.float().double()
    scale = scale.to(device)
    factor = factor.to(device) if isinstance(factor, torch.Tensor) else factor
    exact = values * spread(scale.float(), block, (n, k), firsts) * factor
    if name == "fp8_channel":
        scale = scale[..., 0]
    elif name == "fp8_tensor":
        scale = scale[..., 0, 0]
    return weight, scale, arguments, exact
