"""What `explain` and `tune` derive from an operation's description, by its own checks: a problem, or a prediction."""

from importlib import import_module

import torch

from deep_tile import api
from deep_tile.checks import Sizes
from deep_tile.config import check_sizes, round_up
from deep_tile.discovery import OPS, PRIVATE
from deep_tile.kinds import QUANTIZED, S8, USUAL, name_of
from deep_tile.method import groups as of_groups
from deep_tile.method.answers import Answer
from deep_tile.method.roofline import Derivation, derive
from deep_tile.operation import OPERATIONS, Operation
from deep_tile.problem import GemmProblem
from deep_tile.quantize import SOURCE_DTYPES
from deep_tile.select import choose, cost, tuned
from deep_tile.select.hardware import Hardware
from deep_tile.tensors import ALIGNMENT_BYTES

_DTYPES = {name: getattr(torch, dtype) for dtype, name in USUAL.items()}
"""By the names of formats and usual kinds."""


def operation_of(call: str) -> Operation:
    known = [name for name in OPS if name not in PRIVATE]
    if not isinstance(call, str) or call not in known:
        raise ValueError(f"call is {call!r}; pass one of {', '.join(known)}")
    import_module(f"deep_tile.{OPS[call]}")
    if not is_explained(OPERATIONS[call]):
        raise ValueError(f"{call} is not explained: {OPERATIONS[call].unexplained}")
    return OPERATIONS[call]


def is_explained(operation: Operation) -> bool:
    return bool(operation.groupings) or type(operation).predict is not Operation.predict


def derivation(
    sizes: dict[str, int], gpu: Hardware, num_sms: int | None, *, call: str | None = None, **made
) -> Derivation | Answer:
    """`calls.derivation`, for keywords that are given."""
    num_sms = gpu.num_sms if num_sms is None else num_sms
    check_sizes(**sizes, num_sms=num_sms)
    sizes, num_sms = {name: int(size) for name, size in sizes.items()}, int(num_sms)  # NumPy's would overflow
    if num_sms > gpu.num_sms:
        raise ValueError(f"num_sms is {num_sms}; {gpu.name} has {gpu.num_sms}")
    operation = None if call is None else operation_of(call)
    if operation is None or operation.groupings:
        problem, asked = product(sizes, num_sms, call=call, **made)
        problem, besides = _with_others(problem, asked, gpu)
        if problem.groups is not None:
            return of_groups.derive(problem, gpu, besides)
        return derive(problem, gpu, None, tuned.configs(problem.num_sms))._replace(besides=besides)
    _check(operation, sizes, made)
    dtype, out_dtype = (_dtype_of(name, made) for name in ("dtype", "output"))
    m, n, k, groups, heads = (sizes.get(name, 1) for name in ("m", "n", "k", "groups", "heads"))
    asked = Sizes(m, n, k, None, dtype, out_dtype, (None, None), "nt", "none", groups, heads)
    given, options = operation.without_memory(asked)
    operands = [x.dtype for x in given[:2]]
    if dtype not in (None, *operands):
        raise ValueError(f"dtype is {made['dtype']!r}; {call} has operands of {' and '.join(map(str, operands))}")
    given = operation.with_outs(given, options)
    operation.check(given, options)
    operation.check_memory(given, options)
    moved = sum(x.nbytes for x in given if x is not None)
    title = f"{call}: {', '.join(f'{name} = {size}' for name, size in sizes.items())} on {num_sms} SMs of {gpu.name}"
    problem, found = {"call": call, **sizes, "num_sms": num_sms}, options._replace(num_sms=num_sms)
    return Answer(title, problem, call, gpu, m, operation.predict(given, found, moved, gpu))


def product(
    sizes: dict[str, int], num_sms: int, *, call: str | None = None, dtype=None, grouping: str | None = None, **made
) -> tuple[GemmProblem, Sizes]:
    """The problem of the product named, or of the first for such operands; rows of 8 bits padded, as casts do."""
    operation = None if call is None else operation_of(call)
    if grouping is None:
        grouping = operation.groupings[0] if call else "offs" if "groups" in sizes else "none"
    if dtype is None:
        dtype = api.operands_of(operation)[0] if call else "fp8"
    m, n, k, count = (sizes.get(name, 1) for name in ("m", "n", "k", "groups"))
    rows, kind, padded = m if grouping == "counts" else m * count, api.kind_of(dtype, None), None
    if kind and kind.block_scales and not kind.packing and kind.a != S8:
        padded = round_up(rows if call == "fp8_wgrad" or grouping == "k_offs" else k, ALIGNMENT_BYTES)
    output, bias = (_dtype_of(name, made) for name in ("output", "bias"))
    asked = rows, n, k, dtype, output, (padded, padded), made.get("layout", "nt"), grouping, count, call
    operation, found = api.described(*asked, bias=bias, activation=made.get("activation"))
    _check(operation, sizes, made)
    return operation.problem_for(found, num_sms), found


def _dtype_of(name: str, made: dict) -> torch.dtype | None:
    given = made.get(name)
    found = _DTYPES.get(name_of(given), given) if isinstance(given, (str, torch.dtype)) else given
    if found is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is {given!r}; pass a torch.dtype, or one of {', '.join(_DTYPES)}")
    return found


def _check(operation: Operation, sizes: dict[str, int], made: dict) -> None:
    """Raise where the operation has other sizes, or has no such option."""
    name, options, wanted = operation.called, operation._options, operation.sizes.split()
    if {*sizes} != {*wanted}:
        raise ValueError(f"sizes are given as {', '.join(sizes)}; {name} has {', '.join(wanted)}")
    takes = {"bias": "bias" in operation.names, "activation": "activation" in options}
    if not operation.groupings:
        takes |= {"output": "out_dtype" in options, "layout": False, "grouping": False}
    for option in made:
        if not takes.get(option, True):
            raise ValueError(f"{option} is {made[option]!r}; {name} has none")


def _with_others(problem: GemmProblem, asked: Sizes, gpu: Hardware) -> tuple[GemmProblem, list[tuple[str, float]]]:
    """The product's problem, and (what, us) of what the call launches beside it."""
    if problem.output == QUANTIZED and choose.casts_apart(choose.bucketed(problem)):
        plain = choose.without_cast(problem)
        return plain, [("per_token_cast_to_fp8", cost.chained_cast_us(plain, gpu))]
    if problem.product.packing and choose.unpacks(problem):
        elements = problem.n * problem.k * (problem.groups.count if problem.groups else 1)
        return choose.in_fp8(problem), [("unpacking to FP8", cost.unpack_us(elements, problem.product.b_bytes))]
    if problem.kind == "fp8" and asked.dtype in SOURCE_DTYPES:  # the input of `fp8_linear`
        bytes_moved = problem.m * problem.k * (asked.dtype.itemsize + 1)
        return problem, [("per_token_cast_to_fp8", cost.chained_us(bytes_moved, gpu))]
    return problem, []
