"""`explain` for calls without tiles to choose: thin products, logits, casts, as data or terminal text."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console

from deep_tile.method import report
from deep_tile.select.hardware import Hardware
from deep_tile.select.streaming import Prediction


class Predicted(NamedTuple):
    """The question, by an operation's name and its sizes, and the prediction."""

    call: str
    sizes: dict[str, int]
    hardware: Hardware
    num_sms: int | None
    prediction: Prediction


def as_data(derived: Predicted) -> report.Explanation:
    call, sizes, gpu, num_sms, found = derived
    problem = {"call": call, **sizes, "num_sms": num_sms or gpu.num_sms}
    candidates = [{"name": name, "time_us": us} for name, us in found.candidates]
    return report.data(problem, call, gpu, sizes["m"], _limits(derived), found.why, dict(found.parts), candidates)


def show(derived: Predicted, console: Console, most: int | None) -> None:
    call, sizes, gpu, num_sms, found = derived
    given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    title = f"{call}: {given} on {num_sms or gpu.num_sms} SMs of {gpu.name}"
    report.headline(console, title, *found.candidates[0], _limits(derived), found.flops)
    console.print("", f"Why: {found.why}", "", sep="\n")
    console.print(report.limit_table(_limits(derived)), "")
    if len(found.candidates) > 1:
        ranked = report.table(
            "kernel", "us", title=f"{len(found.candidates[:most])} of {len(found.candidates)} candidates"
        )
        for kernel, us in found.candidates[:most]:
            ranked.add_row(kernel, f"{us:.1f}")
        console.print(ranked, "")
    console.print(report.component_table(found.parts))


def _limits(derived: Predicted) -> list[report.Limit]:
    found = derived.prediction
    return report.limits(found.flops, found.tflops, found.bytes_moved, derived.hardware)
