"""The examples: on stand-ins for vLLM and SGLang that have their signatures, and as a user would run them.

A stand-in holds what an engine declared in late 2026, written anew and no longer than the examples need.
"""

import inspect
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch
from helpers import EXAMPLES, load_example, same_bits

from deep_tile import dequantize, fp8_gemm, fp8_linear, per_token_cast_to_fp8, quantize_weight

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FLOOR = {"amax_floor": 1e-10}


# ---- vLLM: vllm/model_executor/kernels/linear/{base,__init__}.py and scaled_mm/{BlockScaled,Scaled}MMLinearKernel.py


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
        return SimpleNamespace(weight=layer.weight, weight_scale_inv=layer.weight_scale_inv)

    def process_weights_after_loading(self, layer: torch.nn.Module):
        layer.processed = True

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs):
        """A stand-in's: what is cast already comes as a pair, and a class that casts by itself gets a scale of ones."""
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


class Platform:
    """Of one GPU with a compute capability, or of none."""

    def __init__(self, capability: int | None):
        self._capability = capability

    def is_cuda(self) -> bool:
        return self._capability is not None

    def is_device_capability(self, capability: int, device_id: int = 0) -> bool:
        return self._capability == capability


@pytest.fixture
def add_modules(monkeypatch):
    """Add modules with attributes, and the packages that they lie in."""

    def add(**attributes: dict):
        for name, values in attributes.items():
            parts = name.split("__")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if path not in sys.modules:
                    module = ModuleType(path)
                    module.__path__ = []
                    monkeypatch.setitem(sys.modules, path, module)
            for key, value in values.items():
                setattr(sys.modules[path], key, value)

    return add


@pytest.fixture
def vllm(add_modules):
    """The example, as vLLM on a Hopper GPU would import it."""
    add_modules(
        vllm__model_executor__kernels__linear={
            "Fp8BlockScaledMMLinearKernel": Fp8BlockScaledMMLinearKernel,
            "FP8ScaledMMLinearLayerConfig": FP8ScaledMMLinearLayerConfig,
            "_POSSIBLE_FP8_BLOCK_KERNELS": {"cuda": ["DeepGEMM", "Triton"]},
        },
        vllm__model_executor__layers__quantization__utils__quant_utils={"GroupShape": GroupShape},
        vllm__platforms={"current_platform": Platform(90), "PlatformEnum": SimpleNamespace(CUDA="cuda")},
    )
    return load_example("vllm_kernel")


def vllm_config(*, static=False, group=(1, 128), block=(128, 128), shape=(136, 272), out_dtype=torch.bfloat16):
    fp8 = torch.float8_e4m3fn
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=QuantKey(fp8, ScaleDesc(True, GroupShape(*block))),
        activation_quant_key=QuantKey(fp8, ScaleDesc(static, GroupShape(*group))),
        weight_shape=shape,
        input_dtype=out_dtype,
        out_dtype=out_dtype,
    )


def layer_of(n, k, device="cpu"):
    """A layer as a checkpoint fills it."""
    layer = torch.nn.Module()
    weight, scale = quantize_weight(torch.randn(n, k, device=device))
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    return layer


def product(x, layer):
    return x.float() @ dequantize(layer.weight.data, layer.weight_scale_inv.data, block=(128, 128)).t()


def relative_error(out, wanted):
    return ((out.float() - wanted).norm() / wanted.norm()).item()


def assert_accepts(override, base):
    """Whatever call `base` takes, `override` takes, and means the same by it."""
    own = inspect.signature(override).parameters
    for position, (name, wanted) in enumerate(inspect.signature(base).parameters.items()):
        assert list(own)[position : position + 1] == [name], f"{override.__qualname__} lacks {name} at {position}"
        assert own[name].kind == wanted.kind, name
        assert own[name].default == wanted.default, name
    more = list(own.values())[position + 1 :]
    assert all(parameter.default is not parameter.empty for parameter in more)


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


