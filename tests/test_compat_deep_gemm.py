"""DeepGEMM's names on deep_tile: as engines look them up and call them."""

import importlib
import importlib.util
import sys
from functools import partial

import numpy as np
import pytest
import torch
from helpers import ACCUMULATION, Exact, GuardedOut, Operands, assert_accurate, exact_product, make_operands
from test_compat_names import SERVED

from deep_tile import fp8_wgrad, per_token_cast_to_fp8
from deep_tile.compat import deep_gemm, indexer
from deep_tile.reference import MAX_RELATIVE_ERROR

pytestmark = pytest.mark.usefixtures("fresh_deep_gemm")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ABSENT = [
    *("k_grouped_fp8_gemm_tn_contiguous", "fp8_mega_moe"),
    *("get_mn_major_tma_aligned_packed_ue8m0_tensor", "pack_ue8m0_to_int"),
]
SMALL = [(1, 128, 256), (7, 512, 3884), (83, 130, 512)]
PEERS = [
    *((m, n, k) for m in (1, 128, 4096) for n, k in ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384))),
    *((m, n, k) for m in (1, 7, 83, 512, 2048) for n in (128, 512, 4096) for k in (256, 3884, 4096)),
]
"""m, n, k of the dense products that DeepGEMM's, vLLM's and SGLang's tests multiply."""


@pytest.fixture
def installed():
    deep_gemm.install()
    yield importlib.import_module("deep_gemm")
    deep_gemm.uninstall()


def dense(operands: Operands) -> Operands:
    """Dense rows, which begin at odd addresses for k = 3884."""
    return operands._replace(a=operands.a.contiguous(), b=operands.b.contiguous())


def check(m: int, n: int, k: int, device: str) -> None:
    operands = dense(make_operands(m, n, k, device=device))
    guarded = GuardedOut(m, n, device=device)
    assert deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], guarded.out, disable_ue8m0_cast=True) is None
    guarded.assert_guards_intact()
    exact = exact_product(operands)
    assert_accurate(guarded.out, exact)
    assert deep_gemm.calc_diff(guarded.out, exact.value) < 1e-3


@pytest.mark.parametrize(("m", "n", "k"), SMALL)
@pytest.mark.parametrize("device", DEVICES)
def test_products(m, n, k, device):
    check(m, n, k, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), PEERS)
def test_products_of_peers(m, n, k):
    check(m, n, k, "cuda")


@pytest.mark.parametrize("layout", ["row", "column", "column_aligned"])
def test_scales_of_engines(layout):
    operands = make_operands(7, 200, 384, a_scale=layout)
    out = torch.empty(7, 200, dtype=torch.bfloat16)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(operands.a_scale)
    assert aligned.stride() == (1, 8) and torch.equal(aligned, operands.a_scale)
    assert (aligned is operands.a_scale) == (layout == "column_aligned")
    deep_gemm.fp8_gemm_nt((operands.a, aligned), operands[2:], out, recipe=(1, 128, 128))
    assert_accurate(out, exact_product(operands))


def test_layouts_that_are_asked_for():
    sf = torch.rand(3, 7, 2)
    assert deep_gemm.transform_sf_into_required_layout(sf, 7, 256, (1, 128), 3).stride() == (16, 1, 8)
    weights = torch.rand(2, 2)
    assert deep_gemm.transform_sf_into_required_layout(weights, 130, 256, (1, 128, 128), is_sfa=False) is weights
    for arguments, message in (
        ((sf, 7, 256, (1, 128)), r"it must be \[7, 2\]"),
        ((sf, 7, 256, (1, 128, 128), 3), "is_sfa must say whose"),
        ((sf, 7, 256, (1, 32), 3), r"blocks of \(1, 32\); on Hopper"),
    ):
        with pytest.raises(ValueError, match=message):
            deep_gemm.transform_sf_into_required_layout(*arguments)


