"""Reports of results: tables, geometric means, comparisons, the README's table and chart.

Used by bench_gemm.py for its printout, and as a script to refresh the README, docs/benchmarks.md and the chart; reads
JSON files, needs no GPU. Of several runs the first is that of docs/benchmarks.md and of the chart:

    PYTHONPATH=. python benchmarks/report.py RESULT.json [OTHER_GPU.json ...] [--overhead OVERHEAD.json]

Invariant: ratios are times, ours over theirs (below 1: deep_tile is faster), and are taken within one run only, because
cards of one model differ by up to 10 %. DeepGEMM's published times enter through cuBLASLt tensor-wise fast, which both
runs measured.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import store
from benchmarks.shapes import DEEPSEEK_V3_LAYERS, M_RANGES, NINE, TOKENS, Shape, m_range
from deep_tile.select.hardware import H200

OURS = "deep_tile"
COMMON = "cublaslt_tensor_fast"
"""The contestant through which runs on different cards are compared."""

BASELINE = "torch_bf16"
"""The contestant that speed-ups are over."""

SHOWN = (OURS, "deep_gemm", "cublaslt_block", COMMON, BASELINE)
"""The contestants of tables by shape and of plots; the results hold the others."""

GAINS_OVER = ("torch_bf16", "cublaslt_block", "deep_gemm", COMMON)
"""The contestants of the README's table, in its order."""

PUBLISHED = store.FOLDER / "peers_h200_2026-11-21.json"
DEEP_GEMM = "DeepGEMM 2.6.1, another run"
ESTIMATE = "estimate"
"""Title of the time that a shape's FLOP and bytes let expect: `Shape.estimate_us`."""

MISSING = "–"
CHART_COLORS = ("#d9822b", "#3f8fd2", "#3aa675")
"""Our colour, then those of the others."""
CHART_GREY = "#8a8f98"

WIDTH = 120
"""Columns of the documents' text."""

EXPLANATION = (
    "- *Tensor-wise* and *row-wise* cuBLASLt have one scale per tensor or per row, no block scales. *Slow* promotes "
    "its sums as deep_tile does, *fast* does not.",
    f"- *{DEEP_GEMM}*: its times are from another run, `benchmarks/results/{PUBLISHED.name}`, and are compared through "
    "cuBLASLt tensor-wise, fast, which both runs timed.",
    f"- The *{ESTIMATE}* is max(FLOP / {H200.fp8_tflops:.0f} TFLOPS + {H200.launch_us} us, bytes / {H200.hbm_tbps} "
    f"TB/s + {H200.stream_us} us): the FLOP rate that tensor cores sustain on random data at an H200's power limit, "
    "the bandwidth of a plain read, and the time that a launch adds. It is not a limit: a cooler GPU is faster.",
)
"""An explanation of the tables' words."""

Run = dict[str, Any]
"""A results file: {"meta": {...}, "shapes": [{"m", "n", "k", "results": {contestant: {"us": ..., ...}}, ...}, ...]}."""
Times = dict[Shape, float]


def shape_of(row: dict[str, Any]) -> Shape:
    return Shape(row["m"], row["n"], row["k"])


def times(run: Run, contestant: str) -> Times:
    """Median microseconds by shape, where the contestant ran."""
    return {shape_of(row): row["results"][contestant]["us"] for row in run["shapes"] if contestant in row["results"]}


def contestants(run: Run) -> list[str]:
    """Contestants in order of first appearance."""
    return list(dict.fromkeys(name for row in run["shapes"] for name in row["results"]))


def ratios(ours: Times, theirs: Times) -> Times:
    """Ours over theirs, on the shapes that both have."""
    return {shape: us / theirs[shape] for shape, us in ours.items() if shape in theirs}


def published_deep_gemm_ratios(run: Run) -> Times:
    """deep_tile over DeepGEMM 2.6.1, each relative to cuBLASLt tensor-wise fast of its own run."""
    published = store.load(PUBLISHED)
    ours = ratios(times(run, OURS), times(run, COMMON))
    return ratios(ours, ratios(times(published, "deep_gemm"), times(published, COMMON)))


def means_by_range(values: Times) -> dict[str, float]:
    """Geometric mean in each m range that has shapes."""
    ranges = {name: [value for shape, value in values.items() if m_range(shape) == name] for name in M_RANGES}
    return {name: geometric_mean(found) for name, found in ranges.items() if found}


def all_means(run: Run) -> dict[str, dict[str, float]]:
    """Geometric means of ours against every other contestant, published DeepGEMM and the estimate, by title."""
    ours = times(run, OURS)
    others = {label_of(run, name): ratios(ours, times(run, name)) for name in contestants(run) if name != OURS}
    if "H200" in run["meta"]["gpu"]:
        others[DEEP_GEMM] = published_deep_gemm_ratios(run)
    others[ESTIMATE] = {shape: us / shape.estimate_us() for shape, us in ours.items()}
    return {title: means_by_range(values) for title, values in others.items() if values}


