"""From planned rows to batches: opens pictures, samples region points, tokenises captions. Runs in worker processes.

A picture that does not decode takes its conversation out of the row (the row stays, the loss loses nothing else); in contrastive
training, where an empty row would be a wrong negative, another sample takes its place. Both are reported with the batch. A single pass
has every sample once: what cannot be used, and what fills the last batch, is a row with an empty key, which counts nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmkit.config import VlmConfig
from mmkit.data.batches import Batch, Problem, RegionPoints, Shape, Slots, build_row, counted, stack_images, stack_regions, stack_rows
from mmkit.data.boxes import model_pixels
from mmkit.data.example import BadRecord, Example, ImageRef, checked_pair
from mmkit.data.images import ImageError, open_image
from mmkit.data.mixture import Mixture
from mmkit.data.packing import Item, Row
from mmkit.data.regions import region_mask, region_points

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """One batch to build: rows of this process, the block's static shape, and where the order stands after it.

    ``rows`` hold `Item` tuples, or global example numbers (None: a row that counts nothing) for contrastive models.
    """

    rows: tuple[Any, ...]
    shape: Shape
    epochs: tuple[int, ...]  # of each row: a batch may straddle two
    state: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()  # of planning, shared out over the processes
    examined: int = 0  # examples planning looked at for this block, this process's share


def rng_of(seed: int, epoch: int, index: int, train: bool) -> np.random.Generator:
    """The generator of an example's random choices: another each epoch in training, always the same otherwise."""
    return np.random.default_rng([seed, epoch + 1 if train else 0, index])


@contextlib.contextmanager
def repeatable(rng: np.random.Generator) -> Iterator[None]:
    """Random choices of libraries (torch's and Python's global generators) that repeat on resume and leave both as they were."""
    before, torch_before = random.getstate(), torch.get_rng_state()
    seed = int(rng.integers(2**62))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue a call, with a stack trace, for every accelerator
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        torch.set_rng_state(torch_before)


def drawn(mixture: Mixture, index: int, seed: int, epoch: int, train: bool) -> Example:
    """The example with its random choices made; outside training, and for sources without any, the example as it stands."""
    return mixture.draw(index, rng_of(seed, epoch, index, train)) if train and mixture.varies(index) else mixture[index]


def check_regions(example: Example, numbers: Iterable[int], sizes: Sequence[tuple[int, int]]) -> None:
    """ImageError where a region is no part of its picture, or the mask of one of ``numbers`` does not fit it; ``sizes`` are the
    (width, height) of the pictures that were opened: fewer than the example has where it was cut."""
    for region in example.regions:
        box, place = region.box, region.image
        if fault := box.fault(region.kind == "point"):
            raise ImageError(f"a box {fault}", "box")
        if place >= len(sizes) or box.frame.name != "pixels":
            continue
        (width, height), frame = sizes[place], box.frame
        # one that was only made smaller or larger, to whole pixels, holds the same box at the same share of its sides
        if abs(frame.width * height - frame.height * width) > frame.width + frame.height:
            raise ImageError(
                f"its boxes are in pixels of a {frame.width:g}x{frame.height:g} picture, as image_w and image_h say, but its "
                f"picture {example.images[place].told} has {width}x{height}, which is another shape; give the boxes of this "
                "one, or the right picture",
                "picture size",
            )
    for region in (example.regions[number] for number in numbers):
        try:
            region_mask(region, *sizes[region.image])
        except ValueError as error:
            raise ImageError(str(error), "region mask") from None


class Watch:
    """What each worker process is at, in shared memory, so that a killed worker's sample can be named."""

    def __init__(self, workers: int):
        self.table = torch.full((max(workers, 1), 2), -1, dtype=torch.int64).share_memory_()

    def at(self, index: int) -> None:
        """This process is about to read example ``index``."""
        info = torch.utils.data.get_worker_info()
        row = self.table[info.id if info else 0]
        row[0], row[1] = os.getpid(), index

    def dead(self, patience: float = 1.0) -> list[tuple[int, int]]:
        """(process, example it was at) of workers that are no longer there; a dying one is waited for."""
        until = time.monotonic() + patience
        while True:
            alive = {process.pid for process in multiprocessing.active_children()}
            found = [(pid, index) for pid, index in self.table.tolist() if pid >= 0 and pid not in alive]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.05)


