"""Epilogue options: bias, activation, output format. Their checks and weight layout.

The definition is `reference.finished`. Invariant: an activation is a row in kinds.ACTIVATIONS, a format in
kinds.OUTPUTS.
"""

from collections.abc import Iterable

import torch
from torch.compiler import is_dynamo_compiling

from deep_tile import ops, tensors
from deep_tile.kinds import ACTIVATIONS, GATE_COLUMNS, OUTPUTS, QUANTIZED, RAW, RESULTS, Element, Kind


def torch_dtype(element: Element) -> torch.dtype:
    return getattr(torch, element.dtype)


OUTPUT_NAMES = {torch_dtype(element): name for name, element in OUTPUTS.items()}
"""Names in `kinds.OUTPUTS`, by dtype; also for a bias."""

RESULT_NAMES = {**OUTPUT_NAMES, torch_dtype(RESULTS[RAW]): RAW}
"""Result names over all kinds, by dtype."""

FORMAT_NAMES = {**RESULT_NAMES, torch_dtype(RESULTS[QUANTIZED]): QUANTIZED}
"""Result names by dtype, those of results that are cast included."""

_PAIRS = 2 * GATE_COLUMNS


def names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def one_of(dtypes: Iterable[torch.dtype]) -> str:
    known = tuple(dtypes)
    return names(known) if len(known) == 1 else f"one of {names(known)}"


def out_columns(n: int, activation: str | None) -> int:
    return n // 2 if activation == "swiglu" else n


def for_problem(bias: torch.Tensor | None, activation: str | None) -> dict[str, str]:
    return {"bias": "none" if bias is None else OUTPUT_NAMES[bias.dtype], "activation": activation or "none"}


def interleave_gate_up(x: torch.Tensor) -> torch.Tensor:
    """Interleave gate and up rows in blocks of eight: the layout for `activation="swiglu"`.

    Row 16 i + j in the result is gate row 8 i + j for j < 8, else up row 8 i + j - 8; so column j of `fp8_gemm(...,
    activation="swiglu")` is `silu(gate_j) * up_j`. Interleave a weight before quantising it in 128x128 blocks, which
    then hold 64 rows of each; interleave per-row scales and a bias like their rows.

    Args:
        x: [2 f, ...], any dtype: f gate rows, then f up rows, f a multiple of 8. A weight [2 f, k], as checkpoints keep
            `gate_up_proj`, or a bias or scale [2 f].

    Returns:
        A contiguous tensor like `x`.

    Raises:
        TypeError: x is no tensor, or not a dense one.
        ValueError: x's row count is not a multiple of 16, or it has no memory.
    """
    if not isinstance(x, torch.Tensor):
        raise tensors.no_tensor("x", x, "pass a weight, or a scale or bias of its rows")
    if not is_dynamo_compiling():  # dynamo knows its tensors and would have to trace the check
        tensors.require_dense(x=x)
    if x.dim() < 1 or x.shape[0] % _PAIRS:
        raise ValueError(
            f"x is {list(x.shape)}; it must have a multiple of {_PAIRS} rows, gate rows, then as many up rows. Pad "
            "both "
            f"halves to a multiple of {GATE_COLUMNS}"
        )
    halves = x.unflatten(0, (2, x.shape[0] // _PAIRS, GATE_COLUMNS))
    return halves.transpose(0, 1).contiguous().flatten(0, 2)


def of_kind(kind: Kind) -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtype, name in RESULT_NAMES.items() if name in kind.outputs)


def check_out_dtype(out_dtype: object, known: Iterable[torch.dtype] = OUTPUT_NAMES) -> None:
    if out_dtype is not None and out_dtype not in tuple(known):
        raise TypeError(f"out_dtype is {out_dtype!r}; pass one of {names(known)}, or nothing")


def check_activation(activation: object) -> None:
    known = [name for name in ACTIVATIONS if name != "none"]
    if activation is not None and type(activation) is not str:
        raise TypeError(f"activation is {activation!r}, of type {type(activation).__name__}; pass a name, or None")
    if activation is not None and activation not in known:
        raise ValueError(f"activation is {activation!r}; pass one of {', '.join(known)}, or None")


def check_out(
    out: torch.Tensor | None, out_dtype: torch.dtype | None, known: Iterable[torch.dtype] = OUTPUT_NAMES
) -> None:
    """Check that `out`, if given, has a dtype that kernels write and that was asked for."""
    if out is None:
        return
    if out.dtype not in tuple(known):
        raise TypeError(f"out must be one of {names(known)}; got {out.dtype}. Pass such an out, or out=None")
    if out_dtype not in (None, out.dtype):
        raise TypeError(f"out_dtype is {out_dtype} and out is {out.dtype}; leave out_dtype out")


def check_bias_kind(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias must be a torch.Tensor or None; got {type(bias).__name__}. Pass a tensor [n]")
    tensors.require_plain(bias=bias)


def check_pairs(n: int, activation: str | None) -> None:
    """Check that an activation supports n columns."""
    if activation == "swiglu" and not ops.holds(n % _PAIRS == 0):
        raise ValueError(
            f"activation is 'swiglu' and n is {n}; it takes a multiple of {_PAIRS} rows of b. Lay them out by "
            "deep_tile.interleave_gate_up"
        )


def check_finish(bias: torch.Tensor | None, activation: str | None, b: torch.Tensor) -> None:
    """Check bias and activation for `b` [n, k]."""
    n = b.shape[0]
    check_pairs(n, activation)
    if bias is None:
        return
    if bias.dtype not in OUTPUT_NAMES:
        raise TypeError(f"bias must be one of {names(OUTPUT_NAMES)}; got {bias.dtype}. To fix: bias.float()")
    if bias.dim() != 1 or not ops.holds(bias.shape[0] == n):
        raise ValueError(f"bias must be [n] = [{n}]; got {list(bias.shape)}. Pass the bias of the same layer")
    if bias.device != b.device:
        raise ValueError(f"bias is on {bias.device} but b is on {b.device}; move it with .to(b.device)")
