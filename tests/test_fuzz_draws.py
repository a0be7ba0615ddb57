"""The draws and the expected results of the fuzzers, without a GPU."""

import math
import re
from dataclasses import asdict
from math import prod
from random import Random

import changes
import expected_casts
import fuzz_casts
import fuzz_formats
import fuzz_gpu
import fuzz_groups
import fuzz_kinds
import pytest
import torch
from campaign import OperandPool
from expected import expected_product
from fuzz_casts import CASES
from fuzz_kinds import CALLS, FINISHES, GRADIENTS, SCALE_FORMS, Values, selectable
from helpers import GuardedOut, Operands
from hypothesis import given, settings
from hypothesis import strategies as st
from pretending import unpack
from strategies import (
    NUM_SMS,
    SMALL,
    SMALL_KINDS,
    Call,
    config_named,
    draw_call,
    draw_config,
    draw_configs,
    family,
    legal_configs,
)

from deep_tile import (
    GemmConfig,
    checks,
    dense,
    params,
    plan,
    quantize,
    wgrad,
)
from deep_tile.config import SMEM_LIMIT_BYTES, ceil_div
from deep_tile.formats import FORMATS
from deep_tile.kinds import FAMILIES, KINDS, LAYOUTS, OUTPUTS, RAW
from deep_tile.operation import OPERATIONS
from deep_tile.problem import GemmProblem
from deep_tile.select.choose import choose
from deep_tile.select.defaults import default_configs
from deep_tile.tensors import SCALE_DTYPES

pytestmark = pytest.mark.about(*changes.OF_FUZZERS)


# Draws and plans of `fp8_gemm`.


@st.composite
def calls(draw, **limits):
    return draw_call(draw(st.randoms(use_true_random=False)), num_sms=NUM_SMS, **limits)


def fast(examples: int):
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def pool() -> OperandPool:
    return OperandPool(200, 400, "cpu", seed=1)


@given(calls(limits=SMALL, empty=True), st.integers(0, 2**31 - 1))
@fast(50)
def test_any_call_is_right(pool, call, seed):
    fuzz_gpu.assert_right(call, pool, seed)


@given(calls(limits=SMALL, special=True), st.integers(0, 2**31 - 1))
@fast(50)
def test_any_value_of_a_scale_reaches_what_it_must(pool, call, seed):
    fuzz_gpu.assert_right(call, pool, seed)


@pytest.fixture(scope="module")
def drawn_calls() -> list[Call]:
    random = Random(7)
    return [draw_call(random, num_sms=NUM_SMS, special=i % 4 == 0) for i in range(400)]


def test_every_drawn_config_suits_its_call(drawn_calls):
    for (m, n, k, *_), use in drawn_calls:
        if use.config is not None:
            out = GuardedOut(m, n, stride=use.out_stride, offset=use.out_offset).out
            sms, may_split = use.num_sms or NUM_SMS, not use.batch_invariant
            problem = GemmProblem(m, n, k, sms, checks.tma_can_store(out), may_split)
            assert checks.checked_config(use.config, problem) is use.config


def test_calls_are_of_every_kind(drawn_calls):
    """Sizes around tiles, every scale layout, chosen configs and forced ones, all options."""
    uses = [call.use for call in drawn_calls]
    assert {use.config is None for use in uses} == {True, False}
    assert {use.pdl for use in uses} == {None, True, False}
    assert any(use.constant_weights for use in uses) and any(use.batch_invariant for use in uses)
    assert any(use.out_offset % 8 for use in uses) and any(use.num_sms for use in uses)
    ks = [call.problem.k for call in drawn_calls]
    assert {k % 128 for k in ks} >= {0, 1, 127} and min(ks) < 16
    kinds = [(call.problem.places.a_scale.strides, call.problem.m) for call in drawn_calls]
    assert {0, 1} <= {strides[0] for strides, _ in kinds} and {0, 1} <= {strides[1] for strides, _ in kinds}
    values = [special.value for call in drawn_calls for special in call.problem.specials]
    assert {0.0, math.inf, -math.inf} < set(values) and any(math.isnan(value) for value in values)


