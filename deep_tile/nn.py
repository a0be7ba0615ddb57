"""`Linear` with an FP8 weight, replacement of a model's layers, and precompilation of their kernels.

Invariant: a Linear's weight stays float8_e4m3fn and its scale float32 through any model conversion, and its rows start
at multiples of 16 bytes after any load, copy or move. Parameters that are set in other ways are copied into this form
in every call.
"""

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from deep_tile import api, blocks, cast, checks, formats, jit, packed_layers, quantize, replaceable, tensors
from deep_tile.config import as_counts, check_sizes
from deep_tile.integrations import transformers_config
from deep_tile.linear import fp8_linear, quantize_weight
from deep_tile.packed_layers import PackedExperts, PackedLinear
from deep_tile.quantize import FP8_DTYPE, WEIGHT_BLOCK, scale_shape

__all__ = ["Linear", "PackedExperts", "PackedLinear", "precompile_model", "replace_linears"]

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""Names of a weight's scale in checkpoints; the first is ours."""


class Linear(torch.nn.Module):
    """`torch.nn.Linear` with an FP8 weight, which calls `fp8_linear`.

    The weight is frozen; gradients reach the input and the bias. `.to(dtype)`, `.half()` and the like convert the bias
    alone. `state_dict()` holds a dense copy of a weight with padded rows. Parameters set by other means (`_parameters`,
    `.data`, offloading hooks) also work; each call copies them if their rows are misaligned or if they hold the same
    numbers in a wider dtype. `.to()` converts them once. torch.compile sees no addresses, so it refuses such
    parameters.

    Attributes:
        weight: [out_features, in_features] float8_e4m3fn, rows at multiples of 16 bytes.
        weight_scale_inv: [ceil(out_features / 128), ceil(in_features / 128)] float32, the weight's multiplier. Both
            load from checkpoints in DeepSeek-V3's format, with its names; "weight_scale" and scales in bfloat16,
            float16 and float8_e8m0fnu also load.
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
        """Args as for `torch.nn.Linear`; `dtype` is the bias's. `options` are keywords for `fp8_linear`, such as
        batch_invariant=True. The weight is drawn as `torch.nn.Linear` draws it.
        """
        super().__init__()
        packed_layers.check_options(fp8_linear, options)
        in_features, out_features = as_counts(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features, self.options = in_features, out_features, options
        self.weight = _frozen(tensors.empty_rows((out_features, in_features), FP8_DTYPE, device))
        scale = torch.empty(scale_shape(self.weight.shape, WEIGHT_BLOCK), dtype=torch.float32, device=device)
        self.weight_scale_inv = _frozen(scale)
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_float(cls, linear: torch.nn.Linear, **options: Any) -> "Linear":
        """The layer with its weight quantised and its bias unchanged, on the same device and in the same mode.

        `options` are keywords for `fp8_linear`; round_scale, exact and amax_floor are the weight's, too.

        Raises:
            TypeError, ValueError: as `quantize_weight`.
        """
        if not isinstance(linear, torch.nn.Linear):  # others hold other weights, such as transposed ones
            raise TypeError(
                f"linear is {linear!r}, a {type(linear).__name__}; pass a torch.nn.Linear, or a weight [n, k] of "
                "deep_tile.quantize_weight to from_fp8"
            )
        wanted = {name: options[name] for name in ("amax_floor", "round_scale", "exact") if name in options}
        b, b_scale = quantize_weight(linear.weight.detach(), **wanted)
        layer = cls.from_fp8(b, b_scale, linear.bias, **options)
        layer.training, layer._was_trainable = linear.training, linear.weight.requires_grad
        return layer

    @classmethod
    def from_fp8(
        cls,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        format: str | None = None,
        global_scale: torch.Tensor | float | None = None,
        max_error: float = blocks.MAX_ERROR,
        **options: Any,
    ) -> "Linear":
        """Make a layer of a quantised weight, whose memory it shares if rows start at multiples of 16 bytes.

        Args:
            weight, weight_scale_inv, bias: as the attributes; the scale may be bfloat16, float16 or float8_e8m0fnu. Or
                weight and scale in another `format`.
            format: a format of `to_blocks`, such as "mxfp4", which converts the weight to the attributes' format.
            global_scale, max_error: as for `to_blocks`, with a `format`.
            options: keywords for `fp8_linear`.

        Raises:
            TypeError: another dtype.
            ValueError: a shape or device that does not fit; and, with a `format`, as `to_blocks`.
        """
        if format is not None:
            how = {"format": format, "global_scale": global_scale, "max_error": max_error}
            weight, weight_scale_inv, _ = blocks.to_blocks(weight, weight_scale_inv, **how)
        elif global_scale is not None:
            raise ValueError("global_scale is given without a format: pass format='nvfp4'")
        _check_weight(weight, weight_scale_inv)
        packed_layers.check_bias("bias", bias, weight.shape[:1])
        layer = cls(weight.shape[1], weight.shape[0], bias=False, device="meta", **options)
        layer.weight = _frozen(tensors.with_aligned_rows(weight.detach()))
        layer.weight_scale_inv = _frozen(tensors.as_float32(weight_scale_inv.detach()))
        if bias is not None:
            layer.bias = bias if isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
        return layer

    _was_trainable = False
    """Whether the original weight required a gradient."""

    def train(self, mode: bool = True) -> "Linear":
        """Set the mode as for any module; warn if a weight that required a gradient has become FP8, which cannot
        train."""
        if mode and not self.training and self._was_trainable:
            warnings.warn(
                "deep_tile.nn.Linear layers are set to training mode, but their FP8 weights are frozen: only "
                "inputs, biases and other layers get gradients. To train these weights, do not replace the layers",
                stacklevel=2,
            )
        return super().train(mode)

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
        try:
            return fp8_linear(x, self.weight, self.weight_scale_inv, self.bias, **self.options)
        except (TypeError, ValueError, RuntimeError):
            is_fake = torch.compiler.is_compiling() or hasattr(self.weight, "fake_mode")  # without addresses
            operands = None if is_fake else self._mended()
            if operands is None:
                _refuse_foreign(x, self.weight)
                raise
        return fp8_linear(x, *operands, self.bias, **self.options)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{options}, weight=FP8 (float8_e4m3fn)"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        """torch.nn.Module routes every conversion and move through here."""
        quantized = (self.weight, self.weight_scale_inv)

        def keep_format(x: torch.Tensor) -> torch.Tensor:
            changed = fn(x)
            if not any(x is one for one in quantized):
                return changed
            if changed.dtype != x.dtype:
                changed = x.to(changed.device)
            is_ours = changed.dtype == FP8_DTYPE and not _is_dtensor(changed)
            return tensors.with_aligned_rows(changed) if is_ours else changed

        super()._apply(keep_format, recurse)
        self._mend()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Realigns rows, which torch makes dense in copies and pickles."""
        super().__setstate__(state)
        self._mend()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saves dense tensors, as files need; `keep_vars` asks for the parameters themselves."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = prefix + "weight"
        if not keep_vars and name in destination:
            destination[name] = destination[name].contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        ours, *others = (prefix + name for name in _SCALE_NAMES)
        for other in others:
            if ours not in state_dict and other in state_dict:
                state_dict[ours] = state_dict.pop(other)
        weight, scale = state_dict.get(prefix + "weight"), state_dict.get(ours)
        if weight is not None and scale is not None:
            _check_weight(weight, scale)
            state_dict[ours] = tensors.as_float32(scale)
        elif weight is not None and weight.dtype != FP8_DTYPE:
            raise TypeError(
                f"{prefix}weight is {weight.dtype}, and this layer's is {FP8_DTYPE}: load it into a torch.nn.Linear, "
                "then convert that with deep_tile.nn.Linear.from_float"
            )
        elif scale is not None:  # torch would take the bytes for numbers
            tensors.require_scale_dtype(ours, scale)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._mend()

    def _mend(self) -> None:
        """Replace the parameters by `_mended` ones, except DTensors'."""
        mended = None if self.weight.is_meta or _is_dtensor(self.weight) else self._mended()
        if mended is not None:
            self.weight.data, self.weight_scale_inv.data = (x.detach() for x in mended)

    def _mended(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weight and scale, as set by others, in the form that GEMMs take; None if nothing needs or allows a fix."""
        weight, scale = _as_codes(self.weight), self.weight_scale_inv
        if weight is None or not isinstance(scale, torch.Tensor) or not scale.is_floating_point():
            return None
        weight, scale = _with_aligned_rows(weight), scale.float()
        return None if weight is self.weight and scale is self.weight_scale_inv else (weight, scale)


def _frozen(x: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x, requires_grad=False)


def _as_codes(weight: object) -> torch.Tensor | None:
    """The weight in float8_e4m3fn, if a matrix in another dtype holds the same numbers; else None."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    if weight.dtype == FP8_DTYPE:
        return weight
    if weight.dtype not in quantize.SOURCE_DTYPES or weight.is_meta:
        return None
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a comparison waits for the GPU
    codes = weight.to(FP8_DTYPE)
    return codes if torch.equal(_local(codes).to(weight.dtype), _local(weight)) else None


def _is_dtensor(x: torch.Tensor) -> bool:
    """Asked without importing torch.distributed."""
    return hasattr(x, "to_local")


def _local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if _is_dtensor(x) else x


def _with_aligned_rows(weight: torch.Tensor) -> torch.Tensor:
    """`tensors.with_aligned_rows`, also for each rank's part of a DTensor."""
    local = _local(weight)
    aligned = tensors.with_aligned_rows(local)
    if aligned is local:
        return weight
    if not _is_dtensor(weight):
        return aligned
    whole = {"shape": weight.shape, "stride": weight.stride()}
    return type(weight).from_local(aligned, weight.device_mesh, weight.placements, run_check=False, **whole)


def _refuse_foreign(x: object, weight: object) -> None:
    """Raise if a model cast a layer's input to the weight's dtype, which it took for a wide one, or set a wide
    weight."""
    if isinstance(x, torch.Tensor) and x.dtype == FP8_DTYPE:
        raise TypeError(
            f"x is {FP8_DTYPE}, like this layer's weight: a model that casts to layer.weight.dtype needs a weight in "
            "a wider dtype. Leave the layer out of replace_linears, by wanted=; or pass x in bfloat16, float16 or "
            "float32, or the pair of per_token_cast_to_fp8"
        )
    if isinstance(weight, torch.Tensor) and weight.dtype != FP8_DTYPE:
        raise TypeError(
            f"this layer's weight has become {weight.dtype}, with numbers that {FP8_DTYPE} cannot hold, perhaps "
            "because the model ties it to an embedding: it must stay quantised. Leave the layer out of "
            "replace_linears, by wanted=, or "
            "make another layer of that weight, with deep_tile.nn.Linear.from_float"
        )


def _check_weight(weight: torch.Tensor, scale: torch.Tensor) -> None:
    for name, x in (("weight", weight), ("weight_scale_inv", scale)):
        if not isinstance(x, torch.Tensor):
            raise tensors.no_tensor(name, x, "deep_tile.quantize_weight makes both")
    tensors.require_dense(weight=weight, weight_scale_inv=scale)
    if weight.dtype != FP8_DTYPE:
        wide = "make the layer with Linear.from_float, which quantises"
        takers = dict.fromkeys(tensors.QUANTIZED_DTYPES, "scaled_gemm")
        remedy = formats.remedy(weight, scale) or tensors.operand_remedy("weight", weight, (FP8_DTYPE,), takers, wide)
        raise TypeError(f"weight is {weight.dtype}; it must be {FP8_DTYPE}. To fix: {remedy}")
    if scale.dtype not in tensors.SCALE_DTYPES:
        remedy = formats.remedy(weight, scale) or tensors.scale_remedy("weight_scale_inv", scale)
        raise TypeError(f"weight_scale_inv is {scale.dtype}; it must be {tensors.SCALE_NAMES}. To fix: {remedy}")
    wanted = scale_shape(weight.shape, WEIGHT_BLOCK) if weight.dim() == 2 else None
    if tuple(scale.shape) != wanted:
        remedies = (
            wanted and checks.scale_shape_remedy("weight_scale_inv", scale, wanted, weight),
            formats.remedy(weight, scale),
        )
        remedy = "; ".join(filter(None, remedies))
        raise ValueError(
            f"weight is {list(weight.shape)} and weight_scale_inv {list(scale.shape)}; they must be [n, k] and "
            f"[ceil(n / 128), ceil(k / 128)]{f' of {list(wanted)}' if wanted else ''}: one scale for each 128x128 "
            f"block{f'. {remedy}' if remedy else ''}"
        )
    if weight.device != scale.device:
        raise ValueError(f"weight_scale_inv is on {scale.device} but weight is on {weight.device}; move it there")


def replace_linears(
    model: torch.nn.Module, wanted: Callable[[str, torch.nn.Linear], bool] | None = None, **options: Any
) -> int:
    """Replace a model's `torch.nn.Linear` layers by `Linear`, in place; returns how many.

    Hooks around a layer's calls, and attributes set on it, move to the new layer; layers that share a weight share it
    in FP8. For a transformers model `config.quantization_config` is set, so `save_pretrained` writes an FP8 checkpoint
    that `from_pretrained` and engines load.

    Args:
        model: not itself a torch.nn.Linear. Subclasses of torch.nn.Linear and peft adapters are left unchanged.
        wanted: called with a layer's name in the model and the layer; says whether to replace it. None: all. Heads and
            routers often stay: lambda name, layer: "lm_head" not in name.
        options: keywords for `fp8_linear`.

    Raises:
        TypeError, ValueError: as `Linear.from_float`, and as `fp8_linear` for options; or a layer cannot be replaced,
            because its weight requires a gradient, is shared with a module that stays in its dtype (such as an
            embedding), is read by the model itself, or is computed or split; because hooks wrap its forward; or because
            transformers could not load it. The message names the layers and the remedy. Nothing has been replaced.
    """
    tensors.require_module(model)
    if wanted is not None and not callable(wanted):
        raise TypeError(
            f"wanted is {wanted!r}; pass a function of a layer's name and the layer, such as "
            "lambda name, layer: 'lm_head' not in name, or None for all"
        )
    layers = dict(replaceable.linears(model, wanted))
    replaceable.check(model, layers)
    say_fp8 = transformers_config.description(model, layers)
    _check_options(options)
    names: dict[torch.nn.Linear, list[str]] = {}
    for name, layer in layers.items():
        names.setdefault(layer, []).append(name)
    count, shared = len(names), {}
    layers.clear()  # whoever is replaced may free its memory
    while names:
        layer, of_layer = names.popitem()
        replacement = _replacement(layer, shared, options)
        for name in of_layer:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, replacement)
    say_fp8()
    return count


