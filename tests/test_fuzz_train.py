"""The checks of the fuzzer of training steps, on the CPU: they find what is made wrong. test_fuzz.py has clean runs."""

from random import Random

import fuzz
import fuzz_train
import pytest
import torch
from fuzz_train import check, draw

from deep_tile.train import experts as of_experts  # noqa: F401  (loads the package's modules)
from deep_tile.train import linear as of_layers  # noqa: F401

pytestmark = pytest.mark.about("tests/*fuzz*.py", "tests/campaign.py", "deep_tile/train/*", "deep_tile/both.py")


def drawn(what, number=0, **fields):
    """A small step of this kind, of a default recipe, whose parts all have gradients."""
    for i in range(number, number + 500):
        one = draw(Random(f"0:{i}"), "cpu", 2**17)
        leaves = [x for x, _ in one.inputs] + [each for each in one.parameters if each is not None]
        if one.what == what and all(leaf.requires_grad for leaf in leaves) and one.recipe.dgrad == "fp8":
            return one._replace(**fields)
    raise AssertionError(f"no {what} was drawn")


def found(one):
    return {kind for kind, count in check(one, lambda: None).items() if count}


@pytest.mark.gpu
def test_nothing_is_found_on_a_gpu(capsys):
    assert fuzz.main(["train", "--seconds", "20"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("what", ["linear", "linears", "mlp", "pair", "experts"])
def test_what_is_made_wrong_is_found(what, monkeypatch):
    """Each part's numbers, by a tenth; of the casts all are left out for one."""
    one = drawn(what, way="plain", main_grad=None)
    assert not found(one)
    scaled = fuzz_train.fake
    monkeypatch.setattr(fuzz_train, "fake", lambda x, *how: scaled(x, *how) * (1.1 if how[0] == 1 else 1))
    wrong = found(one)
    assert any("off" in kind for kind in wrong) and not any("repeated" in kind for kind in wrong)


def test_bits_that_change_are_found(monkeypatch):
    one, run, calls = drawn("linear"), fuzz_train.run, []

    def unsteady(drawn):
        made = run(drawn)
        calls.append(made[0].flatten()[0].mul_(1 + 2.0**-7 * len(calls)))
        return made

    monkeypatch.setattr(fuzz_train, "run", unsteady)
    assert "0 repeated" in found(one)


def test_the_definition_of_a_cast_is_the_casts():
    from deep_tile import dequantize, per_block_cast_to_fp8, transposed_cast_to_fp8
    from deep_tile.train import Recipe

    x = torch.randn(300, 200) * torch.logspace(-9, 3, 200)
    for recipe in (Recipe(), Recipe(round_scale="pow2", amax_floor=1e-4)):
        blocks, along = (
            dequantize(*cast(x, **recipe.cast)) for cast in (per_block_cast_to_fp8, transposed_cast_to_fp8)
        )
        assert torch.equal(fuzz_train.fake(x, 128, 128, recipe).float(), blocks.float())
        assert torch.equal(fuzz_train.fake(x, 128, 1, recipe).float(), along.float().t())