def test_random_configs_are_of_every_family():
    random = Random(1)
    assert {family(draw_config(random)) for _ in range(3000)} == {family(config) for config in legal_configs()}


NUMBERS = {
    "block_m": (0, 32, 64, 128, 192, 256, 512),
    "block_n": (-16, 0, 8, 16, 48, 64, 100, 128, 144, 192, 256, 272),
    **dict.fromkeys(("stages", "store_buffers", "b_stages"), range(-1, 30)),
    **dict.fromkeys(("cluster_m", "cluster_n"), range(-1, 9)),
    **dict.fromkeys(("split_k", "scale_blocks"), range(-1, 17)),
    "pairs": (False, True),
}


@st.composite
def numbers(draw):
    """The fields of a legal config, one or two of them changed."""
    changed = draw(st.lists(st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=2))
    config = draw_config(draw(st.randoms(use_true_random=False)))
    return asdict(config) | {name: draw(st.sampled_from(NUMBERS[name])) for name in changed}


@given(numbers())
@fast(300)
def test_any_numbers_make_a_config_or_are_refused_by_its_name(fields):
    try:
        config = GemmConfig(**fields)
    except ValueError as error:
        assert re.match(r"fp8_gemm_\S+: \w+", str(error))
        return
    assert config.smem_bytes <= SMEM_LIMIT_BYTES
    assert config.accumulator_registers + config.block_sets * config.block_registers <= config.math_registers - 24
    assert config.stages >= 2 and config.boxes % config.store_chunks == 0


def test_names_come_back():
    random = Random(2)
    configs = {*default_configs(True), *default_configs(False), *(draw_config(random) for _ in range(500))}
    assert all(config_named(config.name) == config for config in configs)
    assert config_named("64x64x256_s6_k2_b1") == config_named("fp8_gemm_64x64x256_s6_c1x1_k2_b1")
    with pytest.raises(ValueError, match="'fast' is no name of a kernel"):
        config_named("fast")


@pytest.fixture
def launches(monkeypatch):
    """Launches that would be made: their numbers, the fields of the kernel's argument, and its tensor maps by
    offset."""
    made = []

    def prepare(kernel, **asked):
        maps = {offset: entry for offset, *entry in asked["maps"]}
        made.append(asked | unpack(params.GEMM, asked["params"]) | {"maps": maps})

    monkeypatch.setattr(plan, "load_kernel", lambda config, device: None)
    monkeypatch.setattr(plan._launcher, "prepare", prepare)
    return made


def test_launches_cover_the_matrix(drawn_calls, launches):
    """Boxes that TMA takes, and a grid whose clusters take every tile once, the first ones at once."""
    for (m, n, k, places, _), use in drawn_calls:
        sms, may_split = use.num_sms or NUM_SMS, not use.batch_invariant
        problem = GemmProblem(m, n, k, sms, use.config.tma_store if use.config else n % 8 == 0, may_split)
        config = use.config or choose(problem)
        assert checks.checked_config(config, problem) is config
        strides = max(k, 16), max(k, 16), use.out_stride, places.a_scale.strides, places.b_scale.strides
        layout = plan.Layout(*strides, a_scale_aligned=True)
        plan.prepare_launch(problem, config, layout, 0, pdl=True, constant_weights=False)
        assert_covers(launches.pop(), config, problem)


def assert_covers(launch: dict, config: GemmConfig, problem: GemmProblem) -> None:
    assert launch["cluster"] == config.cluster and launch["grid"] % config.cluster == 0
    assert config.cluster <= launch["grid"] <= problem.num_sms
    swizzle_128 = params._SWIZZLES[128]
    for name in ("a_maps", "b_maps"):
        _, _, (width, height), _, (box_width, box_height), swizzle, *_ = launch["maps"][params.GEMM.offsets[name]]
        assert (width, box_width, swizzle) == (problem.k, 128, swizzle_128) and 1 <= box_height <= 256 and height > 0
    for name, rows, tile, sharers in (
        ("a_tail_rows", problem.m, config.block_m, config.cluster_n),
        ("b_tail_rows", problem.n, config.block_n, config.cluster_m),
    ):
        left, box = rows % tile, launch[name]
        assert (box == 0) == (left == 0) and left <= box * sharers <= tile and (sharers == 1 or box % 8 == 0)
    if not config.resident_b:
        assert_tiles_are_taken_once(launch, config, problem)