def test_vllm_kernel_has_vllms_signatures(vllm):
    kernel = vllm.DeepTileFp8BlockScaledMMKernel
    declared = [name for name in vars(Fp8BlockScaledMMLinearKernel) if inspect.isfunction(getattr(kernel, name))]
    declared += ["is_supported", "can_implement"]
    own = [name for name in declared if name in vars(kernel)]
    assert {"is_supported", "can_implement", "process_weights_after_loading", "apply_block_scaled_mm"} == set(own)
    for name in own:
        assert_accepts(getattr(kernel, name), getattr(Fp8BlockScaledMMLinearKernel, name))


def test_vllm_kernel_is_for_hopper(vllm, monkeypatch):
    kernel = vllm.DeepTileFp8BlockScaledMMKernel
    assert kernel.is_supported() == kernel.is_supported(90) == (True, None)
    assert kernel.is_supported(100)[0] is kernel.is_supported(89)[0] is False
    for capability, said in ((100, "Hopper"), (None, "CUDA")):
        monkeypatch.setattr(vllm, "current_platform", Platform(capability))
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
def test_vllm_kernel_says_what_it_cannot(vllm, changed, said):
    can_implement, reason = vllm.DeepTileFp8BlockScaledMMKernel.can_implement(vllm_config(**changed))
    assert can_implement is False and said in reason


@pytest.mark.parametrize("shape", [(2112, 7168), (72, 272), (1, 16)])
def test_vllm_kernel_says_what_it_can(vllm, shape):
    assert vllm.DeepTileFp8BlockScaledMMKernel.can_implement(vllm_config(shape=shape)) == (True, None)


@DEVICES
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vllm_kernel_multiplies(vllm, device, out_dtype):
    layer = layer_of(136, 272, device)
    kernel = vllm.DeepTileFp8BlockScaledMMKernel(vllm_config(out_dtype=out_dtype))
    kernel.process_weights_after_loading(layer)
    assert layer.processed
    x = torch.randn(2, 5, 272, device=device, dtype=out_dtype)
    bias = torch.randn(136, device=device, dtype=out_dtype)
    out = kernel.apply_weights(layer, x, bias)
    assert (out.dtype, out.shape) == (out_dtype, (2, 5, 136))
    assert relative_error(out, product(x, layer) + bias.float()) < 0.05
    assert same_bits(out, fp8_linear(x, layer.weight, layer.weight_scale_inv, **FLOOR) + bias)


@DEVICES
def test_vllm_kernel_takes_what_is_cast_already(vllm, device):
    layer = layer_of(136, 272, device)
    kernel = vllm.DeepTileFp8BlockScaledMMKernel(vllm_config())
    x = torch.randn(7, 272, device=device, dtype=torch.bfloat16)
    for layout in ("row", "m", "m_aligned"):
        cast = per_token_cast_to_fp8(x, scale_layout=layout)
        out = kernel.apply_weights(layer, cast)
        assert same_bits(out, fp8_gemm(*cast, layer.weight, layer.weight_scale_inv))


def test_vllm_kernel_warms_up_what_was_loaded(vllm, monkeypatch):
    asked = []
    monkeypatch.setattr(vllm.deep_tile, "precompile", asked.append)
    kernel = vllm.DeepTileFp8BlockScaledMMKernel(vllm_config())
    for n, k in ((256, 128), (136, 272), (256, 128)):
        kernel.process_weights_after_loading(layer_of(n, k))
    kernel.warm_up(64)
    assert asked == [[(136, 272, 64), (256, 128, 64)]]


def test_vllm_kernel_registers_once_and_first(vllm):
    vllm.register()
    vllm.register()
    kernels = sys.modules["vllm.model_executor.kernels.linear"]._POSSIBLE_FP8_BLOCK_KERNELS
    assert kernels == {"cuda": [vllm.DeepTileFp8BlockScaledMMKernel, "DeepGEMM", "Triton"]}


# ---- SGLang: sglang/srt/layers/quantization/fp8_utils.py


