"""The few request fields the gateway reads, and what it refuses. Every other field passes untouched.

A request's bytes go to the engine as they came unless the gateway has something to set (`with_fields`); the client's
own spelling of everything else survives even then.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway import splice
from gateway.errors import BadRequestError, NotFoundError
from gateway.settings import Limits, Policy

Document = dict[str, Any]


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

MOST_INTEGER = 2**31 - 1
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
# Content parts without media, in all served dialects. Every other type is refused: new ways to make an engine fetch
# appear with new versions, new kinds of text hardly ever.
_TEXT_PARTS = frozenset({
    "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning_text", "summary_text",
    "tool_use", "tool_result", "tool_reference", "tool_addition", "tool_removal",
})  # fmt: skip
# Engines take a part without a type, or a whole message, for media where one of these stands in it.
_MEDIA_KEYS = frozenset({
    "image_url", "input_image", "image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio",
    "audio_embeds", "video_url", "video", "video_embeds", "file", "file_url", "input_file", "file_data", "source",
    "prompt_embeds",
})  # fmt: skip
REFUSED_FIELDS = {
    "cache_salt": "the gateway sets it for the key's group",
    "priority": "the gateway sets it from the key",
    "kv_transfer_params": "it addresses other engines",
    "ec_transfer_params": "it addresses other engines",
    "request_id": "send the X-Request-Id header instead",
    "prompt_embeds": "raw tensors are not accepted",
}


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
    _refuse(document, policy)
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequestError("you must name a model (GET /v1/models lists them)", param="model", code="missing_model")
    stream = _boolean(document, "stream")
    n = _integer(document, "n", 1, limits.max_n) or 1
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if not isinstance(document.get(name), bool):
            _integer(document, name, -1 if name == "prompt_logprobs" else 0, limits.max_logprobs)
    max_tokens = _max_tokens(kind, document, limits)
    size = _prompt_size(kind, document, limits)
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object", param="stream_options")
    wants_usage = stream and isinstance(options, dict) and options.get("include_usage") is True
    return Envelope(kind, body, document, model, stream, wants_usage, n, max_tokens, size)


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


_SUSPECT = frozenset({*REFUSED_FIELDS, "truncate_prompt_tokens", "chat_template", "chat_template_kwargs"})


def _refuse(document: Document, policy: Policy) -> None:
    if not _SUSPECT.isdisjoint(document):
        _refuse_fields(document, policy)
    if not policy.allow_media_urls:
        for name in ("messages", "input", "system"):
            value = document.get(name)
            if isinstance(value, (list, dict)) and _holds_media(value):
                raise BadRequestError(
                    "media parts are refused here: the engine would fetch the address they name",
                    param=name,
                    code="unsupported_parameter",
                )


def _refuse_fields(document: Document, policy: Policy) -> None:
    for name, reason in REFUSED_FIELDS.items():
        if document.get(name) is not None:
            raise BadRequestError(f"{name} can't be set by clients: {reason}", param=name, code="unsupported_parameter")
    if not policy.allow_truncation and document.get("truncate_prompt_tokens") is not None:
        raise BadRequestError(
            "truncate_prompt_tokens is refused here: a silently shortened prompt changes the question",
            param="truncate_prompt_tokens",
            code="unsupported_parameter",
        )
    if not policy.allow_chat_template:
        kwargs = document.get("chat_template_kwargs")
        if document.get("chat_template") is not None or (isinstance(kwargs, dict) and "chat_template" in kwargs):
            raise BadRequestError(
                "client chat templates are refused here: a template is code that runs in the engine",
                param="chat_template",
                code="unsupported_parameter",
            )


def _holds_media(messages: Any) -> bool:
    """Whether a message, or a part below it at any depth, is anything but text."""
    todo = [(item, False) for item in (messages if isinstance(messages, list) else [messages])]
    while todo:
        item, is_part = todo.pop()
        if not isinstance(item, dict):
            continue
        if any(item.get(key) is not None for key in item.keys() & _MEDIA_KEYS):
            return True
        kind = item.get("type")
        if is_part and kind is not None and not (isinstance(kind, str) and kind in _TEXT_PARTS):
            return True
        for inner in (item.get("content"), item.get("output")):
            todo += [(part, True) for part in (inner if isinstance(inner, list) else [inner])]
    return False


def _boolean(document: Document, name: str) -> bool:
    value = document.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequestError(f"{name} must be true or false", param=name)


def _integer(document: Document, name: str, least: int, most: int | None) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # 1.0 is what some JSON writers make of 1
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequestError(f"{name} must be a whole number", param=name)
    most = MOST_INTEGER if most is None else most
    if value < least:
        raise BadRequestError(f"{name} must be at least {least}, found {value}", param=name)
    if value > most:
        raise BadRequestError(f"{name} may be at most {most} here, found {value}", param=name)
    return value


def _max_tokens(kind: Kind, document: Document, limits: Limits) -> int | None:
    if kind is Kind.EMBEDDINGS:
        return 0
    values = {
        name: _integer(document, name, 0 if kind is Kind.COMPLETIONS else 1, limits.max_answer_tokens)
        for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")
    }
    given = next((values[name] for name in _ANSWER_LIMITS[kind] if values[name] is not None), None)
    if given is None and kind is Kind.COMPLETIONS and "max_tokens" not in document:
        return COMPLETION_DEFAULT_MAX_TOKENS
    return given


def _prompt_size(kind: Kind, document: Document, limits: Limits) -> PromptSize:
    if kind in (Kind.COMPLETIONS, Kind.EMBEDDINGS):
        name = "prompt" if kind is Kind.COMPLETIONS else "input"
        if kind is Kind.EMBEDDINGS and document.get("messages") is not None:
            return _text_size(document["messages"])
        return _prompt_list(document.get(name), name, limits)
    required = "input" if kind is Kind.RESPONSES else "messages"
    value = document.get(required)
    if value is None:
        raise BadRequestError(f"{required} is missing", param=required)
    if required == "messages" and not (
        isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ):
        raise BadRequestError("messages must be a non-empty list of objects", param="messages")
    size = _text_size(value)
    for key in ("tools", "system", "instructions"):
        if key in document:
            size += _text_size(document[key])
    return size


def _prompt_list(value: Any, name: str, limits: Limits) -> PromptSize:
    """Sizes of a string, a list of strings, a list of token ids or a list of such lists; anything else is refused."""
    if isinstance(value, str):
        return _text_size(value)
    if not isinstance(value, list) or not value:
        raise BadRequestError(f"{name} must be a string, a list of strings, or token ids", param=name)
    if all(type(item) is int for item in value):
        _check_ids(value, name)
        return PromptSize(ids=len(value))
    if len(value) > limits.max_prompts:
        raise BadRequestError(
            f"{name} may hold at most {limits.max_prompts} entries here, found {len(value)}", param=name
        )
    if all(isinstance(item, str) for item in value):
        return replace(_text_size(value), prompts=len(value))
    if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
        for item in value:
            _check_ids(item, name)
        return PromptSize(prompts=len(value), ids=sum(map(len, value)))
    raise BadRequestError(f"{name} must be a string, a list of strings, or token ids, not a mixture", param=name)


def _check_ids(ids: list[int], name: str) -> None:
    if min(ids) < 0 or max(ids) >= 1 << 31:
        raise BadRequestError(f"{name} holds a token id outside the vocabulary", param=name)


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


def unknown_model(model: str, known: Iterable[str]) -> NotFoundError:
    """Names a few of those there are: the mistake is mostly one of spelling."""
    names = sorted(known)
    told = ", ".join(name[:100] for name in names[:NAMED_MODELS])
    more = f" and {len(names) - NAMED_MODELS} more (GET /v1/models lists them)" if len(names) > NAMED_MODELS else ""
    return NotFoundError(
        f"the model {model[:200]!r} does not exist here; these do: {told}{more}",
        param="model",
        code="model_not_found",
    )
