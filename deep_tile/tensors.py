"""Which tensors kernels accept: plain ones, whose memory holds the values that torch reads.

torch marks others (lazily negated views, wrappers, sparse, ...) in dispatch keys, a bit set that DLPack does not
export. C reads that word at the offset from `find_keys` and leaves other tensors to Python. Invariant: a tensor that C
reads passes `require_plain`, which names the fault of any other.
"""

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from deep_tile import _launcher

ALIGNMENT_BYTES = 16
"""Address alignment for TMA and vector accesses."""

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Scale dtypes that calls take. Kernels read float32, which holds all others exactly."""

SCALE_NAMES = ", ".join(map(str, SCALE_DTYPES[:-1])) + f" or {SCALE_DTYPES[-1]}"
"""Scale dtypes as text, for errors."""

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Operand dtypes that have scales."""

_OTHER_BIAS = {torch.float8_e4m3fnuz: torch.float8_e4m3fn, torch.float8_e5m2fnuz: torch.float8_e5m2}
"""AMD's formats and the nearest supported one, in which the same bits mean twice as much."""

MISSING: Any = None
"""Default for a required argument: without it, e.g. in a call with pairs, the error names what is missing."""

_KEYS = torch._C.DispatchKey.__members__


def _bits(*names: str) -> int:
    """Bits for dispatch keys by name, as far as this torch knows them."""
    bits = 0
    for name in names:
        if name in _KEYS:
            bits |= torch._C.DispatchKeySet(_KEYS[name]).raw_repr()
    return bits


PLAIN_KEYS = _bits(
    "ADInplaceOrView",
    "Named",
    *(name for name in _KEYS if _bits(name) & _bits("Dense")),  # the device is checked elsewhere
    *(name for name in _KEYS if name.startswith(("Autograd", "Autocast"))),
)
"""Keys that plain tensors may have; any other key means not plain."""

_IMPLEMENTATION_BYTES = 208
"""Bytes of torch's tensor object in which keys are searched."""

_STORAGE_BYTES = 64
"""Bytes of torch's storage object, likewise."""

_TRANSFORMED = _bits("FuncTorchBatched", "FuncTorchGradWrapper", "Functionalize")
_IN_PYTHON = _bits("Python", "PythonTLSSnapshot")

_KINDS = (
    (
        _TRANSFORMED,
        "a tensor inside a transform of torch.func (vmap, grad, functionalize)",
        "Call outside of the transform",
    ),
    (
        _IN_PYTHON,
        "a {type}, whose operations run in Python",
        "Pass the plain tensor that it stands for: of a DTensor {name}.to_local(), of an AsyncCollectiveTensor "
        "{name}.wait(); a FakeTensor stands for none, and is taken within its mode. After import "
        "deep_tile.distributed, fp8_linear and "
        "torch.ops.deep_tile take operands that are DTensors, all of them",
    ),
    (_bits("Negative"), "a view that torch negates as it reads it", "Pass {name}.resolve_neg()"),
    (_bits("Conjugate"), "a view that torch conjugates as it reads it", "Pass {name}.resolve_conj()"),
    (_bits("ZeroTensor"), "a tensor of zeros that has no memory", "Pass {name}.clone()"),
)
"""Keys, the tensor type they mark, and the remedy."""


def as_float32(scale: torch.Tensor) -> torch.Tensor:
    """The scale in float32; unsupported dtypes are returned unchanged."""
    return scale.float() if scale.dtype in SCALE_DTYPES else scale


