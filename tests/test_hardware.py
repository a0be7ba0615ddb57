"""GPU data: presets against the datasheets, names, and stored measurements, which come first."""

import json
import math
from types import SimpleNamespace

import pytest

from deep_tile.select import hardware
from deep_tile.select.hardware import H20, H200, PRESETS, for_device


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """The file of measurements, in a folder that does not exist yet."""
    path = tmp_path / "cache" / "hardware.json"
    monkeypatch.setattr(hardware, "measured_path", lambda: path)
    hardware._stored_measurements.cache_clear()
    yield path
    hardware._stored_measurements.cache_clear()


def properties(name="NVIDIA H200", sms=132, l2_bytes=60 << 20):
    return SimpleNamespace(name=name, multi_processor_count=sms, L2_cache_size=l2_bytes)


@pytest.mark.parametrize(
    ("name", "sms", "fp8_tflops", "hbm_tbps"),
    [
        ("H100 SXM", 132, 1979, 3.35),
        ("H100 PCIe", 114, 1513, 2.0),
        ("H200", 132, 1979, 4.8),
        ("H800", 132, 1979, 3.35),
        ("H20", 78, 296, 4.0),
        ("GH200", 132, 1979, 4.0),
    ],
)
def test_presets_are_the_datasheets(name, sms, fp8_tflops, hbm_tbps):
    preset = PRESETS[name]
    assert (preset.num_sms, preset.peak("fp8"), preset.hbm_peak_tbps) == (sms, fp8_tflops, hbm_tbps)
    assert preset.peak("bf16") == preset.peak("fp16") == fp8_tflops / 2
    assert preset.peak("int8") == fp8_tflops
    assert preset.fp8_tflops < preset.peak("fp8")
    assert preset.hbm_tbps < preset.hbm_peak_tbps


def test_an_h200_and_an_h100_were_measured():
    assert H200.source("fp8_tflops") == H200.source("hbm_tbps") == "measured"
    measured = {name for name, preset in PRESETS.items() if "measured" in preset.sources.values()}
    assert measured == {"H200", "H100 SXM"} and PRESETS["H100 SXM"].source("l2_tbps") == "measured"
    assert H20.source("peak_tflops") == "press"
    assert PRESETS["H100 SXM"].source("peak_tflops") == "datasheet"


