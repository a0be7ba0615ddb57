"""The contestants: deep_tile and other GEMMs for Hopper, each as a call without arguments.

Used by the benchmark scripts. Invariant: every contestant's output is [m, n] BF16 and is checked against the product of
exactly the values it was given. Labels are fair: a contestant without block scales does less work, and says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

import deep_tile
from benchmarks.shapes import Shape
from deep_tile.config import GemmConfig
from deep_tile.quantize import DEFAULT_SCALE_LAYOUT, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_tile.reference import fp8_gemm_reference

Call = Callable[[], torch.Tensor]


class Inputs:
    """Random operands of one shape, in BF16 and quantised, and the products to expect of them (made when asked for)."""

    def __init__(self, shape: Shape, device: str = "cuda", scale_layout: str = DEFAULT_SCALE_LAYOUT):
        self.shape = shape
        generator = torch.Generator(device).manual_seed(hash(shape) % (1 << 31))
        self.a_bf16, self.b_bf16 = (
            torch.randn(rows, shape.k, generator=generator, device=device, dtype=torch.bfloat16)
            for rows in (shape.m, shape.n)
        )
        self.a, self.a_scale = per_token_cast_to_fp8(self.a_bf16, scale_layout=scale_layout)
        self.b, self.b_scale = per_block_cast_to_fp8(self.b_bf16)

    def new_out(self) -> torch.Tensor:
        return self.a_bf16.new_empty(self.shape.m, self.shape.n)

    def new_ones(self, *sizes: int) -> torch.Tensor:
        return self.a_scale.new_ones(*sizes)

    @cached_property
    def block_product(self) -> torch.Tensor:
        """The product of the operands with their block scales."""
        return fp8_gemm_reference(self.a, self.a_scale, self.b, self.b_scale, torch.float32)

    @cached_property
    def unscaled_product(self) -> torch.Tensor:
        """The product of the FP8 values without scales."""
        a_ones, b_ones = (torch.ones_like(scale) for scale in (self.a_scale, self.b_scale))
        return fp8_gemm_reference(self.a, a_ones, self.b, b_ones, torch.float32)

    @cached_property
    def bf16_product(self) -> torch.Tensor:
        return (self.a_bf16.double() @ self.b_bf16.double().t()).float()


@dataclass(frozen=True)
class Peer:
    """One contestant.

    Attributes:
        name: key in the results.
        label: column title, saying what kind of work it does.
        prepare: from inputs to the call that is timed; raises where the contestant does not support the shape.
        expected: the attribute of `Inputs` that its output is held against.
    """

    name: str
    label: str
    prepare: Callable[[Inputs], Call]
    expected: str = "block_product"


def deep_tile_peer(config: GemmConfig | None = None) -> Peer:
    """deep_tile with the config its selector chooses, or with a given one."""

    def prepare(inputs: Inputs) -> Call:
        out = inputs.new_out()
        return lambda: deep_tile.fp8_gemm(inputs.a, inputs.a_scale, inputs.b, inputs.b_scale, out, config=config)

    return Peer(config.name, config.name, prepare) if config else Peer("deep_tile", "deep_tile", prepare)


def _cublaslt_tensor(fast: bool) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        one = inputs.new_ones(())
        b_columns = inputs.b.t()
        return lambda: torch._scaled_mm(
            inputs.a, b_columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return prepare


def _cublaslt_row(inputs: Inputs) -> Call:
    a_scale, b_scale = inputs.new_ones(inputs.shape.m, 1), inputs.new_ones(1, inputs.shape.n)
    b_columns = inputs.b.t()
    return lambda: torch._scaled_mm(
        inputs.a, b_columns, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _cublaslt_block(inputs: Inputs) -> Call:
    if inputs.shape.m == 1:
        raise ValueError("cuBLASLt's block scaling has no kernel for m = 1")
    token, weight = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    # cuBLASLt wants the 1x128 scales M-major, and the 128x128 ones K-major with K blocks padded to a multiple of 4.
    a_scale = inputs.a_scale.t().contiguous().t()
    b_scale = F.pad(inputs.b_scale, (0, -inputs.b_scale.shape[1] % 4)).t()
    b_columns = inputs.b.t()
    return lambda: F.scaled_mm(inputs.a, b_columns, a_scale, token, b_scale, weight, output_dtype=torch.bfloat16)


def _torch_bf16(inputs: Inputs) -> Call:
    b_columns = inputs.b_bf16.t()
    return lambda: torch.mm(inputs.a_bf16, b_columns)


def _deep_gemm(inputs: Inputs) -> Call:
    import deep_gemm  # Optional, and initialises CUDA when it is imported.

    out = inputs.new_out()
    a_scale = per_token_cast_to_fp8(inputs.a_bf16, scale_layout="m_aligned")[1]  # It would transpose any other layout.

    def call() -> torch.Tensor:
        deep_gemm.fp8_gemm_nt((inputs.a, a_scale), (inputs.b, inputs.b_scale), out)
        return out

    return call


OURS = deep_tile_peer()
TENSOR_FAST = Peer("cublaslt_tensor_fast", "cuBLASLt tensor-wise, fast", _cublaslt_tensor(True), "unscaled_product")

PEERS = {
    peer.name: peer
    for peer in (
        OURS,
        Peer("deep_gemm", "DeepGEMM", _deep_gemm),
        Peer("cublaslt_block", "cuBLASLt block-wise", _cublaslt_block),
        TENSOR_FAST,
        Peer("cublaslt_tensor_slow", "cuBLASLt tensor-wise, slow", _cublaslt_tensor(False), "unscaled_product"),
        Peer("cublaslt_row_fast", "cuBLASLt row-wise, fast", _cublaslt_row, "unscaled_product"),
        Peer("torch_bf16", "torch BF16", _torch_bf16, "bf16_product"),
    )
}
"""Contestants by name. Block-wise ones do deep_tile's work. Tensor-wise and row-wise ones apply no block scales, and
`fast` ones keep only about 14 bits of each partial sum."""
