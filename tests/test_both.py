"""`cast_both`, `cast_weight` and `transpose_fp8`: the bits of the casts that they join, eager and traced, and refusals.

On the CPU; test_both_gpu.py has the kernels, and test_cast_kernels.py their bits without a GPU.
"""

import pytest
import torch
from test_quantize import EACH_OPTION, wide_matrix
from torch._subclasses.fake_tensor import FakeTensorMode

from deep_tile import (
    cast_both,
    cast_weight,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    transpose_fp8,
    transposed_cast_to_fp8,
)
from deep_tile.both import BYTE_DTYPES, CastBoth, CastWeight
from deep_tile.config import ceil_div, round_up
from deep_tile.quantize import FP8_DTYPE

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 131), (127, 129), (128, 128), (130, 264), (300, 17), (257, 513)]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def joined(x, rows=None, offs=None, alignment=128, blocks=False, **options):
    """The definition: two casts, each by itself."""
    gathered = {} if rows is None else {"rows": rows}
    along_k = per_token_cast_to_fp8(x, **gathered, **options)
    if blocks:
        x = (
            x
            if rows is None
            else torch.where(((rows >= 0) & (rows < len(x)))[:, None], x[rows.clamp(0, len(x) - 1).long()], 0)
        )
        return *along_k, *per_block_cast_to_fp8(x.t(), **options)
    groups = {} if offs is None else {"offs": offs, "alignment": alignment}
    return *along_k, *transposed_cast_to_fp8(x, **gathered, **groups, **options)


def of_weight(w, **options):
    """The definition: a cast (of each expert's weight), and torch's transpose."""
    if w.dim() == 3:
        return tuple(map(torch.stack, zip(*(of_weight(each, **options) for each in w), strict=True)))
    b, scale = per_block_cast_to_fp8(w, **options)
    return b, scale, b.view(torch.uint8).t().contiguous().view(b.dtype)


def assert_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        bits = torch.uint8 if one.dtype == FP8_DTYPE else torch.int32
        assert one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def matrix(shape, dtype=torch.bfloat16):
    """Rows and columns of other magnitudes."""
    return wide_matrix(*shape, dtype) if 0 not in shape else torch.zeros(shape, dtype=dtype)


@EACH_DTYPE
@EACH_SHAPE
@pytest.mark.parametrize("blocks", [False, True])
def test_both_are_the_casts(shape, dtype, blocks):
    x = matrix(shape, dtype)
    made = cast_both(x, blocks=blocks)
    assert type(made) is CastBoth
    assert_same(made, joined(x, blocks=blocks))
    for codes in (made.a, made.at):
        assert codes.stride() == (round_up(codes.shape[1], 16), 1) or 0 in shape
        assert codes.data_ptr() % 16 == 0


@EACH_DTYPE
@EACH_SHAPE
@pytest.mark.parametrize("experts", [None, 0, 1, 3])
def test_weights_are_the_cast_and_its_transpose(shape, dtype, experts):
    w = matrix(shape, dtype)
    w = w if experts is None else torch.stack([w * 2**i for i in range(experts)]) if experts else w.new_zeros(0, *shape)
    made = cast_weight(w)
    assert type(made) is CastWeight and made.bt_scale.shape == (
        *w.shape[:-2],
        *(ceil_div(size, 128) for size in shape[::-1]),
    )
    assert made.bt_scale.data_ptr() == made.b_scale.data_ptr()
    if experts != 0:
        assert_same(made, of_weight(w))
    for codes in (made.b, made.bt):
        assert 0 in codes.shape or codes.stride()[-2:] == (round_up(codes.shape[-1], 16), 1)


@EACH_OPTION
def test_options_reach_both_casts(options):
    for floor in (0.0, 1e-4, 30.0):
        x, options = matrix((130, 264)), options | {"amax_floor": floor}
        for blocks in (False, True):
            assert_same(cast_both(x, blocks=blocks, **options), joined(x, blocks=blocks, **options))
        assert_same(cast_weight(x, **options), of_weight(x, **options))


@pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(), (1,), (3,)], ids=str)
def test_bytes_are_transposed(dtype, leading):
    """Every byte is moved, NaN and negative zero included."""
    for shape in SHAPES:
        x = torch.randint(0, 256, (*leading, *shape), dtype=torch.uint8).view(dtype)
        made = transpose_fp8(x)
        assert (
            made.dtype == dtype
            and made.shape == x.mT.shape
            and torch.equal(made.view(torch.uint8), x.view(torch.uint8).mT)
        )
        assert 0 in shape or made.stride()[-2:] == (round_up(shape[0], 16), 1)


