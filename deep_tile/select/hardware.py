"""GPU limits, rates and latencies, each with its unit and source.

No GPU, no torch. Invariant: a preset is a constant, so choices from it are equal on every machine; only `for_device`
reads results stored by `python -m deep_tile doctor --measure`.

Sources, by grade:
    datasheet NVIDIA's H100, H200 and GH200 data sheets and the "H100 Tensor Core GPU Architecture" white paper. Dense
                tensor rates: half the figures printed with sparsity.
    press       H800 and H20 have no public data sheet; figures as reported when they were announced.
    measured NVIDIA H200, 700 W, driver 580, CUDA 13.0, 2026-11-21; H100 SXM rates by `doctor --measure` on an 80 GB
                card, 2026-11-26.
    published   microbenchmarks by others.
    scaled from the H200's measurement by the ratio of datasheets. assumed a guess, for want of a machine. given
    `Hardware.with_numbers`: whoever asked.
"""

import json
import re
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import isfinite
from typing import Any

from deep_tile import settings
from deep_tile.config import ACCUMULATOR_LIMIT
from deep_tile.kinds import PACKED
from deep_tile.walls import SMEM_LIMIT_BYTES, WARPGROUP_THREADS

DTYPE_BYTES = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "tf32": 4}
"""Tensor core element types and bytes per operand element."""


PRODUCER_REGISTERS = 24
"""Registers that a producer thread keeps; math warpgroups share the rest, in steps of eight."""

MATH_REGISTERS = 232 - ACCUMULATOR_LIMIT
"""A math thread's registers beside accumulators: addresses, scales, loop variables."""

UNITS = {
    "tflops": "TFLOPS",
    "bandwidth": "TB/s",
    "latency": "ns",
    "sms": "SMs",
    "registers": "registers per SM",
    "smem_bytes": "bytes of shared memory per block",
}
"""Units for the arguments of `Hardware.with_numbers`."""

WHOLE = ("sms", "registers", "smem_bytes")


def operand_dtype(dtype: str) -> str:
    """The operand dtype for a kind (the start of its name in `kinds.KINDS`; FP8 for packed kinds) or for a dtype
    (itself)."""
    if not isinstance(dtype, str):
        raise TypeError(f"dtype is {dtype!r}, of type {type(dtype).__name__}; pass a name, such as 'bf16'")
    return "fp8" if dtype in PACKED else dtype.partition("_")[0]


def operand_bytes_of(dtype: str) -> int:
    """Bytes per operand element for a dtype or kind. Raises KeyError for another."""
    return DTYPE_BYTES[operand_dtype(dtype)]


MEASURABLE = ("hbm_tbps", "l2_tbps", "hbm_latency_ns", "l2_latency_ns", "launch_us", "fp8_tflops")
"""Fields that `doctor --measure` stores and `for_device` prefers to a preset's."""


