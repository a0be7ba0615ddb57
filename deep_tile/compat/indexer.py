"""DeepGEMM's names for an indexer's logits on Hopper, on our kernels; deep_gemm.py hands them on.

`fp8_fp4_*` are the newer names; their queries are pairs, on Hopper (q, None).
"""

import torch

from deep_tile import logits
from deep_tile.codegen import LOGITS_TILE
from deep_tile.compat import arguments, process
from deep_tile.compat.arguments import count
from deep_tile.config import as_int

Pair = tuple[torch.Tensor, torch.Tensor | None]


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """`deep_tile.mqa_logits(q, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end)` in FP32.

    Args:
        q: [s, heads, d] float8_e4m3fn; DeepGEMM takes 32 or 64 heads, here 1 to 128 will do.
        kv: [s_k, d] float8_e4m3fn and its scale [s_k] float32.
        clean_logits: write -infinity where no key counts.
        max_seqlen_k: 0, or the columns of compressed logits, which start with each query's first key.

    Raises as `deep_tile.mqa_logits`, or a pair that is none.
    """
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: Pair,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int | None = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: None = None,
) -> torch.Tensor:
    """`fp8_mqa_logits` for (q, None), with logits in float32 or bfloat16.

    DeepGEMM 2.8 has `max_seqlen_k` and `schedule_meta` in the sixth and seventh place: an int there is the width of
    compressed logits, which are not cleaned. `schedule_meta` is Blackwell's: only None.
    """
    keys, scale = arguments.pair_of("kv", kv)
    if as_int(clean_logits) is not None:
        given = max_seqlen_k if isinstance(max_seqlen_k, torch.Tensor) else schedule_meta
        clean_logits, columns, schedule_meta = False, as_int(clean_logits), given
    else:
        columns = count("max_seqlen_k", max_seqlen_k) or None
    _refuse(schedule_meta=schedule_meta)
    queries = _queries(q)
    if columns == 0:
        return weights.new_empty(len(queries), 0, dtype=logits_dtype)
    return logits.mqa_logits(
        *(queries, keys, scale, weights, cu_seq_len_k_start, cu_seq_len_k_end),
        clean=bool(clean_logits),
        columns=columns,
        out_dtype=logits_dtype,
        **process.settings,
    )


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: None = None,
) -> torch.Tensor:
    """`deep_tile.paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, columns=max_context_len)` in FP32.

    Args:
        q: [batch, next_n, heads, d] float8_e4m3fn, any next_n from 1 to 8.
        context_lens: [batch] int32 per sequence, including all its queries; or [batch, next_n] per query.
        schedule_meta: not read: the kernel shares out the work by `context_lens` itself.
        clean_logits: write -infinity after each context, which newer DeepGEMM versions refuse.
        indices: Blackwell's: only None.

    Raises as `deep_tile.paged_mqa_logits`.
    """
    given = (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    return fp8_fp4_paged_mqa_logits(*given, indices=indices)


def fp8_fp4_paged_mqa_logits(
    q: Pair,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool | None = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: None = None,
) -> torch.Tensor:
    """`fp8_paged_mqa_logits` for (q, None), with logits in float32 or bfloat16.

    DeepGEMM 2.8 has `indices` in the place of `clean_logits`; they are Blackwell's: only None.
    """
    if not isinstance(clean_logits, bool):
        clean_logits, indices = False, indices if clean_logits is None else clean_logits
    _refuse(indices=indices)
    return logits.paged_mqa_logits(
        *(_queries(q), kv_cache, weights, context_lens, block_table),
        clean=bool(clean_logits),
        columns=count("max_context_len", max_context_len),
        out_dtype=logits_dtype,
        **process.settings,
    )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: None = None
) -> torch.Tensor:
    """Zeros in DeepGEMM's shape, [num_sms + 1, 2] int32, for engines to pass on; unused, since `fp8_paged_mqa_logits`
    schedules itself.

    Raises:
        TypeError: `context_lens` is not an int32 tensor, or `num_sms` not an int.
        ValueError: pages do not have 64 keys, or `indices` are given.
    """
    _refuse(indices=indices)
    if not isinstance(context_lens, torch.Tensor) or context_lens.dtype != torch.int32:
        raise TypeError(
            f"context_lens must be a tensor of int32; got {getattr(context_lens, 'dtype', type(context_lens))}"
        )
    if block_kv != LOGITS_TILE:
        raise ValueError(
            f"block_kv is {block_kv}; pages must hold {LOGITS_TILE} keys: set the engine's block size to that"
        )
    if as_int(num_sms) is None or num_sms < 1:
        raise TypeError(f"num_sms is {num_sms!r}; pass how many SMs there are, a positive int")
    return context_lens.new_zeros(num_sms + 1, 2)


def _queries(q: object) -> torch.Tensor:
    q, scale = arguments.pair_of("q", q)
    if scale is not None:
        raise ValueError("q has scales, for Blackwell; on Hopper pass (q, None), and multiply its scales into weights")
    return q


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is for Blackwell's kernels; on Hopper leave it out")
