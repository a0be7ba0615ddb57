"""Who imports whom, read from the sources: one way, no circle, torch and the command line only where they belong.

A new module needs a row of its own in `TABLE`. Imports inside functions count; those for annotations alone (`if
TYPE_CHECKING:`) do not.
"""

import ast
import shutil
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import deep_tile

PACKAGE = Path(deep_tile.__file__).parent

SIZES = "config kinds problem walls"
"""Problem and config: numbers alone."""

CALL = f"{SIZES} _launcher jit launches ops plan reference select settings tensors"

TABLE = f"""
kinds:
problem: kinds
settings:
walls:
sass:
config: kinds walls
params:
codegen: config kinds params
packaged:
progress: config
jit: _launcher packaged sass settings
select: {SIZES} settings
watch: codegen config settings
plan: {SIZES} _launcher codegen jit params progress select watch
tensors: _launcher
launches: _launcher tensors
ops: _launcher
cast: {SIZES} _launcher codegen jit params progress select watch
logits_launch: _launcher cast codegen config params select walls
logits: cast checks codegen config launches logits_launch operation ops options select tensors
gradients:
sources: ops params tensors
quantize: _launcher cast config launches operation ops options params select sources tensors
experts: cast config launches operation ops quantize select sources tensors
transposed: cast config launches operation ops quantize select sources tensors
both: cast config launches operation ops params quantize select sources tensors transposed
gated: both cast config launches operation ops params quantize sources tensors transposed
norms: cast launches operation ops params quantize tensors
formats: config quantize tensors
blocks: config formats operation quantize tensors
packed: blocks config formats kinds quantize tensors
checkpoints: config formats quantize tensors
reference: config kinds quantize
finishes: kinds ops tensors
options: config finishes
operation: _launcher kinds launches ops options select tensors
checks: {CALL} finishes packed
parts: _launcher cast codegen config kinds params select walls
thin: _launcher cast checks config finishes jit launches operation ops options params parts select tensors
unpack: _launcher cast codegen config kinds launches operation ops packed params quantize select
dense: {CALL} checks codegen finishes operation packed params thin unpack
grouped: {CALL} checks dense finishes operation packed params unpack
wgrad: {CALL} checks dense finishes grouped operation params
gemm_cast: {CALL} cast checks codegen dense finishes operation params quantize
api: {CALL} cast checks dense finishes gemm_cast grouped linear operation options wgrad
linear: _launcher both cast checks config dense gradients kinds launches operation ops options params problem
    quantize tensors
sums: dense finishes grouped operation ops options tensors thin
replaceable: quantize tensors
train: _launcher api both cast config dense experts gated gradients grouped jit launches ops options params quantize
    select tensors transposed wgrad
packed_layers: blocks config dense experts grouped kinds operation packed quantize sources tensors
nn: api blocks cast checks config formats integrations jit linear packed_layers quantize replaceable tensors
distributed: blocks config nn ops quantize tensors
integrations: __init__ api blocks cast compat config discovery experts formats grouped kinds linear logits nn norms
    options packed packed_layers quantize replaceable select tensors train
compat: {CALL} api checks codegen dense discovery experts grouped logits options quantize sums thin transposed wgrad
torch_compat: api config dense finishes grouped tensors
method: {SIZES} api checks discovery operation quantize select tensors
tools: {CALL} __init__ api cast codegen dense discovery grouped integrations logits_launch method packaged packed
    params parts progress quantize sass wgrad
__init__: discovery
discovery:
__main__: tools
"""
"""A row for each module or package of deep_tile: the others that it may import. `__init__` has the public names."""


def rows(table: str) -> dict[str, set[str]]:
    """The table's rows; a row that is indented goes on with the one before. deep_tile/__init__.py is ""."""
    lines = (line.partition(":") for line in table.strip().replace("\n ", " ").splitlines())
    return {own(module): {*map(own, names.split())} for module, _, names in lines}


def own(name: str) -> str:
    return "" if name == "__init__" else name


MAY_IMPORT = rows(TABLE)

PURE = ("select.schedule", "select.defaults", "select.choose")
"""Modules that read no file and no variable of the user: results of `tune` are passed in."""

NAMES_WITH_TORCH = """
api blocks both checkpoints checks compat.arguments compat.deep_ep compat.deep_gemm compat.indexer compat.layouts
compat.process compat.scales dense distributed experts finishes formats gated gemm_cast gradients grouped
integrations.peft integrations.sglang_hooks integrations.sglang_indexer integrations.sglang_mxfp4
integrations.torchtitan integrations.transformers integrations.transformers_blocks integrations.transformers_config
integrations.transformers_experts integrations.transformers_packed integrations.transformers_weights
integrations.vllm_experts integrations.vllm_int4 integrations.vllm_linear integrations.vllm_mxfp4
integrations.vllm_packed integrations.vllm_passes launches linear
logits method.described nn norms operation ops options packed packed_layers quantize reference replaceable sources
sums tensors thin tools.measure tools.timing tools.trials tools.tune torch_compat train train.casts train.experts
train.gathered train.joined train.layers train.linear train.mlp train.precompile train.products train.recipe
train.sharded transposed unpack wgrad
"""

WITH_TORCH = {*NAMES_WITH_TORCH.split()}
"""Import torch when they are imported. Whoever imports one of them waits a second for torch."""

LATER_WITH_TORCH = {
    "integrations.sglang",
    "integrations.vllm",
    "method.calls",
    "tools.cli",
    "tools.doctor",
    "tools.products",
    "watch",
}
"""Import torch, or one of the modules above, in the functions that need it."""

ON_IMPORT_OR_LATER = WITH_TORCH | LATER_WITH_TORCH

