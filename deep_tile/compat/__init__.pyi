"""As deep_tile/__init__.pyi."""

from deep_tile.compat import deep_ep as deep_ep
from deep_tile.compat import deep_gemm as deep_gemm
