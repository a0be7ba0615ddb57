"""Which linear layers in a model can be replaced by FP8 ones, and the obstacles in others.

A model may do more with a layer than call it: share its weight, read it, train it, hang hooks on it. A layer where FP8
would drop or break something is refused, by name and with the remedy. Invariant: nothing is changed here.
"""

import dis
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType

import torch

from deep_tile import tensors
from deep_tile.quantize import SOURCE_DTYPES

Layers = Mapping[str, torch.nn.Linear]
"""Layers by name; a shared layer has several names."""

_Obstacle = tuple[str, str]
"""Why a layer cannot be replaced, and the remedy."""

_OF_MODULE = frozenset(vars(torch.nn.Module()))

CARRIED_HOOKS = tuple(name for name in _OF_MODULE if name.startswith(("_forward", "_backward", "_is_full_backward")))
"""Attributes with hooks around a module's calls, which get the layer as an argument."""

_HOOKS_OF_STATE = tuple(name for name in _OF_MODULE if "state_dict" in name and name.endswith("_hooks"))
"""Attributes with hooks around loading and saving, which depend on how the weight is stored."""

REPLACED_BY_ADAPTER = "original_module"
"""peft's name for a layer that it replaced by a trained copy."""

_HARMLESS = frozenset(("device", "shape", "size", "ndim", "dim", "numel", "is_cuda", "is_meta", "requires_grad"))
"""Weight attributes that are the same in FP8."""


def linears(model: torch.nn.Module, wanted: Callable[[str, torch.nn.Linear], bool] | None) -> Layers:
    """Wanted layers, exactly of type torch.nn.Linear, without adapters, which peft trains and merges."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        name: layer
        for name, layer in modules.items()
        if type(layer) is torch.nn.Linear and not is_adapter(name, modules) and (wanted is None or wanted(name, layer))
    }


def is_adapter(name: str, modules: Mapping[str, torch.nn.Module]) -> bool:
    """Whether a module belongs to an adapter or was replaced by one; peft's layers list these in
    `adapter_layer_names`."""
    for above, below in _ancestors(name):
        names = getattr(modules[above], "adapter_layer_names", None)
        if isinstance(names, (tuple, list)) and below.partition(".")[0] in (*names, REPLACED_BY_ADAPTER):
            return True
    return False


def check(model: torch.nn.Module, layers: Layers) -> None:
    """Raise unless all these layers can be replaced.

    Raises:
        TypeError: the model is such a layer itself, or a weight has a dtype that cannot be quantised.
        ValueError: something else stands against it, for each layer that it concerns.
    """
    if "" in layers:
        raise TypeError(
            "model is a torch.nn.Linear itself, which has no parent to be replaced in: take "
            "deep_tile.nn.Linear.from_float(model)"
        )
    for name, layer in layers.items():
        if layer.weight.dtype not in SOURCE_DTYPES:
            known = ", ".join(map(str, SOURCE_DTYPES))
            raise TypeError(f"the weight of {name!r} is {layer.weight.dtype}; it must be one of {known}")
        if layer.bias is not None and layer.bias.dtype == torch.float64:
            raise TypeError(f"the bias of {name!r} is torch.float64, which no product adds; call model.float() first")
    obstacles = [_in_itself, _of_training, _Sharing(model, layers).obstacle, _Reading(model).obstacle]
    refuse((name, found) for name, layer in layers.items() for of in obstacles if (found := of(name, layer)))


def refuse(found: Iterable[tuple[str, _Obstacle]]) -> None:
    """Raise ValueError if layers have obstacles: each obstacle once, with its layers' names."""
    names: dict[_Obstacle, list[str]] = {}
    for name, obstacle in found:
        names.setdefault(obstacle, []).append(name)
    if not names:
        return
    lines = [f"{_listed(of)}: {what}. {remedy}" for (what, remedy), of in names.items()]
    every = dict.fromkeys(name for of in names.values() for name in of)
    raise ValueError(
        "these layers cannot be replaced as they are, and none has been:\n"
        + "\n".join(lines)
        + f"\nOr leave them out: wanted=lambda name, layer: {_left_out(every)}"
    )


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _left_out(names: Iterable[str], most: int = 3) -> str:
    names = tuple(names)
    if len(names) <= most:
        return f"name not in {names!r}"
    ends = tuple(dict.fromkeys(re.search(r"([^.]*\D\.)?[^.]*$", name)[0] for name in names))
    return f"not name.endswith({ends!r})"


def _ancestors(name: str) -> Iterator[tuple[str, str]]:
    """Enclosing modules' names, the nearest first, and the module's name within each."""
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        yield ".".join(parts[:i]), ".".join(parts[i:])


