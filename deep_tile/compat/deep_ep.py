"""DeepEP's layouts, which deep_tile's grouped GEMMs take directly: no row is moved, nothing is padded.

They are the results of `ElasticBuffer.dispatch(..., do_expand=True)`: rows sorted by expert, and the handle's
`psum_num_recv_tokens_per_expert`, each expert's end row, i.e. `offs`. With `expert_alignment=1`, which DeepGEMM cannot
take, experts follow each other without a gap. The low latency layout [experts, tokens, k] needs nothing from here: its
counts are `counts`.
"""

import torch

from deep_tile import experts, grouped, quantize


def bounds(handle: object, alignment: int = 1) -> dict[str, torch.Tensor | int]:
    """Keywords for `deep_tile.fp8_grouped_gemm`, `grouped_gemm` and `scaled_grouped_gemm`: `offs` and `alignment`.

    Args:
        handle: a dispatch's handle, or its `psum_num_recv_tokens_per_expert`, int32 [experts] on the device.
        alignment: the dispatch's `expert_alignment`.

    Raises:
        TypeError: no such tensor, or it is not int32.
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
    """An expert layer on an expanded dispatch's rows, for `ElasticBuffer.combine` to send back and sum.

    Nothing waits for the host, so one CUDA graph serves every distribution of tokens.

    Args:
        x: [rows, k] bfloat16 or float16, or an FP8 dispatch's pair, float8_e4m3fn and float32 [rows, k / 128], any
            strides.
        handle, alignment: as for `bounds`.
        gate_up: [experts, 2 n, k] float8_e4m3fn and its 128x128 block scale; n gate rows, then n up rows.
        down: [experts, k, n] and its scale.
        weights: [rows] float32, row weights as the dispatch returns them: they scale the second GEMM's input. None:
            `combine` does so.
        expected_rows: mean rows per expert, for which kernels are chosen.
        limit, alpha, beta, amax_floor: as for `deep_tile.silu_mul_cast_to_fp8`.

    Returns:
        [rows, k] bfloat16. Rows without an expert are undefined.

    Raises:
        TypeError, ValueError, RuntimeError: as `bounds`, `deep_tile.fp8_grouped_gemm` and
            `deep_tile.silu_mul_cast_to_fp8`; or `weights` is not float32 [rows].
    """
    for name, pair in (("gate_up", gate_up), ("down", down)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name} is a {type(pair).__name__}; pass a pair, a weight and its block scale")
    of_groups = bounds(handle, alignment)
    products = of_groups | {"expected_rows": expected_rows}
    lives = {"offs": of_groups["offs"]}
    a = x if isinstance(x, (tuple, list)) else quantize.per_token_cast_to_fp8(x, amax_floor=amax_floor, **lives)
    if weights is not None and not isinstance(weights, torch.Tensor):
        raise TypeError(f"weights is a {type(weights).__name__}; pass a tensor, or None")
    given = None if weights is None else (weights.dtype, tuple(weights.shape), weights.device)
    if given not in (None, (torch.float32, (a[0].shape[0],), a[0].device)):
        wanted = f"[{a[0].shape[0]}] of torch.float32 on {a[0].device}, one for each row of x"
        raise ValueError(
            f"weights is {list(weights.shape)} of {weights.dtype} on {weights.device}; it must be {wanted}"
        )
    between = grouped.fp8_grouped_gemm(*a, *gate_up, **products)
    gating = {"limit": limit, "alpha": alpha, "beta": beta}
    h, h_scale = experts.silu_mul_cast_to_fp8(between, amax_floor=amax_floor, **lives, **gating)
    if weights is not None:
        h_scale = h_scale.mul_(weights[:, None])
    return grouped.fp8_grouped_gemm(h, h_scale, *down, **products)
