"""How a linear layer is trained: the format of each GEMM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from deep_tile import quantize, tensors
from deep_tile.config import SCALE_BLOCK
from deep_tile.ops import SMALLEST_AMAX_FLOOR
from deep_tile.options import check_one

Found = TypeVar("Found")

_MOST_CHECKED = 4096

DGRADS, WGRADS, ACTIVATIONS = ("fp8", "bf16"), ("fp8", "fp8_1x128", "bf16"), ("bf16", "fp8")


class Held:
    """Hands a recipe to an autograd.Function. torch 2.10's Dynamo would rebuild a frozen dataclass argument with
    symbols for its numbers if sizes are dynamic."""

    def __init__(self, recipe: "Recipe") -> None:
        self.recipe = recipe


@dataclass(frozen=True)
class Recipe:
    """Formats for a layer's GEMMs, and quantisation options.

    Attributes:
        dgrad: "fp8", or "bf16" for the input's gradient from unquantised dy and weight.
        wgrad: "fp8": dy with one scale per column and 128 tokens, x with 128x128 scales. "fp8_1x128": x is scaled like
            dy, as in the DeepSeek-V3 report; the GEMM takes 1.3 times as long, and its error is smaller by 1 to 7 %
            (docs/training.md). "bf16": unquantised dy and x; x is then kept instead of its FP8 codes, which take half
            the memory.
        round_scale: "none", or "pow2" for power-of-two scales, as in TransformerEngine; see `per_token_cast_to_fp8`.
        amax_floor: lower bound for a group's largest magnitude, in all casts. With the default no normal number becomes
            zero.
        activations: format in which `mlp` and `experts` keep gate and up for the backward pass: "bf16", or "fp8" in
            half the memory, with gradient errors larger by a tenth (docs/training.md).
        recast: cast a weight again in the backward pass instead of keeping its transpose, which takes one byte per
            element.
        keep_weights: cast a weight once per optimiser step instead of in every forward pass; both directions are kept
            between steps. Only for weights that a torch.optim.Optimizer in this process steps itself, outside
            torch.compile and CUDA graphs. Small layers cast in every pass, which is faster than finding a kept cast.
            After writes to `weight.data` between two passes of a step, call `invalidate`.
    """

    dgrad: str = "fp8"
    wgrad: str = "fp8"
    round_scale: str = "none"
    amax_floor: float = SMALLEST_AMAX_FLOOR
    activations: str = "bf16"
    recast: bool = False
    keep_weights: bool = True

    def __post_init__(self) -> None:
        # Keywords for casts: a property would make a dict for each of a step's calls.
        object.__setattr__(self, "cast", {"amax_floor": self.amax_floor, "round_scale": self.round_scale})
        for name, known in (("dgrad", DGRADS), ("wgrad", WGRADS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        quantize.check_options(quantize.Options(SCALE_BLOCK, **self.cast))
        for name in ("recast", "keep_weights"):
            check_one(name, getattr(self, name))
        object.__setattr__(self, "held", Held(self))
        # A key: fields of a dataclass are hashed in Python.
        object.__setattr__(self, "options", (self.dgrad, self.wgrad, self.recast, self.amax_floor, self.round_scale))


def require(recipe: object) -> None:
    """Raise TypeError where it is no `Recipe`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; it must be a deep_tile.train.Recipe")


def checked_once(known: dict[tuple, Found], check: Callable[[], Found], recipe: Recipe, *given: object) -> Found:
    """`check`'s result for these tensors, cached by all properties that it reads except memory, which every launch
    checks. Takes 3 us instead of 20."""
    key = None
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
        try:
            key = (recipe.options, *[_properties(x) for x in given])
            if key in known:
                return known[key]
        except Exception:  # not a tensor: the checks name it
            key = None
    found = check()
    if key is not None:
        if len(known) >= _MOST_CHECKED:
            known.clear()
        known[key] = found
    return found


def _properties(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.dtype, x.shape, x.layout, x.get_device(), x.is_cpu)


def check_tensors(dtypes: Mapping[str, tuple[torch.dtype, ...]], **given: object) -> None:
    """Raise TypeError for a non-tensor, one that torch reads alone, or a wrong dtype; ValueError for a device that
    differs from the first's, or a tensor without memory; RuntimeError under torch.func."""
    remedy = "; deep_tile.fp8_linear takes weights that are quantised"
    tensors.require_dtypes(dtypes, {name: remedy for name in given if name.startswith("weight")}, **given)
    first = next(iter(given))
    for name, x in given.items():
        if x.device != given[first].device:
            raise ValueError(f"{name} is on {x.device} but {first} is on {given[first].device}; move it there")
    # Dynamo holds peek_interpreter_stack() for a constant; at a level it leaves the graph, and is refused outside.
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError("deep_tile.train does not run under transforms of torch.func; use torch.autograd")
    tensors.require_dense_in_eager(**given)
