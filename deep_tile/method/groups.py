"""`explain` for grouped GEMMs: which kernel groups with this many rows get, and why, as data or terminal text.

Called by calls.py. Order and predicted times are the selector's; this module only adds arithmetic for readers. No GPU,
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import GROUPINGS
from deep_tile.method import report
from deep_tile.method.roofline import fitting
from deep_tile.problem import GemmProblem
from deep_tile.select import tuned
from deep_tile.select.choose import grouped_candidates
from deep_tile.select.hardware import Hardware
from deep_tile.walls import product_flops

if TYPE_CHECKING:
    pass

_LAYOUTS = tuple(layout for layout in GROUPINGS if layout != "none")


class Derivation(NamedTuple):
    """The question, the selector's candidates with predicted microseconds, the choice first, and (kernel, us) of what
    the call launches besides."""

    problem: GemmProblem
    hardware: Hardware
    candidates: list[tuple[float, GemmConfig]]
    besides: list[tuple[str, float]] = []


def derive(problem: GemmProblem, gpu: Hardware) -> Derivation:
    """Raises ValueError if no tile passes the hardware's walls."""
    ranked = fitting(grouped_candidates(problem, gpu, tuned.configs(problem.num_sms)), problem.kind, gpu)
    return Derivation(problem, gpu, [(us, config) for us, config, _ in ranked])


def as_data(derived: Derivation) -> report.Explanation:
    problem, us = derived.problem, derived.candidates[0][0]
    rows = problem.groups.expected_rows
    candidates = [
        {
            "name": config.name,
            "time_us": us,
            "rows": tile_rows(rows, config),
            "stages": config.stages,
            "smem_bytes": config.smem_bytes,
        }
        for us, config in derived.candidates
    ]
    asked = problem._asdict() | {"groups": problem.groups._asdict()}, problem.kind, derived.hardware, rows
    return report.data(*asked, limits(derived), why(derived), {"product": us, **dict(derived.besides)}, candidates)


def limits(derived: Derivation) -> list[report.Limit]:
    """For all rows without padding, every group's weights read once."""
    problem, gpu = derived.problem, derived.hardware
    count, rows = problem.groups.count, problem.groups.count * problem.groups.expected_rows
    product, (of_out, of_k) = problem.product, problem.weight
    if problem.groups.layout == "k_offs":  # gradients are read and written
        first = (problem.m + problem.n) * (rows + 4 * ceil_div(rows, SCALE_BLOCK))
        second = 2 * count * problem.m * problem.n * problem.out.bytes
        what = "operands", "gradients"
    else:
        scales_of_row = 4 * (ceil_div(problem.k, SCALE_BLOCK) if product.block_scales else product.row_scales)
        scaled_rows = ceil_div(problem.n, SCALE_BLOCK) if product.block_scales else problem.n
        first = count * (problem.n * problem.k * product.b.bytes + scaled_rows * scales_of_row)
        second = rows * (problem.k * product.a.bytes + scales_of_row + problem.n * problem.out.bytes)
        what = "weights", "rows"
    moved = f"({first:.3e} bytes of {what[0]} + {second:.3e} of {what[1]})"
    return report.limits(product_flops(rows, of_out, of_k), gpu.tflops(problem.kind), first + second, gpu, moved)


def tile_rows(rows: int, config: GemmConfig) -> int:
    """Tile rows per group, or rows in its K blocks."""
    return round_up(rows, config.block_k if config.by_k else config.block_m)


def why(derived: Derivation) -> str:
    """Why the first candidate beats the second."""
    (us, best), *others = derived.candidates
    rows = derived.problem.groups.expected_rows
    tiles = f"{us:.1f} us, with {_what(best)} of {tile_rows(rows, best)} rows for a group of {rows}"
    if us > min((other_us for other_us, _ in others), default=us):
        return f"{best.name} was measured fastest here, though others are predicted faster: {tiles}."
    text = f"{best.name} has the shortest predicted time: {tiles}."
    if not others:
        return text
    next_us, following = others[0]
    return f"{text} Next is {following.name}, {next_us / us - 1:.1%} slower: {tile_rows(rows, following)} rows."


def _what(config: GemmConfig) -> str:
    return "K blocks" if config.by_k else "tiles"


def show(derived: Derivation, console: Console, most: int | None) -> None:
    """Print the derivation."""
    problem, gpu, all_candidates, besides = derived
    groups, (n, k), (best_us, best) = problem.groups, problem.weight, all_candidates[0]
    title = f"{groups.count} groups of {groups.expected_rows}x{n}x{k}"
    title = f"{title} in {problem.product.family} on {problem.num_sms} SMs of {gpu.name}"
    us = best_us + sum(us for _, us in besides)
    report.headline(console, title, best.name, us, limits(derived), 0, besides)
    console.print(f"Rows by {groups.layout}; those of groups are taken to be spread around the mean.")
    console.print("", f"Why: {why(derived)}", "", sep="\n")
    console.print(report.limit_table(limits(derived)), "")
    padded = f"rows of {_what(best)}"
    columns = ("us", "over best", padded, "padding", "stages", "KiB")
    candidates = report.table("config", *columns, spare=("stages", "KiB", "padding"))
    for us, config in all_candidates[:most]:
        rows = tile_rows(groups.expected_rows, config)
        more = f"{rows / groups.expected_rows - 1:.0%}"
        sizes = str(config.stages), str(config.smem_bytes >> 10)
        candidates.add_row(config.name, f"{us:.1f}", f"{us / best_us - 1:.1%}", str(rows), more, *sizes)
    console.print(candidates)
