"""What the selector knows of a GPU: limits and rates, each with where it comes from.

Numbers marked H200 were measured on an NVIDIA H200 (driver 580, CUDA 13.0, 2026-11-21).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Rates of one GPU model, in the units of its field names.

    Attributes:
        name: as the driver reports it.
        num_sms: streaming multiprocessors.
        hbm_tbps: what a plain streaming-read kernel reaches, in TB/s.
        launch_us: an empty kernel, from event to event.
        stream_us: what a streaming-read kernel takes beyond its bytes at `hbm_tbps`: launch and ramp.
        fp8_tflops: FP8 WGMMA under real loads on random data, where the power limit already acts.
    """

    name: str
    num_sms: int
    hbm_tbps: float
    launch_us: float
    stream_us: float
    fp8_tflops: float


H200 = Hardware(name="NVIDIA H200", num_sms=132, hbm_tbps=4.09, launch_us=3.3, stream_us=5.1, fp8_tflops=1500.0)
