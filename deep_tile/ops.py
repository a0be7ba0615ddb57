"""`torch.ops.deep_tile`: the package's functions as torch.compile, torch.export, other tracers and modes see them.

A function's module registers its op at the bottom, so importing the function creates the op. An eager call bypasses the
op, which would cost 3 us; under tracers and modes the function calls its op instead of doing its work. Invariant: an
op's fake reads sizes, dtypes and devices only and branches on no size, so one graph serves every m.
"""

import ctypes
from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch.compiler import is_dynamo_compiling

from deep_tile import _launcher

_LIBRARY = torch.library.Library("deep_tile", "FRAGMENT")

wrappers: frozenset[type] = frozenset()
"""Tensor classes that ops accept, because torch unwraps them, and functions do not."""

flop_formulas: dict[str, Callable[..., int]] = {}
"""FLOP formulas of GEMM ops, by name: functions of argument shapes, for torch's FlopCounterMode."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""Compilers must keep input strides: TMA takes few others."""


def register(
    schema: str,
    implementation: Callable,
    fake: Callable,
    *,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    """Define `torch.ops.deep_tile.NAME` for CPU and CUDA tensors.

    Args:
        schema: `NAME(...) -> ...` or `NAME.OVERLOAD(...) -> ...`. An overload that writes to an argument returns
            nothing, because functionalisation refuses ops that return an input; and such an argument may be passed by
            position, because torch.compile traces no keyword `out` that is a slice. It is defined after the op without
            overload, since torch takes the first that fits.
        implementation: called with the caller's grad mode; defaults may be left out.
        fake: the same without data: allocates results with the right shapes and strides. Compared sizes go through
            `holds`.
        backward, setup_context: as for torch.library.register_autograd. Without them no result requires a gradient: an
            op that must not drop one refuses it, in its implementation and in its fake.
        flops: of a GEMM, from the arguments with shapes in place of tensors.
    """
    name = schema.partition("(")[0]
    if flops is not None:
        flop_formulas[name.partition(".")[0]] = flops
    _LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"deep_tile::{name}", fake, lib=_LIBRARY)
    if backward is None:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    else:
        torch.library.register_autograd(f"deep_tile::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


SMALLEST_AMAX_FLOOR = torch.finfo(torch.float8_e4m3fn).max * 2.0**-126
"""About 5.3e-36: it gives an all-zero group the scale 2**-126, FP32's smallest normal number, whose reciprocal is also
normal. No normal FP32 number is lost."""

DEFAULT_SCALE_LAYOUT = "m_aligned"
"""The default in `options.SCALE_LAYOUTS`. GEMMs read it fastest; row-major is within 2 % if the K block count is a
multiple of four; other layouts cost up to 19 % above m = 128 (H200, 2026-11-24)."""

OPTIONS: dict[str, tuple[str, object]] = {
    "accumulate": ("bool", False),
    "activation": ("str?", None),
    "alignment": ("int", 1),
    "alpha": ("float", 1.0),
    "amax_floor": ("float", SMALLEST_AMAX_FLOOR),
    "batch_invariant": ("bool", False),
    "blocks": ("bool", False),
    "beta": ("float", 0.0),
    "clean": ("bool", False),
    "columns": ("SymInt?", None),
    "constant_weights": ("bool", False),
    "counts": ("Tensor?", None),
    "epsilon": ("float", ...),
    "exact": ("str", "divide"),
    "expected_rows": ("int?", None),
    "expected_tokens": ("int?", None),
    "experts": ("int", ...),
    "fast_accum": ("bool", True),
    "gate_up_scale": ("Tensor?", None),
    "limit": ("float?", None),
    "num_sms": ("int?", None),
    "num_splits": ("int?", None),
    "offs": ("Tensor?", None),
    "out_dtype": ("ScalarType?", None),
    "pdl": ("bool?", None),
    "round_scale": ("str", "none"),
    "rows": ("Tensor?", None),
    "scale_layout": ("str", DEFAULT_SCALE_LAYOUT),
    "share": ("Tensor?", None),
    "terms": ("int", 3),
}
"""Type and default of every keyword that ops take, as functions do; without a default `...`. No schema can name a
config."""


class Op:
    """An op and its overload `out`, both from one description.

    Args:
        name: its function's.
        tensors: their names, in the overload's order. One with "!" is written to, and allocated by the op without
            overload; one with "?" may be None.
        options: names in `OPTIONS`.
        run: `run(inputs, outs, options)` does the work. Missing tensors are None; options are the non-default ones.
        check: the checks that need no memory, for fake tensors. Compared sizes go through `holds`.
        allocate: `allocate(inputs, options)` makes outputs with their shapes and strides.
        own: options that the overload has not.
        defaults: option defaults that differ from `OPTIONS`.
        allocates: whether there is an op that allocates.
        overload: the name of the one that writes; "" where the op itself does, None where none does.
        by_position: options may be given so, too.
        flops, gradient: as for `register`; the gradient belongs to the op without overload.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        options: str,
        run: Callable,
        check: Callable,
        allocate: Callable | None = None,
        *,
        own: str = "",
        defaults: Mapping[str, object] = MappingProxyType({}),
        allocates: bool = True,
        overload: str | None = "out",
        by_position: bool = False,
        flops: Callable[..., int] | None = None,
        **gradient: Callable,
    ) -> None:
        self.name, self._tensors, self._allocates, self._overload = name, tuple(tensors.split()), allocates, overload
        self._by_position = by_position
        self._outs = tuple(i for i, tensor in enumerate(self._tensors) if tensor.endswith("!"))
        self._inputs = tuple(i for i in range(len(self._tensors)) if i not in self._outs)
        self._options, self._own, self._defaults = (*options.split(),), (*own.split(),), defaults
        self._run, self._check, self._allocate = run, check, allocate
        if allocates:
            register(self._schema(False), self._made, self._fake_made, flops=flops, **gradient)
        if overload is not None:
            register(self._schema(True), self._written, self._fake_written, flops=flops)

    def __call__(self, inputs: tuple, outs: tuple, options: tuple | dict) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The op's call under tracing; the overload's if outputs are given. `options`: a NamedTuple with all, perhaps a
        config, or a dict of keywords."""
        if not isinstance(options, dict):
            refuse_config(getattr(options, "config", None))
            options = {name: getattr(options, name) for name in self._options}
        op, inputs = getattr(torch.ops.deep_tile, self.name), _filled(inputs, self._inputs)
        if self._allocates and all(out is None for out in outs):
            return op(*inputs, **options)
        if any(out is None for out in outs):
            made = self._allocate(inputs, {**options})
            outs = tuple(new if out is None else out for out, new in zip(outs, made, strict=True))
        given = dict(zip((*self._inputs, *self._outs), (*inputs, *outs), strict=True))
        options = {name: value for name, value in options.items() if name not in self._own}
        (getattr(op, self._overload) if self._overload else op)(*(given[i] for i in range(len(given))), **options)
        return outs[0] if len(outs) == 1 else outs

    def _made(self, *given, **options):
        return self._run(*self._own_parts(given, options), options)

    def _fake_made(self, *given, **options):
        inputs, _ = self._own_parts(given, options)
        self._check(inputs, (None,) * len(self._outs), {**options})
        return self._allocate(inputs, options)

    def _own_parts(self, given: tuple, options: dict) -> tuple[tuple, tuple]:
        """Inputs, and what is not there yet; options that are given by position join the others."""
        options.update(zip(self._options, given[len(self._inputs) :], strict=False))
        return _filled(given[: len(self._inputs)], self._inputs), (None,) * len(self._outs)

    def _written(self, *given, **options) -> None:
        self._run(*self._parts(given), options)

    def _fake_written(self, *given, **options) -> None:
        self._check(*self._parts(given), options)

    def _parts(self, given: tuple) -> tuple[tuple, tuple]:
        given = _filled(given, self._tensors)
        return tuple(given[i] for i in self._inputs), tuple(given[i] for i in self._outs)

    def _schema(self, writes: bool) -> str:
        last_out = self._outs[-1] if writes else -1
        places = range(len(self._tensors)) if writes else self._inputs
        tensors = [self._tensor(place, is_followed=place < last_out) for place in places]
        options = keywords(" ".join((*(() if writes else self._own), *self._options)), self._defaults)
        results = "()" if writes else "Tensor"
        if len(self._outs) > 1 and not writes:
            results = f"({', '.join(['Tensor'] * len(self._outs))})"
        options = [*(() if self._by_position else ["*"]), options] if options else []
        name = f"{self.name}.{self._overload}" if writes and self._overload else self.name
        return f"{name}({', '.join([*tensors, *options])}) -> {results}"

    def _tensor(self, place: int, is_followed: bool) -> str:
        """One argument; `is_followed` by one that must be given."""
        name, mark = self._tensors[place].rstrip("!?"), self._tensors[place][-1]
        if mark == "!":
            return f"Tensor({'ab'[self._outs.index(place)]}!) {name}"
        if mark == "?":
            return f"Tensor? {name}" if is_followed else f"Tensor? {name}=None"
        return f"Tensor {name}"


def _filled(given: tuple, places: tuple) -> tuple:
    """Restores trailing None arguments that were left out."""
    return (*given, *(None,) * (len(places) - len(given)))


def keywords(options: str, defaults: Mapping[str, object] = MappingProxyType({})) -> str:
    """A schema's keywords, from names in `OPTIONS`."""
    described = []
    for name in options.split():
        kind, default = OPTIONS[name]
        default = defaults.get(name, default)
        quoted = f'"{default}"' if isinstance(default, str) else default
        described.append(f"{kind} {name}" + ("" if default is ... else f"={quoted}"))
    return ", ".join(described)


def call_for(*classes: type) -> None:
    """Have `fp8_linear` call its op for inputs in these classes, also outside tracing."""
    global wrappers
    wrappers |= {*classes}


def holds(condition: "bool | torch.SymBool | torch.Tensor") -> bool:
    """Whether a condition on sizes holds; a condition on later values becomes a check in the traced graph."""
    if isinstance(condition, (bool, torch.Tensor)):  # torch.jit.trace has tensors as sizes
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import expect_true  # imports sympy, which tracers have loaded anyway

    return expect_true(condition)


def product_flops(second: int) -> Callable[..., int]:
    """FLOP formula for a GEMM over the last dimension of the op's first argument; argument `second` has one row per
    output column, or one such matrix per row group, of which a row meets one."""

    def count(*shapes, **_) -> int:
        return 2 * prod(shapes[0]) * shapes[second][-2]

    return count


def refuse_config(config: object) -> None:
    """Raise if a traced call has a config, which no schema can express."""
    if config is not None:
        raise ValueError(
            "config cannot be given under torch.compile or torch.export, another tracer or a dispatch mode: leave it "
            "out, or call outside of them. Results of `deep-tile tune` are used without it"
        )


# Who watches.

_WATCHING_KEYS = ("Python", "PreDispatch", "Tracer")
"""Dispatch keys active under dispatch modes, pre-dispatch export and torch.jit.trace."""


def _is_watched() -> bool:
    """`_launcher.is_watched` in Python, key by key."""
    included = torch._C._dispatch_tls_is_dispatch_key_included
    return any(included(torch._C._parse_dispatch_key(key)) for key in _WATCHING_KEYS)


def _find_watch() -> Callable[[], bool]:
    """The fastest check: one C call to the torch function that `_is_watched` ends in. Its name is
    torch's private matter, so it is tried, and done without where it is not as expected."""
    try:
        ask = ctypes.CDLL(torch._C.__file__)._ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE
        keys = [torch._C._parse_dispatch_key(key) for key in _WATCHING_KEYS]
        _launcher.watch_keys(ctypes.cast(ask, ctypes.c_void_p).value, *map(int, keys))
        answers = [_launcher.is_watched() == _is_watched()]
        for key in keys:
            with torch._C._IncludeDispatchKeyGuard(key):
                answers.append(_launcher.is_watched())
    except (AttributeError, OSError):
        return _is_watched
    return _launcher.is_watched if all(answers) else _is_watched


_watches = _find_watch()


def is_traced() -> bool:
    """Whether a function must call its op: under torch.compile, torch.export, make_fx and torch.jit.trace, and under
    every dispatch mode (FakeTensorMode, FlopCounterMode, selective checkpointing).

    False inside an op. Takes as long as torch.compiler.is_compiling does, within 10 ns.

    Raises:
        RuntimeError: inside torch.func.grad or similar, under a mode: an op would drop a gradient.
    """
    return is_dynamo_compiling() or (_watches() and _passes_gradients())


def is_in_mode() -> bool:
    """Whether a dispatch mode sees ops in eager mode. What one op has made no other then writes to: selective
    checkpointing skips an op whose result it has kept, and with it what the op would write."""
    return not torch.compiler.is_compiling() and _watches()


def _passes_gradients() -> bool:
    """Raises under a differentiating torch.func transform, which bypasses an op's gradient."""
    transform = _differentiating_transform()
    if transform:
        raise RuntimeError(
            f"a transform of torch.func ({transform}) differentiates this call, under a mode or a "
            "tracer, and this call has no gradient for it. Call outside of the transform"
        )
    return True


def passes_gradients(called: str) -> bool:
    """The same for Dynamo, which runs this as it traces, so that an error ends the compilation. After one in traced
    code it would go on frame by frame, some of which it cannot compile within a transform."""
    transform = _differentiating_transform()
    if transform:
        raise RuntimeError(
            f"a transform of torch.func ({transform}) differentiates {called}, which has no gradient for it: call it "
            "outside of the transform, or within torch.no_grad()"
        )
    return True


passes_gradients._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, without importing Dynamo


def _differentiating_transform() -> str:
    """The innermost transform of torch.func that differentiates, by name; "" outside of them."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    names = [transform.key().name.lower() for transform in transforms]
    return next((name for name in reversed(names) if name in ("grad", "jvp")), "")
