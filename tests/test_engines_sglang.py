"""The plugin for SGLang, on stand-ins that have the signatures of SGLang 0.5.23, written anew and no longer than it
needs. `make test-engines` runs it on SGLang's own modules.
"""

import importlib
import sys
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from formats import draw
from helpers import run_python, same_bits
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

from deep_tile import fp8_gemm, fp8_linear, mqa_logits, paged_mqa_logits, per_token_cast_to_fp8
from deep_tile.compat import deep_gemm
from deep_tile.config import round_up
from deep_tile.integrations import engines
from deep_tile.integrations import sglang_hooks as hooks
from deep_tile.integrations import sglang_indexer as indexer
from deep_tile.integrations.sglang import register

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FLOOR = {"amax_floor": 1e-10}
FP8_UTILS = "sglang.srt.layers.quantization.fp8_utils"
ENTRYPOINT = "sglang.srt.layers.deep_gemm_wrapper.entrypoint"
QUANTIZATION = "sglang.srt.layers.quantization"
MXFP4 = "deep_tile.integrations.sglang_mxfp4"


def deepgemm_w8a8_block_fp8_linear_with_fallback(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    act_scale_ue8m0: bool = False,
    weight_bf16: torch.Tensor | None = None,
) -> torch.Tensor:
    return "its own", input, weight, block_size, weight_scale, input_scale, bias, act_scale_ue8m0, weight_bf16


def grouped_gemm_nt_f8f8bf16_contig(lhs, rhs, out, m_indices, recipe_a=None, recipe_b=None):
    return "its own", recipe_a, recipe_b


def grouped_gemm_nt_f8f8bf16_masked(
    lhs, rhs, out, masked_m, expected_m, overlap_args=None, max_block_n=256, recipe_a=None, recipe_b=None
):
    return "its own", overlap_args, max_block_n, recipe_a, recipe_b


@contextmanager
def configure_deep_gemm_num_sms(num_sms):
    LIMITS.append(num_sms)
    try:
        yield
    finally:
        LIMITS.pop()


LIMITS = []
"""Those of SGLang's own that are in force."""


def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
    return "its own", clean_logits, max_seqlen_k


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None
):
    return "its own", max_context_len, clean_logits, indices


