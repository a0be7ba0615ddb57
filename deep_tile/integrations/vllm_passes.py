"""What deep_tile makes of the graphs that vLLM compiles: a gate or a norm that stands before a linear layer joins its
cast.

Gates are found by a pattern that is traced from vLLM's own and the op of `fp8_linear`, norms by the op that vLLM has
for an addition and RMSNorm, in whatever model has the one before the other. Layers that are not compiled, gates and
norms of other kinds, and norms that more than one layer reads, stay as they are.
"""

import inspect
import operator
import sys
from collections.abc import Callable
from functools import lru_cache

import torch
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

from deep_tile import __version__, norms

_DTYPES = (torch.bfloat16, torch.float16)


class FusedCasts(InductorPass):
    """Has `silu(gate) * up`, and RMSNorm of a sum, computed by the kernel that casts it: it is not written in between,
    nor rounded to 16 bits.

    Args:
        amax_floor, batch_invariant: of the layers' products.
    """

    def __init__(self, amax_floor: float, batch_invariant: bool) -> None:
        self._options = amax_floor, batch_invariant

    def __call__(self, graph: torch.fx.Graph) -> int:
        """How many gates and norms it has found."""
        return sum(_pattern(dtype, *self._options).apply(graph) for dtype in _DTYPES) + _join_norms(graph)

    def uuid(self) -> str:
        return self.hash_source(inspect.getsource(sys.modules[__name__]), __version__, str(self._options))


def add(compilation_config, pass_: FusedCasts) -> None:
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


def _join_norms(graph: torch.fx.Graph) -> int:
    """Put norms into the casts of the layers that alone read them; returns how many."""
    found = [node for node in graph.nodes if str(node.target) == "vllm_ir.fused_add_rms_norm.default"]
    layers = {norm: _layer_behind(norm) for norm in found if _is_taken(norm)}
    for norm, layer in layers.items():
        if layer is not None:
            _join_norm(norm, layer)
    return sum(layer is not None for layer in layers.values())


def _is_taken(norm: torch.fx.Node) -> bool:
    """Whether it is over whole rows that the kernel takes, and has a weight."""
    if norm.kwargs:
        return False
    x, residual, weight, _, *size = norm.args
    if weight is None or any(each is not None for each in size):
        return False
    first, *others = (node.meta["val"] for node in (x, residual, weight))
    alike = all(given.dtype == first.dtype for given in others)
    return alike and first.dtype in norms.NormCast.dtypes and first.dim() == 2 and norms.fits(first.shape[1])


def _layer_behind(norm: torch.fx.Node) -> torch.fx.Node | None:
    """The linear layer that alone reads what is normalised."""
    readers = [user for part in _parts(norm, 0) for user in part.users]
    if len(readers) != 1 or readers[0].target is not torch.ops.deep_tile.fp8_linear.default:
        return None
    (layer,) = readers
    is_plain = len(layer.args) == 3 and layer.kwargs.keys() <= {"amax_floor", "out_dtype", "batch_invariant"}
    return layer if is_plain and layer.args[2].meta["val"].dtype == torch.float32 else None


def _parts(norm: torch.fx.Node, number: int) -> list[torch.fx.Node]:
    return [user for user in norm.users if user.target is operator.getitem and user.args[1] == number]


def _join_norm(norm: torch.fx.Node, layer: torch.fx.Node) -> None:
    graph, ops, (x, residual, weight, epsilon, *_) = norm.graph, torch.ops.deep_tile, norm.args
    options = {"out_dtype": x.meta["val"].dtype, **layer.kwargs}
    floor = {name: options.pop(name) for name in ("amax_floor",) if name in options}
    with graph.inserting_before(norm):
        cast = _call(graph, ops.add_rms_norm_cast_to_fp8.default, x, residual, weight, epsilon=epsilon, **floor)
        a, a_scale, total = (_call(graph, operator.getitem, cast, number) for number in range(3))
    with graph.inserting_before(layer):
        # A served model's weights are written by no kernel that may still run.
        out = _call(graph, ops.fp8_gemm.default, a, a_scale, *layer.args[1:], constant_weights=True, **options)
    layer.replace_all_uses_with(out)
    for part in _parts(norm, 1):
        part.replace_all_uses_with(total)
    for node in (layer, *norm.users, norm):
        graph.erase_node(node)


def _call(graph: torch.fx.Graph, function: Callable, *arguments, **keywords) -> torch.fx.Node:
    node = graph.call_function(function, arguments, keywords)
    given, named = tree_map_only(torch.fx.Node, lambda node: node.meta["val"], (arguments, keywords))
    node.meta["val"] = function(*given, **named)
    return node
