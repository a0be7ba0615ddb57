"""Check any call of the other GEMMs: every kind, epilogue and output format, weight gradients, also of groups.

Compiles kernels of every kind on all cores: choices of the selector and random legal configs, with finishes by turns.
Then each round draws a problem for one of them, sizes, layouts, tokens of groups (none, one, few, many, offsets that
lie) and options, and multiplies twice beside element-wise kernels of another stream; half of the calls name no config
and get one of these kernels by choice. Results are compared with products in float64 on the GPU, and the counts of
wrong elements are read now and then. A round depends on the seed, `--configs` and its number alone.
"""

import argparse
from collections.abc import Iterator
from itertools import count, cycle, product
from math import inf, log2
from random import Random
from typing import Any, NamedTuple

import campaign
import torch
from campaign import lay_out, on_gpu
from fuzz_groups import draw_scale_dtype, draw_sizes
from helpers import (
    ACCUMULATION,
    INT8_SIZE,
    MANY,
    Exact,
    GuardedOut,
    Operands,
    Product,
    added,
    are_off,
    blank_tokens,
    exact_of_groups,
    few_integers,
    finished_product,
    product_of,
    whole_bar,
    whole_error,
)
from strategies import USUAL, Limits, Place, Problem, Use, draw_config, draw_problem, draw_use, scale_shapes

import deep_tile
from deep_tile import GemmConfig, plan
from deep_tile.config import ceil_div, round_up
from deep_tile.kinds import ACTIVATIONS, BIASES, FAMILIES, KINDS, LAYOUTS, OUTPUTS, RAW, Element
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import MAX_RELATIVE_ERROR, group_rows
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

GRADIENTS = "groups of gradients"
"""The family of `fp8_grouped_wgrad`, beside those in `FAMILIES`."""

FINISHES = tuple(product(BIASES, ACTIVATIONS))
CALLS = {
    "fp8": ("fp8_gemm", "scaled_gemm"),
    "bf16": ("gemm",),
    "fp16": ("gemm",),
    "int8": ("int8_gemm", "scaled_gemm"),
    "fp8_1x128": ("scaled_gemm", "fp8_wgrad"),
    "fp8_rows": ("scaled_gemm",),
    "int8_rows": ("scaled_gemm",),
    "fp8_rows_promoted": ("scaled_gemm",),
    "int8_unscaled": ("gemm",),
}
"""The functions that make a family of kinds."""

SCALE_FORMS = {
    "column": lambda scale: scale,
    "flat": lambda scale: scale[:, 0],
    "row": lambda scale: scale.t(),
    "one": lambda scale: scale[:1],
    "number": lambda scale: scale[0, 0],
}
"""Forms in which a call may be given scales of rows [rows, 1]."""

GROUPS = (1, 2, 3, 8, 16, 31, 32, 33, 64, 130)
LARGE = Limits(m=2048, n=2048, k=2048, out=1 << 21)
LARGE_SHARE = 0.02
MOST_ELEMENTS = 1 << 22
"""Most elements of an operand or an `out`."""

_VARIANT = 8
"""Kernels per kind, format and epilogue. Half of them are choices of the selector, which serve 3 of 4 problems."""

_TRIES = 4
"""Problems drawn until one's choice is among the kernels."""

_SHOWN = 6
"""Elements of a wrong result that are listed."""


# Draws.


