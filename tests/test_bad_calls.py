"""Every wrong call of bad_calls.py: refused with an error that helps, and nothing is written or broken by it."""

import re
from functools import cache

import pytest
import torch
from bad_calls import BAD_CALLS, CALLS, WITHOUT_GOOD_CALLS, BadCall, Good
from helpers import Exact, assert_accurate, exact_product

from deep_tile import dequantize, fp8_gemm
from deep_tile.operation import OPERATIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about its own tensors


def refusal(bad: BadCall, good: Good) -> str:
    """The error's text, after a check of its type and of the untouched `out`."""
    function = CALLS[bad.call](good)
    with pytest.raises(Exception) as raised:
        function(**bad.arguments(good))
    assert raised.type is bad.error, f"{raised.type.__name__}: {raised.value}"
    if good.device == "cuda":
        torch.cuda.synchronize()
    good.assert_untouched()
    return str(raised.value)


@cache
def exact(device: str) -> Exact:
    """The product of every `Good`."""
    return exact_product(Good(device).operands)


def check_good_calls(good: Good) -> None:
    assert_accurate(fp8_gemm(*good.operands, torch.empty_like(good.guarded.out)), exact(good.device))
    assert (dequantize(good.quantised, good.scale) == 1).all()


def check_refused(bad: BadCall, device: str) -> None:
    """A wrong call is refused whether or not a right call like it went before."""
    good = Good(device)

    for operation in OPERATIONS.values():
        operation.launches.clear()
    first = refusal(bad, good)
    if device == "cuda":  # on the CPU nothing is remembered
        check_good_calls(good)
        if bad.call not in WITHOUT_GOOD_CALLS:
            other = Good(device)
            with torch.no_grad():
                CALLS[bad.call](other)(**other.arguments(bad.call))
    assert refusal(bad, good) == first
    check_good_calls(good)
    assert re.search(rf"\b{bad.argument}\b", first), first
    assert re.search(bad.seen, first), first
    assert re.search(bad.remedy, first), first


def test_the_table_is_one():
    assert len(BAD_CALLS) >= 60
    assert len({bad.name for bad in BAD_CALLS}) == len(BAD_CALLS)


@pytest.mark.parametrize("bad", [bad for bad in BAD_CALLS if not bad.needs], ids=lambda bad: bad.name)
def test_refused_on_the_cpu(bad):
    check_refused(bad, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_refused_on_a_gpu(bad):
    check_refused(bad, "cuda")