def _replacement(layer: torch.nn.Linear, shared: dict[object, Linear], options: dict[str, Any]) -> Linear:
    """A layer's replacement; `shared` holds those made so far, by their wide weights."""
    key = (replaceable.weight_key(layer.weight), layer.weight.shape, layer.weight.stride())  # not its transpose
    first = shared.get(key)
    if first is None:
        replacement = shared[key] = Linear.from_float(layer, **options)
    else:
        replacement = Linear.from_fp8(first.weight, first.weight_scale_inv, layer.bias, **options).train(layer.training)
        replacement.weight, replacement.weight_scale_inv = first.weight, first.weight_scale_inv
        replacement._was_trainable = first._was_trainable
    kept, own = vars(layer), vars(replacement)
    own.update({name: kept[name] for name in kept if name in replaceable.CARRIED_HOOKS or name not in own})
    return replacement


def _check_options(options: dict[str, Any]) -> None:
    """Raise as a layer with these options would; draws no random numbers."""
    on_cpu = {"device": "cpu", "dtype": torch.bfloat16}
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 16, 1, bias=False, **on_cpu)
    Linear.from_float(layer, **options)(torch.zeros(1, 16, **on_cpu))


def precompile_model(
    model: torch.nn.Module,
    max_tokens: int,
    *,
    workers: int | None = None,
    progress: bool = False,
    num_sms: int | None = None,
    batch_invariant: bool = False,
    grouping: str = "offs",
    out_dtype: torch.dtype = torch.bfloat16,
) -> api.Precompiled:
    """Compile every kernel that a model's FP8 layers can need, casts included: `precompile` for all of them.

    Afterwards no call of such a layer with at most `max_tokens` rows compiles or loads anything on the current device.
    Split layers and experts (`parallelize_module`) get kernels for this rank's shards, layers under FSDP2 for whole
    weights. Launches nothing and needs neither a GPU nor memory for the weights: without a GPU it fills the cache.

    Args:
        model: with layers that have a 2-D float8_e4m3fn `weight` and its scale, `weight_scale_inv` or `weight_scale`,
            with one value per 128x128 block: `Linear`, transformers' FP8Linear, and the like. Or with experts:
            parameters or buffers [g, n, k] under any name, with their scales under that name plus `_scale_inv` or
            `_scale`, as in transformers' FP8Experts. Or with `PackedLinear` and `PackedExperts`.
        max_tokens: most rows in an input, over all leading dimensions.
        workers, progress, num_sms, batch_invariant: as for `precompile`. A `Linear` with other options gets kernels
            for those.
        grouping: for experts' GEMMs, as for `precompile`: "offs" for contiguous groups, "counts" for the masked layout.
        out_dtype: dtype of linear layers' results: their inputs', unless a layer has another. Biases are taken in
            the dtypes that they have now.

    Returns:
        What `precompile` returns; `compiled` counts the casts' kernels, too.

    Raises:
        ValueError: the model has no such layer.
        TypeError, ValueError, jit.CompileError: as `precompile`.
    """
    tensors.require_module(model)
    check_sizes(max_tokens=max_tokens)
    shapes_of: dict[tuple[tuple[str, Any], ...], set[tuple[int, int, int]]] = {}
    gathered = _gathered_shapes(model)
    given = {"num_sms": num_sms, "batch_invariant": batch_invariant, "out_dtype": out_dtype}
    for layer, weight in _fp8_weights(model):
        bias, own = getattr(layer, "bias", None), layer.options if isinstance(layer, Linear) else {}
        wanted = {name: own.get(name, value) for name, value in given.items()}
        wanted["out_dtype"] = wanted["out_dtype"] or out_dtype
        wanted["bias"] = bias.dtype if isinstance(bias, torch.Tensor) else None
        shapes_of.setdefault(tuple(wanted.items()), set()).add((*_run_shape(weight, gathered), max_tokens))
    of_experts = sorted({(*_run_shape(weight, gathered)[1:], max_tokens) for weight in _expert_weights(model)})
    of_packed: dict[tuple[tuple[str, Any], ...], set[tuple[int, int, int]]] = {}
    for shape, keywords in packed_layers.products(model, out_dtype):
        wanted = {"num_sms": num_sms, "batch_invariant": batch_invariant} | keywords
        of_packed.setdefault(tuple(wanted.items()), set()).add((*shape, max_tokens))
    if not shapes_of and not of_experts and not of_packed:
        raise ValueError(
            f"{type(model).__name__} has no layer with a weight of {FP8_DTYPE} and its scale of 128x128 blocks, "
            f"{' or '.join(_SCALE_NAMES)}. Quantise it first, with deep_tile.nn.replace_linears(model) for instance"
        )
    before, configs = jit.compilations(), ()
    for wanted, shapes in (*shapes_of.items(), *of_packed.items()):
        configs += api.precompile(sorted(shapes), workers=workers, progress=progress, **dict(wanted)).configs
    given.pop("out_dtype")
    configs += api.precompile(of_experts, workers=workers, progress=progress, **given, grouping=grouping).configs
    cast.load_kernels(api.current_gpu(), workers, progress=progress)
    return api.Precompiled(configs, jit.compilations() - before)


