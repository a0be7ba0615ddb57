"""Run within SGLang by rehearse.py: its indexers for DeepSeek-V3.2 and V4 on the names of deep_tile.compat.deep_gemm,
or, where ENGINE_DEEP_GEMM names the folder of SGLang's own DeepGEMM, on its functions as the plugin hooks them.

What SGLang compiles, gathers of the cache, is written here in torch; its own functions of torch choose keys. Prints
a line of JSON: which parts chose the keys that FP32 chooses.
"""

import importlib
import json
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from keys import CHOSEN, HEAD_DIM, HEADS, KEYS_OF_PAGE, chosen_right, keys_of, make_cache, make_queries, record

from deep_tile.compat import deep_gemm


def hook(folder: str) -> None:
    """Load SGLang's plugins, beside its DeepGEMM whose compiled functions are mocks."""
    compiled = torch.ops.deep_gemm = MagicMock()
    compiled.get_num_sms.default.return_value = 132
    compiled.get_paged_mqa_logits_metadata.default.return_value = torch.zeros(133, 2).int()
    sys.path.insert(0, folder)
    with patch("os.path.exists", return_value=True), patch.object(torch.ops, "load_library"):
        importlib.import_module("deep_gemm")
    importlib.import_module("sglang.srt.plugins").load_plugins()


if "ENGINE_DEEP_GEMM" in os.environ:
    hook(os.environ["ENGINE_DEEP_GEMM"])
else:
    deep_gemm.install(force=True)
    deep_gemm.set_num_sms(132)

from sglang.srt.layers.attention.dsa import dsa_indexer, dsa_indexer_metadata  # noqa: E402
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod  # noqa: E402
from sglang.srt.layers.attention.dsa_backend import DSAMetadata  # noqa: E402
from sglang.srt.layers.attention.dsv4 import indexer as v4  # noqa: E402
from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata  # noqa: E402
from sglang.srt.model_executor import forward_context  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

TABLE = torch.randperm(12).int().view(4, 3)
LENGTHS = torch.tensor([70, 3, 190, 125]).int()
"""Each sequence's pages, and how many keys it has."""


