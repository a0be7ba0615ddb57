"""Weights of any format as blocks of 128x128, shards that begin anywhere in a block, and weights of 4 bits that are
multiplied as they are, checked element by element.

    PYTHONPATH=. python tests/fuzz_formats.py --seconds 120 --out formats.json [--seed N] [--first-round R --rounds 1]

A round is a weight, drawn by formats.py, through `to_blocks`: its elements must be the nearest for their scales, the
scales the smallest, and the report that of float64. Or it is a weight in blocks through `shard_weight`: the product of
each rank's columns must be the whole product's, bit for bit. Or it is packed: it must come back as it was, and its
product, dense or of groups, be that of the FP8 weight that it stands for, bit for bit. A round depends on the seed and
its number alone.

Ends with status 0, or 1 when something was wrong, 3 when a call did not end within 20 s, 4 when the GPU failed.
"""

import math
import sys
from random import Random
from typing import Any

import campaign
import torch
from campaign import fuzz, fuzz_parser
from formats import draw, fp8_product, spread

import deep_tile
from deep_tile import blocks, packed
from deep_tile.distributed import shard_weight
from deep_tile.formats import FORMATS
from deep_tile.quantize import FP8_DTYPE

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 192, 200, 256, 257, 300, 384)
LEADING = ((), (), (), (2,), (1, 3))
SPREADS = (0, 1, 3, 14, 15, 20, 60, 100)
"""Powers of two that scales differ by."""

SHARDS_SHARE, PACKED_SHARE = 0.1, 0.5
"""To one weight that is re-based."""

SHARES = (1, 13, 64, 100, 192, 264)
"""Columns of a rank."""


def check_format(random: Random, device: str) -> tuple[str, dict[str, Any]]:
    """What was drawn, and what is wrong about it, on the device."""
    name = random.choice([*FORMATS])
    of = FORMATS[name]
    shape = (*random.choice(LEADING), random.choice(SIZES), 2 * random.choice(SIZES))
    firsts = tuple(random.choice((0, random.randrange(max(size, 1)))) for size in (of.rows, of.columns))
    weight, scale, arguments, exact = draw(name, shape, device, random.choice(SPREADS), firsts)
    exact = exact.to(device)
    if random.random() < 0.3:
        weight = weight.repeat_interleave(2, -2)[..., ::2, :]
    if not of.packed and random.random() < 0.3:
        arguments["out"] = weight = weight.clone()
    first_row, first_column = firsts
    limit = random.choice((math.inf, 1e9))
    result = deep_tile.to_blocks(
        weight, scale, **arguments, first_row=first_row, first_column=first_column, max_error=limit
    )
    return f"{name} {shape} {firsts}", faults(result, exact)


def faults(result: blocks.Blocks, exact: torch.Tensor) -> dict[str, torch.Tensor]:
    weight, scale, report = result
    each = spread(scale, (128, 128), exact.shape[-2:])
    wanted = (exact / each).float().to(FP8_DTYPE)
    change = weight.double() * each - exact
    as_it_is = report.format in ("fp8_128x128", "fp8_tensor")
    largest = largest_of_blocks(weight, scale.shape)
    small = (largest > 0) & (largest < 224) & (scale >= 2**-125) & (not as_it_is and min(exact.shape[-2:]) > 128)
    norms = change.norm(dim=-1), exact.norm(dim=-1)
    worst = torch.where(norms[1] > 0, norms[0] / norms[1], 0).max()
    return {
        "element": (weight.view(torch.uint8) != wanted.view(torch.uint8)).sum(),
        "scale": small.sum(),
        "changed": (change != 0).sum() != report.changed,
        "error": (worst - report.worst_row_error).abs() > 1e-5 * worst,
        "exact": (largest_of_blocks(change, scale.shape) == 0).ne(report.exact).sum(),
    }


def largest_of_blocks(x: torch.Tensor, of_blocks: torch.Size) -> torch.Tensor:
    """The largest magnitude of each block of 128x128."""
    rows, columns = (128 * size - given for size, given in zip(of_blocks[-2:], x.shape[-2:], strict=True))
    padded = torch.nn.functional.pad(x.double(), (0, columns, 0, rows)).abs()
    return padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).amax((-3, -1))


