"""Layers over several processes, on CPUs by gloo (the checks are in ranks.py), and decisions of one process."""

import copy
import secrets
from types import SimpleNamespace

import changes
import pytest
import ranks
import torch
import torch.distributed as dist
from helpers import run_python
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from deep_tile import (
    dequantize,
    distributed,
    fp8_grouped_gemm,
    fp8_linear,
    nn,
    pad_shard,
    per_token_cast_to_fp8,
    precompile_model,
    quantize_weight,
    silu_mul_cast_to_fp8,
)
from deep_tile.distributed import ColumnParallel, RowParallel, check_shardable, shard_weight

WHOLE = Replicate()
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
OF_RANKS = pytest.mark.about(
    *(*changes.OF_OPS, "deep_tile/distributed.py"),
    *("deep_tile/linear.py", "deep_tile/nn.py", "deep_tile/blocks.py", "deep_tile/train/*", "tests/ranks.py"),
)


@OF_RANKS
def test_ranks_agree_with_one_process(tmp_path):
    seed = secrets.randbits(31)
    print(f"seed={seed}")
    failures = ranks.run("gloo", tmp_path, seed)
    assert not failures, failures


@OF_RANKS
def test_a_rank_that_fails_is_reported(tmp_path):
    """The other rank does not wait for it."""
    failures = ranks.run("gloo", tmp_path, 0, "rank1_fails")
    assert "rank0, exit code 1" in failures and "rank1, exit code 1" in failures and "on purpose" in failures


UNASKED = """
import sys
import torch
import torch.distributed as dist

import deep_tile
from deep_tile import fp8_linear, quantize_weight

x, (b, b_scale) = torch.randn(3, 256), quantize_weight(torch.randn(128, 256))
layer = deep_tile.nn.Linear(256, 128)
layer(x), deep_tile.fp8_gemm(*deep_tile.per_token_cast_to_fp8(x), b, b_scale)
assert "torch.distributed.tensor" not in sys.modules

from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
parts = [distribute_tensor(y, mesh, [Replicate()], src_data_rank=None) for y in (x, b, b_scale)]
try:
    fp8_linear(*parts)
except TypeError as error:
    assert "x is a DTensor" in str(error) and "import deep_tile.distributed" in str(error), error
else:
    raise AssertionError("not refused")
deep_tile.distributed
assert torch.equal(fp8_linear(*parts).to_local(), fp8_linear(x, b, b_scale))
dist.destroy_process_group()
"""


def test_nothing_imports_it_unasked(tmp_path):
    """Until the module is imported, DTensors are refused, with its name."""
    run_python(UNASKED, str(tmp_path / "store"), GLOO_SOCKET_IFNAME="lo")


@pytest.mark.parametrize(
    ("n", "k", "ranks", "style", "padding"),
    [
        (384, 256, 3, "column", 0),
        (384, 200, 3, "column", 0),
        (130, 512, 4, "row", 0),
        (7, 9, 1, "row", 0),
        (1536, 256, 8, "column", 64),
        (512, 256, 8, "column", 64),
        (256, 4608, 8, "row", 64),
        (100, 9, 3, "column", 94),
        (128 * 3, 9, 2, "column", 64),
    ],
)
def test_what_can_be_shared(n, k, ranks, style, padding):
    """Anything: blocks that would not stay whole are padded."""
    assert check_shardable(n, k, ranks, style) == padding


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"style": "both"}, ValueError, "style is 'both'; use 'column' or 'row'"),
        ({"ranks": 0}, ValueError, "ranks is 0; it must be positive"),
        ({"ranks": 2.0}, TypeError, "ranks is 2.0, of type float"),
        ({"n": -1}, ValueError, "n is -1"),
        ({"k": "9"}, TypeError, "k is '9'"),
    ],
)
def test_splits_that_mean_nothing(change, kind, message):
    with pytest.raises(kind, match=message):
        check_shardable(**{"n": 256, "k": 256, "ranks": 2, "style": "row"} | change)


