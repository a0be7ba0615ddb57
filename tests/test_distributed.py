"""Layers over several processes, on CPUs by gloo: ranks.py has what they check. And what one process decides alone."""

import secrets
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ranks
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from deep_tile import distributed, fp8_linear
from deep_tile.distributed import check_shardable

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
