"""`read_weight`: a layer's tensors, under the names that quantisers save them by, as arguments of `pack_weight`.

Written in torch; runs on the tensors' device. Invariant: no value changes; what names and shapes do not tell apart is
refused.
"""

from collections.abc import Mapping
from typing import TypedDict

import torch

from deep_tile import formats, tensors
from deep_tile.config import SCALE_BLOCK, ceil_div
from deep_tile.quantize import FP8_DTYPE

_FLOATS = ("weight_packed", "weight", "weight_scale", "scale", "weight_global_scale", "weight_scale_2")
_WORDS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_QWEIGHT = ("qweight", "qzeros", "scales", "g_idx")
_FACTORS_OF_INPUTS = "pre_quant_scale"
_NAMES = dict.fromkeys((*_FLOATS, *_WORDS, *_QWEIGHT, _FACTORS_OF_INPUTS))

_KNOWN = (
    "known are compressed-tensors' weight_packed and weight_scale, with weight_shape for INT4 and weight_global_scale "
    "for NVFP4; ModelOpt's weight, weight_scale and weight_scale_2; weight and scale of DeepSeek-V4's experts; and "
    "qweight, qzeros and scales of GPTQ and AWQ"
)

_MXFP4 = ((torch.uint8, torch.uint8), (torch.uint8, formats.E8M0), (torch.int8, formats.E8M0))
"""Dtypes of weight and scale."""

_PER_WORD = 8
"""Integers in an int32, the first in its lowest bits."""