def assert_tiles_are_taken_once(launch: dict, config: GemmConfig, problem: GemmProblem) -> None:
    """RasterScheduler (raster.cuh) walks the tiles so, with division by multiplication."""
    rows = ceil_div(problem.m, config.block_m * config.cluster_m)
    columns = ceil_div(problem.n, config.block_n * config.cluster_n)
    assert launch["grid"] // config.cluster <= rows * columns
    group_rows = (1 << launch["raster_rows_log2"]) // config.cluster_m
    taken = [tile_at(position, rows, columns, group_rows, launch) for position in range(rows * columns)]
    assert sorted(taken) == [(row, column) for row in range(rows) for column in range(columns)]


def tile_at(position: int, rows: int, columns: int, group_rows: int, launch: dict) -> tuple[int, int]:
    group, within = divmod(position, group_rows * columns)
    height = min(group_rows, rows - group * group_rows)
    reciprocal = (1 << 31) // group_rows if height == group_rows else launch["last_rows_reciprocal"]
    column = 2 * within * reciprocal >> 32
    return group * group_rows + within - column * height, column


# Expected results: by hand, and by the kernels' arithmetic.


def one_element(a_scale: float, b_scale: float, *, a: float = 1.0, b: float = 1.0, k: int = 128) -> Operands:
    """1 x 1 x k; both operands are 0 but for their first elements."""

    def operand(value: float) -> torch.Tensor:
        x = torch.zeros(1, k)
        x[0, 0] = value
        return x.to(torch.float8_e4m3fn)

    groups = ceil_div(k, 128)
    return Operands(operand(a), torch.full((1, groups), a_scale), operand(b), torch.full((1, groups), b_scale))


FINITE, UP, DOWN, NAN = "finite", "positive", "negative", "nan"


@pytest.mark.parametrize(
    ("operands", "kinds"),
    [
        (one_element(2.0, -3.0), {FINITE}),
        (one_element(math.inf, 1.0), {UP}),
        (one_element(math.inf, -1.0), {DOWN}),
        (one_element(-math.inf, 1.0, a=-2.0), {UP}),
        (one_element(math.inf, 0.0), {NAN}),
        (one_element(math.inf, 1.0, a=0.0), {NAN}),
        (one_element(math.nan, 0.0, a=0.0), {NAN}),
        (one_element(0.0, 1.0, b=math.nan), {NAN}),
        (one_element(3e38, 3e38), {UP}),  # the product of the scales overflows
        (one_element(3e38, 3e38, a=0.0), {NAN}),
        (one_element(3e38, 1.0), {FINITE}),
        (one_element(1e38, 1.0, a=448.0, b=-448.0), {UP, DOWN, NAN}),
        (one_element(1e-30, 1e-30), {FINITE}),
    ],
)
def test_expected_by_hand(operands, kinds):
    expected = expected_product(operands)
    assert {kind for kind in (FINITE, UP, DOWN, NAN) if getattr(expected, kind).item()} == kinds
    assert not expected.wrong(promoted(operands)).any()


