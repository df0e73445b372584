"""Several named sources as one: shares, caps, and the order of an epoch.

The order is a function of (seed, epoch) and the data, never of workers or devices. Sources are interleaved evenly: after any
number of samples each source has had its share to within a few samples, not only at the end. Pictures' questions may be kept
together (a *unit* is then all examples about one picture), and units may be grouped by length as LLaVA and Cambrian do.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mmkit.config import ConfigError, SourceConfig
from mmkit.data.example import Example


class Source(Protocol):
    """What a reader gives: a name, a length, and examples by number.

    Optional: ``draw(i, rng)`` for examples with random choices; ``group(i)`` the picture's identity without reading the
    example whole; ``facts`` the ``groups`` and ``lengths`` of all examples (`group_numbers`, `example_length`); ``fingerprint`` a text that changes with the data;
    ``draw_order(rng, wanted)`` its own shuffling, which keeps what is read together near.
    """

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True)
class Order:
    """Units of one epoch: unit u is ``members[starts[u]:starts[u + 1]]``, global example numbers."""

    members: np.ndarray  # (n,) int64
    starts: np.ndarray  # (units + 1,) int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    def unit(self, number: int) -> np.ndarray:
        """Global example numbers of one unit."""
        return self.members[self.starts[number] : self.starts[number + 1]]


class Mixture:
    """Map-style concatenation of sources with the shares and caps of their `SourceConfig`."""

    def __init__(self, configs: Sequence[SourceConfig], sources: Sequence[Source], samples_per_epoch: int | None = None):
        if not sources:
            raise ConfigError("data.sources is empty; name at least one source")
        names = [config.name for config in configs]
        if len(set(names)) < len(names):
            raise ConfigError(f"data.sources: the name {max(names, key=names.count)!r} occurs more than once; give each source its own")
        for config, source in zip(configs, sources, strict=True):
            if not len(source):
                raise ConfigError(f"data.sources: {config.name!r} ({config.path}) has no examples")
        self.configs, self.sources = tuple(configs), tuple(sources)
        self.offsets = np.cumsum([0, *(len(source) for source in sources)])
        self.wanted = wanted_counts(configs, [len(source) for source in sources], samples_per_epoch)
        self._facts: dict[tuple[int, str], np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.summary())}</p>"

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the source, number within it) of a global example number."""
        number = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return number, int(index - self.offsets[number])

    def __getitem__(self, index: int) -> Example:
        number, local = self.locate(index)
        return self.sources[number][local]

    def draw(self, index: int, rng: np.random.Generator) -> Example:
        """The example with its random choices (where its source has any) made by ``rng``."""
        number, local = self.locate(index)
        draw = getattr(self.sources[number], "draw", None)
        return draw(local, rng) if draw else self.sources[number][local]

    def varies(self, index: int) -> bool:
        """Whether `draw` may give another example each time."""
        return hasattr(self.sources[self.locate(index)[0]], "draw")

    def source_name(self, index: int) -> str:
        """Name of the source of a global example number."""
        return self.configs[self.locate(index)[0]].name

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch, repeats included."""
        return sum(self.wanted)

    @property
    def fingerprint(self) -> str:
        """A short hash that changes when names, sizes or shares change: a saved position belongs to one fingerprint."""
        return hashlib.sha256(json.dumps(self.fingerprints).encode()).hexdigest()[:16]

    @property
    def fingerprints(self) -> dict[str, list]:
        """What `fingerprint` is made of, by source: examples, samples of an epoch, cap, hash of the content."""
        parts = zip(self.configs, self.sources, self.wanted, strict=True)
        return {config.name: [len(source), wanted, config.cap, str(getattr(source, "fingerprint", ""))] for config, source, wanted in parts}

    def order(self, seed: int, epoch: int, *, train: bool = True, by_image: bool = False, megabatch: int = 0) -> Order:
        """Units of one epoch. ``by_image`` joins examples about the same picture; ``megabatch`` > 0 groups units by length."""
        parts = [self._pick(number, seed, epoch, train, by_image) for number in range(len(self.sources))]
        members = [offset + part.members for offset, part in zip(self.offsets[:-1], parts, strict=True)]
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        order = Order(np.concatenate(members), starts)
        if not train:
            return order
        if megabatch:
            words = np.concatenate([self._known(number, "lengths") for number in range(len(self.sources))])
            total = np.concatenate([[0], np.cumsum(words[order.members])])
            lengths = total[order.starts[1:]] - total[order.starts[:-1]]
            return _reordered(order, length_grouped(lengths, megabatch, np.random.default_rng([seed, epoch, len(parts)])))
        rng = np.random.default_rng([seed, epoch, len(parts)])
        keys = [(part.starts[:-1] + rng.random(len(part)) * np.diff(part.starts)) / part.starts[-1] for part in parts if len(part)]
        return _reordered(order, np.argsort(np.concatenate(keys), kind="stable"))

    def lines(self) -> list[dict[str, Any]]:
        """One row a source for tables and plots: name, category, samples, wanted in an epoch, share, times each is seen."""
        total = self.samples_per_epoch
        return [
            {
                "source": config.name,
                "category": config.category,
                "samples": len(source),
                "wanted": wanted,
                "share": wanted / total,
                "repeats": wanted / min(len(source), config.cap or len(source)),
            }
            for config, source, wanted in zip(self.configs, self.sources, self.wanted, strict=True)
        ]

    def summary(self) -> str:
        """One line: unique samples, samples of an epoch, how often they repeat (user report U18)."""
        unique = sum(min(row["wanted"], row["samples"], config.cap or row["samples"]) for row, config in zip(self.lines(), self.configs, strict=True))
        most = max(self.lines(), key=lambda row: row["repeats"])
        repeats = f"with repeats (up to {most['repeats']:.2f} x, {most['source']})" if most["repeats"] > 1 else "each at most once"
        return f"{len(self):,} samples in {len(self.sources)} sources; an epoch is {self.samples_per_epoch:,} samples, {unique:,} different, {repeats}"

    def _pick(self, number: int, seed: int, epoch: int, train: bool, by_image: bool) -> Order:
        """Units of one source for one epoch, shuffled in training, numbered within the source."""
        source, wanted = self.sources[number], self.wanted[number]
        n, draw_order = len(source), getattr(source, "draw_order", None) if train and not by_image else None
        members, sizes = self._units(number) if by_image else (np.arange(n), np.ones(n, dtype=np.int64))
        pool = min(n, self.configs[number].cap or n)
        capped = pool < n and not getattr(source, "resampled", False)  # drawing with replacement there is no part to keep to
        if capped:
            members, sizes = _capped(members, sizes, pool, np.random.default_rng([seed, number]) if train else None, draw_order)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        chosen: list[np.ndarray] = []
        rng, count = np.random.default_rng([seed, epoch, number]), 0
        while count < wanted:
            if draw_order:
                units = _places(draw_order(rng, n), members) if capped else draw_order(rng, min(pool, wanted - count))
            else:
                units = rng.permutation(len(sizes)) if train else np.arange(len(sizes))
            until = np.searchsorted(np.cumsum(sizes[units]), min(pool, wanted - count)) + 1
            chosen.append(units[:until])
            count += min(int(sizes[units[:until]].sum()), pool)
        units = np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
        sizes = sizes[units]
        picked = members[_ranges(starts[units], sizes)]
        ends = np.minimum(np.cumsum(sizes), wanted)  # the last unit is cut where it overshoots
        return Order(picked[:wanted], np.concatenate([[0], ends]).astype(np.int64))

    def _units(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(members ordered by picture, examples of each picture) of one source; computed once."""
        groups = self._known(number, "groups")
        return np.argsort(groups, kind="stable"), np.bincount(groups)

    def _known(self, number: int, what: str) -> np.ndarray:
        """``groups`` (the number of its picture) or ``lengths`` (its words) of each example of one source."""
        if (number, what) not in self._facts:
            source = self.sources[number]
            made = source.facts[what] if hasattr(source, "facts") else MADE[what](source)
            self._facts[number, what] = made
        return self._facts[number, what]


