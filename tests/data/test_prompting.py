"""Prompts for generation are the beginning of the training rows."""

import pytest
import torch

from mmkit.data.conversation import Formatter
from mmkit.data.example import BadRecord, Example, ImageRef, Turn
from mmkit.data.prompting import prompt_batch
from tests.data.test_loader import REGIONS, examples, make, picture, region_example, tokenizer, transform, vlm


@pytest.mark.parametrize("pad", ["right", "left"])
def test_prompt_rows_are_training_rows_up_to_the_answer(pad):
    found, words = examples(4), tokenizer()
    batch = prompt_batch(found, Formatter.of(words, vlm()), vlm(), [transform], pad=pad)
    trained = next(make(found, train=False, device_batch=4)).tensors
    for row in range(4):
        real = batch.tensors["segments"][row] > 0
        ids = batch.tensors["input_ids"][row][real]
        first_answer = int((trained["labels"][row] != -100).nonzero()[0])
        assert torch.equal(ids, trained["input_ids"][row][:first_answer])
        assert torch.equal(batch.tensors["positions"][row][real], trained["positions"][row][:first_answer])
        assert bool(real[0] if pad == "right" else real[-1])
    assert torch.equal(batch.tensors["images.0"], trained["images.0"]) and batch.n_targets == 0


def test_length_comes_from_the_buckets():
    words = tokenizer()
    batch = prompt_batch(examples(3), Formatter.of(words, vlm()), vlm(), [transform], buckets=(8, 32, 64))
    assert batch.tensors["input_ids"].shape == (3, 32)


def test_region_points_of_a_prompt_are_always_the_same():
    model = vlm(regions=REGIONS, image_fit="stretch")
    words = tokenizer()
    first, second = (prompt_batch([region_example()], Formatter.of(words, model), model, [transform]) for _ in range(2))
    assert torch.equal(first.tensors["region_points"], second.tensors["region_points"])
    assert (first.tensors["input_ids"] == -300).sum() == 2


def test_bad_picture_of_a_prompt_is_an_error():
    bad = Example("bad", (ImageRef(b"none"),), (Turn("user", "<image>\nwhat"),), source="made")
    with pytest.raises(BadRecord, match="'bad': .*no known image format"):
        prompt_batch([bad, Example("ok", (picture(1),), bad.turns)], Formatter.of(tokenizer(), vlm()), vlm(), [transform])
