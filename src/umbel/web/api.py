"""The API's routes and its OpenAPI document, both made from the table of endpoints.

A request is decoded by the types of its endpoint (parameters that the endpoint does not have are refused),
and the answer is encoded as JSON.
"""

import re
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.version import VERSION
from umbel.web.endpoints import ENDPOINTS, ApiCall, Endpoint, NoQuery
from umbel.web.http import PROBLEM_TYPE, Problem, Refused, as_json
from umbel.web.hub import stream

API = "/api/v1"

# ---- routes ----------------------------------------------------------------------------------------

JSON = "application/json"


def routes() -> list[BaseRoute]:
    """Return the routes of the API, of its event stream and of its OpenAPI document."""
    return [
        *(
            Route(API + endpoint.path, _handler(endpoint), methods=[endpoint.method])
            for endpoint in ENDPOINTS
        ),
        Route(f"{API}/stream", stream),
        Route("/api/openapi.json", _document),
    ]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        query = _converted(dict(request.query_params), endpoint.query)
        body = await _body(request, endpoint.body) if endpoint.body is not None else None
        answer = endpoint.ask(ApiCall(request, query, body))
        return as_json(await answer if isawaitable(answer) else answer)

    return handle


def _converted(given: dict[str, str], wanted: type[Any]) -> Any:
    unknown = sorted(given.keys() - set(wanted.__struct_fields__))
    if unknown:
        known = ", ".join(wanted.__struct_fields__) or "none"
        raise Refused(400, "Bad Request", f"unknown parameter {unknown[0][:100]!r}; known: {known}")
    try:
        return msgspec.convert(given, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, "Bad Request", str(error)) from None


async def _body(request: Request, wanted: Any) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise Refused(415, "Unsupported Media Type", f"send {JSON}, not {kind[:100] or 'nothing'}")
    try:
        return msgspec.json.decode(await request.body(), type=wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(400, "Bad Request", str(error)) from None
    except RecursionError:
        detail = "the body of the request is nested too deep; send fewer levels of lists and objects"
        raise Refused(400, "Bad Request", detail) from None


async def _document(request: Request) -> Response:
    return as_json(document(request.scope.get("root_path", "")))


# ---- openapi ---------------------------------------------------------------------------------------

REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def document(root_path: str) -> dict[str, Any]:
    """Return the OpenAPI document of the API, mounted below `root_path`."""
    types = [kind for endpoint in ENDPOINTS for kind in (endpoint.answer, endpoint.body or Any)]
    (problem, *schemas), components = msgspec.json.schema_components([Problem, *types], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, answer, body in zip(ENDPOINTS, schemas[::2], schemas[1::2], strict=True):
        operations = paths.setdefault(_PARAMETER.sub(r"{\1}", API + endpoint.path), {})
        operations[endpoint.method.lower()] = _operation(endpoint, answer, body, problem)
    paths[f"{API}/stream"] = {"get": _stream(problem)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Umbel",
            "version": VERSION,
            "description": "Monitor and control a cluster of workers.",
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
    if endpoint.body is not None:
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
    return {"description": "A problem document (RFC 9457).", "content": {PROBLEM_TYPE: {"schema": schema}}}


def _stream(problem: Any) -> dict[str, Any]:
    text = {"type": "string", "description": "Server-sent events, named by topic."}
    return {
        "operationId": "get_stream",
        "summary": "Changes as server-sent events; `Last-Event-ID` or `since` resumes.",
        "parameters": [
            {"name": "topics", "in": "query", "schema": {"type": "string"}},
            {"name": "since", "in": "query", "schema": {"type": "string"}},
        ],
        "responses": {
            "200": {"description": "A stream.", "content": {"text/event-stream": {"schema": text}}},
            "default": _problem(problem),
        },
    }