class ListSource:
    """Examples already in memory."""

    def __init__(self, examples: Sequence[Example], name: str = "examples"):
        self.examples, self.name = list(examples), name

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def mixture_of(examples: Sequence[Example], name: str = "examples") -> Mixture:
    """A mixture of one source: examples already in memory."""
    return Mixture([SourceConfig(name=name, format="llava", path="memory")], [ListSource(examples, name)])


def pool(config: SourceConfig, size: int) -> int:
    """Samples an epoch takes of a source of ``size`` that has no weight: at most its cap, times its multiple."""
    return round(min(size, config.cap or size) * (config.multiple or 1))


def wanted_counts(configs: Sequence[SourceConfig], sizes: Sequence[int], samples_per_epoch: int | None = None) -> list[int]:
    """Samples of each source in one epoch.

    A weight is a share of the mixture; sources without one divide the rest by their `pool`. ConfigError where the shares leave
    nothing for the rest, or a source has a weight and a multiple.
    """
    if both := [config.name for config in configs if config.weight is not None and config.multiple is not None]:
        raise ConfigError(f"data.sources: {both[0]!r} has a weight and a multiple, which both say how often it is seen; keep one of them")
    pools = [pool(config, size) for config, size in zip(configs, sizes, strict=True)]
    total = samples_per_epoch or sum(pools)
    given = sum(config.weight or 0 for config in configs)
    rest = sum(count for config, count in zip(configs, pools, strict=True) if config.weight is None)
    if rest and given >= 1:
        left = [config.name for config in configs if config.weight is None]
        raise ConfigError(f"data.sources: the given weights add up to {given:g}, which leaves no share for {left[0]!r}; lower them below 1")
    scale = given if not rest else 1.0
    shares = [(1 - given) * count / rest if config.weight is None else config.weight / scale for config, count in zip(configs, pools, strict=True)]
    exact = np.array(shares) * total
    counts = np.floor(exact + 1e-9).astype(int)
    for number in np.argsort(counts - exact, kind="stable")[: total - counts.sum()]:  # largest remainders
        counts[number] += 1
    return counts.tolist()


