"""Check any call of `fp8_gemm`: values, memory around `out`, inputs, repeatability, the reach of special values.

Compiles every default config and random legal ones on all cores, then multiplies, round after round: each draws a
problem and multiplies it in several ways (strategies.py says which there are). Checks run on the GPU and are read now
and then, so that products follow each other closely. A round depends on the seed and its number alone, and can be
repeated by itself.

test_fuzz_draws.py and test_gemm_property_gpu.py use the checks with Hypothesis.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import campaign
import torch
from campaign import OperandPool, lay_out, on_gpu
from expected import Expected, expected_product
from helpers import GuardedOut, Operands, exact_product
from strategies import (
    SPECIAL_LIMITS,
    USUAL,
    Call,
    Limits,
    Place,
    Problem,
    Special,
    can_multiply,
    draw_configs,
    draw_problem,
    draw_use,
    family,
)

from deep_tile import GemmConfig, fp8_gemm
from deep_tile.reference import MAX_RELATIVE_ERROR

LARGE = Limits(m=4096, n=4096, k=4096, out=1 << 23)
"""Now and then: many waves of all SMs."""

USES = 6
"""Calls of each problem."""

LARGE_SHARE, SPECIAL_SHARE, ANY_BYTES_SHARE = 0.02, 0.15, 0.25


# Inputs.


class Sample(NamedTuple):
    """The inputs of one problem.

    Attributes:
        operands: the operands at their places, special values included.
        clean: the same without these; None where there are none.
        affected: [m, n], where these may change a result.
        expected: the permitted results of `operands`.
        buffer, untouched: all inputs with NaN around them, and a copy.
        normal: whether products must meet the accuracy bar as a whole.
    """

    operands: Operands
    clean: Operands | None
    affected: torch.Tensor | None
    expected: Expected
    buffer: torch.Tensor
    untouched: torch.Tensor
    normal: bool


def make_sample(values: Operands, problem: Problem, *, normal: bool = True) -> Sample:
    """`values` of the problem's sizes, put where it says."""
    by_definition = not values.a.is_cuda
    if not problem.specials:
        buffer, operands = arrange(values, problem.places)
        expected = Expected.of(exact_product(operands))
        large = min(problem.m, problem.n) >= 16 and problem.k >= 64 and problem.m * problem.n >= 20_000
        return Sample(operands, None, None, expected, buffer, buffer.clone(), normal and large)
    _, clean = arrange(values, problem.places)
    buffer, operands = arrange(with_specials(values, problem.specials), problem.places)
    expected = expected_product(operands, by_definition=by_definition)
    return Sample(operands, clean, reach(operands, clean), expected, buffer, buffer.clone(), False)


def with_specials(values: Operands, specials: tuple[Special, ...]) -> Operands:
    copies = Operands(*(x.clone() for x in values))
    for special in specials:
        x = getattr(copies, special.name)
        row, column = (slice(None) if at is None else slice(at, at + 1) for at in (special.row, special.column))
        x[row, column] = torch.full_like(x[row, column], special.value, dtype=torch.float32).to(x.dtype)
    return copies


def reach(operands: Operands, clean: Operands) -> torch.Tensor:
    """[m, n], which results depend on an input that differs."""
    a, a_scale, b, b_scale = ((bits(x) != bits(y)).any(1) for x, y in zip(operands, clean, strict=True))
    columns = torch.arange(len(b), device=b.device) // 128
    return (a | a_scale)[:, None] | (b | b_scale[columns])[None]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def arrange(values: Operands, places: tuple[Place, ...]) -> tuple[torch.Tensor, Operands]:
    """`lay_out` of operands."""
    buffer, placed = lay_out(values, places)
    return buffer, Operands(*placed)


# Checks: numbers of wrong elements, left on the device.


def check_use(sample: Sample, call: Call) -> dict[str, torch.Tensor]:
    """Multiply twice, and once more without special values. Returns counts of wrong elements by kind, 0 if none.

    The kernel before each product writes `out`, and never `b`, as `constant_weights` asks.
    """
    guarded, keywords = _guarded_out(sample, call), call.use.keywords
    first = _multiply(sample.operands, guarded.out, keywords)
    again = _multiply(sample.operands, guarded.out, keywords)
    faults = {
        "values": sample.expected.wrong(first).sum(),
        "repeat": (bits(first) != bits(again)).sum(),
    }
    if sample.clean is not None:
        clean = _multiply(sample.clean, guarded.out, keywords)
        faults["reach"] = ((bits(first) != bits(clean)) & ~sample.affected).sum()
    if sample.normal:
        error, norm = (first.double() - sample.expected.value).norm(), sample.expected.value.norm()
        faults["accuracy"] = (error > MAX_RELATIVE_ERROR * norm).long()
    faults["guards"] = guarded.count_written_outside()
    return faults


