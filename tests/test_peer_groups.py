"""Grouped products of the sizes and tolerances that DeepGEMM publishes for its own, as data.

Read in 2026 in its tests: generators.py, test_fp8_fp4.py and test_einsum.py, and test_core.py of 2025. Rows of a group,
or its k, are 0.7 to 1.3 times their mean. Results are compared with products of numbers that were not cast, by its
`calc_diff`, and here with those of the casts in float64 as well. Products of the same kind, and a fraction of the size,
run on a CPU, all of them on a GPU.
"""

from collections.abc import Callable
from itertools import accumulate, product
from random import Random

import pytest
import torch
from helpers import ACCUMULATION, Exact, Operands, assert_accurate, exact_product

from deep_tile import fp8_grouped_wgrad
from deep_tile.compat import deep_gemm, process
from deep_tile.config import SCALE_BLOCK, round_up
from deep_tile.reference import MAX_RELATIVE_ERROR

TOLERANCE = 1e-3
"""Most that `calc_diff` may say."""

REPEATS = 20
"""Calls that must have the same bits."""

ROOM = 4096
"""Rows that each group has room for."""

WEIGHTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
WEIGHTS_OF_2025 = ((4096, 7168), (7168, 2048))
CONTIGUOUS = [(*rows, *weight) for rows, weight in product(((4, 8192), (8, 4096)), (*WEIGHTS, *WEIGHTS_OF_2025))]
MASKED = [
    *((*rows, *weight) for rows, weight in product(((32, 192), (6, 1024), (32, 20), (6, 20)), WEIGHTS)),
    *((*rows, *weight) for rows, weight in product(((1, 1024), (2, 512), (4, 256)), WEIGHTS_OF_2025)),
]
"""(groups, rows in the mean, n, k)."""

