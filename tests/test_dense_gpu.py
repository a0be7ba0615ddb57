"""GEMMs of every kind and output format on a Hopper GPU, but for FP8 with block scales to BF16: default kernels, sizes,
layouts, options, graphs, chains.

Inputs are fresh on every run, surrounded by NaN, and `out` is surrounded by bits that must not change.
"""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import (
    ACCUMULATION_WITHOUT_SCALES,
    GuardedOut,
    Operands,
    Product,
    added,
    assert_accurate,
    exact_dense_product,
    exact_product,
    make_dense_operands,
    make_operands,
    make_product,
    same_bits,
    with_finish,
)

from deep_tile import (
    GemmConfig,
    fp8_gemm,
    fp8_wgrad,
    gemm,
    int8_gemm,
    plan,
    scaled_gemm,
)
from deep_tile.config import round_up
from deep_tile.kinds import FAMILIES, KINDS, LAYOUTS, OUTPUTS, RESULTS
from deep_tile.reference import relative_error
from deep_tile.select.defaults import deepest_config, default_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
OPERANDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""dtypes of operands by kind."""

CONFIGS = (
    *default_configs(True, "bf16"),
    *default_configs(False, "bf16"),
    *default_configs(True, "fp16"),
    *default_configs(True, "int8"),
    *default_configs(True, "fp8_rows"),
    *default_configs(True, "fp8", "fp32"),
    *default_configs(False, "fp8", "fp32")[::3],
    *default_configs(True, "fp8", "fp16")[::3],
    *default_configs(False, "fp8", "fp16")[1::6],
    *default_configs(True, "bf16", "fp32")[::2],
    *default_configs(False, "bf16", "fp32")[::3],
    *default_configs(True, "int8_rows")[::2],
    *default_configs(False, "int8_rows", "fp32")[1::3],
    *default_configs(False, "int8", "fp16")[1::3],
    *default_configs(False, "fp8_rows", "fp32")[2::3],
    *default_configs(True, "fp8_1x128", "fp32"),
    *default_configs(True, "fp8_1x128")[1::3],
    *default_configs(False, "fp8_1x128", "fp32")[2::3],
    *default_configs(True, "fp8_1x128", "fp32", True)[::2],
    *default_configs(False, "fp8_1x128", "fp32", True)[1::2],
    *default_configs(True, "bf16", "fp32", True)[::4],
    *default_configs(False, "int8_rows", "fp32", True)[3::6],
    *(
        config
        for layout in ("nn", "tn", "tt")
        for config in (
            *default_configs(True, "bf16", layout=layout),
            *default_configs(False, "fp16", layout=layout)[::3],
            *default_configs(True, "fp16", "fp32", layout=layout)[1::3],
            *default_configs(True, "bf16", "fp32", True, layout=layout)[2::6],
            *default_configs(True, "bf16", None, False, "fp32", "gelu_tanh", layout=layout)[::6],
        )
    ),
    *default_configs(True, "bf16", "bf16", True)[::3],
    *default_configs(False, "bf16", "bf16", True)[1::4],
    *default_configs(True, "fp8", "bf16", True)[::4],
    *default_configs(True, "fp16", "fp16", True)[2::4],
    *default_configs(False, "fp8_rows", "fp16", True)[::5],
    *default_configs(True, "int8_unscaled", "int32", True)[::6],
    *default_configs(False, "int8_unscaled", "int32", True)[::9],
    *default_configs(True, "int8_unscaled"),
    *default_configs(False, "int8_unscaled")[::4],
    *default_configs(True, "int8_unscaled", "bf16")[1::8],
    *default_configs(True, "fp8_rows_promoted"),
    *default_configs(False, "fp8_rows_promoted", "fp32")[::4],
    *default_configs(True, "fp8_rows_promoted", "fp32", True)[1::4],
    *default_configs(True, "fp8_rows_e5m2_e4m3")[::6],
    *default_configs(True, "fp8_1x128_e5m2_e5m2", "fp32")[::6],
    *default_configs(True, "fp8_e4m3_e5m2")[::9],
)

LEGAL_CORNERS = (
    GemmConfig(64, 16, 2, kind="bf16"),
    GemmConfig(64, 48, 3, 2, 1, kind="fp16", output="fp32", tma_store=False),
    GemmConfig(64, 240, 3, 1, 2, kind="bf16", output="fp32", store_buffers=1),
    GemmConfig(128, 16, 9, kind="bf16"),
    GemmConfig(128, 144, 2, kind="fp16"),
    GemmConfig(128, 176, 3, 2, 1, kind="bf16", output="fp32", store_buffers=1),
    GemmConfig(128, 240, 3, kind="bf16", store_buffers=1),
    GemmConfig(128, 128, 2, kind="bf16", scale_blocks=2, store_buffers=1),
    GemmConfig(64, 16, 2, kind="bf16", layout="tn"),
    GemmConfig(64, 48, 3, 2, 1, kind="fp16", layout="nn", output="fp32", tma_store=False),
    GemmConfig(64, 240, 3, 1, 2, kind="bf16", layout="tt", output="fp32", store_buffers=1),
    GemmConfig(64, 32, 2, kind="bf16", layout="nn", scale_blocks=4, split_k=2),
    GemmConfig(128, 112, 3, 2, 1, kind="fp16", layout="tn"),
    GemmConfig(128, 144, 3, 1, 2, kind="bf16", layout="tn", store_buffers=1),
    GemmConfig(128, 176, 3, 2, 1, kind="bf16", layout="nn", output="fp32", store_buffers=1),
    GemmConfig(128, 208, 2, kind="fp16", layout="tn", split_k=1, store_buffers=1),
    GemmConfig(128, 96, 2, kind="bf16", layout="tt", output="fp32", split_k=2, store_buffers=1),
    GemmConfig(256, 192, 3, kind="bf16", layout="tn", store_buffers=1),
    GemmConfig(256, 32, 4, 2, 1, kind="fp16", layout="nn", output="bf16"),
    GemmConfig(256, 80, 3, 1, 2, kind="bf16", layout="tt", store_buffers=1),
    GemmConfig(64, 16, 2, kind="fp16", transposed=True),
    GemmConfig(64, 240, 2, 1, 2, kind="bf16", layout="tt", output="fp16", transposed=True),
    GemmConfig(128, 128, 2, kind="fp16", layout="tn", split_k=4, store_buffers=1, transposed=True),
    GemmConfig(256, 176, 2, kind="bf16", layout="nn", store_buffers=1, transposed=True),
    GemmConfig(128, 96, 2, kind="bf16", output="fp32", split_k=2, store_buffers=1),
    GemmConfig(256, 192, 3, kind="bf16", store_buffers=1),
    GemmConfig(256, 16, 4, 2, 1, kind="fp16", output="bf16"),
    GemmConfig(64, 128, 2, kind="bf16", split_k=8, store_buffers=1),
    GemmConfig(64, 16, 2, kind="int8"),
    GemmConfig(64, 48, 3, kind="int8_rows"),
    GemmConfig(64, 48, 3, kind="int8_unscaled"),
    GemmConfig(64, 128, 2, kind="int8_unscaled", split_k=8, store_buffers=1),
    GemmConfig(256, 128, 2, kind="int8_rows", split_k=2, bias="fp32", activation="relu", store_buffers=1),
    GemmConfig(64, 256, 2, kind="int8_rows", split_k=8, output="fp32", tma_store=False),
    GemmConfig(128, 128, 2, kind="int8_rows", split_k=2, activation="swiglu", bias="bf16", store_buffers=1),
    GemmConfig(128, 208, 2, 2, 1, kind="int8_unscaled", store_buffers=1),
    GemmConfig(256, 96, 2, kind="int8_unscaled", tma_store=False),
    GemmConfig(128, 144, 3, kind="int8"),
    GemmConfig(128, 112, 3, kind="int8", pairs=True),
    GemmConfig(128, 192, 4, kind="int8", b_stages=4, store_buffers=1),
    GemmConfig(64, 16, 2, kind="fp8_rows_promoted"),
    GemmConfig(128, 176, 2, kind="fp8_rows_promoted", output="fp32", store_buffers=1),
    GemmConfig(128, 224, 3, 2, 1, kind="fp8_rows_promoted", output="fp16"),
    GemmConfig(256, 48, 3, kind="fp8_rows_promoted", tma_store=False),
    GemmConfig(128, 96, 2, kind="fp8_rows_promoted", split_k=2, scale_blocks=2, store_buffers=1),
    GemmConfig(256, 48, 3, kind="fp8_rows"),
    GemmConfig(128, 208, 2, kind="fp8_rows", output="fp16"),
    GemmConfig(64, 16, 2, kind="fp8_1x128", output="fp32", accumulate=True),
    GemmConfig(64, 240, 2, kind="fp8_1x128", store_buffers=1),
    GemmConfig(64, 32, 2, kind="fp8_1x128", scale_blocks=4, output="fp32"),
    GemmConfig(128, 112, 3, kind="fp8_1x128", output="fp32", accumulate=True),
    GemmConfig(128, 144, 3, 2, 1, kind="fp8_1x128", output="fp16"),
    GemmConfig(128, 176, 2, kind="fp8_1x128", output="fp32", store_buffers=1),
    GemmConfig(128, 224, 2, 1, 2, kind="fp8_1x128", output="fp32", store_buffers=1),
    GemmConfig(128, 64, 2, kind="fp8_1x128", scale_blocks=2, output="fp32", accumulate=True),
    GemmConfig(128, 192, 2, kind="fp8_1x128", split_k=2, output="fp32", accumulate=True, store_buffers=1),
)
"""Legal configs at the ends of their ranges that the selector never chooses."""


@pytest.fixture(scope="module")
def every_kernel(request):
    """Compile the chosen tests' kernels on all cores and load them; for accumulating ones also their counterparts."""
    tests = (item for item in request.session.items if item.module is request.module and hasattr(item, "callspec"))
    known = [item.callspec.params["config"] for item in tests if "config" in item.callspec.params]
    plain = (without_adding(config) for config in known if config.accumulate)
    plan.load_kernels(dict.fromkeys((*known, *plain)), torch.cuda.current_device(), os.cpu_count())


