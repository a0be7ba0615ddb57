"""Several processes that compute together, and what each of them checks: cases for test_distributed.py (CPUs, gloo) and
test_distributed_gpu.py (GPUs, NCCL).

`run` starts a process for each rank. Every case compares with one process, which each rank is, too: all of them draw
the same numbers. Invariant: a case that a rank fails ends both, so that none waits for another.
"""

import copy
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deep_tile import fp8_linear, nn, quantize_weight, tensors, train
from deep_tile.distributed import ColumnParallel, RowParallel, check_shardable
from deep_tile.train.sharded import sharded_linear

RANKS = 2
SECONDS = 240
"""For all cases, on a machine that does other things, too."""

GRACE = 5
"""Seconds for a rank whose partner has failed: gloo tells it, NCCL lets it wait."""

SUMMED = 2**-7
"""Relative error of sums whose terms were rounded to BF16, or which were added in another order; Frobenius norm."""

OPTIONS = {"batch_invariant": True}
"""So that a rank with fewer rows or columns computes each of them as one process does."""

WHOLE = Replicate()

CASES: dict[str, Callable[[DeviceMesh], None]] = {}


def rank1_fails(mesh: DeviceMesh) -> None:
    assert mesh.get_rank() == 0, "on purpose"


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "deep_tile.distributed", "deep_tile.train"])
"""Ranks are forks of one process, which has imported what takes a rank three seconds and has called nothing."""

FAILING = {"rank1_fails": rank1_fails}
"""What shows that a failure is seen."""


