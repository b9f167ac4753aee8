"""What clients may put into the fields the gateway acts on: each rule as the check it is and as the JSON Schema that
/openapi.json publishes, side by side, so that neither says what the other does not. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.errors import BadRequestError
from gateway.settings import Limits, Policy

Document = dict[str, Any]
Schema = dict[str, Any]

MOST_INTEGER = 2**31 - 1

# -- whole numbers -----------------------------------------------------------------------------------------------------


def whole(value: Any) -> int | None:
    """The number where `value` is a whole one: 1.0 is what some JSON writers make of 1. True is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number or null, from `least` to what the limit named `setting` allows."""

    least: int
    setting: str
    or_boolean: bool = False

    def check(self, document: Document, name: str, limits: Limits) -> int | None:
        """The field's number; None where it has none. Raises BadRequestError."""
        value = document.get(name)
        if value is None or (self.or_boolean and isinstance(value, bool)):
            return None
        number = whole(value)
        if number is None:
            raise BadRequestError(f"{name} must be a whole number", param=name)
        if number < self.least:
            raise BadRequestError(f"{name} must be at least {self.least}, found {number}", param=name)
        if number > (most := self._most(limits)):
            raise BadRequestError(f"{name} may be at most {most} here, found {number}", param=name)
        return number

    def schema(self, limits: Limits) -> Schema:
        number = {"type": ["integer", "null"], "minimum": self.least, "maximum": self._most(limits)}
        return {"anyOf": [{"type": "boolean"}, number]} if self.or_boolean else number

    def _most(self, limits: Limits) -> int:
        most: int | None = getattr(limits, self.setting)
        return MOST_INTEGER if most is None else most


# -- fields that clients can't set -------------------------------------------------------------------------------------

REFUSED_FIELDS = {
    "cache_salt": "the gateway sets it for the key's group",
    "priority": "the gateway sets it from the key",
    "kv_transfer_params": "it addresses other engines",
    "ec_transfer_params": "it addresses other engines",
    "request_id": "send the X-Request-Id header instead",
    "prompt_embeds": "raw tensors are not accepted",
}
_SUSPECT = frozenset({*REFUSED_FIELDS, "truncate_prompt_tokens", "chat_template", "chat_template_kwargs"})


def refuse(document: Document, policy: Policy) -> None:
    """Raises BadRequestError for what `refused_schemas` forbids."""
    if not _SUSPECT.isdisjoint(document):
        _refuse_fields(document, policy)
    if not policy.allow_media_urls:
        for name in Media.FIELDS:
            value = document.get(name)
            if isinstance(value, (list, dict)) and Media.found(value):
                raise BadRequestError(
                    "media parts are refused here: the engine would fetch the address they name",
                    param=name,
                    code="unsupported_parameter",
                )


def refused_schemas(policy: Policy) -> dict[str, Schema]:
    """Field -> what a client may put there, where the policy leaves little of it."""
    absent = [*REFUSED_FIELDS]
    absent += [] if policy.allow_truncation else ["truncate_prompt_tokens"]
    absent += [] if policy.allow_chat_template else ["chat_template"]
    fields: dict[str, Schema] = {name: {"type": "null", "description": "Clients can't set it here."} for name in absent}
    if not policy.allow_chat_template:
        template = {"type": "object", "required": ["chat_template"]}
        fields["chat_template_kwargs"] = {"not": template, "description": "Anything but a template: that is code."}
    return fields


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


# -- media -------------------------------------------------------------------------------------------------------------


class Media:
    """Parts that are anything but text, in messages and in parts below them at any depth."""

    FIELDS = ("messages", "input", "system")  # where the dialects have messages; each is looked at on every route
    # Content parts without media, in all served dialects. Every other type is refused: new ways to make an engine
    # fetch appear with new versions, new kinds of text hardly ever.
    TEXT_PARTS = frozenset({
        "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning_text",
        "summary_text", "tool_use", "tool_result", "tool_reference", "tool_addition", "tool_removal",
    })  # fmt: skip
    # Engines take a part without a type, or a whole message, for media where one of these stands in it.
    KEYS = frozenset({
        "image_url", "input_image", "image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio",
        "audio_embeds", "video_url", "video", "video_embeds", "file", "file_url", "input_file", "file_data", "source",
        "prompt_embeds",
    })  # fmt: skip
    BELOW = ("content", "output")  # of a message or a part: a part, or a list of parts

    # For the document's components: a part, and what holds one or a list of them.
    SCHEMAS: ClassVar[dict[str, Schema]]

    @classmethod
    def found(cls, messages: Any) -> bool:
        todo = [(item, False) for item in (messages if isinstance(messages, list) else [messages])]
        while todo:
            item, is_part = todo.pop()
            if not isinstance(item, dict):
                continue
            if any(item.get(key) is not None for key in item.keys() & cls.KEYS):
                return True
            kind = item.get("type")
            if is_part and kind is not None and not (isinstance(kind, str) and kind in cls.TEXT_PARTS):
                return True
            for inner in (item.get("content"), item.get("output")):
                todo += [(part, True) for part in (inner if isinstance(inner, list) else [inner])]
        return False


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _either(names: Iterable[str]) -> str:
    return f"^({'|'.join(sorted(names))})$"


# These words speak of objects or of lists alone: anything else is text, or the engine's business. One pattern for all
# keys of media says the same as a property each, and does not make every reader of the document unfold them.
_MESSAGE: Schema = {
    "patternProperties": {_either(Media.KEYS): {"type": "null"}, _either(Media.BELOW): _reference("TextParts")}
}
_PART: Schema = {**_MESSAGE, "properties": {"type": {"enum": [*sorted(Media.TEXT_PARTS), None]}}}
Media.SCHEMAS = {"TextMessages": {**_MESSAGE, "items": _MESSAGE}, "TextParts": {**_PART, "items": _PART}}


def media_schemas(policy: Policy) -> dict[str, Schema]:
    """Field -> what stands there without media."""
    return {} if policy.allow_media_urls else {name: _reference("TextMessages") for name in Media.FIELDS}
