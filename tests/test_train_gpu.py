"""`deep_tile.train` on a GPU: the CPU's definition for odd shapes, steps as CUDA graphs, gradients of any scale."""

import copy
import sys

import pytest
import torch
from helpers import same_bits
from test_train import ALL, RECIPES, assert_all_equal, defined, make_layer, stepped, trained
from torch import nn

from deep_tile.select import training
from deep_tile.train import Recipe, casts, convert, linear, linears, mlp

pytestmark = pytest.mark.gpu

WIDE = [torch.bfloat16, torch.float16, torch.float32]
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
SUMMED = 5e-3
"""Relative error of sums that are added in another order and then rounded, perhaps to the neighbour."""


@pytest.fixture
def in_turn(monkeypatch):
    """Small layers, too, are made call by call, with casts that are kept."""
    checked = sys.modules["deep_tile.train.linear"]._checked
    monkeypatch.setattr(training, "MOST_PRODUCTS", 0)
    checked.clear()
    yield
    checked.clear()


def assert_near(got, wanted, names=("y", "dx", "dw", "dbias")):
    for name, one, other in zip(names, got, wanted, strict=True):
        one, other = one.double().cpu(), other.double().cpu()
        assert (one - other).norm() <= SUMMED * other.norm(), name


@EACH_RECIPE
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(
    ("shape", "n"),
    [((2, 5, 200), 130), ((300, 136), 257), ((7,), 3), ((2, 1), 1), ((1000, 520), 264), ((129, 4096), 96)],
    ids=str,
)
def test_gradients_are_the_cpus(shape, n, dtype, recipe):
    """The casts have the CPU's bits; products are added in another order."""
    layer = make_layer(shape, n, dtype)
    on_gpu = [each.detach().cuda().requires_grad_(each.requires_grad) for each in layer]
    assert_near(trained(linear, *on_gpu, recipe=recipe), defined(*layer, recipe))


@EACH_RECIPE
def test_products_are_those_of_public_calls(recipe):
    """Bit for bit, where the same kernels multiply."""
    layer = make_layer((512, 384), 256, device="cuda")
    got, wanted = trained(linear, *layer, recipe=recipe), defined(*layer, recipe)
    assert same_bits(got[0], wanted[0]) and same_bits(got[1], wanted[1])
    assert_near(got, wanted)


