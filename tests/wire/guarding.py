"""Keys for tests, a gateway that asks for them, and requests to it that no client library would write."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve

KEY = "sk-canary-one"
BEARER = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def keys_file(path: Path, **tenants: dict[str, Any]) -> Path:
    """A keys file; each tenant's key is `sk-canary-NAME` unless it brings its own."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(fields.pop("key", f"sk-canary-{name}").encode()).hexdigest(), **fields}
        for name, fields in ((name, dict(fields)) for name, fields in tenants.items())
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


def lower(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def with_key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-canary-{name}"}


@asynccontextmanager
async def guarded(fake: FakeEngine, tmp_path: Path, **settings: Any) -> AsyncIterator[Running]:
    keys = keys_file(tmp_path / "keys.json", one={})
    async with serve([fake.url], **{"auth": {"disabled": False, "keys_file": keys}, **settings}) as up:
        yield up


async def raw(up: Running, request: bytes) -> tuple[int, bytes]:
    """Send bytes as they are; status and body of the first answer, 0 where the connection is just closed."""
    host, _, port = up.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(10):
        head = b""
        while b"\r\n\r\n" not in head and (part := await reader.read(65536)):
            head += part
        head, _, body = head.partition(b"\r\n\r\n")
        length = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x[:15] == b"content-length:"), 0)
        while len(body) < length and (part := await reader.read(65536)):
            body += part
    writer.close()
    return (int(head.split()[1]), body) if head else (0, b"")
