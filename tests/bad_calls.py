"""Wrong calls, as data: each changes one argument of a call that is right, in a way that holds on any device.

Read by test_bad_calls.py, on the CPU and on a GPU, and by test_host_path.py behind a made-up driver. Invariant: the
error has the stated type, names the argument that is wrong, and says what to do.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from helpers import GuardedOut, make_operands
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_tile
from deep_tile import (
    GemmConfig,
    combine,
    dequantize,
    fp8_gemm,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    precompile,
    prepare,
    silu_mul_cast_to_fp8,
)

M, N, K = 5, 130, 300
FP8 = torch.float8_e4m3fn


class Good:
    """Arguments of right calls of every function, on one device. Tells whether targets are untouched."""

    def __init__(self, device: str = "cpu"):
        self.device = device
        self.operands = make_operands(M, N, K, device=device, seed=1)
        self.guarded = GuardedOut(M, N, device=device)
        self.x = torch.ones(M, K, device=device)
        self.quantised, self.scale = per_token_cast_to_fp8(self.x)
        self.rows, self.weights = torch.ones(7, N, device=device).bfloat16(), torch.ones(M, 2, device=device)
        self.index = torch.zeros(M, 2, dtype=torch.int64, device=device)
        self.offs = torch.tensor([2, M], dtype=torch.int32, device=device)
        self._cast_out = self.quantised.clone(), torch.full_like(self.scale, 7.0)
        self.weights_of_experts = torch.zeros(2, N, 304, device=device).to(FP8)[:, :, :K]
        self.gradients = torch.full((2, 64, 64), 7.0, device=device)

    def arguments(self, call: str) -> dict[str, Any]:
        """Keyword arguments of the function in CALLS."""
        gemm = {**self.operands._asdict(), "out": self.guarded.out}
        targets = dict(zip(("out", "scale_out"), self._cast_out, strict=True))
        b = self.weights_of_experts
        groups = gemm | {"b": b, "b_scale": torch.ones(2, 2, 3, device=self.device), "offs": self.offs}
        as_int8 = {name: self.operands._asdict()[name].view(torch.int8) for name in "ab"}
        tokens, of_tokens = torch.zeros(64, 256, device=self.device).to(FP8), torch.ones(64, 2, device=self.device)
        return {
            "scaled_gemm": gemm,
            "int8_gemm": gemm | as_int8,
            "gemm": {name: gemm[name].bfloat16()[:, :256].contiguous() for name in "ab"} | {"out": gemm["out"]},
            "fp8_gemm_cast": self.operands._asdict(),
            "fp8_linear": {"x": self.x, "b": gemm["b"], "b_scale": gemm["b_scale"], "out": None},
            "fp8_grouped_gemm": groups,
            "scaled_grouped_gemm": groups,
            "fp8_grouped_wgrad": {
                **{"dy": tokens, "dy_scale": of_tokens, "x": tokens, "x_scale": of_tokens},
                **{"offs": self.offs.clone().fill_(128), "out": self.gradients},
            },
            "transposed_cast_to_fp8": {"x": self.x},
            "cast_both": {"x": self.x},
            "cast_weight": {"w": self.x},
            "transpose_fp8": {"x": self.quantised},
            "sort_by_expert": {"chosen": self.index, "experts": 4},
            "Linear": {"in_features": 128, "out_features": 64},
            "replace_linears": {"model": torch.nn.Sequential(torch.nn.Linear(128, 64)).eval()},
            "precompile_model": {"model": None, "max_tokens": 8},
            "fp8_gemm": gemm,
            "prepare": gemm,
            "plan": {name: gemm[name] for name in ("a", "a_scale", "out")},
            "per_token_cast_to_fp8": {"x": self.x, **targets},
            "per_block_cast_to_fp8": {"w": self.x, "out": targets["out"], "scale_out": targets["scale_out"][:1]},
            "silu_mul_cast_to_fp8": {"gate_up": self.x.repeat(1, 2).bfloat16(), "offs": self.offs, **targets},
            "combine": {"x": self.rows, "weights": self.weights, "index": self.index, "out": self.guarded.out},
            "dequantize": {"x": self.quantised, "scale": self.scale},
            "precompile": {"shapes": [(N, K, M)]},
        }[call]

    def assert_untouched(self) -> None:
        self.guarded.assert_untouched()
        out, scale = self._cast_out
        assert torch.equal(out.view(torch.uint8), self.quantised.view(torch.uint8)) and (scale == 7).all()
        assert (self.gradients == 7).all()


CALLS: dict[str, Callable[[Good], Callable]] = {
    "fp8_gemm": lambda good: fp8_gemm,
    "prepare": lambda good: prepare,
    "plan": lambda good: prepare(*good.operands, good.guarded.out),
    "per_token_cast_to_fp8": lambda good: per_token_cast_to_fp8,
    "per_block_cast_to_fp8": lambda good: per_block_cast_to_fp8,
    "silu_mul_cast_to_fp8": lambda good: silu_mul_cast_to_fp8,
    "combine": lambda good: combine,
    "dequantize": lambda good: dequantize,
    "precompile": lambda good: precompile,
    "Linear": lambda good: deep_tile.nn.Linear,
    "replace_linears": lambda good: deep_tile.nn.replace_linears,
    "precompile_model": lambda good: deep_tile.nn.precompile_model,
    **{
        name: lambda good, name=name: getattr(deep_tile, name)
        for name in (
            *("scaled_gemm", "int8_gemm", "gemm", "fp8_gemm_cast", "fp8_linear", "fp8_grouped_gemm"),
            *("scaled_grouped_gemm", "fp8_grouped_wgrad", "transposed_cast_to_fp8", "sort_by_expert"),
            *("cast_both", "cast_weight", "transpose_fp8"),
        )
    },
}

WITHOUT_GOOD_CALLS = ("precompile", "precompile_model")
"""Calls that take too long, if they are right, to be tried beside each wrong one."""


class BadCall(NamedTuple):
    """A call of CALLS with one argument changed.

    Attributes:
        call: a key of CALLS.
        argument: the argument that is wrong, and that the error must name.
        what: the fault, in words.
        change: a function from the right call's arguments, by name, to the changed ones.
        error: type of the error, and no other.
        seen, remedy: patterns that its text must hold: what was found, and what to do.
        needs: "kernel" where only a call that needs a kernel finds out, "gpu" where only one on a GPU does.
    """

    call: str
    argument: str
    what: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    error: type[Exception]
    seen: str
    remedy: str
    needs: str = ""

    @property
    def name(self) -> str:
        return f"{self.call}: {self.argument} {self.what}"

    def arguments(self, good: Good) -> dict[str, Any]:
        arguments = good.arguments(self.call)
        return arguments | self.change(arguments)


def _one(call, argument, what, change, error, seen, remedy, needs="") -> BadCall:
    """A bad call whose `change` is the wrong value itself, or a function of the right one."""

    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        return {argument: change(arguments[argument]) if callable(change) else change}

    return BadCall(call, argument, what, changed, error, seen, remedy, needs)


# ---- kinds of tensors that are more, or less, than memory


class Wrapper(torch.Tensor):
    """A tensor without memory that hands its operations on to another, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, cls) else x

        return function(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs or {}))


def batched(x: torch.Tensor) -> torch.Tensor:
    """`x` as a function sees it inside vmap."""
    leaked = []
    rows = torch.stack([x.contiguous().view(torch.uint8)] * 2).view(x.dtype)  # torch stacks no FP8
    torch.vmap(lambda row: leaked.append(row) or torch.zeros(1, device=x.device))(rows)
    return leaked[0]


