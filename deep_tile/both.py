"""Casts to FP8 both ways, in one read, and the transpose of FP8: what gradients of linear layers multiply.

Called by users and train. A layer multiplies its input along k and, for the weight's gradient, along tokens; the weight
along k and, for the input's gradient, along n. Each cast here makes both operands at once. On a Hopper GPU a kernel of
both.cuh does it, elsewhere the casts that are joined.
Invariant: every result has the bits of the casts that are joined, and of the transpose that is torch's.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from deep_tile import _launcher, cast, launches, ops, params, quantize, sources, tensors, transposed
from deep_tile.config import SCALE_BLOCK
from deep_tile.ops import is_traced

_launches: launches.Table = {}
"""By the options of a call, the first of which says of which."""

BYTE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)

_FIELDS = {
    "rows": ("x", "row_out", "row_scale", "out", "scale"),
    "mixed": ("x", "row_out", "row_scale", "out", "scale"),
    "tiles": ("x", "row_out", "scale", "out"),
    "codes": ("x", "out"),
}
"""By what a kernel casts: fields of `params.CAST_BOTH` that its tensors are, in a launch's order."""

_CALLS = {"rows": "cast_both", "mixed": "cast_both", "tiles": "cast_weight", "codes": "transpose_fp8"}

_NAMES = {"x": "the input", "row_out": "a", "row_scale": "a_scale", "out": "the transpose", "scale": "its scale"}


class CastBoth(NamedTuple):
    """What `cast_both` makes of x [s, k].

    Attributes:
        a, a_scale: [s, k] and [s, ceil(k / 128)], as `per_token_cast_to_fp8`.
        at, at_scale: [k, s] and [k, ceil(s / 128)], as `transposed_cast_to_fp8`; with `blocks` that of
            `per_block_cast_to_fp8`, transposed, and [ceil(k / 128), ceil(s / 128)].
    """

    a: torch.Tensor
    a_scale: torch.Tensor
    at: torch.Tensor
    at_scale: torch.Tensor


class CastWeight(NamedTuple):
    """What `cast_weight` makes of w [..., n, k].

    Attributes:
        b, b_scale: [..., n, k] and [..., ceil(n / 128), ceil(k / 128)], as `per_block_cast_to_fp8`.
        bt: [..., k, n], the transpose of b.
    """

    b: torch.Tensor
    b_scale: torch.Tensor
    bt: torch.Tensor

    @property
    def bt_scale(self) -> torch.Tensor:
        """Of `bt`: [..., ceil(k / 128), ceil(n / 128)], a view."""
        return self.b_scale.mT


def cast_both(
    x: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    alignment: int = SCALE_BLOCK,
    blocks: bool = False,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
) -> CastBoth:
    """Quantise along k and along tokens, in one read of x: `per_token_cast_to_fp8` and `transposed_cast_to_fp8`.

    Bit for bit what those two make; with `blocks`, `per_block_cast_to_fp8` in the other's place. Runs on x's device and
    torch's current stream, and has no gradient.

    Args:
        x: [s, k] float64, float32, float16 or bfloat16, s tokens. On the GPU fastest where columns are adjacent and
            rows begin and end at multiples of 16 bytes.
        rows, offs, alignment: as for `transposed_cast_to_fp8`. With `offs` only tokens of groups are cast along k; `a`
            and `a_scale` hold arbitrary bytes for the others.
        blocks: along tokens, one scale for 128 columns and 128 tokens, as `fp8_gemm` takes `b`, instead of one for each
            column and 128 tokens. Without `offs`.
        amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`, of both casts.

    Returns:
        `CastBoth(a, a_scale, at, at_scale)`. Scales are "m_aligned"; rows of `a` and `at` begin at multiples of 16
        bytes.

    Raises:
        TypeError, ValueError, RuntimeError: as `transposed_cast_to_fp8`.
    """
    lists = quantize.given_lists(rows=rows, offs=offs)
    if is_traced():
        options = {"amax_floor": amax_floor, "round_scale": round_scale, "exact": exact, "alignment": alignment}
        return CastBoth(*torch.ops.deep_tile.cast_both(x, **options, **lists, blocks=blocks))
    return _cast_both(x, blocks, (amax_floor, round_scale, exact, alignment, (*lists,)), lists)


