"""`explain`'s answers for groups, and for calls that are no product, as data or terminal text. No GPU, no torch."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console

from deep_tile.method import report
from deep_tile.select.hardware import Hardware


class Answer(NamedTuple):
    """A question and its answer, without walls.

    Attributes:
        title, problem, dtype, hardware, m: what was asked, in words and as data.
        limits, flops: of the problem without padding.
        candidates: {name, time_us, ...}, the choice first.
        parts: (what, us), which add up to the call's time.
        why: a sentence.
    """

    title: str
    problem: dict[str, object]
    dtype: str
    hardware: Hardware
    m: int
    limits: list[report.Limit]
    flops: int
    candidates: list[report.Row]
    parts: list[tuple[str, float]]
    why: str


def as_data(answer: Answer) -> report.Explanation:
    _, *asked, limits, _, candidates, parts, why = answer
    return report.data(*asked, limits, why, dict(parts), candidates)


def show(answer: Answer, console: Console, most: int | None) -> None:
    """Print it; `most` candidates at most, None: all."""
    first, *_ = shown = answer.candidates[:most]
    us = sum(us for _, us in answer.parts)
    report.headline(console, answer.title, first["name"], us, answer.limits, answer.flops)
    console.print("", f"Why: {answer.why}", "", sep="\n")
    console.print(report.limit_table(answer.limits), "")
    others = [name for name in first if name not in ("name", "time_us")]
    title = f"{len(shown)} of {len(answer.candidates)} candidates"
    made = report.table("kernel", "us", "over best", *others, title=title, spare=(*others[::-1],))
    for row in shown:
        over = f"{row['time_us'] / first['time_us'] - 1:.1%}"
        made.add_row(row["name"], f"{row['time_us']:.1f}", over, *(str(row[name]) for name in others))
    console.print(made, "")
    console.print(report.component_table(answer.parts))
