"""`explain` for grouped GEMMs: the selector's order and predicted times, and arithmetic for readers. No torch."""

from deep_tile.config import SCALE_BLOCK, ceil_div, round_up
from deep_tile.method import report
from deep_tile.method.answers import Answer
from deep_tile.method.roofline import fitting
from deep_tile.problem import GemmProblem
from deep_tile.select import tuned
from deep_tile.select.choose import grouped_candidates
from deep_tile.select.hardware import Hardware
from deep_tile.select.streaming import Prediction
from deep_tile.walls import product_flops


def derive(problem: GemmProblem, gpu: Hardware, besides: list[tuple[str, float]]) -> Answer:
    """The selector's candidates, of which `rows` are tile rows per group, or in its K blocks; `besides`: (what, us)
    that the call launches, too. Raises ValueError if no tile passes the hardware's walls."""
    groups, (n, k), rows = problem.groups, problem.weight, problem.groups.expected_rows
    ranked = grouped_candidates(problem, gpu, tuned.configs(problem.num_sms))
    candidates = [
        {
            "name": config.name,
            "time_us": us,
            "rows": round_up(rows, config.block_k if config.by_k else config.block_m),
            "stages": config.stages,
            "smem_bytes": config.smem_bytes,
        }
        for us, config, _ in fitting(ranked, problem.kind, gpu)
    ]
    what = "K blocks" if groups.layout == "k_offs" else "tiles"
    texts = [f"{row['time_us']:.1f} us, with {what} of {row['rows']} rows for a group of {rows}" for row in candidates]
    flops, moved = product_flops(groups.count * rows, n, k), _bytes(problem)
    parts, why = [("product", candidates[0]["time_us"]), *besides], report.reason(candidates, texts)
    return Answer(
        f"{groups.count} groups of {rows}x{n}x{k} in {problem.product.family} on {problem.num_sms} SMs of {gpu.name}",
        *(problem._asdict() | {"groups": groups._asdict()}, problem.kind, gpu, rows),
        Prediction(candidates, parts, moved, flops, gpu.tflops(problem.kind), why),
    )


def _bytes(problem: GemmProblem) -> float:
    """Of all rows without padding, every group's weights once."""
    count, rows = problem.groups.count, problem.groups.count * problem.groups.expected_rows
    product = problem.product
    if problem.groups.layout == "k_offs":  # gradients are read and written
        operands = (problem.m + problem.n) * (rows + 4 * ceil_div(rows, SCALE_BLOCK))
        return operands + 2 * count * problem.m * problem.n * problem.out.bytes
    scales_of_row = 4 * (ceil_div(problem.k, SCALE_BLOCK) if product.block_scales else product.row_scales)
    scaled_rows = ceil_div(problem.n, SCALE_BLOCK) if product.scaling == "blocks" else problem.n
    weights = count * (problem.n * problem.k * product.b_bytes + scaled_rows * scales_of_row)
    return weights + rows * (problem.k * product.a.bytes + scales_of_row + problem.n * problem.out.bytes)
