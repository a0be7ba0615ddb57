"""Stand-ins for what a machine without a GPU lacks, in every process of a rehearsal: this file's folder lies on
PYTHONPATH.

NVML reports one H100. Compiled parts of the engines, and the packages that ENGINE_STAND_INS names, are modules whose
capitalised names are classes and whose other names are mocks: enough to be imported, nothing to compute with.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

COMPILED = [
    *(f"vllm.{name}" for name in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "cumem_allocator")),
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
]
ABSENT = [*COMPILED, *os.environ.get("ENGINE_STAND_INS", "").split()]
NVML = "vllm.third_party.pynvml"


class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def stand_in(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return AnyName(name, (), dict(_CLASS)) if name[0].isupper() else MagicMock(name=name)


_CLASS = {
    "__init__": lambda self, *_, **__: None,
    "__get_pydantic_core_schema__": classmethod(lambda *_: {"type": "any"}),
}
"""What classes have: they take everything, and are fields of pydantic's models."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == NVML or any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=name != NVML)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NVML:
            vars(module).update(nvml_of_one_h100())
        else:
            module.__version__, module.__getattr__ = "99.0", stand_in


def nvml_of_one_h100() -> dict:
    """The NVML functions that vLLM's platforms call, for one H100."""
    gib = 1 << 30
    answers = {
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * gib, free=79 * gib, used=gib),
        "nvmlSystemGetDriverVersion": "580.159.04",
        "nvmlDeviceGetNumaNodeId": 0,
        "nvmlDeviceGetP2PStatus": 0,
    }
    calls = {name: (lambda *_, answer=answer: answer) for name, answer in answers.items()}
    names = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "NVMLError": type("NVMLError", (Exception,), {})}
    return {**names, **calls, "NVML_P2P_CAPS_INDEX_NVLINK": 0, "NVML_P2P_STATUS_OK": 0}


def answer_what_is_supported() -> None:
    """Ops of vLLM that are asked whether they can do something: yes. One is looked up and not called. Others do not
    exist, which it expects."""
    import torch

    for name in ("_C", "_moe_C"):
        namespace = getattr(torch.ops, name)

        class Asked(type(namespace)):
            def __getattr__(self, name):
                if "supports" in name or name == "silu_and_mul":
                    return lambda *_: True
                return super().__getattr__(name)

        namespace.__class__ = Asked


sys.meta_path.insert(0, StandIns())
if os.environ.get("ENGINE_REHEARSAL") == "vllm":
    answer_what_is_supported()
