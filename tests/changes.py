"""The files that differ from the base commit. The base is where the branch left main or, on main, the commit before, so
that whoever repeats a run gets the same list.
"""

import fnmatch
import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

VARIABLE = "DEEP_TILE_TEST_BASE"
"""The environment variable with the base commit, for all processes of a run. conftest.py sets it."""

EVERYTHING = "all"

OF_FUZZERS = (
    *("tests/*fuzz*.py", "tests/stress.py", "tests/jobs.py", "tests/campaign.py", "tests/strategies.py"),
    *("tests/expected*.py", "tests/helpers.py", "deep_tile/dense.py", "deep_tile/wgrad.py", "deep_tile/plan.py"),
    "deep_tile/select/*",
)
"""File patterns for tests of the fuzzers and of the stress run."""

OF_KERNELS = ("include/deep_tile/*", "deep_tile/codegen.py", "deep_tile/params.py", "deep_tile/jit.py")
"""For tests of compiled kernels."""

FEWER = 4
"""Of what nothing changed about, one in so many is tested."""

OF_OPS = ("deep_tile/op*.py", "deep_tile/discovery.py", "deep_tile/__init__.py")
"""For tests of what tracers see."""

OF_EXPLANATIONS = (
    *("deep_tile/method/*", "deep_tile/tools/*", "deep_tile/select/*"),
    *("deep_tile/walls.py", "deep_tile/config.py", "deep_tile/kinds.py"),
)


def base() -> str:
    """The base commit; "all" to treat every file as changed; empty if git cannot tell."""
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
    """Whether any file that matches these patterns changed, or every file counts as changed."""
    if base() in (EVERYTHING, ""):
        return base() == EVERYTHING
    return any(fnmatch.fnmatchcase(path, pattern) for path in _changed_since_base() for pattern in patterns)


def share_of(*patterns: str) -> int:
    """One in how many is tested: all where a file that matches these patterns may have changed."""
    return 1 if may_have_changed(*patterns) else FEWER


@cache
def _changed_since_base() -> set[str]:
    return changed_paths(base())


def told() -> str:
    """The text for the first lines of a run."""
    if base() == EVERYTHING:
        return "every kernel is compiled, every proof made"
    against = f"since {base()[:12]}" if base() else "as far as one can tell without git"
    repeat = f"{VARIABLE}={base() or repr('')}"
    return f"kernels and proofs are chosen by what changed {against}: {repeat} repeats that, --all-kernels takes all"


def _git(*arguments: str) -> str:
    """Git's output; empty without git, a repository or that commit."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
