"""Talking to the gateway as clients do: bodies for each route, raw bytes, and the official client."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.fakes.engine import MODEL
from tests.wire.conftest import Running

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hello there"},
    EMBEDDINGS: {"model": MODEL, "input": "hello there"},
    RESPONSES: {"model": MODEL, "input": "hello there"},
    MESSAGES: {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16},
}
EVERY_ROUTE = pytest.mark.parametrize("path", list(BODIES))
SMALL = b'{"model":"fake-8b","prompt":"hello"}'


def request_bytes(body: bytes | dict[str, Any], path: str = COMPLETIONS, **headers: str) -> bytes:
    """A POST as a client would write it; `headers` replace the usual ones, "" leaves one out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"host": "gateway", "content-type": "application/json", "content-length": str(len(data))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value), "", ""]
    return "\r\n".join(lines).encode() + data


@contextlib.asynccontextmanager
async def connected(up: Running) -> Any:
    reader, writer = await asyncio.open_connection(*up.url.removeprefix("http://").split(":"))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def raw(up: Running, data: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Send bytes as they are; the answer must be JSON, and the only one."""
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(data)
        status, headers, body = await read_answer(reader)
        assert headers["content-type"] == "application/json", body
        if headers.get("connection") == "close":
            assert await reader.read() == b"", "something came after a final answer"
        return status, headers, json.loads(body)


def envelope(document: dict[str, Any]) -> dict[str, Any]:
    """The error object, checked to be in the one shape."""
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return dict(error)


def official(up: Running, key: str = "sk-none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.url}/v1", api_key=key, max_retries=0, http_client=up.client)
