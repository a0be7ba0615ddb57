"""The way of a small layer that trains through the host, without a GPU: what is launched, where its operands are.

See pretending.py: CPU tensors pass for GPU tensors, and fake_driver.c is the driver. Kernels get the same numbers as
call by call, and the memory in which the backward pass, or the next kernel, looks for what they write.
"""

import pytest

from deep_tile import params

SETUP = """
import importlib
from deep_tile import train
from deep_tile.select import training
from deep_tile.train import Recipe, joined
linear = importlib.import_module("deep_tile.train.linear")

joined._is_on_gpu = lambda x: small
launches.num_sms = lambda device: 132
quantize.check_capture = lambda *ignored: None
quantize.needs_kernel = lambda x, out: not x.is_meta
cast.load = lambda kernel, device: plan.load_kernel(GemmConfig(64, 64, 4), 0)

small = True
x = torch.randn(3, 50, 200, dtype=torch.bfloat16, requires_grad=True)
weight, bias = (torch.nn.Parameter(torch.randn(shape)) for shape in ((72, 200), (72,)))
other = torch.nn.Parameter(torch.randn(130, 200, dtype=torch.bfloat16))
dy, other_dy = (torch.randn(3, 50, n, dtype=torch.bfloat16) for n in (72, 130))
kept = []
new = joined._Room.new
joined._Room.new = lambda room, x: kept.append((room, new(room, x))) or kept[-1][1]
"""

ADDRESSES = {
    "x",
    "row_out",
    "row_scale",
    "out",
    "scale",
    "bias",
    "a_scale",
    "b_scale",
    "a_maps",
    "b_maps",
    "out_maps",
    "dh",
}


@pytest.fixture
def run(run_pretending):
    """Runs code that knows all of SETUP; what it shows, and the kernels launched, with an argument `of`."""
    return lambda code, of=params.GEMM: run_pretending(SETUP + code, of)


STEPS = """
for recipe in (Recipe(), Recipe(wgrad="fp8_1x128", round_scale="pow2", amax_floor=1e-3)):
    for small in (True, False):
        linear._checked.clear()
        linear.linear(x, weight, bias, recipe=recipe).backward(dy)
"""

STEPS_OF_TWO = STEPS.replace(
    "linear.linear(x, weight, bias, recipe=recipe).backward(dy)",
    "torch.autograd.backward(linear.linears(x, (weight, other), (bias, None), recipe=recipe), (dy, other_dy))",
)

STEPS_OF_MLP = """
w_gate, w_up, w_down = (torch.nn.Parameter(torch.randn(n, k)) for n, k in ((128, 200), (128, 200), (72, 128)))
for first in ((w_gate, w_up), torch.nn.Parameter(torch.randn(256, 200))):
""" + STEPS.replace("\n", "\n    ").replace(
    "linear.linear(x, weight, bias, recipe=recipe)", "train.mlp(x, first, w_down, recipe=recipe)"
)

OF_MLP = {
    "GEMM": ((2, 4, 7, 9, 11, 12, 13, 14, 15), (2, 5, 7, 9, 10, 11)),
    "CAST_BOTH": ((0, 1, 3, 6, 8), (0, 1, 4, 6)),
    "CAST": ((5,), (3,)),
    "GATED": ((10,), (8,)),
}
"""Which of an MLP's kernels have parameters of a table: with gates and ups in two weights, and in one."""

IN_ORDER = {
    "one": (STEPS, params.GEMM, (2, 4, 5)),
    "casts of one": (STEPS, params.CAST_BOTH, (0, 1, 3)),
    "two": (STEPS_OF_TWO, params.GEMM, (2, 4, 6, 7, 9, 10)),
    "casts of two": (STEPS_OF_TWO, params.CAST_BOTH, (0, 1, 3, 5, 8)),
}


@pytest.mark.parametrize(("steps", "table", "which"), IN_ORDER.values(), ids=IN_ORDER)
def test_kernels_get_the_numbers_that_calls_give_them(run, steps, table, which):
    """In the same order: a cast of x; of each layer a cast of the weight and the product; then of each a cast of dy,
    and two products."""
    _, launched = run(steps, table)
    count = 6 if steps == STEPS else 11
    assert len(launched) == 4 * count
    for begin in (0, 2 * count):
        for i in which:
            assert_same_numbers(launched[begin + i], launched[begin + count + i])


