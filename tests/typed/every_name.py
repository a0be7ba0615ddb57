"""A user's script that calls every public name: what mypy --strict and pyright check, and nobody runs.

`assert_type` fails for Any. A line that must not pass says so: --strict refuses a `type: ignore` that is not needed.
"""

import torch
from typing_extensions import assert_type

import deep_tile
from deep_tile.compat import deep_ep, deep_gemm

x = torch.empty(64, 512, dtype=torch.bfloat16)
w = torch.empty(256, 512, dtype=torch.bfloat16)
Pair = tuple[torch.Tensor, torch.Tensor]

# Casts.
a, a_scale = assert_type(deep_tile.per_token_cast_to_fp8(x, scale_layout="row", round_scale="pow2"), Pair)
b, b_scale = assert_type(deep_tile.per_block_cast_to_fp8(w, amax_floor=1e-4, exact="reciprocal"), Pair)
assert_type(deep_tile.quantize_weight(w), Pair)
assert_type(deep_tile.dequantize(a, a_scale), torch.Tensor)
along, along_scale = assert_type(deep_tile.transposed_cast_to_fp8(x), Pair)
assert_type(deep_tile.transpose_fp8(b), torch.Tensor)
assert_type(deep_tile.cast_both(x), deep_tile.CastBoth)
assert_type(deep_tile.cast_both(x).at_scale, torch.Tensor)
assert_type(deep_tile.cast_weight(w), deep_tile.CastWeight)
assert_type(deep_tile.to_blocks(b, b_scale), deep_tile.Blocks)
assert_type(deep_tile.to_blocks(b, b_scale).report.changed, int)
assert_type(deep_tile.pad_shard(b, b_scale, first_row=64), Pair)
assert_type(deep_tile.interleave_gate_up(w), torch.Tensor)

# GEMMs.
config = deep_tile.GemmConfig(block_m=64, block_n=128, stages=4)
assert_type(config.name, str)
out = assert_type(deep_tile.fp8_gemm(a, a_scale, b, b_scale, bias=w, out_dtype=torch.float32), torch.Tensor)
assert_type(deep_tile.fp8_gemm(a, a_scale, b, b_scale, out, config=config, num_sms=78), torch.Tensor)
assert_type(deep_tile.fp8_linear(x, b, b_scale), torch.Tensor)
assert_type(deep_tile.fp8_linear((a, a_scale), b, b_scale, bias=None), torch.Tensor)
assert_type(deep_tile.fp8_gemm_cast(a, a_scale, b, b_scale, activation="swiglu"), Pair)
assert_type(deep_tile.gemm(x, w, accumulate=False), torch.Tensor)
assert_type(deep_tile.int8_gemm(a, a_scale, b, b_scale), torch.Tensor)
assert_type(deep_tile.scaled_gemm(a, a_scale, b, b_scale, fast_accum=False), torch.Tensor)
assert_type(deep_tile.fp8_wgrad(along, along_scale, along, along_scale, out), torch.Tensor)
plan = assert_type(deep_tile.prepare(a, a_scale, b, b_scale), deep_tile.Plan)
assert_type(plan(a, a_scale), torch.Tensor)

# Experts.
routing = assert_type(deep_tile.sort_by_expert(x, 8, alignment=128), deep_tile.Routing)
assert_type(routing.offs, torch.Tensor)
gate_up = assert_type(deep_tile.fp8_grouped_gemm(a, a_scale, b, b_scale, routing.offs), torch.Tensor)
assert_type(deep_tile.silu_mul_cast_to_fp8(gate_up, offs=routing.offs, limit=7.0), Pair)
assert_type(deep_tile.grouped_gemm(x, w, counts=routing.offs), torch.Tensor)
assert_type(deep_tile.scaled_grouped_gemm(a, a_scale, b, b_scale, routing.offs), torch.Tensor)
assert_type(deep_tile.fp8_grouped_wgrad(a, a_scale, b, b_scale, routing.offs, out), torch.Tensor)
assert_type(deep_tile.combine(gate_up, x, routing.index), torch.Tensor)
assert_type(deep_tile.mqa_logits(x, x, x, x, x, x), torch.Tensor)
assert_type(deep_tile.paged_mqa_logits(x, x, x, x, x), torch.Tensor)
assert_type(deep_tile.precompile_logits(32, 128), int)
assert_type(deep_tile.swiglu_gradient_cast_both(x, w)[0], torch.Tensor)
assert_type(deep_tile.thin_gemm(x, w), torch.Tensor)
assert_type(deep_tile.split_weight(w), torch.Tensor)
assert_type(deep_tile.prenorm_gemm(x, w), Pair)
assert_type(deep_tile.einsum("bmk,bnk->mn", x, w), torch.Tensor)
assert_type(deep_tile.precompile_thin(), int)
codes = deep_tile.read_weight({"weight": b}, prefix="")
assert_type(codes["format"], str)
assert_type(deep_tile.to_blocks(**codes).weight, torch.Tensor)
packed = deep_tile.pack_weight(**codes)
assert_type(packed[0], torch.Tensor)
assert_type(deep_tile.unpack_weight(b, b_scale)[0], torch.Tensor)
assert_type(deep_tile.packed_gemm(a, a_scale, b, b_scale), torch.Tensor)
assert_type(deep_tile.packed_grouped_gemm(a, a_scale, b, b_scale, routing.offs), torch.Tensor)

