"""Tars as users bring them, mutated: every sample is delivered as it was written or counted once, and no damage is a traceback."""

import io
import json
import random
import tarfile
from contextlib import closing, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkit.config import DataConfig, FilterRule, SourceConfig
from mmkit.data.shards import open_shards
from mmkit.data.tar_index import opened_index
from mmkit.errors import InputError

FUZZED = settings(
    derandomize=True, database=None, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PICTURE = b"\xff\xd8\xff picture"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text("aé ", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["caption", "alt", "x"]), inner, max_size=2),
    max_leaves=4,
)


@dataclass
class Written:
    """A sample as it is put into a tar: its files (None: a link), and the caption that a reader is to find, None where there is none."""

    files: dict[str, bytes | None] = field(default_factory=dict)
    caption: str | None = None


def sample_of(rng: random.Random, place: str) -> Written:
    """One sample; ``place`` is the caption key it is made for."""
    picture = rng.choice([PICTURE] * 9 + [b"", None, "absent", "gif"])
    sample = Written()
    if picture == "gif":
        sample.files["gif"] = PICTURE
    elif picture != "absent":
        sample.files[rng.choice(["jpg", "PNG", "jpeg", "webp"])] = picture
    text = rng.choice(["a cat", "über\nzwei Zeilen", "猫 🐈", "[1]", '"quoted"'])
    good = text
    if place == "txt":
        kinds = {
            "utf8": (text.encode(), good), "marked": (b"\xef\xbb\xbf" + text.encode(), good), "latin": (b"caf\xe9 \x92", None),
            "utf16": (text.encode("utf-16"), None), "unmarked utf16": ("cat".encode("utf-16-le"), None), "empty": (b" \n", None),
            "json": (json.dumps({"caption": text}).encode(), None), "texts": (json.dumps([text]).encode(), None), "link": (None, None),
        }  # fmt: skip
        kind = rng.choice(["utf8"] * 4 + [*kinds])
        sample.files["txt"], good = kinds[kind]
        if rng.random() < 0.5:
            sample.files["json"] = rng.choice([b"{}", b"{", b"[" * 5_000, b"\xff", b"", b'{"a": 1, "a": 2}', None])
    else:
        value = rng.choice([text, text, text, None, True, 3, 0.5, float("nan"), "", " ", [text], {"caption": text}, []])
        tree = {"caption": value, "url": "x"} if place == "json:caption" else {"meta": {"alt": value}, "url": "x"}
        content = json.dumps(tree).encode()
        content = rng.choice([content] * 6 + [content[:-2], b"[" * 5_000, content.replace(b"{", b'{"url": 0, ', 1), None])
        whole = content is not None and content.startswith(b'{"') and content.endswith(b"}") and b'"url": 0' not in content
        good = value.strip() if whole and isinstance(value, str) and value.strip() else None
        sample.files["json"] = content
    if rng.random() < 0.1:
        sample.files.pop("txt" if place == "txt" else "json")
        good = None
    if rng.random() < 0.2:
        sample.files["npy"] = b"\x93NUMPY"
    sample.caption = good if picture == PICTURE else None
    sample.files = sample.files or {"npy": b""}
    return sample


class Tar:
    """The bytes of a tar, and key -> sample as it was written, which alone is shown where a test fails."""

    def __init__(self, content: bytes, written: dict[str, Written]):
        self.content, self.written = content, written

    def __repr__(self):
        return f"Tar({self.written})"

    @property
    def right(self) -> dict[str, str]:
        """Captions that a reader is to find, by key: keys end at their first dot, so those behind one are lost."""
        return {name: one.caption for name, one in self.written.items() if one.caption is not None and not is_dotted(name)}


def tar_of(seed: int) -> tuple[str, Tar]:
    """(caption key, the tar). Choices are a seed's, so that each is made as often: hypothesis prefers its simplest."""
    rng = random.Random(seed)
    place = rng.choice(["txt", "txt", "json:caption", "json:meta.alt"])
    names = ["a", "b/a", "é", "img.0", "img.1", "img.2", "x" * 130, "b/c.d/e"]
    written = {name: sample_of(rng, place) for name in sorted(rng.sample(names, rng.randint(0, len(names))))}
    out = io.BytesIO()
    kind = rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for name, sample in written.items():
            for extension, content in sample.files.items():
                info = tarfile.TarInfo(f"{name}.{extension}")
                if content is None:
                    info.type, info.linkname = rng.choice([tarfile.SYMTYPE, tarfile.LNKTYPE]), "elsewhere.jpg"
                info.size = len(content or b"")
                with suppress(ValueError):  # a name too long for the kind of tar
                    tar.addfile(info, io.BytesIO(content or b""))
    if kind == tarfile.USTAR_FORMAT:
        written.pop("x" * 130, None)
    return place, Tar(out.getvalue(), written)


