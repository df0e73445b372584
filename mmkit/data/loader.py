"""Batches of a run: endless in training, one pass otherwise, from an exact position that workers and devices do not change.

Process r of ``world`` gets rows r, r + world, ... of every block of ``device_batch * world`` rows of the global order. The position
counts rows of that order, so a run may resume on another number of processes or workers and still sees every sample once an epoch.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from mmkit.config import ClipConfig, ConfigError, DataConfig, ModelConfig, SourceConfig
from mmkit.data.batches import Batch, Problem
from mmkit.data.building import ClipBuilder, Pictures, Task, VlmBuilder, Watch
from mmkit.data.conversation import Formatter
from mmkit.data.example import TOO_LONG
from mmkit.data.mixture import Mixture, Source
from mmkit.data.planning import ConversationPlan, ExamplePlan
from mmkit.data.recipe import realised
from mmkit.data.stream import ShardLog, ShardSet, StreamBuilder, StreamPlan, streamed
from mmkit.errors import InputError

log = logging.getLogger(__name__)
STATE_VERSION = 2  # 1 did not say which rows it counted


def loader(
    data: DataConfig,
    model: ModelConfig,
    tokenizer,
    transforms: Sequence[Callable],
    *,
    train: bool,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    device_batch: int = 8,
    accumulation: int = 1,
    state: dict | None = None,
    features=None,
    text_features=None,
    source: Mixture | ShardSet | None = None,
) -> Loader:
    """The `Loader` of a run.

    ``transforms`` map a PIL image to a tensor, one an encoder; ``features`` (a `FeatureCache`) takes their place. ``device_batch``
    counts the rows this process gets in one batch. ``state`` is an earlier `Loader.state_dict`. ``source`` is a mixture already open.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is outside 0..{world - 1}")
    source = source or training_source(data, model, train)
    watch = Watch(data.workers)
    pictures = Pictures(transforms, features)
    if isinstance(source, ShardSet):
        source.check_first()
        plan = StreamPlan(source, seed=seed, world=world, workers=data.workers)
        builder = StreamBuilder(source, pictures, tokenizer, seed=seed, train=train, watch=watch, texts=text_features)
    elif isinstance(model, ClipConfig):
        plan = ExamplePlan(source, seed=seed, train=train)
        builder = ClipBuilder(source, pictures, tokenizer, seed=seed, train=train, watch=watch, texts=text_features)
    else:
        formatter = Formatter.of(tokenizer, model)
        plan = ConversationPlan(source, data, model, formatter, seed=seed, train=train, megabatch=device_batch * world * accumulation)
        builder = VlmBuilder(source, model, pictures, seed=seed, train=train, watch=watch)
    out = Loader(plan, builder, rank=rank, world=world, device_batch=device_batch, accumulation=accumulation, workers=data.workers, max_bad=data.max_bad_share)
    if state is not None:
        out.load_state_dict(state)
    return out


def training_source(data: DataConfig, model: ModelConfig, train: bool = True) -> Mixture | ShardSet:
    """The run's sources, opened. Contrastive training may stream its shards; whatever is to be seen exactly once is indexed."""
    from mmkit.data.readers import open_mixture

    stream = streamed(data) if train and isinstance(model, ClipConfig) and not data.cache_features else None
    return stream or open_mixture(data)


def looked_at(config: SourceConfig, data: DataConfig, model: ModelConfig) -> tuple[Source, int]:
    """One of the run's sources to look into before training, and how many examples it gives: of shards that training will stream the
    first few, and their part of an epoch. ValueError where there are none."""
    from mmkit.data.readers import open_source

    stream = streamed(data) if isinstance(model, ClipConfig) and not data.cache_features else None
    if stream is None:
        source = open_source(config, data)
        return source, len(source)
    stream.check_first(config)
    return stream.first(config), stream.share(config)


