"""Layers of models whose weights have 4 bits: `PackedLinear` and `PackedExperts`, which nn.py has.

Invariant: weights and their scales stay in the dtypes that `packed.pack_weight` gave them, whatever a model is
converted to; all parameters are frozen.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deep_tile import blocks, dense, experts, grouped, packed, quantize, sources, tensors
from deep_tile.config import as_counts
from deep_tile.operation import gradient_error

_WIDE = (torch.bfloat16, torch.float16, torch.float32)


class _Layer(torch.nn.Module):
    """Base of modules with packed weights: parameters [..., n, bytes], each with its scale named `NAME_scale`."""

    def _give(self, name: str, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        of_bias = "bias" if name == "weight" else f"{name}_bias"
        for one, x in ((name, weight), (f"{name}_scale", scale), (of_bias, bias)):
            frozen = None if x is None else torch.nn.Parameter(x.detach(), requires_grad=False)
            self.register_parameter(one, frozen)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "_Layer":
        """Every conversion and move of torch.nn.Module ends here."""
        kept = [x for name, x in self.named_parameters(recurse=False) if not name.endswith("bias")]

        def keep_dtype(x: torch.Tensor) -> torch.Tensor:
            changed = fn(x)
            is_cast = any(x is one for one in kept) and changed.dtype != x.dtype
            return x.to(changed.device) if is_cast else changed

        return super()._apply(keep_dtype, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saves dense tensors, as files need: INT4's scales lie along n. `keep_vars` asks for the parameters."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else [name for name in self._parameters if name.endswith("_scale")]:
            destination[prefix + name] = destination[prefix + name].contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Takes weights and scales in their dtypes alone, since torch would convert numbers, and lays them out as ours:
        a file that is mapped into memory puts them at any address."""
        for name, own in self._parameters.items():
            if f"{prefix}{name}_packed" in state_dict:  # whose scale may have the name and shape of ours
                raise ValueError(
                    f"{prefix}{name}_packed is a weight as compressed-tensors saves it, and this layer's is packed by "
                    "deep_tile.pack_weight: make the layer with from_codes(**deep_tile.read_weight(state_dict, prefix))"
                )
            given = state_dict.get(prefix + name)
            if own is None or name.endswith("bias") or not isinstance(given, torch.Tensor):
                continue
            known = (own.dtype,) if own.dtype == torch.uint8 else tensors.SCALE_DTYPES
            remedy = ", as deep_tile.pack_weight makes it: make the layer with from_codes of a checkpoint's weight"
            tensors.require_dtypes({prefix + name: known}, {prefix + name: remedy}, **{prefix + name: given})
            if given.shape != own.shape or not tensors.is_plain(given):
                continue
            if given.dtype != own.dtype or given.stride() != own.stride() or not tensors.is_aligned(given):
                laid_out = torch.empty_like(own, device=given.device, requires_grad=False)
                state_dict[prefix + name] = laid_out.copy_(given.detach())
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class PackedLinear(_Layer):
    """`torch.nn.Linear` with a 4-bit weight: casts its input to FP8 and calls `packed_gemm`.

    Refuses gradients. `state_dict()` has the packed weight, and loads into a layer of the same sizes and format. Packed
    rows are whole K blocks: how many elements they have is in `row_elements`, which need not be there to load.

    Attributes:
        weight, weight_scale: a `Packed`, made from [out_features, in_features].
        bias: [out_features], or None.
        row_elements: a buffer of one number, `in_features`, which every loader knows how to keep.
        options: keywords for `packed_gemm`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: str = "mxfp4",
        **options: Any,
    ):
        """Args are those of `torch.nn.Linear`; `format` is "mxfp4", "nvfp4", "int4" or, for groups of 32 or 64,
        "int4_32", and `dtype` the bias's. The weight is zero, to be loaded from a `state_dict()`; `from_codes` makes a
        layer of a checkpoint's weight.
        """
        super().__init__()
        check_options(dense.packed_gemm, options)
        in_features, out_features = as_counts(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features, self.options = in_features, out_features, options
        weight, scale = packed.zeros((out_features, in_features), format, device)
        self._give("weight", weight, scale, torch.zeros(out_features, device=device, dtype=dtype) if bias else None)
        self.register_buffer("row_elements", torch.tensor(in_features, device=device))

    @classmethod
    def from_codes(
        cls,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        format: str | None = None,
        global_scale: torch.Tensor | float | None = None,
        max_error: float = blocks.MAX_ERROR,
        **options: Any,
    ) -> "PackedLinear":
        """Make a layer of a weight [n, k] in a checkpoint's format.

        Args:
            weight, scale, format, global_scale, max_error: as for `pack_weight`.
            bias: [n], or None.
            options: keywords for `packed_gemm`.

        Raises:
            TypeError, ValueError: as `pack_weight`; the weight is no matrix, or the bias does not fit.
        """
        made = packed.pack_weight(weight, scale, format=format, global_scale=global_scale, max_error=max_error)
        if made.weight.dim() != 2:
            raise ValueError(
                f"weight is {list(weight.shape)}, of {made.weight.shape[0]} matrices; pass one matrix, [n, k / 2]"
            )
        layer = cls(0, 0, bias=False, device="meta", **options)
        layer.in_features, layer.out_features = _k_of(weight, scale), made.weight.shape[0]
        check_bias("bias", bias, (layer.out_features,))
        layer._give("weight", *made, bias)
        layer.row_elements = torch.tensor(layer.in_features, device=made.weight.device)
        return layer

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        saved = state_dict.setdefault(f"{prefix}row_elements", torch.tensor(self.in_features, device="cpu"))
        if not saved.is_meta and int(saved) != self.in_features:
            raise ValueError(
                f"{prefix}weight has {int(saved)} elements per row, and this layer takes {self.in_features}: make one "
                f"with in_features={int(saved)}"
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] in bfloat16, float16 or float32 -> [..., out_features] in the same dtype."""
        _check_input(self, x, self.in_features)
        a, a_scale = quantize.per_token_cast_to_fp8(quantize.as_matrix(x))
        options = {"bias": self.bias, "out_dtype": x.dtype} | self.options
        out = dense.packed_gemm(a, a_scale, self.weight, self.weight_scale, **options)
        return out.view(*x.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        name = packed.name_of(self.weight, self.in_features)
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, weight={name}"


class PackedExperts(_Layer):
    """Experts with 4-bit weights: sorts rows by expert, runs two grouped GEMMs with the gated activation between them,
    and adds up each token's results with their weights.

    h = gate * sigmoid(alpha * gate) * (up + beta), as in `silu_mul_cast_to_fp8`. Nothing waits for the GPU, so one CUDA
    graph serves every choice of experts. Refuses gradients.

    Attributes:
        gate_up, gate_up_scale: a `Packed`, made from [g, 2 * width, hidden]: gate rows, then as many up rows.
        down, down_scale: a `Packed`, made from [g, hidden, width].
        gate_up_bias, down_bias: [g, 2 * width] and [g, hidden], or None.
        limit, alpha, beta: as for `silu_mul_cast_to_fp8`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: str = "mxfp4",
        limit: float | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ):
        """Weights and biases, in `dtype`, are zero, to be loaded from a `state_dict()`; `from_codes` makes a layer of a
        checkpoint's weights. `format` is as for `PackedLinear`."""
        super().__init__()
        self.gating = {"limit": limit, "alpha": alpha, "beta": beta}
        num_experts, hidden, width = as_counts(num_experts=num_experts, hidden=hidden, width=width)
        for name, shape in (("gate_up", (num_experts, 2 * width, hidden)), ("down", (num_experts, hidden, width))):
            of_bias = torch.zeros(shape[:2], device=device, dtype=dtype) if bias else None
            self._give(name, *packed.zeros(shape, format, device), of_bias)

    @classmethod
    def from_codes(
        cls,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        *,
        format: str | None = None,
        global_scales: tuple[torch.Tensor | float, torch.Tensor | float] | None = None,
        max_error: float = blocks.MAX_ERROR,
        interleaved: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> "PackedExperts":
        """Make a layer of weights in a checkpoint's format.

        Args:
            gate_up, gate_up_scale: of [g, 2 * width, hidden], as for `pack_weight`.
            down, down_scale: of [g, hidden, width].
            gate_up_bias, down_bias: [g, 2 * width] and [g, hidden], or None.
            format, max_error: as for `pack_weight`.
            global_scales: for NVFP4, the `global_scale` of each weight.
            interleaved: rows of gates and of up alternate, as in gpt-oss.
            limit, alpha, beta: as for `silu_mul_cast_to_fp8`; 7, 1.702 and 1 in gpt-oss.

        Raises:
            TypeError, ValueError: as `pack_weight`; or weights and biases do not fit together.
        """
        layer = cls(0, 0, 0, device="meta", limit=limit, alpha=alpha, beta=beta)
        if interleaved:
            gate_up, gate_up_scale = _halves("gate_up", gate_up), _halves("gate_up_scale", gate_up_scale)
            gate_up_bias = None if gate_up_bias is None else _halves("gate_up_bias", gate_up_bias)
        factors = (None, None) if global_scales is None else global_scales
        if not isinstance(factors, (tuple, list)) or len(factors) != 2:
            raise TypeError(f"global_scales is {factors!r}; pass a pair, of gate_up and of down, or None")
        given = (("gate_up", gate_up, gate_up_scale, gate_up_bias), ("down", down, down_scale, down_bias))
        for (name, weight, scale, bias), factor in zip(given, factors, strict=True):
            made = packed.pack_weight(weight, scale, format=format, global_scale=factor, max_error=max_error)
            check_bias(f"{name}_bias", bias, made.weight.shape[:-1])
            layer._give(name, *made, bias)
        _check_experts(layer, _k_of(gate_up, gate_up_scale), _k_of(down, down_scale))
        return layer

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Run each token through its experts and add up their results.

        Args:
            x: [t, hidden] bfloat16 or float16.
            chosen: [t, top_k], as for `sort_by_expert`.
            shares: [t, top_k], the factor of each expert's result.

        Returns:
            [t, hidden] in `x`'s dtype, summed in FP32.
        """
        _check_input(self, x, self.down.shape[1])
        _check_routing(x, chosen, shares)
        rows, offs, index = experts.sort_by_expert(chosen, self.gate_up.shape[0])
        a, a_scale = quantize.per_token_cast_to_fp8(x, rows=rows, offs=offs)
        y = grouped.packed_grouped_gemm(a, a_scale, self.gate_up, self.gate_up_scale, offs)
        y = with_bias(y, self.gate_up_bias, offs)
        h, h_scale = experts.silu_mul_cast_to_fp8(y, offs=offs, **self.gating)
        y = grouped.packed_grouped_gemm(h, h_scale, self.down, self.down_scale, offs)
        y = with_bias(y, self.down_bias, offs)
        shares = shares if shares.dtype in (torch.float32, torch.bfloat16) else shares.float()
        return experts.combine(y, shares, index).to(x.dtype)

    def extra_repr(self) -> str:
        (count, hidden, _), width = self.down.shape, self.gate_up.shape[1] // 2
        return f"num_experts={count}, hidden={hidden}, width={width}, bias={self.down_bias is not None}"


def products(model: torch.nn.Module, out_dtype: torch.dtype) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """List each GEMM of a model's layers: (n, k), and keywords of `precompile`.

    Args:
        out_dtype: of linear layers' results, unless a layer has another.
    """
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            keywords = {"out_dtype": layer.options.get("out_dtype") or out_dtype}
            keywords["bias"] = None if layer.bias is None else layer.bias.dtype
            keywords |= {name: layer.options[name] for name in ("num_sms", "batch_invariant") if name in layer.options}
            yield _product(layer.weight, layer.in_features, keywords)
        elif isinstance(layer, PackedExperts):
            yield _product(layer.gate_up, layer.down.shape[1], {"grouping": "offs"})
            yield _product(layer.down, layer.gate_up.shape[1] // 2, {"grouping": "offs"})


def check_options(function: Callable[..., torch.Tensor], options: dict[str, Any]) -> None:
    """Raise TypeError unless a layer can pass these keywords to its function."""
    known = function.__kwdefaults__
    for name in options.keys() - known.keys():
        raise TypeError(f"{name!r} is no option of {function.__name__}; options are {', '.join(known)}")


def _product(weight: torch.Tensor, k: int, keywords: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
    return (weight.shape[-2], k), {"kind": packed.name_of(weight, k), **keywords}


def _k_of(weight: torch.Tensor, scale: torch.Tensor) -> int:
    """Elements of a row, whose packs may have a dimension of their own."""
    in_packs = weight.shape[:-1] == scale.shape
    return 2 * weight.shape[-1] * (weight.shape[-2] if in_packs else 1)


def _halves(name: str, x: torch.Tensor) -> torch.Tensor:
    """Reorder alternating rows [g, 2 * n, ...]: all even rows, then all odd ones."""
    tensors.require_tensors(**{name: x})
    if x.dim() < 2:
        raise ValueError(f"{name} is {list(x.shape)}; with interleaved rows it must be [g, 2 * width, ...]")
    return torch.cat([x[:, ::2], x[:, 1::2]], 1)


def _check_input(layer: _Layer, x: object, features: int) -> None:
    """Products know whole K blocks alone."""
    quantize.check_source_dtype("x", x, _WIDE)
    tensors.require_dense_in_eager(x=x)
    if torch.is_grad_enabled() and x.requires_grad:
        raise gradient_error("x", f"{type(layer).__name__} has none")
    if x.shape[-1:] != (features,):
        raise ValueError(f"x is {list(x.shape)}; this layer takes [..., {features}]")


def _check_routing(x: torch.Tensor, chosen: object, shares: object) -> None:
    """Rows are read by number, without a look at how many there are."""
    tensors.require_dtypes({"chosen": sources.INDEX_DTYPES, "shares": _WIDE}, chosen=chosen, shares=shares)
    tensors.require_dense_in_eager(chosen=chosen, shares=shares)
    if x.dim() != 2 or chosen.dim() != 2 or chosen.shape[0] != x.shape[0] or shares.shape != chosen.shape:
        shapes = [list(given.shape) for given in (x, chosen, shares)]
        raise ValueError(f"x, chosen and shares are {shapes}; they must be [t, hidden], [t, top_k] and [t, top_k]")


def _check_experts(layer: PackedExperts, hidden: int, width: int) -> None:
    """Packed rows are whole K blocks and do not say how many elements they have."""
    of_gate_up, of_down = (*layer.gate_up.shape[:-1], hidden), (*layer.down.shape[:-1], width)
    if of_gate_up[1:] != (2 * width, hidden) or of_down != (of_gate_up[0], hidden, width):
        raise ValueError(
            f"gate_up and down have {list(of_gate_up)} and {list(of_down)} elements; they must be of [g, 2 * width, "
            "hidden] and [g, hidden, width]"
        )


def check_bias(name: str, bias: object, shape: tuple[int, ...]) -> None:
    """Raise unless it is None or a dense bias of a weight [*shape, k]."""
    if bias is None:
        return
    tensors.require_dtypes({name: _WIDE}, {name: ", or None"}, **{name: bias})
    tensors.require_dense(**{name: bias})
    if tuple(bias.shape) != tuple(shape):
        raise ValueError(f"{name} is {list(bias.shape)}; it must be {list(shape)}, a number for each row of weight")


def with_bias(y: torch.Tensor, bias: torch.Tensor | None, offs: torch.Tensor) -> torch.Tensor:
    """`y` [rows, n] with each row's expert's bias [g, n], added in place; rows of no expert get any."""
    if bias is None:
        return y
    if bias.device != y.device:  # torch adds nothing where one is on meta
        raise ValueError(f"bias is on {bias.device} but x is on {y.device}; move or load the layer as a whole")
    expert = torch.searchsorted(offs, torch.arange(len(y), device=y.device, dtype=offs.dtype), right=True)
    return y.add_(bias.index_select(0, expert.clamp_(max=len(bias) - 1)))
