"""The stress run without a GPU: the GEMMs that it repeats, the counts of those that differ, and its end."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from itertools import count
from random import Random
from types import SimpleNamespace

import campaign
import changes
import fuzz_groups
import fuzz_kinds
import jobs
import pytest
import stress
import torch
from campaign import CLEAN, FAILED, HANG, WRONG, OperandPool
from jobs import REPEATS, GemmJob, GroupJob, KindJob, Spec
from strategies import USUAL, Limits, draw_configs, family
from stress import CASES, Sizes, config_named, draw_groups, draw_kind, draw_spec, split_specs
from test_fuzz import Left, exits  # noqa: F401

from deep_tile import jit, plan
from deep_tile.config import ceil_div
from deep_tile.kinds import KINDS
from deep_tile.problem import GemmProblem
from deep_tile.select.defaults import default_configs
from deep_tile.select.schedule import cluster_slots, cluster_tiles, grid_size

pytestmark = pytest.mark.about(*changes.OF_FUZZERS)

NUM_SMS = 132
SMALL = Sizes(side=256, k=300, out=1 << 12)
SPEC = Spec(config_named("64x64x256_s6_k2_b1"), 20, 24, 200, 8)
CHAIN = SPEC._replace(pdl=True, chain=True)


# Draws.


def waves_of(spec: Spec) -> int:
    """Tiles of the cluster that has the most."""
    problem = GemmProblem(spec.m, spec.n, spec.k, spec.num_sms, spec.config.tma_store)
    return ceil_div(cluster_tiles(spec.config, problem), cluster_slots(spec.config, spec.num_sms))


def assert_legal(spec: Spec) -> None:
    config = spec.config
    assert min(spec.m, spec.n, spec.k) > 0 and config.takes_k(spec.k), spec
    assert config.cluster <= spec.num_sms <= NUM_SMS, spec
    assert not config.tma_store or spec.n % 8 == 0, spec
    assert spec.pdl or not spec.constant_weights, spec
    assert not spec.chain or (spec.n % 2 == 0 and ceil_div(spec.k, 128) <= spec.n // 2), spec


def test_drawn_products_are_legal_and_of_every_kind():
    random = Random(1)
    specs = [draw_spec(random, config, NUM_SMS, Sizes()) for config in draw_configs(random, 600)]
    for spec in specs:
        assert_legal(spec)
        assert max(spec.m, spec.n) <= Sizes().side and spec.k <= Sizes().k
    assert {(spec.pdl, spec.constant_weights) for spec in specs} == {(False, False), (True, False), (True, True)}
    assert any(spec.chain for spec in specs) and any(waves_of(spec) >= 8 for spec in specs)
    assert {1, NUM_SMS} <= {spec.num_sms for spec in specs} and max(spec.m for spec in specs) > 1000


def test_the_same_seed_draws_the_same_products():
    def draw(seed):
        random = Random(seed)
        configs = stress.stress_configs(random, 80, NUM_SMS)
        return [draw_spec(random, config, NUM_SMS, Sizes()) for config in configs]

    assert draw(3) == draw(3) != draw(4)


def test_families_come_first():
    configs = stress.stress_configs(Random(1), 400, NUM_SMS)
    families = [family(config) for config in configs]
    different = len(set(families))
    assert len(set(families[:different])) == different > 60
    assert set(default_configs(True)) | set(default_configs(False)) < set(configs)
    assert len(configs) == len(set(configs)) == 400


@pytest.fixture(scope="module")
def kernels():
    return fuzz_kinds.draw_kernels(Random(5), 32, NUM_SMS)


def test_drawn_products_of_kinds_are_legal(kernels):
    random = Random(2)
    drawn = [draw_kind(random, config, NUM_SMS, USUAL) for config in kernels * 5]
    assert {(draw.config.kind, draw.config.by_k) for draw in drawn} == {
        *((kind, False) for kind in KINDS),
        ("fp8_1x128", True),
    }
    for draw in drawn:
        use = draw.use
        assert draw.config.cluster <= use.num_sms <= NUM_SMS and use.config is draw.config
        assert use.pdl or not use.constant_weights
    assert {draw.use.pdl for draw in drawn} == {True, False} and {NUM_SMS} < {draw.use.num_sms for draw in drawn}


def test_drawn_groups_are_of_every_kernel():
    random = Random(3)
    drawn = [draw_groups(random, number, NUM_SMS) for number in range(1500)]
    met = {draw.config for draw in drawn}
    assert met <= {*fuzz_groups.CONFIGS} and len(met) > 0.9 * len(fuzz_groups.CONFIGS)
    assert {(draw.kind, draw.operands) for draw in drawn} == {*fuzz_groups.DRAWN_KINDS}
    assert all(draw.num_sms is None or 1 <= draw.num_sms < NUM_SMS for draw in drawn)
    assert {None, 1} < {draw.num_sms for draw in drawn}
    assert all(fuzz_groups.living_rows(draw) for draw in drawn)


def test_cases_are_those_in_which_split_k_was_wrong():
    shapes = {(spec.config.name, spec.m, spec.n, spec.k) for specs in CASES.values() for spec in specs}
    assert shapes == {
        ("fp8_gemm_64x64x256_s6_c1x1_k2_b1", 512, 2048, 1024),
        ("fp8_gemm_64x128x128_s8_c1x1_k2_b1", 512, 3328, 128),
        ("fp8_gemm_64x64x256_s6_c1x1_k4", 512, 2048, 768),
    }
    for spec in (spec for specs in CASES.values() for spec in specs):
        assert_legal(spec)
        assert waves_of(spec) >= 10


def test_every_default_split_has_several_tiles_for_each_cluster():
    configs = stress.split_configs(NUM_SMS, "")
    defaults = (*default_configs(True), *default_configs(False))
    assert set(configs) == {config for config in defaults if config.split_k > 1} and len(configs) == 18
    for config in configs:
        specs = split_specs(Random(1), config, NUM_SMS)
        for spec in specs:
            assert_legal(spec)
            assert spec.config is config and waves_of(spec) >= 5
            problem = GemmProblem(spec.m, spec.n, spec.k, spec.num_sms, config.tma_store)
            assert grid_size(config, problem) <= spec.num_sms
        assert sum(spec.num_sms for spec in specs) <= NUM_SMS
    assert {config.split_k for config in stress.split_configs(NUM_SMS, "_k4_")} == {4}


# A product made ready.


@pytest.fixture(scope="module")
def pool() -> OperandPool:
    return OperandPool(256, 300, "cpu", seed=1)


@pytest.fixture
def damage(monkeypatch):
    """Damage products by change(out, number), where number counts calls from now on."""
    right = jobs.fp8_gemm

    def install(change):
        lock, count = threading.Lock(), iter(range(10**9))

        def multiply(*arguments, **keywords):
            out = right(*arguments, **keywords)
            with lock:
                number = next(count)
            change(out, number)
            return out

        monkeypatch.setattr(jobs, "fp8_gemm", multiply)

    return install


@pytest.mark.parametrize(
    "spec", [SPEC, CHAIN, SPEC._replace(n=23, config=config_named("64x64x256_s6_k2_any"))], ids=str
)
def test_calls_that_differ_are_counted(spec, pool, damage):
    job = GemmJob(spec, pool, Random(1), "cpu")
    job.prepare(graph=False)
    job.repeat()
    assert (job.calls, job.differing()) == (REPEATS, 0)
    damage(
        lambda out, number: out.view(torch.int16)[-1, -1].add_(1) if number in (REPEATS - 1, 2 * REPEATS - 1) else None
    )
    for _ in range(3):
        job.repeat()
    assert (job.calls, job.differing()) == (4 * REPEATS, 2)


def test_a_chain_hands_results_on(pool):
    job = GemmJob(CHAIN, pool, Random(1), "cpu")
    job.prepare(graph=False)
    outs = torch.stack(list(job.outs))
    assert len({tuple(out.flatten().tolist()) for out in outs}) == REPEATS
    assert outs.isfinite().all() and (outs != 0).any(2).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, number: out[3, 3].fill_(1e20), "1 of 480 elements are off in call 0"),
        (lambda out, number: out.view(torch.int16)[3, 3].add_(number >= 8), "8 of 8 results differ"),
    ],
    ids=["values", "bits"],
)
def test_what_is_wrong_on_a_quiet_gpu_is_no_yardstick(change, message, pool, damage):
    damage(change)
    with pytest.raises(AssertionError, match=message):
        GemmJob(SPEC, pool, Random(1), "cpu").prepare(graph=False)


@pytest.fixture(scope="module")
def values() -> fuzz_kinds.Values:
    return fuzz_kinds.Values("cpu", 1)


@pytest.fixture(scope="module")
def codes() -> fuzz_groups.Pool:
    return fuzz_groups.Pool("cpu", 1)


def other_jobs(kernels, values, codes) -> Iterator[jobs.Job]:
    """A job of each kind, one that adds to `out`, one of grouped gradients, and row groups of each layout."""
    random, limits = Random(4), Limits(m=60, n=80, k=300, out=1 << 12)
    configs = {(c.kind, c.by_k): c for c in kernels} | {"added": next(c for c in kernels if c.accumulate)}
    for config in configs.values():
        yield KindJob(draw_kind(random, config, NUM_SMS, limits), values, "cpu")
    drawn = (draw_groups(random, number, NUM_SMS) for number in count())
    small = (d for d in drawn if d.groups <= 16 and d.total * d.n * d.k < 1 << 22)
    for layout in ("offs", "counts"):
        yield GroupJob(next(d for d in small if d.layout == layout), codes, "cpu")


@pytest.fixture
def spoil(monkeypatch):
    """Let change(out) follow each call of other products."""
    right = {module: module.multiply for module in (fuzz_kinds, fuzz_groups)}

    def install(change):
        for module in right:

            def multiply(inputs, drawn, out, module=module):
                right[module](inputs, drawn, out)
                change(out)

            monkeypatch.setattr(module, "multiply", multiply)

    return install


def flip(x: torch.Tensor) -> None:
    """Another number in place of its first one, by one bit."""
    first = x[(slice(0, 1),) * x.dim()]
    words = first.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    words ^= 1


def test_other_products_that_differ_are_counted(kernels, values, codes, spoil):
    seen = []
    for job in other_jobs(kernels, values, codes):
        job.prepare(graph=False)
        job.repeat()
        assert (job.calls, job.differing()) == (REPEATS, 0), str(job)
        part = job.written(job.outs[3])[0]
        spoil(lambda out, job=job: flip(job.written(out)[0]) if out.data_ptr() == job.outs[3].data_ptr() else None)
        job.repeat()
        assert (job.calls, job.differing()) == (2 * REPEATS, 1) and part.isfinite().all(), str(job)
        spoil(lambda out: None)
        seen.append(stress.family_of(job.config).split(":")[0])
    assert len(seen) == len(KINDS) + 4 and {"k_offs", "offs", "counts", *KINDS} - {"fp8"} <= set(seen)


def test_other_products_that_are_wrong_when_quiet_are_no_yardstick(kernels, values, codes, spoil):
    for job in other_jobs(kernels, values, codes):
        spoil(lambda out, job=job: job.written(out)[0].fill_(float("inf") if out.is_floating_point() else 2**31 - 1))
        with pytest.raises(AssertionError, match="are off"):
            job.prepare(graph=False)


def test_writes_beside_other_products_are_found(kernels, values, codes, spoil):
    for job in other_jobs(kernels, values, codes):
        spoil(lambda out: out.as_strided((1,), (1,), out.storage_offset() - 1).zero_())
        with pytest.raises(AssertionError, match="1 elements are written that are not the product's"):
            job.prepare(graph=False)


# Runs.


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run on the CPU; its status and report."""
    monkeypatch.setattr(stress, "Sizes", lambda: SMALL)
    monkeypatch.setattr(stress, "CASES", {"a case": [SPEC, CHAIN]})
    monkeypatch.setattr(stress, "_SCENARIO_SECONDS", 0.2)
    monkeypatch.setattr(fuzz_kinds, "MOST_ELEMENTS", 1 << 18)
    for name, most in (("GROUPS", (1, 3, 8)), ("MOST_ROWS", 100), ("MOST_WEIGHTS", 1 << 18)):
        monkeypatch.setattr(fuzz_groups, name, most)

    def start(*arguments: str) -> tuple[int, dict]:
        path = tmp_path / "report.json"
        defaults = ["--device", "cpu", "--seed", "9", "--configs", "70", "--seconds", "1", "--out", str(path)]
        status = stress.main([*defaults, "--products", "fp8", *arguments])
        return status, json.loads(path.read_text())

    return start


