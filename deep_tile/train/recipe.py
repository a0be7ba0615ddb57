"""How a linear layer is trained: the format of each of its three products."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deep_tile import quantize
from deep_tile.config import SCALE_BLOCK
from deep_tile.ops import SMALLEST_AMAX_FLOOR

DGRADS, WGRADS, ACTIVATIONS = ("fp8", "bf16"), ("fp8", "fp8_1x128", "bf16"), ("bf16", "fp8")


@dataclass(frozen=True)
class Recipe:
    """Formats of a layer's products, and how operands are quantised.

    Attributes:
        dgrad: "fp8", or "bf16": the gradient of the input is the product of dy and the weight, as they are given.
        wgrad: "fp8": of dy with one scale for each column and 128 tokens, and of x with one for 128 columns and 128
            tokens. "fp8_1x128": x has scales as dy has, as the DeepSeek-V3 report has them; the product takes 1.3 times
            as long, for an error that is smaller by 1 to 7 % (docs/training.md). "bf16": of dy and x, as they are
            given; x is then kept for it instead of its FP8 codes, which take half of the memory.
        round_scale: "none", or "pow2" for scales that are powers of two, as TransformerEngine's are; see
            `per_token_cast_to_fp8`.
        amax_floor: lower bound of a group's largest magnitude, in all casts. The default flushes no normal number.
        activations: "bf16", or "fp8": what `mlp` and `experts` keep of gates and ups, in half of the memory, for the
            backward pass alone, whose gradients have errors that are larger by a tenth (docs/training.md).
        recast: cast a weight again in the backward pass, instead of keeping its transpose, a byte per element, from the
            forward pass on. The other weights' memory is then free for activations.
        keep_weights: cast a weight once per step of its optimiser, not in every forward pass: it is kept, in both
            directions, from one step to the next. For weights alone that a torch.optim.Optimizer of this process steps
            itself, and outside of torch.compile and of CUDA graphs. Small layers, whose casts take less time than the
            host needs to look for them, cast in every pass.
    """

    dgrad: str = "fp8"
    wgrad: str = "fp8"
    round_scale: str = "none"
    amax_floor: float = SMALLEST_AMAX_FLOOR
    activations: str = "bf16"
    recast: bool = False
    keep_weights: bool = True

    def __post_init__(self) -> None:
        for name, known in (("dgrad", DGRADS), ("wgrad", WGRADS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        quantize.check_options(quantize.Options(SCALE_BLOCK, **self.cast))
        # To look up what is known of a recipe: fields are hashed by Python.
        object.__setattr__(self, "options", (self.dgrad, self.wgrad, self.recast, self.amax_floor, self.round_scale))

    @property
    def cast(self) -> dict[str, object]:
        """Keywords of casts."""
        return {"amax_floor": self.amax_floor, "round_scale": self.round_scale}


def require(recipe: object) -> None:
    """Raise TypeError where it is no `Recipe`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; it must be a deep_tile.train.Recipe")


def check_tensors(dtypes: Mapping[str, tuple[torch.dtype, ...]], **given: object) -> None:
    """Raise TypeError for what is no tensor of its dtypes, ValueError for one on another device than the first."""
    device = None
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in dtypes[name]:
            seen = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes[name])
            remedy = "; deep_tile.fp8_linear takes weights that are quantised" if name.startswith("weight") else ""
            raise TypeError(f"{name} is {seen}; it must be a tensor of {wanted}{remedy}")
        device = x.device if device is None else device
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} but {next(iter(given))} is on {device}; move it there")
