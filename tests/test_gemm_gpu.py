"""`fp8_gemm` on a Hopper GPU: values, edges, layouts, poison, repeatability, graphs, streams, threads, refusals.

Inputs are fresh on every run (helpers.make_operands prints the seed), surrounded by NaN, and `out` is surrounded by
bits that must not change. Sizes are small and num_sms low, so that a few tiles make many waves.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    SCALE_STRIDES,
    GuardedOut,
    Operands,
    assert_accurate,
    check_gemm,
    exact_product,
    make_any_bytes,
    make_operands,
    rearranged,
    same_bits,
)

from deep_tile import GemmConfig, dense, fp8_gemm, is_available, jit, plan, precompile
from deep_tile.config import round_up
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN_BYTE = 0x7F
DEFAULT_CONFIGS = (*default_configs(True), *default_configs(False))
LEGAL_CORNERS = (
    GemmConfig(64, 16, 2),
    GemmConfig(64, 16, 2, 2, 1, store_buffers=1),
    GemmConfig(64, 16, 3, 1, 2),
    GemmConfig(64, 240, 4, 1, 2, tma_store=False),
    GemmConfig(64, 256, 2, 2, 1),
    GemmConfig(128, 16, 11),
    GemmConfig(128, 48, 2, 1, 2, store_buffers=1, tma_store=False),
    GemmConfig(128, 240, 3, 2, 1, store_buffers=1),
    GemmConfig(128, 160, 2, 2, 1, store_buffers=1),
    GemmConfig(128, 176, 2, 1, 2, tma_store=False),
    GemmConfig(128, 128, 2),
    GemmConfig(128, 128, 3),
    GemmConfig(128, 128, 2, split_k=2),
    GemmConfig(128, 128, 3, split_k=2),
    GemmConfig(128, 192, 3),
    GemmConfig(128, 192, 4),
    GemmConfig(128, 192, 2, split_k=4, store_buffers=1),
    GemmConfig(128, 256, 3, store_buffers=4),
    GemmConfig(256, 16, 5, 2, 1),
    GemmConfig(256, 128, 3, store_buffers=3),
    GemmConfig(256, 144, 3, 1, 2, store_buffers=1),
    GemmConfig(64, 16, 2, scale_blocks=4),
    GemmConfig(64, 128, 2, split_k=8, store_buffers=1),
    GemmConfig(128, 224, 2, split_k=2, tma_store=False),
    GemmConfig(256, 128, 3, split_k=2, store_buffers=1),
    GemmConfig(256, 64, 4, split_k=4, tma_store=False),
    GemmConfig(128, 64, 2, split_k=4, scale_blocks=2),
    GemmConfig(64, 96, 3, b_stages=3),
    GemmConfig(128, 176, 4, store_buffers=3, b_stages=3),
    GemmConfig(128, 256, 4, b_stages=4, tma_store=False),
    GemmConfig(128, 240, 3),
)
"""Legal configs at the ends of their ranges that the selector never chooses."""


@pytest.fixture(scope="module")
def every_kernel():
    """Every kernel of these tests, compiled on all cores and loaded."""
    plan.load_kernels((*DEFAULT_CONFIGS, *LEGAL_CORNERS), torch.cuda.current_device(), os.cpu_count())


@pytest.fixture
def nothing_loaded(monkeypatch):
    """Kernels are not loaded, as in a new process, but the disk cache is full."""
    monkeypatch.setattr(plan, "_kernels", {})
    monkeypatch.setattr(dense.FP8_GEMM, "launches", {})


def operands_on_gpu(m: int, n: int, k: int, **layout) -> Operands:
    return make_operands(m, n, k, device=DEVICE, **layout)


def dense_out(m: int, n: int) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


# Every kernel.


def check_config(config: GemmConfig, m: int, n: int, k: int, num_sms: int, a_scale: str = "row") -> None:
    """Check with a k that the config takes. Rows are aligned where it stores with TMA, otherwise TMA could not address
    them."""
    smallest, largest = config.k_range
    k = min(max(k, smallest), largest or k)
    k = k if config.takes_k(k) else k + 128
    if config.tma_store:
        n = round_up(n, 8)
        layout = {"out_stride": n + 8}
    else:
        layout = {"out_stride": n + 1 - n % 2, "out_offset": 3}
    check_gemm(operands_on_gpu(m, n, k, a_scale=a_scale), config=config, num_sms=num_sms, **layout)


@pytest.mark.parametrize("config", DEFAULT_CONFIGS + LEGAL_CORNERS, ids=lambda config: config.name)
def test_every_kernel(config, every_kernel, monkeypatch):
    rows, columns = config.block_m, config.block_n
    # 3 x 3 tiles and a ragged edge; the ring goes round once and a bit, K ends inside a block.
    ring = config.block_k * config.stages * config.split_k
    for a_scale in ("row", "column_aligned"):
        check_config(config, 2 * rows + 1, 2 * columns + 5, ring + 168, max(4, config.cluster), a_scale)
    # Fewer K blocks than stages, many short waves, an odd number of SMs, few rows.
    check_config(config, 7, 9 * columns - 3, 130, num_sms=max(5, config.cluster))
    # More than one group of the raster's rows of tiles, the last group short.
    check_config(config, 9 * rows + 3, 3 * columns, 128, max(6, config.cluster), "column_aligned")
    monkeypatch.setattr("deep_tile.plan.raster_rows", lambda config, problem: 16)
    check_config(config, 17 * rows + 3, 2 * columns, 128, max(6, config.cluster), "column_aligned")
    # Whole columns for each block, and shares of the last one.
    if config.resident_b:
        check_config(config, 2 * rows + 1, 5 * columns - 3, config.k_range[1], 2, "column_aligned")
    # Full tiles, an odd number each way: of the last clusters a block lies beyond the matrix. Then tiles almost full.
    check_config(config, 3 * rows, 3 * columns, 300, max(4, config.cluster), "column_aligned")
    check_config(config, 2 * rows - 1, 2 * columns - 8, 300, max(4, config.cluster))
    # Warpgroups that end tiles apart: fewer K blocks than stages, as many, and more; an odd number and an even one.
    if config.ends_apart:
        for k_blocks in range(1, config.stages + 3):
            check_config(config, 3 * rows, 3 * columns, k_blocks * 128, max(4, config.cluster))
    # One element.
    check_config(config, 1, 1, 1, num_sms=max(2, config.cluster))


# Sizes.


@pytest.mark.parametrize(
    ("n", "k", "a_scale", "padded"),
    [(264, 384, "row", False), (131, 200, "column", True), (576, 1024, "column_aligned", False)],
)
def test_every_m_up_to_300(n, k, a_scale, padded):
    largest = operands_on_gpu(300, n, k)
    exact = exact_product(largest)
    for m in range(1, 301):
        operands = rearranged(largest, m=m, a_scale=a_scale, a_padding=16 * padded)
        check_gemm(operands, exact.corner(m, n))


@pytest.mark.parametrize("m", [1, 70, 200])
def test_every_residue_of_n(m):
    largest = operands_on_gpu(m, 390, 300)
    exact = exact_product(largest)
    for n in (*range(1, 41), *range(120, 141), *range(250, 261), *range(380, 391)):
        operands = rearranged(largest, n=n, b_scale="column" if n % 2 else "row")
        check_gemm(operands, exact.corner(m, n), out_stride=round_up(n, 8))
        check_gemm(operands, exact.corner(m, n))


@pytest.mark.parametrize(("m", "n"), [(1, 40), (65, 144), (200, 264)])
def test_every_residue_of_k(m, n):
    largest = operands_on_gpu(m, n, 400)
    for k in (*range(1, 41), *range(120, 141), *range(250, 261), *range(380, 401)):
        check_gemm(rearranged(largest, k=k, a_padding=16 * (k % 3), b_padding=16 * (k % 2)))


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 2112, 7168), (64, 7168, 2048), (128, 576, 7168), (511, 4096, 7168), (2050, 7168, 2048), (4096, 4096, 1536)],
)
def test_layers_of_real_models(m, n, k):
    check_gemm(operands_on_gpu(m, n, k))


@pytest.mark.parametrize("num_sms", [1, 2, 3, 7, 64, 131, 132])
def test_any_number_of_sms(num_sms):
    available = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    operands = operands_on_gpu(700, 1000, 520)
    for m in (9, 300, 700):
        check_gemm(rearranged(operands, m=m), num_sms=min(num_sms, available))


# Layouts.


@pytest.mark.parametrize("a_scale", SCALE_STRIDES)
@pytest.mark.parametrize("b_scale", SCALE_STRIDES)
def test_every_scale_layout(a_scale, b_scale):
    largest = operands_on_gpu(333, 400, 900)
    exact = exact_product(largest)
    for m in (1, 5, 128, 333):
        check_gemm(rearranged(largest, m=m, a_scale=a_scale, b_scale=b_scale), exact.corner(m, 400))


@pytest.mark.parametrize("config", [config for config in DEFAULT_CONFIGS if config.bulk_scales], ids=lambda c: c.name)
def test_scales_by_tma_or_one_by_one_are_the_same(config, every_kernel):
    operands = operands_on_gpu(2 * config.block_m + 5, 2 * config.block_n, 1000)
    outs = [fp8_gemm(*rearranged(operands, a_scale=layout), config=config) for layout in SCALE_STRIDES]
    m, groups = operands.a_scale.shape
    misaligned = torch.empty(groups, round_up(m, 4) + 4, device=DEVICE)[:, 1 : m + 1].t().copy_(operands.a_scale)
    outs.append(fp8_gemm(*operands._replace(a_scale=misaligned), config=config))
    assert all(same_bits(outs[0], out) for out in outs)


@pytest.mark.parametrize("config", DEFAULT_CONFIGS, ids=lambda c: c.name)
def test_scales_in_runs_or_one_by_one_are_the_same(config, every_kernel):
    """Each block's part of K is two runs, or one where all of `b` stays."""
    k = 128 * config.scales_at_once * (1 if config.resident_b else 2 * config.split_k)
    operands = rearranged(operands_on_gpu(2 * config.block_m + 5, 2 * config.block_n, k), a_scale="row")
    m, groups = operands.a_scale.shape
    misaligned = torch.empty(m * groups + 1, device=DEVICE)[1:].view(m, groups).copy_(operands.a_scale)
    outs = [fp8_gemm(*operands._replace(a_scale=scale), config=config) for scale in (operands.a_scale, misaligned)]
    assert same_bits(*outs)
    assert_accurate(outs[0], exact_product(operands))