class Mxfp4MoEMethod:
    """Makes parameters as gpt-oss's does; `_inv` and no biases are DeepSeek-V4's."""

    inverse = ""

    def create_weights(self, layer, experts, hidden, width, dtype, **_):
        def parameter(*shape, dtype=torch.uint8):
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=layer.device), requires_grad=False)

        for name, n, k in (("w13", 2 * width, hidden), ("w2", hidden, width)):
            setattr(layer, f"{name}_weight", parameter(experts, n, k // 2))
            setattr(layer, f"{name}_weight_scale{self.inverse}", parameter(experts, n, k // 32))
            if not self.inverse:
                setattr(layer, f"{name}_weight_bias", parameter(experts, n, dtype=torch.bfloat16))


class Mxfp4FlashinferCutlassMoEMethod(Mxfp4MoEMethod):
    inverse = "_inv"


class Mxfp4MarlinMoEMethod(Mxfp4MoEMethod):
    pass


class Config:
    def __init__(self, method=None):
        self.method = method

    def get_quant_method(self, layer, prefix):
        return self.method


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


@pytest.fixture
def sglang(monkeypatch):
    """Stand-ins for SGLang 0.5.23, the variable set, nothing registered; gives the hooks by their targets."""
    registered = {}

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
            assert target not in registered
            registered[target] = hook, hook_type

    linear = deepgemm_w8a8_block_fp8_linear_with_fallback
    grouped = grouped_gemm_nt_f8f8bf16_contig, grouped_gemm_nt_f8f8bf16_masked, configure_deep_gemm_num_sms
    of_groups = {theirs.__name__: theirs for theirs in grouped}
    own = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 128)
    modules = {
        "sglang": {"__version__": "0.5.23"},
        "deep_gemm": {logits.__name__: logits for logits in (fp8_mqa_logits, fp8_paged_mqa_logits)},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        FP8_UTILS: {linear.__name__: linear},
        ENTRYPOINT: of_groups | {"deep_gemm": own},
        f"{QUANTIZATION}.mxfp4": {"Mxfp4Config": Config},
        f"{QUANTIZATION}.fp8": {"Fp8Config": Config},
        f"{QUANTIZATION}.base_config": {"FusedMoEMethodBase": type("FusedMoEMethodBase", (), {"runner": None})},
        "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": lambda hidden_states: (hidden_states,)},
        "sglang.srt.layers.moe.utils": {"get_moe_a2a_backend": lambda: SimpleNamespace(is_none=lambda: True)},
        "sglang.srt.runtime_context": {
            "get_server_args": lambda: server_arguments(),
            "get_platform": lambda: SimpleNamespace(is_sm90=True),
        },
    }
    monkeypatch.setenv("SGLANG_USE_DEEP_TILE", "1")
    add_modules(monkeypatch, modules)
    forget_modules(monkeypatch, MXFP4)
    yield registered
    engines.leave(engines.SGLANG)


@pytest.fixture
def mxfp4(sglang):
    return importlib.import_module(MXFP4)


def test_hooks_have_sglangs_signatures(mxfp4):
    for hook, theirs in (
        (hooks.linear, deepgemm_w8a8_block_fp8_linear_with_fallback),
        (hooks.grouped_gemm_nt_f8f8bf16_contig, grouped_gemm_nt_f8f8bf16_contig),
        (hooks.configure_deep_gemm_num_sms, configure_deep_gemm_num_sms),
        (hooks.grouped_gemm_nt_f8f8bf16_masked, grouped_gemm_nt_f8f8bf16_masked),
        (mxfp4.method, Config.get_quant_method),
        (indexer.fp8_mqa_logits, fp8_mqa_logits),
        (indexer.fp8_paged_mqa_logits, fp8_paged_mqa_logits),
    ):
        assert_accepts(hook, theirs, skipped=1)


def test_hooks_are_registered_once(sglang):
    register()
    register()
    method = sys.modules[MXFP4].method
    assert sglang == {
        f"{QUANTIZATION}.mxfp4.Mxfp4Config.get_quant_method": (method, HookType.AROUND),
        f"{QUANTIZATION}.fp8.Fp8Config.get_quant_method": (method, HookType.AROUND),
        f"{FP8_UTILS}.deepgemm_w8a8_block_fp8_linear_with_fallback": (hooks.linear, HookType.AROUND),
        f"{ENTRYPOINT}.grouped_gemm_nt_f8f8bf16_contig": (hooks.grouped_gemm_nt_f8f8bf16_contig, HookType.AROUND),
        f"{ENTRYPOINT}.grouped_gemm_nt_f8f8bf16_masked": (hooks.grouped_gemm_nt_f8f8bf16_masked, HookType.AROUND),
        f"{ENTRYPOINT}.configure_deep_gemm_num_sms": (hooks.configure_deep_gemm_num_sms, HookType.AROUND),
        "deep_gemm.fp8_mqa_logits": (indexer.fp8_mqa_logits, HookType.AROUND),
        "deep_gemm.fp8_paged_mqa_logits": (indexer.fp8_paged_mqa_logits, HookType.AROUND),
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (hooks.make_ready, HookType.AFTER),
    }


def test_without_the_variable_nothing_is_hooked_nor_said(sglang, monkeypatch, caplog):
    monkeypatch.delenv("SGLANG_USE_DEEP_TILE")
    register()
    assert not sglang and not caplog.records


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_entry_points_import_little(engine):
    """Every process of an engine imports them, whatever the variable says."""
    module = f"deep_tile.integrations.{engine.name}"
    announced = f'[project.entry-points."{engine.group}"]\ndeep_tile = "{module}:register"\n'
    assert announced in (Path(__file__).parents[1] / "pyproject.toml").read_text()
    program = f"import sys, {module} as plugin; print(callable(plugin.register), *sys.modules)"
    callable_, *loaded = run_python(program).stdout.split()
    assert callable_ == "True" and not {"torch", "deep_tile._launcher", engine.name} & {*loaded}


@pytest.mark.parametrize("changed", ["version", "arguments", "missing"])
def test_what_is_not_known_is_refused_in_one_line(sglang, monkeypatch, caplog, changed):
    if changed == "version":
        monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.0")
    elif changed == "arguments":
        monkeypatch.setattr(sys.modules[ENTRYPOINT], "grouped_gemm_nt_f8f8bf16_contig", lambda lhs, rhs, new: None)
    else:
        monkeypatch.delattr(sys.modules[FP8_UTILS], "deepgemm_w8a8_block_fp8_linear_with_fallback")
    register()
    register()
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage() and not sglang
    assert {"version": "0.6.0", "arguments": "lhs, rhs, new", "missing": "with_fallback"}[changed] in caplog.text


# ---- linear layers


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_linear_multiplies(device, dtype, with_bias, ue8m0):
    layer = layer_of(136, 272, device)
    x = torch.randn(2, 5, 272, device=device, dtype=dtype)
    bias = torch.randn(136, device=device, dtype=dtype) if with_bias else None
    given = (layer.weight, [128, 128], layer.weight_scale_inv)
    out = hooks.linear(None, x, *given, bias=bias, act_scale_ue8m0=ue8m0, weight_bf16=layer.weight.bfloat16())
    assert (out.dtype, out.shape) == (dtype, (2, 5, 136))
    assert relative_error(out, product(x, layer) + (bias.float() if with_bias else 0)) < 0.05
    rounding = {"round_scale": "pow2"} if ue8m0 else {}
    assert same_bits(out, fp8_linear(x, layer.weight, layer.weight_scale_inv, bias, **FLOOR, **rounding))


@DEVICES
@pytest.mark.parametrize("layout", ["row", "m", "m_aligned"])
def test_linear_takes_what_is_cast_already(device, layout):
    layer = layer_of(136, 272, device)
    a, scale = per_token_cast_to_fp8(torch.randn(8, 272, device=device), scale_layout=layout)
    bias = torch.randn(136, device=device, dtype=torch.bfloat16)
    given = (layer.weight, [128, 128], layer.weight_scale_inv, scale, bias)
    out = hooks.linear(None, a.view(2, 4, 272), *given)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 4, 136))
    wanted = fp8_gemm(a, scale, layer.weight, layer.weight_scale_inv, bias=bias)
    assert same_bits(out.view(8, 136), wanted)


