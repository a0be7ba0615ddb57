"""GEMMs that stress.py repeats. Each runs on a quiet GPU first; later results must have the same bits.

A job is a call of `fp8_gemm`, of another kind's function or of groups of gradients, as fuzz_kinds.py draws them, or of
groups of rows, as fuzz_groups.py does. Invariant: all of an `out` and what lies around it is compared, so that a stray
write counts as well.
"""

from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any, NamedTuple

import fuzz_groups
import fuzz_kinds
import torch
from campaign import OperandPool, Watch, on_gpu
from expected import Expected
from helpers import SCALE_STRIDES, exact_product, rearranged

from deep_tile import GemmConfig, fp8_gemm
from deep_tile.config import round_up

REPEATS = 8
"""Calls of a product behind each other, compared together."""

_MARGIN = 256
"""Elements around each `out`."""

_POISON = -1
"""NaN of every format."""


class Spec(NamedTuple):
    """A GEMM of `fp8_gemm` to repeat.

    Attributes:
        chain: each call needs the one before: its result, read as FP32, is the next one's scale of `a`.
    """

    config: GemmConfig
    m: int
    n: int
    k: int
    num_sms: int
    pdl: bool = False
    constant_weights: bool = False
    chain: bool = False

    def __str__(self) -> str:
        ways = [way for way in ("pdl", "constant_weights", "chain") if getattr(self, way)]
        return " ".join([f"{self.config.name} {self.m}x{self.n}x{self.k} on {self.num_sms} SMs", *ways])


class Outs:
    """An `out` for each of REPEATS calls.

    Attributes:
        bits: [REPEATS, elements], as integers, with poison around each `out`.
    """

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str, offset: int = 0
    ):
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else 0
        words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        self._layout, self._first, self._dtype = (shape, strides), _MARGIN + offset, dtype
        size = round_up(self._first + extent + _MARGIN, 8)
        self.bits = torch.full((REPEATS, size), _POISON, dtype=words, device=device)

    def view(self, bits: torch.Tensor) -> torch.Tensor:
        """The `out` in one row of `bits`."""
        return bits.view(self._dtype).as_strided(*self._layout, bits.storage_offset() + self._first)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.view, self.bits)

    def __getitem__(self, step: int) -> torch.Tensor:
        return self.view(self.bits[step])