def test_what_is_described_has_a_source():
    known = {"datasheet", "press", "measured", "published", "scaled", "assumed"}
    for preset in PRESETS.values():
        described = hardware.describe(preset)
        assert {"hbm_tbps", "registers", "launch_us", "smem_bytes"} <= {name for name, _, _ in described}
        assert {source for _, _, source in described} <= known


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("H100 SXM", "H100 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("H100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("h20", "H20"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_names(stored, name, preset):
    assert for_device(name) == PRESETS[preset]


@pytest.mark.parametrize("name", ["", "A100", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "H2", "B200", "NVIDIA H20-3e"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match="known are H100 SXM, H100 PCIe, H200, H800, H20, GH200") as caught:
        for_device(name)
    assert repr(name) in str(caught.value)


def test_the_driver_is_believed(stored):
    told = for_device(properties(sms=120, l2_bytes=60 << 20))
    assert (told.num_sms, told.l2_bytes, told.source("num_sms")) == (120, 60 << 20, "driver")
    assert told.hbm_tbps == H200.hbm_tbps


def test_measurements_are_stored_and_preferred_by_the_drivers_name_only(stored):
    hardware.store_measured("NVIDIA H20", {"hbm_tbps": 3.6, "launch_us": 2.9})
    hardware.store_measured("NVIDIA H200", {"hbm_tbps": 4.2})
    assert set(json.loads(stored.read_text())) == {"NVIDIA H20", "NVIDIA H200"}
    measured = for_device(properties("NVIDIA H20", 78))
    assert (measured.hbm_tbps, measured.launch_us, measured.source("hbm_tbps")) == (3.6, 2.9, "measured")
    assert measured.fp8_tflops == H20.fp8_tflops
    assert for_device("NVIDIA H20").hbm_tbps == 3.6
    assert for_device("H20") == H20


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_damaged_file_counts_as_empty_and_is_replaced(stored, text):
    stored.parent.mkdir()
    stored.write_text(text)
    assert for_device("NVIDIA H200") == H200
    hardware.store_measured("NVIDIA H200", {"hbm_tbps": 4.2})
    assert for_device("NVIDIA H200").hbm_tbps == 4.2


@pytest.mark.parametrize("values", [{"hbm_tbps": 0}, {"hbm_tbps": -1.0}, {"hbm_tbps": float("nan")}, {"colour": 1.0}])
def test_nonsense_is_not_stored(stored, values):
    with pytest.raises(ValueError, match="wanted a positive number for one of hbm_tbps"):
        hardware.store_measured("NVIDIA H200", values)
    assert not stored.exists()


def test_without_a_cache_directory_nothing_is_stored(monkeypatch):
    monkeypatch.setattr(hardware, "measured_path", lambda: None)
    with pytest.raises(FileNotFoundError, match="DEEP_TILE_CACHE_DIR"):
        hardware.store_measured("NVIDIA H200", {"hbm_tbps": 4.2})


def test_dtypes_without_a_tensor_rate():
    with pytest.raises(ValueError, match="dtype is 'fp64'; H20 has tensor rates for fp8, int8, fp16, bf16, tf32"):
        H20.tflops("fp64")
    assert H200.tflops("bf16") == pytest.approx(750)


@pytest.mark.gpu
def test_measuring_a_gpu_gives_every_figure_near_its_preset():
    import torch

    from deep_tile.tools.measure import measure

    known, measured = measure()
    assert set(measured) == set(hardware.MEASURABLE)
    assert known.num_sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert all(0 < value < math.inf for value in measured.values()), measured


# ---- numbers in place of a preset's


def test_given_numbers_are_taken_as_they_are():
    """The GPU of a textbook: 50 TFLOPS in FP16 and 1 TB/s."""
    gpu = H200.with_numbers(dtype="fp16", tflops=50, bandwidth=1, latency=600, registers=32768, smem_bytes=102_400)
    assert gpu.tflops("fp16") == gpu.peak("fp16") == 50
    assert (gpu.tflops("fp8"), gpu.tflops("tf32")) == (100, 25)
    assert (gpu.hbm_tbps, gpu.hbm_peak_tbps, gpu.hbm_latency_ns) == (1, 1, 600)
    assert (gpu.registers, gpu.smem_bytes) == (32768, 102_400)
    assert (gpu.num_sms, gpu.l2_tbps, gpu.fp32_tflops) == (132, H200.l2_tbps, H200.fp32_tflops)
    assert gpu.name == ("H200 with tflops = 50, bandwidth = 1, latency = 600, registers = 32768, smem_bytes = 102400")
    assert {gpu.source(name) for name in ("fp8_tflops", "hbm_tbps", "registers")} == {"given"}
    assert gpu.source("l2_tbps") == "measured"


def test_rates_follow_the_sms_unless_they_are_given():
    half, fast = H200.with_numbers(sms=66), H200.with_numbers(sms=66, tflops=1500)
    assert (half.tflops("fp8"), half.tflops("bf16")) == (pytest.approx(750), pytest.approx(375))
    assert (half.l2_tbps, half.fp32_tflops, half.hbm_tbps) == (9.5 / 2, 33.5, H200.hbm_tbps)
    assert half.smem_tbps == pytest.approx(H200.smem_tbps / 2)
    assert (fast.tflops("fp8"), fast.l2_tbps, fast.source("l2_tbps")) == (1500, 9.5 / 2, "scaled")


def test_the_rate_of_fp32_is_not_the_tensor_cores():
    gpu = H200.with_numbers(dtype="fp32", tflops=30)
    assert (gpu.fp32_tflops, gpu.tflops("fp8")) == (30, 1500)


def test_no_numbers_are_the_preset_itself():
    assert H20.with_numbers(dtype="bf16") is H20


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"tflops": 0}, "tflops is 0; wanted a positive finite number of TFLOPS"),
        ({"bandwidth": -1.0}, "bandwidth is -1.0; wanted a positive finite number of TB/s"),
        ({"latency": float("nan")}, "latency is nan; wanted a positive finite number of ns"),
        ({"sms": float("inf")}, "sms is inf; wanted a positive whole number of SMs"),
        ({"registers": 1.5}, "registers is 1.5; wanted a positive whole number of registers per SM"),
        ({"smem_bytes": 0}, "smem_bytes is 0; wanted a positive whole number of bytes of shared memory per block"),
        ({"tflops": 1, "dtype": "fp64"}, "dtype is 'fp64'; H200 has tensor rates for"),
    ],
)
def test_numbers_that_make_no_sense(numbers, said):
    with pytest.raises(ValueError) as caught:
        H200.with_numbers(**numbers)
    assert said in str(caught.value)


def test_registers_of_a_math_thread():
    """65536 / 128 - 24 = 488: 255 for one warpgroup, 244 for two, by eights; the kernels leave 40 of them free."""
    assert [H200.math_registers(count) for count in (1, 2, 3)] == [255, 240, 160]
    assert [H200.accumulator_limit(count) for count in (1, 2, 3)] == [192, 192, 120]
    small = H200.with_numbers(registers=32768)
    assert [small.accumulator_limit(count) for count in (1, 2)] == [192, 112 - 40]
    assert H200.with_numbers(registers=1024).accumulator_limit(1) == 0