def run(backend: str, folder: Path, seed: int, *names: str) -> str:
    """Run cases, all where none is named, on `RANKS` processes; what they printed if one failed, else nothing."""
    logs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    processes = [
        FORKS.Process(target=_run_logged, args=(log, backend, rank, folder, seed, *names))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    if not any(codes):
        return ""
    return "\n\n".join(
        f"{log.stem}, exit code {code}:\n{log.read_text()}" for log, code in zip(logs, codes, strict=True)
    )


def _run_logged(log: Path, *arguments) -> None:
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo otherwise looks up the host's name.
    _run_rank(*arguments)


def _run_rank(backend: str, rank: int, folder: Path, seed: int, *names: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=RANKS, device_id=device)
    mesh = init_device_mesh("cpu" if device is None else "cuda", (RANKS,))
    for name in names or CASES:
        start = time.monotonic()
        torch.manual_seed(seed)
        (CASES | FAILING)[name](mesh)
        dist.barrier()
        print(f"{name} passed in {time.monotonic() - start:.1f} s", flush=True)
    dist.destroy_process_group()


def case(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CASES[function.__name__] = function
    return function


def split(x: torch.Tensor, mesh: DeviceMesh, *placements) -> DTensor:
    """Each rank keeps its part of what all have; sends nothing."""
    return distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)


def collected(x: DTensor) -> torch.Tensor:
    """The whole tensor. Gloo sends no FP8."""
    if x.dtype != torch.float8_e4m3fn:
        return x.full_tensor()
    bytes_ = DTensor.from_local(x.to_local().view(torch.uint8), x.device_mesh, x.placements, run_check=False)
    return bytes_.full_tensor().view(x.dtype)


def draw_layer(mesh: DeviceMesh, shape: tuple[int, ...], n: int):
    """x, b, b_scale and a bias."""
    x = torch.randn(shape, device=mesh.device_type).bfloat16()
    b, b_scale = quantize_weight(torch.randn(n, shape[-1], device=mesh.device_type))
    return x, b, b_scale, torch.randn(n, device=mesh.device_type).bfloat16()


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype and torch.equal(one.float(), other.float()), (one, other)


def assert_near(one: torch.Tensor, other: torch.Tensor, bound: float = SUMMED) -> None:
    assert one.shape == other.shape and one.dtype == other.dtype
    error = ((one.double() - other.double()).norm() / other.double().norm()).item()
    assert error <= bound, error


def assert_refused(kind: type, text: str, function: Callable, *arguments, **keywords) -> None:
    """On this rank, which has sent nothing."""
    with CommDebugMode() as sent:
        try:
            function(*arguments, **keywords)
        except kind as error:
            assert text in f"{error} {error.__cause__}", error  # torch 2.9 tells the reason as the cause alone
        else:
            raise AssertionError(f"not refused: {text}")
    assert sent.get_total_counts() == 0


# x, weight, bias -> out, where x has `dims` dimensions.
SPLITS = {
    "column": lambda dims: (WHOLE, Shard(0), Shard(0), Shard(dims - 1)),
    "row": lambda dims: (Shard(dims - 1), Shard(1), WHOLE, Partial()),
    "data": lambda dims: (Shard(0), WHOLE, WHOLE, Shard(0)),
    "sequence": lambda dims: (Shard(dims - 2), WHOLE, WHOLE, Shard(dims - 2)),
    "whole": lambda dims: (WHOLE, WHOLE, WHOLE, WHOLE),
}


@case
def shards_without_dtensor(mesh):
    """As engines do it: local shards, and a sum over the ranks."""
    x, b, b_scale, _ = draw_layer(mesh, (5, 512), 384)
    assert check_shardable(384, 512, RANKS, "row") == 0
    x_part, b_part, scale_part = (tensor.chunk(RANKS, 1)[mesh.get_rank()] for tensor in (x, b, b_scale))
    out = fp8_linear(x_part, b_part, scale_part)
    dist.all_reduce(out)
    assert_near(out, fp8_linear(x, b, b_scale))


@case
def layers_of_every_split(mesh):
    """Forward and backward, which send nothing."""
    for shape, n in (((5, 512), 256), ((2, 4, 256), 512), ((4, 3, 2, 512), 256)):
        for place in SPLITS.values():
            of_x, of_b, of_bias, of_out = place(len(shape))
            x, b, b_scale, bias = draw_layer(mesh, shape, n)
            x.requires_grad_(), bias.requires_grad_()
            expected = fp8_linear(x, b, b_scale, bias, **OPTIONS)
            grad = torch.randn_like(expected)
            expected.backward(grad)
            x_split, bias_split = (
                split(tensor, mesh, where).requires_grad_() for tensor, where in ((x, of_x), (bias, of_bias))
            )
            with CommDebugMode() as sent:
                out = fp8_linear(x_split, split(b, mesh, of_b), split(b_scale, mesh, of_b), bias_split, **OPTIONS)
                out.backward(split(grad, mesh, WHOLE if of_out.is_partial() else of_out))
            assert sent.get_total_counts() == 0 and out.placements == (of_out,)
            (assert_near if of_out.is_partial() else assert_equal)(collected(out), expected)
            assert_near(collected(x_split.grad), x.grad)
            assert_near(collected(bias_split.grad), bias.grad)


@case
def weights_that_are_not_fp8(mesh):
    """Quantised on every call, and trained."""
    for place in SPLITS.values():
        of_x, of_b, *_, of_out = place(2)
        x, w = (torch.randn(size, 512, device=mesh.device_type).bfloat16().requires_grad_() for size in (6, 256))
        expected = fp8_linear(x, w, **OPTIONS)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        x_split, w_split = (split(y, mesh, where).requires_grad_() for y, where in ((x, of_x), (w, of_b)))
        out = fp8_linear(x_split, w_split, **OPTIONS)
        out.backward(split(grad, mesh, WHOLE if of_out.is_partial() else of_out))
        (assert_near if of_out.is_partial() else assert_equal)(collected(out), expected)
        assert_near(collected(x_split.grad), x.grad)
        assert_near(collected(w_split.grad), w.grad)


@case
def casts_and_products(mesh):
    """The ops below fp8_linear."""
    x = torch.randn(6, 512, device=mesh.device_type).bfloat16()
    w = torch.randn(256, 512, device=mesh.device_type).bfloat16()
    a, b = torch.ops.deep_tile.per_token_cast_to_fp8(x), torch.ops.deep_tile.per_block_cast_to_fp8(w)
    expected = torch.ops.deep_tile.fp8_gemm(*a, *b, **OPTIONS)
    for place in SPLITS.values():
        of_x, of_b, _, of_out = place(2)
        with CommDebugMode() as sent:
            a_split = torch.ops.deep_tile.per_token_cast_to_fp8(split(x, mesh, of_x))
            b_split = torch.ops.deep_tile.per_block_cast_to_fp8(split(w, mesh, of_b))
            out = torch.ops.deep_tile.fp8_gemm(*a_split, *b_split, **OPTIONS)
        assert sent.get_total_counts() == 0 and out.placements == (of_out,)
        (assert_near if of_out.is_partial() else assert_equal)(collected(out), expected)
        for one, other in zip((*a_split, *b_split), (*a, *b), strict=True):
            assert_equal(collected(one), other)


@case
def options_of_the_ops(mesh):
    """DTensor remembers what it knows of an op; of no option may it remember another's."""
    x, b, b_scale, _ = draw_layer(mesh, (6, 512), 256)
    split_x, split_b, split_scale = (
        split(y, mesh, where) for y, where in ((x, WHOLE), (b, Shard(0)), (b_scale, Shard(0)))
    )
    for out_dtype in (None, torch.float32, torch.float16):
        out = fp8_linear(split_x, split_b, split_scale, out_dtype=out_dtype, **OPTIONS)
        assert_equal(collected(out), fp8_linear(x, b, b_scale, out_dtype=out_dtype, **OPTIONS))
    for rounding in ("none", "pow2"):
        out = fp8_linear(split_x, split_b, split_scale, round_scale=rounding, **OPTIONS)
        assert_equal(collected(out), fp8_linear(x, b, b_scale, round_scale=rounding, **OPTIONS))


@case
def inputs_that_are_split_where_no_block_ends(mesh):
    """Are gathered: only weights are refused."""
    x, b, b_scale, _ = draw_layer(mesh, (6, 384), 256)
    part, (b, b_scale) = split(x, mesh, Shard(1)), (split(y, mesh, WHOLE) for y in (b, b_scale))
    assert_equal(collected(fp8_linear(part, b, b_scale)), collected(fp8_linear(split(x, mesh, WHOLE), b, b_scale)))
    a, a_scale = torch.ops.deep_tile.per_token_cast_to_fp8(part)
    assert a.placements == a_scale.placements == (WHOLE,)


@case
def what_is_refused(mesh):
    """On every rank alike, and before anything is sent."""
    x, b, b_scale, bias = draw_layer(mesh, (6, 384), 192)
    x = split(x, mesh, WHOLE)
    linear = torch.nn.Linear(384, 192, device=mesh.device_type)
    for dim, name, size in ((0, "n", 192), (1, "k", 384)):
        wanted = f"of the weight is {size}, split over 2 ranks: it must be a multiple of 128 * 2"
        parts = [split(y, mesh, Shard(dim)) for y in (b, b_scale)]
        assert_refused(RuntimeError, f"{name} {wanted}", fp8_linear, x, *parts)
        assert_refused(RuntimeError, f"{name} {wanted}", fp8_linear, x, split(b, mesh, WHOLE), parts[1])
        a = torch.ops.deep_tile.per_token_cast_to_fp8(x)
        assert_refused(RuntimeError, f"{name} {wanted}", torch.ops.deep_tile.fp8_gemm, *a, *parts)
        w = split(linear.weight, mesh, Shard(dim))
        assert_refused(RuntimeError, f"{name} {wanted}", torch.ops.deep_tile.per_block_cast_to_fp8, w)
    assert_refused(TypeError, "splits deep_tile.nn.Linear; got Linear", parallelize_module, linear, mesh, RowParallel())
    whole = [split(y, mesh, WHOLE) for y in (b, b_scale)]
    out = split(torch.zeros(6, 192, device=mesh.device_type).bfloat16(), mesh, WHOLE)
    assert_refused(RuntimeError, "leave out out", fp8_linear, x, *whole, None, out)
    assert_refused(RuntimeError, "mixed torch.Tensor and DTensor", fp8_linear, x, b, b_scale)
    assert_refused(RuntimeError, "mixed torch.Tensor and DTensor", fp8_linear, x.to_local(), *whole)


@case
def layers_that_follow_each_other(mesh):
    """By columns, then by rows: one sum forwards and one backwards; with inputs that are whole, or split by tokens."""
    for between_tokens in (False, True):
        model = torch.nn.Sequential(
            nn.Linear(200, 512, device=mesh.device_type, dtype=torch.bfloat16, **OPTIONS),
            torch.nn.GELU(),
            nn.Linear(512, 130, device=mesh.device_type, dtype=torch.bfloat16),
        )
        other = copy.deepcopy(model)
        where = Shard(1) if between_tokens else WHOLE
        plan = {"0": ColumnParallel(input_layouts=where), "2": RowParallel(output_layouts=where)}
        parallelize_module(other, mesh, plan)
        x = torch.randn(2, 6, 200, device=mesh.device_type).bfloat16()
        whole, part = x.clone().requires_grad_(), split(x, mesh, where).to_local().requires_grad_()
        expected = model(whole)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        with CommDebugMode() as forwards:
            out = other(part)
        with CommDebugMode() as backwards:
            out.backward(split(grad, mesh, where).to_local())
        assert forwards.get_total_counts() == backwards.get_total_counts() == (2 if between_tokens else 1)
        assert_near(out, split(expected, mesh, where).to_local())
        assert_near(part.grad, split(whole.grad, mesh, where).to_local())
        for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (wanted.grad is None)
            if one.grad is not None:
                assert_near(one.grad.full_tensor(), wanted.grad)


@case
def layers_of_partial_blocks(mesh):
    """Split inside of blocks, and unevenly: columns bit for bit, rows but for the scales of activations; gradients and
    compiled graphs alike."""
    for k, width in ((200, 384), (256, 327)):
        model = torch.nn.Sequential(
            nn.Linear(k, width, device=mesh.device_type, dtype=torch.bfloat16, **OPTIONS),
            torch.nn.GELU(),
            nn.Linear(width, 130, device=mesh.device_type, dtype=torch.bfloat16),
        )
        x = torch.randn(5, k, device=mesh.device_type).bfloat16()
        whole = model[0](x)
        for output in (Shard(-1), WHOLE):
            up = parallelize_module(copy.deepcopy(model[0]), mesh, ColumnParallel(output_layouts=output))
            assert check_shardable(width, k, RANKS, "column") == up.weight.to_local().shape[0] - -(-width // RANKS)
            assert_equal(up(x), split(whole, mesh, output).to_local())
        for given in (Shard(-1), WHOLE):
            down = parallelize_module(copy.deepcopy(model[2]), mesh, RowParallel(input_layouts=given))
            assert_near(down(split(whole, mesh, given).to_local()), model[2](whole), 0.04)
        other = parallelize_module(copy.deepcopy(model), mesh, {"0": ColumnParallel(), "2": RowParallel()})
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        expected, out = model(ours), other(theirs)
        assert_near(out, expected, 0.04)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        out.backward(grad)
        assert_near(theirs.grad, ours.grad, 0.04)
        own = other[0].shard_part
        assert_near(
            other[0].bias.grad.to_local()[own.own], model[0].bias.grad[own.begin : own.begin + own.length], 0.04
        )
        assert not other[0].bias.grad.to_local()[: own.first].any()
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            assert_equal(compiled(x) + 0, other(x))
        state = copy.deepcopy(other).state_dict()
        other.load_state_dict(state)
        assert_equal(other(x), out)


@case
def columns_of_a_layer(mesh):
    """Are exact, also after what models do to layers; made without memory where rows are aligned without padding."""
    for k in (200, 256):
        layer = _by_columns(mesh, k)
        x = torch.randn(5, k, device=mesh.device_type).bfloat16()
        changed = {
            "as it was": layer,
            "copied": copy.deepcopy(layer),
            "converted": copy.deepcopy(layer).float().bfloat16(),
            "loaded": _by_columns(mesh, k),
        }
        if k % 16 == 0:
            changed["made without memory"] = _by_columns(mesh, k, "meta").to_empty(device=mesh.device_type)
        for name, one in changed.items():
            print(name)
            one.load_state_dict(layer.state_dict())
            weight, scale = map(collected, (one.weight, one.weight_scale_inv))
            assert_equal(
                one(x).full_tensor(),
                fp8_linear(x, tensors.with_aligned_rows(weight), scale, one.bias.full_tensor(), **OPTIONS),
            )
            assert_equal(weight, collected(layer.weight))


def _by_columns(mesh: DeviceMesh, k: int, device: str | None = None) -> nn.Linear:
    layer = nn.Linear(k, 256, device=device or mesh.device_type, dtype=torch.bfloat16, **OPTIONS)
    return parallelize_module(layer, mesh, ColumnParallel(use_local_output=False))


@case
def fully_sharded_layers(mesh):
    """Each rank has its tokens and gathers whole layers in FP8, also where there are fewer scales than ranks."""
    model = torch.nn.Sequential(
        nn.Linear(512, 384, device=mesh.device_type, dtype=torch.bfloat16, **OPTIONS),
        nn.Linear(384, 96, device=mesh.device_type, dtype=torch.bfloat16, **OPTIONS),
    )
    other = copy.deepcopy(model).to(mesh.device_type, torch.bfloat16)
    for layer in (*other, other):
        fully_shard(layer, mesh=mesh)
    assert other[0].weight.dtype == torch.float8_e4m3fn and other[0].weight.to_local().shape == (192, 512)
    x = torch.randn(6, 512, device=mesh.device_type).bfloat16()
    whole, part = x.clone().requires_grad_(), split(x, mesh, Shard(0)).to_local().requires_grad_()
    expected = model(whole)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    out = other(part)
    out.backward(split(grad, mesh, Shard(0)).to_local())
    assert_equal(out, split(expected, mesh, Shard(0)).to_local())
    assert_near(part.grad, split(whole.grad, mesh, Shard(0)).to_local())
    for one, wanted in zip(other, model, strict=True):
        assert_near(one.bias.grad.full_tensor() * RANKS, wanted.bias.grad)  # a mean over the ranks


@case
def weights_gathered_in_fp8(mesh):
    """Layers that train give what one process does, step by step, with FP32 weights; whose gathered bytes are FP8. One
    whose blocks of 128 rows lie in two ranks is gathered as it is."""
    device = mesh.device_type
    sizes = (256, 512, False), (512, 256, False), (256, 130, True)
    model = torch.nn.Sequential(*(torch.nn.Linear(k, n, has_bias, device=device) for k, n, has_bias in sizes))
    train.convert(model, lambda *_: True)
    other, seen = train.gather_fp8(copy.deepcopy(model)), []
    for layer, dtype in zip(other, (torch.bfloat16, torch.bfloat16, None), strict=True):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    fully_shard(other, mesh=mesh)
    for layer in other:
        layer.register_forward_pre_hook(lambda layer, *_: seen.append(layer.weight))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)]
    for _ in range(3):
        x = torch.randn(6, 256, device=device).bfloat16()
        grad = torch.randn(6, 130, device=device).bfloat16()
        whole, part = x.clone().requires_grad_(), split(x, mesh, Shard(0)).to_local().requires_grad_()
        expected, out = model(whole), other(part)
        assert_near(out, split(expected, mesh, Shard(0)).to_local())
        expected.backward(grad)
        out.backward(split(grad, mesh, Shard(0)).to_local())
        assert_near(part.grad, split(whole.grad, mesh, Shard(0)).to_local())
        for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
            assert_near(one.grad.full_tensor() * RANKS, wanted.grad, 0.05)  # dy has scales of a rank's tokens
            wanted.grad.copy_(one.grad.full_tensor())
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
            assert_near(one.full_tensor(), wanted, 1e-6)
    kinds = [type(weight).__name__ for weight in seen]
    assert kinds == ["Gathered", "Gathered", "Parameter"] * 3, kinds
    assert {name: each.shape for name, each in other.state_dict().items()} == {
        name: each.shape for name, each in model.state_dict().items()
    }


