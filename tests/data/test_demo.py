"""The offline packs: what is in them, that splits do not leak, and what happens where apt and npm are missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from mmkit.config import ConfigError
from mmkit.data import demo, demo_charts, demo_easy_vqa, demo_emoji, demo_files, demo_stamps
from mmkit.data.demo_files import AssetMissing, debian_package, npm_package, python_package
from mmkit.data.demo_words import concept, held_out, names_held_out, singular, with_article, words
from mmkit.data.regions import box_of_mask, encode_mask

NAMES = ("lion", "tiger", "apple", "pear", "truck", "car", "drum", "hat", "owl", "crow", "rose", "tulip", "bee", "ant", "hammer", "saw")
FOLDERS = ("animals/mammals", "animals/mammals", "food/fruit", "food/fruit", "vehicles", "vehicles", "hobbies/music", "clothes/hats",
           "animals/birds", "animals/birds", "plants/flowers", "plants/flowers", "animals/insects", "animals/insects",
           "household/tools", "household/tools")  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A cache with the easy-VQA pack, made once."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKIT_CACHE", str(folder))
        demo.prepare(["easy_vqa"])
    return folder


@pytest.fixture
def easy(prepared, monkeypatch):
    """The cache that holds easy-VQA."""
    monkeypatch.setenv("MMKIT_CACHE", str(prepared))
    return prepared


@pytest.fixture
def no_fetch(cache, monkeypatch):
    """A machine without apt, dpkg, npm or installed Debian data."""
    monkeypatch.setattr(demo_files.shutil, "which", lambda name: None)
    original = demo_files.debian_package
    for module in (demo_stamps, demo_emoji):
        monkeypatch.setattr(module, "debian_package", lambda *args: original(*args, system=cache / "nowhere"))


@pytest.fixture
def stamps(tmp_path, monkeypatch):
    """Small packages of the same layout as Debian's: sixteen stamps, two of each name, and two photographs."""
    root, photos = tmp_path / "stamps", tmp_path / "photos"
    photos.mkdir()
    for number, (name, folder) in enumerate(zip(NAMES, FOLDERS, strict=True)):
        for copy in (1, 2):
            path = root / folder / f"{name}{copy}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGBA", (60 + number, 40 + 3 * number))
            ImageDraw.Draw(picture).ellipse((5, 5, 50, 30), fill=(15 * number, 100, 200, 255))
            picture.save(path)
            path.with_suffix(".txt").write_text(f"A {'big' if copy == 2 else 'small'} {name}.\nde.utf8=x\n")
    (root / "symbols").mkdir()
    shutil.copy(root / "vehicles" / "car1.png", root / "symbols" / "a.png")
    (root / "symbols" / "a.txt").write_text("The letter A.")
    for number in range(2):
        Image.new("RGB", (500, 400), (0, 100 * number, 50)).save(photos / f"{number}.jpg")
    monkeypatch.setattr(demo_stamps, "COMPOSITES", {"train": 10, "test": 8})
    folders = {demo_stamps.STAMPS[0]: root, demo_stamps.BACKGROUNDS[0]: photos}

    def fake(name, probe, licence):
        if name not in folders:
            raise AssetMissing(f"no {name} here")
        return demo_files.Asset(folders[name], name, "1", licence)

    for module in (demo_stamps, demo_emoji):
        monkeypatch.setattr(module, "debian_package", fake)
    monkeypatch.setattr(demo_emoji, "npm_package", lambda name, *_: (_ for _ in ()).throw(AssetMissing(f"no {name} here")))
    return root


def few(original, package, split, limit):
    """The first few described pictures, so that a test is quick."""
    return original(package, split, min(limit, 10))


def folder_of(tmp_path: Path, name: str) -> Path:
    """A new empty folder."""
    path = tmp_path / name
    path.mkdir()
    return path


def concepts(rows: list[dict]) -> set[str]:
    """The concepts of rows."""
    return {line["meta"]["concept"] for line in rows}


# ---------------------------------------------------------------- easy-VQA