# Before the first call, and what is chosen.
made = assert_type(deep_tile.precompile([(256, 512, 64)], kind="bf16", layouts=["nn"]), deep_tile.Precompiled)
assert_type(made.compiled, int)
assert_type(made.configs, tuple[deep_tile.GemmConfig, ...])
assert_type(deep_tile.is_available(), tuple[bool, str])
assert_type(deep_tile.supports(64, 256, 512, dtype=torch.bfloat16, call="fp8_linear"), tuple[bool, str])
assert_type(deep_tile.compilations(), int)
assert_type(deep_tile.explain(64, 256, 512), deep_tile.Explanation)
assert_type(deep_tile.explain(64, 256, 512, call="thin_gemm", dtype=torch.float32)["predicted"], dict[str, float])
assert_type(deep_tile.explain_groups(8, 64, 256, 512), deep_tile.GroupsExplanation)
assert_type(deep_tile.explain_groups(8, 64, 256, 512)["why"], str)
with deep_tile.forbid_compilation():
    pass
try:
    deep_tile.forbid_compilation(False)
except deep_tile.CompileError as error:
    assert_type(error, deep_tile.CompileError)

# Modules, training, several GPUs, other packages' names.
layer = assert_type(deep_tile.nn.Linear(512, 256, bias=False), deep_tile.nn.Linear)
assert_type(layer.forward(x), torch.Tensor)
assert_type(deep_tile.nn.Linear.from_fp8(b, b_scale, format="mxfp4"), deep_tile.nn.Linear)
assert_type(deep_tile.nn.replace_linears(layer, lambda name, linear: "lm_head" not in name), int)
assert_type(deep_tile.precompile_model(layer, max_tokens=8192), deep_tile.Precompiled)
assert_type(deep_tile.train.convert(layer, tokens=4096), torch.nn.Module)
assert_type(deep_tile.train.gather_fp8(layer), torch.nn.Module)
deep_tile.train.invalidate()
assert_type(deep_tile.train.linear(x, w, recipe=deep_tile.train.Recipe(wgrad="bf16")), torch.Tensor)
assert_type(deep_tile.train.linears(x, (w, w)), tuple[torch.Tensor, ...])
assert_type(deep_tile.train.experts(x, routing.rows, x, w, w), torch.Tensor)
assert_type(deep_tile.train.precompile(layer, 4096), deep_tile.Precompiled)
assert_type(deep_tile.train.predict(4096, 256, 512).pays, bool)
shard = assert_type(deep_tile.distributed.shard_weight(b, b_scale, 0, 2, "column"), deep_tile.distributed.WeightShard)
assert_type(shard.weight, torch.Tensor)
assert_type(deep_tile.distributed.check_shardable(256, 512, 2, "row"), int)
assert_type(deep_tile.torch_compat.grouped_mm(x, w, offs=routing.offs), torch.Tensor)
assert_type(deep_tile.watch.report(), str)
assert_type(deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False), Pair)
assert_type(deep_ep.bounds(routing), dict[str, torch.Tensor | int])
deep_tile.compat.deep_gemm.install()
deep_tile.integrations.transformers.install(exact="divide")

# What a checker must refuse.
deep_tile.fp8_gemm(a, a_scale, b, b_scale, bogus=1)  # type: ignore[call-arg]
deep_tile.fp8_gemm(a, a_scale, b, "b_scale")  # type: ignore[arg-type]
deep_tile.supports("64", 256, 512)  # type: ignore[arg-type]
deep_tile.fp8_gem(a, a_scale, b, b_scale)  # type: ignore[attr-defined]
