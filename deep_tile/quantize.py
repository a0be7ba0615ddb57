"""Casts to FP8 with one FP32 scale per 1x128 (activations) or 128x128 (weights) block, and back.

Called by users, tests and benchmarks. `_definition`, in plain torch, says what a cast is; on a Hopper GPU a kernel
(cast.py) writes the same bits. A warm call is one call into C, which finds the launch by the tensors' signature.
Invariant: for finite `x`, either cast followed by `dequantize` gives `x` back to within e4m3's rounding at its block's
scale; nothing saturates.
"""

from functools import cache
from numbers import Real

import torch
import torch.nn.functional as F

from deep_tile import _launcher, cast, launches, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div, round_up

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max  # 448
SMALLEST_AMAX_FLOOR = 2.0**-80
"""About 8e-25: above it, no step of the kernels' division underflows."""
SOURCE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

TOKEN_BLOCK = (1, SCALE_BLOCK)
"""Rows and columns that share one scale of `a`."""
WEIGHT_BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
"""Rows and columns that share one scale of `b`."""

SCALE_LAYOUTS = ("row", "m", "m_aligned")

_KERNEL_SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_VECTOR_BYTES = tensors.ALIGNMENT_BYTES
"""What a thread of a kernel loads at once; it stores as many elements."""

_launches: launches.Table = {}
"""By rows of a block and `amax_floor`; of input, out and scale."""