def test_easy_vqa_has_all_questions_and_those_of_a_picture_stand_together(easy):
    (record,) = demo.prepare(["easy_vqa"])
    assert record.status == "ready" and {"train": 38575, "test": 9673}.items() <= record.counts.items()
    assert record.licences == ("MIT",) and record.sources == ("easy-vqa 1.0",) and record.pictures == 5000
    rows = demo.open_pack("easy_vqa", "test").rows
    starts = [place for place in range(1, len(rows)) if rows[place]["images"] != rows[place - 1]["images"]]
    assert len(starts) + 1 == len({line["images"][0] for line in rows})
    example = demo.open_pack("easy_vqa", "test")[0]
    assert Path(example.images[0].data).exists() and example.turns[0].text.startswith("<image>\n")
    assert example.meta["answer"] == example.turns[1].text and example.meta["image"] == "test-0"


def test_captions_say_what_the_questions_tell_and_show_training_pictures_only(easy):
    rows = demo.open_pack("easy_vqa", "captions").rows
    asked = defaultdict(dict)
    for line in demo.open_pack("easy_vqa", "train").rows:
        asked[line["images"][0]][line["meta"]["type"]] = line["meta"]["answer"]
    assert len(rows) > 2000
    for line in rows:
        facts = asked[line["images"][0]]
        assert line["turns"][1][1] == f"A {facts['colour']} {facts['shape']}." and "/train/" in line["images"][0]


def test_questions_of_one_picture_are_one_group(easy):
    source = demo.open_pack("easy_vqa", "test")
    places = (0, 1, 20)
    assert [source.group(place) for place in places] == [tuple(ref.identity for ref in source[place].images) for place in places]
    assert source.group(0) == source.group(1) != source.group(20)
    assert source.group(0)[0] == demo_easy_vqa.picture_path("test", 0)
    assert source.fingerprint != demo.open_pack("easy_vqa", "captions").fingerprint


def test_balanced_keeps_two_yes_no_questions_a_picture_and_every_other(easy):
    rows = demo.open_pack("easy_vqa", "train").rows
    kept = demo.open_pack("easy_vqa", "train_balanced").rows
    count = defaultdict(int)
    for line in kept:
        count[line["meta"]["image"]] += line["meta"]["type"] == "yes-no"
    assert max(count.values()) == demo_easy_vqa.YES_NO_KEPT
    visual = [line["key"] for line in rows if line["meta"]["type"] != "yes-no"]
    assert [line["key"] for line in kept if line["meta"]["type"] != "yes-no"] == visual
    assert [line["key"] for line in demo_easy_vqa.balanced(rows, 0)] == [line["key"] for line in kept]


def test_shape_boxes_are_tight_around_the_pixels_of_the_shape():
    package = python_package("easy_vqa", "easy-vqa", "").folder
    for fact in demo_easy_vqa.described(package, "test", 20):
        (x1, y1, x2, y2), mask = demo_easy_vqa.shape_box(package / fact["path"].partition(":")[2])
        assert mask[y1 : y2 + 1, x1 : x2 + 1].sum() == mask.sum() and 8 <= max(x2 - x1, y2 - y1) <= 40
        assert mask[y1].any() and mask[y2].any() and mask[:, x1].any() and mask[:, x2].any()
        filled = mask.sum() / ((x2 - x1 + 1) * (y2 - y1 + 1))
        assert filled > 0.95 if fact["shape"] == "rectangle" else 0.35 < filled < 0.9


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("caption", "head"),
    [("A big eared rabbit.", "rabbit"), ("A pair of cherries.", "cherry"), ("The baby of a gnu.", "baby"),
     ("A plumber’s wrench.", "plumber"),
     ("A horse with a saddle", "horse"), ("Two boxes", "box"), ("A “Stop” sign. Stop here", "sign"),
     ("Hibiscus", "hibiscus"), ("", "")],
)  # fmt: skip
def test_concept_is_the_head_noun_in_the_singular(caption, head):
    assert concept(caption) == head


def test_words_are_singular_and_articles_fit():
    assert words("Cherries, foxes & glass leaves") == ["cherry", "fox", "glass", "leaf"]
    assert singular("boxes") == "box" and singular("iris") == "iris" and singular("wolves") == "wolf"
    assert with_article("owl") == "an owl" and with_article("the Sun") == "the Sun" and with_article("rose") == "a rose"