tars = st.integers(0, 2**40).map(tar_of)


def delivered(path, place):
    with closing(opened_index(str(path), place)) as index:
        return index, [(index.key(i), index.example(i, "s")) for i in range(len(index))]


def is_dotted(name):
    return "." in name.rpartition("/")[2]


@FUZZED
@given(tars)
def test_a_sample_is_delivered_once_or_counted_bad_once(tmp_path, drawn):
    place, tar = drawn
    (tmp_path / "0.tar").write_bytes(tar.content)
    index, found = delivered(tmp_path / "0.tar", place)
    assert {key: example.caption for key, example in found} == tar.right and len(found) == len(tar.right)
    assert all(example.images[0].data == PICTURE for _, example in found)
    plain = [name for name in tar.written if not is_dotted(name)]
    behind_dots = [{extension.lower() for extension in one.files} for name, one in tar.written.items() if is_dotted(name)]
    pictures = sum(not extensions.isdisjoint({"jpg", "png", "jpeg", "webp"}) for extensions in behind_dots)
    captions = sum(place.partition(":")[0] in extensions for extensions in behind_dots)
    n_dotted = max(pictures, captions, min(len(behind_dots), 1))  # those of img stand side by side, as the files of one key
    assert index.counts["samples"] == len(plain) + n_dotted, index.counts
    assert index.bad_samples == len(plain) - len(tar.right) + n_dotted, index.counts


@FUZZED
@given(tars, st.integers(0, 2**40))
def test_a_damaged_tar_delivers_what_was_written_or_says_what_is_missing(tmp_path, drawn, seed):
    place, tar = drawn
    content, rng = bytearray(tar.content), random.Random(seed)
    how = rng.choice(["cut", "header", "header", "header", "zeros", "twice"])
    at = rng.randrange(len(content))
    if how == "cut":
        content = content[:at]
    elif how == "header":  # any byte of any header: names, sizes, types, checksums, extended headers
        at = at // 512 * 512 + rng.choice([0, 100, 124, 130, 135, 148, 156, 157, 257, 345])
        content[at % len(content)] = rng.randrange(256)
        if rng.random() < 0.5 and (start := at // 512 * 512) + 512 <= len(content):  # under a right checksum
            content[start + 148 : start + 156] = b" " * 8
            content[start + 148 : start + 155] = b"%06o\0" % sum(content[start : start + 512])
    elif how == "zeros":
        content[at : at + 700] = bytes(len(content[at : at + 700]))
    else:
        content += bytes(content)
    (tmp_path / "0.tar").write_bytes(content)
    index, found = delivered(tmp_path / "0.tar", place)
    if how == "cut":
        assert {key: example.caption for key, example in found}.items() <= tar.right.items()
    lost = len(tar.right) - len({key for key, _ in found} & tar.right.keys())
    noted = index.counts["file without a key or an extension"] + index.counts["empty shard"]
    assert not lost or index.message or index.bad or noted, "a sample is gone and nothing says so"
    with suppress(InputError):
        open_shards(SourceConfig(name="s", format="webdataset", path=str(tmp_path / "0.tar")), DataConfig(caption_key=place))


@FUZZED
@given(VALUES, st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "in", "not in"]), VALUES)
def test_a_filter_keeps_removes_or_refuses_whatever_the_json_holds(tmp_path, value, op, wanted):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in (("a.jpg", PICTURE), ("a.txt", b"a cat"), ("a.json", json.dumps({"x": value}).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / "0.tar").write_bytes(out.getvalue())
    rule = FilterRule(key="x", op=op, value=wanted)
    if "in" in op and not isinstance(wanted, list):
        with pytest.raises(InputError, match="needs a list"):
            opened_index(str(tmp_path / "0.tar"), "txt", (rule,))
        return
    with closing(opened_index(str(tmp_path / "0.tar"), "txt", (rule,))) as index:
        assert len(index) + sum(n for cause, n in index.counts.items() if cause.startswith("filter ")) == 1


@FUZZED
@given(st.text("txjson:.{}/ \0é", max_size=8))
def test_any_caption_key_is_read_or_refused(tmp_path, place):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in (("a.jpg", PICTURE), ("a.txt", b"a cat"), ("a.json", b'{"x": "a cat"}')):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / "0.tar").write_bytes(out.getvalue())
    try:
        found = open_shards(SourceConfig(name="s", format="webdataset", path=str(tmp_path / "0.tar")), DataConfig(caption_key=place))
    except InputError as error:
        assert "caption_key" in str(error)
    else:
        assert found[0].caption == "a cat"
