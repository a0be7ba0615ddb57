"""The documents: links and named files exist, code runs, and tables match the stored results."""

import re
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

import deep_tile
from deep_tile import jit, settings
from deep_tile.reference import relative_error
from deep_tile.tools import cli

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # Appended: an installed deep_tile still comes first.

from benchmarks import report, report_train, store  # noqa: E402

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = (".github", "benchmarks", "csrc", "deep_tile", "docs", "examples", "include", "tests")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".c", ".cuh", ".h", ".py") and path != Path(__file__).resolve()
)

NAMED = re.compile(r"[\w./-]+(?:\.(?:c|cuh|h|json|md|png|py|svg|toml|txt)|/)")
"""Code in a document that looks like this names a file or folder of the repository."""


def prose(path: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def linked(path: Path) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_anchors_resolve(path):
    for link in linked(path):
        target, _, anchor = link.partition("#")
        if target.startswith("https://"):
            continue
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    files = [str(file) for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    for name in filter(NAMED.fullmatch, re.findall(r"`([^`\n]+)`", prose(path))):
        assert (ROOT / name).exists() or any(file.endswith(f"/{name.rstrip('/')}") for file in files), name


def test_documents_that_comments_refer_to_exist():
    """Written as docs/NAME.md, or docs/NAME.md, "Heading", perhaps over two lines of a comment."""
    for source in SOURCES:
        text = re.sub(r"\s*\n\s*(?://|#)?\s*", " ", source.read_text())
        for name, heading in re.findall(r"\bdocs/(\w+\.md)(?:, \"([^\"]+)\")?", text):
            assert (ROOT / "docs" / name).exists(), (source, name)
            assert not heading or f"# {heading}\n" in (ROOT / "docs" / name).read_text(), (source, heading)


def test_performance_is_short():
    assert len((ROOT / "docs" / "performance.md").read_text().splitlines()) <= 200


def test_stored_results_are_few():
    assert sum(len(path.read_text().splitlines()) for path in store.FOLDER.glob("*.json")) <= 3000


def test_rows_of_experiments_say_whether_they_are_kept():
    rows = re.findall(r"^\| .* \|$", (ROOT / "docs" / "experiments.md").read_text(), re.MULTILINE)
    experiments = [row for row in rows if re.search(r"\| 1[12]-\d\d(?: `\w{7}`)? \|$", row)]
    assert len(experiments) > 200
    for row in experiments:
        assert row.split(" | ")[2] in ("yes", "no", "fact"), row


def test_figures_need_no_style_sheet():
    for path in (ROOT / "docs" / "figures").glob("*.svg"):
        assert not re.search(r"<style|\s(?:class|style)=", path.read_text()), path


def test_figures_are_drawn_by_a_command_and_shown():
    """But for call.svg, which is drawn by hand."""
    shown = {Path(link).name for path in DOCUMENTS for link in linked(path) if "figures/" in link}
    drawn = {name for script in ("figures", "report") for name in re.findall(r"\w+\.(?:png|svg)", source_of(script))}
    drawn |= {f"method_{name}.png" for name in ("roofline", "decode", "waves", "prediction")}
    figures = {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    assert figures == shown and figures <= drawn | {"call.svg"}


def source_of(script: str) -> str:
    return (ROOT / "benchmarks" / f"{script}.py").read_text()


def between_markers(path: Path, name: str = "benchmark") -> str:
    begin, end = report.markers(name)
    _, _, rest = path.read_text().partition(f"{begin}\n")
    part, found, _ = rest.partition(f"\n{end}")
    assert found
    return part


def stored(kind: str) -> list[report.Run]:
    return [store.load(path) for path in sorted(store.FOLDER.glob(f"{kind}_*.json"))]


def test_readme_and_benchmarks_have_the_tables_of_a_stored_run():
    runs = stored("bench")
    parts = {report.readme_part([*chosen]) for count in (1, 2, 3) for chosen in permutations(runs, count)}
    assert between_markers(ROOT / "README.md") in parts
    tables = [report.benchmarks_part(run, overhead) for run in runs for overhead in stored("overhead")]
    assert between_markers(ROOT / "docs" / "benchmarks.md") in tables


def test_training_has_the_tables_of_the_newest_runs():
    for name, (results, part) in report_train.PARTS.items():
        text, path = between_markers(ROOT / "docs" / "training.md", name), report_train.newest(results)
        assert path is None or text == part(store.load(path))


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = " ".join(lines[2 : lines.index("", 2)])
    assert len(lines) <= 200
    assert len(first.split()) <= 50


# ---- code


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def no_compiler(monkeypatch):
    """Kernels are not compiled for blocks that only make them ready; whether they compile is asked elsewhere."""
    monkeypatch.setattr(jit, "load_cubin", lambda source, name: b"")
    yield
    deep_tile.forbid_compilation(False)


def run_blocks(path: Path) -> None:
    """Run blocks marked `python` on the CPU: README's each by itself, a page's one after the other."""
    names = {}
    for block in blocks(path, "python"):
        names = {} if path.name == "README.md" else names
        exec(compile(block.replace('"cuda"', '"cpu"'), path.name, "exec"), names)
        if "chosen" in names and path.name == "README.md":
            check_layer_of_experts(**names)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "python")], ids=lambda path: path.name)
def test_code_runs(path, no_compiler):
    run_blocks(path)


def check_layer_of_experts(tokens, chosen, shares, w_gate_up, w_down, y, **others):
    """README's, against BF16 weights in float64."""
    exact = torch.zeros(tokens.shape, dtype=torch.float64)
    for at, expert in enumerate(chosen.flatten().tolist()):
        gate, up = (tokens[at // 2].double() @ w_gate_up[expert].double().t()).chunk(2)
        hidden = torch.nn.functional.silu(gate) * up
        exact[at // 2] += shares.flatten()[at] * hidden @ w_down[expert].double().t()
    assert relative_error(y, exact) < 0.1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_for_other_machines_compiles(path):
    """Blocks marked `py` need a GPU, other packages or processes: they compile, and import existing names of
    deep_tile."""
    for block in blocks(path, "py"):
        compile(block, path.name, "exec", dont_inherit=True)
        exec("\n".join(re.findall(r"^(?:from deep_tile|import deep_tile).*", block, re.MULTILINE)), {})


def test_api_has_every_public_name_with_an_example():
    text = (ROOT / "docs" / "api.md").read_text()
    code = "".join(blocks(ROOT / "docs" / "api.md", "python"))
    for name in deep_tile._MODULES:
        assert text.count(f"\n::: deep_tile.{name}\n") == 1, name
        is_type = name[0].isupper() and name not in ("GemmConfig", "Plan")
        assert is_type or f"deep_tile.{name}(" in code or name == "Plan", name
    for name in deep_tile._SUBMODULES:
        assert re.search(rf"^::: deep_tile\.{name}\.", text, re.MULTILINE), name


def test_configuration_has_every_variable():
    text = (ROOT / "docs" / "configuration.md").read_text()
    for variable in settings.VARIABLES:
        assert f"| `{variable.name}` | {variable.meaning} | `{variable.default}` |" in text


def test_cli_has_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    (\w+(?: \w+)?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    headings = re.findall(r"^## .*", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert len(commands) == 11
    for command in commands:
        assert any(f"`{command.removesuffix(' info')}`" in heading for heading in headings), command
