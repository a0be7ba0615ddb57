"""Layers over several processes, on CPUs by gloo: ranks.py has what they check. And what one process decides alone."""

import copy
import secrets
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from deep_tile import distributed, fp8_linear, nn, precompile_model
from deep_tile.distributed import ColumnParallel, RowParallel, check_shardable

WHOLE = Replicate()


def test_ranks_agree_with_one_process(tmp_path):
    seed = secrets.randbits(31)
    print(f"seed={seed}")
    failures = ranks.run("gloo", tmp_path, seed)
    assert not failures, failures


def test_a_rank_that_fails_is_reported(tmp_path):
    """And the other does not wait for it."""
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
    """Until it is imported, DTensors are refused, with what to import."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", **ranks.os.environ}
    command = [sys.executable, "-c", UNASKED, str(tmp_path / "store")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("n", "k", "size", "style", "wanted"),
    [
        (384, 256, 3, "column", None),
        (384, 200, 3, "column", None),
        (130, 512, 4, "row", None),
        (7, 9, 1, "row", None),
        (384, 256, 2, "column", r"n of the weight is 384, split over 2 ranks.*multiple of 128 \* 2.*Pad it to 512"),
        (192, 256, 2, "column", "n of the weight is 192.*Pad it to 256"),
        (256, 384, 2, "row", "k of the weight is 384.*keep it whole"),
        (256, 256, 2, "both", "style is 'both'; use 'column' or 'row'"),
    ],
)
def test_what_can_be_shared(n, k, size, style, wanted):
    if wanted is None:
        return check_shardable(n, k, size, style)
    with pytest.raises(ValueError, match=wanted):
        check_shardable(n, k, size, style)


class Mesh(tuple):
    """Of these sizes, as rules see it."""

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
    """Along any dimension of a mesh of 2 x 4 ranks."""
    x, b, b_scale = spec((6, 512), *of_x), spec((512, 512), *of_b), spec((4, 4), *of_b)
    always = [([WHOLE], [WHOLE] * 3), ([Shard(0)], [Shard(0), WHOLE, WHOLE])]
    assert distributed._linear_rule(x, b, b_scale) == always + offered


def test_one_rank_has_any_split():
    """As every layer has on a dimension of one rank; nothing moves then."""
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
    """Those that nobody wants are empty; tracers expect what comes."""
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
    """Eight experts [512, 256], of which dimension `dim` is split."""
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
    monkeypatch.setattr(nn.cast, "load_kernels", lambda device, workers: None)
    precompile_model(make(mesh), 64)
    assert set(asked) == {(*shape, 64) for shape in wanted}


@torch.no_grad()  # what autograd keeps, torch cannot swap
def test_split_layers_take_dense_shards(mesh):
    """As copies, and loading with assign, leave them; what they save is dense."""
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
