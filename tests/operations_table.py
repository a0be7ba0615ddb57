"""docs/operations.md: what each operation takes, from its function's signature and its description.

    python tests/operations_table.py --update

writes the table; test_operation.py holds the page to it.
"""

import argparse
import inspect
from pathlib import Path

import deep_tile
from deep_tile.dense import Differentiable, Product
from deep_tile.discovery import OPS
from deep_tile.gemm_cast import ProductCast
from deep_tile.operation import OPERATIONS, Operation

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- made by tests/operations_table.py -->", "<!-- end -->"

KEYWORDS = (
    *("out", "out_dtype", "bias", "activation", "accumulate", "config", "num_sms", "batch_invariant", "pdl"),
    "constant_weights",
)

FUNCTIONS = (
    *("fp8_gemm", "gemm", "scaled_gemm", "int8_gemm", "fp8_wgrad", "fp8_gemm_cast", "fp8_linear"),
    *("fp8_grouped_gemm", "grouped_gemm", "scaled_grouped_gemm", "fp8_grouped_wgrad"),
    *("per_token_cast_to_fp8", "per_block_cast_to_fp8", "transposed_cast_to_fp8", "cast_both", "cast_weight"),
    *("transpose_fp8", "silu_mul_cast_to_fp8", "combine", "sort_by_expert"),
)


def is_one_product(each: Operation) -> bool:
    return isinstance(each, Product) and not isinstance(each, ProductCast)


BEFORE_CALLS = {
    "prepare": lambda each: each.name == "fp8_gemm",
    "precompile": lambda each: bool(each.groupings),
    "supports": lambda each: bool(each.groupings),
    "explain": is_one_product,
    "tune": is_one_product,
}
"""What is asked with sizes alone, or before calls, and of which operations."""


def gradient(name: str) -> str:
    operation = OPERATIONS.get(name)
    if isinstance(operation, Differentiable) or name == "fp8_linear":
        return "yes"
    return "`" + operation.to_train.removeprefix("call ") + "`" if operation and operation.to_train else "no"


def table() -> str:
    for module in {*OPS.values()}:
        __import__(f"deep_tile.{module}")
    columns = (*KEYWORDS, *BEFORE_CALLS)
    lines = ["| | " + " | ".join((*(f"`{name}`" for name in columns), "gradient")) + " |"]
    lines.append("|" + " --- |" * (len(columns) + 2))
    for name in FUNCTIONS:
        takes = inspect.signature(getattr(deep_tile, name)).parameters
        cells = ["yes" if column in takes else "" for column in KEYWORDS]
        cells += ["yes" if name in OPERATIONS and knows(OPERATIONS[name]) else "" for knows in BEFORE_CALLS.values()]
        lines.append("| " + " | ".join((f"`{name}`", *cells, gradient(name))) + " |")
    return "\n".join(lines)


def updated(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The table of docs/operations.md")
    parser.add_argument("--update", action="store_true", required=True)
    parser.parse_args()
    PAGE.write_text(updated(PAGE.read_text()))