def label_of(run: Run, contestant: str) -> str:
    return run["meta"].get("labels", {}).get(contestant, contestant)


def print_run(run: Run, console: Console) -> None:
    """Every shape, then the geometric means."""
    names = contestants(run)
    table = Table("m x n x k", *(label_of(run, name) for name in names), ESTIMATE, "config", title="Microseconds")
    for row in run["shapes"]:
        cells = [_microseconds(row["results"].get(name, {}).get("us")) for name in names]
        table.add_row(str(shape_of(row)), *cells, _microseconds(shape_of(row).estimate_us()), _tile(row))
    console.print(table)
    console.print(_means_table("Geometric mean of deep_tile's time over", all_means(run)))
    if any("sustained_us" in result for row in run["shapes"] for result in row["results"].values()):
        console.print(_own_power_table(run))


def _own_power_table(run: Run) -> Table:
    """A table of times and energy of each contestant in its own power state, cool and alone."""
    names = [name for name in contestants(run) if name != COMMON]
    table = Table(title=f"Cool, alone, energy: over {label_of(run, COMMON)}'s microseconds and millijoules")
    for column in ("m x n x k", label_of(run, COMMON), *(label_of(run, name) for name in names)):
        table.add_column(column)
    for row in run["shapes"]:
        common = row["results"].get(COMMON, {})
        if "sustained_us" in common:
            cells = [_own_power(row["results"].get(name, {}), common) for name in names]
            table.add_row(str(shape_of(row)), _own_power(common), *cells)
    return table


def _own_power(result: dict[str, Any], common: dict[str, Any] | None = None) -> str:
    """The three figures of a contestant, absolute or relative to another's."""
    figures = [(result.get(name), name) for name in ("cool_us", "sustained_us", "millijoules")]
    if common is None:
        return ", ".join(MISSING if value is None else f"{value:.0f}" for value, _ in figures)
    known = [(value, common.get(name)) for value, name in figures]
    return ", ".join(MISSING if None in pair else f"{pair[0] / pair[1]:.3f}" for pair in known)


def print_comparison(old: Run, new: Run, console: Console) -> None:
    """deep_tile in two runs: plain, and each relative to cuBLASLt tensor-wise fast of its own run."""
    plain = ratios(times(new, OURS), times(old, OURS))
    relative = ratios(*(ratios(times(run, OURS), times(run, COMMON)) for run in (new, old)))
    table = Table("m x n x k", "old us", "new us", "new / old", "relative to cuBLASLt", title="deep_tile, two runs")
    for shape, ratio in plain.items():
        old_us, new_us = (_microseconds(times(run, OURS)[shape]) for run in (old, new))
        table.add_row(str(shape), old_us, new_us, f"{ratio:.3f}", _ratio(relative.get(shape)))
    console.print(table)
    means = {"new / old": means_by_range(plain), "relative to cuBLASLt": means_by_range(relative)}
    console.print(_means_table("Geometric mean", means))


def _means_table(title: str, means: dict[str, dict[str, float]]) -> Table:
    table = Table("", *M_RANGES, title=title)
    for name, by_range in means.items():
        table.add_row(name, *(_ratio(by_range.get(m_name)) for m_name in M_RANGES))
    return table


def _tile(row: dict[str, Any]) -> str:
    return row.get("config", MISSING).removeprefix("fp8_gemm_")


def _microseconds(us: float | None) -> str:
    return MISSING if us is None else f"{us:.1f}"


def _ratio(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.3f}"


def gains(run: Run) -> dict[str, Times]:
    """How many times as fast as others deep_tile is on each shape, by title."""
    ours, found = times(run, OURS), {}
    for name in GAINS_OVER:
        if name in contestants(run):
            found[label_of(run, name)] = ratios(times(run, name), ours)
        elif name == "deep_gemm" and "H200" in run["meta"]["gpu"]:
            found[DEEP_GEMM] = {shape: 1 / ratio for shape, ratio in published_deep_gemm_ratios(run).items()}
    return found


