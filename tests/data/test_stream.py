"""Shards streamed without an index of the set: only what is read is opened, the order is exact, nothing is lost in silence."""

import io
import json
import logging
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit.config import ClipConfig, ConfigError, DataConfig, FilterRule, SourceConfig, changed
from mmkit.data import dealing
from mmkit.data import stream as streaming
from mmkit.data.loader import loader, training_source
from mmkit.data.mixture import Mixture
from mmkit.data.shard_sizes import known_samples, known_sizes
from mmkit.data.stream import ShardLog, ShardSet, check_enough, streamed
from mmkit.data.tar_writer import ShardWriter
from mmkit.launch import preflight
from mmkit.training.loop import train
from tests.training.tiny_clip import clip_run, shards

MODEL = ClipConfig(name="ViT-B-32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))


def png(number: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, 0, 0)).save(out, "png")
    return out.getvalue()


def write(folder, n=60, per_shard=10, meta=None, start=0):
    with ShardWriter(str(folder), max_samples=per_shard) as writer:
        for i in range(start, start + n):
            writer.write(f"{i:05d}", {"png": png(i), "txt": f"caption {i}"} | ({"json": meta(i)} if meta else {}))
    return str(folder)


def data_of(path, samples=60, **more):
    filters, settings = more.pop("filters", ()), {"resampled": True, "samples_per_epoch": samples} | more
    paths = [path] if isinstance(path, str) else path
    sources = tuple(SourceConfig(name=f"s{k}", format="webdataset", path=one, filters=filters) for k, one in enumerate(paths))
    return DataConfig(sources=sources, **settings)


class Tokens:
    def __call__(self, texts):
        return torch.tensor([[int(text.split()[-1])] for text in texts])


def pixel(image):
    return torch.tensor(np.array(image)[0, 0, :1], dtype=torch.float32)[:, None, None]


def read(data, state=None, rank=0, world=1, device_batch=5, seed=3):
    return loader(data, MODEL, Tokens(), [pixel], train=True, seed=seed, rank=rank, world=world, device_batch=device_batch, state=state)


def take(stream, n):
    return [next(stream) for _ in range(n)]


def keys(batches):
    return [key for batch in batches for key in batch.keys]


def equal(one, other):
    return one.keys == other.keys and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.fixture
def opened(monkeypatch):
    """Shards opened, in order."""
    found, real = [], streaming.opened_index
    monkeypatch.setattr(streaming, "opened_index", lambda url, *rest, **more: found.append(url) or real(url, *rest, **more))
    return found


# ---------------------------------------------------------------- when


def test_which_sources_are_streamed(tmp_path, monkeypatch, caplog):
    path = write(tmp_path / "a")
    assert isinstance(training_source(data_of(path), MODEL), ShardSet)
    assert isinstance(training_source(data_of(path), MODEL, train=False), Mixture)
    assert isinstance(training_source(data_of(path, cache_features=True), MODEL), Mixture)
    assert isinstance(training_source(data_of(path, resampled=False), MODEL), Mixture)
    monkeypatch.setattr(streaming, "MANY", 5)
    assert isinstance(training_source(data_of(path, resampled=False), MODEL), ShardSet)
    rule = (FilterRule(key="x", op="<", value=1, if_missing="keep"),)
    assert isinstance(training_source(data_of(path, resampled=False, filters=rule), MODEL), Mixture) and "leave out filters" in caplog.text
    capped = DataConfig(sources=(SourceConfig(name="a", format="webdataset", path=path, cap=3),), resampled=True, samples_per_epoch=9)
    assert isinstance(training_source(capped, MODEL), Mixture)
    (tmp_path / "a" / "sizes.json").unlink()
    assert isinstance(training_source(data_of(path, resampled=False), MODEL), Mixture)
    assert isinstance(training_source(data_of(path, None), MODEL), Mixture) and "set data.samples_per_epoch" in caplog.text