def test_powers_of_two_are_expanded():
    operands = make_operands(5, 128, 256)
    scale = torch.full((1, 2), 130, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    out, expected = (torch.empty(5, 128, dtype=torch.bfloat16) for _ in range(2))
    deep_gemm.fp8_gemm_nt(operands[:2], (operands.b, scale), out)
    deep_gemm.fp8_gemm_nt(operands[:2], (operands.b, scale.float()), expected)
    assert torch.equal(out, expected)


def test_casts_are_its_own():
    """DeepGEMM's published formula, with reciprocals, as torch multiplies on a GPU."""
    x = torch.randn(9, 300).bfloat16()
    blocks = torch.nn.functional.pad(x.float(), (0, 84)).view(9, 3, 128)
    scale = blocks.abs().amax(2).clamp(1e-4) * torch.tensor(1 / 448)
    elements = (blocks * (1 / scale)[..., None]).to(torch.float8_e4m3fn).view(9, 384)[:, :300]
    got, got_scale = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    assert torch.equal(got_scale, scale) and torch.equal(got.float(), elements.float())
    _, powers = deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=True)
    assert torch.equal(powers, torch.exp2(torch.log2(powers).round()))
    with pytest.raises(ValueError, match="gran_k is 32"):
        deep_gemm.per_token_cast_to_fp8(x, False, gran_k=32)
    with pytest.raises(ValueError, match="use_packed_ue8m0 must be False"):
        deep_gemm.per_token_cast_to_fp8(x, True, use_packed_ue8m0=True)


def test_cast_along_rows_is_its_own():
    """DeepGEMM's published formula, as above."""
    x = torch.randn(256, 70).bfloat16()
    blocks = x.float().view(2, 128, 70)
    scale = blocks.abs().amax(1).clamp(1e-4) * torch.tensor(1 / 448)
    elements = (blocks * (1 / scale)[:, None]).to(torch.float8_e4m3fn).view(256, 70)
    got, got_scale = deep_gemm.per_channel_cast_to_fp8(x, use_ue8m0=False)
    assert torch.equal(got_scale, scale) and torch.equal(got.float(), elements.float())
    assert got.is_contiguous() and got_scale.is_contiguous()
    with pytest.raises(ValueError, match=r"x is \[255, 70\]; it must have a multiple of 128 rows"):
        deep_gemm.per_channel_cast_to_fp8(x[1:], False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adds", ["nothing", "d", "another tensor"])
def test_scales_of_rows_of_both(device, adds):
    operands = product_of_rows(70, 133, 300, device)
    c = torch.randn(70, 133, device=device)
    out = c.clone() if adds == "d" else torch.full_like(c, float("nan"))
    given = {"nothing": None, "d": out, "another tensor": c}[adds]
    deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], out, c=given, recipe=(1, 1, 128))
    value, spread = exact_product(operands, b_rows=1)
    added = Exact(value if given is None else value + c.double(), spread)
    assert_accurate(out, added, ACCUMULATION, MAX_RELATIVE_ERROR)


def of_experts(parts):
    """Pairs of products of rows, one for each group, as DeepGEMM's tests hand them over: each group's k of every row,
    group after group."""
    codes, scales = list(zip(*parts, strict=True))[::2], list(zip(*parts, strict=True))[1::2]
    flat = (torch.cat([x.flatten().view(torch.uint8) for x in each]).view(each[0].dtype) for each in codes)
    return tuple(zip(flat, (torch.cat(each, 1) for each in scales), strict=True))


def product_of_rows(m, n, k, device):
    """Operands whose scales are of 1x128 each."""
    a, b = (torch.randn(rows, k, device=device) for rows in (m, n))
    return Operands(*per_token_cast_to_fp8(a), *per_token_cast_to_fp8(b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ks", [(384,), (128, 0, 512, 256), (0, 0), (128,) * 9], ids=str)
@pytest.mark.parametrize("adds", ["nothing", "d", "another tensor"])
def test_gradients_of_experts(device, ks, adds):
    m, n = 70, 136
    parts = [product_of_rows(m, n, k, device) for k in ks]
    c = torch.randn(len(ks), m, n, device=device)
    d = c.clone() if adds == "d" else torch.full_like(c, float("nan"))
    given = {"nothing": None, "d": d, "another tensor": c}[adds]
    layout = torch.tensor(ks, dtype=torch.int32, device=device)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*of_experts(parts), d, list(ks), layout, given)
    before = torch.zeros_like(c) if given is None else c
    for group, (k, operands) in enumerate(zip(ks, parts, strict=True)):
        if k == 0:
            assert torch.equal(d[group], before[group])
            continue
        value, spread = exact_product(operands, b_rows=1)
        added = Exact(value + before[group].double(), spread)
        assert_accurate(d[group], added, ACCUMULATION, MAX_RELATIVE_ERROR)


def test_small_groups_are_one_launch(monkeypatch):
    """The results equal those of a launch per group, which larger groups get."""
    launches, m, n, ks = [], 70, 136, (128, 0, 512, 256)
    pairs = of_experts([product_of_rows(m, n, k, "cpu") for k in ks])
    single = deep_gemm.dense.fp8_wgrad
    monkeypatch.setattr(deep_gemm.dense, "fp8_wgrad", lambda *a, **k: launches.append(1) or single(*a, **k))
    c = torch.randn(4, m, n)
    for given in (None, c):
        made = [torch.full_like(c, float("nan")) for _ in range(2)]
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*pairs, made[0], list(ks), None, given)
        assert not launches
        monkeypatch.setattr(deep_gemm, "_leaves_sms_idle", lambda *_: False)
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*pairs, made[1], list(ks), None, given)
        assert len(launches) == 3 and torch.equal(*made)
        launches.clear()
        monkeypatch.undo()
        monkeypatch.setattr(deep_gemm.dense, "fp8_wgrad", lambda *a, **k: launches.append(1) or single(*a, **k))


