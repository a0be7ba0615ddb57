"""`deep_tile.train` on the CPU: products and gradients against public calls composed by hand, bit for bit; casts that
are kept and shared; conversion of models; what is refused. test_train_gpu.py has the same on a GPU."""

import copy
import json
import threading

import changes
import pytest
import torch
from helpers import same_bits
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import deep_tile
from benchmarks import store
from deep_tile import (
    both,
    fp8_gemm,
    fp8_wgrad,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    scaled_gemm,
    transposed_cast_to_fp8,
)
from deep_tile.problem import GemmProblem
from deep_tile.tools import cli
from deep_tile.train import Linear, Recipe, casts, convert, linear, linears, predict

pytestmark = pytest.mark.usefixtures("quick_compiler")

WIDE = [torch.bfloat16, torch.float16, torch.float32]
RECIPES = [
    Recipe(),
    Recipe(wgrad="fp8_1x128", round_scale="pow2"),
    Recipe(dgrad="bf16"),
    Recipe(wgrad="bf16", recast=True),
    Recipe(dgrad="bf16", wgrad="bf16", amax_floor=1e-3),
    Recipe(recast=True, keep_weights=False),
]
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
ALL = {"wanted": lambda name, layer: True}


def make_layer(shape=(2, 5, 200), n=130, dtype=torch.bfloat16, of_weight=None, device="cpu"):
    """x, a weight, a bias and a gradient of the output, of which the former three want gradients."""
    x = torch.randn(shape, device=device).to(dtype)
    weight, bias = (torch.randn(size, device=device).to(of_weight or dtype) for size in ((n, shape[-1]), (n,)))
    dy = torch.randn((*shape[:-1], n), device=device).to(dtype)
    return x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias), dy


@torch.no_grad()
def defined(x, weight, bias, dy, recipe=Recipe()):  # noqa: B008
    """Output and gradients of x, weight and bias, by public calls that each do one thing."""
    options = {"amax_floor": recipe.amax_floor, "round_scale": recipe.round_scale}
    rows, dys = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    a = per_token_cast_to_fp8(rows, **options)
    y = fp8_gemm(*a, *per_block_cast_to_fp8(weight, **options), bias=bias, out_dtype=x.dtype)
    dx = dys @ weight.to(dy.dtype)
    if recipe.dgrad == "fp8":
        a = per_token_cast_to_fp8(dys, **options)
        dx = fp8_gemm(*a, *per_block_cast_to_fp8(weight.t(), **options), out_dtype=dy.dtype)
    dw = torch.empty(weight.shape, dtype=torch.float32 if weight.dtype == torch.float16 else weight.dtype)
    dw, along_tokens = dw.to(weight.device), transposed_cast_to_fp8(dys, **options)
    if recipe.wgrad == "fp8":
        scaled_gemm(*along_tokens, *per_block_cast_to_fp8(rows.t(), **options), out=dw)
    elif recipe.wgrad == "fp8_1x128":
        fp8_wgrad(*along_tokens, *transposed_cast_to_fp8(rows, **options), dw, accumulate=False)
    else:
        dw = dys.t() @ rows.to(dys.dtype)
    dbias = None if bias is None else dys.sum(0, dtype=torch.float32).to(bias.dtype)
    return y.view(dy.shape), dx.to(x.dtype).view(x.shape), dw.to(weight.dtype), dbias


def trained(call, x, weight, bias, dy, **options):
    """The same of a call, by autograd; gradients are taken from the tensors."""
    given = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
    y = call(x, weight, bias, **options)
    gradients = iter(torch.autograd.grad(y, given, dy))
    return y.detach(), *(
        next(gradients) if each is not None and each.requires_grad else None for each in (x, weight, bias)
    )


def assert_all_equal(got, wanted):
    for name, one, other in zip(("y", "dx", "dw", "dbias"), got, wanted, strict=True):
        assert (one is None) == (other is None), name
        assert one is None or (one.dtype == other.dtype and same_bits(one, other)), name


def stepped(weight):
    """As an optimiser of torch leaves it: its casts may be kept from here on."""
    casts.cast_once(weight, Recipe())
    weight.grad = torch.zeros_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None
    return weight


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def counted(monkeypatch):
    """Names of the casts that are made, in their order."""
    made = []
    for module, name in (
        *((casts, name) for name in ("cast_both", "cast_weight")),
        *((casts.quantize, name) for name in ("per_token_cast_to_fp8", "per_block_cast_to_fp8")),
        (casts.transposed, "transposed_cast_to_fp8"),
        (both, "cast_weight"),
    ):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, call=call, name=name, **k: (made.append(name), call(*a, **k))[1])
    return made


# ---- values