def with_float32_scales(operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """GEMM operands, (a, b) or (a, a_scale, b, b_scale), with scales in float32."""
    if len(operands) == 2:
        return operands
    a, a_scale, b, b_scale = operands
    return a, as_float32(a_scale), b, as_float32(b_scale)


def scale_remedy(name: str, scale: torch.Tensor) -> str:
    """The remedy for a scale with an unsupported dtype. Integers are exponents, if they are scales at all."""
    if scale.dtype in (torch.uint8, torch.int8):
        return f"where its bytes are exponents (UE8M0), pass {name}.view(torch.float8_e8m0fnu)"
    if scale.dtype in (torch.int32, torch.uint32):
        return (
            "where a word packs the exponents (UE8M0) of four blocks of k, as Blackwell takes them, pass "
            f"{name}.clone(memory_format=torch.contiguous_format).view(torch.float8_e8m0fnu)[..., :ceil(k / 128)], and "
            "of a weight, whose rows all have one there, every 128th row of that"
        )
    if scale.is_floating_point():
        return f"pass {name}.float()"
    return "pass the scale that the operand was quantised with"


def require_scale_dtype(name: str, scale: torch.Tensor) -> None:
    """Raise TypeError unless calls take a scale of this dtype."""
    if scale.dtype not in SCALE_DTYPES:
        remedy = scale_remedy(name, scale)
        raise TypeError(f"{name} is {scale.dtype}; it must be {SCALE_NAMES}. To fix: {remedy}")


def operand_remedy(
    name: str, x: torch.Tensor, known: Collection[torch.dtype], takers: Mapping[torch.dtype, str], if_wide: str
) -> str:
    """The remedy for an operand whose dtype is not among those `known` to a call.

    Args:
        takers: deep_tile functions for other dtypes in `QUANTIZED_DTYPES`.
        if_wide: for an operand that is not quantised.
    """
    nearest = _OTHER_BIAS.get(x.dtype)
    if nearest in known or nearest in takers:
        for_whom = "" if nearest in known else f", for deep_tile.{takers[nearest]}"
        return f"its bits mean other numbers; pass {name}.float().to({nearest}), which rounds the smallest{for_whom}"
    fp8, remedies = torch.float8_e4m3fn, []
    if x.dtype in takers:
        remedies.append(f"deep_tile.{takers[x.dtype]} takes {x.dtype}, with scales")
    if x.dtype in (torch.uint8, torch.int8) and (fp8 in known or fp8 in takers):
        whom = "" if fp8 in known else f" to deep_tile.{takers[fp8]}"
        remedies.append(f"where its bytes are FP8, pass {name}.view({fp8}){whom}")
    if x.dtype == torch.uint8 and torch.int8 in known:
        remedies.append(f"where they are INT8, pass {name}.view(torch.int8)")
    return "; ".join(remedies) or if_wide


def check_order(names: Sequence[str], operands: Sequence[torch.Tensor]) -> None:
    """Raise where two operands came first and then their scales: a, b, a_scale, b_scale."""
    first, second, third, _ = operands
    is_operand = second.dtype in QUANTIZED_DTYPES and second.shape[-1:] == first.shape[-1:]
    if is_operand and third.dtype in SCALE_DTYPES:
        raise TypeError(
            f"{names[1]} is {second.dtype} and {names[2]} is {third.dtype}; a scale comes behind its operand: pass "
            f"{', '.join(names)}, in this order"
        )


def no_tensor(name: str, value: object, remedy: str, may_lack: bool = False) -> TypeError:
    """The error for an argument that is not a tensor, with special remedies for a pair, as DeepGEMM's functions take,
    and a list of similar tensors."""
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor):
        is_pair = len(value) == 2 and getattr(value[1], "dtype", None) != value[0].dtype
        remedy = f"pass one tensor, such as torch.stack({name})"
        if is_pair:
            remedy = f"pass its parts one by one, *{name}; functions of deep_tile.compat.deep_gemm take pairs"
    wanted = "a torch.Tensor or None" if may_lack else "a torch.Tensor"
    return TypeError(f"{name} must be {wanted}; got {type(value).__name__}. To fix: {remedy}")


def require_tensors(is_traced: bool = False, **given: object) -> None:
    """Raise unless arguments, by name, are tensors, and `require_plain` takes them; what is traced has no memory.

    Raises:
        TypeError: an argument is no tensor.
        TypeError, ValueError, RuntimeError: as `require_plain`.
    """
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise no_tensor(name, x, "pass a tensor on the GPU")
    if not is_traced:
        require_plain(**given)


def require_dtypes(
    dtypes: Mapping[str, Collection[torch.dtype]], remedies: Mapping[str, str] | None = None, **given: object
) -> None:
    """Raise TypeError unless arguments, by name, are tensors of one of their `dtypes`; `remedies` end its text."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in dtypes[name]:
            seen = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes[name])
            raise TypeError(f"{name} is {seen}; it must be a tensor of {wanted}{(remedies or {}).get(name, '')}")


def require_module(model: object) -> None:
    """Raise TypeError unless the argument `model` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {model!r}, a {type(model).__name__}; pass a torch.nn.Module, which has the layers")


