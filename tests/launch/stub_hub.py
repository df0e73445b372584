"""A hub on loopback: the addresses that huggingface_hub asks, over files in memory. It can want a token,
break off, and lie about sizes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "a" * 40
TOKEN = "hf_notatoken0123"
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)")
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+)?$")


class StubHub:
    """``add`` repositories; ``gate`` names those that want `TOKEN`; ``cut`` file -> bytes after which its
    next answer breaks off; ``short`` names files that are sent shorter than the hub says; ``requests``
    lists (method, file, range) of what was asked of files."""

    def __init__(self):
        self.repositories: dict[tuple[str, str], dict[str, bytes]] = {}
        self.gate: set[str] = set()
        self.cut: dict[str, int] = {}
        self.short: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, name: str, files: dict[str, bytes], kind: str = "models") -> None:
        """A repository and its files."""
        self.repositories[kind, name] = files

    def fetched(self) -> Counter:
        """How often the content of each file was asked for."""
        return Counter(file for method, file, _ in self.requests if method == "GET")

    def close(self) -> None:
        """Ends the server."""
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        if found := API.match(path):
            files = self.repository(found[1], found[2])
            return files is None or self.listing(found[2], files, found[3] or "")
        found = FILE.match(path)
        files = self.repository("datasets" if found[1] else "models", found[2], content=True)
        return files is None or self.file(found[3], files)

    def repository(self, kind, name, content=False):
        files = self.hub.repositories.get((kind, name))
        if files is None:
            return self.say(
                404 if self.headers.get("Authorization") else 401, {"X-Error-Code": "RepoNotFound"}
            )
        told = self.headers.get("Authorization")
        if (
            content and name in self.hub.gate and told != f"Bearer {TOKEN}"
        ):  # a gated repository lists its files to everyone
            return self.say(
                403 if told else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            )
        return files

    def listing(self, name, files, part):
        sizes = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
        info = {
            "id": name,
            "sha": SHA,
            "siblings": sizes,
            "gated": "manual" if name in self.hub.gate else False,
        }
        info |= {"cardData": {"license": "apache-2.0"}, "tags": [], "private": False}
        tree = [
            {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
            for path, data in files.items()
        ]
        self.say(
            200, {"Content-Type": "application/json"}, json.dumps(tree if "/tree/" in part else info).encode()
        )

    def file(self, name, files):
        asked = self.headers.get("Range")
        self.hub.requests.append((self.command, name, asked))
        if name not in files:
            return self.say(404, {"X-Error-Code": "EntryNotFound"})
        data, headers = (
            files[name],
            {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"},
        )
        if self.command == "GET" and name in self.hub.short:
            data = data[:-5]
        code, begin = 200, 0
        if asked:
            code, begin = 206, int(re.match(r"bytes=(\d+)-", asked)[1])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        stop = self.hub.cut.pop(name, None) if self.command == "GET" else None
        return self.say(code, headers, data[begin:], stop)

    def say(self, code, headers, body=b"", stop=None):
        self.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:stop])
        if stop is not None:
            self.close_connection = True


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
