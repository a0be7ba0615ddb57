"""`torch.ops.deep_tile`: what torch.compile, torch.export, other tracers and modes see of the package's functions.

A function's module registers its op at the bottom, so importing the function is what makes the op exist. An eager call
never passes through an op, which would cost 3 us; where torch's calls are watched the function calls its op instead of
doing its work.
Invariant: an op's fake reads sizes, dtypes and devices only, and no size decides a branch of it, so that a graph holds
for every m.
"""

import ctypes
from collections.abc import Callable
from math import prod

import torch
from torch.compiler import is_dynamo_compiling

from deep_tile import _launcher

_LIBRARY = torch.library.Library("deep_tile", "FRAGMENT")

wrappers: frozenset[type] = frozenset()
"""Classes of tensors that ops take, because torch knows what is inside, and functions do not."""

flop_formulas: dict[str, Callable[..., int]] = {}
"""Of ops that multiply, by name: from the shapes of their arguments to operations, as torch's FlopCounterMode asks."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""Compilers keep the strides of the inputs: kernels read operands by TMA, which takes few others."""


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
            nothing, because functionalisation refuses ops that return what they were given; and such an argument may
            be passed by position, because torch.compile traces no keyword `out` that is a slice. It is defined after
            the op without overload, since torch takes the first that fits.
        implementation: what the op does; it is called with the caller's grad mode, and defaults may be left out.
        fake: the same without data, for tensors of which only the layout is known: allocates what the op returns, in
            its shapes and strides. Compared sizes go through `holds`.
        backward, setup_context: as for torch.library.register_autograd. Without them no result requires a gradient: an
            op that must not drop one refuses it, in its implementation and in its fake.
        flops: of an op that multiplies, and the same of its overloads: how many operations it takes, counted from its
            arguments with shapes for tensors.
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


def call_for(*classes: type) -> None:
    """Have `fp8_linear` call its op for inputs of these classes, also outside of tracing."""
    global wrappers
    wrappers |= {*classes}


def holds(condition: "bool | torch.SymBool | torch.Tensor") -> bool:
    """Whether sizes are as they must be; where only the values of a later run decide, that run is made to check."""
    if isinstance(condition, (bool, torch.Tensor)):  # of tensors by torch.jit.trace, whose sizes are
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import expect_true  # imports sympy, which tracers have anyway

    return expect_true(condition)


def product_flops(second: int) -> Callable[..., int]:
    """The formula of a product along the last dimension of an op's first argument, and of the argument `second` with
    one row per output column; of groups of rows with one such matrix each, of which a row meets one."""

    def count(*shapes, **_) -> int:
        return 2 * prod(shapes[0]) * shapes[second][-2]

    return count


def refuse_config(config: object) -> None:
    """Raise where a config is given to a call that becomes an op's, which no schema can name."""
    if config is not None:
        raise ValueError(
            "config cannot be given under torch.compile or torch.export, another tracer or a dispatch mode: leave it "
            "out, or call outside of them. What `deep-tile tune` found is chosen without it"
        )


# Who watches.

_WATCHING_KEYS = ("Python", "PreDispatch", "Tracer")
"""Dispatch keys that torch's calls pass under dispatch modes, those of export before dispatch, and torch.jit.trace."""


def _is_watched() -> bool:
    """What `_launcher.is_watched` answers, asked of torch one by one."""
    included = torch._C._dispatch_tls_is_dispatch_key_included
    return any(included(torch._C._parse_dispatch_key(key)) for key in _WATCHING_KEYS)


def _find_watch() -> Callable[[], bool]:
    """The fastest way to ask torch: one call of C, by the function of torch's that `_is_watched` ends in. Its name is
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
    """Whether a call of a function is to become one of its op: under torch.compile and torch.export, make_fx and
    torch.jit.trace, and under every dispatch mode, as FakeTensorMode, FlopCounterMode and selective checkpointing are.

    Inside of an op nobody watches. Takes as long as torch.compiler.is_compiling does, within 10 ns.

    Raises:
        RuntimeError: inside of torch.func.grad or its like, under a mode: an op would leave out a gradient.
    """
    return is_dynamo_compiling() or (_watches() and _passes_gradients())


def _passes_gradients() -> bool:
    """Raises where a transform of torch.func differentiates, which passes by what an op knows of gradients."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key().name in ("Grad", "Jvp"):
        raise RuntimeError(
            f"a transform of torch.func ({transform.key().name.lower()}) differentiates this call, under a mode or a "
            "tracer, and would find no gradient. Call outside of the transform"
        )
    return True