class Job:
    """A GEMM's results on a quiet GPU, and the number of calls that differed.

    Attributes:
        config: its kernel's config.
        calls: the number of calls compared.
        chained: each call has a result of its own.
    """

    chained = False

    def __init__(self, what: Any, config: GemmConfig, outs: Outs, device: str):
        self.config, self.calls, self.outs = config, 0, outs
        self._what, self._device = what, device
        self._expected: torch.Tensor | None = None
        self._differing = torch.zeros((), dtype=torch.int64, device=device)
        self._graph: Any = None

    def __str__(self) -> str:
        return str(self._what)

    # For subclasses.

    def multiply(self, step: int) -> None:
        """Make one call, into `outs[step]`."""
        raise NotImplementedError

    def blank(self) -> None:
        """Restore `outs` to their state before a call."""
        self.outs.bits.fill_(_POISON)

    def check(self) -> None:
        """Raises AssertionError unless `outs` hold the product."""
        raise NotImplementedError

    def written(self, out: torch.Tensor) -> list[torch.Tensor]:
        """The parts of an `out` that a call writes."""
        return [out]

    # How it is repeated.

    def prepare(self, *, graph: bool) -> None:
        """Multiply with nothing else on the GPU, check that, and capture the calls if they are to be a graph.

        Raises:
            AssertionError: a result is wrong, or they differ.
            Hang: a product does not end.
        """
        self._enqueue()
        self._await()
        self.check()
        self._assert_surroundings()
        bits = self.outs.bits
        self._expected = (bits if self.chained else bits[0]).clone()
        self._enqueue()
        self._await()
        assert self.differing() == 0, f"{self.differing()} of {REPEATS} results differ from those of the first time"
        if graph and on_gpu(self._device):
            self._capture()

    def _assert_surroundings(self) -> None:
        bits = self.outs.bits[0].clone()
        for part in self.written(self.outs.view(bits)):
            part.view(bits.dtype).fill_(_POISON)
        stray = (bits != _POISON).sum().item()
        assert stray == 0, f"{stray} elements are written that are not the product's"

    def _await(self) -> None:
        watch = Watch(self._device)
        watch.add(self)
        watch.drain()

    def differing(self) -> int:
        """The number of calls with other bits. Waits for the current stream."""
        return int(self._differing.item())

    def repeat(self) -> None:
        """REPEATS calls on the current stream, then their comparison."""
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.replay()
        self.calls += REPEATS

    def _enqueue(self) -> None:
        self.blank()
        for step in range(REPEATS):
            self.multiply(step)
        if self._expected is not None:
            self._differing += (self.outs.bits != self._expected).any(1).sum()

    def _capture(self) -> None:
        """Capture a graph as deep_tile.timing.capture does, in thread-local mode, since other threads may be at
        work."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._enqueue()
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue()
            finally:
                self._graph.capture_end()
        stream.synchronize()


class GemmJob(Job):
    """A job of `fp8_gemm`."""

    def __init__(self, spec: Spec, pool: OperandPool, random: Random, device: str):
        outs = Outs((spec.m, spec.n), (spec.n, 1), torch.bfloat16, device)
        super().__init__(spec, spec.config, outs, device)
        self.chained = spec.chain
        layouts = {name: random.choice(list(SCALE_STRIDES)) for name in ("a_scale", "b_scale")}
        self._operands = rearranged(pool.cut(random, spec.m, spec.n, spec.k), **layouts)
        options = spec._asdict()
        self._options = {name: options[name] for name in ("config", "num_sms", "pdl", "constant_weights")}

    def prepare(self, *, graph: bool) -> None:
        if self.chained:
            self._normalize()
        super().prepare(graph=graph)

    def multiply(self, step: int) -> None:
        fp8_gemm(*self._operands._replace(a_scale=self._scale(step)), self.outs[step], **self._options)

    def check(self) -> None:
        for step in range(REPEATS if self.chained else 1):
            out, exact = self.outs[step], exact_product(self._operands._replace(a_scale=self._scale(step)))
            wrong = Expected.of(exact).wrong(out).sum().item()
            assert wrong == 0, f"{wrong} of {out.numel()} elements are off in call {step}"

    def _scale(self, step: int) -> torch.Tensor:
        """The scale of `a` for one call. The upper half of an FP32 number is a BF16 number, so a pair of BF16 results
        reads as an FP32 number like the second."""
        scale = self._operands.a_scale
        if step == 0 or not self.chained:
            return scale
        return self.outs[step - 1].view(torch.float32)[:, : scale.shape[1]]

    def _normalize(self) -> None:
        """Sizes neither grow nor shrink along the chain."""
        ones = self._operands._replace(a_scale=torch.ones_like(self._operands.a_scale))
        growth = fp8_gemm(*ones, config=self.config).float().square().mean().sqrt()
        self._operands.b_scale.div_(growth)


class KindJob(Job):
    """A job of any kind, or of grouped weight gradients."""

    def __init__(self, drawn: fuzz_kinds.Draw, values: fuzz_kinds.Values, device: str):
        (rows, columns), stride = drawn.out_shape, drawn.use.out_stride
        shape, strides = (rows, columns), (stride, 1)
        if drawn.tokens is not None:
            shape = (len(drawn.tokens.bounds), *shape)
            strides = ((rows + drawn.tokens.spare_rows) * stride, *strides)
        dtype = getattr(torch, drawn.config.out.dtype)
        super().__init__(drawn, drawn.config, Outs(shape, strides, dtype, device, drawn.use.out_offset), device)
        self._drawn, self._sample = drawn, fuzz_kinds.make(values, drawn, device)

    def multiply(self, step: int) -> None:
        fuzz_kinds.multiply(self._sample, self._drawn, self.outs[step])

    def blank(self) -> None:
        super().blank()
        if self._sample.before is not None:
            for out in self.outs:
                out.copy_(self._sample.before)

    def check(self) -> None:
        for what, count in fuzz_kinds.faults_of(self.outs[0], self._sample, self._drawn).items():
            assert count.item() == 0, f"{what}: {count.item()} of {self.outs[0].numel()} elements are off"
        self._sample = self._sample._replace(exact=None)  # of the largest the memory of several others


class GroupJob(Job):
    """A job of row groups."""

    def __init__(self, drawn: fuzz_groups.Draw, pool: fuzz_groups.Pool, device: str):
        outs = Outs((drawn.total, drawn.n), (drawn.out_stride, 1), torch.bfloat16, device)
        super().__init__(drawn, fuzz_groups.CONFIGS[drawn.config], outs, device)
        self._drawn, self._product = drawn, fuzz_groups.make(pool, drawn, device)

    def multiply(self, step: int) -> None:
        fuzz_groups.multiply(self._product, self._drawn, self.outs[step])

    def check(self) -> None:
        wrong = fuzz_groups.count_wrong(self._product, self._drawn, self.outs[0]).item()
        assert wrong == 0, f"{wrong} elements of {self.outs[0].numel()} are off"

    def written(self, out: torch.Tensor) -> list[torch.Tensor]:
        return [out[first:last] for _, first, last in fuzz_groups.living_rows(self._drawn)]
