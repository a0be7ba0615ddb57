"""`explain` for grouped GEMMs: which kernel groups with this many rows get, and why, as data or terminal text.

Called by the command line and, through `deep_tile.explain_groups`, by users. Order and predicted times are the
selector's; this module only adds arithmetic for readers. No GPU, no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

from rich.console import Console

from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, check_sizes, round_up
from deep_tile.kinds import EVERY_KIND, GROUPINGS, RESULTS, name_of
from deep_tile.method.report import Row, table
from deep_tile.method.roofline import fitting
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select import tuned
from deep_tile.select.choose import grouped_candidates
from deep_tile.select.hardware import Hardware, named
from deep_tile.walls import product_flops

if TYPE_CHECKING:
    import torch

_LAYOUTS = tuple(layout for layout in GROUPINGS if layout != "none")


class Derivation(NamedTuple):
    """The question, and the selector's candidates with predicted microseconds, the choice first."""

    problem: GemmProblem
    hardware: Hardware
    candidates: list[tuple[float, GemmConfig]]


def derivation(
    groups: int,
    rows: int,
    n: int,
    k: int,
    *,
    grouping: str = "offs",
    kind: str | torch.dtype = "fp8",
    hardware: str | Hardware = "H200",
    num_sms: int | None = None,
) -> Derivation:
    """The facts behind `explain_groups`; arguments and errors as there."""
    gpu = named(hardware)
    num_sms = gpu.num_sms if num_sms is None else num_sms
    check_sizes(groups=groups, rows=rows, n=n, k=k, num_sms=num_sms)
    groups, rows, n, k, num_sms = map(int, (groups, rows, n, k, num_sms))
    if num_sms > gpu.num_sms:
        raise ValueError(f"num_sms is {num_sms}; {gpu.name} has {gpu.num_sms}")
    if grouping not in _LAYOUTS:
        raise ValueError(f"grouping is {grouping!r}; pass one of {', '.join(_LAYOUTS)}")
    problem = grouped_problem(Groups(grouping, groups, rows), n, k, num_sms, checked_kind(grouping, name_of(kind)))
    ranked = fitting(grouped_candidates(problem, gpu, tuned.configs(num_sms)), problem.kind, gpu)
    return Derivation(problem, gpu, [(us, config) for us, config, _ in ranked])


def checked_kind(grouping: str, kind: str) -> str:
    """The kind, if supported for this grouping; for gradients "fp8" means fp8_1x128."""
    of_rows = [name for name, one in EVERY_KIND.items() if one.scaling != "row_blocks" or one.packing]
    known = ["fp8"] if grouping == "k_offs" else of_rows
    if kind not in known:
        raise ValueError(f"kind is {kind!r}; with grouping {grouping!r} pass one of {', '.join(known)}")
    return kind


def grouped_problem(groups: Groups, n: int, k: int, num_sms: int, kind: str = "fp8") -> GemmProblem:
    """The problem for weights [n, k]: a row-grouped GEMM, or with "k_offs" accumulated gradients."""
    every = groups.count * groups.expected_rows
    if groups.layout == "k_offs":
        added = {"kind": "fp8_1x128", "output": "fp32", "accumulate": True}
        return GemmProblem(n, k, every, num_sms, tma_store=k % 4 == 0, groups=groups, **added)
    total = every if groups.layout == "offs" else groups.expected_rows
    output = EVERY_KIND[kind].output
    tma_store = n * RESULTS[output].bytes % 16 == 0
    return GemmProblem(total, n, k, num_sms, tma_store, kind=kind, output=output, groups=groups)


class GroupsExplanation(TypedDict):
    """Result of `explain_groups`, described there."""

    problem: dict[str, object]
    hardware: str
    config: str
    why: str
    limits: dict[str, float]
    candidates: list[Row]


