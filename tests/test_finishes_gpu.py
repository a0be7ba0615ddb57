"""Bias, activation and format of products on a Hopper GPU: every tile with some finish, every kind with every finish.

Inputs are fresh on every run, surrounded by NaN, and `out` is surrounded by bits that must not change.
"""

import os
from functools import partial

import pytest
import torch
from helpers import GuardedOut, make_product, same_bits, with_finish
from test_dense_gpu import check_config

from deep_tile import GemmConfig, fp8_gemm, fp8_linear, gemm, per_token_cast_to_fp8, plan, quantize_weight
from deep_tile.config import round_up
from deep_tile.kinds import ACTIVATIONS, BIASES, FAMILIES, OUTPUTS
from deep_tile.problem import GemmProblem
from deep_tile.reference import finished
from deep_tile.select.choose import choose
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FINISHES = [(bias, activation) for activation in ACTIVATIONS for bias in BIASES][1:]


def in_turn(count: int, first: int, tma_store: bool, kind: str, output: str | None = None) -> list[GemmConfig]:
    """`count` epilogues for each default tile of a kind, in turn from all that it may have."""
    found = []
    plain = default_configs(tma_store, kind, output)
    for i, config in enumerate(plain):
        for j in range(count):
            finish = FINISHES[(first + 7 * i + 5 * j) % len(FINISHES)]
            fields = ("block_m", "block_n", "stages", "cluster_m", "cluster_n", "split_k", "scale_blocks", "b_stages")
            same = {field: getattr(config, field) for field in fields}
            having = default_configs(tma_store, kind, output, False, *finish)
            found += [one for one in having if {field: getattr(one, field) for field in fields} == same]
    return found


CONFIGS = tuple(
    dict.fromkeys(
        [
            *in_turn(3, 0, True, "fp8"),
            *in_turn(1, 3, False, "fp8"),
            *in_turn(2, 1, True, "fp8", "fp32"),
            *in_turn(3, 2, True, "bf16"),
            *in_turn(1, 5, False, "bf16", "fp32"),
            *in_turn(1, 4, True, "fp16"),
            *in_turn(2, 6, True, "fp8_rows"),
            *in_turn(1, 7, True, "int8"),
            *in_turn(1, 8, False, "int8_rows", "fp16"),
        ]
    )
)

LEGAL_CORNERS = (
    GemmConfig(64, 32, 2, activation="swiglu"),
    GemmConfig(64, 96, 3, 2, 1, activation="swiglu", output="fp32", tma_store=False),
    GemmConfig(64, 256, 2, split_k=8, store_buffers=1, bias="fp16", activation="swiglu"),
    GemmConfig(128, 112, 3, bias="fp16", pairs=True),
    GemmConfig(128, 160, 4, activation="swiglu", store_buffers=1),
    GemmConfig(128, 224, 3, 2, 1, bias="bf16", activation="swiglu", store_buffers=1),
    GemmConfig(128, 192, 4, bias="bf16", activation="silu", b_stages=4, store_buffers=1),
    GemmConfig(256, 96, 3, 1, 2, bias="fp32", activation="swiglu", store_buffers=1),
    GemmConfig(256, 144, 2, activation="silu", store_buffers=1),
    GemmConfig(128, 192, 3, kind="bf16", bias="fp16", activation="swiglu", store_buffers=1),
    GemmConfig(256, 96, 3, kind="fp8_rows", bias="bf16", activation="gelu"),
)
"""Legal configs that the selector never chooses."""


@pytest.fixture(scope="module")
def every_kernel():
    """Every kernel of these tests, compiled on all cores and loaded."""
    plan.load_kernels((*CONFIGS, *LEGAL_CORNERS), torch.cuda.current_device(), os.cpu_count())


