"""What surrounds a call changes no result: autocast, default devices and dtypes, and what is on while modules are
imported. Calls are those of test_modes.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import pytest
import torch
from helpers import run_python
from test_modes import Call, calls, tensors_in

import deep_tile
from deep_tile.compat import layouts


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic algorithms": deterministic,
}


def bits(result: object) -> list[torch.Tensor]:
    return [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in tensors_in(result)]


def weights() -> dict[str, Callable[[], object]]:
    """Calls about weights, which torch makes."""
    codes, exponents = torch.randint(0, 256, (32, 64), dtype=torch.uint8), torch.full((32, 4), 120, dtype=torch.uint8)
    scales, columns = torch.rand(32, 1) + 0.5, torch.rand(32, 8) + 0.5
    packed = deep_tile.pack_weight(codes, scales, format="int4_128")
    saved = {"weight_packed": codes.view(torch.int32), "weight_scale": columns[:, :4]}
    saved |= {
        "weight_shape": torch.tensor([32, 128]),
        "weight_zero_point": torch.arange(16, dtype=torch.int32).view(4, 4),
    }
    return {
        "to_blocks": lambda: deep_tile.to_blocks(codes, exponents),
        "to_blocks of nvfp4": lambda: deep_tile.to_blocks(
            codes, columns.to(torch.float8_e4m3fn), format="nvfp4", global_scale=0.5, max_error=1.0
        ),
        "pack_weight": lambda: deep_tile.pack_weight(codes, exponents),
        "pack_weight of int4": lambda: deep_tile.pack_weight(codes, scales, format="int4_128"),
        "unpack_weight of int4": lambda: deep_tile.unpack_weight(*packed),
        "read_weight": lambda: deep_tile.read_weight(saved),
        "ends_of": lambda: layouts.ends_of([3, 0, 4], torch.device("cpu")),
    }


def results(around: Callable[[], AbstractContextManager]) -> dict[str, list[torch.Tensor]]:
    seen = {}
    for name, call in every_call().items():
        fresh = call.made(torch.clone) if isinstance(call, Call) else call
        with around():
            made = fresh()
        seen[name] = bits(made)
    return seen


@cache
def every_call() -> dict[str, Callable[[], object]]:
    return calls() | weights()


@cache
def usual_results() -> dict[str, list[torch.Tensor]]:
    return results(nullcontext)


@pytest.mark.parametrize("around", AROUND.values(), ids=[*AROUND])
def test_ambient_state_changes_no_bit(around: Callable[[], AbstractContextManager]):
    seen = results(around)
    for name, wanted in usual_results().items():
        assert all(map(torch.equal, seen[name], wanted)), name


def test_modules_may_be_imported_where_tensors_are_meta():
    """A model's code imports them as it builds a model without memory."""
    code = """
import torch
codes, scale = torch.randint(0, 256, (32, 64), dtype=torch.uint8), torch.rand(32, 1)
with torch.device("meta"):
    import deep_tile
    [getattr(deep_tile, name) for name in deep_tile.__all__ if name != "distributed"]
made = deep_tile.pack_weight(codes, scale, format="int4_128")
assert (deep_tile.unpack_weight(*made)[0] == codes).all()
"""
    run_python(code)