def assert_same_numbers(one, other):
    for name in one.params.keys() - ADDRESSES:
        assert one.params[name] == other.params[name], name


@pytest.mark.parametrize("table", OF_MLP)
def test_kernels_of_an_mlp_get_the_numbers_that_calls_give_them(run, table):
    _, launched = run(STEPS_OF_MLP, getattr(params, table))
    assert len(launched) == 4 * (16 + 12)
    for first, count, which in zip((0, 4 * 16), (16, 12), OF_MLP[table], strict=True):
        for begin in (first, first + 2 * count):
            for i in which:
                assert_same_numbers(launched[begin + i], launched[begin + count + i])


LOCATED = """
given = []
enqueue = launches.enqueue
launches.enqueue = lambda table, *rest: (
    table is joined._launches and given.append(rest[1])) or enqueue(table, *rest)
linear.linear(x, weight, bias).backward(dy)
for tensors in given: show(*(each.data_ptr() for each in tensors))
for room, memory in kept: show(*(each.data_ptr() for each in room.views(memory)), memory.data_ptr() + memory.nbytes)
"""


def test_operands_lie_where_they_are_written_to(run):
    for table in (params.GEMM, params.CAST_BOTH):
        shown, launched = run(LOCATED, table)
        (x, weight, y, kept, spare, bias), (dy, again, dx, dw, _), *rooms = [
            [*map(int, line.split())] for line in shown
        ]
        (at, at_scale, bt, b_scale, end), (a, a_scale, b, _), (d, d_scale, dt, dt_scale, _) = rooms
        assert (kept, spare, again) == (at, a, kept) and at < at_scale < bt < b_scale < end
        if table is params.CAST_BOTH:
            wanted = {0: (x, a, a_scale, at, at_scale), 1: (weight, b, None, bt, b_scale)}
            for i, addresses in (wanted | {3: (dy, d, d_scale, dt, dt_scale)}).items():
                for name, address in zip(("x", "row_out", "row_scale", "out", "scale"), addresses, strict=True):
                    assert address is None or launched[i].params[name] == address, (i, name)
            continue
        wanted = {2: (a, a_scale, b, b_scale, y), 4: (d, d_scale, bt, b_scale, dx), 5: (dt, dt_scale, at, at_scale, dw)}
        for i, addresses in wanted.items():
            scales, maps = ([name + kind for name in "ab"] for kind in ("_scale", "_maps"))
            found = zip(map(launched[i].map_address, maps), map(launched[i].params.get, scales), strict=True)
            assert (*(each for pair in found for each in pair), launched[i].params["out"]) == addresses
        assert launched[2].params["bias"] == bias


LOCATED_OF_TWO = LOCATED.replace(
    "linear.linear(x, weight, bias).backward(dy)",
    "torch.autograd.backward(linear.linears(x, (weight, other)), (dy, other_dy))",
)


def test_a_second_layer_reads_what_the_first_has_cast(run):
    for table in (params.GEMM, params.CAST_BOTH):
        shown, launched = run(LOCATED_OF_TWO, table)
        (_, _, _, kept, spare), (weight, y, next_kept, b, _), of_dy, (dy, again, own, dx, dw, _), *rooms = [
            [*map(int, line.split())] for line in shown
        ]
        at, at_scale, *_ = rooms[0]
        (a, a_scale, *_), (bt, b_scale, _), (also_b, _) = rooms[1:4]
        d, d_scale, dt, dt_scale, _ = rooms[5]
        assert (kept, spare, next_kept, b) == (at, a, bt, also_b)
        assert (again, own, dx) == (kept, next_kept, of_dy[2])
        if table is params.CAST_BOTH:
            assert [launched[3].params[name] for name in ("x", "row_out", "out", "scale")] == [weight, b, bt, b_scale]
            assert [launched[8].params[name] for name in ("x", "row_out", "out")] == [dy, d, dt]
            continue
        wanted = {
            4: (a, a_scale, b, b_scale, y),
            9: (d, d_scale, bt, b_scale, dx),
            10: (dt, dt_scale, at, at_scale, dw),
        }
        for i, (*operands, out) in wanted.items():
            scales, maps = ([name + kind for name in "ab"] for kind in ("_scale", "_maps"))
            found = zip(map(launched[i].map_address, maps), map(launched[i].params.get, scales), strict=True)
            assert [*(each for pair in found for each in pair), launched[i].params["out"]] == [*operands, out]


