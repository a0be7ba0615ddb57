"""Debug builds for hangs: kernels that record what each warp waits for.

The device half is include/deep_tile/watch.cuh. Records are in pinned host memory, at the same address for host and GPU
and readable after a failed launch has ended the context.

Invariant: records are read only by the numbers of kernels that this process built.
"""

import ctypes
import threading
from typing import NamedTuple

from deep_tile import settings
from deep_tile.codegen import LogitsKernel, Watch, kernel_source, logits_source
from deep_tile.config import GemmConfig

WATCHED_BLOCKS = 256
WARPS_PER_BLOCK = 20


class Record(ctypes.Structure):
    """One warp's record: WatchRecord in watch.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("kernel", "barriers", "row", "column", "waits", "barrier", "parity", "unused")
    )


RECORDS = WATCHED_BLOCKS * WARPS_PER_BLOCK


class _Records(NamedTuple):
    """The process's records, and the kernels by their number in them, from 1."""

    memory: object  # keeps the records alive
    address: int
    kernels: list["Watched"]


Watched = GemmConfig | LogitsKernel
"""Kernels that have a debug build."""

_records: _Records | None = None
_lock = threading.Lock()


def is_wanted() -> bool:
    return settings.bounded_waits_ns() is not None


def debug_source(kernel: Watched) -> str:
    """CUDA C++ for a kernel's debug build, for this process only. Allocates the records at its first call."""
    with _lock:
        records = _opened()
        records.kernels.append(kernel)
        watch = Watch(records.address, settings.bounded_waits_ns(), len(records.kernels))
    return logits_source(kernel, watch) if isinstance(kernel, LogitsKernel) else kernel_source(kernel, watch)


def _opened() -> _Records:
    global _records
    if _records is None:
        import torch

        size = RECORDS * ctypes.sizeof(Record)
        memory = torch.zeros(size, dtype=torch.uint8, pin_memory=True, device="cpu")
        _records = _Records(memory, memory.data_ptr(), [])
    return _records


def report() -> str:
    """Which warp waited for what when a debug kernel gave up; says so if none did.

    May be called when the context is dead. Warps with a tile and no wait were working, at a named barrier, or done.
    """
    if _records is None:
        return "no kernel of the debug build has been loaded: set DEEP_TILE_BOUNDED_WAITS before the first call"
    records = (Record * RECORDS).from_address(_records.address)
    return describe(records, _records.kernels)


def describe(records, kernels: list[Watched]) -> str:
    """The text of `report`, from records and kernels by number."""
    waiting = {index // WARPS_PER_BLOCK for index, record in enumerate(records) if record.waits}
    if not waiting:
        return "no wait has taken longer than DEEP_TILE_BOUNDED_WAITS allows"
    lines = []
    for block in sorted(waiting):
        for warp in range(WARPS_PER_BLOCK):
            record = records[block * WARPS_PER_BLOCK + warp]
            if record.kernel:
                lines.append(_describe(record, kernels[record.kernel - 1], block, warp))
    return "\n".join(lines)


def _describe(record: Record, config: Watched, block: int, warp: int) -> str:
    where = f"{config.name} block {block} {role(config, warp)}, tile at ({record.row}, {record.column})"
    if not record.waits:
        return f"{where}: does not wait for an mbarrier"
    return f"{where}: waits for {barrier(config, record.barrier - record.barriers)}, parity {record.parity}"


def role(config: Watched, warp: int) -> str:
    """A warp's role: the table at the top of gemm.cuh, or of logits.cuh."""
    if isinstance(config, LogitsKernel):
        helper = warp - 4 * config.warpgroups
        return (
            f"math warpgroup {warp // 4}, warp {warp % 4}"
            if helper < 0
            else "loader"
            if helper == 0
            else "warp that fills"
        )
    math_warps = 4 * config.math_warpgroups
    if warp < math_warps:
        return f"math warpgroup {warp // 4}, warp {warp % 4}"
    helper = warp - math_warps - 1
    if helper < 0:
        return "operands' warp"
    if helper < config.scale_warps:
        return f"scale warp {helper}"
    helper -= config.scale_warps
    converter = warp - math_warps - 4
    if converter >= 0:
        return f"converter warp {converter}"
    return "unit warp" if config.is_packed and helper == config.store_warps else f"store warp {helper}"


def barrier(config: Watched, offset: int) -> str:
    """Name of the mbarrier at `offset` bytes after the first one, in the order of the kernel's storage."""
    number, rest = divmod(offset, 8)
    names = _barriers(config)
    return (
        names[number] if rest == 0 and 0 <= number < len(names) else f"no barrier of it, {offset} bytes off the first"
    )


def _barriers(config: Watched) -> list[str]:
    stages = [f"{state}[{stage}]" for state in ("full", "empty") for stage in range(config.stages)]
    if isinstance(config, LogitsKernel):
        return [*stages, *(f"task_{state}[{slot}]" for state in ("full", "empty") for slot in range(2))]
    return [
        *stages,
        *(f"partial_full[{warpgroup}]" for warpgroup in range(config.math_warpgroups)),
        *(f"partial_empty[{warpgroup}]" for warpgroup in range(config.math_warpgroups)),
        *(f"slots.full[{slot}]" for slot in range(config.slots_apart)),
        *(f"slots.empty[{slot}]" for slot in range(config.slots_apart)),
        *(f"units.full[{stage}]" for stage in range(config.unit_stages)),
        *(f"units.empty[{stage}]" for stage in range(config.unit_stages)),
    ]
