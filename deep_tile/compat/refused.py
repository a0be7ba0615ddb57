"""DeepGEMM names without a deep_tile function, and why."""

_OF_BLACKWELL = "a kernel of Blackwell's alone, which DeepGEMM has not on Hopper either"
_OF_RANKS = "it joins GPUs in one kernel: use fp8_grouped_gemm behind DeepEP's dispatch (deep_tile.compat.deep_ep)"

REFUSED = {
    **dict.fromkeys(
        (
            *("fp8_mega_moe", "get_symm_buffer_for_sm90_mega_moe", "transform_weights_for_mega_moe_sm90"),
            *("mega_moe_pre_dispatch_sm90", "SM90SymmBuffer", "get_block_m_for_mega_moe", "SymmBuffer"),
            *("get_symm_buffer_for_mega_moe", "transform_weights_for_mega_moe", "mega_moe_pre_dispatch"),
            "transform_scales_for_mega_moe",
        ),
        _OF_RANKS,
    ),
    **dict.fromkeys(
        (
            *("fp8_fp4_mega_moe", "fp4_fp4_mega_moe", "bf16_mega_moe", "bf16_mega_gate", "get_bf16_mega_gate_config"),
            *("mega_mhc", "fp4_gemm_nt", "m_grouped_fp4_gemm_nt_contiguous", "m_grouped_fp4_gemm_nt_masked"),
            *("k_grouped_fp4_gemm_nt_contiguous", "k_grouped_fp8_gemm_tn_contiguous", "cublaslt_nvfp4_gemm_nt"),
            *("batched_syrk", "batched_symm", "fp8_fp4_sparse_mqa_logits", "fp8_fp4_paged_sparse_mqa_logits"),
            *("get_sparse_mqa_logits_metadata", "get_paged_sparse_mqa_logits_metadata", "get_mqa_logits_metadata"),
            *("get_mn_major_tma_aligned_packed_ue8m0_tensor", "pack_ue8m0_to_int", "per_token_cast_to_fp4"),
            *("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", "epilogue", "NVFP4SymmBuffer"),
            *("nvfp4_mega_moe", "get_block_m_for_nvfp4_mega_moe", "get_num_locality_domains", "localize"),
            *("is_localization_available", "is_localized", "destroy_localizer"),
            "transform_ue4m3_sf_into_required_layout",
        ),
        _OF_BLACKWELL,
    ),
}
"""Why deep_tile has no function with this name. Access raises AttributeError: engines probe for names."""
