"""Checks that products share: operands, scales, strides, the GPU, a config that is forced.

Each error says what was seen and what to do; the operation describes what a call must be.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from deep_tile import finishes, jit, launches, ops, packed, plan, settings, tensors
from deep_tile.config import MMA_M, REGISTER_ROWS, SCALE_BLOCK, GemmConfig, ceil_div, round_up
from deep_tile.kinds import LAYOUTS, Kind
from deep_tile.problem import GemmProblem

_TMA_BYTES = tensors.ALIGNMENT_BYTES
MAX_SIZE = 2**31 - 1024
"""Rounded up to the largest cluster tile, a size must fit the kernel's int."""

MAX_STRIDE_BYTES = 2**40 - 16
"""From row to row of an operand, as a tensor map takes it."""

SOURCES = {
    "a": "deep_tile.per_token_cast_to_fp8 makes a and a_scale",
    "a_scale": "deep_tile.per_token_cast_to_fp8 makes a and a_scale",
    "b": "deep_tile.per_block_cast_to_fp8 makes b and b_scale",
    "b_scale": "deep_tile.per_block_cast_to_fp8 makes b and b_scale",
    "out": "pass out=None to have it allocated",
    "offs": "pass the row behind each group's last, as a tensor of int32",
    "counts": "pass how many rows each group has, as a tensor of int32",
}
"""Which function makes each argument, for errors."""


