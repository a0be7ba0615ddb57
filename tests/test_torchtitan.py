"""The converter for torchtitan, by torchtitan itself where it is installed."""

import pytest
import torch

from deep_tile import train

pytest.importorskip("torchtitan", reason="torchtitan is not installed; a release is tested with it")
Linear = pytest.importorskip("torchtitan.models.common.linear", reason="torchtitan needs triton", exc_type=ImportError)


def test_configs_of_layers_that_gain_are_replaced():
    from torchtitan.models.common.feed_forward import FeedForward

    from deep_tile.integrations.torchtitan import DeepTileConverter, DeepTileLinear

    def layer(n, k):
        return Linear.Linear.Config(in_features=k, out_features=n)

    config = FeedForward.Config(w1=layer(4096, 2048), w2=layer(2048, 4096), w3=layer(256, 2048))
    DeepTileConverter.Config(filter_fqns=["w2"]).build().convert(config)
    assert [type(each) is DeepTileLinear.Config for each in (config.w1, config.w2, config.w3)] == [True, False, False]
    built = config.w1.build()
    x = torch.randn(16, 2048, dtype=torch.bfloat16)
    built.to(torch.bfloat16)
    assert torch.equal(built(x), train.linear(x, built.weight))