def test_sizes_come_from_the_files_that_writers_leave(tmp_path):
    path = write(tmp_path / "a")
    urls = [f"{path}/{k:05d}.tar" for k in range(6)]
    assert known_samples(urls) == 60 and known_samples(urls[:2]) == 20 and known_sizes(urls[4:1:-1]) == [10, 10, 10]
    os.remove(f"{path}/sizes.json")
    assert known_samples(urls) is None and known_samples(["pipe:cat x"]) is None
    (tmp_path / "a" / "__len__").write_text("61")
    assert known_samples(urls) == 61 and known_samples(urls[:2]) is None and known_sizes(urls) is None
    os.remove(f"{path}/__len__")
    for k in range(6):
        (tmp_path / "a" / f"{k:05d}_stats.json").write_text(json.dumps({"count": 20, "successes": 9}))
    assert known_samples(urls) == 54 and known_sizes(urls) == [9] * 6
    os.remove(f"{path}/00003_stats.json")
    assert known_samples(urls) is None
    assert streamed(data_of(write(tmp_path / "b"), None)).samples_per_epoch == 60


# ---------------------------------------------------------------- opening


def test_of_two_thousand_shards_only_those_read_are_opened(tmp_path, opened, monkeypatch):
    folder = tmp_path / "many"
    path = write(folder, n=40, per_shard=20)
    for k in range(2, 2000):
        os.link(folder / f"{k % 2:05d}.tar", folder / f"{k:05d}.tar")
    tracemalloc.start()
    stream = read(data_of(path + "/{00000..01999}.tar", 1_000_000))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 2000 * 1000 and opened == [f"{path}/00000.tar"]  # the first is looked at before training
    with stream:
        take(stream, 10)
        taken = len(opened)
        take(stream, 22)  # the rest of a group of eight shards of 20
    assert taken <= 1 + 2 * streaming.GROUP and len(opened) <= 1 + 2 * streaming.GROUP
    assert len(os.listdir(tmp_path / "cache" / "shards" / "sizes")) <= 2 * streaming.GROUP
    assert not [name for name in os.listdir(f"/proc/{os.getpid()}/fd") if "/many/" in _target(name)]


def _target(name):
    try:
        return os.readlink(f"/proc/{os.getpid()}/fd/{name}")
    except OSError:
        return ""


def test_every_reader_sees_what_the_shards_hold(tmp_path):
    batches = take(read(data_of(write(tmp_path / "a"))), 24)
    for batch in batches:
        for key, red, caption in zip(batch.keys, batch.tensors["image"][:, 0, 0, 0].tolist(), batch.tensors["text"][:, 0].tolist(), strict=True):
            assert int(key) == red == caption
    assert [batch.epoch for batch in batches] == [0] * 12 + [1] * 12
    assert keys(batches[:12]) != keys(batches[12:]) and len(set(keys(batches[:12]))) < 60  # with replacement


@pytest.mark.parametrize("source", ["pipe", "memory"])
def test_a_remote_shard_is_fetched_once_and_its_copy_goes(tmp_path, source):
    if source == "pipe":
        path = write(tmp_path / "a", n=10)
        path = f"pipe:echo x >> {tmp_path}/count; cat {path}/00000.tar"
    else:
        path = write("memory://streamed", n=10) + "/00000.tar"
    with read(data_of(path, 20)) as stream:
        assert sorted(keys(take(stream, 2))) == [f"{i:05d}" for i in range(10)] or source
    if source == "pipe":
        assert (tmp_path / "count").read_text().count("x") <= 3  # looked at, read, and perhaps drawn again
    assert os.listdir(tmp_path / "cache" / "shards") == ["sizes"]


# ---------------------------------------------------------------- order and position


@pytest.mark.parametrize("resampled", [True, False])
@pytest.mark.parametrize("workers, stop", [(0, 1), (0, 7), (2, 5), (2, 13)])
def test_a_stop_after_any_batch_goes_on_bit_identical(tmp_path, monkeypatch, resampled, workers, stop):
    monkeypatch.setattr(streaming, "MANY", 1)
    monkeypatch.setattr(streaming, "GROUP", 2)
    monkeypatch.setattr(dealing, "GROUP", 2)
    data = data_of(write(tmp_path / "a", n=64, per_shard=7), 62, resampled=resampled, workers=workers)
    with read(data) as whole:
        take(whole, stop)
        state, rest = json.loads(json.dumps(whole.state_dict())), take(whole, 12)
    with read(data, state) as resumed:
        assert all(equal(*pair) for pair in zip(rest, take(resumed, 12), strict=True))
    assert state["rows"] == state["samples"] == 5 * stop and state["epoch"] == (stop > 12)


