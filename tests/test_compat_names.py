"""Every function of DeepGEMM 2.6.1 and of its release 26/09 that Hopper has: served, nothing to do, or refused by name.

Names as they were read in 2026 in its `__init__.py`, `mega` and `utils`.
"""

import pytest
import torch
from helpers import make_operands

import deep_tile
from deep_tile.compat import deep_gemm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

PRODUCTS = [
    *(f"fp8{kind}_gemm_{layout}" for kind in ("", "_fp4") for layout in ("nt", "nn", "tn", "tt")),
    *(f"bf16_gemm_{layout}" for layout in ("nt", "nn", "tn", "tt")),
    *(f"cublaslt_gemm_{layout}" for layout in ("nt", "nn", "tn", "tt")),
    *(f"m_grouped_fp8{kind}_gemm_nt_contiguous" for kind in ("", "_fp4")),
    *(f"m_grouped_fp8{kind}_gemm_nn_contiguous" for kind in ("", "_fp4")),
    *(f"m_grouped_fp8{kind}_gemm_nt_masked" for kind in ("", "_fp4")),
    *("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_masked", "gemm_fp8_fp8_bf16_nt"),
    *("fp8_m_grouped_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked", "m_grouped_bf16_gemm_nt_masked"),
    *("m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nn_contiguous", "fp8_gemm_nt_skip_head_mid"),
    *("k_grouped_fp8_gemm_nt_contiguous", "k_grouped_bf16_gemm_tn_contiguous"),
    *("einsum", "fp8_einsum", "tf32_hc_prenorm_gemm"),
    *("fp8_mqa_logits", "fp8_fp4_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"),
    "get_paged_mqa_logits_metadata",
]
LAYOUTS = [
    *("get_tma_aligned_size", "get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor"),
    *("transform_sf_into_required_layout", "get_mk_alignment_for_contiguous_layout"),
    *("set_mk_alignment_for_contiguous_layout", "get_theoretical_mk_alignment_for_contiguous_layout"),
    *("get_m_alignment_for_contiguous_layout", "get_k_alignment_for_contiguous_layout"),
]
UTILITIES = [
    *("per_token_cast_to_fp8", "per_block_cast_to_fp8", "per_channel_cast_to_fp8", "ceil_div", "align"),
    *("set_num_sms", "get_num_sms", "set_pdl", "get_pdl"),
]
NOTHING_TO_DO = [
    *("set_tc_util", "get_tc_util", "use_deterministic_algorithms", "get_deterministic_algorithms"),
    *("set_ignore_compile_dims", "set_block_size_multiple_of", "init"),
]


SERVED = (*PRODUCTS, *LAYOUTS, *UTILITIES, *NOTHING_TO_DO)


@pytest.mark.parametrize("name", SERVED)
def test_served(name):
    assert callable(vars(deep_gemm)[name])


@pytest.mark.parametrize("name", deep_gemm.REFUSED)
def test_refused_with_the_reason(name):
    with pytest.raises(AttributeError) as error:
        getattr(deep_gemm, name)
    assert deep_gemm.REFUSED[name] in str(error.value)


def test_nothing_to_do_is_the_truth():
    deep_gemm.use_deterministic_algorithms(False)
    assert deep_gemm.get_deterministic_algorithms() is True
    deep_gemm.set_tc_util(50)
    assert deep_gemm.get_tc_util() == 100


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [None, 4])
def test_prenorm(splits, device):
    a, b = torch.randn(7, 512, device=device).bfloat16(), torch.randn(24, 512, device=device)
    every = () if splits is None else (splits,)
    d, squares = (torch.full((*every, *shape), float("nan"), device=device) for shape in ((7, 24), (7,)))
    assert deep_gemm.tf32_hc_prenorm_gemm(a, b, d, squares, num_splits=splits) is None
    wanted = deep_tile.prenorm_gemm(a, b, num_splits=splits)
    assert torch.equal(d, wanted[0]) and torch.equal(squares, wanted[1])


@pytest.mark.parametrize("device", DEVICES)
def test_sum_over_a_batch_begins_with_c(device):
    a, b = (torch.randn(5, rows, 64, device=device).bfloat16() for rows in (8, 16))
    wanted = torch.einsum("bmk,bnk->mn", a.double(), b.double())
    for of_sum in (None, "d"):
        d = torch.ones(8, 16, device=device)
        deep_gemm.einsum("bmk,bnk->mn", a, b, d, c=d if of_sum else None)
        torch.testing.assert_close(d.double(), wanted + (1 if of_sum else 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_in_heads_are_left_alone(device):
    operands = make_operands(5, 256, 256, device=device)
    d = torch.full((5, 2 * (96 + 8 + 32)), 7.0, dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt_skip_head_mid(operands[:2], operands[2:], d, (96, 8, 32))
    product = torch.empty(5, 256, dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], product)
    heads, made = d.unflatten(1, (2, 136)), product.unflatten(1, (2, 128))
    assert torch.equal(heads[..., :96], made[..., :96]) and torch.equal(heads[..., 104:], made[..., 96:])
    assert (heads[..., 96:104] == 7).all()
    with pytest.raises(ValueError, match="head_splits"):
        deep_gemm.fp8_gemm_nt_skip_head_mid(operands[:2], operands[2:], d, (96, 8, 24))


def test_grouped_views_of_transposed_weights():
    operands = [make_operands(128, 128, 256) for _ in range(2)]
    a, a_scale = (torch.cat([x[i] for x in operands]) for i in (0, 1))
    b, b_scale = (torch.stack([x[i] for x in operands]) for i in (2, 3))
    layout = torch.arange(2, dtype=torch.int32).repeat_interleave(128)
    outs = [torch.empty(256, 128, dtype=torch.bfloat16) for _ in range(2)]
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), outs[0], layout)
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous((a, a_scale), (b.mT, b_scale.mT), outs[1], layout)
    assert torch.equal(*outs)
