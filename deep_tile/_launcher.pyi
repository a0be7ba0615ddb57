"""The launcher in C (csrc): what its functions take, return and raise.

It knows no operation: parameters are bytes, tensors are told by their number. Whatever the driver refuses is a
RuntimeError. tests/test_launcher.py holds names and parameters to those of the compiled module.
"""

from typing import final

Entry = tuple[int | tuple[int, ...], ...]

@final
class Kernel:
    """A kernel loaded on one GPU; made by load()."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> int:
        """Index of the GPU that it is loaded on."""

@final
class Launch:
    """All of a launch but the addresses and the stream; made by prepare()."""

Prepared = Launch | tuple[Launch, ...]

def load(cubin: bytes, name: str, smem_bytes: int, device: int) -> Kernel:
    """Load kernel `name` on GPU `device`, with `smem_bytes` of dynamic shared memory per block. The GIL is released
    meanwhile.

    Raises:
        ValueError: a torn cubin or a negative number.
    """

def prepare(
    kernel: Kernel,
    /,
    *,
    grid: int,
    cluster: int,
    threads: int,
    params: bytes,
    names: tuple[str, ...],
    pointers: tuple[Entry, ...],
    maps: tuple[Entry, ...],
    fixed_maps: tuple[Entry, ...],
    pdl: bool,
) -> Launch:
    """Everything about a launch but the addresses of its tensors.

    Args:
        grid, cluster: blocks, and blocks per cluster.
        threads: per block.
        params: the kernel's one argument, at most 4096 bytes.
        names: of 1 to 9 tensors.
        pointers: (offset, tensor, skip) for each place in params where the address goes of what lies `skip` bytes into
            a tensor.
        maps: (offset, tensor, element, sizes, strides_bytes, box, swizzle, l2_promotion, skip) for each where a tensor
            map of 128 bytes goes, in the driver's numbers; sizes and box begin with the inner dimension, which has no
            stride.
        fixed_maps: as maps, with an address that stays instead of the tensor.
        pdl: a programmatic launch.

    Raises:
        ValueError, TypeError: the field, what was seen and what is wanted.
    """

def launch(prepared: Prepared, addresses: tuple[int, ...], stream: int, /) -> None:
    """Launch on `stream`, which is an address, on the device of the tensors, whose `addresses` are given.

    Raises:
        TypeError: no address.
        ValueError: 0, or an address that TMA cannot use: of a tensor that has a map, no multiple of 16.
    """

def read_tensors_of(
    type: type,
    object_offset: int = 0,
    keys_offset: int = 0,
    plain: int = 0,
    storage_offset: int = 0,
    begin_offset: int = 0,
    bytes_offset: int = 0,
    /,
) -> bool:
    """Read tensors of exactly this type from now on. False, and they are left to Python, where the type lacks DLPack's
    C exchange API.

    Args:
        object_offset, keys_offset: in bytes. The address of the object that holds a tensor's keys stands so far into
            the Python object, and the keys, a word of 64 bits, so far into that: the caller vouches for it.
        plain: bits of a plain tensor's keys; a tensor with others is left to Python, too. 0: tensors of this type have
            no keys, and storages are not looked at.
        storage_offset, begin_offset, bytes_offset: the address of the object that stands for a tensor's storage stands
            so far into the one that holds the keys, and where its memory begins and how many bytes there are, words of
            64 bits, so far into that. A tensor that ends beyond them is left to Python, too. 0, all of them: storages
            are not looked at.

    Raises:
        ValueError: more types than there is room for.
    """

def reads(*tensors: object) -> bool:
    """Whether every tensor can be read here: it is of a known type, plain, and has memory."""

def signature(*tensors: object) -> bytes | None:
    """Device, dtypes, shapes, strides, and of each tensor whether it is aligned to 16 bytes. None where a tensor cannot
    be read here, which Python then has to look at."""

def launch_known(table: dict[tuple, tuple[tuple, dict[bytes, Prepared]]], options: tuple, /, *tensors: object) -> bool:
    """Launch what is known for a call of these options and tensors, on the current stream of their device.

    `table` holds for every tuple of options (options, launches). False, and nothing has happened, where it holds none,
    where the options met are equal but of other types, or where a tensor cannot be read here; nor are the launches of a
    tuple made in a stream that is being captured, since what lies between them may be of other calls, too. Raises as
    launch() does.
    """

def watch_keys(address: int, first: int, second: int, third: int, /) -> None:
    """Ask for these dispatch keys from now on, by torch's function at `address`, which takes a number of 16 bits and
    returns a bool: the caller vouches for it. 0: ask nothing."""

def is_watched() -> bool:
    """Whether torch's calls in this thread pass one of the keys."""

def driver_version() -> int:
    """The CUDA version that the driver supports, 1000 * major + 10 * minor.

    Raises:
        RuntimeError: there is no driver.
    """
