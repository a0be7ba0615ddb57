"""Checked GEMMs: random operands and exact results, for `fp8_gemm` and each kind.

Imports torch only when it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import deep_tile
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div
from deep_tile.kinds import RAW, RESULTS, Element, Kind

if TYPE_CHECKING:
    import torch

INT8_SIZE = 40
"""Standard deviation of scaled integers; unscaled ones have a quarter, so that FP16 holds their sums."""


def checked_error(m: int, n: int, k: int, device: str) -> float:
    from deep_tile.reference import relative_error

    x, w = random_operands(m, n, k, device)
    operands = *deep_tile.per_token_cast_to_fp8(x), *deep_tile.per_block_cast_to_fp8(w)
    return relative_error(deep_tile.fp8_gemm(*operands), exact_product(*operands))


def random_operands(m: int, n: int, k: int, device: str) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(rows, k, generator=generator, device=device, dtype=torch.bfloat16) for rows in (m, n)]


def exact_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, b_rows: int = SCALE_BLOCK
) -> torch.Tensor:
    """The GEMM in float64, deliberately different from reference.py: every element gets its scale, which `b_rows` rows
    in b share."""
    return _wide(a, a_scale, 1) @ _wide(b, b_scale, b_rows).t()


def _wide(x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scaled elements in float64; a scale may cover several rows, and 128 or all columns."""
    columns = SCALE_BLOCK if scale.shape[1] > 1 else x.shape[1]
    each = scale.double().repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns, 1)
    return x.double() * each[:, : x.shape[1]]


# For each kind.


def operands_of(kind: Kind, shape: tuple[int, int, int], device: str, seed: int = 0) -> list[torch.Tensor]:
    """Normal samples with scales between 0.5 and 1.5, and rows at multiples of 16 bytes."""
    import torch

    from deep_tile.tensors import with_aligned_rows

    generator = torch.Generator(device).manual_seed(seed)
    m, n, k = shape
    size = INT8_SIZE if kind.sums == "s32" else 1
    size = size / 4 if kind.output == RAW else size

    def matrix(rows: int, element: Element) -> torch.Tensor:
        values = torch.randn(rows, k, generator=generator, device=device) * size
        dtype = getattr(torch, element.dtype)
        return with_aligned_rows((values.round().clamp(-127, 127) if dtype == torch.int8 else values).to(dtype))

    def scale(rows: int) -> torch.Tensor:
        blocks = ceil_div(k, SCALE_BLOCK) if kind.block_scales else 1
        return (torch.rand(blocks, rows, generator=generator, device=device).t() + 0.5) / size

    if kind.packing:
        return [matrix(m, kind.a), scale(m), *_packed(kind, n, k, generator)]
    a, b = matrix(m, kind.a), matrix(n, kind.b)
    if kind.scaling == "none":
        return [a, b]
    return [a, scale(m), b, scale(ceil_div(n, SCALE_BLOCK) if kind.scaling == "blocks" else n)]


def _packed(kind: Kind, n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed weight of any codes, of which rows are padded with zeros up to whole groups."""
    import torch

    group = kind.packing.group
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator, device=generator.device)
    scale = torch.rand(n, ceil_div(k, group), generator=generator, device=generator.device) + 0.5
    if kind.packing.integers:
        return deep_tile.pack_weight(codes, scale.half(), format=f"int4_{group}")
    if kind.name == "nvfp4":
        return deep_tile.pack_weight(codes, scale.to(torch.float8_e4m3fn), format="nvfp4", global_scale=1.0)
    return deep_tile.pack_weight(codes, torch.exp2(scale.mul(8).round()), format="mxfp4")


def empty_out(kind: Kind, operands: list[torch.Tensor], output: str | None = None) -> torch.Tensor:
    import torch

    a, b = operands[0], operands[len(operands) // 2]
    return a.new_empty(a.shape[0], b.shape[0], dtype=getattr(torch, RESULTS[output or kind.output].dtype))


def multiply(
    kind: Kind, operands: list[torch.Tensor], out: torch.Tensor, config: GemmConfig | None = None
) -> torch.Tensor:
    return _function(kind, "none")(*operands, out, config=config)


def multiply_groups(kind: Kind, operands: tuple[torch.Tensor, ...], **keywords: object) -> torch.Tensor:
    """A row-grouped GEMM; bounds and the rest by keyword."""
    return _function(kind, "offs")(*operands, **keywords)


def _function(kind: Kind, grouping: str) -> Callable[..., torch.Tensor]:
    from deep_tile.api import product_for

    function = getattr(deep_tile, product_for(kind, grouping).called)
    return partial(function, fast_accum=False) if kind.scaling == "promoted_rows" else function


def exact_product_of(kind: Kind, operands: list[torch.Tensor]) -> torch.Tensor:
    if kind.packing:
        from deep_tile import packed

        operands = [*operands[:2], packed.elements(*operands[2:], k=operands[0].shape[1]), operands[3]]
    if kind.scaling == "none":
        return operands[0].double() @ operands[1].double().t()
    return exact_product(*operands, b_rows=SCALE_BLOCK if kind.scaling == "blocks" else 1)


def most_error(kind: Kind, k: int, output: str | None = None) -> float:
    """A kind's allowed relative error: 0 for integers; for FP8 larger if tensor cores accumulate all k with about 14
    bits."""
    from deep_tile.reference import MAX_RELATIVE_ERROR

    if (output or kind.output) == RAW:
        return 0.0
    added_fast = kind.scaling == "rows" and kind.sums == "f32"
    return 5e-3 + k * 2**-18 if added_fast else MAX_RELATIVE_ERROR
