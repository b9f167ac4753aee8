"""Server-sent events, as far as a relay needs them: where events end, and what the few telling ones say. Pure.

Only whole events leave the framer. A client could do nothing with half of one, and an error event appended after half
an event would be unreadable. Event bytes are never rewritten. (Format: WHATWG HTML, "Server-sent events".)
"""

import re
from typing import Any

import orjson

_BLANK_LINE = re.compile(rb"\n\r?\n")  # vLLM ends lines with LF; proxies in between may make it CRLF
_LINE = re.compile(rb"\r\n|\n|\r")  # never splitlines() on text: it also breaks JSON at U+2028 and U+0085
DONE = b"[DONE]"
MAX_TOKENS = 2**31  # no answer has more; a figure above it is damage, and would overflow what counts tokens


class Framer:
    """Cuts a byte stream into whole events. `tail` is what has come of the next one."""

    __slots__ = ("max_bytes", "tail")

    def __init__(self, max_bytes: int = 8 * 1024 * 1024) -> None:
        self.max_bytes = max_bytes
        self.tail = bytearray()

    def feed(self, data: bytes) -> bytes:
        """All whole events that have come so far, as they came; b"" if there is none yet.

        Raises ValueError when one event grows beyond max_bytes.
        """
        tail = self.tail
        if not tail and data.endswith(b"\n\n"):  # the usual case: reads end where events end
            return data
        seen = max(0, len(tail) - 2)  # a blank line may have begun in what came before
        tail += data
        lf, crlf = tail.rfind(b"\n\n", seen), tail.rfind(b"\n\r\n", seen)
        end = max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
        events = bytes(tail[:end])
        del tail[:end]
        if len(tail) > self.max_bytes:
            raise ValueError(f"an event of more than {self.max_bytes} bytes")
        return events

    def rest(self) -> bytes:
        """At the stream's end: what came of an event whose blank line did not, as a whole event; b"" if nothing did."""
        rest = bytes(self.tail)
        self.tail.clear()
        return rest and rest + (b"\n" if rest.endswith(b"\n") else b"\n\n")


class SameId:
    """Holds a stream's events against the id of its first: an event of another id is of another request's answer.

    Every chunk of a chat or completion carries the answer's id, the one with the usage too; [DONE] and comments carry
    none. A chunk is one line and a blank one, so where the beginning of a chunk, "data: " to the id, stands in a read
    half as often as line ends do, the read is events of this answer and nothing else: told at 0.1 µs an event. Any
    other read is looked at by `of_another`, and so is every read where the id is not a chunk's first member or is
    spelled with escapes. What is searched for can't stand within a text: its quotes would be escaped there.
    """

    __slots__ = ("_id", "_mark")

    def __init__(self) -> None:
        self._id: str | None = None
        self._mark = b""  # oftener in any read than line ends are, so that the first is looked at

    def chunks(self, events: bytes) -> int:
        """How many events these are; 0 where any may be of another kind or answer."""
        lines = events.count(b"\n")
        return lines >> 1 if lines == 2 * events.count(self._mark) else 0

    def of_another(self, events: bytes) -> int | None:
        """Where the first event of another answer begins; None where there is none."""
        at = 0
        for event in split(events):
            if not self._mark or self._mark not in event:
                document = json_of(event)
                found = None if document is None else document.get("id")
                if isinstance(found, str):
                    if self._id is None:
                        self._learn(found, event)
                    elif found != self._id:
                        return at
            at += len(event)
        return None

    def _learn(self, found: str, event: bytes) -> None:
        self._id = found
        spelled = re.match(rb'data: ?\{\s*"id"\s*:\s*"' + re.escape(found.encode()) + rb'"', event)
        if spelled is not None:
            self._mark = spelled[0]


def split(events: bytes) -> list[bytes]:
    """Whole events one by one, each with its terminating blank line; joined again they are what came."""
    found, start = [], 0
    for match in _BLANK_LINE.finditer(events):
        found.append(events[start : match.end()])
        start = match.end()
    if start < len(events):  # further blank lines
        found.append(events[start:])
    return found


def data_of(event: bytes) -> bytes:
    """The event's data lines joined by newlines; b"" for a comment."""
    lines = [line[5:].removeprefix(b" ") for line in _LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)


def json_of(event: bytes) -> dict[str, Any] | None:
    """The event's data as a JSON object; None where it is none ([DONE], a comment, damage)."""
    try:
        document = orjson.loads(data_of(event))
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def is_error(document: dict[str, Any]) -> bool:
    """Whether this event tells of a failure, in any of the served dialects."""
    return bool(document.get("error")) or document.get("type") in ("error", "response.failed")


def comment(text: str) -> bytes:
    """A comment: clients must ignore it (WHATWG), so it keeps an idle hop open without being taken for content."""
    return b": " + text.encode() + b"\n\n"


def error_event(body: bytes, *, anthropic: bool = False) -> bytes:
    """An error after the first byte, when the status has gone out already. `body` is errors.error_body's."""
    return (b"event: error\n" if anthropic else b"") + b"data: " + body + b"\n\n"


def has_content(document: dict[str, Any]) -> bool:
    """Whether this event carries generated output, in any served dialect: the first such event is the first token."""
    kind, delta = document.get("type"), document.get("delta")
    if isinstance(kind, str):  # responses and messages name their events
        if kind == "content_block_delta" and isinstance(delta, dict):
            return any(delta.get(key) for key in ("text", "thinking", "partial_json"))
        return kind.endswith(".delta") and bool(delta)
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(
            delta.get(key) for key in ("content", "tool_calls", "reasoning", "reasoning_content", "refusal")
        ):
            return True
    return False


def usage_of(document: dict[str, Any]) -> tuple[int, int] | None:
    """Prompt and generation tokens, if this event or answer reports them, in any of the served dialects.

    None as well where one of the figures can't be true: not a whole number, negative, above MAX_TOKENS.
    """
    usage = _usage(document)
    if usage is None:
        return None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    generation = usage.get("completion_tokens", usage.get("output_tokens", 0))
    # Messages counts what came from the prefix cache apart; everywhere else it is part of the prompt.
    cached = [usage.get(f"cache_{how}_input_tokens") or 0 for how in ("read", "creation")]
    figures: list[Any] = [prompt, *cached, generation or 0]
    if not all(type(figure) is int and 0 <= figure <= MAX_TOKENS for figure in figures):
        return None
    return sum(figures[:-1]), figures[-1]


def cached_of(document: dict[str, Any]) -> int | None:
    """Prompt tokens that came from the prefix cache, if this event or answer says so, in any of the served dialects."""
    usage = _usage(document) or {}
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
    return cached if type(cached) is int and 0 <= cached <= MAX_TOKENS else None


def _usage(document: dict[str, Any]) -> dict[str, Any] | None:
    usage = document.get("usage")
    for wrapper in ("response", "message"):  # where the events of responses and messages carry it
        inner = document.get(wrapper)
        if usage is None and isinstance(inner, dict):
            usage = inner.get("usage")
    return usage if isinstance(usage, dict) else None
