"""SwiGLU's gradient, cast to FP8 along both dimensions, and the forward activation, cast along tokens.

Between an MLP's GEMMs stands h = silu(gate) * up. The forward pass needs h cast along f, which `silu_mul_cast_to_fp8`
makes; the backward pass needs the gradients of gate and up cast along f and along tokens, and h cast along tokens. This
module makes all in one read: on a Hopper GPU by gated.cuh's kernel if f is a multiple of 128, else by torch and
separate casts.
"""

from typing import NamedTuple

import torch

from deep_tile import both, cast, launches, ops, params, quantize, sources, tensors, transposed
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.operation import Given

_FIELDS = {"gate_up_scale": "x_scale", "share": "share", "offs": "ends"}
"""Fields in `params.GATED` for optional tensors."""

_NUMBERS = sources.gating(None, 1.0, 0.0)


class SwigluGradient(NamedTuple):
    """Result of `swiglu_gradient_cast_both` for dh [s, f] and gate_up [s, 2f].

    Attributes:
        a, a_scale: gate_up's gradient, [s, 2f] and [s, ceil(2f / 128)], cast as by `per_token_cast_to_fp8`.
        at, at_scale: the same along tokens, [2f, s] and [2f, ceil(s / 128)], as `transposed_cast_to_fp8`.
        ht, ht_scale: h along tokens, [f, s] and [f, ceil(s / 128)]; with `blocks` as by `per_block_cast_to_fp8` on its
            transpose, scale [ceil(f / 128), ceil(s / 128)].
        share: gradient for `share`, [s] float32; None without `share`.
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    at: torch.Tensor
    at_scale: torch.Tensor
    ht: torch.Tensor
    ht_scale: torch.Tensor
    share: torch.Tensor | None


class Made(NamedTuple):
    """A kernel's outputs and an op's results.

    Attributes:
        a: as `SwigluGradient` has it.
        a_scale: with shares [s, ceil(3f / 128)]: after the scales, each 128 columns' contribution to the share's
            gradient.
        out: [3f, s]: at, then ht.
        scale: [3f, ceil(s / 128)], likewise; with `blocks` ht's part fills fewer rows.
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    out: torch.Tensor
    scale: torch.Tensor


def swiglu_gradient_cast_both(
    dh: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    *,
    share: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    alignment: int = SCALE_BLOCK,
    blocks: bool = False,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
) -> SwigluGradient:
    """Cast the gradient through h = silu(gate) * up * share along f and along tokens, and h along tokens, in one read.

    Gradients and h are computed in FP32 and rounded to BF16, then cast bit for bit as by `cast_both` and
    `transposed_cast_to_fp8`. Before that rounding they are within a relative 1e-6 of the formula, plus 2e-7 per unit of
    gate. Runs on dh's device and torch's current stream, and has no gradient.

    Args:
        dh: [s, f] bfloat16, the gradient of h. Fastest on the GPU if f is a multiple of 128, columns are contiguous and
            rows start at multiples of 16 bytes, here and in gate_up.
        gate_up: [s, 2f] bfloat16, gates and then ups in each row; or float8_e4m3fn, as `per_token_cast_to_fp8` has.
        gate_up_scale: [s, ceil(2f / 128)] float32, for gate_up in FP8.
        share: [s] float32, a factor per row of h.
        offs, alignment: as for `cast_both`. With `offs`, rows outside all groups are neither read nor written; results,
            including share's gradient, hold arbitrary bytes there.
        blocks: h has one scale per 128 columns and 128 tokens. Not with `offs`.
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`, for all casts.

    Returns:
        `SwigluGradient(a, a_scale, at, at_scale, ht, ht_scale, share)`. Scales are "m_aligned"; FP8 rows start at
        multiples of 16 bytes.

    Raises as `cast_both`.
    """
    options = amax_floor, round_scale, exact, alignment, blocks
    made = SWIGLU_GRADIENT.run((dh, gate_up, None, None, None, None, gate_up_scale, share, offs), options)
    return parts_of(Made(*made), blocks, share is not None)


