"""Gradients of grouped weights: values against float64, dead tokens, and refusals; on the CPU and a GPU."""

from typing import NamedTuple

import pytest
import torch
from helpers import (
    ACCUMULATION,
    Exact,
    GuardedOut,
    Operands,
    assert_accurate,
    blank_tokens,
    exact_of_groups,
    make_product,
)

from deep_tile import GemmConfig, fp8_grouped_wgrad, fp8_wgrad, plan, precompile, tensors
from deep_tile.config import round_up
from deep_tile.problem import GemmProblem, Groups
from deep_tile.reference import MAX_RELATIVE_ERROR, group_rows
from deep_tile.select.choose import choose
from deep_tile.select.groups import grouped_configs

pytestmark = pytest.mark.usefixtures("quick_compiler")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Case(NamedTuple):
    """Operands of a call. Tokens of no group, and their scales, are NaN, but for those in a group's last block of 128.

    Attributes:
        operands: dy, dy_scale, x, x_scale.
        offs: the call's offsets.
        tokens: first token, and the one behind the last, of each group.
        guarded: `out`, as rows of all groups.
    """

    operands: Operands
    offs: torch.Tensor
    tokens: list[tuple[int, int]]
    guarded: GuardedOut

    @property
    def out(self) -> torch.Tensor:
        """`out` as the call takes it."""
        return self.guarded.out.unflatten(0, (len(self.tokens), -1))

    def call(self, out: torch.Tensor, **keywords) -> torch.Tensor:
        return fp8_grouped_wgrad(*self.operands, self.offs, out, **keywords)

    def check(self, accumulate: bool = True, **keywords) -> torch.Tensor:
        """Add to random numbers, or overwrite NaN; check each number and the memory around `out`."""
        out = self.out
        before = torch.randn(out.shape, device=out.device) if accumulate else torch.full_like(out, float("nan"))
        out.copy_(before)
        assert self.call(out, accumulate=accumulate, **keywords) is out
        self.guarded.assert_guards_intact()
        exact = exact_of_groups(self.operands, self.tokens)
        for group, (begin, end) in enumerate(self.tokens):
            if begin == end:
                untouched = before[group] if accumulate else torch.zeros_like(before[group])
                assert torch.equal(out[group], untouched), f"group {group} has no tokens"
                continue
            value = exact.value[group] + (before[group].double() if accumulate else 0)
            added = Exact(value, exact.spread[group])
            assert_accurate(out[group], added, ACCUMULATION, MAX_RELATIVE_ERROR)
        return out


def make_case(
    lengths: list[int],
    n: int,
    k: int,
    *,
    device: str = "cpu",
    alignment: int = 128,
    spare: int = 1,
    bounds: list[int] | None = None,
    padding: int = 0,
    scales: str = "row",
    out_stride: int | None = None,
    out_offset: int = 0,
) -> Case:
    """Groups of these lengths with `spare` blocks of 128 tokens behind them, or with `bounds` of any values."""
    ends, end = [], 0
    for length in lengths:
        end = round_up(end, alignment) + length
        ends.append(end)
    s = round_up(end, 128) + 128 * spare
    offs = torch.tensor(ends if bounds is None else bounds, dtype=torch.int32)
    tokens = group_rows("offs", offs, len(offs), s, alignment)
    operands = make_product("fp8_1x128", n, k, s, device=device, padding=padding, scales=scales).operands
    blank_tokens(operands, tokens)
    rows = len(offs) * n
    guarded = GuardedOut(rows, k, device=device, stride=out_stride, offset=out_offset, dtype=torch.float32)
    return Case(operands, offs.to(device), tokens, guarded)


LENGTHS = [
    [130, 0, 256, 5],
    [0, 0, 0, 1],
    [700],
    [128] * 9,
    [1] * 40,
    [0] * 33 + [17, 200],
]

each_lengths = pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}_groups_{sum(lengths)}")


@each_lengths
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulate", [True, False], ids=["add", "write"])
@pytest.mark.parametrize("alignment", [128, 512])
def test_values(lengths, device, accumulate, alignment):
    make_case(lengths, 72, 136, device=device, alignment=alignment).check(accumulate, alignment=alignment)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_stride", [136, 139, 144])
