"""Fits the selector's time model to a search and writes deep_tile/select/times/fp8.json, or that of another kind.

    PYTHONPATH=. python benchmarks/calibrate.py benchmarks/results/search_h200.json \\
        --chains benchmarks/results/search_chain_h200.json --alone benchmarks/results/alone_h200.json
    PYTHONPATH=. python benchmarks/calibrate.py search_bf16.json [another.json ...] --kind bf16

No GPU. The two coefficients of each config, three where `b` stays, minimise the logarithm of predicted over measured
time; the constants that all configs share are those of SHARED and SHARED_OF. Other kinds have searches of
bench_kinds.py, each predicted for its own GPU, and no choices beside the model's; products of layouts but "nt", which
a search or one of its rows has, make times/KIND_nn.json, of all together. For FP8, shapes where the model's choice
loses are listed, with the best config: the fastest when launched by itself, or, where search_chain.py timed it in
chains as well, by both. Large products are bound by power: there back-to-back runs of bench_gemm.py decide, each config
in a power state of its own. Prints the model's error, and what the choices lose against the fastest config measured.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import numpy as np

from benchmarks import store
from benchmarks.bench_kinds import problem_of
from benchmarks.predict import Searched, bucket_of, compare, contenders, load_search, summary
from benchmarks.shapes import Shape
from deep_tile.config import GemmConfig
from deep_tile.kinds import KINDS, LAYOUTS
from deep_tile.problem import GemmProblem
from deep_tile.select import cost
from deep_tile.select.choose import bucket_key, choose, choose_bucket
from deep_tile.select.defaults import default_configs
from deep_tile.select.hardware import H200, Hardware, for_device

SHARED = {
    **{"launch_us": 5.5, "memory_us": 0.6, "overlap": 6.0},
    **{"idle_gain": 0.16, "throttle": 0.6, "throttle_us": 1000.0, "load_heat": 0.3, "l2_share": 1.0},
}
"""Best of a grid around them (launch 4.5 to 6.0, memory 0.6 to 1, overlap 4 to 8, gain 0.05 to 0.2, throttle 0.3 to 0.8
at 500 or 1000): the choice hardly depends on them, the predicted time does. The load's heat is that by which the model
chooses best among nine large products timed alone, 1.004 of the fastest without it and 1.0002 with 0.25 to 0.75, and
among 70 drawn ones in turns, 1.016 and 1.012 with 0.25 to 0.4 (H200, 2026-11-24)."""

CONTENDER = 0.5
"""A config this much slower than the fastest counts half."""

WORTH = 1.005
"""How much faster than the model's choice a measured config must be to be listed. In two other searches, choices made
with 1.01 lost up to 0.1 % more, and those made with 1.003 as much (H200, 2026-11-21)."""

WORTH_ALONE = 1.015
"""The same for back-to-back runs: beyond it, a choice made from interleaved runs is wrong for a GPU that runs nothing
else."""

SHARED_OF = {"bf16": {"overlap": 5.5, "idle_gain": 0.03, "l2_share": 0.9}}
"""Kinds with constants of their own. With these BF16's choice, fitted to halves of 1,747 products and judged on 890 of
the others, takes 1.028 times the time of the best of 45 to 51 configs, with FP8's 1.031; with more terms in the model
(rows that a tile really loads, a rate per SM, the fill of L2) not less than 1.022 (H100, two pairs of halves,
2026-11-27)."""


class Sample(NamedTuple):
    """The time of one config for a problem on a GPU, and the time of the fastest."""

    config: GemmConfig
    problem: GemmProblem
    us: float
    fastest_us: float
    hardware: Hardware


class Row(NamedTuple):
    """Times of a problem's configs by their names, and the GPU's preset."""

    problem: GemmProblem
    us: dict[str, float]
    hardware: Hardware = H200


def samples_of(config: GemmConfig, rows: Iterable[Row]) -> list[Sample]:
    """The samples of one config in a search."""
    return [
        Sample(config, row.problem, row.us[config.name], min(row.us.values()), row.hardware)
        for row in rows
        if config.name in row.us
    ]


def fit(config: GemmConfig, samples: list[Sample], calibration: cost.Calibration) -> list[float]:
    """The TileTimes of one config by Gauss-Newton on their logarithms, through the selector's own model.

    A sample weighs the less, the further the config is from the fastest there: the model has to rank contenders.
    """
    measured = np.array([sample.us for sample in samples])
    excess = measured / np.array([sample.fastest_us for sample in samples]) - 1
    weight = 1 / (1 + (excess / CONTENDER) ** 2)

    def log_error(logs: np.ndarray) -> np.ndarray:
        calibration.configs[config.timed_name] = cost.TileTimes(*np.exp(logs))
        predicted = [cost.estimate(sample.config, sample.problem, sample.hardware).time_us for sample in samples]
        return np.log(np.array(predicted) / measured)

    count = 3 if config.resident_b else 2
    logs, lowest, step = np.log([0.3, 1.0, 0.5][:count]), [-5.0, -3.0, -3.0][:count], 1e-4
    for _ in range(40):
        error = log_error(logs)
        slopes = np.stack([(log_error(logs + step * axis) - error) / step for axis in np.eye(len(logs))], axis=1)
        change = np.linalg.lstsq(slopes * weight[:, None], -error * weight, rcond=None)[0]
        logs = np.maximum(logs + np.clip(change, -0.5, 0.5), lowest)
    return np.exp(logs).tolist()


def borrowed(candidates: Iterable[GemmConfig], kind: str = "fp8") -> dict[str, list[float]]:
    """Stored times of tiles that are no candidates: other results, layouts and groups of the kind have the same tile,
    and no times of their own."""
    names = {config.name for config in candidates}
    return {name: list(times) for name, times in cost.calibration(kind).configs.items() if name not in names}


def among(searched: Searched, candidates: Iterable[GemmConfig]) -> Searched:
    """A search without configs that are no candidates."""
    names = {config.name for config in candidates}
    return {shape: {name: us for name, us in times.items() if name in names} for shape, times in searched.items()}


def write(model: dict, kind: str = "fp8") -> None:
    (cost.TIMES / f"{kind}.json").write_text(json.dumps(model, indent=1) + "\n")
    cost.read_calibration.cache_clear()
    cost.calibration.cache_clear()
    cost.along_rows.cache_clear()
    cost.times_of.cache_clear()
    choose_bucket.cache_clear()


def scores(times: dict[str, float], in_chains: dict[str, float] | None, tied: set[str]) -> dict[str, float]:
    """The logarithm of each config's time, or of the geometric mean of its times alone and in chains.

    In chains those count that are `tied` for the fastest alone: a search that averages others knows that better than
    the one by which search_chain.py chose.
    """
    if in_chains is None:
        return {name: math.log(us) for name, us in times.items()}
    return {name: (math.log(times[name]) + math.log(in_chains[name])) / 2 for name in tied & in_chains.keys()}


def better_choices(searched: Searched, chains: Searched) -> dict[str, str]:
    """By bucket ("MxNxK" with its largest m): the best config, where the model's choice is WORTH slower or was not
    timed in chains."""
    tied = contenders(searched)
    buckets: dict[GemmProblem, list[dict[str, float]]] = {}
    for shape, times in searched.items():
        problem = bucket_of(shape)
        buckets.setdefault(problem, []).append(scores(times, chains.get(shape), tied[problem]))
    choices = {}
    for problem, measurements in buckets.items():
        names = set.intersection(*map(set, measurements))
        if not names:
            raise SystemExit(f"no config was timed at every m of {problem}, alone and in chains; search chains again")
        mean = {name: fmean(one[name] for one in measurements) for name in names}
        best, chosen = min(sorted(mean), key=mean.get), choose(problem).name
        if mean.get(chosen, math.inf) - mean[best] > math.log(WORTH):
            choices[bucket_key(problem)] = best
    return choices


def alone_choices(path: Path) -> dict[str, str]:
    """By bucket: the fastest config back to back, where the choice takes WORTH_ALONE of its time."""
    choices = {}
    for entry in store.load(path)["shapes"]:
        times = {name: result["sustained_us"] for name, result in entry["results"].items() if "sustained_us" in result}
        chosen = times.pop("deep_tile")
        ours = {name: us for name, us in times.items() if name.startswith("fp8_gemm_")}
        best = min(ours, key=ours.get)
        if chosen > WORTH_ALONE * ours[best]:
            choices[bucket_key(bucket_of(Shape(entry["m"], entry["n"], entry["k"])))] = best
    return choices


def report(searched: Searched) -> str:
    """Report how well the stored calibration predicts the search, and what its choices lose."""
    figures = summary(compare(searched))
    errors = f"median error {figures['median error']:.1%}, 90th percentile {figures['90th percentile']:.1%}"
    return f"{errors}; {report_losses(searched)}"


def report_losses(searched: Searched) -> str:
    """Report what the choices lose, alone or in chains, whichever was searched."""
    chosen = {shape: choose_bucket(bucket_of(shape)).name for shape in searched}
    losses = [times[chosen[shape]] / min(times.values()) for shape, times in searched.items()]
    return f"chosen over fastest: {geometric_mean(losses):.3f} in the geometric mean, {max(losses):.3f} at worst"


def rows_of(kind: str, path: Path) -> list[Row]:
    """The rows of a search of bench_kinds.py, whose layout and strides the file or a row may have."""
    search = store.load(path)
    layout, hardware = search["meta"].get("layout", "nt"), for_device(search["meta"]["gpu"])
    rows = []
    for row in search["shapes"]:
        problem = problem_of(kind, Shape(row["m"], row["n"], row["k"]), layout=row.get("layout", layout))
        problem = problem.with_strides(*row["strides"]) if "strides" in row else problem
        rows.append(Row(problem, timed_configs(row["us"]), hardware))
    return rows


def calibrate_kind(kind: str, paths: list[Path]) -> None:
    """Calibrate from searches of bench_kinds.py: operands along k, and others, each if there are such rows."""
    rows = [row for path in paths for row in rows_of(kind, path)]
    meta = store.load(paths[0])["meta"]
    source = {name: meta[name] for name in ("gpu", "num_sms", "date")}
    source["fitted_to"] = ", ".join(path.name for path in paths)
    before = losses_of_kind(rows)
    fit_layouts(kind, rows, source, ("nt",), kind, cost.calibration)
    others = [layout for layout in LAYOUTS if layout != "nt"]
    fit_layouts(kind, rows, source, others, f"{kind}_{cost.ALONG_ROWS}", cost.along_rows)
    print(f"{kind}: {before} before, {losses_of_kind(rows)} now")


def fit_layouts(
    kind: str,
    rows: list[Row],
    source: dict[str, str],
    layouts: Iterable[str],
    name: str,
    calibration: Callable[[str], cost.Calibration],
) -> None:
    """Write the times of some layouts, in `name`: each tile's are fitted to the rows of all of them."""
    output = problem_of(kind, Shape(1, 1, 1)).output
    rows = [row for row in rows if row.problem.layout in layouts]
    if not rows:
        return
    candidates = [config for layout in layouts for config in default_configs(True, kind, output, layout=layout)]
    samples: dict[str, list[Sample]] = {}
    for config in candidates:
        samples.setdefault(config.timed_name, []).extend(samples_of(config, rows))
    configs = borrowed(candidates, kind) if name == kind else {}
    model = {**source, **SHARED, **SHARED_OF.get(kind, {}), "configs": configs, "choices": {}}
    write(model, name)
    for tile, found in samples.items():
        if found:
            configs[tile] = [round(value, 4) for value in fit(found[0].config, found, calibration(kind))]
    write(model, name)


