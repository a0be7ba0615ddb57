"""The plugin for vLLM, on stand-ins that have the signatures of vLLM 0.26 to 0.33, written anew and no longer than it
needs. `make test-engines` runs it within vLLM itself.
"""

import copy
import importlib
import inspect
import logging
import pickle
import sys
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch
from formats import draw
from helpers import same_bits
from stand_ins import (
    add_modules,
    assert_accepts,
    experts_of_tokens,
    forget_modules,
    layer_of,
    product,
    relative_error,
    stacked,
)
from torch._inductor.pattern_matcher import fwd_only
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_tile
from deep_tile import dequantize, fp8_gemm, fp8_linear, per_token_cast_to_fp8
from deep_tile.integrations import engines
from deep_tile.integrations import vllm as plugin

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FLOOR = {"amax_floor": 1e-10}
OURS = [f"deep_tile.integrations.vllm_{name}" for name in ("linear", "experts", "passes", "packed", "mxfp4", "int4")]
LINEAR, EXPERTS, PASSES, PACKED, MXFP4, INT4 = OURS
METHODS = "vllm.model_executor.layers.quantization.mxfp4"
COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
WNA16 = f"{COMPRESSED}.compressed_tensors_moe_wna16"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.fp8"
BLOCK_KEYS = ("128x128", "1x128")


# ---- vllm/model_executor/kernels/linear/{base,__init__}.py and scaled_mm/{BlockScaled,Scaled}MMLinearKernel.py


class GroupShape(NamedTuple):
    row: int
    col: int


class ScaleDesc(NamedTuple):
    static: bool
    group_shape: GroupShape


class QuantKey(NamedTuple):
    dtype: torch.dtype
    scale: ScaleDesc


@dataclass
class FP8ScaledMMLinearLayerConfig:
    weight_quant_key: QuantKey
    activation_quant_key: QuantKey
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype
    out_dtype: torch.dtype


class Params(NamedTuple):
    weight: torch.Tensor
    weight_scale_inv: torch.Tensor


class Fp8BlockScaledMMLinearKernel:
    apply_input_quant: ClassVar[bool] = True

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        raise NotImplementedError

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig):
        return not config.activation_quant_key.scale.static, "static"

    def input_quant_key(self) -> QuantKey | None:
        return None

    def _get_layer_params(self, layer: torch.nn.Module, **kwargs):
        return Params(layer.weight, layer.weight_scale_inv)

    def process_weights_after_loading(self, layer: torch.nn.Module):
        layer.processed = True

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs):
        """A stand-in's call: an input cast before comes as a pair; a class that casts gets a scale of ones."""
        params = self._get_layer_params(layer)
        a, scale = x if isinstance(x, tuple) else (x.view(-1, x.shape[-1]), None)
        assert isinstance(x, tuple) or not self.apply_input_quant
        scale = a.new_ones(1) if scale is None else scale
        out = self.apply_block_scaled_mm(A=a, B=params.weight, As=scale, Bs=params.weight_scale_inv)
        out = out if bias is None else out + bias
        shape = a.shape if isinstance(x, tuple) else x.shape
        return out.to(dtype=self.config.out_dtype).view(*shape[:-1], params.weight.shape[0])

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError


# ---- vllm/model_executor/layers/fused_moe/{modular_kernel,activation,oracle/fp8}.py


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"


class FusedMoEExpertsModular:
    def __init__(self, moe_config, quant_config, max_num_tokens: int | None = None, num_dispatchers: int | None = None):
        self.moe_config, self.quant_config = moe_config, quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    w1_scale = property(lambda self: self.quant_config.w1_scale)
    w2_scale = property(lambda self: self.quant_config.w2_scale)
    w1_bias = property(lambda self: self.quant_config.w1_bias)
    w2_bias = property(lambda self: self.quant_config.w2_bias)
    block_shape = property(lambda self: self.quant_config.block_shape)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        wrong = {
            "device": not cls._supports_current_device(),
            "activation": not cls._supports_activation(moe_config.activation),
            "scheme": not cls._supports_quant_scheme(weight_key, activation_key),
            "parallel": not cls._supports_parallel_config(moe_config.moe_parallel_config),
            "shape": not cls._supports_shape(moe_config.hidden_dim),
            "format": activation_format != cls.activation_format(),
        }
        reason = next((name for name, is_wrong in wrong.items() if is_wrong), None)
        return reason is None, reason

    @staticmethod
    def activation_format(): ...

    @staticmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool: ...

    @staticmethod
    def _supports_activation(activation) -> bool: ...

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool: ...

    @staticmethod
    def _supports_shape(hidden_dim) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self): ...

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ): ...

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ) -> None: ...


# ---- vllm/model_executor/layers/activation.py and vllm/compilation/passes/inductor_pass.py


class SiluAndMul:
    @staticmethod
    def forward_native(x: torch.Tensor) -> torch.Tensor:
        d = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :d]) * x[..., d:]


class InductorPass:
    @staticmethod
    def hash_source(*sources: str) -> str:
        return "".join(sources)


class Fp8MoeBackend(Enum):
    TRITON = "TRITON"
    BATCHED_TRITON = "BATCHED_TRITON"
    DEEPGEMM = "DEEPGEMM"


# ---- vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py


class WNA16MoEBackend(Enum):
    MARLIN = "MARLIN"
    TRITON = "TRITON"


class Prepared(NamedTuple):
    """FusedMoEKernel."""

    prepare_finalize: str
    fused_experts: FusedMoEExpertsModular


def wna16_method(name: str, chosen: WNA16MoEBackend = WNA16MoEBackend.MARLIN) -> dict:
    """What a module with a method for INT4 holds, the class by its name."""

    def init(self, weight_quant, input_quant, moe, layer_name=None):
        self.weight_quant, self.moe = weight_quant, moe
        self.wna16_backend, self.experts_cls = chosen, "its own"

    def convert(backend, layer, quant_config, input_dtype, w13, w2, w13_scale, w2_scale, **others):
        return backend, w13

    def make(moe_quant_config, moe_config, experts_cls, backend=WNA16MoEBackend.MARLIN, routing_tables=None, **others):
        return experts_cls

    functions = {"convert_to_wna16_moe_kernel_format": convert, "make_wna16_moe_kernel": make}
    return functions | {name: type(name, (), {"__init__": init})}


class Platform:
    """A platform with one GPU of a compute capability, or with none."""

    device_type, pass_key = "cpu", "post_grad_custom_post_pass"

    def __init__(self, capability: int | None):
        self._capability = capability

    def is_cuda(self) -> bool:
        return self._capability is not None

    def is_device_capability(self, capability: int, device_id: int = 0) -> bool:
        return self._capability == capability


