"""deep_tile: FP8 block-scaled matrix products on NVIDIA Hopper GPUs, compiled at run time."""

from deep_tile.api import fp8_gemm, is_available, precompile, supports
from deep_tile.config import GemmConfig
from deep_tile.quantize import dequantize, per_block_cast_to_fp8, per_token_cast_to_fp8

__version__ = "0.1.0"

__all__ = [
    "GemmConfig",
    "dequantize",
    "fp8_gemm",
    "is_available",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "precompile",
    "supports",
]
