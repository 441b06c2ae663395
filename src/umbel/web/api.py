"""The API's routes: each request is read by the types of its endpoint, and answered as JSON."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.web.endpoints import ENDPOINTS, Call, Endpoint
from umbel.web.hub import STREAMS_MAX, TOPICS, EventStream, Hub
from umbel.web.openapi import API, document
from umbel.web.problems import Refused, as_json
from umbel.web.site import site_of, visitor_of

JSON = "application/json"


def routes(hub: Hub) -> list[BaseRoute]:
    found: list[BaseRoute] = [Route(API + one.path, _handler(one), methods=[one.method]) for one in ENDPOINTS]
    found.append(Route(f"{API}/stream", _streaming(hub), methods=["GET"]))
    found.append(Route("/api/openapi.json", _document, methods=["GET"]))
    return found


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        query = _converted(dict(request.query_params), endpoint.query)
        body = await _body(request, endpoint.body) if endpoint.body is not None else None
        call = Call(site_of(request), visitor_of(request), dict(request.path_params), query, body)
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
        topics = [one for one in request.query_params.get("topics", "").split(",") if one]
        unknown = [one for one in topics if one not in TOPICS]
        if unknown:
            known = ", ".join(TOPICS)
            raise Refused(400, "Bad Request", f"unknown topic {unknown[0][:100]!r}; known: {known}")
        last = request.headers.get("last-event-id", "")
        number = int(last) if last.isdecimal() and len(last) < 20 else None
        known = request.scope["umbel.still_known"]
        return EventStream(  # type: ignore[return-value]  # an ASGI app too
            hub, number, frozenset(topics), visitor=visitor.name, still_known=known
        )

    return stream


async def _document(request: Request) -> Response:
    return as_json(document(request.scope.get("root_path", "")))