@pytest.fixture
def vllm(monkeypatch):
    """Stand-ins for vLLM 0.30.1 on a Hopper GPU, the variable set, nothing registered; gives what tests look at."""

    def select_fp8_moe_backend(config, weight_key, activation_key, allow_vllm_cutlass=False):
        return Fp8MoeBackend.DEEPGEMM, "its own"

    def select_mxfp4(config, activation_key=None):
        return "MARLIN", "its own"

    def prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False, use_monolithic=False):
        return f"for {routing_tables}" if allow_new_interface else None

    def convert_mxfp4(mxfp4_backend, layer, w13_weight, **others):
        return mxfp4_backend, w13_weight

    mxfp4 = dict.fromkeys(("select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"), select_mxfp4)
    converts = ("convert_gpt_oss_weight_to", "convert_weight_to")
    mxfp4 |= dict.fromkeys((f"{name}_mxfp4_moe_kernel_format" for name in converts), convert_mxfp4)
    wna16 = wna16_method("CompressedTensorsWNA16MoEMethod")
    fused_moe, layers = "vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers"
    forms = SimpleNamespace(BatchedExperts="batched", Standard="standard")
    modular = {"FusedMoEExpertsModular": FusedMoEExpertsModular, "FusedMoEActivationFormat": forms}
    modular |= {"FusedMoEKernel": Prepared, "TopKWeightAndReduce": object, "ExpertTokensMetadata": SimpleNamespace}
    compilation = SimpleNamespace(inductor_compile_config={})
    steps = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64), compilation_config=compilation)
    modules = {
        "vllm": {"__version__": "0.30.1"},
        "vllm.envs": {
            "environment_variables": {"VLLM_OTHER": lambda: "x"},
            "VLLM_BATCH_INVARIANT": False,
            "VLLM_MARLIN_INPUT_DTYPE": None,
        },
        "vllm.config": {"get_current_vllm_config": lambda: steps},
        "vllm.model_executor.kernels.linear": {
            "Fp8BlockScaledMMLinearKernel": Fp8BlockScaledMMLinearKernel,
            "FP8ScaledMMLinearLayerConfig": FP8ScaledMMLinearLayerConfig,
            "_POSSIBLE_FP8_BLOCK_KERNELS": {"cuda": ["DeepGEMM", "Triton"]},
        },
        f"{layers}.quantization.utils.quant_utils": {
            "GroupShape": GroupShape,
            "kFp8Static128BlockSym": BLOCK_KEYS[0],
            "kFp8Dynamic128Sym": BLOCK_KEYS[1],
            "kMxfp4Static": "mxfp4",
            "kInt4Static": "int4",
        },
        WNA16: dict(wna16),
        f"{fused_moe}.oracle.int_wna16": {"WNA16MoEBackend": WNA16MoEBackend},
        f"{fused_moe}.all2all_utils": {"maybe_make_prepare_finalize": prepare_finalize},
        f"{fused_moe}.oracle.mxfp4": {"_resolve_activation_key": lambda key: key},
        METHODS: dict(mxfp4),
        f"{layers}.quantization.fp8": {"select_fp8_moe_backend": select_fp8_moe_backend},
        f"{layers}.activation": {"SiluAndMul": SiluAndMul},
        "vllm.compilation.passes.inductor_pass": {"InductorPass": InductorPass},
        "vllm.platforms": {"current_platform": Platform(90), "PlatformEnum": SimpleNamespace(CUDA="cuda")},
        f"{fused_moe}.modular_kernel": modular,
        f"{fused_moe}.activation": {"MoEActivation": MoEActivation},
        f"{fused_moe}.topk_weight_and_reduce": {
            "TopKWeightAndReduceDelegate": lambda: "delegate",
            "TopKWeightAndReduceNoOP": lambda: "nothing",
        },
        ORACLE: {"select_fp8_moe_backend": select_fp8_moe_backend, "Fp8MoeBackend": Fp8MoeBackend},
    }
    monkeypatch.setenv("VLLM_USE_DEEP_TILE", "1")
    forget_modules(monkeypatch, *OURS)
    add_modules(monkeypatch, modules)
    engine = SimpleNamespace(
        variables=sys.modules["vllm.envs"].environment_variables,
        kernels=sys.modules["vllm.model_executor.kernels.linear"]._POSSIBLE_FP8_BLOCK_KERNELS,
        own_select=select_fp8_moe_backend,
        own_mxfp4=mxfp4,
        own_wna16=wna16,
        own_init=wna16["CompressedTensorsWNA16MoEMethod"].__init__,
        inductor=compilation.inductor_compile_config,
        selects=lambda: [sys.modules[name].select_fp8_moe_backend for name in (ORACLE, f"{layers}.quantization.fp8")],
    )
    yield engine
    plugin.unregister()
    forget_modules(monkeypatch, *OURS)


@pytest.fixture
def linear(vllm):
    return importlib.import_module(LINEAR)


@pytest.fixture
def experts(vllm):
    return importlib.import_module(EXPERTS)


def is_untouched(vllm) -> bool:
    methods, wna16 = vars(sys.modules[METHODS]), vars(sys.modules[WNA16])
    is_theirs = vllm.own_mxfp4.items() <= methods.items() and vllm.selects() == [vllm.own_select] * 2
    is_theirs &= vllm.own_wna16.items() <= wna16.items()
    is_theirs &= wna16["CompressedTensorsWNA16MoEMethod"].__init__ is vllm.own_init
    return vllm.kernels == {"cuda": ["DeepGEMM", "Triton"]} and is_theirs


# ---- registering


def test_registers_once_and_in_front(vllm):
    plugin.register()
    (first,), others = vllm.kernels["cuda"][:1], vllm.kernels["cuda"][1:]
    assert (first.__name__, others) == ("DeepTileFp8BlockScaledMMKernel", ["DeepGEMM", "Triton"])
    selects = vllm.selects()
    assert selects[0] is selects[1] and selects[0].__wrapped__ is vllm.own_select
    plugin.register()
    assert vllm.kernels["cuda"] == [first, *others] and vllm.selects() == selects
    plugin.unregister()
    assert is_untouched(vllm)


