"""A paged cache of an indexer, and the keys that FP32 chooses: for in_vllm_indexer.py and in_sglang_indexer.py."""

import dataclasses

import torch

HEADS, HEAD_DIM, KEYS_OF_PAGE, CHOSEN = 32, 128, 64, 8


def record(kind: type, **given: object) -> object:
    """An instance of an engine's dataclass, with whichever fields its release has."""
    fields = dataclasses.fields(kind)
    needed = {field.name: None for field in fields if field.default is dataclasses.MISSING}
    return kind(**needed | {field.name: given[field.name] for field in fields if field.name in given})


def make_cache(pages: int) -> torch.Tensor:
    """One layer's pages, in memory of several layers: FP8 keys, then their scales."""
    cache = torch.zeros(pages, 2, KEYS_OF_PAGE, HEAD_DIM + 4, dtype=torch.uint8)[:, 0]
    values = torch.randn(pages, KEYS_OF_PAGE * HEAD_DIM).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(pages, KEYS_OF_PAGE) + 0.5).view(torch.uint8)
    cache.copy_(torch.cat([values, scales], 1).view(cache.shape))
    return cache


def make_queries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and the weights of their heads."""
    return torch.randn(count, HEADS, HEAD_DIM).to(torch.float8_e4m3fn), torch.rand(count, HEADS)


def keys_of(cache: torch.Tensor, pages: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the values and of the scales of a sequence's first keys."""
    rows = cache[pages.long()].flatten(1)
    values, scales = rows.split((KEYS_OF_PAGE * HEAD_DIM, KEYS_OF_PAGE * 4), 1)
    return values.reshape(-1, HEAD_DIM)[:count], scales.reshape(-1, 4)[:count]


def wanted_of(q, weights, cache, pages, count: int) -> set[int]:
    values, scales = keys_of(cache, pages, count)
    keys = values.view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
    logits = weights @ torch.relu(q.float() @ keys.t())
    return set(logits.topk(min(CHOSEN, count)).indices.tolist())


def chosen_right(chosen: torch.Tensor, q, weights, cache, sequences: list[tuple[torch.Tensor, int]]) -> list[bool]:
    """For each query, whether these are its keys, given its sequence's pages and how many keys it sees."""
    return [
        {key for key in found if key >= 0} == wanted_of(q[i], weights[i], cache, *sequences[i])
        for i, found in enumerate(chosen.tolist())
    ]