@dataclass(frozen=True)
class Hardware:
    """One GPU's limits, rates and latencies, in the units of the field names.

    Attributes:
        name: its name here and in `--hardware`.
        clock_mhz: SM clock under tensor load; turns cycles into time.
        peak_tflops: dense tensor rate per dtype, by datasheet.
        fp32_tflops: FP32 rate outside tensor cores, by datasheet.
        fp8_tflops: FP8 WGMMA under real loads on random data, where the power limit already acts.
        hbm_peak_tbps: memory bandwidth by datasheet, TB/s. hbm_tbps: bandwidth of a plain streaming-read kernel, TB/s.
        l2_tbps: L2 to all SMs together by TMA, all reading distinct data, TB/s.
        l2_multicast_tbps: the same with every read shared by a pair of SMs, bytes delivered, TB/s.
        hbm_latency_ns, l2_latency_ns: one read from idle memory.
        launch_us: an empty kernel, from event to event.
        stream_us: a streaming-read kernel's time beyond its bytes at `hbm_tbps`: launch and ramp.
        smem_bytes: shared memory that one block may use.
        smem_bytes_per_clock: shared-memory bandwidth per SM.
        l2_shared_bytes_per_clock: L2 bytes per SM while all SMs read the same data.
        registers: 32-bit registers per SM. registers_per_thread: the most that an instruction can name.
        threads, blocks: the most per SM.
        sources: by field, its grade where it is not `datasheet`.
    """

    name: str
    num_sms: int
    clock_mhz: float
    peak_tflops: dict[str, float] = field(hash=False)
    fp32_tflops: float
    fp8_tflops: float
    hbm_peak_tbps: float
    hbm_tbps: float
    l2_tbps: float
    l2_multicast_tbps: float
    hbm_latency_ns: float
    l2_latency_ns: float
    launch_us: float
    stream_us: float
    l2_bytes: int
    smem_bytes: int = SMEM_LIMIT_BYTES
    smem_bytes_per_clock: int = 128
    l2_shared_bytes_per_clock: int = 105
    registers: int = 65_536
    registers_per_thread: int = 255
    threads: int = 2048
    blocks: int = 32
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    def tflops(self, dtype: str) -> float:
        """Tensor rate under real load for a dtype or kind: the datasheet's rate times FP8's measured share.

        Raises:
            ValueError: the tensor cores do not multiply this dtype, or the rate is not known here.
        """
        return self.peak(dtype) * self.fp8_tflops / self.peak_tflops["fp8"]

    def peak(self, dtype: str) -> float:
        """Dense tensor rate by datasheet, TFLOPS. Raises ValueError like `tflops`."""
        dtype = operand_dtype(dtype)
        if dtype not in self.peak_tflops:
            known = ", ".join(self.peak_tflops)
            raise ValueError(f"dtype is {dtype!r}; {self.name} has tensor rates for {known}")
        return self.peak_tflops[dtype]

    def math_registers(self, math_warpgroups: int) -> int:
        """Registers per math thread when a block with these warpgroups and one producer warpgroup has the SM to
        itself."""
        shared = self.registers // WARPGROUP_THREADS - PRODUCER_REGISTERS
        return max(0, min(self.registers_per_thread, shared // math_warpgroups // 8 * 8))

    def accumulator_limit(self, math_warpgroups: int) -> int:
        """Accumulators that a math thread can hold; on Hopper the package's limit."""
        return max(0, min(ACCUMULATOR_LIMIT, self.math_registers(math_warpgroups) - MATH_REGISTERS))

    def with_numbers(
        self,
        *,
        dtype: str = "fp8",
        tflops: float | None = None,
        bandwidth: float | None = None,
        latency: float | None = None,
        sms: int | None = None,
        registers: int | None = None,
        smem_bytes: int | None = None,
    ) -> "Hardware":
        """The same GPU with other numbers, for one that has no preset. Omitted numbers stay unchanged.

        Args:
            dtype: the dtype of `tflops`: a tensor core dtype (other rates scale along), or "fp32" for kernels without
                tensor cores.
            tflops: TFLOPS, dense. Rates and `bandwidth` are achieved values, not a datasheet's.
            bandwidth: HBM's, TB/s. latency: one read from idle HBM, ns.
            sms: streaming multiprocessors. L2's bandwidth, and rates that are not given, are in proportion to them.
            registers: 32-bit registers per SM. smem_bytes: shared memory that one block may use.

        Raises:
            ValueError: a number is not positive and finite, or not whole where it counts, or the dtype is unknown.
        """
        numbers = {"tflops": tflops, "bandwidth": bandwidth, "latency": latency}
        numbers |= {"sms": sms, "registers": registers, "smem_bytes": smem_bytes}
        given = {name: _checked(name, number) for name, number in numbers.items() if number is not None}
        return _with_numbers(self, dtype, given) if given else self

    def source(self, name: str) -> str:
        """A field's grade: see this module's docstring."""
        return self.sources.get(name, "datasheet")

    @property
    def smem_tbps(self) -> float:
        """Over all SMs, TB/s."""
        return self.num_sms * self.smem_bytes_per_clock * self.clock_mhz / 1e6

    @property
    def l2_shared_tbps(self) -> float:
        """L2 to all SMs together when all read the same data, TB/s."""
        return self.num_sms * self.l2_shared_bytes_per_clock * self.clock_mhz / 1e6


def _checked(name: str, number: float) -> float:
    whole = name in WHOLE
    if not (isfinite(number) and number > 0) or (whole and number != int(number)):
        raise ValueError(
            f"{name} is {number}; wanted a positive {'whole' if whole else 'finite'} number of {UNITS[name]}"
        )
    return int(number) if whole else number


def _with_numbers(gpu: Hardware, dtype: str, given: dict[str, float]) -> Hardware:
    own = {"bandwidth": ("hbm_tbps", "hbm_peak_tbps"), "latency": ("hbm_latency_ns",), "sms": ("num_sms",)}
    own |= {"registers": ("registers",), "smem_bytes": ("smem_bytes",)}
    changed = {field: given[name] for name, names in own.items() if name in given for field in names}
    followed = _rates_of_sms(gpu, given["sms"]) if "sms" in given else {}
    if dtype != "fp32":
        gpu.peak(dtype)
    if "tflops" in given and dtype == "fp32":
        changed["fp32_tflops"] = given["tflops"]
    elif "tflops" in given:
        times = given["tflops"] / gpu.peak(dtype)
        rates = {name: rate * times for name, rate in gpu.peak_tflops.items()} | {operand_dtype(dtype): given["tflops"]}
        changed |= {"peak_tflops": rates, "fp8_tflops": rates["fp8"]}
    sources = gpu.sources | dict.fromkeys(followed, "scaled") | dict.fromkeys(changed, "given")
    name = f"{gpu.name} with {', '.join(f'{name} = {number:.12g}' for name, number in given.items())}"
    return replace(gpu, name=name, sources=sources, **followed | changed)


def _rates_of_sms(gpu: Hardware, sms: int) -> dict[str, Any]:
    """Whole-GPU rates scaled to another SM count."""
    share = sms / gpu.num_sms
    names = ("fp8_tflops", "fp32_tflops", "l2_tbps", "l2_multicast_tbps")
    tensor = {name: rate * share for name, rate in gpu.peak_tflops.items()}
    return {"peak_tflops": tensor} | {name: getattr(gpu, name) * share for name in names}


def _tensor_rates(fp8: float) -> dict[str, float]:
    """Hopper's rates halve as the operand doubles."""
    return {"fp8": fp8, "int8": fp8, "fp16": fp8 / 2, "bf16": fp8 / 2, "tf32": fp8 / 4}


H200 = Hardware(
    name="H200",
    num_sms=132,
    clock_mhz=1755,
    peak_tflops=_tensor_rates(1979),
    fp32_tflops=67,
    fp8_tflops=1500.0,
    hbm_peak_tbps=4.8,
    hbm_tbps=4.09,
    l2_tbps=9.5,
    l2_multicast_tbps=12.3,
    hbm_latency_ns=330,
    l2_latency_ns=220,
    launch_us=3.3,
    stream_us=5.1,
    l2_bytes=50 << 20,
    sources={
        **dict.fromkeys(("fp8_tflops", "hbm_tbps", "l2_tbps", "l2_multicast_tbps"), "measured"),
        **dict.fromkeys(("launch_us", "stream_us", "l2_shared_bytes_per_clock"), "measured"),
        **dict.fromkeys(("hbm_latency_ns", "l2_latency_ns"), "published"),
        "clock_mhz": "assumed",
        "l2_bytes": "assumed",
    },
)
"""L2: 72 GB/s per SM, 93 delivered with multicast. Latencies: the upper half of 480 to 660 (HBM) and 270 to 500 (L2)
clocks."""


def _scaled(
    name: str, num_sms: int, fp8: float, hbm: float, sustained: float | None = None, **others: float
) -> Hardware:
    """A Hopper GPU that nobody measured for us: the H200's rates in proportion to both datasheets.

    Args:
        fp8: dense TFLOPS. `sustained`: under real loads, where the H200's share does not carry over.
        hbm: TB/s.
    """
    sms = num_sms / H200.num_sms
    scaled_fields = ("hbm_tbps", "l2_tbps", "l2_multicast_tbps", "l2_shared_bytes_per_clock", "fp8_tflops")
    scaled = dict.fromkeys(scaled_fields, "scaled")
    assumed = dict.fromkeys(("hbm_latency_ns", "l2_latency_ns", "launch_us", "stream_us", "clock_mhz"), "assumed")
    share = H200.fp8_tflops / H200.peak("fp8")
    return replace(
        H200,
        name=name,
        num_sms=num_sms,
        peak_tflops=_tensor_rates(fp8),
        fp8_tflops=sustained or round(fp8 * share),
        hbm_peak_tbps=hbm,
        hbm_tbps=round(hbm * H200.hbm_tbps / H200.hbm_peak_tbps, 2),
        l2_tbps=round(H200.l2_tbps * sms, 2),
        l2_multicast_tbps=round(H200.l2_multicast_tbps * sms, 2),
        sources={**scaled, **assumed, **({"fp8_tflops": "assumed"} if sustained else {})},
        **others,
    )


def _measured(preset: Hardware, **rates: float) -> Hardware:
    return replace(preset, sources={**preset.sources, **dict.fromkeys(rates, "measured")}, **rates)


H100_SXM = _measured(_scaled("H100 SXM", 132, fp8=1979, hbm=3.35), launch_us=2.9, hbm_tbps=3.08, l2_tbps=7.5)
H100_PCIE = _scaled("H100 PCIe", 114, fp8=1513, hbm=2.0, clock_mhz=1620, fp32_tflops=51)
H800 = replace(
    H100_SXM,
    name="H800",
    sources=H100_SXM.sources | dict.fromkeys(("launch_us", "hbm_tbps", "l2_tbps"), "scaled"),
)
"""An H100 SXM with slower NVLink."""
H20 = _scaled("H20", 78, fp8=296, hbm=4.0, sustained=281, l2_bytes=60 << 20, fp32_tflops=44)
"""296 TFLOPS on 78 SMs are a quarter of an H200's rate per SM and clock: far from the power limit, so 95 % is assumed
to be reached."""
GH200 = _scaled("GH200", 132, fp8=1979, hbm=4.0)
"""The 96 GB model. The 144 GB model has HBM3e with 4.9 TB/s."""

for _press in (H800, H20):
    _press.sources.update(
        dict.fromkeys(("num_sms", "peak_tflops", "fp32_tflops", "hbm_peak_tbps", "l2_bytes"), "press")
    )

PRESETS = {hardware.name: hardware for hardware in (H100_SXM, H100_PCIE, H200, H800, H20, GH200)}

_DEVICE_NAMES = (
    (r"GH200", "GH200"),
    (r"H100.*PCIe", "H100 PCIe"),
    (r"H100( SXM5?)?( 80GB)?( HBM3)?", "H100 SXM"),
    (r"H200", "H200"),
    (r"H800( SXM5?)?( 80GB)?( HBM3)?", "H800"),
    (r"H20", "H20"),
)
"""Patterns for the driver's GPU name without `NVIDIA` and without the part after the memory size."""


def for_device(device: Any = "H200") -> Hardware:
    """A GPU's preset, with the driver's SM count and L2 size and stored measurements.

    Args:
        device: a name (`H20`, `h100-sxm`, `NVIDIA H100 80GB HBM3`), or torch's device properties: anything with
            `name`, `multi_processor_count` and `L2_cache_size`. A preset's own name gives the preset, unmeasured.

    Raises:
        ValueError: no preset has this name.
    """
    if isinstance(device, str):
        return _from_name(device)
    hardware = _from_name(device.name)
    told = {"num_sms": device.multi_processor_count, "l2_bytes": device.L2_cache_size}
    sources = {**hardware.sources, **dict.fromkeys(told, "driver")}
    return _with_measured(replace(hardware, **told, sources=sources), device.name)


def named(hardware: str | Hardware) -> Hardware:
    """The Hardware itself, or `for_device` on a name. Raises TypeError for anything else."""
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        wanted = "the name of a GPU, such as 'H200', or a deep_tile.select.hardware.Hardware"
        raise TypeError(f"hardware is {hardware!r}, of type {type(hardware).__name__}; pass {wanted}")
    return for_device(hardware)


def _from_name(name: str) -> Hardware:
    def plain(text: str) -> str:
        return re.sub(r"[\s_-]+", " ", text).strip().casefold()

    for preset in PRESETS.values():
        if plain(name) == plain(preset.name):
            return preset
    shortened = re.sub(r"^NVIDIA ", "", name.strip())
    for pattern, preset_name in _DEVICE_NAMES:
        if re.fullmatch(rf"{pattern}( \d+GB)?( HBM\w+)?", shortened, re.IGNORECASE):
            return PRESETS[preset_name] if not name.startswith("NVIDIA") else _with_measured(PRESETS[preset_name], name)
    raise ValueError(f"hardware is {name!r}; known are {', '.join(PRESETS)}")


# ---- results of `doctor --measure`


def measured_path():
    """JSON file with measurements by GPU name, beside the compiled kernels; None: memory only."""
    directory = settings.cache_dir()
    return directory and directory / "hardware.json"


def store_measured(device_name: str, values: dict[str, float]) -> None:
    """Store measured fields, which `for_device` then uses for this GPU. Raises ValueError for a name that is not in
    `MEASURABLE` or a value that is not positive, OSError where nothing can be written."""
    for name, value in values.items():
        if name not in MEASURABLE or not value > 0:
            raise ValueError(f"measured {name} is {value}; wanted a positive number for one of {', '.join(MEASURABLE)}")
    path = measured_path()
    if path is None:
        raise FileNotFoundError("no cache directory to store measurements in; set DEEP_TILE_CACHE_DIR")
    with settings.only_writer(path):
        settings.write_json(path, {**_stored(path), device_name: values})
    _stored_measurements.cache_clear()


def _with_measured(hardware: Hardware, device_name: str) -> Hardware:
    values = _stored_measurements().get(device_name, {})
    values = {name: value for name, value in values.items() if name in MEASURABLE}
    return replace(hardware, **values, sources={**hardware.sources, **dict.fromkeys(values, "measured")})


@lru_cache(maxsize=1)
def _stored_measurements() -> dict[str, dict[str, float]]:
    path = measured_path()
    return {} if path is None else _stored(path)


def _stored(path) -> dict[str, dict[str, float]]:
    """Nothing of a missing or damaged file: measurements can be made again."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def describe(hardware: Hardware) -> list[tuple[str, Any, str]]:
    """(field, value, grade) for all fields, in order."""
    shown = (entry.name for entry in fields(hardware) if entry.name not in ("name", "sources"))
    return [(name, getattr(hardware, name), hardware.source(name)) for name in shown]
