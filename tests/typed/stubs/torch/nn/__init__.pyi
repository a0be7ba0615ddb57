"""As torch/__init__.pyi."""

from typing import Any

from torch import Tensor

class Module:
    def __call__(self, input: Tensor) -> Any: ...

class Linear(Module): ...

def __getattr__(name: str) -> Any: ...
