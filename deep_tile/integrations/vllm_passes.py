"""What deep_tile makes of the graphs that vLLM compiles: a gate that stands before a linear layer joins its cast.

The pattern is traced from vLLM's own gate and the op of `fp8_linear`, so it is found in whatever model has the one
before the other; layers that are not compiled, and gates of other kinds, stay as they are.
"""

import inspect
import sys
from functools import lru_cache

import torch
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

from deep_tile import __version__

_DTYPES = (torch.bfloat16, torch.float16)


class GatedCasts(InductorPass):
    """Has `silu(gate) * up` computed by the kernel that casts it: it is not written in between, nor rounded to 16 bits.

    Args:
        amax_floor, batch_invariant: of the layers' products.
    """

    def __init__(self, amax_floor: float, batch_invariant: bool) -> None:
        self._options = amax_floor, batch_invariant

    def __call__(self, graph: torch.fx.Graph) -> int:
        """How many gates it has found."""
        return sum(_pattern(dtype, *self._options).apply(graph) for dtype in _DTYPES)

    def uuid(self) -> str:
        return self.hash_source(inspect.getsource(sys.modules[__name__]), __version__, str(self._options))


def add(compilation_config, pass_: GatedCasts) -> None:
    """Have vLLM run the pass on every graph, unless the user has given another."""
    compilation_config.inductor_compile_config.setdefault(current_platform.pass_key, pass_)


@lru_cache
def _pattern(dtype: torch.dtype, amax_floor: float, batch_invariant: bool) -> PatternMatcherPass:
    """Of layers whose input and output have this dtype."""
    ops, product = torch.ops.deep_tile, {"out_dtype": dtype, "batch_invariant": batch_invariant}

    def in_turn(gate_up, weight, scale):
        return ops.fp8_linear(SiluAndMul.forward_native(gate_up), weight, scale, amax_floor=amax_floor, **product)

    def at_once(gate_up, weight, scale):
        a, a_scale = ops.silu_mul_cast_to_fp8(gate_up, amax_floor=amax_floor)
        # A served model's weights are written by no kernel that may still run.
        return ops.fp8_gemm(a, a_scale, weight, scale, constant_weights=True, **product)

    def has_plain_scale(match) -> bool:
        return match.kwargs["scale"].meta["val"].dtype == torch.float32

    found = PatternMatcherPass(pass_name="deep_tile_gated_casts")
    with torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
        weight = torch.empty(128, 128, device=current_platform.device_type).to(torch.float8_e4m3fn)
        gate_up, scale = weight.new_empty(8, 256, dtype=dtype), weight.new_empty(1, 1, dtype=torch.float32)
        given = [gate_up, weight, scale]
        register_replacement(in_turn, at_once, given, fwd_only, found, extra_check=has_plain_scale)
    return found