def require_plain(**tensors: torch.Tensor) -> None:
    """Raise unless a kernel can be given these tensors, by name. Takes 0.1 us for each on a GPU.

    Raises:
        TypeError: a tensor is more than memory.
        ValueError: a tensor has no memory.
        RuntimeError: a tensor is on a GPU, which this forked process cannot use.
    """
    _require_gpu(tensors)
    if next(iter(tensors.values())).is_cuda and _launcher.reads(*tensors.values()):
        return
    for name, x in tensors.items():
        if _odd_keys(x):
            raise _not_plain(name, x)
        _require_memory(name, x)


def require_dense(**tensors: torch.Tensor) -> None:
    """`require_plain` for tensors that only torch operations read, which handle transforms and wrappers."""
    _require_gpu(tensors)
    for name, x in tensors.items():
        odd = _odd_keys(x)
        if odd & ~(_TRANSFORMED | _IN_PYTHON):
            raise _not_plain(name, x)
        if not odd:
            _require_memory(name, x)


def require_values(call: str, **given: object) -> None:
    """Raise RuntimeError where a call's arguments, by name, have no values to be read. Without fullgraph torch.compile
    then runs the call outside of its graphs."""
    seen = [f"{name}, a FakeTensor," for name, x in given.items() if type(x).__name__ == "FakeTensor"]
    for source in ["a tensor inside torch.compile"] if is_dynamo_compiling() else seen:
        raise RuntimeError(
            f"{call} reads the values of its tensors, and {source} has none: call it when the model is loaded, outside "
            "of torch.compile and FakeTensorMode"
        )


def require_dense_in_eager(**given: torch.Tensor) -> None:
    """`require_dense`, except where torch.compile traces: it knows no memory."""
    if not torch.compiler.is_compiling():
        require_dense(**given)


def require_apart(name: str, target: torch.Tensor) -> None:
    """Raise where elements share memory: where a step is no longer than what the shorter ones reach."""
    reach = 0
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if size > 1 and stride <= reach and target.numel():
            seen = f"its shape is {list(target.shape)}, its strides are {target.stride()}"
            raise ValueError(f"elements of {name} share memory: {seen}. Pass a contiguous one, not expanded")
        reach += (size - 1) * stride


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common. One that lies in the gaps between the other's rows has none, if the
    steps from row to row of both leave it there; without such steps, what they reach is taken for theirs."""
    (begin, end), (other_begin, other_end) = _extent(x), _extent(y)
    if begin >= other_end or other_begin >= end:
        return False
    (steps, width), (other_steps, other_width) = _rows(x), _rows(y)
    step = math.gcd(*steps, *other_steps)
    gap = (other_begin - begin) % step if step else 0
    return gap < width or gap + other_width > step


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last; (0, 0) without memory."""
    if x.is_meta or not x.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _rows(x: torch.Tensor) -> tuple[list[int], int]:
    """The steps from one dense part to the others, and the part's width, in bytes."""
    steps, width = [], x.element_size()
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        step = stride * x.element_size()
        if step <= width:
            width += (size - 1) * step
        elif size > 1:
            steps.append(step)
    return steps, width


def is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT_BYTES == 0


def in_vectors(x: torch.Tensor) -> torch.Tensor:
    """`x` (a matrix or a row), or a copy if kernels cannot read its rows in vectors."""
    elements = ALIGNMENT_BYTES // x.element_size()
    rows_fit = x.dim() == 1 or len(x) == 1 or x.stride(0) % elements == 0
    fits = x.stride(-1) == 1 and rows_fit and is_aligned(x)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


_empty_on_current_gpu = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
"""The allocator used by torch-compiled code; private, so perhaps None."""