def test_held_out_concepts_depend_on_seed_only():
    names = [f"thing{one}{two}" for one in "abcdefghij" for two in "abcdefghij"]
    first = held_out(names, 0, kept={"thingab"})
    assert first == held_out(reversed(names), 0, kept={"thingab"}) and len(first) == 28 and "thingab" not in first
    assert first != held_out(names, 1) and names_held_out("two " + min(first), first)


# ---------------------------------------------------------------- stamps


def test_captions_and_regions_split_by_concept(stamps, tmp_path):
    for build in (demo_stamps.build_captions, demo_stamps.build_regions):
        folder = folder_of(tmp_path, build.__name__)
        build(folder, 0)
        train, test = (demo_files.read_split(folder, split) for split in ("train", "test"))
        assert train and test and not concepts(train) & concepts(test)
        assert all(not names_held_out(line["turns"][1][1] + line["turns"][0][1], frozenset(concepts(test))) for line in train)
        assert {path.name for path in (folder / "images").iterdir()} == {line["images"][0].split("/")[1] for line in train + test}


def test_boxes_and_masks_are_exact_and_uncovered(stamps, tmp_path):
    folder = folder_of(tmp_path, "regions")
    demo_stamps.build_regions(folder, 0)
    examples = [demo_files.to_example(line, folder, "regions") for line in demo_files.read_split(folder, "test")]
    covered = defaultdict(list)
    for example in examples:
        region = example.regions[0]
        if example.meta["type"] == "refer":
            mask = decoded(region.mask)
            assert box_of_mask(mask) == tuple(int(corner) for corner in region.box.corners)
            covered[example.meta["image"]].append(mask)
        else:
            assert region.kind == "box" and example.turns[1].text == "<region>" and example.meta["name"] in example.turns[0].text
    assert all(np.sum(masks, axis=0).max() == 1 for masks in covered.values())
    assert {len(masks) for masks in covered.values()} == {2, 3}


def decoded(lengths: dict) -> np.ndarray:
    """A mask from COCO run lengths, run by run."""
    flat = []
    for place, count in enumerate(lengths["counts"]):
        flat += [bool(place % 2)] * count
    return np.array(flat).reshape(lengths["size"], order="F")


def test_run_lengths_survive_masks_that_start_true():
    for mask in (np.ones((3, 2), bool), np.zeros((2, 3), bool), np.array([[True, False], [False, True]])):
        assert (decoded(encode_mask(mask)) == mask).all()


def test_packs_are_the_same_bytes_each_time(stamps, tmp_path):
    one, two, other = (folder_of(tmp_path, name) for name in ("one", "two", "other"))
    for folder, seed in ((one, 0), (two, 0), (other, 1)):
        demo_stamps.build_captions(folder, seed)
    names = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    assert (one / "test.jsonl").read_bytes() != (other / "test.jsonl").read_bytes()


def test_symbols_and_long_captions_are_left_out(stamps):
    (stamps / "vehicles" / "car1.txt").write_text("A car that my uncle once drove all the way to the sea.")
    found = demo_stamps.stamps(stamps)
    assert len(found) == 31 and all("letter" not in stamp.caption for stamp in found)
    assert {stamp.label for stamp in found if stamp.concept == "hammer"} == {"tool"} and found[0].name.startswith(("small", "big"))


# ---------------------------------------------------------------- contrastive pairs


def test_no_test_concept_is_in_any_training_pair(stamps, tmp_path, monkeypatch):
    art = python_package("easy_vqa", "easy-vqa", "")
    monkeypatch.setattr(demo_emoji, "emoji_artist", lambda: (lambda entry: Image.new("RGB", (4, 4)), art))
    used, absent = demo_emoji.build(folder := folder_of(tmp_path, "pairs"), 0)
    assert not absent and len(used) == 3
    train, test = (demo_files.read_split(folder, split) for split in ("train", "test"))
    held = frozenset(concepts(test))
    assert len(train) > 1500 and not [line for line in train if names_held_out(line["turns"][1][1], held)]
    assert all(line["key"].startswith("test-stamp") for line in test) and not any("flag" in line["meta"]["group"] for line in train)
    assert len({line["turns"][1][1].lower() for line in test}) == len(test)
    twice = [line for line in train if line["meta"]["label"] and line["key"].endswith("-1")]
    assert twice and all(line["turns"][1][1].endswith(line["meta"]["label"]) for line in twice)


