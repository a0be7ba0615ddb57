"""DeepEP's layouts, which deep_tile's grouped products take as they stand: no row is moved, and nothing is padded.

Called by users, with what `ElasticBuffer.dispatch(..., do_expand=True)` returns: rows sorted by expert, and in its
handle `psum_num_recv_tokens_per_expert`, the row behind each expert's last, which is `offs`. With `expert_alignment=1`,
which DeepGEMM cannot take, experts follow each other without a gap. The low latency layout [experts, tokens, k] needs
nothing from here: its counts are `counts`.
"""

import torch

from deep_tile import experts, grouped, quantize


def bounds(handle: object, alignment: int = 1) -> dict[str, torch.Tensor | int]:
    """Keywords for `deep_tile.fp8_grouped_gemm`, `grouped_gemm` and `scaled_grouped_gemm`: `offs` and `alignment`.

    Args:
        handle: of a dispatch, or its `psum_num_recv_tokens_per_expert` itself, int32 [experts] on the device.
        alignment: the dispatch's `expert_alignment`.

    Raises:
        TypeError: no such tensor, or it is not of int32.
        ValueError: it is not [experts], contiguous.
    """
    psum = handle if isinstance(handle, torch.Tensor) else getattr(handle, "psum_num_recv_tokens_per_expert", None)
    if not isinstance(psum, torch.Tensor) or psum.dtype != torch.int32:
        seen = f"of {psum.dtype}" if isinstance(psum, torch.Tensor) else f"a {type(psum).__name__}"
        raise TypeError(
            f"psum_num_recv_tokens_per_expert is {seen}; it must be a tensor of torch.int32, as the handle of an "
            "expanded dispatch has: pass that handle"
        )
    if psum.dim() != 1 or not psum.is_contiguous():
        wanted = "[experts], contiguous"
        raise ValueError(f"psum_num_recv_tokens_per_expert is {list(psum.shape)}, {psum.stride()}; it must be {wanted}")
    return {"offs": psum, "alignment": alignment}


def expanded_experts(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    handle: object,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor | None = None,
    *,
    alignment: int = 1,
    expected_rows: int | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    amax_floor: float = quantize.SMALLEST_AMAX_FLOOR,
) -> torch.Tensor:
    """A layer of experts on the rows of an expanded dispatch, for `ElasticBuffer.combine` to send back and sum up.

    Nothing waits for the host, so that a CUDA graph holds for every distribution.

    Args:
        x: [rows, k] bfloat16 or float16, or the pair of float8_e4m3fn and float32 [rows, k / 128], any strides, that a
            dispatch of FP8 returns.
        handle, alignment: as for `bounds`.
        gate_up: [experts, 2 n, k] float8_e4m3fn and its scale of 128x128 blocks; k gates, then as many of up.
        down: [experts, k, n] and its scale.
        weights: [rows] float32, what each row counts for, as the dispatch returns it: they scale the second product's
            input. None: `combine` does so.
        expected_rows: of an expert, in the mean: what kernels are chosen for.
        limit, alpha, beta, amax_floor: as for `deep_tile.silu_mul_cast_to_fp8`.

    Returns:
        [rows, k] bfloat16. Rows of no expert hold anything.

    Raises:
        TypeError, ValueError, RuntimeError: as `bounds`, `deep_tile.fp8_grouped_gemm` and
            `deep_tile.silu_mul_cast_to_fp8`; or `weights` is not [rows] of float32.
    """
    of_groups = bounds(handle, alignment)
    products = of_groups | {"expected_rows": expected_rows}
    lives = {"offs": of_groups["offs"]}
    a = x if isinstance(x, (tuple, list)) else quantize.per_token_cast_to_fp8(x, amax_floor=amax_floor, **lives)
    if weights is not None and (weights.dtype != torch.float32 or tuple(weights.shape) != (a[0].shape[0],)):
        wanted = f"[{a[0].shape[0]}] of torch.float32, one for each row of x"
        raise ValueError(f"weights is {list(weights.shape)} of {weights.dtype}; it must be {wanted}")
    between = grouped.fp8_grouped_gemm(*a, *gate_up, **products)
    gating = {"limit": limit, "alpha": alpha, "beta": beta}
    h, h_scale = experts.silu_mul_cast_to_fp8(between, amax_floor=amax_floor, **lives, **gating)
    if weights is not None:
        h_scale = h_scale.mul_(weights[:, None])
    return grouped.fp8_grouped_gemm(h, h_scale, *down, **products)
