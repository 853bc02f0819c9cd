"""Routes with a description, and the OpenAPI document made from them: ``GET /openapi.json``."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from engine.messages.params import OPTIONAL_WHOLE_RANGES, REAL_RANGES, WHOLE_RANGES
from engine.server.errors import is_anthropic, is_ollama
from engine.server.http.answered import answered

REASONS = {
    400: "A field of the request is wrong; the message names it",
    401: "The API key is missing or wrong",
    403: "The request comes from a web page of an origin that is not allowed",
    404: "The model, the response or the path does not exist",
    405: "The path does not take this method; see the header Allow",
    408: "The request took longer than its timeout, or its body arrived too slowly",
    409: "Running requests prevent this operation",
    413: "The body is too large",
    429: "This key has too many open requests; see Retry-After",
    431: "The headers are too large",
    500: "The server failed; its log has the error",
    503: "The queue is full, or the server is shutting down; see Retry-After",
}
RANGES = {limits.field: limits for limits in (*REAL_RANGES, *WHOLE_RANGES, *OPTIONAL_WHOLE_RANGES)}
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS = {"text/event-stream": {"schema": EVENT}}
LINES = {"application/x-ndjson": {"schema": {"type": "object"}}}
ALWAYS = (400, 401, 403, 405, 408, 413, 429, 431, 500, 503)
"""Statuses that every route may return."""


class ErrorAbout(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of a response with an error."""

    error: ErrorAbout


class AnthropicErrorAbout(msgspec.Struct):
    """An error in Anthropic's form."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct):
    """The body of a response with an error, on the routes of Anthropic's API."""

    type: str
    error: AnthropicErrorAbout


class OllamaErrorAnswer(msgspec.Struct):
    """The body of a response with an error, on the routes of Ollama's API."""

    error: str


class ApiRoute(Route):
    """A route with its entry in the OpenAPI document."""

    def __init__(
        self,
        method: str,
        path: str,
        handle: Callable[[Request], Awaitable[ASGIApp]],
        takes: type[msgspec.Struct] | None = None,
        gives: Any = None,
        also: Sequence[int] = (),
    ) -> None:
        """takes, gives: types of the request and response bodies (``dict``: any object); if
        ``takes`` has a field ``stream``, the route also returns events. also: HTTP statuses that it
        returns besides ``ALWAYS`` and, if it names a model, 404."""
        super().__init__(path, answered(handle), methods=[method])
        self.method = method
        self.takes = takes
        self.gives = gives
        names = () if takes is None else takes.__struct_fields__
        self.streams = "stream" in names
        has_name = "model" in names or bool(self.param_convertors)
        self.statuses = sorted({*ALWAYS, *also, *([404] if has_name else [])})
        self.summary = (handle.__doc__ or "").strip().partition("\n")[0]


ERRORS = (ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer)


def document_of(routes: Iterable[BaseRoute], models: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document of the routes; ``models``: the served names."""
    described = [route for route in routes if isinstance(route, ApiRoute)]
    bodies = [each for route in described for each in (route.takes, route.gives) if each]
    kinds = list(dict.fromkeys([*ERRORS, *bodies]))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        for name, schema in component.get("properties", {}).items():
            _narrow(name, schema, models)
    for taken in {route.takes.__name__ for route in described if route.takes is not None}:
        properties = components[taken]["properties"]
        properties.update({name: _or_null(schema) for name, schema in properties.items()})
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        path = paths.setdefault(route.path.replace(":path}", "}"), {})
        path[route.method.lower()] = _operation(route, schema_of, models)
    about = {"title": "Metronome", "version": version("metronome-engine")}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": about,
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": key},
        "security": [{"key": []}, {}],
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow null for a field with a default, since it means the same as leaving the field out."""
    kinds = schema.get("anyOf", [schema])
    if "default" not in schema or {"type": "null"} in kinds:
        return schema
    inner = [{key: value for key, value in kind.items() if key != "default"} for kind in kinds]
    return {"anyOf": [*inner, {"type": "null"}], "default": schema["default"]}


def _narrow(name: str, schema: dict[str, Any], models: Sequence[str]) -> None:
    """Add to the schema of field ``name`` its limits: the served models, or a range of numbers."""
    kinds = schema.get("anyOf", [schema])
    if name == "model":
        schema["enum"] = [*models, *([None] if {"type": "null"} in kinds else [])]
    if name in RANGES:
        limits = RANGES[name]
        low = "exclusiveMinimum" if limits.open_low else "minimum"
        for kind in kinds:
            if kind.get("type") in ("integer", "number"):
                kind[low] = limits.low
                if math.isfinite(limits.high):
                    kind["maximum"] = limits.high


def _operation(route: ApiRoute, schema_of: dict[Any, Any], models: Sequence[str]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "Success"}
    if route.gives is not None:
        good["content"] = _json(schema_of[route.gives])
    if route.streams:
        good["content"] |= LINES if is_ollama(route.path) else EVENTS
    headers = {"X-Request-Id": {"schema": {"type": "string"}}}
    wrong = {"content": _json(schema_of[_error_of(route.path)]), "headers": headers}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {**good, "headers": headers},
            **{str(status): {"description": REASONS[status], **wrong} for status in route.statuses},
        },
    }
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json(schema_of[route.takes])}
    if names := list(route.param_convertors):
        operation["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", **({"enum": list(models)} if name == "name" else {})},
            }
            for name in names
        ]
    return operation


def _error_of(path: str) -> type[msgspec.Struct]:
    if is_anthropic(path):
        return AnthropicErrorAnswer
    return OllamaErrorAnswer if is_ollama(path) else ErrorAnswer


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