@pytest.mark.parametrize("scales", ["row", "column", "column_aligned", "scattered"])
def test_layouts(device, out_stride, scales):
    layout = {"out_stride": out_stride, "out_offset": out_stride % 4, "padding": 48}
    case = make_case([300, 0, 77], 130, 136, device=device, scales=scales, **layout)
    case.check()
    case.check(accumulate=False, expected_tokens=9)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_need_not_be_whole_blocks(device):
    """The last group's last 128 end with the tensor."""
    case = make_case([128, 140], 40, 24, device=device, spare=0)
    dy, dy_scale, x, x_scale = case.operands
    case._replace(operands=Operands(dy[:, :268], dy_scale, x[:, :268], x_scale)).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "bounds",
    [[5, 3, 400, 200], [-4, 10, -1, 300], [2**31 - 1] * 4, [-(2**31)] * 4, [10, 2**31 - 1, 3, 70], [500, 513, 600, 1]],
)
@pytest.mark.parametrize("accumulate", [True, False], ids=["add", "write"])
def test_offsets_that_lie(device, bounds, accumulate):
    """Offsets are clipped: nothing outside of the tensors is read or written."""
    make_case([128] * 4, 136, 72, device=device, bounds=bounds, spare=0).check(accumulate)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device):
    none = make_case([0, 0], 40, 24, device=device, spare=0)
    none.check()
    none.check(accumulate=False)
    make_case([3, 4], 0, 24, device=device).check()
    make_case([3, 4], 24, 0, device=device).check()


@pytest.mark.parametrize("device", DEVICES)
def test_one_group_is_the_gradient_of_one_weight(device):
    """Bit for bit: both add up the products of a number in the same order."""
    case = make_case([640], 130, 264, device=device, spare=0)
    out = case.out
    case.call(out, accumulate=False)
    alone = torch.full((130, 264), float("nan"), device=device)
    assert torch.equal(fp8_wgrad(*case.operands, alone, accumulate=False, batch_invariant=True), out[0])


