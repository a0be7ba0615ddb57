"""Check any cast to FP8, and any call that copies its inputs: values, memory around results, repeatability.

Each round draws a call of CASES: sizes from none on, inputs of any strides and alignment, values of every magnitude,
lists of rows that lie, options, results that are given or allocated. It calls twice beside element-wise kernels of
another stream. Results are compared with expected_casts.py, bit for bit where bits are promised; given ones lie in
memory of one byte, which must stay as it is around them, between their rows and in rows that are dead. The counts of
what is wrong are read now and then. A round depends on the seed and its number alone.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from random import Random
from typing import Any, NamedTuple

import campaign
import expected_casts
import torch
from campaign import NAN_BYTE, Room, lay_out, on_gpu, reserve
from expected_casts import Cast, Gating, Rounding, codes_differ, numbers_differ
from helpers import ACCUMULATION, ROUNDING, Exact, Operands, are_off, exact_product
from strategies import Place

import deep_tile
from deep_tile import plan
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import OUTPUTS, QUANTIZED
from deep_tile.options import DIVISIONS, SCALE_LAYOUTS, SCALE_ROUNDINGS
from deep_tile.problem import GemmProblem
from deep_tile.quantize import SMALLEST_AMAX_FLOOR, SOURCE_DTYPES
from deep_tile.select.defaults import default_configs
from deep_tile.tensors import ALIGNMENT_BYTES, SCALE_DTYPES


class Sizes(NamedTuple):
    """Most rows, columns and elements of an input."""

    rows: int
    columns: int
    elements: int


USUAL, LARGE = Sizes(300, 1024, 1 << 18), Sizes(4096, 8192, 1 << 20)
LARGE_SHARE, EMPTY_SHARE, WINDOWS_SHARE, LIE_SHARE, GIVEN_SHARE = 0.02, 0.03, 0.03, 0.25, 0.6

EDGES = (1, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 120, 127, 128, 129, 136, 200, 255, 256, 257, 384, 513)
GROUPS = (1, 2, 3, 8, 33, 130)
MOST_GROUPS, MOST_EXPERTS = 1024, 2**15 - 2

DEFAULT_FLOOR = inspect.signature(deep_tile.per_token_cast_to_fp8).parameters["amax_floor"].default
FLOORS = (None, None, 1e-4, 1e-10, 2.0**-80, SMALLEST_AMAX_FLOOR, *((0.0,) if SMALLEST_AMAX_FLOOR < 2.0**-80 else ()))
"""None stands for the default. 0, where it is taken, means the smallest floor."""

VALUES = ("normal", "normal", "small", "mixed", "huge", "zeros", "ties", "odd")
"""Kinds of values of inputs that are only cast; see `Pool`."""

TAME_VALUES = ("normal", "normal", "zeros", "ties")
"""Kinds of values of inputs that are also multiplied."""

LINEAR_M, LINEAR_N, LINEAR_K = (1, 64, 65, 128, 200, 300), (8, 136, 256), (16, 512, 1000)
CAST_COLUMNS = (8, 128, 256, 304)
TRUNCATION = 2.0**-7
"""Largest relative error of WGMMA's truncation, for a K block of 128 equal terms: each may lose 2^-13 of the sum."""

SMALLEST_STEP = 2.0**-149
"""Between denormal FP32 numbers."""

FINISHES = (("bf16", "none"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "none"), ("fp16", "none"), ("fp16", "fp16"))
"""Formats of a linear layer's result and bias."""

FILLS = (NAN_BYTE, NAN_BYTE, 0x7F)
"""Bytes around inputs: NaN in every format; or huge numbers and NaN, which as integers are rows far away."""

POISONS = (0x55, 0xA6, 0x01)
"""Bytes of results before they are written, and around them."""

_MARGIN = 1 << 15
"""Bytes around each result."""

_POOL = 2 * LARGE.elements
"""Leading dimensions may have more rows than were drawn."""

_SHOWN = 6
"""Elements of a wrong result that are listed."""


# Draws.


class Tensor(NamedTuple):
    """An input, or a given result.

    Attributes:
        dtype: a name of torch.
        values: a kind of values in `Pool`, or the numbers themselves; empty for a result.
        bound: for an index, the number of rows.
    """

    shape: tuple[int, ...]
    dtype: str
    place: Place
    values: str | tuple[int, ...] = ""
    bound: int = 0

    @property
    def room(self) -> Room:
        dtype = getattr(torch, self.dtype)
        return Room(self.shape, torch.uint8 if dtype.itemsize == 1 else dtype, self.place)


class Draw(NamedTuple):
    """All that is needed to make one call again. `case` is a key of CASES; `targets` are the results that are given."""

    case: str
    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]
    options: dict[str, Any]
    fill: int
    poison: int
    seed: int

    @property
    def rounding(self) -> Rounding:
        """How the cast rounds."""
        options = self.options
        floor = max(options.get("amax_floor", DEFAULT_FLOOR) or 0.0, SMALLEST_AMAX_FLOOR)
        return Rounding(floor, options.get("round_scale") == "pow2", options.get("exact") == "reciprocal")


def draw(random: Random, sizes: Sizes) -> Draw:
    (case,) = random.choices(list(CASES), [case.weight for case in CASES.values()])
    inputs, targets, options = CASES[case].draw(random, sizes)
    return Draw(case, inputs, targets, options, random.choice(FILLS), random.choice(POISONS), random.randrange(2**31))


Drawn = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]
"""Inputs, targets and options of a call."""


def draw_size(random: Random, most: int, *, empty: bool = True) -> int:
    if empty and random.random() < EMPTY_SHARE:
        return 0
    if random.random() < 0.5:
        return min(random.choice(EDGES), most)
    return random.randint(1, max(1, most))


