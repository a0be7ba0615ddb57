"""The search for the fastest configs on the current GPU: `python -m deep_tile tune`.

Compiles candidates, checks their results (trials.py), times them alternately (timing.py), and stores the winners
(tuned.py), which the selector then prefers. Invariant: a config with a wrong result is never kept.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from deep_tile import plan
from deep_tile.config import GemmConfig, check_sizes
from deep_tile.method import described
from deep_tile.problem import GemmProblem
from deep_tile.select import tuned
from deep_tile.select.choose import (
    bucket_key,
    bucketed,
    candidates,
    group_bucket,
    grouped_candidates,
    tuned_choice,
)
from deep_tile.tools.timing import L2Flush, capture, time_to_choose
from deep_tile.tools.trials import trial_of

PREDICTED_WITHIN = 2.0
"""Configs predicted to take more than this many times the best are not tried."""

CLEARLY = 0.99
"""A config replaces the selector's choice only below this share of its time, since two runs differ as much."""

Track = Callable[[Iterable, str, int], Iterable]
"""Passes items on and shows progress: (items, description, total)."""


class Tuned(NamedTuple):
    """One bucket's result.

    Attributes:
        problem: the bucket, with its largest m, or with groups its most rows.
        choice: the config to use from now on, and its time.
        before, before_us: the selector's choice so far, and its time; NaN if its result was wrong.
        tried: configs that were timed.
        wrong: configs with wrong results, and their relative error.
    """

    problem: GemmProblem
    choice: tuned.Choice
    before: GemmConfig
    before_us: float
    tried: int
    wrong: dict[GemmConfig, float]


def tune(
    shapes: Iterable[tuple[int, int, int]],
    *,
    kind: str = "fp8",
    output: str | None = None,
    wide: bool,
    repeats: int,
    track: Track,
) -> list[Tuned]:
    """Search every shape's bucket on the current device; nothing is stored.

    Args:
        shapes: (m, n, k).
        kind, output: a name in `kinds.FAMILIES`, and the result format; None: the kind's default.
        wide: also try other stage and store buffer counts.
        repeats: samples per config that may be the fastest.

    Raises:
        ValueError: a shape that the kind's call does not take.
        RuntimeError: no config computed a shape right.
    """
    return _search([_bucket(*shape, kind, output) for shape in shapes], wide, repeats, track)


def tune_groups(
    layout: str, count: int, rows: Iterable[int], n: int, k: int, *, kind: str = "fp8", repeats: int, track: Track
) -> list[Tuned]:
    """`tune` for groups: `count` of them with so many `rows` in the mean, and weights [n, k].

    Args:
        layout: one of `kinds.GROUPINGS` except "none"; with "k_offs" gradients are added to `out`.
        kind: a name in `kinds.FAMILIES`; "fp8" for gradients.
    """
    return _search([_group_bucket(layout, count, mean, n, k, kind) for mean in rows], False, repeats, track)


def _search(problems: Sequence[GemmProblem], wide: bool, repeats: int, track: Track) -> list[Tuned]:
    searched = {problem: search_space(problem, wide) for problem in dict.fromkeys(problems)}
    _load(list(dict.fromkeys(config for configs in searched.values() for config in configs)), track)
    flush = L2Flush()
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs cannot be captured on the default stream
        items = track(searched.items(), "Timing", len(searched))
        return [_tune_bucket(problem, configs, repeats, flush) for problem, configs in items]


def store(results: Sequence[Tuned]) -> str:
    """Store the choices for this GPU model; returns where. Raises OSError as `tuned.store` does."""
    properties = _properties()
    found = {bucket_key(result.problem): result.choice for result in results}
    path = tuned.store(properties.name, properties.multi_processor_count, found)
    return str(path)


def search_space(problem: GemmProblem, wide: bool) -> list[GemmConfig]:
    """Configs that are worth timing, the selector's choice first: with groups all that there are."""
    found = tuned.configs(problem.num_sms)
    if problem.groups is not None:
        return [config for _, config in grouped_candidates(problem, tuned=found)]
    ranked = candidates(problem, own=tuned_choice(problem, found))
    limit_us = PREDICTED_WITHIN * min(estimate.time_us for estimate, _ in ranked)
    likely = [config for i, (estimate, config) in enumerate(ranked) if i == 0 or estimate.time_us <= limit_us]
    if not wide:
        return likely
    return list(dict.fromkeys(variant for config in likely for variant in (config, *variants(config))))


def variants(config: GemmConfig) -> list[GemmConfig]:
    """The same tile with other ring depths that fit."""
    found = []
    for store_buffers in range(1, config.boxes + 1):
        for stages in range(max(2, config.stages - 2), config.stages + 3):
            try:
                found.append(replace(config, stages=stages, store_buffers=store_buffers))
            except ValueError:
                break  # deeper rings need more shared memory still
    return found


def _bucket(m: int, n: int, k: int, kind: str = "fp8", output: str | None = None) -> GemmProblem:
    return bucketed(_problem(f"shape {m}x{n}x{k}", {"m": m, "n": n, "k": k}, dtype=kind, output=output))


def _group_bucket(layout: str, count: int, rows: int, n: int, k: int, kind: str = "fp8") -> GemmProblem:
    what, sizes = f"{count} groups of {rows} rows, n = {n}, k = {k}", {"m": rows, "n": n, "k": k, "groups": count}
    return group_bucket(_problem(what, sizes, dtype=kind, grouping=layout))


def _problem(what: str, sizes: dict[str, int], **made) -> GemmProblem:
    """Raises ValueError for what no call takes."""
    try:
        check_sizes(**sizes)
        return described.product(sizes, _properties().multi_processor_count, **made)[0]
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _properties():
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def _load(configs: Sequence[GemmConfig], track: Track) -> None:
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        loaded = pool.map(lambda config: plan.load_kernel(config, device), configs)
        for _ in track(loaded, "Compiling", len(configs)):
            pass


def _tune_bucket(problem: GemmProblem, configs: Sequence[GemmConfig], repeats: int, flush: L2Flush) -> Tuned:
    trial = trial_of(problem)
    graphs, wrong = {}, {}
    for config in configs:
        graph = capture(partial(trial.multiply, config))
        trial.spoil()  # the config before may have left the right result
        graph.replay()
        error = trial.error()
        if error <= trial.most_error:
            graphs[config] = graph
        else:
            wrong[config] = error
    if not graphs:
        raise RuntimeError(f"{bucket_key(problem)}: every config's result is wrong, such as {wrong}")
    times_us = time_to_choose(graphs, repeats, flush)
    before = configs[0]
    best = choose(times_us, before)
    choice = tuned.Choice(best, times_us[best])
    return Tuned(problem, choice, before, times_us.get(before, float("nan")), len(graphs), wrong)


def choose(times_us: dict[GemmConfig, float], before: GemmConfig) -> GemmConfig:
    """The fastest, or the present choice where that is as good."""
    best = min(times_us, key=times_us.__getitem__)
    if before in times_us and times_us[best] > CLEARLY * times_us[before]:
        return before
    return best
