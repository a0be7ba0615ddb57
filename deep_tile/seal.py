"""Checksums that follow a cubin in its file: jit.py's cache and packaged.py write and read them.

Tools that read the ELF file do not look behind it. Invariant: what `opened` returns was sealed under this very key.
"""

import hashlib

SEAL_BYTES = hashlib.sha256().digest_size


def sealed(key: bytes, cubin: bytes) -> bytes:
    """An entry: the cubin and its seal."""
    return cubin + _seal(key, cubin)


def opened(key: bytes, entry: bytes) -> bytes | None:
    """The cubin of an entry; None where it is torn, damaged or of another key."""
    cubin = entry[:-SEAL_BYTES]
    return cubin if entry[-SEAL_BYTES:] == _seal(key, cubin) else None


def _seal(key: bytes, cubin: bytes) -> bytes:
    return hashlib.sha256(key + cubin).digest()
