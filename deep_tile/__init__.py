"""deep_tile: FP8 block-scaled matrix products on NVIDIA Hopper GPUs, compiled at run time.

The public names and nothing else. Each is imported at its first use, so that what needs no torch (`explain`, the
command line's reports) does not wait a second for it.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from deep_tile import discovery

__version__ = "0.1.0"

_MODULES = {
    "Blocks": "blocks",
    "CastBoth": "both",
    "CastWeight": "both",
    "CompileError": "jit",
    "Explanation": "method.report",
    "GemmConfig": "config",
    "GroupsExplanation": "method.groups",
    "Plan": "api",
    "Precompiled": "api",
    "Routing": "experts",
    "cast_both": "both",
    "cast_weight": "both",
    "combine": "experts",
    "compilations": "jit",
    "dequantize": "quantize",
    "einsum": "sums",
    "explain": "method.report",
    "explain_groups": "method.groups",
    "forbid_compilation": "jit",
    "fp8_gemm": "dense",
    "fp8_gemm_cast": "gemm_cast",
    "fp8_grouped_gemm": "grouped",
    "fp8_grouped_wgrad": "wgrad",
    "fp8_linear": "linear",
    "fp8_wgrad": "dense",
    "gemm": "dense",
    "grouped_gemm": "grouped",
    "int8_gemm": "dense",
    "interleave_gate_up": "finishes",
    "is_available": "checks",
    "mqa_logits": "logits",
    "pack_weight": "packed",
    "packed_gemm": "dense",
    "packed_grouped_gemm": "grouped",
    "pad_shard": "blocks",
    "paged_mqa_logits": "logits",
    "per_block_cast_to_fp8": "quantize",
    "per_token_cast_to_fp8": "quantize",
    "precompile": "api",
    "precompile_logits": "logits",
    "precompile_model": "nn",
    "precompile_thin": "thin",
    "prenorm_gemm": "thin",
    "prepare": "api",
    "quantize_weight": "linear",
    "scaled_gemm": "dense",
    "scaled_grouped_gemm": "grouped",
    "silu_mul_cast_to_fp8": "experts",
    "sort_by_expert": "experts",
    "split_weight": "thin",
    "supports": "api",
    "swiglu_gradient_cast_both": "gated",
    "thin_gemm": "thin",
    "to_blocks": "blocks",
    "transpose_fp8": "both",
    "transposed_cast_to_fp8": "transposed",
    "unpack_weight": "packed",
}

_SUBMODULES = ("compat", "distributed", "integrations", "nn", "torch_compat", "train", "watch")
"""Whose names are public by theirs."""

__all__ = [*_MODULES, *_SUBMODULES]


def _extension() -> ModuleType:
    """`deep_tile._launcher`, for which this module is asked before Python looks for it."""
    try:
        return import_module("deep_tile._launcher")
    except ModuleNotFoundError as error:
        if error.name != "deep_tile._launcher":
            raise
        raise ImportError(
            f"deep_tile's C extension, _launcher, is not built in {__path__[0]}: in a checkout run `python setup.py "
            "build_ext --inplace`, or `pip install -e .`; where deep_tile is installed, start Python in another folder",
            name=error.name,
        ) from None


discovery.announce()


def __getattr__(name: str) -> Any:
    if name == "_launcher":
        return _extension()
    if name in _SUBMODULES:
        return import_module(f"deep_tile.{name}")
    if name not in _MODULES:
        raise AttributeError(
            f"module 'deep_tile' has no attribute {name!r}; names of DeepGEMM's are in deep_tile.compat.deep_gemm, "
            "names of torch's in deep_tile.torch_compat"
        )
    value = getattr(import_module(f"deep_tile.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
