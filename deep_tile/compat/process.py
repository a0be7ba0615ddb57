"""DeepGEMM's process-wide settings, which deep_gemm.py and indexer.py pass along with every call."""

import torch

from deep_tile.config import as_int
from deep_tile.options import check_one

settings: dict[str, int | bool | None] = {"num_sms": None, "pdl": None}
"""As keywords of deep_tile's functions; None where nobody has set one."""


def set_num_sms(num_sms: int) -> None:
    """SMs that products use from now on, in this process."""
    number = as_int(num_sms)
    if number is None:
        raise TypeError(f"num_sms is {num_sms!r}, of type {type(num_sms).__name__}; pass an int")
    if number < 1:
        raise ValueError(f"num_sms is {num_sms}; pass an int from 1")
    settings["num_sms"] = number


def get_num_sms() -> int:
    """The set value, else the current device's count. Raises RuntimeError where there is neither."""
    given = settings["num_sms"]
    if given is None and not torch.cuda.is_available():
        raise RuntimeError("no number of SMs is set, and torch sees no CUDA device: call set_num_sms before")
    return torch.cuda.get_device_properties().multi_processor_count if given is None else given


def set_pdl(enabled: bool) -> None:
    """Whether products are programmatic dependent launches from now on; as `deep_tile.fp8_gemm` chooses before that."""
    check_one("pdl", enabled)
    settings["pdl"] = enabled


def get_pdl() -> bool:
    given = settings["pdl"]
    return settings["num_sms"] is None if given is None else given
