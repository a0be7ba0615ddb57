"""The cast to FP8 along tokens, for weight gradients, whose K dimension is tokens.

A gradient needs dy and x with tokens innermost and one scale per 128 tokens; the cast reads row-major tokens and writes
the transpose. `_definition` defines it in plain torch; on a Hopper GPU a kernel (transposed.cuh) writes the same bits.
"""

from typing import NamedTuple

import torch

from deep_tile import cast, launches, quantize, sources, tensors
from deep_tile.config import SCALE_BLOCK, check_alignment
from deep_tile.operation import Given


class CastOptions(NamedTuple):
    """A call's keywords, described at `transposed_cast_to_fp8`."""

    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT
    alignment: int = SCALE_BLOCK


def transposed_cast_to_fp8(
    x: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    alignment: int = SCALE_BLOCK,
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along tokens and transpose: one scale per column of `x` and 128 tokens.

    Makes the operands of `fp8_wgrad` and `fp8_grouped_wgrad`. Has the bits of `per_token_cast_to_fp8(x.t())`, but reads
    `x` once and makes no copy. Runs on `x`'s device and torch's current stream: one kernel on a Hopper GPU, elsewhere
    torch, with the same result except for NaN's sign. Not differentiable.

    Args:
        x: [s, k], float64, float32, float16 or bfloat16, s tokens. float64 is converted to FP32 first. Fastest on the
            GPU if columns are contiguous, rows start and end at multiples of 16 bytes, and rows in `out` start there;
            other column strides are copied first.
        rows: [r] int32 or int64, dense: tokens of `x` to cast, in this order; s below is then r. A negative or too
            large number counts as an all-zero token.
        offs: [g] int32, dense, not empty: each group's END token, as for `fp8_grouped_wgrad`; a group starts at the
            previous end, rounded up to `alignment`. After a group's end, the rest of its last 128 tokens is written as
            zeros. 128 tokens outside all groups are dead: neither read nor written, so an allocated result holds
            arbitrary bytes there. Read on the device: nothing waits for the host, and nothing may write them meanwhile.
            Invalid offsets never cause out-of-bounds access.
        alignment: the multiple of tokens at which groups start: a power of two from 128 to 1024.
        scale_layout: memory order of the scale, as for `per_token_cast_to_fp8` on [k, s].
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`.
        out: [k, s] float8_e4m3fn with unit stride along tokens, to write to; allocated when None, with rows at
            multiples of 16 bytes, as GEMMs need.
        scale_out: [k, ceil(s / 128)] float32, any strides, to write to; `scale_layout` then means nothing.

    Returns:
        The [k, s] float8_e4m3fn tensor and its FP32 scale [k, ceil(s / 128)].

    Raises:
        TypeError, ValueError, RuntimeError: as `per_token_cast_to_fp8`; ValueError also if `x` is not a matrix or
            `alignment` is out of range.
    """
    options = (amax_floor, round_scale, exact, scale_layout, alignment)
    return TRANSPOSED_CAST.run((x, out, scale_out, rows, offs), options)


class AlongTokens(quantize.Casting):
    """A cast of tokens x [s, k], perhaps those of groups."""

    def check_options(self, options) -> None:
        super().check_options(options)
        check_alignment(options.alignment, SCALE_BLOCK)

    def check_source(self, given: Given) -> None:
        name, x = self.names[0], given[0]
        quantize.check_source_dtype(name, x)
        if x.dim() != 2:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; it must be [s, k], one row per token, so .view() it so"
            )
        sources.check(
            name, x, False, {key: given for key, given in self.lists_of(given).items() if key in sources.LISTS}
        )


class TransposedCast(AlongTokens, quantize.Cast):
    Options = CastOptions

    def shape(self, given: Given) -> tuple[int, int]:
        (tokens, columns), rows = given[0].shape, given[3]
        return columns, tokens if rows is None else rows.shape[0]

    def check(self, given: Given, options: CastOptions) -> None:
        self.check_dtypes(given)
        self.check_source(given)
        quantize.check_targets(given[0], given[1:3], self.shape(given))

    def define(self, given: Given, options: CastOptions) -> None:
        x, out, scale, *_ = given
        definition(x, options, out, scale, self.lists_of(given))

    def prepare(self, given: Given, options: CastOptions) -> launches.Prepared:
        x, out, scale, *_ = given
        lists = self.lists_of(given)
        kernel, grid = cast.choose_transposed(
            quantize.KERNEL_SOURCES[x.dtype], out.shape[1], len(out), launches.num_sms(x.get_device())
        )
        numbers = numbers_of(x, options, out, scale, lists)
        return quantize.launch_of(self, kernel, grid, given, numbers, cast.fields_of_tokens((*lists,)))


@torch.no_grad()
def definition(
    x: torch.Tensor, options: NamedTuple, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> None:
    x = sources.gathered(x, lists["rows"]) if "rows" in lists else x
    values = quantize.values_of(options)
    if "offs" not in lists:
        quantize.definition(x.t(), values, out, scale, {})
        return
    tokens = torch.arange(len(x), device=x.device)
    living = _living(lists["offs"].long(), len(x), options.alignment)
    lives = tokens % SCALE_BLOCK < living[tokens // SCALE_BLOCK]
    all_out, all_scale = torch.empty_like(out), torch.empty_like(scale)
    quantize.definition(torch.where(lives[:, None], x, 0).t(), values, all_out, all_scale, {})
    blocks = living > 0
    scale.copy_(torch.where(blocks, all_scale, scale))
    codes = out.view(torch.uint8)  # torch.where supports uint8 everywhere
    codes.copy_(torch.where(blocks[tokens // SCALE_BLOCK], all_out.view(torch.uint8), codes))


def _living(offs: torch.Tensor, tokens: int, alignment: int) -> torch.Tensor:
    """Live tokens in each block of 128, counted from its first; 0 for none or invalid offsets."""
    first = torch.arange(0, tokens, SCALE_BLOCK, device=offs.device)
    before = (offs <= first[:, None]).sum(1)  # groups that end there
    begin = torch.cat([offs.new_zeros(1), -(-offs // alignment) * alignment])[before]
    end = torch.cat([offs, offs.new_zeros(1)])[before]
    living = (end.clamp(max=tokens) - first).clamp(0, SCALE_BLOCK)
    return living.masked_fill(begin > first, 0)


def numbers_of(
    x: torch.Tensor, options: NamedTuple, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> dict[str, float]:
    columns, tokens = out.shape
    return {
        **quantize.matrix_numbers(tokens, columns, x, out, scale),
        **quantize.values_of(options).numbers,
        "aligned": _takes_vectors(x),
        "x_rows": len(x),
        "wide_index": "rows" in lists and lists["rows"].dtype == torch.int64,
        "groups": len(lists["offs"]) if "offs" in lists else 0,
        "alignment": options.alignment,
        "out_vectors": tensors.is_aligned(out) and (columns == 1 or out.stride(0) % tensors.ALIGNMENT_BYTES == 0),
    }


def _takes_vectors(x: torch.Tensor) -> bool:
    elements = tensors.ALIGNMENT_BYTES // x.element_size()
    steps = (x.shape[1], x.stride(0)) if len(x) > 1 else (x.shape[1],)
    return tensors.is_aligned(x) and all(step % elements == 0 for step in steps)


TRANSPOSED_CAST = TransposedCast(
    *("transposed_cast_to_fp8", "x", f"rows offs alignment {quantize.OP_OPTIONS}"),
    lists="rows offs",
    own="scale_layout",
    defaults={"alignment": SCALE_BLOCK},
)
