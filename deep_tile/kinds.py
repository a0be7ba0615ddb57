"""What can be multiplied: one row for each kind of product, and the formats of its operands and its result.

Read by config.py, codegen.py, select/, method/ and api.py, which hold no fact about a format themselves. No torch:
dtypes are torch's names. Invariant: a kind's name is the first word of its kernels' names, and that of its times in
select/times/.
"""

from typing import NamedTuple

K_BLOCK_BYTES = 128
"""Of one row of an operand that a stage holds for each K block: the span of TMA's and WGMMA's 128-byte swizzle. Such a
K block takes the tensor cores equally long in every format."""

MMA_K_BYTES = 32
"""Of one row of an operand that one WGMMA reads."""


class Element(NamedTuple):
    """A format of numbers.

    Attributes:
        name: what PTX calls it.
        bytes: of one number.
        dtype: what torch calls it.
    """

    name: str
    bytes: int
    dtype: str


class Packing(NamedTuple):
    """How an operand of 4 bits lies in memory: in units of 16 rows by a K block, which hold scales of smaller groups.

    Attributes:
        group: elements of K that share a scale: of a byte, in the unit; or a K block, whose scale is the product's.
    """

    group: int

    @property
    def row_bytes(self) -> int:
        """Of a row's K block: codes, two in a byte, and scales."""
        return K_BLOCK_BYTES // 2 + (K_BLOCK_BYTES // self.group if self.group < K_BLOCK_BYTES else 0)


