"""An indexer's logits: each query's score for each key, over a key tensor or a paged cache.

out[i, j] = scale[j] * sum over h of weights[i, h] * relu(q[i, h] . key[j]), as DeepSeek-V3.2's indexer has it. Which
keys count for a query is read on the device: no call waits for the host, and all can be captured in CUDA graphs. The
kernel shares work out evenly, whatever the lists say.
"""

from operator import eq
from typing import NamedTuple

import torch

from deep_tile import cast, checks, launches, logits_launch, ops, tensors
from deep_tile.codegen import LOGITS_TILE
from deep_tile.config import as_int, ceil_div, check_sizes, round_up
from deep_tile.logits_launch import HEAD_DIMS, HEADS, MOST_BATCH_QUERIES, SCALE_BYTES, Keys, LogitsLayout
from deep_tile.operation import Given, Operation
from deep_tile.options import check_one
from deep_tile.select.hardware import Hardware
from deep_tile.select.streaming import Prediction

_OUTPUTS = {torch.float32: "fp32", torch.bfloat16: "bf16"}

_DTYPES = {
    "q": (torch.float8_e4m3fn,),
    "kv": (torch.float8_e4m3fn,),
    "kv_scale": (torch.float32,),
    "cache": (torch.uint8,),
    "weights": (torch.float32,),
    "starts": (torch.int32,),
    "ends": (torch.int32,),
    "lengths": (torch.int32,),
    "block_table": (torch.int32,),
    "out": tuple(_OUTPUTS),
}

_SHAPES = {
    "q": ("rows", "heads", "head_dim"),
    "kv": ("keys", "head_dim"),
    "kv_scale": ("keys",),
    "weights": ("rows", "heads"),
    "starts": ("rows",),
    "ends": ("rows",),
    "out": ("rows", "columns"),
}

_PAGED_SHAPES = {
    "q": ("batch", "n", "heads", "head_dim"),
    "cache": ("pages", "64", "1", "head_dim + 4"),
    "weights": ("batch * n", "heads"),
    "lengths": ("batch", "n"),
    "block_table": ("batch", "table_columns"),
    "out": ("batch * n", "columns"),
}

_ROW_BYTES = 128
"""Row alignment of allocated outputs: one cache line."""

_DEFINITION_PRODUCTS = 2**24
"""Most products that the definition holds at once."""


class Options(NamedTuple):
    """Keywords, described at `mqa_logits`."""

    clean: bool
    columns: int | None = None
    out_dtype: torch.dtype | None = None
    num_sms: int | None = None
    pdl: bool | None = None


