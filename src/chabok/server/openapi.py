"""The description of the server's interfaces for programs: an OpenAPI 3.1 document, made from the routes.

A route's summary is the first line of its handler's docstring, its body the struct that the handler reads.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from chabok import __version__
from chabok.server.call import Call, Endpoint
from chabok.server.errors import Dialect, dialect_of, encode

PATH = "/openapi.json"

_STATUSES = {
    400: "The request is wrong; the message names the field",
    401: "No key, or a wrong one",
    403: "The key does not allow this",
    404: "No such model",
    408: "The body took too long",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too many requests; Retry-After says when to come back",
    500: "The server failed",
    503: "The server is stopping, or the model cannot be loaded",
    504: "The deadline passed before the answer began",
}

_TEXT = {"type": "string"}
_NULLABLE = {"type": ["string", "null"]}
_ERRORS: dict[Dialect, dict[str, Any]] = {
    "openai": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE},
            }
        },
    },
    "anthropic": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
    "ollama": {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
}
_NAMES: dict[Dialect, str] = {"openai": "OpenAIError", "anthropic": "AnthropicError", "ollama": "OllamaError"}
_STREAMS: dict[Dialect, str] = {
    "openai": "text/event-stream",
    "anthropic": "text/event-stream",
    "ollama": "application/x-ndjson",
}


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The document of the routes whose endpoints are handlers of calls."""
    found = [
        (route, route.endpoint)
        for route in routes
        if isinstance(route, Route) and isinstance(route.endpoint, Endpoint)
    ]
    kinds = [endpoint.body.kind for _, endpoint in found if endpoint.body is not None]
    bodies, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    refs = dict(zip(kinds, bodies, strict=True))
    schemas |= {_NAMES[dialect]: schema for dialect, schema in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for route, endpoint in found:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                operation = _operation(path, endpoint, refs)
                operation["operationId"] = f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', path)}"
                paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Chabok",
            "version": __version__,
            "description": "Language models behind the interfaces of OpenAI, Anthropic and Ollama.",
        },
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}, {}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, endpoint: Endpoint, refs: dict[type, Any]) -> dict[str, Any]:
    dialect = dialect_of(path)
    error = {"schema": {"$ref": f"#/components/schemas/{_NAMES[dialect]}"}}
    ok: dict[str, Any] = {"application/json": {}}
    if endpoint.body is not None:
        ok[_STREAMS[dialect]] = {}
    if path == "/metrics":
        ok = {"text/plain": {}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": ok}}
    for status, description in _STATUSES.items():
        responses[str(status)] = {"description": description, "content": {"application/json": error}}
    summary = (inspect.getdoc(endpoint.handler) or "").partition("\n")[0]
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if endpoint.body is not None:
        schema = refs[endpoint.body.kind]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return operation


def routes() -> list[BaseRoute]:
    """The path of the document."""
    return [Route(PATH, Endpoint(describe), methods=["GET"])]


async def describe(call: Call) -> None:
    """This document."""
    await call.answer(_encoded(call.server.settings.page), "application/json")


@cache
def _encoded(page: bool) -> bytes:
    from chabok.server.app import routes

    return encode(document(routes(page=page)))
