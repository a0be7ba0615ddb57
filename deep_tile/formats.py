"""Quantised weight formats, and detection of a weight's format.

Invariant: nothing is guessed: where dtypes and shapes fit two formats that differ, or bytes could mean something else,
the format must be named.
"""

import itertools
import math
from collections.abc import Iterator
from numbers import Real
from typing import NamedTuple

import torch

from deep_tile import tensors
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.quantize import FP8_DTYPE

E8M0 = torch.float8_e8m0fnu
PACKED_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_PACK_BYTES = 16
"""gpt-oss stores 32 elements (16 bytes) in a separate dimension."""

E4M3_STEP = 2.0**-9
"""Spacing of e4m3's subnormals."""

_LARGEST_GLOBAL_SCALE = 2.0**120
"""Limit that keeps block scales within FP32."""


_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALVES, *(-x for x in _HALVES))
INT4 = (*map(float, range(8)), *map(float, range(-8, 0)))
"""The values of the 16 codes, of e2m1 and of INT4."""


class Format(NamedTuple):
    """How a weight is quantised.

    Attributes:
        rows, columns: how many share a scale; 0: all.
        packed: whether elements have 4 bits, two per byte, the first in its low half; else e4m3, one per byte.
        inferred: scale dtypes by which the format is recognised; with others it must be named.
        codes: the values of the 16 codes, if packed.
    """

    rows: int
    columns: int
    packed: bool = False
    inferred: tuple[torch.dtype, ...] = (*tensors.SCALE_DTYPES, torch.uint8)
    codes: tuple[float, ...] = E2M1

    @property
    def step(self) -> float:
        """The quantum of all elements."""
        return min(filter(None, map(abs, self.codes))) if self.packed else E4M3_STEP


FORMATS = {
    "fp8_128x128": Format(SCALE_BLOCK, SCALE_BLOCK),
    "fp8_32x32": Format(32, 32),
    "fp8_1x128": Format(1, SCALE_BLOCK),
    "mxfp8": Format(1, 32),
    "mxfp4": Format(1, 32, packed=True, inferred=(E8M0, torch.uint8)),
    "nvfp4": Format(1, 16, packed=True, inferred=(FP8_DTYPE, torch.uint8)),
    **{f"int4_{group}": Format(1, group, packed=True, inferred=(), codes=INT4) for group in (32, 64, 128)},
    "fp8_channel": Format(1, 0),
    "fp8_tensor": Format(0, 0),
}


