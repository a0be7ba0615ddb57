"""Grouped products: our choice and each of our configs, torch's product, and the limit of unpadded rows.

    PYTHONPATH=. python benchmarks/bench_grouped.py --out benchmarks/results/grouped.json
    PYTHONPATH=. python benchmarks/bench_grouped.py --kind bf16 --seconds 60 --out grouped_bf16.json

Draws: those that DeepGEMM's tests multiply, and tokens routed to the experts of public models, evenly, at random and
skewed. In microseconds, medians, contestants in turn, L2 cold. The limit is max(FLOP / 1500 TFLOPS + 3.3 us, bytes /
4.09 TB/s + 5.1 us) of the rows that there are, weights of groups without rows left out; of BF16 with half the rate.
torch's product is of BF16, or of FP8 with scales of rows: beside ours of blocks it does less. Every output that is
timed is checked, group by group. Stops with what it has after --seconds.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch

from benchmarks import store, timing
from deep_tile.config import ceil_div
from deep_tile.dense import REFERENCES
from deep_tile.kinds import KINDS, Kind
from deep_tile.reference import relative_error
from deep_tile.select.groups import grouped_configs
from deep_tile.tools.products import most_error, multiply_groups

REPEATS = 30
TOKENS = (1, 8, 64, 512, 2048, 4096, 16384)


class Model(NamedTuple):
    """Experts of a model: how many, how many for each token, how many of them here, and their weights (n, k)."""

    name: str
    experts: int
    top: int
    local: int
    weights: tuple[tuple[int, int], ...]


MODELS = (
    Model("DeepSeek-V3", 256, 8, 8, ((4096, 7168), (7168, 2048))),
    Model("DeepSeek-V3", 256, 8, 32, ((4096, 7168), (7168, 2048))),
    Model("Qwen3-30B", 128, 8, 128, ((1536, 2048), (2048, 768))),
    Model("Qwen3-235B", 128, 8, 16, ((3072, 4096), (4096, 1536))),
    Model("Mixtral", 8, 2, 8, ((28672, 4096), (4096, 14336))),
)

DEEP_GEMM = (
    *(("contiguous", groups, rows) for groups, rows in ((4, 8192), (8, 4096))),
    *(("masked", groups, rows) for groups, rows in ((32, 192), (6, 1024), (32, 20), (6, 20))),
)
DEEP_GEMM_WEIGHTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
MASKED_ROWS = 4096
"""Rows that DeepGEMM's masked groups have room for. A quarter of it is enough here, unless a group is larger."""


class Draw(NamedTuple):
    """Rows of each group; with `capacity` each has rows of its own, as many as that."""

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    capacity: int | None = None

    def limit_us(self, kind: Kind) -> float:
        rows, active = sum(self.sizes), sum(size > 0 for size in self.sizes)
        moved = (active * self.n * self.k + rows * self.k) * kind.a.bytes + 2 * rows * self.n
        return max(2 * rows * self.n * self.k * kind.a.bytes / 1500e6 + 3.3, moved / 4.09e6 + 5.1)


