"""K-grouped GEMMs: weight gradients for all experts in one launch.

Group bounds are read on the device, so nothing waits for the host and one CUDA graph serves every distribution.
`dense.fp8_wgrad` is the gradient for one weight. Invariant: invalid offsets never cause out-of-bounds access.
"""

from typing import NamedTuple

import torch

from deep_tile import checks, dense, finishes, grouped, launches, ops, params, plan, tensors
from deep_tile.config import SCALE_BLOCK, GemmConfig, ceil_div, check_alignment, round_up
from deep_tile.kinds import Kind
from deep_tile.operation import Given
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import fp8_grouped_wgrad_reference

_OUT_DTYPES = (torch.float32, torch.bfloat16)


class Options(NamedTuple):
    """A call's keywords, described at `fp8_grouped_wgrad`."""

    accumulate: bool = True
    alignment: int = SCALE_BLOCK
    expected_tokens: int | None = None
    config: GemmConfig | None = None
    num_sms: int | None = None
    pdl: bool | None = None


def fp8_grouped_wgrad(
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    x: torch.Tensor = tensors.MISSING,
    x_scale: torch.Tensor = tensors.MISSING,
    offs: torch.Tensor = tensors.MISSING,
    out: torch.Tensor = tensors.MISSING,
    *,
    accumulate: bool = True,
    alignment: int = SCALE_BLOCK,
    expected_tokens: int | None = None,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Experts' weight gradients, `out[g] += dy[g]^T @ x[g]` over each group's tokens, in one launch.

    `out[g, n, k] += sum_s dy[n, s] * dy_scale[n, s // 128] * x[k, s] * x_scale[k, s // 128]` for group g's tokens s,
    which end before token `offs[g]` and start where group g - 1 ends, rounded up to `alignment`, so that no two groups
    share a scale. Groups have any length. Tokens between a group's end and the next multiple of 128 must be zeros, as
    `transposed_cast_to_fp8` writes: the 128 tokens are multiplied as a whole. A group without tokens leaves its `out`
    alone, or writes zeros without `accumulate`.

    Offsets are read on the device. Invalid ones (negative, falling, beyond s) are clamped and never cause out-of-bounds
    access. Every warp reads them by itself: they must not be written while the kernel runs. Not differentiable. Each
    element of `out` is added to once, so results repeat bit for bit.

    Args:
        dy: [n, s] float8_e4m3fn, unit stride along tokens, row stride a multiple of 16 bytes, 16-byte aligned.
        dy_scale: [n, ceil(s / 128)] float32, bfloat16, float16 or float8_e8m0fnu, any strides within 4 GB.
        x: [k, s] float8_e4m3fn, laid out like `dy`.
        x_scale: [k, ceil(s / 128)], likewise.
        offs: [g] int32, contiguous, on the same device: the token behind each group's last.
        out: [g, n, k] float32 or bfloat16, unit stride along k, group stride a multiple of the row stride; multiples of
            16 bytes are stored faster. Must not overlap the inputs. bfloat16 results are rounded once, and again when
            accumulated.
        accumulate: add to `out` instead of overwriting it.
        alignment: the multiple of tokens at which groups start: a power of two from 128 to 1024.
        expected_tokens: mean tokens per non-empty group, for which the kernel is chosen. None: s / g.
        config: the kernel to use instead of the selector's choice; its `grouping` is "k_offs".
        num_sms, pdl: as for `fp8_gemm`.

    Returns `out`. Raises as `fp8_gemm`: nothing has been launched and `out` is untouched.
    """
    options = (accumulate, alignment, expected_tokens, config, num_sms, pdl)
    return FP8_GROUPED_WGRAD.run((dy, dy_scale, x, x_scale, offs, out), options)


class GroupedWgrad(dense.Product):
    Options = Options
    groupings, sizes = ("k_offs",), "m n k groups"

    def results(self, kind: Kind) -> tuple[torch.dtype, ...]:
        return _OUT_DTYPES

    def without_memory(self, asked: checks.Sizes) -> tuple[Given, Options]:
        asked = asked.over_tokens
        offs = torch.empty(asked.groups, dtype=torch.int32, device="meta")
        out_dtype = asked.out_dtype or self.out_dtype
        out = torch.empty(asked.groups, asked.m, asked.n, dtype=out_dtype, device="meta")
        return (*asked.operands(), offs, out), Options()

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        check_alignment(options.alignment, SCALE_BLOCK)

    def check(self, given: Given, options: Options) -> None:
        dy, _, x, _, offs, out = given
        self.check_dtypes(given)
        if offs.dtype != torch.int32:
            raise TypeError(f"offs must be torch.int32; got {offs.dtype}. To fix: convert with .int()")
        if out.dtype not in _OUT_DTYPES:
            wanted = " or ".join(map(str, _OUT_DTYPES))
            raise TypeError(f"out must be {wanted}; got {out.dtype}. To fix: allocate it as torch.float32")
        checks.check_device("dy", dy, self.name)
        for name, tensor in zip(self.names[1:], given[1:], strict=True):
            if tensor.device != dy.device:
                raise ValueError(f"{name} is on {tensor.device} but dy is on {dy.device}; move it with .to(dy.device)")
        if dy.dim() != 2 or x.dim() != 2 or not ops.holds(dy.shape[1] == x.shape[1]):
            raise ValueError(
                f"dy must be [n, s] and x [k, s]; got {list(dy.shape)} and {list(x.shape)}. Tokens come last"
            )
        checks.check_row_block_scales(self.names, given)
        if offs.dim() != 1 or not ops.holds(offs.shape[0] > 0):
            raise ValueError(f"offs must be [g], of one group at least; got {list(offs.shape)}")
        if out.dim() == 3 and not ops.holds(out.shape[0] == offs.shape[0]):
            remedy = grouped.offs_remedy(offs, out.shape[0], dy.shape[1])
            seen = f"got {list(offs.shape)}"
            raise ValueError(f"offs must be [g] = {[out.shape[0]]} for out of {list(out.shape)}; {seen}. {remedy}")
        wanted = (offs.shape[0], dy.shape[0], x.shape[0])
        if not checks.has_shape(out, wanted):
            raise ValueError(f"out must be [g, n, k] = {list(wanted)}; got {list(out.shape)}. Allocate it so")

    def check_memory(self, given: Given, options: Options) -> Options:
        dy, _, x, _, offs, out = given
        checks.check_sizes(dy, x)
        checks.check_operand_strides(dy=dy, x=x)
        self.check_scales(given)
        grouped.check_bounds_memory("offs", offs)
        grouped.check_out(out)
        groups, n, k = out.shape
        if groups * ceil_div(n, 64) * ceil_div(k, 16) > grouped.MAX_TILES:
            raise ValueError(f"out is {list(out.shape)}: too many tiles; split the product")
        return checks.with_defaults(options, dy.device)

    def needs_kernel(self, given: Given) -> bool:
        return self.is_on_gpu(given[-1]) and given[-1].numel() > 0 and given[0].shape[1] > 0

    def define(self, given: Given, options: Options) -> None:
        out = given[-1]
        if out.is_meta:
            return
        if given[0].shape[1] > 0:
            fp8_grouped_wgrad_reference(*given, options.alignment, options.accumulate)
        elif not options.accumulate:
            out.zero_()

    def prepare(self, given: Given, options: Options) -> launches.Prepared:
        device, problem = given[-1].get_device(), self.problem(given, options)
        return plan.prepare_launch(
            problem,
            checks.kernel_for(problem, options.config, device, self.name),
            self.layout(given, options.alignment),
            device,
            pdl=options.pdl,
            constant_weights=False,
            names=self.names,
            places=params.places(plan.GROUPED_TENSORS),
        )

    def problem(self, given: Given, options: Options) -> GemmProblem:
        (n, s), (k, _), out = given[0].shape, given[2].shape, given[-1]
        groups = len(out)
        expected = ceil_div(s, groups) if options.expected_tokens is None else options.expected_tokens
        return GemmProblem(
            *(n, k, s),
            num_sms=options.num_sms,
            tma_store=checks.tma_can_store(out),
            kind="fp8_1x128",
            output=finishes.OUTPUT_NAMES[out.dtype],
            groups=Groups("k_offs", groups, expected),
            accumulate=options.accumulate,
        )

    def layout(self, given: Given, alignment: int) -> plan.Layout:
        """The call's strides. For a single row torch may report any stride; TMA gets a legal one."""
        dy, dy_scale, x, x_scale, _, out = given
        tokens = round_up(dy.shape[1], tensors.ALIGNMENT_BYTES)
        out_stride, out_rows = grouped.row_strides(
            out, round_up(out.shape[2], tensors.ALIGNMENT_BYTES // out.element_size())
        )
        return plan.Layout(
            *(grouped.row_strides(matrix, tokens)[0] for matrix in (dy, x)),
            *(out_stride, dy_scale.stride(), x_scale.stride()),
            a_scale_aligned=tensors.is_aligned(dy_scale),
            b_scale_aligned=tensors.is_aligned(x_scale),
            groups=plan.GroupLayout(alignment=alignment, out_group_rows=out_rows),
        )


_E4M3 = {key: kind for key, kind in dense.kinds_of("fp8_1x128").items() if kind.name == "fp8_1x128"}
_CAST = "quantise with deep_tile.transposed_cast_to_fp8"

FP8_GROUPED_WGRAD = GroupedWgrad(
    "fp8_grouped_wgrad",
    "dy dy_scale x x_scale offs out!",
    *("accumulate alignment expected_tokens num_sms pdl", _E4M3),
    out_dtype=torch.float32,
    remedies=(_CAST, _CAST),
    takers={torch.float8_e5m2: "fp8_wgrad, weight by weight,"},
    defaults={"accumulate": True, "alignment": SCALE_BLOCK},
    allocates=False,
    overload="",
)