class Source(NamedTuple):
    """A weight to be read: `scale` is [..., rows, columns], `global_scale` [..., 1, 1] in float64."""

    name: str
    format: Format
    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    columns: int
    firsts: tuple[int, int]

    @property
    def group(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 means all."""
        return self.format.rows or self.weight.shape[-2] or 1, self.format.columns or self.columns or 1

    def scales_blocks(self) -> bool:
        """Whether each 128x128 block already has one scale."""
        sizes = self.weight.shape[-2], self.columns
        covers = (size <= of or of % SCALE_BLOCK == 0 for size, of in zip(sizes, self.group, strict=True))
        return not self.format.packed and self.firsts == (0, 0) and all(covers)

    def matrices(self) -> Iterator[tuple[int, ...]]:
        """Leading-dimension indices, one per matrix."""
        return itertools.product(*map(range, self.weight.shape[:-2]))


def source_of(
    weight: torch.Tensor, scale: torch.Tensor, name: str | None, firsts: tuple[int, int], global_scale: object
) -> Source:
    """A weight in the named format, or the detected one.

    Raises:
        TypeError, ValueError: as `blocks.to_blocks`, for formats.
    """
    if name is not None and (not isinstance(name, str) or name not in FORMATS):
        raise ValueError(f"format is {name!r}; use one of {', '.join(map(repr, FORMATS))}, or None to infer it")
    matrix = _matrix(weight, scale)
    if name is None:
        name = inferred(matrix, scale, firsts)
    format_ = FORMATS[name]
    _check_format(name, format_, matrix, scale, firsts)
    if format_.packed:
        matrix = matrix.view(torch.uint8)
    columns = _columns(matrix, format_)
    scale = _typed(name, scale).reshape(_scale_shape(matrix.shape[:-1], columns, format_, firsts))
    factor = _checked_global_scale(name, global_scale, matrix)
    source = Source(name, format_, matrix, scale, factor, columns, firsts)
    _check_finite(source)
    return source


def _matrix(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., n, bytes], also for weights with a separate dimension per scale."""
    in_packs = weight.dtype in PACKED_DTYPES and weight.dim() > 2 and weight.shape[-1] == _PACK_BYTES
    return weight.flatten(-2) if in_packs and weight.shape[:-1] == scale.shape else weight


def _columns(weight: torch.Tensor, format_: Format) -> int:
    return weight.shape[-1] * (1 + format_.packed)


def _scale_shape(rows: tuple[int, ...], columns: int, format_: Format, firsts: tuple[int, int]) -> tuple[int, ...]:
    """Scale shape for a weight [*rows, columns], with a row and a column dimension."""
    *leading, n = rows
    groups = (
        ceil_div(first + size, of) if of else 1
        for size, of, first in zip((n, columns), (format_.rows, format_.columns), firsts, strict=True)
    )
    return (*leading, *groups)


def fits(weight: torch.Tensor, scale: torch.Tensor, format_: Format, firsts: tuple[int, int]) -> bool:
    if weight.dim() < 2 or format_.packed != (weight.dtype in PACKED_DTYPES):
        return False
    if any(first >= max(of, 1) for first, of in zip(firsts, (format_.rows, format_.columns), strict=True)):
        return False
    wanted = _scale_shape(weight.shape[:-1], _columns(weight, format_), format_, firsts)
    shorter = [wanted[:-1]] if format_.columns == 0 else []
    if format_.rows == 0:
        shorter += [wanted[:-2]] + ([(1,)] if not wanted[:-2] else [])
    return tuple(scale.shape) in (wanted, *shorter)


def inferred(weight: torch.Tensor, scale: torch.Tensor, firsts: tuple[int, int]) -> str:
    """The format's name; ValueError where dtypes and shapes fit none, or several that differ."""
    fitting = [name for name, of in FORMATS.items() if fits(weight, scale, of, firsts)]
    known = [name for name in fitting if scale.dtype in FORMATS[name].inferred]
    meanings = {_meaning(weight, FORMATS[name], firsts) for name in known}
    if len(meanings) == 1:
        return known[0]
    found = seen(weight, scale)
    if fitting and not any(_takes(name, scale) for name in fitting):
        return fitting[0]
    if known or fitting:
        names = " or ".join(f"format={name!r}" for name in known or fitting if _takes(name, scale))
        raise ValueError(f"{found}: dtypes and shapes do not say which format that is. Pass {names}")
    raise ValueError(f"{found}, which fits no format. {_unknown_remedy(weight, scale, firsts)}")


def _meaning(weight: torch.Tensor, format_: Format, firsts: tuple[int, int]) -> tuple:
    """A key, equal for formats that coincide at these few rows and columns."""
    sizes = weight.shape[-2] + firsts[0], _columns(weight, format_) + firsts[1]
    groups = (min(of or size, size) for of, size in zip((format_.rows, format_.columns), sizes, strict=True))
    return (format_.packed and format_.columns, *groups)


def seen(weight: torch.Tensor, scale: torch.Tensor) -> str:
    return f"weight is {weight.dtype} {list(weight.shape)} and scale {scale.dtype} {list(scale.shape)}"


def _unknown_remedy(weight: torch.Tensor, scale: torch.Tensor, firsts: tuple[int, int]) -> str:
    as_fp8 = weight if weight.dtype == FP8_DTYPE else weight.view(FP8_DTYPE)
    if as_fp8 is not weight and any(fits(as_fp8, scale, of, firsts) for of in FORMATS.values()):
        int8 = "; INT8 is multiplied by deep_tile.scaled_gemm and int8_gemm" if weight.dtype == torch.int8 else ""
        return f"Where its bytes are FP8, pass weight.view({FP8_DTYPE}){int8}"
    wanted = {
        name: list(_scale_shape(weight.shape[:-1], _columns(weight, of), of, firsts))
        for name, of in FORMATS.items()
        if of.packed != (weight.dtype == FP8_DTYPE)
    }
    return "Scales would be " + ", ".join(f"{shape} ({name})" for name, shape in wanted.items())


def _check_format(
    name: str, format_: Format, weight: torch.Tensor, scale: torch.Tensor, firsts: tuple[int, int]
) -> None:
    if not fits(weight, scale, format_, firsts):
        elements = "e2m1" if format_.codes == E2M1 else "INT4"
        dtype = f"{elements}, two in a byte of uint8" if format_.packed else FP8_DTYPE
        wanted = _scale_shape(weight.shape[:-1], _columns(weight, format_), format_, firsts)
        block = " x ".join(str(of or "all") for of in (format_.rows, format_.columns))
        raise ValueError(
            f"{seen(weight, scale)}; format {name!r} has a weight of {dtype} and a scale for each {block} elements, "
            f"here {list(wanted)}, and first_row and first_column within one: they are {firsts}"
        )
    if not _takes(name, scale):
        wanted = FP8_DTYPE if name == "nvfp4" else f"{tensors.SCALE_NAMES}, or uint8"
        raise TypeError(f"scale is {scale.dtype}; format {name!r} has scales of {wanted}")


def _takes(name: str, scale: torch.Tensor) -> bool:
    return scale.dtype == torch.uint8 or (scale.dtype == FP8_DTYPE) == (name == "nvfp4")


def _typed(name: str, scale: torch.Tensor) -> torch.Tensor:
    """The scale with its bytes viewed in their dtype."""
    if scale.dtype == torch.uint8:
        return scale.view(FP8_DTYPE if name == "nvfp4" else E8M0)
    return scale


def _checked_global_scale(name: str, given: object, weight: torch.Tensor) -> torch.Tensor:
    leading = weight.shape[:-2]
    if name != "nvfp4":
        if given is not None:
            raise ValueError(f"global_scale is given, and format {name!r} has none; nvfp4 has. Leave it out")
        return torch.ones((*leading, 1, 1), dtype=torch.float64, device=weight.device)
    if given is None:
        raise ValueError(
            "nvfp4 has a second scale: pass global_scale, the factor of every element: ModelOpt's "
            "weight_scale_2, or 1 / weight_global_scale of compressed-tensors; 1.0 where there is none"
        )
    if isinstance(given, bool) or not isinstance(given, (Real, torch.Tensor)):
        raise TypeError(f"global_scale is {given!r}, a {type(given).__name__}; pass a number or a tensor of float32")
    if not isinstance(given, torch.Tensor):
        given = torch.tensor(float(given), dtype=torch.float32, device="cpu")
    factor = given.detach()
    if factor.dtype not in tensors.SCALE_DTYPES[:-1]:
        raise TypeError(f"global_scale is {factor.dtype}; pass global_scale.float()")
    if factor.numel() not in (1, math.prod(leading)):
        raise ValueError(f"global_scale has shape {list(factor.shape)}; it must be one number, or {list(leading)}")
    factor = factor.to(weight.device, torch.float64).flatten()
    if not bool(((factor > 0) & (factor <= _LARGEST_GLOBAL_SCALE)).all()):
        raise ValueError("global_scale must be positive and at most 2**120; pass the factor of the elements")
    return factor.expand(math.prod(leading)).reshape(*leading, 1, 1)


def _check_finite(source: Source) -> None:
    for index in source.matrices():
        wrong = ~source.scale[index].float().isfinite()
        if bool(wrong.any()):
            where = [*index, *wrong.nonzero()[0].tolist()]
            raise ValueError(f"scale holds NaN or infinity, first at {where}: the weight has no value there")


def remedy(weight: torch.Tensor, scale: torch.Tensor) -> str:
    """The remedy for a weight without 128x128 blocks; empty if its format is unknown too."""
    if weight.dim() < 2 or (weight.dtype != FP8_DTYPE and weight.dtype not in PACKED_DTYPES):
        return ""
    try:
        name = inferred(_matrix(weight, scale), scale, (0, 0))
    except ValueError:
        return ""
    return f"it may be {name!r}, which deep_tile.to_blocks re-bases, and from_fp8 with format={name!r}"
