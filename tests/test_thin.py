"""`thin_gemm`, `prenorm_gemm`, `split_weight` and `einsum`: values, options, ops, kernels; what they refuse.

On the CPU and a GPU. How warps of the kernel meet is test_thin_protocol.py's.
"""

import math

import pytest
import torch
from test_quantize import compile_all

import deep_tile
from deep_tile import jit, parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

FP32_ERROR = 1e-6
"""Relative error, by norm, with FP32 weights as three terms: at most 3e-7 was measured (H100, 2026-11-26)."""

TWO_TERMS_ERROR = 1.2e-5
"""The same with two terms: 2.5e-6 for many numbers; for 10 by 15 up to 7.8e-6 in 3,000 draws, of which 5 % exceed
4e-6."""

EACH_KERNEL = pytest.mark.parametrize("kernel", parts.all_kernels(), ids=lambda kernel: kernel.name)


def matrix(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Whose rows begin at multiples of 16 bytes."""
    padded = -(-shape[-1] // 8) * 8
    return torch.randn(*shape[:-1], padded, device=device).to(dtype)[..., : shape[-1]]


class Guarded:
    """A tensor of NaN between NaN."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        count = math.prod(shape)
        self.memory = torch.full((count + 128,), math.nan, dtype=dtype, device=device)
        self.out = self.memory[64 : 64 + count].view(shape)

    def assert_intact(self) -> None:
        assert self.memory[:64].isnan().all() and self.memory[-64:].isnan().all()


def assert_near(got: torch.Tensor, wanted: torch.Tensor, most: float = FP32_ERROR) -> None:
    error = (got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert error < most, error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [None, 1, 3, 128])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 24, 4096), (13, 24, 7680), (130, 8, 1000), (65, 40, 520), (3, 1, 7)])
def test_prenorm(m, n, k, splits, device):
    a, b = matrix(m, k, dtype=torch.bfloat16, device=device), matrix(n, k, device=device)
    every = () if splits is None else (splits,)
    out, squares = Guarded(*every, m, n, device=device), Guarded(*every, m, device=device)
    got = deep_tile.prenorm_gemm(a, b, out.out, squares.out, num_splits=splits)
    assert got[0] is out.out and got[1] is squares.out
    total, square = (x if splits is None else x.double().sum(0) for x in got)
    assert_near(total, a.double() @ b.double().T)
    assert_near(square, a.double().square().sum(1))
    out.assert_intact()
    squares.assert_intact()
    again = deep_tile.prenorm_gemm(a, b, num_splits=splits)
    assert all(map(torch.equal, got, again))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 7168), (77, 250, 1032), (200, 130, 72), (5, 3, 10)])
def test_fp32_weights(m, n, k, device):
    a, b = matrix(m, k, dtype=torch.bfloat16, device=device), matrix(n, k, device=device)
    wanted = a.double() @ b.double().T
    for terms, most in ((3, FP32_ERROR), (2, TWO_TERMS_ERROR)):
        out = Guarded(m, n, device=device)
        assert deep_tile.thin_gemm(a, b, out.out, terms=terms) is out.out
        assert_near(out.out, wanted, most)
        out.assert_intact()
        assert torch.equal(deep_tile.thin_gemm(a, b, terms=terms), out.out)
        assert_near(deep_tile.thin_gemm(a, deep_tile.split_weight(b, terms)), wanted, most)
    added = torch.ones(m, n, device=device)
    deep_tile.thin_gemm(a, b, added, accumulate=True)
    assert_near(added, wanted + 1)
    assert_near(deep_tile.thin_gemm(a, b, out_dtype=torch.bfloat16), wanted, 4e-3)
    assert_near(deep_tile.gemm(a, b, out_dtype=torch.float32), wanted)
    assert deep_tile.gemm(a, b).dtype == torch.bfloat16


