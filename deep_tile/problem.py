"""`GemmProblem`: one GEMM as the selector sees it, without tensors. It is also the key under which choices are cached,
so it holds only what can change the kernel choice, such as row alignments; pointers and strides belong to the launch.
"""

from math import gcd
from typing import NamedTuple

from deep_tile.kinds import EVERY_KIND, LAYOUTS, RESULTS, Element, Kind

LINE_BYTES = 128
"""An L2 line has four sectors. TMA requests one line per box row when rows start at multiples of it."""


class Groups(NamedTuple):
    """Row groups, each with its own matrix in `b`, or K groups, each with its own `out`.

    Attributes:
        layout: one of `kinds.GROUPINGS` except "none".
        count: how many groups.
        expected_rows: mean rows per non-empty group as far as the host knows; for K groups their mean k.
    """

    layout: str
    count: int
    expected_rows: int


class GemmProblem(NamedTuple):
    """`out[m, n] = sum over k of a[m, k] * b[n, k]`, scaled as its kind says.

    Attributes:
        m, n, k: sizes in elements, all positive.
        num_sms: streaming multiprocessors that the kernel may use.
        tma_store: whether `out` meets TMA's rules: address, row length and row stride are multiples of 16 bytes.
        split_k: whether K may be added in parts. Without it every kernel sums a row in the same order, so results do
            not depend on m.
        kind: a name in `kinds.EVERY_KIND`.
        output: dtype of `out`, a name in `kinds.RESULTS`.
        groups: None for a dense GEMM. With "offs" m is the total over all groups, with "counts" the space per group;
            with "k_offs" k is the total.
        accumulate: whether the product is added to what `out` holds.
        bias: the bias's dtype, one of `kinds.BIASES`.
        activation: one of `kinds.ACTIVATIONS`; with "swiglu" `out` has n / 2 columns.
        layout: how the operands lie, a name in `kinds.LAYOUTS`.
        strided: `row_alignment` for operands whose rows are not contiguous; else None.
    """

    m: int
    n: int
    k: int
    num_sms: int = 132
    tma_store: bool = True
    split_k: bool = True
    kind: str = "fp8"
    output: str = "bf16"
    groups: Groups | None = None
    accumulate: bool = False
    bias: str = "none"
    activation: str = "none"
    layout: str = "nt"
    strided: tuple[int, int] | None = None

    @property
    def row_alignment(self) -> tuple[int, int]:
        """Row alignments of `a` and `b`: the largest power of two up to `LINE_BYTES` that divides the row stride in
        bytes, at least TMA's 16.
        """
        if self.strided is not None:
            return self.strided
        along, (a, b) = {"m": self.m, "n": self.n, "k": self.k}, LAYOUTS[self.layout]
        return _alignment(along[a] * self.product.a.bytes), _alignment(along[b] * self.product.b.bytes)

    def with_strides(self, a_stride: int, b_stride: int) -> "GemmProblem":
        """This problem for operands with these row strides, in elements; column strides for M- and N-major operands."""
        strided = _alignment(a_stride * self.product.a.bytes), _alignment(b_stride * self.product.b.bytes)
        return self.with_alignment(strided)

    def with_alignment(self, strided: tuple[int, int]) -> "GemmProblem":
        return self if strided == self.row_alignment else self._replace(strided=strided)

    @property
    def weight(self) -> tuple[int, int]:
        """Rows and columns of `b`, or of each K group's gradient."""
        return (self.m, self.n) if self.grouping == "k_offs" else (self.n, self.k)

    @property
    def out_columns(self) -> int:
        return self.n // 2 if self.activation == "swiglu" else self.n

    @property
    def grouping(self) -> str:
        return self.groups.layout if self.groups else "none"

    @property
    def product(self) -> Kind:
        return EVERY_KIND[self.kind]

    @property
    def out(self) -> Element:
        return RESULTS[self.output]


def _alignment(row_bytes: int) -> int:
    """Alignment in bytes for a row stride, at least 16 as TMA requires."""
    return 16 * gcd(-(-row_bytes // 16), LINE_BYTES // 16)