def test_a_clean_run_counts_what_it_did(run):
    status, report = run()
    assert (status, report["ok"], report["wrong"], report["hangs"], report["found"]) == (CLEAN, True, 0, 0, {})
    assert set(report["scenarios"]) == {"a case", "of chance"}
    calls = [scenario["calls"] for scenario in report["scenarios"].values()]
    assert all(calls) and report["products"] == sum(calls) == sum(report["families"].values())
    assert report["configs"] >= 3


def test_groups_and_kinds_alone(run):
    status, report = run("--products", "groups", "kinds", "--seconds", "3")
    assert (status, report["ok"], set(report["scenarios"])) == (CLEAN, True, {"of chance"})
    assert report["products"] == sum(report["families"].values()) > 0
    assert any(":" in name for name in report["families"])


def test_products_that_differ_beside_noise_are_found(run, damage):
    damage(lambda out, number: out.view(torch.int16)[0, 0].add_(1) if number > 100 and number % 8 == 0 else None)
    status, report = run()
    assert (status, report["ok"]) == (WRONG, False)
    assert 0 < report["wrong"] < report["products"]
    wrong = [finding for finding in report["findings"] if finding["kind"] == "wrong"]
    assert sum(finding["wrong"] for finding in wrong) <= report["wrong"]
    assert any("elementwise" in finding["beside"] for finding in wrong)


