"""The debug build: kernels whose waits end, and the report of who waited for what."""

import ctypes
import re
from pathlib import Path

import pytest
from default_kernels import disassemblies
from helpers import run_python

from deep_tile import jit, plan, settings, watch
from deep_tile.codegen import Watch, kernel_source
from deep_tile.config import GemmConfig

pytestmark = pytest.mark.about("include/deep_tile/*", "deep_tile/watch.py", "deep_tile/co*.py", "deep_tile/params.py")

FAMILIES = (
    GemmConfig(64, 32, 4, scale_blocks=2),
    GemmConfig(64, 64, 4, split_k=4),
    GemmConfig(128, 64, 4, cluster_m=2),
    GemmConfig(128, 128, 4, cluster_m=2, cluster_n=2),
    GemmConfig(64, 64, 4, cluster_n=2, split_k=2),
    GemmConfig(128, 128, 4),
    GemmConfig(128, 144, 4, pairs=True, store_buffers=5),
    GemmConfig(128, 192, 3),
    GemmConfig(128, 192, 3, b_stages=4),
    GemmConfig(128, 256, 4, cluster_n=2),
    GemmConfig(128, 256, 3, tma_store=False),
    GemmConfig(64, 128, 4, b_stages=3, kind="mxfp4"),
    GemmConfig(32, 128, 4, scale_blocks=2, kind="mxfp4"),
    GemmConfig(32, 64, 2, scale_blocks=2, kind="int4"),
    GemmConfig(128, 128, 4, b_stages=3, kind="mxfp4"),
    GemmConfig(128, 128, 3, b_stages=3, kind="int4_32", store_buffers=1),
    GemmConfig(256, 64, 4, b_stages=3, kind="int4_32"),
    GemmConfig(64, 128, 4, scale_blocks=2, kind="int4_32"),
)
"""One kernel for each way in which roles wait for each other."""

ADDRESS = 0x7F00_0000_0000
BASE = 0x400  # of the barriers in shared memory


def written(*records: tuple[int, int, watch.Record]):
    """Records as the device writes them, with those of (block, warp, record)."""
    all_records = (watch.Record * watch.RECORDS)()
    for block, warp, record in records:
        all_records[block * watch.WARPS_PER_BLOCK + warp] = record
    return all_records


def test_report_names_kernel_block_role_tile_and_barrier():
    config = GemmConfig(128, 128, 4)
    text = watch.describe(
        written(
            (7, 5, watch.Record(1, BASE, 256, 384, 1, BASE + 2 * 8, 1)),
            (7, 8, watch.Record(1, BASE, 256, 512, 1, BASE + (4 + 3) * 8, 0)),
            (7, 9, watch.Record(1, BASE, 0, 0, 0, 0, 0)),
            (8, 0, watch.Record(1, BASE, 0, 128, 0, 0, 0)),
        ),
        [config],
    )
    assert text.splitlines() == [
        f"{config.name} block 7 math warpgroup 1, warp 1, tile at (256, 384): waits for full[2], parity 1",
        f"{config.name} block 7 operands' warp, tile at (256, 512): waits for empty[3], parity 0",
        f"{config.name} block 7 scale warp 0, tile at (0, 0): does not wait for an mbarrier",
    ]


def test_report_without_a_hang():
    assert "no wait" in watch.describe(written((0, 0, watch.Record(1, BASE, 0, 0, 0, 0, 0))), [FAMILIES[0]])
    assert "DEEP_TILE_BOUNDED_WAITS" in watch.report()


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.name)
def test_every_barrier_of_a_block_has_a_name(config):
    barriers = 2 * (config.stages + config.math_warpgroups + config.slots_apart + config.unit_stages)
    names = [watch.barrier(config, 8 * i) for i in range(barriers)]
    assert len(set(names)) == barriers
    assert not any("no barrier" in name for name in names)
    assert all("no barrier" in watch.barrier(config, offset) for offset in (-8, 4, 8 * barriers))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.name)