def cast_weight(
    w: torch.Tensor,
    *,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    exact: str = "divide",
) -> CastWeight:
    """Quantise a weight with one scale per 128x128, and transpose it, in one read of w.

    Bit for bit what `per_block_cast_to_fp8` makes, and its transpose. Runs on w's device and torch's current stream,
    and has no gradient.

    Args:
        w: [n, k], or [g, n, k] for experts, each with blocks of its own; float64, float32, float16 or bfloat16. On the
            GPU fastest where columns are adjacent and rows begin and end at multiples of 16 bytes.
        amax_floor, round_scale, exact: as for `per_block_cast_to_fp8`.

    Returns:
        `CastWeight(b, b_scale, bt)`. Rows of `b` and `bt` begin at multiples of 16 bytes.

    Raises:
        TypeError, ValueError, RuntimeError: as `per_block_cast_to_fp8`.
    """
    if is_traced():
        options = {"amax_floor": amax_floor, "round_scale": round_scale, "exact": exact}
        return CastWeight(*torch.ops.deep_tile.cast_weight(w, **options))
    return _cast_weight(w, (SCALE_BLOCK, amax_floor, round_scale, exact))


def transpose_fp8(x: torch.Tensor) -> torch.Tensor:
    """The transpose of FP8, or of other single bytes, written out: [..., n, k] becomes [..., k, n].

    Runs on x's device and torch's current stream, and has no gradient.

    Args:
        x: [n, k] or [g, n, k] float8_e4m3fn, float8_e5m2, uint8 or int8. On the GPU fastest where columns are adjacent
            and rows begin and end at multiples of 16 bytes.

    Returns:
        [..., k, n] of x's dtype, whose rows begin at multiples of 16 bytes.

    Raises:
        TypeError, ValueError, RuntimeError: as `per_block_cast_to_fp8`.
    """
    if is_traced():
        return torch.ops.deep_tile.transpose_fp8(x)
    return _transpose(x)


# Eager calls: what is made, and by which launch.


def _cast_both(x: torch.Tensor, blocks: bool, options: tuple, lists: sources.Lists) -> CastBoth:
    """Outside of tracing; `options` are equal to `transposed.Options`."""
    what = "mixed" if blocks else "rows"
    try:
        transposed.refuse_gradient(x, "cast_both")
        made = _new_both(x, blocks, lists)
        known = _launcher.launch_known(_launches, (what, *options), x, *made, *lists.values())
    except Exception:
        _check_given(_check_both, x, blocks, transposed.Options(*options), lists)
        raise
    if known:
        return made
    wanted = transposed.Options(*options)
    _check_given(_check_both, x, blocks, wanted, lists)
    sources.check_memory(lists)
    if quantize.needs_kernel(x, made.a):
        _enqueue(what, options, x, made, partial(_both_layout, made, wanted, lists), lists)
    else:
        _both_definition(x, blocks, wanted, lists, made)
    return made


def _new_both(x: torch.Tensor, blocks: bool, lists: sources.Lists) -> CastBoth:
    tokens, columns = sources.result_shape(x, False, lists)
    along, across = (tokens, columns), (columns, tokens)
    at = quantize.empty_out(x, across)
    at_scale = (quantize.empty_block_scale if blocks else _empty_scale)(x, across)
    return CastBoth(quantize.empty_out(x, along), _empty_scale(x, along), at, at_scale)