def test_wrong_gradients_launch_nothing():
    operands = product_of_rows(8, 16, 256, "cpu")
    a, b = (operands.a.flatten(), operands.a_scale), (operands.b.flatten(), operands.b_scale)
    d = torch.zeros(2, 8, 16)
    call = deep_gemm.k_grouped_fp8_gemm_nt_contiguous
    for arguments, keywords, kind, message in (
        ((a, b, d, [128, 100]), {}, ValueError, "ks_cpu is .*multiples of 128"),
        ((a, b, d, [256]), {}, ValueError, "ks_cpu has 1 numbers; d has 2 groups"),
        ((a, b, d, [128, 256]), {}, ValueError, "a is .*of 8 x 384 elements"),
        (((a[0], a[1].t()), b, d, [128, 128]), {}, ValueError, "a's scale is .*transpose it"),
        ((a, b, d.half(), [128, 128]), {}, ValueError, "d is .*of torch.float32"),
        ((a, b, d, [128, 128]), {"c": d[:1]}, ValueError, "c is .*like d"),
        ((a, b, d, [128, 128]), {"use_psum_layout": True}, ValueError, "use_psum_layout must be False"),
        ((a, b, d, [128, 128]), {"recipe": (1, 128, 128)}, ValueError, r"recipe is .*it is \(1, 1, 128\)"),
        ((a, b[0], d, [128, 128]), {}, TypeError, "b is a Tensor; it must be a pair"),
    ):
        with pytest.raises(kind, match=message):
            call(*arguments, **keywords)
    with pytest.raises(TypeError, match="dy must be"):
        call((a[0].char(), a[1]), b, d, [128, 128], c=torch.ones(2, 8, 16))
    assert not d.any()


def test_sums_of_wrong_products_leave_d_alone():
    operands = product_of_rows(8, 16, 256, "cpu")
    d, c = torch.zeros(8, 16), torch.ones(8, 16)
    for a, b in (
        (operands[:2], (operands.b.to(torch.int8), operands.b_scale)),
        (operands[:2], (operands.b[:, :128], operands.b_scale)),
    ):
        with pytest.raises((TypeError, ValueError)):
            deep_gemm.fp8_gemm_nt(a, b, d, c, recipe=(1, 1, 128))
    x = torch.randn(2, 8, 16).bfloat16()
    for expr, y in (("bmk,bnk->mn", x[..., :8]), ("bmk,bnk->mn", x.float()), ("nt", x)):
        with pytest.raises((TypeError, ValueError)):
            deep_gemm.einsum(expr, x, y, d[:, :8], c[:, :8])
    lengths, sums = [1, 2], torch.zeros(2, 1, 16)  # the second group begins between two multiples of 16 bytes
    with pytest.raises(ValueError, match="a must begin at a multiple of 16 bytes"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x[0, :3, :1].contiguous(), x[0, :3], sums, lengths, c=sums + 1)
    with pytest.raises(TypeError, match="a is a tensor inside a transform of torch.func"):
        torch.vmap(lambda x: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x[:3, :1], x[:3], sums, lengths))(x)
    lengths, sums = [1, 2], torch.zeros(2, 9, 16)  # a single row has no stride
    with pytest.raises(ValueError, match="a's column stride must be a multiple of 16 bytes"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x[0, :3, :9].contiguous(), x[0, :3], sums, lengths, c=sums + 1)
    assert not d.any() and not sums.any()


