"""Cached features: the same batches, shared by content, whole or absent, bounded."""

import multiprocessing
import os

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit.config import ConfigError, DataConfig
from mmkit.data.example import Example, ImageRef, Turn
from mmkit.data.features import FeatureCache, folder_bytes, precompute, precompute_texts
from mmkit.data.images import ImageError
from mmkit.data.loader import loader
from mmkit.data.mixture import mixture_of


def transform(image):
    return torch.from_numpy(np.array(image.resize((4, 4)))).permute(2, 0, 1).float()


def encode(images):
    """Two encoders of different width, one in bf16."""
    flat = images[0].flatten(2).transpose(1, 2)  # (n, 16, 3)
    return [flat * 2, torch.cat([flat, flat + 0.25], -1).to(torch.bfloat16)]


def examples(n, repeat=1):
    turns = (Turn("user", "<image>\nwhat"), Turn("assistant", "a kite"))
    pictures = [np.full((5 + k, 7, 3), k % 256, np.uint8) for k in range(n)]
    return [Example(f"k{k}", (ImageRef(pictures[k % n], name=f"p{k % n}"),), turns) for k in range(n * repeat)]


def test_features_equal_those_of_the_encoder_bit_for_bit(tmp_path):
    found = examples(10)
    cache = precompute(found, [transform], encode, "w", folder=tmp_path, batch=4)
    for example in found:
        tensors, size = cache.get(example.images[0])
        picture = Image.fromarray(example.images[0].data)
        wanted = encode([transform(picture)[None]])
        assert size == picture.size and [t.dtype for t in tensors] == [torch.float32, torch.bfloat16]
        assert all(torch.equal(got, want[0]) for got, want in zip(tensors, wanted, strict=True))


def test_only_what_is_missing_is_computed_and_copies_share(tmp_path):
    calls = []

    def counting(images):
        calls.append(len(images[0]))
        return encode(images)

    precompute(examples(6, repeat=3), [transform], counting, "w", folder=tmp_path, batch=4)
    renamed = [Example(e.key, (ImageRef(e.images[0].data, name="copy-" + e.key),), e.turns) for e in examples(8)]
    cache = precompute(renamed, [transform], counting, "w", folder=tmp_path, batch=4)
    assert calls == [4, 4, 4] and len(cache) == 8  # 4 and 2, then 2 new ones, each in a whole batch
    reopened = FeatureCache(cache.folder)
    assert torch.equal(reopened.get(renamed[7].images[0])[0][0], cache.get(renamed[7].images[0])[0][0])


def test_other_weights_or_other_preprocessing_are_another_cache(tmp_path):
    folders = {
        precompute(examples(1), [make], encode, key, folder=tmp_path).folder
        for key, make in (("w", transform), ("v", transform), ("w", lambda image: transform(image) / 2))
    }
    assert len(folders) == 3


def test_random_transforms_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="change from call to call"):
        precompute(examples(1), [lambda image: transform(image) + torch.rand(1)], encode, "w", folder=tmp_path)


def test_bad_picture_has_a_reason_and_does_not_stop_the_others(tmp_path):
    found = [*examples(3), Example("bad", (ImageRef(b"none", name="broken"),), ())]
    cache = precompute(found, [transform], encode, "w", folder=tmp_path, batch=2)
    assert len(cache) == 3
    with pytest.raises(ImageError, match="'broken' is of no known image format"):
        cache.get(found[-1].images[0])
    with pytest.raises(ImageError, match="has no cached features"):
        cache.get(ImageRef(np.full((2, 2, 3), 77, np.uint8)))