@case
def fully_sharded_columns(mesh):
    """Both at once, on a mesh of two dimensions."""
    layer = nn.Linear(256, 512, device=mesh.device_type, dtype=torch.bfloat16, **OPTIONS)
    x = torch.randn(5, 256, device=mesh.device_type).bfloat16()
    expected = layer(x)
    for sizes in ((1, RANKS), (RANKS, 1)):
        both = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("data", "columns"))
        other = copy.deepcopy(layer)
        parallelize_module(other, both["columns"], ColumnParallel(use_local_output=False))
        fully_shard(other, mesh=both["data"])
        assert_equal(other(x).full_tensor(), expected)


@case
def results_that_are_still_sent(mesh):
    """As a layer that is split hands them over."""
    x, b, b_scale, _ = draw_layer(mesh, (6, 256), 96)
    pending = all_reduce(x if mesh.get_rank() == 0 else torch.zeros_like(x), "sum", mesh)
    assert isinstance(pending, AsyncCollectiveTensor)
    assert_equal(fp8_linear(pending, b, b_scale), fp8_linear(x, b, b_scale))


@case
def compiled_layers(mesh):
    """In one graph."""
    model = torch.nn.Sequential(
        nn.Linear(256, 512, device=mesh.device_type, dtype=torch.bfloat16),
        torch.nn.ReLU(),
        nn.Linear(512, 256, device=mesh.device_type, dtype=torch.bfloat16),
    )
    parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
    x = torch.randn(6, 256, device=mesh.device_type).bfloat16()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_equal(compiled(x) + 0, model(x))


