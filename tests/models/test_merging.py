"""Merging adapters: what peft's adapted layers compute, whatever is computed at a time, and how much a storage type rounds away (U50)."""

import pytest
import torch
from torch import nn

from mmkit.models import merging
from mmkit.models.merging import Merging, merged

peft = pytest.importorskip("peft")


def reported_case():
    """User report U50: W 64x64 N(0,1), A and B of rank 8 N(0,1) x 0.02, scaling 2."""
    torch.manual_seed(0)
    return torch.randn(64, 64), {"A": torch.randn(8, 64) * 0.02, "B": torch.randn(64, 8) * 0.02}, {"lora_alpha": 16}


def test_the_share_that_rounding_eats_is_reported():
    weight, halves, config = reported_case()
    weight = weight.to(torch.bfloat16)
    stored, loss = merged(weight, halves, config, torch.bfloat16)
    assert stored.dtype == torch.bfloat16 and 0.5 < loss < 0.6
    exact = weight.double() + 2 * halves["B"].double() @ halves["A"].double()
    stored, loss = merged(weight, halves, config, torch.float32)
    assert loss < 2e-5 and (stored.double() - exact).abs().max() < 1e-6


def test_half_precision_that_loses_the_adapter_is_refused_after_the_last_layer_and_fp32_never(caplog):
    caplog.set_level("INFO", "mmkit.models.merging")
    weight, halves, config = reported_case()
    weight = weight.to(torch.bfloat16)
    both = {"first": halves, "second": {name: half * 30 for name, half in halves.items()}}
    lossy = Merging(both, config, "folder", torch.bfloat16)
    lossy.fold("second", weight)
    with pytest.raises(ValueError, match=r"folder: 2 layers merged into bfloat16: 5\d\.\d+% .* at worst \(first\).*limit of 5%.*float32"):
        lossy.fold("first", weight)
    for dtype, limit in ((torch.bfloat16, 1.0), (torch.float32, 0.0)):
        forced = Merging(both, config, "folder", dtype, limit)
        for layer in ("first", "first", "second"):  # read twice: for its hash and for its values
            assert forced.fold(layer, weight).dtype == dtype
    found = [(record.levelname, record.message.split(":")[1]) for record in caplog.records]
    assert found == [("WARNING", " 2 layers merged into bfloat16"), ("INFO", " 2 layers merged into float32")]
    zero = Merging({"x": {"A": halves["A"], "B": torch.zeros(64, 8)}}, config, "folder", torch.bfloat16)
    zero.fold("x", weight.to(torch.bfloat16))
    assert zero.losses == {"x": 0.0}, "an adapter that changes nothing loses nothing"


@pytest.mark.parametrize("values", [1, 100, 1 << 22])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"fan_in_fan_out": True}], ids=str)
def test_the_merged_weight_does_what_pefts_layer_does(monkeypatch, values, settings):
    monkeypatch.setattr(merging, "VALUES", values)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    if settings.get("fan_in_fan_out"):
        from transformers.pytorch_utils import Conv1D

        model = nn.Sequential(Conv1D(5, 6))
    config = peft.LoraConfig(r=3, lora_alpha=8, lora_dropout=0, target_modules=["0"], **settings)
    peft.inject_adapter_in_model(config, model, "default")
    layer = model[0]
    for name, parameter in layer.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    halves = {"A": layer.lora_A["default"].weight, "B": layer.lora_B["default"].weight}
    if settings.get("use_dora"):
        halves["magnitude"] = layer.lora_magnitude_vector["default"].weight
    data = torch.randn(4, 6)
    want = model(data)
    base = layer.get_base_layer()
    with torch.no_grad():
        base.weight.copy_(merged(base.weight, halves, config.to_dict(), torch.float32)[0])
    torch.testing.assert_close(base(data), want, atol=1e-4, rtol=1e-5)
