"""Which config a problem gets: candidates -> predicted time -> choice. Pure functions; no GPU, no torch, no files.

All m in one bucket (`bucketed`) get the same choice, so the configs for all m <= max_m follow from one try per bucket,
and a server that compiled them never compiles again.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import QUANTIZED
from deep_tile.problem import GemmProblem, Groups
from deep_tile.select.cost import Estimate, calibration, chained_cast_us, estimate, times_us, unpack_us
from deep_tile.select.defaults import default_configs, finished, quantized
from deep_tile.select.groups import configs_of, ranked
from deep_tile.select.hardware import H200, Hardware

Tuned = Mapping[str, GemmConfig]
"""`tune`'s fastest configs, by `bucket_key`. A config may store in another way than the problem needs."""

UNTUNED: Tuned = MappingProxyType({})


def bucketed(problem: GemmProblem) -> GemmProblem:
    """The problem whose choice this one shares: with the largest m in its bucket, and its own row alignment, which
    depends on m for an M-major `a`.

    A common choice for 96x2112x7168 and 128x2112x7168 would cost one of them 6 % (H200, 2026-11-22). Transposed tiles
    end at any multiple of 16 rows.
    """
    step = 8 if problem.m <= 64 else 32 if problem.m <= 128 else 64
    if problem.m > 64 and problem.tma_store and _may_transpose(problem) and _is_transposed(*what_is_made(problem)):
        step = 16
    return problem._replace(m=round_up(problem.m, step)).with_alignment(problem.row_alignment)


MOST_TRANSPOSED, MOST_TRANSPOSED_PRODUCTS = 2048, 2e11
"""Most rows, and products m x n x k, for transposed tiles. The larger products are, the less padding they have and the
more the power limit decides, for which the times of these tiles were not fitted: of 548 drawn products 16 are larger,
and two of those gain more than 2 % (H100, 2026-11-27)."""


def _may_transpose(problem: GemmProblem) -> bool:
    """Whether transposed tiles are candidates. Decided by the largest m of the bucket of 64 rows, which holds the
    smaller buckets of transposed tiles, so that all in a bucket agree."""
    most = round_up(problem.m, 64)
    return most <= MOST_TRANSPOSED and most * problem.n * problem.k <= MOST_TRANSPOSED_PRODUCTS


@lru_cache(maxsize=256)
def _is_transposed(*made: bool | str) -> bool:
    """Whether some default config is transposed."""
    return any(config.transposed for config in default_configs(True, *made))


def _buckets(of_all: GemmProblem, max_m: int) -> list[GemmProblem]:
    """Buckets of problems like `of_all` for m from 1 to max_m. Each m is a multiple of 8."""
    return list(dict.fromkeys(bucketed(of_all._replace(m=m)) for m in range(8, max_m + 8, 8)))


def candidates(
    problem: GemmProblem, hardware: Hardware = H200, own: GemmConfig | None = None
) -> list[tuple[Estimate, GemmConfig]]:
    """Every default config that the problem's K and SMs allow, and `own`, the bucket's `tuned_choice`: the measured
    best first, then by predicted time. Measured choices and `own` are ignored on hardware unlike the H200."""
    if hardware.name != H200.name:
        own = None
    measured = measured_choice(problem, own) if hardware.name == H200.name else None
    estimated = ((estimate(c, problem, hardware), c) for c in _runnable(problem, own))
    return sorted(estimated, key=lambda pair: (pair[1].timed_name != measured, pair[0].time_us))


def _runnable(problem: GemmProblem, own: GemmConfig | None = None) -> list[GemmConfig]:
    """The part of `candidates` that depends on m only by `_may_transpose`."""
    default = default_configs(problem.tma_store, *what_is_made(problem))
    known = dict.fromkeys((*default, *([own] if own else [])))
    may_transpose = _may_transpose(problem)
    configs = (c for c in known if suits(c, problem) and (problem.split_k or c.parts_of_k == 1))
    return [c for c in configs if c.cluster <= problem.num_sms and (may_transpose or not c.transposed)]


def suits(config: GemmConfig, problem: GemmProblem) -> bool:
    return what_is_made(config) == what_is_made(problem) and config.takes_k(problem.k)


def what_is_made(of: GemmConfig | GemmProblem) -> tuple[str, str, bool, str, str, str]:
    return of.kind, of.output, of.accumulate, of.bias, of.activation, of.layout


def measured_choice(problem: GemmProblem, own: GemmConfig | None = None) -> str | None:
    """Name of the config measured best for this bucket: by the user's search, else by ours, which covers buckets where
    the model is wrong. Both were made for rows that follow each other."""
    if problem.strided is not None:
        return None
    if own is not None:
        return own.timed_name
    model = calibration(problem.kind)
    return model.choices.get(bucket_key(problem)) if problem.num_sms == model.num_sms else None


