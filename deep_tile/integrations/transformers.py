"""transformers' FP8 linears through deep_tile: `install()`, and `uninstall()` to undo it.

Called by users. transformers has no registry for linears: its modules look up one global function at every call, and
that function is replaced.
Invariant: what deep_tile does not multiply as it was meant goes to the function that was there before.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType

import torch

from deep_tile import linear, tensors
from deep_tile.config import SCALE_BLOCK
from deep_tile.quantize import DIVISIONS, FP8_DTYPE

_MODULE = "transformers.integrations.finegrained_fp8"

_PARAMETERS = {
    "input": inspect.Parameter.empty,
    "weight": inspect.Parameter.empty,
    "weight_scale_inv": inspect.Parameter.empty,
    "block_size": None,
    "bias": None,
    "activation_scale": None,
    "allow_deepgemm": True,
}
"""Defaults of the function's parameters by their names, in order, as of transformers 5.23."""

_BLOCK_SIZE = (SCALE_BLOCK, SCALE_BLOCK)
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_BYTES = 16
"""Weights begin their rows at multiples of it, for TMA."""

_lock = threading.Lock()
_replaced: tuple[Callable, Callable] | None = None
"""What was replaced and by what, while installed; guarded by `_lock`."""


def install(*, exact: str = "reciprocal") -> None:
    """Let transformers' FP8 linears multiply through `deep_tile.fp8_linear`, in this process, until `uninstall()`.

    Taken are dynamically quantised inputs of bfloat16, float16 or float32 and weights of float8_e4m3fn in blocks of
    128x128 with scales of float32 or float8_e8m0fnu, on a Hopper GPU or, for tests, on the CPU: those of `FP8Linear`
    and of the eager loop over experts. All else goes on as before: static or per-tensor scales, other blocks, FP4,
    other GPUs, rows of weights that are no multiple of 16 bytes. Grouped and batched products of experts are not
    touched, nor `FP8GroupedLinear`.

    The result has the input's dtype and is rounded to bfloat16 first. A gradient goes to the input, through the
    dequantised weight; the weight and its scales are frozen, as transformers has them.

    Models that are loaded already are served, too. Calling it again changes `exact` alone. On the CPU transformers
    itself dequantises FP8 models when it loads them, and then nothing is left to multiply.

    Args:
        exact: how inputs are quantised, as for `per_token_cast_to_fp8`. The default is the arithmetic of the cast that
            transformers does for DeepGEMM, so that a model answers as it did there; "divide" rounds once less.

    Raises:
        ValueError: `exact` is unknown.
        ImportError: transformers is missing or older than its `finegrained_fp8.fp8_linear`.
        RuntimeError: that function takes other arguments than those known here, or somebody else has replaced it since
            `install()`. Nothing has been changed.
    """
    global _replaced
    if exact not in DIVISIONS:
        raise ValueError(f"exact is {exact!r}; use {' or '.join(map(repr, DIVISIONS))}")
    module = _client()
    with _lock:
        original = _original(module)
        _check_signature(original)
        replacement = _linear(original, exact)
        module.fp8_linear = replacement
        _replaced = (original, replacement)


def uninstall() -> None:
    """Give transformers its own function back; nothing happens where nothing is installed.

    Raises:
        RuntimeError: somebody else has replaced the function since `install()`. Nothing has been changed.
    """
    global _replaced
    with _lock:
        if _replaced is not None:
            module = _client()
            module.fp8_linear = _original(module)
            _replaced = None


def _client() -> ModuleType:
    """The module of transformers that has the function."""
    try:
        from transformers.integrations import finegrained_fp8
    except ImportError as error:
        raise ImportError(
            f"{_MODULE} cannot be imported: {error}. Install what was tested: pip install 'deep_tile[transformers]'"
        ) from error
    if not hasattr(finegrained_fp8, "fp8_linear"):
        raise ImportError(f"{_MODULE} has no fp8_linear{_remedy()}")
    return finegrained_fp8


def _remedy() -> str:
    import transformers

    return (
        f": this is transformers {transformers.__version__}. Install one that was tested: "
        "pip install 'deep_tile[transformers]'"
    )


def _original(module: ModuleType) -> Callable:
    """transformers' own function, whether or not it is replaced."""
    current = module.fp8_linear
    if _replaced is None or current is _replaced[0]:
        return current
    if current is not _replaced[1]:
        raise RuntimeError(
            f"{_MODULE}.fp8_linear has been replaced since deep_tile's install(), by {current!r}. Undo that first"
        )
    return _replaced[0]


def _check_signature(function: Callable) -> None:
    found = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    if list(found.items()) != list(_PARAMETERS.items()):
        raise RuntimeError(
            f"{_MODULE}.fp8_linear takes {inspect.signature(function)}, and not ({', '.join(_PARAMETERS)}) as known "
            f"here{_remedy()}"
        )


def _linear(original: Callable, exact: str) -> Callable:
    """The replacement, which hands on to `original` what it does not take."""

    def fp8_linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        block_size: list[int] | None = None,
        bias: torch.Tensor | None = None,
        activation_scale: torch.Tensor | None = None,
        allow_deepgemm: bool = True,
    ) -> torch.Tensor:
        if activation_scale is not None or not _takes(input, weight, weight_scale_inv, block_size):
            return original(input, weight, weight_scale_inv, block_size, bias, activation_scale, allow_deepgemm)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # Parameters ask for a gradient unless told otherwise, and transformers tells scales and weights nothing. A
            # tracer sees that they do, whether or not gradients are recorded.
            weight, weight_scale_inv = weight.detach(), weight_scale_inv.detach()
        if weight.device.type == "cpu":
            weight = weight.clone()  # A checkpoint's file that is mapped into memory puts it at any address.
        return linear.fp8_linear(input, weight, weight_scale_inv, bias, exact=exact)

    return fp8_linear


def _takes(input, weight, weight_scale_inv, block_size) -> bool:
    """Whether it is a product for deep_tile: cheap, and traced by torch.compile."""
    return (
        block_size is not None
        and tuple(block_size) == _BLOCK_SIZE
        and weight.dtype == FP8_DTYPE
        and weight_scale_inv.dtype in tensors.SCALE_DTYPES
        and input.dtype in _INPUT_DTYPES
        and weight.shape[-1] % _ROW_BYTES == 0
        and (input.device.type == "cpu" or (input.device.type == "cuda" and _is_hopper(input.device.index)))
    )


@torch.compiler.assume_constant_result
def _is_hopper(index: int) -> bool:
    return _capability(index) == (9, 0)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