def test_killed_process_leaves_no_half_part(tmp_path):
    def dying(images):
        if dying.calls:
            os._exit(9)
        dying.calls += 1
        return encode(images)

    dying.calls = 0
    process = multiprocessing.get_context("fork").Process(
        target=precompute, args=(examples(8), [transform], dying, "w"), kwargs={"folder": tmp_path, "batch": 4}
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    cache = precompute(examples(8), [transform], encode, "w", folder=tmp_path, batch=4)
    assert len(cache) == 8 and all(cache.get(example.images[0]) for example in examples(8))


def test_two_processes_compute_each_picture_once(tmp_path):
    context = multiprocessing.get_context("fork")
    calls = context.Value("i", 0)

    def counting(images):
        with calls.get_lock():
            calls.value += len(images[0])
        return encode(images)

    work = [
        context.Process(target=precompute, args=(examples(20), [transform], counting, "w"), kwargs={"folder": tmp_path, "batch": 4})
        for _ in range(2)
    ]
    [process.start() for process in work]
    [process.join() for process in work]
    assert calls.value == 20


def test_size_is_bounded_and_the_longest_unused_cache_makes_room(tmp_path):
    first = precompute(examples(4), [transform], encode, "a", folder=tmp_path)
    os.utime(first.folder / "used", (1, 1))
    size = folder_bytes(tmp_path)
    with pytest.raises(ConfigError, match="cached features need about"):  # a cache in use does not make room
        precompute(examples(4), [transform], encode, "b", folder=tmp_path, max_bytes=size + 1000)
    assert len(FeatureCache(first.folder)) == 4
    first._hold.close()
    second = precompute(examples(4), [transform], encode, "b", folder=tmp_path, max_bytes=size + 1000)
    assert not list(first.folder.glob("part-*")) and len(second) == 4
    with pytest.raises(ConfigError, match="cached features need about .* set data.cache_dir"):
        precompute(examples(100), [transform], encode, "c", folder=tmp_path, max_bytes=1000)
    assert not list(tmp_path.rglob("*.tmp"))


def test_text_features(tmp_path):
    found = [Example(str(k), (), (Turn("user", ""), Turn("assistant", words))) for k, words in enumerate(["a", "bb", "a"])]
    cache = precompute_texts(found, lambda texts: torch.tensor([[len(t)] for t in texts]), lambda ids: ids.float() * 3, "w", folder=tmp_path)
    assert len(cache) == 2 and cache.get_text("bb")[0].tolist() == [6.0]
    with pytest.raises(ValueError, match="'ccc' has no cached features"):
        cache.get_text("ccc")


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_yields_features_in_place_of_images(tmp_path, workers):
    from tests.data.test_loader import tokenizer, vlm

    found = examples(6)
    cache = precompute(found, [transform, transform], encode, "w", folder=tmp_path)
    model = vlm(encoders=[{"name": "lite0", "side": 4}, {"name": "mobilenet", "side": 4}])
    data = DataConfig(max_length=64, workers=workers)
    options = {"train": False, "device_batch": 3, "source": mixture_of(found)}
    cached = next(loader(data, model, tokenizer(), [], features=cache, **options)).tensors
    plain = next(loader(data, model, tokenizer(), [transform, transform], **options)).tensors
    assert cached["features.1"].shape == (3, 1, 16, 6) and "images.0" not in cached
    wanted = encode([plain["images.0"].flatten(0, 1)])
    assert torch.equal(cached["features.0"].flatten(0, 1), wanted[0])
    assert all(torch.equal(cached[name], plain[name]) for name in plain if not name.startswith("images."))


def test_a_part_that_was_cut_is_computed_anew_and_changed_rows_are_an_error(tmp_path):
    found = examples(6)
    cache = precompute(found, [transform], encode, "w", folder=tmp_path)
    (part,) = cache.folder.glob("part-*")
    for file, keep in (("part.json", 20), ("features.0.bin", 100), ("features.1.bin", 0)):
        data = (part / file).read_bytes()
        (part / file).write_bytes(data[:keep])
        again = precompute(found, [transform], encode, "w", folder=tmp_path)
        assert len(again) == 6 and (part / file).read_bytes() == data
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    (part / file).write_bytes(flipped)
    changed = FeatureCache(cache.folder)
    with pytest.raises(ValueError, match="part-.* have changed on the disk .row 3.; remove that folder"):
        [changed.get(example.images[0]) for example in found]


def test_a_full_disk_is_told_with_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmkit.data.features._Part.close", full)
    with pytest.raises(ConfigError, match="No space left on device; what was written before is kept: .* data.cache_dir"):
        precompute(examples(2), [transform], encode, "w", folder=tmp_path)
    assert not list(tmp_path.rglob("part-*"))