GRADIENTS = [
    (8, 768, 2048, 128),
    *((groups, *weight, 32768 // groups) for groups in (4, 8, 16) for weight in ((4096, 7168), (7168, 2048))),
    *(
        (groups, *weight, k)
        for groups, k in ((4, 4096), (4, 8192), (8, 4096))
        for weight in ((7168, 4096), (2048, 7168))
    ),
]
"""(groups, m, n, k in the mean)."""

HEADS = [(rows, 8, 1024, 4096) for rows in (4, 32, 128, 4096, 8192)]
"""(rows, heads, n, k)."""


def sized(cases: list[tuple[int, ...]], small: Callable[..., tuple[int, ...]]) -> list:
    """All sizes on a GPU, and a fraction of each on a CPU."""
    on_cpu = [("cpu", *case) for case in dict.fromkeys(small(*case) for case in cases)]
    return [*on_cpu, *(pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in cases)]


def small_rows(groups, mean, n, k):
    return groups, max(3, mean // 128), n // 64, round_up(k // 32, SCALE_BLOCK)


def small_gradients(groups, m, n, k):
    return groups, m // 64, n // 128, max(SCALE_BLOCK, k // 64)


def small_heads(rows, heads, n, k):
    return max(16, rows // 256), heads, n // 8, k // 16


@pytest.fixture
def random():
    return Random(0)


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(process, "settings", {"num_sms": None, "pdl": None})
    monkeypatch.setattr(deep_gemm, "_alignment", SCALE_BLOCK)


def spread(random: Random, count: int, mean: int) -> list[int]:
    return [max(1, int(mean * random.uniform(0.7, 1.3))) for _ in range(count)]


def cast_weights(groups: int, n: int, k: int, device: str, powers_of_two: bool = False):
    """Numbers [groups, n, k] and their cast."""
    w = torch.randn(groups, n, k, dtype=torch.bfloat16, device=device)
    return w, stacked([deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=powers_of_two) for x in w])


def stacked(cast: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack tensors as bytes, since torch cannot stack FP8 everywhere."""
    codes, scales = zip(*cast, strict=True)
    return torch.stack([x.view(torch.uint8) for x in codes]).view(torch.float8_e4m3fn), torch.stack(scales)


def group_after_group(codes: torch.Tensor, places: list[slice]) -> torch.Tensor:
    bits = codes.view(torch.uint8)
    return torch.cat([bits[:, place].flatten() for place in places]).view(torch.float8_e4m3fn)


def check_groups(x, a, w, b, out, rows: list[tuple[int, int]]) -> None:
    """Check each group's rows, from its begin to its end, in `x`, `a` and `out` [rows, ...]; the cast's error over all
    of them, since that of a few numbers passes TOLERANCE for some draws."""
    wanted = [x[begin:end].float() @ w[group].float().t() for group, (begin, end) in enumerate(rows)]
    assert deep_gemm.calc_diff(torch.cat([out[begin:end] for begin, end in rows]), torch.cat(wanted)) < TOLERANCE
    for group, (begin, end) in enumerate(rows):
        assert_accurate(out[begin:end], exact_product(Operands(*(y[begin:end] for y in a), *(y[group] for y in b))))


def check_repeats(call: Callable[[torch.Tensor], None], out: torch.Tensor, living: torch.Tensor) -> None:
    again = torch.empty_like(out)
    for _ in range(REPEATS if out.is_cuda else 1):
        again.fill_(float("nan"))
        call(again)
        assert torch.equal(again[living].view(torch.int16), out[living].view(torch.int16))


@pytest.mark.parametrize("by_ends", [False, True], ids=["by rows", "by ends"])
@pytest.mark.parametrize(("device", "groups", "mean", "n", "k"), sized(CONTIGUOUS, small_rows))
def test_contiguous(random, device, groups, mean, n, k, by_ends):
    sizes = spread(random, groups, mean)
    begins = list(accumulate((round_up(size, SCALE_BLOCK) for size in sizes), initial=0))
    rows = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
    index = torch.full((begins[-1],), -1, dtype=torch.int32, device=device)
    for group, (begin, end) in enumerate(rows):
        index[begin:end] = group
    living = index >= 0
    x = torch.randn(len(index), k, dtype=torch.bfloat16, device=device) * living[:, None]
    a, (w, b) = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False), cast_weights(groups, n, k, device)
    layout = torch.tensor([end for _, end in rows], dtype=torch.int32, device=device) if by_ends else index

    def call(out):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, layout, use_psum_layout=by_ends)

    out = torch.full((len(index), n), float("nan"), dtype=torch.bfloat16, device=device)
    call(out)
    check_groups(x, a, w, b, out, rows)
    check_repeats(call, out, living)


@pytest.mark.parametrize("by_ends", [False, True], ids=["rows of their own", "by ends"])
@pytest.mark.parametrize(("device", "groups", "mean", "n", "k"), sized(MASKED, small_rows))
def test_masked(random, device, groups, mean, n, k, by_ends):
    """Groups with rows of their own, and the same rows one group after the other, by ends."""
    sizes, expected = spread(random, groups, mean), int(1.2 * mean)
    room = ROOM if device == "cuda" else 2 * mean
    begins = [group * room for group in range(groups)]
    if by_ends:
        begins = list(accumulate((round_up(size, SCALE_BLOCK) for size in sizes), initial=0))
    rows = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
    living = torch.zeros(begins[-1] if by_ends else groups * room, dtype=torch.bool, device=device)
    for begin, end in rows:
        living[begin:end] = True
    x = torch.randn(len(living), k, dtype=torch.bfloat16, device=device)
    a, (w, b) = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False), cast_weights(groups, n, k, device)
    bounds = torch.tensor([end for _, end in rows] if by_ends else sizes, dtype=torch.int32, device=device)

    def call(out):
        if by_ends:
            options = {"use_psum_layout": True, "expected_m_for_psum_layout": expected}
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, bounds, **options)
        else:
            own = [y.unflatten(0, (groups, room)) for y in (*a, out)]
            deep_gemm.m_grouped_fp8_gemm_nt_masked(own[:2], b, own[2], bounds, expected)

    out = torch.full((len(living), n), float("nan"), dtype=torch.bfloat16, device=device)
    call(out)
    check_groups(x, a, w, b, out, rows)
    check_repeats(call, out, living)
    assert out[~living].isnan().all()


def variants(random: Random, ks: list[int]) -> list[list[int]]:
    """All groups; some with an empty k, the first among them; a single group."""
    some = [0 if random.random() < 0.25 else k for k in ks]
    some[0], some[-1] = 0, ks[-1]
    return [ks, some, [k if group == len(ks) // 2 else 0 for group, k in enumerate(ks)]]


@pytest.mark.parametrize(("device", "groups", "m", "n", "mean"), sized(GRADIENTS, small_gradients))
def test_gradients(random, device, groups, m, n, mean):
    """Gradients by DeepGEMM's name, group after group, and by one launch of `fp8_grouped_wgrad`."""
    for ks in variants(random, spread(random, groups, mean)):
        begins = list(accumulate((round_up(k, SCALE_BLOCK) for k in ks), initial=0))
        places = [slice(*ends) for ends in zip(begins, begins[1:], strict=False)]
        alive = torch.zeros(begins[-1], dtype=torch.bool, device=device)
        for begin, k in zip(begins, ks, strict=False):
            alive[begin : begin + k] = True
        x, y = (torch.randn(rows, begins[-1], dtype=torch.bfloat16, device=device) * alive for rows in (m, n))
        a, b = (deep_gemm.per_token_cast_to_fp8(z, use_ue8m0=False) for z in (x, y))
        c = torch.randn(groups, m, n, device=device) * 32
        d, ours = c.clone(), c.clone()
        flat = [(group_after_group(codes, places), scale) for codes, scale in (a, b)]
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, d, [round_up(k, SCALE_BLOCK) for k in ks], None, d)
        ends = [begin + k for begin, k in zip(begins, ks, strict=False)]
        fp8_grouped_wgrad(*a, *b, torch.tensor(ends, dtype=torch.int32, device=device), ours)
        for group, place in enumerate(places):
            blocks = slice(place.start // SCALE_BLOCK, place.stop // SCALE_BLOCK)
            operands = Operands(a[0][:, place], a[1][:, blocks], b[0][:, place], b[1][:, blocks])
            value, extent = exact_product(operands, b_rows=1)
            exact = Exact(value + c[group].double(), extent)
            wanted = c[group] + x[:, place].float() @ y[:, place].float().t()
            for result in (d[group], ours[group]):
                if ks[group] == 0:
                    assert torch.equal(result, c[group])
                    continue
                assert deep_gemm.calc_diff(result, wanted) < TOLERANCE
                assert_accurate(result, exact, ACCUMULATION, MAX_RELATIVE_ERROR)


@pytest.mark.parametrize(("device", "rows", "heads", "n", "k"), sized(HEADS, small_heads))
def test_heads(device, rows, heads, n, k):
    x = torch.randn(rows, heads, k, dtype=torch.bfloat16, device=device)
    w, b = cast_weights(heads, n, k, device, powers_of_two=True)
    a = [y.unflatten(0, (rows, heads)) for y in deep_gemm.per_token_cast_to_fp8(x.flatten(0, 1), use_ue8m0=True)]
    out = torch.full((rows, heads, n), float("nan"), dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", tuple(a), b, out)
    for head in range(heads):
        wanted = x[:, head].float() @ w[head].float().t()
        assert deep_gemm.calc_diff(out[:, head], wanted) < TOLERANCE
        assert_accurate(out[:, head], exact_product(Operands(*(y[:, head] for y in a), *(y[head] for y in b))))
