"""Kernel parameter structs as tables: each field's meaning, offset, bytes and C++ declaration. plan.py and cast.py fill
them in, codegen.py writes the struct into the kernel text. The launcher gets bytes and offsets and patches tensor
addresses into pointers and tensor maps, so a new operand is one row here. Invariant: a struct has no implicit padding,
so its asserted size proves every field's offset.
"""

import ctypes
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

TENSOR_MAP = "TensorMap"

_MAP_STRUCT = """\
// The driver's CUtensorMap, opaque.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};
"""

MAP_BYTES, _MAP_ALIGNMENT = 128, 64

_LETTERS = {"int": "i", "unsigned": "I", "long long": "q", "float": "f"}
"""`struct` letters for C types; pointers are "Q"."""

_LIMITS = {"i": (-(2**31), 2**31 - 1), "I": (0, 2**32 - 1), "q": (-(2**63), 2**63 - 1), "Q": (0, 2**64 - 1)}


class Place(NamedTuple):
    """Where a kernel operand starts: `skip` bytes into the call's tensor number `tensor`."""

    tensor: int
    skip: int = 0


def places(tensors: Iterable[str]) -> dict[str, Place]:
    """Places for operands that are whole tensors, in order."""
    return {name: Place(number) for number, name in enumerate(tensors)}


class Field(NamedTuple):
    """One table row.

    Attributes:
        type: C type: a number, a pointer, or `TENSOR_MAP`.
        meaning: comment beside the field in the kernel text.
        least, most: limits, if narrower than the type's.
        count: array length, for tensor maps.
    """

    name: str
    type: str
    meaning: str = ""
    least: int | None = None
    most: int | None = None
    count: int = 1

    @property
    def is_pointer(self) -> bool:
        return self.type.endswith("*")

    @property
    def is_map(self) -> bool:
        return self.type == TENSOR_MAP

    @property
    def size(self) -> int:
        return self.count * MAP_BYTES if self.is_map else struct.calcsize(self._letter)

    @property
    def alignment(self) -> int:
        return _MAP_ALIGNMENT if self.is_map else self.size

    @property
    def _letter(self) -> str:
        return "Q" if self.is_pointer else _LETTERS[self.type]

    def pack(self, value: float) -> bytes:
        """A number or an address as bytes. Raises ValueError for an integer beyond its limits."""
        if self._letter == "f":
            return bytes(ctypes.c_float(value))  # too large a value becomes infinity, as in C
        low, high = _LIMITS[self._letter]
        low, high = low if self.least is None else self.least, high if self.most is None else self.most
        if not low <= value <= high:
            raise ValueError(f"{self.name} is {value}, want {low} to {high}")
        return struct.pack(self._letter, value)

    @property
    def declaration(self) -> str:
        array = f"[{self.count}]" if self.count > 1 else ""
        return f"    {self.type} {self.name}{array};" + (f"  // {self.meaning}" if self.meaning else "")


class Params:
    """One struct's table: its fields in order, their offsets by name, size and alignment in bytes."""

    def __init__(self, name: str, *fields: Field):
        self.name = name
        self.fields = fields
        self.offsets = {}
        at = 0
        for field in fields:
            at += -at % field.alignment
            self.offsets[field.name] = at
            at += field.size
        self.alignment = max(field.alignment for field in fields)
        self.size = at + -at % self.alignment

    def pack(self, **values: float) -> bytes:
        """The struct's bytes. Addresses are 0 unless given, tensor maps are zeros. Raises KeyError where a number is
        missing, ValueError where an integer is beyond its limits."""
        data = bytearray(self.size)
        for field in self.fields:
            if field.name in values or not (field.is_pointer or field.is_map):
                at = self.offsets[field.name]
                data[at : at + field.size] = field.pack(values[field.name])
        return bytes(data)

    @property
    def least(self) -> dict[str, int]:
        """Each number's least value, or 0 without a limit: a filler for fields that a launch does not use."""
        return {field.name: field.least or 0 for field in self.fields if not (field.is_pointer or field.is_map)}

    def pointers(self, places: Mapping[str, Place]) -> tuple[tuple[int, int, int], ...]:
        """(offset, tensor, skip) for each pointer, as `_launcher.prepare` takes them."""
        pointers = {field.name for field in self.fields if field.is_pointer}
        return tuple((self.offsets[name], *place) for name, place in places.items() if name in pointers)

    @property
    def text(self) -> str:
        types = _MAP_STRUCT if any(field.is_map for field in self.fields) else ""
        lines, at = [], 0
        for field, offset in zip(self.fields, self.offsets.values(), strict=True):
            lines += [*_padding(at, offset), field.declaration]
            at = offset + field.size
        body = "\n".join([*lines, *_padding(at, self.size)])
        return f"""\
{types}struct {self.name} {{
{body}
}};
static_assert(sizeof({self.name}) == {self.size}, "a field lies elsewhere than the host puts it");
static_assert(alignof({self.name}) == {self.alignment}, "the host aligns it otherwise");
"""


