"""One writer a folder: on disks and object stores alike, taken over only from writers that are gone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import uuid

import pytest

from mmkit import folder_lock
from mmkit.config import ConfigError
from mmkit.folder_lock import GONE, NAME, RENEWED, FolderLock
from mmkit.storage import Store
from tests.bucket import on_each_store, serving, use


@pytest.fixture(scope="module")
def proxy(request):
    with serving(request.param) as made:
        yield made


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "LOOK", 0.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return Store(tmp_path / "run" if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run")


def held_by(store, clock, **facts):
    """A lock that a writer on another host has left in the folder."""
    own = {
        "use": "trains in it",
        "host": "gpu03",
        "pid": 7,
        "started": 0.0,
        "system": "gpu03",
        "job": "",
        "since": clock.now,
        "renewed": clock.now,
    }
    store.write(NAME, json.dumps(own | {"id": "other"} | facts).encode())


def says(store):
    return json.loads(store.read(NAME))


def test_a_second_writer_is_refused_with_who_holds_the_folder_and_may_have_it_afterwards(store):
    first, second = FolderLock(store, "trains in it"), FolderLock(store, "trains in it")
    first.take()
    with pytest.raises(
        ConfigError,
        match=rf"is in use: process {os.getpid()} on .*, since \d{{4}}-.* trains in it; wait .*\(name=\.\.\.\)$",
    ):
        second.take()
    second.release()  # of one that never had it
    assert says(store)["id"] == first.own["id"]
    first.release()
    second.take()
    second.release()
    assert store.files() == []


@pytest.mark.parametrize("left", ["nothing", "a dead writer's"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_of_many_that_start_at_once_one_writes(tmp_path, monkeypatch, kind, left):
    monkeypatch.setattr(folder_lock, "LOOK", 0.3)
    store, gate, won = (
        Store(tmp_path if kind == "disk" else f"memory://{uuid.uuid4().hex}"),
        threading.Barrier(6),
        [],
    )
    if left != "nothing":
        held_by(store, Clock())
    locks = [FolderLock(store, "trains in it") for _ in range(6)]

    def start(lock):
        gate.wait()
        try:
            lock.take()
            won.append(lock)
        except ConfigError:
            pass

    threads = [threading.Thread(target=start, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and says(store)["id"] == won[0].own["id"]
    won[0].release()


def test_of_two_that_find_a_dead_writer_the_slower_leaves_the_quicker_ones_file_alone(store, monkeypatch):
    clock = Clock()
    held_by(store, clock)
    clock.now += GONE
    quick, slow = (FolderLock(store, "trains in it", clock) for _ in range(2))
    take_over = slow._take_over

    def late(gone):
        quick.take()  # after the slow one has judged, before it does anything
        return take_over(gone)

    monkeypatch.setattr(slow, "_take_over", late)
    with pytest.raises(ConfigError, match="is in use"):
        slow.take()
    quick.check()
    assert says(store)["id"] == quick.own["id"] and store.files() == [NAME]
    quick.release()


def test_a_takeover_that_died_on_its_way_is_taken_over_from(store, monkeypatch):
    clock = Clock()
    held_by(store, clock)
    clock.now += GONE
    for _ in range(2):  # the second dies while it takes over from the first
        dies = FolderLock(store, "trains in it", clock)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "write", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                dies.take()
        monkeypatch.setattr(folder_lock, "runs", lambda pid, started: False)
    lock = FolderLock(store, "trains in it", clock)
    lock.take()
    assert says(store)["id"] == lock.own["id"] and store.files() == [NAME]
    lock.release()
    assert store.files() == []


def test_a_disk_without_hard_links_has_one_writer_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *given: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    first, second = (FolderLock(Store(tmp_path), "trains in it") for _ in range(2))
    first.take()
    with pytest.raises(ConfigError, match="is in use"):
        second.take()
    first.release()
    assert Store(tmp_path).files() == []


def test_a_writer_on_another_host_is_gone_after_five_minutes_without_a_renewal(store, caplog):
    clock = Clock()
    held_by(store, clock)
    clock.now += GONE - 1
    lock = FolderLock(store, "trains in it", clock)
    with pytest.raises(
        ConfigError,
        match=r"process 7 on gpu03, since .* last heard of 299 s ago; where it is gone, the folder is free at \d\d:",
    ):
        lock.take()
    clock.now += 2
    lock.take()
    assert says(store)["id"] == lock.own["id"] and "taken over from process 7 on gpu03" in caplog.text
    lock.release()


def test_a_renewed_lock_holds_for_ever(store):
    clock = Clock()
    first, second = (FolderLock(store, "trains in it", clock) for _ in range(2))
    first.take()
    store.write(NAME, json.dumps(says(store) | {"system": "another machine"}).encode())
    for _ in range(10):
        clock.now += RENEWED
        first.renew()
        assert says(store)["renewed"] == clock.now
        with pytest.raises(ConfigError, match="is in use"):
            second.take()
    first.release()


def test_the_same_slurm_job_takes_over_at_once_and_another_does_not(store, monkeypatch):
    clock = Clock()
    lock = FolderLock(store, "trains in it", clock)
    held_by(store, clock, job="12")
    for job in ("", "13"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        with pytest.raises(ConfigError, match="process 7 on gpu03 of job 12, since"):
            lock.take()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    lock.take()
    lock.release()
    alive = FolderLock(store, "trains in it", clock)
    alive.take()  # of this job, and there is no doubt that it still runs
    with pytest.raises(ConfigError, match="of job 12"):
        lock.take()
    alive.release()


def test_a_dead_process_of_this_machine_is_gone_at_once_and_a_living_one_is_not(store):
    clock = Clock()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    facts = {
        "host": "here",
        "system": folder_lock.system(),
        "pid": child.pid,
        "started": folder_lock.psutil.Process(child.pid).create_time(),
    }
    held_by(store, clock, **facts)
    lock = FolderLock(store, "trains in it", clock)
    with pytest.raises(ConfigError, match=rf"process {child.pid} on here.*\(name=\.\.\.\)$"):
        lock.take()
    child.communicate(b"\n")
    lock.take()
    lock.release()
    held_by(
        store, clock, **facts | {"pid": os.getpid(), "started": 0.0}
    )  # its number belongs to another process now
    lock.take()
    lock.release()


@pytest.mark.parametrize(
    "text", [b"process 7 on gpu03, since 2026-05-01 12:00:00", b"", b"[1]", b'{"id": 3}']
)
def test_a_file_that_names_no_living_writer_holds_nothing(store, text):
    store.write(NAME, text)
    lock = FolderLock(store, "trains in it")
    lock.take()
    lock.release()
    assert store.files() == []


def test_who_was_taken_over_writes_nothing_more_and_leaves_the_other_alone(store):
    clock = Clock()
    lock = FolderLock(store, "trains in it", clock)
    lock.take()
    clock.now += GONE  # asleep, or behind a network that was down
    held_by(store, clock)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"was taken over by process 7 on gpu03, since .* nothing more is written here"
        ):
            lock.check()
    lock.release()
    assert says(store)["id"] == "other"


def test_a_file_removed_by_hand_comes_back_but_not_after_others_may_have_written(store):
    clock = Clock()
    lock = FolderLock(store, "trains in it", clock)
    lock.take()
    store.delete(NAME)
    lock.check()
    assert says(store)["id"] == lock.own["id"]
    store.delete(NAME)
    clock.now += GONE
    with pytest.raises(ConfigError, match="was taken over by a process that is not known"):
        lock.check()


def test_a_store_that_cannot_be_reached_for_a_while_ends_nothing(store, monkeypatch, caplog):
    lock = FolderLock(store, "trains in it")
    lock.take()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read", lambda self, name: (_ for _ in ()).throw(OSError("network is down")))
        lock.check()
        lock.release()
    assert "could not be renewed: network is down" in caplog.text and says(store)["id"] == lock.own["id"]


def test_the_claim_is_renewed_while_others_work(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "RENEWED", 0.01)
    lock, seen = FolderLock(Store(tmp_path), "trains in it"), threading.Event()
    monkeypatch.setattr(lock, "renew", seen.set)
    lock.take()
    assert seen.wait(10)
    lock.release()


@on_each_store
def test_an_object_store_has_one_writer_too(proxy, tmp_path, monkeypatch):
    use(proxy, tmp_path, monkeypatch)
    store, clock = Store(f"{proxy.url}/run"), Clock()
    first, second = (FolderLock(store, "trains in it", clock) for _ in range(2))
    first.take()
    with pytest.raises(ConfigError, match="is in use"):
        second.take()
    proxy.cuts = 1  # the reply to a renewal is lost
    first.renew()
    first.check()
    first.release()
    proxy.cuts = 1  # ... or the one that says the file was made
    second.take()
    second.release()
    assert store.files() == []


def test_a_living_process_that_left_its_file_behind_holds_the_folder_for_five_minutes(store, monkeypatch):
    clock = Clock()
    first, second = (FolderLock(store, "trains in it", clock) for _ in range(2))
    first.take()
    with monkeypatch.context() as patch:  # a notebook's kernel, say, whose training ended while the network was down
        patch.setattr(Store, "delete", lambda self, name: (_ for _ in ()).throw(OSError("network is down")))
        first.release()
    first.renew()  # the thread's turn came too late
    assert says(store)["renewed"] == clock.now
    with pytest.raises(ConfigError, match="is in use"):
        second.take()
    clock.now += GONE
    first.renew()
    second.take()
    second.release()
    assert store.files() == []
