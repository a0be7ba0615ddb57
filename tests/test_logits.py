"""The indexer's logits: the definition against plain loops, refusals, ops, kernels' text, and on a GPU the kernels.

On a GPU inputs are drawn anew: odd sizes, ranges that are empty, overlap or lie, block tables that lie, `out` with
guards around it, another stream that works, and CUDA graphs. tests/fuzz_logits.py does so for as long as it is told.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
import sanitize
import torch
from fuzz_logits import Drawn, check, draw_case

from deep_tile import codegen, logits_launch, mqa_logits, paged_mqa_logits, params, precompile_logits
from deep_tile.codegen import logits_source
from deep_tile.compat import deep_gemm
from deep_tile.jit import compile_kernel, resource_usage

pytestmark = pytest.mark.about(
    *("deep_tile/logits.py", "deep_tile/logits_launch.py", "deep_tile/compat/indexer.py", "deep_tile/codegen.py"),
    *("deep_tile/params.py", "deep_tile/ops.py", "include/deep_tile/*", "tests/fuzz_logits.py"),
)

FP8 = torch.float8_e4m3fn
INF = float("inf")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def by_loops(q, kv, kv_scale, weights, starts, ends):
    """The logits in float64, one by one."""
    out = torch.full((len(q), len(kv)), -INF, dtype=torch.float64)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for j in range(max(start, 0), min(end, len(kv))):
            heads = (q[i].double() @ kv[j].double()).clamp(min=0)
            out[i, j] = (heads * weights[i].double()).sum() * kv_scale[j].double()
    return out


def small(rows=5, keys=70, heads=3, head_dim=32, device="cpu"):
    """q, kv, kv_scale, weights, starts and ends. Some ranges are empty or lie."""
    q, kv = torch.randn(rows, heads, head_dim).to(FP8), torch.randn(keys, head_dim).to(FP8)
    starts = torch.tensor([0, -7, keys - 3, 9, 40])[:rows].int()
    ends = torch.tensor([keys, 5, keys + 9, 3, 66])[:rows].int()
    given = q, kv, torch.rand(keys) + 0.5, torch.randn(rows, heads), starts, ends
    return tuple(x.to(device) for x in given)


def pages_of(kv, kv_scale, order):
    """A cache in which page order[p] holds keys 64 p to 64 p + 63."""
    head_dim, count = kv.shape[1], len(order)
    cache = torch.zeros(count, 64 * (head_dim + 4), dtype=torch.uint8)
    rows, scales = torch.zeros(64 * count, head_dim, dtype=torch.uint8), torch.zeros(64 * count)
    rows[: len(kv)], scales[: len(kv)] = kv.view(torch.uint8), kv_scale
    cache[order] = torch.cat([rows.view(count, -1), scales.view(count, -1).view(torch.uint8)], dim=1)
    return cache.view(count, 64, 1, head_dim + 4)


@pytest.mark.parametrize("columns", [None, 1, 50, 90])
@pytest.mark.parametrize("clean", [True, False])
def test_logits_are_those_of_loops(columns, clean):
    given = small()
    wanted = by_loops(*given)
    out = torch.full((5, columns or 70), 7.0)
    assert mqa_logits(*given, out, clean=clean, columns=columns) is out
    if columns is not None:
        starts = given[4].clamp(0, 70).tolist()
        moved = torch.full((5, columns), -INF, dtype=torch.float64)
        for i, start in enumerate(starts):
            part = wanted[i, start : start + columns]
            moved[i, : len(part)] = part
        wanted = moved
    if not clean:
        wanted = torch.where(wanted == -INF, 7.0, wanted)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("each", [False, True], ids=["a length of each sequence", "of each query"])
def test_logits_of_pages_are_those_of_their_keys(each):
    n, lengths = 3, [130, 2, 0]
    _, kv, kv_scale, *_ = small(keys=160)
    q, weights = torch.randn(3, n, 3, 32).to(FP8), torch.randn(3 * n, 3)
    order = torch.tensor([2, 0, 1])
    ends = torch.tensor([[max(length - n + 1 + i, 0) for i in range(n)] for length in lengths]).int()
    given = ends if each else torch.tensor(lengths).int()
    out = paged_mqa_logits(q, pages_of(kv, kv_scale, order), weights, given, order.int().repeat(3, 1), clean=True)
    wanted = by_loops(q.flatten(0, 1), kv, kv_scale, weights, torch.zeros(9).int(), ends.flatten())
    assert out.shape == (9, 192) and (out[:, 160:] == -INF).all()
    torch.testing.assert_close(out[:, :160].double(), wanted, rtol=1e-6, atol=1e-6)


def test_pages_that_the_cache_lacks_count_as_zeros():
    _, kv, kv_scale, *_ = small(keys=64)
    q, table = torch.randn(1, 1, 3, 32).to(FP8), torch.tensor([[0, -1, 2**31 - 1]]).int()
    out = paged_mqa_logits(q, pages_of(kv, kv_scale, [0]), torch.randn(1, 3), torch.tensor([192]).int(), table)
    assert (out[0, 64:] == 0).all() and (out[0, :64] != 0).any()


def test_rows_of_what_is_allocated_begin_at_lines():
    out = mqa_logits(*small())
    assert out.dtype == torch.float32 and out.stride() == (96, 1)
    assert mqa_logits(*small(), out_dtype=torch.bfloat16, columns=3).stride() == (64, 1)
    nothing = mqa_logits(*(x[:0] if i in (0, 3, 4, 5) else x for i, x in enumerate(small())))
    assert nothing.shape == (0, 70)
    no_keys = [x[:0] if i in (1, 2) else x for i, x in enumerate(small())]
    assert (mqa_logits(*no_keys, columns=4) == -INF).all()


def bad(position, change, error, match, **options):
    return pytest.param(position, change, error, match, options, id=match[:40])


@DEVICES
@pytest.mark.parametrize(
    ("position", "change", "error", "match", "options"),
    [
        bad(0, torch.Tensor.float, TypeError, "q is a tensor of torch.float32; .* torch.float8_e4m3fn. Convert"),
        bad(1, lambda x: None, TypeError, "kv is a <class 'NoneType'>"),
        bad(3, torch.Tensor.bfloat16, TypeError, "weights is a tensor of torch.bfloat16"),
        bad(5, torch.Tensor.long, TypeError, "ends is a tensor of torch.int64; .* torch.int32"),
        bad(0, lambda x: x[..., :16].contiguous(), ValueError, "heads of 32, 64, 128 elements are known"),
        bad(1, lambda x: x[:, :16], ValueError, r"kv has shape \[70, 16\]; it must be \[keys, head_dim\]"),
        bad(2, lambda x: x[1:], ValueError, r"kv_scale has shape \[69\]; it must be \[keys\] = \[70\]"),
        bad(3, lambda x: x[:, 1:], ValueError, r"weights has shape \[5, 2\]"),
        bad(4, lambda x: x[:3], ValueError, r"starts has shape \[3\]"),
        bad(4, lambda x: x.repeat(2)[::2], ValueError, "starts must be contiguous"),
        bad(0, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1).transpose(1, 2), ValueError, "shape"),
        bad(1, lambda x: x.t().contiguous().t(), ValueError, r"kv has strides \(1, 70\); .* Pass kv.contiguous"),
        bad(2, lambda x: torch.cat([x[:1], x])[1:], ValueError, "kv_scale must begin at a multiple of 16 bytes"),
        bad(3, lambda x: x.requires_grad_(), RuntimeError, "weights requires a gradient"),
        bad(0, lambda x: x, ValueError, "columns is 0; pass a positive number", columns=0),
        bad(0, lambda x: x, TypeError, "columns is 'all'; pass how many", columns="all"),
        bad(0, lambda x: x, ValueError, "out_dtype is torch.float16; pass torch.float32 or", out_dtype=torch.float16),
        bad(0, lambda x: x, ValueError, "num_sms is 0; pass an int from 1", num_sms=0),
        bad(0, lambda x: x, TypeError, "num_sms is 2.0, of type float", num_sms=2.0),
        bad(0, lambda x: x, TypeError, "pdl is 'yes', of type str", pdl="yes"),
    ],
)
def test_bad_calls(device, position, change, error, match, options):
    given = [x.clone() for x in small(device=device)]
    mqa_logits(*given)  # a call that is right, before one that is wrong
    given[position] = change(given[position])
    out = torch.full((5, 70), 7.0, device=device) if not options else None
    with pytest.raises(error, match=match):
        mqa_logits(*given, out, **options)
    assert out is None or (out == 7).all()


@DEVICES
@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("q", lambda x: x[:, :1].expand(1, 9, 3, 32).contiguous(), ValueError, "9 queries of a sequence; 1 to 8"),
        ("q", lambda x: x.flatten(0, 1), ValueError,
         r"q has shape \[2, 3, 32\]; it must be \[batch, n, heads, head_dim"),
        ("q", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "q must be contiguous"),
        ("cache", lambda x: x[:, :32], ValueError,
         r"cache has shape \[3, 32, 1, 36\]; it must be \[pages, 64, 1, head_dim"),
        ("cache", lambda x: x.view(torch.int8), TypeError, "cache is a tensor of torch.int8"),
        ("cache", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "pages must be dense"),
        ("cache", lambda x: torch.nn.functional.pad(x.view(3, -1), (0, 8))[:, :-8].view_as(x), ValueError,
         "of 16 bytes"),
        ("lengths", lambda x: x.view(1, 1, 1), ValueError, r"lengths has shape \[1, 1, 1\]"),
        ("lengths", lambda x: x.view(1, 1), ValueError,
         r"lengths has shape \[1, 1\]; it must be \[batch, n\] = \[1, 2\]"),
        ("block_table", lambda x: x[0], ValueError, r"block_table has shape \[3\]"),
        ("block_table", lambda x: x.long(), TypeError, "block_table is a tensor of torch.int64"),
        ("weights", lambda x: x[1:], ValueError,
         r"weights has shape \[1, 3\]; it must be \[batch \* n, heads\] = \[2, 3\]"),
    ],
)  # fmt: skip
def test_bad_calls_of_pages(device, name, change, error, match):
    given = {
        "q": torch.zeros(1, 2, 3, 32, device=device).to(FP8),
        "cache": torch.zeros(3, 64, 1, 36, dtype=torch.uint8, device=device),
        "weights": torch.zeros(2, 3, device=device),
        "lengths": torch.zeros(1, dtype=torch.int32, device=device),
        "block_table": torch.zeros(1, 3, dtype=torch.int32, device=device),
    }
    if name == "q" and "contiguous" in match:
        given["q"], given["weights"] = given["q"].repeat(2, 1, 1, 1), given["weights"].repeat(2, 1)
        given["lengths"], given["block_table"] = given["lengths"].repeat(2), given["block_table"].repeat(2, 1)
    paged_mqa_logits(**given)
    given[name] = change(given[name])
    with pytest.raises(error, match=match):
        paged_mqa_logits(**given)


def test_the_names_of_deep_gemm():
    q, kv, kv_scale, weights, starts, ends = small(heads=32)
    wanted = mqa_logits(q, kv, kv_scale, weights, starts, ends)
    assert torch.equal(deep_gemm.fp8_mqa_logits(q, (kv, kv_scale), weights, starts, ends), wanted)
    narrow = deep_gemm.fp8_fp4_mqa_logits(
        (q, None), (kv, kv_scale), weights, starts, ends, False, max_seqlen_k=20, logits_dtype=torch.bfloat16
    )
    assert narrow.shape == (5, 20) and narrow.dtype == torch.bfloat16
    cache, table, length = pages_of(kv, kv_scale, [1, 0]), torch.tensor([[1, 0]]).int(), torch.tensor([70]).int()
    schedule = deep_gemm.get_paged_mqa_logits_metadata(length, 64, 132)
    assert schedule.shape == (133, 2) and schedule.dtype == torch.int32
    given = q[None], cache, weights, length, table, schedule, 100
    by_page = deep_gemm.fp8_paged_mqa_logits(*given, clean_logits=True)
    assert torch.equal(by_page[4, :70], mqa_logits(q, kv, kv_scale, weights, starts * 0, ends * 0 + 70)[4])
    assert torch.equal(deep_gemm.fp8_fp4_paged_mqa_logits((q[None], None), *given[1:], clean_logits=True), by_page)
    with pytest.raises(ValueError, match="block_kv is 32; pages must hold 64"):
        deep_gemm.get_paged_mqa_logits_metadata(length, 32, 132)
    with pytest.raises(ValueError, match="q has scales, for Blackwell"):
        deep_gemm.fp8_fp4_mqa_logits((q, kv_scale), (kv, kv_scale), weights, starts, ends)
    with pytest.raises(ValueError, match="indices is for Blackwell"):
        deep_gemm.fp8_paged_mqa_logits(*given, indices=length)


def test_the_places_of_deep_gemm_2_8():
    """`max_seqlen_k` and `schedule_meta`, `indices`, where 2.6 has `clean_logits`, as vLLM passes them."""
    q, kv, kv_scale, weights, starts, ends = small(heads=32)
    given = (q, None), (kv, kv_scale), weights, starts, ends
    wanted = mqa_logits(q, kv, kv_scale, weights, starts, ends, columns=33)
    lives = wanted > -INF
    for rest in ((33,), (33, None)):
        assert torch.equal(deep_gemm.fp8_fp4_mqa_logits(*given, *rest)[lives], wanted[lives])
    assert deep_gemm.fp8_fp4_mqa_logits(*given, 0).shape == (5, 0)
    with pytest.raises(ValueError, match="schedule_meta is for Blackwell"):
        deep_gemm.fp8_fp4_mqa_logits(*given, 33, starts)
    paged = (q[None], None), pages_of(kv, kv_scale, [1, 0]), weights, torch.tensor([70]).int()
    paged = *paged, torch.tensor([[1, 0]]).int(), None, 100
    wanted = deep_gemm.fp8_fp4_paged_mqa_logits(*paged, True)
    lives = wanted > -INF
    assert torch.equal(deep_gemm.fp8_fp4_paged_mqa_logits(*paged, None)[lives], wanted[lives])
    with pytest.raises(ValueError, match="indices is for Blackwell"):
        deep_gemm.fp8_fp4_paged_mqa_logits(*paged, starts)


@pytest.mark.parametrize(
    "kernel",
    [
        logits_launch.choose(128, 64, 2048, False, "fp32"),
        logits_launch.choose(128, 32, 2048, False, "bf16"),
        logits_launch.choose(64, 128, 3, False, "fp32"),
        logits_launch.choose(128, 64, 1, True, "fp32"),
        logits_launch.choose(128, 64, 4, True, "fp32"),
        logits_launch.choose(128, 64, 8, True, "bf16"),
        logits_launch.choose(32, 32, 7, True, "fp32"),
    ],
    ids=lambda kernel: kernel.name,
)
def test_kernels_keep_everything_in_registers(kernel):
    compiled = compile_kernel(logits_source(kernel), kernel.name)
    usage = resource_usage(compiled.log)
    assert not usage.flawed and usage.stack_bytes == 0 and not compiled.divergence
    assert usage.registers * kernel.threads <= 65536


def test_every_number_of_queries_has_a_kernel_that_fits():
    for head_dim in logits_launch.HEAD_DIMS:
        for heads in range(1, 129):
            for paged in (False, True):
                for rows in range(1, 9 if paged else 40):
                    kernel = logits_launch.choose(head_dim, heads, rows, paged, "fp32")
                    assert kernel.heads >= heads and kernel.queries * kernel.heads <= 256
                    assert kernel.smem_bytes <= 227 * 1024 and kernel.stages >= 8
                    blocks, batch_blocks = logits_launch.blocks_of(kernel, 3 * rows, rows)
                    assert blocks == 3 * batch_blocks and batch_blocks * kernel.block_queries >= rows
                    assert kernel in logits_launch.all_kernels(head_dim, heads, paged, "fp32", rows)


SHARE_OUT = """
#include "host_logits.h"
{text}
constexpr deep_tile::LogitsConfig config = {{{fields}}};
static deep_tile::LogitsStorage<config> smem;
static int *seen, *taken, most;

