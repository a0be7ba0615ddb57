"""What is asked: one matrix product, without tensors.

A `GemmProblem` is what the selector reads and the plan is remembered by. It holds only what can change the choice of
the kernel; pointers and strides belong to the launch.
"""

from math import gcd
from typing import NamedTuple

from deep_tile.kinds import EVERY_KIND, LAYOUTS, RESULTS, Element, Kind

LINE_BYTES = 128
"""Of L2, in four sectors: what TMA requests for a row of an operand's box, where rows begin at multiples of it."""


class Groups(NamedTuple):
    """Groups of rows, each of which has a `b` of its own, or of K, each of which has an `out`.

    Attributes:
        layout: of the rows, or of K, one of `kinds.GROUPINGS` but "none".
        count: of the groups.
        expected_rows: of a group that has any, in the mean, as far as the host knows; along K its columns.
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
        split_k: whether thread blocks may share the K of a tile. Without that every kernel adds up a row's products in
            the same order, so that its result does not depend on m.
        kind: of the product, a name in `kinds.EVERY_KIND`.
        output: format of `out`, a name in `kinds.RESULTS`.
        groups: of rows, or None. With "offs" m is the rows of all of them, with "counts" what each has room for. With
            "k_offs" k is that of all of them.
        accumulate: whether the product is added to what `out` holds.
        bias: format of what is added to each column, one of `kinds.BIASES`.
        activation: what becomes of the product, one of `kinds.ACTIVATIONS`; of "swiglu" `out` has n / 2 columns.
        layout: how the operands lie, a name in `kinds.LAYOUTS`.
        strided: `row_alignment`, of operands whose rows do not follow each other; None of others.
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
        """Of `a` and of `b`: the bytes, a power of two up to `LINE_BYTES`, that divide the distance from row to row.

        Rows that follow each other begin at multiples of 16 bytes, as TMA asks.
        """
        if self.strided is not None:
            return self.strided
        along, (a, b) = {"m": self.m, "n": self.n, "k": self.k}, LAYOUTS[self.layout]
        return _alignment(along[a] * self.product.a.bytes), _alignment(along[b] * self.product.b.bytes)

    def with_strides(self, a_stride: int, b_stride: int) -> "GemmProblem":
        """The same of operands whose rows are so many elements apart, along m and n where they lie along these."""
        strided = _alignment(a_stride * self.product.a.bytes), _alignment(b_stride * self.product.b.bytes)
        return self.with_alignment(strided)

    def with_alignment(self, strided: tuple[int, int]) -> "GemmProblem":
        """The same with such a `row_alignment`."""
        return self if strided == self.row_alignment else self._replace(strided=strided)

    @property
    def weight(self) -> tuple[int, int]:
        """Rows and columns of `b`, or of the gradients that groups along K have."""
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
    """Of rows so far apart, or as far as TMA asks: 16 bytes, or a multiple."""
    return 16 * gcd(-(-row_bytes // 16), LINE_BYTES // 16)