@pytest.mark.parametrize(
    "changed",
    [
        {"block_size": [64, 128]},
        {"block_size": [32, 32]},
        {"weight_scale": torch.ones(2, 1, dtype=torch.int32)},
        {"input_scale": torch.ones(4, 1, dtype=torch.int32)},
        {"input_scale": torch.ones(4, 3)},
        {"input": torch.zeros(4, 272, dtype=torch.float64)},
        {"input": torch.zeros(4, 272).to(torch.float8_e4m3fn)},
        {"weight": torch.zeros(136, 200).to(torch.float8_e4m3fn)},
        {"weight": torch.zeros(136, 272).bfloat16(), "act_scale_ue8m0": True},
    ],
    ids=str,
)
def test_what_is_not_taken_goes_to_sglangs_own(changed):
    layer = layer_of(136, 272)
    arguments = {"input": torch.zeros(4, 272, dtype=torch.bfloat16), "weight": layer.weight, "block_size": [128, 128]}
    arguments |= {"weight_scale": layer.weight_scale_inv, "input_scale": None, "bias": None}
    arguments |= {"act_scale_ue8m0": False, "weight_bf16": torch.zeros(1), **changed}
    who, *seen = hooks.linear(deepgemm_w8a8_block_fp8_linear_with_fallback, **arguments)
    assert who == "its own"
    assert all(was is given for was, given in zip(seen, arguments.values(), strict=True))