def freed(x: torch.Tensor, first_byte: int = 0, left: float = 0) -> torch.Tensor:
    """Like `x`, but its storage keeps only the share `left`, as sharding frees weights between uses."""
    bytes_needed = (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.itemsize
    buffer = torch.zeros(first_byte + bytes_needed, dtype=torch.uint8, device=x.device)
    view = buffer[first_byte:].view(x.dtype).as_strided(x.shape, x.stride())
    buffer.untyped_storage().resize_(int(left * len(buffer)))
    return view


# fmt: off
KINDS = {
    "negated": (torch._neg_view, TypeError, "a view that torch negates", r"{}\.resolve_neg\(\)"),
    "a wrapper": (Wrapper, TypeError, "a Wrapper, whose operations run in Python", r"{}\.to_local\(\)"),
    "fake": (FakeTensorMode().from_tensor, TypeError, "a FakeTensor, whose operations run in Python", "plain tensor"),
    "functional": (torch._to_functional_tensor, TypeError, "inside a transform of torch.func", "Call outside"),
    "batched": (batched, TypeError, "inside a transform of torch.func", "Call outside"),
    "a zero tensor": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device), TypeError,
                      "zeros that has no memory", r"{}\.clone\(\)"),
    "uninitialised": (lambda x: torch.nn.parameter.UninitializedParameter(device=x.device, dtype=x.dtype), TypeError,
                      "uninitialised parameter", "Materialise"),
    "without storage": (freed, ValueError, "storage, which holds 0", "pass another tensor"),
    "in freed storage": (lambda x: freed(x, 1 << 16), ValueError, "storage, which holds 0", "pass another tensor"),
    "in half its storage": (lambda x: freed(x, left=0.5), ValueError, r"storage, which holds \d+",
                            "pass another tensor"),
}
"""How to make each kind from a tensor, the error's type, what it reports as seen, and its remedy."""

FLOAT_KINDS = {
    "sparse": (torch.Tensor.to_sparse, TypeError, "of layout torch.sparse_coo", r"{}\.to_dense\(\)"),
    "compressed sparse": (torch.Tensor.to_sparse_csr, TypeError, "of layout torch.sparse_csr", r"{}\.to_dense\(\)"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), TypeError, "a nested tensor", r"{}\.unbind\(\)"),
    "conjugated": (lambda x: x.to(torch.complex64).conj(), TypeError, "torch conjugates", r"{}\.resolve_conj\(\)"),
    "a negated part": (lambda x: x.to(torch.complex64).conj().imag, TypeError, "torch negates", r"{}\.resolve_neg\(\)"),
}
"""Kinds that torch makes from FP32 tensors."""

# fmt: on

if hasattr(torch, "quantize_per_tensor"):  # which torch is about to drop
    FLOAT_KINDS["quantised by torch"] = (
        lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
        TypeError,
        "quantised by torch",
        r"{}\.dequantize\(\)",
    )


def _kinds(call: str, argument: str, kinds: dict[str, tuple]) -> list[BadCall]:
    return [
        _one(call, argument, f"is {what}", make, error, seen, remedy.format(argument))
        for what, (make, error, seen, remedy) in kinds.items()
    ]


READ_BY_TORCH = ("a wrapper", "fake", "functional", "batched")
"""Kinds that dequantize, which needs no kernel, takes."""
DENSE_KINDS = {what: kind for what, kind in KINDS.items() if what not in READ_BY_TORCH}

BOTH_WAYS = {"cast_both": "x", "cast_weight": "w", "transpose_fp8": "x"}

ODD_TENSORS = [
    *(bad for name in ("a", "a_scale", "b", "b_scale", "out") for bad in _kinds("fp8_gemm", name, KINDS)),
    *(bad for name in ("a_scale", "b_scale") for bad in _kinds("fp8_gemm", name, FLOAT_KINDS)),
    *(bad for name in ("a", "a_scale", "out") for bad in _kinds("plan", name, KINDS)),
    *(bad for name in ("b", "b_scale", "out") for bad in _kinds("prepare", name, KINDS)),
    *_kinds("prepare", "a_scale", FLOAT_KINDS),
    *(bad for name in ("x", "out", "scale_out") for bad in _kinds("per_token_cast_to_fp8", name, KINDS)),
    *(bad for name in ("w", "scale_out") for bad in _kinds("per_block_cast_to_fp8", name, KINDS)),
    *(bad for name in ("gate_up", "out", "scale_out") for bad in _kinds("silu_mul_cast_to_fp8", name, KINDS)),
    *(bad for name in ("x", "weights", "out") for bad in _kinds("combine", name, KINDS)),
    *_kinds("dequantize", "x", {what: kind for what, kind in DENSE_KINDS.items() if what != "uninitialised"}),
    *_kinds("dequantize", "scale", DENSE_KINDS),
    *(bad for call, name in BOTH_WAYS.items() for bad in _kinds(call, name, KINDS)),
    *(
        bad
        for call, name in (("cast_both", "x"), ("cast_weight", "w"))
        for bad in _kinds(call, name, {"sparse": FLOAT_KINDS["sparse"]})
    ),
]


