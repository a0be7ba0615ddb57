"""Training with FP8 products: linear layers whose three products are in FP8, on weights that stay as they are.

    import deep_tile.train

    deep_tile.train.convert(model)  # nn.Linear becomes deep_tile.train.Linear; parameters stay the same objects

Each name is imported at its first use.
"""

from importlib import import_module

_MODULES = {
    "Linear": "layers",
    "Recipe": "recipe",
    "convert": "layers",
    "experts": "experts",
    "linear": "linear",
    "linears": "linear",
    "predict": "predict",
}

__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
