"""A whole run in a bucket: shards read from it; checkpoints, metrics, export, figures and records written to it; resumed from it."""

from __future__ import annotations

import json

import pytest
import torch

from mmkit.config import ConfigError, changed
from mmkit.data.loader import loader
from mmkit.evaluation.scoring import export_of
from mmkit.figures.runs import curves
from mmkit.launch.launch import follow, launch, read_metrics
from mmkit.models.pretrained import from_pretrained
from mmkit.notebook.record import read_record, record
from mmkit.notebook.run_view import trained_groups
from mmkit.storage import Store, fetched, retried
from mmkit.training.loop import train
from mmkit.training.metrics import MetricsFile
from mmkit.training.stability import events
from tests.bucket import on_each_store, serving, use
from tests.training.tiny_clip import clip_run, shards

@pytest.fixture(scope="module")
def proxy(request):
    with serving(getattr(request, "param", "s3")) as made:
        yield made


@pytest.fixture
def bucket(proxy, tmp_path, monkeypatch):
    use(proxy, tmp_path / "cache", monkeypatch)
    if Store(f"{proxy.url}/shards").size("sizes.json") is None:
        shards(f"{proxy.url}/shards")
    yield proxy
    proxy.cuts = 0


def losses(folder) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]


def in_bucket(bucket, tmp_path, name: str, **settings):
    data = f"{bucket.url}/shards/{{00000..00003}}.tar"
    return changed(clip_run(tmp_path, data, name=name, **settings), root=f"{bucket.url}/runs")


@on_each_store
def test_a_run_in_a_bucket_equals_a_local_one_and_goes_on_from_there(bucket, tmp_path):
    local = clip_run(tmp_path, shards(tmp_path / "shards"), steps=6)
    train(local)
    settings = {"checkpoint": {"save_every": 2, "keep_last": 2}}
    half = train(in_bucket(bucket, tmp_path, "a", steps=4, **settings))
    assert half.reason == "done"
    run = in_bucket(bucket, tmp_path, "a", steps=6, **settings)
    bucket.cuts = 2
    result = launch(run)
    assert losses(run.folder) == losses(local.folder) and [line["step"] for line in read_metrics(run.folder)] == [1, 2, 3, 4, 5, 6]
    assert Store(f"{run.folder}/checkpoints").folders() == ["step-00000004", "step-00000006"]
    assert {"config.yaml", "environment.json", "metrics.jsonl"} == set(Store(run.folder).files())
    assert result.export == f"{run.folder}/export" == export_of(run) and result.steps == 6
    model, _ = from_pretrained(result.export)
    other, _ = from_pretrained(f"{local.folder}/export")
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    following = changed(in_bucket(bucket, tmp_path, "b", steps=1), start_from=run.folder)
    assert train(following).reason == "done" and losses(following.folder)[0] < losses(run.folder)[0]


def test_what_is_shown_and_recorded_lies_in_the_bucket_too(bucket, tmp_path):
    result = launch(in_bucket(bucket, tmp_path, "shown", steps=2))
    assert trained_groups(result) and str(curves(result.folder).table["run"][0]) == "test/pretrain"
    table = record("02_pretrain", result.run, {"loss": 1.0}, {"curves": curves(result.folder)})
    assert f"{result.folder}/record-02_pretrain.json" in str(table)
    found = read_record("02_pretrain", result.run)
    assert found["figures"]["curves"] == f"{result.folder}/figures/training.png"
    assert Store(f"{result.folder}/figures").files() == ["training.csv", "training.png"]


def test_starting_anew_keeps_the_old_checkpoints_and_a_spike_leaves_its_event(bucket, tmp_path):
    run = in_bucket(bucket, tmp_path, "anew", steps=2)
    train(run)
    spiking = changed(run, resume="never", train__stability__action="stop", train__optimizer__lr=float("1e30"), train__steps=6)
    assert train(spiking).reason == "non-finite loss"
    assert Store(run.folder).folders() == ["checkpoints.before-1", "stability"]
    aside = Store(f"{run.folder}/checkpoints.before-1")
    assert aside.folders() == ["export", "step-00000002"] and aside.files() == ["config.yaml", "environment.json", "metrics.jsonl"]
    assert from_pretrained(aside.path("export"))
    assert events(run.folder)[0]["decision"]["action"] == "stop"


