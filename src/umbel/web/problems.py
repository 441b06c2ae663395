"""Problems: errors of a request as RFC 9457 problem documents."""

from typing import Any

import msgspec
from starlette.responses import Response

CONTENT_TYPE = "application/problem+json"


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document; `type` is `about:blank` if the status says all."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class Refused(Exception):
    """A request that is answered with a problem document."""

    def __init__(self, status: int, title: str, detail: str = "", **headers: str) -> None:
        super().__init__(detail or title)
        self.problem = Problem(title=title, status=status, detail=detail)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Forbidden(Refused):
    """A request that the visitor's role or origin does not allow; status 403."""

    def __init__(self, detail: str) -> None:
        super().__init__(403, "Forbidden", detail)


def answer(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """Return the response of a problem."""
    return Response(msgspec.json.encode(problem), problem.status, headers, media_type=CONTENT_TYPE)


def as_json(value: Any, status: int = 200) -> Response:
    """Return a response with the value as JSON."""
    return Response(msgspec.json.encode(value, enc_hook=str), status, media_type="application/json")
