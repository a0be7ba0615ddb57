"""Random training steps, for as long as it is told: see docs/development.md, "Fuzzing and stress".

Layers, several of one input, MLPs and experts, of odd sizes, by any recipe, in micro-batches, with checkpoints, hooks,
frozen parts, autocast, `main_grad` and casts that are kept, beside another stream's kernels. Results and gradients are
those of the recipe's definition, written down here once more in float64; a second step gives the same bits, and by the
other way of enqueueing a small layer, too.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any, NamedTuple

import campaign
import torch
import torch.nn.functional as F
from expected import ACCUMULATION
from torch import nn
from torch.utils.checkpoint import checkpoint

from deep_tile.ops import SMALLEST_AMAX_FLOOR
from deep_tile.select import training
from deep_tile.train import Recipe, experts, linear, linears, mlp

LARGEST = 448.0
"""In e4m3."""

WIDE = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)

CHAINED = 0.04
"""Of the norm, behind a product whose rounding to BF16 decides about codes: 0.013 is seen where the largest of 128x128
is rounded otherwise."""

FLIPPED = 0.13
"""Of the norm of the largest row: where one number outweighs all others of a product, and its code is the neighbour."""

WAYS = ("plain", "plain", "plain", "checkpoint", "reentrant", "offloaded")


class Drawn(NamedTuple):
    """One step.

    Attributes:
        what: "linear", "linears", "mlp", "pair" (an MLP of two weights of gates and ups) or "experts".
        recipe, way: how it is trained.
        batches: as many micro-batches, whose gradients are added up.
        inputs: x and dy of each.
        parameters: weights and biases, some of which are frozen.
        routing: of experts: chosen, and shares; of others empty.
        main_grad: of the weights, in this dtype, which the gradients are added to; or None.
        autocasts: whether x and dy meet autocast to BF16.
        keeps: an optimiser has stepped the weights, whose casts are then kept.
    """

    what: str
    recipe: Recipe
    way: str
    inputs: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    parameters: tuple[torch.Tensor | None, ...]
    routing: tuple[torch.Tensor, ...]
    main_grad: torch.dtype | None
    autocasts: bool
    keeps: bool

    def __str__(self) -> str:
        """Without numbers."""
        (x, dy), *_ = self.inputs
        given = [each for each in (x, *self.parameters) if each is not None]
        parts = [f"{[*each.shape]} {each.dtype} {'' if each.requires_grad else 'frozen'}" for each in given]
        described = {"inputs": (len(self.inputs), x.stride(), dy.shape, dy.dtype), "parameters": parts, "routing": ()}
        return repr(self._replace(**described))


# Draws.


def draw(random: Random, device: str, most: int) -> Drawn:
    """A step with at most so many products of numbers in one product."""
    generator = torch.Generator(device).manual_seed(random.randrange(2**31))
    what = random.choice(("linear", "linear", "linear", "linears", "mlp", "pair", "experts"))
    recipe = draw_recipe(random, what)
    autocasts = random.random() < 0.15 and what != "experts"
    dtype = torch.float32 if autocasts else torch.bfloat16 if what == "experts" else random.choice(WIDE)
    tokens, k, n, inner = _sizes(random, what, most)
    n = k if what == "experts" else n
    sample = _Sampler(random, generator)
    shape = (tokens, k) if what == "experts" or random.random() < 0.5 else (1, tokens, k)
    magnitude = 2.0**-6 if dtype == torch.float16 else 10.0 ** -random.choice((0, 0, 3, 6, 9, 12))
    inputs = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        dy = sample((*shape[:-1], n), torch.bfloat16 if autocasts else dtype, magnitude)
        inputs.append((sample(shape, dtype, strided=True), dy))
    routing = ()
    if what == "experts":
        parameters, routing = _draw_experts(random, sample, tokens, k, inner)
    elif what in ("mlp", "pair"):
        first = [(inner, k)] * 2 if what == "pair" else [(2 * inner, k)]
        parameters = tuple(
            sample(size, random.choice((dtype, torch.float32)), size[1] ** -0.5) for size in (*first, (n, inner))
        )
    else:
        parameters = _draw_layers(random, sample, n, k, dtype, 1 if what == "linear" else random.choice((2, 3)))
    leaves = [*(x for x, _ in inputs[:1]), *(each for each in parameters if each is not None)]
    wanted = [random.random() < 0.85 for _ in leaves]
    wanted[random.randrange(len(leaves))] = True
    for x, _ in inputs:
        x.requires_grad_(wanted[0])
    for leaf, is_wanted in zip(leaves[1:], wanted[1:], strict=True):
        leaf.requires_grad_(is_wanted)
    main_grad = random.choice((None, None, None, torch.float32, torch.bfloat16))
    way = random.choice(WAYS)
    return Drawn(what, recipe, way, tuple(inputs), parameters, routing, main_grad, autocasts, random.random() < 0.3)


def draw_recipe(random: Random, what: str) -> Recipe:
    """Experts take one format of products, others more often those in FP8."""
    is_any = what != "experts"
    return Recipe(
        dgrad=random.choice(("fp8", "fp8", "fp8", "fp8", "bf16")) if is_any else "fp8",
        wgrad=random.choice(("fp8", "fp8", "fp8", "fp8_1x128", "fp8_1x128", "bf16")) if is_any else "fp8",
        round_scale=random.choice(("none", "none", "pow2")),
        amax_floor=random.choice((SMALLEST_AMAX_FLOOR, SMALLEST_AMAX_FLOOR, 1e-20)),
        activations=random.choice(("bf16", "bf16", "fp8")),
        recast=random.random() < 0.25,
        keep_weights=random.random() < 0.8,
    )


def _sizes(random: Random, what: str, most: int) -> tuple[int, int, int, int]:
    """Tokens, k, n, and an MLP's inner size. Chains have so many of each that norms mean something."""
    is_chain = what in ("mlp", "pair", "experts")
    least = 48 if is_chain else 1
    sizes = []
    for _ in range(4):
        size = random.choice(
            (random.randint(1, 40), random.randint(1, 400), 128 * random.randint(1, 12), random.randint(1, 2000))
        )
        sizes.append(max(size, least))
    while sizes[0] * sizes[1] * max(sizes[2:]) > max(most, least**3):
        largest = max(range(4), key=sizes.__getitem__)
        sizes[largest] = max(sizes[largest] // 2, least)
    return tuple(sizes)


class _Sampler:
    def __init__(self, random: Random, generator: torch.Generator):
        self._random, self._generator = random, generator

    def __call__(self, shape, dtype: torch.dtype, magnitude: float = 1.0, *, strided: bool = False) -> torch.Tensor:
        """Numbers of this size, some of them with channels of outliers; x may lie between gaps, or transposed."""
        wide, device = self._random.choice((0, 0, 8, 13)), self._generator.device
        x = torch.randn(*shape[:-1], shape[-1] + (wide if strided else 0), generator=self._generator, device=device)
        if self._random.random() < 0.3:
            x[..., self._random.randrange(shape[-1])] *= 4 if dtype == torch.float16 else 30  # whose squares it holds
        x = (x * magnitude).to(dtype)[..., : shape[-1]]
        if strided and self._random.random() < 0.1:
            x = x.mT.contiguous().mT
        return x


def _draw_layers(random: Random, sample: _Sampler, n: int, k: int, dtype: torch.dtype, count: int) -> tuple:
    weights = [sample((n, k), random.choice((dtype, *WIDE))) for _ in range(count)]
    has_bias = random.random() < 0.4
    return (*weights, *(sample((n,), random.choice((dtype, torch.float32))) if has_bias else None for _ in weights))


def _draw_experts(random: Random, sample: _Sampler, tokens: int, k: int, inner: int) -> tuple[tuple, tuple]:
    count = random.choice((1, 2, 5, 9))
    device = sample._generator.device
    chosen = torch.stack([torch.randperm(count, generator=sample._generator, device=device) for _ in range(tokens)])
    chosen = chosen[:, : random.randint(1, min(count, 4))].to(random.choice((torch.int32, torch.int64))).contiguous()
    chosen[torch.rand(chosen.shape, generator=sample._generator, device=device) < 0.05] = -1
    shares = torch.rand(chosen.shape, generator=sample._generator, device=device)
    dtype = random.choice((torch.bfloat16, torch.float32))
    shapes = ((count, 2 * inner, k), (count, k, inner))
    return tuple(sample(shape, dtype, shape[2] ** -0.5) for shape in shapes), (chosen, shares.requires_grad_())


# What is done.


def run(drawn: Drawn) -> list[torch.Tensor]:
    """Results of all micro-batches, then gradients of inputs, parameters and shares, as far as they are wanted."""
    parameters = [
        None if each is None else nn.Parameter(each.detach().clone(), each.requires_grad) for each in drawn.parameters
    ]
    weights = [each for each in parameters if each is not None and each.dim() > 1]
    if drawn.keeps:
        stepped = [each for each in weights if each.requires_grad]
        for weight in stepped:
            weight.grad = torch.zeros_like(weight)
        if stepped:
            _layer(drawn, parameters, [*drawn.routing])(drawn.inputs[0][0].detach())
            optimizer = torch.optim.SGD(stepped, lr=0.5)
            optimizer.step(), optimizer.zero_grad()
    if drawn.main_grad is not None:
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape, dtype=drawn.main_grad, device=weight.device)
    routing = [each.detach().clone().requires_grad_(each.requires_grad) for each in drawn.routing]
    made, of_inputs = [], []
    for x, dy in drawn.inputs:
        leaf = x.detach().requires_grad_(x.requires_grad)
        results = _through(drawn, _layer(drawn, parameters, routing), leaf)
        made += [result.detach() for result in results]
        torch.autograd.backward(results, [dy] * len(results))
        of_inputs += [] if leaf.grad is None else [leaf.grad]
    has_main = drawn.main_grad is not None
    of_weights = [
        each.main_grad if has_main and each.dim() > 1 else each.grad
        for each in parameters
        if each is not None and each.requires_grad
    ]
    return [*made, *of_inputs, *of_weights, *(each.grad for each in routing[1:])]