def test_gradients_in_both_formats_are_launched_one_by_one():
    """One launch for all groups takes float8_e4m3fn alone."""
    parts = [product_of_rows(8, 16, 128, "cpu") for _ in range(2)]
    parts = [part._replace(a=part.a.float().to(torch.float8_e5m2)) for part in parts]
    d = torch.zeros(2, 8, 16)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*of_experts(parts), d, [128, 128])
    for part, out in zip(parts, d, strict=True):
        wanted = torch.zeros(8, 16)
        fp8_wgrad(*part[:4], wanted)
        assert torch.equal(out, wanted)


def test_wrong_calls_launch_nothing():
    operands = make_operands(5, 128, 256)
    a, b, out = operands[:2], operands[2:], torch.zeros(5, 128, dtype=torch.bfloat16)
    by_rows = (b[0], b[1].expand(128, 2))
    for arguments, keywords, kind, message in (
        ((a[0], b, out), {}, TypeError, "a is a Tensor; it must be a pair"),
        ((*a, *b), {}, TypeError, "a is a Tensor; it must be a pair"),
        ((*a, *b, out), {}, TypeError, "a is a Tensor; it must be a pair"),
        ((a, b, out, None, out), {}, TypeError, "recipe is a tensor of torch.bfloat16; it must be a tuple of ints"),
        ((a, b, out), {"recipe_a": 128}, TypeError, "recipe_a is a int; it must be"),
        ((a, b[:1], out), {}, TypeError, "b is a tuple; it must be a pair"),
        ((a, b, out), {"c": out}, ValueError, "c must be None"),
        ((a, b, out), {"recipe": (1, 64, 128)}, ValueError, r"recipe is \(1, 64, 128\); on Hopper it is \(1, 128, 12"),
        ((a, b, out), {"recipe_b": (128, 64)}, ValueError, "recipe_b is"),
        ((a, b, out), {"recipe": (1, 1, 128)}, ValueError, "b_scale"),
        ((a, b, out), {"recipe": (1, 1, 128), "recipe_b": (128, 128)}, ValueError, r"recipe_b is \(128, 128\)"),
        (
            (a, by_rows, out),
            {"recipe": (1, 1, 128), "c": out},
            TypeError,
            "c is a tensor of torch.bfloat16; with c, bo",
        ),
        ((a, (b[0], torch.zeros(1, 1, dtype=torch.int32)), out), {}, TypeError, r"b's scale is of int32.*b\[1\].clone"),
        ((a, b, out.double()), {}, TypeError, "out must be one of torch.bfloat16"),
        (((a[0], a[1].t()), b, out), {}, ValueError, "It looks transposed"),
    ):
        with pytest.raises(kind, match=message):
            deep_gemm.fp8_gemm_nt(*arguments, **keywords)
    assert not out.any()


def test_pairs_are_looked_at_only_after_a_refusal(monkeypatch):
    """Looking takes longer than all else that stands beside `fp8_gemm`."""
    looked = []
    look = deep_gemm.arguments.operands
    monkeypatch.setattr(deep_gemm.arguments, "operands", lambda a, b: looked.append(a[0].shape) or look(a, b))
    for operands in (make_operands(5, 128, 256), dense(make_operands(5, 128, 250))):
        out = torch.empty(5, 128, dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], out)
        assert_accurate(out, exact_product(operands))
    assert looked == [(5, 250)]
    with pytest.raises(ValueError, match="out must have shape"):
        deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], out[:4])
    assert looked == [(5, 250), (5, 250)]


