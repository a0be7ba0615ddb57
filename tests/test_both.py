"""`cast_both` and `cast_weight`: definitions, and names of results.

Bits are in test_drawn_casts.py and test_both_gpu.py, the kernels' without a GPU in test_cast_kernels.py, traced calls
in test_modes.py and refusals in bad_calls.py.
"""

import torch

from deep_tile import (
    cast_both,
    cast_weight,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    transposed_cast_to_fp8,
)
from deep_tile.both import CastBoth, CastWeight
from deep_tile.quantize import FP8_DTYPE


def joined(x, **options):
    """The definition: two casts, each by itself."""
    return *per_token_cast_to_fp8(x, **options), *transposed_cast_to_fp8(x, **options)


def of_weight(w, **options):
    """The definition: a cast, and torch's transpose."""
    b, scale = per_block_cast_to_fp8(w, **options)
    return b, scale, b.view(torch.uint8).t().contiguous().view(b.dtype)


def assert_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        bits = torch.uint8 if one.dtype == FP8_DTYPE else torch.int32
        assert one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def test_results_have_names():
    x = torch.randn(130, 264)
    assert type(cast_both(x)) is CastBoth
    for w in (x, torch.stack([x, -x]), x.new_zeros(0, 130, 264)):
        made = cast_weight(w)
        assert type(made) is CastWeight and made.bt_scale.shape == (*w.shape[:-2], 3, 2)
        assert made.bt_scale.data_ptr() == made.b_scale.data_ptr()
