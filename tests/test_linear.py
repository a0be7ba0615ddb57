"""`fp8_linear` on the CPU and on a Hopper GPU: against cast and product, in value and gradient. What it refuses is in
bad_calls.py."""

import threading

import pytest
import torch
from helpers import same_bits

from deep_tile import (
    dequantize,
    fp8_gemm,
    fp8_linear,
    linear,
    per_token_cast_to_fp8,
    quantize_weight,
    tensors,
    transpose_fp8,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [
    ((7, 256), 130),
    ((1, 1, 4096), 96),
    ((2, 3, 208), 261),
    ((2, 2, 3, 144), 8),
    ((130,), 64),  # one row without leading dimensions
    ((3, 3884), 512),
    ((5, 9), 3),
    ((2, 1), 1),
    ((257, 1040), 1000),
]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


def make_layer(shape: tuple[int, ...], n: int, device: str, dtype: torch.dtype = torch.bfloat16):
    """x, b, b_scale and a bias."""
    x = torch.randn(shape, device=device).to(dtype)
    b, b_scale = quantize_weight(torch.randn(n, shape[-1], device=device))
    return x, b, b_scale, torch.randn(n, device=device).to(dtype)


def in_turn(x, b, b_scale, **options) -> torch.Tensor:
    """The result of the cast, then the GEMM."""
    a, a_scale = per_token_cast_to_fp8(x.reshape(-1, x.shape[-1]))
    return fp8_gemm(a, a_scale, b, b_scale, **options).view(*x.shape[:-1], b.shape[0])


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(("shape", "n"), SHAPES, ids=str)
def test_is_the_cast_and_the_product(device, shape, n, dtype):
    x, b, b_scale, bias = make_layer(shape, n, device, dtype)
    out = fp8_linear(x, b, b_scale)
    assert out.dtype == dtype and out.shape == (*shape[:-1], n)
    assert torch.equal(out, in_turn(x, b, b_scale, out_dtype=dtype))
    assert torch.equal(fp8_linear(x, b, b_scale, bias), in_turn(x, b, b_scale, bias=bias, out_dtype=dtype))
    for wanted in WIDE:
        assert torch.equal(fp8_linear(x, b, b_scale, out_dtype=wanted), in_turn(x, b, b_scale, out_dtype=wanted))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_out_is_written(device, dtype):
    x, b, b_scale, bias = make_layer((3, 5, 272), 40, device)
    buffer = torch.full((3, 5, 48), float("nan"), dtype=dtype, device=device)
    out = buffer[..., :40]
    assert fp8_linear(x, b, b_scale, bias, out, out_dtype=dtype) is out
    assert torch.equal(out, in_turn(x, b, b_scale, bias=bias, out_dtype=dtype))
    assert buffer[..., 40:].isnan().all()


def test_rows_that_are_not_dense(device):
    """Transposed, with a stride along k, of no rows too, broadcast, and with leading dimensions at no one stride."""
    _, b, b_scale, _ = make_layer((1, 256), 40, device)
    for x in (
        torch.empty(0, 512, device=device)[:, ::2],
        torch.empty(2, 512, 0, device=device).mT[..., ::2],
        torch.randn(256, 9, device=device).t(),
        torch.randn(9, 512, device=device)[:, ::2],
        torch.randn(1, 256, device=device).expand(9, 256),
        torch.randn(4, 5, 6, 272, device=device)[:, :2, :3, 3:259],
    ):
        assert torch.equal(fp8_linear(x, b, b_scale), in_turn(x.contiguous(), b, b_scale, out_dtype=x.dtype))


@pytest.mark.parametrize(("shape", "n", "k"), [((0,), 8, 32), ((2, 0), 8, 32), ((3,), 0, 32), ((3,), 8, 0)], ids=str)
def test_nothing_to_multiply(device, shape, n, k):
    b = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
    b_scale = torch.ones(-(-n // 128), -(-k // 128), device=device)
    bias = torch.randn(n, device=device)
    out = fp8_linear(torch.randn(*shape, k, device=device), b, b_scale, bias)
    assert out.shape == (*shape, n) and torch.equal(out, bias.expand(out.shape))


def test_a_wide_weight_is_quantised_on_the_way(device):
    x, *_ = make_layer((7, 200), 130, device)
    w = torch.randn(130, 200, dtype=torch.bfloat16, device=device)
    assert torch.equal(fp8_linear(x, w), fp8_linear(x, *quantize_weight(w)))


@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
def test_narrow_scales(device, dtype):
    """In eager calls, as an op, in a gradient, and with an input that is quantised already."""
    x, b, b_scale, _ = make_layer((7, 200), 130, device)
    narrow = b_scale.to(dtype)
    wide, a = narrow.float(), per_token_cast_to_fp8(x)
    expected = fp8_linear(x, b, wide)
    for got in (fp8_linear(x, b, narrow), torch.ops.deep_tile.fp8_linear(x, b, narrow), fp8_linear(a, b, narrow)):
        assert torch.equal(got, expected)
    torch.library.opcheck(torch.ops.deep_tile.fp8_linear.default, (x, b, narrow), test_utils="test_faketensor")
    x.requires_grad_()
    assert torch.equal(*(torch.autograd.grad(fp8_linear(x, b, scale).sum(), x)[0] for scale in (narrow, wide)))


@pytest.mark.parametrize("shape", [(5, 208), (2, 3, 208), (7,)], ids=str)
def test_layers_share_a_cast(device, shape):
    x, b, b_scale, bias = make_layer(shape, 130, device)
    a = per_token_cast_to_fp8(x, scale_layout="m_aligned")
    expected = fp8_linear(x, b, b_scale, bias)
    assert torch.equal(fp8_linear(a, b, b_scale, bias), expected)
    out = torch.empty_like(expected)
    assert fp8_linear(a, b, b_scale, bias, out) is out and torch.equal(out, expected)
    wide = fp8_linear(a, b, b_scale, bias, out_dtype=torch.float32)
    assert torch.equal(wide, fp8_linear(x, b, b_scale, bias, out_dtype=torch.float32))


def test_wrong_pairs_are_refused(device):
    x, b, b_scale, _ = make_layer((5, 208), 130, device)
    a, a_scale = per_token_cast_to_fp8(x)
    for pair, kind, message in (
        ((a,), ValueError, "x is a tuple of 1; pass the pair that per_token_cast_to_fp8 returned"),
        ((x, a_scale), TypeError, r"x\[0\] must be torch.float8_e4m3fn; got torch.bfloat16.*pass the input itself"),
        ((a, None), TypeError, r"x\[1\] must be a torch.Tensor; got NoneType"),
        ((a[:, :128], a_scale), ValueError, r"x must be \[..., k\] and b \[n, k\]"),
        ((a, a_scale[:3]), ValueError, "a_scale must have shape"),
    ):
        with pytest.raises(kind, match=message):
            fp8_linear(pair, b, b_scale)
    with pytest.raises(TypeError, match="b_scale must be a torch.Tensor; got NoneType"):
        fp8_linear((a, a_scale), b)


def test_small_magnitudes_and_nan(device):
    """`amax_floor` reaches the cast; NaN stays in its row."""
    x, b, b_scale, _ = make_layer((4, 256), 40, device)
    tiny = x * 1e-7
    assert not torch.equal(fp8_linear(tiny, b, b_scale), fp8_linear(tiny, b, b_scale, amax_floor=1e-4))
    clean = fp8_linear(x, b, b_scale)
    x[2, 17] = float("nan")
    out = fp8_linear(x, b, b_scale)
    assert out[2].isnan().all() and torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


# ---- gradients


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(("shape", "n"), [((2, 5, 208), 130), ((3, 9), 17), ((40,), 24)], ids=str)
def test_gradients_of_quantised_weights(device, shape, n, dtype):
    """The gradient of x is an FP8 GEMM: right bit for bit, also for the smallest gradients, and near the dequantised
    one."""
    x, b, b_scale, bias = make_layer(shape, n, device, dtype)
    x.requires_grad_(), bias.requires_grad_()
    out = fp8_linear(x, b, b_scale, bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = grad.double() @ dequantize(b, b_scale, block=(128, 128)).double()
    assert (x.grad.double() - exact).norm() <= 0.04 * exact.norm()
    assert torch.equal(x.grad, in_turn(grad, transpose_fp8(b), b_scale.t(), out_dtype=dtype))
    if dtype != torch.float16:
        (small,) = torch.autograd.grad(fp8_linear(x, b, b_scale), x, grad * 2.0**-40)
        assert torch.equal(small, x.grad * 2.0**-40)
    assert_near(bias.grad, grad.double().reshape(-1, n).sum(0), dtype)
    assert x.grad.dtype == bias.grad.dtype == dtype


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_gradients_of_wide_weights(device, dtype):
    x, *_, bias = make_layer((2, 5, 208), 130, device, dtype)
    w = torch.randn(130, 208, device=device).to(dtype)
    x.requires_grad_(), w.requires_grad_(), bias.requires_grad_()
    out = fp8_linear(x, w, None, bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    rows = grad.double().view(-1, 130)
    assert_near(x.grad, grad.double() @ w.detach().double(), dtype)
    assert_near(w.grad, rows.t() @ x.detach().double().view(-1, 208), dtype)
    assert_near(bias.grad, rows.sum(0), dtype)


def assert_near(gradient: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-3}[dtype]  # weights are rounded, too
    assert gradient.shape == exact.shape
    assert (gradient.double() - exact).norm() <= rounding * exact.norm()


def test_only_wanted_gradients_are_computed(device):
    x, b, b_scale, bias = make_layer((5, 208), 130, device)
    out = fp8_linear(x, b, b_scale, bias.requires_grad_())
    out.sum().backward()
    assert x.grad is None and bias.grad is not None
    with torch.no_grad():
        assert not fp8_linear(x.requires_grad_(), b, b_scale).requires_grad


def test_gradients_are_there_once(device):
    x, b, b_scale, _ = make_layer((5, 208), 130, device)
    x.requires_grad_()
    out = fp8_linear(x, b, b_scale)
    (gradient,) = torch.autograd.grad(out, x, torch.randn_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="first-order"):
        gradient.sum().backward()


def test_gradients_that_do_not_exist_are_refused(device):
    x, b, b_scale, _ = make_layer((5, 208), 130, device)
    with pytest.raises(RuntimeError, match="b_scale requires a gradient, .* Pass b_scale.requires_grad_"):
        fp8_linear(x, b, b_scale.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="b requires a gradient"):
        fp8_linear(x, torch.nn.Parameter(b), b_scale)
    out = torch.zeros(5, 130, dtype=torch.bfloat16, device=device)
    with pytest.raises(RuntimeError, match="out is given, and .* no gradient. Drop out"):
        fp8_linear(x.requires_grad_(), b, b_scale, None, out)
    assert not out.any()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 129, 1024])
def test_the_chain_has_no_race(m):
    """Calls follow each other in one workspace, with weights just written by torch; none meets another's input."""
    n, k, rounds = 2112, 1536, 50
    xs = torch.randn(rounds, m, k, dtype=torch.bfloat16, device="cuda")
    weights = [quantize_weight(torch.randn(n, k, dtype=torch.bfloat16, device="cuda")) for _ in range(4)]
    expected = [in_turn(xs[i], *weights[i % 4]) for i in range(rounds)]
    b, b_scale = torch.empty_like(weights[0][0]), torch.empty_like(weights[0][1])
    outs = torch.full((rounds, m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        for i in range(rounds):
            b.view(torch.uint8).copy_(weights[i % 4][0].view(torch.uint8))
            b_scale.copy_(weights[i % 4][1])
            fp8_linear(xs[i], b, b_scale, None, outs[i])
        for i in range(rounds):
            assert same_bits(outs[i], expected[i]), i
        outs.fill_(float("nan"))


@pytest.mark.gpu
def test_layers_in_a_row():
    """The product's out is the next cast's input, all of them programmatic launches."""
    layers = [quantize_weight(torch.randn(768, 768, dtype=torch.bfloat16, device="cuda") / 28) for _ in range(12)]
    x = torch.randn(33, 768, dtype=torch.bfloat16, device="cuda")
    for _ in range(20):
        got = expected = x
        for b, b_scale in layers:
            got = fp8_linear(got, b, b_scale)
        for b, b_scale in layers:
            expected = in_turn(expected, b, b_scale, pdl=False)
        assert same_bits(got, expected)


@pytest.mark.gpu
def test_streams_and_threads():
    """Each has its own workspace; results equal those of single calls."""
    n, k, streams = 1536, 2048, 6
    b, b_scale = quantize_weight(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"))
    xs = [torch.randn(17 + 8 * i, k, dtype=torch.bfloat16, device="cuda") for i in range(streams)]
    expected = [in_turn(x, b, b_scale) for x in xs]
    torch.cuda.synchronize()
    shared, wrong = torch.cuda.Stream(), []

    def work(i: int) -> None:
        own = torch.cuda.Stream()
        for call in range(100):
            stream = shared if call % 2 else own
            with torch.cuda.stream(stream):
                out = fp8_linear(xs[i], b, b_scale)
                stream.synchronize()
            if not same_bits(out, expected[i]):
                wrong.append((i, call))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
def test_graphs_run_beside_other_calls():
    """A graph's workspace is its own: replays on one stream and calls on another do not meet."""
    n, k = 1536, 2048
    b, b_scale = quantize_weight(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"))
    x, other = (torch.randn(64, k, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    expected, expected_other = in_turn(x, b, b_scale), in_turn(other, b, b_scale)
    fp8_linear(x, b, b_scale)
    kept = dict(linear._kept.workspaces)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [fp8_linear(x, b, b_scale) for _ in range(20)]
    assert linear._kept.workspaces == kept
    replaying = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(replaying):
            graph.replay()
        others = [fp8_linear(other, b, b_scale) for _ in range(20)]
        torch.cuda.synchronize()
        assert all(same_bits(out, expected) for out in outs)
        assert all(same_bits(out, expected_other) for out in others)
        x.copy_(other)
        expected = expected_other


@pytest.mark.gpu
def test_large_inputs_are_not_kept():
    x, b, b_scale, _ = make_layer((9000, 512), 256, "cuda")
    linear._kept.workspaces.clear()
    assert torch.equal(fp8_linear(x, b, b_scale), in_turn(x, b, b_scale))
    assert not linear._kept.workspaces


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_is_that_of_the_tensors():
    x, b, b_scale, _ = make_layer((5, 512), 256, "cuda:1")
    assert torch.equal(fp8_linear(x, b, b_scale), in_turn(x, b, b_scale))
