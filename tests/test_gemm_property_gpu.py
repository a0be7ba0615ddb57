"""`fp8_gemm` on a Hopper GPU against any combination of what it takes: sizes, kernels, SMs, layouts, alignments."""

import pytest
import torch
from helpers import SCALE_STRIDES, check_gemm, make_operands, rearranged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deep_tile.config import round_up
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"

sizes = st.one_of(st.integers(1, 70), st.integers(1, 700), st.sampled_from([64, 128, 192, 256, 384, 512]))
paddings = st.sampled_from([0, 0, 16, 48, 256])
layouts = st.sampled_from(sorted(SCALE_STRIDES))


@st.composite
def calls(draw):
    """Sizes, input layout, out's layout and the keywords of one call."""
    m, n = draw(sizes), draw(sizes)
    k = draw(st.one_of(sizes, st.integers(1, 2000)))
    aligned = draw(st.booleans())
    n = round_up(n, 8) if aligned else n
    kernels = (*default_configs(False), *(default_configs(True) if aligned else ()))
    config = draw(st.one_of(st.none(), st.sampled_from([kernel for kernel in kernels if kernel.takes_k(k)])))
    inputs = {
        "a_padding": draw(paddings),
        "b_padding": draw(paddings),
        "a_scale": draw(layouts),
        "b_scale": draw(layouts),
    }
    out_stride = n + draw(paddings) if aligned else n + draw(st.integers(0, 40))
    out = {"out_stride": out_stride, "out_offset": 0 if aligned else draw(st.integers(0, 7))}
    fewest_sms = config.cluster if config else 1
    num_sms = draw(st.one_of(st.none(), st.integers(fewest_sms, 20), st.integers(fewest_sms, 64)))
    return (m, n, k), inputs, {**out, "config": config, "num_sms": num_sms}


@given(calls(), st.integers(0, 2**31 - 1))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
def test_any_call_is_right(call, seed):
    shape, inputs, keywords = call
    operands = make_operands(*shape, device=DEVICE, seed=seed)
    check_gemm(rearranged(operands, **inputs), **keywords)
    torch.cuda.synchronize()
