"""`explain` for kernels that are no matrix product: attention, convolution, element-wise kernels and reductions.

    python examples/explain_kernels.py attention --head-dim 128

Tiles, walls and choices come from other_kernels.py beside this file and deep_tile/select/streaming.py; this file has
arguments and tables. No GPU, no torch.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from other_kernels import (
    Attention,
    Convolution,
    attention_candidates,
    convolution_candidates,
    derive_attention,
    derive_convolution,
)
from rich.console import Console
from rich.table import Table

from deep_tile.method import report
from deep_tile.select.hardware import DTYPE_BYTES, Hardware
from deep_tile.select.streaming import (
    Elementwise,
    Reduction,
    derive_elementwise,
    derive_reduction,
    elementwise_candidates,
    reduction_candidates,
)
from deep_tile.tools.arguments import (
    FIRST_CANDIDATES,
    Parser,
    add_all,
    add_hardware,
    count,
    hardware_of,
    not_negative_number,
    positive,
    positive_number,
)
from deep_tile.tools.console import PROGRAM, exit_code, new_console
from deep_tile.walls import walls_hit

Tile = Attention | Convolution | Elementwise | Reduction


class KernelClass(NamedTuple):
    """A kernel class that `explain` takes instead of MxNxK.

    Attributes:
        arguments: argparse options by parameter name of `derive`.
        derive, candidates: the choice, and everything it is chosen from.
        unit, name: what a candidate is, for the table's head, and a candidate's name.
        columns: table columns beside the common ones.
        walls: names of a candidate's walls, in order.
        why: the rule behind the choice, printed after its name.
        ranked: whether the best candidates come first; otherwise all are shown.
        rate: the dtype of --tflops; None: --dtype.
    """

    text: str
    arguments: dict[str, dict[str, Any]]
    derive: Callable[..., Tile]
    candidates: Callable[..., list[Tile]]
    unit: str
    name: Callable[[Any], str]
    columns: dict[str, Callable[[Any], str]]
    walls: tuple[str, ...]
    caption: str
    why: Callable[[Any], str]
    ranked: bool = True
    rate: str | None = None


# ---- the classes


def _why_elementwise(launch: Elementwise) -> str:
    if launch.unroll >= launch.stages_min:
        return f"has the fewest loads per thread that keep the memory busy, which takes {launch.stages_min}"
    return (
        f"has fewer loads per thread than the {launch.stages_min} that keep the memory busy: more have no work or room"
    )


def _why_reduction(launch: Reduction) -> str:
    if launch.resident:
        return "are the fewest threads that keep a row in registers: it is read once"
    return "are the most threads, and cannot keep a row in registers: it is read twice"


def _required(text: str, kind: Callable[[str], float] = positive) -> dict[str, Any]:
    return {"type": kind, "required": True, "help": text}


def _optional(text: str, default: Any, **options: Any) -> dict[str, Any]:
    return {"default": default, "help": f"{text}default: %(default)s", **options}


_DTYPE = _optional("of the operands; ", "bf16", choices=tuple(DTYPE_BYTES))

_BYTES = {
    "read_bytes": _required("of all inputs, per element: 2 for BF16", positive_number),
    "write_bytes": _required("of all outputs, per element; may be 0", not_negative_number),
}

_STREAMING_COLUMNS = {
    "bytes in flight": lambda launch: str(launch.bytes_in_flight),
    "us": lambda launch: f"{launch.time_us:.1f}",
}

_STREAMING: dict[str, Any] = {
    "walls": ("registers", "capacity", "HBM", "Little's law"),
    "caption": "stages: loads of a thread that are under way, least by Little's law, used, most by registers",
    "ranked": False,
    "rate": "fp32",
}

CLASSES = {
    "attention": KernelClass(
        "how many queries and keys a fused attention kernel multiplies at a time, and why",
        {
            "head_dim": _required("elements of a head, a multiple of 16"),
            "dtype": _DTYPE,
            "block_q": {"type": positive, "help": "only tiles of so many queries, a multiple of 64"},
        },
        derive_attention,
        attention_candidates,
        "queries x keys",
        lambda tile: f"{tile.block_q}x{tile.block_kv}",
        {"warpgroups": lambda tile: str(tile.math_warpgroups)},
        ("registers", "capacity", "L2, the tile", "latency"),
        "registers: output, scores and scores as operands; stages: blocks of K and V, least by latency, used, most by "
        "capacity",
        lambda _: (
            "is the largest block of scores that passes the register and the capacity wall; each block costs a "
            "softmax's reductions and barriers"
        ),
    ),
    "convolution": KernelClass(
        "how a convolution is tiled as an implicit matrix product, and why",
        {
            "batch": _optional("images; ", 1, type=positive),
            "height": _required("of the input"),
            "width": _required("of the input"),
            "channels": _required("of the input"),
            "filters": _required("channels of the output"),
            "kernel_size": _optional("rows and columns of the window; ", 3, type=positive),
            "stride": _optional("of the window; ", 1, type=positive),
            "dtype": _DTYPE,
        },
        derive_convolution,
        convolution_candidates,
        "pixels x filters",
        lambda tile: f"{tile.block_m}x{tile.block_n}",
        {
            "us": lambda tile: f"{tile.time_us:.1f}",
            "waves": lambda tile: str(tile.waves),
            "input": lambda tile: f"{tile.input_height}x{tile.input_width}",
            "gathered": lambda tile: f"{tile.intensity_gathered:.0f}",
        },
        ("registers", "capacity", "L2, gathered anew", "L2, kept with its halo", "shared memory, WGMMA", "latency"),
        "us: estimated, where SMs share no bytes of L2; input: pixels that a tile reads of an image, kept with their "
        "halo; gathered: FLOP per byte without that; stages: of filters, least by latency, used, most by capacity",
        lambda _: "has the shortest estimated time, and of those with the same time the most FLOP per byte of L2",
    ),
    "elementwise": KernelClass(
        "how to launch an element-wise kernel, and why",
        {"elements": _required("of the output", count), **_BYTES},
        derive_elementwise,
        elementwise_candidates,
        "loads x elements",
        lambda launch: f"{launch.unroll}x{launch.vector_elements}",
        {"blocks per SM": lambda launch: str(launch.blocks_per_sm), **_STREAMING_COLUMNS},
        why=_why_elementwise,
        **_STREAMING,
    ),
    "reduction": KernelClass(
        "how to launch a kernel that reduces rows and may write them anew, such as a norm or a cast, and why",
        {"rows": _required("how many", count), "columns": _required("elements of a row", count), **_BYTES},
        derive_reduction,
        reduction_candidates,
        "threads per row",
        lambda launch: str(launch.threads_per_row),
        {
            "rows per block": lambda launch: str(launch.rows_per_block),
            "blocks per SM": lambda launch: str(launch.blocks_per_sm),
            "passes": lambda launch: str(launch.passes),
            **_STREAMING_COLUMNS,
        },
        why=_why_reduction,
        **_STREAMING,
    ),
}


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain one kernel class and return the exit code; bad arguments raise SystemExit(2)."""
    parser = Parser(prog=f"{PROGRAM} explain", description="How a kernel that is no matrix product is tiled, and why.")
    commands = parser.add_subparsers(metavar="CLASS", required=True)
    for name, kernel in CLASSES.items():
        _add_arguments(commands.add_parser(name, help=kernel.text, description=kernel.text), name)
    return exit_code(lambda: explain_class(parser.parse_args(arguments)))


