"""A hub on loopback: what the client library asks of the real one, and what goes wrong on the way to it.

Answers /api/models/..., /<repo>/resolve/<revision>/<file>, and sends large files on to a second port, as the real one
does to its CDN. Faults are one-shot and taken in order by the large files' answers.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 4096  # bytes; from there on a file is stored apart
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repo:
    """files: of its one commit. readers: tokens that may read it where it is gated or private."""

    files: dict[str, bytes]
    commit: str = COMMIT
    branches: tuple[str, ...] = ("main",)
    gated: str | bool = False
    private: bool = False
    readers: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)  # listed instead of the true ones
    extra: list[str] = field(default_factory=list)  # names that are listed only


@dataclass(frozen=True)
class Fault:
    """One answer of a large file. cut: bytes after which the connection is reset; status: instead of the file;
    whole: the range is ignored; wrong: other bytes; hold: it waits for `Hub.go` before the reset."""

    cut: int | None = None
    status: int = 0
    whole: bool = False
    wrong: bool = False
    hold: bool = False


@dataclass(frozen=True)
class Seen:
    """port: "hub" or "cdn"."""

    port: str
    method: str
    path: str
    authorization: str | None
    range: str | None


class Hub:
    """valid: tokens that it knows at all."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.valid: set[str] = set()
        self.faults: deque[Fault] = deque()
        self.seen: list[Seen] = []
        self.go = threading.Event()
        self.holding = threading.Event()
        self.url = self.cdn = ""

    def gets(self) -> list[Seen]:
        """Requests for the bytes of large files."""
        return [seen for seen in self.seen if seen.port == "cdn" and seen.method == "GET"]


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    servers = [_server(hub, kind) for kind in (_Front, _Cdn)]
    hub.url, hub.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.go.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _server(hub: Hub, kind: type[_Base]) -> ThreadingHTTPServer:
    return _Server(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": hub}))


class _Base(BaseHTTPRequestHandler):
    hub: Hub
    port = ""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._note()

    def do_HEAD(self) -> None:
        self._note()

    def _note(self) -> None:
        header = self.headers.get
        self.hub.seen.append(Seen(self.port, self.command, self.path, header("Authorization"), header("Range")))
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Front(_Base):
    port = "hub"

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        else:
            self.reply(404)

    def _token(self) -> str | None:
        said = self.headers.get("Authorization")
        return said.removeprefix("Bearer ") if said else None

    def _repo(self, name: str, revision: str) -> Repo | None:
        """As the real one refuses: a wrong token first, then what may not be known, then the revision."""
        repo, token = self.hub.repos.get(name), self._token()
        if token is not None and token not in self.hub.valid:
            self.reply(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repo is None or (repo.private and token not in repo.readers):
            self.reply(401 if token is None else 404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in (*repo.branches, repo.commit):
            self.reply(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return repo
        return None

    def _info(self, name: str, revision: str) -> None:
        if (repo := self._repo(name, revision)) is None:
            return
        siblings = [_sibling(file, content, repo.sizes.get(file)) for file, content in repo.files.items()]
        siblings += [{"rfilename": file, "size": 10, "blobId": "0" * 40} for file in repo.extra]
        body = {
            "id": name,
            "sha": repo.commit,
            "gated": repo.gated,
            "private": repo.private,
            "cardData": {"license": "apache-2.0"},
            "siblings": siblings,
        }
        self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (repo := self._repo(name, revision)) is None:
            return
        if repo.gated and self._token() not in repo.readers:
            self.reply(401 if self._token() is None else 403, headers={"X-Error-Code": "GatedRepo"})
        elif (content := repo.files.get(file)) is None:
            self.reply(404, headers={"X-Error-Code": "EntryNotFound"})
        elif len(content) < LARGE:
            self.reply(200, content, {"X-Repo-Commit": repo.commit, "ETag": f'"{git_sha1(content)}"'})
        else:
            headers = {
                "Location": f"{self.hub.cdn}/{name}/{file}?signature=s3cr3t",
                "X-Repo-Commit": repo.commit,
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            }
            self.reply(302, headers=headers)


class _Cdn(_Base):
    port = "cdn"

    def answer(self) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/(.+)", unquote(urlsplit(self.path).path))
        repo = self.hub.repos.get(found[1]) if found else None
        if found is None or repo is None:
            self.reply(404)
            return
        content = repo.files[found[2]]
        fault = self.hub.faults.popleft() if self.hub.faults else Fault()
        if fault.status:
            self.reply(fault.status)
            return
        if fault.wrong:
            content = bytes(len(content))
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and not fault.whole else 0
        if start >= len(content):
            self.reply(416)
            return
        self.send_response(206 if asked and not fault.whole else 200)
        if asked and not fault.whole:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content) if fault.cut is None else start + fault.cut
        self.wfile.write(content[start:end])
        if fault.hold:
            self.hub.holding.set()
            self.hub.go.wait()
        if end < len(content):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


def git_sha1(content: bytes) -> str:
    """The name git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sibling(name: str, content: bytes, size: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": len(content) if size is None else size}
    if len(content) < LARGE:
        return found | {"blobId": git_sha1(content)}
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": found["size"], "pointerSize": 134}
    return found | {"blobId": "1" * 40, "lfs": lfs}
