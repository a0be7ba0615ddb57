"""The cost of a call beside its GPU time: warm host time, and the first call with an empty and a filled cache.

    PYTHONPATH=. python benchmarks/bench_overhead.py --out benchmarks/results/overhead.json
    PYTHONPATH=. python benchmarks/bench_overhead.py --first-calls

First calls are timed in fresh processes that share one empty cache folder: the first compiles (cold), the second loads
from disk. Where the package brings kernels (deep_tile/tools/pack.py), a third has these and another empty folder. The
second command is such a process alone. Invariant: nothing waits for the GPU inside a timed stretch of host time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import deep_tile
from benchmarks import store
from benchmarks.peers import OURS, PEERS, Call, Inputs
from benchmarks.shapes import Shape
from benchmarks.timing import describe_run
from deep_tile import _launcher, jit, launches, packaged
from deep_tile.dense import FP8_GEMM
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose

HOST_SHAPE = Shape(64, 2112, 7168)
BATCHES, CALLS_PER_BATCH = 4, 500
"""2,000 calls. The driver queues about a thousand launches and then makes the host wait, so batches are shorter."""

ALLOCATING = "deep_tile, allocating out"
PLAN = "deep_tile, prepared plan"
FIRST_CALL_SHAPES = tuple(Shape(m, 4096, 7168) for m in (1, 64, 256, 1024, 4096))


def host_us(calls: dict[str, Call]) -> dict[str, float]:
    """Wall time per call, contestants taking turns batch by batch."""
    seconds = dict.fromkeys(calls, 0.0)
    for _ in range(BATCHES):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS_PER_BATCH):
                call()
            seconds[name] += time.perf_counter() - start
            torch.cuda.synchronize()
    return {name: total * 1e6 / (BATCHES * CALLS_PER_BATCH) for name, total in seconds.items()}


def host_calls() -> tuple[dict[str, Call], dict[str, str]]:
    """Every contestant that runs `HOST_SHAPE`, and why others do not."""
    inputs = Inputs(HOST_SHAPE)
    calls, unsupported = {}, {}
    for name, peer in PEERS.items():
        try:
            calls[name] = peer.prepare(inputs)
            calls[name]()
        except Exception as error:  # A library may refuse in any way it likes.
            calls.pop(name, None)
            unsupported[name] = f"{type(error).__name__}: {error}"
    calls[ALLOCATING] = lambda: deep_tile.fp8_gemm(inputs.a, inputs.a_scale, inputs.b, inputs.b_scale)
    plan, out = deep_tile.prepare(inputs.a, inputs.a_scale, inputs.b, inputs.b_scale), inputs.new_out()
    calls[PLAN] = lambda: plan(inputs.a, inputs.a_scale, out)
    return calls | cast_calls() | linear_calls(), unsupported


def cast_calls() -> dict[str, Call]:
    """The casts, into given tensors and into new ones."""
    x = torch.randn(HOST_SHAPE.m, HOST_SHAPE.k, device="cuda", dtype=torch.bfloat16)
    calls = {}
    for name, cast in (("1x128", deep_tile.per_token_cast_to_fp8), ("128x128", deep_tile.per_block_cast_to_fp8)):
        out, scale = cast(x)
        calls[f"deep_tile, cast {name}"] = partial(cast, x, out=out, scale_out=scale)
        calls[f"deep_tile, cast {name}, allocating"] = partial(cast, x)
    return calls


def linear_calls() -> dict[str, Call]:
    """A linear layer: in one call, in two, and by torch in BF16."""
    m, n, k = HOST_SHAPE
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    b, b_scale = deep_tile.quantize_weight(w)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return {
        "deep_tile, linear": partial(deep_tile.fp8_linear, x, b, b_scale, None, out),
        "deep_tile, linear, allocating": partial(deep_tile.fp8_linear, x, b, b_scale),
        "deep_tile, cast and product, allocating": lambda: deep_tile.fp8_gemm(
            *deep_tile.per_token_cast_to_fp8(x), b, b_scale
        ),
        "deep_tile, linear as torch.ops, allocating": partial(torch.ops.deep_tile.fp8_linear, x, b, b_scale),
        "torch linear, BF16, allocating": partial(torch.nn.functional.linear, x, w),
    }


def host_parts() -> dict[str, Call]:
    """The parts of a warm `fp8_gemm`, from the call down to the driver; each contains those after it."""
    inputs = Inputs(HOST_SHAPE)
    given = (inputs.a, inputs.a_scale, inputs.b, inputs.b_scale, inputs.new_out())
    deep_tile.fp8_gemm(*given)
    bound = (*given, None)  # no bias
    signature = launches.signature(*bound)
    options, known = next(entry for entry in FP8_GEMM.launches.values() if signature in entry[1])
    launch = known[signature]
    addresses, stream = tuple(tensor.data_ptr() for tensor in given), torch.cuda.current_stream().cuda_stream
    return {
        "fp8_gemm": lambda: deep_tile.fp8_gemm(*given),
        "read, find, launch": lambda: _launcher.launch_known(FP8_GEMM.launches, options, bound),
        "launch": lambda: _launcher.launch(launch, addresses, stream),
        "(only read the tensors)": lambda: _launcher.signature(*given),
        "(only call a function)": lambda: None,
    }


def first_calls() -> list[dict[str, Any]]:
    """Milliseconds of the first and the second call of each config, GPU time included, and the kernels that the first
    one compiles, in this process.

    The very first call also lists the configs there are, and imports the compiler's bindings if it compiles.
    """
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    by_config = {}
    for shape in FIRST_CALL_SHAPES:
        by_config.setdefault(choose(GemmProblem(*shape, num_sms=num_sms)).name, shape)
    rows = []
    for config, shape in by_config.items():
        call, before = OURS.prepare(Inputs(shape)), jit.compilations()
        times = {"first_ms": _elapsed_ms(call), "second_ms": _elapsed_ms(call)}
        rows.append({"config": config, "shape": str(shape), **times, "compiled": jit.compilations() - before})
    return rows


def _elapsed_ms(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def first_calls_in_fresh_process(cache: str, packaged_kernels: bool) -> list[dict[str, Any]]:
    modules = os.pathsep.join(filter(None, sys.path))  # The child finds the same deep_tile as this process.
    settings = {"DEEP_TILE_CACHE_DIR": cache, "DEEP_TILE_PACKAGED_KERNELS": str(int(packaged_kernels))}
    environment = {**os.environ, "PYTHONPATH": modules, **settings}
    command = [sys.executable, __file__, "--first-calls"]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Host time per call and first-call times.")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--first-calls", action="store_true", help="print the first-call times of this process alone")
    options = parser.parse_args(arguments)
    if options.first_calls:
        print(json.dumps(first_calls()))
        return
    with torch.no_grad():  # as engines do
        result = measured()
    if options.out:
        store.save(options.out, result)
    Console().print_json(data=result)


def measured() -> dict:
    calls, unsupported = host_calls()
    with tempfile.TemporaryDirectory() as cache:
        first = {state: first_calls_in_fresh_process(cache, False) for state in ("cold", "disk")}
    if packaged.contents() is not None:
        with tempfile.TemporaryDirectory() as cache:
            first["packaged"] = first_calls_in_fresh_process(cache, True)
    return {
        "shape": str(HOST_SHAPE),
        "host_us": host_us(calls),
        "host_parts_us": host_us(host_parts()),
        "unsupported": unsupported,
        "first_calls": first,
        "meta": describe_run(),
    }


if __name__ == "__main__":
    main()