def draws(seed: int) -> Iterator[Draw]:
    generator = torch.Generator().manual_seed(seed)
    for layout, groups, mean in DEEP_GEMM:
        for n, k in DEEP_GEMM_WEIGHTS:
            spread = 0.7 + 0.6 * torch.rand(groups, generator=generator)
            sizes = tuple((spread * mean).int().tolist())
            capacity = None if layout == "contiguous" else max(MASKED_ROWS // 4, max(sizes))
            yield Draw(f"{layout} {groups}x{mean}", sizes, n, k, capacity)
    for model in MODELS:
        for how in ("uniform", "multinomial", "zipf"):
            for tokens in TOKENS:
                sizes = routed(model, tokens, how, generator)
                for n, k in model.weights:
                    if sum(sizes):
                        yield Draw(f"{model.name} {model.local}/{model.experts} {how} {tokens}", sizes, n, k)


def routed(model: Model, tokens: int, how: str, generator: torch.Generator) -> tuple[int, ...]:
    """Rows of the local experts."""
    share = torch.ones(model.experts)
    if how == "zipf":
        share = 1 / torch.arange(1, model.experts + 1) ** 0.7
        share = share[torch.randperm(model.experts, generator=generator)]
    if how == "uniform":
        even = ceil_div(tokens * model.top, model.experts)
        return (even,) * min(model.local, tokens * model.top)
    chosen = torch.multinomial(share.expand(tokens, -1), model.top, generator=generator)
    return tuple(torch.bincount(chosen.flatten(), minlength=model.experts)[: model.local].tolist())


def made_operands(draw: Draw, kind: Kind, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Operands of rows and of groups: a matrix each, with its scale, if it has one."""
    groups, k_blocks = len(draw.sizes), ceil_div(draw.k, 128)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(getattr(torch, kind.a.dtype))

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device="cuda") + 0.5

    a, b = values(rows, draw.k), torch.stack([values(draw.n, draw.k) for _ in draw.sizes])
    if kind.scaling == "none":
        return [a], [b]
    if kind.row_scales:
        return [a, scale(rows)], [b, scale(groups, draw.n)]
    return [a, scale(k_blocks, rows).t()], [b, scale(groups, ceil_div(draw.n, 128), k_blocks)]  # as the casts make them


def of_torch(kind: Kind, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> dict[str, Callable]:
    """The contestant."""
    if kind.scaling == "none":
        return {"torch BF16": lambda: torch._grouped_mm(a, b.transpose(1, 2), offs=ends)}
    row, column = torch.ones(len(a), device="cuda"), torch.ones(b.shape[:2], device="cuda")
    fast = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return {"torch row-wise": lambda: torch._scaled_grouped_mm(a, b.transpose(1, 2), row, column, **fast)}


def contestants(
    draw: Draw, kind: Kind, every_config: bool
) -> tuple[dict[str, Callable[[], torch.Tensor]], Callable[[], None]]:
    """Calls by name, and a function that checks our results."""
    groups, rows = len(draw.sizes), sum(draw.sizes) if draw.capacity is None else len(draw.sizes) * draw.capacity
    of_rows, of_groups = made_operands(draw, kind, rows)
    sizes = torch.tensor(draw.sizes, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, draw.n, dtype=torch.bfloat16, device="cuda")
    layout, given, into = "offs", of_rows, out
    if draw.capacity is None:
        begins, keywords = (sizes.cumsum(0) - sizes).tolist(), {"offs": sizes.cumsum(0).int()}
    else:
        layout, begins, keywords = "counts", [draw.capacity * group for group in range(groups)], {"counts": sizes}
        *given, into = (x.unflatten(0, (groups, -1)) for x in (*of_rows, out))
    keywords |= {"out": into, "expected_rows": ceil_div(sum(draw.sizes), sum(size > 0 for size in draw.sizes))}
    ours = partial(multiply_groups, kind, (*given, *of_groups), **keywords)
    calls = {"ours": ours}
    for config in grouped_configs(layout, kind=kind.name) if every_config else ():
        calls[config.name] = partial(ours, config=config)
    if draw.capacity is None:
        calls |= of_torch(kind, of_rows[0], of_groups[0], keywords["offs"])

    def check() -> None:
        out.fill_(float("nan"))
        ours()
        for group, (begin, size) in enumerate(zip(begins, draw.sizes, strict=True)):
            got = slice(begin, begin + min(size, 64))
            one = (*(x[got] for x in of_rows), *(x[group] for x in of_groups))
            wanted = REFERENCES[kind.scaling](*one, torch.float32)
            most = most_error(kind, draw.k) * (1 + 4 / math.sqrt(max(1, wanted.numel())))  # few elements differ by more
            if size and relative_error(out[got], wanted) > most:
                raise RuntimeError(f"{draw}: group {group} is wrong")

    return calls, check


def measure(draw: Draw, kind: Kind, every_config: bool, flush: timing.L2Flush) -> dict[str, float]:
    """Microseconds by contestant, and the limit."""
    calls, check = contestants(draw, kind, every_config)
    check()
    graphs = {name: timing.capture(call) for name, call in calls.items()}
    times = timing.time_alternating(graphs, REPEATS, flush)
    return {"limit": draw.limit_us(kind)} | {name: took.us for name, took in times.items()}


def report(found: list[dict]) -> None:
    """Geometric means over the limit, and over torch's product where it was timed."""
    for name in ("limit", "torch row-wise", "torch BF16"):
        ratios = [entry["us"]["ours"] / entry["us"][name] for entry in found if name in entry["us"]]
        if ratios:
            worst = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{len(ratios)} draws: {geometric_mean(ratios):.3f} of {name} in the geometric mean, {worst}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--every-config", action="store_true", help="time each of our configs, too")
    parser.add_argument("--only", default="", help="draws whose name has this")
    parser.add_argument("--kind", choices=("fp8", "bf16", "fp8_rows"), default="fp8", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no draw later than this")
    options = parser.parse_args()
    kind, flush, found, start = KINDS[options.kind], timing.L2Flush(), [], time.perf_counter()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for draw in draws(options.seed):
            if options.only not in draw.name or time.perf_counter() - start > options.seconds:
                continue
            us = measure(draw, kind, options.every_config, flush)
            found.append({"draw": draw.name, "n": draw.n, "k": draw.k, "sizes": draw.sizes, "us": us})
            print(f"{draw.name} {draw.n}x{draw.k}: {us['ours']:.1f} us, {us['ours'] / us['limit']:.2f} of the limit")
    store.save(options.out, {"meta": timing.describe_run() | {"seed": options.seed, "kind": kind.name}, "draws": found})
    report(found)


if __name__ == "__main__":
    main()
