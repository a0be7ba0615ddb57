"""Thin GEMMs: split-K for outputs too small to fill a GPU. BF16 with FP32 weights (routers), with row sums of squares,
or summed over a batch.

One kernel multiplies K parts on all SMs, another adds them in a fixed order (parts.py). Invariant: results repeat bit
for bit; how many parts there are depends on sizes and the GPU's SMs alone.
"""

from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from deep_tile import cast, checks, finishes, launches, ops, params, parts, tensors
from deep_tile.config import ceil_div, round_up
from deep_tile.jit import compilations
from deep_tile.operation import Given, Operation
from deep_tile.select.hardware import H200, Hardware
from deep_tile.select.streaming import Prediction


class Options(NamedTuple):
    """Keywords of `thin_gemm` and `prenorm_gemm`, described there."""

    out_dtype: torch.dtype | None = None
    terms: int = 3
    accumulate: bool = False
    batch_invariant: bool = False
    pdl: bool | None = None
    num_splits: int | None = None
    num_sms: int | None = None


def thin_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    terms: int = 3,
    accumulate: bool = False,
    batch_invariant: bool = False,
    num_sms: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """GEMM with few rows, few columns or a long K: `out[m, n] = sum_k a[m, k] * b[n, k]`, with BF16 `a` and FP32 or
    BF16 `b`.

    With 3-D operands it also sums over the first dimension: `out[m, n] = sum over s and k of a[s, m, k] * b[s, n, k]`.
    With a 2-D `a` and a 3-D `b`, `a` is multiplied by the sum of b's matrices, which are the terms that `split_weight`
    makes of an FP32 weight. A 2-D FP32 `b` is split in every call: with few rows by the GEMM kernel, otherwise by a
    separate kernel.

    An FP32 `b` is multiplied as a sum of BF16 terms, whose products with BF16 are exact. Three terms lose only bits
    below 2^-133, so that only the FP32 sums round; two terms have a relative error up to 2^-17. Sums over 64 k are
    added in FP32, then the parts of K, in a fixed order. Runs on the tensors' device and torch's current stream; CPU
    tensors are multiplied in float64. Not differentiable. Compiled as one op by torch.compile and torch.export.

    Args:
        a: [m, k] or [s, m, k] bfloat16, unit stride along k, other strides multiples of 16 bytes, 16-byte aligned.
        b: [n, k] or [s, n, k] float32 or bfloat16, laid out like `a`; or [terms, n, k] bfloat16, one to three terms,
            for a 2-D `a`. Infinite or NaN inputs make their sums infinite or NaN.
        out: [m, n] float32, bfloat16 or float16, unit stride along n; allocated when None. Must not overlap the inputs.
        out_dtype: dtype of `out`: by default `out`'s, or float32.
        terms: of an FP32 `b`: 3, or 2, which needs two thirds of the operations and numbers below 2^127.
        accumulate: add the result to `out`, which must be given and float32.
        batch_invariant: the bits of a row of `out` do not depend on m and num_sms. Slower.
        num_sms: streaming multiprocessors to use, at most and by default all.
        pdl: programmatic dependent launch, as for `fp8_gemm`; None: unless `num_sms` is given.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.

    The finding that tensor cores truncate, so that terms help only if sums are added outside them, is from Ootomo and
    Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
    performance", 2022.
    """
    options = (out_dtype, terms, accumulate, batch_invariant, pdl, None, num_sms)
    return THIN_GEMM.run((a, b, out, None, None), options)


