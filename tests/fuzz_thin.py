"""Check thin GEMMs (`thin_gemm`, `prenorm_gemm`) of any size, layout and magnitude, element by element.

A round is a product in FP32 weights, in their terms, in BF16 or of a batch, or one with sums of squares; in parts that
are given or chosen. Each number must be float64's within what FP32 sums allow, a second call must give the same bits,
and no byte may change around what is written. A round depends on the seed and its number alone.
"""

from math import prod
from random import Random
from typing import Any

import campaign
import torch
from helpers import GuardedOut

import deep_tile

SIZES = (1, 2, 7, 24, 31, 32, 33, 64, 65, 127, 128, 129, 200, 256, 300, 1000)
LENGTHS = (1, 8, 40, 63, 64, 65, 128, 520, 1000, 4096, 7168, 16384)
MOST_OPERATIONS = 2**31
DTYPES = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Output dtypes, with their relative rounding error."""

SUM_ERROR = {3: 4e-7, 2: 8e-6}
"""Error relative to the sum of magnitudes, by the number of terms. That of FP32 sums grows with their length."""


def matrix(random: Random, *shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows that begin at multiples of 16 bytes, some with a gap behind them, of different magnitudes."""
    padded = -(-shape[-1] // 8) * 8 + random.choice((0, 0, 8, 64))
    x = torch.randn(*shape[:-1], padded, device=device)
    if random.random() < 0.5:
        x *= 2.0 ** torch.randint(-20, 20, (*shape[:-1], 1), device=device)
    if random.random() < 0.2:
        x[torch.rand(x.shape, device=device) < 0.5] = 0
    return x.to(dtype)[..., : shape[-1]]


def guarded(*shape: int, dtype: torch.dtype, device: str) -> tuple[GuardedOut, torch.Tensor]:
    """A dense target, and what counts writes around it."""
    guard = GuardedOut(prod(shape[:-1]), shape[-1], dtype=dtype, device=device)
    return guard, guard.out.view(shape)


def beyond(
    got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, relative: float, k: int, terms: int
) -> torch.Tensor:
    """How many numbers are not near enough."""
    of_format = torch.finfo(got.dtype)
    least = of_format.smallest_normal * of_format.eps  # the distance of subnormal numbers
    allowed = magnitude * SUM_ERROR[terms] * max(1.0, (k / 4096) ** 0.5) + exact.abs() * relative + least
    near = (got.double() - exact).abs() <= allowed
    beyond_range = exact.abs() > torch.finfo(got.dtype).max / 2
    return (~(near | beyond_range)).sum()


def check_thin(random: Random, sizes: tuple[int, int, int], device: str) -> tuple[str, dict[str, Any]]:
    m, n, k = sizes
    kind, terms = random.choice(("fp32", "terms", "bf16", "batch")), random.choice((3, 3, 2))
    out_dtype = random.choice([*DTYPES])
    every = (random.choice((1, 2, 5)),) if kind == "batch" else ()
    a = matrix(random, *every, m, k, dtype=torch.bfloat16, device=device)
    b = matrix(
        random, *every, n, k, dtype=torch.bfloat16 if kind in ("bf16", "batch") else torch.float32, device=device
    )
    options = {"batch_invariant": random.random() < 0.3, "terms": terms}
    given = deep_tile.split_weight(b, terms) if kind == "terms" else b
    x, y = (a.double(), b.double()) if every else (a.double()[None], b.double()[None])
    exact, magnitude = (x @ y.mT).sum(0), (x.abs() @ y.abs().mT).sum(0)
    guard, out = guarded(m, n, dtype=out_dtype, device=device)
    deep_tile.thin_gemm(a, given, out, **options)
    again = deep_tile.thin_gemm(a, given, out_dtype=out_dtype, **options)
    found = {
        "values": beyond(out, exact, magnitude, DTYPES[out_dtype], k * len(x), terms),
        "bits": (out != again).sum() - (out.isnan() & again.isnan()).sum(),
        "guards": guard.count_written_outside(),
    }
    return f"{kind} {[*every, m, n, k]} {out_dtype} {options}", found


def check_prenorm(random: Random, sizes: tuple[int, int, int], device: str) -> tuple[str, dict[str, Any]]:
    m, n, k = sizes
    splits = random.choice((None, None, 1, 2, 7, 16, 128))
    a = matrix(random, m, k, dtype=torch.bfloat16, device=device)
    b = matrix(random, n, k, dtype=torch.float32, device=device)
    every = () if splits is None else (splits,)
    made = [guarded(*every, *shape, dtype=torch.float32, device=device) for shape in ((m, n), (m,))]
    got = deep_tile.prenorm_gemm(a, b, *(out for _, out in made), num_splits=splits)
    again = deep_tile.prenorm_gemm(a, b, num_splits=splits)
    total, squares = (x if splits is None else x.double().sum(0) for x in got)
    exact, magnitude, square = (
        a.double() @ b.double().T,
        a.double().abs() @ b.double().abs().T,
        a.double().square().sum(1),
    )
    found = {
        "values": beyond(total, exact, magnitude, 0.0, k, 3),
        "squares": beyond(squares, square, square, 0.0, k, 3),
        "bits": sum((x != y).sum() for x, y in zip(got, again, strict=True)),
        "guards": sum(guard.count_written_outside() for guard, _ in made),
    }
    return f"prenorm {[m, n, k]} {splits}", found


class Fuzzer(campaign.Fuzzer):
    def load(self) -> None:
        deep_tile.precompile_thin()

    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(random.randrange(2**31))
        sizes = random.choice(SIZES), random.choice(SIZES), random.choice(LENGTHS)
        while prod(sizes) > MOST_OPERATIONS:
            sizes = random.choice(SIZES), random.choice(SIZES), random.choice(LENGTHS)
        check = random.choice((check_thin, check_thin, check_prenorm))
        self.drawn, found = check(random, sizes, self.device)
        self.calls[self.drawn.split()[0]] += 1
        return found

    def counts(self) -> dict[str, Any]:
        return {"products": 2 * self.calls.total(), "kinds": dict(sorted(self.calls.items()))}
