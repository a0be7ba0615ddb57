"""Casts and the kernels beside them, as fuzz_casts.py draws them: sizes from none on, any strides, lists that lie.

Each result is compared with expected_casts.py, an independent definition, and the memory around and between given
results is watched. The draws of a test depend on its name; on a GPU also on the run's seed.
"""

import functools
import random

import fuzz_casts
import pytest
import torch
from fuzz_casts import CASES, FILLS, LARGE, POISONS, Draw, Pool, Sizes, bits

from deep_tile import cast_both, per_token_cast_to_fp8, transposed_cast_to_fp8

DRAWN = [name for name in CASES if name not in ("linear", "linear of a pair", "gemm cast")]
"""Products have kernels of many configs; test_linear.py and test_gemm_cast.py have them."""

SIZES = {"cpu": (Sizes(300, 560, 1 << 15),), "cuda": (fuzz_casts.USUAL, LARGE)}

pool_on = functools.cache(functools.partial(Pool, seed=1))
"""Values on a device."""


EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@EACH_DEVICE
@pytest.mark.parametrize("case", DRAWN)
def test_any_call_is_as_defined(case, device):
    check_draws(case, device)


def check_draws(case, device, count=60):
    for number in range(count):
        sizes = SIZES[device][number % 10 == 9 and device == "cuda"]
        inputs, targets, options = CASES[case].draw(random, sizes)
        fill, poison = random.choice(FILLS), random.choice(POISONS)
        drawn = Draw(case, inputs, targets, options, fill, poison, random.randrange(2**31))
        masks = fuzz_casts.check(pool_on(device), drawn, device, lambda: None)
        assert not any(mask.any() for mask in masks.values()), (drawn, fuzz_casts.examine(masks))


OF_ROWS = {
    "per token": per_token_cast_to_fp8,
    "transposed": transposed_cast_to_fp8,
    "both": cast_both,
    "both of blocks": functools.partial(cast_both, blocks=True),
}
EACH_OF_ROWS = pytest.mark.parametrize("cast", OF_ROWS.values(), ids=OF_ROWS)
EACH_INDEX = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


@EACH_DEVICE
@EACH_OF_ROWS
@EACH_INDEX
def test_numbers_that_name_no_row_are_zeros(cast, dtype, device):
    check_rows(cast, dtype, device)


def check_rows(cast, dtype, device):
    limits = torch.iinfo(dtype)
    rows = torch.tensor([3, 0, 8, 8, -1, 9, 1, limits.min, limits.max, 5] * 30, dtype=dtype, device=device)
    x = torch.randn(9, 131, device=device).bfloat16()
    there = torch.where((rows >= 0) & (rows < 9), rows, 9).long()
    wanted = cast(torch.cat([x, x.new_zeros(1, 131)])[there])
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(cast(x, rows=rows), wanted, strict=True))