def per_token_cast_to_fp8(
    x: torch.Tensor,
    *,
    scale_layout: str = "row",
    amax_floor: float = 1e-4,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations: one scale per row and 128 columns.

    Runs on `x`'s device and torch's current stream: on a Hopper GPU by one kernel, elsewhere by torch, with the same
    result bit for bit, but for the sign of NaN.

    Args:
        x: [m, k], float64, float32, float16 or bfloat16, any strides and any k (the last group may be short). float64
            is converted to FP32 first. On the GPU fastest where columns are adjacent and rows begin and end at
            multiples of 16 bytes, and `out` begins at one; other column strides are copied first.
        scale_layout: memory order of the scale. "row": stride (k_groups, 1). "m": stride (1, m). "m_aligned": stride
            (1, m rounded up to 4), which TMA needs; the padding holds zeros.
        amax_floor: lower bound of a group's largest magnitude, so that an all-zero group keeps a usable scale. 1e-4 is
            DeepGEMM's, 1e-10 vLLM's and SGLang's. At least 2**-80, about 8e-25.
        out: [m, k] float8_e4m3fn with unit column stride, to write to; allocated, contiguous, when None.
        scale_out: [m, k_groups] float32 of any strides, to write to; `scale_layout` then means nothing.

    Returns:
        The [m, k] float8_e4m3fn tensor and its FP32 scale [m, k_groups], `k_groups = ceil(k / 128)`, where
        scale = max(largest magnitude of the group, amax_floor) / 448 and element = x / scale, each rounded to FP32 and
        the element once more, to nearest even, to e4m3.

    In a group that holds NaN or infinity the scale and every element become NaN; no other group changes.

    Raises:
        TypeError: `x` is not a tensor of a listed dtype, `out` or `scale_out` has the wrong one, one of them is not a
            plain tensor (a wrapper, a negated view, sparse, ...), or `amax_floor` is no number.
        ValueError: `x` is not 2-D, `scale_layout` is unknown, `amax_floor` out of range, or shape, stride or device of
            `out` or `scale_out` do not fit, or a tensor has no memory.
        RuntimeError: on a Hopper GPU, NVRTC or the driver is missing, or the kernel would have to be loaded while the
            stream is being captured.
    """
    if scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f"scale_layout is {scale_layout!r}; use one of {', '.join(map(repr, SCALE_LAYOUTS))}")
    if out is None or scale_out is None:
        _check_source("x", x, amax_floor)
        out = _empty_out(x) if out is None else out
        scale_out = _empty_scale(x, scale_layout) if scale_out is None else scale_out
    _cast("x", x, TOKEN_BLOCK, amax_floor, out, scale_out)
    return out, scale_out


def per_block_cast_to_fp8(
    w: torch.Tensor,
    *,
    amax_floor: float = 1e-4,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights: one scale per 128 rows and 128 columns.

    Args:
        w: [n, k], any n and k (edge blocks may be short), otherwise as `x` of `per_token_cast_to_fp8`.
        amax_floor, out: as for `per_token_cast_to_fp8`.
        scale_out: [ceil(n / 128), ceil(k / 128)] float32 of any strides, to write to; allocated, contiguous, when None.

    Returns:
        The [n, k] float8_e4m3fn tensor and its FP32 scale [ceil(n / 128), ceil(k / 128)], computed as by
        `per_token_cast_to_fp8`. A block that holds NaN or infinity becomes NaN throughout; no other block changes.

    Raises:
        As `per_token_cast_to_fp8`.
    """
    if out is None or scale_out is None:
        _check_source("w", w, amax_floor)
        out = _empty_out(w) if out is None else out
        if scale_out is None:
            scale_out = _empty("scale_out", w, *_scale_shape(w, WEIGHT_BLOCK), torch.float32)
    _cast("w", w, WEIGHT_BLOCK, amax_floor, out, scale_out)
    return out, scale_out


def dequantize(x: torch.Tensor, scale: torch.Tensor, *, block: tuple[int, int] | None = None) -> torch.Tensor:
    """Multiply every FP8 element by its block's scale.

    Args:
        x: [rows, k] float8_e4m3fn, any strides.
        scale: FP32, any strides: [rows, ceil(k / 128)] for 1x128 blocks, [ceil(rows / 128), ceil(k / 128)] for
            128x128 blocks.
        block: (1, 128) or (128, 128) to insist on one kind of scale. Left out, the scale's shape decides; it fits both
            kinds only when `x` has one row or none, where both mean the same.

    Returns:
        A contiguous FP32 tensor [rows, k].

    Raises:
        TypeError: `x` is not float8_e4m3fn or `scale` not float32, or one of them is not dense, or a negated view.
        ValueError: `x` is not 2-D, `block` is unknown, the scale's shape or device does not fit, or a tensor has no
            memory.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != FP8_DTYPE:
        raise TypeError(f"x is {_kind(x)}; dequantize takes a float8_e4m3fn tensor")
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"scale is {_kind(scale)}; dequantize takes a float32 tensor, one value per block")
    tensors.require_dense(x=x, scale=scale)
    _require_matrix("x", x)
    if scale.device != x.device:
        raise ValueError(f"scale is on {scale.device} but x is on {x.device}; move it with .to(x.device)")
    block_rows = _find_block(x, scale, block)[0]
    blocks = _to_blocks(x.float(), block_rows)
    return _from_blocks(blocks * scale[:, None, :, None], x.shape)


def _check_source(name: str, x: torch.Tensor, amax_floor: float) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in SOURCE_DTYPES:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in SOURCE_DTYPES)
        raise TypeError(f"{name} is {_kind(x)}; the cast takes a tensor of {wanted}")
    tensors.require_plain(**{name: x})
    _require_matrix(name, x)
    check_amax_floor(amax_floor)


def check_amax_floor(amax_floor: float) -> None:
    if isinstance(amax_floor, bool) or not isinstance(amax_floor, Real):
        raise TypeError(f"amax_floor is {amax_floor!r}, a {type(amax_floor).__name__}; pass a number, such as 1e-4")
    if not SMALLEST_AMAX_FLOOR <= amax_floor < float("inf"):
        raise ValueError(
            f"amax_floor is {amax_floor}; it must be finite and at least {SMALLEST_AMAX_FLOOR:.2g}, "
            "or scales of all-zero blocks would be too small to divide by"
        )


def _cast(
    name: str, x: torch.Tensor, block: tuple[int, int], amax_floor: float, out: torch.Tensor, scale: torch.Tensor
) -> None:
    try:
        known = _launcher.launch_known(_launches, (block[0], amax_floor), x, out, scale)
    except TypeError:  # an amax_floor that cannot be looked up
        _check_source(name, x, amax_floor)
        raise
    if not known:
        _cast_unknown(name, x, block, amax_floor, out, scale)


def _cast_unknown(
    name: str, x: torch.Tensor, block: tuple[int, int], amax_floor: float, out: torch.Tensor, scale: torch.Tensor
) -> None:
    """Check a cast that C has not met, or cannot read, and do it. The signature holds all that the checks read."""
    _check_source(name, x, amax_floor)
    _check_target("out", out, FP8_DTYPE, x.shape, x.device)
    _check_target("scale_out", scale, torch.float32, _scale_shape(x, block), x.device)
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out must have a unit column stride; its strides are {out.stride()}. Pass a row-major out")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"rows of out overlap: strides {out.stride()} for {out.shape[1]} columns. Pass a dense out")
    if _needs_kernel(x):
        _cast_by_kernel(x, block[0], amax_floor, out, scale)
    else:
        _definition(x, block, amax_floor, out, scale)


def _needs_kernel(x: torch.Tensor) -> bool:
    return bool(x.numel()) and x.device.type == "cuda" and _is_hopper(x.get_device())


def _check_target(name: str, target: torch.Tensor, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    if not isinstance(target, torch.Tensor) or target.dtype != dtype:
        raise TypeError(f"{name} is {_kind(target)}; the cast writes a tensor of {str(dtype).removeprefix('torch.')}")
    tensors.require_plain(**{name: target})
    if target.shape != shape:
        raise ValueError(f"{name} has shape {list(target.shape)}; for this input it must be {list(shape)}")
    if target.device != device:
        raise ValueError(f"{name} is on {target.device} but the input is on {device}; allocate it there")
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        raise ValueError(f"elements of {name} share memory: its strides are {target.stride()}. Pass one not expanded")


@torch.no_grad()
def _definition(
    x: torch.Tensor, block: tuple[int, int], amax_floor: float, out: torch.Tensor, scale: torch.Tensor
) -> None:
    blocks = _to_blocks(x.float(), block[0])
    amax = blocks.abs().amax((1, 3)).clamp(min=amax_floor)
    amax = amax.masked_fill(amax.isinf(), float("nan"))
    # By a tensor, since on a GPU torch divides by a number by multiplying with its reciprocal, one rounding off.
    scale.copy_(amax / torch.full_like(amax, FP8_MAX))
    # Divided, not multiplied by a reciprocal: the largest element of a block lands on 448 within one FP32 rounding.
    quantized = (blocks / scale[:, None, :, None]).to(FP8_DTYPE)
    out.copy_(_from_blocks(quantized, x.shape))


def _cast_by_kernel(
    x: torch.Tensor, block_rows: int, amax_floor: float, out: torch.Tensor, scale: torch.Tensor
) -> None:
    if x.dtype == torch.float64:
        x = x.float()
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    options, signature = (block_rows, amax_floor), launches.signature(x, out, scale)
    launch = launches.find(_launches, options, signature)
    if launch is None:
        launch = cast_launch(x, block_rows, amax_floor, out, scale)
        launches.remember(_launches, options, signature, launch)
    launches.launch(launch, x, out, scale)


def cast_launch(
    x: torch.Tensor, block_rows: int, amax_floor: float, out: torch.Tensor, scale: torch.Tensor, **how
) -> _launcher.Launch:
    """The launch of a cast on a Hopper GPU, for which the tensors are examples; `how` are keywords of
    `cast.prepare_launch`. Nothing is checked but that a CUDA graph under capture need not load the kernel.
    """
    device = x.get_device()
    kernel, grid = cast.choose(block_rows, _KERNEL_SOURCES[x.dtype], *x.shape, _num_sms(device))
    _check_capture(kernel, device)
    layout = cast.CastLayout(
        *(*x.shape, x.stride(0), out.stride(0), *scale.stride()),
        aligned=_takes_vectors(x, out),
        amax_floor=float(amax_floor),
    )
    return cast.prepare_launch(kernel, grid, device, layout, **how)


def _takes_vectors(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a kernel may read `x` and write `out` vector by vector."""
    rows, columns = x.shape
    elements = _VECTOR_BYTES // x.element_size()
    strides = (x.stride(0), out.stride(0)) if rows > 1 else ()
    steps = all(number % elements == 0 for number in (columns, *strides))
    return steps and tensors.is_aligned(x) and tensors.is_aligned(out)


def _check_capture(kernel: cast.CastKernel, device: int) -> None:
    if not cast.is_loaded(kernel, device):
        launches.refuse_capture(kernel.name, device, "cast a tensor of this dtype once before the capture")


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scale_shape(x: torch.Tensor, block: tuple[int, int]) -> tuple[int, int]:
    return ceil_div(x.shape[0], block[0]), ceil_div(x.shape[1], block[1])


def _to_blocks(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """[rows, k] -> [row blocks, block_rows, k groups, 128], zero-padded: zeros change no block's largest magnitude."""
    rows, k = x.shape
    padded = F.pad(x, (0, -k % SCALE_BLOCK, 0, -rows % block_rows))
    return padded.reshape(ceil_div(rows, block_rows), block_rows, ceil_div(k, SCALE_BLOCK), SCALE_BLOCK)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    row_blocks, block_rows, groups, width = blocks.shape
    rows, k = shape
    return blocks.reshape(row_blocks * block_rows, groups * width)[:rows, :k].contiguous()


def _empty_out(x: torch.Tensor) -> torch.Tensor:
    return _empty("out", x, *x.shape, FP8_DTYPE)


def _empty(name: str, x: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return x.new_empty(rows, columns, dtype=dtype)  # torch.empty takes 1 us longer
    except AssertionError as error:  # of FakeTensorMode
        raise tensors.not_allocated(name, error) from None


def _empty_scale(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A scale per row and 128 columns, in the memory order that `layout` names; only its padding is initialised."""
    m, groups = _scale_shape(x, TOKEN_BLOCK)
    if layout == "row":
        return _empty("scale_out", x, m, groups, torch.float32)
    rows = round_up(m, 4) if layout == "m_aligned" else m
    allocate = torch.empty if rows == m else torch.zeros
    return allocate(groups, rows, dtype=torch.float32, device=x.device).t()[:m]


def _find_block(x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    if block not in (None, TOKEN_BLOCK, WEIGHT_BLOCK):
        raise ValueError(f"block is {block!r}; use {TOKEN_BLOCK}, {WEIGHT_BLOCK} or None")
    allowed = (TOKEN_BLOCK, WEIGHT_BLOCK) if block is None else (block,)
    shapes = {kind: tuple(map(ceil_div, x.shape, kind)) for kind in allowed}
    for kind, shape in shapes.items():
        if scale.shape == shape:
            return kind
    wanted = " or ".join(f"{list(shape)} (blocks of {kind[0]}x{kind[1]})" for kind, shape in shapes.items())
    raise ValueError(
        f"scale has shape {list(scale.shape)}; for x of shape {list(x.shape)} it must be {wanted}. "
        "Transpose a scale that is stored the other way round with .t(); strides are free"
    )


def _require_matrix(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be 2-D, so flatten leading dimensions first")


def _kind(x: object) -> str:
    return f"a tensor of {str(x.dtype).removeprefix('torch.')}" if isinstance(x, torch.Tensor) else f"a {type(x)}"