@pytest.fixture
def short_splits(monkeypatch):
    def specs(random, config, num_sms):
        return [spec._replace(config=config) for spec in (SPEC, CHAIN)]

    monkeypatch.setattr(stress, "split_specs", specs)


def test_splits_are_called_as_often_as_asked(run, short_splits):
    status, report = run("--split-only", "--calls", "40", "--only", "64x64x256.*_k2", "--seconds", "20")
    assert status == CLEAN
    assert set(report["scenarios"]) == {"fp8_gemm_64x64x256_s6_c1x1_k2_b1", "fp8_gemm_64x64x256_s6_c1x1_k2_b1_any"}
    assert all(scenario["calls"] >= 40 for scenario in report["scenarios"].values())


def test_too_few_calls_are_a_finding(run, short_splits):
    status, report = run("--split-only", "--calls", "1000000", "--only", "64x64x256.*_k2", "--seconds", "0")
    assert (status, report["ok"], report["found"]) == (WRONG, False, {"too few calls": 2})


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (campaign.Hang("fp8_gemm_x 1x1x1"), HANG, "hang"),
        (RuntimeError("CUDA error: unspecified launch failure"), FAILED, "failure"),
    ],
    ids=["hang", "failure"],
)
def test_what_a_thread_meets_ends_the_run(error, status, kind, run, exits, monkeypatch, tmp_path):  # noqa: F811
    def meet(self):
        raise error

    monkeypatch.setattr(jobs.Job, "repeat", meet)
    with pytest.raises(Left, match=f"^{status}$"):
        run()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["found"] == {kind: 1} and str(error) in report["findings"][0].values()


