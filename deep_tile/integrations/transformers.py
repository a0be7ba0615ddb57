"""transformers' FP8 linears and experts through deep_tile: `install()`, and `uninstall()` to undo it.

transformers has no registry for linears: its modules look up one global function at every call, and that function is
replaced. For experts it has one, functions by name; its default ones are replaced. Invariant: calls that deep_tile
cannot compute as intended go to the previous function.
"""

import inspect
import threading
from collections.abc import Callable
from types import ModuleType

import torch

from deep_tile import linear
from deep_tile.integrations.transformers_blocks import rebase
from deep_tile.integrations.transformers_experts import experts_forward
from deep_tile.integrations.transformers_packed import pack
from deep_tile.integrations.transformers_weights import operands, takes
from deep_tile.options import check_one
from deep_tile.quantize import DEEP_GEMM_AMAX_FLOOR

__all__ = ["install", "pack", "rebase", "uninstall"]

_MODULE = "transformers.integrations.finegrained_fp8"

_EXPERTS = ("grouped_mm", "batched_mm")
"""Functions for experts that transformers chooses unless told otherwise: in general, and to decode with `generate`."""

_PARAMETERS = {
    "fp8_linear": {
        "input": inspect.Parameter.empty,
        "weight": inspect.Parameter.empty,
        "weight_scale_inv": inspect.Parameter.empty,
        "block_size": None,
        "bias": None,
        "activation_scale": None,
        "allow_deepgemm": True,
    }
}
_EXPERTS_PARAMETERS = dict.fromkeys(("self", "hidden_states", "top_k_index", "top_k_weights"), inspect.Parameter.empty)
"""The functions' parameter defaults by name, in order, as in transformers 5.23."""

_lock = threading.Lock()
_replaced: dict[str, tuple[Callable, Callable]] = {}
"""Replaced functions and their replacements, by name, while installed; guarded by `_lock`."""


def install(*, exact: str = "reciprocal") -> None:
    """Let transformers' FP8 linears and experts multiply through deep_tile, in this process, until `uninstall()`.

    Covers `FP8Linear`, and `FP8Experts` gated by SiLU, with dynamically quantised bfloat16, float16 or float32 inputs
    and float8_e4m3fn weights in 128x128 blocks, with scales in any dtype that GEMMs take; on a Hopper GPU or, for
    tests, on the CPU. Everything else runs as before: static or per-tensor scales, other blocks and FP4
    (`rebase(model)` converts these to 128x128 blocks), other GPUs, weight rows that are not a multiple of 16 bytes, and
    `FP8GroupedLinear`.

    Linears go through `deep_tile.fp8_linear`. The result has the input's dtype and is rounded to bfloat16 first. A
    gradient goes to the input, through the dequantised weight; the weight and its scales are frozen, as transformers
    has them.

    Expert layers with implementation "grouped_mm" or "batched_mm" (the defaults) go through
    `deep_tile.fp8_grouped_gemm` and its companions; the activation between the GEMMs is not rounded to bfloat16, and
    experts are summed in FP32. Calls that record gradients run as before.

    Models that are loaded already are served, too. Calling it again changes `exact` alone. On the CPU transformers
    itself dequantises FP8 models when it loads them, and then nothing is left to multiply.

    Args:
        exact: how inputs are quantised, as for `per_token_cast_to_fp8`. The default is the arithmetic of transformers'
            cast for DeepGEMM, so a model answers as with DeepGEMM; "divide" rounds once less.

    Raises:
        ValueError: `exact` is unknown.
        ImportError: transformers is missing, or its `finegrained_fp8` has no such functions.
        RuntimeError: a function has unknown arguments, or was replaced by others since `install()`. Nothing has been
            changed.
    """
    check_one("exact", exact)
    client = _client()
    with _lock:
        originals = {name: _original(client, name) for name in _names()}
        for name, original in originals.items():
            _check_signature(name, original)
        for name, original in originals.items():
            replacement = _replacement(name, original, exact, client)
            _put(client, name, replacement)
            _replaced[name] = (original, replacement)


def uninstall() -> None:
    """Give transformers its own functions back; nothing happens where nothing is installed.

    Raises:
        RuntimeError: a function was replaced by others since `install()`. Nothing has been changed.
    """
    with _lock:
        if _replaced:
            client = _client()
            for name, original in [(name, _original(client, name)) for name in _replaced]:
                _put(client, name, original)
            _replaced.clear()


def _names() -> tuple[str, ...]:
    return (*_PARAMETERS, *_EXPERTS)


def _client() -> ModuleType:
    """transformers' module with the functions."""
    try:
        from transformers.integrations import finegrained_fp8
    except ImportError as error:
        raise ImportError(
            f"{_MODULE} cannot be imported: {error}. Install what was tested: pip install 'deep_tile[transformers]'"
        ) from error
    for name in ("fp8_linear", "FP8Experts", "FP8ExpertsInterface"):
        if not hasattr(finegrained_fp8, name):
            raise ImportError(f"{_MODULE} has no {name}{_remedy()}")
    return finegrained_fp8


def _remedy() -> str:
    import transformers

    return (
        f": this is transformers {transformers.__version__}. Install one that was tested: "
        "pip install 'deep_tile[transformers]'"
    )


def _current(client: ModuleType, name: str) -> Callable:
    if name in _PARAMETERS:
        return getattr(client, name)
    found = client.FP8ExpertsInterface().get(name)
    if found is None:
        raise ImportError(f"{_MODULE} has no experts implementation {name!r}{_remedy()}")
    return found


def _put(client: ModuleType, name: str, function: Callable) -> None:
    if name in _PARAMETERS:
        setattr(client, name, function)
    else:
        client.FP8ExpertsInterface.register(name, function)


def _original(client: ModuleType, name: str) -> Callable:
    """transformers' own function, whether or not it is replaced."""
    current = _current(client, name)
    original, replacement = _replaced.get(name, (current, current))
    if current not in (original, replacement):
        raise RuntimeError(
            f"{_MODULE}'s {name} has been replaced since deep_tile's install(), by {current!r}. Undo that first"
        )
    return original


def _check_signature(name: str, function: Callable) -> None:
    wanted = _PARAMETERS.get(name, _EXPERTS_PARAMETERS)
    found = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    if list(found.items()) != list(wanted.items()):
        raise RuntimeError(
            f"{_MODULE}'s {name} takes {inspect.signature(function)}, and not ({', '.join(wanted)}) as known here"
            f"{_remedy()}"
        )


def _replacement(name: str, original: Callable, exact: str, client: ModuleType) -> Callable:
    """A replacement that passes unsupported calls to `original`."""
    if name == "fp8_linear":
        return _linear(original, exact)
    return experts_forward(original, exact, client)


def _linear(original: Callable, exact: str) -> Callable:
    cast = {"exact": exact, "amax_floor": DEEP_GEMM_AMAX_FLOOR}

    def fp8_linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        block_size: list[int] | None = None,
        bias: torch.Tensor | None = None,
        activation_scale: torch.Tensor | None = None,
        allow_deepgemm: bool = True,
    ) -> torch.Tensor:
        if activation_scale is not None or not takes(input, weight, weight_scale_inv, block_size):
            return original(input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm)
        return linear.fp8_linear(input, *operands(weight, weight_scale_inv), bias, **cast)

    return fp8_linear