@pytest.mark.gpu
def test_rows_do_not_depend_on_others():
    a, b = matrix(1000, 7168, dtype=torch.bfloat16, device="cuda"), matrix(256, 7168, device="cuda")
    whole = deep_tile.thin_gemm(a, b, batch_invariant=True)
    norms = deep_tile.prenorm_gemm(a, b[:24], num_splits=16)
    for rows in (slice(0, 1), slice(100, 177), slice(990, 1000)):
        assert torch.equal(deep_tile.thin_gemm(a[rows], b, batch_invariant=True), whole[rows])
        of_rows = deep_tile.prenorm_gemm(a[rows], b[:24], num_splits=16)
        assert torch.equal(of_rows[0], norms[0][:, rows]) and torch.equal(of_rows[1], norms[1][:, rows])


@pytest.mark.gpu
def test_long_sums_repeat_beside_another_stream():
    """Whose race, of a phase that is two behind, only long sums showed."""
    a, b = matrix(8192, 28672, dtype=torch.bfloat16, device="cuda"), matrix(24, 28672, device="cuda")
    first = deep_tile.prenorm_gemm(a, b)
    assert_near(first[0], a.double() @ b.double().T)
    other, noise = torch.cuda.Stream(), torch.randn(2**24, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(other):
            noise.mul_(1.0)
        assert all(map(torch.equal, deep_tile.prenorm_gemm(a, b), first))


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 7, None])
def test_thread_blocks_take_units_by_turns(num_sms):
    """1,000 rows, 129 K blocks and more columns than a tile has; then all rows on few SMs, with a given number of
    parts."""
    a, b = matrix(1000, 8200, dtype=torch.bfloat16, device="cuda"), matrix(50, 8200, device="cuda")
    wanted = a.double() @ b.double().T
    for splits in (1, 2, 128):
        out, squares = deep_tile.prenorm_gemm(a, b, num_splits=splits, num_sms=num_sms)
        assert_near(out.double().sum(0), wanted)
        assert_near(squares.double().sum(0), a.double().square().sum(1))
    assert_near(deep_tile.thin_gemm(a, b, num_sms=num_sms), wanted)
    invariant = [deep_tile.thin_gemm(a, b, num_sms=count, batch_invariant=True) for count in (num_sms, None)]
    assert torch.equal(*invariant)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_over_matrices(dtype, device):
    a, b = matrix(9, 70, 104, dtype=torch.bfloat16, device=device), matrix(9, 33, 104, dtype=dtype, device=device)
    wanted = torch.einsum("bmk,bnk->mn", a.double(), b.double())
    out = Guarded(70, 33, device=device)
    assert_near(deep_tile.thin_gemm(a, b, out.out), wanted)
    out.assert_intact()


@pytest.mark.parametrize("device", DEVICES)
def test_unusual_numbers(device):
    a, b = matrix(70, 512, dtype=torch.bfloat16, device=device), matrix(40, 512, device=device)
    a[:, 5] = a[:, 5].abs() + 1
    b[3, 5], b[4, 5], b[6] = math.inf, math.nan, b[6] * 1e-36
    got, exact = deep_tile.thin_gemm(a, b), a.double() @ b.double().T
    assert (got[:, 3] == math.inf).all() and got[:, 4].isnan().all()
    rest = [n for n in range(40) if n not in (3, 4)]
    assert torch.isfinite(got[:, rest]).all()
    assert_near(got[:, 6], exact[:, 6], 1e-3)  # bits below 2^-133 are gone


def test_terms_are_exact():
    b = torch.cat([torch.randn(1000) * 10.0**scale for scale in (-25, -3, 0, 30)]).view(4, 1000)
    assert torch.equal(deep_tile.split_weight(b).double().sum(0), b.double())
    assert ((deep_tile.split_weight(b, 2).double().sum(0) - b.double()).abs() <= b.double().abs() * 2**-16).all()
    tiny = torch.randn(1000) * 1e-38
    assert ((deep_tile.split_weight(tiny[None]).double().sum(0)[0] - tiny.double()).abs() < 2.0**-133).all()


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    a, b = matrix(3, 0, dtype=torch.bfloat16, device=device), matrix(4, 0, device=device)
    out, squares = deep_tile.prenorm_gemm(a, b)
    assert not out.any() and not squares.any() and out.shape == (3, 4)
    assert deep_tile.thin_gemm(matrix(0, 8, dtype=torch.bfloat16), matrix(4, 8)).shape == (0, 4)


