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
from deep_tile.integrations import transformers as integration

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


# ---- vLLM: vllm/model_executor/layers/fused_moe/modular_kernel.py


class FusedMoEExpertsModular:
    def __init__(self, moe_config, quant_config, max_num_tokens: int | None = None, num_dispatchers: int | None = None):
        self.quant_config = quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    w1_scale = property(lambda self: self.quant_config.w1_scale)
    w2_scale = property(lambda self: self.quant_config.w2_scale)

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

    def supports_expert_map(self) -> bool: ...

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


@pytest.fixture
def vllm_experts(add_modules):
    """The example, as vLLM on a Hopper GPU would import it."""
    fused_moe = "vllm__model_executor__layers__fused_moe"
    modular = {
        "FusedMoEExpertsModular": FusedMoEExpertsModular,
        "FusedMoEActivationFormat": SimpleNamespace(BatchedExperts="batched"),
        "TopKWeightAndReduce": object,
        "ExpertTokensMetadata": SimpleNamespace,
    }
    add_modules(
        **{
            f"{fused_moe}__modular_kernel": modular,
            f"{fused_moe}__activation": {"MoEActivation": SimpleNamespace(SILU="silu", GELU="gelu")},
            f"{fused_moe}__topk_weight_and_reduce": {"TopKWeightAndReduceDelegate": lambda: "delegate"},
        },
        vllm__model_executor__layers__quantization__utils__quant_utils={
            "kFp8Static128BlockSym": "128x128",
            "kFp8Dynamic128Sym": "1x128",
        },
        vllm__platforms={"current_platform": Platform(90)},
    )
    return load_example("vllm_experts")


def test_vllm_experts_have_vllms_signatures(vllm_experts):
    ours = vllm_experts.DeepTileBatchedExperts
    declared = [name for name in vars(FusedMoEExpertsModular) if name[:2] != "__" and "scale" not in name]
    assert set(declared) <= set(vars(ours))
    for name in declared:
        base = getattr(FusedMoEExpertsModular, name)
        if inspect.signature(base).parameters:
            assert_accepts(getattr(ours, name), base)


def test_vllm_experts_say_what_they_can(vllm_experts, monkeypatch):
    ours = vllm_experts.DeepTileBatchedExperts
    assert ours.activation_format() == "batched" and ours._supports_current_device()
    assert ours._supports_quant_scheme("128x128", "1x128") and not ours._supports_quant_scheme("128x128", "tensor")
    assert ours._supports_activation("silu") and not ours._supports_activation("gelu")
    assert not ours._supports_no_act_and_mul()
    monkeypatch.setattr(vllm_experts, "current_platform", Platform(100))
    assert not ours._supports_current_device()


def stacked(experts, n, k, device):
    """Weights [experts, n, k] in FP8 with their scales."""
    return map(
        torch.stack, zip(*(quantize_weight(torch.randn(n, k, device=device)) for _ in range(experts)), strict=True)
    )


@DEVICES
def test_vllm_experts_multiply(vllm_experts, device):
    """Rows behind each expert's last are not looked at; the output may lie where gate and up lay, as vLLM has it."""
    experts, tokens, hidden, width = 4, 10, 256, 128
    w1, w1_scale = stacked(experts, 2 * width, hidden, device)
    w2, w2_scale = stacked(experts, hidden, width, device)
    config = SimpleNamespace(w1_scale=w1_scale, w2_scale=w2_scale)
    ours = vllm_experts.DeepTileBatchedExperts(None, config, max_num_tokens=5, num_dispatchers=2)
    counts = torch.tensor([3, 0, 10, 1], dtype=torch.int32, device=device)
    x = torch.randn(experts, tokens, hidden, device=device, dtype=torch.bfloat16)
    alive = torch.arange(tokens, device=device) < counts[:, None]
    a, a_scale = per_token_cast_to_fp8(x.masked_fill(~alive[..., None], float("nan")), scale_layout="m")
    shapes = ours.workspace_shapes(5, 2 * width, hidden, 2, 16, experts, None, "silu")
    assert shapes[2] == (experts, tokens, hidden)
    workspace = torch.full((torch.Size(shapes[0]).numel(),), float("nan"), dtype=torch.bfloat16, device=device)
    output = workspace[: experts * tokens * hidden].view(shapes[2])
    ids = torch.zeros(5, 2, dtype=torch.int64, device=device)
    meta = SimpleNamespace(expert_num_tokens=counts)
    ours.apply(output, a, w1, w2, None, ids, "silu", 16, None, a_scale, None, workspace, None, meta, False)
    up, down = (
        torch.stack([dequantize(*pair, block=(128, 128)) for pair in zip(*weights, strict=True)])
        for weights in ((w1, w1_scale), (w2, w2_scale))
    )
    gate, other = (x.float() @ up.transpose(1, 2)).chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * other) @ down.transpose(1, 2)
    assert relative_error(output[alive], wanted[alive]) < 0.08