def test_empty_products():
    operands = make_operands(5, 128, 256)
    deep_gemm.fp8_gemm_nt(
        (operands.a[:0], operands.a_scale[:0]), operands[2:], torch.empty(0, 128, dtype=torch.bfloat16)
    )
    out = torch.ones(5, 128, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(
        (operands.a[:, :0], operands.a_scale[:, :0]), (operands.b[:, :0], operands.b_scale[:, :0]), out
    )
    assert not out.any()


def test_settings_of_the_process(monkeypatch):
    seen = []
    monkeypatch.setattr(deep_gemm.dense, "fp8_gemm", lambda *operands, **options: seen.append(options))
    operands = make_operands(5, 128, 256)
    out = torch.empty(5, 128, dtype=torch.bfloat16)
    deep_gemm.set_num_sms(24), deep_gemm.set_pdl(True)
    deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], out)
    assert seen == [{"num_sms": 24, "pdl": True}] and (deep_gemm.get_num_sms(), deep_gemm.get_pdl()) == (24, True)
    with pytest.raises(TypeError, match="num_sms is 1.5"):
        deep_gemm.set_num_sms(1.5)
    with pytest.raises(ValueError, match="num_sms is 0; pass an int from 1"):
        deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == 24
    for name in ("mqa_logits", "paged_mqa_logits"):
        monkeypatch.setattr(indexer.logits, name, lambda *operands, **options: seen.append(options))
    q, keys, lists = torch.empty(1, 32, 64), (torch.empty(9, 64), torch.empty(9)), [torch.empty(1)] * 3
    deep_gemm.fp8_mqa_logits(q, keys, *lists)
    deep_gemm.fp8_paged_mqa_logits(q, keys[0], *lists, None, 64)
    assert [(x["num_sms"], x["pdl"]) for x in seen[1:]] == [(24, True)] * 2


def test_sms_are_unknown_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no CUDA device: call set_num_sms"):
        deep_gemm.get_num_sms()


def test_sizes():
    assert [deep_gemm.get_tma_aligned_size(x, 4) for x in (1, 4, 5)] == [4, 4, 8]
    assert (deep_gemm.ceil_div(9, 4), deep_gemm.align(9, 4)) == (3, 12)


def test_engines_find_it(installed):
    """Engines look for a module spec, then for names; missing names count as unavailable."""
    assert importlib.util.find_spec("deep_gemm") is not None
    assert [name for name in SERVED if getattr(installed, name, None) is None] == []
    assert [name for name in ABSENT if hasattr(installed, name)] == []
    deep_gemm.install()
    assert sys.modules["deep_gemm"] is installed


OF_UTILS = ["align", "ceil_div", "get_tma_aligned_size", "get_mn_major_tma_aligned_tensor"]
LAYOUT_OF_THE_PACKAGE = {
    "utils": [*OF_UTILS, "per_token_cast_to_fp8", "per_block_cast_to_fp8", "per_channel_cast_to_fp8"],
    "utils.math": ["align", "ceil_div", "per_token_cast_to_fp8", "per_block_cast_to_fp8", "per_channel_cast_to_fp8"],
    "utils.layout": [
        *("get_tma_aligned_size", "get_mn_major_tma_aligned_tensor", "get_mk_alignment_for_contiguous_layout"),
        *("set_mk_alignment_for_contiguous_layout", "get_theoretical_mk_alignment_for_contiguous_layout"),
        *("get_m_alignment_for_contiguous_layout", "get_k_alignment_for_contiguous_layout"),
    ],
    "utils.dist": [],
    "testing": ["calc_diff", "count_bytes"],
    "testing.numeric": ["calc_diff", "count_bytes"],
    "testing.bench": [],
    "testing.utils": [],
}
"""Modules of DeepGEMM 2.6.1 that SGLang and DeepGEMM's tests import, with the names that deep_tile has of each."""


REAL = """
from . import utils
__version__ = "2.8.1"
loads = LOADS
def fp8_fp4_mega_moe(): return "the real one's"
def fp8_gemm_nt(): return "the real one's"
"""


@pytest.fixture
def real_on_disk(tmp_path, monkeypatch):
    """Write a DeepGEMM of two names where Python finds it. Returns a list of its imports."""
    loads = []
    monkeypatch.setattr(sys, "real_loads", loads, raising=False)

    def write(name: str) -> list:
        folder = tmp_path.joinpath(*name.split("."))
        (folder / "utils").mkdir(parents=True)
        text = REAL.replace("LOADS", "__import__('sys').real_loads; loads.append(__name__)")
        (folder / "__init__.py").write_text(text)
        (folder / "utils" / "__init__.py").write_text("from . import math\n")
        (folder / "utils" / "math.py").write_text("def pack_ue8m0_to_int(): return 'packed'\n")
        monkeypatch.syspath_prepend(tmp_path)
        return loads

    yield write
    deep_gemm.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] in ("deep_gemm", "vllm")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["deep_gemm", "vllm.third_party.deep_gemm"])
