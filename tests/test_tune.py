"""The search for the fastest config: candidates, results that are kept, and their use by the selector."""

import json
import multiprocessing
import resource
import warnings
from dataclasses import replace

import pytest
import torch

import deep_tile
from deep_tile import plan, settings
from deep_tile.config import GemmConfig
from deep_tile.kinds import FAMILIES, PACKED, QUANTIZED
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select import cost, tuned
from deep_tile.select.choose import (
    bucket_key,
    candidates,
    group_bucket,
    grouped_candidates,
    measured_choice,
    tuned_choice,
    what_is_made,
)
from deep_tile.select.defaults import default_configs
from deep_tile.select.groups import configs_of, grouped_configs
from deep_tile.tools import cli, timing, trials, tune

PROBLEM = GemmProblem(128, 7168, 2048)
KEY = "128x7168x2048"
GROUPED = GemmProblem(8 * 512, 4096, 7168, groups=Groups("offs", 8, 512))
GROUPED_KEY = "offs_8x512x4096x7168"
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def forgetful(monkeypatch, tmp_path):
    """Each test has files of its own, and remembers none of those before."""

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


@pytest.fixture
def keep(forgetful):
    """Store a choice and forget that none was there."""

    def store(config, key=KEY, num_sms=132):
        path = tuned.store(GPU, num_sms, {key: tuned.Choice(config, 12.5)})
        forgetful()
        return path

    return store


def another_config(problem=PROBLEM):
    """A default config that the selector does not choose by itself."""
    return candidates(problem)[3][1]


def files_in(folder):
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def install_gpu(tmp_path, model):
    folder = tmp_path / "proc" / f"0000:{len(model):02x}:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-1\n")


def test_processes_that_store_at_once_keep_each_others_choices(forgetful):
    """Each reads the file, adds to it and writes it."""
    keys = [f"{m}x1024x1024" for m in range(24)]

    def add(mine):
        for key in mine:
            tuned.store(GPU, 132, {key: tuned.Choice(GemmConfig(128, 128, 4), 12.5)})

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add, args=(keys[first::3],)) for first in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert set(tuned.choices(132)) == set(keys)


def test_stored_choice_is_chosen(keep):
    config = another_config()
    path = keep(config)
    assert path == settings.cache_dir() / "tuned" / "NVIDIA_H200.json"
    assert json.loads(path.read_text())["choices"][KEY]["us"] == 12.5
    assert tuned_choice(PROBLEM, tuned.configs(132)) == config
    assert plan.config_for(PROBLEM._replace(m=100)) == config
    assert plan.config_for(PROBLEM._replace(tma_store=False)) == replace(config, tma_store=False)
    assert config in plan.configs_for(GemmProblem(1, 7168, 2048), 200)


def test_choice_holds_for_its_bucket_and_number_of_sms_only(keep):
    others = [PROBLEM._replace(m=64), PROBLEM._replace(n=7160), PROBLEM._replace(num_sms=131)]
    before = [plan.config_for(problem) for problem in others]
    keep(another_config())
    assert [plan.config_for(problem) for problem in others] == before


def test_config_beside_the_default_ones_is_chosen(keep):
    config = next(c for c in tune.variants(another_config()) if c not in default_configs())
    keep(config)
    assert plan.config_for(PROBLEM) == config
    assert [c for _, c in candidates(PROBLEM, own=config)].count(config) == 1


def test_split_k_is_not_forced_on_a_batch_invariant_call(keep):
    config = next(c for _, c in candidates(PROBLEM) if c.split_k > 1)
    keep(config)
    assert plan.config_for(PROBLEM) == config
    assert plan.config_for(PROBLEM._replace(split_k=False)).split_k == 1


def another_grouped_config(problem=GROUPED):
    return grouped_candidates(problem)[2][1]


