"""`doctor --measure`: the current GPU's bandwidths, latencies, tensor rate and launch floor.

Needs a Hopper GPU and imports torch. A few seconds; nothing else should run on the GPU.
"""

import random
from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from deep_tile import _launcher, jit, launches
from deep_tile.params import Field, Params, places
from deep_tile.select.hardware import Hardware, for_device
from deep_tile.select.streaming import WARP, derive_elementwise
from deep_tile.tools import timing

READ = Params(
    "ReadParams",
    Field("data", "const uint4*"),
    Field("out", "unsigned*"),
    Field("count", "long long", "of data"),
    Field("passes", "long long"),
)
CHASE = Params(
    "ChaseParams",
    Field("next", "const long long*", "where the one after each lies"),
    Field("out", "long long*"),
    Field("first", "long long"),
    Field("steps", "long long"),
)

SOURCE = (
    READ.text
    + CHASE.text
    + r"""
extern "C" __global__ void read_all(const __grid_constant__ ReadParams params)
{
    const long long step = (long long)gridDim.x * blockDim.x, count = params.count;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (long long pass = 0; pass < params.passes; ++pass)
        for (long long i = first; i < count; i += 4 * step) {
            uint4 loaded[4];  // all four are under way before the first is used
#pragma unroll
            for (int j = 0; j < 4; ++j)
                loaded[j] = i + j * step < count ? __ldcg(params.data + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum ^= loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
        }
    if (sum == 0x9e3779b9)  // never worth storing, always worth reading
        *params.out = sum;
}

extern "C" __global__ void chase(const __grid_constant__ ChaseParams params)
{
    long long at = params.first;
    for (long long i = 0; i < params.steps; ++i)
        at = __ldcg(params.next + at);
    *params.out = at;
}
"""
)
"""L1 is passed by. A chased address depends on the previous one, so one read is in flight at a time."""

REPEATS = 10
HBM_BYTES = 4 << 30
L2_READ_BYTES = 16 << 20
L2_PASSES = 64
HBM_CHASED_BYTES = 512 << 20
L2_CHASED_BYTES = 4 << 20
LINE_BYTES = 128
CHASED_STEPS = 20_000
GEMM_SIZE = 8192


def measure(device: torch.device | int | None = None) -> tuple[Hardware, dict[str, float]]:
    """The GPU's preset, and the measured fields by name.

    Args:
        device: a CUDA device, by default the current one.

    Raises:
        ValueError: no preset has the GPU's name.
        RuntimeError: the driver or NVRTC refuses.
    """
    index = torch.cuda.current_device() if device is None else torch.device(device).index
    properties = torch.cuda.get_device_properties(index)
    known = for_device(properties)
    with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
        return known, dict(_Measurements(known))


class _Measurements:
    """All measurements on the current device and stream, as (field, value)."""

    def __init__(self, known: Hardware):
        self.known = known

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield "launch_us", round(self.launch_us(), 2)
        yield "hbm_tbps", round(self.read_tbps(HBM_BYTES, 1), 3)
        yield "l2_tbps", round(self.read_tbps(L2_READ_BYTES, L2_PASSES), 3)
        yield "hbm_latency_ns", round(self.latency_ns(HBM_CHASED_BYTES), 1)
        yield "l2_latency_ns", round(self.latency_ns(L2_CHASED_BYTES), 1)
        yield "fp8_tflops", round(self.fp8_tflops(), 1)

    def launch_us(self) -> float:
        """Time of a replayed graph with one small kernel, between events."""
        graph = timing.capture(torch.zeros(1, device="cuda").zero_)
        return self._median_us(graph.replay, repeats=10 * REPEATS)

    def read_tbps(self, size_bytes: int, passes: int) -> float:
        """All SMs read `size_bytes`, `passes` times; the difference between two lengths cancels launch and ramp."""
        data, out = self._zeros(size_bytes), self._zeros(16)
        walls = derive_elementwise(size_bytes // 16, 16, 0, self.known)
        threads, count = walls.warps * WARP, size_bytes // 16

        def read_us(elements: int, times: int) -> float:
            launch = self._prepare("read_all", READ, walls.grid, threads, count=elements, passes=times)
            return self._median_us(lambda: launches.launch(launch, data, out))

        short = (count // 2, passes) if passes == 1 else (count, passes // 2)
        longer_us = read_us(count, passes) - read_us(*short)
        return size_bytes * passes / 2 / longer_us / 1e6

    def latency_ns(self, size_bytes: int) -> float:
        """One thread follows a random cycle through a buffer's lines."""
        lines, words = size_bytes // LINE_BYTES, LINE_BYTES // 8
        order = torch.randperm(lines, device="cuda") * words
        following = torch.zeros(lines * words, dtype=torch.int64, device="cuda")
        following[order] = order.roll(-1)
        out = self._zeros(16)

        def chase_us(steps: int) -> float:
            def call() -> None:  # each starts elsewhere: the last one's lines are in L2
                first = random.randrange(lines) * words
                launch = self._prepare("chase", CHASE, 1, 1, first=first, steps=steps)
                launches.launch(launch, following, out)

            return self._median_us(call)

        chase_us(lines if size_bytes == L2_CHASED_BYTES else 1)  # warms L2 if the buffer fits
        return (chase_us(2 * CHASED_STEPS) - chase_us(CHASED_STEPS)) / CHASED_STEPS * 1e3

    def fp8_tflops(self) -> float:
        """cuBLAS's FP8 product with one scale per tensor: tensor cores under real loads, random data."""
        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        us = self._median_us(lambda: torch._scaled_mm(a, b.t(), **options))
        return 2 * GEMM_SIZE**3 / us / 1e6

    def _zeros(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes // 8, dtype=torch.int64, device="cuda")

    @cached_property
    def _kernels(self) -> dict[str, _launcher.Kernel]:
        cubin, device = jit.load_cubin(SOURCE, "measure"), torch.cuda.current_device()
        return {name: _launcher.load(cubin, name, 0, device) for name in ("read_all", "chase")}

    def _prepare(self, kernel: str, table: Params, grid: int, threads: int, **numbers: int) -> _launcher.Launch:
        """A launch with the kernel's two tensors: its first pointer's, and `out`."""
        names = tuple(field.name for field in table.fields if field.is_pointer)
        return _launcher.prepare(
            self._kernels[kernel],
            grid=grid,
            cluster=1,
            threads=threads,
            params=table.pack(**numbers),
            names=names,
            pointers=table.pointers(places(names)),
            maps=(),
            fixed_maps=(),
            pdl=False,
        )

    @staticmethod
    def _median_us(call: Callable[[], object], repeats: int = REPEATS) -> float:
        return timing.time_calls({"": call}, repeats, timing.keep_busy)[""].us