void walk_share(LogitsParams params) {{
    deep_tile::find_share<config>(params, smem);
    if (threadIdx.x / 32 != 1) return;
    deep_tile::ShareWalk<config> walk(params, smem.share);
    while (walk.next()) {{
        if (threadIdx.x % 32 != 0) continue;
        taken[blockIdx.x] += walk.tiles.size();
        for (int tile = walk.tiles.begin; tile < walk.tiles.end; ++tile) ++seen[walk.queries.row * most + tile];
    }}
}}

extern "C" void share_out(const LogitsParams* params, unsigned grid, int* rows, int* blocks, int tiles) {{
    seen = rows, taken = blocks, most = tiles;
    host_launch(walk_share, *params, grid, config.threads, 1);
}}
"""


def shared_out(folder, kernel, layout, grid, **lists):
    """How often each tile is taken, by the first row of its queries, and how many each block takes."""
    fields = ", ".join(codegen._literal(name, getattr(kernel, name)) for name in codegen._LOGITS_FIELDS)
    text = params.LOGITS.text + codegen._headers("ranges.cuh")
    source, library = folder / f"{kernel.name}.cpp", folder / f"{kernel.name}.so"
    if not library.exists():
        source.write_text(SHARE_OUT.format(text=text, fields=fields))
        tests = Path(__file__).parent
        subprocess.run(
            ["c++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-I{tests}", source, "-o", library], check=True
        )
    addresses = {name: given.data_ptr() for name, given in lists.items()}
    tiles = -(-layout.keys // 64)
    seen, taken = torch.zeros(layout.rows, tiles).int(), torch.zeros(grid).int()
    argument = params.LOGITS.pack(**layout._asdict(), **addresses)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (seen, taken))
    ctypes.CDLL(str(library)).share_out(argument, grid, *pointers, tiles)
    return seen, taken


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("paged", [False, True])
def test_shares_are_even_and_hold_every_tile_once(paged, tmp_path):
    """find_share and ShareWalk (ranges.cuh) run as C++ on the CPU, for lists that lie."""
    random = Random(3)
    for rows, keys, grid in ((51, 700, 7), (12, 320, 13), (3, 64, 3)):
        n = 3 if paged else rows
        kernel = logits_launch.choose(128, 64, n, paged, "fp32")
        blocks, batch_blocks = logits_launch.blocks_of(kernel, rows, n)
        fixed = (rows, 64, keys, keys, blocks, n, batch_blocks)
        layout = logits_launch.LogitsLayout(*fixed, False, False, True, keys // 64, 0, 0, 0)
        limits = [-(2**31), -3, 0, 1, 63, 64, 65, keys // 2, keys, 2**31 - 1]
        begins, ends = (torch.tensor([random.choice(limits) for _ in range(rows)]).int() for _ in range(2))
        seen, taken = shared_out(tmp_path, kernel, layout, grid, begins=begins, ends=ends)
        first = torch.zeros(rows).int() if paged else begins.clamp(0, keys)
        last = ends.clamp(0, keys)
        wanted = torch.zeros_like(seen)
        for row in range(0, rows, n):
            for begin in range(row, row + n, kernel.block_queries):
                part = [i for i in range(begin, min(begin + kernel.block_queries, row + n)) if first[i] < last[i]]
                if part:
                    wanted[
                        begin, min(int(first[i]) for i in part) // 64 : -(-max(int(last[i]) for i in part) // 64)
                    ] = 1
        assert torch.equal(seen, wanted) and taken.sum() == wanted.sum() and taken.max() - taken.min() <= 1


class Barrier:
    """An mbarrier: who waits for a parity goes on when the present phase has another."""

    def __init__(self, arrivals):
        self.arrivals = self.left = arrivals
        self.phase = 0

    def arrive(self):
        self.left -= 1
        if self.left == 0:
            self.left, self.phase = self.arrivals, self.phase + 1

    def is_done(self, parity):
        return self.phase % 2 != parity


def run_stages(random, stages, warpgroups, splits, tiles):
    """The loader, TMA and math warpgroups with their stages, in a random order; whether each reads its own tiles."""
    full, empty = [Barrier(1) for _ in range(stages)], [Barrier(warpgroups if splits else 1) for _ in range(stages)]
    held, requested, wrong = [None] * stages, [], []

    def loader():
        for tile in range(tiles):
            while not empty[tile % stages].is_done(tile // stages % 2 ^ 1):
                yield
            requested.append(tile)
            yield

    def transfers():
        for _ in range(tiles):
            while not requested:
                yield
            tile = requested.pop(random.randrange(len(requested)))
            held[tile % stages] = tile
            full[tile % stages].arrive()
            yield

    def multiply(warpgroup):
        for tile in range(0 if splits else warpgroup, tiles, 1 if splits else warpgroups):
            while not full[tile % stages].is_done(tile // stages % 2):
                yield
            for _ in range(random.randrange(4)):
                yield
            wrong.extend([tile] if held[tile % stages] != tile else [])
            empty[tile % stages].arrive()
            yield

    running = [loader(), transfers(), *(multiply(warpgroup) for warpgroup in range(warpgroups))]
    for _ in range(10**5):
        if not running:
            return not wrong
        role = random.choice(running)
        if next(role, "done") == "done":
            running.remove(role)
    return False  # some wait for ever


def test_no_warpgroup_reads_what_is_not_its_tile():
    kernels = {
        logits_launch.choose(head_dim, heads, rows, paged, "fp32")
        for head_dim in logits_launch.HEAD_DIMS
        for heads in logits_launch.HEADS
        for paged in (False, True)
        for rows in (*range(1, 9), 100)
    }
    random = Random(1)
    for stages, warpgroups, splits in {(k.stages, k.warpgroups, k.splits_queries) for k in kernels}:
        assert all(run_stages(random, stages, warpgroups, splits, 5 * stages) for _ in range(10))
    assert not all(run_stages(random, 16, 3, False, 80) for _ in range(10))  # stages that change hands between rounds


def test_precompile_counts_kernels():
    assert precompile_logits(64, 128, queries=1) == 1
    with pytest.raises(ValueError, match="heads is 64 and head_dim 48"):
        precompile_logits(64, 48)
    with pytest.raises(ValueError, match="out_dtype is torch.float16"):
        precompile_logits(64, 128, out_dtype=torch.float16)


@pytest.mark.parametrize("sizes", sanitize.LOGITS)
def test_sanitizer_case_is_right(sizes):
    sanitize.run_logits(*sizes, device="cpu")


# On any device, as the fuzzer draws it.


@DEVICES
@pytest.mark.parametrize("seed", range(12))
def test_drawn_calls(device, seed):
    case: Drawn = draw_case(Random(seed), device, most_products=2**30 if device == "cuda" else 2**20)
    assert not any(check(case).values())


@pytest.mark.gpu
def test_bits_are_the_same_beside_another_stream():
    case = draw_case(Random(7), "cuda", most_products=2**26, paged=False)
    wanted = mqa_logits(*case.inputs)
    noise, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(-1, 1)
        assert torch.equal(mqa_logits(*case.inputs), wanted)
