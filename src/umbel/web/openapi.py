"""The OpenAPI document, made from the endpoints and the msgspec structs they answer with."""

import re
from typing import Any

import msgspec

from umbel.version import VERSION
from umbel.web.endpoints import ENDPOINTS, Endpoint, NoQuery
from umbel.web.problems import CONTENT_TYPE, Problem

REF = "#/components/schemas/{name}"
API = "/api/v1"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def document(root_path: str) -> dict[str, Any]:
    types = [Problem, *(one.answer for one in ENDPOINTS), *(one.body for one in ENDPOINTS if one.body)]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    problem, answers, bodies = (
        schemas[0],
        schemas[1 : 1 + len(ENDPOINTS)],
        list(schemas[1 + len(ENDPOINTS) :]),
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, answer in zip(ENDPOINTS, answers, strict=True):
        body = bodies.pop(0) if endpoint.body else None
        described = _operation(endpoint, answer, body, problem)
        paths.setdefault(_PARAMETER.sub(r"{\1}", API + endpoint.path), {})[endpoint.method.lower()] = (
            described
        )
    paths[f"{API}/stream"] = {"get": _stream(problem)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Umbel",
            "version": VERSION,
            "description": "A cluster of workers: seen and steered.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(components),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "umbel_session"},
            },
        },
        "security": [{"token": []}, {"session": []}],
    }


def _operation(endpoint: Endpoint, answer: Any, body: Any, problem: Any) -> dict[str, Any]:
    words = re.sub(r"[^a-z]+", "_", endpoint.path.lower()).rstrip("_")
    described: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}{words}",
        "summary": endpoint.summary,
        "parameters": [*_of_path(endpoint.path), *_of_query(endpoint.query)],
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            "default": _problem(problem),
        },
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def _of_path(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]


def _of_query(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    if query is NoQuery:
        return []
    (_,), components = msgspec.json.schema_components([query], ref_template=REF)
    properties = components[query.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


def _problem(schema: Any) -> dict[str, Any]:
    return {"description": "What went wrong (RFC 9457).", "content": {CONTENT_TYPE: {"schema": schema}}}


def _stream(problem: Any) -> dict[str, Any]:
    text = {"type": "string", "description": "Server-sent events, named by topic."}
    return {
        "operationId": "get_stream",
        "summary": "What changes, as it changes; `Last-Event-ID` resumes.",
        "parameters": [{"name": "topics", "in": "query", "schema": {"type": "string"}}],
        "responses": {
            "200": {"description": "A stream.", "content": {"text/event-stream": {"schema": text}}},
            "default": _problem(problem),
        },
    }
