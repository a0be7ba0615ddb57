"""The steps between the GEMMs of an expert layer, on the CPU and on a GPU: corner cases, sorts, graphs and streams.

Values, dead rows and lists that lie are in test_drawn_casts.py, what is refused in test_bad_calls.py, the kernels' bits
without a GPU in test_cast_kernels.py.
"""

import pytest
import torch
from helpers import CHOICES, assert_silu_mul_cast, same_bits, some_choices

from deep_tile import cast as kernels
from deep_tile import (
    combine,
    experts,
    fp8_grouped_gemm,
    per_token_cast_to_fp8,
    quantize,
    quantize_weight,
    silu_mul_cast_to_fp8,
    sort_by_expert,
    sources,
)
from deep_tile.select.hardware import H200
from deep_tile.select.streaming import bytes_in_flight_needed

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def gates_and_ups(*shape, dtype=torch.bfloat16, device="cpu"):
    """Values of which some reach the limit and some make the sigmoid 0 or 1."""
    *leading, k = shape
    return (torch.randn(*leading, 2 * k) * 5).to(dtype).to(device)


def formula(gate_up, limit=float("inf"), alpha=1.0, beta=0.0):
    """The activation in float64."""
    gate, up = gate_up.cpu().double().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + (-alpha * gate).exp()) * (up + beta)


# ---- silu_mul


@pytest.mark.gpu
@DTYPES
def test_torch_keeps_the_bounds_on_a_gpu(dtype):
    """Where the kernel is not used, torch computes the definition as it does on a CPU."""
    gate_up = gates_and_ups(300, 1300, dtype=dtype).cuda()
    out, scale = (torch.empty_like(y) for y in silu_mul_cast_to_fp8(gate_up))
    quantize.definition(gate_up, quantize.Options(1, gating=sources.gating(7.0, 1.702, 1.0)), out, scale, {})
    assert_silu_mul_cast(gate_up, out, scale, limit=7.0, alpha=1.702, beta=1.0)


@DEVICES
def test_nothing_is_rounded_before_the_cast(device):
    """Products that no narrow type holds: too large for FP16, too small for it, too fine for either."""
    gate = torch.tensor([40000.0, 2**-14, 1.0009765625])
    gate_up = torch.cat([gate, torch.tensor([60000.0, 2**-20, 1.0009765625])])[None].half().to(device)
    _, scale = silu_mul_cast_to_fp8(gate_up[:, [0, 3]])
    assert scale.item() == pytest.approx(40000.0 * 60000 / 448, rel=2e-6)
    for column in (1, 2):
        _, scale = silu_mul_cast_to_fp8(gate_up[:, [column, column + 3]], amax_floor=2.0**-80)
        h = formula(gate_up[:, [column, column + 3]]).item()
        assert scale.item() == pytest.approx(h / 448, rel=2e-6)


@DEVICES
def test_the_ends_of_the_sigmoid(device):
    """Zero for gates that are very negative, and up for those that are very large; without overflow in between."""
    gate = torch.tensor([-3e38, -1000.0, -88.0, -87.0, 0.0, 87.0, 1000.0, 3e38])
    gate_up = torch.cat([gate, torch.full((8,), 2.0**-8)])[None].bfloat16().to(device)
    for column, wanted in enumerate([0, 0, 0, 0, 0, 87, 1000, 3e38]):
        _, scale = silu_mul_cast_to_fp8(gate_up[:, [column, column + 8]], amax_floor=2.0**-80)
        assert scale.item() == pytest.approx(max(wanted * 2.0**-8, 2.0**-80) / 448, rel=0.01)


@DEVICES
def test_limits_hold_before_all_else(device):
    """Infinity is limited, too. The limit bounds gates from above only."""
    gate_up = torch.tensor([[float("inf"), -20.0, 9.0, float("-inf"), 30.0, -30.0]], device=device).half()
    quantized, scale = silu_mul_cast_to_fp8(gate_up, limit=7, alpha=0.01, amax_floor=1.0)
    bounded = torch.tensor([[7.0, -20, 7, -7, 7, -7]])
    assert_silu_mul_cast(bounded, quantized, scale, alpha=0.01, amax_floor=1.0)


# ---- combine


@DEVICES
def test_sums_are_in_order_and_rounded_once(device):
    """FP32 sums that depend on their order, and that BF16 would lose: each mistake would show."""
    x = torch.tensor([[2.0**24], [1.0], [-(2.0**24)], [2.0**-9], [1.0]]).bfloat16().repeat(1, 8).to(device)
    for index, wanted in (([0, 1, 2, 3], 2.0**-9), ([0, 2, 1, 4], 2), ([4, 3, 3, 3], 1 + 2.0**-7)):
        index = torch.tensor([index], device=device)
        assert (combine(x, torch.ones(1, 4, device=device), index) == wanted).all()