def test_choice_of_groups_holds_for_their_bucket(keep):
    config, mean = another_grouped_config(), GROUPED.groups._replace
    others = [
        *(GROUPED._replace(groups=mean(expected_rows=rows)) for rows in (384, 513)),
        *(GROUPED._replace(m=count * 512, groups=mean(count=count)) for count in (7, 9)),
        *(GROUPED._replace(groups=mean(layout="counts")), GROUPED._replace(n=4088), GROUPED._replace(num_sms=131)),
        GROUPED._replace(m=4 * 512),  # of which not all groups can have rows
    ]
    before = [plan.config_for(problem) for problem in others]
    assert config not in before
    keep(config, GROUPED_KEY)
    assert [plan.config_for(problem) for problem in others] == before
    for rows in (385, 450, 512):
        assert plan.config_for(GROUPED._replace(m=8 * rows, groups=mean(expected_rows=rows))) == config
    assert plan.config_for(GROUPED._replace(groups=mean(count=300))) == config  # as many can have rows
    elsewhere = plan.config_for(GROUPED._replace(tma_store=False))
    assert elsewhere in grouped_configs("offs", tma_store=False)
    assert (elsewhere.block_m, elsewhere.block_n) == (config.block_m, config.block_n)
    explained = deep_tile.explain_groups(8, 512, 4096, 7168)
    assert explained["config"] == config.name and "was measured fastest here" in explained["why"]
    assert deep_tile.explain_groups(8, 512, 4096, 7168, hardware="H20")["config"] != config.name


def test_clusters_along_k_are_not_forced_on_few_sms_or_any_store(keep):
    added = {"kind": "fp8_1x128", "output": "fp32", "accumulate": True}
    problem = GemmProblem(4096, 7168, 8 * 512, groups=Groups("k_offs", 8, 512), **added)
    alone = plan.config_for(problem._replace(tma_store=False))
    config = next(config for _, config in grouped_candidates(problem)[1:] if config.cluster > 1)
    key = bucket_key(group_bucket(problem))
    assert key == "k_offs_8x512x4096x7168_fp8_1x128_fp32_add"
    for num_sms in (132, 1):
        keep(config, key, num_sms)
        chosen = plan.config_for(problem._replace(num_sms=num_sms))
        assert chosen == config if num_sms == 132 else chosen.cluster == 1
        if num_sms == 132:
            assert plan.config_for(problem._replace(tma_store=False)) == alone
            assert not plan.config_for(problem._replace(accumulate=False)).accumulate


def test_what_is_no_kernel_of_groups_is_not_taken(keep):
    before = plan.config_for(GROUPED)
    keep(GemmConfig(256, 64, 4), GROUPED_KEY)
    assert plan.config_for(GROUPED) == before


def test_buckets_of_rows():
    def end(rows):
        return group_bucket(GROUPED._replace(m=8 * rows, groups=Groups("offs", 8, rows))).groups.expected_rows

    ends = [end(rows) for rows in range(1, 3000)]
    assert sorted(set(ends)) == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
        *sorted(set(ends))[16:],
    ]
    assert ends == sorted(ends) and all(rows <= most < 1.5 * rows + 1 for rows, most in enumerate(ends, start=1))
    assert [end(most) for most in ends] == ends


def test_own_results_come_before_the_shipped_ones(keep):
    key, shipped = next(iter(cost.calibration().choices.items()))
    problem = GemmProblem(*map(int, key.split("x")))
    assert measured_choice(problem) == shipped
    config = another_config(problem)
    keep(config, key)
    assert plan.config_for(problem) == config and config.name != shipped
    assert deep_tile.explain(*problem[:3])["config"] == config.name


@pytest.mark.parametrize(
    "change",
    [
        {"output": "fp16", "bias": "bf16", "activation": "swiglu"},
        {"output": "fp16", "tma_store": False},
        {"output": QUANTIZED},
        {"output": QUANTIZED, "bias": "fp32", "activation": "silu"},
    ],
    ids=str,
)
def test_a_result_is_for_every_product_of_its_bucket(change):
    problem = PROBLEM._replace(**change)
    assert bucket_key(problem) == KEY
    taken = [config for own in default_configs() if (config := tuned_choice(problem, {KEY: own}))]
    assert len(taken) >= 5 and {what_is_made(config) for config in taken} == {what_is_made(problem)}
    assert {config.tma_store for config in taken} == {problem.tma_store}


def test_any_default_config_is_taken_where_nothing_is_finished():
    assert all(tuned_choice(PROBLEM, {KEY: own}) == own for own in default_configs())