def readme_part(runs: list[Run]) -> str:
    """The text between the README's markers: speed-ups of each run, and their source."""
    rows = [["FP8 GEMM, times as fast as", "GPU", *M_RANGES, "slowest and fastest shape"]]
    sources, bridged = [], ""
    for run in runs:
        gpu = run["meta"]["gpu"].removeprefix("NVIDIA ").split()[0]
        sources.append(f"{gpu}, {run['meta']['date'][:10]}, code of {run['meta'].get('commit', MISSING)[:7]}")
        for title, values in gains(run).items():
            means = means_by_range(values)
            cells = [f"{means[name]:.2f}" if name in means else MISSING for name in M_RANGES]
            if title == DEEP_GEMM:
                bridged = " DeepGEMM's run is compared through tensor-wise cuBLASLt, which both timed."
            rows.append([title, gpu, *cells, f"{min(values.values()):.2f}, {max(values.values()):.2f}"])
    about = (
        f"Geometric means over {len(runs[0]['shapes'])} shapes, cold L2, GPU time of the GEMM alone: "
        f"{'; '.join(sources)}. "
        "Measured by `deep-tile bench --shapes all`. *Tensor-wise* cuBLASLt has one scale per tensor, so it does less "
        f"work.{bridged}"
    )
    return f"{markdown(rows)}\n\n{wrapped(about)}"


def markdown_tables(run: Run) -> str:
    """The nine compute-bound shapes, and the means over all shapes measured."""
    rows = {shape_of(row): row for row in run["shapes"]}
    names = [name for name in SHOWN if name in contestants(run)]
    nine = [["m x n x k", *(label_of(run, name) for name in names), ESTIMATE, "deep_tile TFLOPS"]]
    for shape in (shape for shape in NINE if shape in rows):
        results = rows[shape]["results"]
        cells = [_microseconds(results.get(name, {}).get("us")) for name in names]
        rate = f"{shape.flops / results[OURS]['us'] / 1e6:.0f}" if OURS in results else MISSING
        nine.append([str(shape), *cells, _microseconds(shape.estimate_us()), rate])
    means = [["time of deep_tile over", *M_RANGES]]
    for title, by_range in all_means(run).items():
        means.append([title, *(_ratio(by_range.get(name)) for name in M_RANGES)])
    meta = run["meta"]
    about = (
        f"{meta['gpu']}, {meta['date'][:10]}, torch {meta.get('torch', MISSING)}, CUDA {meta.get('cuda', MISSING)}; "
        f"microseconds, medians, L2 cold, contestants in turn, `a_scale` {meta.get('scale_layout', MISSING)}. "
        f"Geometric means over {len(rows)} shapes; below 1, deep_tile is faster."
    )
    explanation = "\n".join(map(wrapped, EXPLANATION))
    return "\n\n".join((wrapped(about), markdown(nine), markdown(means), explanation))


def markdown_overhead(overhead: dict[str, Any], labels: dict[str, str]) -> str:
    """A table of the cost of a call beside its GPU time, from bench_overhead.py's file; `labels` are titles by
    contestant."""
    rows = [["host time per warm call", "us"]]
    rows += [[labels.get(name, name), f"{us:.1f}"] for name, us in overhead["host_us"].items()]
    calls, states = overhead["first_calls"], {"cold": "cold cache", "disk": "disk cache", "packaged": "packaged"}
    columns = [state for state in states if state in calls]
    kernels = [["first call of a kernel, ms", *(states[state] for state in columns)]]
    for row in zip(*(calls[state] for state in columns), strict=True):
        kernels.append([f"`{row[0]['config']}`", *(f"{call['first_ms']:.3g}" for call in row)])
    once = "The first row includes work that a process does once; with a cold cache this is loading NVRTC's bindings."
    wheel = " *Packaged* kernels come with the wheel." if "packaged" in columns else ""
    meta = overhead["meta"]
    about = (
        f"Host time of a call that is not the first, and time of first calls, by `benchmarks/bench_overhead.py`: "
        f"{meta['gpu']}, {meta['date'][:10]}, {overhead['shape']}."
    )
    return "\n\n".join((wrapped(about), markdown(rows), markdown(kernels), wrapped(once + wheel)))


def benchmarks_part(run: Run, overhead: dict[str, Any] | None = None) -> str:
    """The text between the markers of docs/benchmarks.md."""
    tables = [markdown_tables(run)]
    if overhead is not None:
        tables.append(markdown_overhead(overhead, run["meta"].get("labels", {})))
    return "\n\n".join(tables)


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  " if text.startswith("- ") else "", break_long_words=False)


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *body))


def markers(name: str) -> tuple[str, str]:
    """The lines before and after a generated part of a page."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def replace_between_markers(path: Path, text: str, name: str = "benchmark") -> None:
    """Put `text` between the two markers of this name in a file."""
    begin, end = markers(name)
    before, found, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{path} must hold the line {begin} and, after it, {end}; the table goes between them")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def plot_speedup(run: Run, path: Path) -> None:
    """The speed-up over BF16 against m, geometric means over DeepSeek-V3's layers, a line per contestant."""
    from matplotlib.figure import Figure  # Measuring needs no plots.

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    layers = {*DEEPSEEK_V3_LAYERS.values()}
    for (title, values), color in zip(_speedups(run).items(), CHART_COLORS, strict=False):
        by_m = {m: [value for shape, value in values.items() if shape.m == m and shape[1:] in layers] for m in TOKENS}
        points = [(m, geometric_mean(found)) for m, found in by_m.items() if found]
        _plot_line(axes, points, title, bold=title == OURS, color=color)
    axes.axhline(1, color=CHART_GREY, linewidth=1, linestyle=":", label=label_of(run, BASELINE))
    axes.set_xscale("log", base=2)
    axes.set_xticks(TOKENS, TOKENS)
    axes.set(xlabel="m (tokens)", ylabel="times as fast as BF16", ylim=(0, None))
    axes.set_title(f"FP8 GEMMs of DeepSeek-V3's layers, {run['meta']['gpu']}, {run['meta']['date'][:10]}", fontsize=11)
    axes.grid(alpha=0.3, color=CHART_GREY)
    axes.legend(loc="lower center", ncols=2, frameon=False, labelcolor=CHART_GREY)
    save_svg(figure, axes, path)


