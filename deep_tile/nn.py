"""Layers for models: `Linear` with an FP8 weight, models whose layers are replaced by it, and their kernels made ready.

Called by users and by what brings deep_tile into engines.
Invariant: a Linear's weight stays float8_e4m3fn and its scale float32, whatever a model is converted to; and its rows
begin at multiples of 16 bytes, whatever it is loaded from, copied or moved to.
"""

import os
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from deep_tile import api, cast, jit, tensors
from deep_tile.linear import fp8_linear, quantize_weight
from deep_tile.quantize import FP8_DTYPE, WEIGHT_BLOCK, scale_shape

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""What checkpoints call the scale that a weight is multiplied with; the first is ours."""


class Linear(torch.nn.Module):
    """`torch.nn.Linear` with a weight in FP8: `fp8_linear` of its input.

    The weight is frozen; gradients reach the input and the bias. `.to(dtype)`, `.half()` and the like convert the bias
    alone.

    Attributes:
        weight: [out_features, in_features] float8_e4m3fn.
        weight_scale_inv: [ceil(out_features / 128), ceil(in_features / 128)] float32, which the weight is multiplied
            with. Both have the names and formats of checkpoints in DeepSeek-V3's format, and are loaded from them;
            "weight_scale" and float8_e8m0fnu are understood, too.
        bias: [out_features], or None.
        options: keywords for `fp8_linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        """Args are those of `torch.nn.Linear`; `dtype` is the bias's. `options` are keywords for `fp8_linear`, such as
        batch_invariant=True. The weight is drawn as `torch.nn.Linear` draws it.
        """
        super().__init__()
        self.in_features, self.out_features, self.options = in_features, out_features, options
        self.weight = _frozen(tensors.empty_rows((out_features, in_features), FP8_DTYPE, device))
        scale = torch.empty(scale_shape(self.weight.shape, WEIGHT_BLOCK), dtype=torch.float32, device=device)
        self.weight_scale_inv = _frozen(scale)
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_float(cls, linear: torch.nn.Linear, **options: Any) -> "Linear":
        """The layer with its weight quantised and its bias as it is, on the same device and in the same mode.

        `options` are keywords for `fp8_linear`; round_scale, exact and amax_floor are the weight's, too.

        Raises:
            TypeError, ValueError: as `quantize_weight`.
        """
        wanted = {name: options[name] for name in ("amax_floor", "round_scale", "exact") if name in options}
        b, b_scale = quantize_weight(linear.weight.detach(), **wanted)
        return cls.from_fp8(b, b_scale, linear.bias, **options).train(linear.training)

    @classmethod
    def from_fp8(
        cls,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: torch.Tensor | None = None,
        **options: Any,
    ) -> "Linear":
        """The layer of a weight that is quantised, which it shares where rows begin at multiples of 16 bytes.

        Args:
            weight, weight_scale_inv, bias: in the formats of the attributes; the scale may be float8_e8m0fnu.
            options: keywords for `fp8_linear`.

        Raises:
            TypeError: another dtype.
            ValueError: a shape or device that does not fit.
        """
        _check_weight(weight, weight_scale_inv)
        layer = cls(weight.shape[1], weight.shape[0], bias=False, device="meta", **options)
        layer.weight = _frozen(tensors.with_aligned_rows(weight.detach()))
        layer.weight_scale_inv = _frozen(weight_scale_inv.detach().float())
        if bias is not None:
            layer.bias = bias if isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
        return layer

    def reset_parameters(self) -> None:
        """Draw weight and bias as `torch.nn.Linear` does."""
        if self.weight.is_meta:
            return
        with torch.no_grad():
            drawn = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, self.weight.device)
            b, b_scale = quantize_weight(drawn.weight)
            self.weight.copy_(b)
            self.weight_scale_inv.copy_(b_scale)
            if self.bias is not None:
                self.bias.copy_(drawn.bias)

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] in the input's dtype; `x` and errors as for `fp8_linear`."""
        return fp8_linear(x, self.weight, self.weight_scale_inv, self.bias, **self.options)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{options}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        """Every conversion and move of torch.nn.Module ends here."""
        quantized = (self.weight, self.weight_scale_inv)

        def keep_format(x: torch.Tensor) -> torch.Tensor:
            changed = fn(x)
            if not any(x is one for one in quantized):
                return changed
            if changed.dtype != x.dtype:
                changed = x.to(changed.device)
            return tensors.with_aligned_rows(changed) if changed.dtype == FP8_DTYPE else changed

        return super()._apply(keep_format, recurse)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of copies and pickles, whose rows torch makes dense."""
        super().__setstate__(state)
        self._align()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        ours, *others = (prefix + name for name in _SCALE_NAMES)
        for other in others:
            if ours not in state_dict and other in state_dict:
                state_dict[ours] = state_dict.pop(other)
        weight, scale = state_dict.get(prefix + "weight"), state_dict.get(ours)
        if weight is not None and scale is not None:
            _check_weight(weight, scale)
            state_dict[ours] = scale.float()
        elif weight is not None and weight.dtype != FP8_DTYPE:
            raise TypeError(
                f"{prefix}weight is {weight.dtype}, and this layer's is {FP8_DTYPE}: load it into a torch.nn.Linear, "
                "then convert that with deep_tile.nn.Linear.from_float"
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._align()

    def _align(self) -> None:
        if not self.weight.is_meta:
            self.weight.data = tensors.with_aligned_rows(self.weight.data)


def _frozen(x: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x, requires_grad=False)


def _check_weight(weight: torch.Tensor, scale: torch.Tensor) -> None:
    if weight.dtype != FP8_DTYPE:
        raise TypeError(f"weight is {weight.dtype}; it must be {FP8_DTYPE}. Linear.from_float quantises others")
    if scale.dtype not in tensors.SCALE_DTYPES:
        raise TypeError(
            f"weight_scale_inv is {scale.dtype}; it must be torch.float32 or torch.float8_e8m0fnu. Convert it with "
            ".float()"
        )
    if weight.dim() != 2 or tuple(scale.shape) != scale_shape(weight.shape, WEIGHT_BLOCK):
        wanted = f" of {list(scale_shape(weight.shape, WEIGHT_BLOCK))}" if weight.dim() == 2 else ""
        raise ValueError(
            f"weight is {list(weight.shape)} and weight_scale_inv {list(scale.shape)}; they must be [n, k] and "
            f"[ceil(n / 128), ceil(k / 128)]{wanted}: one scale for each 128x128 block"
        )
    if weight.device != scale.device:
        raise ValueError(f"weight_scale_inv is on {scale.device} but weight is on {weight.device}; move it there")


def replace_linears(
    model: torch.nn.Module, wanted: Callable[[str, torch.nn.Linear], bool] | None = None, **options: Any
) -> int:
    """Replace the `torch.nn.Linear` layers of a model by `Linear`, in place; how many.

    Args:
        model: not itself a torch.nn.Linear. Subclasses of torch.nn.Linear are left alone.
        wanted: given a layer's name in the model and the layer, whether to replace it; all when None. Heads and routers
            are often left: lambda name, layer: "lm_head" not in name.
        options: keywords for `fp8_linear`.

    Raises:
        TypeError, ValueError: as `Linear.from_float`.
    """
    modules = list(model.named_modules(remove_duplicate=False))  # a shared layer has several names
    replaced: dict[torch.nn.Linear, Linear] = {}
    for name, layer in modules:
        if type(layer) is not torch.nn.Linear or (wanted is not None and not wanted(name, layer)):
            continue
        if layer not in replaced:
            replaced[layer] = Linear.from_float(layer, **options)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, replaced[layer])
    return len(replaced)


def precompile_model(
    model: torch.nn.Module,
    max_tokens: int,
    *,
    workers: int | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    grouping: str = "offs",
    out_dtype: torch.dtype = torch.bfloat16,
) -> api.Precompiled:
    """Make ready every kernel that the FP8 layers of a model can need, casts included: `precompile` for all of them.

    After it no call of such a layer with at most `max_tokens` rows compiles or loads anything, on the device that is
    current now. Launches nothing, and needs neither a GPU nor the weights' memory: without a GPU it fills the cache.

    Args:
        model: with layers that have a 2-D `weight` of float8_e4m3fn and its scale, as `weight_scale_inv` or
            `weight_scale`, with one value for each 128x128 block: `Linear`, transformers' FP8Linear, and the like. Or
            with experts: parameters or buffers [g, n, k] of any name, and their scales by that name with `_scale_inv`
            or `_scale` behind it, as transformers' FP8Experts has them.
        max_tokens: most rows of an input, over all of its leading dimensions.
        workers, num_sms, batch_invariant: as for `precompile`.
        grouping: of experts' products, as for `precompile`: "offs" for rows one group after the other, "counts" for
            rows of each group's own.
        out_dtype: of the linear layers' results: that of their inputs, unless a layer has another. Biases are taken in
            the dtypes that they have now.

    Returns:
        What `precompile` returns; `compiled` counts the casts' kernels, too.

    Raises:
        ValueError: the model has no such layer.
        TypeError, ValueError, jit.CompileError: as `precompile`.
    """
    shapes: dict[torch.dtype | None, set[tuple[int, int, int]]] = {}
    for weight, bias in _fp8_weights(model):
        shapes.setdefault(bias, set()).add((*weight.shape, max_tokens))
    of_experts = sorted({(*weight.shape[1:], max_tokens) for weight in _expert_weights(model)})
    if not shapes and not of_experts:
        raise ValueError(
            f"{type(model).__name__} has no layer with a weight of {FP8_DTYPE} and its scale of 128x128 blocks, "
            f"{' or '.join(_SCALE_NAMES)}. Quantise it first, with deep_tile.nn.replace_linears(model) for instance"
        )
    before, options = jit.compilations(), {"workers": workers, "num_sms": num_sms, "batch_invariant": batch_invariant}
    configs = ()
    for bias, of_bias in shapes.items():
        configs += api.precompile(sorted(of_bias), **options, bias=bias, out_dtype=out_dtype).configs
    configs += api.precompile(of_experts, **options, grouping=grouping).configs
    cast.load_kernels(api.current_gpu(), workers or os.cpu_count() or 1)
    return api.Precompiled(configs, jit.compilations() - before)


def _fp8_weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.dtype | None]]:
    """Of linear layers; with the dtype of each one's bias."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dtype != FP8_DTYPE or weight.dim() != 2:
            continue
        if _has_scale(layer, _SCALE_NAMES, scale_shape(weight.shape, WEIGHT_BLOCK)):
            bias = getattr(layer, "bias", None)
            yield weight, bias.dtype if isinstance(bias, torch.Tensor) else None


def _expert_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        for name, weight in chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)):
            if weight.dtype != FP8_DTYPE or weight.dim() != 3:
                continue
            wanted = (weight.shape[0], *scale_shape(weight.shape[1:], WEIGHT_BLOCK))
            if _has_scale(layer, (f"{name}_scale_inv", f"{name}_scale"), wanted):
                yield weight


def _has_scale(layer: torch.nn.Module, names: tuple[str, ...], shape: tuple[int, ...]) -> bool:
    scales = (getattr(layer, name, None) for name in names)
    return any(isinstance(scale, torch.Tensor) and tuple(scale.shape) == shape for scale in scales)
