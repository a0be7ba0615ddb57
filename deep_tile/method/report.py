"""`explain` for products: from m, n, k to a kernel, step by step, as data, as text for a terminal, or as a picture.

It computes nothing: it shows roofline.py's derivation, which is the selector's. No GPU, no torch; matplotlib only for
the picture.
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

from deep_tile.kinds import EVERY_KIND, PACKED
from deep_tile.method.roofline import Candidate, Derivation, Tile, judged, stored_bytes_of
from deep_tile.select import cost, schedule, tuned
from deep_tile.select import hardware as gpus
from deep_tile.select.choose import bucket_key, choose, unpacks
from deep_tile.select.cost import Estimate
from deep_tile.select.hardware import Hardware, operand_bytes_of
from deep_tile.walls import Wall, product_flops

MEASURED = Path(__file__).parent / "measured.json"
"""Measurements of the chosen configs, written by benchmarks/measured.py."""


ALIGNMENT = 16
"""Operand row alignment in bytes, as in tensors.py, which imports torch."""


class Measured(NamedTuple):
    """One stored measurement of a config on a problem, and torch's BF16 in the same run, if measured."""

    us: float
    tflops: float
    source: str
    bf16_us: float | None


Row = dict[str, int | float | str | bool | None]
"""Numbers, names and sentences, as JSON has them."""


class Explanation(TypedDict):
    """Result of `explain`, described there."""

    problem: dict[str, object]
    dtype: str
    hardware: dict[str, object]
    decided_for_m: int
    config: str
    why: str
    walls: list[Row]
    limits: dict[str, float]
    predicted: dict[str, float]
    measured: Row | None
    candidates: list[Row]
    rejected: list[Row]


Limit = tuple[str, float, str]
"""What memory or tensor cores alone would take: which, microseconds and their arithmetic."""


def limits(flops: int, tflops: float, bytes_moved: float, gpu: Hardware) -> list[Limit]:
    """Those of HBM, and of tensor cores at the rate under load."""
    hbm, tensor = f"{bytes_moved:.3e} bytes / {gpu.hbm_tbps:.3g} TB/s", f"{flops:.3e} FLOP / {tflops:.0f} TFLOPS"
    return [("HBM", bytes_moved / gpu.hbm_tbps / 1e6, hbm), ("tensor cores", flops / tflops / 1e6, tensor)]


def data(problem: dict, dtype: str, gpu: Hardware, m: int, limits: list[Limit], *found) -> Explanation:
    """An explanation without walls; `found` are why, the predicted times and the candidates."""
    why, predicted, candidates = found
    return {
        **{"problem": problem, "dtype": dtype, "hardware": hardware_data(gpu), "decided_for_m": m},
        **{"config": candidates[0]["name"], "why": why, "walls": [], "limits": {name: us for name, us, _ in limits}},
        **{"predicted": predicted, "measured": None, "candidates": candidates, "rejected": []},
    }


def as_data(derived: Derivation) -> Explanation:
    measured = measurement(derived)
    candidates = [_candidate_data(derived, candidate) for candidate in derived.candidates]
    asked = derived.problem._asdict(), derived.dtype, derived.hardware, derived.bucket.m, _limits(derived)
    return data(*asked, why(derived), dict(components(derived)), candidates) | {
        "walls": [wall._asdict() for wall in (*derived.walls, *derived.choice.tile.walls)],
        "measured": measured and measured._asdict(),
        "rejected": [rejected._asdict() for rejected in derived.rejected],
    }


def hardware_data(gpu: Hardware) -> dict[str, object]:
    described = gpus.describe(gpu)
    return {"name": gpu.name, **{name: {"value": value, "source": source} for name, value, source in described}}


def _candidate_data(derived: Derivation, candidate: Candidate) -> Row:
    config, tile, estimate = candidate
    walls = {wall.name: wall for wall in tile.walls}
    return {
        **asdict(config),
        "name": _name(derived, candidate),
        **estimate._asdict(),
        "grid": schedule.grid_size(config, derived.problem),
        "block_k": tile.block_k,
        "accumulators": tile.accumulators,
        "temporaries": tile.temporaries,
        "stage_bytes": tile.stage_bytes,
        "smem_bytes": tile.smem_bytes,
        "stages_min": tile.stages_min,
        "stages_max": tile.stages_max,
        "intensity_l2": walls["intensity (L2)"].value,
        "intensity_smem": walls["intensity (shared memory)"].value,
    }