def without_adding(config: GemmConfig) -> GemmConfig:
    """The config with sums of its own, whose boxes may be others: one for which there is room."""
    return replace(config, accumulate=False, store_buffers=1)


def check_gemm(a, b, dtype, *, out_stride=None, out_offset=0, **keywords) -> torch.Tensor:
    """Multiply by `gemm` into a guarded `out` of NaN, check its values and its surroundings, and return it."""
    m, n = a.shape[0], b.shape[0]
    guarded = GuardedOut(m, n, device=DEVICE, stride=out_stride, offset=out_offset, dtype=dtype)
    assert gemm(a, b, guarded.out, **keywords) is guarded.out
    guarded.assert_guards_intact()
    assert_accurate(guarded.out, exact_dense_product(a, b), ACCUMULATION_WITHOUT_SCALES)
    return guarded.out


def check_config(config: GemmConfig, m: int, n: int, k: int, num_sms: int, scales: str = "row") -> None:
    """Check with a k that the config takes. Rows are aligned where it stores with TMA, otherwise TMA could not address
    them."""
    smallest, largest = config.k_range
    k = min(max(k, smallest), largest or k)
    k = k if config.takes_k(k) else k + 128
    if config.columns_per_output == 2:
        n = round_up(n, 16)
    if config.tma_store:
        n = round_up(n, 8)
        layout = {"stride": n + 8}
    else:
        layout = {"stride": n + 1 - n % 2, "offset": 3}
    by_scaled_gemm = config.product.family == "fp8" and (config.kind != "fp8" or config.accumulate)
    if by_scaled_gemm:  # which takes scales of one K block for those of rows
        k = max(k, 129)
    padding = 16 * (m % 2)
    product = make_product(config.kind, m, n, k, device=DEVICE, padding=padding, scales=scales, layout=config.layout)
    if by_scaled_gemm:
        product = product._replace(call=scaled_gemm)
    if config.product.family == "fp8_1x128":  # likewise, but not `fp8_wgrad`
        product = product._replace(call=partial(fp8_wgrad, accumulate=False))
    if config.is_finished:
        product = with_finish(product, config.bias, config.activation)
    dtype = getattr(torch, RESULTS[config.output].dtype)
    guarded = GuardedOut(m, n // config.columns_per_output, device=DEVICE, dtype=dtype, **layout)
    if config.accumulate:
        check_added(product, guarded, config=config, num_sms=num_sms)
    else:
        product.check(guarded, config=config, num_sms=num_sms)


def check_added(product: Product, guarded: GuardedOut, config: GemmConfig | None = None, **keywords) -> None:
    """Add twice to random numbers. With a given config the sum equals `out` plus the counterpart's product, bit for
    bit, rounded once more."""
    guarded.out.copy_(10 * torch.randn(guarded.out.shape, device=DEVICE))
    for _ in range(2):
        before = guarded.out.clone()
        added(product, before).check(guarded, config=config, **keywords)
        if config is not None:
            plain = torch.empty_like(guarded.out)
            product.call(*product.operands, plain, config=without_adding(config), **keywords)
            assert same_bits(guarded.out, before.add_(plain))


@pytest.mark.parametrize("config", CONFIGS + LEGAL_CORNERS, ids=lambda config: config.name)
def test_every_kernel(config, every_kernel, monkeypatch):
    rows, columns = config.block_m, config.block_n
    # 3 x 3 tiles and a ragged edge; the ring goes round once and a bit, K ends inside a block.
    ring = config.block_k * config.stages * config.split_k
    for scales in ("row", "column_aligned"):
        check_config(config, 2 * rows + 1, 2 * columns + 5, ring + 84, max(4, config.cluster), scales)
    # Fewer K blocks than stages, many short waves, an odd number of SMs, few rows.
    check_config(config, 7, 9 * columns - 3, 65, max(5, config.cluster))
    # One K block, for which split K leaves parts nothing, and one element of K.
    check_config(config, rows + 1, columns + 8, config.block_k // config.scale_blocks, max(4, config.cluster))
    check_config(config, 3, columns, 1, max(4, config.cluster))
    # More than one group of the raster's rows of tiles, the last group short.
    check_config(config, 9 * rows + 3, 3 * columns, 128, max(6, config.cluster), "scattered")
    monkeypatch.setattr("deep_tile.plan.raster_rows", lambda config, problem: 16)
    check_config(config, 17 * rows + 3, 2 * columns, 64, max(6, config.cluster))


@pytest.mark.parametrize("kind", [name for name, kind in FAMILIES.items() if kind.scaling != "none"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("m", [1, 64, 129, 1000])
def test_the_selectors_own_choice_of_scaled_kinds(kind, output, m):
    for n, k in ((1, 1), (24, 63), (136, 128), (576, 1001), (2112, 7168)):
        for scales in ("row", "column"):
            product = make_product(kind, m, n, k, device=DEVICE, padding=32, scales=scales)
            dtype = getattr(torch, OUTPUTS[output].dtype)
            product.check(GuardedOut(m, n, device=DEVICE, dtype=dtype))
            product.check(GuardedOut(m, n, device=DEVICE, dtype=dtype, stride=n + 5, offset=1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FAMILIES])
@pytest.mark.parametrize("m", [3, 300])
def test_the_selectors_own_choice_of_mixed_formats(kind, m):
    for n, k in ((24, 63), (136, 640), (2112, 1001)):
        product = make_product(kind, m, n, k, device=DEVICE, padding=16)
        product.check(GuardedOut(m, n, device=DEVICE, dtype=torch.float32))
        product.check(GuardedOut(m, n, device=DEVICE, stride=n + 5, offset=1))


@pytest.mark.parametrize("m", [1, 64, 129, 1000])
def test_gradients_of_weights_by_the_selectors_own_choice(m):
    for n, k in ((1, 1), (24, 63), (136, 128), (576, 1001), (2112, 7168)):
        for scales in ("row", "column", "column_aligned"):
            product = make_product("fp8_1x128", m, n, k, device=DEVICE, padding=32, scales=scales)
            product = product._replace(call=fp8_wgrad)
            for layout in ({}, {"stride": n + 5, "offset": 1}):
                check_added(product, GuardedOut(m, n, device=DEVICE, dtype=torch.float32, **layout))


def test_scales_of_columns_are_as_accurate_as_scales_of_blocks():
    """Both get the same operands and the same scales, one per row or one per block: sums equal fp8_gemm's bit for bit,
    rounded once."""
    m, n, k = 300, 520, 1024
    a, a_scale, b, b_scale = make_operands(m, n, k, device=DEVICE)
    of_rows = b_scale.repeat_interleave(128, 0)[:n]
    ours = scaled_gemm(a, a_scale, b, of_rows, batch_invariant=True)
    exact = exact_product(Operands(a, a_scale, b, b_scale)).value
    assert relative_error(ours, exact) <= 1.02 * relative_error(fp8_gemm(a, a_scale, b, b_scale), exact)


def test_chains_of_gradients_into_one_out():
    """Programmatic launches that add to the same numbers: each waits for the one before."""
    product = make_product("fp8_1x128", 384, 512, 512, device=DEVICE)
    once = torch.zeros(384, 512, device=DEVICE)
    fp8_wgrad(*product.operands, once)
    for _ in range(20):
        out = torch.zeros(384, 512, device=DEVICE)
        for _ in range(8):
            fp8_wgrad(*product.operands, out, pdl=True)
        assert torch.allclose(out, 8 * once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "promoted"])
@pytest.mark.parametrize("one", [True, False], ids=["one scale", "scales of rows"])
def test_scaled_fp8_is_as_accurate_as_torchs(one, fast):
    product = make_product("fp8_rows", 512, 1024, 4096, device=DEVICE, scales="column" if one else "row")
    a, a_scale, b, b_scale = product.operands
    shape = ((), ()) if one else ((-1, 1), (1, -1))
    scales = [x.contiguous().reshape(wanted) for x, wanted in zip((a_scale, b_scale), shape, strict=True)]
    torchs = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    ours = scaled_gemm(*product.operands, fast_accum=fast)
    assert relative_error(ours, product.exact.value) <= 1.1 * relative_error(torchs, product.exact.value)


def test_promoted_sums_are_those_of_blocks_with_scales_of_one():
    """Sums are equal bit for bit before the scales of rows, which are powers of two."""
    m, n, k = 300, 520, 1024
    a, a_scale, b, b_scale = make_product("fp8_rows", m, n, k, device=DEVICE).operands
    a_scale, b_scale = (x.log2().round().exp2() for x in (a_scale, b_scale))
    ones = torch.ones(m, k // 128, device=DEVICE), torch.ones(-(-n // 128), k // 128, device=DEVICE)
    plain = fp8_gemm(a, ones[0], b, ones[1], out_dtype=torch.float32, batch_invariant=True)
    keywords = {"fast_accum": False, "out_dtype": torch.float32, "batch_invariant": True}
    assert torch.equal(scaled_gemm(a, a_scale, b, b_scale, **keywords), plain * a_scale * b_scale.t())


def test_integers_of_all_of_k_are_exact():
    """At the ends of their range: the largest sums there are."""
    a = torch.full((70, 4096), -128, dtype=torch.int8, device=DEVICE)
    b = torch.randint(-128, 128, (136, 4096), dtype=torch.int8, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    exact = a.double() @ b.double().t()
    assert (scaled_gemm(a, one, b, one, out_dtype=torch.float32) == exact.float()).all()
    ones = torch.ones(70, 32, device=DEVICE), torch.ones(2, 32, device=DEVICE)
    assert (int8_gemm(a, ones[0], b, ones[1], out_dtype=torch.float32) == exact.float()).all()
    assert torch.equal(gemm(a, b).double(), exact)
    assert torch.equal(gemm(a, b, out_dtype=torch.float32), exact.float())


def cancelling_integers(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers whose sums over half of k need 25 bits or more, and over all of k at most 13."""
    a, b = (torch.randint(96, 128, (rows, k // 2), dtype=torch.int8, device=DEVICE) for rows in (m, n))
    a, b = a.repeat(1, 2), torch.cat((b, -b), 1)
    a[:, -1] -= torch.randint(0, 64, (m,), dtype=torch.int8, device=DEVICE)
    return a, b


@pytest.mark.parametrize("parts", [None, 2, 4, 8])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("kind", ["int8_rows", "int8_unscaled"])
@pytest.mark.parametrize("sizes", [(16, 512, 7168), (1, 2048, 7168), (16, 512, 16384), (130, 200, 10240)])
def test_integers_that_cancel_between_parts_of_k_are_exact(sizes, kind, output, parts):
    """Converted and scaled when all are added: bit for bit, by the selector's choice and by every split."""
    (m, n, _), dtype = sizes, getattr(torch, OUTPUTS[output].dtype)
    operands = a, b = cancelling_integers(*sizes)
    exact = (a.double() @ b.double().t()).float()
    if kind == "int8_rows":
        of_a, of_b = torch.rand(m, device=DEVICE), torch.rand(n, device=DEVICE)
        operands, exact = (a, of_a, b, of_b), exact * (of_a[:, None] * of_b)
    bias = torch.randn(n, device=DEVICE)
    plain, of_finish = None, None
    if parts:
        plain = deepest_config(64, 128, split_k=parts, kind=kind, output=output)
        of_finish = replace(plain, bias="fp32", activation="relu")
    product = partial(gemm if kind == "int8_unscaled" else scaled_gemm, *operands)
    assert same_bits(product(out_dtype=dtype, config=plain), exact.to(dtype))
    finished = product(out_dtype=dtype, config=of_finish, bias=bias, activation="relu")
    assert same_bits(finished, (exact + bias).relu().to(dtype))
    before = torch.randint(-99, 99, (m, n), device=DEVICE).to(dtype)
    adding = plain and replace(plain, accumulate=True, store_buffers=1)
    assert same_bits(product(before.clone(), config=adding, accumulate=True), before + exact.to(dtype))


@pytest.mark.parametrize("m", [1, 17, 64, 129, 1000])
def test_integers_without_scales_are_exact_by_the_selectors_own_choice(m):
    """Some sums need more bits than FP32 has."""
    for n, k in ((1, 1), (24, 63), (136, 4096), (576, 16384), (2112, 7168)):
        a, b = (
            torch.randint(-128, 128, (rows, k + -k % 16), dtype=torch.int8, device=DEVICE)[:, :k] for rows in (m, n)
        )
        exact = a.double() @ b.double().t()
        for layout in ({}, {"stride": n + 5, "offset": 1}):
            guarded = GuardedOut(m, n, device=DEVICE, dtype=torch.int32, **layout)
            assert torch.equal(gemm(a, b, guarded.out).double(), exact)
            guarded.assert_guards_intact()


@pytest.mark.skipif(not hasattr(torch, "_int_mm"), reason="this torch has no product of integers")
def test_integers_without_scales_are_torchs():
    a, b = (torch.randint(-128, 128, (rows, 1024), dtype=torch.int8, device=DEVICE) for rows in (256, 512))
    assert torch.equal(gemm(a, b), torch._int_mm(a, b.t()))


@pytest.mark.parametrize("dtype", OPERANDS.values(), ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 7, 64, 65, 129, 1000])
def test_the_selectors_own_choice(dtype, out_dtype, m):
    for n, k in ((1, 1), (24, 63), (130, 64), (576, 1001), (2112, 513)):
        a, b = make_dense_operands(m, n, k, dtype, device=DEVICE, b_padding=24)
        check_gemm(a, b, out_dtype)
        check_gemm(a, b, out_dtype, out_stride=n + 5, out_offset=1)


@pytest.mark.parametrize("dtype", OPERANDS.values(), ids=str)
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
@pytest.mark.parametrize("m", [1, 7, 64, 65, 129, 1000])
def test_layouts_by_the_selectors_own_choice(dtype, layout, m):
    for n, k in ((1, 2), (24, 63), (130, 64), (576, 1001), (2112, 513)):
        a, b = make_dense_operands(m, n, k, dtype, device=DEVICE, a_padding=8, b_padding=24, layout=layout)
        check_gemm(a, b, dtype)
        check_gemm(a, b, torch.float32, out_stride=n + 5, out_offset=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_make_the_same_sums(layout):
    """Bit for bit: the order in which a kernel adds up does not depend on where its operands lie."""
    a, b = make_dense_operands(304, 520, 1096, torch.bfloat16, device=DEVICE)
    config = GemmConfig(128, 128, 4, kind="bf16", output="fp32")
    wanted = gemm(a, b, out_dtype=torch.float32, config=config)
    others = (x if major == "k" else x.t().contiguous().t() for x, major in zip((a, b), LAYOUTS[layout], strict=True))
    found = gemm(*others, out_dtype=torch.float32, config=replace(config, layout=layout))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", OPERANDS.values(), ids=str)
@pytest.mark.parametrize("shape", [(64, 2112, 7168), (300, 7168, 2048), (4096, 4096, 4096)])
def test_as_accurate_as_torch(dtype, shape):
    a, b = make_dense_operands(*shape, dtype, device=DEVICE)
    exact = exact_dense_product(a, b).value
    ours, torchs = relative_error(gemm(a, b), exact), relative_error(a @ b.t(), exact)
    assert ours <= 2 * torchs
    assert relative_error(gemm(a, b, out_dtype=torch.float32), exact) <= 1e-5


@pytest.mark.parametrize("dtype", OPERANDS.values(), ids=str)
def test_results_repeat_and_rows_do_not_depend_on_others(dtype):
    a, b = make_dense_operands(333, 1544, 2056, dtype, device=DEVICE)
    whole = gemm(a, b, batch_invariant=True)
    for rows, num_sms in ((1, None), (17, 60), (64, 132), (128, 7), (333, 100)):
        num_sms = num_sms and min(num_sms, torch.cuda.get_device_properties(0).multi_processor_count)
        part = gemm(a[:rows], b, batch_invariant=True, num_sms=num_sms)
        assert same_bits(part, whole[:rows]), (rows, num_sms)
    first = gemm(a[:5], b)
    assert all(same_bits(gemm(a[:5], b), first) for _ in range(20))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposed_tiles_give_the_bits_of_others(layout):
    """The tensor cores sum K alike, whichever operand a tile's rows are of. A sum in parts has bits of its own."""
    operands = make_dense_operands(328, 1160, 2056, torch.bfloat16, device=DEVICE)
    a, b = (x if major == "k" else x.t().contiguous().t() for x, major in zip(operands, LAYOUTS[layout], strict=True))
    usual = next(config for config in default_configs(True, "bf16", layout=layout) if config.split_k == 1)
    like = default_configs(True, "bf16", layout="tn" if layout == "tt" else layout)  # tt has none by default
    transposed = [replace(config, layout=layout) for config in like if config.transposed]
    exact, expected = exact_dense_product(a, b), gemm(a, b, config=usual)
    assert not usual.transposed and transposed
    for config in transposed:
        for num_sms in (None, max(6, config.cluster)):
            guarded = GuardedOut(328, 1160, device=DEVICE, stride=1168)
            gemm(a, b, guarded.out, config=config, num_sms=num_sms)
            guarded.assert_guards_intact()
            assert_accurate(guarded.out, exact, ACCUMULATION_WITHOUT_SCALES)
            assert config.split_k > 1 or same_bits(guarded.out, expected), (config.name, num_sms)


def test_values_that_are_not_finite_stay_in_their_rows_and_columns():
    a, b = make_dense_operands(200, 264, 640, torch.bfloat16, device=DEVICE)
    plain = gemm(a, b)
    a[67, 5], b[130, 9] = float("nan"), float("inf")
    odd = gemm(a, b)
    assert odd[67].isnan().all() and not odd[:, 130].isfinite().any()
    rows, columns = torch.arange(200) != 67, torch.arange(264) != 130
    assert same_bits(odd[rows][:, columns], plain[rows][:, columns])


def test_fp16_results_that_are_too_large_are_infinite():
    a = torch.full((64, 256), 200.0, device=DEVICE, dtype=torch.float16)
    b = torch.full((128, 256), 200.0, device=DEVICE, dtype=torch.float16)
    assert gemm(a, b).isinf().all()
    assert (gemm(a, b, out_dtype=torch.float32) == 200.0 * 200 * 256).all()


@pytest.mark.parametrize("has_epilogue", [False, True])
@pytest.mark.parametrize("m", [4, 64, 200, 700])
def test_chains_of_programmatic_launches(m, has_epilogue):
    """Each GEMM reads the result of the one before, also as its bias, and lets the next one start early."""
    weights = [make_dense_operands(1, 1024, 1024, torch.bfloat16, device=DEVICE)[1] / 32 for _ in range(6)]
    x = make_dense_operands(m, 1, 1024, torch.bfloat16, device=DEVICE)[0]

    def chain(**options):
        y = x
        for weight in weights:
            epilogue = {"bias": y[0], "activation": "gelu"} if has_epilogue else {}
            y = gemm(y, weight, **epilogue, **options)
        return y

    alone = chain(pdl=False)
    for _ in range(30):
        assert same_bits(chain(pdl=True), alone)
        assert same_bits(chain(pdl=True, constant_weights=True), alone)


def test_configs_of_another_kind_are_refused_and_nothing_is_written():
    a, b = make_dense_operands(64, 64, 128, torch.bfloat16, device=DEVICE)
    guarded = GuardedOut(64, 64, device=DEVICE)
    with pytest.raises(ValueError, match="fp8_gemm_128x128x128_s4_c1x1 is for kind='fp8'"):
        gemm(a, b, guarded.out, config=GemmConfig(128, 128, 4))
    torch.cuda.synchronize()
    guarded.assert_untouched()