@pytest.mark.parametrize("dtype", tensors.SCALE_DTYPES[1:], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_narrow_scales(device, dtype):
    case = make_case([130, 20], 24, 40, device=device)
    narrow = [scale.nan_to_num(1.0).to(dtype) for scale in case.operands[1::2]]
    wide = case.operands._replace(a_scale=narrow[0].float(), b_scale=narrow[1].float())
    want = case._replace(operands=wide).call(torch.zeros_like(case.out))
    got = case._replace(operands=wide._replace(a_scale=narrow[0], b_scale=narrow[1])).call(torch.zeros_like(case.out))
    assert torch.equal(got, want)


REFUSED = [
    (lambda g: {"dy": g["dy"].float()}, TypeError, "dy must be torch.float8_e4m3fn.*transposed_cast"),
    (lambda g: {"x": g["x"][:, :128]}, ValueError, r"dy must be \[n, s\] and x \[k, s\]"),
    (lambda g: {"x": None}, TypeError, "x must be a torch.Tensor; got NoneType"),
    (lambda g: {"dy_scale": g["dy_scale"][:, :1]}, ValueError, "dy_scale must have shape"),
    (lambda g: {"x_scale": g["x_scale"].double()}, TypeError, "x_scale must be"),
    (lambda g: {"offs": g["offs"].long()}, TypeError, r"offs must be torch.int32.*\.int\(\)"),
    (lambda g: {"offs": g["offs"][None]}, ValueError, r"offs must be \[g\]"),
    (lambda g: {"offs": g["offs"].repeat(2)[::2]}, ValueError, r"offs has the stride 2.*contiguous"),
    (lambda g: {"out": g["out"].half()}, TypeError, "out must be torch.float32 or torch.bfloat16; got torch.float16"),
    (lambda g: {"out": g["out"][:, :8]}, ValueError, r"out must be \[g, n, k\] = \[2, 24, 40\]; got \[2, 8, 40\]"),
    (lambda g: {"out": g["out"].mT.contiguous().mT}, ValueError, "unit stride along n"),
    (lambda g: {"out": g["out"][:1].expand(2, -1, -1)}, ValueError, "overlap"),
    (lambda g: {"dy": g["dy"].clone()[:, 1:]}, ValueError, "dy"),
    (lambda g: {"alignment": 64}, ValueError, "alignment is 64; groups begin at multiples of 128"),
    (lambda g: {"alignment": 2048}, ValueError, "alignment is 2048"),
    (lambda g: {"expected_tokens": 0}, ValueError, "expected_tokens is 0"),
    (lambda g: {"accumulate": None}, TypeError, "accumulate is None"),
    (lambda g: {"num_sms": 0}, ValueError, "num_sms is 0"),
    (lambda g: {"config": "128x128"}, TypeError, "GemmConfig"),
    (lambda g: {"x_scale": g["x_scale"].clone().requires_grad_()}, RuntimeError, "x_scale requires a gradient"),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSED)
def test_wrong_calls_are_refused(change, error, text):
    case = make_case([130, 20], 24, 40)
    dy, dy_scale, x, x_scale = case.operands
    right = {"dy": dy, "dy_scale": dy_scale, "x": x, "x_scale": x_scale, "offs": case.offs, "out": case.out}
    with pytest.raises(error, match=f"(?s){text}"):
        fp8_grouped_wgrad(**right | change(right))
    case.guarded.assert_untouched()
    fp8_grouped_wgrad(**right)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("tma_store", [True, False])
def test_choices(accumulate, tma_store):
    for n, k, tokens in ((768, 2048, 512), (4096, 7168, 2048), (64, 64, 9)):
        for count in (1, 8, 256):
            groups = Groups("k_offs", count, tokens)
            problem = GemmProblem(
                *(n, k, count * tokens),
                tma_store=tma_store,
                kind="fp8_1x128",
                output="fp32",
                groups=groups,
                accumulate=accumulate,
            )
            assert choose(problem) in grouped_configs("k_offs", tma_store, accumulate)
            assert choose(problem._replace(num_sms=1)).cluster == 1


def test_precompile(monkeypatch):
    """test_codegen.py compiles these kernels."""
    asked = []
    monkeypatch.setattr(plan, "load_kernels", lambda configs, *_: asked.extend(configs))
    done = precompile([(24, 40, 1)], grouping="k_offs", kind="fp8_1x128", out_dtype=torch.float32, accumulate=True)
    assert set(done.configs) == set(asked) == set(grouped_configs("k_offs", True, True))
    assert precompile([(24, 40, 1)], grouping="k_offs", kind="fp8_1x128", accumulate=True) == done
    with pytest.raises(ValueError, match="grouping is 'k_offs', kind 'fp8', out_dtype None: .* the others: fp8_1x128$"):
        precompile([(24, 40, 1)], grouping="k_offs")


@pytest.mark.parametrize("options", [{"kind": "fp8"}, {"split_k": 2}, {"scale_blocks": 2}])
def test_configs_that_groups_along_k_do_not_have(options):
    right = {"kind": "fp8_1x128", "output": "fp32", "grouping": "k_offs", "store_buffers": 1}
    GemmConfig(128, 64, 2, **right)
    with pytest.raises(ValueError, match="groups along K are multiplied with"):
        GemmConfig(128, 64, 2, **right | options)


@pytest.mark.gpu
@pytest.mark.parametrize("tma_store", [True, False], ids=["tma", "any"])
@pytest.mark.parametrize("accumulate", [True, False], ids=["add", "write"])
def test_every_config(tma_store, accumulate):
    """Groups with fewer K blocks than stages, with more, and with none; edges of tiles within a box and at its end."""
    lengths = [1, 127, 128, 129, 0, 0, 1500, 640, 0, 257]
    for config in grouped_configs("k_offs", tma_store, accumulate):
        sizes = (2 * config.block_m + 8, 2 * config.block_n + 12), (config.block_m, config.block_n), (100, 20)
        for n, k in sizes:
            layout = {"out_stride": k + 4 if tma_store else k + 1, "out_offset": 0 if tma_store else 3}
            for scales in ("row", "column_aligned"):
                case = make_case(lengths, n, k, device="cuda", scales=scales, **layout)
                for num_sms in (2, 7, None):
                    case.check(accumulate, config=config, num_sms=num_sms)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_random_draws(seed):
    """The selector's choice, for tokens routed as experts are."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    groups = (1, 2, 8, 33, 70)[draw(0, 5)]
    skew = torch.rand(groups, generator=generator) ** draw(0, 6)
    lengths = (skew / skew.sum() * draw(1, 20_000)).int().tolist()
    n, k = draw(1, 500), draw(1, 500)
    scales = ("row", "column", "column_aligned")[draw(0, 3)]
    case = make_case(lengths, n, k, device="cuda", scales=scales, out_stride=k + draw(0, 2) * draw(0, 9))
    case.check(bool(draw(0, 2)), expected_tokens=draw(1, 2000), num_sms=draw(2, 133) if draw(0, 2) else None)


@pytest.mark.gpu
def test_results_repeat():
    case = make_case([300, 0, 2000, 77], 1000, 776, device="cuda")
    first = case.call(torch.zeros_like(case.out))
    for num_sms in (None, 1, 100, None):
        config = GemmConfig(128, 128, 4, kind="fp8_1x128", output="fp32", grouping="k_offs", accumulate=True)
        assert torch.equal(case.call(torch.zeros_like(case.out), num_sms=num_sms, config=config), first)


@pytest.mark.gpu
def test_launches_one_behind_the_other():
    """Programmatic launches: the second waits for the first before it reads offsets or adds."""
    case = make_case([500, 20, 0, 1000], 384, 264, device="cuda")
    once = case.call(torch.zeros_like(case.out))
    for _ in range(20):
        out = torch.zeros_like(case.out)
        for _ in range(6):
            case.call(out, pdl=True)
        assert torch.allclose(out, 6 * once, rtol=1e-6, atol=0)