def test_results_add_up_and_newer_ones_win():
    first, second = another_config(), GemmConfig(64, 64, 5)
    tuned.store(GPU, 132, {KEY: tuned.Choice(first, 2.0), "8x128x128": tuned.Choice(first, 3.0)})
    tuned.store(GPU, 132, {KEY: tuned.Choice(second, 1.0)})
    assert tuned.choices(132) == {KEY: tuned.Choice(second, 1.0), "8x128x128": tuned.Choice(first, 3.0)}
    tuned.store(GPU, 66, {"8x128x128": tuned.Choice(second, 4.0)})
    assert tuned.choices(132) == {} and list(tuned.choices(66)) == ["8x128x128"]
    assert files_in(settings.cache_dir() / "tuned") == ["NVIDIA_H200.json"]


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
        '{"num_sms": 132, "choices": {"1x2x3": {"us": "x", "config": {"block_m": 64, "block_n": 64, "stages": 4}}}}',
        '{"num_sms": Infinity, "choices": {}}',
        "[" * 200_000,
        "\N{SNOWMAN}",
    ],
    ids=lambda text: text[:90],
)
def test_broken_file_is_one_warning_and_is_replaced(keep, text):
    path = tuned.path_for(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="ignores the tuned choices in .*NVIDIA_H200.json") as caught:
        chosen = plan.config_for(PROBLEM)
        plan.config_for(PROBLEM._replace(m=4096))
    assert len(caught) == 1
    config = another_config()
    assert chosen != config
    keep(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.config_for(PROBLEM) == config


def test_a_file_that_users_share_can_be_read_by_them(monkeypatch, tmp_path, forgetful):
    monkeypatch.setenv("DEEP_TILE_TUNED", str(tmp_path / "shared.json"))
    forgetful()
    path = tuned.store(GPU, 132, {KEY: tuned.Choice(another_config(), 2.0)})
    (tmp_path / "by umask").touch()
    assert path.stat().st_mode == (tmp_path / "by umask").stat().st_mode


def test_a_full_disk_leaves_the_old_file_and_nothing_else():
    """A limit of bytes per file fails a write as late as a full disk does."""
    choice = tuned.Choice(another_config(), 1.0)
    path = tuned.store(GPU, 132, {KEY: choice})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tuned.store(GPU, 132, {KEY: choice._replace(us=2.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tuned.choices(132) == {KEY: choice} and files_in(path.parent) == [path.name]


def test_a_choice_of_groups_is_none_for_a_matrix():
    config = GemmConfig(128, 64, 4, grouping="offs")
    own = tuned_choice(PROBLEM, {KEY: config})
    assert own is None and tuned_choice(PROBLEM, {KEY: another_config()}) is not None


@pytest.mark.parametrize("variable", ["DEEP_TILE_CACHE_DIR", "DEEP_TILE_TUNED"])
def test_a_place_that_cannot_be_searched_is_one_warning(monkeypatch, tmp_path, variable):
    """Such as the home of root, where a container runs as another user. Too long a name fails for root, too."""
    monkeypatch.setenv(variable, str(tmp_path / ("x" * 300) / "cache"))
    settings.cache_dir.cache_clear()
    with pytest.warns(RuntimeWarning, match="ignores the tuned choices: .*Set DEEP_TILE_CACHE_DIR") as caught:
        chosen = plan.config_for(PROBLEM)
        plan.config_for(PROBLEM._replace(m=4096))
    assert len(caught) == 1 and chosen != another_config()


def test_a_directory_is_not_to_be_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEP_TILE_TUNED", str(tmp_path))
    settings.tuned_file.cache_clear()
    with pytest.warns(RuntimeWarning, match="IsADirectoryError.*Set DEEP_TILE_TUNED to a file"):
        assert tuned.choices(132) == {}


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


@pytest.mark.parametrize("layout", ["offs", "counts", "k_offs"])
def test_search_space_of_groups_is_every_config(monkeypatch, layout):
    monkeypatch.setattr(tune, "_properties", properties_of(132))
    problem = tune._group_bucket(layout, 8, 100, 4096, 7168)
    assert problem.groups == Groups(layout, 8, 128)
    found = tune.search_space(problem, wide=False)
    assert found[0] == plan.config_for(problem)
    assert sorted(c.name for c in found) == sorted(c.name for c in grouped_configs(layout, True, layout == "k_offs"))
    tuned.store(GPU, 132, {bucket_key(problem): tuned.Choice(found[-1], 1.0)})
    assert tune.search_space(problem, wide=False)[0] == found[-1] == plan.config_for(problem)


@pytest.mark.parametrize(
    ("kind", "output", "k"), [("bf16", "fp32", 136), ("int8_unscaled", None, 144), ("fp8_rows_promoted", "fp16", 144)]
)
def test_kinds_are_tuned_for_their_calls(monkeypatch, kind, output, k):
    monkeypatch.setattr(tune, "_properties", properties_of(132))
    problem = tune._bucket(100, 7168, k, kind, output)
    assert (problem.m, problem.kind, problem.output) == (128, kind, output or FAMILIES[kind].output)
    found = tune.search_space(problem, wide=False)
    assert found[0] == plan.config_for(problem) and {config.kind for config in found} == {kind}
    tuned.store(GPU, 132, {bucket_key(problem): tuned.Choice(found[-1], 1.0)})
    assert plan.config_for(problem._replace(m=97)) == found[-1] != found[0]
    with pytest.raises(ValueError, match="shape 8x64x100: .*multiple of 16 bytes"):
        tune._bucket(8, 64, 100, kind)


def properties_of(num_sms):
    class Properties:
        name, multi_processor_count = GPU, num_sms

    return Properties


@pytest.mark.parametrize(("n", "k"), [(0, 128), (128, 2**31)])
def test_refuses_groups_that_cannot_be_multiplied(monkeypatch, n, k):
    monkeypatch.setattr(tune, "_properties", properties_of(132))
    with pytest.raises(ValueError, match=f"8 groups of 100 rows, n = {n}, k = {k}: "):
        tune._group_bucket("offs", 8, 100, n, k)


LITTLE = {
    "none": GemmProblem(17, 133, 272),
    "to FP32": GemmProblem(17, 133, 272, output="fp32"),
    **{
        f"{kind.name} to {output}": GemmProblem(17, 133, 272, kind=kind.name, output=output)
        for kind in FAMILIES.values()
        for output in dict.fromkeys((kind.output, "fp16"))
        if kind.name != "fp8"
    },
    **{name: GemmProblem(17, 144, 272, kind=name) for name in PACKED},
    **{
        f"{kind} offs": GemmProblem(5 * 30, 144, 272, kind=kind, groups=Groups("offs", 5, 30))
        for kind in ("mxfp4", "int4", "int4_32")
    },
    "offs": GemmProblem(5 * 30, 133, 272, groups=Groups("offs", 5, 30)),
    "counts": GemmProblem(40, 133, 272, groups=Groups("counts", 5, 30)),
    "k_offs": GemmProblem(
        *(133, 72, 5 * 300), kind="fp8_1x128", output="fp32", accumulate=True, groups=Groups("k_offs", 5, 300)
    ),
}


@pytest.mark.parametrize("layout", LITTLE)
def test_trials_notice_what_is_wrong_or_missing(layout):
    trial = trials.trial_of(LITTLE[layout], "cpu")
    out = trial.multiply(None)
    assert trial.error() <= trial.most_error <= 1e-2
    trial.spoil()
    assert not trial.error() <= trial.most_error
    assert trial.multiply(None) is out and trial.error() <= trial.most_error
    out[-1, : 7 if layout != "counts" else 1].mul_(3).add_(1)
    assert trial.error() > trial.most_error


def test_rows_of_a_trial_are_spread_around_their_mean():
    for count, rows in ((1, 100), (2, 7), (8, 512), (256, 20), (64, 1)):
        sizes = trials.sizes_of(GROUPED._replace(groups=Groups("offs", count, rows)))
        assert len(sizes) == count and sum(sizes) == pytest.approx(count * rows, rel=0.02)
        assert sizes == trials.sizes_of(GROUPED._replace(groups=Groups("offs", count, rows)))
        assert min(sizes) >= 0.7 * rows - 0.5 and max(sizes) <= 1.3 * rows + 0.5
    assert trials.sizes_of(GROUPED) != sorted(trials.sizes_of(GROUPED))


@pytest.mark.parametrize("layout", [layout for layout in LITTLE if layout != "int4_32 offs"])  # it has two configs
def test_a_search_keeps_the_fastest_that_is_right(monkeypatch, layout):
    """Times are made up, on the CPU: the fastest config is wrong, and the second writes nothing."""
    problem = LITTLE[layout]
    configs = tune.search_space(problem, wide=False)[:5]
    wrong, idle = configs[3], configs[1]
    times = dict(zip(configs, (10.0, 2.0, 8.0, 1.0, 9.0), strict=False))

    class Graph:
        def __init__(self, call):
            self.replay = call

    def trial_of(problem):
        trial = trials.trial_of(problem, "cpu")

        def multiply(config):
            return trial.spoil() if config == idle else trial.multiply(None).mul_(2 if config == wrong else 1)

        return trial._replace(multiply=multiply)

    monkeypatch.setattr(tune, "capture", Graph)
    monkeypatch.setattr(tune, "trial_of", trial_of)
    monkeypatch.setattr(
        tune, "time_to_choose", lambda graphs, repeats, flush: {config: times[config] for config in graphs}
    )
    result = tune._tune_bucket(problem, configs, repeats=3, flush=None)
    assert set(result.wrong) == {wrong, idle} and result.tried == 3
    assert result.choice == tuned.Choice(configs[2], 8.0)
    assert (result.before, result.before_us) == (configs[0], 10.0)


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


def test_shapes_of_every_form(tmp_path):
    file = tmp_path / "shapes"
    file.write_text("64x2112x7168\n\n# decode\n8x512x256  # the least\n")
    options = cli._parser().parse_args(["tune", "7168x2048", "96x512x256", "--shapes", str(file)])
    of_weight = [(m, 7168, 2048) for m in cli.TOKENS_TO_TUNE]
    assert cli._shapes_to_tune(options) == [*of_weight, (96, 512, 256), (64, 2112, 7168), (8, 512, 256)]


def test_groups_are_collected_by_weight():
    given = ["8x512x256", "16x256x512", "64x512x256"]
    options = cli._parser().parse_args(["tune", "--groups", "4", "--grouping", "counts", *given])
    assert cli._groups_to_tune(options) == [("counts", 4, [8, 64], 512, 256), ("counts", 4, [16], 256, 512)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give shapes MxNxK, weights NxK, or --shapes FILE"),
        (["7168"], "'7168' is not MxNxK"),
        (["7168x0"], "'0' is not a positive integer"),
        (["8x7168x-1"], "'8x7168x-1' is not MxNxK"),
        (["--shapes", "/nowhere"], "'/nowhere' cannot be read"),
        (["7168x2048", "--repeats", "1"], "give 2 or more"),
        (["7168x2048", "--groups", "8"], "give RxNxK beside --groups"),
        (["--groups", "8"], "give RxNxK beside --groups"),
        (["7168x2048", "--grouping", "counts"], "give --groups G, too"),
        (["8x7168x2048", "--groups", "8", "--wide"], "--wide and --output are not for groups"),
        (["8x7168x2048", "--groups", "8", "--kind", "fp8_1x128"], "operands are fp8_1x128; grouping 'offs' takes"),
        (["7168x2048", "--output", "int32"], "results of fp8 are bf16, fp16, fp32; --output is int32"),
        (["8x7168x2048", "--groups", "8", "--shapes", "/dev/null"], "has no line MxNxK"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["tune", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cli.deep_tile, "is_available", lambda: (False, "no GPU"), raising=False)
    assert cli.main(["tune", "7168x2048"]) == 1
    assert "needs a Hopper GPU: no GPU" in capsys.readouterr().err


def test_command_keeps_what_it_finds(monkeypatch, capsys, tmp_path):
    asked = []

    def search(shapes, *, kind, output, wide, repeats, track):
        asked.append((shapes, kind, output, wide, repeats))
        before, best = plan.config_for(PROBLEM), another_config()
        return [tune.Tuned(PROBLEM, tuned.Choice(best, 10.0), before, 12.0, 7, {before: 0.5})]

    file = tmp_path / "shapes.txt"
    file.write_text("# a comment\n\n8x7168x2048 # decode\n4096x576x7168\n")
    monkeypatch.setattr(cli.deep_tile, "is_available", lambda: (True, ""), raising=False)
    monkeypatch.setattr(tune, "tune", search)
    monkeypatch.setattr(tune, "_properties", properties_of(132))
    expected = another_config()
    assert cli.main(["tune", "1x576x7168", "2x576x7168", "--shapes", str(file), "--wide", "--kind", "bf16"]) == 1
    shapes = [(1, 576, 7168), (2, 576, 7168), (8, 7168, 2048), (4096, 576, 7168)]
    assert asked == [(shapes, "bf16", None, True, 20)]
    printed = capsys.readouterr()
    assert expected.name in printed.out and "20.0%" in printed.out and "NVIDIA_H200.json" in printed.out
    assert "relative error 5.00e-01; left out" in printed.err
    assert plan.config_for(PROBLEM) == expected


@pytest.mark.parametrize("layout", ["offs", "k_offs"])
def test_command_keeps_what_it_finds_of_groups(monkeypatch, capsys, layout):
    asked = []

    def search(layout, count, rows, n, k, *, kind, repeats, track):
        asked.append((layout, count, rows, n, k, kind, repeats))
        problems = [tune._group_bucket(layout, count, mean, n, k, kind) for mean in rows]
        found = [(problem, plan.config_for(problem), another_grouped_config(problem)) for problem in problems]
        return [tune.Tuned(p, tuned.Choice(best, 10.0), before, 12.0, 6, {before: 0.5}) for p, before, best in found]

    monkeypatch.setattr(cli.deep_tile, "is_available", lambda: (True, ""), raising=False)
    monkeypatch.setattr(tune, "tune_groups", search)
    monkeypatch.setattr(tune, "_properties", properties_of(132))
    arguments = ["60x4096x7168", "512x4096x7168", "--groups", "8"]
    arguments += ["--grouping", layout] if layout != "offs" else []
    expected = [another_grouped_config(tune._group_bucket(layout, 8, rows, 4096, 7168)) for rows in (60, 512)]
    assert cli.main(["tune", *arguments, "--repeats", "5"]) == 1
    assert asked == [(layout, 8, [60, 512], 4096, 7168, "fp8", 5)]
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines() if line.split()[:1] in [[c.name] for c in expected]]
    assert [row[1:7] for row in rows] == [
        ["8", "64", "4096", "7168", "10.0", f"{2 * 8 * 64 * 4096 * 7168 / 10 / 1e6:.0f}"],
        ["8", "512", "4096", "7168", "10.0", f"{2 * 8 * 512 * 4096 * 7168 / 10 / 1e6:.0f}"],
    ]
    assert f"at {layout}_8x64x4096x7168" in printed.err and "relative error 5.00e-01; left out" in printed.err
    assert [plan.config_for(tune._group_bucket(layout, 8, rows, 4096, 7168)) for rows in (60, 512)] == expected


def check_search(results, space):
    """Every config of the space was tried and is right, and what is chosen is used once it is stored."""
    for result in results:
        assert result.tried == len(space(result.problem)) and not result.wrong
        assert 0 < result.choice.us <= result.before_us
    tune.store(results)
    assert [plan.config_for(result.problem) for result in results] == [result.choice.config for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("kind", "output"),
    [("fp8", None), ("fp8", "fp32"), ("bf16", None), ("fp8_rows", None), ("fp8_1x128", "fp32"), ("int8", "fp16")],
)
def test_search_on_the_gpu(kind, output, wide):
    shapes = [(113, 576, 512), (128, 576, 512), (9, 133, 272)]
    what = {"kind": kind, "output": output, "wide": wide}
    results = tune.tune(shapes, **what, repeats=3, track=lambda items, *_: items)
    assert [result.problem[:3] for result in results] == [(128, 576, 512), (16, 133, 272)]
    check_search(results, lambda problem: tune.search_space(problem, wide))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("offs", "fp8"), ("counts", "fp8"), ("k_offs", "fp8"), ("offs", "bf16"), ("counts", "fp8_rows")),
        *(("offs", "int8"), ("counts", "int8_unscaled"), ("offs", "fp8_rows_promoted")),
    ],
)
def test_search_of_groups_on_the_gpu(layout, kind):
    what = {"kind": kind, "repeats": 3, "track": lambda items, *_: items}
    results = tune.tune_groups(layout, 5, [20, 30, 200], 576, 512, **what)
    groups = [(5, 24), (5, 32), (5 if layout == "counts" else 4, 256)]
    assert [result.problem.groups for result in results] == [Groups(layout, *of_rows) for of_rows in groups]
    check_search(results, configs_of)


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
    alone = {"a": 100.0, "b": 96.0}
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
    multiply = trials.multiply

    def spoiled(kind, operands, out, config):
        result = multiply(kind, operands, out, config)
        return result.mul_(1.01) if config == victim else result

    monkeypatch.setattr(trials, "multiply", spoiled)
    (result,) = tune.tune([(128, 576, 512)], wide=False, repeats=3, track=lambda items, *_: items)
    assert list(result.wrong) == [victim] and result.choice.config != victim
    assert result.before_us != result.before_us


@pytest.mark.gpu
def test_refuses_what_cannot_be_multiplied():
    with pytest.raises(ValueError, match="shape 0x128x128: m is 0; sizes must be positive"):
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