def draw_matrix(random: Random, sizes: Sizes, *, empty: bool = True) -> tuple[int, int]:
    rows, columns = draw_size(random, sizes.rows, empty=empty), draw_size(random, sizes.columns, empty=empty)
    return min(rows, max(1, sizes.elements // max(1, columns))), columns


def draw_leading(random: Random, rows: int) -> tuple[int, ...]:
    """Leading dimensions with about `rows` rows in total; with none if `rows` is 0."""
    dims = random.choice((1, 1, 1, 1, 0, 2, 2, 3))
    if dims == 0:
        return ()
    leading = []
    for left in range(dims - 1, 0, -1):
        size = random.randint(1, max(1, round(rows ** (1 / (left + 1)) * 1.5)))
        leading.append(size)
        rows = ceil_div(rows, size)
    return *leading, rows


def draw_place(random: Random, shape: tuple[int, ...], item_bytes: int, *, dense_columns: bool = False) -> Place:
    """Anywhere: contiguous; slices with gaps, of every second, transposed, expanded, windows that overlap, all at once.

    Args:
        dense_columns: whether columns are adjacent.
    """
    vector = ALIGNMENT_BYTES // item_bytes
    offset = random.choice((0, 0, vector, 3 * vector, random.randint(0, 40)))
    if len(shape) == 2 and random.random() < WINDOWS_SHARE:
        return Place((random.randint(1, max(1, shape[1] - 1)), 1), offset)
    ways = {random.choice(("contiguous", "gaps", "gaps", "steps", "turned", "expanded")) for _ in range(2)}
    order = list(range(len(shape)))[::-1]
    if "turned" in ways:
        kept = 1 if dense_columns else 0
        order[kept:] = random.sample(order[kept:], len(order) - kept)
    strides, span = [0] * len(shape), 1
    for dim in order:
        is_dense = dense_columns and dim == len(shape) - 1
        step = random.choice((1, 1, 2, 3)) if "steps" in ways and not is_dense else 1
        gap = random.choice((0, 1, 2, 8, 16, 64, random.randint(0, 40))) if "gaps" in ways and dim != order[0] else 0
        strides[dim] = span * step + gap
        span = strides[dim] * max(1, shape[dim])
    if "expanded" in ways and order:
        choices = order[1:] if dense_columns else order
        for dim in random.sample(choices, min(1, len(choices))):
            strides[dim] = 0
    for dim, size in enumerate(shape):
        if size == 1 and random.random() < 0.3:
            strides[dim] = random.randint(1, 5000)  # as torch reports of single rows
    return Place(tuple(strides), offset)


def draw_input(random: Random, shape: tuple[int, ...], dtype: str, values: str | tuple[int, ...], **how) -> Tensor:
    bound = how.pop("bound", 0)
    return Tensor(shape, dtype, draw_place(random, shape, getattr(torch, dtype).itemsize, **how), values, bound)


def draw_source(random: Random, shape: tuple[int, ...], dtypes=SOURCE_DTYPES, values=VALUES) -> Tensor:
    return draw_input(random, shape, name_of(random.choice(dtypes)), random.choice(values))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def strides_of(shape: tuple[int, ...], row: int, column: int) -> tuple[int, ...]:
    """Strides of a tensor whose rows, counted over all leading dimensions, are `row` elements apart."""
    strides = [column]
    for size in shape[-2::-1]:
        strides.insert(0, row)
        row *= max(1, size)
    return tuple(strides)


def draw_rows_of_result(random: Random, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A target with adjacent columns and rows that do not overlap."""
    vector = ALIGNMENT_BYTES // getattr(torch, dtype).itemsize
    columns = max(1, shape[-1])
    aligned = round_up(columns, vector) + vector * random.choice((0, 0, 1, 3))
    row = random.choice((columns, aligned, aligned, columns + random.randint(0, 40)))
    offset = random.choice((0, 0, vector, random.randint(0, 40)))
    return Tensor(shape, dtype, Place(strides_of(shape, row, 1), offset))


def draw_scale_of_result(random: Random, shape: tuple[int, ...]) -> Tensor:
    rows, columns = max(1, prod(shape[:-1])), max(1, shape[-1])
    step, gap = random.choice((1, 1, 2, 3)), random.choice((0, 0, 1, 4, random.randint(0, 9)))
    along_rows = (step, rows * step + gap)
    row, column = along_rows if random.random() < 0.5 else (columns * step + gap, step)
    return Tensor(shape, "float32", Place(strides_of(shape, row, column), random.choice((0, 0, random.randint(0, 7)))))


def draw_targets(random: Random, shape: tuple[int, ...], block_rows: int = 1) -> dict[str, Tensor]:
    """Both targets of a cast, one of them, or none."""
    targets = {}
    if random.random() < GIVEN_SHARE:
        targets["out"] = draw_rows_of_result(random, shape, "float8_e4m3fn")
    if random.random() < GIVEN_SHARE:
        targets["scale_out"] = draw_scale_of_result(random, scale_shape(shape, block_rows))
    return targets


def scale_shape(shape: tuple[int, ...], block_rows: int = 1) -> tuple[int, ...]:
    if block_rows == 1:
        return *shape[:-1], ceil_div(shape[-1], SCALE_BLOCK)
    return ceil_div(shape[0], block_rows), ceil_div(shape[1], SCALE_BLOCK)


def draw_options(random: Random, *, layout: bool = True) -> dict[str, Any]:
    floor = random.choice(FLOORS)
    options = {} if floor is None else {"amax_floor": floor}
    options |= {"round_scale": random.choice(SCALE_ROUNDINGS), "exact": random.choice(DIVISIONS)}
    return options | ({"scale_layout": random.choice(SCALE_LAYOUTS)} if layout else {})


def draw_list(random: Random, numbers: tuple[int, ...], dtype: str = "int32") -> Tensor:
    return Tensor((len(numbers),), dtype, Place((1,), random.randint(0, 3)), numbers)


def draw_ends(random: Random, rows: int, alignment: int = 1) -> tuple[int, ...]:
    """The row behind each group's last, of about as many rows."""
    groups = random.choice(GROUPS)
    end, ends = 0, []
    for _ in range(groups):
        end = round_up(end, alignment) + random.choice((0, 1, random.randint(0, 2 * rows // groups)))
        ends.append(end)
    ends[-1] = random.choice((ends[-1], min(ends[-1], rows), rows))
    return lying(random, ends, rows)


def lying(random: Random, numbers: list[int], rows: int) -> tuple[int, ...]:
    if random.random() >= LIE_SHARE:
        return tuple(numbers)
    lies = (-(2**31), -1, 0, rows, rows + 1, 2**31 - 1, random.randint(0, max(1, rows)))
    return tuple(random.choice(lies) if random.random() < 0.4 else number for number in numbers)


def draw_index(random: Random, shape: tuple[int, ...], rows: int, **how) -> Tensor:
    """Row numbers, some out of range."""
    dtype = random.choice(("int32", "int64"))
    if prod(shape) < 20 and dtype == "int64" and len(shape) == 1:
        extremes = (-(2**63), -(2**32), -1, 0, rows, 2**32, 2**63 - 1)
        return draw_list(random, tuple(random.choice(extremes) for _ in range(shape[0])), dtype)
    if len(shape) == 1:
        return Tensor(shape, dtype, Place((1,), random.randint(0, 3)), "index", rows)
    return draw_input(random, shape, dtype, "index", bound=rows, **how)


def draw_per_token(random: Random, sizes: Sizes) -> Drawn:
    rows, k = draw_matrix(random, sizes)
    shape = (*draw_leading(random, rows), k)
    return {"x": draw_source(random, shape)}, draw_targets(random, shape), draw_options(random)


def draw_listed(random: Random, sizes: Sizes) -> Drawn:
    """A cast of rows by an index, of living rows, or both."""
    rows, k = shape = draw_matrix(random, sizes)
    inputs = {"x": draw_source(random, shape)}
    kinds = random.choice((("rows",), ("offs",), ("rows", "offs")))
    if "rows" in kinds:
        shape = (draw_size(random, sizes.rows), k)
        inputs["rows"] = draw_index(random, shape[:1], rows)
    if "offs" in kinds:
        inputs["offs"] = draw_list(random, draw_ends(random, shape[0]))
    return inputs, draw_targets(random, shape), draw_options(random)


def draw_grouped_shape(random: Random, sizes: Sizes) -> tuple[int, int, int]:
    rows, k = draw_matrix(random, sizes)
    groups = random.choice((*GROUPS, MOST_GROUPS)) if random.random() > EMPTY_SHARE else 0
    groups = min(groups, max(1, sizes.elements // max(1, k)))
    room = sizes.elements // max(1, groups * k)
    return groups, min(room, max(1, rows // max(1, groups) + random.choice((0, 1, 9)))), k


def draw_counts(random: Random, groups: int, rows: int) -> Tensor:
    counts = [random.choice((0, 1, rows, random.randint(0, rows))) for _ in range(groups)]
    return draw_list(random, lying(random, counts, rows))


def draw_counted(random: Random, sizes: Sizes) -> Drawn:
    groups, rows, k = shape = draw_grouped_shape(random, sizes)
    inputs = {"x": draw_source(random, shape), "counts": draw_counts(random, groups, rows)}
    return inputs, draw_targets(random, shape), draw_options(random)


def draw_silu_mul(random: Random, sizes: Sizes) -> Drawn:
    kind = random.choice(("", "offs", "counts"))
    inputs, sizes = {}, sizes._replace(elements=sizes.elements // 4)
    if kind == "counts":
        groups, rows, k = shape = draw_grouped_shape(random, sizes)
        inputs["counts"] = draw_counts(random, groups, rows)
    else:
        rows, k = shape = draw_matrix(random, sizes)
        shape = shape if kind else (*draw_leading(random, rows), k)
    if kind == "offs":
        inputs["offs"] = draw_list(random, draw_ends(random, rows))
    gate_up = draw_source(random, (*shape[:-1], 2 * k), (torch.bfloat16, torch.float16))
    options = draw_options(random) | {
        "limit": random.choice((None, None, 7.0, 10, 0.5, 1e-3)),
        "alpha": random.choice((1.0, 1.0, 1.702, 0, -1.0, 30.0)),
        "beta": random.choice((0.0, 0.0, 1.0, -1, 0.25)),
    }
    return {"gate_up": gate_up} | inputs, draw_targets(random, shape), options


def draw_per_block(random: Random, sizes: Sizes) -> Drawn:
    shape = draw_matrix(random, sizes)
    return (
        {"w": draw_source(random, shape)},
        draw_targets(random, shape, SCALE_BLOCK),
        draw_options(random, layout=False),
    )


def draw_weight(random: Random, sizes: Sizes) -> Drawn:
    inputs, _, options = draw_per_block(random, sizes)
    return inputs, {}, options


def draw_transposed(random: Random, sizes: Sizes) -> Drawn:
    tokens, k = draw_matrix(random, Sizes(2 * sizes.rows, sizes.columns // 2, sizes.elements))
    inputs = {"x": draw_source(random, (tokens, k))}
    kinds = random.choice(((), ("rows",), ("offs",), ("rows", "offs")))
    options = draw_options(random) | {"alignment": random.choice((128, 128, 256, 512, 1024))}
    rows = tokens
    if "rows" in kinds:
        tokens = draw_size(random, 2 * sizes.rows)
        inputs["rows"] = draw_index(random, (tokens,), rows)
    targets = draw_targets(random, (k, tokens))
    if "offs" in kinds:
        ends = draw_ends(random, tokens, options["alignment"])
        inputs["offs"] = draw_list(random, ends)
        if expected_casts.living_tokens(ends, tokens, options["alignment"]) is None:  # nothing else can be checked
            targets = {"out": draw_rows_of_result(random, (k, tokens), "float8_e4m3fn")}
            targets["scale_out"] = draw_scale_of_result(random, scale_shape((k, tokens)))
    return inputs, targets, options


def draw_both(random: Random, sizes: Sizes) -> Drawn:
    """A cast in both directions, without targets and with ends that do not decrease."""
    inputs, _, options = draw_transposed(random, sizes)
    rows = inputs["rows"].shape[0] if "rows" in inputs else inputs["x"].shape[0]
    bounds = inputs.pop("offs", None)
    if bounds and expected_casts.living_tokens(bounds.values, rows, options["alignment"]) is not None:
        inputs["offs"] = bounds
    options["blocks"] = "offs" not in inputs and random.random() < 0.5
    del options["scale_layout"]
    return inputs, {}, options


def draw_weights_shape(random: Random, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a layer's weight, or of the experts' weights."""
    n, k = draw_matrix(random, sizes._replace(elements=sizes.elements // 3))
    return (random.choice((1, 2, 3)), n, k) if random.random() < 0.4 else (n, k)


def draw_weight_both(random: Random, sizes: Sizes) -> Drawn:
    return {"w": draw_source(random, draw_weights_shape(random, sizes))}, {}, draw_options(random, layout=False)


def draw_transpose(random: Random, sizes: Sizes) -> Drawn:
    dtype = random.choice(("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"))
    return {"x": draw_input(random, draw_weights_shape(random, sizes), dtype, "bytes")}, {}, {}


def draw_combine(random: Random, sizes: Sizes) -> Drawn:
    rows, n = draw_matrix(random, sizes)
    tokens, top_k = draw_matrix(random, Sizes(sizes.rows, 9, sizes.elements // max(1, n)))
    x = draw_input(random, (rows, n), "bfloat16", random.choice(VALUES), dense_columns=True)
    weights = draw_source(random, (tokens, top_k), (torch.float32, torch.bfloat16))
    given = random.random() < GIVEN_SHARE
    targets = {"out": draw_rows_of_result(random, (tokens, n), "bfloat16")} if given else {}
    return {"x": x, "weights": weights, "index": draw_index(random, (tokens, top_k), rows)}, targets, {}


def draw_sort(random: Random, sizes: Sizes) -> Drawn:
    shape = draw_matrix(random, Sizes(sizes.rows, 9, sizes.elements))
    experts = random.choice((1, 2, 3, 8, 60, 64, 128, 256, 1000, MOST_EXPERTS))
    alignment = random.choice((1, 1, 2, 16, 128, 1024)) if experts <= 256 else random.choice((1, 2, 8))
    return {"chosen": draw_index(random, shape, experts)}, {}, {"experts": experts, "alignment": alignment}


def draw_dequantize(random: Random, sizes: Sizes) -> Drawn:
    rows, k = shape = draw_matrix(random, sizes)
    block_rows = random.choice((1, SCALE_BLOCK))
    shape = shape if block_rows > 1 else (*draw_leading(random, rows), k)
    scale = draw_narrow_scale(random, scale_shape(shape, block_rows), random.choice(VALUES))
    x = draw_input(random, shape, "float8_e4m3fn", "bytes")
    block = random.choice((None, (block_rows, SCALE_BLOCK)))
    return {"x": x, "scale": scale}, {}, {"block": block}


def draw_narrow_scale(random: Random, shape: tuple[int, ...], values: str) -> Tensor:
    """A scale in any dtype that calls take."""
    dtype = name_of(random.choice(SCALE_DTYPES))
    return draw_input(random, shape, dtype, "bytes" if dtype == "float8_e8m0fnu" and values != "scales" else values)


def draw_layer(random: Random, leading: tuple[int, ...], n: int, finish: tuple[str, str]) -> Drawn:
    """Arguments of a linear layer apart from its input and weight."""
    inputs, targets = {}, {}
    of_result, of_bias = (OUTPUTS[name].dtype if name != "none" else "" for name in finish)
    if of_bias:
        inputs["bias"] = draw_input(random, (n,), of_bias, "normal")
    if random.random() < GIVEN_SHARE:
        targets["out"] = draw_rows_of_result(random, (*leading, n), of_result)
    options = draw_options(random, layout=False) | {
        "out_dtype": getattr(torch, of_result),
        "batch_invariant": random.random() < 0.3,
        "pdl": random.choice((None, True, False)),
    }
    return inputs, targets, options


def draw_operand(random: Random, rows: int, k: int) -> Tensor:
    """An operand of a GEMM: its rows begin at multiples of 16 bytes."""
    row = round_up(k, ALIGNMENT_BYTES) + ALIGNMENT_BYTES * random.choice((0, 0, 1, 5))
    return Tensor((rows, k), "float8_e4m3fn", Place((row, 1), ALIGNMENT_BYTES * random.choice((0, 3))), "codes")


def draw_quantized_weight(random: Random, n: int, k: int) -> dict[str, Tensor]:
    scale = draw_narrow_scale(random, scale_shape((n, k), SCALE_BLOCK), "scales")
    return {"b": draw_operand(random, n, k), "b_scale": scale}


def draw_linear(random: Random, sizes: Sizes) -> Drawn:
    n, k = random.choice(LINEAR_N), random.choice(LINEAR_K)
    leading = draw_leading(random, draw_size(random, min(sizes.rows, sizes.elements // k)))
    wide = (torch.bfloat16, torch.float16, torch.float32)
    inputs, targets, options = draw_layer(random, leading, n, random.choice(FINISHES))
    weight = draw_quantized_weight(random, n, k)
    if random.random() < 0.4:
        weight = {"b": draw_source(random, (n, k), wide, TAME_VALUES)}
    return {"x": draw_source(random, (*leading, k), wide, TAME_VALUES)} | weight | inputs, targets, options


def draw_pair(random: Random, sizes: Sizes) -> Drawn:
    """A linear layer whose input is quantised; rows are where a copy of them could be."""
    n, k = random.choice(LINEAR_N), random.choice([k for k in LINEAR_K if k % ALIGNMENT_BYTES == 0])
    leading = draw_leading(random, draw_size(random, min(sizes.rows, sizes.elements // k)))
    inputs, targets, options = draw_layer(random, leading, n, random.choice(FINISHES))
    strides, row = [1], k
    for size in leading[::-1]:
        row += ALIGNMENT_BYTES * random.choice((0, 0, 1, 4))
        strides.insert(0, row)
        row *= max(1, size)
    a = Tensor((*leading, k), "float8_e4m3fn", Place(tuple(strides), 16 * random.choice((0, 1))), "codes")
    a_scale = draw_narrow_scale(random, scale_shape((*leading, k)), "scales")
    options = {name: value for name, value in options.items() if name not in ("amax_floor", "round_scale", "exact")}
    return {"x[0]": a, "x[1]": a_scale} | draw_quantized_weight(random, n, k) | inputs, targets, options


def draw_gemm_cast(random: Random, sizes: Sizes) -> Drawn:
    """A product whose result is cast, by one kernel or two."""
    activation, bias = random.choice((None, None, "swiglu")), random.choice(("none", "none", "bf16"))
    columns, k = random.choice(CAST_COLUMNS), random.choice(LINEAR_K)
    m, n = draw_size(random, min(sizes.rows, sizes.elements // k)), columns * (2 if activation else 1)
    inputs = {"a": draw_operand(random, m, k), "a_scale": draw_narrow_scale(random, scale_shape((m, k)), "scales")}
    inputs |= draw_quantized_weight(random, n, k)
    if bias != "none":
        inputs["bias"] = draw_input(random, (n,), OUTPUTS[bias].dtype, "normal")
    targets = draw_targets(random, (m, columns))
    options = draw_options(random) | {"activation": activation, "batch_invariant": True}
    options["pdl"] = random.choice((None, True, False))
    if m and columns % ALIGNMENT_BYTES == 0 and is_aligned(targets.get("out")):
        configs = [config for config in quantizing_configs(bias, activation or "none") if config.takes_k(k)]
        options["config"] = random.choice((None, *configs))
    return inputs, targets, options


def is_aligned(result: Tensor | None) -> bool:
    """Whether TMA can store FP8 results to it."""
    return result is None or all(
        number % ALIGNMENT_BYTES == 0 for number in (result.place.strides[0], result.place.offset)
    )


def quantizing_configs(bias: str, activation: str) -> tuple[GemmConfig, ...]:
    return default_configs(True, "fp8", QUANTIZED, False, bias, activation)


# Inputs.


class Pool:
    """Values of every kind, made once; inputs take slices of them.

    normal: samples. small, huge: likewise, each 128 of a magnitude from 1 down to 1e-38, or up to 1e38. mixed: each
    number of its own magnitude. zeros: of both signs, and denormals. ties: half way between two numbers of e4m3, times
    the scale of groups that hold 448. odd: samples, a few of them NaN, infinite, zero, denormal or the largest. scales:
    powers of two and between. codes, bytes: of e4m3, finite and any. index: from 0 to 1, and some beyond.
    """

    def __init__(self, device: str, seed: int):
        self._device, self._seed, self._generator = device, seed, torch.Generator(device)
        self._values: dict[tuple[str, str], torch.Tensor] = {}

    def cut(self, random: Random, wanted: Tensor) -> torch.Tensor:
        """Draw the values of an input."""
        if isinstance(wanted.values, tuple):
            return torch.tensor(wanted.values, dtype=getattr(torch, wanted.dtype), device=self._device)
        count = prod(wanted.shape)
        first = random.randrange(_POOL - count + 1)
        if wanted.values == "index":
            part = self._all("index", "float64")[first : first + count]
            return (part * wanted.bound).floor().to(getattr(torch, wanted.dtype)).view(wanted.shape)
        return self._all(wanted.values, wanted.dtype)[first : first + count].view(wanted.shape)

    def _all(self, name: str, dtype: str) -> torch.Tensor:
        if (name, dtype) not in self._values:
            self._values[name, dtype] = self._converted(name, dtype)
        return self._values[name, dtype]

    def _converted(self, name: str, dtype: str) -> torch.Tensor:
        """The values in this dtype, independent of what was converted before."""
        is_made = dtype == "float32" or name in ("bytes", "codes", "index")
        wide = None if is_made else self._all(name, "float32")
        self._generator.manual_seed(Random(f"{self._seed}:{name}:{dtype}").randrange(2**31))
        if wide is None:
            return getattr(self, f"_{name}")()
        if dtype == "float64":
            return wide.double() * (1 + 2.0**-26 * (self._uniform().double() - 0.5))
        if dtype == "float8_e8m0fnu":
            return wide.to(torch.float8_e8m0fnu).view(torch.uint8)
        narrow = getattr(torch, dtype)
        most = torch.finfo(narrow).max
        return torch.where(wide.isinf(), wide, wide.clamp(-most, most)).to(narrow)

    def _uniform(self) -> torch.Tensor:
        return torch.rand(_POOL, generator=self._generator, device=self._device)

    def _normal(self) -> torch.Tensor:
        return torch.randn(_POOL, generator=self._generator, device=self._device)

    def _of_magnitudes(self, least: float, most: float, *, each: int) -> torch.Tensor:
        exponents = self._uniform()[: _POOL // each].double() * (most - least) + least
        largest = torch.finfo(torch.float32).max
        values = self._normal().double() * (10**exponents).repeat_interleave(each)
        return values.clamp(-largest, largest).float()

    def _small(self) -> torch.Tensor:
        return self._of_magnitudes(-38, 0, each=SCALE_BLOCK)

    def _huge(self) -> torch.Tensor:
        return self._of_magnitudes(0, 38, each=SCALE_BLOCK)

    def _mixed(self) -> torch.Tensor:
        return self._of_magnitudes(-38, 38, each=1)

    def _zeros(self) -> torch.Tensor:
        denormal = self._uniform() < 1 / 64
        return torch.where(denormal, self._of_magnitudes(-45, -38, each=1), self._normal() * 0)

    def _ties(self) -> torch.Tensor:
        """Times a power of two that stays for 4096 numbers."""
        finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(self._device)
        halves = (finite[1:] + finite[:-1]) / 2
        values = halves[(self._uniform() * len(halves)).long().clamp(max=len(halves) - 1)]
        values[::64] = finite[-1]
        factors = torch.exp2((self._uniform()[: _POOL // 4096] * 8).floor() - 12).repeat_interleave(4096)
        return values * factors * self._normal().sign()

    def _odd(self) -> torch.Tensor:
        values, chance = self._normal(), self._uniform()
        odd = (torch.nan, torch.inf, -torch.inf, 0.0, 1e-40, -1e-45, torch.finfo(torch.float32).max)
        for at, value in enumerate(odd):
            values.masked_fill_((chance >= at / 8192) & (chance < (at + 1) / 8192), value)
        return values

    def _scales(self) -> torch.Tensor:
        return torch.exp2(self._uniform() * 4 - 9)

    def _bytes(self) -> torch.Tensor:
        return torch.randint(0, 256, (_POOL,), dtype=torch.uint8, generator=self._generator, device=self._device)

    def _codes(self) -> torch.Tensor:
        return self._bytes() & 0xF7  # no pattern without this bit is NaN

    def _index(self) -> torch.Tensor:
        fractions, chance = self._uniform().double(), self._uniform()
        for at, lie in enumerate((-1e-9, -3.0, 1.0, 1.5, 1000.0)):
            fractions.masked_fill_((chance >= at / 80) & (chance < (at + 1) / 80), lie)
        return fractions


def make(pool: Pool, drawn: Draw) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The inputs by name, in one buffer."""
    random = Random(drawn.seed)
    values = [pool.cut(random, wanted) for wanted in drawn.inputs.values()]
    buffer, placed = lay_out(values, [wanted.place for wanted in drawn.inputs.values()], fill=drawn.fill)
    named = zip(drawn.inputs.items(), placed, strict=True)
    return buffer, {name: x.view(getattr(torch, wanted.dtype)) for (name, wanted), x in named}


# Calls.


def call(drawn: Draw, inputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The function's results."""
    given = {name: x for name, x in inputs.items() if not name.startswith("x[")}
    if "x[0]" in inputs:
        given["x"] = inputs["x[0]"], inputs["x[1]"]
    results = getattr(deep_tile, CASES[drawn.case].function)(**given, **targets, **drawn.options)
    return results if isinstance(results, tuple) else (results,)


class Guarded:
    """The results that a call is given, in memory that is all one byte."""

    def __init__(self, drawn: Draw, device: str):
        self._poison = drawn.poison
        rooms = [target.room for target in drawn.targets.values()]
        self._buffer, views = reserve(rooms, device, fill=drawn.poison, margin=_MARGIN)
        named = zip(drawn.targets.items(), views, strict=True)
        self.targets = {name: x.view(getattr(torch, target.dtype)) for (name, target), x in named}

    def written_elsewhere(self, living: dict[str, torch.Tensor | None]) -> torch.Tensor:
        """Mark the bytes that a call wrote outside of its targets. Overwrites the targets.

        Args:
            living: for each result a mask of what may be written; None: all of it.
        """
        for name, target in self.targets.items():
            words = bits(target)
            word = int.from_bytes(bytes([self._poison]) * words.element_size(), "little", signed=words.dtype.is_signed)
            if living[name] is None:
                words.fill_(word)
            else:
                words.masked_fill_(living[name], word)
        return self._buffer != self._poison


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# Expected results.


class Result(NamedTuple):
    """One result of a call.

    Attributes:
        living: a mask of what is written; None: all.
        strides: strides of an allocated result, where a dimension has more than one element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    living: torch.Tensor | None = None
    strides: tuple[int, ...] | None = None


class Expected(NamedTuple):
    """A call's results, and a function that marks their wrong elements, given dense copies."""

    results: tuple[Result, ...]
    faults: Callable[..., dict[str, torch.Tensor]]


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def of_cast(drawn: Draw, shape: tuple[int, ...], living: Any = (None, None), block_rows: int = 1) -> tuple[Result, ...]:
    """Both results of a cast of this shape, each with its `living` mask."""
    rows, columns = prod(shape[:-1]), scale_shape(shape, block_rows)[-1]
    along_rows = {"row": (columns, 1), "m": (1, rows), "m_aligned": (1, round_up(rows, 4))}
    row, column = along_rows[drawn.options.get("scale_layout", "row" if block_rows > 1 else "m_aligned")]
    of_scale = scale_shape(shape, block_rows)
    return (
        Result(
            "out", shape, torch.float8_e4m3fn, living[0], strides_of(shape, round_up(shape[-1], ALIGNMENT_BYTES), 1)
        ),
        Result("scale_out", of_scale, torch.float32, living[1], strides_of(of_scale, row, column)),
    )


def compared(wanted: Cast, living: Any = (None, None)) -> Callable[..., dict[str, torch.Tensor]]:
    """Bit for bit, where it lives: masks of matrices."""

    def faults(out: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        of_codes = codes_differ(as_matrix(bits(out)), wanted.codes)
        of_scale = numbers_differ(as_matrix(scale), wanted.scale)
        return {"codes": alive(of_codes, living[0]), "scales": alive(of_scale, living[1])}

    return faults


def alive(wrong: torch.Tensor, living: torch.Tensor | None) -> torch.Tensor:
    return wrong if living is None else wrong & living


def living_rows(drawn: Draw, inputs: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """[..., 1] for a result of this shape, by `offs` or `counts`."""
    if "offs" in drawn.inputs:
        return (torch.arange(shape[0], device=inputs["offs"].device) < inputs["offs"][-1])[:, None]
    if "counts" in drawn.inputs:
        return (torch.arange(shape[1], device=inputs["counts"].device) < inputs["counts"][:, None])[..., None]
    return None


def expect_per_token(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    x = inputs["x"]
    source = expected_casts.rows_of(x, inputs["rows"]) if "rows" in inputs else as_matrix(x)
    shape = (len(source), x.shape[-1]) if "rows" in inputs else tuple(x.shape)
    living = living_rows(drawn, inputs, shape)
    matrix = None if living is None else living.reshape(-1, 1)
    wanted = expected_casts.cast(source, 1, drawn.rounding)
    return Expected(of_cast(drawn, shape, (living, living)), compared(wanted, (matrix, matrix)))


def expect_silu_mul(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    gate_up = inputs["gate_up"]
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    living = living_rows(drawn, inputs, shape)
    matrix = None if living is None else living.reshape(-1, 1)
    gating = Gating(*(drawn.options[name] for name in Gating._fields))

    def faults(out: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = as_matrix(bits(out)), as_matrix(scale)
        wrong = expected_casts.silu_mul_faults(as_matrix(gate_up), codes, scale, gating, drawn.rounding)
        return {name: alive(mask, matrix) for name, mask in wrong.items()}

    return Expected(of_cast(drawn, shape, (living, living)), faults)


def expect_per_block(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    w = inputs["w"]
    wanted = expected_casts.cast(w, SCALE_BLOCK, drawn.rounding)
    return Expected(of_cast(drawn, tuple(w.shape), block_rows=SCALE_BLOCK), compared(wanted))


def expect_transposed(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    x = expected_casts.rows_of(inputs["x"], inputs["rows"]) if "rows" in inputs else inputs["x"]
    tokens, columns = x.shape
    living = (None, None)
    if "offs" in inputs:
        offs, alignment = drawn.inputs["offs"].values, drawn.options["alignment"]
        found = expected_casts.living_tokens(offs, tokens, alignment)
        if found is None:
            return Expected(of_cast(drawn, (columns, tokens)), lambda *_: {})
        lives, blocks = (torch.tensor(flags, dtype=torch.bool, device=x.device) for flags in found)
        x = torch.where(lives[:, None], x, x.new_zeros(()))
        living = blocks.repeat_interleave(SCALE_BLOCK)[None, :tokens], blocks[None]
    wanted = expected_casts.cast(x.t(), 1, drawn.rounding)
    return Expected(of_cast(drawn, (columns, tokens), living), compared(wanted, living))


def expect_both(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    """The cast of rows, and that along tokens: each wrong where it alone would be."""
    x = expected_casts.rows_of(inputs["x"], inputs["rows"]) if "rows" in inputs else inputs["x"]
    living, along_k = (None, None), expected_casts.cast(x, 1, drawn.rounding)
    if "offs" in inputs:
        found = expected_casts.living_tokens(drawn.inputs["offs"].values, len(x), drawn.options["alignment"])
        lives = torch.tensor(found[0], dtype=torch.bool, device=x.device)[:, None]
        living = lives, lives
    results = of_cast(drawn, tuple(x.shape), living)
    first = [result._replace(name=name) for result, name in zip(results, ("a", "a_scale"), strict=True)]
    if drawn.options["blocks"]:
        wanted = expected_casts.cast(x.t(), SCALE_BLOCK, drawn.rounding)
        across = Expected(of_cast(drawn, tuple(x.shape[::-1]), block_rows=SCALE_BLOCK), compared(wanted))
    else:
        across = expect_transposed(drawn, inputs)

    def faults(a, a_scale, at, at_scale) -> dict[str, torch.Tensor]:
        of_rows = compared(along_k, living)(a, a_scale)
        return {f"{name} along k": mask for name, mask in of_rows.items()} | across.faults(at, at_scale)

    return Expected((*first, *across.results), faults)


def expect_weight_both(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    w = inputs["w"]
    shape, across = tuple(w.shape), tuple(w.mT.shape)
    parts = [expected_casts.cast(each, SCALE_BLOCK, drawn.rounding) for each in (w if w.dim() == 3 else w[None])]
    of_codes = torch.cat([part.codes for part in parts])
    of_scale = torch.cat([part.scale for part in parts])
    of_transpose = torch.cat([part.codes.t() for part in parts])
    blocks = (*shape[:-2], *scale_shape(shape[-2:], SCALE_BLOCK))
    results = (
        Result("b", shape, torch.float8_e4m3fn, None, strides_of(shape, round_up(shape[-1], ALIGNMENT_BYTES), 1)),
        Result("b_scale", blocks, torch.float32, None, strides_of(blocks, blocks[-1], 1)),
        Result("bt", across, torch.float8_e4m3fn, None, strides_of(across, round_up(across[-1], ALIGNMENT_BYTES), 1)),
    )

    def faults(b, scale, bt) -> dict[str, torch.Tensor]:
        wrong = compared(Cast(of_codes, of_scale))(b, scale)
        return wrong | {"transpose": codes_differ(as_matrix(bits(bt)), of_transpose)}

    return Expected(results, faults)


def expect_transpose(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    x = inputs["x"]
    shape, wanted = tuple(x.mT.shape), bits(x).mT
    result = Result("out", shape, x.dtype, None, strides_of(shape, round_up(shape[-1], ALIGNMENT_BYTES), 1))
    return Expected((result,), lambda out: {"bytes": bits(out) != wanted})


def expect_combine(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    wanted = expected_casts.combined(**inputs)
    result = Result("out", tuple(wanted.shape), torch.bfloat16)
    return Expected((result,), lambda out: {"values": numbers_differ(out, wanted)})


def expect_sort(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    chosen, experts, alignment = inputs["chosen"], drawn.options["experts"], drawn.options["alignment"]
    rows = round_up(chosen.numel() + experts * (alignment - 1), alignment)
    results = (
        Result("rows", (rows,), torch.int64),
        Result("offs", (experts,), torch.int32),
        Result("index", tuple(chosen.shape), torch.int64),
    )
    return Expected(results, lambda *sorted_: expected_casts.sorting_faults(chosen, experts, alignment, *sorted_))


def expect_dequantize(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    x, scale = inputs["x"], inputs["scale"]
    block_rows = 1 if tuple(scale.shape) == scale_shape(tuple(x.shape)) else SCALE_BLOCK
    wanted = expected_casts.dequantized(as_matrix(x), as_matrix(scale.float()), block_rows)
    result = Result("out", tuple(x.shape), torch.float32, strides=strides_of(tuple(x.shape), x.shape[-1], 1))
    return Expected((result,), lambda out: {"values": numbers_differ(as_matrix(out), wanted)})


def exact_linear(operands: Operands) -> Exact:
    """The exact product. Its spread leaves room for inputs that are no random samples: with strides of 0 all errors
    have one sign, and denormal results and denormal products of scales are rounded in every K block."""
    exact = exact_product(operands)
    blocks = [exact_product(block).value.abs() for block in blocks_of(operands)]
    a, a_scale, b, b_scale = operands
    a, b = (bits(codes).bitwise_and(0x7F).view(codes.dtype) for codes in (a, b))
    sizes = exact_product(Operands(a, torch.ones_like(a_scale), b, torch.ones_like(b_scale))).value
    room = TRUNCATION * sum(blocks) + SMALLEST_STEP / 2 * (sizes + len(blocks))
    return Exact(exact.value, exact.spread + room / ACCUMULATION)


def blocks_of(operands: Operands) -> Iterator[Operands]:
    """K block by K block."""
    codes, scales = operands[::2], operands[1::2]
    for block in range(scales[0].shape[1]):
        k = slice(block * SCALE_BLOCK, (block + 1) * SCALE_BLOCK)
        (a, b), (a_scale, b_scale) = (x[:, k] for x in codes), (scale[:, block : block + 1] for scale in scales)
        yield Operands(a, a_scale, b, b_scale)


def expect_linear(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    leading = (inputs.get("x", inputs.get("x[0]"))).shape[:-1]
    if "x" in inputs:
        a = expected_casts.cast(as_matrix(inputs["x"]), 1, drawn.rounding)
    else:
        a = Cast(as_matrix(bits(inputs["x[0]"])), as_matrix(inputs["x[1]"].float()))
    if "b_scale" in inputs:
        b = Cast(bits(inputs["b"]), inputs["b_scale"].float())
    else:
        b = expected_casts.cast(inputs["b"], SCALE_BLOCK, drawn.rounding)
    exact = exact_linear(
        Operands(a.codes.view(torch.float8_e4m3fn), a.scale, b.codes.view(torch.float8_e4m3fn), b.scale)
    )
    if "bias" in inputs:
        bias = inputs["bias"].double()
        # Sums may begin with the bias, and are rounded with every K block then.
        steps = a.scale.shape[1] * ROUNDING[torch.float32] * bias.abs()
        exact = Exact(exact.value + bias, exact.spread + steps / ACCUMULATION)
    result = Result("out", (*leading, len(b.codes)), drawn.options["out_dtype"])
    return Expected((result,), lambda out: {"values": are_off(as_matrix(out), exact, ACCUMULATION)})


def expect_gemm_cast(drawn: Draw, inputs: dict[str, torch.Tensor]) -> Expected:
    """The cast of the product in BF16, which other fuzzers check."""
    widened = {name: x.float() if name.endswith("scale") else x for name, x in inputs.items()}
    made = deep_tile.fp8_gemm(**widened, activation=drawn.options["activation"], batch_invariant=True)
    wanted = expected_casts.cast(made, 1, drawn.rounding)
    return Expected(of_cast(drawn, tuple(made.shape)), compared(wanted))


class Case(NamedTuple):
    """The calls of a function, with their weight in the draw."""

    function: str
    weight: int
    draw: Callable[[Random, Sizes], Drawn]
    expect: Callable[[Draw, dict[str, torch.Tensor]], Expected]


CASES = {
    "per token": Case("per_token_cast_to_fp8", 4, draw_per_token, expect_per_token),
    "listed": Case("per_token_cast_to_fp8", 4, draw_listed, expect_per_token),
    "counted": Case("per_token_cast_to_fp8", 4, draw_counted, expect_per_token),
    "silu_mul": Case("silu_mul_cast_to_fp8", 5, draw_silu_mul, expect_silu_mul),
    "per block": Case("per_block_cast_to_fp8", 3, draw_per_block, expect_per_block),
    "weight": Case("quantize_weight", 1, draw_weight, expect_per_block),
    "transposed": Case("transposed_cast_to_fp8", 4, draw_transposed, expect_transposed),
    "both": Case("cast_both", 4, draw_both, expect_both),
    "weight both": Case("cast_weight", 3, draw_weight_both, expect_weight_both),
    "transpose": Case("transpose_fp8", 2, draw_transpose, expect_transpose),
    "combine": Case("combine", 2, draw_combine, expect_combine),
    "sort": Case("sort_by_expert", 2, draw_sort, expect_sort),
    "dequantize": Case("dequantize", 1, draw_dequantize, expect_dequantize),
    "linear": Case("fp8_linear", 4, draw_linear, expect_linear),
    "linear of a pair": Case("fp8_linear", 1, draw_pair, expect_linear),
    "gemm cast": Case("fp8_gemm_cast", 2, draw_gemm_cast, expect_gemm_cast),
}


# Checks.


def check(pool: Pool, drawn: Draw, device: str, beside: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Make a call twice. Returns masks of wrong elements by kind, on the device."""
    buffer, inputs = make(pool, drawn)
    untouched, guarded = buffer.clone(), Guarded(drawn, device)
    expected = CASES[drawn.case].expect(drawn, inputs)
    living = {result.name: result.living for result in expected.results}
    beside()
    results, around = [], []
    for _ in range(2):
        got = call(drawn, inputs, guarded.targets)
        odd = [name for x, wanted in zip(got, expected.results, strict=True) if (name := _oddity(x, wanted, guarded))]
        if odd:
            return {name: torch.ones(1, dtype=torch.bool, device=device) for name in odd}
        results.append([x.clone(memory_format=torch.contiguous_format) for x in got])
        around.append(guarded.written_elsewhere(living))
    first, again = results
    changed = [
        alive(bits(x) != bits(y), mask).flatten() for x, y, mask in zip(first, again, living.values(), strict=True)
    ]
    faults = {"repeat": torch.cat(changed), "guards": around[0] | around[1], "inputs": buffer != untouched}
    return expected.faults(*first) | faults


def _oddity(x: torch.Tensor, wanted: Result, guarded: Guarded) -> str | None:
    """A wrong shape, dtype or stride of a result, checked before its values."""
    if tuple(x.shape) != wanted.shape or x.dtype != wanted.dtype:
        return f"{wanted.name}: {list(x.shape)} of {x.dtype}"
    if wanted.name in guarded.targets:
        return None if x is guarded.targets[wanted.name] else f"{wanted.name}: not the one given"
    strides = zip(x.shape, x.stride(), wanted.strides or x.stride(), strict=True)
    if 0 not in x.shape and any(size > 1 and got != stride for size, got, stride in strides):
        return f"{wanted.name}: strides {x.stride()}"
    return None


def examine(masks: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Count a wrong call's elements by kind, and list the first ones."""
    return {
        name: {"count": len(at), "first": at[:_SHOWN]}
        for name, mask in masks.items()
        if (at := mask.nonzero().tolist())
    }


# The run.


class Fuzzer(campaign.Fuzzer):
    UNDER_WAY = 6

    def load(self) -> None:
        """The products' kernels. Those of casts are few, and loaded at their first calls."""
        self.load_kernels(kernels_of_products(self.num_sms))
        self._pool = Pool(self.device, self.seed % 2**31)

    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        large = on_gpu(self.device) and random.random() < LARGE_SHARE
        self.drawn = draw(random, LARGE if large else USUAL)
        masks = check(self._pool, self.drawn, self.device, self.noise)
        self.calls[self.drawn.case] += 1
        return {name: mask.sum() for name, mask in masks.items()}

    def examine(self, drawn: Draw) -> dict[str, Any]:
        return examine(check(self._pool, drawn, self.device, lambda: None))

    def counts(self) -> dict[str, Any]:
        calls = {case: 2 * count for case, count in sorted(self.calls.items())}
        return {"calls_that_copy": sum(calls.values()), "calls": calls}


def kernels_of_products(num_sms: int) -> list[GemmConfig]:
    """The kernels that the drawn linear layers need, those that cast their own result, and the same GEMMs without the
    cast."""
    kernels: dict[GemmConfig, None] = {}
    ways = product(LINEAR_M, LINEAR_N, LINEAR_K, (True, False), (True, False), FINISHES)
    for m, n, k, tma_store, split_k, (output, bias) in ways:
        kernels[plan.config_for(GemmProblem(m, n, k, num_sms, tma_store, split_k, output=output, bias=bias))] = None
    for bias, activation in product(("none", "bf16"), ("none", "swiglu")):
        kernels |= dict.fromkeys(quantizing_configs(bias, activation))
        finish = {"split_k": False, "bias": bias, "activation": activation}
        for m, n, k in product(LINEAR_M, CAST_COLUMNS, LINEAR_K):
            n *= 2 if activation == "swiglu" else 1
            kernels[plan.config_for(GemmProblem(m, n, k, num_sms, **finish))] = None
    return list(kernels)
