"""Prediction against reality: the selector's time model beside the stored search of every config on every shape.

    PYTHONPATH=. python benchmarks/predict.py [benchmarks/results/search_h200_2026-11-22.json] [--plot FILE.png]

No GPU. Prints the errors and how well configs are ranked within a shape, by range of m; calibrate.py, figures.py and
the test that the model does not drift use its functions. Invariant: the measured choices of times/fp8.json play no
part, only the model does.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import store
from benchmarks.shapes import M_RANGES, Shape, m_range
from deep_tile.config import GemmConfig
from deep_tile.problem import GemmProblem
from deep_tile.select import cost
from deep_tile.select.choose import bucketed
from deep_tile.select.defaults import default_configs
from deep_tile.select.hardware import H200

SEARCH = store.FOLDER / "search_h200_2026-11-22.json"
CLOSE = 1.03
"""Times nearer than this are ties: two runs of one kernel differ as much."""

BIN = 0.02
"""Width of the histogram's bins of rank correlations."""

Searched = dict[Shape, dict[str, float]]
"""Microseconds by shape and config."""


class Compared(NamedTuple):
    """The model and the measurement of one shape, config by config.

    Attributes:
        names: configs, in the order of the arrays.
        predicted_us, measured_us: arrays.
    """

    shape: Shape
    names: list[str]
    predicted_us: np.ndarray
    measured_us: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """Predicted over measured, less 1."""
        return self.predicted_us / self.measured_us - 1

    @property
    def spearman(self) -> float:
        """Rank correlation of the two; 1: the same order."""
        return float(np.corrcoef(_ranks(self.predicted_us), _ranks(self.measured_us))[0, 1])

    @property
    def ordered_pairs(self) -> float:
        """Share of the pairs of configs that are no tie which the model puts in the right order."""
        first, second = np.triu_indices(len(self.names), 1)
        ratio = self.measured_us[first] / self.measured_us[second]
        clear = np.maximum(ratio, 1 / ratio) > CLOSE
        right = (self.predicted_us[first] > self.predicted_us[second]) == (ratio > 1)
        return float(right[clear].mean())

    @property
    def loss(self) -> float:
        """Measured time of the config predicted fastest, over the fastest measured."""
        return float(self.measured_us[self.predicted_us.argmin()] / self.measured_us.min())


def load_search(path: Path = SEARCH, times: str = "us") -> Searched:
    """The times of a search, from its file."""
    return {Shape.parse(text): by_config for text, by_config in store.load(path)[times].items()}


def bucket_of(shape: Shape) -> GemmProblem:
    """The problem whose choice of a kernel this shape shares, on the GPU that was searched."""
    return bucketed(GemmProblem(*shape, num_sms=H200.num_sms))


def tied_for_fastest(times: dict[str, float]) -> set[str]:
    """Names of the configs that are the fastest of a shape, or CLOSE to it."""
    limit = CLOSE * min(times.values())
    return {name for name, us in times.items() if us <= limit}


def contenders(searched: Searched) -> dict[GemmProblem, set[str]]:
    """For each bucket, the configs that tie for the fastest at one of its m or more."""
    tied: dict[GemmProblem, set[str]] = defaultdict(set)
    for shape, times in searched.items():
        tied[bucket_of(shape)] |= tied_for_fastest(times)
    return tied


def compare(searched: Searched) -> list[Compared]:
    """Every shape, with the configs that were searched and that the selector still has."""
    configs = {config.name: config for config in default_configs()}
    return [_compare(shape, times, configs) for shape, times in searched.items()]


def _compare(shape: Shape, times: dict[str, float], configs: dict[str, GemmConfig]) -> Compared:
    problem = GemmProblem(*shape, num_sms=H200.num_sms)
    names = [name for name in times if name in configs]
    predicted = np.array([cost.estimate(configs[name], problem).time_us for name in names])
    return Compared(shape, names, predicted, np.array([times[name] for name in names]))


def _ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort().astype(float)


def absolute_errors(compared: Iterable[Compared]) -> np.ndarray:
    return np.abs(np.concatenate([one.errors for one in compared]))


def summary(compared: list[Compared]) -> dict[str, float]:
    """The figures that are reported and held."""
    errors = absolute_errors(compared)
    rankings = np.array([one.spearman for one in compared])
    return {
        "shapes": len(compared),
        "pairs": len(errors),
        "median error": float(np.median(errors)),
        "90th percentile": float(np.quantile(errors, 0.9)),
        "median Spearman": float(np.median(rankings)),
        "lowest Spearman": float(rankings.min()),
        "Spearman >= 0.9": float((rankings >= 0.9).mean()),
        "pairs in order": float(np.mean([one.ordered_pairs for one in compared])),
        "loss": geometric_mean(one.loss for one in compared),
    }


def print_summary(compared: list[Compared], console: Console) -> None:
    ranges = {"all": compared}
    ranges |= {name: [one for one in compared if m_range(one.shape) == name] for name in M_RANGES}
    columns = {name: summary(rows) for name, rows in ranges.items() if rows}
    table = Table("", *columns, title="Predicted against measured time, every config on every shape")
    for figure in summary(compared):
        table.add_row(figure, *(_figure(figure, column[figure]) for column in columns.values()))
    console.print(table)
    worst = sorted(compared, key=lambda one: one.spearman)[:8]
    console.print("Ranked worst:", ", ".join(f"{one.shape} {one.spearman:.2f}" for one in worst))
    console.print(
        f"Pairs in order: of two configs that differ by more than {CLOSE - 1:.0%}. Loss: measured time of the config "
        "predicted fastest over the fastest measured, without the measured choices that the package adds."
    )


def _figure(name: str, value: float) -> str:
    if name in ("shapes", "pairs"):
        return f"{value:.0f}"
    return f"{value:.3f}" if "Spearman" in name and ">=" not in name or name == "loss" else f"{value:.1%}"


def rank_bins(rankings: list[float]) -> np.ndarray:
    """Edges of a histogram that leaves out no correlation, the worst least of all."""
    last = round(1 / BIN)
    first = min(np.floor(min(rankings) / BIN), last - 1)
    return BIN * np.arange(first, last + 1)


def plot(compared: list[Compared], path: Path) -> None:
    """Predicted over measured for every config and shape, and the rank correlations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, rankings = figure.subplots(1, 2, width_ratios=(3, 2))
    for name in M_RANGES:
        rows = [one for one in compared if m_range(one.shape) == name]
        measured = np.concatenate([one.measured_us for one in rows])
        times.scatter(measured, np.concatenate([one.errors for one in rows]), s=6, alpha=0.5, label=name)
    times.axhspan(-0.1, 0.1, color="black", alpha=0.08)
    largest = 1.1 * absolute_errors(compared).max()
    times.set(xscale="log", ylim=(-largest, largest), xlabel="measured us", ylabel="predicted / measured - 1")
    times.set_title("Every config on every shape; grey: 10 %")
    times.legend(frameon=False)
    spearman = [one.spearman for one in compared]
    rankings.hist(spearman, bins=rank_bins(spearman), color="0.4")
    rankings.axvline(0.9, color="black", linestyle=":")
    rankings.set(xlabel="Spearman's rank correlation", ylabel="shapes", title="Order of the configs within a shape")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path, nargs="?", default=SEARCH, help="JSON file of search.py")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args(arguments)
    compared = compare(load_search(options.search))
    print_summary(compared, Console())
    if options.plot:
        plot(compared, options.plot)


if __name__ == "__main__":
    main()