def prenorm_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    sqr_sum: torch.Tensor | None = None,
    *,
    num_splits: int | None = None,
    num_sms: int | None = None,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a thin GEMM and the sums of squares of `a`'s rows in one read of `a`, as hyper-connections need before a
    norm.

    `out[m, n] = sum_k a[m, k] * b[n, k]` as by `thin_gemm` with FP32 `b`, and `sqr_sum[m] = sum_k a[m, k]^2`. With
    `num_splits` both are returned as parts of K for the caller to add: blocks of 64 k are assigned in order, one more
    to each of the first parts if they do not divide evenly. A row's bits then do not depend on m.

    Args:
        a: [m, k] bfloat16, unit stride along k, row stride a multiple of 16 bytes, 16-byte aligned.
        b: [n, k] float32, laid out like `a`. Fast up to n = 24; more columns read `a` again.
        out: [m, n] float32, or [num_splits, m, n], unit stride along n; allocated when None.
        sqr_sum: [m] float32, or [num_splits, m], contiguous; allocated when None.
        num_splits: K parts to return; None: they are added.
        num_sms, pdl: as for `thin_gemm`.

    Returns:
        `out` and `sqr_sum`.

    Raises as `fp8_gemm`. Nothing has been launched, and both are untouched.
    """
    options = (None, 3, False, False, pdl, num_splits, num_sms)
    return PRENORM_GEMM.run((a, b, out, sqr_sum, None, None, None), options)


def split_weight(b: torch.Tensor, terms: int = 3) -> torch.Tensor:
    """Split an FP32 weight into the BF16 terms that `thin_gemm` multiplies: the work that does not depend on `a`.

    Three terms are truncated and sum to `b` except for bits below 2^-133; two are rounded, with a relative error up to
    2^-17. Split again after the weight has changed. Runs in torch on any device. Not differentiable.

    Args:
        b: [n, k] float32, finite, below 2^127 with two terms.
        terms: 2 or 3.

    Returns:
        [terms, n, k] bfloat16, whose rows begin at multiples of 16 bytes.

    Raises:
        TypeError, ValueError: another dtype, dimension count or term count.
    """
    if not isinstance(b, torch.Tensor) or b.dtype != torch.float32 or b.dim() != 2:
        seen = f"{list(b.shape)} of {b.dtype}" if isinstance(b, torch.Tensor) else type(b).__name__
        raise TypeError(f"b must be [n, k] of torch.float32; got {seen}. To fix: b.float()")
    _check_terms(terms)
    if not is_dynamo_compiling():  # dynamo knows its tensors and would have to trace the check
        tensors.require_dense(b=b)
    made = tensors.empty_rows((terms, *b.shape), torch.bfloat16, b.device)
    rest = b.detach()
    for term in made:
        whole = rest if terms == 2 else (rest.view(torch.int32) & -65536).view(torch.float32)
        term.copy_(whole)
        rest = rest - term.float()
    return made


def precompile_thin(workers: int | None = None, *, progress: bool = False) -> int:
    """Compile, and on a Hopper GPU load, every kernel for `thin_gemm` and `prenorm_gemm`: no later call compiles.

    Args:
        workers, progress: as for `precompile`.

    Returns:
        How many had to be compiled.
    """
    before = compilations()
    cast.load_kernels(checks.current_gpu(), workers, parts.all_kernels(), progress)
    return compilations() - before


class ByParts(Operation):
    """On a, b, the results, memory for the K parts of each result, and memory for the terms of b. `prenorm_gemm` has
    two results."""

    Options = Options

    def __init__(self, name: str, tensors: str, keywords: str) -> None:
        self.squares = "sqr_sum" in tensors
        super().__init__(
            *(name, tensors, keywords),
            scratch="out_parts sqr_sum_parts terms" if self.squares else "out_parts terms",
            to_train="call torch.nn.functional.linear",
            flops=ops.product_flops(second=1),
        )

    def allocated(self, given: Given, options: tuple) -> Given:
        named, operands, outs = Options(*options), given[:2], given[self._written_to]
        if any(out is None for out in outs):
            if named.accumulate:
                raise ValueError("accumulate is True and out None: pass what the product is added to")
            dtype = _out_dtype(named)
            outs = tuple(
                tensors.new_empty(operands[0], shape, tensors.dense_strides(shape), dtype) if out is None else out
                for out, shape in zip(outs, self.out_shapes(operands, named), strict=True)
            )
        choice = self.chosen(operands, named) if self.needs_kernel(operands) else None
        return *operands, *outs, *self.workspace(outs, choice, named), self.terms(operands, choice, named)

    def fake(self, given: Given, options: Options) -> torch.Tensor | tuple[torch.Tensor, ...]:
        shapes, dtype = self.out_shapes(given[:2], options), _out_dtype(options)
        made = tuple(given[0].new_empty(shape, dtype=dtype) for shape in shapes)
        return made[0] if self._has_one_out else made

    def out_shapes(self, operands: Given, options: Options) -> list[tuple[int, ...]]:
        m, n = (x.shape[-2] for x in operands)
        every = () if options.num_splits is None else (options.num_splits,)
        return [(*every, m, n), *([(*every, m)] if self.squares else [])]

    def product(self, operands: Given, options: Options) -> parts.Product:
        a, b = operands
        terms = options.terms if b.dtype == torch.float32 else b.shape[0] if a.dim() < b.dim() else 1
        matrices, is_fp32 = a.shape[0] if a.dim() == 3 else 1, b.dtype == torch.float32
        return parts.Product(a.shape[-2], b.shape[-2], a.shape[-1], matrices, terms, self.squares, is_fp32)

    def chosen(self, operands: Given, options: Options) -> parts.Choice:
        product, fixed = self.product(operands, options), options.num_splits
        if options.batch_invariant:
            fixed = min(parts.INVARIANT_PARTS, product.steps)
        return parts.choose(product, _room(operands[0], options), fixed, options.batch_invariant)

    def without_memory(self, asked: checks.Sizes) -> tuple[Given, Options]:
        """As in `Operation`; `asked.dtype` is b's."""
        a = torch.empty(asked.m, asked.k, dtype=torch.bfloat16, device="meta")
        b = torch.empty(asked.n, asked.k, dtype=asked.dtype or torch.float32, device="meta")
        return (a, b, *(None,) * (len(self.names) - 2)), Options(out_dtype=asked.out_dtype)

    def predict(self, given: Given, options: Options, bytes_moved: int, hardware: Hardware) -> Prediction:
        room = parts.Room(options.num_sms, 1 if options.num_sms < hardware.num_sms else None)
        return parts.predict(self.product(given[:2], options), room, bytes_moved, hardware)

    def needs_kernel(self, given: Given) -> bool:
        return self.is_on_gpu(given[0]) and all(x.numel() for x in given[:2])

    def workspace(self, outs: Given, choice: parts.Choice | None, options: Options) -> tuple[torch.Tensor | None, ...]:
        """Memory for each result's K parts, written by one kernel and added by the next."""
        count = 1 if choice is None or options.num_splits is not None else choice.parts
        return tuple(None if count == 1 else out.new_empty((count, *out.shape), dtype=torch.float32) for out in outs)

    def terms(self, operands: Given, choice: parts.Choice | None, options: Options) -> torch.Tensor | None:
        """Memory for the terms of an FP32 b that the GEMM kernel does not split itself, [matrices * terms, n, k]."""
        b = operands[1]
        if b.dtype != torch.float32 or choice is None or choice.kernel.splits:
            return None
        matrices = b.shape[0] if b.dim() == 3 else 1
        shape = (matrices * options.terms, b.shape[-2], parts.split_width(b.shape[-1]))
        return b.new_empty(shape, dtype=torch.bfloat16)

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        (a, b), device, product = given[:2], given[0].get_device(), self.product(given[:2], options)
        checks.check_hopper(device)
        choice = self.chosen(given[:2], options)
        named = {name: x for name, x in zip(self.names, given, strict=True) if x is not None}
        at, names = params.places(named), (*named,)
        splits, is_summed = "terms" in named, "out_parts" in named
        for each in (choice.kernel, *[parts.SUM] * is_summed, *([parts.SPLIT[options.terms]] if splits else [])):
            if not cast.is_loaded(each, device):
                launches.refuse_capture(each.name, device, self.name, ", or deep_tile.precompile_thin,")
        pdl, room, made = checks.has_pdl(options), _room(a, options), []
        if splits:
            sizes, places = (options.terms, product.n, product.k, product.matrices), {"b": at["b"], "out": at["terms"]}
            made.append(
                parts.prepare_split(*sizes, _strides(b), device, names=names, places=places, room=room, pdl=pdl)
            )
        b, written = named.get("terms", b), "_parts" if is_summed else ""
        layout = _layout(a, b, named[f"out{written}"], options.accumulate and not is_summed)
        places = {"a": at["a"], "b": at["terms" if splits else "b"], "out": at[f"out{written}"]}
        places |= {"squares": at[f"sqr_sum{written}"]} if self.squares else {}
        made.append(parts.prepare(product, choice, layout, device, names=names, places=places, room=room, pdl=pdl))
        if is_summed:
            places = {"sums": at["out_parts"], "out": at["out"]}
            places |= {"squares": at["sqr_sum_parts"], "sqr_sum": at["sqr_sum"]} if self.squares else {}
            layout = _layout(a, b, named["out"], options.accumulate)
            made.append(parts.prepare_sum(product, choice.parts, layout, device, names=names, places=places, room=room))
        return tuple(made) if len(made) > 1 else made[0]

    def define(self, given: Given, options: Options) -> None:
        (a, b), outs = given[:2], given[self._written_to]
        if outs[0].is_meta:
            return
        k, splits = a.shape[-1], options.num_splits
        for part, bounds in enumerate(_bounds(k, splits or 1)):
            x, y = a[..., bounds].double(), b[..., bounds].double()
            product = (x @ y.mT).sum(0) if b.dim() == 3 else x @ y.mT
            into, *squares = outs if splits is None else [each[part] for each in outs]
            into.copy_(into + product.to(into.dtype) if options.accumulate else product)
            for each in squares:
                each.copy_(x.square().sum(1))

    def check_options(self, options: Options) -> None:
        finishes.check_out_dtype(options.out_dtype)
        super().check_options(options)
        _check_terms(options.terms)
        splits = options.num_splits
        if splits is not None and (type(splits) is not int or not 1 <= splits <= parts.MOST_PARTS):
            raise ValueError(f"num_splits is {splits!r}; pass an int from 1 to {parts.MOST_PARTS}, or None")

    def check(self, given: Given, options: Options) -> None:
        a, b = operands = given[:2]
        outs = given[self._written_to]
        of_b = (torch.float32,) if self.squares else (torch.float32, torch.bfloat16)
        for name, x, known in (("a", a, (torch.bfloat16,)), ("b", b, of_b)):
            if x.dtype not in known:
                wanted = finishes.one_of(known)
                raise TypeError(f"{name} must be {wanted}; got {x.dtype}. To fix: {name}.to({known[0]})")
        self.check_out_dtypes(outs, options)
        checks.check_device("a", a, self.name)
        checks.check_devices(a, **dict(zip(self.names[1:], (b, *outs), strict=False)))
        checks.checked_num_sms(options.num_sms, a.device)
        if a.dim() == 3 and b.dim() == 3 and not self.squares:
            if not ops.holds(a.shape[0] == b.shape[0]):
                raise ValueError(f"a has {a.shape[0]} matrices and b {b.shape[0]}; pass as many of each")
            a, b = a[:1].flatten(0, 1), b[:1].flatten(0, 1)
        elif b.dim() == 3 and a.dim() == 2 and not self.squares:
            if b.dtype != torch.bfloat16 or not 1 <= b.shape[0] <= max(parts.SPLIT):
                seen = f"b is {list(b.shape)} of {b.dtype}"
                raise ValueError(f"{seen}; for a of 2 dimensions pass 1 to 3 terms in bfloat16")
            b = b[:1].flatten(0, 1)
        checks.check_product_shapes(a, b, None)
        for name, out, shape in zip(self.names[2:], outs, self.out_shapes(operands, options), strict=False):
            if out is not None and not checks.has_shape(out, shape):
                raise ValueError(f"{name} must be {list(shape)}; got {list(out.shape)}. Allocate it so, or pass None")

    def check_out_dtypes(self, outs: Given, options: Options) -> None:
        known = (torch.float32,) if self.squares or options.accumulate else tuple(finishes.OUTPUT_NAMES)
        for name, out in zip(self.names[2:], outs, strict=False):
            if out is not None and out.dtype not in known:
                wanted = finishes.one_of(known)
                raise TypeError(f"{name} must be {wanted}; got {out.dtype}. Pass such a tensor, or None")
        if outs[0] is not None and options.out_dtype not in (None, outs[0].dtype):
            raise TypeError(f"out_dtype is {options.out_dtype} and out is {outs[0].dtype}; leave out_dtype out")
        if options.accumulate and outs[0] is None:
            raise ValueError("accumulate is True and out None: pass what the product is added to")

    def check_memory(self, given: Given, options: Options) -> Options:
        checks.check_sizes(*map(_matrix, given[:2]))
        for name, x in zip("ab", given, strict=False):
            _check_strides(name, x)
        out, *squares = given[self._written_to]
        if out is not None:
            _check_out_strides(out)
        if squares and squares[0] is not None and not squares[0].is_contiguous():
            raise ValueError(f"sqr_sum has strides {squares[0].stride()}; pass a contiguous one")
        return options


