"""That the command for all fuzzers adds up what they report, and loses none that fails; with stand-ins for them."""

import json

import fuzz_all
import pytest
from campaign import CLEAN, FAILED, HANG, WRONG

pytestmark = pytest.mark.about(
    "tests/*fuzz*.py",
    "tests/stress.py",
    "tests/jobs.py",
    "tests/campaign.py",
    "tests/strategies.py",
    "tests/expected*.py",
    "tests/helpers.py",
)

PROLOGUE = """
import json, pathlib, sys, time
option = lambda name: sys.argv[sys.argv.index("--" + name) + 1]
seed, out = int(option("seed")), pathlib.Path(option("out"))
def end(status=0, leaves=None, **fields):
    counted = {"ok": status == 0, "products": 10, "calls_that_copy": seed, "found": {}, "findings": [], "rounds": 1}
    out.write_text(json.dumps({**counted, **fields}))
    sys.exit(status if leaves is None else leaves)
"""

WRONG_ONE = {"kind": "wrong", "round": 7, "draw": "of it"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run stand-ins of these texts; the status and the report."""

    def start(*arguments: str, **texts: str) -> tuple[int, dict]:
        monkeypatch.setattr(fuzz_all, "TESTS", tmp_path)
        monkeypatch.setattr(fuzz_all, "COMMANDS", {name: (f"{name}.py", "--configs", "9") for name in texts})
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(PROLOGUE + text)
        path = tmp_path / "all.json"
        defaults = ["--device", "cpu", "--seed", "5", "--seconds", "20", "--out", str(path)]
        status = fuzz_all.main([*defaults, *arguments])
        report = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == report
        return status, report

    return start


def test_counts_are_summed_up(run):
    status, report = run("--processes", "casts=2", "stress=1", casts="end()", stress="end(products=5000)")
    assert (status, report["ok"]) == (CLEAN, True)
    assert (report["products"], report["calls_that_copy"], report["rounds"]) == (20, 5 + 6, 2)
    assert (report["wrong"], report["hangs"]) == (0, 0)
    assert report["fuzzers"]["casts"] == {
        "processes": 2,
        "products": 20,
        "calls_that_copy": 11,
        "rounds": 2,
        "configs": 0,
    }
    assert report["fuzzers"]["stress"]["products"] == 5000


def test_a_finding_says_what_repeats_it(run):
    text = f"end(1, found={{'wrong': 3}}, findings=[{WRONG_ONE}]) if seed == 6 else end()"
    status, report = run("--processes", "casts=3", casts=text)
    assert (status, report["found"], report["wrong"]) == (WRONG, {"wrong": 3}, 3)
    repeat = "tests/casts.py --configs 9 --seed 6 --first-round 7 --rounds 1"
    assert report["findings"] == [{"process": "casts-1", "seed": 6, "repeat": repeat, **WRONG_ONE}]


def test_a_hang_is_the_worst(run):
    text = "end(3, found={'hang': 1}) if seed == 6 else end(1, found={'wrong': 1})"
    status, report = run("--processes", "casts=2", casts=text)
    assert (status, report["hangs"], report["wrong"]) == (HANG, 1, 1)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("print('Segmentation'); import os; os.abort()", "failure", "status -6 and no report: Segmentation"),
        ("import os; os._exit(0)", "failure", "status 0 and no report"),
        ("end(leaves=9)", "failure", "status 9 after a clean report"),
        ("end(products=0, calls_that_copy=0)", "idle", "called nothing"),
        ("time.sleep(60)", "failure", "has no end"),
    ],
    ids=["crash", "no report", "bad end", "idle", "no end"],
)
def test_a_process_that_fails_is_found(run, monkeypatch, text, kind, said):
    monkeypatch.setattr(fuzz_all, "GRACE_SECONDS", 0.5)
    status, report = run("--processes", "bad=1", "good=1", "--seconds", "3", bad=text, good="end()")
    assert (status, report["found"]) == (FAILED if kind == "failure" else WRONG, {kind: 1})
    assert report["findings"][0]["process"] == "bad-0" and said in report["findings"][0]["error"]
    assert report["fuzzers"]["good"]["products"] == 10


def test_limits_are_shared(run):
    text = "end(1, found={'seen': 1}, findings=[dict(share=option('memory-share'), until=option('until'))])"
    _, report = run("--processes", "casts=3", casts=text)
    assert {finding["share"] for finding in report["findings"]} == {"0.25"}
    assert len({finding["until"] for finding in report["findings"]}) == 1


@pytest.mark.parametrize("text", ["cast=2", "casts", "casts=-1", "casts=x"])
def test_processes_are_named_and_counted(text):
    with pytest.raises(ValueError, match="write casts=2"):
        fuzz_all.counts_of([text])


def test_every_fuzzer_is_there():
    assert set(fuzz_all.PROCESSES) | {"stress"} == set(fuzz_all.COMMANDS)
    assert all((fuzz_all.TESTS / script).exists() for script, *_ in fuzz_all.COMMANDS.values())
