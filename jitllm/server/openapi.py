"""The OpenAPI document, made of the tables that read the requests: what it says is what is done."""

from collections.abc import Mapping
from typing import Any

from jitllm import __version__
from jitllm.server import bodies
from jitllm.server.fields import Kind, object_schema
from jitllm.server.protocol import CHAT, COMPLETION

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OBJECT: dict[str, Any] = {"type": "object"}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
}
_REPLY = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage", "jitllm"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": _OBJECT},
        "usage": _USAGE,
        "jitllm": _OBJECT,
    },
}
_LIST = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _OBJECT}},
}
_PROFILE = {
    "type": "object",
    "required": ["file", "hash"],
    "properties": {"file": {"type": ["string", "null"]}, "hash": {"type": "string"}},
}
_MODEL_FIELDS = {
    "id": {"type": "string"},
    "object": {"const": "model"},
    "created": {"type": "integer"},
    "owned_by": {"type": "string"},
    "file": {"type": "string"},
    "context_tokens": {"type": "integer"},
    "kv": {"enum": ["f16", "f32"]},
    "threads": {"type": "integer"},
    "process_limit_bytes": {"type": ["integer", "null"]},
    "kernels": {"type": "string"},
    "blocks": {"type": "object", "additionalProperties": {"type": "integer"}},
    "profile": _PROFILE,
}
_MODEL = {
    "type": "object",
    "required": list(_MODEL_FIELDS),
    "properties": _MODEL_FIELDS,
    "additionalProperties": False,
}
_MODELS = _LIST | {"properties": _LIST["properties"] | {"data": {"type": "array", "items": _MODEL}}}
_EVENT = {
    "type": "object",
    "description": "One server-sent event: data is a JSON object, or [DONE] at the end of a reply",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_WATCH = {
    "name": "watch",
    "in": "query",
    "description": "Seconds; the figures come again and again, as server-sent events",
    "schema": {"type": "number", "minimum": 0.1, "maximum": 3600},
}


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jitllmd",
            "version": __version__,
            "description": "OpenAI's API for models held to a memory budget, and the control of it",
        },
        "paths": _paths(),
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _paths() -> dict[str, Any]:
    model, session = "/jitllm/models/{id}", "/jitllm/sessions/{id}"
    move = _post("Blocks to a device", bodies.MOVE, required=("first", "last", "to"))
    return {
        "/healthz": {"get": _get("Whether requests are answered")},
        "/metrics": {"get": _get("Figures for Prometheus", mimetype="text/plain")},
        "/openapi.json": {"get": _get("This document")},
        "/v1/models": {"get": _get("The models that are loaded", _MODELS)},
        "/v1/models/{id}": {"parameters": [_ID], "get": _get("One loaded model", _MODEL)},
        "/v1/completions": {"post": _text("What follows a prompt", COMPLETION, "prompt")},
        "/v1/chat/completions": {"post": _text("The reply to a conversation", CHAT, "messages")},
        "/jitllm/models": {
            "get": _get("What is loaded, and what could be", _MODELS),
            "post": _post("Load a file", bodies.LOAD, ("file",), "201", _MODEL),
        },
        model: {
            "parameters": [_ID],
            "get": _get("One loaded model", _MODEL),
            "delete": _operation("Put it away", _OBJECT),
        },
        f"{model}/budget": {
            "parameters": [_ID],
            "get": _get("The budget and what it comes to"),
            "put": _post("Another budget", bodies.BUDGET, required=("maxmem",)),
        },
        f"{model}/residency": {"parameters": [_ID], "get": _get("Which blocks are in memory")},
        f"{model}/placement": {
            "parameters": [_ID],
            "get": _get("Where every part is, and why"),
            "put": _post("Another placement", bodies.PLACEMENT, required=("placement",)),
        },
        f"{model}/placement/moves": {"parameters": [_ID], "post": move},
        "/jitllm/sessions": {
            "get": _get("All sessions", _LIST),
            "post": _post("Another session", bodies.SESSION, status="201"),
        },
        session: {
            "parameters": [_ID],
            "get": _get("One session"),
            "delete": _operation("Put it away", _OBJECT),
        },
        f"{session}/reset": {
            "parameters": [_ID],
            "post": _post("Forget the conversation", bodies.NOTHING),
        },
        f"{session}/placement": {
            "parameters": [_ID],
            "get": _get("Where its blocks are"),
            "put": _post("Another placement", bodies.PLACEMENT, required=("placement",)),
        },
        f"{session}/placement/moves": {"parameters": [_ID], "post": move},
        "/jitllm/devices": {"get": _get("The memory that can be spent", _LIST)},
        "/jitllm/stats": {
            "get": _streams(_get("Everything that is counted")) | {"parameters": [_WATCH]}
        },
    }


def _get(
    what: str, schema: dict[str, Any] = _OBJECT, mimetype: str = "application/json"
) -> dict[str, Any]:
    if mimetype != "application/json":
        schema = {"type": "string"}
    return _operation(what, schema, mimetype=mimetype)


def _post(
    what: str,
    table: Mapping[str, Kind],
    required: tuple[str, ...] = (),
    status: str = "200",
    schema: dict[str, Any] = _OBJECT,
) -> dict[str, Any]:
    body = {"content": {"application/json": {"schema": object_schema(table, required)}}}
    needed = {"required": bool(required)}
    return _operation(what, schema, status) | {"requestBody": body | needed}


def _text(what: str, table: Mapping[str, Kind], required: str) -> dict[str, Any]:
    operation = _post(what, table, (required,))
    operation["responses"]["200"]["content"]["application/json"]["schema"] = _REPLY
    return _streams(operation)


def _streams(operation: dict[str, Any]) -> dict[str, Any]:
    """`operation`, which can answer with events as well. OpenAPI 3.1 describes one of them."""
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return operation


def _operation(
    what: str, schema: dict[str, Any], status: str = "200", mimetype: str = "application/json"
) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": what,
        "responses": {
            status: {"description": what, "content": {mimetype: {"schema": schema}}},
            "default": {"description": "Why it cannot be", "content": error},
        },
    }