def test_the_variable_is_part_of_the_key_of_compiled_graphs(vllm, monkeypatch):
    """vLLM's key covers every value in its table of variables."""
    monkeypatch.delenv("VLLM_USE_DEEP_TILE")
    plugin.register()
    assert not vllm.variables["VLLM_USE_DEEP_TILE"]() and is_untouched(vllm)
    monkeypatch.setenv("VLLM_USE_DEEP_TILE", "1")
    plugin.register()
    assert vllm.variables["VLLM_USE_DEEP_TILE"]() == deep_tile.__version__ and not is_untouched(vllm)


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_without_the_variable_nothing_is_touched_nor_said(vllm, monkeypatch, caplog, value):
    if value is None:
        monkeypatch.delenv("VLLM_USE_DEEP_TILE")
    else:
        monkeypatch.setenv("VLLM_USE_DEEP_TILE", value)
    plugin.register()
    assert is_untouched(vllm) and not caplog.records and not {*OURS} & {*sys.modules}


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "0.34.0rc1", "1.0", "dev", "0.1.dev7+gabc"])
def test_an_unknown_release_is_refused_in_one_line(vllm, monkeypatch, caplog, version):
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    plugin.register()
    plugin.register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and version in record.getMessage() and "\n" not in record.getMessage()
    assert is_untouched(vllm) and not vllm.variables["VLLM_USE_DEEP_TILE"]()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.model_executor.kernels.linear", "_POSSIBLE_FP8_BLOCK_KERNELS"),
        ("vllm.model_executor.kernels.linear", "Fp8BlockScaledMMLinearKernel"),
        (ORACLE, "select_fp8_moe_backend"),
        (ORACLE, "Fp8MoeBackend"),
        ("vllm.platforms", "PlatformEnum"),
        ("vllm.envs", "environment_variables"),
    ],
)
def test_a_registration_point_that_is_missing_is_refused_in_one_line(vllm, monkeypatch, caplog, module, name):
    with monkeypatch.context() as changed:
        changed.delattr(sys.modules[module], name)
        plugin.register()
    (record,) = caplog.records
    assert name in record.getMessage() and "\n" not in record.getMessage() and is_untouched(vllm)


def test_a_value_that_says_neither_is_refused_in_one_line(vllm, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_USE_DEEP_TILE", "maybe")
    plugin.register()
    assert "VLLM_USE_DEEP_TILE is 'maybe'" in caplog.text and len(caplog.records) == 1 and is_untouched(vllm)


# ---- linear layers


def config_of(*, static=False, group=(1, 128), block=(128, 128), shape=(136, 272), out_dtype=torch.bfloat16):
    fp8 = torch.float8_e4m3fn
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=QuantKey(fp8, ScaleDesc(True, GroupShape(*block))),
        activation_quant_key=QuantKey(fp8, ScaleDesc(static, GroupShape(*group))),
        weight_shape=shape,
        input_dtype=out_dtype,
        out_dtype=out_dtype,
    )


def test_accepting_less_is_noticed():
    def base(a, b=None): ...

    def renamed(a, c=None): ...

    def fewer(a): ...

    def demanding(a, b=None, *, c): ...

    def more(a, b=None, c=None): ...

    assert_accepts(more, base)
    for override in (renamed, fewer, demanding):
        with pytest.raises(AssertionError):
            assert_accepts(override, base)


def test_linear_has_vllms_signatures(linear):
    kernel = linear.DeepTileFp8BlockScaledMMKernel
    own = [name for name in vars(Fp8BlockScaledMMLinearKernel) if name in vars(kernel) and name[:2] != "__"]
    own.remove("apply_input_quant")
    assert {"is_supported", "can_implement", "process_weights_after_loading", "apply_block_scaled_mm"} == {*own}
    for name in own:
        assert_accepts(getattr(kernel, name), getattr(Fp8BlockScaledMMLinearKernel, name))


def test_linear_is_for_hopper(linear, monkeypatch):
    kernel = linear.DeepTileFp8BlockScaledMMKernel
    assert kernel.is_supported() == kernel.is_supported(90) == (True, None)
    assert kernel.is_supported(100)[0] is kernel.is_supported(89)[0] is False
    for capability, said in ((100, "Hopper"), (None, "CUDA")):
        monkeypatch.setattr(linear, "current_platform", Platform(capability))
        supported, reason = kernel.is_supported()
        assert not supported and said in reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"static": True}, "static"),
        ({"group": (1, 64)}, "1x128"),
        ({"group": (-1, -1)}, "1x128"),
        ({"block": (64, 128)}, "128x128"),
        ({"out_dtype": torch.float64}, "float64"),
        ({"shape": (128, 200)}, "16"),
    ],
    ids=str,
)
def test_linear_says_what_it_cannot(linear, changed, said):
    can_implement, reason = linear.DeepTileFp8BlockScaledMMKernel.can_implement(config_of(**changed))
    assert can_implement is False and said in reason


@pytest.mark.parametrize("shape", [(2112, 7168), (72, 272), (1, 16)])
def test_linear_says_what_it_can(linear, shape):
    assert linear.DeepTileFp8BlockScaledMMKernel.can_implement(config_of(shape=shape)) == (True, None)


@DEVICES
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_multiplies(linear, device, out_dtype):
    layer = layer_of(136, 272, device)
    kernel = linear.DeepTileFp8BlockScaledMMKernel(config_of(out_dtype=out_dtype))
    kernel.process_weights_after_loading(layer)
    assert layer.processed
    x = torch.randn(2, 5, 272, device=device, dtype=out_dtype)
    bias = torch.randn(136, device=device, dtype=out_dtype)
    out = kernel.apply_weights(layer, x, bias)
    assert (out.dtype, out.shape) == (out_dtype, (2, 5, 136))
    assert relative_error(out, product(x, layer) + bias.float()) < 0.05
    assert same_bits(out, fp8_linear(x, layer.weight, layer.weight_scale_inv, **FLOOR) + bias)


@DEVICES
def test_linear_takes_what_is_cast_already(linear, device):
    layer = layer_of(136, 272, device)
    kernel = linear.DeepTileFp8BlockScaledMMKernel(config_of())
    x = torch.randn(7, 272, device=device, dtype=torch.bfloat16)
    for layout in ("row", "m", "m_aligned"):
        cast = per_token_cast_to_fp8(x, scale_layout=layout)
        out = kernel.apply_weights(layer, cast)
        assert same_bits(out, fp8_gemm(*cast, layer.weight, layer.weight_scale_inv))


