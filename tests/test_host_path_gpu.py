"""The way of a warm call on a Hopper GPU, plans, batch invariance, and programmatic dependent launch.

What the host path does apart from torch's CUDA streams, test_host_path.py covers without a GPU.
"""

import threading

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

from deep_tile import GemmConfig, Plan, api, fp8_gemm, plan, prepare
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
    """What each call did, in a process that has met no signature yet: "prepare_launch", then how it launched."""
    done = []

    def note(module, name):
        function = getattr(module, name)

        def noting(*args, **kwargs):
            result = function(*args, **kwargs)
            if result is not False:
                done.append(name)
            return result

        monkeypatch.setattr(module, name, noting)

    monkeypatch.setattr(api, "_launches", {})
    for name in ("launch", "launch_known"):
        note(api._launcher, name)
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
    for b, b_scale in ((operands.b, operands.b_scale), weights, (operands.b.clone(), operands.b_scale)):
        out = dense_out()
        fp8_gemm(operands.a, operands.a_scale, b, b_scale, out)
        assert_accurate(out, exact)
    assert paths == ["prepare_launch", "launch", "launch_known", "launch_known"]


def test_subclasses_and_old_torch_go_through_python(paths):
    class Subclass(torch.Tensor):
        pass

    operands = operands_on_gpu()
    subclassed = operands._replace(b=operands.b.as_subclass(Subclass))
    for _ in range(2):
        check_gemm(subclassed, exact_product(operands))
    assert paths == ["prepare_launch", "launch", "launch"]


CHANGES = {
    "dtype": (TypeError, "b must be torch.float8_e4m3fn", lambda good: {"b": good.b.view(torch.float8_e5m2)}),
    "device": (ValueError, "b_scale is on cpu", lambda good: {"b_scale": good.b_scale.cpu()}),
    "shape": (ValueError, "a_scale must have shape", lambda good: {"a_scale": good.a_scale[:-1]}),
    "stride": (ValueError, "b must have a unit stride", lambda good: {"b": good.b.t().contiguous().t()}),
    "alignment of a": (ValueError, "a must begin at a multiple", lambda good: {"a": _shifted(good.a)}),
    "alignment of b": (ValueError, "b must begin at a multiple", lambda good: {"b": _shifted(good.b)}),
}


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """The same layout, one byte past a multiple of 16."""
    buffer = torch.zeros(x.shape[0] * x.stride(0) + 64, dtype=torch.uint8, device=DEVICE).view(x.dtype)
    return buffer.as_strided(x.shape, x.stride(), 1)


@pytest.mark.parametrize(("error", "message", "change"), CHANGES.values(), ids=CHANGES)
def test_changes_after_a_known_call_are_noticed(paths, error, message, change):
    good, guarded = operands_on_gpu(), GuardedOut(M, N, device=DEVICE)
    out = dense_out()
    for _ in range(2):
        fp8_gemm(*good, out)
    launches = len(paths)
    with pytest.raises(error, match=message):
        fp8_gemm(**{**good._asdict(), "out": guarded.out, **change(good)})
    torch.cuda.synchronize()
    guarded.assert_untouched()
    assert "launch" not in paths[launches:] and "launch_known" not in paths[launches:]


def test_alignment_of_out_is_noticed(paths):
    """Stored by TMA, then element by element, then by TMA again."""
    operands = operands_on_gpu()
    exact = exact_product(operands)
    for offset in (0, 3, 0, 3):
        check_gemm(operands, exact, out_stride=N, out_offset=offset)
    assert paths.count("prepare_launch") == 2


def test_one_signature_serves_many_addresses(paths):
    largest = operands_on_gpu()
    for _ in range(5):
        operands = rearranged(largest)
        assert_accurate(fp8_gemm(*operands), exact_product(operands))
    assert paths.count("prepare_launch") == 1


# Plans.


def test_plan(paths):
    examples, other = operands_on_gpu(), operands_on_gpu()
    weights = torch.nn.Parameter(examples.b, requires_grad=False)
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


