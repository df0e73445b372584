"""CLIP scores from tar sets: complete or refused, equal on any number of processes, results under clip-benchmark's keys."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit.data.tar_writer import ShardWriter
from mmkit.evaluation import collections
from mmkit.config import ConfigError
from mmkit.evaluation.clip_sets import check_names, during_training, open_set, results_of, score, score_all
from mmkit.evaluation.runner import Result
from mmkit.evaluation.tasks import clip_demo
from mmkit.evaluation.tasks.clip_demo import Towers

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def png(colour):
    out = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(out, "png")
    return out.getvalue()


def make_set(folder, documents, names=None, per_shard=4):
    with ShardWriter(str(folder / "test"), max_samples=per_shard) as writer:
        for i, (colour, fields) in enumerate(documents):
            writer.write(f"s{i:04d}", {"png": png(COLOURS[colour])} | fields)
    for number, name in enumerate(sorted(writer.sizes)):
        (folder / "test" / name).rename(folder / "test" / f"{number}.tar")
    (folder / "test" / "nshards.txt").write_text(str(len(writer.sizes)))
    if names:
        (folder / "classnames.txt").write_text("\n".join(names))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))


def towers():
    """Sees colours and reads their names: always right."""

    def encode(batch):
        out = {}
        if "image" in batch:
            out["image_features"] = batch["image"].mean((2, 3))
        if "text" in batch:
            out["text_features"] = torch.eye(3)[batch["text"][:, 0]] + 0.01 * batch["text"][:, 1:]
        return out

    def tokenize(texts):
        rows = [[next((i for i, name in enumerate(COLOURS) if name in text), 0), len(text) % 7] for text in texts]
        return torch.tensor(rows)

    return Towers(encode, tokenize, lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255)


@pytest.fixture
def root(tmp_path):
    colours = list(COLOURS) * 3
    make_set(tmp_path / "wds_stl10", [(c, {"cls": str(list(COLOURS).index(c))}) for c in colours], COLOURS)
    make_set(tmp_path / "wds_flickr8k", [(c, {"txt": f"a {c} thing\nsomething {c}\n"}) for c in COLOURS])
    multi = [(c, {"cls": f"{list(COLOURS).index(c)} 0"}) for c in COLOURS]
    make_set(tmp_path / "wds_voc2007_multilabel", multi, COLOURS)
    return str(tmp_path)


def test_a_set_is_scored_under_clip_benchmarks_keys(root):
    row = score("stl10", root, towers(), model="toy", pretrained="none", batch=2, check=False)
    assert row == {
        "dataset": "stl10", "model": "toy", "pretrained": "none", "task": "zeroshot_classification", "language": "en",
        "metrics": {"acc1": 1.0, "acc5": None, "mean_per_class_recall": 1.0},
    }  # fmt: skip


def test_retrieval_with_several_captions_and_multi_label_sets(root):
    metrics = score("flickr8k", root, towers(), model="m", pretrained="p", check=False)["metrics"]
    assert metrics["image_retrieval_recall@1"] == metrics["text_retrieval_recall@5"] == 1
    metrics = score("voc2007_multilabel", root, towers(), model="m", pretrained="p", check=False)["metrics"]
    assert 0.5 < metrics["mean_average_precision"] <= 1


def test_an_incomplete_set_gives_an_error_and_no_score(root, tmp_path):
    transform = towers().transform
    with pytest.raises(ValueError, match="9 documents in .*, a complete set has 8000"):
        open_set("stl10", root, transform)
    (tmp_path / "wds_stl10" / "test" / "1.tar").unlink()
    with pytest.raises(ValueError, match="1.tar"):
        open_set("stl10", root, transform, limit_check=False)
    (tmp_path / "wds_stl10" / "test" / "nshards.txt").unlink()
    with pytest.raises(ValueError, match="number of shards is not known"):
        open_set("stl10", root, transform, limit_check=False)
    with pytest.raises(ValueError, match="nshards"):
        open_set("cars", root, transform)


def test_a_complete_set_passes(root, monkeypatch):
    whole = dict(collections.tasks())
    whole["stl10"] = collections.CollectionTask("stl10", "zeroshot_classification", 9, {}, {})
    monkeypatch.setattr(collections, "tasks", lambda: whole)
    documents, names = open_set("stl10", root, towers().transform)
    assert len(documents) == 9 and names == tuple(COLOURS) and documents[1][2] == 1


def test_every_task_gets_its_own_file(root, tmp_path):
    found = score_all(["stl10", "flickr8k"], root, towers(), f"{tmp_path}/out/{{dataset}}.json", model="m", pretrained="p", check=False)
    assert set(found) == {"stl10", "flickr8k"}
    assert json.loads((tmp_path / "out" / "stl10.json").read_text())["metrics"] == found["stl10"]


def test_evaluation_during_training_goes_through_the_wrapped_objective(monkeypatch):
    calls = []

    def task(towers, *, batch, share, limit=None):
        towers.encode({"image": torch.zeros(batch, 1)})
        return Result("fake", {}, "", 1, "m", {"m": share.rank + 0.5})

    def objective(batch, mode):
        calls.append((mode, len(batch["image"])))
        return {"image_features": batch["image"]}

    monkeypatch.setitem(clip_demo.CLIP_TASKS, "fake", task)
    backend = SimpleNamespace(rank=1, world=2, devices=3, all_objects=lambda value: [value], shard=lambda tensors: tensors)
    scores = during_training(None, [None], ["fake"], batch=4)(SimpleNamespace(backend=backend, objective=objective))
    assert scores == {"fake_m": 1.5} and calls == [("encode", 6)]


def test_sets_and_collections_are_tasks_beside_what_the_public_models_reached(root, monkeypatch):
    whole = dict(collections.tasks())
    for name, n in (("stl10", 9), ("flickr8k", 3)):
        whole[name] = collections.CollectionTask(name, whole[name].kind, n, whole[name].laion2b, whole[name].openai)
    monkeypatch.setattr(collections, "tasks", lambda: whole)
    monkeypatch.setattr(collections, "COLLECTIONS", {"pair": ("stl10", "flickr8k")})
    monkeypatch.setenv("MMKIT_EVAL_DATA", root)
    check_names(["pair", "clip_retrieval"])
    classes, pairs = results_of(["pair"], towers(), batch=2)
    assert (classes.task, classes.n, classes.score, pairs.main_metric, pairs.score) == ("stl10", 9, 1.0, "image_retrieval_recall@5", 1.0)
    assert 0.9 < classes.controls["laion2b_l14"]["metrics"]["acc1"] < 1 and classes.metrics.keys() == {"acc1", "mean_per_class_recall"}
    with pytest.raises(ConfigError, match="whole or not at all"):
        results_of(["stl10"], towers(), limit=2)


def test_a_set_that_is_not_here_is_missed_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"task 'vtab': no set at .*wds_vtab-caltech101; .*MMKIT_EVAL_DATA"):
        check_names(["vtab"])
    check_names(["vtab"], present=False)
    with pytest.raises(ConfigError, match="no task 'imagenet1'; did you mean 'imagenet1k'"):
        check_names(["imagenet1"])
