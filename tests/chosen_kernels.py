"""The kernels that a test run compiles: those that the change touches (changes.py), as many as there is time for.

Whatever changed, a few are compiled that have every kind, layout, epilogue and mechanism between them. `--all-kernels`
compiles all, and `make test-kernels` does before a release.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import combinations
from random import Random

import changes
from default_kernels import EVERY_CONFIG

from deep_tile.config import GemmConfig
from deep_tile.kinds import ACTIVATIONS, BIASES, KINDS, QUANTIZED, RAW
from deep_tile.select.defaults import default_configs

if str(changes.ROOT) not in sys.path:
    sys.path.insert(0, str(changes.ROOT))
from benchmarks import same_code  # noqa: E402

MOST = 56
"""Kernels of a run that does not compile all."""

HEADERS = "include/deep_tile/"
MAKERS = (
    *("codegen", "config", "kinds", "params", "walls", "jit", "sass", "select/defaults", "select/groups"),
    "../tests/default_kernels",
)
"""Modules that decide about the text of kernels, how it is compiled, and which kernels there are."""

USERS: dict[str, Callable[[GemmConfig], bool]] = {
    "activation.cuh": lambda config: config.activation != "none",
    "grouped.cuh": lambda config: config.is_grouped,
    "quantized_output.cuh": lambda config: config.quantizes,
    "reduce.cuh": lambda config: config.split_k > 1,
    "register_b.cuh": lambda config: config.from_registers,
    "swap_ab.cuh": lambda config: config.from_registers or config.swap_ab,
    "accumulate.cuh": lambda config: not config.product.promotes,
    **dict.fromkeys(("mainloop.cuh", "promotion.cuh"), lambda config: config.product.promotes),
}
"""Products by header: which of them contain its code. All products contain the other headers that gemm.cuh includes.
Casts and the debug build are compiled in every run."""


def touched(base: str, paths: Iterable[str]) -> list[GemmConfig]:
    """Kernels with code of a header among the paths, and those whose text is another for other reasons."""
    headers = {path.removeprefix(HEADERS) for path in paths} & headers_of_products()
    makers = {os.path.normpath(f"deep_tile/{name}.py") for name in MAKERS}
    retold = _of_other_text(base) if makers & set(paths) else set()
    return [
        config
        for config in EVERY_CONFIG
        if config.name in retold or any(USERS.get(header, lambda _: True)(config) for header in headers)
    ]


@cache
def headers_of_products() -> set[str]:
    found, to_read = {"gemm.cuh"}, ["gemm.cuh"]
    while to_read:
        included = re.findall(r'#include "(\w+\.cuh)"', (changes.ROOT / HEADERS / to_read.pop()).read_text())
        to_read += set(included) - found
        found.update(included)
    return found


def _of_other_text(base: str) -> set[str]:
    """Names of kernels that the base commit lacks, or for which it generates another text with the same headers."""
    try:
        with same_code.files_of(base) as before, ThreadPoolExecutor(2) as pool:
            shutil.rmtree(before / "include")
            (before / "include").symlink_to(changes.ROOT / "include")
            old, new = pool.map(partial(same_code.listed, comments=True), (before, changes.ROOT))
    except (subprocess.CalledProcessError, SystemExit):
        return {config.name for config in EVERY_CONFIG}
    return {name for name in new if name not in old or old[name].text != new[name].text}


def features(config: GemmConfig) -> list[tuple]:
    """Features of a kernel that must each occur, alone and in pairs."""
    described = ("kind", "layout", "output", "bias", "activation", "grouping", "accumulate", "tma_store")
    mechanisms = ("split_k", "scale_blocks", "resident_b", "pairs", "block_sets", "takes_turns", "carries_descriptors")
    mechanisms = (*mechanisms, "queues_blocks", "ends_apart", "reads_runs")
    return [
        ("tile", config.block_m, config.block_n),
        ("cluster", config.cluster_m, config.cluster_n),
        *((name, getattr(config, name)) for name in (*described, *mechanisms)),
    ]


def covering(
    configs: Iterable[GemmConfig], together: int, most: int, beside: Iterable[GemmConfig] = ()
) -> list[GemmConfig]:
    """Choose few configs that have every possible set of `together` features which `beside` lacks. Greedy: the config
    with the most new sets comes next; of equal ones, that with the most accumulators, where registers are scarce."""
    bits: dict[tuple, int] = {}

    def mask(config: GemmConfig) -> int:
        return sum(1 << bits.setdefault(one, len(bits)) for one in combinations(features(config), together))

    masks = {config: mask(config) for config in configs}
    left = (1 << len(bits)) - 1
    for config in beside:
        left &= ~mask(config)
    chosen = []
    while left and len(chosen) < most:
        best = max(masks, key=lambda config: ((masks[config] & left).bit_count(), config.accumulator_registers))
        chosen.append(best)
        left &= ~masks.pop(best)
    return chosen


def drawn(count: int) -> Iterator[GemmConfig]:
    """Random legal configs, for combinations that no list contains."""
    random = Random(25)
    for _ in range(count):
        kind = random.choice([*KINDS.values()])
        made = {"tma_store": random.random() < 0.6, "kind": kind.name, "output": random.choice(kind.outputs)}
        if made["output"] != RAW:
            made |= {"bias": random.choice(BIASES), "activation": random.choice(ACTIVATIONS)}
        if kind.name == "fp8" and made["tma_store"] and random.random() < 0.5:
            made["output"] = QUANTIZED
        yield random.choice(default_configs(**made, layout=random.choice(kind.layouts)))


@cache
def chosen() -> tuple[GemmConfig, ...]:
    """The kernels of this run: some with the features that those which come first among the touched ones lack, then
    touched ones. Where git says nothing all count as touched."""
    base = changes.base()
    if base == changes.EVERYTHING:
        return tuple(dict.fromkeys((*EVERY_CONFIG, *drawn(100))))
    candidates = touched(base, changes.changed_paths(base)) if base else EVERY_CONFIG
    first = covering(candidates, 2, MOST)
    others = covering(EVERY_CONFIG, 1, MOST, beside=first[: MOST * 2 // 3])
    return tuple(dict.fromkeys((*others, *first, *candidates)))[:MOST]