def test_vllm_experts_tell_few_numbers_of_rows_apart(vllm_experts):
    ours = vllm_experts.DeepTileBatchedExperts(None, None, 64, 4)
    asked = {tokens: ours._expected_rows(torch.zeros(tokens, 8), 256) for tokens in (1, 8, 9, 64, 1000)}
    assert asked == {1: 1, 8: 1, 9: 1, 64: 8, 1000: 128}


def test_vllm_experts_warm_up(vllm_experts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        vllm_experts.deep_tile, "precompile_model", lambda *given, **options: asked.append((given, options))
    )
    vllm_experts.DeepTileBatchedExperts.warm_up("layer", 64)
    assert asked == [(("layer", 64), {"grouping": "counts"})]


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
    wanted = fp8_gemm(a, scale, layer.weight, layer.weight_scale_inv, bias=bias)
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
    monkeypatch.setattr(sglang.deep_tile, "precompile_model", lambda *given, **options: asked.append((given, options)))
    sglang.warm_up("model", 64)
    assert asked == [(("model", 64), {"grouping": grouping}) for grouping in ("offs", "counts")]


def grouped_gemm_nt_f8f8bf16_contig(lhs, rhs, out, m_indices, recipe_a=None, recipe_b=None): ...


def grouped_gemm_nt_f8f8bf16_masked(lhs, rhs, out, masked_m, expected_m, overlap_args=None, max_block_n=256): ...


@DEVICES
def test_sglang_backend_multiplies_experts(sglang, device):
    for theirs in (grouped_gemm_nt_f8f8bf16_contig, grouped_gemm_nt_f8f8bf16_masked):
        assert_accepts(getattr(sglang, theirs.__name__), theirs)
    b = (*stacked(2, 136, 256, device),)
    a = per_token_cast_to_fp8(torch.randn(256, 256, device=device), scale_layout="m_aligned")
    out = torch.empty(256, 136, dtype=torch.bfloat16, device=device)
    sglang.grouped_gemm_nt_f8f8bf16_contig(a, b, out, torch.arange(2, device=device).int().repeat_interleave(128))
    masked = torch.zeros(2, 128, 136, dtype=torch.bfloat16, device=device)
    counts = torch.tensor([128, 5], dtype=torch.int32, device=device)
    of_groups = tuple(x.unflatten(0, (2, 128)) for x in a)
    sglang.grouped_gemm_nt_f8f8bf16_masked(of_groups, b, masked, counts, 64)
    for group in range(2):
        rows = slice(128 * group, 128 * (group + 1))
        wanted = fp8_gemm(a[0][rows], a[1][rows], b[0][group], b[1][group], batch_invariant=True)
        assert same_bits(out[rows], wanted)
        assert same_bits(masked[group, : counts[group]], wanted[: counts[group]])
    assert not masked[1, 5:].any()
    with pytest.raises(ValueError, match="overlap_args is given"):
        sglang.grouped_gemm_nt_f8f8bf16_masked(of_groups, b, masked, counts, 64, overlap_args=object())


# ---- transformers


@pytest.fixture
def run_qwen3(monkeypatch, capfd):
    """Runs the example with these arguments in this process; returns what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qwen3_fp8.py", *arguments])
        load_example("qwen3_fp8").main()
        return capfd.readouterr().out

    yield run
    integration.uninstall()


def run_program(*arguments):
    """The same as a program."""
    run = subprocess.run([sys.executable, EXAMPLES / "qwen3_fp8.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@DEVICES
@pytest.mark.parametrize("kind", [[], ["--experts"]], ids=["dense", "experts"])
def test_qwen3_generates(device, kind, run_qwen3):
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    if device == "cuda":
        pytest.importorskip("accelerate", reason="needs accelerate, to load FP8 models to a GPU")
    run = run_qwen3 if kind else run_program  # once as users do, which takes ten seconds
    tokens, times = run("--device", device, "--prompt", "5", "--tokens", "3", *kind).splitlines()
    assert tokens.startswith("tokens: [") and tokens.count(",") == 2
    assert times.startswith("first token ") and times.endswith(f"on {device}")
