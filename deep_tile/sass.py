"""A kernel's machine code: whether its warps stay together, and better scheduling hints where ptxas's cost speed.

Called by jit.py for every cubin that it compiles; knows only bytes. Hints change when an instruction is issued, never
what it computes.

Warps that the compiler thinks can fall apart wait lane by lane, and hung before a WGMMA, which wants all of them. Its
code says so in two ways: by WARPSYNC, and by waiting at a barrier whose address is in an ordinary register, where each
lane could have another.

A math warp promotes a block by a run of FFMAs, one for each accumulator: sum += scale * block. In kernels with WGMMA,
ptxas 13.0 has every second one of them yield, so that other warps go first, and then read the scale from the register
file again. The first half of a run needs that, because there the other warpgroup begins its WGMMAs: 128x256 takes 5 to
20 % longer if those FFMAs do not yield, 128x224 up to 28 %. The second half only gets slower. With hints to neither
yield nor read the scale again there, 128x256 in clusters takes 1.5 % less time, 128x224 in clusters 2.7 %, 128x128
0.7 %; other tiles of 128 rows change by -1.1 to +0.6 %, those of 64 rows by -1.7 to +1.4 %, most of it noise, 0 in the
mean at m <= 128 (H200, NVRTC 13.0.88, 2026-11-22; docs/experiments.md has the table).

Where sums are integers, FFMAs and conversions take turns, and ptxas has none of them yield. The FFMAs of the first half
are then told to: 128x256 takes 17 % less time by that, 256x128 15 %, 128x192 8 %, 128x128 4 % (4096x7168x2048; H200,
NVRTC 13.0.88, 2026-11-25). Runs whose conversions all come first are left alone.

Where the bits are is told by Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (2018),
2.1, and holds for Hopper. That FFMAs between WGMMAs deserve other hints than ptxas gives them was found by the authors
of DeepGEMM.
"""

import struct
from collections.abc import Iterator

TESTED_NVRTC = ("12.9", "13.0", "13.1", "13.2", "13.3", "13.4", "13.5")
"""Versions with which tests/test_compilers.py finds what is said here: all kernels uniform, and the runs of FFMAs."""

# An instruction is two words of eight bytes.

_OPCODE_MASK, _FFMA = 0xFFF, 0x223
"""Of the lower word: a fused multiply-add of registers."""

_DESTINATION = 16
_FIRST_OPERAND = 24
_REUSE_OF_OPERAND = {_FIRST_OPERAND: 1 << 58, 32: 1 << 59}
"""Of the lower word, where a register's number is: the destination's, those of the two factors. A factor's flag in the
upper word keeps it for the next instruction, if that reads the same register as the same factor."""

_NO_YIELD = 1 << 45
_REUSE = 0b111 << 58
"""Of the upper word: what an instruction that yields has not, and flags of all three operands, which others then took
the place of."""

_CONVERSION = 0x245
"""Of the lower word: I2FP, an integer's value in FP32."""

_WAIT = 0x5A7
"""SYNCS.PHASECHK, of mbarrier.try_wait: its first operand is part of the barrier's address, or the zero register."""

_WARPSYNC_MASK, _WARPSYNC = 0x1FF, 0x148
"""WARPSYNC in every form: the three upper bits of an opcode say where operands are."""

_ZERO_REGISTER = 255

_LARGEST_GAP = 8
"""Other instructions between two FFMAs of one run."""

_SHORTEST_RUN = 16
"""Of those that are promotions: the narrowest tile, of 16 columns, has 8 accumulators, and its hints do not matter."""


def divergence(cubin: bytes) -> tuple[str, ...]:
    """Instructions by which ptxas provides for warps that fall apart, with their addresses; none in a uniform kernel.

    Of a kernel that waits at barriers: in others, such as the casts, warps may fall apart.

    Args:
        cubin: a whole ELF file for sm_90a.
    """
    found, waits = [], 0
    for section in code_sections(cubin):
        for instruction, low in enumerate(memoryview(cubin)[section].cast("Q")[::2]):
            at = f"at 0x{16 * instruction:x}"
            if low & _WARPSYNC_MASK == _WARPSYNC:
                found.append(f"WARPSYNC {at}")
            elif low & _OPCODE_MASK == _WAIT:
                waits += 1
                if _register(low, _FIRST_OPERAND) != _ZERO_REGISTER:
                    found.append(f"wait through R{_register(low, _FIRST_OPERAND)} {at}")
    return tuple(found) if waits else ()


def quicken_promotion(cubin: bytes) -> bytes:
    """`cubin` with the second half of each run of FFMAs neither yielding nor reading a factor twice, and the first half
    yielding where none does.

    Args:
        cubin: a whole ELF file for a GPU of compute capability 7.0 to 9.0.
    """
    code = bytearray(cubin)
    for section in code_sections(cubin):
        words = memoryview(code)[section].cast("Q")
        for run in _runs(words):
            half = len(run) // 2
            if _converts(words, run):
                for instruction in run[:half]:
                    words[2 * instruction + 1] &= ~(_NO_YIELD | _REUSE)
            for instruction in run[half:]:
                words[2 * instruction + 1] |= _NO_YIELD | _reuse_flags(words, instruction)
    return bytes(code)


def _converts(words: memoryview, run: list[int]) -> bool:
    """Whether integers are promoted: then about as many conversions as FFMAs stand there."""
    between = words[2 * run[0] : 2 * run[-1] : 2]
    return sum(low & _OPCODE_MASK == _CONVERSION for low in between) > len(run) // 2


def code_sections(cubin: bytes) -> Iterator[slice]:
    """Bytes of the ELF file that are instructions."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    header_bytes, count, names_section = struct.unpack_from("<HHH", cubin, 58)

    def header(section: int) -> tuple[int, int, int]:
        at = headers + section * header_bytes
        return *struct.unpack_from("<I", cubin, at), *struct.unpack_from("<QQ", cubin, at + 24)

    _, names, _ = header(names_section)
    for section in range(count):
        name, begin, size = header(section)
        if cubin.startswith(b".text.", names + name):
            yield slice(begin, begin + size)


def _runs(words: memoryview) -> list[list[int]]:
    """Instructions by number: FFMAs that follow each other closely."""
    runs: list[list[int]] = []
    for instruction, low in enumerate(words[::2]):
        if low & _OPCODE_MASK != _FFMA:
            continue
        if not runs or instruction - runs[-1][-1] > _LARGEST_GAP + 1:
            runs.append([])
        runs[-1].append(instruction)
    return [run for run in runs if len(run) >= _SHORTEST_RUN]


def _reuse_flags(words: memoryview, instruction: int) -> int:
    """Flags of the factors that the next instruction reads too, if that is an FFMA."""
    following = 2 * instruction + 2
    if following >= len(words) or words[following] & _OPCODE_MASK != _FFMA:
        return 0
    low, next_low = words[2 * instruction], words[following]
    lost = (_register(low, _DESTINATION), _ZERO_REGISTER)
    flags = 0
    for place, flag in _REUSE_OF_OPERAND.items():
        factor = _register(low, place)
        if factor == _register(next_low, place) and factor not in lost:
            flags |= flag
    return flags


def _register(low: int, place: int) -> int:
    return low >> place & 0xFF
