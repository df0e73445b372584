"""Packs from Debian's captioned photo cut-outs: captions, regions, and the stamps of the contrastive pairs.

``tuxpaint-stamps-default`` holds some 540 captioned pictures with an alpha channel, ``mate-backgrounds`` photographs to paste
them on. A composite's boxes and masks are exact: they come from alpha, minus what a later stamp covers. Splits are by concept
(`demo_words`): the objects of the test pictures are in no training picture.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from mmkit.data.demo_files import Asset, debian_package, region_row, row, write_split
from mmkit.data.demo_words import concept, held_out, names_held_out, with_article, words
from mmkit.data.regions import box_of_mask, encode_mask

LICENCE = "GPL-2"
STAMPS = ("tuxpaint-stamps-default", "usr/share/tuxpaint/stamps")
BACKGROUNDS = ("mate-backgrounds", "usr/share/backgrounds/mate/nature")
SIDE = 224  # pixels of a composite
LONGEST_CAPTION = 8  # words; longer captions are sentences about the picture, not of what it shows
CAPTIONS = {"train": 2, "test": 1}  # pictures of one stamp
COMPOSITES = {"train": 500, "test": 120}
# folder -> class of the zero-shot test; the longest matching folder counts, folders not listed have no class
CLASSES = {
    "animals/birds": "bird", "animals/fish": "sea animal", "animals/shellfish": "sea animal", "animals/mammals/aquatic": "sea animal",
    "animals/insects": "insect", "animals/mammals": "mammal", "animals/marsupials": "mammal", "clothes": "clothing",
    "food/fruit": "fruit", "food/vegetables": "vegetable", "hobbies/music": "musical instrument", "household": "household object",
    "household/tools": "tool", "plants/flowers": "flower", "plants/trees": "tree", "town/houses": "building",
    "town/monuments": "building", "vehicles": "vehicle", "military/vehicles": "vehicle", "sports": "sport equipment",
    "space": "planet or star",
}  # fmt: skip


@dataclass(frozen=True)
class Stamp:
    """One cut-out: its file, its caption without the full stop, the concept, and the class of its folder (may be empty)."""

    path: Path
    caption: str
    concept: str
    label: str

    @property
    def name(self) -> str:
        """The caption without its article: what a region answer says."""
        first, _, rest = self.caption.partition(" ")
        return (rest if first.lower() in ("a", "an", "the", "some") and rest else self.caption).lower()


def assets() -> tuple[Asset, Asset]:
    """The two Debian packages; AssetMissing where one cannot be had."""
    return debian_package(*STAMPS, LICENCE), debian_package(*BACKGROUNDS, "GPL-2+")


def stamps(folder: Path) -> list[Stamp]:
    """Captioned cut-outs in the order of their paths, without letters, numbers and other symbols."""
    found = []
    for path in sorted(folder.rglob("*.png")):
        inside, text = path.relative_to(folder).as_posix(), path.with_suffix(".txt")
        if inside.startswith("symbols/") or not text.exists():
            continue
        with text.open(encoding="utf8", errors="replace") as file:
            caption = file.readline().strip().rstrip(".!").strip()
        about = concept(caption)
        if about and "." not in caption and len(caption.split()) <= LONGEST_CAPTION:
            found.append(Stamp(path, caption, about, folder_class(inside)))
    return found


def folder_class(inside: str) -> str:
    """The class of a stamp by its path inside the package."""
    fits = [folder for folder in CLASSES if inside.startswith(folder + "/")]
    return CLASSES[max(fits, key=len)] if fits else ""


def test_concepts(all_stamps: list[Stamp], seed: int) -> frozenset[str]:
    """The held-out concepts; a word of a class name is never one."""
    return held_out((stamp.concept for stamp in all_stamps), seed, kept={word for name in CLASSES.values() for word in words(name)})


def by_split(all_stamps: list[Stamp], test: frozenset[str]) -> dict[str, list[Stamp]]:
    """Test: stamps of held-out concepts. Train: stamps whose caption names no held-out concept."""
    return {
        "train": [stamp for stamp in all_stamps if not names_held_out(stamp.caption, test)],
        "test": [stamp for stamp in all_stamps if stamp.concept in test],
    }


def build_captions(folder: Path, seed: int) -> list[Asset]:
    """One stamp on a background, with the stamp's caption."""
    used = assets()
    all_stamps = stamps(used[0].folder)
    backgrounds = Backgrounds(used[1].folder)
    (folder / "images").mkdir()
    for split, chosen in by_split(all_stamps, test_concepts(all_stamps, seed)).items():
        generator, rows = random.Random(f"captions {split} {seed}"), []
        for copy in range(CAPTIONS[split]):
            for place, stamp in enumerate(chosen):
                picture = backgrounds.cut(generator)
                paste(picture, stamp, generator, share=(0.6, 0.95))
                name = f"images/{split}-{copy}-{place:04d}.jpg"
                picture.save(folder / name, quality=90)
                turns = [("user", "<image>"), ("assistant", f"{stamp.caption}.")]
                rows.append(row(f"{split}-{copy}-{place}", [name], turns, concept=stamp.concept, category=stamp.label))
        write_split(folder, split, rows)
    return list(used)


