"""The documents: what they link to and name exists, they stay short, and tables are those of the stored results."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # Appended: an installed deep_tile still comes first.

from benchmarks import report, store  # noqa: E402

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = ("benchmarks", "csrc", "deep_tile", "docs", "examples", "include", "tests")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".c", ".cuh", ".h", ".py") and path != Path(__file__).resolve()
)

NAMED = re.compile(r"[\w./-]+(?:\.(?:c|cuh|h|json|md|png|py|svg|toml|txt)|/)")
"""What a document sets as code is a file or folder of the repository if it looks like this."""


def prose(path: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What headings can be linked by, as GitHub makes it."""
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


def test_readme_has_the_tables_of_a_stored_run():
    _, _, rest = (ROOT / "README.md").read_text().partition(f"{report.BEGIN}\n")
    part, end, _ = rest.partition(f"\n{report.END}")
    runs, overheads = (map(store.load, sorted(store.FOLDER.glob(f"{kind}_*.json"))) for kind in ("bench", "overhead"))
    overheads = list(overheads)
    assert end and part in [report.readme_part(run, overhead) for run in runs for overhead in overheads]