def timed_configs(us: dict[str, float]) -> dict[str, float]:
    """Times of configs, without the other contestants."""
    return {name: time for name, time in us.items() if name not in ("torch", "deep_tile")}


def losses_of_kind(rows: list[Row]) -> str:
    """What the choices lose."""
    chosen = [(choose(row.problem).name, row.us) for row in rows]
    losses = [us[name] / min(us.values()) for name, us in chosen if name in us]
    return f"chosen over fastest {geometric_mean(losses):.3f} in the geometric mean, {max(losses):.3f} at worst"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "search", type=Path, nargs="+", help="JSON file of search.py, or for another kind those of bench_kinds.py"
    )
    parser.add_argument("--kind", choices=KINDS, default="fp8", help="of product (default: %(default)s)")
    parser.add_argument("--chains", type=Path, help="JSON file of search_chain.py; needed for FP8")
    parser.add_argument("--alone", type=Path, help="JSON file of bench_gemm.py --sustained; needed for FP8")
    arguments = parser.parse_args()
    if arguments.kind != "fp8":
        calibrate_kind(arguments.kind, arguments.search)
        return
    if arguments.chains is None or arguments.alone is None or len(arguments.search) > 1:
        parser.error("FP8 needs one search, and --chains and --alone, too")
    path = arguments.search[0]
    searched, chains = load_search(path), load_search(arguments.chains, "us_per_launch")
    run = store.load(path)["run"]
    source = {"gpu": run["gpu"], "num_sms": run["num_sms"], "date": run["date"], "fitted_to": path.name}
    candidates = default_configs()
    rows = [Row(problem_of("fp8", shape), times) for shape, times in searched.items()]
    model = {**source, **SHARED, "configs": borrowed(candidates), "choices": {}}
    write(model)
    for config in candidates:
        samples = samples_of(config, rows)
        model["configs"][config.name] = [round(value, 4) for value in fit(config, samples, cost.calibration())]
    write(model)
    print("model alone:", report(searched))
    choices = better_choices(among(searched, candidates), among(chains, candidates)) | alone_choices(arguments.alone)
    write({**model, "choices": choices})
    print("with choices:", report(searched))
    print("in chains:", report_losses(chains))


if __name__ == "__main__":
    main()