# ---- what is no tensor, or the wrong one


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same layout, one byte past a multiple of 16."""
    buffer = torch.zeros(x.shape[0] * x.stride(0) + 64, dtype=torch.uint8, device=x.device).view(x.dtype)
    return buffer.as_strided(x.shape, x.stride(), 1 - buffer.data_ptr() % 16)


def with_strides(*strides: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def restrided(x: torch.Tensor) -> torch.Tensor:
        size = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        zeros = torch.zeros(size * x.itemsize, dtype=torch.uint8, device=x.device)
        return zeros.view(x.dtype).as_strided(x.shape, strides)

    return restrided


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.cpu()


PER_TOKEN, PER_BLOCK, ALLOCATE = "per_token_cast_to_fp8", "per_block_cast_to_fp8", "out=None"
gemm = "fp8_gemm"

# fmt: off
WRONG_TENSORS = [
    # No tensors.
    _one(gemm, "a", "is a list", [[1.0]], TypeError, "must be a torch.Tensor; got list", PER_TOKEN),
    _one(gemm, "a_scale", "is None", None, TypeError, "must be a torch.Tensor; got NoneType", PER_TOKEN),
    _one(gemm, "b", "is a number", 3, TypeError, "must be a torch.Tensor; got int", PER_BLOCK),
    _one(gemm, "b_scale", "is a tuple", (1.0,), TypeError, "must be a torch.Tensor; got tuple", PER_BLOCK),
    _one(gemm, "out", "is a string", "out", TypeError, "must be a torch.Tensor; got str", ALLOCATE),
    _one("plan", "a", "is None", None, TypeError, "must be a torch.Tensor; got NoneType", PER_TOKEN),
    _one("plan", "a_scale", "is a list", [1.0], TypeError, "must be a torch.Tensor; got list", PER_TOKEN),
    _one("prepare", "b", "is a list", [1.0], TypeError, "must be a torch.Tensor; got list", PER_BLOCK),
    # Dtypes.
    _one(gemm, "a", "is float32", torch.Tensor.float, TypeError, "float8_e4m3fn; got torch.float32", PER_TOKEN),
    _one(gemm, "b", "is bfloat16", torch.Tensor.bfloat16, TypeError, "float8_e4m3fn; got torch.bfloat16", PER_BLOCK),
    _one(gemm, "a_scale", "is float64", torch.Tensor.double, TypeError, "e8m0fnu; got torch.float64", r"\.float\(\)"),
    _one(gemm, "out", "is int16", lambda x: x.view(torch.int16), TypeError, "got torch.int16", ALLOCATE),
    _one("prepare", "a", "is float32", torch.Tensor.float, TypeError, "float8_e4m3fn; got torch.float32", PER_TOKEN),
    _one("plan", "a_scale", "is float64", torch.Tensor.double, ValueError, "is torch.float64", "prepare another plan"),
    _one("plan", "a", "is bytes", lambda x: x.view(torch.uint8), ValueError, "is torch.uint8", "prepare another plan"),
    # Gradients, which torch records here.
    *(
        _one(call, name, "requires a gradient", lambda x: x.detach().requires_grad_(), RuntimeError, "has none",
             rf"fp8_linear.*no_grad.*{name}\.detach\(\)")
        for call, names in ((gemm, ("a", "a_scale", "b", "b_scale", "out")), ("prepare", ("a", "b")),
                            ("plan", ("a_scale", "out")))
        for name in names
    ),
    # Devices.
    *(
        _one(gemm, name, "is on meta", on_meta, ValueError, "is on meta but a is on", r"\.to\(a\.device\)")
        for name in ("a_scale", "b", "b_scale", "out")
    ),
    *(
        _one(gemm, name, "is on the CPU", on_cpu, ValueError, "is on cpu but a is on", r"\.to\(a\.device\)", "gpu")
        for name in ("a_scale", "b", "b_scale", "out")
    ),
    _one("plan", "a_scale", "is on the CPU", on_cpu, ValueError, "on cpu; this plan", "prepare another plan", "gpu"),
    _one("plan", "a_scale", "is on meta", on_meta, ValueError, "on meta; this plan", "prepare another plan"),
    # Ranks and sizes.
    _one(gemm, "a", "has a batch", lambda x: x[None], ValueError, r"\[m, k\]; got \(1, 5, 300\)", "Flatten"),
    _one(gemm, "a", "is a vector", lambda x: x[0], ValueError, r"\[m, k\]; got \(300,\)", "Flatten"),
    _one(gemm, "b", "is a vector", lambda x: x[0], ValueError, r"\[n, k\]; got \(300,\)", "Flatten"),
    _one(gemm, "b", "has another k", lambda x: x[:, :256], ValueError, r"\(130, 256\): k differs", "one row per"),
    _one(gemm, "b", "is transposed", torch.Tensor.t, ValueError, r"\(300, 130\): k differs", r"pass.* b\.t\(\), which"),
    _one(gemm, "a_scale", "lacks a column", lambda x: x[:, :2], ValueError, r"\(5, 3\); got \(5, 2\)", PER_TOKEN),
    _one(gemm, "a_scale", "has one row", lambda x: x[:1], ValueError, r"= \(5, 3\); got \(1, 3\)", PER_TOKEN),
    _one(gemm, "a_scale", "is flat", torch.Tensor.flatten, ValueError, r"= \(5, 3\); got \(15,\)", PER_TOKEN),
    _one(gemm, "a_scale", "is transposed", torch.Tensor.t, ValueError, r"got \(3, 5\)", r"pass a_scale\.t\(\)"),
    _one(gemm, "b_scale", "is transposed", torch.Tensor.t, ValueError, r"got \(3, 2\)", r"pass b_scale\.t\(\)"),
    _one(
        gemm, "b_scale", "is per row", lambda x: torch.ones(N, 3, device=x.device), ValueError,
        r"\[ceil\(n / 128\), ceil\(k / 128\)\] = \(2, 3\); got \(130, 3\)",
        "scaled_gemm takes a scale for each 1x128 of b",
    ),
    _one(gemm, "out", "is too narrow", lambda x: x[:, :-1], ValueError, r"\(5, 130\); got \(5, 129\)", ALLOCATE),
    _one(gemm, "out", "is transposed", torch.Tensor.t, ValueError, r"got \(130, 5\)", ALLOCATE),
    _one("prepare", "a_scale", "is transposed", torch.Tensor.t, ValueError, "looks transposed", r"pass a_scale\.t\(\)"),
    _one("plan", "a", "has fewer rows", lambda x: x[:4], ValueError, r"is .*\[4, 300\]", "prepare another plan"),
    # Strides and addresses.
    _one(gemm, "a", "is M-major", lambda x: x.t().contiguous().t(), ValueError, r"\(1, 5\)", r"a\.contiguous\(\)"),
    _one(gemm, "b", "is N-major", lambda x: x.t().contiguous().t(), ValueError, r"\(1, 130\)", r"b\.contiguous\(\)"),
    _one(gemm, "a", "has rows of 300 bytes", torch.Tensor.contiguous, ValueError, "it is 300", r"\[rows, 304\]"),
    _one(gemm, "b", "has rows 312 bytes apart", with_strides(312, 1), ValueError, "it is 312", r"\[rows, 320\]"),
    _one(gemm, "a", "has rows that overlap", with_strides(288, 1), ValueError, "is 288 for k = 300", r"a\.contiguous"),
    _one(gemm, "b", "is one row", lambda x: x[:1].expand(N, K), ValueError, "row stride is 0", r"b\.contiguous"),
    _one(gemm, "a", "is not aligned", misaligned, ValueError, "1 bytes past", r"a\.clone\(\)"),
    _one(gemm, "b", "is not aligned", misaligned, ValueError, "1 bytes past", r"b\.clone\(\)"),
    _one("plan", "a", "is not aligned", misaligned, ValueError, "not aligned to 16 bytes", "prepare another plan"),
    _one(gemm, "out", "is N-major", with_strides(1, 5), ValueError, r"its strides are \(1, 5\)", "row-major out"),
    _one(gemm, "out", "has gaps", with_strides(260, 2), ValueError, r"its strides are \(260, 2\)", "row-major out"),
    _one(gemm, "out", "has rows that overlap", with_strides(129, 1), ValueError, "is 129 for 130 columns", "dense out"),
    _one(gemm, "out", "is one row", with_strides(0, 1), ValueError, "row stride is 0", "dense out"),
]

# ---- options

SPLIT = GemmConfig(128, 64, 4, split_k=2, tma_store=False)
FLAG = "pass True or False"

WRONG_OPTIONS = [
    *(
        _one(call, "num_sms", f"is {value!r}", value, TypeError, f"{re.escape(repr(value))}, of type", "pass an int")
        for call in ("fp8_gemm", "precompile")
        for value in (True, 4.0, np.int64(4), "all", [1])
    ),
    _one(gemm, "num_sms", "is 0", 0, ValueError, "num_sms is 0", "an int from 1"),
    _one(gemm, "num_sms", "is negative", -1, ValueError, "num_sms is -1", "an int from 1"),
    _one(gemm, "num_sms", "is too large", 10**6, ValueError, "num_sms is 1000000", r"to \d+, the SMs of cuda", "gpu"),
    _one("prepare", "num_sms", "is 0", 0, ValueError, "num_sms is 0", "an int from 1"),
    *(
        _one(gemm, name, f"is {value!r}", value, TypeError, f"is {value!r}, of type", FLAG)
        for name in ("batch_invariant", "constant_weights")
        for value in (None, 0, 1, "yes")
    ),
    _one("prepare", "batch_invariant", "is None", None, TypeError, "is None, of type NoneType", FLAG),
    *(
        _one(gemm, "pdl", f"is {value!r}", value, TypeError, f"is {value!r}, of type", "pass True, False or None")
        for value in (0, 1, "no")
    ),
    BadCall(
        gemm, "constant_weights", "without pdl", lambda given: {"pdl": False, "constant_weights": True},
        ValueError, "got pdl=False, num_sms=None", "pass pdl=True",
    ),
    BadCall(
        gemm, "constant_weights", "with num_sms", lambda given: {"num_sms": 7, "constant_weights": True},
        ValueError, "got pdl=None, num_sms=7", "pass pdl=True",
    ),
    _one(gemm, "out_dtype", "is float64", torch.float64, TypeError, "is torch.float64; pass one of", "or nothing"),
    _one(gemm, "out_dtype", "is not out's", torch.float16, TypeError, "out is torch.bfloat16", "leave out_dtype"),
    _one(gemm, "out_dtype", "is a string", "bf16", TypeError, "'bf16'; pass one of", "or nothing"),
    BadCall(
        gemm, "out_dtype", "is a string, for an out to be allocated",
        lambda given: {"out": None, "out_dtype": "bf16"}, TypeError, "'bf16'; pass one of", "or nothing",
    ),
    *(
        _one(gemm, "config", f"is a {kind}", value, TypeError, f"got {kind}", r"Pass GemmConfig\(")
        for kind, value in (("str", "fp8_gemm_128x128x128_s4_c1x1"), ("tuple", (64, 64, 4)), ("list", [128]))
    ),
    _one("prepare", "config", "is a list", [128], TypeError, "got list", "GemmConfig"),
    BadCall(
        gemm, "config", "splits K where rows must not depend on m",
        lambda given: {"config": SPLIT, "batch_invariant": True}, ValueError, "splits K", "split_k=1", "kernel",
    ),
    BadCall(
        gemm, "config", "has more blocks in a cluster than SMs are given",
        lambda given: {"config": SPLIT, "num_sms": 1}, ValueError, "needs 2 SMs", "without clusters", "kernel",
    ),
    _one(
        gemm, "config", "stores with TMA, which out does not allow", GemmConfig(64, 64, 4), ValueError,
        "stores with TMA", "tma_store=False", "kernel",
    ),
    _one(
        gemm, "config", "keeps b, which is too long", GemmConfig(64, 64, 4, tma_store=False, b_stages=2), ValueError,
        "k from 129 to 256", "b_stages=0", "kernel",
    ),
    _one("precompile", "batch_invariant", "is a string", "no", TypeError, "is 'no', of type str", FLAG),
    _one("precompile", "num_sms", "is negative", -1, ValueError, "num_sms is -1", "an int from 1"),
    _one("precompile", "workers", "is 0", 0, ValueError, "workers is 0", "a positive int"),
    _one("precompile", "workers", "is a float", 1.5, ValueError, "workers is 1.5", "a positive int"),
    _one("precompile", "shapes", "is one shape", (N, K, M), TypeError, "holds 130", r"\(\[\(n, k, max_m\)\]\)"),
    _one("precompile", "shapes", "is a number", 5, TypeError, "is 5", r"a list of \(n, k, max_m\)"),
    _one("precompile", "shapes", "lacks a size", [(N, K)], TypeError, r"holds \(130, 300\)", "three ints"),
    _one("precompile", "shapes", "holds a float", [(N, K, 8.0)], TypeError, r"holds \(130, 300, 8.0\)", "three ints"),
    *(
        BadCall(
            "precompile", "shape", f"is {shape}", lambda given, shape=shape: {"shapes": [shape]}, ValueError,
            re.escape(f"shape (n={shape[0]}, k={shape[1]}, max_m={shape[2]})"), "must be positive|run from 0",
        )
        for shape in ((0, 128, 8), (128, 0, 8), (128, 128, 0), (128, 128, -1), (2**31, 128, 8))
    ),
]

# ---- casts

NUMBER, FLOATS = "pass a number", "the cast takes a tensor of float64, float32, float16, bfloat16"
GATED = "the cast takes a tensor of bfloat16, float16$"

WRONG_CASTS = [
    *(
        bad
        for call, x in ((PER_TOKEN, "x"), (PER_BLOCK, "w"))
        for bad in (
            _one(call, x, "is a list", [[1.0]], TypeError, "is a <class 'list'>", FLOATS),
            _one(call, x, "is an integer", torch.Tensor.int, TypeError, "a tensor of int32", FLOATS),
            _one(call, x, "is FP8 already", lambda x: x.to(FP8), TypeError, "a tensor of float8_e4m3fn", FLOATS),
            _one(call, "amax_floor", "is negative", -1.0, ValueError, "amax_floor is -1.0", "at least 0 and finite"),
            _one(call, "amax_floor", "is infinite", float("inf"), ValueError, "is inf;", "at least 0 and finite"),
            _one(call, "amax_floor", "is infinite in float32", 1e39, ValueError, r"is 1e\+39", "in float32"),
            _one(call, "amax_floor", "is NaN", float("nan"), ValueError, "amax_floor is nan", "at least 0 and finite"),
            _one(call, "amax_floor", "is a string", "1e-4", TypeError, "amax_floor is '1e-4', a str", NUMBER),
            _one(call, "amax_floor", "is None", None, TypeError, "amax_floor is None", NUMBER),
            *(
                _one(call, option, f"is {value!r}", value, ValueError, re.escape(f"is {value!r}"), f"use {known}")
                for option, known in (("round_scale", "'none' or 'pow2'"), ("exact", "'divide' or 'reciprocal'"))
                for value in ("floor", True, None, ["pow2"])
            ),
            _one(call, "out", "is a number", 1.0, TypeError, "is a <class 'float'>", "a tensor of float8_e4m3fn"),
            _one(call, "out", "is float32", torch.Tensor.float, TypeError, "float32", "a tensor of float8_e4m3fn"),
            _one(call, "out", "lacks a row", lambda x: x[1:], ValueError, r"\[4, 300\]", r"must be \[5, 300\]"),
            _one(call, "out", "is transposed", with_strides(1, 5), ValueError, r"\(1, 5\)", "row-major out"),
            _one(call, "out", "is one row", lambda x: x[:1].expand(M, K), ValueError, r"\(0, 1\)", "not expanded"),
            _one(call, "out", "has rows that overlap", with_strides(299, 1), ValueError, r"\(299, 1\)", "contiguous"),
            _one(call, "out", "is on meta", on_meta, ValueError, "is on meta but the input is on", "allocate it there"),
            _one(call, "scale_out", "is float16", torch.Tensor.half, TypeError, "float16", "a tensor of float32"),
            _one(call, "scale_out", "is too narrow", lambda x: x[:, :2], ValueError, r", 2\]", r"must be \[\d, 3\]"),
            _one(
                call, "scale_out", "is one column", lambda x: x[:, :1].expand(x.shape), ValueError, "share memory",
                "not expanded",
            ),
        )
    ),
    *(
        bad
        for call, x in (("cast_both", "x"), ("cast_weight", "w"))
        for bad in (
            _one(call, x, "is a list", [[1.0]], TypeError, "is a <class 'list'>", FLOATS),
            _one(call, x, "is None", None, TypeError, "NoneType", FLOATS),
            _one(call, x, "is an integer", torch.Tensor.int, TypeError, "a tensor of int32", FLOATS),
            _one(call, x, "is FP8 already", lambda x: x.to(FP8), TypeError, "a tensor of float8_e4m3fn", FLOATS),
            _one(call, x, "is one row", lambda x: x[0], ValueError, r"\[300\]", "must be"),
            _one(call, x, "has two batches", lambda x: x[None, None], ValueError, r"\[1, 1, 5, 300\]", "it so"),
            _one(call, "amax_floor", "is negative", -1.0, ValueError, "amax_floor is -1.0", "at least 0 and finite"),
            _one(call, "amax_floor", "is True", True, TypeError, "amax_floor is True", NUMBER),
            _one(call, "round_scale", "is True", True, ValueError, "is True", "use 'none' or 'pow2'"),
            _one(call, "exact", "is unknown", "no", ValueError, "exact is 'no'", "use 'divide' or 'reciprocal'"),
        )
    ),
    _one("cast_both", "x", "has a batch", lambda x: x[None], ValueError, r"\[1, 5, 300\]", r"must be \[s, k\]"),
    _one("cast_both", "blocks", "is 1", 1, TypeError, "is 1, of type int", "pass True or False"),
    _one("cast_both", "alignment", "is a float", 128.0, ValueError, "is 128.0", "pass an int, a power of two"),
    _one("cast_both", "alignment", "is 64", 64, ValueError, "is 64", "power of two"),
    _one("cast_both", "x", "requires a gradient", lambda x: x.clone().requires_grad_(), RuntimeError,
         "x requires a gradient", r"torch\.no_grad\(\).*x\.detach\(\)"),
    BadCall("cast_both", "offs", "is int64", lambda given: {"offs": torch.tensor([3, 5], device=given["x"].device)},
            TypeError, "a tensor of int64", "tensor of int32 on"),
    BadCall("cast_both", "rows", "is float32", lambda given: {"rows": given["x"][0]}, TypeError, "a tensor of float32",
            "int32 or int64"),
    BadCall(
        "cast_both", "blocks", "is given together with groups",
        lambda given: {"blocks": True, "offs": torch.tensor([3, 5], device=given["x"].device).int()},
        ValueError, "given together with offs", "",
    ),
    _one("transpose_fp8", "x", "is a number", 1, TypeError, "is a .*int", "int8"),
    _one("transpose_fp8", "x", "is BF16", torch.Tensor.bfloat16, TypeError, "a tensor of bfloat16", "int8"),
    _one("transpose_fp8", "x", "is one row", lambda x: x[0], ValueError, r"\[300\]", "must be"),
    _one(
        PER_TOKEN, "x", "requires a gradient", lambda x: x.clone().requires_grad_(), RuntimeError,
        "x requires a gradient", r"fp8_linear.*torch\.no_grad\(\).*x\.detach\(\)",
    ),
    BadCall(
        PER_TOKEN, "out", "has leading dimensions that are no view of one",
        lambda given: {
            "x": given["x"][:4].unflatten(0, (2, 2)),
            "out": torch.zeros(2, 3, K, device=given["x"].device).to(FP8)[:, :2], "scale_out": None,
        }, ValueError, r"strides \(900, 300, 1\)", "contiguous one",
    ),
    BadCall(
        PER_TOKEN, "scale_out", "has leading dimensions that are no view of one",
        lambda given: {
            "x": given["x"][:4].unflatten(0, (2, 2)), "out": None,
            "scale_out": torch.zeros(2, 3, 3, device=given["x"].device)[:, :2],
        }, ValueError, r"strides \(9, 3, 1\)", "contiguous one",
    ),
    _one(PER_TOKEN, "x", "is a scalar", lambda x: x[0, 0], ValueError, r"has shape \[\]", r"x\.reshape\(1\)"),
    _one(PER_BLOCK, "w", "is a vector", lambda x: x[0], ValueError, r"shape \[300\]", "one matrix at a time"),
    _one(PER_BLOCK, "w", "has a batch", lambda x: x[None], ValueError, r"\[1, 5, 300\]", "one matrix at a time"),
    _one(PER_TOKEN, "scale_layout", "is unknown", "column", ValueError, "is 'column'", "'m_aligned'"),
    _one(PER_TOKEN, "scale_layout", "is a list", ["row"], ValueError, r"is \['row'\]", "'m_aligned'"),
    _one("dequantize", "x", "is float32", torch.Tensor.float, TypeError, "float32", "takes a float8_e4m3fn tensor"),
    _one("dequantize", "x", "is a scalar", lambda x: x[0, 0], ValueError, r"has shape \[\]", r"x\.reshape\(1\)"),
    BadCall(
        "dequantize", "x", "has a batch, for blocks of rows",
        lambda given: {"x": given["x"][None], "block": (128, 128)},
        ValueError, r"\[1, 5, 300\]", "one matrix at a time",
    ),
    _one("dequantize", "scale", "is None", None, TypeError, "NoneType", "takes a tensor of torch.float32"),
    _one("dequantize", "scale", "is transposed", torch.Tensor.t, ValueError, r"\[3, 5\]", r"with scale\.t\(\)"),
    *(
        _one("dequantize", "scale", f"is of {shape}", lambda x, shape=shape: x.new_ones(shape), ValueError,
             re.escape(f"shape {list(shape)}"), remedy)
        for shape, remedy in (((), r"x\.float\(\) \* scale$"), ((M,), r"x\.float\(\) \* scale\[\.\.\., None\]$"),
                              ((M, 1), r"x\.float\(\) \* scale$"), ((2,), "Pass the scale of these"))
    ),
    _one("dequantize", "scale", "is on meta", on_meta, ValueError, "is on meta but x is on", r"\.to\(x\.device\)"),
    _one("dequantize", "block", "is unknown", (1, 32), ValueError, r"is \(1, 32\)", r"use \(1, 128\)"),
]

# ---- casts of rows

SILU = "silu_mul_cast_to_fp8"


def _listed(argument, what, make, error, seen, remedy, needs="") -> BadCall:
    """A bad call of a cast with `make(three row numbers)` as this argument."""

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        numbers = torch.zeros(3, dtype=torch.int32, device=given["x"].device)
        return {argument: make(numbers), "out": None, "scale_out": None}

    return BadCall(PER_TOKEN, argument, what, changed, error, seen, remedy, needs)


def _as_groups(given: dict[str, Any], groups: int) -> dict[str, Any]:
    """Arguments without targets: `x` as `groups` groups of one row, with one count too few."""
    x = given["x"][:1].expand(groups, K)[:, None].contiguous()
    return {"x": x, "counts": torch.zeros(groups, dtype=torch.int32, device=x.device), "out": None, "scale_out": None}


WRONG_ROWS = [
    *(
        bad
        for argument, dtype in (("rows", "int32 or int64"), ("offs", "int32"), ("counts", "int32"))
        for bad in (
            _listed(argument, "is a list", torch.Tensor.tolist, TypeError, "is a <class 'list'>", f"of {dtype} on"),
            _listed(argument, "is float32", torch.Tensor.float, TypeError, "a tensor of float32", f"of {dtype} on"),
            _listed(argument, "is int8", torch.Tensor.char, TypeError, "a tensor of int8", f"of {dtype} on"),
            _listed(argument, "is a matrix", lambda x: x[None], ValueError, r"shape \[1, 3\]", r"\.flatten\(\)"),
            _listed(argument, "is on meta", on_meta, ValueError, "is on meta but the input is on", "move it there"),
            _listed(argument, "is on the CPU", on_cpu, ValueError, "on cpu but the input", "move it there", "gpu"),
        )
    ),
    _listed("offs", "is int64", torch.Tensor.long, TypeError, "a tensor of int64", "tensor of int32 on"),
    _listed("offs", "is empty", lambda x: x[:0], ValueError, r"shape \[0\]", "at least, so pass None"),
    _listed("counts", "is of a matrix", lambda x: x, ValueError, r"x has shape \[5, 300\]; with counts", "g, m, k"),
    *(
        _listed(argument, "is not dense", lambda x: x.repeat(2)[::2], ValueError, "stride 2", r"\.contiguous\(\)")
        for argument in ("rows", "offs")
    ),
    *(
        BadCall(
            PER_TOKEN, argument, "is given together with counts",
            lambda given, argument=argument: {
                name: torch.zeros(3, dtype=torch.int32, device=given["x"].device) for name in (argument, "counts")
            }, ValueError, "given together with counts", "pass one of them",
        )
        for argument in ("rows", "offs")
    ),
    BadCall(
        PER_TOKEN, "rows", "are of three dimensions",
        lambda given: {"x": given["x"][None], "rows": torch.zeros(3).long().to(given["x"].device), "out": None},
        ValueError, r"shape \[1, 5, 300\]", r"must be \[m, k\]",
    ),
    BadCall(
        PER_TOKEN, "counts", "are too few", lambda given: _as_groups(given, 3) | {"x": given["x"][:, None]},
        ValueError, r"shape \[3\]", r"must be \[g\]",
    ),
    BadCall(
        PER_TOKEN, "counts", "are too many", lambda given: _as_groups(given, 1025), ValueError, "1025 groups",
        "at most 1024",
    ),
    BadCall(
        PER_TOKEN, "out", "has the rows of x, not those of the index",
        lambda given: {"rows": torch.zeros(3).long().to(given["x"].device)},
        ValueError, r"\[5, 300\]", r"must be \[3, 300\]",
    ),
    _one(SILU, "gate_up", "is a list", [[1.0]], TypeError, "is a <class 'list'>", GATED),
    _one(SILU, "gate_up", "is float32", torch.Tensor.float, TypeError, "of float32", GATED),
    _one(SILU, "gate_up", "is FP8", lambda x: x.to(FP8), TypeError, "of float8_e4m3fn", GATED),
    _one(SILU, "gate_up", "has no halves", lambda x: x[:, 1:], ValueError, r"\[5, 599\]", "both halves"),
    _one(SILU, "gate_up", "is a scalar", lambda x: x[0, 0], ValueError, r"shape \[\]", r"gate_up\.reshape\(1\)"),
    _one(SILU, "gate_up", "has a batch", lambda x: x[None], ValueError, r"\[1, 5, 600\]; with offs", r"\.view\(\)"),
    _one(
        SILU, "gate_up", "requires a gradient", lambda x: x.clone().requires_grad_(), RuntimeError,
        "gate_up requires a gradient", r"torch\.no_grad\(\).*gate_up\.detach\(\)",
    ),
    _one(SILU, "offs", "is int64", torch.Tensor.long, TypeError, "a tensor of int64", "tensor of int32 on"),
    _one(SILU, "out", "is as wide as gate_up", lambda x: x.repeat(1, 2), ValueError, "600", r"must be \[5, 300\]"),
    _one(SILU, "scale_out", "is too narrow", lambda x: x[:, :2], ValueError, r"\[5, 2\]", r"must be \[5, 3\]"),
    *(
        _one(SILU, name, f"is {value!r}", value, TypeError, re.escape(f"{name} is {value!r}"), NUMBER)
        for name in ("limit", "alpha", "beta")
        for value in ("1", True, [1.0])
    ),
    *(_one(SILU, "limit", f"is {value}", value, ValueError, f"limit is {value}", "positive, or None")
      for value in (0, -1.5, float("nan"))),
    *(
        _one(SILU, name, f"is {value}", value, ValueError, re.escape(f"{name} is {value}"), "must be finite")
        for name in ("alpha", "beta")
        for value in (float("inf"), float("nan"), 1e39)
    ),
    _one(SILU, "amax_floor", "is negative", -1.0, ValueError, "amax_floor is -1.0", "at least 0 and finite"),
    _one("combine", "x", "is a list", [[1.0]], TypeError, "is a <class 'list'>", "a tensor of torch.bfloat16"),
    _one("combine", "x", "is float16", torch.Tensor.half, TypeError, "of torch.float16", r"bfloat16\. Convert"),
    _one("combine", "x", "is a vector", lambda x: x[0], ValueError, r"shape \[130\]", r"two dimensions, so \.view\(\)"),
    _one("combine", "x", "is column-major", lambda x: x.t().contiguous().t(), ValueError, r"\(1, 7\)", "contiguous"),
    _one("combine", "weights", "are None", None, TypeError, "NoneType", "torch.float32 or torch.bfloat16"),
    _one("combine", "weights", "are float64", torch.Tensor.double, TypeError, "of torch.float64", "torch.bfloat16"),
    _one("combine", "weights", "are transposed", torch.Tensor.t, ValueError, r"\[5, 2\] but weights \[2, 5\]", "top_k"),
    _one("combine", "index", "is None", None, TypeError, "NoneType", "torch.int32 or torch.int64"),
    _one("combine", "index", "is int16", torch.Tensor.short, TypeError, "of torch.int16", "torch.int32 or torch.int64"),
    _one("combine", "index", "is a vector", lambda x: x[0], ValueError, r"shape \[2\]", "two dimensions"),
    _one("combine", "out", "is float32", torch.Tensor.float, TypeError, "of torch.float32", "torch.bfloat16"),
    _one("combine", "out", "lacks a row", lambda x: x[1:], ValueError, r"\[4, 130\]", r"\[t, n\] = \[5, 130\]"),
    _one("combine", "out", "is column-major", with_strides(1, 5), ValueError, r"\(1, 5\)", "unit column stride"),
    _one("combine", "out", "has rows that overlap", with_strides(129, 1), ValueError, r"\(129, 1\)", "dense out"),
    _one("combine", "out", "is one row", lambda x: x[:1].expand(M, N), ValueError, r"\(0, 1\)", "dense out"),
    *(_one("combine", name, "is on meta", on_meta, ValueError, "is on meta but x is on", r"\.to\(x\.device\)")
      for name in ("weights", "index", "out")),
    *(
        _one("combine", name, "requires a gradient", lambda x: x.clone().requires_grad_(), RuntimeError,
             f"{name} requires a gradient", rf"{name}\.detach\(\)")
        for name in ("x", "weights")
    ),
    _one(SILU, "scale_layout", "is unknown", "column", ValueError, "is 'column'", "'m_aligned'"),
]
# fmt: on


# ---- what other libraries have otherwise

SCALED, GROUPED, SCALED_GROUPED, WGRAD = "scaled_gemm", "fp8_grouped_gemm", "scaled_grouped_gemm", "fp8_grouped_wgrad"
LINEAR = "fp8_linear"
OPERANDS_OF = {
    gemm: "ab",
    SCALED: "ab",
    "int8_gemm": "ab",
    "prepare": "ab",
    "fp8_gemm_cast": "ab",
    GROUPED: "ab",
    SCALED_GROUPED: "ab",
    "fp8_linear": "b",
    WGRAD: ("dy", "x"),
}
"""Names of operands that have scales, by call."""

UNPACKED = r"{}\.clone\(memory_format=torch\.contiguous_format\)\.view\(torch\.float8_e8m0fnu\)\[\.\.\., :ceil"


def viewed(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.view(dtype)


def _as_pairs(call: str, kind: type) -> BadCall:
    """Each operand and its scale come as one argument, as in DeepGEMM, and nothing takes the second's place."""
    first, second = OPERANDS_OF[call]

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        pairs = [kind((given[name], given[f"{name}_scale"])) for name in (first, second)]
        return {first: pairs[0], f"{first}_scale": pairs[1], second: None, f"{second}_scale": None}

    what, seen = f"and {second} are pairs, each a {kind.__name__}", f"must be a torch.Tensor; got {kind.__name__}"
    return BadCall(call, first, what, changed, TypeError, seen, rf"\*{first}.*compat\.deep_gemm")