SPLIT_SIZES = [(192, 8), (64, 8), (576, 8), (2112, 3), (100, 3), (13, 5), (128, 2), (3, 8)]
"""Columns of each rank, and ranks."""


@DEVICES
@pytest.mark.parametrize("rounding", ["none", "pow2"])
@pytest.mark.parametrize(("each", "ranks"), SPLIT_SIZES, ids=str)
def test_columns_of_a_rank(device, rounding, each, ranks):
    """A rank's columns equal the whole product's bit for bit, wherever they begin. Cut into blocks anew (`max_error`),
    without padding, they are near."""
    n = each * ranks - (each == 100)
    b, b_scale = quantize_weight(torch.randn(n, 272, device=device), round_scale=rounding)
    x = torch.randn(5, 272, device=device).bfloat16()
    whole = fp8_linear(x, b, b_scale, batch_invariant=True)
    for rank in range(ranks):
        shard = shard_weight(b, b_scale, rank, ranks, "column")
        out = fp8_linear(x, shard.weight, shard.scale, batch_invariant=True)[:, shard.first :]
        assert torch.equal(out, whole[:, rank * each : (rank + 1) * each])
        assert len(shard.weight) == shard.first + out.shape[1] and shard.first in (0, rank * each % 128)
        again = shard_weight(b, b_scale, rank, ranks, "column", max_error=1e-3 if rounding == "pow2" else 1 / 16)
        near = fp8_linear(x, again.weight, again.scale, batch_invariant=True)
        assert again.first == 0 and near.shape == out.shape
        assert (near.float() - out.float()).norm() <= (0.01 if rounding == "pow2" else 0.06) * out.float().norm()


@DEVICES
@pytest.mark.parametrize("rounding", ["none", "pow2"])
@pytest.mark.parametrize(("each", "ranks"), SPLIT_SIZES, ids=str)
def test_rows_of_a_rank(device, rounding, each, ranks):
    """The ranks' products add up to the whole one, but for groups of activations that they share."""
    k = each * ranks - (each == 100)
    b, b_scale = quantize_weight(torch.randn(48, k, device=device), round_scale=rounding)
    x = torch.randn(5, k, device=device).bfloat16()
    total = 0
    for rank in range(ranks):
        shard = shard_weight(b, b_scale, rank, ranks, "row")
        own = x[:, rank * each : (rank + 1) * each]
        exact = dequantize(b, b_scale, block=(128, 128))[:, rank * each : (rank + 1) * each]
        padded = shard.pad(own)
        values = dequantize(*per_token_cast_to_fp8(padded), block=(1, 128))[:, shard.first :]
        out = fp8_linear(padded, shard.weight, shard.scale, out_dtype=torch.float32).double()
        wanted = values.double() @ exact.double().t()
        assert (out - wanted).norm() <= (1e-5 if device == "cpu" else 3e-3) * wanted.norm()
        total = total + out
    wanted = x.double() @ dequantize(b, b_scale, block=(128, 128)).double().t()
    assert ((total - wanted).norm() / wanted.norm()).item() < 0.04


