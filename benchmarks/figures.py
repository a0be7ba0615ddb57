"""Draws the figures of README, docs/method.md, docs/experts.md and docs/training.md from the model and stored results,
but for speed.svg, which report.py draws. No GPU:

    PYTHONPATH=. python benchmarks/figures.py [--figures docs/figures]

Run it after calibrate.py, so that text, figures and model agree.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import predict, report_train, store
from benchmarks.report import CHART_COLORS, CHART_GREY, save_svg
from deep_tile.config import GemmConfig
from deep_tile.method import calls, report
from deep_tile.problem import GemmProblem
from deep_tile.select import cost
from deep_tile.select.defaults import default_configs
from deep_tile.select.hardware import H200

STAIRS = (2112, 7168)
"""n and k of the figure of waves."""

EXPERTS = store.FOLDER / "grouped_h200_2026-11-23.json"
EXPERT_DRAWS, EXPERT_WEIGHTS = "Qwen3-30B 128/128 multinomial", (1536, 2048)
"""The draws of the figure of experts, by tokens with random routing, and their n and k."""

LOSSES = store.FOLDER / "loss_100M_h100_2026-11-26.json"
"""Losses of training runs, by bench_loss.py."""

REST = "all else"
"""The part of a step with all kernels that have no part of their own."""

STAIR_CONFIGS = ("fp8_gemm_64x64x256_s6_c1x1_b1", "fp8_gemm_128x128x128_s5_c1x1", "fp8_gemm_128x192x128_s4_c1x1_b3")


def draw(folder: Path) -> list[Path]:
    """Write every figure and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"method_{name}.png" for name in ("roofline", "decode", "waves", "prediction")]
    report.plot(calls.derivation(4096, 4096, 7168), paths[0])
    report.plot(calls.derivation(64, 4096, 7168), paths[1])
    plot_waves(paths[2])
    predict.plot(predict.compare(predict.load_search()), paths[3])
    paths.append(folder / "experts.svg")
    plot_experts(paths[-1])
    paths.append(folder / "training_loss.png")
    plot_losses(paths[-1])
    steps = report_train.newest("train")
    if steps and report_train.has_parts(store.load(steps)):
        paths.append(folder / "training_step.svg")
        plot_step(steps, paths[-1])
    return paths


def plot_step(results: Path, path: Path) -> None:
    """A compiled training step by parts: profiled kernels, the rest up to the measured time."""
    from matplotlib.figure import Figure

    stored = store.load(results)
    steps = {step["variant"]: step for step in stored["entries"] if step["mode"] == "compile"}
    bf16, fp8 = steps["bf16"], steps["mlp"]
    shown = [name for name in bf16["timeline_ms"] if name != REST]
    parts = {name: [step["timeline_ms"][name] for step in (bf16, fp8)] for name in shown}
    parts[REST] = [step["ms"] - sum(step["timeline_ms"][name] for name in shown) for step in (bf16, fp8)]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    left = [0.0, 0.0]
    for (label, widths), color in zip(parts.items(), (*CHART_COLORS, "#9a6fb0", CHART_GREY), strict=True):
        bars = axes.barh(("BF16", "FP8"), widths, left=left, color=color, label=label, height=0.55)
        numbers = [f"{width:.0f}" if width >= 0.5 else "" for width in widths]
        axes.bar_label(bars, numbers, label_type="center", color="white")
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms: kernels as profiled, all else up to the step's time")
    axes.set_title(f"{stored['layers']} Llama-8B layers, {stored['tokens']} tokens, compiled, an H100", fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False, labelcolor=CHART_GREY)
    save_svg(figure, axes, path)


def plot_losses(path: Path) -> None:
    """Losses of a GPT against steps: BF16 and FP8, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    stored = store.load(LOSSES)
    recipes = list(dict.fromkeys(run["recipe"] for run in stored["runs"]))
    for run in stored["runs"]:
        color = f"C{recipes.index(run['recipe'])}"
        label = run["recipe"] if run["seed"] == stored["runs"][0]["seed"] else None
        steps = [stored["every"] * (i + 1) for i in range(len(run["losses"]))]
        axes.plot(steps, run["losses"], color=color, linewidth=0.9, label=label)
    axes.set(xlabel="steps", ylabel="loss, nats per byte", ylim=(0.9, 3))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def plot_experts(path: Path) -> None:
    """Time of a grouped product against tokens: ours, torch's row-wise one, and the estimate without padding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    stored = store.load(EXPERTS)
    draws = [
        draw
        for draw in stored["draws"]
        if draw["draw"].startswith(EXPERT_DRAWS) and (draw["n"], draw["k"]) == EXPERT_WEIGHTS
    ]
    tokens = [int(draw["draw"].split()[-1]) for draw in draws]
    labels = {"ours": "deep_tile", "torch row-wise": "torch, a scale per row", "limit": "estimate without padding"}
    for (name, label), color in zip(labels.items(), (*CHART_COLORS[:2], CHART_GREY), strict=True):
        style = "--" if name == "limit" else "o-"
        axes.plot(tokens, [draw["us"][name] for draw in draws], style, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens, 8 experts for each, at random", ylabel="us of a grouped GEMM")
    n, k = EXPERT_WEIGHTS
    axes.set_title(f"128 experts of {n}x{k}, {stored['meta']['gpu']}, {stored['meta']['date'][:10]}", fontsize=11)
    axes.grid(alpha=0.3, color=CHART_GREY)
    axes.legend(frameon=False, labelcolor=CHART_GREY)
    save_svg(figure, axes, path)


def plot_waves(path: Path) -> None:
    """Predicted time against m for a few tiles: stairs, one step per wave; and what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    configs = {config.name: config for config in default_configs()}
    for number, name in enumerate(STAIR_CONFIGS):
        _plot_stairs(axes, configs[name], f"C{number}")
    axes.set(xlim=(0, 4096), ylim=(0, None), xlabel="m", ylabel="us")
    axes.set_title(f"n = {STAIRS[0]}, k = {STAIRS[1]} on an H200: lines predicted, points measured")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _plot_stairs(axes: Any, config: GemmConfig, color: str) -> None:
    sizes = range(64, 4097, 32)
    predicted = [cost.estimate(config, GemmProblem(m, *STAIRS, H200.num_sms)).time_us for m in sizes]
    axes.plot(sizes, predicted, color=color, label=config.name)
    searched = predict.load_search()
    measured = [(s.m, us[config.name]) for s, us in searched.items() if s[1:] == STAIRS and config.name in us]
    axes.scatter(*zip(*[point for point in measured if point[0] <= 4096], strict=True), color=color, s=25)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the documents.")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    for path in draw(parser.parse_args(arguments).figures):
        print(path)


if __name__ == "__main__":
    main()