def mqa_logits(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    clean: bool = True,
    columns: int | None = None,
    out_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Compute an indexer's logits: out[i, j] = kv_scale[j] * sum over h of weights[i, h] * relu(q[i, h] . kv[j]).

    For each query i and the keys j with starts[i] <= j < ends[i]. Runs on `q`'s device and torch's current stream: on a
    Hopper GPU by one kernel, in FP32 except the dot products over 32 to 128 elements, for which WGMMA keeps about 14
    bits; elsewhere by the definition, in float64. On one GPU a call gives the same bits every time. Not differentiable.

    Args:
        q: [s, heads, d] float8_e4m3fn, unit stride along d, which is 32, 64 or 128; 1 to 128 heads, fastest with 32, 64
            or 128. 16-byte aligned, as are its rows and heads.
        kv: [s_k, d] float8_e4m3fn, laid out like `q`.
        kv_scale: [s_k] float32, contiguous, 16-byte aligned.
        weights: [s, heads] float32, unit stride along heads. Multiply q's scales into them.
        starts, ends: [s] int32, contiguous. Ranges are clamped to [0, s_k]; one that ends before it starts is empty.
        out: [s, s_k], or [s, columns] with `columns`, float32 or bfloat16, unit stride along columns, to write to;
            allocated when None, with rows at multiples of 128 bytes.
        clean: write -infinity outside the ranges. Otherwise memory there is not written, and holds arbitrary bytes in
            an allocated `out`.
        columns: width of compressed logits: column c of row i is for key starts[i] + c. Keys beyond the last column are
            left out.
        out_dtype: dtype of an allocated `out`, float32 by default.
        num_sms, pdl: as for `fp8_gemm`.

    Returns:
        `out`.

    Raises:
        TypeError: a tensor has the wrong dtype or is not a plain one, or an option the wrong type.
        ValueError: shapes, strides or devices do not fit, a tensor has no memory or is not aligned, or an option is out
            of range.
        RuntimeError: `weights` or another tensor requires a gradient, in grad mode; the kernel is not loaded yet while
            a CUDA graph is captured; or the driver refuses the launch.
    """
    return MQA_LOGITS.run((q, kv, kv_scale, weights, starts, ends, out), (clean, columns, out_dtype, num_sms, pdl))


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    clean: bool = False,
    columns: int | None = None,
    out_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Compute `mqa_logits` over a paged cache: each sequence has n queries, and a block table of its pages.

    Key j of sequence b is row j % 64 in page block_table[b, j // 64]. A page number outside the cache reads as zeros.
    Reading the cache is the limit up to about four queries with 64 heads.

    Args:
        q: [batch, n, heads, d] float8_e4m3fn, as for `mqa_logits`; n from 1 to 8.
        cache: [pages, 64, 1, d + 4] uint8: a page holds 64 rows of d float8_e4m3fn, then 64 float32 scales. Dense
            within a page; pages are 16-byte aligned.
        weights: [batch * n, heads] float32, unit stride along heads.
        lengths: int32, contiguous; [batch]: keys per sequence, including the last query's, so query i of n has n - 1 -
            i fewer; or [batch, n]: keys per query. Keys beyond the table or `columns` are ignored.
        block_table: [batch, most pages per sequence] int32, unit stride along pages.
        out, clean, out_dtype, num_sms, pdl: as for `mqa_logits`; `out` is [batch * n, columns].
        columns: width of `out`, the longest context; by default the keys that a row of the table can address.

    Returns `out`. Raises as `mqa_logits`.
    """
    return PAGED_MQA_LOGITS.run(
        (q, cache, weights, lengths, block_table, out), (clean, columns, out_dtype, num_sms, pdl)
    )


class Logits(Operation):
    """`mqa_logits`: on q, kv, kv_scale, weights, starts, ends and out."""

    Options = Options

    def shapes_of(self, given: Given) -> dict[str, tuple[str, ...]]:
        """The names of each tensor's sizes."""
        return self.shapes

    def size(self, given: Given) -> tuple[int, int]:
        """Rows of the result, and its columns where the call does not say."""
        return given[0].shape[0], given[1].shape[0]

    def allocated(self, given: Given, options: tuple) -> Given:
        *inputs, _ = given
        (rows, wanted), (_, columns, dtype, *_) = self.size(given), options
        columns, dtype = wanted if columns is None else columns, dtype or torch.float32
        stride = round_up(max(columns, 1), _ROW_BYTES // dtype.itemsize)
        return *inputs, tensors.new_empty(given[0], (rows, columns), (stride, 1), dtype)

    def fake(self, given: Given, options: Options) -> torch.Tensor:
        rows, wanted = self.size(given)
        columns, dtype = wanted if options.columns is None else options.columns, options.out_dtype or torch.float32
        stride = round_up(torch.sym_max(columns, 1), _ROW_BYTES // dtype.itemsize)
        return given[0].new_empty_strided((rows, columns), (stride, 1), dtype=dtype)

    def check_arguments(self, given: Given, options: Options) -> None:
        self.check_dtypes(given)
        super().check_arguments(given, options)

    def check_options(self, options: Options) -> None:
        if options.out_dtype not in (None, *_OUTPUTS):
            raise ValueError(f"out_dtype is {options.out_dtype}; pass {' or '.join(map(str, _OUTPUTS))}, or nothing")
        columns = options.columns
        if columns is not None and not isinstance(columns, torch.SymInt):
            if type(columns) is not int:
                raise TypeError(f"columns is {columns!r}; pass how many columns out has, an int")
            if columns < 1:
                raise ValueError(f"columns is {columns}; pass a positive number, or None")
        super().check_options(options)

    def check_dtypes(self, given: Given) -> None:
        for name, x in zip(self.names, given, strict=True):
            if x is None and name == "out":
                continue
            if not isinstance(x, torch.Tensor) or x.dtype not in _DTYPES[name]:
                seen = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x)}"
                wanted = " or ".join(map(str, _DTYPES[name]))
                raise TypeError(f"{name} is {seen}; logits take a tensor of {wanted}. Convert it with .to()")

    def check(self, given: Given, options: Options) -> None:
        self.check_dtypes(given)
        named = self.named(given)
        if "out" in named and options.out_dtype not in (None, named["out"].dtype):
            raise TypeError(f"out is {named['out'].dtype} and out_dtype {options.out_dtype}; pass one of them alone")
        _check_shapes(self.shapes_of(given), named, {} if options.columns is None else {"columns": options.columns})
        checks.checked_num_sms(options.num_sms, given[0].device)

    def check_memory(self, given: Given, options: Options) -> Options:
        self.check_strides(self.named(given))
        return checks.with_defaults(options, given[0].device)

    def named(self, given: Given) -> dict[str, torch.Tensor]:
        return {name: x for name, x in zip(self.names, given, strict=True) if x is not None}

    def check_strides(self, named: dict) -> None:
        """Raise unless TMA and the kernel can read the rows."""
        for name in ("q", "kv"):
            x = named[name]
            steps = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
            if x.stride(-1) != 1 or any(step % tensors.ALIGNMENT_BYTES or step < x.shape[-1] for step in steps):
                raise ValueError(
                    f"{name} has strides {x.stride()}; it must have a unit stride along d, and other strides in "
                    f"multiples of 16 bytes. Pass {name}.contiguous()"
                )
        _check_rows(named, ("weights", "out"), ("kv_scale", "starts", "ends"))
        _check_aligned(named, "q", "kv", "kv_scale")

    def needs_kernel(self, given: Given) -> bool:
        q = given[0]
        return all(x.numel() for x in given) and self.is_on_gpu(q) and launches.is_hopper(q.get_device())

    def define(self, given: Given, options: Options) -> None:
        if all(x.numel() for x in given):
            self.define_all(given, options)
        elif options.clean:
            given[-1].fill_(float("-inf"))

    def define_all(self, given: Given, options: Options) -> None:
        _define(options, *given)

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        q, kv, _, weights, _, _, out = given
        rows, heads, head_dim = q.shape
        kernel = logits_launch.choose(head_dim, heads, rows, False, _OUTPUTS[out.dtype])
        blocks, batch_blocks = logits_launch.blocks_of(kernel, rows, rows)
        layout = LogitsLayout(
            *(rows, heads, len(kv), out.shape[1], blocks, rows, batch_blocks, options.columns is not None),
            *(options.clean, False, 0),
            weights_stride=weights.stride(0),
            table_stride=0,
            out_stride=out.stride(0),
        )
        keys = Keys(1, len(kv), kv.stride(0) if len(kv) > 1 else head_dim, 0, 0)
        return self.launch(kernel, layout, q, keys, options)

    sizes, shapes = "m n k heads", _SHAPES

    def without_memory(self, asked: checks.Sizes) -> tuple[Given, Options]:
        """m queries, of each sequence if there are groups, and n keys of k elements."""
        m, n, k, batch = asked.m, asked.n, asked.k, asked.groups
        pages = ceil_div(n, LOGITS_TILE)
        sizes = {"rows": m, "keys": n, "heads": asked.heads, "head_dim": k, "64": LOGITS_TILE, "1": 1, "batch": batch}
        sizes |= {"n": m, "batch * n": batch * m, "pages": batch * pages, "table_columns": pages}
        sizes |= {"head_dim + 4": k + SCALE_BYTES}
        shapes = ((name, [sizes[size] for size in self.shapes[name]]) for name in self.names[:-1])
        made = (torch.empty(shape, dtype=_DTYPES[name][0], device="meta") for name, shape in shapes)
        return (*made, None), Options(**self._defaults, out_dtype=asked.out_dtype)

    def predict(self, given: Given, options: Options, bytes_moved: int, hardware: Hardware) -> Prediction:
        (*queries, heads, head_dim), (rows, keys) = given[0].shape, self.size(given)
        output = _OUTPUTS[options.out_dtype or torch.float32]
        kernel = logits_launch.choose(head_dim, heads, queries[-1], len(queries) > 1, output)
        return logits_launch.predict(kernel, rows, queries[-1], keys, bytes_moved, options.num_sms, hardware)

    def launch(self, kernel, layout: LogitsLayout, q: torch.Tensor, keys: Keys, options: Options) -> launches.Prepared:
        """The launch for q as a 3-D tensor."""
        (rows, heads, head_dim), device = q.shape, q.get_device()
        if not cast.is_loaded(kernel, device):
            launches.refuse_capture(kernel.name, device, self.name)
        head_stride = q.stride(1) if heads > 1 else head_dim
        strides = q.stride(0) if rows > 1 else heads * head_stride, head_stride
        return logits_launch.prepare(kernel, device, options.num_sms, layout, strides, keys, self.names, options.pdl)


class PagedLogits(Logits):
    """`paged_mqa_logits`: on q, cache, weights, lengths, block_table and out."""

    sizes, shapes = "m n k heads groups", _PAGED_SHAPES

    def size(self, given: Given) -> tuple[int, int]:
        batch, n, _, _ = given[0].shape
        return batch * n, LOGITS_TILE * given[4].shape[1]

    def shapes_of(self, given: Given) -> dict[str, tuple[str, ...]]:
        return self.shapes if given[3].dim() == 2 else self.shapes | {"lengths": ("batch",)}

    def check_strides(self, named: dict) -> None:
        q, cache = named["q"], named["cache"]
        if not q.is_contiguous():
            raise ValueError(f"q must be contiguous; its strides are {q.stride()}. Pass q.contiguous()")
        pages, _, _, row_bytes = cache.shape
        dense = cache.stride(1) == row_bytes and cache.stride(3) == 1
        step = cache.stride(0) if pages > 1 else LOGITS_TILE * row_bytes
        if not dense or step < LOGITS_TILE * row_bytes or step % tensors.ALIGNMENT_BYTES:
            raise ValueError(
                f"cache has strides {cache.stride()}; pages must be dense, with strides (any, {row_bytes}, any, 1), "
                "and begin at multiples of 16 bytes"
            )
        _check_rows(named, ("weights", "out", "block_table"), ("lengths",))
        _check_aligned(named, "q", "cache")

    def define_all(self, given: Given, options: Options) -> None:
        q, cache, *others = given
        _define_paged((*options, q.shape[1]), q.flatten(0, 1), cache.flatten(1), *others)

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        q, cache, weights, lengths, block_table, out = given
        n, (rows, heads, head_dim) = q.shape[1], q.flatten(0, 1).shape
        kernel = logits_launch.choose(head_dim, heads, n, True, _OUTPUTS[out.dtype])
        blocks, batch_blocks = logits_launch.blocks_of(kernel, rows, n)
        pages = block_table.shape[1]
        layout = LogitsLayout(
            *(rows, heads, min(LOGITS_TILE * pages, out.shape[1]), out.shape[1], blocks, n, batch_blocks, False),
            options.clean,
            own_lengths=lengths.dim() == 2,
            table_columns=pages,
            weights_stride=weights.stride(0),
            table_stride=block_table.stride(0),
            out_stride=out.stride(0),
        )
        page_stride = cache.stride(0) if len(cache) > 1 else cache[0].numel()
        keys = Keys(len(cache), LOGITS_TILE, head_dim, page_stride, LOGITS_TILE * head_dim)
        return self.launch(kernel, layout, q.flatten(0, 1), keys, options)


# Definitions.


@torch.no_grad()
def _define(options, q, kv, kv_scale, weights, starts, ends, out) -> None:
    clean, columns, *_ = options
    rows_at_once = max(_DEFINITION_PRODUCTS // max(q.shape[1] * len(kv), 1), 1)
    key = torch.arange(len(kv), device=q.device)
    starts, ends = starts.clamp(0, len(kv)), ends.clamp(0, len(kv))
    for first in range(0, len(q), rows_at_once):
        part = slice(first, first + rows_at_once)
        logits = _defined(q[part], kv, kv_scale, weights[part])
        inside = (key >= starts[part, None]) & (key < ends[part, None])
        if columns is not None:
            at = starts[part, None] + torch.arange(columns, device=q.device)
            held = at < len(kv)
            at = at.clamp(max=len(kv) - 1)
            logits, inside = logits.gather(1, at), inside.gather(1, at) & held
        _write(out[part], logits, inside, clean)


@torch.no_grad()
def _define_paged(options, q, cache, weights, lengths, block_table, out) -> None:
    clean, *_, n = options
    head_dim = q.shape[2]
    values, scales = cache.split((LOGITS_TILE * head_dim, LOGITS_TILE * SCALE_BYTES), dim=1)
    values = values.view(torch.uint8).unflatten(1, (LOGITS_TILE, head_dim))
    scales = scales.contiguous().view(torch.float32)
    length = lengths if lengths.dim() == 2 else lengths.clamp(min=0)[:, None] - torch.arange(n, device=q.device).flip(0)
    width = min(LOGITS_TILE * block_table.shape[1], out.shape[1])
    key = torch.arange(out.shape[1], device=q.device)
    for b, pages in enumerate(block_table):
        exists = (pages >= 0) & (pages < len(cache))
        page = torch.where(exists, pages, 0).long()
        kv = values[page] * exists[:, None, None]
        kv_scale = (scales[page] * exists[:, None]).flatten()
        part = slice(b * n, (b + 1) * n)
        logits = _defined(q[part], kv.view(torch.float8_e4m3fn).flatten(0, 1), kv_scale, weights[part])
        inside = key < length[b, :, None].clamp(max=width)
        logits = torch.nn.functional.pad(logits[:, :width], (0, out.shape[1] - width))
        _write(out[part], logits, inside, clean)


def _defined(q: torch.Tensor, kv: torch.Tensor, kv_scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, keys] float64."""
    products = torch.einsum("shd,kd->shk", q.double(), kv.double()).relu_()
    return torch.einsum("shk,sh->sk", products, weights.double()) * kv_scale.double()


def _write(out: torch.Tensor, logits: torch.Tensor, inside: torch.Tensor, clean: bool) -> None:
    outside = float("-inf") if clean else out.to(logits.dtype)
    out.copy_(torch.where(inside, logits, outside))


# Checks.


def _check_shapes(shapes: dict, named: dict, sizes: dict) -> None:
    sizes = {"64": LOGITS_TILE, "1": 1} | sizes
    q = named["q"]
    for name, x in named.items():
        wanted = shapes[name]
        if len(x.shape) == len(wanted):
            for dimension, size in zip(wanted, x.shape, strict=True):
                sizes.setdefault(dimension, size)
            if name == "q":
                sizes |= {"head_dim + 4": x.shape[-1] + SCALE_BYTES, "batch * n": x.shape[0] * x.shape[1]}
            if "columns" not in sizes and ("keys" in sizes or "table_columns" in sizes):
                sizes["columns"] = sizes["keys"] if "keys" in sizes else LOGITS_TILE * sizes["table_columns"]
        fits = len(x.shape) == len(wanted) and all(map(ops.holds, map(eq, x.shape, (sizes[d] for d in wanted))))
        if not fits:
            known = [sizes.get(dimension, dimension) for dimension in wanted]
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [{', '.join(wanted)}] = {known}")
        if name == "q":
            _check_heads(q)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)")


def _check_heads(q: torch.Tensor) -> None:
    heads, head_dim = q.shape[-2:]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q has shape {list(q.shape)}; heads of {', '.join(map(str, HEAD_DIMS))} elements are known")
    if not 1 <= heads <= HEADS[-1]:
        raise ValueError(f"q has shape {list(q.shape)}, {heads} heads; a query has 1 to {HEADS[-1]}")
    if len(q.shape) == 4 and not 1 <= q.shape[1] <= MOST_BATCH_QUERIES:
        raise ValueError(
            f"q has shape {list(q.shape)}, {q.shape[1]} queries of a sequence; 1 to {MOST_BATCH_QUERIES} are known"
        )


def _check_rows(named: dict, with_unit_stride: tuple[str, ...], dense: tuple[str, ...]) -> None:
    for name in with_unit_stride:
        x = named.get(name)
        if x is not None and x.shape[1] > 1 and x.stride(1) != 1:
            raise ValueError(
                f"{name} must have a unit column stride; its strides are {x.stride()}. Pass {name}.contiguous()"
            )
    for name in dense:
        if not named[name].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous; its strides are {named[name].stride()}. Pass {name}.contiguous()"
            )
    out = named.get("out")
    if out is not None and len(out) > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"rows of out overlap: its strides are {out.stride()}. Pass a dense out")


def _check_aligned(named: dict, *names: str) -> None:
    for name in names:
        if named[name].numel() and not tensors.is_aligned(named[name]):
            raise ValueError(
                f"{name} must begin at a multiple of {tensors.ALIGNMENT_BYTES} bytes, for TMA. Pass {name}.clone()"
            )


def precompile_logits(
    heads: int,
    head_dim: int,
    *,
    paged: bool = False,
    queries: int | None = None,
    out_dtype: torch.dtype = torch.float32,
    workers: int | None = None,
    progress: bool = False,
) -> int:
    """Compile, and on a Hopper GPU load, every kernel that `mqa_logits` or `paged_mqa_logits` can need.

    Args:
        heads, head_dim: q's.
        paged: for `paged_mqa_logits`, else for `mqa_logits`.
        queries: the most queries of a call, by default any number; with `paged`, per sequence.
        out_dtype: the logits'.
        workers, progress: as for `precompile`.

    Returns:
        How many kernels there are.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        jit.CompileError: a kernel does not compile.
    """
    check_sizes(heads=heads, head_dim=head_dim, **({} if queries is None else {"queries": queries}))
    check_one("paged", paged)
    heads, head_dim, queries = map(as_int, (heads, head_dim, queries))
    if head_dim not in HEAD_DIMS or heads > HEADS[-1]:
        raise ValueError(f"heads is {heads} and head_dim {head_dim}; 1 to {HEADS[-1]} heads of {HEAD_DIMS} are known")
    if out_dtype not in tuple(_OUTPUTS):
        raise ValueError(f"out_dtype is {out_dtype}; pass {' or '.join(map(str, _OUTPUTS))}")
    kernels = logits_launch.all_kernels(head_dim, heads, paged, _OUTPUTS[out_dtype], queries)
    hopper = torch.cuda.is_available() and launches.is_hopper(torch.cuda.current_device())
    device = torch.cuda.current_device() if hopper else None
    cast.load_kernels(device, workers, kernels, progress)
    return len(kernels)


def _flops(q: tuple, keys: tuple, *_, **__) -> int:
    rows, (heads, head_dim) = q[:-2], q[-2:]
    return 2 * torch.Size(rows).numel() * heads * head_dim * keys[0]


_KEYWORDS = "clean columns out_dtype num_sms pdl"

MQA_LOGITS = Logits(
    *("mqa_logits", "q kv kv_scale weights starts ends out!", _KEYWORDS), defaults={"clean": True}, flops=_flops
)
PAGED_MQA_LOGITS = PagedLogits(
    *("paged_mqa_logits", "q cache weights lengths block_table out!", _KEYWORDS), defaults={"clean": False}
)
