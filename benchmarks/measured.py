"""Write deep_tile/method/measured.json: measured times of the kernels that `explain` shows.

    PYTHONPATH=. python benchmarks/measured.py

No GPU. Run it after calibrate.py, and when results come or go. The file has, for each GPU and shape of the results, the
newest time of the config that the selector chooses there. Invariant: a run without a known GPU is left out.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import Shape
from deep_tile.method.report import MEASURED
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import bucketed, candidates
from deep_tile.select.hardware import Hardware, for_device

RESULTS = Path(__file__).parent / "results"


class Timed(NamedTuple):
    """One measurement; the greatest is the newest, and of one run the slowest. BF16's is of the same run, or None."""

    date: str
    us: float
    file: str
    bf16_us: float | None


def collect(results: Path = RESULTS) -> dict[str, Any]:
    """The content of measured.json: the names of `runs`, and by GPU and shape the config, microseconds, its run, and
    the microseconds of torch's BF16 in that run."""
    newest: dict[tuple[str, str, str], Timed] = {}
    gpus: dict[str, Hardware] = {}
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text())
        run = data.get("run") or data.get("meta") or {}
        gpu = _known_gpu(run.get("gpu", ""))
        if gpu is None:
            continue
        gpus[gpu.name] = gpu
        for shape, config, us, bf16_us in _times(data):
            key, timed = (gpu.name, shape, config), Timed(run.get("date", ""), us, path.name, bf16_us)
            newest[key] = max(timed, newest.get(key, timed), key=lambda one: one[:3])
    chosen = {key: timed for key, timed in newest.items() if key[2] == _choice(gpus[key[0]], key[1])}
    return _as_data(chosen)


def _known_gpu(name: str) -> Hardware | None:
    try:
        return for_device(for_device(name).name)
    except ValueError:
        return None


def _times(data: dict[str, Any]) -> Iterator[tuple[str, str, float, float | None]]:
    """(shape, config, us, us of BF16) of a file of search.py or of bench_gemm.py."""
    for shape, by_config in data.get("us", {}).items():
        for config, us in by_config.items():
            yield shape, config, us, None
    for row in data.get("shapes", []):
        if "config" in row and "results" in row:  # products of other kinds have none
            ours, bf16 = (row["results"].get(name, {}).get("us") for name in ("deep_tile", "torch_bf16"))
            yield str(Shape(row["m"], row["n"], row["k"])), row["config"], ours, bf16


@cache
def _choice(gpu: Hardware, shape: str) -> str:
    problem = GemmProblem(*Shape.parse(shape), num_sms=gpu.num_sms)
    return candidates(bucketed(problem), gpu)[0][1].name


def _as_data(chosen: dict[tuple[str, str, str], Timed]) -> dict[str, Any]:
    runs = sorted({f"{timed.file}, {timed.date[:10]}" for timed in chosen.values()})
    gpus: dict[str, dict[str, list[str | float]]] = {}
    for (gpu, shape, config), timed in sorted(chosen.items(), key=lambda item: (item[0][0], Shape.parse(item[0][1]))):
        row = [config, round(timed.us, 3), runs.index(f"{timed.file}, {timed.date[:10]}")]
        gpus.setdefault(gpu, {})[shape] = row if timed.bf16_us is None else [*row, round(timed.bf16_us, 3)]
    return {"runs": runs, "gpus": gpus}


def as_text(data: dict[str, Any]) -> str:
    """JSON with a line for each shape."""

    def lines(rows: dict[str, Any]) -> str:
        return ",\n".join(f"  {json.dumps(shape)}: {json.dumps(row)}" for shape, row in rows.items())

    gpus = ",\n".join(f" {json.dumps(gpu)}: {{\n{lines(rows)}\n }}" for gpu, rows in data["gpus"].items())
    return f'{{"runs": {json.dumps(data["runs"])}, "gpus": {{\n{gpus}\n}}}}\n'


if __name__ == "__main__":
    MEASURED.write_text(as_text(collect()))
