"""Casts and the kernels beside them, as fuzz_casts.py draws them: sizes from none on, any strides, lists that lie.

Each result is compared with expected_casts.py, an independent definition, and the memory around and between given
results is watched. The draws of a test depend on its name; on a GPU also on the run's seed.
"""

import functools
import random

import fuzz_casts
import pytest
from fuzz_casts import CASES, FILLS, LARGE, POISONS, Draw, Pool, Sizes

DRAWN = [name for name in CASES if name not in ("linear", "linear of a pair", "gemm cast")]
"""Products have kernels of many configs; test_linear.py and test_gemm_cast.py have them."""

SIZES = {"cpu": (Sizes(300, 560, 1 << 15),), "cuda": (fuzz_casts.USUAL, LARGE)}

pool_on = functools.cache(functools.partial(Pool, seed=1))
"""Values on a device."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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
