"""DeepGEMM's argument conventions: pairs, recipes, group lengths, accumulation; and their checks.

Launches nothing except the copy of an accumulation operand.
"""

from collections.abc import Callable

import torch

from deep_tile import quantize, tensors
from deep_tile.config import SCALE_BLOCK, as_int, ceil_div
from deep_tile.ops import is_traced

Pair = tuple[torch.Tensor, torch.Tensor]


def check_result(d: object, alpha: float | None = None, epilogue: object = None, name: str = "d") -> None:
    """Check what is written to, a tensor or a pair, and refuse what is done to it on other GPUs."""
    if not isinstance(d, (torch.Tensor, tuple, list)):
        raise TypeError(f"{name} is {_kind(d)}; it must be a tensor, which is written to: nothing is returned")
    if epilogue is not None:
        raise ValueError(
            f"epilogue is {epilogue!r}; on Hopper it must be None, as in DeepGEMM. Apply it to d afterwards"
        )
    if alpha not in (None, 1):
        raise ValueError(
            f"alpha is {alpha!r}; on Hopper it must be None, as in DeepGEMM. Multiply a's scale by it, or d"
        )


def lengths(ks_cpu: object, ks: object) -> object:
    """k per group, which DeepGEMM's releases name differently."""
    if ks is not None and ks_cpu is not None:
        raise ValueError("ks_cpu and ks are given, which are two names of one argument; pass one of them")
    return ks_cpu if ks is None else ks


def count(name: str, given: object) -> int:
    number = as_int(given)
    if number is None:
        raise TypeError(f"{name} is {given!r}, of type {type(given).__name__}; pass an int")
    return number


def of_masked(masked_m: object, expected_m: object) -> dict[str, object]:
    """Keywords of a product of groups for a masked layout."""
    require_dimensions(masked_m=(masked_m, 1))
    return {"counts": masked_m, "expected_rows": count("expected_m", expected_m)}


def head_splits(given: object) -> list[int]:
    """The three numbers of a head's columns."""
    splits = [as_int(number) for number in given] if isinstance(given, (tuple, list)) else []
    if len(splits) != 3 or None in splits or min(splits) < 0 or splits[0] + splits[2] == 0:
        raise ValueError(f"head_splits is {given!r}; it must be columns before, in and behind the gap, three ints")
    return splits


def refuse_sum(c: object) -> None:
    if c is not None:
        raise ValueError(
            "c must be None: GEMMs with 1x128 and 128x128 scales cannot accumulate on Hopper. Add c to d afterwards"
        )


def is_by_rows(recipe: object, recipe_b: object) -> bool:
    """Whether a call asks for 1x128 scales on both operands."""
    if recipe is not None:
        return blocks_of("recipe", recipe) == (1, 1, SCALE_BLOCK)
    return recipe_b is not None and blocks_of("recipe_b", recipe_b) == quantize.TOKEN_BLOCK


def blocks_of(name: str, recipe: object) -> tuple:
    if not isinstance(recipe, (tuple, list)):
        raise TypeError(f"{name} is {_kind(recipe)}; it must be a tuple of ints, or None")
    return tuple(recipe)


def begin_sum(d: torch.Tensor, c: torch.Tensor | None) -> bool:
    """Copy the accumulation operand into `d`; False if there is none."""
    if c is None:
        return False
    for name, x in (("c", c), ("d", d)):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            raise TypeError(f"{name} is {_kind(x)}; with c, both must be tensors of torch.float32")
    if c.shape != d.shape or c.device != d.device:
        raise ValueError(f"c is {list(c.shape)} on {c.device}; it must be like d, {list(d.shape)} on {d.device}")
    if c is not d and (is_traced() or c.data_ptr() != d.data_ptr() or c.stride() != d.stride()):
        d.copy_(c)
    return True


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def check_no_psum(use_psum_layout: bool) -> None:
    if use_psum_layout:
        raise ValueError("use_psum_layout must be False on Hopper: pass groups one after the other, and ks_cpu")


def refuse_overlap(enable_overlap: object, signal: object) -> None:
    if enable_overlap or signal is not None:
        raise ValueError(
            "enable_overlap and signal ask for a count of finished tiles, which is not kept here. Start SGLang without "
            "--enable-single-batch-overlap"
        )


def check_gradients(d: torch.Tensor) -> None:
    if d.dtype != torch.float32 or not d.is_contiguous():
        raise ValueError(f"d is {list(d.shape)} of {d.dtype}, strides {d.stride()}; it must be dense, of torch.float32")


