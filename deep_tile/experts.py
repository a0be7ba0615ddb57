"""What stands between the two products of an expert layer.

Called by users. The activation and its cast to FP8 are one kernel, of the casts' own code (quantize.py), so each
element is read once and nothing wide is written between two products. Which rows live is read on the device: no call
waits for the host, and all can be captured in CUDA graphs.
"""

import torch
from torch.compiler import is_compiling

from deep_tile import quantize, sources


def silu_mul_cast_to_fp8(
    gate_up: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale_layout: str = "row",
    amax_floor: float = 1e-4,
    round_scale: str = "none",
    exact: str = "divide",
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated activation of an expert layer, quantised: the input of its second product.

    h = gate * sigmoid(alpha * gate) * (up + beta), in FP32, then the cast of `per_token_cast_to_fp8`; h is not rounded
    to a narrower type in between. Each operation is rounded to FP32, from left to right. The sigmoid is taken by a
    polynomial of which a GPU and a CPU make the same bits, within 1e-6 of its value, relatively, plus 1e-7 for every
    unit of alpha * gate; below 2**-126 it is 0.

    Runs on `gate_up`'s device and torch's current stream: on a Hopper GPU by one kernel, elsewhere by torch, with the
    same result bit for bit, but for the sign of NaN. It has no gradient.

    Args:
        gate_up: [..., 2k] bfloat16 or float16, any strides: k gates, then k values of up, in each row. On the GPU
            fastest where k is a multiple of 8, columns are adjacent and rows begin at multiples of 16 bytes; other
            column strides are copied first.
        offs, counts: as for `per_token_cast_to_fp8`: of gate_up [s, 2k] the END row of each group, or of gate_up
            [g, m, 2k] how many rows of each group live. Dead rows are neither read nor written.
        limit: gate is bounded by it from above, up to both sides, before all else; a positive number. gpt-oss and
            DeepSeek-V4 do so.
        alpha, beta: finite numbers, rounded to FP32; 1.702 and 1 in gpt-oss.
        scale_layout, amax_floor, round_scale, exact: as for `per_token_cast_to_fp8`.
        out: [..., k] float8_e4m3fn, otherwise as there.
        scale_out: [..., ceil(k / 128)] float32, otherwise as there.

    Returns:
        `out` and `scale_out`: [..., k] float8_e4m3fn and its scale. Of dead rows they have whatever was there before;
        arbitrary bytes where they were allocated.

    Raises:
        TypeError: `gate_up` is neither bfloat16 nor float16, or `limit`, `alpha` or `beta` is no number; or as
            `per_token_cast_to_fp8`.
        ValueError: rows of `gate_up` have no two halves, or one of the numbers is out of range; or as there.
        RuntimeError: as there.
    """
    lists = quantize.given_lists(offs=offs, counts=counts)
    if not is_compiling():
        options = (1, amax_floor, round_scale, exact, (*lists,), sources.gating(limit, alpha, beta))
        return quantize.cast_tokens(gate_up, scale_layout, options, out, scale_out, lists)
    options = {"amax_floor": amax_floor, "round_scale": round_scale, "exact": exact, **lists}
    options |= {"limit": limit, "alpha": alpha, "beta": beta}
    op = torch.ops.deep_tile.silu_mul_cast_to_fp8
    return quantize.call_op(op, gate_up, scale_layout, out, scale_out, options, True, lists)


# The ops, which tracers see.


def _options(offs, counts, limit, alpha, beta, **options) -> tuple[quantize.Options, sources.Lists]:
    """Of a cast, from an op's keywords."""
    lists = quantize.given_lists(offs=offs, counts=counts)
    return quantize.Options(1, **options, lists=(*lists,), gating=sources.gating(limit, alpha, beta)), lists


def _run_op(gate_up, *, scale_layout="row", offs=None, counts=None, limit=None, alpha=1.0, beta=0.0, **options):
    options, lists = _options(offs, counts, limit, alpha, beta, **options)
    return quantize.cast_tokens(gate_up, scale_layout, options, None, None, lists)


def _run_out_op(gate_up, out, scale_out, *, offs=None, counts=None, limit=None, alpha=1.0, beta=0.0, **options):
    options, lists = _options(offs, counts, limit, alpha, beta, **options)
    quantize.cast_tokens(gate_up, "row", options, out, scale_out, lists)


def _fake_op(gate_up, *, scale_layout="row", offs=None, counts=None, limit=None, alpha=1.0, beta=0.0, **options):
    options, lists = _options(offs, counts, limit, alpha, beta, **options)
    return quantize.fake_cast_tokens(gate_up, scale_layout, options, lists)


def _fake_out_op(gate_up, out, scale_out, *, offs=None, counts=None, limit=None, alpha=1.0, beta=0.0, **options):
    options, lists = _options(offs, counts, limit, alpha, beta, **options)
    quantize.fake_cast_into(gate_up, options, out, scale_out, lists)


quantize.register_cast(
    "silu_mul_cast_to_fp8",
    "gate_up",
    "Tensor? offs=None, Tensor? counts=None, float? limit=None, float alpha=1.0, float beta=0.0, ",
    (_run_op, _fake_op),
    (_run_out_op, _fake_out_op),
)