def test_names_of_the_real_one_alone_are_its(real_on_disk, name):
    """Imported when such a name is asked for, once, and not in deep_tile's place."""
    loads = real_on_disk(name)
    deep_gemm.install(force=name == "deep_gemm")
    ours = importlib.import_module("deep_gemm")
    assert ours.fp8_gemm_nt is deep_gemm.fp8_gemm_nt and not hasattr(ours, "__wrapped__") and not loads
    assert ours.fp8_fp4_mega_moe() == deep_gemm.fp8_fp4_mega_moe() == "the real one's"
    from deep_gemm.utils.math import pack_ue8m0_to_int

    assert pack_ue8m0_to_int() == "packed" and loads == [name]
    assert sys.modules["deep_gemm"] is ours and sys.modules["deep_gemm.utils"] is ours.utils
    for module in (ours, ours.utils.layout):
        with pytest.raises(AttributeError, match=f"has no no_such_name, and DeepGEMM 2.8.1 in {name} has none either"):
            _ = module.no_such_name


def test_what_was_imported_before_is_asked_and_given_back(real_on_disk):
    loads = real_on_disk("deep_gemm")
    real = importlib.import_module("deep_gemm")
    deep_gemm.install(force=True)
    assert importlib.import_module("deep_gemm").fp8_fp4_mega_moe is real.fp8_fp4_mega_moe and len(loads) == 1
    deep_gemm.uninstall()
    assert sys.modules["deep_gemm"] is real and sys.modules["deep_gemm.utils"] is real.utils


def test_a_real_one_that_cannot_be_imported_is_absent(real_on_disk, tmp_path):
    real_on_disk("deep_gemm")
    (tmp_path / "deep_gemm" / "__init__.py").write_text("raise RuntimeError('no CUDA_HOME\\nhere')")
    deep_gemm.install(force=True)
    ours = importlib.import_module("deep_gemm")
    assert getattr(ours, "fp8_fp4_mega_moe", None) is None and sys.modules["deep_gemm"] is ours
    with pytest.raises(AttributeError, match="no DeepGEMM can be imported: deep_gemm: no CUDA_HOME here; vllm"):
        _ = ours.fp8_fp4_mega_moe


