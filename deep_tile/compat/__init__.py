"""Names that other packages have, for engines that look them up."""

from deep_tile import discovery

__getattr__ = discovery.submodules(__name__, "deep_ep", "deep_gemm")
