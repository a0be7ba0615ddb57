"""The command line: `python -m deep_tile`, or `deep-tile` where the package is installed.

It adds tables and exit codes and decides nothing about kernels. Invariant: results go to stdout, progress and errors to
stderr; the exit code is 0 when all is well, 1 when a check fails or something is missing, 2 for arguments that make no
sense. Only commands that multiply import torch, which takes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

import deep_tile
from deep_tile.discovery import OPS, PRIVATE
from deep_tile.kinds import ACTIVATIONS, BIASES, EVERY_KIND, FAMILIES, GROUPINGS, LAYOUTS, OUTPUTS, PACKED, RAW
from deep_tile.method import calls, report
from deep_tile.method.roofline import Derivation
from deep_tile.progress import track_progress
from deep_tile.select import training
from deep_tile.select.choose import bucket_key
from deep_tile.select.hardware import DTYPE_BYTES, H200
from deep_tile.tools.arguments import (
    FIRST_CANDIDATES,
    Parser,
    add_all,
    add_hardware,
    hardware_of,
    positive,
    sizes,
    weight_or_sizes,
)
from deep_tile.tools.compile import clear_cache, compile_kernels, show_cache
from deep_tile.tools.console import PROGRAM, exit_code, new_console, tflops_text
from deep_tile.tools.doctor import doctor

if TYPE_CHECKING:
    from deep_tile.tools.tune import Tuned

_GROUPINGS = tuple(grouping for grouping in GROUPINGS if grouping != "none")

TOKENS_TO_TUNE = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""m values that `tune` tries for a weight."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad arguments raise SystemExit(2)."""
    return exit_code(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    options, rest = parser.parse_known_args(_joined(arguments))
    if rest and options.run is not run_script:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options.run(options)


# ---- explain: which kernel a problem gets, and why


def _joined(arguments: list[str]) -> list[str]:
    """With `explain CLASS` as one word, where a script of its own explains that kernel class."""
    name = " ".join(arguments[:2])
    return [name, *arguments[2:]] if name in SCRIPTS else arguments


def explain(options: argparse.Namespace) -> int:
    if options.train and (options.call, options.groups, options.dtype) not in ((None, None, None), (None, None, "fp8")):
        options.refuse("--train compares the FP8 and BF16 layers of a weight; leave --call, --groups and --dtype out")
    names = ["call", "dtype", "num_sms", "output", "bias", "activation", "layout", "grouping", "groups", "heads"]
    asked = {name: getattr(options, name) for name in names}
    derived = calls.derivation(*options.shape, hardware=hardware_of(options, options.dtype or "fp8"), **asked)
    if options.plot and not isinstance(derived, Derivation):
        options.refuse("--plot draws products; it is not for groups and other calls")
    if options.plot:
        report.plot(derived, options.plot)  # first: it may refuse the file
    step = training.predict(*options.shape) if options.train else None
    if options.json:
        of_step = {} if step is None else {"training": {**step._asdict(), "pays": step.pays}}
        print(json.dumps(calls.as_data(derived) | of_step, indent=2))
    else:
        calls.show(derived, new_console(), None if options.all else FIRST_CANDIDATES)
        if step is not None:
            print(_of_training(step))
    if options.plot:
        print(f"{PROGRAM}: wrote {options.plot}", file=sys.stderr)
    return 0


def _of_training(step: training.Prediction) -> str:
    times = f"{step.fp8_us:.0f} us in FP8, casts included, and {step.bf16_us:.0f} in BF16"
    verdict = "converts this layer" if step.pays else "leaves this layer in BF16"
    return f"Training: forward and backward are predicted to take {times} on an H200.\n`train.convert` {verdict}."


# ---- tune: the fastest config, measured


def tune(options: argparse.Namespace) -> int:
    asked = _shapes_to_tune(options) if options.groups is None else _groups_to_tune(options)
    available, reason = deep_tile.is_available()
    if not available:
        raise RuntimeError(f"tune times kernels, so it needs a Hopper GPU: {reason}")
    from deep_tile.tools import tune as search

    how = {"kind": options.kind, "repeats": options.repeats, "track": track_progress}
    if options.groups is None:
        results = search.tune(asked, output=options.output, wide=options.wide, **how)
    else:
        results = [found for groups in asked for found in search.tune_groups(*groups, **how)]
    place = search.store(results)
    console = new_console()
    console.print(_tuned_table(results), "", f"Kept in {place}; the selector takes them from there from now on.")
    wrong = [(bucket_key(result.problem), *found) for result in results for found in result.wrong.items()]
    for bucket, config, error in wrong:
        print(f"{PROGRAM}: {config.name} at {bucket}: relative error {error:.2e}; left out", file=sys.stderr)
    return 1 if wrong else 0


def _shapes_to_tune(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """(m, n, k) from the command line and the file; for a weight [n, k], several m."""
    outputs = EVERY_KIND[options.kind].outputs
    if options.output not in (None, *outputs):
        options.refuse(f"results of {options.kind} are {', '.join(outputs)}; --output is {options.output}")
    if options.grouping is not None:
        options.refuse("--grouping is for groups; give --groups G, too")
    given = [*options.shape, *options.shapes]
    if not given:
        options.refuse("give shapes MxNxK, weights NxK, or --shapes FILE")
    return [shape for one in given for shape in ([(m, *one) for m in TOKENS_TO_TUNE] if len(one) == 2 else [one])]


def _groups_to_tune(options: argparse.Namespace) -> list[tuple[str, int, list[int], int, int]]:
    """Layout, group count, rows per group, n and k: one entry per weight."""
    if options.shapes or options.wide or options.output:
        options.refuse("--shapes, --wide and --output are not for groups")
    if not options.shape or any(len(shape) == 2 for shape in options.shape):
        options.refuse("give RxNxK beside --groups, R being the rows of a group, in the mean")
    layout, rows = options.grouping or _GROUPINGS[0], {}
    for mean, *weight in options.shape:
        rows.setdefault(tuple(weight), []).append(mean)
    from deep_tile.method import described

    sizes = dict(zip(("m", "n", "k"), options.shape[0], strict=True)) | {"groups": options.groups}
    try:
        described.product(sizes, H200.num_sms, dtype=options.kind, grouping=layout)
    except ValueError as error:
        options.refuse(str(error))
    return [(layout, options.groups, means, *weight) for weight, means in rows.items()]


def _tuned_table(results: Sequence[Tuned]) -> Table:
    names = ("m up to", "n", "k") if results[0].problem.groups is None else ("groups", "rows up to", "n", "k")
    columns = (*names, "us", "TFLOPS", "chosen before", "us before", "gain", "tried")
    table = report.table("config", *columns, spare=("tried", "chosen before", "TFLOPS"))
    for problem, (config, us), before, before_us, tried, _ in results:
        was = "the same" if config == before else before.name
        many = [problem.m] if problem.groups is None else problem.groups[1:]
        tflops = tflops_text(prod(many), *problem.weight, us)
        numbers = f"{us:.1f}", tflops, was, f"{before_us:.1f}", f"{before_us / us - 1:.1%}"
        table.add_row(config.name, *map(str, (*many, *problem.weight)), *numbers, str(tried))
    return table


# ---- scripts of a checkout, which the installed package does without

CHECKOUT = Path(__file__).resolve().parents[2]

_EXPLAIN_KERNELS = "examples/explain_kernels.py"

SCRIPTS = {
    "bench": ("benchmarks/bench_gemm.py", "time fp8_gemm against other libraries"),
    "demo": ("examples/demo.py", "DeepSeek-V3's layers: multiplied, checked and timed, or compiled without a GPU"),
    "explain attention": (_EXPLAIN_KERNELS, "how a fused attention kernel is tiled, and why"),
    "explain convolution": (_EXPLAIN_KERNELS, "how a convolution is tiled as an implicit matrix product, and why"),
    "explain elementwise": (_EXPLAIN_KERNELS, "how to launch an element-wise kernel, and why"),
    "explain reduction": (_EXPLAIN_KERNELS, "how to launch a kernel that reduces rows, and why"),
}
"""Path and description by command."""


def run_script(options: argparse.Namespace) -> int:
    """Runs in its own process: the package imports nothing from the checkout."""
    path, _ = SCRIPTS[options.script]
    if not (CHECKOUT / path).is_file():
        raise RuntimeError(
            f"{path} is not part of the installed package; run `python -m deep_tile {options.script}`, or the script "
            "itself, in a checkout of deep_tile's sources"
        )
    search_path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    _, *kernel_class = options.script.split()
    command = [sys.executable, CHECKOUT / path, *kernel_class, *options.rest]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": search_path}).returncode


# ---- arguments


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="FP8 block-scaled matrix products on NVIDIA Hopper GPUs.")
    parser.add_argument("--version", action="version", version=f"deep_tile {deep_tile.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, **options: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, **options)
        command.set_defaults(run=run)
        return command

    command = add("explain", explain, "which kernel a product of [M, K] and [N, K], or another call, gets, and why")
    command.add_argument("shape", type=sizes, metavar="MxNxK", help="with --groups, M is the mean rows of a group")
    text = "an operation's name; default: the product of such operands"
    command.add_argument("--call", choices=[name for name in OPS if name not in PRIVATE], metavar="NAME", help=text)
    command.add_argument("--groups", type=positive, metavar="G", help="how many groups, or sequences of a paged cache")
    command.add_argument("--heads", type=positive, metavar="H", help="heads of a query of logits")
    _add_grouping(command, default=None)
    kinds = dict.fromkeys((*DTYPE_BYTES, "fp32", *EVERY_KIND))
    command.add_argument("--dtype", choices=kinds, help="of the operands, or kind; default: fp8, or the call's first")
    command.add_argument("--num-sms", type=positive, help="SMs to use; default: all of the hardware's")
    command.add_argument("--output", choices=OUTPUTS, help="format of the result; default: the kind's")
    command.add_argument("--bias", choices=BIASES, default="none", help="format of a bias; default: %(default)s")
    command.add_argument("--activation", choices=ACTIVATIONS, default="none", help="default: %(default)s")
    text = "of operands of 16 bits, by the names of BLAS; default: %(default)s, both along K"
    command.add_argument("--layout", choices=LAYOUTS, default="nt", help=text)
    add_all(command)
    text = "write the roofline as an image, a PNG unless its name says otherwise"
    command.add_argument("--plot", type=report.picture_path, metavar="FILE", help=text)
    text = "of a linear layer of M tokens and a weight [N, K]: what training it in FP8 gains"
    command.add_argument("--train", action="store_true", help=text)
    command.add_argument("--json", action="store_true", help="everything, as JSON")
    add_hardware(command, "rate of the dtype")
    command.set_defaults(refuse=command.error)

    command = add("compile", compile_kernels, "compile every default kernel, fill the cache, show registers and spills")
    command.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="at once; default: %(default)s")
    command.add_argument(
        "--shape",
        type=_weight_shape,
        action="append",
        default=[],
        metavar="MxNxK",
        help="only the kernels that a weight [N, K] needs for up to M tokens; may be repeated",
    )
    text = "only the kernels of grouped products whose groups lie so, which are the same for all shapes"
    command.add_argument("--grouping", choices=_GROUPINGS, help=text)
    text = "SMs of the GPU; default: %(default)s, an H200"
    command.add_argument("--num-sms", type=positive, default=H200.num_sms, help=text)
    command.set_defaults(refuse=command.error)

    command = add("doctor", doctor, "what works on this machine, and what to do about the rest")
    command.add_argument("--measure", action="store_true", help="measure the GPU's bandwidths, latencies and rates")
    command.add_argument("--json", action="store_true", help="as JSON")

    command = add("cache", show_cache, "the directory of compiled kernels")
    actions = command.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("info", help="where it is and what it holds").set_defaults(run=show_cache)
    actions.add_parser("clear", help="remove every kernel from it").set_defaults(run=clear_cache)

    command = add("tune", tune, "time configs on this GPU and keep the fastest for each shape")
    tokens = ", ".join(map(str, TOKENS_TO_TUNE))
    text = f"a product, or NxK for a weight with M of {tokens}; with --groups, M is the mean rows of a group"
    command.add_argument("shape", type=weight_or_sizes, nargs="*", metavar="MxNxK", help=text)
    text = "with a line MxNxK for each product"
    command.add_argument("--shapes", type=_shapes_file, default=[], metavar="FILE", help=text)
    text = "of the product; those of other FP8 formats share its results; default: %(default)s"
    command.add_argument("--kind", choices=(*FAMILIES, *PACKED), default="fp8", help=text)
    command.add_argument("--output", choices=(*OUTPUTS, RAW), help="format of the result; default: the kind's")
    command.add_argument("--wide", action="store_true", help="also other numbers of stages and store buffers")
    command.add_argument("--groups", type=positive, metavar="G", help="of grouped products: how many groups")
    _add_grouping(command, default=None)
    command.add_argument(
        "--repeats",
        type=_samples,
        default=20,
        help="samples of each config that may be the fastest; default: %(default)s",
    )
    command.set_defaults(refuse=command.error)

    for name, (path, text) in SCRIPTS.items():
        add(name, run_script, f"{text}: {path} of a checkout", add_help=False).set_defaults(script=name)
    return parser


def _add_grouping(command: argparse.ArgumentParser, default: str | None) -> None:
    text = f"one after the other, with rows of their own, or along K, for gradients; default: {_GROUPINGS[0]}"
    command.add_argument("--grouping", choices=_GROUPINGS, default=default, help=f"how groups lie: {text}")


def _samples(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is too few for a median with a spread; give 2 or more")
    return int(text)


def _shapes_file(path: str) -> list[tuple[int, int, int]]:
    """(m, n, k) from each line that is neither empty nor a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read: {error}") from None
    shapes = [sizes(text) for line in lines if (text := line.split("#")[0].strip())]
    if not shapes:
        raise argparse.ArgumentTypeError(f"{path!r} has no line MxNxK, such as 4096x7168x2048")
    return shapes


def _weight_shape(text: str) -> tuple[int, int, int]:
    """(n, k, most m)."""
    max_m, n, k = sizes(text)
    supported, reason = deep_tile.supports(max_m, n, k)
    if not supported:
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}")
    return n, k, max_m