class SwigluCast(transposed.AlongTokens):
    """The operation of `swiglu_gradient_cast_both`: dh, gate_up, results as in `Made`, gate_up_scale, share, offs."""

    Options = both.BothOptions

    def allocated(self, given: Given, options: tuple) -> Given:
        dh, gate_up, *_, gate_up_scale, share, offs = given
        rows, columns = dh.shape
        along, across = (rows, 2 * columns), (3 * columns, rows)
        made = Made(
            quantize.empty_out(dh, along),
            both.empty_scale(dh, (rows, _scale_columns(columns, share is not None))),
            quantize.empty_out(dh, across),
            both.empty_scale(dh, across),
        )
        return dh, gate_up, *made, gate_up_scale, share, offs

    def check_arguments(self, given: Given, options: both.BothOptions) -> None:
        self.check_dtypes(given)
        super().check_arguments(given, options)

    def check_dtypes(self, given: Given) -> None:
        of_codes = given[6] is not None
        dtypes = {
            "dh": torch.bfloat16,
            "gate_up": quantize.FP8_DTYPE if of_codes else torch.bfloat16,
            "gate_up_scale": torch.float32,
            "share": torch.float32,
        }
        for name, x in zip(self.names, given, strict=True):
            wanted = dtypes.get(name)
            if wanted is None or (x is None and name in self.lists):
                continue
            if not isinstance(x, torch.Tensor) or x.dtype != wanted:
                seen = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
                scale = " with gate_up_scale" if of_codes else "; of FP8 pass gate_up_scale, too"
                scale = scale if name == "gate_up" else ""
                raise TypeError(f"{name} is {seen}; it must be a tensor of {wanted}{scale}")
            if x.device != given[0].device:
                raise ValueError(f"{name} is on {x.device} but dh is on {given[0].device}; move it there")

    def check(self, given: Given, options: both.BothOptions) -> None:
        self.check_dtypes(given)
        both.check_blocks(options, given[-1])
        self.check_source(given)
        (rows, columns), lists = given[0].shape, self.lists_of(given)
        shapes = {
            "gate_up": (rows, 2 * columns),
            "gate_up_scale": (rows, ceil_div(2 * columns, SCALE_BLOCK)),
            "share": (rows,),
        }
        for name, x in {"gate_up": given[1], **lists}.items():
            wanted = shapes.get(name)
            if wanted is not None and not (x.dim() == len(wanted) and ops.holds(tuple(x.shape) == wanted)):
                raise ValueError(f"{name} has shape {list(x.shape)}; for dh of {[rows, columns]} it must be {wanted}")

    def check_memory(self, given: Given, options: both.BothOptions) -> both.BothOptions:
        sources.check_memory({name: x for name, x in self.lists_of(given).items() if name in ("share", "offs")})
        return options

    def readable(self, given: Given) -> Given:
        dh, gate_up, *others = given
        return (*map(tensors.in_vectors, (dh, gate_up)), *others) if self.needs_kernel(given) else given

    def needs_kernel(self, given: Given) -> bool:
        return super().needs_kernel(given) and given[0].shape[1] % SCALE_BLOCK == 0

    def prepare(self, given: Given, options: both.BothOptions, **where) -> launches.Prepared:
        dh, gate_up, *_ = given
        lists = self.lists_of(given)
        source = "e4m3" if "gate_up_scale" in lists else "bf16"
        kernel, grid = cast.choose_gated(source, options.blocks, *dh.shape)
        fields = ("dh", "x", "row_out", "row_scale", "out", "scale", *(_FIELDS[name] for name in lists))
        return quantize.launch_of(self, kernel, grid, given, self.numbers(given, options), fields, **where)

    def numbers(self, given: Given, options: both.BothOptions) -> dict[str, float]:
        dh, gate_up, a, a_scale, out, scale, gate_up_scale, _, offs = given
        rows, columns = dh.shape
        x_scale = (0, 0) if gate_up_scale is None else gate_up_scale.stride()
        return params.GATED.least | {
            **quantize.matrix_numbers(rows, 3 * columns, gate_up, out, scale),
            **quantize.values_of(options).numbers,
            **both.along_numbers(a, a_scale),
            "aligned": True,
            "out_vectors": True,
            "x_rows": rows,
            "groups": 0 if offs is None else len(offs),
            "alignment": options.alignment,
            "dh_stride": dh.stride(0),
            **dict(zip(("x_scale_stride_row", "x_scale_stride_column"), x_scale, strict=True)),
        }

    def define(self, given: Given, options: both.BothOptions) -> None:
        """Computes in torch, then casts by the separate functions."""
        dh, gate_up, *made, gate_up_scale, share, offs = given
        gradient, hidden, of_share = _values(dh, gate_up, gate_up_scale, share)
        lists = {} if offs is None else {"offs": offs, "alignment": options.alignment}
        casts = both.cast_both(gradient, **lists, **quantize.keywords_of(options))
        if options.blocks:
            along = quantize.per_block_cast_to_fp8(hidden.t(), **quantize.keywords_of(options))
        else:
            along = transposed.transposed_cast_to_fp8(hidden, **lists, **quantize.keywords_of(options))
        parts = parts_of(Made(*made), options.blocks, share is not None)
        for target, source in zip(parts, (*casts, *along), strict=False):
            is_code = target.dtype == quantize.FP8_DTYPE
            target, source = (x.view(torch.uint8) if is_code else x for x in (target, source))
            target.copy_(source)
        if share is not None:
            sums = made[1][:, casts.a_scale.shape[1] :].zero_()
            sums[:, :1].copy_(of_share[:, None])