def _layer(drawn: Drawn, parameters: list, routing: list) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    recipe, count = drawn.recipe, len(parameters) // 2
    calls = {
        "linear": lambda x: (linear(x, *parameters, recipe=recipe),),
        "linears": lambda x: linears(x, parameters[:count], parameters[count:], recipe=recipe),
        "mlp": lambda x: (mlp(x, *parameters, recipe=recipe),),
        "pair": lambda x: (mlp(x, parameters[:2], parameters[2], recipe=recipe),),
        "experts": lambda x: (experts(x, *routing, *parameters, recipe=recipe),),
    }
    return calls[drawn.what]


def _through(drawn: Drawn, layer: Callable, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dense = lambda saved: saved.clone(memory_format=torch.contiguous_format), lambda saved: saved  # noqa: E731
    hooks = torch.autograd.graph.saved_tensors_hooks(*dense) if drawn.way == "offloaded" else nullcontext()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=drawn.autocasts), hooks:
        if drawn.way in ("checkpoint", "reentrant") and x.requires_grad:
            return checkpoint(layer, x, use_reentrant=drawn.way == "reentrant")
        return layer(x)


# What is expected, each with what it may be off by, or None where norms decide.

Expected = tuple[torch.Tensor, torch.Tensor | None]


def fake(x: torch.Tensor, rows: int, columns: int, recipe: Recipe) -> torch.Tensor:
    """What a cast with a scale for each rows x columns makes of a matrix, as numbers."""
    (m, k), x = x.shape, x.detach().float()
    padded = F.pad(x, (0, -k % columns, 0, -m % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=recipe.amax_floor)
    scale = amax / torch.full_like(amax, LARGEST)
    if recipe.round_scale == "pow2":
        mantissa, exponent = torch.frexp(amax)
        scale = torch.ldexp(torch.ones_like(amax), exponent - 9 + (mantissa > 0.875))
    codes = (blocks / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return codes.flatten(2).flatten(0, 1)[:m, :k]


def product(a: torch.Tensor, b: torch.Tensor) -> Expected:
    """Of what casts make, 128 of k at a time, each within what WGMMA keeps of its terms."""
    allowed = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for block in range(0, a.shape[1], 128):
        allowed += (a[:, block : block + 128].square() @ b[block : block + 128].square()).sqrt()
    return a @ b, ACCUMULATION * allowed


def wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Expected:
    """By torch, which may round parts of a sum to the dtype."""
    return a @ b, 2 * max(torch.finfo(dtype).eps, 2.0**-20) * (a.abs() @ b.abs())


def rounded(expected: Expected, dtype: torch.dtype) -> Expected:
    """What is rounded to a dtype. Where that may overflow, as FP16 gradients of FP32 outliers do, anything is right."""
    value, bound = expected
    limits = torch.finfo(dtype)
    bound = bound + limits.eps * value.abs() + limits.tiny * limits.eps
    return value, torch.where(value.abs() + bound > limits.max, torch.inf, bound)


def added(parts: list[Expected], dtype: torch.dtype) -> Expected:
    """A sum whose partial sums are in a dtype."""
    total = sum(value for value, _ in parts)
    bound = sum(bound for _, bound in parts)
    if len(parts) == 1:
        return total, bound
    return total, bound + 2 * torch.finfo(dtype).eps * sum(value.abs() for value, _ in parts)


def expect_layers(drawn: Drawn) -> list[Expected]:
    recipe, count = drawn.recipe, len(drawn.parameters) // 2
    weights, biases = drawn.parameters[:count], drawn.parameters[count:]
    ys, dxs, dws, dbiases = [], [], [[] for _ in weights], [[] for _ in weights]
    for x, dy in drawn.inputs:
        rows, dys = (x.detach().to(dy.dtype).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))
        a, parts = fake(rows, 1, 128, recipe), []
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            y, bound = product(a, fake(weight, 128, 128, recipe).t())
            y = y if bias is None else y + bias.detach().double()
            ys.append(rounded((y, bound + 2.0**-22 * y.abs()), dy.dtype))
            parts.append(rounded(_dgrad(dys, weight, recipe), dy.dtype))
            dws[i].append(_wgrad(dys, rows, recipe))
            dbiases[i].append((dys.double().sum(0), 2.0**-18 * dys.double().abs().sum(0)))
        dxs.append(rounded(added(parts, dy.dtype), x.dtype))
    expected = [*ys, *(dxs if drawn.inputs[0][0].requires_grad else [])]
    for parameter, parts in zip(drawn.parameters, (*dws, *dbiases), strict=True):
        if parameter is not None and parameter.requires_grad:
            main = drawn.main_grad if parameter.dim() > 1 else None
            in_bf16 = parameter.dim() > 1 and recipe.wgrad == "bf16"
            through = drawn.inputs[0][1].dtype if in_bf16 else parameter.dtype if main is None else main
            parts = [rounded(rounded(part, through), main or parameter.dtype) for part in parts]
            expected.append(added(parts, main or parameter.dtype))
    return expected


def _dgrad(dy: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> Expected:
    if recipe.dgrad == "fp8":
        return product(fake(dy, 1, 128, recipe), fake(weight, 128, 128, recipe))
    return wide_product(dy.double(), weight.detach().to(dy.dtype).double(), dy.dtype)


def _wgrad(dy: torch.Tensor, x: torch.Tensor, recipe: Recipe) -> Expected:
    if recipe.wgrad == "bf16":
        return wide_product(dy.double().t(), x.double(), dy.dtype)
    return product(fake(dy, 128, 1, recipe).t(), fake(x, 128, 128 if recipe.wgrad == "fp8" else 1, recipe))


def expect_chains(drawn: Drawn) -> list[Expected]:
    """MLPs, and experts as MLPs of their own, with a share of their hidden rows each."""
    of_x: tuple[list, list] = [], []
    totals: list[torch.Tensor] = []
    shares_total = torch.zeros_like(drawn.routing[1], dtype=torch.float64) if drawn.routing else None
    for x, dy in drawn.inputs:
        rows, dys = x.detach().to(dy.dtype).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if drawn.what == "experts":
            y, dx, *dws, dshares = _experts(drawn, rows, dys)
            shares_total += dshares
        else:
            y, dx, *dws = _mlp(drawn, rows, dys, None, drawn.parameters)[:-1]
        of_x[0].append(y), of_x[1].append(dx)
        totals = [one + other for one, other in zip(totals, dws, strict=True)] if totals else dws
    wanted = [total for total, each in zip(totals, drawn.parameters, strict=True) if each.requires_grad]
    values = [*of_x[0], *(of_x[1] if drawn.inputs[0][0].requires_grad else []), *wanted]
    return [(value, None) for value in (*values, *([] if shares_total is None else [shares_total]))]


def _mlp(drawn: Drawn, x, dy, share, parameters) -> list[torch.Tensor]:
    """y, dx, gradients of the weights, that of the share."""
    recipe, of_experts = drawn.recipe, drawn.what == "experts"
    first = torch.cat([each.detach() for each in parameters[:-1]])
    in_bf16 = (recipe.dgrad == "bf16" or recipe.wgrad == "bf16") or (
        drawn.what == "pair" and parameters[-1].shape[1] % 128
    )
    last, wide = parameters[-1].detach(), dy.dtype if in_bf16 else torch.bfloat16
    a = fake(x, 1, 128, recipe)
    halves = [fake(half, 128, 128, recipe) for half in (parameters[:-1] if len(parameters) == 3 else (first,))]
    gate_up = torch.cat([a @ half.t() for half in halves], 1).to(wide)
    hidden = _swiglu(gate_up).to(wide if in_bf16 else torch.float32)
    q_last, share_of_rows = fake(last, 128, 128, recipe), 1.0 if share is None else share.double()[:, None]
    y = (fake(hidden, 1, 128, recipe) * share_of_rows) @ q_last.t()
    kept = fake(gate_up, 1, 128, recipe) if recipe.activations == "fp8" and not in_bf16 else gate_up
    dh = _dgrad(dy, last, recipe)[0].to(wide)
    leaf = kept.double().requires_grad_()
    with torch.enable_grad():
        h = _swiglu(leaf)
        h_of_share = (h * share_of_rows).detach()
        (of_gates,) = torch.autograd.grad(h, leaf, dh.double() * share_of_rows)
    dshare = (dh.double() * h.detach()).sum(1)
    of_gates, h_of_share = of_gates.to(wide), h_of_share.to(wide)
    of_recipe = Recipe(**{**_fields(recipe), "wgrad": "fp8_1x128"}) if of_experts else recipe
    d_last = _wgrad(dy, h_of_share, of_recipe)[0]
    widths = [len(half) for half in halves]
    pieces = of_gates.split(widths, 1)
    dx = sum(
        _dgrad(piece, half, recipe)[0]
        for piece, half in zip(pieces, parameters[:-1] if len(parameters) == 3 else (first,), strict=True)
    )
    return [y, dx, *(_wgrad(piece, x, of_recipe)[0] for piece in pieces), d_last, dshare]


def _fields(recipe: Recipe) -> dict:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    return F.silu(gate) * up


def _experts(drawn: Drawn, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    (chosen, shares), (first, last) = drawn.routing, drawn.parameters
    y, dx = torch.zeros_like(dy, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    dfirst, dlast = (torch.zeros_like(each, dtype=torch.float64) for each in (first, last))
    dshares = torch.zeros_like(shares, dtype=torch.float64)
    for expert in range(len(first)):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        share = shares.detach()[tokens, places]
        part = _mlp(drawn, x[tokens], dy[tokens], share, (first[expert], last[expert]))
        y.index_add_(0, tokens, part[0]), dx.index_add_(0, tokens, part[1])
        dfirst[expert], dlast[expert] = part[2], part[3]
        dshares[tokens, places] = part[4]
    return [y, dx, dfirst, dlast, dshares]


def check(drawn: Drawn, disturb: Callable[[], None]) -> dict[str, torch.Tensor]:
    """How much is wrong with a step, by kind."""
    disturb()
    got = run(drawn)
    expected = (expect_chains if drawn.what in ("mlp", "pair", "experts") else expect_layers)(drawn)
    faults = {}
    for i, (value, (wanted, bound)) in enumerate(zip(got, expected, strict=True)):
        difference = (value.double().reshape(wanted.shape) - wanted).abs()
        if bound is None:
            largest_row = wanted.flatten(0, -2).norm(dim=1).max()
            allowed = CHAINED * wanted.norm() + FLIPPED * largest_row + 1e-30
            faults[f"{i} is off"] = ~(difference.norm() <= allowed)
        else:
            faults[f"{i} is off"] = (~(difference <= bound) & bound.isfinite()).sum()
    disturb()
    most, training.MOST_PRODUCTS = training.MOST_PRODUCTS, 0
    sys.modules["deep_tile.train.linear"]._checked.clear()
    again = run(drawn)
    training.MOST_PRODUCTS = most
    sys.modules["deep_tile.train.linear"]._checked.clear()
    for i, (one, other) in enumerate(zip(got, again, strict=True)):
        faults[f"{i} repeated"] = (one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum()
    return faults


class Fuzzer(campaign.Fuzzer):
    UNSETTLED = 16

    def check_round(self, random: Random, number: int) -> dict[str, torch.Tensor]:
        most = 2**18 if self.device == "cpu" else random.choice((2**22, 2**27, 2**30))
        self.drawn = draw(random, self.device, most)
        faults = check(self.drawn, self.noise)
        self.calls[self.drawn.what] += 1
        return faults

    def counts(self) -> dict[str, Any]:
        return {"calls_that_copy": 2 * self.calls.total(), "steps": dict(sorted(self.calls.items()))}
