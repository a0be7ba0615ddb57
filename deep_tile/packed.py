"""4-bit weights in the kernels' memory order: `pack_weight`, its inverse, and a packed weight's value in FP8.

Written in torch; runs on the weight's device. Invariant: packing moves bits and changes none; the kernel converts them
to FP8 (packed_b.cuh) as `elements` defines.
"""

from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from deep_tile import blocks, formats, tensors
from deep_tile.config import SCALE_BLOCK, UNIT_ROWS, as_int, ceil_div
from deep_tile.kinds import PACKED, Kind
from deep_tile.quantize import FP8_DTYPE, FP8_MAX, WEIGHT_BLOCK, scale_shape

BY_BYTES = {kind.packing.row_bytes: kind for kind in PACKED.values()}
"""Kinds with packed weights, by bytes per row and K block."""

_COLUMN = 32
"""Contiguous codes per row: 16 bytes."""

_WORDS = (2, _COLUMN // 8, 4)
"""A column's codes by half, word and place: each word has four codes of either half, as a WGMMA thread has them of A in
registers, and codes 0 to 3 of a word are of the first half."""

_SIGNS = (4, 0, 5, 1, 6, 2, 7, 3)
"""Which code's sign each nibble holds, in a group of eight: four signs are then the top bits of four bytes, the other
four are one shift away."""

_INTEGERS = (*range(0, 16, 2), *range(15, 0, -2))
"""Nibbles of integers in two's complement (packed_b.cuh), by which they are told apart without a table."""

_INTEGER_STEP = 2.0**-8
"""Factor of an integer that makes it an e4m3 number; its scale is divided by it."""

KINDS_OF_INT4 = {"int4_32": "int4_32", "int4_64": "int4_32", "int4_128": "int4"}
"""Kinds of INT4 by the format's name; other formats' kinds have the same name."""

_LARGEST_EXPONENT = 14
"""That of the largest FP16 scale among a 128x128 block's groups: exponents then reach down to -14, 28 below it, without
a loss of bits."""

_NVFP4_BLOCK = 8.0
"""NVFP4 group scales are divided by this, so that 6 * 448 fits e4m3, and the global scale is multiplied by it."""

_FRACTION_BITS = 23


class Packed(NamedTuple):
    """A 4-bit weight for `packed_gemm`.

    Attributes:
        weight: [..., n, ceil(k / 128) * 68] uint8 for MXFP4, 72 for NVFP4, 64 for INT4, 73 for INT4 in groups of 32 or
            64. Only whole matrices are meaningful, since a row's bytes are spread over its 16-row unit.
        scale: [..., ceil(n / 128), ceil(k / 128)] float32, one per 128x128 elements; for INT4 in groups of 128 [..., n,
            ceil(k / 128)], one per 1x128, with unit stride along n.
    """

    weight: torch.Tensor
    scale: torch.Tensor


class Unpacked(NamedTuple):
    """A packed weight as it was.

    Attributes:
        weight: [..., n, k / 2] uint8, two codes in a byte, the first in its low half.
        scale: [..., n, k / 32] float8_e8m0fnu for MXFP4, [..., n, k / 16] float8_e4m3fn for NVFP4, [..., n, k / 128]
            float32 for INT4, or [..., n, k / 32] in groups of 32 or 64.
        global_scale: [...] float32 for NVFP4; else None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None


def pack_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    format: str | None = None,
    global_scale: torch.Tensor | float | None = None,
    max_error: float = blocks.MAX_ERROR,
) -> Packed:
    """Pack a 4-bit weight for `packed_gemm` and `packed_grouped_gemm`.

    Call it when a model is loaded; `read_weight` makes its arguments of a checkpoint's tensors. No bit is lost:
    `unpack_weight` is the inverse. GEMMs convert the packed weight to this FP8 weight: for MXFP4 the result of
    `to_blocks`, exact unless scales within a 128x128 block differ by more than 2**14; for NVFP4 elements times their
    group scales, rounded to e4m3; for INT4 the integers, exactly, whose scales are applied in FP32.

    Args:
        weight: [..., n, k / 2] packed, or for MXFP4 [..., n, k / 32, 16], as for `to_blocks`; n a multiple of 16.
        scale: for MXFP4 [..., n, k / 32] float8_e8m0fnu, its bytes, or powers of two in a wider dtype; for NVFP4 [...,
            n, k / 16] float8_e4m3fn or its bytes, not negative; for INT4 [..., n, k / 128] float32, bfloat16 or
            float16, or one per 32 or 64 elements, which FP16 must hold exactly beside a power of two for each 128x128.
        format: "mxfp4", "nvfp4", "int4_32", "int4_64" or "int4_128". None: derived from dtypes and shapes, if
            unambiguous; INT4 must be named.
        global_scale: for NVFP4, as for `to_blocks`.
        max_error: for MXFP4, as for `to_blocks`.

    Returns:
        `Packed`: weight and scale.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: shapes fit no such format; n is not a multiple of 16; a scale is NaN or infinite, for NVFP4
            negative, for MXFP4 no power of two; a row would change by more than `max_error`; or an INT4 scale of 32 or
            64 elements has more than 11 significant bits or is less than 2**-28 of its block's largest.
    """
    weight, scale = blocks.checked("pack_weight", weight, scale)
    source = formats.source_of(weight, scale, format, (0, 0), global_scale)
    kind = PACKED.get(KINDS_OF_INT4.get(source.name, source.name))
    if kind is None:
        raise ValueError(
            f"{formats.seen(weight, scale)}, which is {source.name!r}; formats that can be packed are {_names()}: "
            "convert it with deep_tile.to_blocks"
        )
    n = source.weight.shape[-2]
    if n % UNIT_ROWS:
        raise ValueError(
            f"weight has {n} rows; rows are packed in multiples of {UNIT_ROWS}: add rows of zeros, or convert it "
            "with deep_tile.to_blocks"
        )
    if kind.name == "int4":
        return _packed_integers(source, kind)
    scale_bytes = None if kind.packing.integers else _scale_bytes(source)
    with torch.no_grad():
        packed = _empty(source, kind)
        of_blocks = source.weight.new_empty(_scale_shape(source), dtype=torch.float32)
        for index in source.matrices():
            if kind.packing.integers:
                scales, of_blocks[index] = _relative_halves(source, index, kind)
            elif source.name == "nvfp4":
                of_blocks[index] = (source.global_scale[index] * _NVFP4_BLOCK).float()
                scales = scale_bytes[index]
            else:
                matrix, scale = source.weight[index], source.scale[index]
                of_blocks[index] = blocks.to_blocks(matrix, scale, format="mxfp4", max_error=max_error).scale
                scales = _relative(matrix, scale_bytes[index], of_blocks[index], kind)
            packed[index] = _packed(source.weight[index], scales, kind)
    return Packed(packed, of_blocks)


def unpack_weight(weight: torch.Tensor, scale: torch.Tensor, k: int | None = None) -> Unpacked:
    """The inverse of `pack_weight`, bit for bit.

    Args:
        weight, scale: a `Packed`.
        k: elements per row; None: all elements of its K blocks.

    Returns:
        `Unpacked`: weight, scale and, for NVFP4, the global scale.

    Raises:
        TypeError, ValueError: not a packed weight with k elements per row.
    """
    tensors.require_values("unpack_weight", weight=weight, scale=scale)
    tensors.require_tensors(weight=weight, scale=scale)
    kind, k = _checked_packed(weight, scale, k)
    with torch.no_grad():
        codes, scales = _unpacked(weight, kind)
        pairs = codes.unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | pairs[..., 1] << 4
        codes, scales = codes[..., : k // 2], scales[..., : ceil_div(k, kind.packing.group)]
        if kind.name == "int4":
            return Unpacked(codes.contiguous(), scale.contiguous() * _INTEGER_STEP, None)
        if kind.name == "int4_32":
            of_blocks = _spread(scale * _INTEGER_STEP, weight.shape[-2], kind)[..., : scales.shape[-1]]
            return Unpacked(codes.contiguous(), scales.float() * of_blocks, None)
        if kind.name == "mxfp4":
            exponents = _exponents(scale, weight.shape[-2], kind)[..., : scales.shape[-1]]
            return Unpacked(codes.contiguous(), (scales + exponents).contiguous().view(formats.E8M0), None)
        of_matrix = scale.flatten(-2)[..., :1].sum(-1) / _NVFP4_BLOCK  # 0 if the weight has no rows
        return Unpacked(codes.contiguous(), scales.contiguous().view(FP8_DTYPE), of_matrix)


def elements(weight: torch.Tensor, scale: torch.Tensor, k: int) -> torch.Tensor:
    """The elements [..., n, k] that `scale` applies to: float8_e4m3fn, to which the kernel converts a packed weight; or
    float32 for INT4 in groups of 32, whose scales they have."""
    kind = kind_of(weight, k)
    codes, scales = _unpacked(weight, kind)
    values = torch.tensor(formats.INT4 if kind.packing.integers else formats.E2M1, device=weight.device)[codes.int()]
    if kind.packing.integers:
        values = values * _INTEGER_STEP
    if kind.name == "int4_32":
        return (values * scales.float().repeat_interleave(kind.packing.group, -1))[..., :k]
    if kind.name == "mxfp4":
        values = values * torch.exp2(scales.view(torch.int8).float()).repeat_interleave(kind.packing.group, -1)
    elif kind.name == "nvfp4":
        values = values * (scales.view(FP8_DTYPE).float() / _NVFP4_BLOCK).repeat_interleave(kind.packing.group, -1)
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)[..., :k]


def zeros(shape: tuple[int, ...], format: str, device: torch.device | str | None) -> Packed:
    """A packed weight [..., n, k] of zeros."""
    if not isinstance(format, str) or format not in PACKED:
        raise ValueError(f"format is {format!r}; packed are {', '.join(map(repr, PACKED))}")
    *leading, n, k = shape
    if n % UNIT_ROWS:
        raise ValueError(f"a weight has {n} rows; rows are packed in multiples of {UNIT_ROWS}: add rows of zeros")
    kind, k_blocks = PACKED[format], _k_blocks(k)
    of_scale = shape_of_scale(kind, n, k)
    weight = torch.zeros(*leading, n, k_blocks * kind.packing.row_bytes, dtype=torch.uint8, device=device)
    if kind.name == "int4":  # along n, as pack_weight's
        return Packed(weight, torch.zeros(*leading, *of_scale[::-1], dtype=torch.float32, device=device).mT)
    return Packed(weight, torch.zeros(*leading, *of_scale, dtype=torch.float32, device=device))


def kind_of(weight: torch.Tensor, k: int) -> Kind | None:
    """The kind for a packed weight with k elements per row; None if the byte count does not fit."""
    k_blocks = _k_blocks(k)
    return next((kind for row_bytes, kind in BY_BYTES.items() if weight.shape[-1] == k_blocks * row_bytes), None)


def name_of(weight: torch.Tensor, k: int) -> str:
    """The name of that kind. Raises ValueError where there is none."""
    kind = kind_of(weight, k) if weight.dim() > 1 and weight.shape[-2] % UNIT_ROWS == 0 else None
    if kind is None:
        wanted = " or ".join(f"{_k_blocks(k) * row_bytes} ({kind.name})" for row_bytes, kind in BY_BYTES.items())
        raise ValueError(
            f"b is {list(weight.shape)}; of k = {k} elements a packed row has {wanted} bytes, and rows are a multiple "
            f"of {UNIT_ROWS}. To fix: deep_tile.pack_weight makes b and b_scale"
        )
    return kind.name


def k_of(a: torch.Tensor) -> int:
    """Elements per row of what a packed weight is multiplied with."""
    if not a.dim():
        raise ValueError("a must have shape [..., k]; got (). Pass a matrix")
    return a.shape[-1]


def shaped(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the unpacked weight's shape, for the k of `a`."""
    return torch.empty(*weight.shape[:-1], a.shape[-1], dtype=FP8_DTYPE, device="meta")


def shape_of_scale(kind: Kind, n: int, k: int) -> tuple[int, int]:
    """The shape of the scale of a packed weight [n, k]."""
    return (n, _k_blocks(k)) if kind.scaling == "row_blocks" else scale_shape((n, k), WEIGHT_BLOCK)


def check_memory(name: str, weight: torch.Tensor) -> None:
    """Raise ValueError unless kernels can read a packed weight."""
    if not weight.is_contiguous() or not tensors.is_aligned(weight):
        raise ValueError(
            f"{name} is packed, and must be contiguous and begin at a multiple of 16 bytes: {name}.clone()"
        )


def _names() -> str:
    return " and ".join(repr(name) for name in formats.FORMATS if name.partition("_")[0] in PACKED)


def _k_blocks(k: int) -> int:
    return ceil_div(k, SCALE_BLOCK)


def _scale_shape(source: formats.Source) -> tuple[int, ...]:
    return (*source.weight.shape[:-2], *scale_shape((source.weight.shape[-2], source.columns), WEIGHT_BLOCK))


def _empty(source: formats.Source, kind: Kind) -> torch.Tensor:
    return source.weight.new_empty(*source.weight.shape[:-1], _k_blocks(source.columns) * kind.packing.row_bytes)


def _packed_integers(source: formats.Source, kind: Kind) -> Packed:
    """INT4 weights, packed. A row has one scale per K block; scales are contiguous along n, as TMA copies them."""
    of_blocks = source.scale.float() / _INTEGER_STEP
    if not bool(of_blocks.isfinite().all()):
        raise ValueError("scale has numbers above 2**120, the largest scale of a weight")
    with torch.no_grad():
        packed = _empty(source, kind)
        for index in source.matrices():
            packed[index] = _packed(source.weight[index], None, kind)
        return Packed(packed, of_blocks.transpose(-1, -2).contiguous().transpose(-1, -2))


def _relative_halves(source: formats.Source, index: object, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix's scales per 32 elements, in FP16 by powers of two of their 128x128 blocks; and these, for elements."""
    scale = source.scale[index].float().repeat_interleave(source.format.columns // kind.packing.group, -1)
    scale = scale[:, : ceil_div(source.columns, kind.packing.group)]
    of_row = SCALE_BLOCK // kind.packing.group
    n_blocks, k_blocks = scale_shape((len(scale), source.columns), WEIGHT_BLOCK)
    padded = F.pad(scale.abs(), (0, -scale.shape[1] % of_row, 0, -scale.shape[0] % SCALE_BLOCK))
    largest = padded.view(n_blocks, SCALE_BLOCK, k_blocks, of_row).amax((1, 3))
    if not bool(largest.isfinite().all()) or bool((largest >= 2.0**120).any()):
        raise ValueError("scale has numbers from 2**120 on; the largest scale of a weight is below")
    exponents = torch.frexp(largest).exponent.float() - 1 - _LARGEST_EXPONENT
    of_blocks = torch.exp2(exponents.clamp(min=-126).masked_fill(largest == 0, 0))
    of_rows = _spread(of_blocks, len(scale), kind)[:, : scale.shape[1]]
    halves = (scale / of_rows).half()
    inexact = halves.float() * of_rows != scale
    if bool(inexact.any()):
        raise ValueError(
            f"scale {inexact.nonzero()[0].tolist()} has more than 11 significant bits, or is below 2**-28 of its "
            "128x128 block's largest: FP16 does not hold it. Pass scales in bfloat16 or float16, or re-base the weight "
            "with deep_tile.to_blocks, which rounds it to e4m3, by some 2.6 % of its norm"
        )
    return halves, of_blocks / _INTEGER_STEP


def _spread(of_blocks: torch.Tensor, n: int, kind: Kind) -> torch.Tensor:
    """Numbers of 128x128 blocks, per row and group."""
    rows = of_blocks.repeat_interleave(SCALE_BLOCK, -2)[..., :n, :]
    return rows.repeat_interleave(SCALE_BLOCK // kind.packing.group, -1)


def _scale_bytes(source: formats.Source) -> torch.Tensor:
    """Group scales as they are packed."""
    if source.name == "nvfp4":
        found = source.scale.view(torch.uint8)
        if bool((found > 127).any()):
            raise ValueError("scale holds negative numbers; for nvfp4 move their signs to the elements")
        return found
    exact = source.scale.to(formats.E8M0)
    if source.scale.dtype != formats.E8M0 and bool((exact.float() != source.scale.float()).any()):
        raise ValueError("scale holds numbers that are not powers of two; mxfp4 has only these")
    return exact.view(torch.uint8)


def _exponents(scale: torch.Tensor, n: int, kind: Kind) -> torch.Tensor:
    """Block scale exponents per group and row, as E8M0 bytes."""
    return _spread((scale.contiguous().view(torch.int32) >> _FRACTION_BITS).to(torch.uint8), n, kind)


def _relative(weight: torch.Tensor, scales: torch.Tensor, of_blocks: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Exponents minus their block's, modulo 256: signed bytes, exact for nonzero elements."""
    exponents = _exponents(of_blocks, len(scales), kind)[:, : scales.shape[1]]
    too_small = scales.int() - exponents.int() < torch.iinfo(torch.int8).min
    if bool(too_small.any()):
        magnitudes = F.pad(weight & 0x77, (0, -weight.shape[1] % (kind.packing.group // 2)))
        too_small &= magnitudes.view(*scales.shape, -1).ne(0).any(-1)
    if bool(too_small.any()):
        raise ValueError(
            f"scale {too_small.nonzero()[0].tolist()} is more than 2**128 below others of its block, and its "
            "elements are not zero: zero them"
        )
    return scales - exponents


def _packed(weight: torch.Tensor, scales: torch.Tensor | None, kind: Kind) -> torch.Tensor:
    """[n, bytes] from a matrix's codes, two per byte, and its groups' scales, if units have any."""
    n, per_block = len(weight), SCALE_BLOCK // kind.packing.group
    k_blocks = _k_blocks(2 * weight.shape[1])
    weight = F.pad(weight, (0, -weight.shape[1] % (SCALE_BLOCK // 2)))
    codes = torch.stack([weight & 15, weight >> 4], -1).view(-1, *_WORDS).transpose(1, 2).reshape(-1, 8)
    if kind.packing.integers:
        nibbles = torch.tensor(_INTEGERS, dtype=torch.uint8, device=weight.device)[codes.int()]
        words = nibbles[:, :4] | nibbles[:, 4:] << 4
    else:
        nibbles = (codes & 7) | (codes >> 3)[:, _SIGNS] << 3
        words = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    words = words.reshape(n // UNIT_ROWS, UNIT_ROWS, k_blocks, SCALE_BLOCK // _COLUMN, _COLUMN // 2)
    words, of_rows = words.permute(2, 0, 3, 1, 4), (n, k_blocks * kind.packing.row_bytes)
    if scales is None:
        return words.reshape(of_rows)
    scales = F.pad(scales, (0, -scales.shape[1] % per_block))
    scales = scales.reshape(n // UNIT_ROWS, UNIT_ROWS, k_blocks, per_block).permute(2, 0, 1, 3)
    of_units = [words.flatten(2), scales.flatten(2).view(torch.uint8)]
    return F.pad(torch.cat(of_units, 2), (0, UNIT_ROWS * kind.packing.unused)).reshape(of_rows)


def _unpacked(weight: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., n, k], one per byte, and groups' scales, if there are any, for whole K blocks."""
    *leading, n, row_bytes = weight.shape
    k_blocks, unit_bytes = row_bytes // kind.packing.row_bytes, UNIT_ROWS * kind.packing.row_bytes
    units = weight.reshape(prod(leading), k_blocks, n // UNIT_ROWS, unit_bytes)
    sizes = (SCALE_BLOCK // 2, kind.packing.scale_bytes, kind.packing.unused)
    words, scales, _ = units.split([UNIT_ROWS * size for size in sizes], -1)
    words = words.unflatten(-1, (SCALE_BLOCK // _COLUMN, UNIT_ROWS, _COLUMN // 8, 4)).permute(0, 2, 4, 1, 3, 5, 6)
    if kind.packing.integers:
        nibbles = torch.cat([words & 15, words >> 4], -1)
        of_nibbles = [_INTEGERS.index(nibble) for nibble in range(16)]
        codes = torch.tensor(of_nibbles, dtype=torch.uint8, device=weight.device)[nibbles.int()]
    else:
        nibbles = torch.stack([words & 15, words >> 4], -1).flatten(-2)
        signs = torch.empty_like(nibbles)
        signs[..., _SIGNS] = nibbles & 8
        codes = nibbles & 7 | signs
    codes = codes.unflatten(-1, (_WORDS[0], _WORDS[2])).transpose(-3, -2)
    codes = codes.reshape(*leading, n, k_blocks * SCALE_BLOCK)
    if kind.packing.integers:
        scales = scales.contiguous().view(torch.float16)
    per_block = scales.shape[-1] // UNIT_ROWS
    scales = scales.unflatten(-1, (UNIT_ROWS, per_block)).permute(0, 2, 3, 1, 4)
    return codes, scales.reshape(*leading, n, k_blocks * per_block)


def _checked_packed(weight: torch.Tensor, scale: torch.Tensor, k: object) -> tuple[Kind, int]:
    of_weight, of_scale = tuple(weight.shape), tuple(scale.shape)
    found = [kind for row_bytes, kind in BY_BYTES.items() if of_weight[-1:] == (sum(of_scale[-1:]) * row_bytes,)]
    fits = len(of_weight) > 1 and found and of_weight[-2] % UNIT_ROWS == 0
    fits = fits and of_scale == (*of_weight[:-2], *shape_of_scale(found[0], of_weight[-2], of_scale[-1] * SCALE_BLOCK))
    if not fits or (weight.dtype, scale.dtype) != (torch.uint8, torch.float32):
        raise ValueError(f"{formats.seen(weight, scale)}; pass the result of deep_tile.pack_weight")
    if weight.device != scale.device or weight.is_meta:
        raise ValueError(
            f"weight is on {weight.device} and scale on {scale.device}; pass both on one device with memory"
        )
    size = of_scale[-1] * SCALE_BLOCK if k is None else as_int(k)
    if size is None or _k_blocks(size) != of_scale[-1]:
        raise ValueError(f"k is {k!r}; rows have {of_scale[-1]} K blocks of {SCALE_BLOCK}")
    return found[0], size