def _scale_columns(columns: int, shares: bool) -> int:
    """FP8 columns whose row scales, with the shares' sums, have this count."""
    of_shares = ceil_div(columns, SCALE_BLOCK) if shares else 0
    return SCALE_BLOCK * (ceil_div(2 * columns, SCALE_BLOCK) + of_shares)


def parts_of(made: Made, blocks: bool, shares: bool) -> SwigluGradient:
    behind = made.a.shape[1]
    groups = ceil_div(behind, SCALE_BLOCK)
    ht_scale = made.scale[behind:]
    ht_scale = ht_scale[: ceil_div(ht_scale.shape[0], SCALE_BLOCK)] if blocks else ht_scale
    sums = made.a_scale[:, groups:].sum(1) if shares else None
    along = made.a, made.a_scale[:, :groups] if shares else made.a_scale
    return SwigluGradient(*along, made.out[:behind], made.scale[:behind], made.out[behind:], ht_scale, sums)


def _values(dh, gate_up, gate_up_scale, share) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient for gate_up, and h, in BF16; gradient for shares in FP32."""
    wide = gate_up.float() if gate_up_scale is None else quantize.dequantize(gate_up, gate_up_scale)
    (gate, up), dh = wide.chunk(2, 1), dh.float()
    share = 1.0 if share is None else share[:, None]
    sigmoid = (1 + torch.exp2(gate * _NUMBERS.sigmoid_factor)).reciprocal()
    sigmoid = sigmoid.masked_fill(sigmoid < torch.finfo(torch.float32).tiny, 0)
    silu, shared = gate * sigmoid, dh * share
    of_gate = shared * up * (sigmoid + silu * (1 - sigmoid))
    gradient = torch.cat([of_gate, shared * silu], 1)
    return gradient.bfloat16(), (silu * up * share).bfloat16(), (dh * (silu * up)).sum(1)


SWIGLU_GRADIENT = SwigluCast(
    *("swiglu_gradient_cast_both", "dh gate_up a! a_scale! at! at_scale!"),
    f"gate_up_scale share offs alignment blocks {quantize.OP_OPTIONS}",
    lists="gate_up_scale share offs",
    defaults={"alignment": SCALE_BLOCK},
    overload=None,
)
