"""deep_tile inside of packages that people run, a module for each."""

from deep_tile import discovery

__getattr__ = discovery.submodules(__name__, "sglang", "transformers", "vllm")