def test_linear_is_one_graph(linear):
    layer, kernel = layer_of(136, 272), linear.DeepTileFp8BlockScaledMMKernel(config_of())
    compiled = torch.compile(kernel.apply_weights, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (3, 8):
            x = torch.randn(m, 272).bfloat16()
            assert same_bits(compiled(layer, x), kernel.apply_weights(layer, x))


@pytest.mark.gpu
def test_linear_compiles_nothing_once_it_is_loaded(linear):
    layer = layer_of(136, 272, "cuda")
    kernel = linear.DeepTileFp8BlockScaledMMKernel(config_of())
    kernel.process_weights_after_loading(layer)
    before = deep_tile.compilations()
    for m in (1, 3, 17, 64):
        kernel.apply_weights(layer, torch.randn(m, 272, device="cuda", dtype=torch.bfloat16))
    assert deep_tile.compilations() == before


def test_what_is_made_ready_is_so_once(linear, monkeypatch):
    asked, casts = [], []
    monkeypatch.setattr(linear.api, "precompile", lambda *given, **options: asked.append((given, options)))
    monkeypatch.setattr(linear.cast, "load_kernels", lambda *given: casts.append(given))
    for shape in ((256, 128, 64), (136, 272, 64), (256, 128, 64)):
        linear.make_ready((shape,), out_dtype=torch.bfloat16)
    assert [given for given, _ in asked] == [(((256, 128, 64),),), (((136, 272, 64),),)]
    assert len(casts) == 2 and asked[0][1] == {"out_dtype": torch.bfloat16}


def test_batch_invariance_is_asked_for(linear, monkeypatch):
    monkeypatch.setattr(linear.envs, "VLLM_BATCH_INVARIANT", True)
    seen = []
    monkeypatch.setattr(linear.linear, "fp8_linear", lambda *given, **options: seen.append(options))
    kernel = linear.DeepTileFp8BlockScaledMMKernel(config_of())
    kernel.apply_block_scaled_mm(torch.zeros(1, 272).bfloat16(), None, None, None)
    assert seen[0]["batch_invariant"] is True


# ---- gates and norms before linear layers, in compiled graphs


def layer_of_cast(h, weight, scale):
    return torch.ops.deep_tile.fp8_linear(h, weight, scale, out_dtype=h.dtype, **FLOOR)


def gated_layer(gate_up, weight, scale):
    return layer_of_cast(SiluAndMul.forward_native(gate_up), weight, scale)


def passed(linear, function, *given, **options):
    """A function's graph after the pass, and how many gates and norms have joined a cast."""
    fused_casts = linear.vllm_passes.FusedCasts(**{**FLOOR, "batch_invariant": False, **options})
    with FakeTensorMode() as mode:
        graph = fwd_only(function, [mode.from_tensor(x) for x in given])
        count = fused_casts(graph.graph)
    graph.recompile()
    return graph, count


def gate_of(tokens=5, dtype=torch.bfloat16, device="cpu"):
    layer = layer_of(136, 272, device)
    gate_up = torch.randn(tokens, 544, dtype=dtype, device=device)
    return gate_up, layer.weight, layer.weight_scale_inv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gate_joins_the_cast_that_follows(linear, dtype):
    given = gate_of(dtype=dtype)
    graph, count = passed(linear, gated_layer, *given)
    called = [
        node.target for node in graph.graph.nodes if node.op == "call_function" and "deep_tile" in str(node.target)
    ]
    ops = torch.ops.deep_tile
    assert count == 1 and called == [ops.silu_mul_cast_to_fp8.default, ops.fp8_gemm.default]
    out = graph(*given)
    a = deep_tile.silu_mul_cast_to_fp8(given[0], **FLOOR)
    assert same_bits(out, fp8_gemm(*a, *given[1:], out_dtype=dtype))
    assert relative_error(out, gated_layer(*given).float()) < 0.05


def test_a_gate_that_something_else_reads_stays(linear):
    def twice(gate_up, weight, scale):
        h = SiluAndMul.forward_native(gate_up)
        return h, layer_of_cast(h, weight, scale)

    assert passed(linear, twice, *gate_of())[1] == 0


def test_other_gates_layers_and_scales_stay(linear):
    def other(gate_up, weight, scale):
        gate, up = gate_up.chunk(2, -1)
        return layer_of_cast(torch.nn.functional.gelu(gate) * up, weight, scale)

    gate_up, weight, scale = gate_of()
    for function, given, options in (
        (other, (gate_up, weight, scale), {}),
        (gated_layer, gate_of(dtype=torch.float32), {}),
        (gated_layer, (gate_up, weight, scale.bfloat16()), {}),
        (gated_layer, (gate_up, weight, scale), {"batch_invariant": True}),
        (gated_layer, (gate_up, weight, scale), {"amax_floor": 1e-6}),
    ):
        assert passed(linear, function, *given, **options)[1] == 0


@pytest.fixture(scope="module")
def norm_op():
    """vLLM's op for an addition and RMSNorm, as its compiled graphs have it."""
    library = torch.library.Library("vllm_ir", "FRAGMENT")
    library.define(
        "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) "
        "-> (Tensor, Tensor)"
    )

    def add_norm(x, x_residual, weight, epsilon, variance_size=None):
        total = x.float() + x_residual.float()
        normed = total * torch.rsqrt(total[..., :variance_size].square().mean(-1, keepdim=True) + epsilon)
        normed = normed if weight is None else normed * weight
        return normed.to(x.dtype), total.to(x.dtype)

    library.impl("fused_add_rms_norm", add_norm, "CompositeExplicitAutograd")
    yield torch.ops.vllm_ir.fused_add_rms_norm
    library._destroy()


def norm_of(tokens=5, dtype=torch.bfloat16):
    layer = layer_of(136, 272)
    x, residual = torch.randn(2, tokens, 272, dtype=dtype)
    return x, residual, torch.rand(272, dtype=dtype), layer.weight, layer.weight_scale_inv


def test_a_norm_joins_the_cast_that_follows(linear, norm_op):
    def normed_layer(x, residual, weight, *layer):
        normed, total = norm_op(x, residual, weight, 1e-5)
        return layer_of_cast(normed, *layer), total * 2

    given, ops = norm_of(), torch.ops.deep_tile
    graph, count = passed(linear, normed_layer, *given)
    assert count == 1 and "vllm_ir" not in graph.code
    out, total = graph(*given)
    *a, _ = ops.add_rms_norm_cast_to_fp8(*given[:3], epsilon=1e-5, **FLOOR)
    assert same_bits(out, fp8_gemm(*a, *given[3:]))
    wanted, wanted_total = normed_layer(*given)
    assert relative_error(out, wanted.float()) < 0.05 and same_bits(total, wanted_total)


def test_other_norms_stay(linear, norm_op):
    def norm_read_twice(x, residual, weight, *layer):
        normed, _ = norm_op(x, residual, weight, 1e-5)
        return normed, layer_of_cast(normed, *layer)

    def norm_of_part(x, residual, weight, *layer):
        return layer_of_cast(norm_op(x, residual, weight, 1e-5, 128)[0], *layer)

    def norm_without_weight(x, residual, _, *layer):
        return layer_of_cast(norm_op(x, residual, None, 1e-5)[0], *layer)

    def norm_before_another(x, residual, weight, *_):
        return norm_op(x, residual, weight, 1e-5)[0].relu()

    def norm_with_bias(x, residual, weight, *layer):
        bias = x.new_zeros(136)
        return torch.ops.deep_tile.fp8_linear(norm_op(x, residual, weight, 1e-5)[0], *layer, bias, **FLOOR)

    def usual(x, residual, weight, *layer):
        return layer_of_cast(norm_op(x, residual, weight, 1e-5)[0], *layer)

    x, residual, weight, *layer = given = norm_of()
    assert passed(linear, usual, *given)[1] == 1
    for other in (norm_read_twice, norm_of_part, norm_without_weight, norm_before_another, norm_with_bias):
        assert passed(linear, other, *given)[1] == 0, other
    for changed in (
        norm_of(dtype=torch.float16),
        (x, residual, weight.float(), *layer),
        (x[None], residual[None], weight, *layer),
    ):
        assert passed(linear, usual, *changed)[1] == 0


def test_layers_have_the_pass_run_unless_there_is_another(linear, vllm):
    linear.DeepTileFp8BlockScaledMMKernel(config_of())
    (given,) = vllm.inductor.items()
    linear.DeepTileFp8BlockScaledMMKernel(config_of())
    assert [given] == [*vllm.inductor.items()] and given[0] == "post_grad_custom_post_pass"
    assert isinstance(given[1], linear.vllm_passes.FusedCasts)
    vllm.inductor["post_grad_custom_post_pass"] = "the user's"
    linear.DeepTileFp8BlockScaledMMKernel(config_of())
    assert vllm.inductor == {"post_grad_custom_post_pass": "the user's"}


def test_the_pass_can_be_copied_and_its_key_tells_options(linear):
    fused_casts = linear.vllm_passes.FusedCasts
    given = fused_casts(1e-10, False)
    assert copy.deepcopy(given).uuid() == given.uuid() == pickle.loads(pickle.dumps(given)).uuid()
    assert len({given.uuid(), fused_casts(1e-10, True).uuid(), fused_casts(1e-6, False).uuid()}) == 3


# ---- experts


def parallel(**changed):
    ways = ("use_all2all_kernels", "use_ag_rs_all2all_kernels", "use_deepep_ht_kernels")
    return SimpleNamespace(**dict.fromkeys((*ways, "use_batched_activation_format"), False) | changed)


def moe_config(**changed):
    usual = {"moe_backend": "auto", "in_dtype": torch.bfloat16, "has_bias": False, "hidden_dim": 256}
    usual |= {"intermediate_size_per_partition": 128, "activation": MoEActivation.SILU}
    usual |= {"moe_parallel_config": parallel(), "swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None}
    return SimpleNamespace(**usual | changed)


def quant_config(w1_scale, w2_scale, **changed):
    gating = dict.fromkeys(("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta"))
    return SimpleNamespace(w1_scale=w1_scale, w2_scale=w2_scale, **gating | changed)


@pytest.mark.parametrize("name", ["DeepTileExperts", "DeepTileBatchedExperts"])
def test_experts_have_vllms_signatures(experts, name):
    ours = getattr(experts, name)
    for declared in ("is_supported_config", "workspace_shapes", "apply", "_supports_quant_scheme"):
        assert_accepts(getattr(ours, declared), getattr(FusedMoEExpertsModular, declared))
    abstract = [name for name, value in vars(FusedMoEExpertsModular).items() if inspect.isfunction(value)]
    assert all(getattr(ours, name) is not getattr(FusedMoEExpertsModular, name) for name in abstract if name[0] != "_")


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ({}, "DeepTileExperts"),
        ({"moe_parallel_config": parallel(use_batched_activation_format=True)}, "DeepTileBatchedExperts"),
        ({"moe_parallel_config": parallel(use_all2all_kernels=True, use_deepep_ht_kernels=True)}, "DeepTileExperts"),
        ({"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE}, "DeepTileExperts"),
        ({"activation": MoEActivation.SWIGLUOAI}, None),
        ({"activation": MoEActivation.GELU}, None),
        ({"moe_parallel_config": parallel(use_all2all_kernels=True)}, None),
        ({"moe_backend": "triton"}, None),
        ({"in_dtype": torch.float16}, None),
        ({"has_bias": True}, None),
        ({"hidden_dim": 200}, None),
        ({"intermediate_size_per_partition": 200}, None),
    ],
    ids=str,
)
def test_experts_are_chosen_where_they_fit(vllm, caplog, changed, chosen):
    plugin.say_once.cache_clear()
    caplog.set_level(logging.INFO)
    plugin.register()
    select = vllm.selects()[1]
    backend, found = select(config=moe_config(**changed), weight_key="128x128", activation_key="1x128")
    assert found == "its own" if chosen is None else found.__name__ == chosen
    assert (f"Using {chosen}" in caplog.messages) is (chosen is not None)
    wanted = {None: "DEEPGEMM", "DeepTileExperts": "TRITON", "DeepTileBatchedExperts": "BATCHED_TRITON"}[chosen]
    assert backend is Fp8MoeBackend[wanted]


@pytest.mark.parametrize("keys", [("128x128", "tensor"), (None, None), ("64x64", "1x128")], ids=str)
def test_experts_of_other_scales_are_vllms(vllm, keys):
    plugin.register()
    assert vllm.selects()[0](moe_config(), *keys, allow_vllm_cutlass=True) == (Fp8MoeBackend.DEEPGEMM, "its own")


def test_experts_are_for_hopper(vllm, monkeypatch):
    plugin.register()
    monkeypatch.setattr(sys.modules[LINEAR], "current_platform", Platform(100))
    assert vllm.selects()[0](moe_config(), *BLOCK_KEYS)[1] == "its own"


def dequantized(weights, scales):
    pairs = zip(weights, scales, strict=True)
    return torch.stack([dequantize(*pair, block=(128, 128)) for pair in pairs])


def run_experts(ours, x, w1, w2, shares, ids, *, scale=None, expert_map=None, on_input=False, everyone=None, **given):
    """Call as vLLM does, with the output in the memory of gate and up."""
    tokens, hidden = x.shape
    activation = given.get("activation", MoEActivation.SILU)
    shapes = ours.workspace_shapes(tokens, w1.shape[1], hidden, ids.shape[1], 8, len(w1), None, activation)
    size = max(torch.Size(shape).numel() for shape in (shapes[0], shapes[2]))
    both = torch.full((size,), float("nan"), dtype=torch.bfloat16, device=x.device)
    work13, output = (both[: torch.Size(shape).numel()].view(shape) for shape in (shapes[0], shapes[2]))
    work2 = torch.full(shapes[1], float("nan"), dtype=torch.bfloat16, device=x.device)
    everyone = len(w1) if everyone is None else everyone
    ours.apply(
        *(output, x, w1, w2, shares, ids, activation, everyone, expert_map, scale, None, work13, work2, None),
        on_input,
    )
    return output


@DEVICES
@pytest.mark.parametrize(
    ("width", "given"),
    [*((128, given) for given in ("wide", "fp8", "map", "on_input", "bf16 shares")), (144, "wide"), (144, "map")],
)
def test_experts_multiply(experts, device, width, given):
    """Odd widths have scales by halves; an expert_map knows experts of others; -1 is no expert."""
    count, hidden, tokens = 4, 256, 5
    (up, up_scale), (down, w2_scale) = stacked(count, 2 * width, hidden, device), stacked(count, hidden, width, device)
    blocks = -(-width // 128)
    halves = [stacked(count, width, hidden, device) for _ in range(2)]
    if width % 128:
        up, up_scale = torch.cat([h[0].view(torch.uint8) for h in halves], 1), torch.cat([h[1] for h in halves], 1)
        up = up.view(torch.float8_e4m3fn)
        assert up_scale.shape[1] == 2 * blocks
        wide_up = torch.cat([dequantized(*half) for half in halves], 1)
    else:
        wide_up = dequantized(up, up_scale)
    ours = experts.DeepTileExperts(moe_config(), quant_config(up_scale, w2_scale))
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(count, device=device)[:2] for _ in range(tokens)]).int()
    ids[0, 1] = -1
    shares = torch.rand(tokens, 2, device=device)
    local, options = ids, {}
    if given == "fp8":
        x, options["scale"] = per_token_cast_to_fp8(x, scale_layout="row")
    if given == "map":
        table = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=device)
        local = torch.where(ids < 0, -1, table[ids.clamp(min=0).long()])
        options = {"expert_map": table, "everyone": 8}
        up, down, up_scale, w2_scale = up[:3], down[:3], up_scale[:3], w2_scale[:3]
        ours = experts.DeepTileExperts(moe_config(), quant_config(up_scale, w2_scale))
    if given == "on_input":
        options, used = {"on_input": True}, torch.ones_like(shares)
    else:
        shares = shares.bfloat16() if given == "bf16 shares" else shares
        used = shares
    out = run_experts(ours, x, up, down, shares, ids, **options)
    seen = x if given != "fp8" else dequantize(x, options["scale"], block=(1, 128))
    assert relative_error(out, experts_of_tokens(seen, local, used, wide_up, dequantized(down, w2_scale))) < 0.08


