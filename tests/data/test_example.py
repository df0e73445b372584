"""Counts of markers and things agree, and pictures are compared by what they are."""

import pickle

import numpy as np
import pytest

from mmkit.data.boxes import Box, pixels
from mmkit.data.example import BadRecord, Example, ImageRef, Region, Turn, checked


def test_two_images_and_one_placeholder_is_an_error_with_both_counts():
    example = Example("k7", images=(ImageRef("a.png"), ImageRef("b.png")), turns=(Turn("user", "<image>\nhi"), Turn("assistant", "yo")))
    with pytest.raises(BadRecord, match="'k7': 2 images but 1 image placeholders"):
        checked(example)


def test_region_of_a_missing_image_is_an_error():
    region = Region("box", Box(0, 0, 1, 1, pixels(4, 4)), image=1)
    turns = (Turn("user", "<image> what is <region>?"), Turn("assistant", "it"))
    with pytest.raises(BadRecord, match="image 1 of 1"):
        checked(Example("k", images=(ImageRef("a.png"),), turns=turns, regions=(region,)))


def test_both_region_markers_count():
    region = Region("box", Box(0, 0, 1, 1, pixels(4, 4)))
    turns = (Turn("user", "<image> <region> or <region_fea>?"), Turn("assistant", "it"))
    example = Example("k", images=(ImageRef("a.png"),), turns=turns, regions=(region, region))
    assert checked(example) is example


def test_images_are_equal_by_content_or_name():
    array = np.zeros((2, 3), np.uint8)
    assert ImageRef(array) == ImageRef(array.copy()) != ImageRef(array.reshape(3, 2))
    assert ImageRef(b"x", name="n") == ImageRef(b"y", name="n")


def test_bad_record_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(BadRecord("no", key="k", source="s", reason="r")))
    assert (str(error), error.key, error.reason) == ("s: sample 'k': no", "k", "r")
