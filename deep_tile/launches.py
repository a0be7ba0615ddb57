"""The launch cache: prepared launches by a call's options and its tensors' signature.

C finds a launch by itself (`_launcher.launch_known`) for plain tensors in torch's own types, which it reads through
DLPack. Others (subclasses, or all if torch has no DLPack C exchange API) take the same path here, in Python, once they
are known to be plain.
"""

from collections.abc import Callable
from functools import cache

import torch

from deep_tile import _launcher, tensors

Prepared = _launcher.Launch | tuple[_launcher.Launch, ...]
"""One launch, or several in a row on the same tensors."""

Launches = dict[bytes | tuple, Prepared]
"""Launches by the tensors' signature: bytes if C reads the tensors, a tuple if Python does."""

Table = dict[tuple, tuple[tuple, Launches]]
"""Launches by options. The options are also stored as a value, to tell True from 1 and 1.0."""

MAX_OPTIONS = 1_024
MAX_SIGNATURES = 65_536
"""Limits of a table: different options, and launches in all. One more empties the table."""


def teach_launcher() -> None:
    """Have C read tensors, if torch's layout lets it recognise plain ones."""
    place, of_storage = tensors.find_keys(), tensors.find_storage() or ()
    if place is not None:
        for tensor_type in (torch.Tensor, torch.nn.Parameter):
            _launcher.read_tensors_of(tensor_type, *place, tensors.PLAIN_KEYS, *of_storage)


teach_launcher()


def signature(*given: torch.Tensor | None) -> bytes | tuple:
    """A comparable key: every property of plain tensors except addresses, plus whether these are aligned."""
    return _launcher.signature(*given) or tuple(
        x if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), tensors.is_aligned(x)) for x in given
    )


def find(table: Table, options: tuple, signature: bytes | tuple) -> Prepared | None:
    _, launches = table.get(options, (options, {}))
    return launches.get(signature)


def remember(table: Table, options: tuple, signature: bytes | tuple, launch: Prepared) -> None:
    met = list(table.values())  # at once: another thread may add one meanwhile
    too_many_options = options not in table and len(met) >= MAX_OPTIONS
    if too_many_options or sum(len(launches) for _, launches in met) >= MAX_SIGNATURES:
        table.clear()
    table.setdefault(options, (options, {}))[1][signature] = launch


class NotLoaded(RuntimeError):
    """A kernel would have to be loaded while a CUDA graph is captured. `call` is the call to make before capture,
    `or_else` an alternative."""

    def __init__(self, kernel_name: str, call: str, or_else: str = ""):
        super().__init__(
            f"{kernel_name} is not loaded yet and cannot be while a CUDA graph is captured; call {call} once with "
            f"these shapes{or_else} before the capture"
        )
        self._kernel_name, self._call, self._or_else = kernel_name, call, or_else

    def __reduce__(self) -> tuple:
        """Pickles, as `settings.BadVariable` does."""
        return NotLoaded, (self._kernel_name, self._call, self._or_else)

    def of(self, call: str) -> "NotLoaded":
        return NotLoaded(self._kernel_name, call, self._or_else)


def refuse_capture(kernel_name: str, device: int, call: str, or_else: str = "") -> None:
    """Raise NotLoaded where the device's current stream is being captured, since no kernel can be loaded then."""
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            return
    raise NotLoaded(kernel_name, call, or_else)


@cache
def is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(prepared: Prepared, *given: torch.Tensor | None) -> None:
    """Launch on the current stream of the first tensor's device, with the non-None tensors.

    Raises:
        ValueError: a tensor without memory, or one that TMA cannot use.
        RuntimeError: whatever the driver refuses.
    """
    addresses = tuple(x.data_ptr() for x in given if x is not None)
    _launcher.launch(prepared, addresses, torch._C._cuda_getCurrentRawStream(given[0].get_device()))


def enqueue(
    table: Table, options: tuple, given: tuple[torch.Tensor | None, ...], prepare: Callable[[], Prepared | None]
) -> None:
    """Launch the cached entry for these options and tensors, else `prepare`'s result, which is then cached. If that is
    None nothing is launched: the work is done or empty."""
    known = signature(*given)
    prepared = find(table, options, known)
    if prepared is None:
        prepared = prepare()
        if prepared is None:
            return
        remember(table, options, known, prepared)
    launch(prepared, *given)