OTHERS_PACKAGES = {"sglang", "transformers", "vllm"}
"""Imported by the functions that need them alone: deep_tile does without."""

WITHIN_ENGINES = {f"integrations.vllm_{name}" for name in ("experts", "int4", "linear", "mxfp4", "packed", "passes")}
WITHIN_ENGINES |= {"integrations.sglang_mxfp4"}
"""Modules with subclasses of an engine's: imported once the engine has called its plugin."""


class Edge(NamedTuple):
    """One import: `module` and `target` by their names within deep_tile, another package's by its first name."""

    module: str
    target: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.module or '__init__'}:{self.line} imports {self.target or 'deep_tile'}"


def modules(package: Path) -> dict[str, Path]:
    """Path of every module by its name within the package, whose own is ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(text: str) -> list[tuple[str, int, bool]]:
    """The imports of a module's text: full name, line, and whether inside a function."""
    return list(_imports(ast.parse(text), in_function=False))


def edges(package: Path) -> list[Edge]:
    known = {*modules(package), "_launcher"}

    def target(name: str) -> str:
        top, _, inner = name.partition(".")
        while top == "deep_tile" and inner not in known:
            inner = inner.rpartition(".")[0]  # the last part names something in a module
        return inner if top == "deep_tile" else top

    return [
        Edge(module, target(name), line, in_function)
        for module, path in modules(package).items()
        for name, line, in_function in imports(path.read_text())
    ]


def _imports(node: ast.AST, in_function: bool) -> Iterator[tuple[str, int, bool]]:
    """(full name, line, inside a function) of the imports below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = "deep_tile.." if child.level else ""  # relative ones are refused: no module has that name
            yield from ((f"{package}{child.module}.{alias.name}", child.lineno, in_function) for alias in child.names)
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _imports(child, in_function or isinstance(child, ast.FunctionDef))


def row(module: str) -> str:
    return module.partition(".")[0]


def violations(package: Path) -> list[str]:
    """Violations of the rules above, as text."""
    known = modules(package)
    found = [f"{module} has no row in TABLE" for module in known if row(module) not in MAY_IMPORT]
    for edge in edges(package):
        inside = edge.target in known or edge.target == "_launcher"
        if inside and row(edge.target) not in MAY_IMPORT.get(row(edge.module), set()) | {row(edge.module)}:
            found.append(str(edge))
        if edge.module in PURE and edge.target in ("settings", "select.tuned"):
            found.append(f"{edge}, and is pure")
        if edge.target in {"torch", *WITH_TORCH}:
            allowed = ON_IMPORT_OR_LATER if edge.in_function else WITH_TORCH
            found += [] if edge.module in allowed else [f"{edge}, and does without torch"]
        if edge.target in OTHERS_PACKAGES and not edge.in_function and edge.module not in WITHIN_ENGINES:
            found.append(f"{edge} outside of a function")
        if edge.target in ("benchmarks", "examples", "tests"):
            found.append(f"{edge} of a checkout")
    return found + circles(package)


def circles(package: Path) -> list[str]:
    graph: dict[str, set[str]] = {}
    for edge in edges(package):
        graph.setdefault(edge.module, set()).add(edge.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"circle: {' -> '.join(name or 'deep_tile' for name in error.args[1])}"]
    return []


def test_imports_point_one_way():
    assert violations(PACKAGE) == []


def test_public_names_are_not_the_tools():
    """They are imported by name at their first use, which the sources do not show."""
    assert {row(module) for module in deep_tile._MODULES.values()} == {
        *("api", "blocks", "both", "checkpoints", "checks", "config", "dense", "experts", "finishes", "gated"),
        *("gemm_cast", "grouped", "jit", "linear", "logits", "method", "nn", "packed", "quantize", "sums", "thin"),
        *("transposed", "wgrad"),
    }


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("plan.py", "from deep_tile.tools import cli", "plan:1 imports tools.cli"),
        ("plan.py", "def late():\n    import deep_tile.method.report", "plan:2 imports method.report"),
        ("jit.py", "from deep_tile import config", "jit:1 imports config"),
        ("walls.py", "from deep_tile.config import GemmConfig", "circle: "),
        ("select/schedule.py", "from deep_tile.select.cost import estimate", "circle: "),
        ("select/choose.py", "from deep_tile.select import tuned", "select.choose:1 imports select.tuned, and is pure"),
        ("codegen.py", "def late():\n    import torch", "codegen:2 imports torch, and does without torch"),
        ("tools/cli.py", "from deep_tile.tools import tune", "tools.cli:1 imports tools.tune, and does without torch"),
        ("tools/products.py", "import torch", "tools.products:1 imports torch, and does without torch"),
        ("tools/cli.py", "from benchmarks import bench_gemm", "tools.cli:1 imports benchmarks of a checkout"),
        ("integrations/transformers.py", "import transformers",
         "integrations.transformers:1 imports transformers outs"),
        ("integrations/vllm.py", "import vllm", "integrations.vllm:1 imports vllm outs"),
        ("method/report.py", "import deep_tile", "method.report:1 imports deep_tile"),
        ("plan.py", "from . import api", "plan:1 imports deep_tile"),
        ("loose.py", "", "loose has no row in TABLE"),
    ],
)  # fmt: skip
def test_a_violation_is_found(tmp_path, path, text, said):
    package = tmp_path / "deep_tile"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    changed = package / path
    changed.write_text(f"{text}\n{changed.read_text() if changed.exists() else ''}")
    assert any(violation.startswith(said) for violation in violations(package))


def test_imports_for_annotations_alone_are_free(tmp_path):
    package = tmp_path / "deep_tile"
    package.mkdir()
    (package / "plan.py").write_text("if TYPE_CHECKING:\n    from deep_tile.tools import cli\n")
    assert violations(package) == []