class Kind(NamedTuple):
    """A kind of product.

    Attributes:
        name: of the kind.
        a, b: formats of the operands, of equal size.
        scaling: "blocks": FP32 scales of 1x128 for a and of 128x128 for b, by which the sum of each K block is
            multiplied before it is added. "row_blocks": the same with scales of 1x128 for both. "rows": FP32 scales of
            the rows of a and of those of b, by which the sum over all of K is multiplied. "promoted_rows": the same,
            of sums of K blocks that are added in FP32. "none": there are none. With the others WGMMA adds up all of K.
        sums: format in which WGMMA adds up, as PTX calls it.
        output: format of the result unless another is asked for, one of `outputs`.
        packing: of `b` in memory, where that has 4 bits and becomes what WGMMA reads on the way; else None.
    """

    name: str
    a: Element
    b: Element
    scaling: str
    sums: str
    output: str = "bf16"
    packing: Packing | None = None

    @property
    def mma(self) -> str:
        """What the name of its WGMMA instruction has behind the shape."""
        return f"{self.sums}.{self.a.name}.{self.b.name}"

    @property
    def family(self) -> str:
        """Name of the kind that this one differs from in a word of its instruction, if at all; one of `FAMILIES`."""
        return self.name.removesuffix(_formats(self.a, self.b))

    @property
    def block_scales(self) -> bool:
        """Whether each K block has scales."""
        return self.scaling in ("blocks", "row_blocks")

    @property
    def row_scales(self) -> bool:
        """Whether each row has one for all of K."""
        return self.scaling in ("rows", "promoted_rows")

    @property
    def promotes(self) -> bool:
        """Whether the sum of each K block is added to FP32 sums by math warps, scaled first if it has scales."""
        return self.scaling in ("blocks", "row_blocks", "promoted_rows")

    @property
    def layouts(self) -> tuple[str, ...]:
        """How its operands may lie, of `LAYOUTS`: along k, and of 16 bits along their rows as well."""
        return tuple(LAYOUTS) if self.a.bytes == 2 else ("nt",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Formats that its result may have, but for `QUANTIZED`."""
        return (*OUTPUTS, *([RAW] if self.output == RAW else []))

    @property
    def b_bytes(self) -> float:
        """Of an element of `b` in memory."""
        return self.packing.row_bytes / self.k_block if self.packing else self.b.bytes

    @property
    def k_block(self) -> int:
        """Elements of K in a K block."""
        return K_BLOCK_BYTES // self.a.bytes

    def timed_output(self, output: str) -> str:
        """The format of a result whose times and measured choices are those of `output`: the kind's own, where numbers
        of both have as many bytes, and of a quantised result, which has the same tiles."""
        alike = output == QUANTIZED or RESULTS[output].bytes == RESULTS[self.output].bytes
        return self.output if alike else output


E4M3 = Element("e4m3", 1, "float8_e4m3fn")
E5M2 = Element("e5m2", 1, "float8_e5m2")
BF16 = Element("bf16", 2, "bfloat16")
F16 = Element("f16", 2, "float16")
S8 = Element("s8", 1, "int8")
F32 = Element("f32", 4, "float32")
S32 = Element("s32", 4, "int32")


def _formats(a: Element, b: Element) -> str:
    """What the name of a kind of FP8 has at its end, unless both operands are e4m3."""
    return f"_{a.name}_{b.name}"


FAMILIES = {
    kind.name: kind
    for kind in (
        Kind("fp8", E4M3, E4M3, "blocks", "f32"),
        Kind("bf16", BF16, BF16, "none", "f32"),
        Kind("fp16", F16, F16, "none", "f32", "fp16"),
        Kind("int8", S8, S8, "blocks", "s32"),
        Kind("fp8_1x128", E4M3, E4M3, "row_blocks", "f32"),
        Kind("fp8_rows", E4M3, E4M3, "rows", "f32"),
        Kind("int8_rows", S8, S8, "rows", "s32"),
        Kind("fp8_rows_promoted", E4M3, E4M3, "promoted_rows", "f32"),
        Kind("int8_unscaled", S8, S8, "none", "s32", "int32"),
    )
}
"""Kinds, those of FP8 with e4m3 for both operands. WGMMA multiplies any pair of its formats, all else being alike."""

PACKED = {
    "mxfp4": Kind("mxfp4", E4M3, E4M3, "blocks", "f32", packing=Packing(32)),
    "nvfp4": Kind("nvfp4", E4M3, E4M3, "blocks", "f32", packing=Packing(16)),
    "int4": Kind("int4", E4M3, E4M3, "row_blocks", "f32", packing=Packing(K_BLOCK_BYTES)),
}
"""Kinds with a packed weight, by the first word of its format's name. All else is FP8's with block scales."""

KINDS = FAMILIES | {
    kind.name + _formats(a, b): kind._replace(name=kind.name + _formats(a, b), a=a, b=b)
    for kind in FAMILIES.values()
    if kind.a == E4M3
    for a, b in ((E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2))
}
"""All kinds whose operands lie in memory as WGMMA reads them."""

EVERY_KIND = KINDS | PACKED


class Majors(NamedTuple):
    """Along what the elements of each operand are adjacent in memory: "k", or its rows, "m" of a and "n" of b."""

    a: str
    b: str


LAYOUTS = {"nt": Majors("k", "k"), "nn": Majors("k", "n"), "tn": Majors("m", "n"), "tt": Majors("m", "k")}
"""How operands lie, by the names of BLAS for row-major ones [m, k] and [k, n]: "t" is one that is transposed. What a
call takes as `b` is [n, k], so that "nt" is what it has along k. Of 8 bits an element tensor cores take that alone."""

LAYOUT_NAMES = {majors: name for name, majors in LAYOUTS.items()}

GROUPINGS = ("none", "offs", "counts", "k_offs")
"""How the rows of `a` and `out` belong to matrices of `b`. "none": all to the one that there is. "offs": group by
group, where each begins behind the one before. "counts": each group in rows of its own, of which it may use some. Or
how K belongs to matrices of `out`. "k_offs": group by group, as rows by "offs"."""

OUTPUTS = {"bf16": BF16, "fp16": F16, "fp32": F32}
"""Formats of any kind's result, and of a bias."""

RAW = "int32"
"""The format of sums of integers as WGMMA leaves them."""

QUANTIZED = "e4m3"
"""The format of a result that is cast to FP8 where it is made, with a scale for each row and 128 columns."""

RESULTS = {**OUTPUTS, RAW: S32, QUANTIZED: E4M3}
"""All formats of a result."""

BIASES = ("none", *OUTPUTS)
"""Formats of what is added to each column of a product, in FP32."""

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "swiglu")
"""What becomes of a product, in FP32 and after the bias; of "swiglu" half as many columns, see `GATE_COLUMNS`."""

GATE_COLUMNS = 8
"""Columns of gates, then as many of what they let through, by turns: the narrowest that one thread of WGMMA holds both
of."""