@DEVICES
@pytest.mark.parametrize(("n", "ranks"), [(9, 8), (130, 8), (1, 3), (128, 3), (200, 7)])
def test_ranks_that_have_less(device, n, ranks):
    """Ranks get shares as by torch.chunk, down to none."""
    b, b_scale = quantize_weight(torch.randn(n, n, device=device))
    x = torch.randn(5, n, device=device).bfloat16()
    columns, rows = [], []
    for rank in range(ranks):
        shard = shard_weight(b, b_scale, rank, ranks, "column")
        columns.append(fp8_linear(x, shard.weight, shard.scale, batch_invariant=True)[:, shard.first :])
        shard = shard_weight(b, b_scale, rank, ranks, "row")
        each = -(-n // ranks)
        rows.append(fp8_linear(shard.pad(x[:, each * rank : each * rank + each]), shard.weight, shard.scale))
    sizes = [len(part) for part in torch.arange(n).chunk(ranks)]
    assert [part.shape[1] for part in columns] == sizes + [0] * (ranks - len(sizes))
    assert torch.equal(torch.cat(columns, 1), fp8_linear(x, b, b_scale, batch_invariant=True))
    assert all(part.shape == (5, n) for part in rows)


@DEVICES
def test_experts_of_a_rank(device):
    """Gate and up have 192 rows each, halves of whole blocks, and down 192 columns: no call copies anything."""
    experts, width, ranks, k = 3, 1536, 8, 256
    parts = {name: torch.randn(experts, width, k, device=device) for name in ("gate", "up")}
    (gate, gate_scale), (up, up_scale) = (
        map(torch.stack, zip(*(quantize_weight(w) for w in parts[name]), strict=True)) for name in parts
    )
    x, x_scale = per_token_cast_to_fp8(torch.randn(20, k, device=device))
    offs = torch.tensor([7, 7, 20], dtype=torch.int32, device=device)
    whole = [
        fp8_grouped_gemm(x, x_scale, w, s, offs, batch_invariant=True) for w, s in ((gate, gate_scale), (up, up_scale))
    ]
    for rank in range(ranks):
        begin = 192 * rank
        first, blocks = begin % 128, slice(begin // 128, -(-(begin + 192) // 128))
        halves = [
            pad_shard(w[:, begin : begin + 192], s[:, blocks], first_row=first, rows=256)
            for w, s in ((gate, gate_scale), (up, up_scale))
        ]
        b, b_scale = (torch.cat(tensors, 1) for tensors in zip(*halves, strict=True))
        out = fp8_grouped_gemm(x, x_scale, b, b_scale, offs, batch_invariant=True)
        for half, of_whole in zip(out.chunk(2, 1), whole, strict=True):
            assert torch.equal(half[:, first : first + 192], of_whole[:, begin : begin + 192])
            assert not half[:, :first].any() and not half[:, first + 192 :].any()
        shard = shard_weight(gate, gate_scale, rank, ranks, "column")
        own = fp8_grouped_gemm(x, x_scale, shard.weight, shard.scale, offs, batch_invariant=True)
        assert torch.equal(own[:, shard.first :], whole[0][:, begin : begin + 192])
        h, _ = silu_mul_cast_to_fp8(out, offs=offs)
        assert not h.float()[:, :first].any() and not h.float()[:, first + 192 :].any()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"weight": torch.zeros(64, 256)}, TypeError,
         "weight is torch.float32 .*re-base another format with deep_tile"),
        ({"scale": torch.ones(1, 1)}, ValueError,
         r"scale torch.float32 \[1, 1\], first_row and first_column are \(64, 0"),
        ({"scale": torch.ones(2, 2, device="meta")}, ValueError, "scale is on meta but weight is on cpu"),
        ({"first_row": 128}, ValueError, "must be below 128"),
        ({"first_row": -1}, ValueError, "first_row is -1"),
        ({"first_column": 1.0}, TypeError, "first_column is 1.0"),
        ({"rows": 191}, ValueError, "rows is 191; pass None, or an int of at least 192"),
        ({"columns": "256"}, ValueError, "columns is '256'"),
        ({"weight": None}, TypeError, "weight must be a torch.Tensor"),
    ],
)  # fmt: skip
def test_shards_that_do_not_fit(change, kind, message):
    good = {"weight": torch.zeros(128, 256).to(torch.float8_e4m3fn), "scale": torch.ones(2, 2), "first_row": 64}
    assert pad_shard(**good)[0].shape == (192, 256)
    with pytest.raises(kind, match=message):
        pad_shard(**good | change)
    elsewhere = torch.ones(1, 2, device="meta")
    for wrong in (
        {"rank": 2},
        {"rank": True},
        {"weight_scale_inv": torch.ones(2, 2)},
        {"weight_scale_inv": elsewhere},
        {"style": "none"},
    ):
        arguments = {"weight": good["weight"], "weight_scale_inv": torch.ones(1, 2), "rank": 1, "ranks": 2}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            shard_weight(**{**arguments, "style": "row"} | wrong)
    with pytest.raises(TypeError, match="weight_scale_inv is torch.uint8; it must be torch.float32"):
        shard_weight(**{**arguments, "style": "row", "weight_scale_inv": torch.ones(1, 2).byte()})


