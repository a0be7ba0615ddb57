"""`fp8_gemm_cast`: the cast of a product, by one kernel or by two, and never anything else."""

import random

import pytest
import torch
from campaign import noise
from helpers import Operands, make_operands

import deep_tile
from deep_tile import GemmConfig, dense, fp8_gemm, fp8_gemm_cast, gemm_cast, per_token_cast_to_fp8
from deep_tile.config import ceil_div
from deep_tile.kinds import ACTIVATIONS, QUANTIZED
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import casts_apart, choose, choose_cast, without_cast
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.usefixtures("quick_compiler")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FINISHES = [(None, None), (torch.bfloat16, None), (None, "swiglu"), (torch.float32, "silu"), (torch.float16, "swiglu")]

BIASES = {"none": None, "bf16": torch.bfloat16, "fp32": torch.float32}

CONFIGS = sorted(
    {
        config
        for bias, activation in (("none", "none"), ("none", "swiglu"), ("fp32", "silu"), ("bf16", "gelu"))
        for config in default_configs(output=QUANTIZED, bias=bias, activation=activation)
    },
    key=lambda config: config.name,
)


def in_two(operands: Operands, scale_layout: str = "row", cast: dict | None = None, **product):
    """The definition."""
    return per_token_cast_to_fp8(
        fp8_gemm(*operands, batch_invariant=True, **product), scale_layout=scale_layout, **(cast or {})
    )


def assert_same(made, expected) -> None:
    """Bit for bit, but for the sign of NaN."""
    (out, scale), (wanted, of_wanted) = made, expected
    assert out.shape == wanted.shape and scale.shape == of_wanted.shape
    assert torch.equal(scale, of_wanted) or torch.equal(scale.nan_to_num(-1), of_wanted.nan_to_num(-1))
    assert torch.equal(out.float().nan_to_num(-1), wanted.float().nan_to_num(-1))


def bias_of(n: int, dtype: torch.dtype | None, device: str) -> torch.Tensor | None:
    return None if dtype is None else (torch.randn(n, device=device) * 4).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("bias", "activation"), FINISHES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 128), (129, 512, 384), (300, 1056, 200), (77, 48, 1), (640, 96, 8)])
def test_it_is_the_cast_of_a_product(device, m, n, k, bias, activation):
    operands = make_operands(m, n, k, device=device)
    finish = {"bias": bias_of(n, bias, device), "activation": activation}
    made = fp8_gemm_cast(*operands, scale_layout="row", batch_invariant=True, **finish)
    assert_same(made, in_two(operands, **finish))
    assert made[0].stride(0) % 16 == 0 and made[1].is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 256, 129), (63, 272, 512), (129, 1024, 640), (700, 1312, 256), (515, 4096, 384)]
)
def test_every_kernel(config, m, n, k):
    if not config.takes_k(k):
        pytest.skip(f"{config.name} does not take k = {k}")
    operands = make_operands(m, n, k, device="cuda")
    activation = None if config.activation == "none" else config.activation
    finish = {"bias": bias_of(n, BIASES[config.bias], "cuda"), "activation": activation}
    columns = n // config.columns_per_output
    if columns % 16:
        pytest.skip("rows of out that TMA cannot store")
    for layout, cast in (("row", {}), ("m_aligned", {"round_scale": "pow2"}), ("m", {"exact": "reciprocal"})):
        out, scale = guarded(m, columns, "cuda")
        made = fp8_gemm_cast(*operands, out[1:-1, :columns], scale[1:-1, :-1], config=config, **cast, **finish)
        assert_same(made, in_two(operands, cast=cast, **finish))
        assert_guards(out, scale, columns)
        assert_same(fp8_gemm_cast(*operands, scale_layout=layout, config=config, **cast, **finish), made)


