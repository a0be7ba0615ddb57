"""Small GEMMs and casts that together use every feature of the kernels, for NVIDIA's compute-sanitizer.

    python tests/run_gpu.py --parts memcheck racecheck synccheck initcheck

runs it under these tools. Inputs have no slack around them, so that an access beyond one is an access beyond its
allocation (with PYTORCH_NO_CUDA_MEMORY_CACHING=1). Ends with status 1 on a wrong value.

Inputs and `out` come from the host, and results go back, in one copy each, the bytes between rows included. initcheck
follows copies, but not what kernels write that --kernel-regex leaves out, such as torch's: filled by those, all would
pass for never written. So it counts guard areas, here the bytes between rows, as written, and says nothing about reads
of them; that there are none is what the NaN around the inputs of all other GPU tests shows.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from formats import IN_FP8, NAMES_OF_PACKED, draw, fp8_product
from helpers import (
    ACCUMULATION,
    Exact,
    Operands,
    added,
    assert_accurate,
    assert_cast_within,
    assert_silu_mul_cast,
    exact_product,
    make_operands,
    make_product,
    norm_bounds,
    product_of,
    with_finish,
)

import deep_tile
from deep_tile import (
    GemmConfig,
    cast_both,
    cast_weight,
    combine,
    dequantize,
    fp8_gemm,
    fp8_gemm_cast,
    fp8_grouped_wgrad,
    mqa_logits,
    norms,
    packed,
    paged_mqa_logits,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    prenorm_gemm,
    silu_mul_cast_to_fp8,
    sort_by_expert,
    swiglu_gradient_cast_both,
    thin_gemm,
    transpose_fp8,
    transposed_cast_to_fp8,
)
from deep_tile.config import round_up
from deep_tile.kinds import RESULTS
from deep_tile.reference import MAX_RELATIVE_ERROR, relative_error
from deep_tile.select.groups import all_grouped_configs, grouped_configs
from deep_tile.tools.products import multiply_groups


class Case(NamedTuple):
    config: GemmConfig
    m: int
    n: int
    k: int
    num_sms: int


CASES = (
    Case(GemmConfig(64, 16, 4), 1, 40, 656, 2),
    Case(GemmConfig(64, 64, 5, tma_store=False), 70, 133, 144, 3),
    Case(GemmConfig(64, 48, 3, store_buffers=1), 70, 136, 500, 2),
    Case(GemmConfig(64, 224, 3), 65, 232, 500, 2),
    Case(GemmConfig(128, 64, 4), 130, 136, 600, 2),
    Case(GemmConfig(128, 144, 3, store_buffers=1), 130, 296, 300, 2),
    Case(GemmConfig(128, 256, 2, tma_store=False), 129, 261, 400, 3),
    Case(GemmConfig(128, 256, 2), 129, 264, 400, 3),
    Case(GemmConfig(128, 160, 3, store_buffers=5), 130, 328, 400, 2),
    Case(GemmConfig(128, 176, 3, store_buffers=3), 129, 360, 400, 2),
    Case(GemmConfig(128, 192, 2, store_buffers=3), 129, 200, 400, 2),
    Case(GemmConfig(64, 256, 2, store_buffers=4), 65, 264, 300, 2),
    Case(GemmConfig(256, 64, 2, store_buffers=1), 257, 72, 400, 1),
    Case(GemmConfig(128, 128, 3), 130, 264, 600, 2),
    Case(GemmConfig(128, 64, 3, 2, 1), 300, 136, 520, 5),
    Case(GemmConfig(128, 64, 8, 2, 1, store_buffers=1), 300, 136, 1100, 5),
    Case(GemmConfig(128, 80, 3, 1, 2, tma_store=False), 130, 165, 520, 2),
    Case(GemmConfig(256, 128, 2, 1, 2, store_buffers=1), 9, 264, 400, 2),
    Case(GemmConfig(256, 96, 2, 2, 1), 520, 200, 260, 2),
    Case(GemmConfig(64, 32, 2, scale_blocks=4), 9, 72, 1100, 2),
    Case(GemmConfig(64, 64, 2, split_k=4, scale_blocks=2), 70, 136, 1300, 4),
    Case(GemmConfig(128, 64, 2, split_k=2), 130, 200, 600, 2),
    Case(GemmConfig(128, 64, 2, split_k=2, scale_blocks=2), 257, 136, 1300, 4),
    Case(GemmConfig(64, 128, 2, split_k=8, tma_store=False), 65, 133, 700, 8),
    Case(GemmConfig(64, 32, 2, b_stages=3), 200, 72, 300, 2),
    Case(GemmConfig(128, 192, 3, store_buffers=3, b_stages=2), 300, 584, 200, 2),
    Case(GemmConfig(128, 112, 3, pairs=True), 130, 456, 500, 2),
    Case(GemmConfig(128, 144, 3, store_buffers=5, pairs=True), 130, 584, 500, 2),
    Case(GemmConfig(64, 32, 4, 2, 1), 130, 72, 600, 2),
    Case(GemmConfig(64, 32, 3, split_k=2), 70, 72, 700, 2),
    Case(GemmConfig(64, 96, 3, 1, 2, tma_store=False), 70, 201, 520, 2),
    Case(GemmConfig(64, 144, 3), 70, 296, 400, 2),
    Case(GemmConfig(64, 160, 3, 2, 1), 130, 168, 400, 2),
    Case(GemmConfig(64, 160, 2, split_k=2), 70, 328, 600, 2),
    Case(GemmConfig(64, 176, 3, b_stages=2), 130, 184, 200, 1),
    Case(GemmConfig(64, 208, 2, 1, 2), 65, 424, 300, 2),
    Case(GemmConfig(64, 224, 3, b_stages=2), 130, 232, 256, 2),
    Case(GemmConfig(64, 256, 2, split_k=4), 65, 264, 900, 4),
    Case(GemmConfig(128, 80, 3), 130, 168, 500, 2),
    Case(GemmConfig(128, 96, 3, tma_store=False, b_stages=3), 300, 201, 300, 2),
    Case(GemmConfig(128, 112, 3, tma_store=False, pairs=True), 130, 341, 500, 2),
    Case(GemmConfig(128, 128, 3, split_k=2), 130, 264, 1100, 2),
    Case(GemmConfig(128, 176, 3, 1, 2), 130, 360, 400, 2),
    Case(GemmConfig(128, 192, 2, split_k=2, store_buffers=1), 130, 200, 600, 2),
    Case(GemmConfig(128, 208, 3, b_stages=2), 260, 216, 256, 2),
    Case(GemmConfig(128, 256, 2, 2, 1), 260, 264, 300, 2),
    Case(GemmConfig(128, 256, 2, split_k=2), 129, 264, 600, 2),
    Case(GemmConfig(256, 64, 2, b_stages=2), 520, 72, 200, 2),
    Case(GemmConfig(256, 64, 2, split_k=4, store_buffers=1), 257, 72, 1100, 4),
    Case(GemmConfig(256, 128, 2, split_k=2, tma_store=False, store_buffers=1), 270, 261, 600, 2),
    Case(GemmConfig(256, 144, 2), 257, 152, 300, 1),
    Case(GemmConfig(256, 144, 2, 1, 2), 257, 296, 300, 2),
    Case(GemmConfig(256, 144, 2, store_buffers=1, b_stages=2), 520, 152, 256, 2),
    Case(GemmConfig(128, 128, 3, 2, 2), 300, 264, 520, 4),
    Case(GemmConfig(128, 192, 2, 1, 4, store_buffers=3), 130, 200, 400, 4),
    Case(GemmConfig(128, 128, 2, 4, 2), 130, 392, 520, 8),
    Case(GemmConfig(64, 32, 3, 2, 4), 130, 136, 520, 8),
    Case(GemmConfig(64, 64, 4, 4, 1, tma_store=False), 330, 133, 520, 4),
    Case(GemmConfig(64, 32, 2, 1, 2, 2), 70, 72, 700, 4),
    Case(GemmConfig(64, 64, 2, 2, 1, 4, scale_blocks=2, tma_store=False), 130, 133, 1300, 8),
    Case(GemmConfig(64, 64, 2, 1, 2, 2, scale_blocks=4), 70, 136, 2100, 4),
    Case(GemmConfig(64, 224, 2, 1, 2, 2), 65, 456, 600, 4),
    Case(GemmConfig(128, 32, 2, 1, 2, 2, scale_blocks=2), 130, 72, 1300, 4),
    Case(GemmConfig(128, 64, 2, 2, 2, 2), 130, 136, 600, 8),
    Case(GemmConfig(128, 192, 2, 1, 2, 2, store_buffers=1), 130, 392, 600, 4),
    Case(GemmConfig(128, 256, 2, 2, 1, 2), 260, 264, 600, 4),
    Case(GemmConfig(256, 64, 2, 2, 1, 4, store_buffers=1), 520, 72, 1100, 8),
)
"""Every family of kernels (strategies.py), and every feature that a legal config can have; rings that go round, K that
ends inside a block, ragged edges, several waves, clusters that overhang the matrix or have more stages than are
requested at first."""


GROUPS = (64, 0, 1, 130, 15, 5)
"""Rows of each group: whole tiles, none, one, more than a tile, less than a box."""


CASTS = (
    *((torch.bfloat16, 70, 304), (torch.float32, 130, 260), (torch.float16, 3, 128)),
    *((torch.bfloat16, 129, 131), (torch.float32, 129, 130), (torch.float16, 5, 77)),
)
"""dtype, rows and columns: first whole vectors, then single elements; short last blocks."""


def tight(x: torch.Tensor, device: str, multiple: int = 1) -> torch.Tensor:
    """A copy with nothing beyond its last row; rows are a multiple of `multiple` elements apart."""
    columns = x.shape[-1]
    copy = torch.zeros(*x.shape[:-1], round_up(columns, multiple), dtype=x.dtype)
    copy[..., :columns] = x
    return copy.to(device)[..., :columns]


def tight_operand(x: torch.Tensor, k: int, device: str) -> torch.Tensor:
    """An operand, along k or along its rows as it lies, or a scale."""
    if x.shape[1] != k:
        return tight(x, device)
    along_rows = x.stride(0) == 1 and x.stride(1) > 1
    copy = tight(x.t() if along_rows else x, device, 16 // x.element_size())
    return copy.t() if along_rows else copy


def tight_operands(operands: Operands, device: str, m_major: bool) -> Operands:
    """Operands without slack. Rows of a and b, and columns of an M-major a_scale, lie multiples of 16 bytes apart for
    TMA."""
    a, b = (tight(x, device, 16) for x in (operands.a, operands.b))
    a_scale = tight(operands.a_scale.t(), device, 4).t() if m_major else tight(operands.a_scale, device)
    return Operands(a, a_scale, b, tight(operands.b_scale, device))


def run(case: Case, device: str = "cuda") -> None:
    """Raises AssertionError on a wrong value."""
    operands = make_operands(case.m, case.n, case.k)
    columns = round_up(case.n, 8) if case.config.tma_store else case.n
    out = torch.full((case.m, columns), float("nan"), dtype=torch.bfloat16).to(device)
    on_device = tight_operands(operands, device, m_major=case.config.bulk_scales)
    fp8_gemm(*on_device, out[:, : case.n], config=case.config, num_sms=case.num_sms)
    assert_accurate(out.cpu()[:, : case.n], exact_product(operands))


KINDS_CASES = (
    Case(GemmConfig(128, 256, 2, kind="bf16"), 129, 264, 200, 3),
    Case(GemmConfig(64, 64, 3, kind="fp16", output="fp32", split_k=4, tma_store=False), 70, 133, 300, 4),
    Case(GemmConfig(64, 32, 3, kind="bf16", layout="tn", scale_blocks=2), 70, 40, 200, 2),
    Case(GemmConfig(128, 96, 3, 2, 1, kind="fp16", layout="nn"), 260, 200, 200, 2),
    Case(GemmConfig(256, 128, 2, 1, 2, kind="bf16", layout="tt", output="fp32", tma_store=False), 257, 133, 200, 2),
    Case(GemmConfig(64, 64, 3, kind="fp16", layout="tn", split_k=4, tma_store=False), 70, 133, 300, 4),
    Case(GemmConfig(128, 144, 3, kind="bf16", layout="nn", store_buffers=3, transposed=True), 299, 136, 200, 2),
    Case(GemmConfig(128, 224, 2, 2, 1, kind="fp16", layout="tn", transposed=True), 229, 264, 200, 2),
    Case(GemmConfig(64, 128, 2, kind="bf16", split_k=2, store_buffers=1, transposed=True), 133, 72, 400, 2),
    Case(GemmConfig(128, 192, 2, 1, 2, 2, kind="bf16", store_buffers=1, transposed=True), 299, 136, 400, 4),
    Case(GemmConfig(128, 128, 3, 2, 1, 2, kind="bf16", layout="tn"), 260, 264, 400, 4),
    Case(GemmConfig(256, 144, 2, 2, 2, kind="bf16", layout="nn", store_buffers=1, transposed=True), 299, 264, 200, 4),
    Case(GemmConfig(128, 128, 3, kind="int8"), 130, 264, 600, 2),
    Case(GemmConfig(256, 64, 2, 1, 2, kind="fp8_rows"), 257, 136, 400, 2),
    Case(GemmConfig(64, 96, 3, kind="int8_rows", tma_store=False), 70, 201, 520, 2),
    Case(GemmConfig(128, 128, 3, kind="fp8_rows_e5m2_e4m3"), 130, 264, 400, 2),
    Case(GemmConfig(128, 256, 2, kind="fp8_rows_promoted"), 130, 264, 400, 2),
    Case(GemmConfig(64, 64, 3, kind="fp8_rows_promoted", split_k=2, tma_store=False), 70, 133, 600, 4),
    Case(GemmConfig(64, 64, 3, kind="int8_unscaled", split_k=4), 70, 136, 800, 4),
    Case(GemmConfig(128, 128, 3, kind="bf16", accumulate=True), 130, 264, 200, 3),
    Case(GemmConfig(64, 96, 3, kind="fp8_rows", output="fp16", accumulate=True, tma_store=False), 70, 201, 520, 2),
    Case(GemmConfig(128, 64, 3, output="fp32", store_buffers=1), 130, 136, 600, 2),
    Case(GemmConfig(128, 192, 2, output="fp16", tma_store=False), 129, 201, 400, 2),
    Case(GemmConfig(128, 256, 2, bias="bf16", activation="gelu"), 129, 264, 400, 3),
    Case(GemmConfig(128, 256, 2, 2, 1, bias="fp32", activation="swiglu"), 260, 528, 300, 2),
    Case(GemmConfig(64, 64, 4, bias="fp16", tma_store=False), 70, 133, 600, 3),
    Case(GemmConfig(64, 128, 2, split_k=4, bias="fp32", activation="silu", tma_store=False), 65, 133, 700, 4),
    Case(GemmConfig(64, 128, 2, split_k=2, activation="swiglu"), 70, 272, 700, 2),
    Case(GemmConfig(128, 96, 3, activation="swiglu", output="fp32", tma_store=False), 130, 208, 500, 2),
    Case(GemmConfig(128, 256, 2, kind="bf16", bias="fp16", activation="gelu_tanh"), 129, 264, 200, 3),
    Case(GemmConfig(256, 128, 2, kind="fp8_rows", bias="bf16", activation="relu"), 257, 136, 400, 2),
)
"""Other kinds, output formats and epilogues."""


def run_kind(case: Case, device: str = "cuda") -> None:
    """Raises AssertionError on a wrong value."""
    config = case.config
    product = make_product(config.kind, case.m, case.n, case.k, layout=config.layout)
    product = with_finish(product, config.bias, config.activation)
    on_device = [tight_operand(x, case.k, device) for x in product.operands]
    options = dict(product.call.keywords)
    if options["bias"] is not None:
        options["bias"] = options["bias"].contiguous().to(device)
    columns = case.n // config.columns_per_output
    dtype = getattr(torch, RESULTS[config.output].dtype)
    width = round_up(columns, 8) if config.tma_store else columns
    out = torch.full((case.m, width), float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    if config.accumulate:
        out = torch.randn(case.m, width).to(dtype)
        product = added(product, out[:, :columns])
        options["accumulate"] = True
    out = out.to(device)
    product.call.func(*on_device, out[:, :columns], **options, config=config, num_sms=case.num_sms)
    assert_accurate(out.cpu()[:, :columns], product.exact, product.accumulation, product.relative_error)


QUANTIZED_CASES = (
    Case(GemmConfig(64, 128, 4, output="e4m3"), 70, 272, 600, 3),
    Case(GemmConfig(64, 256, 2, output="e4m3"), 65, 400, 300, 2),
    Case(GemmConfig(128, 128, 3, output="e4m3", bias="bf16", activation="silu"), 130, 272, 600, 2),
    Case(GemmConfig(128, 128, 3, output="e4m3", b_stages=3), 300, 272, 300, 2),
    Case(GemmConfig(128, 256, 2, 2, 1, output="e4m3"), 300, 304, 300, 2),
    Case(GemmConfig(128, 256, 2, output="e4m3", bias="fp32", activation="swiglu"), 129, 544, 400, 3),
    Case(GemmConfig(256, 128, 2, 1, 2, output="e4m3", store_buffers=1), 257, 272, 400, 2),
)
"""GEMMs that cast their result to FP8."""


def run_quantized(case: Case, device: str = "cuda") -> None:
    """Raises AssertionError on a result that is farther off than e4m3 is."""
    config = case.config
    product = with_finish(make_product("fp8", case.m, case.n, case.k), config.bias, config.activation)
    on_device = tight_operands(Operands(*product.operands), device, m_major=False)
    options = dict(product.call.keywords)
    if options["bias"] is not None:
        options["bias"] = options["bias"].contiguous().to(device)
    targets = dense_targets((case.m, case.n // config.columns_per_output), device)
    fp8_gemm_cast(*on_device, *targets.values(), **options, config=config, num_sms=case.num_sms)
    result = dequantize(*(x.cpu() for x in targets.values()))
    assert relative_error(result, product.exact.value) < 0.04, config.name


PACKED_CASES = (
    Case(GemmConfig(32, 128, 3, scale_blocks=2, kind="mxfp4"), 70, 272, 1100, 2),
    Case(GemmConfig(32, 64, 2, split_k=2, scale_blocks=4, kind="nvfp4"), 45, 144, 2100, 4),
    Case(GemmConfig(32, 128, 3, scale_blocks=2, kind="int4_32"), 70, 272, 1100, 2),
    Case(GemmConfig(32, 128, 3, scale_blocks=2, grouping="offs", kind="int4_32"), 215, 144, 800, 3),
    Case(GemmConfig(128, 64, 3, store_buffers=1, b_stages=3, kind="int4_32"), 130, 144, 656, 2),
    Case(GemmConfig(128, 128, 3, b_stages=3, grouping="counts", kind="int4_32"), 133, 272, 352, 3),
    Case(GemmConfig(256, 64, 3, split_k=2, b_stages=3, kind="int4_32"), 257, 144, 1100, 2),
    Case(GemmConfig(32, 48, 3, scale_blocks=2, kind="mxfp4"), 29, 144, 900, 2),
    Case(GemmConfig(32, 112, 3, scale_blocks=2, grouping="offs", kind="mxfp4"), 215, 144, 800, 3),
    Case(GemmConfig(64, 64, 3, scale_blocks=2, b_stages=2, kind="mxfp4"), 70, 144, 1100, 2),
    Case(GemmConfig(64, 128, 4, split_k=2, b_stages=3, kind="nvfp4"), 65, 272, 700, 4),
    Case(GemmConfig(128, 128, 3, b_stages=2, kind="mxfp4"), 130, 272, 656, 2),
    Case(GemmConfig(256, 128, 2, store_buffers=1, b_stages=2, kind="nvfp4"), 257, 144, 400, 2),
    Case(GemmConfig(256, 128, 2, split_k=2, store_buffers=1, b_stages=3, kind="mxfp4"), 257, 144, 900, 2),
    Case(GemmConfig(32, 112, 3, tma_store=False, kind="int4"), 33, 240, 700, 2),
    Case(GemmConfig(32, 64, 2, scale_blocks=2, split_k=2, kind="int4"), 20, 208, 1500, 4),
    Case(GemmConfig(32, 48, 3, scale_blocks=2, grouping="counts", kind="nvfp4"), 133, 80, 700, 3),
    Case(GemmConfig(128, 64, 3, b_stages=3, grouping="offs", kind="mxfp4"), 215, 144, 400, 3),
    Case(GemmConfig(64, 128, 3, b_stages=2, grouping="counts", kind="nvfp4"), 133, 144, 352, 3),
)
"""GEMMs with 4-bit weights. For groups m is the number of rows of all GROUPS, or of each."""


def run_packed(case: Case, device: str = "cuda") -> None:
    """Raises AssertionError unless the result has the bits of the FP8 weight's; with K in parts, unless it is near. One
    of a weight that FP8 does not hold must be near the definition's, computed on the CPU."""
    config, groups = case.config, len(GROUPS) if case.config.is_grouped else 1
    name = NAMES_OF_PACKED[config.kind]
    weight, scale, arguments, _ = draw(name, (groups, case.n, case.k))
    b = deep_tile.pack_weight(weight, scale, **arguments)
    a, a_scale = per_token_cast_to_fp8(torch.randn(groups if config.by_counts else 1, case.m, case.k))
    bounds = torch.tensor(list(accumulate(GROUPS)) if config.by_offs else GROUPS, dtype=torch.int32)
    keywords = {"counts": bounds} if config.by_counts else {"offs": bounds} if config.by_offs else {}
    if not config.by_counts:
        a, a_scale = a[0], a_scale[0]
    call, as_fp8 = deep_tile.packed_grouped_gemm, partial(deep_tile.fp8_grouped_gemm, batch_invariant=True)
    if not config.is_grouped:
        call, as_fp8, b = deep_tile.packed_gemm, partial(fp8_product, name), packed.Packed(*(x[0] for x in b))
    operands = [tight(a, device, 16), tight(a_scale, device), *(x.to(device) for x in b)]
    on_device = {name: x.to(device) for name, x in keywords.items()}
    wanted = torch.zeros(*a.shape[:-1], case.n, dtype=torch.bfloat16)
    out, by_fp8 = (wanted.to(device) for _ in range(2))
    call(*operands, out=out, **on_device, config=config, num_sms=case.num_sms)
    if config.kind in IN_FP8:
        as_fp8(*operands[:2], tight(packed.elements(*b, k=case.k), device, 16), operands[3], out=by_fp8, **on_device)
        wanted = by_fp8.cpu()
    else:
        call(a, a_scale, *b, out=wanted, **keywords)
    error = relative_error(out.cpu(), wanted)
    assert error <= (4e-3 if config.parts_of_k > 1 or config.kind not in IN_FP8 else 0), f"{config.name}: {error}"


