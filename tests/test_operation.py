"""What the description of an operation yields, shown by toy_operation.py."""

import random
import re
from pathlib import Path

import operations_table
import pytest
import torch
from toy_operation import ROW_SUMS, row_sums

from deep_tile import operation
from deep_tile.operation import OPERATIONS, Described


def drawn(source: random.Random, operation: Described) -> tuple:
    """Inputs of a right call: sizes and dtypes follow from the description."""
    sizes = {size: source.randint(0, 9) for arg in operation.args for size in arg.shape.split()}
    inputs = [arg for place, arg in enumerate(operation.args) if place not in operation._outs]
    return tuple(torch.ones([sizes[size] for size in arg.shape.split()], dtype=arg.dtypes[0]) for arg in inputs)


def test_it_computes_on_the_cpu():
    source = random.Random(1)
    for _ in range(30):
        (x,) = drawn(source, ROW_SUMS)
        out = torch.full((len(x),), 7.0)
        assert torch.equal(row_sums(x), torch.full((len(x),), float(x.shape[1]))) and row_sums(x, out) is out
        assert torch.equal(out, row_sums(x)) and torch.equal(torch.ops.deep_tile.toy_row_sums(x), out)


def test_it_is_an_op_with_an_overload_and_a_fake():
    assert OPERATIONS["toy_row_sums"] is ROW_SUMS
    op = torch.ops.deep_tile.toy_row_sums
    assert str(op.default._schema).endswith("toy_row_sums(Tensor x, *, int? num_sms=None) -> Tensor")
    assert str(op.out._schema).endswith("toy_row_sums.out(Tensor x, Tensor(a!) out, *, int? num_sms=None) -> ()")
    x = torch.ones(3, 4)
    torch.library.opcheck(op.default, (x,), test_utils=("test_schema", "test_faketensor"))
    fast = torch.compile(row_sums, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        assert torch.equal(fast(torch.ones(rows, 4)), torch.full((rows,), 4.0))
    assert row_sums(x.to("meta")).shape == (3,)


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            ([[1.0]],),
            TypeError,
            "x is a <class 'list'>; toy_row_sums takes a tensor of torch.bfloat16 or torch.float32",
        ),
        ((X.half(),), TypeError, "x is a tensor of torch.float16"),
        ((X[0],), ValueError, r"x has shape \[4\]; it must have two dimensions, so .view\(\) it as \[r, n\]"),
        ((X.t(),), ValueError, r"unit column stride; its strides are \(1, 4\). Pass x.contiguous"),
        ((torch._neg_view(X),), TypeError, "x is a view that torch negates"),
        ((X.clone().requires_grad_(),), RuntimeError, "x requires a gradient, and toy_row_sums has none"),
        ((X, torch.ones(4)), ValueError, r"out has shape \[4\] but x \[3, 4\]; it must be \[r\] = \[3\]"),
        ((X, torch.ones(3).half()), TypeError, "out is a tensor of torch.float16"),
        ((X, torch.ones(3, device="meta")), ValueError, "out is on meta but x is on cpu"),
        ((X, None, True), TypeError, "num_sms is True, of type bool"),
    ],
)
def test_wrong_calls_are_refused(given, error, text):
    x, out, num_sms = (*given, None, None)[:3]
    with pytest.raises(error, match=text):
        row_sums(x, out, num_sms=num_sms)


def test_a_second_call_is_one_call_into_c(run_pretending):
    shown, _ = run_pretending(
        """
from toy_operation import ROW_SUMS, row_sums
def launched(given, options):
    paths.append("prepare")
    kernel = plan.load_kernel(GemmConfig(64, 64, 4), 0)
    return _launcher.prepare(kernel, grid=1, cluster=1, threads=32, params=bytes(16), names=("x", "out"),
                             pointers=((0, 0, 0), (8, 1, 0)), maps=(), fixed_maps=(), pdl=False)
ROW_SUMS.launched = launched
x = torch.zeros(3, 4)
for given in (x, x, torch.zeros(5, 4), x.half()):
    attempt(row_sums, given)
"""
    )
    assert shown[:3] == ["prepare launch", "launch_known", "prepare launch"] and shown[3].startswith("TypeError x is")


STEPS = {
    "warm call": (r"_launcher\.launch_known", {"api", "linear"}),
    "first call": (r"launches\.(enqueue|remember|find)\(", {"gemm_cast", "unpack"}),
    "reason": (r"= error_of\(", {"api"}),
    "not loaded": (r"except launches\.NotLoaded", {"linear"}),
    "op": (r"ops\.Op\(|ops\.register\(", {"dense", "linear"}),
}
"""For each step of a call, a pattern of modules that do it themselves, and those that may beside operation.py: a plan
of `api` is one launch; `fp8_linear` has a workspace, and multiplies pairs; `fp8_gemm_cast` may be two calls; two
operations have ops of gradients; `unpack` is a step of calls that have been checked."""


@pytest.mark.parametrize("step", STEPS)
def test_each_step_of_a_call_is_written_once(step):
    pattern, others = STEPS[step]
    package = Path(operation.__file__).parent
    found = {path.stem for path in package.glob("*.py") if re.search(pattern, path.read_text())}
    assert found - {"operation", "launches", "ops"} == others


def test_the_table_of_operations_is_that_of_the_page():
    page = operations_table.PAGE.read_text()
    assert operations_table.updated(page) == page, "python tests/operations_table.py --update"