class Loader:
    """Iterator of `Batch` with an exact, portable position. Build it with `loader`."""

    def __init__(
        self, plan: ExamplePlan | StreamPlan, builder, *, rank: int, world: int, device_batch: int, accumulation: int = 1, workers: int = 0, max_bad: float = 0.01
    ):
        self.plan, self.builder, self.watch = plan, builder, builder.watch
        self.rank, self.world, self.device_batch, self.accumulation = rank, world, device_batch, accumulation
        self.workers, self.max_bad = workers, max_bad
        self.counts: dict[str, Any] = {"seen": 0, "examined": 0, "rows": 0, "tokens": 0, "positions": 0}
        # too_long counts dropped and truncated samples
        self.counts |= {"bad": Counter(), "too_long": Counter(), "sources": Counter()}
        self._samples_named: list[Problem] = []
        self._long_told = False
        self._position = dict(plan.begin)
        self._batches: Iterator | None = None
        self.shards = ShardLog()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        failure = None
        try:
            batch, state = next(self._batches)
        # a killed worker is one of the first three, by the moment of its death
        except (RuntimeError, EOFError, OSError, InputError) as error:
            failure = self._explained(error)
        if failure:  # raised here, where nothing holds the dead worker's iterator any more
            self.close()
            raise failure
        self._position = state
        self._count(batch)
        return batch

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends worker processes and says what the shards read lacked, how many samples were too long and how
        often each source was seen; iterating on continues from the same position."""
        if self._batches is not None and self.plan.train and isinstance(self.plan.mixture, Mixture):
            self._tell_sources(self.plan.mixture)
        if self._batches is not None and self.plan.train and self.counts["too_long"]:
            parts = ", ".join(f"{count} {what}" for what, count in self.counts["too_long"].items())
            told = "process %d: longer than data.max_length of %d samples: %s"
            log.warning(told, self.rank, self.counts["examined"], parts)
        self._batches = None
        if isinstance(self.builder, StreamBuilder):
            self.builder.close()
        if self.shards.left_out or self.shards.damaged:
            log.warning("process %d: %s", self.rank, self.shards.summary())
            self.shards = ShardLog()

    def _tell_sources(self, mixture: Mixture) -> None:
        for row in realised(mixture, self.counts["sources"]) if len(mixture.sources) > 1 else []:
            seen, wished = 100 * row["realised"], 100 * row["wished"]
            log.info("process %d: %.2f%% of the samples were of source %s (%d, wished %.2f%%)", self.rank, seen, row["source"], row["seen"], wished)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out, for any number of workers and processes."""
        return {**self._belongs(), "sources": self._sources(), **self._position}

    def _sources(self) -> dict[str, list]:
        """What the fingerprint is made of, so that a refusal can name the source; of streamed shards it is made of all together."""
        return getattr(self.plan.mixture, "fingerprints", {})

    def _belongs(self) -> dict[str, Any]:
        """What a position belongs to: other data, another seed or other rows have other positions."""
        return {"version": STATE_VERSION, "seed": self.plan.seed, "fingerprint": self.plan.mixture.fingerprint, "rows_of": self.plan.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``; ValueError where it belongs to other data, other rows, another seed or another version."""
        for name, mine in self._belongs().items():
            if state.get(name) != mine:
                saved, now = state.get("sources", {}), self._sources()
                changed = [source for source in {**saved, **now} if saved and saved.get(source) != now.get(source)]
                which = f" (changed: source {', '.join(changed)})" if changed else ""
                raise InputError(
                    f"the saved data position has {name} {state.get(name)!r}, this run has {mine!r}{which}; "
                    "resume with the same sources and seed, or start the data anew"
                )
        self._position = {name: state[name] for name in self.plan.begin}
        self.close()

    @property
    def fill(self) -> float:
        """Share of positions so far that hold real tokens."""
        return self.counts["tokens"] / max(self.counts["positions"], 1)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch, repeats included."""
        return self.plan.mixture.samples_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch, estimated where there are many."""
        return self.plan.rows_per_epoch()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, at least 1."""
        return max(1, round(self.rows_per_epoch / (self.device_batch * self.world * self.accumulation)))

    def summary(self) -> str:
        """One printable line about the epoch."""
        return self.plan.mixture.summary()

    def _start(self) -> Iterator[tuple[Batch, dict]]:
        # the plan's, not ours: a generator that held this object would keep dead worker processes in a reference cycle
        tasks = self.plan.tasks(dict(self._position), self.rank, self.world, self.device_batch)
        if not self.workers:
            return ((self.builder[task], task.state) for task in tasks)
        options = {"batch_size": None, "num_workers": self.workers, "worker_init_fn": _quiet_worker}
        with _own_child_signal():
            return iter(DataLoader(_WithState(self.builder), sampler=tasks, **options))

    def _count(self, batch: Batch) -> None:
        self.counts["seen"] += batch.n_samples
        self.counts["examined"] += batch.examined
        self.counts["rows"] += len(batch.keys)
        self.counts["tokens"] += batch.n_tokens
        self.counts["positions"] += batch.n_positions
        self.counts["sources"].update(batch.sources)
        if batch.truncated:
            self.counts["too_long"]["truncated"] += batch.truncated
        self._note(batch.problems)
        self.shards.add(batch.shards, self.max_bad)

    def _note(self, problems: Sequence[Problem]) -> None:
        """Counts and logs what could not be used; ValueError above the allowed share of bad samples.

        Bad is what is damaged, missing or has nothing to learn. A sample that is only longer than
        ``data.max_length`` is no damage: it is counted apart and never stops a run, but a large share is told
        once, while there is time to stop.
        """
        examined = self.counts["examined"]
        bad = [problem for problem in problems if problem.reason != TOO_LONG]
        for problem in problems:
            if problem.reason == TOO_LONG:
                self.counts["too_long"]["dropped"] += problem.count
                continue
            self.counts["bad"][problem.reason] += problem.count
            log.warning("%s: sample %r left out: %s", problem.source, problem.key, problem.message)
        dropped = self.counts["too_long"]["dropped"]
        if len(bad) < len(problems) and dropped > self.max_bad * max(examined, 100) and not self._long_told:
            self._long_told, last = True, next(p for p in reversed(problems) if p.reason == TOO_LONG)
            told = "%d of %d samples are too long and left out; the last: %s %r: %s"
            log.warning(told, dropped, examined, last.source, last.key, last.message)
        self._samples_named = [*self._samples_named, *bad][-5:]
        n_bad = self.counts["bad"].total()
        if bad and n_bad > self.max_bad * max(examined, 100):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.counts["bad"].most_common())
            last = "; ".join(f"{p.source} {p.key!r}: {p.message}" for p in self._samples_named)
            raise InputError(
                f"{n_bad} of {examined} samples cannot be used ({reasons}), more than data.max_bad_share "
                f"{self.max_bad}. The last: {last}. Run `mmkit data check` on the source, repair it, or raise max_bad_share"
            )

    def _explained(self, error: Exception) -> Exception:
        """The error of a worker that was killed, with the sample it was at; a user's error without the worker's traceback, which DataLoader
        puts before its message; other errors unchanged."""
        kind = f"{type(error).__module__}.{type(error).__qualname__}: "
        if isinstance(error, InputError) and str(error).startswith("Caught ") and kind in str(error):
            return InputError(str(error).rpartition(kind)[2].strip())
        if not (dead := self.watch.dead() if self.workers else []):
            return error
        pid, index = dead[0]
        place = f"sample {self._key(index)!r} of source {self.plan.mixture.source_name(index)!r} (number {index})"
        return RuntimeError(f"data worker {pid} was killed at {place}; if memory ran out, lower data.workers. {type(error).__name__}: {error}")

    def _key(self, index: int) -> str:
        try:
            return self.plan.mixture[index].key
        except ValueError:
            return f"#{index}"


@contextlib.contextmanager
def _own_child_signal() -> Iterator[None]:
    """Keeps the process's own SIGCHLD handler.

    DataLoader installs one that raises wherever the main thread happens to be when a worker dies, in the middle of a checkpoint for
    instance. Without it a dead worker is found within five seconds, when the next batch is asked for.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


class _WithState:
    """A builder whose items carry the position after them through worker processes."""

    def __init__(self, builder):
        self.builder = builder

    def __getitem__(self, task: Task) -> tuple[Batch, dict]:
        return self.builder[task], task.state


def _quiet_worker(_: int) -> None:
    """One thread a worker; tokenizers' own threads do not survive a fork."""
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