def length_grouped(lengths: np.ndarray, megabatch: int, rng: np.random.Generator) -> np.ndarray:
    """Order of units for ``group_by_modality_length``: megabatches of one modality, inside each from long to short.

    ``lengths`` are positive with a picture and negative without. Megabatches are shuffled together; what does not fill one comes
    last, both modalities mixed (the published sampler, but seeded).
    """
    full, tail = [], []
    for group in (np.flatnonzero(lengths > 0), np.flatnonzero(lengths <= 0)):
        group = rng.permutation(group)
        cut = len(group) // megabatch * megabatch
        full += [part[np.argsort(-np.abs(lengths[part]), kind="stable")] for part in group[:cut].reshape(-1, megabatch)]
        tail.append(group[cut:])
    rest = np.sort(np.concatenate(tail))
    return np.concatenate([*(full[number] for number in rng.permutation(len(full))), rest]).astype(np.int64)


def iterate(mixture: Mixture, order: Order) -> Iterator[int]:
    """Global example numbers of an epoch in order."""
    for unit in range(len(order)):
        yield from order.unit(unit).tolist()


def _capped(
    members: np.ndarray, sizes: np.ndarray, cap: int, rng: np.random.Generator | None, draw_order: Callable | None
) -> tuple[np.ndarray, np.ndarray]:
    """The part of a source that a cap leaves, the same in every epoch: ``cap`` members in whole units but for the last. Without ``rng``
    it is the beginning."""
    if draw_order:
        kept = np.sort(draw_order(rng, cap))
        return kept, np.ones(len(kept), dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    units = rng.permutation(len(sizes)) if rng else np.arange(len(sizes))
    units = units[: np.searchsorted(np.cumsum(sizes[units]), cap) + 1]
    cut = sizes[units]
    cut[-1] -= cut.sum() - cap
    return members[_ranges(starts[units], cut)], cut


def _places(drawn: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Where in ``members`` (ascending) those of ``drawn`` stand that are among them."""
    places = np.minimum(np.searchsorted(members, drawn), len(members) - 1)
    return places[members[places] == drawn]


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenation of start, start + 1, ... (size of them) for each pair."""
    before = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(starts - before, sizes)


def _reordered(order: Order, units: np.ndarray) -> Order:
    sizes = np.diff(order.starts)[units]
    return Order(order.members[_ranges(order.starts[units], sizes)], np.concatenate([[0], np.cumsum(sizes)]))


def group_numbers(source: Source) -> np.ndarray:
    """For each example the number of its picture, by first appearance; examples without pictures are alone."""
    seen: dict[Any, int] = {}
    group = getattr(source, "group", None)
    out = np.empty(len(source), dtype=np.int64)
    for index in range(len(source)):
        identity = group(index) if group else tuple(ref.identity for ref in source[index].images)
        out[index] = seen.setdefault(identity or ("alone", index), len(seen))
    return out


def lengths_of(source: Source) -> np.ndarray:
    """`example_length` of each example."""
    return np.array([example_length(source[index]) for index in range(len(source))], dtype=np.int64)


def example_length(example: Example) -> int:
    """Words of an example, negative without a picture (the published measure, which leaves image tokens out)."""
    words = sum(len(turn.text.split()) for turn in example.turns)
    return words if example.images else -words


MADE = {"groups": group_numbers, "lengths": lengths_of}
