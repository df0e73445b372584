"""The one global order of rows: which conversations stand in which row, for every process the same.

An epoch's units (`Mixture.order`) are taken window by window; the conversations of a window are tokenised, joined by picture where
wanted, and packed into rows. Nothing here knows of workers or devices. Tokenisation happens here, once, so row lengths are known
to every process before a batch is built and all agree on its static shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mmkit.config import ConfigError, DataConfig, VlmConfig
from mmkit.data.batches import N_TARGETS, Problem, Shape, Slots
from mmkit.data.building import Task, drawn
from mmkit.data.conversation import Formatter
from mmkit.data.example import TOO_LONG, BadRecord, Example, ImageRef
from mmkit.data.images import ImageError, image_size
from mmkit.data.mixture import Mixture, Order
from mmkit.data.packing import Item, Limits, Member, Row, bucket_size, first_fit, items_of, power_of_two, row_length
from mmkit.errors import InputError

WINDOW = 2048  # samples planned together; rows are filled from one window
REMEMBERED = 65_536  # encoded conversations kept for later epochs


class ExamplePlan:
    """Rows of contrastive data: one example each, in the mixture's order. Also the base of `ConversationPlan`."""

    begin: dict[str, int] = {"epoch": 0, "window": 0, "row": 0, "rows": 0, "samples": 0}  # the position of a run that has read nothing

    def __init__(self, mixture: Mixture, *, seed: int, train: bool, by_image: bool = False, megabatch: int = 0):
        self.mixture, self.seed, self.train = mixture, seed, train
        self.by_image, self.megabatch = by_image, megabatch
        self.settings: dict[str, int] = {"share_image": int(by_image), "group_by_length": megabatch}  # what a position in the rows depends on
        self.problems: list[Problem] = []  # of planning, since last taken
        self.examined = 0  # examples planned, since last taken
        self._order: tuple[int, Order] | None = None
        self._estimate: int | None = None

    def order(self, epoch: int) -> Order:
        """The epoch's units; the last one asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            order = self.mixture.order(self.seed, epoch, train=self.train, by_image=self.by_image, megabatch=self.megabatch)
            self._order = (epoch, order)
        return self._order[1]

    def windows(self, epoch: int) -> int:
        """Windows of an epoch."""
        return -(-len(self.order(epoch)) // self._units_a_window(epoch))

    def rows(self, epoch: int, window: int) -> list:
        """Rows of one window."""
        return self._members(epoch, window).tolist()

    def shape(self, block: list) -> Shape:
        """Static shape of a block of rows."""
        return Shape(len(block), 1)

    def n_samples(self, row) -> int:
        """Samples in a row."""
        return 1

    def tasks(self, state: dict[str, int], rank: int, world: int, device_batch: int) -> Iterator[Task]:
        """See `tasks_of`."""
        return tasks_of(self, state, rank, world, device_batch)

    def rows_per_epoch(self) -> int:
        """Rows of the first epoch: counted up to `REMEMBERED` samples, beyond that estimated from the first of them."""
        if self._estimate is None:
            windows, rows, kept = self.windows(0), 0, (list(self.problems), self.examined)
            few = min(windows, max(1, windows * REMEMBERED // max(self.mixture.samples_per_epoch, 1)))
            for window in range(few):
                rows += len(self.rows(0, window))
            self.problems, self.examined = kept  # problems count when their window is trained on
            self._estimate = round(rows * windows / few)
        return self._estimate

    def blank(self, last):
        """What fills the last block of a single pass: a row that counts nothing."""
        return None

    def _units_a_window(self, epoch: int) -> int:
        order = self.order(epoch)
        return max(1, WINDOW * len(order) // max(len(order.members), 1))

    def _members(self, epoch: int, window: int) -> np.ndarray:
        order, size = self.order(epoch), self._units_a_window(epoch)
        first, last = window * size, min((window + 1) * size, len(order))
        members = order.members[order.starts[first] : order.starts[last]]
        self.examined += len(members)
        return members


class ConversationPlan(ExamplePlan):
    """Rows of conversations for a vision-language model."""

    def __init__(self, mixture: Mixture, data: DataConfig, model: VlmConfig, formatter: Formatter, *, seed: int, train: bool, megabatch: int):
        group = megabatch if train and data.group_by_length else 0
        super().__init__(mixture, seed=seed, train=train, by_image=data.share_image, megabatch=group)
        self.formatter, self.pack, self.slots = formatter, data.pack, Slots.of(model)
        self.limits = Limits(data.max_length, data.max_images, data.max_regions)
        self.truncate = data.too_long == "truncate"
        self.settings |= {name: int(getattr(data, name)) for name in ("pack", "max_length", "max_images", "max_regions")}
        if self.truncate:  # absent otherwise, so that positions saved before there was a choice stay valid
            self.settings["truncate"] = 1
        self.buckets = row_buckets(data)
        self.has_regions = model.regions is not None
        if self.has_regions and not data.max_regions:
            raise ConfigError("data.max_regions is 0 but the model has regions; set it to the most regions one row may hold")
        self._encoded: dict[int, Member] = {}

    def rows(self, epoch: int, window: int) -> list[Row]:
        """Rows of one window; examples that cannot be used go to ``problems``."""
        order, size = self.order(epoch), self._units_a_window(epoch)
        items: list[Item] = []
        for unit in range(window * size, min((window + 1) * size, len(order))):
            members = [member for index in order.unit(unit).tolist() if (member := self._member(index, epoch)) is not None]
            items += items_of(members, self.limits)
            self.examined += len(order.unit(unit))
        if not self.pack:
            return [(item,) for item in items]
        rows = first_fit(items, self.limits)
        if not self.train:
            return rows
        shuffled = np.random.default_rng([self.seed, epoch, window, 1]).permutation(len(rows))
        return [rows[number] for number in shuffled]

    def n_samples(self, row: Row) -> int:
        """Conversations in a row."""
        return sum(len(item.members) for item in row)

    def blank(self, last: Row) -> Row:
        """A row without conversations."""
        return ()

    def shape(self, block: list[Row]) -> Shape:
        """The smallest static shape that holds every row of a block."""
        longest = max(map(row_length, block), default=1)
        targets = max((sum(item.n_targets for item in row) for row in block), default=0)
        images = max((sum(item.n_images for item in row) for row in block), default=0)
        regions = max((sum(item.n_regions for item in row) for row in block), default=0)
        return Shape(
            len(block),
            next(bucket for bucket in self.buckets if bucket >= longest),
            bucket_size(targets, N_TARGETS),
            power_of_two(images, 1, self.limits.images),
            power_of_two(regions, 1, self.limits.regions) if self.has_regions else 0,
        )

    def _member(self, index: int, epoch: int) -> Member | None:
        if index in self._encoded:
            return self._encoded[index]
        try:
            example = drawn(self.mixture, index, self.seed, epoch, self.train)
            member = self.fit(self.encode(index, example), example)
        except BadRecord as error:
            self.problems.append(Problem(error.key, self.mixture.source_name(index), error.reason, error.message))
            return None
        if len(self._encoded) < REMEMBERED and not (self.train and self.mixture.varies(index)):
            self._encoded[index] = member
        return member

    def encode(self, index: int, example: Example) -> Member:
        """A drawn example in its full length; BadRecord where it has nothing to learn from."""
        encoded = self.formatter.encode(example)
        slots = tuple(self._slots(ref, example.key, example.source) for ref in example.images)
        return Member(index, encoded, tuple(ref.identity for ref in example.images), slots)

    def fit(self, member: Member, example: Example) -> Member:
        """It as a row holds it: cut from the right where it is too long and ``data.too_long`` says truncate.

        BadRecord where no row can hold it (`TOO_LONG` where it is dropped) or the cut leaves nothing to
        learn.
        """
        needed, limit = member.length, self.limits.tokens
        if needed > limit and not self.truncate:
            raise BadRecord(
                f"needs {needed}, more than data.max_length {limit}; raise it, or set data.too_long to truncate",
                key=example.key, source=example.source, reason=TOO_LONG,
            )  # fmt: skip
        if needed > limit:
            whole, member = member, member.truncated(limit)
            # a picture behind the cut is gone, and with it what a region token before the cut would show
            shown = [example.regions[number].image for number in member.encoded.regions] if member else []
            blind = max(shown, default=-1) >= len(member.slots if member else ())
            if member is None or blind:
                raise BadRecord(
                    f"nothing left to learn of its {whole.length} tokens when they are cut at data.max_length {limit}; "
                    "raise it",
                    key=example.key, source=example.source, reason="nothing left to learn",
                )  # fmt: skip
        for reason, needed, limit, setting in (
            ("too many images", len(member.slots), self.limits.images, "max_images"),
            ("too many regions", len(member.encoded.regions), self.limits.regions, "max_regions"),
        ):
            if needed > limit:
                raise BadRecord(
                    f"needs {needed}, more than data.{setting} {limit}",
                    key=example.key, source=example.source, reason=reason,
                )  # fmt: skip
        return member

    def _slots(self, ref: ImageRef, key: str, source: str) -> int:
        if not self.slots.crops:
            return self.slots.full
        try:
            return self.slots.count(image_size(ref))
        except ImageError as error:
            raise BadRecord(error.message, key=key, source=source, reason=error.reason) from None


def row_buckets(data: DataConfig) -> tuple[int, ...]:
    """Row lengths that may occur, ascending; the last is ``max_length``."""
    if over := [bucket for bucket in data.buckets if bucket > data.max_length]:
        raise ConfigError(f"data.buckets has {over[0]}, more than data.max_length {data.max_length}; remove it or raise max_length")
    return tuple(sorted({*data.buckets, data.max_length}))


def row_stream(plan: ExamplePlan, state: dict[str, int], once: bool) -> Iterator[tuple[object, dict[str, int]]]:
    """(row, position after it) from ``state`` on; endless unless ``once``. ValueError where an epoch has no usable row."""
    epoch, window, skip = state["epoch"], state["window"], state["row"]
    while True:
        any_row = skip > 0 or window > 0
        while window < plan.windows(epoch):
            rows = plan.rows(epoch, window)
            for number in range(skip, len(rows)):
                any_row = True
                yield rows[number], {"epoch": epoch, "window": window, "row": number + 1}
            window, skip = window + 1, 0
        if not any_row:
            last = plan.problems[-1] if plan.problems else None
            raise InputError("no example of the data can be used" + (f"; for instance {last.source} {last.key!r}: {last.message}" if last else ""))
        if once:
            return
        epoch, window = epoch + 1, 0


def tasks_of(plan: ExamplePlan, state: dict[str, int], rank: int, world: int, device_batch: int) -> Iterator[Task]:
    """One process's share of every block of rows from position ``state`` on, each with the position after its block."""
    size, block, place = device_batch * world, [], state
    for row, place in row_stream(plan, state, once=not plan.train):
        block.append((row, place["epoch"]))
        if len(block) == size:
            state = _advanced(plan, state, place, block)
            yield _task(plan, block, state, rank, world)
            block = []
    if block:  # the last batch of a single pass is filled up, so that every process has as many batches
        state = _advanced(plan, state, place, block)
        blank = (plan.blank(block[-1][0]), block[-1][1])
        yield _task(plan, block + [blank] * (size - len(block)), state, rank, world)


def _advanced(plan: ExamplePlan, state: dict[str, int], place: dict[str, int], block: list) -> dict[str, int]:
    samples = sum(plan.n_samples(row) for row, _ in block)
    return {**place, "rows": state["rows"] + len(block), "samples": state["samples"] + samples}


def _task(plan: ExamplePlan, block: list, state: dict[str, int], rank: int, world: int) -> Task:
    problems, plan.problems = plan.problems, []
    examined, plan.examined = plan.examined, 0
    shape = plan.shape([row for row, _ in block])
    rows, epochs = zip(*block[rank::world], strict=True)
    return Task(rows, replace(shape, rows=len(rows)), epochs, state, tuple(problems[rank::world]), -(-examined // world))