def trained_layers(mesh: DeviceMesh) -> torch.nn.Sequential:
    """Whose three products are in FP8; weights in FP32."""
    layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
    return train.convert(torch.nn.Sequential(*layers).to(mesh.device_type), wanted=lambda name, layer: True)


def assert_trained_alike(
    mesh: DeviceMesh, model: torch.nn.Module, other: torch.nn.Module, run: Callable, dtype: torch.dtype = torch.float32
) -> None:
    """Two steps: `other`, of which each rank has its tokens, and one process, whose products add all of them up.

    FP8 makes the gradient of half of the tokens that of the rows alone, since scales along tokens are of 128 of them:
    each rank has 128. With x in BF16 a rank's gradients are in BF16 too, and FP8 rounds other weights in the next step.
    """
    bound = 2 * SUMMED if dtype == torch.bfloat16 else 2**-9
    for _ in range(2):
        x = torch.randn(2 * 128, 256, device=mesh.device_type, dtype=dtype)
        parts = []
        for each, call, tokens in ((model, model, x), (other, run, split(x, mesh, Shard(0)).to_local())):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
            each.zero_grad()
            call(tokens).float().square().mean().backward()
            parts.append([parameter.grad for parameter in each.parameters()])
            optimizer.step()
        for one, wanted in zip(*parts[::-1], strict=True):
            assert_near(one.full_tensor() if isinstance(one, DTensor) else one, wanted, bound)
    for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert_near(one.full_tensor() if isinstance(one, DTensor) else one.detach(), wanted.detach(), bound)


