"""Casts in a training step, each made once: for weights until their optimiser steps, for an input that layers share.

A forward pass casts its weight; a second one before the next step, as gradient accumulation and checkpointing have it,
finds the cast. Casts are kept for weights that a torch optimiser has stepped itself, until any optimiser steps: one of
master weights (apex, DeepSpeed, Megatron) then writes to the model's by `.data`, which no version counter shows. Other
weights are cast in every pass: weights gathered by FSDP; weights updated by a CUDA graph; all in the first step. A new
version or another memory counts as a change, too; `invalidate` is for what remains.
"""

import threading
import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from deep_tile import quantize, tensors, transposed
from deep_tile.both import CastWeight, cast_both, cast_weight
from deep_tile.train.recipe import Recipe


class _Kept(NamedTuple):
    """A cast, and what it holds for.

    Attributes:
        storage: the weight's. Its address stays taken while there is a reference, also where its memory is freed and
            taken again by another storage.
    """

    key: tuple
    storage: StorageWeakRef
    cast: CastWeight


_known = WeakIdKeyDictionary()
"""Weights that were cast, and whether an optimiser has stepped them; None for one that is never kept."""

_kept = WeakIdKeyDictionary()
"""Their casts."""

_hook = None


def cast_once(weight: torch.Tensor, recipe: Recipe) -> CastWeight:
    """`cast_weight`, or its result since the last step."""
    if not recipe.keep_weights or torch.compiler.is_compiling() or not weight.is_leaf:
        return cast_weight(weight.detach(), **recipe.cast)
    if _is_captured(weight):
        _known[weight] = None
        _kept.pop(weight, None)
    if not _may_keep(weight):
        return cast_weight(weight.detach(), **recipe.cast)
    kept, storage = _kept.get(weight), weight.untyped_storage()
    where = storage._cdata, weight.data_ptr(), weight.shape, weight.stride(), _stream(weight)
    key = (weight._version, *where, recipe.amax_floor, recipe.round_scale)
    if kept is not None and kept.key == key:
        return kept.cast
    made = cast_weight(weight.detach(), **recipe.cast)
    if not torch.is_inference_mode_enabled():  # no backward pass takes inference tensors
        _kept[weight] = _Kept(key, StorageWeakRef(storage), made)
    return made


def _may_keep(weight: torch.Tensor) -> bool:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)
    try:
        return bool(_known[weight])
    except KeyError:
        _known[weight] = False
        return False


def _after_step(optimizer: torch.optim.Optimizer, *_) -> None:
    """Drop all casts, since an optimiser may have stepped master weights. Casts of the stepped weights may be kept from
    now on."""
    if not _known:
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if _known.get(weight) is not None:
                _known[weight] = None if _is_captured(weight) else True
    _drop_weights()


def _drop_weights() -> None:
    for weight in _weights(_kept):
        _kept.pop(weight, None)


def _weights(table: WeakIdKeyDictionary) -> list[torch.Tensor]:
    """Weights in a table, which other threads write to; only a dict itself is listed at once."""
    return [weight for reference in list(table.data) if (weight := reference()) is not None]


def invalidate() -> None:
    """Drop all kept casts of weights and inputs, so that the next pass casts again; weights' are kept again after an
    optimiser's step.

    Call it after code that writes to `weight.data` between two passes of one step, to an input's `.data` between two
    layers that share it, or that writes a weight by its own kernels: none changes the tensor's version. In-place
    operations, load_state_dict and optimisers need no call, and neither do writes to `.data` between an optimiser's
    step and the next pass, such as weight averaging or clipping. Afterwards, no weight has a weak reference of this
    module, which torch.utils.swap_tensors refuses.
    """
    _drop_weights()
    for weight in _weights(_known):
        if _known.get(weight) is not None:
            _known.pop(weight, None)
    if _last.x is not None:
        _last.forget(_last.x)


def _is_captured(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, whose replays change x unnoticed."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream(x: torch.Tensor) -> int:
    """The stream for a cast of x; other streams do not wait for it."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


class _Last(threading.local):
    """This thread's last cast: layers that share an input are called in a row."""

    x: weakref.ref | None = None
    key: tuple = ()
    codes: tuple[torch.Tensor | None, ...] = ()

    def forget(self, x: weakref.ref) -> None:
        if self.x is x:
            self.x, self.codes = None, ()


_last = _Last()


def cast_shared(x: torch.Tensor, recipe: Recipe, *, along_tokens: bool) -> tuple[torch.Tensor | None, ...]:
    """`cast_both` for an input [..., k], or the previous call's result for the same tensor; without `along_tokens` the
    last two are None."""
    rows = quantize.as_matrix(x.detach())
    if torch.compiler.is_compiling() or not _may_share(x):
        return _cast_input(rows, recipe, along_tokens)
    key = (x._version, x.data_ptr(), x.shape, _stream(x), along_tokens, recipe)
    if _last.x is None or _last.x() is not x or _last.key != key:
        codes = _cast_input(rows, recipe, along_tokens)
        _last.x, _last.key, _last.codes = weakref.ref(x, _last.forget), key, codes
    return _last.codes


def is_cast(x: torch.Tensor) -> bool:
    """Whether the previous call cast the same tensor, so that `cast_shared` may find it. False under saved-tensor
    hooks: checkpointing recomputes in another order, and must save as many tensors as before."""
    is_found = _last.x is not None and _last.x() is x
    return is_found and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _may_share(x: torch.Tensor) -> bool:
    """Whether changes are detectable: only torch operations write to autograd's results, while NumPy, kernels and
    graphs may change other buffers unnoticed."""
    return type(x) is torch.Tensor and x.grad_fn is not None and not _is_captured(x)


def _cast_input(x: torch.Tensor, recipe: Recipe, along_tokens: bool) -> tuple[torch.Tensor | None, ...]:
    if along_tokens:
        return tuple(cast_both(x, blocks=recipe.wgrad == "fp8", **recipe.cast))
    return *quantize.per_token_cast_to_fp8(x, **recipe.cast), None, None


def cast_gradient(
    dy: torch.Tensor, recipe: Recipe, along_n: bool, along_tokens: bool
) -> tuple[torch.Tensor | None, ...]:
    """`cast_both` for a matrix; None for unwanted results."""
    dy = dy.detach()
    if along_n and along_tokens:
        return tuple(cast_both(dy, **recipe.cast))
    first = quantize.per_token_cast_to_fp8(dy, **recipe.cast) if along_n else (None, None)
    second = transposed.transposed_cast_to_fp8(dy, **recipe.cast) if along_tokens else (None, None)
    return *first, *second


def with_aligned_rows(codes: torch.Tensor | None) -> torch.Tensor | None:
    """Saved FP8 codes with aligned rows: saved-tensor hooks, e.g. for offloading, may return them dense."""
    if codes is None or torch.compiler.is_compiling() or codes.stride(-2) % tensors.ALIGNMENT_BYTES == 0:
        return codes
    return tensors.with_aligned_rows(codes)