def guarded(m: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An `out` and a scale with a row before and behind and columns behind that nothing may write to."""
    out = torch.full((m + 2, columns + 16), 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return out, torch.full((m + 2, ceil_div(columns, 128) + 1), -7.0, device=device)


def assert_guards(out: torch.Tensor, scale: torch.Tensor, columns: int) -> None:
    codes = out.view(torch.uint8)
    for around in (codes[0], codes[-1], codes[:, columns:]):
        assert (around == 0x55).all()
    for around in (scale[0], scale[-1], scale[:, -1]):
        assert (around == -7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_nan_and_infinity(device):
    """A block of zeros gets the scale of the floor. NaN and infinity fill their own block only."""
    a, a_scale, b, b_scale = make_operands(130, 384, 256, device=device)
    a, a_scale = a.clone(), a_scale.clone()
    a[3] = 0
    a_scale[5, 0], a_scale[6, 1] = torch.nan, torch.inf
    b, b_scale = b.clone(), b_scale.clone()
    for config in (None, *(QUANTIZED_TILES if device == "cuda" else ())):
        out, scale = fp8_gemm_cast(a, a_scale, b, b_scale, config=config)
        assert (scale[3] == 2.0**-126).all() and (out[3].float() == 0).all()
        assert scale[5:7].isnan().all() and out[5:7].float().isnan().all()
        finite = [row for row in range(130) if row not in (5, 6)]
        assert scale[finite].isfinite().all() and out[finite].float().isfinite().all()
        assert_same((out, scale), in_two(Operands(a, a_scale, b, b_scale)))


QUANTIZED_TILES = (GemmConfig(128, 128, 5, output=QUANTIZED), GemmConfig(64, 256, 4, output=QUANTIZED))


@pytest.mark.gpu
def test_beside_other_streams_and_in_a_graph():
    operands = make_operands(1030, 2304, 1152, device="cuda")
    expected = in_two(operands)
    assert choose_cast(GemmProblem(1030, 2304, 1152, output=QUANTIZED)) is not None
    other, x = torch.cuda.Stream(), torch.randn(1 << 24, device="cuda")
    out, scale = guarded(1030, 2304, "cuda")
    for _ in range(20):
        with torch.cuda.stream(other):
            x = x * 1.0000001
        out.view(torch.uint8)[1:-1, :2304] = 0x7F
        made = fp8_gemm_cast(*operands, out[1:-1, :2304], scale[1:-1, :-1])
        assert_same(made, expected)
    assert_guards(out, scale, 2304)
    cut = operands._replace(a=operands.a[:4], a_scale=operands.a_scale[:4])
    fp8_gemm_cast(*cut, activation="swiglu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made, small = fp8_gemm_cast(*operands), fp8_gemm_cast(*cut, activation="swiglu")
    for _ in range(3):
        graph.replay()
    assert_same(made, expected)
    assert_same(small, per_token_cast_to_fp8(fp8_gemm(*cut, activation="swiglu")))


@pytest.mark.gpu
def test_any_draw():
    """Any size, layout, epilogue and rounding, by the selector's kernels and others, beside other streams."""
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    source, beside = random.Random(seed), noise("cuda")
    for _ in range(400):
        m, n, k = (round(2 ** source.uniform(0, most)) for most in (10.5, 12, 11))
        config = source.choice([None, *CONFIGS])
        if config is not None and not config.takes_k(k):
            continue
        bias = source.choice(["none", *BIASES]) if config is None else config.bias
        activation = source.choice([None, "swiglu", "silu", "relu"]) if config is None else config.activation
        activation = None if activation == "none" else activation
        gated = activation == "swiglu"
        n = n // 16 * 16 + 16 if gated else n
        if config is not None:  # which stores by TMA
            n = n // 32 * 32 + 32
        columns = n // 2 if gated else n
        operands = make_operands(m, n, k, device="cuda", seed=source.randrange(2**31))
        finish = {"bias": bias_of(n, BIASES[bias], "cuda"), "activation": activation}
        cast = {
            "round_scale": source.choice(["none", "pow2"]),
            "exact": source.choice(["divide", "reciprocal"]),
            "amax_floor": source.choice([0, 1e-4, 1e-10, 3.0]),
        }
        out, scale = guarded(m, columns, "cuda")
        if source.random() < 0.3:
            scale = scale.t().contiguous().t()
        beside()
        given = (out[1:-1, :columns], scale[1:-1, :-1])
        options = {"config": config, "batch_invariant": True, "num_sms": source.choice([None, None, 132, 7])}
        made = fp8_gemm_cast(*operands, *given, **options, **cast, **finish)
        print(m, n, k, config and config.name, options, cast, bias, activation)
        assert_same(made, in_two(operands, cast=cast, **finish))
        assert_guards(out, scale, columns)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 256, 128), (5, 0, 128), (5, 256, 0)])
def test_empty(device, m, n, k):
    operands = make_operands(m, n, k, device=device)
    out, scale = fp8_gemm_cast(*operands)
    assert out.shape == (m, n) and scale.shape == (m, ceil_div(n, 128))
    if out.numel():
        assert (out.float() == 0).all() and (scale == 2.0**-126).all()


def wrong(**changed):
    operands = make_operands(4, 256, 128)
    named = dict(zip(("a", "a_scale", "b", "b_scale"), operands, strict=True))
    return named | {name: change(named.get(name)) if callable(change) else change for name, change in changed.items()}


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"a": None}, TypeError, "a must be a torch.Tensor"),
        ({"b": lambda b: b.float()}, TypeError, "b must be torch.float8_e4m3fn"),
        ({"a_scale": lambda s: s[:2]}, ValueError, "a_scale must have shape"),
        ({"out": torch.empty(4, 256)}, TypeError, "out is a tensor of float32; the cast writes a tensor of float8"),
        ({"out": torch.empty(4, 128, dtype=torch.float8_e4m3fn)}, ValueError, r"out has shape \[4, 128\]"),
        ({"scale_out": torch.empty(4, 3)}, ValueError, r"scale_out has shape \[4, 3\]; .* must be \[4, 2\]"),
        ({"scale_out": torch.empty(1, 2).expand(4, 2)}, ValueError, "elements of scale_out share memory"),
        ({"scale_layout": "n"}, ValueError, "scale_layout is 'n'"),
        ({"amax_floor": -1}, ValueError, "amax_floor is -1"),
        ({"round_scale": "up"}, ValueError, "round_scale is 'up'"),
        ({"exact": []}, ValueError, "exact is"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
        ({"bias": torch.zeros(3)}, ValueError, "bias must be"),
        ({"num_sms": True}, TypeError, "num_sms is True"),
        ({"config": "128x128"}, TypeError, "config must be a deep_tile.GemmConfig"),
        ({"scale_out": torch.empty(4, 2, requires_grad=True)}, RuntimeError, "scale_out requires a gradient"),
        ({"a_scale": lambda s: s.clone().requires_grad_()}, RuntimeError, "a_scale requires .* fp8_gemm_cast has none"),
    ],
)
def test_bad_calls(changed, error, said):
    with pytest.raises(error, match=said):
        fp8_gemm_cast(**wrong(**changed))


