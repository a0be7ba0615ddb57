"""Shared helpers of the engines' tests: stand-ins for an engine's modules, and layers as checkpoints fill them."""

import inspect
import sys
from types import ModuleType

import torch

from deep_tile import dequantize, quantize_weight


def add_modules(monkeypatch, modules: dict[str, dict]) -> None:
    """Add modules by their dotted names, with these attributes, and the packages that they lie in."""
    for path, values in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        for key, value in values.items():
            setattr(sys.modules[path], key, value)


def forget_modules(monkeypatch, *names: str) -> None:
    """Drop modules that were imported with stand-ins, so that the next test imports them with its own."""
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
        package, _, own = name.rpartition(".")
        monkeypatch.delattr(sys.modules[package], own, raising=False)


def assert_accepts(override, base, skipped: int = 0) -> None:
    """Whatever call `base` takes, `override` takes behind its first `skipped` parameters, and means the same by it."""
    own = dict(list(inspect.signature(override).parameters.items())[skipped:])
    for position, (name, wanted) in enumerate(inspect.signature(base).parameters.items()):
        assert list(own)[position : position + 1] == [name], f"{override.__qualname__} lacks {name} at {position}"
        assert own[name].kind == wanted.kind, name
        assert own[name].default == wanted.default, name
    more = list(own.values())[position + 1 :]
    assert all(parameter.default is not parameter.empty for parameter in more)


def layer_of(n: int, k: int, device: str = "cpu") -> torch.nn.Module:
    """A layer as a checkpoint fills it."""
    layer = torch.nn.Module()
    weight, scale = quantize_weight(torch.randn(n, k, device=device))
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    return layer


def stacked(experts: int, n: int, k: int, device: str = "cpu") -> list[torch.Tensor]:
    """Weights [experts, n, k] in FP8 with their scales."""
    weights = [quantize_weight(torch.randn(n, k, device=device)) for _ in range(experts)]
    return [torch.stack(each) for each in zip(*weights, strict=True)]


def product(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    return x.float() @ dequantize(layer.weight.data, layer.weight_scale_inv.data, block=(128, 128)).t()


def experts_of_tokens(x, ids, shares, up, down, *biases, limit=float("inf"), alpha=1.0, beta=0.0) -> torch.Tensor:
    """Each token's weighted sum of its experts' results, in FP32; gates come before ups. Numbers that are no expert's
    add nothing."""
    up_bias, down_bias = biases or [torch.zeros(len(up), 1, device=x.device)] * 2
    wanted = torch.zeros(x.shape, device=x.device)
    for token, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            if 0 <= expert < len(up):
                gate, other = (x[token].float() @ up[expert].t() + up_bias[expert]).chunk(2)
                gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
                h = gate * torch.sigmoid(alpha * gate) * (other + beta)
                wanted[token] += shares[token, j].float() * (h @ down[expert].t() + down_bias[expert])
    return wanted


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((out.float() - wanted).norm() / wanted.norm()).item()