class Tokens(NamedTuple):
    """Groups along K, as weight gradients have them.

    Attributes:
        bounds: the token behind each group's last, or lies.
        total: tokens of the operands.
        alignment, expected: arguments of the call.
        spare_rows: rows of `out` between groups.
    """

    bounds: tuple[int, ...]
    total: int
    alignment: int
    expected: int | None
    spare_rows: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First token, and the one behind the last, of each group."""
        bounds = torch.tensor(self.bounds, dtype=torch.int64)
        return group_rows("offs", bounds, len(self.bounds), self.total, self.alignment)


class Draw(NamedTuple):
    """One call.

    Attributes:
        call: name of the function.
        config: the kernel; the call passes it unless it is the selector's choice, when `use` has none.
        scale_forms: names of SCALE_FORMS, of a and b.
        scale_dtype: torch's name of the scales' dtype.
        bias: where it lies, as [n, 1].
        seed: the seed of the values.
    """

    call: str
    config: GemmConfig
    problem: Problem
    use: Use
    scale_forms: tuple[str, str]
    scale_dtype: str
    bias: Place
    tokens: Tokens | None
    seed: int

    def __str__(self) -> str:
        (m, n, k, places, _), use = self.problem, self.use._replace(config=None)
        chosen = "chosen: " if self.use.config is None else ""
        forms = f"{self.scale_forms} scales={self.scale_dtype} bias={tuple(self.bias)}"
        return f"{self.call} {m}x{n}x{k} {chosen}{self.config.name} {use} {places} {forms} {self.tokens} {self.seed}"

    @property
    def out_shape(self) -> tuple[int, int]:
        """The shape of each group's `out`."""
        return self.problem.m, self.problem.n // self.config.columns_per_output

    @property
    def out_rows(self) -> int:
        """Rows of all groups, and between them."""
        if self.tokens is None:
            return self.problem.m
        return len(self.tokens.bounds) * (self.problem.m + self.tokens.spare_rows)

    def asked(self, num_sms: int) -> GemmProblem:
        """The problem as the selector is told it."""
        m, n, k, *_ = self.problem
        config, use, tokens = self.config, self.use, self.tokens
        names = ("kind", "output", "accumulate", "bias", "activation", "layout")
        made = {name: getattr(config, name) for name in names}
        groups = None
        if tokens is not None:
            count = len(tokens.bounds)
            groups = Groups("k_offs", count, tokens.expected or ceil_div(k, count))
        sms, may_split = use.num_sms or num_sms, tokens is not None or not use.batch_invariant
        return GemmProblem(m, n, k, sms, self._tma_can_store, may_split, groups=groups, **made)

    @property
    def _tma_can_store(self) -> bool:
        (rows, columns), use = self.out_shape, self.use
        many = self.out_rows > 1 if self.tokens is None else rows > 1 or len(self.tokens.bounds) > 1
        numbers = (columns, use.out_offset, *([use.out_stride] if many else []))
        return all(number * self.config.out_bytes % 16 == 0 for number in numbers)


