"""The OpenAPI document of the public routes, under the limits in force.

It states what the gateway itself reads, sets and refuses. Every other field passes to the engine untouched, so requests
and answers are open objects; what vLLM makes of them stands in its own documentation.
"""

from typing import Any

from gateway import __version__
from gateway.fields import Media, Schema, media_schemas, refused_schemas
from gateway.protocol import INTEGERS, MOST_TOKEN_ID, Kind
from gateway.settings import Settings

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
    limits, policy = settings.limits, settings.policy
    fields: dict[str, Schema] = {
        "model": {"type": "string", "minLength": 1},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {"type": ["object", "null"]},
        **{name: rule.schema(limits) for name, rule in INTEGERS[kind].items()},
        **refused_schemas(policy),
        **media_schemas(policy),
    }
    prompts = _prompts(kind, limits.max_prompts)
    for name, schema in prompts.items():
        fields[name] = {**fields.get(name, {}), **schema}
    body: Schema = {"type": "object", "properties": fields, "required": ["model"]}
    if len(prompts) == 1:
        return {**body, "required": ["model", *prompts]}
    given = {"not": {"type": "null"}}
    return {**body, "anyOf": [{"properties": {name: given}, "required": [name]} for name in prompts]}


def _prompts(kind: Kind, most: int) -> dict[str, Schema]:
    """The fields of which one has to be there, and what may stand in each."""
    if kind in (Kind.CHAT, Kind.MESSAGES):
        return {"messages": _MESSAGES}
    if kind is Kind.RESPONSES:
        return {"input": {"type": ["string", "array"]}}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKEN_ID}}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    forms: list[Schema] = [{"type": "string"}, ids, {**several, "items": _TEXT}, {**several, "items": ids}]
    if kind is Kind.COMPLETIONS:
        return {"prompt": {"anyOf": forms}}
    # Engines embed a chat as well.
    return {"input": {"anyOf": [*forms, _NULL]}, "messages": {**_MESSAGES, "type": ["array", "null"]}}


_TEXT: Schema = {"type": "string"}
_NULL: Schema = {"type": "null"}
_MESSAGES: Schema = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_NO_TEXT: Schema = {"type": ["string", "null"]}
_SCHEMAS: dict[str, Schema] = {
    **Media.SCHEMAS,
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
