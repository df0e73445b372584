"""A conversation through tokenizer, transforms and model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit.config import BackendConfig, VlmConfig
from mmkit.data.boxes import Box, pixels
from mmkit.data.example import IMAGE, Region
from mmkit.evaluation.chat import open_chat, with_image_markers
from mmkit.models.build import build, image_transforms, tokenizer
from mmkit.sharding.backend import create

REGIONS = {"kind": "geo", "n_points": 16, "n_sub_points": [4], "n_neighbors": [3]}


@pytest.fixture(scope="module")
def chat():
    torch.manual_seed(0)
    architecture = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    config = VlmConfig(
        encoders=[{"name": "lite0", "side": 4, "weights": "random", "resolution": 64}],
        connector={"kind": "sva", "width": 16, "heads": 4, "depth": 1, "query_sides": [4]},
        samplers={"count": 1},
        language={"source": "random", "architecture": architecture, "tokenizer": "bytes"},
        regions=REGIONS,
        template="vicuna_v1",
    )
    backend = create(BackendConfig(), "fp32")
    return open_chat(build(config).eval(), config, tokenizer(config), image_transforms(config), backend, max_new_tokens=4)


def picture(size=(40, 30)):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def test_a_conversation_goes_on_with_its_picture_and_streams_what_it_answers(chat):
    answer, history = chat(picture(), "What is this?")
    assert [role for role, _ in history] == ["user", "assistant"] and isinstance(answer, str)
    assert "".join(chat.stream(picture(), "What is this?")).strip() == answer
    _, longer = chat(picture(), "And now?", history)
    assert longer[:2] == history and len(longer) == 4
    chat(None, "No picture at all.")


def test_regions_of_the_whole_conversation_follow_their_markers(chat):
    region = Region("box", Box(3, 4, 20, 25, pixels(40, 30)))
    batch = chat.encode([picture()], [("user", "What is <region>?")], regions=[region])
    assert int((batch["input_ids"] == -300).sum()) == int(batch["region_real"].sum()) == 1
    _, history = chat(picture(), "What is <region>?", regions=[region])
    chat(picture(), "And <region>?", history, regions=[region, region])


def test_pictures_come_first_unless_the_text_says_where():
    turns = with_image_markers([("user", "Compare."), ("assistant", "So."), ("user", f"And {IMAGE}?")], 3)
    assert [turn.text for turn in turns] == [f"{IMAGE}\n{IMAGE}\nCompare.", "So.", f"And {IMAGE}?"]
    with pytest.raises(ValueError, match="2 <image> markers for 1 pictures"):
        with_image_markers([("user", IMAGE * 2)], 1)