class Sizes(NamedTuple):
    """A call without tensors, as `supports` describes products; others, which `explain` knows, have no kind."""

    m: int
    n: int
    k: int
    kind: Kind | None
    dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    strides: tuple[int | None, int | None]
    layout: str
    grouping: str
    groups: int
    heads: int = 0
    bias: torch.dtype | None = None
    activation: str | None = None

    @property
    def over_tokens(self) -> "Sizes":
        """These sizes for a gradient [n, k], which is summed over m tokens."""
        return self._replace(m=self.n, n=self.k, k=self.m)

    def operands(self, of_a: tuple[int, ...] = (), of_b: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
        """`a` and `b` on meta, with leading dimensions, each followed by its scale if it has one."""
        along_a, along_b = LAYOUTS[self.layout]
        scale_rows = SCALE_BLOCK if self.kind.scaling == "blocks" else 1
        a = _without_memory("a", self.kind, (*of_a, self.m, self.k), self.strides[0], along_a, 1)
        if self.kind.packing:
            if self.strides[1] is not None:
                raise ValueError(f"b_stride is {self.strides[1]}; a packed weight is contiguous: leave it out")
            return *a, *packed.zeros((*of_b, self.n, self.k), self.kind.name, "meta")
        return *a, *_without_memory("b", self.kind, (*of_b, self.n, self.k), self.strides[1], along_b, scale_rows)


def _without_memory(
    name: str, kind: Kind, shape: tuple[int, ...], stride: int | None, major: str, scale_rows: int
) -> tuple[torch.Tensor, ...]:
    """An operand [..., rows, k] on meta, and its scale, if it has one; a block has `scale_rows` rows."""
    *lead, rows, k = shape
    outer, inner = (rows, k) if major == "k" else (k, rows)
    dtype = finishes.torch_dtype(kind.a)
    if inner * kind.a.bytes > MAX_SIZE:
        raise ValueError(f"{name} is {rows} by {k}; of {dtype} at most {MAX_SIZE // kind.a.bytes} lie in a row")
    stride = inner if stride is None else stride
    steps = (outer * stride,) * len(lead)
    x = torch.empty_strided((*lead, outer, inner), (*steps, stride, 1), dtype=dtype, device="meta")
    x = x if major == "k" else x.mT
    if kind.scaling == "none":
        return (x,)
    scales = (rows, 1) if kind.row_scales else (ceil_div(rows, scale_rows), ceil_div(k, SCALE_BLOCK))
    return x, torch.empty(*lead, *scales, device="meta")


def with_defaults(options: NamedTuple, device: torch.device) -> NamedTuple:
    """A GEMM's options with num_sms and pdl filled in.

    Raises:
        ValueError: num_sms is out of range.
    """
    return options._replace(num_sms=checked_num_sms(options.num_sms, device), pdl=has_pdl(options))


def has_pdl(options: NamedTuple) -> bool:
    """Whether a GEMM's options mean programmatic launch, explicitly or by their num_sms."""
    return options.num_sms is None if options.pdl is None else options.pdl


def check_constant_weights(options: NamedTuple) -> None:
    if options.constant_weights and not has_pdl(options):
        raise ValueError(
            "constant_weights=True is for programmatic launches, which may start before their predecessor has ended; "
            f"got pdl={options.pdl}, num_sms={options.num_sms}: pass pdl=True, or drop constant_weights"
        )


def check_scale_dtypes(names: Sequence[str], operands) -> None:
    for name, scale in zip(names[1::2], operands[1::2], strict=True):
        if scale.dtype not in tensors.SCALE_DTYPES:
            remedy = tensors.scale_remedy(name, scale)
            raise TypeError(f"{name} must be {tensors.SCALE_NAMES}; got {scale.dtype}. To fix: {remedy}")


def check_device(name: str, x: torch.Tensor, call: str) -> None:
    if x.device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(
            f"{name} is on {x.device}; {call} runs on a Hopper GPU, or on the CPU as a reference, and on meta for "
            "shapes. Move all tensors with .cuda()"
        )


def check_devices(a, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device} but a is on {a.device}; move it with .to(a.device)")


def check_scale_shapes(a, a_scale, b, b_scale) -> None:
    (m, k), n = a.shape, b.shape[0]
    k_blocks, n_blocks = ceil_div(k, SCALE_BLOCK), ceil_div(n, SCALE_BLOCK)
    for name, x, scale, wanted, meaning in (
        ("a", a, a_scale, (m, k_blocks), "[m, ceil(k / 128)]"),
        ("b", b, b_scale, (n_blocks, k_blocks), "[ceil(n / 128), ceil(k / 128)]"),
    ):
        if not has_shape(scale, wanted):
            seen, source = tuple(scale.shape), f"To fix: {SOURCES[f'{name}_scale']}"
            if x.dtype == torch.int8:
                source = "Quantise with a scale for each 1x128 of a and 128x128 of b"
            remedy = scale_shape_remedy(f"{name}_scale", scale, wanted, x) or source
            raise ValueError(f"{name}_scale must have shape {meaning} = {wanted}; got {seen}. {remedy}")


def refuse(problem: str | None) -> None:
    if problem:
        raise ValueError(problem)


def has_shape(x: torch.Tensor, wanted: tuple[int, ...]) -> bool:
    return x.dim() == len(wanted) and all(ops.holds(size == right) for size, right in zip(x.shape, wanted, strict=True))


def scale_shape_remedy(name: str, scale: torch.Tensor, wanted: tuple[int, int], x: torch.Tensor) -> str | None:
    """The remedy for a scale whose shape is not `wanted` for operand `x`; None if its shape gives no hint. Sizes not
    known yet can be compared as text alone."""
    rows, seen = x.shape[0], tuple(scale.shape)
    more_than_one = [str(size) for size in scale.shape if str(size) != "1"]
    if str(seen) == str(wanted[::-1]):
        return f"It looks transposed: pass {name}.t(); any strides are accepted, so no copy is needed"
    expanded = f"or repeat it, which copies nothing: {name}.reshape(-1, 1).expand{wanted}"
    if not more_than_one:
        return f"deep_tile.scaled_gemm takes one number for all, where the other scale is such or of rows; {expanded}"
    if more_than_one == [str(rows)]:
        also = f"; {expanded}" if str(rows) == str(wanted[0]) else ""
        return f"deep_tile.scaled_gemm takes a scale for each row, where the other one is such or one number{also}"
    if str(seen) == str((rows, wanted[1])) and x.dtype != torch.int8:
        return "deep_tile.scaled_gemm takes a scale for each 1x128 of both operands"
    return None


def check_product_shapes(a, b, out, activation: str | None = None, names: tuple[str, str] = ("a", "b")) -> None:
    """Check a [m, k], b [n, k], under these names, and out [m, n] or None; an activation may halve the columns."""
    for name, tensor, shape in ((names[0], a, "[m, k]"), (names[1], b, "[n, k]")):
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} must have shape {shape}; got {tuple(tensor.shape)}. Flatten leading dimensions first"
            )
    (m, k), n = a.shape, b.shape[0]
    if not ops.holds(b.shape[1] == k):
        remedy = f"a [k, n] weight is passed as {transpose_of(names[1], b)}"
        if str(a.shape[0]) == str(b.shape[1]) and str(b.shape[0]) != str(k):
            remedy = f"what is [k, m] is passed as {transpose_of(names[0], a)}"
        raise ValueError(
            f"{names[0]} is [m, k] = {tuple(a.shape)} and {names[1]} is [n, k] = {tuple(b.shape)}: k differs. "
            f"{names[1]} holds one row per output column; {remedy}"
        )
    if out is not None:
        columns = finishes.out_columns(n, activation)
        if not has_shape(out, (m, columns)):
            meaning = "[m, n]" if columns is n else "[m, n / 2]"
            raise ValueError(
                f"out must have shape {meaning} = {(m, columns)}; got {tuple(out.shape)}. To fix: {SOURCES['out']}"
            )