class OnDeviceZero(torch.Tensor):
    """A tensor of the CPU whose device has an index, as those of GPUs have. Its slices are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cpu", 0)


class Pool:
    """The cache of one layer, as SGLang's pools hand it out."""

    index_page_size = KEYS_OF_PAGE
    layer_mapping = None

    def __init__(self, cache: torch.Tensor):
        self.cache = cache

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.cache.flatten(1)

    def get_index_k_scale_buffer(self, layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len):
        counts = seq_len_tensor.tolist()
        parts = [keys_of(self.cache, pages, count) for pages, count in zip(page_indices, counts, strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def make_indexer() -> dsa_indexer.Indexer:
    """Without its projections."""
    indexer = dsa_indexer.Indexer.__new__(dsa_indexer.Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.paged_mqa_logits_backend = dsa_indexer.DSAPagedMQALogitsBackend.resolve("auto")
    indexer.sm_count, indexer.n_heads, indexer.index_topk = dsa_indexer.resolve_num_sms(), HEADS, CHOSEN
    indexer.num_init_tokens = indexer.num_local_tokens = 0
    indexer.logits_with_pp_recv = False
    return indexer


def metadata_of(queries: list[int], seen: torch.Tensor, pages=TABLE, **given):
    """Of so many queries of each sequence, which see so many keys each."""
    sequences = torch.arange(len(queries)).repeat_interleave(torch.tensor(queries))
    starts = (LENGTHS.cumsum(0) - LENGTHS).int()[sequences]
    attention = record(
        DSAMetadata,
        page_size=KEYS_OF_PAGE,
        cache_seqlens_int32=LENGTHS,
        real_page_table=pages,
        dsa_seqlens_expanded=seen,
        dsa_extend_seq_lens_list=queries,
        indexer_k_start_end=(starts, starts + seen),
        indexer_seq_lens=LENGTHS,
        indexer_seq_lens_cpu=LENGTHS,
        token_to_batch_idx=sequences.int(),
        topk_indices_offset=starts,
    )
    return record(
        dsa_indexer_metadata.DSAIndexerMetadata,
        attn_metadata=attention,
        topk_transform_method=TopkTransformMethod.RAGGED,
        topk_backend=DSATopKBackend.TORCH,
        force_unfused_topk=True,
        **given,
    )


def seen_by(queries: list[int]) -> torch.Tensor:
    """Keys up to each query's own; the last query of a sequence sees all."""
    ends = [torch.arange(n - count + 1, n + 1) for n, count in zip(LENGTHS.tolist(), queries, strict=True)]
    return torch.cat(ends).int()


def sequences_of(queries: list[int], seen: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    return list(zip(TABLE.repeat_interleave(torch.tensor(queries), 0), seen.tolist(), strict=True))


def of_v32(cache: torch.Tensor) -> dict[str, bool]:
    """Decoding, with one query of a sequence and with two to verify; prompts; each in one part and in several."""
    indexer, found = make_indexer(), {}

    def is_right(queries: list[int], mode: ForwardMode, **given) -> bool:
        seen = seen_by(queries)
        metadata, (q, weights) = metadata_of(queries, seen, **given), make_queries(sum(queries))
        batch = SimpleNamespace(forward_mode=mode, seq_lens_cpu=LENGTHS, extend_seq_lens_cpu=queries)
        if mode.is_extend_without_speculative():
            q, get_keys = q.as_subclass(OnDeviceZero), lambda *given: indexer._get_topk_ragged(False, *given)
        else:
            get_keys = indexer._get_topk_paged
        chosen = get_keys(batch, 0, q, weights[..., None], metadata)
        q = q.as_subclass(torch.Tensor)
        return all(chosen_right(chosen, q, weights, cache, sequences_of(queries, seen)))

    found["decode"] = is_right([1] * 4, ForwardMode.DECODE)
    of_two = {"pages": TABLE.repeat_interleave(2, 0), "paged_mqa_ctx_lens_2d": seen_by([2] * 4).view(4, 2)}
    found["verify"] = is_right([2] * 4, ForwardMode.TARGET_VERIFY, **of_two)
    indexer.sm_count = 3
    found["decode in parts"] = is_right([1] * 4, ForwardMode.DECODE)
    found["prefill"] = is_right([5, 3, 1, 7], ForwardMode.EXTEND)
    dsa_indexer.mqa_logits_should_chunk = lambda num_cols, **_: (True, 3 * 4 * num_cols)
    found["prefill in parts"] = is_right([5, 3, 1, 7], ForwardMode.EXTEND)
    return found


class OfV4(v4.C4IndexerBackendMixin):
    """SGLang's backend for it, around queries that are given."""

    hisparse_coordinator = None

    def __init__(self, pool: Pool, q, weights, metadata: PagedIndexerMetadata, queries: int):
        super().__init__()
        self.dsa_topk_backend, self.token_to_kv_pool, self.prepared = (
            DSATopKBackend.TORCH,
            pool,
            (q, weights[..., None]),
        )
        self.chosen, raw = torch.full((2, queries, CHOSEN), -1).int()
        core = {"positions": torch.arange(queries), "c4_sparse_page_indices": self.chosen, "c4_sparse_raw_indices": raw}
        self.forward_metadata = SimpleNamespace(indexer_metadata=metadata, core_metadata=SimpleNamespace(**core))
        self.raw = raw

    def _forward_prepare_normal(self, **_):
        return self.prepared

    def _can_use_nonpaged_indexer(self, forward_batch, **_) -> bool:
        return forward_batch.forward_mode == ForwardMode.EXTEND


def of_v4(cache: torch.Tensor) -> dict[str, bool]:
    """Prompts alone in a batch, whose keys are gathered, and others, whose keys stay in pages."""

    def is_right(mode: ForwardMode, sequence: int, count: int) -> bool:
        keys = int(LENGTHS[sequence])
        seen = torch.arange(keys - count + 1, keys + 1).int()
        pages = TABLE[sequence].expand(count, 3).contiguous()
        metadata = PagedIndexerMetadata(256, KEYS_OF_PAGE, pages, seen, False, force_deep_gemm_metadata=True)
        q, weights = make_queries(count)
        backend = OfV4(Pool(cache), q, weights, metadata, count)
        tokens = torch.tensor([4 * keys])
        batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=tokens,
            seq_lens_cpu=tokens,
            extend_seq_lens=torch.tensor([count]),
            extend_seq_lens_cpu=[count],
            extend_start_loc=torch.zeros(1),
            extend_num_tokens=count,
        )
        layer = SimpleNamespace(use_fp4_indexer=False, layer_id=0, index_topk=CHOSEN, head_dim=HEAD_DIM)
        backend.forward_c4_indexer(torch.zeros(count, 1), torch.zeros(count, 1), layer, batch)
        gathered = metadata.nonpaged_plan is not None
        right = chosen_right(backend.raw, q, weights, cache, [(TABLE[sequence], n) for n in seen.tolist()])
        return all(right) and gathered is (mode == ForwardMode.EXTEND)

    v4.envs.SGLANG_OPT_DSV4_NONPAGED_INDEXER_MIN_QUERY_TOKENS.set(1)
    return {"V4 prefill": is_right(ForwardMode.EXTEND, 2, 9), "V4 decode": is_right(ForwardMode.DECODE, 0, 3)}


def main() -> None:
    dsa_indexer._is_cuda = True
    cache = make_cache(12)
    attention = SimpleNamespace(token_to_kv_pool=Pool(cache))
    forward_context.set_forward_context(forward_context.ForwardContext(attn_backend=attention))
    print("FOUND", json.dumps(of_v32(cache) | of_v4(cache)))


main()
