"""The few request fields the gateway reads, and what it refuses. Every other field passes untouched.

A request's bytes go to the engine as they came unless the gateway has something to set (`with_fields`); the client's
own spelling of everything else survives even then.
"""

import enum
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway import splice
from gateway.errors import BadRequestError, NotFoundError
from gateway.fields import Document, Whole, refuse, whole
from gateway.settings import Limits, Policy


class Kind(enum.Enum):
    """The hot routes. The value is the path, at the gateway and at the engine alike."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"

    @property
    def anthropic(self) -> bool:
        return self is Kind.MESSAGES


HOT_ROUTES: Mapping[str, Kind] = {kind.value: kind for kind in Kind}

NAMED_MODELS = 20  # in the refusal of an unknown one
# The one field of each dialect that its engine route reads; chat has two, the newer one first.
_ANSWER_LIMITS = {
    Kind.CHAT: ("max_completion_tokens", "max_tokens"),
    Kind.COMPLETIONS: ("max_tokens",),
    Kind.RESPONSES: ("max_output_tokens",),
    Kind.MESSAGES: ("max_tokens",),
    Kind.EMBEDDINGS: (),
}
# vLLM's own default when a completion names no max_tokens (OpenAI's too).
COMPLETION_DEFAULT_MAX_TOKENS = 16
_COUNTS = {
    "n": Whole(1, "max_n"),
    "logprobs": Whole(0, "max_logprobs", or_boolean=True),
    "top_logprobs": Whole(0, "max_logprobs", or_boolean=True),
    "prompt_logprobs": Whole(-1, "max_logprobs", or_boolean=True),
}
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# Every whole number the gateway reads of a request. A completion of no tokens echoes its prompt.
INTEGERS: Mapping[Kind, Mapping[str, Whole]] = {
    kind: _COUNTS
    if kind is Kind.EMBEDDINGS
    else {**_COUNTS, **dict.fromkeys(_LENGTHS, Whole(0 if kind is Kind.COMPLETIONS else 1, "max_answer_tokens"))}
    for kind in Kind
}
MOST_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PromptSize:
    """How much the model will read: characters, and the bytes UTF-8 needs beyond one each, give the token estimate."""

    prompts: int = 1  # answer sets asked for: prompts of a completion, inputs of an embedding
    chars: int = 0
    extra_bytes: int = 0
    ids: int = 0  # tokens given as ids, which need no estimate

    def __add__(self, other: "PromptSize") -> "PromptSize":
        return PromptSize(
            self.prompts, self.chars + other.chars, self.extra_bytes + other.extra_bytes, self.ids + other.ids
        )


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the gateway knows of a request. `document` is the parsed body: read it, never change it."""

    kind: Kind
    body: bytes
    document: Document
    model: str
    stream: bool
    wants_usage: bool  # a stream whose client asked for the usage chunk
    n: int
    max_tokens: int | None  # per choice; None: the client set none
    size: PromptSize


def parse(kind: Kind, body: bytes, limits: Limits, policy: Policy) -> Envelope:
    """Read one body. Raises BadRequestError naming the field for whatever could not be served as asked."""
    _bound(body, limits)
    document = _object(body, limits.max_depth)
    refuse(document, policy)
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequestError("you must name a model (GET /v1/models lists them)", param="model", code="missing_model")
    stream = _boolean(document, "stream")
    numbers = {name: rule.check(document, name, limits) for name, rule in INTEGERS[kind].items() if name in document}
    max_tokens = _max_tokens(kind, document, numbers)
    size, ids = _prompt_size(kind, document, limits)
    if ids is not None:
        document, body = {**document, **ids}, splice.set_members(body, ids)
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object", param="stream_options")
    wants_usage = stream and isinstance(options, dict) and options.get("include_usage") is True
    return Envelope(kind, body, document, model, stream, wants_usage, numbers.get("n") or 1, max_tokens, size)


def with_fields(envelope: Envelope, fields: Mapping[str, Any]) -> bytes:
    """The body to send on: the client's own bytes, with `fields` set."""
    if not fields:
        return envelope.body
    spliced = splice.add_members if envelope.document.keys().isdisjoint(fields) else splice.set_members
    return spliced(envelope.body, fields)


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def _bound(body: bytes, limits: Limits) -> None:
    """Refuse bodies of too many parts before they are parsed: each costs an object, and time of the event loop."""
    containers, values = _parts(body)
    if containers > limits.max_containers or values > limits.max_values:
        containers, values = _parts(_STRING.sub(b"", body))  # what stands inside text does not count
    for found, most, what in (
        (containers, limits.max_containers, "objects and lists"),
        (values, limits.max_values, "values"),
    ):
        if found > most:
            raise BadRequestError(f"the body holds more than {most} {what}", code="invalid_json")


def _parts(text: bytes) -> tuple[int, int]:
    """Objects and lists, and values, in JSON text without strings; an upper bound of both in text with them."""
    containers = text.count(b"{") + text.count(b"[")
    return containers, containers + text.count(b",")