@DEVICES
def test_gating_of_experts(experts, device):
    """SILU takes a limit alone. The packed variant also takes alpha and beta; the model's values are the default."""
    (w1, w1_scale), (w2, w2_scale) = stacked(2, 256, 256, device), stacked(2, 256, 128, device)
    x = torch.randn(5, 256, device=device, dtype=torch.bfloat16) / 10
    ids, shares = torch.zeros(5, 1, device=device).int(), torch.ones(5, 1, device=device)

    def run(activation, in_model, in_quantisation):
        ours = experts.DeepTileExperts(moe_config(**in_model), quant_config(w1_scale, w2_scale, **in_quantisation))
        return run_experts(ours, x, w1, w2, shares, ids, activation=activation)

    silu, packed = MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE
    numbers = {"gemm1_clamp_limit": 1.5, "gemm1_alpha": 1.7, "gemm1_beta": 1.0}
    plain, limited, gated = run(silu, {}, {}), run(silu, {}, {"gemm1_clamp_limit": 1.5}), run(packed, {}, numbers)
    assert same_bits(run(silu, {}, numbers), limited) and not same_bits(plain, limited)
    assert not same_bits(gated, limited)
    of_model = {"swiglu_limit": 1.5, "swiglu_alpha": 1.7, "swiglu_beta": 1.0}
    assert same_bits(run(packed, of_model, {}), gated)
    wide = dequantized(w1, w1_scale), dequantized(w2, w2_scale)
    wanted = experts_of_tokens(x, ids, shares, *wide, limit=1.5, alpha=1.7, beta=1.0)
    assert relative_error(gated, wanted) < 0.08


