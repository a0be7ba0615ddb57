"""Run by rehearse.py with an engine's folder: every name of DeepGEMM that its sources look up, and every call that they
show. Prints a line of JSON: how many names `deep_tile.compat.deep_gemm` serves and refuses by name, those that it does
not know, and calls whose arguments its functions do not take. Nothing of the engine is imported.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deep_tile.compat import deep_gemm

MODULES = {"deep_gemm", "_dg", "dg"}
"""Variables that hold DeepGEMM in the engines."""

APART = {"test", "third_party", "deep_gemm_sm120.py"}
"""Folders and files that no engine runs on Hopper."""


class Use(NamedTuple):
    where: str
    path: str
    """From DeepGEMM on: utils.layout.get_..."""
    call: ast.Call | None


def uses_in(file: Path, root: Path) -> Iterator[Use]:
    tree, aliases = ast.parse(file.read_text(errors="replace")), {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "deep_gemm":
            package = node.module.partition(".")[2]
            found = {name.asname or name.name: f"{package}.{name.name}".strip(".") for name in node.names}
            aliases |= found
            yield from (Use(at(file, root, node), path, None) for path in found.values())
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = next(filter(None, map(looked_up, ast.walk(node.value))), None)
            aliases |= {} if name is None else {node.targets[0].id: name}
    for node in nodes:
        path = looked_up(node) or (chain(node) if isinstance(node, ast.Attribute) else None)
        if path is not None:
            yield Use(at(file, root, node), path, None)
        elif isinstance(node, ast.Call):
            called = chain(node.func) or aliases.get(getattr(node.func, "id", None))
            if called is not None:
                yield Use(at(file, root, node), called, node)


def at(file: Path, root: Path, node: ast.AST) -> str:
    return f"{file.relative_to(root)}:{node.lineno}"


def looked_up(node: ast.AST) -> str | None:
    """The name in getattr(deep_gemm, "name")."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", None) not in ("getattr", "hasattr"):
        return None
    module, name, *_ = node.args
    return name.value if getattr(module, "id", None) in MODULES and isinstance(name, ast.Constant) else None


def chain(node: ast.AST) -> str | None:
    """utils.align of deep_gemm.utils.align."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if parts and getattr(node, "id", None) in MODULES else None


def misfit(use: Use, function: object) -> str | None:
    """Why a function does not take what a call gives."""
    places = [x for x in use.call.args if not isinstance(x, ast.Starred)]
    unpacked = [keyword for keyword in use.call.keywords if keyword.arg is None]
    named = {keyword.arg for keyword in use.call.keywords if keyword.arg} | {*keys_within(unpacked)}
    is_partial = unpacked or len(places) < len(use.call.args)
    signature = inspect.signature(function)
    try:
        (signature.bind_partial if is_partial else signature.bind)(*places, **dict.fromkeys(named))
    except TypeError as error:
        return f"{use.where} {use.path}: {error}"
    return None


def keys_within(unpacked: list[ast.keyword]) -> Iterator[str]:
    """Those of dictionaries that are written within a call, as in f(**({"x": 1} if x else {}))."""
    for node in (node for keyword in unpacked for node in ast.walk(keyword)):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "dict":
            yield from (keyword.arg for keyword in node.keywords)


def main(folder: str) -> None:
    root = Path(folder)
    files = [file for file in sorted(root.rglob("*.py")) if not APART & {*file.relative_to(root).parts}]
    files = [file for file in files if b"deep_gemm" in file.read_bytes()]
    uses = [use for file in files for use in uses_in(file, root) if not use.path.startswith("_")]
    served, refused, unknown, misfits, calls = {}, set(), {}, [], 0
    for use in uses:
        module, _, name = use.path.rpartition(".")
        members = deep_gemm._SUBMODULES
        if use.path in members or (name in vars(deep_gemm) and (not module or name in members.get(module, ()))):
            served[use.path] = vars(deep_gemm).get(name)
        elif name in deep_gemm.REFUSED:
            refused.add(use.path)
        else:
            unknown[use.path] = use.where
    for use in uses:
        if use.call is not None and served.get(use.path) is not None:
            calls += 1
            misfits.append(misfit(use, served[use.path]))
    found = {"served": len(served), "calls": calls, "refused": len(refused), "unknown": unknown}
    print("FOUND", json.dumps(found | {"misfits": [problem for problem in misfits if problem]}))


main(sys.argv[1])
