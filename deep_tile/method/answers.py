"""`explain`'s answers for groups, and for calls that are no product, as data or terminal text. No GPU, no torch."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console

from deep_tile.method import report
from deep_tile.select.hardware import Hardware
from deep_tile.select.streaming import Prediction


class Answer(NamedTuple):
    """What was asked, in words and as data, and what was found."""

    title: str
    problem: dict[str, object]
    dtype: str
    hardware: Hardware
    m: int
    found: Prediction

    @property
    def limits(self) -> list[report.Limit]:
        return report.limits(self.found.flops, self.found.tflops, self.found.bytes_moved, self.hardware)


def as_data(answer: Answer) -> report.Explanation:
    _, *asked, found = answer
    return report.data(*asked, answer.limits, found.why, dict(found.parts), found.candidates)


def show(answer: Answer, console: Console, most: int | None) -> None:
    """Print it; `most` candidates at most, None: all."""
    found, shown = answer.found, answer.found.candidates[:most]
    name, best_us, *_ = shown[0].values()
    report.headline(console, answer.title, name, sum(us for _, us in found.parts), answer.limits, found.flops)
    console.print("", f"Why: {found.why}", "", sep="\n")
    console.print(report.limit_table(answer.limits), "")
    _, _, *others = shown[0]
    title = f"{len(shown)} of {len(found.candidates)} candidates"
    made = report.table("kernel", "us", "over best", *others, title=title, spare=(*others[::-1],))
    for name, us, *sizes in map(dict.values, shown):
        made.add_row(name, f"{us:.1f}", f"{us / best_us - 1:.1%}", *map(str, sizes))
    console.print(made, "")
    console.print(report.component_table(found.parts))
