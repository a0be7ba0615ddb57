"""The kernels of casts both ways: no write outside of the results that they allocate, for any call that is drawn."""

import pytest
import torch
from conftest import POISON
from test_both import joined, of_weight
from test_drawn_casts import check_draws
from test_quantize import codes, wide_matrix

from deep_tile import cast_both, cast_weight, transpose_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("guarded_results")]


def on_cpu(made):
    """NaN of either sign as one."""
    made = [x.cpu() for x in made]
    return [torch.where(x.isnan(), torch.nan, x) if x.dtype == torch.float32 else codes(x) for x in made]


def assert_as_on_cpu(got, wanted):
    for one, other in zip(on_cpu(got), on_cpu(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", ["both", "weight both", "transpose"])
def test_any_call_is_as_defined(case):
    check_draws(case, "cuda")


@pytest.mark.parametrize("columns", [136, 131])
@pytest.mark.parametrize(
    "offs", [[300], [5, 130, 300], [0, 128, 128, 300], [2**31 - 1], [0], [100, 50, 300], [-5, 200]], ids=str
)
def test_groups(offs, columns):
    """Tokens of no group are left alone. Along k, whole blocks of 128 living tokens are written."""
    x = wide_matrix(300, columns, torch.bfloat16)
    offs = torch.tensor(offs, dtype=torch.int32)
    made, wanted = [cast_both(x.to(device), offs=offs.to(device)) for device in ("cuda", "cpu")]
    assert_as_on_cpu(made[2:], wanted[2:])  # both lie in memory of one byte
    written = (made.a.cpu().view(torch.uint8) != POISON).any(1)
    living = torch.zeros(300, dtype=torch.bool)
    living[: max(0, min(300, int(offs.max())))] = True
    assert not written[~living].any()
    for row in written.nonzero().flatten().tolist():
        assert_as_on_cpu((made.a[row],), (wanted.a[row],))
        assert torch.equal(made.a_scale[row].cpu(), wanted.a_scale[row])


def test_large():
    """More tiles than thread blocks that run at once, and elements beyond 2**31."""
    x = torch.randn(65_664, 33_000, device="cuda", dtype=torch.bfloat16)
    made = cast_weight(x)
    for rows in (slice(0, 256), slice(65_536, 65_664)):
        wanted = of_weight(x[rows].cpu())
        assert_as_on_cpu(
            (made.b[rows], made.b_scale[rows.start // 128 : -(-rows.stop // 128)], made.bt[:, rows]), wanted
        )
    assert torch.equal(transpose_fp8(made.b).view(torch.uint8), made.bt.view(torch.uint8))
    del made
    both_ways = cast_both(x)
    wanted = joined(x[65_536:].cpu())
    got = (both_ways.a[65_536:], both_ways.a_scale[65_536:], both_ways.at[:, 65_536:], both_ways.at_scale[:, 512:])
    assert_as_on_cpu(got, wanted)
