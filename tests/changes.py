"""What a run of tests has to look at more closely: files that differ from a commit.

That is the commit where the branch left main, or, on main itself, the one before: the same for whoever repeats the run.
"""

import fnmatch
import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

VARIABLE = "DEEP_TILE_TEST_BASE"
"""Of the environment, for all processes of a run. conftest.py sets it."""

EVERYTHING = "all"

OF_FUZZERS = (
    *("tests/*fuzz*.py", "tests/stress.py", "tests/jobs.py", "tests/campaign.py", "tests/strategies.py"),
    *("tests/expected*.py", "tests/helpers.py", "deep_tile/dense.py", "deep_tile/wgrad.py", "deep_tile/plan.py"),
    "deep_tile/select/*",
)
"""Files, as patterns, that tests of the fuzzers and of the stress run are about."""


def base() -> str:
    """A commit; "all" where everything is to be looked at; nothing where git cannot say what differs."""
    return os.environ.get(VARIABLE, EVERYTHING)


def base_commit() -> str:
    """The commit to compare with, or nothing."""
    head = _git("rev-parse", "HEAD")
    for main in ("main", "origin/main"):
        left = _git("merge-base", main, "HEAD")
        if left and left != head:
            return left
    return _git("rev-parse", "--verify", "--quiet", "HEAD^")


def changed_paths(commit: str) -> set[str]:
    """Files of this tree that differ from the commit, those that git does not know among them."""
    changed = _git("diff", "--name-only", "--no-renames", commit)
    return {*changed.splitlines(), *_git("ls-files", "--others", "--exclude-standard").splitlines()}


def may_have_changed(*patterns: str) -> bool:
    """Whether a file like these did, or everything is to be looked at."""
    if base() in (EVERYTHING, ""):
        return base() == EVERYTHING
    return any(fnmatch.fnmatchcase(path, pattern) for path in _changed_since_base() for pattern in patterns)


@cache
def _changed_since_base() -> set[str]:
    return changed_paths(base())


def told() -> str:
    """For the first lines of a run."""
    if base() == EVERYTHING:
        return "every kernel is compiled, every proof made"
    against = f"since {base()[:12]}" if base() else "as far as one can tell without git"
    repeat = f"{VARIABLE}={base() or repr('')}"
    return f"kernels and proofs are chosen by what changed {against}: {repeat} repeats that, --all-kernels takes all"


def _git(*arguments: str) -> str:
    """What git prints, or nothing: there may be no git, no repository, and no such commit."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
