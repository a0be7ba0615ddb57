"""The way of a warm call on a Hopper GPU, plans, batch invariance, and programmatic dependent launch.

What the host path does apart from torch's CUDA streams, test_host_path.py covers without a GPU.
"""

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import (
    GuardedOut,
    Operands,
    assert_accurate,
    check_gemm,
    exact_product,
    make_operands,
    rearranged,
    same_bits,
)

from deep_tile import (
    GemmConfig,
    Plan,
    fp8_gemm,
    launches,
    operation,
    plan,
    prepare,
)
from deep_tile.dense import FP8_GEMM
from deep_tile.select.defaults import default_configs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
M, N, K = 130, 200, 528


def operands_on_gpu(m: int = M, n: int = N, k: int = K, **layout) -> Operands:
    return make_operands(m, n, k, device=DEVICE, **layout)


def dense_out(m: int = M, n: int = N) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


@pytest.fixture
def paths(monkeypatch) -> list[str]:
    """The steps of each call, starting without known signatures: "prepare_launch", then the way of the launch."""
    done = []

    def note(module, name):
        function = getattr(module, name)

        def noting(*args, **kwargs):
            result = function(*args, **kwargs)
            if result is not False:
                done.append(name)
            return result

        monkeypatch.setattr(module, name, noting)

    monkeypatch.setattr(FP8_GEMM, "launches", {})
    for name in ("launch", "launch_known"):
        note(operation._launcher, name)
    note(plan, "prepare_launch")
    return done


def need_exchange_api() -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no DLPack C exchange API: every call goes through Python")


# The warm call.


def test_tensors_and_parameters_take_the_fast_path(paths):
    need_exchange_api()
    operands = operands_on_gpu()
    exact = exact_product(operands)
    weights = [torch.nn.Parameter(x, requires_grad=False) for x in (operands.b, operands.b_scale)]
    paths.clear()  # of the casts
    for b, b_scale in ((operands.b, operands.b_scale), weights, (operands.b.clone(), operands.b_scale)):
        out = dense_out()
        fp8_gemm(operands.a, operands.a_scale, b, b_scale, out)
        assert_accurate(out, exact)
    assert paths == ["prepare_launch", "launch", "launch_known", "launch_known"]


def test_first_call_of_a_fresh_thread(paths):
    """A signature that is new, of a kernel that is loaded, in a thread that has used no GPU and so has no context."""
    largest, out = operands_on_gpu(), dense_out()
    check_gemm(largest)
    operands, rows = rearranged(largest, m=M - 1), out[: M - 1]
    exact = exact_product(operands)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(max_workers=1) as fresh:
        fresh.submit(fp8_gemm, *operands, rows).result()
    assert paths.count("prepare_launch") == 2
    assert_accurate(rows, exact)


# Memory.


def used_bytes() -> dict[str, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"host": resident, "device": total - free, "tensors": torch.cuda.memory_allocated()}


def growth(before: dict[str, int]) -> dict[str, int]:
    return {name: used - before[name] for name, used in used_bytes().items()}


def assert_device_grew(grown: dict[str, int], at_most: int) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("all else held; the GPU's memory is that of every process, so it is checked without -n alone")
    assert grown["device"] <= at_most, grown


def test_warm_calls_take_no_memory():
    operands, out = operands_on_gpu(), dense_out()
    multiply = prepare(*operands, out)

    def run(calls: int) -> None:
        for _ in range(calls):
            fp8_gemm(*operands, out)
            multiply(operands.a, operands.a_scale, out)
            fp8_gemm(*operands)

    run(1_000)
    before = used_bytes()
    run(34_000)
    grown = growth(before)
    assert grown["host"] < 1 << 20 and grown["tensors"] == 0, grown
    assert_device_grew(grown, at_most=0)


