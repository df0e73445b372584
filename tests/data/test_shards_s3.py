"""Shards in a bucket: an S3 server on loopback, and a connection that breaks in the middle of a read."""

import socket
import threading

import pytest
from torch.utils.data import DataLoader

from mmkit.config import SourceConfig
from mmkit.data import tar_files
from mmkit.data.example import BadRecord
from mmkit.data.shards import open_shards
from mmkit.data.tar_writer import ShardWriter


class CuttingProxy:
    """Passes TCP on to a server, but cuts each of the next ``cuts`` replies after ``after`` bytes."""

    def __init__(self, target):
        self.target, self.cuts, self.after, self.n_cut = target, 0, 600, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source, sink, reply):
        sent = 0
        try:
            while data := source.recv(65536):
                if reply and self.cuts and sent + len(data) > self.after:
                    self.cuts, self.n_cut = self.cuts - 1, self.n_cut + 1
                    sink.sendall(data[: max(self.after - sent, 0)])
                    break
                sink.sendall(data)
                sent += len(data)
        except OSError:
            pass
        for side in (source, sink):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.listener.close()


@pytest.fixture(scope="module")
def proxy():
    pytest.importorskip("s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    made = CuttingProxy(server.get_host_and_port())
    yield made
    made.close()
    server.stop()


@pytest.fixture
def bucket(proxy, tmp_path, monkeypatch):
    import s3fs

    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1", "MMKIT_CACHE": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tar_files, "FIRST_WAIT", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    if not system.exists("pairs"):
        system.mkdir("pairs")
    yield "s3://pairs/train"
    proxy.cuts = 0
    s3fs.S3FileSystem.clear_instance_cache()


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


class Captions:
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, i):
        return self.source[i].caption


def test_an_absent_object_is_named(bucket):
    with ShardWriter(bucket + "2", max_samples=5) as writer:
        writer.write("0", {"jpg": b"x", "txt": "y"})
    with pytest.raises(ValueError, match="00001.tar: there is no such object"):
        open_shards(SourceConfig(name="pairs", format="webdataset", path=f"{bucket}2/{{00000..00001}}.tar"))