def test_broadcast_scales():
    operands = operands_on_gpu(70, 300, 256)
    a_scale, b_scale = (torch.full((), value, device=DEVICE) for value in (0.5, 3.0))
    check_gemm(operands._replace(a_scale=a_scale.expand(70, 2), b_scale=b_scale.expand(3, 2)))


@pytest.mark.parametrize("padding", [16, 48, 4096])
def test_padded_rows(padding):
    operands = operands_on_gpu(150, 200, 300, a_padding=padding, b_padding=2 * padding)
    check_gemm(operands, out_stride=200 + padding)
    check_gemm(operands, out_stride=201 + padding, out_offset=5)


@pytest.mark.parametrize("offset", range(8))
def test_every_alignment_of_out(offset):
    check_gemm(operands_on_gpu(130, 72, 144), out_stride=80, out_offset=offset)


def test_slices_of_larger_tensors():
    operands = operands_on_gpu(200, 300, 512)
    rows, columns = slice(10, 190, 2), slice(128, 256)
    part = Operands(
        operands.a[rows, 128:400], operands.a_scale[rows, 1:4], operands.b[columns, 128:400], operands.b_scale[1:2, 1:4]
    )
    assert not part.a.is_contiguous()
    whole_out = dense_out(180, 512)
    fp8_gemm(*part, whole_out[::2, 256:384])
    assert_accurate(whole_out[::2, 256:384], exact_product(part))
    whole_out[::2, 256:384] = float("nan")
    assert whole_out.isnan().all()