@DEVICES
@pytest.mark.parametrize("number", [-1, -(2**31), 2, 2**31 - 1, -(2**63), 2**32])
def test_weights_of_rows_that_do_not_exist_mean_nothing(device, number):
    index = torch.tensor([[0, number], [number, number]], device=device)
    index = index if abs(number) > 2**31 else index.int()
    weights = torch.tensor([[1.0, float("inf")], [float("nan"), float("nan")]], device=device)
    out = combine(torch.ones(2, 8, dtype=torch.bfloat16, device=device), weights, index)
    assert (out[0] == 1).all() and (out[1] == 0).all()


def test_enough_reads_are_under_way():
    needed, _ = bytes_in_flight_needed(H200)
    kernel, grid = kernels.choose_combine(4096, 7168, H200.num_sms)
    assert grid == H200.num_sms * kernel.blocks_per_sm
    assert kernel.blocks_per_sm * kernel.threads * kernel.rows_at_once * 16 >= 2 * needed
    assert [kernels.choose_combine(tokens, 17, 132)[1] for tokens in (1, 42, 43)] == [1, 1, 2]


# ---- compilers and graphs


@pytest.mark.gpu
def test_kernels_are_what_runs():
    device = torch.cuda.current_device()
    x, rows = torch.zeros(4, 256, device="cuda", dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32, device="cuda")
    silu_mul_cast_to_fp8(x)
    per_token_cast_to_fp8(x, rows=rows)
    combine(x, torch.ones(2, 2, device="cuda"), torch.zeros(2, 2, dtype=torch.int32, device="cuda"))
    of_rows = (kernels.choose(1, "bf16", 4, 128, 132, what)[0] for what in ("silu_mul", "listed"))
    assert all(kernels.is_loaded(kernel, device) for kernel in (*of_rows, kernels.COMBINE))


@pytest.mark.gpu
def test_large_groups_with_few_rows():
    """Most rows are dead, and rows are told by more than 31 bits of bytes."""
    groups, size, k = 256, 4096, 1024
    gate_up = torch.empty(groups, size, 2 * k, dtype=torch.bfloat16, device="cuda")
    counts = torch.randint(0, 3, (groups,), dtype=torch.int32, device="cuda")
    gate_up[:, :3] = gates_and_ups(groups, 3, k, device="cuda")
    quantized, scale = silu_mul_cast_to_fp8(gate_up, counts=counts)
    lives = torch.arange(3) < counts.cpu()[:, None]
    assert_silu_mul_cast(*(y[:, :3] for y in (gate_up, quantized, scale)), lives.flatten())


# ---- sort_by_expert


@DEVICES
def test_choices_of_no_expert_come_last(device):
    chosen = torch.tensor([[3, -1], [0, 4], [9, 3], [-(2**40), 2**40]], device=device)
    rows, offs, index = sort_by_expert(chosen, 4)
    assert offs.tolist() == [1, 1, 1, 3]
    assert (index >= 0).tolist() == [[True, False], [True, False], [False, True], [False, False]]
    assert index[index >= 0].tolist() == [1, 0, 2]
    assert rows.tolist() == [1, 0, 2, 0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("chosen", "experts", "error", "message"),
    [
        (None, 4, TypeError, "chosen is a <class 'NoneType'>; it must be one of int32 or int64"),
        (torch.zeros(3, 2), 4, TypeError, "chosen is a tensor of torch.float32"),
        (torch.zeros(3, 2).short(), 4, TypeError, "chosen is a tensor of torch.int16"),
        (torch.zeros(3).long(), 4, ValueError, r"chosen has shape \[3\]; it must be \[t, top_k\]"),
        (torch.zeros(3, 2).long(), True, TypeError, "experts is True, of type bool"),
        (torch.zeros(3, 2).long(), 0, ValueError, "experts is 0; pass a number from 1 to 32766"),
        (torch.zeros(3, 2).long(), 2**15, ValueError, "experts is 32768"),
    ],
)
def test_bad_choices_are_refused(chosen, experts, error, message):
    with pytest.raises(error, match=message):
        sort_by_expert(chosen, experts)


def test_a_bad_alignment_of_experts_is_refused():
    for alignment in (0, 3, 2048, 128.0, True):
        with pytest.raises(ValueError, match="alignment is .*power of two from 1 to 1024"):
            sort_by_expert(torch.zeros(3, 2).long(), 4, alignment=alignment)


@pytest.fixture
def sorts_by_kernel(monkeypatch):
    """Whoever sorts by torch on a GPU fails; the definition for the CPU."""
    definition = experts.sorted_by_torch

    def of_cpu(chosen, *options):
        assert not chosen.is_cuda
        return definition(chosen, *options)

    monkeypatch.setattr(experts, "sorted_by_torch", of_cpu)