def test_a_floor_that_equals_a_known_one_launches_nothing(monkeypatch):
    """Also where the GEMM and the cast are two launches."""
    operands = make_operands(4, 256, 128)
    fp8_gemm_cast(*operands, amax_floor=1.0)
    multiply, products = dense.FP8_GEMM.run, []
    monkeypatch.setattr(dense.FP8_GEMM, "run", lambda *given: products.append(1) or multiply(*given))
    for _ in range(2):
        with pytest.raises(TypeError, match="amax_floor is True"):
            fp8_gemm_cast(*operands, amax_floor=True)
    assert not products
    fp8_gemm_cast(*operands, amax_floor=1)
    assert products


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GemmConfig(128, 128, 4), "output='bf16', and this call for kind='fp8' and output='e4m3'"),
        (GemmConfig(128, 256, 4, output=QUANTIZED, activation="swiglu"), "activation='swiglu', and this call"),
    ],
)
def test_configs_of_other_products(config, said):
    with pytest.raises(ValueError, match=said):
        fp8_gemm_cast(*make_operands(4, 256, 128, device="cuda"), config=config)


@pytest.mark.parametrize(
    "options",
    [
        {"block_n": 192},
        {"block_n": 128, "activation": "swiglu"},
        {"block_n": 256, "split_k": 2, "block_m": 64},
        {"block_n": 128, "tma_store": False},
        {"block_n": 128, "kind": "bf16"},
        {"block_n": 128, "grouping": "offs"},
        {"block_n": 128, "accumulate": True},
    ],
)
def test_tiles_that_cannot(options):
    with pytest.raises(ValueError):
        GemmConfig(**{"block_m": 128, "stages": 3, "output": QUANTIZED} | options)


def test_kernels_of_every_finish_can_be_chosen():
    for activation in ACTIVATIONS:
        for bias in ("none", "bf16"):
            problem = GemmProblem(4096, 8192, 4096, output=QUANTIZED, bias=bias, activation=activation)
            config = choose_cast(problem)
            assert config.quantizes and config.activation == activation and config.out_columns_per_part % 128 == 0


def test_a_bucket_is_of_one_mind():
    """Within a bucket of m, the choice between one kernel and two does not change."""
    problem = GemmProblem(1, 4096, 7168, output=QUANTIZED, activation="swiglu")
    chosen = [choose_cast(problem._replace(m=m)) for m in range(1, 2049)]
    for end in range(64, 2049, 64):
        assert len(set(chosen[end - 64 if end > 128 else end - 8 : end])) == 1
    assert chosen[0] is None and chosen[-1] is not None


def test_apart_where_tiles_cannot_be_narrow():
    assert casts_apart(GemmProblem(8, 2048, 7168, output=QUANTIZED, activation="swiglu"))
    assert not casts_apart(GemmProblem(8192, 2048, 7168, output=QUANTIZED, activation="swiglu"))


def test_calls_in_two_are_remembered():
    operands = make_operands(8, 256, 128)
    gemm_cast.FP8_GEMM_CAST.in_turn.clear()
    for _ in range(3):
        fp8_gemm_cast(*operands)
    assert sum(len(known) for _, known in gemm_cast.FP8_GEMM_CAST.in_turn.values()) == 1


@pytest.mark.parametrize("finish", [{}, {"activation": "swiglu", "bias": torch.float32}])
def test_precompile_compiles_what_is_needed(finish):
    done = deep_tile.precompile([(256, 128, 9)], out_dtype=torch.float8_e4m3fn, num_sms=132, **finish)
    problem = GemmProblem(9, 256, 128, output=QUANTIZED, bias="fp32" if finish else "none", **activation_of(finish))
    assert (choose_cast(problem) or choose(without_cast(problem))) in done.configs
    again = deep_tile.precompile([(256, 128, 9)], out_dtype=torch.float8_e4m3fn, num_sms=132, **finish)
    assert again == (done.configs, 0)


def activation_of(finish: dict) -> dict:
    return {"activation": finish["activation"]} if finish else {}


def test_precompile_of_what_is_not():
    for wrong in ({"kind": "bf16"}, {"grouping": "offs"}, {"accumulate": True}):
        with pytest.raises(ValueError):
            deep_tile.precompile([(256, 128, 9)], out_dtype=torch.float8_e4m3fn, **wrong)