@DEVICES
def test_batched_experts_multiply(experts, device):
    """Rows behind each expert's last are not looked at; the output may lie where gate and up lay, as vLLM has it."""
    count, tokens, hidden, width = 4, 10, 256, 128
    (w1, w1_scale), (w2, w2_scale) = stacked(count, 2 * width, hidden, device), stacked(count, hidden, width, device)
    given = moe_config(), quant_config(w1_scale, w2_scale)
    ours = experts.DeepTileBatchedExperts(*given, max_num_tokens=5, num_dispatchers=2)
    counts = torch.tensor([3, 0, 10, 1], dtype=torch.int32, device=device)
    x = torch.randn(count, tokens, hidden, device=device, dtype=torch.bfloat16)
    alive = torch.arange(tokens, device=device) < counts[:, None]
    a, a_scale = per_token_cast_to_fp8(x.masked_fill(~alive[..., None], float("nan")), scale_layout="m")
    shapes = ours.workspace_shapes(5, 2 * width, hidden, 2, 16, count, None, MoEActivation.SILU)
    assert shapes[2] == (count, tokens, hidden)
    workspace = torch.full((torch.Size(shapes[0]).numel(),), float("nan"), dtype=torch.bfloat16, device=device)
    output = workspace[: count * tokens * hidden].view(shapes[2])
    ids = torch.zeros(5, 2, dtype=torch.int64, device=device)
    meta = SimpleNamespace(expert_num_tokens=counts)
    silu = MoEActivation.SILU
    ours.apply(output, a, w1, w2, None, ids, silu, 16, None, a_scale, None, workspace, None, meta, False)
    gate, other = (x.float() @ dequantized(w1, w1_scale).transpose(1, 2)).chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * other) @ dequantized(w2, w2_scale).transpose(1, 2)
    assert relative_error(output[alive], wanted[alive]) < 0.08


def test_inputs_are_cast_here_unless_they_are_sent(experts):
    here, sent = parallel(), parallel(use_all2all_kernels=True, use_deepep_ht_kernels=True)
    for ways, wanted in ((here, True), (sent, False)):
        config = moe_config(moe_parallel_config=ways), quant_config(None, None)
        assert experts.DeepTileExperts(*config).expects_unquantized_inputs is wanted
    assert not experts.DeepTileBatchedExperts(*config, 64, 4).expects_unquantized_inputs


def test_few_numbers_of_rows_are_told_apart(experts):
    asked = {choices: experts._expected_rows(choices, 256) for choices in (1, 256, 257, 2048, 9 * 256, 32000)}
    assert asked == {1: 1, 256: 1, 257: 1, 2048: 8, 9 * 256: 16, 32000: 128}


@pytest.mark.gpu
def test_experts_compile_nothing_once_they_are_made(experts):
    (w1, w1_scale), (w2, w2_scale) = stacked(4, 256, 256, "cuda"), stacked(4, 256, 128, "cuda")
    ours = experts.DeepTileExperts(moe_config(), quant_config(w1_scale, w2_scale))
    before = deep_tile.compilations()
    for tokens in (1, 7, 300):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, 4, (tokens, 2), device="cuda").int()
        run_experts(ours, x, w1, w2, torch.rand(tokens, 2, device="cuda"), ids)
    assert deep_tile.compilations() == before


# ---- experts of MXFP4