def run_groups(config: GemmConfig, device: str = "cuda") -> None:
    """Groups of `config`'s kind and layout, one after the other or each in rows of its own. Raises AssertionError."""
    n, k, room = 264, 400 if config.layout == "nt" else 448, max(GROUPS) + 3
    if not config.tma_store:
        n = 261 if config.layout == "nt" else 256
    ends = list(accumulate(GROUPS))
    begins = [end - size for end, size in zip(ends, GROUPS, strict=True)]
    if config.by_counts:
        begins = [group * room for group in range(len(GROUPS))]
    total = len(GROUPS) * room if config.by_counts else ends[-1] + 7
    half = 1 if config.product.scaling == "none" else 2
    rows = make_product(config.kind, total, 1, k).operands[:half]
    weights = [make_product(config.kind, 1, n, k, layout=config.layout).operands[half:] for _ in GROUPS]
    of_rows = [tight(rows[0], device, 16), *(tight(scale, device) for scale in rows[1:])]
    of_groups = [_stacked(parts, config.layout).to(device) for parts in zip(*weights, strict=True)]
    out = torch.full((total, n), -1, dtype=torch.int32).view(torch.uint8)[:, : n * config.out_bytes].contiguous()
    out = into = out.view(getattr(torch, config.out.dtype)).to(device)
    bounds = torch.tensor(GROUPS if config.by_counts else ends, dtype=torch.int32).to(device)
    if config.by_counts:
        *of_rows, into = (x.unflatten(0, (len(GROUPS), room)) for x in (*of_rows, out))
    given = {"counts" if config.by_counts else "offs": bounds, "out": into, "config": config, "num_sms": 3}
    multiply_groups(config.product, (*of_rows, *of_groups), **given)
    results = out.cpu()
    for begin, size, weight in zip(begins, GROUPS, weights, strict=True):
        living = slice(begin, begin + size)
        if size:
            group = product_of(config.kind, (*(x[living] for x in rows), *weight))
            assert_accurate(results[living], group.exact, group.accumulation, group.relative_error)
        results[living].view(torch.uint8).fill_(0xFF)
    assert (results.view(torch.uint8) == 0xFF).all(), "wrote rows that belong to no group"


