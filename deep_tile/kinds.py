"""Kinds: one row per supported GEMM type, with its operand and result dtypes.

No torch: dtypes are torch's names. Invariant: a kind's name starts its kernels' names and names its times in
select/times/.
"""

from typing import NamedTuple

K_BLOCK_BYTES = 128
"""Bytes per operand row and K block in a stage: one 128-byte swizzle span. In every format such a K block keeps the
tensor cores busy equally long."""

MMA_K_BYTES = 32
"""Bytes per operand row that one WGMMA reads."""


class Element(NamedTuple):
    """A number format.

    Attributes:
        name: PTX's name.
        bytes: per number.
        dtype: torch's name.
    """

    name: str
    bytes: int
    dtype: str


class Packing(NamedTuple):
    """Memory layout of a 4-bit operand: units with 16 rows by one K block, codes and smaller groups' scales together.

    Attributes:
        group: K elements that share a scale; or a K block, whose scale is not in the unit.
        integers: whether codes are integers, and groups' scales FP16 numbers that promotion applies, one after the
            other. Otherwise codes are e2m1, and scales bytes by which they become e4m3.
        unused: bytes per row and K block, by which kinds with equally many scales are told apart.
    """

    group: int
    integers: bool = False
    unused: int = 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales per row and K block."""
        return 0 if self.group == K_BLOCK_BYTES else K_BLOCK_BYTES // self.group * (2 if self.integers else 1)

    @property
    def row_bytes(self) -> int:
        """Bytes per row and K block: codes, two per byte, and scales."""
        return K_BLOCK_BYTES // 2 + self.scale_bytes + self.unused

    @property
    def chains(self) -> int:
        """WGMMA chains per K block: as many as its groups have scales that promotion applies."""
        return K_BLOCK_BYTES // self.group if self.integers else 1

    @property
    def fits_fp8(self) -> bool:
        """Whether FP8 elements and the operand's scale make up the weight, so that it can be unpacked to them."""
        return self.chains == 1