def _gathered_shapes(model: torch.nn.Module) -> dict[int, torch.Size]:
    """Shapes that each rank gathers to compute, by the id of the FSDP2 parameter.

    FSDP2 has them in private attributes, which differ between releases.
    """
    shapes = {}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            for split in getattr(group, "fsdp_params", ()):
                shapes[id(split.sharded_param)] = split._orig_size
    return shapes


def _run_shape(weight: torch.Tensor, gathered: dict[int, torch.Size]) -> tuple[int, ...]:
    """Shape of the weight that a rank multiplies with: its shard, or the whole weight if FSDP2 gathers it."""
    if id(weight) in gathered:
        return tuple(gathered[id(weight)])
    return tuple(_local(weight).shape)


def _fp8_weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.Tensor]]:
    """Linear layers and their weights."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dtype != FP8_DTYPE or weight.dim() != 2:
            continue
        if _has_scale(layer, _SCALE_NAMES, scale_shape(weight.shape, WEIGHT_BLOCK)):
            yield layer, weight


def _expert_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        for name, weight in chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)):
            if weight.dtype != FP8_DTYPE or weight.dim() != 3:
                continue
            groups, n, k = weight.shape
            scales, (rows, columns) = (f"{name}_scale_inv", f"{name}_scale"), scale_shape((n, k), WEIGHT_BLOCK)
            if _has_scale(layer, scales, (groups, rows, columns)):
                yield weight
            elif _has_scale(layer, scales, (groups, transformers_config.gate_up_scale_rows(n)[-1], columns)):
                yield weight[:, : n // 2]  # a narrow gate_up, whose halves are multiplied separately


def _has_scale(layer: torch.nn.Module, names: tuple[str, ...], shape: tuple[int, ...]) -> bool:
    scales = (getattr(layer, name, None) for name in names)
    return any(isinstance(scale, torch.Tensor) and tuple(scale.shape) == shape for scale in scales)