def _padding(at: int, to: int) -> list[str]:
    return [f"    char padding_{at}[{to - at}];"] if to > at else []


_ELEMENTS = {"uint8": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
"""The driver's numbers."""


class MapLayout(NamedTuple):
    """A TMA tensor map without its address. The innermost dimension comes first and has no stride.

    Attributes:
        element: "uint8", "int32", "float16", "float32" or "bfloat16".
        sizes, box: tensor and box sizes, in elements.
        strides_bytes: for each dimension but the innermost.
        swizzle_bytes: swizzle span; 0, 32, 64 or 128.
        l2_bytes: L2 promotion size; 0, 64, 128 or 256.
        begin_bytes: offset from the tensor's first element to the map's origin; may be negative.
    """

    element: str
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    l2_bytes: int = 0
    begin_bytes: int = 0

    def entry(self, offset: int, owner: int, skip: int = 0) -> tuple:
        """The map as `_launcher.prepare` takes it. `owner` is a tensor number, or an address for a fixed map; the map
        starts `skip` bytes beyond."""
        return (
            offset,
            owner,
            _ELEMENTS[self.element],
            self.sizes,
            self.strides_bytes,
            self.box,
            _SWIZZLES[self.swizzle_bytes],
            _L2_PROMOTIONS[self.l2_bytes],
            skip + self.begin_bytes,
        )


SORT_BLOCKS = 8
"""Blocks per cluster, each with all counts: the largest portable cluster size."""

GEMM = Params(
    "GemmParams",
    # Sizes first: the first load needs them, and one constant-memory line then holds them all.
    Field("m", "int", "sizes and strides are in elements", 1),
    Field("n", "int", "", 1),
    Field("k", "int", "", 1),
    Field("raster_rows_log2", "int", "of the rows of tiles that the raster descends before it steps along n", 1, 4),
    Field(
        "last_rows_reciprocal",
        "unsigned",
        "of the rows of cluster tiles in its last group: 2^31 / rows, rounded up",
        1,
        2**31,
    ),
    Field("a_tail_rows", "int", "rows of a in the box of the last tile; 0 where all tiles are full", 0, 256),
    Field("b_tail_rows", "int", "rows of b, likewise", 0, 256),
    Field(
        "early_b", "int", "b, and bounds, are constant: they are read before the wait for the preceding kernel", 0, 1
    ),
    Field("bulk_scale_rows", "int", "rows of a whose scales lie side by side where TMA can copy them: all or none", 0),
    Field("scale_runs", "int", "scale warps read runs of scales: 1; those of a in vectors: 2; one by one: 0", 0, 2),
    Field("bias_stride", "unsigned"),
    Field("a_scale", "const float*"),
    Field("b_scale", "const float*"),
    Field("out", "void*"),
    Field("a_scale_stride_m", "unsigned", "the last element is within 4 GB of the first"),
    Field("a_scale_stride_k", "unsigned"),
    Field("b_scale_stride_n", "unsigned"),
    Field("b_scale_stride_k", "unsigned"),
    Field("out_stride_m", "long long", "", 0),
    Field(
        "a_maps",
        TENSOR_MAP,
        "a [m, k] in bytes, box [block_m / cluster_n, 128]; for a last tile with fewer [a_tail_rows, 128]; or, where "
        "a_span is not 0, [k, m], box [64 / cluster_n, a_span]; for its last box with fewer rows a_tail_rows of them",
        count=2,
    ),
    Field(
        "b_maps",
        TENSOR_MAP,
        "b [n, k] in bytes, box [block_n / cluster_m, 128]; for a last tile with fewer [b_tail_rows, 128]; or likewise "
        "[k, n], all boxes full",
        count=2,
    ),
    Field(
        "out_maps",
        TENSOR_MAP,
        "out [m, n], box [store_rows, store_columns]; for boxes in which a group ends plan.out_tail_map's; unused "
        "where TMA does not store",
        count=2,
    ),
    Field("bounds", "const int*", "of groups, where each ends or how many rows each has; null: all that there are"),
    Field("groups", "int", "0 where there is one product", 0),
    Field("alignment", "int", "of the rows that groups begin at, a power of two", 1, 1024),
    Field(
        "a_group_rows",
        "int",
        "rows of a from a group's first to the next one's, if groups have their own",
        0,
    ),
    Field("out_group_rows", "int", "rows of out, likewise", 0),
    Field("b_group_rows", "int", "rows of b's maps from a group's first to the next one's", 0),
    Field("a_scale_group_stride", "unsigned"),
    Field("b_scale_group_stride", "unsigned"),
    Field("bulk_scale_columns", "int", "as bulk_scale_rows, of rows of b, where each has scales of its own", 0),
    Field("bias", "const void*", "[n]; unused by kernels that add none"),
    Field("out_scale", "float*", "[m, n / 128]; this and what follows: of kernels that quantise their result"),
    Field("out_scale_stride_m", "long long"),
    Field("out_scale_stride_n", "long long"),
    Field("pow2_scale", "int", "as in CastParams", 0, 1),
    Field("amax_floor", "float"),
    Field("correction", "float"),
    Field("units", "const void*", "of a packed b, which has no maps: [k / 128, n / 16] for each group"),
)
CAST = Params(
    "CastParams",
    Field("x", "const void*", "strides are in elements; columns of x and out are adjacent"),
    Field("out", "unsigned char*"),
    Field("scale", "float*"),
    Field("rows", "long long", "of x and of out", 1),
    Field("columns", "long long", "", 1),
    Field("x_stride", "long long"),
    Field("out_stride", "long long"),
    Field("scale_stride_row", "long long"),
    Field("scale_stride_column", "long long"),
    Field("aligned", "int", "x may be read, and out written, in vectors of 16 bytes of x; rows end with one", 0, 1),
    Field("pow2_scale", "int", "a scale is the next power of two that is no smaller", 0, 1),
    Field("amax_floor", "float", "lower bound of a block's largest magnitude"),
    Field("correction", "float", "1: quotients are divided; 0: multiplied with the rounded reciprocal"),
)
CAST_OF_ROWS = Params(
    CAST.name,
    *CAST.fields,
    Field("index", "const void*", "of each row of out, the row of x that it is cast from; null: the same"),
    Field("living", "const int*", "of each group, the end of its rows, or how many live; null: all rows live"),
    Field("x_rows", "long long", "that an index may name", 0),
    Field("wide_index", "int", "it is of int64, not int32", 0, 1),
    Field("groups", "unsigned", "in living"),
    Field("group_rows", "unsigned", "from one group's first row to the next one's; 0: rows live up to the last end"),
    Field("limit", "float", "of silu_mul: gates are no larger, and magnitudes of up"),
    Field("sigmoid_factor", "float", "-alpha * log2(e)"),
    Field("beta", "float", "what is added to up"),
)
"""The cast of rows named by a list, and SwiGLU with its cast. They have a table of their own, because more fields in
`CAST` would change the code of all other casts."""

TRANSPOSED_CAST = Params(
    CAST.name,
    *CAST.fields,  # rows are tokens, of which out has columns; aligned is of x alone
    Field("index", "const void*", "of each token of out, the row of x that it is cast from; null: the same"),
    Field("ends", "const int*", "of each group, the token behind its last; null: all tokens live"),
    Field("x_rows", "long long", "that an index may name", 0),
    Field("wide_index", "int", "it is of int64, not int32", 0, 1),
    Field("groups", "unsigned", "in ends"),
    Field("alignment", "int", "of the tokens that groups begin at", 128, 1024),
    Field("out_vectors", "int", "out may be written 16 bytes at a time: its rows begin at multiples of that", 0, 1),
)
CAST_BOTH = Params(
    CAST.name,
    *TRANSPOSED_CAST.fields,  # out and scale are the transpose's; aligned is of x and row_out
    Field("row_out", "unsigned char*", "codes along the rows; null where codes are transposed"),
    Field("row_scale", "float*", "null where 128x128 codes share a scale"),
    Field("row_out_stride", "long long"),
    Field("row_scale_stride_row", "long long"),
    Field("row_scale_stride_column", "long long"),
    Field("matrices", "unsigned", "of a weight; what follows leads from one to the next", 1),
    Field("x_step", "long long"),
    Field("out_step", "long long"),
    Field("scale_step", "long long"),
    Field("row_out_step", "long long"),
)
NORM = Params(
    CAST.name,
    *CAST.fields,  # x is added to residual
    Field("residual", "const void*"),
    Field("weight", "const void*", "of each column, what the normalised sum is multiplied by"),
    Field("sum", "void*", "of x and residual"),
    Field("residual_stride", "long long"),
    Field("sum_stride", "long long"),
    Field("mean_factor", "float", "1 / columns"),
    Field("epsilon", "float", "what is added to the mean of squares"),
)
GATED = Params(
    CAST.name,
    *CAST_BOTH.fields,  # x is gates and ups; out is of their gradient and of h, a third of the columns each
    Field("dh", "const void*", "as large as h"),
    Field("x_scale", "const float*", "of codes; null where x has 16 bits"),
    Field("share", "const float*", "of each row, what h is multiplied by; null: 1"),
    Field("dh_stride", "long long"),
    Field("x_scale_stride_row", "long long"),
    Field("x_scale_stride_column", "long long"),
)
COMBINE = Params(
    "CombineParams",
    Field("x", "const void*", "strides are in elements; columns of x and out are adjacent"),
    Field("weights", "const void*"),
    Field("index", "const void*"),
    Field("out", "void*"),
    Field("tokens", "long long", "rows of out", 1),
    Field("columns", "long long", "of x and of out", 1),
    Field("x_rows", "long long", "that the index may name"),
    Field("x_stride", "long long"),
    Field("out_stride", "long long"),
    Field("weights_stride_row", "long long"),
    Field("weights_stride_column", "long long"),
    Field("index_stride_row", "long long"),
    Field("index_stride_column", "long long"),
    Field("top_k", "int", "rows of x that make one of out", 1),
    Field("aligned", "int", "x may be read, and out written, in vectors of 16 bytes; rows end with one", 0, 1),
    Field("wide_index", "int", "it is of int64, not int32", 0, 1),
    Field("narrow_weights", "int", "they are BF16, not FP32", 0, 1),
)
UNPACK = Params(
    "UnpackParams",
    Field(
        "weight", "const void*", "[matrices, k_blocks, row_units] units of 16 rows by 128 of k, as packed.py makes them"
    ),
    Field("out", "void*", "[matrices, 16 * row_units, 128 * k_blocks] e4m3"),
    Field("units", "unsigned", "of all matrices", 1, 2**31 - 1),
    Field("row_units", "unsigned", "", 1),
    Field("k_blocks", "unsigned", "", 1),
)
SORT = Params(
    "SortParams",
    Field("chosen", "const void*", "[t, top_k], dense, as index"),
    Field("rows", "long long*", "[rows_size]: of which token each is, -1 for none"),
    Field("offs", "int*", "[experts]: the row behind each expert's last"),
    Field("index", "long long*", "[t, top_k]: the row of each choice, -1 of no expert"),
    Field("choices", "unsigned", "t * top_k", 1, 2**31 - 1),
    Field("rows_size", "unsigned", "", 1, 2**31 - 1),
    Field("experts", "unsigned", "no more than a block has threads", 1),
    Field("alignment", "unsigned", "of the rows that experts begin at, a power of two", 1, 1024),
    Field("top_k_reciprocal", "unsigned", "a token is its choice's number times this, shifted right", 2**31, 2**32 - 1),
    Field("top_k_shift", "unsigned", "", 31, 62),
    Field("cluster_log2", "unsigned", "of the blocks that share out the counting", 0, SORT_BLOCKS.bit_length() - 1),
    Field("slice", "unsigned", "choices that a block counts", 1),
    Field("warp_choices_log2", "unsigned", "of the choices that a warp places", 5, 11),
)
THIN = Params(
    "ThinParams",
    Field("a_map", TENSOR_MAP, "a [matrices, m, k] in bytes, box [1, block_m, 128]"),
    Field(
        "b_map",
        TENSOR_MAP,
        "b [matrices, n, k] in bytes, or of its terms [matrices * terms, n, k], box [1, block_n, 128]",
    ),
    Field("out", "void*"),
    Field("squares", "float*", "[parts, m], of kernels that add them up"),
    Field("m", "int", "", 1),
    Field("n", "int", "", 1),
    Field("k", "int", "", 1),
    Field("matrix_steps", "int", "K blocks of a matrix", 1),
    Field("part_steps", "unsigned", "of all matrices, that a part has at least"),
    Field("longer_parts", "unsigned", "the first so many parts have one more"),
    Field("parts", "unsigned", "of K", 1),
    Field("units", "unsigned", "parts of tiles, which thread blocks take by turns", 1),
    Field("format", "int", "of out, as Format has it", 1, 3),
    Field("accumulate", "int", "FP32 results are added to out", 0, 1),
    Field("out_stride", "long long", "strides are in elements"),
    Field("part_stride", "long long", "from a part's results to the next one's"),
)
SPLIT = Params(
    "SplitParams",
    Field("b", "const float*", "[matrices, rows, k], columns adjacent; strides are in elements"),
    Field("out", "unsigned short*", "[matrices, terms, rows, out_stride], dense"),
    Field("matrices", "int", "", 1),
    Field("rows", "int", "", 1),
    Field("k", "int", "", 1),
    Field("out_stride", "int", "a multiple of 8", 8),
    Field("row_stride", "long long"),
    Field("matrix_stride", "long long"),
)
PARTS = Params(
    "PartsParams",
    Field("sums", "const float*", "[parts, m, n], dense"),
    Field("squares", "const float*", "[parts, m], dense; null: there are none"),
    Field("out", "void*"),
    Field("sqr_sum", "float*", "[m]"),
    Field("m", "int", "", 1),
    Field("n", "int", "", 1),
    Field("parts", "unsigned", "", 1),
    Field("lanes", "unsigned", "threads that share a number's parts, a power of two", 1, 8),
    Field("format", "int", "of out, as Format has it", 1, 3),
    Field("accumulate", "int", "FP32 results are added to out", 0, 1),
    Field("out_stride", "long long", "in elements"),
)

LOGITS = Params(
    "LogitsParams",
    Field("rows", "int", "queries: rows of q, [rows, heads, head_dim]; strides are in elements", 1),
    Field("heads", "int", "", 1),
    Field(
        "keys",
        "int",
        "that a query can have: all, or what a row of the table and of out has room for",
        0,
        2**31 - 2**12,
    ),
    Field("columns", "int", "of out", 1, 2**31 - 2**12),
    Field("blocks", "int", "of queries that share tiles of keys", 1),
    Field("batch_rows", "int", "queries of a sequence; where keys are not in pages all rows", 1),
    Field("batch_blocks", "int", "blocks of its queries", 1),
    Field("compressed", "int", "a query's first logit is in column 0, not in that of its key", 0, 1),
    Field("fills", "int", "-infinity is written outside of the ranges", 0, 1),
    Field("own_lengths", "int", "there is a length for each query, not for each sequence's last one", 0, 1),
    Field("table_columns", "int", "pages of a sequence at most", 0),
    Field("weights", "const float*", "[rows, heads]"),
    Field("weights_stride", "long long"),
    Field("begins", "const int*", "[rows]: a query's first key; unused where keys are in pages"),
    Field("ends", "const int*", "[rows]: the key behind its last; or lengths, where keys are in pages"),
    Field("table", "const int*", "[sequences, table_columns]: the pages with a sequence's keys"),
    Field("table_stride", "long long"),
    Field("out", "void*"),
    Field("out_stride", "long long"),
    Field("q_map", TENSOR_MAP, "q in bytes, box [queries of a warpgroup, heads there, head_dim]"),
    Field("keys_map", TENSOR_MAP, "[pages, keys of a page, head_dim] in bytes, box [1, 64, head_dim]"),
    Field("scales_map", TENSOR_MAP, "[pages, keys of a page], box [1, 64]"),
)
"""Keys in a tensor count as one page."""

MOST_CAST_GROUPS = 1024
"""Most groups in a cast with `counts`, which it holds in shared memory."""