class Kind(NamedTuple):
    """A GEMM type: operand dtypes, scaling, accumulator.

    Attributes:
        name: as `kind=` takes it.
        a, b: operand formats, equally large.
        scaling: "blocks": 1x128 FP32 scales for a and 128x128 for b; each K block's sum is scaled, then added in FP32.
            "row_blocks": the same with 1x128 scales for both. "rows": one FP32 scale per row in a and per row in b,
            applied to the sum over all K. "promoted_rows": the same, with K-block sums promoted to FP32.
            "none": no scales. Except where promoted, WGMMA accumulates all K.
        sums: WGMMA's accumulator type, by PTX's name.
        output: the default result format, one of `outputs`.
        packing: memory layout of a 4-bit `b`, which the kernel converts for WGMMA; else None.
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
        return f"{self.sums}.{self.a.name}.{self.b.name}"

    @property
    def family(self) -> str:
        """The kind in `FAMILIES` that this one equals except for the instruction's types."""
        return self.name.removesuffix(_formats(self.a, self.b))

    @property
    def block_scales(self) -> bool:
        """Whether each K block has scales."""
        return self.scaling in ("blocks", "row_blocks")

    @property
    def row_scales(self) -> bool:
        """Whether each row has one scale for all K."""
        return self.scaling in ("rows", "promoted_rows")

    @property
    def promotes(self) -> bool:
        """Whether math warps promote each K block's sum to FP32, scaled first if it has scales."""
        return self.scaling in ("blocks", "row_blocks", "promoted_rows")

    @property
    def layouts(self) -> tuple[str, ...]:
        """Supported names in `LAYOUTS`: all for 16-bit operands, only "nt" for 8-bit ones."""
        return tuple(LAYOUTS) if self.a.bytes == 2 else ("nt",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Formats that its result may have, but for `QUANTIZED`."""
        return (*OUTPUTS, *([RAW] if self.output == RAW else []))

    @property
    def b_bytes(self) -> float:
        return self.packing.row_bytes / self.k_block if self.packing else self.b.bytes

    @property
    def k_block(self) -> int:
        return K_BLOCK_BYTES // self.a.bytes

    def timed_output(self, output: str) -> str:
        """The output format whose measured times stand for `output`: the kind's default for equally wide formats and
        for quantised results, which use the same tiles."""
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
    """The suffix in an FP8 kind's name: its operand formats, unless both are e4m3."""
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
"""Kinds, with e4m3 for both operands in FP8. WGMMA takes any pair of FP8 formats otherwise alike."""

PACKED = {
    "mxfp4": Kind("mxfp4", E4M3, E4M3, "blocks", "f32", packing=Packing(32)),
    "nvfp4": Kind("nvfp4", E4M3, E4M3, "blocks", "f32", packing=Packing(16)),
    "int4": Kind("int4", E4M3, E4M3, "row_blocks", "f32", packing=Packing(K_BLOCK_BYTES, integers=True)),
    "int4_32": Kind("int4_32", E4M3, E4M3, "blocks", "f32", packing=Packing(32, integers=True, unused=1)),
}
"""Kinds with a packed 4-bit weight. All else equals block-scaled FP8."""

KINDS = FAMILIES | {
    kind.name + _formats(a, b): kind._replace(name=kind.name + _formats(a, b), a=a, b=b)
    for kind in FAMILIES.values()
    if kind.a == E4M3
    for a, b in ((E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2))
}
"""All kinds whose operands WGMMA reads as stored."""

EVERY_KIND = KINDS | PACKED

USUAL = {
    **{"float8_e4m3fn": "fp8", "float8_e5m2": "fp8_rows_e5m2_e5m2", "int8": "int8", "int32": "int32"},
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
}
"""Names of kinds and formats by torch's names of dtypes: for operands the usual kind."""


def name_of(dtype: object) -> object:
    """The kind's or format's name for a torch.dtype or its name; anything else unchanged."""
    return USUAL.get(str(dtype).removeprefix("torch."), dtype)


class Majors(NamedTuple):
    """Each operand's contiguous dimension: "k", or "m" for a and "n" for b."""

    a: str
    b: str


LAYOUTS = {"nt": Majors("k", "k"), "nn": Majors("k", "n"), "tn": Majors("m", "n"), "tt": Majors("m", "k")}
"""Operand layouts by BLAS names for row-major [m, k] and [k, n]; "t" marks a transposed operand. Calls take `b` as [n,
k], so "nt" means both are K-major, the only layout that tensor cores take for 8-bit elements."""

LAYOUT_NAMES = {majors: name for name, majors in LAYOUTS.items()}

GROUPINGS = ("none", "offs", "counts", "k_offs")
"""How rows in `a` and `out` map to matrices in `b`. "none": one matrix. "offs": contiguous groups, each starting where
the one before ends. "counts": masked groups with fixed space, of which `counts` rows are used. "k_offs" groups K
instead, contiguously, one `out` matrix per group."""

OUTPUTS = {"bf16": BF16, "fp16": F16, "fp32": F32}
"""Formats for results of any kind, and for a bias."""

RAW = "int32"
"""The format for unscaled integer sums, as WGMMA leaves them."""

QUANTIZED = "e4m3"
"""The format for a result that the epilogue casts to FP8, with 1x128 scales."""

RESULTS = {**OUTPUTS, RAW: S32, QUANTIZED: E4M3}
"""All result formats."""

BIASES = ("none", *OUTPUTS)
"""Bias formats; the bias is added per column, in FP32."""

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "swiglu")
"""Applied in FP32 after the bias. "swiglu" halves the columns, see `GATE_COLUMNS`."""

GATE_COLUMNS = 8
"""Gate columns and up columns alternate in runs this wide: the narrowest with which one WGMMA thread holds both."""
