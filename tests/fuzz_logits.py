"""Random calls of the indexer's logits, for as long as it is told: see docs/development.md, "Fuzzing and stress".

Sizes, heads, strides, ranges and block tables that are empty, overlap or lie, `clean` or not, compressed or not, `out`
given with guards around it or allocated; against the definition in float64. A second call must give the same bits.
"""

from random import Random
from typing import NamedTuple

import campaign
import torch

from deep_tile import logits, mqa_logits, paged_mqa_logits

GUARD = 7.25
FP8 = torch.float8_e4m3fn

TOLERANCES = {torch.float32: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Tolerances relative to the sum of magnitudes: WGMMA keeps about 14 bits of products of up to 7 bits; BF16 has 8."""


class Drawn(NamedTuple):
    """One call.

    Attributes:
        paged: whether keys lie in a paged cache.
        inputs: its tensors, in order.
        options: its keywords.
        gives_out: whether it is given an `out`.
    """

    paged: bool
    inputs: tuple[torch.Tensor, ...]
    options: dict
    gives_out: bool


def draw_case(random: Random, device: str, most_products: int = 2**26, paged: bool | None = None) -> Drawn:
    """A call with at most so many products of heads."""
    generator = torch.Generator(device).manual_seed(random.randrange(2**31))
    heads, head_dim = random.choice((1, 4, 20, 32, 32, 64, 64, 64, 100, 128)), random.choice((32, 64, 128, 128))
    paged = random.random() < 0.5 if paged is None else paged
    rows_and_keys = most_products // (heads * head_dim)
    make = _draw_pages if paged else _draw_keys
    inputs, room = make(random, generator, heads, head_dim, rows_and_keys)
    options = {
        "clean": random.random() < 0.5,
        "columns": random.choice((None, None, random.randint(1, room + 70))),
        "out_dtype": random.choice((torch.float32, torch.float32, torch.bfloat16)),
        "num_sms": random.choice((None, None, 1, 7, 100)),
    }
    return Drawn(paged, inputs, options, random.random() < 0.7)


def _draw_keys(random: Random, generator: torch.Generator, heads: int, head_dim: int, most: int) -> tuple[tuple, int]:
    rows = random.choice((1, 2, 3, 5, 8, 9, random.randint(1, 300)))
    keys = random.randint(1, max(min(most // rows, 5000), 1))
    q, kv = _codes(generator, rows, heads, head_dim), _codes(generator, keys, head_dim)
    lists = [_integers(random, generator, rows, keys) for _ in range(2)]
    scale = torch.rand(keys, generator=generator, device=generator.device) + 0.5
    return (q, kv, scale, _weights(random, generator, rows, heads), *lists), keys


def _draw_pages(random: Random, generator: torch.Generator, heads: int, head_dim: int, most: int) -> tuple[tuple, int]:
    n = random.randint(1, 8)
    columns = random.randint(1, 40)  # of the table
    batch = random.randint(1, max(min(most // (n * 64 * columns), 300), 1))
    pages = random.randint(1, 200)
    device = generator.device
    stride = 64 * (head_dim + 4) + random.choice((0, 0, 16, 512))
    cache = torch.full((pages, stride), 0x7F, dtype=torch.uint8, device=device)[:, : 64 * (head_dim + 4)]
    cache[:, : 64 * head_dim] = _codes(generator, pages, 64 * head_dim).view(torch.uint8)
    scales = torch.rand(pages, 64, generator=generator, device=device) + 0.5
    cache[:, 64 * head_dim :] = scales.view(torch.uint8)
    cache = cache.unflatten(1, (64, 1, head_dim + 4))
    lengths = _integers(random, generator, batch * n, 64 * columns)
    lengths = lengths.view(batch, n) if random.random() < 0.5 else lengths[:batch].clone()
    table = torch.randint(0, pages, (batch, columns + 1), generator=generator, device=device).int()[:, :columns]
    if random.random() < 0.3:
        table[torch.rand(batch, columns, generator=generator, device=device) < 0.2] = random.choice((-1, 2**31 - 1))
    q = _codes(generator, batch, n, heads, head_dim)
    return (q, cache, _weights(random, generator, batch * n, heads), lengths, table), 64 * columns


def _codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(FP8)


def _weights(random: Random, generator: torch.Generator, rows: int, heads: int) -> torch.Tensor:
    padded = heads + random.choice((0, 0, 3))
    return torch.randn(rows, padded, generator=generator, device=generator.device)[:, :heads]


def _integers(random: Random, generator: torch.Generator, count: int, limit: int) -> torch.Tensor:
    """Around 0 to `limit`; sometimes some that lie."""
    drawn = torch.randint(-3, limit + 4, (count,), generator=generator, device=generator.device).int()
    if random.random() < 0.3:
        drawn[random.randrange(count)] = random.choice((-(2**31), 2**31 - 1, 0))
    return drawn


def check(drawn: Drawn) -> dict[str, torch.Tensor]:
    """Counts of wrong logits and bytes of a call by kind, on its device."""
    call = paged_mqa_logits if drawn.paged else mqa_logits
    options = drawn.options if drawn.gives_out else drawn.options | {"clean": True}
    shape = call(*drawn.inputs, **options).shape
    frame, out = _framed(shape, options["out_dtype"], drawn.inputs[0].device)
    wanted = out.clone()

    def made() -> torch.Tensor:
        return call(*drawn.inputs, out.fill_(GUARD), **options) if drawn.gives_out else call(*drawn.inputs, **options)

    got, again = made().clone(), made()
    _define(drawn, wanted, options)
    error, bound = (got.float() - wanted.float()).abs(), _bound(drawn, shape) * TOLERANCES[options["out_dtype"]]
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    found = {
        "values": (~(same | (error <= bound))).sum(),
        "infinities": ((got == float("-inf")) != (wanted == float("-inf"))).sum(),
        "bits": (again.view(torch.uint8) != got.view(torch.uint8)).sum(),
    }
    out.fill_(GUARD)
    return found | {"guards": (frame != GUARD).sum()}


def _framed(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frame = torch.full((shape[0] + 2, shape[1] + 37), GUARD, dtype=dtype, device=device)
    return frame, frame[1:-1, 5 : 5 + shape[1]]


def _define(drawn: Drawn, out: torch.Tensor, options: dict) -> None:
    given = options["clean"], options["columns"], options["out_dtype"], None, None
    if drawn.paged:
        q, cache, *others = drawn.inputs
        logits._define_paged((*given, q.shape[1]), q.flatten(0, 1), cache.flatten(1), *others, out)
    else:
        logits._define(given, *drawn.inputs, out)


def _bound(drawn: Drawn, shape: torch.Size) -> torch.Tensor:
    """The largest possible sum of magnitudes in each row."""
    q, keys, head_dim = drawn.inputs[0], drawn.inputs[1], drawn.inputs[0].shape[-1]
    weights = drawn.inputs[2 if drawn.paged else 3].abs()
    largest = keys.flatten(1)[:, : 64 * head_dim].view(FP8) if drawn.paged else keys
    sums = q.float().abs().flatten(0, -3).sum(-1) * largest.float().abs().max()
    return ((sums * weights).sum(1, keepdim=True) * 1.5).expand(shape)


class Fuzzer(campaign.Fuzzer):
    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        most = 2**20 if self.device == "cpu" else random.choice((2**23, 2**27, 2**31))  # to many tiles for each SM
        case = draw_case(random, self.device, most)
        self.drawn = f"{[list(x.shape) for x in case.inputs]} {case.options} gives_out={case.gives_out}"
        faults = check(case)
        self.calls["paged" if case.paged else "keys"] += 1
        return faults
