"""An S3 server on loopback behind a proxy that cuts connections; fsspec finds it by the usual variables."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from mmkit import storage

BUCKET = "s3://pairs"


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


@contextlib.contextmanager
def serving():
    """A proxy in front of a new, empty S3 server; the test is skipped where s3fs or moto is absent."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = CuttingProxy(server.get_host_and_port())
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop()


def use(proxy, cache, monkeypatch) -> None:
    """Points s3:// at the proxy for one test, waits shortened, with an own cache folder, and creates `BUCKET`."""
    import s3fs

    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1", "MMKIT_CACHE": str(cache), "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    if not system.exists(BUCKET):
        system.mkdir(BUCKET)