class Mesh(tuple):
    """A mesh of these sizes, as sharding rules see it."""

    ndim = property(len)
    size = tuple.__getitem__


def spec(shape: tuple[int, ...], *placements, mesh: tuple[int, ...] = (2, 4)) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, placements=placements, mesh=Mesh(mesh))


COLUMN = ([Shard(1)], [WHOLE, Shard(0), Shard(0)])
ROW = ([Partial()], [Shard(1), Shard(1), Shard(1)])


@pytest.mark.parametrize(
    ("of_x", "of_b", "offered"),
    [
        ((WHOLE, WHOLE), (WHOLE, WHOLE), []),
        ((Shard(0), WHOLE), (WHOLE, Shard(0)), [COLUMN]),
        ((Shard(0), WHOLE), (WHOLE, Shard(1)), [ROW]),
        ((WHOLE, Shard(1)), (WHOLE, WHOLE), [ROW]),
        ((Shard(1), Shard(1)), (WHOLE, WHOLE), []),  # k = 512 over 8 ranks: x is gathered
        ((WHOLE, WHOLE), (Shard(0), Shard(1)), [COLUMN, ROW]),
    ],
    ids=str,
)
def test_splits_are_offered_where_they_are_asked_for(of_x, of_b, offered):
    """Each dimension of a mesh of 2 x 4 ranks may be split."""
    x, b, b_scale = spec((6, 512), *of_x), spec((512, 512), *of_b), spec((4, 4), *of_b)
    always = [([WHOLE], [WHOLE] * 3), ([Shard(0)], [Shard(0), WHOLE, WHOLE])]
    assert distributed._linear_rule(x, b, b_scale) == always + offered


def test_one_rank_has_any_split():
    """On a mesh dimension of one rank every layer is split, and nothing moves."""
    x = spec((6, 9), WHOLE, mesh=(1,))
    b, b_scale = (spec(shape, Shard(0), mesh=(1,)) for shape in ((7, 9), (1, 1)))
    assert distributed._linear_rule(x, b, b_scale)[-1] == COLUMN


@pytest.mark.parametrize(
    ("of_x", "of_b", "wanted"),
    [
        ((WHOLE, WHOLE), (Shard(0), Shard(0)), "n of the weight is 512, split over 8 ranks"),
        ((WHOLE, WHOLE), (Shard(1), Shard(1)), "k of the weight is 512, split over 8 ranks"),
        ((Shard(1), WHOLE), (WHOLE, Shard(1)), "k of the weight is 512, split over 8 ranks"),
    ],
    ids=str,
)
def test_weights_are_not_split_within_blocks(of_x, of_b, wanted):
    x, b, b_scale = spec((6, 512), *of_x), spec((512, 512), *of_b), spec((4, 4), *of_b)
    with pytest.raises(ValueError, match=wanted):
        distributed._linear_rule(x, b, b_scale)