def test_linear_is_one_graph():
    layer = layer_of(136, 272)

    def run(x):
        return hooks.linear(None, x, layer.weight, [128, 128], layer.weight_scale_inv)

    x = torch.randn(3, 272).bfloat16()
    with torch.no_grad():
        assert same_bits(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


# ---- experts


@DEVICES
@pytest.mark.parametrize("alignment", [128, (64, 64)], ids=str)
def test_experts_multiply(sglang, monkeypatch, device, alignment):
    own = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: alignment)
    monkeypatch.setattr(sys.modules[ENTRYPOINT], "deep_gemm", own)
    b = (*stacked(2, 136, 256, device),)
    a = per_token_cast_to_fp8(torch.randn(256, 256, device=device), scale_layout="m_aligned")
    out = torch.zeros(256, 136, dtype=torch.bfloat16, device=device)
    of_row = torch.arange(2, device=device).int().repeat_interleave(128)
    of_row[100:128] = -1
    hooks.grouped_gemm_nt_f8f8bf16_contig(None, a, b, out, of_row, recipe_a=(1, 128), recipe_b=(128, 128))
    masked = torch.zeros(2, 128, 136, dtype=torch.bfloat16, device=device)
    counts = torch.tensor([128, 5], dtype=torch.int32, device=device)
    of_groups = tuple(x.unflatten(0, (2, 128)) for x in a)
    hooks.grouped_gemm_nt_f8f8bf16_masked(None, of_groups, b, masked, counts, 64, recipe_b=[128, 128])
    for group, rows in enumerate((slice(100), slice(128, 256))):
        wanted = fp8_gemm(a[0][rows], a[1][rows], b[0][group], b[1][group], batch_invariant=True)
        assert same_bits(out[rows], wanted)
        assert same_bits(masked[group, : counts[group]][:100], wanted[: counts[group]])
    assert not masked[1, 5:].any()


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"overlap_args": "signals", "max_block_n": 160}, ("its own", "signals", 160, None, None)),
        ({"recipe_a": (1, 32)}, ("its own", None, 256, (1, 32), None)),
        ({"recipe_b": (1, 32)}, ("its own", None, 256, None, (1, 32))),
    ],
    ids=str,
)
def test_other_groups_go_to_sglangs_own(options, seen):
    a, b = per_token_cast_to_fp8(torch.randn(1, 8, 256)), (*stacked(1, 136, 256),)
    given = a, b, torch.zeros(1, 8, 136).bfloat16(), torch.tensor([8]).int(), 8
    assert hooks.grouped_gemm_nt_f8f8bf16_masked(grouped_gemm_nt_f8f8bf16_masked, *given, **options) == seen
    packed = a[0], torch.ones(1, 8, 1, dtype=torch.int32)
    own = hooks.grouped_gemm_nt_f8f8bf16_masked(grouped_gemm_nt_f8f8bf16_masked, packed, *given[1:])
    assert own == ("its own", None, 256, None, None)
    if "overlap_args" not in options:
        flat = [tuple(x[0] for x in a), *given[1:2], given[2][0], torch.zeros(8).int()]
        own = hooks.grouped_gemm_nt_f8f8bf16_contig(grouped_gemm_nt_f8f8bf16_contig, *flat, **options)
        assert own == ("its own", *seen[-2:])


def test_no_rows_are_no_product(sglang):
    a, b = per_token_cast_to_fp8(torch.randn(0, 256)), (*stacked(1, 136, 256),)
    hooks.grouped_gemm_nt_f8f8bf16_contig(None, a, b, torch.empty(0, 136).bfloat16(), torch.zeros(0).int())


