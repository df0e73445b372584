"""Held-out data while training: the same loss as a plain loop, training as if it were not there, what is refused before it begins."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mmkit.config import IGNORE_INDEX, ConfigError, DataConfig, SourceConfig, load
from mmkit.launch.preflight import check_examples, preflight
from mmkit.training.loop import train
from tests.training.tiny_clip import clip_run, shards
from tests.training.tiny_run import tiny_run

LORA = {"rank": 2, "alpha": 4, "dropout": 0.5, "targets": ["q_proj", "v_proj"]}


def lines(run):
    return [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]


def training_part(rows):
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["targets"], row["total_samples"]) for row in rows]


def one_by_one(run):
    """An on_eval: loss and accuracy of the run's held-out conversations, each alone in its batch, by the labels of its ids."""
    from mmkit.data.loader import loader
    from mmkit.models.build import image_transforms, tokenizer

    data = run.data.model_copy(update={"sources": run.data.validation, "pack": False})

    def measured(state):
        losses, right = [], []
        for batch in loader(data, run.model, tokenizer(run.model), image_transforms(run.model), train=False, device_batch=1):
            ids, labels, real = (batch.tensors[name][0] for name in ("input_ids", "labels", "segments"))
            with torch.no_grad():
                logits = state.model.logits(state.model(batch.tensors))[0]
            before = None
            for place in range(len(ids)):
                if labels[place] != IGNORE_INDEX and before is not None:
                    losses.append(-logits[before].log_softmax(-1)[labels[place]].item())
                    right.append(int(logits[before].argmax() == labels[place]))
                before = place if real[place] else before
        return {"reference": sum(losses) / len(losses), "right": sum(right) / len(right), "tokens": len(losses)}

    return measured


@pytest.mark.parametrize("settings", [{}, {"pack": True, "device_batch": 4, "loss_chunk": 16}])
def test_the_loss_is_that_of_every_held_out_token_once(tmp_path, settings):
    run = tiny_run(tmp_path, steps=3, held_out=7, eval_every=2, lora=LORA, trainable=["connector"], **settings)
    train(run, on_eval=one_by_one(run))
    rows = lines(run)
    assert ["eval_loss" in row for row in rows] == [False, True, False]
    assert rows[1]["eval_loss"] == pytest.approx(rows[1]["eval_reference"], rel=1e-5) and rows[1]["eval_tokens"] > 50
    assert rows[1]["eval_accuracy"] == pytest.approx(rows[1]["eval_right"], abs=1e-6)
    assert 0 < rows[1]["eval_seconds"] < 60
    facts = json.loads(Path(run.folder, "environment.json").read_text())
    assert facts["validation"]["summary"].startswith("7 samples in 1 sources")


def test_training_does_not_notice_that_it_is_measured(tmp_path):
    settings = {"lora": LORA, "trainable": ["connector"], "workers": 1, "steps": 3}  # workers are seeded by torch's generator
    watched = tiny_run(tmp_path, name="watched", held_out=5, eval_every=1, **settings)
    alone = tiny_run(tmp_path, name="alone", **settings)
    train(watched)
    train(alone)
    assert training_part(lines(watched)) == training_part(lines(alone)) and lines(watched)[0]["eval_loss"] != lines(watched)[1]["eval_loss"]


def test_the_best_validation_loss_decides_checkpoint_and_plateau(tmp_path):
    plateau = {"optimizer": {"lr": 1e-9, "warmup": 0, "schedule": "plateau"}, "checkpoint": {"best_metric": "eval_loss", "keep_last": 1}}
    run = tiny_run(tmp_path, steps=6, held_out=3, eval_every=1, **plateau)
    train(run)
    assert [row["lr"] for row in lines(run)] == [1e-9] * 4 + [5e-10] * 2  # nothing learnt: cut after the patience
    assert lines(run)[-1]["eval_loss"] == pytest.approx(lines(run)[0]["eval_loss"], rel=1e-4)


# ---------------------------------------------------------------- pairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Folders of shards: training pairs; 29 held-out ones, of which one picture does not open."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MMKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield shards(tmp_path_factory.mktemp("pairs")), shards(tmp_path_factory.mktemp("other"), n=29, per_shard=10, broken=4)
    patch.undo()


def pair_loss(run, kind):
    """An on_eval: the mean over consecutive global batches of usable held-out pairs, each encoded alone, logit by logit."""
    from mmkit.data.images import ImageError, open_image
    from mmkit.data.readers import open_source
    from mmkit.models.build import image_transforms, tokenizer

    (transform,), words = image_transforms(run.model), tokenizer(run.model)
    source, pairs = open_source(run.data.validation[0], run.data), []
    for place in range(len(source)):
        try:
            pairs.append((transform(open_image(source[place].images[0])), words([source[place].caption])[0]))
        except ImageError:
            pairs.append(None)

    def measured(state):
        total, count = 0.0, 0
        for start in range(0, len(pairs), run.train.global_batch):
            part = [pair for pair in pairs[start : start + run.train.global_batch] if pair]
            with torch.no_grad():
                out = [state.model({"image": image[None], "text": text[None]}) for image, text in part]
                image, text = (torch.cat([one[f"{tower}_features"] for one in out]) for tower in ("image", "text"))
                logits = out[0]["logit_scale"] * image @ text.T
            own = torch.arange(len(part))
            if kind == "siglip":
                bias = float(out[0]["logit_bias"].detach())
                total += sum(
                    math.log1p(math.exp((-1 if i == j else 1) * float(logits[i, j] + bias))) for i in own for j in own
                )
            else:
                total += float(F.cross_entropy(logits, own, reduction="sum") + F.cross_entropy(logits.T, own, reduction="sum")) / 2
            count += len(part)
        return {"reference": total / count, "pairs": count}

    return measured


