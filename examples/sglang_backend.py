"""SGLang's linear layers in FP8 with block scales through deep_tile: a backend, for SGLang's maintainers to take over.

Written against sglang/srt/layers/quantization/fp8_utils.py as of late 2026: `deep_tile_w8a8_block_fp8_linear` has the
arguments of the functions that `dispatch_w8a8_block_fp8_linear` chooses from, and a value of --fp8-gemm-backend would
name it. `grouped_gemm_nt_f8f8bf16_contig` and `grouped_gemm_nt_f8f8bf16_masked` have those of the functions of these
names in sglang/srt/layers/deep_gemm_wrapper/entrypoint.py, by which its experts multiply. All has been checked against
SGLang's signatures, and not been run inside SGLang.
"""

import torch
from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback

import deep_tile
from deep_tile.compat import deep_gemm

_BLOCK_SIZE = [128, 128]
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALLEST_MAXIMUM = 1e-10
"""Of a group of activations, as SGLang's own casts floor it."""


def deep_tile_w8a8_block_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`input @ (weight * weight_scale)^T + bias` with `input` cast in groups of 1x128, unless `input_scale` is given.

    Args:
        input: [..., k] bfloat16, float16 or float32; or, with `input_scale`, float8_e4m3fn.
        weight: [n, k] float8_e4m3fn; any n, k in multiples of 16.
        block_size: of the weight. Others than [128, 128] go to SGLang's own function, as packed scales do.
        weight_scale: [ceil(n / 128), ceil(k / 128)] float32.
        input_scale: [rows, ceil(k / 128)] float32 of any strides, padded to 4 rows or not.
        bias: [n].

    Returns:
        [..., n], in the dtype of `input`; bfloat16 where that is FP8.
    """
    if not _takes(input, weight, block_size, weight_scale, input_scale):
        return deepgemm_w8a8_block_fp8_linear_with_fallback(input, weight, block_size, weight_scale, input_scale, bias)
    x = input if input_scale is None else (input.view(-1, input.shape[-1]), input_scale)
    output = deep_tile.fp8_linear(x, weight, weight_scale, bias, amax_floor=_SMALLEST_MAXIMUM)
    return output.view(*input.shape[:-1], weight.shape[0])


def _takes(input, weight, block_size, weight_scale, input_scale) -> bool:
    wanted = _INPUT_DTYPES if input_scale is None else (torch.float8_e4m3fn,)
    return (
        list(block_size) == _BLOCK_SIZE
        and input.dtype in wanted
        and weight_scale.dtype == torch.float32
        and (input_scale is None or input_scale.dtype == torch.float32)
        and weight.shape[1] % 16 == 0
    )


def grouped_gemm_nt_f8f8bf16_contig(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    m_indices: torch.Tensor,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
) -> None:
    """Rows of all experts one after the other, each expert's at a multiple of 128; their scales need no copy before."""
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices, recipe_a=recipe_a, recipe_b=recipe_b)


def grouped_gemm_nt_f8f8bf16_masked(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    overlap_args: object = None,
    max_block_n: int = 256,
) -> None:
    """Rows of each expert in its own part of `lhs`. Nothing says which tiles are done, so there are no overlap_args."""
    if overlap_args is not None:
        raise ValueError("overlap_args is given; deep_tile's products signal no tiles. Leave it out")
    deep_gemm.m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)


def warm_up(model: torch.nn.Module, max_tokens: int) -> None:
    """Have every kernel ready that the layers can need: to be called where SGLang compiles DeepGEMM's."""
    for grouping in ("offs", "counts"):
        deep_tile.precompile_model(model, max_tokens, grouping=grouping)