def test_single_rows_may_report_any_stride():
    operands = operands_on_gpu(1, 1, 300)
    odd = [x.as_strided(x.shape, (7, 1), x.storage_offset()) for x in (operands.a, operands.b)]
    check_gemm(operands._replace(a=odd[0], b=odd[1]), out_stride=3)


def test_empty_sizes():
    for m, n in ((0, 64), (64, 0)):
        guarded = GuardedOut(m, n, device=DEVICE)
        assert fp8_gemm(*operands_on_gpu(m, n, 128), guarded.out) is guarded.out
        guarded.assert_untouched()
    assert fp8_gemm(*operands_on_gpu(0, 64, 128)).shape == (0, 64)
    guarded = GuardedOut(3, 5, device=DEVICE, stride=8)
    fp8_gemm(*operands_on_gpu(3, 5, 0), guarded.out)
    assert (guarded.out == 0).all()
    guarded.assert_guards_intact()


# Values.


def test_every_fp8_bit_pattern():
    check_gemm(make_any_bytes(128, 144, 640, device=DEVICE))


def test_largest_values():
    """448 * 448 * 512 is a BF16 number, and so is every partial sum an FP8 accumulator can hold."""
    m, n, k = 200, 264, 512
    a, b = (torch.full((rows, k), 0x7E, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn) for rows in (m, n))
    a_scale, b_scale = torch.ones(m, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    b_scale[1] = -1
    out = check_gemm(Operands(a, a_scale, b, b_scale))
    assert (out[:, :128] == 448 * 448 * 512).all()
    assert (out[:, 128:256] == -448 * 448 * 512).all()


@pytest.mark.parametrize(
    ("a_size", "b_size"),
    [
        *((0, 0), (0, 1), (1, 0), (1e30, 1), (1, 1e30), (1e-30, 1), (1, 1e-30)),
        *((1e30, 1e-30), (1e-30, 1e30), (1e15, 1e15), (1e-15, 1e-15)),
    ],
)
def test_extreme_scales(a_size, b_size):
    """Products of two scales are normal FP32 numbers, and sums are finite."""
    operands = operands_on_gpu(150, 200, 300)
    check_gemm(operands._replace(a_scale=operands.a_scale * a_size, b_scale=operands.b_scale * b_size))


def test_scales_of_very_different_size_in_one_sum():
    operands = operands_on_gpu(70, 300, 512)
    operands.a_scale[::3, 1] *= 1e20
    operands.a_scale[1::3, 2] *= 1e-20
    operands.b_scale[1, 3] = 0
    check_gemm(operands)


# Poison: what is wrong in one row or column stays there.


def nan_in_a(operands: Operands, row: int) -> Operands:
    operands.a.view(torch.uint8)[row, -1] = NAN_BYTE
    return operands


def nan_in_a_scale(operands: Operands, row: int) -> Operands:
    operands.a_scale[row, -1] = float("nan")
    return operands


def nan_in_b(operands: Operands, column: int) -> Operands:
    operands.b.view(torch.uint8)[column, 0] = NAN_BYTE
    return operands


@pytest.mark.parametrize(
    "config", [None, GemmConfig(128, 176, 4, 1, 2, store_buffers=1), GemmConfig(256, 128, 3, 2, 1)]
)
@pytest.mark.parametrize(("m", "n", "k"), [(7, 200, 256), (300, 400, 520)])
def test_nan_stays_in_its_row_or_column(m, n, k, config):
    clean = operands_on_gpu(m, n, k)
    expected = check_gemm(clean, config=config)
    for row in {0, m // 2, m - 1}:
        for poison in (nan_in_a, nan_in_a_scale):
            out = fp8_gemm(*poison(rearranged(clean), row), dense_out(m, n), config=config)
            others = torch.arange(m, device=DEVICE) != row
            assert out[row].isnan().all(), (poison.__name__, row)
            assert same_bits(out[others], expected[others]), (poison.__name__, row)
    for column in {0, n // 2, n - 1}:
        out = fp8_gemm(*nan_in_b(rearranged(clean), column), dense_out(m, n), config=config)
        others = torch.arange(n, device=DEVICE) != column
        assert out[:, column].isnan().all(), column
        assert same_bits(out[:, others], expected[:, others]), column


def test_nan_in_a_scale_of_b_stays_in_its_128_columns():
    clean = operands_on_gpu(150, 400, 520)
    expected = check_gemm(clean)
    b_scale = clean.b_scale.clone()
    b_scale[1, 2] = float("nan")
    out = fp8_gemm(*clean._replace(b_scale=b_scale))
    assert out[:, 128:256].isnan().all()
    assert same_bits(out[:, :128], expected[:, :128])
    assert same_bits(out[:, 256:], expected[:, 256:])


# Repeatability.


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (5, 2112, 7168, None),
        (300, 1000, 2000, None),
        (1024, 2112, 7168, None),
        (1000, 2112, 1000, GemmConfig(128, 256, 4, 1, 2)),
        (1000, 2112, 1000, GemmConfig(128, 176, 4, 2, 1, store_buffers=1, tma_store=False)),
    ],
)
def test_bits_repeat_over_100_runs(m, n, k, config):
    operands = operands_on_gpu(m, n, k)
    first = check_gemm(operands, config=config).view(torch.int16).clone()
    out = dense_out(m, n)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        out.fill_(float("nan"))
        fp8_gemm(*operands, out, config=config)
        differing += (out.view(torch.int16) != first).sum()
    assert differing.item() == 0


# CUDA graphs.


# Streams, threads, devices.


def test_threads_launch_at_once():
    barrier = threading.Barrier(2, timeout=60)

    def work(shape):
        operands = operands_on_gpu(*shape)
        exact = exact_product(operands)
        outs = [dense_out(*shape[:2]) for _ in range(50)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        barrier.wait()
        with torch.cuda.stream(stream):
            for out in outs:
                fp8_gemm(*operands, out)
        stream.synchronize()
        for out in outs:
            assert_accurate(out, exact)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [(70, 2000, 1000), (500, 264, 3000)]))