def test_products_use_as_many_sms_as_sglang_allows(sglang, monkeypatch):
    seen = []
    for module, name in ((hooks.products, "fp8_linear"), (hooks.grouped, "fp8_grouped_gemm")):
        monkeypatch.setattr(module, name, lambda *_, **options: seen.append(options["num_sms"]))
    layer, a, b = layer_of(136, 272), per_token_cast_to_fp8(torch.randn(1, 8, 256)), (*stacked(1, 136, 256),)
    flat, counts = tuple(x[0] for x in a), torch.tensor([8]).int()

    def multiply():
        hooks.linear(None, torch.zeros(4, 272).bfloat16(), layer.weight, [128, 128], layer.weight_scale_inv)
        hooks.grouped_gemm_nt_f8f8bf16_contig(None, flat, b, torch.zeros(8, 136).bfloat16(), torch.zeros(8).int())
        hooks.grouped_gemm_nt_f8f8bf16_masked(None, a, b, torch.zeros(1, 8, 136).bfloat16(), counts, 8)

    def limited(number):
        return hooks.configure_deep_gemm_num_sms(configure_deep_gemm_num_sms, number)

    with limited(100):
        multiply()
        with limited(None), pytest.raises(KeyError), limited(24):
            assert LIMITS == [100, None, 24]
            multiply()
            raise KeyError
        multiply()
    multiply()
    assert not LIMITS and seen == [100] * 3 + [24] * 3 + [100] * 3 + [None] * 3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("chunk", "most"), [(2048, 2048), (-1, 16384), (None, 16384)])