def mxfp4_layer(activation, biased, device, count=4, hidden=128, width=96):
    """As a checkpoint fills it, by the names of vLLM's parameters; and matrices, gates before up, with biases."""
    codes, scales, wide = zip(
        *(
            (given[0], given[1], given[3])
            for given in (draw("mxfp4", shape) for shape in shapes_of(count, hidden, width))
        ),
        strict=True,
    )
    biases = [torch.randn(x.shape[:2]).bfloat16() if biased else None for x in codes]
    names = "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias"
    scales = [scale.view(torch.uint8) for scale in scales]
    given = dict(zip(names, (*codes, *scales, *biases), strict=True))
    up, up_bias = wide[0].float(), biases[0] if biased else torch.zeros(count, 2 * width)
    if activation == MoEActivation.SWIGLUOAI:
        up, up_bias = (torch.cat([x[:, ::2], x[:, 1::2]], 1) for x in (up, up_bias))
    wanted = up, wide[1].float(), up_bias.float(), biases[1].float() if biased else torch.zeros(count, hidden)
    moved = {name: x if x is None else x.to(device) for name, x in given.items()}
    return SimpleNamespace(activation=activation), moved, [x.to(device) for x in wanted]


def shapes_of(count, hidden, width):
    return (count, 2 * width, hidden), (count, hidden, width)


def methods(vllm):
    plugin.register()
    return sys.modules[METHODS]