def test_plan_with_options():
    operands = operands_on_gpu()
    config = GemmConfig(64, 64, 4, tma_store=False)
    out = torch.full((M, N + 1), float("nan"), dtype=torch.bfloat16, device=DEVICE)[:, :N]
    multiply = prepare(*operands, out, config=config, num_sms=3, pdl=True, constant_weights=True)
    assert multiply.config == config
    assert_accurate(multiply(operands.a, operands.a_scale, out), exact_product(operands))


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


def test_plan_refuses_the_unlike(paths):
    operands, guarded = operands_on_gpu(), GuardedOut(M, N, device=DEVICE)
    multiply = prepare(*operands, guarded.out)
    for a, a_scale, message in [
        (operands.a[:-1], operands.a_scale, "a is .* this plan is for"),
        (operands.a, operands.a_scale.cpu(), "a_scale is .* on cpu; this plan is for .* on cuda:0"),
        (_shifted(operands.a), operands.a_scale, "a is .*not aligned"),
    ]:
        with pytest.raises(ValueError, match=message):
            multiply(a, a_scale, guarded.out)
    torch.cuda.synchronize()
    guarded.assert_untouched()
    assert paths == ["prepare_launch"]


def test_plan_takes_scales_that_begin_anywhere(paths):
    """In a large product whose scales TMA copies where they are aligned."""
    operands = operands_on_gpu(1100, 1024, 2048, a_scale="column_aligned")
    exact = exact_product(operands)
    groups, rows = operands.a_scale.t().shape
    moved = torch.empty(groups * rows + 1, device=DEVICE)[1:].view(groups, rows).t().copy_(operands.a_scale)
    out = dense_out(1100, 1024)
    multiply = prepare(*operands, out)
    assert moved.stride() == operands.a_scale.stride() and moved.data_ptr() % 16 == 4
    for scale in (operands.a_scale, moved, operands.a_scale, moved):
        out.fill_(float("nan"))
        assert_accurate(multiply(operands.a, scale, out), exact)
        out.fill_(float("nan"))
        assert_accurate(fp8_gemm(operands.a, scale, operands.b, operands.b_scale, out), exact)


def test_first_call_of_a_thread_that_has_used_no_gpu():
    """It encodes tensor maps, for a signature not met before."""
    operands = operands_on_gpu(77, 200, 528)
    results = []
    thread = threading.Thread(target=lambda: results.append(fp8_gemm(*operands)))
    thread.start()
    thread.join()
    assert_accurate(results[0], exact_product(operands))


def test_plan_in_a_graph():
    operands, out = operands_on_gpu(), dense_out()
    multiply = prepare(*operands, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(operands.a, operands.a_scale, out)
    out.fill_(float("nan"))
    graph.replay()
    assert_accurate(out, exact_product(operands))


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
    """Which is why the option need only exclude split K. K ends inside a block, and is no multiple of any stage."""
    operands = operands_on_gpu(300, 1000, k)
    defaults = (*default_configs(True), *default_configs(False))
    configs = [config for config in defaults if config.split_k == 1 and config.takes_k(k)]
    plan.load_kernels(configs, torch.cuda.current_device(), workers=8)
    first = check_gemm(operands, config=configs[0], out_stride=1000)
    different = [c.name for c in configs if not same_bits(fp8_gemm(*operands, config=c), first)]
    assert not different


def test_split_k_is_no_config_for_batch_invariance():
    operands, guarded = operands_on_gpu(), GuardedOut(M, N, device=DEVICE)
    with pytest.raises(ValueError, match="splits K.*batch_invariant=True needs split_k=1"):
        fp8_gemm(*operands, guarded.out, config=GemmConfig(128, 64, 4, split_k=2), batch_invariant=True)
    torch.cuda.synchronize()
    guarded.assert_untouched()


# Programmatic dependent launch.

CHAIN_SHAPES = [(1, 1024, 2048), (16, 2112, 1024), (64, 512, 4096), (200, 1024, 1024), (700, 2112, 512)]
STEPS = 12


class Chain:
    """Products of which each needs the one before: its result, read as FP32, is the next one's a_scale.

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
    """Of three launches, the last one requests weights that the first one writes, before it waits for the second."""

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
    """Its predecessor in the stream has long ended, an event of another stream has not."""
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