@case
def replicated_training(mesh):
    model = trained_layers(mesh)
    other = copy.deepcopy(model)
    assert_trained_alike(mesh, model, other, torch.nn.parallel.DistributedDataParallel(other))


@case
def fully_sharded_training(mesh):
    model = trained_layers(mesh)
    other = copy.deepcopy(model)
    for layer in (other[0], other[2], other):
        fully_shard(layer, mesh=mesh)
    assert_trained_alike(mesh, model, other, other)


@case
def split_training(mesh):
    """By torch's own styles: the first layer by rows of its weight, the second by columns, where blocks of 128 end."""
    model = trained_layers(mesh)
    other = copy.deepcopy(model)
    parallelize_module(other, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(128, 256, device=mesh.device_type)
    results = []
    for each in (model, other):
        given = x.clone().requires_grad_()
        each(given).square().mean().backward()
        results.append([given.grad, *(parameter.grad for parameter in each.parameters())])
    for one, wanted in zip(*results[::-1], strict=True):
        assert_near(one.full_tensor() if isinstance(one, DTensor) else one, wanted, 2**-9)


@case
def training_of_sequences(mesh):
    """With tokens split between the blocks of layers: the output's gradient is still being sent when it comes."""
    model = trained_layers(mesh)
    other = copy.deepcopy(model)
    styles = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(other, mesh, styles)
    x = torch.randn(2 * 128, 256, device=mesh.device_type)
    model(x).square().mean().backward()
    part = other(split(x, mesh, Shard(0)).to_local())
    (part.square().sum() / x.numel()).backward()
    for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert_near(collected(one.grad), wanted.grad, 2**-9)


@case
def training_of_parts_of_a_batch(mesh):
    """Whole weights and a split input, as between layers of sequence parallelism; and what is refused."""
    layer = trained_layers(mesh)[0]
    x, weight, bias = torch.randn(2 * 128, 256, device=mesh.device_type), layer.weight, layer.bias
    layer(x.requires_grad_()).square().mean().backward()
    wanted = [each.grad for each in (x, weight, bias)]
    given = [split(x, mesh, Shard(0)), split(weight, mesh, WHOLE), split(bias, mesh, WHOLE)]
    given = [each.requires_grad_() for each in given]
    sharded_linear(*given, layer.recipe).square().mean().backward()
    for each, gradient in zip(given, wanted, strict=True):
        assert_near(each.grad.full_tensor(), gradient, 2**-9)
    columns = split(weight, mesh, Shard(1))
    assert_refused(TypeError, "x is not a DTensor", sharded_linear, x, *given[1:], layer.recipe)
    line = init_device_mesh(mesh.device_type, (RANKS, 1), mesh_dim_names=("one", "other"))["other"]
    assert_refused(ValueError, "on one mesh", sharded_linear, given[0], split(weight, line, WHOLE), None, layer.recipe)
    assert_refused(ValueError, "ColwiseParallel splits a weight", sharded_linear, given[0], columns, None, layer.recipe)


class _Gated(torch.nn.Module):
    """As transformers writes it; converted, it calls `train.mlp`."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(256, 256, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(256, 256, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Experts(torch.nn.Module):
    """Each token goes to all four experts, in another order than its neighbours, so that each gets a rank's 128 tokens
    as one group of 128 rows."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Parameter(torch.randn(256, 4) / 16)
        self.w_gate_up = torch.nn.Parameter(torch.randn(4, 256, 256) / 16)
        self.w_down = torch.nn.Parameter(torch.randn(4, 256, 128) / 11)

    def routed(self, x) -> tuple[torch.Tensor, ...]:
        chosen = (torch.arange(len(x), device=x.device)[:, None] + torch.arange(4, device=x.device)) % 4
        return x.bfloat16(), chosen, (x @ self.router).softmax(-1)

    def forward(self, x):
        return train.experts(*self.routed(x), self.w_gate_up, self.w_down)


@case
def gated_training(mesh):
    """One function of three weights: replicated, and gathered in FP8."""
    model = train.convert(_Gated().to(mesh.device_type), wanted=lambda *_: True)
    other = copy.deepcopy(model)
    assert_trained_alike(mesh, copy.deepcopy(model), other, torch.nn.parallel.DistributedDataParallel(other))
    other = train.gather_fp8(copy.deepcopy(model))
    fully_shard(other, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert_trained_alike(mesh, model, other, other, torch.bfloat16)


@case
def training_of_experts(mesh):
    """Replicated; sharded by expert between steps; and each rank with its experts, of all tokens."""
    model = _Experts().to(mesh.device_type)
    other = copy.deepcopy(model)
    assert_trained_alike(mesh, copy.deepcopy(model), other, torch.nn.parallel.DistributedDataParallel(other))
    other = copy.deepcopy(model)
    fully_shard(other, mesh=mesh)
    assert_trained_alike(mesh, copy.deepcopy(model), other, other)

    rank, weights = mesh.get_rank(), (model.w_gate_up.detach(), model.w_down.detach())
    x, chosen, shares = (each.detach() for each in model.routed(torch.randn(200, 256, device=mesh.device_type)))
    dy = torch.randn_like(x)
    out, *of_inputs, up, down = _run_experts(x, shares, chosen, weights, dy)
    own = _run_experts(x, shares, chosen - 2 * rank, [each[2 * rank :][:2] for each in weights], dy)
    for part, whole in zip(own[:3], (out, *of_inputs), strict=True):
        dist.all_reduce(part)
        assert_near(part, whole)
    for part, whole in zip(own[3:], (up, down), strict=True):
        assert_near(part, whole[2 * rank :][:2], 1e-6)


def _run_experts(x, shares, chosen, weights, dy) -> list[torch.Tensor]:
    """The result, and gradients of x, shares and weights."""
    x, shares, *weights = (each.clone().requires_grad_() for each in (x, shares, *weights))
    out = train.experts(x, chosen, shares, *weights)
    out.backward(dy)
    return [out.detach(), *(each.grad for each in (x, shares, *weights))]