def test_a_shard_that_no_longer_answers_is_named_and_the_rest_is_read(bucket, tmp_path, monkeypatch):
    from mmkit.data import tar_files

    run = in_bucket(bucket, tmp_path, "flaky")
    data = changed(run, data__max_bad_share=0.5).data
    fetch = tar_files._fetch

    def dead(url, offset, size):
        if "00002" in url:
            raise ConnectionResetError("reset by peer")
        return fetch(url, offset, size)

    words = lambda texts: torch.ones(len(texts), 4, dtype=torch.int64)  # noqa: E731
    picture = lambda image: torch.zeros(3, 16, 16)  # noqa: E731
    made = loader(data, run.model, words, [picture], train=False, device_batch=12)  # every shard is indexed while all answer
    monkeypatch.setattr(tar_files, "_fetch", dead)
    with made:
        batches = list(made)
        assert set(made.counts["bad"]) == {"unreadable shard"}
    problems = [problem for batch in batches for problem in batch.problems]
    assert {problem.key for problem in problems} == {f"{i:04d}" for i in range(24, 36)}
    assert all("s3://pairs/shards/00002.tar: still failing after" in problem.message for problem in problems)
    first, *others = [problem.message for problem in problems]
    assert "after 5 attempts" in first and all("after 1 attempt " in other for other in others)  # the rest do not wait as long again
    assert {key for batch in batches for key in batch.keys if key} >= {f"{i:04d}" for i in (*range(24), *range(36, 48))}


@on_each_store
def test_lines_of_metrics_are_there_before_a_checkpoint_and_an_unreachable_store_does_not_end_the_run(bucket, tmp_path, monkeypatch, caplog):
    folder = f"{bucket.url}/lines"
    file = MetricsFile(folder)
    file.write({"step": 1})
    assert read_metrics(folder) == []
    file.flush()
    lines = follow(f"{folder}/metrics.jsonl")
    assert next(lines) == [{"step": 1}]
    with monkeypatch.context() as patch:
        patch.setattr(file.store.fs, "pipe_file", lambda *args: (_ for _ in ()).throw(ConnectionResetError("reset by peer")))
        file.write({"step": 2})
        file.flush()
    assert "not uploaded, the next upload holds its lines" in caplog.text and next(lines) == []
    file.close()
    assert next(lines) == [{"step": 2}] and next(lines) == []
    MetricsFile(folder, last_step=1).close()
    assert read_metrics(folder) == [{"step": 1}]


@on_each_store
def test_a_remote_folder_is_fetched_once_and_again_when_it_changes(bucket, monkeypatch):
    store = Store(f"{bucket.url}/things")
    store.write("a/b.json", json.dumps([1]).encode())
    store.write("c.txt", b"c")
    first = fetched(f"{bucket.url}/things")
    assert (first / "a/b.json").read_text() == "[1]" and (first / "c.txt").read_text() == "c"
    with monkeypatch.context() as patch:
        patch.setattr(type(store.fs), "get_file", None)
        assert fetched(f"{bucket.url}/things/") == first
    store.write("a/b.json", b"[2, 3]")
    second = fetched(f"{bucket.url}/things")
    assert (second / "a/b.json").read_text() == "[2, 3]" and not first.exists()
    assert fetched(f"{bucket.url}/things/c.txt").read_text() == "c"
    with pytest.raises(FileNotFoundError, match="holds no files"):
        fetched(f"{bucket.url}/nothing")


def test_a_store_without_its_package_names_the_extra_and_googles_errors_are_tried_again(monkeypatch):
    retry = pytest.importorskip("gcsfs.retry")
    answers = iter([retry.HttpError({"code": 503, "message": "busy"}), None])

    def ask():
        if answer := next(answers):
            raise answer
        return "data"

    assert retried(ask, "gs://a/b", first_wait=0.01) == "data"
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (_ for _ in ()).throw(ImportError("Please install gcsfs")))
    with pytest.raises(ConfigError, match=r"gs://a/b: Please install gcsfs; pip install 'mmkit\[gcs\]'"):
        Store("gs://a/b")