@EACH_RECIPE
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(("shape", "n"), [((2, 5, 200), 130), ((1, 1), 1), ((300, 1024), 96)], ids=str)
def test_small_layers_are_those_made_call_by_call(shape, n, dtype, recipe, request):
    """Bit for bit, also as a CUDA graph."""
    layer = make_layer(shape, n, dtype, device="cuda")
    got = trained(linear, *layer, recipe=recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = trained(linear, *layer, recipe=recipe)
    graph.replay()
    replayed = [each.clone() for each in replayed]
    request.getfixturevalue("in_turn")
    wanted = trained(linear, *layer, recipe=recipe)
    assert_all_equal(got, wanted)
    assert_all_equal(replayed, wanted)


@EACH_RECIPE
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_small_layers_of_one_input_are_those_made_call_by_call(count, dtype, recipe, request):
    """Bit for bit, also as a CUDA graph: three layers, and an MLP with gates and ups in so many weights."""
    x, *_ = make_layer((2, 150, 264), dtype=dtype, device="cuda")
    layers = [make_layer((2, 150, 264), n, dtype, device="cuda")[1:] for n in (256, 136, 9)]
    weights, biases, dys = zip(*layers, strict=True)
    gates = [make_layer((1, 264), 512 // count, dtype, device="cuda")[1] for _ in range(count)]
    _, down, _, dy = make_layer((2, 150, 256), 72, dtype, device="cuda")

    def step():
        ys = linears(x, weights, (*biases[:-1], None), recipe=recipe)
        y = mlp(x, gates, down, recipe=recipe)
        of_layers, of_mlp = (x, *weights), (x, *gates, down)
        made = torch.autograd.grad(ys, of_layers, dys), torch.autograd.grad(y, of_mlp, dy)
        return [each.detach() for each in (*ys, *made[0], y, *made[1])]

    got = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    replayed = [each.clone() for each in replayed]
    request.getfixturevalue("in_turn")
    wanted = step()
    assert [*map(same_bits, got, wanted)] == [*map(same_bits, replayed, wanted)] == [True] * len(wanted)


@pytest.mark.parametrize("wgrad", ["fp8", "fp8_1x128"])
def test_any_scale_of_gradients_is_as_good(wgrad):
    """From 1 to 1e-15: errors within 1.02 of that at 1."""
    x, weight, _, dy = make_layer((512, 512), 512, torch.bfloat16, device="cuda")
    of_x, of_w, of_dy = (each.detach().double() for each in (x, weight, dy))
    errors = []
    for exponent in range(0, 16, 3):
        scaled = (of_dy * 10.0**-exponent).bfloat16()
        _, dx, dw, _ = trained(linear, x, weight, None, scaled, recipe=Recipe(wgrad=wgrad))
        exact = scaled.double() @ of_w, scaled.double().t() @ of_x
        errors.append(
            [((got.double() - one).norm() / one.norm()).item() for got, one in zip((dx, dw), exact, strict=True)]
        )
    for of_one in errors:
        assert of_one[0] <= 1.02 * errors[0][0] and of_one[1] <= 1.02 * errors[0][1], errors


def test_layers_of_one_input():
    x, *_ = make_layer((300, 264), device="cuda")
    layers = [make_layer((300, 264), n, device="cuda")[1:] for n in (256, 136, 9)]
    weights, biases, dys = zip(*layers, strict=True)
    ys = linears(x, weights, biases)
    dx, *of_weights = torch.autograd.grad(ys, (x, *weights), dys)
    wanted = [defined(x, *layer) for layer in layers]
    for y, dw, of_it in zip(ys, of_weights, wanted, strict=True):
        assert_near((y.detach(), dw), (of_it[0], of_it[2]), names=("y", "dw"))
    total = sum(of_it[1].double() for of_it in wanted)
    assert (dx.double() - total).norm() <= 1e-2 * total.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad(dtype):
    x, weight, bias, dy = make_layer((512, 384), 256, device="cuda")
    weight.main_grad = torch.zeros(weight.shape, dtype=dtype, device="cuda")
    for _ in range(3):
        linear(x, weight, bias).backward(dy)
    wanted = 3 * defined(x, nn.Parameter(weight.detach().float()), bias, dy)[2].double()
    assert (weight.main_grad.double() - wanted).norm() <= (1e-4 if dtype == torch.float32 else 1e-2) * wanted.norm()
    assert weight.grad is None


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = nn.Linear(264, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 264, bias=False)
    return convert(nn.Sequential(*layers).to("cuda", dtype), **ALL)


def make_step(model, optimizer, x):
    def step():
        optimizer.zero_grad(set_to_none=False)
        model(x).float().square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("captured", ["all", "forward and backward", "the optimiser"])
def test_graphs_of_a_step(captured):
    """Replays equal eager steps bit for bit: weights change with each, and inputs."""
    xs = torch.randn(8, 128, 264, device="cuda").bfloat16()
    results = []
    for in_graph in (False, True):
        model, x = make_model(), xs[0].clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        whole = make_step(model, optimizer, x)

        def gradients(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad(set_to_none=False)
            model(x).float().square().mean().backward()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                whole()
        torch.cuda.current_stream().wait_stream(stream)
        first, second = gradients, optimizer.step
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            before = copy.deepcopy(model.state_dict())
            with torch.cuda.graph(graph):
                {"all": whole, "forward and backward": gradients, "the optimiser": optimizer.step}[captured]()
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            if captured == "all":
                first, second = graph.replay, lambda: None
            elif captured == "forward and backward":
                first = graph.replay
            else:
                second = graph.replay
        for value in xs:
            x.copy_(value)
            first(), second()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(same_bits, *results))


@pytest.mark.usefixtures("in_turn")
def test_an_optimiser_in_a_graph_has_no_casts_kept():
    weight = stepped(make_layer((64, 256), 256, torch.float32, device="cuda")[1])
    x, bias, dy = (make_layer((64, 256), 256, torch.float32, device="cuda")[i] for i in (0, 2, 3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    trained(linear, x, weight, bias, dy)
    assert weight in casts._kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
        assert_near(trained(linear, x, weight, bias, dy), defined(x, weight, bias, dy))
    assert weight not in casts._kept


def test_results_of_a_graph_are_cast_again():
    """A static tensor that replays write to, without a version that says so."""
    source, weight = torch.zeros(64, 256, device="cuda").bfloat16(), make_layer((64, 256), 256, device="cuda")[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = source * 2
    for value in (1.0, 3.0):
        source.fill_(value)
        graph.replay()
        for wants_gradient in (False, True):
            x.requires_grad_(wants_gradient)
            assert same_bits(linear(x, weight), linear(x.detach().clone(), weight))
        x.requires_grad_(False)


def test_streams_cast_for_themselves():
    """A kept cast is not ready on another stream: what a stream multiplies it has cast itself."""
    x, weight, bias, dy = make_layer((128, 256), 256, device="cuda")
    wanted = defined(x, weight, bias, dy)
    stepped(weight)
    torch.cuda.synchronize()
    late, soon = (torch.cuda.Stream() for _ in range(2))
    with torch.cuda.stream(late):
        torch.cuda._sleep(100_000_000)
        trained(linear, x, weight, bias, dy)
    with torch.cuda.stream(soon):
        got = trained(linear, x, weight, bias, dy)
    soon.synchronize()
    assert_near(got, wanted)
    torch.cuda.synchronize()


def test_compiled_steps():
    """By Inductor: losses as in eager, within what BF16 rounds."""
    losses = []
    for compiles in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = torch.compile(model) if compiles else model
        torch.manual_seed(1)
        of_it = []
        for _ in range(20):
            loss = run(torch.randn(256, 264, device="cuda").bfloat16()).float().square().mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            of_it.append(loss.item())
        losses.append(of_it)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_autocast():
    x, weight, bias, dy = make_layer((128, 256), 256, torch.float32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        got = trained(linear, x, weight, bias, dy.bfloat16())
    assert got[0].dtype == torch.bfloat16 and all(each.dtype == torch.float32 for each in got[1:])
    assert_near(got, defined(x.detach().bfloat16(), weight, bias, dy.bfloat16()))