def test_a_resumed_reader_passes_over_shards_without_opening_them(tmp_path, opened):
    data = data_of(write(tmp_path / "a", n=1000, per_shard=10), 1000)
    with read(data) as whole:
        take(whole, 100)
        state, rest = whole.state_dict(), take(whole, 3)
    before = len(opened)
    with read(data, state) as resumed:
        assert all(equal(*pair) for pair in zip(rest, take(resumed, 3), strict=True))
    assert len(opened) - before <= 1 + 2 * streaming.GROUP < before / 2
    for file in (tmp_path / "cache" / "shards" / "sizes").iterdir():
        file.unlink()
    with read(data, state) as elsewhere:  # a machine that has seen none of them
        assert all(equal(*pair) for pair in zip(rest, take(elsewhere, 3), strict=True))


def test_without_replacement_all_streams_together_read_every_shard_once_and_as_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MANY", 1)
    data = data_of(write(tmp_path / "a", n=120, per_shard=10), None, resampled=False, workers=2)
    seen = []
    for rank in range(2):
        with read(data, rank=rank, world=2) as stream:
            assert stream.steps_per_epoch == 12
            batches = take(stream, 13)
        assert [batch.epoch for batch in batches] == [0] * 12 + [1]
        seen += keys(batches[:12])
    assert sorted(seen) == [f"{i:05d}" for i in range(120)]


def read_on(data, layouts):
    """(keys read, last state) of (processes, workers, blocks) one after the other, each going on where the one before stopped."""
    state, seen = None, []
    for world, workers, blocks in layouts:
        states = []
        for rank in range(world):
            with read(data.model_copy(update={"workers": workers}), state, rank, world, device_batch=4) as stream:
                seen += keys(take(stream, blocks))
                states.append(json.loads(json.dumps(stream.state_dict())))
        assert all(other == states[0] for other in states)
        state = states[0]
    return seen, state


