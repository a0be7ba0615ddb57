"""Lazy lookup by name: submodules of packages, and, for torch, the ops in `torch.ops.deep_tile` and their
`FlopCounterMode` formulas, in either import order.

Nothing is imported early: an op's module is imported when its name is looked up in the namespace; all are imported
together with torch's FLOP counter, which looks up no formula. C++ lookups, e.g. torch.jit.load, find only ops that were
looked up by name before.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

_OPS = {
    "both": "cast_both cast_weight transpose_fp8",
    "dense": "fp8_gemm fp8_wgrad gemm gemm_gradient int8_gemm packed_gemm scaled_gemm",
    "experts": "combine silu_mul_cast_to_fp8 sort_by_expert",
    "gated": "swiglu_gradient_cast_both",
    "gemm_cast": "fp8_gemm_cast",
    "grouped": "fp8_grouped_gemm grouped_gemm packed_grouped_gemm scaled_grouped_gemm",
    "linear": "fp8_linear fp8_linear_backward",
    "logits": "mqa_logits paged_mqa_logits",
    "norms": "add_rms_norm_cast_to_fp8",
    "quantize": "per_block_cast_to_fp8 per_token_cast_rows_to_fp8 per_token_cast_to_fp8",
    "thin": "prenorm_gemm thin_gemm",
    "transposed": "transposed_cast_to_fp8",
    "wgrad": "fp8_grouped_wgrad",
}
"""Every op, by the module that defines it."""

OPS = {name: module for module, names in _OPS.items() for name in names.split()}

PRIVATE = ("add_rms_norm_cast_to_fp8", "fp8_linear_backward", "gemm_gradient", "per_token_cast_rows_to_fp8")
"""Ops that are no public function: parts of others, and of graphs."""

_COUNTER = "torch.utils.flop_counter"


def submodules(package: str, *names: str) -> Callable[[str], object]:
    """A package's `__getattr__` that imports these submodules at first use."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return find


def announce() -> None:
    """Have torch find the ops and their formulas, now or when it is imported."""
    _when_imported("torch", _offer_ops)
    _when_imported(_COUNTER, _offer_formulas)


def _offer_ops() -> None:
    ops = sys.modules["torch._ops"]

    class Namespace(ops._OpNamespace):
        __module__ = ops._OpNamespace.__module__  # the name under which ops are serialised

        def __getattr__(self, name: str):
            if name in OPS:
                import_module(f"deep_tile.{OPS[name]}")
            return super().__getattr__(name)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *OPS})

    ops.ops.deep_tile.__class__ = Namespace  # on the existing object, to which others may hold a reference


def _offer_formulas() -> None:
    for module in {*OPS.values()}:
        import_module(f"deep_tile.{module}")
    counter, ops = sys.modules[_COUNTER], sys.modules["torch._ops"].ops.deep_tile
    for name, formula in sys.modules["deep_tile.ops"].flop_formulas.items():
        counter.register_flop_formula(getattr(ops, name))(formula)


def _when_imported(name: str, then: Callable[[], None]) -> None:
    if sys.modules.get(name) is not None:
        then()
        return
    if not _waiting:
        sys.meta_path.insert(0, _Watcher)
    _waiting[name] = then


_waiting: dict[str, Callable[[], None]] = {}
"""Callbacks by the module whose import they wait for."""


class _Watcher:
    """Finds no module itself: runs callbacks after awaited modules are executed."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        if name not in _waiting:
            return None
        finders = (finder for finder in sys.meta_path if finder is not _Watcher and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, name, spec.loader.exec_module)
        return spec


def _execute(name: str, execute: Callable, module) -> None:
    execute(module)
    then = _waiting.pop(name, None)
    if not _waiting and _Watcher in sys.meta_path:
        sys.meta_path.remove(_Watcher)
    if then is not None:
        then()