def test_the_kernel_that_spins_compiles():
    log = jit.compile_kernel(stress._SPIN, "stress_spin").log
    assert jit.resource_usage(log).spill_store_bytes == 0


# On a GPU that is only pretended: which calls of torch.cuda are made, and in which order.


class PretendedGraph:
    """A graph that replays nothing and notes its calls."""

    def __init__(self, log: list[str]):
        self._log = log

    def capture_begin(self, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self._log.append("begin")

    def capture_end(self):
        self._log.append("end")

    def replay(self):
        self._log.append("replay")


def pretended_stream(priority=0):
    return SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)


class PretendedSpin(stress.Memory):
    name = "spin"


@pytest.fixture
def pretended_gpu(monkeypatch) -> list[str]:
    """Tensors are on the CPU."""
    log: list[str] = []
    for module in (stress, jobs, campaign):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    monkeypatch.setattr(campaign, "_machine", dict)
    monkeypatch.setattr(campaign, "missing_hopper", lambda: None)
    monkeypatch.setattr(stress, "sms_of", lambda device: NUM_SMS)
    monkeypatch.setattr(stress, "NOISES", (stress.Elementwise, PretendedSpin))
    monkeypatch.setattr(stress, "ELEMENTWISE_LOG2", 10)
    monkeypatch.setattr(stress, "MEMORY_BYTES", 1 << 10)
    monkeypatch.setattr(plan, "load_kernel", lambda config, device: None)
    cuda = {
        "Stream": pretended_stream,
        "Event": lambda: SimpleNamespace(record=lambda: None, query=lambda: True),
        "CUDAGraph": lambda: PretendedGraph(log),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": pretended_stream,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
    }
    for name, pretended in cuda.items():
        monkeypatch.setattr(torch.cuda, name, pretended)
    return log


def test_graphs_are_captured_and_replayed(run, pretended_gpu):
    status, report = run("--seconds", "2")
    assert status == CLEAN and report["products"] > 0
    assert re.fullmatch(r"(?:begin end |replay )*", " ".join(pretended_gpu) + " ")
    assert pretended_gpu.count("begin") >= 4 and pretended_gpu.count("replay") > 0