def transpose_of(name: str, x: torch.Tensor) -> str:
    """A matrix's transpose in a layout that GEMMs take."""
    if x.element_size() == 2 or x.stride(0) == 1:
        return f"{name}.t(), which copies nothing"
    return f"{name}.t().contiguous()"


def check_sizes(a, b) -> None:
    (m, k), n = a.shape, b.shape[0]
    if max(m, n, k) > MAX_SIZE:
        raise ValueError(f"m, n, k = {m}, {n}, {k}; each must be at most {MAX_SIZE}: split the product")


def check_operand_strides(**operands: torch.Tensor) -> None:
    """Check that TMA can read matrices [rows, k] along k."""
    for name, tensor in operands.items():
        refuse(along_k_problem(name, tensor))
        check_alignment(name, tensor)


def along_k_problem(name: str, x: torch.Tensor) -> str | None:
    """Why TMA cannot read a matrix [rows, k] along k, but for its address."""
    rows, k = x.shape
    if k > 1 and x.stride(1) != 1:
        return (
            f"{name} must have a unit stride along k; its strides are {x.stride()}. Make it K-major: "
            f"{name}.contiguous()"
        )
    return stride_problem(name, rows, k, x.stride(0), x.element_size())


def lies_along_rows(x: torch.Tensor) -> bool:
    """Whether kernels read a matrix [rows, k] as M- or N-major."""
    return x.element_size() == 2 and along_k_problem("", x) is not None


def check_operand(name: str, x: torch.Tensor) -> None:
    """Check that kernels can read a matrix [rows, k]: K-major, or M- or N-major for 16-bit dtypes."""
    if x.element_size() != 2:
        check_operand_strides(**{name: x})
    else:
        problem = strides_problem(name, x)
        if problem:
            raise ValueError(problem)
        check_alignment(name, x)
    rows, k = x.shape
    size, what = (rows, f"{name} has {rows} rows") if lies_along_rows(x) else (k, f"k is {k}")
    if size * x.element_size() > MAX_SIZE:
        raise ValueError(f"{what}; of {x.dtype} at most {MAX_SIZE // x.element_size()}: split the product")


def strides_problem(name: str, x: torch.Tensor) -> str | None:
    """Why no kernel can read a 16-bit matrix in either major; the address is not checked."""
    along_k = along_k_problem(name, x)
    if along_k is None:
        return None
    rows, k = x.shape
    along_rows = stride_problem(name, k, rows, x.stride(1), x.element_size(), "column")
    adjacent = rows < 2 or x.stride(0) == 1
    if adjacent and along_rows is None:
        return None
    if k < 2 or x.stride(1) == 1:
        return along_k
    if rows > 1 and adjacent:
        return along_rows
    return (
        f"{name} must have a unit stride along k or along its rows; its strides are {x.stride()}. Make it K-major: "
        f"{name}.contiguous()"
    )


def check_row_block_scales(names: tuple[str, ...], operands) -> None:
    for at in (0, 2):
        x, scale, name = operands[at], operands[at + 1], names[at + 1]
        wanted = (x.shape[0], ceil_div(x.shape[1], SCALE_BLOCK))
        if not has_shape(scale, wanted):
            remedy = scale_shape_remedy(name, scale, wanted, x)
            raise ValueError(
                f"{name} must have shape {wanted}, one for each 128 of a row of {names[at]}; got {tuple(scale.shape)}. "
                f"{remedy or f'To fix: cast {names[at]} with scales of 1x128'}"
            )


