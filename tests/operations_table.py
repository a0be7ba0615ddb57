"""Generate docs/operations.md, the table of each operation's arguments, from signatures and descriptions.

    python tests/operations_table.py --update

writes the table; test_operation.py holds the page to it.
"""

import argparse
import inspect
from importlib import import_module
from pathlib import Path
from textwrap import wrap

import deep_tile
from deep_tile.dense import Differentiable, Product
from deep_tile.discovery import OPS
from deep_tile.gemm_cast import ProductCast
from deep_tile.linear import Linear
from deep_tile.method.described import is_explained
from deep_tile.operation import OPERATIONS, Operation

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- made by tests/operations_table.py -->", "<!-- end -->"

KEYWORDS = (
    *("out", "out_dtype", "bias", "activation", "accumulate", "config", "num_sms", "batch_invariant", "pdl"),
    "constant_weights",
)


def is_one_product(each: Operation) -> bool:
    return isinstance(each, Product) and not isinstance(each, ProductCast)


def is_compiled_before(each: Operation) -> bool:
    names = vars(import_module(f"deep_tile.{OPS[each.name]}"))
    return bool(each.groupings) or any(name.startswith("precompile_") for name in names)


BEFORE_CALLS = {
    "prepare": lambda each: each.name == "fp8_gemm",
    "precompile": is_compiled_before,
    "supports": lambda each: bool(each.groupings),
    "explain": is_explained,
    "tune": is_one_product,
}
"""Functions that are asked with sizes alone or before calls, and the operations that they know."""


def operations() -> list[Operation]:
    """Public functions that are operations, products first."""
    for module in {*OPS.values()}:
        import_module(f"deep_tile.{module}")
    known = [OPERATIONS[name] for name in OPS if name in OPERATIONS and name in deep_tile.__all__]
    return sorted(known, key=lambda each: (not each.groupings, each.name))


def gradient(each: Operation) -> str:
    if isinstance(each, (Differentiable, Linear)):
        return "yes"
    return "`" + each.to_train.removeprefix("call ") + "`" if each.to_train else "no"


def table() -> str:
    columns = (*KEYWORDS, *BEFORE_CALLS)
    lines = ["| | " + " | ".join((*(f"`{name}`" for name in columns), "gradient")) + " |"]
    lines.append("|" + " --- |" * (len(columns) + 2))
    for each in operations():
        takes = inspect.signature(getattr(deep_tile, each.name)).parameters
        cells = [column in takes for column in KEYWORDS] + [knows(each) for knows in BEFORE_CALLS.values()]
        texts = ["yes" if cell else "" for cell in cells]
        if is_explained(each):
            texts[columns.index("explain")] = each.sizes.replace(" ", ", ")
        lines.append("| " + " | ".join((f"`{each.name}`", *texts, gradient(each))) + " |")
    return "\n".join(
        [
            *lines,
            "",
            "`explain` takes the sizes in its column, and says of other operations why it has no answer:",
            "",
            *unexplained(),
        ]
    )


def unexplained() -> list[str]:
    """A line for each reason."""
    reasons: dict[str, list[str]] = {}
    for each in operations():
        if not is_explained(each):
            reasons.setdefault(each.unexplained, []).append(f"`{each.name}`")
    return [
        line
        for reason, names in reasons.items()
        for line in wrap(f"- {', '.join(names)}: {reason}.", 120, subsequent_indent="  ", break_on_hyphens=False)
    ]


def updated(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The table of docs/operations.md")
    parser.add_argument("--update", action="store_true", required=True)
    parser.parse_args()
    PAGE.write_text(updated(PAGE.read_text()))
