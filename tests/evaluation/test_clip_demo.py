"""Retrieval and zero-shot of the offline pairs, with towers whose features are known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmkit.data.example import Example, ImageRef, Turn
from mmkit.evaluation.tasks import clip_demo, pack_documents
from mmkit.evaluation.tasks.clip_demo import Towers

LABELS = ("bird", "bird", "tool", "bird", "tool", "")


def facts(label: str) -> dict[str, str]:
    """What a task reads of a document."""
    return {"label": label, "concept": "x"}


@pytest.fixture
def towers(monkeypatch):
    """Six pairs; a picture is its number, a caption is its number's one-hot vector, a class prompt points at its pictures."""
    documents = tuple(
        Example(f"p{i}", (ImageRef(b"", name=str(i)),), (Turn("user", "<image>"), Turn("assistant", f"thing {i}")), meta=facts(label))
        for i, label in enumerate(LABELS)
    )
    monkeypatch.setattr(pack_documents, "everything", lambda pack: documents)
    monkeypatch.setattr(clip_demo, "open_image", lambda ref: int(ref.name))

    def tokenize(texts):
        return torch.tensor([[int(text.split()[-1]) if text.split()[-1].isdigit() else 100 + ("tool" in text)] for text in texts])

    def encode(batch):
        out = {}
        if "image" in batch:
            out["image_features"] = F.one_hot(batch["image"].long()[:, 0], 6).float()
        if "text" in batch:
            kind = batch["text"][:, 0]
            birds = torch.tensor([1.0, 1, 0, 1, 0, 0])
            rows = [F.one_hot(k, 6).float() if k < 100 else (birds if k == 100 else 1 - birds) for k in kind]
            out["text_features"] = torch.stack(rows)
        return out

    return Towers(encode, tokenize, lambda number: torch.tensor([float(number)]))


def test_perfect_towers_find_every_caption_beside_chance(towers):
    result = clip_demo.retrieve(towers, batch=4)
    assert result.score == result.metrics["text_to_image_R@1"] == 1 and result.n == 6
    assert result.controls["chance"]["metrics"]["image_to_text_R@5"] == pytest.approx(5 / 6)
    assert [row["answer"] for row in result.rows] == [f"thing {i}" for i in range(6)] and len(result.spec_hash) == 12


def test_zero_shot_leaves_out_pictures_without_a_class_and_names_the_majority(towers):
    result = clip_demo.classify(towers, batch=4)
    assert result.n == 5 and result.score == 1 and result.controls["majority"]["metrics"]["acc1"] == 0.6
    assert result.controls["chance"]["metrics"]["acc1"] == 0.5 and result.spec["classes"] == ["bird", "tool"]
    assert {row["answer"] for row in result.rows} == {"bird", "tool"} and clip_demo.classify(towers, limit=2).n == 2