def _stacked(parts: tuple[torch.Tensor, ...], layout: str) -> torch.Tensor:
    """Matrices of groups, or scales, as they lie."""
    if layout == "nt":
        return torch.stack(parts)
    return torch.stack([part.t() for part in parts]).transpose(1, 2)


GROUPED_KINDS = (
    *grouped_configs("offs", True, kind="bf16"),
    *grouped_configs("counts", False, kind="bf16", operands="nn")[::2],
    *grouped_configs("offs", True, kind="fp16", output="fp32", operands="nn")[1::2],
    *grouped_configs("counts", True, kind="fp8_rows")[1::2],
    *grouped_configs("offs", False, kind="fp8_rows_promoted")[::2],
    *grouped_configs("counts", True, kind="int8", output="fp32")[::3],
)
"""Grouped GEMMs of other kinds than FP8 with block scales."""


def run_casts(dtype: torch.dtype, rows: int, columns: int, device: str = "cuda") -> None:
    """Both casts against the definition, computed on the CPU. Raises AssertionError on a wrong bit."""
    x = torch.randn(rows, columns).to(dtype)
    # Dense: initcheck knows of no byte that another kernel has written, torch's copy of a strided scale among them.
    dense = dense_targets((rows, columns), device)
    for cast, targets in ((per_token_cast_to_fp8, dense), (per_block_cast_to_fp8, {"out": dense["out"]})):
        for on_device, expected in zip(cast(x.to(device), **targets), cast(x), strict=True):
            got, wanted = (y.cpu().contiguous().flatten().view(torch.uint8) for y in (on_device, expected))
            assert torch.equal(got, wanted), cast.__name__