@EACH_RECIPE
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(("shape", "n"), [((2, 5, 200), 130), ((300, 136), 257), ((7,), 3), ((2, 1), 1)], ids=str)
def test_gradients_are_the_definitions(shape, n, dtype, recipe):
    layer = make_layer(shape, n, dtype)
    assert_all_equal(trained(linear, *layer, recipe=recipe), defined(*layer, recipe))


@EACH_RECIPE
@pytest.mark.parametrize("of_weight", WIDE, ids=str)
def test_weights_of_another_dtype(of_weight, recipe):
    for dtype in WIDE:
        layer = make_layer(dtype=dtype, of_weight=of_weight)
        assert_all_equal(trained(linear, *layer, recipe=recipe), defined(*layer, recipe))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@EACH_RECIPE
def test_recipes_are_near_the_exact_product(dtype, recipe):
    x, weight, bias, dy = make_layer((512, 384), 256, dtype)
    y, dx, dw, dbias = (each.double() for each in trained(linear, x, weight, bias, dy, recipe=recipe))
    x, weight, bias, dy = (each.detach().double() for each in (x, weight, bias, dy))
    bars = 0.042, 0.042 if recipe.dgrad == "fp8" else 0.01, 0.042 if recipe.wgrad != "bf16" else 0.01, 0.01
    wanted = x @ weight.t() + bias, dy @ weight, dy.t() @ x, dy.sum(0)
    for got, exact, bar in zip((y, dx, dw, dbias), wanted, bars, strict=True):
        assert (got - exact).norm() <= bar * exact.norm()


def test_rows_of_any_strides():
    _, weight, bias, dy = make_layer((4, 6, 200))
    for x in (
        torch.randn(6, 4, 200).transpose(0, 1),
        torch.randn(4, 6, 400)[..., ::2],
        torch.randn(6, 200).expand(4, 6, 200),
    ):
        x, dys = x.bfloat16().requires_grad_(), dy.transpose(0, 1).contiguous().transpose(0, 1)
        assert_all_equal(trained(linear, x, weight, bias, dys), defined(x, weight, bias, dy))
    x, weight = make_layer()[0], nn.Parameter(torch.randn(200, 130).bfloat16().t())
    dy = torch.randn(()).bfloat16().expand(2, 5, 130)  # of a sum
    assert_all_equal(trained(linear, x, weight, None, dy), defined(x, weight, None, dy))


EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@EACH_DEVICE
@EACH_RECIPE
@pytest.mark.parametrize(("shape", "n"), [((0, 200), 130), ((2, 0, 9), 3), ((3, 0), 4), ((3, 200), 0)], ids=str)
def test_nothing_to_multiply(shape, n, recipe, device):
    x, weight, bias, dy = make_layer(shape, n, device=device)
    y, dx, dw, dbias = trained(linear, x, weight, bias, dy, recipe=recipe)
    assert torch.equal(y, bias.detach().expand(dy.shape))
    assert dx.shape == x.shape and not dx.any() and dw.shape == weight.shape and not dw.any()
    assert torch.equal(dbias, dy.reshape(-1, n).float().sum(0).bfloat16() if n else dbias)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_only_wanted_gradients_are_computed(wanted, counted):
    x, weight, bias, dy = layer = make_layer()
    for i in {0, 1, 2} - {*wanted}:
        layer[i].requires_grad_(False)
    expected = defined(*layer)
    counted.clear()
    got = trained(linear, *layer)
    assert counted.count("transposed_cast_to_fp8") + counted.count("cast_both") == (2 if 1 in wanted else 0)
    assert_all_equal(got, (expected[0], *(each if i in wanted else None for i, each in enumerate(expected[1:]))))
    with torch.no_grad():
        assert not linear(*layer[:3]).requires_grad


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**-40, 2.0**-60])
def test_small_gradients_are_as_good(scale):
    """A loss that is divided by all tokens of a step, or a scaled one, changes no bit but exponents."""
    x, weight, bias, dy = make_layer(dtype=torch.float32)
    large, small = trained(linear, x, weight, bias, dy), trained(linear, x, weight, bias, dy * scale)
    for one, other in zip(large[1:], small[1:], strict=True):
        assert torch.equal(one * scale, other)


def test_nan_and_infinity_stay_visible():
    x, weight, bias, dy = make_layer()
    dy[0, 2, 7] = float("inf")
    dx, dw = trained(linear, x, weight, bias, dy)[1:3]
    assert dx[0, 2].isnan().all() and dx[1].isfinite().all() and not dw[7].isfinite().any() and dw[:7].isfinite().all()


# ---- layers that share an input