def test_newer_keywords():
    """Releases up to 2.8.1 take these keywords on Hopper the same way: they do nothing, or are refused."""
    operands, by_rows = make_operands(5, 128, 256), product_of_rows(8, 16, 256, "cpu")
    out, wanted = (torch.zeros(5, 128, dtype=torch.bfloat16) for _ in range(2))
    deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], wanted)
    deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], out, alpha=1.0, epilogue=None)
    assert torch.equal(out, wanted)
    flat = [(x.flatten(), scale) for x, scale in (by_rows[:2], by_rows[2:])]
    d, same = torch.zeros(1, 8, 16), torch.zeros(1, 8, 16)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, d, [256])
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, same, ks=[256], use_padded_sf_layout=False)
    assert torch.equal(d, same) and d.any()
    narrow = [x.bfloat16() for x in (operands.a, operands.b)]
    b_groups = operands.b[None], operands.b_scale[None]
    rows, counts = torch.zeros(5, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    empty = torch.zeros_like(out)
    a_groups = tuple(x[None] for x in operands[:2])
    masked = partial(deep_gemm.fp8_m_grouped_gemm_nt_masked, a_groups, b_groups, empty[None], counts, 5)
    for call, message in (
        (lambda: deep_gemm.fp8_gemm_nt(operands[:2], operands[2:], empty, alpha=0.5), "alpha is 0.5.*Multiply a's"),
        (lambda: deep_gemm.fp8_gemm_nn(operands[:2], operands[2:], empty, alpha=0.5), "alpha is 0.5"),
        (lambda: deep_gemm.bf16_gemm_nt(*narrow, empty, alpha=2), "alpha is 2"),
        (lambda: deep_gemm.bf16_gemm_tt(narrow[0].t(), narrow[1], empty, epilogue="cast"), "epilogue is 'cast'"),
        (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(operands[:2], b_groups, empty, rows, epilogue=1), "epil"),
        (partial(masked, epilogue=1), "epilogue is 1"),
        *(
            (partial(masked, **overlap), "enable_overlap and signal .*--enable-single-batch-overlap")
            for overlap in ({"enable_overlap": True, "max_block_n": 160}, {"signal": counts})
        ),
        (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, d, [256], ks=[256]), "ks_cpu and ks are given"),
        (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, d), "ks_cpu is None"),
        (
            lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, d, [256], use_padded_sf_layout=True),
            "use_padded_sf_layout must be False",
        ),
        (
            lambda: deep_gemm.fp8_einsum("bhr,hdr->bhd", a_groups, b_groups, (d, d)),
            "d is .* it must be .* of torch.float8_e4m3fn",
        ),
        (
            lambda: deep_gemm.fp8_einsum("bhr,hdr->bhd", a_groups, b_groups, empty, use_128x4_sfd_layout=True),
            "use_128x4_sfd_layout",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert not empty.any() and torch.equal(d, same)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_operands_that_lie_along_k_whatever_their_names(device, layout):
    operands = make_operands(7, 136, 256, device=device)
    a, b = operands[:2], operands[2:]
    out, wanted = (torch.zeros(7, 136, dtype=torch.bfloat16, device=device) for _ in range(2))
    deep_gemm.fp8_gemm_nt(a, b, wanted)
    a, b = (tuple(x.t() for x in a) if layout[0] == "t" else a), (tuple(x.t() for x in b) if layout[1] == "n" else b)
    getattr(deep_gemm, f"fp8_gemm_{layout}")(a, b, out)
    assert torch.equal(out, wanted)


def test_switches_that_change_nothing(installed):
    for switch, arguments in (
        *(("use_deterministic_algorithms", (True,)), ("set_tc_util", (80,)), ("set_ignore_compile_dims", (True,))),
        *(("set_block_size_multiple_of", ((64, 64),)), ("init", ("/root", "/cuda")), ("shutdown", ())),
    ):
        assert getattr(installed, switch)(*arguments) is None
    assert installed.get_deterministic_algorithms() is True and installed.get_tc_util() == 100


@pytest.mark.parametrize("name", LAYOUT_OF_THE_PACKAGE)
def test_submodules_are_imported_by_every_way(installed, name):
    module = importlib.import_module(f"deep_gemm.{name}")
    assert importlib.util.find_spec(f"deep_gemm.{name}") is module.__spec__
    found = installed
    for part in name.split("."):
        found = getattr(found, part)
    assert found is module
    names: dict[str, object] = {}
    exec(f"from deep_gemm.{name} import {', '.join(['__name__', *LAYOUT_OF_THE_PACKAGE[name]])}", names)
    assert all(names[known] is getattr(deep_gemm, known) for known in LAYOUT_OF_THE_PACKAGE[name])


@pytest.mark.parametrize("name", ["", *LAYOUT_OF_THE_PACKAGE])
def test_absent_names_say_so(installed, name):
    module = importlib.import_module(f"deep_gemm.{name}".rstrip("."))
    assert getattr(module, "fp8_mega_moe", None) is None
    for of in (module, deep_gemm):
        with pytest.raises(AttributeError, match=r"deep_tile, which takes .* has no fp8_mega_moe.*uninstall\(\)"):
            _ = of.fp8_mega_moe
    deep_gemm.uninstall()
    assert not [loaded for loaded in sys.modules if loaded.split(".")[0] == "deep_gemm"]


def test_bytes_are_counted():
    x = torch.zeros(3, 5)
    assert deep_gemm.count_bytes(x, (x.half(), [x.double(), None])) == 60 + 30 + 120


@pytest.fixture
def made_ready(monkeypatch):
    """The arguments of `precompile` in compile mode 1."""
    asked = []
    monkeypatch.setattr(deep_gemm.api, "precompile", lambda shapes, **what: asked.append((shapes, what)))
    monkeypatch.setattr(deep_gemm, "_compile_mode", 0)
    monkeypatch.setattr(deep_gemm, "_ready", {})
    deep_gemm.set_compile_mode(1)
    return asked


def test_compile_mode_makes_ready_and_launches_nothing(made_ready):
    """SGLang warms up so: every m in turn, with matrices of any values."""
    operands, by_rows = make_operands(70, 130, 256), product_of_rows(70, 130, 256, "cpu")
    a, b = dense(operands)[:2], dense(operands)[2:]
    b_groups = tuple(torch.stack([x.view(torch.uint8)] * 2).view(x.dtype) for x in b)
    a_groups = tuple(torch.stack([x.view(torch.uint8)] * 2).view(x.dtype) for x in a)
    out, rows, counts = torch.full((70, 130), 7.0).bfloat16(), torch.zeros(70).int(), torch.zeros(2).int()
    wide, of_groups = out.float(), out.expand(2, 70, 130).clone()
    narrow = [x.bfloat16() for x in (a[0], b[0], b_groups[0], a_groups[0])]
    gradients = wide.expand(1, 70, 130).clone()
    for m in (1, 3, 4, 5, 70):
        deep_gemm.fp8_gemm_nt(tuple(x[:m] for x in a), b, out[:m])
    deep_gemm.fp8_gemm_nt(by_rows[:2], by_rows[2:], wide, c=wide, recipe=(1, 1, 128))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b_groups, out, rows)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a_groups, b_groups, of_groups, counts, 3)
    deep_gemm.bf16_gemm_nt(narrow[0], narrow[1], wide, c=torch.ones_like(wide))
    deep_gemm.bf16_gemm_nn(narrow[0], narrow[1].t().contiguous(), out)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(narrow[0], narrow[2], out, rows)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(narrow[3], narrow[2], of_groups, counts, 3)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(*(x.t().contiguous() for x in narrow[:2]), gradients, [256])
    flat = [(x.flatten(), scale) for x, scale in (by_rows[:2], by_rows[2:])]
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*flat, gradients, [256])
    of_heads = tuple(x.transpose(0, 1) for x in a_groups)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", of_heads, b_groups, of_groups.transpose(0, 1))
    assert all((x == 7).all() for x in (out, wide, of_groups, gradients))
    names = ("kind", "grouping", "accumulate")
    asked = [(*shapes[0], *(what[name] for name in names), *what["layouts"]) for shapes, what in made_ready]
    assert asked == [
        *((130, 256, m, "fp8", "none", False, "nt") for m in (1, 4, 8, 128)),
        (130, 256, 128, "fp8_1x128", "none", True, "nt"),
        *((130, 256, 128, "fp8", grouping, False, "nt") for grouping in ("offs", "counts")),
        (130, 256, 128, "bf16", "none", True, "nt"),
        (130, 256, 128, "bf16", "none", False, "nn"),
        *((130, 256, 128, "bf16", grouping, False, "nt") for grouping in ("offs", "counts")),
        (130, 256, 128, "bf16", "none", True, "tn"),
    ]
    assert deep_gemm.get_compile_mode() == 1
    deep_gemm.set_compile_mode(0)
    deep_gemm.fp8_gemm_nt(a, b, out)
    assert_accurate(out, exact_product(operands))
    for wrong in (2, -1, True, "1", None):
        with pytest.raises(ValueError, match="mode is .*; pass 1 to compile and load"):
            deep_gemm.set_compile_mode(wrong)


