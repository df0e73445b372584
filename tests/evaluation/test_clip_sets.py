"""CLIP scores from tar sets: complete or refused, equal on any number of processes, results under clip-benchmark's keys."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit.config import ConfigError, load
from mmkit.data.tar_writer import ShardWriter
from mmkit.errors import InputError
from mmkit.evaluation import collections
from mmkit.evaluation.clip_sets import check_names, during_training, look, open_set, results_of, score
from mmkit.evaluation.runner import Result
from mmkit.evaluation.scoring import check_documents
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


@pytest.fixture
def complete(monkeypatch):
    """The sets of `root` count as complete ones."""
    whole = dict(collections.tasks())
    for name, n in (("stl10", 9), ("flickr8k", 3), ("voc2007_multilabel", 3)):
        whole[name] = collections.CollectionTask(name, whole[name].kind, n, whole[name].laion2b, whole[name].openai)
    monkeypatch.setattr(collections, "tasks", lambda: whole)


def test_a_set_is_scored_under_clip_benchmarks_keys(root, complete):
    assert score("stl10", root, towers(), batch=2) == {"acc1": 1.0, "acc5": None, "mean_per_class_recall": 1.0}


def test_retrieval_with_several_captions_and_multi_label_sets(root, complete):
    metrics = score("flickr8k", root, towers())
    assert metrics["image_retrieval_recall@1"] == metrics["text_retrieval_recall@5"] == 1
    metrics = score("voc2007_multilabel", root, towers())
    assert 0.5 < metrics["mean_average_precision"] <= 1


def test_an_incomplete_set_gives_an_error_and_no_score(root, tmp_path):
    transform = towers().transform
    with pytest.raises(ValueError, match="9 documents in .*, a complete set has 8000"):
        open_set("stl10", root, transform)
    (tmp_path / "wds_stl10" / "test" / "1.tar").unlink()
    with pytest.raises(ValueError, match="1.tar"):
        open_set("stl10", root, transform)
    (tmp_path / "wds_stl10" / "test" / "nshards.txt").unlink()
    with pytest.raises(ValueError, match="number of shards is not known"):
        open_set("stl10", root, transform)
    with pytest.raises(ValueError, match="nshards"):
        open_set("cars", root, transform)


def test_a_complete_set_passes(root, complete):
    documents, names = open_set("stl10", root, towers().transform)
    assert len(documents) == 9 and names == tuple(COLOURS) and documents[1][2] == 1


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


def test_sets_and_collections_are_tasks_beside_what_the_public_models_reached(root, complete, monkeypatch):
    monkeypatch.setattr(collections, "COLLECTIONS", {"retrieval": ("stl10", "flickr8k"), "few": ("stl10", "voc2007_multilabel")})
    monkeypatch.setenv("MMKIT_EVAL_DATA", root)
    check_names(["few", "retrieval", "clip_retrieval"])
    classes, pairs = results_of(["retrieval"], towers(), batch=2)
    assert (classes.task, classes.n, classes.score, pairs.main_metric, pairs.score) == ("stl10", 9, 1.0, "image_retrieval_recall@5", 1.0)
    assert 0.9 < classes.controls["laion2b_l14"]["metrics"]["acc1"] < 1 and classes.metrics.keys() == {"acc1", "mean_per_class_recall"}
    assert classes.interval == pytest.approx((0.7009, 1.0), abs=1e-4) and classes.n == classes.n_total  # 9 of 9: Wilson
    with pytest.raises(ConfigError, match="whole or not at all"):
        look(["stl10"], limit=2)
    *_, precision, average = results_of(["few"], towers(), batch=2)
    assert precision.interval is None and (average.task, average.n, average.score) == ("few", 2, 1.0)
    assert average.controls["openai_l14"]["metrics"] == {"acc1": 0.9938}  # stl10's: multi-label sets are left out


def test_a_set_that_is_not_here_is_missed_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"task 'vtab': no set at .*wds_vtab-caltech101; .*MMKIT_EVAL_DATA"):
        check_names(["vtab"])
    check_names(["vtab"], present=False)
    with pytest.raises(ConfigError, match="no task 'imagenet1'; did you mean 'imagenet1k'"):
        check_names(["imagenet1"])


# ---------------------------------------------------------------- classes and names


def classes(tmp_path, numbers, names):
    """A set of stl10's name whose samples have these classes."""
    make_set(tmp_path / "wds_stl10", [("red", {"cls": str(number)}) for number in numbers])
    (tmp_path / "wds_stl10" / "classnames.txt").write_text(names)


