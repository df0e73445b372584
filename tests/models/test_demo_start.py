"""What lets the demo model learn in minutes: standardised encoder channels, and image tokens that start like text embeddings."""

from __future__ import annotations

import pytest
import torch

from mmkit.config import ConfigError, ConnectorConfig, EncoderConfig
from mmkit.models.connectors import build_connector, match_embeddings
from mmkit.models.encoders import TimmEncoder, build_encoder, channel_statistics


def test_matched_tokens_have_the_spread_of_the_embeddings_and_no_common_part():
    torch.manual_seed(0)
    widths, sides = (12, 20), (4, 4)
    config = ConnectorConfig(width=32, heads=4, depth=1, query_sides=(4,))
    connector = build_connector(config, widths, sides, 48)
    features = [torch.randn(64, 16, width) for width in widths]
    sizes = torch.full((64, 2), 64)
    with torch.no_grad():
        before = connector(features, sizes).tokens
        match_embeddings(connector, widths, sides, 0.2 * torch.randn(500, 48))
        after = connector(features, sizes).tokens
    grid = after.view(64, 4, 5, 48)[:, :, :4]
    assert grid.std().item() == pytest.approx(0.2, rel=0.1) and connector.newline.std().item() == pytest.approx(0.2, rel=0.4)
    common = grid.mean((0, 1, 2)).norm() / grid.norm(dim=-1).mean()
    assert common < 0.15 < before.view(64, 4, 5, 48)[:, :, :4].mean((0, 1, 2)).norm() / before.norm(dim=-1).mean()


def test_nothing_is_measured_on_the_meta_device():
    with torch.device("meta"):
        connector = build_connector(ConnectorConfig(width=32, heads=4, depth=1, query_sides=(4,)), (12,), (4,), 48)
        match_embeddings(connector, (12,), (4,), torch.empty(5, 48))
    assert connector.output[-1].weight.is_meta


def test_standardised_channels_are_shifted_and_scaled_by_the_measured_statistics():
    plain = build_encoder(EncoderConfig(name="lite0", side=4, resolution=64))
    standard = build_encoder(EncoderConfig(name="lite0", side=4, resolution=64, standardise=True))
    standard.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64)
    mean, deviation = channel_statistics("lite0", plain.width)
    with torch.no_grad():
        expected = (plain(images) - torch.tensor(mean)) / torch.tensor(deviation)
        assert torch.allclose(standard(images), expected, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):  # rounding would be as large as what tells pictures apart
            assert torch.equal(standard(images), expected) and plain(images).dtype == torch.bfloat16
    assert isinstance(standard, TimmEncoder) and min(deviation) > 0


def test_encoders_without_statistics_are_refused_by_name():
    with pytest.raises(ConfigError, match="no channel statistics of 'lite9' at width 152; known are lite0, mobilenet"):
        channel_statistics("lite9", 152)
    with pytest.raises(ConfigError, match="at width 7"):
        channel_statistics("lite0", 7)