A, B = matrix(5, 64, dtype=torch.bfloat16), matrix(24, 64)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: deep_tile.thin_gemm(A.float(), B), TypeError, "a must be torch.bfloat16"),
        (lambda: deep_tile.thin_gemm(A, B.half()), TypeError, "b must be one of torch.float32, torch.bfloat16"),
        (lambda: deep_tile.thin_gemm(A, None), TypeError, "b must be a torch.Tensor"),
        (lambda: deep_tile.thin_gemm(A, matrix(24, 56)), ValueError, "k differs"),
        (lambda: deep_tile.thin_gemm(A, B, terms=4), ValueError, "terms is 4"),
        (lambda: deep_tile.thin_gemm(A, B, accumulate=True), ValueError, "out None"),
        (lambda: deep_tile.thin_gemm(A, B, torch.empty(5, 24).half(), accumulate=True), TypeError, "out must be"),
        (lambda: deep_tile.thin_gemm(A, B, torch.empty(24, 5)), ValueError, r"out must be \[5, 24\]"),
        (lambda: deep_tile.thin_gemm(A, B, torch.empty(24, 5).t()), ValueError, "unit stride along n"),
        (lambda: deep_tile.thin_gemm(A, B, out_dtype=torch.int32), TypeError, "out_dtype"),
        (lambda: deep_tile.thin_gemm(A.t().contiguous().t(), B), ValueError, "unit stride along k"),
        (lambda: deep_tile.thin_gemm(A, matrix(24, 65)[:, 1:]), ValueError, "begin at a multiple of 16 bytes"),
        (lambda: deep_tile.thin_gemm(A[None], B[None].expand(2, -1, -1)), ValueError, "matrices"),
        (lambda: deep_tile.thin_gemm(A, B[None]), ValueError, "1 to 3 terms"),
        (lambda: deep_tile.thin_gemm(A, B.clone().requires_grad_()), RuntimeError, "thin_gemm has none"),
        (lambda: deep_tile.prenorm_gemm(A, B.bfloat16()), TypeError, "b must be torch.float32"),
        (lambda: deep_tile.prenorm_gemm(A, B, num_splits=0), ValueError, "num_splits is 0"),
        (lambda: deep_tile.thin_gemm(A, B, num_sms=0), ValueError, "num_sms is 0"),
        (lambda: deep_tile.prenorm_gemm(A, B, num_sms=True), TypeError, "num_sms"),
        (lambda: deep_tile.prenorm_gemm(A, B, num_splits=129), ValueError, "num_splits is 129"),
        (lambda: deep_tile.prenorm_gemm(A, B, torch.empty(5, 24), num_splits=2), ValueError, r"\[2, 5, 24\]"),
        (lambda: deep_tile.prenorm_gemm(A, B, None, torch.empty(10)[::2]), ValueError, "contiguous"),
        (lambda: deep_tile.prenorm_gemm(A, B, None, torch.empty(5).bfloat16()), TypeError, "sqr_sum must be"),
        (lambda: deep_tile.split_weight(A), TypeError, "b must be"),
        (lambda: deep_tile.split_weight(B, 1), ValueError, "terms is 1"),
        (lambda: deep_tile.gemm(A, B, bias=B[:, 0]), ValueError, "bias is given"),
        (lambda: deep_tile.gemm(A, B, activation="relu"), ValueError, "activation is given"),
        (lambda: deep_tile.einsum("ab,bc->ac", A, B), ValueError, "expr is"),
        (lambda: deep_tile.einsum("bmk,bnk->mn", A, A), ValueError, "3 dimensions"),
        (lambda: deep_tile.einsum("bhr,hdr->bhd", A[None], A[:4, None]), ValueError, "h of"),
        (lambda: deep_tile.einsum("bmk,bnk->mn", A[None], B[None]), TypeError, "b must be torch.bfloat16"),
        (lambda: deep_tile.einsum("bhr,hdr->bhd", A[None], A[:, None], accumulate=True), ValueError, "no sum over b"),
    ],
)
def test_wrong_calls(call, error, said):
    with pytest.raises(error, match=said):
        call()