def check_shards(random: Random, device: str) -> tuple[str, dict[str, Any]]:
    each, ranks, k = random.choice(SHARES), random.choice((2, 3, 8)), random.choice((128, 272, 512))
    n = max(1, each * ranks - random.choice((0, 0, 1)))
    how = {"round_scale": random.choice(("none", "pow2"))}
    b, b_scale = deep_tile.quantize_weight(torch.randn(n, k, device=device), **how)
    x = torch.randn(random.choice((1, 5, 70)), k, device=device).bfloat16()
    whole = deep_tile.fp8_linear(x, b, b_scale, batch_invariant=True)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for rank in range(ranks):
        shard = shard_weight(b, b_scale, rank, ranks, "column")
        own = deep_tile.fp8_linear(x, shard.weight, shard.scale, batch_invariant=True)[:, shard.first :]
        begin = rank * -(-n // ranks)
        wrong += (own != whole[:, begin : begin + own.shape[1]]).sum() + abs(
            own.shape[1] - shard.weight.shape[0] + shard.first
        )
    return f"shards of {n}x{k} over {ranks} {how}", {"columns": wrong}


def check_packed(random: Random, device: str) -> tuple[str, dict[str, Any]]:
    name, groups = random.choice(("mxfp4", "nvfp4", "int4_128")), random.choice((0, 0, 1, 3, 40))
    n, k, m = (
        16 * random.choice((1, 2, 3, 9, 18, 36)),
        2 * random.choice(SIZES[3:]),
        random.choice((0, 1, 5, 64, 130, 300)),
    )
    shape = (*([groups] if groups else []), n, k)
    weight, scale, arguments, _ = draw(name, shape, device, random.choice(SPREADS[:5]))
    b = deep_tile.pack_weight(weight, scale, **arguments, max_error=math.inf)
    back, wide = deep_tile.unpack_weight(*b, k=k), packed.as_fp8(*b, k=k)
    wide = torch.empty(*shape[:-1], -(-k // 16) * 16, dtype=FP8_DTYPE, device=device)[..., :k].copy_(wide)
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(m, k, device=device))
    dtype = random.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    if groups:
        ends = torch.randint(0, m + 1, (groups,)).sort().values.int()
        own, whole = (torch.full((m, n), math.nan, dtype=dtype, device=device) for _ in range(2))
        deep_tile.packed_grouped_gemm(a, a_scale, *b, ends.to(device), own)
        begins = [0, *ends.tolist()]
        for group, (begin, end) in enumerate(zip(begins[:-1], begins[1:], strict=True)):
            rows = slice(begin, end)
            one = a[rows], a_scale[rows], wide[group], b.scale[group]
            whole[rows] = fp8_product(name, *one, out_dtype=dtype)
    else:
        own = deep_tile.packed_gemm(a, a_scale, *b, out_dtype=dtype, batch_invariant=True)
        whole = fp8_product(name, a, a_scale, wide, b.scale, out_dtype=dtype)
    size = torch.int16 if dtype == torch.bfloat16 else torch.int32
    return f"packed {name} {shape} x {m} {dtype}", {
        "codes": (back.weight != weight).sum(),
        "scales": (back.scale.float() != scale.float()).sum(),
        "product": (own.view(size) != whole.view(size)).sum(),
    }


class Fuzzer(campaign.Fuzzer):
    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(random.randrange(2**31))
        check = random.choices((check_shards, check_packed, check_format), (SHARDS_SHARE, PACKED_SHARE, 1))[0]
        self.drawn, found = check(random, self.device)
        self.calls[self.drawn.split()[0]] += 1
        return found

    def counts(self) -> dict[str, Any]:
        return {"calls_that_copy": self.calls.total(), "formats": dict(sorted(self.calls.items()))}


def main(arguments: list[str] | None = None) -> int:
    return fuzz(Fuzzer, "fuzz of formats", fuzz_parser(__doc__), arguments)


if __name__ == "__main__":
    sys.exit(main())
