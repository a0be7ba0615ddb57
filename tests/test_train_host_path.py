"""The way of a small layer that trains through the host, without a GPU: what is launched, where its operands are.

See pretending.py: CPU tensors pass for GPU tensors, and fake_driver.c is the driver. Kernels get the same numbers as
call by call, and the memory in which the backward pass, or the next kernel, looks for what they write.
"""

import pytest

from deep_tile import params

SETUP = """
import importlib
from deep_tile import train
from deep_tile.train import Recipe, joined, sizes
linear = importlib.import_module("deep_tile.train.linear")

joined._is_on_gpu = lambda x: small
launches.num_sms = lambda device: 132
quantize.check_capture = lambda *ignored: None
quantize.needs_kernel = lambda x, out: not x.is_meta
cast.load = lambda kernel, device: plan.load_kernel(GemmConfig(64, 64, 4), 0)

small = True
x = torch.randn(3, 50, 200, dtype=torch.bfloat16, requires_grad=True)
weight, bias = (torch.nn.Parameter(torch.randn(shape)) for shape in ((72, 200), (72,)))
dy = torch.randn(3, 50, 72, dtype=torch.bfloat16)
kept = []
new = joined._Room.new
joined._Room.new = lambda room, x: kept.append((room, new(room, x))) or kept[-1][1]
"""

ADDRESSES = {"x", "row_out", "row_scale", "out", "scale", "bias", "a_scale", "b_scale", "a_maps", "b_maps", "out_maps"}


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


@pytest.mark.parametrize(
    ("table", "which"), [(params.GEMM, (2, 4, 5)), (params.CAST_BOTH, (0, 1, 3))], ids=["GEMM", "CAST_BOTH"]
)
def test_kernels_get_the_numbers_that_calls_give_them(run, table, which):
    """In the same order: casts of x and the weight, the product, a cast of dy, and two products."""
    _, launched = run(STEPS, table)
    assert len(launched) == 24
    for begin in (0, 12):
        for i in which:
            one, other = (launched[begin + way + i].params for way in (0, 6))
            for name in one.keys() - ADDRESSES:
                assert one[name] == other[name], name


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
    "much work": "sizes.MOST_PRODUCTS = 150 * 200 * 72 - 1",
    "many elements": "sizes.MOST_ELEMENTS = 150 * 200 - 1",
}


def test_what_goes_call_by_call(run):
    """All else is known by C from the second step on, in two calls."""
    shown, launched = run(f"""
def step(): linear.linear(x, weight, bias).backward(dy)
for _ in range(3): attempt(step)
given = x, weight, Recipe(), sizes.MOST_PRODUCTS, sizes.MOST_ELEMENTS
for change in {[*NOT_JOINED.values()]}:
    x, weight, recipe, sizes.MOST_PRODUCTS, sizes.MOST_ELEMENTS = given
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
    assert "RuntimeError" in shown[1] and "once_differentiable" in shown[1]
