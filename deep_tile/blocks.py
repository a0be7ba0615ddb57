"""`to_blocks`: converts other weight formats to FP8 with one FP32 scale per 128x128 block.

Written in torch; runs on the weight's device, some block rows at a time. Invariant: a block's scale is an original
scale times the smallest power of two that keeps the block's largest element within e4m3's range. So an element changes
only if no such scale keeps it, and changes are counted.
"""

import contextlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
import torch.nn.functional as F

from deep_tile import formats, quantize, tensors
from deep_tile.config import SCALE_BLOCK, as_int, ceil_div
from deep_tile.operation import gradient_error
from deep_tile.quantize import FP8_DTYPE, FP8_MAX, WEIGHT_BLOCK, scale_shape

MAX_ERROR = 2.0**-4
"""Default bound for a row's relative change: rounding to e4m3 changes a normal number by at most 1/17."""

ELEMENTS_AT_ONCE = 1 << 23
"""Elements per step within a matrix: enough to hide some 90 launches on a GPU. Each takes 10 to 40 bytes while it is
converted."""

_SMALLEST_EXPONENT = -126
"""The smallest exponent of a normal FP32 number."""
_SMALLEST_FACTOR = 2.0**-30
"""A factor that turns every e4m3 number into zero."""
_FRACTION_BITS = 52


@dataclass(frozen=True)
class Rebased:
    """What `to_blocks` changed.

    Attributes:
        changed: how many elements have another value than before, scales included.
        error: Frobenius norm of the change, divided by the weight's.
        worst_row_error: the same for the row (layer output) that changed most.
        exact: [..., ceil(n / 128), ceil(k / 128)] bool: blocks in which no value changed.
    """

    format: str
    elements: int
    changed: int
    error: float
    worst_row_error: float
    exact: torch.Tensor

    @property
    def changed_share(self) -> float:
        return self.changed / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        return (
            f"{self.format}: {self.changed:,} of {self.elements:,} elements changed ({self.changed_share:.3%}), by "
            f"{self.error:.1e} of the norm and {self.worst_row_error:.1e} in the worst row; exact are "
            f"{int(self.exact.sum()):,} of {self.exact.numel():,} blocks"
        )


class Blocks(NamedTuple):
    """A weight [..., n, k] in 128x128 blocks, its scale [..., ceil(n / 128), ceil(k / 128)], and what changed."""

    weight: torch.Tensor
    scale: torch.Tensor
    report: Rebased


