"""The bodies and streams of the API's dialects, as vLLM 0.32 writes them (its entrypoints: openai, anthropic)."""

import re
from typing import Any

import orjson

from tests.fakes.model import asked, fingerprint, tokenize

Choice = dict[str, Any]
Usage = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def named(kind: str, **fields: Any) -> bytes:
    """One event as both dialects write it, without its blank line."""
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields})


def pieces(choice: Choice) -> list[str]:
    """The answer's text, a token each."""
    return re.findall(r" \w+", choice["text"])


def embeddings(document: dict[str, Any], extra_usage: int) -> dict[str, Any]:
    """The answer of /v1/embeddings."""
    inputs = [tokenize(prompt) for prompt in asked(document)]
    data = [
        {"object": "embedding", "index": i, "embedding": [fingerprint(tokens, k) % 1000 / 1000 for k in range(4)]}
        for i, tokens in enumerate(inputs)
    ]
    count = sum(map(len, inputs)) + extra_usage
    return {
        "object": "list",
        "data": data,
        "model": document.get("model"),
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }


def chunk_events(
    path: str, choices: list[Choice], usage: Usage, document: dict[str, Any], request_id: str
) -> list[bytes]:
    """A stream of chat or completions: role (chat), one event a token, finish, usage if asked for, [DONE]."""
    chat = path == "/v1/chat/completions"
    base = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1700000000,
        "model": document.get("model"),
    }
    events: list[dict[str, Any]] = []
    for choice in choices:
        place, last = {"index": choice["index"]}, {"finish_reason": choice["finish_reason"]}
        if chat:
            events.append({**place, "delta": {"role": "assistant", "content": ""}})
            events += [{**place, "delta": {"content": piece}} for piece in pieces(choice)]
            events.append({**place, "delta": {}, **last})
        else:
            events += [{**place, "text": piece, "finish_reason": None} for piece in pieces(choice)]
            events.append({**place, "text": "", **last})
    rows = [{**base, "choices": [event]} for event in events]
    options = document.get("stream_options") or {}
    if options.get("include_usage"):
        if options.get("continuous_usage_stats"):
            rows = [{**row, "usage": usage} for row in rows]
        rows.append({**base, "choices": [], "usage": usage})
    return [b"data: " + line for line in [*map(orjson.dumps, rows), b"[DONE]"]]


def response(choice: Choice, usage: Usage, model: str, request_id: str, status: str = "completed") -> dict[str, Any]:
    """A response object of /v1/responses."""
    part = {"type": "output_text", "text": choice["text"], "annotations": [], "logprobs": None}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    done = status == "completed"
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": 1700000000,
        "model": model,
        "status": status,
        "output": [item] if done else [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if done
        else None,
        # The official client's model of a response needs these.
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def response_events(choice: Choice, usage: Usage, model: str, request_id: str) -> list[bytes]:
    """A stream of /v1/responses: it ends with response.completed, and usage is only there."""
    begun = response(choice, usage, model, request_id, "in_progress")
    whole = response(choice, usage, model, request_id)
    item = whole["output"][0]
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress", "content": []}}),
        ("response.content_part.added", {**place, "part": {**item["content"][0], "text": ""}}),
        *(("response.output_text.delta", {**place, "delta": piece, "logprobs": []}) for piece in pieces(choice)),
        ("response.output_text.done", {**place, "text": choice["text"], "logprobs": []}),
        ("response.content_part.done", {**place, "part": item["content"][0]}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": whole}),
    ]
    return [named(kind, sequence_number=number, **fields) for number, (kind, fields) in enumerate(rows)]


def message(choice: Choice, usage: Usage, model: str, request_id: str) -> dict[str, Any]:
    """A message of /v1/messages."""
    return {
        "id": f"chatcmpl-{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": choice["text"]}],
        "stop_reason": _STOP_REASONS[choice["finish_reason"]],
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def message_events(choice: Choice, usage: Usage, model: str, request_id: str) -> list[bytes]:
    """A stream of /v1/messages: usage at both ends, message_stop last."""
    prompt = {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}
    opening = {**message(choice, usage, model, request_id), "content": [], "stop_reason": None, "usage": prompt}
    ending = {"stop_reason": _STOP_REASONS[choice["finish_reason"]], "stop_sequence": None}
    return [
        named("message_start", message=opening),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(
            named("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
            for piece in pieces(choice)
        ),
        named("content_block_stop", index=0),
        named("message_delta", delta=ending, usage={**prompt, "output_tokens": usage["completion_tokens"]}),
        named("message_stop"),
    ]
