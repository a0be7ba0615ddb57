"""Weights of any format as blocks of 128x128, shards that begin anywhere in a block, and weights of 4 bits that are
multiplied as they are, checked element by element.

A round is a weight, drawn by formats.py, through `to_blocks`: its elements must be the nearest for their scales, the
scales the smallest, and the report that of float64. Or it is a weight in blocks through `shard_weight`: the product of
each rank's columns must be the whole product's, bit for bit. Or it is packed: it must come back as it was, and be the
FP8 weight that it stands for; then come many products with it, by kernels drawn for each kind, dense with every finish
or of groups, into parts of larger tensors. They must be within rounding of float64's, and the same as the FP8 weight's,
bit for bit, where nothing is added and no part of K is summed apart; or as one kernel's, of a weight that FP8 does not
hold. A round depends on the seed, `--configs` and its number alone.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, product
from random import Random
from typing import Any, NamedTuple

import campaign
import torch
from campaign import on_gpu
from formats import IN_FP8, NAMES_OF_PACKED, draw, fp8_product, one_kernel, same_product, spread
from helpers import (
    ACCUMULATION,
    Exact,
    GuardedOut,
    Operands,
    Product,
    added,
    are_off,
    exact_product,
    finished_product,
)

import deep_tile
from deep_tile import GemmConfig, blocks, nn, packed
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.distributed import shard_weight
from deep_tile.formats import FORMATS
from deep_tile.kinds import ACTIVATIONS, BIASES, OUTPUTS, PACKED
from deep_tile.quantize import FP8_DTYPE
from deep_tile.reference import group_rows
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import grouped_configs

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 192, 200, 256, 257, 300, 384)
LEADING = ((), (), (), (2,), (1, 3))
SPREADS = (0, 1, 3, 14, 15, 20, 60, 100)
"""Powers of two that scales differ by."""

SHARDS_SHARE, PACKED_SHARE = 0.1, 1.0
"""To one weight that is re-based."""

SHARES = (1, 13, 64, 100, 192, 264)
"""Columns of a rank."""
INNER = (128, 272, 512)
"""Of shards."""

UNITS = (1, 2, 3, 9, 18, 36)
"""Of 16 rows, of a packed weight."""
GROUPS = (0, 0, 0, 1, 3, 8, 40)
"""Weights that are packed together; 0: one that is no group."""
MOST_ELEMENTS = {"cuda": 1 << 21, "cpu": 1 << 17}
"""Of them all, unless 16 rows have more."""

ROWS = 320
"""Of activations; each product takes some of them."""
PRODUCTS = 24
"""With each packed weight."""

NOT_IN_FP8 = [kind for kind in PACKED if kind not in IN_FP8]
SUMS = {kind: one_kernel(kind, "fp32") for kind in ("fp8", "fp8_1x128", *NOT_IN_FP8)}
"""Kernels of FP8 weights, which those of packed ones are compared with; or of weights that FP8 does not hold."""
LINEAR = [one_kernel(kind, "bf16", bias) for kind in NOT_IN_FP8 for bias in ("none", "bf16")]
"""Kernels which layers of these are compared with."""

Found = tuple[str, dict[str, Any]]
"""What was drawn, and what is wrong about it, on the device."""


def check_format(random: Random, device: str) -> Iterator[Found]:
    name = random.choice([*FORMATS])
    of = FORMATS[name]
    shape = (*random.choice(LEADING), random.choice(SIZES), 2 * random.choice(SIZES))
    firsts = tuple(random.choice((0, random.randrange(max(size, 1)))) for size in (of.rows, of.columns))
    weight, scale, arguments, exact = draw(name, shape, device, random.choice(SPREADS), firsts)
    if random.random() < 0.3:
        weight = weight.repeat_interleave(2, -2)[..., ::2, :]
    if not of.packed and random.random() < 0.3:
        arguments["out"] = weight = weight.clone()
    first_row, first_column = firsts
    limit = random.choice((math.inf, 1e9))
    result = deep_tile.to_blocks(
        weight, scale, **arguments, first_row=first_row, first_column=first_column, max_error=limit
    )
    yield f"{name} {shape} {firsts}", faults(result, exact)


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


def check_shards(random: Random, device: str) -> Iterator[Found]:
    """A product of each rank."""
    each, ranks, k = random.choice(SHARES), random.choice((2, 3, 8)), random.choice(INNER)
    n = max(1, each * ranks - random.choice((0, 0, 1)))
    how = {"round_scale": random.choice(("none", "pow2"))}
    b, b_scale = deep_tile.quantize_weight(torch.randn(n, k, device=device), **how)
    x = torch.randn(random.choice((1, 5, 70)), k, device=device).bfloat16()
    whole = deep_tile.fp8_linear(x, b, b_scale, batch_invariant=True)
    for rank in range(ranks):
        shard = shard_weight(b, b_scale, rank, ranks, "column")
        own = deep_tile.fp8_linear(x, shard.weight, shard.scale, batch_invariant=True)[:, shard.first :]
        begin = rank * -(-n // ranks)
        wrong = (own != whole[:, begin : begin + own.shape[1]]).sum() + abs(
            own.shape[1] - shard.weight.shape[0] + shard.first
        )
        yield f"shards {rank} of {ranks} of {n}x{k} {how}", {"columns": wrong}


# Weights of 4 bits.


class Weight(NamedTuple):
    """A packed weight, and what rows multiplied by it are.

    Attributes:
        name: of its format.
        b: itself.
        a, a_scale: the rows, [ROWS, k].
        sums: [ROWS, g, n], by a kernel of `SUMS`, in FP32.
        exact: the same in float64.
    """

    name: str
    b: packed.Packed
    a: torch.Tensor
    a_scale: torch.Tensor
    sums: torch.Tensor
    exact: Exact

    def has_bits(self, dtype: torch.dtype) -> bool:
        """Whether rounding sums gives a result's bits. Definitions, which sum in float64, round once."""
        return self.sums.is_cuda or dtype == torch.float32