def _object(body: bytes, max_depth: int) -> Document:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error.msg} at byte {error.pos}", code="invalid_json"
        ) from None
    if not isinstance(document, dict):
        raise BadRequestError("the body must be a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > max_depth and _deeper_than(document, max_depth):
        raise BadRequestError(f"the body is nested deeper than {max_depth} levels", code="invalid_json")
    return document


def _deeper_than(document: Document, max_depth: int) -> bool:
    level: list[Any] = [document]
    for _ in range(max_depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _boolean(document: Document, name: str) -> bool:
    value = document.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequestError(f"{name} must be true or false", param=name)


def _max_tokens(kind: Kind, document: Document, numbers: Mapping[str, int | None]) -> int | None:
    if kind is Kind.EMBEDDINGS:
        return 0
    given = next((value for name in _ANSWER_LIMITS[kind] if (value := numbers.get(name)) is not None), None)
    if given is None and kind is Kind.COMPLETIONS and "max_tokens" not in document:
        return COMPLETION_DEFAULT_MAX_TOKENS
    return given


def _prompt_size(kind: Kind, document: Document, limits: Limits) -> tuple[PromptSize, Document | None]:
    """Also the prompt's field as it has to be sent on, where that is not how the client wrote it."""
    if kind is Kind.COMPLETIONS:
        return _prompt_list(document, "prompt", limits)
    if kind is Kind.EMBEDDINGS:
        if document.get("messages") is None:
            return _prompt_list(document, "input", limits)
        size, ids = PromptSize(), None  # engines embed a chat as well; which of the two they take is theirs
        if document.get("input") is not None:
            size, ids = _prompt_list(document, "input", limits)
        return _messages_size(document) + size, ids
    size = _input_size(document) if kind is Kind.RESPONSES else _messages_size(document)
    for key in ("tools", "system", "instructions"):
        if key in document:
            size += _text_size(document[key])
    return size, None


def _messages_size(document: Document) -> PromptSize:
    value = document.get("messages")
    if value is None:
        raise BadRequestError("messages is missing", param="messages")
    if not (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        raise BadRequestError("messages must be a non-empty list of objects", param="messages")
    return _text_size(value)


def _input_size(document: Document) -> PromptSize:
    value = document.get("input")
    if value is None:
        raise BadRequestError("input is missing", param="input")
    if not isinstance(value, str | list):
        raise BadRequestError("input must be a string or a list", param="input")
    return _text_size(value)


def _prompt_list(document: Document, name: str, limits: Limits) -> tuple[PromptSize, Document | None]:
    """Sizes of a string, a list of strings, a list of token ids or a list of such lists; anything else is refused."""
    value = document.get(name)
    if isinstance(value, str):
        return _text_size(value), None
    if not isinstance(value, list) or not value:
        raise BadRequestError(f"{name} must be a string, a list of strings, or token ids", param=name)
    if (ids := _token_ids(value, name)) is not None:
        return PromptSize(ids=len(ids)), None if ids is value else {name: ids}
    if len(value) > limits.max_prompts:
        raise BadRequestError(
            f"{name} may hold at most {limits.max_prompts} entries here, found {len(value)}", param=name
        )
    if all(isinstance(item, str) for item in value):
        return replace(_text_size(value), prompts=len(value)), None
    lists = [ids for item in value if isinstance(item, list) and item and (ids := _token_ids(item, name))]
    if len(lists) == len(value):
        size = PromptSize(prompts=len(value), ids=sum(map(len, lists)))
        return size, None if all(map(operator.is_, lists, value)) else {name: lists}
    raise BadRequestError(f"{name} must be a string, a list of strings, or token ids, not a mixture", param=name)


def _token_ids(items: list[Any], name: str) -> list[int] | None:
    """The items themselves where they are token ids, as whole numbers where some are written 1.0; None where not."""
    ids: list[int] = items
    if not all(type(item) is int for item in items):
        ids = [number for item in items if (number := whole(item)) is not None]
        if len(ids) < len(items):
            return None
    if min(ids) < 0 or max(ids) > MOST_TOKEN_ID:
        raise BadRequestError(f"{name} holds a token id outside the vocabulary", param=name)
    return ids


def _text_size(value: Any) -> PromptSize:
    """Size of every string below `value`, whose depth `_object` has bounded."""
    chars = extra = 0
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            chars += len(item)
            extra += 0 if item.isascii() else len(item.encode()) - len(item)
        elif isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
    return PromptSize(chars=chars, extra_bytes=extra)


def carries_grammar(envelope: Envelope) -> bool:
    """Whether the client sent a grammar of its own, which only the engine's compiler can judge."""
    options = envelope.document.get("structured_outputs")
    return isinstance(options, dict) and options.get("grammar") is not None


def route(method: str, path: str) -> Kind | None:
    """The hot route of a request, if it is one. Paths are compared whole: no slash games, no decoding twice."""
    return HOT_ROUTES.get(path) if method == "POST" else None


def route_not_served(model: str, kind: Kind, others: Iterable[str]) -> NotFoundError:
    """The engine of `model` has no such route: a chat model embeds nothing, an embedding model says nothing."""
    those = f"these are: {_some(names)}" if (names := sorted(others)) else "no model here is"
    return NotFoundError(
        f"the model {model[:200]!r} is not served at {kind.value}; {those}", param="model", code="route_not_served"
    )


def unknown_model(model: str, known: Iterable[str]) -> NotFoundError:
    """Names a few of those there are: the mistake is mostly one of spelling."""
    return NotFoundError(
        f"the model {model[:200]!r} does not exist here; these do: {_some(sorted(known))}",
        param="model",
        code="model_not_found",
    )


def _some(names: Sequence[str]) -> str:
    told = ", ".join(name[:100] for name in names[:NAMED_MODELS])
    more = f" and {len(names) - NAMED_MODELS} more (GET /v1/models lists them)" if len(names) > NAMED_MODELS else ""
    return told + more
