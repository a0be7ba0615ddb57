"""SwiGLU's gradient, cast to FP8 along both dimensions, and the forward activation, cast along tokens.

Called by users and train. Between an MLP's GEMMs stands h = silu(gate) * up. The forward pass needs h cast along f,
which `silu_mul_cast_to_fp8` makes; the backward pass needs the gradients of gate and up cast along f and along tokens,
and h cast along tokens. This module makes all in one read: on a Hopper GPU by gated.cuh's kernel if f is a multiple of
128, else by torch and separate casts.
"""

from functools import partial
from typing import NamedTuple

import torch

from deep_tile import _launcher, both, cast, launches, ops, quantize, sources, tensors, transposed
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.ops import is_traced

_launches: launches.Table = {}
"""By a call's options and which tensors it has."""

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


class _Options(NamedTuple):
    """The options that affect values, except lists."""

    blocks: bool
    amax_floor: float
    round_scale: str
    exact: str
    alignment: int

    @property
    def cast(self) -> dict:
        return {"amax_floor": self.amax_floor, "round_scale": self.round_scale, "exact": self.exact}


class _Made(NamedTuple):
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
    """Gradient through h = silu(gate) * up * share, cast along f and along tokens, and h cast along tokens, in one
    read.

    Gradients and h are computed in FP32 and rounded to BF16, then cast bit for bit as by `cast_both` and
    `transposed_cast_to_fp8`. Before that rounding they are within a relative 1e-6 of the formula, plus 2e-7 per unit of
    gate. Runs on dh's device and torch's current stream, and has no gradient.

    Args:
        dh: [s, f] bfloat16, h's gradient. Fastest on the GPU if f is a multiple of 128, columns are contiguous and rows
            start at multiples of 16 bytes, here and in gate_up.
        gate_up: [s, 2f] bfloat16, gates and then ups in each row; or float8_e4m3fn, as `per_token_cast_to_fp8` has.
        gate_up_scale: [s, ceil(2f / 128)] float32, for gate_up in FP8.
        share: [s] float32, a factor per row of h.
        offs, alignment: as for `cast_both`. With `offs`, rows outside all groups are neither read nor written; results,
            including share's gradient, hold arbitrary bytes there.
        blocks: h has one scale for 128 columns and 128 tokens. Without `offs`.
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`, for all casts.

    Returns:
        `SwigluGradient(a, a_scale, at, at_scale, ht, ht_scale, share)`. Scales are "m_aligned"; FP8 rows start at
        multiples of 16 bytes.

    Raises:
        TypeError, ValueError, RuntimeError: as `cast_both`.
    """
    options = _Options(blocks, amax_floor, round_scale, exact, alignment)
    given = quantize.given_lists(gate_up_scale=gate_up_scale, share=share, offs=offs)
    if is_traced():
        op = torch.ops.deep_tile.swiglu_gradient_cast_both
        made = _Made(*op(dh, gate_up, **given, **options._asdict()))
    else:
        made = _cast(dh, gate_up, options, given)
    return _parts(made, blocks, share is not None)


def _cast(dh: torch.Tensor, gate_up: torch.Tensor, options: _Options, given: dict) -> _Made:
    """The call outside tracing."""
    try:
        transposed.refuse_gradient(dh, "swiglu_gradient_cast_both")
        made = _new(dh, options, given)
        known = _launcher.launch_known(_launches, (*options, *given), dh, gate_up, *given.values(), *made)
    except Exception:
        _check(dh, gate_up, options, given)
        raise
    if known:
        return made
    _check(dh, gate_up, options, given)
    if quantize.needs_kernel(dh, made.a) and dh.shape[1] % SCALE_BLOCK == 0:
        _enqueue(_readable(dh), _readable(gate_up), options, given, made)
    else:
        _join(dh, gate_up, options, given, made)
    return made


def _new(dh: torch.Tensor, options: _Options, given: dict) -> _Made:
    rows, columns = dh.shape
    along, across = (rows, 2 * columns), (3 * columns, rows)
    scales = (rows, _scale_columns(columns, given))
    return _Made(
        quantize.empty_out(dh, along),
        quantize.empty_scale(dh, scales, quantize.DEFAULT_SCALE_LAYOUT),
        quantize.empty_out(dh, across),
        quantize.empty_scale(dh, across, quantize.DEFAULT_SCALE_LAYOUT),
    )


def _scale_columns(columns: int, given: dict) -> int:
    """FP8 columns whose row scales, with the shares' sums, have this count."""
    return SCALE_BLOCK * (ceil_div(2 * columns, SCALE_BLOCK) + ("share" in given) * ceil_div(columns, SCALE_BLOCK))


