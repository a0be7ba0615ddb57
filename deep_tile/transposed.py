"""The cast to FP8 along tokens, for weight gradients, whose K dimension is tokens.

Called by users. A gradient needs dy and x with tokens innermost and one scale per 128 tokens; the cast reads row-major
tokens and writes the transpose. `_definition` defines it in plain torch; on a Hopper GPU a kernel (transposed.cuh)
writes the same bits.
"""

from typing import NamedTuple

import torch

from deep_tile import cast, launches, quantize, sources, tensors
from deep_tile.config import SCALE_BLOCK, check_alignment
from deep_tile.operation import Given
from deep_tile.ops import is_traced


class CastOptions(NamedTuple):
    """A call's keywords, described at `transposed_cast_to_fp8`."""

    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    scale_layout: str = quantize.DEFAULT_SCALE_LAYOUT
    alignment: int = SCALE_BLOCK


class Options(NamedTuple):
    """The options that affect values; `lists` names the arguments that follow the scale."""

    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    alignment: int = SCALE_BLOCK
    lists: tuple[str, ...] = ()

    @property
    def of_rows(self) -> quantize.Options:
        """The options for the same cast of a transposed input."""
        return quantize.Options(1, self.amax_floor, self.round_scale, self.exact)


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

    Makes operands for `fp8_wgrad` and `fp8_grouped_wgrad`. Bit for bit `per_token_cast_to_fp8(x.t())`, but without a
    copy: `x` is read once. Runs on `x`'s device and torch's current stream: one kernel on a Hopper GPU, elsewhere
    torch, with the same result except for NaN's sign. It has no gradient.

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
    if is_traced():
        return TRANSPOSED_CAST.trace((x, out, scale_out, rows, offs), options)
    return TRANSPOSED_CAST.run((x, out, scale_out, rows, offs), options)


class TransposedCast(quantize.Cast):
    Options = CastOptions

    def asked(self, given: Given, options: CastOptions) -> Options:
        return Options(*options[:3], options.alignment, (*self.lists_of(given),))

    def shape(self, given: Given) -> tuple[int, int]:
        (tokens, columns), rows = given[0].shape, given[3]
        return columns, tokens if rows is None else rows.shape[0]

    def check(self, given: Given, options: CastOptions) -> None:
        self.check_dtypes(given)
        check_values(given[0], self.asked(given, options), self.lists_of(given))
        quantize.check_targets(given[0], given[1:3], self.shape(given))

    def check_options(self, options: CastOptions) -> None:
        super().check_options(options)
        check_alignment(options.alignment, SCALE_BLOCK)

    def define(self, given: Given, options: CastOptions) -> None:
        x, out, scale, *_ = given
        definition(x, self.asked(given, options), out, scale, self.lists_of(given))

    def prepare(self, given: Given, options: CastOptions) -> launches.Prepared:
        x, out, scale, *_ = given
        device, lists = x.get_device(), self.lists_of(given)
        source, tokens, columns = quantize.KERNEL_SOURCES[x.dtype], out.shape[1], len(out)
        kernel, grid = cast.choose_transposed(source, tokens, columns, launches.num_sms(device))
        quantize.check_capture(kernel, device, self.name)
        numbers = layout(x, self.asked(given, options), out, scale, lists)
        return cast.prepare_transposed(kernel, grid, device, numbers, (*lists,))


def refuse_gradient(x, call: str = "transposed_cast_to_fp8") -> None:
    """Raise where torch would record the cast."""
    if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
        raise RuntimeError(
            f"x requires a gradient, and {call} has none: cast x.detach(), or cast under torch.no_grad()"
        )


def check_values(x: torch.Tensor, options: Options, lists: sources.Lists, call: str = "transposed_cast_to_fp8") -> None:
    """The checks that need no memory."""
    quantize.check_source_dtype("x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [s, k], one row per token, so .view() it so")
    sources.check("x", x, False, lists)
    quantize.check_options(options.of_rows)
    check_alignment(options.alignment, SCALE_BLOCK)
    refuse_gradient(x, call)


@torch.no_grad()
def definition(x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists) -> None:
    x = sources.gathered(x, lists["rows"]) if "rows" in lists else x
    if "offs" not in lists:
        quantize.definition(x.t(), options.of_rows, out, scale, {})
        return
    tokens = torch.arange(len(x), device=x.device)
    living = _living(lists["offs"].long(), len(x), options.alignment)
    lives = tokens % SCALE_BLOCK < living[tokens // SCALE_BLOCK]
    all_out, all_scale = torch.empty_like(out), torch.empty_like(scale)
    quantize.definition(torch.where(lives[:, None], x, 0).t(), options.of_rows, all_out, all_scale, {})
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


def layout(
    x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> cast.TransposedLayout:
    """The cast's parameters for these tensors."""
    columns, tokens = out.shape
    return cast.TransposedLayout(
        *(tokens, columns, x.stride(0), out.stride(0), *scale.stride()),
        aligned=_takes_vectors(x),
        pow2_scale=options.round_scale == "pow2",
        amax_floor=options.of_rows.floor,
        correction=int(options.exact == "divide"),
        x_rows=len(x),
        wide_index="rows" in lists and lists["rows"].dtype == torch.int64,
        groups=len(lists["offs"]) if "offs" in lists else 0,
        alignment=options.alignment,
        out_vectors=tensors.is_aligned(out) and (columns == 1 or out.stride(0) % tensors.ALIGNMENT_BYTES == 0),
    )


def _takes_vectors(x: torch.Tensor) -> bool:
    """Whether a kernel may read the matrix `x` vector by vector."""
    elements = tensors.ALIGNMENT_BYTES // x.element_size()
    steps = (x.shape[1], x.stride(0)) if len(x) > 1 else (x.shape[1],)
    return tensors.is_aligned(x) and all(step % elements == 0 for step in steps)


TRANSPOSED_CAST = TransposedCast(
    *("transposed_cast_to_fp8", "x", f"rows offs alignment {quantize.OP_OPTIONS}"),
    lists="rows offs",
    own="scale_layout",
    defaults={"alignment": SCALE_BLOCK},
)