def deepgemm_w8a8_block_fp8_linear_with_fallback(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return "its own", input, weight, block_size, weight_scale, input_scale, bias


@pytest.fixture
def sglang(add_modules):
    """The example, as SGLang would import it."""
    own = deepgemm_w8a8_block_fp8_linear_with_fallback
    add_modules(sglang__srt__layers__quantization__fp8_utils={own.__name__: own})
    return load_example("sglang_backend")


def test_sglang_backend_has_sglangs_signature(sglang):
    assert_accepts(sglang.deep_tile_w8a8_block_fp8_linear, deepgemm_w8a8_block_fp8_linear_with_fallback)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_sglang_backend_multiplies(sglang, device, dtype, with_bias):
    layer = layer_of(136, 272, device)
    x = torch.randn(2, 5, 272, device=device, dtype=dtype)
    bias = torch.randn(136, device=device, dtype=dtype) if with_bias else None
    given = (layer.weight, [128, 128], layer.weight_scale_inv)
    out = sglang.deep_tile_w8a8_block_fp8_linear(x, *given, bias=bias)
    assert (out.dtype, out.shape) == (dtype, (2, 5, 136))
    assert relative_error(out, product(x, layer) + (bias.float() if with_bias else 0)) < 0.05
    assert same_bits(out, fp8_linear(x, layer.weight, layer.weight_scale_inv, bias, **FLOOR))


@DEVICES
@pytest.mark.parametrize("layout", ["row", "m", "m_aligned"])
def test_sglang_backend_takes_what_is_cast_already(sglang, device, layout):
    layer = layer_of(136, 272, device)
    a, scale = per_token_cast_to_fp8(torch.randn(8, 272, device=device), scale_layout=layout)
    bias = torch.randn(136, device=device, dtype=torch.bfloat16)
    given = (layer.weight, [128, 128], layer.weight_scale_inv, scale, bias)
    out = sglang.deep_tile_w8a8_block_fp8_linear(a.view(2, 4, 272), *given)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 4, 136))
    wanted = fp8_gemm(a, scale, layer.weight, layer.weight_scale_inv) + bias
    assert same_bits(out.view(8, 136), wanted)


@pytest.mark.parametrize(
    "changed",
    [
        {"block_size": [64, 128]},
        {"weight_scale": torch.ones(2, 1, dtype=torch.int32)},
        {"input_scale": torch.ones(4, 1, dtype=torch.int32)},
        {"input": torch.zeros(4, 272, dtype=torch.float64)},
        {"input": torch.zeros(4, 272).to(torch.float8_e4m3fn)},
        {"weight": torch.zeros(136, 200).to(torch.float8_e4m3fn)},
    ],
    ids=str,
)
def test_what_is_not_taken_goes_to_sglangs_own(sglang, changed):
    layer = layer_of(136, 272)
    arguments = {"input": torch.zeros(4, 272, dtype=torch.bfloat16), "weight": layer.weight, "block_size": [128, 128]}
    arguments |= {"weight_scale": layer.weight_scale_inv, "input_scale": None, "bias": None, **changed}
    who, *seen = sglang.deep_tile_w8a8_block_fp8_linear(**arguments)
    assert who == "its own"
    assert all(was is given for was, given in zip(seen, arguments.values(), strict=True))


def test_sglang_backend_warms_up_quantised_layers(sglang, monkeypatch):
    asked = []
    monkeypatch.setattr(sglang.deep_tile, "precompile", asked.append)
    model = torch.nn.ModuleList([layer_of(256, 128), torch.nn.Linear(8, 8), layer_of(136, 272), layer_of(256, 128)])
    sglang.warm_up(model, 64)
    assert asked == [[(136, 272, 64), (256, 128, 64)]]


# ---- transformers


@DEVICES
@pytest.mark.parametrize("kind", [[], ["--experts"]], ids=["dense", "experts"])
def test_qwen3_generates(device, kind):
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    if device == "cuda":
        pytest.importorskip("accelerate", reason="needs accelerate, to load FP8 models to a GPU")
    command = [sys.executable, EXAMPLES / "qwen3_fp8.py", "--device", device, "--prompt", "5", "--tokens", "3", *kind]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    tokens, times = run.stdout.splitlines()
    assert tokens.startswith("tokens: [") and tokens.count(",") == 2
    assert times.startswith("first token ") and times.endswith(f"on {device}")