@EACH_RECIPE
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_layers_of_one_input(dtype, recipe):
    """Results and weights' gradients are those of each layer, dx their sum, added in FP32 where it is in FP8."""
    x, *_ = make_layer(dtype=dtype)
    layers = [make_layer(n=n, dtype=dtype)[1:] for n in (130, 40, 9)]
    weights, biases, dys = zip(*layers, strict=True)
    ys = linears(x, weights, biases, recipe=recipe)
    dx, *gradients = torch.autograd.grad(ys, (x, *weights, *biases), dys)
    wanted = [defined(x, *layer, recipe) for layer in layers]
    for i, of_it in enumerate(wanted):
        assert_all_equal((ys[i].detach(), of_it[1], gradients[i], gradients[3 + i]), of_it)
    total = sum(of_it[1].double() for of_it in wanted)
    assert (dx.double() - total).norm() <= {torch.float32: 1e-6, torch.float16: 2e-3}.get(dtype, 1e-2) * total.norm()


def test_a_result_that_nobody_uses():
    x, weight, _, dy = make_layer()
    other = make_layer(n=40)[1]
    used, _ = linears(x, (weight, other))
    dx, dw, dother = torch.autograd.grad(used, (x, weight, other), dy)
    assert_all_equal((used.detach(), dx, dw, None), defined(x, weight, None, dy))
    assert not dother.any()


def made_by_autograd(shape=(6, 200)):
    return torch.randn(shape).bfloat16().requires_grad_() * 1


def test_an_input_is_cast_once(counted):
    x, weights = made_by_autograd(), [make_layer(n=n)[1] for n in (130, 40, 9)]
    wanted = [linear(x.detach().clone(), weight) for weight in weights]
    counted.clear()
    ys = [linear(x, weight) for weight in weights]
    assert counted.count("cast_both") == 1
    assert all(map(same_bits, ys, wanted))
    linear(made_by_autograd(), weights[0])
    assert counted.count("cast_both") == 2


def test_linears_casts_once(counted):
    x, weights = torch.randn(6, 200), [make_layer(n=n)[1] for n in (130, 40, 9)]
    linears(x, weights)
    assert counted.count("cast_both") == 1


def in_other_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