def test_many_signatures_take_bounded_memory(monkeypatch):
    """100,200 of them, with 300 different options: as many as are remembered, and then half as many again."""
    monkeypatch.setattr(FP8_GEMM, "launches", {})
    config = GemmConfig(64, 64, 4, tma_store=False)
    operands, out = operands_on_gpu(334, 8, 16), dense_out(334, 8)
    fp8_gemm(*operands, out, config=config)
    gc.collect()
    before = used_bytes()
    for num_sms in range(1, min(100, torch.cuda.get_device_properties(DEVICE).multi_processor_count) + 1):
        for pdl in (None, False, True):
            for m in range(1, 335):
                work = operands._replace(a=operands.a[:m], a_scale=operands.a_scale[:m])
                fp8_gemm(*work, out[:m], config=config, num_sms=num_sms, pdl=pdl)
    grown = growth(before)
    assert grown["host"] < 200 << 20 and grown["tensors"] <= 0, grown
    assert sum(len(launches) for _, launches in FP8_GEMM.launches.values()) <= launches.MAX_SIGNATURES
    assert_accurate(fp8_gemm(*operands, out), exact_product(operands))
    assert_device_grew(grown, at_most=16 << 20)


# Forked processes and dead contexts.

CALLS_IN_VAIN = """
import os, sys, torch
from helpers import make_operands
from deep_tile import fp8_gemm, is_available, per_token_cast_to_fp8, prepare
torch.set_num_threads(1)  # threads of a pool do not survive a fork
operands = make_operands(16, 64, 128, device="cuda")
out = fp8_gemm(*operands)
multiply = prepare(*operands, out)
x = torch.ones(4, 128, device="cuda")
torch.cuda.synchronize()
shorter, shorter_out = operands._replace(a=operands.a[:8], a_scale=operands.a_scale[:8]), out[:8]
calls = {
    "known": lambda: fp8_gemm(*operands, out), "new": lambda: fp8_gemm(*shorter, shorter_out),
    "allocating": lambda: fp8_gemm(*operands), "prepare": lambda: prepare(*operands),
    "plan": lambda: multiply(operands.a, operands.a_scale, out),
    "allocating plan": lambda: multiply(operands.a, operands.a_scale), "cast": lambda: per_token_cast_to_fp8(x),
}
def report():
    for name, call in calls.items():
        try:
            call()
            print(name, "passed")
        except RuntimeError as error:
            print("=", name, "failed:", str(error).splitlines()[0])
    print("= is_available", *is_available(), flush=True)
"""


def report_of(program: str) -> list[str]:
    """Lines that `report()` printed in its own process."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests), *sys.path])}
    command = [sys.executable, "-c", CALLS_IN_VAIN + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line.removeprefix("= ") for line in done.stdout.splitlines() if line.startswith("= ")]
    assert len(lines) == 8, done.stdout + done.stderr
    return lines


def test_forked_processes_are_told():
    lines = report_of("""
if os.fork() == 0:
    report()
    os._exit(0)
os.wait()
""")
    assert [line for line in lines if "start workers with 'spawn'" not in line] == []
    assert lines[-1].startswith("is_available False")


def test_dead_contexts_are_told():
    """An index out of range trips torch's assertion; the next call, whichever it is, meets the error."""
    lines = report_of("""
x[torch.tensor([10**6], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    report()
os._exit(0)
""")
    for line in lines:
        if line.split(" failed")[0] in ("known", "plan"):
            assert "an earlier kernel of this process failed: CUDA_ERROR_ASSERT (710)" in line, line
    assert lines[-1].startswith("is_available False RuntimeError: an earlier kernel of this process failed"), lines


# Plans.


def test_plan(paths):
    examples, other = operands_on_gpu(), operands_on_gpu()
    weights = torch.nn.Parameter(examples.b, requires_grad=False)
    paths.clear()  # of the casts
    multiply = prepare(examples.a, examples.a_scale, weights, examples.b_scale)
    assert isinstance(multiply, Plan)
    assert paths == ["prepare_launch"]
    for a, a_scale in ((examples.a, examples.a_scale), (other.a, other.a_scale)):
        operands = Operands(a, a_scale, examples.b, examples.b_scale)
        guarded = GuardedOut(M, N, device=DEVICE)
        assert multiply(a, a_scale, guarded.out) is guarded.out
        guarded.assert_guards_intact()
        assert same_bits(guarded.out, fp8_gemm(*operands))
        assert same_bits(guarded.out, multiply(a, a_scale))
        assert_accurate(guarded.out, exact_product(operands))