@pytest.mark.parametrize(
    ("numbers", "names", "words"),
    [
        ((1, 2, 3), "red\ngreen\nblue\n", r"1 of 3 samples .*s0002.png: cls is 3\. .*classnames.txt has 3 names, of the classes 0 to 2, and cls goes "
         "from 1 to 3; the classes seem to be counted from 1"),
        ((0, 1, 2), "red\ngreen\n", "cls is 2.* has 2 names, of the classes 0 to 1, and cls goes from 0 to 2$"),
        ((0, -1, 1), "red\ngreen\n", "cls is -1"),
        ((0, "cat", "1.5"), "red\ngreen\n", "2 of 3 samples .*s0001.png: cls is 'cat', no class number"),
        ((0, 1, 2), "red\n\nblue", r"line 2 of .*classnames.txt is empty"),
        ((0, 1, 2), "\nred\nblue\n", r"line 1 of .*classnames.txt is empty"),
        ((0, 1, 2), "red\nblue\n red \n", r"lines 1 and 3 of .*classnames.txt are both 'red'"),
    ],
)  # fmt: skip
def test_classes_that_do_not_fit_the_names_are_refused_before_weights_are_read(tmp_path, monkeypatch, numbers, names, words):
    complete_of(monkeypatch, stl10=3)
    classes(tmp_path, numbers, names)
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    with pytest.raises(InputError, match=f"^stl10: .*{words}"):
        check_documents(load("clip-tiny", "eval", {"tasks": ["stl10"]}))


def complete_of(monkeypatch, **sizes):
    whole = dict(collections.tasks())
    for name, n in sizes.items():
        whole[name] = collections.CollectionTask(name, whole[name].kind, n, whole[name].laion2b, whole[name].openai)
    monkeypatch.setattr(collections, "tasks", lambda: whole)


def test_a_set_in_a_bucket_is_refused_where_its_classes_are_first_read(tmp_path, monkeypatch):
    complete_of(monkeypatch, stl10=3)
    classes(tmp_path, (0, 1, 2), "red\ngreen\n")
    with pytest.raises(InputError, match="task stl10: s0002 has class 2, but there are 2 names"):
        score("stl10", str(tmp_path), towers())


def test_names_without_a_sample_are_told(tmp_path, monkeypatch, caplog):
    complete_of(monkeypatch, stl10=3)
    classes(tmp_path, (0, 1, 0), "red\ngreen\nblue\n")
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    (row,) = check_documents(load("clip-tiny", "eval", {"tasks": ["stl10"]}))
    assert row == {"task": "stl10", "documents": 3, "asked": 3, "pictures": 3, "state": "ok"}
    assert "stl10: 1 of the 3 classes of " in caplog.text and "have no sample (blue)" in caplog.text


def test_retrieval_sets_and_pictures_are_looked_at_too(tmp_path, monkeypatch):
    complete_of(monkeypatch, flickr8k=2, voc2007_multilabel=2)
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    make_set(tmp_path / "wds_flickr8k", [("red", {"txt": "a red thing"}), ("blue", {"txt": " \n"})])
    make_set(tmp_path / "wds_voc2007_multilabel", [("red", {"cls": "0,1"}), ("blue", {"cls": "2", "png": b"no picture"})], COLOURS)
    with pytest.raises(InputError) as error:
        check_documents(load("clip-tiny", "eval", {"tasks": ["flickr8k", "voc2007_multilabel"]}))
    *pairs, labels = str(error.value).split("\n")
    assert "50.0% of the samples are damaged" in pairs[0] and "left out: 1 empty text" in "".join(pairs)
    assert labels.startswith("voc2007_multilabel: 1 of 2 samples") and "is of no known image format" in labels


def test_a_dry_run_says_which_sets_are_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    rows = check_documents(load("clip-tiny", "eval", {"tasks": ["imagenet_robustness"], "dry_run": True}))
    assert [row["task"] for row in rows] == list(collections.ROBUSTNESS) and all(row["state"].startswith("not here: ") for row in rows)


def test_names_are_part_of_the_spec(tmp_path, monkeypatch):
    complete_of(monkeypatch, stl10=3)
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    monkeypatch.setattr(collections, "COLLECTIONS", {"few": ("stl10",)})
    specs = []
    for names in ("red\ngreen\nblue", "red\ngreen\nnavy"):
        classes(tmp_path, (0, 1, 2), names)
        specs.append([result.spec_hash for result in results_of(["few"], towers())])
    assert len({one for both in specs for one in both}) == 4  # the set's and its average's