def save_svg(figure: Any, axes: Any, path: Path) -> None:
    """An SVG without background, in colours that both bright and dark pages show."""
    import matplotlib

    for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
        part.set_color(CHART_GREY)
    axes.tick_params(which="both", colors=CHART_GREY)
    axes.spines[:].set_color(CHART_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "deep_tile"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})
    path.write_text(_without_styles(path.read_text()))


def _speedups(run: Run) -> dict[str, Times]:
    """Speed-ups over BF16: ours, and those of the libraries that apply block scales."""
    ours, baseline = times(run, OURS), times(run, BASELINE)
    found = {OURS: ratios(baseline, ours)}
    for title, values in gains(run).items():
        if title not in (label_of(run, BASELINE), label_of(run, COMMON)):
            found[title] = {shape: found[OURS][shape] / value for shape, value in values.items()}
    return found


def _without_styles(svg: str) -> str:
    """An SVG with attributes instead of style sheets, which not every viewer reads."""
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    declarations = re.compile(r"\s*([\w-]+):\s*([^;]+);?")
    return re.sub(r' style="([^"]*)"', lambda style: declarations.sub(r' \1="\2"', style[1]), svg)


def plot_tflops(run: Run, path: Path) -> None:
    """TFLOPS against m, one panel per DeepSeek-V3 layer: ours, the peers and the estimate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = _plot_panels(figure, run, lambda shape, us: shape.flops / us / 1e6)
    for panel, (n, k) in zip(panels.flat, DEEPSEEK_V3_LAYERS.values(), strict=True):
        shapes = [Shape(m, n, k) for m in TOKENS]
        rates = [shape.flops / shape.estimate_us() / 1e6 for shape in shapes]
        panel.plot(TOKENS, rates, color="black", linewidth=0.8, linestyle=":", label=ESTIMATE)
        panel.set_yscale("log")
    figure.supylabel("TFLOPS")
    _save(figure, run, path)


def _plot_panels(figure: Any, run: Run, height: Callable[[Shape, float], float]) -> Any:
    """One panel per layer, with a line per contestant of the height that each time has."""
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for panel, (layer, (n, k)) in zip(panels.flat, DEEPSEEK_V3_LAYERS.items(), strict=True):
        for name in (name for name in SHOWN if name in contestants(run)):
            points = [(s.m, height(s, us)) for s, us in times(run, name).items() if s[1:] == (n, k)]
            _plot_line(panel, points, label_of(run, name), bold=name == OURS)
        panel.set_title(f"{layer}\nn = {n}, k = {k}", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(TOKENS[::2], TOKENS[::2])
        panel.grid(alpha=0.3)
    for panel in panels[1]:
        panel.set_xlabel("m (tokens)")
    return panels


def _save(figure: Any, run: Run, path: Path) -> None:
    figure.suptitle(f"DeepSeek-V3's linear layers, {run['meta']['gpu']}, {run['meta']['date'][:10]}")
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=len(lines[0]), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _plot_line(panel: Any, points: list[tuple[int, float]], label: str, bold: bool, color: str | None = None) -> None:
    points = sorted(points)
    panel.plot(
        [m for m, _ in points],
        [height for _, height in points],
        label=label,
        color=color,
        marker="o",
        markersize=3,
        linewidth=2.5 if bold else 1.2,
        zorder=3 if bold else 2,
    )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the tables and the chart of the documents from results files.")
    parser.add_argument("results", type=Path, nargs="+", help="JSON written by bench_gemm.py, that of the chart first")
    parser.add_argument("--overhead", type=Path, help="JSON written by bench_overhead.py")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    runs = [store.load(path) for path in options.results]
    overhead = store.load(options.overhead) if options.overhead else None
    replace_between_markers(options.readme, readme_part(runs))
    replace_between_markers(options.docs / "benchmarks.md", benchmarks_part(runs[0], overhead))
    plot_speedup(runs[0], options.docs / "figures" / "speed.svg")


if __name__ == "__main__":
    main()
