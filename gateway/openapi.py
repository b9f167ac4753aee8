"""The OpenAPI document of the public routes, under the limits in force.

It states what the gateway itself reads, sets and refuses. Every other field passes to the engine untouched, so requests
and answers are open objects; what vLLM makes of them stands in its own documentation.
"""

from typing import Any

from gateway import __version__
from gateway.protocol import MOST_INTEGER, REFUSED_FIELDS, Kind
from gateway.settings import Settings

Schema = dict[str, Any]

_FAILURES = {
    "400": "The request can't be served as asked; `error.param` names the field.",
    "401": "No key, or one that is unknown or expired.",
    "404": "No such model or route.",
    "405": "The route takes another method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is no application/json.",
    "429": "Overloaded, or the key's own limit is reached; Retry-After says when to come back.",
    "431": "Request line and headers are too large.",
    "4XX": "Whatever else an engine refuses.",
    "500": "The gateway or the engine failed.",
    "502": "The engine broke off, or answered what is no answer.",
    "503": "No engine is ready, or the gateway is shutting down.",
    "504": "The engine took longer than the request's deadline.",
}
_READ_FAILURES = ("401", "404", "405", "431", "503")
_INTEGER_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TITLES = {
    Kind.CHAT: "A chat",
    Kind.COMPLETIONS: "Completions of one prompt or several",
    Kind.EMBEDDINGS: "Embeddings of one input or several",
    Kind.RESPONSES: "A response, in OpenAI's newer dialect",
    Kind.MESSAGES: "A message, in Anthropic's dialect",
}


def document(settings: Settings) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1; made of settings alone."""
    paths: dict[str, Any] = {kind.value: {"post": _inference(kind, settings)} for kind in Kind}
    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models"] = {"get": _reading("The models that engines serve here", "Models")}
    paths["/v1/models/{name}"] = {"get": {**_reading("One of them", "Model"), "parameters": [model]}}
    for path, title in (("/healthz", "The gateway's own health"), ("/readyz", "Whether an engine could serve now")):
        paths[path] = {"get": {**_reading(title, "Status"), "security": []}}
    paths["/readyz"]["get"]["responses"]["503"] = _answer("No engine makes progress.", "Status")
    return {
        "openapi": "3.1.0",
        "info": {"title": "vLLM gateway", "version": __version__, "description": (__doc__ or "").strip()},
        "security": [{"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "headers": {"RequestId": {"required": True, "schema": {"type": "string"}}},
            "schemas": _SCHEMAS,
        },
    }


def _inference(kind: Kind, settings: Settings) -> dict[str, Any]:
    done = _answer("The engine's answer; with `stream` its events, as they come.", "Answer")
    if kind is not Kind.EMBEDDINGS:
        done["content"]["text/event-stream"] = {"schema": {"$ref": "#/components/schemas/Event"}}
    return {
        "summary": _TITLES[kind],
        "operationId": kind.name.lower(),
        "requestBody": {"required": True, "content": {"application/json": {"schema": _request(kind, settings)}}},
        "responses": {"200": done, **{status: _answer(why, "Error") for status, why in _FAILURES.items()}},
    }


def _reading(title: str, schema: str) -> dict[str, Any]:
    failures = {status: _answer(_FAILURES[status], "Error") for status in _READ_FAILURES}
    return {"summary": title, "responses": {"200": _answer(title, schema), **failures}}


def _answer(text: str, schema: str) -> dict[str, Any]:
    return {
        "description": text,
        "headers": {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}},
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _request(kind: Kind, settings: Settings) -> Schema:
    limits = settings.limits
    fields: dict[str, Schema] = {
        "model": {"type": "string", "minLength": 1},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {"type": ["object", "null"]},
        "n": _integer(1, limits.max_n),
        "logprobs": {"anyOf": [{"type": "boolean"}, _integer(0, limits.max_logprobs)]},
        "top_logprobs": {"anyOf": [{"type": "boolean"}, _integer(0, limits.max_logprobs)]},
        "prompt_logprobs": {"anyOf": [{"type": "boolean"}, _integer(-1, limits.max_logprobs)]},
    }
    if kind is not Kind.EMBEDDINGS:
        least = 0 if kind is Kind.COMPLETIONS else 1
        fields |= {name: _integer(least, limits.max_answer_tokens or MOST_INTEGER) for name in _INTEGER_LIMITS}
    refused = [*REFUSED_FIELDS]
    refused += [] if settings.policy.allow_truncation else ["truncate_prompt_tokens"]
    refused += [] if settings.policy.allow_chat_template else ["chat_template"]
    fields |= {name: {"type": "null", "description": "Clients can't set it here."} for name in refused}
    name, schema = _prompt(kind, limits.max_prompts)
    body: Schema = {"type": "object", "properties": {**fields, name: schema}, "required": ["model"]}
    if kind is Kind.EMBEDDINGS:  # engines embed a chat as well
        chat = {"properties": {"messages": _MESSAGES}, "required": ["messages"]}
        return {**body, "anyOf": [{"required": [name]}, chat]}
    return {**body, "required": ["model", name]}


def _prompt(kind: Kind, most: int) -> tuple[str, Schema]:
    if kind in (Kind.CHAT, Kind.MESSAGES):
        return "messages", _MESSAGES
    if kind is Kind.RESPONSES:
        return "input", {"type": ["string", "array"]}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    several_kinds = [{**several, "items": {"type": "string"}}, {**several, "items": ids}]
    return "prompt" if kind is Kind.COMPLETIONS else "input", {"anyOf": [{"type": "string"}, ids, *several_kinds]}


def _integer(least: int, most: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}


_TEXT: Schema = {"type": "string"}
_MESSAGES: Schema = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_NO_TEXT: Schema = {"type": ["string", "null"]}
_SCHEMAS: dict[str, Schema] = {
    "Answer": {"type": "object"},
    "Event": {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]},
    "Status": {"type": "object", "properties": {"status": _TEXT, "reason": _TEXT}, "required": ["status"]},
    "Model": {
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": _TEXT,
            "max_model_len": {"type": ["integer", "null"]},
        },
        "required": ["id", "object", "created", "owned_by"],
    },
    "Models": {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
        "required": ["object", "data"],
    },
    "Error": {
        "type": "object",
        "properties": {
            "type": {"const": "error", "description": "On /v1/messages only."},
            "error": {
                "type": "object",
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _NO_TEXT,
                    "code": {"type": ["string", "integer", "null"]},
                },
                "required": ["message", "type"],
            },
        },
        "required": ["error"],
    },
}
