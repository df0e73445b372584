"""Zero-shot classification on models small enough to know the answer."""


import open_clip
import pytest
import torch
import torch.nn.functional as F
from open_clip.zero_shot_classifier import build_zero_shot_classifier

from mmkit.evaluation.zero_shot import Share, ZeroShotTask, class_scores, classifier, evaluate, features_of, imagenet, multi_label_scores

TASK = ZeroShotTask("letters", ("a", "b", "c", "d", "e", "f"), ("{}", "the {c}", lambda name: f"{name}!"))


def tokenize(texts):
    out = torch.zeros(len(texts), 6, dtype=torch.long)
    for i, text in enumerate(texts):
        out[i, : len(text)] = torch.tensor([ord(letter) % 50 for letter in text[:6]])
    return out


class Toy(torch.nn.Module):
    """Text features depend on the words, image features on the pixels; counts its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.pixels, self.calls = torch.nn.Embedding(50, 16), torch.nn.Linear(12, 16), 0

    def forward(self, batch):
        self.calls += 1
        out = {}
        if "text" in batch:
            out["text_features"] = self.words(batch["text"]).sum(1)
        if "image" in batch:
            out["image_features"] = self.pixels(batch["image"].flatten(1))
        return out

    def encode_text(self, text, normalize=False):
        features = self({"text": text})["text_features"]
        return F.normalize(features, dim=-1) if normalize else features


def documents(n):
    g = torch.Generator().manual_seed(1)
    return [(f"doc{i}", torch.randn(3, 2, 2, generator=g), i % 6) for i in range(n)]


def test_classifier_columns_have_norm_1_and_equal_open_clips():
    model = Toy().eval()
    ours = classifier(model, tokenize, TASK, classes_per_batch=4)
    templates = [lambda n, t=t: t.format(n, c=n) if isinstance(t, str) else t(n) for t in TASK.templates]
    theirs = build_zero_shot_classifier(model, tokenize, TASK.names, templates)
    assert ours.shape == (16, 6) and torch.allclose(ours.norm(dim=0), torch.ones(6))
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_imagenet_has_1000_names_and_80_templates():
    task = imagenet()
    assert (len(task.names), len(task.templates), task.n_expected) == (1000, 80, 50_000)
    assert task.prompts("tench")[0] == open_clip.OPENAI_IMAGENET_TEMPLATES[0]("tench")


def test_templates_of_one_task_do_not_reach_another():
    first = ZeroShotTask("first", TASK.names, ("a {}",))
    second = ZeroShotTask("second", TASK.names, ("the {}", "one {c}"))
    model = Toy().eval()
    alone = [classifier(model, tokenize, task) for task in (first, second)]
    swapped = [classifier(model, tokenize, task) for task in (second, first)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(alone, swapped, strict=True))
    with pytest.raises(AttributeError):
        first.templates.append("more")


def test_tasks_without_names_or_with_a_template_without_a_place_are_refused():
    with pytest.raises(ValueError, match="0 class names"):
        ZeroShotTask("t", (), ("{}",))
    with pytest.raises(ValueError, match="'a photo' has no place"):
        ZeroShotTask("t", ("a",), ("a photo",))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_processes_scores_every_document_once(world):
    """The parts of all ranks are made one after another, then joined as `all_objects` would."""
    docs, model, boxes, calls = documents(10), Toy().eval(), [None] * world, []

    def part(rank):
        def collect(rows):
            boxes[rank] = rows
            return boxes if rank == world - 1 else [rows]

        model.calls = 0
        try:
            return evaluate(model, tokenize, TASK, docs, batch=2, share=Share(rank, world, collect))
        except ValueError as error:
            assert "of 10 documents were scored" in str(error)
        finally:
            calls.append(model.calls)

    metrics, rows = [part(rank) for rank in range(world)][-1]
    alone = evaluate(model, tokenize, TASK, docs, batch=4)
    assert (metrics, rows) == alone and [row["key"] for row in rows] == [f"doc{i}" for i in range(10)]
    assert len(set(calls)) == 1, "every process calls the model equally often"


def test_scores_are_those_of_a_full_matrix():
    docs, model = documents(30), Toy().eval()
    metrics, _ = evaluate(model, tokenize, TASK, docs, batch=7)
    image = F.normalize(model({"image": torch.stack([d[1] for d in docs])})["image_features"], dim=-1)
    top = (image @ classifier(model, tokenize, TASK)).topk(5).indices
    target = torch.tensor([d[2] for d in docs])
    assert metrics["acc1"] == pytest.approx((top[:, 0] == target).float().mean().item())
    assert metrics["acc5"] == pytest.approx((top == target[:, None]).any(1).float().mean().item())


def test_an_incomplete_set_is_an_error_not_a_score():
    task = ZeroShotTask("t", TASK.names, ("{}",), n_expected=12)
    with pytest.raises(ValueError, match="11 documents found, 12 expected"):
        evaluate(Toy(), tokenize, task, documents(11))
    assert len(evaluate(Toy(), tokenize, task, documents(12))[1]) == 12


def test_recall_per_class_weighs_classes_equally():
    rows = [{"target": 0, "top5": [0]}] * 8 + [{"target": 1, "top5": [0]}] * 2
    scores = class_scores(rows, 2)
    assert scores == {"acc1": 0.8, "acc5": None, "mean_per_class_recall": 0.5}


def test_average_precision_on_a_hand_made_ranking():
    rows = [{"scores": [s, 0.0], "target": t} for s, t in ((0.9, [0]), (0.8, [1]), (0.7, [0]), (0.6, [1]))]
    assert multi_label_scores(rows)["mean_average_precision"] == pytest.approx(((1 + 2 / 3) / 2 + (1 / 2 + 2 / 4) / 2) / 2)


def test_features_of_many_documents_have_norm_1_and_their_order():
    docs, model = documents(7), Toy().eval()
    found = features_of(model, "image", lambda i: docs[i][1], 7, batch=3)
    wanted = F.normalize(model({"image": torch.stack([d[1] for d in docs])})["image_features"], dim=-1)
    assert torch.allclose(found, wanted, atol=1e-6)
