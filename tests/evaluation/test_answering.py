"""Questions put to a vision-language model: same answers in any batch, pictures encoded once, memory bounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmkit.config import BackendConfig, ConfigError, load
from mmkit.data.example import Example, ImageRef, Turn
from mmkit.evaluation import answering, scoring
from mmkit.evaluation.answering import VlmAnswerer
from mmkit.evaluation.task import Decode, Task
from mmkit.evaluation.tasks.table import TASKS
from mmkit.models.build import build, image_transforms, tokenizer
from mmkit.sharding.backend import create


@pytest.fixture(scope="module")
def answerer():
    """The smallest published twin with random weights."""
    config = load("13b-debug", "finetune").model
    torch.manual_seed(0)
    model = build(config).eval()
    return VlmAnswerer(model, config, tokenizer(config), image_transforms(config), create(BackendConfig(), "fp32"))


def request(number: int, colour: int, text: str) -> Example:
    """A question about a picture of one colour."""
    picture = ImageRef(np.full((40, 50 + 10 * colour, 3), 60 * colour, np.uint8), name=f"colour {colour}")
    return Example(f"q{number}", (picture,), (Turn("user", f"<image>\n{text}"),))


REQUESTS = [
    request(0, 1, "what?"),
    request(1, 1, "which colour is this, and why?"),
    request(2, 3, "what?"),
    request(3, 2, "is it so?"),
]


def test_answers_do_not_depend_on_the_batch(answerer):
    together = answerer(REQUESTS, Decode(max_new_tokens=4))
    alone = [answerer([one], Decode(max_new_tokens=4))[0] for one in REQUESTS]
    assert together == alone and answerer(REQUESTS[::-1], Decode(max_new_tokens=4)) == alone[::-1]


def test_each_picture_is_encoded_once_while_it_fits(answerer, monkeypatch):
    counted: list[int] = []
    pictures = answering.EncodedPictures(answerer.model, image_transforms(answerer.config), answerer.backend)
    original = answerer.model.encode
    monkeypatch.setattr(
        answerer.model, "encode", lambda images: counted.append(len(images[0])) or original(images)
    )
    refs = [one.images[0] for one in REQUESTS]
    pictures.encode(refs)
    pictures.encode(refs)
    assert counted == [3] and pictures.get(refs[0])[1] == (60, 40)
    monkeypatch.setattr(answering, "KEPT_BYTES", 0)
    pictures.encode(refs[:1])
    assert set(pictures.kept) == {refs[0].identity}
    assert pictures.bytes == sum(grid.nbytes for grid in pictures.get(refs[0])[0])


def test_a_missing_export_names_the_command_that_makes_it(tmp_path):
    run = load("tiny", "eval", {"root": str(tmp_path)})
    with pytest.raises(ConfigError, match="mmkit train --model tiny --stage finetune"):
        scoring.export_of(run)
    clip = load("clip-tiny", "eval", {"root": str(tmp_path), "name": "mine"})
    with pytest.raises(ConfigError, match="mmkit train --model clip-tiny --stage pretrain --name mine"):
        scoring.export_of(clip)


def test_tasks_are_checked_before_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="no task 'easy_vga'; did you mean 'easy_vqa'"):
        scoring.evaluate_run(load("tiny", "eval", {"root": str(tmp_path), "tasks": ["easy_vga"]}))
    with pytest.raises(ConfigError, match="evaluation.tasks of 'tiny' is empty"):
        scoring.check_tasks(load("tiny", "eval", {"tasks": []}))


def test_headlines_come_from_the_results_that_are_there():
    from mmkit.evaluation.runner import Result

    groups = {"type": {"shape": {"exact_match": 0.9, "n": 10}}}
    controls = {"shuffled": {"metrics": {"exact_match": 0.6}, "groups": {}}}
    result = Result("easy_vqa", {}, "x", 10, "exact_match", {"exact_match": 0.8}, groups, controls)
    assert scoring.headline([result]) == {
        "easy_vqa_exact_match": 0.8,
        "easy_vqa_shuffled": 0.6,
        "easy_vqa_shape": 0.9,
    }
    others = [
        Result("mmvp", {}, "y", 20, "accuracy", {"accuracy": 30.0}, unit="percent"),
        Result("docvqa", {}, "z", 5, "", {"total": 5.0}),
    ]
    assert scoring.headline(others) == {"mmvp_accuracy_percent": 30.0}  # nothing of what was not scored


def test_max_new_tokens_overrides_every_tasks_own_and_is_part_of_the_spec(answerer, monkeypatch):
    task = Task(
        "toy",
        1,
        4,
        lambda: REQUESTS,
        lambda example, answer: {"length": float(len(answer))},
        "length",
        Decode(max_new_tokens=2),
    )
    monkeypatch.setitem(TASKS, "toy", task)
    asked = []
    monkeypatch.setattr(
        answering.VlmAnswerer,
        "__call__",
        lambda self, requests, decode: asked.append(decode) or ["x"] * len(requests),
    )
    at_hand = (answerer.model, answerer.config, answerer.tokenizer, image_transforms(answerer.config), answerer.backend)
    run = load("8b-debug", "eval", {"tasks": ["toy"], "evaluation.limit": None})
    (own,) = scoring.evaluate_model(run, *at_hand)
    (longer,) = scoring.evaluate_model(
        load("8b-debug", "eval", {"tasks": ["toy"], "max_new_tokens": 7}), *at_hand
    )
    assert {decode.max_new_tokens for decode in asked} == {
        2,
        7,
    } and own.spec_hash == task.spec_hash != longer.spec_hash


def test_a_published_preset_has_its_published_score_as_a_control(answerer, monkeypatch):
    task = Task(
        "mmvp",
        1,
        4,
        lambda: REQUESTS,
        lambda example, answer: {"accuracy": 1.0},
        "accuracy",
        unit="percent",
        shuffled_control=False,
    )
    monkeypatch.setitem(TASKS, "mmvp", task)
    at_hand = (answerer.model, answerer.config, answerer.tokenizer, image_transforms(answerer.config), answerer.backend)
    (result,) = scoring.evaluate_model(load("8b", "eval", {"tasks": ["mmvp"], "max_new_tokens": 1}), *at_hand)
    assert result.controls["published"]["metrics"] == {"accuracy": 51.3}