def test_threads_meet_a_new_kernel_at_once(nothing_loaded):
    operands = operands_on_gpu(200, 520, 300)
    exact = exact_product(operands)
    torch.cuda.synchronize()
    barrier = threading.Barrier(4, timeout=60)

    def work(_):
        barrier.wait()
        outs = [fp8_gemm(*rearranged(operands, m=m)) for m in (1, 64, 200)]
        for out in outs:
            assert_accurate(out, exact.corner(*out.shape))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_thread_that_never_used_cuda():
    operands, out = operands_on_gpu(70, 200, 300), dense_out(70, 200)
    fp8_gemm(*operands, out)
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    # `out` is given and the signature known: the launch is this thread's first use of CUDA.
    thread = threading.Thread(target=fp8_gemm, args=(*operands, out))
    thread.start()
    thread.join()
    assert_accurate(out, exact_product(operands))


def test_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs a second GPU; torch sees {torch.cuda.device_count()}")
    with torch.cuda.device(0):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            check_gemm(make_operands(130, 300, 520, device=device))
            assert torch.cuda.current_device() == 0
        first, second = (make_operands(9, 64, 128, device=f"cuda:{index}") for index in (0, 1))
        with pytest.raises(ValueError, match="b is on cuda:1 but a is on cuda:0"):
            fp8_gemm(first.a, first.a_scale, second.b, first.b_scale)