def draw_kernels(random: Random, each: int, num_sms: int) -> list[GemmConfig]:
    """Draw `each` kernels of every family of kinds and of grouped gradients, in random order: every epilogue in turn,
    and every kind and layout of a family."""
    finishes = cycle(random.sample(FINISHES, len(FINISHES)))
    kernels: list[GemmConfig] = []
    for family in (*FAMILIES, GRADIENTS):
        found: dict[GemmConfig, None] = {}
        own = [kind.name for kind in KINDS.values() if kind.family == family] or [GRADIENTS]
        kinds, turns = cycle(random.sample(own, len(own))), count(random.randrange(16))
        while len(found) < each:
            made = _draw_made(random, next(kinds), next(turns), finishes)
            choices = selectable(draw_config(random, **made))
            for _ in range(_VARIANT // 2):
                drawn = draw_for(random, random.choice(choices), num_sms, USUAL)
                found[plan.config_for(drawn.asked(num_sms))] = None
                found[draw_config(random, **made)] = None
        kernels += [config for config in list(found)[:each] if config.cluster <= num_sms]
    return random.sample(kernels, len(kernels))


def selectable(config: GemmConfig) -> tuple[GemmConfig, ...]:
    """The configs that the selector chooses from for the same product as `config`."""
    if config.by_k:
        return grouped_configs("k_offs", config.tma_store, config.accumulate)
    made = config.kind, config.output, config.accumulate, config.bias, config.activation, config.layout
    return default_configs(config.tma_store, *made)


def may_be_refused(config: GemmConfig, text: str) -> bool:
    """Whether the error says that warps may diverge. That may happen to random kernels, never to the selector's."""
    return text.startswith(f"{config.name} may hang") and config not in selectable(config)


def _draw_made(random: Random, kind: str, turn: int, finishes: Iterator[tuple[str, str]]) -> dict[str, Any]:
    """Config fields that say what a kernel makes. Every fourth adds to `out`, and of five TMA stores three."""
    stored = {"tma_store": turn % 5 < 3}
    if kind == GRADIENTS:
        made = {"kind": "fp8_1x128", "output": "fp32", "grouping": "k_offs", "accumulate": random.random() < 0.6}
        return made | stored
    made = stored | {"kind": kind}
    if KINDS[kind].a.bytes == 2:
        made["layout"] = list(LAYOUTS)[(turn + turn // 4) % 4]
    if turn % 4 == 0:
        return made | {"output": random.choice(KINDS[kind].outputs), "accumulate": True}
    output = random.choice((KINDS[kind].output, *KINDS[kind].outputs))
    bias, activation = ("none", "none") if output == RAW else next(finishes)
    return made | {"output": output, "accumulate": False, "bias": bias, "activation": activation}


def draw(random: Random, kernels: dict[str, GemmConfig], number: int, num_sms: int, limits: Limits) -> Draw:
    """Draw a call with one of the kernels in turn, or with the selector's choice if that is one of them."""
    config = list(kernels.values())[number % len(kernels)]
    drawn = draw_for(random, config, num_sms, limits)
    if random.random() < 0.4:
        return drawn
    for _ in range(_TRIES):
        chosen = plan.config_for(drawn.asked(num_sms))
        if chosen.name in kernels:
            return drawn._replace(config=chosen, use=drawn.use._replace(config=None))
        drawn = draw_for(random, config, num_sms, limits)
    return drawn


def draw_for(random: Random, config: GemmConfig, num_sms: int, limits: Limits) -> Draw:
    """A call with that kernel."""
    call = "fp8_grouped_wgrad" if config.by_k else _draw_call(random, config)
    tokens = _draw_tokens(random, limits) if config.by_k else None
    problem = _draw_problem(random, config, tokens, limits)
    one_block = problem.k <= 128 and (config.column_scales or problem.n <= 128)
    other_scales = one_block or (problem.n == 1 and not config.column_scales)  # of the same shapes
    if call == "scaled_gemm" and config.product.block_scales and other_scales:
        return draw_for(random, config, num_sms, limits)
    use = draw_use(random, problem, config, num_sms)
    if config.by_k or call == "fp8_wgrad":
        use = use._replace(constant_weights=False)
    forms = random.choices(list(SCALE_FORMS), (2, 2, 1, 1, 1), k=2) if config.row_scales else ("column", "column")
    return Draw(
        *(call, config, problem, use, tuple(forms)),
        scale_dtype=draw_scale_dtype(random, config.kind),
        bias=Place((random.choice((1, 1, 2, 3, 0)), 1), random.choice((0, random.randint(0, 9)))),
        tokens=tokens,
        seed=random.randrange(2**31),
    )


def _draw_call(random: Random, config: GemmConfig) -> str:
    """Draw a function that makes such products."""
    calls = CALLS[config.product.family]
    if config.kind != "fp8" or config.accumulate:
        calls = [call for call in calls if call != "fp8_gemm"]
    if config.is_finished:
        calls = [call for call in calls if call != "fp8_wgrad"]
    return random.choice(calls)


def _draw_problem(random: Random, config: GemmConfig, tokens: Tokens | None, limits: Limits) -> Problem:
    if tokens is None:
        return draw_problem(random, config, limits)
    most = MOST_ELEMENTS // tokens.total
    room = MOST_ELEMENTS // len(tokens.bounds) // 4
    limits = limits._replace(m=min(limits.m, most), n=min(limits.n, most), out=min(limits.out, room))
    problem = draw_problem(random, config, limits, k=tokens.total)
    while any(0 in place.strides for place in (problem.places.a_scale, problem.places.b_scale)):
        problem = draw_problem(random, config, limits, k=tokens.total)  # scales of tokens of no group are NaN
    return problem


def _draw_tokens(random: Random, limits: Limits) -> Tokens:
    alignment = random.choice((128, 128, 256, 512, 1024))
    end, ends = 0, []
    for size in draw_sizes(random, random.choice(GROUPS)):
        end = round_up(end, alignment) + min(size, limits.k)
        ends.append(end)
    total = max(1, random.choice((end, round_up(end, 128), end + 1, end + 200)))
    if random.random() < 0.15:
        lies = (-(2**31), -1, 0, total, total + 1, 2**31 - 1, random.randint(0, total))
        ends = [random.choice(lies) if random.random() < 0.4 else bound for bound in ends]
    expected = random.choice((None, 1, 20, 130, 300, 5000))
    return Tokens(tuple(ends), total, alignment, expected, random.choice((0, 0, 1, 5)))


# Inputs.


class Values:
    """Normal samples, made once; inputs take slices, converted to each dtype at its first use.

    The two operands are cut from different halves. A row of both would have products that are all positive: WGMMAs,
    which cut off the last bits of sums of FP8 products, are then farther off than `Exact.spread` allows, which is for
    terms of random signs.
    """

    def __init__(self, device: str, seed: int):
        generator = torch.Generator(device).manual_seed(seed)
        self._normal = torch.randn(2, 2 * MOST_ELEMENTS, generator=generator, device=device)
        self._converted: dict[torch.dtype, torch.Tensor] = {}

    def cut(self, random: Random, dtype: torch.dtype, rows: int, columns: int, *, half: int = 0) -> torch.Tensor:
        """Values with standard deviation 1; integers with 40."""
        count = rows * columns
        first = random.randrange(self._normal.shape[1] - count + 1)
        return self._all(dtype)[half, first : first + count].view(rows, columns)

    def _all(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._converted:
            integers = dtype == torch.int8
            values = (self._normal * INT8_SIZE).round().clamp(-128, 127) if integers else self._normal
            self._converted[dtype] = values.to(dtype)
        return self._converted[dtype]


class Sample(NamedTuple):
    """A call's inputs and its expected result.

    Attributes:
        operands: the call's operands, offsets included.
        exact, accumulation, relative_error: see `helpers.Product`.
        before: the values of an `out` that is added to; None: `unwritten`.
        buffer, untouched: all inputs with NaN around them, and a copy.
    """

    operands: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    exact: Exact
    accumulation: float
    relative_error: float
    before: torch.Tensor | None
    buffer: torch.Tensor
    untouched: torch.Tensor


def make(values: Values, drawn: Draw, device: str) -> Sample:
    random, config, problem = Random(drawn.seed), drawn.config, drawn.problem
    inputs = _draw_values(values, random, drawn)
    places = [getattr(problem.places, name) for name in inputs]
    if config.bias != "none":
        inputs["bias"] = values.cut(random, _dtype(OUTPUTS[config.bias]), problem.n, 1)
        places.append(drawn.bias)
    if drawn.tokens is not None:
        inputs["offs"] = torch.tensor(drawn.tokens.bounds, dtype=torch.int32, device=device)[:, None]
        places.append(Place((1, 1), random.randint(0, 3)))
    buffer, placed = lay_out(list(inputs.values()), places)
    placed = dict(zip(inputs, placed, strict=True))
    given = _as_given(placed, drawn)
    bias = placed["bias"][:, 0] if "bias" in placed else None
    made = _expected(as_read(given), bias, drawn)
    before = None
    if config.accumulate:
        before = values.cut(random, torch.float32, *made.exact.value.flatten(0, -2).shape).view_as(made.exact.value)
        before = (before / _shrinking(problem.k)).to(_dtype(config.out))
        made = added(made, before)
    if "offs" in placed:
        given = (*given, placed["offs"][:, 0])
    return Sample(given, bias, made.exact, made.accumulation, made.relative_error, before, buffer, buffer.clone())


def _dtype(element: Element) -> torch.dtype:
    return getattr(torch, element.dtype)


def _shrinking(k: int) -> float:
    """The factor that brings sums of k products into the range where activations are not linear."""
    return 2.0 ** -round(log2(k) / 2)


def _draw_values(values: Values, random: Random, drawn: Draw) -> dict[str, torch.Tensor]:
    """Operands and scales, by their names in `Places`; scales of one byte as such."""
    (m, n, k, *_), kind = drawn.problem, drawn.config.product
    factor = _shrinking(k) if drawn.config.is_finished else 1.0
    a, b = values.cut(random, _dtype(kind.a), m, k), values.cut(random, _dtype(kind.b), n, k, half=1)
    if kind.output == RAW:
        return {"a": few_integers(a), "b": b.sign()} if drawn.config.is_finished else {"a": a // 8, "b": b}
    if kind.scaling == "none":
        return {"a": a * factor, "b": b}
    unit = 1 / INT8_SIZE if kind.a.dtype == "int8" else 1.0
    a_scale, b_scale = (
        torch.exp2(values.cut(random, torch.float32, *shape).clamp(-1, 1)) * size
        for shape, size in zip(scale_shapes(kind, m, n, k), (unit * factor, unit), strict=True)
    )
    inputs = Operands(a, a_scale, b, b_scale)
    if drawn.tokens is not None:
        inputs = Operands(a.clone(), a_scale, b.clone(), b_scale)
        blank_tokens(inputs, drawn.tokens.ranges)
    dtype = getattr(torch, drawn.scale_dtype)
    narrow = (x.to(dtype).view(torch.uint8 if dtype.itemsize == 1 else dtype) for x in inputs[1::2])
    return inputs._replace(a_scale=next(narrow), b_scale=next(narrow))._asdict()


def _as_given(placed: dict[str, torch.Tensor], drawn: Draw) -> tuple[torch.Tensor, ...]:
    """Operands as the call takes them."""
    if drawn.config.product.scaling == "none":
        return placed["a"], placed["b"]
    scales = (placed[name].view(getattr(torch, drawn.scale_dtype)) for name in ("a_scale", "b_scale"))
    a_scale, b_scale = (SCALE_FORMS[form](scale) for form, scale in zip(drawn.scale_forms, scales, strict=True))
    return placed["a"], a_scale, placed["b"], b_scale


def as_read(operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Operands with their scales in float32."""
    if len(operands) == 2:
        return operands
    a, a_scale, b, b_scale = operands
    return a, a_scale.float(), b, b_scale.float()


def _expected(operands: tuple[torch.Tensor, ...], bias: torch.Tensor | None, drawn: Draw) -> Product:
    """The product and how far an element, and the whole, may be off; of groups [g, m, n]."""
    if drawn.tokens is None:
        made = product_of(drawn.config.kind, operands)
        if not drawn.config.is_finished:
            return made
        finished = finished_product(made, bias, drawn.config.activation)
        # With few integers and a bias of stride 0, all of `out` may be one number at which GELU cancels.
        return finished._replace(relative_error=inf) if drawn.config.product.output == RAW else finished
    exact = exact_of_groups(Operands(*operands), drawn.tokens.ranges)
    return Product(deep_tile.fp8_grouped_wgrad, operands, exact, ACCUMULATION, MAX_RELATIVE_ERROR)


# Calls and checks.


def multiply(sample: Sample, drawn: Draw, out: torch.Tensor) -> None:
    """Make one call, into `out` as it is."""
    use, config = drawn.use, drawn.config
    keywords: dict[str, Any] = {"config": use.config, "num_sms": use.num_sms, "pdl": use.pdl}
    if drawn.tokens is not None:
        keywords |= {"alignment": drawn.tokens.alignment, "expected_tokens": drawn.tokens.expected}
    else:
        keywords["batch_invariant"] = use.batch_invariant
    if drawn.call == "scaled_gemm":
        keywords["fast_accum"] = not config.product.promotes
    if drawn.call != "fp8_gemm":
        keywords["accumulate"] = config.accumulate
    if drawn.call in ("fp8_gemm", "gemm", "int8_gemm", "scaled_gemm"):
        activation = None if config.activation == "none" else config.activation
        keywords |= {"constant_weights": use.constant_weights, "bias": sample.bias, "activation": activation}
    getattr(deep_tile, drawn.call)(*sample.operands, out, **keywords)


def guarded_out(drawn: Draw, device: str) -> GuardedOut:
    """A guarded `out`; of groups [g, m, n], with guarded rows between them."""
    use, columns = drawn.use, drawn.out_shape[1]
    layout = {"stride": use.out_stride, "offset": use.out_offset, "dtype": _dtype(drawn.config.out)}
    guarded = GuardedOut(drawn.out_rows, columns, device=device, **layout)
    if drawn.tokens is not None:
        guarded.out = guarded.out.unflatten(0, (len(drawn.tokens.bounds), -1))[:, : drawn.problem.m]
    return guarded


def unwritten(dtype: torch.dtype) -> float:
    """The value of `out` before the call."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def check(sample: Sample, drawn: Draw, beside: Any) -> dict[str, torch.Tensor]:
    """Multiply twice. Returns counts of faults by kind, on the device.

    The kernel before each product writes `out`, and never `b`, as `constant_weights` asks.
    """
    guarded = guarded_out(drawn, str(sample.buffer.device))

    def result() -> torch.Tensor:
        if sample.before is None:
            guarded.out.fill_(unwritten(guarded.out.dtype))
        else:
            guarded.out.copy_(sample.before)
        multiply(sample, drawn, guarded.out)
        return guarded.out.clone(memory_format=torch.contiguous_format)

    beside()
    first, again = result(), result()
    words = {2: torch.int16, 4: torch.int32}[first.element_size()]
    return faults_of(first, sample, drawn) | {
        "repeat": (first.view(words) != again.view(words)).sum(),
        "inputs": (sample.buffer != sample.untouched).sum(),
        "guards": guarded.count_written_outside(),
    }


def faults_of(out: torch.Tensor, sample: Sample, drawn: Draw) -> dict[str, torch.Tensor]:
    """Counts of faults of one result, on the device."""
    faults = {"values": are_off(out, sample.exact, sample.accumulation).sum()}
    m, n, k, *_ = drawn.problem
    if min(m, n) >= 16 and k >= 64 and out.numel() >= MANY:
        bar = whole_bar(out.dtype, sample.exact, sample.relative_error)
        faults["accuracy"] = (~(whole_error(out, sample.exact) <= bar)).long()
    return faults


def examine(sample: Sample, drawn: Draw) -> dict[str, Any]:
    """Make a wrong call once more: count its wrong elements and list the first ones."""
    out = guarded_out(drawn, str(sample.buffer.device)).out
    out.copy_(torch.full_like(out, unwritten(out.dtype)) if sample.before is None else sample.before)
    multiply(sample, drawn, out)
    off = are_off(out, sample.exact, sample.accumulation).nonzero().tolist()
    first = [f"{at}: {out[tuple(at)]:.7g}, exact {sample.exact.value[tuple(at)]:.7g}" for at in off[:_SHOWN]]
    return {"off": len(off), "first": first, "last": off[-1:]}


# The run.


class Fuzzer(campaign.Fuzzer):
    UNDER_WAY, CONFIGS = 4, 64

    def __init__(self, arguments: argparse.Namespace, report: campaign.Report):
        super().__init__(arguments, report)
        self._drawn = draw_kernels(Random(f"{self.seed}:kernels"), arguments.configs, self.num_sms)
        self.products = self.narrow = 0
        self.configs: set[str] = set()

    def load(self) -> None:
        """Kernels and values. Random kernels that are none of the selector's choices may be refused."""
        self._kernels = {config.name: config for config in self.load_kernels(self._drawn, may_be_refused)}
        self._values = Values(self.device, self.seed % 2**31)

    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        large = on_gpu(self.device) and random.random() < LARGE_SHARE
        limits = LARGE if large else USUAL
        self.drawn = drawn = draw(random, self._kernels, number, self.num_sms, limits)
        faults = check(make(self._values, drawn, self.device), drawn, self.noise)
        self.products += 2
        self.narrow += 2 * (drawn.scale_dtype != "float32")
        self.configs.add(drawn.config.name)
        self.calls[f"{drawn.call} {drawn.config.kind}"] += 1
        return faults

    def examine(self, drawn: Draw) -> dict[str, Any]:
        return examine(make(self._values, drawn, self.device), drawn)

    def counts(self) -> dict[str, Any]:
        counts = {"products": self.products, "calls_that_copy": self.narrow, "configs": len(self.configs)}
        return counts | {"calls": dict(sorted(self.calls.items()))}