def check_row_scales(a, a_scale, b, b_scale) -> None:
    for name, x, scale in (("a", a, a_scale), ("b", b, b_scale)):
        rows = x.shape[0]
        long = [size for size in scale.shape if not isinstance(size, int) or size != 1]
        if long and not (len(long) == 1 and ops.holds(long[0] == rows)):
            raise ValueError(
                f"{name}_scale must have one number, or one for each of {name}'s {rows} rows, as [{rows}] or "
                f"[{rows}, 1]; got {tuple(scale.shape)}. Or give both scales of blocks: a_scale [m, ceil(k / 128)], "
                "b_scale [ceil(n / 128), ceil(k / 128)], or of FP8 [n, ceil(k / 128)]"
            )


def check_alignment(name: str, x: torch.Tensor) -> None:
    if not x.is_meta and x.numel() and x.data_ptr() % _TMA_BYTES:
        raise ValueError(misaligned(name, x))


def check_out_strides(out: torch.Tensor) -> None:
    m, n = out.shape
    if n > 1 and out.stride(1) != 1:
        raise ValueError(f"out must have a unit stride along n; its strides are {out.stride()}. Pass a row-major out")
    if m > 1 and out.stride(0) < n:
        raise ValueError(f"rows of out overlap: its row stride is {out.stride(0)} for {n} columns. Pass a dense out")


def misaligned(name: str, tensor: torch.Tensor) -> str:
    return (
        f"{name} must begin at a multiple of {_TMA_BYTES} bytes; its address is {tensor.data_ptr() % _TMA_BYTES} bytes "
        f"past one. Slice at multiples of {_TMA_BYTES // tensor.element_size()} columns, or pass {name}.clone()"
    )