def test_plan_runs_on_the_current_stream():
    """The activations are still NaN when the plan is called; only on their own stream will they be ready in time."""
    ready, out = operands_on_gpu(), dense_out()
    exact = exact_product(ready)
    late = rearranged(ready)
    multiply = prepare(*late, out)
    multiply(late.a, late.a_scale, out)
    late.a.view(torch.uint8).fill_(0x7F)
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.a.copy_(ready.a)
        multiply(late.a, late.a_scale, out)
    stream.synchronize()
    assert_accurate(out, exact)


# Batch invariance.


@pytest.mark.parametrize(("n", "k"), [(576, 7168), (2112, 1544), (264, 300)])
def test_rows_do_not_depend_on_m(n, k):
    largest = operands_on_gpu(1100, n, k, a_padding=16)
    whole = check_gemm(largest, batch_invariant=True)
    for m in (*range(1, 70), *range(100, 1100, 77)):
        out = fp8_gemm(*rearranged(largest, m=m), batch_invariant=True)
        assert same_bits(out, whole[:m]), m
    middle = largest._replace(a=largest.a[333:400], a_scale=largest.a_scale[333:400])
    assert same_bits(fp8_gemm(*middle, batch_invariant=True, num_sms=5), whole[333:400])


@pytest.mark.parametrize("k", [1672, 300])
def test_every_config_without_split_k_gives_the_same_bits(k):
    """So the option need only exclude split K. K ends inside a block, and is no multiple of any stage."""
    operands = operands_on_gpu(300, 1000, k)
    defaults = (*default_configs(True), *default_configs(False))
    configs = [config for config in defaults if config.split_k == 1 and config.takes_k(k)]
    plan.load_kernels(configs, torch.cuda.current_device(), workers=8)
    first = check_gemm(operands, config=configs[0], out_stride=1000)
    different = [c.name for c in configs if not same_bits(fp8_gemm(*operands, config=c), first)]
    assert not different


# Programmatic dependent launch.

CHAIN_SHAPES = [(1, 1024, 2048), (16, 2112, 1024), (64, 512, 4096), (200, 1024, 1024), (700, 2112, 512)]
STEPS = 12


class Chain:
    """GEMMs in a chain: the result of each, read as FP32, is the a_scale of the next.

    (The upper half of an FP32 number is a BF16 number, so a pair of results reads as a number like its second.) Two
    results take turns, so that each launch also overwrites what the launch before it reads.
    """

    def __init__(self, m: int, n: int, k: int):
        self.start = operands_on_gpu(m, n, k)
        # Sizes neither grow nor shrink along the chain.
        growth = fp8_gemm(*self.start._replace(a_scale=torch.ones_like(self.start.a_scale))).float().std()
        self.start.b_scale.div_(growth)
        self.outs = [dense_out(m, n) for _ in range(2)]
        self.scales = [out.view(torch.float32)[:, : self.start.a_scale.shape[1]] for out in self.outs]

    def run(self, **options) -> list[torch.Tensor]:
        a, scale, b, b_scale = self.start
        for step in range(STEPS):
            fp8_gemm(a, scale, b, b_scale, self.outs[step % 2], **options)
            scale = self.scales[step % 2]
        return self.outs

    def forget(self) -> None:
        for out in self.outs:
            out.fill_(float("nan"))


@pytest.mark.parametrize("constant_weights", [False, True])
@pytest.mark.parametrize("shape", CHAIN_SHAPES, ids=str)
def test_chain_of_programmatic_launches(shape, constant_weights):
    chain = Chain(*shape)
    expected = [out.clone() for out in chain.run(pdl=False)]
    assert all(out.isfinite().all() and out.count_nonzero() > 0 for out in expected)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        chain.forget()
        for out, wanted in zip(chain.run(constant_weights=constant_weights), expected, strict=True):
            differing += (out.view(torch.int16) != wanted.view(torch.int16)).sum()
    assert differing.item() == 0


