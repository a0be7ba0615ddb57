"""Functions under dispatch modes and tracers: a call is its op, all of which torch sees.

`CALLS` are right calls of every function that has an op, or is made of torch's.
"""

import inspect
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import changes
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import run_python
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import deep_tile
from deep_tile import GemmConfig, discovery, launches, ops, torch_compat
from deep_tile.compat import deep_gemm

OPS = torch.ops.deep_tile
FP8 = torch.float8_e4m3fn
M, N, K = 6, 64, 256


class Call(NamedTuple):
    """A call whose results are defined everywhere. `flops` are those of its GEMM; None if it is not one op alone."""

    function: Callable
    arguments: tuple
    keywords: dict[str, Any]
    flops: int | None = 0

    @staticmethod
    def of(name: str, *arguments, flops: int | None = 0, **keywords) -> "Call":
        return Call(getattr(deep_tile, name), arguments, keywords, flops)

    @staticmethod
    def into(name: str, a, b, d: torch.Tensor, *rest, **keywords) -> "Call":
        """A call of DeepGEMM's name that returns `d`."""

        def call(a, b, d, *rest, **keywords) -> torch.Tensor:
            getattr(deep_gemm, name)(a, b, d, *rest, **keywords)
            return d

        return Call(call, (a, b, d, *rest), keywords, None)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in((self.arguments, self.keywords))

    def made(self, make: Callable[[torch.Tensor], torch.Tensor]) -> "Call":
        """The same call with other tensors."""
        arguments, keywords = pytree.tree_map_only(torch.Tensor, make, (self.arguments, self.keywords))
        return self._replace(arguments=arguments, keywords=keywords)

    def __call__(self) -> list[torch.Tensor]:
        return tensors_in(self.function(*self.arguments, **self.keywords))

    def traceable(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A function of the call's tensors, one by one, in their order."""

        def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            left = iter(given)
            return tuple(self.made(lambda _: next(left))())

        return call


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@cache
def calls(m: int = M, first: int = 2) -> dict[str, Call]:
    """Calls by name, with m rows, an even number, of which the first group has `first`. They are drawn once, on the
    CPU; tests call with clones."""
    of, into = Call.of, Call.into
    x, w, wide = torch.randn(m, K).bfloat16(), torch.randn(N, K), torch.randn(N, K).bfloat16()
    (a, a_scale), (b, b_scale) = deep_tile.per_token_cast_to_fp8(x), deep_tile.per_block_cast_to_fp8(w)
    fp8, groups = (a, a_scale, b, b_scale), (a, a_scale, torch.stack([b, b]), torch.stack([b_scale, b_scale]))
    batch = (a.view(2, m // 2, K), a_scale.contiguous().view(2, m // 2, -1), *groups[2:])
    integers = torch.randint(-9, 9, (m, K), dtype=torch.int8), torch.randint(-9, 9, (N, K), dtype=torch.int8)
    rows, columns = torch.rand(m, 1), torch.rand(N, 1)
    gradients = *deep_tile.transposed_cast_to_fp8(torch.randn(K, N)), *deep_tile.transposed_cast_to_fp8(w.t()[:, :32])
    offs, tokens = torch.tensor([first, m], dtype=torch.int32), torch.tensor([first % 129, K], dtype=torch.int32)
    chosen, weights, index = torch.randint(0, 4, (m, 2)), torch.rand(4, 2), torch.randint(0, m, (4, 2))
    product, total, added = torch.zeros(m, N).bfloat16(), torch.zeros(m, N), torch.ones(m, N)
    padded, ends = deep_tile.per_token_cast_to_fp8(torch.randn(K, K)), torch.tensor([0, 1]).int().repeat_interleave(128)
    of_groups, lengths, sums = torch.zeros(K, N).bfloat16(), [2, m - 2], (torch.zeros(2, K, N), torch.ones(2, K, N))
    of_rows = ("scaled_grouped_gemm", a, rows, groups[2], torch.rand(2, N), offs)
    mxfp4 = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), torch.full((N, K // 32), 127, dtype=torch.uint8)
    packed = deep_tile.pack_weight(*mxfp4)
    q, shares = torch.randn(m, 32, 128).to(FP8), torch.rand(m, 32)
    keys = deep_tile.per_token_cast_to_fp8(torch.randn(70, 128))
    ranges, table = (torch.full((m,), first % 70).int(), torch.full((m,), 66).int()), torch.ones(m // 2, 2).int()
    pages = torch.randint(0, 60, (5, 64, 1, 132), dtype=torch.uint8)
    dense, grads = 2 * m * N * K, 2 * N * 32 * K
    return {
        "fp8_gemm": of("fp8_gemm", *fp8, flops=dense),
        "fp8_gemm to out": of("fp8_gemm", *fp8, product, flops=dense),
        "fp8_gemm, finished": of("fp8_gemm", *fp8, bias=torch.randn(N), activation="swiglu", flops=dense),
        "gemm": of("gemm", x, wide, flops=dense),
        "gemm, added": of("gemm", x, wide, product, accumulate=True, flops=dense),
        "gemm of a wide weight": of("gemm", x, w, out_dtype=torch.float32, flops=None),
        "int8_gemm": of("int8_gemm", integers[0], a_scale, integers[1], b_scale, flops=dense),
        "scaled_gemm": of("scaled_gemm", a, rows, b, columns, fast_accum=False, flops=dense),
        "fp8_wgrad": of("fp8_wgrad", *gradients, torch.ones(N, 32), flops=grads),
        "fp8_grouped_wgrad": of("fp8_grouped_wgrad", *gradients, tokens, torch.ones(2, N, 32), flops=grads),
        "fp8_grouped_gemm": of("fp8_grouped_gemm", *groups, offs, flops=dense),
        "fp8_grouped_gemm of a batch": of("fp8_grouped_gemm", *batch, flops=dense),
        "fp8_grouped_gemm to out": of("fp8_grouped_gemm", *groups, offs, product, flops=dense),
        "grouped_gemm": of("grouped_gemm", x, torch.stack([wide, wide]), offs, flops=dense),
        "scaled_grouped_gemm": of(*of_rows, flops=dense),
        "scaled_grouped_gemm to out": of(*of_rows, product.half(), fast_accum=False, flops=dense),
        "packed_gemm": of("packed_gemm", a, a_scale, *packed, flops=dense),
        "packed_grouped_gemm": of("packed_grouped_gemm", a, a_scale, *(y[None] for y in packed), offs[1:], flops=dense),
        "thin_gemm": of("thin_gemm", x, w, flops=None),
        "thin_gemm to out": of("thin_gemm", x, w, total, flops=None),
        "prenorm_gemm to out": of("prenorm_gemm", x, w, None, torch.zeros(2, m), num_splits=2, flops=None),
        "fp8_linear": of("fp8_linear", x.view(2, m // 2, K), b, b_scale, torch.randn(N), flops=dense),
        "fp8_linear to out": of("fp8_linear", x, b, b_scale, None, product, flops=dense),
        "fp8_linear of a wide weight": of("fp8_linear", x, wide, flops=dense),
        "fp8_linear of a pair": of("fp8_linear", (a, a_scale), b, b_scale, flops=None),
        "fp8_gemm_cast": of("fp8_gemm_cast", *fp8, flops=dense),
        "fp8_gemm_cast to out": of("fp8_gemm_cast", *fp8, product.to(FP8), flops=None),
        "per_token_cast_to_fp8": of("per_token_cast_to_fp8", x.double(), scale_layout="row"),
        "per_token_cast_to_fp8 to out": of("per_token_cast_to_fp8", x, out=torch.zeros(m, K).to(FP8), flops=None),
        "per_token_cast_to_fp8 by rows": of("per_token_cast_to_fp8", x, rows=torch.tensor([1, -1, 0])),
        "per_block_cast_to_fp8": of("per_block_cast_to_fp8", w),
        "per_block_cast_to_fp8 to out": of("per_block_cast_to_fp8", w, out=torch.zeros(N, K).to(FP8), flops=None),
        "quantize_weight": of("quantize_weight", w),
        "transposed_cast_to_fp8": of("transposed_cast_to_fp8", w, offs=torch.tensor([N], dtype=torch.int32)),
        "transposed_cast_to_fp8 to out": of("transposed_cast_to_fp8", x, out=torch.zeros(K, m).to(FP8), flops=None),
        "per_token_cast_to_fp8 by rows to out": of(
            *("per_token_cast_to_fp8", x), rows=torch.tensor([1, -1, 0]), scale_out=torch.zeros(3, 2), flops=None
        ),
        "cast_both": of("cast_both", x, round_scale="pow2", offs=torch.tensor([m], dtype=torch.int32)),
        "cast_both of blocks": of("cast_both", x, blocks=True, exact="reciprocal"),
        "cast_both by rows": of("cast_both", x, rows=torch.arange(5, dtype=torch.int32)),
        "cast_weight": of("cast_weight", w, amax_floor=1e-3),
        "cast_weight of experts": of("cast_weight", torch.stack([w, 2 * w])),
        "transpose_fp8": of("transpose_fp8", a),
        "swiglu_gradient_cast_both": of("swiglu_gradient_cast_both", x[:, :128], x, share=rows[:, 0], flops=None),
        "silu_mul_cast_to_fp8": of("silu_mul_cast_to_fp8", x, offs=offs, limit=7.0),
        "silu_mul_cast_to_fp8 to out": of("silu_mul_cast_to_fp8", x, scale_out=torch.zeros(m, 1), flops=None),
        "silu_mul_cast_to_fp8 of counts to out": of(
            *("silu_mul_cast_to_fp8", x.view(2, m // 2, K)),
            **{"counts": torch.tensor([m, m]).int(), "out": torch.zeros(2, m // 2, 128).to(FP8), "flops": None},
        ),
        "add_rms_norm_cast_to_fp8": Call(OPS.add_rms_norm_cast_to_fp8, (x, x.flip(0), wide[1]), {"epsilon": 1e-5}),
        "mqa_logits": of("mqa_logits", q, keys[0], keys[1][:, 0], shares, *ranges, flops=2 * m * 32 * 128 * 70),
        "mqa_logits to out": of(
            "mqa_logits", q, keys[0], keys[1][:, 0], shares, *ranges, torch.zeros(m, 70), flops=None
        ),
        "paged_mqa_logits": of(
            *("paged_mqa_logits", q.view(m // 2, 2, 32, 128), pages, shares, ranges[1][: m // 2], table),
            clean=True,
            columns=99,
        ),
        "combine": of("combine", x, weights, index),
        "combine to out": of("combine", x, weights, index, torch.zeros(4, K).bfloat16()),
        "sort_by_expert": of("sort_by_expert", chosen, 4, alignment=128),
        "dequantize": of("dequantize", a, a_scale, flops=None),
        "einsum": of("einsum", "bhd,hdr->bhr", x.view(m, 2, -1), wide.view(2, -1, N)[:, :128], flops=None),
        "einsum of gradients": of("einsum", "bhd,bhr->hdr", x.view(m, 2, -1), x.view(m, 2, -1), flops=None),
        "interleave_gate_up": of("interleave_gate_up", wide, flops=None),
        "grouped_mm": Call(torch_compat.grouped_mm, (x, torch.stack([wide, wide]).mT), {"offs": offs}, None),
        "fp8_gemm_nt": into("fp8_gemm_nt", (a, a_scale), (b, b_scale), product),
        "bf16_gemm_nt, added": into("bf16_gemm_nt", x, wide, total, added),
        "fp8_gemm_nt, added": into(
            *("fp8_gemm_nt", (a, a_scale), deep_tile.per_token_cast_to_fp8(w), total, added), recipe=(1, 1, 128)
        ),
        "m_grouped_fp8_gemm_nt_contiguous": into(
            *("m_grouped_fp8_gemm_nt_contiguous", padded, groups[2:], of_groups, ends)
        ),
        "k_grouped_bf16_gemm_tn_contiguous": into(
            *("k_grouped_bf16_gemm_tn_contiguous", x, product, sums[0], lengths, torch.tensor(lengths).int(), sums[1])
        ),
    }


WITHOUT_FUNCTION = {"add_rms_norm_cast_to_fp8", "fp8_linear_backward", "gemm_gradient"}
CALLS = (*calls(),)
ONE_OP = [name for name, call in calls().items() if call.flops is not None or "to out" in name]


def on(device: str, name: str, m: int = M, first: int = 2) -> Call:
    """The call with its own tensors on a device, at the same strides."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    return calls(m, first)[name].made(copy)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).clone().view(torch.uint8)


def layouts(results: list[torch.Tensor]) -> list[tuple]:
    """Strides of dimensions that take no step are anything."""
    steps = [[step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1] for x in results]
    return [(x.shape, x.dtype, step) for x, step in zip(results, steps, strict=True)]


def assert_same(results, wanted: list[torch.Tensor]) -> None:
    assert layouts([*results]) == layouts(wanted)
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(results, wanted, strict=True))


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    @property
    def seen(self) -> list[str]:
        return [str(function) for function, *_ in self.calls]

    @property
    def ops(self) -> list[tuple]:
        """Calls of the package's ops, with their arguments."""
        return [call for call in self.calls if call[0].namespace == "deep_tile"]


def op_of(name: str, device: str) -> tuple:
    """A call's op, and its arguments with tensors of their own."""
    with Watching() as mode:
        on(device, name)()
    op, arguments, keywords = mode.ops[-1]
    return op, *pytree.tree_map_only(torch.Tensor, torch.clone, (arguments, keywords))


def of_gpu(*values) -> object:
    return pytest.param("cuda", *values, marks=pytest.mark.gpu)


EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", of_gpu()])

# ---- on any device


@EACH_DEVICE
@pytest.mark.parametrize("name", CALLS)
def test_modes_see_ops(name, device):
    """Both modes see the op and nothing else, and a counter sees its operations."""
    call, wanted = on(device, name), on(device, name)()
    with Watching() as outer, Watching() as inner, FlopCounterMode(display=False) as counter:
        results = call()
    assert_same(results, wanted)
    assert outer.seen == inner.seen
    if call.flops is not None:
        assert len(inner.seen) == 1 and inner.seen[0].startswith("deep_tile.")
        assert counter.get_total_flops() == call.flops


TRACERS = {
    **{
        f"make_fx, {mode}{', before dispatch' * pre}": lambda call, given, mode=mode, pre=pre: make_fx(
            call, tracing_mode=mode, pre_dispatch=pre
        )(*given)
        for mode in ("real", "fake", "symbolic")
        for pre in (False, True)
    },
    "torch.jit.trace": lambda call, given: torch.jit.trace(call, tuple(given), check_trace=False),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("device", "tracer"),
    [
        *(("cpu", tracer) for tracer in TRACERS),
        *(of_gpu(tracer) for tracer in ("make_fx, real", "make_fx, fake", "torch.jit.trace")),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_tracers_see_ops(name, device, tracer):
    """Also after a call that has made the launch known, which could bypass the tracer."""
    call, wanted = on(device, name), on(device, name)()
    traced = TRACERS[tracer](call.traceable(), call.tensors)
    assert_same(tensors_in(traced(*on(device, name).tensors)), wanted)


def targets(made: object, call: Call) -> list[bool]:
    """Which results are tensors that the call was given."""
    return [any(x is given for given in call.tensors) for x in tensors_in(made)]


@EACH_DEVICE
@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_eager(name, device):
    """One graph serves every number of rows and returns eager's values, strides and given targets."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(calls()[name].function, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for m in (M, 3 * M, 5 * M):
        call, eager = on(device, name, m), on(device, name, m)
        made, wanted = fast(*call.arguments, **call.keywords), eager.function(*eager.arguments, **eager.keywords)
        assert_same(tensors_in(made), tensors_in(wanted))
        assert type(made) is type(wanted) and targets(made, call) == targets(wanted, eager)
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    ("device", "test"), [*(("cpu", test) for test in OPCHECKS), *map(of_gpu, (*OPCHECKS, "test_schema"))]
)
@pytest.mark.parametrize("name", ONE_OP)
def test_opcheck(name, device, test):
    """test_schema compares FP8 tensors, for which torch has no kernel on the CPU, and some releases none on a GPU."""
    try:
        torch.library.opcheck(*op_of(name, device), test_utils=test)
    except Exception as error:
        if test != "test_schema" or "not implemented for 'Float8_e4m3fn'" not in str(error):
            raise
        pytest.skip(f"test_schema compares FP8 tensors by what this torch lacks: {error}")


# ---- on the CPU


@pytest.mark.parametrize("name", ONE_OP)
def test_ops_write_to_their_targets_alone(name):
    op, arguments, keywords = op_of(name, "cpu")
    given = {argument.name: x for argument, x in zip(op._schema.arguments, arguments, strict=False)} | keywords
    written = {argument.name for argument in op._schema.arguments if argument.alias_info}
    for key in written:  # which a call has written to
        given[key].copy_(torch.zeros(given[key].shape))
    before = {key: x.clone() for key, x in given.items() if isinstance(x, torch.Tensor)}
    result = op(*arguments, **keywords)
    changed = {key for key, x in before.items() if not torch.equal(bits(x), bits(given[key]))}
    assert changed == written and (result is None) == bool(written)
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= {*op.tags}
    assert torch.Tag.cudagraph_unsafe not in op.tags


@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_kept_or_refused(name):
    """In forward-mode AD a result without a tangent is a constant."""
    call = on("cpu", name)
    wide = next((x for x in call.tensors if x.is_floating_point() and x.dtype != FP8), None)
    if wide is None:  # integers and codes have no derivatives
        return
    with forward_ad.dual_level():
        dual = call.made(lambda x: forward_ad.make_dual(x, torch.ones_like(x)) if x is wide else x)
        if name in ("dequantize", "interleave_gate_up"):
            assert all(forward_ad.unpack_dual(x).tangent is not None for x in dual())
            return
        with pytest.raises(RuntimeError, match=r"tangent of torch\.autograd\.forward_ad.*unpack_dual\(\w+\)\.primal"):
            dual()
        with torch.no_grad():
            assert_same(dual(), call())


TRANSFORMS = {
    "grad": torch.func.grad,
    "jvp": lambda loss: lambda x: torch.func.jvp(loss, (x,), (x,))[1],
    "grad of vmap": lambda loss: torch.func.grad(lambda x: torch.func.vmap(loss)(x[None]).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", ["gemm", "per_token_cast_to_fp8"])
def test_no_derivative_is_lost_in_compiled_code(call, transform):
    """An op would lose it, without a word."""
    others = (torch.randn(N, K).bfloat16(),) if call == "gemm" else ()

    def loss(x):
        made = getattr(deep_tile, call)(x * 1, *others)
        return (made if call == "gemm" else made[1]).sum()

    derivative, x = TRANSFORMS[transform](loss), torch.randn(M, K).bfloat16()
    for fullgraph in (False, True):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=f"torch.func .* differentiates {call}.*: call it outside .*no_grad"):
            torch.compile(lambda x: derivative(x), backend="eager", fullgraph=fullgraph)(x)
    torch._dynamo.reset()
    each = torch.compile(lambda x: torch.func.vmap(loss)(x), backend="eager")(x[None])  # differentiates nothing
    assert torch.equal(each[0], loss(x))


def test_a_gradient_of_a_constant_is_refused_within_a_transform():
    x, weight = torch.randn(M, K).bfloat16(), torch.nn.Parameter(torch.randn(N, K).bfloat16())
    with pytest.raises(RuntimeError, match="gemm has no gradient within a transform of torch.func: call it outside"):
        torch.func.grad(lambda y: (deep_tile.gemm(x, weight) * y).sum())(torch.ones(M, N))


@pytest.mark.parametrize("call", ["gemm", "per_token_cast_to_fp8"])
def test_ops_lose_no_tangent(call):
    op, x = getattr(torch.ops.deep_tile, call), torch.randn(M, K).bfloat16()
    others = (torch.randn(N, K).bfloat16(),) if call == "gemm" else ()
    with pytest.raises(RuntimeError, match=f"ops.deep_tile.{call} is called within torch.func.jvp .*no_grad"):
        torch.func.jvp(lambda x: op(x, *others), (x,), (x,))
    with FlopCounterMode(display=False), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"tangent of torch\.autograd\.forward_ad"):
            getattr(deep_tile, call)(dual, *others)


@pytest.mark.parametrize("name", CALLS)
def test_fakes_and_meta_tensors_give_layouts(name):
    """Layouts equal those of real tensors, also where real tensors are among fakes, if the mode takes these."""
    call, wanted = on("cpu", name), layouts(on("cpu", name)())
    meta = call.made(lambda x: x.to("meta"))()
    assert layouts(meta) == wanted and all(x.is_meta for x in meta)
    with FakeTensorMode() as mode:
        fake = call.made(mode.from_tensor)()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layouts(call()) == layouts(fake) == wanted


EMPTY_OR_SINGLE = {
    "combine": lambda m, k: (torch.zeros(3, k).bfloat16(), torch.ones(m, 2), torch.zeros(m, 2, dtype=torch.int32)),
    "dequantize": lambda m, k: (torch.zeros(m, k).to(FP8), torch.ones(m, -(-k // 128))),
    "silu_mul_cast_to_fp8": lambda m, k: (torch.zeros(m, 2 * k).bfloat16(),),
    "thin_gemm": lambda m, k: (torch.zeros(m, 8).bfloat16(), torch.zeros(k, 8)),
    "transpose_fp8": lambda m, k: (torch.zeros(m, k).to(FP8),),
    **{
        name: lambda m, k: (torch.zeros(m, k),)
        for name in (
            *("per_token_cast_to_fp8", "per_block_cast_to_fp8", "cast_both", "cast_both, blocks"),
            *("cast_weight", "transposed_cast_to_fp8"),
        )
    },
}
"""Arguments by the name of a function and one of its options."""


@pytest.mark.parametrize("name", EMPTY_OR_SINGLE)
def test_fakes_have_the_strides_of_empty_results_and_single_rows(name):
    name, _, option = name.partition(", ")
    call = partial(getattr(deep_tile, name), **({option: True} if option else {}))
    for shape in ((0, 0), (0, 2), (5, 0), (1, 2), (1, 1), (5, 1), (7, 33)):
        real = EMPTY_OR_SINGLE[name](*shape)
        with FakeTensorMode() as mode:
            fakes = tensors_in(call(*map(mode.from_tensor, real)))
        assert [(x.shape, x.stride()) for x in fakes] == [(x.shape, x.stride()) for x in tensors_in(call(*real))]


@pytest.mark.parametrize(
    "name", [name for name, call in calls().items() if call.flops is not None and name not in WITHOUT_FUNCTION]
)
def test_fakes_without_their_mode_are_refused(name):
    with pytest.raises(TypeError, match="is a FakeTensor, .* is taken within its mode"):
        on("cpu", name).made(FakeTensorMode().from_tensor)()


def _read_weight(weight: torch.Tensor, scale: torch.Tensor) -> list[object]:
    return [*deep_tile.read_weight({"weight_packed": weight, "weight_scale": scale}).values()]


VALUES = {
    "to_blocks": (deep_tile.to_blocks, lambda: (torch.zeros(16, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))),
    "pad_shard": (deep_tile.pad_shard, lambda: (torch.zeros(16, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))),
    "pack_weight": (deep_tile.pack_weight, lambda: (torch.zeros(16, 64).byte(), torch.ones(16, 4).byte())),
    "unpack_weight": (deep_tile.unpack_weight, lambda: (torch.zeros(16, 68).byte(), torch.ones(1, 1))),
    "read_weight": (_read_weight, lambda: (torch.zeros(16, 64).byte(), torch.ones(16, 4).byte())),
}
"""Calls that read the values of weights."""


@pytest.mark.parametrize("name", VALUES)
def test_what_reads_values_says_so_where_there_are_none(name):
    function, made = VALUES[name]
    refusal = f"{name} reads the values of its tensors, and .* has none: call it when the model is loaded"
    with FakeTensorMode(), pytest.raises(RuntimeError, match=refusal):
        function(*made())
    with pytest.raises(Exception, match=refusal):
        torch.compile(function, fullgraph=True, backend="eager")(*made())
    compiled = torch.compile(function, backend="eager")(*made())
    assert all(torch.equal(x, y) for x, y in zip(compiled[:2], function(*made())[:2], strict=True))


def test_plans_are_ops_too():
    a, a_scale, b, b_scale = calls()["fp8_gemm"].arguments
    planned, on_meta = deep_tile.prepare(a, a_scale, b, b_scale), [x.to("meta") for x in (a, a_scale, b, b_scale)]
    with Watching() as mode, FlopCounterMode(display=False) as counter:
        planned(a, a_scale)
    assert mode.seen == ["deep_tile.fp8_gemm.default"] and counter.get_total_flops() == 2 * M * N * K
    assert deep_tile.prepare(*on_meta)(*on_meta[:2]).shape == (M, N)


def test_gradients_are_counted():
    """Gradients of `gemm` by its op; of `fp8_linear` by torch's GEMMs, also if the forward pass was not watched."""
    _, (x, wide), *_ = calls()["gemm"]
    b, b_scale = calls()["fp8_gemm"].arguments[2:]
    wide = wide.clone().requires_grad_()
    for layer, products in ((lambda x: deep_tile.gemm(x, wide), 2), (lambda x: deep_tile.fp8_linear(x, b, b_scale), 1)):
        out = layer(x.clone().requires_grad_()).sum()
        with FlopCounterMode(display=False) as counter:
            out.backward()
        assert counter.get_total_flops() == products * 2 * M * N * K
    backward = ops.flop_formulas["fp8_linear_backward"]
    assert backward((M, N), None, (N, K), x_dtype=torch.bfloat16) == 2 * M * N * K
    assert backward((M, N), (M, K), (N, K)) == 2 * M * N * K


def test_gradients_that_an_op_would_lose_are_refused():
    """Transforms of torch.func bypass an op's autograd."""
    b, b_scale = calls()["fp8_gemm"].arguments[2:]

    def loss(x):
        return deep_tile.fp8_gemm(*deep_tile.per_token_cast_to_fp8(x), b, b_scale).sum()

    with pytest.raises(RuntimeError, match="grad.* differentiates this call.* Call outside"):
        make_fx(torch.func.grad(loss))(torch.randn(M, K))


def test_a_config_is_refused():
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="config cannot be given .* a dispatch mode"):
        deep_tile.fp8_gemm(*calls()["fp8_gemm"].arguments, config=GemmConfig(64, 64, 4))


def test_who_watches_is_asked_alike(monkeypatch):
    """One call of C answers, if torch has what it needs, else torch itself."""
    assert ops._watches is ops._launcher.is_watched
    monkeypatch.setattr(torch._C, "__file__", "/nowhere")
    assert ops._find_watch() is ops._is_watched
    seen, x = [], torch.ones(2)

    def ask(x):
        seen.append((ops._is_watched(), ops._launcher.is_watched()))
        return x + 1

    make_fx(ask)(x), make_fx(ask, pre_dispatch=True)(x), torch.jit.trace(ask, (x,), check_trace=False)
    with Watching():
        ask(x)
    ask(x)
    assert seen == [*[(True, True)] * 4, (False, False)]


def test_not_loaded_kernels_are_told_by_the_call():
    error = launches.NotLoaded("kernel", "fp8_gemm", ", or deep_tile.precompile,").of("fp8_linear")
    assert str(error).startswith("kernel is not loaded yet")
    assert str(error).endswith("call fp8_linear once with these shapes, or deep_tile.precompile, before the capture")
    assert str(pickle.loads(pickle.dumps(error)).of("gemm")) == str(error.of("gemm"))  # as from a worker of a pool


# ---- functions and their ops

ONLY_FUNCTION = {
    "config": "which no schema can name",
    "out": "an overload of its own",
    "scale_out": "likewise",
    "sqr_sum": "likewise",
    "offs": "bounds, of whichever kind `a` has",
    "counts": "likewise",
    "rows": "of per_token_cast_to_fp8, an op of its own",
}
ONLY_OP = {"bounds": "offs or counts"}
ANOTHER_FUNCTION = {"per_token_cast_rows_to_fp8": "per_token_cast_to_fp8"}
ONLY_ALLOCATING = {"scale_layout": "means nothing where a scale is given"}


@pytest.mark.parametrize("name", sorted({*discovery.OPS} - WITHOUT_FUNCTION))
def test_an_op_has_its_functions_arguments(name):
    """The defaults are equal. Documented exceptions are listed above."""
    function = inspect.signature(getattr(deep_tile, ANOTHER_FUNCTION.get(name, name))).parameters
    packet = getattr(OPS, name)
    for which in packet.overloads():
        arguments = {argument.name: argument for argument in getattr(packet, which)._schema.arguments}
        left_out = {*ONLY_FUNCTION} | ({*ONLY_ALLOCATING} if "scale_out" in arguments else set())
        assert function.keys() - arguments.keys() <= left_out
        assert arguments.keys() - function.keys() <= ONLY_OP.keys()
        for argument in arguments.values():
            if argument.has_default_value():
                wanted = function["counts" if argument.name == "bounds" else argument.name].default
                assert (argument.default_value, type(argument.default_value)) == (wanted, type(wanted)), argument.name
            else:
                required = function.get(argument.name, function.get("offs"))
                assert required.default in (inspect.Parameter.empty, None), argument.name


def test_every_op_is_listed_with_its_module():
    """A fresh process finds each op by its name."""
    code = "import torch, deep_tile\nfor name in {names}: print(*getattr(torch.ops.deep_tile, name).overloads())"
    names = sorted(discovery.OPS)
    run_python(code.format(names=names))
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        assert namespace != "deep_tile" or name in discovery.OPS or name.startswith("toy_")  # of toy_operation.py


@pytest.mark.about(*changes.OF_OPS)
@pytest.mark.parametrize(
    "first", ["torch", "deep_tile", "torch; torch.ops.deep_tile", "importlib.util; importlib.util.find_spec('torch')"]
)
def test_importing_deep_tile_is_enough(first):
    """Ops and their formulas are there, in whichever order the two are imported, at no cost before their use."""
    code = f"""
import sys
import {first}
import deep_tile
assert not [name for name in sys.modules if name.startswith("deep_tile.") and name != "deep_tile.discovery"]
import torch
assert not hasattr(torch.ops.deep_tile, "another")
assert "deep_tile.api" not in sys.modules and "fp8_gemm" in dir(torch.ops.deep_tile)
assert torch.ops.deep_tile.fp8_gemm.out and "deep_tile.linear" not in sys.modules
from torch.utils.flop_counter import flop_registry
assert torch.ops.deep_tile.fp8_linear in flop_registry
assert deep_tile.compat.deep_gemm.fp8_gemm_nt and deep_tile.integrations.transformers and deep_tile.nn.Linear
assert not [finder for finder in sys.meta_path if "deep_tile.discovery" in repr(finder)]
try:
    deep_tile.compat.another
except AttributeError as error:
    print(error)
"""
    assert run_python(code).stdout == "module 'deep_tile.compat' has no attribute 'another'\n"


# ---- gradients

OF_WEIGHTS = ("per_block_cast_to_fp8", "quantize_weight", "cast_weight")
"""Casts of weights, which have no gradient but take trained weights."""


@pytest.mark.parametrize(
    "name", [name for name in ONE_OP if not name.startswith(("gemm", "fp8_linear", "transpose", *OF_WEIGHTS))]
)
def test_no_gradient_is_dropped(name):
    """Each tensor, targets included, may require the gradient: by the function, its op, under a mode and with fakes."""
    op, arguments, keywords = op_of(name, "cpu")
    given = {argument.name: x for argument, x in zip(op._schema.arguments, arguments, strict=False)} | keywords
    for key, x in given.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
            with pytest.raises(RuntimeError, match=rf"(?s)^{key} requires a gradient, and .*(detach|[Tt]o train)"):
                op(**given)
            with Watching(), pytest.raises(RuntimeError, match=f"^{key} requires a gradient"):
                op(**given)
            with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=f"^{key} requires a gradient"):
                op(**pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
            with torch.no_grad():
                op(**given)
            x.requires_grad_(False)
    for at, x in enumerate(on("cpu", name).tensors):
        if x.is_floating_point():
            count = iter(range(99))
            call = on("cpu", name).made(lambda x, at=at, count=count: x.requires_grad_() if next(count) == at else x)
            with pytest.raises(RuntimeError, match="requires a gradient, and"):
                call()
            with torch.no_grad():
                call()


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_are_cast_without_a_gradient(name):
    call = on("cpu", name).made(torch.Tensor.requires_grad_)
    fast = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    for made in (call(), tensors_in(fast(*call.arguments, **call.keywords))):
        assert not any(x.requires_grad for x in made)