def scale_problem(operand: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    if 0 in shape:
        return None
    reach, most = plan.scale_reach(shape, strides), plan.MAX_SCALE_REACH
    if reach <= most:
        return None
    dense = math.prod(shape) - 1 <= most
    remedy = f"Pass {operand}_scale.contiguous()" if dense else f"Split the rows of {operand}"
    return f"{operand}_scale's last element lies {reach} after its first; kernels reach {most}. {remedy}"


def stride_problem(
    name: str, rows: int, columns: int, stride: int, element_bytes: int = 1, what: str = "row"
) -> str | None:
    """What is wrong with the row stride of a matrix [rows, columns] with contiguous columns: a K-major operand [rows,
    k], or an M- or N-major operand's transpose [k, rows]; then `what` is "column"."""
    if rows <= 1 or columns == 0:
        return None
    of_what = f"k = {columns}" if what == "row" else f"{columns} rows"
    if stride < columns:
        return f"{what}s of {name} overlap: the {what} stride is {stride} for {of_what}. Pass {name}.contiguous()"
    if stride * element_bytes % _TMA_BYTES:
        padded = round_up(stride, _TMA_BYTES // element_bytes)
        remedy = f"[rows, {padded}] and pass the first {columns} columns"
        if what == "column":
            remedy = f"[k, {padded}] and pass the transpose of the first {columns} columns"
        return (
            f"{name}'s {what} stride must be a multiple of {_TMA_BYTES} bytes; it is {stride * element_bytes}. "
            f"Allocate {remedy}"
        )
    if stride * element_bytes > MAX_STRIDE_BYTES:
        seen = f"{name}'s {what} stride is {stride * element_bytes} bytes; kernels reach {MAX_STRIDE_BYTES}"
        return f"{seen}. Pass {name}.contiguous()"
    return None


def check_hopper(device: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise RuntimeError(
            f"cuda:{device} is {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}; deep_tile's "
            "kernels need a Hopper GPU (9.0: H100, H200, H800, H20). CPU tensors compute through the reference"
        )


def is_available() -> tuple[bool, str]:
    """Say whether kernels can run here, and if not, why, as `(bool, reason)`. Never raises. May initialise CUDA.

    False in a process forked after CUDA had started, and after any kernel in this process failed.
    """
    try:
        if not torch.cuda.is_available():
            return False, "torch sees no CUDA device; CPU tensors still work, through deep_tile.reference"
        if torch.cuda._is_in_bad_fork():
            return False, "CUDA cannot be used in a process forked after CUDA had started: start workers with 'spawn'"
        check_hopper(torch.cuda.current_device())
        _check_alive()
        return True, f"{jit.compiler_text()}, {torch.cuda.get_device_name()}"
    except Exception as error:  # the promise is an answer, whatever is broken underneath
        return False, f"{type(error).__name__}: {error}"


def current_gpu() -> int | None:
    """The current CUDA device, where kernels can run on it."""
    return torch.cuda.current_device() if is_available()[0] else None


def _check_alive() -> None:
    """Raise if an earlier kernel failed: every CUDA call then reports it, and this one has no side effects."""
    try:
        if not torch.cuda.is_current_stream_capturing():  # and a stream that is being captured lives
            torch.cuda.current_stream().query()
    except RuntimeError as error:
        raise RuntimeError(
            f"an earlier kernel of this process failed, so CUDA no longer works in it: start another process ({error})"
        ) from error


def checked_num_sms(num_sms: int | None, device: torch.device) -> int:
    """SMs to use; on the CPU, where there are none, any positive number passes."""
    available = launches.num_sms(device.index) if device.type == "cuda" else MAX_SIZE
    if num_sms is None:
        return available
    if not 1 <= num_sms <= available:
        most = f" to {available}, the SMs of {device}" if device.type == "cuda" else ""
        raise ValueError(f"num_sms is {num_sms}; pass an int from 1{most}, or None for all")
    return num_sms


def checked_config(config: GemmConfig, problem: GemmProblem) -> GemmConfig:
    """The config that a call forces. Raises ValueError unless it suits the problem."""
    for names in (("grouping",), ("kind", "output"), ("layout",), ("accumulate",), ("bias", "activation")):
        of_config, of_call = (" and ".join(f"{name}={getattr(x, name)!r}" for name in names) for x in (config, problem))
        if of_config != of_call:
            raise ValueError(f"{config.name} is for {of_config}, and this call for {of_call}; pass such a config")
    why = None
    if config.tma_store and not problem.tma_store:
        why = (
            f"stores with TMA, but out's address, row length or row stride is no multiple of {_TMA_BYTES} bytes; pass "
            "a config with tma_store=False, or an aligned out"
        )
    elif config.pairs and not config.takes_k(problem.k):
        why = (
            f"multiplies K blocks of {SCALE_BLOCK} two by two, and k = {problem.k} has an odd number of them; pass a "
            "config with pairs=False"
        )
    elif not config.takes_k(problem.k):
        smallest, largest = config.k_range
        why = (
            f"keeps all of b's K in shared memory, for k from {smallest} to {largest}; k is {problem.k}: pass a config "
            "with b_stages=0"
        )
    elif config.cluster > problem.num_sms:
        why = f"needs {config.cluster} SMs; num_sms is {problem.num_sms}: pass a config without clusters"
    elif config.parts_of_k > 1 and not problem.split_k:
        why = (
            "splits K, and sums depend on the split; batch_invariant=True needs split_k=1, and with "
            f"up to {2 * REGISTER_ROWS} rows from registers more than {MMA_M} columns: pass such a config"
        )
    if why is not None:
        raise ValueError(f"{config.name} {why}")
    return config


def tma_can_store(out: torch.Tensor) -> bool:
    """TMA, and the vector stores for a group's last rows, address and clip rows in 16-byte steps: at n = 261 TMA would
    overwrite columns 261 to 263."""
    strides = [stride for stride, size in zip(out.stride()[:-1], out.shape[:-1], strict=True) if size > 1]
    numbers = (out.data_ptr(), *(out.element_size() * number for number in (out.shape[-1], *strides)))
    return all(number % _TMA_BYTES == 0 for number in numbers)


def check_capture(config: GemmConfig, device: int, call: str) -> None:
    if not plan.is_loaded(config, device):
        launches.refuse_capture(config.name, device, call, ", or deep_tile.precompile,")


def kernel_for(
    problem: GemmProblem,
    config: GemmConfig | None,
    device: int,
    call: str,
    *,
    choose: Callable[[GemmProblem], GemmConfig | None] | None = None,
) -> GemmConfig | None:
    """The config for a checked call: the forced one, or `choose`'s, `plan.config_for`.

    Raises:
        ValueError, RuntimeError: it does not suit the problem; the GPU is not a Hopper; or the kernel would have to be
            loaded while a CUDA graph is captured.
    """
    check_hopper(device)
    config = (choose or plan.config_for)(problem) if config is None else checked_config(config, problem)
    if config is None:
        return None
    check_capture(config, device, call)
    if settings.print_config():
        sizes = f"m={problem.m} n={problem.n} k={problem.k} num_sms={problem.num_sms}"
        groups = "" if problem.groups is None else f"{problem.groups} "
        print(f"deep_tile: {groups}{sizes}: {config.name}", file=sys.stderr)
    return config