def promoted(operands: Operands) -> torch.Tensor:
    """The product as the kernels compute it, but for the sums within a K block of 128."""
    m, n, k = operands.sizes
    total = torch.zeros(m, n)
    for group in range(ceil_div(k, 128)):
        columns = slice(group * 128, (group + 1) * 128)
        block = (operands.a.float()[:, columns].double() @ operands.b.float()[:, columns].double().t()).float()
        scale = operands.a_scale[:, group, None] * operands.b_scale[torch.arange(n) // 128, group][None]
        total = (total.double() + scale.double() * block.double()).float()  # rounded once, as by a fused multiply-add
    return total.to(torch.bfloat16)


@given(calls(limits=SMALL, special=True), st.integers(0, 2**31 - 1))
@fast(50)
def test_expected_of_the_kernels_arithmetic(pool, call, seed):
    problem = call.problem
    values = pool.cut(Random(seed), problem.m, problem.n, problem.k)
    _, operands = fuzz_gpu.arrange(fuzz_gpu.with_specials(values, problem.specials), problem.places)
    assert not expected_product(operands).wrong(promoted(operands)).any()


# Kinds.


@pytest.fixture(scope="module")
def kernels():
    return fuzz_kinds.draw_kernels(Random("4:kernels"), 48, NUM_SMS)


@pytest.fixture(scope="module")
def drawn_kinds(kernels):
    return draws(kernels, 2000)


def draws(kernels, count, limits=SMALL_KINDS):
    named = {config.name: config for config in kernels}
    return [fuzz_kinds.draw(Random(f"9:{number}"), named, number, NUM_SMS, limits) for number in range(count)]


def family_of(config) -> str:
    return GRADIENTS if config.by_k else config.product.family


# Draws.


def test_kernels_are_of_every_kind_and_finish(kernels):
    for name in (*FAMILIES, GRADIENTS):
        own = [config for config in kernels if family_of(config) == name]
        assert len(own) == 48 == len({config.name for config in own})
        assert {True, False} == {config in selectable(config) for config in own} == {config.tma_store for config in own}
        assert {config.accumulate for config in own} == {True, False}
    assert {config.kind for config in kernels} == set(KINDS)
    assert {(config.bias, config.activation) for config in kernels} == set(FINISHES)
    assert {config.output for config in kernels} == {*OUTPUTS, RAW}
    of_16_bits = {(config.kind, config.layout) for config in kernels if config.product.a.bytes == 2}
    assert of_16_bits == {(kind, layout) for kind in ("bf16", "fp16") for layout in LAYOUTS}


def test_kinds_are_of_every_call(drawn_kinds, kernels):
    wanted = {(call, kind) for kind, calls in CALLS.items() for call in calls} | {("fp8_grouped_wgrad", "fp8_1x128")}
    assert {(draw.call, draw.config.product.family) for draw in drawn_kinds} == wanted
    own = {draw.config for draw in drawn_kinds}
    assert own <= set(kernels) and len(own) > 0.8 * len(kernels)
    assert {form for draw in drawn_kinds if draw.config.row_scales for form in draw.scale_forms} == set(SCALE_FORMS)
    uses = [draw.use for draw in drawn_kinds]
    assert 0.2 < sum(use.config is None for use in uses) / len(uses) < 0.8
    assert {use.pdl for use in uses} == {None, True, False}
    assert any(use.constant_weights for use in uses) and any(use.batch_invariant for use in uses)
    assert {draw.scale_dtype for draw in drawn_kinds} == {str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES}
    assert {draw.bias.strides[0] for draw in drawn_kinds} == {0, 1, 2, 3}
    ks = [draw.problem.k for draw in drawn_kinds]
    assert {k % 128 for k in ks} >= {0, 1, 127} and min(ks) < 16


def test_tokens_are_of_every_kind(drawn_kinds):
    tokens = [draw.tokens for draw in drawn_kinds if draw.tokens]
    lengths = [end - begin for one in tokens for begin, end in one.ranges]
    assert {0, 1, 127, 128, 129} <= set(lengths)
    assert {len(one.bounds) for one in tokens} == set(fuzz_kinds.GROUPS)
    assert {one.alignment for one in tokens} >= {128, 256}
    assert any(min(one.bounds) < 0 for one in tokens) and any(max(one.bounds) > one.total for one in tokens)
    assert any(list(one.bounds) != sorted(one.bounds) for one in tokens)


def test_draws_are_legal(drawn_kinds, kernels):
    """A config that its call takes, or one that the selector chooses; an `out` as the draw says."""
    for draw in drawn_kinds:
        problem = draw.asked(NUM_SMS)
        assert checks.checked_config(draw.config, problem) is draw.config
        if draw.use.config is None:
            assert plan.config_for(problem) == draw.config
        else:
            assert draw.use.config is draw.config


def test_selectors_problems_are_those_that_are_drawn(drawn_kinds):
    """A call asks the selector for the problem that the draw was made for."""
    values = Values("cpu", 1)
    for draw in drawn_kinds[:300]:
        sample = fuzz_kinds.make(values, draw, "cpu")
        out = fuzz_kinds.guarded_out(draw, "cpu").out
        use = draw.use
        if draw.call == "fp8_grouped_wgrad":
            options = wgrad.Options(num_sms=NUM_SMS if use.num_sms is None else use.num_sms)
            options = options._replace(expected_tokens=draw.tokens.expected, accumulate=draw.config.accumulate)
            assert wgrad.FP8_GROUPED_WGRAD.problem((*sample.operands, out), options) == draw.asked(NUM_SMS)
        elif draw.call != "fp8_gemm":
            options = dense.Options(batch_invariant=use.batch_invariant, num_sms=use.num_sms or NUM_SMS)
            options = options._replace(accumulate=draw.config.accumulate, fast_accum=not draw.config.product.promotes)
            activation = None if draw.config.activation == "none" else draw.config.activation
            operation = OPERATIONS[draw.call]
            given = (*sample.operands, out, sample.bias)[: len(operation.names)]
            asked = operation.problem(given, options._replace(activation=activation))
            assert asked == draw.asked(NUM_SMS), draw


LAUNCHED = {
    "fp8": ("""
from campaign import OperandPool
from fuzz_gpu import arrange
from helpers import GuardedOut
from strategies import draw_call
random, pool = Random(4), OperandPool(208, 400, "cpu", seed=1)
for _ in range(120):
    (m, n, k, places, _), use = draw_call(random, num_sms=132, limits=Limits(60, 200, 400))
    _, operands = arrange(pool.cut(random, m, n, k), places)
    guarded = GuardedOut(m, n, stride=use.out_stride, offset=use.out_offset)
    for _ in range(2):
        attempt(fp8_gemm, *operands, guarded.out, **use.keywords)
    guarded.assert_untouched()  # nothing computes
""", 120),
    "kinds": ("""
import fuzz_kinds
checks.checked_num_sms = lambda num_sms, device: num_sms or 132
kernels = {config.name: config for config in fuzz_kinds.draw_kernels(Random(3), 24, 132)}
values = fuzz_kinds.Values("cpu", 1)
for number in range(200):
    drawn = fuzz_kinds.draw(Random(number), kernels, number, 132, Limits(60, 200, 400))
    sample = fuzz_kinds.make(values, drawn._replace(scale_dtype="float32"), "cpu")
    guarded = fuzz_kinds.guarded_out(drawn, "cpu")
    for _ in range(2):
        attempt(fuzz_kinds.multiply, sample, drawn, guarded.out)
    guarded.assert_untouched()
""", 200),
}  # fmt: skip


@pytest.mark.parametrize("what", LAUNCHED)
def test_the_launcher_takes_every_call(run_pretending, what):
    """Sizes, strides and maps, on a pretended driver: each call is prepared once, and then known."""
    code, count = LAUNCHED[what]
    shown, launched = run_pretending("from random import Random\nfrom strategies import Limits" + code)
    assert shown == ["prepare_launch launch", "launch_known"] * count and len(launched) == 2 * count


# Groups, formats.


def test_groups_are_of_every_kind():
    drawn = [fuzz_groups.draw(Random(f"7:{number}"), number, NUM_SMS) for number in range(3000)]
    assert {draw.config for draw in drawn} == {None, *fuzz_groups.CONFIGS}
    assert {(draw.kind, draw.operands) for draw in drawn} == {*fuzz_groups.DRAWN_KINDS}
    assert {draw.groups for draw in drawn} == set(fuzz_groups.GROUPS)
    assert any(draw.bounds is None for draw in drawn)
    assert any(draw.bounds and min(draw.bounds) < 0 for draw in drawn)
    assert any(draw.bounds and list(draw.bounds) != sorted(draw.bounds) for draw in drawn)
    assert {draw.alignment for draw in drawn} >= {1, 16, 128}
    rows = [last - first for draw in drawn for _, first, last in fuzz_groups.living_rows(draw)]
    assert {1, 64, 65, 128, 129} <= set(rows) and max(rows) > 500


def test_formats_are_of_every_kind(monkeypatch):
    drawn = []

    def note(name, *_):
        drawn.append(name)
        raise InterruptedError

    monkeypatch.setattr(fuzz_formats, "draw", note)
    for number in range(100):
        with pytest.raises(InterruptedError):
            next(fuzz_formats.check_format(Random(number), "cpu"))
    assert {*drawn} == {*FORMATS}


# Casts.


@pytest.fixture(scope="module")
def drawn_casts():
    return [fuzz_casts.draw(Random(f"3:{number}"), fuzz_casts.USUAL) for number in range(4000)]


# Draws.


def test_casts_are_of_every_call(drawn_casts):
    assert {draw.case for draw in drawn_casts} == set(CASES)
    targets = {(len(draw.targets), "out" in draw.targets) for draw in drawn_casts if draw.case == "per token"}
    assert targets == {(0, False), (1, True), (1, False), (2, True)}
    for name, values in {"round_scale": 2, "exact": 2, "scale_layout": 3, "limit": 5, "alignment": 8}.items():
        assert len({draw.options[name] for draw in drawn_casts if name in draw.options}) == values, name
    assert len({draw.options.get("config") for draw in drawn_casts if draw.case == "gemm cast"}) > 15
    floors = {draw.options.get("amax_floor") for draw in drawn_casts}
    assert floors == set(fuzz_casts.FLOORS)


def test_inputs_are_of_every_dtype_layout_and_value(drawn_casts):
    inputs = [x for draw in drawn_casts for x in draw.inputs.values()]
    sources_ = [draw.inputs["x"] for draw in drawn_casts if draw.case in ("per token", "counted", "transposed")]
    assert {x.dtype for x in sources_} == {fuzz_casts.name_of(dtype) for dtype in quantize.SOURCE_DTYPES}
    assert {x.values for x in sources_} == set(fuzz_casts.VALUES)
    scales = {draw.inputs["b_scale"].dtype for draw in drawn_casts if "b_scale" in draw.inputs}
    assert scales == {fuzz_casts.name_of(dtype) for dtype in SCALE_DTYPES}
    assert {len(x.shape) for x in sources_} == {1, 2, 3, 4}
    assert {k % 128 for x in sources_ for k in x.shape[-1:]} >= {0, 1, 8, 127} and any(0 in x.shape for x in sources_)
    strides = [x.place.strides for x in sources_ if min(x.shape, default=0) > 1]
    assert any(0 in own for own in strides) and any(own[-1] == 2 for own in strides)
    assert any(own[-1] > own[0] > 0 for own in strides if len(own) > 1)
    assert any(own[0] < x.shape[1] and own[1] == 1 for x in sources_ if len(own := x.place.strides) == 2)
    assert {x.place.offset % 16 for x in inputs} == set(range(16))


def test_many_inputs_are_no_view_of_a_matrix(drawn_casts):
    """Calls copy such inputs first, where casts with counts were once wrong."""
    pool = fuzz_casts.Pool("cpu", 1)
    counted = [draw for draw in drawn_casts if draw.case == "counted"][:100]
    copied = 0
    for draw in counted:
        x = fuzz_casts.make(pool, draw)[1]["x"]
        copied += x.numel() > 0 and quantize.readable(x).data_ptr() != x.data_ptr()
    assert copied > 30


def test_lists_lie(drawn_casts):
    ends = [
        (draw, draw.inputs[name].values) for draw in drawn_casts for name in ("offs", "counts") if name in draw.inputs
    ]
    assert {type(draw.options.get("alignment")) for draw, _ in ends} == {int, type(None)}
    numbers = [values for _, values in ends if values]
    assert any(min(own) < 0 for own in numbers) and any(max(own) == 2**31 - 1 for own in numbers)
    assert any(list(own) != sorted(own) for own in numbers) and any(own[-1] > 0 for own in numbers)
    pool, beyond = fuzz_casts.Pool("cpu", 1), set()
    for draw in [draw for draw in drawn_casts if "rows" in draw.inputs][:100]:
        rows = fuzz_casts.make(pool, draw)[1]["rows"]
        beyond |= {(row < 0) - (row >= draw.inputs["x"].shape[0]) for row in rows.tolist()}
    assert beyond >= {1, 0, -1}


@pytest.mark.parametrize("sizes", [fuzz_casts.USUAL, fuzz_casts.LARGE])
def test_the_pool_is_large_enough(sizes):
    largest = [max(prod(x.shape) for x in fuzz_casts.draw(Random(seed), sizes).inputs.values()) for seed in range(2000)]
    assert sizes.elements / 2 < max(largest) <= fuzz_casts._POOL


def test_the_same_seed_draws_the_same(kernels):
    for draw in (
        lambda seed: draw_call(Random(seed), num_sms=NUM_SMS, special=True),
        lambda seed: draw_configs(Random(seed), 90),
        lambda seed: fuzz_kinds.draw_kernels(Random(seed), 2, NUM_SMS),
        lambda seed: draws(kernels, 3 + seed)[seed:],
        lambda seed: [fuzz_casts.draw(Random(f"{seed}:{number}"), fuzz_casts.USUAL) for number in range(20)],
        lambda seed: fuzz_groups.draw(Random(seed), seed, NUM_SMS),
    ):
        assert repr(draw(3)) == repr(draw(3)) != repr(draw(4))
    pool, drawn = fuzz_casts.Pool("cpu", 7), [fuzz_casts.draw(Random(seed), fuzz_casts.USUAL) for seed in range(10)]
    for draw in drawn:  # by itself, and after others
        assert torch.equal(fuzz_casts.make(fuzz_casts.Pool("cpu", 7), draw)[0], fuzz_casts.make(pool, draw)[0])


# Expected casts.


def test_e4m3_is_rounded_to_nearest_even():
    """The table of e4m3 numbers decides: the oracle uses torch's conversion."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (table[1:] + table[:-1]) / 2
    even = torch.where(torch.arange(0x7E) % 2 == 0, torch.arange(0x7E), torch.arange(1, 0x7F)).to(torch.uint8)
    x = torch.stack([halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(500.0))])
    x = torch.cat([x, x.new_full((3, 2), 448.0)], 1)
    codes = expected_casts.cast(x, 1, expected_casts.Rounding(448.0)).codes[:, :-2]
    below, above = torch.arange(0x7E, dtype=torch.uint8), torch.arange(1, 0x7F, dtype=torch.uint8)
    assert torch.equal(codes, torch.stack([even, below, above]))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (448.0000305, 2.0), (224.0, 0.5), (3.3e38, 2.0**120), (0.0, 2.0**-70), (float("inf"), None)],
)
def test_powers_of_two_are_decided_exactly(amax, scale):
    rounding = expected_casts.Rounding(448 * 2.0**-70, pow2=True)
    made = expected_casts.cast(torch.tensor([[amax]]), 1, rounding)
    assert made.scale.isnan().all() if scale is None else made.scale.item() == scale
    assert (made.codes == 0x7F).all() or scale is not None


def test_living_tokens():
    lives, blocks = expected_casts.living_tokens([3, 3, 130, 600], 520, 128)
    assert lives == [t < 3 or 128 <= t < 130 or t >= 256 for t in range(520)]
    assert blocks == [True] * 5
    lives, blocks = expected_casts.living_tokens([-5, 100, 110], 300, 128)
    assert (sum(lives), blocks) == (100, [True, False, False])
    assert expected_casts.living_tokens([200, 100], 300, 128) is None
