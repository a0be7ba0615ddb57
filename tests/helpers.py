"""Shared helpers of the tests: poisoned inputs, guarded outputs, exact products and activations, and tolerances.

Used by the test modules and by sanitize.py, on either device. Invariant: whatever a kernel has no business to read is
NaN, and whatever it has no business to write is checked bit for bit.
"""

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from deep_tile import (
    fp8_gemm,
    gemm,
    int8_gemm,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    scaled_gemm,
    sources,
)
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.kinds import KINDS, LAYOUTS, OUTPUTS, RAW, Element
from deep_tile.quantize import FP8_MAX, SMALLEST_AMAX_FLOOR
from deep_tile.reference import MAX_RELATIVE_ERROR

BF16_ROUNDING = 2**-8
ROUNDING = {torch.bfloat16: BF16_ROUNDING, torch.float16: 2**-11, torch.float32: 2**-24, torch.int32: 0}
"""Largest relative error of rounding to a dtype."""

SEEDS = random.Random()
"""Draws the seeds of operands, which a test's name decides. `random` itself is seeded alike by Hypothesis before each
example."""

RELATIVE_ERRORS = {
    **{torch.bfloat16: MAX_RELATIVE_ERROR, torch.float16: MAX_RELATIVE_ERROR / 8, torch.float32: 1e-5},
    torch.int32: 0.0,
}
"""Most that a product of many elements may be off as a whole; FP32's has room for the accumulation alone."""

MANY = 20_000
"""Elements that a product has at least to be held against them: of fewer, rounding alone may exceed the bar."""

ACCUMULATION = 8e-3
"""Largest error of an element beyond its rounding, in units of `Exact.spread`: over ten standard deviations of an
accumulation error that meets the bar, yet less than one lost product of a K block."""

ACCUMULATION_WITHOUT_SCALES = 1e-3
"""The same for BF16 and FP16, whose WGMMAs add in FP32: less than one lost product of any tested K."""

INT8_SIZE = 40
"""Standard deviation of normal samples that are rounded to INT8."""

_NAN_BYTE = 0xFF
"""Repeated, a NaN in float8_e4m3fn, bfloat16 and float32 alike."""

SCALE_STRIDES = {
    "row": lambda rows, groups: (groups, 1),
    "row_padded": lambda rows, groups: (groups + 3, 1),
    "column": lambda rows, groups: (1, rows),
    "column_aligned": lambda rows, groups: (1, round_up(rows, 4)),
    "scattered": lambda rows, groups: (3, 3 * rows + 2),
}
"""Strides of a scale [rows, groups], by the name of the layout."""

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Operands(NamedTuple):
    """The four inputs of fp8_gemm, in its order."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k."""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]


class Exact(NamedTuple):
    """The product in float64, and the size that each element would have if its terms had random signs."""

    value: torch.Tensor
    spread: torch.Tensor

    def corner(self, m: int, n: int) -> "Exact":
        return Exact(self.value[:m, :n], self.spread[:m, :n])


def make_operands(m: int, n: int, k: int, *, device: str = "cpu", seed: int | None = None, **layout) -> Operands:
    """Quantised normal samples whose blocks differ in size by up to 4 times, so that a wrong scale shows.

    The seed is drawn unless given; it is printed, and pytest shows that on a failure.
    `layout` is passed on to `rearranged`.
    """
    if seed is None:
        seed = SEEDS.getrandbits(31)
    print(f"make_operands({m}, {n}, {k}, seed={seed})")
    generator = torch.Generator(device).manual_seed(seed)
    a = per_token_cast_to_fp8(_random_matrix(m, k, 1, generator))
    b = per_block_cast_to_fp8(_random_matrix(n, k, SCALE_BLOCK, generator))
    return rearranged(Operands(*a, *b), **layout)


def _random_matrix(rows: int, k: int, block_rows: int, generator: torch.Generator) -> torch.Tensor:
    def draw(function, *shape):
        return function(*shape, generator=generator, device=generator.device)

    sizes = torch.exp2(2 * draw(torch.rand, ceil_div(rows, block_rows), ceil_div(k, SCALE_BLOCK)) - 1)
    sizes = sizes.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return draw(torch.randn, rows, k) * sizes


