"""The form of the files under benchmarks/results: JSON with one line per entry, so that two of them can be compared.

Used by every script that writes or reads results, and by tests/run_gpu.py; needs no GPU and no torch.
"""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
"""The folder of stored results: all that code, tests or documents read."""

DIGITS = 6
"""Significant ones of a number that is kept. Clocks here resolve four."""


def load(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


def save(path: str | Path, data: dict[str, Any]) -> None:
    """Write `data`: a line for each entry of its dicts and lists. The file is replaced at once, never half written."""
    members = ",\n".join(f" {json.dumps(name)}: {_entries(value)}" for name, value in rounded(data).items())
    temporary = Path(f"{path}.tmp")
    temporary.write_text(f"{{\n{members}\n}}\n")
    os.replace(temporary, path)


def _entries(value: Any) -> str:
    """A value of the outermost dict; its entries take a line each."""
    if isinstance(value, dict):
        brackets, entries = "{}", [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
    elif isinstance(value, list):
        brackets, entries = "[]", [json.dumps(entry) for entry in value]
    else:
        return json.dumps(value)
    lines = ",\n".join(f"  {entry}" for entry in entries)
    return f"{brackets[0]}\n{lines}\n {brackets[1]}" if entries else brackets


def rounded(value: Any) -> Any:
    """With `DIGITS` of every number."""
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
