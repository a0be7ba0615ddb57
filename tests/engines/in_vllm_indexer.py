"""Run within vLLM by rehearse.py: its indexer of DeepSeek-V3.2 on the names of `deep_tile.compat.deep_gemm`.

What vLLM compiles, gathers of the cache and the choice of keys, is written here in torch. Prints a line of JSON: which
parts chose the keys that FP32 chooses.
"""

import inspect
import json
from types import SimpleNamespace

import torch
from keys import CHOSEN, HEAD_DIM, KEYS_OF_PAGE, chosen_right, keys_of, make_cache, make_queries, record
from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.utils import deep_gemm as of_vllm
from vllm.v1.attention.backends.mla import indexer as backend

from deep_tile.compat import deep_gemm

WIDTH = 512
PREFILLED, DECODED = 5, 3
"""Queries of one prompt with a past, and the number of decoding sequences."""


def workspace(*wanted) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]


def gather(cache, values, scales, block_table, bounds) -> None:
    for pages, first, last in zip(block_table, bounds.tolist(), bounds[1:].tolist(), strict=False):
        found = keys_of(cache, pages, last - first)
        values.view(torch.uint8)[first:last], scales[first:last] = found


def choose(logits, starts, ends, chosen, *_) -> None:
    for row, start, end, into in zip(logits, starts.tolist(), ends.tolist(), chosen, strict=False):
        found = row[start:end].topk(min(CHOSEN, end - start)).indices
        into[: len(found)] = found.int()


def choose_decoded(logits, _, lengths, chosen, *__) -> None:
    lengths = lengths.flatten()
    choose(logits, torch.zeros_like(lengths), lengths, chosen)


def main() -> None:
    deep_gemm.install(force=True)
    layer.current_workspace_manager = lambda: SimpleNamespace(get_simultaneous=workspace)
    stand_ins = {
        "cp_gather_indexer_k_quant_cache": gather,
        "top_k_per_row_prefill": choose,
        "top_k_per_row_decode": choose_decoded,
    }
    layer.ops = SimpleNamespace(**stand_ins)
    layer.get_indexer_topk = lambda _: lambda logits, lengths, n, into, *__: choose_decoded(logits, n, lengths, into)
    cache, queries = make_cache(12), DECODED + PREFILLED
    (q, weights), buffer = make_queries(queries), torch.zeros(queries, CHOSEN, dtype=torch.int32)
    pages, past = torch.randperm(12).int().view(4, 3), 120
    lengths = torch.tensor([[70], [3], [190]]).int()
    decode = record(
        backend.DeepSeekV32IndexerDecodeMetadata,
        block_table=pages[:DECODED],
        seq_lens=lengths,
        decode_lens=torch.ones(DECODED).int(),
        requires_padding=False,
        schedule_metadata=of_vllm.get_paged_mqa_logits_metadata(lengths, KEYS_OF_PAGE, 132),
    )
    ends, total = past + 1 + torch.arange(PREFILLED).int(), past + PREFILLED
    chunk = record(
        backend.DeepseekV32IndexerPrefillChunkMetadata,
        block_table=pages[DECODED:],
        cu_seqlen_ks=torch.zeros_like(ends),
        cu_seqlen_ke=ends,
        max_seqlen_k=total,
        token_start=DECODED,
        token_end=queries,
        local_cu_seq_lens=torch.tensor([0, total]).int(),
        local_total_seq_lens=total,
        max_local_total_seq_lens=total,
    )
    metadata = record(
        backend.DeepseekV32IndexerMetadata,
        slot_mapping=torch.arange(queries),
        max_seq_len=WIDTH,
        num_decodes=DECODED,
        num_decode_tokens=DECODED,
        num_prefills=1,
        num_prefill_tokens=PREFILLED,
        decode=decode,
        prefill=record(backend.DeepseekV32IndexerPrefillMetadata, chunks=[chunk]),
    )
    context = SimpleNamespace(attn_metadata={"layer": metadata}, cudagraph_runtime_mode=None)
    layer.get_forward_context = lambda: context
    options = {
        **{"hidden_states": torch.zeros(queries, 1), "k_cache_prefix": "layer", "kv_cache": cache, "q_quant": q},
        **{"q_scale": None, "k": None, "weights": weights, "quant_block_size": 128, "scale_fmt": "ue8m0"},
        **{"topk_tokens": CHOSEN, "head_dim": HEAD_DIM, "max_model_len": WIDTH, "total_seq_lens": WIDTH},
        **{"topk_indices_buffer": buffer, "skip_k_cache_insert": True, "use_pcp": False},
    }
    options |= {"pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": ""}  # of newer releases
    names = inspect.signature(layer.sparse_attn_indexer).parameters
    layer.sparse_attn_indexer(**{name: options[name] for name in names if name in options})
    sequences = [
        *zip(pages, lengths.flatten().tolist(), strict=False),
        *((pages[DECODED], end) for end in ends.tolist()),
    ]
    right = chosen_right(buffer, q, weights, cache, sequences)
    print("FOUND", json.dumps({"decode": all(right[:DECODED]), "prefill": all(right[DECODED:])}))


main()