@pytest.mark.parametrize(
    "wanted", [{"x"}, {"bias"}, {"x", "w"}, {"w", "bias"}, set()], ids=lambda wanted: " ".join(sorted(wanted)) or "none"
)
def test_gradients_as_an_op(wanted):
    """Gradients that nobody wants are empty; tracers expect as many."""
    x, w, bias = (torch.randn(shape).bfloat16() for shape in ((2, 5, 200), (130, 200), (130,)))
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        tensor.requires_grad_(name in wanted)
    out = fp8_linear(x, w, None, bias)
    grad = torch.randn_like(out)
    if wanted:
        out.backward(grad)
    dtypes = {f"{name}_dtype": torch.bfloat16 for name in ("x", "bias") if name in wanted}
    arguments = grad, x.detach() if "w" in wanted else None, w.detach(), None
    op = torch.ops.deep_tile.fp8_linear_backward.default
    for got, tensor in zip(op(*arguments, **dtypes), (x, w, bias), strict=True):
        assert got.numel() == 0 if tensor.grad is None else torch.equal(got, tensor.grad)
    torch.library.opcheck(op, arguments, dtypes, test_utils=("test_schema", "test_faketensor"))


# ---- one rank of eight that are not there


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


class Mlp(torch.nn.Module):
    def __init__(self, k: int = 1024, n: int = 2048):
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.bfloat16) for sizes in ((k, n), (n, k)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def split_over(mesh, model: Mlp) -> Mlp:
    return parallelize_module(model, mesh, {"up": ColumnParallel(), "down": RowParallel()})


def under_fsdp(mesh, model: Mlp) -> Mlp:
    fully_shard(model, mesh=mesh)
    return model


def experts(mesh, dim: int) -> torch.nn.Module:
    """Eight experts [512, 256], split along `dim`."""
    model = torch.nn.Module()
    for name, shape, dtype in (("w", [8, 512, 256], torch.float8_e4m3fn), ("w_scale_inv", [8, 4, 2], torch.float32)):
        shape[dim] //= mesh.size()
        part = DTensor.from_local(torch.empty(shape, dtype=dtype), mesh, [Shard(dim)])
        model.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
    return model


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda mesh: split_over(mesh["tensor"], Mlp()), {(512, 1024), (1024, 512)}),
        (lambda mesh: under_fsdp(mesh["data"], Mlp()), {(2048, 1024), (1024, 2048)}),
        (lambda mesh: under_fsdp(mesh["data"], split_over(mesh["tensor"], Mlp())), {(512, 1024), (1024, 512)}),
        (lambda mesh: experts(mesh["tensor"], 0), {(512, 256)}),
        (lambda mesh: experts(mesh["tensor"], 1), {(128, 256)}),
        (lambda mesh: experts(mesh["data"], 2), {(512, 128)}),
    ],
    ids=["split", "FSDP", "split and FSDP", "experts", "rows of experts", "columns of experts"],
)
def test_kernels_are_made_for_what_a_rank_multiplies(mesh, monkeypatch, make, wanted):
    asked, made = [], nn.api.Precompiled((), 0)
    monkeypatch.setattr(nn.api, "precompile", lambda given, **_: asked.extend(given) or made)
    monkeypatch.setattr(nn.cast, "load_kernels", lambda device, workers, **_: None)
    precompile_model(make(mesh), 64)
    assert set(asked) == {(*shape, 64) for shape in wanted}


@torch.no_grad()  # what autograd keeps, torch cannot swap
def test_split_layers_take_dense_shards(mesh):
    """Shards come by a copy or by loading with assign; saved state is dense."""
    model = torch.nn.Sequential(nn.Linear(100, 512, dtype=torch.bfloat16))
    model = parallelize_module(model, mesh["tensor"], {"0": ColumnParallel()}, src_data_rank=None)
    x = torch.randn(3, 100).bfloat16()
    expected = model(x)
    state = model.state_dict()
    assert model[0].weight.to_local().stride() == (112, 1) and state["0.weight"].to_local().is_contiguous()
    changed = copy.deepcopy(model)
    changed.load_state_dict(state, assign=True)
    assert changed[0].weight.to_local().stride() == (100, 1)
    assert torch.equal(changed(x), expected)
    assert torch.equal(model.to(torch.bfloat16)(x), expected) and model[0].weight.to_local().stride() == (112, 1)
