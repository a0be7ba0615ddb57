"""`explain`: which kernel a call gets, how long it takes, how far that is from the limit, and why.

A product of no more than sizes and dtype is derived without torch, all else from an operation's description
(described.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from deep_tile.config import check_sizes
from deep_tile.kinds import name_of
from deep_tile.method import answers, report
from deep_tile.method.answers import Answer
from deep_tile.method.report import Explanation
from deep_tile.method.roofline import Derivation, derive
from deep_tile.problem import GemmProblem
from deep_tile.select import tuned
from deep_tile.select.hardware import Hardware, named

if TYPE_CHECKING:
    import torch

GroupsExplanation = Explanation


def explain(
    m: int,
    n: int,
    k: int,
    *,
    call: str | None = None,
    dtype: str | torch.dtype | None = None,
    hardware: str | Hardware = "H200",
    num_sms: int | None = None,
    output: str | torch.dtype | None = None,
    bias: str | torch.dtype = "none",
    activation: str = "none",
    layout: str = "nt",
    grouping: str | None = None,
    groups: int | None = None,
    heads: int | None = None,
) -> Explanation:
    """Which kernel a call gets on a GPU, and why. No GPU is needed.

    Args:
        m, n, k: sizes in `out[m, n] = a[m, k] @ b[n, k].T`, in elements. Of groups m is the mean rows of one; of
            gradients weights are [n, k] and tokens m; of logits m queries meet n keys of k elements.
        call: an operation's name, of those in docs/operations.md. None: the first product of such operands.
        dtype: the operands', of `thin_gemm` b's: a torch.dtype or the name of a kind, as for `precompile`; by default
            the call's first, or FP8. Without a call, also a dtype that has no kernels, such as "tf32": only tiles are
            derived.
        hardware: a preset's name (H100 SXM, H100 PCIe, H200, H800, H20, GH200), the driver's name for such a GPU, or a
            `deep_tile.select.hardware.Hardware`, e.g. a preset changed by `with_numbers`.
        num_sms: SMs to use; by default all.
        output, bias: of result and bias, a torch.dtype, "bf16", "fp16" or "fp32"; by default the call's, and no bias.
        activation: as for `fp8_gemm`. Times are without activation and bias.
        layout, grouping: as for `supports`; by default K-major operands, and the call's first grouping.
        groups, heads: how many groups, or sequences of a paged cache; heads of a query of logits.

    Returns:
        JSON-ready data. `config` is the kernel's name, `why` a sentence; `walls` the problem's and the choice's, each
        {name, value, limit, unit, holds, reason}; `limits` the us of HBM and tensor cores alone; `candidates` all
        kernels in the selector's order, with predicted times in us, waves, registers, shared memory and stages_min,
        stages_max; `rejected` the tiles that hit a wall; `predicted` the call's time by components in us; `measured` a
        stored measurement or None; `hardware` every number used, with its source. Only dense products have walls.

    Raises:
        TypeError: a size is no int, or hardware or dtype no name.
        ValueError: what the call refuses; names, sizes or an operation that `explain` does not know; more SMs than
            there are; or no tile passes the hardware's walls.
    """
    asked = {"call": call, "dtype": dtype, "hardware": hardware, "num_sms": num_sms, "output": output, "bias": bias}
    asked |= {"activation": activation, "layout": layout, "grouping": grouping, "groups": groups, "heads": heads}
    return as_data(derivation(m, n, k, **asked))


def explain_groups(
    groups: int, rows: int, n: int, k: int, *, kind: str | torch.dtype = "fp8", **asked: Any
) -> GroupsExplanation:
    """`explain(rows, n, k, groups=groups, dtype=kind, ...)`; `candidates` have `rows`, a group's with padding."""
    return as_data(derivation(rows, n, k, groups=groups, dtype=kind, **asked))


def derivation(
    m: int, n: int, k: int, *, dtype=None, hardware="H200", num_sms=None, groups=None, heads=None, **made
) -> Derivation | Answer:
    """The facts behind `explain`; arguments and errors as there."""
    gpu, plain = named(hardware), {"bias": "none", "activation": "none", "layout": "nt"}
    made = {name: value for name, value in made.items() if value is not None}
    made = {name: value for name, value in made.items() if not isinstance(value, str) or value != plain.get(name)}
    if made or groups is not None or heads is not None:
        from deep_tile.method import described

        of_call = {"groups": groups, "heads": heads}
        sizes = {"m": m, "n": n, "k": k} | {name: size for name, size in of_call.items() if size is not None}
        return described.derivation(sizes, gpu, num_sms, **made, **{} if dtype is None else {"dtype": dtype})
    num_sms = gpu.num_sms if num_sms is None else num_sms
    check_sizes(m=m, n=n, k=k, num_sms=num_sms)
    problem = GemmProblem(*map(int, (m, n, k, num_sms)))
    return derive(problem, gpu, "fp8" if dtype is None else name_of(dtype), tuned.configs(problem.num_sms))


def as_data(derived: Derivation | Answer) -> Explanation:
    return (answers if isinstance(derived, Answer) else report).as_data(derived)


def show(derived: Derivation | Answer, console: Console, most: int | None) -> None:
    """Print it; `most` candidates at most, None: all."""
    (answers if isinstance(derived, Answer) else report).show(derived, console, most)