def to_blocks(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    format: str | None = None,
    global_scale: torch.Tensor | float | None = None,
    first_row: int = 0,
    first_column: int = 0,
    max_error: float = MAX_ERROR,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> Blocks:
    """Convert a quantised weight to FP8 with one FP32 scale per 128x128 block, as `fp8_gemm` takes it.

    Call it when a model is loaded. With power-of-two scales (MXFP4, MXFP8, 32x32 blocks) every element whose exponent
    fits stays exact; for MXFP4 these are all, unless scales within a 128x128 block differ by more than 2**14. Other
    elements are rounded to e4m3 once more, to nearest even: INT4, which `pack_weight` keeps, changes by 2.6 % of its
    norm. Runs in torch on the weight's device, some rows at a time. It needs about 200 MB beside weight and result, or
    400 MB if scales are not powers of two, and synchronises with the GPU.

    ======================= =============================== ================================================
    format                  weight                          scale, which elements are multiplied with
    ======================= =============================== ================================================
    fp8_128x128             [..., n, k] float8_e4m3fn       [..., ceil(n / 128), ceil(k / 128)]
    fp8_32x32               the same                        [..., ceil(n / 32), ceil(k / 32)]
    fp8_1x128               the same                        [..., n, ceil(k / 128)]
    mxfp8                   the same                        [..., n, ceil(k / 32)]
    fp8_channel             the same                        [..., n] or [..., n, 1]
    fp8_tensor              the same                        one number, or [...] one for each matrix
    mxfp4                   [..., n, k / 2] packed, or      [..., n, ceil(k / 32)]
                            [..., n, k / 32, 16]
    nvfp4                   [..., n, k / 2] packed          [..., n, ceil(k / 16)] float8_e4m3fn
    int4_32, _64, _128      [..., n, k / 2] packed          [..., n, ceil(k / 32)], of 64, or of 128
    ======================= =============================== ================================================

    Args:
        weight: any strides, any leading dimensions, such as experts. Packed ones are uint8, int8 or
            float4_e2m1fn_x2 with two e2m1 in a byte, the first in its low half, as gpt-oss and DeepSeek-V4 have them;
            or two integers from -8 to 7 in two's complement, which must be named.
        scale: float32, bfloat16, float16, float8_e8m0fnu, or uint8 with float8_e8m0fnu bytes; for nvfp4 float8_e4m3fn
            or its bytes, row-major, not in the tiles that Blackwell kernels read.
        format: a name in the table. None: derived from dtypes and shapes, if unambiguous. MXFP4 whose scales are not
            float8_e8m0fnu or uint8 must be named, since INT4 looks the same.
        global_scale: nvfp4's second factor for every element: a number, or [...], one per matrix. It is weight_scale_2
            in ModelOpt and 1 / weight_global_scale in compressed-tensors.
        first_row, first_column: for a shard that starts inside a scale block of the whole weight: the block's row and
            column where the shard starts. `scale` then begins with that block.
        max_error: largest relative change (Frobenius norm) allowed in a row; 0: exact results only, math.inf: any. The
            default, 1 / 16, is the largest error that rounding to e4m3 causes, so weights that lose small numbers are
            refused.
        out: [..., n, k] float8_e4m3fn with unit column stride, to write to. Pass an FP8 `weight` itself to convert it
            in place. The weight is then read twice, first to find out whether the conversion is refused. When None, it
            is allocated with rows at multiples of 16 bytes; if nothing changes, the result is `weight` itself.
        scale_out: [..., ceil(n / 128), ceil(k / 128)] float32, any strides, to write to.

    Returns:
        `Blocks`: weight, scale and a report. Scale times element is the original value, or the nearest that FP8 has.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: shapes fit no format, or several; sizes, devices or memory do not fit; `scale`, or a `weight` that
            is converted, holds NaN or infinity; or a row would change by more than `max_error`. Then nothing has been
            written.
        RuntimeError: `out` or `scale_out` requires a gradient, in grad mode.
    """
    weight, scale = checked("to_blocks", weight, scale)
    firsts = _checked_first("first_row", first_row), _checked_first("first_column", first_column)
    limit = _checked_limit(max_error)
    source = formats.source_of(weight, scale, format, firsts, global_scale)
    shape = (*source.weight.shape[:-1], source.columns)
    _check_targets(source, shape, weight, out, scale_out)
    with torch.no_grad():
        return _rebased(source, shape, limit, out, scale_out)


def pad_shard(
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    first_row: int = 0,
    first_column: int = 0,
    rows: int | None = None,
    columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a weight shard that starts inside a 128x128 block with leading zeros, so that it starts with a block.

    Every element keeps its scale, so output columns [first_row, first_row + n) equal those computed with the whole
    weight. All other columns are 0. If `first_column` is not 0, the other operand must have as many columns of zeros,
    or of any finite values, before its own. `to_blocks` needs no padding and is exact where scales differ by powers of
    two.

    Args:
        weight: [..., n, k] float8_e4m3fn, rows and columns of a larger weight. Any strides.
        scale: [..., ceil((first_row + n) / 128), ceil((first_column + k) / 128)], the scales of the blocks that contain
            it.
        first_row, first_column: the row and column within the first 128x128 block where the shard starts.
        rows, columns: size of the result; first_row + n and first_column + k when None. Weights that are concatenated
            afterwards, such as gate and up, need a multiple of 128 rows each.

    Returns:
        [..., rows, columns] float8_e4m3fn, rows at multiples of 16 bytes, and its float32 block scales.

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: shapes or devices do not fit, or `rows` or `columns` is too small.
    """
    tensors.require_values("pad_shard", weight=weight, scale=scale)
    tensors.require_tensors(weight=weight, scale=scale)
    require_one_device(weight, scale)
    firsts = _checked_first("first_row", first_row), _checked_first("first_column", first_column)
    if weight.dtype != FP8_DTYPE or scale.dtype not in tensors.SCALE_DTYPES:
        raise TypeError(
            f"weight is {weight.dtype} and scale {scale.dtype}; a shard is of {FP8_DTYPE} with scales of "
            f"{tensors.SCALE_NAMES}: re-base another format with deep_tile.to_blocks"
        )
    if not formats.fits(weight, scale, formats.FORMATS["fp8_128x128"], firsts):
        raise ValueError(
            f"{formats.seen(weight, scale)}, first_row and first_column are {firsts}: they must be below "
            f"{SCALE_BLOCK}, and the scale that of each block of the whole weight that the shard lies in"
        )
    least = [first + size for first, size in zip(firsts, weight.shape[-2:], strict=True)]
    sizes = []
    for name, given, at_least in (("rows", rows, least[0]), ("columns", columns, least[1])):
        size = at_least if given is None else as_int(given)
        if size is None or size < at_least:
            raise ValueError(f"{name} is {given!r}; pass None, or an int of at least {at_least}")
        sizes.append(size)
    return _padded(weight.detach(), scale.detach(), firsts, (sizes[0], sizes[1]))


def _padded(
    weight: torch.Tensor, scale: torch.Tensor, firsts: tuple[int, int], sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    (top, left), leading = firsts, weight.shape[:-2]
    padded = tensors.empty_rows((*leading, *sizes), weight.dtype, weight.device)
    padded.view(torch.uint8).zero_()
    padded[..., top : top + weight.shape[-2], left : left + weight.shape[-1]].copy_(weight)
    of_blocks = torch.ones((*leading, *scale_shape(sizes, WEIGHT_BLOCK)), dtype=torch.float32, device=scale.device)
    of_blocks[..., : scale.shape[-2], : scale.shape[-1]].copy_(scale)
    return padded, of_blocks


def shard(
    weight: torch.Tensor, scale: torch.Tensor, dim: int, begin: int, end: int, max_error: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A slice along rows (`dim` -2) or columns (-1) of a weight in 128x128 blocks: the part, its scale, and the count
    of leading zero rows or columns. There are no such rows or columns if the part begins with a block, or if
    `max_error` allows cutting it into blocks anew.

    Args:
        weight, scale: [..., n, k] float8_e4m3fn and [..., ceil(n / 128), ceil(k / 128)].
        max_error: as for `to_blocks`.
    """
    first, block = begin % SCALE_BLOCK, begin // SCALE_BLOCK
    held = ceil_div(end, SCALE_BLOCK) - block if begin < end else 0
    part, scales = weight.narrow(dim, begin, end - begin), scale.narrow(dim, min(block, scale.shape[dim] - held), held)
    if first == 0 or begin == end:
        return tensors.with_aligned_rows(part), tensors.as_float32(scales), 0
    firsts = {"first_row" if dim == -2 else "first_column": first}
    if not part.is_meta and (max_error > 0 or _are_equal_but_for_powers(scales.double(), dim)):
        with contextlib.suppress(ValueError):
            return *to_blocks(part, scales, format="fp8_128x128", **firsts, max_error=max_error)[:2], 0
    return *pad_shard(part, scales, **firsts), first


def _are_equal_but_for_powers(scales: torch.Tensor, dim: int) -> bool:
    return bool((_fraction(scales) == _fraction(scales.narrow(dim, 0, 1))).all())


# Inputs: formats and checks.


def checked(call: str, weight: object, scale: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A quantised weight and its scale, without gradients. Raises `to_blocks`' errors for a single tensor."""
    tensors.require_values(call, weight=weight, scale=scale)
    tensors.require_tensors(weight=weight, scale=scale)
    weight, scale = weight.detach(), scale.detach()
    if weight.is_meta or scale.is_meta:
        raise ValueError("weight or scale is on meta, without memory: re-base a weight when it is loaded")
    require_one_device(weight, scale)
    if weight.dim() < 2:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [..., n, k]")
    if weight.dtype != FP8_DTYPE and weight.dtype not in formats.PACKED_DTYPES:
        remedy = "quantise a wide one with deep_tile.quantize_weight"
        if weight.dtype == torch.int32:
            remedy = "integers of 4 bits in words, as GPTQ, AWQ and compressed-tensors save them: deep_tile.read_weight"
        remedy = tensors.operand_remedy("weight", weight, (FP8_DTYPE,), {}, remedy)
        raise TypeError(f"weight is {weight.dtype}; it must be {FP8_DTYPE}, or e2m1 packed as uint8. To fix: {remedy}")
    if scale.dtype not in (*tensors.SCALE_DTYPES, torch.uint8, FP8_DTYPE):
        remedy = tensors.scale_remedy("scale", scale)
        raise TypeError(f"scale is {scale.dtype}; it must be {tensors.SCALE_NAMES}, or its bytes. To fix: {remedy}")
    return weight, scale


def require_one_device(weight: torch.Tensor, scale: torch.Tensor, name: str = "scale") -> None:
    if scale.device != weight.device:
        raise ValueError(f"{name} is on {scale.device} but weight is on {weight.device}; move it with .to()")


def _checked_first(name: str, value: object) -> int:
    first = as_int(value)
    if first is None:
        raise TypeError(f"{name} is {value!r}, of type {type(value).__name__}; pass an int")
    if first < 0:
        raise ValueError(f"{name} is {first}; pass how many rows or columns of the first block come before the shard")
    return first


def _checked_limit(max_error: object) -> float:
    if isinstance(max_error, bool) or not isinstance(max_error, Real):
        raise TypeError(f"max_error is {max_error!r}, a {type(max_error).__name__}; pass a number, such as 0.01")
    if not max_error >= 0:
        raise ValueError(f"max_error is {max_error}; pass 0 for exact results alone, up to math.inf for any")
    return float(max_error)


def _check_targets(
    source: formats.Source, shape: tuple[int, ...], weight: torch.Tensor, out: object, scale_out: object
):
    if torch.is_grad_enabled():
        for name, target in (("out", out), ("scale_out", scale_out)):
            if getattr(target, "requires_grad", False) is True:
                raise gradient_error(name, "to_blocks has none")
    if scale_out is not None:
        of_scale = (*shape[:-2], *scale_shape(shape[-2:], WEIGHT_BLOCK))
        quantize.check_target("scale_out", scale_out, torch.float32, of_scale, weight.device)
    if out is None:
        return
    quantize.check_target("out", out, FP8_DTYPE, shape, weight.device)
    apart = out.shape[-2] < 2 or out.stride(-2) >= shape[-1]
    if not apart or (shape[-1] > 1 and out.stride(-1) != 1):
        raise ValueError(f"rows of out must be dense and apart; its strides are {out.stride()}. Pass a row-major out")
    same = out.data_ptr() == weight.data_ptr() and out.stride() == weight.stride() and not source.format.packed
    if not same and tensors.share_memory(out, weight):
        raise ValueError("out overlaps weight without being it: pass out=weight for an FP8 weight, or other memory")


# Results and conversion.


class _Tally:
    """Changes so far, per row and per block."""

    def __init__(self, source: formats.Source, shape: tuple[int, ...]):
        device = source.weight.device
        self.of_scale = (*shape[:-2], *scale_shape(shape[-2:], WEIGHT_BLOCK))
        self.squares, self.lost = (torch.zeros(shape[:-1], dtype=torch.float64, device=device) for _ in range(2))
        self.changed = torch.zeros(self.of_scale, dtype=torch.int64, device=device)

    def errors(self) -> torch.Tensor:
        """Each row's relative error."""
        return torch.where(self.lost > 0, self.lost / self.squares, 0).sqrt()

    def report(self, source: formats.Source, elements: int) -> Rebased:
        whole = float(self.lost.sum() / self.squares.sum()) ** 0.5 if bool(self.lost.any()) else 0.0
        worst = float(self.errors().max()) if self.lost.numel() else 0.0
        return Rebased(source.name, elements, int(self.changed.sum()), whole, worst, self.changed == 0)


def _rebased(source: formats.Source, shape: tuple[int, ...], limit: float, out, scale_out) -> Blocks:
    tally = _Tally(source, shape)
    if source.scales_blocks() or not math.prod(shape):
        result, scale = _as_it_is(source, shape, tally.of_scale, out)
    else:
        result = tensors.empty_rows(shape, FP8_DTYPE, source.weight.device) if out is None else out
        scale = torch.empty(tally.of_scale, dtype=torch.float32, device=source.weight.device)
        if out is not None:
            _convert(source, None, scale, tally)
            _check_limit(source, tally, limit)
        _convert(source, result, scale, tally if out is None else None)
        _check_limit(source, tally, limit)
    report = tally.report(source, math.prod(shape))
    scale = scale if scale_out is None else scale_out.copy_(scale)
    return Blocks(result, scale, report)


def _as_it_is(
    source: formats.Source, shape: tuple[int, ...], of_scale: tuple[int, ...], out: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    weight = source.weight.new_empty(shape, dtype=FP8_DTYPE) if source.format.packed else source.weight
    scale = source.scale.float()
    for dim, of in zip((-2, -1), source.group, strict=True):
        index = torch.arange(of_scale[dim], device=scale.device) * SCALE_BLOCK // of
        scale = scale.index_select(dim, index)
    return tensors.with_aligned_rows(weight) if out is None else out.copy_(weight), scale


def _check_limit(source: formats.Source, tally: _Tally, limit: float) -> None:
    errors = tally.errors()
    if float(errors.max()) <= limit:
        return
    row = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]
    raise ValueError(
        f"re-basing this weight of {source.name} to blocks of 128x128 would change row {row} by "
        f"{float(errors.max()):.2g} of its norm, more than max_error={limit:g}: e4m3 cannot hold its elements at the "
        f"scale that the others of their blocks need. {_LIMIT_REMEDIES.get(source.name, '')}Pass a larger max_error, "
        "or keep the "
        "weight in its format or in BF16"
    )


_LIMIT_REMEDIES = {"fp8_channel": "deep_tile.scaled_gemm multiplies with scales of rows as they are. "}


def _convert(source: formats.Source, out: torch.Tensor | None, scale: torch.Tensor, tally: _Tally | None) -> None:
    """Write elements (unless `out` is None) and scales, and add changes to the tally if there is one."""
    width = math.gcd(source.group[1], source.firsts[1], SCALE_BLOCK) if source.format.columns else SCALE_BLOCK
    at_once = ELEMENTS_AT_ONCE * min(width, 16) // 16
    rows_at_once = max(1, at_once // source.columns // SCALE_BLOCK) * SCALE_BLOCK
    for index in source.matrices():
        for begin in range(0, source.weight.shape[-2], rows_at_once):
            end = min(begin + rows_at_once, source.weight.shape[-2])
            rows, blocks = (
                (*index, slice(begin, end)),
                (*index, slice(begin // SCALE_BLOCK, ceil_div(end, SCALE_BLOCK))),
            )
            part = _Part(source, index, begin, end, width)
            scale[blocks].copy_(part.scale)
            codes = part.codes()
            if out is not None:
                out[rows].copy_(codes[:, : source.columns])
            if tally is not None:
                tally.squares[rows] = part.squares(part.norms(part.products))
            if tally is not None and not part.is_proven():
                tally.lost[rows], tally.changed[blocks] = part.changes(codes)


class _Part:
    """Some block rows of one matrix, the last perhaps partial; columns are padded to whole blocks.

    An element is value * factor / divisor. Factors are [rows, groups of `width` columns]; value * factor is exact in
    the dtype of `values`.
    """

    def __init__(self, source: formats.Source, index: tuple[int, ...], begin: int, end: int, width: int):
        self.source, self.width = source, width
        values = _values(source, source.weight[index][begin:end])
        if source.columns % SCALE_BLOCK:
            values = F.pad(values, (0, -source.columns % SCALE_BLOCK))
        groups = values.view(len(values), -1, width)
        largest = groups.abs().amax(-1).double()
        if not bool(largest.isfinite().all()):
            row = int((~largest.isfinite()).any(1).nonzero()[0])
            raise ValueError(f"weight holds NaN, first in row {[*index, begin + row]}: it has no value there")
        self.of_group = torch.where(largest > 0, self._group_scales(index, begin, end, groups.shape[1]), 0)
        factor_of_all = source.global_scale[index]
        of_block = self._block_scales(largest, factor_of_all)
        spread = self._spread(of_block)
        factor = self.of_group / spread
        self.is_short = not bool(_fraction(factor).bitwise_and((1 << _FRACTION_BITS - 3) - 1).any())
        if self.is_short:
            self.factor, self.divisor = _not_below(factor, _SMALLEST_FACTOR), None
            self.unit = torch.where(factor == 0, 0, self.of_group / self.factor).abs() * factor_of_all
        else:
            groups, self.factor, self.divisor = groups.double(), self.of_group, spread[:, :, None]
            self.unit = factor_of_all
        self.products = groups * self.factor[:, :, None].to(groups.dtype)
        self.scale = (of_block * factor_of_all).float()

    def _group_scales(self, index: tuple[int, ...], begin: int, end: int, groups: int) -> torch.Tensor:
        """[rows, groups]."""
        scale, (rows, columns) = self.source.scale[index], self.source.group
        first_row, first_column = self.source.firsts
        first, last = (begin + first_row) // rows, (end + first_row - 1) // rows
        row = torch.arange(begin + first_row, end + first_row, device=scale.device) // rows - first
        column = (torch.arange(groups, device=scale.device) * self.width + first_column) // columns
        needed = scale[first : last + 1].float().double()
        return needed[row].index_select(1, column.clamp(max=scale.shape[1] - 1))

    def _block_scales(self, largest: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
        """New block scales without the global scale: old scale times the smallest power of two that keeps the block
        within e4m3's range and the scale normal; 1 for all-zero blocks."""
        reach = self._of_blocks(largest * self.of_group.abs()).amax((1, 3))
        scale = self._of_blocks(self.of_group.abs()).amax((1, 3))
        if self.source.name == "nvfp4":
            scale = _power(_exponent(scale))
        is_zero = reach == 0
        scale, reach = scale.masked_fill(is_zero, 1), reach.masked_fill(is_zero, FP8_MAX)
        scale = scale / _power(_exponent(FP8_MAX * scale / reach))
        return scale * _power((_SMALLEST_EXPONENT - _exponent(scale * global_scale)).clamp(min=0))

    def _of_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, groups] as [blocks, rows per block, blocks, groups per block], zero-padded after the last row."""
        x = F.pad(x, (0, 0, 0, -len(x) % SCALE_BLOCK))
        return x.view(-1, SCALE_BLOCK, x.shape[1] * self.width // SCALE_BLOCK, SCALE_BLOCK // self.width)

    def _spread(self, of_block: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(self.of_group), device=of_block.device) // SCALE_BLOCK
        return of_block[rows].repeat_interleave(SCALE_BLOCK // self.width, 1)

    def is_proven(self) -> bool:
        """Whether scales alone say that no element changes."""
        if not self.is_short or bool(_fraction(self.factor).any()):
            return False
        return bool(
            (self.factor.abs() * self.source.format.step >= formats.E4M3_STEP).logical_or(self.of_group == 0).all()
        )

    def codes(self) -> torch.Tensor:
        elements = self.products if self.divisor is None else self.products / self.divisor
        return elements.to(FP8_DTYPE).flatten(1)

    def changes(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The squared change per row, and the count of changed elements per block."""
        now = codes.view(self.products.shape).to(self.products.dtype)
        difference = (now if self.divisor is None else now * self.divisor) - self.products
        lost = self.norms(difference)
        changed = torch.zeros(lost.shape, dtype=torch.int64, device=lost.device)
        changed[lost > 0] = difference[lost > 0].count_nonzero(-1)
        return self.squares(lost), self._of_blocks(changed).sum((1, 3))

    def norms(self, x: torch.Tensor) -> torch.Tensor:
        """Norms [rows, groups], in units of value * factor."""
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32 if self.is_short else torch.float64).double()

    def squares(self, norms: torch.Tensor) -> torch.Tensor:
        """Squared norms [rows], in the weight's units."""
        return (norms * self.unit).square().sum(1)


def _values(source: formats.Source, rows: torch.Tensor) -> torch.Tensor:
    """Elements, exact, in the dtype that is fastest: to read on a GPU, to compute with on a CPU."""
    dtype = torch.bfloat16 if rows.is_cuda else torch.float32
    if not source.format.packed:
        return rows.to(dtype)
    values, byte = torch.tensor(source.format.codes, dtype=dtype, device="cpu"), torch.arange(256, device="cpu")
    pairs = torch.stack([values[byte % 16], values[byte // 16]], 1).to(rows.device)
    return F.embedding(rows.int(), pairs).flatten(1)


# float64 numbers bit by bit: no device rounds them.


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """Exponent of the largest power of two <= a positive number."""
    return (x.view(torch.int64) >> _FRACTION_BITS) - 1023


def _power(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 1023) << _FRACTION_BITS).view(torch.float64)


def _fraction(x: torch.Tensor) -> torch.Tensor:
    """Bits after the leading one; 0 for powers of two and zero."""
    return x.view(torch.int64) & ((1 << _FRACTION_BITS) - 1)


def _not_below(x: torch.Tensor, smallest: float) -> torch.Tensor:
    """Numbers with nonzero magnitudes raised to at least this."""
    return torch.where(x == 0, x, x.abs().clamp(min=smallest).copysign(x))