def _out_dtype(options: Options) -> torch.dtype:
    return options.out_dtype or torch.float32


def _room(x: torch.Tensor, options: Options) -> parts.Room:
    """The `Room` for thread blocks. With `num_sms`, each SM has one block, since the GPU would spread more blocks over
    other SMs."""
    if options.num_sms is not None:
        return parts.Room(checks.checked_num_sms(options.num_sms, x.device), 1)
    return parts.Room(launches.num_sms(x.get_device()) if x.is_cuda else H200.num_sms)


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides between rows and between matrices. For a size of 1 torch may report any stride, which TMA would
    refuse."""
    rows, k = x.shape[-2:]
    row = x.stride(-2) if rows > 1 else round_up(k, tensors.ALIGNMENT_BYTES // x.element_size())
    return row, x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else rows * row


def _layout(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, adds: bool) -> parts.Layout:
    return parts.Layout(
        *(_strides(a), _strides(b)),
        out_stride=out.stride(-2),
        part_stride=out.stride(0) if out.dim() == 3 else 0,
        output=finishes.OUTPUT_NAMES[out.dtype],
        accumulate=adds,
    )


def _bounds(k: int, splits: int) -> list[slice]:
    """Bounds of the K parts, as the kernel assigns them."""
    steps, longer = divmod(ceil_div(k, parts.STEP), splits)
    ends = [0]
    for part in range(splits):
        ends.append(ends[-1] + (steps + (part < longer)) * parts.STEP)
    return [slice(min(begin, k), min(end, k)) for begin, end in zip(ends, ends[1:], strict=False)]


# Checks.


def _check_terms(terms: object) -> None:
    if type(terms) is not int or terms not in parts.SPLIT:
        raise ValueError(f"terms is {terms!r}; pass 3, which are exact, or 2")


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """The first of [s, rows, k], or [rows, k]."""
    return x if x.dim() == 2 else x[0] if len(x) else x.flatten(0, 1)


def _check_strides(name: str, x: torch.Tensor) -> None:
    """Check that TMA, or 16-byte loads, can read a K-major [rows, k] or [s, rows, k]."""
    checks.check_operand_strides(**{name: _matrix(x)})
    if x.shape[-1] * x.element_size() > checks.MAX_SIZE:  # the kernel counts K in bytes
        most = checks.MAX_SIZE // x.element_size()
        raise ValueError(f"{name} has k = {x.shape[-1]}; of {x.dtype} at most {most}: split the product")
    if x.dim() == 3 and len(x) > 1:
        step = x.stride(0) * x.element_size()
        if step <= 0 or step % tensors.ALIGNMENT_BYTES:
            raise ValueError(f"{name}'s matrices lie {step} bytes apart, no multiple of 16: pass {name}.contiguous()")
        if ceil_div(x.shape[2], parts.STEP) * len(x) > checks.MAX_SIZE:
            raise ValueError(f"{name} is {list(x.shape)}: too many matrices; split the product")


def _check_out_strides(out: torch.Tensor) -> None:
    checks.check_out_strides(out if out.dim() == 2 else out[0])
    if out.dim() == 3 and len(out) > 1 and out.stride(0) < out.shape[1] * out.stride(1):
        raise ValueError(f"parts of out overlap: its strides are {out.stride()}. Pass a dense out")


THIN_GEMM = ByParts("thin_gemm", "a b out!", "out_dtype terms accumulate batch_invariant num_sms pdl")
PRENORM_GEMM = ByParts("prenorm_gemm", "a b out! sqr_sum!", "num_splits num_sms pdl")