@pytest.mark.parametrize("config", [c for c in default_configs(True) if c.cluster > 1], ids=lambda c: c.name)
def test_clusters_in_a_chain(config):
    """Kernels that share shared memory across blocks; one launch may begin while the other's clusters still end."""
    chain = Chain(150, 1024, 2048)
    expected = [out.clone() for out in chain.run(config=config, pdl=False)]
    for _ in range(10):
        chain.forget()
        outs = chain.run(config=config, constant_weights=True)
        assert all(same_bits(out, wanted) for out, wanted in zip(outs, expected, strict=True))


@pytest.mark.parametrize("shape", CHAIN_SHAPES[:3], ids=str)
def test_capture_of_programmatic_launches(shape):
    chain = Chain(*shape)
    expected = [out.clone() for out in chain.run(pdl=False)]
    chain.run(constant_weights=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(constant_weights=True)
    for _ in range(20):
        chain.forget()
        graph.replay()
        assert all(same_bits(out, wanted) for out, wanted in zip(chain.outs, expected, strict=True))


def test_other_kernels_between_programmatic_launches():
    """Predecessors and successors that know nothing of it: a fill before, a copy after."""
    operands, out = operands_on_gpu(64, 1024, 2048), dense_out(64, 1024)
    expected = fp8_gemm(*operands, pdl=False)
    work = operands._replace(a=operands.a.clone())
    for _ in range(100):
        work.a.view(torch.uint8).fill_(0x7F)
        work.a.copy_(operands.a)
        fp8_gemm(*work, out, constant_weights=True)
        copied = out.clone()
        out.fill_(float("nan"))
        assert same_bits(copied, expected)


def test_successor_starts_after_the_predecessor():
    """The last of three launches requests weights that the first writes, before it waits for the second."""

    def ones(rows, columns, dtype):
        return torch.ones(rows, columns, device=DEVICE).to(dtype)

    def product(m, n, k, a_scale):
        operands = ones(m, k, torch.float8_e4m3fn), ones(m, k // 128, torch.float32) * a_scale
        return Operands(*operands, ones(n, k, torch.float8_e4m3fn), ones((n + 127) // 128, k // 128, torch.float32))

    long, short, last = product(256, 128, 65536, 2**-16), product(64, 64, 128, 1.0), product(16, 256, 256, 1.0)
    written, out = dense_out(256, 128), dense_out(16, 256)
    last = last._replace(b=written.view(torch.float8_e4m3fn))  # a one in BF16 is -0 and 1.875 in FP8
    for warm in (True, False):
        written.zero_()
        torch.cuda._sleep(1_000_000)  # until all three have been enqueued
        fp8_gemm(*long, written, num_sms=2, pdl=True)
        fp8_gemm(*short, num_sms=1, pdl=True)
        fp8_gemm(*last, out, num_sms=2, pdl=True, constant_weights=not warm)
    assert (written == 1).all() and (out == 128 * 1.875).all()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_programmatic_launch_waits_for_other_streams(captured):
    """The predecessor in the stream has long ended, but an event of another stream has not."""
    operands, out = operands_on_gpu(64, 1024, 2048), dense_out(64, 1024)
    expected = fp8_gemm(*operands, pdl=False)
    work = operands._replace(a=operands.a.clone())
    other = torch.cuda.Stream()

    def run():
        fp8_gemm(*operands, out)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000)
            work.a.copy_(operands.a)
        fp8_gemm(*operands, out)
        torch.cuda.current_stream().wait_stream(other)
        fp8_gemm(*work, out)

    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            run()
    for _ in range(10):
        work.a.view(torch.uint8).fill_(0x7F)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay() if captured else run()
        torch.cuda.synchronize()
        assert same_bits(out, expected)