@pytest.mark.parametrize("config", CONFIGS + LEGAL_CORNERS, ids=lambda config: config.name)
def test_every_tile_with_some_finish(config, every_kernel):
    rows, columns = config.block_m, config.block_n
    # 3 x 3 tiles and a ragged edge; the ring goes round once and a bit, K ends inside a block.
    ring = config.block_k * config.stages * config.split_k
    check_config(config, 2 * rows + 1, 2 * columns + 5, ring + 84, max(4, config.cluster))
    # Fewer K blocks than stages, many short waves, an odd number of SMs, few rows.
    check_config(config, 7, 9 * columns - 3, 65, max(5, config.cluster))
    # One K block, for which split K leaves parts nothing, and one element of K.
    check_config(config, rows + 1, columns + 8, config.block_k // config.scale_blocks, max(4, config.cluster))
    check_config(config, 3, columns, 1, max(4, config.cluster))


def checked(kind: str, m: int, n: int, k: int, finish: tuple[str, str], output: str, **layout) -> torch.Tensor:
    bias, activation = finish
    product = with_finish(make_product(kind, m, n, k, device=DEVICE, padding=32), bias, activation)
    columns = n // 2 if activation == "swiglu" else n
    layout = {"stride": columns + layout["extra"], "offset": layout["offset"]} if layout else {}
    dtype = getattr(torch, OUTPUTS[output].dtype)
    return product.check(GuardedOut(m, columns, device=DEVICE, dtype=dtype, **layout))


SHAPES = ((1, 1, 1), (7, 24, 63), (65, 131, 128), (129, 577, 1001), (300, 2112, 777))


def problems_in_turn(kind: str, finish: tuple[str, str]) -> list[GemmProblem]:
    """Two of the shapes in two formats: an `out` that TMA can address, and one that it cannot."""
    first = list(FAMILIES).index(kind) + FINISHES.index(finish)
    bias, activation = finish
    found = []
    for tma_store in (True, False):
        m, n, k = SHAPES[(first + 2 * tma_store) % len(SHAPES)]
        n = round_up(n, 16) if activation == "swiglu" or tma_store else n
        output = list(OUTPUTS)[(first + tma_store) % 3]
        made = {"kind": kind, "output": output, "bias": bias, "activation": activation}
        found.append(GemmProblem(m, n, k, tma_store=tma_store, **made))
    return found


@pytest.fixture(scope="module")
def every_choice():
    """The kernels of all problems in turn, compiled on all cores and loaded."""
    problems = (one for kind in FAMILIES for finish in FINISHES for one in problems_in_turn(kind, finish))
    configs = dict.fromkeys(choose(one) for one in problems)
    plan.load_kernels(tuple(configs), torch.cuda.current_device(), os.cpu_count())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("finish", FINISHES, ids="-".join)
def test_the_selectors_own_choice(kind, finish, every_choice):
    """Every kind with every finish; formats and shapes by turns."""
    for one in problems_in_turn(kind, finish):
        layout = {} if one.tma_store else {"extra": 5, "offset": 1}
        checked(kind, one.m, one.n, one.k, finish, one.output, **layout)


@pytest.mark.parametrize("finish", [("bf16", "none"), ("fp32", "gelu"), ("none", "swiglu")], ids="-".join)
@pytest.mark.parametrize("shape", [(4096, 7168, 2048), (4096, 2112, 7168), (128, 24576, 1536), (16, 7168, 16384)])
def test_shapes_of_models(finish, shape):
    checked("fp8", *shape, finish, "bf16")
    checked("bf16", *shape, finish, "bf16")


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_do_not_depend_on_others_with_a_finish(kind):
    product = with_finish(make_product(kind, 333, 1552, 2176, device=DEVICE), "bf16", "silu")
    product = product._replace(call=partial(product.call, out_dtype=torch.bfloat16))
    whole = product.call(*product.operands, batch_invariant=True)
    half = len(product.operands) // 2
    for rows in (1, 17, 64, 130):
        operands = [x[:rows] if i < half else x for i, x in enumerate(product.operands)]
        assert same_bits(product.call(*operands, batch_invariant=True), whole[:rows]), rows
    assert same_bits(product.call(*product.operands), product.call(*product.operands))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_of_every_size_of_number(activation):
    """Inputs from where an activation is linear to where it is zero, NaN and infinity, against float64."""
    x = torch.cat([torch.linspace(-20, 20, 4095), torch.logspace(-30, 4, 2000), -torch.logspace(-30, 4, 2000)])
    x = torch.cat([x, torch.tensor([0.0, float("nan"), float("inf"), 3.0e38, -3.0e38])]).to(DEVICE)
    a, b = torch.zeros(3, 64, device=DEVICE).bfloat16(), torch.zeros(len(x), 64, device=DEVICE).bfloat16()
    wanted = finished(torch.zeros(1, len(x), dtype=torch.float64, device=DEVICE), x, activation)
    for out in (
        gemm(a, b, bias=x, activation=activation, out_dtype=torch.float32),
        fp8_gemm(
            *(a.to(torch.float8_e4m3fn), torch.ones(3, 1, device=DEVICE), b.to(torch.float8_e4m3fn)),
            *(torch.ones(-(-len(x) // 128), 1, device=DEVICE),),
            bias=x,
            activation=activation,
            out_dtype=torch.float32,
        ),
    ):
        assert out.isnan().equal(wanted.isnan().expand(3, -1))
        assert out.isposinf().equal(wanted.float().isposinf().expand(3, -1))
        number = wanted.isfinite()[0] & (x.abs() < 1e30)
        error = (out.double() - wanted)[:, number].abs()
        assert (error <= 5e-7 * x[number].double().abs() + 1e-37).all()
        assert (out[:, number & (x < -1e3)].abs() <= 1e-6).all()


def test_nan_stays_in_its_row_and_column():
    product = with_finish(make_product("fp8", 200, 272, 640, device=DEVICE), "fp32", "swiglu")
    plain = product.call(*product.operands)
    product.call.keywords["bias"][130] = float("nan")  # in the eighth of 16 pairs: a gate
    product.operands[1][67] = float("nan")
    odd = product.call(*product.operands)
    column = 130 // 16 * 8 + 130 % 8
    assert odd[67].isnan().all() and odd[:, column].isnan().all()
    rows, columns = torch.arange(200) != 67, torch.arange(136) != column
    assert same_bits(odd[rows][:, columns], plain[rows][:, columns])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 65, 1000])
def test_a_layer_is_its_cast_and_its_product(dtype, m):
    x = torch.randn(m, 520, device=DEVICE).to(dtype)
    b, b_scale = quantize_weight(torch.randn(261, 520, device=DEVICE))
    for bias in (None, *(torch.randn(261, device=DEVICE).to(one) for one in (torch.bfloat16, torch.float32))):
        for out_dtype in (None, torch.float32, torch.float16):
            a, a_scale = per_token_cast_to_fp8(x)
            wanted = fp8_gemm(a, a_scale, b, b_scale, bias=bias, out_dtype=out_dtype or dtype)
            for _ in range(3):
                assert same_bits(fp8_linear(x, b, b_scale, bias, out_dtype=out_dtype), wanted)