_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has each of eight columns in a word."""

_ZERO = 8
"""What is saved for an integer of zero, where no zero points are."""

_SYMMETRIC = (0x77777777, 0x88888888 - 2**32)
"""Words of zero points of symmetric GPTQ: its first version saves them less one."""

_GROUPS = (SCALE_BLOCK, 64, 32)
"""Columns for which an integer format has a scale."""


class Codes(TypedDict):
    """A weight in a format of `to_blocks`: arguments of it, of `pack_weight`, and of `from_codes`."""

    weight: torch.Tensor
    scale: torch.Tensor
    format: str
    global_scale: torch.Tensor | None


def read_weight(state_dict: Mapping[str, torch.Tensor], prefix: str = "") -> Codes:
    """Read a layer's 4-bit weight as a checkpoint has it, for `pack_weight(**read_weight(...))`.

    The names of its tensors tell the format. Values are exact. Biases and scales of inputs are not read.

    =================================== ====================== =====================================================
    tensors                             saved by               format of the result
    =================================== ====================== =====================================================
    weight_packed (int32),              compressed-tensors,    int4_32, int4_64 or int4_128; the last also where more
    weight_scale, weight_shape          pack-quantized         columns than 128 share a scale
    the same and weight_zero_point      the same, asymmetric   fp8_1x128, or mxfp8 for groups of 32 and 64: integers
                                                               less their zero points, in FP8
    qweight, qzeros, scales             GPTQ, symmetric; AWQ   as in the first row; for AWQ as in the first two
    weight_packed (uint8),              compressed-tensors,    nvfp4; the global scale is the reciprocal of what is
    weight_scale, weight_global_scale   nvfp4-pack-quantized   saved
    weight (uint8), weight_scale,       ModelOpt               nvfp4
    weight_scale_2
    weight_packed, weight_scale         compressed-tensors,    mxfp4
    (uint8)                             mxfp4-pack-quantized
    weight (int8), scale (e8m0)         DeepSeek-V4, experts   mxfp4
    =================================== ====================== =====================================================

    Args:
        state_dict: tensors by name, of a layer or a whole checkpoint; with leading dimensions for experts.
        prefix: what comes before the names, such as "model.layers.0.mlp.down_proj.".

    Returns:
        A dictionary: weight, scale, format and global_scale, as for `to_blocks`.

    Raises:
        TypeError: a value is no tensor, or an argument of another type.
        ValueError: the tensors are in no such format, do not fit together, or are on meta; columns of a group are not
            beside each other (act-order); zero points of GPTQ are not those of symmetric weights; or inputs have a
            factor for each column (pre_quant_scale).
    """
    given = _given(state_dict, prefix)
    if _FACTORS_OF_INPUTS in given:
        raise ValueError(f"{_FACTORS_OF_INPUTS} multiplies columns of inputs, which no call does: export without it")
    weight = given.get("weight_packed", given.get("weight"))
    if given.keys() >= {"qweight", "qzeros", "scales"}:
        return _of_qweight(given)
    if weight is None or given.keys().isdisjoint({"weight_scale", "scale"}):
        dot = "" if prefix.endswith(".") or not prefix else ", which ends without a dot"
        found = ", ".join(given) or "none of the tensors that are known"
        raise ValueError(f"state_dict has {found} behind prefix {prefix!r}{dot}; {_KNOWN}")
    if weight.dtype == torch.int32 and "weight_scale" in given:
        return _of_words(weight, given)
    return _of_floats(weight, given.get("weight_scale", given.get("scale")), given)


def _given(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The known tensors by their own names, without gradients."""
    for name, value, kind in (("state_dict", state_dict, Mapping), ("prefix", prefix, str)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is of type {type(value).__name__}; pass tensors by name, and what is before names")
    given = {name: state_dict[prefix + name] for name in _NAMES if prefix + name in state_dict}
    tensors.require_values("read_weight", **given)
    if given:
        tensors.require_tensors(**given)
    for name, x in given.items():
        if x.is_meta:
            raise ValueError(f"{prefix}{name} is on meta, without memory: read a weight when it is loaded")
    return {name: x.detach() for name, x in given.items()}


def _of_floats(weight: torch.Tensor, scale: torch.Tensor, given: dict[str, torch.Tensor]) -> Codes:
    factor = given.get("weight_scale_2")
    if "weight_global_scale" in given:
        factor = given["weight_global_scale"].float().reciprocal()
    dtypes, name = (weight.dtype, scale.dtype), None
    if dtypes == (torch.uint8, FP8_DTYPE) and factor is not None:
        name = "nvfp4"
    elif dtypes in _MXFP4 and factor is None:
        name = "mxfp4"
    if name is None or "weight_zero_point" in given:
        raise ValueError(f"{formats.seen(weight, scale)}, of {', '.join(given)}; {_KNOWN}")
    return Codes(weight=weight, scale=scale, format=name, global_scale=factor)


def _of_words(weight: torch.Tensor, given: dict[str, torch.Tensor]) -> Codes:
    """compressed-tensors' integers: words along k, zero points in words along n."""
    if "weight_shape" not in given or given["weight_shape"].numel() < 2:
        raise ValueError(f"weight_packed is {weight.dtype} {list(weight.shape)}; pass its weight_shape, too, [n, k]")
    n, k = given["weight_shape"].flatten().tolist()[-2:]
    scale, leading = given["weight_scale"], weight.shape[:-2]
    groups = scale.shape[-1:]
    wanted = {"weight_packed": (*leading, n, ceil_div(k, _PER_WORD)), "weight_scale": (*leading, n, *groups)}
    wanted["weight_zero_point"] = (*leading, ceil_div(n, _PER_WORD), *groups)
    _check_shapes(given, wanted, f"weight_shape says [{n}, {k}]")
    zeros = given.get("weight_zero_point")
    if zeros is not None:
        zeros = _integers(zeros.mT)[..., :n].mT
    return _codes(_integers(weight)[..., :k], scale, zeros, given.get("weight_g_idx"))


def _of_qweight(given: dict[str, torch.Tensor]) -> Codes:
    """GPTQ's words along k, or AWQ's along n; scales and zero points are [..., groups, n]."""
    qweight, qzeros, scales = given["qweight"], given["qzeros"], given["scales"]
    leading, (*groups, n) = qweight.shape[:-2], scales.shape[-2:] or (0,)
    is_awq = qweight.dim() > 1 and qweight.shape[-1] * _PER_WORD == n
    wanted = {"qweight": (*leading, *qweight.shape[-2:-1], n // _PER_WORD if is_awq else n)}
    wanted |= {"scales": (*leading, *groups, n), "qzeros": (*leading, *groups, n // _PER_WORD)}
    _check_shapes(given, wanted, "qweight is [k / 8, n] in GPTQ, [k, n / 8] in AWQ")
    if is_awq:
        return _codes(_integers(qweight, _AWQ).mT, scales.mT, _integers(qzeros, _AWQ).mT, given.get("g_idx"))
    if not bool(sum(qzeros == word for word in _SYMMETRIC).all()):
        raise ValueError(
            "qzeros of GPTQ hold other zero points than 7 or 8, those of symmetric weights; its versions mean other "
            "numbers by them: quantise with sym=True, or save as AWQ or by compressed-tensors"
        )
    return _codes(_integers(qweight.mT), scales.mT, None, given.get("g_idx"))


def _check_shapes(given: dict[str, torch.Tensor], wanted: dict[str, tuple[int, ...]], why: str) -> None:
    for name, shape in wanted.items():
        if name not in given:
            continue
        of_words, found = name not in ("weight_scale", "scales"), given[name]
        if len(shape) < 2 or found.shape != shape or (of_words and found.dtype != torch.int32):
            dtype = "torch.int32 " if of_words else ""
            raise ValueError(
                f"{name} is {found.dtype} {list(found.shape)}; of integers of 4 bits with a scale for each group it is "
                f"{dtype}{list(shape)}, as {why}"
            )


def _integers(words: torch.Tensor, places: tuple[int, ...] = tuple(range(_PER_WORD))) -> torch.Tensor:
    """[..., 8 * words] uint8, from 0 to 15."""
    octets = words.contiguous().view(torch.uint8)
    in_words = torch.stack([octets & 15, octets >> 4], -1).flatten(-2).unflatten(-1, (-1, _PER_WORD))
    return in_words[..., places].flatten(-2)


def _codes(q: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None) -> Codes:
    """Of integers [..., n, k] as they are saved, with scales and zero points [..., n, groups]."""
    k = q.shape[-1]
    size, repeats = _group_of(k, scale.shape[-1], g_idx)
    if zeros is None or bool((zeros == _ZERO).all()):
        q = q ^ _ZERO  # two's complement
        q, name = q[..., ::2] | q[..., 1::2] << 4, f"int4_{size}"
    else:
        q = (q.bfloat16() - zeros.repeat_interleave(size * repeats, -1)[..., :k]).to(FP8_DTYPE)
        if size == 64:
            size, repeats = 32, 2
        name = "mxfp8" if size == 32 else "fp8_1x128"
    scale = scale.repeat_interleave(repeats, -1)[..., : ceil_div(k, size)].contiguous()
    return Codes(weight=q.contiguous(), scale=scale, format=name, global_scale=None)


def _group_of(k: int, groups: int, g_idx: torch.Tensor | None) -> tuple[int, int]:
    """Columns for which the result has a scale, and for how many of these one is saved."""
    size = next((size for size in _GROUPS if ceil_div(k, size) == groups), None)
    repeats = 1 if size else ceil_div(k, SCALE_BLOCK * max(groups, 1))
    size = size or SCALE_BLOCK
    if k % 2 or ceil_div(k, size * repeats) != groups or (groups > 1 and repeats > 1 and k % (size * repeats)):
        raise ValueError(
            f"rows of {k} columns have {groups} scales; known are one for each 32, 64 or a multiple of 128 columns, or "
            "one for a row, of an even number"
        )
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(k, device=g_idx.device) // (size * repeats)):
        raise ValueError(
            "g_idx says that columns of a group are not beside each other (act-order), which no call follows: quantise "
            "with desc_act=False, actorder='static' or 'weight'"
        )
    return size, repeats