def _guarded_out(sample: Sample, call: Call) -> GuardedOut:
    (m, n, *_), use = call
    return GuardedOut(m, n, device=sample.buffer.device, stride=use.out_stride, offset=use.out_offset)


def _multiply(operands: Operands, out: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
    """A dense copy of the product, which overwrites NaN."""
    out.fill_(float("nan"))
    return fp8_gemm(*operands, out, **keywords).clone(memory_format=torch.contiguous_format)


def check_inputs(sample: Sample) -> torch.Tensor:
    """How many bytes of the inputs, or around them, have changed."""
    return (sample.buffer != sample.untouched).sum()


def assert_right(call: Call, pool: OperandPool, seed: int) -> None:
    """Make and check one call.

    Raises:
        AssertionError: what was wrong about it.
    """
    problem = call.problem
    sample = make_sample(pool.cut(Random(seed), problem.m, problem.n, problem.k), problem)
    faults = check_use(sample, call) | {"inputs": check_inputs(sample)}
    found = {kind: count.item() for kind, count in faults.items() if count}
    assert not found, f"{found}; {_first_wrong(sample, call) if found.get('values') else ''} {call}"


def _first_wrong(sample: Sample, call: Call) -> str:
    out = _multiply(sample.operands, _guarded_out(sample, call).out, call.use.keywords)
    wrong = sample.expected.wrong(out).nonzero()
    if not len(wrong):
        return "right when multiplied again;"
    index = tuple(wrong[0].tolist())
    return f"element {list(index)} is {out[index].item()}, expected {sample.expected.describe(index)};"


# The run.


class Fuzzer(campaign.Fuzzer):
    UNDER_WAY, UNSETTLED, DRAWN, CONFIGS = 12, 256, "call", 640

    def __init__(self, arguments: argparse.Namespace, report: campaign.Report):
        super().__init__(arguments, report)
        self.products = 0
        self.configs: set[str] = set()

    def load(self) -> None:
        drawn = draw_configs(Random(f"{self.seed}:configs"), self.arguments.configs)
        self._configs = self.load_kernels(config for config in drawn if config.cluster <= self.num_sms)
        self._limits = USUAL
        size = max(self._limits.m, self._limits.n, LARGE.m if on_gpu(self.device) else 0)
        k = max(self._limits.k, LARGE.k if on_gpu(self.device) else 0)
        self._pools = [OperandPool(size, k, self.device, self.seed % 2**31, any_bytes=any_) for any_ in (False, True)]

    def run_round(self, number: int) -> None:
        """Draw a problem and multiply it in several ways."""
        random = Random(f"{self.seed}:{number}")
        first = self._configs[number % len(self._configs)]
        kind = random.random()
        special = kind < SPECIAL_SHARE
        large = on_gpu(self.device) and kind > 1 - LARGE_SHARE
        limits = LARGE if large else Limits(*map(min, self._limits, SPECIAL_LIMITS)) if special else self._limits
        problem = draw_problem(random, first, limits, special=special)
        any_bytes = random.random() < ANY_BYTES_SHARE
        values = self._pools[any_bytes].cut(random, problem.m, problem.n, problem.k)
        sample = make_sample(values, problem, normal=not any_bytes)
        for config in (first, None, *islice(self._suited(problem, number), USES - 2)):
            call = Call(problem, draw_use(random, problem, config, self.num_sms))
            self._check(number, sample, call)
        self.ledger.note(number, call, {"inputs": check_inputs(sample)})
        self.ledger.end_round()

    def _suited(self, problem: Problem, number: int) -> Iterator[GemmConfig]:
        """Other configs, each round from another one on."""
        start = number * (USES - 2) % len(self._configs)
        others = (*self._configs[start:], *self._configs[:start])
        return (config for config in others if can_multiply(config, problem))

    def _check(self, number: int, sample: Sample, call: Call) -> None:
        try:
            faults = check_use(sample, call)
        except (TypeError, ValueError) as error:
            self.report.find("refused", round=number, call=str(call), error=str(error))
            return
        self.ledger.add(number, call, faults)
        self.products += 2 if sample.clean is None else 3
        config = call.use.config
        self.calls["the selector's choice" if config is None else family(config)] += 1
        if config is not None:
            self.configs.add(config.name)

    def counts(self) -> dict[str, Any]:
        found = {"wrong": self.report.found.get("wrong", 0), "hangs": self.report.found.get("hang", 0)}
        counts = {"products": self.products, "calls": self.calls.total(), "configs": len(self.configs)}
        return counts | found | {"families": dict(sorted(self.calls.items()))}
