"""Checks for call keywords, shared by all operations.

Types are exact: 1 equals True and would find the launches cached for True.
"""

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import NamedTuple

import torch

from deep_tile import finishes
from deep_tile.config import GemmConfig, check_alignment

SCALE_LAYOUTS = ("row", "m", "m_aligned")
SCALE_ROUNDINGS = ("none", "pow2")
DIVISIONS = ("divide", "reciprocal")


def check(options: NamedTuple) -> None:
    """Raise TypeError or ValueError for the first option that is wrong by itself."""
    for name, value in zip(options._fields, options, strict=True):
        check_one(name, value)


def check_one(name: str, value: object) -> None:
    if name in _CHECKS:
        _CHECKS[name](name, value)


def _check_type(types: tuple[type, ...], wanted: str, name: str, value: object) -> None:
    if type(value) not in types:
        raise TypeError(f"{name} is {value!r}, of type {type(value).__name__}; pass {wanted}")


def _check_choice(known: tuple[str, ...], name: str, value: object) -> None:
    if value not in known:
        quoted = [repr(each) for each in known]
        choices = " or ".join(quoted) if len(known) == 2 else f"one of {', '.join(quoted)}"
        raise ValueError(f"{name} is {value!r}; use {choices}")


def _check_config(_: str, config: object) -> None:
    if config is not None and type(config) is not GemmConfig:
        of_name = " with the numbers that its name tells" if isinstance(config, str) else ""
        raise TypeError(
            f"config must be a deep_tile.GemmConfig or None; got {type(config).__name__}. "
            f"Pass GemmConfig(block_m, block_n, stages){of_name}, or nothing to have it chosen"
        )


def _check_expected(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} is {value!r}; pass a positive int, or None")


def _check_floor(name: str, floor: object) -> None:
    if isinstance(floor, bool) or not isinstance(floor, Real):
        raise TypeError(f"{name} is {floor!r}, a {type(floor).__name__}; pass a number, such as 1e-4")
    if not 0 <= floor <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"{name} is {floor}; it must be at least 0 and finite in float32. Leave it out for the smallest, "
            "448 * 2**-126"
        )


_FLAG = partial(_check_type, (bool,), "True or False")

_CHECKS: dict[str, Callable[[str, object], None]] = {
    "accumulate": _FLAG,
    "activation": lambda _, value: finishes.check_activation(value),
    "alignment": lambda _, value: check_alignment(value),
    "amax_floor": _check_floor,
    "batch_invariant": _FLAG,
    "blocks": _FLAG,
    "clean": _FLAG,
    "config": _check_config,
    "constant_weights": _FLAG,
    "exact": partial(_check_choice, DIVISIONS),
    "expected_rows": _check_expected,
    "expected_tokens": _check_expected,
    "fast_accum": _FLAG,
    "keep_weights": _FLAG,
    "num_sms": partial(_check_type, (int, type(None)), "an int, or None for all SMs"),
    "out_dtype": lambda _, value: finishes.check_out_dtype(value, finishes.RESULT_NAMES),
    "paged": _FLAG,
    "pdl": partial(_check_type, (bool, type(None)), "True, False or None"),
    "progress": _FLAG,
    "recast": _FLAG,
    "round_scale": partial(_check_choice, SCALE_ROUNDINGS),
    "scale_layout": partial(_check_choice, SCALE_LAYOUTS),
}
"""Checks by keyword."""
