"""`cast_both`, `cast_weight` and `transpose_fp8`: results, traced calls and refusals, on the CPU.

Bits are in test_drawn_casts.py and test_both_gpu.py, the kernels' without a GPU in test_cast_kernels.py.
"""

import pytest
import torch

from deep_tile import (
    cast_both,
    cast_weight,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    transpose_fp8,
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


# ---- traced


# ---- refused

X, CODES = torch.ones(130, 264), torch.ones(130, 264).to(FP8_DTYPE)
OFFS = torch.tensor([100, 130], dtype=torch.int32)
WRONG = {
    "both of integers": (lambda: cast_both(X.int()), TypeError, "x is a tensor of int32; the cast takes"),
    "both of a list": (lambda: cast_both([1.0]), TypeError, "x is a .*list"),
    "both of FP8": (lambda: cast_both(CODES), TypeError, "x is a tensor of float8_e4m3fn"),
    "both of three": (lambda: cast_both(X[None]), ValueError, r"x has shape \[1, 130, 264\]; it must be \[s, k\]"),
    "both of one": (lambda: cast_both(X[0]), ValueError, r"x has shape \[264\]"),
    "both, alignment": (lambda: cast_both(X, alignment=64), ValueError, "alignment is 64; .*power of two"),
    "both, floor": (lambda: cast_both(X, amax_floor=-1), ValueError, "amax_floor is -1"),
    "both, offs": (lambda: cast_both(X, offs=OFFS.long()), TypeError, "offs is a tensor of int64"),
    "both, rows": (lambda: cast_both(X, rows=X[0]), TypeError, "rows is a tensor of float32"),
    "both, blocks": (lambda: cast_both(X, blocks=1), TypeError, "blocks is 1, of type int; pass True or False"),
    "both, blocks of groups": (
        lambda: cast_both(X, blocks=True, offs=OFFS),
        ValueError,
        "blocks is given together with",
    ),
    "both, gradient": (
        lambda: cast_both(X.clone().requires_grad_()),
        RuntimeError,
        "cast_both has none: .*pass x.detach",
    ),
    "weight of FP8": (lambda: cast_weight(CODES), TypeError, "w is a tensor of float8_e4m3fn"),
    "weight of four": (lambda: cast_weight(X[None, None]), ValueError, r"w has shape .*\[g, n, k\].*\.view\(\) it so"),
    "weight of one": (lambda: cast_weight(X[0]), ValueError, r"w has shape \[264\]"),
    "weight of none": (lambda: cast_weight(None), TypeError, "w is a .*NoneType"),
    "weight, exact": (lambda: cast_weight(X, exact="no"), ValueError, "exact is 'no'; use"),
    "weight, round_scale": (lambda: cast_weight(X, round_scale=2), ValueError, "round_scale is 2; use"),
    "bytes of BF16": (lambda: transpose_fp8(X.bfloat16()), TypeError, "x is a tensor of bfloat16"),
    "bytes of one": (lambda: transpose_fp8(CODES[0]), ValueError, r"x has shape \[264\]; it must be \[n, k\]"),
    "bytes of a number": (lambda: transpose_fp8(1), TypeError, "x is a .*int"),
    "both, sparse": (lambda: cast_both(X.to_sparse()), TypeError, "x is .*sparse"),
    "weight, sparse": (lambda: cast_weight(X.to_sparse()), TypeError, "w is .*sparse"),
    "bytes, sparse": (lambda: transpose_fp8(X.char().to_sparse()), TypeError, "x is .*sparse"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