def _parts(made: _Made, blocks: bool, shares: bool) -> SwigluGradient:
    behind = made.a.shape[1]
    groups = ceil_div(behind, SCALE_BLOCK)
    ht_scale = made.scale[behind:]
    ht_scale = ht_scale[: ceil_div(ht_scale.shape[0], SCALE_BLOCK)] if blocks else ht_scale
    sums = made.a_scale[:, groups:].sum(1) if shares else None
    along = made.a, made.a_scale[:, :groups] if shares else made.a_scale
    return SwigluGradient(*along, made.out[:behind], made.scale[:behind], made.out[behind:], ht_scale, sums)


def _join(dh: torch.Tensor, gate_up: torch.Tensor, options: _Options, given: dict, made: _Made) -> None:
    """By torch, and the casts that are joined."""
    gradient, hidden, share = _values(dh, gate_up, given)
    lists = {"offs": given["offs"], "alignment": options.alignment} if "offs" in given else {}
    casts = both.cast_both(gradient, **lists, **options.cast)
    if options.blocks:
        along = quantize.per_block_cast_to_fp8(hidden.t(), **options.cast)
    else:
        along = transposed.transposed_cast_to_fp8(hidden, **lists, **options.cast)
    for target, source in zip(_parts(made, options.blocks, "share" in given), (*casts, *along), strict=False):
        is_code = target.dtype == quantize.FP8_DTYPE
        target, source = (x.view(torch.uint8) if is_code else x for x in (target, source))
        target.copy_(source)
    if "share" in given:
        sums = made.a_scale[:, casts.a_scale.shape[1] :].zero_()
        sums[:, :1].copy_(share[:, None])