def check_lengths(ks: object, groups: int, multiple: int = SCALE_BLOCK) -> None:
    lengths = [as_int(k) for k in ks] if isinstance(ks, (list, tuple)) else [None]
    if not all(k is not None and k >= 0 and k % multiple == 0 for k in lengths):
        raise ValueError(f"ks_cpu is {ks!r}; it must be a list of multiples of {multiple}: pad groups with zeros")
    if len(ks) != groups:
        raise ValueError(f"ks_cpu has {len(ks)} numbers; d has {groups} groups. Pass the k of each")


def check_flat(name: str, x: torch.Tensor, scale: torch.Tensor, rows: int, k: int) -> None:
    if not isinstance(x, torch.Tensor) or x.numel() != rows * k or not x.is_contiguous():
        seen = f"{list(x.shape)}, strides {x.stride()}" if isinstance(x, torch.Tensor) else _kind(x)
        raise ValueError(
            f"{name} is {seen}; it must be dense, of {rows} x {k} elements, each group's [{rows}, k] whole"
        )
    if tuple(scale.shape) != (rows, k // SCALE_BLOCK):
        wanted = [rows, k // SCALE_BLOCK]
        raise ValueError(f"{name}'s scale is {list(scale.shape)}; it must be {wanted}, so transpose it with .t()")


def check_recipes(
    recipe: object,
    recipe_a: object = None,
    recipe_b: object = None,
    of_b: tuple[int, int] = quantize.WEIGHT_BLOCK,
) -> None:
    if recipe is recipe_a is recipe_b is None:
        return
    for name, given, wanted in (
        ("recipe", recipe, (1, *of_b)),
        ("recipe_a", recipe_a, quantize.TOKEN_BLOCK),
        ("recipe_b", recipe_b, of_b),
    ):
        if given is not None and blocks_of(name, given) != wanted:
            raise ValueError(f"{name} is {given}; on Hopper it is {wanted} or None. Quantise with such blocks")


def operands(a: Pair, b: Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_operand("a", a), *_operand("b", b)


def on_pairs(call: Callable[..., None], a: Pair, b: Pair, d: torch.Tensor, **options: object) -> None:
    """`call(*operands(a, b), d, **options)`, for a `call` that refuses what `operands` would copy or refuse. Only what
    it refuses is looked at here: looking takes half as long as a launch."""
    if not is_traced():
        try:
            (x, x_scale), (y, y_scale) = a, b
            return call(x, x_scale, y, y_scale, d, **options)
        except (TypeError, ValueError) as error:
            refusal = error
    given = operands(a, b)
    if not is_traced() and all(new is old for new, old in zip(given, (*a, *b), strict=True)):
        raise refusal
    return call(*given, d, **options)


def pair_of(name: str, pair: object) -> tuple:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name} is a {type(pair).__name__}; it must be a pair of an FP8 tensor and its scale")
    return tuple(pair)


def checked_pair(name: str, pair: Pair) -> Pair:
    x, scale = pair_of(name, pair)
    if isinstance(scale, torch.Tensor) and scale.dtype == torch.int32:
        remedy = tensors.scale_remedy(f"{name}[1]", scale)
        raise TypeError(f"{name}'s scale is of int32, packed for Blackwell; Hopper takes float32. To fix: {remedy}")
    return x, scale


def _operand(name: str, pair: Pair) -> Pair:
    x, scale = checked_pair(name, pair)
    if isinstance(x, torch.Tensor) and x.dim() == 2 and not is_traced():
        x = tensors.with_aligned_rows(x)
    return x, scale


def require_dimensions(**given: tuple[object, int]) -> None:
    for name, (x, dimensions) in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor of {dimensions} dimensions")
        if x.dim() != dimensions:
            raise ValueError(f"{name} is {list(x.shape)}; it must have {dimensions} dimensions")


def check_cast_result(values: torch.Tensor, scale: torch.Tensor) -> None:
    """Check the pair that a product by heads is cast to."""
    require_dimensions(d=(values, 3), **{"d's scale": (scale, 3)})
    wanted = (*values.shape[:2], ceil_div(values.shape[2], SCALE_BLOCK))
    for name, x, dtype, shape in (
        ("d", values, torch.float8_e4m3fn, values.shape),
        ("d's scale", scale, torch.float32, wanted),
    ):
        if x.dtype != dtype or tuple(x.shape) != tuple(shape) or not x.is_contiguous() or x.device != values.device:
            seen = f"{list(x.shape)} of {x.dtype} with strides {x.stride()} on {x.device}"
            raise ValueError(f"{name} is {seen}; it must be {list(shape)} of {dtype}, dense, on {values.device}")
