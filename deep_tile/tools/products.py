"""Products that are checked: random operands and the exact result.

Called by demo.py and doctor.py. Imports torch only when it multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deep_tile
from deep_tile.config import SCALE_BLOCK

if TYPE_CHECKING:
    import torch


def checked_error(m: int, n: int, k: int, device: str) -> float:
    """Relative error of one product of random operands."""
    from deep_tile.reference import relative_error

    x, w = random_operands(m, n, k, device)
    operands = *deep_tile.per_token_cast_to_fp8(x), *deep_tile.per_block_cast_to_fp8(w)
    return relative_error(deep_tile.fp8_gemm(*operands), exact_product(*operands))


def random_operands(m: int, n: int, k: int, device: str) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(rows, k, generator=generator, device=device, dtype=torch.bfloat16) for rows in (m, n)]


def exact_product(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """The product in float64, on purpose by another way than reference.py: every element gets its scale."""
    n, k = b.shape
    a_scales = a_scale.repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    b_scales = b_scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return (a.double() * a_scales) @ (b.double() * b_scales).t()