def explain_groups(
    groups: int,
    rows: int,
    n: int,
    k: int,
    *,
    grouping: str = "offs",
    kind: str | torch.dtype = "fp8",
    hardware: str | Hardware = "H200",
    num_sms: int | None = None,
) -> GroupsExplanation:
    """Explain which kernel a grouped GEMM gets for groups with this many rows, and why. No GPU is needed.

    Args:
        groups: how many there are.
        rows: mean rows per group, `expected_rows` in the call.
        n, k: sizes of each group's `b[n, k]`, or of its gradient, in elements.
        grouping: "offs" for contiguous groups, "counts" for the masked layout, "k_offs" for gradients, which sum over
            rows.
        kind: a name, or the operands' torch.dtype, as for `precompile`; "fp8" for gradients.
        hardware, num_sms: as for `explain`.

    Returns:
        JSON-ready data. `config` is the kernel's name, `why` a sentence; `limits` the us that HBM and tensor cores need
        without padding; `candidates` all kernels in the selector's order, each {name, time_us, rows, stages,
        smem_bytes}, where `rows` are tile rows per group, or K blocks.

    Raises:
        TypeError: a size is no int, or hardware no name.
        ValueError: unknown hardware, grouping or kind, a size that is not positive, more SMs than there are, or no tile
            passes the hardware's walls.
    """
    given = {"grouping": grouping, "kind": kind, "hardware": hardware, "num_sms": num_sms}
    return as_data(derivation(groups, rows, n, k, **given))


def as_data(derived: Derivation) -> GroupsExplanation:
    problem = derived.problem
    return {
        "problem": problem._asdict() | {"groups": problem.groups._asdict()},
        "hardware": derived.hardware.name,
        "config": derived.candidates[0][1].name,
        "why": why(derived),
        "limits": {name: us for name, us, _ in limits(derived)},
        "candidates": [
            {
                "name": config.name,
                "time_us": us,
                "rows": tile_rows(problem.groups.expected_rows, config),
                "stages": config.stages,
                "smem_bytes": config.smem_bytes,
            }
            for us, config in derived.candidates
        ],
    }


def limits(derived: Derivation) -> list[tuple[str, float, str]]:
    """(what, us, arithmetic) for all rows without padding, every group's weights read once."""
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
    flops, tflops = product_flops(rows, of_out, of_k), gpu.tflops(problem.kind)
    hbm_us, tensor_us = (first + second) / gpu.hbm_tbps / 1e6, flops / tflops / 1e6
    hbm = f"({first:.3e} bytes of {what[0]} + {second:.3e} of {what[1]}) / {gpu.hbm_tbps:.3g} TB/s"
    return [("HBM", hbm_us, hbm), ("tensor cores", tensor_us, f"{flops:.3e} FLOP / {tflops:.0f} TFLOPS")]


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


def show(derived: Derivation, console: Console) -> None:
    """Print the derivation."""
    problem = derived.problem
    groups, gpu = problem.groups, derived.hardware
    n, k = problem.weight
    title = f"{groups.count} groups of {groups.expected_rows}x{n}x{k}"
    console.print(f"{title} in {problem.product.family} on {problem.num_sms} SMs of {gpu.name}", style="bold")
    best_us, best = derived.candidates[0]
    limit, limit_us, _ = max(limits(derived), key=lambda one: one[1])
    console.print(f"Kernel:    {best.name}")
    console.print(f"Predicted: {best_us:.1f} us")
    console.print(f"Limit:     {limit_us:.1f} us ({limit} alone); predicted is {best_us / limit_us:.2f} times that")
    console.print(f"Rows by {groups.layout}; those of groups are taken to be spread around the mean.")
    console.print("", f"Why: {why(derived)}", "", sep="\n")
    walls = table("limit", "us", "arithmetic, without padding", numbers=False)
    for name, us, arithmetic in limits(derived):
        walls.add_row(name, f"{us:.1f}", arithmetic)
    console.print(walls, "")
    padded = f"rows of {_what(best)}"
    columns = ("us", "over best", padded, "padding", "stages", "KiB")
    candidates = table("config", *columns, spare=("stages", "KiB", "padding"))
    for us, config in derived.candidates:
        rows = tile_rows(groups.expected_rows, config)
        more = f"{rows / groups.expected_rows - 1:.0%}"
        sizes = str(config.stages), str(config.smem_bytes >> 10)
        candidates.add_row(config.name, f"{us:.1f}", f"{us / best_us - 1:.1%}", str(rows), more, *sizes)
    console.print(candidates)
