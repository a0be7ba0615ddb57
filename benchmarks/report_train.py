"""The tables of docs/training.md, from results under benchmarks/results; needs no GPU.

    PYTHONPATH=. python benchmarks/report_train.py

Reads the newest `train_`, `train_layers_`, `train_experts_` and `train_casts_` file, by bench_train.py,
bench_train_layers.py, bench_train_experts.py and bench_quantize.py; without one, a table stays. Ratios are FP8's time
over BF16's of the same run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.report import MISSING, Run, markdown, replace_between_markers, wrapped
from deep_tile.select.training import predict

GPU = "h100"

VARIANTS = {
    "bf16": "BF16",
    "linear": "`Linear`",
    "mlp": "`Linear` and `mlp`",
    "mlp fp8": 'the same with `activations="fp8"`',
    "mlp recast": "the same with `recast=True`",
    "mlp fp8 recast": "the same with both",
    "torchao": "torchao, tensor-wise",
}

MODELS = {
    "qwen3": "Qwen3-30B-A3B: 128 experts, 1536x2048 and 2048x768, top 8",
    "deepseek": "a part of DeepSeek-V3: 8 experts, 4096x7168 and 7168x2048, top 2",
}

CASTS = {
    "swiglu": "`swiglu_gradient_cast_both`, gate and up in BF16",
    "cast_both": "`cast_both`",
    "cast_weight": "`cast_weight`",
    "transpose_fp8": "`transpose_fp8`",
}

SEVERAL = {"three": "three layers, by `linears`", "mlp": "`mlp`"}

SMALL = 2048
"""The most rows and columns of weights in the table of host times."""

TOKENS = 4096
"""Of the table by widths."""


def newest(name: str) -> Path | None:
    """The path of a benchmark's newest results on `GPU` that say how they were measured."""
    found = sorted(store.FOLDER.glob(f"{name}_{GPU}_*.json"))
    return next((path for path in reversed(found) if "method" in store.load(path).get("meta", ())), None)


def about(run: Run, script: str) -> str:
    meta = run["meta"]
    versions = f"torch {meta['torch']}, {meta['kernels']}, code of {meta['commit'][:7]}"
    return f"{meta['gpu']}, {meta['date'][:10]}, {versions}, by `benchmarks/{script}`."


def steps_part(run: Run) -> str:
    """Times and memory of training steps, and what takes them."""
    by_mode = {mode: {e["variant"]: e for e in run["entries"] if e["mode"] == mode} for mode in ("eager", "compile")}
    head = [label for mode in ("eager", "compiled") for label in (f"{mode}: ms", "over BF16", "GB", "over BF16")]
    rows = [["", *head]]
    for variant, title in VARIANTS.items():
        cells = [_of_step(of_mode.get(variant), of_mode.get("bf16")) for of_mode in by_mode.values()]
        if any(cells):
            rows.append([title, *(cell for four in cells for cell in four or [MISSING] * 4)])
    static = by_mode["eager"]["bf16"]["static_gb"]
    text = (
        f"{about(run, 'bench_train.py')} {run['layers']} Llama-8B layers, {run['tokens']:,} tokens, forward, backward "
        f"and fused AdamW; memory is a step's peak less parameters and optimiser state, {static:.1f} GB:"
    )
    table = f"{wrapped(text)}\n\n{markdown(rows)}"
    return f"{table}\n\n{wrapped(_of_parts(by_mode['compile']))}" if has_parts(run) else table


def has_parts(run: Run) -> bool:
    return all("timeline_ms" in entry for entry in run["entries"])


def _of_step(entry: dict | None, bf16: dict | None) -> list[str]:
    if entry is None or bf16 is None:
        return []
    used, used_bf16 = (each["peak_gb"] - each["static_gb"] for each in (entry, bf16))
    return [f"{entry['ms']:.1f}", _ratio(entry["ms"], bf16["ms"]), f"{used:.2f}", _ratio(used, used_bf16)]


def _of_parts(compiled: dict[str, dict]) -> str:
    bf16, fp8 = (compiled[name]["timeline_ms"] for name in ("bf16", "mlp"))
    parts = [f"{name} {bf16[name]:.1f} and {fp8[name]:.1f}" for name in bf16]
    return f"Kernels of a compiled step in BF16 and with `mlp`, in ms: {', '.join(parts)}."


def layers_part(run: Run) -> str:
    """Ratios of layers by widths, and host times of small ones."""
    of_linear = [entry for entry in run["entries"] if entry["of"] == "linear"]
    by_size = {(e["n"], e["k"]): e for e in of_linear if e["tokens"] == TOKENS}
    widths = sorted({n for n, _ in by_size})
    grid = [["n \\ k", *map(str, widths)]]
    for n in widths:
        entries = [by_size.get((n, k)) for k in widths]
        grid.append([str(n), *(MISSING if e is None else _ratio(*_graphs(e)) for e in entries)])
    head = ("tokens, n x k", "host: BF16", "FP8, separate calls", "FP8", "eager: BF16", "FP8", "over BF16")
    small = [[*head, "CUDA graph: BF16", "FP8", "over BF16", "predicted"]]
    small += [_of_small(e) for e in of_linear if max(e["n"], e["k"]) <= SMALL]
    text = f"{about(run, 'bench_train_layers.py')} Forward and backward pass in a CUDA graph, over BF16's time, "
    host = 'Times in us; "host" is the time to enqueue a forward and backward pass, the forward pass alone in brackets:'
    return "\n\n".join(
        (wrapped(f"{text}{TOKENS:,} tokens:"), markdown(grid), wrapped(host), markdown(small), _of_left(of_linear))
    )