def check_packed(random: Random, device: str, kernels: dict[str, list[GemmConfig]]) -> Iterator[Found]:
    """The weight, then products with it."""
    kind, groups, k = random.choice([*PACKED]), random.choice(GROUPS), 2 * random.choice(SIZES[2:])
    k = k // 16 * 16 if random.random() < 0.5 else k
    fitting = [16 * units for units in UNITS if 16 * units * k * max(groups, 1) <= MOST_ELEMENTS[device]]
    shape = (*([groups] if groups else []), random.choice(fitting or [16]), k)
    name = NAMES_OF_PACKED[kind]
    weight, scale, arguments, exact = draw(name, shape, device, random.choice(SPREADS[:5]))
    b = deep_tile.pack_weight(weight, scale, **arguments, max_error=math.inf)
    back, wide = deep_tile.unpack_weight(*b, k=k), packed.elements(*b, k=k)
    each = spread(b.scale, (1 if kind == "int4" else SCALE_BLOCK, SCALE_BLOCK), shape[-2:])
    elements = (exact / each).float()
    yield (
        f"packed {name} {shape}",
        {
            "codes": (back.weight != weight).sum(),
            "scales": (back.scale.float() != scale.float()).sum(),
            "elements": (wide.float() != elements.to(wide.dtype).float()).sum(),
        },
    )
    of = _multiplied(name, b, wide, device)
    if not groups:
        yield f"linear {name} {shape}", _check_linear(random, of, wide, weight, scale, arguments)
    check = _check_groups if groups else _check_matrix
    fitting = [config for config in kernels[kind] if (config.grouping != "none") == bool(groups)]
    for _ in range(PRODUCTS if fitting else 0):
        config = random.choice(fitting)
        text, found = check(random, of, config)
        yield f"product {shape} {config.name} {text}", found


def _multiplied(name: str, b: packed.Packed, wide: torch.Tensor, device: str) -> Weight:
    """By rows of a size at which activations bend what they make. Groups lie side by side in whole blocks of scales."""
    *_, n, k = wide.shape
    padded = ceil_div(n, SCALE_BLOCK) * SCALE_BLOCK
    codes = torch.zeros(wide.shape[:-2].numel(), padded, ceil_div(k, 16) * 16, dtype=wide.dtype, device=device)
    codes.view(torch.uint8)[:, :n, : k * wide.element_size()] = wide.view(torch.uint8)
    codes = codes.flatten(0, 1)[:, :k]
    scale, b_rows = b.scale.reshape(-1, *b.scale.shape[-2:]), SCALE_BLOCK
    if name == "int4_128":
        scale, b_rows = torch.nn.functional.pad(scale, (0, 0, 0, padded - n), value=1.0), 1
    scale = scale.flatten(0, 1)
    a, a_scale = deep_tile.per_token_cast_to_fp8(torch.randn(ROWS, k, device=device))
    size = k**0.5 * scale.mean() * codes.float().square().mean().sqrt()
    a_scale = a_scale / size.clamp(min=1e-30)
    exact = exact_product(Operands(a, a_scale, codes, scale), b_rows=b_rows)
    exact = Exact(*(x.unflatten(1, (-1, padded))[..., :n] for x in exact))
    if name in NOT_IN_FP8:
        each = zip(b.weight.view(-1, *b.weight.shape[-2:]), b.scale.view(-1, *b.scale.shape[-2:]), strict=True)
        products = [same_product(name, a, a_scale, packed.Packed(*one), out_dtype=torch.float32) for one in each]
        return Weight(name, b, a, a_scale, torch.stack(products, 1), exact)
    config = SUMS["fp8_1x128" if name == "int4_128" else "fp8"]
    sums = fp8_product(name, a, a_scale, codes, scale, out_dtype=torch.float32, config=config)
    return Weight(name, b, a, a_scale, sums.unflatten(1, (-1, padded))[..., :n], exact)