def test_loaded_models_are_made_ready(monkeypatch, chunk, most, deterministic):
    asked = []
    monkeypatch.setattr(hooks.nn, "precompile_model", lambda *given, **options: asked.append((given, options)))
    monkeypatch.setattr(indexer.logits, "precompile_logits", lambda *given, **options: asked.append((given, options)))
    arguments = SimpleNamespace(
        chunked_prefill_size=chunk, max_prefill_tokens=16384, enable_deterministic_inference=deterministic
    )
    monkeypatch.setattr(hooks, "_settings", {"num_sms": None})
    monkeypatch.setattr(hooks, "_ready", [])
    model = torch.nn.ModuleList(torch.nn.Identity() for _ in range(5))
    for layer, heads, head_dim in zip(model, (64, 64, 129, 64), (128, 128, 128, 576), strict=False):
        layer.index_topk, layer.n_heads, layer.head_dim = 2048, heads, head_dim
    runner = SimpleNamespace(model=model, server_args=arguments)
    for capability in ((10, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, seen=capability: seen)
        hooks.make_ready(None, runner)
    settings = {"batch_invariant": deterministic}
    assert asked[:2] == [((64, 128), {"paged": paged}) for paged in (False, True)]

    def compiled(num_sms):
        options = {"num_sms": num_sms} | settings
        return [((model, most), {"grouping": grouping} | options) for grouping in ("offs", "counts")]

    assert asked[2:] == compiled(None)
    del asked[:]
    for is_captured in (True, False, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=is_captured: captured)
        with hooks.configure_deep_gemm_num_sms(configure_deep_gemm_num_sms, 112):
            assert asked == ([] if is_captured else compiled(112))
    multiplied = []
    monkeypatch.setattr(hooks.products, "fp8_linear", lambda *_, **options: multiplied.append(options))
    layer = layer_of(136, 272)
    hooks.linear(None, torch.zeros(4, 272, dtype=torch.bfloat16), layer.weight, [128, 128], layer.weight_scale_inv)
    assert multiplied[0].items() >= settings.items()


# ---- experts of MXFP4


def server_arguments(**changed):
    names = ("speculative_moe_runner_backend", "enable_lora", "lora_paths", "enable_paged_experts", "kt_weight_path")
    return SimpleNamespace(**dict.fromkeys(names) | {"moe_runner_backend": "auto"} | changed)


def experts_layer(width=96, hidden=160, with_bias=False, device="cpu", **changed):
    """A layer before its weights; and what its runner is told, where `changed` says no other."""
    config = {
        **{"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False},
        **{"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None, "swiglu_limit": None},
        "gate_up_interleaved": True,
    }
    layer = torch.nn.Module()
    of_layer = {"is_draft": False, "num_fused_shared_experts": 0} | {
        name: value for name, value in changed.items() if name not in config
    }
    vars(layer).update(of_layer, with_bias=with_bias, hidden_size=hidden, device=device, layer_name="experts")
    layer.intermediate_size_per_partition = width
    config |= {name: value for name, value in changed.items() if name in config}
    layer.moe_runner_config = SimpleNamespace(**config)
    return layer


GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


@pytest.mark.parametrize("theirs", [Mxfp4MoEMethod, Mxfp4FlashinferCutlassMoEMethod])
@pytest.mark.parametrize(
    ("changed", "is_ours"),
    [
        ({}, True),
        (GPT_OSS, True),
        (GPT_OSS | {"width": 360}, True),
        ({"swiglu_limit": 10.0}, True),
        ({"width": 360}, False),
        ({"hidden": 200}, False),
        ({"gemm1_alpha": 1.702}, False),
        ({"gemm1_clamp_limit": 7.0}, False),
        ({"activation": "situ"}, False),
        ({"is_gated": False}, False),
        ({"no_combine": True}, False),
        ({"apply_router_weight_on_input": True}, False),
        ({"num_fused_shared_experts": 1}, False),
    ],
    ids=str,
)
def test_experts_of_mxfp4_are_taken_where_they_fit(mxfp4, theirs, changed, is_ours):
    own = theirs()
    found = mxfp4.method(Config.get_quant_method, Config(own), experts_layer(**changed), "model.layers.0")
    assert (type(found).__name__ == "DeepTileMxfp4MoEMethod") is is_ours and (is_ours or found is own)


@pytest.mark.parametrize(
    ("changed", "is_draft", "is_ours"),
    [
        ({"moe_runner_backend": "marlin"}, False, False),
        ({"speculative_moe_runner_backend": "marlin"}, False, True),
        ({"speculative_moe_runner_backend": "marlin"}, True, False),
        ({"moe_runner_backend": "marlin", "speculative_moe_runner_backend": "auto"}, True, True),
        ({}, True, True),
        ({"enable_lora": True}, False, False),
        ({"lora_paths": ["a"]}, False, False),
        ({"enable_paged_experts": True}, False, False),
        ({"kt_weight_path": "a"}, False, False),
    ],
    ids=str,
)
def test_backends_asked_for_by_name_are_sglangs(mxfp4, monkeypatch, changed, is_draft, is_ours):
    monkeypatch.setattr(mxfp4.runtime_context, "get_server_args", lambda: server_arguments(**changed))
    found = mxfp4.method(Config.get_quant_method, Config(Mxfp4MoEMethod()), experts_layer(is_draft=is_draft), "")
    assert type(found).__name__ == ("DeepTileMxfp4MoEMethod" if is_ours else "Mxfp4MoEMethod")


@pytest.mark.parametrize("other", ["gpu", "tokens sent between GPUs", "method", "no method"])
def test_other_layers_keep_sglangs_method(mxfp4, monkeypatch, other):
    own = {"method": Mxfp4MarlinMoEMethod(), "no method": None}.get(other, Mxfp4MoEMethod())
    if other == "gpu":
        monkeypatch.setattr(mxfp4.runtime_context, "get_platform", lambda: SimpleNamespace(is_sm90=False))
    elif other == "tokens sent between GPUs":
        monkeypatch.setattr(mxfp4, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: False))
    assert mxfp4.method(Config.get_quant_method, Config(own), experts_layer(), "") is own


def filled(mxfp4, device, theirs=Mxfp4MoEMethod, count=4, width=96, **changed):
    """A layer with its method, as a checkpoint fills it; and its matrices, then biases, in FP32, gates before ups."""
    layer = experts_layer(width, device=device, **changed)
    hidden, alternate = layer.hidden_size, layer.moe_runner_config.gemm1_alpha is not None
    method = mxfp4.method(Config.get_quant_method, Config(theirs()), layer, "")
    method.create_weights(layer, count, hidden, width, torch.bfloat16, weight_loader=None)
    method.create_moe_runner(layer, layer.moe_runner_config)
    wanted = []
    for name, n, k in (("w13", 2 * width, hidden), ("w2", hidden, width)):
        codes, scale, _, exact = draw("mxfp4", (count, n, k))
        bias = torch.randn(count, n).bfloat16() if layer.with_bias else torch.zeros(count, n)
        given = {"weight": codes, f"weight_scale{theirs.inverse}": scale.view(torch.uint8)}
        for of, x in (given | ({"weight_bias": bias} if layer.with_bias else {})).items():
            getattr(layer, f"{name}_{of}").data[tuple(map(slice, x.shape))] = x.to(device)
        both = [exact.float(), bias.float()]
        if alternate and name == "w13":
            both = [torch.cat([x[:, ::2], x[:, 1::2]], 1) for x in both]
        wanted += [x.to(device) for x in both]
    return layer, method, wanted[::2] + wanted[1::2]


@DEVICES
@pytest.mark.parametrize(
    ("theirs", "changed"),
    [
        (Mxfp4MoEMethod, GPT_OSS | {"with_bias": True}),
        (Mxfp4MoEMethod, GPT_OSS | {"gate_up_interleaved": True, "gemm1_beta": 0.5}),
        (Mxfp4FlashinferCutlassMoEMethod, {"swiglu_limit": 7.0}),
        (Mxfp4FlashinferCutlassMoEMethod, {}),
    ],
)
def test_experts_of_mxfp4_multiply(mxfp4, device, theirs, changed):
    layer, method, wide = filled(mxfp4, device, theirs, **changed)
    method.process_weights_after_loading(layer)
    assert not [name for name, _ in layer.named_parameters() if name.startswith(("w13", "w2"))]
    hidden, config = layer.hidden_size, layer.moe_runner_config
    alpha, beta = (1.702, 1 if config.gemm1_beta is None else 0.5) if config.gemm1_alpha else (1, 0)
    limit = 7 if "gemm1_alpha" in changed or "swiglu_limit" in changed else float("inf")
    x = (torch.randn(5, hidden, device=device) * 3 / (wide[0].std() * hidden**0.5)).bfloat16()
    ids = torch.stack([torch.randperm(4, device=device)[:2] for _ in x]).int()
    ids[0, 1] = -1  # of another GPU
    shares = torch.rand(5, 2, device=device)
    wanted = experts_of_tokens(x, ids, shares, *wide, limit=limit, alpha=alpha, beta=beta)
    topk = SimpleNamespace(hidden_states=x, topk_output=(shares, ids, None))
    (out,) = method.apply(layer, topk)
    assert out.dtype == torch.bfloat16 and relative_error(out, wanted) < 0.08
    assert method.fuse_routed_scaling_factor_in_topk and method.runner is None


def test_widths_are_padded_where_gates_and_ups_alternate(mxfp4):
    layer, method, _ = filled(mxfp4, "cpu", width=224, **GPT_OSS)
    method.process_weights_after_loading(layer)
    assert layer.deep_tile_experts.gate_up.shape[1] == 2 * round_up(224, 64)


def test_packed_weights_are_not_loaded_again(mxfp4):
    layer, method, _ = filled(mxfp4, "cpu")
    with pytest.raises(RuntimeError, match="experts are packed .*SGLANG_USE_DEEP_TILE"):
        method.restore_weights_before_loading(layer)


def test_weights_that_cannot_be_packed_are_refused_with_the_remedy(mxfp4):
    layer, method, _ = filled(mxfp4, "cpu")
    layer.w13_weight_scale[0, 0] = 200
    with pytest.raises(ValueError, match=r"max_error.*--moe-runner-backend marlin"):
        method.process_weights_after_loading(layer)


def test_tokens_are_padded_where_sglang_has_padded_weights(mxfp4):
    layer, method, _ = filled(mxfp4, "cpu")
    method.process_weights_after_loading(layer)
    x, shares = torch.randn(3, layer.hidden_size).bfloat16(), torch.rand(3, 2)
    x[:, 130:] = 0
    outs = []
    for given in (x, x[:, :130].contiguous()):
        topk = SimpleNamespace(hidden_states=given, topk_output=(shares, torch.tensor([[0, 1]] * 3).int(), None))
        outs += method.apply(layer, topk)
    assert same_bits(*outs)


@pytest.mark.parametrize("changed", ["arguments", "missing", "arguments of DeepGEMM's", "DeepGEMM"])
def test_a_release_with_other_functions_has_block_fp8_served(sglang, monkeypatch, caplog, changed):
    if changed == "arguments":
        monkeypatch.setattr(Config, "get_quant_method", lambda self, layer: None)
    elif changed == "missing":
        monkeypatch.delattr(sys.modules[f"{QUANTIZATION}.mxfp4"], "Mxfp4Config")
    elif changed == "DeepGEMM":
        monkeypatch.setitem(sys.modules, "deep_gemm", None)
    else:
        monkeypatch.setattr(sys.modules["deep_gemm"], "fp8_mqa_logits", print)
    register()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    left, name = ("the indexer", "deep_gemm") if "DeepGEMM" in changed else ("experts of MXFP4", "get_quant_method")
    assert f"leaves {left} to SGLang" in record.getMessage()
    assert len(sglang) == 7 and not [target for target in sglang if name in target.split(".")]


# ---- indexers


def test_the_indexer_is_left_to_functions_that_are_deep_tiles_already(sglang, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    deep_gemm.install(force=True)
    register()
    deep_gemm.uninstall()
    assert len(sglang) == 7 and not [record for record in caplog.records if record.levelname == "WARNING"]


def queries(device, heads=32, head_dim=128):
    q = torch.randn(6, heads, head_dim, device=device).to(torch.float8_e4m3fn)
    return q, torch.rand(6, heads, device=device)


@DEVICES
@pytest.mark.parametrize("columns", [0, 64])
def test_logits_of_prompts(device, columns):
    q, weights = queries(device)
    kv = torch.randn(70, 128, device=device).to(torch.float8_e4m3fn), torch.rand(70, device=device)
    bounds = torch.arange(6, device=device).int(), torch.arange(65, 71, device=device).int()
    out = indexer.fp8_mqa_logits(None, q, kv, weights, *bounds, clean_logits=True, max_seqlen_k=columns)
    assert same_bits(out, mqa_logits(q, *kv, weights, *bounds, clean=True, columns=columns or None))


@DEVICES
def test_logits_of_pages(device):
    q, weights = queries(device)
    cache = torch.randint(0, 120, (3, 64, 1, 132), dtype=torch.uint8, device=device)
    cache.flatten(1)[:, 64 * 128 :] = torch.ones(3, 64, device=device).view(torch.uint8)
    table = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32, device=device)
    lengths = torch.tensor([[70, 71, 72], [3, 4, 5]], dtype=torch.int32, device=device)
    given = q.unflatten(0, (2, 3)), cache, weights, lengths, table
    out = indexer.fp8_paged_mqa_logits(None, *given, None, 100, clean_logits=True)
    assert same_bits(out, paged_mqa_logits(*given, columns=100, clean=True))


@pytest.mark.parametrize("changed", ["bf16 q", "bf16 weights", "129 heads", "head_dim", "queries", "pages", "indices"])
def test_other_logits_go_to_sglangs_own(changed):
    q, weights = queries("cpu", *{"129 heads": (129, 128), "head_dim": (32, 96)}.get(changed, ()))
    q = q.bfloat16() if changed == "bf16 q" else q
    weights = weights.bfloat16() if changed == "bf16 weights" else weights
    page, indices = (32 if changed == "pages" else 64), ("i" if changed == "indices" else None)
    of_sequences = q.expand(9, *q.shape).transpose(0, 1) if changed == "queries" else q[:, None]
    given = of_sequences, torch.zeros(2, page, 1, 132).byte(), weights, None, None, "schedule", 100, False
    own = indexer.fp8_paged_mqa_logits(fp8_paged_mqa_logits, *given, indices)
    assert own == ("its own", 100, False, indices)
    if changed not in ("queries", "pages", "indices"):
        own = indexer.fp8_mqa_logits(fp8_mqa_logits, q, (None, None), weights, None, None, True, 7)
        assert own == ("its own", True, 7)
