"""Which tensors C reads, and which Python accepts: the kinds of bad_calls.py, and right ones."""

import pytest
import torch
from bad_calls import FLOAT_KINDS, KINDS, Wrapper
from helpers import check_gemm, make_operands
from torch._subclasses.fake_tensor import FakeTensorMode

from deep_tile import (
    _launcher,
    dequantize,
    fp8_gemm,
    launches,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    prepare,
    tensors,
)

SCALE = torch.ones(5, 3)
READABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


class Subclass(torch.Tensor):
    """A subclass that changes nothing."""


with torch.inference_mode():
    INFERENCE = torch.ones(5, 3)

PLAIN = {
    "plain": SCALE,
    "transposed": SCALE.t(),
    "expanded": torch.ones(()).expand(5, 3),
    "of FP8": SCALE.to(torch.float8_e4m3fn),
    "requiring a gradient": torch.ones(5, 3, requires_grad=True),
    "with a history": torch.ones(5, 3, requires_grad=True) * 2,
    "made in inference mode": INFERENCE,
    "a parameter": torch.nn.Parameter(SCALE),
}


@pytest.mark.skipif(not READABLE, reason="this torch has no DLPack C exchange API")
@pytest.mark.parametrize("x", PLAIN.values(), ids=PLAIN)
def test_plain_tensors_are_read(x):
    assert _launcher.reads(x)
    tensors.require_plain(x=x)


@pytest.mark.parametrize("x", [SCALE.as_subclass(Subclass), torch.empty(0, 3), SCALE.to("meta")], ids=str)
def test_some_are_left_to_python_and_pass(x):
    """Another check refuses meta tensors, which are on no GPU."""
    assert not _launcher.reads(x)
    tensors.require_plain(x=x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", [*KINDS, *FLOAT_KINDS])
def test_other_tensors_are_not_read(what):
    make, *_ = (KINDS | FLOAT_KINDS)[what]
    assert not _launcher.reads(make(SCALE))


@pytest.mark.skipif(not READABLE, reason="this torch has no DLPack C exchange API")
def test_keys_and_storages_are_found_where_they_are():
    assert tensors.find_keys() is not None and tensors.find_storage() is not None


def test_without_storages_c_reads_plain_tensors(monkeypatch):
    monkeypatch.setattr(tensors, "_STORAGE_BYTES", 8)
    assert tensors.find_storage() is None
    registered = []
    monkeypatch.setattr(launches._launcher, "read_tensors_of", lambda *arguments: registered.append(arguments))
    launches.teach_launcher()
    assert [len(arguments) for arguments in registered] == [4, 4]


def test_without_keys_c_reads_nothing(monkeypatch):
    monkeypatch.setattr(tensors, "_IMPLEMENTATION_BYTES", 8)
    assert tensors.find_keys() is None
    registered = []
    monkeypatch.setattr(launches._launcher, "read_tensors_of", lambda *arguments: registered.append(arguments))
    launches.teach_launcher()
    assert not registered


# Calls from where tensors are not what they seem.

OPERANDS = make_operands(5, 130, 300, seed=1)


def multiply(a_scale: torch.Tensor) -> torch.Tensor:
    return fp8_gemm(OPERANDS.a, a_scale, OPERANDS.b, OPERANDS.b_scale)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize], ids=lambda f: f.__name__)
def test_transforms_of_torch_func(transform):
    batch = OPERANDS.a_scale[None] if transform is torch.vmap else OPERANDS.a_scale
    with pytest.raises(TypeError, match=r"a_scale is a tensor inside a transform of torch\.func.*Call outside"):
        transform(lambda scale: multiply(scale).sum())(batch)


def test_real_tensors_inside_of_fake_mode():
    """The mode refuses them unless told otherwise, as for any op of torch. A plan does not mix both."""
    x = torch.ones(5, 300)
    out, scale_out = per_token_cast_to_fp8(x)
    for call in (
        lambda: fp8_gemm(*OPERANDS),
        lambda: per_block_cast_to_fp8(x),
        lambda: per_token_cast_to_fp8(x, out=out),
        lambda: per_token_cast_to_fp8(x, scale_out=scale_out),
    ):
        with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors first"):
            call()
    with FakeTensorMode(), pytest.raises(RuntimeError, match="out cannot be allocated: prepare outside"):
        prepare(*OPERANDS)


