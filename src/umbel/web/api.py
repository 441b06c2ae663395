"""The API's routes and its OpenAPI document, both made from the table of endpoints.

Each request is decoded by the types of its endpoint, and answered as JSON.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.version import VERSION
from umbel.web.endpoints import ENDPOINTS, ApiCall, Endpoint, NoQuery
from umbel.web.hub import STREAMS_MAX, TOPICS, EventStream, Hub
from umbel.web.problems import CONTENT_TYPE, Problem, Refused, as_json
from umbel.web.site import caller_of, visitor_of

# ---- openapi ---------------------------------------------------------------------------------------
#
# The OpenAPI document, made from the endpoints and the msgspec structs they answer with.

REF = "#/components/schemas/{name}"
API = "/api/v1"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def document(root_path: str) -> dict[str, Any]:
    """Return the OpenAPI document of the API, mounted below `root_path`."""
    types = [Problem, *(item.answer for item in ENDPOINTS), *(item.body for item in ENDPOINTS if item.body)]
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
    return {"description": "A problem document (RFC 9457).", "content": {CONTENT_TYPE: {"schema": schema}}}


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


# ---- the api's routes ------------------------------------------------------------------------------
#
# Each request is read by the types of its endpoint, and answered as JSON.

JSON = "application/json"


def routes(hub: Hub) -> list[BaseRoute]:
    """Return the routes of the API, of its event stream and of its OpenAPI document."""
    found: list[BaseRoute] = [
        Route(API + item.path, _handler(item), methods=[item.method]) for item in ENDPOINTS
    ]
    found.append(Route(f"{API}/stream", _streaming(hub), methods=["GET"]))
    found.append(Route("/api/openapi.json", _document, methods=["GET"]))
    return found


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        query = _converted(dict(request.query_params), endpoint.query)
        body = await _body(request, endpoint.body) if endpoint.body is not None else None
        call = ApiCall(caller_of(request), dict(request.path_params), query, body)
        return as_json(await endpoint.ask(call))

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
        raise Refused(
            400,
            "Bad Request",
            "the body of the request is nested too deep; send fewer levels of lists and objects",
        ) from None


def _streaming(hub: Hub) -> Callable[[Request], Awaitable[Response]]:
    async def stream(request: Request) -> Response:
        if hub.is_full:
            raise Refused(
                503,
                "Too many streams",
                "too many pages are open; close some, and try again",
                retry_after="10",
            )
        visitor = visitor_of(request)
        if hub.has_many_of(visitor.name):
            detail = f"{visitor.name} has {STREAMS_MAX} pages open; close some"
            raise Refused(429, "Too many streams", detail, retry_after="10")
        topics = [topic for topic in request.query_params.get("topics", "").split(",") if topic]
        unknown = [topic for topic in topics if topic not in TOPICS]
        if unknown:
            known = ", ".join(TOPICS)
            raise Refused(400, "Bad Request", f"unknown topic {unknown[0][:100]!r}; known: {known}")
        # A browser that reconnects sends the header; a page names the push after which it was rendered.
        last = request.headers.get("last-event-id") or request.query_params.get("since", "")
        number = int(last) if last.isdecimal() and len(last) < 20 else None
        known = request.scope["umbel.still_known"]
        return EventStream(  # type: ignore[return-value]  # an ASGI app too
            hub, number, frozenset(topics), visitor=visitor.name, still_known=known
        )

    return stream


async def _document(request: Request) -> Response:
    return as_json(document(request.scope.get("root_path", "")))