def test_every_warp_has_a_role(config):
    roles = [watch.role(config, warp) for warp in range(config.threads // 32)]
    assert len(set(roles)) == len(roles)
    assert "operands' warp" in roles
    assert sum("scale warp" in role for role in roles) == config.scale_warps
    assert [role for role in roles if "converter" in role] == [
        f"converter warp {i}" for i in range(config.converter_warps)
    ]
    assert sum("unit warp" in role for role in roles) == config.unit_warps


def test_records_are_those_of_the_device():
    header = (Path(watch.__file__).parent.parent / "include" / "deep_tile" / "watch.cuh").read_text()
    assert f"warps_per_block = {watch.WARPS_PER_BLOCK};" in header
    assert f"watched_blocks = {watch.WATCHED_BLOCKS};" in header
    assert ctypes.sizeof(watch.Record) == 32
    struct = header[header.index("struct WatchRecord") : header.index("constexpr int warps_per_block")]
    members = re.findall(r"\w+(?=[,;])", re.sub("//.*", "", struct))
    assert members == [name for name, _ in watch.Record._fields_]


@pytest.fixture(params=FAMILIES, ids=lambda config: config.name)
def config(request):
    return request.param


@pytest.fixture
def debug_build(config, made_once):
    source = kernel_source(config, Watch(ADDRESS, 10**9, 1))
    return made_once(f"debug_{config.name}", lambda: jit.compile_kernel(source, config.name))


def test_debug_build_compiles_clean(config, debug_build):
    usage = jit.resource_usage(debug_build.log)
    few_registers = config.math_warpgroups == 2 and config.producer_registers == 24  # then the watch makes them spill
    assert max(usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) <= (64 if few_registers else 0)
    assert usage.warnings == ()


def test_debug_build_keeps_warps_together(debug_build, tmp_path):
    (lines,) = disassemblies([debug_build.cubin], tmp_path)
    code = "\n".join(lines)
    assert "WARPSYNC" not in code
    assert "BPT.TRAP" in code


def test_kernels_are_of_the_debug_build_when_asked_for(monkeypatch):
    monkeypatch.setattr(settings, "bounded_waits_ns", lambda: 10**9)
    monkeypatch.setattr(watch, "_records", watch._Records(None, ADDRESS, []))
    first, second = (watch.debug_source(config) for config in FAMILIES[:2])
    assert f"{{{ADDRESS}ull, {10**9}ull, 1u}}" in first
    assert f"{{{ADDRESS}ull, {10**9}ull, 2u}}" in second
    compiled = []
    monkeypatch.setattr(jit, "compile_kernel", lambda source, name: compiled.append(source) or jit.Compiled(b"", "", 0))
    monkeypatch.setattr(jit, "load_cubin", lambda source, name: pytest.fail("a debug build went through the cache"))
    plan.load_kernels(FAMILIES[:1], None, 1)
    assert len(compiled) == 1
    assert "#define DEEP_TILE_WATCH" in compiled[0]


HANGING = """
import torch
from deep_tile import GemmConfig, _launcher, plan, watch
from deep_tile.problem import GemmProblem

config, m, n, k = GemmConfig(64, 32, 2, b_stages=3), 64, 96, 128  # takes_k() refuses this k: two K blocks are needed
a, b = (torch.zeros(rows, k, device="cuda", dtype=torch.uint8) for rows in (m, n))
scales = torch.ones(m, 1, device="cuda")
out = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
layout = plan.Layout(k, k, n, (1, 1), (1, 1), True)
launch = plan.prepare_launch(GemmProblem(m, n, k, 1), config, layout, 0, pdl=False, constant_weights=False)
_launcher.launch(launch, tuple(x.data_ptr() for x in (a, scales, b, scales, out)), 0)
try:
    torch.cuda.synchronize()
    print("did not hang")
except RuntimeError:
    print(watch.report())
"""


@pytest.mark.gpu
def test_a_hang_ends_and_is_told():
    done = run_python(HANGING, DEEP_TILE_BOUNDED_WAITS="0.2")
    assert "math warpgroup 0" in done.stdout
    assert "waits for resident.full[0]" in done.stdout or "waits for full[" in done.stdout