def tuned_choice(problem: GemmProblem, tuned: Tuned) -> GemmConfig | None:
    """The tuned config for this bucket, if any, adapted to the problem's operand layout and store; for groups, the
    candidate with the same tile."""
    own = tuned.get(bucket_key(problem)) if tuned else None
    if own is None:
        return None
    if problem.groups is not None:
        made = configs_of(problem)
        return next((config for config in made if _cluster_tile(config) == _cluster_tile(own)), None)
    if own.grouping != "none":
        return None
    try:
        own = replace(own, kind=problem.kind, tma_store=problem.tma_store, layout=problem.layout)
    except ValueError:  # a transposed tile, which is stored by TMA alone
        return None
    own = quantized(own) if problem.output == QUANTIZED else replace(own, output=problem.output)
    return own and finished(own, problem.bias, problem.activation)


def _cluster_tile(config: GemmConfig) -> tuple[int, int, int, int]:
    return config.block_m, config.block_n, config.cluster_m, config.cluster_n


def bucket_key(problem: GemmProblem) -> str:
    """The key of a measured choice: sizes, and, except for FP8 with 16-bit results, the family and output. For groups:
    grouping, group count, expected rows and the weight's sizes."""
    size, family = f"{problem.m}x{problem.n}x{problem.k}", problem.product.family
    if problem.groups is not None:
        layout, *many = problem.groups
        size = f"{layout}_" + "x".join(map(str, (*many, *problem.weight)))
    output = problem.product.timed_output(problem.output)
    if problem.accumulate:
        output += "_add"
    return size if (family, output) == ("fp8", "bf16") else f"{size}_{family}_{output}"


@lru_cache(maxsize=65_536)
def choose_bucket(problem: GemmProblem, own: GemmConfig | None = None) -> GemmConfig:
    return _foreseen.pop((problem, own), None) or candidates(problem, own=own)[0][1]


_foreseen: dict[tuple[GemmProblem, None], GemmConfig] = {}
"""Choices that `_foresee` computed for `choose_bucket` during `configs_for`."""

_CLEARLY = 1 + 1e-9
"""A predicted time must be the smallest by this factor for `_foresee` to decide: NumPy's powers differ from Python's in
their last bits."""

_FEW = 4
"""Fewer problems than this are chosen as fast one by one."""


def _foresee(buckets: list[GemmProblem], tuned: Tuned) -> dict[tuple[GemmProblem, None], GemmConfig]:
    """The results of `choose_bucket` for buckets that differ in m and row alignment, in a twentieth of the time;
    Leaves out buckets with a measured choice or with a close second."""
    alike: dict[tuple[tuple[int, int], bool], list[GemmProblem]] = {}
    for bucket in buckets:
        if measured_choice(bucket, tuned_choice(bucket, tuned)) is None:
            alike.setdefault((bucket.row_alignment, _may_transpose(bucket)), []).append(bucket)
    return {key: config for problems in alike.values() for key, config in _foresee_alike(problems).items()}


def _foresee_alike(problems: list[GemmProblem]) -> dict[tuple[GemmProblem, None], GemmConfig]:
    """`_foresee` for buckets that differ in m alone, none of them measured."""
    import numpy

    configs = _runnable(problems[0])
    if not configs or len(problems) < _FEW:
        return {}
    ms = numpy.array([problem.m for problem in problems])
    many = problems[0]._replace(m=ms, strided=problems[0].row_alignment)
    times = numpy.array([times_us(config, many) for config in configs])
    is_near = times <= times.min(axis=0) * _CLEARLY
    clear = numpy.flatnonzero(is_near.sum(axis=0) == 1)
    return {(problems[i], None): configs[times[:, i].argmin()] for i in clear}


def choose(problem: GemmProblem, tuned: Tuned = UNTUNED) -> GemmConfig:
    """The config for a problem: its bucket's. For groups: `tune`'s, else the fastest predicted for the expected
    rows."""
    if problem.groups is not None:
        return _choose_grouped(_bucketed_groups(problem), tuned_choice(group_bucket(problem), tuned))
    bucket = bucketed(problem)
    return choose_bucket(bucket, tuned_choice(bucket, tuned))


def choose_cast(problem: GemmProblem, tuned: Tuned = UNTUNED) -> GemmConfig | None:
    """The config for a GEMM with fused FP8 cast; None if two launches are predicted to be faster."""
    bucket = bucketed(problem)
    if casts_apart(bucket):
        return None
    return choose_bucket(bucket, tuned_choice(bucket, tuned))


def without_cast(problem: GemmProblem) -> GemmProblem:
    """The same GEMM with a dense BF16 result, to be cast separately."""
    return problem._replace(output="bf16", tma_store=problem.out_columns % 8 == 0)


@lru_cache(maxsize=65_536)
def casts_apart(bucket: GemmProblem) -> bool:
    """Whether a BF16 GEMM plus a cast is faster than the fused kernel."""
    together = candidates(bucket)
    if not together:
        return True
    plain = without_cast(bucket)
    apart_us = estimate(choose_bucket(plain), plain).time_us + chained_cast_us(plain)
    return apart_us < together[0][0].time_us


LEAST_UNPACKED = 512
"""Least rows, in a GEMM or in a group's mean, for which unpacking can save more time than it takes."""

