"""deep_tile inside other packages, one module each."""

from deep_tile import discovery

__getattr__ = discovery.submodules(__name__, "sglang", "transformers", "vllm")
