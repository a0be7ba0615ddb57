"""Packaged kernels: the default ones, compiled by the NVRTC that the tests ran with.

So a fresh machine compiles nothing for them and needs no NVRTC, and no other compiler stands between a user and a
kernel that was tested. Knows only bytes. Invariant: a kernel is found by its text, options and hints; damaged files and
files from other sources are ignored.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent / "kernels"

_CONTENTS = "contents.json"


class Contents(NamedTuple):
    """The packaged kernels' contents.

    Attributes:
        nvrtc_version: the compiler's.
        kernels: how many.
        size_bytes: in total.
    """

    nvrtc_version: str
    kernels: int
    size_bytes: int


def contents() -> Contents | None:
    """None where there are no packaged kernels: in a checkout, or installed from sources."""
    return _read_contents(DIRECTORY)


@cache
def _read_contents(directory: Path) -> Contents | None:
    try:
        return Contents(**json.loads((directory / _CONTENTS).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def get(identity: bytes) -> bytes | None:
    """The packaged cubin with this `jit.identity`, or None."""
    try:
        entry = _path(DIRECTORY, identity).read_bytes()
    except OSError:
        return None
    return checked(identity, entry)


def write(cubins: Mapping[bytes, bytes], nvrtc_version: str, directory: Path) -> Contents:
    """Fill `directory`, which must not exist, with cubins by identity.

    Raises:
        FileExistsError: there is such a directory.
    """
    directory.mkdir(parents=True)
    for identity, cubin in cubins.items():
        _path(directory, identity).write_bytes(with_checksum(identity, cubin))
    made = Contents(nvrtc_version, len(cubins), sum(map(len, cubins.values())))
    (directory / _CONTENTS).write_text(json.dumps(made._asdict(), indent=1) + "\n")
    return made


def _path(directory: Path, identity: bytes) -> Path:
    return directory / f"{identity.hex()}.cubin"


CHECKSUM_BYTES = hashlib.sha256().digest_size


def with_checksum(key: bytes, cubin: bytes) -> bytes:
    """A cache entry: the cubin followed by its checksum, which ELF tools ignore."""
    return cubin + _checksum(key, cubin)


def checked(key: bytes, entry: bytes) -> bytes | None:
    """The cubin in an entry; None if truncated, damaged or stored under another key."""
    cubin = entry[:-CHECKSUM_BYTES]
    return cubin if entry[-CHECKSUM_BYTES:] == _checksum(key, cubin) else None


def _checksum(key: bytes, cubin: bytes) -> bytes:
    return hashlib.sha256(key + cubin).digest()