def strided(x):
    """The same numbers at other strides."""
    n, k = x.shape
    yield x.t().contiguous().t()
    yield torch.stack([x, x], -1).flatten(1)[:, ::2]
    yield torch.cat([x, x, x], 1)[:, k : 2 * k]
    yield torch.stack([x, x], 1)[:, 0]


def test_any_strides():
    x = matrix((130, 201))
    for source in strided(x):
        assert_same(cast_both(source), joined(x))
        assert_same(cast_weight(source), of_weight(x))
    assert_same(cast_both(x[:1].expand(130, 201)), joined(x[:1].repeat(130, 1)))
    experts = torch.stack([x, -x, 2 * x])
    for source in (
        experts.transpose(0, 1).contiguous().transpose(0, 1),
        experts.mT.contiguous().mT,
        torch.cat([experts] * 2)[::2],
    ):
        assert_same(cast_weight(source), of_weight(source.contiguous()))
    codes = per_token_cast_to_fp8(x)[0]
    for source in strided(codes.view(torch.uint8)):
        assert torch.equal(transpose_fp8(source), source.t())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("blocks", [False, True])
def test_tokens_by_an_index(dtype, blocks):
    x, limits = matrix((9, 131)), torch.iinfo(dtype)
    rows = torch.tensor([3, 0, 8, 8, -1, 9, 1, limits.min, limits.max, 5] * 30, dtype=dtype)
    assert_same(cast_both(x, rows=rows, blocks=blocks), joined(x, rows=rows, blocks=blocks))


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize(
    ("offs", "alignment"),
    [([300], 128), ([5, 130, 300], 128), ([0, 128, 128, 300], 128), ([100, 300], 256), ([2**31 - 1], 128), ([0], 128)],
    ids=str,
)
def test_groups(offs, alignment, by_index):
    x, offs = matrix((300, 131)), torch.tensor(offs, dtype=torch.int32)
    lists = {"offs": offs} | ({"rows": torch.arange(300).flip(0)} if by_index else {})
    made, wanted = cast_both(x, **lists, alignment=alignment), joined(x, **lists, alignment=alignment)
    living, blocks = (x.new_zeros(size, dtype=torch.bool) for size in (300, 3))
    begin = 0
    for end in offs.clamp(max=300).tolist():
        living[begin:end], blocks[begin // 128 : ceil_div(end, 128)] = True, end > begin
        begin = round_up(end, alignment)
    tokens = blocks.repeat_interleave(128)[:300]
    assert_same((made.a[living], made.a_scale[living]), (wanted[0][living], wanted[1][living]))
    assert_same((made.at[:, tokens], made.at_scale[:, blocks]), (wanted[2][:, tokens], wanted[3][:, blocks]))


# ---- traced

CALLS = {
    "cast_both": lambda x: cast_both(x, round_scale="pow2"),
    "cast_both of blocks": lambda x: cast_both(x, blocks=True, exact="reciprocal"),
    "cast_both of rows": lambda x: cast_both(x, rows=torch.arange(5, dtype=torch.int32, device=x.device)),
    "cast_weight": lambda x: cast_weight(x, amax_floor=1e-3),
    "cast_weight of experts": lambda x: cast_weight(x[None] * 2),
    "transpose_fp8": lambda x: (transpose_fp8(x.to(FP8_DTYPE)),),
}
EACH_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def strides_of(made):
    return [(x.shape, x.dtype, x.stride()) for x in made]


@EACH_CALL
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 0), (130, 264), (7, 33)], ids=str)
def test_fakes_are_laid_out_as_real_ones(call, shape):
    x = torch.randn(shape).bfloat16()
    if "rows" in str(call) and not len(x):
        pytest.skip("no row to choose")
    wanted = strides_of(call(x))
    with FakeTensorMode() as mode:
        assert strides_of(call(mode.from_tensor(x))) == wanted
    assert strides_of(call(x.to("meta"))) == wanted


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


def test_weights_that_are_trained_are_cast():
    w = torch.nn.Parameter(X.clone())
    made = cast_weight(w)
    assert not any(each.requires_grad for each in made)
    assert_same(made, of_weight(w.detach()))
    with torch.no_grad():
        assert_same(cast_both(w), joined(w.detach()))
