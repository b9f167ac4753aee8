"""What is asked, what the source answers, and whether that is what came out at the other end. Pure.

Load and source share this module, so a party between them can be held to every word.
"""

from typing import Any

import orjson

MODEL = "bench-8b"
CHAT_MODEL = "bench-8b-chat"  # LiteLLM serves completions and chats of one engine under two names
TOKENS = 16
PROMPT = "the quick brown fox " * 8
PROMPT_IDS = list(range(1, 34))
TEXT = "".join(f" word{number}" for number in range(TOKENS))
STAMP = 1700000000
_WHOLE = {
    "id": "cmpl-bench",
    "object": "text_completion",
    "created": STAMP,
    "model": MODEL,
    "service_tier": None,
    "system_fingerprint": None,
}


def completion_body() -> bytes:
    """A request that may be merged with others: sampled, short, not streamed."""
    return orjson.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.7})


def chat_body(events: int, per_write: int, step_ms: float) -> bytes:
    """A streamed chat. What the source shall do stands in the message, which every party passes on.

    `step_ms` 0: as fast as it is taken; below 0: the first event at once, the others when the source is told to go on.
    """
    content = f"{events} {per_write} {step_ms}"
    messages = [{"role": "user", "content": content}]
    return orjson.dumps({"model": CHAT_MODEL, "messages": messages, "max_tokens": events, "stream": True})


def chat_order(document: dict[str, Any]) -> tuple[int, int, float, bool]:
    """Events, events a write, step in ms, whether usage was asked for. Raises ValueError for any other message."""
    events, per_write, step_ms = document["messages"][-1]["content"].split()
    usage = bool((document.get("stream_options") or {}).get("include_usage"))
    return int(events), int(per_write), float(step_ms), usage


def whole_answer(prompts: int, with_ids: bool) -> bytes:
    """The source's answer to a completion with so many prompts."""
    choice = {
        "text": TEXT,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": list(range(TOKENS)) if with_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": PROMPT_IDS if with_ids else None,
    }
    usage = {
        "prompt_tokens": prompts * len(PROMPT_IDS),
        "completion_tokens": prompts * TOKENS,
        "total_tokens": prompts * (len(PROMPT_IDS) + TOKENS),
        "prompt_tokens_details": None,
    }
    return orjson.dumps({**_WHOLE, "choices": [{"index": i, **choice} for i in range(prompts)], "usage": usage})


def stream_events(events: int, usage: bool) -> list[bytes]:
    """A chat's events as vLLM writes them: the role, one a token, the finish, usage if asked for, [DONE]."""
    base = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": STAMP, "model": CHAT_MODEL}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
        return {**base, "choices": [choice]}

    rows = [chunk({"role": "assistant", "content": ""}), *(chunk({"content": _piece(i)}) for i in range(events))]
    rows.append(chunk({}, "length"))
    if usage:
        counts = {"prompt_tokens": 9, "completion_tokens": events, "total_tokens": 9 + events}
        rows.append({**base, "choices": [], "usage": counts})
    return [b"data: " + data + b"\n\n" for data in [*map(orjson.dumps, rows), b"[DONE]"]]


def _piece(number: int) -> str:
    return f" w{number % 1000}"


def whole_fault(body: bytes) -> str | None:
    """What is wrong with a client's whole answer; None if nothing is. Ids may differ, words and counts may not."""
    try:
        document = orjson.loads(body)
        (choice,) = document["choices"]
        usage = document["usage"]
        told = (choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return f"no completion: {body[:200]!r}"
    right = (TEXT, "length", len(PROMPT_IDS), TOKENS)
    return None if told == right else f"another answer: {told!r}"


def stream_fault(body: bytes, events: int) -> str | None:
    """What is wrong with a client's whole stream; None if nothing is.

    A party that passes bytes on is done with the first line. One that writes its own events is held to the words, to
    one event a token, to a finish and to [DONE] as the last.
    """
    if body == _expected(events):
        return None
    datas = [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: ")]
    if not datas or datas[-1].strip() != b"[DONE]":
        return "a stream that does not end in [DONE]"
    words: list[str] = []
    finish = None
    try:
        for data in datas[:-1]:
            for choice in orjson.loads(data)["choices"]:
                if choice["delta"].get("content"):
                    words.append(choice["delta"]["content"])
                finish = choice.get("finish_reason") or finish
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        return f"an event that is no chunk of a chat ({error})"
    if words != [_piece(number) for number in range(events)]:
        return f"{len(words)} tokens or other words, where {events} were sent"
    return None if finish == "length" else f"a finish_reason of {finish!r}"


def _expected(events: int, _cache: dict[int, bytes] = {}) -> bytes:  # noqa: B006 - one run, a handful of lengths
    if events not in _cache:
        _cache[events] = b"".join(stream_events(events, usage=False))
    return _cache[events]