def _add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    kernel = CLASSES[name]
    for argument, options in kernel.arguments.items():
        command.add_argument(f"--{argument.replace('_', '-')}", **options)
    add_hardware(command, "FP32 rate outside of the tensor cores" if kernel.rate else "rate of the dtype")
    if kernel.ranked:
        add_all(command)
    command.add_argument("--json", action="store_true", help="everything, as JSON")
    command.set_defaults(kernel=name)


def explain_class(options: argparse.Namespace) -> int:
    kernel = CLASSES[options.kernel]
    asked = {name: getattr(options, name) for name in kernel.arguments if getattr(options, name) is not None}
    gpu = hardware_of(options, kernel.rate or options.dtype)
    explained = Explained(
        options.kernel, asked, gpu, kernel.derive(**asked, hardware=gpu), kernel.candidates(**asked, hardware=gpu)
    )
    if options.json:
        print(json.dumps(as_data(explained), indent=2))
    else:
        show(explained, new_console(), FIRST_CANDIDATES if kernel.ranked and not options.all else None)
    return 0


class Explained(NamedTuple):
    name: str
    asked: dict[str, Any]
    hardware: Hardware
    choice: Tile
    candidates: list[Tile]

    @property
    def kernel(self) -> KernelClass:
        return CLASSES[self.name]


