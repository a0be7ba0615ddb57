"""The indexers of SGLang's DeepSeek-V3.2, V4 and GLM-5 through deep_tile: hooks around their logits.

Registered by sglang.py beside it. SGLang takes both functions from the module deep_gemm at their first use, so that one
hook around each serves every indexer. Schedules stay DeepGEMM's, which SGLang also hands to other kernels.
Invariant: calls that deep_tile cannot compute as intended go to the original function.
"""

from collections.abc import Callable

import torch

from deep_tile import logits
from deep_tile.integrations.transformers_weights import runs_on
from deep_tile.quantize import FP8_DTYPE


def fp8_mqa_logits(
    original: Callable[..., torch.Tensor],
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """`deep_tile.mqa_logits` for float8_e4m3fn queries [s, heads, d] and keys; original: sgl-deep-gemm's function."""
    if not _takes(q, 3, weights):
        return original(q, kv, weights, ks, ke, clean_logits, max_seqlen_k)
    return logits.mqa_logits(q, *kv, weights, ks, ke, clean=bool(clean_logits), columns=max_seqlen_k or None)


def fp8_paged_mqa_logits(
    original: Callable[..., torch.Tensor],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`deep_tile.paged_mqa_logits` for float8_e4m3fn queries [batch, n, heads, d] and pages of 64 keys."""
    if indices is not None or not _takes(q, 4, weights) or kv_cache.shape[1] != logits.LOGITS_TILE:
        given = q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
        return original(*given, indices)
    options = {"clean": bool(clean_logits), "columns": max_context_len}
    return logits.paged_mqa_logits(q, kv_cache.view(torch.uint8), weights, context_lens, block_table, **options)


def _takes(q: torch.Tensor, dimensions: int, weights: torch.Tensor) -> bool:
    return (
        q.dtype == FP8_DTYPE
        and weights.dtype == torch.float32
        and q.dim() == dimensions
        and q.shape[-1] in logits.HEAD_DIMS
        and q.shape[-2] <= logits.HEADS[-1]
        and (dimensions == 3 or q.shape[1] <= logits.MOST_BATCH_QUERIES)
        and runs_on(q.device)
    )


def make_ready(model: torch.nn.Module) -> None:
    """Compile and load the kernels of a model's indexers."""
    indexers = [layer for layer in model.modules() if hasattr(layer, "index_topk")]
    sizes = {(getattr(layer, "n_heads", 0), getattr(layer, "head_dim", 0)) for layer in indexers}
    for heads, head_dim in sizes:
        if 1 <= heads <= logits.HEADS[-1] and head_dim in logits.HEAD_DIMS:
            for paged in (False, True):
                logits.precompile_logits(heads, head_dim, paged=paged)


AROUND = {f"deep_gemm.{hook.__name__}": hook for hook in (fp8_mqa_logits, fp8_paged_mqa_logits)}
"""Hooks by the names of the functions that they are put around."""
