"""What goes into one row: conversations kept whole, questions about one picture sharing its copy, rows filled first-fit.

An `Item` is one or several tokenised conversations with the same beginning (picture included). The beginning stands once in the row,
the rest of each conversation follows as a branch that sees the beginning and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmkit.config import IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX
from mmkit.data.conversation import Encoded


@dataclass(frozen=True)
class Limits:
    """What one row can hold: tokens (image slots included), pictures, regions."""

    tokens: int
    images: int
    regions: int


@dataclass(frozen=True, eq=False)
class Member:
    """A tokenised example on its way into a row: its global number, pictures, the slots each picture takes,
    and how many tokens were cut from its end."""

    index: int
    encoded: Encoded
    images: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    cut: int = 0

    @property
    def length(self) -> int:
        """Tokens in a row of its own."""
        return len(self.encoded.ids) + sum(self.slots) - len(self.slots)

    def truncated(self, tokens: int) -> Member | None:
        """The first ``tokens`` of it, labels, pictures and regions in step, as Cambrian-1's and LLaVA's
        collators cut a row once its pictures stand in it; None where the cut falls inside a picture or leaves
        no supervised token."""
        ids, pictures = self.encoded.ids, self.encoded.ids == IMAGE_TOKEN_INDEX
        width = np.ones(len(ids), dtype=np.int64)
        width[pictures] = self.slots
        ends = np.cumsum(width)
        kept = int(np.searchsorted(ends, tokens, side="right"))
        inside = kept < len(ids) and bool(pictures[kept]) and ends[kept] - width[kept] < tokens
        if inside or not self.encoded.trained[:kept].any():
            return None
        n_images, n_regions = int(pictures[:kept].sum()), int((ids[:kept] == REGION_TOKEN_INDEX).sum())
        encoded = Encoded(ids[:kept], self.encoded.trained[:kept], self.encoded.regions[:n_regions])
        cut = self.cut + self.length - int(width[:kept].sum())
        images, slots = self.images[:n_images], self.slots[:n_images]
        return replace(self, encoded=encoded, images=images, slots=slots, cut=cut)


@dataclass(frozen=True, eq=False)
class Item:
    """Conversations placed together; the first ``prefix`` ids are common to all (0 when there is one)."""

    members: tuple[Member, ...]
    prefix: int = 0

    @property
    def length(self) -> int:
        """Tokens it takes in a row."""
        first = self.members[0]
        return first.length + sum(len(member.encoded.ids) - self.prefix for member in self.members[1:])

    @property
    def n_images(self) -> int:
        """Pictures it takes in a row."""
        return len(self.members[0].slots)

    @property
    def n_regions(self) -> int:
        """Region tokens of all its conversations."""
        return sum(len(member.encoded.regions) for member in self.members)

    @property
    def n_targets(self) -> int:
        """Supervised tokens of all its conversations."""
        return sum(int(member.encoded.trained.sum()) for member in self.members)


Row = tuple[Item, ...]


def items_of(members: Sequence[Member], limits: Limits) -> list[Item]:
    """Conversations about the same pictures as few items: as many branches in each as the limits allow.

    Members with other pictures than the first, or whose common beginning does not include every picture, become items of their own.
    """
    if len(members) < 2:
        return [Item((member,)) for member in members]
    prefix = common_prefix([member.encoded for member in members])
    pictures = members[0].encoded.ids == IMAGE_TOKEN_INDEX
    shared = pictures.any() and not pictures[prefix:].any() and all(member.images == members[0].images for member in members)
    if not shared:
        return [Item((member,)) for member in members]
    items, branches, length, regions = [], [], 0, 0
    for member in members:
        more, more_regions = len(member.encoded.ids) - prefix, len(member.encoded.regions)
        if branches and (length + more > limits.tokens or regions + more_regions > max(limits.regions, 1)):
            items.append(_item(branches, prefix))
            branches = []
        if not branches:
            length, regions = member.length, more_regions
        else:
            length, regions = length + more, regions + more_regions
        branches.append(member)
    return [*items, _item(branches, prefix)]


def common_prefix(encoded: Sequence[Encoded]) -> int:
    """How many first ids all conversations share, none of them supervised or a region, leaving each at least one id."""
    first = encoded[0].ids
    end = min(len(other.ids) for other in encoded) - 1
    for other in encoded:
        end = min(end, _first(other.trained[:end], end), _first(other.ids[:end] == REGION_TOKEN_INDEX, end))
        end = _first(first[:end] != other.ids[:end], end)
    return end


def first_fit(items: Sequence[Item], limits: Limits) -> list[Row]:
    """Rows of items, long ones placed first, each into the first row with room. Items keep their order inside a row.

    Where no row has room for all questions about a picture, some of them fill the emptiest row together with a second copy of the
    picture, if they bring more tokens than that copy costs.
    """
    rows: list[list[tuple[int, Item]]] = []
    room: list[list[int]] = []
    queue = sorted(enumerate(items), key=lambda pair: -pair[1].length)
    for number, item in queue:
        while item is not None:
            need = (item.length, item.n_images, item.n_regions)
            place = next((row for row, left in enumerate(room) if all(a <= b for a, b in zip(need, left, strict=True))), None)
            part, item_left = item, None
            if place is None and room:
                widest = max(range(len(room)), key=lambda row: room[row][0] if room[row][1] >= item.n_images else -1)
                part, item_left = split(item, room[widest])
                place = widest if part is not None else None
            if place is None:
                part, item_left = item, None
                rows.append([])
                room.append([limits.tokens, limits.images, max(limits.regions, item.n_regions)])
                place = len(rows) - 1
            rows[place].append((number, part))
            used = (part.length, part.n_images, part.n_regions)
            room[place] = [b - a for a, b in zip(used, room[place], strict=True)]
            item = item_left
    return [tuple(item for _, item in sorted(row, key=lambda pair: pair[0])) for row in rows]


def split(item: Item, room: Sequence[int]) -> tuple[Item | None, Item | None]:
    """(as many conversations of ``item`` as fit in ``room``, the others); (None, item) where too few fit to be worth a copy."""
    tokens, images, regions = room
    begin = item.members[0].length - len(item.members[0].encoded.ids) + item.prefix
    used, used_regions, count = begin, 0, 0
    for member in item.members:
        used, used_regions = used + len(member.encoded.ids) - item.prefix, used_regions + len(member.encoded.regions)
        if used > tokens or used_regions > regions:
            break
        count, filled = count + 1, used
    if item.n_images > images or not 0 < count < len(item.members) or filled < 2 * begin:
        return None, item
    return _item(list(item.members[:count]), item.prefix), _item(list(item.members[count:]), item.prefix)


def row_length(row: Row) -> int:
    """Tokens of a row."""
    return sum(item.length for item in row)


def power_of_two(count: int, low: int, high: int) -> int:
    """The smallest power of two that is at least ``count`` and ``low``, but at most ``high`` where that is enough."""
    size = low
    while size < count:
        size *= 2
    return max(min(size, high), count)


def bucket_size(count: int, low: int = 16) -> int:
    """The smallest of ``low``, 1.5 low, 2 low, 3 low, 4 low, 6 low ... that is at least ``count``: multiples of 8, at most a half too many."""
    size = power_of_two(count, low, 1 << 62)
    return size * 3 // 4 if size > low and count <= size * 3 // 4 else size


def _item(branches: list[Member], prefix: int) -> Item:
    return Item(tuple(branches), prefix if len(branches) > 1 else 0)


def _first(flags: np.ndarray, otherwise: int) -> int:
    return int(flags.argmax()) if flags.any() else otherwise