def as_data(explained: Explained) -> dict[str, Any]:
    kernel, choice = explained.kernel, explained.choice
    return {
        "kernel": explained.name,
        "asked": explained.asked,
        "hardware": report.hardware_data(explained.hardware),
        "choice": kernel.name(choice),
        "why": why(explained),
        "reasons": list(choice.reasons),
        "walls": [wall._asdict() for wall in choice.walls],
        "candidates": [_candidate_data(kernel, tile) for tile in explained.candidates],
    }


def _candidate_data(kernel: KernelClass, tile: Tile) -> dict[str, Any]:
    own = {name: value for name, value in vars(tile).items() if name not in ("walls", "reasons")}
    hit = [wall.reason for wall in walls_hit(tile.walls)]
    return {"name": kernel.name(tile), **own, "intensity": tile.intensity, "stages": tile.stages, "hit": hit}


def why(explained: Explained) -> str:
    """The recommendation, and the rule that it follows."""
    kernel, choice, everything = explained.kernel, explained.choice, explained.candidates
    text = f"Recommended: {kernel.name(choice)} {kernel.unit} {kernel.why(choice)}."
    hit = sum(bool(walls_hit(tile.walls)) for tile in everything)
    return f"{text} {hit} of {len(everything)} candidates hit a wall." if hit else text


def show(explained: Explained, console: Console, most: int | None) -> None:
    gpu, choice = explained.hardware, explained.choice
    asked = ", ".join(
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in explained.asked.items()
    )
    console.print(f"{explained.name}: {asked} on {gpu.num_sms} SMs of {gpu.name}", style="bold")
    console.print()
    console.print(_wall_table(explained), "")
    console.print(_candidate_table(explained, explained.candidates[:most]), "")
    console.print(why(explained))
    for line in _decisions(choice):
        console.print(f"- {line}")


def _decisions(choice: Tile) -> Iterable[str]:
    """Reasons that are no wall's arithmetic."""
    arithmetic = [wall.reason for wall in choice.walls]
    return (reason for reason in choice.reasons if not any(known in reason for known in arithmetic))


def _wall_table(explained: Explained) -> Table:
    made = report.table("wall", "", "arithmetic", numbers=False)
    for name, wall in zip(explained.kernel.walls, explained.choice.walls, strict=True):
        made.add_row(name, report.mark(wall), wall.reason)
    return made


def _candidate_table(explained: Explained, shown: list[Tile]) -> Table:
    kernel = explained.kernel
    title = f"{len(shown)} of {len(explained.candidates)} candidates"
    common = ("FLOP/byte", "KiB", "registers", "stages", "bound by", "")
    spare = ("bound by", "FLOP/byte", *reversed(kernel.columns), "KiB")
    made = report.table(kernel.unit, *kernel.columns, *common, title=title, spare=spare)
    for tile in shown:
        made.add_row(
            kernel.name(tile),
            *(text(tile) for text in kernel.columns.values()),
            f"{tile.intensity:.3g}",
            f"{tile.smem_bytes / 1024:.1f}",
            str(tile.registers),
            f"{tile.stages_min}..{tile.stages}..{tile.stages_max}",
            tile.bound,
            _verdict(tile, explained.choice),
        )
    made.caption = kernel.caption
    return made


def _verdict(tile: Tile, choice: Tile) -> str:
    if tile == choice:
        return "recommended"
    return "; ".join(f"{wall.name} wall by {wall.value - wall.limit:.0f}" for wall in walls_hit(tile.walls))


if __name__ == "__main__":
    sys.exit(main())