def _check_linear(random: Random, of: Weight, wide: torch.Tensor, *weight: Any) -> dict[str, torch.Tensor]:
    """A layer's, by the selector's choice."""
    *given, arguments = weight
    n, k = wide.shape
    bias = torch.randn(n, device=wide.device).bfloat16() if random.random() < 0.5 else None
    layer = nn.PackedLinear.from_codes(*given, bias, **arguments, max_error=math.inf, batch_invariant=True)
    x = torch.randn(random.choice((0, 1, 5, 64, 130, ROWS)), k, device=wide.device).bfloat16()
    aligned = torch.empty(n, ceil_div(k, 16) * 16, dtype=wide.dtype, device=wide.device)[:, :k].copy_(wide)
    whole = same_product(of.name, *deep_tile.per_token_cast_to_fp8(x), of.b, aligned, bias=bias)
    return {"product": different(layer(x), whole)}


def _check_matrix(random: Random, of: Weight, config: GemmConfig) -> Found:
    m, dtype = min(ROWS, random.choice((1, 5, 16, 64, 65, 130, 300))), _dtype(config)
    first, n = random.randint(0, ROWS - m), of.sums.shape[-1]
    rows = slice(first, first + m)
    guarded = _guarded(random, config, m, n // config.columns_per_output, of.sums.device)
    bias = None
    if config.bias != "none":
        bias = torch.randn(3 * n, device=of.sums.device)[::3].to(getattr(torch, OUTPUTS[config.bias].dtype))
    wanted = Product(deep_tile.packed_gemm, (), Exact(*(x[rows, 0] for x in of.exact)), ACCUMULATION, 0.0)
    if config.is_finished:
        wanted = finished_product(wanted, bias, config.activation)
    if config.accumulate:
        before = torch.randn(m, n, device=of.sums.device).to(dtype)
        guarded.out.copy_(before)
        wanted = added(wanted, before)
    activation = None if config.activation == "none" else config.activation
    keywords = {"activation": activation, "accumulate": config.accumulate, "config": config}
    deep_tile.packed_gemm(of.a[rows], of.a_scale[rows], *of.b, guarded.out, bias, **keywords)
    found = {"values": are_off(guarded.out, wanted.exact, ACCUMULATION).sum()}
    if config.parts_of_k == 1 and not config.is_finished and not config.accumulate and of.has_bits(dtype):
        found["product"] = different(guarded.out, of.sums[rows, 0].to(dtype))
    return f"rows {first} to {first + m}", found | {"guards": guarded.count_written_outside()}


def _check_groups(random: Random, of: Weight, config: GemmConfig) -> Found:
    groups, n, device = *of.sums.shape[1:], of.sums.device
    bounds, alignment, each = _draw_bounds(random, config.grouping, groups)
    total = groups * each if config.grouping == "counts" else each
    guarded = _guarded(random, config, total, n, device)
    inputs = guarded.out, of.a[:total], of.a_scale[:total]
    if config.grouping == "counts":
        inputs = (x.unflatten(0, (groups, each)) for x in inputs)
    out, a, a_scale = inputs
    keywords = {config.grouping: torch.tensor(bounds, dtype=torch.int32, device=device), "alignment": alignment}
    deep_tile.packed_grouped_gemm(a, a_scale, *of.b, out=out, **keywords, config=config)
    whose = torch.full((total,), -1)
    ranges = group_rows(config.grouping, torch.tensor(bounds), groups, each, alignment)
    for group, (begin, end) in enumerate(ranges):
        skipped = group * each if config.grouping == "counts" else 0
        whose[skipped + begin : skipped + end] = group
    whose = whose.to(device)
    rows, alive = torch.arange(total, device=device), (whose >= 0)[:, None]
    sums, value, size = (x[rows, whose] for x in (of.sums, *of.exact))
    found = {
        "values": (are_off(guarded.out, Exact(value, size), ACCUMULATION) & alive).sum(),
        "dead": ((guarded.out.view(_words(guarded.out)) != -1) & ~alive).sum(),
    }
    if of.has_bits(guarded.out.dtype):
        wanted = torch.where(alive, sums.to(guarded.out.dtype), guarded.out)
        found["product"] = different(guarded.out, wanted)
    text = f"{config.grouping} {bounds} of {each} by {alignment}"
    return text, found | {"guards": guarded.count_written_outside()}


def _draw_bounds(random: Random, grouping: str, groups: int) -> tuple[list[int], int, int]:
    """As a call takes them; their alignment; and rows, of all or, of counts, of each."""
    if grouping == "counts":
        each = random.randint(1, ROWS // groups)
        return (
            [random.choice((0, each, random.randint(0, each), random.randint(-2, each + 2))) for _ in range(groups)],
            1,
            each,
        )
    total = random.choice((1, ROWS // 8, ROWS - 1, ROWS))
    ends = sorted(random.randint(0, total) for _ in range(groups))
    return [min(end, random.choice((total, end))) for end in ends], random.choice((1, 1, 8, 64, 128)), total


def _guarded(random: Random, config: GemmConfig, rows: int, columns: int, device: Any) -> GuardedOut:
    unit = 16 // _dtype(config).itemsize if config.tma_store else 1
    layout = {"stride": columns + unit * random.randint(0, 9), "offset": unit * random.randint(0, 9)}
    return GuardedOut(rows, columns, device=str(device), dtype=_dtype(config), **layout)


def different(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How many elements have other bits."""
    x, y = x.contiguous(), y.contiguous()
    return (x.view(_words(x)) != y.view(_words(y))).sum()


def _words(x: torch.Tensor) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[x.element_size()]


def _dtype(config: GemmConfig) -> torch.dtype:
    return getattr(torch, config.out.dtype)


def draw_kernels(random: Random, each: int) -> dict[str, list[GemmConfig]]:
    """Of each kind as many: for groups, and for matrices with every finish in turn."""
    finishes = [*product(BIASES, ACTIVATIONS)]
    random.shuffle(finishes)
    finishes, found = cycle(finishes), {}
    for kind in PACKED:
        found[kind] = []
        for number in range(each):
            output, store = random.choice(("bf16", "bf16", "bf16", "fp32", "fp16")), random.random() < 0.75
            if number % 2:
                configs = grouped_configs(random.choice(("offs", "counts")), store, False, kind, output)
            elif random.random() < 0.15:
                configs = default_configs(store, kind, output, True)
            else:
                configs = default_configs(store, kind, output, False, *next(finishes))
            found[kind].append(random.choice(configs))
    return found


class Fuzzer(campaign.Fuzzer):
    UNDER_WAY, UNSETTLED, CONFIGS = 6, 256, 16

    def load(self) -> None:
        """The kernels drawn, and those that the selector chooses for everything else."""
        self._kernels = draw_kernels(Random(f"{self.seed}:kernels"), self.arguments.configs)
        self.load_kernels([*SUMS.values(), *LINEAR, *chain.from_iterable(self._kernels.values())])
        if on_gpu(self.device):
            for shapes, keywords in chosen():
                deep_tile.precompile(shapes, batch_invariant=True, workers=self.arguments.workers, **keywords)

    def run_round(self, number: int) -> None:
        """Many calls with one weight; a refusal of one is a finding."""
        random = Random(f"{self.seed}:{number}")
        torch.manual_seed(random.randrange(2**31))
        checks: list[Callable[..., Iterator[Found]]]
        checks = [check_shards, partial(check_packed, kernels=self._kernels), check_format]
        check = random.choices(checks, (SHARDS_SHARE, PACKED_SHARE, 1))[0]
        self.drawn = ""
        try:
            for drawn, found in check(random, self.device):
                self.drawn = drawn
                self.ledger.add(number, drawn, {kind: count.long() for kind, count in found.items()})
                self.calls[drawn.split()[0]] += 1
        except (TypeError, ValueError) as error:
            self.report.find("refused", round=number, error=str(error), draw=self.drawn)
        self.ledger.end_round()

    def counts(self) -> dict[str, Any]:
        products = self.calls["product"]
        return {
            "products": products,
            "calls_that_copy": self.calls.total() - products,
            "configs": sum(map(len, self._kernels.values())),
            "calls": dict(sorted(self.calls.items())),
        }


def chosen() -> Iterator[tuple[list[tuple[int, int, int]], dict[str, Any]]]:
    """Shapes and keywords of `precompile` for products that name no config."""
    units = [(16 * units, 2 * size, ROWS) for units in UNITS for size in SIZES[2:]]
    for bias in (None, torch.bfloat16):
        yield from ((units, {"kind": kind, "bias": bias}) for kind in (*PACKED, "fp8", "fp8_1x128"))
    yield [(each * ranks, k, 70) for each in SHARES for ranks in (1, 2, 3, 8) for k in INNER], {}