def _of_left(entries: list[dict]) -> str:
    """Which layers were slower in FP8, and whether the model leaves them in BF16."""
    slower = [e for e in entries if (graphs := _graphs(e))[0] >= graphs[1]]
    left = [e for e in slower if not predict(e["tokens"], e["n"], e["k"]).pays]
    named = ", ".join(f"{e['tokens']:,} tokens {e['n']}x{e['k']} ({_ratio(*_graphs(e))})" for e in slower)
    text = f"{len(slower)} of {len(entries)} layers are slower in FP8; {len(left)} of these stay in BF16 by default"
    return wrapped(f"{text}: {named}.")


def _graphs(entry: dict) -> tuple[float, float]:
    return entry["joined, graph"], entry["bf16, graph"]


def _of_small(entry: dict) -> list[str]:
    def host(way: str) -> str:
        both = entry.get(f"{way}, host")
        return MISSING if both is None else f"{both:.0f} ({entry[f'{way} forward, host']:.0f})"

    cells = [f"{entry['tokens']:,}, {entry['n']}x{entry['k']}", *map(host, ("bf16", "in turn", "joined"))]
    for what in ("eager", "graph"):
        bf16, fp8 = (entry[f"{way}, {what}"] for way in ("bf16", "joined"))
        cells += [f"{bf16:.0f}", f"{fp8:.0f}", _ratio(fp8, bf16)]
    predicted = predict(entry["tokens"], entry["n"], entry["k"])
    return [*cells, _ratio(predicted.fp8_us, predicted.bf16_us)]


def several_part(run: Run) -> str:
    """Times of small layers on one input, and of MLPs of them."""
    rows = [
        ["", "tokens, n x k", "eager, us: BF16", "FP8, separate calls", "FP8", "over BF16", "CUDA graph, over BF16"]
    ]
    for e in (entry for entry in run["entries"] if entry["of"] in SEVERAL):
        us = [e[f"{way}, eager"] for way in ("bf16", "in turn", "joined")]
        sizes, ratios = f"{e['tokens']:,}, {e['n']}x{e['k']}", (_ratio(us[2], us[0]), _ratio(*_graphs(e)))
        rows.append([SEVERAL[e["of"]], sizes, *(f"{each:.0f}" for each in us), *ratios])
    return f"{wrapped(about(run, 'bench_train_layers.py'))}\n\n{markdown(rows)}"


def frozen_part(run: Run) -> str:
    rows = [["frozen layer, n x k", "forward and dx, over BF16", "as a CUDA graph", "bytes of weights"]]
    for e in (entry for entry in run["entries"] if entry["of"] == "frozen"):
        ratios = [_ratio(e[f"fp8, {what}"], e[f"bf16, {what}"]) for what in ("eager", "graph", "bytes")]
        rows.append([f"{e['n']}x{e['k']}", *ratios])
    return f"{wrapped(about(run, 'bench_train_layers.py') + ' 8,192 tokens:')}\n\n{markdown(rows)}"


def experts_part(run: Run) -> str:
    head = [label for mode in ("compiled", "eager") for label in (f"{mode}: BF16", "FP8", "over BF16")]
    rows = [["", *head, "compiled, GB: BF16", "FP8"]]
    for model, title in MODELS.items():
        found = {(e["mode"], e["recipe"]): e for e in run["entries"] if e["model"] == model}
        cells = []
        for mode in ("compile", "eager"):
            pair = [found.get((mode, recipe)) for recipe in ("bf16", "fp8")]
            of_pair = [MISSING if e is None else f"{e['ms']:.1f} ms" for e in pair]
            cells += [*of_pair, MISSING if None in pair else _ratio(pair[1]["ms"], pair[0]["ms"])]
        memory = [found.get(("compile", recipe)) for recipe in ("bf16", "fp8")]
        cells += [MISSING if e is None else f"{e['peak_gb'] - e['static_gb']:.2f}" for e in memory]
        rows.append([title, *cells])
    text = f"{about(run, 'bench_train_experts.py')} {run['tokens']:,} tokens; memory is a step's peak less weights:"
    return f"{wrapped(text)}\n\n{markdown(rows)}"


def casts_part(run: Run) -> str:
    rows = [["", "rows x columns", "us", "a copy of as many bytes, us", "ratio"]]
    for cast, title in CASTS.items():
        for e in (entry for entry in run["casts"] if entry["cast"] == cast):
            sizes = f"{e['rows']}x{e['columns']}"
            rows.append([title, sizes, f"{e['us']:.0f}", f"{e['copy_us']:.0f}", _ratio(e["us"], e["copy_us"])])
    return f"{wrapped(about(run, 'bench_quantize.py'))}\n\n{markdown(rows)}"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}"


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "steps": ("train", steps_part),
    "layers": ("train_layers", layers_part),
    "several": ("train_layers", several_part),
    "frozen": ("train_layers", frozen_part),
    "experts": ("train_experts", experts_part),
    "casts": ("train_casts", casts_part),
}
"""The page's parts by their markers: of which results, and by what."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of docs/training.md from stored results.")
    parser.add_argument("--page", type=Path, default=Path("docs/training.md"))
    page = parser.parse_args().page
    for name, (results, part) in PARTS.items():
        if path := newest(results):
            replace_between_markers(page, part(store.load(path)), name)
            print(f"{name}: {path.name}")


if __name__ == "__main__":
    main()