def test_wrappers_that_cannot_allocate():
    """Whatever they raise, the error is about the argument."""

    class Broken(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise KeyError(function)

    for call in (fp8_gemm, prepare):
        with pytest.raises(TypeError, match="a is a Broken, whose operations run in Python"):
            call(**OPERANDS._asdict() | {"a": Broken(OPERANDS.a)})


def test_collectives_under_way():
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    waiting = collectives.AsyncCollectiveTensor(OPERANDS.a_scale)
    with pytest.raises(TypeError, match=r"a_scale is a AsyncCollectiveTensor.*a_scale\.wait\(\)"):
        multiply(waiting)


def test_dequantize_takes_what_torch_can_read():
    expected = dequantize(OPERANDS.a, OPERANDS.a_scale)
    assert torch.equal(dequantize(OPERANDS.a, Wrapper(OPERANDS.a_scale)), expected)
    assert torch.equal(torch.vmap(lambda scale: dequantize(OPERANDS.a, scale))(OPERANDS.a_scale[None])[0], expected)
    with FakeTensorMode() as mode:
        fake = dequantize(*map(mode.from_tensor, (OPERANDS.a, OPERANDS.a_scale)))
    assert fake.shape == expected.shape


def with_gradient(name: str) -> dict[str, torch.Tensor]:
    """Arguments of a GEMM, one of which requires a gradient."""
    given = {**OPERANDS._asdict(), "out": torch.full((5, 130), 7, dtype=torch.bfloat16)}
    return given | {name: given[name].detach().requires_grad_()}


@pytest.mark.parametrize("name", [*OPERANDS._fields, "out"])
def test_a_product_that_requires_a_gradient_is_refused(name):
    """Also after a call without a gradient: a gradient is never dropped."""
    given = with_gradient(name)
    planned = prepare(*OPERANDS)
    refused = pytest.raises(RuntimeError, match=rf"^{name} requires a gradient.*fp8_linear.*{name}\.detach\(\)")
    for _ in range(2):
        for call in (fp8_gemm, prepare):
            with refused:
                call(**given)
        if name in ("a", "a_scale", "out"):
            with refused:
                planned(given["a"], given["a_scale"], given["out"])
        else:
            with torch.no_grad():
                bound = prepare(**given)
            with refused:
                bound(OPERANDS.a, OPERANDS.a_scale)
        assert (given["out"] == 7).all()
        with torch.no_grad():
            assert torch.equal(fp8_gemm(**given).data, fp8_gemm(*OPERANDS))
        given["out"].data.fill_(7)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_ignored_where_torch_records_none(mode):
    """Whichever tensor requires one; also where autograd forbids writing to `out`."""
    leaf = torch.zeros(5, 260, dtype=torch.bfloat16, requires_grad=True)
    with mode():
        for name in OPERANDS._fields:
            operands = OPERANDS._replace(**{name: with_gradient(name)[name]})
            assert not check_gemm(operands).requires_grad
            assert not fp8_gemm(*operands).requires_grad
            assert torch.equal(prepare(*operands)(*operands[:2]), fp8_gemm(*OPERANDS))
        for out in (leaf[:, :130], with_gradient("out")["out"]):
            fp8_gemm(*OPERANDS, out)
            assert torch.equal(out.data, fp8_gemm(*OPERANDS))
    without_history = leaf.detach()[:, 130:]
    assert torch.equal(fp8_gemm(*OPERANDS, without_history), fp8_gemm(*OPERANDS))
    with torch.inference_mode():
        inference_out = torch.zeros(5, 130, dtype=torch.bfloat16)
    assert torch.equal(fp8_gemm(*OPERANDS, inference_out), fp8_gemm(*OPERANDS))


@torch.no_grad()
def test_gradients_of_empty_sums_are_ignored_where_torch_records_none():
    a, b = (torch.zeros(rows, 0).to(torch.float8_e4m3fn) for rows in (3, 5))
    out = torch.ones(3, 5, dtype=torch.bfloat16, requires_grad=True)
    assert (fp8_gemm(a, torch.ones(3, 0), b, torch.ones(1, 0), out) == 0).all()


# After a fork.


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU, and allocates as CUDA does in a forked process."""

    is_cuda = True

    def new_empty(self, *shape, **keywords):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


@pytest.mark.parametrize("call", [fp8_gemm, prepare], ids=lambda call: call.__name__)
def test_gpu_tensors_after_a_fork(call, monkeypatch):
    operands = [x.as_subclass(OnGpu) for x in OPERANDS]
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for out in (None, torch.zeros(5, 130, dtype=torch.bfloat16).as_subclass(OnGpu)):
        with pytest.raises(RuntimeError, match="a is on .*, and CUDA cannot be used in a process forked.*'spawn'"):
            call(*operands, out)
    with pytest.raises(RuntimeError, match="x is on .*'spawn'"):
        dequantize(*operands[:2])
    assert fp8_gemm(*OPERANDS).shape == (5, 130)
