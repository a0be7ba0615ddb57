"""What mkdocs does besides reading docs/: the README is its first page, and links that leave docs/ lead somewhere.

Called by mkdocs (mkdocs.yml).
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the root, by the page that each becomes."""


def on_config(config: MkDocsConfig) -> None:
    repository = re.search(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert config.repo_url == repository, f"mkdocs.yml has {config.repo_url}, pyproject.toml {repository}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    for source, page in PAGES.items():
        text = re.sub(r"\]\((?!https?:|#)", "](../", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are those of the repository, seen from docs/."""
    return re.sub(r"\]\(\.\./([^)#]*)", lambda link: f"]({_target(link[1], config.repo_url)}", markdown)


def _target(path: str, repository: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"{repository}/blob/main/{path}"
