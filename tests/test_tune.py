"""The search for the fastest config: what is tried, what is kept and where, and that the selector takes it."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import deep_tile
from deep_tile import plan, settings
from deep_tile.config import GemmConfig
from deep_tile.problem import GemmProblem
from deep_tile.select import cost, tuned
from deep_tile.select.choose import candidates, measured_choice, tuned_choice
from deep_tile.select.defaults import default_configs
from deep_tile.tools import cli, timing, tune

PROBLEM = GemmProblem(128, 7168, 2048)
KEY = "128x7168x2048"
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def forgetful(monkeypatch, tmp_path):
    """Files of its own for every test, and no memory of those before."""

    def forget():
        for remembered in (settings.cache_dir, settings.tuned_file, tuned._all_choices):
            remembered.cache_clear()

    monkeypatch.setenv("DEEP_TILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DEEP_TILE_TUNED", raising=False)
    monkeypatch.setattr(tuned, "_DRIVER_FILES", tmp_path / "proc")
    forget()
    yield forget
    monkeypatch.undo()
    forget()


def another_config(problem=PROBLEM):
    """A default config that the selector does not choose by itself."""
    return candidates(problem)[3][1]


def install_gpu(tmp_path, model):
    folder = tmp_path / "proc" / f"0000:{len(model):02x}:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-1\n")


def test_stored_choice_is_chosen(forgetful):
    config = another_config()
    path = tuned.store(GPU, 132, {KEY: tuned.Choice(config, 12.5)})
    forgetful()
    assert path == settings.cache_dir() / "tuned" / "NVIDIA_H200.json"
    assert json.loads(path.read_text())["choices"][KEY]["us"] == 12.5
    assert tuned_choice(PROBLEM, tuned.configs(132)) == config
    assert plan.config_for(PROBLEM._replace(m=100)) == config
    assert plan.config_for(PROBLEM._replace(tma_store=False)) == replace(config, tma_store=False)
    assert config in plan.configs_for(7168, 2048, 200, 132)


def test_choice_holds_for_its_bucket_and_number_of_sms_only(forgetful):
    others = [PROBLEM._replace(m=64), PROBLEM._replace(n=7160), PROBLEM._replace(num_sms=131)]
    before = [plan.config_for(problem) for problem in others]
    tuned.store(GPU, 132, {KEY: tuned.Choice(another_config(), 1.0)})
    forgetful()
    assert [plan.config_for(problem) for problem in others] == before


def test_config_beside_the_default_ones_is_chosen(forgetful):
    config = next(c for c in tune.variants(another_config()) if c not in default_configs())
    tuned.store(GPU, 132, {KEY: tuned.Choice(config, 1.0)})
    forgetful()
    assert plan.config_for(PROBLEM) == config
    assert [c for _, c in candidates(PROBLEM, own=config)].count(config) == 1


def test_split_k_is_not_forced_on_a_batch_invariant_call(forgetful):
    config = next(c for _, c in candidates(PROBLEM) if c.split_k > 1)
    tuned.store(GPU, 132, {KEY: tuned.Choice(config, 1.0)})
    forgetful()
    assert plan.config_for(PROBLEM) == config
    assert plan.config_for(PROBLEM._replace(split_k=False)).split_k == 1


def test_own_results_come_before_the_shipped_ones(forgetful):
    key, shipped = next(iter(cost.calibration().choices.items()))
    problem = GemmProblem(*map(int, key.split("x")))
    assert measured_choice(problem) == shipped
    config = another_config(problem)
    tuned.store(GPU, 132, {key: tuned.Choice(config, 1.0)})
    forgetful()
    assert plan.config_for(problem) == config and config.name != shipped
    assert deep_tile.explain(*problem[:3])["config"] == config.name


def test_results_add_up_and_newer_ones_win():
    first, second = another_config(), GemmConfig(64, 64, 5)
    tuned.store(GPU, 132, {KEY: tuned.Choice(first, 2.0), "8x128x128": tuned.Choice(first, 3.0)})
    tuned.store(GPU, 132, {KEY: tuned.Choice(second, 1.0)})
    assert tuned.choices(132) == {KEY: tuned.Choice(second, 1.0), "8x128x128": tuned.Choice(first, 3.0)}
    tuned.store(GPU, 66, {"8x128x128": tuned.Choice(second, 4.0)})
    assert tuned.choices(132) == {} and list(tuned.choices(66)) == ["8x128x128"]
    assert [path.name for path in (settings.cache_dir() / "tuned").iterdir()] == ["NVIDIA_H200.json"]


def test_only_this_machines_gpu_counts(forgetful, tmp_path):
    ours, theirs = tuned.Choice(GemmConfig(64, 64, 5), 1.0), tuned.Choice(GemmConfig(64, 128, 4), 2.0)
    tuned.store("NVIDIA H100 80GB HBM3", 132, {KEY: theirs})
    tuned.store(GPU, 132, {KEY: ours})
    for model, wanted in (("NVIDIA H20", {}), (GPU, {KEY: ours})):
        install_gpu(tmp_path, model)
        forgetful()
        assert tuned.choices(132) == wanted


def test_named_file_is_read_and_written(forgetful, monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    monkeypatch.setenv("DEEP_TILE_TUNED", str(path))
    install_gpu(tmp_path, "NVIDIA H20")
    assert tuned.choices(132) == {}
    choice = tuned.Choice(another_config(), 1.0)
    assert tuned.store(GPU, 132, {KEY: choice}) == path
    forgetful()
    assert tuned.choices(132) == {KEY: choice}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"num_sms": 132, "choices": []}',
        '{"num_sms": 132, "choices": {"1x2x3": {"us": 1}}}',
        '{"num_sms": 132, "choices": {"1x2x3": {"us": 1, "config": {"block_m": 64, "unknown": 1}}}}',
        '{"num_sms": 132, "choices": {"1x2x3": {"us": 1, "config": {"block_m": 65, "block_n": 64, "stages": 4}}}}',
        "\N{SNOWMAN}",
    ],
)
def test_broken_file_is_one_warning_and_is_replaced(forgetful, text):
    path = tuned.path_for(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="ignores the tuned choices in .*NVIDIA_H200.json") as caught:
        chosen = plan.config_for(PROBLEM)
        plan.config_for(PROBLEM._replace(m=4096))
    assert len(caught) == 1
    config = another_config()
    assert chosen != config
    tuned.store(GPU, 132, {KEY: tuned.Choice(config, 1.0)})
    forgetful()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.config_for(PROBLEM) == config


def test_without_a_directory_nothing_is_kept(monkeypatch):
    for name in ("DEEP_TILE_CACHE_DIR", "DG_JIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_dir.cache_clear()
    assert tuned.choices(132) == {}
    with pytest.raises(FileNotFoundError, match="DEEP_TILE_TUNED"):
        tuned.store(GPU, 132, {})


def test_file_is_read_once(monkeypatch):
    tuned.store(GPU, 132, {KEY: tuned.Choice(another_config(), 1.0)})
    reads = []
    monkeypatch.setattr(tuned, "_read", lambda path: reads.append(path) or (132, {}))
    for m in (8, 64, 128):
        plan.config_for(PROBLEM._replace(m=m))
    assert len(reads) == 1


def test_search_space_begins_with_the_present_choice():
    for problem in (PROBLEM, GemmProblem(8, 7168, 2048), GemmProblem(4096, 4096, 7168)):
        narrow, wide = tune.search_space(problem, wide=False), tune.search_space(problem, wide=True)
        assert narrow[0] == wide[0] == plan.config_for(problem)
        assert set(narrow) < set(wide) and len(set(wide)) == len(wide)
        limit_us = 2 * cost.estimate(narrow[0], problem).time_us
        assert all(cost.estimate(config, problem).time_us <= limit_us for config in narrow[1:])


def test_variants_differ_in_their_rings_only():
    config = GemmConfig(128, 128, 5)
    found = tune.variants(config)
    assert {(c.stages, c.store_buffers) for c in found} >= {(3, 1), (3, 2), (5, 1), (5, 2)}
    assert {replace(c, stages=5, store_buffers=2) for c in found} == {config}


def test_present_choice_stays_unless_clearly_beaten():
    before, other, third = GemmConfig(64, 64, 5), GemmConfig(64, 128, 4), GemmConfig(128, 128, 5)
    assert tune.choose({before: 10.0, other: 9.95, third: 11.0}, before) == before
    assert tune.choose({before: 10.0, other: 9.8, third: 9.7}, before) == third
    assert tune.choose({other: 9.8, third: 9.7}, before) == third


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give N and K of a weight, or --shapes FILE"),
        (["7168"], "give N and K"),
        (["7168", "0"], "'0' is not a positive integer"),
        (["7168", "2048", "--m", "8,-1"], "'-1' is not a positive integer"),
        (["--shapes", "/nowhere"], "'/nowhere' cannot be read"),
        (["7168", "2048", "--repeats", "1"], "give 2 or more"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["tune", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cli.deep_tile, "is_available", lambda: (False, "no GPU"), raising=False)
    assert cli.main(["tune", "7168", "2048"]) == 1
    assert "needs a Hopper GPU: no GPU" in capsys.readouterr().err


def test_command_keeps_what_it_finds(monkeypatch, capsys, tmp_path):
    asked = []

    def search(shapes, *, wide, repeats, track):
        asked.append((shapes, wide, repeats))
        before, best = plan.config_for(PROBLEM), another_config()
        return [tune.Tuned(PROBLEM, tuned.Choice(best, 10.0), before, 12.0, 7, {before: 0.5})]

    class Properties:
        name, multi_processor_count = GPU, 132

    file = tmp_path / "shapes.txt"
    file.write_text("# a comment\n\n8x7168x2048 # decode\n4096x576x7168\n")
    monkeypatch.setattr(cli.deep_tile, "is_available", lambda: (True, ""), raising=False)
    monkeypatch.setattr(tune, "tune", search)
    monkeypatch.setattr(tune, "_properties", Properties)
    expected = another_config()
    assert cli.main(["tune", "576", "7168", "--m", "1,2", "--shapes", str(file), "--wide"]) == 1
    assert asked == [([(1, 576, 7168), (2, 576, 7168), (8, 7168, 2048), (4096, 576, 7168)], True, 20)]
    printed = capsys.readouterr()
    assert expected.name in printed.out and "20.0%" in printed.out and "NVIDIA_H200.json" in printed.out
    assert "relative error 5.00e-01; left out" in printed.err
    assert plan.config_for(PROBLEM) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
def test_search_on_the_gpu(wide):
    shapes = [(100, 576, 512), (128, 576, 512), (9, 133, 272)]
    results = tune.tune(shapes, wide=wide, repeats=3, track=lambda items, *_: items)
    assert [result.problem[:3] for result in results] == [(128, 576, 512), (16, 133, 272)]
    for result in results:
        assert result.tried == len(tune.search_space(result.problem, wide)) and not result.wrong
        assert 0 < result.choice.us <= result.before_us
    tune.store(results)
    assert [plan.config_for(result.problem) for result in results] == [result.choice.config for result in results]


def test_those_that_may_be_the_fastest_are_timed_apart(monkeypatch):
    among_all, apart = {"a": 11.0, "b": 11.2, "c": 13.0}, {"a": 10.0, "b": 9.6}
    rounds = []

    def alternate(graphs, repeats, flush):
        rounds.append((list(graphs), repeats))
        times = among_all if len(graphs) == 3 else apart
        return {name: timing.Timing(times[name], 0.0, 0.0) for name in graphs}

    monkeypatch.setattr(timing, "time_alternating", alternate)
    monkeypatch.setattr(timing, "_PAUSE_SECONDS", 0)
    times = timing.time_to_choose(dict.fromkeys("abc"), 20, flush=None)
    assert rounds == [(["a", "b", "c"], 5), (["a", "b"], 20)]
    slower = (11 / 10 + 11.2 / 9.6) / 2
    assert times == {"a": 10.0, "b": 9.6, "c": pytest.approx(13 / slower)}


def test_large_products_are_judged_alone(monkeypatch):
    alone = {"a": timing.Sustained(100.0, None), "b": timing.Sustained(96.0, None)}
    among_all = {"a": 110.0, "b": 112.0, "c": 130.0}
    monkeypatch.setattr(
        timing,
        "time_alternating",
        lambda graphs, repeats, flush: {name: timing.Timing(among_all[name], 0.0, 0.0) for name in graphs},
    )
    monkeypatch.setattr(timing, "time_sustained", lambda graph, once_us, seconds: alone[graph])
    monkeypatch.setattr(timing, "_PAUSE_SECONDS", 0)
    times = timing.time_to_choose({name: name for name in "abc"}, 20, flush=None)
    assert times == {"a": 100.0, "b": 96.0, "c": pytest.approx(130 / ((110 / 100 + 112 / 96) / 2))}


@pytest.mark.gpu
def test_wrong_results_are_left_out(monkeypatch):
    victim = tune.search_space(tune._bucket(128, 576, 512), wide=False)[0]
    multiply = tune.fp8_gemm

    def spoiled(*operands, config):
        result = multiply(*operands, config=config)
        return result.mul_(1.01) if config == victim else result

    monkeypatch.setattr(tune, "fp8_gemm", spoiled)
    (result,) = tune.tune([(128, 576, 512)], wide=False, repeats=3, track=lambda items, *_: items)
    assert list(result.wrong) == [victim] and result.choice.config != victim
    assert result.before_us != result.before_us


@pytest.mark.gpu
def test_refuses_what_cannot_be_multiplied():
    with pytest.raises(ValueError, match="shape 0x128x128: sizes must be positive"):
        tune.tune([(0, 128, 128)], wide=False, repeats=2, track=lambda items, *_: items)
    assert torch.cuda.is_available()


def test_every_sample_is_awaited_while_the_gpu_flushes(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 0.012

    class Graph:
        def replay(self):
            log.append("replay")

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    times = timing.time_alternating({"a": Graph()}, 2, lambda: log.append("flush"))
    sample = ["event", "replay", "event", "flush", "wait"]
    assert log == ["replay", "flush", *sample, *sample]
    assert times["a"].us == pytest.approx(12)
