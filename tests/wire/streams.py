"""Streams from both ends: what an engine writes, how a client reads."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.engine import MODEL
from tests.wire.conftest import Running
from tests.wire.talking import CHAT, COMPLETIONS, MESSAGES, RESPONSES

DONE = b"data: [DONE]\n\n"
QUESTIONS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello there"}]},
    COMPLETIONS: {"prompt": "hello there"},
    RESPONSES: {"input": "hello there"},
    MESSAGES: {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16},
}
EVERY_DIALECT = pytest.mark.parametrize("path", list(QUESTIONS))


def open_stream(up: Running, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": MODEL, "stream": True, **QUESTIONS[path], **fields}
    return up.client.stream("POST", path, json=body, headers=headers)


async def events_of(stream: AsyncIterator[bytes]) -> list[bytes]:
    """The data of every event in a client's byte stream, comments left out."""
    text = b"".join([chunk async for chunk in stream])
    return [
        line.removeprefix(b"data: ") for event in re.split(rb"\r?\n\r?\n", text) for line in re.split(rb"\r?\n", event)
        if line.startswith(b"data: ")
    ]  # fmt: skip


async def text_of(up: Running, path: str = CHAT, **fields: Any) -> bytes:
    """A whole stream's bytes."""
    async with open_stream(up, path, **fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        return b"".join([chunk async for chunk in answer.aiter_raw()])


def delta(text: str, **fields: Any) -> bytes:
    """One event of a chat stream, as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, **fields}
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


FINISH = delta("", finish_reason="stop")


class Reader:
    """A client that takes a stream piece by piece."""

    def __init__(self, answer: Any) -> None:
        self._raw = answer.aiter_raw()
        self.text = b""

    async def until(self, wanted: bytes) -> None:
        """Read on until `wanted` has come; fails where the stream ends or stands still first."""
        async with asyncio.timeout(10):
            while wanted not in self.text:
                self.text += await anext(self._raw)

    async def rest(self) -> bytes:
        async with asyncio.timeout(10):
            async for chunk in self._raw:
                self.text += chunk
        return self.text


def error_of(text: bytes) -> dict[str, Any]:
    """The one error event, which must be the last of its stream."""
    events = [event for event in text.split(b"\n\n") if b'"error"' in event]
    assert len(events) == 1, text
    assert text.endswith(events[0] + b"\n\n"), text
    error: dict[str, Any] = json.loads(events[0].partition(b"data: ")[2])["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error