class Pictures:
    """Opens pictures as tensors, one an encoder, from files or from cached features.

    ``stem`` names the batch's tensors. ``seeded`` transforms (random crops) repeat exactly for one (seed, epoch, index).
    """

    def __init__(self, transforms: Sequence[Transform], features=None):
        self.transforms, self.features = list(transforms), features
        self.stem = "features" if features is not None else "images"
        if features is not None:
            self.blanks = [torch.zeros(shape, dtype=dtype) for shape, dtype in features.shapes]
        else:
            dummy = Image.new("RGB", (32, 32))
            self.blanks = [torch.zeros_like(transform(dummy)) for transform in self.transforms]

    def load(self, ref: ImageRef) -> tuple[list[Tensor], tuple[int, int]]:
        """(a tensor an encoder, (width, height)); ImageError where it cannot be had."""
        if self.features is not None:
            return self.features.get(ref)
        image = open_image(ref)
        return [transform(image) for transform in self.transforms], image.size


class VlmBuilder:
    """Map from `Task` to vlm `Batch`; picklable, so that worker processes can hold it."""

    def __init__(self, mixture: Mixture, model: VlmConfig, pictures: Pictures, *, seed: int, train: bool, watch: Watch | None = None, pad: str = "right"):
        self.mixture, self.model, self.pictures = mixture, model, pictures
        self.seed, self.train, self.watch, self.pad = seed, train, watch or Watch(0), pad
        self.slots = Slots.of(model)

    def __getitem__(self, task: Task) -> Batch:
        problems = list(task.problems)
        loaded = [self.load_row(row, epoch, problems) for row, epoch in zip(task.rows, task.epochs, strict=True)]
        rows = [tuple(item for item, *_ in row) for row in loaded]
        arrays = [build_row(items, [sizes for _, _, sizes, _ in row], self.slots) for items, row in zip(rows, loaded, strict=True)]
        tensors = stack_rows(arrays, task.shape, self.pad)
        images = [[picture for _, pictures, _, _ in row for picture in pictures] for row in loaded]
        sizes = [[size for _, _, item_sizes, _ in row for size in item_sizes] for row in loaded]
        tensors |= stack_images(images, sizes, task.shape, self.pictures.blanks, self.pictures.stem)
        if self.model.regions:
            points = [self._regions(row, epoch) for row, epoch in zip(loaded, task.epochs, strict=True)]
            tensors |= stack_regions(points, task.shape, self.model.regions.n_points, len(self.model.regions.n_sub_points))
        members = [member for row in rows for item in row for member in item.members]
        n_targets, n_tokens, n_positions = counted(tensors)
        keys = [",".join(example.key for *_, examples in row for example in examples) for row in loaded]
        sources = Counter(self.mixture.source_name(member.index) for member in members)
        return Batch(
            tensors, keys, n_targets, len(members), n_tokens, n_positions, max(task.epochs), tuple(problems),
            sources=dict(sources), examined=task.examined, truncated=sum(member.cut > 0 for member in members),
        )  # fmt: skip

    def load_row(self, row: Row, epoch: int, problems: list[Problem]) -> list[tuple[Item, list, list, list[Example]]]:
        """(item, pictures, sizes, examples) of each item whose pictures can be had; the others go to ``problems``."""
        out = []
        for item in row:
            examples = []
            for member in item.members:
                self.watch.at(member.index)
                examples.append(drawn(self.mixture, member.index, self.seed, epoch, self.train))
            try:
                whole = examples[0].images[: item.n_images]  # pictures behind a cut are not opened
                found = [self.pictures.load(ref) for ref in whole]
                for member, example in zip(item.members, examples, strict=True):
                    check_regions(example, member.encoded.regions, [size for _, size in found])
            except ImageError as error:
                problems += [self._problem(m.index, e.key, error.reason, error.message) for m, e in zip(item.members, examples, strict=True)]
                continue
            out.append((item, [tensors for tensors, _ in found], [size for _, size in found], examples))
        return out

    def _regions(self, row, epoch: int) -> list[RegionPoints]:
        """Points of each region token, in the order of the row's ids."""
        out, first_image = [], 0
        for item, _, sizes, examples in row:
            for member, example in zip(item.members, examples, strict=True):
                for k, number in enumerate(member.encoded.regions):
                    out.append(self._points(example, number, sizes, first_image, member.index * 64 + k, epoch))
            first_image += len(sizes)
        return out

    def _points(self, example: Example, number: int, sizes, first_image: int, stream: int, epoch: int) -> RegionPoints:
        config, region = self.model.regions, example.regions[number]
        size = sizes[region.image]
        rng = rng_of(self.seed, epoch, stream, self.train)
        points = region_points(region_mask(region, *size), config.n_points, rng, repeat=config.kind == "geo")
        real = np.arange(config.n_points) < len(points)
        padded = np.zeros((config.n_points, 2), np.float32)
        padded[: len(points)] = self._in_model(points, size)
        counts = (config.n_points, *config.n_sub_points[:-1])[: len(config.n_sub_points)]
        starts = np.array([rng.integers(count) for count in counts], dtype=np.int64)
        return RegionPoints(padded, real, starts, first_image + region.image)

    def _in_model(self, points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Points of the original picture as shares of the square the encoders see."""
        if self.model.image_fit == "stretch":
            return points
        frame = model_pixels(1, *size, fit=self.model.image_fit)
        return points * np.array([frame.width, frame.height], np.float32) + np.array([frame.left, frame.top], np.float32)

    def _problem(self, index: int, key: str, reason: str, message: str) -> Problem:
        return Problem(key, self.mixture.source_name(index), reason, message)


class ClipBuilder:
    """Map from `Task` to contrastive `Batch`: one picture and one caption a row, zeros in rows that count nothing."""

    ATTEMPTS = 50  # substitutes tried for one bad sample

    def __init__(self, mixture: Mixture, pictures: Pictures, tokenizer, *, seed: int, train: bool, watch: Watch | None = None, texts=None):
        self.mixture, self.pictures, self.tokenizer, self.texts = mixture, pictures, tokenizer, texts
        self.seed, self.train, self.watch = seed, train, watch or Watch(0)

    def __getitem__(self, task: Task) -> Batch:
        problems = list(task.problems)
        found = [self._sample(index, epoch, problems) for index, epoch in zip(task.rows, task.epochs, strict=True)]
        images = torch.stack([tensor for tensor, _ in found])
        name = "image_features" if self.pictures.stem == "features" else "image"
        captions = [example.caption if example else "" for _, example in found]
        tensors = {name: images} | self._text(captions, task)
        for row in (row for row, (_, example) in enumerate(found) if example is None):
            tensors["text_features" if "text_features" in tensors else "text"][row] = 0  # no token of it counts in a caption loss either
        counts = Counter(caption for caption in captions if caption)
        repeated = sum(count for count in counts.values() if count > 1)
        keys = [example.key if example else "" for _, example in found]
        sources = Counter(self.mixture.source_name(index) for index, key in zip(task.rows, keys, strict=True) if key)
        n = sum(map(bool, keys))
        n_positions = tensors["text"].numel() if "text" in tensors else n
        return Batch(tensors, keys, n, n, n_positions, n_positions, max(task.epochs), tuple(problems), repeated / max(n, 1), dict(sources), task.examined)

    def _text(self, captions: list[str], task: Task) -> dict[str, Tensor]:
        if self.texts is not None:
            (shape, dtype), *_ = self.texts.shapes
            blank = torch.zeros(shape, dtype=dtype)
            return {"text_features": torch.stack([self.texts.get_text(caption)[0] if caption else blank for caption in captions])}
        if getattr(self.tokenizer, "reduction_fn", None):  # cuts long captions at random
            rows = []
            for caption, index, epoch in zip(captions, task.rows, task.epochs, strict=True):
                with repeatable(rng_of(self.seed, epoch, index or 0, self.train)):
                    rows.append(self.tokenizer([caption]))
            return {"text": torch.cat(rows)}
        tokens = self.tokenizer(captions)
        if isinstance(tokens, Tensor):
            return {"text": tokens}
        return {"text": tokens["input_ids"]} | ({"text_mask": tokens["attention_mask"]} if "attention_mask" in tokens else {})

    def _sample(self, index: int | None, epoch: int, problems: list[Problem]) -> tuple[Tensor, Example | None]:
        nothing = torch.zeros_like(self.pictures.blanks[0]), None
        if index is None:
            return nothing
        rng = rng_of(self.seed, epoch, index, self.train)
        for _ in range(self.ATTEMPTS):
            try:
                return self.load(index, epoch)
            except (BadRecord, ImageError) as error:
                key = getattr(error, "key", "") or f"#{index}"
                problems.append(Problem(key, self.mixture.source_name(index), error.reason, error.message))
                if not self.train:
                    return nothing
                index = self.another(rng)
        raise BadRecord(f"{self.ATTEMPTS} samples in a row cannot be used; the last: {problems[-1].message}", key=problems[-1].key, source=problems[-1].source)

    def another(self, rng: np.random.Generator) -> int:
        """A substitute for a bad sample."""
        return int(rng.integers(len(self.mixture)))

    def load(self, index: int, epoch: int) -> tuple[Tensor, Example]:
        """(its picture, the example); BadRecord where it is no pair or the picture cannot be had."""
        self.watch.at(index)
        example = checked_pair(drawn(self.mixture, index, self.seed, epoch, self.train))
        try:
            with repeatable(rng_of(self.seed, epoch, index, self.train)):  # random crops
                tensors, _ = self.pictures.load(example.images[0])
        except ImageError as error:
            raise BadRecord(error.message, key=example.key, source=example.source, reason=error.reason) from None
        return tensors[0], example