@pytest.mark.parametrize(("kind", "device_batch"), [("clip", 12), ("siglip", 4)])
def test_the_loss_of_pairs_is_that_of_global_batches_whatever_the_micro_batch(tmp_path, pairs, kind, device_batch):
    model = {"patch_dropout": 0.5} | ({"init_logit_bias": -10.0} if kind == "siglip" else {})
    settings = {"model": model, "contrastive": {"kind": kind}, "device_batch": device_batch, "steps": 2}
    run = clip_run(tmp_path, *pairs, eval_every=1, **settings)
    train(run, on_eval=pair_loss(run, kind))
    for row in lines(run):
        assert row["eval_loss"] == pytest.approx(row["eval_reference"], rel=1e-5) and row["eval_pairs"] == 28
    alone = clip_run(tmp_path, pairs[0], **settings, name="alone")
    train(alone)
    assert training_part(lines(alone)) == training_part(lines(run))


# ---------------------------------------------------------------- before the run


PLATEAU = {"optimizer": {"schedule": "plateau"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PLATEAU, "schedule 'plateau' needs a measurement, but train.eval_every is 0"),
        ({"checkpoint": {"best_metric": "eval_loss"}, "held_out": 2}, "best_metric 'eval_loss' needs a measurement, but"),
        ({"eval_every": 2}, "train.eval_every is 2, but nothing is measured: name held-out sources in data.validation"),
        ({"eval_every": 2, **PLATEAU}, "nothing is measured"),
        ({"eval_every": 1, "held_out": 2, "checkpoint": {"best_metric": "eval_recall"}}, "measured are eval_loss, eval_accuracy"),
        ({"eval_every": 1, "held_out": 2, "checkpoint": {"best_metric": "loss"}, **PLATEAU}, "'loss' is one of training; name an"),
        ({"checkpoint": {"best_metric": "loss"}}, "best_metric 'loss' chooses among checkpoints, but only that of the end is written"),
        ({"eval_every": 1, "held_out": 2, "checkpoint": {"best_mode": "max"}}, "best_mode 'max' goes with a best_metric of which"),
    ],
)
def test_watching_what_is_not_measured_is_refused_before_anything_is_read(tmp_path, settings, message):
    run = tiny_run(tmp_path, **settings)
    for begin in (train, preflight):
        with pytest.raises(ConfigError, match=message):
            begin(run)
    assert not Path(run.folder).exists()


def test_a_contrastive_plateau_needs_held_out_pairs_or_the_name_of_a_task_metric(tmp_path):
    from mmkit.launch.launch import evaluation_of

    with pytest.raises(ConfigError, match="'plateau' watches 'eval_loss', which is not measured: name held-out sources"):
        preflight(clip_run(tmp_path, "none.tar", eval_every=1, **PLATEAU))
    best = {"best_metric": "eval_clip_retrival_R@1", "best_mode": "max"}
    with pytest.raises(ConfigError, match="is of no task of evaluation.tasks; did you mean 'eval_clip_retrieval'"):
        evaluation_of(clip_run(tmp_path, "none.tar", eval_every=1, checkpoint=best, **PLATEAU))


def test_a_training_value_that_decides_the_best_must_be_one(tmp_path):
    assert train(tiny_run(tmp_path, steps=1, checkpoint={"best_metric": "loss", "save_every": 1})).reason == "done"
    with pytest.raises(ConfigError, match="best_metric 'lost' is not measured; a line has step, loss"):
        train(tiny_run(tmp_path, name="other", steps=2, checkpoint={"best_metric": "lost", "save_every": 1}))


def held_out_from(run, **source):
    entry = {"name": "held", "format": run.data.sources[0].format, "path": run.data.sources[0].path, **source}
    return run.model_copy(update={"data": DataConfig(**run.data.model_dump() | {"validation": [entry]})})


def test_what_is_trained_on_is_not_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tiny_run(tmp_path, eval_every=1)
    for source in ({}, {"split": "test"}, {"path": "data.json"}):  # a JSON file has no splits
        with pytest.raises(ConfigError, match=r"data.validation 'held' is trained on too: data.sources 'made' has .*data.json as well"):
            preflight(held_out_from(run, **source))
    tars = clip_run(tmp_path, "pairs/{000..010}.tar", eval_every=1)
    with pytest.raises(ConfigError, match="'pairs' has pairs/010.tar as well; hold out another split, file or shards"):
        preflight(held_out_from(tars, path="pairs/{010..012}.tar"))
    packs = load("tiny", "finetune", {"eval_every": 1})
    with pytest.raises(ConfigError, match="trained on too: data.sources 'easy_vqa'"):
        preflight(held_out_from(packs, split="train_balanced"))
    with pytest.raises(ConfigError, match="data.validation 'held' has a weight, but every held-out sample counts once"):
        preflight(held_out_from(packs, split="test", weight=0.5))


def test_held_out_data_that_are_not_there_stop_a_run_before_it_starts(tmp_path):
    run = held_out_from(tiny_run(tmp_path, eval_every=1), path=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="validation source 'held': .*none.json"):
        preflight(run)
    with pytest.raises(ConfigError, match="none.json"):
        train(run)
    rows = check_examples(run)
    assert [(row["source"], row["use"], row["bad"]) for row in rows] == [("made", "training", 0), ("held", "validation", 1)]


def test_errors_of_held_out_sources_name_their_setting():
    from mmkit.data.readers import open_validation

    with pytest.raises(ConfigError, match="data.validation 'x': file /none.csv does not exist"):
        open_validation(DataConfig(validation=(SourceConfig(name="x", format="csv", path="/none.csv"),)))