def make_any_bytes(m: int, n: int, k: int, *, device: str = "cpu") -> Operands:
    """Operands of evenly drawn finite FP8 bit patterns, made without a wide temporary: for very large sizes."""

    def draw(rows):
        bits = torch.randint(0, 256, (rows, k), dtype=torch.uint8, device=device)
        return bits.bitwise_and_(0xF7).view(torch.float8_e4m3fn)  # no pattern without this exponent bit is NaN

    groups = ceil_div(k, SCALE_BLOCK)
    a_scale = torch.rand(m, groups, device=device) + 0.5
    return Operands(draw(m), a_scale, draw(n), torch.rand(ceil_div(n, SCALE_BLOCK), groups, device=device) + 0.5)


def rearranged(
    operands: Operands,
    *,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    a_padding: int = 0,
    b_padding: int = 0,
    a_scale: str = "row",
    b_scale: str = "row",
) -> Operands:
    """The leading m, n and k of `operands`, each tensor in its own buffer with NaN around it.

    Args:
        a_padding, b_padding: bytes between rows, beyond what rounding k up to 16 leaves; multiples of 16.
        a_scale, b_scale: names of SCALE_STRIDES.
    """
    m, n, k = (full if wanted is None else wanted for full, wanted in zip(operands.sizes, (m, n, k), strict=True))
    groups = ceil_div(k, SCALE_BLOCK)
    stride = round_up(k, 16)
    return Operands(
        _placed(operands.a[:m, :k], (stride + a_padding, 1)),
        _placed_scale(operands.a_scale[:m, :groups], a_scale),
        _placed(operands.b[:n, :k], (stride + b_padding, 1)),
        _placed_scale(operands.b_scale[: ceil_div(n, SCALE_BLOCK), :groups], b_scale),
    )


def _placed_scale(scale: torch.Tensor, layout: str) -> torch.Tensor:
    return _placed(scale, SCALE_STRIDES[layout](*scale.shape))


