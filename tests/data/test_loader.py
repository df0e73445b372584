"""Order, position, packing and errors of the loader (user reports U05, U06, U17, U22, U33, U46)."""

import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit.config import ClipConfig, DataConfig, SourceConfig, VlmConfig
from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Example, ImageRef, Region, Turn
from mmkit.data.loader import loader
from mmkit.data.mixture import Mixture, mixture_of
from mmkit.errors import InputError

WORDS = "red blue green kite boat lake sky tree house small large"


def tokenizer():
    """One token a word, BOS added by hand nowhere."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "<region_fea>", *WORDS.split(), "A:", "what", "\n", " ", *map(str, range(10)), *"[],"]
    inner = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    from tokenizers import Regex

    inner.pre_tokenizer = Split(Regex(r"A:|[a-z]+|\d|."), behavior="isolated")
    out = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    out.add_tokens(["<region_fea>"])
    return out


def vlm(**settings) -> VlmConfig:
    base = {
        "encoders": [{"name": "lite0", "side": 4}],
        "connector": {"query_sides": [2], "width": 16, "heads": 4},
        "language": {"source": "random", "architecture": {"model_type": "llama", "vocab_size": 64}},
        "template": "short",
    }
    return VlmConfig(**(base | settings))


def transform(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((4, 4)))).permute(2, 0, 1).float()


def picture(number: int, size=(12, 12)) -> ImageRef:
    return ImageRef(np.full((size[1], size[0], 3), number % 256, np.uint8), name=f"picture-{number}")


def examples(n: int, per_image: int = 1, with_image=lambda k: True) -> list[Example]:
    words, out = WORDS.split(), []
    for k in range(n):
        answer = " ".join(words[(k + j) % len(words)] for j in range(k % 4 + 1))
        mark = "<image>\n" if with_image(k) else ""
        turns = (Turn("user", f"{mark}what {words[k % 11]}"), Turn("assistant", answer))
        out.append(Example(f"k{k}", images=(picture(k // per_image),) if mark else (), turns=turns, source="made"))
    return out


def make(found, data=None, model=None, **options):
    settings = {"max_length": 64, "max_images": 8} | (data or {})
    options = {"train": True, "device_batch": 4} | options
    return loader(DataConfig(**settings), model or vlm(), tokenizer(), [transform], source=mixture_of(found), **options)


def keys_of(batches) -> list[str]:
    return [key for batch in batches for row in batch.keys for key in row.split(",") if key]


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def equal(first, second) -> bool:
    same = all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors | second.tensors)
    return same and first.keys == second.keys


PACKED = {"pack": True, "share_image": True}


@pytest.mark.parametrize("data", [{}, {"pack": True}, {"share_image": True}, PACKED, {"group_by_length": True}, {"buckets": [16, 32]}])
def test_an_epoch_is_every_sample_once_for_any_world_and_workers(data):
    found = examples(90, per_image=3)
    for world, workers in ((1, 0), (3, 0), (2, 2)):
        seen, samples = [], 0
        loaders = [make(found, data | {"workers": workers}, rank=r, world=world, device_batch=12 // world) for r in range(world)]
        while samples < 90:
            rows = zip(*(batch.keys for batch in take_one_each(loaders)), strict=True)  # in the global order, process after process
            seen += [key for block in rows for row in block for key in row.split(",")]
            samples = loaders[0].state_dict()["samples"]
        assert sorted(seen[:90]) == sorted(f"k{k}" for k in range(90))
        assert len(seen) == samples


def take_one_each(loaders):
    return [next(one) for one in loaders]


def first_epoch(batches) -> list[str]:
    return keys_of(batch for batch in batches if batch.epoch == 0)


@pytest.mark.parametrize("data", [{}, PACKED])
def test_order_is_the_same_whatever_the_world_and_workers(data):
    found = examples(60, per_image=2)
    alone = take(make(found, data, device_batch=6), 4)
    pairs = [take(make(found, data, rank=r, world=2, device_batch=3), 4) for r in range(2)]
    with_workers = take(make(found, data | {"workers": 2}, device_batch=6), 4)
    for step in range(4):
        assert equal(alone[step], with_workers[step])
        joined = [pairs[row % 2][step].tensors["input_ids"][row // 2] for row in range(6)]
        assert torch.equal(torch.stack(joined), alone[step].tensors["input_ids"])


@pytest.mark.parametrize("data", [{}, PACKED, {"workers": 2, "pack": True}])
def test_resumed_batches_are_bit_identical(data):
    found = examples(50, per_image=2)
    whole = make(found, data, device_batch=3)
    take(whole, 5)
    state = json.loads(json.dumps(whole.state_dict()))
    rest = take(whole, 20)
    resumed = take(make(found, data, device_batch=3, state=state), 20)
    assert all(equal(a, b) for a, b in zip(rest, resumed, strict=True))


@pytest.mark.parametrize("world_before, world_after", [(1, 2), (3, 1), (2, 4)])
def test_stopping_and_resuming_on_another_world_shows_every_sample_once(world_before, world_after):
    found = examples(120, per_image=2)
    data = {"pack": True, "max_length": 48}

    def some(world, state, blocks):
        loaders = [make(found, data, rank=r, world=world, device_batch=12 // world, state=state, train=False) for r in range(world)]
        seen = []
        for _ in range(blocks):
            try:
                seen += keys_of(take_one_each(loaders))
            except StopIteration:
                break
        return seen, loaders[0].state_dict()

    before, state = some(world_before, None, 2)
    after, _ = some(world_after, state, 100)
    assert before and after and sorted(before + after) == sorted(f"k{k}" for k in range(120))


def test_epochs_differ_and_follow_without_a_gap():
    batches = take(make(examples(20), device_batch=5), 8)
    assert [batch.epoch for batch in batches] == [0, 0, 0, 0, 1, 1, 1, 1]
    first, second = keys_of(batches[:4]), keys_of(batches[4:])
    assert sorted(first) == sorted(second) and first != second


def test_one_pass_fills_the_last_batch_with_empty_rows():
    found = list(make(examples(10), train=False, device_batch=4))
    assert [batch.n_samples for batch in found] == [4, 4, 2] and keys_of(found) == [f"k{k}" for k in range(10)]
    last = found[-1].tensors
    assert last["input_ids"].shape[0] == 4 and not last["segments"][2:].any() and (last["targets"][2:] == -100).all()
    assert not last["image_real"][2:].any() and last["image_sizes"][3, 0].tolist() == [336, 336]


def test_state_of_other_data_is_refused():
    state = make(examples(10)).state_dict()
    with pytest.raises(ValueError, match="fingerprint .* .changed: source examples.; resume"):
        make(examples(11), state=state)
    with pytest.raises(ValueError, match="seed 0, this run has 5"):
        make(examples(10), state=state, seed=5)
    for change in ({"pack": True}, {"max_length": 48}, {"share_image": True}, {"max_images": 3}, {"group_by_length": True}):
        with pytest.raises(ValueError, match="rows_of"):
            make(examples(10), {"max_length": 64, "max_images": 2} | change, state=make(examples(10), {"max_length": 64, "max_images": 2}).state_dict())


# ---------------------------------------------------------------- what a row holds


def reference_rows(found, model):
    """Each conversation in a row of its own, written with loops: list of (key -> (position, target) pairs as texts)."""
    single = list(make(found, {"max_length": 64}, model, train=False, device_batch=1))
    return {batch.keys[0]: row_facts(batch, 0)[batch.keys[0].split(",")[0]] for batch in single}


def attention_allowed(tensors):
    """(B, T, T) bool: query t may see key j. The rule of `mmkit.data.batches` in words, written once more."""
    segments, branches = tensors["segments"], tensors["branches"]
    place = torch.arange(segments.shape[1])
    causal = place[:, None] >= place[None, :]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    open_branch = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    return (causal & same & open_branch) | torch.eye(segments.shape[1], dtype=torch.bool)


def row_facts(batch, row):
    """For every target of a row: what its predicting position sees, as (ids, positions) in order; grouped by sample key."""
    tensors = batch.tensors
    allowed = attention_allowed(tensors)[row]
    facts = []
    for place, target in zip(tensors["target_positions"][row].tolist(), tensors["targets"][row].tolist(), strict=True):
        if target == -100:
            continue
        seen = allowed[place] & (tensors["segments"][row] > 0)
        facts.append((tuple(tensors["input_ids"][row][seen].tolist()), tuple(tensors["positions"][row][seen].tolist()), target))
    return {batch.keys[row].split(",")[0]: facts}


@pytest.mark.parametrize("size", [(12, 12), (30, 12), (8, 40)])
@pytest.mark.parametrize("data", [{"pack": True}, {"share_image": True}, PACKED])
def test_every_target_sees_the_same_in_packs_as_alone(data, size):
    found = [e if not e.images else Example(e.key, (picture(k // 3, size),), e.turns, source="made") for k, e in enumerate(examples(24, 3))]
    alone = sorted(fact for facts in reference_rows(found, vlm()).values() for fact in facts)
    packed = []
    for batch in make(found, data | {"max_length": 64}, train=False, device_batch=4):
        for row in range(len(batch.keys)):
            packed += [fact for facts in row_facts(batch, row).values() for fact in facts]
    assert sorted(packed) == alone


def test_shared_picture_stands_once_in_the_row():
    batches = list(make(examples(12, per_image=6), {"share_image": True}, train=False, device_batch=2))
    tensors = batches[0].tensors
    assert (tensors["input_ids"] == -200).sum(1).tolist() == [6, 6]
    assert tensors["branches"].max() == 6 and tensors["image_real"].sum() == 2


def test_hidden_slots_have_no_segment_and_no_number():
    wide = Example("wide", (picture(1, (40, 10)),), (Turn("user", "<image>\nwhat"), Turn("assistant", "red")), source="made")
    model = vlm(connector={"query_sides": [4], "width": 16, "heads": 4})
    batch = next(make([wide], model=model, train=False, device_batch=1))
    slots = batch.tensors["input_ids"][0] == -200
    assert slots.sum() == 20
    hidden = batch.tensors["segments"][0][slots] == 0
    assert hidden.tolist() == ([True] * 5 + [False] * 10 + [True] * 5)  # of 4 rows, the 40x10 picture covers the middle two
    after = batch.tensors["positions"][0][int(slots.nonzero()[-1]) + 1]
    assert after == 10
    cropped = next(make([wide], model=vlm(connector={"query_sides": [4], "width": 16, "heads": 4}, crop_padding=True), train=False, device_batch=1))
    assert (cropped.tensors["input_ids"][0] == -200).sum() == 10
    real = batch.tensors["segments"][0] > 0
    ids = batch.tensors["input_ids"][0][real]
    assert torch.equal(ids, cropped.tensors["input_ids"][0][: len(ids)])
    assert torch.equal(batch.tensors["positions"][0][real], cropped.tensors["positions"][0][: len(ids)])


def test_captions_of_one_picture_share_the_position_that_predicts_their_first_word():
    turns = [(Turn("user", "<image>"), Turn("assistant", words)) for words in ("red kite", "blue boat", "red boat")]
    found = [Example(f"c{k}", (picture(7),), t, source="made") for k, t in enumerate(turns)]
    batch = next(make(found, {"share_image": True}, vlm(template="plain"), train=False, device_batch=1))
    places = batch.tensors["target_positions"][0][batch.tensors["targets"][0] != -100]
    first_places = [int(p) for p in places]
    assert first_places.count(5) == 3  # six slots, 0 to 5
    assert batch.n_targets == sum(len(turn[1].text.split()) * 2 for turn in turns)  # words, spaces between, line break


@pytest.mark.parametrize("max_length, kept", [(16, False), (17, True)])
def test_length_limit_counts_image_slots_and_names_the_need(max_length, kept):
    turns = (Turn("user", "<image>\nwhat red blue"), Turn("assistant", "green"))
    found = [Example("long", (picture(1),), turns, source="made"), *examples(1, with_image=lambda k: False)]
    stream = make(found, {"max_length": max_length, "max_bad_share": 0.9}, train=False, device_batch=2)
    batch = next(stream)
    assert ("long" in keys_of([batch])) is kept
    assert (batch.tensors["input_ids"] == -200).sum() == (6 if kept else 0)
    assert dict(stream.counts["too_long"]) == ({} if kept else {"dropped": 1}) and not stream.counts["bad"]


def test_message_of_a_long_sample_says_what_it_needs():
    with pytest.raises(ValueError, match=r"'k\d': needs \d+, more than data.max_length 8"):
        next(make(examples(3), {"max_length": 8}, device_batch=1))


def test_shapes_come_from_few_buckets():
    shapes = set()
    for batch in take(make(examples(200), {"buckets": [16, 20], "max_length": 24, "max_images": 4}, device_batch=4), 60):
        shapes.add((batch.tensors["input_ids"].shape, batch.tensors["targets"].shape, batch.tensors["images.0"].shape))
    assert len(shapes) <= 3 and {shape[0][1] for shape in shapes} <= {16, 20, 24}


def test_packing_fills_rows():
    found = examples(400, per_image=5)
    packed = make(found, PACKED | {"max_length": 256, "max_images": 32}, device_batch=2)
    take(packed, 10)
    alone = make(found, {"max_length": 64}, device_batch=4)
    take(alone, 10)
    assert packed.fill > 0.95 > 0.5 > alone.fill


def test_rows_without_pictures_have_a_zero_one():
    batch = next(make(examples(8, with_image=lambda k: k % 2 == 0), train=False, device_batch=8))
    assert batch.tensors["images.0"].shape == (8, 1, 3, 4, 4)
    assert batch.tensors["image_real"][:, 0].tolist() == [True, False] * 4
    assert not batch.tensors["images.0"][1::2].any()


# ---------------------------------------------------------------- regions


def region_example(key="r", size=(40, 20), kind="box"):
    frame = pixels(*size)
    regions = (Region("box", Box(10, 5, 19, 14, frame)), Region("point", Box.point(30, 10, frame)))
    turns = (Turn("user", "<image>\nwhat <region> <region_fea>"), Turn("assistant", "red"))
    return Example(key, (picture(3, size),), turns, regions, source="made")


REGIONS = {"kind": "geo", "n_points": 16, "n_sub_points": [8, 4], "n_neighbors": [4, 2]}


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_region_points_lie_in_the_region_as_the_encoder_sees_it(fit):
    model = vlm(regions=REGIONS, image_fit=fit)
    tensors = next(make([region_example()], {"max_regions": 4}, model, train=False, device_batch=1)).tensors
    assert tensors["region_points"].shape == (1, 2, 16, 2) and tensors["region_starts"].shape == (1, 2, 2)
    assert (tensors["input_ids"] == -300).sum() == 2 and tensors["region_real"].tolist() == [[True, True]]
    x, y = tensors["region_points"][0, 0].unbind(-1)
    assert (x >= 10 / 40).all() and (x < 20 / 40).all()
    low, high = (5 / 20, 15 / 20) if fit == "stretch" else ((5 + 10) / 40, (15 + 10) / 40)
    assert (y >= low - 1e-6).all() and (y < high).all()
    assert (tensors["region_starts"][0, :, 0] < 16).all() and (tensors["region_starts"][0, :, 1] < 8).all()


def test_region_points_change_with_epochs_and_repeat_on_resume():
    model = vlm(regions=REGIONS, image_fit="stretch")
    stream = make([region_example()], {"max_regions": 2}, model, device_batch=1)
    first, state, second = next(stream), stream.state_dict(), next(stream)
    again = next(make([region_example()], {"max_regions": 2}, model, device_batch=1, state=state))
    assert equal(second, again) and not torch.equal(first.tensors["region_points"], second.tensors["region_points"])


def test_mean_regions_have_no_repeated_points():
    model = vlm(regions=REGIONS | {"kind": "mean", "n_points": 128}, image_fit="stretch")
    tensors = next(make([region_example()], {"max_regions": 2}, model, train=False, device_batch=1)).tensors
    assert tensors["region_point_real"].sum(-1).tolist() == [[100, 128 if 11 * 11 > 128 else 121]]


# ---------------------------------------------------------------- bad data


def with_broken(n, bad):
    out = examples(n)
    for k in bad:
        out[k] = Example(f"k{k}", (ImageRef(b"no picture", name=f"bad-{k}"),), out[k].turns, source="made")
    return out


def test_undecodable_picture_empties_its_row_and_is_counted():
    stream = make(with_broken(8, [2]), train=False, device_batch=4)
    batches = list(stream)
    assert keys_of(batches) == [f"k{k}" for k in range(8) if k != 2]
    assert (batches[0].tensors["targets"][2] == -100).all() and batches[0].problems[0].key == "k2"
    assert dict(stream.counts["bad"]) == {"undecodable image": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_run_stops_above_the_allowed_share_naming_samples(workers):
    stream = make(with_broken(200, range(0, 200, 10)), {"max_bad_share": 0.02, "workers": workers}, device_batch=4)
    with pytest.raises(ValueError, match=r"samples cannot be used \(\d+ undecodable image\), more than data.max_bad_share 0.02.*'k\d+0'"):
        take(stream, 50)


def test_data_without_any_usable_sample_stops_at_once():
    with pytest.raises(ValueError, match="no example of the data can be used; for instance examples 'k\\d'"):
        next(make(examples(3), {"max_length": 8, "max_bad_share": 1.0}, device_batch=1))


class Deadly:
    """A source one of whose samples kills the process that reads it a second time (planning reads it first)."""

    name = "deadly"

    def __init__(self):
        self.inner, self.parent = examples(40), os.getpid()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == 17 and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner[index]


def test_killed_worker_is_an_error_that_names_the_sample():
    source = Mixture([SourceConfig(name="deadly", format="llava", path="x")], [Deadly()])
    stream = loader(DataConfig(max_length=64, workers=1), vlm(), tokenizer(), [transform], train=False, device_batch=2, source=source)
    with pytest.raises(RuntimeError, match="was killed at sample 'k17' of source 'deadly'"):
        list(stream)


class Gone(Deadly):
    """A source that worker processes cannot read."""

    def __getitem__(self, index):
        if os.getpid() != self.parent:
            raise InputError("the disk with the pictures is gone:\n  mount it again")
        return self.inner[index]


def test_a_users_error_in_a_worker_comes_as_its_message_alone():
    source = Mixture([SourceConfig(name="gone", format="llava", path="x")], [Gone()])
    stream = loader(DataConfig(max_length=64, workers=1), vlm(), tokenizer(), [transform], train=False, device_batch=2, source=source)
    with pytest.raises(InputError, match=r"^the disk with the pictures is gone:\n  mount it again$"):
        list(stream)


# ---------------------------------------------------------------- contrastive


def clip_examples(n, captions=None):
    return [
        Example(f"c{k}", (picture(k),), (Turn("user", "<image>"), Turn("assistant", captions[k] if captions else f"red {k}")), source="made")
        for k in range(n)
    ]


def texts_to_ids(texts):
    return torch.tensor([[len(text), sum(map(ord, text)) % 50] for text in texts])


def clip(found, transforms=None, **options):
    options = {"train": True, "device_batch": 8} | options
    return loader(DataConfig(), ClipConfig(name="x"), texts_to_ids, transforms or [transform], source=mixture_of(found), **options)


def test_contrastive_batch_and_its_duplicate_captions():
    batch = next(clip(clip_examples(8, ["red kite"] * 4 + ["a", "b", "c", "d"]), train=False))
    assert batch.tensors["image"].shape == (8, 3, 4, 4) and batch.tensors["text"].shape == (8, 2)
    assert batch.duplicates == 0.5 and batch.n_targets == 8


@pytest.mark.parametrize("world", [1, 2])
def test_a_single_contrastive_pass_has_each_pair_once_and_rows_without_a_key_for_the_rest(world):
    found = clip_examples(11)
    found[3] = Example("c3", (ImageRef(b"no"),), found[3].turns, source="made")
    streams = [clip(found, train=False, device_batch=8 // world, rank=rank, world=world) for rank in range(world)]
    parts = [list(stream) for stream in streams]
    keys = [key for part in parts for batch in part for key in batch.keys]
    assert sorted(filter(None, keys)) == sorted(f"c{k}" for k in range(11) if k != 3) and len(keys) == 16
    assert {len(part) for part in parts} == {2} and sum(batch.n_targets for part in parts for batch in part) == 10
    assert sum(sum(batch.sources.values()) for part in parts for batch in part) == 10
    assert [problem.key for part in parts for batch in part for problem in batch.problems] == ["c3"]
    for batch in (batch for part in parts for batch in part):
        for row, key in enumerate(batch.keys):
            assert bool(key) == bool(batch.tensors["text"][row].any()) and (key or not batch.tensors["image"][row].any())


def test_rows_without_a_key_need_no_cached_text():
    get_text = lambda text: [torch.full((3,), float(text[4:]) + 1, dtype=torch.float16)]  # noqa: E731
    texts = SimpleNamespace(shapes=[((3,), torch.float16)], get_text=get_text)
    batch = next(clip(clip_examples(3), train=False, device_batch=4, text_features=texts))
    assert batch.tensors["text_features"].tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3, [0.0] * 3] and batch.n_targets == 3


def test_contrastive_substitutes_are_reported_and_crops_repeat_on_resume():
    found = clip_examples(40)
    found[3] = Example("c3", (ImageRef(b"no"),), found[3].turns, source="made")

    def crop(image):
        return transform(image) + torch.rand(1)

    stream = clip(found, [crop])
    next(stream)
    state = stream.state_dict()
    rest, resumed = take(stream, 4), take(clip(found, [crop], state=state), 4)
    assert all(equal(a, b) for a, b in zip(rest, resumed, strict=True))
    assert stream.counts["bad"].total() <= 1 and all(len(set(batch.keys)) >= 7 for batch in rest)
