"""`torch.ops.deep_tile`: what torch.compile, torch.export and other tracers see of the package's functions.

A function's module registers its op at the bottom, so importing the function is what makes the op exist. An eager call
never passes through an op, which would cost 3 us; under tracing the function calls its op instead of doing its work.
Invariant: an op's fake reads sizes, dtypes and devices only, and no size decides a branch of it, so that a graph holds
for every m.
"""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("deep_tile", "FRAGMENT")

wrappers: frozenset[type] = frozenset()
"""Classes of tensors that ops take, because torch knows what is inside, and functions do not."""

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""Compilers keep the strides of the inputs: kernels read operands by TMA, which takes few others."""


def register(
    schema: str,
    implementation: Callable,
    fake: Callable,
    *,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> None:
    """Define `torch.ops.deep_tile.NAME` for CPU and CUDA tensors.

    Args:
        schema: `NAME(...) -> ...` or `NAME.OVERLOAD(...) -> ...`. An overload that writes to an argument returns
            nothing, because functionalisation refuses ops that return what they were given; and such an argument may
            be passed by position, because torch.compile traces no keyword `out` that is a slice.
        implementation: what the op does; it is called with the caller's grad mode, and defaults may be left out.
        fake: the same without data, for tensors of which only the layout is known: allocates what the op returns, in
            its shapes and strides. Compared sizes go through `holds`.
        backward, setup_context: as for torch.library.register_autograd. Without them no result requires a gradient: an
            op that must not drop one refuses it, in its implementation and in its fake.
    """
    name = schema.partition("(")[0]
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


def holds(condition: "bool | torch.SymBool") -> bool:
    """Whether sizes are as they must be; where only the values of a later run decide, that run is made to check."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import expect_true  # imports sympy, which tracers have anyway

    return expect_true(condition)