NOT_JOINED = {
    "a frozen weight": "weight.requires_grad_(False)",
    "an input without gradient": "x.requires_grad_(False)",
    "main_grad": "weight.main_grad = torch.zeros(72, 200)",
    "columns apart": "x = torch.randn(200, 150).bfloat16().t().requires_grad_()",
    "no gradients": "torch.set_grad_enabled(False)",
    "a cast that is there": "x = x * 1; linear.cast_shared(x, recipe, along_tokens=True)",
    "a weight in FP16": "weight = torch.nn.Parameter(weight.detach().half())",
    "four dimensions": "x = torch.randn(1, 3, 50, 200).requires_grad_()",
    "recast": "recipe = Recipe(recast=True)",
    "dgrad in BF16": "recipe = Recipe(dgrad='bf16')",
    "wgrad in BF16": "recipe = Recipe(wgrad='bf16')",
    "much work": "training.MOST_PRODUCTS = 150 * 200 * 72 - 1",
    "many elements": "training.MOST_ELEMENTS = 150 * 200 - 1",
}


def test_what_goes_call_by_call(run):
    """All else is known by C from the second step on, in two calls."""
    shown, launched = run(f"""
def step(): linear.linear(x, weight, bias).backward(dy)
for _ in range(3): attempt(step)
given = x, weight, Recipe(), training.MOST_PRODUCTS, training.MOST_ELEMENTS
for change in {[*NOT_JOINED.values()]}:
    x, weight, recipe, training.MOST_PRODUCTS, training.MOST_ELEMENTS = given
    x, weight = x.detach().clone().requires_grad_(), torch.nn.Parameter(weight.detach().clone())
    exec(change)
    linear._checked.clear()
    kept.clear()
    linear.linear(x, weight, bias, recipe=recipe)
    torch.set_grad_enabled(True)
    show(len(kept))
""")
    assert shown[1:3] == ["launch_known launch_known"] * 2
    assert dict(zip(NOT_JOINED, shown[3:], strict=True)) == dict.fromkeys(NOT_JOINED, "0")


MLP_NOT_JOINED = {
    "gates and ups in FP8": "recipe = Recipe(activations='fp8')",
    "recast": "recipe = Recipe(recast=True)",
    "a frozen weight": "w_down.requires_grad_(False)",
    "main_grad": "w_up.main_grad = torch.zeros(128, 200)",
    "parts of blocks": "w_gate, w_up, w_down = weights((240, 200), (0, 0), (72, 120)); w_up = None",
    "much work in the last layer": "w_down = torch.nn.Parameter(torch.randn(400, 128))",
}


def test_which_mlp_goes_call_by_call(run):
    """All else is known by C from the second step on, in seven calls."""
    shown, _ = run(f"""
training.MOST_PRODUCTS = 150 * 200 * 128
def weights(*sizes): return [torch.nn.Parameter(torch.randn(size)) for size in sizes]
def step(): train.mlp(x, (w_gate, w_up), w_down).backward(dy)
given = (128, 200), (128, 200), (72, 128)
w_gate, w_up, w_down = weights(*given)
for _ in range(3): attempt(step)
for change in {[*MLP_NOT_JOINED.values()]}:
    (w_gate, w_up, w_down), recipe = weights(*given), Recipe()
    exec(change)
    kept.clear()
    train.mlp(x, w_gate if w_up is None else (w_gate, w_up), w_down, recipe=recipe)
    show(len(kept))
""")
    assert shown[1:3] == [" ".join(["launch_known"] * 7)] * 2
    assert dict(zip(MLP_NOT_JOINED, shown[3:], strict=True)) == dict.fromkeys(MLP_NOT_JOINED, "0")


def test_gradients(run):
    """Of any strides, as of a sum, whose gradient is one number, and of a transpose; and once."""
    shown, launched = run("""
for wanted in (lambda y: y.sum(), lambda y: (y.transpose(0, 1).float() * 2).square().sum()):
    wanted(linear.linear(x, weight, bias)).backward()
show(x.grad.shape, weight.grad.dtype, bias.grad.shape)
y = linear.linear(x, weight, bias)
dx, = torch.autograd.grad(y, x, torch.ones_like(y).requires_grad_(), create_graph=True)
attempt(lambda: dx.sum().backward())
""")
    assert len(launched) == 18
    assert shown[0] == "torch.Size([3, 50, 200]) torch.float32 torch.Size([72])"
    assert "RuntimeError" in shown[1] and "first-order" in shown[1]