def components(derived: Derivation) -> list[tuple[str, float]]:
    """(what, us), which add up to the choice's predicted time."""
    config, _, estimate = derived.choice
    parts = cost.compute_parts(config, judged(derived.bucket, derived.dtype), derived.hardware)
    launch_us = cost.launch_time(derived.hardware)
    return [
        ("launch", launch_us),
        ("K blocks of all waves", parts.blocks_us),
        ("rest of the tiles: fill, scale, store", parts.tiles_us),
        ("gained beside idle SMs", parts.idle_us),
        ("lost to the power limit", parts.throttle_us),
        ("memory that computing does not hide", estimate.time_us - launch_us - estimate.compute_us),
        *derived.besides,
    ]


def _name(derived: Derivation, candidate: Candidate) -> str:
    """The kernel's, or the tile's where there is no kernel."""
    tile = candidate.tile
    if derived.dtype in EVERY_KIND:
        return candidate.config.name
    return f"{derived.dtype}_{tile.block_m}x{tile.block_n}x{tile.block_k}_s{tile.stages}"


def why(derived: Derivation) -> str:
    rows = [{"name": _name(derived, each), "time_us": each.estimate.time_us} for each in derived.candidates[:2]]
    fastest_us = min(each.estimate.time_us for each in derived.candidates)
    return reason(rows, [_estimate_text(each.estimate) for each in derived.candidates[:2]], fastest_us)


def reason(candidates: list[Row], texts: list[str], fastest_us: float = inf) -> str:
    """Why the first candidate beats the second; `texts` say what is predicted of them."""
    first, *others = candidates
    if first["time_us"] > min((fastest_us, *(other["time_us"] for other in others))):
        return f"{first['name']} was measured fastest here, though others are predicted faster: {texts[0]}."
    text = f"{first['name']} has the shortest predicted time: {texts[0]}."
    if not others:
        return text
    slower = others[0]["time_us"] / first["time_us"] - 1
    if slower == 0:
        return f"{text} {others[0]['name']} is predicted equal, and comes later in the list."
    return f"{text} Next is {others[0]['name']}, {slower:.1%} slower: {texts[1]}."


def _estimate_text(estimate: Estimate) -> str:
    waves = "1 wave" if estimate.waves == 1 else f"{estimate.waves} waves"
    return f"{estimate.time_us:.1f} us, bound by {estimate.bound}, {waves} at {estimate.utilization:.0%} of the SMs"


# ---- stored measurements


def measurement(derived: Derivation) -> Measured | None:
    """The newest stored measurement of the choice on this problem and GPU, if any."""
    config, problem, gpu = derived.choice.config, derived.problem, derived.hardware
    if derived.dtype not in EVERY_KIND or problem.num_sms != gpu.num_sms or derived.besides:
        return None
    stored = _stored()
    key = bucket_key(judged(problem, derived.dtype))
    name, us, run, *bf16_us = stored["gpus"].get(gpu.name, {}).get(key, (None, 0.0, 0))
    if name != config.name:
        return None
    flops = product_flops(problem.m, problem.n, problem.k)
    return Measured(us, flops / us / 1e6, stored["runs"][run], bf16_us[0] if bf16_us else None)


@lru_cache(maxsize=1)
def _stored() -> dict[str, Any]:
    return json.loads(MEASURED.read_text())


# ---- for a terminal


def show(derived: Derivation, console: Console, most: int | None) -> None:
    problem, choice, gpu = derived.problem, derived.choice, derived.hardware
    m, n, k, num_sms, *_ = problem
    title = f"{m}x{n}x{k} in {derived.dtype} on {num_sms} SMs of {gpu.name}"
    us = sum(us for _, us in components(derived))
    flops, measured, said = product_flops(m, n, k), measurement(derived), []
    if measured:
        said.append(
            f"Measured:  {measured.us:.1f} us, {measured.tflops:.0f} TFLOPS ({measured.source}); the prediction is "
            f"{us / measured.us - 1:+.1%} off"
        )
    headline(console, title, _name(derived, choice), us, _limits(derived), flops, said)
    if derived.bucket.m != m:
        console.print(f"Decided for m = {derived.bucket.m}, as for every m that rounds up to it.")
    for line in _notes(derived):
        console.print(line)
    console.print("", f"Why: {why(derived)}", "", sep="\n")
    console.print(_wall_table(derived), "")
    console.print(_candidate_table(derived, derived.candidates[:most]), "")
    console.print(component_table(components(derived)))


