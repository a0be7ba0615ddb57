"""deep_tile: FP8 block-scaled matrix products on NVIDIA Hopper GPUs, compiled at run time.

The public names and nothing else. Each is imported at its first use, so that what needs no torch (`explain`, the
command line's reports) does not wait a second for it.
"""

from importlib import import_module
from os.path import isdir
from types import ModuleType
from typing import Any

from deep_tile import discovery

__version__ = "0.1.0"

_OTHERS = {
    "api": "Plan Precompiled precompile prepare supports",
    "blocks": "Blocks pad_shard to_blocks",
    "both": "CastBoth CastWeight",
    "checkpoints": "read_weight",
    "checks": "is_available",
    "config": "GemmConfig",
    "experts": "Routing",
    "finishes": "interleave_gate_up",
    "jit": "CompileError compilations forbid_compilation",
    "linear": "quantize_weight",
    "logits": "precompile_logits",
    "method.calls": "Explanation GroupsExplanation explain explain_groups",
    "nn": "precompile_model",
    "packed": "pack_weight unpack_weight",
    "quantize": "dequantize",
    "sums": "einsum",
    "thin": "precompile_thin split_weight",
}
"""Public names that are no operation, by module."""

_OPERATIONS = {name: module for name, module in discovery.OPS.items() if name not in discovery.PRIVATE}
_MODULES = {name: module for module, names in _OTHERS.items() for name in names.split()} | _OPERATIONS
"""The module of each public name."""

_SUBMODULES = ("compat", "distributed", "integrations", "nn", "torch_compat", "train", "watch")
"""Public submodules; their names are public through them."""

__all__ = [*sorted(_MODULES), *_SUBMODULES]


if not isdir(__path__[0]):
    raise ImportError(
        f"deep_tile is imported from an archive, {__path__[0]}, and reads its files, which include a C extension, from "
        "a folder: install it, `pip install WHEEL`, or unpack it"
    )


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
