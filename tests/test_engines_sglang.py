"""The plugin for SGLang, on stand-ins that have the signatures of SGLang 0.5.23, written anew and no longer than it
needs. `make test-engines` runs it on SGLang's own modules.
"""

import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import same_bits
from stand_ins import add_modules, assert_accepts, layer_of, product, relative_error, stacked

from deep_tile import fp8_gemm, fp8_linear, per_token_cast_to_fp8
from deep_tile.integrations import engines
from deep_tile.integrations import sglang_hooks as hooks
from deep_tile.integrations.sglang import register

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FLOOR = {"amax_floor": 1e-10}
FP8_UTILS = "sglang.srt.layers.quantization.fp8_utils"
ENTRYPOINT = "sglang.srt.layers.deep_gemm_wrapper.entrypoint"


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
    grouped = grouped_gemm_nt_f8f8bf16_contig, grouped_gemm_nt_f8f8bf16_masked
    of_groups = {theirs.__name__: theirs for theirs in grouped}
    own = SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 128)
    modules = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        FP8_UTILS: {linear.__name__: linear},
        ENTRYPOINT: of_groups | {"deep_gemm": own},
    }
    monkeypatch.setenv("SGLANG_USE_DEEP_TILE", "1")
    add_modules(monkeypatch, modules)
    yield registered
    engines.leave(engines.SGLANG)


def test_hooks_have_sglangs_signatures():
    for hook, theirs in (
        (hooks.linear, deepgemm_w8a8_block_fp8_linear_with_fallback),
        (hooks.grouped_gemm_nt_f8f8bf16_contig, grouped_gemm_nt_f8f8bf16_contig),
        (hooks.grouped_gemm_nt_f8f8bf16_masked, grouped_gemm_nt_f8f8bf16_masked),
    ):
        assert_accepts(hook, theirs, skipped=1)


def test_hooks_are_registered_once(sglang):
    register()
    register()
    assert sglang == {
        f"{FP8_UTILS}.deepgemm_w8a8_block_fp8_linear_with_fallback": (hooks.linear, HookType.AROUND),
        f"{ENTRYPOINT}.grouped_gemm_nt_f8f8bf16_contig": (hooks.grouped_gemm_nt_f8f8bf16_contig, HookType.AROUND),
        f"{ENTRYPOINT}.grouped_gemm_nt_f8f8bf16_masked": (hooks.grouped_gemm_nt_f8f8bf16_masked, HookType.AROUND),
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    callable_, *loaded = done.stdout.split()
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


@pytest.mark.parametrize(("chunk", "most"), [(2048, 2048), (-1, 16384), (None, 16384)])
def test_loaded_models_are_made_ready(monkeypatch, chunk, most):
    asked = []
    monkeypatch.setattr(hooks.nn, "precompile_model", lambda *given, **options: asked.append((given, options)))
    arguments = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    runner = SimpleNamespace(model="m", server_args=arguments)
    for capability in ((10, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, seen=capability: seen)
        hooks.make_ready(None, runner)
    assert asked == [(("m", most), {"grouping": grouping}) for grouping in ("offs", "counts")]