UNPACKED_SHARE = {"blocks": 0.88, "row_blocks": 0.77}
"""An FP8 GEMM's time after unpacking, without groups, as a share of its predicted time: 65 products each of MXFP4 and
INT4 with 512 to 4,096 rows, beside packed tiles whose times were fitted to the same GPU (H100, 2026-11-27)."""

MOST_UNPACKED_BYTES = 1 << 28
"""Limit for a weight that is unpacked to FP8: more temporary memory would surprise a user who packed it."""


@lru_cache(maxsize=4_096)
def _unpacks(problem: GemmProblem) -> bool:
    if problem.groups is not None:
        apart_us, packed_us = (ranked(of)[0][0] for of in (in_fp8(problem), problem))
    else:
        apart_us, packed_us = (min(known.time_us for known, _ in candidates(of)) for of in (in_fp8(problem), problem))
        apart_us *= UNPACKED_SHARE[problem.product.scaling]
    elements = problem.n * problem.k * (problem.groups.count if problem.groups else 1)
    return unpack_us(elements, problem.product.b_bytes) + apart_us < packed_us


def in_fp8(problem: GemmProblem) -> GemmProblem:
    return problem._replace(kind="fp8_1x128" if problem.product.scaling == "row_blocks" else "fp8")


def unpacks(problem: GemmProblem) -> bool:
    """Whether a GEMM with a packed weight is predicted to take less time if the weight is first unpacked to FP8.

    False above `MOST_UNPACKED_BYTES`, and for integers in groups, whose scales FP8 does not hold. With 1x128 scales of
    rows, false for groups, and for k up to 128, where the FP8 GEMM could take them for other scales.
    """
    if not problem.product.packing.fits_fp8:
        return False
    by_columns, groups = problem.product.scaling == "row_blocks", problem.groups
    if by_columns and (groups is not None or problem.k <= SCALE_BLOCK):
        return False
    rows, count = (problem.m, 1) if groups is None else (groups.expected_rows, groups.count)
    if rows < LEAST_UNPACKED or count * problem.n * problem.k > MOST_UNPACKED_BYTES:
        return False
    return _unpacks(bucketed(problem) if groups is None else _bucketed_groups(problem))


@lru_cache(maxsize=4_096)
def _choose_grouped(problem: GemmProblem, own: GemmConfig | None = None) -> GemmConfig:
    return ranked(problem, own=own)[0][1]


def grouped_candidates(
    problem: GemmProblem, hardware: Hardware = H200, tuned: Tuned = UNTUNED
) -> list[tuple[float, GemmConfig]]:
    """Every config for a grouped problem with its predicted time, in that order, but `tune`'s first on an H200."""
    own = tuned_choice(group_bucket(problem), tuned) if hardware.name == H200.name else None
    return ranked(_bucketed_groups(problem), hardware, own)


def group_bucket(problem: GemmProblem) -> GemmProblem:
    """The problem whose measured choice a grouped problem shares: as many groups as all rows, or K, allow, each with
    the most rows in its bucket (2^i or 1.5 * 2^i).

    By the time model this costs 0.1 % in the geometric mean over 1,500 draws, 18 % at worst; with powers of two only
    0.4 and 37 %.
    """
    layout, count, rows = problem.groups
    most_rows = _rows_end(rows)
    if layout != "counts":
        bounded = _bucketed_groups(problem)
        count = min(count, ceil_div(bounded.k if layout == "k_offs" else bounded.m, most_rows))
    return problem._replace(groups=Groups(layout, count, most_rows))


def _rows_end(rows: int) -> int:
    most = _power_of_two(rows)
    return most * 3 // 4 if most >= 4 and 4 * rows <= 3 * most else most


def _bucketed_groups(problem: GemmProblem) -> GemmProblem:
    """Bucketed groups; total rows, or K, are rounded to a power of two, which bounds how many groups are non-empty."""
    if problem.groups.layout == "k_offs":
        return problem._replace(k=_power_of_two(problem.k))
    return problem._replace(m=_power_of_two(problem.m))


def _power_of_two(m: int) -> int:
    """The nearest one that is not below m."""
    return 1 << (m - 1).bit_length() if m > 0 else 1


def configs_for(of_all: GemmProblem, max_m: int, tuned: Tuned = UNTUNED) -> list[GemmConfig]:
    """Every config that problems like `of_all` are given for some m in [1, max_m]."""
    buckets = _buckets(of_all, max_m)
    foreseen = _foresee(buckets, tuned)
    _foreseen.update(foreseen)
    chosen = {choose(bucket, tuned) for bucket in buckets}
    for bucket in foreseen:  # unused entries, if choose_bucket had them cached
        _foreseen.pop(bucket, None)
    return sorted(chosen, key=lambda config: config.name)


def cast_configs_for(of_all: GemmProblem, max_m: int, tuned: Tuned = UNTUNED) -> list[GemmConfig]:
    """Every config that some m in [1, max_m] gets for a GEMM with an FP8 result, fused or not."""
    problems = _buckets(of_all, max_m)
    together = [choose_cast(problem, tuned) if problem.tma_store else None for problem in problems]
    chosen = {
        config or choose(without_cast(problem), tuned) for config, problem in zip(together, problems, strict=True)
    }
    return sorted(chosen, key=lambda config: config.name)