def headline(
    console: Console, title: str, kernel: str, us: float, limits: list[Limit], flops: int, said: Iterable[str] = ()
) -> None:
    console.print(title, style="bold")
    console.print(f"Kernel:    {kernel}")
    console.print(f"Predicted: {us:.1f} us, {flops / us / 1e6:.0f} TFLOPS")
    for line in said:
        console.print(line)
    name, limit_us, _ = max(limits, key=lambda each: each[1])
    console.print(f"Limit:     {limit_us:.1f} us ({name} alone); predicted is {us / limit_us:.2f} times that")


def _limits(derived: Derivation) -> list[Limit]:
    problem, gpu = derived.problem, derived.hardware
    flops = product_flops(problem.m, problem.n, problem.k)
    return limits(flops, gpu.tflops(derived.dtype), flops / derived.walls[0].value, gpu)


def _notes(derived: Derivation) -> Iterable[str]:
    gpu, assumed = derived.hardware, ("scaled", "assumed")
    row_bytes = derived.problem.k * operand_bytes_of(derived.dtype)
    if row_bytes % ALIGNMENT:
        yield f"No call takes dense operands of that k: rows of {row_bytes} bytes are no multiple of {ALIGNMENT}."
    unmeasured = [name for name, _, source in gpus.describe(gpu) if source in assumed]
    if "given" in gpu.sources.values():
        yield f"Times are those of an H200, scaled to {gpu.name} by tensor rate, clock and bandwidth."
    elif gpu.source("fp8_tflops") in assumed:
        yield (
            f"Times are those of an H200, scaled to {gpu.name} by tensor rate, clock and bandwidth. Not measured "
            f"there: {', '.join(unmeasured)}; `doctor --measure` measures most of them."
        )
    if gpu.smem_bytes < gpus.H200.smem_bytes:
        yield "Kernels whose stages do not fit are shown with fewer, and with the times that they take with all."
    if derived.dtype not in EVERY_KIND:
        yield f"There is no {derived.dtype} kernel; times are those of FP8 tiles whose stages have as many bytes."
        return
    if derived.dtype in PACKED:
        yield "Times are those of fp8 tiles, or of the conversion to FP8 where that takes longer."
        if unpacks(judged(derived.problem, derived.dtype)):
            yield "packed_gemm unpacks this weight to FP8 first, which `--call packed_gemm` explains."
    elif not cost.is_measured(derived.dtype):
        like = cost.times_of(derived.dtype)
        yield f"Times are those of {like} tiles whose stages have as many bytes; {derived.dtype} was not measured."
    if gpu != gpus.H200:
        used = choose(judged(derived.problem, derived.dtype), tuned.configs(derived.problem.num_sms))
        if used != derived.choice.config:
            yield f"By itself the call takes {used.name}, as for an H200 with as many SMs; `config=` overrides it."


def _stage_operands(made: Tile) -> tuple[float, str]:
    """Bytes of a tile's operands in memory, and how they are counted."""
    a_bytes, b_bytes = stored_bytes_of(made.dtype)
    operands = (made.block_m * a_bytes + made.block_n * b_bytes) * made.block_k
    if a_bytes == b_bytes:
        return operands, f"({made.block_m} + {made.block_n}) x {made.block_k} x {a_bytes:g}"
    return operands, f"({made.block_m} x {a_bytes:g} + {made.block_n} x {b_bytes:g}) x {made.block_k}"