def new_empty(x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on x's device, in 1.0 us; `x.new_empty` takes 1.9 us (H200, 2026-11-23). Dispatch modes
    do not see it: under them functions call ops instead."""
    device = x.get_device()
    if device < 0 or _empty_on_current_gpu is None:
        return x.new_empty_strided(shape, strides, dtype=dtype)
    if device != torch._C._cuda_getDevice():
        return x.new_empty_strided(shape, strides, dtype=dtype)
    return _empty_on_current_gpu(shape, strides, dtype)


@lru_cache(maxsize=4096)
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> torch.Tensor:
    """An uninitialised tensor with rows at multiples of 16 bytes, for TMA; dense if possible."""
    elements = ALIGNMENT_BYTES // dtype.itemsize
    padded = -(-shape[-1] // elements) * elements
    return torch.empty(*shape[:-1], padded, dtype=dtype, device=device).narrow(-1, 0, shape[-1])


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., n, k], or a copy, with dense rows at multiples of 16 bytes."""
    dense = x.shape[-1] < 2 or x.stride(-1) == 1
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    in_step = all(step >= x.shape[-1] and step * x.element_size() % ALIGNMENT_BYTES == 0 for step in steps)
    if dense and in_step and (x.is_meta or is_aligned(x)):
        return x
    return empty_rows(tuple(x.shape), x.dtype, x.device).copy_(x)


def find_keys() -> tuple[int, int] | None:
    """Where C finds a tensor's dispatch keys, as `_launcher.read_tensors_of` wants it: two offsets in bytes.

    The offset is private to torch, so it is found by example: None if no offset holds the keys for a plain and a
    negated tensor. C then reads no tensors, and every call goes through Python.
    """
    plain = torch.empty(1, device="cpu", dtype=torch.float32)
    examples = (plain, torch._neg_view(plain))
    objects, implementations = [id(x) for x in examples], [x._cdata for x in examples]
    object_offset = _find(implementations, objects, torch.Tensor.__basicsize__)
    keys_offset = _find([_keys(x) for x in examples], implementations, _IMPLEMENTATION_BYTES)
    return None if object_offset is None or keys_offset is None else (object_offset, keys_offset)


def find_storage() -> tuple[int, int, int] | None:
    """Where C finds how much memory a tensor has, as `_launcher.read_tensors_of` wants it: three offsets in bytes.

    Found by example, as in `find_keys`; None if no offsets fit. C then does not notice a shrunken storage.
    """
    examples = [torch.empty(size, device="cpu", dtype=torch.uint8) for size in (1031, 2063)]
    storages = [x.untyped_storage() for x in examples]
    addresses = [storage._cdata for storage in storages]
    found = (
        _find(addresses, [x._cdata for x in examples], _IMPLEMENTATION_BYTES),
        _find([storage.data_ptr() for storage in storages], addresses, _STORAGE_BYTES),
        _find([storage.nbytes() for storage in storages], addresses, _STORAGE_BYTES),
    )
    return None if None in found else found


def _find(words: list[int], addresses: list[int], size_bytes: int) -> int | None:
    """The offset at which all these objects hold their 64-bit word."""

    def holds(address: int, word: int) -> bool:
        return ctypes.c_uint64.from_address(address).value == word

    for offset in range(0, size_bytes, 8):
        if all(holds(address + offset, word) for address, word in zip(addresses, words, strict=True)):
            return offset
    return None


def _keys(x: torch.Tensor) -> int:
    return torch._C._dispatch_keys(x).raw_repr()


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values, by its dispatch keys."""
    return not _odd_keys(x)


def _odd_keys(x: torch.Tensor) -> int:
    return _keys(x) & ~PLAIN_KEYS


def _not_plain(name: str, x: torch.Tensor) -> TypeError:
    seen, remedy = _kind(x)
    text = f"{name} is {seen}; wanted is a plain tensor, whose memory holds its values. {remedy}"
    return TypeError(text.format(name=name, type=type(x).__name__))


def _kind(x: torch.Tensor) -> tuple[str, str]:
    if x.is_nested:
        return "a nested tensor", "Pass its parts, {name}.unbind(), one by one"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}", "Pass {name}.to_dense()"
    if x.is_quantized:
        return "a tensor quantised by torch", "Pass {name}.dequantize(), or its {name}.int_repr()"
    for keys, seen, remedy in _KINDS:
        if _keys(x) & keys:
            return seen, remedy
    return f"a tensor of another kind, {torch._C._dispatch_keys(x)}", "Pass {name}.clone()"


def _require_gpu(tensors: dict[str, torch.Tensor]) -> None:
    if not torch.cuda._is_in_bad_fork():
        return
    for name, x in tensors.items():
        if x.is_cuda:
            raise RuntimeError(
                f"{name} is on {x.device}, and CUDA cannot be used in a process forked after CUDA had started: "
                "start workers with 'spawn'"
            )


def _require_memory(name: str, x: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(x):
        raise TypeError(f"{name} is an uninitialised parameter, without shape or memory. Materialise it first")
    if x.is_meta or not x.numel():
        return
    storage = x.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    end_bytes = (x.storage_offset() + last + 1) * x.element_size()
    if storage.data_ptr() == 0 or storage.nbytes() < end_bytes:
        raise ValueError(
            f"{name} has no memory: it ends {end_bytes} bytes into its storage, which holds {storage.nbytes()}. "
            "Restore what resized or freed the storage, or pass another tensor"
        )
