"""`fp8_gemm` on a Hopper GPU against any combination of its inputs: sizes, kernels, SMs, layouts, values, options.

fuzz_gpu.py does the same for as long as it is told to; here Hypothesis finds the smallest call that fails.
"""

from random import Random

import pytest
from campaign import OperandPool, load_kernels, sms_of
from fuzz_gpu import assert_right
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import USUAL, draw_call, draw_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIGS = draw_configs(Random(26), 200)
"""The default configs, and legal ones of chance that are the same in every run, so that few are compiled."""

seeds = st.integers(0, 2**31 - 1)


@st.composite
def calls(draw, **kinds):
    return draw_call(draw(st.randoms(use_true_random=False)), num_sms=sms_of(DEVICE), configs=CONFIGS, **kinds)


def any_examples(count: int):
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.fixture(scope="module")
def pool() -> OperandPool:
    """Operands, and every kernel loaded."""
    assert not load_kernels(CONFIGS, DEVICE)
    return OperandPool(max(USUAL.m, USUAL.n), USUAL.k, DEVICE, seed=25)


@given(calls(empty=True), seeds)
@any_examples(300)
def test_any_call_is_right(pool, call, seed):
    assert_right(call, pool, seed)


@given(calls(special=True), seeds)
@any_examples(200)
def test_unusual_values_reach_what_they_must_and_nothing_else(pool, call, seed):
    """Zero, denormal, huge, negative and infinite scales, and NaN."""
    assert_right(call, pool, seed)