def _wall_table(derived: Derivation) -> Table:
    choice, gpu = derived.choice.tile, derived.hardware
    walls = {wall.name: wall for wall in choice.walls}
    size = f"{choice.block_m}x{choice.block_n}x{choice.block_k}"
    made = table("wall", "", "arithmetic", numbers=False)
    made.add_row("HBM, the problem", mark(derived.walls[0]), derived.walls[0].reason)
    registers = f"{size}: {walls['register'].reason}{_hit_by(derived, 'register')}"
    made.add_row("registers", mark(walls["register"]), registers)
    operands, arithmetic = _stage_operands(choice)
    fixed = choice.smem_bytes - choice.stages * choice.stage_bytes
    made.add_row(
        "capacity",
        mark(walls["capacity"]),
        f"{arithmetic} = {operands:g} bytes of operands, {choice.stage_bytes} a stage with scales and barriers; "
        f"({gpu.smem_bytes} - {fixed}) / {choice.stage_bytes} = {choice.stages_max} stages at most, "
        f"{choice.stages} used{_hit_by(derived, 'capacity')}",
    )
    made.add_row("L2, the tile", mark(walls["intensity (L2)"]), walls["intensity (L2)"].reason)
    smem = walls["intensity (shared memory)"]
    made.add_row("shared memory, WGMMA", mark(smem), smem.reason)
    made.add_row("latency", mark(walls["latency"]), walls["latency"].reason)
    made.add_row("Little's law", mark(walls["Little's law"]), walls["Little's law"].reason)
    config, estimate, bucket = derived.choice.config, derived.choice.estimate, derived.bucket
    tiles = schedule.cluster_tiles(config, bucket)
    units = "tiles" if config.cluster == 1 else f"clusters of {config.cluster}"
    slots = schedule.cluster_slots(config, bucket.num_sms)
    made.add_row(
        "waves",
        "",
        f"{tiles} {units} over {slots} slots: {estimate.waves} waves, {estimate.utilization:.0%} full",
    )
    return made


def _hit_by(derived: Derivation, wall: str) -> str:
    """The grid's tiles that hit this wall, as a sentence's end."""
    rejected = [one for one in derived.rejected if one.wall == wall]
    hit = "; ".join(f"{one.block_m}x{one.block_n} by {one.reason.rpartition('by ')[2]}" for one in rejected)
    return f". {len(rejected)} {'tile hits' if len(rejected) == 1 else 'tiles hit'} it: {hit}" if rejected else ""


def mark(wall: Wall) -> str:
    return "holds" if wall.holds else "bound" if wall.name.startswith("intensity") else "hit"


def _candidate_table(derived: Derivation, shown: list[Candidate]) -> Table:
    title = f"{len(shown)} of {len(derived.candidates)} candidates, by predicted time"
    columns = ("us", "over best", "bound by", "waves", "full", "registers", "KiB/stage", "stages", "FLOP/byte L2")
    spare = ("FLOP/byte L2", "KiB/stage", "stages", "registers", "full")
    made = table("config" if derived.dtype in EVERY_KIND else "tile", *columns, title=title, spare=spare)
    best_us = shown[0].estimate.time_us
    for candidate in shown:
        _, tile, estimate = candidate
        made.add_row(
            _name(derived, candidate),
            f"{estimate.time_us:.1f}",
            f"{estimate.time_us / best_us - 1:.1%}",
            estimate.bound,
            str(estimate.waves),
            f"{estimate.utilization:.0%}",
            f"{tile.accumulators}+{tile.temporaries}",
            f"{tile.stage_bytes / 1024:.1f}",
            f"{tile.stages_min}..{tile.stages}..{tile.stages_max}",
            f"{tile.wall('intensity (L2)').value:.0f}",
        )
    made.caption = "registers: accumulators + one K block's; stages: fewest by latency, used, most by capacity"
    return made


def component_table(parts: list[tuple[str, float]]) -> Table:
    made = table("predicted time", "us", "share")
    total = sum(us for _, us in parts)
    for what, us in parts:
        if abs(us) >= 0.005 * total:
            made.add_row(what, f"{us:.1f}", f"{us / total:.0%}")
    made.add_row("in all", f"{total:.1f}", "", style="bold")
    return made


def limit_table(limits: list[Limit]) -> Table:
    made = table("limit", "us", "arithmetic", numbers=False)
    for name, us, arithmetic in limits:
        made.add_row(name, f"{us:.1f}", arithmetic)
    return made


