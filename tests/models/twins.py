"""Small configs of every structure, with random weights, for tests of models and files."""

from __future__ import annotations

from mmkit.config import ClipConfig, ConnectorConfig, EncoderConfig, LanguageConfig, RegionConfig, SamplersConfig, VlmConfig

CLIP = EncoderConfig(
    name="clip-l-336", side=4, resolution=28, weights="random",
    architecture=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, patch_size=7),
)  # fmt: skip
DINO = EncoderConfig(
    name="dinov2-g-378", side=8, resolution=28, weights="random",
    architecture=dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=7, image_size=42),
)  # fmt: skip
LLAMA = dict(
    model_type="llama", vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, hidden_act="silu", tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def language(**changes) -> LanguageConfig:
    """A random Llama of four layers with the byte tokenizer."""
    return LanguageConfig(source="random", tokenizer="bytes", architecture=LLAMA | changes)


def cambrian(**changes) -> VlmConfig:
    """Two encoders, SVA, in-LLM samplers after layers 0 and 2."""
    settings = dict(
        encoders=(CLIP, DINO), connector=ConnectorConfig(width=32, heads=16, depth=2, query_sides=(4,)),
        samplers=SamplersConfig(start=0, stride=2, count=2), language=language(),
    )  # fmt: skip
    return VlmConfig(**settings | changes)


def ferret(kind: str = "geo", **changes) -> VlmConfig:
    """One encoder, one linear layer, regions."""
    regions = RegionConfig(kind=kind, n_points=32, n_sub_points=(8, 4), n_neighbors=(4, 4), transposed=True)
    settings = dict(encoders=(CLIP,), connector=ConnectorConfig(kind="linear", newline=False), language=language(), regions=regions)
    return VlmConfig(**settings | dict(template="ferret_v1", image_fit="stretch") | changes)


def llava(**changes) -> VlmConfig:
    """One encoder, two-layer MLP."""
    settings = dict(encoders=(CLIP,), connector=ConnectorConfig(kind="mlp", depth=2, newline=False), language=language())
    return VlmConfig(**settings | changes)


def clip(**changes) -> ClipConfig:
    """A ViT of two layers beside a two-layer text transformer."""
    towers = dict(
        embed_dim=16, quick_gelu=False, vision_cfg=dict(image_size=32, layers=2, width=32, head_width=16, patch_size=8),
        text_cfg=dict(context_length=12, vocab_size=49408, width=32, heads=2, layers=2),
    )  # fmt: skip
    return ClipConfig(**dict(name="twin", architecture=towers) | changes)


def lit(**changes) -> ClipConfig:
    """Locked timm tower + locked MiniLM, both from packs, heads trained."""
    towers = dict(
        embed_dim=16, vision_cfg=dict(timm_model_name="tf_efficientnet_lite0", timm_pool="avg", timm_proj="mlp", image_size=64),
        text_cfg=dict(hf_model_name="pack:minilm", hf_proj_type="linear", hf_pooler_type="mean_pooler", context_length=12),
    )  # fmt: skip
    settings = dict(name="lit", architecture=towers, tower_packs=("lite0", "minilm"), lock_image=True, lock_text=True)
    return ClipConfig(**settings | changes)
