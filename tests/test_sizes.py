"""Sources stay short: lines of the kernel's files and functions, and of the launcher in C. No test measures time."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = sorted((ROOT / "csrc").glob("*.c"))
TESTS = sorted((ROOT / "tests").glob("test_*.py"))
HEADERS = sorted((ROOT / "include" / "deep_tile").glob("*.cuh"))

HEADER_LINES, FUNCTION_LINES, LAUNCHER_LINES = 350, 50, 1000

FOLLOWS = re.compile(r"\s*[{,]")
"""What follows the brace of a member's initial value but never a function's last one."""


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of each CUDA function, from its `__device__` to its last brace."""
    text = re.sub(r"//.*", "", text)
    for begin in (match.start() for match in re.finditer(r"\b__device__\b", text)):
        depth = {"(": 0, "{": 0}
        for at in range(begin, len(text)):
            opening = {")": "(", "}": "{"}.get(text[at], text[at])
            if opening in depth:
                depth[opening] += 1 if opening == text[at] else -1
            ends = text[at] == ";" or (text[at] == "}" and not FOLLOWS.match(text, at + 1))
            if ends and not any(depth.values()):
                name = re.search(r"([\w~]+|operator\W+)\s*\(", text[begin:at])
                yield name[1], text.count("\n", begin, at) + 1
                break


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_header_is_short(path):
    text = path.read_text()
    assert text.count("\n") <= HEADER_LINES
    assert not [(name, lines) for name, lines in functions(text) if lines > FUNCTION_LINES]


def test_launcher_is_short():
    assert [path.name for path in LAUNCHER] == ["driver.c", "launch.c", "tensors.c"]
    assert sum(path.read_text().count("\n") for path in LAUNCHER) <= LAUNCHER_LINES


def test_functions_are_found():
    text = """\
template <int n>  // } (
__device__ int
first(int (&x)[n]) {
    if (n) {
        return x[0];
    }
    return [&] { return 1; }();
}
__device__ void declared(int);
class Class {
    __device__ __forceinline__ explicit Class(int x)
        : x_(x), y_{x}, z_{
              x} {
    }

    static __device__ int second() { return 1; }
};
"""
    assert list(functions(text)) == [("first", 7), ("declared", 1), ("Class", 4), ("second", 1)]
    for path in HEADERS:
        code = re.sub(r"//.*", "", path.read_text())
        assert len(list(functions(code))) == code.count("__device__")


def test_no_test_measures_time():
    """A busy machine decides them; benchmarks measure time."""
    clocks = re.compile(r"\btime\.(perf_counter|process_time|time)(_ns)?\(|\btimeit\b")
    assert len(TESTS) > 50
    assert not [path.name for path in TESTS if clocks.search(path.read_text())]