def _placed(values: torch.Tensor, strides: tuple[int, int]) -> torch.Tensor:
    """A copy of `values` with these strides, 16-byte aligned, in a buffer whose other bytes are all NaN."""
    margin = 256
    extent = round_up(_extent(values.shape, strides), 16)
    size_bytes = (margin + extent + margin) * values.element_size()
    buffer = torch.full((size_bytes,), _NAN_BYTE, dtype=torch.uint8, device=values.device).view(values.dtype)
    return buffer.as_strided(values.shape, strides, margin).copy_(values)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class GuardedOut:
    """An `out` of NaN with the given row stride and offset, in the middle of a buffer of the same bits.

    Attributes:
        out: [m, n] of `dtype`; its address is `offset` elements past a multiple of 16 bytes.
    """

    def __init__(
        self,
        m: int,
        n: int,
        *,
        device: str = "cpu",
        stride: int | None = None,
        offset: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self._words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
        strides = (n if stride is None else stride, 1)
        # A tile that is not clipped reaches this far.
        margin = round_up(256 * strides[0] + 256, 8)
        self._region = ((m, n), strides, margin + offset)
        size = 2 * margin + offset + _extent((m, n), strides)
        self._bits = torch.full((size,), -1, dtype=self._words, device=device)
        self.out = self._bits.view(dtype).as_strided(*self._region)

    def assert_untouched(self) -> None:
        assert (self._bits == -1).all(), "out was written"

    def assert_guards_intact(self) -> None:
        outside = self._bits.clone()
        outside.as_strided(*self._region).fill_(-1)
        changed = (outside != -1).nonzero().flatten() - self._region[2]
        assert not len(changed), f"wrote outside out, at elements {changed[:8].tolist()} counted from its first"

    def assert_groups(self, rows: list[tuple[int, int]], check: Callable[[int, torch.Tensor], None]) -> None:
        """`check` passes a group's number and its rows; no other row has been written, nor anything around `out`."""
        self.assert_guards_intact()
        alive = torch.zeros(len(self.out), dtype=torch.bool)
        for group, (begin, end) in enumerate(rows):
            alive[begin:end] = True
            if begin < end:
                check(group, self.out[begin:end])
        dead = self.out.view(torch.uint8)[~alive.to(self.out.device)]
        assert (dead == 0xFF).all(), "wrote rows that belong to no group"

    def count_written_outside(self) -> torch.Tensor:
        """How many elements around `out` have changed, left on its device; overwrites `out`."""
        self.out.view(self._words).fill_(-1)
        return (self._bits != -1).sum()


def run_python(code: str, *arguments: str, status: int | None = 0, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, which finds modules where this one does. Its exit status must be `status`,
    unless that is None."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert status is None or run.returncode == status, run.stdout + run.stderr
    return run


def exact_product(
    operands: Operands,
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    b_rows: int = SCALE_BLOCK,
) -> Exact:
    """The definition of fp8_gemm in float64, written independently of deep_tile.reference; for some rows and columns if
    given.

    Args:
        rows, columns: indices into m and n; all of them when None.
        b_rows: rows of b that share a scale.
    """
    m, n, _ = operands.sizes
    device = operands.a.device
    rows = torch.arange(m, device=device) if rows is None else rows
    columns = torch.arange(n, device=device) if columns is None else columns
    a = _scaled(operands.a, operands.a_scale, rows, rows)
    b = _scaled(operands.b, operands.b_scale, columns, columns // b_rows)
    return Exact(a @ b.t(), (a.square() @ b.square().t()).sqrt())


def _scaled(x: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, scale_rows: torch.Tensor) -> torch.Tensor:
    values = x.view(torch.uint8)[rows].view(x.dtype).float().double()  # torch neither indexes nor widens FP8 everywhere
    return values * scale[scale_rows].double().repeat_interleave(SCALE_BLOCK, 1)[:, : x.shape[1]]


def make_dense_operands(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    a_padding: int = 0,
    b_padding: int = 0,
    layout: str = "nt",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands `a` and `b` of `gemm`: fresh normal samples, each in its own buffer with NaN around it.

    Args:
        a_padding, b_padding: elements between rows, or columns that are adjacent, beyond what rounding them up to 16
            bytes leaves; multiples of 8.
        layout: a name in `kinds.LAYOUTS`.
    """
    seed = SEEDS.getrandbits(31)
    print(f"make_dense_operands({m}, {n}, {k}, {dtype}, seed={seed}, layout={layout!r})")
    generator = torch.Generator(device).manual_seed(seed)
    majors = LAYOUTS[layout]

    def draw(rows: int, padding: int, major: str) -> torch.Tensor:
        values = torch.randn(rows, k, generator=generator, device=device)
        return _placed_operand(values.to(dtype), major, padding)

    return draw(m, a_padding, majors.a), draw(n, b_padding, majors.b)


def _placed_operand(values: torch.Tensor, major: str, padding: int) -> torch.Tensor:
    """A matrix [rows, k] along k or along its rows, at strides of 16 bytes and `padding` elements more."""
    rows, k = values.shape
    each = 16 // values.element_size()
    strides = (round_up(k, each) + padding, 1) if major == "k" else (1, round_up(rows, each) + padding)
    return _placed(values, strides)


def exact_dense_product(a: torch.Tensor, b: torch.Tensor) -> Exact:
    """The definition of `gemm` in float64."""
    a, b = a.float().double(), b.float().double()  # torch does not widen FP8 to double everywhere
    return Exact(a @ b.t(), (a.square() @ b.square().t()).sqrt())


class Product(NamedTuple):
    """A GEMM of one kind: its call, operands, exact result and tolerances.

    Attributes:
        call: the function that makes it.
        operands: the call's operands, each in its own buffer with NaN, or its bytes as integers, around it.
        exact: the product.
        accumulation, relative_error: most that an element and the whole may be off beyond rounding, see `ACCUMULATION`.
    """

    call: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]
    exact: Exact
    accumulation: float
    relative_error: float

    @property
    def op(self) -> tuple[Any, dict[str, Any]]:
        """The op of torch.ops, and the call's keywords that it has."""
        function = getattr(self.call, "func", self.call)
        return getattr(torch.ops.deep_tile, function.__name__), getattr(self.call, "keywords", {})

    def check(self, guarded: GuardedOut, **keywords) -> torch.Tensor:
        """Multiply into `guarded`, check values and surroundings, and return the output."""
        assert self.call(*self.operands, guarded.out, **keywords) is guarded.out
        guarded.assert_guards_intact()
        assert_accurate(guarded.out, self.exact, self.accumulation, self.relative_error)
        return guarded.out


def make_product(
    kind: str,
    m: int,
    n: int,
    k: int,
    *,
    device: str = "cpu",
    padding: int = 0,
    scales: str = "row",
    layout: str = "nt",
) -> Product:
    """Random operands of a kind in `kinds.KINDS`, with a fresh seed.

    Args:
        padding: bytes between rows of the operands, beyond what rounding them up to 16 leaves; a multiple of 16.
        scales: a name of SCALE_STRIDES; of scales of rows "row" is one for each, and others are one of all.
        layout: the operands' layout, a name in `kinds.LAYOUTS`.
    """
    seed = SEEDS.getrandbits(31)
    print(f"make_product({kind!r}, {m}, {n}, {k}, seed={seed}, layout={layout!r})")
    generator = torch.Generator(device).manual_seed(seed)
    product = KINDS[kind]
    size = INT8_SIZE if product.sums == "s32" else 1
    size = size // 4 if product.output == RAW else size  # whose sums FP16 has to hold

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def matrix(rows: int, element: Element, major: str) -> torch.Tensor:
        dtype, values = getattr(torch, element.dtype), draw(rows, k) * size
        values = values.round().clamp(-128, 127) if dtype == torch.int8 else values
        return _placed_operand(values.to(dtype), major, padding // dtype.itemsize)

    def scale(rows: int, blocks: int) -> torch.Tensor:
        values = torch.exp2(draw(rows, blocks).clamp(-1, 1)) / size
        if product.row_scales:
            return _placed(values if scales == "row" else values[:1], (3, 1))
        return _placed_scale(values, scales)

    a, b = map(matrix, (m, n), (product.a, product.b), LAYOUTS[layout])
    if product.scaling == "none":
        return product_of(kind, (a, b))
    groups = ceil_div(k, SCALE_BLOCK) if product.block_scales else 1
    b_rows = ceil_div(n, SCALE_BLOCK) if product.scaling == "blocks" else n
    return product_of(kind, (a, scale(m, groups), b, scale(b_rows, groups)))


def product_of(kind: str, operands: tuple[torch.Tensor, ...]) -> Product:
    """The exact product of a kind and its tolerances. Enqueues work on the operands' device and does not wait.

    Args:
        operands: normal samples, with scales in float32.
    """
    if len(operands) == 2:
        return Product(gemm, operands, exact_dense_product(*operands), ACCUMULATION_WITHOUT_SCALES, 1e-5)
    family, operands = KINDS[kind].family, Operands(*operands)
    if family == "fp8_1x128":
        # With one K block, scales of 1x128 are scales of rows, whose kernel is as accurate.
        return Product(scaled_gemm, operands, exact_product(operands, b_rows=1), ACCUMULATION, MAX_RELATIVE_ERROR)
    if family == "fp8":
        call = fp8_gemm if kind == "fp8" else scaled_gemm
        return Product(call, operands, exact_product(operands), ACCUMULATION, 1e-3)
    if kind == "int8":
        return Product(int8_gemm, operands, exact_product(operands), ACCUMULATION_WITHOUT_SCALES, 1e-5)
    factors = operands.a_scale.double().reshape(-1, 1) * operands.b_scale.double().reshape(1, -1)
    exact = Exact(*(factors * part for part in exact_dense_product(operands.a, operands.b)))
    if kind == "int8_rows":
        return Product(scaled_gemm, operands, exact, ACCUMULATION_WITHOUT_SCALES, 1e-5)
    if family == "fp8_rows_promoted":
        return Product(partial(scaled_gemm, fast_accum=False), operands, exact, ACCUMULATION, 1e-3)
    # FP8 WGMMA keeps about 14 bits of a sum, to which it adds 32 of k at a time.
    k = operands.a.shape[1]
    return Product(scaled_gemm, operands, exact, ACCUMULATION + k * 2**-17, 5e-3 + k * 2**-18)


def exact_of_groups(operands: Operands, tokens: list[tuple[int, int]]) -> Exact:
    """The products of `fp8_grouped_wgrad` over each group's tokens, [g, n, k]; zeros for an empty group."""
    dy, dy_scale, x, x_scale = operands
    n, k = (torch.arange(len(codes), device=dy.device) for codes in (dy, x))
    wide = _scaled(dy, dy_scale, n, n), _scaled(x, x_scale, k, k)
    squares = [values.square() for values in wide]
    exact = Exact(*(wide[0].new_zeros(len(tokens), len(n), len(k)) for _ in range(2)))
    for group, (begin, end) in enumerate(tokens):
        if begin < end:
            for sums, (rows, columns) in zip(exact, (wide, squares), strict=True):
                torch.mm(rows[:, begin:end], columns[:, begin:end].t(), out=sums[group])
    return exact._replace(spread=exact.spread.sqrt_())


def blank_tokens(operands: Operands, tokens: list[tuple[int, int]]) -> None:
    """Fill each group's last block of 128 tokens with zeros; set tokens of no group, and their scales, to NaN."""
    device, s = operands.a.device, operands.a.shape[1]
    dead, filling = torch.ones(s, dtype=torch.bool), torch.zeros(s, dtype=torch.bool)
    for begin, end in tokens:
        dead[begin : round_up(end, SCALE_BLOCK)] = False
        filling[end : round_up(end, SCALE_BLOCK)] = True
    for codes, scale in (operands[:2], operands[2:]):
        codes.view(torch.uint8).masked_fill_(dead.to(device), _NAN_BYTE).masked_fill_(filling.to(device), 0)
        scale.masked_fill_(dead[::SCALE_BLOCK].to(device), float("nan"))


def with_finish(product: Product, bias_format: str = "none", activation: str = "none") -> Product:
    """The same product with a bias and an activation, with `a` so small that the activation is not linear.

    Args:
        bias_format, activation: names in `kinds.BIASES` and `kinds.ACTIVATIONS`. The bias has a stride of 3, and NaN
            around it.
    """
    a, b = product.operands[0], product.operands[len(product.operands) // 2]
    factor = 2.0 ** -round(product.exact.spread.mean().clamp(min=2.0**-20).log2().item())
    if len(product.operands) == 2:
        if a.dtype == torch.int8:
            a.copy_(few_integers(a))
            b.sign_()
        else:
            a.mul_(factor)
        exact = exact_dense_product(a, b)
    else:
        product.operands[1].mul_(factor)
        exact = Exact(*(factor * part for part in product.exact))
    bias = None
    if bias_format != "none":
        dtype = getattr(torch, OUTPUTS[bias_format].dtype)
        bias = _placed(torch.randn(b.shape[0], 1, device=a.device).to(dtype), (3, 1))[:, 0]
    return finished_product(product._replace(exact=exact), bias, activation)


def added(product: Product, before: torch.Tensor) -> Product:
    """The expected sum of a product and `before`, in the latter's format: both the product and the sum are rounded.
    Enqueues work on its device and does not wait."""
    value, spread = product.exact
    spread = spread + ROUNDING[before.dtype] / product.accumulation * value.abs()
    return product._replace(
        call=partial(product.call, accumulate=True),
        exact=Exact(value + before.double(), spread),
        relative_error=max(product.relative_error, 1.5 * RELATIVE_ERRORS[before.dtype]),
    )


def few_integers(x: torch.Tensor) -> torch.Tensor:
    """Signs of the largest numbers, about three in a thousand, and zeros: their sums are small."""
    return x.sign() * (x.float().abs() > 3 * x.float().square().mean().sqrt())


def finished_product(product: Product, bias: torch.Tensor | None, activation: str) -> Product:
    """The product after its epilogue. Enqueues work on its device and does not wait."""
    value, spread = product.exact
    exact = Exact(value if bias is None else value + bias.double(), spread)
    call = partial(product.call, bias=bias, activation=None if activation == "none" else activation)
    relative_error = max(2.3e-3, 3 * product.relative_error)  # rounding of numbers that are not normal
    exact = _activated(exact, activation, product.accumulation)
    return product._replace(call=call, exact=exact, relative_error=relative_error)


_STEPS_OF_A_FINISH = 5e-7
"""Relative error of adding a bias and applying an activation in FP32: eight roundings."""


def _activated(exact: Exact, activation: str, accumulation: float) -> Exact:
    """Apply an activation to sums, and carry their errors and those of its FP32 steps through it, in float64."""
    value = exact.value
    spread = exact.spread + _STEPS_OF_A_FINISH / accumulation * value.abs()
    if activation == "none":
        return Exact(value, spread)
    if activation == "swiglu":
        (gate, up), (of_gate, of_up) = (x.unflatten(1, (-1, 2, 8)).unbind(2) for x in (value, spread))
        passed = gate * gate.sigmoid()
        of_product = 1.1 * of_gate * up.abs() + passed.abs() * of_up + 1.1 * accumulation * of_gate * of_up
        return Exact((passed * up).flatten(1), of_product.flatten(1))
    functions = {
        "relu": lambda x: x.clamp(min=0),
        "gelu": lambda x: x * torch.special.ndtr(x),
        "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
        "silu": lambda x: x * x.sigmoid(),
    }
    return Exact(functions[activation](value), 1.13 * spread)


def assert_accurate(
    out: torch.Tensor, exact: Exact, accumulation: float = ACCUMULATION, relative_error: float = 0.0
) -> None:
    """Every element is within rounding and a little accumulation error; so is the whole, by the project's bar.

    Numbers below the dtype's normal ones are rounded to multiples of the smallest. Integers are exact.
    """
    wrong = are_off(out, exact, accumulation).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} of {out.numel()} elements are off, first at {wrong[0].tolist()}: "
        f"{out[tuple(wrong[0])].item()}, exact {exact.value[tuple(wrong[0])].item()}"
    )
    if out.numel() >= MANY:
        error, most = whole_error(out, exact).item(), whole_bar(out.dtype, exact, relative_error).item()
        assert error <= most, f"relative Frobenius error {error:.2e}, above {most:.2e}"


def are_off(out: torch.Tensor, exact: Exact, accumulation: float) -> torch.Tensor:
    """Which elements exceed the error of rounding and accumulation; on their device. Beyond the dtype's range, infinity
    is right."""
    made = out.double()
    error = (made - exact.value).abs()
    if not out.is_floating_point():
        return error != 0
    allowed = ROUNDING[out.dtype] * exact.value.abs() + accumulation * exact.spread
    allowed = allowed + torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps / 2
    is_beyond = exact.value.abs() + allowed >= torch.finfo(out.dtype).max
    return ~((error <= allowed) | (is_beyond & (made == exact.value.sign() * torch.inf)))


def whole_error(out: torch.Tensor, exact: Exact) -> torch.Tensor:
    """Relative error of the whole, by Frobenius norms; on its device. 0 / 0 is 0."""
    norm = exact.value.norm()
    error = (out.double() - exact.value).norm()
    return torch.where(error == 0, error, error / norm)


def effective_numbers(x: torch.Tensor) -> torch.Tensor:
    """How many equal numbers have a sum of squares that varies as much as that of `x`, which few large ones rule: the
    effective sample size of Kish. At least 1."""
    squares = x.double().square()
    return (squares.sum() ** 2 / squares.square().sum()).nan_to_num(1.0)


def whole_bar(dtype: torch.dtype, exact: Exact, relative_error: float) -> torch.Tensor:
    """The most that `whole_error` may be, with 4 standard deviations of a mean of so few squared errors; on the device.
    Sums of integers take 0.99 of FP16's bar in the mean at k = 128: most are between 2048 and 4096, and odd ones lie in
    the middle of two results."""
    most = max(RELATIVE_ERRORS[dtype], relative_error if dtype.is_floating_point else 0.0)
    return most * (1 + 2 / effective_numbers(exact.value) ** 0.5)


def check_gemm(
    operands: Operands,
    exact: Exact | None = None,
    *,
    out_stride: int | None = None,
    out_offset: int = 0,
    **keywords,
) -> torch.Tensor:
    """Multiply into a guarded `out`, check its values and its surroundings, and return it."""
    m, n, _ = operands.sizes
    guarded = GuardedOut(m, n, device=operands.a.device, stride=out_stride, offset=out_offset)
    assert fp8_gemm(*operands, guarded.out, **keywords) is guarded.out
    guarded.assert_guards_intact()
    assert_accurate(guarded.out, exact_product(operands) if exact is None else exact)
    return guarded.out


class Bounds(NamedTuple):
    """Between which a result lies."""

    low: torch.Tensor
    high: torch.Tensor


def silu_mul_bounds(gate_up: torch.Tensor, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0) -> Bounds:
    """Bounds of gate * sigmoid(alpha * gate) * (up + beta) in FP32, as `silu_mul_cast_to_fp8` documents it; in
    float64."""
    numbers = sources.gating(limit, alpha, beta)
    gate, up = gate_up.cpu().double().chunk(2, -1)
    gate, up = gate.clamp(max=numbers.limit), up.clamp(-numbers.limit, numbers.limit) + numbers.beta
    exponent = -numbers.alpha * gate
    value = gate / (1 + exponent.exp()) * up
    error = value.abs() * (1e-6 + 2e-7 * exponent.clamp(0, 100))
    error += ((gate * up).abs().nan_to_num() + 1) * 2.0**-126  # of a sigmoid that is 0 or not
    return Bounds(value - error, value + error)


def assert_silu_mul_cast(
    gate_up: torch.Tensor,
    quantized: torch.Tensor,
    scale: torch.Tensor,
    rows: slice | torch.Tensor = slice(None),
    *,
    amax_floor: float = SMALLEST_AMAX_FLOOR,
    round_scale: str = "none",
    **numbers: float,
) -> None:
    """Assert that a cast of the activation results from numbers within its bounds. Checks `rows`, counted over all
    leading dimensions. Raises AssertionError.
    """
    gate_up, quantized, scale = (x.cpu().flatten(0, -2)[rows] for x in (gate_up, quantized.cpu().float(), scale))
    assert_cast_within(silu_mul_bounds(gate_up, **numbers), quantized, scale, amax_floor, round_scale)


def norm_bounds(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Bounds:
    """Bounds of what `add_rms_norm_cast_to_fp8` casts, in float64."""
    total = (x.cpu().float() + residual.cpu().float()).double()
    value = total / (total.square().mean(1, keepdim=True) + epsilon).sqrt() * weight.cpu().double()
    error = value.abs() * 1e-6 + 2.0**-126
    return Bounds(value - error, value + error)


def assert_cast_within(
    bounds: Bounds, codes: torch.Tensor, scale: torch.Tensor, amax_floor: float, round_scale: str = "none"
) -> None:
    """Assert that a cast of a matrix, on the CPU, results from numbers within bounds. Raises AssertionError."""
    low, high = map(_groups_of_128, bounds)
    codes = codes.float()
    codes, inside = _groups_of_128(codes), _groups_of_128(torch.ones_like(codes)).bool()
    largest = torch.maximum(-low, high).amax(2)
    smallest = torch.maximum(low, -high).clamp(min=0).amax(2)
    poisoned = ~smallest.float().isfinite()  # or infinite in FP32
    assert scale[poisoned].isnan().all() and codes[poisoned[..., None] & inside].isnan().all()
    known = largest.float().isfinite()
    least, most = (_scale_of(amax.clamp(min=amax_floor), round_scale) for amax in (smallest, largest))
    exact = 2.0**-22  # of quotients, and of scales where they are rounded
    assert (scale >= least * (1 - exact))[known].all() and (scale <= most * (1 + exact))[known].all()
    assert round_scale == "none" or (scale[known].frexp().mantissa == 0.5).all()
    for bound, sign in ((low, -1), (high, 1)):
        quotient = bound / scale.double()[..., None]
        quotient = (quotient + sign * exact * quotient.abs()).clamp(-FP8_MAX, FP8_MAX).float()
        nearest = quotient.to(torch.float8_e4m3fn).float()
        assert (sign * (nearest - codes) >= 0)[known].all()


def _groups_of_128(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK))


def _scale_of(amax: torch.Tensor, round_scale: str) -> torch.Tensor:
    """The scale in float64, which tells a power of two times 448 from its neighbours."""
    scale = amax / FP8_MAX
    if round_scale == "none":
        return scale
    mantissa, exponent = scale.frexp()
    return torch.ldexp(torch.where(mantissa > 0.5, 1.0, 0.5).double(), exponent)


CHOICES = ("any", "hot", "one", "none")


def some_choices(tokens: int, top_k: int, experts: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Inputs of `sort_by_expert`: any experts and numbers that are none, mostly or only one expert, or none at all."""
    chosen = torch.randint(-1, experts + 1, (tokens, top_k)).to(dtype)
    if kind == "any":
        limits = torch.iinfo(dtype)
        chosen[tokens // 2] = limits.min + 1  # whose lower half would be an expert, of int64
        chosen[0, 0], chosen[-1, -1] = limits.min, limits.max
    elif kind == "hot":
        chosen[torch.rand(tokens, top_k) < 0.9] = experts - 1
    else:
        chosen[:] = min(2, experts - 1) if kind == "one" else experts
    return chosen


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equality that NaN takes part in."""
    return torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16))


def load_example(name: str) -> ModuleType:
    """Import a file of `EXAMPLES` under a name of its own, whatever else is called `examples`."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