def _empty_scale(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return quantize.empty_scale(x, shape, quantize.DEFAULT_SCALE_LAYOUT)


@torch.no_grad()
def _both_definition(
    x: torch.Tensor, blocks: bool, options: transposed.Options, lists: sources.Lists, made: CastBoth
) -> None:
    rows = {name: given for name, given in lists.items() if name == "rows"}
    quantize.definition(x, options.of_rows, made.a, made.a_scale, rows)
    if not blocks:
        transposed.definition(x, options, made.at, made.at_scale, lists)
        return
    x = sources.gathered(x, lists["rows"]) if rows else x
    of_blocks = options.of_rows._replace(block_rows=SCALE_BLOCK)
    quantize.definition(x.t(), of_blocks, made.at, made.at_scale, {})


def _cast_weight(w: torch.Tensor, options: tuple) -> CastWeight:
    """Outside of tracing; `options` are equal to `quantize.Options`."""
    try:
        made = _new_weight(w)
        known = _launcher.launch_known(_launches, ("tiles", *options), w, *made)
    except Exception:
        _check_given(_check_weight, w, quantize.Options(*options))
        raise
    if known:
        return made
    _check_given(_check_weight, w, quantize.Options(*options))
    if quantize.needs_kernel(w, made.b):
        _enqueue("tiles", options, w, made, partial(_weight_layout, made, quantize.Options(*options)))
    else:
        _weight_definition(w, quantize.Options(*options), made)
    return made


def _new_weight(w: torch.Tensor) -> CastWeight:
    *leading, n, k = w.shape
    b, bt = (quantize.empty_out(w, (*leading, *shape)) for shape in ((n, k), (k, n)))
    return CastWeight(b, quantize.empty_block_scale(w, w.shape), bt)


@torch.no_grad()
def _weight_definition(w: torch.Tensor, options: quantize.Options, made: CastWeight) -> None:
    for matrix, *of_it in zip(*map(_matrices, (w, *made)), strict=True):
        b, scale, bt = of_it
        quantize.definition(matrix, options, b, scale, {})
        bt.view(torch.uint8).copy_(b.view(torch.uint8).t())


def _matrices(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 3 else x[None]


def _transpose(x: torch.Tensor) -> torch.Tensor:
    """Outside of tracing."""
    try:
        made = _new_transpose(x)
        known = _launcher.launch_known(_launches, ("codes",), x, made)
    except Exception:
        _check_given(_check_bytes, x)
        raise
    if known:
        return made
    _check_given(_check_bytes, x)
    if quantize.needs_kernel(x, made):
        _enqueue("codes", (), x, (made,), partial(_matrix_layout, made))
    else:
        made.view(torch.uint8).copy_(x.detach().view(torch.uint8).mT)
    return made


def _new_transpose(x: torch.Tensor) -> torch.Tensor:
    *leading, n, k = x.shape
    return quantize.empty_out(x, (*leading, k, n), x.dtype)


def _enqueue(
    what: str, options: tuple, x: torch.Tensor, made: tuple, layout, lists: sources.Lists = MappingProxyType({})
) -> None:
    """Launch the kernel that casts `what`, for a call that has been checked.

    Args:
        layout: makes the numbers of the launch from the input that the kernel can read.
    """
    x = _readable(x)

    def prepare() -> _launcher.Launch:
        fields = (*_FIELDS[what], *(cast.TRANSPOSED_LISTS[name] for name in lists))
        names = (*(_NAMES[field] for field in _FIELDS[what]), *lists)
        return _prepare(what, x, layout(x), names, params.places(fields))

    launches.enqueue(_launches, (what, *options), (x, *made, *lists.values()), prepare)


def _prepare(what: str, x: torch.Tensor, numbers: cast.BothLayout, names: tuple, places: dict) -> _launcher.Launch:
    """A launch on tensors of these names, among which `places` says where the kernel's are."""
    device, source = x.get_device(), quantize.KERNEL_SOURCES.get(x.dtype, "e4m3")
    sizes = numbers.rows, numbers.columns, numbers.matrices
    kernel, grid = cast.choose_both(what, source, *sizes, launches.num_sms(device))
    quantize.check_capture(kernel, device, _CALLS[what])
    return cast.prepare_both(kernel, grid, device, numbers, names, places)


def prepare_both(
    x: torch.Tensor, made: CastBoth, blocks: bool, options: transposed.Options, names: tuple, find: Callable
) -> _launcher.Launch:
    """The launch of `cast_both` of a dense matrix, as part of another call on tensors of these names; `find` says where
    in them a tensor lies."""
    what = "mixed" if blocks else "rows"
    places = {field: find(each) for field, each in zip(_FIELDS[what], (x, *made), strict=True)}
    return _prepare(what, x, _both_layout(made, options, {}, x), names, places)


def prepare_weight(
    w: torch.Tensor, made: CastWeight, options: quantize.Options, names: tuple, find: Callable
) -> _launcher.Launch:
    """The same of `cast_weight`."""
    places = {field: find(each) for field, each in zip(_FIELDS["tiles"], (w, *made), strict=True)}
    return _prepare("tiles", w, _weight_layout(made, options, w), names, places)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where no kernel can read it."""
    x = x.float() if x.dtype == torch.float64 else x
    return x.contiguous() if x.shape[-1] > 1 and x.stride(-1) != 1 else x


def _both_layout(made: CastBoth, options: transposed.Options, lists: sources.Lists, x: torch.Tensor) -> cast.BothLayout:
    numbers = transposed.layout(x, options, made.at, made.at_scale, lists)._asdict()
    numbers["aligned"] = numbers["aligned"] and tensors.is_aligned(made.a)
    scale_row, scale_column = made.a_scale.stride()
    return cast.BothLayout(
        **numbers, row_out_stride=made.a.stride(0), row_scale_stride_row=scale_row, row_scale_stride_column=scale_column
    )


def _weight_layout(made: CastWeight, options: quantize.Options, w: torch.Tensor) -> cast.BothLayout:
    return _matrix_layout(made.bt, w)._replace(
        **dict(zip(("scale_stride_row", "scale_stride_column"), made.b_scale.stride()[-2:], strict=True)),
        pow2_scale=options.round_scale == "pow2",
        amax_floor=options.floor,
        correction=int(options.exact == "divide"),
        row_out_stride=made.b.stride(-2),
        scale_step=_step(made.b_scale),
        row_out_step=_step(made.b),
    )


def _matrix_layout(transpose: torch.Tensor, x: torch.Tensor) -> cast.BothLayout:
    """What every transpose of matrices has; both are as this module allocates them, or any that kernels can read."""
    rows, columns = x.shape[-2:]
    elements = tensors.ALIGNMENT_BYTES // x.element_size()
    strides = (x.stride(-2), _step(x), columns)
    return cast.BothLayout(
        *(rows, columns, x.stride(-2), transpose.stride(-2)),
        aligned=tensors.is_aligned(x) and not any(stride % elements for stride in strides),
        out_vectors=True,
        x_rows=rows,
        matrices=x.shape[0] if x.dim() == 3 else 1,
        x_step=_step(x),
        out_step=_step(transpose),
    )


def _step(x: torch.Tensor) -> int:
    """From one matrix to the next."""
    return x.stride(0) if x.dim() == 3 else 0


# Checks.


def _check_given(check: Callable[..., None], x: torch.Tensor, *arguments) -> None:
    """`check`, and that x is memory."""
    if isinstance(x, torch.Tensor):
        tensors.require_plain(**{"w" if check is _check_weight else "x": x})
    check(x, *arguments)


def _check_both(x: torch.Tensor, blocks: bool, options: transposed.Options, lists: sources.Lists) -> None:
    """Check what can be checked without memory."""
    transposed.check_values(x, options, lists, "cast_both")
    if type(blocks) is not bool:
        raise TypeError(f"blocks is {blocks!r}; it must be True or False")
    if blocks and "offs" in lists:
        raise ValueError("blocks is given together with offs; groups have one scale for each column and 128 tokens")


def _check_weight(w: torch.Tensor, options: quantize.Options) -> None:
    quantize.check_source_dtype("w", w)
    _check_matrices("w", w, "[n, k], or [g, n, k] of experts")
    quantize.check_options(options)


def _check_bytes(x: torch.Tensor) -> None:
    quantize.check_source_dtype("x", x, BYTE_DTYPES)
    _check_matrices("x", x, "[n, k] or [g, n, k]")


def _check_matrices(name: str, x: torch.Tensor, wanted: str) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be {wanted}, so .view() it so")


# The ops, which tracers see.


def _read_options(alignment=SCALE_BLOCK, rows=None, offs=None, **options) -> tuple[transposed.Options, sources.Lists]:
    lists = quantize.given_lists(rows=rows, offs=offs)
    return transposed.Options(**options, alignment=alignment, lists=(*lists,)), lists


def _run_both_op(x: torch.Tensor, blocks: bool = False, **options) -> tuple[torch.Tensor, ...]:
    return tuple(_cast_both(x, blocks, *_read_options(**options)))


def _fake_both_op(x: torch.Tensor, blocks: bool = False, **options) -> tuple[torch.Tensor, ...]:
    cast_options, lists = _read_options(**options)
    _check_both(x, blocks, cast_options, lists)
    tokens, columns = sources.result_shape(x, False, lists)
    made = []
    for shape in ((tokens, columns), (columns, tokens)):
        made += [quantize.fake_out(x, shape), quantize.fake_scale(x, shape, quantize.DEFAULT_SCALE_LAYOUT)]
    return (*made[:3], quantize.fake_block_scale(x, (columns, tokens)) if blocks else made[3])


def _run_weight_op(w: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    return tuple(_cast_weight(w, quantize.Options(SCALE_BLOCK, **options)))


def _fake_weight_op(w: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    _check_weight(w, quantize.Options(SCALE_BLOCK, **options))
    *leading, n, k = w.shape
    b, bt = (quantize.fake_out(w, (*leading, *shape)) for shape in ((n, k), (k, n)))
    return b, quantize.fake_block_scale(w, w.shape), bt


def _fake_transpose_op(x: torch.Tensor) -> torch.Tensor:
    _check_bytes(x)
    *leading, n, k = x.shape
    return quantize.fake_out(x, (*leading, k, n), x.dtype)


_CAST_KEYWORDS = ops.keywords(quantize.OP_OPTIONS)

ops.register(
    f"cast_both(Tensor x, *, {ops.keywords('rows offs alignment', {'alignment': SCALE_BLOCK})}, bool blocks=False, "
    f"{_CAST_KEYWORDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_both_op,
    _fake_both_op,
)
ops.register(f"cast_weight(Tensor w, *, {_CAST_KEYWORDS}) -> (Tensor, Tensor, Tensor)", _run_weight_op, _fake_weight_op)
ops.register("transpose_fp8(Tensor x) -> Tensor", _transpose, _fake_transpose_op)
