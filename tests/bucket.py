"""An S3 or Google Cloud Storage server on loopback behind a proxy that cuts connections; fsspec finds it by the usual variables."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace

import fsspec
import pytest

from mmkit import storage

on_each_store = pytest.mark.parametrize("proxy", ["s3", "gs"], indirect=True)


class CuttingProxy:
    """Passes TCP on to the server of ``url``, but cuts each of the next ``cuts`` replies after ``after`` bytes."""

    def __init__(self, url, target):
        self.url, self.target, self.cuts, self.after, self.n_cut = url, target, 0, 600, 0
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
def serving(kind):
    """A proxy in front of a new, empty server of s3:// or gs://; the test is skipped where its packages are absent."""
    server, address = {"s3": _s3_server, "gs": _gs_server}[kind]()
    proxy = CuttingProxy(f"{kind}://pairs", address)
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop()


def _s3_server():
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server, server.get_host_and_port()


def _gs_server():
    pytest.importorskip("gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server").create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    return server, server._api._httpd.server_address


def use(proxy, cache, monkeypatch) -> None:
    """Points s3:// or gs:// at the proxy for one test, waits shortened, with an own cache folder, and creates its bucket."""
    kind, address = proxy.url.split(":")[0], f"http://127.0.0.1:{proxy.port}"
    settings = {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
        "STORAGE_EMULATOR_HOST": address, "MMKIT_CACHE": str(cache), "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.01)
    fsspec.get_filesystem_class(kind).clear_instance_cache()
    if kind == "gs":  # gcsfs itself waits up to 16 s between its tries
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=lambda _: asyncio.sleep(0.001)))
    system = fsspec.filesystem(kind)
    if not system.exists(proxy.url):
        system.mkdir(proxy.url)