# fmt: off
OF_OTHERS = [
    *(
        bad
        for call, names in OPERANDS_OF.items()
        for scale in (f"{name}_scale" for name in names)
        for bad in (
            _one(call, scale, "packs exponents into int32", torch.Tensor.int, TypeError, "e8m0fnu; got torch.int32",
                 UNPACKED.format(scale)),
            _one(call, scale, "is bytes", lambda x: x.to(torch.uint8), TypeError, "got torch.uint8",
                 rf"{scale}\.view\(torch\.float8_e8m0fnu\)$"),
        )
    ),
    _one(gemm, "a_scale", "is int64", torch.Tensor.long, TypeError, "got torch.int64", "that the operand was"),
    _one(gemm, "b_scale", "is FP8", lambda x: x.to(FP8), TypeError, "got torch.float8_e4m3fn", r"b_scale\.float\(\)"),
    *(
        bad
        for call, names in OPERANDS_OF.items() if call != "int8_gemm"
        for name in names
        for bad in (
            _one(call, name, "is bytes", viewed(torch.uint8), TypeError, "got torch.uint8",
                 rf"{name}\.view\(torch\.float8_e4m3fn\)"),
            _one(call, name, "is FP8 of AMD's", viewed(torch.float8_e4m3fnuz), TypeError, "got torch.float8_e4m3fnuz",
                 rf"{name}\.float\(\)\.to\(torch\.float8_e4m3fn\)"),
        )
    ),
    *(
        _one(call, "b", "is int8", viewed(torch.int8), TypeError, "got torch.int8",
             rf"{taker}.*b\.view\(torch\.float8_e4m3fn\)")
        for call, taker in (
            (gemm, f"deep_tile.{SCALED} takes"), (GROUPED, f"deep_tile.{SCALED_GROUPED} takes"), (SCALED, ""),
        )
    ),
    *(
        _one(call, name, "is e5m2", viewed(torch.float8_e5m2), TypeError, "got torch.float8_e5m2", f"deep_tile.{taker}")
        for call, taker in ((gemm, SCALED), ("prepare", SCALED), ("fp8_gemm_cast", SCALED), ("fp8_linear", SCALED),
                            (GROUPED, SCALED_GROUPED), (WGRAD, "fp8_wgrad"))
        for name in OPERANDS_OF[call]
    ),
    _one("gemm", "a", "is FP8", lambda x: x.to(FP8), TypeError, "got torch.float8_e4m3fn", "scaled_gemm takes"),
    _one("gemm", "a", "is bytes", lambda x: x.to(torch.uint8), TypeError, "got torch.uint8",
         r"a\.view\(torch\.float8_e4m3fn\) to deep_tile\.scaled_gemm; .* a\.view\(torch\.int8\)"),
    _one("int8_gemm", "a", "is bytes", viewed(torch.uint8), TypeError, "got torch.uint8", r"a\.view\(torch\.int8\)"),
    _one("int8_gemm", "a", "is FP8", viewed(FP8), TypeError, "got torch.float8_e4m3fn", "scaled_gemm takes"),
    BadCall("fp8_linear", "b", "is bytes, without a scale",
            lambda given: {"b": given["b"].view(torch.uint8), "b_scale": None}, TypeError, "got torch.uint8",
            r"b\.view\(torch\.float8_e4m3fn\)"),
    BadCall("fp8_linear", "x", "is a pair of bytes",
            lambda given: {"x": (given["b"].view(torch.uint8), given["b_scale"])}, TypeError,
            r"x\[0\] must be .* got torch.uint8", r"x\[0\]\.view\(torch\.float8_e4m3fn\)"),
    *(
        BadCall("fp8_linear", "a_scale", f"is of {shape} in a pair",
                lambda given, shape=shape: {"x": (given["b"][:M], given["b_scale"].new_ones(shape))}, ValueError,
                re.escape(f"got {shape}"), rf"scaled_gemm takes {taken}.*a_scale\.reshape\(-1, 1\)\.expand")
        for shape, taken in (((), "one number"), ((M,), "a scale for each row"))
    ),
    _one("fp8_linear", "x", "is FP8", lambda x: x.to(FP8), TypeError, "got torch.float8_e4m3fn",
         r"pair, \(x, x_scale\)"),
    _one("dequantize", "x", "is bytes", viewed(torch.uint8), TypeError, "uint8", r"x\.view\(torch\.float8_e4m3fn\)"),
    _one("dequantize", "scale", "is bytes", lambda x: x.to(torch.uint8), TypeError, "uint8",
         r"scale\.view\(torch\.float8_e8m0fnu\)"),
    # A linear layer.
    _one(LINEAR, "x", "is a list", [1], TypeError, "got list", "must be a torch.Tensor"),
    _one(LINEAR, "b", "is None", None, TypeError, "got NoneType", "must be a torch.Tensor"),
    _one(LINEAR, "x", "is float64", torch.Tensor.double, TypeError, "torch.float64", "torch.float16 or torch.float32"),
    _one(LINEAR, "x", "is a scalar", lambda x: x[0, 0], ValueError, r"\[\] and \[130, 300\]", r"must be \[\.\.\., k\]"),
    _one(LINEAR, "x", "has another k", lambda x: x[:, :256], ValueError, r"\[5, 256\] and \[130, 300\]", "must be"),
    _one(LINEAR, "x", "is on meta", on_meta, ValueError, "x is on meta", "b is on"),
    _one(LINEAR, "b", "is a vector", lambda x: x[0], ValueError, r"got \[5, 300\] and \[300\]", r"b \[n, k\]"),
    _one(LINEAR, "b", "is float32", torch.Tensor.float, TypeError, "got torch.float32", "must be torch.float8_e4m3fn"),
    _one(LINEAR, "b", "is on meta", on_meta, ValueError, "b is on meta", "x is on"),
    _one(LINEAR, "b_scale", "is float64", torch.Tensor.double, TypeError, "float64", "must be torch.float32"),
    _one(LINEAR, "b_scale", "lacks a row", lambda x: x[:1], ValueError, r"\(1, 3\)", "must have shape"),
    _one(LINEAR, "b_scale", "is missing", None, TypeError, "b is float8_e4m3fn", "Pass the scale"),
    *_kinds(LINEAR, "x", {"negated": KINDS["negated"], "sparse": FLOAT_KINDS["sparse"]}),
    *(
        BadCall(LINEAR, name, what, lambda given, name=name, make=make: {name: make(given["x"])}, error, seen, remedy)
        for name, what, make, error, seen, remedy in (
            ("bias", "is a row", lambda x: x.new_ones(1, N), ValueError, r"\[1, 130\]", r"must be \[n\]"),
            ("bias", "is float64", lambda x: x.new_ones(N).double(), ValueError, "float64", "bias of the same layer"),
            ("bias", "is a number", lambda x: 1.0, TypeError, "got float", "must be a torch.Tensor"),
            ("out", "is as wide as x", torch.clone, ValueError, r"got \[5, 300\]", r"must be \[5, 130\] of torch"),
            ("out", "is N-major", lambda x: x.new_zeros(N, M).t(), ValueError, "out", "Pass a row-major out"),
        )
    ),
    *(
        _one(LINEAR, name, f"is {value!r}", value, error, re.escape(f"{value!r}"), remedy)
        for name, value, error, remedy in (
            ("out_dtype", torch.float64, TypeError, "must be torch.bfloat16, torch.float16 or torch.float32"),
            *(("out_dtype", "bf16", TypeError, "or None for that of x"), ("amax_floor", "1", TypeError, NUMBER)),
            *(("amax_floor", -1.0, ValueError, "at least 0"), ("num_sms", 1.0, TypeError, "pass an int")),
            *(("num_sms", 0, ValueError, "an int from 1"), ("pdl", "no", TypeError, "True, False or None")),
            ("batch_invariant", None, TypeError, FLAG),
        )
    ),
    # Scales of tensors and of rows.
    *(
        _one(call, f"{name}_scale", f"is {what}", lambda x, shape=shape: x.new_ones(shape), ValueError,
             re.escape(f"got {shape}"), remedy)
        for call in (gemm, "prepare", "fp8_gemm_cast", "int8_gemm")
        for name, what, shape, remedy in (
            ("a", "one number", (), r"scaled_gemm takes one number.*a_scale\.reshape\(-1, 1\)\.expand\(5, 3\)"),
            ("a", "one number of two dimensions", (1, 1), "scaled_gemm takes one number"),
            ("a", "of rows", (M,), r"scaled_gemm takes a scale for each row.*\.expand\(5, 3\)"),
            ("a", "of rows, as a column", (M, 1), "scaled_gemm takes a scale for each row"),
            ("b", "one number in one dimension", (1,), r"one number.*b_scale\.reshape\(-1, 1\)\.expand\(2, 3\)"),
            ("b", "of rows", (N,), "scaled_gemm takes a scale for each row, where the other one is such or one.*r$"),
            ("b", "of rows, as a row", (1, N), "scaled_gemm takes a scale for each row"),
        )
    ),
    _one("fp8_linear", "b_scale", "is one number", lambda x: x.new_ones(()), ValueError, r"got \(\)", "expand"),
    _one("int8_gemm", "b_scale", "is of 1x128", lambda x: x.new_ones(N, 3), ValueError, r"got \(130, 3\)",
         "and 128x128 of b"),
    _one(SCALED, "b_scale", "is of rows, beside blocks", lambda x: x.new_ones(N), ValueError, r"got \(130,\)",
         r"b_scale\.reshape\(-1, 1\)\.expand\(130, 3\)"),
    *(
        _one(GROUPED, f"{name}_scale", f"is {what}", lambda x, shape=shape: x.new_ones(shape), ValueError,
             re.escape(f"got {list(shape)}"), remedy)
        for name, what, shape, remedy in (
            ("a", "one number", (1,), "scaled_grouped_gemm takes"), ("a", "of rows", (M,), "scaled_grouped_gemm takes"),
            ("b", "of groups", (2,), "scaled_grouped_gemm takes"),
            ("b", "of rows", (2, N), "scaled_grouped_gemm takes"),
            ("b", "of 1x128", (2, N, 3), "per_block_cast_to_fp8 casts each"),
            ("b", "transposed", (2, 3, 2), r"b_scale\.transpose\(-1, -2\)"),
        )
    ),
    # Pairs, and another order.
    *(_as_pairs(call, kind) for call in OPERANDS_OF if call != "fp8_linear" for kind in (tuple, list)),
    BadCall("fp8_linear", "b", "is a pair", lambda given: {"b": (given["b"], given["b_scale"]), "b_scale": None},
            TypeError, "got tuple", r"one by one, \*b"),
    *(
        BadCall(call, second, "comes before the first scale",
                lambda given, names=(first, second): {f"{names[0]}_scale": given[names[1]],
                                                      names[1]: given[f"{names[0]}_scale"]},
                TypeError, f"{first}_scale is torch.float8_e4m3fn and {second} is torch.float32", "in this order")
        for call in OPERANDS_OF if call not in ("fp8_linear", "int8_gemm")
        for first, second in [OPERANDS_OF[call]]
    ),
    # Transposed operands.
    _one(gemm, "b", "is [k, n] and dense", lambda x: x.t().contiguous(), ValueError, "k differs",
         r"b\.t\(\)\.contiguous"),
    _one(gemm, "a", "is [k, m]", torch.Tensor.t, ValueError, "k differs", r"\[k, m\] is passed as a\.t\(\)"),
    _one("gemm", "a", "is FP16, and b BF16", torch.Tensor.half, TypeError, "a is torch.float16", "b"),
    _one("gemm", "out", "is float64", torch.Tensor.double, TypeError, "got torch.float64", "one of torch.bfloat16"),
    _one(GROUPED, "offs", "is int64", torch.Tensor.long, TypeError, "got torch.int64", r"\.int\(\)"),
    _one("gemm", "b", "is [k, n]", torch.Tensor.t, ValueError, "k differs", r"b\.t\(\), which copies nothing"),
    # Bounds of groups.
    *(
        _one(call, "offs", f"is {what}", lambda x, ends=ends: x.new_tensor(ends), ValueError,
             rf"got \[{len(ends)}\]", remedy)
        for call in (GROUPED, SCALED_GROUPED)
        for what, ends, remedy in (
            ("led by a 0", [0, 2, M], r"no 0 before: pass offs\[1:\]"),
            ("the group of each row", [0, 0, 1, 1, 1], "m_indices .*compat.deep_gemm"),
            ("too long", [0, 1, 2, 3, 4, 5, 5], "row behind each group's last"),
        )
    ),
    _one(WGRAD, "offs", "is led by a 0", lambda x: x.new_tensor([0, 128, 256]), ValueError, r"got \[3\]",
         r"offs\[1:\]"),
    # Options that only equal right ones.
    *(
        _one(call, option, f"is {value!r}", value, error, re.escape(f"{option} is {value!r}"), remedy)
        for call, option, value, error, remedy in (
            *((call, "alignment", value, ValueError, "pass an int, a power of two")
              for call in (GROUPED, SCALED_GROUPED) for value in (True, 1.0)),
            *((call, "batch_invariant", 0, TypeError, FLAG)
              for call in (GROUPED, SCALED, "gemm", "fp8_linear", "fp8_gemm_cast")),
            *((SCALED_GROUPED, "fast_accum", value, TypeError, FLAG) for value in (1, 1.0)),
            (GROUPED, "constant_weights", 1, TypeError, FLAG),
            *((call, "accumulate", 0, TypeError, FLAG) for call in (SCALED, "gemm", "int8_gemm")),
            *((WGRAD, "accumulate", value, TypeError, FLAG) for value in (1, 1.0)),
            *((call, "alignment", value, ValueError, "pass an int, a power of two")
              for call, value in ((WGRAD, 128.0), ("transposed_cast_to_fp8", 128.0), ("sort_by_expert", True))),
            *((call, "amax_floor", True, TypeError, NUMBER)
              for call in ("fp8_linear", "fp8_gemm_cast", "transposed_cast_to_fp8")),
        )
    ),
    # Layers and their models.
    _one("Linear", "in_features", "is a string", "100", TypeError, "is '100', of type str", "pass an int"),
    _one("Linear", "out_features", "is a float", 2.0, TypeError, "is 2.0, of type float", "pass an int"),
    _one("Linear", "out_features", "is negative", -1, ValueError, "out_features is -1", "pass how many"),
    _one("replace_linears", "wanted", "is a name", "lm_head", TypeError, "is 'lm_head'", "lambda name, layer"),
    *(_one(call, "model", "is a name", "bert", TypeError, "is 'bert', a str", r"pass a torch\.nn\.Module")
      for call in ("replace_linears", "precompile_model")),
    _one("precompile", "kind", "is float32", torch.float32, ValueError, "is torch.float32", "are torch.float8_e4m3fn"),
    # Choices of experts.
    *_kinds("sort_by_expert", "chosen", {what: kind for what, kind in KINDS.items() if what != "uninitialised"}),
    _one("sort_by_expert", "experts", "is True", True, TypeError, "is True, of type bool", "how many"),
    _one("sort_by_expert", "experts", "is a float", 4.0, TypeError, "is 4.0, of type float", "how many"),
]
# fmt: on

BAD_CALLS: list[BadCall] = [*ODD_TENSORS, *WRONG_TENSORS, *WRONG_OPTIONS, *WRONG_CASTS, *WRONG_ROWS, *OF_OTHERS]