def test_numbers_of_numpy_are_ints(monkeypatch):
    monkeypatch.setattr(deep_gemm, "_alignment", 128)
    deep_gemm.set_num_sms(np.int64(24)), deep_gemm.set_mk_alignment_for_contiguous_layout(np.int32(64))
    assert (deep_gemm.get_num_sms(), deep_gemm.get_mk_alignment_for_contiguous_layout()) == (24, 64)
    a, b = (tuple(torch.stack([x.view(torch.uint8)] * 2).view(x.dtype) for x in pair) for pair in pairs_of_one())
    out, counts = torch.empty(2, 5, 128).bfloat16(), torch.tensor([5, 5]).int()
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, out, counts, np.int64(5))
    assert_accurate(out[1], exact_product(Operands(a[0][1], a[1][1], b[0][1], b[1][1])))


def pairs_of_one():
    operands = make_operands(5, 128, 256)
    return dense(operands)[:2], dense(operands)[2:]


def test_the_real_one_stays_unless_forced(monkeypatch):
    real = type(sys)("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", real)
    with pytest.raises(RuntimeError, match="pass force=True"):
        deep_gemm.install()
    deep_gemm.uninstall()
    assert sys.modules["deep_gemm"] is real
    deep_gemm.install(force=True)
    assert sys.modules["deep_gemm"] is not real
