"""Grouped products: our choice and each of our configs, torch's row-wise product, and the limit of unpadded rows.

    PYTHONPATH=. python benchmarks/bench_grouped.py --out benchmarks/results/grouped.json

Draws: those that DeepGEMM's tests multiply, and tokens routed to the experts of public models, evenly, at random and
skewed. In microseconds, medians, contestants in turn, L2 cold. The limit is max(FLOP / 1500 TFLOPS + 3.3 us, bytes /
4.09 TB/s + 5.1 us) of the rows that there are, weights of groups without rows left out. torch's product has one scale
per row and no scales of blocks, so it does less. Every output that is timed is checked, group by group.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch

from benchmarks import store, timing
from deep_tile import fp8_grouped_gemm
from deep_tile.config import ceil_div
from deep_tile.reference import MAX_RELATIVE_ERROR, fp8_gemm_reference, relative_error
from deep_tile.select.groups import grouped_configs

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
"""What each group of a masked product has room for; of fewer groups than 32, 1024 are as many as are used."""


class Draw(NamedTuple):
    """Rows of each group; with `capacity` each has rows of its own, as many as that."""

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    capacity: int | None = None

    @property
    def limit_us(self) -> float:
        rows, active = sum(self.sizes), sum(size > 0 for size in self.sizes)
        moved = active * self.n * self.k + rows * (self.k + 2 * self.n)
        return max(2 * rows * self.n * self.k / 1500e6 + 3.3, moved / 4.09e6 + 5.1)


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


def contestants(draw: Draw, every_config: bool) -> tuple[dict[str, Callable[[], torch.Tensor]], Callable]:
    """Calls by name, and a function that checks what one of ours returned."""
    groups, rows = len(draw.sizes), sum(draw.sizes) if draw.capacity is None else len(draw.sizes) * draw.capacity
    k_blocks = ceil_div(draw.k, 128)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)

    a, b = values(rows, draw.k), torch.stack([values(draw.n, draw.k) for _ in draw.sizes])
    a_scale = torch.rand(k_blocks, rows, device="cuda").t() + 0.5  # M-major, as the casts make them
    b_scale = torch.rand(groups, ceil_div(draw.n, 128), k_blocks, device="cuda") + 0.5
    sizes = torch.tensor(draw.sizes, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, draw.n, dtype=torch.bfloat16, device="cuda")
    if draw.capacity is None:
        begins, keywords = (sizes.cumsum(0) - sizes).tolist(), {"offs": sizes.cumsum(0).int()}
        operands, into = (a, a_scale, b, b_scale), out
    else:
        begins, keywords = [draw.capacity * group for group in range(groups)], {"counts": sizes}
        operands = (a.unflatten(0, (groups, -1)), a_scale.unflatten(0, (groups, -1)), b, b_scale)
        into = out.unflatten(0, (groups, -1))
    keywords |= {"out": into, "expected_rows": ceil_div(sum(draw.sizes), sum(size > 0 for size in draw.sizes))}
    calls = {"ours": lambda: fp8_grouped_gemm(*operands, **keywords)}
    for config in grouped_configs("offs" if draw.capacity is None else "counts") if every_config else ():
        calls[config.name] = lambda config=config: fp8_grouped_gemm(*operands, **keywords, config=config)
    if draw.capacity is None:
        row, column = torch.ones(rows, device="cuda"), torch.ones(groups, draw.n, device="cuda")
        ends = keywords["offs"]
        calls["torch row-wise"] = lambda: torch._scaled_grouped_mm(
            a, b.transpose(1, 2), row, column, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def check() -> None:
        out.fill_(float("nan"))
        calls["ours"]()
        for group, (begin, size) in enumerate(zip(begins, draw.sizes, strict=True)):
            got = slice(begin, begin + min(size, 64))
            wanted = fp8_gemm_reference(a[got], a_scale[got], b[group], b_scale[group])
            if size and relative_error(out[got], wanted) > MAX_RELATIVE_ERROR:
                raise RuntimeError(f"{draw}: group {group} is wrong")

    return calls, check


def measure(draw: Draw, every_config: bool, flush: timing.L2Flush) -> dict[str, float]:
    """Microseconds by contestant, and the limit."""
    calls, check = contestants(draw, every_config)
    check()
    graphs = {name: timing.capture(call) for name, call in calls.items()}
    times = timing.time_alternating(graphs, REPEATS, flush)
    return {"limit": draw.limit_us} | {name: took.us for name, took in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--every-config", action="store_true", help="time each of our configs, too")
    parser.add_argument("--only", default="", help="draws whose name has this")
    options = parser.parse_args()
    flush, found = timing.L2Flush(), []
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for draw in draws(options.seed):
            if options.only not in draw.name:
                continue
            us = measure(draw, options.every_config, flush)
            found.append({"draw": draw.name, "n": draw.n, "k": draw.k, "sizes": draw.sizes, "us": us})
            print(f"{draw.name} {draw.n}x{draw.k}: {us['ours']:.1f} us, {us['ours'] / us['limit']:.2f} of the limit")
    store.save(options.out, {"meta": timing.describe_run() | {"seed": options.seed}, "draws": found})
    ratio = geometric_mean(entry["us"]["ours"] / entry["us"]["limit"] for entry in found)
    print(f"{len(found)} draws: {ratio:.3f} of the limit in the geometric mean")


if __name__ == "__main__":
    main()