def test_npm_pictures_take_the_place_of_the_font(stamps, tmp_path, monkeypatch):
    pictures = tmp_path / "npm" / "img" / "google" / "64"
    pictures.mkdir(parents=True)
    Image.new("RGBA", (64, 64), (200, 0, 0, 255)).save(pictures / "1f600.png")
    package = demo_files.Asset(tmp_path / "npm", "emoji-datasource-google", "16.0.0", "MIT")
    monkeypatch.setattr(demo_emoji, "npm_package", lambda *_: package)
    draw, asset = demo_emoji.emoji_artist()
    drawn = draw({"image": "1f600.png"})
    assert asset.label == "emoji-datasource-google 16.0.0" and drawn.size == (demo_emoji.SIDE,) * 2
    assert drawn.getpixel((80, 80)) == (200, 0, 0) and drawn.getpixel((1, 1)) == (255, 255, 255)


# ---------------------------------------------------------------- charts


def test_chart_answers_follow_from_the_bars_and_test_tables_are_new(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_charts, "CHARTS", {"train": 4, "test": 3})
    folder = folder_of(tmp_path, "charts")
    demo_charts.build(folder, 0)
    train, test = (demo_files.read_split(folder, split) for split in ("train", "test"))
    assert len(train) == 20 and len(test) == 15 and not {x["meta"]["table"] for x in train} & {x["meta"]["table"] for x in test}
    for line in train + test:
        meta = line["meta"]
        value = {colour: height for _, height, colour in meta["bars"]}
        named = [word for word in meta["question"].split() if word in value]
        expected = {
            "count": lambda: str(len(value)),
            "colour": lambda: (max if "tallest" in meta["question"] else min)(value, key=value.get),
            "yes-no": lambda: "yes" if value[named[0]] > value[named[1]] else "no",
        }[meta["type"]]()
        assert meta["answer"] == expected
    assert Image.open(folder / test[0]["images"][0]).size == (160, 160)


def test_chart_series_hold_the_means_of_the_tables():
    folder = python_package("vega_datasets", "vega_datasets", "").folder / "_data"
    series = {(one.table, one.title): one.values for one in demo_charts.tables(folder)}
    assert series["iris", "petalWidth"] == pytest.approx({"setosa": 0.246, "versicolor": 1.326, "virginica": 2.026}, abs=1e-6)
    assert len(series) > 20 and all(len(values) >= 3 for values in series.values())


# ---------------------------------------------------------------- prepare, records, faults


def test_without_apt_and_npm_every_pack_still_comes_from_pip(no_fetch, monkeypatch):
    monkeypatch.setattr(demo_easy_vqa, "described", functools.partial(few, demo_easy_vqa.described))
    lines: list[str] = []
    names = ("captions", "regions", "clip_pairs")  # the others never need more than pip has
    records = {record.name: record for record in demo.prepare(names, lines.append)}
    assert {record.status for record in records.values()} == {"reduced"}
    assert "apt-get is not on this machine" in records["captions"].reason and "npm is not on this machine" in records["clip_pairs"].reason
    assert len(lines) == 2 * len(records)
    for name in records:
        assert len(demo.open_pack(name, "test")) == records[name].counts["test"] > 0
    caption = demo.open_pack("captions", "train")[0]
    assert caption.caption.startswith("A ") and caption.meta["concept"] in demo_easy_vqa.SHAPES


def test_a_second_prepare_reuses_what_is_there(easy):
    before = {path: path.stat().st_mtime_ns for path in easy.rglob("*.json*")}
    lines: list[str] = []
    (record,) = demo.prepare(["easy_vqa"], lines.append)
    assert {path: path.stat().st_mtime_ns for path in easy.rglob("*.json*")} == before and before and len(lines) == 1
    assert record.folder == str(demo.pack_folder("easy_vqa"))


