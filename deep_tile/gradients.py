"""Backward passes that are differentiable once: what else is asked of them is refused by name.

Called by modules with gradients of their own.
"""

from collections.abc import Callable
from functools import wraps

import torch

_TWICE = (
    b"gradients of deep_tile's layers have no derivatives: they are first-order. For a gradient penalty or a Hessian "
    b"leave the layers that it passes in BF16, by wanted= of deep_tile.train.convert"
)
"""Said where a gradient is differentiated. torch's type for such errors takes bytes."""


def once_differentiable(backward: Callable) -> Callable:
    """Decorate an autograd.Function's `backward`, which returns a tuple and may run with gradients enabled.

    Under create_graph=True each gradient raises where it is differentiated. torch's decorator of this name lets a
    gradient be a constant if no incoming one requires a gradient, so that a gradient penalty would train nothing; and
    it leads from a gradient to no incoming one, so that Hessian-vector products would be zero.
    """

    @wraps(backward)
    def run(ctx, *gradients):
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *gradients)
        try:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                made = backward(ctx, *gradients)
        except (RuntimeError, TypeError):
            if any("Batched" in str(torch._C._dispatch_keys(x)) for x in gradients):
                raise RuntimeError(
                    "deep_tile's gradients take one output gradient at a time: call torch.autograd.grad without "
                    "is_grads_batched, and torch.autograd.functional without vectorize"
                ) from None
            raise
        wanted = [None if x is None else x.detach().requires_grad_() for x in made]
        refused = torch._C._functions.DelayedError(_TWICE, len(wanted) + len(gradients))(*wanted, *gradients)
        return refused[: len(wanted)]

    return run