def _in_itself(_: str, layer: torch.nn.Linear) -> _Obstacle | None:
    """Obstacles in the layer itself: anything beside weight, bias and call hooks."""
    wrapped = [name for name in ("_hf_hook", "forward", "_compiled_call_impl") if vars(layer).get(name) is not None]
    if wrapped:
        return (
            f"it has a {wrapped[0]} of its own, as accelerate's hooks and torch.compile leave it",
            "Replace layers before accelerate's dispatch_model and compile(), or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first",
        )
    state = {*layer._parameters, *layer._buffers, *layer._modules}
    if state - {"weight", "bias"} or "weight" not in layer._parameters:
        kept = ", ".join(sorted(state - {"bias"}))
        return (
            f"it computes its weight, or has more, of {kept}",
            "Remove what put that there, such as by torch.nn.utils.remove_weight_norm or prune.remove",
        )
    weight = layer.weight
    if type(weight) is not torch.nn.Parameter or not tensors.is_plain(weight) or weight.dim() != 2:
        return (
            f"its weight is a {type(weight).__name__} of {list(weight.shape)}",
            "Replace layers before parallelize_module, fully_shard and what else wraps or splits weights",
        )
    if any(getattr(layer, name) for name in _HOOKS_OF_STATE):
        return "it has hooks of state_dict, which know its wide weight", "Register them on the FP8 layer afterwards"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has hooks of its gradient, which an FP8 weight has none of", "Remove them first"
    return None


def _of_training(_: str, layer: torch.nn.Linear) -> _Obstacle | None:
    if layer.training and layer.weight.requires_grad:
        return (
            "it trains, being in training mode with a weight that requires a gradient, and an FP8 weight is frozen",
            "To infer, call model.eval() first; to train adapters or what else is left, model.requires_grad_(False)",
        )
    return None


class _Sharing:
    """Who else in the model has a layer's weight, but for layers that are replaced alike."""

    def __init__(self, model: torch.nn.Module, layers: Layers):
        self.others: dict[object, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for own, parameter in module._parameters.items():
                if parameter is not None and not (name in layers and own == "weight"):
                    self.others.setdefault(weight_key(parameter), f"{name}.{own}".lstrip("."))

    def obstacle(self, _: str, layer: torch.nn.Linear) -> _Obstacle | None:
        other = self.others.get(weight_key(layer.weight))
        if other is None:
            return None
        return (
            f"its weight is that of {other!r}, too, which stays wide",
            "To untie them give the layer a clone, and in transformers set config.tie_word_embeddings=False",
        )


def weight_key(weight: torch.Tensor) -> object:
    """A key, equal for weights that share memory."""
    is_made = not torch.nn.parameter.is_lazy(weight)
    has_memory = is_made and tensors.is_plain(weight) and not weight.is_meta and weight.numel() > 0
    return (weight.device, weight.data_ptr(), weight.numel()) if has_memory else id(weight)


class _Reading:
    """Models that read a layer's weight: to cast to its dtype, or to multiply by it themselves."""

    def __init__(self, model: torch.nn.Module):
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.read: dict[type, list[tuple[str, ...]]] = {}

    def obstacle(self, name: str, _: torch.nn.Linear) -> _Obstacle | None:
        for above, below in _ancestors(name):
            module = self.modules[above]
            path = tuple(part for part in below.split(".") if not part.isdecimal())
            if path and self._reads(type(module), path):
                return self._said(module, ".".join(path))
        return None

    def _reads(self, kind: type, path: tuple[str, ...]) -> bool:
        if kind not in self.read:
            self.read[kind] = [read for code in _codes_of_forward(kind) for read in _weights_read(code)]
        return any(read[-len(path) :] == path for read in self.read[kind])

    def _said(self, module: torch.nn.Module, path: str) -> _Obstacle | None:
        what = f"{type(module).__name__} reads {path}.weight itself, and would take FP8 codes for the weight"
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            if not torch.backends.mha.get_fastpath_enabled():
                return None
            return what, "Call torch.backends.mha.set_fastpath_enabled(False), which has the layer called instead"
        return what, "Such a layer stays wide"


def _codes_of_forward(kind: type) -> Iterator[CodeType]:
    """Code of a module's `forward` and of methods that it may call."""
    met, names = set(), ["forward"]
    while names:
        name = names.pop()
        if name in met or (name != "forward" and hasattr(torch.nn.Module, name)):
            continue
        met.add(name)
        found = inspect.getattr_static(kind, name, None)
        function = inspect.unwrap(getattr(found, "fget", found))
        for code in _nested(getattr(function, "__code__", None)):
            yield code
            names += code.co_names


def _nested(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _nested(constant)


def _weights_read(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Attribute names that code loads right before each `weight` use that is not harmless."""
    loads = ("LOAD_ATTR", "LOAD_METHOD")
    names = tuple(step.argval for step in dis.get_instructions(code) if step.opname in loads)
    for i, name in enumerate(names):
        if name == "weight" and not _HARMLESS.issuperset(names[i + 1 : i + 2] or ("",)):
            yield names[:i]
