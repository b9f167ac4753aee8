"""The least that a client may send of each kind, to be spoilt in one place by a test."""

from typing import Any

from gateway.protocol import Kind

LEAST: dict[Kind, dict[str, Any]] = {
    Kind.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    Kind.COMPLETIONS: {"model": "m", "prompt": "hello"},
    Kind.EMBEDDINGS: {"model": "m", "input": "hello"},
    Kind.RESPONSES: {"model": "m", "input": "hello"},
    Kind.MESSAGES: {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]},
}