@torch.no_grad()
def _values(dh: torch.Tensor, gate_up: torch.Tensor, given: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient for gate_up, and h, in BF16; gradient for shares in FP32."""
    wide = quantize.dequantize(gate_up, given["gate_up_scale"]) if "gate_up_scale" in given else gate_up.float()
    (gate, up), dh = wide.chunk(2, 1), dh.float()
    share = given["share"][:, None] if "share" in given else 1.0
    sigmoid = (1 + torch.exp2(gate * _NUMBERS.sigmoid_factor)).reciprocal()
    sigmoid = sigmoid.masked_fill(sigmoid < torch.finfo(torch.float32).tiny, 0)
    silu, shared = gate * sigmoid, dh * share
    of_gate = shared * up * (sigmoid + silu * (1 - sigmoid))
    gradient = torch.cat([of_gate, shared * silu], 1)
    return gradient.bfloat16(), (silu * up * share).bfloat16(), (dh * (silu * up)).sum(1)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where the kernel cannot read it in vectors."""
    elements = tensors.ALIGNMENT_BYTES // x.element_size()
    fits = x.stride(1) == 1 and (len(x) == 1 or x.stride(0) % elements == 0) and tensors.is_aligned(x)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _enqueue(dh: torch.Tensor, gate_up: torch.Tensor, options: _Options, given: dict, made: _Made) -> None:
    listed = (dh, gate_up, *given.values(), *made)
    launches.enqueue(_launches, (*options, *given), listed, partial(_prepare, dh, gate_up, options, given, made))


def _prepare(dh, gate_up, options: _Options, given: dict, made: _Made) -> _launcher.Launch:
    source, device = "e4m3" if "gate_up_scale" in given else "bf16", dh.get_device()
    kernel, grid = cast.choose_gated(source, options.blocks, *dh.shape)
    quantize.check_capture(kernel, device, "swiglu_gradient_cast_both")
    layout, fields = _layout(dh, gate_up, options, given, made)
    names = ("dh", "gate_up", *given, "a", "a_scale", "at", "at_scale")
    return cast.prepare_gated(kernel, grid, device, layout, names, fields)


def _layout(dh, gate_up, options: _Options, given: dict, made: _Made) -> tuple[cast.GatedLayout, tuple[str, ...]]:
    """A launch's parameters, and the fields in `params.GATED` for its tensors."""
    rows, columns = dh.shape
    of_both = cast.BothLayout(
        *(rows, 3 * columns, gate_up.stride(0), made.out.stride(0)),
        aligned=True,
        out_vectors=True,
        scale_stride_row=made.scale.stride(0),
        scale_stride_column=made.scale.stride(1),
        pow2_scale=options.round_scale == "pow2",
        amax_floor=quantize.Options(1, options.amax_floor).floor,
        correction=int(options.exact == "divide"),
        x_rows=rows,
        groups=len(given["offs"]) if "offs" in given else 0,
        alignment=options.alignment,
        row_out_stride=made.a.stride(0),
        row_scale_stride_row=made.a_scale.stride(0),
        row_scale_stride_column=made.a_scale.stride(1),
    )
    x_scale = given["gate_up_scale"].stride() if "gate_up_scale" in given else (0, 0)
    fields = ("dh", "x", *(_FIELDS[name] for name in given), "row_out", "row_scale", "out", "scale")
    return cast.GatedLayout(*of_both, dh.stride(0), *x_scale), fields


# Checks.


def _check(dh, gate_up, options: _Options, given: dict) -> None:
    _check_values(dh, gate_up, options, given)
    tensors.require_plain(dh=dh, gate_up=gate_up, **given)
    sources.check_memory({name: x for name, x in given.items() if name in ("share", "offs")})


def _check_values(dh, gate_up, options: _Options, given: dict) -> None:
    """The checks that need no memory."""
    of_codes = "gate_up_scale" in given
    dtypes = {
        "dh": torch.bfloat16,
        "gate_up": quantize.FP8_DTYPE if of_codes else torch.bfloat16,
        "gate_up_scale": torch.float32,
        "share": torch.float32,
    }
    for name, x in {"dh": dh, "gate_up": gate_up, **given}.items():
        wanted = dtypes.get(name)
        if wanted is not None and (not isinstance(x, torch.Tensor) or x.dtype != wanted):
            seen = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            scale = (
                "" if name != "gate_up" else " with gate_up_scale" if of_codes else "; of FP8 pass gate_up_scale, too"
            )
            raise TypeError(f"{name} is {seen}; it must be a tensor of {wanted}{scale}")
        if wanted is not None and x.device != dh.device:
            raise ValueError(f"{name} is on {x.device} but dh is on {dh.device}; move it there")
    if type(options.blocks) is not bool:
        raise TypeError(f"blocks is {options.blocks!r}; it must be True or False")
    if options.blocks and "offs" in given:
        raise ValueError("blocks is given together with offs; groups have one scale for each column and 128 tokens")
    lists = {name: x for name, x in given.items() if name == "offs"}
    transposed.check_values(dh, transposed.Options(*options[1:], lists=(*lists,)), lists, "swiglu_gradient_cast_both")
    rows, columns = dh.shape
    shapes = {
        "gate_up": (rows, 2 * columns),
        "gate_up_scale": (rows, ceil_div(2 * columns, SCALE_BLOCK)),
        "share": (rows,),
    }
    for name, x in {"gate_up": gate_up, **given}.items():
        if name in shapes and not (x.dim() == len(shapes[name]) and ops.holds(tuple(x.shape) == shapes[name])):
            raise ValueError(f"{name} has shape {list(x.shape)}; for dh of {list(dh.shape)} it must be {shapes[name]}")


# The op that tracers see.


def _read(gate_up_scale=None, share=None, offs=None, **options) -> tuple[_Options, dict]:
    given = quantize.given_lists(gate_up_scale=gate_up_scale, share=share, offs=offs)
    defaults = {"blocks": False, "amax_floor": quantize.SMALLEST_AMAX_FLOOR, "round_scale": "none", "exact": "divide"}
    return _Options(**{**defaults, "alignment": SCALE_BLOCK, **options}), given


def _run_op(dh: torch.Tensor, gate_up: torch.Tensor, **keywords) -> tuple[torch.Tensor, ...]:
    return tuple(_cast(dh, gate_up, *_read(**keywords)))


def _fake_op(dh: torch.Tensor, gate_up: torch.Tensor, **keywords) -> tuple[torch.Tensor, ...]:
    options, given = _read(**keywords)
    _check_values(dh, gate_up, options, given)
    rows, columns = dh.shape
    made = []
    for shape, scales in (
        ((rows, 2 * columns), (rows, _scale_columns(columns, given))),
        ((3 * columns, rows), (3 * columns, rows)),
    ):
        made += [quantize.fake_out(dh, shape), quantize.fake_scale(dh, scales, quantize.DEFAULT_SCALE_LAYOUT)]
    return tuple(made)


ops.register(
    "swiglu_gradient_cast_both(Tensor dh, Tensor gate_up, *, Tensor? gate_up_scale=None, Tensor? share=None, "
    f"{ops.keywords('offs alignment', {'alignment': SCALE_BLOCK})}, bool blocks=False, "
    f"{ops.keywords(quantize.OP_OPTIONS)}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_op,
    _fake_op,
)
