"""Models from presets: exact sizes on the meta device, tokenizers, image transforms."""

from __future__ import annotations

import re

import pytest
import torch
from PIL import Image

from mmkit.config import ConfigError, load
from mmkit.models import clip, vlm
from mmkit.models.build import build, encoder_transform, image_transforms, tokenizer
from mmkit.models.hollow import SkipInit
from tests.models import twins


def counts(model, components) -> dict[str, int]:
    """Parameters of each component."""
    out: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        component = next(component for pattern, component in components if re.match(pattern, name))
        out[component] = out.get(component, 0) + parameter.numel()
    return out


def llama(vocabulary: int, d: int, mlp: int, layers: int, heads: int, kv: int) -> int:
    """Embedding and untied head; a layer: query and output (d x d), key and value, gate, up, down, two RMS norms; the final norm."""
    layer = 2 * d * d + 2 * d * (d // heads * kv) + 3 * d * mlp + 2 * d
    return 2 * vocabulary * d + layers * layer + d


V = 1024
# SigLIP + CLIP without its last layer + DINOv2-g + ConvNeXt-XXL, each derived in test_encoders
CLIP_L = 290_909_184
FOUR_ENCODERS = 412_987_248 + CLIP_L + 1_136_479_232 + 843_391_872


def sva_layer(d_query: int) -> int:
    """Section 1.1 of the facts, four encoders with windows of 1, 1, 1 and 4x4 cells, H = V = 1024."""
    context, query_in, positions = V * V, V * (d_query + V), 16 * V
    query = 2 * V + V * V
    keys_and_values = 4 * 2 * (2 * V + V * V)
    out = V * V + 2 * V + V * V + d_query * V  # o_proj, post-norm, two linear layers behind it
    return context + query_in + positions + query + keys_and_values + out


def cambrian_connector(d: int) -> int:
    """Projections of the four widths to V with a norm, one query, three sampler layers, the MLP to the language model, the newline."""
    projections = sum(c * V + V + V * V + V + 2 * V for c in (1152, 1024, 1536, 5760))
    return projections + V + 3 * sva_layer(V) + V * d + d + d * d + d + d


# two stages of (difference 1026 -> 1026, aggregation 2052 -> 1024, norm), flatten 32 * 1024 -> 1024, then 1024 -> d
def geo_sampler(d: int) -> int:
    """Section 2.2 of the facts."""
    stage = (1026 * 1026 + 1026) + (2052 * 1024 + 1024) + 2 * 1024
    return 2 * stage + (32 * 1024 * 1024 + 1024) + (1024 * d + d)


def mlp(d: int) -> int:
    """LLaVA-1.5's projector: 1024 -> d -> d."""
    return 1024 * d + d + d * d + d


VICUNA_7B, VICUNA_13B = (4096, 11008, 32, 32, 32), (5120, 13824, 40, 40, 40)
# phi3 has no biases, fused projections of the same size: the Llama formula holds
PUBLISHED = {
    "8b": (FOUR_ENCODERS, cambrian_connector(4096) + 10 * sva_layer(4096), 0, llama(128256, 4096, 14336, 32, 32, 8)),
    "13b": (FOUR_ENCODERS, cambrian_connector(5120) + 10 * sva_layer(5120), 0, llama(32000, *VICUNA_13B)),
    "34b": (FOUR_ENCODERS, cambrian_connector(7168) + 9 * sva_layer(7168), 0, llama(64000, 7168, 20480, 60, 56, 8)),
    "phi3-3b": (FOUR_ENCODERS, cambrian_connector(3072) + 10 * sva_layer(3072), 0, llama(32064, 3072, 8192, 32, 32, 32)),
    "ferret-7b": (CLIP_L, 1024 * 4096 + 4096, geo_sampler(4096), llama(32001, *VICUNA_7B)),
    "ferret-13b": (CLIP_L, 1024 * 5120 + 5120, geo_sampler(5120), llama(32001, *VICUNA_13B)),
    "llava-7b": (CLIP_L, mlp(4096), 0, llama(32000, *VICUNA_7B)),
    "llava-13b": (CLIP_L, mlp(5120), 0, llama(32000, *VICUNA_13B)),
}


def test_the_formulas_give_the_published_language_model_sizes():
    """As the model cards state them: Llama-3-8B, Vicuna 7B and 13B, Yi-34B, Phi-3-mini."""
    sizes = [PUBLISHED[name][3] for name in ("8b", "llava-7b", "13b", "34b", "phi3-3b")]
    assert sizes == [8_030_261_248, 6_738_415_616, 13_015_864_320, 34_388_917_248, 3_821_079_552]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_preset_has_its_exact_size_without_memory(name):
    model = build(load(name, "finetune").model, device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    found = counts(model, vlm.COMPONENTS)
    encoders, connector, regions, language = PUBLISHED[name]
    assert found.pop("encoders") == encoders
    assert found.pop("language") == language
    assert found.pop("regions", 0) == regions
    assert sum(found.values()) == connector  # connector and in-LLM samplers


def test_clip_vit_l_14_has_427_62_million_parameters():
    """open_clip's profile of the laion2B run: 303.97M image + 123.65M text.

    Text: 49408 x 768 words, 77 places, 12 layers, norm, 768 x 768.
    """
    model = build(load("clip-vit-l-14", "pretrain").model, device="meta")
    found = counts(model, clip.COMPONENTS)
    layer = 4 * 768 + 4 * (768 * 768 + 768) + (768 * 3072 + 3072) + (3072 * 768 + 768)
    assert found == {"image": 303_966_208, "text": 49408 * 768 + 77 * 768 + 12 * layer + 2 * 768 + 768 * 768, "scale": 1}
    assert round(sum(found.values()) / 1e6, 2) == 427.62


def test_nothing_is_read_without_weights(monkeypatch):
    from mmkit.models import encoders, packs
    from mmkit.models.convert import files

    def refuse(*_, **__):
        raise AssertionError("a file was asked for")

    for owner, name in ((files, "locate"), (packs, "language_folder"), (packs, "encoder_state"), (encoders, "load_encoder")):
        monkeypatch.setattr(owner, name, refuse)
    build(load("tiny", "finetune").model, device="meta")


def test_skipped_initialisation_draws_nothing_and_leaves_computed_buffers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with SkipInit():
        torch.nn.TransformerEncoderLayer(8, 2, 16)
        assert torch.equal(torch.rand(3), expected)
        model = build(twins.llava(), weights=False).language
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, 10000 ** (-torch.arange(0, 8, 2) / 8))


def test_the_region_token_is_one_entry_at_the_end_of_the_tokenizer():
    words = tokenizer(twins.ferret())
    assert words("<region_fea>")["input_ids"] == [271]
    assert words("a <region_fea> b")["input_ids"] == [100, 35, 271, 35, 101]


def test_a_tokenizer_larger_than_the_vocabulary_names_both():
    small = twins.ferret(language=twins.language(vocab_size=271))
    with pytest.raises(ConfigError, match="'bytes' has 272 entries, language.architecture.vocab_size is 271; use at least 272"):
        tokenizer(small)
    with pytest.raises(ConfigError, match="language.source 'random' brings no tokenizer; set language.tokenizer"):
        tokenizer(twins.llava(language=twins.language().model_copy(update={"tokenizer": None})))
    with pytest.raises(ValueError, match="no file or folder './nowhere'"):
        tokenizer(twins.llava(language=twins.language().model_copy(update={"tokenizer": "./nowhere"})))


def half(side: tuple[int, int]) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", side, (255, 0, 0))
    image.paste((0, 0, 255), (side[0] // 2, 0, *side))
    return image


def test_fits_pad_crop_or_stretch():
    colour = torch.tensor([122, 116, 104]) / 255
    config = twins.CLIP.model_copy(update={"resolution": 40})
    spec = [torch.tensor(value)[:, None, None] for value in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))]
    for fit in ("pad", "square", "stretch"):
        out = encoder_transform(config, fit)(half((80, 40))) * spec[1] + spec[0]  # (3, 40, 40), back to 0..1
        assert out.shape == (3, 40, 40)
        top = colour if fit == "pad" else torch.tensor([1.0, 0.0, 0.0])
        torch.testing.assert_close(out[:, 0, 0], top, atol=1e-5, rtol=0)
        torch.testing.assert_close(out[:, 20, 4], torch.tensor([1.0, 0.0, 0.0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(out[:, 20, 35], torch.tensor([0.0, 0.0, 1.0]), atol=1e-5, rtol=0)


def test_transforms_take_any_image_mode_and_one_comes_for_each_encoder():
    transforms = image_transforms(twins.cambrian())
    assert len(transforms) == 2
    for mode in ("L", "RGBA", "P", "CMYK", "1"):
        assert [transform(Image.new(mode, (9, 33))).shape for transform in transforms] == [(3, 28, 28), (3, 28, 28)]