def build_regions(folder: Path, seed: int) -> list[Asset]:
    """Two or three stamps on a background; what is in a region, and where is an object, with exact boxes and masks."""
    used = assets()
    all_stamps = stamps(used[0].folder)
    backgrounds = Backgrounds(used[1].folder)
    (folder / "images").mkdir()
    for split, chosen in by_split(all_stamps, test_concepts(all_stamps, seed)).items():
        generator, rows = random.Random(f"regions {split} {seed}"), []
        for place in range(COMPOSITES[split]):
            picture = backgrounds.cut(generator)
            objects = composite(picture, chosen, generator)
            name = f"images/{split}-{place:04d}.jpg"
            picture.save(folder / name, quality=90)
            rows += region_rows(f"{split}-{place}", name, objects, generator)
        write_split(folder, split, rows)
    return list(used)


class Backgrounds:
    """Nature photographs, each read once and kept small; `cut` gives a seeded square of one."""

    def __init__(self, folder: Path):
        self.photos = []
        for path in sorted(folder.glob("*.jpg")):
            with Image.open(path) as photo:
                photo.draft("RGB", (640, 640))
                small = photo.convert("RGB")
            small.thumbnail((640, 640))
            self.photos.append(small)

    def cut(self, generator: random.Random) -> Image.Image:
        """A SIDE x SIDE picture."""
        photo = generator.choice(self.photos)
        side = generator.randint(SIDE, min(photo.size))
        left, top = generator.randint(0, photo.width - side), generator.randint(0, photo.height - side)
        return photo.crop((left, top, left + side, top + side)).resize((SIDE, SIDE))


def paste(picture: Image.Image, stamp: Stamp, generator: random.Random, share: tuple[float, float], cell=(0, 0, SIDE, SIDE)) -> np.ndarray:
    """Pastes a stamp into ``cell`` of the picture, its longer side a ``share`` of the cell; returns its mask, bool (SIDE, SIDE)."""
    with Image.open(stamp.path) as file:
        cut_out = file.convert("RGBA")
    box = cut_out.getchannel("A").point(lambda alpha: 255 * (alpha > 127)).getbbox()
    cut_out = cut_out.crop(box) if box else cut_out
    left, top, right, bottom = cell
    scale = generator.uniform(*share) * min((right - left) / cut_out.width, (bottom - top) / cut_out.height)
    size = (max(round(cut_out.width * scale), 4), max(round(cut_out.height * scale), 4))
    cut_out = cut_out.resize(size, Image.LANCZOS)
    at = (generator.randint(left, max(right - size[0], left)), generator.randint(top, max(bottom - size[1], top)))
    picture.paste(cut_out, at, cut_out)
    mask = Image.new("L", (SIDE, SIDE))
    mask.paste(cut_out.getchannel("A"), at)
    return np.asarray(mask) > 127


def composite(picture: Image.Image, chosen: list[Stamp], generator: random.Random) -> list[tuple[Stamp, np.ndarray]]:
    """Two or three stamps of different concepts, each in its own quarter or a little over; returns (stamp, visible mask)."""
    half, over = SIDE // 2, SIDE // 16
    quarters = [(x, y) for x in (0, half) for y in (0, half)]
    generator.shuffle(quarters)
    objects: list[tuple[Stamp, np.ndarray]] = []
    for x, y in quarters[: generator.choice((2, 3))]:
        taken = {stamp.concept for stamp, _ in objects}
        stamp = generator.choice([stamp for stamp in chosen if stamp.concept not in taken])
        cell = (max(x - over, 0), max(y - over, 0), min(x + half + over, SIDE), min(y + half + over, SIDE))
        mask = paste(picture, stamp, generator, (0.7, 1.0), cell)
        objects = [(other, visible & ~mask) for other, visible in objects] + [(stamp, mask)]
    return [(stamp, mask) for stamp, mask in objects if mask.any()]


def region_rows(key: str, name: str, objects: list[tuple[Stamp, np.ndarray]], generator: random.Random) -> list[dict]:
    """Two questions an object: what is it (box, or every third time the free-form mask), and where is it."""
    rows = []
    for place, (stamp, mask) in enumerate(objects):
        box = box_of_mask(mask)
        kind = generator.choice(("box", "box", "mask"))
        region = region_row(kind, box, (SIDE, SIDE), encode_mask(mask))
        common = {"image": key, "concept": stamp.concept, "name": stamp.name, "category": stamp.label}
        what = [("user", "<image>\nwhat is <region>?"), ("assistant", stamp.name)]
        rows.append(row(f"{key}-what-{place}", [name], what, [region], type="refer", answer=stamp.name, **common))
        where = [("user", f"<image>\nwhere is {with_article(stamp.name)}?"), ("assistant", "<region>")]
        rows.append(row(f"{key}-where-{place}", [name], where, [region_row("box", box, (SIDE, SIDE))], type="ground", **common))
    return rows