def test_a_pack_that_fails_leaves_nothing_behind(cache, monkeypatch):
    def broken(folder, seed):
        (folder / "train.jsonl").write_text("{}\n")
        raise RuntimeError("disk on fire")

    monkeypatch.setitem(demo.PACKS, "easy_vqa", demo.PackSpec("broken", broken))
    with pytest.raises(RuntimeError, match="disk on fire"):
        demo.prepare(["easy_vqa"])
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_unknown_packs_and_splits_are_named(easy, monkeypatch):
    with pytest.raises(ConfigError, match="no pack 'easy_vga'; did you mean 'easy_vqa'"):
        demo.open_pack("easy_vga")
    with pytest.raises(ConfigError, match="no split 'tset'; did you mean 'test'.*train_balanced"):
        demo.open_pack("easy_vqa", "tset")
    missing = demo.PackSpec("nothing", lambda folder, seed: python_package("no_such_package", "no-such-package", ""))
    monkeypatch.setitem(demo.PACKS, "nothing", missing)
    (record,) = demo.prepare(["nothing"])
    assert record.status == "absent" and "pip install no-such-package" in record.reason
    with pytest.raises(ConfigError, match="pack 'nothing' is not available here: Python package no-such-package"):
        demo.open_pack("nothing")


# ---------------------------------------------------------------- fetching


def tool(folder: Path, name: str, script: str) -> None:
    """An executable shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not on this machine")
def test_debian_packages_are_unpacked_into_the_cache_without_root(cache, tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = ("Package: toy", "Version: 1.2-3", "Architecture: all", "Maintainer: x <x@example.org>", "Description: x", "")
    (tree / "DEBIAN" / "control").write_text("\n".join(control))
    (tree / "usr" / "share" / "toy").mkdir(parents=True)
    (tree / "usr" / "share" / "toy" / "file").write_text("content")
    subprocess.run(["dpkg-deb", "-b", str(tree), str(tmp_path / "toy.deb")], check=True, capture_output=True)
    tools = folder_of(tmp_path, "tools")
    # the first download fails as it does without package lists; the second, with private lists, works
    copies = f"*State::Lists*) cp {tmp_path}/toy.deb .;;"
    tool(tools, "apt-get", f'case "$*" in *update*) exit 0;; {copies} *) echo "E: Unable to locate" >&2; exit 100;; esac')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    asset = debian_package("toy", "usr/share/toy", "MIT", system=tmp_path / "nowhere")
    assert asset.label == "toy 1.2-3" and (asset.folder / "file").read_text() == "content"
    assert not list(cache.rglob("*.deb")) and not (cache / "debian" / "toy" / "lists").exists()
    (tools / "apt-get").unlink()
    assert debian_package("toy", "usr/share/toy", "MIT", system=tmp_path / "nowhere") == asset
    assert debian_package("toy", "usr/share/toy", "MIT", system=tree).folder == tree / "usr/share/toy"


def test_a_failed_download_says_which_command_and_leaves_nothing(cache, tmp_path, monkeypatch):
    tools = folder_of(tmp_path, "tools")
    for name in ("apt-get", "dpkg-deb", "npm"):
        tool(tools, name, 'echo "first" >&2; echo "E: network is unreachable" >&2; exit 100')
    monkeypatch.setenv("PATH", str(tools) + ":/bin:/usr/bin")
    with pytest.raises(AssetMissing, match="apt-get .* ended with status 100: E: network is unreachable"):
        debian_package("toy", "usr/share/toy", "MIT", system=tmp_path / "nowhere")
    with pytest.raises(AssetMissing, match="npm pack --silent toy@1.0.0 ended with status 100"):
        npm_package("toy", "1.0.0", "MIT")
    assert not [path for path in cache.rglob("*") if path.is_file()]
    monkeypatch.setattr(demo_files, "TIMEOUT", 0.2)
    tool(tools, "apt-get", "sleep 5")
    with pytest.raises(AssetMissing, match="did not end within 0.2 s"):
        demo_files._command(["apt-get", "download", "toy"], tmp_path)


def test_npm_archives_are_unpacked(cache, tmp_path, monkeypatch):
    tools, source = folder_of(tmp_path, "tools"), tmp_path / "source" / "package"
    source.mkdir(parents=True)
    (source / "package.json").write_text("{}")
    tool(tools, "npm", f"tar -czf toy-1.0.0.tgz -C {tmp_path}/source package")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    asset = npm_package("toy", "1.0.0", "MIT")
    assert (asset.folder / "package.json").exists() and asset.label == "toy 1.0.0" and not list(cache.rglob("*.tgz"))