CHANGES = {
    "in place": lambda x: x.mul_(2),
    "another memory": lambda x: setattr(x, "data", torch.ones_like(x)),
    "a view": lambda x: x[:3].zero_(),
    "fewer rows": lambda x: setattr(x, "data", x.data[:3]),
    "in another thread": lambda x: in_other_thread(lambda: (linear(x, make_layer()[1]), x.detach().zero_())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_shared_cast_is_never_stale(change):
    x, weight = made_by_autograd(), make_layer()[1]
    linear(x, weight)
    with torch.no_grad():
        change(x)
    assert same_bits(linear(x, weight), linear(x.detach().clone(), weight))


UNTOLD = {
    ".data": lambda x: x.data.mul_(2),
    "NumPy": lambda x: x.detach().numpy().__setitem__(slice(None), 1.0),
}


@pytest.mark.parametrize("change", UNTOLD.values(), ids=UNTOLD)
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_buffer_that_changes_untold_is_cast_again(change, wants_gradient):
    """As inputs of CUDA graphs do, too, and buffers that kernels or other processes write to."""
    x, weight = torch.randn(6, 200, requires_grad=wants_gradient), make_layer()[1]
    linear(x, weight)
    change(x)
    assert same_bits(linear(x, weight), linear(x.detach().clone(), weight))


def test_a_shared_input_is_told_of():
    x, weight = made_by_autograd(), make_layer()[1]
    linear(x, weight)
    x.data.mul_(2)
    deep_tile.train.invalidate()
    assert same_bits(linear(x, weight), linear(x.detach().clone(), weight))


def test_options_are_told_apart():
    x, weight = made_by_autograd(), make_layer()[1]
    for recipe in RECIPES:
        got = linear(x, weight, recipe=recipe)
        assert same_bits(got, linear(x.detach().clone(), weight, recipe=recipe))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
    x, weight, bias, dy = make_layer()
    wanted = defined(x, weight, bias, dy)
    for _ in range(2):
        with mode():
            assert same_bits(linear(x, weight, bias), wanted[0])
            assert same_bits(linear(x.detach() + 0, weight, bias), wanted[0])
        assert_all_equal(trained(linear, x, weight, bias, dy), wanted)


# ---- weights between steps


def test_weights_are_cast_once_per_step(counted):
    """From the second step on, since a first one shows that an optimiser of torch steps them."""
    layer = Linear(200, 130)
    optimizer, x = torch.optim.AdamW(layer.parameters(), lr=0.1), torch.randn(6, 200, requires_grad=True)
    counts = []
    for _ in range(3):
        counted.clear()
        for _ in range(4):  # micro-batches
            layer(x).square().sum().backward()
        counts.append(counted.count("cast_weight"))
        optimizer.step(), optimizer.zero_grad()
    assert counts == [4, 1, 1]


def other_optimizer(weight):
    class Raw(torch.optim.Optimizer):
        def step(self):
            weight.data.mul_(2)

    Raw([weight], {}).step()


def step_master(weight):
    """As apex, DeepSpeed and Megatron do: the optimiser never sees the weight, which gets its master's values."""
    master = weight.detach().float().requires_grad_()
    master.grad = torch.randn_like(master)
    torch.optim.AdamW([master], lr=0.1).step()
    weight.data.copy_(master.detach())


WEIGHT_CHANGES = {
    "in place": lambda weight: weight.mul_(2),
    "another memory": lambda weight: setattr(weight, "data", weight.data * 2),
    "an optimiser that torch does not see through": other_optimizer,
    "a state_dict": lambda weight: weight.copy_(torch.ones_like(weight)),
    "a view": lambda weight: weight[:3].zero_(),
    "an optimiser of its master": step_master,
    "told": lambda weight: (weight.data.mul_(2), deep_tile.train.invalidate()),
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES.values(), ids=WEIGHT_CHANGES)
def test_a_kept_cast_is_never_stale(change, counted):
    x, weight, bias, dy = make_layer()
    stepped(weight)
    trained(linear, x, weight, bias, dy)
    counted.clear()
    trained(linear, x, weight, bias, dy)
    assert "cast_weight" not in counted
    with torch.no_grad():
        change(weight)
    assert_all_equal(trained(linear, x, weight, bias, dy), defined(x, weight, bias, dy))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_is_seen(backend):
    x, weight, bias, dy = make_layer(dtype=torch.float32)
    optimizer = torch.optim.SGD([stepped(weight)], lr=0.5)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(3):
        weight.grad = trained(linear, x, weight, bias, dy)[2]
        step()
        assert_all_equal(trained(linear, x, weight, bias, dy), defined(x, weight, bias, dy))


def test_recipes_of_one_weight_are_told_apart():
    x, weight, bias, dy = make_layer()
    stepped(weight)
    for recipe in (*RECIPES, *RECIPES):
        assert_all_equal(trained(linear, x, weight, bias, dy, recipe=recipe), defined(x, weight, bias, dy, recipe))


def test_casts_go_with_their_weights():
    weight = stepped(make_layer()[1])
    linear(torch.randn(6, 200, requires_grad=True), weight)
    before = len(casts._known), len(casts._kept)
    assert weight in casts._kept
    del weight
    assert (len(casts._known), len(casts._kept)) == (before[0] - 1, before[1] - 1)


def test_two_threads():
    layers, wanted, wrong = [make_layer() for _ in range(2)], [], []
    for layer in layers:
        stepped(layer[1])
        wanted.append(defined(*layer))

    def train(i):
        try:
            for _ in range(20):
                assert_all_equal(trained(linear, *layers[i]), wanted[i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(i % 2,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


# ---- how steps are made


def small_model(dtype=torch.float32):
    return convert(nn.Sequential(nn.Linear(72, 136), nn.GELU(), nn.Linear(136, 72, bias=False)).to(dtype), **ALL)


def gradients_of(model, x, run=None):
    model.zero_grad()
    (run or model)(x).float().square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@EACH_DEVICE
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_bit(reentrant, device):
    model, x = small_model().to(device), torch.randn(9, 72, device=device, requires_grad=True)
    [stepped(layer.weight) for layer in model[::2]]
    wanted = gradients_of(model, x)
    got = gradients_of(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert all(map(same_bits, got, wanted))


@EACH_RECIPE
def test_saved_tensors_that_come_back_dense(recipe):
    """As hooks that offload them have it: without what lies between rows."""
    layer = make_layer()
    hooks = lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        got = trained(linear, *layer, recipe=recipe)
    assert_all_equal(got, defined(*layer, recipe))


def test_batches_are_added_one_by_one():
    model, xs = small_model(), torch.randn(3, 9, 72)
    each = [gradients_of(model, x) for x in xs]
    model.zero_grad()
    for x in xs:
        model(x).square().sum().backward()
    for i, parameter in enumerate(model.parameters()):
        assert torch.equal(parameter.grad, each[0][i] + each[1][i] + each[2][i])


@pytest.mark.about(*changes.OF_OPS, "deep_tile/train/*", "deep_tile/both.py", "deep_tile/dense.py")
@pytest.mark.parametrize("dynamic", [False, True])
@EACH_RECIPE
def test_compiled_as_eager(recipe, dynamic):
    x, weight, bias, dy = make_layer()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert_all_equal(trained(compiled, x, weight, bias, dy, recipe=recipe), defined(x, weight, bias, dy, recipe))


@pytest.mark.parametrize("tokens", [3, 128, 200])
def test_a_small_layer_is_compiled_for_any_tokens(tokens):
    """No scale says how many there are, where a weight has one block."""
    x, weight, bias, dy = make_layer((tokens, 96), n=48)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_all_equal(trained(compiled, x, weight, bias, dy), defined(x, weight, bias, dy))
    with torch.no_grad():
        batch = {"x": {0: torch.export.Dim("tokens")}, "weight": None, "bias": None}
        exported = torch.export.export(_Linear(), (x, weight, bias), dynamic_shapes=batch).module()
        other = torch.cat([x, x])
        assert torch.equal(exported(other, weight, bias), linear(other, weight, bias))


@pytest.mark.parametrize("k", [96, 128, 300])
def test_one_token_is_compiled_with_sizes_that_may_change(k):
    x, *parameters, dy = make_layer((1, k), n=256)
    weight, bias = (each.detach().requires_grad_() for each in parameters)  # dynamo takes a parameter's sizes as fixed
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_all_equal(trained(compiled, x, weight, bias, dy), defined(x, weight, bias, dy))


@pytest.mark.parametrize("tokens", [32, 33])
def test_a_layer_with_gradients_is_exported_for_any_tokens(tokens):
    """Codes along tokens, whose padded stride torch compares with the tokens, are for a backward pass alone."""
    layer = Linear(128, 256, dtype=torch.bfloat16)
    batch = {"input": {0: torch.export.Dim("tokens", min=1, max=4096)}}
    example = torch.randn(tokens, 128).bfloat16()
    exported = torch.export.export(layer, (example,), dynamic_shapes=batch, strict=False).module()
    with torch.no_grad():
        for x in (torch.randn(rows, 128).bfloat16() for rows in (1, 31, 200)):
            assert torch.equal(exported(x), layer(x))


def test_changing_tokens_take_few_graphs():
    """Fewer than torch's limit, behind which a layer runs in eager mode; docs/training.md says which."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear, backend=counter, fullgraph=True)
    for tokens in (100, 1, 37, 64, 130, 144, 2, 16, 17, 128, 129, 256, 400):
        x, *parameters, dy = make_layer((tokens, 136), n=48)
        assert_all_equal(trained(compiled, x, *parameters, dy), defined(x, *parameters, dy))
    assert counter.frame_count <= 6 < torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_are_compiled_without_gradients(layers):
    x, weight, bias, _ = make_layer()
    compiled = torch.compile(linears, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        given = x, [weight] * layers, [bias] * layers
        assert all(map(same_bits, compiled(*given), linears(*given)))


class _Linear(torch.nn.Module):
    def forward(self, x, weight, bias):
        return linear(x, weight, bias)


def test_a_compiled_model_trains_as_eager():
    torch.manual_seed(0)
    model, x = small_model(torch.bfloat16), torch.randn(9, 72).bfloat16()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for each, run in ((model, model), (other, compiled)):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            run(x).float().square().sum().backward()
            optimizer.step()
    assert all(map(same_bits, model.parameters(), other.parameters()))


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(of_weight):
    """As `nn.functional.linear` has it: results in autocast's dtype, gradients in those of x and the weight."""
    x, weight, bias, dy = make_layer(dtype=torch.float32, of_weight=of_weight)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw, dbias = trained(linear, x, weight, bias, dy.bfloat16())
    wanted = defined(x.detach().bfloat16(), weight, bias, dy.bfloat16())
    assert y.dtype == torch.bfloat16 and dx.dtype == torch.float32 and dw.dtype == dbias.dtype == of_weight
    assert_all_equal((y, dx, dw, dbias), (wanted[0], wanted[1].float(), *wanted[2:]))
    with torch.autocast("cpu", enabled=False):
        assert linear(x, weight, bias).dtype == torch.float32


def test_no_memory():
    x, weight, bias, dy = (each.detach().to("meta") for each in make_layer())
    layer = x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias), dy
    for got, wanted in zip(trained(linear, *layer), (dy, *layer), strict=False):
        assert got.is_meta and got.shape == wanted.shape and got.dtype == wanted.dtype


# ---- Megatron's protocol


@pytest.mark.about(*changes.OF_OPS, "deep_tile/train/*", "deep_tile/both.py", "deep_tile/dense.py")
@EACH_RECIPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_main_grad(recipe, dtype, compiled, is_told):
    """The product is added to it; hooks of a weight that is told run, and `weight.grad` is nobody's otherwise."""
    x, weight, bias, dy = make_layer()
    before = torch.randn(weight.shape).to(dtype)
    weight.main_grad, hooked = before.clone(), []
    if is_told:
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(lambda weight: hooked.append(weight.grad.shape))
    run = torch.compile(linear, backend="aot_eager") if compiled else linear
    run(x, weight, bias, recipe=recipe).backward(dy)
    in_float32 = x, nn.Parameter(weight.detach().float()), bias, dy
    exact = before.double() + (
        defined(*in_float32, recipe)[2] if recipe.wgrad != "bf16" else defined(x, weight, bias, dy, recipe)[2]
    )
    error = (weight.main_grad.double() - exact).abs().max()
    assert error <= (1e-4 if dtype == torch.float32 and recipe.wgrad != "bf16" else 2**-7) * exact.abs().max()
    assert not torch.equal(weight.main_grad, before)
    assert same_bits(x.grad, defined(x, weight, bias, dy, recipe)[1])
    assert (
        hooked == ([weight.shape] if is_told else []) and getattr(weight, "grad_added_to_main_grad", False) == is_told
    )
    assert is_told or weight.grad is None


def test_main_grads_add_up():
    """Bit for bit FP32 sums of the products, micro-batch by micro-batch; a frozen weight has none."""
    x, weight, bias, dy = make_layer()
    weight.main_grad = torch.zeros(weight.shape)
    for _ in range(3):
        linear(x, weight, bias).backward(dy)
    options = *transposed_cast_to_fp8(dy.view(-1, 130)), *per_block_cast_to_fp8(x.detach().view(-1, 200).t())
    wanted = torch.zeros(weight.shape)
    for _ in range(3):
        scaled_gemm(*options, out=wanted, accumulate=True)
    assert torch.equal(weight.main_grad, wanted)
    weight.requires_grad_(False)
    linear(x, weight, bias).backward(dy)
    assert torch.equal(weight.main_grad, wanted)


# ---- models


def test_convert_keeps_all_but_the_class():
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(72, 136), "odd": nn.Bilinear(3, 3, 3), "lm_head": nn.Linear(136, 72)})
    parameters, state, layer, called = dict(model.named_parameters()), model.state_dict(), model["body"], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    layer.register_forward_hook(lambda *_: called.append("forward"))
    recipe = Recipe(dgrad="bf16", wgrad="fp8_1x128")
    assert convert(model, lambda name, layer: name != "lm_head", recipe=recipe) is model
    assert model["body"] is layer and type(layer) is Linear and layer.recipe is recipe
    assert type(model["lm_head"]) is nn.Linear
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys() and isinstance(layer, nn.Linear)
    assert repr(layer) == "Linear(in_features=72, out_features=136, bias=True, fprop=fp8, dgrad=bf16, wgrad=fp8_1x128)"
    before = layer.weight.detach().clone()
    layer(torch.randn(3, 72)).sum().backward()
    optimizer.step()
    assert called == ["forward"] and not torch.equal(layer.weight, before)
    copied = copy.deepcopy(model)
    copied.load_state_dict(state)
    assert copied["body"].recipe == recipe


def test_what_is_converted_unasked():
    """Layers that gain by FP8, but the last."""
    model = nn.ModuleDict(
        {
            **{"large": nn.Linear(4096, 4096, device="meta"), "small": nn.Linear(64, 64, device="meta")},
            **{name: nn.Linear(4096, 4096, device="meta") for name in ("lm_head", "head")},
        }
    )
    with pytest.raises(ValueError, match="has 4 torch.nn.Linear, and none gains by FP8 at tokens=64.*by wanted=lambda"):
        convert(model, tokens=64, eager=True)  # of which the host takes longer to enqueue either
    convert(model)
    assert {name for name, layer in model.items() if type(layer) is Linear} == {"large"}
    with pytest.raises(ValueError, match="has 3 torch.nn.Linear, and none gains by FP8 at tokens=8192"):
        convert(model)
    with pytest.raises(ValueError, match="has 3 torch.nn.Linear, and `wanted` accepts none"):
        convert(model, lambda name, layer: False)
    with pytest.raises(ValueError, match=r"model has no torch\.nn\.Linear, whose subclasses"):
        convert(nn.ReLU())


def test_a_model_learns_as_in_full_precision():
    """Two layers, a few seconds: the loss of FP8 is within 2 % of that of FP32, and a fraction of the first."""
    losses = {}
    for way in ("fp8", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 16))
        target = nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 16)).requires_grad_(False)
        if way == "fp8":
            convert(model, **ALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[way] = []
        for _ in range(150):
            x = torch.randn(64, 48)
            loss = (model(x) - target(x)).square().mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses[way].append(loss.item())
    fp8, full = (sum(of_it[-20:]) / 20 for of_it in losses.values())
    assert full < 0.5 * losses["full"][0] and fp8 == pytest.approx(full, rel=0.05)


def test_weights_that_fsdp_shall_gather_train_before_it():
    """They are parameters over the same memory, and what they are copied to, and loaded from, too; weights that layers
    share stay shared."""
    torch.manual_seed(0)
    model, x = small_model(), torch.randn(9, 72)
    model.append(copy.copy(model[0]))
    wanted = gradients_of(model[:3], x)
    other = deep_tile.train.gather_fp8(copy.deepcopy(model))
    assert other[3].weight is other[0].weight and type(other[0].weight) is not nn.Parameter
    assert all(map(same_bits, gradients_of(other[:3], x), wanted))
    copied = copy.deepcopy(other)
    copied.load_state_dict(model.state_dict())
    assert type(copied[0].weight) is type(other[0].weight)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    optimizer.step()
    assert not torch.equal(other[0].weight, model[0].weight)


def test_what_fsdp_cannot_gather_in_fp8():
    with pytest.raises(ValueError, match="model has no deep_tile.train.Linear; convert it first"):
        deep_tile.train.gather_fp8(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="a weight is a Shard; call gather_fp8 before the model is sharded"):
        deep_tile.train.gather_fp8(deep_tile.train.gather_fp8(small_model()))


# ---- what is refused


FP8 = torch.float8_e4m3fn
WRONG = {
    "x of FP8": (lambda g: {"x": g["x"].detach().to(FP8)}, TypeError, "x is a tensor of torch.float8_e4m3fn; it must"),
    "x of FP64": (lambda g: {"x": g["x"].double()}, TypeError, "x is a tensor of torch.float64; it must be"),
    "x no tensor": (lambda g: {"x": [1.0]}, TypeError, "x is a list; it must be a tensor of bfloat16"),
    "x a number": (lambda g: {"x": torch.ones(())}, ValueError, r"x has shape \[\]; it must be \[..., k\]"),
    "weight of FP8": (lambda g: {"weight": g["weight"].detach().to(FP8)}, TypeError,
                      "weight is .*deep_tile.fp8_linear"),
    "weight of integers": (lambda g: {"weight": torch.ones(130, 200).int()}, TypeError,
                           "weight is a tensor of torch.int32"),
    "no weight": (lambda g: {"weight": None}, TypeError, "weight is a NoneType; it must be a tensor"),
    "weight transposed": (lambda g: {"weight": g["weight"].t()}, ValueError,
                          r"weight has shape \[200, 130\]; for x of \[2, 5, 200\] it must be \[n, k\]"),
    "weight of three": (lambda g: {"weight": g["weight"][None]}, ValueError,
                        r"weight has shape \[1, 130, 200\]; .*\[n, k\]"),
    "weight elsewhere": (lambda g: {"weight": g["weight"].to("meta")}, ValueError,
                         "weight is on meta but x is on cpu; move"),
    "bias too short": (lambda g: {"bias": g["bias"][:3]}, ValueError, r"bias has shape \[3\]; .*it must be \[n\]"),
    "bias of FP64": (lambda g: {"bias": g["bias"].double()}, TypeError, "bias is a tensor of torch.float64"),
    "sparse x": (lambda g: {"x": g["x"].detach().to_sparse()}, TypeError,
                 r"x is a tensor of layout .* Pass x.to_dense"),
    "no recipe": (lambda g: {"recipe": "fp8"}, TypeError, "recipe is a str; it must be a deep_tile.train.Recipe"),
    "main_grad": (lambda g: setattr(g["weight"], "main_grad", torch.zeros(3)) or {}, ValueError,
                  r"weight.main_grad is \[3\] of torch.float32.*weight of \[130, 200\]"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_refused(change, error, message):
    """Also after a right call, which leaves nothing behind that lets it pass."""
    good = dict(zip(("x", "weight", "bias"), make_layer(), strict=False))
    linear(**good)
    with pytest.raises(error, match=message):
        linear(**(good | change(good)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dgrad": "fp4"}, ValueError, "dgrad is 'fp4'; it must be one of fp8, bf16"),
        ({"wgrad": None}, ValueError, "wgrad is None; it must be one of fp8, fp8_1x128, bf16"),
        ({"round_scale": "up"}, ValueError, "round_scale is 'up'; use"),
        ({"amax_floor": -1.0}, ValueError, "amax_floor is -1.0; it must be"),
        ({"amax_floor": "0"}, TypeError, "amax_floor is '0'"),
        ({"keep_weights": None}, TypeError, "keep_weights is None, .*pass True or False"),
        ({"recast": 1}, TypeError, "recast is 1, .*pass True or False"),
    ],
)
def test_recipes_that_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Recipe(**options)


def test_lists_that_are_refused():
    x, weight, bias, _ = make_layer()
    for weights, biases, message in (
        ((), None, "weights is empty"),
        ((weight,), (bias, bias), "1 weights and 2 biases are given"),
        ((weight, weight[:, :9]), None, r"weight\[1\] has shape \[130, 9\]"),
    ):
        with pytest.raises(ValueError, match=message):
            linears(x, weights, biases)
    with pytest.raises(TypeError, match=r"bias\[1\] is a int"):
        linears(x, (weight, weight), (bias, 1))


def test_predictions_know_the_host():
    """A small layer gains on the GPU alone, a large one in eager mode, too."""
    small, middle, large = (4096, 2048, 2048), (8192, 2048, 2048), (8192, 4096, 4096)
    assert predict(*small).pays and not predict(*small, eager=True).pays
    assert predict(*middle, eager=True).pays  # its passes are a call each
    assert predict(*large) == predict(*large, eager=True) and predict(*large).pays


MEASURED = [
    entry
    for entry in store.load(sorted(store.FOLDER.glob("train_layers_*.json"))[-1])["entries"]
    if entry.get("of", "linear") == "linear" and abs(entry["joined, graph"] / entry["bf16, graph"] - 1) > 0.03
]
"""Layers that are clearly faster or slower in FP8."""


@pytest.mark.parametrize("entry", MEASURED, ids=lambda entry: "{tokens}x{n}x{k}".format(**entry))
def test_a_layer_is_converted_by_default_where_it_was_measured_to_gain(entry, capsys):
    """Of 8,192 tokens and 1024x1024, as others, `explain` says why not."""
    tokens, n, k = (entry[name] for name in ("tokens", "n", "k"))
    gains, layer = entry["joined, graph"] < entry["bf16, graph"], nn.Linear(k, n, device="meta")
    if gains:
        assert isinstance(convert(layer, tokens=tokens), Linear)
    else:
        with pytest.raises(ValueError, match="none gains by FP8"):
            convert(layer, tokens=tokens)
    command = "explain", f"{tokens}x{n}x{k}", "--train"
    assert cli.main(command) == 0
    assert ("converts this layer" if gains else "leaves this layer in BF16") in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["training"]["pays"] == gains


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model is .* a list; pass a torch.nn.Module"):
        convert([nn.Linear(8, 8)], **ALL)
    with pytest.raises(TypeError, match="recipe is a dict; it must be a deep_tile.train.Recipe"):
        convert(nn.Linear(8, 8), **ALL, recipe={"dgrad": "fp8"})


def test_names_are_public():
    """Functions, not the modules that they are named as."""
    names = {
        "Linear",
        "Recipe",
        "convert",
        "experts",
        "gather_fp8",
        "invalidate",
        "linear",
        "linears",
        "mlp",
        "precompile",
        "predict",
    }
    assert {*deep_tile.train.__all__} == names and all(callable(getattr(deep_tile.train, name)) for name in names)


@pytest.mark.parametrize(
    ("recipe", "dtype", "main_grad"),
    [
        (Recipe(), torch.bfloat16, None),
        (Recipe(wgrad="fp8_1x128"), torch.float32, None),
        (Recipe(), torch.bfloat16, torch.float32),
        (Recipe(dgrad="bf16", wgrad="bf16"), torch.bfloat16, None),
    ],
    ids=["default", "1x128 in fp32", "main_grad", "forward alone"],
)
def test_precompile_makes_ready_what_a_step_chooses(monkeypatch, recipe, dtype, main_grad):
    model, loaded = nn.Sequential(nn.Linear(384, 1152, dtype=dtype)), []
    convert(model, lambda name, layer: True, recipe=recipe)
    if main_grad is not None:
        model[0].weight.main_grad = torch.zeros(1152, 384, dtype=main_grad)
    monkeypatch.setattr(deep_tile.plan, "load_kernels", lambda *_, **__: None)
    monkeypatch.setattr(deep_tile.cast, "load_kernels", lambda *_, **__: loaded.append("casts"))
    made = set(deep_tile.train.precompile(model, 640).configs)
    x = GemmProblem(640, 1152, 384, bias={torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype])
    wanted = [x]
    if recipe.dgrad == "fp8":
        wanted.append(GemmProblem(640, 384, 1152))
    if recipe.wgrad != "bf16":
        output = "fp32" if torch.float32 in (dtype, main_grad) else "bf16"
        kind = "fp8" if recipe.wgrad == "fp8" else "fp8_1x128"
        wanted.append(GemmProblem(1152, 384, 640, kind=kind, output=output, accumulate=main_grad is not None))
    assert loaded == ["casts"] and {deep_tile.plan.config_for(problem) for problem in wanted} <= made


def test_precompile_knows_gated_mlps(monkeypatch):
    """The two parts of an input's gradient are added up by a kernel of their own."""
    model = nn.Module()
    model.gate_proj, model.up_proj = (nn.Linear(384, 1152, bias=False, dtype=torch.bfloat16) for _ in range(2))
    model.down_proj, model.act_fn = nn.Linear(1152, 384, bias=False, dtype=torch.bfloat16), nn.SiLU()
    convert(model, lambda name, layer: True)
    monkeypatch.setattr(deep_tile.plan, "load_kernels", lambda *_, **__: None)
    monkeypatch.setattr(deep_tile.cast, "load_kernels", lambda *_, **__: None)
    made = set(deep_tile.train.precompile(model, 640).configs)
    problems = [GemmProblem(640, 1152, 384), GemmProblem(640, 384, 1152), GemmProblem(640, 384, 1152, accumulate=True)]
    assert {deep_tile.plan.config_for(problem) for problem in problems} <= made


def test_precompile_wants_layers_that_train():
    with pytest.raises(ValueError, match="convert it first"):
        deep_tile.train.precompile(nn.Linear(256, 256), 64)
