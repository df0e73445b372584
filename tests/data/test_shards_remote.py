"""Shards in a bucket: servers of s3:// and gs:// on loopback, and a connection that breaks in the middle of a read."""

import io

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from mmkit.config import ClipConfig, DataConfig, SourceConfig
from mmkit.data.example import BadRecord
from mmkit.data.loader import loader
from mmkit.data.shards import open_shards
from mmkit.data.tar_writer import ShardWriter
from tests.bucket import on_each_store, serving, use
from tests.data.test_shards import Captions

pytestmark = on_each_store


@pytest.fixture(scope="module")
def proxy(request):
    with serving(request.param) as made:
        yield made


@pytest.fixture
def bucket(proxy, tmp_path, monkeypatch):
    use(proxy, tmp_path / "cache", monkeypatch)
    yield f"{proxy.url}/train"
    proxy.cuts = 0


def test_shards_in_a_bucket_are_read_through_dropped_connections(bucket, proxy):
    with ShardWriter(bucket, max_samples=5) as writer:
        for i in range(10):
            writer.write(f"{i:03d}", {"jpg": bytes([i]) * 5000, "txt": f"caption {i}"})
    source = open_shards(SourceConfig(name="pairs", format="webdataset", path=f"{bucket}/{{00000..00001}}.tar"))
    assert [source[i].caption for i in range(10)] == [f"caption {i}" for i in range(10)]
    before, proxy.cuts = proxy.n_cut, 2
    assert source[7].images[0].data == bytes([7]) * 5000
    assert proxy.n_cut > before
    proxy.cuts = 10_000
    with pytest.raises(BadRecord, match="00000.tar: still failing after 5 attempts"):
        source[3]
    proxy.cuts = 0
    assert source[3].caption == "caption 3"


def test_forked_workers_open_their_own_connections(bucket):
    with ShardWriter(bucket + "3", max_samples=5) as writer:
        for i in range(10):
            writer.write(f"{i:03d}", {"jpg": b"x", "txt": f"caption {i}"})
    source = open_shards(SourceConfig(name="pairs", format="webdataset", path=f"{bucket}3/{{00000..00001}}.tar"))
    assert source[0].caption == "caption 0"
    found = list(DataLoader(Captions(source), batch_size=None, num_workers=2, timeout=60))
    assert found == [f"caption {i}" for i in range(10)]


def test_an_absent_object_is_named(bucket):
    with ShardWriter(bucket + "2", max_samples=5) as writer:
        writer.write("0", {"jpg": b"x", "txt": "y"})
    with pytest.raises(ValueError, match="00001.tar: there is no such object"):
        open_shards(SourceConfig(name="pairs", format="webdataset", path=f"{bucket}2/{{00000..00001}}.tar"))


def test_a_streamed_bucket_begins_with_the_shards_it_needs_and_survives_dropped_connections(bucket, proxy):
    with ShardWriter(bucket + "4", max_samples=5) as writer:
        for i in range(200):
            writer.write(f"{i:03d}", {"jpg": jpeg(i), "txt": f"caption {i}"})
    source = SourceConfig(name="pairs", format="webdataset", path=f"{bucket}4/{{00000..00039}}.tar")
    data = DataConfig(sources=(source,), resampled=True, samples_per_epoch=10_000, workers=1)
    with loader(data, ClipConfig(name="ViT-B-32"), tokenize, [red], train=True, device_batch=4) as stream:
        proxy.cuts = 3
        batches = [next(stream) for _ in range(5)]
        assert 8 <= stream.shards.opened <= 24 and not stream.shards.damaged
    for batch in batches:
        for key, value, length in zip(batch.keys, batch.tensors["image"].flatten().tolist(), batch.tensors["text"].flatten().tolist(), strict=True):
            assert abs(int(key) - value) <= 2 and length == len(f"caption {int(key)}")


def jpeg(red: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (red, red, red)).save(out, "jpeg", quality=95)
    return out.getvalue()


def red(image):
    return torch.tensor([[[float(image.getpixel((0, 0))[0])]]])


def tokenize(texts):
    return torch.tensor([[len(text)] for text in texts])
