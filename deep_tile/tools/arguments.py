"""Arguments that several commands share: types with clear errors, and `explain`'s hardware.

No GPU, no torch.
"""

import argparse
from math import isfinite, nan

from deep_tile.select import hardware
from deep_tile.select.hardware import PRESETS, Hardware

FIRST_CANDIDATES = 10
"""Candidates that `explain` shows without --all."""

KB = 1024

NUMBERS = (1e-6, 1e9)
"""Limits for rates, times and bytes, so that products and quotients stay finite."""

MOST_SMEM_KB = 4096
"""More shared memory than that is bytes, taken for KB."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer below 2**31")
    return int(text)


def count(text: str) -> int:
    """An element count, perhaps beyond INT32."""
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer below 2**63")
    return int(text)


def sizes(text: str, names: str = "MxNxK", example: str = "4096x7168x2048") -> tuple[int, ...]:
    """Positive sizes with an x between them, as many as are named: how every command writes shapes."""
    parts = text.split("x")
    if len(parts) != len(names.split("x")) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not {names}, such as {example}")
    return tuple(map(positive, parts))


def weight_or_sizes(text: str) -> tuple[int, ...]:
    """A weight's NxK, or MxNxK."""
    return sizes(text, "NxK", "7168x2048") if text.count("x") == 1 else sizes(text)


def positive_number(text: str) -> float:
    number = _number(text)
    smallest, largest = NUMBERS
    if not smallest <= number <= largest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number from {smallest:g} to {largest:g}")
    return number


def not_negative_number(text: str) -> float:
    number = _number(text)
    if not (isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor a positive, finite number")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def smem_bytes(text: str) -> int:
    kilobytes = positive_number(text)
    if kilobytes > MOST_SMEM_KB or kilobytes * KB < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in KB of {KB} bytes; Hopper has 227")
    return int(kilobytes * KB)


def add_all(command: argparse.ArgumentParser) -> None:
    command.add_argument("--all", action="store_true", help=f"every candidate, not only the first {FIRST_CANDIDATES}")


def add_hardware(command: argparse.ArgumentParser, rate: str) -> None:
    """Add --hardware and options that replace its numbers; `rate` describes --tflops."""
    text = f"one of {', '.join(PRESETS)}, or the driver's name; default: %(default)s"
    command.add_argument("--hardware", default="H200", help=text)
    group = command.add_argument_group("numbers of a GPU that has no preset", "in place of those of --hardware")
    text = f"{rate} in TFLOPS, dense, as it is reached: no share of it is taken off"
    group.add_argument("--tflops", type=positive_number, metavar="TFLOPS", help=text)
    group.add_argument("--bandwidth", type=positive_number, metavar="TB/S", help="of HBM, in TB/s, as it is reached")
    group.add_argument("--latency", type=positive_number, metavar="NS", help="of one read of an idle HBM, in ns")
    text = "how many; rates of tensor cores and L2 that are not given are in proportion"
    group.add_argument("--sms", type=positive, metavar="SMS", help=text)
    group.add_argument("--registers", type=positive, metavar="N", help="of 32 bits, per SM; Hopper has 65536")
    text = f"shared memory that a block may use, in KB of {KB} bytes; Hopper has 227"
    group.add_argument("--smem", type=smem_bytes, metavar="KB", help=text)


def hardware_of(options: argparse.Namespace, dtype: str) -> Hardware:
    """For `add_hardware`'s options; --tflops is dtype's rate. Raises ValueError for unknown hardware."""
    return hardware.for_device(options.hardware).with_numbers(
        dtype=dtype,
        tflops=options.tflops,
        bandwidth=options.bandwidth,
        latency=options.latency,
        sms=options.sms,
        registers=options.registers,
        smem_bytes=options.smem,
    )
