"""The cast to FP8 along tokens: operands of weight gradients, which are products along tokens.

Called by users. A gradient needs dy and x with tokens innermost and a scale per 128 of them; the cast reads both as
layers have them, token by token, and writes them transposed. `_definition`, in plain torch, says what it is; on a
Hopper GPU a kernel (transposed.cuh) writes the same bits.
"""

from functools import partial
from typing import NamedTuple

import torch

from deep_tile import _launcher, cast, launches, ops, quantize, sources, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div, check_alignment
from deep_tile.ops import is_traced

_launches: launches.Table = {}
"""By `Options`; of input, out, scale and the lists that the options name."""


class Options(NamedTuple):
    """What decides about values of a cast; `lists` names the arguments that follow the scale."""

    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR
    round_scale: str = "none"
    exact: str = "divide"
    alignment: int = SCALE_BLOCK
    lists: tuple[str, ...] = ()

    @property
    def of_rows(self) -> quantize.Options:
        """Of a cast with the same numbers of what is transposed already."""
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

    For `fp8_wgrad` and `fp8_grouped_wgrad`, whose operands these are. Bit for bit the result of
    `per_token_cast_to_fp8(x.t())`, of which nothing is copied first: `x` is read once. Runs on `x`'s device and torch's
    current stream: on a Hopper GPU by one kernel, elsewhere by torch, with the same result, but for the sign of NaN. It
    has no gradient.

    Args:
        x: [s, k], float64, float32, float16 or bfloat16, s tokens. float64 is converted to FP32 first. On the GPU
            fastest where columns are adjacent and rows begin and end at multiples of 16 bytes, and those of `out` begin
            there, too; other column strides are copied first.
        rows: [r] int32 or int64, dense: which tokens of `x` to cast, in this order; s is then r in what follows. A
            number that is negative, or no row of `x`, counts as a token of zeros.
        offs: [g] int32, dense, not empty: the token behind each group's last, as `fp8_grouped_wgrad` has them; a group
            begins behind the one before, rounded up to `alignment`. Behind a group's end the rest of its last 128
            tokens is written as zeros, whatever `x` has there. 128 tokens of which none is in a group are dead: neither
            read nor written, so that an allocated result has arbitrary bytes there. Read on the device: nothing waits
            for the host, and nothing may write them meanwhile. Whatever they hold, nothing outside of the tensors is
            touched.
        alignment: of the tokens that groups begin at: a power of two from 128 to 1024.
        scale_layout: memory order of the scale, as for `per_token_cast_to_fp8` of [k, s].
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`.
        out: [k, s] float8_e4m3fn with unit stride along tokens, to write to; allocated when None, with rows that begin
            at multiples of 16 bytes, as products need it.
        scale_out: [k, ceil(s / 128)] float32 of any strides, to write to; `scale_layout` then means nothing.

    Returns:
        The [k, s] float8_e4m3fn tensor and its FP32 scale [k, ceil(s / 128)].

    Raises:
        TypeError, ValueError, RuntimeError: as `per_token_cast_to_fp8`; ValueError also where `x` is no matrix or
            `alignment` out of range.
    """
    lists = quantize.given_lists(rows=rows, offs=offs)
    if is_traced():
        quantize.check_layout(scale_layout)
        options = {"amax_floor": amax_floor, "round_scale": round_scale, "exact": exact, "alignment": alignment}
        return _OP((x,), (out, scale_out), options | lists | {"scale_layout": scale_layout})
    return _cast(x, scale_layout, (amax_floor, round_scale, exact, alignment, (*lists,)), out, scale_out, lists)


def _cast(x, scale_layout: str, options: tuple, out, scale_out, lists: sources.Lists) -> tuple:
    """Outside of tracing; `options` are equal to `Options`."""
    quantize.check_layout(scale_layout)
    if (out is not None or scale_out is not None) and torch.is_grad_enabled():
        quantize.refuse_target_gradients(out, scale_out)
    try:
        refuse_gradient(x)
        shape = _result_shape(x, lists)
        out = quantize.empty_out(x, shape) if out is None else out
        scale_out = quantize.empty_scale(x, shape, scale_layout) if scale_out is None else scale_out
        known = _launcher.launch_known(_launches, options, x, out, scale_out, *lists.values())
    except Exception:
        check_input(x, Options(*options), lists)
        raise
    if not known:
        _cast_unknown(x, Options(*options), out, scale_out, lists)
    return out, scale_out


def _result_shape(x: torch.Tensor, lists: sources.Lists) -> tuple[int, int]:
    tokens, columns = sources.result_shape(x, False, lists)
    return columns, tokens


def refuse_gradient(x, call: str = "transposed_cast_to_fp8") -> None:
    """Raise where torch would record the cast."""
    if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
        raise RuntimeError(
            f"x requires a gradient, and {call} has none: cast x.detach(), or cast under torch.no_grad()"
        )


def check_input(x: torch.Tensor, options: Options, lists: sources.Lists, call: str = "transposed_cast_to_fp8") -> None:
    check_values(x, options, lists, call)
    tensors.require_plain(x=x)
    sources.check_memory(lists)


def check_values(x: torch.Tensor, options: Options, lists: sources.Lists, call: str = "transposed_cast_to_fp8") -> None:
    """Check what can be checked without memory."""
    quantize.check_source_dtype("x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [s, k], one row per token, so .view() it so")
    sources.check("x", x, None, lists)
    quantize.check_options(options.of_rows)
    check_alignment(options.alignment, SCALE_BLOCK)
    refuse_gradient(x, call)


def _cast_unknown(
    x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> None:
    """Check a cast that C has not met, or cannot read, and do it. The signature holds all that the checks read."""
    check_input(x, options, lists)
    shape = _result_shape(x, lists)
    quantize.check_target("out", out, quantize.FP8_DTYPE, shape, x.device)
    of_scale = quantize.scale_shape(shape, quantize.TOKEN_BLOCK)
    quantize.check_target("scale_out", scale, torch.float32, of_scale, x.device)
    quantize.check_rows(out, out)
    if quantize.needs_kernel(x, out):
        _cast_by_kernel(x, options, out, scale, lists)
    else:
        definition(x, options, out, scale, lists)


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
    codes = out.view(torch.uint8)  # which torch selects among everywhere
    codes.copy_(torch.where(blocks[tokens // SCALE_BLOCK], all_out.view(torch.uint8), codes))


def _living(offs: torch.Tensor, tokens: int, alignment: int) -> torch.Tensor:
    """Of each 128 tokens, how many live, from the first; 0 where none does, or offsets lie."""
    first = torch.arange(0, tokens, SCALE_BLOCK, device=offs.device)
    before = (offs <= first[:, None]).sum(1)  # groups that end there
    begin = torch.cat([offs.new_zeros(1), -(-offs // alignment) * alignment])[before]
    end = torch.cat([offs, offs.new_zeros(1)])[before]
    living = (end.clamp(max=tokens) - first).clamp(0, SCALE_BLOCK)
    return living.masked_fill(begin > first, 0)


def _cast_by_kernel(
    x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> None:
    x = quantize.readable(x)
    prepare = partial(_prepare_launch, x, options, out, scale, lists)
    launches.enqueue(_launches, tuple(options), (x, out, scale, *lists.values()), prepare)


def _prepare_launch(
    x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> _launcher.Launch:
    device = x.get_device()
    source, tokens, columns = quantize.KERNEL_SOURCES[x.dtype], out.shape[1], len(out)
    kernel, grid = cast.choose_transposed(source, tokens, columns, launches.num_sms(device))
    quantize.check_capture(kernel, device, "transposed_cast_to_fp8")
    numbers = layout(x, options, out, scale, lists)
    return cast.prepare_transposed(kernel, grid, device, numbers, options.lists)


def layout(
    x: torch.Tensor, options: Options, out: torch.Tensor, scale: torch.Tensor, lists: sources.Lists
) -> cast.TransposedLayout:
    """The numbers of a cast of these tensors."""
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


# The op, which tracers see.


def _read_options(rows=None, offs=None, **options) -> tuple[Options, sources.Lists]:
    lists = quantize.given_lists(rows=rows, offs=offs)
    return Options(**options, lists=(*lists,)), lists


def _run_op(inputs: tuple, outs: tuple, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    scale_layout = quantize.layout_of_op(outs, options)
    cast_options, lists = _read_options(**options)
    return _cast(*inputs, scale_layout, cast_options, *outs, lists)


def _check_op(inputs: tuple, outs: tuple, options: dict) -> None:
    quantize.check_layout(quantize.layout_of_op(outs, options))
    (x,), (cast_options, lists) = inputs, _read_options(**options)
    check_values(x, cast_options, lists)
    if outs[0] is not None:
        columns, tokens = shape = _result_shape(x, lists)
        quantize.check_fake_targets(x, *outs, shape, (columns, ceil_div(tokens, SCALE_BLOCK)))


def _allocate_op(inputs: tuple, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    scale_layout = quantize.layout_of_op((None,), options)
    (x,), (_, lists) = inputs, _read_options(**options)
    shape = _result_shape(x, lists)
    return quantize.fake_out(x, shape), quantize.fake_scale(x, shape, scale_layout)


_OP = ops.Op(
    "transposed_cast_to_fp8",
    "x out! scale_out!",
    f"rows offs alignment {quantize.OP_OPTIONS}",
    *(_run_op, _check_op, _allocate_op),
    own="scale_layout",
    defaults={"alignment": SCALE_BLOCK},
)