EXPRESSIONS = {
    "bmk,bnk->mn": ((9, 70, 64), (9, 40, 64)),
    "bhr,hdr->bhd": ((7, 3, 128), (3, 64, 128)),
    "bhd,hdr->bhr": ((7, 3, 64), (3, 64, 128)),
    "bhd,bhr->hdr": ((16, 3, 64), (16, 3, 32)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_einsum(expr, many, device):
    a_shape, b_shape = EXPRESSIONS[expr]
    if many and "h" in expr:
        a_shape, b_shape = (300, *a_shape[1:]), (300, *b_shape[1:]) if b_shape[0] == a_shape[0] else b_shape
    a, b = (matrix(*shape, dtype=torch.bfloat16, device=device) for shape in (a_shape, b_shape))
    wanted = torch.einsum(expr, a.double(), b.double())
    got = deep_tile.einsum(expr, a, b)
    assert_near(got, wanted, 4e-3 if got.dtype == torch.bfloat16 else 1e-5)
    guarded = Guarded(*got.shape, dtype=got.dtype, device=device)
    assert deep_tile.einsum(expr, a, b, guarded.out) is guarded.out
    assert torch.equal(guarded.out, got)
    guarded.assert_intact()
    if got.dtype == torch.float32:
        added = torch.ones_like(got)
        deep_tile.einsum(expr, a, b, added, accumulate=True)
        assert_near(added, wanted + 1, 1e-5)


def test_einsum_of_k_that_groups_refuse():
    a, b = matrix(7, 3, 40, dtype=torch.bfloat16), matrix(3, 40, 128, dtype=torch.bfloat16)
    wanted = torch.einsum("bhd,hdr->bhr", a.double(), b.double())
    assert_near(deep_tile.einsum("bhd,hdr->bhr", a, b), wanted, 4e-3)


# Kernels and their choice.


@pytest.fixture(scope="module")
def compiled():
    return compile_all(parts.all_kernels())


@EACH_KERNEL
def test_kernel_compiles_clean(kernel, compiled):
    assert not compiled[kernel].divergence
    usage = jit.resource_usage(compiled[kernel].log)
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes, usage.warnings) == (0, 0, 0, ())
    assert usage.registers * kernel.threads * kernel.blocks_per_sm <= 64 * 1024
    reserved = 1024 + getattr(kernel, "smem_bytes", 0)
    assert reserved * kernel.blocks_per_sm <= 228 * 1024


@pytest.mark.parametrize("m", [1, 64, 500, 4096, 16384, 100_000])
@pytest.mark.parametrize(("n", "k", "matrices"), [(24, 28672, 1), (256, 7168, 1), (5000, 64, 1), (384, 128, 8192)])
def test_choices_fill_the_gpu_and_waste_none(m, n, k, matrices):
    for terms, squares in ((3, True), (3, False), (2, False), (1, False)):
        product = parts.Product(m, n, k, matrices, terms, squares, fp32=squares)
        kernel, count = parts.choose(product, parts.Room(132))
        assert (kernel.terms, kernel.squares, kernel.splits) == (terms, squares, squares)
        assert 1 <= count <= min(product.steps, parts.MOST_PARTS)
        if product.steps >= 132:
            assert parts.units(kernel, product, count) >= 50


def test_precompile(compiled):
    assert deep_tile.precompile_thin(workers=2) == 0