@pytest.mark.parametrize(
    "layouts",
    [
        [(2, 2, 25)], [(3, 1, 17)], [(1, 0, 3), (1, 0, 47)], [(2, 1, 3), (1, 2, 44)], [(1, 0, 3), (3, 0, 16)],
        [(1, 2, 7), (3, 0, 4), (2, 1, 5), (1, 0, 21)], [(3, 1, 18), (2, 0, 3), (1, 1, 40)],
    ],
)  # fmt: skip
def test_every_sample_of_a_streamed_epoch_comes_once_whoever_reads_on(tmp_path, monkeypatch, layouts):
    """200 samples in shards of 17, across stops, changes of processes and workers, and a batch that straddles two epochs."""
    monkeypatch.setattr(streaming, "MANY", 5)
    monkeypatch.setattr(dealing, "GROUP", 3)
    data = data_of(write(tmp_path / "a", n=200, per_shard=17), None, resampled=False)
    seen, state = read_on(data, layouts)
    assert state["rows"] == len(seen) == state["epoch"] * 200 + state["row"]
    assert len(seen) > 200 or len(set(seen)) == 200
    seen, _ = read_on(data, [*layouts, (1, 0, (400 - len(seen)) // 4)])
    assert sorted(seen) == sorted(2 * [f"{i:05d}" for i in range(200)])


def test_what_a_shard_lacks_is_replaced_and_what_it_has_beyond_its_count_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MANY", 1)
    path = write(tmp_path / "a", n=60)
    damaged = tmp_path / "a" / "00001.tar"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    os.remove(tmp_path / "a" / "00003.tar")
    (tmp_path / "a" / "sizes.json").write_text(json.dumps({f"{k:05d}.tar": 10 - 2 * (k == 5) for k in range(6)}))
    with read(data_of(path + "/{00000..00005}.tar", None, resampled=False, max_bad_share=0.9)) as stream:
        found = keys(take(stream, 12))
        bad = stream.counts["bad"]
    assert {int(key) for key in found if not 10 <= int(key) < 20} == {*range(10), *range(20, 30), *range(40, 58)}
    assert bad == {"truncated tar": 2, "absent shard": 2, "more than the count beside the shards": 4}  # opened in two epochs


def test_a_group_of_absent_shards_is_replaced_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MANY", 1)
    monkeypatch.setattr(dealing, "GROUP", 1)
    path = write(tmp_path / "a", n=30)
    os.remove(tmp_path / "a" / "00001.tar")
    data = data_of(path + "/{00000..00002}.tar", None, resampled=False, max_bad_share=0.9)
    assert {int(key) // 10 for key in keys(take(read(data), 6))} == {0, 2}


def test_closed_shards_are_forgotten(tmp_path):
    stream = read(data_of(write(tmp_path / "a", n=1000, per_shard=10), 1000))
    take(stream, 150)
    assert len(stream.builder.mixture.open) <= 2 * streaming.GROUP


def test_on_other_processes_the_position_goes_on(tmp_path):
    data = data_of(write(tmp_path / "a"), 60)
    stream = read(data)
    take(stream, 14)
    later = read(data, stream.state_dict(), rank=1, world=3, device_batch=2)
    assert next(later).epoch == 1 and later.state_dict()["rows"] == 76


def test_processes_and_workers_draw_differently_and_the_same_each_time(tmp_path):
    data = data_of(write(tmp_path / "a", n=200), 200, workers=2)
    drawn = []
    for rank in (0, 1, 0):
        with read(data, rank=rank, world=2) as stream:
            drawn.append(keys(take(stream, 4)))
    assert drawn[0] == drawn[2] != drawn[1]
    with read(data, seed=4, world=2) as stream:
        assert keys(take(stream, 4)) != drawn[0]


def test_weights_say_how_often_a_source_is_drawn(tmp_path):
    paths = [write(tmp_path / "a", n=40), write(tmp_path / "b", n=80, start=100)]
    data = data_of(paths)
    weighted = data.model_copy(update={"sources": (data.sources[0].model_copy(update={"weight": 0.75}), data.sources[1])})
    for config, share in ((data, 4 / 12), (weighted, 0.75)):
        shards = streamed(config)
        drawn = [shards.drawn(0, 0, 0, number) for number in range(4000)]
        assert np.mean(np.array(drawn) < 4) == pytest.approx(share, abs=0.03)
    stream = read(weighted)
    take(stream, 40)
    assert stream.counts["sources"]["s0"] + stream.counts["sources"]["s1"] == 200


# ---------------------------------------------------------------- what cannot be used


def test_what_shards_lack_is_counted_as_they_are_opened(tmp_path, caplog):
    path = write(tmp_path / "a", n=40, meta=lambda i: {"punsafe": i % 2})
    damaged = tmp_path / "a" / "00001.tar"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    data = data_of(path + "/{00000..00004}.tar", 200, filters=(FilterRule(key="punsafe", op="<=", value=0.5),), max_bad_share=0.5)
    with caplog.at_level(logging.WARNING), read(data) as stream:
        found = take(stream, 40)
        shards, bad = stream.shards, dict(stream.counts["bad"])
    assert all(int(key) % 2 == 0 for key in keys(found))
    assert shards.opened > 5 and shards.left_out["filter punsafe <= 0.5"] > 5
    assert set(shards.damaged) == {str(damaged), f"{path}/00004.tar"} and bad["truncated tar"] >= 1 and bad["absent shard"] >= 1
    assert "filter punsafe <= 0.5" not in bad
    last = caplog.records[-1].getMessage()
    assert "left out:" in last and "00004.tar" in last and "00002.tar" not in last


def test_samples_without_caption_stop_the_run_above_the_share(tmp_path):
    with ShardWriter(str(tmp_path / "a"), max_samples=100) as writer:
        for i in range(400):
            writer.write(f"{i:05d}", {"png": png(i)} | ({"txt": f"c {i}"} if i % 4 else {}))
    with pytest.raises(ValueError, match="missing text"):
        take(read(data_of(str(tmp_path / "a"), 400)), 400)
    stream = read(data_of(str(tmp_path / "a"), 400, max_bad_share=0.3))
    take(stream, 10)
    assert stream.counts["bad"]["missing text"] % 25 == 0 and stream.counts["examined"] % 100 == 0


def test_undecodable_pictures_are_replaced_and_named(tmp_path):
    with ShardWriter(str(tmp_path / "a"), max_samples=20) as writer:
        for i in range(40):
            writer.write(f"{i:05d}", {"png": png(i) if i != 7 else b"broken", "txt": f"c {i}"})
    found = take(read(data_of(str(tmp_path / "a"), 40, max_bad_share=0.5)), 16)
    problems = [problem for batch in found for problem in batch.problems]
    assert problems and all(p.key == "00007" and p.reason == "undecodable image" for p in problems)
    assert all(len(batch.keys) == 5 for batch in found) and "00007" not in keys(found)


def test_a_first_shard_without_use_and_a_wrong_folder_are_errors_before_training(tmp_path):
    with ShardWriter(str(tmp_path / "a"), max_samples=20) as writer:
        writer.write("0", {"png": png(), "cls": "3"})
    with pytest.raises(ValueError, match="Extensions found: cls, png; wanted: one of jpg, .* and txt"):
        read(data_of(str(tmp_path / "a")))
    with pytest.raises(ValueError, match="none of the first 8 shards can be read; correct the path"):
        read(data_of(str(tmp_path / "b/{00000..99999}.tar")))
    path = write(tmp_path / "c", meta=lambda i: {"x": 1})
    rule = FilterRule(key="x", op=">", value=1)
    with pytest.raises(ValueError, match="none of the last .* shards holds a sample that can be used, .* see the source's filters"):
        next(read(data_of(path, filters=(rule,))))


def test_more_damaged_shards_than_chance_explains_stop_the_run():
    good, bad = {"shard": "a", "samples": 9, "ok": 9, "message": ""}, {"samples": 0, "ok": 0, "message": "there is no such file"}
    lucky = ShardLog()
    for number in range(400):
        lucky.add([bad | {"shard": str(number)} if number % 100 == 0 else good], 0.01)
    assert len(lucky.damaged) == 4 and lucky.opened == 400
    with pytest.raises(ValueError, match="2 of 2 shards are damaged or missing, more than data.max_bad_share 1.0%"):
        ShardLog().add([bad | {"shard": "0"}, bad | {"shard": "1"}], 0.01)


def test_fewer_shards_than_readers_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="3 shards for 2 processes x 2 workers = 4"):
        check_enough(3, world=2, workers=2)
    check_enough(4, world=2, workers=2)


def test_a_reader_without_a_shard_is_refused_before_a_worker_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "MANY", 1)
    data = data_of(write(tmp_path / "a"), resampled=False, workers=4)
    with pytest.raises(ConfigError, match="6 shards for 2 processes x 4 workers = 8 readers"):
        read(data, world=2)


def test_a_run_on_a_stream_resumes_to_the_same_losses(tmp_path):
    path = shards(tmp_path / "shards", n=48, per_shard=6)
    run = changed(clip_run(tmp_path, path, steps=6, checkpoint={"save_every": 3}), data__resampled=True, data__samples_per_epoch=60)
    result = train(run)
    whole = [json.loads(line) for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()]
    again = changed(run, resume=f"{run.folder}/checkpoints/step-00000003")
    assert train(again).reason == result.reason == "done"
    rest = [json.loads(line) for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["grad_norm"]) for row in rest] == [(row["loss"], row["grad_norm"]) for row in whole] and len(rest) == 6
    assert [row["epoch"] for row in rest] == [0] * 5 + [1]


def test_what_comes_before_training_looks_at_the_first_shards_alone(tmp_path, opened, monkeypatch):
    paths = [write(tmp_path / "a", n=300), write(tmp_path / "b", n=100, start=300)]
    run = clip_run(tmp_path, "", steps=1)
    run = changed(run, data=data_of(paths, 1_000_000).model_dump(mode="json"))
    indexed, real = [], streaming.index_of
    monkeypatch.setattr(streaming, "index_of", lambda url, *rest: indexed.append(url) or real(url, *rest))
    monkeypatch.setattr("mmkit.data.tar_index.index_of", None)
    rows, total = preflight.data_rows(run)
    assert total == 1_000_000 and [row["examples"] for row in rows] == [750_000, 250_000]
    assert [row["opened"] for row in preflight.check_examples(run, decode=10)] == [10, 10]
    assert len(set(indexed)) == 16 and len(opened) == 4  # two sources, looked at twice