def assert_sorted(found, chosen, number_of_experts, alignment=1):
    wanted = experts.sorted_by_torch(chosen.cpu(), number_of_experts, alignment)
    for one, right in zip(found, wanted, strict=True):
        assert one.dtype == right.dtype and one.stride() == right.stride() and torch.equal(one.cpu(), right)


SORTED = [
    *((tokens, 8, 128) for tokens in (1, 2, 31, 32, 63, 64, 65, 128, 512, 513, 2048, 8192, 8193, 16_385, 70_001)),
    *((1000, top_k, 60) for top_k in (1, 2, 3, 5, 6, 7, 10, 60)),
    *((777, 4, number) for number in (1, 2, 31, 32, 127, 255, 256, 257, 511, 512)),
    (kernels.MOST_CHOICES, 1, 512),
]
"""Tokens, top_k and experts: one block, several blocks, one cluster, several clusters, slices of one or more steps."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "number_of_experts"), SORTED)
def test_the_kernel_sorts_as_defined(sorts_by_kernel, tokens, top_k, number_of_experts, dtype):
    for kind in CHOICES:
        chosen = some_choices(tokens, top_k, number_of_experts, dtype, kind)
        for alignment in (1, 2, 128, 1024):
            found = sort_by_expert(chosen.cuda(), number_of_experts, alignment=alignment)
            assert_sorted(found, chosen, number_of_experts, alignment)
    assert kernels.is_loaded(kernels.SORT[str(dtype).removeprefix("torch.")], torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "number_of_experts"), [(3, kernels.MOST_EXPERTS + 1), (kernels.MOST_CHOICES // 8 + 1, 128)]
)
def test_what_the_kernel_does_not_sort_torch_does(tokens, number_of_experts):
    chosen = some_choices(tokens, 8, number_of_experts, torch.int32, "any").cuda()
    assert_sorted(sort_by_expert(chosen, number_of_experts, alignment=128), chosen, number_of_experts, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 3000])
def test_captured_sorts_follow_the_choices(sorts_by_kernel, tokens):
    chosen = some_choices(tokens, 8, 100, torch.int64, "any").cuda()
    sort_by_expert(chosen, 100, alignment=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sort_by_expert(chosen, 100, alignment=128)
    for kind in CHOICES:
        chosen.copy_(some_choices(tokens, 8, 100, torch.int64, kind))
        for x in found:
            x.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        assert_sorted(found, chosen, 100, 128)


@pytest.mark.gpu
def test_streams_sort_at_once(sorts_by_kernel):
    """Choices that change meanwhile cause no write outside of the lists."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    chosen = [some_choices(tokens, 8, 128, torch.int32, "any").cuda() for tokens in (40, 900, 5000, 9000)]
    changing = chosen[2].clone()
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream, one in zip(streams, chosen, strict=True):
            with torch.cuda.stream(stream):
                found.append((sort_by_expert(one, 128), one))
        with torch.cuda.stream(streams[0]):
            changing.random_(-1, 129)
        with torch.cuda.stream(streams[1]):
            sort_by_expert(changing, 128, alignment=16)
    torch.cuda.synchronize()
    for routing, one in found:
        assert_sorted(routing, one, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True], ids=["", "constant weights"])
@pytest.mark.parametrize("tokens", [1, 32, 700])
def test_launches_of_layers_overlap_in_order(tokens, early):
    """Each launch reads the result of the one before, and the bounds of the sort before the cast, whatever was there.
    Layers in a graph have the bits of layers whose every launch the host awaits."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    count = 40

    def weights(n, k):
        matrices = [torch.randn(n, k, device="cuda", generator=generator) / k**0.5 for _ in range(count)]
        return tuple(map(torch.stack, zip(*map(quantize_weight, matrices), strict=True)))

    up, down = weights(768, 512), weights(512, 384)
    x = torch.randn(tokens, 512, device="cuda", generator=generator).bfloat16()
    scores = torch.empty(6, tokens, count, device="cuda")

    def layers(between):
        y = x
        for each in scores:
            shares, chosen = each.topk(4)
            rows, offs, index = sort_by_expert(chosen, count)
            between()
            given = per_token_cast_to_fp8(y, rows=rows, offs=offs)
            between()
            h = fp8_grouped_gemm(*given, *up, offs, constant_weights=early)
            between()
            h = silu_mul_cast_to_fp8(h, offs=offs)
            between()
            h = fp8_grouped_gemm(*h, *down, offs, constant_weights=early)
            between()
            y = combine(h, shares, index)
            between()
        return y

    layers(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers(lambda: None)
    for _ in range(30):
        scores.uniform_(generator=generator)
        wanted = layers(torch.cuda.synchronize)
        assert wanted.isfinite().all()
        found.fill_(float("nan"))
        graph.replay()
        assert same_bits(found, wanted)
        assert same_bits(layers(lambda: None), wanted)