class FittingTable(Table):
    """A table that drops `spare` columns, in that order, if the terminal is too narrow."""

    spare: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for header in self.spare:
            if Measurement.get(console, options.update(max_width=10**6), self).maximum <= options.max_width:
                break
            kept = (column for column in self.columns if column.header != header)
            self.columns = [replace(column, _index=index) for index, column in enumerate(kept)]
            if isinstance(self.caption, str):  # "column: what it means; another: ..."
                parts = self.caption.split("; ")
                self.caption = "; ".join(part for part in parts if not part.startswith(f"{header}:")) or None
        yield from super().__rich_console__(console, options)


def table(
    first: str, *others: str, title: str | None = None, numbers: bool = True, spare: tuple[str, ...] = ()
) -> FittingTable:
    """Columns after the first hold numbers, set to the right and never folded, unless told otherwise."""
    style = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    made = FittingTable(title=title, title_justify="left", title_style="bold", caption_justify="left", **style)
    made.spare = spare
    made.add_column(first, no_wrap=True)
    for header in others:
        made.add_column(header, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    return made


# ---- the picture


def picture_path(text: str) -> Path:
    """--plot's argument: the file to draw, a PNG unless its name says otherwise. A folder is refused, and a file in one
    that does not exist."""
    path = Path(text)
    if path.is_dir() or text.endswith("/"):
        raise ArgumentTypeError(f"{text!r} is a folder; name a file in it, such as {path / 'roofline.png'}")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{text!r} is in no folder that exists; make {path.parent} first")
    return path if path.suffix else path.with_name(f"{path.name}.png")


def plot(derived: Derivation, path: str | Path) -> None:
    """Write the roofline as an image: bandwidths and the tensor rate, the problem, the candidates' tiles.

    A point's x is the intensity for its roof: FLOP per HBM byte for the problem, FLOP per L2 byte for a tile. Its
    height is the GEMM's predicted TFLOPS, and the measured value if stored. L2 has two lines: its roof, and, dashed,
    the estimate without sharing between tiles, which real tiles exceed.
    """
    from matplotlib.figure import Figure  # explain without a picture does not wait for it

    gpu, problem = derived.hardware, derived.problem
    flops, peak = product_flops(problem.m, problem.n, problem.k), gpu.tflops(derived.dtype)
    tiles = [(c.tile.wall("intensity (L2)").value, flops / c.estimate.time_us / 1e6) for c in derived.candidates]
    at = derived.walls[0].value
    low, high = min(at, *(x for x, _ in tiles), peak / gpu.smem_tbps) / 3, max(at, peak / gpu.hbm_tbps) * 5
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    roofs = (
        ("HBM", gpu.hbm_tbps, "tab:blue", "-"),
        ("L2, nothing shared", gpu.l2_tbps, "tab:orange", "--"),
        ("L2, all shared", gpu.l2_shared_tbps, "tab:orange", "-"),
        ("shared memory", gpu.smem_tbps, "tab:green", "-"),
    )
    for name, tbps, color, style in roofs:
        corners = [low, peak / tbps, high], [low * tbps, peak, peak]
        axes.plot(*corners, color=color, linestyle=style, label=f"{name}, {tbps:.3g} TB/s")
    axes.axhline(gpu.peak(derived.dtype), color="black", linewidth=0.8, linestyle=":", label="datasheet's tensor rate")
    axes.scatter(*zip(*tiles, strict=True), s=14, color="tab:orange", alpha=0.5, label="candidates' tiles, against L2")
    axes.scatter(*tiles[0], s=70, marker="D", color="tab:orange", edgecolor="black", label="the choice's tile")
    problem_style = {"s": 90, "marker": "*", "color": "tab:blue", "edgecolor": "black"}
    axes.scatter(at, tiles[0][1], label="the problem, against HBM", **problem_style)
    measured = measurement(derived)
    if measured:
        label = f"measured, {measured.tflops:.0f} TFLOPS"
        axes.scatter(at, measured.tflops, s=60, marker="x", color="black", label=label, zorder=3)
    lowest = min(rate for _, rate in tiles)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(lowest, peak / 30) / 2, peak * 2.2))
    axes.set(xlabel="FLOP per byte through the level", ylabel="TFLOPS")
    axes.set_title(f"{problem.m} x {problem.n} x {problem.k}, {derived.dtype}, {gpu.name}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="lower right")
    caption = (
        "Across: FLOP per byte, of the star through HBM, of tiles through L2. Up: predicted TFLOPS of the whole GEMM."
    )
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=150)