# Configs, precompile, refusals.


@pytest.mark.parametrize(("n", "k", "max_m"), [(576, 7168, 200), (1000, 520, 700), (100, 640, 70)])
def test_nothing_is_loaded_after_precompile(n, k, max_m, nothing_loaded):
    operands = operands_on_gpu(max_m, n, k)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    result = precompile([(n, k, max_m)])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    loaded, compiled = set(plan._kernels), jit.compilations()
    assert {config for config, _ in loaded} == set(result.configs)
    for m in range(1, max_m + 1):
        fp8_gemm(*(operands.a[:m], operands.a_scale[:m], operands.b, operands.b_scale))
    assert set(plan._kernels) == loaded
    assert jit.compilations() == compiled
    assert precompile([(n, k, max_m)]) == (result.configs, 0)


def test_the_given_config_is_used(nothing_loaded):
    check_gemm(operands_on_gpu(70, 200, 300), config=LEGAL_CORNERS[0])
    assert [config for config, _ in plan._kernels] == [LEGAL_CORNERS[0]]


def test_is_available():
    available, reason = is_available()
    assert available and torch.cuda.get_device_name() in reason


# More elements than 32 bits count.


def sampled(size: int, *marks: int) -> torch.Tensor:
    """Indices: the ends, both sides of each mark, and some at random."""
    picks = [0, 1, size - 2, size - 1, *(mark + step for mark in marks for step in (-1, 0, 1))]
    return torch.tensor(sorted({*picks, *torch.randint(0, size, (40,)).tolist()}), device=DEVICE)


def check_sampled(operands: Operands, out: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    assert_accurate(out[rows][:, columns], exact_product(operands, rows, columns))


@pytest.mark.parametrize("n", [32_800, 32_801], ids=["tma_store", "any_store"])
def test_large_out(n):
    m, k = 65_537, 128
    assert m * n > 2**31
    operands, out = make_any_bytes(m, n, k, device=DEVICE), dense_out(m, n)
    fp8_gemm(*operands, out)
    check_sampled(operands, out, sampled(m, 2**31 // n, 2**30 // n), sampled(n))
    assert not out.isnan().any()


@pytest.mark.parametrize("large", ["a", "b"])
def test_large_operand(large):
    rows, k = 131_200, 16_384
    assert rows * k > 2**31
    m, n = (rows, 200) if large == "a" else (9, rows)
    operands, out = make_any_bytes(m, n, k, device=DEVICE), dense_out(m, n)
    fp8_gemm(*operands, out)
    marks = (2**31 // k, 2**30 // k)
    check_sampled(operands, out, sampled(m, *marks * (large == "a")), sampled(n, *marks * (large == "b")))
    assert not out.isnan().any()