def run_gradients(config: GemmConfig, device: str = "cuda", n: int = 70) -> None:
    """Casts along tokens of groups, one of them empty, and the gradients of their weights. Raises AssertionError."""
    k, lengths = 136 if config.tma_store else 133, (64, 0, 1, 130, 300)
    begins = list(accumulate((round_up(length, 128) for length in lengths), initial=0))
    ends = [begin + length for begin, length in zip(begins, lengths, strict=False)]
    tokens = ends[-1]
    dy, x = torch.randn(tokens, n).bfloat16(), torch.randn(tokens, k).half()
    offs = torch.tensor(ends, dtype=torch.int32)
    on_device, on_host = [], []
    for source in (dy, x):
        targets = transposed_targets(source, device)
        transposed_cast_to_fp8(source.to(device), offs=offs.to(device), **targets)
        wanted = transposed_cast_to_fp8(source, offs=offs)
        for got, expected in zip(targets.values(), wanted, strict=True):
            assert torch.equal(from_device(got).float(), expected.float()), "transposed cast"
        on_device += targets.values()
        on_host += wanted
    before = torch.randn(len(lengths), n, k)
    out = before.clone().to(device)
    fp8_grouped_wgrad(*on_device, offs.to(device), out, config=config, num_sms=3)
    results, operands = out.cpu(), Operands(*on_host)
    for group, (begin, end) in enumerate(zip(begins, ends, strict=False)):
        if begin == end:
            assert torch.equal(results[group], before[group]), "a group without tokens"
            continue
        blocks = slice(begin // 128, round_up(end, 128) // 128)
        part = Operands(*(y[:, blocks] if y.dtype == torch.float32 else y[:, begin:end] for y in operands))
        value, spread = exact_product(part, b_rows=1)
        exact = Exact(value + before[group].double(), spread)
        assert_accurate(results[group], exact, ACCUMULATION, MAX_RELATIVE_ERROR)


def transposed_targets(x: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    """`out`, whose rows begin at multiples of 16 bytes, and `scale_out`."""
    tokens, columns = x.shape
    out = torch.zeros(columns, round_up(tokens, 16), dtype=torch.uint8).to(device)
    scale = torch.zeros(columns, -(-tokens // 128)).to(device)
    return {"out": out.view(torch.float8_e4m3fn)[:, :tokens], "scale_out": scale}


def from_device(x: torch.Tensor) -> torch.Tensor:
    """Copy written memory run by run: the gaps between runs were never written, and a gather would be torch's
    kernel."""
    if x.dim() < 2 or x.is_contiguous():
        return x.to("cpu", copy=True)
    if x.stride(-1) != 1:
        return from_device(x.mT).mT
    return torch.stack([from_device(row) for row in x])


def run_transposed_casts(dtype: torch.dtype, rows: int, columns: int, device: str = "cuda") -> None:
    """Transposed casts by an index that lies. Raises AssertionError on a wrong value."""
    x, index = torch.randn(rows, columns).to(dtype), torch.randint(-1, rows + 1, (2 * rows,))
    targets = transposed_targets(x.new_empty(2 * rows, columns), device)
    transposed_cast_to_fp8(x.to(device), rows=index.to(device), **targets)
    for got, wanted in zip(targets.values(), transposed_cast_to_fp8(x, rows=index), strict=True):
        assert torch.equal(from_device(got).float(), wanted.float()), (rows, columns, dtype)


def run_casts_both(dtype: torch.dtype, rows: int, columns: int, device: str = "cuda") -> None:
    """Casts both ways with sizes in multiples of 16, so that result rows have no gap. Raises AssertionError."""
    rows, columns = (round_up(size, 16) for size in (rows, columns))
    for first in (0, 1):  # of whole vectors, then of single elements
        results = []
        for where in (device, "cpu"):
            torch.manual_seed(first)
            x = torch.randn(rows, columns + first).to(dtype).to(where)[:, first:]
            made = cast_weight(x)
            results.append([*cast_both(x), *cast_both(x, blocks=True), *made, transpose_fp8(made.b)])
            results[-1] += gradient_of_swiglu(rows, round_up(columns, 128), where)
        for got, wanted in zip(*results, strict=True):
            assert torch.equal(from_device(got).float(), wanted.float()), (rows, columns, dtype, first)


def gradient_of_swiglu(rows: int, columns: int, where: str) -> list[torch.Tensor]:
    """The gradient of SwiGLU for gates with exact sigmoids, in BF16 and FP8, with and without shares: equal on every
    device."""
    gates, ups = 200.0 * torch.randint(2, (rows, columns)), torch.randn(rows, columns)
    dh, gate_up = ups.flip(0).bfloat16().to(where), torch.cat([gates, ups], 1).bfloat16().to(where)
    share, codes = torch.rand(rows).to(where), per_token_cast_to_fp8(gate_up)
    in_bf16 = swiglu_gradient_cast_both(dh, gate_up, share=share)
    return [*in_bf16[:6], *swiglu_gradient_cast_both(dh, *codes, blocks=True)[:6]]


ROWS = ((torch.bfloat16, 70, 304), (torch.float16, 33, 131), (torch.bfloat16, 3, 8))
"""dtype, rows and columns of casts of rows: first whole vectors, then single elements."""


def run_casts_of_rows(dtype: torch.dtype, rows: int, columns: int, device: str = "cuda") -> None:
    """Casts by an index that lies, silu_mul in groups, one of them empty; a sum of rows, a sort. Raises
    AssertionError."""
    x, gate_up = torch.randn(rows, columns).to(dtype), torch.randn(3, rows, 2 * columns).to(dtype)
    index = torch.randint(-1, rows + 1, (2 * rows,))
    down, weights, of_tokens = x.bfloat16(), torch.rand(5, 3), torch.randint(-1, rows + 1, (5, 3))
    sums = torch.zeros(5, columns, dtype=torch.bfloat16).to(device)
    combine(down.to(device), weights.to(device), of_tokens.to(device), sums)
    assert torch.equal(sums.cpu(), combine(down, weights, of_tokens)), "combine"
    for tokens, alignment in ((rows, 1), (rows, 128), (20 * rows + 700, 16)):
        chosen = torch.randint(-1, columns + 1, (tokens, 6))
        found, wanted = (sort_by_expert(x, columns, alignment=alignment) for x in (chosen.to(device), chosen))
        assert all(torch.equal(x.cpu(), y) for x, y in zip(found, wanted, strict=True)), "sort_by_expert"
    counts = torch.tensor([rows // 2, 0, rows + 1], dtype=torch.int32)
    lives = torch.arange(rows) < counts[:, None]
    gated = dense_targets((3, rows, columns), device)
    silu_mul_cast_to_fp8(gate_up.to(device), counts=counts.to(device), **gated)
    assert_silu_mul_cast(gate_up, *gated.values(), lives.flatten())
    listed = dense_targets((2 * rows, columns), device)
    per_token_cast_to_fp8(x.to(device), rows=index.to(device), **listed)
    for on_device, expected in zip(listed.values(), per_token_cast_to_fp8(x, rows=index), strict=True):
        got, wanted = (y.cpu().contiguous().flatten().view(torch.uint8) for y in (on_device, expected))
        assert torch.equal(got, wanted), (rows, columns, dtype)


THIN = ((70, 24, 520), (3, 40, 200), (130, 130, 72))
"""Rows, columns and K of thin GEMMs."""


def run_thin(m: int, n: int, k: int, device: str = "cuda") -> None:
    """Thin GEMMs with and without sums of squares, with FP32 and BF16 weights, in parts and without. Raises
    AssertionError."""
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k)
    for splits in (None, 2):
        found = prenorm_gemm(a.to(device), b.to(device), num_splits=splits)
        for x, y in zip(found, prenorm_gemm(a, b, num_splits=splits), strict=True):
            assert torch.allclose(x.cpu(), y, rtol=1e-4, atol=1e-3), ("prenorm_gemm", m, n, k, splits)
    for weight in (b, b.bfloat16()):
        found = thin_gemm(a.to(device), weight.to(device))
        assert torch.allclose(found.cpu(), thin_gemm(a, weight), rtol=1e-4, atol=1e-3), ("thin_gemm", m, n, k)


def dense_targets(shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """`out` and `scale_out` of a cast, copied from the CPU: initcheck ignores what other kernels have written."""
    out = torch.zeros(shape, dtype=torch.uint8).to(device).view(torch.float8_e4m3fn)
    return {"out": out, "scale_out": torch.zeros(*shape[:-1], -(-shape[-1] // 128)).to(device)}


NORMS = ((3, 40), (2, 2048), (5, 4000), (2, 8192))
"""Rows and columns of norms: every kernel, and rows that end within a scale's block and within a warp."""


def run_norms(rows: int, columns: int, device: str = "cuda") -> None:
    """RMSNorm of a sum and its cast. Raises AssertionError on a wrong value."""
    given = [torch.randn(shape).bfloat16() for shape in ((rows, columns), (rows, columns), (columns,))]
    cast, total = dense_targets((rows, columns), device), torch.zeros(rows, columns, dtype=torch.bfloat16).to(device)
    options = norms.NormOptions(epsilon=1e-5)
    norms.ADD_RMS_NORM_CAST.run((*(x.to(device) for x in given), *cast.values(), total), options)
    assert torch.equal(total.cpu(), given[0] + given[1]), (rows, columns)
    assert_cast_within(norm_bounds(*given, 1e-5), *(x.cpu() for x in cast.values()), options.amax_floor)


LOGITS = ((3, 70, 64, 128), (17, 200, 20, 64), (9, 130, 128, 32))
"""Queries, keys, heads and head size: kernels whose warpgroups share queries, and kernels whose warpgroups do not."""


def run_logits(rows: int, keys: int, heads: int, head_dim: int, device: str = "cuda") -> None:
    """Logits over keys and over pages, with lists that lie. Raises AssertionError."""
    q, kv = torch.randn(rows, heads, head_dim).to(torch.float8_e4m3fn), torch.randn(keys, head_dim)
    lists = [torch.randint(-3, keys + 4, (rows,)).int() for _ in range(2)]
    given = q, kv.to(torch.float8_e4m3fn), torch.rand(keys), torch.randn(rows, heads), *lists
    got = mqa_logits(*(x.to(device) for x in given), torch.zeros(rows, keys).to(device))
    torch.testing.assert_close(got.cpu(), mqa_logits(*given), rtol=1e-3, atol=0.1)
    cache = torch.randint(0, 0x7E, (5, 64, 1, head_dim + 4), dtype=torch.uint8)
    cache.view(5, -1)[:, 64 * head_dim :] = torch.rand(5, 64).view(torch.uint8)
    n, batch = min(rows, 6), 2
    paged = (
        *(q[:n].expand(batch, n, heads, head_dim).contiguous(), cache, torch.randn(batch * n, heads)),
        *(torch.tensor([keys, 2**31 - 1]).int(), torch.randint(-1, 6, (batch, 4)).int()),
    )
    got = paged_mqa_logits(*(x.to(device) for x in paged), torch.zeros(batch * n, 256).to(device))
    wanted = paged_mqa_logits(*paged, torch.zeros(batch * n, 256))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def failed(run: Callable[..., None], *arguments: Any) -> bool:
    try:
        run(*arguments)
    except AssertionError as error:
        print("WRONG:", error, flush=True)
        return True
    return False


def rows_of_gradients(config: GemmConfig, tool: str) -> int:
    """Rows that end within a tile, but whole tiles for racecheck where store warps would read them.

    racecheck does not follow `bar.arrive`: what one warp writes by `st.shared` before it, and another reads after the
    `bar.sync` that it meets, as in the example of the PTX manual, is reported as a race (CUDA 13.0, 2026-11-24).
    """
    return 256 if tool == "racecheck" and config.store_warps else 70


def jobs(tool: str) -> Iterator[tuple]:
    """A function and its arguments, for each GEMM and cast."""
    for run_, cases in (
        *((run, CASES), (run_kind, KINDS_CASES), (run_quantized, QUANTIZED_CASES), (run_packed, PACKED_CASES)),
        (run_groups, (*all_grouped_configs(), *GROUPED_KINDS)),
    ):
        yield from ((run_, case) for case in cases)
    for tma_store in (True, False):
        for config in grouped_configs("k_offs", tma_store, True):
            yield run_gradients, config, "cuda", rows_of_gradients(config, tool)
    for run_, sizes in (
        *((run_casts, CASTS), (run_transposed_casts, CASTS), (run_casts_both, CASTS), (run_casts_of_rows, ROWS)),
        *((run_norms, NORMS), (run_thin, THIN), (run_logits, LOGITS)),
    ):
        yield from ((run_, *each) for each in sizes)


def main(tool: str = "") -> int:
    failures = 0
    for run_, *arguments in jobs(tool):
        print(run_.__name__, *arguments, flush=True)
        failures += failed(run_, *arguments)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