@pytest.mark.parametrize(
    ("changed", "is_ours"),
    [
        ({}, True),
        ({"has_bias": True, "activation": MoEActivation.SWIGLUOAI}, True),
        ({"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE}, True),
        ({"intermediate_size_per_partition": 360}, True),
        ({"activation": MoEActivation.GELU}, False),
        ({"hidden_dim": 200}, False),
        ({"in_dtype": torch.float16}, False),
        ({"moe_backend": "marlin"}, False),
        ({"moe_parallel_config": parallel(use_all2all_kernels=True, use_ag_rs_all2all_kernels=True)}, False),
        ({"moe_parallel_config": parallel(use_batched_activation_format=True)}, False),
    ],
    ids=str,
)
def test_experts_of_mxfp4_are_chosen_where_they_fit(vllm, changed, is_ours):
    for name in ("select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"):
        backend, found = getattr(methods(vllm), name)(moe_config(**changed))
        assert (found == "its own") is not is_ours
        assert backend == "MARLIN" or (backend.value, found.__name__) == ("DEEP_TILE", "DeepTileMxfp4Experts")


def test_activations_that_are_asked_for_are_vllms(vllm, monkeypatch):
    select = methods(vllm).select_mxfp4_moe_backend
    assert select(moe_config(), activation_key="mxfp8")[1] == "its own"
    monkeypatch.setattr(sys.modules[MXFP4], "_resolve_activation_key", lambda _: "mxfp8")
    assert select(moe_config())[1] == "its own"


@DEVICES
@pytest.mark.parametrize(
    ("activation", "biased", "is_said"),
    [
        (MoEActivation.SILU, False, True),
        (MoEActivation.SWIGLUOAI, True, True),
        (MoEActivation.SWIGLUOAI, True, False),
        (MoEActivation.SWIGLUOAI_UNINTERLEAVE, True, True),
    ],
)
def test_experts_of_mxfp4_multiply(vllm, device, activation, biased, is_said):
    """As gpt-oss has them, also under a method that says no numbers, and DeepSeek-V4, whose gates have no shift."""
    of_vllm, hidden = methods(vllm), 128
    layer, given, wide = mxfp4_layer(activation, biased, device)
    backend, ours = of_vllm.select_mxfp4_moe_backend(moe_config(has_bias=biased, activation=activation))
    convert = of_vllm.convert_weight_to_mxfp4_moe_kernel_format
    assert convert(mxfp4_backend="MARLIN", layer=layer, **given) == ("MARLIN", given["w13_weight"])
    w1, w2, *scales, w1_bias, w2_bias = convert(mxfp4_backend=backend, layer=layer, **given, activation="any")
    size = wide[0].std() * hidden**0.5
    gating = {"gemm1_clamp_limit": 7.0, "gemm1_alpha": 1.702, "gemm1_beta": 1.0} if is_said else {}
    experts = ours(moe_config(), quant_config(*scales, w1_bias=w1_bias, w2_bias=w2_bias, **gating))
    assert experts.expects_unquantized_inputs and (w1_bias is None) is not biased
    x = (torch.randn(5, hidden, device=device) / size).bfloat16()
    ids = torch.stack([torch.randperm(4, device=device)[:2] for _ in x]).int()
    ids[0, 1] = -1
    shares = torch.rand(5, 2, device=device)
    numbers = {} if activation == MoEActivation.SILU else {"alpha": 1.702, "beta": 1.0}
    wanted = experts_of_tokens(x, ids, shares, *wide, limit=7.0, **numbers)
    assert relative_error(run_experts(experts, x, w1, w2, shares, ids, activation=activation), wanted) < 0.08


def test_weights_that_cannot_be_packed_are_refused_with_the_remedy(vllm):
    layer, given, _ = mxfp4_layer(MoEActivation.SILU, False, "cpu")
    given["w13_weight_scale"][0, 0] = 200
    with pytest.raises(ValueError, match=r"max_error.*--moe-backend marlin"):
        backend, _ = methods(vllm).select_mxfp4_moe_backend(moe_config())
        methods(vllm).convert_weight_to_mxfp4_moe_kernel_format(mxfp4_backend=backend, layer=layer, **given)


# ---- experts of INT4


def weight_quant(group=32, **changed):
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
    return SimpleNamespace(**usual | {"group_size": group} | changed)


class Parameter(torch.nn.Parameter):
    """With what vLLM says of it."""

    def __new__(cls, data: torch.Tensor, is_transposed: bool):
        made = super().__new__(cls, data.mT.contiguous() if is_transposed else data, requires_grad=False)
        made.is_transposed = is_transposed
        return made


def int4_layer(group, is_transposed, device, count=4, hidden=256, width=128):
    """What a method gives of a checkpoint, with columns' groups in the releases that transpose; and matrices."""
    given, matrices = {"layer": None, "quant_config": weight_quant(group), "input_dtype": None}, []
    for name, shape in zip(("w13", "w2"), shapes_of(count, hidden, width), strict=True):
        integers = torch.randint(-8, 8, shape, device=device)
        scale = (torch.rand(*shape[:2], shape[2] // group, device=device) + 0.01).bfloat16()
        of_words = (integers + 8).unflatten(-1, (-1, 8)) << 4 * torch.arange(8, device=device)
        given[name] = Parameter(of_words.sum(-1).to(torch.int32), is_transposed)
        given[f"{name}_scale"] = Parameter(scale, is_transposed)
        given |= {f"{name}_qzeros": None} | ({f"{name}_g_idx": torch.empty(count, shape[2])} if is_transposed else {})
        matrices.append(integers * scale.float().repeat_interleave(group, -1))
    return given, matrices


def wna16(vllm, name="CompressedTensorsWNA16MoEMethod", module=WNA16):
    plugin.register()
    module = sys.modules[module]
    return module, getattr(module, name)


@pytest.mark.parametrize(
    ("of_config", "of_weights", "is_ours"),
    [
        ({}, {}, True),
        ({}, {"group": 64}, True),
        ({}, {"group": 128, "actorder": "weight"}, True),
        ({}, {"actorder": "static"}, True),
        ({"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE}, {}, True),
        ({}, {"actorder": "group"}, False),
        ({}, {"symmetric": False}, False),
        ({}, {"num_bits": 8}, False),
        ({}, {"type": "float"}, False),
        ({}, {"group": 256}, False),
        ({}, {"group": None, "strategy": "channel"}, False),
        ({"activation": MoEActivation.SWIGLUOAI}, {}, False),
        ({"has_bias": True}, {}, False),
        ({"in_dtype": torch.float16}, {}, False),
        ({"moe_backend": "marlin"}, {}, False),
        ({"moe_parallel_config": parallel(use_all2all_kernels=True, use_ag_rs_all2all_kernels=True)}, {}, False),
        ({"moe_parallel_config": parallel(use_batched_activation_format=True)}, {}, False),
    ],
    ids=str,
)
def test_experts_of_int4_are_chosen_where_they_fit(vllm, of_config, of_weights, is_ours):
    _, method = wna16(vllm)
    made = method(weight_quant(**of_weights), None, moe=moe_config(**of_config))
    chosen = made.wna16_backend.value, getattr(made.experts_cls, "__name__", made.experts_cls)
    assert chosen == (("DEEP_TILE", "DeepTileInt4Experts") if is_ours else ("MARLIN", "its own"))


def test_experts_of_int4_that_are_not_marlins_are_vllms(vllm, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert wna16(vllm)[1](weight_quant(), None, moe_config()).experts_cls == "its own"
    plugin.unregister()
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_MARLIN_INPUT_DTYPE", None)
    triton = wna16_method("CompressedTensorsWNA16MoEMethod", WNA16MoEBackend.TRITON)
    add_modules(monkeypatch, {WNA16: triton})
    assert wna16(vllm)[1](weight_quant(), None, moe_config()).experts_cls == "its own"


@DEVICES
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("is_older", [False, True])
def test_experts_of_int4_multiply(vllm, monkeypatch, caplog, device, group, is_older):
    """Older releases have a method for Marlin alone, load words and scales with k first, and keep columns' groups."""
    names, hidden = ("CompressedTensorsWNA16MoEMethod", WNA16), 256
    if is_older:
        names = "CompressedTensorsWNA16MarlinMoEMethod", f"{WNA16}_marlin"
        add_modules(monkeypatch, {names[1]: wna16_method(names[0])})
    plugin.say_once.cache_clear()
    caplog.set_level(logging.INFO)
    module, method = wna16(vllm, *names)
    made, (given, wide) = method(weight_quant(group), None, moe_config()), int4_layer(group, is_older, device)
    convert, make = module.convert_to_wna16_moe_kernel_format, module.make_wna16_moe_kernel
    marlin = WNA16MoEBackend.MARLIN
    assert convert(backend=marlin, **given)[0] is marlin
    w1, w2, *scales = converted = convert(backend=made.wna16_backend, **given)
    assert len(converted) == (14 if is_older else 10) and all(x is None for x in converted[-6:])
    quantised = quant_config(*scales[:2], w1_bias=None, w2_bias=None, block_shape=[0, group])
    others = {"moe_quant_config": quantised, "moe_config": moe_config(), "routing_tables": "all"}
    assert make(**others, experts_cls="its own") == "its own"
    prepared, experts = make(**others, experts_cls=made.experts_cls, backend=made.wna16_backend)
    assert prepared == "for all" and experts.expects_unquantized_inputs
    assert caplog.messages.count("Using DeepTileInt4Experts") == 1
    x = (torch.randn(5, hidden, device=device) / (wide[0].std() * hidden**0.5)).bfloat16()
    ids = torch.stack([torch.randperm(4, device=device)[:2] for _ in x]).int()
    ids[0, 1] = -1
    shares = torch.rand(5, 2, device=device)
    assert relative_error(run_experts(experts, x, w1, w2, shares, ids), experts_of_tokens(x, ids, shares, *wide)) < 0.08


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128])
def test_experts_of_int4_compile_nothing_once_they_are_made(vllm, group):
    module, method = wna16(vllm)
    made, (given, _) = method(weight_quant(group), None, moe_config()), int4_layer(group, False, "cuda")
    w1, w2, *scales = module.convert_to_wna16_moe_kernel_format(backend=made.wna16_backend, **given)
    quantised = quant_config(*scales[:2], w1_bias=None, w2_bias=None, block_shape=[0, group])
    experts = made.experts_cls(moe_config(), quantised)
    before = deep_tile.compilations()
    for tokens in (1, 7, 300, 3000):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, 4, (tokens, 2), device="cuda").int()
        run_experts(experts, x, w1, w2, torch.rand(tokens, 2, device="cuda"), ids)
    assert deep_tile.compilations() == before


def test_scales_that_fp16_cannot_hold_are_refused_with_the_remedy(vllm):
    module, method = wna16(vllm)
    made, (given, _) = method(weight_quant(), None, moe_config()), int4_layer(32, False, "cpu")
    given["w2_scale"].data[0, 0, 0] = 2.0**-40
    with pytest.raises(ValueError, match=r"FP16 does not hold it.*--moe-backend marlin"):
        module.convert_to_wna16_moe_kernel_format(backend=made.wna16_backend, **given)


# ---- releases with other functions


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(
    ("name", "module", "function", "ours"),
    [
        ("MXFP4", METHODS, "select_deepseek_v4_mxfp4_moe_backend", MXFP4),
        ("INT4", WNA16, "make_wna16_moe_kernel", INT4),
        ("INT4", WNA16, "CompressedTensorsWNA16MoEMethod", INT4),
    ],
)
def test_a_release_with_other_functions_has_all_else_served(
    vllm, monkeypatch, caplog, raises, name, module, function, ours
):
    others = vars(sys.modules[module]).copy()
    del others[function]
    monkeypatch.delattr(sys.modules[module], function)
    if raises:  # half a plugin must not be: its kernels would serve while the cache's key denies it
        monkeypatch.setitem(sys.modules, ours, SimpleNamespace(hook=lambda: 1 / 0))
    plugin.register()
    assert engines.has_entered(engines.VLLM)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert name in record.getMessage() and vllm.kernels["cuda"][0].__name__.startswith("DeepTile")
    assert vars(sys.modules[module]) == others
    select = sys.modules[METHODS].select_mxfp4_moe_backend
    is_mxfp4_ours = select is not vllm.own_mxfp4["select_mxfp4_moe_backend"]
    is_int4_ours = vllm.own_wna16["CompressedTensorsWNA16MoEMethod"].__init__ is not vllm.own_init
    assert (is_mxfp4_ours, is_int4_ours) == (name == "INT4", name == "MXFP4")
